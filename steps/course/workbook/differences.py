"""Where a result is wrong, and how: the lines of text below a case that fails."""

from itertools import combinations

import torch

from reference import error

WIDTH = 64  # characters of a strip, at most
ROWS = {"out": "queries", "lse": "queries", "dq": "queries", "dk": "keys", "dv": "keys"}
MASKED = {
    "out": "a query that sees no key has out = 0",
    "lse": "a query that sees no key has lse = -inf",
    "dq": "a query that sees no key has dq = 0",
    "dk": "a key that no query sees has dk = 0",
    "dv": "a key that no query sees has dv = 0",
}


def lines(got, want):
    """The lines about all results in `got` that are out of tolerance; [] if none is.

    got: {name: tensor}. want: error.Expected. If out or lse is wrong, the gradients are left out: they are computed
    from these, and wrong with them.
    """
    failures = error.failures(got, want)
    names = [name for name in failures if name in ("out", "lse")] or list(failures)
    return [line for name in names for line in _about(name, got[name], want, *failures[name])]


def of_tensors(got, want):
    """The lines about results of any shape. got: {name: tensor}. want: {name: (tensor, tolerance)}; 0 is exact."""
    found = []
    for name, (ref, tolerance) in want.items():
        is_wrong = wrong(got[name], ref, tolerance)
        if is_wrong.any():
            first = tuple(is_wrong.nonzero()[0].tolist())
            says = f"{name} is wrong in {is_wrong.sum()} of {is_wrong.numel()} entries"
            found += [says, entry(name, first, got[name][first], ref[first])]
            if tolerance and (says := relation(got[name], ref, tolerance)):
                found.append(f"  every entry of {name} {says}")
                continue
            by_place = is_wrong.reshape(-1, *is_wrong.shape[-2:]).any(0)
            found += [_strip("rows", by_place.any(1)), _strip("columns", by_place.any(0))] if is_wrong.ndim > 1 else []
    return found


def wrong(got, ref, tolerance):
    """Where a result is out of tolerance."""
    got, ref = got.double(), ref.double()
    return (got != ref) & ~((got - ref).abs() <= tolerance)


def entry(name, place, x, ref):
    """The line about one entry, with as many digits as tell the two numbers apart, at least 6."""
    pairs = ((f"{x:.{n}g}", f"{ref:.{n}g}") if x.is_floating_point() else (x.item(), ref.item()) for n in range(6, 18))
    yours, right = next((pair for pair in pairs if pair[0] != pair[1]), (x.item(), ref.item()))
    return f"  first such entry: {name}[{', '.join(map(str, place))}] is {yours}, expected {right}"


def _about(name, got, want, distance, tolerance):
    ref, exact = want.value[name], want.exact[name]
    if got.shape != ref.shape:
        exchanged = _exchanged(got.double(), ref, tolerance)
        return [f"{name} has the shape {tuple(got.shape)}; expected {tuple(ref.shape)}{exchanged and ': '}{exchanged}"]
    got = got.double()
    wrong = torch.where(exact, got != ref, ~((got - ref).abs() <= tolerance))
    kinds = (
        (got.isnan(), "is NaN in {}"),
        (got.isinf() & wrong, "is infinite in {} where it must not be"),
        (exact & wrong, f"should have been masked in {{}}: {MASKED[name]}"),
        (wrong, f"is off by {distance:.1e} (tolerance {tolerance:.0e})"),
    )
    kind, says = next((kind, says) for kind, says in kinds if kind.any())
    sentence = f"{name} {says.format(f'{kind.sum()} of {got.numel()} entries')}"
    first = tuple(kind.nonzero()[0].tolist())
    shown = [sentence, entry(name, first, got[first], ref[first])]
    if says := relation(got, ref, tolerance):
        return [*shown, f"  every entry of {name} {says}"]
    if says := _exchanged(got, ref, tolerance):
        return [*shown, f"  {says}"]
    return shown + _strips(name, wrong)


def relation(got, ref, tolerance):
    """How every entry of a wrong result follows from the right one, such as "is 0.255 times the right one", or "".

    Where the right entry is infinite or NaN, yours has to be the same.
    """
    got, ref, finite = got.double(), ref.double(), ref.isfinite()
    if got.shape != ref.shape or not torch.equal(got[~finite].nan_to_num(), ref[~finite].nan_to_num()):
        return ""
    x, y = got[finite], ref[finite]
    if len(y) < 2 or not x.isfinite().all() or not y.abs().max() > 20 * tolerance:
        return ""  # Of so few or so small numbers anything could be said.
    factor = ((x * y).sum() / (y * y).sum()).item()
    if ((x - factor * y).abs() <= tolerance * max(1.0, abs(factor))).all():
        if abs(factor) * y.abs().max() <= tolerance:
            return "is 0"
        if abs(factor + 1) < 1e-3:
            return "has the other sign"
        return f"is {factor:.3g} times the right one" if abs(factor - 1) > 5e-3 else ""
    more = (x - y).mean().item()
    if ((x - y - more).abs() <= tolerance).all() and y.max() - y.min() > 20 * tolerance:
        return f"is the right one {'+' if more > 0 else '-'} {abs(more):.4g}"
    return ""


def _exchanged(got, ref, tolerance):
    """A sentence if the numbers are right, but two dimensions are exchanged, otherwise ""."""
    for a, b in combinations(range(ref.ndim), 2):
        turned, right = ref.transpose(a, b), f"right but for two dimensions, {a} and {b}, which are exchanged"
        for view, says in ((turned, right), (turned.reshape(ref.shape), f"{right} in memory")):
            if got.shape == view.shape and min(ref.shape[a], ref.shape[b]) > 1:
                if not wrong(got, view, tolerance).any():
                    return says
    return ""


def _strips(name, wrong):
    """The wrong heads, rows and columns as strips of text. wrong: bool (B, H, N, D), for lse (B, H, N)."""
    by_head, by_row = wrong.flatten(2).any(-1), wrong.any(1).any(0)
    strips = [_strip("heads", by_head.any(0))] if not by_head.all() else []
    if name == "lse":
        return [*strips, _strip(ROWS[name], by_row)]
    return [*strips, _strip(ROWS[name], by_row.any(1)), _strip("columns", by_row.any(0))]


def _strip(what, wrong):
    """A line with a character for each entry of wrong (n,), or for several that follow each other: x wrong, . right."""
    each = -(-len(wrong) // WIDTH)
    marks = "".join("x" if part.any() else "." for part in wrong.split(each))
    scale = f", {each} a character" if each > 1 else ""
    return f"  {f'{what} 0 to {len(wrong) - 1}{scale}':27} {marks}"
