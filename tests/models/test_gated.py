"""Gated MLPs of converted models, one token at a time, beside transformers' own."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from attngap.models.gated import Gated, gated_of
from attngap.models.products import compile_products, plain_products, quick_products
from attngap.models.swap import swap
from attngap.models.twin import undone
from attngap.ops import native
from attngap.ops.thin import ThinGated
from tests.zoo import mechanisms, tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="needs numba")
SIZES = {"hidden_size": 32, "intermediate_size": 48}


@pytest.fixture
def taken(monkeypatch):
    """How many gated MLPs were compiled ones."""
    found: list[torch.Tensor] = []
    times = ThinGated.times
    monkeypatch.setattr(ThinGated, "times", lambda self, x: found.append(x) or times(self, x))
    return found


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def llama(**options) -> LlamaMLP:
    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(**SIZES | options))


def quick(module: nn.Module) -> nn.Module:
    """A copy whose token is compiled."""
    found = copy.deepcopy(module)
    compile_products(found)
    assert isinstance(found.forward, Gated)
    return found


class Multiplied(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class InTraining(LlamaMLP):
    def forward(self, x):
        return super().forward(x) + self.training


class Other(LlamaMLP):
    """Gate and up have changed places."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Wants(LlamaMLP):
    def forward(self, x):
        raise KeyError("something else")


GATED = [
    lambda: llama(),
    lambda: llama(mlp_bias=True),
    lambda: llama(intermediate_size=32),  # where sizes do not tell which is which
    lambda: Other(LlamaConfig(**SIZES)),
    lambda: Qwen3MLP(Qwen3Config(**SIZES)),
    lambda: MistralMLP(MistralConfig(**SIZES)),
]
NOT_GATED = [
    lambda: Gemma2MLP(Gemma2Config(**SIZES)),  # GELU
    lambda: llama(hidden_act="relu"),
    lambda: Phi3MLP(Phi3Config(**SIZES, pad_token_id=0)),  # gate and up are one product
    lambda: Multiplied(LlamaConfig(**SIZES)),
    lambda: InTraining(LlamaConfig(**SIZES)),
    lambda: Wants(LlamaConfig(**SIZES)),
    lambda: nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32), nn.Linear(32, 32)),
    lambda: nn.Linear(32, 32),
]


@pytest.mark.parametrize("make", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_equals_the_module(make, dtype, rows, taken):
    module, x = make().to(dtype), drawn(rows, 1, 32).to(dtype)
    with torch.no_grad():
        found, expected = quick(module)(x), module(x)
    near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 0.05}
    torch.testing.assert_close(found, expected, **near)
    assert len(taken) == (dtype == torch.float32)


@pytest.mark.parametrize("make", NOT_GATED)
def test_others_are_left_alone(make):
    assert gated_of(make()) is None


def test_what_is_elsewhere_is_left_alone():
    assert gated_of(llama().to("meta")) is None


def test_trying_a_module_leaves_it_and_random_numbers_as_they_were():
    module = llama()
    before, parts, drawn_so_far = dict(vars(module)), dict(module._modules), torch.get_rng_state()
    assert gated_of(module)
    assert vars(module) == before
    assert module._modules == parts
    assert torch.equal(torch.get_rng_state(), drawn_so_far)


@pytest.mark.parametrize("x", [drawn(1, 3, 32), drawn(5, 1, 32), drawn(32), drawn(1, 1, 32).double()])
def test_what_is_not_a_token_is_the_modules(x, taken):
    module = llama().to(x.dtype)
    with torch.no_grad():
        torch.testing.assert_close(quick(module)(x), module(x))
    assert not taken


@pytest.mark.parametrize("make", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_the_modules_without_memory_between(make, dtype, monkeypatch):
    module, x = make().to(dtype), drawn(2, 7, 32).to(dtype)
    other, in_place, silu = quick(module), [], F.silu
    monkeypatch.setattr(F, "silu", lambda x, inplace=False: in_place.append(inplace) or silu(x, inplace=inplace))
    with torch.no_grad():
        found, expected = other(x), module(x)
    assert torch.equal(found, expected) or dtype == torch.float32  # where oneDNN multiplies
    torch.testing.assert_close(found, expected)
    assert in_place == [True, False]


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_what_a_hook_keeps_of_many_rows_stays_as_it_was(name):
    module, x, seen = quick(llama()), drawn(1, 5, 32), []
    module.get_submodule(name).register_forward_hook(lambda part, args, out: seen.extend((out, out.clone())))
    with torch.no_grad():
        module(x)
    kept, copied = seen
    assert torch.equal(kept, copied)


def test_a_row_with_gaps(taken):
    module, x = llama(), drawn(1, 1, 64)[..., ::2]
    with torch.no_grad():
        torch.testing.assert_close(quick(module)(x), module(x), atol=1e-6, rtol=1e-5)
    assert len(taken) == 1


def test_odd_widths_are_the_modules(taken):
    module, x = llama(intermediate_size=50), drawn(1, 1, 32)
    with torch.no_grad():
        torch.testing.assert_close(quick(module)(x), module(x))
    assert not taken


def test_gradients_transforms_and_no_kernels_are_the_modules(taken):
    module, x = quick(llama()), drawn(1, 1, 32)
    module(x).sum().backward()
    assert module.down_proj.weight.grad is not None
    with torch.no_grad():
        torch.vmap(module)(drawn(5, 1, 32))
        with native.off():
            module(x)
    assert not taken


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_hooks_of_parts_are_called(name, taken):
    module, x, seen = quick(llama()), drawn(1, 1, 32), []
    part = module.get_submodule(name)
    for register in (
        lambda: part.register_forward_hook(lambda *_: seen.append(1)),
        lambda: part.register_forward_pre_hook(lambda *_: seen.append(1)),
        lambda: register_module_forward_hook(lambda each, *_: seen.append(1) if each is part else None),
    ):
        hook = register()
        with torch.no_grad():
            module(x)
        hook.remove()
        assert seen == [1]
        seen.clear()
    assert not taken
    with torch.no_grad():
        module(x)
    assert len(taken) == 1


class Adapter(nn.Module):
    """As peft's layers wrap what they adapt."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer

    def forward(self, x):
        return self.base_layer(x) + 1


@pytest.mark.parametrize(
    ("name", "part"),
    [("up_proj", Adapter(nn.Linear(32, 48))), ("act_fn", nn.GELU()), ("down_proj", nn.Linear(48, 32))],
)
def test_parts_that_were_exchanged_are_called(name, part, taken):
    module, x = quick(llama()), drawn(1, 1, 32)
    with torch.no_grad():
        module(x)
        setattr(module, name, part)
        torch.testing.assert_close(module(x), type(module).forward(module, x))
    assert len(taken) == 1


def test_training_and_casting_are_seen(taken):
    module, x = quick(llama(mlp_bias=True)), drawn(1, 1, 32)
    with torch.no_grad():
        for part in (module.gate_proj, module.up_proj, module.down_proj):
            module(x)
            part.weight.mul_(2)
            part.bias.add_(1)
            torch.testing.assert_close(module(x), type(module).forward(module, x), atol=1e-6, rtol=1e-5)
            part.weight = nn.Parameter(-part.weight)
            torch.testing.assert_close(module(x), type(module).forward(module, x), atol=1e-6, rtol=1e-5)
        assert len(taken) == 9
        module.double()
        assert torch.equal(module(x.double()), type(module).forward(module, x.double()))
    assert len(taken) == 9


def test_copies_compute_with_their_own_weights(taken):
    module, x = quick(llama()), drawn(1, 1, 32)
    with torch.no_grad():
        before = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            other.down_proj.weight.zero_()
            assert float(other(x).abs().max()) == 0
        assert torch.equal(module(x), before)
    assert len(taken) == 4


def test_names_of_arguments_stay():
    module, x = quick(llama()), drawn(1, 1, 32)
    with torch.no_grad():
        torch.testing.assert_close(module(x=x), module(x), atol=1e-6, rtol=1e-5)
    assert list(inspect.signature(module.forward).parameters) == ["x"]


def gated(model: nn.Module) -> int:
    return sum(isinstance(vars(part).get("forward"), Gated) for part in model.modules())


def test_converted_models_have_them_and_originals_only_for_a_while(taken):
    original = tiny()
    converted = swap(original, {layer: (m, [1]) for layer, m in mechanisms(original).items()})
    assert gated(converted) == 2
    assert not gated(original)
    assert not gated(undone(converted))
    tokens = torch.randint(5, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = converted(tokens[:, :23], use_cache=True).past_key_values
        assert not taken
        last = converted(tokens[:, 23:], past_key_values=cache, use_cache=True).logits[0, -1]
        assert len(taken) == 2
        plain_products(converted)
        assert not gated(converted)
        torch.testing.assert_close(last, converted(tokens, use_cache=False).logits[0, -1], atol=1e-4, rtol=1e-4)
    with quick_products(original):
        assert gated(original) == 2
    assert not gated(original)
