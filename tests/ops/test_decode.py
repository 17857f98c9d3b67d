"""One token of all heads: hybrid heads by their state, kept heads by their cache, sequences of any length."""

import pytest
import torch
from torch.nn import functional as F

from attngap.errors import AttngapError
from attngap.ops.hybrid import KeptHeads, decode_step, definition, empty_state, hybrid_attention

pytestmark = pytest.mark.usefixtures("both_ways")

B, H, KV, D, DV, R = 3, 6, 2, 6, 5, 7
PLACE = torch.tensor([-1, 0, -1, 1, 1, -1])  # heads 1, 3 and 4 are kept; both key heads have a cache


def draw(t, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((H, D), (KV, D), (KV, DV), (H, R), (KV, R))
    q, k, v, fq, fk = (torch.randn(B, h, t, w, generator=generator, dtype=dtype) for h, w in sizes)
    return q, k, v, fq.exp(), fk.exp(), torch.randn(B, H, t, generator=generator, dtype=dtype)


def exact(q, k, v):
    group = H // KV
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 2), (8, 0), (64, 4)])
def test_token_by_token_equals_the_definition_and_exact_attention(window, sinks, relative):
    x = draw(40)
    q, k, v, fq, fk, gain = x
    options = {"window": window, "sinks": sinks, "relative": relative}
    expected = definition.hybrid_attention(q, k, v, fq, fk, log_gain=gain, **options)
    kept = (PLACE >= 0)[:, None, None]
    expected = torch.where(kept, exact(q, k, v), expected)
    state = empty_state(k, v, fk, window, sinks)
    addresses = {name: y.data_ptr() for name, y in state.items()}
    for i in range(40):
        token = [y[:, :, i : i + 1] for y in x]
        cache = KeptHeads(PLACE, k[:, :, : i + 1], v[:, :, : i + 1])
        out = decode_step(state, *token, scale=D**-0.5, kept=cache, **options)
        torch.testing.assert_close(out, expected[:, :, i : i + 1], rtol=1e-9, atol=1e-9)
    assert {name: y.data_ptr() for name, y in state.items()} == addresses  # in place
    assert state["count"].tolist() == [40] * B


def test_sequences_of_different_length_together_are_what_they_are_alone():
    lengths, options = (3, 11, 20), {"window": 6, "sinks": 2}
    x = draw(20)
    q, k, v, fq, fk, gain = x
    mask = torch.arange(20) >= 20 - torch.tensor(lengths)[:, None]  # padded on the left
    _, state = hybrid_attention(q, k, v, fq, fk, log_gain=gain, mask=mask, **options)
    alone = []
    for i, length in enumerate(lengths):
        part = [y[i : i + 1, :, 20 - length :] for y in x]
        alone.append(hybrid_attention(*part[:5], log_gain=part[5], **options)[1])
    for step in range(12):
        token = draw(1, seed=step + 1)
        real = torch.tensor([True, step % 3 != 1, True])  # one of them pauses now and then
        out = decode_step(state, *token, scale=0.5, relative=False, real=real, **options)
        for i in range(B):
            if real[i]:
                part = [y[i : i + 1] for y in token]
                expected = decode_step(alone[i], *part, scale=0.5, relative=False, **options)
                torch.testing.assert_close(out[i : i + 1], expected)
            else:
                assert not out[i].any()
    for i in range(B):
        for name, y in alone[i].items():
            torch.testing.assert_close(state[name][i : i + 1], y)


def test_padding_in_the_cache_of_kept_heads_is_not_read():
    q, k, v, fq, fk, gain = draw(9)
    allowed = torch.ones(B, 9, dtype=torch.bool)
    allowed[0, :4] = False
    token = [y[:, :, 8:] for y in (q, k, v, fq, fk, gain)]
    results = []
    for keys, values in ((k, v), (k.masked_fill(~allowed[:, None, :, None], 1e3), v + 5 * ~allowed[:, None, :, None])):
        state = empty_state(k, v, fk, 4, 0)
        cache = KeptHeads(PLACE, keys, values, allowed)
        results.append(decode_step(state, *token, window=4, sinks=0, scale=1.0, relative=False, kept=cache))
    torch.testing.assert_close(*results)


def test_shapes_that_do_not_fit_are_refused_before_an_address_is_used():
    q, k, v, fq, fk, gain = draw(1)
    options = {"window": 4, "sinks": 0, "scale": 1.0, "relative": False}
    state = empty_state(k, v, fk, 4, 0)
    with pytest.raises(AttngapError, match=r"fq must be \(3, 6, 1, 7\) for one token"):
        decode_step(state, q, k, v, fq[..., :5], fk, gain, **options)
    with pytest.raises(AttngapError, match=r"kept\.place must be int64 below the 1 groups"):
        decode_step(state, q, k, v, fq, fk, gain, **options, kept=KeptHeads(PLACE, k[:, :1], v[:, :1]))
    with pytest.raises(AttngapError, match="a state goes with the window and sinks it was made with"):
        decode_step(state, q, k, v, fq, fk, gain, **(options | {"window": 5}))


def test_inputs_that_share_memory_with_the_state_are_read_before_it_is_written():
    q, k, v, fq, fk, gain = draw(1)
    results = []
    for shared in (False, True):
        state = empty_state(k, v, fk, 4, 0)
        state["v"][:, :, :1] = v
        value = state["v"][:, :, :1] if shared else v.clone()
        state["count"] += 4  # the new token takes the first slot
        results.append(decode_step(state, q, k, value, fq, fk, gain, window=4, sinks=0, scale=1.0, relative=False))
    torch.testing.assert_close(*results)
