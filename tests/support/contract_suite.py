"""The contract as a test class. Each tests/test_stepNN_*.py derives a class from it and names its stage.

Every test goes through the stage's public functions. conftest.py makes the parameters, such as the cases, from the
stage's SUPPORTS.
"""

import functools
import math

import pytest
import torch

from reference import cases, error, mutants
from steps import engine
from steps.workbook import exercises, one_rung


class Contract:
    """The whole contract, which pytest runs on the `stage` of a derived class."""

    stage = None
    # The cases that are run without a GPU on the rungs beyond the first.
    few = ("ragged_causal", "more_queries_causal", "scores_200", "head_dim_odd")
    few_in_other_dtypes = ("ragged_causal",)

    def outputs(self, case, inputs, rung=None):
        """The results of a rung, by default the first, on a case. Stage 04 overrides it to run on several ranks."""
        return one_rung.results(self.stage, rung or self.stage.SUPPORTS["rungs"][0], case, inputs)

    def results(self, q, k, v, rung=None, causal=False):
        """{name: tensor}: forward, and backward with dout = 1, on given tensors."""
        inputs = cases.Inputs(q, k, v, torch.ones_like(q), causal, None, None)
        return self.outputs(cases.Case("given", "given tensors"), inputs, rung)

    def out(self, q, k, v, rung):
        """The rung's out on given tensors."""
        return self.stage.forward(q, k, v, rung=rung)[0]

    def test_case(self, case, dtype, rung):
        supports = one_rung.limits(self.stage, rung)
        inputs = cases.build(case, supports, dtype, engine.device)
        before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        got = self.outputs(case, inputs, rung)
        want = error.expected(inputs.q, inputs.k, inputs.v, inputs.dout, causal=inputs.causal, scale=inputs.scale)
        bad = error.failures(got, want)
        assert not bad, f"{case.says}: (error, tolerance) = {bad}{diagnosis(supports, rung, inputs, got, want)}"
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for name, x in got.items():
            assert x.dtype == (lse_dtype if name == "lse" else dtype), name
        after = (inputs.q, inputs.k, inputs.v, inputs.dout)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "an input was overwritten"

    def test_forward_is_bit_equal_from_run_to_run(self, every_rung):
        q, k, v = (x[:1] for x in self.example(rung=every_rung))
        first, second = (self.results(q, k, v, every_rung, causal=True) for _ in range(2))
        for name in first.keys() if self.stage.SUPPORTS["deterministic"] else ("out", "lse"):
            assert torch.equal(first[name], second[name]), name

    def test_a_nan_in_a_query_stays_in_its_row(self, every_rung):
        q, k, v = self.example(rung=every_rung)
        clean = self.out(q, k, v, every_rung)
        q[1, 0, 5, 2] = math.nan
        out = self.out(q, k, v, every_rung)
        assert out[1, 0, 5].isnan().all()
        out[1, 0, 5] = clean[1, 0, 5]
        assert torch.equal(out, clean)

    @pytest.mark.parametrize("where", ["k", "v"])
    def test_a_nan_in_a_key_or_value_stays_in_its_head(self, where, every_rung):
        q, k, v = self.example(rung=every_rung)
        clean = self.out(q, k, v, every_rung)
        (k if where == "k" else v)[1, 0, 5, 2] = math.nan
        out = self.out(q, k, v, every_rung)
        assert out[1, 0].isnan().any()
        out[1, 0] = clean[1, 0]
        assert torch.equal(out, clean)

    @pytest.mark.parametrize("ndim", [2, 3])
    def test_fewer_leading_dimensions(self, ndim):
        q, k, v = (x[0, 0] if ndim == 2 else x[0] for x in self.example())
        out, lse = self.stage.forward(q, k, v, causal=True)
        full, full_lse = self.stage.forward(*(x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v)), causal=True)
        assert torch.equal(out, full.reshape(q.shape)) and torch.equal(lse, full_lse.reshape(q.shape[:-1]))
        grads = self.stage.backward(torch.ones_like(q), q, k, v, out, lse, causal=True)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]

    def test_supports_has_what_the_course_promises(self):
        supports = self.stage.SUPPORTS
        assert {32, 64} <= set(supports["head_dims"]) and any(D & (D - 1) for D in supports["head_dims"])
        assert any(Br < Bc for Br, Bc in supports["tiles"]) and any(Br > Bc for Br, Bc in supports["tiles"])

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

    @pytest.mark.parametrize("name", ["dout", "out", "lse"])
    def test_bad_saved_tensors(self, name):
        q, k, v = self.example()
        out, lse = self.stage.forward(q, k, v)
        good = {"dout": torch.ones_like(q), "out": out, "lse": lse}
        with pytest.raises(ValueError, match=name):
            self.stage.backward(**good | {name: good[name][..., 1:]}, q=q, k=k, v=v)
        with pytest.raises(TypeError, match=name):
            self.stage.backward(**good | {name: good[name].to(torch.int32)}, q=q, k=k, v=v)
        with pytest.raises(TypeError, match=name):
            self.stage.backward(**good | {name: "saved"}, q=q, k=k, v=v)

    def example(self, N=19, D=32, rung=None):
        """q, k, v (2, 2, N, D) in the first dtype that the rung, by default the first, takes."""
        rng = torch.Generator().manual_seed(N)
        dtype = one_rung.limits(self.stage, rung or self.stage.SUPPORTS["rungs"][0])["dtypes"][0]
        return tuple(torch.randn(2, 2, N, D, generator=rng).to(engine.device, dtype) for _ in range(3))


def diagnosis(supports, rung, inputs, got, want):
    """The known mistake whose results are equal to these, in words, or "" if there is none."""
    if got["out"].dtype == torch.float64 or got["out"].numel() > 10**6:
        return ""  # The mutants are computed in float32 and on the CPU.
    order, tile = exercises.visits(supports["stage"], rung)
    row = inputs, tile or inputs.tile or supports["tiles"][0], got, want
    found = mutants.diagnose([row], order or supports["order"])
    return "".join(f"\nThis equals what you get when {m.says}." for m in found)


def wider(times, *tensors):
    """The tensors with a head_dim so many times as large."""
    return tuple(x.repeat(1, 1, 1, times) for x in tensors)


BAD_INPUT = {
    # name: (q, k, v, supports) -> (q, k, v) or (q, k, v, options); exception; words in its message
    "rank 1": (lambda q, k, v, s: (q[0, 0, 0], k, v), ValueError, ("q", "(N, D)", "(32,)")),
    "rank 5": (lambda q, k, v, s: (q[None], k[None], v[None]), ValueError, ("q", "(B, H, N, D)")),
    "ranks differ": (lambda q, k, v, s: (q, k[0], v[0]), ValueError, ("number of dimensions",)),
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
