"""Who is measured: the stages' rungs as candidates, alone or with a switch turned, and what is recorded of 02 and 03.

`python -m steps bench --plan fast` measures one of PLANS, in parts of a few minutes on an H200. A rung is named by its
word; it is measured forward at its own kernel, and backward only where it has one of its own. The slow rungs are
measured at N = 4k alone.
"""

import contextlib
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from steps import catalogue, contract, engine
from steps.bench.grid import STANDARD_GRID, Candidate, Point, make_inputs, measure
from steps.bench.rows import DTYPES
from steps.bench.timing import synchronize
from steps.step02_fa2_cuda import launch


@dataclass(frozen=True)
class Part:
    """One call of `grid.measure`: these rungs, interleaved with these peers."""

    rungs: tuple[str, ...]
    grid: tuple[Point, ...] = STANDARD_GRID
    passes: tuple[str, ...] = ("fwd",)
    dtypes: tuple[str, ...] = ("bf16",)
    peers: tuple[str, ...] = ("sdpa-flash", "sdpa-cudnn")
    switches: bool = False  # each rung also with each of its switches turned, and only forward
    stage: str = "02"

    def candidates(self):
        found = [candidate for rung in self.rungs for candidate in entrants(self.stage, rung)]
        return [one for c in found for one in (c, *switched(c))] if self.switches else found


def _at(*lengths, D=(64, 128)):
    return tuple(Point(16384 // N, 2048 // d, N, d, causal) for d in D for causal in (False, True) for N in lengths)


PLANS = {
    "fast": (Part(("hopper", "roles", "wgmma", "fa2", "cp_async", "ldmatrix")),),
    "slow": (
        Part(("mma", "warp"), _at(4096)),
        Part(("scalar",), _at(4096), ("fwd", "bwd"), ("fp32",), ("sdpa-efficient",)),
    ),
    "bwd": (Part(("hopper", "wgmma", "fa2"), passes=("bwd",)),),
    "more": (
        Part(("hopper", "fa2"), _at(4096, 16384, D=(256,))),
        Part(("hopper", "fa2"), _at(4096), ("fwd", "bwd"), ("fp16",)),
    ),
    "switches": (Part(("hopper",), _at(512, 4096, 16384), switches=True),),
    "triton": (
        Part(("gluon", "tma", "roles", "fused"), stage="03"),
        Part(("tma", "fused"), passes=("bwd",), stage="03"),
        Part(("fused",), _at(512, 4096, 16384), ("fwd", "bwd"), ("fp32",), ("sdpa-efficient",), stage="03"),
    ),
    "compilers": (
        Part(("gluon", "tma"), _at(16384), ("fwd", "bwd"), peers=("flex", "compiled", "sdpa-cudnn"), stage="03"),
    ),
}


def entrants(number, rung=None):
    """The stage's rungs, or one of them, as candidates for the benchmark."""
    module = catalogue.stage(number)
    for word in module.SUPPORTS["rungs"]:
        if rung in (None, word):
            own = contract.limits(module.SUPPORTS, word)
            backward = stem(module, "bwd", word)
            yield Candidate(
                module.SUPPORTS["stage"].removeprefix("step"),
                stem(module, "fwd", word),
                partial(module.forward, rung=word),
                backward,
                backward and partial(module.backward, rung=word),
                dtypes=[name for name, dtype in DTYPES.items() if dtype in own["dtypes"]],
            )


def stem(module, prefix, word):
    """The name of the rung's file, "fwd_5_fa2" for ("fwd", "fa2"), or None if it has none of its own."""
    return next((path.stem for path in Path(module.__file__).parent.glob(f"{prefix}_*_{word}.*")), None)


def switched(candidate):
    """fwd_8_hopper with one of its switches turned at a time, as candidates."""
    for name, values in switches((launch.HERE / f"{candidate.fwd_kernel}.cu").read_text()).items():
        for value in values:
            turned = partial(launch.forward, rung="hopper", **{name: value})
            kernel = f"{candidate.fwd_kernel}:{name}={value}"
            yield replace(candidate, fwd_kernel=kernel, forward=turned, bwd_kernel=None, backward=None)


def switches(text):
    """{name: other values} of a .cu file's switches: macros that are 0, 1 or an (expression) unless defined."""
    found = re.findall(r"^#ifndef (\w+).*\n#define \1 ([01]|\(.*\))$", text, re.M)
    return {name: (0, 1) if usual.startswith("(") else (1 - int(usual),) for name, usual in found}


def record_parts(parts, **options):
    """Yields the rows of parts of PLANS, a matrix product beside those of 16 bits; options as for grid.measure."""
    compile_ahead(list(dict.fromkeys(job for part in parts for job in _jobs(part))))
    for part in parts:
        how = dict(passes=part.passes, dtypes=part.dtypes, with_matmul="fp32" not in part.dtypes)
        yield from measure(part.candidates(), part.peers, part.grid, **how, **options)


def _jobs(part):
    """What a part compiles, in small pieces: (the part, which candidate, dtype, head_dim, causal)."""
    for dtype in part.dtypes:
        for D, causal in dict.fromkeys((point.D, point.causal) for point in part.grid):
            yield from ((part, n, dtype, D, causal) for n in range(len(part.candidates())))


def compile_ahead(jobs):
    """Calls every candidate once on a tiny input, in parallel processes, which leave what they compile on disk.

    A candidate that fails here fails again when it is measured, and is left out there with the reason.
    """
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    spawn = multiprocessing.get_context("spawn")
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, spawn) as pool:
        list(pool.map(_compile, jobs))


def _compile(job):
    part, n, dtype, D, causal = job
    one = part.candidates()[n]
    dout, q, k, v = make_inputs(Point(1, 1, 128, D), dtype, engine.device)  # enough for every rung's own tile
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        out, lse = one.forward(q, k, v, causal=causal)
        if "bwd" in part.passes:
            one.backward(dout, q, k, v, out, lse, causal=causal)
        synchronize(engine.device)
