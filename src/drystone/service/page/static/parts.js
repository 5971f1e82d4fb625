// Small pieces that several views share.
import { h } from "./dom.js";
import { capital, gpus, percent, stateWord } from "./words.js";

const COLOURS = 8, PATTERNS = 3;

/** The colour and pattern of a job: neighbours in number differ, and the number is always written too. */
export function jobClass(id) {
  const number = Number.isFinite(Number(id)) ? Number(id) : [...id].reduce((sum, one) => sum * 31 + one.codePointAt(0), 7) >>> 0;
  return `c${number % COLOURS} p${Math.floor(number / COLOURS) % PATTERNS}`;
}

const MARKS = {
  running: "M3 1.500 10.500 6 3 10.500z",
  queued: "M2 6h.01M6 6h.01M10 6h.01",
  paused: "M3.500 2v8M8.500 2v8",
  done: "m1.500 6.500 3 3 6-7",
  failed: "m2 2 8 8M10 2l-8 8",
  cancelled: "M2 6h8",
};
MARKS.refused = MARKS.failed;

/** A state as mark and word: told apart by shape as well as by colour. */
export function stateChip(job) {
  const mark = h("svg", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true", class: "mark" }, h("path", { d: MARKS[job.state] || "" }));
  return h("span", { class: `state s-${job.state}` }, mark, stateWord(job));
}

/** How far a job is. */
export function progressBar(job, label = true) {
  const share = Math.max(0, Math.min(1, job.progress || 0));
  const bar = h("span", { class: "progress", role: "img", "aria-label": `${percent(share)} done` },
    h("span", { class: `fill s-${job.state}`, style: { width: `${(100 * share).toFixed(1)}%` } }));
  return h("span", { class: "progress-line" }, bar, label && h("span", { class: "num", "aria-hidden": "true" }, percent(share)));
}

export const jobLink = (job) => h("a", { href: `#/job/${encodeURIComponent(job.id)}`, class: "job-link" }, job.name);

export const swatch = (id) => h("span", { class: `swatch ${jobClass(id)}`, "aria-hidden": "true" });

export function card(title, { hint = "", actions = null, name = "", level = "h2" } = {}, ...children) {
  const id = `h-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { class: `card ${name}`, "aria-labelledby": id, "data-key": id },
    h("div", { class: "card-head" }, h(level, { id }, title), actions),
    hint && h("p", { class: "hint" }, hint),
    ...children);
}

/** Nothing to show, said kindly, with what to do about it. */
export function empty(title, text, command = "") {
  const stones = h("svg", { viewBox: "0 0 120 64", width: 120, height: 64, "aria-hidden": "true", class: "empty-art" },
    h("path", { d: "M8 58 13 42l28-4 9 14-4 8z" }), h("path", { d: "m56 58 8-18 30 2 12 12-4 6z" }), h("path", { d: "M32 34 38 18l34-3 14 11-4 9-40 3z" }));
  return h("div", { class: "empty" }, stones, h("p", { class: "empty-title" }, title), h("p", { class: "hint" }, text),
    command && h("p", {}, h("code", { class: "command" }, command)));
}

export const stat = (label, value, more = "", name = "") => h("div", { class: `stat ${name}` },
  h("dt", {}, label), h("dd", {}, value, more && h("span", { class: "more" }, more)));

export const gpuText = (job) => gpus(job.gpus);

export const emulatedChip = (text = "emulated") => h("span", { class: "chip emulated" }, text);

/** Grey shapes of the size that the content will have. */
export const skeleton = (...heights) => h("div", { class: "skeleton", "aria-hidden": "true" }, heights.map((height) => h("div", { class: "card bone", style: { height: `${height}px` } })));

export function heading(title, ...more) {
  return h("div", { class: "page-head", "data-key": "head" }, h("h1", {}, title), ...more);
}

export const sentence = (text) => (text ? capital(text) + (/[.!?]$/.test(text) ? "" : ".") : "");
