# SPDX-License-Identifier: MIT
"""Bug hunt 01.bug1: one thread a query row, K and V through shared memory. Something is wrong with it.

    one block of T threads a head; thread t takes the queries t, t + T, t + 2 T, ...:
        for each tile of Bc keys, copied to shared memory by all threads:
            for each of its keys that the query sees:
                s     = scale * q_i . k_j
                m_new = max(m, s),  alpha = exp(m - m_new),  p = exp(s - m_new)
                l     = alpha * l + p
                O     = alpha * O + p v_j        in the thread's own memory
        out = O / l,  lse = m + log l

Needs fwd_0_published.py of this stage, whose small functions it uses.
"""

import functools
import math

import numpy as np
import torch
from numba import cuda

from ..fwd_0_published import MINUS_INF, THREADS, ZERO, exp_difference, keys_seen, launch, load_tile

Bc = 8


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_, k_, v_ = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B * H, N, D)
    out, lse = torch.empty_like(q_), q_.new_empty(q_.shape[:2])
    launch(forward_kernel(q.shape[-1]), len(q_), THREADS, (q_, k_, v_, out, lse), causal, np.float32(scale))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


@functools.cache
def forward_kernel(D):
    """The kernel for one head_dim."""

    @cuda.jit
    def kernel(q, k, v, out, lse, causal, scale):
        K_j = cuda.shared.array((Bc, D), np.float32)
        V_j = cuda.shared.array((Bc, D), np.float32)
        O = cuda.local.array(D, np.float32)
        head, threads = cuda.blockIdx.x, cuda.blockDim.x * cuda.blockDim.y
        Nq, Nk = q.shape[1], k.shape[1]
        for first in range(0, Nq, threads):
            i = first + cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x  # a thread beyond Nq only copies K and V
            seen = keys_seen(i, Nq, Nk, causal)
            m, l = MINUS_INF, ZERO
            for d in range(D):
                O[d] = ZERO
            for j in range(0, Nk, Bc):
                load_tile(K_j, k, head, j, D)
                load_tile(V_j, v, head, j, D)
                cuda.syncthreads()
                for c in range(min(Bc, seen - j)):
                    s = ZERO
                    for d in range(D):
                        s += q[head, i, d] * K_j[c, d]
                    m_new = max(m, scale * s)
                    alpha, p = exp_difference(m, m_new), exp_difference(scale * s, m_new)
                    l = alpha * l + p
                    for d in range(D):
                        O[d] = alpha * O[d] + p * V_j[c, d]
                    m = m_new
            if i < Nq:
                for d in range(D):
                    out[head, i, d] = O[d] / l if l > ZERO else ZERO
                lse[head, i] = m + math.log(l) if l > ZERO else MINUS_INF

    return kernel
