// One head: opened from the map, the table, the selector or the address (#head=7.3).
const panels = {};

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

function setUpPanel(element) {
  const panel = page.panels[element.dataset.panel];
  const heads = rowsOf(panel.heads);
  const byId = new Map(heads.map((head) => [head.id, head]));
  const select = element.querySelector("[data-head]");
  select.append(...heads.map((head) => make("option", { value: head.id }, head.id)));
  select.addEventListener("change", () => open(select.value));
  let readAt = () => "";

  function numbers(head) {
    const items = panel.fields.filter((field) => head[field.key] !== undefined).flatMap((field) => [
      make("dt", field.help ? { title: field.help } : {}, field.label),
      make("dd", { "data-key": field.key, "data-value": String(head[field.key]) }, show(head[field.key], field.form)),
    ]);
    element.querySelector(".numbers").replaceChildren(...items);
  }

  function pattern(head) {
    const figure = element.querySelector(".pattern");
    figure.hidden = !head.pattern;
    if (!head.pattern) return;
    const side = head.pattern_side;
    const about = panel.passages[head.pattern_passage ?? 0] || {};
    const cells = bytesOf(head.pattern);
    const canvas = figure.querySelector("canvas");
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    const image = context.createImageData(side, side);
    // Color is the square root of the weight, so that faint weights can be seen; the readout gives the weight itself.
    for (let i = 0; i < side * side; i += 1) image.data.set(heat(cells[i] / 255), 4 * i);
    context.putImageData(image, 0, 0);
    canvas.setAttribute("aria-label", `Attention of head ${head.id}: a row is a query, a column a key`);
    figure.querySelector("figcaption").textContent = about.caption || "";
    const width = about.cell || 1;
    readAt = (x, y) => {
      const [j, i] = [x, y].map((p) => Math.min(side - 1, Math.floor(p * side)));
      const span = (k) => (width === 1 ? `${k}` : `${Math.round(k * width)}–${Math.round((k + 1) * width) - 1}`);
      const weight = (cells[i * side + j] / 255) ** 2 * (head.pattern_top ?? 1);
      const token = (k) => (about.tokens ? ` ${JSON.stringify(about.tokens[k])}` : "");
      return `query ${span(i)}${token(i)}, key ${span(j)}${token(j)}: ${general(weight, 2)}`;
    };
    figure.querySelector(".readout").textContent = "";
  }

  async function spectrum(head) {
    const figure = element.querySelector(".spectrum");
    figure.hidden = !(panel.spectrum && head.spectrum && head.spectrum.length);
    if (figure.hidden) return;
    figure.querySelector("figcaption").textContent =
      "Relative error of the best linear attention at each state rank: no lower than the floor, no higher than the ceiling.";
    const spec = { ...panel.spectrum, datasets: { spectrum: head.spectrum } };
    views[`${element.id}-spectrum`]?.finalize();
    views[`${element.id}-spectrum`] = await drawSpec(figure.querySelector(".canvas"), spec, `Floor and ceiling of head ${head.id}`);
  }

  function open(id, scroll = false) {
    const head = byId.get(String(id));
    if (!head) return;
    select.value = head.id;
    element.dataset.open = head.id;
    element.querySelector("h3").textContent = `Head ${head.id}`;
    element.querySelector(".verdict").textContent = head.words || "";
    element.querySelector(".reads").textContent = head.reads || "";
    numbers(head);
    pattern(head);
    spectrum(head);
    mark(head.id);
    if (scroll) element.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function mark(id) {
    const view = views[panel.map];
    if (view) view.signal("chosen", id).runAsync();
  }

  const canvas = element.querySelector(".pattern canvas");
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = readAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    element.querySelector(".readout").textContent = at;
  });
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
  if (heads.length) open(heads[0].id);
}

// From page to blue to dark red, the same in both themes.
function heat(value) {
  const stops = [[255, 255, 255, 0], [130, 180, 222, 255], [42, 120, 181, 255], [110, 30, 90, 255], [213, 94, 0, 255]];
  const at = value * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((low, c) => low + (at - i) * (stops[i + 1][c] - low));
}

function openHead(source, id, scroll) {
  for (const panel of Object.values(panels)) if (panel.sources.includes(source)) panel.open(id, scroll);
}

for (const element of document.querySelectorAll("[data-panel]")) setUpPanel(element);
for (const figure of document.querySelectorAll("[data-chart]")) drawn.set(figure.dataset.chart, drawChart(figure));
window.attngap = { views, openHead, ready: Promise.all(drawn.values()).then(() => document.documentElement.setAttribute("data-ready", "")) };
