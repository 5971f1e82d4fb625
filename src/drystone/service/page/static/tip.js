// One tooltip for everything that has `data-tip`: on hover and on focus, first line bold; Escape hides it.
import { byId, h, show } from "./dom.js";

const tip = () => byId("tip");

export function showTip(x, y, lines) {
  const [title, ...rest] = lines;
  show(tip(), h("b", {}, title), rest.map((one) => (Array.isArray(one)
    ? h("span", { class: "tip-row" }, h("span", {}, one[2] && h("i", { class: `key ${one[2]}` }), one[0]), h("span", { class: "num" }, one[1]))
    : h("span", {}, one))));
  tip().hidden = false;
  const box = tip().getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth - 6 ? x - box.width - 14 : x + 14;
  const top = y + 18 + box.height > innerHeight - 6 ? y - box.height - 12 : y + 18;
  tip().style.setProperty("left", `${Math.max(6, left)}px`);
  tip().style.setProperty("top", `${Math.max(6, top)}px`);
}

export function hideTip() { tip().hidden = true; }

export function watchTips() {
  const over = (event) => {
    const holder = event.target.closest?.("[data-tip]");
    if (!holder) { if (!event.target.closest?.("[data-chart]")) hideTip(); return; }
    const box = holder.getBoundingClientRect();
    const isKey = event.type === "focusin";
    if (isKey && !holder.matches(":focus-visible")) return;
    const x = isKey ? box.left + box.width / 2 : event.clientX, y = isKey ? box.bottom - 10 : event.clientY;
    showTip(x, y, holder.dataset.tip.split("\n"));
  };
  document.addEventListener("pointermove", over);
  document.addEventListener("focusin", over);
  document.addEventListener("focusout", hideTip);
  document.addEventListener("pointerleave", hideTip);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  addEventListener("scroll", hideTip, { passive: true });
}
