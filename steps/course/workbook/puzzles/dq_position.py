"""Where rung wgmma's backward keeps the sum of one number of dQ, which its warps add in the order of registers."""

import torch

from steps.course.workbook.puzzles import Case, whole_numbers
from steps.step02_fa2_cuda import calls


def specification(q, k, v, dout):
    """dq without the factor scale, in float32: dS K, whose tiles of Br queries the kernel keeps in another order."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    P = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    dP, delta = dout @ v.mT, (dout * (P @ v)).sum(-1, keepdim=True)
    return {"dq": P * (dP - delta) @ k}


def dq_position(row, column, D):
    """The index of the number (row, column) of a tile of dQ_i among the 8192 numbers of the tile in dq.

    Each of the 8 warps owns 1024 numbers, those of warp w from 1024 w on. Two warpgroups of 4 warps compute a tile.
    If D = 64 the tile has 128 rows, and each warpgroup computes 64 rows of it. If D = 128 it has 64 rows, and each
    warpgroup computes 64 columns. A warp has 16 rows of its warpgroup's 64 x 64 numbers, and its lanes hold them as
    wgmma leaves them, 32 in each lane:

        lane t has the rows t / 4 and t / 4 + 8, and of each the columns 8 i + 2 (t % 4) and the next one;
        register 4 i + e: e = 0, 1 are the two columns in the first row, e = 2, 3 those in the second row.

    A warp adds four registers of every lane at a time, lane after lane: registers 0 to 3 of lane 0, of lane 1, ... of
    lane 31, then registers 4 to 7 of lane 0, and so on.
    """
    warp = row // 16 if D == 64 else column // 64 * 4 + row // 16
    lane = row % 8 * 4 + column % 8 // 2
    i = column % 64 // 8
    e = row // 8 % 2 * 2 + column % 2
    return 1024 * warp + (32 * i + lane) * 4 + e


def run(q, k, v, dout, answer=dq_position):
    """{"dq": what lies at the positions that were answered}; NaN where there is no such position."""
    D, Br = q.shape[-1], 8192 // q.shape[-1]
    sums = _sums(q, k, v, dout).reshape(-1, 8192)  # a row for each tile of queries
    answers = [[answer(row, column, D) for column in range(D)] for row in range(Br)]
    places = torch.tensor([[whole_numbers("dq_position", x) for x in row] for row in answers])
    found = sums[:, places.clamp(0, 8191)]  # (tiles, Br, D)
    found[:, (places < 0) | (places > 8191)] = torch.nan
    return {"dq": found.reshape(1, 1, -1, D)[:, :, : q.shape[2]]}


_kept = {}


def _sums(q, k, v, dout):
    """What the kernel of rung wgmma adds up in dq, as it lies in memory. In the emulation, also if there is a GPU."""
    key = q.shape
    if key not in _kept:
        S = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        out, lse = (S.softmax(-1) @ v.double()).to(q.dtype), S.logsumexp(-1).float()
        sums = calls.start_gradients(dout, out, lse, rung="wgmma")
        calls.add_gradients(sums, dout, q, k, v)
        _kept[key] = sums.dq_sum
    return _kept[key]


def expected(**inputs):
    want = specification(**inputs)["dq"]
    return {"dq": (want, 0.03 * want.abs().max().item())}


def _case(says, N, D):
    def inputs():
        tensors = torch.randn(4, 1, 1, N, D, generator=torch.Generator().manual_seed(0)).bfloat16()
        return dict(zip(("q", "k", "v", "dout"), tensors, strict=True))

    return Case(says, inputs)


CASES = [
    _case("D = 64: a tile has 128 rows, and a warpgroup 64 of them", 192, 64),
    _case("D = 128: a tile has 64 rows, and a warpgroup 64 columns of each", 128, 128),
]


def explain(got, want, q, **_):
    """How many numbers are other ones, and in which rows and columns of the first tile."""
    D = q.shape[-1]
    wrong = ~((got["dq"] - want["dq"][0]).abs() <= want["dq"][1])[0, 0, : 8192 // D]
    rows, columns = (sorted(set(x.tolist())) for x in wrong.nonzero().T)
    kinds = {"row": rows, "column": columns}
    says = [f"{name}s {found[0]} to {found[-1]}, {len(found)} of them" for name, found in kinds.items()]
    first = wrong.nonzero()[0].tolist()
    return [
        f"{wrong.sum()} of the first tile's {wrong.numel()} numbers are other ones: {'; '.join(says)}",
        f"the first one is (row, column) = {tuple(first)}",
    ]


def _mistaken(warp=None, e=None, step=None):
    """dq_position with other rules for the warp, for the register among four, or for the order of the lanes."""

    def position(row, column, D):
        own = warp(row, column, D) if warp else row // 16 if D == 64 else column // 64 * 4 + row // 16
        lane, i = row % 8 * 4 + column % 8 // 2, column % 64 // 8
        register = e(row, column) if e else row // 8 % 2 * 2 + column % 2
        return 1024 * own + (step(i, lane) if step else (32 * i + lane) * 4) + register

    return position


MISTAKES = {
    "rows_at_128": (
        "at D = 128 the two warpgroups have different rows, as they have at D = 64",
        _mistaken(lambda row, column, D: row // 16 if D == 64 else row // 8)),
    "one_warpgroup": (
        "at D = 64 the warps of the second warpgroup are those of the first",
        _mistaken(lambda row, column, D: row // 16 % 4 + column // 64 * 4)),
    "warps_interleaved": (
        "the warps take turns: of each warpgroup first one, then the other",
        _mistaken(lambda row, column, D: row // 16 % 4 * 2 + (row // 64 if D == 64 else column // 64))),
    "rows_first": (
        "a lane's four numbers are the two rows of one column, and then those of the next column",
        _mistaken(e=lambda row, column: column % 2 * 2 + row // 8 % 2)),
    "row_by_row": (
        "dQ lies row by row, as in the output, and not in the order of the registers",
        lambda row, column, D: row * D + column),
    "lanes_down": (
        "the lanes go down the rows first: lane t has the row t mod 8 and the columns 2 (t div 8)",
        _mistaken(step=lambda i, lane: (32 * i + lane % 4 * 8 + lane // 4) * 4)),
    "lane_by_lane": (
        "all 32 registers of lane 0 come first, then all of lane 1",
        _mistaken(step=lambda i, lane: 32 * lane + 4 * i)),
}  # fmt: skip
