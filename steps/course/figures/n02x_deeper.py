"""What notebook 02x shows: lost registers, machine code, ideas switched off, turns, and the clocks of Hopper."""

import functools
import importlib.util
import itertools
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

import torch
from matplotlib.colors import ListedColormap

from steps.course.bench import ablations, rows
from steps.course.figures import measured, n02d_hopper
from steps.course.figures.picture import pictured
from steps.course.figures.planted import GPU, compiled
from steps.course.figures.plots import COLOURS, subplots
from steps.course.workbook import edited, show
from steps.course.workbook.puzzles.operand_address import operand_address
from steps.step02_fa2_cuda import calls, emulator, ladder, launches, nvrtc


def registers(D=64, old="", new=""):
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
    """Prints the PTX of each kernel of a text for an H100, a word an instruction, without moves, loads and stores.

    cuda.core would need a driver for PTX, so NVRTC is called itself.
    """
    from cuda import pathfinder
    from cuda.bindings import nvrtc

    folders = [pathfinder.find_nvidia_header_directory(package) for package in ("cudart", "cccl")]
    if None in folders:
        return print("CUDA's headers are not here, so nothing is compiled")
    # Without the macro the header of cooperative groups includes many others, and compiling takes 25 times as long.
    options = ["-arch=compute_90", "-std=c++17", "-D_CG_LIMIT_INCLUDED_DEPENDENCIES", *(f"-I{x}" for x in folders)]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"groups.cu", 0, [], [])
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


def without(switch, kernel="fwd_5_fa2"):
    """Prints by how much a kernel is slower (+) with one of its ideas switched off, on an H200."""
    found = [row for row in rows.fresh(rows.read(switched=True)) if row["gpu"] == GPU.name]
    both = measured.beside(found, (f"{kernel}:{switch}",), kernel)
    for (D, causal), some in itertools.groupby(both, lambda one: (one[0]["D"], one[0]["causal"])):
        slower = ", ".join(f"{1 / share - 1:+.1%} at N = {row['N']}" for row, share in some)
        print(f"{switch}, D {D:3}, {'causal' if causal else 'full':6}: {slower}")


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


@pictured
def read_by_wgmma():
    """Which chunks of a tile four instructions read, its first 32 rows. Of K each reads two chunks of every row,
    which the swizzle moves about in a pattern that repeats after eight rows. Of V each reads 16 whole rows."""
    fig, axes = subplots(1, 2, figsize=(8.4, 4.2), sharey=True)
    for is_V, ax in enumerate(axes):
        reader = torch.full((64 * 8,), float("nan"))
        for step, k, i in itertools.product(range(4), range(16), range(64)):
            where = (2048 * step, 8192, 1024) if is_V else (32 * step, 16, 1024)
            reader[operand_address(*where, k, i, bool(is_V)) // 16] = step
        ax.pcolormesh(reader.view(64, 8), cmap=ListedColormap(COLOURS[:4]), edgecolors="white", lw=0.5)
        ax.set(ylim=(32, 0), xlabel="16-byte chunk of the row", yticks=range(0, 33, 8))
        ax.set_title("V: an instruction reads 16 keys" if is_V else "K: an instruction reads 16 columns")
        ax.grid(False)
    axes[0].set_ylabel("row of 128 bytes, the first 32 of 64")
    n02d_hopper.legend(fig, {f"instruction {step}": COLOURS[step] for step in range(4)}, "outside lower center")
    return fig


def registers_of_the_roles(D):
    """What a consumer of rung hopper needs, and what setmaxnreg gives it, in words."""
    row = ladder.FORWARD["hopper"]
    Br, Bc = row.tiles[0][D]
    need, n = Bc // 2 + Bc // 4 + D // 2, Br // 64  # 64 rows among 128 threads; P has 16 bits
    text = re.findall(r"_REGISTERS = .*", str(show("fwd_8_hopper")))
    kept, taken = (int(re.findall(r"[?:] (\d+)", line)[n - 1]) for line in text)
    first = GPU.multiprocessor.registers // row.threads(D, Br, Bc) // 8 * 8
    given = f"at first {first}, then {taken}, producer {kept}; all {128 * (kept + n * taken)}"
    return f"D = {D:3}, {n} consumers: S, P, O need {need}; {given}"


def without_the_wait():
    """What ptxas says of rung wgmma when it does not wait for S."""
    with edited("fwd_6_wgmma.cu", ("    wgmma_wait<0>();\n    if (j * Bc", "    if (j * Bc")):
        try:
            compiled("fwd_6_wgmma", 128)
        except RuntimeError as refused:
            found = re.findall(r"\(C75\d\d\)[^;\n]*", str(refused))
            return "\n".join(textwrap.fill(says, 88) for says in dict.fromkeys(found))


def recorded():
    """[(what was changed, clocks from one block of keys to the next, timeline)] of rung hopper as it is now."""
    for one in ablations.read("timeline").get("timelines", ()):
        changed = ", ".join(f"{name} = {value}" for name, value in one["switches"].items())
        first, *between, last = (step[0][0] for step in one["marks"])
        yield f"without {one['without']}" if "without" in one else changed, (last - first) / (len(between) + 1), one


@pictured
def timelines():
    """Recorded timelines of two warpgroups over five steps, without and with turns. In both products follow each other
    nearly without a gap, the softmax of one warpgroup lies under the products of both, and the two alternate."""
    fig, grid = subplots(2, 1, figsize=(8.5, 4.6))
    bars = ("starts", "output", 0, COLOURS[0]), ("scores", "exponentials", 0.4, COLOURS[1])
    for changed, clocks, one in recorded():
        if changed.startswith("OVERLAP = 1"):
            ax, (origin, end) = grid[one["switches"]["PINGPONG"]], (one["marks"][n][0][0] for n in (8, 13))
            for (*events, shift, colour), group in itertools.product(bars, (0, 1)):
                a, b = map(ablations.EVENTS.index, events)
                pieces = [(step[group][a] - origin, step[group][b] - step[group][a]) for step in one["marks"]]
                ax.broken_barh(pieces, (group + shift - 0.18, 0.36), fc=colour, ec="white")
            ax.set_yticks((0, 0.4, 1, 1.4), ("group 0: products", "softmax", "group 1: products", "softmax"))
            turns = "with turns" if changed.endswith("1") else "without turns"
            ax.set(ylim=(1.7, -0.3), xlim=(0, end - origin), title=f"{turns}: {clocks:.0f} clocks a step")
            ax.grid(axis="y", visible=False)
    grid[1].set_xlabel("clocks of the SM, D = 128, no mask")
    return fig


def power():
    """A line for each load that was run under the power limit: its speed, clock and watts."""
    for one in ablations.read("timeline").get("power", ()):
        allowed = GPU.sms * 4096 * one["sm_mhz"] / 1e6
        print(f"{one['load']:14} {one['data']:13}: {one['tflops']:.0f} TFLOP/s at {one['sm_mhz']:.0f} MHz,",
              f"{one['tflops'] / allowed:.0%} of what that allows; {one['watts']:.0f} W")  # fmt: skip
