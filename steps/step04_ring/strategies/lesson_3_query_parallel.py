# SPDX-License-Identifier: MIT
"""Lesson 3: query-parallel. Every rank gathers all keys and values, and attends with its own queries alone.

    forward    gather K, V;  out of the rank's queries
    backward   gather K, V;  dq, and the rank's share of all dK, dV;  send each share home, where they are added up

The idea: no merge is needed if the owner of a query has all keys. Under a causal mask the queries a ... b - 1 see the
keys 0 ... b - 1: one ordinary causal call with more keys than queries. Packed sequences, too, are one ordinary call,
with cu_seqlens. The price is memory: K and V of all ranks on each of them.
"""

import torch

from steps.step04_ring import launch
from steps.step04_ring.strategies.cuts import cut
from steps.step04_ring.strategies.one_device import differences
from steps.step04_ring.strategies.team import Differentiable, Team


def attention(q, k, v, *, causal=False, scale=None, cu_seqlens=None, **where):
    """out (B, H, n, D) of this rank's queries, differentiable once. where: Team's arguments, but no striped layout.

    cu_seqlens: integers (0, ..., S), the beginnings and the end of packed sequences, over all S positions.
    """
    team = Team(q, k, strategy="query_parallel", causal=causal, scale=scale, cu_seqlens=cu_seqlens, **where)
    return Differentiable.apply(q, k, v, forward, backward, dict(team=team, scale=scale, cu_seqlens=cu_seqlens))


def forward(q, k, v, *, team, **options):
    keys = team.in_order(team.gather(torch.stack((k, v))))  # (2, B, Hk, S, D)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for rows, seen, how in runs(team, q.device, **options):
        out[..., rows, :], lse[..., rows] = team.block.forward(q[..., rows, :], *keys[..., seen, :], **how)
    return out, q, k, v, out, lse


def backward(dout, q, k, v, out, lse, *, team, **options):
    keys = team.in_order(team.gather(torch.stack((k, v))))  # again, because keeping S rows would cost too much memory
    dq, dkv = torch.empty_like(q), torch.zeros_like(keys, dtype=torch.float32)
    for rows, seen, how in runs(team, q.device, **options):
        saved = dout[..., rows, :], q[..., rows, :], *keys[..., seen, :], out[..., rows, :], lse[..., rows]
        dq[..., rows, :], *dkv_part = team.block.backward(*saved, **how)
        dkv[..., seen, :] += torch.stack(dkv_part)
    return dq, *sum(team.send_home(dkv)).to(q.dtype)


def runs(team, device, scale, cu_seqlens):
    """For each run of successive queries: (their rows in the shard, the keys that they need, the call's options)."""
    start, S, causal = 0, team.layout.S, team.layout.causal
    for run in filter(len, team.layout.pieces(team.rank)):
        if run.step != 1:
            raise ValueError("query-parallel needs successive queries: layout zigzag or contiguous, not striped.")
        rows, start = slice(start, start + len(run)), start + len(run)
        whole = slice(0, run.stop if causal else S), {}
        seen, packed = whole if cu_seqlens is None else cut(cu_seqlens, run, S, causal, device)
        yield rows, seen, {"causal": causal, "scale": scale, **packed}


if __name__ == "__main__":
    print(*launch.spawn(differences, 4, attention), sep="\n")
