"""The whole diagnosis on small models: complete, repeatable, resumable, and never half-written."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from attngap.conversion.linearize import linearize
from attngap.diagnosis import stages
from attngap.diagnosis.diagnose import _stress, diagnose, headline_rank
from attngap.diagnosis.linear import with_mixing
from attngap.diagnosis.result import Diagnosis
from attngap.diagnosis.run import Shape
from attngap.errors import AttngapError
from attngap.heads.inputs import layer_inputs
from attngap.mechanisms.catalogue import mechanism
from attngap.models.capture import capture
from attngap.models.shapes import layer_shapes
from attngap.models.swap import swap
from attngap.storage.checkpoint import PIECES
from tests import zoo

TEXT = " ".join(f"{i} bottles of beer on the wall, {i} bottles of beer." for i in range(400))
OPTIONS = {"context": 48, "passages": 2, "ranks": (2, 4), "window": 6, "sinks": 2, "draws": 2}


def run(family="llama", **changes):
    model = zoo.tiny(family)
    specials = family in ("bert", "albert")
    return diagnose(model, zoo.tokenizer(specials), TEXT, **OPTIONS | changes)


@pytest.fixture(scope="module")
def found():
    return run(verify=4)


def comparable(result: Diagnosis) -> dict:
    return result.model_dump(exclude={"seconds", "provenance"})


def test_every_head_is_complete(found):
    assert [head.id for head in found.heads] == [f"{layer}.{head}" for layer in range(2) for head in range(4)]
    for head in found.heads:
        assert head.kv_head == head.head // 2
        assert math.isclose(head.sink + head.near + head.far, 1, abs_tol=1e-5)
        assert len(head.floors) == len(head.ceilings) == len(head.unavoidables) == 2
        assert all(low <= high + 1e-9 for low, high in zip(head.floors, head.ceilings, strict=True))
        assert head.damage == pytest.approx(head.unavoidable + head.lost)
        assert head.recall_damage == pytest.approx(head.recall_unavoidable + head.recall_lost)
        assert head.stress_floor == head.stress_floors[OPTIONS["ranks"].index(found.rank)]
        assert head.weighted_floor == head.weighted_floors[1] <= head.weighted_floors[0]
        assert head.stress_weighted_floor == head.stress_weighted_floors[1]
        assert (head.weighted_floors[0] > 0) == (head.floors[0] > 0)
        assert (head.kappa >= 1) == (head.n_star >= OPTIONS["context"])
        assert head.n_star == pytest.approx(1 + 47**head.kappa)
        assert set(head.errors) == {"elu", "relu", "favor", "hedgehog", "window"}
        assert -1 <= head.monotonicity <= 1
        assert head.verdict in ("keep", "replace", "window")
        assert head.reason
    assert sum(head.importance for head in found.heads) == pytest.approx(1)
    assert found.rank == 4  # of 2 and 4 the nearer to the head's width of 8
    assert found.damage_unit.startswith("nats a token")
    assert found.plan(0.25).provenance == {"diagnosis": found.provenance}


def test_without_ranks_there_is_damage_but_no_floor(found, tmp_path):
    bare = run(ranks=(), directory=tmp_path / "bare")
    assert bare.rank is None
    for one, other in zip(bare.heads, found.heads, strict=True):
        assert (one.floor, one.ceilings, one.unavoidable, one.lost) == (None, None, None, None)
        assert [one.damage, one.recall_damage, one.fit] == pytest.approx(
            [other.damage, other.recall_damage, other.fit], rel=1e-4
        )
    assert Diagnosis.load(tmp_path / "bare").plan(0.25).keep == found.plan(0.25).keep


@pytest.mark.parametrize(("window", "period"), [(64, 256), (256, 512), (2000, 512)])
def test_what_the_stress_passage_repeats_lies_beyond_the_window(window, period):
    words = zoo.tokenizer(False)
    tokens, found = _stress(words, 1024, window, seed=0)
    assert found == period
    assert torch.equal(tokens[0, -found:], tokens[0, -2 * found : -found])


def test_fitting_beats_dropping_what_is_far(found):
    fitted = sum(head.fit for head in found.heads)
    assert fitted < sum(head.errors["window"] for head in found.heads)


def test_verification_measures_real_replacements(found):
    check = found.verification
    assert len(check.heads) == len(check.measured) == 4
    measured = {head.id: head.measured for head in found.heads if head.measured is not None}
    assert [measured[name] for name in check.heads] == check.measured
    assert all(value >= -1e-6 for value in check.measured)
    verified = [head for head in found.heads if head.recall_measured is not None]
    assert {head.id for head in verified} == set(check.heads)
    pairs = [(head.recall_measured, head.recall_damage) for head in verified]
    assert check.recall_spearman == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
    assert all(head.recall_measured > 0 for head in verified)
    assert check.measured[0] > check.measured[-1]  # the head estimated worst against the one estimated best


def test_two_runs_give_the_same_numbers(found):
    assert comparable(run(verify=4)) == comparable(found)


def test_saved_and_loaded(found, tmp_path):
    again = run(verify=4, directory=tmp_path / "out")
    assert comparable(again) == comparable(found)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["diagnosis.json", "heads.parquet", "patterns.npz"]
    loaded = Diagnosis.load(tmp_path / "out")
    assert comparable(loaded) == comparable(found)
    with np.load(tmp_path / "out" / "patterns.npz") as pictures:
        assert pictures["text"].shape == (8, 48, 48)
        assert pictures["text"].dtype == np.uint8
        assert pictures["text"].max() > 100
    table = loaded.to_pandas()
    assert len(table) == 8
    assert {"weighted_floor_2", "stress_weighted_floor_4"} <= set(table.columns)
    assert {"floor_2", "floor_4", "error_elu", "damage", "stress_floor_2"} <= set(table.columns)


@pytest.mark.parametrize("stage", ["survey", "examine", "projections"])
def test_a_killed_run_goes_on_where_it_stopped(found, tmp_path, monkeypatch, stage):
    plain, calls = getattr(stages, stage), []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(stages, stage, dies)
    with pytest.raises(KeyboardInterrupt):
        run(verify=4, directory=tmp_path)
    assert not (tmp_path / "diagnosis.json").exists()
    calls.clear()
    counted = []
    monkeypatch.setattr(stages, stage, lambda *args, **kwargs: counted.append(1) or plain(*args, **kwargs))
    resumed = run(verify=4, directory=tmp_path)
    assert comparable(resumed) == comparable(found)
    total = {"survey": 6, "examine": 4, "projections": 7}[stage]
    assert len(counted) == total - 1  # the piece finished before the kill was not done again
    assert not (tmp_path / PIECES).exists()


def test_pieces_of_other_options_are_not_taken(found, tmp_path, monkeypatch):
    plain = stages.projections
    monkeypatch.setattr(stages, "projections", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(directory=tmp_path, window=9)
    monkeypatch.setattr(stages, "projections", plain)
    assert comparable(run(verify=4, directory=tmp_path)) == comparable(found)


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "qwen3"])
def test_other_families(family):
    result = run(family)
    assert all(head.damage is not None and head.damage >= 0 for head in result.heads)
    bidirectional = family in ("bert", "albert")
    assert ("embedding" in result.damage_unit) == bidirectional
    assert any("Eckart-Young" in note for note in result.notes) == bidirectional
    assert len(result.heads) == (12 if family == "albert" else 8)


def test_sliding_windows_stay_and_say_why():
    result = run("sliding")
    assert {head.verdict for head in result.heads} == {"keep"}
    assert all("sliding window of" in head.reason and head.damage is None for head in result.heads)
    assert len(result.plan(0.0).keep) == 8
    assert all(head.floors for head in result.heads)


def test_a_layer_that_no_conversion_takes_is_not_called_replaceable():
    """One module serves all of ALBERT's layers: what its heads would cost is known, and nothing can be put there."""
    result = run("albert")
    assert not any(head.replaceable for head in result.heads)
    (why,) = {shape.obstacle for shape in layer_shapes(zoo.tiny("albert"))}
    assert why is not None
    assert all(why in head.reason and head.verdict == "keep" and head.damage is not None for head in result.heads)


def test_position_bias_stays_and_cross_attention_is_apart():
    result = run("t5")
    assert len(result.heads) == 16
    assert all("position bias" in head.reason and "rank 4 would cost" in head.reason for head in result.heads)
    assert all(head.damage is None and len(head.unavoidables) == 2 for head in result.heads)
    assert sum(head.unavoidable for head in result.heads) > 0
    assert all(head.unavoidables[0] >= head.unavoidables[1] * 0.5 for head in result.heads)
    assert len(result.cross) == 8
    assert all(0 <= row["entropy"] <= 1 for row in result.cross)


def test_quick_takes_statistics_only():
    result = run(quick=True)
    head = result.heads[0]
    assert head.floor is None
    assert head.damage is None
    assert 0 < head.entropy < 1
    assert head.reason
    with pytest.raises(AttngapError, match=r"no damage estimate.*without --quick"):
        result.plan()


def test_a_plan_keeps_the_most_important(found):
    order = sorted(found.heads, key=lambda head: -head.importance)
    made = found.plan(0.25, "head")
    assert set(made.keep) == {(head.layer, head.head) for head in order[:2]}
    kept = [point.kept for point in made.curve]
    assert kept == list(range(8, -1, -1))
    assert made.curve[0].text == 0
    assert made.curve[-1].text == pytest.approx(sum(head.damage for head in found.heads))
    assert made.curve[-1].recall == pytest.approx(sum(head.recall_damage for head in found.heads))
    assert list(made.curve) == sorted(made.curve, key=lambda point: point.text)


def test_a_plan_by_groups_keeps_whole_key_heads(found):
    made = found.plan(0.5, granularity="group")
    groups = {(layer, head // 2) for layer, head in made.keep}
    assert len(made.keep) == 4
    assert len(groups) == 2
    with pytest.raises(AttngapError, match="keep must be a share from 0 to 1, got 10"):
        found.plan(10.0)


def test_the_headline_rank_is_next_to_the_head_dimension(found):
    shape = Shape(1, 4, 2, 64, 0, True, True, 0, (None,))
    assert headline_rank((8, 16, 64, 128), shape) == 64
    assert headline_rank((8, 100), shape) == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 4096}, "context 4096 is beyond the model's 512 positions"),
        ({"context": 4}, "context must be at least 16, got 4"),
        ({"passages": 0}, "passages must be at least 1, got 0"),
        ({"ranks": (0, 2)}, "ranks must be distinct, from 1 to 47"),
        ({"ranks": (2, 2)}, "ranks must be distinct"),
        ({"window": 0}, "window must be at least 1"),
        ({"quick": True, "verify": 3}, "verify needs fitted replacements"),
        ({"passages": 10_000}, "The text is too short"),
    ],
)
def test_bad_options_get_one_line(changes, message):
    with pytest.raises(AttngapError, match=message):
        run(**changes)


def test_folders_in_use_are_refused(tmp_path):
    run(directory=tmp_path / "a", quick=True)
    with pytest.raises(AttngapError, match=r"already holds a diagnosis.*--overwrite"):
        run(directory=tmp_path / "a", quick=True)
    run(directory=tmp_path / "a", quick=True, overwrite=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("mine")
    with pytest.raises(AttngapError, match="not empty and not a diagnosis"):
        run(directory=tmp_path / "b", quick=True)


def test_a_full_disk_is_one_line_and_leaves_no_result(tmp_path, monkeypatch):
    from attngap.storage import files

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(AttngapError, match=r"No space left on device.*run the same command again"):
        run(directory=tmp_path, quick=True)
    assert not (tmp_path / "diagnosis.json").exists()
    assert not list(tmp_path.rglob("*.draft"))


def test_wrong_files_are_refused(tmp_path, found):
    with pytest.raises(AttngapError, match="No diagnosis in"):
        Diagnosis.load(tmp_path)
    content = json.loads(found.model_dump_json(by_alias=True))
    for change, message in (
        ({"schema": "attngap.diagnosis/7"}, "schema 'attngap.diagnosis/7', expected"),
        ({"surprise": 1}, "wrong at 'surprise'"),
    ):
        (tmp_path / "diagnosis.json").write_text(json.dumps(content | change))
        with pytest.raises(AttngapError, match=message):
            Diagnosis.load(tmp_path)


def test_the_model_is_left_as_it_was():
    model = zoo.tiny("llama")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    diagnose(model, zoo.tokenizer(), TEXT, **OPTIONS)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def converted():
    """Head 1 of layer 0 keeps softmax, everything else is replaced; and the model it was made from."""
    model = zoo.tiny("llama")
    shape = {"heads": 4, "dim": 8, "value_dim": 8, "kv_heads": 2, "window": 4, "sinks": 1}
    return swap(model, {0: (mechanism("hybrid", **shape), [1]), 1: (mechanism("hybrid", **shape), [])}), model


def test_a_converted_model_shows_its_linear_heads_as_they_are():
    model, original = converted()
    result = diagnose(model, zoo.tokenizer(), TEXT, **OPTIONS, verify=1)
    kept, *linear = sorted(result.heads, key=lambda head: head.id != "0.1")
    assert {head.verdict for head in linear} == {"linear"}
    assert all("is linear already" in head.reason and head.floors is None and head.damage is None for head in linear)
    assert all(0 < head.top <= 1 and head.spread is None and head.logit_ratio is None for head in linear)
    assert kept.damage > 0
    assert kept.measured > 0
    before = diagnose(original, zoo.tokenizer(), TEXT, **OPTIONS)
    assert kept.far == pytest.approx(before.heads[1].far)  # nothing before layer 0 has changed
    assert kept.floors == pytest.approx(before.heads[1].floors)
    assert abs(linear[0].far - before.heads[0].far) > 1e-3
    assert any("7 heads are linear already" in note for note in result.notes)
    assert result.plan(1.0).keep == ((0, 1),)


def test_what_linearize_made_of_a_model_with_rotary_positions_is_diagnosed():
    """Its features read keys that are turned back, for which a head's weights need the angles."""
    options = {"context": 64, "tokens": 256, "steps": 2, "joint": 0, "rounds": 1, "window": 8, "keep": 0.5}
    model, _ = linearize(zoo.tiny(), zoo.tokenizer(), None, TEXT, measured=False, granularity="head", **options)
    found = diagnose(model, zoo.tokenizer(), TEXT, **OPTIONS)
    linear = {(head.layer, head.head) for head in found.heads if head.verdict == "linear"}
    assert len(linear) == 4
    call = []
    with torch.no_grad(), capture(model, call.append):
        model(zoo.tokens(1, 24))
    mixing, one = call[1].module.attngap.mechanism, call[1]
    exact = mixing.weights(mixing.read(None, one.q, one.k, one.v, rotary=one.rotary))[0]
    weights = with_mixing(next(layer_inputs(one)), one).weights()
    for head in one.linear:
        torch.testing.assert_close(weights[head], exact[head], atol=1e-5, rtol=1e-4)


def test_statistics_of_linear_heads_are_of_their_mechanisms_weights():
    model, _ = converted()
    tokens, seen = zoo.tokens(1, 24), []
    with torch.no_grad(), capture(model, seen.append):
        during = model(tokens).logits
    with torch.no_grad():
        assert torch.equal(during, model(tokens).logits)
    call = seen[0]
    mixing = call.module.attngap.mechanism
    exact = mixing.weights(mixing.read(None, call.q, call.k, call.v))[0]
    found = with_mixing(next(layer_inputs(call)), call).weights()
    assert call.linear == (0, 2, 3)
    assert torch.allclose(found[[0, 2, 3]], exact[[0, 2, 3]], atol=1e-5)
    assert not torch.allclose(found[1], exact[1], atol=1e-2)
