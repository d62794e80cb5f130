"""What parts of a kernel of stage 02 cost. A kernel's text is changed here, and nowhere else.

forwards    a forward with one of its switches turned, or with an exponent that is one FMA: for the plan `switches`
timelines   fwd_8_hopper.cu with clocks in its text: when each warpgroup of one block does what. Also without
            exponentials or the whole softmax, which computes nonsense but shows what they cost.
parts       the time of bwd_3_hopper.cu's kernel of dk, dv and dq without some of its parts. A part that runs beside the
            products of the tensor cores costs nothing, and then the kernel is no faster without it.

`python -m steps.course.bench.ablations` records the last two for notebooks 02d, 02e and 02y, on a GPU of Hopper's kind.
"""

import functools
import itertools
import re
import tempfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import typer

from steps.course.bench import rows, timing
from steps.course.bench.cost import Point
from steps.places import require_clone
from steps.step02_fa2_cuda import calls, ladder, launches, plan

FORWARD, BACKWARD = "fwd_8_hopper", "bwd_3_hopper"
POINTS = Point(4, 16, 4096, 128), Point(4, 32, 4096, 64)
AT = POINTS[0]  # where a block has two warpgroups of consumers, for which the clocks have room


folder = functools.cache(tempfile.TemporaryDirectory)  # where the changed texts lie until this process ends


def changed(kernel, edits):
    """A .cu file of the kernel's text with {old: new} pieces. ValueError if an old one is not there exactly once."""
    text = (launches.HERE / f"{kernel}.cu").read_text()
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"The kernel has changed: it holds {old!r} {text.count(old)} times, not once.")
        text = text.replace(old, new)
    file = Path(folder().name) / f"{kernel}_{zlib.crc32(text.encode()):08x}.cu"  # another text is another file
    file.write_text(text)
    return file


# --- switches -----------------------------------------------------------------------------------------------

# The piece of a rung's text that keeps the compiler from making the exponent one FMA, and the text in which it is one.
# An FMA is wrong for large scores, and its time shows what being right costs. This is no macro in the kernel, because a
# kernel to copy should not offer what is wrong.
SEPARATE = {
    "fwd_5_fa2": {"__fmul_rn(scale_log2, e < 4 ? near[e] : far[e - 4])": "scale_log2 * (e < 4 ? near[e] : far[e - 4])"},
    "fwd_8_hopper": {"exponent_factor(m_new[r], scale_log2)": "scale_log2"},
}


def switches(text):
    """{name: other values} of a .cu file's switches: macros that are 0, 1 or an (expression) unless defined."""
    found = re.findall(r"^#ifndef (\w+).*\n#define \1 ([01]|\(.*\))$", text, re.M)
    return {name: (0, 1) if usual.startswith("(") else (1 - int(usual),) for name, usual in found}


def forwards(kernel):
    """{"fwd_8_hopper": the rung's forward, "fwd_8_hopper:LAZY=0": with a switch turned, ...}.

    They are functions of calls.py, because the stage's own forward takes no switches. ":LARGE_SCORES=0" has an
    exponent that is one FMA.
    """
    forward = partial(calls.forward, rung=kernel.split("_", 2)[2])
    found = {kernel: forward}
    for name, values in switches((launches.HERE / f"{kernel}.cu").read_text()).items():
        found |= {f"{kernel}:{name}={value}": partial(forward, **{name: value}) for value in values}
    if kernel in SEPARATE:
        row = replace(ladder.FORWARD[forward.keywords["rung"]], file=str(changed(kernel, SEPARATE[kernel])))
        found[f"{kernel}:LARGE_SCORES=0"] = partial(calls.forward, rung=row)
    return found


# --- timelines of the forward -------------------------------------------------------------------------------

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


def clocks(first=FIRST, steps=STEPS):
    """Edits that give the kernel a further argument, Global<int> marks [steps][2 warpgroups][6 events], for block 0.

    Clocks stay in registers during a step; one thread of each warpgroup writes them out before the next.
    """
    write = (
        f"      if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && K.n - {first + 1} < {steps}u)\n"
        f"        for (int e = 0; e < 6; e++) marks[((K.n - {first + 1}) * 2 + w) * 6 + e] = clocks[e];\n"
    )
    asks, starts, started, scores, exponentials, output = (f"      clocks[{e}] = clock();\n" for e in range(6))
    return {
        "int alternate) {": "int alternate, Global<int> marks) {",
        "    PingPong ping_pong(w);\n": "    PingPong ping_pong(w);\n    int clocks[6] = {};\n",
        "      ping_pong.wait();\n": f"{write}{asks}      ping_pong.wait();\n{starts}",
        "      ping_pong.pass();\n": f"      ping_pong.pass();\n{started}",
        "      K.release();\n    };": f"{scores}      K.release();\n    }};",  # S is complete
        "      finish_output();\n      to_operand": f"{exponentials}      finish_output();\n      to_operand",
        "      if (beside.value) finish_output();": f"{exponentials}      if (beside.value) finish_output();",
        "      V.release();\n    };": f"{output}      V.release();\n    }};",
    }


def timed_launch(q, k, v, switches, without=None, first=FIRST, steps=STEPS):
    """(a call of the kernel with clocks and without one of LEFT_OUT, out, lse, marks (steps, 2, 6) int32)."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    marks = torch.zeros(steps, 2, len(EVENTS), dtype=torch.int32, device=q.device)
    problem = launches.problem_of(ladder.FORWARD["hopper"], q, k, switches=switches.items())
    (spec,) = launches.forward_launches(problem, {})
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "marks": marks}
    file = changed(FORWARD, clocks(first, steps) | LEFT_OUT.get(without, {}))
    (bound,) = plan.bind([replace(spec, file=file, arguments=(*spec.arguments, "marks"))], tensors)
    return partial(bound, tensors), out, lse, marks


def timelines():
    """[{"switches", "marks"}]: block 0's clocks for each setting of the switches, and then for each of LEFT_OUT."""
    q, k, v = torch.randn(3, AT.B, AT.H, AT.N, AT.D, dtype=torch.bfloat16, device="cuda")
    settings = [{"OVERLAP": a, "PINGPONG": b} for a, b in itertools.product((0, 1), repeat=2)]
    found = [{"switches": one} for one in settings]
    found += [{"switches": settings[-1], "without": name} for name in LEFT_OUT]
    for one in found:
        run, _, _, marks = timed_launch(q, k, v, one["switches"], one.get("without"))
        for _ in range(timing.MIN_REPS):  # Only the last call's marks are kept; the GPU is warm by then.
            run()
        marks = marks.cpu().to(torch.int64)  # Clocks are 32-bit numbers that wrap around.
        one["marks"] = ((marks - marks[0, :, 0].min()) % 2**32).tolist()
    return found


# --- parts of the backward ----------------------------------------------------------------------------------

# Pieces of the kernel's text, and what they are replaced by. Each product must still be used, or else the compiler
# leaves it out, too.
PARTS = {
    "exponentials": {"exp2_approx(fminf(S[4 * i + e] * scale_log2 - l[e % 2], 0))":
                     "fminf(S[4 * i + e] * scale_log2 - l[e % 2], 0)"},
    "delta": {"low * (dp[0] - d[0]), high * (dp[1] - d[1])": "low * dp[0], high * dp[1]"},
    "stores of dS^T": {"      store_tile<Br>(dS_t, Bc, 16 * warp, dS);\n": ""},
    "additions to dq": {"      add_dQ(": "      if (scale < 0) add_dQ("},
}  # fmt: skip
PARTS["all four"] = {old: new for part in PARTS.values() for old, new in part.items()}


def tensors_at(point, device):
    """What the backward's kernel reads and writes, {name: tensor}; random normal inputs."""
    shape = point.B, point.H, point.N, point.D
    dout, q, k, v = torch.randn(4, *shape, dtype=torch.bfloat16, device=device)
    out, lse = calls.forward(q, k, v, rung="hopper")
    sums = calls.start_gradients(dout, out, lse, rung="hopper")
    results = {"dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "counters": None, **sums.tensors, **results}


def backward_call(tensors, without=None):
    """A call of the backward's kernel on these tensors, without one of PARTS if it is named."""
    file = changed(BACKWARD, PARTS.get(without, {}))
    (spec,) = launches.gradient_launches(launches.problem_of(ladder.BACKWARD["hopper"], tensors["q"], tensors["k"]), {})
    (bound,) = plan.bind([replace(spec, file=file)], tensors)
    return partial(bound, tensors)


def parts():
    """[{sizes, "without": one of PARTS or None, "ms_median"}]."""
    found = []
    for point in POINTS:
        tensors = tensors_at(point, "cuda")
        taken = timing.interleaved({name: backward_call(tensors, name) for name in (None, *PARTS)}, device="cuda")
        found += [{**point.sizes, "without": name, "ms_median": one["ms_median"]} for name, one in taken.items()]
    return found


# --- what is recorded ---------------------------------------------------------------------------------------


def source_of(kind, record):
    """The hash that a record carries: the backward's has several sizes, and so no launch in it."""
    return rows.row_hash(record) if kind == "timeline" else rows.code_hash("02_fa2_cuda", record["kernel"])


def read(kind, folder=rows.COMMITTED):
    """What was recorded of a kernel as it is now: "timeline" or "left_out". Of an H200, or else of an H100; or {}."""
    found = (rows.read_record(kind, gpu, folder) for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    return next((record for record in found if record and record["source"] == source_of(kind, record)), {})


def main():
    """When Hopper's forward does what, and what parts of the backward cost."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("This needs a GPU of Hopper's kind, and torch sees none here.")
    require_clone("steps.course.bench.ablations")
    origin = rows.provenance()
    # What zeros and random numbers consume was measured once, and is kept: it is no matter of the kernel's text.
    kept = rows.read_record("timeline", origin["gpu"]).get("power", [])
    of_forward = {"timelines": timelines(), "power": kept}
    for kind, kernel, found in (("timeline", FORWARD, of_forward), ("left_out", BACKWARD, {"times": parts()})):
        subject = {**origin, "stage": "02_fa2_cuda", "kernel": kernel, "peer": None, "dtype": "bf16", **AT.sizes}
        print("written:", rows.write_record(kind, subject | {"source": source_of(kind, subject)} | found))


if __name__ == "__main__":
    typer.run(main)
