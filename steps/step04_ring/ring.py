# SPDX-License-Identifier: MIT
"""Ring attention: every rank keeps its queries, and the keys and values travel from rank to rank.

    forward, N steps                                  backward, N steps in the opposite direction
    send K, V to rank + 1, receive from rank - 1      send K, V to rank - 1, receive from rank + 1
    (out, lse) of the block: q with the current K, V  dq, dK, dV of the block, from the final out and lse
    merge into (out, lse)                             dq stays; dK, dV are added to the sums that travel with K, V

The idea: a rank's memory holds 2 / N of all K and V, and the next K and V arrive while the block is computed. The
backward starts with the K and V that the forward ended with, those of rank + 1, and ends with the rank's own. The sums
of dK and dV therefore arrive at their own rank during the last block, where zhuzilin's ring waits for one more hop.
Both loops are the same for every layout; `work` says which part of a block has to be computed. Sources: Ring Attention
(2310.01889), section 3; the reverse ring: NVIDIA TransformerEngine.

P = exp(S - lse) with the lse of the whole row is right in any block, and so is delta = rowsum(dO * O) with the whole
row's O. The sums out, lse, dq, dK and dV are float32, and dK and dV travel in float32. A block that computes in
bfloat16 returns its part of out and of the gradients rounded. Needs layout.py, merge.py, comm.py, and a block: any
object with the two functions

    forward(q, k, v, *, causal, scale) -> (out, lse)
    backward(dout, q, k, v, out, lse, *, causal, scale) -> (dq, dk, dv)
"""

import math

import torch

from .merge import merge


def forward(q, k, v, *, layout, comm, block, **options):
    """(out, lse, kv) of this rank's shard: q (B, H, n, D), k and v (B, Hk, n, D); lse (B, H, n).

    kv (2, B, Hk, n', D) holds the k and v of the last step, which are the next rank's; the backward begins with them.
    options (scale, ...) are passed to the block.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)
    kv = torch.stack((k, v))  # one message, not two
    for step in range(comm.size):
        src = (comm.rank - step) % comm.size  # the rank that the current keys belong to
        last = step == comm.size - 1
        hop = None if last else comm.post(kv, resized(kv, layout.size((src - 1) % comm.size)), towards=1)
        if work := layout.work(comm.rank, src):
            rows, keys, causal = work
            part = block.forward(q[..., rows, :], *kv[..., keys, :], causal=causal, **options)
            merge(out[..., rows, :], lse[..., rows], *part)
        kv = kv if last else hop.wait()
    return out.to(q.dtype), lse, kv


def backward(dout, q, kv, out, lse, *, layout, comm, block, **options):
    """(dq, dk, dv) of this rank's shard; kv, out and lse as `forward` returned them."""
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dkv_hop = None  # brings dK, dV of the current keys, summed over the ranks that these keys have passed
    for step in range(comm.size):
        src = (comm.rank + 1 + step) % comm.size
        last = step == comm.size - 1
        hop = None if last else comm.post(kv, resized(kv, layout.size((src + 1) % comm.size)), towards=-1)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        if work := layout.work(comm.rank, src):
            rows, keys, causal = work
            saved = dout[..., rows, :], q[..., rows, :], *kv[..., keys, :], out[..., rows, :], lse[..., rows]
            dq_part, dk_part, dv_part = block.backward(*saved, causal=causal, **options)
            dq[..., rows, :] += dq_part
            dkv[0, ..., keys, :] += dk_part
            dkv[1, ..., keys, :] += dv_part
        if dkv_hop:
            dkv += dkv_hop.wait()
        if not last:
            dkv_hop = comm.post(dkv, resized(dkv, layout.size((src + 1) % comm.size)), towards=-1)
            kv = hop.wait()
    return dq.to(q.dtype), *dkv.to(q.dtype)


def fetch_next(k, v, *, layout, comm):
    """The kv that `forward` ended with, fetched by one hop for a backward that has not kept it."""
    kv = torch.stack((k, v))
    if comm.size == 1:
        return kv
    return comm.post(kv, resized(kv, layout.size((comm.rank + 1) % comm.size)), towards=-1).wait()


def resized(kv, n):
    """The shape of kv (2, B, Hk, ., D) for n keys."""
    return (*kv.shape[:-2], n, kv.shape[-1])
