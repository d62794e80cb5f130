"""One result from those of several parts of the keys: where few queries see many keys, many programs share the keys.

Each part s has its own softmax: out_s is divided by its own sum, and lse_s is the logarithm of that sum. A part whose
keys are all hidden has out_s = 0 and lse_s = -inf.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from steps import engine
from steps.workbook.puzzles import Case, mistake


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


def _case(says, parts, spread=1.0, empty=(), rows=5, D=16):
    """lse_s is normal with the standard deviation `spread`; `empty` are (part, row) pairs without a key."""

    def inputs():
        generator = torch.Generator().manual_seed(parts)
        out_s, lse_s = torch.randn(parts, rows, D, generator=generator), torch.randn(parts, rows, generator=generator)
        lse_s *= spread
        for part, row in empty:
            out_s[part, row], lse_s[part, row] = 0, -torch.inf
        return dict(out_s=out_s, lse_s=lse_s)

    return Case(says, inputs)


CASES = [
    _case("two parts", 2),
    _case("seven parts, which are not a power of two", 7),
    _case("a single part: out and lse are its own", 1),
    _case("lse of several hundred: exp overflows float32 at 88", 4, spread=200.0),
    _case("parts without a key have no weight", 4, empty=[(0, 0), (1, 1), (3, 1), (0, 2), (1, 2), (2, 2)]),
    _case("a row without a key in any part: out is 0, lse is -inf", 2, empty=[(0, 3), (1, 3)]),
]


# The mistakes: other weights, or another lse.


def _merged(out_s, lse_s, guard=0.0, exp=torch.exp):
    """(out, l, lse, m): the merge in float32. `guard` is what is subtracted instead of a maximum of -inf."""
    m = lse_s.amax(0)
    w = exp(lse_s - m.where(m > -torch.inf, guard))
    l = w.sum(0)
    return (w[..., None] * out_s).sum(0) / l.where(l != 0, 1)[..., None], l, m + l.log(), m


@mistake("the parts are averaged instead of weighted, those that do not exist included")
def averaged(out_s, lse_s):
    return {"out": out_s.sum(0) / triton.next_power_of_2(len(out_s)), "lse": lse_s.logsumexp(0)}


@mistake("the parts are added without weights")
def added(out_s, lse_s):
    return {"out": out_s.sum(0), "lse": lse_s.logsumexp(0)}


@mistake("the weights are quotients of exp(lse), which overflows")
def weights_overflow(out_s, lse_s):
    w = lse_s.exp()
    l = w.sum(0)
    return {"out": (w[..., None] * out_s).sum(0) / l[..., None], "lse": l.log()}


@mistake("-inf - (-inf) or 0 / 0 is not guarded: a row without a key becomes NaN")
def no_guard(out_s, lse_s):
    out, _, lse, _ = _merged(out_s, lse_s, guard=-torch.inf)
    return {"out": out, "lse": lse}


@mistake("lse = -inf is replaced by 0, so that a part without a key has the weight of one whose sum is 1")
def minus_infinity_replaced(out_s, lse_s):
    exist = triton.next_power_of_2(len(out_s)) - len(out_s)
    lse_s = torch.cat([lse_s, lse_s.new_zeros(exist, lse_s.shape[1])])
    out, _, lse, _ = _merged(F.pad(out_s, (0, 0, 0, 0, 0, exist)), lse_s.where(lse_s > -torch.inf, 0))
    return {"out": out, "lse": lse}


@mistake("the weighted sum is not divided by the sum of the weights")
def not_normalised(out_s, lse_s):
    out, l, lse, _ = _merged(out_s, lse_s)
    return {"out": out * l[..., None], "lse": lse}


@mistake("the largest of the parts' lse is taken for that of all keys")
def maximum_for_lse(out_s, lse_s):
    out, _, _, m = _merged(out_s, lse_s)
    return {"out": out, "lse": m}


@mistake("lse leaves out the maximum")
def lse_without_maximum(out_s, lse_s):
    out, l, _, _ = _merged(out_s, lse_s)
    return {"out": out, "lse": l.log()}


@mistake("lse leaves out the maximum, and is 0 for a row without a key")
def lse_without_maximum_or_key(out_s, lse_s):
    out, l, _, _ = _merged(out_s, lse_s)
    return {"out": out, "lse": l.where(l != 0, 1).log()}


@mistake("the sum of the weights is not guarded: in a row without a key it is 0, and 0 / 0 is NaN")
def sum_not_guarded(out_s, lse_s):
    out, l, lse, _ = _merged(out_s, lse_s)
    return {"out": out.where(l[..., None] != 0, torch.nan), "lse": lse}


@mistake("the weights are powers of 2, but lse is a natural logarithm")
def powers_of_2(out_s, lse_s):
    out, _, lse, _ = _merged(out_s, lse_s, exp=torch.exp2)
    return {"out": out, "lse": lse}
