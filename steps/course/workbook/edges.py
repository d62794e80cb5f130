"""What an exercise is asked beside the contract's cases: what the contract's other tests ask of the function.

In exercises.toml `edges` lists the names of those that a function has to hold. They run if its cases are right. Among
them may be further cases of the contract, in which mistakes that the first cases have found would look alike.
"""

import importlib
import math

import torch

from reference import cases, error
from steps import engine
from steps.course.workbook import differences

# (lse, lse_block, out and lse after the merge), with 2 in out_block and 1 in out, or 0 where lse is -inf.
MERGES = (
    (-math.inf, -math.inf, 0, -math.inf),
    (-math.inf, 1.0, 2, 1.0),
    (1.0, -math.inf, 1, 1.0),
    (1e4, 1e4, 1.5, 1e4 + math.log(2)),  # exp(1e4) would be inf
    (-2e4, -2e4, 1.5, -2e4 + math.log(2)),
    (1e4, -1e4, 1, 1e4),
    (-1e4, 1e4, 2, 1e4),
)


def nan(job, supports, results):
    """A row of q that has a NaN is all NaN in out, and all other rows are as they were."""
    case = next(case for case in cases.CASES if case.name == "ragged_causal")
    x = cases.build(case, supports, supports["dtypes"][0], engine.device)
    want, row = x.expected(), (0, 0, 3)
    x.q[(*row, 2)] = math.nan
    got = results(case, x, want)
    if not got["out"][row].isnan().all():
        return ["out[0, 0, 3] has to be NaN, because q[0, 0, 3, 2] is: a NaN may not be hidden.",
                "Do not replace NaN afterwards. Choose before you subtract or divide."]  # fmt: skip
    for name, x in got.items():
        x[row] = want.value[name][row].to(x.dtype)
    wrong = differences.lines(got, want)
    return ["A NaN in one row of q may not change another row:", *wrong] if wrong else []


def minus_infinity(job, supports, results):
    """Scores of -inf count as if their keys were hidden: the first half of all keys, or all keys of one row."""
    case = next(case for case in cases.CASES if case.name == "ragged")
    x = cases.build(case, supports, supports["dtypes"][0], engine.device)
    x.q[..., 0], x.k[..., 0] = 1, 1
    half = x.k.shape[2] // 2

    def expected(head, seen):
        q, k, v = x.q[:, head, None], x.k[:, head, None, seen], x.v[:, head, None, seen]
        return error.expected(q, k, v, q)

    want = expected(0, slice(half, None)), expected(1, slice(None))
    x.k[:, 0, :half, 0] = -math.inf
    x.q[0, 1, 3, 0] = -math.inf
    got, lines = results(case, x, None), []
    if (got["out"][0, 1, 3] != 0).any() or got["lse"][0, 1, 3] != -math.inf:
        lines = ["Row 3 of head 1 has no score but -inf: its out has to be 0, and its lse -inf, as in a masked row."]
    for name, y in got.items():
        y[0, 1, 3] = want[1].value[name][0, 0, 3].to(y.dtype)
    for h, says in ((0, "the first half of its keys has scores of -inf"), (1, "one row has scores of -inf")):
        wrong = differences.lines({name: y[:, h : h + 1] for name, y in got.items()}, want[h])
        lines += [f"Head {h}, where {says}:", *wrong] if wrong else []
    return lines


def many_tiles(job, supports, results):
    """l and O are float32: each of many tiles adds less to them than half of the last bit of 16 bits."""
    x, want = with_many_tiles(supports, torch.float16)
    wrong = differences.lines(results(cases.Case("many_tiles", ""), x, want), want)
    says = "Each tile adds less to l and O than 16 bits can hold, so the sums have to stay float32."
    return [*wrong, says] if wrong else []


def with_many_tiles(supports, dtype):
    """(inputs, expected): one query, and the first key and the last one have nearly the whole weight.

    Every value is 1 or -1, so that out is known, and a sum that is rounded to `dtype` in each tile stays where the
    first tile has put it.
    """
    tile = min((tile for tile in supports["tiles"] if tile[0] == tile[1]), default=supports["tiles"][0])
    q, k = torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 24 * tile[1], 32)
    q[..., 0] = 1
    # A tile of keys with the score 0 then adds 0.8 of half of the last bit of 1.
    k[..., [0, -1], 0] = math.ceil(16 * math.log(tile[1] * 2 / torch.finfo(dtype).eps / 0.8)) / 16
    v = (-1.0) ** torch.arange(32).expand_as(k)
    q, k, v = (cases.surround_with_nan(x.to(engine.device, dtype)) for x in (q, k, v))
    inputs = cases.Inputs(q, k, v, torch.ones_like(q), False, 1.0, tile)
    want = inputs.expected()
    want.tolerance["lse"] *= 8  # Equal numbers are added to l, and each of these additions rounds it the same way.
    return inputs, want


def merge(job, supports, results):
    """The merge of single numbers, of which one or both are -inf or huge. What it reads stays as it is."""
    function, lines = importlib.import_module(job["module"]).merge, []
    for lse, lse_block, want, want_lse in MERGES:
        before = 0.0 if lse == -math.inf else 1.0
        out, row = torch.full((1, 1), before), torch.tensor([lse])
        block = torch.full((1, 1), 2.0), torch.tensor([lse_block])
        read = [x.clone() for x in block]
        function(out, row, *block)
        if not all(map(torch.equal, block, read)):
            return ["out_block or lse_block was changed. merge only reads them: write into out and lse alone."]
        got, got_lse = out.item(), row.item()
        if not (math.isclose(got, want, abs_tol=1e-3) and math.isclose(got_lse, want_lse, rel_tol=1e-6)):
            lines += [f"With lse = {lse:g} and out = {before:g}, lse_block = {lse_block:g} and out_block = 2",
                      f"  out becomes {got:g}, expected {want:g}",
                      f"  lse becomes {got_lse:.9g}, expected {want_lse:.9g}"]  # fmt: skip
    return lines


def many_merges(job, supports, results):
    """out and lse are float32: each of many merges adds less to them than half of the last bit of 16 bits."""
    function, times = importlib.import_module(job["module"]).merge, 48
    for dtype in torch.float16, torch.bfloat16:
        weight = 0.1 * torch.finfo(dtype).eps  # of each later block; the first one has the weight 1
        out, lse = torch.zeros(1, 1), torch.tensor([-math.inf])
        for n in range(times + 1):
            lse_block = torch.tensor([8 + math.log(weight) if n else 8.0])
            function(out, lse, torch.full((1, 1), -1.0 if n else 1.0, dtype=dtype), lse_block)
        total = 1 + times * weight
        want, want_lse = 2 / total - 1, 8 + math.log(total)
        got, got_lse = out.item(), lse.item()
        if not abs(got - want) < torch.finfo(dtype).eps or not abs(got_lse - want_lse) < 1e-4:
            name = str(dtype).removeprefix("torch.")
            return [f"A block of 1, and then {times} of -1 with the weight {weight:.1e} each, in {name}:",
                    f"  out becomes {got:.6g}, expected {want:.6g}",
                    f"  lse becomes {got_lse:.6g}, expected {want_lse:.6g}",
                    f"Each merge adds less than {name} can hold: keep out and lse in float32."]  # fmt: skip
    return []


def other_tiles(job, supports, results):
    """The function of stage 02 alone, in a tile of a shape that is compiled for a GPU only."""
    from steps.course.workbook import probe  # It imports stage 02, which no other stage needs.

    return probe.other_tiles(job) if engine.name == "cpu" else []


EDGES = {
    "other_tiles": ("the function alone, in a tile of another shape", other_tiles),
    "minus_infinity": ("scores of -inf count as masked", minus_infinity),
    "nan": ("a NaN in q stays in its row", nan),
    "many_tiles": ("24 tiles of keys in float16", many_tiles),
    "merge": ("lse of -inf, and far from 0", merge),
    "many_merges": ("48 merges of blocks in 16 bits", many_merges),
}


def of(job):
    """[(what it says, (job, supports, results) -> lines about what is wrong)] of the job's edges that are no cases.

    results: (case, inputs, expected) -> {name: tensor}, by the answer.
    """
    return [EDGES[name] for name in job["edges"] if name in EDGES]


def further_cases(job):
    """A job of those edges that are cases."""
    return job | {"cases": [name for name in job["edges"] if name not in EDGES]}
