# SPDX-License-Identifier: MIT
"""Bug hunt 03.bug1: what the compiler made of a forward with warp_specialize=True.

    i   = program * Br                                   the source, for one tile of Br queries
    Q_i = q.load([i, 0])                                 by a tensor descriptor
    row = i + tl.arange(0, Br)
    for each tile of keys: S, m, l, O
    out.store([i, 0], O / l)                             by a tensor descriptor
    tl.store(lse + row, m + log l, mask=row < Nq)        by addresses

On a Hopper GPU the compiler divides a tile's rows between two groups of four warps. Here a program does the work of the
two groups one after the other, so the results are the same on any machine. Needs torch and Triton only.
"""

import math

import torch
import triton
import triton.language as tl

Br, Bc = 32, 16


@triton.jit
def load(x, first, N, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """What x.load([first, 0]) of a descriptor gives: ROWS rows from `first` on, with zeros where there are none."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    return tl.load(x + row * D + column, mask=(row < N) & (column < D), other=0.0)


@triton.jit
def store(x, first, tile, N, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """What x.store([first, 0], tile) of a descriptor does: rows and columns that do not exist are left out."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    tl.store(x + row * D + column, tile, mask=(row < N) & (column < D))


@triton.jit
def kernel(
    q, k, v, out, lse, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):  # fmt: skip
    ROWS: tl.constexpr = Br // 2
    head = tl.program_id(1)
    q, out, lse = q + head * Nq * D, out + head * Nq * D, lse + head * Nq
    k, v = k + head * Nk * D, v + head * Nk * D
    for group in tl.static_range(2):
        i = tl.program_id(0) * Br + group * ROWS
        Q_i = load(q, i, Nq, ROWS, D, D_pad)
        row = i + tl.arange(0, ROWS)
        m, l = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
        O = tl.zeros((ROWS, D_pad), tl.float32)
        for j in range(0, Nk, Bc):
            K_j, V_j = load(k, j, Nk, Bc, D, D_pad), load(v, j, Nk, Bc, D, D_pad)
            S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br / 2, Bc)
            column = j + tl.arange(0, Bc)[None, :]
            seen = column < Nk
            if CAUSAL:
                seen = seen & (column <= row[:, None] + Nk - Nq)
            S = tl.where(seen, S, float("-inf"))
            m_new = tl.maximum(m, tl.max(S, 1))
            unit = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha, P = tl.exp(m - unit), tl.exp(S - unit[:, None])
            l = alpha * l + tl.sum(P, 1)
            O = alpha[:, None] * O + tl.dot(P, V_j, input_precision="ieee")
            m = m_new
        l = tl.where(l == 0, 1.0, l)  # a row that saw no key gets out = 0 and lse = -inf
        store(out, i, O / l[:, None], Nq, ROWS, D, D_pad)
        tl.store(lse + row, m + tl.log(l), mask=row < Nq)


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq)."""
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_full((B, H, Nq), math.nan)  # NaN shows the rows that nobody writes
    scale = D**-0.5 if scale is None else scale
    D_pad = max(16, triton.next_power_of_2(D))
    kernel[(triton.cdiv(Nq, Br), B * H)](
        q, k, v, out, lse, Nq, Nk, scale, CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc
    )
    return out, lse
