# SPDX-License-Identifier: MIT
"""Bug hunt 01.bug2: a softmax in two passes over the keys, without shared memory. Something is wrong with it.

    one block of T threads a head; thread t takes the queries t, t + T, t + 2 T, ...:
        m   = max of the scores
        for each key that the query sees:
            p    = exp(s - m)
            l   += p
            O_i += p v_j
        out = O / l,  lse = m + log l

Needs fwd_0_published.py of this stage, whose small functions it uses.
"""

import math

import numpy as np
import torch
from numba import cuda

from ..fwd_0_published import MINUS_INF, THREADS, ZERO, dot, keys_seen, launch

SMALLEST = np.float32(np.finfo(np.float32).tiny)


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): float32 q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_, k_, v_ = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B * H, N, D)
    out, lse = torch.zeros_like(q_), q_.new_empty(q_.shape[:2])
    launch(kernel, len(q_), THREADS, (q_, k_, v_, out, lse), causal, np.float32(scale))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


@cuda.jit
def kernel(q, k, v, out, lse, causal, scale):
    head, thread = cuda.blockIdx.x, cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    Q, K, V, O, D = q[head], k[head], v[head], out[head], q.shape[2]
    for i in range(thread, Q.shape[0], cuda.blockDim.x * cuda.blockDim.y):
        seen = keys_seen(i, Q.shape[0], K.shape[0], causal)
        m, l = SMALLEST, ZERO
        for j in range(seen):
            m = max(m, scale * dot(Q, i, K, j, D))
        for j in range(seen):
            p = math.exp(scale * dot(Q, i, K, j, D) - m)
            l += p
            for d in range(D):
                O[i, d] += p * V[j, d]
        for d in range(D):
            O[i, d] = O[i, d] / l if l > ZERO else ZERO  # no key seen
        lse[head, i] = m + math.log(l) if l > ZERO else MINUS_INF
