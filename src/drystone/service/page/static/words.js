// Numbers, times and money as people read them.

export const three = (x) => (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3))));
export const count = (x) => Math.round(x).toLocaleString("en");
export const percent = (x) => (x > 0 && x < 0.01 ? "under 1 %" : `${Math.floor(100 * x + 1e-9)} %`);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** `2 h 5 min`: two units at most. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "not known";
  const total = Math.max(0, Math.round(seconds));
  if (total < 60) return `${total} s`;
  const days = Math.floor(total / 86400), hours = Math.floor((total % 86400) / 3600);
  const minutes = Math.floor((total % 3600) / 60), rest = total % 60;
  if (days) return hours && days < 10 ? `${days} d ${hours} h` : `${days} d`;
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  return rest && minutes < 10 ? `${minutes} min ${rest} s` : `${minutes} min`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const SHORT = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export const clock = (seconds) => CLOCK.format(seconds * 1000);
export const shortClock = (seconds) => SHORT.format(seconds * 1000);
export const day = (seconds) => DAY.format(seconds * 1000);

/** A time of day, with the date where it is another day. */
export function moment(seconds, now = Date.now() / 1000, precise = false) {
  const time = precise ? clock(seconds) : shortClock(seconds);
  return day(seconds) === day(now) ? time : `${day(seconds)}, ${time}`;
}

export function dollars(x) {
  if (x === null || x === undefined) return "not known";
  if (x !== 0 && Math.abs(x) < 0.01) return "under $0.01";
  return `$${Math.abs(x) < 1000 ? x.toFixed(2) : Math.round(x).toLocaleString("en")}`;
}

export function bytes(x) {
  if (x === null || x === undefined) return "not known";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (x >= size) return `${three(x / size)} ${unit}`;
  }
  return `${x} B`;
}

/** `2 A100-80GB + 4 T4`. */
export const gpus = (table) => Object.entries(table || {}).map(([gpu, n]) => `${n} ${gpu}`).join(" + ");

export const STATE_WORDS = {
  queued: "waiting", running: "running", paused: "paused", done: "done", failed: "failed", refused: "refused",
  cancelled: "cancelled", starting: "starting", training: "running", waiting: "waiting", "backing off": "trying again",
  held: "held", planned: "planned", resized: "running",
};

/** What a job is doing, in a word. */
export const stateWord = (job) => STATE_WORDS[job.phase] || STATE_WORDS[job.state] || job.state;
