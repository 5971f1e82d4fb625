// Several runs in one chart: loss by step, smoothed or not, on a plain or a logarithmic scale.
import { get, part } from "./api.js";
import { chart, legend } from "./chart.js";
import { h } from "./dom.js";
import { card, empty, heading, skeleton } from "./parts.js";
import { pointsOf } from "./view_job.js";
import { count, three } from "./words.js";

const MOST = 8;
const SMOOTH = 0.9; // the share of what came before, where curves are smoothed

export const view = {
  title: () => "Compare jobs",
  wants: new Set(["jobs"]),
  async load(params, signal) {
    const ids = [...new Set((params.jobs || "").split(/[ ,]+/).filter(Boolean))].slice(0, MOST);
    const found = await Promise.all(ids.map((id) => get(`/v1/page/jobs/${part(id)}`, {}, signal).catch((error) => { if (error.status !== 404) throw error; return null; })));
    return { ids, runs: found.filter(Boolean) };
  },
  waiting: (params) => [heading("Compare jobs"), controls(params), skeleton(320)],
  render: (data, context) => [heading("Compare jobs"), controls(context.params), lossCard(data, context.params)],
};

function controls(params) {
  const toggle = (name, label) => h("label", {}, h("input", { type: "checkbox", "data-filter": name, checked: params[name] === "yes" }), ` ${label}`);
  return h("div", { class: "filters", "data-key": "controls" },
    h("label", { class: "search" }, h("span", { class: "hidden" }, "Numbers of jobs"),
      h("input", { type: "text", inputmode: "numeric", placeholder: "Numbers of jobs, e.g. 3, 7, 12", "data-filter": "jobs", value: params.jobs || "", maxlength: 120, autocomplete: "off" })),
    toggle("smooth", "Smooth"), toggle("log", "Logarithmic"));
}

export function smoothed(points) {
  let last = null;
  return points.map(([x, y]) => [x, (last = last === null ? y : SMOOTH * last + (1 - SMOOTH) * y)]);
}

const lossOf = (run) => pointsOf(run.curves, 1).sort((a, b) => a[0] - b[0]);

function lossCard(data, params) {
  const isLog = params.log === "yes";
  const series = data.runs.map((run, at) => {
    const points = params.smooth === "yes" ? smoothed(lossOf(run)) : lossOf(run);
    return { label: `${run.job.id}: ${run.job.name}`, tone: `t${at % 8}`, points: isLog ? points.filter((one) => one[1] > 0).map(([x, y]) => [x, Math.log10(y)]) : points };
  }).filter((one) => one.points.length > 1);
  if (!series.length) {
    return h("div", { class: "card", "data-key": "nothing" }, data.ids.length
      ? empty("Nothing to compare yet", "None of these jobs has reported a loss, or they belong to another team.")
      : empty("Which jobs?", "Write the numbers of up to eight jobs above."));
  }
  const yText = isLog ? (y) => three(10 ** y) : three;
  return card("Loss by step", { hint: isLog ? "On a logarithmic scale." : "" },
    chart(`compare-${data.ids.join("-")}-${params.smooth || ""}-${params.log || ""}`, { label: "Loss by step", height: 360, series, xText: three, xTip: (x) => `step ${count(x)}`, yText }),
    legend(series));
}
