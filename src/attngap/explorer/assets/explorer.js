// The live page: inputs ask the server, answers go into facts, charts and pictures.
async function ask(path, values, signal) {
  const response = await fetch(`${path}?${new URLSearchParams(values)}`, { signal });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || answer.detail?.[0]?.msg || `The server answered ${response.status}`);
  return answer;
}

// Calls `act(values, signal)` now and at every change; a newer change cancels an older question.
function live(form, act, onlyOnSubmit = false) {
  if (!form) return () => {};
  let pending = null;
  const status = form.querySelector(".status");
  async function run() {
    pending?.abort();
    pending = new AbortController();
    const { signal } = pending;
    showValues(form);
    try {
      const started = performance.now();
      const note = await act(Object.fromEntries(new FormData(form)), signal);
      status.textContent = note ?? "";
      status.classList.remove("wrong");
      form.dataset.milliseconds = String(performance.now() - started);
      form.dataset.answered = String(Number(form.dataset.answered || 0) + 1);
    } catch (error) {
      if (error.name === "AbortError") return;
      status.textContent = error.message;
      status.classList.add("wrong");
    }
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); run(); });
  if (!onlyOnSubmit) form.addEventListener("input", run);
  return run;
}

function showValues(form) {
  for (const input of form.querySelectorAll("input[type=range]")) {
    const text = input.name === "log10_n" ? general(10 ** Number(input.value), 3) : input.value;
    form.querySelector(`output[for="${input.id}"]`).textContent = text;
    input.setAttribute("aria-valuetext", text);
  }
}

function fact(form, name, text) {
  form.querySelector(`[data-fact="${name}"]`).textContent = text;
}

// Probabilities near 1 are told from 1, near 0 from 0.
function probability(p) {
  if (p > 0.9995 && p < 1) return `1 − ${general(1 - p, 2)}`;
  return general(p, 4);
}

const lawForm = document.getElementById("law-form");
const runLaw = live(lawForm, async (values, signal) => {
  const answer = await ask("api/law", values, signal);
  for (const [name, success] of Object.entries(answer.success)) {
    const element = lawForm.querySelector(`[data-fact="${name}"]`);
    element.textContent = probability(success);
    element.dataset.value = String(success);
  }
  fact(lawForm, "mass", probability(answer.mass.softmax));
  fact(lawForm, "critical", general(answer.concentrates_from, 4));
  const view = views["law-curve"];
  await view.signal("needle", Number(values.needle)).signal("critical", answer.concentrates_from).runAsync();
  // The numbers first; the curve, a hundred times the work, follows and the next move cancels it.
  ask("api/law/curve", values, signal).then((curve) => view.data("law", curve).runAsync(), (error) => {
    if (error.name !== "AbortError") throw error;
  });
  return `n = ${answer.n.toLocaleString("en-US")}, the nearest multiple of d − 2`;
});

const weightsForm = document.getElementById("weights-form");
const runWeights = live(weightsForm, async (values, signal) => {
  const answer = await ask("api/weights", values, signal);
  for (const name of ["softmax", "mechanism"]) {
    const figure = weightsForm.querySelector(`[data-matrix="${name}"]`);
    const label = name === "softmax" ? "softmax" : values.name;
    const { roots, ...rest } = answer[name];
    drawMatrix(figure, { roots: bytesOf(roots), ...rest, alt: `Weights of ${label}` });
    figure.querySelector("figcaption").textContent = `${label}, largest weight ${general(answer[name].top, 3)}`;
  }
  fact(weightsForm, "distance", general(answer.distance, 3));
  fact(weightsForm, "top_softmax", general(answer.top_softmax, 3));
  fact(weightsForm, "top_mechanism", general(answer.top_mechanism, 3));
  const notes = [];
  if (answer.untrained) notes.push("its parameters are as they start, untrained");
  if (!answer.normalized) notes.push("its rows do not sum to one");
  return notes.length ? `${values.name}: ${notes.join("; ")}` : "";
});

const sentenceForm = document.getElementById("sentence-form");
let sentence = null;
async function openSentenceHead(head) {
  const answer = await ask(`api/sentence/${head.layer}/${head.head}`, { text: sentence.text });
  const figure = document.querySelector('[data-matrix="head"]');
  drawMatrix(figure, { ...answer, roots: bytesOf(answer.roots), alt: `Attention of head ${head.id}` });
  figure.querySelector("figcaption").textContent = `head ${head.id}, largest weight ${general(answer.top, 3)}`;
  figure.dataset.head = head.id;
  await views["sentence-map"].signal("chosen", head.id).runAsync();
}
async function colorSentence() {
  const by = sentenceForm.elements.color.value;
  const rows = sentence.heads.map((head) => ({ ...head, value: head[by] }));
  await views["sentence-map"].data("heads", rows).runAsync();
}
const runSentence = live(sentenceForm, async (values, signal) => {
  sentence = { text: values.text, ...(await ask("api/sentence", { text: values.text }, signal)) };
  await colorSentence();
  await openSentenceHead(sentence.heads[0]);
  return `${sentence.tokens.length} tokens, ${sentence.heads.length} heads`;
}, true);
sentenceForm?.elements.color.addEventListener("change", () => sentence && colorSentence());

async function refreshResults() {
  try {
    const { results, sweeps } = await ask("api/results", {});
    tables["results-table"](results.map((row) => ({ ...row, href: `report/${row.number}` })));
    tables["sweeps-table"](sweeps);
  } catch (error) {
    document.querySelector("#results .lead").textContent = `The server does not answer: ${error.message}`;
  }
}

await Promise.all([...drawn.values()]);
views["sentence-map"]?.addEventListener("click", (_, item) => item?.datum?.id && openSentenceHead(item.datum));
await Promise.all([runLaw(), runWeights(), runSentence(), refreshResults()]);
setInterval(refreshResults, 3000);
