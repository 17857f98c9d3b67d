"""Linear layers of converted models, one token at a time."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from attngap.models.products import Product, compile_products, plain_products, quick_products
from attngap.models.swap import swap
from attngap.models.twin import undone
from attngap.ops import native
from attngap.ops.thin import ThinWeight
from tests.zoo import mechanisms, tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")


@pytest.fixture
def taken(monkeypatch):
    """How many products were compiled ones."""
    counts = {"times": 0}
    times = ThinWeight.times

    def counted(self, x):
        counts["times"] += 1
        return times(self, x)

    monkeypatch.setattr(ThinWeight, "times", counted)
    return counts


@pytest.fixture
def layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))
    compile_products(model)
    return model


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, model[0].weight, model[0].bias).relu(), model[2].weight)


def test_one_token_is_compiled_and_a_prompt_is_torchs(layers, taken):
    with torch.no_grad():
        token, prompt = torch.randn(2, 1, 32), torch.randn(1, 3, 32)
        torch.testing.assert_close(layers(token), plain(layers, token))
        assert taken["times"] == 2
        assert torch.equal(layers(prompt), plain(layers, prompt))
        assert taken["times"] == 2


def test_gradients_are_torchs(layers, taken):
    layers(torch.randn(1, 1, 32)).sum().backward()
    assert layers[0].weight.grad is not None
    assert not taken["times"]


def test_training_and_casting_are_seen(layers, taken):
    token = torch.randn(1, 1, 32)
    with torch.no_grad():
        layers(token)
        layers[0].weight.mul_(2)
        layers[0].bias.add_(1)
        torch.testing.assert_close(layers(token), plain(layers, token))
        layers.to(torch.bfloat16)
        half = token.to(torch.bfloat16)
        torch.testing.assert_close(layers(half), plain(layers, half), atol=0.05, rtol=0.05)
        assert taken["times"] == 6
        layers.double()
        assert torch.equal(layers(token.double()), plain(layers, token.double()))
        assert taken["times"] == 6


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_pruned_layers_compute_with_what_is_left(layers, name):
    token = torch.randn(1, 1, 32)
    with torch.no_grad():
        layers(token)
        prune.random_unstructured(layers[0], name, amount=0.9)
        torch.testing.assert_close(layers(token), plain(layers, token))


def test_copies_compute_with_their_own_weights(layers):
    token = torch.randn(1, 1, 32)
    with torch.no_grad():
        layers(token)
        for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
            other[0].weight.zero_()
            other[0].bias.zero_()
            assert float(other(token).abs().max()) == 0
        torch.testing.assert_close(layers(token), plain(layers, token))


def test_other_kinds_of_linear_layers_and_forwards_stay():
    class Own(nn.Linear):
        pass

    patched = nn.Linear(16, 16)
    vars(patched)["forward"] = lambda x: x
    model = nn.Sequential(Own(16, 16), patched)
    compile_products(model)
    assert "forward" not in vars(model[0])
    assert not isinstance(patched.forward, Product)


@pytest.mark.filterwarnings("ignore")  # torch means to give it up
def test_dynamic_quantization_takes_the_layers_over(layers):
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(layers), {nn.Linear}, dtype=torch.qint8)
    token = torch.randn(1, 1, 32)
    with torch.no_grad():
        assert float((quantized(token) - plain(layers, token)).abs().max()) < 0.1
    assert not any(isinstance(vars(part).get("forward"), Product) for part in quantized.modules())


def test_a_transform_of_torch_gets_torchs_products(layers, taken):
    token = torch.randn(5, 1, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(layers)(token), plain(layers, token))
    assert not taken["times"]


def test_converted_models_have_them_and_originals_do_not(taken):
    original = tiny()
    converted = swap(original, {layer: (m, [1]) for layer, m in mechanisms(original).items()})
    assert any(isinstance(vars(part).get("forward"), Product) for part in converted.modules())
    for model in (original, undone(converted)):
        assert not any(isinstance(vars(part).get("forward"), Product) for part in model.modules())
    tokens = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = converted(tokens[:, :23], use_cache=True).past_key_values
        taken["times"] = 0
        last = converted(tokens[:, 23:], past_key_values=cache, use_cache=True).logits[0, -1]
        assert taken["times"]
        plain_products(converted)
        torch.testing.assert_close(last, converted(tokens, use_cache=False).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_without_replaced_heads_nothing_is_compiled():
    found = swap(tiny(), {})
    assert not any(isinstance(vars(part).get("forward"), Product) for part in found.modules())


def products(model: nn.Module) -> int:
    return sum(isinstance(vars(part).get("forward"), Product) for part in model.modules())


def test_a_model_multiplies_quickly_for_a_while():
    model = tiny()
    tokens = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens).logits
        with quick_products(model):
            assert products(model)
            torch.testing.assert_close(model(tokens).logits, before, atol=1e-4, rtol=1e-4)
            with quick_products(model):
                pass
            assert products(model), "an inner use ended the outer one"
        assert not products(model)
        assert torch.equal(model(tokens).logits, before)


def test_what_multiplied_quickly_before_does_so_afterwards(layers):
    count = products(layers)
    with pytest.raises(RuntimeError), quick_products(layers):
        raise RuntimeError
    assert products(layers) == count > 0


def test_gradients_through_frozen_layers_are_torchs_within_rounding(layers):
    layers.requires_grad_(False)
    x = torch.randn(1, 20, 32, requires_grad=True)
    (found,) = torch.autograd.grad(layers(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(layers, x).square().sum(), x)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
