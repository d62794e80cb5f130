"""Stage 02: the contract, and what only a GPU or only the emulation can show."""

import contextlib
import itertools
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steps.step02_fa2_cuda as step02
from reference import attention, cases, error
from steps import checks, engine
from steps.cached import Cache
from steps.course.bench.rows import geometry
from steps.course.workbook import one_rung
from steps.step02_fa2_cuda import calls, emulator, ladder, launches, plan, tile_scheduler
from support import schedules
from support.contract_suite import Contract
from support.operands import scores_whose_roundings_add_up

GPU = engine.name == "cuda"
no_compiler = engine.name == "cpu" and not emulator.available()
needs_compiler = pytest.mark.skipif(no_compiler, reason="without a GPU stage 02 needs g++, and there is none")
emulated = pytest.mark.skipif(not emulator.available(), reason="the emulation needs g++")


@needs_compiler
class TestContract(Contract):
    stage = step02
    several_tiles = 300
    # g++ takes seconds for each head_dim and dtype.
    few = ("ragged", "ragged_causal", "more_queries_causal", "explicit_scale", "scores_200", "common_score",
           "large_scores", "own_layouts")  # fmt: skip
    few_in_other_dtypes = ("large_scores",)

    @contextlib.contextmanager
    def without_launches(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(calls, "plans", Cache())
            patch.setattr(plan.Plan, "run", lambda *_: None)
            yield


@needs_compiler
@pytest.mark.skipif(engine.name == "cuda", reason="the emulation runs on the CPU")
@pytest.mark.parametrize("tile", step02.SUPPORTS["tiles"])
@pytest.mark.parametrize("name", ["ragged", "more_queries_causal"])
def test_the_order_of_threads_and_blocks_does_not_matter(name, tile):
    case = next(c for c in cases.CASES if c.name == name)
    inputs = replace(cases.build(case, step02.SUPPORTS, torch.float32), tile=tile)  # of the first rung, the scalar one
    want = inputs.expected()
    first = cases.run(step02, case, inputs)
    for schedule in ("reverse", "reverse"), ("random", "random", 1), ("random", "random", 2), ("forward", "random", 3):
        with emulator.schedule(*schedule):
            got = cases.run(step02, case, inputs)
        assert not error.failures(got, want)
        for result in ("out", "lse", "dk", "dv"):  # dq is a sum of atomic additions, in the order of the blocks
            assert torch.equal(got[result], first[result]), (schedule, result)


@emulated
@pytest.mark.parametrize("kernel", schedules.CALLS)
def test_every_kernel_in_several_schedules(kernel):
    assert {file.stem for file in launches.HERE.glob("*.cu")} == set(schedules.CALLS)
    assert schedules.problems(kernel) == ""


@emulated
@pytest.mark.parametrize("short, persistent, blocks", [
    (0, False, 3), (600 * 64, False, 3), (600 * 64, True, 3), (600 * 64, True, 1),
])  # fmt: skip
def test_rung_hoppers_backward_in_several_schedules(short, persistent, blocks, monkeypatch):
    """For a long head it has two buffers for tiles of queries, for a short one three, and perhaps persistent blocks."""
    monkeypatch.setattr(launches, "processors", lambda _: blocks)
    monkeypatch.setattr(ladder, "SHORT_HEAD", short)
    monkeypatch.setattr(ladder, "persistent_pays", lambda _: persistent)
    monkeypatch.setattr(calls, "plans", Cache())
    assert schedules.problems("bwd_3_hopper") == ""


@emulated
@pytest.mark.parametrize("kernel, apart", [("bwd_1_fa2", False), ("bwd_3_hopper", False), ("bwd_3_hopper", True)])
def test_dq_in_a_fixed_order_in_several_schedules(kernel, apart, monkeypatch):
    """In rung hopper the queries ascend if a block has one head, and descend if it has a group."""
    monkeypatch.setattr(ladder.Problem, "heads_apart", apart)
    monkeypatch.setattr(calls, "plans", Cache())
    assert schedules.problems(kernel, deterministic=True) == ""


@pytest.mark.parametrize("file", sorted(launches.HERE.glob("*.cu")), ids=lambda file: file.stem)
def test_rows_of_all_heads_are_counted_in_64_bits(file, own_text):
    """B H Nq may exceed 2^31, for which only a large GPU has the memory. So the text of the products is read."""
    code = re.sub("//.*", "", own_text(file))
    wide = set(re.findall(r"int64_t (\w+) =", code))
    for line in re.findall(r".*\* N[qk]\b.*", code):
        before = re.split(r" \* N[qk]\b", line)[0]
        assert "int64_t(" in before or re.search(r"\w+$", before)[0] in wide, line
        assert not re.search(r"\bint \w+ = ", before), line


@pytest.mark.parametrize("file", sorted(launches.HERE.glob("*.cu")), ids=lambda file: file.stem)
def test_strides_have_64_bits(file, own_text):
    """A row times its stride may exceed 2^31."""
    declared = re.findall(r"(\w+) (stride|(?:dout|out|q|k|v)_(?:batch|head|row))[,;)]", own_text(file))
    assert {kind for kind, name in declared} <= {"int64_t"}  # The copy engine of the later rungs knows the strides.


@needs_compiler
@pytest.mark.parametrize("rung, D", [("scalar", 32), ("fa2", 32), ("wgmma", 64), ("hopper", 64)])
def test_a_P_that_rounding_puts_above_1_stays_finite(rung, D):
    """At scores of 10^12 the last bit of lse is worth thousands, and exp of that is infinite."""
    if rung not in step02.RUNGS:
        pytest.skip("needs a Hopper GPU, or none")
    dtype = checks.supports_of(step02.SUPPORTS, rung)["dtypes"][0]
    q, k, v, dout = random_inputs(1, 2, 2, 8, 8, D, dtype)
    q, k = 3e5 * q, 3e5 * k
    out, lse = step02.forward(q, k, v, rung=rung)
    lower = torch.nextafter(lse, torch.full_like(lse, -math.inf))
    for grad in step02.backward(dout, q, k, v, out, lower, rung=rung):
        assert grad.isfinite().all()


@needs_compiler
def test_a_refusal_names_the_choices():
    for D in (128, 256):
        x = torch.randn(1, 1, 8, D, device=engine.device)
        with pytest.raises(ValueError, match=rf"takes float32 with head_dim {D};.*steps\.step03_triton takes it"):
            step02.attention(x, x, x)
    q, k, v = torch.randn(3, 1, 1, 8, 100, device=engine.device)
    with pytest.raises(ValueError, match="head_dim 1 to 96, 128, 256; got 100. steps.step03_triton takes it"):
        step02.forward(q, k, v)
    with pytest.raises(TypeError, match=r"got float32. Convert with .to\(torch.b?float16\).*, or name no rung\."):
        step02.forward(q, k, v, rung="mma")
    with pytest.raises(ValueError, match=r"has the rungs .*scalar.*; got rung=\['fa2'\]"):
        step02.forward(q, k, v, rung=["fa2"])


def bytes_of_a_block(rung, D, tile, own):
    """The most shared memory that a launch of a forward and a backward takes if a call names this tile.

    A backward with tiles of its own has the smallest here, as in the emulation.
    """
    q, most = torch.zeros(1, 1, 3, D, device="meta"), 0
    strides = dict.fromkeys(("q", "k", "v", "out", "dout"), (1, 1, 1))
    row = ladder.FORWARD[rung]
    for dtype in own["dtypes"]:
        backward = ladder.backward_row(rung, dtype, D)
        named = tile if backward.tile_of_forward else None
        forward_problem = launches.problem_of(row, q.to(dtype), q.to(dtype), tile=tile)
        backward_problem = launches.problem_of(backward, q.to(dtype), q.to(dtype), tile=named)
        specs = launches.forward_launches(forward_problem, strides)
        specs += launches.backward_launches(backward_problem, strides)
        most = max(most, *(spec.shared_bytes for spec in specs))
    return most


@pytest.mark.parametrize(
    "capability, KiB", [((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((10, 0), 227)], ids=str
)
def test_what_a_gpu_takes(capability, KiB):
    there, own = ladder.available(capability), ladder.limits(capability, 1024 * KiB)
    assert there[0] == ("hopper" if capability == (9, 0) else "fa2") and ("wgmma" in there) == (capability == (9, 0))
    assert ladder.BACKWARD["wgmma"].runs_on(capability) is (capability == (9, 0))
    assert {*there, *ladder.elsewhere(capability)} == set(ladder.FORWARD) > set(ladder.elsewhere(capability))
    assert {rung for rung in there if torch.bfloat16 in own[rung]["dtypes"]} == {
        rung for rung in there if rung != "scalar" and capability >= (8, 0)
    }
    for rung in there:
        for D, tile in itertools.product(own[rung]["head_dims"], own[rung]["tiles"]):
            assert own[rung]["tile_fits"](D, tile) == (bytes_of_a_block(rung, D, tile, own[rung]) <= 1024 * KiB)
    assert 128 in own["fa2"]["head_dims"] and (256 in own["fa2"]["head_dims"]) == (KiB > 100)
    if capability != (9, 0):
        supports = step02.SUPPORTS | {"elsewhere": ladder.elsewhere(capability)}
        with pytest.raises(ValueError, match=r"has the rungs fa2, .* here; got rung='hopper': it needs .* 9\.0"):
            checks.pick(there, supports, "hopper", 0, torch.randn(1, 1, 4, 64).bfloat16())


@needs_compiler
@pytest.mark.parametrize(
    "rung, D, options, refusal",
    [
        ("hopper", 40, {}, "fwd_8_hopper.cu takes bfloat16 or float16 and head_dim 32, 64, 96, 128, 256; got .* 40"),
        ("wgmma", 48, {}, "fwd_6_wgmma.cu takes .* 48"),
        ("warp", 256, {}, "fwd_1_warp.cu takes float32 or bfloat16 or float16 and head_dim 32, .*, 128; got .* 256"),
        ("hopper", 64, {"PINPONG": 0}, "fwd_8_hopper.cu has no switch PINPONG"),
        ("fa2", 64, {"PINGPONG": 0}, "fwd_5_fa2.cu has no switch PINGPONG"),
        ("hopper", 40, {"tile": (128, 64)}, "fwd_8_hopper.cu takes .* 40"),
        ("hopper", 64, {"tile": (256, 64)}, "more would wait for registers for ever"),
        ("roles", 64, {"tile": (96, 64)}, "1 to 3 warpgroups"),
        ("fa2", 32, {"tile": (16, 64)}, "4 warps have whole tiles of 16 rows"),
        ("cp_async", 32, {"tile": (48, 64)}, "which share a tile evenly"),
        ("ldmatrix", 32, {"tile": (64, 48)}, "which share a tile evenly"),
        ("mma", 32, {"tile": (128, 64)}, "at most 4 warps of 16 rows"),
        ("mma", 32, {"tile": (64, 40)}, "takes 16 keys of V"),
        ("wgmma", 64, {"tile": (96, 64)}, "warpgroups have 64 rows"),
        ("warp", 32, {"tile": (24, 64)}, "at most 4 warps of 16 rows"),
    ],
)  # fmt: skip
def test_a_rung_on_its_own_names_what_it_takes(rung, D, options, refusal):
    if rung not in step02.RUNGS:
        pytest.skip("needs a Hopper GPU, or none")
    q, k, v, _ = random_inputs(1, 1, 1, 8, 8, D, torch.bfloat16)
    with pytest.raises(Exception, match=refusal):
        calls.forward(q, k, v, rung=rung, **options)


PAIRS = ("fa2", 64 if GPU else 32), ("wgmma", 64), ("hopper", 64), *([("fa2", 256), ("hopper", 128)] if GPU else [])
PAIRS = [pair for pair in PAIRS if pair[0] in step02.RUNGS]
needs_hopper = pytest.mark.skipif("hopper" not in step02.RUNGS, reason="rung hopper needs a Hopper GPU, or none")


def random_inputs(B, H, Hk, Nq, Nk, D, dtype):
    """q, k, v and dout."""
    rng = torch.Generator().manual_seed(Nq + Nk)
    shapes = (B, H, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, D), (B, H, Nq, D)
    return [torch.randn(shape, generator=rng).to(engine.device, dtype) for shape in shapes]


def is_right(got, *inputs, **options):
    """Whether these are the reference's (out, lse), (dq, dk, dv), or all five; otherwise it fails."""
    names = {2: error.NAMES[:2], 3: error.NAMES[2:], 5: error.NAMES}[len(got)]
    bad = error.failures(dict(zip(names, got, strict=True)), error.expected(*inputs, **options))
    assert not bad, bad
    return True


def saved(q, *others, **options):
    """out and lse as a backward gets them, by the reference."""
    value = error.expected(q, *others, **options).value
    return value["out"].to(q.dtype), value["lse"].float()


@st.composite
def random_problems(draw):
    """Arguments of random_inputs, and options of forward and backward. Without a GPU, compiled ones."""
    dtype = draw(st.sampled_from(step02.SUPPORTS["dtypes"] if GPU else (torch.float32, torch.bfloat16)))
    D = draw(st.sampled_from((1, 32, 40, 64, 96) if dtype == torch.float32 else (32, 64, 96, 128, 256))) if GPU else 32
    B, Hk, group = (draw(st.integers(1, largest)) for largest in ((2, 3, 4) if GPU else (1, 2, 2)))
    Nq, Nk = (draw(st.integers(1, 700 if GPU else 100)) for _ in range(2))
    return (B, Hk * group, Hk, Nq, Nk, D, dtype), draw(st.booleans()), dtype != torch.float32 and draw(st.booleans())


@needs_compiler
@settings(max_examples=200 if GPU else 10, deadline=None, derandomize=True, database=None)
@given(random_problems())
def test_random_shapes(problem):
    """On the default rung, and on every rung that takes them; a backward that rungs share once."""
    shape, causal, deterministic = problem
    q, k, v, dout = random_inputs(*shape)
    want, known = error.expected(q, k, v, dout, causal=causal), set()
    for rung in (None, *(rung for rung in step02.RUNGS if checks.takes(checks.supports_of(step02.SUPPORTS, rung), q))):
        out, lse = step02.forward(q, k, v, causal=causal, rung=rung)
        got = {"out": out, "lse": lse}
        kernel = rung and ladder.backward_row(rung, q.dtype, q.shape[3], deterministic).file
        if kernel not in known:
            options = dict(causal=causal, rung=rung, deterministic=deterministic)
            got |= zip(("dq", "dk", "dv"), step02.backward(dout, q, k, v, out, lse, **options), strict=True)
        known.add(kernel)
        assert not error.failures(got, want), rung


ALL_CASES = [case.name for case in cases.CASES]


@pytest.mark.xdist_group("much GPU memory")  # they take turns
@needs_compiler
@needs_hopper
@pytest.mark.parametrize("D, names", [
    (64, TestContract.few), (128, ("ragged_causal", "more_queries_causal", "large_scores", "own_layouts")),
    pytest.param(128, TestContract.few, marks=pytest.mark.long), pytest.param(64, ALL_CASES, marks=pytest.mark.long),
], ids=["64-few", "128-fewer", "128-few", "64-all"])  # fmt: skip
def test_the_contract_where_hoppers_backwards_are_used(D, names):
    """The cases at the backwards' own head_dims, because at the contract's other ones the gradients are fa2's.

    In the emulation only some of them, to save time; a long run has all of them for rung hopper at head_dim 64. A GPU
    runs all.
    """
    supports = checks.supports_of(step02.SUPPORTS, "hopper")  # rung wgmma takes the same
    for case, dtype, reason in cases.select(supports, GPU):
        rare = not GPU and case.name not in TestContract.few
        if reason is None and (GPU or dtype == torch.bfloat16 and case.name in names):
            inputs = cases.build(replace(case, D=D), supports, dtype, engine.device)
            want = inputs.expected()
            for rung in ("hopper",) if rare else ("hopper", "wgmma"):
                assert not error.failures(one_rung.results(step02, rung, case, inputs), want), (rung, case.says)


@needs_compiler
@pytest.mark.parametrize("D", ladder.HOPPER_BACKWARD)
@pytest.mark.parametrize("rung", [rung for rung in ("wgmma", "hopper") if rung in step02.RUNGS])
def test_the_first_tile_of_queries_that_sees_a_key(rung, D):
    """With more queries than keys and a causal mask the first ones see nothing: here whole tiles of them, or nearly.

    With fewer queries than keys the first key's tile begins before the first query, which tile 0 has.
    """
    Br, _ = ladder.HOPPER_BACKWARD[D]
    for blind in (Br - 2, Br - 1, Br, Br + 1, -Br - 60):
        Nq, Nk = 73 + max(0, blind), 73 + max(0, -blind)
        case = cases.Case("blind", "blind queries", lambda T, N=Nq: N, lambda T, N=Nk: N, H=1, D=D, causal=True)
        inputs = cases.build(case, checks.supports_of(step02.SUPPORTS, rung), torch.bfloat16, engine.device)
        want = inputs.expected()
        assert not error.failures(one_rung.results(step02, rung, case, inputs), want), blind


HALF_RUNGS = [(rung, 32, torch.float16) for rung in step02.RUNGS if torch.float16 in ladder.FORWARD[rung].dtypes]
HOPPER_RUNGS = [(rung, 64, torch.bfloat16) for rung in ("wgmma", "hopper") if rung in step02.RUNGS]


@pytest.mark.parametrize("rung, D, dtype", HALF_RUNGS + HOPPER_RUNGS)  # at D = 32 their gradients are fa2's
def test_a_single_key_gets_all_of_the_gradient_at_huge_scores(rung, D, dtype):
    """P is 1 for the only key. Without what `lse_in_base_2` takes off, rounding makes it 0 for some queries.

    The numbers of a row are equal, so that its score is exact in whatever order it is summed.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.linspace(-2, 2, 40)[:, None].expand(1, 1, 40, D).to(engine.device, dtype)
    q, k = 16384 * rows, torch.full_like(rows[:, :, :1], 16384)
    v = torch.randn(1, 1, 1, D, generator=generator).to(engine.device, dtype)
    dout = torch.ones_like(q)
    out, lse = step02.forward(q, k, v, rung=rung)
    _, _, dv = step02.backward(dout, q, k, v, out, lse, rung=rung)
    rtol = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, v.expand_as(out), rtol=rtol, atol=0)
    torch.testing.assert_close(dv, torch.full_like(dv, 40), rtol=rtol, atol=0)


@pytest.mark.parametrize("rung, D, dtype", HALF_RUNGS[-1:] + HOPPER_RUNGS)  # one of each backward
def test_a_single_key_gets_all_of_the_gradient_where_four_roundings_add_up(rung, D, dtype):
    """With 2^-23 or 2^-24 in the place of the 2^-22 that `lse_in_base_2` takes off, P is less than 1 here."""
    q, k, scale, lse = scores_whose_roundings_add_up(D, dtype)
    q, k, lse = (x.to(engine.device) for x in (q, k, lse))
    v = torch.randn(1, 1, 1, D, generator=torch.Generator().manual_seed(0)).to(engine.device, dtype)
    _, _, dv = step02.backward(torch.ones_like(q), q, k, v, v.expand_as(q), lse, rung=rung, scale=scale)
    torch.testing.assert_close(dv, torch.full_like(dv, 40))


@pytest.mark.parametrize(
    "B, H, Hk, Nk, processors, apart",
    [
        (1, 8, 1, 4096, 132, True),  # 32 blocks with 8 heads each, or 256 with one
        (1, 8, 8, 4096, 132, False),  # nothing to take apart
        (1, 32, 8, 16384, 132, False),  # 1024 blocks fill the GPU 8 times, and 4096 fill it 32 times
        (4, 32, 8, 4096, 132, False),
        (1, 4, 2, 1024, 4, False),  # 4 rounds of two heads are 8 rounds of one
        (1, 4, 2, 1024, 5, False),  # 7 rounds are more than three quarters of 8
        (1, 4, 2, 1024, 12, True),  # 3 are three quarters of 4
        (1, 4, 2, 900, 12, True),
    ],
)
def test_grouped_heads_are_taken_apart_where_that_fills_the_gpu(B, H, Hk, Nk, processors, apart):
    how = dict(B=B, H=H, Hk=Hk, Nq=7, Nk=Nk, D=64, causal=False, dtype=torch.bfloat16, processors=processors)
    for file in ("bwd_1_fa2", "bwd_2_wgmma", "bwd_3_hopper"):
        _, (kernel, grid, *_, macros), _ = geometry(file, **how, shared_limit=227 * 1024)
        assert kernel == "attention_backward" and macros["HEADS_APART"] == apart
        tiles = B * (H if apart else Hk) * -(-Nk // macros["Bc"])
        assert grid == (processors if macros.get("PERSISTENT") else tiles)


@needs_compiler
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rung, D", PAIRS)
def test_gradients_of_grouped_heads(rung, D, apart, monkeypatch):
    """With one multiprocessor there is nothing to fill. In parts, too, and where dq is bit-equal from run to run."""
    monkeypatch.setattr(launches, "processors", lambda _: 132 if apart else 1)
    monkeypatch.setattr(calls, "plans", Cache())
    inputs = random_inputs(3, 4, 2, 70, 150, D, torch.bfloat16)
    wide = [torch.cat([x, x + 1], -1)[..., :D] for x in inputs]  # strides of their own
    q, k, v, dout = wide
    out, lse = saved(q, k, v, dout, causal=True)
    for deterministic in (False,) if rung == "wgmma" else (False, True):
        options = dict(rung=rung, causal=True, deterministic=deterministic)
        grads = calls.backward(dout, q, k, v, out, lse, **options)
        assert all(x.is_contiguous() for x in grads) and is_right(grads, q, k, v, dout, causal=True)
    sums = calls.start_gradients(dout, out, lse, rung=rung)
    dk, dv = calls.add_gradients(sums, dout, q, k, v, causal=True)
    assert is_right((calls.finish_dq(sums), dk, dv), q, k, v, dout, causal=True)


@needs_compiler
@pytest.mark.parametrize("tile", [(32, 64), (64, 32)])
def test_fa2_s_backward_has_tiles_of_two_sizes(tile):
    """On a GPU it has tiles like these. The emulation's usual one is square, in which the two cannot be told apart."""
    q, k, v, dout = random_inputs(1, 2, 1, 150, 170, 32, torch.bfloat16)
    out, lse = saved(q, k, v, dout, causal=True)
    grads = calls.backward(dout, q, k, v, out, lse, rung="fa2", causal=True, backward_tile=tile)
    assert is_right(grads, q, k, v, dout, causal=True)


@needs_compiler
@pytest.mark.parametrize("rung", [rung for rung in step02.RUNGS if rung != "scalar"])
def test_the_stride_of_a_single_row_does_not_matter(rung):
    """A kernel also computes the addresses of rows that it does not read, and these have to be aligned."""
    wide = random_inputs(1, 1, 1, 1, 1, 33, torch.bfloat16)
    rows = [x[..., :32] for x in wide]  # 66 bytes from row to row, if there were a second row
    for q, k, v, dout in (rows, [x.clone() for x in rows]):
        out, lse = step02.forward(q, k, v, causal=True, rung=rung)
        grads = step02.backward(dout, q, k, v, out, lse, causal=True, rung=rung)
        assert is_right((out, lse, *grads), q, k, v, dout, causal=True)


TURNED = dict(OVERLAP=0, PINGPONG=0, PERSISTENT=0, LAZY=0, SKIP=0, WIDE_STORES=0)
SWITCHES = [("hopper", 96, {}), ("hopper", 64, dict(LAZY=0)), ("hopper", 96, TURNED)]
SWITCHES += [("fa2", 32, {switch: 0}) for switch in ("FEW_MASKS", "LONGEST_FIRST", "SECTIONS")]


@needs_compiler
@pytest.mark.parametrize("rung, D, switches", SWITCHES, ids=str)
def test_switches_change_the_time_alone(rung, D, switches):
    if rung not in step02.RUNGS:
        pytest.skip("needs a Hopper GPU, or none")
    N, options = (330, {"tile": (128, 32)}) if rung == "hopper" else (150, {})
    q, k, v, dout = random_inputs(1, 3, 1, N, N, D, torch.float16)
    q = 4 * q  # maxima that grow from tile to tile, by more than LAZY's 8 and by less
    assert is_right(calls.forward(q, k, v, rung=rung, causal=True, **options, **switches), q, k, v, dout, causal=True)


@needs_compiler
@needs_hopper
def test_a_maximum_that_grows_late_lets_no_P_overflow():
    """LAZY lets P grow to 2^8, and float16 ends at 2^16. Each of the 8 warps has another growth, at the last block."""
    growth = torch.tensor([7.9, 8.1, 12, 16.5, 20, 30, 60, 100]).repeat_interleave(16)  # in log2
    scale, D = 4, 96
    _, _, v, dout = random_inputs(1, 1, 1, 128, 200, D, torch.float16)
    q = (growth * math.log(2) / (scale * D))[:, None].expand(1, 1, 128, D).to(v)
    k = torch.zeros_like(v)
    k[:, :, 0] = 1  # the blocks of keys are visited from the last to the first
    got = calls.forward(q, k, v, rung="hopper", causal=True, scale=scale, tile=(128, 32))
    assert is_right(got, q, k, v, dout, causal=True, scale=scale)


@needs_compiler
@needs_hopper
@pytest.mark.parametrize("H, alternate", [(5, True), (5, False), (4, True)])
def test_blocks_get_the_tiles_that_the_launch_has_counted(H, alternate, tmp_path, monkeypatch):
    """Eight blocks share the 5 tiles of each head, in sections of two heads or one. lse tells the block."""
    monkeypatch.setattr(launches, "processors", lambda _: 8)
    monkeypatch.setattr(launches, "order_of_tiles", lambda _: (2, alternate))
    monkeypatch.setattr(calls, "plans", Cache())
    row = ladder.FORWARD["hopper"]
    text, stored = (launches.HERE / row.file).read_text(), "m[r] * scale + logf(l[r])"
    assert text.count(stored) == 1
    (tmp_path / row.file).write_text(text.replace(stored, "blockIdx.x"))
    q, k, v, dout = random_inputs(1, H, 1, 640, 640, 32, torch.float16)
    out, block = calls.forward(q, k, v, rung=replace(row, file=str(tmp_path / row.file)), causal=True, tile=(128, 128))
    _, lse = attention.forward(q, k, v, causal=True)
    assert is_right((out, lse.float()), q, k, v, dout, causal=True)
    tiles = block.view(H, 5, 128).cpu()
    blocks_of_keys = torch.arange(1, 6) + 1  # and one for a tile's beginning and end
    work = torch.stack([(tiles[:, :, 0] == b).sum(0) @ blocks_of_keys for b in range(8)])
    assert (tiles == tiles[:, :, :1]).all() and work.sum() == H * blocks_of_keys.sum()
    problem = launches.problem_of(row, q, k, causal=True, tile=(128, 128))
    counted = tile_scheduler.of_blocks(tile_scheduler.forward_work(problem, 2, alternate), 8)
    assert counted.tolist() == work.tolist()


@needs_compiler
@needs_hopper
def test_the_next_key_and_query_tiles_of_rung_hopper_do_not_wait_for_values(tmp_path, monkeypatch):
    """The first tile of V is held back until the next K and the next tile's Q have come."""
    monkeypatch.setattr(launches, "processors", lambda _: 1)
    monkeypatch.setattr(calls, "plans", Cache())
    row = ladder.FORWARD["hopper"]
    text, load = (launches.HERE / row.file).read_text(), "V.load(v_map, "
    assert text.count(load) == 1
    held = "(V.n ? void() : (barrier_wait(K.full + 1, 0), barrier_wait(Q.full + 1, 0))), "
    (tmp_path / row.file).write_text(text.replace(load, held + load))
    q, k, v, dout = random_inputs(1, 2, 1, 128, 200, 64, torch.float16)
    got = calls.forward(q, k, v, rung=replace(row, file=str(tmp_path / row.file)), tile=(128, 64))
    assert is_right(got, q, k, v, dout)


@pytest.fixture
def persistent(tmp_path, monkeypatch):
    """persistent(blocks, text, other): a rung hopper whose backward is persistent, with this edit of its kernel."""
    monkeypatch.setattr(ladder, "persistent_pays", lambda _: True)
    monkeypatch.setattr(calls, "plans", Cache())

    def edited(blocks, text, other):
        monkeypatch.setattr(launches, "processors", lambda _: blocks)
        row = ladder.BACKWARD["hopper"]
        kernel = (launches.HERE / row.file).read_text()
        assert kernel.count(text) == 1
        (tmp_path / row.file).write_text(kernel.replace(text, other))
        monkeypatch.setitem(ladder.BACKWARD, "edited", replace(row, file=str(tmp_path / row.file)))
        return replace(ladder.FORWARD["hopper"], backwards=("edited",))

    return edited


@needs_compiler
@needs_hopper
@pytest.mark.parametrize("D, H, Hk, Nq, Nk, causal", [
    (64, 8, 8, 384, 384, True), (64, 3, 3, 200, 900, True), (64, 12, 6, 384, 384, True),
    (128, 7, 7, 256, 384, True), (128, 5, 5, 100, 640, False),
])  # fmt: skip
def test_persistent_blocks_of_a_backward_get_the_work_that_the_launch_has_counted(D, H, Hk, Nq, Nk, causal, persistent):
    """Eight blocks share the tiles of keys. dv tells the block."""
    stored = "store_rows(dv_map, dV_rows, dV, 1,"
    rung = persistent(8, stored, "for (float& x : dV) x = blockIdx.x;\n    " + stored)
    q, k, v, dout = random_inputs(1, H, Hk, Nq, Nk, D, torch.float16)
    _, _, dv = calls.backward(dout, q, k, v, *saved(q, k, v, dout, causal=causal), causal=causal, rung=rung)
    dv = dv[0].cpu()
    tiles = dv[:, ::128, 0]  # (heads, tiles)
    assert (dv == tiles.repeat_interleave(128, 1)[:, :Nk, None]).all()
    problem = launches.problem_of(ladder.BACKWARD["hopper"], q, k, causal=causal)
    keys = (torch.arange(tiles.shape[1]) * 128 - (Nk - Nq)).clamp(min=0) * causal
    work = (-(-Nq // problem.Br) - keys // problem.Br) * (H // Hk) + 1
    got = torch.stack([((tiles == b) * work).sum() for b in range(8)])
    assert got.tolist() == tile_scheduler.of_blocks(tile_scheduler.backward_work(problem), 8).tolist()


@needs_compiler
@needs_hopper
@pytest.mark.parametrize("D, N", [(64, 256), (64, 300), (128, 256)])
def test_a_tile_ends_with_the_next_keys_and_queries_there(D, N, persistent):
    """Also if it has a single step, as the last tile of a head at D = 64. This kernel waits for what comes anyway."""
    ends = "__syncthreads();  // nobody still reads dS_i, V or K_j"
    there = """if (next.tile >= 0) {
      barrier_wait(keys_full + next.round % KEY_STAGES, next.round / KEY_STAGES % 2);
      if (V_IN_REGISTERS) barrier_wait(values_full, next.round % 2);
      for (int s = step; s < step + STAGES - 1 && s < step + next.steps; s++) {
        barrier_wait(queries_full + s % STAGES, s / STAGES % 2);
      }
    }
    """
    rung = persistent(1, ends, there + ends)
    q, k, v, dout = random_inputs(1, 3, 1, N, N, D, torch.float16)
    out, lse = saved(q, k, v, dout, causal=True)
    grads = calls.backward(dout, q, k, v, out, lse, causal=True, rung=rung)
    assert is_right(grads, q, k, v, dout, causal=True)


@needs_compiler
def test_the_backward_where_head_dim_is_no_power_of_two():
    """At head_dim 96 of the 16 lanes that share a row in attention_delta four have no part of it."""
    q, k, v, dout = random_inputs(1, 2, 1, 70, 40, 96, torch.bfloat16)
    out, lse = calls.forward(q, k, v, rung="fa2")
    assert is_right(calls.backward(dout, q, k, v, out, lse, rung="fa2"), q, k, v, dout)


@needs_compiler
@pytest.mark.parametrize("fit", [2, 0])
def test_sections_of_rung_fa2_may_have_fewer_heads(fit, tmp_path):
    """Three heads in sections of two, which otherwise takes 100,000 keys, or of one, of which a part fits."""
    row = ladder.FORWARD["fa2"]
    text, numbers = (launches.HERE / row.file).read_text(), "(8 << 20) / D / Nk"
    assert text.count(numbers) == 1
    (tmp_path / row.file).write_text(text.replace(numbers, str(fit)))
    q, k, v, dout = random_inputs(1, 3, 1, 150, 150, 32, torch.bfloat16)
    got = calls.forward(q, k, v, rung=replace(row, file=str(tmp_path / row.file)), causal=True)
    assert is_right(got, q, k, v, dout, causal=True)


@needs_compiler
@pytest.mark.parametrize("Nk", [1, 9])
@pytest.mark.parametrize("rung, D", [("fa2", 32), *((rung, 64) for rung, *_ in HOPPER_RUNGS)])
def test_keys_beyond_the_last_one_give_nothing_to_dq(rung, D, Nk):
    """Their rows are zeros in the tile. But dS = -P * delta of one overflows here, and infinity times 0 is NaN."""
    q, dout = (torch.full((1, 1, 40, D), x, dtype=torch.float16, device=engine.device) for x in (0, 512))
    k, v = (torch.full((1, 1, Nk, D), x, dtype=torch.float16, device=engine.device) for x in (1, 64))
    out, lse = torch.full_like(q, 64), torch.full_like(q[..., 0], math.log(Nk), dtype=torch.float32)
    dq, dk, dv = calls.backward(dout, q, k, v, out, lse, rung=rung)
    assert not dq.any() and not dk.any()
    torch.testing.assert_close(dv, torch.full_like(dv, 40 * 512 / Nk), rtol=1e-3, atol=0)


FORWARDS, BACKWARDS = dict(blocks="forward"), dict(threads="reverse", blocks="reverse")
SCHEDULES = FORWARDS, BACKWARDS, dict(threads="random", blocks="random", seed=1)


def gradients(schedules, rung, D, causal, Nq, Nk, **options):
    """Those of several runs, without a GPU under several schedules.

    The blocks add large numbers to each dq, which nearly cancel, because rows of dS sum to 0: so the order shows in the
    sum.
    """
    q, k, v, dout = random_inputs(1, 2, 1, Nq, Nk, D, torch.bfloat16)
    k += 30
    out, lse = attention.forward(q, k, v, causal=causal)
    for schedule in schedules:
        with emulator.schedule(**schedule):
            yield step02.backward(dout, q, k, v, out.to(q.dtype), lse.float(), causal=causal, rung=rung, **options)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rung, D", PAIRS)
def test_deterministic_gradients_are_bit_equal(rung, D, causal):
    if causal and rung == "wgmma" and not GPU:
        pytest.skip("in a fixed order it has the backward of rung hopper")
    problem = rung, D, causal, *((1000, 5000) if GPU else (70, 350) if rung == "fa2" else (150, 700))
    first, *others = gradients(SCHEDULES, *problem, deterministic=True)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    if not GPU:  # there the schedule decides what a GPU may do
        first, other = gradients((FORWARDS, BACKWARDS), *problem)
        assert not torch.equal(first[0], other[0])


@needs_compiler
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "Hk, small",
    [
        (6, {"CACHE": 4 * 8 * 64 * (150 + 300), "SECTION": 4}),
        (6, {"CACHE": 0, "FEW_TILES": 0, "SECTION": 4}),
        (6, {"CACHE": 0, "FEW_TILES": 0, "LONG_SECTION": 0}),
        (2, {}),  # heads of queries are in groups, so the queries descend
    ],
)
def test_the_order_of_a_long_backward(Hk, small, deterministic, monkeypatch):
    """What takes many heads or many keys: six heads in sections of four, and each way through the queries."""
    for name, smaller in small.items():
        monkeypatch.setattr(tile_scheduler, name, smaller)
    monkeypatch.setattr(ladder.Problem, "heads_apart", False)
    monkeypatch.setattr(calls, "plans", Cache())
    q, k, v, dout = random_inputs(1, 6, Hk, 150, 300, 64, torch.bfloat16)
    out, lse = saved(q, k, v, dout, causal=True)
    grads = calls.backward(dout, q, k, v, out, lse, rung="hopper", causal=True, deterministic=deterministic)
    assert is_right(grads, q, k, v, dout, causal=True)


@needs_compiler
def test_attention_passes_deterministic_on():
    q, k, v, dout = random_inputs(1, 2, 1, 100, 300, 32, torch.bfloat16)
    k += 30

    def gradient(schedule, **options):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with emulator.schedule(**schedule):
            return torch.autograd.grad(step02.attention(*inputs, rung="fa2", **options), inputs, dout)[0]

    assert torch.equal(gradient(FORWARDS, deterministic=True), gradient(BACKWARDS, deterministic=True))
    assert GPU or not torch.equal(gradient(FORWARDS), gradient(BACKWARDS))


@needs_compiler
def test_what_cannot_be_deterministic_is_refused():
    q, k, v, dout = random_inputs(1, 1, 1, 20, 20, 32, torch.float32)
    out, lse = step02.forward(q, k, v, rung="scalar")
    for rung in (None, "scalar", "warp"):
        with pytest.raises(NotImplementedError, match="rung fa2 .* bfloat16 .*step03_triton"):
            step02.backward(dout, q, k, v, out, lse, rung=rung, deterministic=True)
    with pytest.raises(TypeError, match="deterministic must be True or False, got 1"):
        step02.backward(dout, q, k, v, out, lse, deterministic=1)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_a_device_that_is_not_the_current_one():
    assert torch.cuda.current_device() == 0
    q, k, v = (x.to("cuda:1").requires_grad_() for x in TestContract().example(N=70, D=96))
    out = step02.attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.cuda.current_device() == 0
    q, k, v, out = (x.detach() for x in (q, k, v, out))
    assert is_right((out, step02.forward(q, k, v, causal=True)[1], *grads), q, k, v, torch.ones_like(out), causal=True)


@pytest.mark.gpu
def test_the_current_stream_is_used():
    q, k, v = TestContract().example(N=300, D=64)
    expected = step02.forward(q, k, v)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on another stream would read q before it is filled
        late = torch.zeros_like(q).copy_(q)
        out, _ = step02.forward(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


def rungs_with_inputs(D=64, Nq=300, Nk=700):
    """(rung, its q, k, v and dout) of every rung here, in the dtype that it likes best."""
    for rung in step02.RUNGS:
        dtype = checks.supports_of(step02.SUPPORTS, rung)["dtypes"][0]
        yield rung, random_inputs(2, 4, 4, Nq, Nk, D, dtype)


def both(q, k, v, dout, **options):
    """out, lse, dq, dk, dv."""
    out, lse = step02.forward(q, k, v, **options)
    return out, lse, *step02.backward(dout, q, k, v, out, lse, **options)


def asked_for(function):
    """(its result, the bytes of GPU memory that it asked for) at its peak and beyond what was in use."""
    function()  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = function()
    return result, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.gpu
def test_memory():
    """Forward: out and lse. Backward: dq, dk, dv, for whole tiles delta, lse and a float32 dq, and counters."""
    for rung, (q, k, v, dout) in rungs_with_inputs():
        (out, lse), used = asked_for(partial(step02.forward, q, k, v, causal=True, rung=rung))
        assert used == out.nbytes + lse.nbytes, rung
        grads, used = asked_for(partial(step02.backward, dout, q, k, v, out, lse, causal=True, rung=rung))
        padded = 2 * 4 * -(-300 // 128) * 128 * 4  # of one float32 a row
        assert used <= sum(x.nbytes for x in grads) + padded * (64 + 2) + 8 * padded // 128, rung


@pytest.mark.gpu
def test_a_launch_that_is_kept_serves_other_tensors():
    """Tensors of the same shapes: first one tensor four times, then others, then unaligned ones; none is kept."""

    def moved(x):
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    for rung, inputs in rungs_with_inputs(Nq=310, Nk=310):
        before, kept = torch.cuda.memory_allocated(), []
        for q, k, v, dout in (4 * inputs[:1], inputs, [x.flip(2) for x in inputs], list(map(moved, inputs)), inputs):
            got = [x.cpu() for x in both(q, k, v, dout, causal=True, rung=rung)]
            assert is_right(got, *(x.cpu() for x in (q, k, v, dout)), causal=True)
            kept.append(len(calls.plans))
        assert kept[0] == kept[1] == kept[2] and kept[3] == kept[4], rung
        del q, k, v, dout, got
        assert torch.cuda.memory_allocated() == before, rung


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_gpu():
    """A launch makes no call but the driver's, which needs a context, if the allocator has the memory already."""
    for rung, inputs in rungs_with_inputs(Nq=320, Nk=320):
        both(*inputs, rung=rung)
        for own in (inputs, [x.clone() for x in inputs]):  # the kept tensor maps as they are, and moved
            with ThreadPoolExecutor(1) as thread:
                assert is_right(thread.submit(both, *own, rung=rung).result(), *inputs)


FIRST_WORK_OF_AUTOGRADS_THREAD = """
import torch
from steps.step02_fa2_cuda import attention
qkv = torch.randn(1, 384, 3, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
q, k, v = qkv.permute(2, 0, 3, 1, 4)
out = attention(q, k, v, causal=True, rung="{rung}")
dout = torch.randn_like(out)
spare = [torch.empty(2**24, device="cuda") for _ in range(8)]
del spare  # the allocator now has memory for the backward, which therefore makes no call of the CUDA runtime
out.backward(dout)
assert qkv.grad.isfinite().all()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("rung", [rung for rung in ("wgmma", "roles", "hopper", "fa2") if rung in step02.RUNGS])
def test_a_backward_is_the_first_work_of_autograds_thread(rung):
    code = FIRST_WORK_OF_AUTOGRADS_THREAD.format(rung=rung)
    done = subprocess.run([sys.executable, "-c", code], cwd=launches.HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TWO_THREADS_AND_A_SIGNAL = """
import signal, threading, time, torch
from steps.step02_fa2_cuda import forward

def repeated(N, count):
    q, k, v = torch.randn(3, 1, 1, N, 32, generator=torch.Generator().manual_seed(N))
    first, _ = forward(q, k, v)
    return all(torch.equal(forward(q, k, v)[0], first) for _ in range(count))

repeated(70, 1)  # From here on nothing has to be compiled.
signal.signal(signal.SIGALRM, lambda *_: time.sleep(1e-4))  # meanwhile the other thread runs
thread = threading.Thread(target=repeated, args=(90, 100))
signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
thread.start()
right = repeated(70, 100)
thread.join()
signal.setitimer(signal.ITIMER_REAL, 0)
print("right" if right else "wrong")
"""


@needs_compiler
@pytest.mark.skipif(GPU, reason="a signal's handler runs inside a launch of the emulation alone")
def test_a_signal_lets_no_second_thread_into_the_emulation():
    """The emulation keeps Python's lock while a kernel runs, except where it lets Python handle a signal."""
    command = [sys.executable, "-c", TWO_THREADS_AND_A_SIGNAL]
    done = subprocess.run(command, cwd=launches.HERE.parents[1], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.gpu
def test_a_cuda_graph_replays_it():
    for rung, (q, k, v, dout) in rungs_with_inputs():
        both(q, k, v, dout, causal=True, rung=rung)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = both(q, k, v, dout, causal=True, rung=rung)
        for x in (q, k, v, dout):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert is_right(replayed, q, k, v, dout, causal=True)


@pytest.mark.xdist_group("much GPU memory")  # they take turns
@pytest.mark.gpu
def test_more_than_2_to_the_31_numbers_in_one_head():
    Nq, Nk, D = 2**25 + 100, 40, 64  # q has 2^31 + 6400 numbers, 4.3 GB
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    for rung in step02.RUNGS:
        dtype = checks.supports_of(step02.SUPPORTS, rung)["dtypes"][0]
        dtype = torch.float16 if torch.float16 in ladder.FORWARD[rung].dtypes else dtype
        q, dout = (torch.randn(1, 1, n, D, device="cuda", dtype=dtype) for n in (Nq, 1))
        k, v = torch.randn(2, 1, 1, Nk, D, device="cuda", dtype=dtype)
        dout = dout.expand_as(q)
        out, lse = step02.forward(q, k, v, rung=rung)
        dq, _, _ = step02.backward(dout, q, k, v, out, lse, rung=rung)
        for rows in (slice(0, 100), slice(Nq - 100, Nq)):
            own = [x[:, :, rows] for x in (q, dout, out, lse, dq)]
            want = error.expected(own[0], k, v, own[1])
            assert not error.failures({"out": own[2], "lse": own[3], "dq": own[4]}, want), rung
        del q, dout, out, lse, dq


@pytest.mark.xdist_group("much GPU memory")  # they take turns
@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    B, H, N, D = 600, 1000, 64, 64  # 2.46e9 elements, 9.8 GB; k, v and dout are expanded and take no memory
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    q = torch.randn(B, H, N, D, device="cuda")
    k, v, dout = (torch.randn(1, 1, N, D, device="cuda").expand(B, H, -1, -1) for _ in range(3))
    out, lse = step02.forward(q, k, v, causal=True)
    dq, dk, dv = step02.backward(dout, q, k, v, out, lse, causal=True)
    for b, h in ((0, 0), (B - 1, H - 1)):
        own = [x[b : b + 1, h : h + 1] for x in (q, k, v, dout)]
        got = {name: x[b : b + 1, h : h + 1] for name, x in zip(error.NAMES, (out, lse, dq, dk, dv), strict=True)}
        assert not error.failures(got, error.expected(*own, causal=True))
