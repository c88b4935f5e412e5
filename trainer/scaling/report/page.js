// Draws the charts of a report as inline SVG from the JSON in the page; hovering shows values, the filter hides runs.
//
// A chart is {figure, x: {log, label, from}, y: {label, clamp}, layers, read, height, ends}. A layer belongs to a run and
// is one of: line [[x, y]...] (style), band [[x, low, high]...], points [[x, y, low, high]...]. `read(x)` gives the content
// of the tooltip at x: [heading, [[colour, text]...]]. `ends()` gives where lines end and whose they are: [[run, x, y]...].
// Runs of one recipe have one colour, mark and name. null in data: no number.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const tip = document.getElementById("tip");
  const COLOURS = 7;  // as in page.py
  const MARKS = ["circle", "square", "triangle", "diamond"];
  const STATES = {  // work, moving weights, evaluation, the rest
    generate: "var(--c0)", forward_backward: "var(--c0)", loss_head: "var(--c0)", attention: "var(--c0)",
    score: "var(--c4)", optimizer: "var(--c2)", pack: "var(--c4)",
    publish: "var(--c5)", weight_update: "var(--c5)", evaluate: "var(--c3)", checkpoint: "var(--c1)",
    "start-up": "var(--c6)", "shut-down": "var(--c6)", tools: "var(--c6)", idle: "var(--idle)",
  };
  const stateColour = (state) => STATES[state] ?? "var(--c1)";
  const spaced = (name) => name.replaceAll("_", " ");

  // ---- numbers
  const known = (x) => x !== null && Number.isFinite(x);
  function number(x) {
    if (!known(x)) return "–";
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return Number(x.toPrecision(3)).toLocaleString("en-US", {maximumFractionDigits: 6});
  }
  const rate = (x) => known(x) ? x.toFixed(3) : "–";

  function linearTicks(low, high, most) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((m) => m * power >= rough) ?? 10);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(i * step || 0);  // no −0
    if (ticks.length < 2 && most < 20) return linearTicks(low, high, 2 * most);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return ticks.map((x) => [x, high < 1e5 && digits < 5 ? x.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits}) : number(x)]);
  }

  function logTicks(low, high, most) {
    const decades = Math.log10(high / low);
    const marks = decades <= most / 3 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / most));
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      if (p % every === 0) for (const m of marks) {
        const x = Number(`${m}e${p}`);
        if (x >= low && x <= high) ticks.push([x, number(x)]);
      }
    return ticks;
  }

  // ---- drawing
  function add(parent, name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  function range(layers, key) {
    const all = layers.flatMap((l) => key === "x"
      ? (l.line ?? l.band ?? l.points).map((p) => p[0])
      : l.band ? l.band.flatMap((p) => [p[1], p[2]]) : (l.line ?? l.points).map((p) => p[1])).filter(known);
    return all.length ? [Math.min(...all), Math.max(...all)] : null;
  }

  const pen = document.createElement("canvas").getContext("2d");
  function textWidth(text) {
    pen.font = "600 11px system-ui, sans-serif";
    return pen.measureText(text).width;
  }

  function shortened(text, width) {  // without its middle: names of runs differ at their ends
    let kept = text.length, short = text;
    while (kept > 4 && textWidth(short) > width) {
      kept -= 1;
      short = `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
    }
    return short;
  }

  function axes(chart, layers, width, height) {
    const box = {left: 46, right: width - chart.gutter, top: chart.y.label ? 24 : 8, bottom: height - (chart.x.label ? 36 : 22)};
    const shown = chart.x.log ? layers.map(aboveZero) : layers;
    let [x0, x1] = range(shown, "x"), [y0, y1] = range(shown, "y") ?? [0, 1];
    if (chart.x.from !== undefined) x0 = chart.x.from;
    if (x0 === x1) [x0, x1] = chart.x.log ? [x0 / 2, x1 * 2] : [x0 - 1, x1 + 1];
    const room = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 0.5, floor = y0 >= 0 ? 0 : -Infinity;
    [y0, y1] = [Math.max(floor, y0 - room), y1 + room];
    if (chart.y.clamp) [y0, y1] = [Math.max(y0, chart.y.clamp[0]), Math.min(y1, chart.y.clamp[1])];
    const u = chart.x.log ? Math.log : (v) => v;
    const w = chart.x.log ? Math.exp : (v) => v;
    return {
      ...box, x0, x1, y0, y1,
      x: (v) => box.left + (u(v) - u(x0)) / (u(x1) - u(x0)) * (box.right - box.left),
      y: (v) => box.bottom - (v - y0) / (y1 - y0) * (box.bottom - box.top),
      unx: (px) => w(u(x0) + (px - box.left) / (box.right - box.left) * (u(x1) - u(x0))),
    };
  }

  const aboveZero = (layer) => {
    const cut = {...layer};
    for (const kind of ["line", "band", "points"]) if (cut[kind]) cut[kind] = cut[kind].filter((p) => p[0] > 0);
    return cut;
  };

  function drawAxes(svg, chart, a, width) {
    if (chart.y.label) add(svg, "text", {class: "title", x: 4, y: 12}, shortened(chart.y.label, width - 8));
    for (const [v, label] of linearTicks(a.y0, a.y1, Math.max(3, (a.bottom - a.top) / 40))) {
      add(svg, "line", {class: "grid", x1: a.left, x2: a.right, y1: a.y(v), y2: a.y(v)});
      add(svg, "text", {x: a.left - 6, y: a.y(v) + 4, "text-anchor": "end"}, label);
    }
    const most = Math.max(2, (a.right - a.left) / 62);
    let free = -Infinity;  // where the last label ended: labels never overlap
    for (const [v, label] of chart.x.log ? logTicks(a.x0, a.x1, most) : linearTicks(a.x0, a.x1, most)) {
      const half = textWidth(label) / 2, x = Math.min(a.x(v), width - half - 1);
      add(svg, "line", {class: "grid", x1: a.x(v), x2: a.x(v), y1: a.bottom, y2: a.bottom + 4});
      if (x - half < free + 6) continue;
      free = x + half;
      add(svg, "text", {x, y: a.bottom + 16, "text-anchor": "middle"}, label);
    }
    if (chart.x.label) add(svg, "text", {x: (a.left + a.right) / 2, y: a.bottom + 31, "text-anchor": "middle"}, chart.x.label);
  }

  const path = (points, a) => points.map(([x, y], i) => `${i && known(points[i - 1][1]) ? "L" : "M"}${a.x(x).toFixed(1)} ${a.y(y).toFixed(1)}`);

  function drawLayer(svg, layer, a) {
    const recipe = data.runs[layer.run].recipe;
    const group = add(svg, "g", {class: `c${recipe % COLOURS}`, "data-run": layer.run});
    if (layer.line) {
      const d = path(layer.line, a).filter((_, i) => known(layer.line[i][1])).join("");
      add(group, "path", {class: `line ${layer.style ?? ""}`, d});
    }
    if (layer.band) {
      const up = layer.band.map(([x, , high]) => [x, high]), down = layer.band.map(([x, low]) => [x, low]).reverse();
      if (up.length) add(group, "path", {class: "band", d: path(up.concat(down), a).join("") + "Z"});
    }
    for (const [x, y, low, high] of layer.points ?? []) {
      const [px, py] = [a.x(x), a.y(y)];
      add(group, "line", {class: "bar", x1: px, x2: px, y1: known(low) ? a.y(low) : a.bottom, y2: known(high) ? a.y(high) : a.top});
      mark(group, MARKS[Math.floor(recipe / COLOURS) % MARKS.length], px, py, layer.points.length > 60 || data.runs.length > 3 ? 2.2 : 3.2);
    }
  }

  function mark(group, shape, x, y, r) {
    if (shape === "circle") return add(group, "circle", {class: "point", cx: x, cy: y, r});
    if (shape === "square") return add(group, "rect", {class: "point", x: x - r, y: y - r, width: 2 * r, height: 2 * r});
    const corners = shape === "triangle" ? [[0, -1.2], [1.1, .9], [-1.1, .9]] : [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]];
    return add(group, "polygon", {class: "point", points: corners.map(([u, v]) => `${x + u * r},${y + v * r}`).join(" ")});
  }

  const LINE = 13;  // pixels, of text
  function drawNames(svg, ends, a, width) {  // at the ends of the lines, moved up or down where they would overlap
    const names = ends.map(([run, x, y]) => {
      const at = [a.x(x), a.y(y)], from = Math.min(at[0], a.right) + 7;
      const text = shortened(data.recipes[data.runs[run].recipe], width - from - 2);
      return {run, at, from, to: from + textWidth(text), y: at[1], text};
    }).sort((p, q) => p.y - q.y);
    const beside = (p) => (q) => q.from < p.to + 4 && p.from < q.to + 4;
    names.forEach((p, i) => names.slice(0, i).filter(beside(p)).forEach((q) => { p.y = Math.max(p.y, q.y + LINE); }));
    names.reverse().forEach((p, i) => {
      p.y = Math.min(p.y, a.bottom - 2);
      names.slice(0, i).filter(beside(p)).forEach((q) => { p.y = Math.min(p.y, q.y - LINE); });
    });
    for (const {run, at, from, y, text} of names) {
      const group = add(svg, "g", {class: `name c${data.runs[run].recipe % COLOURS}`, "data-run": run});
      if (Math.abs(y - at[1]) > 3) add(group, "line", {x1: at[0] + 1, y1: at[1], x2: from - 2, y2: y});
      add(group, "text", {x: from, y: y + 4}, text);
    }
  }

  let clips = 0, widest = Infinity;
  function draw(chart) {
    const {figure} = chart;
    if (!figure.clientWidth) return;  // folded
    figure.querySelector("svg, .empty")?.remove();
    const layers = chart.layers.filter((l) => !hidden.has(l.run));
    if (!range(chart.x.log ? layers.map(aboveZero) : layers, "x")) {
      const empty = document.createElement("p");
      empty.className = "empty note";
      empty.textContent = layers.length || !chart.layers.length ? "no data" : "all runs are hidden";
      return figure.append(empty);
    }
    const width = Math.min(widest, Math.max(130, figure.clientWidth - 18)), height = Math.min(chart.height, Math.max(150, 0.9 * width));
    const ends = chart.ends?.() ?? [];
    chart.gutter = 10;
    let a = axes(chart, layers, width, height);
    const gutters = ends.map(([run, x]) => {  // that leave room for each name
      const room = width - a.left, share = (Math.min(a.x(x), a.right) - a.left) / (a.right - a.left);
      return room - (room - 9 - textWidth(data.recipes[data.runs[run].recipe])) / share;
    });
    chart.gutter = Math.max(10, Math.min(0.26 * width, Math.max(...gutters)));
    if (ends.length) a = axes(chart, layers, width, height);
    const svg = add(figure, "svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title ?? figure.querySelector("figcaption").textContent});
    drawAxes(svg, chart, a, width);
    const clip = `clip${clips++}`;
    add(add(add(svg, "defs", {}), "clipPath", {id: clip}), "rect", {x: a.left - 4, y: a.top - 4, width: width - a.left + 4, height: a.bottom - a.top + 8});
    const plot = add(svg, "g", {"clip-path": `url(#${clip})`});
    for (const layer of layers) drawLayer(plot, chart.x.log ? aboveZero(layer) : layer, a);
    drawNames(svg, ends, a, width);
    hover(svg, chart, a, width);
  }

  // ---- the tooltip
  let cross = null;
  const leave = () => { cross?.remove(); cross = null; tip.hidden = true; };
  addEventListener("pointerdown", (event) => { if (!event.target.closest?.("svg.chart")) leave(); });

  function hover(svg, chart, a, width) {
    const move = (event) => {
      const frame = svg.getBoundingClientRect(), px = (event.clientX - frame.left) * width / frame.width;
      if (px < a.left - 6 || px > a.right + 6) return leave();
      const content = chart.read(a.unx(Math.min(a.right, Math.max(a.left, px))));
      if (!content) return leave();
      cross?.remove();
      cross = add(svg, "line", {class: "cross", x1: px, x2: px, y1: a.top, y2: a.bottom});
      showTip(content, event);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });  // after a tap the tooltip stays
  }

  function showTip([heading, rows], event) {
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = heading;
    tip.append(head);
    for (const [colour, text] of rows) {
      const row = document.createElement("div"), swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = colour;
      row.append(swatch, text);
      tip.append(row);
    }
    tip.hidden = false;
    const wide = document.documentElement.clientWidth;
    const left = event.clientX + 14 + tip.offsetWidth > wide ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
    tip.style.left = `${Math.max(4, Math.min(left, wide - tip.offsetWidth - 4)) + scrollX}px`;
    tip.style.top = `${event.clientY + 14 + scrollY}px`;
  }

  const colour = (run) => `var(--c${data.runs[run].recipe % COLOURS})`;
  const label = (run) => data.runs.length > 1 ? `${data.runs[run].name}: ` : "";
  const visible = () => data.runs.map((run, i) => [run, i]).filter(([, i]) => !hidden.has(i));
  const nearest = (list, x, of) => list.reduce((best, p) => best === null || Math.abs(of(p) - x) < Math.abs(of(best) - x) ? p : best, null);

  // ---- reward over compute
  function between(curve, x) {  // the curve at x, straight between its points
    const i = curve.findIndex((p) => p[0] >= x);
    if (i < 0) return null;
    if (i === 0) return curve[0].slice(1);
    const [a, b] = [curve[i - 1], curve[i]], t = (x - a[0]) / (b[0] - a[0]);
    return a.slice(1).map((v, k) => v + t * (b[k + 1] - v));
  }

  function readCurves(log) {
    const u = log ? Math.log : (v) => v;
    return (x) => {
      const rows = [];
      for (const [run, i] of visible()) {
        const at = between(run.curve, x);
        if (at && x > run.last && !run.ceiling) rows.push([colour(i), `${label(i)}forecast ${rate(at[1])} to ${rate(at[2])}`]);
        else if (at) rows.push([colour(i), `${label(i)}${x > run.last ? "forecast" : "fit"} ${rate(at[0])} (${rate(at[1])} to ${rate(at[2])})`]);
        const p = nearest(run.points.filter((q) => !log || q[0] > 0), u(x), (q) => u(q[0]));
        if (p && x <= 1.1 * run.last) rows.push([colour(i), `${label(i)}measured ${rate(p[1])}${p[2] ? ` ± ${rate(p[2])}` : ""} at ${number(p[0])}`]);
      }
      return rows.length ? [`${number(x)} ${data.unit}`, rows] : null;
    };
  }

  const axis = `compute, ${data.unit}`;
  const measured = (run) => run.points.map(([x, y, se]) => [x, y, y - se, y + se]);

  function curveChart(figure, log) {
    const bands = [], lines = [], points = [], last = [];
    data.runs.forEach((run, i) => {
      const drawn = run.curve.filter((p) => log ? p[0] >= run.first / 2 : p[0] <= data.reach);
      const past = drawn.filter((p) => p[0] <= run.last), ahead = drawn.filter((p) => p[0] >= run.last);
      bands.push({run: i, band: drawn.map(([x, , low, high]) => [x, low, high])});
      points.push({run: i, points: measured(run)});
      if (!drawn.length) lines.push({run: i, line: run.points, style: "thin"});  // no sigmoid describes it
      else lines.push({run: i, line: past});
      const end = ahead.at(-1) ?? run.points.at(-1);
      if (!run.ceiling) return last.push([i, end[0], ahead.length ? end[3] : end[1]]);  // at the top of the band
      lines.push({run: i, line: ahead, style: "dashed"}, {run: i, line: [[run.last, run.ceiling[0]], [end[0], run.ceiling[0]]], style: "level"});
      last.push([i, end[0], end[1]]);
    });
    const ends = () => {  // one name for each recipe, at its run that reaches furthest
      const shown = last.filter(([i]) => !hidden.has(i)).sort((p, q) => q[1] - p[1]);
      return shown.filter(([i], nth) => shown.findIndex(([k]) => data.runs[k].recipe === data.runs[i].recipe) === nth);
    };
    return {
      figure, layers: [...bands, ...points, ...lines], x: {log, label: axis, ...(log ? {} : {from: 0})},
      y: {clamp: [0, 1], label: data.reward}, read: readCurves(log), height: 480, title: "Reward over compute", ...(data.runs.length > 1 ? {ends} : {}),
    };
  }

  function efficiencyChart(figure) {
    const layers = data.runs.flatMap((run, i) => {
      const {points, B, C_mid} = run.efficiency ?? {};
      const straight = [run.first / 1.3, run.last * 1.3].map((c) => [c, B * Math.log(c / C_mid)]);
      return run.efficiency ? [{run: i, line: straight}, {run: i, points}] : [];
    });
    const read = (x) => {
      const rows = visible().filter(([run]) => run.efficiency?.points.length).map(([run, i]) => {
        const p = nearest(run.efficiency.points, Math.log(x), (q) => Math.log(q[0]));
        const beyond = run.efficiency.left_out ? `; ${run.efficiency.left_out} points outside R0 to A are not shown` : "";
        return [colour(i), `${label(i)}${p[1].toFixed(2)} at ${number(p[0])}; B = ${run.efficiency.B.toFixed(2)}${beyond}`];
      });
      return rows.length ? [`${number(x)} ${data.unit}`, rows] : null;
    };
    return {figure, layers, x: {log: true, label: axis}, y: {label: "log [(R − R0) / (A − R)]"}, read, height: 360};
  }

  function forecastChart(figure) {
    const layers = data.runs.flatMap((run, i) => run.forecasts?.length ? [
      {run: i, band: run.forecasts.map(([x, , low, high]) => [x, low, high])},
      {run: i, line: run.forecasts, style: "dashed"},
      {run: i, points: measured(run)},
    ] : []);
    const read = (x) => {
      const rows = visible().filter(([run]) => run.forecasts?.length).map(([run, i]) => {
        const f = nearest(run.forecasts, x, (q) => q[0]);
        return [colour(i), `${label(i)}at ${number(f[0])} the forecast of the end was ${rate(f[1])} (${rate(f[2])} to ${rate(f[3])})`];
      });
      return rows.length ? [`${number(x)} ${data.unit}`, rows] : null;
    };
    return {figure, layers, x: {log: false, label: axis, from: 0}, y: {clamp: [0, 1], label: data.reward}, read, height: 320};
  }

  // ---- training
  function trainingChart({title, metrics}) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    figure.dataset.chart = Object.keys(metrics)[0];
    document.getElementById("training").append(figure);
    const layers = [];
    data.runs.forEach((run, i) => Object.keys(metrics).forEach((m, k) => {
      if (run.series?.[m]) layers.push({run: i, line: run.steps.map((s, j) => [s, run.series[m][j]]), style: k ? "thin" : ""});
    }));
    const read = (x) => {
      const rows = [];
      for (const [run, i] of visible()) {
        if (!run.steps?.length) continue;
        const step = nearest(run.steps, x, (s) => s), j = run.steps.indexOf(step);
        const values = Object.entries(metrics).filter(([m]) => run.series[m]).map(([m, name]) => `${name} ${number(run.series[m][j])}`);
        if (values.length) rows.push([colour(i), label(i) + values.join(", ")]);
      }
      return rows.length ? [`step ${Math.round(x)}`, rows] : null;
    };
    return {figure, layers, x: {log: false}, y: {}, read, height: 150};
  }

  // ---- checkpoints evaluated after training
  function evaluationChart(name) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = name;
    figure.append(caption);
    document.getElementById("evaluations").append(figure);
    const layers = data.runs.flatMap((run, i) => run.evaluations?.[name] ? [
      {run: i, line: run.evaluations[name], style: "thin"},
      {run: i, points: measured({points: run.evaluations[name]})},
    ] : []);
    const read = (x) => {
      const rows = visible().filter(([run]) => run.evaluations?.[name]).map(([run, i]) => {
        const p = nearest(run.evaluations[name], x, (q) => q[0]);
        return [colour(i), `${label(i)}${rate(p[1])} ± ${rate(p[2])} at step ${p[3]}`];
      });
      return rows.length ? [`${number(x)} ${data.unit}`, rows] : null;
    };
    return {figure, layers, x: {log: false, label: axis, from: 0}, y: {clamp: [0, 1]}, read, height: 200};
  }

  // ---- what each role did over time
  function lanes(root) {
    const run = data.runs[Number(root.dataset.lanes)];
    const charts = (run.lanes ?? []).map((lane) => {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption");
      caption.textContent = `${lane.role}: what it did over wall time`;
      figure.append(caption);
      root.append(figure);
      return () => drawLane(figure, lane, run.wall_s);
    });
    return () => charts.forEach((f) => f());
  }

  function drawLane(figure, lane, wall) {
    figure.querySelector("svg")?.remove();
    const width = Math.max(130, figure.clientWidth - 18), a = {left: 8, right: width - 8, top: 4, bottom: 66};
    const svg = add(figure, "svg", {class: "chart", viewBox: `0 0 ${width} 86`, role: "img", "aria-label": figure.querySelector("figcaption").textContent});
    const states = Object.keys(lane.shares).sort((p, q) => (p === "idle") - (q === "idle"));
    const bins = lane.shares[states[0]].length, step = (a.right - a.left) / bins;
    const [every, unit] = wall > 2 * 3600 ? [3600, "h"] : wall > 180 ? [60, "min"] : [1, "s"];
    const base = new Array(bins).fill(0);
    for (const state of states) {
      let d = "";
      lane.shares[state].forEach((share, i) => {
        if (share <= 0) return;
        const y = a.bottom - (base[i] + share) * (a.bottom - a.top), h = share * (a.bottom - a.top);
        d += `M${(a.left + i * step).toFixed(2)} ${y.toFixed(2)}h${(step + .3).toFixed(2)}v${h.toFixed(2)}h${(-step - .3).toFixed(2)}z`;
        base[i] += share;
      });
      add(svg, "path", {d, "data-state": state}).style.fill = stateColour(state);
    }
    for (const [v, text] of linearTicks(0, wall / every, width / 80))
      add(svg, "text", {x: a.left + v * every / wall * (a.right - a.left), y: 81, "text-anchor": v ? "middle" : "start"}, v ? text : `0 ${unit}`);
    const place = {...a, unx: (px) => (px - a.left) / (a.right - a.left) * wall};
    const read = (t) => {
      const i = Math.min(bins - 1, Math.floor(t / wall * bins));
      const rows = states.filter((s) => lane.shares[s][i] > 0.005).map((s) => [stateColour(s), `${spaced(s)} ${(100 * lane.shares[s][i]).toFixed(0)}%`]);
      return [`${number(t / every)} ${unit}`, rows];
    };
    hover(svg, {read}, place, width);
  }

  // ---- all charts
  const figure = (name) => document.querySelector(`figure[data-chart="${name}"]`);
  const lasts = data.runs.map((run) => run.last).filter(known);
  const log = Math.max(...lasts) > 6 * Math.min(...lasts);  // runs of very different length
  const charts = [curveChart(figure("curves"), log)];
  for (const box of document.querySelectorAll("input[name=axis]")) {
    box.checked = (box.value === "log") === log;
    box.addEventListener("change", () => { charts[0] = curveChart(figure("curves"), box.value === "log"); draw(charts[0]); });
  }
  if (figure("forecast")) charts.push(forecastChart(figure("forecast")));
  if (figure("efficiency")) {
    charts.push(efficiencyChart(figure("efficiency")));
    figure("efficiency").closest("details").addEventListener("toggle", () => draw(charts.find((c) => c.figure === figure("efficiency"))));
  }
  if (document.getElementById("training")) charts.push(...data.training.map(trainingChart));
  if (document.getElementById("evaluations")) charts.push(...data.evaluations.map(evaluationChart));
  const laneCharts = [...document.querySelectorAll("[data-lanes]")].map(lanes);
  document.querySelectorAll("i[data-state]").forEach((i) => { i.style.background = stateColour(i.dataset.state); });

  function render() {
    leave();
    charts.forEach(draw);
    laneCharts.forEach((f) => f());
  }

  const boxes = [...document.querySelectorAll("#filter input")];
  function filter() {
    for (const box of boxes) for (const run of box.value.split(" ")) box.checked ? hidden.delete(Number(run)) : hidden.add(Number(run));
    document.querySelectorAll("[data-run]:not(svg *)").forEach((node) => { node.hidden = hidden.has(Number(node.dataset.run)); });
    render();
  }
  boxes.forEach((box) => box.addEventListener("change", filter));
  for (const [id, on] of [["all", true], ["none", false]])
    document.getElementById(id)?.addEventListener("click", () => { boxes.forEach((box) => { box.checked = on; }); filter(); });

  let opened = [];
  function paper(on) {  // all is open, and no chart is wider than A4 within its margins: text keeps its size
    if (on) opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((d) => { d.open = on; });
    widest = on ? 690 : Infinity;
    render();
  }
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  let drawn = 0;
  addEventListener("resize", () => { if (document.body.clientWidth !== drawn) { drawn = document.body.clientWidth; render(); } });
  drawn = document.body.clientWidth;
  render();
})();
