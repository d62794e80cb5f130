# SPDX-License-Identifier: MIT
"""Rung 0, "published": FlashAttention's backward as printed. Key tiles outside, query tiles inside, a block a head.

    dQ = 0                                        in device memory
    delta = rowsum(dO * O)                        one number a query
    for each tile of Bc keys:                     K_j, V_j are loaded once; dK_j = 0, dV_j = 0 in shared memory
        for each tile of Br queries:              Q_i, dO_i are loaded on every visit
            S     = scale * Q_i K_j^T             (Br, Bc)
            P     = exp(S - lse_i)                recomputed: cheaper than reading it back
            dV_j += P^T dO_i
            dP    = dO_i V_j^T                    (Br, Bc)
            dS    = P * (dP - delta_i)
            dQ_i += scale * dS K_j                in device memory, on every visit
            dK_j += scale * dS^T Q_i
        dK_j, dV_j go to device memory            once

The idea: lse, one number a query, is all that the backward needs to recompute P. One block computes a whole head, so no
other block adds to the head's dQ. The additions need no atomics, and every run gives the same bits. Source:
FlashAttention (2205.14135), Algorithm 4, without dropout. Two things are changed. The paper keeps m and l and computes
exp(S - m) / l, which equals exp(S - lse). The paper forms delta_i again on every visit; here it is formed once, because
it does not depend on j. dQ is float32 between visits. The bottleneck is the forward's: one block a head. Needs
fwd_0_published.py beside it.
"""

import functools

import numpy as np
import torch
from numba import cuda

from .fwd_0_published import (
    SIMULATED,
    THREADS,
    ZERO,
    check_shared,
    dot,
    exp_difference,
    first_query_tile,
    keys_seen,
    launch,
    load_tile,
)


def backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, H, Nk, D), from dout and out like q, lse (B, H, Nq).

    tile is (Br, Bc). Raises ValueError, which shows the sum, when the tiles do not fit into shared memory.
    """
    D = q.shape[-1]
    scale = D**-0.5 if scale is None else scale
    Br, Bc = tile or default_tile(D)
    inputs = tuple(x.flatten(0, 1).contiguous() for x in (dout, q, k, v, out, lse))  # (B * H, N, D), lse (B * H, Nq)
    dq = torch.zeros(inputs[1].shape, dtype=torch.float32, device=q.device)
    dk, dv, delta = (torch.empty_like(inputs[x]) for x in (2, 3, 5))
    launch(backward_kernel(Br, Bc, D), len(dq), THREADS, (*inputs, delta, dq, dk, dv), causal, np.float32(scale))
    return dq.to(q.dtype).reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def default_tile(D):
    """A (Br, Bc) that fits into shared memory."""
    return (8, 8) if SIMULATED else (16, 16) if D <= 96 else (16, 8)


@functools.cache
def backward_kernel(Br, Bc, D):
    """The kernel for one tile and head_dim."""
    row_tile, key_tile, score_tile = (Br, D + 1), (Bc, D + 1), (Br, Bc + 1)  # a spare column, as in the forward
    what, pair = f"tile {Br, Bc}, head_dim {D}", {"P": score_tile, "dS": score_tile}
    check_shared(what, Q=row_tile, dO=row_tile, K=key_tile, V=key_tile, dK=key_tile, dV=key_tile, **pair)

    @cuda.jit
    def kernel(dout, q, k, v, out, lse, delta, dq, dk, dv, causal, scale):
        Q_i = cuda.shared.array(row_tile, np.float32)
        dO_i = cuda.shared.array(row_tile, np.float32)
        K_j = cuda.shared.array(key_tile, np.float32)
        V_j = cuda.shared.array(key_tile, np.float32)
        dK_j = cuda.shared.array(key_tile, np.float32)
        dV_j = cuda.shared.array(key_tile, np.float32)
        P = cuda.shared.array(score_tile, np.float32)
        dS = cuda.shared.array(score_tile, np.float32)
        head = cuda.blockIdx.x
        Nq, Nk = q.shape[1], k.shape[1]
        row_delta(delta, dout, out, head)  # Alg. 4, line 19
        for j in range(0, Nk, Bc):  # Alg. 4, line 6
            load_tile(K_j, k, head, j, D)
            load_tile(V_j, v, head, j, D)
            clear(dK_j, D)
            clear(dV_j, D)
            for i in range(first_query_tile(j, Nq, Nk, Br, causal), Nq, Br):  # Alg. 4, line 9
                load_tile(Q_i, q, head, i, D)
                load_tile(dO_i, dout, head, i, D)
                cuda.syncthreads()  # every thread needs rows that others have loaded, and their delta
                probabilities(P, Q_i, K_j, lse, head, i, j, Nk, Bc, D, causal, scale)
                score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D)
                cuda.syncthreads()  # every thread needs P and dS
                add_transposed(dV_j, P, dO_i, np.float32(1), D)
                add_transposed(dK_j, dS, Q_i, scale, D)
                add_query_gradient(dq, dS, K_j, head, i, Bc, D, scale)
                cuda.syncthreads()  # all have read Q_i, dO_i, K_j and V_j, which may now be overwritten
            store_tile(dk, dK_j, head, j, D)  # no barrier, because each thread stores the sums that it formed itself
            store_tile(dv, dV_j, head, j, D)

    return kernel


@cuda.jit(device=True)
def row_delta(delta, dout, out, head):
    """delta[head] (Nq,) = rowsum(dO * O), one thread a row."""
    thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for r in range(thread, out.shape[1], cuda.blockDim.x * cuda.blockDim.y):
        total = ZERO
        for d in range(out.shape[2]):
            total += np.float32(dout[head, r, d]) * np.float32(out[head, r, d])
        delta[head, r] = total


@cuda.jit(device=True)
def clear(tile, D):
    """Sets tile (rows, D) to 0."""
    for r in range(cuda.threadIdx.y, tile.shape[0], cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            tile[r, d] = ZERO


@cuda.jit(device=True)
def store_tile(x, tile, head, start, D):
    """x[head, start : start + rows] = tile (rows, D), for the rows that x has."""
    for r in range(cuda.threadIdx.y, min(tile.shape[0], x.shape[1] - start), cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            x[head, start + r, d] = tile[r, d]


@cuda.jit(device=True)
def probabilities(P, Q_i, K_j, lse, head, i, j, Nk, Bc, D, causal, scale):
    """P (Br, Bc) = exp(scale * Q_i K_j^T - lse_i), 0 where the query does not see the key."""
    for r in range(cuda.threadIdx.y, P.shape[0], cuda.blockDim.y):
        seen = keys_seen(i + r, lse.shape[1], Nk, causal)
        for c in range(cuda.threadIdx.x, Bc, cuda.blockDim.x):
            if j + c < seen:
                P[r, c] = exp_difference(scale * dot(Q_i, r, K_j, c, D), lse[head, i + r])
            else:
                P[r, c] = ZERO


@cuda.jit(device=True)
def score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D):
    """dS (Br, Bc) = P * (dO_i V_j^T - delta_i), and 0 in rows beyond the last query.

    There is no barrier before it, so a thread may read only those entries of P that it has written itself: in the rows
    threadIdx.y, threadIdx.y + blockDim.y, ... the columns threadIdx.x, threadIdx.x + blockDim.x, ...
    """
    for r in range(cuda.threadIdx.y, P.shape[0], cuda.blockDim.y):
        delta_i = delta[head, i + r] if i + r < delta.shape[1] else ZERO
        for c in range(cuda.threadIdx.x, Bc, cuda.blockDim.x):
            dS[r, c] = P[r, c] * (dot(dO_i, r, V_j, c, D) - delta_i)


@cuda.jit(device=True)
def add_transposed(total, A, X, factor, D):
    """total (Bc, D) += factor * A^T X with A (Br, Bc), X (Br, D)."""
    for c in range(cuda.threadIdx.y, total.shape[0], cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            AX = ZERO
            for r in range(A.shape[0]):
                AX += A[r, c] * X[r, d]
            total[c, d] += factor * AX


@cuda.jit(device=True)
def add_query_gradient(dq, dS, K_j, head, i, Bc, D, scale):
    """dQ_i += scale * dS K_j in device memory, dS (Br, Bc), K_j (Bc, D)."""
    for r in range(cuda.threadIdx.y, min(dS.shape[0], dq.shape[1] - i), cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            dSK = ZERO
            for c in range(Bc):
                dSK += dS[r, c] * K_j[c, d]
            dq[head, i + r, d] += scale * dSK
