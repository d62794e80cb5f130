# SPDX-License-Identifier: MIT
"""Files that are cached from run to run, each under a hash of everything that it was made from."""

import errno
import functools
import hashlib
import os
import tempfile
import zlib
from pathlib import Path

NAME = "flash-attention-steps"


@functools.cache
def folder() -> Path:
    """$XDG_CACHE_HOME/flash-attention-steps, by default in ~/.cache; a temporary folder where that cannot be used.

    The folder belongs to this user, because files in it are executed. Raises RuntimeError where there is none.
    """
    for path in _places():
        if _can_be_used(path):
            return path
    raise RuntimeError("No folder can keep the compiled kernels: set XDG_CACHE_HOME to one that is yours to write to.")


def _places():
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # The specification of XDG_CACHE_HOME says that a relative path is ignored.
        yield (given if given.is_absolute() else Path.home() / ".cache") / NAME
    except RuntimeError:  # There is no home directory.
        pass
    yield Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"


def _can_be_used(path):
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def get(parts: tuple, suffix: str, make) -> Path:
    """The file for `parts`. If there is none yet, or only a damaged one, make(path) writes it.

    It is written in a folder of its own and then moved, so that no other process sees an incomplete file. Its name
    ends with a checksum of its bytes, which shows whether it has been damaged since. If another process has made the
    same meanwhile, that file is used: a compiler's output need not be bit-equal. Raises RuntimeError if the disk is
    full, or if the folder can no longer be written to.
    """
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    try:
        if found := _find(key, suffix):
            return found
        with tempfile.TemporaryDirectory(dir=folder()) as aside:
            made = Path(aside) / (key + suffix)
            make(made)
            name = f"{key}-{_checksum(made)}{suffix}"
            return _find(key, suffix) or made.replace(folder() / name)
    except (OSError, RuntimeError) as problem:
        # This is in the message of Python as well as in that of a compiler.
        if any(os.strerror(number) in str(problem) for number in (errno.ENOSPC, errno.EDQUOT)):
            raise RuntimeError(
                f"The disk has no room for a compiled kernel: free some of it, or move {folder()} by XDG_CACHE_HOME."
            ) from None
        if getattr(problem, "errno", None) in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise RuntimeError(
                f"The cache of compiled kernels cannot be written to ({problem}): move it by XDG_CACHE_HOME."
            ) from None
        raise


def _find(key, suffix):
    """The whole file of this key, or None. Damaged ones are deleted."""
    for path in folder().glob(f"{key}-*{suffix}"):
        if path.name == f"{key}-{_checksum(path)}{suffix}":
            return path
        path.unlink(missing_ok=True)
    return None


def _checksum(path):
    """A CRC. The compiled headers have 30 MB and are read for every kernel: a hash of them would take twice as long."""
    try:
        return f"{zlib.crc32(path.read_bytes()):08x}"
    except OSError:  # Another process has just deleted it.
        return None
