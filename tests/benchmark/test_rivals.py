"""The comparison's own logic, against plain transformers and by counting."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attngap.errors import AttngapError
from attngap.heads.passages import language_reference
from attngap.heads.replacement import window_only
from attngap.models.cache import cache_bytes
from attngap.models.shapes import layer_shapes
from tests import zoo
from tests.benchmark.rival_models import featured, llama, sharp, tokens


@torch.no_grad()
def test_a_handed_over_cache_whose_window_holds_all_continues_as_the_original_does(rivals):
    model, read, more = llama(), tokens(60), tokens(20, 1)
    near = {shape.layer: window_only(shape, 100, 4) for shape in layer_shapes(model)}
    converted = rivals.conversions.Parts(model, near, None).convert([(0, 1)])
    layers, _ = rivals.conversions.read_exactly(model, read)
    cache = rivals.conversions.handed_over(converted, layers)
    wanted = model(input_ids=torch.tensor([read + more])).logits[0, 60:]
    torch.testing.assert_close(rivals.asking.read_on(converted, cache, 60, more), wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_in_one_layer_a_handed_over_cache_is_what_the_converted_model_would_hold(rivals):
    model, read, more = llama(layers=1), tokens(60), tokens(20, 1)
    converted = rivals.conversions.Parts(model, featured(model, 8), None).convert([(0, 1)])
    layers, _ = rivals.conversions.read_exactly(model, read)
    handed = rivals.conversions.handed_over(converted, layers)
    own, _ = rivals.conversions.read_throughout(converted, read)
    assert cache_bytes(handed) == cache_bytes(own)
    answers = [rivals.asking.read_on(converted, cache, 60, more) for cache in (handed, own)]
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_as_many_groups_are_kept_as_the_bytes_of_a_real_cache_allow(rivals):
    model, read = llama(), tokens(200)
    parts = rivals.conversions.Parts(model, featured(model, 8), None)
    full = rivals.asking.full_bytes(model.config, 200)
    layers, _ = rivals.conversions.read_exactly(model, read)
    assert sum(x.numel() * 4 for layer in layers for x in (layer.k, layer.v)) == full
    budget = next(share / 100 for share in range(100) if parts.affordable(share / 100, 200) == 1)
    count = parts.affordable(budget, 200)
    order = [(0, 0), (1, 0)]  # a layer that keeps all its groups would hold no states at all
    sizes = [cache_bytes(rivals.conversions.handed_over(parts.convert(order[:n]), layers)) for n in (count, count + 1)]
    assert sizes[0] <= budget * full < sizes[1] + 32  # counts of tokens are not of the state's size
    assert parts.affordable(0.01, 200) < 0


@torch.no_grad()
def test_sinks_and_window_in_all_heads_are_as_wide_as_the_budget_allows(rivals):
    model, read = llama(), tokens(200)
    parts = rivals.conversions.Parts(model, featured(model, 8), None)
    layers, _ = rivals.conversions.read_exactly(model, read)
    wide = rivals.conversions.widest(parts, 0.5, 200)
    allowed = 0.5 * rivals.asking.full_bytes(model.config, 200)
    sizes = []
    for window in (wide.window, wide.window + 1):
        shaped = rivals.conversions.Form(window, features=False).of(parts)
        sizes.append(cache_bytes(rivals.conversions.handed_over(shaped.convert([]), layers)))
    assert sizes[0] <= allowed + 32 * len(layers)  # counts of tokens are not of the state's size
    assert sizes[1] > allowed


def test_bytes_are_of_the_heads_own_size_where_a_model_names_one(rivals):
    config = SimpleNamespace(head_dim=64, hidden_size=48, num_attention_heads=6)
    assert rivals.asking.head_dim(config) == 64
    config.head_dim = None
    assert rivals.asking.head_dim(config) == 8


def test_another_window_leaves_the_features_as_they_are(rivals):
    mechanism = featured(llama(), 8)[0]
    other = rivals.conversions.with_window(mechanism, 16)
    assert (mechanism.window, other.window) == (8, 16)
    for name, value in mechanism.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)


class Last:
    """A press as kvpress writes them: the last tokens only."""

    def compress(self, module, hidden, keys, values, attentions, kwargs):
        return keys[:, :, -10:], values[:, :, -10:]


@torch.no_grad()
def test_one_pass_serves_the_original_and_every_press(rivals):
    model, more = llama(), tokens(5, 1)
    row = {"context": tokens(60)}
    full, held, _, _ = rivals.presses.prefill(model, row, {"last": Last()})
    wanted = model(input_ids=torch.tensor([row["context"] + more])).logits[0, 60:]
    for _ in range(2):  # a question leaves the cache as it was
        found = rivals.asking.read_on(model, rivals.presses.as_cache(full), 60, more)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert rivals.presses.share_of(model, row, held["last"]) == pytest.approx(1 / 6)
    pruned = rivals.asking.read_on(model, rivals.presses.as_cache(held["last"]), 60, more)
    assert (pruned - wanted).abs().max() > 1e-3


def test_streaming_groups_and_kept_ones_fill_the_budget(rivals):
    scores = torch.arange(90.0).view(30, 3)
    row = {"context": [0] * 4096}
    kept = rivals.presses.kept_groups(row, 0.25, scores)
    near = rivals.presses.SINKS + rivals.presses.RECENT
    held = int(kept.sum()) * 4096 + int((~kept).sum()) * near
    assert 0.25 - 1 / 90 < held / (90 * 4096) <= 0.25
    assert scores[kept].min() > scores[~kept].max()
    assert rivals.presses.kept_groups(row, 0.09, scores) is None  # sinks and recent tokens alone take more


def test_what_is_not_installed_is_skipped_by_name_with_its_command(rivals, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals.presses.importlib.util, "find_spec", lambda name: None)
    rivals.presses.kvpress(SimpleNamespace(output=tmp_path))
    said = capsys.readouterr().out
    assert "SnapKV" in said
    assert "KVzip" in said
    assert "pip install kvpress" in said


def test_a_stopped_run_goes_on_behind_its_last_whole_line(rivals, tmp_path):
    row = {"kind": "text", "length": 64, "example": 0}
    answers = rivals.asking.Answers(tmp_path)
    answers.add("SnapKV", 0.25, row, share=0.25, scores=[])
    path = tmp_path / rivals.asking.ANSWERS
    path.write_text(path.read_text() + '{"method": "SnapKV", "budget": 0.1')
    again = rivals.asking.Answers(tmp_path)
    assert again.missing("SnapKV", [0.25, 0.1], row) == [0.1]
    again.add("SnapKV", 0.1, row, share=0.1, scores=[])
    assert [json.loads(line)["budget"] for line in path.read_text().splitlines()] == [0.25, 0.1]


def test_a_context_says_what_it_is_asked_for_and_the_text_goes_on(rivals):
    words, text = zoo.tokenizer(), "\n\n".join(language_reference())[:60_000]
    made = rivals.contexts.make("text", words, text, 3000, 1)
    ids = words(text, add_special_tokens=False).input_ids
    (task, first, rest), *others = made["questions"]
    assert task == "text"
    assert len(made["context"]) + len(first) + len(rest) == 3000
    spoken = ",".join(map(str, ids))
    assert ",".join(map(str, first + rest)) in spoken
    body = ",".join(map(str, made["context"]))
    assert [task for task, *_ in others] == ["needle", *["needles"] * rivals.contexts.NEEDLES, "copying"]
    for _, _, answer in others:
        assert ",".join(map(str, answer)) in body
    assert rivals.contexts.make("text", words, text, 3000, 1) == made


def test_a_length_beyond_the_positions_is_refused_with_the_number(rivals):
    with pytest.raises(AttngapError, match="A length of 512 is beyond this model's 256 positions"):
        rivals.contexts._check_lengths(llama(), [128, 512])


def comparison(rivals, folder: Path) -> tuple:
    """A small model, its parts, and contexts of one length with their questions."""
    model = sharp(llama())
    made = [
        {"kind": "text", "length": 100, "example": i, "context": tokens(100, i), "questions": [["text", [1], [2, 3]]]}
        for i in range(2)
    ]
    folder.mkdir(exist_ok=True)
    (folder / rivals.asking.CONTEXTS).write_text("".join(json.dumps(row) + "\n" for row in made))
    (folder / "our-scores.json").write_text(json.dumps({"groups": [[4.0, 3.0], [2.0, 1.0]], "seconds": 1}))
    chosen = {"100": {"0.5": [{"window": 8, "features": False}], "0.9": [{"window": 16, "features": True}]}}
    (folder / "forms.json").write_text(json.dumps(chosen))
    asked = {"output": folder, "lengths": [100], "budgets": [0.9, 0.5], "examples": 2, "kinds": ["text"]}
    return rivals.conversions.Parts(model, featured(model, 8), None), SimpleNamespace(
        model="", window=None, only=["attngap", "attngap, throughout"], **asked
    )


def test_a_stopped_comparison_goes_on_where_it_stopped_and_comes_to_the_same(rivals, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals.conversions, "load_parts", lambda *args: parts)
    found = {}
    for name, stops in (("whole", ()), ("stopped", (1, 3, 4))):
        parts, options = comparison(rivals, tmp_path / name)
        add, asked = rivals.asking.Answers.add, []

        def count(self, method, budget, row, *, add=add, asked=asked, stops=stops, **scores):
            asked.append((method, budget, row["example"]))
            if len(asked) in stops:
                raise KeyboardInterrupt
            add(self, method, budget, row, **scores)

        monkeypatch.setattr(rivals.asking.Answers, "add", count)
        for _ in stops:
            with pytest.raises(KeyboardInterrupt):
                rivals.conversions.ours(options)
        rivals.conversions.ours(options)
        monkeypatch.setattr(rivals.asking.Answers, "add", add)
        lines = rivals.asking.read_lines(tmp_path / name / rivals.asking.ANSWERS)
        found[name] = {(r["method"], r["budget"], r["example"]): (r["share"], r["scores"]) for r in lines}
        assert len(found[name]) == len(lines) == 2 * (1 + 2 + 1)  # the original, two budgets, once throughout
        assert len(asked) == len(lines) + len(stops)
    assert found["whole"] == found["stopped"]


def rows(method: str, score, divergence: float) -> list[dict]:
    found = []
    for i in range(4):
        asked = [["text", [divergence + 0.001 * j for j in range(64)], [1.0] * 64]]
        asked += [["needles", score(6 * i + j)] for j in range(6)]
        at = {"kind": "text", "length": 1024, "example": i}
        found.append({"method": method, "budget": 0.25, **at, "share": 0.25, "scores": asked})
    return found


def test_a_difference_within_noise_is_called_that_and_a_clear_one_is_not(rivals):
    t = rivals.tables
    ours = t.gather(rows(t.OURS, lambda i: float(i % 8 != 0), 0.02))
    better, same = t.gather(rows("a", lambda i: 1.0, 0.02)), t.gather(rows("b", lambda i: float(i % 8 != 1), 0.02))
    worse = t.gather(rows("c", lambda i: float(i % 2), 0.05))
    assert t.verdict(t.recall_interval(ours, worse), more_is_better=True) == t.AHEAD
    assert t.verdict(t.recall_interval(ours, same), more_is_better=True) == t.LEVEL
    assert t.verdict(t.recall_interval(worse, better), more_is_better=True) == t.BEHIND
    assert t.verdict(t.divergence_interval(ours, worse), more_is_better=False) == t.AHEAD
    assert t.verdict(t.divergence_interval(ours, same), more_is_better=False) == t.LEVEL


def test_methods_are_compared_on_the_contexts_that_both_have_read(rivals):
    t = rivals.tables
    found = t.cells([*rows(t.OURS, lambda i: 1.0, 0.0)[:2], *rows("a", lambda i: float(i < 12), 0.1)], 1024, 0.25)
    assert found["a"].mean_recall == 1.0  # its last two contexts, all wrong, are not ours
    assert len(found["a"].recall["needles"]) == 12
    partly = t.cells([*rows(t.OURS, lambda i: 1.0, 0.0), *rows("a", lambda i: 1.0, 0.1)[:2]], 1024, 0.25)
    assert "a" not in partly
    assert math.isclose(found["a"].mean_divergence, 0.1 + 0.001 * 31.5)


def test_what_the_original_cannot_do_does_not_count(rivals):
    t = rivals.tables
    original = rows(t.ORIGINAL, lambda i: float(i < 2), 0.0)
    for row in original:
        row["scores"].append(["copying", 1.0])
        row["budget"] = None
    ours = rows(t.OURS, lambda i: 0.0, 0.0)
    for row in ours:
        row["scores"].append(["copying", 0.5])
    found = t.cells([*original, *ours], 1024, 0.25)
    assert list(found[t.OURS].recall) == ["copying"]
    assert found[t.OURS].mean_recall == 0.5


def test_where_the_original_solves_nothing_recall_is_a_dash_and_nobody_is_ahead(rivals):
    t = rivals.tables
    original = [row | {"budget": None} for row in rows(t.ORIGINAL, lambda i: 0.0, 0.0)]
    lines = t.table(t.cells([*original, *rows(t.OURS, lambda i: 0.0, 0.1), *rows("a", lambda i: 1.0, 0.1)], 1024, 0.25))
    assert lines[-1].split(" | ")[-3:] == ["-", t.LEVEL, f"{t.LEVEL} |"]


def test_a_page_is_written_anew_between_its_marks_only(rivals):
    page = "before\n<!-- costs: written by benchmarks/rivals -->\nold\n<!-- end of costs -->\nafter\n"
    found = rivals.tables.fill(page, "costs", ["new"])
    assert found == page.replace("old", "new")
    with pytest.raises(SystemExit, match="no marks"):
        rivals.tables.fill(page, "tables", [])


@torch.no_grad()
def test_questions_are_asked_of_the_cache_as_it_was(rivals, tmp_path):
    model = llama()
    row = {"kind": "text", "length": 64, "example": 0, "context": tokens(60)}
    row["questions"] = [["text", [1], tokens(40, 2)], ["needle", [2, 3], [4, 5]], ["needle", [2, 3], [4, 5]]]
    full, *_ = rivals.presses.prefill(model, row, {})
    answers = rivals.asking.Answers(tmp_path)
    answers.ask("original", None, row, model, lambda: rivals.presses.as_cache(full), 1.0, 0.0)
    near = {shape.layer: window_only(shape, 100, 4) for shape in layer_shapes(model)}
    converted = rivals.conversions.Parts(model, near, None).convert([])
    layers, _ = rivals.conversions.read_exactly(model, row["context"])
    cache = rivals.conversions.handed_over(converted, layers)
    answers.ask("ours", 0.5, row, converted, lambda: copy.deepcopy(cache), 1.0, 0.0)
    first, second = rivals.asking.read_lines(tmp_path / rivals.asking.ANSWERS)
    for line in (first, second):
        (_, divergence, _), *others = line["scores"]
        assert max(divergence) < 1e-3  # the original's logits are kept in half precision
        assert others[0] == others[1]
    assert first["scores"][1:] == second["scores"][1:]
