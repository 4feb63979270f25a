// The pages by the part of the address after #.
import { element, hideTip } from "./dom.js";

const pages = { schedules: () => import("./schedules.js"), runs: () => import("./runs.js"), plan: () => import("./plan.js") };
let close = () => {}, opening = 0;

async function open() {
  const name = location.hash.slice(1).split("?")[0] || "schedules", page = document.getElementById("page"), turn = ++opening;
  const load = pages[name] || pages.schedules;
  document.querySelectorAll("nav a").forEach(link => { if (link.hash === "#" + name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current"); });
  close(); close = () => {}; hideTip();
  try {
    const module = await load();
    if (turn !== opening) return;
    page.replaceChildren();
    document.title = `${name[0].toUpperCase()}${name.slice(1)} · Stageline studio`;
    close = await module.show(page) || (() => {});
  } catch (error) {
    page.replaceChildren(element("div", { class: "work" }, element("p", { class: "error" }, error.message)));
  }
}

addEventListener("hashchange", open);
addEventListener("scroll", hideTip, { passive: true });
open();
