# SPDX-License-Identifier: MIT
"""The transport "fetch": each rank copies K and V from the memory of their owner, and dK and dV into it.

    beside the computation, on a stream of its own            the computation
    copy own k, v into the memory that all ranks can read
    barrier: the k, v of every rank are there
    copy K, V of the next two ranks into two buffers          waits for each copy, computes the block
    backward: copy dK, dV into a slot of their owner          adds the slots after the last barrier
    barrier: every rank has ended all of its copies

The idea: no copy of K and V waits for a neighbour, and copies from another GPU need no multiprocessor, because copy
engines make them.
dK and dV travel once, in the dtype of k. Their owner adds all parts in float32 in the order of the ranks, so that the
sum is bit-equal from run to run.

The price: all ranks are on one host, each with a GPU of its own. torch.distributed._symmetric_memory is alpha and may
change. The N - 1 slots grow with the sequence, unlike the sums of the relay. Do not use it across hosts, or on many
ranks with little memory. Multicast is never used. Needs layout.py, merge.py and ranks/side.py.
"""

import math

from .layout import work_of
from .merge import add


class Fetch:
    """The copies of the calls with one layout on one ring. side: a Side, which the calls of a process group share."""

    keeps_own = True  # a backward copies this rank's k and v into the shared memory once more

    def __init__(self, layout, comm, side):
        self.layout, self.rank, self.size, self.side = layout, comm.rank, comm.size, side
        self.longest = max(map(layout.size, range(comm.size)))

    def forward(self, k, v):
        """A Trip over (src, kv), src = rank, rank - 1, ..., rank + 1. kv is None where no query sees a key of src."""
        return Trip(self, k, v, [(self.rank - step) % self.size for step in range(self.size)])

    def backward(self, kv, own):
        """A Trip over (src, kv), src = rank + 1, ..., rank, which sends dK and dV. kv: the last one of `forward`."""
        order = [(self.rank + 1 + step) % self.size for step in range(self.size)]
        return Trip(self, *own, order, {} if kv is None else {order[0]: kv}, with_slots=True)

    def fetch_next(self, k, v):
        """None: a backward without the last K and V fetches them itself."""


class Trip:
    """The copies of one call. there: {src: kv} that need not be fetched."""

    def __init__(self, fetch, k, v, order, there=(), with_slots=False):
        self.fetch, self.k, self.v, self.order, self.there = fetch, k, v, order, dict(there)
        self.room = 2 * k.shape[0] * k.shape[1] * fetch.longest * k.shape[3]  # numbers in the longest shard's k and v
        self.memory = fetch.side.memory("kv", self.room * k.element_size())
        slots = fetch.size - 1 if with_slots else 0
        self.slots = slots and fetch.side.memory("slots", slots * self.room * k.element_size())
        self.arriving = {}  # {src: (a mark after the copy, its buffer)}
        self.given = []  # gradients on their way to their owner: (a mark after the copy, dk, dv)
        self.owed = {}  # {src: the number of its keys whose dK and dV are still to be sent}
        for src in order if with_slots else ():
            if work := work_of(fetch.layout, fetch.rank, src):
                self.owed[src] = work[1].stop - work[1].start

    def __iter__(self):
        fetch, side, rank = self.fetch, self.fetch.side, self.fetch.rank
        wanted = [src for src in self.order if src not in (rank, *self.there) and work_of(fetch.layout, rank, src)]
        free = [self.k.new_empty(self.room) for _ in wanted[:2]]
        side.follow()  # k and v have been computed, and nobody needs what the buffers' memory held before.
        mine = self.memory.of(rank, self.shape(rank), self.k.dtype)
        side.copy((mine[0], self.k), (mine[1], self.v))
        side.barrier()
        if side.in_a_graph():  # A graph keeps only the order of waits: these kernels would start after the first block.
            side.lead(side.mark())
        for buffer in free:
            self.start(wanted.pop(0), buffer)
        for src in self.order:
            if src in self.arriving:
                side.lead(self.arriving[src][0])
            yield src, (self.k, self.v) if src == rank else self.there.get(src)
            if wanted and src in self.arriving:
                side.follow()  # The block that read the buffer comes before the next copy into it.
                del self.there[src]
                self.start(wanted.pop(0), self.arriving[src][1])
        if missing := [src for src in self.owed if src != rank]:  # The block has raised, and no sum is right now.
            side.follow()
            for src in missing:
                slot = self.slot(src, rank, self.owed[src])
                side.copy((slot, slot.new_full((), math.nan).expand(slot.shape)))
        side.barrier()
        side.lead(side.mark())

    def shape(self, rank, keys=None):
        """The shape of the rank's k and v together, or of so many of its keys."""
        return 2, *self.k.shape[:2], self.fetch.layout.size(rank) if keys is None else keys, self.k.shape[3]

    def start(self, src, buffer):
        """Starts to copy K and V of rank src into the buffer."""
        theirs = self.memory.of(src, self.shape(src), self.k.dtype)
        self.there[src] = buffer[: theirs.numel()].view(theirs.shape)
        self.fetch.side.copy((self.there[src], theirs))
        self.arriving[src] = self.fetch.side.mark(), buffer

    def give(self, src, keys, dk, dv):
        """Takes dK and dV of the keys in the slice `keys` of rank src, and starts to copy them there."""
        side, rank = self.fetch.side, self.fetch.rank
        del self.owed[src]
        if src == rank:
            self.mine = dk, dv
            return
        slot = self.slot(src, rank, dk.shape[2])
        side.follow()  # dk and dv have been computed.
        side.copy((slot[0], dk), (slot[1], dv))
        self.given.append((side.mark(), dk, dv))
        if len(self.given) > 2:  # Once the oldest have been copied, their memory may be used again.
            side.lead(self.given.pop(0)[0])

    def slot(self, owner, giver, keys):
        """The place in the memory of rank `owner` for dK and dV of so many keys, which rank `giver` computes."""
        number = (giver - owner - 1) % self.fetch.size
        return self.slots.of(owner, self.shape(owner, keys), self.k.dtype, number * self.room)

    def total(self):
        """(dk, dv) of this rank's keys, summed over all ranks."""
        parts, layout, rank = [], self.fetch.layout, self.fetch.rank
        for giver in range(self.fetch.size):
            if work := work_of(layout, giver, rank):
                keys = work[1]
                parts.append((keys, self.mine if giver == rank else self.slot(rank, giver, keys.stop - keys.start)))
        dkv = self.k.new_empty(self.shape(rank))
        return [add([(keys, part[i]) for keys, part in parts], dkv[i]) for i in range(2)]
