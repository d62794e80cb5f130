# SPDX-License-Identifier: MIT
"""Rung 3, "tiled": FlashAttention-2's forward in plain torch. All later stages are this file on other hardware.

    for each tile of Br queries:                      on a GPU: one block each
        m = -inf, l = 0, O = 0                        on the chip
        for each tile of Bc keys:
            S     = scale * Q_i K_j^T                 (Br, Bc), the only piece of S that ever exists
            m_new = max(m, rowmax S)
            alpha = exp(m - m_new)
            P     = exp(S - m_new)
            l     = alpha * l + rowsum P
            O     = alpha * O + P V_j
        out = O / l,  lse = m + log l                 written once

The idea: rung 2's update, made for a whole tile of queries and keys at a time. K and V are read Nq / Br times instead
of Nq times, and the products are matrix products again. Source: FlashAttention-2, Algorithm 1. Left out: everything
that makes it fast. Needs torch only.
"""

import math

import torch


def forward(q, k, v, *, causal=False, scale=None, tile=(16, 16)):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D); out like q, lse (B, H, Nq). tile is (Br, Bc)."""
    Br, Bc = tile
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    Nq, Nk = q.shape[-2], k.shape[-2]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=q.dtype, device=q.device)
    for i in range(0, Nq, Br):
        Q_i = q[..., i : i + Br, :]  # (B, H, Br, D); the last tile may be shorter
        m = torch.full(Q_i.shape[:-1], -math.inf, dtype=q.dtype, device=q.device)
        l, O = torch.zeros_like(m), torch.zeros_like(Q_i)
        for j in range(0, last_key(i + Br, Nq, Nk, causal), Bc):
            K_j, V_j = k[..., j : j + Bc, :], v[..., j : j + Bc, :]
            S = scale * (Q_i @ K_j.mT)  # (B, H, Br, Bc)
            if causal:
                S = mask(S, i, j, Nk - Nq)
            m, l, O = online_update(m, l, O, S, V_j)
        out[..., i : i + Br, :] = torch.where(l[..., None] == 0, 0, O / l[..., None])
        lse[..., i : i + Br] = m + l.log()
    return out, lse


def last_key(row_end, Nq, Nk, causal):
    """One past the last key that any query before row_end sees. In a tile from there on every score would be masked."""
    return min(Nk, max(0, row_end + Nk - Nq)) if causal else Nk


def mask(S, i, j, shift):
    """S with -inf where the key lies after the query. S (..., Br, Bc) starts at query i and key j.

    Query i stands at position i + shift among the keys.
    """
    row = torch.arange(S.shape[-2], device=S.device)[:, None] + i + shift
    col = torch.arange(S.shape[-1], device=S.device)[None, :] + j
    return S.masked_fill(col > row, -math.inf)


def online_update(m, l, O, S, V_j):
    """(m, l, O) after one more tile of keys, with the scores S (..., Br, Bc) and the values V_j (..., Bc, D).

    m and l (..., Br); O (..., Br, D) is not yet divided by l.
    """
    m_new = torch.maximum(m, S.amax(-1))
    unit = m_new.nan_to_num(neginf=0.0)  # before the first visible key m_new is -inf, and -inf - (-inf) would be NaN
    alpha = (m - unit).exp()
    P = (S - unit[..., None]).exp()
    return m_new, alpha * l + P.sum(-1), alpha[..., None] * O + P @ V_j
