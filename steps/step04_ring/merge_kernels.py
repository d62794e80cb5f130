# SPDX-License-Identifier: MIT
"""The sums of merge.py as one kernel each: up to a few parts are read once, and their sum is written once.

    merge   lse = log(sum of exp lse_p);  out = sum of exp(lse_p - lse) out_p
    add     out = sum of x_p

The idea: between blocks a GPU only moves memory, so the time depends on how often out is read and written. A part
covers a range of the rows; outside of it, it counts as lse = -inf, or 0. Sums are float32. Needs torch and Triton.
"""

import torch
import triton
import triton.language as tl

ROWS = 32  # of a program


@triton.jit
def merge_kernel(
    outs, lses, firsts, lengths, out, lse, n,
    D: tl.constexpr, D_pad: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_pad)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for p in tl.static_range(PARTS):
        m = tl.maximum(m, load_lse(lses[p], firsts[p], lengths[p], head, i))
    m = tl.where(m == float("-inf"), 0.0, m)  # No part has seen a key: exp(-inf - 0) is 0, and not NaN.
    l = tl.zeros([ROWS], tl.float32)
    O = tl.zeros([ROWS, D_pad], tl.float32)
    for p in tl.static_range(PARTS):
        lse_p = load_lse(lses[p], firsts[p], lengths[p], head, i)
        w = tl.exp(lse_p - m)
        l += w
        seen = (lse_p != float("-inf"))[:, None] & (d < D)[None, :]  # A row that saw no key is not even read.
        row = head * lengths[p] + i - firsts[p]
        O += w[:, None] * tl.load(outs[p] + row[:, None] * D + d, mask=seen, other=0.0).to(tl.float32)
    O = O / tl.where(l == 0, 1.0, l)[:, None]
    row = head * n + i
    inside = i < n
    tl.store(out + row[:, None] * D + d, O.to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    tl.store(lse + row, m + tl.log(l), mask=inside)


@triton.jit
def load_lse(lse, first, length, head, i):
    return tl.load(lse + head * length + i - first, mask=(i >= first) & (i < first + length), other=float("-inf"))


@triton.jit
def add_kernel(
    parts, firsts, lengths, out, n,
    D: tl.constexpr, D_pad: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_pad)
    total = tl.zeros([ROWS, D_pad], tl.float32)
    for p in tl.static_range(PARTS):
        inside = (i >= firsts[p]) & (i < firsts[p] + lengths[p])
        row = head * lengths[p] + i - firsts[p]
        x = tl.load(parts[p] + row[:, None] * D + d, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        total += x.to(tl.float32)
    row = head * n + i
    tl.store(out + row[:, None] * D + d, total.to(out.dtype.element_ty), mask=(i < n)[:, None] & (d < D)[None, :])


def merge(parts, shape, dtype):
    """(out, lse) from parts (rows, out, lse), contiguous; shape (..., n, D) and dtype are those of the new out."""
    rows, outs, lses = zip(*parts, strict=True)
    out = torch.empty(shape, dtype=dtype, device=outs[0].device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=out.device)
    tensors = tuple(x.contiguous() for x in outs), tuple(x.contiguous() for x in lses)
    _run(merge_kernel, (*tensors, *_ranges(rows)), (out, lse), shape)
    return out, lse


def add(parts, out):
    """out (..., n, D), contiguous, becomes the sum of the parts (rows, x)."""
    rows, xs = zip(*parts, strict=True)
    _run(add_kernel, (tuple(x.contiguous() for x in xs), *_ranges(rows)), (out,), out.shape)
    return out


def _ranges(rows):
    """The first row of each slice, and how many it has."""
    return tuple(x.start for x in rows), tuple(x.stop - x.start for x in rows)


def _run(kernel, parts, results, shape):
    *_, n, D = shape
    programs = triton.cdiv(n, ROWS) * (results[0].numel() // max(1, n * D))
    if programs:
        with torch.cuda.device_of(results[0]):  # Triton launches on the current device.
            D_pad = triton.next_power_of_2(D)
            kernel[(programs,)](*parts, *results, n, D=D, D_pad=D_pad, ROWS=ROWS, PARTS=len(parts[0]), num_warps=4)
