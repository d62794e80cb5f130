"""What the hash in a row's `source` covers: a row is stale, and no longer shown, once that has changed.

A hash covers what decides how fast a kernel runs and what it computes, and nothing else:

- The kernel's code. For CUDA that is the .cu file, ptx.cuh, and wgmma.py if the kernel calls its wrappers. For Python
  it is the kernel's file, which holds the launcher too, and the files of its stage that it imports; of the ring also
  those that it is handed, in ALSO. Comments, docstrings and layout do not count, so that a kernel which is only
  explained better need not be measured again.
- For CUDA, how the kernel is launched at the row's own sizes on the row's own GPU: names, grid, block, shared memory
  and macros. If a tile changes for head_dim 64, the rows of head_dim 64 become stale, and no others do.

The rest of a CUDA kernel's host code is not covered. It may be rewritten freely, as long as it launches the same.

A ring's row is judged by the ring's code alone, although its blocks are kernels of other stages. So the row of one GPU
beside it, while all GPUs compute, never becomes stale: both say how fast the kernels of their commit were.
"""

import functools
import hashlib
import io
import json
import re
import tokenize
from pathlib import Path

from steps.bench import cost
from steps.bench.rows import DTYPES, ROOT, setting
from steps.step02_fa2_cuda import launch

# A ring is handed these: its exchanges, its stream for copies, and the block.
ALSO = {("04_ring", "ring"): ("block", "comm", "side")}
# These are not followed. They start ranks, compare their calls (of comm.py and entry.py a strategy uses no more), watch
# them and count what they cost; and ring.py imports relay.py for calls that name no transport, but a row names it:
# "ring+relay" or "ring+fetch".
NOT_FOLLOWED = ("account.py", "agree.py", "comm.py", "entry.py", "launch.py", "watch.py", "relay.py")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# A string or character literal, which is kept because it may contain // or /*; or a comment, which is dropped.
_CUDA = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.S)


def is_stale(row, root=ROOT):
    """Whether the kernel or its launch has changed since the row was measured, or is gone. Never for a peer's row."""
    return _is_judged(row) and row["source"] != row_hash(row, root)


def _is_judged(row):
    """Whether the row can become stale: not a peer's, and not that of one GPU beside a ring."""
    return row["peer"] is None and not (row["stage"] == "02_fa2_cuda" and row["n_gpus"] > 1)


def fresh(rows, root=ROOT):
    """Those of the rows that are not stale: what may be shown beside the files as they are."""
    found = {}
    for row in rows:
        subject = row["stage"], row["kernel"], setting(row)
        if subject not in found:  # many rows measure the same thing
            found[subject] = row_hash(row, root) if row["peer"] is None else None
    return [r for r in rows if not _is_judged(r) or r["source"] == found[r["stage"], r["kernel"], setting(r)]]


def row_hash(row, root=ROOT):
    """Twelve hexadecimal digits for the row's kernel and its launch; None if there is no such kernel or launch.

    Of the row it reads stage, kernel, gpu, dtype, the sizes and causal.
    """
    try:
        launched = {} if row["stage"] != "02_fa2_cuda" else launches(row)
    except (TypeError, ValueError, NotImplementedError, KeyError):  # the kernel is gone, or no longer takes these sizes
        return None
    return _hash(source_files(row["stage"], row["kernel"], root), launched)


def code_hash(stage, kernel, root=ROOT):
    """The same for the kernel's code alone: for what is recorded of a kernel at no sizes in particular."""
    return _hash(source_files(stage, kernel, root), {})


def launches(row):
    """Of a row of stage 02, {stem of the file: [(kernel, grid, block, bytes of shared memory, {macro: value})]}."""
    stems, _, turned = row["kernel"].partition(":")
    gpu = gpu_of(row)
    how = {name: row[name] for name in ("B", "H", "Hk", "Nk", "D", "causal")}
    how |= {"Nq": row["N"], "dtype": DTYPES[row["dtype"]]}
    how |= {"processors": gpu.sms, "shared_limit": gpu.multiprocessor.shared_per_block}
    how |= {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", turned)}
    return {stem: launch.geometry(stem, **how) for stem in stems.split("+")}


def gpu_of(row):
    """The row's GPU; for one that cost.py does not list, an H200."""
    return cost.GPUS.get(row["gpu"], cost.GPUS["NVIDIA H200"])


def source_files(stage, kernel, root=ROOT):
    """The files that a kernel's code consists of, sorted; empty if there is no such kernel.

    stage: "02_fa2_cuda". kernel: a file's stem, with its folder's name if it is in one inside of the stage's; or two
    joined by "+". A switch behind a ":" does not count.
    """
    folder, stems = Path(root) / "steps" / f"step{stage}", kernel.partition(":")[0].split("+")
    own = [path for stem in stems for path in folder.glob(f"{stem}.*")]
    if {path.relative_to(folder).with_suffix("").as_posix() for path in own} != set(stems):
        return []
    also = [folder / f"{name}.py" for stem in stems for name in ALSO.get((stage, stem), ())]
    found, waiting = set(), {*own, *also}
    while waiting:
        path = waiting.pop()
        found.add(path)
        names = (_imported_beside if path.suffix == ".py" else _included)(path.read_text())
        used = {path.with_name(name) for name in names}
        if path.suffix == ".py":
            used |= {folder / name for name in _imported_of_stage(path.read_text(), folder.name)}
        waiting |= {file for file in used if file.exists() and file.name not in NOT_FOLLOWED} - found
    return sorted(found)


def _imported_beside(text):
    """The files in the same folder that a Python file imports: `from .tiles import get` or `from . import tiles`."""
    imports = re.findall(r"^ *from \.(?:(\w+) import| import ([\w, ]+))", text, re.M)
    return {f"{name}.py" for one, several in imports for name in (one or several).split(", ")}


def _imported_of_stage(text, package):
    """The same for imports with the stage's whole name: `from steps.step04_ring.merge import Parts`."""
    imports = re.findall(rf"^ *from steps\.{package}\.([\w.]+) import", text, re.M)
    return {f"{name.replace('.', '/')}.py" for name in imports}


def _included(text):
    """The headers that a .cu file includes, and wgmma.py if the file calls the wrappers that wgmma.py writes."""
    code = cuda_code(text)
    wrappers = {"wgmma.py"} if "wgmma_ss<" in code or "wgmma_rs<" in code else set()
    return wrappers.union(re.findall(r'^#include "([\w.]+)"', text, re.M))


def _hash(files, launched):
    if not files:
        return None
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        code = python_code if path.suffix == ".py" else cuda_code
        digest.update(f"{path.name}\n{code(path.read_text())}\n".encode())
    if launched:
        digest.update(json.dumps(launched, sort_keys=True).encode())
    return digest.hexdigest()[:12]


@functools.cache  # many rows are of one kernel
def cuda_code(text):
    """C++ without comments and whitespace."""
    return "".join(_CUDA.sub(lambda match: match[1] or " ", text).split())


@functools.cache
def python_code(text):
    """Python without comments, docstrings and whitespace; the begin and end of a block are kept, as » and «."""
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
