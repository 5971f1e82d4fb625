// A job's life as blocks on a time axis: as high as it had GPUs.
import { h } from "./dom.js";
import { timeTicks } from "./chart.js";
import { card } from "./parts.js";
import { capital, clock, day, duration, gpus, moment, shortClock } from "./words.js";

const ENDS = new Set(["done", "failed", "refused", "cancelled"]);
const WORDS = { queued: "waiting", planned: "planned", starting: "starting", running: "running", resized: "running with other GPUs", paused: "paused" };
const numGpus = (span) => Object.values(span.gpus || {}).reduce((sum, one) => sum + one, 0);

export function timelineCard(job, now) {
  const spans = job.timeline.filter((one) => !ENDS.has(one.state));
  const end = job.timeline.find((one) => ENDS.has(one.state));
  const from = job.submit_seconds, until = Math.max(end ? end.start_seconds : now, from + 1);
  const most = Math.max(1, ...spans.map(numGpus));
  const at = (t) => `${(100 * Math.min(1, Math.max(0, (t - from) / (until - from)))).toFixed(3)}%`;
  return card("Life", { hint: `Height is the number of GPUs. ${told(job, spans, now)}`, name: "life" },
    h("div", { class: "life-axis", "aria-hidden": "true" },
      spans.map((span, index) => block(span, index, { from, until, most, now, at })),
      end && h("span", { class: `life-end s-${end.state}`, style: { left: at(end.start_seconds) } }),
      timeTicks(from, until, 6).filter((t) => (t - from) / (until - from) < 0.93).map((t) => h("span", { class: "life-tick", style: { left: at(t) } }, until - from > 2 * 86400 ? day(t) : until - from < 300 ? clock(t) : shortClock(t)))),
    h("ul", { class: "legend" }, ["queued", "planned", "starting", "running", "paused"].map((one) => h("li", {}, h("span", { class: `key l-${one}` }), WORDS[one]))),
    h("details", { class: "steps" }, h("summary", {}, job.timeline.length > 1 ? `All ${job.timeline.length} steps with reasons` : "The step with its reason"),
      h("ol", { class: "moments" }, job.timeline.slice(-120).reverse().map((span) => step(span, now)))));
}

function block(span, index, { from, until, most, now, at }) {
  const end = span.end_seconds ?? now;
  const share = (end - span.start_seconds) / (until - from);
  const number = numGpus(span), high = number ? 22 + 78 * (number / most) : 12;
  const label = number && share > 0.1 ? gpus(span.gpus) : "";
  const tip = [capital(WORDS[span.state] || span.state), `${moment(span.start_seconds, now, true)}, for ${duration(end - span.start_seconds)}`, gpus(span.gpus), span.plan, span.reason?.split("\n")[0]];
  return h("span", {
    class: `life-block l-${span.state}`, "data-key": `b${index}`, "data-tip": tip.filter(Boolean).join("\n"),
    style: { left: at(span.start_seconds), width: `max(2px, ${(100 * share).toFixed(3)}%)`, height: `${high.toFixed(1)}%` },
  }, label && h("span", {}, label));
}

function step(span, now) {
  const end = span.end_seconds ?? (ENDS.has(span.state) ? null : now);
  const words = WORDS[span.state] || span.state;
  return h("li", {}, h("time", { class: "num" }, moment(span.start_seconds, now, true)),
    h("span", {}, h("b", {}, capital(words)), end !== null && ` for ${duration(end - span.start_seconds)}`, numGpus(span) > 0 && ` on ${gpus(span.gpus)}`,
      span.reason && h("span", { class: "soft" }, `. ${capital(span.reason.split("\n")[0])}`)));
}

function told(job, spans, now) {
  const length = (state) => spans.filter((one) => state.includes(one.state)).reduce((sum, one) => sum + (one.end_seconds ?? now) - one.start_seconds, 0);
  const waited = length(["queued"]), ran = length(["running", "resized"]);
  const starts = job.num_starts > 1 ? `, started ${job.num_starts} times` : "";
  const faults = job.num_faults ? `, ${job.num_faults} ${job.num_faults === 1 ? "fault" : "faults"}` : "";
  return `Waited ${duration(waited)}${ran ? `, ran ${duration(ran)}` : ""}${starts}${faults}.`;
}
