"""Vectors of 64 bytes inside compiled kernels: sixteen float32 or eight float64, kept in registers.

A compiler that vectorizes loops by itself must first prove that arrays do not overlap, and it chooses narrow registers.
These few operations say what is meant; where registers are narrower than 64 bytes LLVM cuts the vectors into several.
"""

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from attngap.ops.native import VECTOR

BYTES = VECTOR


OPTIONS: dict[str, Any] = {
    "nogil": True,
    "forceinline": True,
    "cache": True,
    "fastmath": {"contract"},
    "error_model": "numpy",
}


def forget_older(folder: Path) -> None:
    """Delete what was compiled before any file of kernels in the folder changed.

    numba itself looks at the file of the kernel it is asked for, not at those of the kernels that one calls.
    """
    sources = [*folder.glob("**/kernels*.py"), *folder.glob("native/*.py"), folder / "normalizer.py"]
    changed = max(path.stat().st_mtime for path in sources)
    for path in folder.glob("**/__pycache__/*.nb[ic]"):
        with contextlib.suppress(OSError):  # gone already, or not ours to delete
            if path.stat().st_mtime < changed:
                path.unlink()


forget_older(Path(__file__).parent.parent)


def kernel(f: Callable) -> Callable[..., Any]:
    """Compiled on first use, once for each type of its arguments, and kept on disk; runs without Python's lock.

    A kernel is compiled into the one that calls it: calls hand on dozens of numbers, and took a third of the time.
    `contract` lets a product and a sum be one instruction; sums keep their order.
    """
    return _compile(f, OPTIONS)


def called_kernel(f: Callable) -> Callable[..., Any]:
    """A kernel that stays a function of its own: large, and worth a call."""
    return _compile(f, {**OPTIONS, "forceinline": False})


def _compile(f: Callable, options: dict[str, Any]) -> Callable[..., Any]:
    plain = inspect.unwrap(f)  # without what checks types under test
    njit: Any = numba.njit
    try:
        return njit(**options)(plain)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _say_not_kept()
        return njit(**{**options, "cache": False})(plain)


@functools.cache
def _say_not_kept() -> None:
    print(
        "attngap: compiled kernels cannot be kept, neither beside the package nor in the home folder: every process "
        "compiles them anew. Set NUMBA_CACHE_DIR to a folder that can be written, or ATTNGAP_NATIVE=0 to do without",
        file=sys.stderr,
    )


def primitive(f: Callable) -> Callable[..., Any]:
    """An operation that is a few instructions of LLVM; called without its first argument."""
    return intrinsic(inspect.unwrap(f))


class Vector(types.Type):
    def __init__(self, dtype: types.Float):
        self.dtype = dtype
        super().__init__(f"Vector({dtype})")


def ir_type(dtype: types.Float) -> ir.VectorType:
    element = ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()
    return ir.VectorType(element, 8 * BYTES // dtype.bitwidth)


@register_model(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, vector: Vector):
        super().__init__(manager, vector, ir_type(vector.dtype))


@primitive
def load(typing_context, address, kind):
    """The vector at an address, of elements of the type of `kind`."""
    vector = Vector(kind)

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir_type(kind).as_pointer())
        return builder.load(place, align=kind.bitwidth // 8)

    return vector(types.intp, kind), generate


@primitive
def load_half(typing_context, address, kind):
    """The numbers in bfloat16 at an address as a vector of float32: its upper halves, zeros below."""

    def generate(context, builder, signature, arguments):
        vector = ir_type(kind)
        halves = ir.VectorType(ir.IntType(16), vector.count)
        whole = ir.VectorType(ir.IntType(32), vector.count)
        found = builder.load(builder.inttoptr(arguments[0], halves.as_pointer()), align=2)
        shifted = builder.shl(builder.zext(found, whole), ir.Constant(whole, [16] * vector.count))
        return builder.bitcast(shifted, vector)

    return Vector(kind)(types.intp, kind), generate


@primitive
def store(typing_context, address, vector):
    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir_type(vector.dtype).as_pointer())
        builder.store(arguments[1], place, align=vector.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@primitive
def get(typing_context, address, kind):
    """The number at an address, of the type of the other one."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], context.get_data_type(kind).as_pointer()))

    return kind(types.intp, kind), generate


@primitive
def put(typing_context, address, number):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], arguments[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, number), generate


@primitive
def size_of(typing_context, kind):
    """Bytes of a number, known when the kernel is compiled."""
    size = kind.bitwidth // 8
    return types.intp(kind), lambda context, builder, signature, arguments: context.get_constant(types.intp, size)


@primitive
def number(typing_context, value, kind):
    """The value in the type of the other number: an integer or a float64 would widen what it is added to."""

    def generate(context, builder, signature, arguments):
        return context.cast(builder, arguments[0], value, kind)

    return kind(value, kind), generate


@primitive
def splat(typing_context, number):
    """The number in every place."""

    def generate(context, builder, signature, arguments):
        return splat_ir(builder, ir_type(signature.return_type.dtype), arguments[0])

    return Vector(number)(number), generate


@primitive
def times(typing_context, x, y):
    return x(x, y), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@primitive
def plus(typing_context, x, y):
    return x(x, y), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@primitive
def fma(typing_context, x, y, z):
    """x * y + z, rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.call(fma_ir(builder, ir_type(signature.return_type.dtype)), arguments)

    return x(x, y, z), generate


@primitive
def exp(typing_context, x):
    """exp of the elements, to the last few bits; 0 below the normal numbers, and of what is above them the largest.

    2^n e^r with n whole and |r| <= log(2) / 2, e^r by its Taylor series and 2^n by its bits. LLVM would call the C
    library for every element.
    """

    def generate(context, builder, signature, arguments):
        vector = ir_type(x.dtype)
        single = isinstance(vector.element, ir.FloatType)
        least, most, degree, mantissa, bias = (-87.0, 88.0, 7, 23, 127) if single else (-708.0, 709.0, 13, 52, 1023)
        # log(2) in two parts, of which the first has so few bits that its products with n are exact
        upper, lower = (0.693359375, -2.12194440e-4) if single else (0.693145751953125, 1.42860682030941723212e-6)

        def number(value: float) -> ir.Constant:
            return ir.Constant(vector, [value] * vector.count)

        def call(name: str, *values):
            f = ir.FunctionType(vector, [vector] * len(values))
            f = cgutils.get_or_insert_function(builder.module, f, f"llvm.{name}.{_suffix(vector)}")
            return builder.call(f, values)

        argument = arguments[0]
        for sign, end in (("<", least), (">", most)):  # not by minimum and maximum, which would lose a NaN
            argument = builder.select(builder.fcmp_ordered(sign, argument, number(end)), number(end), argument)
        n = call("rint", builder.fmul(argument, number(1 / math.log(2))))
        r = call("fma", n, number(-lower), call("fma", n, number(-upper), argument))
        found = number(1 / math.factorial(degree))
        for power in range(degree - 1, -1, -1):
            found = call("fma", found, r, number(1 / math.factorial(power)))
        whole = ir.VectorType(ir.IntType(32 if single else 64), vector.count)
        bits = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [bias] * vector.count))
        bits = builder.shl(bits, ir.Constant(whole, [mantissa] * vector.count))
        found = builder.fmul(found, builder.bitcast(bits, vector))
        return builder.select(builder.fcmp_ordered("<", arguments[0], number(least)), number(0.0), found)

    return x(x), generate


@primitive
def over(typing_context, x, y):
    return x(x, y), lambda context, builder, signature, arguments: builder.fdiv(*arguments)


@primitive
def between(typing_context, x, first, stop, other):
    """x in the places first <= place < stop, the other vector elsewhere."""

    def generate(context, builder, signature, arguments):
        vector = ir_type(x.dtype)
        whole = ir.VectorType(ir.IntType(32), vector.count)
        places = ir.Constant(whole, list(range(vector.count)))
        low, high = (splat_ir(builder, whole, builder.trunc(edge, whole.element)) for edge in arguments[1:3])
        inside = builder.and_(builder.icmp_signed(">=", places, low), builder.icmp_signed("<", places, high))
        return builder.select(inside, arguments[0], arguments[3])

    return x(x, types.intp, types.intp, x), generate


@primitive
def larger(typing_context, x, y):
    """Place by place; y where x is not a number."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return x(x, y), generate


@primitive
def smaller(typing_context, x, y):
    """Place by place; x where it is not a number."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), arguments[1], arguments[0])

    return x(x, y), generate


@primitive
def equal(typing_context, x, y):
    """1 in the places where they are equal, 0 elsewhere."""

    def generate(context, builder, signature, arguments):
        vector = ir_type(x.dtype)
        same = builder.fcmp_ordered("==", *arguments)
        return builder.select(same, *(ir.Constant(vector, [value] * vector.count) for value in (1.0, 0.0)))

    return x(x, y), generate


@primitive
def largest(typing_context, x):
    """The largest element."""

    def generate(context, builder, signature, arguments):
        vector = ir_type(x.dtype)
        f = ir.FunctionType(vector.element, [vector])
        name = f"llvm.vector.reduce.fmax.{_suffix(vector)}"
        return builder.call(cgutils.get_or_insert_function(builder.module, f, name), arguments)

    return x.dtype(x), generate


@primitive
def transpose(typing_context, to, by_to, source, by_source, kind):
    """As many rows of one vector as a vector has places, columns for rows."""

    def generate(context, builder, signature, arguments):
        to, by_to, source, by_source, _ = arguments
        vector = ir_type(kind)
        n, align = vector.count, kind.bitwidth // 8

        def place(start, step, i):
            address = builder.add(start, builder.mul(step, ir.Constant(step.type, i)))
            return builder.inttoptr(address, vector.as_pointer())

        rows = [builder.load(place(source, by_source, i), align=align) for i in range(n)]
        half = n // 2
        while half:  # exchange the off-diagonal quarters of every square of 2 half rows
            upper = [c if not c & half else n + c - half for c in range(n)]
            lower = [c + half if not c & half else n + c for c in range(n)]
            for i in range(n):
                if not i & half:
                    x, y = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (
                        builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), n), order))
                        for order in (upper, lower)
                    )
            half //= 2
        for i, row in enumerate(rows):
            builder.store(row, place(to, by_to, i), align=align)
        return context.get_dummy_value()

    word = types.intp
    return types.void(word, word, word, word, kind), generate


@primitive
def total(typing_context, x):
    """The sum of the elements, in no particular order."""

    def generate(context, builder, signature, arguments):
        vector = ir_type(signature.args[0].dtype)
        f = ir.FunctionType(vector.element, [vector.element, vector])
        name = f"llvm.vector.reduce.fadd.{_suffix(vector)}"
        start = ir.Constant(vector.element, 0.0)
        reduce = cgutils.get_or_insert_function(builder.module, f, name)
        return builder.call(reduce, [start, arguments[0]], fastmath=("reassoc",))

    return x.dtype(x), generate


def splat_ir(builder: ir.IRBuilder, vector: ir.VectorType, number: ir.Value) -> ir.Value:
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, nothing, zeros)


def fma_ir(builder: ir.IRBuilder, vector: ir.VectorType) -> ir.Function:
    kind = ir.FunctionType(vector, [vector] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.{_suffix(vector)}")


def _suffix(vector: ir.VectorType) -> str:
    return f"v{vector.count}f{32 if isinstance(vector.element, ir.FloatType) else 64}"
