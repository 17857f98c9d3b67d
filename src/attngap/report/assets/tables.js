// Tables: sorted by a click on a header, read a page at a time, downloaded whole as CSV.
function compare(a, b) {
  const missing = (x) => x === null || x === undefined;
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const [x, y] = [a, b].map((value) => (value === "Infinity" ? Infinity : value));
  return typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
}

function csvOf(columns, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : Array.isArray(value) ? value.join(" ") : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [columns.map((column) => column.key), ...rows.map((row) => columns.map((column) => row[column.key]))];
  return lines.map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}

function setUpTable(element) {
  const { columns, rows: packed, shown } = page.tables[element.dataset.table];
  let rows = rowsOf(packed);
  let start = 0;
  const body = element.querySelector("tbody");
  const pager = element.querySelector(".pager");
  const headers = [...element.querySelectorAll("th")];

  function cellOf(row, column, j) {
    const cell = make("td", column.form ? { class: "number" } : {});
    const text = show(row[column.key], column.form);
    if (j === 0 && "opensHead" in element.dataset) {
      cell.append(make("button", { type: "button", onclick: () => openHead(element.dataset.table, row[column.key], true) }, text));
    } else cell.append(text);
    return cell;
  }

  function draw() {
    const visible = rows.slice(start, start + shown);
    body.replaceChildren(...visible.map((row) => make("tr", {}, ...columns.map((column, j) => cellOf(row, column, j)))));
    pager.hidden = rows.length <= shown;
    if (pager.hidden) return;
    const step = (by) => () => { start = Math.min(Math.max(0, start + by), rows.length - 1); draw(); };
    const back = make("button", { type: "button", onclick: step(-shown) }, "Back");
    const next = make("button", { type: "button", onclick: step(shown) }, "Next");
    back.disabled = start === 0;
    next.disabled = start + shown >= rows.length;
    pager.replaceChildren(back, `${start + 1}–${Math.min(start + shown, rows.length)} of ${rows.length}`, next);
  }

  function sortBy(j) {
    const header = headers[j];
    const down = header.getAttribute("aria-sort") !== "descending" && columns[j].form !== "";
    const upNow = header.getAttribute("aria-sort") === "ascending";
    const direction = (columns[j].form ? down : upNow) ? "descending" : "ascending";
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const key = columns[j].key;
    const missing = (row) => row[key] === null || row[key] === undefined;
    // What was not measured stays at the end, whichever way the rest is sorted.
    rows = [...rows].sort((a, b) => (missing(a) || missing(b) ? missing(a) - missing(b) : sign * compare(a[key], b[key])));
    start = 0;
    draw();
  }

  headers.forEach((header, j) => {
    header.replaceChildren(make("button", { type: "button", onclick: () => sortBy(j) }, header.textContent));
  });
  const csv = element.querySelector("[data-csv]");
  csv.hidden = false;
  csv.addEventListener("click", () => download(`${element.dataset.table}.csv`, "text/csv", csvOf(columns, rows)));
  draw();
}

for (const element of document.querySelectorAll("[data-table]")) setUpTable(element);
