"""What notebook 03a draws, compiles and breaks."""

import inspect
import re
import statistics
import textwrap
import warnings

import torch
import triton
import triton.language as tl

from reference import attention, cases, error, mutants
from steps import engine
from steps import step03_triton as step03
from steps.course.bench import rows
from steps.course.figures.measured import H100, fresh, of_one_run
from steps.course.figures.measured import speeds as speed_bars
from steps.course.figures.picture import picture
from steps.course.figures.plots import visited_tiles
from steps.course.figures.triton_compiler import compiled
from steps.course.figures.triton_planted import diff, planted
from steps.course.workbook import show
from steps.step03_triton import fwd_0_fused, memcheck

memcheck.watch_every_kernel()  # also those of a notebook
torch.set_num_threads(1)  # Small tensors are faster on one thread.
MACHINE = r"threadIdx|blockIdx|program_id|__shfl|__syncthreads|[sS]hared|smem|unroll|lane|[wW]arp|ldmatrix|mma|slab"
MACHINE += r"|[bB]arrier|swizzle|cp_async|tma|[lL]ayout|registers|async|launch_bounds|num_stages"


def text_and_speed():
    """Prints how long four forwards are, how much of that is about the machine, and how fast they are."""
    languages = {"fwd_5_fa2": "CUDA C++", "fwd_8_hopper": "CUDA C++", "step03_triton/fwd_0_fused": "Triton"}
    for file, language in (languages | {"fwd_3_gluon": "Gluon"}).items():
        name, text = file.split("/")[-1], re.sub(r'""".*?"""', "", str(show(file)), flags=re.S)
        text = re.sub(r"//.*|(?m:(^|  )#(?!pragma|include).*)", "", text)  # without comments
        lines = [line for line in text.splitlines() if line.strip()]
        about = sum(bool(re.search(MACHINE, line)) for line in lines)
        found = of_one_run(name, "sdpa-cudnn", gpu=H100, N=16384)
        speed = f"{found[name] / found['sdpa-cudnn']:.0%} of cuDNN's speed" if found else "not measured as it is now"
        print(f"{name:12} {language:8}: {about:3} of {len(lines):3} lines about the machine; {speed}")


def interpreted_and_compiled(*kernels):
    """Runs eight programs of each kernel(x, out), and compiles it for an H100. Prints who complains."""
    names = [kernel.fn.__name__ for kernel in kernels]
    faults = "\n\n".join(["import triton\nimport triton.language as tl", *(inspect.getsource(k.fn) for k in kernels)])
    script = "import faults\nx, out = torch.zeros(64).half(), torch.zeros(64)\n"
    script += "\n".join(f"faults.{name}[(1,)](x, out)" for name in names)
    for name, kernel, found in zip(names, kernels, compiled(script, {"faults": faults}), strict=True):
        x, out = torch.full((64,), -1.0).half().to(engine.device), torch.zeros(64).to(engine.device)
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
def ranges_kernel(tiles, count, Nq, Nk, CAUSAL: tl.constexpr, SIDE: tl.constexpr):
    full, end = fwd_0_fused.key_ranges(tl.program_id(0) * SIDE, Nq, Nk, CAUSAL, SIDE, SIDE)
    for j in range(0, end, SIDE):
        tl.store(tiles + tl.program_id(0) * count + j // SIDE, 1 + (j >= full))


def tiles_visited():
    """The tiles that `key_ranges` visits with and without a mask, for four shapes of the scores."""
    shapes = {"not causal": (14, 14, False), "causal": (14, 14, True)}
    shapes |= {"causal,\nfewer queries": (10, 18, True), "causal,\nmore queries": (18, 10, True)}
    side, panels = 4, {}
    for title, (Nq, Nk, causal) in shapes.items():
        count = triton.cdiv(Nk, side)
        tiles = torch.zeros(triton.cdiv(Nq, side), count, dtype=torch.int32, device=engine.device)
        ranges_kernel[(len(tiles),)](tiles, count, Nq, Nk, CAUSAL=causal, SIDE=side)
        panels[title] = tiles.cpu(), attention.visible(Nq, Nk, causal)
    return picture(visited_tiles(panels, side), """Four drawings of queries against keys in tiles of 4 by 4, a dot a
        pair that is seen. Not causal: the last, ragged column is orange. Causal: orange on the diagonal, blue below it,
        nothing above it. With 10 queries and 18 keys the diagonal ends in the lower right corner; with 18 queries and
        10 keys the first 8 queries see nothing, and tiles of theirs alone are not visited.""")  # fmt: skip


def instructions():
    """Prints what fwd_0_fused becomes on an A100 and on an H100: instructions in the PTX, and shared memory."""
    script = "from steps.step03_triton import fwd_0_fused as file\nx = torch.zeros(1, 1, 128, 64).bfloat16()\n"
    script += "for number in (80, 90):\n    arch(number)\n    file.forward.clear()\n    file.forward(x, x, x)"
    names = "mma.sync", "wgmma.mma_async", "cp.async.cg"
    for made in compiled(script):
        counts = ", ".join(f"{name} {made['ptx'].count(name)}" for name in names)
        print(f"sm_{made['arch']}: {counts}; {made['shared']:,} bytes of shared memory")


MISTAKES = {
    "masked only if causal": ("        if MASKED:", "        if MASKED and CAUSAL:"),
    "end at the top left": ("i + Br + Nk - Nq", "i + Br"),
    "key head h % Hk": ("h // group", "h % (H // group)"),
    "columns not masked": ("D, tile.shape[1]), other", "tile.shape[1], tile.shape[1]), other"),
    "offsets in 32 bits": (".to(tl.int64)", ""),
}
CASES = "ragged", "fewer_queries_causal", "more_queries_causal", "head_dim_odd", "grouped_heads"


def seen_by(kernel, ready):
    """Which of CASES a kernel fails, and which known mistake its results equal, in words; "lives" if it fails none."""
    rows = []
    for name, (x, want) in zip(CASES, ready, strict=True):
        try:
            out, lse = kernel.forward(*(t.to(engine.device) for t in (x.q, x.k, x.v)), **x.options)
        except IndexError:  # memcheck.py's
            return f"{name.replace('_', ' ')}: beside the tensor"
        rows.append((x, x.tile, {"out": out.cpu(), "lse": lse.cpu()}, want))
    failed = [name for name, (*_, got, want) in zip(CASES, rows, strict=True) if error.failures(got, want)]
    equal = mutants.diagnose(rows, step03.SUPPORTS["order"])
    how = f"as in {equal[0].name!r}" if equal else "wrong"
    return f"{', '.join(failed)}: {how}".replace("_", " ") if failed else "lives"


def mistakes_against_cases():
    """Prints mistakes that are planted in fwd_0_fused: which case of the contract sees each, as what, and its diff."""
    warnings.filterwarnings("ignore", message="All-NaN")  # numpy, where the interpreter meets the NaN we look for
    by_name = {case.name: case for case in cases.CASES}
    inputs = [cases.build(by_name[name], step03.SUPPORTS, torch.float32) for name in CASES]
    ready = [(x, x.expected()) for x in inputs]
    for mistake, change in ({"as it is": ("", "")} | MISTAKES).items():
        print(f"{mistake:22}", seen_by(planted("fwd_0_fused", "fwd_0_fused", *change), ready))
        if mistake in MISTAKES:
            print(diff("fwd_0_fused", *change))


RUNGS = {
    "forward": ("fwd_0_fused", "fwd_1_tma", "fwd_2_roles", "fwd_3_gluon"),
    "backward": ("bwd_0_fused", "bwd_1_tma", "bwd_2_gluon"),
}


def speeds(which):
    """TFLOP/s of the stage's kernels and of others on an H100 as bars. which: "forward" or "backward"."""
    names = *RUNGS[which], "sdpa-flash", "sdpa-cudnn", "fa4"
    panels = {}
    for mask in ("full", "causal"):
        found = of_one_run(*names, gpu=H100, pass_=names[0][:3], N=16384, causal=mask == "causal")
        panels[f"{which}, {mask}, D = 128, N = 16384"] = found
    if which == "backward":
        products = [row["tflops"] for row in fresh() if (row["peer"], row["gpu"]) == (rows.MATMUL, H100.name)]
        print(f"5/7 of a plain matrix product: {5 / 7 * statistics.median(products):.0f} TFLOP/s")
    words = "; ".join(f"{title}: " + ", ".join(f"{n} {x:.0f}" for n, x in of.items()) for title, of in panels.items())
    return speed_bars(panels, H100, f"Bars of TFLOP/s. {words}.")
