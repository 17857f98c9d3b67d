from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attngap.conversion import evaluate as evaluate_module
from attngap.conversion import joint as joint_module
from attngap.conversion import linearize as module
from attngap.conversion import run as run_module
from attngap.conversion.evaluate import Measures
from attngap.conversion.linearize import effective, linearize
from attngap.conversion.options import ConversionOptions
from attngap.conversion.receipt import CONVERTED, ORIGINAL, RANDOM, WINDOW, Receipt
from attngap.errors import AttngapError
from attngap.models.mixed import mixed_heads
from attngap.models.plan import Plan, Replacement
from attngap.models.save import conversion_of, load_converted, read_record
from attngap.storage.checkpoint import PIECES, Checkpoint, open_checkpoint
from tests import zoo
from tests.conversion.small import TEXT, plan, world
from tests.zoo import DECODERS, tiny

BRIEF = Measures(passages=1, trials=1, lengths=(64,), contexts=(96,), prefill_up_to=96)
BARE = Measures(passages=1, trials=0, contexts=(), baselines=False)
QUICK = {"context": 64, "tokens": 448, "steps": 4, "joint": 3, "rounds": 1, "measures": BRIEF}
BRIEFLY = QUICK | {"measures": BARE}
TOKENS = torch.arange(1, 41)[None]


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".attngap." in name}


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_gets_a_converted_model_and_a_receipt(name):
    model, words, made = world(name)
    before = logits(model)
    converted, receipt = linearize(model, words, made, TEXT, **QUICK)
    assert torch.equal(logits(model), before)
    assert receipt.kept == 2
    assert sum(len(part.keep) for part in mixed_heads(converted).values()) == 2
    assert set(receipt.quality) == {ORIGINAL, CONVERTED, WINDOW, RANDOM}
    assert receipt.quality[ORIGINAL].perplexity_ratio == 1
    assert receipt.quality[CONVERTED].divergence > 0
    assert receipt.joint["after"] <= receipt.joint["before"]
    assert [point.context for point in receipt.speed[CONVERTED]] == [96]


def test_all_kept_is_the_original_to_the_bit():
    model, words, _ = world()
    every = tuple((layer, head) for layer in range(2) for head in range(4))
    converted, receipt = linearize(model, words, plan(model, every), TEXT, **QUICK)
    assert torch.equal(logits(converted), logits(model))
    assert receipt.quality[CONVERTED].perplexity_ratio == 1
    assert (receipt.kept, receipt.kept_groups) == (8, 4)


def test_the_same_call_gives_the_same_model():
    model, words, made = world()
    first, again = (parameters(linearize(model, words, made, TEXT, **BRIEFLY)[0]) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_where_positions_cannot_be_undone_features_are_read_as_far_as_they_were_fitted():
    model, words, made = world("gpt2")
    converted, _ = linearize(model, words, made, TEXT, **BRIEFLY)
    assert {part.mechanism.reach for part in mixed_heads(converted).values()} == {QUICK["context"]}
    model, words, made = world()
    converted, _ = linearize(model, words, made, TEXT, **BRIEFLY)
    assert all(part.mechanism.reach is None and part.mechanism.rotary for part in mixed_heads(converted).values())


class Killed(Exception):
    pass


@pytest.mark.parametrize("stop", ["calibration", "layer-0", "layer-1", "keep", "joint"])
def test_a_killed_run_resumes_to_the_same_result(stop, tmp_path, monkeypatch):
    model, words, made = world()
    monkeypatch.setattr(joint_module, "CHECK", 1)
    expected, receipt = linearize(model, words, made, TEXT, **BRIEFLY)
    put = Checkpoint.put

    def killed(self, name, tensors):
        put(self, name, tensors)
        if name == {"calibration": "tokens"}.get(stop, stop):
            raise Killed

    monkeypatch.setattr(Checkpoint, "put", killed)
    with pytest.raises(Killed):
        linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    monkeypatch.setattr(Checkpoint, "put", put)
    resumed, second = linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    found, wanted = parameters(resumed), parameters(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert second.keep == receipt.keep
    assert second.joint == receipt.joint
    assert not (tmp_path / PIECES).exists()


def test_a_folder_of_somebody_else_is_refused_and_left_as_it_is(tmp_path):
    model, words, made = world()
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(AttngapError, match="is not empty and not a converted model"):
        linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    with pytest.raises(AttngapError, match="No option 'work'"):
        linearize(model, words, made, TEXT, **BRIEFLY, work=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_conversions_do_not_share_a_folder(tmp_path):
    model, words, made = world()
    with (
        open_checkpoint(tmp_path / PIECES, {}),
        pytest.raises(AttngapError, match="is in use by another run"),
    ):
        linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)


@pytest.mark.parametrize("piece", ["tokens", "layer-1", "keep", "joint"])
def test_a_damaged_piece_is_computed_again(piece, tmp_path, monkeypatch):
    model, words, made = world()
    monkeypatch.setattr(joint_module, "CHECK", 1)
    expected, _ = linearize(model, words, made, TEXT, **BRIEFLY)
    die_at(monkeypatch, "measure")
    with pytest.raises(Killed):
        linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    monkeypatch.undo()
    (path,) = (tmp_path / PIECES).glob(f"{piece}.*.piece")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="is damaged; it is dropped and computed again"):
        resumed, _ = linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    found, wanted = parameters(resumed), parameters(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def die_at(monkeypatch, name):
    def die(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(module, name, die)


@pytest.mark.parametrize("moment", ["save", "measure", "write_text"])
def test_a_run_killed_while_it_saves_or_measures_goes_on_from_its_pieces(moment, tmp_path, monkeypatch):
    model, words, made = world()
    expected, receipt = linearize(model, words, made, TEXT, **BRIEFLY)
    die_at(monkeypatch, moment)
    with pytest.raises(Killed):
        linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "attngap.json").exists() == (moment != "save")
    monkeypatch.setattr(run_module, "fit_all", keep_errors(run_module.fit_all))
    resumed, second = linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    assert second.quality == receipt.quality
    assert Receipt.load(tmp_path) == second
    found, wanted = parameters(resumed), parameters(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not (tmp_path / PIECES).exists()


def keep_errors(fit_all):
    """No layer may be fitted again: all of them are in the checkpoint."""

    def check(model, mechanisms, tokens, options, checkpoint, *rest, **named):
        assert all(checkpoint.has(f"layer-{layer}") for layer in mechanisms)
        return fit_all(model, mechanisms, tokens, options, checkpoint, *rest, **named)

    return check


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    model, words, made = world()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save", full)
    with pytest.raises(AttngapError, match=r"Cannot write to .*: No space left on device\. Make room and run the same"):
        linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [PIECES]


def test_an_overwrite_killed_halfway_is_never_half_of_each(tmp_path, monkeypatch):
    model, words, made = world()
    first, _ = linearize(model, words, made, TEXT, **BRIEFLY, directory=tmp_path)
    other = BRIEFLY | {"steps": 2}
    with pytest.raises(AttngapError, match="already holds a converted model"):
        linearize(model, words, made, TEXT, **other, directory=tmp_path)
    moved = []
    replace = Path.replace

    def killed(self, target):
        if self.parent.name.startswith(".new-"):
            moved.append(self.name)
            if len(moved) == 2:
                raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        linearize(model, words, made, TEXT, **other, directory=tmp_path, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(AttngapError, match="is not a converted model"):
        load_converted(tmp_path)
    second, _ = linearize(model, words, made, TEXT, **other, directory=tmp_path)  # goes on, and needs not be told twice
    saved = read_record(tmp_path)
    assert saved.plan.keep == conversion_of(second).plan.keep
    adapter = load_file(tmp_path / "adapter.safetensors")
    assert all(torch.equal(adapter[name], weight) for name, weight in parameters(second).items())
    assert not any(torch.equal(parameters(first)[name], parameters(second)[name]) for name in ADAPTED)


ADAPTED = ["model.layers.0.self_attn.attngap.mechanism.feature_map.key_weight"]


def test_a_figure_that_cannot_be_measured_does_not_cost_the_conversion(tmp_path, monkeypatch):
    model, words, made = world()

    def cannot(*args, **kwargs):
        raise AttributeError("'LinearAttentionLayer' object has no attribute 'get_seq_length'\nmore")

    monkeypatch.setattr(evaluate_module, "speeds", cannot)
    monkeypatch.setattr(evaluate_module, "recall", cannot)
    _, receipt = linearize(model, words, made, TEXT, **QUICK, directory=tmp_path)
    missing = "could not be measured: 'LinearAttentionLayer' object has no attribute 'get_seq_length'"
    assert receipt.notes[:2] == [f"recall {missing}", f"speed {missing}"]
    assert receipt.quality[CONVERTED].perplexity > 0
    assert receipt.quality[CONVERTED].needle is None
    assert receipt.speed == {}
    assert Receipt.load(tmp_path) == receipt
    assert (tmp_path / "attngap.json").exists()


def test_a_model_without_a_layer_to_replace_is_refused_before_any_work(monkeypatch):
    model = zoo.tiny("sliding")
    monkeypatch.setattr(run_module, "Material", None)  # would fail
    with pytest.raises(
        AttngapError, match=r"No layer of this MistralForCausalLM can be replaced: it has a sliding window"
    ):
        linearize(model, zoo.tokenizer(), text=TEXT, context=64, tokens=256)


def test_no_plan_is_needed():
    model, words, _ = world()
    converted, receipt = linearize(model, words, text=TEXT, keep=0.5, window=8, sinks=2, **BRIEFLY)
    assert receipt.kept == 4
    assert receipt.options["granularity"] == "group"
    assert sum(4 - len(part.keep) for part in mixed_heads(converted).values()) == 4


def test_what_is_not_given_is_the_plans():
    _, _, made = world()
    grouped = made.model_copy(update={"granularity": "group"})
    planned = effective(ConversionOptions(), grouped)
    assert (planned.keep, planned.window, planned.sinks, planned.granularity) == (None, 8, 2, "group")
    given = effective(ConversionOptions(window=5, keep=0.5, granularity="head"), grouped)
    assert (given.keep, given.window, given.sinks, given.granularity) == (0.5, 5, 2, "head")
    alone = effective(ConversionOptions(mechanism="retention", window=0), made)
    assert (alone.window, alone.sinks) == (0, 0)
    assert effective(ConversionOptions(max_ppl_ratio=1.1), None).keep is None


def test_a_mechanism_of_the_catalogue_alone():
    model, words, made = world()
    converted, receipt = linearize(model, words, made, TEXT, **QUICK, mechanism="retention", window=0)
    assert {part.mechanism.name for part in mixed_heads(converted).values()} == {"retention"}
    assert receipt.options["window"] == 0
    assert WINDOW not in receipt.quality


def test_a_bare_plan_keeps_what_cannot_be_replaced():
    model = zoo.tiny("sliding")
    bare = Plan.for_model(model, "sliding", Replacement(window=8))
    assert len(bare.keep) == bare.model.layers * bare.model.heads
    model, _, made = world()
    assert Plan.for_model(model, "tiny", made.replacement, "head") == made.model_copy(update={"keep": ()})


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_share_of_the_heads_is_kept_without_a_plan(share, kept):
    model, words, made = world()
    bare = Plan.for_model(model, "tiny", made.replacement, "head")
    converted, receipt = linearize(model, words, bare, TEXT, **BRIEFLY, keep=share)
    assert receipt.kept == kept
    assert sum(4 - len(part.keep) for part in mixed_heads(converted).values()) == 8 - kept


def test_the_heads_that_are_kept_are_those_it_hurts_to_replace():
    model, words, made = world()
    with torch.no_grad():
        for layer, head in ((0, 1), (1, 2)):  # what these heads write is much larger than what others do
            model.model.layers[layer].self_attn.o_proj.weight[:, 8 * head : 8 * (head + 1)] *= 20
    bare = Plan.for_model(model, "tiny", made.replacement, "head")
    _, receipt = linearize(model, words, bare, TEXT, **BRIEFLY, keep=0.25)
    assert receipt.keep == [(0, 1), (1, 2)]


def test_the_smallest_keep_set_within_a_ratio():
    model, words, made = world()
    _, loose = linearize(model, words, made, TEXT, **QUICK, max_ppl_ratio=100.0)
    assert loose.kept == 0
    _, tight = linearize(model, words, made, TEXT, **QUICK, max_ppl_ratio=0.2)
    assert tight.kept == 8
    assert tight.notes[0].startswith("No keep set reaches a perplexity ratio of 0.2")
    _, longer = linearize(model, words, made, TEXT, **QUICK, max_ppl_ratio=100.0, max_ppl_length=200)
    assert longer.options["max_ppl_length"] == 200
    assert longer.kept == 0
    with pytest.raises(AttngapError, match=r"max_ppl_length 1000000000 is beyond the model's \d+ positions"):
        linearize(model, words, made, TEXT, **QUICK, max_ppl_ratio=1.1, max_ppl_length=10**9)
    with pytest.raises(AttngapError, match="max_ppl_length is the length a max_ppl_ratio must hold at"):
        linearize(model, words, made, TEXT, **QUICK, max_ppl_length=64)


def test_groups_are_kept_whole():
    model, words, made = world()
    grouped = made.model_copy(update={"granularity": "group", "keep": ((0, 0), (0, 1))})
    converted, receipt = linearize(model, words, grouped, TEXT, **QUICK)
    kept = [part.keep.tolist() for part in mixed_heads(converted).values()]
    assert sorted(kept) in ([[], [0, 1]], [[], [2, 3]])
    assert receipt.kept_groups == 1


def test_a_receipt_says_where_a_baseline_is_better(tmp_path):
    model, words, made = world()
    _, receipt = linearize(model, words, made, TEXT, **QUICK)
    worse = receipt.model_copy(deep=True)
    worse.quality[CONVERTED].divergence = 1e9
    assert [note.split(" diverges")[0] for note in worse.shortcomings() if "diverges" in note] == [WINDOW, RANDOM]
    receipt.save(tmp_path)
    assert Receipt.load(tmp_path) == receipt
    with pytest.raises(AttngapError, match=r"No receipt in .*attngap eval"):
        Receipt.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "gla", "window": 0}, "gla needs gates computed from the layer's input"),
        ({"mechanism": "retention"}, r"retention is no feature map.*Pass window=0"),
        ({"mechanism": "hedgehgo"}, "No feature map 'hedgehgo'. Did you mean 'hedgehog'"),
        ({"mechanism": "softmaxx", "window": 0}, "No mechanism 'softmaxx'. Did you mean 'softmax'"),
        ({"tokens": 64}, "tokens must be at least 128, got 64"),
        ({"context": 1024, "tokens": 4096}, "context 1024 is beyond the model's 512 positions"),
        ({"max_ppl_ratio": -1.0}, "max_ppl_ratio must be positive, such as 1.02, got -1.0"),
        ({"keep": 10.0}, "keep takes a share from 0 to 1, got 10.0. For a tenth of the heads: 0.1"),
        ({"keep": 0.1, "max_ppl_ratio": 1.1}, "keep and max_ppl_ratio both say how many heads to keep"),
    ],
)
def test_bad_options_are_refused_in_one_line(change, message):
    model, words, made = world()
    with pytest.raises(AttngapError, match=message) as caught:
        linearize(model, words, made, TEXT, **(QUICK | change))
    assert "\n" not in str(caught.value)


def test_plans_for_another_model_are_refused():
    model, words, made = world()
    with pytest.raises(AttngapError, match="The plan is for LlamaForCausalLM, the model is GPT2LMHeadModel"):
        linearize(tiny("gpt2"), words, made, TEXT, **QUICK)
    short = "too short for a passage"
    with pytest.raises(AttngapError, match="The text is too short"):
        linearize(model, words, made, short, **QUICK)
    bert = tiny("bert")
    with pytest.raises(AttngapError, match="an encoder has no perplexity"):
        linearize(bert, words, plan(bert), TEXT, **QUICK, max_ppl_ratio=1.1)


def test_an_encoder_is_converted_and_judged_by_its_states():
    model, words, made = world("bert")
    converted, receipt = linearize(model, words, made, TEXT, **QUICK)
    assert receipt.quality[CONVERTED].perplexity is None
    assert receipt.quality[CONVERTED].divergence > 0
    assert not receipt.speed
    assert {part.mechanism.name for part in mixed_heads(converted).values()} == {"prototype"}
