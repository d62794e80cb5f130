# SPDX-License-Identifier: MIT
"""The ranks that share a sequence, what they send to each other, and autograd around a strategy's two passes.

    gather(x)       every rank gets the x of every rank                      query-parallel: K, V; star: queries
    trade(parts)    rank r gets parts[r], and returns what all ranks sent    star: results; Ulysses: heads

Both take shards that differ in length by one or two. Without a process group the team has one rank. Left out: a name
for the culprit when a rank fails; that is the work of the stage's own ring. Needs layout.py and block.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from steps.step04_ring.block import default_block
from steps.step04_ring.layout import Layout


class Team:
    """A process group (None: the world) whose rank r holds Layout(layout, S, size).shard(x, r) of q, k and v.

    S: the length of the whole sequence. Without it the ranks compare their arguments, which also adds up S.
    block: an object with the functions forward and backward of one block, by default the ring's,
    or for packed sequences (cu_seqlens) steps.step03_triton, which alone has a call for them.
    """

    def __init__(self, x, *, causal=False, layout="zigzag", S=None, group=None, block=None, **others):
        started = dist.is_available() and dist.is_initialized()
        self.group, self.rank, self.size = group, 0, 1
        if started:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        sizes = None if S is not None else self._compare(x, causal=causal, layout=layout, **others)
        self.layout = Layout(layout, sum(sizes) if S is None else S, self.size, causal)
        expected = [self.layout.size(rank) for rank in range(self.size)]
        if (sizes or expected) != expected or x.shape[-2] != expected[self.rank]:
            raise ValueError(
                f"the {layout} shards of S = {self.layout.S} on {self.size} ranks have {expected} positions; "
                f"got {sizes or x.shape[-2]}. Cut them with Layout(...).shard(x, rank)."
            )
        if block is None and others.get("cu_seqlens") is not None:
            from steps import step03_triton as block  # imported only here, because it takes Triton
        self.block = block or default_block(x)

    def _compare(self, mine, **call):
        """Every rank's length of `mine`, a shard. Raises the same ValueError on every rank if anything else differs."""
        call = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        call |= {"shape": (*mine.shape[:-2], "n", mine.shape[-1]), "dtype": str(mine.dtype)}
        everyone = [(call, mine.shape[-2])]
        if self.size > 1:
            everyone = [None] * self.size
            dist.all_gather_object(everyone, (call, mine.shape[-2]), group=self.group)
        calls, sizes = zip(*everyone, strict=True)
        for name in call:
            if any(theirs[name] != calls[0][name] for theirs in calls):
                values = ", ".join(f"rank {rank} {theirs[name]}" for rank, theirs in enumerate(calls))
                raise ValueError(f"every rank must pass the same {name}; got {values}.")
        return list(sizes)

    def _wire(self, x):
        """x where the backend can send it from: gloo's messages pass through host memory."""
        return x.cpu() if dist.get_backend(self.group) == "gloo" else x

    def gather(self, x):
        """[x (..., n, D) of rank 0, 1, ...]. One collective of equal messages: shorter shards are padded for it."""
        if self.size == 1:
            return [x]
        sizes = [self.layout.size(rank) for rank in range(self.size)]
        missing = max(sizes) - x.shape[-2]
        sent = self._wire(F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous())
        everyone = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(everyone, sent, group=self.group)
        return [their[..., :n, :].to(x.device) for their, n in zip(everyone, sizes, strict=True)]

    def in_order(self, shards):
        """The whole sequence (..., S, D) from the shards of all ranks, written to its place with no copy in between."""
        first = shards[0]
        whole = first.new_empty(*first.shape[:-2], self.layout.S, first.shape[-1])
        for rank, shard in enumerate(shards):
            start = 0
            for run in self.layout.pieces(rank):
                whole[..., run.start : run.stop : run.step, :] = shard[..., start : start + len(run), :]
                start += len(run)
        return whole

    def trade(self, parts, shapes):
        """Sends parts[r] to rank r. Returns what each rank sent to this one, of the given shapes."""
        if self.size == 1:
            return list(parts)
        sent = self._wire(torch.cat([part.reshape(-1) for part in parts]))
        lengths = [torch.Size(shape).numel() for shape in shapes]
        received = sent.new_empty(sum(lengths))
        dist.all_to_all_single(received, sent, lengths, [part.numel() for part in parts], group=self.group)
        arrived = received.to(parts[0].device).split(lengths)
        return [part.view(shape) for part, shape in zip(arrived, shapes, strict=True)]

    def send_home(self, x):
        """Sends every rank its positions of x (..., S, D). Returns what each rank sent to this one."""
        parts = []
        for rank in range(self.size):  # Slices: an index of all positions would take longer than sending them.
            runs = self.layout.pieces(rank)
            parts.append(torch.cat([x[..., run.start : run.stop : run.step, :] for run in runs], -2))
        return self.trade(parts, [parts[self.rank].shape] * self.size)


class Differentiable(torch.autograd.Function):
    """The out of `forward`, which returns (out, *kept); `backward` turns (dout, *kept) into dq, dk, dv."""

    @staticmethod
    def forward(ctx, q, k, v, forward, backward, options):
        out, *kept = forward(q, k, v, **options)
        ctx.save_for_backward(*kept)
        ctx.gradients, ctx.options = backward, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return *ctx.gradients(dout, *ctx.saved_tensors, **ctx.options), None, None, None
