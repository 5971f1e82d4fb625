// Line charts in SVG: as wide as there is room, with a cross-hair for the pointer and for arrow keys.
import { h, morph } from "./dom.js";
import { hideTip, showTip } from "./tip.js";
import { clock, day, shortClock } from "./words.js";

const PAD = { left: 52, right: 16, top: 10, bottom: 26 };
const specs = new Map();
const drawn = new WeakMap();
const cursors = new WeakMap();

/**
 * A place for a chart. spec: {label, height, series: [{label, tone, points: [[x, y]], isSteps, isFilled}], xText, yText,
 * xTicks, from, until, low, high, marks: [{x, label}], line: {y, label}}
 */
export function chart(id, spec) {
  specs.set(id, spec);
  const last = spec.series.map((one) => {
    const known = one.points.filter((point) => point[1] !== null).at(-1);
    return known ? `${one.label} ${spec.yText(known[1])}` : "";
  }).filter(Boolean).join(", ");
  return h("div", {
    class: "chart", "data-chart": id, "data-key": `chart-${id}`, "data-keep": true, tabindex: 0, role: "img",
    "aria-label": `${spec.label}${last ? `; at the end: ${last}` : ""}. Arrow keys read it out.`,
    style: { height: `${spec.height || 220}px` },
  });
}

export function legend(series) {
  return h("ul", { class: "legend" }, series.map((one) => h("li", {},
    h("svg", { width: 20, height: 10, "aria-hidden": "true" }, h("line", { class: `line ${one.tone}`, x1: 1, x2: 19, y1: 5, y2: 5 })), one.label)));
}

export function niceTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999) || raw;
  const ticks = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return ticks;
}

/** Round times of day between two moments. */
export function timeTicks(from, until, wanted) {
  const steps = [10, 30, 60, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000];
  const step = steps.find((one) => (until - from) / one <= wanted) || 31536000;
  const zone = new Date(until * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let t = Math.ceil((from - zone) / step) * step + zone; t <= until; t += step) ticks.push(t);
  return ticks;
}
/** Days, minutes or, where several marks would bear the same minute, seconds. */
export function timeText(from, until) {
  if (until - from > 2 * 86400) return day;
  return until - from < 600 ? clock : shortClock;
}

function rangeOf(spec) {
  const all = spec.series.flatMap((one) => one.points);
  const xs = all.map((one) => one[0]), ys = all.map((one) => one[1]).filter((y) => y !== null);
  if (spec.line) ys.push(spec.line.y);
  const from = spec.from ?? Math.min(...xs), until = spec.until ?? Math.max(...xs);
  let low = spec.low ?? Math.min(...ys), high = spec.high ?? Math.max(...ys) * (spec.low === 0 ? 1.06 : 1);
  if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
  if (high <= low) high = low + (Math.abs(low) || 1);
  return { from, until: until > from ? until : from + 1, low, high };
}

function pathOf(one, px, py, floor) {
  let text = "", open = false, lastX = 0, lastY = 0, firstX = 0;
  const closed = () => (one.isFilled && open ? `L${lastX.toFixed(1)},${floor.toFixed(1)}L${firstX.toFixed(1)},${floor.toFixed(1)}Z` : "");
  let fill = "";
  for (const [x, y] of one.points) {
    if (y === null || y === undefined) { fill += closed(); open = false; continue; }
    const atX = px(x), atY = py(y);
    const piece = !open ? `M${atX.toFixed(1)},${atY.toFixed(1)}`
      : one.isSteps ? `L${atX.toFixed(1)},${lastY.toFixed(1)}L${atX.toFixed(1)},${atY.toFixed(1)}` : `L${atX.toFixed(1)},${atY.toFixed(1)}`;
    if (!open) firstX = atX;
    text += piece;
    fill += piece;
    [open, lastX, lastY] = [true, atX, atY];
  }
  return { line: text, fill: one.isFilled ? fill + closed() : "" };
}

function draw(holder, spec) {
  const width = holder.clientWidth, height = spec.height || 220;
  if (!width) return;
  const known = drawn.get(holder);
  if (known && known.spec === spec && known.width === width) return;
  const range = rangeOf(spec);
  const px = (x) => PAD.left + ((x - range.from) / (range.until - range.from)) * (width - PAD.left - PAD.right);
  const py = (y) => height - PAD.bottom - ((y - range.low) / (range.high - range.low)) * (height - PAD.top - PAD.bottom);
  const parts = [];
  for (const y of niceTicks(range.low, range.high, height / 48)) {
    parts.push(h("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: py(y), y2: py(y) }));
    parts.push(h("text", { x: PAD.left - 8, y: py(y) + 4, "text-anchor": "end" }, spec.yText(y)));
  }
  const ticks = (spec.xTicks || niceTicks)(range.from, range.until, Math.max(3, Math.floor(width / 96)));
  for (const x of ticks) {
    const anchor = px(x) > width - 40 ? "end" : px(x) < PAD.left + 10 ? "start" : "middle";
    parts.push(h("text", { x: Math.min(px(x), width - 4), y: height - 8, "text-anchor": anchor }, spec.xText(x)));
  }
  for (const mark of spec.marks || []) {
    parts.push(h("line", { class: "event", x1: px(mark.x), x2: px(mark.x), y1: PAD.top, y2: height - PAD.bottom }));
  }
  for (const one of spec.series) {
    const path = pathOf(one, px, py, py(range.low));
    if (path.fill) parts.push(h("path", { class: `area ${one.tone}`, d: path.fill }));
    parts.push(h("path", { class: `line ${one.tone}`, d: path.line }));
    const only = one.points.filter((point) => point[1] !== null);
    if (only.length === 1) parts.push(h("circle", { class: `dot ${one.tone}`, cx: px(only[0][0]), cy: py(only[0][1]), r: 3 }));
  }
  if (spec.line) {
    const y = py(spec.line.y);
    parts.push(h("line", { class: "limit", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }));
    parts.push(h("text", { class: "limit-text", x: width - PAD.right, y: y - 6, "text-anchor": "end" }, spec.line.label));
  }
  parts.push(h("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: py(range.low), y2: py(range.low) }));
  const cross = h("line", { class: "cross", y1: PAD.top, y2: height - PAD.bottom, x1: -9, x2: -9 });
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, parts, cross);
  if (holder.firstChild) morph(holder.firstChild, svg); else holder.append(svg);
  drawn.set(holder, { spec, width, range, px });
}

/** Draw every chart under a root, where something changed. */
export function drawCharts(root) {
  for (const holder of root.querySelectorAll("[data-chart]")) {
    const spec = specs.get(holder.dataset.chart);
    if (spec) draw(holder, spec);
  }
}

function nearest(points, x) {
  let best = null;
  for (const point of points) {
    if (point[1] !== null && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  }
  return best;
}

function pointAt(holder, x, clientY) {
  const { spec, px } = drawn.get(holder);
  const longest = spec.series.reduce((most, one) => (one.points.length > most.length ? one.points : most), []);
  const at = nearest(longest, x);
  if (!at) return;
  holder.querySelector(".cross")?.setAttribute("x1", px(at[0]));
  holder.querySelector(".cross")?.setAttribute("x2", px(at[0]));
  const rows = spec.series.map((one) => [one.label, nearest(one.points, at[0]), one.tone])
    .filter((one) => one[1]).map(([label, point, tone]) => [label, spec.yText(point[1]), tone]);
  const box = holder.getBoundingClientRect();
  showTip(box.left + px(at[0]), clientY ?? box.top + box.height / 3, [(spec.xTip || spec.xText)(at[0]), ...rows]);
  cursors.set(holder, at[0]);
}

export function watchCharts() {
  document.addEventListener("pointermove", (event) => {
    const holder = event.target.closest?.("[data-chart]");
    const known = holder && drawn.get(holder);
    if (!known) return;
    const left = event.clientX - holder.getBoundingClientRect().left;
    const share = (left - PAD.left) / (known.width - PAD.left - PAD.right);
    pointAt(holder, known.range.from + share * (known.range.until - known.range.from), event.clientY);
  });
  document.addEventListener("keydown", (event) => {
    const holder = event.target.closest?.("[data-chart]");
    const known = holder && drawn.get(holder);
    if (!known || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const { from, until } = known.range, step = (until - from) / 40, at = cursors.get(holder) ?? until;
    const to = { ArrowLeft: at - step, ArrowRight: at + step, Home: from, End: until }[event.key];
    pointAt(holder, Math.min(Math.max(to, from), until));
  });
  document.addEventListener("focusout", (event) => { if (event.target.closest?.("[data-chart]")) hideTip(); });
  let frame = 0;
  addEventListener("resize", () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(() => drawCharts(document)); });
}
