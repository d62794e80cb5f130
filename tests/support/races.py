"""Finds races in the fetch transport: its calls run for all ranks, one rank after the other, beside a side that notes.

Nothing is computed and nothing is awaited. What each stream of each rank reads and writes is an operation; the stream's
order, the waits between the streams and the barriers put operations before others. Two operations on the same bytes, of
which one writes, race unless one comes before the other. So a wait that is missing is found every time, where a GPU or
threads would show it now and then.
"""

import itertools
import sys
import weakref
from collections import defaultdict

import torch

from steps.step04_ring import fetch, ring
from steps.step04_ring.ranks.side import Side


class Log:
    """Operations of all ranks: (stream, what is read, what is written), and edges from one operation to a later one."""

    def __init__(self):
        self.operations, self.edges, self.last = [], set(), {}
        self.barriers = defaultdict(lambda: self.new("barrier", [], []))  # {its number: an operation of all ranks}
        self.shared = {}  # {(name, rank): what all ranks can read and write}

    def new(self, stream, reads, writes):
        self.operations.append((stream, [self.span(x, stream) for x in reads], [self.span(x, stream) for x in writes]))
        return len(self.operations) - 1

    def add(self, stream, reads=(), writes=()):
        """A new operation of a stream, which is (its name, the rank)."""
        return self.follow(stream, self.new(stream, reads, writes))

    def span(self, x, stream):
        """The bytes of a tensor: (its memory, the first, the last + 1). Each rank has a memory of its own."""
        memory, size = x.untyped_storage().data_ptr(), x.element_size()
        is_shared = any(memory == store.data_ptr() for store in self.shared.values())
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        first = x.storage_offset()
        return (memory, is_shared or stream[1]), first * size, (first + last) * size

    def follow(self, stream, operation):
        """The operation is the next one of the stream."""
        if stream in self.last:
            self.edges.add((self.last[stream], operation))
        self.last[stream] = operation
        return operation

    def races(self):
        """Pairs of operations that race."""
        before = [0] * len(self.operations)  # of each operation those before it, as bits
        waiting, later = [0] * len(before), defaultdict(list)
        for a, b in self.edges:
            later[a].append(b)
            waiting[b] += 1
        ready = [n for n, count in enumerate(waiting) if count == 0]
        while ready:
            a = ready.pop()
            for b in later[a]:
                before[b] |= before[a] | 1 << a
                waiting[b] -= 1
                if waiting[b] == 0:
                    ready.append(b)
        assert not any(waiting), "the streams wait for each other in a circle"
        return [
            (self.operations[a], self.operations[b])
            for a, b in itertools.combinations(range(len(before)), 2)
            if conflict(self.operations[a], self.operations[b]) and not (before[b] >> a | before[a] >> b) & 1
        ]


def conflict(a, b):
    def meet(xs, ys):
        return any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in xs for y in ys)

    return meet(a[2], b[1] + b[2]) or meet(a[1], b[2])


class NotingSide(Side):
    """A Side that notes. without: the name and the line of a call in fetch.py that is left out."""

    def __init__(self, log, rank, without=None):
        self.log, self.rank, self.without = log, rank, without
        self.called, self.barriers = set(), 0

    def memory(self, name, nbytes):
        return Memory(self.log.shared, name, nbytes)

    def left_out(self, name):
        caller = sys._getframe(2)
        self.called.add((name, caller.f_lineno))
        return self.without == (name, caller.f_lineno)

    def follow(self):
        if not self.left_out("follow"):
            self.log.edges.add((self.log.last["computation", self.rank], self.log.add(("side", self.rank))))

    def in_a_graph(self):
        return False

    def mark(self):
        return self.log.last["side", self.rank]

    def lead(self, mark):
        if not self.left_out("lead"):
            self.log.edges.add((mark, self.log.add(("computation", self.rank))))

    def copy(self, *pairs):
        for to, x in pairs:
            assert to.shape == x.shape and to.dtype == x.dtype
            self.log.add(("side", self.rank), [x], [to])

    def barrier(self):
        if not self.left_out("barrier"):
            self.log.follow(("side", self.rank), self.log.barriers[self.barriers])
        self.barriers += 1


class Memory:
    def __init__(self, stores, name, nbytes):
        self.stores, self.name, self.nbytes = stores, name, nbytes

    def of(self, rank, shape, dtype, first=0):
        store = self.stores.setdefault((self.name, rank), torch.empty(self.nbytes // dtype.itemsize, dtype=dtype))
        return store[first : first + torch.Size(shape).numel()].view(shape)


class Block:
    """A block that notes what it reads and writes. What it returns reuses memory at once, as an allocator would."""

    def __init__(self, log, rank, free):
        self.log, self.stream, self.free = log, ("computation", rank), free

    def new(self, like):
        free = self.free[tuple(like.shape)]
        memory = free.pop() if free else torch.empty(like.shape)
        result = memory.view(like.shape)
        weakref.finalize(result, free.append, memory)
        return result

    def forward(self, q, k, v, *, causal, scale):
        out = self.new(q)
        self.log.add(self.stream, [q, k, v], [out])
        return out, q[..., 0]

    def backward(self, dout, q, k, v, out, lse, *, causal, scale):
        dk, dv = self.new(k), self.new(k)
        self.log.add(self.stream, [dout, q, k, v], [dk, dv])
        return q, dk, dv


def run(layout, monkeypatch, calls=2, without=None):
    """(races, {(name, line) of fetch.py that wait}) of so many forwards and backwards of every rank."""
    log, called, kept_alive = Log(), set(), []
    for rank in range(layout.N):
        comm = type("Comm", (), {"rank": rank, "size": layout.N})
        side = NotingSide(log, rank, without)
        free = defaultdict(list)
        transport, block = fetch.Fetch(layout, comm, side), Block(log, rank, free)

        def add(parts, out, rank=rank):
            log.add(("computation", rank), [x for _, x in parts], [out])
            return out

        monkeypatch.setattr(fetch, "add", add)
        for _ in range(calls):
            q, k, v = torch.empty(3, 1, 1, layout.size(rank), 2)
            kept_alive += q, k, v
            log.add(("computation", rank), [], [q, k, v])
            work = layout.share(rank, layout.size(rank))
            options = dict(work=work, block=block, transport=transport, scale=1.0)
            out, lse, kv = ring.forward(q, k, v, **options)
            kept_alive += out, lse, kv
            kept_alive += ring.backward(out, q, kv, out, lse, own=(k, v), **options)
        called |= side.called
    return log.races(), called
