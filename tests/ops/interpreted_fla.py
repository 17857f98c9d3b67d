"""Hybrid attention with its far part by flash-linear-attention's own kernels, run on the CPU by Triton's interpreter.

    TRITON_INTERPRET=1 TRITON_F32_DEFAULT=ieee python tests/ops/interpreted_fla.py

Prints the largest error of values, gradients and state, relative to the largest entry, beside that of torch's form.
Two things of a GPU are stood in for: the choice among tilings by their speed (the one numbered by `--tiling` is taken),
and loop counters, which are tensors in compiled code and plain numbers in the interpreter. Where a kernel asks for
TF32, products of single precision round their factors as the card would.
"""

import argparse
import builtins
import warnings

import numpy as np
import torch

warnings.filterwarnings("ignore", message="Triton is not supported on current platform")

import fla.ops.common.chunk_h  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import autotuner, interpreter  # noqa: E402

from attngap.ops import native  # noqa: E402
from attngap.ops.hybrid import attention, definition  # noqa: E402
from attngap.ops.hybrid import fla as ours  # noqa: E402

CPU = torch.device("cpu")
asked: set[str] = set()  # precisions that the kernels asked for


def counted(*bounds):
    for i in builtins.range(*bounds):
        yield tl.tensor(interpreter.TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """The nearest number with ten bits behind the leading one."""
    return ((x.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def stand_in(tiling: int) -> None:
    exact_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, precision, imprecise):
        asked.add(precision.name)
        if precision.name == "TF32":
            a, b = (interpreter.TensorHandle(to_tf32(np.ascontiguousarray(x.data)), x.dtype) for x in (a, b))
        return exact_dot(self, a, b, d, precision, imprecise)

    def speed(self, *_, config, **__):
        return [float(self.configs.index(config) != tiling % len(self.configs))] * 3

    interpreter.InterpreterBuilder.create_dot = dot
    autotuner.Autotuner._bench = speed
    fla.ops.common.chunk_h.range = counted


def error(width: int, value_width: int, *, kv: int, window: int, sinks: int, relative: bool) -> float:
    """Of two pieces of a sequence, with the gradients through both, against the definition in double precision."""
    draw = torch.Generator().manual_seed(width)
    heads, t, cut = 4, 150, 70

    def rows(h, *size):
        return torch.randn(1, h, t, *size, generator=draw, dtype=torch.float64)

    inputs = [rows(heads, 8), rows(kv, 8), rows(kv, value_width), rows(heads, width).exp(), rows(kv, width).exp()]
    inputs = [x.requires_grad_() for x in (*inputs, rows(heads))]
    options = {"window": window, "sinks": sinks, "relative": relative}
    wanted = definition.hybrid_attention(*inputs[:5], log_gain=inputs[5], **options)
    single = [x.detach().float().requires_grad_() for x in inputs]
    first, state = attention.hybrid_attention(
        *(x[:, :, :cut] for x in single[:5]), log_gain=single[5][:, :, :cut], **options
    )
    last, state = attention.hybrid_attention(
        *(x[:, :, cut:] for x in single[:5]), log_gain=single[5][:, :, cut:], **options, state=state
    )
    found = torch.cat((first, last), 2)
    above = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    gone = inputs[4][:, :, sinks : t - window]
    pairs = [(found, wanted), (state["z"], gone.sum(2)), (state["S"], gone.mT @ inputs[2][:, :, sinks : t - window])]
    pairs += zip(
        torch.autograd.grad(found, single, above.float()), torch.autograd.grad(wanted, inputs, above), strict=True
    )
    return max(float((x - y).detach().abs().max() / y.detach().abs().max()) for x, y in pairs)


def largest(cases: list[tuple[int, int]]) -> float:
    settings = ((4, 1, 0, False), (2, 20, 4, True))
    with native.off():
        return max(
            error(*case, kv=kv, window=window, sinks=sinks, relative=relative)
            for case in cases
            for kv, window, sinks, relative in settings
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiling", type=int, default=0)
    stand_in(parser.parse_args().tiling)
    cases = [(16, 16), (24, 33), (256, 20)]
    agrees = all(ours._agrees(CPU, 4, *case, tracked=True) for case in cases)
    in_torch = largest(cases)
    ours.usable = lambda *_, **__: True
    print(
        f"agrees {agrees}, products {'+'.join(sorted(asked))}, torch's form off by {in_torch:.2e}, theirs by", end=" "
    )
    print(f"{largest(cases):.2e}")
