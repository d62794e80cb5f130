# SPDX-License-Identifier: MIT
"""Rung 3, "tiled": FlashAttention-2's backward in plain torch, tile by tile.

    delta = rowsum(dO * O)                            one number a query, before the loops
    for each tile of Bc keys:                         on a GPU: one block each; dK_j and dV_j stay on the chip
        for each tile of Br queries:
            P    = exp(scale * Q_i K_j^T - lse_i)     recomputed, never stored
            dV_j += P^T dO_i
            dP   = dO_i V_j^T
            dS   = P * (dP - delta_i)
            dQ_i += scale * dS K_j                    every key tile adds to it: on a GPU by atomic additions
            dK_j += scale * dS^T Q_i

The idea: recomputing a tile of S costs less than reading it. Source: FlashAttention-2, Algorithm 2. Needs torch only.
"""

import torch


def backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=(16, 16)):
    """(dq, dk, dv) like q (B, H, Nq, D), k and v (B, H, Nk, D), from dout and out like q, lse (B, H, Nq).

    tile is (Br, Bc).
    """
    Br, Bc = tile
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    Nq, Nk = q.shape[-2], k.shape[-2]
    delta = (dout * out).sum(-1)  # (B, H, Nq)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, Nk, Bc):
        keys = slice(j, min(j + Bc, Nk))
        for i in range(0, Nq, Br):
            rows = slice(i, min(i + Br, Nq))
            P, dS = tile_gradients(dout, q, k, v, lse, delta, rows, keys, causal, scale)
            dv[..., keys, :] += P.mT @ dout[..., rows, :]
            dq[..., rows, :] += scale * (dS @ k[..., keys, :])
            dk[..., keys, :] += scale * (dS.mT @ q[..., rows, :])
    return dq, dk, dv


def tile_gradients(dout, q, k, v, lse, delta, rows, keys, causal, scale):
    """(P, dS) of one tile, both (B, H, Br, Bc): P is recomputed from lse, dS is the gradient of the scores."""
    S = scale * (q[..., rows, :] @ k[..., keys, :].mT)
    P = (S - lse[..., rows, None]).exp()
    row = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (k.shape[-2] - q.shape[-2])
    col = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
    P = P.masked_fill(causal & (col > row), 0)  # this covers lse = -inf too, because such a row sees no key
    dP = dout[..., rows, :] @ v[..., keys, :].mT
    return P, P * (dP - delta[..., rows, None])
