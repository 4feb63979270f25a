// The pages by the part of the address after #.
import { element, hideTip } from "./dom.js";

const pages = { schedules: () => import("./schedules.js"), runs: () => import("./runs.js"), plan: () => import("./plan.js") };
let close = () => {}, opening = 0;

async function open(event) {
  // Between a click and its event, the page before may have written its state to the address.
  if (event && location.href !== event.newURL) history.replaceState(null, "", event.newURL);
  const asked = location.hash.slice(1).split("?")[0], name = asked in pages ? asked : "schedules", page = document.getElementById("page"), turn = ++opening, isOpen = () => turn === opening;
  document.querySelectorAll("nav a").forEach(link => { if (link.hash === "#" + name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current"); });
  close(); close = () => {}; hideTip();
  try {
    const module = await pages[name]();
    if (!isOpen()) return;
    page.replaceChildren();
    document.title = `${name[0].toUpperCase()}${name.slice(1)} · Stageline studio`;
    const leave = await module.show(page, isOpen) || (() => {});
    if (isOpen()) close = leave; else leave();
  } catch (error) {
    if (!isOpen()) return;
    page.replaceChildren(element("div", { class: "work" }, element("p", { class: "error" }, error.message)));
  }
}

addEventListener("hashchange", event => open(event));
addEventListener("scroll", hideTip, { passive: true });
open();
