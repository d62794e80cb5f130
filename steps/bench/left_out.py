"""`python -m steps.bench.left_out`: the time of Hopper's backward without some of its parts, as a file to commit.

For notebook 02e. Without a part the kernel computes nonsense, but the rest of its text stays. A part that runs beside
the products of the tensor cores costs nothing, and then the kernel is no faster without it. The kernel of dk, dv and dq
is timed alone, without those that prepare delta and round dq. On one GPU of Hopper's kind this takes half a minute.
timeline.py does the same with parts of the forward.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import typer

from steps.bench import fingerprint, rows, timing
from steps.bench.grid import Point
from steps.bench.timeline import edited
from steps.step02_fa2_cuda import ladder, launch

KERNEL = "bwd_3_hopper"
# Pieces of the kernel's text, and what they are replaced by. Each product must still be used, or else the compiler
# leaves it out, too.
PARTS = {
    "exponentials": {"exp2_approx(fminf(S[4 * i + e] * scale_log2 - l[e % 2], 0))":
                     "fminf(S[4 * i + e] * scale_log2 - l[e % 2], 0)"},
    "delta": {"low * (dp[0] - d[0]), high * (dp[1] - d[1])": "low * dp[0], high * dp[1]"},
    "stores of dS^T": {"    store_tile<Br>(dS_t, Bc, 16 * warp, dS);\n": ""},
    "additions to dq": {"    add_dQ(": "    if (scale < 0) add_dQ("},
}  # fmt: skip
PARTS["all four"] = {old: new for part in PARTS.values() for old, new in part.items()}
POINTS = Point(4, 16, 4096, 128), Point(4, 32, 4096, 64)


def written(folder, without=None):
    """The kernel's text, without one of PARTS if it is named, in a file of the folder."""
    file = Path(folder) / f"bwd_3_{list(PARTS).index(without) if without else 'whole'}.cu"
    file.write_text(edited((launch.HERE / f"{KERNEL}.cu").read_text(), PARTS.get(without, {})))
    return file


def tensors_at(point, device):
    """What the kernel reads and writes, {name: tensor}; random normal inputs."""
    shape = point.B, point.H, point.N, point.D
    dout, q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    out, lse = launch.forward(q, k, v, rung="hopper")
    sums = launch.start_gradients(dout, out, lse, rung="hopper")
    results = {"dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "counters": None, **sums.tensors(), **results}


def call_of(file, tensors):
    """A call of the kernel in `file` on these tensors."""
    (work,) = launch.gradient_works(launch.problem_of(ladder.BACKWARD["hopper"], tensors["q"], tensors["k"]), {})
    (bound,) = launch.bind([replace(work, file=file)], tensors)
    return partial(bound, tensors)


def read(folder=rows.COMMITTED):
    """What was recorded, of an H200 or else of an H100, of the kernel as it is now; or {}."""
    found = (rows.read_record("left_out", gpu, folder) for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    source = fingerprint.code_hash("02_fa2_cuda", KERNEL)
    return next((record for record in found if record.get("source") == source), {})


def main(commit: rows.Commit = None, out: rows.Folder = rows.COMMITTED):
    """The time of Hopper's backward without some of its parts."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("This needs a GPU of Hopper's kind, and torch sees none here.")
    found = {**rows.provenance(commit=commit), "kernel": KERNEL, "dtype": "bf16", "times": []}
    found["source"] = fingerprint.code_hash("02_fa2_cuda", KERNEL)
    with tempfile.TemporaryDirectory() as folder:
        for point in POINTS:
            tensors = tensors_at(point, "cuda")
            calls = {name: call_of(written(folder, name), tensors) for name in (None, *PARTS)}
            for name, taken in timing.interleaved(calls, device="cuda").items():
                found["times"].append({**point.sizes, "without": name, "ms_median": taken.ms_median})
                print(found["times"][-1])
    print("written:", rows.write_record("left_out", found, out))


if __name__ == "__main__":
    typer.run(main)
