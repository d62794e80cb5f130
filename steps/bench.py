"""Who takes part in `python -m steps bench`: the stages' rungs, alone or with a switch turned; and compiling them ahead."""

import contextlib
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path

from reference.bench.grid import Candidate, Point, make_inputs, measure
from reference.bench.rows import DTYPES
from reference.bench.timing import synchronize
from steps import compare, contract, engine


def entrants(number, rung=None):
    """The stage's rungs, or one of them, as candidates for the benchmark."""
    module, supports = compare.stage(number), compare.stage(number).SUPPORTS
    for word in supports["rungs"]:
        if rung in (None, word):
            own = contract.limits(supports, word)
            backward = stem(module, "bwd", word)
            yield Candidate(
                supports["stage"].removeprefix("step"),
                stem(module, "fwd", word), partial(module.forward, rung=word),
                backward, backward and partial(module.backward, rung=word),
                dtypes=[name for name, dtype in DTYPES.items() if dtype in own["dtypes"]],
                head_dims=own["head_dims"], gqa=own["gqa"],
            )  # fmt: skip


def stem(module, prefix, word):
    """The name of the rung's file, "fwd_5_fa2" for ("fwd", "fa2"), or None if it has none of its own."""
    return next((path.stem for path in Path(module.__file__).parent.glob(f"{prefix}_*_{word}.*")), None)


def switched(candidate):
    """fwd_8_hopper with one of its switches turned at a time, as candidates."""
    from steps.step02_fa2_cuda import hopper

    for name, values in switches((hopper.HERE / f"{candidate.fwd_kernel}.cu").read_text()).items():
        for value in values:
            turned, kernel = partial(hopper.hopper_forward, **{name: value}), f"{candidate.fwd_kernel}:{name}={value}"
            yield replace(candidate, fwd_kernel=kernel, forward=turned, bwd_kernel=None, backward=None)


def switches(text):
    """{name: values} of a .cu file's switches: a macro that is 0 or 1 unless defined can be the other, an (expression) either."""
    found = re.findall(r"^#ifndef (\w+).*\n#define \1 ([01]|\(.*\))$", text, re.M)
    return {name: (0, 1) if usual.startswith("(") else (1 - int(usual),) for name, usual in found}


def record_parts(parts, **options):
    """Yields the rows of parts of stage 02's plan, a matrix product beside them; options as for grid.measure."""
    compile_ahead(list(dict.fromkeys(job for part in parts for job in _jobs(part))))
    for part in parts:
        how = dict(passes=part.passes, dtypes=part.dtypes, with_matmul="fp32" not in part.dtypes)
        yield from measure(_candidates(part), part.peers, part.grid, **how, **options)


def _candidates(part):
    found = [c for rung in part.rungs for c in entrants("02", rung)]
    return [one for c in found for one in (c, *switched(c))] if part.switches else found


def _jobs(part):
    """What a part compiles, in small pieces: (the part, which candidate, dtype, head_dim, causal)."""
    for dtype in part.dtypes:
        for D, causal in dict.fromkeys((point.D, point.causal) for point in part.grid):
            yield from ((part, n, dtype, D, causal) for n in range(len(_candidates(part))))


def compile_ahead(jobs):
    """Calls everybody once on a tiny input, in parallel processes: what is compiled stays on disk, and measuring need not wait.

    Who fails here fails when measured, too, and says why there.
    """
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    spawn = multiprocessing.get_context("spawn")
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, spawn) as pool:
        list(pool.map(_compile, jobs))


def _compile(job):
    part, n, dtype, D, causal = job
    one = _candidates(part)[n]
    dout, q, k, v = make_inputs(Point(1, 1, 64, D), dtype, engine.device)
    try:
        out, lse = one.forward(q, k, v, causal=causal)
        if "bwd" in part.passes:
            one.backward(dout, q, k, v, out, lse, causal=causal)
        synchronize(engine.device)
    except (RuntimeError, TypeError, ValueError):
        pass
