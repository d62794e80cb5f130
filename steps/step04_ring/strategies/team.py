# SPDX-License-Identifier: MIT
"""The ranks that share a sequence, what they send to each other, and autograd around a strategy's two passes.

    gather(x)       every rank gets the x of every rank                      query-parallel: K, V; star: queries
    trade(parts)    rank r gets parts[r], and returns what all ranks sent    star: results; Ulysses: heads

Both take shards that differ in length by one or two. Without a process group the team has one rank. All ranks must make
the same call, as in the ring; agree.py compares them. Left out: a name for the culprit when a rank fails after that,
which is the work of the stage's own ring. Needs block.py, layout.py, ranks/agree.py and ranks/comm.py.
"""

import operator

import torch
import torch.distributed as dist
import torch.nn.functional as F

from steps.step04_ring.block import default_block
from steps.step04_ring.layout import Layout
from steps.step04_ring.ranks import agree
from steps.step04_ring.ranks.comm import comm_of
from steps.step04_ring.ranks.verdict import BACKWARD


class Team:
    """A process group (None: the world) whose rank r holds Layout(layout, S, size).shard(x, r) of q, k and v.

    S: the length of the whole sequence. Without it the ranks add it up.
    block: an object with the functions forward and backward of one block, by default the ring's,
    or for packed sequences (cu_seqlens) steps.step03_triton, which alone has a call for them.
    replicated: q is the same on every rank, and not a shard. others: what else all ranks must have alike.
    problem: what this rank has found wrong by itself, or None.
    """

    def __init__(
        self, q, k, *, strategy="", causal=False, layout="zigzag", S=None, group=None, block=None, problem=None,
        replicated=False, **others
    ):  # fmt: skip
        self.comm = comm_of(group)
        self.group, self.rank, self.size = group, self.comm.rank, self.comm.size
        packed, n = others.get("cu_seqlens"), k.shape[-2]
        shapes = {"q": q.shape[-2] if replicated else "n", "k": "n"}  # n may differ from rank to rank
        call = {"function": strategy} | others | {"replicated": replicated, "dtype": str(q.dtype)}
        call |= {"causal": causal, "layout": layout, "S": S}
        call |= {f"shape of {name}": (*x.shape[:-2], shapes[name], x.shape[-1]) for name, x in (("q", q), ("k", k))}
        try:
            if packed is not None:
                call["cu_seqlens"] = integers("cu_seqlens", packed)
            if S is not None:
                Layout(layout, S, self.size).check(self.rank, n)
        except (TypeError, ValueError) as error:
            problem = problem or error
        sizes = self._agree(call, n, k.device, always=S is None, problem=problem)
        self.layout = Layout(layout, sum(sizes) if S is None else S, self.size, causal)
        self.layout.check(self.rank, n, sizes)
        if block is None and packed is not None:
            from steps import step03_triton as block  # imported only here, because it takes Triton
        self.block = block or default_block(q)

    def agree_on_backward(self, device):
        """Compares the call again, now that autograd makes the rest of it."""
        self._agree(self.comm.arguments | {"function": BACKWARD}, 0, device)

    def _agree(self, call, n, device, **how):
        """Each rank's n. Over NCCL None for a call that was agreed on before, which the devices compare."""
        sizes = agree.agree(self.comm, call, n, **how)
        if sizes is None:
            mine = agree.on_device(self.comm.note.signature, device)
            everyone = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(everyone, mine, group=self.group)
            for theirs in everyone:
                agree.stop_if_different(theirs, mine)
        return sizes

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


def needs_gradient(*tensors):
    """Whether autograd would want a backward of these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def integers(name, numbers):
    """The numbers as a tuple of Python's integers. TypeError if one is no integer, such as 5.0."""
    try:
        return tuple(map(operator.index, numbers))
    except TypeError:
        raise TypeError(f"{name} must be integers; got {numbers!r}.") from None


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
        ctx.options["team"].agree_on_backward(dout.device)
        with torch.autocast(dout.device.type, enabled=False):  # as in the forward
            return *ctx.gradients(dout, *ctx.saved_tensors, **ctx.options), None, None, None
