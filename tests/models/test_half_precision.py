"""Models of half precision are diagnosed and converted as they are; what is counted is counted in single precision."""

import pytest
import torch

import attngap
from attngap.conversion.evaluate import Measures
from attngap.models.capture import capture
from tests.conversion.small import TEXT
from tests.zoo import tiny, tokenizer

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
