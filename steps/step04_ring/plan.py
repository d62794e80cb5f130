# SPDX-License-Identifier: MIT
"""The plan of a call: which block computes, what it computes with the keys of each rank, and how K and V travel.

It depends only on shapes and options, and is the same in every call with them. Needs block.py, fetch.py, layout.py,
relay.py and ranks/side.py.
"""

from dataclasses import dataclass, field

from .block import default_block
from .fetch import Fetch
from .layout import Layout
from .ranks import side
from .relay import Relay


@dataclass(frozen=True)
class Mine:
    """What this rank can find of a call alone. Where there is a `problem`, the rest is missing."""

    comm: object  # a Comm, or Alone
    problem: Exception | None = None
    size: int | None = None  # of its shard
    alike: dict = field(default_factory=dict)  # what must be equal on all ranks
    scale: float | None = None
    layout: Layout | None = None  # None, and `work` too, where S has to be added up
    work: list | None = None


@dataclass(frozen=True)
class Plan:
    """mine: what the ranks compare at every call; how: the keyword arguments of the loops in ring.py."""

    mine: Mine
    how: dict


def make(call, mine, sizes, q):
    """The Plan of a call that all ranks make. sizes: each rank's length, or None if they have agreed on it before."""
    comm, layout, work = mine.comm, mine.layout, mine.work
    if layout is None:
        layout = Layout(call.layout, sum(sizes), comm.size, call.causal)
        work = layout.share(comm.rank, mine.size, sizes)
    beside = None if comm.size == 1 else side.side_of(comm, q.device, call.transport)
    transport = Relay(layout, comm) if beside is None else Fetch(layout, comm, beside)
    block = call.block
    if block is None:
        block = default_block(q, tile=call.tile, alone=comm.size == 1)
    how = {"work": work, "block": block, "transport": transport, "scale": mine.scale}
    return Plan(mine, how if call.tile is None else how | {"tile": call.tile})
