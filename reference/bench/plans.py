"""What is recorded of stage 02, in parts: `python -m steps bench --plan fast` measures one of them.

A rung is named by its word. It is measured forward at its own kernel, and backward only where it has one of its own. Each part is
a few minutes on an H200; the slow rungs are measured at N = 4k alone.
"""

from dataclasses import dataclass

from reference.bench.grid import STANDARD_GRID, Point


@dataclass(frozen=True)
class Part:
    """One call of `grid.measure`: these rungs, interleaved with these peers."""

    rungs: tuple[str, ...]
    grid: tuple[Point, ...] = STANDARD_GRID
    passes: tuple[str, ...] = ("fwd",)
    dtypes: tuple[str, ...] = ("bf16",)
    peers: tuple[str, ...] = ("sdpa-flash", "sdpa-cudnn")
    switches: bool = False  # each rung also with each of its switches turned, and only forward


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
}
