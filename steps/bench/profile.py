"""`python -m steps.bench.profile`: what the hardware counters say about four rungs of stage 02, as a file to commit.

Nsight Compute's `ncu` runs one forward of each rung (B=1 H=16 N=4096 D=128, bfloat16, not causal) and reads a few
counters. Written to steps/bench/results/<gpu>.profile.json with where and with what it was read; `read` gives what
still holds.
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

from steps.bench import fingerprint, rows
from steps.bench.grid import Point
from steps.step02_fa2_cuda import ladder

RUNGS = ("mma", "ldmatrix", "fa2", "hopper")
SIZE = {**Point(1, 16, 4096, 128).sizes, "dtype": "bf16"}
COUNTERS = {  # ncu's names by ours
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",  # % of the SM's cycles with work
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "ldmatrix_bank_conflicts": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",  # including those that conflicts cost
    "issue_slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",  # % of a scheduler's cycles with work
    "exp_units": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",  # % of the cycles of the exp units
    "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",  # % of the peak
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",  # % of the warps that an SM can hold
    "nanoseconds": "gpu__time_duration.sum",  # under the profiler, and therefore no speed to quote
    "registers": "launch__registers_per_thread",
}
WARM_UP = 2
SECONDS = 200  # the limit of each run of ncu
FORWARDS = (
    "import sys, torch; from steps.step02_fa2_cuda import forward; "
    f"qkv = torch.randn(3, {SIZE['B']}, {SIZE['H']}, {SIZE['N']}, {SIZE['D']}, device='cuda', dtype=torch.bfloat16); "
    f"[forward(*qkv, rung=sys.argv[1]) for _ in range({WARM_UP + 1})]; torch.cuda.synchronize()"
)


def command(ncu, rung, metrics):
    """The ncu command that profiles one forward of a rung, after the warm-up."""
    # Our kernels are all called attention_forward. The clock is left alone: a shared machine's is not ours to set.
    options = ["--clock-control", "none", "--target-processes", "all", "--kernel-name", "attention_forward"]
    options += ["--launch-skip", str(WARM_UP), "--launch-count", "1", "--csv", "--page", "raw", "--print-units", "base"]
    return [ncu, *options, "--metrics", ",".join(metrics.values()), sys.executable, "-c", FORWARDS, rung]


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


def profile(ncu, gpu):
    """What the file says besides its origin: ncu's version, the counters' names, and what each rung's run gave.

    A rung that ncu fails on is left out, and the reason is printed.
    """
    (version,) = re.findall(r"Version (\S+)", run([ncu, "--version"]))
    found = {"gpu": gpu, "ncu": version, "size": SIZE, "metrics": COUNTERS, "rungs": {}}
    for rung in RUNGS:
        one = {"kernel": Path(ladder.FORWARD[rung].file).stem}
        one["source"] = fingerprint.row_hash(subject(found, one))
        try:
            one["counters"] = parse(run(command(ncu, rung, COUNTERS)), COUNTERS)
            found["rungs"][rung] = one
        except (subprocess.SubprocessError, ValueError) as problem:
            print(f"{rung}: {problem} {getattr(problem, 'output', '')}")
    return found


def subject(record, one):
    """What fingerprint.py has to know of one rung of the record, as the fields of a row."""
    return {"stage": "02_fa2_cuda", "peer": None, "gpu": record["gpu"], **record["size"], **one}


def run(words):
    """What a command prints. subprocess.SubprocessError if it fails or takes longer than SECONDS."""
    how = dict(cwd=rows.ROOT, env=os.environ | {"STEPS_ENGINE": "cuda"}, text=True, errors="replace")
    return subprocess.check_output(words, stderr=subprocess.STDOUT, timeout=SECONDS, **how)


def read(folder=rows.COMMITTED):
    """{rung: {name of a counter: number}} of the rungs whose kernels are as they were; {} without a file."""
    record = rows.read_record("profile", folder=folder)
    rungs = record.get("rungs", {})
    return {rung: one["counters"] for rung, one in rungs.items() if not fingerprint.is_stale(subject(record, one))}


def main(commit: rows.Commit = None, out: rows.Folder = rows.COMMITTED):
    """What the hardware counters say about four rungs of stage 02."""
    folders = ["/usr/local/cuda/bin", *map(str, Path("/opt/nvidia/nsight-compute").glob("*"))]
    ncu = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if not ncu or not torch.cuda.is_available():
        raise SystemExit("profile needs a GPU and Nsight Compute's ncu on the PATH.")
    origin = rows.provenance(commit=commit)
    measured = {**origin, **profile(ncu, origin["gpu"])}
    print(measured["rungs"], f"written: {rows.write_record('profile', measured, out)}", sep="\n")
    raise typer.Exit(0 if len(measured["rungs"]) == len(RUNGS) else 1)


if __name__ == "__main__":
    typer.run(main)
