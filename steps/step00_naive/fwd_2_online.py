# SPDX-License-Identifier: MIT
"""Rung 2, "online": the softmax in one pass, while the scores arrive one key at a time.

A safe softmax reads its scores three times: for the maximum m, for the sum l = sum exp(s - m), and for the result.
The online softmax uses the maximum seen so far in place of the final one. When it moves, one factor corrects the sums:

    m_new = max(m, s_j)
    alpha = exp(m - m_new)                      at most 1; the sums were relative to m, and become relative to m_new
    l     = alpha * l + exp(s_j - m_new)
    O     = alpha * O + exp(s_j - m_new) * v_j  the output is a sum of the same kind, so the same factor corrects it
    m     = m_new

O / l at the end is exact, not an approximation, and no row of S or P was ever stored. Source: Milakov & Gimelshein
2018, Algorithm 3; Rabe & Staats 2021 for O. Left out: tiles of keys instead of single keys, which rung 3 adds. Needs
torch only.
"""

import math

import torch


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq).

    All rows advance together, key by key.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    Nq, Nk = q.shape[-2], k.shape[-2]
    m = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype, device=q.device)  # (B, H, Nq)
    l, O = torch.zeros_like(m), torch.zeros_like(q)
    row = torch.arange(Nq, device=q.device) + (Nk - Nq)
    for j in range(Nk):
        s = scale * (q * k[..., j : j + 1, :]).sum(-1)  # (B, H, Nq)
        if causal:
            s = s.masked_fill(j > row, -math.inf)
        m, l, O = online_update(m, l, O, s, v[..., j : j + 1, :])
    return torch.where(l[..., None] == 0, 0, O / l[..., None]), m + l.log()


def online_update(m, l, O, s, v_j):
    """(m, l, O) after one more key, with the scores s (B, H, Nq) and the value v_j (B, H, 1, D).

    m and l (B, H, Nq); O (B, H, Nq, D) is not yet divided by l.
    """
    m_new = torch.maximum(m, s)
    unit = m_new.nan_to_num(neginf=0.0)  # before the first visible key m_new is -inf, and -inf - (-inf) would be NaN
    alpha = (m - unit).exp()
    p = (s - unit).exp()
    return m_new, alpha * l + p, alpha[..., None] * O + p[..., None] * v_j
