// Attention weights as a picture: one pixel a cell, color the square root of the weight so that faint ones can be seen.
// From clear over blue to orange, readable in both themes.
const heatStops = [[130, 180, 222, 0], [130, 180, 222, 255], [42, 120, 181, 255], [110, 30, 90, 255], [213, 94, 0, 255]];
function heat(value) {
  const at = Math.min(1, Math.max(0, value)) * (heatStops.length - 1);
  const i = Math.min(heatStops.length - 2, Math.floor(at));
  return heatStops[i].map((low, c) => low + (at - i) * (heatStops[i + 1][c] - low));
}

// Tokens along both sides, as many as have room.
function labelMatrix(figure, canvas, tokens, side) {
  let box = canvas.closest(".labels");
  if (!box) {
    box = make("div", { class: "labels" });
    canvas.replaceWith(box);
    box.append(make("div", { class: "across", "aria-hidden": "true" }), make("div", { class: "down", "aria-hidden": "true" }), canvas);
  }
  const step = Math.max(1, Math.ceil((side * 12) / (canvas.clientWidth || 320)));
  const place = (name) => (token, i) => (i % step ? [] : [make("span", { style: `${name}: ${(100 * (i + 0.5)) / side}%` }, token)]);
  box.querySelector(".across").replaceChildren(...tokens.flatMap(place("left")));
  box.querySelector(".down").replaceChildren(...tokens.flatMap(place("top")));
}

// `roots` are square roots of weights in whole numbers up to `most`, which stands for a weight of `top`; a cell covers
// `width` tokens.
function drawMatrix(figure, { roots, side, most = 255, top = 1, width = 1, tokens = null, alt = "", onRow = null }) {
  const canvas = figure.querySelector("canvas");
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  for (let i = 0; i < side * side; i += 1) image.data.set(heat(roots[i] / most), 4 * i);
  context.putImageData(image, 0, 0);
  canvas.setAttribute("aria-label", alt);
  if (tokens) labelMatrix(figure, canvas, tokens, side);
  const readout = figure.querySelector(".readout");
  readout.textContent = "";
  const span = (k) => (width === 1 ? `${k}` : `${Math.round(k * width)}–${Math.round((k + 1) * width) - 1}`);
  const token = (k) => (tokens && tokens[k] !== undefined ? ` ${JSON.stringify(tokens[k])}` : "");
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (part) => Math.min(side - 1, Math.max(0, Math.floor(part * side)));
    const j = cell((event.clientX - box.left) / box.width);
    const i = cell((event.clientY - box.top) / box.height);
    onRow?.(i);
    const weight = (roots[i * side + j] / most) ** 2 * top;
    readout.textContent = `query ${span(i)}${token(i)}, key ${span(j)}${token(j)}: ${general(weight, most < 255 ? 1 : 2)}`;
  };
}
