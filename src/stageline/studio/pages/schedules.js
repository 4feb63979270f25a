// Schedules: families and costs to play with, two at a time, and a search for a better one.
import { choice, colour, columns, download, element, get, latest, number, post, postArrays, prepare, readState, showTip, slider, writeState } from "./dom.js";
import { figures, Gantt, legend, rankTable, View } from "./gantt.js";

const DEFAULTS = { ranks: 4, microbatches: 8, a: "1f1b", b: "zb-v", forward: 1, backward_input: 1, backward_weight: 1, transfer: 0, activation: 1, residue: 1,
  memory: "", factors: "", job: "", packed: "", searchChunks: 1, searchPlacement: "loop", searchSeconds: 10, beside: "", memoryCurves: "yes", critical: "" };
const COSTS = [
  ["forward", "F", "Time of a forward"], ["backward_input", "I", "Time of the gradient of the inputs; B takes I + W"], ["backward_weight", "W", "Time of the gradient of the weights"],
  ["transfer", "Transfer", "Time of a message between two ranks"], ["activation", "Activation", "Memory from F to B or I"], ["residue", "Residue", "Memory from I to W"]];
const NONE = "none", SYNTHESIZED = "synthesized";

export async function show(page, isOpen) {
  const { families, looks } = await get("api/catalogue");
  if (!isOpen()) return;
  const state = readState(DEFAULTS), view = new View();
  const side = element("form", { "aria-label": "Schedules and costs", onsubmit: event => event.preventDefault() }), work = element("div", { class: "work" });
  page.append(columns("Schedules and costs", side, work));

  const factors = () => Object.fromEntries(state.factors.split(",").filter(Boolean).map(pair => pair.split(":")));
  const optionsOf = panel => Object.fromEntries(Object.entries(state).filter(([key, value]) => key.startsWith(panel + ".") && value).map(([key, value]) => [key.slice(2), +value]));
  const request = names => ({
    ranks: +state.ranks, microbatches: +state.microbatches,
    costs: { ...Object.fromEntries(COSTS.map(([key]) => [key, +state[key]])), factors: Object.fromEntries(Object.entries(factors()).map(([part, factor]) => [part, +factor])) },
    panels: names.map(name => ({ family: state[name], options: optionsOf(name), ...state[name] === SYNTHESIZED ? { job: state.job, packed: state.packed } : {}, known: panels[name].known, idle: panels[name].details.open })),
  });

  // Two charts on one time axis.
  const panels = Object.fromEntries(["a", "b"].map(name => [name, makePanel(name, view, looks, () => update())]));
  const shown = () => ["a", "b"].filter(name => state[name] !== NONE);
  const update = latest(async () => {
    if (!isOpen()) return;
    writeState("schedules", state.b === SYNTHESIZED ? state : { ...state, job: "", packed: "" }, DEFAULTS); share.value = location.href;
    const names = shown();
    try {
      const answer = await postArrays("api/simulate", request(names));
      names.forEach((name, at) => panels[name].set(answer.panels[at]));
    } catch (error) { names.forEach(name => panels[name].set({ error: error.message })); }
    drawAll();
  });
  const change = (key, value) => { state[key] = String(value); update(); };

  const top = element("div", { class: "bar" }), board = element("div", { class: "panels" });
  work.append(top, board);
  let shape = "";
  function drawAll() {
    const cap = state.memory === "" ? null : +state.memory, names = shown();
    for (const name of ["a", "b"]) {
      const { chart, box } = panels[name];
      chart.cap = cap; chart.showMemory = state.memoryCurves === "yes"; chart.showCritical = state.critical === "yes";
      if (names.includes(name)) { if (!box.isConnected || board.lastChild !== box) board.append(box); panels[name].refresh(cap); }
      else { chart.clear(); box.remove(); }
    }
    board.classList.toggle("beside", state.beside === "yes" && names.length > 1);
    const known = JSON.stringify(names.map(name => [panels[name].known, state.memoryCurves, state.critical, state.beside]));
    if (known !== shape) { shape = known; top.replaceChildren(legend(view, looks), switches()); }
    const peak = Math.max(1, ...names.map(name => panels[name].chart.times ? Math.max(...panels[name].chart.times.peak) : 0));
    memory.range.max = Math.max(+state.memory || 0, Math.ceil(peak * 1.5));
    view.fit(); view.redraw(); bars.draw();
  }
  function switches() {
    const toggle = (key, text) => element("label", {}, element("input", { type: "checkbox", checked: state[key] === "yes", onchange: event => change(key, event.target.checked ? "yes" : key === "memoryCurves" ? "no" : "") }), text);
    return element("div", { class: "legend" }, toggle("memoryCurves", "memory"), toggle("critical", "critical path"), element("span", { class: "wide-only" }, toggle("beside", "side by side")),
      element("button", { type: "button", "aria-label": "Zoom in", onclick: () => view.zoom(.7) }, "+"), element("button", { type: "button", "aria-label": "Zoom out", onclick: () => view.zoom(1.4) }, "−"), element("button", { type: "button", onclick: () => view.whole() }, "whole step"));
  }

  // Which schedules.
  const sizes = element("fieldset", {}, element("legend", {}, "Schedules"));
  for (const [key, label, max] of [["ranks", "Ranks", 32], ["microbatches", "Microbatches", 64]]) {
    const control = slider(label, +state[key], { min: 1, max, step: 1 }, value => { if (Number.isInteger(value) && value > 0) { change(key, value); bars.fit(); } });
    sizes.append(control.row);
  }
  const names = families.map(family => [family.name, family.name]);
  for (const name of ["a", "b"]) {
    const holder = element("div"), about = element("small");
    const list = name === "b" ? [[NONE, "none"], ...names, [SYNTHESIZED, "synthesized"]] : names;
    const picked = choice(name === "a" ? "First" : "Second", list, state[name], value => { change(name, value); fill(); });
    const fill = () => {
      const family = families.find(other => other.name === state[name]);
      picked.select.value = state[name];
      about.textContent = family ? family.description + (family.constraints ? ` (${family.constraints})` : "") : state[name] === SYNTHESIZED ? "found by the search below" : "";
      holder.replaceChildren(...Object.entries(family ? family.options : {}).map(([option, value]) => {
        const key = `${name}.${option}`, input = element("input", { type: "number", min: "1", max: "64", value: state[key] || value || "", placeholder: "default", id: key, oninput: () => change(key, input.value) });
        return element("div", { class: "control two" }, element("label", { for: key }, option), input);
      }));
    };
    panels[name].fill = fill; fill();
    sizes.append(picked.row, about, holder);
  }

  // What they cost.
  const costs = element("fieldset", {}, element("legend", {}, "Costs of a rank"));
  for (const [key, label, help] of COSTS) costs.append(slider(label, +state[key], { min: 0, max: 4, step: .05, help }, value => change(key, value)).row);
  costs.append(element("small", {}, "For one microbatch, in any unit. Families with several stages per rank divide them among these stages."));
  const bars = stageBars(state, factors, value => change("factors", value));
  const memory = slider("Cap", +state.memory || 0, { min: 0, max: 8, step: .25, help: "Memory that a rank may hold; 0 for no cap" }, value => change("memory", value || ""));
  const capBox = element("fieldset", {}, element("legend", {}, "Memory of a rank"), memory.row, element("small", {}, "0: no cap. Ranks above it are drawn in red; the search keeps below it."));

  side.append(sizes, costs, bars.row, capBox, searchBox(state, change, request, panels, update), exportBox(state, shown, request));
  const share = element("input", { type: "text", id: "share", "aria-label": "Address of this view; paste another one to open it", onfocus: () => share.select(), onchange: () => { const at = share.value.indexOf("#"); if (at >= 0) location.hash = share.value.slice(at); } });
  side.append(element("fieldset", {}, element("legend", {}, "Share"), element("div", { class: "buttons" }, share,
    element("button", { type: "button", onclick: async event => { share.select(); try { await navigator.clipboard.writeText(location.href); } catch { document.execCommand("copy"); } event.target.textContent = "Copied"; } }, "Copy")),
    element("small", {}, "The part after # is this view. In another studio, paste it here.")));

  const redraw = () => { view.redraw(); bars.draw(); }, dark = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("resize", redraw); dark.addEventListener("change", redraw);
  await update();
  return () => { removeEventListener("resize", redraw); dark.removeEventListener("change", redraw); };
}

function makePanel(name, view, looks, update) {
  const waits = element("div", { class: "waits" }), box = element("section", { class: "panel", "aria-label": name === "a" ? "First schedule" : "Second schedule" });
  const title = element("h2"), numbers = element("div"), table = element("div"), details = element("details", { ontoggle: () => { if (details.open) update(); } }, element("summary", {}, "time and memory of each rank"), table), error = element("p", { class: "error" });
  const chart = new Gantt(view, looks, { onselect: () => panel.explain() });
  const panel = {
    chart, box, details, known: "", error: "",
    set(answer) {
      panel.error = answer.error || "";
      if (answer.error) { chart.clear(); panel.known = ""; return; }
      panel.known = answer.id; chart.set(answer.structure, answer.times);
    },
    refresh(cap) {
      if (panel.error) { error.textContent = panel.error; if (box.firstChild !== error) box.replaceChildren(error); return; }
      if (!chart.times) return;
      title.textContent = chart.structure.name;
      numbers.replaceChildren(figures(chart.times, chart.structure, { cap }));
      if (details.open && chart.times.idle) table.replaceChildren(rankTable(chart.times));
      panel.explain();
      if (box.firstChild !== title) box.replaceChildren(title, numbers, chart.canvas, waits, details);
    },
    explain() {
      const i = chart.selected;
      if (i < 0 || !chart.structure) { waits.replaceChildren(element("small", {}, "Click or tap an action to see what it waits for; arrow keys go from action to action. Ctrl and wheel, pinch, + and − zoom.")); return; }
      const [what, when] = chart.describe(i);
      waits.replaceChildren(element("b", {}, what), element("div", {}, when), element("ul", {}, ...chart.waitTexts(i).map(text => element("li", {}, text))));
    },
  };
  panel.explain();
  return panel;
}

// How much longer some of the P parts of the model take: bars to drag, and a slider for the chosen one.
function stageBars(state, factors, change) {
  const canvas = element("canvas", { class: "cut", role: "img", "aria-label": "Relative time of each part of the model" });
  let part = 0;
  const read = at => +(factors()[at] ?? 1);
  const write = (at, value) => {
    const all = { ...factors(), [at]: +value.toFixed(2) };
    change(Object.entries(all).filter(([key, factor]) => +factor !== 1 && +key < +state.ranks).map(pair => pair.join(":")).join(","));
    draw();
  };
  const control = slider("Factor", 1, { min: 0, max: 4, step: .05, help: "How much longer this part takes than the others" }, value => write(part, value));
  const which = slider("Part", 0, { min: 0, max: +state.ranks - 1, step: 1, help: "One of P equal parts of the model" }, value => { part = Math.min(Math.round(value), +state.ranks - 1); control.set(read(part)); draw(); });
  const row = element("fieldset", {}, element("legend", {}, "Unequal stages"), canvas, which.row, control.row, element("small", {}, "Each of P parts of the model; with several chunks, a part is cut into as many stages."));
  function draw() {
    if (!canvas.isConnected) return;
    const ranks = +state.ranks, height = 46, [c, width] = prepare(canvas, height), wide = width / ranks;
    for (let at = 0; at < ranks; at++) {
      const tall = Math.min(read(at), 4) / 4 * (height - 4);
      c.fillStyle = colour("--row"); c.fillRect(at * wide, 0, Math.max(wide - 2, .5), height);
      c.fillStyle = colour(at === part ? "--accent" : "--memory"); c.fillRect(at * wide, height - tall, Math.max(wide - 2, .5), tall);
    }
  }
  const drag = event => {
    const box = canvas.getBoundingClientRect();
    part = Math.max(0, Math.min(+state.ranks - 1, Math.floor((event.clientX - box.left) / box.width * +state.ranks)));
    const value = Math.max(0, Math.min(4, Math.round((1 - (event.clientY - box.top) / box.height) * 80) / 20));
    which.set(part); control.set(value); write(part, value);
    showTip(`part ${part}: ${number(value)} times`, event.clientX, event.clientY);
  };
  canvas.addEventListener("pointerdown", event => { canvas.setPointerCapture(event.pointerId); drag(event); });
  canvas.addEventListener("pointermove", event => { if (event.buttons) drag(event); });
  canvas.addEventListener("pointerup", () => setTimeout(() => document.getElementById("tip").style.visibility = "hidden", 600));
  return { row, draw, fit() { which.range.max = +state.ranks - 1; part = Math.min(part, +state.ranks - 1); which.set(part); control.set(read(part)); draw(); } };
}

// The search runs on the server; its gap is drawn while it shrinks, and its result becomes the second schedule.
function searchBox(state, change, request, panels, update) {
  const canvas = element("canvas", { role: "img", "aria-label": "Best makespan and lower bound over the seconds of the search" }), key = element("div", { class: "legend" }, ...[["line best", "best makespan"], ["line bound", "lower bound"]].map(([name, text]) => element("span", { class: name }, element("i"), text))), plot = element("div", { hidden: true }, canvas, key), status = element("p", { class: "soft", role: "status" });
  const start = element("button", { type: "button", class: "main", onclick: () => run() }, "Synthesize"), stop = element("button", { type: "button", disabled: true, onclick: () => post("api/synthesis/stop", {}) }, "Stop");
  const input = (key, label, attributes) => { const box = element("input", { type: "number", id: key, value: state[key], oninput: () => { state[key] = box.value; }, ...attributes }); return element("div", { class: "control two" }, element("label", { for: key }, label), box); };
  const placement = choice("Placement", [["loop", "loop"], ["v", "V"]], state.searchPlacement, value => { state.searchPlacement = value; });
  async function run() {
    start.disabled = true; stop.disabled = false; status.textContent = "simulating the families …";
    try {
      const { ranks, microbatches, costs } = request([]);
      const { job } = await post("api/synthesis", { ranks, microbatches, costs, chunks: +state.searchChunks, placement: state.searchPlacement, memory: +state.memory || null, time_limit: +state.searchSeconds });
      for (;;) {
        const answer = await get(`api/synthesis/${job}`);
        draw(answer.progress);
        if (answer.done) {
          if (answer.error) { status.textContent = answer.error; break; }
          const best = answer.best ? ` The best family, ${answer.best[0]}, takes ${number(answer.best[1])}.` : "";
          status.textContent = `${describe(answer.progress.at(-1))}${answer.gap === 0 ? " This is optimal." : ""}${best}`;
          Object.assign(state, { b: SYNTHESIZED, job, packed: answer.packed }); panels.b.known = ""; panels.b.fill(); update();
          break;
        }
        if (answer.progress.length) status.textContent = describe(answer.progress.at(-1));
        await new Promise(resolve => setTimeout(resolve, 200));
      }
    } catch (error) { status.textContent = error.message; }
    start.disabled = false; stop.disabled = true;
  }
  const describe = ([time, achieved, bound, step]) => `Makespan ${number(+achieved.toPrecision(6))}, found by ${step}; ${bound > 0 ? `lower bound ${number(+bound.toPrecision(6))}, gap ${(100 * (achieved / bound - 1)).toFixed(2)}%` : "no lower bound yet"}, after ${time.toFixed(1)} s.`;
  function draw(rows) {
    plot.hidden = !rows.length;
    if (!rows.length) return;
    const height = 70, [c, width] = prepare(canvas, height), last = rows.at(-1), end = Math.max(last[0], .01);
    const high = Math.max(...rows.map(row => row[1])), low = Math.min(...rows.flatMap(row => row[2] > 0 ? [row[1], row[2]] : [row[1]])), y = value => 5 + (high - value) / (high - low || 1) * (height - 10), x = time => time / end * (width - 4);
    for (const [at, name] of [[1, "--accent"], [2, "--good"]]) {
      const known = rows.filter(row => row[at] > 0);
      if (!known.length) continue;
      c.strokeStyle = colour(name); c.lineWidth = 2; c.beginPath(); c.moveTo(x(known[0][0]), y(known[0][at]));
      known.forEach((row, i) => { c.lineTo(x(row[0]), y(known[Math.max(0, i - 1)][at])); c.lineTo(x(row[0]), y(row[at])); });
      c.lineTo(width, y(last[at])); c.stroke();
    }
  }
  return element("fieldset", {}, element("legend", {}, "Synthesis"), input("searchChunks", "Chunks", { min: "1", max: "8" }), placement.row, input("searchSeconds", "Seconds", { min: "1", max: "600" }),
    element("div", { class: "buttons" }, start, stop), plot, status);
}

function exportBox(state, shown, request) {
  const which = choice("Schedule", [["a", "first"], ["b", "second"]], "a", () => {}), status = element("p", { class: "bad", role: "status" });
  const save = async format => {
    status.textContent = "";
    try { await download("api/export", { ...request(format === "svg" || format === "perfetto" ? shown() : [which.select.value]), format }); }
    catch (error) { status.textContent = error.message; }
  };
  const labels = { svg: "SVG", json: "JSON", csv: "CSV", perfetto: "Perfetto", python: "Python" };
  return element("fieldset", {}, element("legend", {}, "Export"), which.row, element("div", { class: "buttons" }, ...Object.entries(labels).map(([format, label]) => element("button", { type: "button", onclick: () => save(format) }, label))),
    element("small", {}, "SVG and Perfetto hold both schedules."), status);
}
