// Follows a page of `samestep ui`: replaces the parts that the server says have changed, and keeps what its reader has chosen.
"use strict";
(() => {
  const chosen = new Set();
  const table = () => document.querySelector("table.sortable");
  let filter = "";
  let order = null; // the column, and 1 or -1

  function compareChosen() {
    const query = new URLSearchParams([...chosen].map((path) => ["path", path]));
    location.href = `compare?${query}`;
  }

  // Above the table of runs: a filter, and the button that compares.
  function drawTools() {
    const tools = document.createElement("div");
    tools.className = "tools";
    const input = document.createElement("input");
    Object.assign(input, { type: "search", placeholder: "filter", ariaLabel: "filter" });
    input.addEventListener("input", () => { filter = input.value.toLowerCase(); arrange(); });
    const button = document.createElement("button");
    Object.assign(button, { type: "button", id: "compare", textContent: "compare", disabled: true });
    button.addEventListener("click", compareChosen);
    tools.append(input, button);
    document.querySelector("#part-runs").before(tools);
  }

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const text = cell.querySelector("[data-value]")?.dataset.value || cell.textContent.replaceAll(",", "");
    const number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };

  function arrange() {
    if (!table()) return;
    if (!document.querySelector(".tools")) drawTools();
    const rows = [...table().tBodies[0].rows];
    if (order) {
      const [column, sign] = order;
      rows.sort((one, other) => {
        const [a, b] = [valueOf(one, column), valueOf(other, column)];
        return sign * (typeof a === typeof b ? (a > b) - (a < b) : typeof a === "number" ? -1 : 1);
      });
      table().tBodies[0].append(...rows);
    }
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(filter);
    for (const box of document.querySelectorAll("input.choose")) box.checked = chosen.has(box.value);
    document.querySelector("#compare").disabled = chosen.size < 2;
  }

  document.addEventListener("change", (event) => {
    if (!event.target.matches("input.choose")) return;
    if (event.target.checked) chosen.add(event.target.value);
    else chosen.delete(event.target.value);
    arrange();
  });
  document.addEventListener("click", (event) => {
    const head = event.target.closest("table.sortable th");
    if (!head) return;
    order = [head.cellIndex, order && order[0] === head.cellIndex ? -order[1] : 1];
    arrange();
  });

  function replacePart(name, text) {
    const part = document.querySelector(`#part-${name}`);
    const selected = getSelection();
    if (!part || (!selected.isCollapsed && part.contains(selected.anchorNode))) return; // about to be copied
    const open = Boolean(part.querySelector("details[open]"));
    const log = part.querySelector(".log");
    const atEnd = log && log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    part.innerHTML = text; // the server has escaped what is in it
    if (open) part.querySelector("details")?.setAttribute("open", "");
    const newer = part.querySelector(".log");
    if (newer && atEnd !== false) newer.scrollTop = newer.scrollHeight;
  }

  const here = `${location.pathname.split("/").pop()}${location.search}`;
  const address = (kind) => `${kind}?${new URLSearchParams({ page: here })}`;
  const words = document.querySelector("#connection");
  document.querySelector("#share").href = address("share");
  document.querySelectorAll(".log").forEach((log) => { log.scrollTop = log.scrollHeight; });
  arrange();

  let events = null;

  function follow() {
    events = new EventSource(address("events"));
    events.addEventListener("open", () => { words.textContent = "live"; words.className = ""; });
    events.addEventListener("error", () => { words.textContent = "the server does not answer"; words.className = "lost"; });
    events.addEventListener("message", (event) => show(JSON.parse(event.data)));
  }

  function show(change) {
    for (const [name, text] of Object.entries(change.parts || {})) replacePart(name, text);
    const figure = document.querySelector("figure.chart");
    if (change.panels && !figure) location.reload(); // its first numbers
    else if (change.panels) figure.replacePanels(change.panels);
    arrange();
  }

  // A browser has six connections to a server, for all of its tabs.
  document.addEventListener("visibilitychange", () => {
    events?.close();
    events = null;
    if (!document.hidden) follow();
  });
  addEventListener("pagehide", () => events?.close());
  if (!document.hidden) follow();
})();
