"""The contract as a test class. Each tests/test_stepNN_*.py derives a class from it and names its stage.

Every test goes through the stage's public functions. conftest.py makes the parameters, such as the cases, from the
stage's SUPPORTS.
"""

import contextlib
import functools
import inspect
import itertools
import math
import pickle
import re
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from reference import cases, error, mutants
from steps import catalogue, checks, engine
from steps.course.workbook import edges, exercises, one_rung
from support import kept_calls
from support.operands import DENSE, PLACES

PEERS_SIZES = [  # (H, Hk, Nq, Nk, head_dim, causal, whether q, k and v are views of one packed tensor)
    *((2, 2, 113, 113, D, True, False) for D in (8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224)),
    (2, 2, 1, 239, 64, False, False),
    (2, 2, 3, 799, 64, True, False),
    (2, 2, 64, 8192, 64, True, False),
    (16, 8, 128, 217, 64, True, False),
    (10, 2, 113, 203, 128, True, False),
    (4, 4, 384, 384, 64, True, True),
    (4, 4, 256, 256, 128, False, True),
]

# The options of every stage. checks.STAGE_WITH has the others.
COMMON = {"q", "k", "v", "dout", "out", "lse", "causal", "scale", "tile", "rung", "deterministic", "lacking"}
# {two extremes: (H, Hk, Nq, Nk, causal, scale)}; T is the longer side of a tile. reference/cases.py has each extreme
# alone, and a mistake may need both.
EXTREMES = {
    "a scale above 1 and rows that see no key": (1, 1, lambda T: 11, lambda T: 3, True, 4.0),
    "many heads that share one and sums in 16 bits": (64, 1, lambda T: 11, lambda T: 9, False, None),
    "grouped heads and several ragged tiles": (4, 2, lambda T: T + 5, lambda T: 2 * T + 3, True, None),
}


def switches():
    """What a call may change of the process while it runs, and has to leave as it was."""
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(engine.device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warn": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "interval": sys.getswitchinterval(),
        "GPU": torch.cuda.current_device() if engine.name == "cuda" else None,
    }


@contextlib.contextmanager
def unwritten_is_nan():
    """Inside, torch.empty gives NaN, so that a result that a kernel does not write shows, whatever memory held before.

    torch fills such memory where it is asked for deterministic algorithms. It only warns about operations that have
    none, such as cuBLAS's products on a GPU, and these warnings are not shown.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        assert torch.empty(9, device=engine.device).isnan().all()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*deterministic")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


class Contract:
    """The whole contract, which pytest runs on the `stage` of a derived class."""

    stage = None
    # The cases that are run without a GPU on the rungs beyond the first.
    few = ("ragged_causal", "more_queries_causal", "explicit_scale", "scores_200", "common_score", "large_scores",
           "head_dim_odd", "own_layouts")  # fmt: skip
    few_in_other_dtypes = ("ragged_causal", "large_scores")
    places = PLACES  # that the kernels alone take
    own_lse = ()  # rungs whose backward wants the lse of their own forward, to the last bit, where scores are huge

    def outputs(self, case, inputs, rung=None):
        """The results of a rung, by default the first, on a case. Stage 04 overrides it to run on several ranks."""
        with unwritten_is_nan():
            return one_rung.results(self.stage, rung or self.stage.SUPPORTS["rungs"][0], case, inputs)

    def results(self, q, k, v, rung=None, causal=False):
        """{name: tensor}: forward, and backward with dout = 1, on given tensors."""
        inputs = cases.Inputs(q, k, v, torch.ones_like(q), causal, None, None)
        return self.outputs(cases.Case("given", "given tensors"), inputs, rung)

    def forward(self, q, k, v, rung):
        """The rung's (out, lse) on given tensors."""
        return self.stage.forward(q, k, v, rung=rung)

    def test_case(self, case, dtype, rung):
        supports = one_rung.supports_of(self.stage, rung)
        inputs = cases.build(case, supports, dtype, engine.device)
        before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        got = self.outputs(case, inputs, rung)
        want = inputs.expected()
        bad = error.failures(got, want)
        assert not bad, f"{case.says}: (error, tolerance) = {bad}{diagnosis(supports, rung, inputs, got, want)}"
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for name, x in got.items():
            assert x.dtype == (lse_dtype if name == "lse" else dtype), name
        after = (inputs.q, inputs.k, inputs.v, inputs.dout)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "an input was overwritten"

    def test_sizes_around_the_tiles(self, every_rung):
        """One query or key less than whole tiles, whole tiles, and one more: a mask that is off by one shows here."""
        supports = one_rung.supports_of(self.stage, every_rung)
        whole = {name: x for name, x in supports.items() if name != "layouts"}  # Stage 04 then takes 4 ranks.
        for Nq, Nk, causal in around_the_tiles(*smallest_tile(supports), supports["nq_ne_nk"]):
            case = cases.Case("around", "N around a tile", lambda T, N=Nq: N, lambda T, N=Nk: N, H=1, causal=causal)
            x = cases.build(case, whole, supports["dtypes"][0], engine.device)
            got = self.outputs(case, x, every_rung)
            bad = error.failures(got, x.expected())
            assert not bad, f"{Nq} queries, {Nk} keys, causal={causal}: (error, tolerance) = {bad}"

    several_tiles = 40  # so many keys are more than one tile

    @pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # 0 * -inf, before it is masked
    def test_scores_that_are_minus_infinity(self, every_rung):
        q, k, v = self.example(N=self.several_tiles, rung=every_rung)
        q[..., 0], k[..., 0] = 1, 1
        half = q.shape[2] // 2
        q[1, 0, 5, 0] = -math.inf  # one row
        k[0, 1, :, 0] = -math.inf  # all rows of a head
        k[0, 0, :half, 0] = -math.inf  # the first keys, as if they were masked
        k[1, 1, half:, 0] = -math.inf  # the last keys, where a kernel may begin
        got = dict(zip(("out", "lse"), self.forward(q, k, v, every_rung), strict=True))
        for row in ((1, 0, 5), (0, 1)):
            masked = (got["out"][row] == 0).all() and (got["lse"][row] == -math.inf).all()
            assert masked, "a row whose scores are all -inf is as one that sees no key: out is 0, and lse -inf"
        for b, seen in ((0, slice(half, None)), (1, slice(half))):
            one = slice(b, b + 1), slice(b, b + 1)
            want = error.expected(q[one], *(x[one][:, :, seen] for x in (k, v)), q[one])
            bad = error.failures({name: x[one] for name, x in got.items()}, want)
            assert not bad, f"keys whose scores are -inf have to count as masked ones: (error, tolerance) = {bad}"

    def test_a_kernel_alone_has_the_default_scale(self, every_rung):
        forward, backward = self.kernels(every_rung)
        q, k, v = (x[:1, :1, :9] for x in self.example(rung=every_rung))
        saved = self.stage.forward(q, k, v, rung=every_rung)
        for alone, whole in zip(forward(q, k, v), saved, strict=True):
            assert torch.equal(alone, whole)
        grads = self.stage.backward(q, q, k, v, *saved, rung=every_rung)
        for alone, whole in zip(backward(q, q, k, v, *saved), grads, strict=True):
            torch.testing.assert_close(alone, whole)  # Not bit-equal where dq is added in any order.

    def test_a_single_number_is_not_empty(self):
        """The smallest q, k and v: out is v, and dv is dout."""
        rung = self.stage.SUPPORTS.get("own_backward", self.stage.SUPPORTS["rungs"])[0]  # of others dv is not compared
        D = min(one_rung.supports_of(self.stage, rung)["head_dims"])
        q, k, v = (x[:1, :1, :1, :D] for x in self.example(rung=rung))
        got = self.results(q, k, v, rung)
        want = error.expected(q, k, v, torch.ones_like(q))
        bad = error.failures(got, want)
        assert not bad and (got["dv"] == 1).all(), f"one query and one key: out is v, and dv is dout; {bad}"

    @pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)], ids=str)
    def test_results_of_no_number_have_their_shapes_and_dtypes(self, every_rung, sizes):
        """No batch entry, no head, no query or no key, in each dtype. There the functions return early."""
        own = one_rung.supports_of(self.stage, every_rung)
        B, H, Nq, Nk = sizes
        if Nq != Nk and not own["nq_ne_nk"]:
            pytest.skip("the stage takes Nq = Nk only")
        for dtype in own["dtypes"]:
            q = torch.ones(B, H, Nq, own["head_dims"][0], dtype=dtype, device=engine.device, requires_grad=True)
            k = q.new_ones(B, H, Nk, q.shape[3])
            out, lse = self.stage.forward(q, k, k, rung=every_rung)
            of_attention = self.stage.attention(q, k, k, rung=every_rung)
            grads = self.stage.backward(q, q, k, k, out, lse, rung=every_rung)
            for got, like in zip((out, of_attention, *grads), (q, q, q, k, k), strict=True):
                assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, like.shape, True) and not got.any()
            assert lse.dtype == checks.lse_dtype(q) and lse.shape == q.shape[:3] and (lse == -math.inf).all()
            assert of_attention.requires_grad and not out.requires_grad

    def test_forward_is_bit_equal_from_run_to_run(self, every_rung):
        """Also after a call on other tensors, of which nothing may be left."""
        q, k, v = (x[:1] for x in self.example(rung=every_rung))
        calls = (q, k, v), [x.flip(2) for x in (q, k, v)], (q, k, v)
        first, other, second = [self.results(*tensors, every_rung, causal=True) for tensors in calls]
        assert not torch.equal(first["out"], other["out"])
        for name in self.bit_equal(first, every_rung):
            same = torch.equal(first[name], second[name])
            assert same, f"the same call gives another {name}: is something read that an earlier call has left?"

    def bit_equal(self, results, rung):
        """Those of the results that are bit-equal from run to run."""
        return results.keys() if one_rung.supports_of(self.stage, rung)["deterministic"] else ("out", "lse")

    def test_one_tensor_lies_in_memory_unlike_the_others(self, every_rung):
        """The kernels themselves get it, as whoever copies their files out calls them."""
        forward, backward = self.kernels(every_rung)
        q, k, v = (x[:1, :1].repeat(1, 2, 1, 1) for x in self.example(N=5, rung=every_rung))
        saved = forward(q, k, v, causal=True)
        grads = backward(q, q, k, v, *saved, causal=True)
        inputs = {"dout": q, "q": q, "k": k, "v": v} | dict(zip(("out", "lse"), saved, strict=True))
        for place, name in itertools.product(self.places, inputs):
            unlike = PLACES[place](inputs[name])
            assert torch.equal(unlike, inputs[name])
            changed = inputs | {name: unlike}
            results = zip(grads, backward(**changed, causal=True), strict=True)
            if name in ("q", "k", "v"):
                again = forward(*(changed[x] for x in "qkv"), causal=True)
                results = (*results, *zip(saved, again, strict=True))
            for want, got in results:
                torch.testing.assert_close(got, want, msg=lambda text, at=(name, place): f"{at}: {text}")

    @pytest.mark.parametrize("order", DENSE)
    def test_dense_tensors_in_the_order_of_a_model(self, order, every_rung):
        """All inputs lie in memory as a model's do, without margins, where `empty_like` gives their strides, too."""
        q, k, v = (x[:2].repeat(1, 2, 1, 1) for x in self.example(N=5, rung=every_rung))
        how = {"causal": True, "rung": every_rung}
        results = []
        for place in (torch.Tensor.contiguous, DENSE[order]):
            dout, *inputs = (place(x) for x in (q * 0.5, q, k, v))
            saved = self.stage.forward(*inputs, **how)
            results.append((*saved, *self.stage.backward(dout, *inputs, *map(place, saved), **how)))
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want)

    def test_an_lse_that_is_off_by_the_last_bit(self, every_rung):
        """As of another kernel that sums in another order."""
        forward, backward = self.kernels(every_rung)
        q, k, v = (x[:1] for x in self.example(N=5, rung=every_rung))
        out, lse = forward(q, k, v)
        grads = backward(q, q, k, v, out, lse)
        for end in (-math.inf, math.inf):
            off = torch.nextafter(lse, torch.full_like(lse, end))
            for got, want in zip(backward(q, q, k, v, out, off), grads, strict=True):
                torch.testing.assert_close(got, want, atol=torch.finfo(q.dtype).eps, rtol=0.02)

    def test_a_P_that_rounding_puts_above_1_stays_finite(self, every_rung):
        """At scores of 10^12 the last bit of lse is worth thousands, and exp of that is infinite."""
        if every_rung in self.own_lse:
            pytest.skip("its backward adds up the scores in the order of its own forward, and needs no limit")
        forward, backward = self.kernels(every_rung)
        dtypes = one_rung.supports_of(self.stage, every_rung)["dtypes"]
        dtype = torch.bfloat16 if torch.float32 not in dtypes else torch.float32
        q, k, v, dout = torch.randn(4, 1, 1, 8, 32, dtype=dtype, device=engine.device)
        out, lse = forward(3e5 * q, 3e5 * k, v)
        lower = torch.nextafter(lse, torch.full_like(lse, -math.inf))
        finite = all(grad.isfinite().all() for grad in backward(dout, 3e5 * q, 3e5 * k, v, out, lower))
        assert finite, "rounding makes a P larger than 1, even infinite: let no exponent of the backward be above 0"

    def kernels(self, rung):
        """The rung's (forward, backward) without the stage's checks and copies."""
        if not hasattr(self.stage, "RUNGS"):
            pytest.skip("the stage's functions are its kernels")
        return self.stage.RUNGS[rung]

    @contextlib.contextmanager
    def without_launches(self, monkeypatch):
        """Inside, the kernels do all but the launch. Nothing of that is kept."""
        yield

    def test_a_rung_takes_what_supports_says_of_it(self, every_rung, monkeypatch):
        """Each of its dtypes and tiles at the least, the most and an odd head_dim. Others are refused, and it is said
        what the rung takes.
        """
        forward, backward = self.kernels(every_rung)
        own = one_rung.supports_of(self.stage, every_rung)
        head_dims, dtypes = own["head_dims"], own["dtypes"]
        odd = next((D for D in reversed(head_dims) if D % 2), head_dims[-1])
        tiled = one_rung.has_tiles(self.stage, every_rung)
        with self.without_launches(monkeypatch):
            for D, dtype in itertools.product({head_dims[0], odd, head_dims[-1]}, dtypes):
                q = torch.zeros(1, 1, 3, D, dtype=dtype, device=engine.device)
                for tile in (None, *(checks.tiles_of(own, D) if tiled else ())):
                    scale, options = checks.check_call(own, forward, (("q", q), ("k", q), ("v", q)), False, None, tile)
                    saved = forward(q, q, q, scale=scale, **options)
                    assert len(backward(q, q, q, q, *saved, scale=scale, **options)) == 3
        gaps = set(range(1, head_dims[-1] + 2)) - set(head_dims)  # and the head_dim behind the last one
        for D in {0, min(gaps), max(gaps), 257, 1025} - set(head_dims):
            self.refused(every_rung, D, dtypes[0], None, f"takes head_dim {checks.span(head_dims)}; got {D}.")
        for dtype in {torch.float64, torch.float32, torch.bfloat16, torch.float16} - set(dtypes):
            words = f"takes {', '.join(map(checks.short, dtypes))}; got {checks.short(dtype)}."
            self.refused(every_rung, head_dims[0], dtype, None, words)
        for D in (head_dims[0], odd, head_dims[-1]) if tiled else ():
            tiles = checks.tiles_of(own, D)
            for tile in {(7, 11), *own["tiles"], *self.stage.SUPPORTS["tiles"]} - set(tiles):
                self.refused(every_rung, D, dtypes[0], tile, f"{', '.join(map(str, tiles))}", f"; got {tile}.")

    def refused(self, rung, D, dtype, tile, *words):
        """The call is refused in these words, and what they advise works."""
        q = torch.zeros(1, 1, 3, D, dtype=dtype, device=engine.device)
        with pytest.raises((TypeError, ValueError), match=".*".join(map(re.escape, words))) as raised:
            self.stage.forward(q, q, q, rung=rung, tile=tile)
        if "Name no rung, or " in (message := str(raised.value)):
            for other in message.rpartition(", or ")[2].removesuffix(".").split(" or "):
                assert other in self.stage.SUPPORTS["rungs"], message
                assert checks.takes(one_rung.supports_of(self.stage, other), q), message
        other = re.search(r"\bsteps\.step(\d\d)_\w+ takes it\.", message)
        if other and not catalogue.unavailable(other[1]):
            assert checks.takes(catalogue.stage(other[1]).SUPPORTS, q), message

    @pytest.mark.parametrize("on", [False, True])
    def test_a_call_leaves_the_switches_as_they_are(self, on, monkeypatch):
        def fails(q, k, v, **options):
            torch.set_grad_enabled(not on)
            raise MemoryError

        q, k, v = (x[:1, :1] for x in self.example(N=5))
        with torch.set_grad_enabled(on), torch.autocast(engine.device, torch.bfloat16, enabled=on), unwritten_is_nan():
            before = switches()
            saved = self.stage.forward(q, k, v)
            self.stage.backward(q, q, k, v, *saved)
            self.stage.attention(q, k, v)
            assert switches() == before
            if hasattr(self.stage, "RUNGS"):
                with monkeypatch.context() as patch, pytest.raises(MemoryError):
                    patch.setitem(self.stage.RUNGS, self.stage.SUPPORTS["rungs"][0], (fails, fails))
                    self.stage.forward(q, k, v, rung=self.stage.SUPPORTS["rungs"][0])
                assert switches() == before
                self.stage.forward(q, k, v)

    @pytest.mark.parametrize("extremes", EXTREMES)
    def test_two_extremes_at_once(self, extremes, every_rung):
        H, Hk, Nq, Nk, causal, scale = EXTREMES[extremes]
        own = one_rung.supports_of(self.stage, every_rung)
        if H != Hk and not own["gqa"]:
            pytest.skip("the stage has no grouped heads")
        if not own["nq_ne_nk"]:
            pytest.skip("the stage takes Nq = Nk only")
        T = max(smallest_tile(own))
        case = cases.Case(extremes, extremes, lambda _: Nq(T), lambda _: Nk(T), H=H, Hk=Hk, causal=causal, scale=scale)
        dtype = next((dtype for dtype in own["dtypes"] if dtype.itemsize == 2), own["dtypes"][0])
        x = cases.build(case, {name: y for name, y in own.items() if name != "layouts"}, dtype, engine.device)
        bad = error.failures(self.outputs(case, x, every_rung), x.expected())
        assert not bad, f"{extremes}: (error, tolerance) = {bad}"

    def test_results_without_memory_are_like_real_ones(self):
        """In every dtype: the fake results that torch.compile plans with."""
        if not hasattr(self.stage, "RUNGS"):
            pytest.skip("the stage has no operators")
        names = (f"{self.stage.SUPPORTS['stage']}_{name}" for name in ("forward", "backward"))
        operators = [getattr(torch.ops.steps, name) for name in names]
        for dtype in self.stage.SUPPORTS["dtypes"]:
            q, k, v = (x[:1, :1].to(dtype) for x in self.example(N=5))
            saved = self.stage.forward(q, k, v)
            for operator, inputs in zip(operators, ((q, k, v), (q, q, k, v, *saved)), strict=True):
                torch.library.opcheck(operator, inputs, test_utils="test_faketensor")

    @pytest.mark.parametrize("where, meets", [("q", (1, 0, 5)), ("k", (1, 0)), ("v", (1, 0))])
    def test_a_nan_stays_in_the_row_of_its_query_or_the_head_of_its_key(self, where, meets, every_rung):
        q, k, v = self.example(rung=every_rung)
        clean = self.forward(q, k, v, every_rung)[0]
        {"q": q, "k": k, "v": v}[where][1, 0, 5, 2] = math.nan
        out = self.forward(q, k, v, every_rung)[0]
        there = out[meets].isnan()
        assert there.all() if where == "q" else there.any(), (
            f"a NaN that comes from {where} has to stay: do not replace NaN, choose before you subtract or divide"
        )
        out[meets] = clean[meets]
        assert torch.equal(out, clean), f"a NaN in one row of {where} changes results of other rows"

    def test_sums_over_many_tiles_are_not_rounded_to_16_bits(self, every_rung):
        """l and O are float32 whatever the dtype of the inputs."""
        own = one_rung.supports_of(self.stage, every_rung)
        narrow = [dtype for dtype in own["dtypes"] if dtype.itemsize == 2]
        if not narrow or "layouts" in own:  # A rank of stage 04 runs stage 03's kernels.
            pytest.skip("no 16 bits here")
        for dtype in narrow:
            x, want = edges.with_many_tiles(own, dtype)
            got = one_rung.on_rung(self.stage, every_rung).forward(x.q, x.k, x.v, **x.options)
            bad = error.failures(dict(zip(("out", "lse"), got, strict=True)), want)
            assert not bad, f"l or O is rounded to {dtype} in each tile: (error, tolerance) = {bad}"

    @pytest.mark.parametrize("ndim", [2, 3])
    def test_fewer_leading_dimensions(self, ndim):
        q, k, v = (x[0, 0] if ndim == 2 else x[0] for x in self.example())
        out, lse = self.stage.forward(q, k, v, causal=True)
        full, full_lse = self.stage.forward(*(x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v)), causal=True)
        assert torch.equal(out, full.reshape(q.shape)) and torch.equal(lse, full_lse.reshape(q.shape[:-1]))
        grads = self.stage.backward(torch.ones_like(q), q, k, v, out, lse, causal=True)
        rows = [x.reshape(1, -1, *x.shape[-2:]) for x in (torch.ones_like(q), q, k, v)]
        for grad, whole in zip(grads, self.stage.backward(*rows, full, full_lse, causal=True), strict=True):
            torch.testing.assert_close(grad, whole.reshape(q.shape))  # Not bit-equal where dq is added in any order.

    # Input that has to be refused: each `bad` is (change of the input, exception, words that the message must contain).
    def test_bad_input(self, bad):
        change, exception, words = bad
        arguments = change(*self.example(), self.stage.SUPPORTS)
        q, k, v, options = arguments if len(arguments) == 4 else (*arguments, {})
        with pytest.raises(exception) as raised:
            self.stage.forward(q, k, v, **options)
        for word in words:
            assert word in str(raised.value)
        if isinstance(q, torch.Tensor):
            saved = q, q[..., 0].real.float()
            with pytest.raises(exception):
                self.stage.backward(q, q, k, v, *saved, **options)

    def test_each_end_of_the_range_of_a_scale(self):
        """Both are taken, and the number beyond each is not."""
        q, k, v = (0 * x[:1, :1, :3] for x in self.example(N=5))
        for end, towards in (checks.FLOAT32.tiny, 0), (checks.FLOAT32.max * math.log(2), math.inf):
            self.stage.forward(q, k, v, scale=end)
            with pytest.raises(ValueError, match="scale must be a finite number > 0 that float32 can hold, times log2"):
                self.stage.forward(q, k, v, scale=math.nextafter(end, towards))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
    def test_what_a_refusal_advises_works(self):
        """What it says to convert with is carried out on what was refused."""
        q, k, v = (x[:1, :1] for x in self.example(N=5))
        nested = torch.nested.nested_tensor(list(k), layout=torch.strided)
        for k_given, advice in (
            (k.double() if k.dtype == torch.float32 else k.float(), r"Convert k with (k\.to\(q\))\.$"),
            (k.to_sparse(), r"Convert it with (k\.to_dense\(\))\.$"),
            (nested, r"Convert it with (\.to_padded_tensor\(0\.0\))\.$"),
        ):
            with pytest.raises(TypeError, match=advice) as raised:
                self.stage.forward(q, k_given, v)
            words = re.search(advice, str(raised.value))[1]
            converted = eval(f"k{words}" if words[0] == "." else words, {"k": k_given, "q": q})
            self.stage.forward(q, converted, v)
        with pytest.raises(TypeError, match=r"Convert with \.to\((torch\.float\w+)\)") as raised:
            self.stage.forward(q.int(), k.int(), v.int())
        dtype = eval(re.search(r"\.to\((torch\.\w+)\)", str(raised.value))[1], {"torch": torch})
        self.stage.forward(*(x.int().to(dtype) for x in (q, k, v)))
        if not self.stage.SUPPORTS["gqa"]:
            q = q.repeat(1, 2, 1, 1)
            with pytest.raises(NotImplementedError) as raised:
                self.stage.forward(q, k, v)
            words = re.search(r"repeat k and v with (\.repeat_interleave\(.*\))\.$", str(raised.value))[1]
            self.stage.forward(q, *(eval(f"x{words}", {"x": x, "H": 2, "Hk": 1}) for x in (k, v)))

    @pytest.mark.parametrize("right, wrong", [(True, 1), (False, 0), (1.0, True)], ids=str)
    def test_a_call_that_is_kept_skips_no_check(self, right, wrong):
        """The two are equal, and so they would be the same key."""
        name = "causal" if isinstance(right, bool) else "scale"
        q, k, v = self.example(N=5)
        # Stage 04 keeps calls that say how long the whole sequence is.
        length = {"S": q.shape[-2]} if "S" in inspect.signature(self.stage.forward).parameters else {}
        for _ in range(2):
            self.stage.forward(q, k, v, **{name: right}, **length)
        with pytest.raises(TypeError, match=f"{name} must be"):
            self.stage.forward(q, k, v, **{name: wrong}, **length)

    @pytest.mark.skipif(engine.name == "cuda", reason="sums in any order are not equal to the bit")
    def test_a_changed_call_between_usual_ones_is_what_it_is_alone(self, way):
        kept_calls.check(self.stage, way)

    @pytest.mark.parametrize("name", ["forward", "backward", "attention"])
    def test_an_option_that_the_stage_lacks_is_refused_by_the_name_of_who_has_it(self, name):
        function, stage = getattr(self.stage, name), self.stage.SUPPORTS["stage"]
        q, k, v = self.example(N=5)
        tensors = (q, q, k, v, q, q[..., 0].float()) if name == "backward" else (q, k, v)
        own = inspect.signature(function).parameters.keys() - COMMON
        assert all(checks.STAGE_WITH.get(option) == stage for option in own), own
        mask = "here it is mask=." if "mask" in own else "steps.step03_triton has it as mask."
        refused = {"is_causal": "here it is causal=, aligned at the bottom right.", "attn_mask": mask,
                   "softmax_scale": "here it is scale=."}  # fmt: skip
        for option, has in checks.STAGE_WITH.items():
            if has != stage:
                refused[option] = f"steps.{has} has it."
        refused["enable_gqa"] = "leave it out, as k and v may have fewer heads than q."
        if stage == "step03_triton":
            refused["cu_seqlens"] = "here they are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."
        for option, words in refused.items():
            with pytest.raises((TypeError, NotImplementedError)) as raised:
                function(*tensors, **{option: None})
            assert str(raised.value) == f"{stage}.{name} has no {option}; {words}"
            assert (raised.type is NotImplementedError) == ("steps." in words)
        with pytest.raises(TypeError, match=f"^{stage}.{name} got an unexpected keyword argument 'casual'"):
            function(*tensors, casual=True)

    @pytest.mark.parametrize("value", [1, None, "yes"])
    def test_a_deterministic_that_is_neither_true_nor_false(self, value):
        """`attention` refuses it too, although only a backward, which may never come, needs it."""
        parameters = inspect.signature(self.stage.attention).parameters
        if "deterministic" not in parameters:
            pytest.skip("the stage has no such argument")
        q, k, v = self.example()
        features = ({}, {"softcap": 2.0}) if "softcap" in parameters else ({},)
        for options in features:  # A call with a feature takes another way.
            with pytest.raises(TypeError, match="deterministic must be True or False, got"):
                self.stage.attention(q, k, v, deterministic=value, **options)
            with pytest.raises(TypeError, match="deterministic must be True or False, got"):
                self.stage.backward(q, q, k, v, q, q[..., 0].float(), deterministic=value, **options)

    def test_more_rows_than_32_bits_count(self):
        checks.check_length(2**31 - 2**16)
        few, _, _ = self.example()
        many = few[:1, :1, :1].expand(-1, -1, 2**31 - 2**16, -1)  # takes no memory
        pairs = ((many, few[:1, :1]), (few[:1, :1], many)) if self.stage.SUPPORTS["nq_ne_nk"] else ((many, many),)
        for q, k in pairs:
            with pytest.raises(ValueError, match=r"2\^31 - 2\^16 rows together; got \d{10}\."):
                self.stage.forward(q, k, k)

    @pytest.mark.parametrize("name", ["dout", "out", "lse"])
    def test_bad_saved_tensors(self, name):
        q, k, v = self.example()
        good = {"dout": q, "out": q, "lse": q[..., 0].float()}
        device = f"{name} must be .* on {q.device}, where q is; got .* on meta"
        for bad, kind, words in (
            (good[name][..., 1:], ValueError, name), (good[name].to(torch.int32), TypeError, name),
            ("saved", TypeError, name), (good[name].to("meta"), TypeError, device),
        ):  # fmt: skip
            with pytest.raises(kind, match=words):
                self.stage.backward(**good | {name: bad}, q=q, k=k, v=v)

    def example(self, N=19, D=32, rung=None):
        """q, k, v (2, 2, N, D) in the first dtype that the rung, by default the first, takes."""
        rng = torch.Generator().manual_seed(N)
        dtype = one_rung.supports_of(self.stage, rung or self.stage.SUPPORTS["rungs"][0])["dtypes"][0]
        return tuple(torch.randn(2, 2, N, D, generator=rng).to(engine.device, dtype) for _ in range(3))

    @pytest.mark.parametrize("ndim", [2, 3, 4])
    def test_gradients_of_attention_have_its_scale_and_the_dimensions_of_its_inputs(self, ndim):
        q, k, v = (x[:1, :1] if ndim == 2 else x[:1] if ndim == 3 else x for x in self.example())
        got = self.gradients(*(x.reshape(x.shape[4 - ndim :]) for x in (q, k, v)), causal=True, scale=0.3)
        want = error.expected(q, k, v, torch.ones_like(q), causal=True, scale=0.3)
        grads = {name: got[name].reshape(x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        assert not error.failures(grads, want)

    def test_two_threads_at_once(self):
        """As where a model runs in a thread of its own. Autograd may run the backward in yet another one."""
        inputs = [self.example(N=N) for N in (5, 9)]
        alone = [self.gradients(*tensors) for tensors in inputs]
        start = threading.Barrier(2)

        def repeated(tensors):
            start.wait()
            return [self.gradients(*tensors) for _ in range(3)]

        with ThreadPoolExecutor(2) as pool:
            together = pool.map(repeated, inputs)
            for want, runs in zip(alone, together, strict=True):
                for got in runs:
                    for name, x in got.items():
                        torch.testing.assert_close(x, want[name], atol=1e-5, rtol=1e-5)

    def gradients(self, q, k, v, **options):
        """{name: tensor}: the gradients that `attention` gives for dout = 1."""
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        self.stage.attention(*leaves, **options).backward(torch.ones_like(q))
        return dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))

    def test_results_are_contiguous(self, every_rung):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.example(N=5, rung=every_rung))
        out, lse = self.stage.forward(q, k, v, rung=every_rung)
        for x in (out, lse, *self.stage.backward(q, q, k, v, out, lse, rung=every_rung)):
            assert x.is_contiguous()

    def test_tensors_that_are_negated_when_they_are_read(self):
        q, k, v = self.example(N=5)
        out, lse = self.stage.forward(q, k, v)
        grads = self.stage.backward(q, q, k, v, out, lse)
        negated = [torch._neg_view(-x) for x in (q, q, k, v, out, lse)]
        for x, y in zip(self.stage.forward(*negated[1:4]), (out, lse), strict=True):
            assert torch.equal(x, y)
        for x, y in zip(self.stage.backward(*negated), grads, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    @pytest.mark.parametrize("kind", ["sparse_coo", "nested", "jagged"])
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
    def test_tensors_that_are_not_dense(self, kind, name):
        tensors = dict(zip("qkv", self.example(), strict=True))
        if kind == "sparse_coo":
            tensors[name] = tensors[name].to_sparse()
        else:
            layout = torch.strided if kind == "nested" else torch.jagged
            tensors[name] = torch.nested.nested_tensor(list(tensors[name]), layout=layout)
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got .*{kind.replace('jagged', 'nested')}"):
            self.stage.forward(**tensors)

    def test_tensors_without_memory(self):
        with pytest.raises(NotImplementedError, match="does not go with torch.func"):
            torch.func.functionalize(self.stage.forward)(*self.example())

    def test_a_tile_of_numpy_integers(self):
        q, k, v = self.example()
        rung = self.stage.SUPPORTS["rungs"][0]
        tile = one_rung.supports_of(self.stage, rung)["tiles"][0]
        out, _ = self.stage.forward(q, k, v, tile=np.array(tile), rung=rung)
        assert torch.equal(out, self.stage.forward(q, k, v, tile=tile, rung=rung)[0])

    def test_a_tile_for_a_rung_without_tiles(self, every_rung):
        forward, _ = self.kernels(every_rung)
        if "tile" in inspect.signature(forward).parameters:
            pytest.skip("the rung has tiles")
        tile = self.stage.SUPPORTS["tiles"][0]
        with pytest.raises(ValueError, match=rf"has no tiles; got tile={re.escape(str(tile))}\. Leave it out"):
            self.stage.forward(*self.example(N=5, rung=every_rung), tile=tile, rung=every_rung)

    @pytest.mark.parametrize("name", ["forward", "backward", "attention"])
    def test_a_function_s_options_its_docstring_and_that_it_can_be_pickled(self, name):
        function = getattr(self.stage, name)
        parameters = inspect.signature(function).parameters
        assert parameters["causal"].default is False
        assert all(parameters[option].default is None for option in ("scale", "tile", "rung"))
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__doc__ and {"q", "k", "v"} <= parameters.keys()

    def test_the_least_that_a_stage_supports(self):
        supports = self.stage.SUPPORTS
        number = supports["stage"][4:6]
        least = {"00": (torch.float32, torch.float64), "01": (torch.float32, torch.float16), "02": (torch.float32,)}
        all_three = torch.float32, torch.float16, torch.bfloat16
        old = engine.name == "cuda" and torch.cuda.get_device_capability()[0] < 8
        if not old:
            assert set(least.get(number, all_three)) <= set(supports["dtypes"])
        assert {32, 64} | ({128} if number != "00" else set()) <= set(supports["head_dims"])
        widest = checks.WIDEST.get(f"steps.{supports['stage']}", (supports["head_dims"][-1], supports["dtypes"]))
        taken = supports["head_dims"][-1], set(supports["dtypes"])  # of a small GPU less
        assert engine.name == "cuda" or taken == (widest[0], set(widest[1]))
        assert any(D & (D - 1) for D in supports["head_dims"]), "no head_dim but powers of two"
        assert any(Br < Bc for Br, Bc in supports["tiles"]) and any(Br > Bc for Br, Bc in supports["tiles"])
        assert supports["gqa"] or number in ("00", "01")
        assert supports["nq_ne_nk"] or number == "04"

    @pytest.mark.gpu
    @pytest.mark.parametrize("sizes", PEERS_SIZES, ids=str)
    def test_sizes_of_other_test_suites(self, every_rung, sizes):
        """Those at which flash-attention, PyTorch's SDPA and CS336 test their kernels."""
        H, Hk, Nq, Nk, D, causal, packed = sizes
        own = one_rung.supports_of(self.stage, every_rung)
        if D not in own["head_dims"] or Hk != H and not own["gqa"] or Nq != Nk and not own["nq_ne_nk"]:
            pytest.skip("the rung does not take it")
        rng = torch.Generator().manual_seed(D)
        q, dout = (torch.randn(2, H, Nq, D, generator=rng) for _ in range(2))
        k, v = (torch.randn(2, Hk, Nk, D, generator=rng) for _ in range(2))
        if packed:
            q, k, v = torch.randn(2, Nq, 3, H, D, generator=rng).unbind(2)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        for dtype in own["dtypes"]:
            x = cases.Inputs(*(x.to(engine.device, dtype) for x in (q, k, v, dout)), causal, None, None)
            got = self.outputs(cases.Case("given", "given tensors"), x, every_rung)
            bad = error.failures(got, x.expected())
            assert not bad, (dtype, bad)

    @pytest.mark.gpu
    def test_40_runs_are_bit_equal(self, every_rung):
        q, k, v = self.example(N=300, rung=every_rung)
        runs = [self.results(q, k, v, every_rung, causal=True) for _ in range(40)]
        for name in self.bit_equal(runs[0], every_rung):
            assert all(torch.equal(run[name], runs[0][name]) for run in runs), name


def diagnosis(supports, rung, inputs, got, want):
    """The known mistake whose results are equal to these, in words, or "" if there is none."""
    if got["out"].dtype == torch.float64 or got["out"].numel() > 10**6:
        return ""  # The mutants are computed in float32 and on the CPU.
    order, tile = exercises.visits(supports["stage"], rung)
    row = inputs, tile or inputs.tile or supports["tiles"][0], got, want
    found = mutants.diagnose([row], order or supports["order"])
    return "".join(f"\nIn this case, this equals what you get when {m.says}." for m in found)


def smallest_tile(supports):
    """(Br, Bc): the square tile that `cases.build` takes for most cases, or the first tile if none is square."""
    return min((tile for tile in supports["tiles"] if tile[0] == tile[1]), default=supports["tiles"][0])


def around_the_tiles(Br, Bc, nq_ne_nk):
    """Yields (Nq, Nk, causal) around one tile of queries and one or two tiles of keys.

    Causal, Nk - Nq takes every value from 2 below to 2 above whole tiles. Smaller tiles that divide Br and Bc, such as
    a backward's own, have borders at these sizes too.
    """
    for a, b in ((1, -1), (0, -1), (0, 0), (0, 1), (-1, 1)):
        yield (Br + a, 2 * Bc + b, True) if nq_ne_nk else (Br + b, Br + b, True)
    for a in (-1, 0, 1):
        yield Br + a, (Bc if nq_ne_nk else Br) + a, False


def wider(times, *tensors):
    """The tensors with a head_dim so many times as large."""
    return tuple(x.repeat(1, 1, 1, times) for x in tensors)


BAD_INPUT = {
    # name: (q, k, v, supports) -> (q, k, v) or (q, k, v, options); exception; words in its message
    "rank 1": (lambda q, k, v, s: (q[0, 0, 0], k, v), ValueError, ("q", "(N, D)", "(32,)")),
    "rank 5": (lambda q, k, v, s: (q[None], k[None], v[None]), ValueError, ("q", "(B, H, N, D)")),
    "ranks differ": (lambda q, k, v, s: (q, k[0], v[0]), ValueError, ("number of dimensions",)),
    "k's rank differs": (lambda q, k, v, s: (q, k[0], v), ValueError, ("number of dimensions",)),
    "v's rank differs": (lambda q, k, v, s: (q, k, v[0]), ValueError, ("number of dimensions",)),
    "k and v differ": (lambda q, k, v, s: (q, k, v[:, :, 1:]), ValueError, ("k and v", "18")),
    "batch differs": (lambda q, k, v, s: (q, k[:1], v[:1]), ValueError, ("batch",)),
    "head_dim differs": (lambda q, k, v, s: (q, k[..., 1:], v[..., 1:]), ValueError, ("head_dim", "31")),
    "heads no multiple": (lambda q, k, v, s: (q[:, :1], k, v), ValueError, ("multiple", "heads")),
    "no key head": (lambda q, k, v, s: (q, k[:, :0], v[:, :0]), ValueError, ("multiple", "heads")),
    "head_dim not taken": (lambda q, k, v, s: wider(40, q, k, v), ValueError, ("head_dim", "1280")),
    "integer tensors": (lambda q, k, v, s: (q.int(), k.int(), v.int()), TypeError, ("int32", "takes", "float32")),
    "complex tensors": (lambda q, k, v, s: (q + 0j, k + 0j, v + 0j), TypeError, ("complex", "takes", "float32")),
    "dtypes differ": (lambda q, k, v, s: (q, k.to(torch.complex64), v), TypeError, ("dtype", "k is")),
    "not a tensor": (lambda q, k, v, s: (q, k.tolist(), v), TypeError, ("k", "torch.Tensor", "list")),
    "None": (lambda q, k, v, s: (None, k, v), TypeError, ("q", "torch.Tensor", "NoneType")),
    "device": (lambda q, k, v, s: (q.to("meta"), k.to("meta"), v.to("meta")), ValueError, ("meta", "STEPS_ENGINE")),
    "devices differ": (lambda q, k, v, s: (q, k.to("meta"), v), TypeError, ("device", "meta")),
    "scale 0": (lambda q, k, v, s: (q, k, v, {"scale": 0.0}), ValueError, ("scale", "> 0")),
    "scale negative": (lambda q, k, v, s: (q, k, v, {"scale": -1.0}), ValueError, ("scale", "> 0")),
    "scale nan": (lambda q, k, v, s: (q, k, v, {"scale": math.nan}), ValueError, ("scale", "finite")),
    "scale inf": (lambda q, k, v, s: (q, k, v, {"scale": math.inf}), ValueError, ("scale", "finite")),
    "scale 1e-46": (lambda q, k, v, s: (q, k, v, {"scale": 1e-46}), ValueError, ("scale", "float32")),
    "scale a string": (lambda q, k, v, s: (q, k, v, {"scale": "0.1"}), TypeError, ("scale", "number")),
    "scale a bool": (lambda q, k, v, s: (q, k, v, {"scale": True}), TypeError, ("scale", "number")),
    "causal a number": (lambda q, k, v, s: (q, k, v, {"causal": 1}), TypeError, ("causal", "True or False")),
    "k and v differ in heads": (lambda q, k, v, s: (q, k, v[:, :1]), ValueError, ("k and v", "same shape")),
    "k and v differ in batch": (lambda q, k, v, s: (q, k, v[:1]), ValueError, ("k and v", "same shape")),
    "scale 3e38": (lambda q, k, v, s: (q, k, v, {"scale": 3e38}), ValueError, ("scale", "float32")),
    "scale 1e39": (lambda q, k, v, s: (q, k, v, {"scale": 1e39}), ValueError, ("scale", "float32")),
    "tile of floats": (lambda q, k, v, s: (q, k, v, {"tile": tuple(map(float, s["tiles"][0]))}), TypeError,
                       ("tile", "pair of integers")),
    "tile a number": (lambda q, k, v, s: (q, k, v, {"tile": 16}), TypeError, ("tile", "pair of integers")),
    "tile not offered": (lambda q, k, v, s: (q, k, v, {"tile": (7, 11)}), ValueError, ("tile", "(7, 11)", "Br, Bc")),
    "rung not offered": (lambda q, k, v, s: (q, k, v, {"rung": "warp9"}), ValueError, ("rung", "warp9")),
}  # fmt: skip


def lacking(supports):
    """Rows like those of BAD_INPUT for the features and dtypes that the stage does not have."""
    rows = {}
    if not supports["gqa"]:
        words = "step03_triton", "heads"
        rows["grouped heads"] = (lambda q, k, v, s: (q, k[:, :1], v[:, :1]), NotImplementedError, words)
    if not supports["nq_ne_nk"]:
        words = "step03_triton", "Nq"
        rows["Nq != Nk"] = (lambda q, k, v, s: (q, k[:, :, 1:], v[:, :, 1:]), NotImplementedError, words)
    taken = [name_of(dtype) for dtype in supports["dtypes"]]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        if dtype not in supports["dtypes"]:
            rows[name_of(dtype)] = (functools.partial(convert, dtype), TypeError, (name_of(dtype), "takes", *taken))
    return rows


def convert(dtype, q, k, v, supports):
    return q.to(dtype), k.to(dtype), v.to(dtype)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")
