"""Random inputs of the stages 00 to 03 against the reference: shapes, memory layouts, masks, scales, tiles and rungs.

Of stage 03 also three features at once.

A failure ends with the smallest problem that Hypothesis has found for it, and the next run tries that one first.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference import error, feature_cases
from steps import catalogue, checks, engine
from steps.course.workbook import one_rung

if catalogue.unavailable("03") is None:
    from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.

pytestmark = pytest.mark.long
# How many problems, and the largest N and D.
STAGES = {"00": (5000, 70, 64), "01": (500, 30, 32), "02": (1000, 70, 64), "03": (500, 70, 64)}
HEAD_DIMS = 1, 3, 8, 32, 40, 64  # few, because stage 02 compiles a kernel for each


@dataclass(frozen=True)
class Problem:
    """Inputs of random numbers, and the arguments of a call."""

    rung: str
    dtype: torch.dtype
    B: int
    Hk: int
    group: int  # query heads that share a key head
    Nq: int
    Nk: int
    D: int
    layouts: list  # of q, k, v and dout: the order of (B, H, N) in memory, and how many NaN follow each row
    seed: int
    gain: int  # of q
    options: dict

    def tensors(self):
        """q, k, v and dout."""
        rng = torch.Generator().manual_seed(self.seed)
        heads, rows = (self.Hk * self.group, self.Hk), (self.Nq, self.Nk)
        shapes = [(self.B, heads[i], rows[i], self.D) for i in (0, 1, 1, 0)]
        q, k, v, dout = (torch.randn(shape, generator=rng) for shape in shapes)
        tensors = (x.to(engine.device, self.dtype) for x in (self.gain * q, k, v, dout))
        return [laid_out(x, *layout) for x, layout in zip(tensors, self.layouts, strict=True)]


def laid_out(x, order, padding):
    """x (B, H, N, D) copied into memory in this order of (B, H, N), with so many NaN behind each row."""
    rows = x.permute(*order, 3)
    buffer = x.new_full((*rows.shape[:3], x.shape[3] + padding), math.nan)
    view = buffer[..., : x.shape[3]].copy_(rows)
    return view.permute(*(order.index(d) for d in range(3)), 3)


@st.composite
def problems(draw, supports, largest_N, largest_D):
    """A Problem that SUPPORTS admits."""
    rung = draw(st.sampled_from(supports["rungs"]))
    own = checks.supports_of(supports, rung)
    dtypes = [dtype for dtype in own["dtypes"] if dtype != torch.float64]  # there the reference is not more exact
    layout = st.tuples(st.permutations(range(3)), st.sampled_from((0, 1, 8)))
    D = draw(st.sampled_from([D for D in HEAD_DIMS if D in own["head_dims"] and D <= largest_D]))
    options = dict(
        causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(2**-6, 2)),
        tile=draw(st.sampled_from((None, *checks.tiles_of(own, D)))),
    )
    B, Hk, Nk = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, largest_N))
    return Problem(
        rung=rung,
        dtype=draw(st.sampled_from(dtypes)),
        B=B,
        Hk=Hk,
        group=draw(st.integers(1, 3 if own["gqa"] else 1)),
        Nq=draw(st.integers(0, largest_N)),
        Nk=Nk,
        D=D,
        layouts=draw(st.lists(layout, min_size=4, max_size=4)),
        seed=draw(st.integers(0, 2**32)),
        gain=draw(st.sampled_from((1, 8))),
        options=options,
    )


@pytest.mark.parametrize("number", STAGES)
def test_random_inputs(number):
    if reason := catalogue.unavailable(number):
        pytest.skip(reason)
    stage, (count, *largest) = catalogue.stage(number), STAGES[number]

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problems(stage.SUPPORTS, *largest))
    def judge(problem):
        got, want = results(stage, problem)
        failures = error.failures(got, want)
        assert not failures, f"(error, tolerance) = {failures}"

    judge()


def results(stage, problem):
    """({name: tensor} of what is compared on the problem's rung, the expected results)."""
    q, k, v, dout = problem.tensors()
    want = error.expected(q, k, v, dout, causal=problem.options["causal"], scale=problem.options["scale"])
    kernel = one_rung.on_rung(stage, problem.rung)
    out, lse = kernel.forward(q, k, v, **problem.options)
    grads = kernel.backward(dout, q, k, v, out, lse, **problem.options)
    got = dict(zip(error.NAMES, (out, lse, *grads), strict=True))
    return {name: got[name] for name in one_rung.compared(stage, problem.rung)}, want


# ---- stage 03's features ---------------------------------------------------------------------------------------------

OPTIONS = feature_cases.features()
# Parts are pieces of one sequence's keys, and each sets its own first key. A gradient of one number, which is 0, is
# rounded in each part. Lengths go with no other feature.
APART = ({"parts", "packed"}, {"parts", "first key"}, {"parts", "additive for heads"}, {"lengths"})
THREE = [  # no two of the three features share an option
    names
    for names in itertools.combinations(OPTIONS, 3)
    if len(set().union(*(OPTIONS[name] for name in names))) == sum(len(OPTIONS[name]) for name in names)
    and not any(apart <= set(names) for apart in APART)
]
KINDS = {}  # the same by the names of their options, so that the many masks are drawn no more often than the others
for names in THREE:
    KINDS.setdefault(tuple(option for name in names for option in OPTIONS[name]), []).append(names)


def test_three_features_at_once():
    if reason := catalogue.unavailable("03"):
        pytest.skip(reason)
    stage = catalogue.stage("03")

    @settings(max_examples=35, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        names=st.sampled_from(list(KINDS.values())).flatmap(st.sampled_from),
        dtype=st.sampled_from(stage.SUPPORTS["dtypes"]),
        Nq=st.integers(0, feature_cases.Nq),
        Nk=st.integers(0, feature_cases.Nk),
        tile=st.sampled_from(stage.SUPPORTS["tiles"]),
    )
    def judge(names, dtype, Nq, Nk, tile):
        inputs = shortened(*feature_cases.inputs(names, dtype, device=engine.device), Nq, Nk)
        failures = error.failures(feature_cases.run(stage, *inputs, tile=tile), feature_cases.expected(*inputs))
        assert not failures, f"(error, tolerance) = {failures}"

    judge()


def shortened(q, k, v, dout, options, Nq, Nk):
    """The inputs of a features' case with the first Nq queries and Nk keys only."""
    q, dout, k, v = (first(x, n, 2) for x, n in ((q, Nq), (dout, Nq), (k, Nk), (v, Nk)))
    options = dict(options)
    for dim, n in ((-2, Nq), (-1, Nk)):
        if "mask" in options and options["mask"].shape[dim] > 1:
            options["mask"] = first(options["mask"], n, dim)
    for name, n in (("cu_seqlens_q", Nq), ("cu_seqlens_k", Nk)):
        if name in options:
            options[name] = options[name].clamp(max=n)
    if "parts" in options:
        options["parts"] = [min(border, Nk) for border in options["parts"]]
    if "seed" in options:
        options["seed"] = options["seed"].to(engine.device)
    return q, k, v, dout, options


def first(x, n, dim):
    """The first n entries of x along a dimension. Numbers behind them become NaN, so that one that is read shows."""
    if x.is_floating_point():
        x.narrow(dim, n, x.shape[dim] - n).fill_(math.nan)
    return x.narrow(dim, 0, n)
