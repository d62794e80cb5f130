"""`python -m steps verify` on functions as somebody else writes them: right, mistaken, and of the wrong form."""

import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from reference import cases, mutants
from steps import __main__, engine
from steps import step00_naive as step00
from steps.__main__ import app
from steps.course.verify import anybody, process, verdict
from steps.course.workbook.capstone import step_3

SDPA = "torch.nn.functional:scaled_dot_product_attention"
here = sys.modules[__name__]
JUDGED = verdict.Judged


def verify(target, *options):
    """(exit code, text, what was found or None) of the command."""
    found = []
    with mock.patch.object(verdict, "Judged", lambda *parts: found.append(JUDGED(*parts)) or found[0]):
        done = CliRunner().invoke(app, ["verify", target, *options])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    if not found:
        return done.exit_code, done.output, None
    equals = [{"case": where, "mutants": [m.name for m in equal]} for where, equal in found[0].equals]
    return done.exit_code, done.output, found[0]._asdict() | {"equals": equals}


def verify_function(monkeypatch, function, *options):
    """The same for a function of this file's, which is found here under the name `given`."""
    monkeypatch.setattr(here, "given", function, raising=False)
    return verify(f"{__name__}:given", *options)


def says(name):
    """What the planted mistake of this name says."""
    return next(m.says for m in mutants.MUTANTS if m.name == name)


# torch's float32 backward takes exp(S - lse) with an lse of 10^11, which gives NaN. On a GPU torch's kernels end with
# "misaligned address" for tensors that begin at any element, and have no backward for H = 0.
MORE = ",offset,empty" if engine.name == "cuda" else ""
FITS_SDPA = ("--top-left", "--without", "large-scores" + MORE)


def test_sdpa_passes_where_its_causal_mask_is_claimed():
    code, text, written = verify(SDPA, *FITS_SDPA, "--dtype", "float32", "--dtype", "bfloat16", "--tile", "32")
    assert code == 0, text
    assert "WRONG" not in text and "equals what you get" not in text and written["equals"] == []
    names = [row["name"] for row in written["cases"]]
    assert {"more_queries_causal", "grouped_heads", "expanded", "head_dim_40"} <= set(names)
    assert "ok     causal with more queries than keys: aligned at the top left, float32" in text
    assert names.count("ragged") == 2 and "wide_tile" not in names
    assert {"out", "dq", "dk", "dv"} == set(written["cases"][0]["errors"])  # SDPA returns no lse.


def test_a_function_that_makes_two_mistakes_has_both_named(monkeypatch):
    def top_left_without_a_scale(q, k, v, is_causal=False, scale=None, enable_gqa=False):
        scale = None if scale == 0.3 else scale
        options = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    options = "--without", "backward" + MORE, "--tile", "16"
    _, _, written = verify_function(monkeypatch, top_left_without_a_scale, *options)
    named = {name for equal in written["equals"] for name in equal["mutants"]}
    assert {"top_left", "scale_ignored"} <= named


def test_a_property_that_does_not_exist_is_told_with_those_that_do():
    code, text, _ = verify(SDPA, "--without", "gqa,backwards")
    assert code == 2 and "backwards" in text and all(name in text for name in anybody.PROPERTIES), text
    listed = __main__.verify.__doc__.split("leaves out")[1].split("A function of another form")[0]
    assert re.findall(r"^    ([a-z-]+)  ", listed, re.M) == anybody.PROPERTIES


def test_what_is_not_claimed_is_left_out():
    options = "--without", ",".join(anybody.PROPERTIES), "--head-dim", "16", "--tile", "32"
    code, _, written = verify(SDPA, *options)
    assert code == 0
    names = [row["name"] for row in written["cases"]]
    scores = ["scores_200", "one_key_each", "rising", "falling", "negative_row", "common_score"]
    assert names == ["ragged", *scores, "head_dim_16"]
    assert written["cases"][0]["says"] == "N is a multiple of 32, float32"
    assert set(written["cases"][0]["errors"]) == {"out"}
    assert not any(case.causal for case, _ in anybody.Claims((torch.float32,), (32,), causal=False).cases(gpu=True))
    claims = anybody.Claims((torch.float32,), (16,), tile=48, ragged=False)
    shapes = [cases.build(case, claims.supports, dtype).q.shape for case, dtype in claims.cases(gpu=True)]
    assert all(N % 48 == 0 and D == 16 for _, _, N, D in shapes) and len(shapes) > 15


# ---- mistakes --------------------------------------------------------------------------------------------------------


def mistaken(name, tile, order, returns_lse):
    """Somebody's attention with the planted mistake: a function that autograd can differentiate."""
    kind = next(m.kind for m in mutants.MUTANTS if m.name == name)

    def run(base, q, k, v, dout, causal, scale):
        inputs = cases.Inputs(q, k, v, dout, causal, scale, None)
        try:
            chosen = kind if issubclass(kind, base) else base
            return chosen(inputs, tile, order).run()
        except mutants.NotApplicable:
            return base(inputs, tile, order).run()

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, scale):
            ctx.save_for_backward(q, k, v)
            ctx.options = causal, scale
            got = run(mutants.Forward, q, k, v, None, causal, scale)
            ctx.mark_non_differentiable(got["lse"])
            return got["out"], got["lse"]

        @staticmethod
        def backward(ctx, dout, _):
            grads = run(mutants.Backward, *ctx.saved_tensors, dout, *ctx.options)
            return grads["dq"], grads["dk"], grads["dv"], None, None

    def attention(q, k, v, causal=False, scale=None):
        out, lse = Attention.apply(q, k, v, causal, scale)
        return (out, lse) if returns_lse else out

    return attention


SOME = (
    ("first_maximum_kept", (16, 16), "fa2", False),
    ("tile_local_mask", (32, 16), "fa2", False),
    ("masked_tile_visited", (32, 32), "fa1", True),
    ("masked_row_not_guarded", (32, 32), "fa1", True),
    ("not_normalised", (32, 32), "fa1", False),
    ("lse_in_base2", (32, 32), "fa2", True),
    ("dk_wrong_transpose", (16, 16), "fa2", False),
    ("heads_not_summed", (32, 32), "fa2", True),
)


@pytest.mark.skipif(engine.name != "cpu", reason="the mutants are computed on the CPU")
@pytest.mark.parametrize("name, tile, order, returns_lse", SOME, ids=[row[0] for row in SOME])
def test_a_planted_mistake_is_named(monkeypatch, name, tile, order, returns_lse):
    function = mistaken(name, tile, order, returns_lse)
    code, text, written = verify_function(monkeypatch, function, "--without", "large-scores", "--tile", "32")
    assert code == 1
    (equal,) = written["equals"]
    assert equal["case"] == "" and name in equal["mutants"], text


def in_matrix_form(hidden_score, q, k, v, causal, scale):
    """Attention as most people write it: hidden scores are set to a number, and softmax does the rest."""
    k, v = (x.repeat_interleave(q.shape[1] // max(1, x.shape[1]), 1) for x in (k, v))
    S = scale * q @ k.mT
    if causal:
        seen = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
        S = S.masked_fill(~seen, hidden_score)
    return S.softmax(-1) @ v


@pytest.mark.parametrize("hidden_score", [-1e9, torch.finfo(torch.float32).min])
def test_a_large_negative_number_for_hidden_scores_is_named(monkeypatch, hidden_score):
    function = partial(in_matrix_form, hidden_score)
    _, text, written = verify_function(monkeypatch, function, "--without", "backward" + MORE, "--tile", "16")
    assert written["equals"] == [{"case": "", "mutants": ["masked_to_minus1e9"]}], text
    wrong = {row["name"] for row in written["cases"] if row["wrong"]}
    without_a_key = {"more_queries_causal", "three_without_a_key"}
    assert wrong == without_a_key | ({"large_scores"} if hidden_score == -1e9 else set())


def heads_dealt_in_turn(q, k, v, causal, scale):
    """Query head h reads key head h mod Hk, and a row that sees no key gets the mean, as in several packages."""
    k, v = (x.repeat(1, q.shape[1] // max(1, x.shape[1]), 1, 1) for x in (k, v))
    return in_matrix_form(torch.finfo(torch.float32).min, q, k, v, causal, scale)


def wrong_sign(q, k, v, causal, scale):
    """The mask is shifted the wrong way, and only where there are more keys than queries."""
    S = scale * q @ k.mT
    if causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool).triu(1 - max(0, k.shape[-2] - q.shape[-2]))
        S = S.masked_fill(hidden, torch.finfo(torch.float32).min)
    return S.softmax(-1) @ v


@pytest.mark.skipif(engine.name != "cpu", reason="they compute on the CPU")
@pytest.mark.parametrize(
    "function, without, names",
    [
        (heads_dealt_in_turn, "", ["masked_to_minus1e9", "heads_interleaved"]),
        (wrong_sign, ",gqa", ["wrong_sign_of_the_shift"]),
    ],
)
def test_what_differs_in_two_cases_only_is_named(monkeypatch, function, without, names):
    _, text, written = verify_function(monkeypatch, function, "--without", "backward" + without, "--tile", "16")
    assert [name for row in written["equals"] for name in row["mutants"]] == names, text


def off_by_little(q, k, v, causal, scale):
    """Only out, and nowhere 0, not even where it has to be."""
    return step00.forward(q, k, v, causal=causal, scale=scale)[0] + 1e-6


def with_the_strides_of_q(q, k, v, causal, scale):
    """k is read with them, and where it lies in memory in a layout of its own, everything is NaN."""
    if k.shape == q.shape:
        k = k.as_strided(k.shape, q.stride(), k.storage_offset())
    return step00.forward(q, k, v, causal=causal, scale=scale)


@pytest.mark.skipif(engine.name != "cpu", reason="they compute on the CPU")
@pytest.mark.parametrize("function", [off_by_little, with_the_strides_of_q])
def test_a_mistake_that_nobody_planted_gets_no_name(monkeypatch, function):
    code, _, written = verify_function(monkeypatch, function, "--without", "backward,gqa", "--tile", "16")
    assert code == 1 and written["equals"] == []


def rounded(x):
    return x.half().float()


def scores_in_half(q, k, v, causal, scale):
    """Only the scores are rounded. The function returns no lse."""
    S = rounded(scale * (q.float() @ k.float().mT))
    if causal:
        S = S.masked_fill(~torch.ones(S.shape[-2:]).tril(k.shape[-2] - q.shape[-2]).bool(), -math.inf)
    return (S.softmax(-1).nan_to_num(0) @ v.float()).to(q.dtype)


def sums_in_half(q, k, v, causal, scale):
    """Every sum is made in float16, one term after the other."""

    def product(a, b):
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for i in range(a.shape[-1]):
            total = rounded(total + rounded(a[..., i : i + 1] * b[..., i : i + 1, :]))
        return total

    S = rounded(product(q.float(), k.float().mT) * scale)
    return (product(S.softmax(-1), v.float())).to(q.dtype)


def factors_in_tf32(q, k, v, causal, scale):
    q, k, v = (((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in (q, k, v))
    return (scale * (q @ k.mT)).softmax(-1) @ v


def too_large(q, k, v, causal, scale):
    """As far off as with TF32, but always in the same direction."""
    return 1.0005 * (scale * (q @ k.mT)).softmax(-1) @ v


PATTERNS = {
    scores_in_half: ("float16", "That is the pattern when the scores are rounded to 16 bits before the softmax."),
    sums_in_half: ("float16", "That is the pattern when sums are made in 16 bits: those of the dot"),
    factors_in_tf32: ("float32", "factors of a product are rounded to 10 bits (TF32) or to 16 bits"),
    too_large: ("float32", None),
}


@pytest.mark.skipif(engine.name != "cpu", reason="they compute on the CPU")
@pytest.mark.parametrize("function", PATTERNS)
def test_a_rounding_is_named_by_the_pattern_of_sizes(monkeypatch, function):
    dtype, words = PATTERNS[function]
    options = "--without", "gqa,empty,causal,large-scores,backward,strides", "--dtype", dtype, "--tile", "16"
    options += ("--head-dim", "16") if function is sums_in_half else ()
    _, text, written = verify_function(monkeypatch, function, *options)
    assert written["equals"] == [] and "equals" not in text
    assert (words or "pattern") in text if words else "pattern" not in text, text
    failing = sum(bool(row["wrong"]) for row in written["cases"])
    assert text.count("first such entry") == min(3, failing) < failing, "details of the first three only"


def nothing_written(q, k, v, causal, scale):
    return torch.full_like(q, math.nan)


def test_where_all_is_nan_no_mistake_is_named(monkeypatch):
    _, text, written = verify_function(monkeypatch, nothing_written, "--without", "gqa,backward,strides")
    assert written["equals"] == [] and "Everything is NaN, as after many mistakes" in text


def last_key_of_65_left_out(q, k, v, causal, scale):
    if k.shape[2] % 64 == 1 < k.shape[2]:
        k, v = k[:, :, :-1], v[:, :, :-1]
    return (scale * (q @ k.mT)).softmax(-1) @ v


def test_a_last_tile_of_one_key_is_among_the_lengths(monkeypatch):
    without = "gqa,empty,causal,backward,strides"
    _, _, written = verify_function(monkeypatch, last_key_of_65_left_out, "--without", without, "--tile", "16")
    assert [row["name"] for row in written["cases"] if row["wrong"]] == ["one_past_64", "one_past_128"]
    assert {"one_past_16", "one_past_32"} < {row["name"] for row in written["cases"]}


def in_place_on_views(q, k, v, causal, scale):
    """In the style of short implementations: autograd refuses it."""
    out = torch.zeros_like(q)
    with torch.no_grad():
        parts = out.split(16, 2)
    for part, P in zip(parts, (scale * (q @ k.mT)).softmax(-1).split(16, 2), strict=True):
        part.mul_(0.5).add_(P @ v)
    return out


def test_where_autograd_fails_the_forward_is_judged(monkeypatch):
    code, text, written = verify_function(monkeypatch, in_place_on_views, "--without", "gqa,empty,causal,strides")
    first, *others = written["cases"]
    assert code == 1 and first["name"] == "backward"
    assert first["wrong"][0].startswith("RuntimeError: A view was created in no_grad mode")
    assert len(others) > 10 and not any(row["wrong"] for row in others), text
    assert text.splitlines()[-1] == "All that it is then asked holds with --without backward"


@pytest.mark.skipif(engine.name != "cpu", reason="on a GPU torch's kernels fail in other properties")
def test_options_that_would_help_and_what_torch_fails_too_are_told():
    small = "--tile", "32", "--head-dim", "32"
    _, text, written = verify(SDPA, *small)
    wrong = {row["name"]: row["wrong"] for row in written["cases"] if row["wrong"]}
    unequal = {"fewer_queries_causal", "more_queries_causal", "one_query_causal", "three_without_a_key"}
    assert wrong.keys() == unequal | {"large_scores"}
    assert wrong["large_scores"][-1] == "torch's scaled_dot_product_attention fails this, too"
    assert all("fails this, too" not in wrong[name][-1] for name in wrong if name != "large_scores")
    assert [equal["mutants"] for equal in written["equals"]] == [["top_left"]]
    assert "equals what you get when the causal mask is aligned at the top left." in text
    assert text.splitlines()[-1] == "All that it is then asked holds with --top-left --without large-scores"


NARROW_FIRST = "large_scores", "empty", "offset", "gqa", "strides", "nq_ne_nk"


@pytest.mark.parametrize("name", NARROW_FIRST)
def test_the_one_option_that_leaves_out_what_fails_is_told(name):
    """Where what fails is left out by this option, and by none that leaves out less."""
    claims = anybody.Claims((torch.float32,), (32,))

    def left_out(name):
        without = replace(claims, **{name: False})
        asked, fewer = ({case.name for case, _ in x.cases(gpu=False)} for x in (claims, without))
        return asked - fewer

    narrower = NARROW_FIRST[: NARROW_FIRST.index(name)]
    failing = left_out(name).difference(*map(left_out, narrower))
    rows = [{"name": case, "wrong": ["it"], "errors": {}} for case in sorted(failing)]
    assert rows and verdict.options(rows, claims, []) == ["--without", name.replace("_", "-")]


# ---- libraries that `verify --help` names ----------------------------------------------------------------------------


def plain(q, k, v, causal, scale):
    """Attention that autograd can differentiate, in float32."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return step00.attention(*(x.float() for x in (q, k, v)), causal=causal, scale=scale).to(q.dtype)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """In place of the library's: (B, N, H, D), 16 bits, at least one token."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.numel() and k.numel() and dropout_p == 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return plain(q, k, v, causal, softmax_scale).transpose(1, 2)


def tutorial_attention(q, k, v, causal, sm_scale, warp_specialize=True):
    """In place of the one of Triton's tutorial 06: (B, H, N, D), contiguous, whole tiles of 128 tokens."""
    assert q.dtype == torch.float16 and q.shape == k.shape == v.shape and all(x.is_contiguous() for x in (q, k, v))
    assert q.shape[2] % 128 == 0 < q.numel() and q.shape[3] in (16, 32, 64, 128, 256)
    return plain(q, k, v, causal, sm_scale)


@pytest.mark.skipif(engine.name != "cpu", reason="what stands for the libraries is slow on a GPU")
def test_the_wrapper_that_the_help_shows_fits(monkeypatch, tmp_path):
    """With the options that it names, the tutorial's interface being played by the function above."""
    monkeypatch.setitem(sys.modules, "tutorial", types.SimpleNamespace(attention=tutorial_attention))
    monkeypatch.setattr(sys, "path", [*sys.path])
    paragraphs = inspect.cleandoc(__main__.verify.__doc__).split("\n\n")
    ((before, wrapper),) = [pair for pair in itertools.pairwise(paragraphs) if "from tutorial import" in pair[1]]
    (tmp_path / "mine.py").write_text(wrapper.removeprefix("\b"))
    options = re.search(r"with (--[^:]*):$", before)[1].split()
    code, text, written = verify(f"{tmp_path}/mine.py:attention", *options)
    assert code == 0, text
    assert {"dq", "dk", "dv"} < set(written["cases"][0]["errors"]) and len(written["cases"]) > 8


# ---- functions of the wrong form -------------------------------------------------------------------------------------

FORMS = """
    import os, time, torch
    import torch.nn.functional as F

    value, calls = 3, []

    def raises(q, k, v, causal, scale):
        raise ValueError("head_dim 32\\nis not mine")

    def nothing(q, k, v, causal, scale): pass
    def three(q, k, v, causal, scale): return q, q, q
    def other_layout(q, k, v, causal, scale): return q.transpose(1, 2)
    def wrong_lse(q, k, v, causal, scale): return q + k + v, q
    def wide(q, k, v, causal, scale): return (q + k + v).double()
    def cut(q, k, v, causal, scale): return (q + k + v).detach()
    def no_way_to_v(q, k, v, causal, scale): return q + k + v.detach()
    def no_causal(q, k, v, scale=None): return q
    def no_scale(q, k, v, causal): return q
    def leaves(q, k, v, causal, scale): raise SystemExit(0)
    def never(q, k, v, causal, scale): time.sleep(600)
    def ends(q, k, v, causal, scale): os._exit(0)

    def overwrites(q, k, v, causal, scale):
        return F.scaled_dot_product_attention(q.mul_(scale), k, v, is_causal=causal, scale=1.0)

    def only_even(q, k, v, causal, scale, enable_gqa=False):
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("no groups")
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    def drifts(q, k, v, causal, scale, enable_gqa=False):
        calls.append(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
        return out * (1 + 2.0**-23 * (len(calls) % 2))
"""
SAYS = {
    "raises": "ValueError: head_dim 32 (forms.py, line 8)",
    "nothing": "it must return out or (out, lse), tensors; it returned NoneType",
    "three": "it must return out or (out, lse), tensors; it returned Tensor, Tensor, Tensor",
    "other_layout": "out must be (1, 2, 133, 32) for q (1, 2, 133, 32); it is (1, 133, 2, 32)",
    "wrong_lse": "lse must be (1, 2, 133) for q (1, 2, 133, 32); it is (1, 2, 133, 32)",
    "wide": "out must be torch.float32 like q; it is torch.float64",
    "cut": "out does not require grad, so there is no backward: mend that, or say --without backward",
    "no_way_to_v": "no gradient reaches v",
    "no_causal": "it has no parameter causal or is_causal: wrap it, or say --without causal",
    "no_scale": "it has no parameter scale or softmax_scale or sm_scale: wrap it, or say --without scale",
    "leaves": "SystemExit: 0",
    "value": "there is no function value in",
    "absent": "there is no function absent in",
    "leave": "there is no function leave in forms.py; did you mean leaves?",
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    file = tmp_path_factory.mktemp("theirs") / "forms.py"
    file.write_text(textwrap.dedent(FORMS))
    return file


SAYS = {f"forms.py:{name}": f"forms.py:{name}: {says}" for name, says in SAYS.items()} | {
    "absent.py:f": "there is no file absent.py",
    "absent.module:f": "ModuleNotFoundError: No module named 'absent'",
    "attention": "write FILE.py:function or package.module:function",
    "broken.py:f": "SyntaxError",
}


@pytest.mark.parametrize("target", SAYS)
def test_a_function_of_another_form_is_told_in_one_line(forms, target, monkeypatch):
    monkeypatch.chdir(forms.parent)
    Path("broken.py").write_text("def f(:\n")
    code, text, written = verify(target)
    assert code == 1 and written is None and "ok " not in text
    assert SAYS[target] in text.splitlines()[-1], text


def test_what_goes_wrong_in_a_later_case_is_told_beside_it(forms):
    code, text, written = verify(f"{forms}:only_even", *FITS_SDPA)
    assert code == 1
    wrong = {row["name"]: row["wrong"] for row in written["cases"] if row["wrong"]}
    assert wrong.keys() == {"grouped_heads", "one_kv_head", "pairs_of_heads"}
    assert wrong["one_kv_head"][0].startswith("NotImplementedError: no groups (forms.py, line ")
    assert "python -m steps verify --help" in text and text.splitlines()[-1].endswith("holds with --without gqa")


def test_a_forward_that_differs_from_run_to_run_is_noticed(forms):
    _, _, written = verify(f"{forms}:drifts", *FITS_SDPA[:-1], FITS_SDPA[-1] + ",backward")
    assert [row["name"] for row in written["cases"] if row["wrong"]] == ["bit_equal"]


def test_an_overwritten_input_is_noticed(forms):
    _, text, _ = verify(f"{forms}:overwrites", "--without", "backward")
    assert text.splitlines()[-1].endswith("it overwrites its input q")


@pytest.mark.skipif(engine.name == "cuda", reason="on a GPU compute-sanitizer checks this")
def test_a_triton_kernel_that_loads_beside_a_tensor_is_told_in_one_line(tmp_path):
    kernel, mask = Path(step_3.__file__).read_text(), "(row < N) & (column < D)"
    line = kernel[: kernel.index(mask)].count("\n") + 1
    (tmp_path / "mine.py").write_text(kernel.replace(mask, "column < D", 1))
    code, text = in_a_fork(f"{tmp_path}/mine.py:attention", "--without", "backward,gqa,causal")
    says = " ".join(text.split())  # It is wrapped at the terminal's width.
    assert code == 1
    assert re.search(rf"OutOfBounds: program .* bytes behind the last of \w+ \(mine.py, line {line}\)$", says), text


@pytest.mark.skipif(engine.name == "cuda", reason="a forked process cannot use the GPU")
def test_a_function_that_never_returns_is_stopped(forms, monkeypatch):
    monkeypatch.setattr(verdict, "FIRST", 0.5)
    code, text = in_a_fork(f"{forms}:never")
    assert code == 1
    assert text.splitlines()[-1].startswith("stopped after 0.5 s in the case: N is not a multiple of the tile")


def test_a_case_that_takes_long_is_named_and_so_it_is_at_ctrl_c(capsys, monkeypatch):
    monkeypatch.setattr(verdict, "PATIENCE", 0.02)
    with verdict.time_limit(60, "N = 1"):
        time.sleep(0.2)
    assert capsys.readouterr().out.startswith("not yet ended: N = 1. It may take 60 s")
    monkeypatch.setattr(verdict, "PATIENCE", 60)
    with pytest.raises(KeyboardInterrupt), verdict.time_limit(60, "N = 1"):
        raise KeyboardInterrupt
    assert capsys.readouterr().out == "stopped in the case: N = 1\n"


def in_a_fork(*words):
    """(exit code, text) of the command in a process of its own, which it may end or change for good."""
    with tempfile.TemporaryFile("w+") as file:
        if (pid := os.fork()) == 0:
            os.dup2(file.fileno(), 1)
            sys.stdout, sys.argv = open(1, "w", closefd=False), ["steps", "verify", *words]
            try:
                process.in_a_child(app, "python -m steps")
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code)
            finally:
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        return code, file.read()


def test_a_function_that_ends_the_process_has_not_passed(forms):
    command = [sys.executable, "-m", "steps", "verify", f"{forms}:ends"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "The function ended the process (exit code 0) before all properties were judged." in done.stdout


@pytest.mark.parametrize("code, ours", [(process.JUDGED, 0), (0, 1), (1, 1), (2, 2), (3, 1), (-11, 1)])
def test_the_command_ends_with_0_only_after_its_last_property(monkeypatch, code, ours):
    monkeypatch.setattr(sys, "argv", ["steps", "verify", "--help"])
    monkeypatch.setattr(subprocess, "run", lambda _: types.SimpleNamespace(returncode=code))
    for function, ends in ((__main__.main, ours), (partial(process.in_a_child, app, "steps"), process.JUDGED)):
        with pytest.raises(SystemExit) as end:
            function()
        assert end.value.code == ends


@pytest.mark.gpu
def test_a_gpu_shows_the_speed_beside_that_of_sdpa():
    code, text, written = verify(SDPA, *FITS_SDPA, "--dtype", "bfloat16", "--head-dim", "64")
    assert code == 0, text
    assert [row["pass"] for row in written["speed"]] == ["fwd", "fwd+bwd"]
    assert all(0.8 < row["tflops"] / row["sdpa_tflops"] < 1.25 for row in written["speed"]), written["speed"]


# ---- files as they are written elsewhere -----------------------------------------------------------------------------


def top_left(Q, K, V, causal=False, scale=None):
    """(out, lse) of the last two dimensions, aligned at the top left."""
    S = Q @ K.mT * (Q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), -math.inf)
    return S.softmax(-1) @ V, S.logsumexp(-1)


class OfTheCourse(torch.autograd.Function):
    """As an answer to CS336's assignment; the backward multiplies by the transposed P, and may forget delta."""

    forgets_delta = False

    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        O, L = top_left(Q, K, V, is_causal)
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx, dO):
        Q, K, V, O, L = ctx.saved_tensors
        scale = Q.shape[-1] ** -0.5
        P = (Q @ K.mT * scale - L[..., None]).exp()
        P = P.tril() if ctx.is_causal else P
        delta = 0 if OfTheCourse.forgets_delta else (dO * O).sum(-1, keepdim=True)
        dS = P * (dO @ V.mT - delta)
        return scale * dS @ K, scale * dS.mT @ Q, P.mT @ dO, None


def solve(Q, K, V, output, M, N, d):
    assert Q.shape == (M, d) == output.shape and K.shape == (N, d)
    output.copy_(top_left(Q, K, V)[0])


def custom_kernel(data):
    return top_left(*data)[0]


@pytest.mark.parametrize(
    "adapter, function, options",
    [
        ("cs336", OfTheCourse, ("--without", "large-scores")),
        ("leetgpu", solve, ()),
        ("kernelbot", custom_kernel, ()),
        ("flash_attn", flash_attn_func, ("--dtype", "bfloat16", "--dtype", "float16")),
    ],
)
def test_a_form_from_elsewhere_is_wrapped_by_its_adapter(adapter, function, options, monkeypatch):
    code, text, written = verify_function(monkeypatch, function, "--adapter", adapter, "--tile", "16", *options)
    assert code == 0, text
    errors = written["cases"][0]["errors"]
    assert ("lse" in errors) == (adapter == "cs336") and ("dq" in errors) == (adapter in ("cs336", "flash_attn"))


def test_a_mistake_behind_an_adapter_is_named(monkeypatch):
    monkeypatch.setattr(OfTheCourse, "forgets_delta", True)
    code, text, _ = verify_function(monkeypatch, OfTheCourse, "--adapter", "cs336", "--tile", "16")
    assert code == 1 and says("delta_missing") in text
    code, text, _ = verify_function(monkeypatch, solve, "--adapter", "leetcode")
    assert code == 2 and "there is no 'leetcode'" in text
