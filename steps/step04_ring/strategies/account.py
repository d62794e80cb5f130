# SPDX-License-Identifier: MIT
"""What a strategy costs a rank: seconds, bytes sent and memory, measured beside formulas. And whether it is right.

N ranks, c = S / N; q = B H c D and kv = 2 B Hk c D elements of e bytes; f = 4 / e, for float32; o = q and its lse

    sent              forward                              backward
      ring            (N-1) kv                             (N-1) (kv + f kv): dK and dV are sent in float32
      query_parallel  (N-1) kv                             (N-1) (kv + f kv)
      star            (N-1) (q + o); causal: fewer o       -
      ulysses         (N-1) / N (2 q + kv)                 (N-1) / N (2 q + kv)
    memory of the forward beyond its inputs
      ring            2 kv + 4 o + f q; causal: fewer o    K, V at hand and arriving; parts that wait to be merged; out
      query_parallel  2 N kv                               K, V of all ranks as they arrive, and in order
      star            3 N o; causal: fewer o               the parts as found, as sent, and as received
      ulysses         5 q + kv                             q, k, v, out of the rank's heads; out on its way home, 3 q

`sent_bytes` is exact, for shards of any length. What is sent is counted where torch.distributed is called: without what
the backend adds, without what a copy engine fetches, and without the few bytes by which the ranks compare their calls.
Memory on a GPU is what torch's allocator says. On a CPU it is the most that tensors hold at one time, with a block that
computes nothing, because a fused kernel needs no memory inside.
"""

import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steps import engine
from steps.step04_ring.layout import Layout

# ---- formulas --------------------------------------------------------------------------------------------------------


def sent_bytes(strategy, layout, rank, *, B, H, Hk, D, e):
    """(bytes that the rank sends in the forward, in the backward or None); e is the size of an element in bytes."""
    sizes = [layout.size(r) for r in range(layout.N)]
    others, n = sum(sizes) - sizes[rank], sizes[rank]
    kv, q = 2 * B * Hk * D, B * H * D  # of one position
    if strategy == "ring":  # all shards but the next rank's in the forward, all but its own in the backward
        return (sum(sizes) - sizes[(rank + 1) % layout.N]) * kv * e, others * kv * (e + 4)
    if strategy == "query_parallel":
        gathered = (layout.N - 1) * max(sizes) * kv * e  # as long as the longest
        return gathered, gathered + others * kv * 4
    if strategy == "star":
        rows = sum(len(found_rows(layout, owner, rank)) for owner in range(layout.N) if owner != rank)
        return (layout.N - 1) * max(sizes) * q * e + rows * B * H * (D * e + 4), None
    there = (layout.N - 1) * n * (q + kv) // layout.N  # q, k, v; in the backward dout alone
    back = others * q // layout.N
    return (there + back) * e, ((layout.N - 1) * n * q + others * (q + kv)) // layout.N * e


def found_rows(layout, owner, keys_of):
    """The rows of the owner's queries for which star computes a part with the keys of another rank."""
    work = layout.work(owner, keys_of)
    return range(layout.size(owner))[work[0]] if work else range(0)


def memory_bytes(strategy, layout, rank, *, B, H, Hk, D, e):
    """Bytes that the forward holds beyond its inputs, the largest terms: the table at the head of this file."""
    n, N = layout.size(rank), layout.N
    kv, q, lse = 2 * B * Hk * n * D * e, B * H * n * D * e, 4 * B * H * n
    merging = (4 * q // e + lse) * (1 if e == 4 else 2)  # out in float32, and a float32 copy of a part with 16 bits
    if strategy == "ring":
        waiting = min(4 * n, sum(len(found_rows(layout, rank, src)) for src in range(N)))  # step 04 merges four at once
        return 2 * kv + waiting * B * H * (D * e + 4) + merging
    if strategy == "query_parallel":
        return max(2 * N * kv, N * kv + 2 * q + 2 * lse)
    if strategy == "star":
        pairs = [(owner, rank) for owner in range(N)], [(rank, src) for src in range(N)]
        found, received = (sum(len(found_rows(layout, *pair)) for pair in some) * B * H for some in pairs)
        outs = (found + received) * D * e
        return max(found * (D * e + 4) + outs, received * (D * e + 4) + merging)
    return 5 * q + kv + lse


# ---- measured --------------------------------------------------------------------------------------------------------


class Watched(TorchDispatchMode):
    """What a call does under this mode: the bytes that it sends, and the most that its new tensors hold at one time."""

    def __init__(self, inputs):
        super().__init__()
        self.sent = self.held = 0
        self.alive = {x.untyped_storage()._cdata: (StorageWeakRef(x.untyped_storage()), 0) for x in inputs}

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # otherwise the first operator imports what torch.compile needs, for two seconds in each rank

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sent += sent_by(function.name(), args)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes():  # A view's storage is there already.
                storage = x.untyped_storage()
                known = self.alive.get(storage._cdata)
                if known is None or known[0].expired():
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        for pause in (0, 0.001, 0.02):  # gloo's thread holds a message's tensors until it next gets a turn
            time.sleep(pause)
            self.alive = {key: known for key, known in self.alive.items() if not known[0].expired()}
            if (held := sum(size for _, size in self.alive.values())) <= self.held:
                return result
        self.held = held
        return result


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


def allocated(call):
    """Bytes that the call holds on a GPU at its peak beyond its inputs; its result is among them."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def held(call, block, inputs):
    """Bytes that call(block) holds at its peak beyond its inputs."""
    if engine.name == "cuda":
        return allocated(partial(call, block))
    with Watched(inputs) as one:
        call(Idle)
    return one.held


# ---- inputs, and what to compare with --------------------------------------------------------------------------------


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


# ---- reports ---------------------------------------------------------------------------------------------------------


def report(strategy, attention, block, S, H, Hk, D, causal, layout, dtype):
    """The lines that say what a strategy costs, from every rank's point of view the same. Every rank calls."""
    rank, whole = dist.get_rank(), Layout(layout, S, dist.get_world_size(), causal)
    inputs = [whole.shard(x, rank) for x in random_inputs(S, H, Hk, D, dtype, engine.device)]
    sizes = dict(B=1, H=H, Hk=Hk, D=D, e=dtype.itemsize)
    options = dict(causal=causal, layout=layout, S=S)

    def forward(block):
        with torch.no_grad():
            return attention(*inputs[:3], block=block, **options)

    def both(block):
        return passes(attention, *inputs, block=block, **options)

    has_backward = len(both(block)) > 1
    mine, seen = [timed(partial(call, block), dist.barrier)[0] for call in (forward, both)], []
    for call in (forward, both):
        with Watched(inputs) as one:
            call(Idle)
        seen.append(one)
    of_forward, of_backward = sent_bytes(strategy, whole, rank, **sizes)
    mine += [seen[0].sent, of_forward, seen[1].sent - seen[0].sent, of_backward or 0]
    mine.append(seen[0].held if engine.name == "cpu" else allocated(partial(forward, block)))
    mine.append(memory_bytes(strategy, whole, rank, **sizes))

    everyone = [None] * whole.N
    dist.all_gather_object(everyone, mine)
    ms, ms_both, *bytes_ = (max(column) for column in zip(*everyone, strict=True))
    lines = [
        f"{strategy}, {layout}, {whole.N} ranks, S {S}, H {H}, Hk {Hk}, D {D}, {'causal' if causal else 'not causal'}",
        f"forward             {1e3 * ms:9.2f} ms (slowest rank)",
        f"forward + backward  {1e3 * ms_both:9.2f} ms" if has_backward else "no backward",
    ]
    for i, what in enumerate(("sent, forward", "sent, backward", "memory, forward")):
        if has_backward or what != "sent, backward":
            lines.append(f"{what:19} {bytes_[2 * i] / 1e6:9.3f} MB a rank, by formula {bytes_[2 * i + 1] / 1e6:.3f}")
    return lines


def timed(call, before=lambda: None):
    """(the fewest seconds that one of two calls took, the result), after one call to warm up.

    before: is called before each timed call.
    """
    result, seconds = call(), []
    for _ in range(2):
        before()
        synchronize()
        start = time.perf_counter()
        result = call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def synchronize():
    """Waits for the GPU. A kernel launch returns before the kernel has finished, so the clock must not be read yet."""
    if engine.name == "cuda":
        torch.cuda.synchronize()
