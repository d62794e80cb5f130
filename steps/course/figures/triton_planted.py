"""A file of stage 03 with a mistake in it."""

import importlib
import itertools
import sys
import tempfile
from pathlib import Path

from steps.step03_triton import fwd_0_fused

FILES = "fwd_0_fused", "replay", "flash", "flash_kernels", "features", "tiles"  # they import no other file
numbers = itertools.count()
folder = tempfile.TemporaryDirectory()  # Triton reads a kernel's text from its file when it first runs.
sys.path.insert(0, folder.name)


def planted(module, file, before, after):
    """The module of stage 03, from a copy of FILES in which `after` stands for `before` in one file."""
    package = Path(folder.name, f"planted_{next(numbers)}")
    package.mkdir()
    for stem in FILES:
        text = Path(fwd_0_fused.__file__).with_name(f"{stem}.py").read_text()
        if stem == file and before not in text:
            raise ValueError(f"{file} has no {before!r}.")
        (package / f"{stem}.py").write_text(text.replace(before, after) if stem == file else text)
    return importlib.import_module(f"{package.name}.{module}")
