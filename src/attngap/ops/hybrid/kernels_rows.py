"""What hybrid attention does to single rows, as functions of their own: inlined, they would compile slowly."""

from attngap.ops.native import memory
from attngap.ops.native.vectors import called_kernel


@called_kernel
def load_row(buffer, x, b, head, i, zero):
    memory.load_row(buffer, x, b, head, i, True, zero)


@called_kernel
def set_row(x, b, head, i, buffer, factor, zero):
    memory.store_row(x, b, head, i, buffer, factor, True, zero)


@called_kernel
def add_to_row(x, b, head, i, buffer, factor, zero):
    memory.store_row(x, b, head, i, buffer, factor, False, zero)


@called_kernel
def clear(at, size, zero):
    memory.clear(at, size, zero)


@called_kernel
def scale_row(out, factor, x, pitch, zero):
    memory.scale_row(out, factor, x, pitch, zero)


@called_kernel
def add(y, factor, x, pitch, zero):
    memory.add(y, factor, x, pitch, zero)


@called_kernel
def dot(x, y, pitch, zero):
    return memory.dot(x, y, pitch, zero)
