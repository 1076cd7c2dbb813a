"use strict";
// Draws the figures of the page from the JSON beside this script. Everything is SVG at the width the page has.
const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector, root = document) => root.querySelector(selector);
const MINUS = "\u2212", PLUS_MINUS = " \u00b1 ";
const number = (value, digits = 4) =>
  value.toLocaleString("en-GB", { maximumSignificantDigits: digits }).replace("-", MINUS);

function make(tag, attributes = {}, parent = null, text = null) {
  const plain = ["button", "div", "span", "b", "select", "option", "label", "figure", "figcaption"].includes(tag);
  const node = plain ? document.createElement(tag) : document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// ---- colours: one a method, dashed from the ninth on; references grey and dotted

function look(label) {
  if (data.references.includes(label)) return { colour: "var(--soft)", dash: "2 3" };
  const index = data.labels.filter((name) => !data.references.includes(name)).indexOf(label);
  return { colour: `var(--c${index % 8})`, dash: ["", "7 3", "3 3", "9 3 2 3"][Math.floor(index / 8) % 4] };
}
const heat = (share) => `color-mix(in oklab, var(--heat) ${Math.round(100 * share)}%, var(--heat0))`;

function swatch(label, parent) {
  const { colour, dash } = look(label);
  const key = make("svg", { width: 24, height: 8, "aria-hidden": "true" }, parent);
  make("line", { x1: 0, x2: 24, y1: 4, y2: 4, style: `stroke:${colour};stroke-width:3`, "stroke-dasharray": dash }, key);
}

// ---- the tooltip: a title and rows of [label or null, name, value]

const tip = find(".tip");
function say(event, title, rows = []) {
  tip.replaceChildren(make("b", {}, null, title));
  for (const [label, name, value] of rows) {
    const row = make("div", {}, tip);
    const key = make("span", {}, row);
    if (label) swatch(label, key);
    make("span", {}, row, name);
    make("span", {}, row, value);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width < innerWidth ? event.clientX + 16 : event.clientX - 16 - width;
  tip.style.left = `${Math.min(Math.max(4, left), Math.max(4, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.min(Math.max(4, event.clientY - height / 2), innerHeight - height - 4)}px`;
}
const hush = () => (tip.hidden = true);
function explain(node, title, rows) {
  node.addEventListener("pointermove", (event) => say(event, title, rows));
  node.addEventListener("pointerleave", hush);
}

// ---- axes

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

// A drawing with margins and linear scales. x and y are [low, high]; labels stand at the ends of their axes.
function frame(holder, about, { height, left = 46, right = 12, top = 22, bottom = 38, x, y, xlabel, ylabel, least = 0 }) {
  const width = Math.max(holder.clientWidth, least);
  const root = make("svg", { width, height, role: "img", "aria-label": about });
  holder.replaceChildren(root);
  const inner = { left, right: width - right, top, bottom: height - bottom };
  const sx = (value) => inner.left + ((value - x[0]) / (x[1] - x[0] || 1)) * (inner.right - inner.left);
  const sy = (value) => inner.bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (inner.bottom - inner.top);
  if (xlabel) {
    for (const at of ticks(x[0], x[1], (inner.right - inner.left) / 90)) {
      make("line", { class: "rule", x1: sx(at), x2: sx(at), y1: inner.bottom, y2: inner.bottom + 4 }, root);
      make("text", { x: sx(at), y: inner.bottom + 17, "text-anchor": "middle" }, root, number(at));
    }
    make("text", { class: "xlabel strong", x: inner.right, y: height - 3, "text-anchor": "end" }, root, xlabel);
  }
  if (ylabel) {
    for (const at of ticks(y[0], y[1], (inner.bottom - inner.top) / 55)) {
      make("line", { class: "rule", x1: inner.left, x2: inner.right, y1: sy(at), y2: sy(at) }, root);
      make("text", { x: inner.left - 7, y: sy(at) + 4, "text-anchor": "end" }, root, number(at));
    }
    make("text", { class: "ylabel strong", x: 0, y: 11 }, root, ylabel);
  }
  return { root, width, height, inner, sx, sy };
}

// ---- choices: buttons for a few, a list for methods

function choose(holder, name, options, chosen, change) {
  if (!holder || options.length < 2) return;
  holder.setAttribute("role", "group");
  holder.setAttribute("aria-label", name);
  if (name === "method") {
    const id = `choose-${holder.closest("section").id}`;
    make("label", { for: id }, holder, "Method");
    const list = make("select", { id }, holder);
    for (const [value, text] of options) make("option", { value }, list, text);
    list.value = chosen;
    list.addEventListener("change", () => change(list.value));
    return;
  }
  for (const [value, text] of options) {
    const button = make("button", { type: "button", "aria-pressed": value === chosen, "data-value": value }, holder, text);
    button.addEventListener("click", () => {
      for (const other of holder.children) other.setAttribute("aria-pressed", other === button);
      change(value);
    });
  }
}

// ---- progress: a metric against rounds, seconds, megabytes or steps

const UNITS = {
  rounds: ["Rounds", "round", ""], seconds: [data.clock[0].toUpperCase() + data.clock.slice(1) + " seconds", data.clock + " seconds", " s"],
  megabytes: ["Megabytes", "megabytes up and down", " MB"], steps: ["Client steps", "client steps", " client steps"],
};
const measured = data.metrics.filter((metric) => data.curves[metric.name]);
const units = Object.keys(UNITS).filter((unit) => measured.some((metric) => data.curves[metric.name][unit]));
const fair = Object.keys(data.staleness).length && units.includes("seconds") ? "seconds" : units[0]; // rounds of asynchronous methods are shorter
const progress = { metric: measured[0]?.name, against: fair, hidden: new Set(), redraw: () => {} };
const BANDS = 4; // with more methods in sight, only the leader's band is drawn, and that of the method pointed at

function curves(section) {
  const holder = find(".draw", section), metric = data.metrics.find((one) => one.name === progress.metric);
  const lines = data.curves[progress.metric][progress.against] ?? {};
  const percent = metric.scale === 100, unit = UNITS[progress.against];
  const shown = data.ranking.filter((label) => lines[label] && !progress.hidden.has(label));
  const means = shown.flatMap((label) => lines[label].mean).filter((value) => value !== null).sort((a, b) => a - b);
  const longest = Math.max(0, ...Object.values(lines).map((line) => line.x.at(-1)));
  let [low, high] = means.length ? [means[0], means.at(-1)] : [0, 1];
  // the steep beginning would flatten the rest: it enters from the edge
  if (!metric.lower) low = means[Math.floor(0.06 * means.length)] ?? low;
  else high = means[Math.ceil(0.94 * means.length) - 1] ?? high;
  const margin = 0.05 * (high - low || 1);
  low -= margin; high += margin;
  if (percent) high = Math.min(high, 1);
  const wide = holder.clientWidth > 720, room = letters(shown, 200);
  const about = `${metric.words} against ${unit[1]} for ${shown.join(", ")}`;
  const { root, inner, sx, sy } = frame(holder, about, {
    height: wide ? 420 : 320, right: wide ? room + 12 : 12, x: [0, longest], y: [low * metric.scale, high * metric.scale],
    xlabel: unit[1], ylabel: metric.words + (percent ? ", %" : ""),
  });
  const clip = make("clipPath", { id: "plot" }, make("defs", {}, root));
  make("rect", { x: inner.left, y: inner.top, width: inner.right - inner.left, height: inner.bottom - inner.top }, clip);
  const ends = [];
  for (const label of [...shown].reverse()) {
    const line = lines[label], { colour, dash } = look(label), place = (value) => sy(value * metric.scale).toFixed(1);
    const quiet = shown.length > BANDS && label !== shown[0] ? " quiet" : "";
    const group = make("g", { class: `method${quiet}`, "data-label": label }, root);
    const points = line.x.map((x, k) => [sx(x).toFixed(1), line.mean[k], line.half?.[k] ?? 0]).filter((p) => p[1] !== null);
    if (line.half) {
      const upper = points.map(([x, mean, half]) => `${x},${place(mean + half)}`);
      const lower = points.map(([x, mean, half]) => `${x},${place(mean - half)}`).reverse();
      make("polygon", { class: "band", points: [...upper, ...lower].join(" "), style: `fill:${colour}`, "clip-path": "url(#plot)" }, group);
    }
    const path = points.map(([x, mean]) => `${x},${place(mean)}`).join(" ");
    make("polyline", { class: "line", points: path, style: `stroke:${colour}`, "stroke-dasharray": dash, "clip-path": "url(#plot)" }, group);
    const [x, mean] = points.at(-1);
    ends.push({ label, group, colour, x: +x, y: +place(mean) });
  }
  if (wide) direct(ends.filter((end) => end.x > inner.left + 0.75 * (inner.right - inner.left)), inner);
  const guide = make("line", { class: "guide", style: "stroke:var(--soft)", y1: inner.top, y2: inner.bottom, visibility: "hidden" }, root);
  const over = make("rect", { class: "over", x: inner.left, y: inner.top, width: inner.right - inner.left, height: inner.bottom - inner.top, fill: "transparent" }, root);
  over.addEventListener("pointermove", (event) => {
    const share = (event.clientX - root.getBoundingClientRect().left - inner.left) / (inner.right - inner.left);
    let at = longest * Math.min(1, Math.max(0, share));
    if (progress.against === "rounds") at = Math.round(at);
    guide.setAttribute("x1", sx(at));
    guide.setAttribute("x2", sx(at));
    guide.setAttribute("visibility", "visible");
    const values = shown.map((label) => [label, value(lines[label], at)]).filter(([, found]) => found);
    values.sort((a, b) => (metric.lower ? 1 : -1) * (a[1].mean - b[1].mean));
    say(event, progress.against === "rounds" ? `round ${at}` : number(at, 3) + unit[2], values.map(([label, { mean, half }]) => {
      const digits = percent ? 1 : 3;
      const text = (mean * metric.scale).toFixed(digits) + (half == null ? "" : PLUS_MINUS + (half * metric.scale).toFixed(digits));
      return [label, label, text + (percent ? " %" : "")];
    }));
  });
  over.addEventListener("pointerleave", () => { hush(); guide.setAttribute("visibility", "hidden"); });
}

// Pixels that names of methods need, at most so many.
const letters = (labels, most) => Math.min(most, 12 + 6.7 * Math.max(0, ...labels.map((label) => label.length)));

// The last measurement at or before a place; nothing beyond the end of the shortest run.
function value(line, at) {
  if (at < line.x[0] || at > line.x.at(-1)) return null;
  const k = line.x.findLastIndex((x) => x <= at);
  return line.mean[k] === null ? null : { mean: line.mean[k], half: line.half?.[k] };
}

// Names at the ends of the lines, moved apart.
function direct(ends, inner) {
  ends.sort((a, b) => a.y - b.y);
  let last = inner.top - 12;
  for (const end of ends) last = end.at = Math.max(end.y, last + 14);
  let limit = inner.bottom + 4;
  for (const end of [...ends].reverse()) limit = (end.at = Math.min(end.at, limit)) - 14;
  for (const { label, group, colour, x, y, at } of ends) {
    const spot = Math.max(inner.top, Math.min(inner.bottom, y));
    make("path", { d: `M${x + 2},${spot}L${inner.right + 4},${at}`, style: `stroke:${colour};opacity:.35;fill:none` }, group);
    make("text", { x: inner.right + 8, y: at + 4, style: `fill:${colour}` }, group, label);
  }
}

function legend(section) {
  const holder = find(".legend", section), drawn = Object.values(data.curves).flatMap((by) => Object.values(by)).flatMap(Object.keys);
  for (const label of data.ranking.filter((name) => drawn.includes(name))) {
    const button = make("button", { type: "button", "aria-pressed": true, "data-label": label }, holder);
    swatch(label, button);
    make("span", {}, button, label);
    button.addEventListener("click", () => {
      const hide = !progress.hidden.delete(label);
      if (hide) progress.hidden.add(label);
      button.setAttribute("aria-pressed", !hide);
      progress.redraw();
    });
    const light = (on) => section.querySelectorAll("g.method").forEach((group) => {
      group.classList.toggle("lit", on && group.dataset.label === label);
      group.classList.toggle("dim", on && group.dataset.label !== label && !progress.hidden.has(label));
    });
    for (const [name, on] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]])
      button.addEventListener(name, () => light(on));
  }
}

// ---- rows of clients: the timeline and the map of steps

const ROW = 17;
function clientRows(root, count, left, top) {
  for (let client = 0; client < count; client++)
    make("text", { x: left - 8, y: top + ROW * client + 12, "text-anchor": "end" }, root, client);
  make("text", { x: 0, y: top - 9, class: "strong" }, root, "client");
}

function key(parent, from, to, x, y, text) {
  for (let k = 0; k < 24; k++) make("rect", { x: x + 3 * k, y: y - 9, width: 3.5, height: 10, style: `fill:${heat(k / 23)}` }, parent);
  make("text", { x: x - 6, y, "text-anchor": "end" }, parent, `${text} ${number(from, 3)}`);
  make("text", { x: x + 78, y }, parent, number(to, 3));
}

function timeline(section, label) {
  const line = data.timelines[label], holder = find(".draw", section), count = Math.min(line.clients, line.utilisation.length);
  const age = (job) => (job[4] ? job[4] - 1 - job[3] : 0);
  const oldest = Math.max(1, ...line.jobs.filter((job) => job[6] === "used").map(age));
  const { root, inner, sx } = frame(holder, `Timeline of ${label}: ${count} clients, ${line.jobs.length} jobs`, {
    height: 24 + ROW * count + 40, top: 24, bottom: 40, left: 40, right: 120, x: [0, line.until], y: [0, 1],
    xlabel: data.clock + " seconds", least: 680,
  });
  const width = inner.right - inner.left, bars = inner.right + 24;
  const defs = make("defs", {}, root);
  for (const [id, colour] of [["gone", "var(--bad)"], ["overwritten", "var(--soft)"]]) {
    const hatch = make("pattern", { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    make("line", { x1: 0, x2: 0, y1: 0, y2: 4, style: `stroke:${colour};stroke-width:2;opacity:.6` }, hatch);
  }
  clientRows(root, count, inner.left, inner.top);
  for (let client = 0; client < count; client++) {
    const y = inner.top + ROW * client, share = line.utilisation[client] ?? 0;
    make("rect", { x: inner.left, y: y + 2, width, height: ROW - 4, style: "fill:var(--track)" }, root);
    make("rect", { x: bars, y: y + 4, width: 50, height: ROW - 8, style: "fill:var(--track)" }, root);
    make("rect", { x: bars, y: y + 4, width: 50 * share, height: ROW - 8, style: "fill:var(--soft)" }, root);
    make("text", { x: bars + 88, y: y + 12, "text-anchor": "end" }, root, `${Math.round(100 * share)} %`);
  }
  const fills = { overwritten: "url(#overwritten)", "in flight": "var(--page)" };
  for (const job of line.jobs) {
    const [client, start, end, version, update, steps, fate, exchange] = job;
    const x = sx(start), y = inner.top + ROW * client + (exchange === "train" ? 2 : 6);
    const fill = fate === "used" ? heat(line.delayed ? age(job) / oldest : 0.55) : fills[fate] ?? "url(#gone)";
    const bar = make("rect", {
      class: "job", x, y, width: Math.max(1.5, Math.min(sx(end), inner.right) - x - 0.5), height: exchange === "train" ? ROW - 4 : ROW - 12,
      style: `fill:${fill};stroke:${fate === "used" ? "none" : fills[fate] ? "var(--soft)" : "var(--bad)"};stroke-width:.6`,
    }, root);
    const rows = [["version", version], ["steps", steps], ["seconds", `${number(start)} to ${number(end)}`], ["fate", fate]];
    if (update) rows.push(["went into update", update], ["versions old", age(job)]);
    explain(bar, `client ${client}${exchange === "train" ? "" : `, ${exchange}`}`, rows.map(([name, text]) => [null, name, String(text)]));
  }
  const crowded = line.updates.length > width / 8;
  for (const at of line.updates)
    make("line", { class: "update", x1: sx(at), x2: sx(at), y1: inner.top - 5, y2: crowded ? inner.top : inner.bottom, style: "stroke:var(--ink);opacity:.45" }, root);
  make("text", { x: bars, y: 15, class: "strong" }, root, "busy");
  if (line.delayed) key(root, 0, oldest, inner.left + 190, 15, "versions old");
  const capped = line.jobs.length < line.total
    ? `the first ${number(line.jobs.length)} of ${number(line.total)} jobs, up to second ${number(line.until, 3)} of ${number(line.seconds, 3)}`
    : `all ${number(line.total)} jobs`;
  const rest = count < line.clients ? `, clients 0 to ${count - 1} of ${line.clients}` : "";
  const seen = (test, words) => (line.jobs.some(test) ? words : "");
  find(".note", section).textContent = `Shown: seed ${line.seed}, ${capped}${rest}.` +
    seen((job) => job[7] !== "train", " Thin bars are exchanges without training.") +
    seen((job) => job[6] === "overwritten", " Hatched grey: overwritten by a newer update before the server asked.") +
    seen((job) => ["lost", "rejected"].includes(job[6]), " Hatched red: lost or rejected.");
}

function stepMap(section, label) {
  const map = data.steps[label], holder = find(".draw", section), count = map.cells.length, columns = map.cells[0].length;
  const values = map.cells.flat().filter((cell) => cell !== null), low = Math.min(...values), high = Math.max(...values);
  const { root, inner } = frame(holder, `Local steps of ${label}: ${count} clients over ${map.rounds} rounds, from ${low} to ${high}`, {
    height: 24 + ROW * count + 40, top: 24, bottom: 40, left: 40, x: [0, map.rounds], y: [0, 1], xlabel: "round", least: 340,
  });
  const width = (inner.right - inner.left) / (map.rounds / map.width);
  clientRows(root, count, inner.left, inner.top);
  map.cells.forEach((row, client) => row.forEach((steps, column) => {
    if (steps === null) return;
    const right = Math.min(inner.right, inner.left + width * (column + 1)), x = inner.left + width * column;
    const cell = make("rect", {
      x, y: inner.top + ROW * client + 0.5, width: right - x + (width < 6 ? 0.4 : -0.6), height: ROW - 1,
      style: `fill:${heat((steps - low) / (high - low || 1))}`,
    }, root);
    const first = map.width * column + 1, last = Math.min(map.rounds, first + map.width - 1);
    const when = first === last ? `round ${first}` : `rounds ${first} to ${last}`;
    explain(cell, `client ${client}, ${when}`, [[null, first === last ? "steps" : "steps, mean", number(steps)]]);
  }));
  key(root, low, high, inner.right - 110, 15, "steps");
  find(".note", section).textContent = `Shown: seed ${map.seed}` +
    (map.width > 1 ? `, ${map.width} rounds a column` : "") + (count < map.clients ? `, clients 0 to ${count - 1} of ${map.clients}` : "") + ".";
}

// ---- staleness, partition, fairness

function staleness(section) {
  const holder = find(".grid", section);
  holder.replaceChildren();
  for (const [label, counts] of Object.entries(data.staleness)) {
    const figure = make("figure", {}, holder), total = counts.reduce((a, b) => a + b);
    const mean = counts.reduce((sum, count, age) => sum + age * count, 0) / total;
    make("figcaption", {}, figure, `${label}: ${mean.toFixed(1)} on average, ${counts.length - 1} at most`);
    const { root, inner, sx, sy } = frame(make("div", {}, figure), `Staleness of ${label}`, {
      height: 190, x: [-0.5, counts.length - 0.5], y: [0, (100 * Math.max(...counts)) / total], xlabel: "versions old", ylabel: "% of updates",
    });
    counts.forEach((count, age) => {
      const bar = make("rect", {
        x: sx(age - 0.4), width: sx(age + 0.4) - sx(age - 0.4), y: sy((100 * count) / total), height: inner.bottom - sy((100 * count) / total),
        style: `fill:${look(label).colour}`,
      }, root);
      explain(bar, `${age} versions old`, [[null, "updates", `${number(count)} (${((100 * count) / total).toFixed(1)} %)`]]);
    });
  }
}

function partition(section) {
  const { counts, classes, clients, seed } = data.partition, cell = 26, left = 70, top = 12;
  const width = Math.max(left + cell * counts.length + 10, 200), height = top + cell * classes.length + 40;
  const root = make("svg", { width, height, role: "img", "aria-label": `${clients} clients against ${classes.length} classes` });
  find(".draw", section).replaceChildren(root);
  const most = Math.max(1, ...counts.flat());
  classes.forEach((name, k) => {
    const y = top + cell * (k + 0.5);
    make("line", { class: "rule", x1: left, x2: width - 10, y1: y, y2: y }, root);
    make("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, root, name.length > 9 ? `${name.slice(0, 8)}\u2026` : name);
  });
  make("text", { x: 0, y: top + 8, class: "strong" }, root, "class");
  make("text", { x: left, y: height - 3, class: "strong" }, root, "client");
  counts.forEach((row, client) => {
    make("text", { x: left + cell * (client + 0.5), y: height - 22, "text-anchor": "middle" }, root, client);
    row.forEach((count, k) => {
      if (!count) return;
      const r = Math.max(1, 0.48 * cell * Math.sqrt(count / most));
      const disc = make("circle", { cx: left + cell * (client + 0.5), cy: top + cell * (k + 0.5), r, style: "fill:var(--accent);fill-opacity:.85" }, root);
      explain(disc, `client ${client}, class ${classes[k]}`, [[null, "examples", number(count)]]);
    });
  });
  find(".note", section).textContent = `Shown: seed ${seed}` + (counts.length < clients ? `, the first ${counts.length} of ${clients} clients` : "") +
    `; the largest disc is ${number(most)} examples.`;
}

function fairness(section) {
  const rows = data.ranking.filter((label) => data.fairness[label]), row = 34, narrow = find(".draw", section).clientWidth < 560;
  const left = letters(rows, narrow ? 90 : 200), fits = Math.floor((left - 10) / 6.7);
  const low = Math.min(...rows.flatMap((label) => data.fairness[label].points));
  const { root, inner, sx } = frame(find(".draw", section), `Accuracy of every client for ${rows.join(", ")}`, {
    height: 24 + row * rows.length + 40, top: 24, left, right: narrow ? 96 : 130, x: [Math.min(98, Math.floor(10 * low) * 10), 100], y: [0, 1],
    xlabel: "accuracy of a client, %", least: 340,
  });
  make("text", { x: inner.right + 14, y: 15, class: "strong" }, root, "worst tenth, %");
  rows.forEach((label, k) => {
    const { points, quartiles, worst } = data.fairness[label], y = inner.top + row * (k + 0.5), { colour } = look(label);
    const [q1, median, q3] = quartiles.map((share) => sx(100 * share));
    make("line", { class: "rule", x1: inner.left, x2: inner.right, y1: y + row / 2, y2: y + row / 2 }, root);
    make("text", { x: 0, y: y + 4, class: "strong" }, root, label.length > fits ? `${label.slice(0, fits - 1)}\u2026` : label);
    make("rect", { x: q1, y: y - 11, width: Math.max(1, q3 - q1), height: 22, style: `fill:${colour};opacity:.18` }, root);
    points.forEach((share, index) =>  // spread by a fixed sequence, so that the picture is always the same
      make("circle", { cx: sx(100 * share), cy: y - 9 + 18 * ((index * 0.618034) % 1), r: 2.6, style: `fill:${colour};opacity:.65` }, root));
    make("line", { x1: median, x2: median, y1: y - 13, y2: y + 13, style: `stroke:${colour};stroke-width:2.5` }, root);
    make("text", { x: inner.right + 14, y: y + 4 }, root, worst);
    const over = make("rect", { x: inner.left, y: y - row / 2, width: inner.right - inner.left, height: row, fill: "transparent" }, root);
    const said = [["median", quartiles[1]], ["quarter of clients below", quartiles[0]], ["lowest", Math.min(...points)]];
    explain(over, label, [...said.map(([name, share]) => [null, name, `${(100 * share).toFixed(1)} %`]), [null, "worst tenth", `${worst} %`]]);
  });
}

// ---- the table

function sortable(table) {
  const heads = [...table.tHead.rows].at(-1).cells;
  [...heads].forEach((head, column) => find("button", head).addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const read = (row) => row.cells[column].dataset.value, text = column === 0;
    const order = (a, b) => (text ? read(a).localeCompare(read(b)) : parse(read(a)) - parse(read(b)) || 0);
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => (down ? -1 : 1) * order(a, b)));
  }));
}
const parse = (text) => (text === "inf" ? 1e300 : text === "-inf" ? -1e300 : Number(text));

// ---- start

const drawings = [];
function figure(id, draw) {
  const section = document.getElementById(id);
  if (!section) return;
  drawings.push(() => draw(section));
  draw(section);
}
function perMethod(id, draw, chosen) {
  const section = document.getElementById(id);
  if (!section) return;
  const state = { label: chosen };
  choose(find(".choice", section), "method", data.ranking.filter((label) => data[id][label]).map((label) => [label, label]), chosen,
    (label) => { state.label = label; draw(section, label); });
  figure(id, () => draw(section, state.label));
}

sortable(find("table"));
if (document.getElementById("curves")) {
  const section = document.getElementById("curves");
  progress.redraw = () => curves(section);
  choose(find("[data-name=metric]", section), "metric", measured.map((one) => [one.name, one.words]),
    progress.metric, (name) => { progress.metric = name; progress.redraw(); });
  choose(find("[data-name=against]", section), "against", units.map((unit) => [unit, UNITS[unit][0]]), progress.against,
    (unit) => { progress.against = unit; progress.redraw(); });
  legend(section);
}
figure("curves", curves);
const first = (part, worth) => Object.keys(data[part]).sort((a, b) => worth(data[part][b]) - worth(data[part][a]))[0];
perMethod("timelines", timeline, first("timelines", (line) => Number(line.delayed)));
perMethod("steps", stepMap, first("steps", (map) => map.change));
figure("staleness", staleness);
figure("partition", partition);
figure("fairness", fairness);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawings.forEach((draw) => draw());
});
