# SPDX-License-Identifier: MIT
"""Bug hunt 00.bug1: attention for a slice of queries at a time. Something is wrong with it.

    for each slice of SLICE queries:
        S   = scale * Q_i K^T     (SLICE, Nk), masked
        lse = log rowsum exp S
        O_i = exp(S - lse) V

S never has more than SLICE rows, so memory grows like N and not like N^2. Needs torch only.
"""

import math

import torch

SLICE = 32


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    slices = [attend(Q_i, k, v, causal, scale) for Q_i in q.split(SLICE, dim=-2)]
    out, lse = zip(*slices, strict=True)
    return torch.cat(out, -2), torch.cat(lse, -1)


def attend(Q, K, V, causal, scale):
    """(out, lse) of all the queries in Q at once."""
    S = scale * (Q @ K.mT)  # (B, H, Nq, Nk)
    if causal:
        Nq, Nk = S.shape[-2:]
        seen = torch.ones(Nq, Nk, dtype=torch.bool, device=Q.device).tril(Nk - Nq)  # the last query sees every key
        S = S.masked_fill(~seen, -math.inf)
    lse = S.logsumexp(-1)
    P = (S - lse[..., None]).exp().masked_fill(lse[..., None] == -math.inf, 0)  # in a row that sees no key, P is 0
    return P @ V, lse
