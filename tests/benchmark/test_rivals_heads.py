"""Which heads are kept, and in which form the others are, against what must be so."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attngap.heads.replacement import window_only
from attngap.models.shapes import layer_shapes
from tests import zoo
from tests.benchmark.rival_models import featured, llama, sharp, tokens


def test_groups_rank_by_when_they_were_dropped(rivals):
    first = {(layer, g): float(10 * layer + g) for layer in range(10) for g in range(3)}
    asked = []

    def gains(kept):
        asked.append(set(kept))
        return {group: -first[group] for group in kept}  # the order turns round after each look

    found = rivals.scores.ranks(first, gains)
    assert asked[0] == set(sorted(first, key=first.get)[-12:])
    assert all(later < earlier for earlier, later in itertools.pairwise(asked))
    best = sorted(found, key=found.get, reverse=True)
    assert set(best[: len(asked[-1])]) == asked[-1]
    assert sorted(found.values()) == [float(i) for i in range(1, 31)]


def test_entropy_of_even_rows_is_the_logarithm_of_their_length(rivals):
    found = rivals.scores.row_entropy(torch.zeros(2, 3, 4), torch.randn(8, 4), 1.0, 5)
    torch.testing.assert_close(found, torch.tensor([6.0, 7.0, 8.0]).log().expand(2, 3))


def test_a_group_that_nothing_reads_is_not_missed_when_silenced(rivals):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :32] = 0  # the first of two groups of two heads
    ids = torch.tensor([tokens(40)])
    asked = torch.arange(40) > 30
    whole = rivals.scores.answered(model, ids, asked, None, 2)
    assert rivals.scores.answered(model, ids, asked, (1, 0), 2) == pytest.approx(whole, abs=1e-6)
    assert rivals.scores.answered(model, ids, asked, (1, 1), 2) != pytest.approx(whole, abs=1e-6)


def ends(rivals, model, sizes: tuple[int, ...] = (120, 90)):
    """Slices at the ends of random passages that the original has read."""
    from attngap.conversion.slices import Slice, read_past

    pasts = [read_past(model, torch.tensor([tokens(size, size)])) for size in sizes]
    return [Slice(past, past.tokens.shape[1] - 30, past.tokens.shape[1]) for past in pasts]


@torch.no_grad()
def test_open_gates_are_the_original_and_closed_ones_sinks_and_window(rivals):
    from attngap.conversion.slices import read_slice, teacher_logits

    model = sharp(llama())
    near = {shape.layer: window_only(shape, 8, 2) for shape in layer_shapes(model)}
    for piece in ends(rivals, model):
        for share, wanted in (
            (1.0, teacher_logits(model, near, piece)),
            (0.0, read_slice(model, near, piece, frozenset())),
        ):
            gate = {layer: torch.full((2,), share) for layer in near}
            found = rivals.gates.gated(model, piece, gate, 8, 2)
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)  # the past is held in half precision
        one = rivals.gates.gated(model, piece, {1: torch.zeros(2)}, 8, 2)
        kept = read_slice(model, {1: near[1]}, piece, frozenset())
        torch.testing.assert_close(one, kept, atol=2e-3, rtol=1e-3)
        assert (one - teacher_logits(model, near, piece)).abs().max() > 0.05


def test_a_gate_that_nothing_reads_closes_first(rivals):
    model = sharp(llama())
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :32] = 0  # the first of two groups of two heads
    found = rivals.gates.train_gates(model, [0, 1], ends(rivals, model), 8, 2, steps=20)
    assert found[1][0] < 0.2
    assert min(found[0] + found[1][1:]) > found[1][0] + 0.2


def test_a_layer_that_nothing_reads_is_the_last_to_be_kept(rivals, monkeypatch):
    model = sharp(llama(layers=3))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    parts = rivals.conversions.Parts(model, featured(model, 8), None)
    monkeypatch.setattr(rivals.scores, "tokenizer_of", lambda folder: None)
    monkeypatch.setattr(rivals.scores, "slices", lambda *args, **kwargs: ends(rivals, model))
    found = rivals.scores.layers(parts, Path())
    assert all(len(set(groups)) == 1 for groups in found)  # a layer's groups stand or fall together
    assert found[1][0] < min(found[0][0], found[2][0]) / 10


def test_what_scores_read_ends_in_questions_and_in_a_second_time(rivals):
    words = zoo.tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=len(words))).eval()
    facts, repeated, text = rivals.scores.slices(model, words, 300, facts=2000, text=1200)
    assert [piece.stop - piece.start for piece in (facts, repeated, text)] == [rivals.scores.ROWS] * 3
    assert [piece.stop for piece in (facts, repeated, text)] == [2000, 1024, 1200]
    assert "n u m b e r" in words.decode(facts.past.tokens[0, facts.start : facts.stop])  # a letter a token
    again = repeated.past.tokens[0]
    assert any(torch.equal(again[p:], again[:-p]) for p in range(301, 513))


@torch.no_grad()
def test_forms_are_judged_at_the_groups_they_leave_room_for_and_the_best_is_taken(rivals, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals.forms, "WINDOWS", (4, 32))
    monkeypatch.setattr("attngap.models.prefill.NARROWEST", 16)
    model = sharp(llama())
    parts, scores = rivals.conversions.Parts(model, featured(model, 8), None), [[4.0, 3.0], [2.0, 1.0]]
    pieces = ends(rivals, model)
    queries = {layer: [torch.randn(1, 4, 20, 16) for _ in pieces] for layer in parts.mechanisms}
    found = rivals.forms.judge(parts, lambda window: scores, pieces, queries, [0.95, 0.05], 120)
    assert found[0.05] == []
    rows = found[0.95]
    assert [row["mean"] for row in rows] == sorted(row["mean"] for row in rows)
    groups = {(row["window"], row["features"]): row["groups"] for row in rows if not row["held"]}
    shares = {(row["window"], row["held"]) for row in rows}
    assert shares == {(4, 0.0), (32, 0.0), (32, 0.5)}  # the narrow window has nothing to give away
    for (window, features), count in groups.items():
        shaped = rivals.conversions.Form(window, features).of(parts)
        assert count == shaped.affordable(0.95, 120)
        assert next(iter(shaped.mechanisms.values())).window == window
    assert groups[4, False] >= groups[32, False]
    assert groups[4, False] >= groups[4, True]  # features take a little room
    (tmp_path / rivals.conversions.FORMS).write_text(json.dumps({"120": {"0.95": rows, "0.05": []}}))
    best = rivals.conversions.chosen_form(tmp_path, 120, 0.95, lambda form: True)
    assert best == tuple(rows[0][name] for name in ("window", "features", "held"))
    near = rivals.conversions.chosen_form(tmp_path, 120, 0.95, lambda form: not form.features)
    assert near[:2] == next((row["window"], False) for row in rows if not row["features"])
    assert rivals.conversions.chosen_form(tmp_path, 120, 0.05, lambda form: True) is None


@torch.no_grad()
def test_slices_follow_what_a_cache_holds_after_an_exact_prompt(rivals, monkeypatch):
    monkeypatch.setattr("attngap.models.prefill.NARROWEST", 2)
    model = sharp(llama())
    parts = rivals.conversions.Parts(model, featured(model, 8), None, 0.5)
    piece = ends(rivals, model)[0]
    layers, _ = rivals.conversions.read_exactly(model, piece.past.tokens[0, : piece.start].tolist())
    queries = {i: [layer.q] for i, layer in enumerate(layers)}
    found = rivals.forms.after_exact(parts, [piece], queries).read(0, frozenset())
    converted = parts.convert([])
    cache = rivals.conversions.handed_over(converted, layers, 0.5)
    after = piece.past.tokens[:, piece.start : piece.stop]
    want = converted(input_ids=after, past_key_values=cache).logits
    torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)  # the past of slices is kept in half precision
    plain = rivals.forms.after_exact(rivals.conversions.Parts(model, parts.mechanisms, None), [piece], queries)
    assert (plain.read(0, frozenset()) - want).abs().max() > 1e-2
