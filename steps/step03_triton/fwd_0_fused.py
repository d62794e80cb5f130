# SPDX-License-Identifier: MIT
"""Rung 0, "fused": FlashAttention-2's forward as one Triton kernel; a program owns one tile of Br queries of one head.

    Q_i stays on the chip; m = -inf, l = 0, O = 0
    for each tile of Bc keys:                         first those that all Br queries see, then those that need a mask
        S     = Q_i K_j^T                             by tensor cores; for float32 see `dot_precision`
        m_new = max(m, rowmax S)
        alpha = 2^(c m - c m_new)                     c = scale log2(e): exp is computed as a power of 2
        P     = 2^(c S - c m_new)                     one fused multiply-add and one exp2 an entry
        l     = alpha * l + rowsum P
        O     = alpha * O + P V_j
    out = O / l,  lse = scale m + log l               written once

The idea: Triton works on tiles, so the kernel reads like the algorithm. The compiler decides which thread holds which
entry, what lies in shared memory, how early tiles are copied there (num_stages), and which tensor core instructions
multiply them. What is left to choose is the tile. Tiles are small, with few warps, so that two or three programs share
a multiprocessor: one multiplies while another one computes its softmax. On Hopper they are larger, up to head_dim 128.
There a product of 64 x 64 reads shared memory as fast as it can be read, and at head_dim 128 a wider one reads less for
the same work. A taller tile needs K and V less often.

Source: FlashAttention-2, Algorithm 1. Launch: grid (B * H * ceil(Nq / Br),). Left out: TMA (rung 1), warp
specialisation (rung 2), autotuning. Needs torch, Triton and replay.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .replay import replayed

# (Br, Bc, num_warps, num_stages) by what `kind_of_tiles` says and head_dim: up to 64, 128, 256.
TILES = {
    "16 bits": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 8, 2)},
    "16 bits, Hopper": {64: (128, 64, 8, 3), 128: (128, 128, 8, 3), 256: (64, 32, 8, 2)},
    "tf32x3": {64: (64, 32, 4, 1), 128: (32, 32, 4, 2)},
    "ieee": {64: (64, 64, 4, 1), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
}


def dot_precision(x):
    """How matrices like x are multiplied: "16 bits" and "tf32x3" by tensor cores, "ieee" without them.

    Tensor cores do not take float32. From sm_80 on they take tf32, which has 11 of its 24 bits. With x = a + b, where a
    is x rounded to tf32 and b the rounded rest, "tf32x3" is the sum of the products a a', a b' and b a', and as exact
    as float32; but a tensor core truncates where it adds, which shows in scores of more than 128 products. The sum over
    tiles is not affected, because there Triton adds outside of the tensor core.
    """
    if x.element_size() == 2:
        return "16 bits"
    if triton.knobs.runtime.interpret or x.shape[-1] > 128:
        return "ieee"
    return "tf32x3" if torch.cuda.get_device_capability(x.device)[0] >= 8 else "ieee"


def kind_of_tiles(x):
    kind = dot_precision(x)
    hopper = not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(x.device)[0] == 9
    return f"{kind}, Hopper" if kind == "16 bits" and hopper else kind


class Rows(NamedTuple):
    """The N rows of head h, of batch entry b, in a tensor (B, H, N, D)."""

    x: Any  # a pointer to the tensor
    strides: Any  # of batch, head and row
    b: Any
    h: Any
    N: Any


@triton.jit
def pointers(rows, first, ROWS: tl.constexpr, D_pad: tl.constexpr):
    """Pointers to the entries of a tile (ROWS, D_pad) whose first row is row `first`."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    # Offsets have 64 bits, because a tensor may have more than 2^31 entries.
    offset = rows.b.to(tl.int64) * rows.strides[0] + rows.h.to(tl.int64) * rows.strides[1]
    return rows.x + offset + row.to(tl.int64) * rows.strides[2] + column


@triton.jit
def inside(rows, first, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """Which entries of a tile exist: those within the N rows and D columns."""
    return (first + tl.arange(0, ROWS)[:, None] < rows.N) & (tl.arange(0, D_pad)[None, :] < D)


@triton.jit
def load_tile(tile, rows, first, MASKED: tl.constexpr, D: tl.constexpr):
    """The tile at these pointers, with zeros beyond the edges. Without MASKED all of its rows exist."""
    if MASKED or D < tile.shape[1]:
        return tl.load(tile, mask=inside(rows, first, tile.shape[0], D, tile.shape[1]), other=0.0)
    else:
        return tl.load(tile)


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
def online_update(m, l, O, S, V_j, scale_log2, PRECISION: tl.constexpr):
    """(m, l, O) after one more tile of keys, with S = Q_i K_j^T (Br, Bc), not scaled, and the values V_j (Bc, D).

    m (Br,) is the maximum of S. l (Br,); O (Br, D) is not yet divided by l. PRECISION: see `dot_precision`.
    """
    m_new = tl.maximum(m, tl.max(S, 1))
    unit = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    factor, shift = factor_and_shift(unit, scale_log2)
    alpha = tl.exp2((m - unit) * factor)
    P = tl.exp2(S * factor[:, None] - shift[:, None])
    O = tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision=PRECISION)
    return m_new, alpha * l + tl.sum(P, 1), O


@triton.jit
def visit_keys(
    m, l, O, Q_i, K, V, i, begin, end, Nq, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr,
    Bc: tl.constexpr, PRECISION: tl.constexpr
):
    # Moving the pointers on is cheaper than computing them anew for each tile.
    k_tile = pointers(K, begin, Bc, Q_i.shape[1])
    v_tile = pointers(V, begin, Bc, Q_i.shape[1])
    for j in range(begin, end, Bc):
        K_j = load_tile(k_tile, K, j, MASKED, D)  # (Bc, D)
        V_j = load_tile(v_tile, V, j, MASKED, D)
        S = tl.dot(Q_i, tl.trans(K_j), input_precision=PRECISION)  # (Br, Bc)
        if MASKED:
            S = mask(S, i, j, Nq, K.N, CAUSAL, Q_i.shape[0], Bc)
        m, l, O = online_update(m, l, O, S, V_j, scale_log2, PRECISION)
        k_tile += Bc * tl.cast(K.strides[2], tl.int64)
        v_tile += Bc * tl.cast(V.strides[2], tl.int64)
    return m, l, O


@triton.jit(do_not_specialize=["H", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr,
    PRECISION: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # Neighbouring programs work on the same head, so they find its K and V in the L2 cache. The last queries start
    # first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    hk = h // group  # `group` query heads share a key head
    Q, out = Rows(q, q_strides, b, h, Nq), Rows(out, out_strides, b, h, Nq)
    K, V = Rows(k, k_strides, b, hk, Nk), Rows(v, v_strides, b, hk, Nk)
    scale_log2 = scale * 1.4426950408889634

    Q_i = load_tile(pointers(Q, i, Br, D_pad), Q, i, True, D)  # (Br, D)
    m = tl.full((Br,), float("-inf"), tl.float32)
    l, O = tl.zeros((Br,), tl.float32), tl.zeros((Br, D_pad), tl.float32)
    full, end = key_ranges(i, Nq, Nk, CAUSAL, Br, Bc)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, 0, full, Nq, scale_log2, False, CAUSAL, D, Bc, PRECISION)
    m, l, O = visit_keys(m, l, O, Q_i, K, V, i, full, end, Nq, scale_log2, True, CAUSAL, D, Bc, PRECISION)

    row = i + tl.arange(0, Br)
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    tl.store(pointers(out, i, Br, D_pad), O / l[:, None], mask=inside(out, i, Br, D, D_pad))
    tl.store(lse + bh.to(tl.int64) * Nq + row, m * scale + tl.log(l), mask=row < Nq)


@replayed
def forward(record, q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    scale > 0; None is 1/sqrt(D). tile is (Br, Bc).
    """
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    precision = "ieee" if q.element_size() == 2 else dot_precision(q)  # which Triton heeds for float32 only
    Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else TILES[kind_of_tiles(q)][max(64, D_pad)]
    out, lse = record.new(q.shape, like=q), record.new((B, H, Nq))
    record.launch(
        forward_kernel, B * H * triton.cdiv(Nq, Br),
        q, k, v, out, lse, *(x.stride()[:3] for x in (q, k, v, out)), H, H // Hk, Nq, Nk, scale,
        CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, PRECISION=precision,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out, lse
