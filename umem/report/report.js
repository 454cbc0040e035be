"use strict";
(() => {
  const steps = JSON.parse(document.getElementById("data").textContent);
  // Another step is another load of the page, which has its number after the #.
  const chosen = Math.min(Math.max(0, parseInt(location.hash.slice(1), 10) || 0), steps.length - 1);
  const data = steps[chosen];
  const WHOLE = 1 << 20; // ticks of a step, as in page.py
  const byId = (id) => document.getElementById(id);

  // ---- Figures as text

  const bytes = (count) => {
    for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]])
      if (Math.abs(count) >= size) return `${shortened(count / size)} ${unit}`;
    return `${count} B`;
  };
  const shortened = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
  const time = (us) => {
    if (us >= 1e6) return `${shortened(us / 1e6)} s`;
    if (us >= 1e3) return `${shortened(us / 1e3)} ms`;
    return `${shortened(us)} µs`;
  };
  const ratio = (part, whole, form) => (whole ? form(part / whole) : "–");
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const at = (ticks) => ticks * data.us_per_tick;
  const count = (number) => number.toLocaleString("en");

  const element = (name, text, classes) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (classes) made.className = classes;
    return made;
  };

  // ---- Data as it is drawn: differences become sums

  const sums = (deltas) => {
    const values = new Float64Array(deltas.length);
    let sum = 0;
    for (let i = 0; i < deltas.length; ++i) values[i] = sum += deltas[i];
    return values;
  };
  const memory = {
    t: sums(data.memory.t),
    roles: data.memory.roles,
    series: data.memory.bytes.map(sums),
    alive: sums(data.memory.alive),
  };
  const pages = data.memory.page;
  const names = data.lanes[0].names;
  const lanes = {};
  for (const lane of data.lanes) {
    const begin = sums(lane.begin);
    const end = begin.map((value, i) => value + lane.length[i]);
    lanes[lane.name] = { ...lane, begin, end };
  }
  const stalls = lanes.stall;
  const rows = data.map.rows.map((row) => ({ ...row, at: sums(row.at) }));

  // The last index with values[index] <= wanted; -1: none.
  const before = (values, wanted) => {
    let low = -1, high = values.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] <= wanted) low = middle;
      else high = middle;
    }
    return low;
  };

  // ---- Colours: distinguishable in light and dark, also with most colour vision deficiencies

  const ROLES = {
    activation: ["#0072b2", "#4ba3e3"], param: ["#009e73", "#2cc298"], optimizer: ["#cc79a7", "#e59ac4"],
    grad: ["#d55e00", "#ff8142"], temp: ["#e69f00", "#f2b84b"], input: ["#56b4e9", "#9bdcff"],
    workspace: ["#8c6d31", "#c9a66b"], comm: ["#6a4fa3", "#b79ad9"], kv_cache: ["#7a8b00", "#c2d14a"],
  };
  const OTHERS = ["#8a929b", "#7d868f"];
  const LANES = { compute: ["#5b7083", "#8fa5b8"], stall: ["#c62828", "#ff6a5f"], in: ["#00806a", "#2cc298"],
                  out: ["#b86e00", "#f2b84b"], host: ["#6a4fa3", "#b79ad9"] };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const shade = () => (dark.matches ? 1 : 0);
  const colour = (role) => (ROLES[role] || OTHERS)[shade()];
  const laneColour = (name) => LANES[name][shade()];
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let theme;
  const readTheme = () => {
    theme = { back: variable("--back"), panel: variable("--panel"), line: variable("--line"),
              text: variable("--text"), soft: variable("--soft"), bad: variable("--bad") };
  };

  // ---- The view that all charts share

  const view = { begin: 0, end: WHOLE, cursor: null };
  const CLOSEST = 64; // ticks
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  let waiting = false;
  const counters = { draws: 0 };
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      charts.forEach((chart) => chart.draw());
      ++counters.draws;
    });
  };
  const show = (begin, end) => {
    const width = Math.min(WHOLE, Math.max(CLOSEST, end - begin));
    view.begin = Math.min(Math.max(0, begin), WHOLE - width);
    view.end = view.begin + width;
    redraw();
  };
  const zoom = (factor, around = (view.begin + view.end) / 2) =>
    show(around - (around - view.begin) * factor, around + (view.end - around) * factor);
  const pan = (share) => show(view.begin + share * (view.end - view.begin), view.end + share * (view.end - view.begin));
  const goToStall = (direction) => {
    const centre = view.cursor ?? (view.begin + view.end) / 2;
    let next = direction > 0 ? before(stalls.begin, centre) + 1 : before(stalls.begin, centre - 1e-9);
    if (direction < 0 && next >= 0 && stalls.end[next] >= centre) --next;
    if (next < 0 || next >= stalls.begin.length) return null;
    const middle = (stalls.begin[next] + stalls.end[next]) / 2;
    const width = Math.max(Math.min(view.end - view.begin, WHOLE / 8), 3 * (stalls.end[next] - stalls.begin[next]));
    view.cursor = middle;
    show(middle - width / 2, middle + width / 2);
    return next;
  };

  // ---- Charts

  class Chart {
    constructor(id, height, paint, describe) {
      this.canvas = byId(id);
      this.context = this.canvas.getContext("2d");
      this.heightOf = height;
      this.paint = paint;
      this.describe = describe;
    }
    get left() { return this.width < 600 ? 52 : 84; }
    x(ticks) { return this.left + ((ticks - view.begin) / (view.end - view.begin)) * (this.width - this.left - 8); }
    ticks(x) { return view.begin + ((x - this.left) / (this.width - this.left - 8)) * (view.end - view.begin); }
    resize() {
      this.width = this.canvas.parentElement.clientWidth;
      this.height = this.heightOf();
      const ratio = window.devicePixelRatio || 1;
      this.canvas.style.height = `${this.height}px`;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    draw() {
      const c = this.context;
      c.fillStyle = theme.panel;
      c.fillRect(0, 0, this.width, this.height);
      c.font = FONT;
      c.textBaseline = "middle";
      c.save();
      c.beginPath();
      c.rect(this.left, 0, this.width - this.left - 8, this.height - AXIS);
      c.clip();
      this.paint(c, this);
      if (view.cursor !== null) {
        c.fillStyle = theme.text;
        c.fillRect(this.x(view.cursor), 0, 1, this.height - AXIS);
      }
      c.restore();
      this.axis(c);
      if (this.side) this.side(c, this);
    }
    axis(c) {
      const span = at(view.end) - at(view.begin), wanted = span / Math.max(2, (this.width - this.left) / 110);
      const power = 10 ** Math.floor(Math.log10(wanted));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= wanted);
      const unit = step >= 1e5 ? [1e6, "s"] : step >= 100 ? [1e3, "ms"] : [1, "µs"];
      const digits = Math.max(0, Math.ceil(-Math.log10(step / unit[0]) - 1e-9));
      c.fillStyle = theme.soft;
      c.strokeStyle = theme.line;
      c.textAlign = "center";
      for (let us = Math.ceil(at(view.begin) / step) * step; us <= at(view.end); us += step) {
        const x = this.x(us / data.us_per_tick);
        c.fillRect(x, this.height - AXIS, 1, 4);
        const text = `${(us / unit[0]).toFixed(digits)} ${unit[1]}`, half = c.measureText(text).width / 2;
        if (x - half > this.left - 30 && x + half < this.width) c.fillText(text, x, this.height - AXIS / 2 + 2);
      }
    }
  }
  const AXIS = 22;

  // Memory: areas on top of each other, the budget, and what the program has alive.
  const topOfMemory = (() => {
    let top = data.budget / pages;
    for (let i = 0; i < memory.t.length; ++i) top = Math.max(top, memory.alive[i]);
    return top * 1.06;
  })();
  const stacked = (() => {
    const below = new Float64Array(memory.t.length);
    return memory.series.map((series) => {
      for (let i = 0; i < below.length; ++i) below[i] += series[i];
      return Float64Array.from(below);
    });
  })();
  const memoryY = (chart, value) => (chart.height - AXIS) * (1 - value / topOfMemory);
  const visible = (values) => [Math.max(0, before(values, view.begin)), Math.min(values.length - 1, before(values, view.end) + 1)];
  const staircase = (c, chart, values, from, to) => {
    for (let i = from; i <= to; ++i) {
      const x = chart.x(memory.t[i]), next = i + 1 < memory.t.length ? chart.x(memory.t[i + 1]) : chart.x(WHOLE);
      const y = memoryY(chart, values[i]);
      c.lineTo(x, y);
      c.lineTo(next, y);
    }
  };
  const paintMemory = (c, chart) => {
    if (!memory.t.length) return;
    const [from, to] = visible(memory.t), bottom = chart.height - AXIS;
    for (let k = stacked.length - 1; k >= 0; --k) {
      c.fillStyle = colour(memory.roles[k]);
      c.beginPath();
      c.moveTo(chart.x(memory.t[from]), bottom);
      staircase(c, chart, stacked[k], from, to);
      c.lineTo(chart.x(to + 1 < memory.t.length ? memory.t[to + 1] : WHOLE), bottom);
      c.fill();
    }
    c.lineWidth = 1.5;
    c.strokeStyle = theme.text;
    c.setLineDash([2, 3]);
    c.beginPath();
    staircase(c, chart, memory.alive, from, to);
    c.stroke();
    c.lineWidth = 2;
    c.strokeStyle = theme.bad;
    c.setLineDash([8, 4]);
    c.beginPath();
    c.moveTo(chart.left, memoryY(chart, data.budget / pages));
    c.lineTo(chart.width, memoryY(chart, data.budget / pages));
    c.stroke();
    c.setLineDash([]);
  };
  const describeMemory = (ticks) => {
    const i = before(memory.t, ticks);
    if (i < 0) return "";
    const parts = memory.roles.map((role, k) => [role, memory.series[k][i]]).filter(([, value]) => value > 0);
    parts.sort((a, b) => b[1] - a[1]);
    const total = parts.reduce((sum, [, value]) => sum + value, 0);
    return [
      `at ${time(at(ticks))}: ${bytes(total * pages)} on the device`,
      `budget ${bytes(data.budget)}, alive ${bytes(memory.alive[i] * pages)}`,
      ...parts.map(([role, value]) => `${role}: ${bytes(value * pages)}`),
    ].join("\n");
  };

  // Lanes: compute with its stalls, both directions of the link, and the host.
  const laneRows = ["compute", "in", "out", ...(lanes.host.begin.length ? ["host"] : [])];
  const LANE = 30;
  const TITLES = { compute: "compute", in: "to device", out: "to host", host: "host" };
  const paintSegments = (c, chart, lane, y, height) => {
    let drawn = -1;
    const first = Math.max(0, before(lane.end, view.begin));
    for (let i = first; i < lane.begin.length && lane.begin[i] < view.end; ++i) {
      const x = chart.x(lane.begin[i]), end = Math.max(chart.x(lane.end[i]), x + 0.75);
      if (end <= drawn) continue;
      c.fillRect(x, y, end - x - (end - x > 4 ? 0.75 : 0), height);
      drawn = end;
    }
  };
  const paintLanes = (c, chart) => {
    laneRows.forEach((name, k) => {
      c.fillStyle = laneColour(name);
      paintSegments(c, chart, lanes[name], k * LANE + 10, LANE - 14);
    });
    c.fillStyle = laneColour("stall");
    paintSegments(c, chart, stalls, 10, LANE - 14);
    // A mark over each stall: colour must not be its only sign.
    let drawn = -9;
    const first = Math.max(0, before(stalls.end, view.begin));
    for (let i = first; i < stalls.begin.length && stalls.begin[i] < view.end; ++i) {
      const x = chart.x((stalls.begin[i] + stalls.end[i]) / 2);
      if (x - drawn < 7) continue;
      drawn = x;
      c.beginPath();
      c.moveTo(x - 4, 1);
      c.lineTo(x + 4, 1);
      c.lineTo(x, 8);
      c.fill();
    }
  };
  const inside = (lane, ticks) => {
    const i = before(lane.begin, ticks), slack = (view.end - view.begin) / 300;
    for (const candidate of [i, i + 1])
      if (candidate >= 0 && candidate < lane.begin.length &&
          ticks >= lane.begin[candidate] - slack && ticks <= lane.end[candidate] + slack) return candidate;
    return -1;
  };
  const describeSegment = (name, i) => {
    const lane = lanes[name], took = time(at(lane.end[i] - lane.begin[i])), parts = lane.parts[i];
    const more = parts > 1 ? `${count(parts)} ${name === "compute" ? "operators" : name === "stall" ? "stalls" : "transfers"}, mostly ` : "";
    const what = `${more}${names[lane.of[i]] || "no name"}`;
    if (name === "compute") return `${what}\n${took}, from ${time(at(lane.begin[i]))}`;
    if (name === "stall") return `stall: ${what}\n${took}, from ${time(at(lane.begin[i]))}`;
    const verb = { in: "to the device", out: "to the host", host: "host works on" }[name];
    return `${verb}: ${what}\n${bytes(lane.amount[i])} in ${took}, from ${time(at(lane.begin[i]))}`;
  };
  const describeLanes = (ticks, y) => {
    const name = laneRows[Math.floor(y / LANE)];
    if (!name) return "";
    if (name === "compute") {
      const stall = inside(stalls, ticks);
      if (stall >= 0) return describeSegment("stall", stall);
    }
    const i = inside(lanes[name], ticks);
    return i < 0 ? `${TITLES[name]}: idle at ${time(at(ticks))}` : describeSegment(name, i);
  };

  // The map: a line for each tensor, in full colour where it is on the device.
  const rowHeight = () => Math.max(3, Math.min(14, Math.floor(720 / Math.max(rows.length, 1))));
  const levelAt = (row, ticks) => {
    if (ticks < row.life[0] || ticks > row.life[1]) return -1;
    const i = before(row.at, ticks);
    return i < 0 ? 0 : row.level[i];
  };
  const paintMap = (c, chart) => {
    const height = rowHeight(), gap = height > 4 ? 1 : 0;
    rows.forEach((row, k) => {
      const [birth, death] = row.life;
      if (death < view.begin || birth > view.end) return;
      const y = k * height;
      c.globalAlpha = 1;
      c.fillStyle = theme.line;
      c.fillRect(chart.x(birth), y, Math.max(chart.x(death) - chart.x(birth), 0.75), height - gap);
      c.fillStyle = colour(row.role);
      let i = Math.max(0, before(row.at, view.begin));
      for (; i < row.at.length && row.at[i] < view.end; ++i) {
        if (!row.level[i]) continue;
        const x = chart.x(row.at[i]), end = chart.x(i + 1 < row.at.length ? row.at[i + 1] : death);
        c.globalAlpha = 0.35 + (0.65 * row.level[i]) / data.map.levels;
        c.fillRect(x, y, Math.max(end - x, 0.75), height - gap);
      }
    });
    c.globalAlpha = 1;
  };
  const describeMap = (ticks, y) => {
    const row = rows[Math.floor(y / rowHeight())];
    if (!row) return "";
    const level = levelAt(row, ticks);
    const where = level < 0 ? "not alive" : level === 0 ? "on the host" :
      level === data.map.levels ? "on the device" : `about ${percent(level / data.map.levels)} on the device`;
    return [
      `${row.role}: ${row.name}`, `${bytes(row.bytes)}, ${where} at ${time(at(ticks))}`,
      `moved in ${bytes(row.in)}, out ${bytes(row.out)} in the step`,
    ].join("\n");
  };

  const charts = [
    new Chart("memory", () => 240, paintMemory, describeMemory),
    new Chart("lanes", () => laneRows.length * LANE + AXIS + 4, paintLanes, describeLanes),
    new Chart("map", () => Math.max(rows.length, 1) * rowHeight() + AXIS, paintMap, describeMap),
  ];
  const [memoryChart, lanesChart, mapChart] = charts;
  memoryChart.side = (c, chart) => {
    c.textAlign = "right";
    c.fillStyle = theme.soft;
    const gib = topOfMemory * pages, power = 2 ** Math.floor(Math.log2(gib / 4));
    for (let value = 0; value <= gib; value += power) {
      const y = memoryY(chart, value / pages);
      if (y > 6) c.fillText(bytes(value).replace(/\.0+ /, " ").replace(/(\.\d)0 /, "$1 "), chart.left - 6, Math.min(y, chart.height - AXIS - 6));
    }
  };
  lanesChart.side = (c, chart) => {
    c.textAlign = "right";
    c.fillStyle = theme.text;
    const narrow = { compute: "comp.", in: "in", out: "out", host: "host" };
    laneRows.forEach((name, k) =>
      c.fillText((chart.width < 600 ? narrow : TITLES)[name], chart.left - 8, k * LANE + 3 + LANE / 2));
  };
  mapChart.side = (c, chart) => {
    c.textAlign = "right";
    c.fillStyle = theme.soft;
    let begin = 0;
    for (let k = 1; k <= rows.length; ++k) {
      if (k < rows.length && rows[k].role === rows[begin].role) continue;
      const room = (k - begin) * rowHeight();
      if (room >= 13) c.fillText(rows[begin].role.slice(0, chart.width < 600 ? 7 : 12), chart.left - 6, begin * rowHeight() + room / 2);
      begin = k;
    }
  };

  // ---- Pointer and keyboard

  const tip = byId("tip");
  const hideTip = () => { tip.hidden = true; };
  const showTip = (text, x, y) => {
    if (!text) return hideTip();
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    tip.style.left = `${Math.max(8, Math.min(x + 14, room - box.width - 8))}px`;
    const above = y - box.height - 12;
    tip.style.top = `${above > 4 ? above : y + 18}px`;
  };
  const tipAt = (chart, x, y) => {
    const box = chart.canvas.getBoundingClientRect();
    const inChart = x - box.left >= chart.left && y - box.top < chart.height - AXIS;
    showTip(inChart ? chart.describe(chart.ticks(x - box.left), y - box.top) : "", x, y);
  };
  charts.forEach((chart) => {
    const { canvas } = chart, held = new Map();
    const ticksAt = (x) => chart.ticks(x - canvas.getBoundingClientRect().left);
    canvas.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      if (event.pointerType === "touch") tipAt(chart, event.clientX, event.clientY);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held.has(event.pointerId)) return tipAt(chart, event.clientX, event.clientY);
      const was = [...held.values()];
      held.set(event.pointerId, event.clientX);
      const now = [...held.values()];
      if (held.size === 1) {
        const moved = ticksAt(was[0]) - ticksAt(now[0]);
        if (Math.abs(was[0] - now[0]) > 0) { hideTip(); show(view.begin + moved, view.end + moved); }
      } else if (held.size === 2) {
        const apart = (two) => Math.max(10, Math.abs(two[0] - two[1]));
        hideTip();
        zoom(apart(was) / apart(now), ticksAt((now[0] + now[1]) / 2));
      }
    });
    const release = (event) => held.delete(event.pointerId);
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => zoom(0.5, ticksAt(event.clientX)));
    canvas.addEventListener("wheel", (event) => {
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan(event.deltaX / chart.width);
      } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
        event.preventDefault();
        zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY / 300))), ticksAt(event.clientX));
      }
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const box = canvas.getBoundingClientRect();
      const say = (text) => {
        byId("spoken").textContent = text;
        showTip(text, box.left + chart.x(view.cursor), box.top + 20);
      };
      const moveCursor = (direction) => {
        const width = view.end - view.begin;
        const from = view.cursor === null || view.cursor < view.begin || view.cursor > view.end
          ? (view.begin + view.end) / 2 : view.cursor;
        view.cursor = Math.min(WHOLE, Math.max(0, from + (direction * width) / 100));
        if (view.cursor < view.begin || view.cursor > view.end) pan(direction / 2);
        redraw();
        say(chart === mapChart ? describeMemory(view.cursor) : chart.describe(view.cursor, 15));
      };
      const stall = (direction) => {
        const found = goToStall(direction);
        if (found !== null) say(describeSegment("stall", found));
      };
      const actions = {
        ArrowLeft: () => (event.shiftKey ? moveCursor(-1) : pan(-0.2)),
        ArrowRight: () => (event.shiftKey ? moveCursor(1) : pan(0.2)),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => show(0, WHOLE),
        Home: () => show(0, view.end - view.begin), End: () => show(WHOLE, WHOLE + view.end - view.begin),
        n: () => stall(1), p: () => stall(-1),
        Escape: () => { view.cursor = null; hideTip(); redraw(); },
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      hideTip();
      actions[event.key]();
    });
    canvas.addEventListener("blur", hideTip);
  });
  byId("zoom-in").onclick = () => zoom(0.5);
  byId("zoom-out").onclick = () => zoom(2);
  byId("whole").onclick = () => show(0, WHOLE);
  byId("next-stall").onclick = () => {
    const found = goToStall(1) ?? ((view.cursor = -1), goToStall(1));
    if (found !== null) byId("spoken").textContent = describeSegment("stall", found);
  };
  byId("next-stall").disabled = !stalls.begin.length;

  // ---- Texts and tables

  const legend = (id, entries) => {
    byId(id).replaceChildren(...entries.map(([text, fill, classes]) => {
      const row = element("li"), box = element("i", undefined, classes);
      if (classes) box.style.borderColor = fill;
      else box.style.background = fill;
      row.append(box, text);
      return row;
    }));
  };
  const legends = () => {
    legend("memory-legend", [
      ...memory.roles.map((role) => [role, colour(role)]),
      [`budget, ${bytes(data.budget)}`, theme.bad, "rule dashed"],
      ["alive in the program", theme.text, "rule dashed"],
    ]);
    const titles = { compute: "compute", stall: "stall ▾", in: "to the device", out: "to the host", host: "the host's work" };
    legend("lanes-legend", ["compute", "stall", ...laneRows.slice(1)].map((name) => [titles[name], laneColour(name)]));
    const shown = [...new Set(rows.map((row) => row.role))];
    legend("map-legend", [...shown.map((role) => [`${role}, on the device`, colour(role)]), ["alive, on the host", theme.line]]);
  };
  const table = (id, heads, lines, empty) => {
    if (!lines.length) return byId(id).replaceChildren(element("p", empty, "hint"));
    const made = element("table"), top = element("tr");
    heads.forEach(([title, classes]) => top.append(element("th", title, classes)));
    const head = element("thead"), body = element("tbody");
    head.append(top);
    lines.forEach(({ cells, shown }) => {
      const row = element("tr", undefined, shown ? "shown" : "");
      cells.forEach((cell, k) => {
        const made = element("td", undefined, heads[k][1]);
        made.append(cell);
        row.append(made);
      });
      body.append(row);
    });
    made.append(head, body);
    byId(id).replaceChildren(made);
  };
  const share = (part, whole, classes) => {
    const bar = element("span", "", `share ${classes || ""}`);
    bar.style.width = `${whole ? Math.max(1, (120 * part) / whole) : 1}px`;
    return bar;
  };
  const texts = () => {
    byId("title").textContent = data.title;
    const select = byId("steps");
    byId("steps-label").hidden = steps.length < 2;
    select.replaceChildren(...steps.map((step, k) => new Option(step.title, k, k === chosen, k === chosen)));
    select.onchange = () => {
      location.hash = select.value;
      location.reload();
    };
    byId("about").textContent =
      `Policy ${data.policy} on ${data.device} with ${bytes(data.budget)} of device memory; the step's tensors peak at ${bytes(data.peak)}. ` +
      `${count(data.ops)} operators, ${count(data.tensors)} tensors, replayed in virtual time.`;
    const figures = [
      ["Step", time(data.step_us), ratio(data.step_us, data.floor_us, (times) => `${shortened(times)} × the lower bound`)],
      ["Compute", time(data.compute_us), ratio(data.compute_us, data.step_us, percent)],
      ["Stall", time(data.stall_us), ratio(data.stall_us, data.step_us, percent)],
      ["Lower bound", time(data.floor_us), "no schedule of moves is faster"],
      ["To the device", bytes(data.bytes_in), `at least ${bytes(data.bound_bytes_in)}`],
      ["To the host", bytes(data.bytes_out), ""],
    ];
    if (data.host_us) figures.push(["The host's work", time(data.host_us), "updates of parameters"]);
    byId("figures").replaceChildren(...figures.map(([name, value, more]) => {
      const box = element("div", undefined, "figure");
      box.append(element("div", name, "name"), element("div", value, "value"), element("div", more, "more"));
      return box;
    }));
    byId("findings").replaceChildren(...data.findings.map((finding) => {
      const row = element("li", finding.text);
      if (finding.setting) {
        const tried = element("span", "Try ", "try");
        tried.append(element("code", finding.setting));
        if (finding.step_us !== null) {
          const gain = 1 - finding.step_us / data.step_us;
          tried.append(`: replayed, the step takes ${time(finding.step_us)}`);
          if (gain > 0.001) tried.append(", ", element("span", `${percent(gain)} less`, "gain"));
        }
        row.append(tried);
      }
      return row;
    }));
    const total = data.waits.reduce((sum, wait) => sum + wait.us, 0);
    table("waits", [["Cause", "text"], ["Tensors", "text"], ["Time"], ["Share"], ["", "text"]],
      data.waits.slice(0, 12).map((wait) => ({
        cells: [wait.why, wait.what || "–", time(wait.us), percent(wait.us / total), share(wait.us, total)] })),
      "No operator waited.");
    const most = Math.max(...data.causes.map((cause) => cause.bytes), 1);
    table("causes", [["Cause", "text"], ["Bytes"], ["", "text"], ["Meaning", "text"], ["Roles", "text long"]],
      data.causes.map((cause) => ({ cells: [
        cause.name, bytes(cause.bytes), share(cause.bytes, most, cause.moved ? "" : "still"), cause.meaning,
        Object.entries(cause.by_role).slice(0, 4).map(([role, size]) => `${role} ${bytes(size)}`).join(", ") || "–"] })));
    table("policies", [["Policy", "text"], ["Step"], ["/ lower bound"], ["Stall"], ["In"], ["Out"], ["Unused"], ["Faults"]],
      data.policies.map((row) => ({ shown: row.policy === data.policy, cells: [
        row.policy, time(row.step_us), ratio(row.step_us, data.floor_us, shortened), time(row.stall_us), bytes(row.bytes_in),
        bytes(row.bytes_out), bytes(row.unused), count(row.faults)] })));
    table("top", [["Tensor: module and source line", "text long"], ["Role", "text"], ["Made by", "text"], ["Size"], ["In"], ["Out"], ["Stall"], ["Alive, operators"]],
      data.top.map((row) => ({ cells: [
        row.origin === "not recorded" ? `block ${row.block}: not recorded` : row.origin, row.role, row.family || "–", bytes(row.bytes),
        bytes(row.in), bytes(row.out), row.stall_us ? time(row.stall_us) : "–", `${row.first} to ${row.last}`] })),
      "The step has no tensor of 2 MiB or more.");
    byId("map-about").textContent = rows.length
      ? `${rows.length} tensors of 2 MiB and more, those that move the most or are the largest` +
        (data.map.left_out ? `; ${count(data.map.left_out)} more are not drawn.` : ".")
      : "The step has no tensor of 2 MiB or more.";
    byId("measured-section").hidden = !data.measured.length;
    if (data.measured.length)
      table("measured", data.measured[0].map((head, k) => [head, k < 3 ? "text" : ""]),
        data.measured.slice(1).map((cells) => ({ cells })));
    byId("notes-section").hidden = !data.notes.length;
    byId("notes").replaceChildren(...data.notes.map((note) => element("li", note)));
    byId("footer").textContent = `Written by umem ${data.umem}. Times are virtual, as the device profile has them; how to read this page: docs/report.md.`;
  };

  // ---- Start

  const refresh = () => {
    readTheme();
    legends();
    charts.forEach((chart) => chart.resize());
    charts.forEach((chart) => chart.draw());
    ++counters.draws;
  };
  texts();
  refresh();
  dark.addEventListener("change", refresh);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar appears and disappears
    width = window.innerWidth;
    refresh();
  });
  // For tests and measurements.
  window.umemReport = { data, view, show, zoom, counters };
})();
