"""`python -m steps.course.bench.profile`: what the hardware counters say about four rungs of stage 02.

The record is a file to commit.

Nsight Compute's `ncu` runs each rung once, forward (B=1 H=16 N=4096 D=128, bfloat16, not causal), and reads a few
counters. They are written to steps/course/bench/results/<gpu>.profile.json with where and with what they were read.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import typer

from steps.course.bench import rows
from steps.course.bench.cost import Point
from steps.places import require_clone
from steps.step02_fa2_cuda import ladder

RUNGS = ("mma", "ldmatrix", "fa2", "hopper")
SIZE = {**Point(1, 16, 4096, 128).sizes, "dtype": "bf16"}
# What a warp can wait for: Nsight Compute's stall reasons of an H100, and "selected", which is no wait.
STALLS = """barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle
membar mio_throttle misc no_instruction not_selected selected short_scoreboard sleeping tex_throttle wait""".split()
COUNTERS = {  # by our name: ncu's name, and that on the page of results
    "nanoseconds": ("gpu__time_duration.sum", "time, µs"),  # under the profiler, and therefore no speed to quote
    "tensor_pipe": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "tensor cores, % of the cycles"),
    "exp_units": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", "exp units, %"),
    "issue_slots": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "instructions issued, % of the slots"),
    "dram_throughput": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "device memory, % of its peak"),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "wavefronts of shared memory, millions"),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "of them for bank conflicts"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", "warps on the SM, % of the most"),
}
# And the warps that wait for each reason, on average over the cycles in which a scheduler issues.
WAITING = {f"stalled_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS}
METRICS = {name: ncus for name, (ncus, _) in COUNTERS.items()} | WAITING
WARM_UP, SECONDS = 2, 200  # calls before, and the limit of each run of ncu
CALLS = f"""import sys, torch
from steps.step02_fa2_cuda import forward
qkv = torch.randn(3, {SIZE["B"]}, {SIZE["H"]}, {SIZE["N"]}, {SIZE["D"]}, device="cuda", dtype=torch.bfloat16)
for _ in range({WARM_UP + 1}):
    forward(*qkv, rung=sys.argv[1])
torch.cuda.synchronize()
"""


def parse(output):
    """{name of a counter: number} out of what `ncu --csv --page raw` prints, without the counters that have no value.

    ValueError if there is not exactly one kernel.
    """
    cells = csv.DictReader(line for line in output.splitlines() if line.startswith('"'))
    kernels = [row for row in cells if row.get("ID")]  # without the line of the units
    if len(kernels) != 1:
        raise ValueError(f"ncu's table has {len(kernels)} kernels, not 1. It ends: {output[-500:]}")
    words = {name: (kernels[0].get(metric) or "").replace(",", "") for name, metric in METRICS.items()}
    return {name: float(word) for name, word in words.items() if re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", word)}


def profiled(ncu, origin):
    """The record. A rung that ncu fails on is left out, and the reason is printed."""
    found = {**origin, "size": SIZE, "rungs": {}}
    # The clock is left alone: a shared machine's is not ours to set.
    options = "--clock-control none --target-processes all --csv --page raw --print-units base".split()
    options += ["--kernel-name", "attention_forward", "--launch-skip", str(WARM_UP), "--launch-count", "1"]
    command = [ncu, *options, "--metrics", ",".join(METRICS.values()), sys.executable, "-c", CALLS]
    how = dict(cwd=rows.ROOT, env=os.environ | {"STEPS_ENGINE": "cuda"}, text=True, errors="replace", timeout=SECONDS)
    for rung in RUNGS:
        one = {"kernel": Path(ladder.FORWARD[rung].file).stem}
        try:
            output = subprocess.check_output([*command, rung], stderr=subprocess.STDOUT, **how)
            found["rungs"][rung] = one | {"source": rows.row_hash(subject(found, one)), "counters": parse(output)}
        except (subprocess.SubprocessError, ValueError) as problem:
            print(f"{rung}: {problem} {getattr(problem, 'output', '')}")
    return found


def subject(record, one):
    """What rows.py has to know of one rung of the record, as the fields of a row."""
    return {"stage": "02_fa2_cuda", "peer": None, "gpu": record["gpu"], "n_gpus": 1, **record["size"], **one}


def read(folder=rows.COMMITTED):
    """{rung: {name of a counter: number}} of the rungs whose kernels are as they were; {} without a file."""
    record = rows.read_record("profile", folder=folder)
    rungs = record.get("rungs", {})
    return {rung: one["counters"] for rung, one in rungs.items() if not rows.is_stale(subject(record, one))}


def main():
    """What the hardware counters say about four rungs of stage 02."""
    require_clone("steps.course.bench.profile")
    from cuda import pathfinder  # imported here because only Linux has it

    ncu = shutil.which("ncu") or pathfinder.find_nvidia_binary_utility("ncu")
    if not ncu or not torch.cuda.is_available():
        raise SystemExit("profile needs a GPU and Nsight Compute's ncu.")
    found = profiled(ncu, rows.provenance())
    print("written:", rows.write_record("profile", found))
    raise SystemExit(len(found["rungs"]) < len(RUNGS))


if __name__ == "__main__":
    typer.run(main)
