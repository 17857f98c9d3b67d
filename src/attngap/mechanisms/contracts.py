"""The laws every mechanism obeys, as checks anybody can run: `check(my_mechanism)` after changing or adding one.

>>> from attngap.mechanisms.catalogue import mechanism
>>> check(mechanism("elu", heads=2, dim=4))
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attngap.mechanisms.base import Mechanism, State, Streams

VALUE = 1e-10  # float64, relative to the largest entry
HALF = 0.03  # bfloat16, likewise: eight bits of mantissa, sums in float32
LENGTH = 20
SHORT = 6  # below the width of most maps
LONG = 40  # for ranks: a block must be able to exceed what is declared


class BrokenContractError(AssertionError):
    """A law does not hold; the message says which, by how much, and where."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs for one mechanism; `streams` reads them anew, so that gradients reach the parameters."""

    mechanism: Mechanism
    x: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor

    def streams(self, start: int = 0, stop: int | None = None, **changes: Tensor) -> Streams:
        inputs = {"q": self.q, "k": self.k, "v": self.v} | changes
        x = None if self.x is None else self.x[:, start:stop]
        return self.mechanism.read(x, *(inputs[n][:, :, start:stop] for n in "qkv"), start=start)

    def to(self, dtype: torch.dtype) -> "Case":
        x = None if self.x is None else self.x.to(dtype)
        m = copy.deepcopy(self.mechanism).to(dtype)
        return Case(m, x, self.q.to(dtype), self.k.to(dtype), self.v.to(dtype))


def make_case(mechanism: Mechanism, *, length: int = LENGTH, batch: int = 2, seed: int = 0, mean: float = 0.0) -> Case:
    """A float64 copy of the mechanism with its parameters moved off their initial values, and inputs of that length.

    `mean` is that of q and k.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    m = copy.deepcopy(mechanism).double()
    with torch.no_grad():
        for parameter in m.parameters():
            parameter += 0.1 * draw(*parameter.shape)
    x = draw(batch, length, m.model_dim) if m.gated and m.model_dim else None
    q, k = draw(batch, m.heads, length, m.dim) + mean, draw(batch, m.kv_heads, length, m.dim) + mean
    return Case(m, x, q, k, draw(batch, m.kv_heads, length, m.value_dim))


def run_steps(m: Mechanism, streams: Streams, state: State | None = None) -> tuple[Tensor, State]:
    """Token by token: what the other forms must equal."""
    state = m.init_state(streams) if state is None else state
    rows = []
    for i in range(streams.length):
        row, state = m.step(state, streams.slice(i, i + 1))
        rows.append(row)
    return torch.cat(rows, 2), state


def forms(m: Mechanism) -> dict[str, Callable[[Streams], Tensor]]:
    """Every form as a function of the streams, the defining one first."""
    found: dict[str, Callable[[Streams], Tensor]] = {
        "parallel": m.parallel,
        "chunked": lambda streams: m.chunked(streams)[0],
        "chunked by 3": lambda streams: m.chunked(streams, chunk=3)[0],
    }
    return {"step": lambda streams: run_steps(m, streams)[0], **found} if m.causal else found


def forms_agree(case: Case) -> None:
    """Every form gives the output of the defining one."""
    streams = case.streams()
    (first, define), *others = forms(case.mechanism).items()
    expected = define(streams)
    for name, form in others:
        _equal(form(streams), expected, f"{name} against {first}")


def gradients_agree(case: Case) -> None:
    """Every form gives the gradients of the defining one, for inputs and parameters."""
    (first, define), *others = forms(case.mechanism).items()
    expected = _gradients(case, define)
    for name, form in others:
        for label, got in _gradients(case, form).items():
            _equal(got, expected[label], f"gradient of {label}, {name} against {first}")


def mix_agrees(case: Case) -> None:
    """`mix` gives the output and the gradients of `parallel`, for few tokens and for many, padded too."""
    for length in (SHORT, LENGTH):
        here = make_case(case.mechanism, length=length)
        m = here.mechanism
        expected = _gradients(here, m.parallel)
        for label, got in _gradients_of(here, m.mix).items():
            _equal(got, expected[label], f"gradient of {label}, mix of {length} tokens against parallel")
        out = m.parallel(here.streams())
        _equal(m.mix(here.x, here.q, here.k, here.v), out, f"mix of {length} tokens against parallel")
        padded, mask = _pad(here, 2, 1)
        inside = m.mix(padded.x, padded.q, padded.k, padded.v, mask=mask)[:, :, 2:-1]
        _equal(inside, out, f"mix of {length} tokens with padding against parallel")


def state_carries(case: Case) -> None:
    """Fed in pieces, with the state handed on, the output is that of one pass; so is the state, in either form."""
    m = case.mechanism
    if not m.causal:
        return
    whole, whole_state = run_steps(m, case.streams())
    length = case.q.shape[2]
    for cuts in ((1,), (length // 3, length // 2), (length - 1,)):
        state, pieces = None, []
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            out, state = m.chunked(case.streams(start, stop), state)
            pieces.append(out)
        _equal(torch.cat(pieces, 2), whole, f"output with cuts at {cuts}")
        assert state is not None
        _same_state(state, whole_state, f"chunked with cuts at {cuts}")
        again, _ = run_steps(m, case.streams(cuts[-1]), m.chunked(case.streams(0, cuts[-1]))[1])
        _equal(again, whole[:, :, cuts[-1] :], f"steps from the state of chunked at {cuts[-1]}")


def past_only(case: Case) -> None:
    """A causal row does not move when later tokens change."""
    m, length = case.mechanism, case.q.shape[2]
    if not m.causal:
        return
    cut = length // 2
    later = torch.arange(length)[:, None] >= cut
    changed = dataclasses.replace(
        case,
        x=None if case.x is None else torch.where(later, 2 * case.x + 1, case.x),
        **{name: torch.where(later, 2 * getattr(case, name) + 1, getattr(case, name)) for name in ("q", "k", "v")},
    )
    for name, form in forms(m).items():
        before, after = form(case.streams())[:, :, :cut], form(changed.streams())[:, :, :cut]
        _equal(after, before, f"{name}: rows before {cut} after tokens from {cut} on were changed")


def linear_in_v(case: Case) -> None:
    """mix(2 v - 3 u) = 2 mix(v) - 3 mix(u)."""
    u = case.v.flip(2)
    for name, form in forms(case.mechanism).items():
        mixed = form(case.streams(v=2 * case.v - 3 * u))
        _equal(mixed, 2 * form(case.streams()) - 3 * form(case.streams(v=u)), name)


def padding_is_neutral(case: Case) -> None:
    """Padding before and after changes no output of a real token, gives zeros, and leaves the state usable."""
    m = case.mechanism
    expected = forms(m)["parallel"](case.streams())
    for left, right in ((3, 0), (2, 4)):
        padded, mask = _pad(case, left, right)
        inside = slice(left, left + case.q.shape[2])
        for name, form in forms(m).items():
            out = form(m.read(padded.x, padded.q, padded.k, padded.v, mask=mask))
            _equal(out[:, :, inside], expected, f"{name} with {left} tokens of padding before and {right} after")
            outside = torch.cat([out[:, :, :left], out[:, :, inside.stop :]], 2)
            if bool(outside.ne(0).any()):
                raise BrokenContractError(f"{name}: rows of padding must be zero, got {outside.abs().max().item():.3g}")
        if m.causal:
            _, state = m.chunked(m.read(padded.x, padded.q, padded.k, padded.v, mask=mask))
            token = case.streams(0, 1)
            after, _ = m.chunked(token, m.chunked(case.streams())[1])
            _equal(m.chunked(token, state)[0], after, f"the token after {left} + {right} tokens of padding")


def floats_as_declared(case: Case) -> None:
    """The state holds `state_floats(t)` floats for each sequence and key head, in either form."""
    m = case.mechanism
    if not m.causal:
        return
    for t in (1, 5, case.q.shape[2]):
        streams = case.streams(0, t)
        for name, state in (("step", run_steps(m, streams)[1]), ("chunked", m.chunked(streams)[1])):
            floats = sum(x.numel() for x in state.values() if x.is_floating_point())
            declared = case.q.shape[0] * m.kv_heads * m.state_floats(t)
            if floats != declared:
                raise BrokenContractError(
                    f"state after {t} tokens by {name} holds {floats} floats; state_floats declares {declared}"
                )


def rank_as_declared(case: Case) -> None:
    """No block W[t:, :t+1] has a rank above `state_rank(t)`."""
    case = make_case(case.mechanism, length=LONG)
    weights = case.mechanism.weights(case.streams()).detach()
    for t in range(weights.shape[-1]):
        declared = case.mechanism.state_rank(t)
        rank = int(torch.linalg.matrix_rank(weights[..., t:, : t + 1], rtol=1e-9).max())
        if rank > declared:
            raise BrokenContractError(f"W[{t}:, :{t + 1}] has rank {rank}; state_rank({t}) declares {declared}")


def rows_sum_as_declared(case: Case) -> None:
    """Rows that read anything sum to one exactly where `normalized` says so."""
    weights = case.mechanism.weights(case.streams()).detach()
    sums = weights.sum(-1)[weights.abs().amax(-1) > 0]
    error = (sums - 1).abs().max().item()
    if case.mechanism.normalized and error > VALUE * max(1.0, weights.abs().max().item()):
        raise BrokenContractError(f"normalized, but a row sums to one only within {error:.3g}")
    if not case.mechanism.normalized and error < 1e-3:
        raise BrokenContractError("not declared normalized, but every row sums to one")


def weights_are_the_mixing(case: Case) -> None:
    """`weights` is what `parallel` and `chunked` give for v = identity."""
    m, streams = case.mechanism, case.streams()
    b, heads, t, _ = streams.v.shape
    identity = streams.replace(v=torch.eye(t, dtype=streams.v.dtype).expand(b, heads, t, t))
    expected = m.weights(streams)
    _equal(m.parallel(identity), expected, "parallel on the identity")
    _equal(m.chunked(identity)[0], expected, "chunked on the identity")


def parameters_as_declared(case: Case) -> None:
    """`learned` says whether there are parameters, and every one of them gets a gradient."""
    m = case.mechanism
    if m.learned != any(True for _ in m.parameters()):
        raise BrokenContractError(f"learned={m.learned}, but there are {len(list(m.parameters()))} parameter tensors")
    found = _gradients(case, forms(m)["chunked"])
    for name, _ in m.named_parameters():
        if not bool(found[name].ne(0).any()):
            raise BrokenContractError(f"parameter {name} gets no gradient")


def state_dict_round_trip(case: Case) -> None:
    """Saved and loaded into a scrambled copy, the mechanism gives the same output."""
    m = case.mechanism
    other = copy.deepcopy(m)
    with torch.no_grad():
        for x in other.state_dict().values():
            x.copy_(torch.rand_like(x))
    other.load_state_dict(m.state_dict(), strict=True)
    restored = dataclasses.replace(case, mechanism=other)
    _equal(other.chunked(restored.streams())[0], m.chunked(case.streams())[0], "output after loading")


def no_stale_memory(case: Case) -> None:
    """Buffers that start as NaN leave no trace in outputs or gradients."""
    expected = case.mechanism.parallel(case.streams())
    with _poisoned_memory():
        out = case.mechanism.chunked(case.streams())[0]
        found = _gradients(case, forms(case.mechanism)["chunked"])
    _equal(out, expected, "chunked with poisoned buffers")
    for name, gradient in found.items():
        if not bool(gradient.isfinite().all()):
            raise BrokenContractError(f"gradient of {name} is not finite with poisoned buffers")


def half_precision(case: Case) -> None:
    """In bfloat16 the output stays within HALF of float64 on the same rounded inputs, relative to its largest entry.

    Queries and keys have a mean of two here: near a vanishing normalizer no bound could hold in any precision.
    """
    low = make_case(case.mechanism, mean=2.0).to(torch.bfloat16)
    exact = low.to(torch.float64)
    expected = exact.mechanism.parallel(exact.streams())
    for name, form in forms(low.mechanism).items():
        out = form(low.streams())
        if out.dtype != torch.bfloat16:
            raise BrokenContractError(f"{name} of bfloat16 inputs gave {out.dtype}")
        _equal(out.double(), expected, f"bfloat16, {name}", HALF)


LAWS: tuple[Callable[[Case], None], ...] = (
    forms_agree,
    gradients_agree,
    mix_agrees,
    state_carries,
    past_only,
    linear_in_v,
    padding_is_neutral,
    floats_as_declared,
    rank_as_declared,
    rows_sum_as_declared,
    weights_are_the_mixing,
    parameters_as_declared,
    state_dict_round_trip,
    no_stale_memory,
    half_precision,
)


def check(mechanism: Mechanism, *, seed: int = 0) -> None:
    """Raise `BrokenContractError` at the first law this mechanism breaks. Small sizes, a second or so."""
    for law in LAWS:
        try:
            law(make_case(mechanism, seed=seed))
        except BrokenContractError as error:
            raise BrokenContractError(f"{mechanism.name} breaks {law.__name__}: {error}") from None


def _equal(got: Tensor, expected: Tensor, what: str, tolerance: float = VALUE) -> None:
    if got.shape != expected.shape:
        raise BrokenContractError(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.detach(), expected.detach()
    error = (got - expected).abs().max().item() if got.numel() else 0.0
    largest = max(1.0, expected.abs().max().item()) if got.numel() else 1.0
    if not error <= tolerance * largest:  # `not <=` also catches NaN
        raise BrokenContractError(f"{what}: off by {error:.3g} where entries reach {largest:.3g}")


def _same_state(got: State, expected: State, what: str) -> None:
    if got.keys() != expected.keys():
        raise BrokenContractError(f"state of {what} holds {sorted(got)}, that of step {sorted(expected)}")
    for name in expected:
        if got[name].dtype != expected[name].dtype:
            raise BrokenContractError(
                f"state {name} of {what} is {got[name].dtype}, that of step {expected[name].dtype}"
            )
        _equal(got[name].double(), expected[name].double(), f"state {name} of {what}")


def _gradients(case: Case, form: Callable[[Streams], Tensor]) -> dict[str, Tensor]:
    return _gradients_of(case, lambda *inputs: form(case.mechanism.read(*inputs)))


def _gradients_of(case: Case, mix: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Of some product with the output of mix(x, q, k, v), for inputs and parameters."""
    inputs = {"x": case.x, "q": case.q, "k": case.k, "v": case.v}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x is not None}
    out = mix(leaves.get("x"), leaves["q"], leaves["k"], leaves["v"])
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    wanted = leaves | dict(case.mechanism.named_parameters())
    grads = torch.autograd.grad((out * cotangent).sum(), list(wanted.values()), materialize_grads=True)
    return dict(zip(wanted, grads, strict=True))


def _pad(case: Case, left: int, right: int) -> tuple[Case, Tensor]:
    def pad(x: Tensor) -> Tensor:
        # Large values, not zeros: what padding holds must not matter.
        edges = (torch.full_like(x[..., :1, :], 7.0).expand(*x.shape[:-2], n, -1) for n in (left, right))
        before, after = edges
        return torch.cat([before, x, after], -2)

    x = None if case.x is None else pad(case.x)
    mask = torch.zeros(case.q.shape[0], left + case.q.shape[2] + right, dtype=torch.bool)
    mask[:, left : left + case.q.shape[2]] = True
    return Case(case.mechanism, x, pad(case.q), pad(case.k), pad(case.v)), mask


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fresh buffers hold NaN while inside: what torch's deterministic mode fills them with."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
