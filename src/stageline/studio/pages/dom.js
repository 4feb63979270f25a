// Elements, numbers as text, the tooltip, and calls of the server.

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && typeof value !== "string") node[key] = value;
    else if (value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

export const number = x => Number.isInteger(x) ? x.toLocaleString("en") : String(+x.toPrecision(4));
export const percent = x => x === null ? "unknown" : (100 * x).toFixed(1) + "%";
const scaled = (x, base, units, digits = 4) => { let at = 0; while (Math.abs(x) >= base && at < units.length - 1) { x /= base; at++; } return [+x.toPrecision(digits), units[at]]; };
export const count = x => scaled(x, 1000, ["", "k", "M", "G", "T", "P"]).join("");
export const size = x => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]).join(" ");
export const seconds = x => x >= 1 || x === 0 ? `${+x.toPrecision(4)} s` : x >= 1e-3 ? `${+(x * 1e3).toPrecision(4)} ms` : `${+(x * 1e6).toPrecision(4)} µs`;
export const loss = x => x !== 0 && (Math.abs(x) < 1e-2 || Math.abs(x) >= 1e4) ? x.toExponential(2) : x.toFixed(4);

const probe = getComputedStyle(document.documentElement);
export const colour = name => probe.getPropertyValue(name).trim();

// A canvas as large as its box in device pixels, ready to draw in CSS pixels.
export function prepare(canvas, height) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

export function ticks(from, to, count) {
  const rough = (to - from) / Math.max(2, count), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999) * power, values = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to + step * 1e-6; at++) values.push(+(at * step).toPrecision(12));
  return values;
}

const tip = document.getElementById("tip");
export function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > innerHeight - 6 ? Math.max(4, y - tip.offsetHeight - 12) : y + 18) + "px";
  tip.style.visibility = "visible";
}
export function hideTip() { tip.style.visibility = "hidden"; }

async function call(path, options) {
  let response;
  try { response = await fetch(path, options); }
  catch { throw new Error("the studio does not answer; is stageline studio still running?"); }
  if (!response.ok) throw new Error((await response.json()).error);
  return response;
}
const body = data => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(data) });
export const get = async path => (await call(path)).json();
export const post = async (path, data) => (await call(path, body(data))).json();

// An answer with arrays: see arrays.py.
export async function postArrays(path, data) {
  const bytes = await (await call(path, body(data))).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true), types = { f4: Float32Array, i4: Int32Array, u1: Uint8Array };
  return JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)), (_, value) => {
    if (!value || !Array.isArray(value.array)) return value;
    const [type, offset, items] = value.array;
    return new types[type](bytes, 4 + length + offset, items);
  });
}

export async function download(path, data) {
  const response = await call(path, body(data));
  const name = /filename="([^"]*)"/.exec(response.headers.get("content-disposition") || "");
  const link = element("a", { href: URL.createObjectURL(await response.blob()), download: name ? name[1] : "export" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Calls that must not pile up: one at a time, and the newest state always last.
export function latest(action) {
  let running = false, again = false;
  return async function run() {
    if (running) { again = true; return; }
    running = true;
    do { again = false; await action(); } while (again);
    running = false;
  };
}

// The state of a page in its address: only what differs from the default.
export function readState(defaults) {
  const query = new URLSearchParams(location.hash.split("?")[1] || "");
  const isValid = ([key, value]) => typeof defaults[key] !== "number" || (value !== "" && Number.isFinite(+value));
  return { ...defaults, ...Object.fromEntries([...query].filter(isValid)) };
}
export function writeState(page, state, defaults) {
  const changed = Object.entries(state).filter(([key, value]) => String(value) !== String(defaults[key] ?? ""));
  const query = new URLSearchParams(changed).toString().replaceAll("%3A", ":").replaceAll("%2C", ",");
  history.replaceState(null, "", `#${page}${query ? "?" + query : ""}`);
}

// Controls beside what they change; on a phone, in a sheet at the bottom that can be folded.
export function columns(title, side, work) {
  return element("div", { class: "columns" }, element("details", { class: "side", open: true }, element("summary", {}, title), side), work);
}

// A slider with a box for exact numbers; both call `change` with the number.
export function slider(label, value, { min, max, step, help }, change) {
  const id = "control-" + label.toLowerCase().replace(/\W+/g, "-");
  const range = element("input", { type: "range", id, min, max, step, title: help });
  const whole = step === 1 && min >= 1, box = element("input", { type: "number", min: whole ? min : 0, step: whole ? 1 : "any", "aria-label": `${label}, exactly` });
  const set = (x, from) => {
    if (x > +range.max) range.max = x;
    if (from !== range) range.value = x;
    if (from !== box) box.value = x;
  };
  for (const input of [range, box]) {
    input.addEventListener("input", () => {
      const x = parseFloat(input.value);
      if (!(x >= 0)) return;
      set(x, input); change(x);
    });
  }
  set(value, null);
  const row = element("div", { class: "control" }, element("label", { for: id, title: help }, label), range, box);
  return { row, range, box, set: x => set(x, null) };
}

export function choice(label, options, value, change) {
  const id = "control-" + label.toLowerCase().replace(/\W+/g, "-");
  const select = element("select", { id, onchange: () => change(select.value) },
    ...options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
  return { row: element("div", { class: "control two" }, element("label", { for: id }, label), select), select };
}
