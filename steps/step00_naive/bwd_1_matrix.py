# SPDX-License-Identifier: MIT
"""Rung 1, "matrix": the backward of standard attention by hand, one line a formula.

    O = P V          gives   dV = P^T dO             dP = dO V^T
    P = softmax(S)   gives   dS = P * (dP - delta)   delta_i = sum_j P_ij dP_ij = sum_d dO_id O_id
    S = scale Q K^T  gives   dQ = scale dS K         dK = scale dS^T Q

The idea: P need not be kept from the forward, because lse, one number a row, gives it back: P = exp(S - lse).
Source: FlashAttention, appendix B.2. The bottleneck: P, dP and dS have Nq x Nk entries each; rung 3 forms one tile of
them at a time. Needs fwd_1_matrix.py beside it, and torch.
"""

import torch

from .fwd_1_matrix import scores


def backward(dout, q, k, v, out, lse, *, causal=False, scale=None):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, H, Nk, D), from dout and out like q, lse (B, H, Nq)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    P = probabilities(scores(q, k, causal, scale), lse)  # (B, H, Nq, Nk)
    dV = P.mT @ dout
    dP = dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)  # (B, H, Nq, 1)
    dS = P * (dP - delta)
    return scale * (dS @ k), scale * (dS.mT @ q), dV


def probabilities(S, lse):
    """P = exp(S - lse). A row that sees no key has lse = -inf, and its P is 0.

    No P is larger than 1. Without the limit rounding could make it so where scores are huge.
    """
    return (S - lse[..., None]).clamp(max=0).exp().masked_fill(torch.isneginf(lse)[..., None], 0)
