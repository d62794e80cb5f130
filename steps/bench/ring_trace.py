"""What a GPU does in one call of the ring: when it computes, when it moves data, when it waits for the other ranks.

    lane "computes"   kernels on the stream of the blocks
    lane "moves"      copies between GPUs on other streams, and NCCL's kernels
    lane "waits"      barriers of all ranks

From torch's profiler, in the process of a rank. ring_plan.py makes rows of the shares, and a record of the spans of one
call, which plots.trace draws.
"""

from itertools import groupby

import torch
import torch.distributed as dist

from steps import engine
from steps.bench import timing
from steps.bench.ring_calls import call_of

LANES = "computes", "moves", "waits"
CALLS = 6  # that are profiled, one after the other


def trace(case, who, pass_):
    """What `shares` says of this rank, and {"spans": those of the last call}."""
    call = call_of(case, who, pass_)
    for _ in range(2):
        call()
    dist.barrier()
    timing.synchronize(engine.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        timing.synchronize(engine.device)
    spans = spans_of(profiler.events())
    return shares(spans, CALLS) | {"spans": last_call(spans, CALLS)}


def spans_of(events):
    """[(lane, stream, name, start, end)] in microseconds of a profiler's events on the GPU, in the order of start."""
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [(e.device_resource_id, e.name, e.time_range.start, e.time_range.end) for e in on_gpu]
    found = [one for one in found if not one[1].startswith("nccl:")]  # torch's words around NCCL's kernels
    blocks = [stream for stream, name, *_ in found if "attention" in name]
    if not blocks:
        raise ValueError("the profiler has seen no block")
    blocks_on = max(set(blocks), key=blocks.count)
    with_lanes = ((lane(stream, name, blocks_on), stream, name, start, end) for stream, name, start, end in found)
    return sorted((one for one in with_lanes if one[4] > one[3]), key=lambda one: one[3])


def lane(stream, name, blocks_on):
    """One of LANES. A copy beside the blocks is one inside of the GPU."""
    if "nccl" in name.lower():
        return "moves"
    if "barrier" in name.lower():
        return "waits"
    return "computes" if stream == blocks_on else "moves"


def shares(spans, calls):
    """{"ms": of a call, "hidden", "idle", "launches"}.

    hidden: the share of the time of moving in which a kernel computes. idle: the share of all time in which none does.
    """
    computing, moving = ([one[3:] for one in spans if one[0] == name] for name in ("computes", "moves"))
    if not moving:
        raise ValueError("nothing moves between the GPUs")
    start, end = min(one[3] for one in spans), max(one[4] for one in spans)
    both = length(computing) + length(moving) - length(computing + moving)
    idle = 1 - length(computing) / (end - start)
    ms = (end - start) / calls / 1e3
    return {"ms": ms, "hidden": both / length(moving), "idle": idle, "launches": len(spans) / calls}


def length(spans):
    """How long at least one of the spans (start, end) lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def last_call(spans, calls):
    """[[lane, name, start, end]] in microseconds of the last of so many equal calls, which begins at 0."""
    chosen = []
    for _, of_stream in groupby(sorted(spans, key=lambda one: one[1]), key=lambda one: one[1]):
        some = list(of_stream)  # a stream does the same in every call, in the same order
        chosen += some[-(len(some) // calls) :] if len(some) >= calls else []
    first = min(one[3] for one in chosen)
    chosen.sort(key=lambda one: one[3])
    return [[lane, name[:40], round(a - first, 1), round(b - first, 1)] for lane, _, name, a, b in chosen]
