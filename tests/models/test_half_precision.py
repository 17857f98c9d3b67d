"""Models of half precision are diagnosed and converted as they are; what is counted is counted in single precision."""

import pytest
import torch

import attngap
from attngap.conversion.evaluate import Measures
from attngap.mechanisms.decoding import Decoder
from attngap.models.capture import capture
from attngap.models.positions import layer_positions
from attngap.models.swap import swap
from attngap.ops import native
from tests.conversion.small import TEXT
from tests.zoo import mechanisms, tiny, tokenizer

QUICK = {"context": 64, "tokens": 256, "steps": 2, "joint": 1, "rounds": 1, "window": 8}
NOTHING = Measures(passages=1, trials=0, contexts=(), by_length=())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_diagnosis_is_that_of_single_precision(dtype):
    def entropies(model):
        found = attngap.diagnose(model, tokenizer(), TEXT, context=64, passages=1, window=8, ranks=(4,))
        return torch.tensor([head.entropy for head in found.heads])

    torch.testing.assert_close(entropies(tiny().to(dtype)), entropies(tiny()), atol=0.03, rtol=0.03)


def test_a_model_of_half_precision_converts():
    model = tiny().to(torch.bfloat16)
    converted, receipt = attngap.linearize(model, tokenizer(), None, TEXT, keep=0.25, measures=NOTHING, **QUICK)
    assert not [note for note in receipt.notes if "could not be measured" in note]
    tokens = torch.arange(1, 41)[None]
    with torch.no_grad():
        whole = converted(tokens, use_cache=False).logits
        cache = attngap.models.swap.empty_cache(converted)
        pieces = [converted(piece, past_key_values=cache).logits for piece in tokens.split([37, 1, 1, 1], 1)]
    assert whole.dtype == torch.bfloat16
    assert (torch.cat(pieces, 1) - whole).float().norm() < 0.03 * whole.float().norm()


def test_observers_see_single_precision_and_the_model_its_own():
    model, seen = tiny().to(torch.bfloat16), []
    exact = model(torch.arange(1, 9)[None]).logits

    def observe(call):
        seen.append({call.q.dtype, call.k.dtype, call.v.dtype, call.output.dtype})
        return call.output

    with capture(model, observe):
        found = model(torch.arange(1, 9)[None]).logits
    assert torch.equal(found, exact)
    assert seen == [{torch.float32}] * 2


@pytest.mark.skipif(not native.available(), reason="needs numba")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_in_half_precision_are_compiled_calls_that_torch_agrees_with(dtype, monkeypatch):
    calls = []
    token = Decoder.token
    monkeypatch.setattr(Decoder, "token", lambda self, *args: calls.append(1) or token(self, *args))
    model = tiny().to(dtype)
    turned = layer_positions(model)[0].options()
    parts = mechanisms(model, map_options={"decay": True}, **turned)
    converted = swap(model, {layer: (m, [1] if layer else []) for layer, m in parts.items()})
    tokens = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(tokens)
    padding[0, :7] = 0

    def decoded() -> torch.Tensor:
        cache, found = attngap.models.swap.empty_cache(converted), []
        with torch.no_grad():
            for i, piece in enumerate(tokens.split([35, 1, 1, 1, 1, 1], 1)):
                seen = padding[:, : 35 + i]
                found.append(converted(piece, attention_mask=seen, past_key_values=cache).logits[:, -1].float())
        return torch.stack(found, 1)

    compiled = decoded()
    assert len(calls) == 5 * len(parts)
    with native.off():
        torch.testing.assert_close(compiled, decoded(), atol=0.03, rtol=0.03)
    assert len(calls) == 5 * len(parts)
