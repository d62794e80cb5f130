# SPDX-License-Identifier: MIT
"""Files kept from run to run, named by a hash of everything that they were made from."""

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
    """The file for `parts`; if there is none yet, make(path) writes it, aside first, so that no other process sees half of it."""
    path = folder() / (hashlib.sha256(repr(parts).encode()).hexdigest()[:24] + suffix)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as aside:
            make(Path(aside) / path.name)
            os.replace(Path(aside) / path.name, path)
    return path
