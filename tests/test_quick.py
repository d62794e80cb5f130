"""Verdicts are quick: what a check imports, and how much of a mutant is computed to rule it out."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from reference import cases, mutants
from steps import engine, step00_naive
from steps.course.verify import anybody, verdict
from steps.course.workbook import one_rung

CASES = "ragged_causal", "more_queries_causal", "fewer_queries_causal", "scores_200", "negative_row", "explicit_scale"
COMMANDS = "check 00.2", "hint 00.2", "solution 00.2", "check 02"


@pytest.mark.skipif(engine.name != "cpu", reason="whether there is a GPU, torch is asked")
def test_a_blank_check_and_a_hint_do_not_wait_for_torch(tmp_path):
    text = f"""
import sys
from typer.testing import CliRunner
from steps import __main__
for command in {COMMANDS}:
    done = CliRunner().invoke(__main__.app, command.split())
    assert done.exit_code == 0, done.output
    print(command, [name for name in ("torch", "numpy", "numba", "triton", "matplotlib") if name in sys.modules])
"""
    environment = os.environ | {"STEPS_MY": str(tmp_path), "STEPS_ENGINE": ""}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{command} []" for command in COMMANDS], done.stderr


def rows_of(mutant, tile=(16, 16)):
    """What `diagnose` takes, from a kernel with the mistake of this mutant, which rounds in another way."""
    supports = one_rung.supports_of(step00_naive, "tiled")
    rows = []
    for case in (case for case in cases.CASES if case.name in CASES):
        x = cases.build(case, supports, torch.float32)
        try:
            got = mutant.run(x, tile, "fa2")
        except mutants.NotApplicable:
            kind = mutants.Forward if issubclass(mutant.kind, mutants.Forward) else mutants.Backward
            got = kind(x, tile, "fa2").run()
        want, rng = x.expected(), torch.Generator().manual_seed(0)
        noise = {name: want.tolerance[name] * (torch.rand(t.shape, generator=rng) - 0.5) for name, t in got.items()}
        rows.append((x, tile, {name: torch.where(t == 0, t, t + noise[name]) for name, t in got.items()}, want))
    return rows


OF_STAGE_00 = [m for m in mutants.MUTANTS if not issubclass(m.kind, mutants.Ring)]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=[pytest.mark.long] * (n % 12 != 0)) for n, m in enumerate(OF_STAGE_00)],
)
def test_a_look_at_one_tile_rules_out_only_what_the_whole_rules_out(mutant):
    rows = rows_of(mutant)
    quick = mutants.diagnose(rows, "fa2")
    with mock.patch.object(mutants._Look, "at", return_value=None):
        assert quick == mutants.diagnose(rows, "fa2")


def computed(function, *arguments):
    """(how often a mutant was computed as a whole, how often one tile of it), in a call of the function."""
    runs = []

    def counted(run):
        return lambda self, only=None, **options: runs.append(only is None) or run(self, only, **options)

    with (
        mock.patch.object(mutants.Forward, "run", counted(mutants.Forward.run)),
        mock.patch.object(mutants.Backward, "run", counted(mutants.Backward.run)),
    ):
        function(*arguments)
    return sum(runs), len(runs) - sum(runs)


@pytest.mark.parametrize("name", ["tile_maximum", "strict_mask", "dq_scale_missing"])
def test_most_mutants_are_ruled_out_by_one_tile(name):
    rows = rows_of(next(m for m in OF_STAGE_00 if m.name == name))
    whole, part = computed(mutants.diagnose, rows, "fa2")
    assert whole <= 3 * len(rows) and part < len(OF_STAGE_00)


def v_mixed(q, k, v, causal, scale):
    return step00_naive.forward(q, k, v + 0.1 * v.roll(1, -1), causal=causal, scale=scale)[0]


def masked_rows_not_0(q, k, v, causal, scale):
    return step00_naive.forward(q, k, v, causal=causal, scale=scale)[0] + 1e-6


@pytest.mark.parametrize("function, most_whole, most_parts", [
    (v_mixed, 10, 1000),  # 785 looks; each mutant in each tile and order would be looked at 3,400 times
    (masked_rows_not_0, 150, 750),  # right but in three cases: 118 and 608
])  # fmt: skip
def test_verify_computes_no_mutant_again_for_what_does_not_change_it(function, most_whole, most_parts):
    claims = anybody.Claims((torch.float32,), (32,), 16, backward=False, gqa=False, large_scores=False)
    kept = []
    wrong = sum(bool(row["wrong"]) for row in verdict.judge(function, claims, kept))
    assert wrong == 3 if function is masked_rows_not_0 else wrong > 20
    whole, part = computed(verdict.mistakes, kept, 16)
    assert whole < most_whole and part < most_parts
