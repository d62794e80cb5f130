"""The first call in which an answer differs from the stage's own function: what was given, what came, what is right.

This needs no list of mistakes. A wrong case is run once more. In each call the stage's own function gets copies of the
arguments of the reader's function, until the two differ by more than a rounding. In Numba's simulator a block then has
one thread, because the stage's own function would otherwise have to run in the midst of others; if all is right there,
the threads share their work out wrongly.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steps.course.workbook import differences


@dataclass(frozen=True)
class Watched:
    """What is compared in the calls of an exercise's function.

    names: of what it returns, or with `writes` of the arguments that it writes to. exists(name, x, before) is x without
    the entries that no result shows; before: the arguments before the call. call: what a call is one for.
    """

    names: tuple
    writes: bool = False
    exists: Callable = lambda name, x, before: x
    call: str = ""


def _rows_of_the_tile(name, x, before):
    """l and m are those of all heads and queries, S has rows beyond the last query, and all have spare columns."""
    i, head = int(before["i"]), int(before["head"])
    rows = min(before["S"].shape[0], before["l"].shape[1] - i)
    return x[head, i : i + rows] if name in ("l", "m") else _real_columns(name, x[:rows], before)


def _real_columns(name, x, before):
    return x[:, : int(before["Bc"])] if name in ("S", "dS") else x


def _alpha_of_a_sum(name, x, before):
    """Before the first key alpha multiplies 0."""
    return torch.where(before["m"].isneginf(), 0, x) if name == "alpha" else _real_columns(name, x, before)


def _real_queries(name, x, before):
    return x[: max(0, int(before["Nq"]) - int(before["i"]))]


def _real_entries(name, x, before):
    return torch.where((before["query"] < before["Nq"]) & (before["key"] < before["Nk"]), x, 0)


WATCHED = {
    "00.1": Watched(("P", "lse")),
    "00.2": Watched(("m", "l", "O"), call="key"),
    "00.3": Watched(("S",)),
    "00.4": Watched(("P", "dS")),
    "01.1": Watched(("S", "old", "new", "l", "m"), writes=True, exists=_rows_of_the_tile),
    "01.2": Watched(("S", "alpha", "l", "m"), writes=True, exists=_alpha_of_a_sum),
    "01.3": Watched(("dS",), writes=True, exists=_real_columns),
    "03.1": Watched(("S",), exists=_real_queries),
    "03.2": Watched(("P", "dS"), exists=_real_entries),
    "03.3": Watched(("m", "l", "O")),
    "04.1": Watched(("out", "lse"), writes=True),
}
# The arguments that say where a call is.
PLACES = "head", "rows", "keys", "query", "key", "i", "j", "shift", "Nq", "Nk"
ONE_THREAD = [
    "With one thread a block it is right: some row is computed twice or by nobody,",
    "or a thread reads what another thread has still to write.",
]


@dataclass
class Call:
    """One call. before, yours, right: {name: tensor}, in which rows that do not exist are left out.

    each: what a call is one for, "" if nothing in particular. where: such as ", at i = 8, j = 0".
    """

    each: str
    number: int
    where: str
    before: dict
    yours: dict
    right: dict


def explain(job, says, run, right):
    """The lines about the first call that differs in a case; [] if none does.

    says: the case, in the words of its report. run() runs the case and returns {name: tensor}; right(results) says
    whether they are.
    """
    watch = _watch(job)
    if watch is None:
        return []
    with watch.watching():
        try:
            results = run()
        except Exception:  # Found, or a consequence of what the function returned, which the report tells anyway.
            results = None
    if watch.structure:
        return [f"{watch.name} {watch.structure}."]
    if watch.call:
        return _told(watch.call, says)
    if results and watch.of_threads and right(results):
        return ONE_THREAD
    if watch.changed and results:
        names = ", ".join(watch.changed)
        return [f"Each call returns what is right, but changes {names}, which later calls get again."]
    return []


def structure(job, run):
    """What the function returned, if it is of another kind than it has to be; otherwise "". run() runs a case."""
    watch = _watch(job)
    if watch is None:
        return ""
    with watch.watching():
        try:
            run()
        except Exception:
            pass
    return watch.structure


def _watch(job):
    """The watch over the function's calls, or None where it is not called from Python."""
    return _Watch(job) if job["id"] in WATCHED else None


class _Found(Exception):
    """Ends a run as soon as something has been found."""


class _Watch:
    """Compares the calls of a function with those of the stage's own."""

    def __init__(self, job):
        self.of, self.module = WATCHED[job["id"]], importlib.import_module(job["module"])
        self.name, self.number = job["function"], 0
        self.call, self.structure, self.changed = None, "", []
        self.theirs, self.own = getattr(self.module, self.name), getattr(_original(job), self.name)
        self.of_threads = hasattr(self.module, "THREADS")

    @contextmanager
    def watching(self):
        """Inside `with` every module calls the watched function, and a block has one thread."""
        before = []
        for module in [m for key, m in sys.modules.items() if key.startswith("steps.")]:
            for key, value in list(vars(module).items()):
                if value is self.theirs:
                    before.append((module, key, value))
                    setattr(module, key, self)
        if self.of_threads:
            before.append((self.module, "THREADS", self.module.THREADS))
            self.module.THREADS = (1, 1)
        try:
            yield
        finally:
            for module, key, value in before:
                setattr(module, key, value)

    def __call__(self, *args, **options):
        self.number += 1
        names = inspect.signature(getattr(self.own, "fn", self.own)).parameters
        arguments = dict(zip(names, args, strict=False)) | options
        before = {name: _tensor(x) for name, x in arguments.items()}
        copies = {name: _copy(x) for name, x in arguments.items()}
        right = self.own(*list(copies.values())[: len(args)], **{name: copies[name] for name in options})
        yours = self.theirs(*args, **options)
        self._compare(arguments, before, copies, yours, right)
        return yours

    def _compare(self, arguments, before, copies, yours, right):
        after, own = ({name: _tensor(x) for name, x in them.items()} for them in (arguments, copies))
        names, written = self.of.names, self.of.names if self.of.writes else ()
        changed = [name for name, x in before.items() if x is not None and not _equal(x, after[name])]
        self.changed += [name for name in changed if name not in (*self.changed, *written)]
        if not written:
            wanted = right if isinstance(right, tuple | list) else (right,)
            came = yours if isinstance(yours, tuple | list) else (yours,)
            if _structure(came) != _structure(wanted):
                self.structure = f"returned {_kinds(came)}; expected {_kinds(wanted)}"
                raise _Found
            after, own = ({n: _tensor(x) for n, x in zip(names, them, strict=True)} for them in (came, wanted))
        call = Call(self.of.call, self.number, _where(arguments), *self._existing(before, after, own))
        if any(_wrong(call.yours[name], call.right[name]).any() for name in call.right):
            self.call = call
            raise _Found

    def _existing(self, before, yours, right):
        """(before, yours, right) as {name: tensor}, without the entries that no result shows."""
        for them in (before, yours, right):
            given = {name: them[name] for name in self.of.names if them.get(name) is not None}
            yield {name: self.of.exists(name, x, before) for name, x in given.items()}


def _original(job):
    """The stage's file as it is without the answer, as a module of its own."""
    path = Path(job["folder"]) / f"own_{Path(job['file']).name}"
    path.write_text(job["original"])
    name = f"{job['module'].rpartition('.')[0]}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Numbers of torch, of Numba's simulator and of Triton's interpreter, as tensors.


def _tensor(x):
    """x as a tensor of its own in float64 or of whole numbers; None if it is no number and no array."""
    array = _array(x)
    if array is None:
        return None
    x = torch.from_numpy(np.array(array))
    return x.double() if x.is_floating_point() else x


def _array(x):
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    if hasattr(x, "_item"):  # an argument of a kernel in Numba's simulator
        return x._item._ary
    if hasattr(x, "handle"):  # a tile in Triton's interpreter
        data = getattr(x.handle, "data", None)
        return data if isinstance(data, np.ndarray) and data.dtype.kind in "fiub" else None
    return x if isinstance(x, np.ndarray | np.number | int | float) and not isinstance(x, bool) else None


def _copy(x):
    if isinstance(x, torch.Tensor):
        return x.clone()
    return np.array(_array(x)) if isinstance(x, np.ndarray) or hasattr(x, "_item") else x


def is_changed(before, copy, given):
    """Whether an argument is another one after the reader's call, and not after that of the stage's own function."""
    x, own, yours = map(_tensor, (before, copy, given))
    return x is not None and _equal(x, own) and not _equal(x, yours)


def is_same(x, y):
    """Whether two tensors hold the same numbers; NaN equals NaN."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def _equal(x, y):
    return torch.equal(x.nan_to_num(7e77) if x.is_floating_point() else x,
                       y.nan_to_num(7e77) if y.is_floating_point() else y)  # fmt: skip


def _structure(values):
    """What two results have in common that differ by their numbers alone."""
    tensors = [_tensor(x) for x in values]
    return [None if x is None else (tuple(x.squeeze().shape), x.is_floating_point()) for x in tensors]


def _kinds(values):
    """Such as "a tile (16, 16) of float32"."""
    found = []
    for x in values:
        array = _array(x)
        kind = "None" if x is None else type(x).__name__
        if array is not None:
            shape = tuple(np.shape(array))
            kind = f"{'a tile' if hasattr(x, 'handle') else 'a tensor'} {shape} of {np.asarray(array).dtype}"
        found.append(kind)
    return found[0] if len(found) == 1 else f"({', '.join(found)})"


def _wrong(got, want):
    """Where two tensors differ by more than roundings do. NaN equals NaN."""
    got, want = got.double(), want.double()
    size = want.abs().nan_to_num(posinf=0.0, neginf=0.0)
    largest = size.amax(-1, keepdim=True) if size.ndim and size.numel() else size
    near = (got - want).abs() <= 1e-3 * size + 1e-5 * largest
    return ~(near | (got == want) | got.isnan() & want.isnan())


# How a call is shown.


def _told(call, says):
    """The lines about a call that differs."""
    wrong = [name for name in call.right if _wrong(call.yours[name], call.right[name]).any()]
    fine = [name for name in call.right if name not in wrong]
    place = tuple(_wrong(call.yours[wrong[0]], call.right[wrong[0]]).nonzero()[0].tolist())
    where = f"after {call.each} {call.number}" if call.each else f"in call {call.number}{call.where}"
    lines = [f"Your function first differs from the right one {where}", f"(in the case: {says}):"]
    if [*call.right] == ["S"] or _is_of_the_mask(call):
        return lines + _dots(call, wrong[0], place) + _entries(call, wrong[:1])
    if {"P", "lse"} <= {*call.right} and "P" in wrong and (row := _sum_of_a_row(call)):
        return [*lines, row, *_entries(call, wrong[:1])]
    if {"m", "l"} <= {*call.right}:
        return lines + _table(call, wrong, place)
    if fine:
        lines.append(f"  {' and '.join(fine)} {'is' if len(fine) == 1 else 'are'} right, {wrong[0]} is not")
    return lines + _entries(call, wrong[:1])


def of_P(call):
    """The lines about P of one head, the only thing that a call returns; [] if it is right."""
    wrong = _wrong(call.yours["P"], call.right["P"])
    if not wrong.any():
        return []
    seen = [{"P": (them["P"] > 1e-30).double()} for them in (call.yours, call.right)]
    if places := (seen[0]["P"] != seen[1]["P"]).nonzero().tolist():
        return _dots(Call("", 1, "", {}, *seen), "P", tuple(places[0])) + _entries(call, ["P"])
    return [row for row in [_sum_of_a_row(call)] if row] + _entries(call, ["P"])


def _where(arguments):
    """Such as ", at i = 8, j = 0", from the arguments that say where a call is."""
    shown = []
    for name in PLACES:
        x = arguments.get(name)
        numbers = torch.arange(x.start, x.stop) if isinstance(x, slice) else _tensor(x)
        if numbers is not None and numbers.numel():
            first, last = int(numbers.min()), int(numbers.max())
            shown.append(f"{name} = {first}" + (f" to {last}" if numbers.numel() > 1 else ""))
    return f", at {', '.join(shown)}" if shown else ""


def _entries(call, names):
    lines = []
    for name in names:
        got, want = call.yours[name], call.right[name]
        if (says := differences.relation(got, want, 1e-3 * want[want.isfinite()].abs().amax())) if len(want) else "":
            lines.append(f"  every entry of {name} {says}")
        first = tuple(_wrong(got, want).nonzero()[0].tolist())
        lines.append(differences.entry(name, first, got[first], want[first]).replace("first such entry: ", ""))
    return lines


def _is_of_the_mask(call):
    """Whether P is 0 where it should not be, or the reverse, and is otherwise right."""
    if "P" not in call.right or "lse" in call.right:
        return False
    yours, right = call.yours["P"], call.right["P"]
    wrong = _wrong(yours, right)
    return bool(wrong.any()) and bool(((yours == 0) != (right == 0))[wrong].all())


def _dots(call, name, place, most=8):
    """The tile's mask, yours beside the right one: at most 8 x 8 of it, around the first entry that differs."""
    yours, right = (x[name][place[:-2]] for x in (call.yours, call.right))
    given = call.before[name][place[:-2]] if name == "S" else torch.where(yours == 0, right, yours)
    rows, columns = (slice(first := max(0, min(at - most // 2, n - most)), first + min(n, most))
                     for at, n in zip(place[-2:], right.shape[-2:], strict=True))  # fmt: skip
    pictures = []
    for tile in (yours, right):
        hidden = tile == (-torch.inf if name == "S" else 0)
        marks = torch.where(hidden, 1, torch.where(tile == given[: len(tile)], 0, 2))[rows, columns]
        pictures.append(["".join("#.o"[mark] for mark in row) for row in marks.tolist()])
    other = ", o another number" if "o" in "".join(sum(pictures, [])) else ""
    cut = f"rows {rows.start} to {rows.stop - 1}, columns {columns.start} to {columns.stop - 1} of the tile: "
    width = max(len("yours"), len(pictures[0][0]))
    shown = [f"    {a:{width}}   {b}" for a, b in [("yours", "right"), *zip(*pictures, strict=True)]]
    return [f"  {cut}# seen, . hidden{other}", *shown]


def _sum_of_a_row(call):
    """The line about the first row of P that does not add up to what it has to, or ""."""
    sums, right = call.yours["P"].sum(-1), call.right["P"].sum(-1)
    for place in ((sums - right).abs() > 1e-3).nonzero().tolist()[:1]:
        row = tuple(place)
        return f"  row {row[-1]} of your P adds up to {sums[row]:.4g}, not {right[row]:.4g}"
    return ""


def _table(call, wrong, place):
    """m, l and what else the call changes in one row: before the call, yours, and what is right."""
    depth = call.right["l"].ndim
    row = place[:depth]
    columns = {}
    for name, x in call.right.items():
        places = _wrong(call.yours[name], x)[row].nonzero()
        rest = tuple(places[0].tolist()) if len(places) and x.ndim > depth else (0,) * (x.ndim - depth)
        index = row + rest
        label = f"{name}[{', '.join(map(str, index))}]" + (", now P" if name == "S" else "")
        columns[label] = [them[name][index] if name in them else None for them in (call.before, call.yours, call.right)]
    width = max(12, *map(len, columns)) + 2
    lines = [" " * 10 + "".join(f"{label:>{width}}" for label in columns)]
    for number, what in enumerate(("before", "yours", "right")):
        values = ("" if x[number] is None else f"{x[number]:.6g}" for x in columns.values())
        lines.append(f"  {what:8}" + "".join(f"{x:>{width}}" for x in values))
    return lines
