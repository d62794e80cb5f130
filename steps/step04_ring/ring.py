# SPDX-License-Identifier: MIT
"""Ring attention: every rank has its own queries, and receives the keys and values of one rank after the other.

    forward, N steps                                  backward, N steps in the opposite direction
    K, V of rank, rank - 1, ..., rank + 1             K, V of rank + 1, rank + 2, ..., rank
    (out, lse) of the block: q with these K, V        dq, dK, dV of the block, from the final out and lse
    merge into (out, lse)                             dq stays; dK, dV go to the rank that K, V belong to

With messages between neighbours the forward is this loop. relay.py and fetch.py contain the steps between two blocks:

    for step in range(N):
        src = (rank - step) % N                               # whose K, V are here
        if step + 1 < N:
            arrival = receive(from=rank - 1)                  # the next K, V; they travel during the block
            send(K, V, to=rank + 1)
        out, lse = merge(out, lse, *block(q, K, V, which part: work[src]))
        K, V = wait(arrival)

The idea: a rank's memory holds 2 / N of all K and V, and the next K and V arrive while the block is computed. The
loops are the same for every layout, which makes the list `work`, and for both transports:

    relay   K, V travel from neighbour to neighbour, and the sums of dK, dV with them (relay.py)
    fetch   each rank copies K, V from the memory of their owner, and dK, dV into it (fetch.py)

If a block raises, the rank nevertheless takes the other steps, because other ranks wait for the K and V that it sends
on. The backward starts with the K and V with which the forward ended, and ends with the rank's own. Sources: Ring
Attention (2310.01889), section 3; the reverse ring: NVIDIA TransformerEngine.

P = exp(S - lse) with the lse of the whole row is right in any block, and so is delta = rowsum(dO * O) with the whole
row's O. The sums out, lse, dq, dK and dV are float32. A block that computes in bfloat16 returns its part of out and of
the gradients rounded. Needs merge.py, a transport such as relay.py, and a block, any object with the two functions

    forward(q, k, v, *, causal, scale) -> (out, lse)
    backward(dout, q, k, v, out, lse, *, causal, scale) -> (dq, dk, dv)

A block may also have the backward in three parts, so that delta is computed once and dq is added to in float32:

    delta(dout, q, out, lse, *, scale) -> sums                once a call
    backward_into(sums, rows, k, v, *, causal) -> (dk, dv)    of the queries in the slice `rows`; adds to sums' dq
    dq(sums) -> dq
"""

import contextlib

import torch

from .merge import Parts


def forward(q, k, v, *, work, block, transport, **options):
    """(out, lse, kv) of this rank's shard: q (B, H, n, D), k and v (B, Hk, n, D); lse (B, H, n).

    work: for each rank src what this rank computes with its keys, (rows of q, rows of k, causal), or None for nothing:
    layout.share(rank, n). transport: Relay(layout, comm) or Fetch(layout, comm, side).
    kv (2, B, Hk, n', D) holds the k and v of the last step, which are the next rank's; the backward begins with them.
    It is None where they were not needed, and so not fetched. options (scale, ...) are passed to the block.
    """
    parts = Parts(q)
    with to_the_end(transport.forward(k, v)) as steps:
        for src, kv in steps:
            if work[src]:
                rows, keys, causal = work[src]
                k_part, v_part = (x[..., keys, :] for x in kv)
                parts.add(rows, *block.forward(q[..., rows, :], k_part, v_part, causal=causal, **options))
        return *parts.merged(), kv


def backward(dout, q, kv, out, lse, *, work, block, transport, own=None, **options):
    """(dq, dk, dv) of this rank's shard; kv, out and lse as `forward` returned them.

    own: this rank's (k, v), which a transport needs that does not bring them back.
    """
    gradients = block if hasattr(block, "delta") else InOneCall(block)
    trip = transport.backward(kv, own)
    with to_the_end(trip) as steps:
        sums = gradients.delta(dout, q, out, lse, **options)
        for src, kv in steps:
            if work[src]:
                rows, keys, causal = work[src]
                k_part, v_part = (x[..., keys, :] for x in kv)
                trip.give(src, keys, *gradients.backward_into(sums, rows, k_part, v_part, causal=causal))
        return gradients.dq(sums).to(q.dtype), *trip.total()


@contextlib.contextmanager
def to_the_end(trip):
    """The steps of a trip. If something raises between them, the other steps are taken without a computation."""
    steps = iter(trip)
    try:
        yield steps
    except Exception:
        for _ in steps:
            pass
        raise


class InOneCall:
    """The three parts of a backward, for a block without parts. It computes delta anew at every step."""

    def __init__(self, block):
        self.block = block

    def delta(self, *saved, **options):
        dq = torch.zeros(saved[1].shape, dtype=torch.float32, device=saved[1].device)
        return saved, options, dq

    def backward_into(self, sums, rows, k, v, *, causal):
        (dout, q, out, lse), options, dq = sums
        dout, q, out = (x[..., rows, :] for x in (dout, q, out))
        dq_part, dk, dv = self.block.backward(dout, q, k, v, out, lse[..., rows], causal=causal, **options)
        dq[..., rows, :] += dq_part
        return dk, dv

    def dq(self, sums):
        return sums[2]
