"""Stage 02's compile cache: damaged files, folders that cannot be used, and what its key holds."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steps.step02_fa2_cuda import cache, emulator, nvrtc

needs_compiler = pytest.mark.skipif(not emulator.available(), reason="needs g++")
KERNEL = '#include "ptx.cuh"\nextern "C" __global__ void one(Global<float> y) { y[0] = 1; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache's folder for one test, in an empty folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache.folder.cache_clear()
    yield tmp_path / "cache" / cache.NAME
    cache.folder.cache_clear()


def write(path):
    path.write_bytes(b"what was made")


def test_a_file_is_made_once(folder):
    made = []
    paths = [cache.get(("a", 1), ".json", lambda path: made.append(write(path))) for _ in range(2)]
    assert paths[0] == paths[1] and paths[0].parent == folder and len(made) == 1
    assert cache.get(("a", 2), ".json", write) != paths[0]


def test_of_two_that_make_the_same_file_the_second_takes_that_of_the_first(folder):
    """What a compiler writes may differ from run to run, and so may the checksum in the name."""
    inner = []

    def write_later(path):
        inner.append(cache.get(("a",), ".json", write))  # Another process begins later, and ends sooner.
        path.write_bytes(b"what was made, in other bytes")

    assert cache.get(("a",), ".json", write_later) == inner[0] == cache.get(("a",), ".json", None)
    assert [path.read_bytes() for path in folder.iterdir()] == [b"what was made"]


@pytest.mark.parametrize("damage", [b"", b"what was", b"what was mad3"])
def test_a_damaged_file_is_made_anew(folder, damage):
    path = cache.get(("a",), ".json", write)
    path.write_bytes(damage)
    assert cache.get(("a",), ".json", write).read_bytes() == b"what was made"
    assert len(list(folder.iterdir())) == 1
    made = []
    cache.get(("a",), ".json", lambda path: made.append(write(path)))
    assert not made


def test_a_file_appears_whole_or_not_at_all(folder):
    def interrupted(path):
        path.write_bytes(b"what was")
        assert not list(folder.glob("*.json"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get(("a",), ".json", interrupted)
    assert not list(folder.iterdir())


@needs_compiler
def test_each_file_of_a_compilation_may_be_damaged(folder, tmp_path):
    """The library of a kernel, the emulation's headers and its other half. A fresh process loads what was made anew."""
    (tmp_path / "one.cu").write_text(KERNEL)

    def run():
        emulator._load.cache_clear()
        y = torch.zeros(1)
        emulator.launch(tmp_path / "one.cu", "one", [y], grid=1, block=1, macros={})
        assert y.item() == 1

    run()
    files = {path.suffix: path for path in folder.iterdir()}
    assert set(files) == {".so", ".gch", ".o"}
    for suffix in (".gch", ".o"):
        whole = files[suffix].read_bytes()
        files[suffix].write_bytes(whole[: len(whole) // 2])
    files[".so"].unlink()  # so that it is compiled again. The one that is loaded must not be overwritten.
    files[".so"].write_bytes(b"\x7fELF")
    run()
    assert {path.suffix for path in folder.iterdir()} == {".so", ".gch", ".o"} and len(list(folder.iterdir())) == 3


@needs_compiler
def test_the_key_holds_the_emulation_the_flags_and_the_compiler(tmp_path, monkeypatch):
    (tmp_path / "one.cu").write_text(KERNEL)
    keys = []

    def get(parts, suffix, make):
        keys.append(parts)
        return tmp_path

    monkeypatch.setattr(cache, "get", get)
    shutil.copytree(emulator.HERE, tmp_path / "emulator")
    (tmp_path / "ptx.cuh").write_text("")
    monkeypatch.setattr(emulator, "HERE", tmp_path / "emulator")
    for change in ("block.cpp", "memory.h", "../ptx.cuh", None):
        emulator.compile(tmp_path / "one.cu", {})
        if change:
            with (tmp_path / "emulator" / change).open("a") as file:
                file.write("// changed\n")
    for name, other in ("_FLAGS", ["-O0"]), ("_version", lambda: "of another g++"):
        monkeypatch.setattr(emulator, name, other)
        emulator.compile(tmp_path / "one.cu", {})
    assert len(set(map(repr, keys))) == 6


def test_the_key_of_a_kernel_for_a_gpu_holds_all_that_it_is_made_of(tmp_path, monkeypatch):
    """Machines with other GPUs can share a home, and with it the cache."""
    compiler = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    keys, file, made = [], tmp_path / "one.cu", tmp_path / "made.json"
    made.write_text(json.dumps({"cubin": "", "usage": {}, "serialised": []}))
    monkeypatch.setattr(cache, "get", lambda parts, suffix, make: keys.append(repr(parts)) or made)
    file.write_text(KERNEL)
    nvrtc.compile(file, {"D": 64, "Br": 32}, "sm_80")
    nvrtc.compile(file, {"Br": 32, "D": 64}, "sm_80")
    nvrtc.compile(file, {"D": 32, "Br": 64}, "sm_80")
    nvrtc.compile(file, {"D": 64, "Br": 32}, "sm_90a")
    for thing, name, other in (
        (compiler, "nvrtcVersion", lambda: (0, 99, 0)), (nvrtc, "_OPTIONS", {}), (nvrtc, "_SERIALISED", ""),
        (nvrtc, "_source", lambda file: "of another ptx.cuh"),
    ):  # fmt: skip
        monkeypatch.setattr(thing, name, other)
        nvrtc.compile(file, {"D": 64, "Br": 32}, "sm_80")
    assert keys[0] == keys[1] and len(set(keys)) == len(keys) - 1


def test_a_relative_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home/.cache" / cache.NAME
    assert not (tmp_path / "here").exists()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder that is used where the one of the environment cannot be."""
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"{cache.NAME}-{os.getuid()}"


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_directory(temporary, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert cache.folder() == temporary and temporary.stat().st_mode & 0o777 == 0o700
    cache.folder.cache_clear()
    temporary.rmdir()
    temporary.write_text("no folder")
    with pytest.raises(RuntimeError, match=r"^No folder can keep the compiled kernels: set XDG_CACHE_HOME[^.]*\.$"):
        cache.folder()


def test_a_folder_of_another_user(temporary, folder, monkeypatch):
    assert cache.folder() == folder
    cache.folder.cache_clear()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(RuntimeError, match="one that is yours"):  # Both belong to the owner.
        cache.folder()


def test_a_folder_that_cannot_be_written(temporary, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert cache.folder() == temporary


def test_a_temporary_folder_on_another_file_system(folder, temporary, monkeypatch):
    """A file cannot be moved from one file system to another in one step, so it is made where it will lie."""
    made_in = []
    cache.get(("a",), ".json", lambda path: made_in.append(path.parent.parent) or write(path))
    assert made_in == [folder]


def refused(monkeypatch, where, number):
    """From now on the system refuses this step of writing into any folder but a temporary one."""
    owner, name = {"a file": (cache.tempfile, "TemporaryFile"), "a folder": (cache.tempfile, "TemporaryDirectory"),
                   "a move": (Path, "replace"), "a deletion": (Path, "unlink")}[where]  # fmt: skip
    usual = getattr(owner, name)

    def refuse(*arguments, **options):
        path = Path(options.get("dir", arguments[0] if arguments else ""))
        if cache.NAME in path.parts:
            raise OSError(number, os.strerror(number), str(path))
        return usual(*arguments, **options)

    monkeypatch.setattr(owner, name, refuse)


def test_a_cache_that_can_only_be_read(folder, temporary, monkeypatch):
    """What is in it when it becomes so is used. What is not is refused, or made in a temporary folder by a new run."""
    path = cache.get(("a",), ".json", write)
    damaged = cache.get(("b",), ".json", write)
    damaged.write_bytes(b"")
    for where in ("a file", "a folder", "a deletion"):
        refused(monkeypatch, where, errno.EROFS)
    assert cache.get(("a",), ".json", write) == path
    for parts in ("b",), ("c",):
        with pytest.raises(RuntimeError, match=r"^The cache .* cannot be written to \(.*XDG_CACHE_HOME"):
            cache.get(parts, ".json", write)
    cache.folder.cache_clear()
    assert cache.get(("c",), ".json", write).parent == temporary


FULL = "^The disk has no room for a compiled kernel: .*XDG_CACHE_HOME"
READ_ONLY = r"^The cache of compiled kernels cannot be written to \(.*\): move it by XDG_CACHE_HOME\.$"
REFUSALS = {
    errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EROFS: READ_ONLY, errno.EACCES: READ_ONLY, errno.EPERM: READ_ONLY,
}  # fmt: skip


@pytest.mark.parametrize("where", ["a folder", "a move"])
@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_folder_in_which_nothing_can_be_begun_or_ended_any_more(folder, where, number, monkeypatch):
    cache.folder()
    with monkeypatch.context() as patch:
        refused(patch, where, number)
        with pytest.raises(RuntimeError, match=REFUSALS[number]):
            cache.get(("a",), ".json", write)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        refused(patch, where, errno.EIO)  # Nobody knows what to do about others.
        cache.get(("a",), ".json", write)
    assert not list(folder.iterdir()) and cache.get(("a",), ".json", write).read_bytes() == b"what was made"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk(folder):
    sentence = r"^The disk has no room for a compiled kernel: [^\n]*\.$"
    with pytest.raises(RuntimeError, match=sentence):
        cache.get(("a",), ".json", lambda path: Path("/dev/full").write_bytes(b"what was made"))

    def compiler(path):
        command = [sys.executable, "-c", "open('/dev/full', 'wb', 0).write(b'x')"]
        made = subprocess.run(command, text=True, capture_output=True)
        raise RuntimeError(f"cannot compile:\n{made.stderr}")

    with pytest.raises(RuntimeError, match=sentence):
        cache.get(("a",), ".json", compiler)
    assert not list(folder.iterdir())
    assert json.loads(cache.get(("a",), ".json", lambda path: path.write_text("[1]")).read_text()) == [1]
