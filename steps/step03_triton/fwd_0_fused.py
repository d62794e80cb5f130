# SPDX-License-Identifier: MIT
"""Rung 0, "fused": FlashAttention-2's forward as one Triton kernel; a program owns one tile of Br queries of one head.

    Q_i stays on the chip; m = -inf, l = 0, O = 0
    for each tile of Bc keys:                         first those that all Br queries see, then those that need a mask
        S     = scale * Q_i K_j^T                     tensor cores for float16 and bfloat16, exact float32 for float32
        m_new = max(m, rowmax S)
        alpha = exp(m - m_new)
        P     = exp(S - m_new)
        l     = alpha * l + rowsum P
        O     = alpha * O + P V_j
    out = O / l,  lse = m + log l                     written once

The idea: Triton works on tiles, so the kernel reads like the algorithm. The compiler decides which thread holds which
entry, what lies in shared memory, how early tiles are copied there (num_stages), and which tensor core instructions
multiply them. Source: FlashAttention-2, Algorithm 1. Launch: grid (B * H * ceil(Nq / Br),). Left out: autotuning, TMA,
warp specialisation, and exp2 with scale * log2(e) folded into its argument. Without exp2 forward and backward round S
alike, and in float32 at scores of 200 a difference would show. Needs torch and Triton only.
"""

import torch
import triton
import triton.language as tl

# (Br, Bc, num_warps, num_stages) by bytes an entry and head_dim: up to 64, 128, 256.
TILES = {
    2: {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2)},
    4: {64: (64, 32, 8, 2), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
}


@triton.jit
def head(x, strides, b, h):
    """Where head h of batch entry b begins, computed in 64 bits because a tensor may have more than 2^31 entries."""
    return x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_tile(x, first, N, stride, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """ROWS rows of a matrix (N, D) from row `first` on, as a tile (ROWS, D_pad) with zeros beyond the edges."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    return tl.load(x + row.to(tl.int64) * stride + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store_tile(x, tile, first, N, stride, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    tl.store(x + row.to(tl.int64) * stride + column, tile, mask=(row < N) & (column < D))


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
def online_update(m, l, O, S, V_j):
    """(m, l, O) after one more tile of keys, with the scores S (Br, Bc) and the values V_j (Bc, D).

    m and l (Br,); O (Br, D) is not yet divided by l.
    """
    m_new = tl.maximum(m, tl.max(S, 1))
    unit = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
    alpha = tl.exp(m - unit)
    P = tl.exp(S - unit[:, None])
    O = tl.dot(P.to(V_j.dtype), V_j, O * alpha[:, None], input_precision="ieee")
    return m_new, alpha * l + tl.sum(P, 1), O


@triton.jit
def visit_keys(
    m, l, O, Q_i, k, v, k_stride, v_stride, i, begin, end, Nq, Nk, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    for j in range(begin, end, Bc):
        K_j = load_tile(k, j, Nk, k_stride, Bc, D, D_pad)  # (Bc, D)
        V_j = load_tile(v, j, Nk, v_stride, Bc, D, D_pad)
        S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        if MASKED:
            S = mask(S, i, j, Nq, Nk, CAUSAL, Br, Bc)
        m, l, O = online_update(m, l, O, S, V_j)
    return m, l, O


@triton.jit(do_not_specialize=["H", "group", "Nq", "Nk"])  # so that one compiled kernel serves every length
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, H, group, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):
    program, tiles = tl.program_id(0), tl.cdiv(Nq, Br)
    # Neighbouring programs work on the same head, so they find its K and V in the L2 cache. The last queries start
    # first: when causal, they see most keys.
    i, bh = (tiles - 1 - program % tiles) * Br, program // tiles
    b, h = bh // H, bh % H
    k, v = head(k, k_strides, b, h // group), head(v, v_strides, b, h // group)  # `group` query heads share a key head

    Q_i = load_tile(head(q, q_strides, b, h), i, Nq, q_strides[2], Br, D, D_pad)  # (Br, D)
    m = tl.full((Br,), float("-inf"), tl.float32)
    l, O = tl.zeros((Br,), tl.float32), tl.zeros((Br, D_pad), tl.float32)
    full, end = key_ranges(i, Nq, Nk, CAUSAL, Br, Bc)
    m, l, O = visit_keys(
        m, l, O, Q_i, k, v, k_strides[2], v_strides[2], i, 0, full, Nq, Nk, scale, False, CAUSAL, D, D_pad, Br, Bc
    )
    m, l, O = visit_keys(
        m, l, O, Q_i, k, v, k_strides[2], v_strides[2], i, full, end, Nq, Nk, scale, True, CAUSAL, D, D_pad, Br, Bc
    )

    row = i + tl.arange(0, Br)
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    store_tile(head(out, out_strides, b, h), O / l[:, None], i, Nq, out_strides[2], Br, D, D_pad)
    tl.store(lse + bh.to(tl.int64) * Nq + row, m + tl.log(l), mask=row < Nq)


def forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, Hk, Nk, D), D contiguous; out like q, lse (B, H, Nq) float32.

    tile is (Br, Bc).
    """
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:  # the interpreter's numpy has no bfloat16
        out, lse = forward(q.float(), k.float(), v.float(), causal=causal, scale=scale, tile=tile)
        return out.to(q.dtype), lse
    (B, H, Nq, D), (Hk, Nk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))  # tiles are powers of two, and a tensor core takes 16 columns
    Br, Bc, num_warps, num_stages = (*tile, 4, 1) if tile else TILES[q.element_size()][max(64, D_pad)]
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((B, H, Nq), dtype=torch.float32)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        forward_kernel[(B * H * triton.cdiv(Nq, Br),)](
            q, k, v, out, lse, *(x.stride()[:3] for x in (q, k, v, out)), H, H // Hk, Nq, Nk, scale,
            CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc, num_warps=num_warps, num_stages=num_stages,
        )
    return out, lse
