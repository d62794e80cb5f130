"""What the plan `ring` calls beside the ring as it is: other strategies, single hops, and the ring with a part changed.

    hops          one message to the next rank: K as relay sends it, or as fetch copies it
    by_strategy   the lessons of stage 04 that share the sequence in another way
    few_queries   a new token over keys that the ranks share, in four ways
    CHANGES       what `instead` puts in the place of a part of the ring, to see what this part is worth
    moved         counts what a call sends, and what memory it shares

Everything runs in the process of a rank, and everything is collective.
"""

import contextlib
import threading
import time
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from steps.bench.rows import DTYPES
from steps.step04_ring import agree, comm, fetch, merge, relay, ring, side, strategies, watch
from steps.step04_ring.layout import work_of
from steps.step04_ring.strategies import account, team

D, HOP_DTYPE = 128, "bf16"  # of the messages, which are tensors (1, 1, n, D)


# --- hops -----------------------------------------------------------------------------------------------------


def hops(transport, sizes, device):
    """[a call for each size in bytes, which sends so many to the next rank]. ValueError if other bytes arrive."""
    ring, most = comm.Comm(), max(sizes) // (D * DTYPES[HOP_DTYPE].itemsize)
    mine, theirs = (a_message(rank % ring.size, most, device) for rank in (ring.rank, ring.rank - 1))
    lengths = [nbytes * most // max(sizes) for nbytes in sizes]
    if transport == "relay":
        calls = [partial(relayed, ring, mine[:, :, :n].contiguous()) for n in lengths]
    else:
        beside = side.side_of(ring, mine.device, "fetch")
        memory = beside.memory("hops", mine.nbytes)
        memory.of(ring.rank, mine.shape, mine.dtype).copy_(mine)
        before = (ring.rank - 1) % ring.size
        sources = [memory.of(before, (1, 1, n, D), mine.dtype) for n in lengths]
        calls = [partial(fetched, beside, torch.empty_like(x), x) for x in sources]
    dist.barrier()  # What is fetched is there from now on.
    for call, n in zip(calls, lengths, strict=True):
        if not torch.equal(call(), theirs[:, :, :n]):
            raise ValueError(f"over {transport} {n} keys arrive changed")
    return calls


def a_message(rank, n, device):
    """Random numbers that differ from rank to rank."""
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randn(1, 1, n, D, generator=generator, device=device).to(DTYPES[HOP_DTYPE])


def relayed(ring, x):
    """x of the rank before, as relay.py sends it."""
    return ring.post(x, x.shape, towards=1).wait()


def fetched(beside, arriving, x):
    """x of the rank before, as fetch.py copies it."""
    beside.follow()
    beside.copy((arriving, x))
    beside.lead(beside.mark())
    return arriving


# --- strategies -----------------------------------------------------------------------------------------------


def by_strategy(name, pass_, dout, q, k, v, **options):
    """The pass of a lesson on a rank's shards."""
    attention = strategies.load(name)
    if pass_ == "fwd":
        with torch.no_grad():
            return (attention(q, k, v, **options),)
    return both(attention, dout, q, k, v, **options)


def both(attention, dout, q, k, v, **options):
    """(out, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def few_queries(way, q, k, v, whole):
    """(out,) of queries that every rank has, over keys that the ranks share. The block is the one for few queries.

    way: "star" sends the parts of out. "query_parallel" gathers the keys, and with "relay" and "fetch" they travel as
    in the ring: each rank computes all of out by itself.
    """
    from steps import step03_triton as block

    if way == "star":
        return (strategies.attention(q, k, v, strategy="star", S=whole.S, replicated=True, block=block),)
    if way == "query_parallel":
        everyone = team.Team(q, k, S=whole.S, block=block, layout=whole.kind, replicated=True)
        keys = everyone.in_order(everyone.gather(torch.stack((k, v))))
        return block.forward(q, *keys)[:1]
    ring = comm.Comm()
    agree.agree(ring, {"function": "few queries", "keys": whole, "transport": way}, k.shape[2])
    beside = side.side_of(ring, k.device, way)
    parts = merge.Parts(q)
    for _, kv in (fetch.Fetch(whole, ring, beside) if beside else relay.Relay(whole, ring)).forward(k, v):
        parts.add(slice(0, q.shape[2]), *block.forward(q, *kv))
    return parts.merged()[:1]


# --- the ring with a part changed -----------------------------------------------------------------------------


def instead(owner, name, value, call):
    """The call with another value of the owner's attribute."""
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return call()
    finally:
        setattr(owner, name, usual)


def copy_in_turn(self, *pairs, copy=side.Side.copy):
    """Side.copy without overlap: it waits for the computation, and the computation for it."""
    self.follow()
    copy(self, *pairs)
    self.lead(self.mark())


class WideTrip(fetch.Trip):
    """A Trip whose dK and dV travel in float32. The block has rounded them before, so that only the bytes differ."""

    def __init__(self, fetch, k, v, order, there=(), with_slots=False):
        super().__init__(fetch, k, v, order, there, with_slots)
        if with_slots:
            self.slots = fetch.side.memory("slots", (fetch.size - 1) * self.room * 4)

    def give(self, src, keys, dk, dv):
        super().give(src, keys, *((dk, dv) if src == self.fetch.rank else (dk.float(), dv.float())))

    def slot(self, owner, giver, keys):
        number = (giver - owner - 1) % self.fetch.size
        return self.slots.of(owner, self.shape(owner, keys), torch.float32, number * self.room)


def carried(q, k, v, *, layout, comm, block, transport, scale):
    """ring.forward without a merge: stage 03's kernel takes the float32 sums out and lse in, and gives them back.

    It changes them in place, where they have to be contiguous. So each run of positions has sums of its own, and a call
    of its own where the ring has one call for both. For layouts zigzag and contiguous.
    """
    sums, start = [], 0  # (rows, out, lse)
    for run in filter(len, layout.pieces(comm.rank)):
        rows, start = slice(start, start + len(run)), start + len(run)
        out = q.new_zeros(q[..., rows, :].shape, dtype=torch.float32)
        sums.append((rows, out, out.new_full(out.shape[:-1], -torch.inf)))
    for src, kv in transport.forward(k, v):
        if work := work_of(layout, comm.rank, src):
            seeing, keys, causal = work
            for rows, *of_rows in (one for one in sums if one[0].start >= seeing.start):
                seen = slice(keys.start, rows.stop if causal else keys.stop)  # a causal call ends with its own keys
                k_part, v_part = (x[..., seen, :] for x in kv)
                carry = dict(zip(("out", "lse"), of_rows, strict=True))
                block.forward(q[..., rows, :], k_part, v_part, causal=causal, scale=scale, **carry)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    for rows, *of_rows in sums:
        out[..., rows, :], lse[..., rows] = of_rows
    return out, lse, kv


CHANGES = {
    ("overlap", False): (side.Side, "copy", copy_in_turn),
    ("merge", "eager"): (merge, "KERNELS", False),
    ("merge", "carried"): (ring, "forward", carried),
    ("dkv", "fp32"): (fetch, "Trip", WideTrip),
}


@contextlib.contextmanager
def unwatched():
    """Without what watch.py does: no notes, no events, and its threads rest. Only for calls agreed on before."""
    awake, alive = threading.Event(), watch.Watch._alive

    def begin(note, arguments, signature, number):
        note.signature, note.number = signature, number

    def rest(self):
        awake.wait()
        return alive(self)

    quiet = {"begin": begin, "begin_hop": lambda note: 1, "passed": lambda note: None}
    with patch.multiple(watch.Note, **quiet), patch.object(watch.Watch, "_alive", rest):
        time.sleep(2 * watch.PERIOD)  # until the threads have come to rest
        try:
            yield
        finally:
            awake.set()


# --- counting -------------------------------------------------------------------------------------------------


def moved(call):
    """{"sent": bytes that this rank sends or copies during the call, "shared": bytes of shared memory asked for}."""
    fetched, shared = [], {}
    start, give, memory = fetch.Trip.start, fetch.Trip.give, side.Side.memory

    def counting_start(trip, src, buffer):
        fetched.append(trip.k.element_size() * torch.Size(trip.shape(src)).numel())
        start(trip, src, buffer)

    def counting_give(trip, src, keys, dk, dv):
        fetched.append((dk.nbytes + dv.nbytes) * (src != trip.fetch.rank))
        give(trip, src, keys, dk, dv)

    def noting_memory(beside, name, nbytes):
        shared[name] = max(nbytes, shared.get(name, 0))
        return memory(beside, name, nbytes)

    of_trip = patch.multiple(fetch.Trip, start=counting_start, give=counting_give)
    with account.counted() as messages, of_trip, patch.object(side.Side, "memory", noting_memory):
        call()
    return {"sent": messages["bytes"] + sum(fetched), "shared": sum(shared.values())}
