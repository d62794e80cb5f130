# SPDX-License-Identifier: MIT
"""Bug hunt 04.bug1: the gradients of K and V by the reverse ring.

    rank r, steps 0 ... N - 1, with the K and V of rank r + 1, r + 2, ..., r:
        send K, V to rank r - 1
        dK, dV of the block, from the final lse and delta
        add the sums that have arrived from rank r + 1, send the result after K, V
        wait for the next K, V

The ranks are threads, and a message is an entry of a queue. A rank that has waited for PATIENCE seconds raises
TimeoutError and says what it waited for. Needs torch and layout.py.
"""

import queue
from concurrent.futures import ThreadPoolExecutor

import torch

from steps.step04_ring.layout import Layout

PATIENCE = 2  # seconds


def gradients(q, k, v, dout, *, causal=False, layout="zigzag", ranks=4):
    """(dk, dv): q, k, v, dout (B, H, S, D), the sequence divided among so many ranks as the layout says."""
    whole, wires = Layout(layout, q.shape[2], ranks, causal), Wires(ranks)
    lse, delta = saved_by_the_forward(q, k, v, dout, causal)

    def life(rank):
        mine = [whole.shard(x, rank) for x in (q, dout, lse, delta)]
        kv = torch.stack([whole.shard(x, (rank + 1) % ranks) for x in (k, v)])  # what the forward ended with
        return backward(rank, *mine, kv, whole, wires)

    with ThreadPoolExecutor(ranks) as pool:
        shards = list(pool.map(life, range(ranks)))
    return tuple(whole.unshard([shard[i] for shard in shards], dim=2) for i in range(2))


def backward(rank, q, dout, lse, delta, kv, whole, wires):
    """dK and dV (2, B, H, n, D) of this rank's keys, summed over all ranks."""
    N = whole.N
    before, behind = (rank - 1) % N, (rank + 1) % N
    for step in range(N):
        src, last = (rank + 1 + step) % N, step == N - 1
        if not last:
            wires.send("K, V", rank, before, kv)
        dkv, work = torch.zeros_like(kv), whole.work(rank, src)
        if work:
            rows, keys, causal = work
            part = [x[..., rows, :] for x in (q, dout, lse, delta)]
            dkv[..., keys, :] = block(*part, *kv[..., keys, :], causal)
        if step > 0:
            dkv += wires.receive("dK, dV", rank, behind)
        if not last:
            wires.send("dK, dV", rank, before, dkv)
        if not last:
            kv = wires.receive("K, V", rank, behind)
    return dkv


def block(q, dout, lse, delta, k, v, causal):
    """dK and dV (2, B, H, keys, D) of one block. A causal block is square."""
    P = probabilities(q, k, lse, causal)
    dS = P * (dout @ v.mT - delta)
    return torch.stack((dS.mT @ q * q.shape[-1] ** -0.5, P.mT @ dout))


def probabilities(q, k, lse, causal):
    S = q @ k.mT * q.shape[-1] ** -0.5
    P = (S - lse).exp()
    return P.tril() if causal else P


def saved_by_the_forward(q, k, v, dout, causal):
    """lse and delta (B, H, S, 1) of the whole sequence."""
    S = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        S = S.masked_fill(torch.ones_like(S).triu(1) > 0, -torch.inf)
    lse = S.logsumexp(-1, keepdim=True)
    out = probabilities(q, k, lse, causal) @ v
    return lse, (dout * out).sum(-1, keepdim=True)


class Wires:
    """A queue for each kind of message between each pair of ranks. Nobody waits for room in a queue."""

    def __init__(self, ranks):
        self.queues = {
            (what, a, b): queue.Queue() for what in ("K, V", "dK, dV") for a in range(ranks) for b in range(ranks)
        }

    def send(self, what, rank, to, x):
        self.queues[what, rank, to].put(x.clone())

    def receive(self, what, rank, source):
        try:
            return self.queues[what, source, rank].get(timeout=PATIENCE)
        except queue.Empty:
            raise TimeoutError(f"rank {rank} has waited {PATIENCE} s for {what} from rank {source}") from None
