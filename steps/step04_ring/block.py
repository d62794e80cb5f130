# SPDX-License-Identifier: MIT
"""The default block: stage 02's Hopper kernels where they run, otherwise stage 03.

The idea: a block's kernels are those of one GPU, called on slices. Stage 02's backward has three parts already, so that
delta is computed once a call and every block adds to the same float32 sum of dq. Stages are imported when a block is
chosen, because importing the ring should not need a GPU or Triton.
"""

import math
from functools import partial

import torch


def default_block(q, *, tile=None, alone=True, few=False):
    """The block for queries like q. tile: whether the caller asked for tiles, which only stage 03 takes.

    alone: whether the GPU's multiprocessors are all free for the block. With several ranks NCCL's kernels, or fetch's
    barrier and local copy, need some. A persistent kernel fixes before the launch which thread block computes which
    tiles. A block that starts late delays the kernel's end, and until then no multiprocessor is free.
    few: whether the queries are few and the keys many. Stage 03 then splits the keys among the multiprocessors.
    """
    on_hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)
    if on_hopper and tile is None and not few and q.dtype in (torch.bfloat16, torch.float16):
        from steps import step02_fa2_cuda

        if q.shape[-1] in step02_fa2_cuda.SUPPORTS["limits"]["hopper"]["head_dims"]:
            return Hopper(alone)
    from steps import step03_triton

    return step03_triton if step03_triton.SUPPORTS["deterministic"] else InOrder(step03_triton)


class InOrder:
    """A stage whose backward adds to dq in a fixed order if it is asked to."""

    def __init__(self, stage):
        self.forward, self.backward = stage.forward, partial(stage.backward, deterministic=True)


class Hopper:
    """Stage 02's rung hopper, with the backward in parts. persistent: whether the forward's kernel is persistent."""

    rung = "hopper"

    def __init__(self, persistent=True, deterministic=True):
        from steps.step02_fa2_cuda import calls

        self.calls, self.deterministic = calls, deterministic
        self.switches = {} if persistent else {"PERSISTENT": 0}

    def forward(self, q, k, v, *, causal, scale):
        return self.calls.forward(q, k, v, rung=self.rung, causal=causal, scale=scale, **self.switches)

    def backward(self, dout, q, k, v, out, lse, *, causal, scale):
        options = dict(rung=self.rung, causal=causal, scale=scale, deterministic=self.deterministic)
        return self.calls.backward(dout, q, k, v, out, lse, **options)

    def delta(self, dout, q, out, lse, *, scale):
        return Sums(self, dout, q, out, lse, scale)

    def backward_into(self, sums, rows, k, v, *, causal):
        return sums.add(rows, k, v, causal)

    def dq(self, sums):
        return sums.dq()


class Sums:
    """delta, lse and the float32 sum of dq: for all queries, and for late queries if a block needs only these."""

    def __init__(self, hopper, dout, q, out, lse, scale):
        self.calls, self.saved = hopper.calls, (dout, q, out, lse)
        self.options = dict(rung=hopper.rung, scale=scale, deterministic=hopper.deterministic)
        self.whole = self.calls.start_gradients(dout, out, lse, **self.options)
        self.late = {}  # {first row: the Sums of the rows from a whole tile on}

    def add(self, rows, k, v, causal):
        """(dk, dv) of the queries in the slice `rows`, which ends with the last query."""
        dout, q, *_ = self.saved
        # A causal block is aligned at its last query and key, so that the rows before `rows` see no key by themselves.
        first = 0 if causal else rows.start
        if first == 0:
            return self.calls.add_gradients(self.whole, dout, q, k, v, causal=causal)
        if first not in self.late:
            self.late[first] = self.start_late(first)
        tile, sums = self.late[first]
        return self.calls.add_gradients(sums, dout[:, :, tile:], q[:, :, tile:], k, v, causal=False)

    def start_late(self, first):
        """(where the tile with the row `first` begins, Sums from there on).

        The rows before `first` in this tile get lse = -inf, by which the kernel recognises rows that see no key.
        """
        dout, _, out, lse = self.saved
        tile = first - first % self.whole.problem.Br
        late_lse = lse[:, :, tile:].clone(memory_format=torch.contiguous_format)
        late_lse[:, :, : first - tile] = -math.inf
        return tile, self.calls.start_gradients(dout[:, :, tile:], out[:, :, tile:], late_lse, **self.options)

    def dq(self):
        """dq (B, H, n, D) in the dtype of q."""
        for tile, sums in self.late.values():  # Both begin with whole tiles, inside which they have the same order.
            self.whole.dq_sum[:, :, tile:] += sums.dq_sum
        return self.calls.finish_dq(self.whole)
