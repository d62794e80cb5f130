# SPDX-License-Identifier: MIT
"""Lesson 4: star. Keys and values stay; the queries go to every rank, and what each rank finds is merged by its lse.

    gather the queries | each rank: all queries, its own keys | send the parts (out, lse) home | merge

The idea: merged in any order, the parts are exact attention over all keys. What travels has the size of the queries and
not of the keys: much where both are long, and next to nothing where few queries meet a long cache of keys. Source: Star
Attention (2411.17116), phase 2. Left out: the paper's phase 1, which approximates, and a backward.
"""

import torch

from steps.step04_ring import launch
from steps.step04_ring.merge import merge
from steps.step04_ring.strategies.account import differences
from steps.step04_ring.strategies.cuts import few_queries
from steps.step04_ring.strategies.team import Team

NOTHING = slice(0, 0), slice(0, 0), False


def attention(q, k, v, *, causal=False, scale=None, replicated=False, **where):
    """out (B, H, n, D) of this rank's queries, without a gradient. where: Team's arguments.

    replicated: q (B, H, Nq, D), the same on every rank, belongs to the last Nq of the S positions; out likewise.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("star has no backward. Use torch.no_grad(), or lesson 3, 5 or 6, which have one.")
    team = Team(k, causal=causal, scale=scale, replicated=replicated, **where)
    everyone, layout = range(team.size), team.layout

    def part(q, rows, keys, diagonal):
        if rows.start == rows.stop:
            return rows, torch.empty_like(q[..., rows, :]), torch.empty_like(q[..., rows, 0], dtype=torch.float32)
        block = q[..., rows, :], k[..., keys, :], v[..., keys, :]
        return rows, *team.block.forward(*block, causal=diagonal, scale=scale)

    if replicated:  # every rank needs the whole result, so each sends the same part to all of them
        mine = merged(q, [part(q, *task) for task in few_queries(layout, team.rank, q.shape[-2])])
        found, rows = [(slice(None), *mine)] * team.size, [slice(None)] * team.size
    else:
        tasks = [layout.work(owner, team.rank) or NOTHING for owner in everyone]
        found = [part(theirs, *task) for theirs, task in zip(team.gather(q), tasks, strict=True)]
        rows = [(layout.work(team.rank, src) or NOTHING)[0] for src in everyone]  # those that rank src has looked at
    outs = team.trade([out for _, out, _ in found], [q[..., some, :].shape for some in rows])
    lses = team.trade([lse for *_, lse in found], [q[..., some, 0].shape for some in rows])
    return merged(q, zip(rows, outs, lses, strict=True))[0].to(q.dtype)


def merged(q, parts):
    """(out, lse) in float32 of q's rows, from parts (rows, out, lse) over different keys."""
    out = torch.zeros_like(q, dtype=torch.float32)
    lse = torch.full_like(out[..., 0], -torch.inf)
    for rows, *part in parts:
        merge(out[..., rows, :], lse[..., rows], *part)
    return out, lse


if __name__ == "__main__":
    print(*launch.spawn(differences, 4, attention), sep="\n")
