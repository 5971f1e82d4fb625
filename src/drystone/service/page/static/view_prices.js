// Prices over time: what a GPU of each type was worth to the jobs, and what it costs.
import { get } from "./api.js";
import { chart, legend, timeText, timeTicks } from "./chart.js";
import { h } from "./dom.js";
import { card, empty, emulatedChip, heading, skeleton } from "./parts.js";
import { dollars, moment, three } from "./words.js";

const SPANS = [[6, "6 h"], [24, "24 h"], [168, "7 d"], [720, "30 d"]];
const hoursIn = (params) => (SPANS.some(([hours]) => hours === Number(params.hours)) ? Number(params.hours) : 24);

export function spanPills(route, params, fallback = 24) {
  const now = params.hours ? hoursIn(params) : fallback;
  return h("ul", { class: "pills", "aria-label": "How far back" }, SPANS.map(([hours, label]) => h("li", {},
    h("a", { href: `#/${route}?hours=${hours}`, "aria-current": hours === now ? "true" : null }, label))));
}

export const view = {
  title: () => "Prices",
  wants: new Set(["jobs", "cluster"]),
  slow: 5,
  async load(params, signal) {
    const data = await get("/v1/page/prices", { hours: hoursIn(params) }, signal);
    return { ...data, types: { gpus: data.gpus, emulated: data.emulated } };
  },
  waiting: (params) => [heading("Prices", spanPills("prices", params)), skeleton(380, 300)],
  render(data, context) {
    const until = data.now_seconds;
    const first = Math.min(...[data.worth, data.dollars_per_hour].flatMap((table) => Object.values(table).map((points) => points[0]?.[0] ?? Infinity)));
    const from = Math.min(Math.max(until - hoursIn(context.params) * 3600, first), until - 60);
    const isEmulated = data.types.emulated.length > 0;
    return [
      heading("Prices", isEmulated && emulatedChip("emulated devices"), spanPills("prices", context.params)),
      worthCard(data, from, until, data.policy),
      dollarsCard(data, from, until),
    ];
  },
};

const toneOf = (gpu, types) => `t${Math.max(0, types.gpus.indexOf(gpu)) % 8}`;

/** Points within the span; the last value before it holds at its beginning, the last of all until now. */
function within(points, from, until) {
  const before = points.filter((one) => one[0] < from).at(-1);
  const inside = points.filter((one) => one[0] >= from);
  const all = before ? [[from, before[1]], ...inside] : inside;
  return all.length ? [...all, [until, all.at(-1)[1]]] : [];
}

const stepsOf = (table, types, from, until) => types.gpus.filter((gpu) => table[gpu]?.length).map((gpu) => ({
  label: gpu, tone: toneOf(gpu, types), isSteps: true, points: within(table[gpu], from, until),
})).filter((one) => one.points.length);

function worthCard(data, from, until, policy) {
  const series = stepsOf(data.worth, data.types, from, until);
  const spec = {
    label: "Worth of one more GPU by type", height: 300, from, until, low: 0, series, yText: three, xTicks: timeTicks,
    xText: timeText(from, until), xTip: (t) => moment(t, until),
  };
  return card("What one more GPU would be worth", { hint: "To all jobs together, at each decision. Only ratios mean something; zero where there is enough for everyone." },
    series.length
      ? [legend(series), chart("worth", spec)]
      : h("div", { class: "chart-empty tall" }, empty("No prices in this span", policy && policy !== "prices" ? `The policy ${policy} reckons without prices.` : "They come with the first decision.")));
}

function dollarsCard(data, from, until) {
  const series = stepsOf(data.dollars_per_hour, data.types, from, until);
  const rows = data.types.gpus.map((gpu) => [gpu, data.dollars_per_hour[gpu]?.at(-1)?.[1], data.worth[gpu]?.at(-1)?.[1]]);
  const most = Math.max(1e-12, ...rows.map(([, , worth]) => worth ?? 0));
  const isMoving = series.some((one) => one.points.some((point) => point[1] !== one.points[0][1]));
  return card("What an hour of one costs", { hint: isMoving ? "Market prices as they changed." : "These do not change by themselves: they stand in the cluster file or in the price list." },
    isMoving && [legend(series), chart("dollars", { label: "Dollars an hour by type", height: 220, from, until, low: 0, series, yText: dollars, xTicks: timeTicks, xText: timeText(from, until), xTip: (t) => moment(t, until) })],
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Prices now" }, h("table", { class: "plain prices-now" },
      h("caption", { class: "hidden" }, "Prices now"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "GPU"), h("th", { scope: "col", class: "right" }, "An hour"), h("th", { scope: "col", class: "right" }, "Worth now"), h("th", { scope: "col" }, "Against the dearest"))),
      h("tbody", {}, rows.map(([gpu, price, worth]) => h("tr", {}, h("th", { scope: "row" }, h("i", { class: `key ${toneOf(gpu, data.types)}` }), gpu, data.types.emulated.includes(gpu) && emulatedChip()),
        h("td", { class: "num right" }, price === undefined ? "not known" : dollars(price)), h("td", { class: "num right" }, worth === undefined ? "not known" : three(worth)),
        h("td", {}, h("span", { class: "meter", "aria-hidden": "true" }, h("span", { class: `share ${toneOf(gpu, data.types)}`, style: { width: `${((100 * (worth ?? 0)) / most).toFixed(1)}%` } })))))))));
}
