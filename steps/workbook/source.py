"""Shows kernel source from the stages' files, or plants a mistake in it, so that a notebook never carries a second copy."""

import ast
import difflib
import re
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

STEPS = Path(__file__).parents[1]


class Source(str):
    """Text that Jupyter shows as a highlighted code block and that prints as itself."""

    language = "python"

    def _repr_markdown_(self):
        return f"```{self.language}\n{self}\n```"

    def __repr__(self):
        return str(self)


def show(file, name=None):
    """The source of one function (or of the whole file when name is None), as a code block.

    file: a kernel file's stem, such as "fwd_3_tiled"; with its stage, "step00_naive/fwd_3_tiled", where two stages share it.
    Raises FileNotFoundError or KeyError naming what there is.
    """
    path = find(file)
    text = path.read_text()
    if name is not None:
        text = (_python_function if path.suffix == ".py" else _cuda_function)(text, name, path)
    return _source(text, path)


def diff(old, new):
    """What changes from one kernel file to the next, as a unified diff; files as in `show`."""
    a, b = find(old), find(new)
    lines = difflib.unified_diff(a.read_text().splitlines(), b.read_text().splitlines(), a.name, b.name, n=2, lineterm="")
    result = Source("\n".join(lines))
    result.language = "diff"
    return result


@contextmanager
def edited(launchers, file, *edits):
    """Inside `with`, the launchers of a module of stage 02 find a copy of a kernel file, and none of the others; gives its lines.

    launchers: step02_fa2_cuda.kernels or .hopper. file: such as "fwd_0_scalar.cu". edits: (old, new); ValueError unless each old
    stands there exactly once.
    """
    text = (launchers.HERE / file).read_text()
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{file} has {text.count(old)} places with {old!r}, not one.")
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(launchers, "HERE", Path(folder)):
        (Path(folder) / file).write_text(text)
        yield text.splitlines()


def find(file):
    """The path of a kernel file by its stem, with or without the stage in front."""
    stage, _, stem = file.rpartition("/")
    found = [p for p in STEPS.glob(f"{stage or 'step*'}/**/{stem}.*") if p.suffix in (".py", ".cu", ".cuh", ".h")]
    if len(found) != 1:
        names = ", ".join(sorted(str(p.relative_to(STEPS)) for p in found or STEPS.glob("step*/*_[0-9]_*")))
        raise FileNotFoundError(f"{file!r} names {len(found)} files; there are: {names}")
    return found[0]


def _python_function(text, name, path):
    """The named function of a Python file with its decorators and comments, also when it is nested in a factory."""
    functions = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if name not in functions:
        raise KeyError(f"{path.name} has no function {name!r}; it has: {', '.join(functions)}")
    node = functions[name]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _cuda_function(text, name, path):
    """The named function of a CUDA file: from the comment above its signature to the brace that closes it."""
    span = cuda_span(text, name)
    if span is None:
        names = re.findall(r"^[^\s/#}].*?\b(\w+)\(", text, re.M)
        raise KeyError(f"{path.name} has no function {name!r}; it has: {', '.join(dict.fromkeys(names))}")
    return "\n".join(text.splitlines()[span.start : span.stop])


def cuda_span(text, name):
    """The function's lines as a slice, with the comment above it and its closing brace; None where there is no such function."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(rf"[^\s/#}}].*\b{re.escape(name)}\s*\(", line)]
    if not heads:
        return None
    first = last = heads[0]
    while first and (lines[first - 1].startswith(("//", "template", "extern", "__"))):
        first -= 1
    while last + 1 < len(lines) and not (lines[last].startswith("}") or last == heads[0] and lines[last].rstrip().endswith("}")):
        last += 1
    return slice(first, last + 1)


def _source(text, path):
    result = Source(text)
    result.language = "python" if path.suffix == ".py" else "cpp"
    return result
