# SPDX-License-Identifier: MIT
"""Lesson 5: Ulysses. The ranks exchange heads for positions, and each attends over the whole sequence for H / N heads.

    (B, H, n, D) --all-to-all--> (B, H / N, S, D) -- attention as on one device --> all-to-all --> (B, H, n, D)

The idea: heads do not need each other. Each still attends to all S positions, so nobody computes less than before, but
every rank computes 1 / N of it, and no block, merge or mask has to be cut. What travels: q, k, v and out once, 1 / N of
them to each rank, so a rank sends less the more ranks there are. The limit: N must divide H and Hk. Source: DeepSpeed
Ulysses (2309.14509).
"""

import torch

from steps.step04_ring import launch
from steps.step04_ring.strategies.one_device import differences
from steps.step04_ring.strategies.team import Differentiable, Team


def attention(q, k, v, *, causal=False, scale=None, **where):
    """out (B, H, n, D) of this rank's queries, differentiable once. where: Team's arguments; any layout."""
    team = Team(q, k, strategy="ulysses", causal=causal, scale=scale, **where)
    for name, heads in (("q", q.shape[1]), ("k and v", k.shape[1])):
        if heads % team.size:
            raise ValueError(
                f"Ulysses gives each rank whole heads, and {heads} heads of {name} cannot be divided among {team.size} "
                f"ranks. Use lesson 3, 4 or 6, or fewer ranks{', or repeat the heads' if name != 'q' else ''}."
            )
    return Differentiable.apply(q, k, v, forward, backward, dict(team=team, scale=scale))


def forward(q, k, v, *, team, scale):
    q, k, v = (to_heads(x, team) for x in (q, k, v))
    out, lse = team.block.forward(q, k, v, causal=team.layout.causal, scale=scale)
    return to_positions(out, team), q, k, v, out, lse


def backward(dout, *kept, team, scale):
    grads = team.block.backward(to_heads(dout, team), *kept, causal=team.layout.causal, scale=scale)
    return tuple(to_positions(x, team) for x in grads)


def to_heads(x, team):
    """All positions of the rank's share of the heads (B, H / N, S, D), from all heads of its positions (B, H, n, D)."""
    parts = x.chunk(team.size, dim=1)
    shapes = [(*parts[0].shape[:2], team.layout.size(rank), x.shape[-1]) for rank in range(team.size)]
    return team.in_order(team.trade(parts, shapes))


def to_positions(x, team):
    """The reverse of `to_heads`."""
    return torch.cat(team.send_home(x), dim=1)


if __name__ == "__main__":
    print(*launch.spawn(differences, 4, attention), sep="\n")
