// Tables: sorted by a click on a header, read a page at a time, downloaded whole as CSV.
function compare(a, b) {
  const [x, y] = [a, b].map((value) => (value === "Infinity" ? Infinity : value));
  return typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
}

function csvOf(columns, rows) {
  const cell = (value) => {
    let text = value === null || value === undefined ? "" : Array.isArray(value) ? value.join(" ") : String(value);
    if (typeof value !== "number" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // a spreadsheet must not run it
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [columns.map((column) => column.key), ...rows.map((row) => columns.map((column) => row[column.key]))];
  return lines.map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}

const tables = {};

function setUpTable(element) {
  const id = element.dataset.table;
  const { columns, rows: packed, shown } = page.tables[id];
  const body = element.querySelector("tbody");
  const pager = element.querySelector(".pager");
  const headers = [...element.querySelectorAll("th")];
  const filter = element.querySelector("[data-filter]");
  let all = rowsOf(packed);
  let rows = all; // those the filter lets through
  let start = 0;
  let sorted = null; // { key, sign }

  function cellOf(row, column, j) {
    const text = show(row[column.key], column.form);
    let content = text;
    if (j === 0 && row.href) content = make("a", { href: row.href }, text);
    if (j === 0 && "opensHead" in element.dataset) {
      content = make("button", { type: "button", onclick: () => openHead(id, row[column.key], true) }, text);
    }
    return make("td", column.form ? { class: "number" } : column.wide ? { class: "words" } : {}, content);
  }

  function draw() {
    const visible = rows.slice(start, start + shown);
    const none = make("tr", {}, make("td", { colspan: String(columns.length) }, all.length ? "no row matches" : "none yet"));
    body.replaceChildren(...visible.map((row) => make("tr", {}, ...columns.map((column, j) => cellOf(row, column, j)))));
    if (!rows.length) body.replaceChildren(none);
    pager.hidden = rows.length <= shown;
    if (pager.hidden) return;
    const turn = (by, label, disabled) => {
      const button = make("button", { type: "button", onclick: () => { start += by; draw(); } }, label);
      button.disabled = disabled;
      return button;
    };
    const last = Math.min(start + shown, rows.length);
    pager.replaceChildren(
      turn(-shown, "Back", start === 0), `${start + 1}–${last} of ${rows.length}`, turn(shown, "Next", last === rows.length));
  }

  // Every word must be somewhere in the row as it is shown: "keep 18." finds kept heads of layer 18.
  function choose() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => columns.map((column) => show(row[column.key], column.form)).join(" ").toLowerCase();
    rows = words.length ? all.filter((row) => words.every((word) => text(row).includes(word))) : all;
    sort();
  }

  function sort() {
    if (!sorted) return;
    const { key, sign } = sorted;
    const missing = (row) => row[key] === null || row[key] === undefined;
    // What was not measured stays at the end, whichever way the rest is sorted.
    rows = [...rows].sort((a, b) => (missing(a) || missing(b) ? missing(a) - missing(b) : sign * compare(a[key], b[key])));
  }

  // Numbers start with the largest, words with the first of the alphabet; a second click turns it around.
  function sortBy(j) {
    const now = headers[j].getAttribute("aria-sort");
    const first = columns[j].form ? "descending" : "ascending";
    const second = columns[j].form ? "ascending" : "descending";
    const direction = now === first ? second : first;
    headers.forEach((header) => header.removeAttribute("aria-sort"));
    headers[j].setAttribute("aria-sort", direction);
    sorted = { key: columns[j].key, sign: direction === "ascending" ? 1 : -1 };
    sort();
    start = 0;
    draw();
  }

  headers.forEach((header, j) => {
    header.replaceChildren(make("button", { type: "button", onclick: () => sortBy(j) }, header.textContent));
  });
  const csv = element.querySelector("[data-csv]");
  csv.hidden = false;
  csv.addEventListener("click", () => download(`${id}.csv`, "text/csv", csvOf(columns, rows)));
  filter.hidden = all.length <= shown;
  filter.addEventListener("input", () => { choose(); start = 0; draw(); });
  tables[id] = (fresh) => {
    all = fresh;
    filter.hidden = all.length <= shown;
    choose();
    start = Math.min(start, Math.max(0, rows.length - 1));
    draw();
  };
  draw();
}

for (const element of document.querySelectorAll("[data-table]")) setUpTable(element);
