# SPDX-License-Identifier: MIT
"""The ring's results on up to 1024 ranks, with real numbers, in one process.

    for each step:
        ranks with the same work (rows, keys, causal) in this step      one call of the block, a rank is a batch entry
        merge into these ranks' (out, lse); in the backward, add to dq, and to dK, dV of the keys' owner

The idea: `Layout.work` says who computes what, here as in the ring itself, so that the two cannot differ in it. In a
step there are only a few kinds of work, whatever the number of ranks. So 1024 ranks take 1024 steps and not 1024^2
blocks. Left out: messages, and all that can go wrong with them. Needs layout.py, merge.py, numpy and torch.
"""

import math

import numpy as np
import torch

from steps.step04_ring.merge import merge

# ---- who computes what -----------------------------------------------------------------------------------------------


def work_table(layout):
    """(distinct, which): which (N, N) says for every me and src which entry of distinct `layout.work(me, src)` is.

    Layout.work depends on how long the chunks of both ranks are and on whose keys come first. So it is asked once for
    each such combination, and not N^2 times.
    """
    lengths = [tuple(map(len, layout.pieces(rank))) for rank in range(layout.N)]
    kinds = sorted(set(lengths))
    kind = np.array([kinds.index(x) for x in lengths])
    order = np.sign(np.arange(layout.N)[None, :] - np.arange(layout.N)[:, None])
    code = (kind[:, None] * len(kinds) + kind[None, :]) * 3 + order + 1
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    distinct = [layout.work(*divmod(int(place), layout.N)) for place in first]
    return distinct, which.reshape(layout.N, layout.N)


def sources(layout, pass_):
    """(N steps, N ranks): the rank whose keys a rank has in a step. The backward runs in the opposite direction."""
    step, rank = np.arange(layout.N)[:, None], np.arange(layout.N)[None, :]
    return (rank - step if pass_ == "fwd" else rank + 1 + step) % layout.N


# ---- real numbers ----------------------------------------------------------------------------------------------------


def dry_run(q, k, v, layout, block, dout=None):
    """(out, lse), and with dout also (dq, dk, dv), of the ring of layout.N ranks, as they would be on these ranks.

    q, dout (B, H, S, D), k and v (B, Hk, S, D); lse (B, H, S). Ranks that have the same work in a step are one call of
    the block, with the ranks as further entries of the batch. Sums are float32.
    """
    places, valid = _places(layout)
    Q, K, V = (_shards(x, places) for x in (q, k, v))
    out, lse = torch.zeros_like(Q, dtype=torch.float32), Q.new_full(Q.shape[:-1], -math.inf, dtype=torch.float32)
    for ranks, src, rows, keys, causal in _groups(layout, "fwd"):
        part = block.forward(*_flat(Q[ranks][..., rows, :], K[src][..., keys, :], V[src][..., keys, :]), causal=causal)
        o, l = out[ranks][..., rows, :], lse[ranks][..., rows]
        merge(o, l, *(x.unflatten(0, o.shape[:2]) for x in part))
        out[ranks, ..., rows, :], lse[ranks, ..., rows] = o, l
    if dout is None:
        return _whole(out, places, valid).to(q.dtype), _whole(lse[..., None], places, valid)[..., 0]
    dO = _shards(dout, places)
    dQ, dK, dV = (torch.zeros_like(x, dtype=torch.float32) for x in (Q, K, V))
    for ranks, src, rows, keys, causal in _groups(layout, "bwd"):
        saved = [x[ranks][..., rows, :] for x in (dO, Q)] + [x[src][..., keys, :] for x in (K, V)]
        saved += [out[ranks][..., rows, :].to(q.dtype), lse[ranks][..., rows]]
        dq, dk, dv = block.backward(*_flat(*saved), causal=causal)
        batch = len(ranks), q.shape[0]
        dQ[ranks, ..., rows, :] += dq.unflatten(0, batch).float()
        dK[src, ..., keys, :] += dk.unflatten(0, batch).float()
        dV[src, ..., keys, :] += dv.unflatten(0, batch).float()
    wholes = [_whole(x, places, valid).to(q.dtype) for x in (out, dQ, dK, dV)]
    return wholes[0], _whole(lse[..., None], places, valid)[..., 0], *wholes[1:]


def _places(layout):
    """(N, longest) positions of each rank, padded with 0, and which of them are real."""
    longest = max(layout.size(rank) for rank in range(layout.N))
    places = torch.zeros(layout.N, longest, dtype=torch.long)
    valid = torch.zeros(layout.N, longest, dtype=torch.bool)
    for rank in range(layout.N):
        places[rank, : layout.size(rank)] = layout.positions(rank)
        valid[rank, : layout.size(rank)] = True
    return places, valid


def _shards(x, places):
    """(N, B, H, longest, D) from x (B, H, S, D)."""
    return x[:, :, places.to(x.device)].movedim(2, 0)


def _whole(shards, places, valid):
    """x (B, H, S, D) from its shards (N, B, H, longest, D)."""
    rows = shards.movedim(0, 2)[:, :, valid.to(shards.device)]  # (B, H, S, D), rank by rank
    return rows[:, :, places[valid].argsort().to(shards.device)]


def _flat(*tensors):
    """The tensors (ranks, B, ...) as (ranks * B, ...)."""
    return [x.flatten(0, 1) for x in tensors]


def _groups(layout, pass_):
    """For each step the ranks that have the same work: (the ranks, whose keys they have, rows, keys, causal)."""
    distinct, which = work_table(layout)
    ranks = np.arange(layout.N)
    for src in sources(layout, pass_):
        kinds = which[ranks, src]
        for kind in np.unique(kinds):
            if distinct[kind]:
                some = np.nonzero(kinds == kind)[0]
                yield torch.from_numpy(some), torch.from_numpy(src[some]), *distinct[kind]
