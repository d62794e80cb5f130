# SPDX-License-Identifier: MIT
"""Rung 0, "published": FlashAttention's forward as printed. Key tiles outside, query tiles inside, a block a head.

    O = 0, l = 0, m = -inf                        in device memory
    for each tile of Bc keys:                     K_j and V_j are loaded once
        for each tile of Br queries:              Q_i, O_i, l_i, m_i are loaded on every visit
            S       = scale * Q_i K_j^T           (Br, Bc), in shared memory
            m_block = rowmax S                    this tile's own maximum ...
            P       = exp(S - m_block)            ... P and l_block are relative to it
            l_block = rowsum P
            m_new   = max(m, m_block)             alpha and beta make old and new sums relative to m_new
            alpha   = exp(m - m_new),  beta = exp(m_block - m_new)
            l_new   = alpha * l + beta * l_block
            O_i     = (l * alpha * O_i + beta * P V_j) / l_new
            O_i, l_i = l_new, m_i = m_new         go back to device memory on every visit

The idea: O stays normalised, so after every visit it is the attention over the keys seen so far, and S never leaves the
chip. The bottleneck: O is written Nk / Bc times, and a head keeps one multiprocessor busy while the others wait. The
next rung swaps the loops. Source: FlashAttention (2205.14135), Algorithms 1 and 2. Not printed there: rows that see no
key, tiles skipped above the diagonal, lse = m + log l, and O in float32 between visits whatever the input's type, so
that it is rounded once at the end and not on every visit.

Threads: x runs along a row of a tile, so that neighbouring threads access neighbouring addresses; y runs over the rows.
Needs torch, numpy and numba-cuda only; runs on a GPU, or in Numba's simulator under NUMBA_ENABLE_CUDASIM=1.
"""

import functools
import math
import sys
import warnings

import numpy as np
import torch
from numba import config, cuda

# Numba warns of a grid with few blocks. This rung launches one block a head, and there may be few heads.
warnings.filterwarnings("ignore", message=".*Grid size .* low occupancy")
SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS = (4, 2) if SIMULATED else (16, 16)  # (x, y) of a block; the simulator starts a Python thread for each
SHARED_BYTES = 48 * 1024  # what a block may have without asking the driver for more
# A literal such as 0.0 is float64 for Numba, and the arithmetic with it would be float64 too.
ZERO, MINUS_INF = np.float32(0), np.float32(-math.inf)

if SIMULATED:
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    def shared_array(self, shape, dtype):
        """Replaces the simulator's function, which first looks an array up and then creates it.

        Between these two steps another thread could create the same array, and each thread would have one of its own.
        """
        line = sys._getframe(1)
        key = line.f_code.co_filename, line.f_lineno
        return self._allocations.setdefault(key, np.full(shape, math.nan, dtype))

    FakeCUDAShared.array = shared_array


def forward(q, k, v, *, causal=False, scale=None, tile=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D), float32 or float16; out like q, lse (B, H, Nq) float32.

    tile is (Br, Bc). Raises ValueError, which shows the sum, when the tiles do not fit into shared memory.
    """
    D = q.shape[-1]
    scale = D**-0.5 if scale is None else scale
    Br, Bc = tile or default_tile(D)
    q_, k_, v_ = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B * H, N, D)
    O = torch.zeros(q_.shape, dtype=torch.float32, device=q.device)
    l = torch.zeros(q_.shape[:2], dtype=torch.float32, device=q.device)  # (B * H, Nq)
    m = torch.full_like(l, -math.inf)
    launch(forward_kernel(Br, Bc, D), len(q_), THREADS, (q_, k_, v_, O, l, m), causal, np.float32(scale))
    return O.to(q.dtype).reshape(q.shape), (m + l.log()).reshape(q.shape[:-1])


def check_shared(what, **arrays):
    """Raises ValueError, showing the sum, if float32 arrays of these shapes do not fit into a block's shared memory."""
    words = sum(math.prod(shape) for shape in arrays.values())
    if 4 * words > SHARED_BYTES:
        listed = " + ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in arrays.items())
        raise ValueError(
            f"{what}: {listed} = {words:,} float32 = {4 * words:,} bytes of shared memory, and a block has {SHARED_BYTES:,}. "  # noqa: E501
            "Take a smaller tile or head_dim."
        )


def launch(kernel, blocks, threads, tensors, *scalars):
    """Runs the kernel in that many blocks of threads (x, y), on the tensors' device and on torch's stream."""
    device = tensors[0].device
    if SIMULATED:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # the simulator waits for its threads in a busy loop; they may interrupt it sooner
        try:
            kernel[blocks, threads](*(x.detach().numpy() for x in tensors), *scalars)
        finally:
            sys.setswitchinterval(interval)
    else:
        with cuda.gpus[device.index]:
            stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
            kernel[blocks, threads, stream](*(x.detach() for x in tensors), *scalars)


def default_tile(D):
    """A (Br, Bc) that fits into shared memory."""
    return (8, 8) if SIMULATED else (16, 16)


@functools.cache
def forward_kernel(Br, Bc, D):
    """The kernel for one tile and head_dim, because the compiler must know the sizes of shared memory."""
    row_tile, key_tile = (Br, D + 1), (Bc, D + 1)  # the spare column puts the entries of a column into different banks
    score_tile = (Br, Bc + 1)
    check_shared(f"tile {Br, Bc}, head_dim {D}", Q=row_tile, K=key_tile, V=key_tile, S=score_tile, factors=(2, Br))

    @cuda.jit
    def kernel(q, k, v, O, l, m, causal, scale):
        Q_i = cuda.shared.array(row_tile, np.float32)
        K_j = cuda.shared.array(key_tile, np.float32)
        V_j = cuda.shared.array(key_tile, np.float32)
        S = cuda.shared.array(score_tile, np.float32)  # P overwrites it
        old = cuda.shared.array(Br, np.float32)  # l * alpha / l_new: the share of the old O in the new one
        new = cuda.shared.array(Br, np.float32)  # beta / l_new
        head = cuda.blockIdx.x
        Nq, Nk = q.shape[1], k.shape[1]
        for j in range(0, Nk, Bc):  # Alg. 1, line 5
            cuda.syncthreads()  # other threads may still be reading the V_j of the last iteration
            load_tile(K_j, k, head, j, D)
            load_tile(V_j, v, head, j, D)
            for i in range(first_query_tile(j, Nq, Nk, Br, causal), Nq, Br):  # Alg. 1, line 7
                load_tile(Q_i, q, head, i, D)
                cuda.syncthreads()  # every thread needs rows that others have loaded
                scores(S, Q_i, K_j, i, j, Nq, Nk, Bc, D, causal, scale)
                cuda.syncthreads()  # a row of S is written by several threads and now read by one
                online_update(S, old, new, l, m, head, i, Bc)
                cuda.syncthreads()  # every thread needs P, old and new
                update_output(O, S, V_j, old, new, head, i, Bc, D)
                # No barrier is needed here. Before the next one only Q_i is written, last read two barriers ago.

    return kernel


@cuda.jit(device=True)
def load_tile(tile, x, head, start, D):
    """tile (rows, D) = x[head, start : start + rows], zero beyond the end of x."""
    N = x.shape[1]
    for r in range(cuda.threadIdx.y, tile.shape[0], cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            tile[r, d] = np.float32(x[head, start + r, d]) if start + r < N else ZERO


@cuda.jit(device=True)
def first_query_tile(j, Nq, Nk, Br, causal):
    """The start of the first query tile that sees a key of the tile at j; in earlier tiles every score is masked."""
    return max(0, j - (Nk - Nq)) // Br * Br if causal else 0


@cuda.jit(device=True)
def keys_seen(row, Nq, Nk, causal):
    """How many keys query `row` sees, from the first on. The causal diagonal ends in the bottom right corner."""
    if row >= Nq:
        return 0
    return max(0, row + 1 + Nk - Nq) if causal else Nk


@cuda.jit(device=True)
def dot(A, a, B, b, D):
    """The scalar product of row a of A and row b of B."""
    total = ZERO
    for d in range(D):
        total += A[a, d] * B[b, d]
    return total


@cuda.jit(device=True)
def exp_difference(x, m):
    """exp(x - m), and 0 for x = -inf. Where m is -inf too, x - m would be NaN."""
    return ZERO if x == MINUS_INF else math.exp(x - m)


@cuda.jit(device=True)
def scores(S, Q_i, K_j, i, j, Nq, Nk, Bc, D, causal, scale):
    """S (Br, Bc) = scale * Q_i K_j^T, -inf where the query does not see the key."""
    for r in range(cuda.threadIdx.y, S.shape[0], cuda.blockDim.y):
        seen = keys_seen(i + r, Nq, Nk, causal)
        for c in range(cuda.threadIdx.x, Bc, cuda.blockDim.x):
            S[r, c] = scale * dot(Q_i, r, K_j, c, D) if j + c < seen else MINUS_INF


@cuda.jit(device=True)
def online_update(S, old, new, l, m, head, i, Bc):
    """Replaces S (Br, Bc) by P = exp(S - rowmax S) and updates l and m with it; one thread a row.

    old and new (Br,) are the factors of the old O and of P V_j in the new O.
    """
    thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for r in range(thread, min(S.shape[0], l.shape[1] - i), cuda.blockDim.x * cuda.blockDim.y):
        m_block = MINUS_INF
        for c in range(Bc):
            m_block = max(m_block, S[r, c])
        l_block = ZERO
        for c in range(Bc):
            S[r, c] = exp_difference(S[r, c], m_block)
            l_block += S[r, c]
        m_new = max(m[head, i + r], m_block)
        alpha = exp_difference(m[head, i + r], m_new)
        beta = exp_difference(m_block, m_new)
        l_old = l[head, i + r]
        l_new = alpha * l_old + beta * l_block
        old[r] = ZERO if l_new == ZERO else l_old * alpha / l_new  # with l_new = 0 no key is seen yet, and O stays 0
        new[r] = ZERO if l_new == ZERO else beta / l_new
        l[head, i + r] = l_new
        m[head, i + r] = m_new


@cuda.jit(device=True)
def update_output(O, P, V_j, old, new, head, i, Bc, D):
    """O_i = old * O_i + new * P V_j in device memory, P (Br, Bc), V_j (Bc, D)."""
    for r in range(cuda.threadIdx.y, min(P.shape[0], O.shape[1] - i), cuda.blockDim.y):
        for d in range(cuda.threadIdx.x, D, cuda.blockDim.x):
            PV = ZERO
            for c in range(Bc):
                PV += P[r, c] * V_j[c, d]
            O[head, i + r, d] = old[r] * O[head, i + r, d] + new[r] * PV
