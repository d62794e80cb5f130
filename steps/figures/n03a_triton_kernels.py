"""What notebook 03a draws, compiles and breaks."""

import inspect
import itertools
import re
import statistics
import textwrap
import time
import warnings
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl

from reference import attention, cases, error, mutants
from steps import engine
from steps import step03_triton as step03
from steps.bench import cost, rows
from steps.figures import measured
from steps.figures.picture import picture
from steps.figures.plots import COLOURS, INK, PEERS, ink_on, style
from steps.figures.triton_compiler import compiled
from steps.figures.triton_planted import planted, who_sees
from steps.step03_triton import fwd_0_fused, memcheck
from steps.workbook import show

memcheck.watch_every_kernel()  # also those of a notebook
style()
torch.set_num_threads(1)  # Small tensors are faster on one thread.
H200 = cost.GPUS["NVIDIA H200"]
MACHINE = r"threadIdx|blockIdx|program_id|__shfl|__syncthreads|[sS]hared|smem|unroll|lane|[wW]arp|ldmatrix|mma|slab"
MACHINE += r"|[bB]arrier|swizzle|cp_async|tma|[lL]ayout|registers|async|launch_bounds|num_stages"
RUNG = dict(zip(("fused", "tma", "roles", "gluon"), COLOURS, strict=False))  # a rung's colour, forward and backward


def wall_clock(call, quantiles=None):
    """Milliseconds of one call, as `triton.autotune` asks for them where there is no GPU to ask."""
    begin = time.perf_counter()
    call()
    return 3 * [1e3 * (time.perf_counter() - begin)]


def on_h200():
    return [row for row in rows.fresh(rows.read()) if row["gpu"] == H200.name and row["dtype"] == "bf16"]


def text_and_speed():
    """Prints how long four forwards are, how much of that is about the machine, and how fast they are."""
    languages = {"fwd_5_fa2": "CUDA C++", "fwd_8_hopper": "CUDA C++", "step03_triton/fwd_0_fused": "Triton"}
    for file, language in (languages | {"fwd_3_gluon": "Gluon"}).items():
        name, text = file.split("/")[-1], re.sub(r'""".*?"""', "", str(show(file)), flags=re.S)
        text = re.sub(r"//.*|(?m:(^|  )#(?!pragma|include).*)", "", text)  # without comments
        lines = [line for line in text.splitlines() if line.strip()]
        about = sum(bool(re.search(MACHINE, line)) for line in lines)
        beside = measured.beside(on_h200(), [name], "sdpa-cudnn")
        share = [share for row, share in beside if (row["D"], row["causal"], row["N"]) == (128, False, 16384)]
        speed = f"{share[0]:.0%} of cuDNN's speed" if share else "not measured as it is now"
        print(f"{name:12} {language:8}: {about:3} of {len(lines):3} lines about the machine; {speed}")


def interpreted_and_compiled(*kernels):
    """Runs eight programs of each kernel(x, out), and compiles it for an H100. Prints who complains."""
    head = "import triton\nimport triton.language as tl\n\n"
    text = head + "\n\n".join(inspect.getsource(kernel.fn) for kernel in kernels)
    names = [kernel.fn.__name__ for kernel in kernels]
    script = "import faults\nx, out = torch.zeros(1 << 16).half(), torch.zeros(1 << 16)\n"
    script += "\n".join(f"faults.{name}[(1,)](x, out)" for name in names)
    for name, kernel, found in zip(names, kernels, compiled(script, {"faults": text}), strict=True):
        x, out = torch.full((1 << 16,), -1.0).half().to(engine.device), torch.zeros(1 << 16).to(engine.device)
        try:
            kernel[(8,)](x, out)
            said = f"runs, and leaves {out[0].item():g}"
        except Exception as problem:
            said = f"{type(problem).__name__}: {problem}"
        atomics = len(re.findall(r"\batom\.|\bred\.", found.get("ptx", "")))
        last = found.get("refused", f"no complaint; {atomics} atomic instructions").splitlines()[-1]
        print(name)
        for who, says in (("interpreter" if engine.name == "cpu" else "GPU", said), ("compiler", last)):
            print(textwrap.fill(f"    {who:11} {says}", 88, subsequent_indent=16 * " "))


@triton.jit
def ranges_kernel(result, Nq, Nk, CAUSAL: tl.constexpr, SIDE: tl.constexpr):
    tile = tl.program_id(0)
    full, end = fwd_0_fused.key_ranges(tile * SIDE, Nq, Nk, CAUSAL, SIDE, SIDE)
    tl.store(result + 2 * tile, full)
    tl.store(result + 2 * tile + 1, end)


def tiles_visited(side=4):
    """The tiles that `key_ranges` visits with and without a mask, for four shapes of the scores."""
    shapes = {"not causal": (14, 14, False), "causal": (14, 14, True)}
    shapes |= {"causal,\nfewer queries": (10, 18, True), "causal,\nmore queries": (18, 10, True)}
    fig, axes = plt.subplots(1, 4, figsize=(8.4, 2.9), layout="constrained")
    for ax, (name, (Nq, Nk, causal)) in zip(axes, shapes.items(), strict=True):
        found = torch.zeros(triton.cdiv(Nq, side), 2, dtype=torch.int32, device=engine.device)
        ranges_kernel[(len(found),)](found, Nq, Nk, CAUSAL=causal, SIDE=side)
        for n, (full, end) in enumerate(found.tolist()):
            for j in range(0, end, side):
                colour = COLOURS[5 if j < full else 4]
                ax.add_patch(plt.Rectangle((j, n * side), side, side, facecolor=colour, edgecolor="white", lw=2))
        i, j = attention.visible(Nq, Nk, causal).nonzero(as_tuple=True)
        ax.plot(j + 0.5, i + 0.5, ".", color=INK, ms=3)
        ax.add_patch(plt.Rectangle((0, 0), Nk, Nq, fill=False, edgecolor=INK, lw=1))
        ax.set(xlim=(-0.5, 20.5), ylim=(20.5, -0.5), aspect="equal", xlabel="key", title=name)
        ax.set(xticks=range(0, 21, 4), yticks=range(0, 21, 4))
    axes[0].set_ylabel("query")
    return picture(fig, """Four drawings of queries against keys in tiles of 4 by 4; dots are the pairs that are seen.
        Blue tiles are visited without a mask, orange ones with one. Not causal: the last, ragged column is orange.
        Causal: orange on the diagonal, blue below it, nothing above it. With 10 queries and 18 keys the diagonal ends
        in the lower right corner; with 18 queries and 10 keys the first 8 queries see nothing, and their tiles are
        not visited.""")  # fmt: skip


def instructions(*, D=64):
    """What fwd_0_fused becomes on an A100 and on an H100: counts of instructions in the PTX, and shared memory."""
    script = f"from steps.step03_triton import fwd_0_fused as file\nx = torch.zeros(1, 1, 128, {D}).bfloat16()\n"
    script += "for number in (80, 90):\n    arch(number)\n    file.forward.forget()\n    file.forward(x, x, x)"
    names = "mma.sync", "wgmma.mma_async", "cp.async.cg"
    found = {made["arch"]: made for made in compiled(script)}
    for arch, made in found.items():
        counts = ", ".join(f"{name} {made['ptx'].count(name)}" for name in names)
        print(f"sm_{arch}: {counts}; {made['shared']:,} bytes of shared memory")
    return found


def owners():
    """Who owns which tile in the backward's two kernels."""
    fig, axes = plt.subplots(1, 2, figsize=(7.4, 3.4), layout="constrained")
    for ax, by_keys in zip(axes, (True, False), strict=True):
        for i, j in itertools.product(range(4), range(4)):
            if j <= i:
                owner = j if by_keys else i
                look = {"facecolor": COLOURS[2 + owner], "edgecolor": "white", "lw": 1.5}
                ax.add_patch(plt.Rectangle((j, i), 1, 1, **look))
                ax.text(j + 0.5, i + 0.5, owner, ha="center", va="center", color=ink_on(COLOURS[2 + owner]))
        for n in range(4):
            down, along = ((n + 0.15, 3.92), (n + 0.15, n + 0.08)), ((n + 0.92, n + 0.85), (0.08, n + 0.85))
            ax.annotate("", *(down if by_keys else along), arrowprops={"arrowstyle": "->", "color": INK})
        ax.set(xlim=(0, 4), ylim=(4, 0), aspect="equal", xticks=[], yticks=[])
        ax.set(xlabel="tiles of keys", ylabel="tiles of queries")
    axes[0].set_title("keys_kernel: dK_j, dV_j\nS, dP, dV, dK: 4 products")
    axes[1].set_title("queries_kernel: dQ_i\nS, dP, dQ: 3 products")
    return picture(fig, """Two causal triangles of tiles. Left: each column has the colour of the program that owns
        those keys and walks down the queries. Right: each row has the colour of the program that owns those queries and
        walks along the keys.""")  # fmt: skip


MISTAKES = {
    "masked only if causal": ("        if MASKED:", "        if MASKED and CAUSAL:"),
    "end at the top left": ("i + Br + Nk - Nq", "i + Br"),
    "key head h % Hk": ("h // group", "h % (H // group)"),
    "columns not masked": ("ROWS, D, D_pad), other", "ROWS, D_pad, D_pad), other"),
    "offsets in 32 bits": (".to(tl.int64)", ""),
}
SMALL = {  # cases of the contract, cut to be quick; T is the longer side of the stage's smallest tile
    "ragged": dict(H=1, Nq=lambda T: T + 5),
    "fewer_queries_causal": dict(H=1, Nq=lambda T: T + 5, Nk=lambda T: 2 * T + 3),
    "more_queries_causal": dict(H=1, Nq=lambda T: 2 * T + 3, Nk=lambda T: T + 5),
    "head_dim_odd": dict(H=1, Nq=lambda T: 5),
    "grouped_heads": dict(H=4, Hk=2, Nq=lambda T: 5),
}


def verdicts():
    """{(mistake, case): "lives", or how it dies: beside the tensor, as a mutant does}; first the kernel as it is."""
    found = {}
    warnings.filterwarnings("ignore", message="All-NaN")  # numpy, where the interpreter meets the NaN we look for
    kernels = {"as it is": fwd_0_fused} | {
        name: planted("fwd_0_fused", "fwd_0_fused", *change) for name, change in MISTAKES.items()
    }
    for case in (replace(case, **SMALL[case.name]) for case in cases.CASES if case.name in SMALL):
        x = cases.build(case, step03.SUPPORTS, torch.float32)
        want = error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)
        for name, kernel in kernels.items():
            try:
                out, lse = kernel.forward(*(t.to(engine.device) for t in (x.q, x.k, x.v)), **x.options)
                wrong = error.failures({"out": out.cpu(), "lse": lse.cpu()}, want)
                word = mutant_of(out.cpu(), x, want) if wrong else "lives"
            except IndexError:  # memcheck.py's
                word = "beside the tensor"
            found[name, case.name.replace("_", "\n", 1).replace("_", " ")] = word.replace("_", " ")
    return found


def mutant_of(out, x, want):
    """The name of the planted misconception that gives this out, or "dies"."""
    for mutant in (m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Forward)):
        try:
            theirs = mutant.run(x, x.tile, step03.SUPPORTS["order"])["out"]
        except mutants.NotApplicable:
            continue
        if torch.allclose(out, theirs, atol=2 * want.tolerance["out"], equal_nan=True):
            return mutant.name
    return "dies"


def mistakes_against_cases():
    """Which case of the contract sees which mistake that is planted in fwd_0_fused."""
    return who_sees(verdicts(), "green: a case sees the mistake; orange: none does", "Planted mistakes against cases.")


def at_longest(kernel, which):
    """{(D, causal): {kernel or peer: TFLOP/s}} at the longest N of the last run of this kernel."""
    found = [row for row in on_h200() if row["pass"] == which and not row["options"] and row["n_gpus"] == 1]
    runs = [row["run"] for row in found if row["kernel"] == kernel and row["timing"] == "interleaved"]
    speeds = {}
    for D, causal in itertools.product((128, 64), (False, True)):
        some = [row for row in found if row["run"] in runs[-1:] and (row["D"], row["causal"]) == (D, causal)]
        longest = max((row["N"] for row in some), default=0)
        speeds[D, causal] = {row["kernel"] or row["peer"]: row["tflops"] for row in some if row["N"] == longest}
    return speeds


def roof():
    """5/7 of the TFLOP/s of a plain matrix product in the run of the backwards, or None."""
    runs = [row["run"] for row in on_h200() if row["kernel"] == "bwd_0_fused"]
    products = [row["tflops"] for row in on_h200() if row["run"] in runs[-1:] and row["peer"] == rows.MATMUL]
    return 5 / 7 * statistics.median(products) if products else None


def speeds(which):
    """TFLOP/s of the stage's kernels and of others at N = 16384, as bars. which: "fwd" or "bwd"."""
    found, limit = at_longest(f"{which}_0_fused", which), roof() if which == "bwd" else None
    fig, axes = plt.subplots(2, 2, figsize=(8.4, 4.6), layout="constrained", sharex=True, sharey=True)
    for ax, ((D, causal), speeds) in zip(axes.flat, found.items(), strict=True):
        names = [name for name in [*sorted(n for n in speeds if "wd_" in n), *PEERS] if name in speeds]
        colours = [RUNG[name.split("_")[-1]] if "wd_" in name else PEERS[name][2] for name in names]
        bars = ax.barh(range(len(names)), [speeds[name] for name in names], 0.8, color=colours)
        ax.bar_label(bars, fmt="%.0f", padding=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})
        ax.set_yticks(range(len(names)), [PEERS[name][0] if name in PEERS else name for name in names])
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.12)
        ax.set_title(f"D = {D}, {'causal' if causal else 'full'}")
        if limit:
            ax.axvline(limit, color=INK, ls="--", lw=1)
    beyond = f"; dashed: 5/7 of a matrix product, {limit:.0f}" if limit else ""
    fig.supxlabel(f"TFLOP/s at N = 16384 on an H200, bf16{beyond}", fontsize=10)
    words = [f"{name} {found[128, False][name]:.0f}" for name in found[128, False]]
    return picture(fig, f"Bars for D = 128 and 64, full and causal. Full at D = 128: {', '.join(words)}.")
