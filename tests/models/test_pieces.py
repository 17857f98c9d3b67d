"""A prompt in pieces through a converted model, by compiled calls: as whole, as in torch, in bounded memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attngap.heads.replacement import build_replacement
from attngap.models.cache import cache_bytes
from attngap.models.plan import Replacement
from attngap.models.positions import layer_positions
from attngap.models.shapes import layer_shapes
from attngap.models.swap import empty_cache, swap
from attngap.ops import native
from tests import zoo

pytestmark = pytest.mark.skipif(not native.available(), reason="numba is not installed")


def converted(keep):
    model = zoo.tiny("llama")
    planned, where = Replacement(window=16, sinks=2), layer_positions(model)
    shapes = layer_shapes(model)
    return swap(model, {s.layer: (build_replacement(s, planned, positions=where[s.layer])[0], keep) for s in shapes})


@torch.no_grad()
def in_pieces(model, tokens, size, mask=None, **options):
    cache, found = empty_cache(model), []
    for start in range(0, tokens.shape[1], size):
        part = tokens[:, start : start + size]
        given = {} if mask is None else {"attention_mask": mask[:, : start + part.shape[1]]}
        found.append(model(input_ids=part, past_key_values=cache, **given, **options).logits)
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("keep", [[], [0], [0, 1], [1, 2, 3]], ids=str)
def test_compiled_pieces_are_the_whole_in_torch(keep):
    model, tokens = converted(keep), zoo.tokens(2, 90)
    with native.off():
        want, _ = in_pieces(model, tokens, 90)
    for size in (90, 40, 7):
        got, cache = in_pieces(model, tokens, size)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        assert cache.get_seq_length() == 90


@pytest.mark.parametrize("keep", [[], [1], [0, 1]], ids=str)
def test_a_prompt_that_the_window_holds_is_softmax_in_every_head_and_goes_on_as_any_other(keep, monkeypatch):
    model, tokens = converted(keep), zoo.tokens(2, 60)
    with torch.no_grad():
        original = zoo.tiny("llama")(tokens[:, :18]).logits
    whole, _ = in_pieces(model, tokens, 60)
    monkeypatch.setattr("attngap.mechanisms.prompts.advance_piece", None)  # features are not asked for
    got, cache = in_pieces(model, tokens[:, :18], 18)
    torch.testing.assert_close(got, original, atol=2e-5, rtol=1e-4)
    monkeypatch.undo()
    for i in range(18, 60):
        got = model(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits
        torch.testing.assert_close(got, whole[:, i : i + 1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("keep", [[], [1], [0, 1]], ids=str)
def test_padded_sequences_are_what_they_are_alone(keep):
    model, tokens = converted(keep), zoo.tokens(2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :23] = 0
    alone, _ = in_pieces(model, tokens[:1, 23:], 37)
    got, _ = in_pieces(model, tokens, 25, mask)
    torch.testing.assert_close(got[:1, 23:], alone, atol=2e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that any operation handed out, masks of single bytes aside."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.element_size() > 1:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return found


def test_memory_does_not_grow_with_a_prompt_that_is_read_in_pieces():
    model = converted([])
    largest, held = [], []
    for length in (64, 512):
        with Largest() as seen:
            _, cache = in_pieces(model, zoo.tokens(1, length), 32, logits_to_keep=1)
        largest.append(seen.bytes)
        held.append(cache_bytes(cache))
    with Largest() as whole:
        in_pieces(model, zoo.tokens(1, 512), 512, logits_to_keep=1)
    assert held[0] == held[1]
    assert largest[0] == largest[1]
    assert whole.bytes > largest[0]
