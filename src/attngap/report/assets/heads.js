// One head: opened from the map, the table, the selector or the address (#head=7.3).
const panels = {};
let settled = false; // from then on what is opened is a person's choice, and goes into the address

function setUpPanel(element) {
  const panel = page.panels[element.dataset.panel];
  const heads = rowsOf(panel.heads);
  const byId = new Map(heads.map((head) => [head.id, head]));
  const select = element.querySelector("[data-head]");
  select.append(...heads.map((head) => make("option", { value: head.id }, head.id)));
  select.addEventListener("change", () => open(select.value));

  function numbers(head) {
    const items = panel.fields.filter((field) => head[field.key] !== undefined).flatMap((field) => [
      make("dt", field.help ? { title: field.help } : {}, field.label),
      make("dd", { "data-key": field.key, "data-value": String(head[field.key]) }, show(head[field.key], field.form)),
    ]);
    element.querySelector(".numbers").replaceChildren(...items);
  }

  function patterns(head) {
    element.querySelectorAll(".pattern").forEach((figure, i) => {
      const { caption, side, cell } = panel.passages[i];
      const start = panel.offset + (i * heads.length + head.place) * side * side;
      const roots = pictures.subarray(start, start + side * side);
      drawMatrix(figure, { roots, side, most: 63, width: cell, alt: `Head ${head.id}. ${caption}` });
    });
  }

  async function chart(figure, head) {
    const name = figure.dataset.headChart;
    figure.hidden = !(head[name] && head[name].length);
    if (figure.hidden) return;
    const rows = head[name].map((row, i) => (typeof row === "number" ? { place: i + 1, value: row } : row));
    const key = `${element.id}-${name}`;
    views[key]?.finalize();
    views[key] = await drawSpec(figure.querySelector(".canvas"), { ...panel.charts[name], datasets: { [name]: rows } });
  }

  function reads(head) {
    const box = element.querySelector(".reads");
    box.hidden = !(head.reads && head.reads.length);
    box.querySelector("ul").replaceChildren(...(head.reads || []).map((line) => make("li", {}, line)));
  }

  function open(id, scroll = false) {
    const head = byId.get(String(id));
    if (!head) return;
    select.value = head.id;
    element.dataset.open = head.id;
    element.querySelector("h3").textContent = `Head ${head.id}`;
    element.querySelector(".verdict").textContent = head.words || "";
    numbers(head);
    patterns(head);
    reads(head);
    for (const figure of element.querySelectorAll("[data-head-chart]")) drawn.set(`${element.id}-${figure.dataset.headChart}`, chart(figure, head));
    mark(head.id);
    if (settled) history.replaceState(null, "", `#head=${head.id}`);
    if (scroll) element.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function mark(id) {
    const view = views[panel.map];
    if (view) view.signal("chosen", id).runAsync();
  }

  // Arrow keys walk the map: layers across, heads down.
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  function walk(event) {
    const head = byId.get(element.dataset.open);
    const step = steps[event.key];
    const next = step && heads.find((other) => other.layer === head.layer + step[0] && other.head === head.head + step[1]);
    if (next) {
      event.preventDefault();
      open(next.id);
    }
  }
  const figure = document.getElementById(panel.map);
  figure?.querySelector(".canvas").addEventListener("keydown", walk);
  figure?.querySelector(".canvas").classList.add("clickable");
  figure?.addEventListener("drawn", (event) => {
    event.detail.addEventListener("click", (_, item) => item?.datum?.id && open(item.datum.id));
    if (element.dataset.open) mark(element.dataset.open);
  });
  panels[element.id] = { open, sources: [panel.map, panel.table] };
  const asked = new URLSearchParams(location.hash.slice(1)).get("head");
  if (heads.length) open(byId.has(asked) ? asked : heads[0].id);
}

function openHead(source, id, scroll) {
  for (const panel of Object.values(panels)) if (panel.sources.includes(source)) panel.open(id, scroll);
}

for (const element of document.querySelectorAll("[data-panel]")) setUpPanel(element);
settled = true;
for (const figure of document.querySelectorAll("[data-chart]")) drawn.set(figure.dataset.chart, drawChart(figure));
window.attngap = { views, openHead };
