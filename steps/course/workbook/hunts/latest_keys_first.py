# SPDX-License-Identifier: MIT
"""Bug hunt 04.bug2: attention over keys that several ranks hold.

    for each rank, the one with the latest keys first:
        (out, lse) of all queries over this rank's keys
        merge into (out, lse)

Rank r has chunk r of the keys. A cache of keys grows at its end, so that the latest keys are still in fast memory and
come first. Left out: processes. Needs torch only.
"""

import math

import torch


def forward(q, k, v, *, causal=False, scale=None, ranks=4):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq). Query i stands at i + Nk - Nq."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    position = torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
    chunks = zip(torch.arange(k.shape[2]).chunk(ranks), k.chunk(ranks, 2), v.chunk(ranks, 2), strict=True)
    parts = [attend(q, K, V, seen(position, keys, causal), scale) for keys, K, V in chunks]
    out, lse = parts.pop()
    while parts:
        out, lse = merge(out, lse, *parts.pop())
    return out, lse


def seen(position, keys, causal):
    """Which queries (rows) see which keys (columns)."""
    everything = torch.ones(len(position), len(keys), dtype=torch.bool)
    return keys <= position[:, None] if causal else everything


def attend(q, K, V, visible, scale):
    """(out, lse) over one rank's keys. A query that sees none of them has out = 0 and lse = -inf."""
    S = (scale * (q @ K.mT)).masked_fill(~visible, -math.inf)
    lse = S.logsumexp(-1)
    P = (S - lse[..., None]).exp().masked_fill(~visible, 0)
    return P @ V, lse


def merge(out, lse, out_block, lse_block):
    """(out, lse) over the keys of both. Where only one of them has a key, w is 0 or 1."""
    lse_new = torch.logaddexp(lse, lse_block)
    w = (lse_block - lse_new).exp().masked_fill(lse_block == -math.inf, 0)
    return torch.lerp(out, out_block, w[..., None]), lse_new
