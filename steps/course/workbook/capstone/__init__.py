"""The capstone: the forward from an empty file, in four steps. Each step adds cases to those of the steps before it.

The reader's file is run in place of a step's solution, step_1.py to step_4.py beside this file.
"""

import math

import torch
from torch.overrides import TorchFunctionMode

from reference import cases, error, mutants
from reference.attention import scores
from reference.cases import Case
from steps.course.workbook import differences
from steps.course.workbook.first_difference import Call, of_P

T = 32  # The tile that the steps ask for. A mistake is only named for tiles of T x T.
SUPPORTS = {"tiles": ((T, T),), "head_dims": (32, 64)}


def _case(name, says, Nq=T, Nk=None, H=1, **more):
    """A case of Nq queries and Nk keys, by default as many as queries."""
    return Case(name, says, Nq=lambda T: Nq, Nk=None if Nk is None else lambda T: Nk, H=H, **more)


STEPS = {
    1: [
        _case("one_head", "one head of 32 tokens"),
        _case("more_heads", "two batch entries with three heads each", B=2, H=3),
        _case("head_dim_64", "head_dim 64", D=64),
        _case("explicit_scale", "a scale other than 1/sqrt(D)", scale=0.3),
        _case("scores_200", "stable at scores of +-200", values=cases._scores_200),
    ],
    2: [
        _case("more_keys", "three tiles of keys", Nk=3 * T),
        _case("more_queries", "three tiles of queries", Nq=3 * T, Nk=T, H=2),
        _case("more_of_both", "several tiles of both, batch entries and heads", Nq=2 * T, Nk=3 * T, B=2, H=2),
        _case("rising", "scores that rise by 200 along the keys", Nk=3 * T, values=cases._ramp(1)),
        _case("falling", "scores that fall by 200 along the keys", Nk=3 * T, values=cases._ramp(-1)),
        _case("negative_row", "a row whose scores are all very negative", values=cases._negative_row),
    ],
    3: [
        _case("ragged", "N is not a multiple of the tile", Nq=T + 5, Nk=2 * T + 3, H=2),
        _case("one_key", "a single key: out is v", Nq=T + 5, Nk=1),
        _case("one_token", "N = 1", Nq=1),
        _case("head_dim_40", "head_dim 40, which is no power of two", H=2, D=40),
        _case("head_dim_8", "head_dim 8, less than the 16 that tl.dot takes", H=2, D=8),
        _case("heads_inside", "q, k and v as (B, N, H, D) transposed", B=2, H=3, place="heads inside"),
        _case("expanded", "k and v expanded over the heads (stride 0)", H=3, place="expanded"),
        _case("own_layouts", "q, k and v each with strides of their own", Nq=T + 5, B=2, H=2, place="own layouts"),
    ],
    4: [
        _case("causal", "causal, N is not a multiple of the tile", Nq=2 * T + 5, B=2, H=2, causal=True),
        _case("fewer_queries_causal", "causal with fewer queries than keys: aligned at the bottom right",
              Nq=T + 5, Nk=3 * T + 3, H=2, causal=True),
        _case("more_queries_causal", "causal with more queries than keys: the first rows see no key",
              Nq=3 * T + 3, Nk=T + 5, H=2, causal=True),
        _case("not_causal", "not causal", Nq=T + 5, Nk=2 * T + 3, H=2),
        _case("explicit_scale_causal", "causal, a scale other than 1/sqrt(D)", Nq=T + 5, scale=0.3, causal=True),
        _case("no_key", "no key at all: out is 0, lse is -inf", Nq=T + 5, Nk=0),
    ],
}  # fmt: skip


class Guarded(TorchFunctionMode):
    """Inside `with`, each tensor that is made has a margin on both sides. `overrun` is whether a margin was written to.

    A kernel that stores rows which do not exist writes to somebody else's memory, and its own results are right.
    """

    MARGIN, VALUE = 8192, 77
    MAKE = ("empty", "empty_like", "zeros", "zeros_like", "full", "full_like", "new_empty", "new_zeros", "new_full")

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") not in self.MAKE or made.numel() == 0 or made.dtype == torch.bool:
            return made
        length = 1 + sum((n - 1) * stride for n, stride in zip(made.shape, made.stride(), strict=True))
        buffer = made.new_full((length + 2 * self.MARGIN,), self.VALUE)
        self.buffers.append(buffer)
        return buffer.as_strided(made.shape, made.stride(), self.MARGIN).copy_(made)

    @property
    def overrun(self):
        margins = [x for b in self.buffers for x in (b[: self.MARGIN], b[-self.MARGIN :])]
        return any((margin != self.VALUE).any().item() for margin in margins)


def judge(attention, step, case, device):
    """(inputs, results, expected results, lines about what is wrong) of one case of a step. May raise TypeError."""
    x = cases.build(case, SUPPORTS, torch.float32, device)
    before = [t.clone() for t in (x.q, x.k, x.v)]
    want = x.expected()
    with Guarded() as guarded:
        returned = attention(x.q, x.k, x.v, causal=x.causal, scale=x.scale)
    got = _results(returned, step)
    lines = differences.lines(got, want)
    if guarded.overrun:
        lines.append("a kernel has stored something before or behind a tensor that attention has made")
        lines.append("  is the mask of each tl.store False for the rows and columns that do not exist?")
    if not all(map(torch.equal, before, (x.q, x.k, x.v))):
        lines.append("q, k or v has been overwritten")
    return x, got, want, lines


def _results(returned, step):
    """{name: tensor} of what the reader's function returned. Only the last step looks at lse."""
    last = step == len(STEPS)
    found = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if not all(isinstance(t, torch.Tensor) for t in found) or len(found) not in ((2,) if last else (1, 2)):
        kinds, wanted = ", ".join(type(t).__name__ for t in found), "(out, lse)" if last else "out"
        raise TypeError(f"attention returned {kinds}; in step {step} it has to return {wanted}, float32 tensors.")
    return dict(zip(("out", "lse") if last else ("out",), found, strict=False))


def first_difference(attention, step, rows):
    """The lines about P, which is out where v is the identity: its first wrong row, in the smallest case that is wrong.

    rows: what `judge` returned for each case of the step. Without a line if out is right, or P cannot be found.
    """
    failed = [(case, *row) for case, row in zip(STEPS[step], rows, strict=False) if "out" in error.failures(*row[1:3])]
    if not failed:
        return []
    case, x, got, want, _ = min(failed, key=lambda row: row[1].q.numel())
    try:
        yours = _probabilities(attention, x).cpu()
    except Exception:  # It concerns this v alone.
        return []
    off = (got["out"].double() - want.value["out"]).abs().nan_to_num(math.inf).flatten(2).amax(-1)
    b, h = divmod(off.flatten().argmax().item(), off.shape[1])
    right = scores(x.q, x.k, scale=x.scale, causal=x.causal).softmax(-1).nan_to_num(0).cpu()
    shown = of_P(Call("", 1, "", {}, {"P": yours[b, h]}, {"P": right[b, h]}))
    where = f"in the case: {case.says}" + (f"; head {h} of batch entry {b}" if off.numel() > 1 else "")
    right_so_far = ["  it is right; look at how v is read, and behind P"]
    return [f"With the identity for v, out is your P ({where}):", *(shown or right_so_far)]


def _probabilities(attention, x):
    """P (B, H, Nq, Nk), from one call for every D keys: in each, v is 1 in column c for the c-th of these keys."""
    D, parts = x.q.shape[-1], []
    for first in range(0, x.k.shape[-2], D):
        v = torch.zeros_like(x.k, memory_format=torch.contiguous_format)
        columns = torch.arange(min(D, v.shape[-2] - first))
        v[..., first + columns, columns] = 1
        returned = attention(x.q, x.k, v, causal=x.causal, scale=x.scale)
        parts.append((returned if isinstance(returned, torch.Tensor) else returned[0])[..., : len(columns)])
    return torch.cat(parts, -1).double()


def diagnose(rows, step):
    """The mutants that the results equal in every case of a step. rows: what `judge` returned for each case."""
    rows = [(mutants._on_cpu(x), (T, T), mutants._on_cpu(got), mutants._on_cpu(want)) for x, got, want, _ in rows]
    failures = [error.failures(got, want) for _, _, got, want in rows]
    rows = list(zip(rows, failures, strict=True))
    if not any(failures):
        return []
    names = list(rows[0][0][2])
    forward = [m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Forward)]
    if step == 1:  # All keys are in one tile, and there is no alpha yet.
        forward = [m for m in forward if "alpha" not in m.says]
    return mutants.explaining(forward, rows, names, "fa2")
