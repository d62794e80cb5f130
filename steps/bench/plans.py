"""Who is measured: the stages' rungs as candidates, alone or with a switch turned, and what is recorded of 02 and 03.

`python -m steps bench --plan fast` measures one of PLANS, in parts of a few minutes on an H200. A rung is named by its
word; it is measured forward at its own kernel, and backward only where it has one of its own. The slow rungs are
measured at N = 4k alone. The plan `features` is that of feature_plan.py, and `ring` that of ring_plan.py.

With --sustained everybody is timed alone for a second, at N = 16k; see sustained.py. Without a --plan it is the best
rung beside the fastest peers. For an H200 100 s are planned: 42 s for 8 settings of 4 candidates, 1.3 s each, 35 s for
compiling, above all FlashAttention-4, and the rest for imports, first calls and checking the results.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from steps import catalogue, checks, engine
from steps.bench import ring_plan
from steps.bench.feature_plan import FeaturePart, GroupedPart
from steps.bench.grid import STANDARD_GRID, Beside, Candidate, Point, make_inputs, measure
from steps.bench.peers import COMPILED
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
    switches: bool = False  # also with one switch turned at a time; a backward also with a fixed order of dq
    stage: str = "02"
    limit_ms: float | None = None  # of one call, instead of the command's
    timed: str = "interleaved"  # or "sustained"

    def candidates(self):
        found = [candidate for rung in self.rungs for candidate in entrants(self.stage, rung)]
        turned = switched if "fwd" in self.passes else ordered
        return [one for c in found for one in turned(c)] if self.switches else found

    def record(self, **options):
        """Yields the rows, a matrix product beside interleaved ones of 16 bits; options as for grid.measure."""
        with_matmul = "fp32" not in self.dtypes and self.timed == "interleaved"
        how = dict(passes=self.passes, dtypes=self.dtypes, with_matmul=with_matmul, timed=self.timed)
        limit = {"limit_ms": self.limit_ms} if self.limit_ms else {}
        yield from measure(self.candidates(), self.peers, self.grid, **how, **options | limit)

    def compiled(self):
        """Who is compiled ahead: the candidates, and those of the peers that take long."""
        return [*self.candidates(), *(Beside(peer) for peer in self.peers if peer in COMPILED)]

    def jobs(self):
        """What is compiled ahead, in small pieces: arguments of `compile`."""
        # A small size is enough for every rung's own tile. A peer is compiled for its very sizes.
        small = dict.fromkeys(Point(1, 1, 128, point.D, point.causal) for point in self.grid)
        for dtype in self.dtypes:
            for n, one in enumerate(self.compiled()):
                yield from ((n, dtype, point) for point in (self.grid if isinstance(one, Beside) else small))

    def compile(self, n, dtype, point):
        """Calls one of `compiled` once."""
        inputs = make_inputs(point, dtype, engine.device)
        for pass_ in self.passes:
            self.compiled()[n].call(inputs, point.causal, pass_)()


def _at(*lengths, D=(64, 128)):
    return tuple(Point(16384 // N, 2048 // d, N, d, causal) for d in D for causal in (False, True) for N in lengths)


BEST = "sdpa-flash", "sdpa-cudnn", "fa4"  # the fastest that others have, where they are found
PLANS = {
    "fast": (Part(("hopper", "roles", "wgmma", "fa2", "cp_async", "ldmatrix"), peers=BEST),),
    "slow": (
        Part(("mma", "warp"), _at(4096)),
        Part(("scalar", "warp"), _at(4096), ("fwd", "bwd"), ("fp32",), ("sdpa-efficient",)),
    ),
    "bwd": (Part(("hopper", "wgmma", "fa2"), passes=("bwd",), peers=BEST),),
    "more": (
        Part(("hopper", "fa2"), _at(4096, 16384, D=(256,))),
        Part(("hopper", "fa2"), _at(4096), ("fwd", "bwd"), ("fp16",)),
    ),
    "switches": (
        Part(("hopper", "fa2"), _at(512, 4096, 16384), switches=True),
        Part(("hopper",), _at(4096, 16384), ("bwd",), switches=True),
    ),
    "triton": (
        Part(("gluon", "tma", "roles", "fused"), peers=BEST, stage="03"),
        Part(("tma", "fused"), passes=("bwd",), peers=BEST, stage="03"),
    ),
    "float32": (
        Part(
            ("fused",), _at(512, 4096, 16384), ("fwd", "bwd"), ("fp32",), ("sdpa-efficient",),
            stage="03", limit_ms=3000,  # The backward with head_dim 128 takes more than a second at N = 16k.
        ),
    ),
    "compilers": (
        Part(("gluon", "tma"), _at(16384), ("fwd", "bwd"), peers=("flex", "compiled", "fa4", "sdpa-cudnn"), stage="03"),
        Part(("gluon", "tma"), _at(16384), ("fwd", "bwd"), ("fp16",), ("tutorial", "sdpa-cudnn"), stage="03"),
    ),
    "features": (FeaturePart(),),
    "grouped": (GroupedPart(),),
    "ring": (ring_plan.RingPart(ring_plan.ALL),),
    **{f"ring-{name}": (ring_plan.RingPart((name,)),) for name in ring_plan.NAMES},
}  # fmt: skip


LONG = 16384  # A call has to take milliseconds, or else a second of calls measures how fast they are launched.


def sustained(names=(), number="02", rung=None):
    """The parts of these PLANS as they are with --sustained: at N = 16k, and D = 128 first.

    Without names it is one part: a rung of the stage, by default the first, beside the fastest peers.
    """
    parts = [part for name in names for part in PLANS[name] if isinstance(part, Part)]
    if not names:
        rung = rung or catalogue.stage(number).SUPPORTS["rungs"][0]
        parts = [Part((rung,), passes=("fwd", "bwd"), peers=BEST, stage=number)]
    long = {part: sorted((p for p in part.grid if p.N == LONG), key=lambda p: p.D != 128) for part in parts}
    return [replace(part, grid=tuple(points), timed="sustained") for part, points in long.items() if points]


def entrants(number, rung=None):
    """The stage's rungs, or one of them, as candidates for the benchmark."""
    module = catalogue.stage(number)
    for word in module.SUPPORTS["rungs"]:
        if rung in (None, word):
            own = checks.limits(module.SUPPORTS, word)
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
    """Candidates: the rung's forward as it is, with one switch turned at a time, and with an exponent of one FMA.

    The last, for the rungs of SEPARATE, is wrong for large scores. All are called in launch.py, because the stage's own
    forward takes no switches.
    """
    forward = partial(launch.forward, rung=candidate.fwd_kernel.split("_", 2)[2])
    yield replace(candidate, forward=forward)
    for name, values in switches((launch.HERE / f"{candidate.fwd_kernel}.cu").read_text()).items():
        for value in values:
            turned = partial(forward, **{name: value})
            kernel = f"{candidate.fwd_kernel}:{name}={value}"
            yield replace(candidate, fwd_kernel=kernel, forward=turned, bwd_kernel=None, backward=None)
    if candidate.fwd_kernel in SEPARATE:
        kernel = f"{candidate.fwd_kernel}:LARGE_SCORES=0"
        fused = partial(launch.forward, rung=fused_row(forward.keywords["rung"]))
        yield replace(candidate, fwd_kernel=kernel, forward=fused, bwd_kernel=None, backward=None)


# The part of a rung's text that keeps the compiler from making the exponent one FMA, and the text in which it is one.
# An FMA is wrong for large scores, and its time shows what being right costs. This is no macro in the kernel, because a
# kernel to copy should not offer what is wrong.
SEPARATE = {
    "fwd_5_fa2": ("__fmul_rn(scale_log2, e < 4 ? near[e] : far[e - 4])", "scale_log2 * (e < 4 ? near[e] : far[e - 4])"),
    "fwd_8_hopper": ("exponent_factor(m_new[r], scale_log2)", "scale_log2"),
}


@functools.cache
def fused_row(rung):
    """The ladder's row of the rung, with a file in which the exponent is one FMA."""
    row = launch.ladder.FORWARD[rung]
    text = (launch.HERE / row.file).read_text()
    separate, fused = SEPARATE[Path(row.file).stem]
    if text.count(separate) != 1:
        raise ValueError(f"{row.file} has changed: it holds {separate!r} {text.count(separate)} times, not once.")
    file = Path(_folder().name) / row.file
    file.write_text(text.replace(separate, fused))
    return replace(row, file=str(file))


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory()  # until this process ends


def ordered(candidate):
    """The rung's backward, and the same with a fixed order of the additions to dq, as candidates."""
    yield candidate
    backward = partial(candidate.backward, deterministic=True)
    yield replace(candidate, bwd_kernel=f"{candidate.bwd_kernel}:DETERMINISTIC=1", backward=backward)


def switches(text):
    """{name: other values} of a .cu file's switches: macros that are 0, 1 or an (expression) unless defined."""
    found = re.findall(r"^#ifndef (\w+).*\n#define \1 ([01]|\(.*\))$", text, re.M)
    return {name: (0, 1) if usual.startswith("(") else (1 - int(usual),) for name, usual in found}


def record_parts(parts, **options):
    """Yields the rows of parts of PLANS; options as for grid.measure."""
    compile_ahead([(part, *job) for part in dict.fromkeys(parts) for job in part.jobs()])
    for part in parts:
        yield from part.record(**options)


def compile_ahead(jobs):
    """Calls what is to be compiled once, in parallel processes, which leave what they compile on disk.

    Who fails here fails again when it is measured, and is left out there with the reason.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise each process would start many more
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # otherwise it keeps nothing on disk
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    spawn = multiprocessing.get_context("spawn")
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, spawn) as pool:
        list(pool.map(_compile, jobs))


def _compile(job):
    part, *which = job
    with contextlib.suppress(Exception):
        part.compile(*which)
        synchronize(engine.device)
    torch.cuda.empty_cache()  # The other processes need memory, too.
