// Charts over steps: lines of several runs, marks for events, and one cursor for all charts.
import { colour, element, prepare, ticks } from "./dom.js";

const [LEFT, RIGHT, TOP, AXIS, HEIGHT] = [58, 8, 6, 20, 190];

export class Cursor { // the step that all charts show
  constructor() { this.step = null; this.charts = []; }
  show(step) { this.step = step; this.charts.forEach(chart => chart.draw()); }
}

export class StepChart {
  constructor(cursor, title, format, { zero = false, tickFormat = format, binary = false } = {}) {
    Object.assign(this, { cursor, title, format, zero, tickFormat, binary, lines: [], marks: [] });
    this.output = element("output");
    this.canvas = element("canvas", { tabIndex: 0, role: "img" });
    this.scale = element("small", { hidden: true }, ", logarithmic");
    this.figure = element("figure", { class: "chart" }, element("figcaption", {}, element("span", {}, element("b", {}, title), this.scale), this.output), this.canvas);
    cursor.charts.push(this);
    const move = event => { const box = this.canvas.getBoundingClientRect(); cursor.show(Math.round(this.low + (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT) * (this.high - this.low))); };
    this.canvas.addEventListener("pointermove", move); this.canvas.addEventListener("pointerdown", move);
    this.canvas.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") cursor.show(null); });
    this.canvas.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") cursor.show(null);
      if (!by) return;
      event.preventDefault();
      cursor.show(Math.max(this.low, Math.min(this.high, (cursor.step ?? this.high) + by * (event.shiftKey ? 10 : 1))));
    });
  }

  // Lines are {name, run, step, values, style}; style is strong, thin, points or dashed. Marks are {step, name}.
  set(lines, marks = []) {
    this.lines = lines.filter(line => line.step.length); this.marks = marks;
    this.figure.hidden = !this.lines.some(line => line.values.some(value => Number.isFinite(value)));
    this.draw();
  }

  range() {
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    const positive = [];
    for (const { step, values } of this.lines) {
      first = Math.min(first, step[0]); last = Math.max(last, step[step.length - 1]);
      for (const value of values) if (Number.isFinite(value) && Math.abs(value) < 1e30) { low = Math.min(low, value); high = Math.max(high, value); if (value > 0) positive.push(value); }
    }
    if (low > high) return null;
    this.low = first; this.high = Math.max(last, first + 1);
    positive.sort((a, b) => a - b);
    const log = !this.zero && low > 1e-30 && high > 20 * positive[positive.length >> 1];
    if (log) return [Math.log10(low / 1.1), Math.log10(high * 1.1), true];
    if (this.zero) low = Math.min(low, 0);
    const margin = high > low ? (high - low) * .05 : Math.abs(high) * .1 || 1;
    return [this.zero && low === 0 ? 0 : low - margin, high + margin, false];
  }

  draw() {
    if (!this.canvas.isConnected || this.figure.hidden) return;
    const range = this.range();
    if (!range) return;
    const [low, high, log] = range, [c, width] = prepare(this.canvas, HEIGHT), bottom = HEIGHT - AXIS;
    const x = step => LEFT + (step - this.low) / (this.high - this.low) * (width - LEFT - RIGHT), y = value => bottom - ((log ? Math.log10(Math.max(value, 1e-30)) : value) - low) / (high - low) * (bottom - TOP);
    c.fillStyle = colour("--row"); c.fillRect(LEFT, TOP, width - LEFT - RIGHT, bottom - TOP);
    c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle"; c.strokeStyle = colour("--line"); c.fillStyle = colour("--soft"); c.lineWidth = 1;
    c.beginPath(); c.textAlign = "right";
    const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(high, 1)) / 10));
    const values = log ? ticks(low, high, 4).filter(Number.isInteger).map(power => 10 ** power) : this.binary && high > 1 ? ticks(low / unit, high / unit, 4).map(value => value * unit) : ticks(low, high, 4);
    for (const value of values) { const at = Math.round(y(value)) + .5; c.moveTo(LEFT, at); c.lineTo(width - RIGHT, at); c.fillText(this.tickFormat(value), LEFT - 6, at); }
    c.textAlign = "center";
    for (const step of ticks(this.low, this.high, width / 120).filter(Number.isInteger)) { const at = Math.round(x(step)) + .5; c.moveTo(at, TOP); c.lineTo(at, bottom); c.fillText(step.toLocaleString("en"), Math.min(at, width - 14), bottom + 11); }
    c.stroke();
    c.save(); c.beginPath(); c.rect(LEFT, TOP - 2, width - LEFT - RIGHT, bottom - TOP + 4); c.clip();
    for (const { step, name } of this.marks) { c.fillStyle = colour({ recovery: "--bad", replan: "--warm", end: "--ink" }[name] || "--good"); c.fillRect(x(step) - .75, bottom - (name === "checkpoint" ? 8 : 26), 1.5, 26); }
    for (const line of this.lines) this.drawLine(c, line, x, y);
    if (this.cursor.step !== null) { c.fillStyle = colour("--ink"); c.fillRect(x(this.cursor.step) - .5, TOP, 1, bottom - TOP); }
    c.restore();
    this.scale.hidden = !log;
    this.output.textContent = this.readout();
    this.canvas.setAttribute("aria-label", `${this.title} over the steps. ${this.output.textContent}`);
  }

  drawLine(c, { run, step, values, style }, x, y) {
    c.strokeStyle = c.fillStyle = colour(`--run${run % 6}`);
    c.lineWidth = style === "thin" ? 1 : 1.8; c.globalAlpha = style === "thin" ? .35 : 1;
    c.setLineDash(style === "dashed" ? [6, 4] : []);
    c.beginPath();
    let pen = false, column = -1, high = 0, low = 0; // per column of pixels only the extremes
    for (let i = 0; i < step.length; i++) {
      if (!Number.isFinite(values[i])) { pen = false; continue; }
      const px = x(step[i]), py = y(values[i]);
      if (pen && px - column < .5) { if (py < high) { high = py; c.lineTo(px, py); } else if (py > low) { low = py; c.lineTo(px, py); } continue; }
      if (pen) c.lineTo(px, py); else c.moveTo(px, py);
      pen = true; column = px; high = low = py;
    }
    c.stroke(); c.setLineDash([]); c.globalAlpha = 1;
    if (style === "points" || step.length === 1) for (let i = 0; i < step.length; i++) if (Number.isFinite(values[i])) { c.beginPath(); c.arc(x(step[i]), y(values[i]), step.length > 40 ? 2 : 3.5, 0, 7); c.fill(); }
  }

  readout() {
    const last = Math.max(...this.lines.map(line => line.step[line.step.length - 1])), shown = this.cursor.step ?? last, parts = [];
    for (const { name, step, values, style } of this.lines) {
      if (style === "thin" && this.lines.some(other => other.name === name && other.style === "strong")) continue;
      let low = 0, high = step.length - 1;
      while (low < high) { const middle = (low + high + 1) >> 1; if (step[middle] <= shown) low = middle; else high = middle - 1; }
      const value = values[low], at = step[low] === shown ? "" : ` at ${step[low].toLocaleString("en")}`; // a run may end earlier
      parts.push([`${name ? name + " " : ""}${Number.isFinite(value) ? this.format(value) : String(value)}${at}`, value]);
    }
    if (parts.length > 5) { // too many to list
      const values = parts.map(part => part[1]).filter(Number.isFinite);
      return `step ${shown.toLocaleString("en")}: ${this.format(Math.min(...values))} to ${this.format(Math.max(...values))}`;
    }
    return `step ${shown.toLocaleString("en")}: ${parts.map(part => part[0]).join(", ")}`;
  }
}

// An exponential moving average over about a fiftieth of all values, as in the report.
export function smoothed(values) {
  const decay = 1 - 1 / Math.max(5, values.length / 50), averages = new Float32Array(values.length);
  let total = 0, weight = 0;
  values.forEach((value, i) => {
    if (Number.isFinite(value)) { total = decay * total + value; weight = decay * weight + 1; }
    averages[i] = weight ? total / weight : NaN;
  });
  return averages;
}
