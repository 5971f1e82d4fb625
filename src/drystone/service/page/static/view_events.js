// What happened, the newest first, as it happens.
import { get } from "./api.js";
import { h } from "./dom.js";
import { eventSentence, groupOf, QUIET, toneOf } from "./feed.js";
import { empty, heading, skeleton } from "./parts.js";
import { clock, day } from "./words.js";

const MOST = 400;
const SHOWN = 100;
const KINDS = [["", "All"], ["jobs", "Jobs"], ["decisions", "Decisions"], ["nodes", "Nodes"], ["people", "By people"]];

export const view = {
  title: () => "Events",
  wants: new Set(),
  async load(params, signal) {
    const answer = params.kind === "people"
      ? await get("/v1/audit", { most: MOST, newest: true }, signal)
      : await get("/v1/events", { most: MOST, newest: true }, signal);
    return { events: answer.events };
  },
  waiting: (params) => [heading("Events"), kinds(params), skeleton(620)],
  render(data, context) {
    const kind = context.params.kind || "";
    const shown = data.events.filter((one) => !QUIET.has(one.event) && (kind || one.event !== "Decided") && (!kind || (kind === "people" ? one.actor : groupOf(one) === kind))).reverse().slice(0, SHOWN);
    return [
      heading("Events"),
      kinds(context.params),
      h("div", { class: "card", "data-key": "feed" }, shown.length
        ? h("ol", { class: "feed", "aria-label": "The newest first" }, shown.map((one, at) => line(one, shown[at - 1])))
        : empty("Nothing happened yet", "Whatever happens shows up here at once.")),
    ];
  },
  onEvents(data, events) {
    const last = data.events.at(-1)?.sequence ?? 0;
    data.events = [...data.events, ...events.filter((one) => one.sequence > last)].slice(-MOST);
    return true;
  },
};

function kinds(params) {
  return h("div", { class: "filters", "data-key": "kinds" }, h("ul", { class: "pills", "aria-label": "Which events" }, KINDS.map(([kind, label]) => h("li", {},
    h("a", { href: `#/events${kind ? `?kind=${kind}` : ""}`, "aria-current": kind === (params.kind || "") ? "true" : null }, label)))));
}

function line(event, before) {
  const isNewDay = !before || day(before.time_seconds) !== day(event.time_seconds);
  return h("li", { "data-key": event.sequence, class: toneOf(event) },
    h("time", { class: "num", datetime: new Date(event.time_seconds * 1000).toISOString() }, clock(event.time_seconds), isNewDay && h("span", { class: "day" }, day(event.time_seconds))),
    h("span", { class: "spot", "aria-hidden": "true" }), eventSentence(event));
}
