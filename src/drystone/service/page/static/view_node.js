// One node: its devices, who has them, and what happened to it.
import { get, Refused } from "./api.js";
import { h } from "./dom.js";
import { eventSentence, toneOf } from "./feed.js";
import { card, empty, emulatedChip, skeleton, stat } from "./parts.js";
import { tiles } from "./tiles.js";
import { bytes, clock, dollars, three } from "./words.js";

const MOST = 1000;

export const view = {
  title: (params) => `Node ${params.id}`,
  wants: new Set(["jobs", "cluster"]),
  async load(params, signal) {
    const overview = await get("/v1/page/overview", {}, signal);
    const node = overview.nodes.find((one) => one.id === params.id);
    if (!node) throw new Refused(404, { message: `there is no node ${params.id}` });
    const { events } = await get("/v1/events", { most: MOST, newest: true }, signal);
    const row = overview.nodes.indexOf(node);
    const concerns = (event) => (event.event.startsWith("Node") || event.event.endsWith("rained"))
      && (event.node === row || event.node === node.id || event.spec?.id === node.id);
    return { ...overview, node, events: events.filter(concerns).reverse().slice(0, 50) };
  },
  waiting: (params) => [head({ id: params.id }, false), skeleton(86, 240)],
  render: ({ node, ...data }, context) => {
    const type = data.gpus.find((one) => one.gpu === node.gpu);
    return [
      head(node, node.is_emulated, context.may("drain")),
      h("dl", { class: "stats", "data-key": "stats" },
        stat("GPUs", `${node.num_gpus - node.free}`, ` of ${node.num_gpus} in use`),
        stat("Type", node.gpu, "", "text"),
        node.memory_bytes && stat("Memory", bytes(node.memory_bytes), " each"),
        type?.dollars_per_hour !== null && stat("Price", dollars((type?.dollars_per_hour || 0) * node.num_gpus), " an hour"),
        node.speed && stat("Speed", `${three(node.speed * 100)} %`, " of the real one")),
      node.is_lost && h("p", { class: "note bad", "data-key": "lost" }, "This node does not answer. Its jobs went on elsewhere, or wait."),
      node.is_drained && h("p", { class: "note", "data-key": "drained" }, node.drained_reason ? `Nothing starts here: ${node.drained_reason}` : "Nothing starts here: somebody drained it."),
      card("Devices", {}, tiles([node], data.held, { mayDrain: false })),
      card("What happened to it", {}, data.events.length
        ? h("ol", { class: "feed", "aria-label": "The newest first" }, data.events.map((one) => h("li", { "data-key": one.sequence, class: toneOf(one) },
          h("time", { class: "num", datetime: new Date(one.time_seconds * 1000).toISOString() }, clock(one.time_seconds)), h("span", { class: "spot", "aria-hidden": "true" }), eventSentence(one))))
        : empty("Nothing of late", "Losses, drains and returns of this node are listed here.")),
    ];
  },
};

function head(node, isEmulated, mayDrain = false) {
  return h("div", { class: "page-head job-head", "data-key": "head" },
    h("p", { class: "crumb" }, h("a", { href: "#/cluster" }, "Cluster"), h("span", { "aria-hidden": "true" }, " / "), "node"),
    h("h1", {}, node.id), isEmulated && emulatedChip("emulated devices"),
    mayDrain && h("div", { class: "buttons" }, h("button", { type: "button", class: "button", "data-act": node.is_drained ? "undrain" : "drain", "data-node": node.id }, node.is_drained ? "Use again" : "Drain")));
}
