// The queue and every other job, a page at a time, each with the reason for where it stands.
import { get } from "./api.js";
import { h } from "./dom.js";
import { emulatedChip, empty, gpuText, heading, jobLink, progressBar, skeleton, stateChip, swatch } from "./parts.js";
import { count, dollars, duration, moment } from "./words.js";

const GROUPS = [
  ["live", "Live"], ["running", "Running"], ["waiting", "Waiting"], ["paused", "Paused"], ["done", "Done"],
  ["failed", "Failed"], ["cancelled", "Cancelled"], ["all", "All"],
];
const MOST = 50;

const groupIn = (params) => (GROUPS.some(([name]) => name === params.group) ? params.group : "live");
const pageIn = (params) => Math.max(1, Math.floor(Number(params.page)) || 1);

export const view = {
  title: (params) => `Jobs: ${GROUPS.find(([name]) => name === groupIn(params))[1].toLowerCase()}`,
  wants: new Set(["jobs"]),
  load: (params, signal) => get("/v1/page/jobs", {
    group: groupIn(params), search: params.search, sort: params.sort, owner: params.owner, most: MOST, skip: (pageIn(params) - 1) * MOST,
  }, signal),
  waiting: (params) => [heading("Jobs"), filters(params, null), skeleton(620)],
  render: (data, context) => [
    heading("Jobs", data.is_emulated && emulatedChip("emulated devices")),
    filters(context.params, data.counts, data.owners),
    data.jobs.length ? table(data, context.params) : nothing(context.params),
    pager(context.params, data.total),
  ],
  onProgress(data, rows) {
    const found = new Map(rows.map((one) => [one[0], one]));
    for (const job of data.jobs) {
      const row = found.get(job.id);
      if (row) [, job.step, job.progress, job.loss, job.step_seconds, job.eta_seconds, job.dollars] = row;
    }
  },
};

function address(params, changes) {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries({ ...params, ...changes })) if (value && !(key === "page" && value === 1)) made.set(key, value);
  return `#/jobs?${made}`;
}

function filters(params, counts, owners = []) {
  const group = groupIn(params);
  return h("div", { class: "filters", "data-key": "filters" },
    h("ul", { class: "pills", "aria-label": "Which jobs" }, GROUPS.map(([name, label]) => h("li", { "data-key": name },
      h("a", { href: address(params, { group: name, page: null }), "aria-current": name === group ? "true" : null },
        label, h("span", { class: "count" }, counts ? count(counts[name]) : " "))))),
    h("label", { class: "search" }, h("span", { class: "hidden" }, "Search by name, owner, model or number"),
      h("input", { type: "search", placeholder: "Name, owner, model or number", "data-search": true, value: params.search || "", maxlength: 80, autocomplete: "off" })),
    owners.length > 1 && h("label", { class: "owner" }, h("span", { class: "hidden" }, "Whose jobs"),
      h("select", { "data-filter": "owner" }, h("option", { value: "", selected: !params.owner }, "Everybody"),
        owners.map((one) => h("option", { value: one, selected: one === params.owner }, one)))),
    h("button", { type: "button", class: "button", "data-save": "jobs" }, "Save as CSV"));
}

const COLUMNS = [["Job", "name"], ["State", ""], ["GPUs", "gpus"], ["Progress", "progress"], ["When", null], ["Cost", "cost"], ["Why", null]];

function columnHead([label, sort], params) {
  const isSorted = sort !== null && (params.sort || "") === sort;
  return h("th", { scope: "col", class: label === "Cost" ? "right" : "", "aria-sort": isSorted && sort ? (sort === "name" ? "ascending" : "descending") : null },
    sort === null ? label : h("a", { class: "sort", href: address(params, { sort, page: null }), title: sort ? `Sort by ${label.toLowerCase()}` : "In their usual order" }, label));
}

/** The rows that are shown, as a table for a spreadsheet. */
export function asCsv(data) {
  const cell = (value) => {
    const text = String(value ?? ""); // a formula would be run by some programs: a quote before it keeps it text
    return `"${(/^[=+@-]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  const rows = data.jobs.map((job) => [job.id, job.name, job.owner, job.team, job.state, gpuText(job), job.step, job.num_steps, job.loss, job.submit_seconds, job.end_seconds, job.dollars, job.why]);
  return [["id", "name", "owner", "team", "state", "gpus", "step", "num_steps", "loss", "submit_seconds", "end_seconds", "dollars", "why"], ...rows].map((one) => one.map(cell).join(",")).join("\r\n");
}

function table(data, params) {
  const now = data.now_seconds;
  return h("div", { class: "card flush", "data-key": "table" },
    h("table", { class: "jobs" },
      h("caption", { class: "hidden" }, "Jobs"),
      h("thead", {}, h("tr", {}, COLUMNS.map((one) => columnHead(one, params)))),
      h("tbody", {}, data.jobs.map((job) => row(job, now)))));
}

function row(job, now) {
  return h("tr", { "data-key": job.id, "data-href": `#/job/${encodeURIComponent(job.id)}` },
    h("td", { class: "name" }, h("div", { class: "with-swatch" }, job.state === "running" ? swatch(job.id) : h("span", { class: "swatch none" }),
      h("span", {}, jobLink(job), h("span", { class: "soft" }, `${job.id}${job.owner ? ` · ${job.owner}` : ""}`)))),
    h("td", { class: "state-cell" }, stateChip(job)),
    h("td", { class: "gpus" }, gpuText(job) || h("span", { class: "faint" }, "none")),
    h("td", { class: "progress-cell" }, progressBar(job)),
    h("td", { class: "when num" }, when(job, now)),
    h("td", { class: "cost num right" }, dollars(job.dollars)),
    h("td", { class: "why" }, h("span", { title: job.why }, job.why)));
}

function when(job, now) {
  if (job.end_seconds) return `ended ${moment(job.end_seconds, now)}`;
  if (job.state === "running") return job.eta_seconds ? `${duration(job.eta_seconds - now)} left` : "starting";
  return `waits ${duration(now - job.submit_seconds)}`;
}

function nothing(params) {
  const group = groupIn(params);
  const box = params.search
    ? empty("Nothing found", `No job in this list matches “${params.search}”.`)
    : group === "failed" ? empty("Nothing failed", "Long may it last.")
      : group === "waiting" ? empty("Nobody waits", "Every job that is here has its GPUs.")
        : empty("No jobs here", "Submit one, and it shows up here at once.", "drystone submit --model mini-gpt --steps 100 --batch 8 --sequence 32");
  return h("div", { class: "card", "data-key": "nothing" }, box);
}

function pager(params, total) {
  const pages = Math.max(1, Math.ceil(total / MOST)), page = Math.min(pageIn(params), pages);
  if (pages === 1) return h("p", { class: "pager soft", "data-key": "pager" }, total ? `${count(total)} in all` : "");
  const link = (to, text) => (to >= 1 && to <= pages
    ? h("a", { class: "button", href: address(params, { page: to }), rel: to < page ? "prev" : "next" }, text)
    : h("span", { class: "button off", "aria-disabled": "true" }, text));
  return h("nav", { class: "pager", "aria-label": "Pages", "data-key": "pager" },
    link(page - 1, "Before"), h("span", { class: "soft num" }, `page ${count(page)} of ${count(pages)}, ${count(total)} in all`), link(page + 1, "Next"));
}
