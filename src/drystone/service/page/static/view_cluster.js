// The cluster: every GPU a tile, what runs on it, and how much is free.
import { get } from "./api.js";
import { h } from "./dom.js";
import { card, empty, emulatedChip, gpuText, heading, jobLink, progressBar, skeleton, stat, swatch } from "./parts.js";
import { tiles } from "./tiles.js";
import { bytes, count, dollars, duration, three } from "./words.js";

export const view = {
  title: () => "Cluster",
  wants: new Set(["jobs", "cluster"]),
  load: (_, signal) => get("/v1/page/overview", {}, signal),
  waiting: () => [heading("Cluster"), skeleton(86, 240, 240, 180)],
  render: (data, context) => [
    heading("Cluster", data.is_emulated && emulatedChip("emulated devices")),
    summary(data),
    data.is_emulated && emulatedNote(data),
    h("div", { class: "types", "data-key": "types" }, data.gpus.map((gpu) => typeCard(gpu, data, context))),
    runningCard(data),
  ],
  onProgress(data, rows) {
    const found = new Map(rows.map((one) => [one[0], one]));
    for (const job of data.running) {
      const row = found.get(job.id);
      if (row) [, job.step, job.progress, job.loss, job.step_seconds, job.eta_seconds, job.dollars] = row;
    }
  },
};

function summary(data) {
  const total = data.gpus.reduce((sum, one) => sum + one.total, 0);
  const used = data.nodes.reduce((sum, one) => sum + one.devices.filter((job) => job !== null).length, 0);
  return h("dl", { class: "stats", "data-key": "stats" },
    stat("GPUs in use", `${count(used)}`, ` of ${count(total)}`),
    stat("Running", count(data.counts.running)),
    stat("Waiting", count(data.counts.waiting)),
    stat("Done", count(data.counts.done)),
    stat("Failed", count(data.counts.failed), "", data.counts.failed ? "bad" : ""),
    stat("Cost now", dollars(data.dollars_per_hour), " an hour"));
}

function emulatedNote(data) {
  const names = data.gpus.filter((one) => one.is_emulated).map((one) => one.gpu).join(", ");
  return h("p", { class: "note", "data-key": "emulated" }, h("strong", {}, "These GPUs are emulated. "),
    `${names}: processes on this machine's processor that really train, at the pace and with the memory that they are given. Costs are what the real ones would have.`);
}

function typeCard(gpu, data, context) {
  const nodes = data.nodes.filter((one) => one.gpu === gpu.gpu);
  if (!nodes.length) return null;
  const used = nodes.reduce((sum, one) => sum + one.devices.filter((job) => job !== null).length, 0);
  const facts = [
    `${used} of ${gpu.total} in use`,
    nodes[0].memory_bytes ? `${bytes(nodes[0].memory_bytes)} each` : "",
    gpu.dollars_per_hour !== null ? `${dollars(gpu.dollars_per_hour)} an hour each` : "",
    gpu.is_emulated && nodes[0].speed ? `${three(nodes[0].speed * 100)} % of the real speed` : "",
  ].filter(Boolean).join(" · ");
  return card(gpu.gpu, { hint: facts, name: "gpu-type", actions: gpu.is_emulated && emulatedChip() },
    tiles(nodes, data.held, { mayDrain: context.may("drain") }));
}

function runningCard(data) {
  const all = data.counts.running > data.running.length
    && h("p", { class: "after" }, h("a", { href: "#/jobs?group=running" }, `All ${count(data.counts.running)} that run`));
  return card("Running now", { hint: data.running.length ? "The largest first. Colours are those of the tiles." : "", name: "running" },
    data.running.length
      ? h("ul", { class: "running-list" }, data.running.map((job) => runningRow(job, data.now_seconds)))
      : empty("No job runs", data.counts.waiting ? "Some wait; the next decision takes them up." : "Submit one, and it shows up here at once.", "drystone submit --model mini-gpt --steps 100 --batch 8 --sequence 32"),
    all);
}

function runningRow(job, now) {
  const left = job.eta_seconds ? `${duration(job.eta_seconds - now)} left` : job.phase === "starting" ? "starting" : "";
  return h("li", { "data-key": job.id, "data-job": job.id },
    swatch(job.id),
    h("span", { class: "who" }, jobLink(job), h("span", { class: "soft" }, `${job.owner ? `${job.owner} · ` : ""}${gpuText(job)}`)),
    progressBar(job),
    h("span", { class: "num soft left" }, left));
}
