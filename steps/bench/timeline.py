"""`python -m steps.bench.timeline`: when Hopper's kernel does what, and how much power it consumes: a file to commit.

For the pictures of notebooks 02d and 02e. Two measurements on one GPU of Hopper's kind, under a minute:

timelines   fwd_8_hopper.cu with clocks written into its text: when each warpgroup of one block asks for the tensor
            cores, gets them, has its scores, its exponentials, its output. With and without OVERLAP and PINGPONG, and
            without exponentials or the whole softmax, which computes nonsense but shows what they cost.
power       TFLOP/s, clock and power under seconds of load: a matrix product and this kernel, on random normal numbers
            and, here alone, on zeros. The difference shows how much power depends on the numbers.
"""

import itertools
import re
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import typer

from steps.bench import fingerprint, rows, timing
from steps.bench.grid import Point
from steps.step02_fa2_cuda import ladder, launch

KERNEL = "fwd_8_hopper"
FIRST, STEPS = 16, 72  # blocks of keys that are recorded: from the middle of a tile of queries into the next but one
# What a warpgroup notes in each step, one block of keys, in this order:
EVENTS = ("asks", "starts", "started", "scores", "exponentials", "output")
# Pieces of the kernel's text, and what they are replaced by, to see how long a step takes without them:
LEFT_OUT = {
    "exp": {"exp2_approx(S[e] * factor - shift)": "S[e] * factor - shift",
            "exp2_approx(S[e + 1] * factor - shift)": "S[e + 1] * factor - shift"},
    "softmax": {"bool grown = online_softmax(S, m, l, alpha, scale_log2);": "bool grown = false;",
                "      online_softmax(S, m, l, alpha, scale_log2);": "      l[0] = l[1] = 1;"},
}  # fmt: skip
POINT = Point(4, 16, 4096, 128)  # the longest tiles for which the kernel is persistent
SECONDS = 2  # of load that are measured, after one that is not


# --- timelines ----------------------------------------------------------------------------------------------


def instrumented(text, first=FIRST, steps=STEPS):
    """The kernel's text with a further argument, Global<int> marks [steps][2 warpgroups][6 events], that block 0 fills.

    Clocks stay in registers during a step; one thread of each warpgroup writes them out before the next.
    """
    write = (
        f"      if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && K.n - {first + 1} < {steps}u)\n"
        f"        for (int e = 0; e < 6; e++) marks[((K.n - {first + 1}) * 2 + w) * 6 + e] = clocks[e];\n"
    )
    waited = f"      turn.wait();\n{_clock(1)}      wgmma_fence();"
    edits = {
        "int section) {": "int section, Global<int> marks) {",
        "    Turn turn(w);\n": "    Turn turn(w);\n    int clocks[6] = {};\n",
        "      turn.wait();\n      wgmma_fence();": f"{write}{_clock(0)}{waited}",
        "      turn.pass();\n": f"      turn.pass();\n{_clock(2)}",
        "      K.release();\n    };": f"{_clock(3)}      K.release();\n    }};",  # S is complete
        "      finish_output();\n      to_operand": f"{_clock(4)}      finish_output();\n      to_operand",
        "      if (beside.value) finish_output();": f"{_clock(4)}      if (beside.value) finish_output();",
        "      V.release();\n    };": f"{_clock(5)}      V.release();\n    }};",
    }
    return edited(text, edits)


def edited(text, edits):
    """The kernel's text with {old: new} pieces. ValueError if an old one is not there exactly once."""
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"The kernel has changed: it holds {old!r} {text.count(old)} times, not once.")
        text = text.replace(old, new)
    return text


def _clock(event):
    return f"      clocks[{event}] = clock();\n"


def timed_launch(file, q, k, v, switches, steps=STEPS):
    """(a call of the instrumented kernel in `file`, out, lse, marks (steps, 2, 6) int32)."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    marks = torch.zeros(steps, 2, len(EVENTS), dtype=torch.int32, device=q.device)
    problem = launch.problem_of(ladder.FORWARD["hopper"], q, k, switches=switches.items())
    (work,) = launch.forward_works(problem, {})
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "marks": marks}
    (bound,) = launch.bind([replace(work, file=file, arguments=(*work.arguments, "marks"))], tensors)
    return partial(bound, tensors), out, lse, marks


def timelines(q, k, v):
    """The clocks of block 0 for each setting of the switches, and for each of LEFT_OUT, beside TFLOP/s with the clocks.

    Of the switches also TFLOP/s without clocks in the text.
    """
    found, calls = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for overlap, pingpong in itertools.product((0, 1), repeat=2):
            switches = {"OVERLAP": overlap, "PINGPONG": pingpong}
            timed, out, lse, marks = timed_launch(timed_file(folder), q, k, v, switches)
            shipped = partial(launch.forward, q, k, v, rung="hopper", **switches)
            timed()
            pairs = zip(shipped(), (out, lse), strict=True)
            if any((a.float() - b).norm() > 1e-3 * b.float().norm() for a, b in pairs):
                raise RuntimeError(f"with clocks in its text, {switches}, the kernel computes something else")
            calls |= {(len(found), "tflops"): shipped, (len(found), "tflops_timed"): timed}
            found.append({"switches": switches, "marks": marks})
        for name in LEFT_OUT:
            switches = {"OVERLAP": 1, "PINGPONG": 1}
            timed, _, _, marks = timed_launch(timed_file(folder, without=name), q, k, v, switches)
            timed()
            calls[len(found), "tflops_timed"] = timed
            found.append({"switches": switches, "without": name, "marks": marks})
    for (n, name), taken in timing.interleaved(calls, device="cuda").items():
        found[n][name] = POINT.flops("fwd") / taken.ms_median / 1e9
    for one in found:  # of the last call; clocks are 32-bit numbers that wrap around
        marks = one["marks"].cpu().to(torch.int64)
        one["marks"] = ((marks - marks[0, :, 0].min()) % 2**32).tolist()
    return found


def timed_file(folder, without=None, **where):
    """Writes the instrumented text, without one of LEFT_OUT if it is named, into a file of the folder."""
    text = instrumented((launch.HERE / f"{KERNEL}.cu").read_text(), **where)
    file = Path(folder) / f"fwd_8_timed_{without}.cu"
    file.write_text(edited(text, LEFT_OUT.get(without, {})))
    return file


# --- power --------------------------------------------------------------------------------------------------


def power(q, k, v):
    """For each load: TFLOP/s, and the medians of the clock in MHz and the power in watts, where nvidia-smi tells."""
    a, b = (torch.randn(8192, 8192, dtype=q.dtype, device=q.device) for _ in range(2))
    zeros = [torch.zeros_like(x) for x in (a, b, q, k, v)]
    hopper = partial(launch.forward, rung="hopper")
    loads = {
        ("matmul 8192", "random normal"): (2 * 8192**3, partial(torch.mm, a, b)),
        ("matmul 8192", "zeros"): (2 * 8192**3, partial(torch.mm, *zeros[:2])),
        ("hopper forward", "random normal"): (POINT.flops("fwd"), partial(hopper, q, k, v)),
        ("hopper forward", "zeros"): (POINT.flops("fwd"), partial(hopper, *zeros[2:])),
    }
    return [{"load": load, "data": data, **_under(flop, call)} for (load, data), (flop, call) in loads.items()]


def _under(flop, call):
    """TFLOP/s, clock, power and the power's limit under SECONDS of `call`, after a second of it."""
    _calls_within(1, call)
    which = f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"
    fields = "clocks.sm,power.draw,enforced.power.limit"
    command = ["nvidia-smi", "-i", which, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        calls, seconds = _calls_within(SECONDS, call)
        watching.terminate()
        clock, watts, limit = medians(watching.communicate()[0])
    return {"tflops": calls * flop / seconds / 1e12, "sm_mhz": clock, "watts": watts, "limit_watts": limit}


def _calls_within(seconds, call):
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        calls += 20
    return calls, time.perf_counter() - start


def medians(printed):
    """The medians of nvidia-smi's three columns; None for a column in which it gives no numbers."""
    lines = [line.split(", ") for line in printed.splitlines() if line.count(", ") == 2]
    numbers = [[float(line[n]) for line in lines if re.fullmatch(r"[\d.]+", line[n])] for n in range(3)]
    return [statistics.median(column) if column else None for column in numbers]


# --- the file -----------------------------------------------------------------------------------------------


def read(folder=rows.COMMITTED):
    """What was recorded of an H200 and its kernel as it is now, or {}."""
    record = rows.read_record("timeline", folder=folder)
    return {} if not record or fingerprint.is_stale(record) else record


def main(commit: rows.Commit = None, out: rows.Folder = rows.COMMITTED):
    """When Hopper's kernel does what, and how much power it consumes."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("A timeline needs a GPU of Hopper's kind, and torch sees none here.")
    q, k, v = (torch.randn([POINT.B, POINT.H, POINT.N, POINT.D], dtype=torch.bfloat16, device="cuda") for _ in range(3))
    subject = {"stage": "02_fa2_cuda", "kernel": KERNEL, "peer": None, "dtype": "bf16", **POINT.sizes}
    found = {**rows.provenance(commit=commit), **subject}
    found |= {"source": fingerprint.row_hash(found), "first": FIRST, "events": EVENTS}
    found |= {"timelines": timelines(q, k, v), "power": power(q, k, v)}
    path = rows.write_record("timeline", found, out, indent=None)
    for one in found["timelines"]:
        print({name: value for name, value in one.items() if name != "marks"}, "one step:", one["marks"][1])
    print(*found["power"], f"written: {path}", sep="\n")


if __name__ == "__main__":
    typer.run(main)
