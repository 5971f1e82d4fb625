// Spend against budget: what every team has used of what it may, and when the money went.
import { get, maybe } from "./api.js";
import { chart, legend, timeText, timeTicks } from "./chart.js";
import { h } from "./dom.js";
import { card, empty, emulatedChip, heading, skeleton, stat } from "./parts.js";
import { dollars, duration, moment, percent } from "./words.js";
import { spanPills } from "./view_prices.js";

const PERIODS = { day: "a day", week: "a week", month: "a month", ever: "in all" };
const PERIOD_SECONDS = { day: 86400, week: 7 * 86400 };
const hoursIn = (params) => Number(params.hours) || 24;
const MOST_LINES = 7;

export const view = {
  title: () => "Spend",
  wants: new Set(["jobs"]),
  slow: 5,
  async load(params, signal) {
    const [spend, types, ledger] = await Promise.all([
      get("/v1/spend", { hours: hoursIn(params) }, signal), get("/v1/page/types", {}, signal), maybe("/v1/ledger", { most: 1 }, signal),
    ]);
    return { ...spend, types, ledger };
  },
  waiting: (params) => [heading("Spend", spanPills("spend", params)), skeleton(86, 220, 360)],
  render(data, context) {
    const hours = hoursIn(context.params);
    const spent = data.hours.reduce((sum, one) => sum + one.points.reduce((all, point) => all + point[1], 0), 0);
    return [
      heading("Spend", data.types.emulated.length > 0 && emulatedChip("emulated devices"), spanPills("spend", context.params)),
      h("dl", { class: "stats", "data-key": "stats" }, stat("Now", dollars(data.dollars_per_hour), " an hour"), stat(`Last ${hours < 48 ? `${hours} h` : `${hours / 24} d`}`, dollars(spent)), stat("Since the beginning", dollars(data.dollars))),
      data.types.emulated.length > 0 && h("p", { class: "note", "data-key": "emulated" }, h("strong", {}, "Nothing is paid for emulated GPUs. "), "These are the costs that real ones would have."),
      rentCard(data.ledger),
      budgetCard(data),
      hoursCard(data, hours),
    ];
  },
  onProgress(data, _, message) {
    data.dollars = message.dollars ?? data.dollars;
    data.dollars_per_hour = message.dollars_per_hour ?? data.dollars_per_hour;
  },
};

const axisDollars = (x) => (x >= 10 || x === 0 ? `$${Math.round(x).toLocaleString("en")}` : `$${x.toFixed(2)}`);
const nameOf = (team) => team || "no team";

/** What is rented, against what may be spent on it on average. */
function rentCard(ledger) {
  if (!ledger || (!ledger.offers.length && !ledger.num_rented)) return null;
  const { budget_dollars_per_hour: budget, mean_dollars_per_hour: mean, hard_cap_dollars_per_hour: cap } = ledger;
  const share = budget && mean !== null ? mean / budget : null;
  const coming = ledger.num_coming ? `, ${ledger.num_coming} on their way` : "";
  return card("Renting", { hint: `${ledger.num_rented} rented now for ${dollars(ledger.rented_dollars_per_hour)} an hour${coming}; ${dollars(ledger.rented_dollars)} so far.${cap ? ` Never above ${dollars(cap)} an hour.` : ""}` },
    ledger.trouble && h("p", { class: "note" }, h("strong", {}, "The provider does not do as asked. "), ledger.trouble),
    budget !== null && h("div", { class: "rent" },
      h("div", { class: "budget-head" }, h("b", {}, "On average"), h("span", { class: "num" }, mean === null ? "nothing yet" : dollars(mean), h("span", { class: "soft" }, ` of ${dollars(budget)} an hour`))),
      h("div", { class: "budget-bar", role: "img", "aria-label": share === null ? "Nothing was rented yet" : `${percent(share)} of the budget` },
        h("span", { class: `fill ${share > 1 ? "over" : ""}`, style: { width: `${Math.min(100, 100 * (share ?? 0)).toFixed(1)}%` } }))),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Offers" }, h("table", { class: "plain" },
      h("caption", { class: "hidden" }, "What can be rented"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Offer"), h("th", { scope: "col" }, "GPUs of a node"), h("th", { scope: "col", class: "right" }, "An hour"), h("th", { scope: "col" }, "To be had"))),
      h("tbody", {}, ledger.offers.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, `${one.num_gpus} ${one.gpu}${one.is_spot ? ", spot" : ""}`), h("td", { class: "num right" }, dollars(one.dollars_per_hour)), h("td", {}, one.is_short ? "short" : "yes")))))));
}

function budgetCard(data) {
  const rows = [...data.teams].sort((a, b) => (b.budget_dollars !== null) - (a.budget_dollars !== null) || b.dollars - a.dollars);
  const hasBudget = rows.some((one) => one.budget_dollars !== null);
  if (!rows.length) return card("Budgets", {}, empty("Nothing was spent yet", "Spending counts from the moment a job gets GPUs."));
  return card("Against the budget", { hint: hasBudget ? "Of this period. The thin line is how much of the period has passed." : "No team has a budget. An administrator sets one: drystone team set NAME --budget DOLLARS --period week." },
    h("ul", { class: "budgets" }, rows.map((one) => budgetRow(one, data.now_seconds))));
}

function budgetRow(one, now) {
  const share = one.budget_dollars ? one.spent_dollars / one.budget_dollars : null;
  const length = PERIOD_SECONDS[one.budget_period] || (one.budget_period === "month" ? monthSeconds(one.period_start_seconds) : 0);
  const passed = length && one.period_start_seconds ? Math.min(1, (now - one.period_start_seconds) / length) : null;
  const tone = share === null ? "" : share >= 1 ? "over" : passed !== null && share > passed + 0.05 ? "fast" : "fine";
  const words = { over: "over its budget: its jobs wait", fast: "faster than the period passes", fine: "within its budget" };
  const left = share !== null && share < 1 && one.dollars_per_hour > 0 ? `, ${duration(((one.budget_dollars - one.spent_dollars) / one.dollars_per_hour) * 3600)} until it is used up at this pace` : "";
  return h("li", { "data-key": one.team || "-" },
    h("div", { class: "budget-head" }, h("b", {}, nameOf(one.team)), h("span", { class: "num" }, dollars(one.spent_dollars), one.budget_dollars !== null && h("span", { class: "soft" }, ` of ${dollars(one.budget_dollars)} ${PERIODS[one.budget_period] || ""}`))),
    share !== null && h("div", { class: "budget-bar", role: "img", "aria-label": `${percent(share)} of the budget` },
      h("span", { class: `fill ${tone}`, style: { width: `${Math.min(100, 100 * share).toFixed(1)}%` } }),
      passed !== null && h("span", { class: "passed", style: { left: `${(100 * passed).toFixed(1)}%` } })),
    h("p", { class: "hint" }, share !== null ? `${percent(share)}, ${words[tone]}${left}` : `${dollars(one.dollars_per_hour)} an hour now; no budget`));
}

function monthSeconds(start) {
  const begin = new Date(start * 1000);
  return (Date.UTC(begin.getUTCFullYear(), begin.getUTCMonth() + 1, 1) - Date.UTC(begin.getUTCFullYear(), begin.getUTCMonth(), 1)) / 1000;
}

function hoursCard(data, hours) {
  const until = data.now_seconds;
  const first = Math.min(...data.hours.flatMap((one) => one.points.filter((point) => point[1] > 0).map((point) => point[0])));
  const from = Math.max(until - hours * 3600, Number.isFinite(first) ? first : 0);
  const teams = [...data.hours].sort((a, b) => total(b) - total(a));
  const series = teams.slice(0, MOST_LINES).map((one, at) => ({ label: nameOf(one.team), tone: `t${at}`, isFilled: teams.length === 1, points: running(one.points, from, until) })).filter((one) => one.points.length > 1);
  const spec = {
    label: "Dollars spent by team", height: 300, from, until, low: 0, series, yText: axisDollars, xTicks: timeTicks, xText: timeText(from, until), xTip: (t) => moment(t, until),
  };
  return card("Spent in this span", { hint: "Added up hour by hour." },
    series.length ? [legend(series), chart("spend", spec)] : h("div", { class: "chart-empty tall" }, empty("Nothing was spent in this span", "Choose a longer one above.")));
}

const total = (one) => one.points.reduce((sum, point) => sum + point[1], 0);

/** The sum up to the end of each hour. */
function running(points, from, until) {
  const made = [[from, 0]];
  let sum = 0;
  for (const [start, spent] of [...points].sort((a, b) => a[0] - b[0])) {
    const begin = Math.max(start, from), end = Math.min(start + 3600, until);
    if (end <= from) continue;
    if (begin > made.at(-1)[0]) made.push([begin, sum]);
    sum += spent;
    made.push([end, sum]);
  }
  if (made.at(-1)[0] < until) made.push([until, sum]);
  return made;
}
