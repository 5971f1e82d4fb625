// Events as sentences.
import { h } from "./dom.js";
import { gpus, three } from "./words.js";

const BAD = new Set(["Failed", "Refused", "Interrupted", "StartFailed", "NodeLost", "RentalFailed", "NodeReclaimed"]);
const GOOD = new Set(["Finished", "NodeBack", "NodeJoined"]);
export const QUIET = new Set(["Progressed", "Described", "Remembered", "SpeedChanged", "PhaseChanged"]);

const GROUPS = {
  jobs: ["Submitted", "Started", "Launched", "Stopped", "Interrupted", "StartFailed", "Finished", "Refused", "Cancelled", "Paused", "Unpaused", "Failed", "Progressed"],
  decisions: ["Decided", "Learned"],
  nodes: ["NodeLost", "NodeBack", "NodeSlowed", "Drained", "Undrained", "ClusterDescribed", "RentalAsked", "RentalFailed", "NodeJoined", "NodeReleased", "NodeReclaimed", "PriceChanged"],
};
export const groupOf = (event) => Object.keys(GROUPS).find((name) => GROUPS[name].includes(event.event)) || "other";

const because = (event) => (event.reason ? `: ${event.reason.split("\n")[0]}` : "");

const SENTENCES = {
  Submitted: () => "was submitted",
  Started: (event) => `gets GPUs${because(event)}`,
  Launched: (event) => `starts on ${event.plan}`,
  Stopped: (event) => `gives its GPUs back${because(event)}`,
  Interrupted: (event) => `was interrupted${because(event)}`,
  StartFailed: (event) => `did not come up${because(event)}`,
  Finished: () => "is done",
  Refused: (event) => `was refused${because(event)}`,
  Cancelled: () => "was cancelled",
  Paused: (event) => `was paused${because(event)}`,
  Unpaused: () => "may run again",
  Failed: (event) => `failed${because(event)}`,
  Progressed: (event) => `reported ${three(event.samples_per_second || 0)} samples/s`,
  Decided: (event) => `${(event.decision || "decision").toLowerCase()}${because(event)}`,
  Learned: (event) => (event.measured_samples_per_second
    ? `taught a speed: ${three(event.measured_samples_per_second)} samples/s on ${gpus(Object.fromEntries(event.gpus || []))}, estimated ${three(event.estimated_samples_per_second)}`
    : "taught that its kind of work needs more memory"),
  NodeLost: (event) => `Node ${event.node} is lost`,
  NodeBack: (event) => `Node ${event.node} is back`,
  NodeSlowed: (event) => `Node ${event.node} runs at ${Math.round(100 * event.speed_share)} % of its speed`,
  Drained: (event) => `Node ${event.node} is drained`,
  Undrained: (event) => `Node ${event.node} is used again`,
  ClusterDescribed: (event) => `The cluster has ${(event.nodes || []).length} nodes`,
  RentalAsked: (event) => `${event.num_nodes} of ${event.offer} asked for${because(event)}`,
  RentalFailed: (event) => `${event.offer} could not be had${because(event)}`,
  NodeJoined: (event) => `A rented node joined: ${event.spec?.id || event.offer}`,
  NodeReleased: (event) => `Node ${event.node} was given back${because(event)}`,
  NodeReclaimed: (event) => `Node ${event.node} was taken back${because(event)}`,
  PriceChanged: (event) => `${event.offer} now costs $${event.price_dollars_per_hour} an hour`,
  TokenMade: (event) => `A token was made: ${event.name} (${event.role})`,
  TokenRevoked: () => "A token was revoked",
  TeamSet: (event) => `Team ${event.name} was set`,
};

export const jobOf = (event) => event.job_id || event.job?.id || "";

/** What happened, with the job as a link. */
export function eventSentence(event) {
  const told = (SENTENCES[event.event] || (() => event.event))(event);
  const job = jobOf(event);
  return h("span", { class: "told" }, job && h("a", { href: `#/job/${encodeURIComponent(job)}` }, `Job ${job}`), job && " ", told,
    event.actor && h("span", { class: "actor" }, ` by ${event.actor}`));
}

export const toneOf = (event) => (BAD.has(event.event) ? "bad" : GOOD.has(event.event) ? "good" : "");
