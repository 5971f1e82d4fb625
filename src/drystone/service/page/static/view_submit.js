// A new job: its file, what it would get and cost, and then the job.
import { post, Refused } from "./api.js";
import { h } from "./dom.js";
import { card, heading } from "./parts.js";
import { count, dollars, duration, gpus, three } from "./words.js";

const EXAMPLE = "name: my-first-job\nmodel: mini-gpt\ntrain: {steps: 100, batch: 8, sequence: 32}\n";
const draft = { text: EXAMPLE, plan: null, problem: "", isBusy: false, job: "" };

export const view = {
  title: () => "Submit a job",
  wants: new Set(),
  load: async () => draft,
  waiting: () => [heading("Submit a job")],
  render: (data) => [heading("Submit a job"), form(data), data.plan && planCard(data.plan)],
};

function form(data) {
  return card("Job file", { hint: "YAML: a model, and how much to train it. No hardware need be named. Paths are those of the machine that runs the service." },
    h("form", { "data-form": "submit" },
      h("label", {}, h("span", { class: "hidden" }, "The job file"),
        h("textarea", { name: "text", rows: 12, spellcheck: "false", "data-keep": true, value: data.text })),
      data.problem && h("p", { class: "note bad", role: "alert" }, data.problem),
      data.job && h("p", { class: "note", role: "status" }, "Submitted as ", h("a", { href: `#/job/${encodeURIComponent(data.job)}` }, `job ${data.job}`), "."),
      h("div", { class: "buttons" },
        h("button", { class: "button", name: "act", value: "plan", disabled: data.isBusy }, "Show what it would get"),
        h("button", { class: "button primary", name: "act", value: "submit", disabled: data.isBusy }, "Submit"))));
}

function planCard(plan) {
  const { chosen } = plan;
  return card("What it would get", { hint: `${count(plan.steps)} steps. ${chosen.is_free ? "Now it would get" : "Alone it would get"} ${gpus(chosen.gpus)}: ${duration(chosen.seconds)}${chosen.dollars === null ? "" : `, about ${dollars(chosen.dollars)}`}.` },
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Options" }, h("table", { class: "plain choices" },
      h("caption", { class: "hidden" }, "What it could choose from, the best first"),
      h("thead", {}, h("tr", {}, ["GPUs", "Samples/s", "Would take", "Would cost", "Free now", "Speed is"].map((one, at) => h("th", { scope: "col", class: at && at < 4 ? "right" : "" }, one)))),
      h("tbody", {}, plan.options.map((one) => h("tr", {}, h("th", { scope: "row" }, gpus(one.gpus)),
        h("td", { class: "num right" }, three(one.samples_per_second)), h("td", { class: "num right" }, duration(one.seconds)),
        h("td", { class: "num right" }, dollars(one.dollars)), h("td", {}, one.is_free ? "yes" : "no"), h("td", {}, one.is_measured ? "measured" : "estimated")))))));
}

/** Plan or submit what stands in the form. */
export async function send(event, redraw) {
  draft.text = event.target.elements.text.value;
  Object.assign(draft, { problem: "", job: "", isBusy: true });
  redraw();
  try {
    const isPlan = event.submitter?.value === "plan", body = { text: draft.text };
    if (isPlan) draft.plan = await post("/v1/plan", body);
    else Object.assign(draft, { job: (await post("/v1/jobs", { ...body, client_key: crypto.randomUUID?.() || String(Math.random()) })).id, plan: null });
  } catch (error) {
    draft.plan = null;
    draft.problem = error instanceof Refused ? [error.message, error.hint].filter(Boolean).join(". ") : "The service does not answer. Nothing was submitted twice: try again.";
  }
  draft.isBusy = false;
  redraw();
}
