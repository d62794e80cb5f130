"""Stage 02's kernels as text, on the contract's cases, and with a mistake planted: what 02a, 02b and 02c try."""

import contextlib
import ctypes
import tempfile
import textwrap
from pathlib import Path

import torch

from reference import cases, error
from steps import checks, engine
from steps import step02_fa2_cuda as step02
from steps.step02_fa2_cuda import calls, emulator, ladder, works
from steps.workbook import edited


def emulated(text, kernel, tensors, *, grid, block, shared_bytes=0, **macros):
    """Compiles a text of CUDA C++ with g++ and runs one of its kernels on the CPU. tensors: or numbers."""
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    tensors = [kinds.get(type(x), lambda x: x)(x) for x in tensors]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cu"
        file.write_text(text)
        emulator.launch(file, kernel, tensors, grid=grid, block=block, shared_bytes=shared_bytes, macros=macros)


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
            return "stuck" if "stuck" in str(complaint) else "outside"


def killed(rung, mistakes, names, dtype=None, tile=None, orders=({"threads": "forward"}, {"threads": "reverse"})):
    """{(mistake, case): [a verdict for each of the orders]}."""
    ready, found = {name: prepared(name, rung, dtype, tile) for name in names}, {}
    for says, edit in mistakes.items():
        with mistake(rung, edit):
            found |= {(says, n): [verdict(*ready[n], rung, **order) for order in orders] for n in names}
    return found


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
