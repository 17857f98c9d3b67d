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
    status.classList.remove("wrong");
    try {
      const started = performance.now();
      const note = await act(Object.fromEntries(new FormData(form)), signal);
      status.textContent = note ?? "";
      status.classList.remove("wrong");
      form.classList.remove("stale");
      remember();
      form.dataset.milliseconds = String(performance.now() - started);
      form.dataset.answered = String(Number(form.dataset.answered || 0) + 1);
    } catch (error) {
      if (error.name === "AbortError") return;
      status.textContent = error.message;
      status.classList.add("wrong");
      form.classList.add("stale"); // what stands below is not the answer to what stands above
    }
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); run(); });
  if (!onlyOnSubmit) form.addEventListener("input", run);
  return run;
}

// What is set, in the address: a view can be shared, and reloading keeps it.
const remembered = ["law-form", "weights-form", "sentence-form", "choice-form"];
let shownHead = "";
function remember() {
  const state = new URLSearchParams();
  for (const id of remembered) {
    for (const input of document.getElementById(id)?.elements ?? []) {
      if (input.name && input.value !== input.dataset.first) state.set(`${id.split("-")[0]}.${input.name}`, input.value);
    }
  }
  if (shownHead) state.set("head", shownHead);
  const text = state.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}
function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const id of remembered) {
    for (const input of document.getElementById(id)?.elements ?? []) {
      if (!input.name) continue;
      input.dataset.first = input.value;
      const value = state.get(`${id.split("-")[0]}.${input.name}`);
      if (value === null) continue;
      const was = input.value;
      input.value = value;
      if (input.value === "" && input.tagName === "SELECT") input.value = was; // no such choice any more
    }
  }
  shownHead = state.get("head") ?? "";
}
recall();

function showValues(form) {
  for (const input of form.querySelectorAll("input[type=range]")) {
    const text = input.name === "log10_n" ? rounded(10 ** Number(input.value)) : input.value;
    form.querySelector(`output[for="${input.id}"]`).textContent = text;
    input.setAttribute("aria-valuetext", text);
  }
}

// Digits up to a million, then powers of ten: 250,000 and 2.5 × 10⁹.
function rounded(n) {
  if (n < 1e7) return Number(n.toPrecision(3)).toLocaleString("en-US");
  const power = Math.floor(Math.log10(n) + 1e-9);
  const factor = (n / 10 ** power).toPrecision(2);
  const raised = [...String(power)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  return factor === "1.0" ? `10${raised}` : `${factor} × 10${raised}`;
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
const words = document.querySelector("#sentence-head .words");
let sentence = null;
const opened = {}; // the head on show, by model: roots and side of its picture
let hovered = "original"; // whose attention colors the words

function showRow(i, name = hovered) {
  hovered = name;
  const { side, roots } = opened[name];
  words.dataset.model = name;
  [...words.children].forEach((word, j) => {
    const weight = j < side ? roots[i * side + j] / 255 : 0;
    word.style.background = j <= i || weight ? `rgb(213 94 0 / ${weight})` : "none";
    word.classList.toggle("here", i === j);
  });
}

async function openSentenceHead(head) {
  const form = document.getElementById("sentence-head");
  const status = form.querySelector(".status");
  try {
    const answer = await ask(`api/sentence/${head.layer}/${head.head}`, { text: sentence.text });
    for (const [name, { roots, ...rest }] of Object.entries(answer.models)) {
      const figure = form.querySelector(`[data-matrix="${name}"]`);
      const data = { roots: bytesOf(roots), ...rest };
      const what = name === "converted" && head.replaced ? "replaced" : "softmax";
      opened[name] = data;
      const alt = `Attention of head ${head.id}, ${name}`;
      drawMatrix(figure, { ...data, tokens: answer.tokens, alt, onRow: (i) => showRow(i, name) });
      figure.querySelector("figcaption").textContent = `${name}, head ${head.id} (${what}), largest weight ${general(rest.top, 3)}`;
      figure.dataset.head = head.id;
    }
    words.replaceChildren(...answer.tokens.map((token, i) => make("span", { onpointerenter: () => showRow(i) }, token)));
    showRow(answer.tokens.length - 1);
    shownHead = head.id;
    remember();
    status.textContent = "";
    await views["sentence-map"].signal("chosen", head.id).runAsync();
  } catch (error) {
    status.textContent = error.message;
  }
}
async function colorSentence() {
  const by = sentenceForm.elements.color.value;
  const rows = sentence.heads.map((head) => ({ ...head, value: head[by], verdict: sentence.verdicts[head.id] }));
  await views["sentence-map"].data("heads", rows).runAsync();
  remember();
}
const runSentence = live(sentenceForm, async (values, signal) => {
  sentence = { text: values.text, ...(await ask("api/sentence", { text: values.text }, signal)) };
  await colorSentence();
  const most = (a, b) => ((b.changed ?? 0) > (a.changed ?? 0) ? b : a); // of one model: the first head
  await openSentenceHead(sentence.heads.find((head) => head.id === shownHead) ?? sentence.heads.reduce(most));
  const [shown, all] = [sentence.tokens.length, sentence.all_tokens];
  const cut = all > shown ? ` (the first of ${all}; the rest is left out)` : "";
  const verdicts = Object.keys(sentence.verdicts).length ? "; dots: heads that a diagnosis keeps" : "";
  const same = shown <= sentence.exact ? `; replaced heads are exact up to ${sentence.exact} tokens: write more to see them differ` : "";
  return `${shown} tokens${cut}, ${sentence.heads.length} heads${verdicts}${same}`;
}, true);
sentenceForm?.elements.color.addEventListener("change", () => sentence && colorSentence());

const choiceForm = document.getElementById("choice-form");
const runChoice = live(choiceForm, async (values, signal) => {
  const { kept, share, sentence: words, perplexity_ratio: ratio, recalled } = await ask("api/choice", values, signal);
  const percent = (value) => `${(100 * value).toFixed(0)}%`;
  fact(choiceForm, "share", percent(share));
  fact(choiceForm, "perplexity", ratio ? ratio.value.toFixed(3) : "–");
  fact(choiceForm, "recall", recalled ? percent(recalled.value) : "–");
  const drawnHere = ["choice-perplexity_ratio", "choice-recalled"].filter((id) => views[id]);
  await Promise.all(drawnHere.map((id) => views[id].signal("chosen", kept).runAsync()));
  return words;
});

// A conversation: each model has its own history, all hear the same words.
const chatForm = document.getElementById("chat-form");
const histories = {};
async function talk(values, signal) {
  const replies = {};
  const button = chatForm.querySelector("button[type=submit]");
  button.disabled = true; // one question at a time: the next one needs this one's answers
  try {
    await hear(values, signal, replies);
  } finally {
    button.disabled = false;
    for (const [name, content] of Object.entries(replies)) {
      if (content) (histories[name] ??= []).push({ role: "user", content: values.prompt }, { role: "assistant", content });
    }
  }
  return "";
}
async function hear(values, signal, replies) {
  const columns = [...chatForm.querySelectorAll("[data-talk]")];
  const asked = {};
  for (const column of columns) {
    const name = column.dataset.talk;
    asked[name] = [...(histories[name] ?? []), { role: "user", content: values.prompt }];
    column.querySelector(".said").append(make("b", {}, values.prompt), make("span", { class: "reply" }));
  }
  const body = JSON.stringify(asked);
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(`api/chat?${new URLSearchParams({ tokens: values.tokens })}`, { method: "POST", body, headers, signal });
  if (!response.ok) throw new Error((await response.json()).error ?? `The server answered ${response.status}`);
  for (const column of columns) replies[column.dataset.talk] = "";
  const spent = {};
  let rest = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const step = JSON.parse(line);
      const column = chatForm.querySelector(`[data-talk="${step.model}"]`);
      if (step.error) throw new Error(`${step.model}: ${step.error}`);
      if (step.done) continue;
      replies[step.model] += step.text;
      (spent[step.model] ??= []).push(step.seconds);
      const said = column.querySelector(".said");
      said.lastChild.textContent = replies[step.model];
      said.scrollTop = said.scrollHeight;
      const later = spent[step.model].slice(1); // the first reads the prompt
      const rate = later.length ? `, ${general(later.length / later.reduce((a, b) => a + b, 0), 3)} tokens/s` : "";
      column.querySelector(".size").textContent = `${step.tokens.toLocaleString("en-US")} tokens, cache ${(step.cache_bytes / 1e6).toFixed(1)} MB${rate}`;
    }
  }
}
if (chatForm) {
  live(chatForm, talk, true);
  chatForm.addEventListener("input", () => showValues(chatForm));
  showValues(chatForm);
}

const resultsLead = document.querySelector("#results .lead");
const resultsWords = resultsLead.textContent;
async function refreshResults() {
  try {
    const { results, sweeps } = await ask("api/results", {});
    tables["results-table"](results.map((row) => ({ ...row, href: `report/${row.number}` })));
    tables["sweeps-table"](sweeps);
    resultsLead.textContent = resultsWords;
  } catch (error) {
    resultsLead.textContent = `The server does not answer: ${error.message}`;
  }
}

await Promise.all([...drawn.values()]);
views["sentence-map"]?.addEventListener("click", (_, item) => item?.datum?.id && openSentenceHead(item.datum));
await Promise.all([runLaw(), runWeights(), runSentence(), runChoice(), refreshResults()]);
setInterval(refreshResults, 3000);
