// Who are you? A token, once; the service keeps it in a cookie that scripts cannot read.
import { h } from "./dom.js";

export function signIn(message = "") {
  return h("div", { class: "sign-in" },
    h("form", { class: "card", "data-form": "sign-in", "aria-labelledby": "sign-in-title" },
      h("img", { src: "/page/stones.svg", alt: "", width: 44, height: 44 }),
      h("h1", { id: "sign-in-title" }, "Sign in to Drystone"),
      h("p", { class: "hint" }, "With the token that an administrator gave you. It begins with “dry_”."),
      h("label", { for: "token" }, "Token"),
      h("input", { id: "token", name: "token", type: "password", required: true, autocomplete: "current-password", maxlength: 200, spellcheck: "false", "aria-describedby": message ? "sign-in-error" : null, "aria-invalid": message ? "true" : null }),
      h("p", { id: "sign-in-error", class: "form-error", role: "alert" }, message),
      h("button", { class: "button primary wide", type: "submit" }, "Sign in"),
      h("p", { class: "hint after" }, "No token yet? An administrator makes one:", h("br"), h("code", {}, "drystone token create --role viewer"))));
}
