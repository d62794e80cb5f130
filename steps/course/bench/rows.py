"""A measurement as one line of JSON: its fields, how it is checked, written and read, and when it is stale.

A row is a dict with the keys of FIELDS, of a stage's kernel (`stage`, `kernel` and `source` are set) or of a peer.
Committed rows are in steps/course/bench/results/<gpu>.jsonl, a reader's own in my/results/. What else is recorded of a
GPU is in <gpu>.<kind>.json beside them.

A row is stale, and no longer shown, once the hash in its `source` has changed. The hash covers what decides how fast a
kernel runs and what it computes: its code without comments, and in CUDA how it is launched at the row's own sizes on
the row's own GPU. If a tile changes for head_dim 64, the rows of head_dim 64 become stale, and no others do. Functions
may move from file to file, because the hash knows no names of files, no imports and no order. Where a kernel's text
changes and a row's machine code does not, tests/support/rehash.py gives it the new hash.
"""

import ast
import functools
import hashlib
import io
import json
import math
import os
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch

from steps.course.bench import cost
from steps.course.bench.timing import MIN_REPS
from steps.places import IS_CLONE, MY, ROOT
from steps.step02_fa2_cuda import ladder, launches

COMMITTED = ROOT / "steps" / "course" / "bench" / "results"
OWN = MY / "results"

MATMUL = "matmul"  # a peer and its pass: a plain product, (N, D) times (D, N), as a ceiling for attention
COPY = "copy"  # a peer and its pass: k (B, Hk, Nk, D) copied in device memory, as a ceiling for decoding
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NUMBER = float | int
FIELDS = {
    "run": str,  # shared by all that was measured together
    "commit": str | None,
    "date": str,  # YYYY-MM-DD
    "gpu": str,  # torch's name of it
    "n_gpus": int,
    "driver": str | None,
    "cuda": str | None,
    "torch": str,
    "triton": str | None,
    "stage": str | None,  # "02_fa2_cuda"; null for a peer, as the kernel
    "kernel": str | None,  # the stem of its file, "fwd_a+bwd_b" of two, "folder/a", "fwd_a:LAZY=0" with a switch turned
    "peer": str | None,  # its name; null for a kernel
    "source": str | None,  # a hash of the kernel and its launch; null for a peer
    "pass": Literal["fwd", "bwd", "fwd+bwd", MATMUL, COPY],
    "dtype": Literal[*DTYPES],
    "B": int,  # batch
    "H": int,  # query heads
    "Hk": int,  # heads of K and V
    "N": int,  # queries
    "Nk": int,  # keys
    "D": int,  # head_dim
    "causal": bool,
    "layout": Literal[None, "contiguous", "zigzag", "striped"],  # stage 04: how the sequence lies on the ranks
    "options": dict,  # what else was asked for, by name: feature, window, transport, strategy, graph, ...
    "timing": Literal["interleaved", "sustained"],  # single calls of all candidates in turn, or a second of one's calls
    "clock_mhz": NUMBER | None,  # MHz, the median meanwhile, of sustained rows
    "watts": NUMBER | None,  # W, likewise
    "ms_median": NUMBER,  # ms a call, of several GPUs the slowest rank's
    "ms_p20": NUMBER,  # ms
    "ms_p80": NUMBER,  # ms
    "reps": int,  # calls that were timed
    "tflops": NUMBER,  # TFLOP/s; 0 for a copy
    "error": NUMBER,  # max |result - float64| over the results of the pass
}
OPTIONAL = {  # few rows have them
    "peak_bytes": int,  # bytes of device memory, beyond the inputs, that one call held at once
    "hidden": NUMBER,  # by a profiler: the share of the time of copies between GPUs in which a kernel computes
    "idle": NUMBER,  # by a profiler: the share of the time in which no kernel computes
    "launches": NUMBER,  # by a profiler: kernels and copies of one call
    "ms_worst": NUMBER,  # ms, of the slowest round
    "host_us": NUMBER,  # microseconds that a call takes the CPU, which does not wait for the GPU
    "peer_version": str,  # "flash-attn-4 4.0.0b36", "cudnn 9.19.0"
}
# What a kernel and a peer are compared at, and what two rows that measure the same thing share.
SETTING = ("gpu", "n_gpus", "pass", "dtype", "B", "H", "Hk", "N", "Nk", "D", "causal", "options", "timing")


def setting(row):
    """The row's values of SETTING as a tuple that can be the key of a dictionary."""
    return tuple(json.dumps(row[name], sort_keys=True) if name == "options" else row[name] for name in SETTING)


def label(row):
    """Who a row is about: "02 fwd_0_scalar", or the peer's name."""
    layout = ", contiguous" if row["layout"] == "contiguous" else ""
    return row["peer"] or f"{row['stage'][:2]} {row['kernel']}{layout}"


def validate(row):
    """The row itself. Raises ValueError that says what is wrong with it."""
    kinds = FIELDS | OPTIONAL
    wrong = [f"{name} is missing" for name in FIELDS if name not in row]
    wrong += [f"{name} is not a field" for name in row if name not in kinds]
    wrong += [f"{name} is {row[name]!r}" for name in kinds if name in row and not _fits(row[name], kinds[name])]
    if wrong := wrong or _broken_rules(row):
        raise ValueError(f"not a results row: {'; '.join(wrong)}. Row: {row}")
    return row


def _fits(value, kind):
    """Whether FIELDS allows it. bool counts as no number, and a number must be finite (JSON has no NaN)."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    finite = not isinstance(value, float) or math.isfinite(value)
    return type(value) is kind if bool in (kind, type(value)) else isinstance(value, kind) and finite


def _broken_rules(row):
    """Which of these rules a row breaks whose fields fit."""
    of_kernel = [row[name] is not None for name in ("stage", "kernel", "source")]
    own_pass = {row["pass"], row["peer"]} & {MATMUL, COPY}
    load, sustained = [row["clock_mhz"], row["watts"]], row["timing"] == "sustained"
    kept = {
        "either a peer, or stage, kernel and source": of_kernel == [row["peer"] is None] * 3,
        "the passes matmul and copy are those of these peers": not own_pass or row["pass"] == row["peer"],
        "0 < ms_p20 <= ms_median <= ms_p80": 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"],
        f"reps >= {MIN_REPS}, or 5 of several GPUs": row["reps"] >= (MIN_REPS if row["n_gpus"] < 2 else 5),
        "tflops > 0, but 0 of a copy; error >= 0": (row["tflops"] > 0) == (row["pass"] != COPY) and row["error"] >= 0,
        "clock_mhz and watts of sustained rows alone": all((x or 0) > 0 if sustained else x is None for x in load),
        "sustained on one GPU": not sustained or row["n_gpus"] < 2,
    }
    return [f"against the rule: {rule}" for rule in kept if not kept[rule]]


def append(row, folder=OWN):
    """Adds a row to <folder>/<gpu>.jsonl. ValueError, and nothing is written, if it is not valid."""
    validate(row)
    ordered = {name: row[name] for name in FIELDS | OPTIONAL if name in row}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"{slug(row['gpu'])}.jsonl").open("a") as file:
        file.write(json.dumps(ordered) + "\n")


def read(folder=COMMITTED, *, switched=False, timing="interleaved", several_gpus=False):
    """The rows of all .jsonl files in a folder. ValueError names a bad row's file and line.

    switched: also those of runs in which a kernel's switches were turned, which answer another question. timing: only
    those that were timed in this way. several_gpus: only those of several GPUs together, otherwise only the others.
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
        subject = row["stage"], row["kernel"], row["peer"], row["layout"], setting(row)
        before = chosen.get(subject)
        if not before or company[row["run"], setting(row)] >= company[before["run"], setting(row)]:
            chosen[subject] = row
    return list(chosen.values())


# --- where and with what something was measured -------------------------------------------------------------


def provenance(device="cuda", *, n_gpus=1):
    """The fields of a row that say where and with what it was measured; STEPS_COMMIT names it where git cannot."""
    now = datetime.now(UTC)
    on_gpu = torch.device(device).type == "cuda"
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    # An installed package may lie in a folder of somebody else's repository.
    commit = output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD") if IS_CLONE else None
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{os.getpid()}",
        "commit": os.environ.get("STEPS_COMMIT") or commit,
        "date": f"{now:%Y-%m-%d}",
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "n_gpus": n_gpus if on_gpu else 0,
        "driver": driver and driver.splitlines()[0],
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else None,  # not imported, which sets its mode
    }


def output(*command):
    """What a command prints, or None where it is missing or fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=30).strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def slug(gpu):
    """The GPU's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def write_record(kind, record, folder=COMMITTED):
    """Writes what is not rows, such as the "profile" of a GPU, to <folder>/<gpu>.<kind>.json; returns that path."""
    path = Path(folder) / f"{slug(record['gpu'])}.{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    return path


def read_record(kind, gpu="NVIDIA H200", folder=COMMITTED):
    """What `write_record` wrote, or {} where there is no such file."""
    path = Path(folder) / f"{slug(gpu)}.{kind}.json"
    return json.loads(path.read_text()) if path.exists() else {}


# --- what is stale ------------------------------------------------------------------------------------------

# A ring is handed these: its exchanges, its stream for copies, and the block.
ALSO = {("04_ring", "ring"): ("block", "ranks/comm", "ranks/side")}
# These are not followed. Some start ranks, compare their calls (of comm.py and entry.py a strategy uses no more), watch
# them and count what they cost. A row of the ring names its transport, "ring+relay" or "ring+fetch". replay.py launches
# the kernels of stage 03, while the GPU computes.
NOT_FOLLOWED = (
    "account.py", "one_device.py", "agree.py", "comm.py", "entry.py", "launch.py", "watch.py", "relay.py", "replay.py",
)  # fmt: skip
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# A string or character literal, which is kept because it may contain // or /*; or a comment, which is dropped.
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.S)
_INCLUDE = re.compile(r'^#include "([\w.]+)".*$', re.M)


def is_stale(row, root=ROOT):
    """Whether the kernel or its launch has changed since the row was measured, or is gone.

    Never of a peer's row, nor of one GPU beside a ring, whose own blocks do not count either: both rows say how fast
    the kernels of their commit were.
    """
    beside_a_ring = row["stage"] == "02_fa2_cuda" and row["n_gpus"] > 1
    return row["peer"] is None and not beside_a_ring and row["source"] != row_hash(row, root)


def fresh(rows, root=ROOT):
    """Those of the rows that are not stale: what may be shown beside the files as they are."""
    return [row for row in rows if not is_stale(row, root)]


def row_hash(row, root=ROOT):
    """Twelve hexadecimal digits for the row's kernel and its launch; None if there is no such kernel or launch.

    Of the row it reads stage, kernel, gpu, dtype, the sizes and causal.
    """
    try:
        launched = {} if row["stage"] != "02_fa2_cuda" else launched_by(row)
    except (TypeError, ValueError, NotImplementedError, KeyError):  # the kernel is gone, or no longer takes these sizes
        return None
    return code_hash(row["stage"], row["kernel"], root, launched)


def code_hash(stage, kernel, root=ROOT, launched=()):
    """The same for the kernel's code alone: for what is recorded of a kernel at no sizes in particular."""
    files = source_files(stage, kernel, root)
    if not files:
        return None
    parts = sorted(part for path in files for part in parts_of(path))
    digest = hashlib.sha256("\n".join(parts).encode())
    if launched:
        digest.update(json.dumps(launched, sort_keys=True).encode())
    return digest.hexdigest()[:12]


def parts_of(path):
    """What of a file counts: of Python each statement by itself, so that a function may move to another file."""
    return (python_code if path.suffix == ".py" else cuda_code)(path.read_text())


def launched_by(row):
    """Of a row of stage 02, {stem of the file: [(grid, block, bytes of shared memory, {macro: value}) of each kernel]}.

    Two kernels also have the order of their tiles: fwd_8_hopper with a causal mask {"order": (section, alternate)}, and
    bwd_3_hopper {"key order": (ascending, section, alone)}.
    """
    stems, _, turned = row["kernel"].partition(":")
    gpu = cost.GPUS.get(row["gpu"], cost.GPUS["NVIDIA H200"])
    how = {name: row[name] for name in ("B", "H", "Hk", "Nk", "D", "causal")}
    how |= {"Nq": row["N"], "dtype": DTYPES[row["dtype"]]}
    how |= {"processors": gpu.sms, "shared_limit": gpu.multiprocessor.shared_per_block}
    how |= {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", turned)}
    problems = {stem: problem_at(stem, **how) for stem in stems.split("+")}
    found = {stem: [launch[1:] for launch in geometry_of(problem)] for stem, problem in problems.items()}
    for problem in problems.values():
        if problem.row is ladder.FORWARD["hopper"] and problem.causal:
            found["order"] = launches.order_of_tiles(problem)
        if problem.row is ladder.BACKWARD["hopper"]:
            found["key order"] = launches.order_of_key_tiles(problem)
    return found


def geometry(stem, **how):
    """[(kernel, grid, block, shared bytes, macros)] of the launches of a file of stage 02, such as "fwd_5_fa2".

    processors, shared_limit: the GPU's multiprocessors, and the bytes of shared memory that a block can have there.
    """
    return geometry_of(problem_at(stem, **how))


def problem_at(stem, *, B, H, Hk, Nq, Nk, D, causal, dtype, processors, shared_limit, **switches):
    """The ladder.Problem of this file of stage 02 and these sizes. switches: {macro: value}."""
    (row,) = (row for row in (*ladder.ROWS, *ladder.BACKWARD_ROWS) if row.file == f"{stem}.cu")
    how = causal, D**-0.5, *row.tile(D, shared_limit), processors
    return ladder.Problem(row, B, H, Hk, Nq, Nk, D, dtype, *how, switches=tuple(switches.items()))


def geometry_of(problem):
    """What `geometry` gives, of a ladder.Problem."""
    launched = launches.forward_launches if problem.row in ladder.ROWS else launches.backward_launches
    found = launched(problem, defaultdict(lambda: (0, 0, 0)))
    return [(spec.kernel, spec.grid, spec.block, spec.shared_bytes, spec.macros) for spec in found]


def source_files(stage, kernel, root=ROOT):
    """The files that a kernel's code consists of, sorted; empty if there is no such kernel.

    They are the kernel's own, and the files of its stage that those import or include. stage, kernel: as in FIELDS.
    """
    folder, stems = Path(root) / "steps" / f"step{stage}", kernel.partition(":")[0].split("+")
    own = [path for stem in stems for path in folder.glob(f"**/{stem}.*") if path.suffix in (".py", ".cu")]
    if len(own) != len(stems):
        return []
    also = [folder / f"{name}.py" for stem in stems for name in ALSO.get((stage, stem), ())]
    found, waiting = set(), {*own, *also}
    while waiting:
        path = waiting.pop()
        found.add(path)
        used = _used(path, path.read_text(), folder)
        waiting |= {path for path in used if path.exists() and path.name not in NOT_FOLLOWED} - found
    return sorted(found)


@functools.cache
def _used(path, text, folder):
    """The files of its stage that a file imports or includes; some of them may not exist."""
    if path.suffix != ".py":
        names = _INCLUDE.findall(text)
        if re.search("wgmma_[sr]s<", "".join(cuda_code(text))):  # functions that wgmma.py writes
            names.append("wgmma.py")
        return {path.with_name(name) for name in names}
    used = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = f"{node.module or ''}".removeprefix(f"steps.{folder.name}").strip(".")
            if node.level:
                start = path.parents[node.level - 1]
            elif (node.module or "").startswith(f"steps.{folder.name}"):
                start = folder
            else:
                continue
            base = start.joinpath(*filter(None, module.split(".")))
            used |= {base.with_suffix(".py")} if module else set()
            used |= {base / f"{alias.name}.py" for alias in node.names}
    return used


@functools.cache  # many rows are of one kernel
def cuda_code(text):
    """C++ without comments, whitespace and the names of the files that it includes, as a list of one string."""
    return ["".join(_COMMENT.sub(lambda match: match[1] or " ", _INCLUDE.sub("", text)).split())]


@functools.cache
def python_code(text):
    """Each statement of a module but imports and its docstring, without comments, docstrings and whitespace."""
    lines, parts = text.splitlines(keepends=True), []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        first = min(x.lineno for x in (node, *getattr(node, "decorator_list", [])))
        if part := _statement("".join(lines[first - 1 : node.end_lineno])):
            parts.append(part)
    return parts


def _statement(text):
    """A statement's tokens in one string; the begin and end of a block are kept, as » and «."""
    block = {tokenize.INDENT: "»", tokenize.DEDENT: "«", tokenize.NEWLINE: ";"}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _LAYOUT]
    code, statement = [], []
    for token in tokens:
        statement.append(token)
        if token.type in block:
            if any(t.type not in (tokenize.STRING, tokenize.NEWLINE) for t in statement):  # otherwise it is a docstring
                code += [block.get(t.type, t.string) for t in statement]
            statement = []
    # From Python 3.12 on an f-string comes in pieces, its doubled braces single: of braces in a row only one counts.
    return re.sub(r"([{}])\1+", r"\1", "".join("".join(code).split()))
