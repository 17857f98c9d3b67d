"""A model of which only a part is in memory gives the numbers that it gives whole."""

import pytest
import torch

import attngap
from attngap.costs import room
from attngap.diagnosis.options import DiagnosisOptions
from attngap.errors import AttngapError
from attngap.heads import chain
from attngap.models.placement import has_weights_elsewhere, parse_size
from attngap.models.plan import fingerprint
from attngap.models.save import weights_hash
from attngap.models.stream import Conversation
from tests.conversion.small import TEXT
from tests.zoo import tiny, tokenizer

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install attngap[offload]")
LOOK = {"context": 64, "passages": 2, "window": 8, "ranks": (4,), "verify": 2}
ASKED = [{"role": "user", "content": "the cat"}]
CONVERT = {"context": 64, "tokens": 256, "steps": 2, "joint": 2, "rounds": 1, "window": 8, "keep": 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("offload")
    tiny().save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def partly(folder):
    """Room for the embedding and a layer."""
    sizes = {name: sum(p.nbytes for p in part.parameters()) for name, part in tiny().named_modules()}
    found, words = attngap.load(folder, max_memory=sizes["model.embed_tokens"] + 2 * sizes["model.layers.0"])
    elsewhere = {name for name, p in found.named_parameters() if p.is_meta}
    assert any(name.startswith("model.layers.") for name in elsewhere)
    return found, words, elsewhere


def test_a_diagnosis_is_the_same_and_weights_go_back(folder):
    part, words, elsewhere = partly(folder)
    whole, _ = attngap.load(folder)
    assert has_weights_elsewhere(part)
    assert not has_weights_elsewhere(whole)
    assert (fingerprint(part), weights_hash(part)) == (fingerprint(whole), weights_hash(whole))
    one, other = (attngap.diagnose(each, words, TEXT, **LOOK) for each in (part, whole))
    assert one.heads == other.heads
    assert one.joint == other.joint
    assert part not in chain._UNCHAINED
    assert {name for name, p in part.named_parameters() if p.is_meta} == elsewhere


def test_a_conversion_is_the_same(folder, tmp_path):
    part, words, elsewhere = partly(folder)
    whole, _ = attngap.load(folder)
    one, receipt = attngap.linearize(part, words, None, TEXT, measured=False, directory=tmp_path / "c", **CONVERT)
    _, other = attngap.linearize(whole, words, None, TEXT, measured=False, **CONVERT)
    assert (receipt.keep, receipt.fit_error, receipt.joint) == (other.keep, other.fit_error, other.joint)
    assert {name for name, p in part.named_parameters() if p.is_meta} == elsewhere
    again, _ = attngap.load(tmp_path / "c", max_memory="1GB")
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, one(ids).logits)


def test_no_weight_in_memory_at_all(folder, tmp_path):
    """Nothing of the model is anywhere but on disk, and what is made for it is made on the CPU all the same."""
    part, words = attngap.load(folder, max_memory=1)
    whole, _ = attngap.load(folder)
    assert all(p.is_meta for p in part.parameters())
    one, other = (attngap.diagnose(each, words, TEXT, **LOOK) for each in (part, whole))
    assert one.heads == other.heads
    converted, receipt = attngap.linearize(part, words, None, TEXT, measured=False, **CONVERT)
    assert receipt.keep == attngap.linearize(whole, words, None, TEXT, measured=False, **CONVERT)[1].keep
    said = [list(Conversation(each, words).reply(ASKED, limit=3)) for each in (part, whole, converted)]
    assert [step.text for step in said[0]] == [step.text for step in said[1]]
    assert len(said[2]) == 3
    assert attngap.probe("copy", part, tokenizer=words, sequences=4).score == pytest.approx(
        attngap.probe("copy", whole, tokenizer=words, sequences=4).score
    )


@pytest.mark.slow  # minutes: the whole of SmolLM2, twice
def test_smollm2_with_300_megabytes_of_weights_is_diagnosed_alike():
    part, words = attngap.load("smollm2", max_memory="300MB")
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in part.parameters() if not p.is_meta}
    assert sum(held.values()) <= 300e6
    whole, _ = attngap.load("smollm2")
    options = {"context": 256, "passages": 1, "ranks": (16,), "window": 64}
    one, other = (attngap.diagnose(each, words, **options) for each in (part, whole))
    for a, b in zip(one.heads, other.heads, strict=True):
        assert a == b


def test_sizes_that_are_none():
    assert [parse_size(x) for x in (7, "300MB", "1.5gb", "2 T")] == [7, 300_000_000, 1_500_000_000, 2 * 10**12]
    with pytest.raises(AttngapError, match="No size 'much'"):
        parse_size("much")
    with pytest.raises(AttngapError, match="No size '0'"):
        parse_size(0)


def test_too_little_memory_is_told_with_the_number(folder, monkeypatch):
    options = DiagnosisOptions(**LOOK | {"verify": 0})
    room.check_room(str(folder), options, dtype=torch.float32, device=None)
    monkeypatch.setattr(room, "memory_of", lambda _: 10**8)
    with pytest.raises(
        AttngapError, match=r"needs about 0\.\d GB of memory, 0\.0 of them for weights; cpu has 0\.1 GB left"
    ):
        room.check_room(str(folder), options, dtype=torch.float32, device=None)
    for dtype, said in ((torch.float32, "Take --dtype bfloat16, --max-memory"), (torch.bfloat16, "Take --max-memory")):
        with pytest.raises(AttngapError, match=said):
            room.check_room(str(folder), options, dtype=dtype, device=None)
    monkeypatch.setattr(room, "memory_of", lambda _: None)  # nobody says
    room.check_room(str(folder), options, dtype=torch.float32, device=None)
