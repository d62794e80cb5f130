"""Where the course lies: in a clone, or as an installed package, which has no pages, notebooks and tests beside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the clone, or the folder of installed packages


def is_clone(root):
    """Whether the folder is a clone of the course. Other packages may have put a pyproject.toml of theirs there."""
    project = root / "pyproject.toml"
    return project.is_file() and 'name = "flash-attention-course"' in project.read_text(errors="replace")


IS_CLONE = is_clone(ROOT)
# The reader's own folder. `grade` sets it for each student. Nothing of a reader's is written beside installed packages.
MY = Path(os.environ.get("STEPS_MY") or (ROOT if IS_CLONE else Path.cwd()) / "my")


def require_clone(what):
    """Ends the program with a line where there is no clone; what: the command that needs one."""
    if not IS_CLONE:
        raise SystemExit(f"{what} needs a clone of the course. This is the installed package in {ROOT}.")
