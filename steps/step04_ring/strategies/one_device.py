# SPDX-License-Identifier: MIT
"""How far a strategy's results are from those of one device. Needs layout.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from steps import engine
from steps.step04_ring.layout import Layout


def random_inputs(S, H, Hk, D, dtype, device="cpu"):
    """q, k, v and dout of the whole sequence, the same numbers on every rank."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, S, D, generator=random).to(device, dtype) for heads in (H, Hk, Hk, H)]


def one_device(q, k, v, dout, causal):
    """(out, dq, dk, dv) of the whole sequence, by torch's own attention in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def passes(attention, q, k, v, dout, **options):
    """(out, dq, dk, dv) of a rank's shards; out alone where the strategy has no backward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    try:
        out = attention(*leaves, **options)
    except NotImplementedError:
        with torch.no_grad():
            return (attention(q, k, v, **options),)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def differences(attention, S=61, H=4, Hk=4, D=16, causal=True, layout="zigzag", dtype=torch.float32, **options):
    """One line: how far a strategy's results on this rank are from one device's. Every rank calls."""
    rank, whole = dist.get_rank(), Layout(layout, S, dist.get_world_size())
    inputs = random_inputs(S, H, Hk, D, dtype, engine.device)
    found = passes(attention, *(whole.shard(x, rank) for x in inputs), causal=causal, layout=layout, S=S, **options)
    wanted = one_device(*inputs, causal)
    pairs = [(got, whole.shard(want, rank)) for got, want in zip(found, wanted, strict=False)]
    largest = [(got - want).abs().max().item() if got.numel() else 0.0 for got, want in pairs]
    listed = ", ".join(f"{name} {x:.1e}" for name, x in zip(("out", "dq", "dk", "dv"), largest, strict=False))
    return f"rank {rank}: largest differences to one device: {listed}"
