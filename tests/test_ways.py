"""The way of a public call to its launcher, or in the ring to its block: few files, and no return to one that was left.

A repeated call's way is asked of the stages 00 to 03, and of the ring that of a call whose shapes are new.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from steps import catalogue, engine, step00_naive

STEPS = f"{Path(catalogue.__file__).parent}/"
BESIDE = "checks.py", "engine.py"
# Where the way ends. Stages 00 and 01 have no file that only launches; there it is the kernel's own.
LAUNCHERS = (
    "step00_naive/fwd_", "step00_naive/bwd_", "step01_fa1_numba/fwd_", "step01_fa1_numba/bwd_",
    "step02_fa2_cuda/emulator/", "step02_fa2_cuda/nvrtc.py", "step03_triton/replay.py",
)  # fmt: skip
STAGES = ("00", {}), ("01", {}), ("02", {}), ("03", {}), ("03", {"softcap": 5.0})
CALLS = [(stage, name, options) for stage, options in STAGES for name in ("forward", "attention")]


def ways(call):
    """The files that a call enters, in order, without what the launcher does; then those of autograd's backward."""
    found, stack = [], []

    def watch(frame, event, _):
        file = frame.f_code.co_filename.removeprefix(STEPS)
        if event not in ("call", "return") or file == frame.f_code.co_filename or file in BESIDE:
            return
        if event == "return":
            stack.pop()
            return
        if not stack:
            found.append([])
        elif stack[-1].startswith(LAUNCHERS):
            file = stack[-1]
        if not stack or file != stack[-1]:
            found[-1].append(file)
        stack.append(file)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("number, name, options", CALLS, ids=lambda x: str(x or "plain"))
def test_a_repeated_call_goes_straight_to_its_launcher(number, name, options):
    if reason := catalogue.unavailable(number):
        pytest.skip(reason)
    stage = catalogue.stage(number)
    q, k, v, dout = torch.randn(4, 1, 1, 16, 32, device=engine.device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    calls = {
        "forward": lambda: stage.forward(q, k, v, **options),
        "attention": lambda: stage.attention(*leaves, **options).backward(dout),
    }
    with torch.autograd.set_multithreading_enabled(False):  # so that the backward runs where it is watched
        calls[name]()
        found = ways(calls[name])
    assert len(found) == (2 if name == "attention" else 1)
    for way in found:
        files = [file for file in way if not file.startswith(LAUNCHERS)]
        assert way[-1].startswith(LAUNCHERS) and len(files) == len(set(files)) <= 3, " > ".join(way)


def first_way(call, ends, of=""):
    """The files of which functions are called, one for each call, until a file that begins with `ends` is entered.

    Only files that begin with `of` count, and none of BESIDE.
    """
    found, ended = [], []

    def watch(frame, event, _):
        file = frame.f_code.co_filename.removeprefix(STEPS)
        if event != "call" or file == frame.f_code.co_filename or file in BESIDE:
            return
        if file.startswith(ends):
            ended.append(file)
            sys.setprofile(None)
        elif file.startswith(of):
            found.append(file)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert ended
    return found


def entered(way):
    """The files of a way, one after the other, without repetitions in a row."""
    return [file for n, file in enumerate(way) if way[n - 1 : n] != [file]]


def packed(n):
    starts = torch.tensor([0, 7, n], dtype=torch.int32, device=engine.device)
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": n - 7, "max_seqlen_k": n - 7}


FIRST = {  # {a call: (the stage, its options for n rows, the most calls of own functions)}
    "02": ("02", lambda n: {}, 90),
    "03": ("03", lambda n: {}, 50),
    "03, a window": ("03", lambda n: {"window": (8, 0)}, 50),
    "03, dropout": ("03", lambda n: {"dropout_p": 0.1}, 50),
    "03, packed sequences": ("03", packed, 50),
}


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("name", FIRST)
def test_a_first_call_can_be_followed(name, half):
    number, options, most = FIRST[name]
    if reason := catalogue.unavailable(number):
        pytest.skip(reason)
    stage, n = catalogue.stage(number), 50 + 2 * [*FIRST].index(name) + (half == "forward")
    leaves = [torch.randn(1, 2, n, 32, device=engine.device).requires_grad_() for _ in range(3)]
    stage.attention(*(x[..., :8, :] for x in leaves))  # What is decided once a process is no part of a call.
    call = partial(stage.attention, *leaves, causal=True, **options(n))
    if half == "backward":
        out = call()
        call = partial(out.backward, torch.ones_like(out))
    with torch.autograd.set_multithreading_enabled(False):
        way = first_way(call, LAUNCHERS)
    files = entered(way)
    returns = len(files) - len(set(files))
    assert len(set(files)) <= 6 and returns <= 3 and len(way) <= most, f"{len(way)} calls: {' > '.join(files)}"


@pytest.mark.parametrize("name", ["forward", "attention"])
@pytest.mark.parametrize("given", [True, False], ids=["with S", "without S"])
@pytest.mark.parametrize("own_block", [True, False], ids=["own block", "default block"])
def test_the_first_call_of_a_ring_goes_straight_to_its_block(name, given, own_block):
    """Of one rank without a process group. Only the loops in ring.py go on between two entries of another file."""
    if reason := not own_block and catalogue.unavailable("03"):
        pytest.skip(reason)
    stage, n = catalogue.stage("04"), 17 + 4 * given + 2 * own_block + (name == "forward")
    q, k, v = torch.randn(3, 1, 1, n, 32, device=engine.device)
    options = {"S": n} if given else {}
    if own_block:
        options["block"] = step00_naive
    else:
        stage.forward(q[..., :8, :], k[..., :8, :], v[..., :8, :])  # imports the block
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ends = "step00_naive/" if own_block else ("step02_fa2_cuda/", "step03_triton/")
    way = entered(first_way(lambda: getattr(stage, name)(*leaves, causal=True, **options), ends, "step04_ring/"))
    once = [file for file in way if file != "step04_ring/ring.py"]
    assert len(set(way)) <= 8 and len(once) == len(set(once)), " > ".join(way)
