"""Linear attention: equal to its definition in value and gradient, whatever the shapes, gates, masks and states."""

import dataclasses
import importlib.util
import inspect
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngap.errors import AttngapError
from attngap.ops import groups
from attngap.ops.linear import definition, linear_attention
from attngap.ops.pairs import expand_heads

pytestmark = pytest.mark.usefixtures("both_ways")

KINDS = ("none", "scalar", "vector", "scalar a query head", "vector a query head")


@dataclasses.dataclass
class Case:
    """Inputs of one call, with a positive normalizer unless said otherwise."""

    kind: str = "none"
    b: int = 2
    kv_heads: int = 2
    group: int = 1
    t: int = 19
    r: int = 3
    dv: int = 5
    masked: bool = False
    carried: bool = False
    normalize: bool = True
    dtype: torch.dtype = torch.float64

    def inputs(self) -> dict[str, torch.Tensor]:
        heads = self.kv_heads * self.group
        made = {
            "q": torch.rand(self.b, heads, self.t, self.r, dtype=self.dtype) + 0.1,
            "k": torch.rand(self.b, self.kv_heads, self.t, self.r, dtype=self.dtype) + 0.1,
            "v": torch.randn(self.b, self.kv_heads, self.t, self.dv, dtype=self.dtype),
        }
        state_heads = heads if "query" in self.kind else self.kv_heads
        if self.kind != "none":
            width = (self.r,) if self.kind.startswith("vector") else ()
            made["log_decay"] = -2 * torch.rand(self.b, state_heads, self.t, *width, dtype=self.dtype)
            made["log_decay"][:, :, ::5] *= 50  # strong decays among mild ones
        if self.carried:
            made["S"] = torch.randn(self.b, state_heads, self.r, self.dv, dtype=self.dtype)
            if self.normalize:
                made["z"] = torch.rand(self.b, state_heads, self.r, dtype=self.dtype)
        return made

    def mask(self) -> torch.Tensor | None:
        return torch.rand(self.b, self.t) > 0.3 if self.masked else None


def call(op, inputs, **options):
    """The op on named inputs, its output and state in one dict."""
    inputs = dict(inputs)
    state = {name: inputs.pop(name) for name in ("S", "z") if name in inputs} or None
    log_decay = inputs.pop("log_decay", None)
    out, after = op(**inputs, log_decay=log_decay, state=state, **options)
    return {"out": out, **after}


def grads(op, inputs, **options):
    """Results, and the gradients of a random functional of output and final state."""
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    results = call(op, inputs, **options)
    seed = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=results["out"].dtype)
    for name, x in results.items():
        if name != "out":  # the definition keeps a state for every query head, alike inside a group
            x = expand_heads(x, results["out"].shape[1])
        loss = loss + (x * torch.randn(x.shape, generator=seed, dtype=torch.float64).to(x.dtype)).sum()
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
    return results, dict(zip(inputs, found, strict=True))


def agree(case: Case, tolerance=1e-10, **options):
    inputs, mask = case.inputs(), case.mask()
    options = {"normalize": case.normalize, "mask": mask, **options}
    chunk = options.pop("chunk", 8)
    expected, expected_grads = grads(definition.linear_attention, inputs, **options)
    got, got_grads = grads(linear_attention, inputs, chunk=chunk, **options)
    for name, x in got.items():
        x = x if name == "out" else expand_heads(x, inputs["q"].shape[1])
        torch.testing.assert_close(x, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for name, x in got_grads.items():
        torch.testing.assert_close(
            x, expected_grads[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )


@pytest.fixture(params=[200, 2**17], ids=["many groups", "one group"])
def group_size(request, monkeypatch):
    monkeypatch.setattr(groups, "GROUP", request.param)


@pytest.mark.usefixtures("group_size")
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "raw"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_definition(kind, group, normalize, masked, carried):
    agree(Case(kind, group=group, masked=masked, carried=carried, normalize=normalize))


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "raw"])
@pytest.mark.parametrize("group", [1, 2])
def test_bidirectional_equals_its_definition(group, normalize, masked):
    agree(Case(group=group, masked=masked, normalize=normalize), causal=False)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    b=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    t=st.integers(1, 23),
    r=st.integers(1, 5),
    dv=st.integers(1, 5),
    masked=st.booleans(),
    normalize=st.booleans(),
    chunk=st.integers(1, 30),
)
def test_any_shape(chunk, **shape):
    agree(Case(**shape), chunk=chunk)


@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from(KINDS), t=st.integers(2, 40), data=st.data())
def test_a_sequence_fed_in_pieces(kind, t, data):
    cut = data.draw(st.integers(1, t - 1))
    case = Case(kind, t=t, group=2)
    inputs = case.inputs()
    whole = call(linear_attention, inputs, chunk=8)
    first = call(linear_attention, {name: x[:, :, :cut] for name, x in inputs.items()}, chunk=8)
    rest = {name: x[:, :, cut:] for name, x in inputs.items()}
    second = call(linear_attention, {**rest, "S": first["S"], "z": first["z"]}, chunk=8)
    torch.testing.assert_close(torch.cat([first["out"], second["out"]], 2), whole["out"], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second["S"], whole["S"], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second["z"], whole["z"], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("group_size")
@pytest.mark.parametrize("kind", ["none", "scalar", "vector"])
def test_a_state_with_the_heads_of_q_is_taken(kind):
    """Such a state may differ inside a group of heads, so it cannot be shrunk to the heads of k, nor can k's decay."""
    inputs = Case(kind, group=2).inputs()
    inputs["S"], inputs["z"] = torch.randn(2, 4, 3, 5).double(), torch.rand(2, 4, 3).double()
    got, got_grads = grads(linear_attention, inputs, chunk=8)
    expected, expected_grads = grads(definition.linear_attention, inputs)
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-10, atol=1e-10)
    for name in got_grads:
        torch.testing.assert_close(got_grads[name], expected_grads[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_of_fifty_a_step_stay_exact(kind, dtype):
    case = Case(kind, t=150, r=4, normalize=False, dtype=torch.float64)
    inputs = case.inputs()
    inputs["log_decay"] = torch.where(torch.rand(inputs["log_decay"].shape) < 0.5, -50.0, -0.01).double()
    expected, expected_grads = grads(definition.linear_attention, inputs, normalize=False)
    short = {name: x.to(dtype) for name, x in inputs.items()}
    got, got_grads = grads(linear_attention, short, normalize=False)
    bound = 2e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(got["out"].double(), expected["out"], rtol=bound, atol=bound)
    for name, x in got_grads.items():
        scale = expected_grads[name].abs().max().item()
        torch.testing.assert_close(x.double(), expected_grads[name], rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("kind", ["none", "scalar", "vector"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "raw"])
def test_gradcheck(kind, normalize):
    case = Case(kind, b=1, kv_heads=1, group=2, t=7, r=2, dv=2, carried=True, normalize=normalize)
    inputs = case.inputs()
    if kind != "none":
        inputs["log_decay"] = inputs["log_decay"].clamp(-1.5, -0.2)
    names = list(inputs)

    def results(*tensors):
        return tuple(
            call(linear_attention, dict(zip(names, tensors, strict=True)), chunk=3, normalize=normalize).values()
        )

    assert torch.autograd.gradcheck(results, [x.requires_grad_() for x in inputs.values()])


def test_normalizers_that_vanish_follow_the_stated_rule():
    """Rows whose normalizer is 0, tiny, or tiny and negative: 1e-6 with its sign takes its place, and no gradient."""
    q = torch.tensor([[0.0, 0.0], [1e-9, 0.0], [-1e-9, 0.0], [1.0, 0.5]]).double()[None, None]
    k, v = torch.rand(1, 1, 4, 2).double(), torch.randn(1, 1, 4, 3).double()
    inputs = {"q": q, "k": k, "v": v}
    expected, expected_grads = grads(definition.linear_attention, inputs)
    for chunk in (1, 64):
        got, got_grads = grads(linear_attention, inputs, chunk=chunk)
        torch.testing.assert_close(got["out"], expected["out"], rtol=1e-10, atol=1e-10)
        for name in got_grads:
            torch.testing.assert_close(got_grads[name], expected_grads[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["none", "scalar", "vector"])
def test_bfloat16_accumulates_in_float32(kind):
    """Against float32 on the same rounded inputs: values within 1 ulp of bfloat16 (2^-8 of the largest), and twice that
    for gradients, whose two parts are rounded one after the other."""
    case = Case(kind, t=300, r=16, dv=16, dtype=torch.float32)
    short = {name: x.bfloat16() for name, x in case.inputs().items()}
    if kind != "none":
        short["log_decay"] = short["log_decay"].float()
    long = {name: x.float() for name, x in short.items()}
    expected, expected_grads = grads(linear_attention, long)
    got, got_grads = grads(linear_attention, short)
    assert got["out"].dtype == torch.bfloat16
    assert got["S"].dtype == torch.float32
    torch.testing.assert_close(got["S"], expected["S"])  # nothing of the state was ever rounded
    assert (got["out"].float() - expected["out"]).abs().max() <= 2**-8 * expected["out"].abs().max()
    for name in ("q", "k", "v"):
        error = (got_grads[name].float() - expected_grads[name]).abs().max()
        assert error <= 2**-6 * expected_grads[name].abs().max(), name


@pytest.mark.parametrize("kind", ["none", "scalar", "vector"])
def test_values_do_not_depend_on_autograd(kind):
    inputs = Case(kind, dtype=torch.float32).inputs()
    with torch.no_grad():
        plain = call(linear_attention, inputs)
    tracked = call(linear_attention, {name: x.requires_grad_() for name, x in inputs.items()})
    for name in plain:
        assert torch.equal(plain[name], tracked[name])


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_written_before_they_are_read(kind):
    """Deterministic mode fills every fresh buffer with NaN."""
    inputs = Case(kind, group=2, carried=True).inputs()
    torch.use_deterministic_algorithms(True)
    try:
        got, got_grads = grads(linear_attention, inputs, chunk=4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in (*got.values(), *got_grads.values()))


def test_padding_may_hold_anything():
    inputs = Case("scalar").inputs()
    mask = torch.arange(19) < torch.tensor([[12], [19]])
    clean = call(linear_attention, inputs, mask=mask)
    for name in ("q", "k", "v"):
        inputs[name][0, :, 12:] = torch.nan
    dirty = call(linear_attention, inputs, mask=mask)
    assert torch.equal(clean["out"], dirty["out"])
    assert torch.equal(clean["S"], dirty["S"])


@pytest.mark.parametrize("lanes", [1, 3, 100], ids=["a head at a time", "some heads", "all heads"])
@pytest.mark.parametrize("t", [16, 19])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)], ids=["b h t d", "b t h d", "d t h b"])
def test_layouts_do_not_matter(order, t, lanes, monkeypatch):
    """Heads that lie inside tokens, as models hand them over, and widths that lie outside them."""
    inputs = Case(t=t).inputs()
    expected, expected_grads = grads(definition.linear_attention, inputs)
    monkeypatch.setattr(groups, "GROUP", 5 * t * lanes)
    laid_out = {name: x.permute(order).contiguous().permute(order) for name, x in inputs.items()}
    got, got_grads = grads(linear_attention, laid_out, chunk=4)
    torch.testing.assert_close(got["out"], expected["out"], rtol=1e-10, atol=1e-10)
    for name, x in got_grads.items():
        torch.testing.assert_close(x, expected_grads[name], rtol=1e-10, atol=1e-10)


def test_runs_between_compiled_parts():
    torch._dynamo.reset()  # it remembers having met the op
    q, k, v = (x.float() for x in Case().inputs().values())

    def model(x):
        return linear_attention(x * 2, k, v)[0] + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear_attention"):
        torch.compile(model, backend="eager", fullgraph=True)(q)
    torch.testing.assert_close(torch.compile(model, backend="eager")(q), model(q))


def test_a_second_derivative_is_refused():
    q, k, v = (x.requires_grad_() for x in Case().inputs().values())
    out, _ = linear_attention(q, k, v)
    (first,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"log_decay": filled(0.5, 2, 2, 19)}, "log_decay must be finite and at most 0"),
        ({"log_decay": filled(-torch.inf, 2, 2, 19)}, r"got values in \[-inf, -inf\]"),
        ({"log_decay": filled(0, 2, 3, 19)}, r"log_decay must be \(2, 2, 19\) or \(2, 2, 19, 3\), got \(2, 3, 19\)"),
        (
            {"causal": False, "log_decay": filled(0, 2, 2, 19)},
            "log_decay runs along the sequence and needs causal=True",
        ),
        ({"causal": False, "state": {}}, "state runs along the sequence and needs causal=True"),
        ({"state": {"S": filled(0, 2, 2, 3, 5)}}, "state must hold S, z, got S"),
        ({"state": {"S": filled(0, 2, 2, 3, 4), "z": filled(0, 2, 2, 3)}}, r"state\['S'\] must be \(2, 2, 3, 5\), got"),
        ({"q": filled(torch.nan, 2, 2, 19, 3)}, "q holds NaN; every input must be finite"),
        ({"v": filled(torch.inf, 2, 2, 19, 5)}, "v holds infinite values"),
        (
            {"k": filled(1e300, 2, 2, 19, 3), "q": filled(1e300, 2, 2, 19, 3)},
            "overflowed although the inputs are finite",
        ),
    ],
)
def test_bad_input_is_named(change, text):
    op = inspect.unwrap(linear_attention)  # past the shape checks that only pytest runs
    with pytest.raises(AttngapError, match=text):
        op(**{**Case().inputs(), **change})


def fla(rule: str):
    """flash-linear-attention's plain reference of one rule, loaded by path: importing the package needs Triton."""
    root = os.environ.get("ATTNGAP_FLA")
    if not root:
        pytest.skip("set ATTNGAP_FLA to a checkout of flash-linear-attention to compare with it")
    path = Path(root) / "fla" / "ops" / rule / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{rule}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_time(*tensors):
    return (x.transpose(1, 2) for x in tensors)


def test_equals_fla_linear():
    q, k, v = Case(t=70, dtype=torch.float32).inputs().values()
    for normalize in (True, False):
        expected, _ = fla("linear_attn").naive_recurrent_linear_attn(*by_time(q, k, v), scale=1.0, normalize=normalize)
        got, _ = linear_attention(q, k, v, normalize=normalize)
        torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rule", "kind"), [("simple_gla", "scalar"), ("gla", "vector")])
def test_equals_fla_gated(rule, kind):
    inputs = Case(kind, t=70, carried=True, normalize=False, dtype=torch.float32).inputs()
    q, k, v, g, S = inputs.values()
    reference = getattr(fla(rule), f"naive_recurrent_{rule}")
    expected, state = reference(*by_time(q, k, v, g), initial_state=S, output_final_state=True)
    scale = q.shape[-1] ** -0.5
    got, after = linear_attention(q * scale, k, v, log_decay=g, normalize=False, state={"S": S})
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after["S"], state, rtol=1e-4, atol=1e-5)


def test_equals_fla_retention():
    q, k, v = Case(t=70, kv_heads=3, dtype=torch.float32).inputs().values()
    decay = torch.log(1 - 2.0 ** (-5.0 - torch.arange(3)))[None, :, None].expand(2, 3, 70)
    got, _ = linear_attention(q * q.shape[-1] ** -0.5, k, v, log_decay=decay, normalize=False)
    torch.testing.assert_close(got, fla("retention").naive_retention(q, k, v), rtol=1e-4, atol=1e-5)
