# SPDX-License-Identifier: MIT
"""Rung 1, "matrix": standard attention, one matrix product after the other.

    S = scale * Q K^T    (Nq, Nk)  written to memory
    P = softmax(S)       (Nq, Nk)  read, written
    O = P V              (Nq, D)   read

The idea: the three loops are two matrix products, which hardware is good at. The bottleneck: S and P have Nq x Nk
entries each. At N = 16384 one head's S is 1 GiB of float32, and it moves through memory several times.
Needs torch only.
"""

import math

import torch


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq). FlashAttention, Algorithm 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = scores(q, k, causal, scale)  # (B, H, Nq, Nk)
    P, lse = softmax(S)
    return P @ v, lse


def scores(q, k, causal, scale):
    """S = scale Q K^T; when causal, -inf above the diagonal, which ends in the bottom right corner."""
    S = scale * (q @ k.mT)
    if causal:
        Nq, Nk = S.shape[-2:]
        hidden = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).triu(1 + Nk - Nq)  # triu(d): column - row >= d
        S = S.masked_fill(hidden, -math.inf)
    return S


def softmax(S):
    """(P, lse) over the last dimension; a row whose entries are all masked gets P = 0 and lse = -inf, not NaN."""
    m = S.amax(-1, keepdim=True).nan_to_num(neginf=0.0)  # in a masked row -inf - (-inf) would be NaN
    E = (S - m).exp()
    l = E.sum(-1, keepdim=True)
    P = torch.where(l == 0, 0, E / l)
    return P, (m + l.log()).squeeze(-1)
