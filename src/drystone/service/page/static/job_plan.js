// A plan as a picture: each device in the middle, what it computes to the left, what it holds to the right.
import { h } from "./dom.js";
import { card, empty, emulatedChip } from "./parts.js";
import { bytes, duration, plural, three } from "./words.js";

const WAYS = {
  cell: "Equal GPUs, equal shares", uneven: "Unlike GPUs, each with its own share of the batch and of the state",
  groups: "A pipeline over groups of equal GPUs", script: "A script of its owner divides the work",
};
const MOST_ROWS = 24;

export function planCard(plan, types) {
  const isEven = plan && new Set(plan.stages.flatMap((one) => one.ranks.map((rank) => rank.gpu))).size === 1 && plan.way === "uneven";
  const hint = plan ? `${isEven ? WAYS.cell : WAYS[plan.way] || plan.way}.${plan.step_seconds ? ` A step should take ${plan.step_seconds < 10 ? `${three(plan.step_seconds)} s` : duration(plan.step_seconds)}.` : ""}` : "";
  if (!plan) return card("Plan", {}, empty("No plan yet", "It is made when the job gets GPUs."));
  const all = plan.stages.flatMap((one) => one.ranks);
  const top = { compute: Math.max(1e-9, ...all.map((one) => one.compute_share ?? 0)), state: Math.max(1e-9, ...all.map((one) => one.state_share ?? 0)) };
  const isEmulated = all.some((one) => types.emulated.includes(one.gpu));
  return card("Plan: who computes what, who holds what", { hint, name: "plan", actions: isEmulated && emulatedChip("emulated devices") },
    plan.stages.map((stage, index) => stageBlock(stage, index, plan, top, types)));
}

/** Ranks that do and hold the same are one row where there are very many. */
function rowsOf(ranks) {
  if (ranks.length <= MOST_ROWS) return ranks.map((one) => ({ ...one, same: 1 }));
  const rows = [];
  for (const one of ranks) {
    const last = rows.at(-1);
    if (last && last.node === one.node && last.gpu === one.gpu && last.batch === one.batch && last.state_share === one.state_share) last.same += 1;
    else rows.push({ ...one, same: 1 });
  }
  return rows;
}

function stageBlock(stage, index, plan, top, types) {
  const layers = stage.num_layers ? `layers ${stage.first_layer + 1} to ${stage.first_layer + stage.num_layers}` : "";
  const title = plan.stages.length > 1 ? `Stage ${index + 1}: ${layers}` : stage.num_layers ? `All ${plural(stage.num_layers, "layer")}` : "All of it";
  return h("div", { class: "stage" },
    h("h3", {}, title),
    h("table", { class: "shares" },
      h("caption", { class: "hidden" }, `Shares of ${title}`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "right" }, "computes"), h("th", { scope: "col" }, "device"), h("th", { scope: "col" }, "holds"), h("th", { scope: "col" }, "memory"))),
      h("tbody", {}, rowsOf(stage.ranks).map((one) => rankRow(one, top, types)))));
}

const share = (x, most, name) => h("span", { class: `share ${name}`, style: { width: `${Math.max(1, (100 * (x || 0)) / most).toFixed(1)}%` } });
const cent = (x) => (x === null || x === undefined ? "not known" : `${three(100 * x)} %`);

function rankRow(one, top, types) {
  const tone = `t${Math.max(0, types.gpus.indexOf(one.gpu)) % 8}`;
  const full = one.memory_bytes && one.memory_capacity_bytes ? one.memory_bytes / one.memory_capacity_bytes : null;
  const names = one.same > 1 ? `${one.same} devices` : `device ${one.device}`;
  return h("tr", {},
    h("td", { class: "left-bar" }, h("span", { class: "bar-box" }, h("span", { class: "num" }, one.batch === null || one.batch === undefined ? "" : plural(one.batch, "sample")), share(one.compute_share, top.compute, tone))),
    h("th", { scope: "row" }, h("span", { class: "device" }, `${one.node} ${names}`), h("span", { class: "soft" }, one.gpu)),
    h("td", { class: "right-bar" }, h("span", { class: "bar-box" }, share(one.state_share, top.state, `${tone} held`), h("span", { class: "num" }, cent(one.state_share)))),
    h("td", { class: "memory" }, full === null ? h("span", { class: "faint" }, "not known")
      : h("span", { class: "gauge-box" }, h("span", { class: "gauge", role: "img", "aria-label": `${Math.round(100 * full)} % of its memory` }, h("span", { class: full > 0.95 ? "tight" : "", style: { width: `${Math.min(100, 100 * full).toFixed(1)}%` } })), h("span", { class: "num soft" }, `${bytes(one.memory_bytes)} of ${bytes(one.memory_capacity_bytes)}`))));
}
