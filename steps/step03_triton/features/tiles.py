# SPDX-License-Identifier: MIT
"""How the kernels of flash.py read, write and multiply tiles: by pointers or by Hopper's copy engine, dense or packed.

    rows = open_rows(x, box, strides, part, ...)   the rows of one sequence in a tensor (B, H, ., D)
    load_rows(rows, h, i), store_rows(rows, ...)   a tile from row i of head h on, by pointers, as in fwd_0_fused.py
    load_tile(rows, h, i, f, MASKED)               the same by the copy engine, if f.policy.tma is not None

The idea: a kernel is the same whether its sequence is a batch entry, or one of many that are packed into one tensor.
`box` is a descriptor of the whole tensor, made by the host, which does not end where a packed sequence ends. So for
packed sequences the copy engine reads only tiles that lie within a sequence, and pointers read the others.

Needs torch and Triton only.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Rows(NamedTuple):
    """The rows of one sequence, as `open_rows` returns them."""

    x: Any  # a pointer to its first row
    box: Any  # a descriptor of the tensor, if the copy engine is used
    strides: Any
    b: Any
    start: Any
    N: Any
    D: Any
    row: Any  # the numbers of a tile's rows, (rows, 1), and columns, (1, D_pad)
    column: Any


@triton.jit
def open_rows(x, box, strides, part, SIZE: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    if box is None:
        box = 0
    x += tl.cast(part.start, tl.int64) * strides[2]
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, D_pad)[None, :]
    return Rows(x, box, strides, part.b, part.start, part.N, D, row, column)


@triton.jit
def open_row_stats(x, box, stride, heads, seq, SIZE: tl.constexpr, f):
    """The same for lse_2 and delta, (B * H, stride), where each sequence begins at a multiple of 16 bytes."""
    queries = seq.queries
    start = 0
    if box is None:
        box = 0
    if f.cu_seqlens_q is not None:
        start = (queries.start // 4 + seq.number) * 4
    return Rows(x + start, box, stride, queries.b * heads, start, queries.N, 1, tl.arange(0, SIZE), 0)


@triton.jit
def pointers(rows, h, first):
    """(pointers, which entries exist) of the tile of head h that begins with row `first`."""
    row = first + rows.row
    # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
    head = rows.b.to(tl.int64) * rows.strides[0] + h.to(tl.int64) * rows.strides[1]
    pointer = rows.x + head + row.to(tl.int64) * rows.strides[2] + rows.column
    return pointer, (row < rows.N) & (rows.column < rows.D)


@triton.jit
def load_rows(rows, h, first):
    """The rows of head h from `first` on, as a tile (rows, D_pad) with zeros beyond the N rows and D columns."""
    pointer, exists = pointers(rows, h, first)
    return tl.load(pointer, mask=exists, other=0.0)


@triton.jit
def store_rows(rows, tile, h, first):
    pointer, exists = pointers(rows, h, first)
    tl.store(pointer, tile, mask=exists)


@triton.jit
def load_tile(rows, h, first, f, MASKED: tl.constexpr):
    """The tile of `load_rows`. Without MASKED, all its rows belong to the sequence, or the sequence is not packed."""
    if (f.policy.tma is None) or (MASKED and (f.cu_seqlens_q is not None)):
        return load_rows(rows, h, first)
    else:
        return rows.box.load([rows.b, h, rows.start + first, 0]).reshape(rows.row.shape[0], rows.column.shape[1])


@triton.jit
def product(A, B, f, C=None):
    """A B, or C + A B. The tensors' dtype and `dot_precision` decide how; for 16 bits there is only one way."""
    return tl.dot(A, B, C, input_precision="tf32x3" if f.policy.ieee is None else "ieee")


@triton.jit
def row_stats_by_pointers(stats, h, first):
    """The numbers (rows,) that belong to the queries of head h from `first` on, and 0 beyond N."""
    row = first + stats.row
    return tl.load(stats.x + (stats.b + h).to(tl.int64) * stats.strides + row, mask=row < stats.N, other=0.0)


@triton.jit
def load_row_stats(stats, h, first, f, MASKED: tl.constexpr):
    if (f.policy.tma is None) or (MASKED and (f.cu_seqlens_q is not None)):
        return row_stats_by_pointers(stats, h, first)
    else:
        return stats.box.load([stats.b + h, stats.start + first]).reshape(stats.row.shape[0])


@triton.jit(do_not_specialize=["N"])
def clear_kernel(x, strides, starts, sequences, N, D: tl.constexpr, D_pad: tl.constexpr):
    """Sets the rows of x (1, H, N, D) to 0 that come after the last packed sequence. Grid (H, any number)."""
    head = x + tl.program_id(0).to(tl.int64) * strides[1]
    column = tl.arange(0, D_pad)[None, :]
    for first in range(tl.load(starts + sequences) + 16 * tl.program_id(1), N, 16 * tl.num_programs(1)):
        row = first + tl.arange(0, 16)[:, None]
        tl.store(head + row.to(tl.int64) * strides[2] + column, 0.0, mask=(row < N) & (column < D))


def new_like(record, x, starts):
    """A tensor like x (B, H, N, D). If its packed sequences begin at `starts`, the rows after the last one are 0."""
    new, (_, H, N, D) = record.new(x.shape, like=x), x.shape
    if starts is not None:
        D_pad = triton.next_power_of_2(D)
        record.launch(clear_kernel, (H, 4), new, strides_of(new), starts, len(starts) - 1, N, D=D, D_pad=D_pad)
    return new


def dot_precision(x):
    """How matrices like x are multiplied; fwd_0_fused.py explains the words."""
    if x.element_size() == 2:
        return "16 bits"
    if triton.knobs.runtime.interpret or x.shape[-1] > 128:
        return "ieee"
    return "tf32x3" if torch.cuda.get_device_capability(x.device)[0] >= 8 else "ieee"


def strides_of(x):
    """Strides of batch, head and row. That of a dimension of size 1 is never used, but a descriptor checks it, too."""
    return tuple(stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def is_aligned(x):
    """Whether a descriptor can describe x (B, H, N, D): its address and strides are multiples of 16 bytes."""
    return x.numel() > 0 and all(n % 16 == 0 for n in (x.data_ptr(), *(s * x.element_size() for s in strides_of(x))))


def has_tma(x):
    """Whether x lies on a Hopper GPU, which has the copy engine; Triton's interpreter has one, too."""
    return triton.knobs.runtime.interpret or torch.cuda.get_device_capability(x.device)[0] == 9


def can_copy(tensors):
    """Whether the copy engine can read the tensors."""
    return tensors[0].element_size() == 2 and has_tma(tensors[0]) and all(map(is_aligned, tensors))


def describe(x, rows, D_pad):
    """A descriptor of x (B, H, N, D) whose boxes have so many rows."""
    return TensorDescriptor(x, list(x.shape), [*strides_of(x), 1], [1, 1, rows, D_pad])


def describe_row_stats(x, N, rows):
    """A descriptor of the first N numbers in each row of x (B * H, stride), with boxes of so many."""
    return TensorDescriptor(x, [len(x), N], [x.stride(0), 1], [1, rows])
