// Draws the charts of a page: lines, bands, bars and marks, with values under the pointer, a legend that hides lines, and zoom.
// Names and titles come from users: they are only ever set as textContent, never as HTML.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { top: 8, right: 14, bottom: 40, left: 66 };
  const DASHES = { dash: "6 4", dot: "2 3" };
  const FAINT = 0.25; // opacity of a line under its running mean
  const FEWEST_SMOOTHED = 20; // points of a line that has a running mean
  const REACH = 60; // pixels from the pointer to the furthest point whose value is shown

  function element(parent, name, attributes = {}, text = "") {
    const made = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== "") made.textContent = text;
    parent.append(made);
    return made;
  }

  const drawing = (parent, attributes) => parent.appendChild(
    Object.entries(attributes).reduce((svg, [key, value]) => (svg.setAttribute(key, value), svg),
      document.createElementNS(SVG, "svg")));

  function format(value, digits = 6) {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) {
      return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
    }
    return String(Number(value.toPrecision(digits)));
  }

  function linearTicks(low, high, wanted) {
    const rough = (high - low) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9); place <= high / step + 1e-9; place++) {
      found.push(place * step);
    }
    return found;
  }

  function logTicks(low, high, wanted) {
    const decades = Math.log10(high) - Math.log10(low); // the quotient may be infinite
    const factors = decades > 2 ? [1] : decades > 1 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 8];
    const every = Math.max(1, Math.ceil(decades / wanted));
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % every) continue;
      found.push(...factors.map((factor) => factor * 10 ** power));
    }
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return inside.length > 1 ? inside : linearTicks(low, high, wanted).filter((tick) => tick > 0);
  }

  // From values to pixels, and back.
  function scale(values, log, from, to, { zero = false, fixed = null, margin = 0.05 } = {}) {
    const usable = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
    const turn = log ? Math.log10 : (value) => value;
    const back = log ? (value) => 10 ** value : (value) => value;
    let low = Infinity;
    let high = -Infinity;
    for (const value of usable) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
    if (zero && !log) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    if (fixed) [low, high] = fixed;
    let [start, end] = [turn(low), turn(high)];
    if (start === end) {
      const pad = log ? 0.5 : Math.abs(start) * 0.1 || 1;
      [start, end] = [zero && low === 0 ? start : start - pad, end + pad];
    } else if (!fixed) {
      const pad = (end - start) * margin;
      [start, end] = [zero && low === 0 ? start : start - pad, end + pad];
    }
    return {
      low: back(start), high: back(end),
      at: (value) => from + ((turn(value) - start) / (end - start)) * (to - from),
      value: (pixel) => back(start + ((pixel - from) / (to - from)) * (end - start)),
      shows: (value) => Number.isFinite(value) && (!log || value > 0),
      ticks: (wanted) => (log ? logTicks : linearTicks)(back(start), back(end), wanted),
    };
  }

  const isNumber = (value) => value !== null && value !== undefined;

  // What of a line lies in the zoomed range, with a neighbour on each side, so that it leaves the picture.
  // A logarithmic axis has no place for what is not above 0.
  function visible(line, zoom, log) {
    const places = line.x.map((_, place) => place).filter((place) => !log || line.x[place] > 0);
    if (!zoom) return places;
    const inside = (place) => place >= 0 && place < line.x.length && line.x[place] >= zoom[0] && line.x[place] <= zoom[1];
    return places.filter((place) => inside(place) || inside(place - 1) || inside(place + 1));
  }

  function pathOf(line, places, x, y) {
    let path = "";
    let pen = "M";
    for (const place of places) {
      if (!isNumber(line.y[place]) || !y.shows(line.y[place])) {
        pen = "M";
        continue;
      }
      path += `${pen}${x.at(line.x[place]).toFixed(1)},${y.at(line.y[place]).toFixed(1)}`;
      pen = "L";
    }
    return path;
  }

  function bandOf(line, places, x, y) {
    const known = places.filter((place) => isNumber(line.low[place]) && y.shows(line.low[place]));
    const point = (values) => (place) => `${x.at(line.x[place]).toFixed(1)},${y.at(values[place]).toFixed(1)}`;
    if (known.length < 2) return "";
    return `M${[...known.map(point(line.high)), ...known.reverse().map(point(line.low))].join("L")}Z`;
  }

  function starOf(x, y, size) {
    const corner = (place) => {
      const [angle, reach] = [(Math.PI * place) / 5, place % 2 ? size * 0.45 : size];
      return `${(x + reach * Math.sin(angle)).toFixed(1)},${(y - reach * Math.cos(angle)).toFixed(1)}`;
    };
    return `M${[...Array(10).keys()].map(corner).join("L")}Z`;
  }

  function drawAxes(svg, panel, x, y, size) {
    const { left, top, right, bottom } = size;
    const label = (tick, ticks, labels) => (labels ? labels[ticks.indexOf(tick)] : format(tick, 4));
    const given = (ticks, axis) => ticks && ticks.filter((tick) => tick >= axis.low && tick <= axis.high);
    for (const tick of given(panel.yticks, y) || y.ticks(Math.max(3, Math.floor((bottom - top) / 45)))) {
      element(svg, "line", { x1: left, x2: right, y1: y.at(tick), y2: y.at(tick), class: "grid" });
      element(svg, "text", { x: left - 6, y: y.at(tick) + 4, "text-anchor": "end" }, label(tick, panel.yticks, panel.ylabels));
    }
    for (const tick of given(panel.xticks, x) || x.ticks(Math.max(2, Math.floor((right - left) / 65)))) {
      element(svg, "line", { x1: x.at(tick), x2: x.at(tick), y1: top, y2: bottom, class: "grid" });
      element(svg, "text", { x: x.at(tick), y: bottom + 16, "text-anchor": "middle" }, label(tick, panel.xticks, panel.xlabels));
    }
    element(svg, "path", { d: `M${left},${top}V${bottom}H${right}`, class: "axis" });
    element(svg, "text", { x: (left + right) / 2, y: bottom + 33, "text-anchor": "middle" }, panel.x);
    const middle = (top + bottom) / 2;
    const turned = { x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` };
    element(svg, "text", turned, panel.y);
  }

  const baseOf = (line, place) => (line.base ? line.base[place] : 0);

  // Bars that end at the values; a logarithmic axis has no place for their base, and they begin at its end.
  function drawBars(svg, line, places, x, y, bottom) {
    for (const place of places) {
      if (!isNumber(line.y[place]) || !y.shows(line.y[place])) continue;
      const [left, right] = [-0.5, 0.5].map((side) => x.at(line.x[place] + side * line.bar));
      const base = baseOf(line, place);
      const ends = [y.at(line.y[place]), y.shows(base) ? y.at(base) : bottom];
      const [above, below] = [Math.min(...ends), Math.max(...ends)];
      element(svg, "rect", { x: left, width: right - left, y: above, height: below - above, fill: line.color, opacity: line.opacity });
      if (!line.low || ![line.low[place], line.high[place]].every((end) => isNumber(end) && y.shows(end))) continue;
      const [middle, low, high] = [(left + right) / 2, y.at(line.low[place]), y.at(line.high[place])];
      element(svg, "path", { d: `M${middle - 4},${low}h8M${middle},${low}V${high}M${middle - 4},${high}h8`, class: "whisker" });
    }
  }

  function drawLine(svg, line, places, x, y, bottom) {
    if (line.bar) {
      drawBars(svg, line, places, x, y, bottom);
      return;
    }
    const look = { stroke: line.color, "stroke-width": line.width, opacity: line.opacity, fill: "none" };
    if (line.low) element(svg, "path", { d: bandOf(line, places, x, y), fill: line.color, opacity: 0.18 });
    if (line.joined) {
      const dashes = DASHES[line.dash] ? { "stroke-dasharray": DASHES[line.dash] } : {};
      element(svg, "path", { d: pathOf(line, places, x, y), "stroke-linejoin": "round", ...look, ...dashes });
    }
    const marked = line.mark || places.length === 1 ? places : [];
    for (const place of marked) {
      if (!isNumber(line.y[place]) || !y.shows(line.y[place])) continue;
      const [cx, cy] = [x.at(line.x[place]), y.at(line.y[place])];
      if (line.mark === "star") element(svg, "path", { d: starOf(cx, cy, 10), fill: line.color });
      else element(svg, "circle", { cx, cy, r: 4, fill: line.color });
    }
    for (const flag of line.flags || []) {
      if (!(flag.x >= x.low && flag.x <= x.high)) continue;
      const at = x.at(flag.x);
      const mark = element(svg, "path", { d: `M${at - 5},${bottom}h10l-5,-9Z`, fill: line.color, class: "flag" });
      element(mark, "title", {}, `${line.name}: ${flag.text}`);
    }
  }

  // The running mean of a line, in which its first values weigh as much as the later ones.
  function smoothed(line, weight) {
    let [mean, total] = [0, 0];
    return { ...line, low: null, high: null, flags: [], y: line.y.map((value) => {
      if (!isNumber(value)) return value;
      [mean, total] = [weight * mean + (1 - weight) * value, weight * total + 1 - weight];
      return mean / total;
    }) };
  }

  function nearest(line, value, x) {
    let best = -1;
    let gap = Math.max(REACH, line.bar ? (x.at(line.bar) - x.at(0)) / 2 : 0);
    line.x.forEach((at, place) => {
      const away = Math.abs(x.at(at) - x.at(value));
      if (isNumber(line.y[place]) && away < gap) [best, gap] = [place, away];
    });
    return best;
  }

  // The one point under the pointer, where many lines or points have the same place on the axis.
  function showPoint(view, lines, pixel, height) {
    const { x, y, hover, box, panel } = view;
    let found = null;
    let gap = REACH / 2;
    for (const line of lines.filter((one) => one.hover)) {
      line.x.forEach((at, place) => {
        if (!isNumber(line.y[place]) || !x.shows(at) || !y.shows(line.y[place])) return;
        const away = Math.hypot(x.at(at) - pixel, y.at(line.y[place]) - height);
        if (away < gap) [found, gap] = [[line, place], away];
      });
    }
    box.hidden = found === null;
    if (box.hidden) return;
    const [line, place] = found;
    element(hover, "path", { d: pathOf(line, line.x.map((_, at) => at), x, y), stroke: line.color, "stroke-width": line.joined ? line.width + 2 : 0, fill: "none" });
    element(hover, "circle", { cx: x.at(line.x[place]), cy: y.at(line.y[place]), r: 5, fill: line.color });
    element(box, "b", {}, line.name);
    const plain = `${panel.x} ${format(line.x[place])}, ${panel.y} ${format(line.y[place])}`;
    for (const row of (line.text ? line.text[place] : plain).split("\n")) element(box, "div", {}, row);
  }

  // A place on the horizontal axis in words: the nearest of its labels, if it has such.
  function nameOf(panel, at) {
    if (!panel.xlabels || !panel.xlabels.length) return `${panel.x} ${format(at)}`;
    const away = panel.xticks.map((tick) => Math.abs(tick - at));
    return panel.xlabels[away.indexOf(Math.min(...away))];
  }

  // The values under the pointer: a dot on each line, and a box beside it.
  function showValues(view, lines, pixel, height) {
    const { x, y, hover, box, panel } = view;
    hover.replaceChildren();
    box.replaceChildren();
    const beside = pixel > view.width / 2 ? { right: `${view.width - pixel + 14}px`, left: "auto" } : { left: `${pixel + 14}px`, right: "auto" };
    Object.assign(box.style, beside);
    if (panel.nearest) {
      showPoint(view, lines, pixel, height);
      return;
    }
    const value = x.value(pixel);
    const found = lines.map((line) => [line, line.hover ? nearest(line, value, x) : -1]).filter(([, place]) => place >= 0);
    box.hidden = found.length === 0;
    if (box.hidden) return;
    const flagged = (line) => (line.flags || []).filter((flag) => Math.abs(x.at(flag.x) - pixel) < 6);
    const [first, start] = found[0];
    element(hover, "line", { x1: x.at(first.x[start]), x2: x.at(first.x[start]), y1: view.top, y2: view.bottom, class: "cursor" });
    element(box, "b", {}, nameOf(panel, first.x[start]));
    for (const [line, place] of found) {
      if (!line.bar && y.shows(line.y[place])) element(hover, "circle", { cx: x.at(line.x[place]), cy: y.at(line.y[place]), r: 3.5, fill: line.color });
      const row = element(box, "div");
      element(row, "i", { style: `background:${line.color}` });
      const spread = line.low && line.low[place] !== line.high[place] ? ` (${format(line.low[place], 4)} to ${format(line.high[place], 4)})` : "";
      const where = line.bar || line.x[place] === first.x[start] ? "" : ` at ${format(line.x[place])}`;
      const more = line.text ? `  ${line.text[place]}` : "";
      element(row, "span", {}, `${line.name}: ${format(line.bar ? line.y[place] - baseOf(line, place) : line.y[place])}${spread}${where}${more}`);
      for (const flag of flagged(line)) element(box, "div", {}, `${line.name}: ${flag.text}`);
    }
  }

  function drawPanel(place, panel, state, redraw) {
    const lines = panel.lines.filter((line) => !state.hidden.has(line.group));
    const width = place.clientWidth;
    const height = panel.height;
    const longest = Math.max(0, ...(panel.ylabels || []).map((label) => label.length));
    const left = Math.max(MARGIN.left, Math.min(width * 0.4, 28 + 6.5 * longest));
    const size = { left, top: MARGIN.top, right: width - MARGIN.right, bottom: height - MARGIN.bottom };
    const shared = panel.alone ? panel : state;
    const zoom = state.zooms.get(shared) || null;
    const shown = lines.map((line) => [line, visible(line, zoom, panel.xlog)]);
    const x = scale(zoom || state.ends(panel), panel.xlog, size.left, size.right, { fixed: zoom || panel.xrange, margin: 0.02 });
    const heights = shown.flatMap(([line, places]) => places.flatMap((at) => [line.y[at], ...(line.base ? [line.base[at]] : []), ...(line.low ? [line.low[at], line.high[at]] : [])]));
    const y = scale(heights.filter(isNumber), panel.ylog, size.bottom, size.top, { zero: panel.zero, fixed: panel.ylog ? null : panel.yrange });
    place.replaceChildren();
    const svg = drawing(place, { width, height, role: "img", "aria-label": panel.title });
    const clip = element(element(svg, "clipPath", { id: state.name(panel) }), "rect");
    const frame = { x: size.left, y: size.top, width: size.right - size.left, height: size.bottom - size.top };
    for (const [key, value] of Object.entries(frame)) clip.setAttribute(key, value);
    drawAxes(svg, panel, x, y, size);
    const inside = element(svg, "g", { "clip-path": `url(#${state.name(panel)})` });
    for (const [line, places] of shown) {
      const smooths = state.smooth && line.x.length >= FEWEST_SMOOTHED;
      drawLine(inside, smooths ? { ...line, opacity: FAINT } : line, places, x, y, size.bottom);
      if (smooths) drawLine(inside, smoothed(line, state.smooth), places, x, y, size.bottom);
    }
    for (const note of panel.notes || []) {
      element(svg, "text", { x: x.at(note.x) + 5, y: y.at(note.y) + 4, class: "note" }, note.text);
    }
    const view = { ...size, x, y, width, panel, hover: element(svg, "g"), box: element(place, "div", { class: "values" }) };
    view.box.hidden = true;
    follow(svg, view, lines, (range) => { state.zooms.set(shared, range); redraw(); });
  }

  // Moves show values, a drag zooms into its range, a double click leaves it.
  function follow(svg, view, lines, zoomTo) {
    let from = null;
    const pixel = (event) => Math.min(view.right, Math.max(view.left, event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerdown", (event) => { from = pixel(event); });
    svg.addEventListener("pointermove", (event) => {
      showValues(view, lines, pixel(event), event.clientY - svg.getBoundingClientRect().top);
      if (from === null) return;
      const [low, high] = [Math.min(from, pixel(event)), Math.max(from, pixel(event))];
      element(view.hover, "rect", { x: low, width: high - low, y: view.top, height: view.bottom - view.top, class: "chosen" });
    });
    svg.addEventListener("pointerleave", () => {
      from = null;
      view.hover.replaceChildren();
      view.box.hidden = true;
    });
    svg.addEventListener("pointerup", (event) => {
      const ends = from === null ? [] : [from, pixel(event)].sort((a, b) => a - b);
      from = null;
      if (ends.length && ends[1] - ends[0] > 8) zoomTo(ends.map(view.x.value));
    });
    svg.addEventListener("dblclick", () => zoomTo(null));
  }

  function drawLegend(figure, panels, state, redraw) {
    const legend = element(figure, "div", { class: "legend" });
    const groups = new Map();
    for (const line of panels.flatMap((panel) => panel.lines)) {
      if (line.group && !groups.has(line.group)) groups.set(line.group, line);
    }
    for (const [group, line] of groups) {
      const button = element(legend, "button", { type: "button", "aria-pressed": String(!state.hidden.has(group)), title: "show or hide" });
      element(button, "i", { style: `background:${line.color}` });
      element(button, "span", {}, group);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(group)) state.hidden.add(group);
        button.setAttribute("aria-pressed", String(!state.hidden.has(group)));
        redraw();
      });
    }
    element(legend, "small", {}, "Drag to zoom, double-click to leave it.");
    return legend;
  }

  // The axis of all panels; what of each line is marked goes to the nearest of its points.
  function chooseAxis(panels, name) {
    for (const panel of panels) {
      for (const line of panel.lines) {
        const [before, now] = [line.x, line.axes[name]];
        line.flags = line.flags.map((flag) => {
          const away = before.map((at) => Math.abs(at - flag.x));
          return { ...flag, x: now[away.indexOf(Math.min(...away))] };
        });
        line.x = now;
      }
      panel.x = name;
    }
  }

  function drawChoices(legend, panels, state, redraw) {
    const lines = panels.flatMap((panel) => panel.lines);
    const names = lines.length ? Object.keys(lines[0].axes).filter((name) => lines.every((line) => name in line.axes)) : [];
    if (names.length > 1) {
      const select = element(element(legend, "label", {}, "by "), "select", { "aria-label": "horizontal axis" });
      for (const name of names) element(select, "option", { value: name }, name);
      select.value = panels[0].x;
      select.addEventListener("change", () => {
        chooseAxis(panels, select.value);
        state.axis = select.value;
        state.zooms.clear();
        redraw();
      });
    }
    if (isNumber(panels[0] && panels[0].smooth)) {
      const slider = element(element(legend, "label", {}, "smooth "), "input", { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "smoothing" });
      slider.value = state.smooth;
      slider.addEventListener("input", () => { state.smooth = Number(slider.value); redraw(); });
    }
  }

  function heading(parent, panel, redraw) {
    const line = element(parent, "figcaption", {}, panel.title);
    const values = panel.lines.flatMap((one) => one.y).filter(isNumber);
    if (panel.yticks || panel.lines.some((one) => one.bar) || !values.length || values.some((value) => value <= 0)) return;
    const button = element(line, "button", { type: "button", "aria-pressed": String(panel.ylog) }, "log");
    button.addEventListener("click", () => {
      panel.ylog = !panel.ylog;
      button.setAttribute("aria-pressed", String(panel.ylog));
      redraw();
    });
  }

  function drawFigure(figure, number) {
    let panels = JSON.parse(figure.querySelector("script").textContent);
    const state = {
      hidden: new Set(), zooms: new Map(), smooth: panels[0] && panels[0].smooth, axis: null, name: (panel) => `clip-${number}-${panels.indexOf(panel)}`,
      // Of all panels: what is above each other is the same step.
      ends: (asked) => (asked.alone ? [asked] : panels.filter((panel) => !panel.alone)).flatMap((panel) => panel.lines).filter((line) => !state.hidden.has(line.group)).flatMap((line) => line.x),
    };
    let places = [];
    let drawn = [];
    const redraw = () => places.forEach((place, at) => drawPanel(place, panels[at], state, redraw));
    const draw = () => {
      drawn.forEach((old) => old.remove());
      const legend = drawLegend(figure, panels, state, redraw);
      drawChoices(legend, panels, state, redraw);
      const grid = element(figure, "div", { class: "panels" });
      drawn = [legend, grid];
      places = panels.map((panel) => {
        const around = element(grid, "div", { class: panel.full ? "panel full" : "panel" });
        heading(around, panel, redraw);
        return element(around, "div", { class: "plot" });
      });
      redraw();
    };
    draw();
    window.addEventListener("resize", redraw);
    // Newer panels of the same figure: what a reader has chosen stays, and so do the controls if they are the same.
    const shape = (some) => JSON.stringify(some.map((panel) => [panel.title, panel.lines.map((line) => [line.group, Object.keys(line.axes)])]));
    figure.replacePanels = (newer) => {
      const isSame = shape(newer) === shape(panels);
      const logs = new Map(panels.map((panel) => [panel.title, panel.ylog]));
      for (const panel of newer) panel.ylog = logs.get(panel.title) ?? panel.ylog;
      if (isSame) panels.forEach((panel, at) => Object.assign(panel, newer[at]));
      else panels = newer;
      if (state.axis !== null && panels.every((panel) => panel.lines.every((line) => state.axis in line.axes))) chooseAxis(panels, state.axis);
      if (isSame) redraw();
      else draw();
    };
  }

  // A page with several figures has this script several times.
  document.querySelectorAll("figure.chart").forEach((figure, number) => {
    if (!figure.isDrawn) drawFigure(figure, number);
    figure.isDrawn = true;
  });
})();
