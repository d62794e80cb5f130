"""What a rank sends and holds in a call, counted, beside the formulas of stage 04's account.py.

What is sent is counted where torch.distributed is called. Memory is the most that tensors hold at one time.
"""

import time

import torch
import torch.distributed as dist

from steps.course.figures.n00_naive import Held


class Counted(Held):
    """The bytes that a call under this mode has `sent`, and with `memory` those that its new tensors `held` at most."""

    def __init__(self, inputs, memory=False):
        super().__init__(inputs)
        self.sent, self.memory = 0, memory

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.sent += sent_by(function.name(), args)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def held_now(self):
        if not self.memory:
            return 0
        held = super().held_now()
        for pause in (0.001, 0.02):  # gloo's thread holds a message's tensors until it next gets a turn
            if held > self.held:
                time.sleep(pause)
                held = super().held_now()
        return held


def sent_by(name, args):
    """The bytes that an operator of torch.distributed sends to other ranks of the world.

    Without those by which ranks compare their calls, which are integers.
    """
    if name == "c10d::send":
        return sum(x.nbytes for x in args[0] if x.is_floating_point())
    if name == "c10d::allgather_":
        return sum((len(out) - 1) * x.nbytes for out, x in zip(*args[:2], strict=True) if x.is_floating_point())
    if name == "c10d::alltoall_base_":
        _, x, _, _, lengths, *_ = args
        return (x.numel() - lengths[dist.get_rank()]) * x.element_size()
    return 0


class Idle:
    """A block that computes nothing, and holds nothing but its results."""

    @staticmethod
    def forward(q, k, v, **options):
        return torch.zeros_like(q), torch.zeros(q.shape[:-1], device=q.device)

    @staticmethod
    def backward(dout, q, k, v, out, lse, **options):
        return tuple(map(torch.zeros_like, (q, k, v)))
