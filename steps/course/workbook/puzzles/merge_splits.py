"""One result from those of several parts of the keys: where few queries see many keys, many programs share the keys.

Each part s has its own softmax: out_s is divided by its own sum, and lse_s is the logarithm of that sum. A part whose
keys are all hidden has out_s = 0 and lse_s = -inf.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from steps import engine
from steps.course.workbook import differences
from steps.course.workbook.puzzles import Case


def specification(out_s, lse_s):
    """out (rows, D) and lse (rows,) over all keys, from out_s (parts, rows, D) and lse_s (parts, rows)."""
    lse = lse_s.double().logsumexp(0)
    w = (lse_s - lse).exp().where(lse_s > -torch.inf, 0)  # the share of each part in the sum over all keys
    return {"out": (w[..., None] * out_s).sum(0), "lse": lse}


@triton.jit
def merge_parts(out_s, lse_s):
    """(out (D,), lse) of one query over all keys, from out_s (parts, D) and lse_s (parts,) in float32.

    The number of parts is a power of two. Parts that do not exist have out_s = 0 and lse_s = -inf, like parts without
    a key. If no part has a key, out is 0 and lse is -inf.
    """
    m = tl.max(lse_s, 0)
    unit = tl.where(m == float("-inf"), 0.0, m)  # -inf - (-inf) would be NaN
    w = tl.exp(lse_s - unit)  # (parts,)
    l = tl.sum(w, 0)
    out = tl.sum(w[:, None] * out_s, 0) / tl.where(l == 0, 1.0, l)
    return out, m + tl.log(tl.where(l == 0, 1.0, l))


@triton.jit
def merge_kernel(out_s, lse_s, out, lse, parts, rows, D: tl.constexpr, PARTS: tl.constexpr):
    row, s, column = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, D)
    O = tl.load(out_s + (s[:, None] * rows + row) * D + column[None, :], mask=s[:, None] < parts, other=0.0)
    L = tl.load(lse_s + s * rows + row, mask=s < parts, other=float("-inf"))
    O, L = merge_parts(O, L)
    tl.store(out + row * D + column, O)
    tl.store(lse + row, L)


def run(out_s, lse_s):
    """{"out", "lse"} from a grid with a program for each row."""
    parts, rows, D = out_s.shape
    out_s, lse_s = out_s.to(engine.device), lse_s.to(engine.device)
    out, lse = torch.full_like(out_s[0], torch.nan), torch.full_like(lse_s[0], torch.nan)
    merge_kernel[(rows,)](out_s, lse_s, out, lse, parts, rows, D=D, PARTS=triton.next_power_of_2(parts))
    return {"out": out.cpu(), "lse": lse.cpu()}


def expected(out_s, lse_s):
    """A weight is off by an eps of float32 for each unit of the exponent that it comes from."""
    want = specification(out_s, lse_s)
    largest = lse_s[lse_s > -torch.inf].abs().max().item() if (lse_s > -torch.inf).any() else 0
    tolerance = 4 * (2 + largest) * torch.finfo(torch.float32).eps
    return {"out": (want["out"], tolerance * out_s.abs().max().item()), "lse": (want["lse"], tolerance)}


def _case(says, parts, spread=1.0, mean=0.0, empty=(), rows=5, D=16):
    """lse_s is normal with this mean and the standard deviation `spread`; `empty`: (part, row) pairs without a key."""

    def inputs():
        generator = torch.Generator().manual_seed(parts)
        out_s, lse_s = torch.randn(parts, rows, D, generator=generator), torch.randn(parts, rows, generator=generator)
        lse_s = mean + spread * lse_s
        for part, row in empty:
            out_s[part, row], lse_s[part, row] = 0, -torch.inf
        return dict(out_s=out_s, lse_s=lse_s)

    return Case(says, inputs)


CASES = [
    _case("two parts", 2),
    _case("seven parts, which are not a power of two", 7),
    _case("a single part: out and lse are its own", 1),
    _case("lse of several hundred: exp overflows float32 at 88", 4, spread=200.0),
    _case("lse far below 0", 3, mean=-2e4),
    _case("parts without a key have no weight", 4, empty=[(0, 0), (1, 1), (3, 1), (0, 2), (1, 2), (2, 2)]),
    _case("a row without a key in any part: out is 0, lse is -inf", 2, empty=[(0, 3), (1, 3)]),
]


def explain(got, want, out_s, lse_s):
    """Below what is wrong: the lse and the weights of the parts in the first wrong row, yours beside the right ones."""
    wrong = {name: differences.wrong(got[name], *want[name]).reshape(len(lse_s[0]), -1).any(1) for name in want}
    row = (wrong["out"] | wrong["lse"]).nonzero()[0].item()
    lse, right = want["lse"][0][row], (lse_s[:, row] - want["lse"][0][row]).exp().nan_to_num(0)
    lines = [
        f"  in row {row} the parts have lse_s = {_numbers(lse_s[:, row])}",
        f"    lse: yours {got['lse'][row]:.6g}, right {lse:.6g}",
        f"    weights: right {_numbers(right)}",
    ]
    if (yours := _weights(got["out"][row], out_s[:, row])) is None:
        lines[-1] += "; yours is no weighted sum of the parts"
    else:
        lines[-1] = f"    weights: yours {_numbers(yours)}; right {_numbers(right)}"
    return [*differences.of_tensors(got, want), *lines]


def _weights(out, out_s):
    """The weights of which out (D,) is the weighted sum of out_s (parts, D), or None if there are none."""
    if not out.isfinite().all():
        return None
    w = torch.linalg.lstsq(out_s.double().T, out.double()[:, None], driver="gelsd").solution[:, 0]
    return w if torch.allclose(w @ out_s.double(), out.double(), rtol=1e-4, atol=1e-5) else None


def _numbers(x):
    return ", ".join(f"{n:.5g}" for n in torch.where(x.abs() < 1e-9, 0, x).tolist())


# The mistakes: other weights, or another lse.


def mistaken(out_s, lse_s, answer):
    """What `run` returns where some of the names below are wrong: answer = {its name: function of those above it}."""
    x = SimpleNamespace(out_s=out_s, lse_s=lse_s, exist=triton.next_power_of_2(len(out_s)))
    rules = {
        "out_s": lambda x: x.out_s,
        "lse_s": lambda x: x.lse_s,
        "m": lambda x: x.lse_s.amax(0),
        "unit": lambda x: x.m.where(x.m > -torch.inf, 0),
        "w": lambda x: (x.lse_s - x.unit).exp(),
        "l": lambda x: x.w.sum(0),
        "divisor": lambda x: x.l.where(x.l != 0, 1),
        "out": lambda x: (x.w[..., None] * x.out_s).sum(0) / x.divisor[..., None],
        "lse": lambda x: x.m + x.l.log(),
    }
    for name, rule in (rules | answer).items():
        setattr(x, name, rule(x))
    return {"out": x.out, "lse": x.lse}


MISTAKES = {
    "averaged": (
        "the parts are averaged instead of weighted, those that do not exist included",
        dict(out=lambda x: x.out_s.sum(0) / x.exist)),
    "added": ("the parts are added without weights", dict(out=lambda x: x.out_s.sum(0))),
    "weights_overflow": (
        "the weights are quotients of exp(lse), which overflows",
        dict(unit=lambda x: 0, divisor=lambda x: x.l, lse=lambda x: x.l.log())),
    "no_guard": (
        "-inf - (-inf) or 0 / 0 is not guarded: a row without a key becomes NaN", dict(unit=lambda x: x.m)),
    "minus_infinity_replaced": (
        "lse = -inf is replaced by 0, so that a part without a key has the weight of one whose sum is 1",
        dict(out_s=lambda x: F.pad(x.out_s, (0, 0, 0, 0, 0, x.exist - len(x.out_s))),
             lse_s=lambda x: F.pad(x.lse_s.where(x.lse_s > -torch.inf, 0), (0, 0, 0, x.exist - len(x.lse_s))))),
    "not_normalised": (
        "the weighted sum is not divided by the sum of the weights", dict(divisor=lambda x: torch.ones_like(x.l))),
    "maximum_for_lse": ("the largest of the parts' lse is taken for that of all keys", dict(lse=lambda x: x.m)),
    "lse_without_maximum": ("lse leaves out the maximum", dict(lse=lambda x: x.l.log())),
    "lse_without_maximum_or_key": (
        "lse leaves out the maximum, and is 0 for a row without a key", dict(lse=lambda x: x.divisor.log())),
    "sum_not_guarded": (
        "the sum of the weights is not guarded: in a row without a key it is 0, and 0 / 0 is NaN",
        dict(divisor=lambda x: x.l)),
    "powers_of_2": (
        "the weights are powers of 2, but lse is a natural logarithm", dict(w=lambda x: (x.lse_s - x.unit).exp2())),
}  # fmt: skip
