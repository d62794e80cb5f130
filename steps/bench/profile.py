"""`python -m steps.bench.profile`: what the hardware counters say about kernels of stages 02 and 03, a file to commit.

Nsight Compute's `ncu` runs four rungs of stage 02, forward, and the three kernels of stage 03's rung tma that take
long, once each (B=1 H=16 N=4096 D=128, bfloat16, not causal), and reads a few counters. Written to
steps/bench/results/<gpu>.profile.json with where and with what it was read; `read` gives what still holds.
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

from steps.bench import rows
from steps.bench.cost import Point
from steps.step02_fa2_cuda import ladder

RUNGS = ("mma", "ldmatrix", "fa2", "hopper")  # of stage 02
TRITON = {"forward_kernel": "fwd_1_tma", "keys_kernel": "bwd_1_tma", "queries_kernel": "bwd_1_tma"}  # of stage 03
SIZE = {**Point(1, 16, 4096, 128).sizes, "dtype": "bf16"}
# What a warp can wait for: Nsight Compute's stall reasons of an H100, and "selected", which is no wait.
STALLS = """barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle
membar mio_throttle misc no_instruction not_selected selected short_scoreboard sleeping tex_throttle wait""".split()
COUNTERS = {  # ncu's names by ours
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",  # % of the SM's cycles with work
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",  # including those that conflicts cost
    "issue_slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",  # % of a scheduler's cycles with work
    "exp_units": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",  # % of the cycles of the exp units
    "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",  # % of the peak
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",  # % of the warps that an SM can hold
    "nanoseconds": "gpu__time_duration.sum",  # under the profiler, and therefore no speed to quote
    # warps that wait for it, on average over the cycles in which a scheduler issues
    **{f"stalled_{reason}": f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS},
}
WARM_UP, SECONDS = 2, 200  # calls before, and the limit of each run of ncu
TENSORS = f"{SIZE['B']}, {SIZE['H']}, {SIZE['N']}, {SIZE['D']}, device='cuda', dtype=torch.bfloat16"
FORWARDS = (
    f"import sys, torch; from steps.step02_fa2_cuda import forward; qkv = torch.randn(3, {TENSORS}); "
    f"[forward(*qkv, rung=sys.argv[1]) for _ in range({WARM_UP + 1})]; torch.cuda.synchronize()"
)
BOTH_PASSES = (
    f"import torch; from steps.step03_triton import bwd_1_tma, fwd_1_tma; x = torch.randn(4, {TENSORS}); "
    f"[bwd_1_tma.backward(*x, *fwd_1_tma.forward(*x[1:])) for _ in range({WARM_UP + 1})]; torch.cuda.synchronize()"
)


def command(ncu, rung, metrics):
    """The ncu command that profiles one of RUNGS or TRITON once, after the warm-up."""
    # Stage 02's kernels are all called attention_forward.
    kernel, calls = (rung, BOTH_PASSES) if rung in TRITON else ("attention_forward", FORWARDS)
    # The clock is left alone: a shared machine's is not ours to set.
    options = ["--clock-control", "none", "--target-processes", "all", "--kernel-name", kernel]
    options += ["--launch-skip", str(WARM_UP), "--launch-count", "1", "--csv", "--page", "raw", "--print-units", "base"]
    return [ncu, *options, "--metrics", ",".join(metrics.values()), sys.executable, "-c", calls, rung]


def parse(output, metrics):
    """{our name: number} out of what `ncu --csv --page raw` prints, without the counters that have no value.

    ValueError if there is not exactly one kernel.
    """
    lines = output.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    cells = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    table = [row for row in cells if row["ID"]]  # without the line of the units
    if len(table) != 1:
        raise ValueError(f"ncu's table has {len(table)} kernels, not 1. It ends: {' | '.join(lines[-5:])}")
    cells = {name: (table[0].get(metric) or "").replace(",", "") for name, metric in metrics.items()}
    return {name: float(cell) for name, cell in cells.items() if re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", cell)}


def profiled(ncu, gpu):
    """What the file says besides its origin. A rung that ncu fails on is left out, and the reason is printed."""
    found = {"gpu": gpu, "size": SIZE, "metrics": COUNTERS, "rungs": {}, "triton": {}}
    how = dict(cwd=rows.ROOT, env=os.environ | {"STEPS_ENGINE": "cuda"}, text=True, errors="replace", timeout=SECONDS)
    files = {rung: Path(ladder.FORWARD[rung].file).stem for rung in RUNGS}
    for rung, file in (files | TRITON).items():
        one = {"kernel": file, "source": rows.row_hash(subject(found, {"kernel": file}))}
        try:
            output = subprocess.check_output(command(ncu, rung, COUNTERS), stderr=subprocess.STDOUT, **how)
            found["triton" if rung in TRITON else "rungs"][rung] = one | {"counters": parse(output, COUNTERS)}
        except (subprocess.SubprocessError, ValueError) as problem:
            print(f"{rung}: {problem} {getattr(problem, 'output', '')}")
    return found


def subject(record, one):
    """What rows.py has to know of one rung of the record, as the fields of a row."""
    stage = "03_triton" if one["kernel"] in TRITON.values() else "02_fa2_cuda"
    return {"stage": stage, "peer": None, "gpu": record["gpu"], "n_gpus": 1, **record["size"], **one}


def read(folder=rows.COMMITTED, part="rungs"):
    """{rung: {name of a counter: number}} of the rungs whose kernels are as they were; {} without a file.

    part: "rungs" for those of stage 02, "triton" for the kernels of stage 03.
    """
    record = rows.read_record("profile", folder=folder)
    rungs = record.get(part, {})
    return {rung: one["counters"] for rung, one in rungs.items() if not rows.is_stale(subject(record, one))}


def waits(counters):
    """{stall reason: its share of a warp's time} out of one of `read`, the largest first; without stalls {}."""
    stalls = {name.removeprefix("stalled_"): n for name, n in counters.items() if name.startswith("stalled_")}
    return {name: stalls[name] / sum(stalls.values()) for name in sorted(stalls, key=stalls.get, reverse=True)}


def main():
    """What the hardware counters say about kernels of stages 02 and 03."""
    folders = ["/usr/local/cuda/bin", *map(str, Path("/opt/nvidia/nsight-compute").glob("*"))]
    ncu = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if not ncu or not torch.cuda.is_available():
        raise SystemExit("profile needs a GPU and Nsight Compute's ncu on the PATH.")
    origin = rows.provenance()
    measured = origin | profiled(ncu, origin["gpu"])
    print("written:", rows.write_record("profile", measured))
    raise SystemExit(len(measured["rungs"] | measured["triton"]) < len(RUNGS) + len(TRITON))


if __name__ == "__main__":
    typer.run(main)
