// A question before anything is changed, and what came of it.
import { byId, h, show } from "./dom.js";

/** Ask; resolves to true when confirmed. */
export function confirmed({ title, text, verb, isDangerous = false }) {
  const dialog = byId("dialog");
  return new Promise((resolve) => {
    show(dialog,
      h("h2", { id: "dialog-title" }, title),
      h("p", {}, text),
      h("div", { class: "buttons" },
        h("button", { type: "button", class: "button", value: "no" }, "Go back"),
        h("button", { type: "button", class: `button ${isDangerous ? "danger" : "primary"}`, value: "yes" }, verb)));
    const click = (event) => {
      const button = event.target.closest("button");
      if (button) dialog.close(button.getAttribute("value"));
    };
    const done = () => {
      dialog.removeEventListener("click", click);
      resolve(dialog.returnValue === "yes");
    };
    dialog.returnValue = "";
    dialog.addEventListener("click", click);
    dialog.addEventListener("close", done, { once: true });
    dialog.showModal();
    dialog.querySelector("button").focus();
  });
}

/** Say something for a few seconds. */
export function toast(text, isBad = false) {
  document.querySelector(".toast")?.remove();
  const made = h("div", { class: `toast ${isBad ? "bad" : ""}`, role: isBad ? "alert" : "status" }, text);
  document.body.append(made);
  setTimeout(() => made.remove(), isBad ? 9000 : 4500);
}
