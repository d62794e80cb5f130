# SPDX-License-Identifier: MIT
"""Lesson 2: overlap. The same hop, but the rank computes while the message travels, and waits for it afterwards.

    in sequence   post, wait, block, block        hop + block + block
    overlapped    post, block, wait, block        max(hop, block) + block

The idea: `post` only starts the message. Until `wait` what is sent must not be changed and what arrives must not be
read, and the rank computes with the keys that it has. Left out: over gloo the processor itself carries the message.
"""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from steps.step04_ring import launch
from steps.step04_ring.merge import merge


def post(x):
    """(the messages under way, the tensor that will hold x of the rank before)."""
    rank, size, arriving = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]
    return dist.batch_isend_irecv(ops), arriving


def attention(q, k, v, *, block, overlap=True):
    """out (B, H, n, D) and lse (B, H, n) of this one of two ranks. overlap=False waits before the first block."""
    mine = torch.stack((k, v))
    messages, theirs = post(mine)
    part = block.forward(q, *mine) if overlap else None  # while the message travels
    for message in messages:
        message.wait()
    part = part or block.forward(q, *mine)
    out, lse = part[0].float(), part[1].clone()
    merge(out, lse, *block.forward(q, *theirs))
    return out, lse


def elsewhere(q, k, v):
    """A block for timing alone: a device computes for 0.1 s, and the processor is free meanwhile, as with a GPU."""
    time.sleep(0.1)
    return torch.zeros_like(q), torch.zeros_like(q[..., 0])


def worker(keys=2**17):
    device, ms = launch.message_device(), {}
    q, k, v = torch.randn(1, 1, 8, 64, device=device), *torch.randn(2, 1, 1, keys, 64, device=device)
    for overlap in (False, True) * 3:
        dist.barrier()
        start = time.perf_counter()
        attention(q, k, v, block=SimpleNamespace(forward=elsewhere), overlap=overlap)
        ms[overlap] = min(1e3 * (time.perf_counter() - start), ms.get(overlap, 1e9))
    return ms


if __name__ == "__main__":
    ms = launch.spawn(worker, 2)[0]
    print(f"two blocks of 100 ms and a hop: in sequence {ms[False]:.0f} ms, overlapped {ms[True]:.0f} ms")
