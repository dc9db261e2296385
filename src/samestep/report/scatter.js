// Draws the maps of a page: points with pictures and texts under the pointer, colored by class or by error, with zoom.
// Names and texts come from users: they are only ever set as textContent, never as HTML.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = 14;
  const REACH = 14; // pixels from the pointer to the furthest point that is shown
  const FEWEST = 8; // pixels of a drag that zooms

  function element(parent, name, attributes = {}, text = "") {
    const made = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== "") made.textContent = text;
    parent.append(made);
    return made;
  }

  // A row of buttons of which one is pressed.
  function choice(parent, title, names, choose) {
    const row = element(parent, "span", { role: "group", "aria-label": title }, title);
    const buttons = names.map((name, at) => {
      const button = element(row, "button", { type: "button", "aria-pressed": String(at === 0) }, name);
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        choose(at);
      });
      return button;
    });
  }

  // The range of values with a margin around, in one or both directions.
  function range(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    const margin = (high - low) * 0.03 || 1;
    return [low - margin, high + margin];
  }

  class Scatter {
    constructor(figure) {
      this.data = JSON.parse(figure.querySelector("script").textContent);
      Object.assign(this, { map: 0, byError: false, hidden: new Set(), zoom: null });
      const choices = element(figure, "div", { class: "choices" });
      choice(choices, "map", this.data.maps.map((map) => map.name), (at) => this.show(at));
      if (this.data.wrong) choice(choices, "color", ["class", "error"], (at) => this.color(at === 1));
      element(choices, "small", {}, "Point at a dot; drag to zoom, double-click to leave it.");
      this.place = element(figure, "div", { class: "plot" });
      this.legend = element(figure, "div", { class: "legend" });
      this.note = element(figure, "p", { class: "note" });
      this.svg = this.place.appendChild(document.createElementNS(SVG, "svg"));
      this.svg.setAttribute("role", "img");
      this.dots = element(this.svg, "g");
      this.over = element(this.svg, "g");
      this.box = element(this.place, "div", { class: "values" });
      this.box.hidden = true;
      this.order = this.data.groups.map((_, at) => at);
      // Errors last, so that they lie above the others.
      if (this.data.wrong) this.order.sort((a, b) => this.data.wrong[a] - this.data.wrong[b] || a - b);
      this.circles = new Map(this.order.map((at) => [at, element(this.dots, "circle")]));
      this.follow();
      this.drawLegend();
      this.draw();
      window.addEventListener("resize", () => this.draw());
    }

    show(at) {
      this.map = at;
      this.zoom = null;
      this.draw();
    }

    color(byError) {
      this.byError = byError;
      this.hidden.clear();
      this.drawLegend();
      this.draw();
    }

    groupOf(at) {
      return this.byError ? this.data.wrong[at] : this.data.groups[at];
    }

    colorOf(group) {
      if (this.byError) return this.data.verdicts[group];
      return group < 0 ? this.data.unknown : this.data.colors[group];
    }

    draw() {
      const { x, y, name, note } = this.data.maps[this.map];
      const width = this.place.clientWidth;
      const height = this.data.height;
      const [[left, right], [low, high]] = this.zoom || [range(x), range(y)];
      this.toX = (value) => MARGIN + ((value - left) / (right - left)) * (width - 2 * MARGIN);
      this.toY = (value) => height - MARGIN - ((value - low) / (high - low)) * (height - 2 * MARGIN);
      this.fromX = (pixel) => left + ((pixel - MARGIN) / (width - 2 * MARGIN)) * (right - left);
      this.fromY = (pixel) => low + ((height - MARGIN - pixel) / (height - 2 * MARGIN)) * (high - low);
      for (const [key, value] of Object.entries({ width, height, "aria-label": `${name} of ${x.length} points` })) this.svg.setAttribute(key, value);
      for (const [at, circle] of this.circles) {
        const wrong = this.data.wrong && this.data.wrong[at];
        const look = { cx: this.toX(x[at]).toFixed(1), cy: this.toY(y[at]).toFixed(1), r: wrong ? 5 : 4, fill: this.colorOf(this.groupOf(at)) };
        for (const [key, value] of Object.entries(look)) circle.setAttribute(key, value);
        circle.setAttribute("class", wrong && !this.byError ? "wrong" : "");
        circle.style.display = this.hidden.has(this.groupOf(at)) ? "none" : "";
      }
      this.note.textContent = note;
      this.leave();
    }

    drawLegend() {
      const present = [...new Set(this.data.groups.map((_, at) => this.groupOf(at)))].sort((a, b) => a - b);
      const nameOf = (group) => (this.byError ? ["right", "wrong"][group] : group < 0 ? "no class" : this.data.names[group]);
      this.legend.replaceChildren();
      for (const group of present) {
        const count = this.data.groups.filter((_, at) => this.groupOf(at) === group).length;
        const button = element(this.legend, "button", { type: "button", "aria-pressed": "true", title: "show or hide" });
        element(button, "i").style.background = this.colorOf(group);
        element(button, "span", {}, `${nameOf(group)} (${count})`);
        button.addEventListener("click", () => {
          if (!this.hidden.delete(group)) this.hidden.add(group);
          button.setAttribute("aria-pressed", String(!this.hidden.has(group)));
          this.draw();
        });
      }
      if (this.data.wrong && !this.byError) {
        const key = element(this.legend, "span", { class: "key" });
        element(key, "i", { class: "wrong" });
        element(key, "span", {}, "ringed: an error");
      }
    }

    nearest(px, py) {
      const { x, y } = this.data.maps[this.map];
      let best = -1;
      let gap = REACH ** 2;
      for (const at of this.order) { // of two at one place the one above
        if (this.hidden.has(this.groupOf(at))) continue;
        const away = (this.toX(x[at]) - px) ** 2 + (this.toY(y[at]) - py) ** 2;
        if (away <= gap) [best, gap] = [at, away];
      }
      return best;
    }

    point(at) {
      const { x, y } = this.data.maps[this.map];
      const [px, py] = [this.toX(x[at]), this.toY(y[at])];
      element(this.over, "circle", { cx: px, cy: py, r: 7, fill: this.colorOf(this.groupOf(at)), class: "near" });
      this.box.replaceChildren();
      const picture = this.data.pictures && this.data.pictures[at];
      if (picture) element(this.box, "img", { src: `data:image/png;base64,${picture}`, alt: "" });
      const group = this.data.groups[at];
      if (group >= 0) element(this.box, "b", {}, this.data.names[group]);
      for (const line of this.data.texts[at]) element(this.box, "div", {}, line);
      this.box.hidden = false;
      const right = px > this.place.clientWidth / 2;
      const below = py > this.data.height / 2;
      Object.assign(this.box.style, {
        left: right ? "auto" : `${px + 14}px`, right: right ? `${this.place.clientWidth - px + 14}px` : "auto",
        top: below ? "auto" : `${py + 8}px`, bottom: below ? `${this.data.height - py + 8}px` : "auto",
      });
    }

    leave() {
      this.over.replaceChildren();
      this.box.hidden = true;
    }

    // Moves show what is near, a drag zooms into its rectangle, a double click leaves it.
    follow() {
      let from = null;
      const pixel = (event) => {
        const frame = this.svg.getBoundingClientRect();
        return [event.clientX - frame.left, event.clientY - frame.top];
      };
      const sides = (a, b) => [0, 1].map((side) => [Math.min(a[side], b[side]), Math.max(a[side], b[side])]);
      this.svg.addEventListener("pointerdown", (event) => { from = pixel(event); });
      this.svg.addEventListener("pointermove", (event) => {
        const at = pixel(event);
        this.leave();
        if (from !== null) {
          const [[left, right], [top, bottom]] = sides(from, at);
          element(this.over, "rect", { x: left, y: top, width: right - left, height: bottom - top, class: "chosen" });
          return;
        }
        const found = this.nearest(...at);
        if (found >= 0) this.point(found);
      });
      this.svg.addEventListener("pointerleave", () => { from = null; this.leave(); });
      this.svg.addEventListener("pointerup", (event) => {
        const ends = from && sides(from, pixel(event));
        from = null;
        if (!ends || ends.some(([low, high]) => high - low < FEWEST)) return;
        const [[left, right], [top, bottom]] = ends;
        this.zoom = [[this.fromX(left), this.fromX(right)], [this.fromY(bottom), this.fromY(top)]];
        this.draw();
      });
      this.svg.addEventListener("dblclick", () => { this.zoom = null; this.draw(); });
    }
  }

  // A page with several figures has this script several times.
  document.querySelectorAll("figure.scatter").forEach((figure) => {
    if (!figure.isDrawn) new Scatter(figure);
    figure.isDrawn = true;
  });
})();
