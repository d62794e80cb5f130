"""Stage 02's kernels as text, on the contract's cases, and with a mistake planted: what 02a, 02b and 02c try."""

import ctypes
import difflib
import tempfile
import textwrap
from pathlib import Path

import torch

from reference import cases, error
from steps import checks, engine
from steps import step02_fa2_cuda as step02
from steps.course.bench import cost, rows
from steps.course.figures.measured import H200 as GPU
from steps.course.figures.plots import who_sees
from steps.course.workbook import edited
from steps.step02_fa2_cuda import calls, emulator, ladder, launches, nvrtc


def emulated(text, kernel, tensors, *, grid, block, shared_bytes=0, **macros):
    """Compiles a text of CUDA C++ with g++ and runs one of its kernels on the CPU. tensors: or numbers."""
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(text)
        tensors = [kinds.get(type(x), lambda x: x)(x) for x in tensors]
        emulator.launch(file, kernel, tensors, grid=grid, block=block, shared_bytes=shared_bytes, macros=macros)


def launched(file, D):
    """(kernel, grid, threads of a block, shared memory, macros) of a file's main kernel on an H200, N = 4096."""
    sizes = dict(B=1, H=1, Hk=1, Nq=4096, Nk=4096, D=D, causal=False, processors=GPU.sms)
    sizes["dtype"] = torch.float32 if "scalar" in file else torch.bfloat16
    found = rows.geometry(file, shared_limit=GPU.multiprocessor.shared_per_block, **sizes)
    return next(launch for launch in found if launch[0] in ("attention_forward", "attention_backward"))


def compiled(file, D):
    """(Usage, cubin) of a file's main kernel on an H200. It needs no GPU."""
    kernel, *_, macros = launched(file, D)
    made = nvrtc.compile(launches.HERE / f"{file}.cu", macros, "sm_90a")
    return made.usage[kernel], made.cubin


def block(file, D):
    """What a block of a file's main kernel takes on an H200, and how many fit on an SM, in words."""
    (_, _, threads, shared, _), n = launched(file, D), compiled(file, D)[0].registers
    fit = cost.occupancy(GPU.capability, threads=threads, shared=shared, registers=n)
    fits = f"{fit.blocks} fit on an SM ({fit.limited_by})"
    return f"{threads} threads of {n} registers, {shared / 1024:.0f} KiB shared memory; {fits}"


def report(text, kernel, tensors, **launch):
    """Runs a text as `emulated` does; what the emulation complains of, as lines of a page, or ""."""
    try:
        emulated(text, kernel, tensors, **launch)
    except RuntimeError as complaint:
        return wrapped(complaint)
    return ""


def wrapped(complaint):
    """The lines of an error, none longer than a page is wide."""
    return "\n".join(textwrap.indent(textwrap.fill(line, 80), "    ") for line in str(complaint).split("\n"))


def prepared(name, rung, dtype=None, tile=None, device="cpu"):
    """A case of the contract for a rung: (its inputs, what is expected of them)."""
    limits = checks.supports_of(step02.SUPPORTS, rung) | ({"tiles": (tile,)} if tile else {})
    x = cases.build({case.name: case for case in cases.CASES}[name], limits, dtype or limits["dtypes"][0], device)
    return x, x.expected()


def outputs(x, rung):
    """{"out": ..., "lse": ...} of a rung on a case."""
    return dict(zip(("out", "lse"), calls.forward(x.q, x.k, x.v, rung=rung, **x.options), strict=True))


def on_cases(rung, names, dtype=None, results=outputs):
    """Prints how many of the contract's cases a rung gets wrong, on this machine's engine."""
    found = [(results(x, rung), want) for x, want in (prepared(n, rung, dtype, device=engine.device) for n in names)]
    wrong = sum(bool(error.failures(got, want)) for got, want in found)
    shares = [e / (want.tolerance[n] or 1) for got, want in found for n, e in error.errors(got, want).items()]
    print(f"{rung:8} {len(names)} cases, {wrong} wrong; largest error {max(shares):.2f} of its tolerance")


def verdict(x, want, rung, **schedule):
    """ "lives", "wrong", "stuck" or "outside": what becomes of a rung's forward on a case, in one order."""
    try:
        with emulator.schedule(**schedule):
            return "wrong" if error.failures(outputs(x, rung), want) else "lives"
    except RuntimeError as complaint:
        for sign, word in {"stuck": "stuck", "access to": "outside"}.items():
            if sign in str(complaint):
                return word
        raise


def killed(rung, mistakes, names, orders, tile=None):
    """{(mistake, case): [a verdict for each of the orders, which are arguments of `emulator.schedule`]}."""
    ready, found = {name: prepared(name, rung, tile=tile) for name in names}, {}
    for says, edit in mistakes.items():
        with edited(ladder.forward_row(rung).file, edit):
            found |= {(says, n): [verdict(*ready[n], rung, **order) for order in orders] for n in names}
    return found


def diffs(file, mistakes):
    """Mistakes as lines of a page: of each its name, the lines of the file that it removes (-) and adds (+).

    mistakes: {name: (old text, new text)}.
    """
    text = (launches.HERE / f"{file}.cu").read_text()
    return "\n".join(line for name, edit in mistakes.items() for line in [name, *changed_lines(text, *edit)])


def changed_lines(text, old, new, width=86):
    """The lines of a text that are removed (-) and added (+) if old becomes new, and those between them."""
    compared = difflib.ndiff(text.splitlines(), text.replace(old, new).splitlines())
    compared = [line for line in compared if line[0] != "?"]
    at = [n for n, line in enumerate(compared) if line[0] in "+-"]
    near = compared[at[0] : at[-1] + 1] if at[-1] - at[0] < 4 else [compared[n] for n in at]
    found = [f"  {line[0]} {' '.join(line[1:].split())}" for line in near]
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in found]


def seen_by(rung, mistakes, names, tile=None, harmless=(), **orders):
    """A table of mistakes in a rung's forward against cases; what only one of the orders shows is "if late"."""
    found = killed(rung, mistakes, names, orders.values() or [{}], tile)
    for at, verdicts in found.items():
        bad = {order: word for order, word in zip(orders or " ", verdicts, strict=True) if word != "lives"}
        found[at] = f"if {min(bad)}" if len(bad) == 1 < len(orders) else min(bad.values(), default="lives")
    return who_sees(found, "Mistakes against cases.", harmless)
