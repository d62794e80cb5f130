"""`python -m reference.bench.timeline [FOLDER]`: when Hopper's kernel does what, and what it draws, as <gpu>.timeline.json.

For the pictures of notebook 02d. Two measurements on one GPU of Hopper's kind, under a minute:

timelines   fwd_8_hopper.cu with clocks written into its text: when each warpgroup of one block asks for the tensor cores, gets
            them, has its scores, its exponentials, its output. With and without OVERLAP and PINGPONG.
power       TFLOP/s, clock and power under seconds of load: a matrix product and this kernel, on random normal numbers and, here
            alone, on zeros, which show what the numbers themselves draw.
"""

import argparse
import importlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from reference.bench import cost, rows, timing
from reference.bench.source import source_files, source_hash

STAGE, KERNEL = "02_fa2_cuda", "fwd_8_hopper"
FIRST, STEPS = 64, 72  # blocks of keys that are recorded: from the middle of a tile of queries into the next one
# What a warpgroup notes in each step, one block of keys, in this order:
EVENTS = ("asks", "starts", "started", "scores", "exponentials", "output")
SIZE = {"B": 1, "H": 16, "N": 16384, "D": 128}
SECONDS = 2  # of load that are measured, after one that is not


# --- timelines ----------------------------------------------------------------------------------------------


def instrumented(text, first=FIRST, steps=STEPS):
    """The kernel's text with a further argument, Global<int> marks [steps][2 warpgroups][6 events], that block 0 fills.

    Clocks stay in registers during a step; one thread a warpgroup writes them out before the next.
    """
    write = (
        f"      if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && K.n - {first + 1} < {steps}u)\n"
        f"        for (int e = 0; e < 6; e++) marks[((K.n - {first + 1}) * 2 + w) * 6 + e] = clocks[e];\n"
    )
    edits = {
        "int section) {": "int section, Global<int> marks) {",
        "    Turn turn(w);\n": "    Turn turn(w);\n    int clocks[6] = {};\n",
        "      turn.wait();\n      wgmma_fence();": f"{write}{_clock(0)}      turn.wait();\n{_clock(1)}      wgmma_fence();",
        "      turn.pass();\n": f"      turn.pass();\n{_clock(2)}",
        "      K.release();\n    };": f"{_clock(3)}      K.release();\n    }};",  # S is there
        "      finish_output();\n      to_operand": f"{_clock(4)}      finish_output();\n      to_operand",
        "      if (beside.value) finish_output();": f"{_clock(4)}      if (beside.value) finish_output();",
        "      V.release();\n    };": f"{_clock(5)}      V.release();\n    }};",
    }
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"{KERNEL}.cu has changed: it holds {old!r} {text.count(old)} times, not once.")
        text = text.replace(old, new)
    return text


def _clock(event):
    return f"      clocks[{event}] = clock();\n"


def lifted(folder):
    """The stage's module hopper, out of a copy of its files in `folder`; beside it the instrumented kernel, fwd_8_timed.cu."""
    stage, copy = rows.ROOT / "steps" / f"step{STAGE}", Path(folder) / "timed"
    shutil.copytree(stage, copy, ignore=shutil.ignore_patterns("__init__.py", "__pycache__"))
    shutil.copy(stage / "emulator" / "__init__.py", copy / "emulator")
    (copy / "fwd_8_timed.cu").write_text(instrumented((copy / f"{KERNEL}.cu").read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module("timed.hopper")


def timed_launch(hopper, q, k, v, switches, steps=STEPS):
    """(a call of the instrumented kernel, out, lse, marks (steps, 2, 6) int32)."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    marks = torch.zeros(steps, 2, len(EVENTS), dtype=torch.int32, device=q.device)
    tile = hopper.TILES[q.shape[-1]]
    (what,) = hopper._forward_plan(q, k, v, out, lse, f"{KERNEL}.cu", False, None, tile, *switches.items())
    what |= {"file": hopper.HERE / "fwd_8_timed.cu", "arguments": [*what["arguments"], marks]}
    if q.is_cuda:
        return importlib.import_module("timed.nvrtc").Launch(**what), out, lse, marks
    return partial(importlib.import_module("timed.emulator").launch, **what), out, lse, marks


def timelines(hopper, q, k, v):
    """For each setting of the switches: the clocks of block 0, and TFLOP/s with and without the clocks in the text."""
    text = (hopper.HERE / f"{KERNEL}.cu").read_text()
    names = [name for name in ("OVERLAP", "PINGPONG") if f"#ifndef {name}\n" in text]
    found, calls = [], {}
    for values in itertools.product((0, 1), repeat=len(names)):
        switches = dict(zip(names, values, strict=True))
        launch, out, lse, marks = timed_launch(hopper, q, k, v, switches)
        shipped = partial(hopper.hopper_forward, q, k, v, **switches)
        launch()
        if any((a.float() - b).norm() > 1e-3 * b.float().norm() for a, b in zip(shipped(), (out, lse), strict=True)):
            raise RuntimeError(f"with clocks in its text, {switches}, the kernel computes something else")
        calls |= {(len(found), "tflops"): shipped, (len(found), "tflops_timed"): launch}
        found.append({"switches": switches, "marks": marks})
    flop = cost.flops(**SIZE)
    for (n, name), taken in timing.interleaved(calls, device="cuda").items():
        found[n][name] = flop / taken.ms_median / 1e9
    for one in found:  # of the last call; clocks are 32-bit numbers that wrap around
        marks = one["marks"].cpu().to(torch.int64)
        one["marks"] = ((marks - marks[0, :, 0].min()) % 2**32).tolist()
    return found


# --- power --------------------------------------------------------------------------------------------------


def power(hopper, q, k, v):
    """For each load: TFLOP/s, and the medians of the clock in MHz and the power in watts, where nvidia-smi tells."""
    a, b = (torch.randn(8192, 8192, dtype=q.dtype, device=q.device) for _ in range(2))
    zeros = [torch.zeros_like(x) for x in (a, b, q, k, v)]
    product, attention = 2 * 8192**3, cost.flops(**SIZE)
    loads = {
        ("matmul 8192", "random normal"): (product, partial(torch.mm, a, b)),
        ("matmul 8192", "zeros"): (product, partial(torch.mm, *zeros[:2])),
        ("hopper forward", "random normal"): (attention, partial(hopper.hopper_forward, q, k, v)),
        ("hopper forward", "zeros"): (attention, partial(hopper.hopper_forward, *zeros[2:])),
    }
    return [{"load": load, "data": data, **_under(flop, call)} for (load, data), (flop, call) in loads.items()]


def _under(flop, call):
    """TFLOP/s, clock, power and the power's limit under SECONDS of `call`, after a second of it."""
    _calls_within(1, call)
    seen = _watch()
    calls, seconds = _calls_within(SECONDS, call)
    clock, watts, limit = _medians(seen)
    return {"tflops": calls * flop / seconds / 1e12, "sm_mhz": clock, "watts": watts, "limit_watts": limit}


def _calls_within(seconds, call):
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        calls += 20
    return calls, time.perf_counter() - start


def _watch():
    """nvidia-smi's process, which prints clock, power and limit ten times a second; None where there is none."""
    fields = "clocks.sm,power.draw,enforced.power.limit"
    which = f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"
    command = ["nvidia-smi", "-i", which, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "100"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if shutil.which("nvidia-smi") else None


def _medians(process):
    if process is None:
        return None, None, None
    process.terminate()
    columns = zip(*(line.split(", ") for line in process.communicate()[0].splitlines() if line.count(", ") == 2), strict=True)
    numbers = [[float(x) for x in column if x.replace(".", "", 1).isdigit()] for column in columns] or [[]] * 3
    return [statistics.median(column) if column else None for column in numbers]


# --- the file -----------------------------------------------------------------------------------------------


def read(where=rows.COMMITTED):
    """What was recorded of an H200, or {}."""
    path = Path(where) / "nvidia-h200.timeline.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m reference.bench.timeline", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=rows.COMMITTED, help="where the file goes")
    parser.add_argument("--commit", help="what is measured, for a machine without the git history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("A timeline needs a GPU of Hopper's kind, and torch sees none here.")
        return 1
    shape = [SIZE[name] for name in "BHND"]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        hopper = lifted(folder)
        found = {
            **rows.provenance(commit=options.commit), "source": source_hash(source_files(STAGE, KERNEL)), **SIZE,
            "first": FIRST, "events": EVENTS, "timelines": timelines(hopper, q, k, v), "power": power(hopper, q, k, v),
        }  # fmt: skip
    path = options.folder / f"{rows.slug(found['gpu'])}.timeline.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    for one in found["timelines"]:
        print({name: value for name, value in one.items() if name != "marks"}, "one step:", one["marks"][1])
    print(*found["power"], f"written: {path}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
