"""Stage 02's kernels as text, on the contract's cases, and with a mistake planted: what 02a, 02b and 02c try."""

import contextlib
import ctypes
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from reference import cases, error
from steps import checks, engine
from steps import step02_fa2_cuda as step02
from steps.bench import cost, rows
from steps.figures.picture import picture
from steps.figures.plots import FAINT, SEEN, UNSEEN, ink_on, style
from steps.step02_fa2_cuda import calls, emulator, ladder, nvrtc, works
from steps.workbook import edited

GPU = cost.GPUS["NVIDIA H200"]
MAIN = ("attention_forward", "attention_backward")


def emulated(text, kernel, tensors, *, grid, block, shared_bytes=0, **macros):
    """Compiles a text of CUDA C++ with g++ and runs one of its kernels on the CPU. tensors: or numbers."""
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    tensors = [kinds.get(type(x), lambda x: x)(x) for x in tensors]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(text)
        emulator.launch(file, kernel, tensors, grid=grid, block=block, shared_bytes=shared_bytes, macros=macros)


def compiled(file, D, arch="sm_90a", **sizes):
    """(threads of a block, its shared memory, Usage, cubin) of a file's main kernel on an H200."""
    dtype = torch.float32 if "scalar" in file else torch.bfloat16
    sizes = dict(B=1, H=1, Hk=1, Nq=4096, Nk=4096, D=D, causal=False, dtype=dtype, processors=GPU.sms) | sizes
    found = rows.geometry(file, shared_limit=GPU.multiprocessor.shared_per_block, **sizes)
    ((kernel, _, threads, shared, macros),) = (launch for launch in found if launch[0] in MAIN)
    made = nvrtc.compile(works.HERE / f"{file}.cu", macros, arch)  # needs no GPU
    return threads, shared, made.usage[kernel], made.cubin


def block(file, D, **sizes):
    """What a block of a file's main kernel takes on an H200, and how many fit on a multiprocessor, in words."""
    threads, shared, used, _ = compiled(file, D, **sizes)
    fit = cost.occupancy(GPU.capability, threads=threads, shared=shared, registers=used.registers)
    says = f"{threads} threads of {used.registers} registers, {shared / 1024:.0f} KiB"
    return f"{says}; {fit.blocks} fit on a multiprocessor ({fit.limited_by})"


def behind(file, text):
    """A kernel of one's own behind the text of a kernel file, whose functions it may call."""
    return (works.HERE / f"{file}.cu").read_text() + text


def report(text, kernel, tensors, **launch):
    """Runs a text as `emulated` does; what the emulation complains of, as lines of a page, or ""."""
    try:
        emulated(text, kernel, tensors, **launch)
    except RuntimeError as complaint:
        return wrapped(complaint)
    return ""


def wrapped(complaint):
    """The lines of an error, none longer than a page is wide."""
    wrap = textwrap.TextWrapper(84, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(wrap.fill(line) for line in str(complaint).split("\n"))


def prepared(name, rung, dtype=None, tile=None, device="cpu"):
    """A case of the contract for a rung: (its inputs, what is expected of them)."""
    limits = checks.supports_of(step02.SUPPORTS, rung)
    limits |= {"tiles": (tile,)} if tile else {}
    (case,) = (case for case in cases.CASES if case.name == name)
    x = cases.build(case, limits, dtype or limits["dtypes"][0], device)
    return x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


def outputs(x, rung):
    """{"out": ..., "lse": ...} of a rung on a case."""
    return dict(zip(("out", "lse"), calls.forward(x.q, x.k, x.v, rung=rung, **x.options), strict=True))


def on_cases(rung, names, dtype=None):
    """Prints how many of the contract's cases a rung's forward gets wrong, on this machine's engine."""
    found = [(outputs(x, rung), want) for x, want in (prepared(n, rung, dtype, device=engine.device) for n in names)]
    wrong = sum(bool(error.failures(got, want)) for got, want in found)
    shares = [e / (want.tolerance[n] or 1) for got, want in found for n, e in error.errors(got, want).items()]
    print(f"{rung:8} {len(names)} cases, {wrong} wrong; largest error {max(shares):.2f} of its tolerance")


@contextlib.contextmanager
def mistake(rung, *edits):
    """Inside `with`, a rung's forward is compiled with these edits; gives the lines of its file."""
    with edited(ladder.forward_row(rung).file, *edits) as lines:
        yield lines


def verdict(x, want, rung, **schedule):
    """ "lives", "wrong", "stuck" or "outside": what becomes of a rung's forward on a case, in one order."""
    with emulator.schedule(**schedule):
        try:
            return "wrong" if error.failures(outputs(x, rung), want) else "lives"
        except RuntimeError as complaint:
            if "stuck" not in str(complaint) and "access to" not in str(complaint):
                raise
            return "stuck" if "stuck" in str(complaint) else "outside"


def killed(rung, mistakes, names, orders, dtype=None, tile=None):
    """{(mistake, case): [a verdict for each of the orders, which are arguments of `emulator.schedule`]}."""
    ready, found = {name: prepared(name, rung, dtype, tile) for name in names}, {}
    for says, edit in mistakes.items():
        with mistake(rung, edit):
            found |= {(says, n): [verdict(*ready[n], rung, **order) for order in orders] for n in names}
    return found


def seen_by(rung, mistakes, names, dtype=None, tile=None, harmless=(), **orders):
    """A table of mistakes in a rung's forward against cases: by which case each is seen, and in which of the orders.

    orders: names of schedules, such as late={"copies": "late"}. A mistake that only one of them shows says so. A
    mistake that is never seen is orange, unless it is among the harmless.
    """
    style()
    found = killed(rung, mistakes, names, orders.values(), dtype, tile)
    found = {at: in_words(verdicts, orders) for at, verdicts in found.items()}
    fig, ax = plt.subplots(figsize=(8.4, 3), layout="constrained")
    for y, says in enumerate(mistakes):
        everywhere = all(found[says, name] == "lives" for name in names) and says not in harmless
        for x, name in enumerate(names):
            word = found[says, name]
            colour = SEEN if word != "lives" else UNSEEN if everywhere else FAINT
            ax.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
            ax.text(x + 0.5, y + 0.5, word, fontsize=9, ha="center", va="center", color=ink_on(colour))
    ax.set(xlim=(0, len(names)), ylim=(len(mistakes), 0))
    ax.set_xticks([x + 0.5 for x in range(len(names))], [name.replace("_", "\n") for name in names], fontsize=9)
    ax.set_yticks([y + 0.5 for y in range(len(mistakes))], mistakes, fontsize=9)
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    seen = {says: [name for name in names if found[says, name] != "lives"] for says in mistakes}
    told = "; ".join(f"{says}: {', '.join(by) or 'in none'}" for says, by in seen.items())
    return picture(fig, f"Mistakes against cases; green is seen, orange never seen. Seen in: {told}.")


def in_words(verdicts, orders):
    """The verdicts of late and eager copies, ["lives", "wrong"], are "if eager"; else the first that is bad, if any."""
    bad = [order for order, word in zip(orders, verdicts, strict=True) if word != "lives"]
    if len(bad) == 1 and "wrong" in verdicts and "late" in orders:
        return f"if {bad[0]}"
    return next((word for word in verdicts if word != "lives"), "lives")
