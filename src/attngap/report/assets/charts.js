// Charts: Vega-Lite specs drawn as SVG. Colors of text and lines are CSS variables, so themes and print need no redraw.
const chartLook = {
  aria: false, // the picture as a whole has its sentence; thousands of labeled marks would only slow a reader down
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: "transparent" },
  axis: {
    labelColor: "var(--soft)", titleColor: "var(--ink)", gridColor: "var(--line)", domainColor: "var(--line)",
    tickColor: "var(--line)", labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500,
  },
  legend: { labelColor: "var(--soft)", titleColor: "var(--ink)", labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500 },
  title: { color: "var(--ink)", subtitleColor: "var(--soft)" },
  header: { labelColor: "var(--soft)", titleColor: "var(--ink)" },
  mark: { aria: false },
  text: { color: "var(--ink)" },
  rule: { color: "var(--soft)" },
};
const views = {};
const drawn = new Map(); // chart id -> promise of its view

// Only what a spec names, so that a small chart does not carry every row of the page.
function namedIn(node, found = new Set()) {
  if (Array.isArray(node)) node.forEach((item) => namedIn(item, found));
  else if (node && typeof node === "object") {
    if (node.data && node.data.name) found.add(node.data.name);
    Object.values(node).forEach((item) => namedIn(item, found));
  }
  return found;
}

// Legends of names get as many columns as fit, so that none is cut off on a phone.
function fitLegends(node, width) {
  if (Array.isArray(node)) return node.map((item) => fitLegends(item, width));
  if (!node || typeof node !== "object") return node;
  const fitted = Object.fromEntries(Object.entries(node).map(([key, value]) => [key, fitLegends(value, width)]));
  const names = node.legend && node.scale && node.scale.domain;
  if (Array.isArray(names) && names.every((name) => typeof name === "string")) {
    const longest = Math.max(...names.map((name) => name.length));
    fitted.legend = { ...node.legend, columns: Math.max(1, Math.floor(width / (7 * longest + 34))) };
  }
  return fitted;
}

async function drawSpec(element, given) {
  const spec = fitLegends(given, element.clientWidth - 60);
  const full = { ...spec, datasets: { ...(spec.datasets || {}) } };
  for (const name of namedIn(spec)) if (datasets[name]) full.datasets[name] = datasets[name];
  element.classList.toggle("fixed", spec.width !== "container"); // scrolls by itself on a narrow screen
  const { config, ...rest } = full;
  const result = await window.vegaEmbed(element, { ...rest, config: merge(chartLook, config) }, {
    renderer: "svg", actions: false, tooltip: { theme: "custom" },
  });
  return result.view;
}

function merge(base, extra) {
  if (!extra) return base;
  const both = { ...base };
  for (const [key, value] of Object.entries(extra)) {
    const nested = value && typeof value === "object" && !Array.isArray(value) && base[key];
    both[key] = nested ? merge(base[key], value) : value;
  }
  return both;
}

async function drawChart(figure) {
  const id = figure.dataset.chart;
  const chart = page.charts[id];
  const select = figure.querySelector("[data-choice]");
  const spec = select ? chart.choices[select.value] : chart.spec;
  views[id]?.finalize();
  views[id] = await drawSpec(figure.querySelector(".canvas"), spec);
  figure.dispatchEvent(new CustomEvent("drawn", { detail: views[id] }));
  return views[id];
}

async function saveSvg(figure) {
  const style = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(document.createElement("span"));
  const svg = (await views[figure.dataset.chart].toSVG()).replace(/var\((--\w+)\)/g, (_, name) => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color;
  });
  probe.remove();
  download(`${figure.dataset.chart}.svg`, "image/svg+xml", svg);
}

for (const figure of document.querySelectorAll("[data-chart]")) {
  const select = figure.querySelector("[data-choice]");
  select?.addEventListener("change", () => drawChart(figure));
  const save = figure.querySelector("[data-save]");
  if (!save) continue; // one of several small panels
  save.hidden = false;
  save.addEventListener("click", () => saveSvg(figure));
}
