// Events as sentences.
import { h } from "./dom.js";

const BAD = new Set(["Failed", "Refused", "Interrupted", "StartFailed", "NodeLost", "RentalFailed", "NodeReclaimed"]);
const GOOD = new Set(["Finished", "NodeBack", "NodeJoined"]);
export const QUIET = new Set(["Progressed", "Described", "FilesKept", "Remembered", "SpeedChanged", "PhaseChanged"]);

const GROUPS = {
  jobs: ["Submitted", "Started", "Launched", "Stopped", "Interrupted", "StartFailed", "Finished", "Refused", "Cancelled", "Paused", "Unpaused", "Failed", "Warned", "Progressed"],
  decisions: ["Decided", "Learned"],
  nodes: ["NodeLost", "NodeBack", "NodeAdded", "NodeRemoved", "NodeSlowed", "Drained", "Undrained", "ClusterDescribed", "RentalAsked", "RentalFailed", "NodeJoined", "ReleaseAsked", "NodeReleased", "MarketDescribed", "BillSettled", "NodeReclaimed", "PriceChanged"],
};
export const groupOf = (event) => Object.keys(GROUPS).find((name) => GROUPS[name].includes(event.event)) || "other";

export const jobOf = (event) => event.job_id || event.job?.id || "";

/** What happened, with the job as a link. */
export function eventSentence(event) {
  const job = jobOf(event);
  return h("span", { class: "told" }, job && h("a", { href: `#/job/${encodeURIComponent(job)}` }, `Job ${job}`), job && " ", event.told,
    event.actor && h("span", { class: "actor" }, ` by ${event.actor}`));
}

export const toneOf = (event) => (BAD.has(event.event) ? "bad" : GOOD.has(event.event) ? "good" : "");
