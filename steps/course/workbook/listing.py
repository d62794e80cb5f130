"""Source text of the stages' files, for notebooks: shows it, compares two files, and plants a mistake in a kernel.

Because the text is read from the files, no notebook contains a second copy of a kernel that could become outdated.
"""

import ast
import difflib
import re
import shutil
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from steps.course.workbook import exercises

STEPS = Path(__file__).parents[2]


class Source(str):
    """Source text. Jupyter shows it as a highlighted code block; elsewhere it prints as plain text."""

    language = "python"

    def _repr_markdown_(self):
        return f"```{self.language}\n{self}\n```"

    def __repr__(self):
        return str(self)


def show(file, *names, until=None):
    """The source of these functions, or of the whole file without a name, as a code block.

    file: the stem of a kernel file, such as "fwd_3_tiled". Where two stages have a file of that stem, the stage comes
    first: "step00_naive/fwd_3_tiled". A hunt's id, such as "00.bug1", stands for its broken kernel. The
    FileNotFoundError or KeyError for an unknown name lists the known ones.
    until: then the name is no function but a text, and the source is that of the lines from the first one that contains
    it to the one before the next that contains until. ValueError if there are none.
    """
    if isinstance(hunt := exercises.load().get(file), exercises.Hunt):
        return _source(hunt.broken, hunt.path)
    path = find(file)
    text = path.read_text()
    if until is not None:
        text = _between(text, *names, until, path)
    elif names := [name for name in names if name is not None]:
        function = _python_function if path.suffix == ".py" else _cuda_function
        text = "\n\n\n".join(function(text, name, path).strip("\n") for name in names)
    return _source(text, path)


def _between(text, first, last, path):
    """The lines from the one that contains `first` to the one before the next that contains `last`, moved left."""
    found = re.search(rf"^[^\n]*{re.escape(first)}.*?(?=^[^\n]*{re.escape(last)})", text, re.M | re.S)
    if not found:
        raise ValueError(f"{path.name} has no line with {first!r} that one with {last!r} follows.")
    return textwrap.dedent(found[0]).rstrip()


def diff(old, new):
    """What changes from one kernel file to another, as a unified diff. Files are named as in `show`."""
    a, b = find(old), find(new)
    before, after = a.read_text().splitlines(), b.read_text().splitlines()
    result = Source("\n".join(difflib.unified_diff(before, after, a.name, b.name, n=2, lineterm="")))
    result.language = "diff"
    return result


@contextmanager
def edited(file, *edits):
    """Inside `with`, stage 02 compiles its kernels from a copy of its .cu files in which `file` is edited.

    Gives the lines of the edited file.
    file: such as "fwd_0_scalar.cu". edits: pairs (old, new) of text. Raises ValueError unless the file has each old
    exactly once.
    """
    from steps import contract
    from steps.step02_fa2_cuda import calls, launches

    text = (launches.HERE / file).read_text()
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{file} contains {old!r} {text.count(old)} times; it must contain it exactly once.")
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        for path in launches.HERE.glob("*.cu"):
            shutil.copy(path, folder)
        (Path(folder) / file).write_text(text)
        # The plans of earlier calls are kept. They would go on with the kernels that were compiled before.
        files, plans = mock.patch.object(launches, "HERE", Path(folder)), mock.patch.dict(calls.plans, clear=True)
        with files, plans, mock.patch.object(contract, "key_of", return_value=None):
            yield text.splitlines()


def find(file):
    """The path of a kernel file, from its stem with or without the stage in front."""
    stage, _, stem = file.rpartition("/")
    found = [p for p in STEPS.glob(f"{stage or 'step*'}/**/{stem}.*") if p.suffix in (".py", ".cu", ".cuh", ".h")]
    if len(found) != 1:
        names = ", ".join(sorted(str(p.relative_to(STEPS)) for p in found or STEPS.glob("step*/*_[0-9]_*")))
        raise FileNotFoundError(f"{file!r} names {len(found)} files; there are: {names}")
    return found[0]


def _python_function(text, name, path):
    """The text of a function of a Python file, with its decorators and comments. It may be nested in a factory."""
    kinds = ast.FunctionDef | ast.ClassDef
    functions = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}
    if name not in functions:
        raise KeyError(f"{path.name} has no function {name!r}; it has: {', '.join(functions)}")
    node = functions[name]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _cuda_function(text, name, path):
    """The text of a function of a CUDA file, from the comment above its signature to the brace that closes it."""
    span = cuda_span(text, name)
    if span is None:
        names = re.findall(r"^[^\s/#}].*?\b(\w+)\(", text, re.M)
        raise KeyError(f"{path.name} has no function {name!r}; it has: {', '.join(dict.fromkeys(names))}")
    return "\n".join(text.splitlines()[span.start : span.stop])


def cuda_span(text, name):
    """The slice of the function's lines, from the comment above it to its closing brace; None if it is not there."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(rf"[^\s/#}}].*\b{re.escape(name)}\s*\(", line)]
    if not heads:
        return None
    first = last = heads[0]
    while first and (lines[first - 1].startswith(("//", "template", "extern", "__"))):
        first -= 1
    if not lines[last].rstrip().endswith("}"):  # A function of one line ends where it begins.
        while last + 1 < len(lines) and not lines[last].startswith("}"):
            last += 1
    return slice(first, last + 1)


def _source(text, path):
    result = Source(text)
    result.language = "python" if path.suffix == ".py" else "cpp"
    return result
