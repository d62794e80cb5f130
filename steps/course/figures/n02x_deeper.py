"""What notebook 02x shows: lost registers, machine code, a planted FMA, turns, and the power limit."""

import functools
import importlib.util
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

import torch

from steps.course.bench import ablations
from steps.course.figures import planted
from steps.course.figures.planted import GPU, compiled
from steps.course.workbook import show
from steps.step02_fa2_cuda import calls, emulator, ladder, launches, nvrtc

UNROLL = "#pragma unroll\n"
LOST = {  # how registers are lost: the head_dim, and what is replaced in rung scalar's text by what
    "as it is, D = 64": (64, "", ""),
    "too many numbers: D = 128": (128, "", ""),
    "an index: #pragma unroll 8": (64, UNROLL, "#pragma unroll 8\n"),
    **{f"a promise: __launch_bounds__(Br, {n})": (64, "_bounds__(Br)", f"_bounds__(Br, {n})") for n in (6, 7, 8, 16)},
}


def lost_registers():
    """Prints what ptxas says of rung scalar as it is, and with each of three ways to lose its registers."""
    for changed, how in LOST.items():
        used = registers(*how)
        print(f"{changed:36} {used.registers:3} registers, stack {used.stack:3} bytes, spilled {used.spills:3} bytes")


def registers(D, old, new):
    """What ptxas reports of rung 0 with `new` in place of `old`, also where the loader would refuse the kernel."""
    row = ladder.FORWARD["scalar"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / row.file
        file.write_text((launches.HERE / row.file).read_text().replace(old, new))
        try:
            made = nvrtc.compile(file, dict(zip(("D", "Br", "Bc"), (D, *row.tiles[0][64]), strict=True)), "sm_90a")
        except RuntimeError as refused:
            made = refused
        return made.usage["attention_forward"]


def machine_code(rung="fa2", D=128):
    """A rung's instructions for an H200; empty without nvdisasm, which Triton brings."""
    triton = importlib.util.find_spec("triton")
    tool = triton and Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
    if not (tool and tool.exists()):
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(compiled(ladder.FORWARD[rung].file.removesuffix(".cu"), D)[-1])
        ran = subprocess.run([tool, "-c", cubin.name], capture_output=True, text=True)
    return re.findall(r"/\*[0-9a-f]{4}\*/ +(.*?) *;", ran.stdout)


def instructions(text):
    """Prints the PTX of rung warp's row_max and of each kernel of a text, without moves, loads and stores.

    It is compiled for an H100, and a word is an instruction.
    cuda.core would need a driver for PTX, so NVRTC is called itself.
    """
    from cuda import pathfinder
    from cuda.bindings import nvrtc

    folders = [pathfinder.find_nvidia_header_directory(package) for package in ("cudart", "cccl")]
    if None in folders:
        return print("CUDA's headers are not here, so nothing is compiled")
    # Without the macro the header of cooperative groups includes many others, and compiling takes 25 times as long.
    options = ["-arch=compute_90", "-std=c++17", "-D_CG_LIMIT_INCLUDED_DEPENDENCIES", *(f"-I{x}" for x in folders)]
    ours = f'{show("fwd_1_warp", "row_max")}\nextern "C" __global__ void ours(float* x) {{ *x = row_max(*x); }}\n'
    _, program = nvrtc.nvrtcCreateProgram((ours + text).encode(), b"groups.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status:
        raise RuntimeError(status.name)
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    for kernel in ptx.decode().split(".entry ")[1:]:
        words = re.findall(r"^\s(?!mov|ld|st|cvta|mul\.wide|add\.s64|ret)([a-z]+)(?:\.\S+)?\s", kernel, re.M)
        print(textwrap.fill(" ".join([f"{kernel.split('(')[0]:11}", *words]), 88, subsequent_indent=" " * 12))


def products_and_exponentials():
    """Counts rung fa2's HMMA and MUFU.EX2 and prints the 14 lines in which both are most frequent."""
    code = machine_code()
    if not code:
        return print("there is no nvdisasm here, so the machine code is not shown")
    kinds = "".join("m" if "HMMA" in x else "e" if "MUFU.EX2" in x else "." for x in code)
    near = [n for n in range(len(code)) if "m" in kinds[max(0, n - 10) : n] and "m" in kinds[n : n + 11]]
    between = f"{sum(kinds[n] == 'e' for n in near)} of them have HMMAs close by, before and after"
    print(f"{kinds.count('m')} HMMA and {kinds.count('e')} MUFU.EX2; {between}")
    first = max(range(len(code)), key=lambda n: min(kinds.count(kind, n, n + 14) for kind in "me"))
    print(*code[first : first + 14], sep="\n")


FUSED = "__fmul_rn(scale_log2, S[n][i])", "scale_log2 * S[n][i]"


def plant_the_fma():
    """Prints an edit of rung cp_async that makes the exponent one FMA, and which of two cases see it."""
    print("- " + FUSED[0], "+ " + FUSED[1], sep="\n")
    found = planted.killed("cp_async", {"FMA": FUSED}, ["scores_200", "large_scores"], [{}])
    for (_, case), (verdict,) in found.items():
        print(f"case {case:13} {'does not see it' if verdict == 'lives' else f'sees it: {verdict}'}")


def changed_bits(blocks, seed, deterministic):
    """How many elements change against blocks in order, of [dq in float32, dq, dk, dv] of rung 1's backward."""
    pairs = zip(gradients("forward", 0, deterministic), gradients(blocks, seed, deterministic), strict=True)
    return [int((a != b).sum()) for a, b in pairs]


@functools.cache
def gradients(blocks, seed, deterministic):
    """(dq before its rounding, dq, dk, dv) of two heads of 160 tokens in fp16: five tiles of keys, in the emulation."""
    q, k, v, dout = torch.randn(4, 1, 2, 160, 32, generator=torch.Generator().manual_seed(0)).half()
    out, lse = calls.forward(q, k, v, rung="fa2")
    with emulator.schedule(blocks=blocks, seed=seed):
        sums = calls.start_gradients(dout, out, lse, deterministic=deterministic)
        dk, dv = calls.add_gradients(sums, dout, q, k, v)
        return sums.dq_sum, calls.finish_dq(sums), dk, dv


def power():
    """A line for each load that was run under the power limit: its speed, clock and watts."""
    for one in ablations.read("timeline").get("power", ()):
        allowed = GPU.sms * 4096 * one["sm_mhz"] / 1e6
        print(f"{one['load']:14} {one['data']:13}: {one['tflops']:.0f} TFLOP/s at {one['sm_mhz']:.0f} MHz,",
              f"{one['tflops'] / allowed:.0%} of what that allows; {one['watts']:.0f} W")  # fmt: skip
