"""Timing under load: a second of calls of one candidate at a time, with the GPU's clock and power meanwhile.

`python -m steps bench --sustained` measures so, and its rows are of their own kind (`timing` is "sustained"). They say
something else than interleaved ones, because a GPU lowers its clock as soon as it would need more power than its limit:

- Interleaved, a call of one candidate follows a call of another, and all of them run at nearly the same clock, which
  depends on the power of all. Their times show how many clocks each of them takes for the work.
- Sustained, each has the clock that its own power leaves it. A kernel that needs less energy for the same work gets a
  higher clock, and this is how it would run in a program that does little else.

Therefore an interleaved number is never compared with a sustained one. Beside TFLOP/s a sustained row has the medians
of the clock and the power, and so two numbers that explain them: TFLOP/s a GHz, which is the work done in a clock, and
joules a TFLOP, which is the energy that the work takes.

Left out: how the clock falls. A row has medians of the time after it has fallen.
"""

import contextlib
import itertools
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime

import torch

from steps.bench import timing

IDLE = 0.3  # seconds without work before each candidate, so that each begins alike
SETTLE, MEASURED = 0.25, 0.75  # seconds of calls: until the power limit has set the clock, and those that count
MIN_SAMPLES = 3
# Since Ampere power.draw is an average over the last second, which would be partly of another candidate. What an older
# GPU does not know, it gives as [N/A]; there power.draw is not an average.
QUERY = "timestamp,clocks.sm,power.draw.instant,power.draw"


@dataclass(frozen=True)
class Load(timing.Timing):
    """A Timing with the medians of the SM clock in MHz and of the board's power in watts during these calls."""

    clock_mhz: float
    watts: float


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
        settling = back_to_back(call, how_often(SETTLE, timing.one_call(call, device=device)), device)
        reps = max(timing.MIN_REPS, how_often(MEASURED, statistics.median(settling)))
        start = datetime.now()
        ms = back_to_back(call, reps, device)
        end = datetime.now()
    clock_mhz, watts = medians(samples, start, end)
    return Load(**vars(timing.summary(ms)), clock_mhz=clock_mhz, watts=watts)


def how_often(seconds, ms):
    """How many calls take about so many seconds, if one takes `ms` milliseconds."""
    return max(1, round(1e3 * seconds / ms))


def back_to_back(call, reps, device):
    """Milliseconds of each of `reps` calls. Nothing waits between them, and the end of one is the start of the next."""
    mark, milliseconds = timing.clock(device)
    marks = [mark()]
    for _ in range(reps):
        call()
        marks.append(mark())
    timing.synchronize(device)
    return [milliseconds(*pair) for pair in itertools.pairwise(marks)]


# --- clock and power ----------------------------------------------------------------------------------------


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


# --- what the rows say --------------------------------------------------------------------------------------


def work_a_clock(row):
    """TFLOP/s a GHz of a sustained row: thousands of FLOPs that the whole GPU does in one clock."""
    return 1e3 * row["tflops"] / row["clock_mhz"]


def energy(row):
    """Joules a TFLOP of a sustained row: its watts divided by its TFLOP/s."""
    return row["watts"] / row["tflops"]
