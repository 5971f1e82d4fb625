// GPUs as tiles: one a device, grouped by node, filled with the colour of the job that has it.
import { h } from "./dom.js";
import { jobClass } from "./parts.js";

/** All nodes of one GPU type. */
export function tiles(nodes, held, { mayDrain }) {
  const isMany = nodes.reduce((sum, one) => sum + one.num_gpus, 0) > 160;
  let isFirst = true;
  return h("div", { class: `nodes ${isMany ? "many" : ""}`, "data-tiles": true, role: "group", "aria-label": `GPUs of type ${nodes[0].gpu}; arrow keys move, Enter opens the job` },
    nodes.map((node) => {
      const made = nodeBox(node, held, mayDrain, isFirst);
      isFirst = false;
      return made;
    }));
}

function nodeBox(node, held, mayDrain, isFirst) {
  const word = node.is_lost ? "lost" : node.is_drained ? "drained" : "";
  return h("div", { class: `node ${word}`, "data-key": node.id },
    h("div", { class: "node-head" },
      h("a", { class: "node-name", href: `#/node/${encodeURIComponent(node.id)}` }, node.id),
      word && h("span", { class: `chip ${word}` }, word),
      mayDrain && h("button", {
        type: "button", class: "quiet drain", "data-act": node.is_drained ? "undrain" : "drain", "data-node": node.id,
        "aria-label": `${node.is_drained ? "Use again" : "Drain"} ${node.id}`,
      }, node.is_drained ? "Use again" : "Drain")),
    h("div", { class: "tiles" }, node.devices.map((jobId, device) => tile(node, device, jobId, held, isFirst && device === 0))));
}

function tile(node, device, jobId, held, isFirst) {
  const job = jobId === null ? null : held[jobId];
  const emulated = node.is_emulated ? "emulated on a processor" : "real";
  const where = `${node.id}, device ${device}, ${node.gpu}`;
  const tip = job
    ? [`Job ${jobId}: ${job.name}`, job.owner && `Owner: ${job.owner}`, job.model && `Model: ${job.model}`, where, `This device is ${emulated}`]
    : [node.is_lost ? "Lost" : node.is_drained ? "Drained" : "Free", where, `This device is ${emulated}`];
  const common = {
    "data-key": `${node.id}/${device}`, "data-tip": tip.filter(Boolean).join("\n"), tabindex: isFirst ? 0 : -1, "data-tile": true,
    "aria-label": tip.filter(Boolean).join(", "),
  };
  const name = `tile ${node.is_emulated ? "is-emulated" : ""}`;
  if (!job) return h("span", { ...common, class: `${name} free`, role: "img" });
  return h("a", { ...common, class: `${name} ${jobClass(jobId)}`, href: `#/job/${encodeURIComponent(jobId)}`, "data-job": jobId }, h("span", {}, jobId));
}

/** Arrow keys go from tile to tile; a job's tiles light up together. */
export function watchTiles() {
  document.addEventListener("keydown", (event) => {
    const here = event.target.closest?.("[data-tile]");
    if (!here || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const all = [...here.closest("[data-tiles]").querySelectorAll("[data-tile]")];
    const to = target(all, here, event.key);
    if (!to) return;
    for (const one of all) one.tabIndex = one === to ? 0 : -1;
    to.focus();
  });
  document.addEventListener("pointerover", light);
  document.addEventListener("focusin", light);
}

function target(all, here, key) {
  const at = all.indexOf(here);
  if (key === "Home") return all[0];
  if (key === "End") return all.at(-1);
  if (key === "ArrowLeft") return all[at - 1];
  if (key === "ArrowRight") return all[at + 1];
  const box = here.getBoundingClientRect(), middle = box.left + box.width / 2;
  const isDown = key === "ArrowDown";
  const rows = all.map((one) => [one, one.getBoundingClientRect()])
    .filter(([, one]) => (isDown ? one.top > box.bottom - 2 : one.bottom < box.top + 2));
  if (!rows.length) return null;
  const edge = isDown ? Math.min(...rows.map(([, one]) => one.top)) : Math.max(...rows.map(([, one]) => one.top));
  const next = rows.filter(([, one]) => Math.abs(one.top - edge) < 4);
  return next.reduce((best, one) => (Math.abs(one[1].left + one[1].width / 2 - middle) < Math.abs(best[1].left + best[1].width / 2 - middle) ? one : best))[0];
}

function light(event) {
  const job = event.target.closest?.("[data-job]")?.dataset.job;
  const root = document.getElementById("view");
  if (root.dataset.ownLit === (job || "")) return;
  root.dataset.ownLit = job || "";
  relight();
}

/** Again after the view was drawn anew. */
export function relight() {
  const root = document.getElementById("view"), job = root.dataset.ownLit;
  for (const one of root.querySelectorAll(".tile")) one.classList.toggle("dim", Boolean(job) && one.dataset.job !== job);
}
