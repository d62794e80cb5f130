"""Timing several implementations against each other, fairly, in two ways that are never compared.

interleaved   Every round calls each candidate once, and each round begins with the next one. A GPU's clock drifts by
              several per cent with heat and power, and this way the drift affects all candidates alike;
              triton.testing.do_bench, which times one function to the end before the next, lacks this property.
sustained     A second of calls of one candidate, then of the next, with the GPU's clock and power meanwhile.

They differ because a GPU lowers its clock as soon as it would need more power than its limit. Interleaved, all
candidates run at nearly the same clock, which depends on the power of all. Sustained, each has the clock that its own
power leaves it: a kernel that needs less energy for the same work gets a higher clock, and this is how it would run in
a program that does little else. Times are medians, because a stray interruption only ever makes a call longer.
"""

import contextlib
import itertools
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import torch
import torch.distributed as dist

MIN_REPS = 30  # what a results row needs
IDLE = 0.3  # seconds without work before each candidate, so that each begins alike
SETTLE, MEASURED = 0.25, 0.75  # seconds of calls: until the power limit has set the clock, and those that count
MIN_SAMPLES = 3
# Since Ampere power.draw is an average over the last second, which would be partly of another candidate. What an older
# GPU does not know, it gives as [N/A]; there power.draw is not an average.
QUERY = "timestamp,clocks.sm,power.draw.instant,power.draw"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median, the 20th and 80th percentile, and over how many calls."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    reps: int


@dataclass(frozen=True)
class Load(Timing):
    """A Timing with the medians of the SM clock in MHz and of the board's power in watts during these calls."""

    clock_mhz: float
    watts: float


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
    return {name: summary(slowest_rank(ms, device)) for name, ms in times.items()}


def one_call(call, *, device="cpu"):
    """Milliseconds of a single call, waiting included: enough to see whether thirty more are affordable."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def host_us(call, *, rounds=50, calls=20, device="cuda"):
    """Microseconds that a call takes the CPU, which does not wait for the GPU.

    The lowest of many rounds, because anything else that the host does only adds time. So few calls fit into the GPU's
    queue, so that the host never waits for a place in it.
    """
    found = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    return min(found)


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


def slowest_rank(ms, device):
    """Call by call, the longest time that any rank took; ms itself without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return ms
    longest = torch.tensor(ms, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()


# --- sustained load -----------------------------------------------------------------------------------------


def sustained(calls, *, warmup=3, device="cuda"):
    """{name: Load} for `calls`, a dict of functions without arguments: a second of each, after `warmup` calls.

    Takes IDLE + SETTLE + MEASURED seconds for each, and longer for a call of more than 25 ms. The order is random,
    because the GPU gets warmer, and then needs more power. RuntimeError where nvidia-smi gives no clock or power.
    """
    return {name: alone(calls[name], warmup, device) for name in random.sample(list(calls), len(calls))}


def alone(call, warmup, device):
    """The Load of one candidate."""
    with watched(device) as samples:
        time.sleep(IDLE)
        for _ in range(warmup):
            call()
        settling = back_to_back(call, how_often(SETTLE, one_call(call, device=device)), device)
        reps = max(MIN_REPS, how_often(MEASURED, statistics.median(settling)))
        start = datetime.now()
        ms = back_to_back(call, reps, device)
        end = datetime.now()
    clock_mhz, watts = medians(samples, start, end)
    return Load(**vars(summary(ms)), clock_mhz=clock_mhz, watts=watts)


def how_often(seconds, ms):
    """How many calls take about so many seconds, if one takes `ms` milliseconds."""
    return max(1, round(1e3 * seconds / ms))


def back_to_back(call, reps, device):
    """Milliseconds of each of `reps` calls. Nothing waits between them, and the end of one is the start of the next."""
    mark, milliseconds = clock(device)
    marks = [mark()]
    for _ in range(reps):
        call()
        marks.append(mark())
    synchronize(device)
    return [milliseconds(*pair) for pair in itertools.pairwise(marks)]


@contextlib.contextmanager
def watched(device):
    """Gives a list. After the block it holds (moment, MHz, W) of every 20 ms or so, as nvidia-smi gave them.

    nvidia-smi is used because every machine with a driver has it. RuntimeError, with what it says, if it gives nothing.
    """
    command = ["nvidia-smi", "-i", identity(device), f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    samples = []
    with subprocess.Popen([*command, "-lms", "20"], stdout=subprocess.PIPE, text=True) as watching:
        printed = watching.stdout.readline()  # It takes a while to start.
        try:
            yield samples
        finally:
            watching.terminate()
            printed += watching.communicate()[0]
    samples += parsed(printed)
    if not samples:
        raise RuntimeError(f"nvidia-smi gives no clock or no power here: {' '.join(printed.split())[:200]}")


def identity(device):
    """The GPU's name for nvidia-smi, which numbers GPUs in another way than torch."""
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"


def parsed(printed):
    """[(moment, MHz, W)] of nvidia-smi's lines; those without numbers are left out."""
    samples = []
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):
            moment, clock, *watts = line.split(", ")
            known = [power for power in watts if "N/A" not in power]
            moment = datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f")
            samples += [(moment, float(clock), float(power)) for power in known[:1]]
    return samples


def medians(samples, start, end):
    """The medians of clock and power from one moment to another. RuntimeError if there are too few samples."""
    during = [(clock, watts) for moment, clock, watts in samples if start <= moment <= end]
    if len(during) < MIN_SAMPLES:
        seconds = (end - start).total_seconds()
        raise RuntimeError(f"nvidia-smi gave {len(during)} of at least {MIN_SAMPLES} samples in {seconds:.2f} s")
    return tuple(map(statistics.median, zip(*during, strict=True)))


def work_a_clock(row):
    """TFLOP/s a GHz of a sustained row: thousands of FLOPs that the whole GPU does in one clock."""
    return 1e3 * row["tflops"] / row["clock_mhz"]


def energy(row):
    """Joules a TFLOP of a sustained row: its watts divided by its TFLOP/s."""
    return row["watts"] / row["tflops"]
