"""`python -m steps bench --tune`: whether a neighbour of a row in stage 03's tables of tiles is faster on this GPU.

The kernels take (Br, Bc, num_warps, num_stages) out of tables that were measured on an H200. A sweep times one row and
its neighbours: Br and Bc halved and doubled, 4 and 8 warps, one stage more and one less. They take turns on the same
random normal inputs. Whose turn it is stands in the table while the stage's own launcher runs, and the clock is read
before and after the one kernel that the table is for.
"""

import contextlib
import importlib
import itertools
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table

from steps import engine
from steps.bench import fingerprint, grid, rows, timing

STAGE = "03_triton"
FILES = {"tma": {"fwd": "fwd_1_tma", "bwd": "bwd_1_tma"}, "fused": {"fwd": "fwd_0_fused", "bwd": "bwd_0_fused"}}
KERNELS = {  # the pass, the name of the table and that of the kernel, and how many N x N x D products it makes
    "forward": ("fwd", "TILES", "forward_kernel", 2),
    "keys": ("bwd", "KEYS_TILES", "keys_kernel", 4),
    "queries": ("bwd", "QUERIES_TILES", "queries_kernel", 3),
}
TOO_SLOW = 3  # times as long as the table's own row


@dataclass(frozen=True)
class Target:
    """A row of a table: rung "tma" or "fused", one of KERNELS, a head_dim, and one of rows.DTYPES."""

    rung: str
    kernel: str
    D: int = 128
    dtype: str = "bf16"

    @property
    def file(self):
        return FILES[self.rung][KERNELS[self.kernel][0]]

    @property
    def table(self):
        """{largest head_dim: row}; rung fused has several, one for each kind of tiles."""
        of_rung = module(self.file)
        table = getattr(of_rung, KERNELS[self.kernel][1])
        if self.rung == "tma":
            return table
        kind = getattr(of_rung, "kind_of_tiles", of_rung.products)
        return table[kind(torch.empty(0, self.D, dtype=rows.DTYPES[self.dtype], device=engine.device))]

    @property
    def key(self):
        return min(head_dim for head_dim in self.table if self.D <= head_dim)

    @property
    def row(self):
        return self.table[self.key]

    @property
    def point(self):
        """16k tokens; a quarter in float32, which is slow without tensor cores."""
        return grid.Point(4, max(1, 2048 // self.D), 1024 if self.dtype == "fp32" else 4096, self.D)

    @property
    def flops(self):
        return self.point.flops("fwd") / 2 * KERNELS[self.kernel][3]

    def inputs(self, point):
        """What the launcher takes: q, k, v, or dout, q, k, v, out, lse."""
        dout, *qkv = grid.make_inputs(point, self.dtype, engine.device)
        if self.kernel == "forward":
            return qkv
        return [dout, *qkv, *module(FILES[self.rung]["fwd"]).forward(*qkv)]

    def run(self, inputs, row):
        """The launcher's results, computed with this row in the table."""
        launcher = "forward" if self.kernel == "forward" else "backward"
        with replaced(self.table, self.key, row):
            return getattr(module(self.file), launcher)(*inputs)


def module(file):
    return importlib.import_module(f"steps.step{STAGE}.{file}")


@contextlib.contextmanager
def replaced(table, key, value):
    """`value` stands in the table, until the end of the `with`."""
    before = table[key]
    table[key] = value
    try:
        yield value
    finally:
        table[key] = before


def neighbours(row):
    """The row, and after it those that are at most one step away in each of the four numbers."""
    Br, Bc, warps, stages = row
    steps = {Br // 2, Br, 2 * Br}, {Bc // 2, Bc, 2 * Bc}, {4, 8, warps}, {stages - 1, stages, stages + 1}
    near = [one for one in itertools.product(*map(sorted, steps)) if min(one[:2]) >= 16 and one[3] >= 1]
    return [row, *(one for one in near if one != row)]


def registers(target, row):
    """How many registers a thread needs for sums and tiles of scores alone. It has at most 255."""
    Br, Bc, warps, _ = row
    sums, tiles = {"forward": (Br, 1), "keys": (2 * Bc, 2), "queries": (Br, 2)}[target.kernel]
    return (sums * target.D + tiles * Br * Bc) / (32 * warps)


# --- who is left out ----------------------------------------------------------------------------------------


def cannot_run(target, track, about):
    """{row: why it cannot run, or None} for the table's row and its neighbours."""
    found = dict.fromkeys(neighbours(target.row))
    for row in found:
        if row != target.row and registers(target, row) > 255:
            found[row] = "needs more than 255 registers a thread"
    waiting = [row for row, reason in found.items() if not reason]
    tried = track(failures(target, waiting), total=len(waiting), description=f"{about}: compiling")
    return found | dict(zip(waiting, tried, strict=True))


def failures(target, waiting):
    """Yields for each row why it cannot run, or None. The rows are compiled in parallel processes."""
    workers, spawn = max(1, min(len(waiting), (os.cpu_count() or 2) - 2)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool:
        futures = [pool.submit(failure, target, row) for row in waiting]
        for row, future in zip(waiting, futures, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool:  # The compiler ended a process, and the others' results are lost with it.
                yield failure_alone(target, row)


def failure_alone(target, row):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(failure, target, row).result()
        except BrokenProcessPool:
            return "ends the compiler"


def failure(target, row):
    """Why the row cannot be compiled and run on a small input in this process, or None."""
    try:
        target.run(target.inputs(grid.Point(1, 1, 128, target.D)), row)
        timing.synchronize(engine.device)
    except Exception as problem:  # The compiler's errors are of many types.
        if type(problem).__name__ == "OutOfResources":
            return f"does not fit: {problem.name}"  # for example "shared memory"
        return f"does not compile: {type(problem).__name__}"
    return None


def wrong_or_slow(own, others, call, milliseconds):
    """{row: reason} of the others that compute something else than the table's row, or take far longer.

    call(row) gives the results and the moments before and after the kernel.
    """
    found, results = {}, call(own)[0]
    limit = TOO_SLOW * second_call(own, call, milliseconds)
    for row in others:
        if not is_alike(call(row)[0], results):
            found[row] = "computes something else"
        elif second_call(row, call, milliseconds) > limit:
            found[row] = f"more than {TOO_SLOW} times as slow"
    return found


def is_alike(got, own):
    """Whether results differ by rounding only."""
    pairs = ((x.float(), y.float()) for x, y in zip(got, own, strict=True))
    return all((x - y).norm() <= 0.01 * y.norm() for x, y in pairs)


def second_call(row, call, milliseconds):
    """Milliseconds of the kernel, if the row was called once before."""
    _, moments = call(row)
    timing.synchronize(engine.device)
    return milliseconds(*moments)


# --- the sweep ----------------------------------------------------------------------------------------------


class Timed:
    """Stands where a kernel stood, launches it, and notes the moments before and after."""

    def __init__(self, kernel, mark):
        self.kernel, self.mark, self.moments = kernel, mark, None

    def __getitem__(self, blocks):
        def launch(*arguments, **options):
            start = self.mark()
            self.kernel[blocks](*arguments, **options)
            self.moments = start, self.mark()

        return launch


def sweep(target, track=lambda items, **_: items, reps=timing.MIN_REPS, warmup=3):
    """What is found, to be shown, to be written as JSON and to be drawn by plots.tiles.

    {"rung", "kernel", "file", "source": hash of the file's code, "dtype", B, H, N, D, ..., "row": the table's,
    "candidates": [{"row", "tflops", and the fields of timing.Timing}], the fastest first, "left_out": [{"row",
    "reason"}]}. track(items, total=, description=) is that of rich.progress.Progress. RuntimeError if the table's own
    row cannot run.
    """
    about, name = f"{target.file}, {target.kernel}", KERNELS[target.kernel][2]
    mark, milliseconds = timing.clock(engine.device)
    reasons = cannot_run(target, track, about)
    if reasons[target.row]:
        raise RuntimeError(f"{about}: the table's own row, {words(target.row)}, {reasons[target.row]}")
    inputs = target.inputs(target.point)
    with replaced(vars(module(target.file)), name, Timed(getattr(module(target.file), name), mark)) as timed:

        def call(row):
            return target.run(inputs, row), timed.moments

        others = [row for row in reasons if row != target.row and not reasons[row]]
        reasons |= wrong_or_slow(target.row, others, call, milliseconds)
        noted = {row: [] for row, reason in reasons.items() if not reason}
        for i in track(range(warmup + reps), total=warmup + reps, description=f"{about}: timing"):
            first = i % len(noted)
            for row in [*noted][first:] + [*noted][:first]:
                noted[row].append(call(row)[1])
            timing.synchronize(engine.device)  # so that the progress bar tells the truth
    candidates = []
    for row, moments in noted.items():
        taken = timing.summary([milliseconds(*pair) for pair in moments[warmup:]])
        candidates.append({"row": list(row), "tflops": target.flops / taken.ms_median / 1e9, **vars(taken)})
    return {
        **{"rung": target.rung, "kernel": target.kernel, "file": target.file, "dtype": target.dtype},
        **{"source": fingerprint.code_hash(STAGE, target.file), **target.point.sizes, "row": list(target.row)},
        "candidates": sorted(candidates, key=lambda one: one["ms_median"]),
        "left_out": [{"row": list(row), "reason": reason} for row, reason in reasons.items() if reason],
    }


# --- how it is told -----------------------------------------------------------------------------------------


def words(row):
    """(64, 128, 4, 2) as "64x128, 4 warps, 2 stages"."""
    return "{}x{}, {} warps, {} stages".format(*row)


def own_row(found):
    """The candidate of a sweep that is the table's own row."""
    return next(one for one in found["candidates"] if one["row"] == found["row"])


def table(found):
    """A sweep as a table for the terminal."""
    title = f"{found['file']}, {found['kernel']} kernel, D = {found['D']}, {found['dtype']}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("Br x Bc", "warps", "stages", "TFLOP/s", "of the table's"):
        shown.add_column(name, justify="right")
    own = own_row(found)
    for one in found["candidates"]:
        Br, Bc, warps, stages = one["row"]
        ratio, style = own["ms_median"] / one["ms_median"], "bold" if one is own else ""
        note = "its row" if one is own else f"{ratio:.2f}"
        shown.add_row(f"{Br}x{Bc}", str(warps), str(stages), f"{one['tflops']:.4g}", note, style=style)
    return shown


def verdict(found):
    """One sentence: whether a neighbour is faster than the table's row by more than the noise.

    The noise is what lies between the 20th and the 80th percentile of the calls. Two rows differ if these do not meet.
    """
    own, best = own_row(found), found["candidates"][0]
    if best["ms_p80"] >= own["ms_p20"]:
        return f"No neighbour is faster than the table's {words(own['row'])} by more than the noise."
    faster, noise = own["ms_median"] / best["ms_median"], 50 * (own["ms_p80"] - own["ms_p20"]) / own["ms_median"]
    return (
        f"{words(best['row'])} is {faster:.2f} times as fast here as the table's {words(own['row'])}, which is more "
        f"than the noise of ±{noise:.1f}%."
    )


def left_out(found):
    """One line on the neighbours that were not timed, or an empty one."""
    reasons = Counter(one["reason"] for one in found["left_out"])
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"Left out: {told}." if told else ""
