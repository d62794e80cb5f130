"""Which files a kernel is made of, and a hash of what they say: a results row is stale once that has changed.

Comments, docstrings and layout do not count: who explains a kernel better need not measure it again.
"""

import functools
import hashlib
import io
import re
import tokenize
from pathlib import Path

from reference.bench.rows import ROOT

_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# A string or character literal (kept, for it may contain // or /*), or a comment (dropped).
_CUDA = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.S)


def source_files(stage, kernel, root=ROOT):
    """A kernel's files, sorted; empty if there is no such kernel.

    stage: "02_fa2_cuda". kernel: a file stem, or two joined by "+"; what follows a ":" does not count. To a kernel in Python
    belong the files beside it that it imports; to one in CUDA the headers beside it, and its host side: the files that name
    it (`"fwd_5_fa2.cu"`), and what these import.
    """
    folder, stems = Path(root) / "steps" / f"step{stage}", kernel.partition(":")[0].split("+")
    own = [path for stem in stems for path in folder.glob(f"{stem}.*")]
    if {path.stem for path in own} != set(stems):
        return []
    if all(re.match(r"(fwd|bwd)_.*\.py$", path.name) for path in own):
        return sorted(with_imports(own))
    headers = [path for suffix in ("h", "cuh") for path in folder.glob(f"*.{suffix}")]
    hosts = [path for path in folder.glob("*.py") if any(f'"{stem}.cu"' in path.read_text() for stem in stems)]
    return sorted({*own, *headers, *with_imports(hosts)})


def with_imports(files):
    """The files and those beside them that they import (`from .cache import get`, `from . import cache`), and so on."""
    found, waiting = set(), set(files)
    while waiting:
        path = waiting.pop()
        found.add(path)
        imports = re.findall(r"^ *from \.(?:(\w+) import| import ([\w, ]+))", path.read_text(), re.M)
        beside = {path.with_name(f"{name}.py") for one, several in imports for name in (one or several).split(", ")}
        waiting |= {path for path in beside - found if path.exists()}
    return found


def source_hash(files):
    """Twelve hexadecimal digits for the code in `files`, whatever their order, comments and layout."""
    digest = hashlib.sha256()
    for path in sorted(map(Path, files), key=lambda path: path.name):
        text = path.read_text()
        code = python_code(text) if path.suffix == ".py" else cuda_code(text)
        digest.update(f"{path.name}\n{code}\n".encode())
    return digest.hexdigest()[:12]


def is_stale(row, root=ROOT):
    """Whether the kernel's files have changed since the row was measured, or are gone. Never for a peer's."""
    if row["peer"] is not None:
        return False
    files = source_files(row["stage"], row["kernel"], root)
    return not files or source_hash(files) != row["source"]


def fresh(rows, root=ROOT):
    """Those of the rows that are not stale: what may be shown beside the files as they are."""
    return [row for row in rows if not is_stale(row, root)]


@functools.cache  # many rows are of one kernel
def cuda_code(text):
    """C++ without comments and whitespace."""
    return "".join(_CUDA.sub(lambda match: match[1] or " ", text).split())


@functools.cache
def python_code(text):
    """Python without comments, docstrings and whitespace; a block's begin and end are kept, as » and «."""
    block = {tokenize.INDENT: "»", tokenize.DEDENT: "«", tokenize.NEWLINE: ";"}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in _LAYOUT]
    code, statement = [], []
    for token in tokens:
        statement.append(token)
        if token.type in block:
            if any(t.type not in (tokenize.STRING, tokenize.NEWLINE) for t in statement):  # else a docstring
                code += [block.get(t.type, t.string) for t in statement]
            statement = []
    # From Python 3.12 on an f-string comes in pieces, its doubled braces single: of braces in a row only one counts.
    return re.sub(r"([{}])\1+", r"\1", "".join("".join(code).split()))
