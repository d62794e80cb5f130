"""A measurement as one line of JSON: its fields, how it is checked, written and read, and where it comes from.

A row is a dict with exactly the keys of FIELDS. It describes either a stage's kernel (`stage`, `kernel` and `source`
are set) or a peer (`peer` is set). Committed rows are in steps/bench/results/<gpu>.jsonl, a reader's own in
my/results/. What else is recorded of a GPU is in <gpu>.<kind>.json beside them.
"""

import json
import math
import os
import re
import subprocess
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from steps.bench.timing import MIN_REPS

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "steps" / "bench" / "results"
OWN = ROOT / "my" / "results"

MATMUL = "matmul"  # a peer and its pass: a plain product, (N, D) times (D, N), as a ceiling for attention
COPY = "copy"  # a peer and its pass: k (B, Hk, Nk, D) copied in device memory, as a ceiling for decoding
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FIELDS = {  # by name: the type of the value, or a tuple of all values that there are
    "run": str,  # the same for all rows measured together
    "commit": str | None,
    "date": str,  # YYYY-MM-DD, UTC
    "gpu": str,  # as torch names it; "CPU" without one
    "n_gpus": int,
    "driver": str | None,
    "cuda": str | None,
    "torch": str,
    "triton": str | None,
    "stage": str | None,  # "02_fa2_cuda"; null for a peer
    "kernel": str | None,  # the stem of its file; "fwd_a+bwd_b" of two; "folder/a"; "fwd_a:LAZY=0" with a switch turned
    "peer": str | None,
    "source": str | None,  # a hash of the kernel and its launch, see fingerprint.py
    "pass": ("fwd", "bwd", "fwd+bwd", MATMUL, COPY),
    "dtype": tuple(DTYPES),
    "B": int,
    "H": int,
    "Hk": int,
    "N": int,  # queries
    "Nk": int,  # keys
    "D": int,
    "causal": bool,
    "layout": (None, "contiguous", "zigzag", "striped"),  # stage 04: how the sequence is distributed over the ranks
    "options": dict,  # what else was asked for, by name: feature, window, transport, strategy, graph, ...
    "timing": ("interleaved", "sustained"),  # single calls of all candidates in turn, or a second of calls of one
    "clock_mhz": float | int | None,  # of sustained rows: the medians meanwhile
    "watts": float | int | None,
    "ms_median": float | int,
    "ms_p20": float | int,
    "ms_p80": float | int,
    "reps": int,
    "tflops": float | int,  # 0 for a copy
    "error": float | int,  # max |result - float64| over the results of the pass
}
OPTIONAL = {  # few rows have them
    "peak_bytes": int,  # of device memory, beyond the inputs, that one call held at once
    "shared_bytes": int,  # of device memory that the other ranks can read and write; they are not among peak_bytes
    "predicted_bytes": int,  # what peak_bytes should be
    "sent_bytes": int,  # that a rank sends to other ranks, or copies from and to their memory, in one call
    "hidden": float | int,  # by a profiler: the share of the time of copies between GPUs in which a kernel computes
    "idle": float | int,  # by a profiler: the share of the time in which no kernel computes
    "launches": float | int,  # by a profiler: kernels and copies of one call
    "ms_worst": float | int,  # of the slowest round
}
# What a kernel and a peer are compared at, and what two rows that measure the same thing share.
SETTING = ("gpu", "n_gpus", "pass", "dtype", "B", "H", "Hk", "N", "Nk", "D", "causal", "options", "timing")
SUBJECT = ("stage", "kernel", "peer", "layout")


def setting(row):
    """The row's values of SETTING as a tuple that can be the key of a dictionary."""
    return tuple(json.dumps(row[name], sort_keys=True) if name == "options" else row[name] for name in SETTING)


def label(row):
    """Who a row is about: "02 fwd_0_scalar", or the peer's name."""
    return row["peer"] or f"{row['stage'][:2]} {row['kernel']}"


def validate(row):
    """The row itself. Raises ValueError that lists all that is wrong with it."""
    kinds = FIELDS | OPTIONAL
    wrong = [f"{name} is missing" for name in FIELDS if name not in row]
    wrong += [f"{name} is not a field" for name in row if name not in kinds]
    wrong += [f"{name} is {row[name]!r}" for name in kinds if name in row and not _fits(row[name], kinds[name])]
    wrong = wrong or [f"against the rule: {rule}" for rule, kept in _rules(row).items() if not kept]
    if wrong:
        raise ValueError(f"not a results row: {'; '.join(wrong)}. Row: {row}")
    return row


def _fits(value, kind):
    """Whether FIELDS allows it. bool counts as no number, and a number must be finite (JSON has no NaN)."""
    if isinstance(kind, tuple):
        return value in kind
    if isinstance(value, bool) or kind is bool:
        return type(value) is kind
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))


def _rules(row):
    """{rule: whether the row keeps it}, for a row whose fields fit."""
    of_kernel = [row[name] is not None for name in ("stage", "kernel", "source")]
    load = [row[name] for name in ("clock_mhz", "watts")]
    return {
        "either a peer, or stage, kernel and source": of_kernel == [row["peer"] is None] * 3,
        "the pass matmul belongs to the peer matmul": (row["pass"] == MATMUL) == (row["peer"] == MATMUL),
        "the pass copy belongs to the peer copy": (row["pass"] == COPY) == (row["peer"] == COPY),
        "stage like '02_fa2_cuda'": row["stage"] is None or bool(re.fullmatch(r"\d\d_\w+", row["stage"])),
        "0 < ms_p20 <= ms_median <= ms_p80": 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"],
        f"reps >= {MIN_REPS}, or 5 of several GPUs": row["reps"] >= (MIN_REPS if row["n_gpus"] < 2 else 5),
        "tflops > 0, but 0 of a copy": (row["tflops"] > 0) == (row["pass"] != COPY) and row["tflops"] >= 0,
        "error >= 0": row["error"] >= 0,
        "clock_mhz and watts of sustained rows alone": [x is None for x in load] == [row["timing"] != "sustained"] * 2,
        "clock_mhz > 0 and watts > 0": all(x is None or x > 0 for x in load),
        "sustained on one GPU": row["timing"] != "sustained" or row["n_gpus"] < 2,
    }


def append(rows, folder=OWN):
    """Adds rows to <folder>/<gpu>.jsonl; returns those files. Nothing is written if a row is not valid."""
    lines = {}
    for row in rows:
        validate(row)
        ordered = {name: row[name] for name in FIELDS | OPTIONAL if name in row}
        lines.setdefault(Path(folder) / f"{slug(row['gpu'])}.jsonl", []).append(json.dumps(ordered) + "\n")
    for path, text in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(text)
    return list(lines)


def read(folder=COMMITTED, *, switched=False, timing="interleaved", several_gpus=False):
    """The rows of all .jsonl files in a folder. ValueError names a bad row's file and line.

    switched: also those of runs in which a kernel's switches were turned, which answer another question. timing: only
    those that were timed in this way, because an interleaved number is not compared with a sustained one. several_gpus:
    only those of several GPUs that work together, otherwise only the others.
    """
    rows = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(validate(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    turned = {row["run"] for row in rows if ":" in (row["kernel"] or "")}
    alike = [row for row in rows if row["timing"] == timing and (row["n_gpus"] > 1) == several_gpus]
    return [row for row in alike if switched or row["run"] not in turned]


def latest(rows):
    """One row for each subject at each setting, in the order of first appearance.

    It is the last one of the runs that measured most there, so that what is compared comes from one run if possible.
    """
    company = Counter((row["run"], setting(row)) for row in rows)
    chosen = {}
    for row in rows:
        subject = *(row[name] for name in SUBJECT), setting(row)
        before = chosen.get(subject)
        in_smaller_run = before and company[row["run"], setting(row)] < company[before["run"], setting(row)]
        if not in_smaller_run:
            chosen[subject] = row
    return list(chosen.values())


# --- where and with what something was measured -------------------------------------------------------------


def provenance(device="cuda", *, commit=None, n_gpus=1):
    """The fields of a row that say where and with what it was measured, the same for a whole run.

    commit: for a machine without the git history; otherwise git is asked, and null where it does not know.
    """
    now = datetime.now(UTC)
    on_gpu = torch.device(device).type == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}",
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "date": f"{now:%Y-%m-%d}",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "n_gpus": n_gpus if on_gpu else 0,
        "driver": driver and driver.splitlines()[0],
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else None,  # not imported, which sets its mode
    }


def _output(*command):
    """What a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def slug(gpu):
    """The GPU's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


# The options of every command that writes a record.
Commit = Annotated[str | None, typer.Option(help="What is measured, for a machine without the git history.")]
Folder = Annotated[Path, typer.Option(help="The folder of the file.")]


def write_record(kind, record, folder=COMMITTED, **how):
    """Writes what is not rows, such as the "profile" of a GPU, to <folder>/<gpu>.<kind>.json; returns that path."""
    path = Path(folder) / f"{slug(record['gpu'])}.{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, **{"indent": 1, **how}) + "\n")
    return path


def read_record(kind, gpu="NVIDIA H200", folder=COMMITTED):
    """What `write_record` wrote, or {} where there is no such file."""
    path = Path(folder) / f"{slug(gpu)}.{kind}.json"
    return json.loads(path.read_text()) if path.exists() else {}
