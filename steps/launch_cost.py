"""`python -m steps.launch_cost`: what a call of a forward costs the CPU that launches it, as a file to commit.

Calls are not waited for. The kernel (B=1 H=1 N=128 D=64, bfloat16) is shorter than its launch, so that the GPU keeps up and the
time of a call is the host's: the lowest of many rounds, because whatever else a host does at the time only adds, and the median,
which shows how much that was. Written to reference/bench/results/<gpu>.host.json.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from reference.bench import rows

SIZE = {"B": 1, "H": 1, "N": 128, "D": 64, "dtype": "bf16"}
ROUNDS, CALLS = 50, 100


def calls(q, k, v):
    """{name: a forward without arguments}: stage 02's launchers alone and with all checks, stage 03, and torch's SDPA.

    "elsewhere": every call has its tensors at other addresses than the one before.
    """
    from steps import step02_fa2_cuda, step03_triton  # Triton is not everywhere
    from steps.step02_fa2_cuda import hopper, kernels

    forwards = {
        "02 hopper_forward": hopper.hopper_forward,
        "02 fa2_forward": kernels.fa2_forward,
        "02 forward": step02_fa2_cuda.forward,
        "03 forward": step03_triton.forward,
        "sdpa": F.scaled_dot_product_attention,
    }
    found = {name: partial(forward, q, k, v) for name, forward in forwards.items()}
    others = itertools.cycle([tuple(x.clone() for x in (q, k, v)) for _ in range(2)])
    found["02 hopper_forward elsewhere"] = lambda: hopper.hopper_forward(*next(others))
    return found


def microseconds(function):
    """Of the CPU for one call, the GPU's work not waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(functions):
    """{name: microseconds in each of ROUNDS, in which everybody takes turns}."""
    found = {name: [] for name in functions}
    for n in range(ROUNDS + 2):
        for name, function in functions.items():
            found[name] += [microseconds(function)] * (n >= 2)
    return found


def main(arguments=None):
    """Exit code: 0 if it was measured."""
    parser = argparse.ArgumentParser(prog="python -m steps.launch_cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", help="what is measured, for a machine without the git history")
    parser.add_argument("--out", type=Path, default=rows.COMMITTED, help="the folder of the file")
    options = parser.parse_args(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("launch_cost needs a GPU: without one there is nothing to launch.")
        return 1
    origin = rows.provenance(commit=options.commit)
    shape = [SIZE[name] for name in "BHND"]
    found = measure(calls(*torch.randn(3, *shape, device="cuda").to(rows.DTYPES[SIZE["dtype"]])))
    lowest, medians = ({name: round(of(times), 1) for name, times in found.items()} for of in (min, statistics.median))
    path = options.out / f"{rows.slug(origin['gpu'])}.host.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**origin, "size": SIZE, "microseconds": lowest, "medians": medians}, indent=1) + "\n")
    console.print(f"{lowest}\nmedians: {medians}\nwritten: {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
