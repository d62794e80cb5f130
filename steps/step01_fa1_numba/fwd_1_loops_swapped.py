# SPDX-License-Identifier: MIT
"""Rung 1, "loops_swapped": query tiles outside, key tiles inside. FlashAttention-2's order, all of it in shared memory.

    for each tile of Br queries:                  a thread block each: a head now keeps Nq / Br multiprocessors busy
        Q_i is loaded once; O_i = 0, l_i = 0, m_i = -inf, in shared memory
        for each tile of Bc keys:                 K_j, V_j are loaded on every visit
            S     = scale * Q_i K_j^T             (Br, Bc)
            m_new = max(m, rowmax S)
            alpha = exp(m - m_new)                l and O are relative to m, and alpha makes them relative to m_new
            P     = exp(S - m_new)                P is relative to m_new from the start, so there is no beta
            l     = alpha * l + rowsum P
            O_i   = alpha * O_i + P V_j           not divided by l on every visit
        out = O_i / l,  lse = m + log l           written once

The idea: the sums of a query tile stay on the chip until they are finished. O, l and m are no longer written Nk / Bc
times. Blocks need nothing of each other, so there are as many blocks as query tiles. This is the order of
FlashAttention-2 (2307.08691, section 3.1 and Algorithm 1), in the form in which it is usually first taught. The
bottleneck: every multiplication loads both its factors from shared memory; rung 2 loads each number once for eight
multiplications. Needs fwd_0_published.py beside it.
"""

import functools
import math

import numpy as np
import torch
from numba import cuda

from .fwd_0_published import (
    MINUS_INF,
    SIMULATED,
    THREADS,
    ZERO,
    check_shared,
    exp_difference,
    keys_seen,
    launch,
    load_tile,
    scores,
)


def forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D), float32 or float16; out like q, lse (B, H, Nq) float32.

    tile is (Br, Bc). Raises ValueError, which shows the sum, when the tiles do not fit into shared memory.
    """
    D = q.shape[-1]
    scale = D**-0.5 if scale is None else scale
    Br, Bc = tile or default_tile(D)
    q_, k_, v_ = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B * H, N, D)
    out, lse = torch.empty_like(q_), torch.empty(q_.shape[:2], dtype=torch.float32, device=q.device)
    blocks = len(q_) * -(-q_.shape[1] // Br)
    launch(forward_kernel(Br, Bc, D), blocks, THREADS, (q_, k_, v_, out, lse), causal, np.float32(scale))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def default_tile(D):
    """A (Br, Bc) that fits into shared memory."""
    return (8, 8) if SIMULATED else (16, 32) if D <= 96 else (16, 16)


@functools.cache
def forward_kernel(Br, Bc, D):
    """The kernel for one tile and head_dim."""
    row_tile, key_tile, score_tile = (Br, D + 1), (Bc, D + 1), (Br, Bc + 1)  # a spare column, as in rung 0
    what, column = f"tile {Br, Bc}, head_dim {D}", (3, Br)
    check_shared(what, Q=row_tile, O=row_tile, K=key_tile, V=key_tile, S=score_tile, m_l_alpha=column)

    @cuda.jit
    def kernel(q, k, v, out, lse, causal, scale):
        Q_i = cuda.shared.array(row_tile, np.float32)
        O_i = cuda.shared.array(row_tile, np.float32)
        K_j = cuda.shared.array(key_tile, np.float32)
        V_j = cuda.shared.array(key_tile, np.float32)
        S = cuda.shared.array(score_tile, np.float32)  # P overwrites it
        m = cuda.shared.array(Br, np.float32)
        l = cuda.shared.array(Br, np.float32)
        alpha = cuda.shared.array(Br, np.float32)
        Nq, Nk = q.shape[1], k.shape[1]
        tiles = (Nq + Br - 1) // Br
        head = cuda.blockIdx.x // tiles
        i = (tiles - 1 - cuda.blockIdx.x % tiles) * Br  # the last tile starts first: when causal, it sees most keys
        load_tile(Q_i, q, head, i, D)
        start_rows(O_i, m, l, D)
        cuda.syncthreads()  # every thread needs m and l; where the loop below is empty, store_rows reads them at once
        # Alg. 1, line 6. The loop ends with the last key that the tile's last query sees.
        for j in range(0, keys_seen(min(i + Br, Nq) - 1, Nq, Nk, causal), Bc):
            load_tile(K_j, k, head, j, D)
            load_tile(V_j, v, head, j, D)
            cuda.syncthreads()  # every thread needs rows that others have loaded
            scores(S, Q_i, K_j, i, j, Nq, Nk, Bc, D, causal, scale)
            cuda.syncthreads()  # a row of S is written by several threads and now read by one
            online_update(S, alpha, l, m, Bc)
            cuda.syncthreads()  # every thread needs P and alpha
            update_output(O_i, S, V_j, alpha, Bc, D)
            cuda.syncthreads()  # all have read V_j and P, which may now be overwritten
        store_rows(out, lse, O_i, l, m, head, i, D)

    return kernel


@cuda.jit(device=True)
def start_rows(O_i, m, l, D):
    """O_i (Br, D) = 0, l (Br,) = 0, m (Br,) = -inf, before the first key. A thread sets the entries of O_i it owns."""
    for r in range(cuda.threadIdx.y, O_i.shape[0], cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            O_i[r, d] = ZERO
        if cuda.threadIdx.x == 0:
            m[r] = MINUS_INF
            l[r] = ZERO


@cuda.jit(device=True)
def online_update(S, alpha, l, m, Bc):
    """Replaces S (Br, Bc) by P = exp(S - m_new) and updates l and m (Br,) with it; one thread a row.

    alpha (Br,) is the factor of O.
    """
    thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for r in range(thread, S.shape[0], cuda.blockDim.x * cuda.blockDim.y):
        m_new = m[r]
        for c in range(Bc):
            m_new = max(m_new, S[r, c])
        alpha[r] = exp_difference(m[r], m_new)
        l_new = alpha[r] * l[r]
        for c in range(Bc):
            S[r, c] = exp_difference(S[r, c], m_new)
            l_new += S[r, c]
        l[r] = l_new
        m[r] = m_new


@cuda.jit(device=True)
def update_output(O_i, P, V_j, alpha, Bc, D):
    """O_i (Br, D) = alpha * O_i + P V_j with P (Br, Bc), V_j (Bc, D)."""
    for r in range(cuda.threadIdx.y, O_i.shape[0], cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            total = alpha[r] * O_i[r, d]
            for c in range(Bc):
                total += P[r, c] * V_j[c, d]
            O_i[r, d] = total


@cuda.jit(device=True)
def store_rows(out, lse, O_i, l, m, head, i, D):
    """out = O_i / l and lse = m + log l for the rows from i on that exist; a row that saw no key gets 0 and -inf."""
    for r in range(cuda.threadIdx.y, min(O_i.shape[0], out.shape[1] - i), cuda.blockDim.y):
        l_row = l[r]
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            out[head, i + r, d] = ZERO if l_row == ZERO else O_i[r, d] / l_row
        if cuda.threadIdx.x == 0:
            lse[head, i + r] = MINUS_INF if l_row == ZERO else m[r] + math.log(l_row)
