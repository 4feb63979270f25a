// The chart of a timeline: a row per rank with its actions, its memory below them, the critical path, and what an
// action waits for. Times and structure are those of arrays.py.
import { colour, element, hideTip, number, percent, prepare, showTip, ticks } from "./dom.js";

const KINDS = "FBIW";
const AXIS = 22;

function arrow(c, x0, y0, x1, y1) {
  const length = Math.hypot(x1 - x0, y1 - y0), [dx, dy] = length ? [(x1 - x0) / length, (y1 - y0) / length] : [0, 0];
  c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1);
  if (length > 8) { c.moveTo(x1 - 6 * dx - 3 * dy, y1 - 6 * dy + 3 * dx); c.lineTo(x1, y1); c.lineTo(x1 - 6 * dx + 3 * dy, y1 - 6 * dy - 3 * dx); }
  c.stroke();
}

// Charts that share a view show the same part of the time axis.
export class View {
  constructor() { this.from = 0; this.to = 1; this.until = 1; this.charts = []; this.waiting = false; }
  add(chart) { this.charts.push(chart); }
  fit() { // keep the visible share of the step when its length changes
    const until = Math.max(...this.charts.map(chart => chart.times ? chart.times.makespan : 0)) || 1, ratio = until / this.until;
    this.from *= ratio; this.to *= ratio; this.until = until;
  }
  whole() { this.from = 0; this.to = this.until; this.redraw(); }
  zoom(factor, centre = (this.from + this.to) / 2) {
    const span = Math.min(this.until, Math.max((this.to - this.from) * factor, this.until / 1e4)), share = (centre - this.from) / (this.to - this.from);
    this.from = centre - share * span; this.to = this.from + span; this.clamp();
  }
  move(by) { this.from += by; this.to += by; this.clamp(); }
  clamp() {
    const span = this.to - this.from;
    if (this.from < 0) { this.from = 0; this.to = span; }
    if (this.to > this.until) { this.to = this.until; this.from = this.until - span; }
    this.redraw();
  }
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.charts.forEach(chart => chart.draw()); document.dispatchEvent(new Event("drawn")); });
  }
}

export class Gantt {
  constructor(view, looks, { format = number, memoryFormat = number, onselect = () => {} } = {}) {
    Object.assign(this, { view, looks, format, memoryFormat, onselect, structure: null, times: null, selected: -1, hover: -1, cap: null, showMemory: true, showCritical: false });
    this.canvas = element("canvas", { class: "gantt", tabIndex: 0, role: "img" });
    view.add(this);
    this.listen();
  }

  set(structure, times) {
    if (structure) { this.structure = structure; if (this.selected >= structure.kind.length) this.selected = -1; this.hover = -1; }
    this.times = times;
    const { name } = this.structure;
    this.canvas.setAttribute("aria-label", `Gantt chart of ${name}: makespan ${this.format(times.makespan)}, bubble ${percent(times.bubble)}. Arrow keys go from action to action, plus and minus zoom.`);
  }
  clear() { this.structure = this.times = null; }

  letter(i) { return this.structure.pair[i] ? "&" : KINDS[this.structure.kind[i]]; }
  label(i) {
    const s = this.structure;
    return s.pair[i] ? `F${s.microbatch[i]}&B${s.microbatch[i + 1]}` : KINDS[s.kind[i]] + s.microbatch[i];
  }
  text(i) {
    const s = this.structure, one = at => `${KINDS[s.kind[at]]} of stage ${s.stage[at]}, microbatch ${s.microbatch[at]}`;
    return s.pair[i] ? `${one(i)}, with ${one(i + 1)}` : one(i);
  }
  rankOf(i) { const { bounds } = this.structure; let rank = 0; while (bounds[rank + 1] <= i) rank++; return rank; }
  head(i) { return i > 0 && this.structure.pair[i - 1] ? i - 1 : i; } // a pair is one box

  layout() {
    const ranks = this.structure.ranks, row = ranks > 48 ? 8 : ranks > 24 ? 13 : 21, memory = this.showMemory ? (ranks > 24 ? 6 : 13) : 0;
    return { row, memory, pitch: row + memory + (memory ? 4 : 3), left: innerWidth < 600 ? 34 : 62, height: ranks * (row + memory + (memory ? 4 : 3)) + AXIS };
  }
  x(time, width, left) { return left + (time - this.view.from) / (this.view.to - this.view.from) * (width - left - 6); }

  draw() {
    const s = this.structure, t = this.times;
    if (!s || !this.canvas.isConnected) return;
    const { row, memory, pitch, left, height } = this.layout(), [c, width] = prepare(this.canvas, height);
    const scale = (width - left - 6) / (this.view.to - this.view.from), origin = left - this.view.from * scale;
    const ink = colour("--ink"), soft = colour("--soft"), rowFill = colour("--row");
    c.textBaseline = "middle"; c.textAlign = "right"; c.font = "12px system-ui, sans-serif"; c.fillStyle = ink;
    const every = pitch < 12 ? 8 : 1;
    for (let rank = 0; rank < s.ranks; rank += every) c.fillText((left < 40 ? "r" : "rank ") + rank, left - 6, rank * pitch + row / 2);
    c.save(); c.beginPath(); c.rect(left, 0, width - left, height); c.clip();
    c.fillStyle = rowFill;
    for (let rank = 0; rank < s.ranks; rank++) c.fillRect(origin, rank * pitch, t.makespan * scale, row);
    this.drawBoxes(c, scale, origin, width, row, pitch);
    if (memory) this.drawMemory(c, scale, origin, width, row, memory, pitch);
    if (this.showCritical) this.drawCritical(c, scale, origin, row, pitch);
    this.drawWaits(c, scale, origin, row, pitch, ink);
    c.restore();
    const y = s.ranks * pitch;
    c.strokeStyle = c.fillStyle = soft; c.lineWidth = 1; c.textAlign = "center"; c.font = "11px system-ui, sans-serif";
    c.beginPath(); c.moveTo(left, y + .5); c.lineTo(width - 6, y + .5);
    for (const tick of ticks(this.view.from, this.view.to, width / 110)) {
      const at = this.x(tick, width, left), words = this.format(tick);
      c.moveTo(at, y); c.lineTo(at, y + 4);
      c.fillText(words, Math.min(at, width - 3 - c.measureText(words).width / 2), y + 13);
    }
    c.stroke();
  }

  drawBoxes(c, scale, origin, width, row, pitch) {
    const { kind, pair, odd, bounds, ranks } = this.structure, { start, end } = this.times, boxes = [];
    // One colour after the other: changing the colour is what costs.
    const styles = [...KINDS, "&"].flatMap(letter => [0, 1].map(pale => ({ look: this.looks[letter], pale, items: [] })));
    for (let rank = 0; rank < ranks; rank++) {
      for (let i = bounds[rank]; i < bounds[rank + 1]; i++) {
        const left = origin + start[i] * scale, wide = (end[i] - start[i]) * scale;
        if (left <= width && left + wide >= 0) styles[(pair[i] ? 8 : 2 * kind[i]) + odd[i]].items.push(i, left, wide, rank * pitch);
        if (pair[i]) i++;
      }
    }
    for (const { look, pale, items } of styles) {
      if (!items.length) continue;
      c.fillStyle = look[pale ? 2 : 1];
      for (let k = 0; k < items.length; k += 4) {
        const wide = items[k + 2];
        c.fillRect(items[k + 1], items[k + 3], wide > 4 ? wide - 1 : wide > 2 ? wide - .5 : wide + .2, row);
        if (wide > 13 && row > 10) boxes.push(items[k], items[k + 1] + wide / 2, wide, items[k + 3] + row / 2 + .5, pale ? "#000" : look[3]);
      }
    }
    c.font = "11px system-ui, sans-serif"; c.textAlign = "center";
    for (let k = 0; k < boxes.length; k += 5) {
      const words = this.label(boxes[k]);
      if (words.length * 6.8 + 3 < boxes[k + 2]) { c.fillStyle = boxes[k + 4]; c.fillText(words, boxes[k + 1], boxes[k + 3]); }
    }
  }

  drawMemory(c, scale, origin, width, row, memory, pitch) {
    const { memoryBounds, memoryTimes, memoryLevels, peak, makespan } = this.times, ranks = this.structure.ranks;
    const top = Math.max(...peak, this.cap || 0) || 1;
    for (let rank = 0; rank < ranks; rank++) {
      const base = rank * pitch + row + memory + 1, over = this.cap && peak[rank] > this.cap * (1 + 1e-9);
      c.fillStyle = colour(over ? "--bad" : "--memory");
      c.beginPath(); c.moveTo(origin, base);
      let level = 0, column = -1;
      for (let i = memoryBounds[rank]; i < memoryBounds[rank + 1]; i++) {
        const x = origin + memoryTimes[i] * scale, next = memoryLevels[i] / top * memory;
        if (x - column > .4 || next > level) { c.lineTo(x, base - level); c.lineTo(x, base - next); column = x; }
        level = next;
      }
      c.lineTo(origin + makespan * scale, base - level); c.lineTo(origin + makespan * scale, base);
      c.fill();
      if (this.cap) { c.fillStyle = colour("--bad"); c.fillRect(0, base - this.cap / top * memory - .5, width, 1); }
    }
  }

  drawCritical(c, scale, origin, row, pitch) {
    const { critical, start, end } = this.times;
    const points = Array.from(critical, i => [origin + start[i] * scale, origin + end[i] * scale, this.rankOf(i) * pitch + row - 3]);
    for (const [style, wide] of [[colour("--paper"), 5], ["#d6006c", 2.5]]) {
      c.strokeStyle = style; c.lineWidth = wide; c.lineJoin = "round"; c.beginPath();
      points.forEach(([left, right, y], at) => { if (at) c.lineTo(left, y); else c.moveTo(left, y); c.lineTo(right, y); });
      c.stroke();
    }
  }

  drawWaits(c, scale, origin, row, pitch, ink) {
    for (const [i, wide] of [[this.hover, 1.5], [this.selected, 2.5]]) {
      if (i < 0) continue;
      const { start, end } = this.times;
      c.strokeStyle = ink; c.lineWidth = wide;
      const outline = at => c.strokeRect(origin + start[at] * scale, this.rankOf(at) * pitch + 1, Math.max((end[at] - start[at]) * scale, 2), row - 2);
      outline(i);
      c.lineWidth = 1.3;
      for (const { source } of this.waits(i).filter(wait => wait.source >= 0)) {
        const from = this.head(source);
        outline(from);
        arrow(c, origin + end[from] * scale, this.rankOf(from) * pitch + row / 2, origin + start[i] * scale, this.rankOf(i) * pitch + row / 2);
      }
    }
  }

  // What an action waited for: the end of the action before it on its rank, and its inputs. The last one let it start.
  waits(i) {
    const { source, pair, bounds } = this.structure, { start, end, arrived } = this.times, waits = [], rank = this.rankOf(i);
    if (i > bounds[rank]) {
      const before = this.head(i - 1);
      waits.push({ source: before, at: end[before], text: `its rank, which finished ${this.label(before)} of stage ${this.structure.stage[before]} at ${this.format(end[before])}` });
    }
    for (const part of pair[i] ? [i, i + 1] : [i]) {
      const from = source[part];
      if (from < 0) continue;
      const remote = arrived[part] >= 0, at = remote ? arrived[part] : end[from];
      const input = KINDS[this.structure.kind[part]] === "F" ? "its input" : KINDS[this.structure.kind[part]] === "W" ? "its I" : "its gradient";
      waits.push({ source: from, at, text: `${input} from ${this.label(this.head(from))} of stage ${this.structure.stage[from]} on rank ${this.rankOf(from)}, finished at ${this.format(end[from])}` + (remote ? `, arrived at ${this.format(at)}` : "") });
    }
    const last = Math.max(0, ...waits.map(wait => wait.at));
    return waits.map(wait => ({ ...wait, decides: wait.at >= last - 1e-6 * (start[i] || 1) })).sort((a, b) => b.at - a.at);
  }
  describe(i) {
    const { start, end } = this.times, rank = this.rankOf(i), look = this.looks[this.letter(i)];
    return [`${this.text(i)} (${look[0]})`, `rank ${rank}: ${this.format(start[i])} to ${this.format(end[i])}, takes ${this.format(+(end[i] - start[i]).toPrecision(6))}`];
  }
  waitTexts(i) {
    const waits = this.waits(i);
    return waits.length ? waits.map(wait => `${wait.decides ? "waited longest for" : "also needed"} ${wait.text}`) : ["waits for nothing: it is the first of its rank"];
  }

  find(event) {
    if (!this.structure) return -1;
    const box = this.canvas.getBoundingClientRect(), { row, pitch, left } = this.layout(), { bounds, ranks, pair } = this.structure, { start, end } = this.times;
    const px = event.clientX - box.left, rank = Math.floor((event.clientY - box.top) / pitch);
    if (px < left || rank < 0 || rank >= ranks || (event.clientY - box.top) % pitch > row + 2) return -1;
    const time = this.view.from + (px - left) / (box.width - left - 6) * (this.view.to - this.view.from);
    let low = bounds[rank], high = bounds[rank + 1] - 1;
    if (low > high) return -1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (start[middle] <= time) low = middle; else high = middle - 1; }
    const i = this.head(low), slack = 3 / (box.width - left) * (this.view.to - this.view.from); // a finger is wide
    return start[i] <= time && time <= end[i] + slack ? i : -1;
  }
  select(i, show = true) {
    this.selected = i; this.onselect(i); this.view.redraw();
    if (i < 0) { hideTip(); return; }
    if (!show) return;
    const { start, end } = this.times, { left, pitch } = this.layout(), box = this.canvas.getBoundingClientRect();
    const span = this.view.to - this.view.from, middle = (start[i] + end[i]) / 2;
    if (middle < this.view.from || middle > this.view.to) this.view.move(middle - (this.view.from + span / 2));
    showTip([...this.describe(i), ...this.waitTexts(i)].join("\n"), box.left + this.x(middle, box.width, left), box.top + this.rankOf(i) * pitch);
  }

  listen() {
    const canvas = this.canvas, pointers = new Map();
    let moved = false, touched = false;
    const timeAt = event => { const box = canvas.getBoundingClientRect(), { left } = this.layout(); return this.view.from + (event.clientX - box.left - left) / (box.width - left - 6) * (this.view.to - this.view.from); };
    const point = event => {
      const i = this.find(event);
      if (i !== this.hover) { this.hover = i; this.view.redraw(); }
      if (i < 0) hideTip(); else showTip([...this.describe(i), ...this.waitTexts(i)].join("\n"), event.clientX, event.clientY);
    };
    canvas.addEventListener("wheel", event => { if (!event.ctrlKey && !event.shiftKey) return; event.preventDefault(); this.view.zoom(Math.exp((event.deltaY || event.deltaX) * 0.002), timeAt(event)); }, { passive: false });
    canvas.addEventListener("pointerdown", event => { pointers.set(event.pointerId, event); moved = false; touched = event.pointerType !== "mouse"; });
    canvas.addEventListener("pointermove", event => {
      const before = pointers.get(event.pointerId);
      if (before && pointers.size === 1) {
        if (Math.abs(event.clientX - before.clientX) > 3 || moved) {
          if (!moved) canvas.setPointerCapture(event.pointerId);
          moved = true; this.view.move(timeAt(before) - timeAt(event)); pointers.set(event.pointerId, event); hideTip();
        }
      } else if (before && pointers.size === 2) { // pinch
        const [a, b] = pointers.values(), distance = Math.abs(a.clientX - b.clientX);
        pointers.set(event.pointerId, event);
        const [c, d] = pointers.values();
        moved = true; this.view.zoom(Math.max(distance, 8) / Math.max(Math.abs(c.clientX - d.clientX), 8), (timeAt(c) + timeAt(d)) / 2);
      } else if (event.pointerType === "mouse") point(event);
    });
    const release = event => {
      if (pointers.delete(event.pointerId) && !moved && event.type === "pointerup") {
        const i = this.find(event);
        this.select(i === this.selected && !touched ? -1 : i, false);
        point(event);
      }
    };
    canvas.addEventListener("pointerup", release); canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") { this.hover = -1; hideTip(); this.view.redraw(); } });
    canvas.addEventListener("dblclick", () => this.view.whole());
    canvas.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener("blur", hideTip);
  }

  key(event) {
    if (!this.structure) return;
    const { bounds, ranks, pair } = this.structure, i = this.selected, span = this.view.to - this.view.from;
    const step = by => {
      if (i < 0) return this.select(0);
      let next = by > 0 ? i + (pair[i] ? 2 : 1) : i - 1;
      const rank = this.rankOf(i);
      if (next < bounds[rank] || next >= bounds[rank + 1]) return undefined;
      return this.select(this.head(next));
    };
    const change = by => {
      const rank = this.rankOf(Math.max(i, 0)) + by, { start, end } = this.times;
      if (rank < 0 || rank >= ranks) return;
      const time = i < 0 ? 0 : (start[i] + end[i]) / 2;
      let at = bounds[rank];
      while (at + 1 < bounds[rank + 1] && start[at + 1] <= time) at++;
      this.select(this.head(at));
    };
    const act = { ArrowRight: () => event.shiftKey ? this.view.move(span / 8) : step(1), ArrowLeft: () => event.shiftKey ? this.view.move(-span / 8) : step(-1), ArrowDown: () => change(1), ArrowUp: () => change(-1),
      "+": () => this.view.zoom(.7), "=": () => this.view.zoom(.7), "-": () => this.view.zoom(1.4), "0": () => this.view.whole(), Escape: () => { this.select(-1); this.view.whole(); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  }
}

// The legend of the kinds that some charts use, and what the charts show.
export function legend(view, looks, redraw, extra = []) {
  const used = new Set(view.charts.filter(chart => chart.structure).flatMap(chart => {
    const letters = [...new Set(chart.structure.kind)].map(kind => KINDS[kind]);
    return chart.structure.pair.includes(1) ? [...letters, "&"] : letters;
  }));
  const keys = Object.entries(looks).filter(([letter]) => used.has(letter)).map(([letter, [meaning, fill, , ink]]) => {
    const swatch = element("i", {}, letter);
    swatch.style.background = fill; swatch.style.color = ink;
    return element("span", {}, swatch, meaning);
  });
  if (view.charts.some(chart => chart.structure && chart.structure.odd.includes(1))) keys.push(element("span", {}, "paler: every second chunk of a rank"));
  return element("div", { class: "legend" }, ...keys, ...extra);
}

// Figures of a timeline as a list of terms.
export function figures(times, structure, { format = number, memoryFormat = number, cap = null, memoryName = "Peak memory" } = {}) {
  const most = Math.max(...times.peak), least = Math.min(...times.peak), over = cap && most > cap * (1 + 1e-9);
  const entry = (name, value, detail = "", style = "") => element("div", {}, element("dt", {}, name), element("dd", { class: style }, value, " ", element("span", {}, detail)));
  const hops = times.critical.length;
  return element("dl", { class: "figures" },
    entry("Makespan", format(times.makespan)), entry("Makespan bubble", percent(times.bubble), times.bubbleUncertainty ? `± ${percent(times.bubbleUncertainty)}` : ""),
    entry("Span", format(times.span)), entry("Span bubble", percent(times.spanBubble)), entry("Utilisation", percent(times.utilisation)),
    memoryFormat && entry(memoryName, over || least === most || memoryFormat !== number ? memoryFormat(most) : `${number(least)} to ${number(most)}`, over ? "above cap" : least === most ? "every rank" : "", over ? "bad" : ""),
    entry("Critical path", `${hops} actions`), entry("Actions", number(structure.kind.length), `· ${structure.stages} stages`));
}

export function rankTable(times, { format = number, memoryFormat = number } = {}) {
  const cell = text => element("td", {}, text);
  return element("div", { class: "wide" }, element("table", {},
    element("tr", {}, ...["rank", "busy", ...times.causes, "peak memory"].map(name => element("th", {}, name))),
    ...times.busy.map((busy, rank) => element("tr", {}, cell(rank), cell(format(busy)), ...times.idle[rank].map(part => cell(format(+part.toPrecision(6)))), cell(memoryFormat(times.peak[rank]))))));
}
