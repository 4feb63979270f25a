// Runs: their figures, charts and events while they run, laid over each other, and what differs in their configs.
import { Cursor, smoothed, StepChart } from "./charts.js";
import { count, element, get, loss, number, percent, postArrays, readState, seconds, size, writeState } from "./dom.js";
import { figures, Gantt, legend, View } from "./gantt.js";

const EVERY = 1000, DEFAULTS = { hidden: "", run: 0 };
const COLUMNS = ["step", "loss", "tokens_per_s", "bubble", "planned_bubble", "memory", "grad_norm", "lr", "seconds"];

export async function show(page, isOpen) {
  const { looks } = await get("api/catalogue");
  if (!isOpen()) return;
  const state = readState(DEFAULTS), runs = [];
  const work = element("div", { class: "work" }), list = element("div", { class: "runs" }), status = element("p", { class: "bad", role: "status" });
  const cursor = new Cursor(), chart = (title, format, options) => new StepChart(cursor, title, format, options);
  const charts = {
    loss: chart("Loss", loss, { tickFormat: number }), speed: chart("Tokens per second", count, { zero: true }), bubble: chart("Bubble of the makespan", percent, { zero: true, tickFormat: x => `${+(100 * x).toPrecision(3)}%` }), memory: chart("Memory of each process", size, { zero: true, binary: true }),
    norm: chart("Gradient norm", number), rate: chart("Learning rate", number, { zero: true }),
  };
  const differences = element("section"), timelines = element("section"), events = element("section");
  work.append(list, status, element("section", { class: "charts", "aria-label": "Over the steps" }, ...Object.values(charts).map(each => each.figure)), timelines, events, differences);
  page.append(work);

  const hidden = () => new Set(String(state.hidden).split(",").filter(Boolean)), visible = () => runs.filter((_, at) => !hidden().has(String(at)));
  const name = run => visible().length > 1 ? run.name : "";
  function drawCharts() {
    const lines = (key, extra = () => []) => visible().flatMap(run => {
      const steps = run.steps, line = { name: name(run), run: run.index, step: steps.step, values: steps[key] };
      return steps.step.length > 40 ? [{ ...line, style: "thin" }, { ...line, values: smoothed(steps[key]), style: "strong" }, ...extra(run)] : [{ ...line, style: "strong" }, ...extra(run)];
    });
    const marks = visible().flatMap(run => run.events.filter(event => ["checkpoint", "recovery", "replan", "end"].includes(event.kind)).map(event => ({ step: event.step, name: event.kind })));
    charts.loss.set(lines("loss", run => [{ name: `${name(run)} validation`.trim(), run: run.index, step: run.validation.step, values: run.validation.loss, style: "points" }]), marks);
    charts.speed.set(lines("tokens_per_s"), marks);
    charts.bubble.set(lines("bubble", run => [{ name: `${name(run)} planned`.trim(), run: run.index, step: run.steps.step, values: run.steps.planned_bubble, style: "dashed" }]));
    charts.memory.set(visible().flatMap(run => run.memory.length ? run.memory.map((part, at) => ({ name: `${name(run)} rank ${at}`.trim(), run: visible().length > 1 ? run.index : at, ...held(part, run.steps.step), style: "strong" }))
      : [{ name: name(run), run: run.index, step: run.steps.step, values: run.steps.memory, style: "strong" }]));
    charts.norm.set(lines("grad_norm")); charts.rate.set(lines("lr").filter(line => line.style !== "thin").map(line => ({ ...line, values: runs[line.run].steps.lr, style: "strong" })));
  }

  function drawList() {
    list.replaceChildren(...runs.map((run, at) => {
      const box = element("input", { type: "checkbox", checked: !hidden().has(String(at)), onchange: () => { const set = hidden(); if (box.checked) set.delete(String(at)); else set.add(String(at)); state.hidden = [...set].join(","); save(); drawCharts(); drawEvents(); } });
      return element("article", { class: "run", "data-run": String(at % 6), title: run.folder }, element("label", {}, box, run.name),
        element("p", { class: { good: "good", bad: "bad" }[run.style] || "warm" }, run.status), ...run.notes.map(note => element("p", { class: "warm" }, note)),
        element("dl", { class: "figures" }, ...run.figures.map(([term, value, detail]) => element("div", {}, element("dt", {}, term), element("dd", {}, value, " ", element("span", {}, detail))))));
    }));
  }
  function drawEvents() {
    const rows = visible().flatMap(run => run.events.map(event => ({ ...event, run }))).reverse().sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, 200);
    const cells = row => [row.time === null ? "" : new Date(row.time * 1000).toISOString().slice(0, 19).replace("T", " "), row.step.toLocaleString("en"), ...(visible().length > 1 ? [row.run.name] : []), row.kind, row.text];
    const style = row => row.kind === "recovery" || row.text.startsWith("failed") ? "bad" : row.kind === "replan" ? "warm" : "";
    const heads = ["time, UTC", "step", ...(visible().length > 1 ? ["run"] : []), "event", ""];
    events.replaceChildren(element("h2", {}, "Events"), rows.length ? element("div", { class: "wide" }, element("table", {}, element("tr", {}, ...heads.map((head, at) => element("th", { class: at > 1 ? "text" : "" }, head))),
      ...rows.map(row => element("tr", { class: style(row) }, ...cells(row).map((cell, at) => element("td", { class: at > 1 ? "text" : "" }, cell)))))) : element("p", { class: "soft" }, "None yet."));
  }
  function drawDifferences(rows) {
    differences.replaceChildren();
    if (runs.length < 2) return;
    differences.append(element("h2", {}, "What differs in their configs"), rows.length ? element("div", { class: "wide" }, element("table", {}, element("tr", {}, ...["option", ...runs.map(run => run.name)].map(head => element("th", { class: "text" }, head))),
      ...rows.map(row => element("tr", {}, ...[row.option, ...row.values].map(cell => element("td", { class: "text" }, cell)))))) : element("p", { class: "soft" }, "Nothing."));
  }
  const save = () => writeState("runs", state, DEFAULTS);

  // The newest measured step of one run, beside its plan.
  const view = new View();
  let shownRun = null, shownStep;
  async function drawTimelines() {
    const run = runs[Math.min(+state.run, runs.length - 1)];
    if (!run || (shownRun === run && run.ended && shownStep !== undefined)) return;
    const answer = await postArrays("api/runs/timelines", { run: run.index, step: shownRun === run ? shownStep ?? null : null });
    if (!answer.panels || (shownRun === run && shownStep === answer.step && !answer.panels.length)) return;
    shownRun = run; shownStep = answer.step; view.charts.length = 0;
    const select = element("select", { "aria-label": "Run whose timeline is shown", onchange: () => { state.run = select.value; save(); drawTimelines(); } }, ...runs.map((other, at) => element("option", { value: at, selected: other === run }, other.name)));
    const format = seconds, blocks = answer.panels.map(({ name, structure, times }) => {
      const gantt = new Gantt(view, looks, { format }); gantt.showMemory = false; gantt.set(structure, times);
      return element("div", { class: "panel" }, element("h3", {}, name), figures(times, structure, { format, memoryFormat: null }), gantt.canvas);
    });
    timelines.replaceChildren(element("div", { class: "bar" }, element("h2", {}, answer.step === null ? "Timeline, planned" : `Timeline of step ${answer.step}, planned and measured`), runs.length > 1 ? element("div", {}, select) : null),
      answer.panels.length ? legend(view, looks) : element("p", { class: "soft" }, "There is no timeline yet; see metrics.timeline_freq."), ...blocks, ...(answer.parts ? [partTable(answer.parts, format)] : []));
    view.fit(); view.whole();
  }

  let timer = 0, first = true;
  async function poll() {
    try {
      const answer = await postArrays("api/runs", { known: runs.map(run => ({ version: run.version, generation: run.generation, steps: run.steps.step.length })) });
      status.textContent = "";
      const changed = answer.runs.map((update, at) => merge(runs, at, update)).some(Boolean);
      if (!runs.length) { list.replaceChildren(element("p", {}, "No runs are open. End the studio and start it with the folders of some: "), element("code", {}, "stageline studio outputs")); return; }
      if (changed || first) { first = false; drawList(); drawCharts(); drawEvents(); drawDifferences(answer.differences); await drawTimelines(); }
    } catch (error) { status.textContent = error.message; }
    if (isOpen()) timer = setTimeout(poll, EVERY);
  }
  const redraw = () => { Object.values(charts).forEach(each => each.draw()); view.redraw(); }, dark = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("resize", redraw); dark.addEventListener("change", redraw);
  await poll();
  return () => { clearTimeout(timer); removeEventListener("resize", redraw); dark.removeEventListener("change", redraw); };
}

// Memory is logged when it changes: it stays as it was until the next change.
function held({ step, memory }, steps) {
  const points = [...step].flatMap((at, i) => i ? [[at, memory[i - 1]], [at, memory[i]]] : [[at, memory[i]]]);
  if (steps.length) points.push([steps.at(-1), memory.at(-1)]);
  return { step: points.map(point => point[0]), values: points.map(point => point[1]) };
}

// Add what is new of a run; returns whether anything is.
function merge(runs, index, update) {
  const run = runs[index] ??= { index, version: "", generation: "", steps: Object.fromEntries(COLUMNS.map(key => [key, []])), events: [], memory: [] };
  if (!update.generation) return false;
  const before = update.from ? run.steps : Object.fromEntries(COLUMNS.map(key => [key, []]));
  const steps = Object.fromEntries(COLUMNS.map(key => { const joined = new Float32Array(before[key].length + update.steps[key].length); joined.set(before[key]); joined.set(update.steps[key], before[key].length); return [key, joined]; }));
  Object.assign(run, update, { steps });
  return true;
}

function partTable({ names, rows }, format) {
  const title = at => at === rows.length - 1 ? "plan" : at === rows.length - 2 ? "mean" : `rank ${at}`;
  return element("details", { open: true }, element("summary", {}, "where the time of each rank went"), element("div", { class: "wide" }, element("table", {}, element("tr", {}, ...["", ...names].map(name => element("th", {}, name))),
    ...rows.map((row, at) => element("tr", {}, element("th", {}, title(at)), ...row.map(part => element("td", {}, format(+part.toPrecision(6)))))))));
}
