"""Timing several implementations against each other, fairly.

Every round calls each candidate once, and each round begins with the next one. A GPU's clock drifts by several per cent
with heat and power, and this way the drift affects all candidates alike; triton.testing.do_bench, which times one
function to the end before the next, does not have this property. The result is a median, because a stray interruption
only ever makes a call longer.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

MIN_REPS = 30  # what a results row needs


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median, the 20th and 80th percentile, and over how many calls."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    reps: int


def interleaved(calls, *, reps=MIN_REPS, warmup=3, device="cpu"):
    """{name: Timing} for `calls`, a dict of functions without arguments, after `warmup` untimed rounds.

    device: "cuda" times with events on the current stream, anything else with the host's clock. In a process group the
    time of a call is that of its slowest rank, and every rank must pass the same calls in the same order.
    """
    mark, milliseconds = clock(device)
    names = list(calls)
    marks = {name: [] for name in names}
    for i in range(warmup + reps):
        first = i % len(names) if names else 0
        for name in names[first:] + names[:first]:
            start = mark()
            calls[name]()
            marks[name].append((start, mark()))
    # Waiting only here keeps the GPU's queue full, so that the launch of a kernel overlaps with the kernel before it.
    synchronize(device)
    times = {name: [milliseconds(*pair) for pair in pairs[warmup:]] for name, pairs in marks.items()}
    return {name: summary(_slowest_rank(ms, device)) for name, ms in times.items()}


def one_call(call, *, device="cpu"):
    """Milliseconds of a single call, waiting included: enough to see whether thirty more are affordable."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def summary(ms):
    """The Timing of a list of milliseconds."""
    p20, median, p80 = np.percentile(ms, (20, 50, 80))
    return Timing(float(median), float(p20), float(p80), len(ms))


def synchronize(device):
    """Waits until the device has done all that was asked of it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def clock(device):
    """(mark, milliseconds): mark() notes a moment, milliseconds(a, b) is the time between two of them."""
    if torch.device(device).type != "cuda":
        return time.perf_counter, lambda a, b: 1e3 * (b - a)

    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark, lambda a, b: a.elapsed_time(b)


def _slowest_rank(ms, device):
    """Call by call, the longest time that any rank took; ms itself without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return ms
    longest = torch.tensor(ms, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()
