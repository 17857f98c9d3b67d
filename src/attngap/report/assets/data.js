// The packed data of the page: inflated once, rows rebuilt on demand.
function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

function inflate(id) {
  const bytes = bytesOf(document.getElementById(id).textContent);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

function rowsOf(table) {
  return Array.from({ length: table.length }, (_, i) =>
    Object.fromEntries(table.keys.map((key, j) => [key, table.columns[j][i]])));
}

const page = await inflate("packed").json();
const pictures = new Uint8Array(await inflate("pictures").arrayBuffer());
const datasets = Object.fromEntries(Object.entries(page.data).map(([name, table]) => [name, rowsOf(table)]));

// The format specs the page uses, as Python shows them: ".3g", ".1%", ".2f", ",.0f".
function show(value, form) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (value === "Infinity") return "∞";
  if (Array.isArray(value)) return value.join(", ");
  if (!form || typeof value !== "number") return String(value);
  const digits = Number((form.match(/\.(\d+)/) || [0, 0])[1]);
  if (form.endsWith("%")) return `${(100 * value).toFixed(digits)}%`;
  if (form.startsWith(",")) {
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }
  if (form.endsWith("f")) return value.toFixed(digits);
  if (form.endsWith("g")) return general(value, digits);
  throw new Error(`No format ${form}`);
}

// Python's %g: as many significant digits as asked, an exponent of two digits below 1e-4 and from 10^digits.
function general(value, digits) {
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = Number(exponent);
  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (power >= -4 && power < digits) return trim(value.toFixed(Math.max(0, digits - 1 - power)));
  return `${trim(mantissa)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

const themeButton = document.getElementById("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  themeButton.setAttribute("aria-pressed", String(dark));
}
themeButton.addEventListener("click", () => setTheme(themeButton.getAttribute("aria-pressed") !== "true"));
themeButton.setAttribute("aria-pressed", String(prefersDark.matches));
