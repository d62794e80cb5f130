"""`python -m steps.bench.launch_cost`: what a call of a forward costs the CPU that launches it, as a file to commit.

The caller does not wait for the kernel. The kernel (B=1 H=1 N=128 D=64, bfloat16) is shorter than its launch, so that
the GPU keeps up and the time of a call is the host's. Two numbers are written to steps/bench/results/<gpu>.host.json.
The lowest of many rounds is the cost itself, because anything else that the host does only adds time. The median shows
how much was added.
"""

import itertools
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
import typer

from steps import step02_fa2_cuda
from steps.bench import rows
from steps.step02_fa2_cuda import launch

SIZE = {"B": 1, "H": 1, "N": 128, "D": 64, "dtype": "bf16"}
ROUNDS, CALLS = 50, 100


def calls(q, k, v):
    """{name: a forward without arguments}: stage 02's launchers alone and with all checks, stage 03, and torch's SDPA.

    "elsewhere": every call has its tensors at other addresses than the one before.
    """
    from steps import step03_triton  # imported here because Triton is not available everywhere

    forwards = {
        "02 launch.forward": partial(launch.forward, rung="hopper"),
        "02 launch.forward fa2": partial(launch.forward, rung="fa2"),
        "02 forward": step02_fa2_cuda.forward,
        "03 forward": step03_triton.forward,
        "sdpa": F.scaled_dot_product_attention,
    }
    found = {name: partial(forward, q, k, v) for name, forward in forwards.items()}
    others = itertools.cycle([tuple(x.clone() for x in (q, k, v)) for _ in range(2)])
    found["02 launch.forward elsewhere"] = lambda: launch.forward(*next(others), rung="hopper")
    return found


def microseconds(function):
    """Of the CPU for one call, without waiting for the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(functions, warmup=2):
    """{name: microseconds in each of ROUNDS}; in a round each function is measured once."""
    found = {name: [] for name in functions}
    for _ in range(warmup + ROUNDS):
        for name, function in functions.items():
            found[name].append(microseconds(function))
    return {name: times[warmup:] for name, times in found.items()}


def main(commit: rows.Commit = None, out: rows.Folder = rows.COMMITTED):
    """What a call of a forward costs the CPU that launches it."""
    if not torch.cuda.is_available():
        raise SystemExit("launch_cost needs a GPU: without one there is nothing to launch.")
    origin = rows.provenance(commit=commit)
    shape = [SIZE[name] for name in "BHND"]
    found = measure(calls(*torch.randn(3, *shape, device="cuda").to(rows.DTYPES[SIZE["dtype"]])))
    lowest, medians = ({name: round(of(times), 1) for name, times in found.items()} for of in (min, statistics.median))
    path = rows.write_record("host", {**origin, "size": SIZE, "microseconds": lowest, "medians": medians}, out)
    print(f"{lowest}\nmedians: {medians}\nwritten: {path}")


if __name__ == "__main__":
    typer.run(main)
