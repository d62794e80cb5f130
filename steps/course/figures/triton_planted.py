"""A file of stage 03 with a mistake in it."""

import importlib
import itertools
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

from steps import cached
from steps.course.figures.planted import changed_lines
from steps.step03_triton import fwd_0_fused

FILES = "fwd_0_fused", "replay", "features/flash", "features/flash_kernels", "features/scores", "features/tiles"
numbers = itertools.count()
folder = tempfile.TemporaryDirectory()  # Triton reads a kernel's text from its file when it first runs.
sys.path.insert(0, folder.name)


def planted(module, file, before, after):
    """The module of stage 03, from a copy of FILES in which `after` stands for `before` in one file."""
    package = Path(folder.name, f"planted_{next(numbers)}")
    (package / "features").mkdir(parents=True)
    shutil.copy(Path(cached.__file__), package)
    names = {Path(path).name: path for path in FILES}  # they import no other file
    for stem, path in names.items():
        text = (Path(fwd_0_fused.__file__).parent / f"{path}.py").read_text()
        if stem == file and before not in text:
            raise ValueError(f"{file} has no {before!r}.")
        (package / f"{path}.py").write_text(text.replace(before, after) if stem == file else text)
    return importlib.import_module(f"{package.name}.{names[module].replace('/', '.')}")


def diff(file, before, after):
    """What is planted, as lines of a page: the first that is removed (-) and added (+), and how many more there are."""
    (path,) = (path for path in FILES if path.endswith(file))
    text = (Path(fwd_0_fused.__file__).parent / f"{path}.py").read_text()
    removed, added, *others = changed_lines(text, before, after, width=200)
    lines = [textwrap.fill(line, 88, subsequent_indent=6 * " ", break_long_words=False) for line in (removed, added)]
    return "\n".join(lines + [f"  and {len(others) // 2} more such lines"] * bool(others))
