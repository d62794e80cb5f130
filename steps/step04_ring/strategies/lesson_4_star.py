# SPDX-License-Identifier: MIT
"""Lesson 4: star. Keys and values stay; the queries go to every rank, and the ranks' results are merged by their lse.

    gather the queries | each rank: all queries, its own keys | send the parts (out, lse) home | merge

The idea: merged in any order, the parts are exact attention over all keys. What travels has the size of the queries and
not of the keys: much where both are long, and next to nothing where few queries meet a long cache of keys. Source: Star
Attention (2411.17116), phase 2. Left out: the paper's phase 1, which approximates, and a backward.
"""

import torch

from steps.step04_ring import launch
from steps.step04_ring.block import default_block
from steps.step04_ring.merge import Parts
from steps.step04_ring.strategies.cuts import few_queries
from steps.step04_ring.strategies.one_device import differences
from steps.step04_ring.strategies.team import Team, needs_gradient

NOTHING = slice(0, 0), slice(0, 0), False


def attention(q, k, v, *, causal=False, scale=None, replicated=False, block=None, **where):
    """out (B, H, n, D) of this rank's queries, without a gradient. where: Team's arguments.

    replicated: q (B, H, Nq, D), few, the same on every rank, belongs to the last Nq of the S positions; out likewise.
    """
    block = default_block(q, few=True) if replicated and block is None else block
    refusal = NotImplementedError("star has no backward. Use torch.no_grad(), or lesson 3, 5 or 6, which have one.")
    options = dict(causal=causal, scale=scale, replicated=replicated, block=block)
    team = Team(q, k, strategy="star", problem=refusal if needs_gradient(q, k, v) else None, **options, **where)
    layout, whole = team.layout, Parts(q)

    def part(q, rows, keys, diagonal):
        if rows.start == rows.stop:
            return rows, torch.empty_like(q[..., rows, :]), torch.empty_like(q[..., rows, 0], dtype=torch.float32)
        seen = (x[..., keys, :] for x in (k, v))
        return rows, *team.block.forward(q[..., rows, :], *seen, causal=diagonal, scale=scale)

    if replicated:  # every rank needs the whole result, so each sends the same message, out and lse, to all of them
        mine, n = Parts(q), q.numel()
        for task in few_queries(layout, team.rank, q.shape[-2]):
            mine.add(*part(q, *task))
        message = torch.cat([x.flatten() for x in mine.merged(torch.float32)])  # one rounding, where out is complete
        arrived = team.trade([message] * team.size, [message.shape] * team.size)
        found = [(slice(0, q.shape[-2]), x[:n].view(q.shape), x[n:].view(q.shape[:-1])) for x in arrived]
    else:
        tasks = (layout.work(owner, team.rank) or NOTHING for owner in range(team.size))
        found = [part(theirs, *task) for theirs, task in zip(team.gather(q), tasks, strict=True)]
        rows = [(layout.work(team.rank, src) or NOTHING)[0] for src in range(team.size)]  # those that src has seen
        outs = team.trade([out for _, out, _ in found], [q[..., some, :].shape for some in rows])
        lses = team.trade([lse for *_, lse in found], [q[..., some, 0].shape for some in rows])
        found = [one for one in zip(rows, outs, lses, strict=True) if one[2].numel()]
    for one in found:
        whole.add(*one)
    return whole.merged()[0]


if __name__ == "__main__":
    print(*launch.spawn(differences, 4, attention), sep="\n")
