"""Timing several implementations against each other, fairly, in two ways that are never compared.

interleaved   Every round calls each candidate once, in an order of its own. A GPU's clock drifts by several per cent
              with heat and power, and a call finds in the cache what the one before it has left there. This way both
              affect all candidates alike, on average; triton.testing.do_bench, which times one function to the end
              before the next, lacks this property. Where the host launches a call more slowly than the GPU computes
              it, the GPU pauses before the call, until all of it is in the queue.
sustained     A second of calls of one candidate, then of the next, with the GPU's clock and power meanwhile.

They differ because a GPU lowers its clock as soon as it would need more power than its limit. Interleaved, all run at
nearly the same clock. Sustained, each has the clock that its own power leaves it, as in a program that does little
else. Times are medians, because a stray interruption only ever makes a call longer.
"""

import contextlib
import itertools
import math
import random
import statistics
import subprocess
import time
import timeit
from datetime import datetime

import numpy as np
import torch

MIN_REPS, MIN_SAMPLES = 30, 3  # calls of a results row, and samples of clock and power
IDLE = 0.3  # seconds without work before each candidate, so that each begins alike
SETTLE, MEASURED = 0.25, 0.75  # seconds of calls: until the power limit has set the clock, and those that count


def summary(ms):
    """The fields of a row: of a list of milliseconds the median, the 20th and 80th percentile, and their number."""
    p20, median, p80 = map(float, np.percentile(ms, (20, 50, 80)))
    return {"ms_median": median, "ms_p20": p20, "ms_p80": p80, "reps": len(ms)}


def spread(taken):
    """Half the way from the 20th to the 80th percentile, in % of the median. taken: what `summary` gives."""
    return 50 * (taken["ms_p80"] - taken["ms_p20"]) / taken["ms_median"]


def interleaved(calls, *, reps=MIN_REPS, warmup=3, device="cpu"):
    """{name: summary} for `calls`, a dict of functions without arguments, after `warmup` untimed rounds.

    device: "cuda" times with events on the current stream, anything else with the host's clock.
    """
    mark, milliseconds = clock(device)
    marks, pauses = {name: [] for name in calls}, {name: launching(call, device) for name, call in calls.items()}
    for name in turns(list(calls), warmup + reps):
        if pauses[name]:
            torch.cuda._sleep(int(2e9 * pauses[name]))  # cycles: Hopper has up to two billion a second
        start = mark()
        calls[name]()
        marks[name].append((start, mark()))
    # Waiting only here keeps the GPU's queue full, so that what is timed is the GPU's work and not the host's.
    synchronize(device)
    return {name: summary([milliseconds(*pair) for pair in pairs[warmup:]]) for name, pairs in marks.items()}


def launching(call, device):
    """How long the GPU has to pause before a call, in seconds, so that it does not wait for the host.

    Twice as long as the host takes to launch the call; 0 if the call takes the GPU longer than that.
    """
    if torch.device(device).type != "cuda":
        return 0
    for _ in range(2):  # the first one to warm up
        synchronize(device)
        begun = time.perf_counter()
        call()
        launched = time.perf_counter() - begun
    synchronize(device)
    return 2 * launched if time.perf_counter() - begun < 2 * launched else 0


def turns(names, rounds):
    """The names, round after round, each in a random order; the same in all processes, as the ranks of a ring need."""
    order = random.Random(0)
    for _ in range(rounds):
        yield from order.sample(names, len(names))


def one_call(call, *, device):
    """Milliseconds of a single call: enough to see whether thirty more are affordable."""
    return back_to_back(call, 1, device)[0]


def host_us(calls):
    """{name: microseconds that a call takes the CPU, which does not wait for the GPU}. calls: as for `interleaved`.

    They take turns, because other programs change the speed of a CPU, by half for seconds. Of each the fastest of many
    rounds counts, because whatever else the CPU does only adds time. So few calls fit into the GPU's queue, so that the
    CPU never waits for a place in it.
    """
    rounds, number = 50, 20
    fastest = dict.fromkeys(calls, math.inf)
    for name in turns(list(calls), rounds):
        fastest[name] = min(fastest[name], timeit.timeit(calls[name], torch.cuda.synchronize, number=number))
    return {name: 1e6 * seconds / number for name, seconds in fastest.items()}


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


# --- sustained load -----------------------------------------------------------------------------------------


def sustained(calls, *, device="cuda"):
    """{name: summary} for `calls`, a dict of functions without arguments: a second of each.

    A summary also has clock_mhz and watts, the medians of the SM's clock and of the board's power. The order is random,
    because the GPU gets warmer, and then needs more power. RuntimeError where nvidia-smi gives no clock or no power.
    """
    found = {}
    for name in random.sample(list(calls), len(calls)):
        call = calls[name]
        with watched(device) as samples:
            time.sleep(IDLE)
            back_to_back(call, 3, device)  # The first calls are slower.
            count = max(1, round(1e3 * SETTLE / one_call(call, device=device)))
            settled = statistics.median(back_to_back(call, count, device))
            start = datetime.now()
            ms = back_to_back(call, max(MIN_REPS, round(1e3 * MEASURED / settled)), device)
            end = datetime.now()
        load = [numbers for moment, *numbers in samples if start <= moment <= end]
        if len(load) < MIN_SAMPLES:
            raise RuntimeError(f"nvidia-smi gave clock and power {len(load)} times, not {MIN_SAMPLES} or more")
        clocks, watts = zip(*load, strict=True)
        found[name] = summary(ms) | {"clock_mhz": statistics.median(clocks), "watts": statistics.median(watts)}
    return found


def back_to_back(call, count, device):
    """Milliseconds of each of so many calls. Nothing waits between them: the end of one is the start of the next."""
    mark, milliseconds = clock(device)
    marks = [mark()]
    for _ in range(count):
        call()
        marks.append(mark())
    synchronize(device)
    return [milliseconds(*pair) for pair in itertools.pairwise(marks)]


@contextlib.contextmanager
def watched(device):
    """Gives a list. After the block it holds (moment, MHz, W) of every 20 ms or so, as nvidia-smi gave them."""
    # nvidia-smi numbers GPUs in another way than torch. power.draw alone would be an average over the last second.
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    query = "--query-gpu=timestamp,clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-lms", "20"
    samples = []
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", *query]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        printed = watching.stdout.readline()  # It takes a while to start.
        try:
            yield samples
        finally:
            watching.terminate()
            printed += watching.communicate()[0]
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):  # a line without numbers, such as [N/A]
            moment, *numbers = line.split(", ")
            samples.append((datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f"), *map(float, numbers)))
