"""Attention in float64, forward and backward by formula: the one answer that every stage is compared with.

Written to be read next to the papers, not to be fast: the N x N matrices are formed.

    S = scale Q K^T (+ bias, masked)    lse = log rowsum exp S    P = exp(S - lse)    O = (P . Z) V
    dV = (P . Z)^T dO     dP = (dO V^T) . Z     delta = rowsum(dO . O)     dS = P . (dP - delta)
    dQ = scale dS K       dK = scale dS^T Q

with Z = 1 without dropout, otherwise the given keep-mask divided by 1 - p. Source: FlashAttention, arXiv 2205.14135,
section 3.1 and appendix B.2.
"""

import math

import torch


def forward(q, k, v, **options):
    """(out, lse) in float64: out like q, lse (B, H, Nq), natural logarithm. Options: see `visible` and `scores`.

    q (B, H, Nq, D), k and v (B, Hk, Nk, D), of any real dtype and device. A query without a key gets out 0, lse -inf.
    """
    P, Z, lse = _probabilities(q, k, **options)
    return (P * Z) @ _repeat(v.double(), q), lse


def backward(dout, q, k, v, **options):
    """(dq, dk, dv) in float64, shaped like q, k and v, by the formulas above (no autograd)."""
    scale = _scale(options.get("scale"), q)
    P, Z, _ = _probabilities(q, k, **options)
    dO, Q, K, V = dout.double(), q.double(), _repeat(k.double(), q), _repeat(v.double(), q)
    O = (P * Z) @ V  # (B, H, Nq, D)
    dV = (P * Z).mT @ dO  # (B, H, Nk, D)
    dP = (dO @ V.mT) * Z  # (B, H, Nq, Nk)
    delta = (dO * O).sum(-1, keepdim=True)  # (B, H, Nq, 1)
    dS = P * (dP - delta)
    dQ, dK = scale * dS @ K, scale * dS.mT @ Q
    return dQ, _sum_groups(dK, k), _sum_groups(dV, v)


def visible(Nq, Nk, causal=False, window=None, device="cpu"):
    """(Nq, Nk) bool: which keys each query sees. Query i stands at position i + Nk - Nq, aligned at the bottom right.

    causal: a query sees the keys up to its position. window (left, right): it sees the keys from `left` positions
    before to `right` positions after its own; None is no limit.
    """
    row = torch.arange(Nq, device=device)[:, None] + (Nk - Nq)
    col = torch.arange(Nk, device=device)[None, :]
    left, right = window or (None, None)
    seen = col <= row if causal else torch.ones(Nq, Nk, dtype=torch.bool, device=device)
    if left is not None:
        seen = seen & (col >= row - left)
    if right is not None:
        seen = seen & (col <= row + right)
    return seen


def scores(q, k, *, causal=False, scale=None, mask=None, alibi_slopes=None, window=None):
    """S (B, H, Nq, Nk) in float64, -inf where masked.

    mask: bool (True keeps) or additive, broadcast to S. alibi_slopes (H,) or (B, H): adds -slope |i + Nk - Nq - j|.
    """
    Nq, Nk = q.shape[-2], k.shape[-2]
    S = _scale(scale, q) * q.double() @ _repeat(k.double(), q).mT
    if alibi_slopes is not None:
        row = torch.arange(Nq, device=q.device)[:, None] + (Nk - Nq)
        distance = (row - torch.arange(Nk, device=q.device)).abs()
        S = S - alibi_slopes.double()[..., None, None] * distance
    if mask is not None and mask.dtype != torch.bool:
        S = S + mask.double()
    elif mask is not None:
        S = S.masked_fill(~mask, -math.inf)
    return S.masked_fill(~visible(Nq, Nk, causal, window, q.device), -math.inf)


def _probabilities(q, k, *, dropout_mask=None, dropout_p=0.0, **options):
    """P (B, H, Nq, Nk), the dropout factor Z, and lse (B, H, Nq). dropout_mask: bool, like P; True keeps."""
    S = scores(q, k, **options)
    lse = S.logsumexp(-1) if S.shape[-1] else S.new_full(S.shape[:-1], -math.inf)
    P = (S - lse.nan_to_num(neginf=0.0)[..., None]).exp()  # in a row without keys exp(-inf - 0) = 0
    Z = torch.ones_like(P) if dropout_mask is None else dropout_mask.double() / (1 - dropout_p)
    return P, Z, lse


def _scale(scale, q):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _repeat(x, q):
    """k or v (B, Hk, N, D) with each head repeated for its H / Hk query heads."""
    H, Hk = q.shape[-3], x.shape[-3]
    return x if Hk == H else x.repeat_interleave(H // Hk, dim=-3)


def _sum_groups(grad, x):
    """The gradient of `_repeat`: (B, H, N, D) summed over each group of query heads, to the shape of x."""
    if grad.shape == x.shape:
        return grad
    B, Hk, N, D = x.shape
    return grad.reshape(B, Hk, -1, N, D).sum(2)
