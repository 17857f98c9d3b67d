"""What the explorer shows, in the report's own blocks."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from attngap.charts.heads import plain_map
from attngap.charts.law import success_curves
from attngap.explorer import choice
from attngap.explorer.sentence import MOST_TOKENS, Sentences
from attngap.explorer.story import STORY
from attngap.explorer.weights import DATA
from attngap.mechanisms.catalogue import catalogue
from attngap.report.page import Chart, Column, Form, Input, Section, Table, Text, render

MOST_CHARACTERS = 4000
SUMMARIES = ("first", "self", "previous", "top", "entropy")  # what `sentence.summary` says of a head
SENTENCE = "When Mary and John went to the store, John gave a drink to Mary. The store sold drinks to John and Mary."


def explorer(loaded: Sentences | None, plan: dict[str, Any] | None = None) -> str:
    """The whole page, for the models that are loaded and the plan that was found."""
    script = files("attngap.explorer").joinpath("assets", "explorer.js").read_text(encoding="utf-8")
    sections = [_law(), _weights(), _sentence(loaded), *_chat(loaded), *choice.section(plan), _results()]
    subtitle = "Why softmax can select where linear attention cannot. Move anything."
    return render("Explorer", sections, subtitle=subtitle, live=True, scripts=[script])


def _law() -> Section:
    sliders = [
        Input("range", "log10_n", "tokens n", 6, 1, 12, 0.1),
        Input("range", "needle", "needle a", 0.7, 0.1, 1.5, 0.01),
        Input("range", "scale", "scale s", 1, 0.1, 4, 0.05),
        Input("range", "d", "dimension d", 514, 4, 4098, 2),
        Input("range", "m", "read-outs m", 40, 1, 400, 1),
        Input("range", "b", "share b of the block part", 0.5, 0.1, 0.9, 0.05),
        Input("range", "a0", "needle of the other data set", 0.05, 0, 0.09, 0.01),
        Input("range", "degree", "polynomial degree", 4, 1, 64, 1),
    ]
    facts = [("softmax", "softmax separates with probability"), ("linear", "linear"), ("polynomial", "polynomial")]
    facts += [
        ("mass", "softmax's weight on the needle"),
        ("critical", "needle from which softmax concentrates"),
    ]
    chart = Chart(
        "law-curve",
        "Success against the needle",
        "Probability of telling the two data sets apart, against the size of the needle, for three kernels",
        success_curves().to_dict(),
        "Softmax turns from never to always within a few hundredths; linear attention with the same weights stays at "
        "zero. Exact at every n, by binomial tails. Solid: where the needle's slider stands. Dashed: where softmax "
        "concentrates as n grows, s a (1 + a) = 1.",
    )
    caveat = (
        "These are the weights of one construction, in the style of arXiv 2310.11685. Other weights let linear "
        "attention separate too; what it lacks is dynamic range: it needs a score ratio of n where softmax needs a "
        "logit gap of log n."
    )
    lead = "One needle among n tokens, m random sign read-outs: the probability that attention tells it is there."
    return Section("law", "The law", [Form("law-form", sliders, facts), chart, Text([caveat], "note")], lead)


def _weights() -> Section:
    inputs = [
        Input("select", "name", "mechanism", "elu", choices=catalogue()),
        Input("select", "data", "queries and keys", "repeat", choices=DATA),
        Input("range", "tokens", "tokens", 48, 8, 128, 1),
        Input("range", "sharpness", "sharpness of the queries", 2, 0.1, 8, 0.1),
        Input("range", "seed", "seed", 0, 0, 20, 1),
    ]
    facts = [("distance", "mean distance of the rows (total variation)")]
    facts += [
        ("top_softmax", "softmax's largest weight, mean"),
        ("top_mechanism", "the mechanism's largest weight, mean"),
    ]
    matrices = [("softmax", "softmax"), ("mechanism", "mechanism")]
    lead = "The same queries and keys, two mechanisms. Rows are queries; color is the size of the weight, sign dropped."
    return Section("weights", "Weights", [Form("weights-form", inputs, facts, matrices)], lead)


def writes(loaded: Sentences) -> bool:
    """Is it a language model that continues text?"""
    return loaded.model.get_output_embeddings() is not None and not loaded.model.config.is_encoder_decoder


def _sentence(loaded: Sentences | None) -> Section:
    if loaded is None:
        advice = "Start the explorer with a model to see its heads on your own sentence: attngap serve --model smollm2"
        return Section("sentence", "Your sentence", [Text([advice])])
    both = "converted" in loaded.models
    text = STORY if both else SENTENCE  # a short one would show two equal models
    inputs = [Input("text", "text", f"Text for {loaded.name}, up to {MOST_TOKENS} tokens", text)]
    colors = (*SUMMARIES, "changed") if both else SUMMARIES
    inputs.append(Input("select", "color", "Color by", "changed" if both else "first", choices=colors))
    form = Form("sentence-form", inputs, button="Show its heads")
    alt = "Every head of the model on this sentence, layers across, heads down"
    caption = "The brighter a square, the more. first, self, previous: mean weight on the first token, the row itself, "
    caption += "the one before; top: on the largest; entropy: how widely it spreads."
    if both:
        caption += " changed: the share of its attention that the converted model puts elsewhere."
    caption += " A dot marks heads that a diagnosis in these folders keeps. Click a square to open that head below."
    chart = Chart("sentence-map", "Heads on this sentence", alt, plain_map().to_dict(), caption)
    matrices = [(name, name) for name in loaded.models]
    lead = "Hover a row of a picture, or a word below: words are colored by the attention that row pays them"
    lead += ", in the model hovered last." if both else "."
    return Section(
        "sentence", "Your sentence", [form, chart, Form("sentence-head", [], matrices=matrices, words=True)], lead
    )


def _chat(loaded: Sentences | None) -> list[Section]:
    if loaded is None or not writes(loaded):
        return []
    names = list(loaded.models)
    inputs = [
        Input("text", "prompt", "You say", "Tell me about attention in two sentences."),
        Input("range", "tokens", "tokens per answer, at most", 80, 8, 400, 8),
    ]
    form = Form("chat-form", inputs, columns=names, button="Say it")
    lead = "The same words to each model, the likeliest token every time; below each the size of its cache as it grows."
    if len(names) == 1:
        lead += " Start with a folder written by attngap linearize to see both models side by side."
    return [Section("chat", "Talk to it", [form], lead)]


def _results() -> Section:
    tables = [
        Table("results-table", "Results", _columns("kind", "model", "time", "path"), []),
        Table("sweeps-table", "Sweeps", _columns("sweep", "done", "failed", "total", "last", "path"), []),
    ]
    lead = "Folders with results below the places the explorer was started with; running sweeps move on by themselves."
    return Section("results", "Stored results", tables, lead)


def _columns(*keys: str) -> Sequence[Column]:
    return [Column(key, key, wide=key in ("model", "sweep", "path")) for key in keys]
