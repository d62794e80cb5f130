"""`python -m steps.course.bench.tune`: whether a neighbour of a row in stage 03's tables of tiles is faster here.

The kernels take (Br, Bc, num_warps, num_stages) out of tables that were measured on an H200. A sweep times a row and
its neighbours, in turn, on the same random normal inputs: Br and Bc halved and doubled, 4 and 8 warps, one stage more
and one less. Whose turn it is stands in the table while the stage's own launcher runs.
"""

import itertools
from functools import partial
from typing import Annotated

import typer

from steps import engine
from steps.course.bench import grid, timing
from steps.course.bench.cost import Point

TABLES = {"forward": "TILES", "dkdv": "DKDV_TILES", "dq": "DQ_TILES"}


def neighbours(row):
    """The row, and after it those that are at most one step away in each of the four numbers."""
    Br, Bc, warps, stages = row
    steps = {Br // 2, Br, 2 * Br}, {Bc // 2, Bc, 2 * Bc}, {4, 8, warps}, {stages - 1, stages, stages + 1}
    near = [one for one in itertools.product(*map(sorted, steps)) if min(one[:2]) >= 16 and one[3] >= 1]
    return [row, *(one for one in near if one != row)]


def sweep(table, key, plan, **how):
    """{row: its times} of the table's row of this key and its neighbours; it is printed who cannot run.

    plan() runs the launcher, which reads the table, and returns a call of what it has recorded. how: for `interleaved`.
    """
    own, calls = table[key], {}
    for row in neighbours(own):
        table[key] = row
        try:
            calls[row] = plan()
        except Exception as problem:  # The compiler's errors are of many types.
            print(f"left out: {row}: {grid.in_words(problem)}")
    table[key] = own
    return timing.interleaved(calls, **how)


def main(
    table: Annotated[str, typer.Argument(help=", ".join(TABLES))] = "forward",
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 128,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
):
    """Times the neighbours of a row of rung tma's tables, fastest first; a Hopper GPU is needed."""
    if engine.name != "cuda":
        raise SystemExit("This needs a GPU: simulators say nothing about speed.")
    from steps.step03_triton import bwd_1_tma, fwd_1_tma  # imported here because Triton is not available everywhere

    dout, *inputs = grid.make_inputs(Point(4, max(1, 2048 // head_dim), 4096, head_dim), dtype, engine.device)
    module, launcher = fwd_1_tma, fwd_1_tma.forward
    if table != "forward":
        module, launcher, inputs = bwd_1_tma, bwd_1_tma.backward, [dout, *inputs, *launcher(*inputs)]
    tiles = getattr(module, TABLES[table])

    def plan():
        launcher.clear()  # what it has recorded with another row
        launcher(*inputs)
        return partial(launcher.first(*inputs)[1], *inputs)

    key = min(largest for largest in tiles if head_dim <= largest)
    found = sweep(tiles, key, plan, device=engine.device)
    for row, taken in sorted(found.items(), key=lambda one: one[1]["ms_median"]):
        words = "{}x{}, {} warps, {} stages".format(*row) + ", the table's own" * (row == tiles[key])
        print(f"{words}: {taken['ms_median']:.3g} ms ±{timing.spread(taken):.1f}%")


if __name__ == "__main__":
    typer.run(main)
