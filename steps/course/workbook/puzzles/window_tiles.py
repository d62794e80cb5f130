"""Which tiles of keys a sliding window visits, and which of them need a mask.

The kernel counts visits instead of computing attention, so that a wrong range shows which tile it gets wrong.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from steps import engine
from steps.course.workbook.puzzles import Case


def specification(Nq, Nk, left, right, Br, Bc):
    """Which tiles are visited with a mask, and which without, each (Nq / Br, tiles of keys) bool.

    A query at position p sees the keys from p - left to p + right. The last query stands at the last key.
    """
    position, key = torch.arange(Nq)[:, None] + Nk - Nq, torch.arange(-(-Nk // Bc) * Bc)
    seen = (key >= position - left) & (key <= position + right) & (key < Nk)
    tiles = seen.unflatten(1, (-1, Bc)).unflatten(0, (-1, Br))  # (Nq / Br, Br, tiles of keys, Bc)
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    return {"masked": some & ~every, "plain": every}


@triton.jit
def window_tiles(i, left, right, Nq, Nk, Br: tl.constexpr, Bc: tl.constexpr):
    """(begin, whole, full, end): which tiles of Bc keys the Br queries i ... i + Br - 1 visit, as numbers of tiles.

    They visit the tiles begin ... whole - 1 with a mask, whole ... full - 1 without one, because every query sees every
    key there, and full ... end - 1 with a mask again. Tile t has the keys t Bc ... t Bc + Bc - 1. Nq is a multiple of
    Br, Nk is any number, and left and right are 0 or more.
    """
    first = i + Nk - Nq  # where the first query stands
    last = first + Br - 1
    begin = tl.maximum(0, first - left) // Bc
    end = tl.cdiv(tl.minimum(Nk, tl.maximum(0, last + right + 1)), Bc)
    whole = tl.cdiv(tl.maximum(0, last - left), Bc)
    full = tl.minimum(Nk, tl.maximum(0, first + right + 1)) // Bc
    return begin, whole, tl.maximum(whole, full), end  # A window narrower than a tile has whole > full.


@triton.jit(do_not_specialize=["Nq", "Nk", "tiles"])
def visits_kernel(
    masked, plain, windows, Nq, Nk, tiles, Br: tl.constexpr, Bc: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    window, n = tl.program_id(0), tl.program_id(1)
    left, right = tl.load(windows + 2 * window), tl.load(windows + 2 * window + 1)
    begin, whole, full, end = window_tiles(n * Br, left, right, Nq, Nk, Br, Bc)
    # Column c stands for the tile c - 1, the first column for all tiles before tile 0, the last one for all from
    # `tiles` on. Of the tiles begin ... whole - 1 those of a column are from `low` to `high` - 1, and so on.
    column = tl.arange(0, COLUMNS)
    low, high = tl.where(column == 0, -(2**20), column - 1), tl.where(column == tiles + 1, 2**20, column)
    before = tl.maximum(0, tl.minimum(high, whole) - tl.maximum(low, begin))
    behind = tl.maximum(0, tl.minimum(high, end) - tl.maximum(low, full))
    between = tl.maximum(0, tl.minimum(high, full) - tl.maximum(low, whole))
    place = (window * tl.num_programs(1) + n) * (tiles + 2) + column
    tl.store(masked + place, before + behind, mask=column < tiles + 2)
    tl.store(plain + place, between, mask=column < tiles + 2)


def run(Nq, Nk, windows, Br, Bc):
    """How often each tile is visited with and without a mask, for each window (left, right).

    The shape is (windows, tiles of queries, tiles of keys + 2): at each end is a column for tiles that do not exist.
    """
    tiles, windows = triton.cdiv(Nk, Bc), torch.tensor(windows, dtype=torch.int32, device=engine.device)
    shape = len(windows), Nq // Br, tiles + 2
    masked, plain = torch.zeros(2, *shape, dtype=torch.int32, device=engine.device)
    columns = triton.next_power_of_2(tiles + 2)
    visits_kernel[shape[:2]](masked, plain, windows, Nq, Nk, tiles, Br=Br, Bc=Bc, COLUMNS=columns)
    return {"masked": masked.cpu(), "plain": plain.cpu()}


def expected(Nq, Nk, windows, Br, Bc):
    each = [specification(Nq, Nk, left, right, Br, Bc) for left, right in windows]
    return {name: (torch.stack([F.pad(x[name].int(), (1, 1)) for x in each]), 0) for name in ("masked", "plain")}


# (left, right), narrower than a tile of 4 keys, as wide as one or two tiles or nearly so, and without limit
WINDOWS = [(0, 0), (3, 0), (4, 0), (0, 3), (0, 4), (2, 5), (3, 4), (7, 1), (1, 7), (8, 8), (50, 0), (0, 50), (50, 50)]


def _case(says, Nq, Nk, Br, Bc, windows=WINDOWS):
    return Case(says, lambda: dict(Nq=Nq, Nk=Nk, windows=windows, Br=Br, Bc=Bc))


CASES = [
    _case("windows to the left of the query", 12, 12, 4, 4, [(left, 0) for left in range(11)]),
    _case("windows to both sides, narrower and wider than a tile", 12, 12, 4, 4),
    _case("fewer queries than keys, Nk is not a multiple of the tile", 8, 18, 4, 4),
    _case("more queries than keys: the first queries stand before the first key", 20, 10, 4, 4),
    _case("Br < Bc", 12, 20, 4, 8),
    _case("Br > Bc", 16, 17, 8, 4),
]


def explain(got, want, windows, **_):
    """About the first window that is wrong: a sentence for each kind of wrong visit, and all tiles as a picture."""
    wrong = torch.stack([(got[name] != want[name][0]).flatten(1).any(1) for name in want]).any(0)
    number = wrong.nonzero()[0, 0]
    got, want = {name: x[number] for name, x in got.items()}, {name: x[number] for name, (x, _) in want.items()}
    visits, seen, whole = got["masked"] + got["plain"], want["masked"] + want["plain"] > 0, want["plain"] > 0
    kinds = {
        "is visited, but no query sees a key of it": (visits > 0) & ~seen,
        "is not visited, but a query sees a key of it": (visits == 0) & seen,
        "is visited more than once": (visits > 1) & seen,
        "is visited without a mask, but a key of it is hidden from a query": (got["plain"] > 0) & seen & ~whole,
        "is visited with a mask, but every query sees every key of it": (got["masked"] > 0) & whole,
    }
    left, right = windows[number]
    lines = [f"{wrong.sum()} of {len(wrong)} windows are wrong; the first one is left = {left}, right = {right}:"]
    for says, where in kinds.items():
        for i, t in where.nonzero()[:1].tolist():
            exists = " (there is no such tile)" if t in (0, where.shape[1] - 1) else ""
            lines.append(f"for tile {i} of the queries, tile {t - 1} of the keys{exists} {says}")
    lines.append("the tiles of keys, a line for each tile of queries: # no mask, / mask, . no visit, 2 twice or more")
    width = max(len("yours"), seen.shape[1] - 2)
    rows = [("yours", "right"), *zip(_picture(got), _picture(want), strict=True)]
    return lines + [f"  {yours:{width}}   {ours}" for yours, ours in rows]


def _picture(counts):
    """A line of text for each tile of queries, with a character for each tile of keys."""
    states = counts["plain"] + 10 * counts["masked"]
    return ["".join({0: ".", 1: "#", 10: "/"}.get(state, "2") for state in row[1:-1]) for row in states.tolist()]


# The mistakes: one of the four numbers is another one. Each is computed in Python from the names of `mistaken`.


def mistaken(Nq, Nk, windows, Br, Bc, answer):
    """What `run` returns where some of the names below are wrong: answer = {its name: function of those above it}."""
    tiles = -(-Nk // Bc)
    counts = {name: torch.zeros(len(windows), Nq // Br, tiles + 2, dtype=torch.int32) for name in ("masked", "plain")}
    rules = {
        "left": lambda x: x.left,
        "right": lambda x: x.right,
        "first": lambda x: x.first,
        "last": lambda x: x.first + Br - 1,
        "begin": lambda x: x.down(x.first - x.left),
        "whole": lambda x: x.up(x.last - x.left),
        "end": lambda x: x.up(min(Nk, x.last + x.right + 1)),
        "full": lambda x: x.down(min(Nk, x.first + x.right + 1)),
        "ordered": lambda x: max(x.whole, x.full),
    } | answer
    for number, (left, right) in enumerate(windows):
        for n in range(Nq // Br):
            x = SimpleNamespace(Nk=Nk, Br=Br, left=left, right=right, tiles=tiles, shift=Nk - Nq)
            x.first = n * Br + x.shift
            x.down = lambda key: max(0, key) // Bc  # the tile of that key
            x.up = lambda key: -(-max(0, key) // Bc)  # the first tile that begins at that key or later
            for name, rule in rules.items():
                setattr(x, name, rule(x))
            edges = x.begin, x.whole, x.ordered, x.end
            for name, begin, end in zip(("masked", "plain", "masked"), edges, edges[1:], strict=False):
                for t in range(begin, end):
                    counts[name][number, n, 1 + min(max(t, -1), tiles)] += 1
    return counts


MISTAKES = {
    "i_taken_for_a_tile": (
        "i is multiplied by Br as if it were the number of the tile, but it is that of the tile's first query",
        dict(first=lambda x: (x.first - x.shift) * x.Br + x.shift)),
    "begins_at_the_last_query": (
        "the visits begin where the window of the tile's last query begins",
        dict(begin=lambda x: x.down(x.last - x.left))),
    "ends_at_the_first_query": (
        "the visits end where the window of the tile's first query ends",
        dict(end=lambda x: x.up(min(x.Nk, x.first + x.right + 1)))),
    "begins_at_the_first_key": ("the tiles before the window are visited too", dict(begin=lambda x: 0)),
    "ends_at_the_last_key": ("the tiles behind the window are visited too", dict(end=lambda x: x.tiles)),
    "left_edge_not_masked": ("the tiles at the window's left edge have no mask", dict(whole=lambda x: x.begin)),
    "right_edge_not_masked": ("the tiles at the window's right edge have no mask", dict(full=lambda x: x.end)),
    "full_rounded_up": (
        "the tile in which the first query's window ends counts as whole, because the division is rounded up",
        dict(full=lambda x: x.up(min(x.Nk, x.first + x.right + 1)))),
    "whole_rounded_down": (
        "the tile in which the last query's window begins counts as whole, because the division is rounded down",
        dict(whole=lambda x: x.down(x.last - x.left))),
    "everything_masked": ("every tile has a mask", dict(full=lambda x: x.whole)),
    "narrow_window_visited_twice": (
        "a window that is narrower than a tile has whole > full, and its tiles are visited twice",
        dict(ordered=lambda x: x.full)),
    "aligned_at_the_top_left": (
        "the window is aligned at the top left: Nk - Nq is not added", dict(first=lambda x: x.first - x.shift)),
    "right_edge_exclusive": (
        "the window's right edge is one key too far to the left: the key at p + right is seen",
        dict(right=lambda x: x.right - 1)),
    "left_edge_exclusive": (
        "the window's left edge is one key too far to the right: the key at p - left is seen",
        dict(left=lambda x: x.left - 1)),
}  # fmt: skip
