# SPDX-License-Identifier: MIT
"""Files that are kept from run to run, each under a hash of everything that it was made from."""

import functools
import hashlib
import os
import tempfile
from pathlib import Path


@functools.cache
def folder() -> Path:
    """~/.cache/flash-attention-steps, or a temporary folder where that cannot be written."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash-attention-steps"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix="flash-attention-steps-"))


def get(parts: tuple, suffix: str, make) -> Path:
    """The file for `parts`. If there is none yet, make(path) writes it.

    It is written in a folder of its own and then moved, so that no other process sees an incomplete file.
    """
    path = folder() / (hashlib.sha256(repr(parts).encode()).hexdigest()[:24] + suffix)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as aside:
            make(Path(aside) / path.name)
            os.replace(Path(aside) / path.name, path)
    return path
