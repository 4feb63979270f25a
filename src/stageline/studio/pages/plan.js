// Plan: a profile dropped on the page, and a cut of its layers that one drags.
import { choice, colour, columns, element, get, hideTip, latest, post, postArrays, prepare, readState, seconds, showTip, size, slider, writeState } from "./dom.js";
import { figures, Gantt, legend, View } from "./gantt.js";

const DEFAULTS = { ranks: 4, microbatches: 8, family: "1f1b", chunks: "", waves: "", recompute: "none", transfer: 0, bandwidth: "", optimizer: 8, memory: "", counts: "", run: "" };
const PARTS = { parameters: "--run0", gradients: "--run1", optimizer: "--run2", activations: "--run3", buffers: "--run4", snapshot: "--run5", graphs: "--memory", gathered: "--memory" };
let profile = null; // stays while one looks at another page

export async function show(page, isOpen) {
  const { families, looks } = await get("api/catalogue");
  if (!isOpen()) return;
  const state = readState(DEFAULTS), view = new View();
  const side = element("form", { "aria-label": "Plan", onsubmit: event => event.preventDefault() }), work = element("div", { class: "work" });
  page.append(columns("Ranks, family and memory", side, work));
  const message = element("p", { class: "error", hidden: true, role: "alert" }), file = element("input", { type: "file", accept: ".json,application/json", "aria-label": "Profile", onchange: () => take(file.files[0]) });
  const drop = element("div", { class: "drop" }, element("b", {}, "Drop a profile here"), element("p", { class: "soft" }, "A file that stageline profile MODEL -o profile.json wrote, or profile.json of a run's folder."), file, element("div", { class: "buttons middle" }, ...(await get("api/profiles")).map((name, run) => element("button", { type: "button", onclick: () => openRun(String(run)) }, `Profile of ${name}`))));
  const board = element("div", { hidden: true });
  work.append(message, drop, board);

  const over = event => { event.preventDefault(); drop.classList.add("over"); }, leave = () => drop.classList.remove("over"), dropped = event => { event.preventDefault(); leave(); if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]); };
  addEventListener("dragover", over); addEventListener("dragleave", leave); addEventListener("drop", dropped);
  const fail = error => { message.textContent = error.message; message.hidden = false; };
  async function take(chosen) {
    if (chosen) await open("", async () => post("api/profile", { name: chosen.name, text: await chosen.text() }));
  }
  const openRun = run => open(run, () => post("api/profile/run", { run: +run }));
  async function open(run, load) {
    try {
      profile = await load(); state.run = run; message.hidden = true;
      // The cut of the address stays if it is one of this profile.
      if (state.counts.split(",").reduce((sum, layers) => sum + +layers, 0) !== profile.layers.length) state.counts = "";
      update();
    } catch (error) { fail(error); }
  }

  // Controls.
  const change = (key, value) => { state[key] = String(value); if (!["memory", "optimizer", "recompute", "transfer", "bandwidth", "microbatches"].includes(key)) state.counts = ""; update(); };
  const sizes = element("fieldset", {}, element("legend", {}, "Plan"));
  for (const [key, label, max] of [["ranks", "Ranks", 16], ["microbatches", "Microbatches", 64]]) sizes.append(slider(label, +state[key], { min: 1, max, step: 1 }, value => { if (Number.isInteger(value) && value > 0) change(key, value); }).row);
  const family = choice("Family", families.filter(each => each.training).map(each => [each.name, each.name]), state.family, value => { change("family", value); fill(); });
  const options = element("div"), fill = () => {
    family.select.value = state.family;
    const known = families.find(each => each.name === state.family);
    options.replaceChildren(...["chunks", "waves"].filter(key => known && key in known.options).map(key => {
      const input = element("input", { type: "number", id: `plan-${key}`, min: "1", max: "16", value: state[key] || known.options[key], oninput: () => change(key, input.value) });
      return element("div", { class: "control two" }, element("label", { for: `plan-${key}` }, key[0].toUpperCase() + key.slice(1)), input);
    }));
  };
  fill();
  const recompute = choice("Recompute", [["none", "nothing"], ["stage", "every stage"]], state.recompute, value => change("recompute", value));
  const gib = 2 ** 30, memory = slider("Cap, GiB", +state.memory || 0, { min: 0, max: 80, step: .5, help: "Memory of a rank; 0 for no cap" }, value => change("memory", value || ""));
  const optimizer = slider("Optimizer, B", +state.optimizer, { min: 0, max: 16, step: 1, help: "Bytes of optimizer state per parameter; AdamW has 8" }, value => change("optimizer", value));
  const transfer = slider("Latency, ms", +state.transfer, { min: 0, max: 5, step: .05, help: "Time of a message, without its size" }, value => change("transfer", value));
  const bandwidth = slider("Link, GB/s", +state.bandwidth || 0, { min: 0, max: 400, step: 1, help: "Bandwidth between two ranks; 0: only the latency counts" }, value => change("bandwidth", value || ""));
  sizes.append(family.row, options, recompute.row);
  const search = element("button", { type: "button", class: "main", onclick: () => best() }, "Find the best plan"), balanced = element("button", { type: "button", onclick: () => { state.counts = ""; update(); } }, "Balanced cut");
  side.append(sizes, element("fieldset", {}, element("legend", {}, "Memory and links"), memory.row, optimizer.row, transfer.row, bandwidth.row, element("small", {}, "Memory cap of a rank (0: none), optimizer state per parameter, time of an empty message, bandwidth between two ranks (0: unlimited).")), element("fieldset", {}, element("legend", {}, "Cut"), element("div", { class: "buttons" }, balanced, search), element("small", {}, "The search tries all families and their cuts, within the cap.")));

  const request = () => ({ profile: profile.profile, ranks: +state.ranks, microbatches: +state.microbatches, family: state.family, options: Object.fromEntries(["chunks", "waves"].filter(key => state[key]).map(key => [key, +state[key]])),
    counts: state.counts ? state.counts.split(",").map(Number) : null, recompute: state.recompute, transfer: +state.transfer / 1e3, bandwidth: +state.bandwidth ? +state.bandwidth * 1e9 : null, optimizer_bytes: +state.optimizer, memory: +state.memory ? +state.memory * gib : null });
  async function best() {
    if (!profile) return fail(new Error("drop a profile on the page first"));
    search.disabled = true; search.textContent = "Searching …";
    try { const plan = await post("api/plan/search", request()); Object.assign(state, { family: plan.family, chunks: plan.options.chunks || "", waves: plan.options.waves || "", counts: plan.counts.join(",") }); fill(); message.hidden = true; update(); }
    catch (error) { fail(error); }
    search.disabled = false; search.textContent = "Find the best plan";
  }

  // The page of a profile.
  const chart = new Gantt(view, looks, { format: seconds, memoryFormat: size }), numbers = element("div"), keys = element("div"), title = element("h2"), ribbon = cutRibbon(counts => { state.counts = counts.join(","); update(); }), rows = memoryRows();
  board.append(element("div", { class: "bar" }, title, element("button", { type: "button", onclick: () => { profile = null; state.counts = state.run = ""; update(); } }, "Another profile")), element("h3", {}, "Cut: drag a border, or choose it and use the arrow keys"), ribbon.box, element("h3", {}, "Step"), numbers, keys, chart.canvas, element("h3", {}, "Memory of each rank"), rows.box);
  const update = latest(async () => {
    if (!isOpen()) return;
    writeState("plan", state, DEFAULTS);
    board.hidden = !profile; drop.hidden = Boolean(profile);
    if (!profile) { board.classList.remove("stale"); return; }
    const { counts } = state;
    try {
      const answer = await postArrays("api/plan", request());
      message.hidden = true; board.classList.remove("stale");
      const { structure, times } = answer.panel;
      chart.set(structure, times);
      title.replaceChildren(profile.name, " ", element("small", {}, `${profile.layers.length} layers, ${profile.where}`));
      numbers.replaceChildren(figures(times, structure, { format: seconds, memoryFormat: size, memoryName: "Peak activations" }));
      keys.replaceChildren(legend(view, looks));
      view.fit(); view.redraw(); rows.set(answer, +state.memory ? +state.memory * gib : null);
      if (state.counts === counts) ribbon.set(answer);  // otherwise the border has moved on, and its answer is next
    } catch (error) { fail(error); board.classList.add("stale"); }  // what it shows is an earlier plan
  });
  const redraw = () => { view.redraw(); ribbon.draw(); }, dark = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("resize", redraw); dark.addEventListener("change", redraw);
  if (!profile && state.run !== "") await openRun(state.run);
  else await update();
  return () => { removeEventListener("dragover", over); removeEventListener("dragleave", leave); removeEventListener("drop", dropped); removeEventListener("resize", redraw); dark.removeEventListener("change", redraw); };
}

// The layers as bars of their times, with the borders of stages between them.
function cutRibbon(change) {
  const canvas = element("canvas", { class: "cut", tabIndex: 0, role: "slider", "aria-label": "Borders of the stages" }), help = element("small"), box = element("div", {}, canvas, help), height = 120, head = 22;
  let answer = null, chosen = 0, dragging = false;
  const borders = () => answer.counts.slice(0, -1).reduce((list, layers) => [...list, (list.at(-1) ?? 0) + layers], []);
  const put = (index, layer) => {
    const list = borders(), low = (list[index - 1] ?? 0) + 1, high = (list[index + 1] ?? profile.layers.length) - 1;
    list[index] = Math.max(low, Math.min(high, layer));
    const ends = [...list, profile.layers.length], counts = ends.map((end, at) => end - (ends[at - 1] ?? 0));
    if (counts.join() !== answer.counts.join()) { answer = { ...answer, counts }; draw(); change(counts); }
  };
  function draw() {
    if (!answer || !canvas.isConnected) return;
    const layers = profile.layers, [c, width] = prepare(canvas, height), wide = width / layers.length, top = Math.max(...layers.map(layer => layer[2])) || 1, ends = [...borders(), layers.length];
    let stage = 0;
    layers.forEach((layer, at) => {
      while (at >= ends[stage]) stage++;
      c.fillStyle = colour("--row"); c.fillRect(at * wide, head, wide - .5, height - head);
      c.fillStyle = colour(`--run${answer.ranks[stage] % 6}`); const tall = layer[2] / top * (height - head - 2); c.fillRect(at * wide, height - tall, Math.max(wide - 1, .7), tall);
    });
    c.font = "12px system-ui, sans-serif"; c.textAlign = "center"; c.textBaseline = "middle";
    ends.forEach((end, at) => {
      const start = ends[at - 1] ?? 0, room = (end - start) * wide, words = room > 92 ? `stage ${at}, rank ${answer.ranks[at]}` : room > 20 ? String(at) : "";
      c.fillStyle = colour("--ink"); c.fillText(words, (start + end) / 2 * wide, 10);
      if (at < ends.length - 1) {  // a border stands out from the colours beside it by its edge
        c.fillStyle = colour("--paper"); c.fillRect(end * wide - 3, 2, 6, height - 2);
        c.fillStyle = colour(at === chosen ? "--accent" : "--ink"); c.fillRect(end * wide - 1.5, 2, 3, height - 2);
        c.strokeStyle = colour("--paper"); c.lineWidth = 2; c.beginPath(); c.arc(end * wide, height / 2 + 8, at === chosen ? 8 : 6, 0, 7); c.fill(); c.stroke();
      }
    });
    const list = borders();
    if (list.length) {
      const before = layers[list[chosen] - 1], after = layers[list[chosen]];
      canvas.setAttribute("aria-valuemin", 1); canvas.setAttribute("aria-valuemax", layers.length - 1); canvas.setAttribute("aria-valuenow", list[chosen]);
      canvas.setAttribute("aria-valuetext", help.textContent = `Border ${chosen + 1} of ${list.length}: between ${before[0]} and ${after[0]}. Arrow keys move it, page up and page down choose another one.`);
    } else help.textContent = "One stage has no borders.";
  }
  const at = event => (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth * profile.layers.length;
  const tell = event => { const layer = profile.layers[Math.max(0, Math.min(profile.layers.length - 1, Math.floor(at(event))))]; showTip(`${layer[0]} (${layer[1]})\n${seconds(layer[2])} in all, F ${seconds(layer[3])}\nactivation ${size(layer[4])}, parameters ${size(layer[5])}`, event.clientX, canvas.getBoundingClientRect().bottom); };
  canvas.addEventListener("pointerdown", event => {
    if (!answer) return;
    const list = borders(), layer = at(event), near = list.reduce((best, border, index) => Math.abs(border - layer) < Math.abs(list[best] - layer) ? index : best, 0);
    if (list.length && Math.abs(list[near] - layer) / profile.layers.length * canvas.clientWidth < 24) { chosen = near; dragging = true; canvas.setPointerCapture(event.pointerId); draw(); }
    tell(event);
  });
  canvas.addEventListener("pointermove", event => { if (dragging) put(chosen, Math.round(at(event))); if (answer) tell(event); });
  canvas.addEventListener("pointerup", () => { dragging = false; }); canvas.addEventListener("pointercancel", () => { dragging = false; });
  canvas.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hideTip(); });
  canvas.addEventListener("keydown", event => {
    const list = answer ? borders() : [];
    if (!list.length) return;
    const act = { ArrowLeft: () => put(chosen, list[chosen] - 1), ArrowRight: () => put(chosen, list[chosen] + 1), PageDown: () => { chosen = Math.min(chosen + 1, list.length - 1); draw(); }, PageUp: () => { chosen = Math.max(chosen - 1, 0); draw(); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  return { box, draw, set(next) { if (!dragging) answer = next; else answer = { ...next, counts: answer.counts }; chosen = Math.min(chosen, Math.max(0, answer.counts.length - 2)); draw(); } };
}

// What each rank holds, by purpose.
function memoryRows() {
  const box = element("div");
  return { box, set(answer, cap) {
    const totals = answer.memory.map(parts => parts.reduce((sum, part) => sum + part, 0)), top = Math.max(...totals, cap || 0) || 1, used = answer.parts.map((_, at) => answer.memory.some(parts => parts[at] > 0));
    const key = element("div", { class: "legend" }, ...answer.parts.filter((_, at) => used[at]).map(name => { const swatch = element("i", {}, "\u00a0"); swatch.style.background = colour(PARTS[name]); return element("span", {}, swatch, name); }));
    const canvas = element("canvas", { role: "img", "aria-label": answer.memory.map((_, rank) => `rank ${rank}: ${size(totals[rank])}`).join(", ") });
    const caption = element("p", {}, ...totals.flatMap((total, rank) => [element("span", { class: cap && total > cap ? "bad" : "" }, `rank ${rank} ${size(total)}${cap && total > cap ? ` (above the cap by ${size(total - cap)})` : ""}`), rank < totals.length - 1 ? ", " : ""]));
    box.replaceChildren(key, canvas, caption);
    const [c, width] = prepare(canvas, totals.length * 20 + 2), left = 52;
    answer.memory.forEach((parts, rank) => {
      let x = left;
      c.fillStyle = colour("--ink"); c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle"; c.textAlign = "right"; c.fillText(`rank ${rank}`, left - 6, rank * 20 + 8);
      c.fillStyle = colour("--row"); c.fillRect(left, rank * 20, width - left, 16);
      parts.forEach((part, at) => { const wide = part / top * (width - left - 2); c.fillStyle = colour(PARTS[answer.parts[at]]); c.fillRect(x, rank * 20, wide, 16); x += wide; });
      if (cap) { c.fillStyle = colour("--bad"); c.fillRect(left + cap / top * (width - left - 2) - 1, rank * 20 - 2, 2, 20); }
    });
  } };
}
