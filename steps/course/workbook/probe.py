"""The first difference of a function of stage 02: a small kernel calls it in the emulation with numbers that tell.

The kernel stands behind the file's text up to the answer, and behind the text up to the stage's own function. Wrong
answers are probed, and those whose function must hold in tiles that no case of the emulation has.
"""

import os
import re
import subprocess
from pathlib import Path

import torch

from steps.course.workbook import first_difference
from steps.course.workbook.listing import cuda_span
from steps.step02_fa2_cuda import emulator

# Of the 16 x 16 numbers of P, number 16 row + column + 1 stands for P[row][column]. Such numbers fit into 16 bits.
TO_OPERAND = """
extern "C" __global__ void probe(Global<int> found) {
  int lane = threadIdx.x, g = lane / 4, c = 2 * (lane % 4);
  float near[4], far[4];
  uint32_t A[4] = {};
  for (int e = 0; e < 4; e++) {
    near[e] = 16 * (g + e / 2 * 8) + c + e % 2 + 1;
    far[e] = near[e] + 8;
  }
  to_operand(A, near, far);
  for (int i = 0; i < 4; i++) found[4 * lane + i] = A[i];
}
"""
LANE_ROW = """
extern "C" __global__ void probe(Global<int> found) {
  SharedMemory memory;
  Shared<T> tile = memory.array<T>(64 * 64);
  for (int piece = 0; piece < 3; piece++)
    found[32 * piece + threadIdx.x] = lane_row_transposed<64>(tile, 16 * piece, 16 * (3 - piece)).at - tile.at;
}
"""
# Three tiles of two keys each. Between a thread's scores lie those of another thread, and V has rows behind the last.
ONLINE_UPDATE = """
extern "C" __global__ void probe(Global<float> found) {
  SharedMemory memory;
  Shared<float> S = memory.array<float>(4 * Br), V = memory.array<float>(4 * D);
  float m = -INFINITY, l = 0, O[D] = {};
  for (int tile = 0; tile < 3; tile++) {
    for (int e = 0; e < 4 * D; e++) V[e] = 1 + e % 5 + tile;
    for (int e = 0; e < 4 * Br; e++) S[e] = e % Br ? 0.25f * e : (tile == 1 ? 2.5f : 1.0f) - 0.5f * e / Br;
    online_update(m, l, O, S, S[0], V, 2);
    found[tile * (2 + D)] = m;
    found[tile * (2 + D) + 1] = l;
    for (int d = 0; d < D; d++) found[tile * (2 + D) + 2 + d] = O[d];
  }
}
"""
ADD_DQ = """
extern "C" __global__ void probe(Global<float> found) {
  SharedMemory memory;
  Shared<float> dS = memory.array<float>(Br * Bc), K = memory.array<float>(Bc * STRIDE);
  if (threadIdx.x == 0) {
    for (int e = 0; e < Br * Bc; e++) dS[e] = 1 + e % 7;
    for (int e = 0; e < Bc * STRIDE; e++) K[e] = 1 + e % 5;
  }
  __syncthreads();
  add_dQ(found, dS, K, Br - 1, KEYS, 0.5f);
}
"""
ROW_DELTA = """
extern "C" __global__ void probe(Global<const float> dO, Global<const float> O, Global<float> found) {
  found[0] = row_delta(dO, O);
}
"""
KEYS_SEEN = """
extern "C" __global__ void probe(Global<const int> sizes, Global<int> found, int n) {
  for (int i = 0; i < n; i++)
    found[i] = keys_seen(sizes[4 * i], sizes[4 * i + 1], sizes[4 * i + 2], sizes[4 * i + 3]);
}
"""
# A tile of other than Br or Bc rows, with two slabs.
AT = """
extern "C" __global__ void probe(Global<int> found) {
  for (int row = 0; row < 48; row++)
    for (int column = 0; column < D; column++) found[row * D + column] = at(48, row, column);
}
"""
MACROS = {"T": "bf16", "D": 32, "Br": 16, "Bc": 16}
FLOAT_TO_INT = r"^{file}:(\d+):\d+: warning: conversion from '(?:float|double)' to '(?!float|double)([\w ]+)"


def explain(job):
    """The lines about what the function does first that the stage's own does not; [] if nothing is found."""
    return _conversions(_yours(job), job["label"]) + _judged(job, PROBES.get(job["id"]))


def other_tiles(job):
    """The lines about what is wrong in a tile of another shape than those of the emulation's cases."""
    return _judged(job, OTHER_TILES[job["id"]])


def _yours(job):
    return (Path(job["folder"]) / "steps" / job["file"]).read_text()


def _judged(job, judge):
    if judge is None:
        return []
    path, yours, before = Path(job["folder"]) / "steps" / job["file"], _yours(job), job["original"].splitlines()
    right = "\n".join(before[: cuda_span(job["original"], job["function"]).stop])
    texts = [path.with_name(f"probe_{name}.cu") for name in ("yours", "right")]
    for file, text in zip(texts, (yours[: yours.rindex("#line")], right), strict=True):
        file.write_text(text + "\n")
    try:
        return judge(*texts)
    except RuntimeError:  # The probe cannot be compiled, or leaves an array, which the report of the cases tells.
        return []


def _conversions(text, label):
    """A line for each number with a fraction that the answer turns into a whole number, as the compiler sees it."""
    headers = emulator.HERE.parent
    command = ["g++", *emulator._FLAGS, f"-I{headers}", "-include", headers / "ptx.cuh", "-fsyntax-only"]
    text = "".join(f"#define {name} {value}\n" for name, value in MACROS.items()) + text
    english = dict(text=True, capture_output=True, env=os.environ | {"LC_ALL": "C"})
    says = subprocess.run([*command, "-Wfloat-conversion", "-x", "c++", "-"], input=text, **english).stderr
    found = re.findall(FLOAT_TO_INT.format(file=re.escape(label)), says, re.M)
    return [f"{label}, line {n}: a float becomes {kind} here, and loses what is behind the point"
            for n, kind in dict.fromkeys(found)]  # fmt: skip


def _run(file, kernel, found, *arguments, block=1, **macros):
    """What the probe writes to `found`, a tensor."""
    file.write_text(file.read_text().partition('\nextern "C" __global__ void probe')[0] + kernel)
    emulator.launch(file, "probe", [*arguments, found][: len(arguments) + 1], grid=1, block=block,
                    shared_bytes=32768, macros=MACROS | macros)  # fmt: skip
    return found


def _both(files, kernel, found, *arguments, **how):
    """(yours, right)"""
    return [_run(file, kernel, found.clone(), *arguments, **how) for file in files]


def _first(yours, right):
    """The place of the first entry that differs, or None."""
    wrong = first_difference._wrong(yours, right) if right.is_floating_point() else yours != right
    return tuple(wrong.nonzero()[0].tolist()) if wrong.any() else None


def _operand(*files):
    yours, right = _both(files, TO_OPERAND, torch.zeros(32, 4, dtype=torch.int32), block=32)
    if (place := _first(yours, right)) is None:
        return []
    lane, register = place
    wrong = [n for n in range(4) if (yours != right)[:, n].any()]
    lines = [f"Lane {lane} is the first that holds other entries of P, in A[{register}]:"]
    for name, them in (("yours", yours), ("right", right)):
        low, high = (_entry(them[lane, register].item() >> bits & 0xFFFF) for bits in (0, 16))
        lines.append(f"  {name}  lower half {low}, upper half {high}")
    fine = [f"A[{n}]" for n in range(4) if n not in wrong]
    return lines + ([f"  right in all lanes: {', '.join(fine)}"] if fine else [])


def _entry(bits):
    """The entry of P that 16 bits stand for."""
    number = torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16).item()
    if number == 0:
        return "0"
    if number != number or number % 1 or not 1 <= number <= 256:
        return f"{number:g}, which is no entry of P"
    return f"P[{(int(number) - 1) // 16}][{(int(number) - 1) % 16}]"


def _address(yours, right):
    """Any arrangement of the tile will do in which no two numbers meet, and chunks of 8 stay together."""
    found = _run(yours, AT, torch.zeros(48, 128, dtype=torch.int32), D=128, Bc=32)
    taken = {}
    for row, column in ((row, column) for row in range(48) for column in range(128)):
        at, where = found[row, column].item(), f"row {row}, column {column} of a tile of 48 rows and D = 128 columns"
        if not 0 <= at < 48 * 128:
            return [f"{where} lies at {at}, outside of the tile's {48 * 128} numbers."]
        if at in taken:
            return [f"{where} lies at {at}, as does {taken[at]}."]
        taken[at] = f"row {row}, column {column}"
    return []


def _lanes(*files):
    tile = dict(D=64, Br=64, Bc=64, WARPS=8, HEADS_APART=0)
    yours, right = _both(files, LANE_ROW, torch.zeros(3, 32, dtype=torch.int32), block=32, **tile)
    if (place := _first(yours, right)) is None:
        return []
    piece, lane = place
    where = f"the piece at row {16 * piece}, column {16 * (3 - piece)} of a tile of WIDTH 64"
    lines = [f"For {where} lane {lane} is the first that gives another address:"]
    for name, them in (("yours", yours), ("right", right)):
        row, at = divmod(them[piece, lane].item(), 64)
        lines.append(f"  {name}  row {row}, column {at ^ 8 * (row % 8)}, which lies at {at} because of the swizzle")
    return lines


def _update(*files):
    D = 2
    yours, right = _both(files, ONLINE_UPDATE, torch.zeros(3, 2 + D), D=D, Br=2, Bc=4)
    if (place := _first(yours, right)) is None:
        return []
    tile = place[0]
    before = right[tile - 1] if tile else torch.tensor([-torch.inf, *[0.0] * (1 + D)])
    scores = "2.5 and 2" if tile == 1 else "1 and 0.5"
    lines = [f"In a small example your function first differs from the right one after tile {tile + 1},",
             f"whose n = 2 keys have the scores {scores}:",
             " " * 10 + "".join(f"{name:>12}" for name in ("m", "l", *(f"O[{d}]" for d in range(D))))]  # fmt: skip
    for name, row in (("before", before), ("yours", yours[tile]), ("right", right[tile])):
        lines.append(f"  {name:8}" + "".join(f"{x:>12.6g}" for x in row.tolist()))
    return lines


def _gradient(*files):
    sizes = dict(D=2, Br=4, Bc=3, KEYS=2)
    yours, right = _both(files, ADD_DQ, torch.zeros(3, 2), block=3, **sizes)
    if (place := _first(yours, right)) is None:
        return []
    example = "In a small example (3 rows, 2 keys, 3 threads, D = 2)"
    times = (yours / right).round()
    if torch.equal(times * right, yours) and times.unique().numel() > 1:  # All of them alike would be a factor.
        rows = ["  " + " ".join(f"{n:g}" for n in row) for row in times.tolist()]
        return [f"{example} entries of dq are added more than once, or by nobody:", *rows]
    row, d = place
    return [f"{example} row {row}, column {d} of dq gets {yours[place]:g}, and not {right[place]:g}."]


def _delta(*files):
    dO, O = torch.arange(1.0, 5), torch.arange(5.0, 9)
    yours, right = _both(files, ROW_DELTA, torch.zeros(1), dO, O, D=4)
    if _first(yours, right) is None:
        return []
    return [f"For dO = (1, 2, 3, 4) and O = (5, 6, 7, 8) your function returns {yours[0]:g}; expected {right[0]:g}."]


ASKED = [(tile, Nq, Nk, causal) for Nq, Nk in ((20, 20), (20, 50), (50, 20), (5, 40)) for causal in (0, 1)
         for tile in range(-(-Nq // 16))]  # fmt: skip


def _keys_seen(*files, Br=16):
    found = torch.zeros(len(ASKED), dtype=torch.int32)
    kernel = KEYS_SEEN.replace(", Global<int> found, int n", ", Global<int> found").replace("n;", f"{len(ASKED)};")
    return _both(files, kernel, found, torch.tensor(ASKED, dtype=torch.int32), Br=Br)


def _seen(*files):
    yours, right = _keys_seen(*files)
    if (place := _first(yours, right)) is None:
        return []
    tile, Nq, Nk, causal = ASKED[place[0]]
    where = f"tile = {tile}, Nq = {Nq}, Nk = {Nk}, causal = {causal}, with Br = 16"
    return [f"For {where} your function returns {yours[place]}; expected {right[place]}."]


def _enough(*files):
    """Tiles that no query sees only take time, which the exercise counts; here none may be missing."""
    yours, right = _keys_seen(*files, Br=32)
    exists = torch.tensor([32 * tile < Nq for tile, Nq, _, _ in ASKED])
    if (place := _first((yours < right) & exists, torch.zeros_like(exists))) is None:
        return []
    tile, Nq, Nk, causal = ASKED[place[0]]
    where = f"tile = {tile}, Nq = {Nq}, Nk = {Nk}, causal = {causal}, with Br = 32 and Bc = 16"
    return [f"For {where} your function returns {yours[place]}, but the block sees {right[place]} keys."]


PROBES = {
    "02.1": _update,
    "02.2": _gradient,
    "02.3": _delta,
    "02.4": _address,
    "02.5": _operand,
    "02.6": _seen,
    "02.7": _lanes,
}
OTHER_TILES = {"02.4": _address, "02.6": _enough}
