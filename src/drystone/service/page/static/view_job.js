// One job: where it stands and why, its life, its curves, its plan, its choices and its log.
import { get, maybe, part } from "./api.js";
import { chart } from "./chart.js";
import { h } from "./dom.js";
import { logCard } from "./job_logs.js";
import { planCard } from "./job_plan.js";
import { timelineCard } from "./job_timeline.js";
import { card, empty, emulatedChip, gpuText, progressBar, sentence, skeleton, stat, stateChip, swatch } from "./parts.js";
import { count, dollars, duration, gpus, moment, three } from "./words.js";

const WHY_SECONDS = 30;
const known = { id: "", state: "", at: 0, why: undefined };
const OVER = new Set(["done", "failed", "refused", "cancelled"]);

export const view = {
  title: (params, data) => (data?.job ? `${data.job.name}, job ${data.job.id}` : `Job ${params.id}`),
  wants: new Set(["jobs"]),
  async load(params, signal) {
    const data = await get(`/v1/page/jobs/${part(params.id)}`, {}, signal);
    return { ...data, why: known.id === params.id ? known.why : undefined };
  },
  // The look into the future takes its time: the rest is shown before. It is asked for when the job changed, else rarely.
  async later(params, data, signal) {
    const state = `${data.job.state} ${data.job.num_starts} ${data.job.num_faults}`, seconds = performance.now() / 1000;
    if (known.id === params.id && known.state === state && seconds - known.at < WHY_SECONDS) return false;
    const why = await maybe(`/v1/jobs/${part(params.id)}/why`, {}, signal);
    Object.assign(known, { id: params.id, state, at: seconds, why });
    data.why = why;
    return true;
  },
  concerns: (params, message) => !message.jobs || message.jobs.some((one) => one.id === params.id),
  waiting: (params) => [head({ id: params.id, name: `Job ${params.id}` }), skeleton(110, 240, 280, 240)],
  render: (data, context) => {
    const { job, why } = data;
    const loss = job.loss ?? data.curves.launches.at(-1)?.points.at(-1)?.[1] ?? null;
    const isEmulated = Object.keys(job.gpus).some((one) => data.types.emulated.includes(one));
    return [
      head(job, actions(job, context), isEmulated),
      verdict(job, why),
      facts(job, data.now_seconds, loss),
      timelineCard(job, data.now_seconds),
      ...(!data.is_open ? [closedNote()] : !job.launches.length ? [
        optionsCard(job, why),
        !OVER.has(job.state) && h("p", { class: "hint later", "data-key": "later" }, "Its curves, its plan and its log come when it has GPUs."),
        descriptionCard(job),
      ] : [
        h("div", { class: "pair", "data-key": "curves" }, lossCard(job, data.curves), speedCard(job, data.curves)),
        planCard(data.plan, data.types),
        optionsCard(job, why),
        logCard(job, context),
        descriptionCard(job),
      ]),
    ];
  },
  onProgress(data, rows) {
    const row = rows.find((one) => one[0] === data.job.id);
    if (!row) return false;
    const { job, curves } = data;
    [, job.step, job.progress, job.loss, job.step_seconds, job.eta_seconds, job.dollars] = row;
    const last = curves?.launches.at(-1);
    if (last && job.loss !== null && job.step > (last.points.at(-1)?.[0] ?? -1)) last.points.push([job.step, job.loss, job.step_seconds]);
    return true;
  },
};

function head(job, buttons = null, isEmulated = false) {
  return h("div", { class: "page-head job-head", "data-key": "head" },
    h("p", { class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs"), h("span", { "aria-hidden": "true" }, " / "), job.id),
    h("h1", {}, job.state === "running" && swatch(job.id), job.name),
    job.state && stateChip(job), isEmulated && emulatedChip("emulated devices"), buttons);
}

const closedNote = () => h("p", { class: "note", "data-key": "closed" }, h("strong", {}, "This job belongs to another team. "), "Its curves, plan, reasons and logs are for that team to see.");

function actions(job, context) {
  const act = (name, label, kind = "") => h("button", { type: "button", class: `button ${kind}`, "data-act": name, "data-id": job.id, "data-name": job.name }, label);
  const compare = h("a", { class: "button", href: `#/compare?jobs=${encodeURIComponent(job.id)}` }, "Compare");
  if (!context.mayChange(job)) return h("div", { class: "buttons" }, compare);
  if (OVER.has(job.state)) return h("div", { class: "buttons" }, compare, act("again", "Submit again", "primary"));
  return h("div", { class: "buttons" }, compare,
    job.state === "paused" ? act("resume", "Resume", "primary") : act("pause", "Pause"),
    act("cancel", "Cancel", "danger"));
}

function verdict(job, why) {
  const text = why?.sentence || sentence(job.reason) || (job.state === "queued" ? "It waits for GPUs." : job.state === "done" ? "It is done." : "It runs.");
  return h("p", { class: `verdict s-${job.state}`, "data-key": "verdict" }, text);
}

function facts(job, now, loss) {
  const left = job.eta_seconds && job.state === "running" ? duration(job.eta_seconds - now) : null;
  const late = job.deadline_seconds && job.eta_seconds && job.eta_seconds > job.deadline_seconds;
  return h("dl", { class: "stats", "data-key": "facts" },
    stat("Progress", progressBar(job), `step ${count(job.step)} of ${count(job.num_steps)}`, "wide"),
    stat("GPUs", gpuText(job) || "none", "", "text"),
    stat(left ? "Time left" : OVER.has(job.state) ? "Took" : job.state === "running" ? "Since it came" : "Waits", left ?? duration((job.end_seconds ?? now) - job.submit_seconds),
      job.eta_seconds ? ` until ${moment(job.eta_seconds, now)}` : ""),
    job.deadline_seconds && stat("Deadline", moment(job.deadline_seconds, now), late ? " will be missed" : "", late ? "bad" : ""),
    stat("Loss", loss === null ? "none yet" : three(loss)),
    stat("Cost", dollars(job.dollars), job.dollars_per_hour ? ` at ${dollars(job.dollars_per_hour)} an hour` : ""),
    stat("Owner", job.owner || "nobody", job.team ? ` of ${job.team}` : "", "text"));
}

/** One curve over all launches; steps that were done again after a fault count as they were done last. */
export function pointsOf(curves, column) {
  let made = [];
  for (const { points } of curves?.launches || []) {
    const known = points.filter((point) => point[column] !== null).map((point) => [point[0], point[column]]);
    if (known.length) made = [...made.filter((point) => point[0] < known[0][0]), ...known];
  }
  return made;
}

const marksOf = (curves) => (curves?.launches || []).slice(1).map((one) => one.points[0] && { x: one.points[0][0] }).filter(Boolean);

function lossCard(job, curves) {
  const points = pointsOf(curves, 1).sort((a, b) => a[0] - b[0]);
  return card("Loss", { hint: "By step, over all launches. Dashed: it was started again." },
    points.length > 1
      ? chart(`loss-${job.id}`, { label: "Loss by step", series: [{ label: "loss", tone: "t0", points }], xText: three, xTip: (x) => `step ${count(x)}`, yText: three, marks: marksOf(curves) })
      : h("div", { class: "chart-empty" }, empty("No loss yet", job.description?.command?.length ? "A script reports it by DRYSTONE_PROGRESS." : "It comes with the first steps.")));
}

function speedCard(job, curves) {
  const batch = job.description?.global_batch || 1;
  const points = pointsOf(curves, 2).map(([step, seconds]) => [step, batch / seconds]).sort((a, b) => a[0] - b[0]);
  const high = [...points].map((one) => one[1]).sort((a, b) => a - b)[Math.floor(points.length * 0.98)] * 1.15;
  return card("Speed", { hint: "Samples a second, as measured." },
    points.length > 1
      ? chart(`speed-${job.id}`, { label: "Samples a second by step", low: 0, high, series: [{ label: "samples/s", tone: "t2", points: points.map(([x, y]) => [x, Math.min(y, high)]) }], xText: three, xTip: (x) => `step ${count(x)}`, yText: three, marks: marksOf(curves) })
      : h("div", { class: "chart-empty" }, empty("No speed yet", "It comes with the first steps.")));
}

function optionsCard(job, why) {
  if (why === undefined) return OVER.has(job.state) ? null : h("div", { class: "card bone", "data-key": "h-why-and-what-else-it-could-have", style: { height: "220px" } });
  if (!why || (!why.options.length && !why.decision)) return null;
  const decision = why.decision;
  return card("Why, and what else it could have", { name: "options" },
    decision && h("p", { class: "hint" }, `Last decision, ${moment(decision.time_seconds)}: ${decision.decision.toLowerCase()}. ${sentence(decision.reason)}`),
    why.blocking.length > 0 && h("p", { class: "hint" }, "It waits for ", why.blocking.slice(0, 12).map((id, at) => [at ? ", " : "", h("a", { href: `#/job/${encodeURIComponent(id)}` }, `job ${id}`)]), why.blocking.length > 12 && ` and ${why.blocking.length - 12} more`, "."),
    why.options.length > 0 && h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Options" }, h("table", { class: "plain choices" },
      h("caption", { class: "hidden" }, "What it can choose from, the best first"),
      h("thead", {}, h("tr", {}, ["GPUs", "Samples/s", "Would take", "Would cost", "Now", "Speed is"].map((one, at) => h("th", { scope: "col", class: at && at < 4 ? "right" : "" }, one)))),
      h("tbody", {}, why.options.slice(0, 8).map((one) => h("tr", { class: gpus(one.gpus) === gpus(job.gpus) ? "chosen" : "" },
        h("th", { scope: "row" }, gpus(one.gpus), gpus(one.gpus) === gpus(job.gpus) && h("span", { class: "chip" }, "has it")),
        h("td", { class: "num right" }, three(one.samples_per_second)), h("td", { class: "num right" }, duration(one.seconds)),
        h("td", { class: "num right" }, dollars(one.dollars)), h("td", {}, one.where), h("td", {}, one.is_measured ? "measured" : "estimated")))))),
    Object.keys(why.prices).length > 0 && h("p", { class: "hint after" }, `Worth of one more GPU to all jobs at that decision (only ratios count; 0: there is enough for everyone): ${Object.entries(why.prices).map(([gpu, worth]) => `${gpu} ${three(worth)}`).join(", ")}.`));
}

function descriptionCard(job) {
  const shown = Object.entries(job.description || {}).filter(([, value]) => value !== null && value !== "" && value !== 0 && !(Array.isArray(value) && !value.length));
  if (!shown.length) return null;
  return h("details", { class: "card", "data-key": "description" }, h("summary", {}, "As it was submitted"),
    h("dl", { class: "described" }, shown.map(([key, value]) => [h("dt", {}, key.replaceAll("_", " ")), h("dd", {}, Array.isArray(value) ? value.join(" ") : String(value))])));
}
