"""Products of small matrices that lie in cache, a tile of the result in registers: C (+)= A B.

A vector of B is read once for eight rows of C, a number of A once for two vectors: that is enough to keep the
multipliers busy. A is read by two strides, so that it may be transposed; rows of B and C are whole vectors.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from attngap.ops.native.vectors import BYTES, called_kernel, fma_ir, ir_type, primitive, splat_ir

ROWS = 8  # of a tile
WORD = ir.IntType(64)  # an address, a stride or a count


def tile(vectors: int) -> Callable[..., Any]:
    """The primitive for a tile of ROWS rows and so many vectors."""

    def product(typing_context, C, by_c, A, by_a_row, by_a, B, by_b, count, onto, kind):
        """C[i] <- (C[i] if onto) + sum over j < count of A[i, j] B[j]; all strides in bytes."""

        def generate(context, builder, signature, arguments):
            _emit(builder, ir_type(kind), vectors, *arguments[:9])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, types.boolean, kind), generate

    return primitive(product)


def _emit(builder: ir.IRBuilder, vector, vectors, c, by_c, a, by_a_row, by_a, b, by_b, count, onto) -> None:
    """One loop over j; what it carries are the sums, ROWS times `vectors`, and the addresses in A and B."""
    align = 4 if isinstance(vector.element, ir.FloatType) else 8
    cells = [(i, v) for i in range(ROWS) for v in range(vectors)]
    places = [_pointer(builder, _moved(builder, c, by_c, i, BYTES * v), vector) for i, v in cells]
    before, head, loop, done = (builder.append_basic_block(name) for name in ("before", "head", "loop", "done"))
    entry = builder.block
    builder.cbranch(builder.icmp_unsigned("!=", onto, ir.Constant(onto.type, 0)), before, head)

    builder.position_at_end(before)
    old = [builder.load(place, align=align) for place in places]
    builder.branch(head)

    builder.position_at_end(head)
    zeros = ir.Constant(vector, [0.0] * vector.count)
    start = [_phi(builder, vector, (zeros, entry), (x, before)) for x in old]
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(WORD, 0)), loop, done)

    builder.position_at_end(loop)
    left, at_a, at_b = (builder.phi(WORD) for _ in range(3))
    sums = [builder.phi(vector) for _ in cells]
    parts = [
        builder.load(_pointer(builder, _moved(builder, at_b, by_b, 0, BYTES * v), vector), align=align)
        for v in range(vectors)
    ]
    factors = [
        splat_ir(builder, vector, builder.load(_pointer(builder, _moved(builder, at_a, by_a_row, i), vector.element)))
        for i in range(ROWS)
    ]
    fma = fma_ir(builder, vector)
    after = [builder.call(fma, [factors[i], parts[v], x]) for (i, v), x in zip(cells, sums, strict=True)]
    fewer = builder.sub(left, ir.Constant(WORD, 1))
    ends = [fewer, builder.add(at_a, by_a), builder.add(at_b, by_b), *after]
    for phi, begin, end in zip([left, at_a, at_b, *sums], [count, a, b, *start], ends, strict=True):
        phi.add_incoming(begin, head)
        phi.add_incoming(end, loop)
    builder.cbranch(builder.icmp_signed(">", fewer, ir.Constant(WORD, 0)), loop, done)

    builder.position_at_end(done)
    found = [_phi(builder, vector, (x, head), (y, loop)) for x, y in zip(start, after, strict=True)]
    for value, place in zip(found, places, strict=True):
        builder.store(value, place, align=align)


def _moved(builder, address, step, times: int, more: int = 0):
    if times:
        address = builder.add(address, builder.mul(step, ir.Constant(WORD, times)))
    return builder.add(address, ir.Constant(WORD, more)) if more else address


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _phi(builder, kind, *incoming):
    found = builder.phi(kind)
    for value, block in incoming:
        found.add_incoming(value, block)
    return found


one_wide, two_wide = tile(1), tile(2)


@called_kernel
def multiply_matrices(C, by_c, rows, width, A, by_a_row, by_a, B, by_b, count, onto, zero):
    """C (rows, width bytes) <- (C if onto) + A B, A (rows, count), B (count, width); rows a multiple of ROWS."""
    paired = width // (2 * BYTES) * 2 * BYTES
    for c in range(0, paired, 2 * BYTES):
        for i in range(0, rows, ROWS):
            two_wide(C + i * by_c + c, by_c, A + i * by_a_row, by_a_row, by_a, B + c, by_b, count, onto, zero)
    if paired < width:
        for i in range(0, rows, ROWS):
            one_wide(C + i * by_c + paired, by_c, A + i * by_a_row, by_a_row, by_a, B + paired, by_b, count, onto, zero)
