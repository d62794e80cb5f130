"""Writes traces.js, which the player plays: what stage 00's counted orders and stage 04's ring do, step by step.

    make report        writes the file anew; it is the same unless the stages have changed

The events are recorded from the stages' own code, and their sums are the counters' own. The file sets one global
variable, because a browser refuses to fetch data for a page that it opened from disk.
"""

import json
from pathlib import Path

import torch

from steps.step00_naive import io_count
from steps.step04_ring.layout import LAYOUTS, Layout

N, D, TILE = 48, 16, 16  # rows, head_dim, rows of a tile
RANKS, S = 4, 32  # of the ring: ranks and positions
NAMES = {"standard": "Q K V S P O lse", "fa1": "Q K V O l m", "fa2": "Q K V O lse"}  # in the order of their birth


class Array(io_count.Array):
    """An array that notes its accesses: ["load" or "store", name, first row, end, numbers moved]."""

    def note(self, what, index, count):
        first, end, _ = (index if isinstance(index, slice) else slice(None)).indices(len(self.data))
        self.memory.events.append([what, self.name, first, end, count])

    def __getitem__(self, index):
        tile = super().__getitem__(index)
        self.note("load", index, tile.numel())
        return tile

    def __setitem__(self, index, tile):
        super().__setitem__(index, tile)
        self.note("store", index, self.data[index].numel())


class Memory(io_count.Memory):
    """Memory whose arrays note what is done with them, and have the names of an order, one after the other."""

    def __init__(self, names):
        super().__init__()
        self.names, self.events = iter(names), []

    def put(self, tensor):
        array = Array(self, tensor.clone())
        array.name = next(self.names)
        return array

    def empty(self, *shape, like):
        return self.put(like.new_full(shape, float("nan")))


def walk(order):
    """The accesses of one order. Their sums are what the counters say."""
    q, k, v = torch.randn(3, N, D, generator=torch.Generator().manual_seed(0))
    memory = Memory(NAMES[order].split())
    tile = {} if order == "standard" else {"tile": (TILE, TILE)}
    getattr(io_count, order)(memory, q, k, v, **tile)
    for what, total in (("load", memory.loads), ("store", memory.stores)):
        assert total == sum(count for kind, *_, count in memory.events if kind == what)
    return {"order": order, "N": N, "d": D, "tile": TILE, "loads": memory.loads, "stores": memory.stores,
            "events": memory.events}  # fmt: skip


def ring(kind):
    """What each rank computes in each step of the ring: its queries and the keys that it holds then, causal."""
    layout = Layout(kind, S, RANKS, causal=True)
    steps = []
    for step in range(RANKS):
        at_once = []
        for rank in range(RANKS):
            src = (rank - step) % RANKS
            rows, keys, _ = layout.work(rank, src) or (slice(0, 0), slice(0, 0), False)
            at_once.append({"src": src, "q": [rows.start, rows.stop], "k": [keys.start, keys.stop]})
        steps.append(at_once)
    return {"layout": kind, "ranks": RANKS, "S": S, "steps": steps,
            "positions": [layout.positions(rank).tolist() for rank in range(RANKS)]}  # fmt: skip


def traces():
    return {"walks": [walk(order) for order in NAMES], "rings": [ring(kind) for kind in sorted(LAYOUTS)]}


def script():
    """The file's text."""
    return f"window.TRACES = {json.dumps(traces(), separators=(',', ':'))};\n"


if __name__ == "__main__":
    (Path(__file__).parent / "traces.js").write_text(script())
