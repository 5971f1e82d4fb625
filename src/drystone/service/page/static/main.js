// The frame: which view, who asks, whether what is shown is live, and what people do.
import { get, part, post, Refused, remove } from "./api.js";
import { drawCharts, watchCharts } from "./chart.js";
import { confirmed, toast } from "./dialog.js";
import { byId, h, show } from "./dom.js";
import { changeLog, followLog, searchLog, stopLog } from "./job_logs.js";
import { Live } from "./live.js";
import { relight, watchTiles } from "./tiles.js";
import { hideTip, watchTips } from "./tip.js";
import { view as cluster } from "./view_cluster.js";
import { view as events } from "./view_events.js";
import { view as compare } from "./view_compare.js";
import { view as job } from "./view_job.js";
import { asCsv, view as jobs } from "./view_jobs.js";
import { view as node } from "./view_node.js";
import { view as prices } from "./view_prices.js";
import { signIn } from "./view_sign_in.js";
import { view as spend } from "./view_spend.js";
import { send, view as submit } from "./view_submit.js";
import { clock } from "./words.js";

const VIEWS = { cluster, jobs, job, node, compare, submit, prices, spend, events };
const WITH_ID = new Set(["job", "node"]);
const NAV = [["cluster", "Cluster"], ["jobs", "Jobs"], ["submit", "Submit"], ["prices", "Prices"], ["spend", "Spend"], ["events", "Events"]];
const ICONS = {
  cluster: "M2 2h5v5H2zM9 2h5v5H9zM2 9h5v5H2zM9 9h5v5H9z", jobs: "M2 4h12M2 8h12M2 12h8", prices: "m2 12 4-5 3 3 5-7", submit: "M8 3v10M3 8h10",
  spend: "M8 2v12M11 4.500c-1-1-6-1.500-6 1s6 1.500 6 4-5 2.500-6.500 1", events: "M8 4v4l3 2M14 8A6 6 0 1 1 2 8a6 6 0 0 1 12 0z",
};
const LEAST_SECONDS = 1; // between two loads of a view
const root = byId("view");
const live = new Live();
const now = { session: null, name: "", view: null, params: {}, data: null, loaded: 0, timer: 0, loading: null, isDue: false, draft: 0 };

// --- who may what --------------------------------------------------------------------------------
const RANKS = ["viewer", "submitter", "admin"];
const has = (role) => RANKS.indexOf(now.session?.role) >= RANKS.indexOf(role);
const context = () => ({
  params: now.params, isLive: live.state === "live",
  may: (act) => has(act === "drain" ? "admin" : "submitter"),
  mayChange: (one) => has("admin") || (has("submitter") && (one.team || "") === (now.session.team || "")),
});

async function whoAsks() {
  now.session = await get("/v1/session");
  drawAccount();
  return now.session.role !== "";
}

// --- routes --------------------------------------------------------------------------------------
function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  const params = Object.fromEntries(new URLSearchParams(query || ""));
  if (WITH_ID.has(name) && id) return [name, { ...params, id: decodeURIComponent(id) }];
  return [VIEWS[name] && !WITH_ID.has(name) ? name : "cluster", params];
}

function go() {
  if (location.hash === "#view") return; // the skip link
  const [name, params] = route();
  const isOther = name !== now.name || params.id !== now.params.id;
  if (isOther) { stopLog(); hideTip(); }
  const isSearch = !isOther && params.search !== now.params.search;
  Object.assign(now, { name, params, view: VIEWS[name] });
  if (isOther) {
    now.data = null;
    draw();
    scrollTo(0, 0);
    if (now.draft) root.focus({ preventScroll: true });
  }
  now.draft += 1;
  drawNav();
  load({ isAnew: isOther || !isSearch });
}

// --- loading and drawing -------------------------------------------------------------------------
async function load({ isAnew = false } = {}) {
  if (!now.session?.role || !now.view) return;
  if (isAnew) now.loading?.abort();
  else if (now.loading) { now.isDue = true; return; }
  const mine = new AbortController(), { view, params } = now;
  now.loading = mine;
  now.isDue = false;
  clearTimeout(now.timer);
  now.timer = 0;
  try {
    const data = await view.load(params, mine.signal);
    if (now.loading !== mine) return;
    now.data = data;
    now.loaded = performance.now() / 1000;
    live.caughtUp();
    draw();
    if (await view.later?.(params, data, mine.signal) && now.data === data) draw();
  } catch (error) {
    if (now.loading !== mine || error.name === "AbortError") return;
    await failed(error);
  } finally {
    if (now.loading === mine) now.loading = null;
  }
  if (now.isDue) due();
}

/** Load again soon: at most once a second, and not while nobody looks. */
function due() {
  if (now.timer || document.hidden) { now.isDue = true; return; }
  const least = now.view?.slow || LEAST_SECONDS;
  const wait = Math.max(0.05, now.loaded + least - performance.now() / 1000);
  now.timer = setTimeout(() => { now.timer = 0; load(); }, wait * 1000);
}

async function failed(error) {
  if (error instanceof Refused && error.status === 401) { await askForToken(); return; }
  if (error instanceof Refused && error.status === 404) {
    show(root, h("div", { class: "card", "data-key": "gone" }, h("h1", {}, "There is no such thing"), h("p", {}, error.message), h("p", {}, h("a", { href: "#/jobs" }, "All jobs"))));
    live.caughtUp();
    return;
  }
  if (error instanceof Refused && (error.status === 429 || error.status === 503)) { // too much at once: a little later
    now.timer ||= setTimeout(() => { now.timer = 0; load(); }, 1000 * (1 + 2 * Math.random()));
    return;
  }
  if (error instanceof Refused) { toast(error.message, true); now.timer ||= setTimeout(() => { now.timer = 0; load(); }, 3000); return; }
  console.error(error);
  if (live.state === "live" || live.state === "catching-up") live.lose();
}

function draw() {
  const { view, data, params } = now;
  document.title = `${view.title(params, data)} · Drystone`;
  show(root, ...(data ? view.render(data, { ...context() }) : view.waiting(params)));
  drawCharts(root);
  if (root.dataset.ownLit) relight();
  if (now.name === "job" && data) followLog(params.id);
}

function drawNav() {
  const here = { job: "jobs", compare: "jobs", node: "cluster" }[now.name] || now.name;
  show(byId("nav"), NAV.filter(([name]) => name !== "submit" || has("submitter")).map(([name, label]) => h("a", { href: `#/${name}`, "aria-current": name === here ? "page" : null },
    h("svg", { viewBox: "0 0 16 16", width: 18, height: 18, "aria-hidden": "true" }, h("path", { d: ICONS[name] })), label)));
  byId("nav").hidden = !now.session?.role;
}

function drawAccount() {
  const { name, role, needs_token: needsToken, team } = now.session || {};
  show(byId("account"), role
    ? [h("span", { class: "role", title: [name, team].filter(Boolean).join(", ") }, h("b", {}, role), name && h("span", { class: "soft who-name" }, name)),
      needsToken && h("button", { type: "button", class: "quiet", "data-act": "sign-out" }, "Sign out")]
    : []);
}

function drawStatus() {
  const { state } = live;
  document.documentElement.dataset.live = state;
  const time = live.serverSeconds ? clock(live.serverSeconds) : "";
  const words = { live: "Live", "catching-up": "Loading", connecting: "Connecting", lost: "Not live" };
  show(byId("status"), now.session?.role ? [h("span", { class: `pulse ${state}`, "aria-hidden": "true" }), h("b", {}, words[state]), time && h("time", { class: "num" }, time)] : []);
  const notice = byId("notice");
  const isLost = state === "lost" && Boolean(now.session?.role);
  const text = isLost
    ? `The connection is lost. What you see is as it was at ${time || "the start"}, and may have changed. Connecting again.`
    : live.lastError ? `The controller is troubled: ${live.lastError}` : "";
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}

// --- the stream ----------------------------------------------------------------------------------
live.addEventListener("state", drawStatus);
live.addEventListener("message", ({ detail: { kind, data } }) => {
  drawStatus();
  if (kind === "hello") load({ isAnew: true });
  if (!now.data || !now.view) return;
  if (kind === "events" && now.view.onEvents?.(now.data, data.events) && !document.hidden) draw();
  if (kind === "progress" && now.view.onProgress && now.view.onProgress(now.data, data.rows, data) !== false && !document.hidden) {
    if (data.now_seconds) now.data.now_seconds = data.now_seconds;
    draw();
  }
  if (now.view.wants.has(kind) && (!now.view.concerns || now.view.concerns(now.params, data))) due();
});
live.addEventListener("state", async () => {
  // A stream that is refused looks like one that is lost: ask who we are.
  if (live.state !== "lost") return;
  try { if (!(await whoAsks())) await askForToken(); } catch { /* it is lost indeed */ }
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && now.isDue) due(); });

// --- signing in and out --------------------------------------------------------------------------
async function askForToken(message = "") {
  live.stop();
  stopLog();
  now.session = { ...(now.session || {}), role: "" };
  now.loading?.abort();
  Object.assign(now, { loading: null, data: null });
  drawAccount();
  drawNav();
  drawStatus();
  document.title = "Sign in · Drystone";
  show(root, signIn(message));
  byId("token").focus();
}

async function tryToken(form) {
  try {
    now.session = await post("/v1/session", { token: form.elements.token.value.trim() });
    begin();
  } catch (error) {
    const text = error instanceof Refused
      ? error.status === 401 ? "This token is not known here, or it was revoked." : error.message
      : "The service does not answer.";
    await askForToken(text);
  }
}

function begin() {
  drawAccount();
  live.start();
  now.name = "";
  go();
}

// --- what people do ------------------------------------------------------------------------------
const QUESTIONS = {
  cancel: (set) => ({ title: `Cancel ${set.name}?`, text: `Job ${set.id} ends for good. Its last checkpoint stays.`, verb: "Cancel the job", isDangerous: true }),
  pause: (set) => ({ title: `Pause ${set.name}?`, text: `Job ${set.id} writes a checkpoint, gives its GPUs back and waits until it is resumed.`, verb: "Pause the job" }),
  resume: (set) => ({ title: `Resume ${set.name}?`, text: `Job ${set.id} waits for GPUs again and goes on from its checkpoint.`, verb: "Resume the job" }),
  again: (set) => ({ title: `Submit ${set.name} again?`, text: `A new job like job ${set.id}, from its beginning. Its checkpoints are not used.`, verb: "Submit it again" }),
  drain: (set) => ({ title: `Drain ${set.node}?`, text: "Nothing more starts there. What runs there writes a checkpoint and moves elsewhere.", verb: "Drain the node", isDangerous: true }),
  undrain: (set) => ({ title: `Use ${set.node} again?`, text: "Jobs may start there from the next decision on.", verb: "Use the node" }),
};
const DONE = { again: "submitted again", cancel: "cancelled", pause: "paused", resume: "resumed", drain: "drained", undrain: "used again" };

async function act(button) {
  const { act: verb } = button.dataset;
  if (verb === "sign-out") {
    await remove("/v1/session").catch(() => null);
    await askForToken();
    return;
  }
  if (!(await confirmed(QUESTIONS[verb](button.dataset)))) return;
  const { id, node } = button.dataset;
  try {
    await post(id ? `/v1/jobs/${part(id)}/${verb}` : `/v1/nodes/${part(node)}/${verb}`);
    toast(`${id ? `Job ${id}` : `Node ${node}`} is ${DONE[verb]}.`);
    load({ isAnew: true });
  } catch (error) {
    toast(error.message, true);
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (button) { act(button); return; }
  if (event.target.closest("#theme")) { turnTheme(); return; }
  if (event.target.closest("[data-save]")) { saveCsv(); return; }
  const row = event.target.closest("[data-href]");
  if (row && !event.target.closest("a, button") && !getSelection().toString()) location.hash = row.dataset.href;
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.target.matches("[data-form=sign-in]")) tryToken(event.target);
  if (event.target.matches("[data-form=submit]")) send(event, draw);
});
document.addEventListener("change", (event) => {
  const { log, filter } = event.target.dataset || {};
  if (log) { changeLog(log, event.target.value); draw(); }
  if (filter) change({ [filter]: event.target.type === "checkbox" ? (event.target.checked ? "yes" : "") : event.target.value, page: "" });
});
/** The same view with other parameters. */
function change(changes) {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries({ ...now.params, ...changes })) if (value && key !== "id") made.set(key, value);
  history.replaceState(null, "", `#/${now.name}${now.params.id ? `/${part(now.params.id)}` : ""}?${made}`);
  go();
}

function saveCsv() {
  const address = URL.createObjectURL(new Blob([asCsv(now.data)], { type: "text/csv" }));
  const link = h("a", { href: address, download: "jobs.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

let typing = 0;
document.addEventListener("input", (event) => {
  if (event.target.matches("[data-log-search]")) { searchLog(event.target.value.trim()); return; }
  if (!event.target.matches("[data-search]")) return;
  clearTimeout(typing);
  typing = setTimeout(() => {
    change({ group: now.params.group || "live", search: event.target.value.trim(), page: "" });
  }, 200);
});

// --- light and dark ------------------------------------------------------------------------------
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
function drawTheme() {
  const label = `Turn ${isDark() ? "light" : "dark"}`;
  byId("theme").setAttribute("aria-label", label);
  byId("theme").title = label;
  show(byId("theme"), h("svg", { viewBox: "0 0 16 16", width: 18, height: 18, "aria-hidden": "true" },
    h("path", { d: isDark() ? "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1" : "M13.500 9.500A6 6 0 0 1 6.500 2.500a6 6 0 1 0 7 7z" })));
}
function turnTheme() {
  const to = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = to;
  try { localStorage.setItem("drystone-theme", to); } catch { /* it holds until the page is closed */ }
  drawTheme();
}
dark.addEventListener("change", drawTheme);

// --- the beginning -------------------------------------------------------------------------------
addEventListener("hashchange", () => { if (now.session?.role) go(); });
watchTips();
watchCharts();
watchTiles();
drawTheme();
drawStatus();
Object.assign(now, { name: route()[0], params: route()[1] });
now.view = VIEWS[now.name];
draw();

async function start() {
  try {
    if (await whoAsks()) begin(); else await askForToken();
  } catch {
    byId("notice").hidden = false;
    byId("notice").textContent = "The service does not answer. Trying again.";
    setTimeout(start, 2000);
  }
}
start();
