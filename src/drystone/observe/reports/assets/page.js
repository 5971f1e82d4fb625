"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const runs = content.runs;
  // Okabe and Ito's colours, told apart by colour-blind people too; dashes tell the ninth from the first.
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
  const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
  const colour = (i) => COLOURS[i % COLOURS.length];
  const dash = (i) => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
  const byId = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let chosen = 0;

  // --- words ---------------------------------------------------------------------------------
  const three = (x) => (x >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3))));
  function duration(seconds) {
    for (const [unit, size] of [["d", 86400 * 3], ["h", 3600], ["min", 60]]) {
      if (seconds >= size) return `${three(seconds / (unit === "d" ? 86400 : size))} ${unit}`;
    }
    return `${three(seconds)} s`;
  }
  const percent = (x) => `${three(100 * x)} %`;
  const dollars = (x) => `$${x < 100 ? x.toFixed(2) : Math.round(x).toLocaleString("en")}`;

  // --- elements ------------------------------------------------------------------------------
  function make(name, attributes = {}, text = "") {
    const svg = ["svg", "path", "line", "text", "g", "rect", "circle"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== "") node.textContent = text;
    return node;
  }
  const tip = byId("tip");
  function showTip(event, title, rows) {
    tip.replaceChildren(make("b", {}, title));
    for (const [label, value, dot] of rows) {
      const row = make("div", { class: "row" });
      const left = make("span");
      if (dot) left.append(make("span", { class: "dot", style: `background:${dot}` }));
      left.append(label);
      row.append(left, make("span", {}, value));
      tip.append(row);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
  }
  function onHover(node, show) { for (const kind of ["pointermove", "pointerdown"]) node.addEventListener(kind, show); }
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });

  function legend(id, series) {
    const nodes = series.filter((one) => one.label).map((one) => {
      const item = make("span");
      const mark = make("svg", { width: 22, height: 10 });
      mark.append(make("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: one.colour, "stroke-width": one.width || 2.5, "stroke-dasharray": one.dash || "" }));
      item.append(mark, one.label);
      return item;
    });
    byId(id).replaceChildren(...nodes);
  }

  // --- axes ----------------------------------------------------------------------------------
  function niceTicks(low, high, wanted) {
    const raw = (high - low) / Math.max(1, wanted) || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw) || raw;
    const ticks = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    return ticks;
  }
  function timeTicks(end, wanted) {
    const steps = [60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000, 31536000];
    const step = steps.find((s) => end / s <= wanted) || end / wanted;
    const ticks = [];
    for (let v = 0; v <= end * 1.0001; v += step) ticks.push(v);
    return ticks;
  }
  function timeLabel(seconds, end) {
    if (seconds === 0) return "0";
    if (end > 86400 * 4) return `${three(seconds / 86400)} d`;
    return end > 7200 ? `${three(seconds / 3600)} h` : `${three(seconds / 60)} min`;
  }
  function logTicks(low, high) {
    const all = [1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000];
    return all.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }

  // --- a chart of lines ----------------------------------------------------------------------
  // series: [{label, colour, dash, width, xs, ys, steps}]
  function lines(id, series, options) {
    const holder = byId(id);
    const width = holder.clientWidth, height = holder.clientHeight;
    if (!width) return;
    const pad = { left: 52, right: 14, top: 8, bottom: 26 };
    const [x0, x1] = options.xRange, [y0, y1] = options.yRange;
    const fx = options.log ? Math.log : (v) => v;
    const px = (v) => pad.left + ((fx(v) - fx(x0)) / (fx(x1) - fx(x0) || 1)) * (width - pad.left - pad.right);
    const py = (v) => height - pad.bottom - ((v - y0) / (y1 - y0 || 1)) * (height - pad.top - pad.bottom);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
    for (const v of niceTicks(y0, y1, height / 45)) {
      svg.append(make("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: py(v), y2: py(v) }));
      svg.append(make("text", { x: pad.left - 7, y: py(v) + 4, "text-anchor": "end" }, options.yText(v)));
    }
    const xTicks = options.log ? logTicks(x0, x1) : timeTicks(x1, Math.max(2, Math.floor(width / 90)));
    let free = -Infinity;
    for (const v of xTicks) {
      if (px(v) < free) continue;
      free = px(v) + 44;
      svg.append(make("line", { class: "grid", x1: px(v), x2: px(v), y1: pad.top, y2: height - pad.bottom }));
      svg.append(make("text", { x: px(v), y: height - 8, "text-anchor": "middle" }, options.log ? duration(v) : timeLabel(v, x1)));
    }
    svg.append(make("line", { class: "axis", x1: pad.left, x2: width - pad.right, y1: py(y0), y2: py(y0) }));
    for (const one of series) {
      let path = "";
      one.xs.forEach((x, i) => {
        const at = `${px(Math.max(x, x0)).toFixed(1)},${py(one.ys[i]).toFixed(1)}`;
        if (i === 0) path = one.steps ? `M${px(Math.max(x, x0)).toFixed(1)},${py(y0).toFixed(1)}L${at}` : `M${at}`;
        else path += one.steps ? `H${px(Math.max(x, x0)).toFixed(1)}L${at}` : `L${at}`;
      });
      if (one.steps && one.xs.length) path += `H${px(x1).toFixed(1)}`;
      svg.append(make("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": one.width || 2, "stroke-dasharray": one.dash || "", "stroke-linejoin": "round" }));
    }
    const cross = make("line", { class: "cross", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" });
    svg.append(cross);
    holder.replaceChildren(svg);
    onHover(svg, (event) => {
      const box = svg.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left - pad.left) / (width - pad.left - pad.right)));
      const x = options.log ? Math.exp(fx(x0) + share * (fx(x1) - fx(x0))) : x0 + share * (x1 - x0);
      cross.setAttribute("x1", px(x)); cross.setAttribute("x2", px(x)); cross.setAttribute("visibility", "visible");
      const rows = series.filter((one) => one.label && !one.quiet).map((one) => [one.label, options.yText(valueAt(one, x)), one.colour]);
      showTip(event, options.log ? `within ${duration(x)}` : `after ${duration(x)}`, rows);
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  }
  // One filled strip a series, all on one scale: [{label, colour, ys}]
  function strips(id, xs, series, end, options) {
    const holder = byId(id), width = holder.clientWidth;
    if (!width) return;
    const rowHeight = Math.max(44, Math.min(62, 230 / series.length)), left = 4, right = 10, bottom = 24;
    const height = series.length * rowHeight + bottom;
    holder.style.height = `${height}px`;
    const px = (t) => left + (t / end) * (width - left - right);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
    series.forEach((one, k) => {
      const base = (k + 1) * rowHeight - 4, tall = rowHeight - 22;
      svg.append(make("rect", { class: "idle", x: left, y: base - tall, width: width - left - right, height: tall }));
      let path = `M${px(0)},${base}`;
      xs.forEach((x, i) => { path += `L${px(x).toFixed(1)},${(base - tall * Math.min(1, one.ys[i] / options.top)).toFixed(1)}`; });
      svg.append(make("path", { d: `${path}L${px(xs.at(-1)).toFixed(1)},${base}Z`, fill: one.colour, "fill-opacity": 0.85 }));
      svg.append(make("text", { x: left, y: base - tall - 4 }, one.label));
      svg.append(make("text", { x: width - right, y: base - tall - 4, "text-anchor": "end" }, one.note));
    });
    for (const t of timeTicks(end, Math.max(2, Math.floor(width / 90)))) {
      const anchor = px(t) < left + 14 ? "start" : px(t) > width - 30 ? "end" : "middle";
      svg.append(make("text", { x: px(t), y: height - 6, "text-anchor": anchor }, timeLabel(t, end)));
    }
    const cross = make("line", { class: "cross", y1: 0, y2: height - bottom, visibility: "hidden" });
    svg.append(cross);
    holder.replaceChildren(svg);
    onHover(svg, (event) => {
      const box = svg.getBoundingClientRect();
      const x = Math.min(1, Math.max(0, (event.clientX - box.left - left) / (width - left - right))) * end;
      cross.setAttribute("x1", px(x)); cross.setAttribute("x2", px(x)); cross.setAttribute("visibility", "visible");
      showTip(event, `after ${duration(x)}`, series.map((one) => [one.label, options.text(valueAt({ xs, ys: one.ys }, x), one, x), one.colour]));
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  }
  function valueAt(one, x) {
    let low = 0, high = one.xs.length;
    while (low < high) { const mid = (low + high) >> 1; if (one.xs[mid] <= x) low = mid + 1; else high = mid; }
    if (one.steps) return low ? one.ys[low - 1] : 0;
    return one.ys[Math.min(Math.max(low - 1, 0), one.ys.length - 1)] ?? 0;
  }

  // --- who had which GPUs --------------------------------------------------------------------
  const owners = [...new Set(content.jobs.map((job) => job[2]))];
  const models = [...new Set(content.jobs.map((job) => job[1]))];
  const field = owners.length > 1 ? 2 : models.length > 1 ? 1 : 0;
  const count = new Map();
  for (const job of content.jobs) count.set(job[field], (count.get(job[field]) || 0) + 1);
  const groups = [...count.keys()].sort((a, b) => count.get(b) - count.get(a));
  const groupColour = new Map(groups.map((name, i) => [name, i]));
  const jobColour = (index) => (field === 0 ? colour(index) : colour(Math.min(groupColour.get(content.jobs[index][field]), COLOURS.length - 1)));

  function gpuChart() {
    const run = runs[chosen], gpus = run.gpus, holder = byId("gpus");
    const width = holder.clientWidth;
    if (!width) return;
    const narrow = width < 520, left = narrow ? 4 : 92, right = 8, gap = narrow ? 22 : 10, bottom = 24;
    const total = gpus.lanes.reduce((a, b) => a + b, 0);
    const space = Math.max(230, Math.min(520, total * 7));
    const heights = gpus.lanes.map((n) => Math.max(26, (space * n) / total));
    const tops = []; let y = narrow ? 18 : 4;
    for (const h of heights) { tops.push(y); y += h + gap; }
    const height = y + bottom - gap;
    holder.style.height = `${height}px`;
    const canvas = make("canvas", { role: "img", "aria-label": `Jobs on GPUs over time under ${run.policy}` });
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const px = (t) => left + (t / run.end) * (width - left - right);
    gpus.types.forEach((gpu, k) => {
      pen.strokeStyle = css("--grid");
      pen.strokeRect(left + 0.5, tops[k] + 0.5, width - left - right - 1, heights[k] - 1);
      pen.fillStyle = css("--soft");
      pen.textAlign = narrow ? "left" : "right";
      if (narrow) pen.fillText(`${gpu}, ${gpus.lanes[k]} GPUs`, left, tops[k] - 5);
      else { pen.fillText(gpu, left - 8, tops[k] + Math.min(14, heights[k] / 2 + 4)); pen.fillText(`${gpus.lanes[k]} GPUs`, left - 8, tops[k] + Math.min(29, heights[k] / 2 + 18)); }
    });
    const card = css("--card");
    pen.fillStyle = css("--idle");
    for (const [k, lane, lanes, from, until] of gpus.there) {
      const each = heights[k] / gpus.lanes[k];
      pen.fillRect(px(from), tops[k] + lane * each, Math.max(px(until) - px(from), 0.6), lanes * each);
    }
    for (const [k, lane, lanes, from, until, job] of gpus.tiles) {
      const each = heights[k] / gpus.lanes[k];
      const x = px(from), w = Math.max(px(until) - x, 0.6), top = tops[k] + lane * each, h = lanes * each;
      pen.globalAlpha = 0.72 + 0.28 * ((job * 0.618) % 1);
      pen.fillStyle = jobColour(job);
      pen.fillRect(x, top, w, h);
      if (w > 3 && h > 3) { pen.globalAlpha = 1; pen.strokeStyle = card; pen.lineWidth = 0.8; pen.strokeRect(x, top, w, h); }
    }
    pen.globalAlpha = 1;
    pen.fillStyle = css("--soft");
    pen.textAlign = "center";
    for (const t of timeTicks(run.end, Math.max(2, Math.floor(width / 90)))) {
      pen.textAlign = px(t) < left + 14 ? "left" : px(t) > width - 24 ? "right" : "center";
      pen.fillText(timeLabel(t, run.end), px(t), height - 8);
    }
    holder.replaceChildren(canvas);
    onHover(canvas, (event) => {
      const box = canvas.getBoundingClientRect();
      const x = event.clientX - box.left, yy = event.clientY - box.top;
      const k = tops.findIndex((top, i) => yy >= top && yy < top + heights[i]);
      if (k < 0 || x < left) return hideTip();
      const t = ((x - left) / (width - left - right)) * run.end, lane = Math.floor(((yy - tops[k]) / heights[k]) * gpus.lanes[k]);
      const hit = gpus.tiles.find((one) => one[0] === k && lane >= one[1] && lane < one[1] + one[2] && t >= one[3] && t < one[4]);
      const here = gpus.there.some((one) => one[0] === k && lane >= one[1] && lane < one[1] + one[2] && t >= one[3] && t < one[4]);
      if (!hit) return showTip(event, gpus.types[k], [[here ? "idle" : "not rented", `after ${duration(t)}`]]);
      const [id, model, owner, submit] = content.jobs[hit[5]];
      const all = gpus.tiles.filter((one) => one[5] === hit[5] && one[3] === hit[3]);
      const rows = [["from", duration(hit[3])], ["until", duration(hit[4])]];
      for (const kind of new Set(all.map((one) => one[0]))) rows.push([gpus.types[kind], `${all.filter((one) => one[0] === kind).reduce((a, one) => a + one[2], 0)} GPUs`]);
      rows.push(["submitted", submit ? duration(submit) : "0"]);
      if (model) rows.unshift(["model", model]);
      if (owner) rows.unshift(["owner", owner]);
      showTip(event, id, rows);
    });
    canvas.addEventListener("pointerleave", hideTip);
    const shown = groups.slice(0, COLOURS.length - 1), more = groups.length - shown.length;
    const items = field === 0 ? [] : shown.map((name, i) => ({ label: name || (field === 2 ? "(no owner)" : "(no model)"), colour: colour(i), width: 9 }));
    if (field !== 0 && more > 0) items.push({ label: more === 1 ? groups[COLOURS.length - 1] : `${more} others`, colour: colour(COLOURS.length - 1), width: 9 });
    legend("gpus-legend", items);
    const words = ["A line is a GPU, a tile a job from its start until it lost its GPUs", ["; a colour is a job", "; a colour is a model", "; a colour is an owner"][field]];
    if (gpus.there.length > gpus.types.length || gpus.there.some((one) => one[3] > 0)) words.push("; grey was there and idle, what is empty was not rented");
    if (gpus.num_left_out) words.push(`. The ${gpus.num_left_out.toLocaleString("en")} smallest tiles are not drawn`);
    byId("gpus-hint").textContent = `${words.join("")}.`;
  }

  // --- the parts of the page -----------------------------------------------------------------
  function fillTable() {
    const table = byId("table"), head = make("tr");
    head.append(make("th"));
    content.table.policies.forEach((name, i) => {
      const cell = make("th", { scope: "col" });
      cell.append(make("span", { class: "dot", style: `background:${colour(i)}` }), name);
      head.append(cell);
    });
    const thead = make("thead"); thead.append(head);
    const body = make("tbody");
    for (const line of content.table.lines) {
      const row = make("tr");
      row.append(make("th", { scope: "row" }, line.label));
      line.texts.forEach((text, i) => row.append(make("td", line.best.includes(i) ? { class: "best" } : {}, text)));
      body.append(row);
    }
    table.append(thead, body);
  }
  function drawCompletion() {
    const series = runs.map((run, i) => ({ label: run.policy, colour: colour(i), dash: dash(i), xs: run.completion.seconds, ys: run.completion.share, steps: true }));
    const all = runs.flatMap((run) => [run.completion.seconds[0], run.completion.seconds.at(-1)]).filter((v) => v > 0);
    if (!all.length) { byId("cdf").textContent = "No job was done."; return; }
    legend("cdf-legend", series);
    lines("cdf", series, { log: true, xRange: [Math.max(1, Math.min(...all)) * 0.9, Math.max(...all) * 1.1], yRange: [0, 1], yText: percent, label: "Share of jobs done within a time" });
  }
  function drawChosen() {
    const run = runs[chosen];
    byId("spend-card").hidden = !runs.some((one) => one.spend.dollars);
    byId("prices-card").hidden = !run.prices.types;
    gpuChart();
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const inOrder = run.gpus.types.filter((gpu) => run.use.types[gpu]).map((gpu) => [gpu, run.use.types[gpu]]);
    const use = inOrder.map(([gpu, one], i) => ({
      label: gpu, colour: colour(i), there: one.there, held: one.held, ys: one.held.map((v, j) => (one.there[j] > 0 ? Math.min(1, v / one.there[j]) : 0)),
      note: sum(one.there) ? `${percent(sum(one.held) / sum(one.there))} of the time` : "",
    }));
    const useText = (share, one, x) => `${three(valueAt({ xs: run.use.seconds, ys: one.held }, x))} of ${three(valueAt({ xs: run.use.seconds, ys: one.there }, x))}`;
    strips("use", run.use.seconds, use, run.end, { top: 1, text: useText, label: "Share of GPUs in use over time" });
    const longest = Math.max(...runs.map((one) => one.end));
    const waiting = runs.map((one, i) => ({ label: one.policy, colour: colour(i), dash: dash(i), width: i === chosen ? 2.6 : 1, xs: one.use.seconds, ys: one.waiting }));
    waiting.push(waiting.splice(chosen, 1)[0]);
    legend("waiting-legend", waiting);
    lines("waiting", waiting, { xRange: [0, longest], yRange: [0, Math.max(1, ...runs.flatMap((one) => one.waiting)) * 1.05], yText: three, label: "Jobs waiting over time" });
    drawMoney(run);
    const prices = run.prices.types ? Object.entries(run.prices.types) : [];
    if (prices.length) {
      const top = Math.max(...prices.flatMap(([, ys]) => ys)) || 1;
      const series = prices.map(([gpu, ys], i) => ({ label: gpu, colour: colour(i), ys, note: `at most ${percent(Math.max(...ys) / top)}` }));
      strips("prices", run.prices.seconds, series, run.end, { top, text: (v) => percent(v / top), label: "Prices of GPU types over time" });
    }
  }
  function drawMoney(run) {
    const paid = runs.filter((one) => one.spend.dollars);
    if (!paid.length) return;
    const longest = Math.max(...paid.map((one) => one.end));
    const series = paid.map((one) => ({ label: one.policy, colour: colour(runs.indexOf(one)), dash: dash(runs.indexOf(one)), width: one === run ? 2.6 : 1.2, xs: one.spend.seconds, ys: one.spend.dollars }));
    if (content.budget) series.push({ label: "the budget", colour: css("--soft"), dash: "2 4", width: 2, xs: [0, longest], ys: [0, (content.budget * longest) / 3600], straight: true });
    byId("spend-hint").textContent = content.budget ? `Dollars paid so far, against a budget of ${dollars(content.budget)} an hour.` : "Dollars paid so far for rented nodes.";
    legend("spend-legend", series);
    const budget = series.find((one) => one.straight);
    if (budget) { budget.xs = paid[0].spend.seconds.map((_, i, all) => (i / (all.length - 1)) * longest); budget.ys = budget.xs.map((x) => (content.budget * x) / 3600); }
    lines("spend", series, { xRange: [0, longest], yRange: [0, Math.max(...series.flatMap((one) => one.ys)) * 1.05], yText: dollars, label: "Dollars paid over time" });
  }
  function fillTabs() {
    const tabs = byId("tabs");
    runs.forEach((run, i) => {
      const button = make("button", { role: "tab", "aria-selected": String(i === chosen), tabindex: i === chosen ? 0 : -1 });
      button.append(make("span", { class: "dot", style: `background:${colour(i)}` }), run.policy);
      button.addEventListener("click", () => choose(i));
      button.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (move) { choose((i + move + runs.length) % runs.length); tabs.children[chosen].focus(); }
      });
      tabs.append(button);
    });
    tabs.hidden = runs.length < 2;
  }
  function choose(index) {
    chosen = index;
    [...byId("tabs").children].forEach((tab, i) => { tab.setAttribute("aria-selected", String(i === index)); tab.tabIndex = i === index ? 0 : -1; });
    hideTip();
    drawChosen();
  }
  function draw() { drawCompletion(); drawChosen(); }

  byId("title").textContent = content.title;
  byId("headline").textContent = content.headline;
  for (const remark of content.remarks) byId("remarks").append(make("li", {}, remark));
  fillTable();
  fillTabs();
  draw();
  let timer = 0;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(draw, 120); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
