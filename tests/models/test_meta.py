"""Diagnosis, conversion and decoding on torch's meta device: every tensor is made where the model is.

Numbers are not compared: there are none (tests/shapes_only.py; tests/models/test_devices.py has a device with numbers).
Here devices are torch's own, so that backward passes and what they compute again are looked at too.
"""

import warnings

import pytest
import torch
from torch import nn

import attngap
from attngap.conversion import calibration, long
from attngap.diagnosis import bounds
from attngap.heads.passages import passages
from attngap.heads.replacement import build_replacement
from attngap.models.mixed import mixed_heads
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes
from attngap.models.swap import empty_cache, swap
from tests.conversion.small import TEXT
from tests.shapes_only import MixedDevices, NeedsNumbers, shapes_only
from tests.zoo import VOCABULARY, tiny, tokenizer

CONVERT = {"context": 64, "tokens": 256, "steps": 2, "joint": 2, "rounds": 1, "window": 8, "keep": 0.25}
# Drawn by a generator of the CPU, so that every device gets the same numbers, or moved there when a module is complete.
DRAWN = {
    "heads/passages.py",
    "heads/damage.py",
    "conversion/calibration.py",
    "conversion/material.py",
    "mechanisms/feature_maps.py",
    "mechanisms/variants/hybrid.py",
    "mechanisms/fit.py",
}
# Certificates of single heads are computed in processes on the CPU; a few rows are picked by an index.
ON_CPU = {"diagnosis/bounds.py", "diagnosis/weighted.py", "theory/rank_bounds.py", "diagnosis/layers.py"}
POSITIONS = {name: layer_positions(tiny(name)) for name in ("llama", "mistral", "qwen3", "gpt2")}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")  # there is nothing to copy
        yield


class AddsWhereItIs(nn.Module):
    """A step whose backward pass makes a tensor on the CPU."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] + torch.zeros(3)

    def forward(self, x):
        return self.Function.apply(x)


def test_what_lands_on_the_cpu_is_noticed():
    with shapes_only() as mode:
        x = torch.zeros(3, device="meta", requires_grad=True)
        with pytest.raises(MixedDevices, match=r"aten.mul.Tensor mixes devices"):
            x * torch.ones(3)
        with pytest.raises(MixedDevices, match=r"aten.add.Tensor mixes devices"):
            AddsWhereItIs()(x).sum().backward()
        with pytest.raises(NeedsNumbers, match=r"shape \(\) and torch.float32"):
            x.sum().item()
        count = torch.zeros(2, dtype=torch.long, device="meta")
        count[1:] += 3
        assert (count.tolist(), count.nonzero().tolist(), count.device.type) == ([0, 3], [[1]], "meta")
        assert x[:2][count > 1].shape == (1,)
        assert not mode.landed
        passages(tokenizer(), TEXT, context=16, count=2)
    assert {file for file, _ in mode.landed} == {"heads/passages.py"}


def converted(name, dtype=torch.float32):
    """On meta, every layer replaced but its first head. How positions enter is read off the model with numbers."""
    model, near, where = tiny(name).to("meta", dtype), Replacement(window=8, sinks=2), POSITIONS[name]
    model.config.pad_token_id = None  # GPT-2 looks for padding by a list, which torch turns into an index of no numbers
    built = {
        shape.layer: build_replacement(shape, near, positions=where[shape.layer])[0] for shape in layer_shapes(model)
    }
    return swap(model, {layer: (mechanism, [0]) for layer, mechanism in built.items()}).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_converted_model_reads_and_writes_without_numbers(name, dtype):
    with shapes_only() as mode:
        model = converted(name, dtype)
        mode.landed.clear()  # what was drawn for the replacements
        ids, cache = mode.know(torch.arange(1, 81).view(2, 40)), empty_cache(model)
        with torch.no_grad():
            pieces = [model(part, past_key_values=cache).logits for part in ids.split([30, 8, 1, 1], 1)]
            whole = model(ids, use_cache=False).logits
    assert [tuple(x.shape) for x in pieces] == [(2, t, VOCABULARY) for t in (30, 8, 1, 1)]
    assert {(x.device.type, x.dtype) for x in (*pieces, whole)} == {("meta", dtype)}
    state = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    state += [x for layer in cache.layers for x in (layer.state or {}).values()]
    assert len(state) > 4
    assert {x.device.type for x in state} == {"meta"}
    assert not mode.landed


def test_a_padded_batch_is_read_without_numbers():
    with shapes_only() as mode:
        model = converted("llama")
        mode.landed.clear()
        ids, mask = mode.know(torch.arange(1, 81).view(2, 40)), torch.ones(2, 40, dtype=torch.long)
        mask[0, :7] = 0
        with torch.no_grad():
            logits = model(ids, attention_mask=mode.know(mask), use_cache=True).logits
    assert (tuple(logits.shape), logits.device.type) == ((2, 40, VOCABULARY), "meta")
    assert not mode.landed


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_conversion_runs_without_numbers(name, slices, monkeypatch):
    """Whole: fitting, choosing, joint steps with their backward passes; numbers that are asked for are made up."""
    if slices:
        monkeypatch.setattr(long, "ROWS", 16)
        monkeypatch.setattr(calibration, "FACTS", 2)  # a token a letter: eight would not fit
    with shapes_only(invent=True) as mode:
        model = tiny(name).to("meta")
        made, receipt = attngap.linearize(model, tokenizer(), None, TEXT, measured=False, **CONVERT)
    assert ("reading long passages" in receipt.seconds) == slices
    assert {x.device.type for x in (*made.parameters(), *made.buffers())} == {"meta"}
    assert len(mixed_heads(made)) == 2
    assert {file for file, _ in mode.landed} <= DRAWN


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_diagnosis_runs_without_numbers(name, monkeypatch):
    """Whole, but for the certificates of single heads, which are computed on the CPU: they get weights of their own."""

    def by_head(weights, *others):
        t = weights.shape[-1]
        even = torch.ones(t, t).tril() / torch.arange(1, t + 1)[:, None]
        return [(even, *(torch.ones(x.shape[1:]) for x in others)) for _ in range(len(weights))]

    monkeypatch.setattr(bounds, "_by_head", by_head)
    with shapes_only(invent=True) as mode:
        model = tiny(name).to("meta")
        looked = {"context": 64, "passages": 2, "window": 8, "ranks": (4,), "verify": 2}
        found = attngap.diagnose(model, tokenizer(), TEXT, **looked)
    assert len(found.heads) == 8
    assert {file for file, _ in mode.landed} <= DRAWN | ON_CPU
