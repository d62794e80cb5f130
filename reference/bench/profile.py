"""`python -m reference.bench.profile`: what the hardware counters say about four rungs of stage 02, as a file to commit.

Nsight Compute's `ncu` runs one forward of each rung (B=1 H=16 N=4096 D=128, bfloat16, not causal) and reads a few counters.
Written to reference/bench/results/<gpu>.profile.json with where and with what it was read; `read` gives what still holds.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from reference.bench import rows
from reference.bench.source import source_files, source_hash

RUNGS = ("mma", "ldmatrix", "fa2", "hopper")
STAGE = "02_fa2_cuda"
SIZE = {"B": 1, "H": 16, "N": 4096, "D": 128, "dtype": "bf16", "causal": False}
# By our name: the counter, under the names that it has had; the first that this ncu knows is read.
COUNTERS = {
    "tensor_pipe": (  # % of the cycles in which an SM had work
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "ldmatrix_bank_conflicts": (
        "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
        "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    ),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),  # turns of the 32 banks, conflicts included
    "issue_slots": (  # % of the cycles in which a scheduler issued an instruction
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
    ),
    "exp_units": (  # % of the cycles in which the special-function units took an instruction
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        "sm__pipe_xu_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "dram_throughput": (  # % of the peak
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),  # % of the warps that an SM can hold
    "nanoseconds": ("gpu__time_duration.sum",),  # under the profiler: no speed to quote
    "registers": ("launch__registers_per_thread",),
}
WARM_UP = 2
FORWARDS = (
    "import sys, torch; from steps.step02_fa2_cuda import forward; "
    f"qkv = torch.randn(3, {SIZE['B']}, {SIZE['H']}, {SIZE['N']}, {SIZE['D']}, device='cuda', dtype=torch.bfloat16); "
    f"[forward(*qkv, rung=sys.argv[1]) for _ in range({WARM_UP + 1})]; torch.cuda.synchronize()"
)


def find_ncu():
    """The path of ncu, or None."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, Path("/opt/nvidia/nsight-compute").glob("*"))]
    return shutil.which("ncu", path=os.pathsep.join(folders))


def choose(known):
    """{our name: ncu's} of the counters that are among `known`, ncu's names without what follows the dot."""
    found = {}
    for name, candidates in COUNTERS.items():
        there = [metric for metric in candidates if metric.split(".")[0] in known or metric.startswith("launch__")]
        if there:
            found[name] = there[0]
    return found


def command(ncu, rung, metrics):
    """The ncu command that profiles one forward of a rung, after the warm-up."""
    # Our kernels are all called attention_forward. The clock is left alone: on a shared machine it is not ours to set.
    options = ["--clock-control", "none", "--target-processes", "all", "--kernel-name", "attention_forward"]
    options += ["--launch-skip", str(WARM_UP), "--launch-count", "1", "--csv", "--page", "raw", "--print-units", "base"]
    return [ncu, *options, "--metrics", ",".join(metrics.values()), sys.executable, "-c", FORWARDS, rung]


def parse(output, metrics):
    """{our name: number} out of what `ncu --csv --page raw` prints, other lines around it; counters without a value are left out.

    ValueError if there is not exactly one kernel.
    """
    lines = output.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = [row for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')) if row["ID"]]  # not the units
    if len(table) != 1:
        raise ValueError(f"ncu's table has {len(table)} kernels, not 1. It ends: {' | '.join(lines[-5:])}")
    cells = {name: (table[0].get(metric) or "").replace(",", "") for name, metric in metrics.items()}
    return {name: float(cell) for name, cell in cells.items() if re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", cell)}


def kernel_of(rung, root=rows.ROOT):
    """The stem of a rung's forward file."""
    (path,) = (Path(root) / "steps" / f"step{STAGE}").glob(f"fwd_*_{rung}.cu")
    return path.stem


def profile(ncu, rungs, limit, say):
    """What the file says besides its origin: ncu's version, the counters' names there, and what each rung's run gave.

    A rung that ncu fails on is left out, and `say` is called with the reason.
    """
    version = re.findall(r"Version (\S+)", run([ncu, "--version"], limit))
    metrics = choose(set(re.findall(r"^(\w+__\w+)", run([ncu, "--query-metrics"], limit), re.M)))
    found = {}
    for rung in rungs:
        kernel = kernel_of(rung)
        origin = {"kernel": kernel, "source": source_hash(source_files(STAGE, kernel))}
        try:
            found[rung] = {**origin, "counters": parse(run(command(ncu, rung, metrics), limit), metrics)}
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as problem:
            say(f"{rung}: {problem}")
    return {"ncu": version[0] if version else None, "size": SIZE, "metrics": metrics, "rungs": found}


def run(words, limit):
    """What a command prints; RuntimeError with the end of it if it fails."""
    environment = os.environ | {"STEPS_ENGINE": "cuda"}
    done = subprocess.run(words, cwd=rows.ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} ... failed: {(done.stdout + done.stderr)[-800:]}")
    return done.stdout


def read(where=rows.COMMITTED / "nvidia-h200.profile.json", root=rows.ROOT):
    """{rung: {"tensor_pipe": ..., "bank_conflicts": ..., ...}} of the rungs whose files are as they were; {} without the file."""
    if not Path(where).exists():
        return {}
    rungs = json.loads(Path(where).read_text())["rungs"]
    fresh = {rung: source_hash(source_files(STAGE, one["kernel"], root)) == one["source"] for rung, one in rungs.items()}
    return {rung: one["counters"] for rung, one in rungs.items() if fresh[rung]}


def main(arguments=None):
    """Exit code: 0 if every rung was profiled."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench.profile", description=__doc__.partition("\n")[0])
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=RUNGS)
    parser.add_argument("--limit", type=float, default=200, metavar="S", help="seconds for each run of ncu (200)")
    parser.add_argument("--commit", help="what is profiled, for a machine without the git history")
    parser.add_argument("--out", type=Path, default=rows.COMMITTED, help="the folder of the file")
    options = parser.parse_args(arguments)
    console, ncu = Console(), find_ncu()
    if not ncu or not torch.cuda.is_available():
        console.print("profile needs a GPU and Nsight Compute's ncu on the PATH.")
        return 1
    origin = rows.provenance(commit=options.commit)
    path = options.out / f"{rows.slug(origin['gpu'])}.profile.json"
    measured = {**origin, **profile(ncu, options.rungs, options.limit, lambda text: console.print(text, markup=False))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=1) + "\n")
    for rung, one in measured["rungs"].items():
        console.print(f"{rung}: {one['counters']}", soft_wrap=True)
    console.print(f"written: {path}", soft_wrap=True)
    return 0 if len(measured["rungs"]) == len(options.rungs) else 1


if __name__ == "__main__":
    sys.exit(main())
