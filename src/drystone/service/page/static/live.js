// The stream of what happens: heard, lost, found again. What is shown is called live only while the stream is
// heard and the view was loaded after it was (re)connected.

const SILENCE_SECONDS = 15; // the service says something every 5 s
const FIRST_WAIT_SECONDS = 0.5;
const MOST_WAIT_SECONDS = 8;

export class Live extends EventTarget {
  constructor() {
    super();
    this.state = "connecting"; // connecting | catching-up | live | lost
    this.heardSeconds = 0; // by this machine's clock
    this.serverSeconds = 0; // of the last message, by the service's clock
    this.lastError = "";
    this.retryAt = 0;
    this.source = null;
    this.lastId = "";
    this.wait = FIRST_WAIT_SECONDS;
    this.timer = 0;
    this.wasLive = false;
    setInterval(() => this.watch(), 1000);
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.retryNow(); });
    addEventListener("pagehide", () => this.stop());
    addEventListener("pageshow", (event) => { if (event.persisted) this.start(); });
  }

  start() {
    this.stop();
    const source = new EventSource(this.lastId ? `/v1/stream?after=${this.lastId}` : "/v1/stream");
    this.source = source;
    for (const kind of ["hello", "events", "jobs", "progress", "cluster", "tick"]) {
      source.addEventListener(kind, (message) => this.hear(source, kind, message));
    }
    source.onerror = () => { if (source === this.source) this.lose(); };
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.source?.close();
    this.source = null;
  }

  hear(source, kind, message) {
    if (source !== this.source) return;
    this.heardSeconds = performance.now() / 1000;
    if (message.lastEventId) this.lastId = message.lastEventId;
    const data = JSON.parse(message.data);
    if (data.now_seconds) this.serverSeconds = data.now_seconds;
    if ("last_error" in data) this.lastError = data.last_error || "";
    if (kind === "hello") {
      this.wait = FIRST_WAIT_SECONDS;
      this.become("catching-up");
    }
    this.dispatchEvent(new CustomEvent("message", { detail: { kind, data } }));
  }

  /** The view has been loaded over this connection. */
  caughtUp() {
    if (this.state === "catching-up" && this.source) {
      this.wasLive = true;
      this.become("live");
    }
  }

  lose() {
    this.stop();
    this.retryAt = performance.now() / 1000 + this.wait;
    // Not all at once: fifty browsers lose a service at the same moment.
    const seconds = this.wait * (0.75 + 0.5 * Math.random());
    this.wait = Math.min(this.wait * 2, MOST_WAIT_SECONDS);
    this.timer = setTimeout(() => this.start(), seconds * 1000);
    this.become("lost");
  }

  retryNow() {
    if (this.state === "lost" && this.timer) this.start();
  }

  watch() {
    const silent = performance.now() / 1000 - this.heardSeconds;
    if (this.source && this.state !== "lost" && this.state !== "connecting" && silent > SILENCE_SECONDS) this.lose();
  }

  become(state) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state"));
  }
}
