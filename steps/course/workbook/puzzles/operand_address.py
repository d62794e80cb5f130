"""At which byte of shared memory wgmma finds a number of its second operand."""

import torch

from steps.course.workbook.puzzles import Case, whole_numbers
from steps.course.workbook.puzzles._emulated import launch


def specification(tile, start, leading, stride, runs_down):
    """What wgmma reads as its second operand of a tile in shared memory: its number (k, i). It is 16 x N.

    N is 128 if runs_down, otherwise 64. The rows of the tile have 64 numbers, 8 chunks of 8 numbers. Where the tile was
    written, the chunks of each row were permuted as TMA does it, in 8 rows that follow each other in 8 different ways.
    The lines below put them back.
    """
    x = tile.reshape(-1, 2, 2, 2, 2, 2, 2, 8)  # groups of 8 rows, the row in 3 bits, the chunk in 3 bits, 8 numbers
    for bit in (1, 2, 3):  # In rows with this bit, chunks that differ in the same bit alone have changed places.
        x = torch.stack([x.select(bit, 0), x.select(bit, 1).flip(bit + 2)], bit)
    groups = x.reshape(-1, 8, 64)  # of 1024 bytes each
    first, apart = start // 1024, stride // 1024
    if runs_down:  # Two slabs of 64 columns; row k of each is row k of the operand.
        slabs = [groups[n::apart][:2].reshape(16, 64) for n in (first, first + leading // 1024)]
        return {"operand": torch.cat(slabs, 1).double()}
    column = start % 128 // 2
    rows = groups[first::apart][:8].reshape(64, 64)  # Row i of these is column i of the operand.
    return {"operand": rows[:, column : column + 16].T.double()}


def operand_address(start, leading, stride, k, i, runs_down):
    """The byte of shared memory at which wgmma finds the number (k, i) of its second operand, 16 x N.

    start, leading and stride are the descriptor's, in bytes: where the operand begins, how far the next slab of 64
    columns is, and how far the next 8 rows of the tile are. k counts what the product sums over. runs_down: whether k
    runs down the rows of the tile, as it does for V, or along them, as it does for K. A number has 2 bytes, and a row
    of the tile 128. The tile is swizzled.
    """
    if runs_down:
        a = start + i // 64 * leading + k // 8 * stride + k % 8 * 128 + i % 64 * 2
    else:
        a = start + i // 8 * stride + i % 8 * 128 + k * 2
    return a ^ (a >> 3 & 0x70)


def run(tile, start, leading, stride, runs_down, answer=operand_address):
    """{"operand": what lies at the addresses that were answered}; -1 where an address is outside of the tile."""
    flat, found = tile.flatten(), torch.full((16, 128 if runs_down else 64), -1.0)
    for k in range(16):
        for i in range(found.shape[1]):
            at = whole_numbers("operand_address", answer(start, leading, stride, k, i, runs_down))
            if 0 <= at < 2 * flat.numel() and at % 2 == 0:
                found[k, i] = flat[at // 2].item()
    return {"operand": found}


def expected(tile, start, leading, stride, runs_down):
    """What the instruction reads in the emulation, in two launches: a 16-bit number cannot hold every address."""
    parts = []
    index = torch.arange(tile.numel())
    for part in (index // 128, index % 128):
        found = torch.empty(16, 128 if runs_down else 64)
        launch("reads", part.bfloat16(), found, start, leading, stride, int(runs_down), block=128)
        parts.append(found)
    where = (128 * parts[0] + parts[1]).long()
    return {"operand": (tile.flatten().double()[where].float(), 0)}


def _case(says, start, leading, stride, runs_down):
    tile = torch.arange(128.0 * 64).reshape(128, 64)
    return Case(says, lambda: dict(tile=tile, start=start, leading=leading, stride=stride, runs_down=runs_down))


CASES = [
    _case("K, the first 16 columns", 0, 16, 1024, False),
    _case("K, the next 16 columns: the operand begins inside the swizzle's pattern", 32, 16, 1024, False),
    _case("V, the first 16 keys, in two slabs", 0, 8192, 1024, True),
    _case("V, keys 16 to 31", 2048, 8192, 1024, True),
    _case("K, every other group of 8 rows, and a leading that the hardware does not look at", 96, 4096, 2048, False),
    _case("V, the second group of 8 keys lies in the second half", 1024, 4096, 8192, True),
]


def explain(got, want, tile, start, leading, stride, runs_down):
    """The first number that is another one, and where it lies."""
    got, want = got["operand"], want["operand"][0]
    wrong = (got != want).nonzero().tolist()
    k, i = wrong[0]
    yours = "outside of the tile, or between two numbers" if got[k, i] < 0 else f"byte {2 * int(got[k, i])}"
    return [
        f"{len(wrong)} of {got.numel()} numbers are read at another address",
        f"the first one is (k, i) = ({k}, {i}): {yours}, expected byte {2 * int(want[k, i])}",
    ]


def _right(start, leading, stride, k, i, runs_down):
    if runs_down:
        return start + i // 64 * leading + k // 8 * stride + k % 8 * 128 + i % 64 * 2
    return start + i // 8 * stride + i % 8 * 128 + k * 2


def _swizzled(a):
    return a ^ (a >> 3 & 0x70)


def _to_right(change):
    """The right answer of changed arguments: `change` gets all of them and returns those that are other ones."""

    def answer(start, leading, stride, k, i, runs_down):
        given = dict(start=start, leading=leading, stride=stride, k=k, i=i, runs_down=runs_down)
        return _swizzled(_right(**given | change(**given)))

    return answer


MISTAKES = {
    "no_swizzle": ("the address is not swizzled", _right),
    "offset_swizzled": (
        "the distance from the operand's begin is swizzled, and not the address",
        lambda start, *x: start + _swizzled(_right(0, *x))),
    "exchanged": (
        "k and i are exchanged: V is read as if the sum ran along its rows, and K as if it ran down",
        _to_right(lambda runs_down, **_: dict(runs_down=not runs_down))),
    "no_stride": (
        "the rows are counted without the stride, as if each of them followed the one before",
        _to_right(lambda **_: dict(stride=1024))),
    "leading_left_out": (
        "leading is left out: a row of V is taken to go on behind its 64 numbers",
        _to_right(lambda **_: dict(leading=128))),
    "one_slab": (
        "leading is left out: the second slab of V is taken to be the first",
        _to_right(lambda i, **_: dict(i=i % 64))),
    "leading_for_stride": (
        "leading and stride are exchanged for V: its slabs lie leading apart, and its groups of 8 rows stride apart",
        _to_right(lambda leading, stride, runs_down, **_: dict(leading=stride, stride=leading) if runs_down else {})),
    "leading_for_chunks": (
        "leading is taken for the distance between the two chunks of a row of K, which follow each other",
        _to_right(lambda start, leading, k, runs_down, **_: {} if runs_down else
                  dict(start=start + k // 8 * (leading - 16)))),
    "elements_for_bytes": (
        "the column is counted in numbers, but an address counts bytes, and a number has 2",
        lambda *x: _swizzled(_right(*x) - (x[4] % 64 if x[5] else x[3]))),
    "one_byte": (
        "a number has 1 byte",
        lambda *x: _swizzled(_right(*x) - (x[4] % 64 if x[5] else x[3])) // 2 * 2),
}  # fmt: skip
