"""Tests of the features' cases: they kill every planted mistake, in plain torch and in stage 03's own code."""

import importlib
import shutil
from pathlib import Path

import pytest

from reference import error, feature_cases, feature_mutants, mutants
from steps import engine, step03_triton
from support.contracting_interpreter import interpreter  # noqa: F401  Pytest finds the fixture by its name.

SAYS = {m.name: m.says for m in feature_mutants.MUTANTS}


def test_every_mutant_is_killed_and_told_from_the_others():
    matrix, twins = feature_mutants.kill_matrix()
    assert [name for name, row in matrix.items() if "killed" not in row.values()] == []
    assert twins == []


@pytest.mark.parametrize("names", feature_cases.CASES, ids=" + ".join)
def test_without_a_mistake_nothing_is_killed(names):
    inputs = feature_cases.inputs(names)
    want = feature_cases.expected(*inputs)
    for name, e in error.errors(feature_mutants.Attention(*inputs).run(), want).items():
        assert e <= 0.8 * want.tolerance[name], name


def test_there_are_enough_and_each_says_what_it_is():
    assert len(set(SAYS.values())) == len(SAYS) == len(feature_mutants.MUTANTS) >= 50
    assert not SAYS.keys() & {m.name for m in mutants.MUTANTS}


# (mutant, case, file, what is replaced once in the file, by what)
PLANTED = [
    ("mask_batch_and_head_exchanged", "additive of each head", "scores.py",
     "b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]",
     "b.to(tl.int64) * strides[1] + h.to(tl.int64) * strides[0]"),
    ("mask_without_start", "additive for keys + packed", "scores.py", " + query * strides[2] + key * strides[3]", ""),
    ("boolean_mask_inverted", "boolean", "scores.py", "tl.where(M != 0,", "tl.where(M == 0,"),
    ("additive_mask_scaled", "additive", "scores.py", "M = M.to(tl.float32)", "M = M.to(tl.float32) * f.scale"),
    ("mask_gradient_scaled", "additive", "flash_kernels.py", "dM, mask=exists)", "dM * f.scale, mask=exists)"),
    ("mask_gradient_of_x", "softcap + additive + alibi", "flash_kernels.py", "_, dS, _ = tile_gradients(",
     "_, _, dS = tile_gradients("),
    ("mask_gradient_of_one_batch", "additive for keys", "flash.py", "sequences if shape[0] == 1 and not packed else 1",
     "1"),
    ("mask_gradient_of_one_head", "additive", "flash.py", "H if shape[1] == 1 else 1", "1"),
    ("window_left_exclusive", "window", "scores.py", "key >= query +", "key > query +"),
    ("window_right_exclusive", "window", "scores.py", "key <= query +", "key < query +"),
    ("first_query_ignored", "first", "scores.py", "if f.first_query is None:  #", "if True:  #"),
    ("first_key_ignored", "first", "scores.py", "tl.cast(f.first_query, tl.int32) - f.first_key", "f.first_query"),
    ("alibi_added", "alibi", "scores.py", "S -= head.slope", "S += head.slope"),
    ("alibi_of_size", "alibi of each batch", "scores.py", "S -= head.slope", "S -= tl.abs(head.slope)"),
    ("alibi_signed", "alibi", "scores.py", "tl.abs(first", "(first"),
    ("alibi_top_left", "alibi", "scores.py", "(j - i - seq.shift)", "(j - i)"),
    ("alibi_of_first_batch", "alibi of each batch", "scores.py", "seq.number * f.slope_strides[0]", "0"),
    ("softcap_without_derivative", "softcap", "flash_kernels.py", "dS * derivative", "dS"),
    ("softcap_without_scale", "softcap", "scores.py", "X * (f.scale / f.softcap)", "X / f.softcap"),
    ("sink_scaled", "boolean + causal + sinks", "flash.py", "record.in_float32(sinks)",
     "record.derive(lambda x: x.float() * 24**-0.5, sinks)"),  # of D = 24
    ("sink_in_base2", "additive + dropout + softcap + sinks", "flash.py", "record.in_float32(sinks)",
     "record.derive(lambda x: x.float() * 0.6931472, sinks)"),
    ("sink_not_in_lse", "sinks", "flash_kernels.py", "lse_i, kept_share = add_sink(", "_, kept_share = add_sink("),
    ("sink_gradient_without_delta", "causal + window + sinks + packed", "flash_kernels.py",
     "-P * tl.sum(products, 1)", "-P"),
    ("sink_gradient_negative", "sinks", "flash_kernels.py", "-P * tl.sum", "P * tl.sum"),
    ("dropout_drawn_anew", "dropout", "flash_kernels.py", "keep = kept(tile, f, seq, head)",
     "keep = kept(tile, f, seq._replace(number=seq.number + 1), head)"),
    ("dropout_not_scaled", "dropout", "flash.py", "256 / threshold if threshold else 0.0", "1.0"),
    ("dropout_threshold_truncated", "dropout", "flash.py", "round(256", "int(256"),
    ("dropout_before_sum", "dropout", "flash_kernels.py", "        m = m_new\n",
     "        P = tl.where(kept(tile, f, seq, head), P, 0.0)\n"
     "        m = m_new\n"),
    ("dropout_not_in_dp", "dropout", "flash_kernels.py", "tl.where(keep, dP * f.kept_scale, 0.0)", "dP"),
    ("dropout_without_first_key", "causal + first + dropout + left window", "scores.py",
     "j += f.first_key", "j += 0"),
    ("packed_top_left", "alibi + packed + first key", "scores.py", "shift = keys.N - queries.N - f.first_key",
     "shift = 0 - f.first_key"),
]  # fmt: skip
FIRST = {row[1]: row for row in reversed(PLANTED)}  # A short run has one mistake for each case.


@pytest.mark.skipif(engine.name != "cpu", reason="the mutants are computed on the CPU")
@pytest.mark.parametrize("name, case, file, old, new", [
    pytest.param(*row, id=row[0], marks=[] if row is FIRST[row[1]] else [pytest.mark.long]) for row in PLANTED
])  # fmt: skip
def test_the_kernels_with_a_mistake_give_the_mutants_results(name, case, file, old, new, tmp_path, monkeypatch):
    flash = changed_flash(name, file, old, new, tmp_path, monkeypatch)
    inputs = feature_cases.inputs(case.split(" + "))
    want, got = feature_cases.expected(*inputs), feature_cases.run(flash, *inputs, tile=(16, 16))
    assert error.failures(got, want)
    (mutant,) = [m for m in feature_mutants.MUTANTS if m.name == name]
    assert not mutants._differ(got, mutant.kind(*inputs).run(), want.tolerance)


def changed_flash(name, file, old, new, tmp_path, monkeypatch):
    """flash.py in a package of its own, with one piece of text of a file replaced."""
    package = tmp_path / f"with_{name}"
    (package / "features").mkdir(parents=True)
    stage = Path(step03_triton.__file__).parent
    for path in (stage.parent / "cached.py", stage / "replay.py"):
        shutil.copy(path, package)
    for each in ("flash.py", "flash_kernels.py", "scores.py", "tiles.py"):
        text = (stage / "features" / each).read_text()
        if each == file:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (package / "features" / each).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(f"{package.name}.features.flash")
