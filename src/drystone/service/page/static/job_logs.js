// What a rank writes, followed while the job runs.
import { get, part } from "./api.js";
import { byId, h } from "./dom.js";
import { card } from "./parts.js";

const MOST_CHARACTERS = 200_000;
const LONGEST_FOLLOW = 2000;

const kept = { text: "" }; // all that was read
const shown = { search: "", job: "", rank: 0, epoch: 0, stream: "log", offset: 0, isBusy: false, isOver: false };
let timer = 0;

export function logCard(job, context) {
  const launches = job.launches || [];
  const last = launches.find((one) => one.epoch === shown.epoch) || launches.at(-1);
  const numRanks = last ? last.devices.length : 1;
  const pick = (name, label, options, value) => h("label", {}, h("span", { class: "soft" }, label),
    h("select", { "data-log": name }, options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text))));
  if (!launches.length) return null;
  return card("Log", {
    name: "log", actions: h("div", { class: "log-pickers" },
      pick("rank", "rank", Array.from({ length: Math.min(numRanks, 256) }, (_, rank) => [rank, rank]), shown.rank),
      pick("epoch", "launch", [[0, "latest"], ...launches.slice(-40).map((one) => [one.epoch, one.epoch]).reverse()], shown.epoch),
      pick("stream", "stream", [["log", "errors and messages"], ["out", "reports"]], shown.stream),
      h("label", {}, h("span", { class: "soft" }, "only with"),
        h("input", { type: "search", "data-log-search": true, value: shown.search, maxlength: 80, size: 12, autocomplete: "off" }))),
  }, h("pre", { id: "log-text", class: "log-text", tabindex: 0, "data-keep": true, "aria-label": "Log", "data-live": context.isLive ? "yes" : "no" }));
}

/** Begin to read what the view shows; called after it was drawn. */
export function followLog(jobId) {
  if (shown.job !== jobId) Object.assign(shown, { job: jobId, rank: 0, epoch: 0, stream: "log", offset: 0, isOver: false });
  const box = byId("log-text");
  if (!box) return;
  if (!box.dataset.own) { box.dataset.own = "yes"; restart(); } else if (!timer && !shown.isOver) read();
}

/** Show only the lines that have this in them. */
export function searchLog(text) {
  shown.search = text;
  const box = byId("log-text");
  if (box && kept.text) box.textContent = matching(kept.text);
}

function matching(text) {
  if (!shown.search) return text;
  const wanted = shown.search.toLowerCase();
  return text.split("\n").filter((line) => line.toLowerCase().includes(wanted)).join("\n") || "No line has this in it.";
}

export function stopLog() {
  clearTimeout(timer);
  timer = 0;
  shown.job = "";
}

export function changeLog(name, value) {
  shown[name] = name === "stream" ? value : Number(value);
  if (name === "epoch") shown.rank = 0;
  restart();
}

function restart() {
  clearTimeout(timer);
  timer = 0;
  Object.assign(shown, { offset: 0, isOver: false });
  const box = byId("log-text");
  if (box) box.replaceChildren(h("span", { class: "faint" }, "Reading"));
  read();
}

async function read() {
  const box = byId("log-text");
  if (!box || shown.isBusy || !shown.job) return;
  const asked = { ...shown };
  shown.isBusy = true;
  try {
    const answer = await get(`/v1/jobs/${part(asked.job)}/logs`, { rank: asked.rank, epoch: asked.epoch, offset: asked.offset, stream: asked.stream });
    if (asked.job === shown.job && asked.rank === shown.rank && asked.epoch === shown.epoch && asked.stream === shown.stream) take(box, answer, asked.offset);
  } catch (error) {
    if (!asked.offset) box.replaceChildren(h("span", { class: "faint" }, error.status === 403 ? "The logs of another team are not shown." : `The log cannot be read: ${error.message}`));
    shown.isOver = error.status === 403;
  } finally {
    shown.isBusy = false;
  }
  clearTimeout(timer);
  timer = shown.isOver ? 0 : setTimeout(() => { timer = 0; if (!document.hidden) read(); }, LONGEST_FOLLOW);
}

function take(box, answer, from) {
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  if (!from) { box.replaceChildren(); kept.text = ""; }
  if (answer.text) {
    kept.text = (kept.text + answer.text).slice(-MOST_CHARACTERS);
    if (shown.search) box.textContent = matching(kept.text); else box.append(answer.text);
  }
  if (!from && !answer.text) box.replaceChildren(h("span", { class: "faint" }, shown.stream === "log" ? "No errors, no messages. The stream “reports” has every step." : "Nothing was written."));
  else if (from && box.querySelector(".faint") && answer.text) box.querySelector(".faint").remove();
  if (box.textContent.length > MOST_CHARACTERS) box.textContent = box.textContent.slice(-MOST_CHARACTERS);
  shown.isOver = answer.is_over && answer.offset === from;
  shown.offset = answer.offset;
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}
