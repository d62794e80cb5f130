"""A measurement as one line of JSON: its fields, how it is checked, written and read, its provenance.

A row is a dict with exactly the keys of FIELDS. It describes either a stage's kernel (`stage`, `kernel` and
`source` are set) or a peer (`peer` is set). Committed rows live in reference/bench/results/<gpu>.jsonl, a
reader's own in my/results/.
"""

import json
import math
import os
import re
import subprocess
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from reference.bench.timing import MIN_REPS

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "reference" / "bench" / "results"
OWN = ROOT / "my" / "results"

PASSES = ("fwd", "bwd", "fwd+bwd")
MATMUL = "matmul"  # a peer and its pass: no attention but a plain product, (N, D) times (D, N), the ceiling beside the others
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "zigzag", "striped")

_TEXT, _TEXT_OR_NULL, _COUNT, _NUMBER = (str,), (str, type(None)), (int,), (float, int)
FIELDS = {
    "run": _TEXT,  # the same for all rows measured together
    "commit": _TEXT_OR_NULL,
    "date": _TEXT,  # YYYY-MM-DD, UTC
    "gpu": _TEXT,  # as torch names it; "CPU" without one
    "n_gpus": _COUNT,
    "driver": _TEXT_OR_NULL,
    "cuda": _TEXT_OR_NULL,
    "torch": _TEXT,
    "triton": _TEXT_OR_NULL,
    "stage": _TEXT_OR_NULL,  # "02_fa2_cuda"; null for a peer
    # The stem of the kernel's file; "fwd_0_scalar+bwd_0_scalar" for fwd+bwd; "fwd_8_hopper:LAZY=0" with a switch turned.
    "kernel": _TEXT_OR_NULL,
    "peer": _TEXT_OR_NULL,
    "source": _TEXT_OR_NULL,  # hash of the kernel's files, see source.py
    "pass": _TEXT,
    "dtype": _TEXT,
    "B": _COUNT,
    "H": _COUNT,
    "Hk": _COUNT,
    "N": _COUNT,
    "D": _COUNT,
    "causal": (bool,),
    "layout": _TEXT_OR_NULL,  # stage 04: how the sequence is dealt to the ranks
    "ms_median": _NUMBER,
    "ms_p20": _NUMBER,
    "ms_p80": _NUMBER,
    "reps": _COUNT,
    "tflops": _NUMBER,
    "error": _NUMBER,  # max |result - float64| over the results of the pass
}
# What a kernel and a peer are compared at, and what two rows that measure the same thing share.
SETTING = ("gpu", "n_gpus", "pass", "dtype", "B", "H", "Hk", "N", "D", "causal")
SUBJECT = ("stage", "kernel", "peer", "layout", *SETTING)


def validate(row):
    """The row itself. Raises ValueError that lists all that is wrong with it."""
    wrong = [f"{name} is missing" for name in FIELDS if name not in row]
    wrong += [f"{name} is not a field" for name in row if name not in FIELDS]
    known = {name: value for name, value in row.items() if name in FIELDS}
    wrong += [f"{name} is {value!r}" for name, value in known.items() if not _has_type(value, FIELDS[name])]
    _raise_if(wrong, row)
    wrong += [f"pass is {row['pass']!r}, not one of {PASSES}"] * (row["pass"] not in (*PASSES, MATMUL))
    wrong += [f"dtype is {row['dtype']!r}, not one of {tuple(DTYPES)}"] * (row["dtype"] not in DTYPES)
    wrong += [f"layout is {row['layout']!r}, not one of {LAYOUTS}"] * (row["layout"] not in (None, *LAYOUTS))
    wrong += _wrong_subject(row)
    if not 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]:
        wrong.append("0 < ms_p20 <= ms_median <= ms_p80 does not hold")
    if row["reps"] < MIN_REPS:
        wrong.append(f"reps is {row['reps']}, fewer than {MIN_REPS}")
    if row["tflops"] <= 0 or row["error"] < 0:
        wrong.append("tflops must be > 0 and error >= 0")
    _raise_if(wrong, row)
    return row


def _raise_if(wrong, row):
    if wrong:
        raise ValueError(f"not a results row: {'; '.join(wrong)}. Row: {row}")


def _has_type(value, types):
    """bool counts as no number, and a number must be finite (JSON has no NaN)."""
    if isinstance(value, bool) != (types == (bool,)) or not isinstance(value, types):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _wrong_subject(row):
    """A row is about a kernel or about a peer."""
    of_kernel = [row["stage"], row["kernel"], row["source"]]
    if (row["pass"] == MATMUL) != (row["peer"] == MATMUL):
        return ["the pass matmul is the peer matmul's, and its only one"]
    if row["peer"] is not None:
        return ["a peer's row has no stage, kernel or source"] * (of_kernel != [None] * 3)
    if None in of_kernel:
        return ["a row without a peer needs stage, kernel and source"]
    if not re.fullmatch(r"\d\d_\w+", row["stage"]):
        return [f"stage is {row['stage']!r}, not a stem like '02_fa2_cuda'"]
    return []


def slug(gpu):
    """The GPU's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def append(rows, folder=OWN):
    """Adds rows to <folder>/<gpu>.jsonl; returns those files. Nothing is written if a row is not valid."""
    lines = {}
    for row in rows:
        ordered = {name: validate(row)[name] for name in FIELDS}
        lines.setdefault(Path(folder) / f"{slug(row['gpu'])}.jsonl", []).append(json.dumps(ordered) + "\n")
    for path, text in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(text)
    return list(lines)


def read(where=COMMITTED, *, switched=False):
    """The rows of a .jsonl file, or of all in a folder. ValueError names a bad row's file and line.

    switched: also those of runs in which a kernel's switches were turned, which answer another question than the others do.
    """
    where = Path(where)
    rows = []
    for path in sorted(where.glob("*.jsonl")) if where.is_dir() else [where] if where.exists() else []:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(validate(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    turned = {row["run"] for row in rows if ":" in (row["kernel"] or "")}
    return [row for row in rows if switched or row["run"] not in turned]


def latest(rows):
    """One row for each subject, in the order of first appearance: the last one measured.

    Of a peer it is the last one of the runs that measured most there: beside the kernels that it is compared with.
    """
    company = Counter((row["run"], *(row[name] for name in SETTING)) for row in rows)
    beside = lambda row: company[row["run"], *(row[name] for name in SETTING)]  # noqa: E731
    chosen = {}
    for row in rows:
        subject = tuple(row[name] for name in SUBJECT)
        if not (row["peer"] and subject in chosen and beside(row) < beside(chosen[subject])):
            chosen[subject] = row
    return list(chosen.values())


def provenance(device="cuda", *, commit=None, n_gpus=1):
    """The fields of a row that say where and with what it was measured, the same for a whole run.

    commit: for a machine without the git history; otherwise git is asked, and null where it does not know.
    """
    now = datetime.now(UTC)
    on_gpu = torch.device(device).type == "cuda"
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}",
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "date": f"{now:%Y-%m-%d}",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "n_gpus": n_gpus if on_gpu else 0,
        "driver": _driver() if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
    }


def _driver():
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _version(package):
    """Without importing it: Triton decides at import whether to compile or to interpret."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command):
    """What a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
