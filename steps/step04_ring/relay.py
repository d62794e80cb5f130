# SPDX-License-Identifier: MIT
"""The transport "relay": K and V travel from neighbour to neighbour, and in the backward the sums of dK and dV too.

    forward     send K, V to rank + 1, receive from rank - 1, while the block is computed
    backward    send K, V to rank - 1, receive from rank + 1; after the block, send dK, dV after them

The idea: only neighbours talk, so that it works wherever messages can be sent: gloo, NCCL, several hosts. The backward
begins with the K and V of rank + 1 and runs in the opposite direction. The sums of dK and dV therefore arrive at their
own rank during the last block, where zhuzilin's ring waits for one more hop. They travel in float32: rounded to
bfloat16 at every hop, their error would grow with the number of ranks. Needs layout.py, merge.py and ranks/comm.py.
"""

import math
from dataclasses import dataclass

import torch

from .layout import Layout, work_of
from .merge import add


@dataclass(frozen=True)
class Relay:
    """The hops of calls with one layout on one ring. Stateless, so that calls may be nested."""

    layout: Layout
    comm: object  # a Comm, or Alone
    keeps_own = False  # K and V of the own rank come back at the end of the backward

    def forward(self, k, v):
        """Yields (src, kv) for src = rank, rank - 1, ..., rank + 1: the owner of the keys, and kv (2, B, Hk, n, D)."""
        yield from self._travel(torch.stack((k, v)), self.comm.rank, towards=1)  # one message, not two

    def backward(self, kv, own=None):
        """A Return over (src, kv) for src = rank + 1, rank + 2, ..., rank, which sends on each step's dK and dV."""
        return Return(self, kv)

    def fetch_next(self, k, v):
        """The kv with which `forward` ended, fetched by one hop for a backward that does not have it."""
        kv = torch.stack((k, v))
        return kv if self.comm.size == 1 else self.post(kv, (self.comm.rank + 1) % self.comm.size, -1).wait()

    def post(self, kv, arriving, towards):
        """Starts to send kv, and to receive that of rank `arriving`."""
        shape = (*kv.shape[:-2], self.layout.size(arriving % self.comm.size), kv.shape[-1])
        return self.comm.post(kv, shape, towards=towards)

    def _travel(self, kv, src, towards):
        for step in range(self.comm.size):
            last = step == self.comm.size - 1
            hop = None if last else self.post(kv, src - towards, towards)
            yield src, kv
            kv, src = None if last else hop.wait(), (src - towards) % self.comm.size


class Return:
    """The pass of the backward: K and V arrive, and the sums of their dK and dV follow them one step later."""

    def __init__(self, relay, kv):
        self.relay, self.kv = relay, kv

    def __iter__(self):
        relay, N, rank = self.relay, self.relay.comm.size, self.relay.comm.rank
        hop = None  # brings dK, dV of the current keys, summed over the ranks that these keys have passed
        for src, kv in relay._travel(self.kv, (rank + 1) % N, towards=-1):
            self.given = []
            yield src, kv
            arrived = hop.wait() if hop else None
            last = src == rank
            # The owner's part is added last. So the sum of all ranks is rounded once, at the owner.
            dkv = torch.empty(kv.shape, dtype=kv.dtype if last else torch.float32, device=kv.device)
            for i in range(2):
                parts = [] if arrived is None else [(slice(0, kv.shape[-2]), arrived[i])]
                add(parts + [(keys, grads[i]) for keys, *grads in self.given], dkv[i])
            if not self.given and work_of(relay.layout, rank, src):  # The block has raised, and no sum is right now.
                dkv.fill_(math.nan)
            if not last:
                hop = relay.post(dkv, src + 1, -1)
        self.dkv = dkv

    def give(self, src, keys, dk, dv):
        """Takes dK and dV of the keys in the slice `keys` of rank src."""
        self.given.append((keys, dk, dv))

    def total(self):
        """(dk, dv) of this rank's keys, summed over all ranks."""
        return self.dkv
