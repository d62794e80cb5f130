# SPDX-License-Identifier: MIT
"""Rung 1, "tma": rung 0, with Q, K and V copied into shared memory by Hopper's copy engine, and out copied back by it.

    a descriptor says once, on the host:  where a tensor (B, H, N, D) begins, its sizes and strides, and that a tile is
                                          a box of (1, 1, Br or Bc, D)
    load_tile is then:                    q.load([b, h, i, 0])

The idea: in rung 0 every thread computes addresses, and compares rows and columns with N and D, for each 16 bytes that
it copies. Here one thread names a box, and the copy engine (TMA, the tensor memory accelerator) computes the addresses
and fills what lies outside the tensor with zeros. That saves instructions, but above all registers: at head_dim 64 four
warps have room for a tile of as many scores as rung 0 has with eight.

A descriptor needs an address and strides that are multiples of 16 bytes. Tensors that are not aligned like this, such
as a slice from the second column on, are read as in rung 0, and so is every tensor on a GPU other than Hopper. The two
ways differ in load_tile and store_tile only.

Source: FlashAttention-2, Algorithm 1. Launch: grid (B * H * ceil(Nq / Br),). Left out: warp specialisation (rung 2),
float32, autotuning. Needs torch, Triton and replay.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .replay import replayed

# (Br, Bc, num_warps, num_stages) by head_dim: up to 64, 128, 256.
TILES = {64: (64, 128, 4, 2), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)}


class Rows(NamedTuple):
    """The N rows of head h, of batch entry b, in a tensor (B, H, N, D)."""

    x: Any  # a descriptor of the tensor, or a pointer to it
    strides: Any  # of batch, head and row
    b: Any
    h: Any
    N: Any


@triton.jit
def load_tile(rows, first, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, TMA: tl.constexpr):
    """The rows from `first` on, as a tile (ROWS, D_pad) with zeros beyond the N rows and D columns.

    rows.x is a descriptor if TMA, else a pointer.
    """
    x, strides, b, h, N = rows
    if TMA:
        return x.load([b, h, first, 0]).reshape(ROWS, D_pad)
    else:
        row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
        # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
        offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        return tl.load(x + offset + row.to(tl.int64) * strides[2] + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store_tile(rows, tile, first, D: tl.constexpr, TMA: tl.constexpr):
    x, strides, b, h, N = rows
    if TMA:
        x.store([b, h, first, 0], tile.to(x.dtype).reshape(1, 1, tile.shape[0], tile.shape[1]))
    else:
        row, column = first + tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
        offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        tl.store(x + offset + row.to(tl.int64) * strides[2] + column, tile, mask=(row < N) & (column < D))


@triton.jit
def key_ranges(i, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """(full, end) for the Br queries from i on: all of them see all keys before full, none sees a key from end on."""
    full, end = Nk, Nk
    if CAUSAL:  # query i stands at position i + Nk - Nq
        full = tl.minimum(Nk, tl.maximum(0, i + 1 + Nk - Nq))
        end = tl.minimum(Nk, tl.maximum(0, i + Br + Nk - Nq))
    return full // Bc * Bc, end


@triton.jit
def mask(S, i, j, Nq, Nk, CAUSAL: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    """S with -inf where there is no key, or the key lies after the query. S (Br, Bc) starts at query i and key j."""
    row, column = i + tl.arange(0, Br)[:, None], j + tl.arange(0, Bc)[None, :]
    seen = column < Nk
    if CAUSAL:
        seen = seen & (column <= row + Nk - Nq)
    return tl.where(seen, S, float("-inf"))


@triton.jit
def factor_and_shift(m, scale_log2):
    """(f, f m) of P = 2^(f S - f m), two numbers a row; f is scale_log2 unless m is huge.

    The compiler makes one fused multiply-add of f S - f m, in which f S is exact, but f m was rounded before. At S = m
    the exponent is then not 0, but up to f m / 2^24: up to 8 if f m = 2^27, and P is infinite for scores of 1e11. So
    from 2^26 on f is the power of two below scale_log2, whose products are exact. With either factor, neighbouring
    float32 scores of that size differ by 2 or more in the exponent, which is no more than the scores' own error.
    """
    power_of_two = (scale_log2.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    small = tl.abs(m * scale_log2) < 67108864.0
    return tl.where(small, scale_log2, power_of_two), tl.where(small, m * scale_log2, m * power_of_two)


@triton.jit
def online_update(m, l, O, S, V_j, scale_log2):
    """(m, l, O) after one more tile of keys, with S = Q_i K_j^T (Br, Bc), not scaled, and the values V_j (Bc, D).

    m (Br,) is the maximum of S. l (Br,); O (Br, D) is not yet divided by l.
    """
    m_new = tl.maximum(m, tl.max(S, 1))
    unit = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    factor, shift = factor_and_shift(unit, scale_log2)
    alpha = tl.exp2((m - unit) * factor)
    P = tl.exp2(S * factor[:, None] - shift[:, None])
    O = tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision="ieee")
    return m_new, alpha * l + tl.sum(P, 1), O


@triton.jit
def visit_keys(
    m, l, O, Q_i, K, V, i, begin, end, Nq, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    for j in range(begin, end, Bc):
        K_j = load_tile(K, j, Bc, D, Q_i.shape[1], TMA)  # (Bc, D)
        V_j = load_tile(V, j, Bc, D, Q_i.shape[1], TMA)
        S = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        if MASKED:
            S = mask(S, i, j, Nq, K.N, CAUSAL, Q_i.shape[0], Bc)
        m, l, O = online_update(m, l, O, S, V_j, scale_log2)
    return m, l, O


@triton.jit(do_not_specialize=["H", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr, TMA: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # Neighbouring programs work on the same head, so they find its K and V in the L2 cache. The last queries start
    # first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    hk = h // group  # `group` query heads share a key head
    K, V = Rows(k, k_strides, b, hk, Nk), Rows(v, v_strides, b, hk, Nk)
    scale_log2 = scale * 1.4426950408889634

    Q_i = load_tile(Rows(q, q_strides, b, h, Nq), i, Br, D, D_pad, TMA)  # (Br, D)
    m = tl.full((Br,), float("-inf"), tl.float32)
    l, O = tl.zeros((Br,), tl.float32), tl.zeros((Br, D_pad), tl.float32)
    full, end = key_ranges(i, Nq, Nk, CAUSAL, Br, Bc)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, 0, full, Nq, scale_log2, False, CAUSAL, D, Bc, TMA)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, full, end, Nq, scale_log2, True, CAUSAL, D, Bc, TMA)

    row = i + tl.arange(0, Br)
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    store_tile(Rows(out, out_strides, b, h, Nq), O / l[:, None], i, D, TMA)
    tl.store(lse + bh.to(tl.int64) * Nq + row, m * scale + tl.log(l), mask=row < Nq)


def is_aligned(x):
    """Whether a descriptor can describe x (B, H, N, D): its address and strides are multiples of 16 bytes."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in steps)


def describe(x, rows, D_pad):
    """A descriptor of x (B, H, N, D) whose boxes have so many rows."""
    # The stride of a dimension of size 1 is never used, but must be a multiple of 16 bytes too.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, D_pad])


def has_tma(x):
    """Whether x lies on a Hopper GPU, which has the copy engine; Triton's interpreter has one, too."""
    return triton.knobs.runtime.interpret or torch.cuda.get_device_capability(x.device)[0] == 9


@replayed
def forward(record, q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    scale > 0; None is 1/sqrt(D). tile is (Br, Bc).
    """
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else TILES[max(64, D_pad)]
    out, lse = record.new(q.shape, like=q), record.new((B, H, Nq))
    tensors, rows = (q, k, v, out), (Br, Bc, Bc, Br)
    strides = [x.stride()[:3] for x in tensors]
    TMA = has_tma(q) and all(map(is_aligned, tensors))
    if TMA:
        tensors = [describe(x, n, D_pad) for x, n in zip(tensors, rows, strict=True)]
    record.launch(
        forward_kernel, B * H * triton.cdiv(Nq, Br), *tensors, lse, *strides, H, H // Hk, Nq, Nk, scale,
        CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, TMA=TMA, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out, lse
