"""A test of the contract's cases: stage by stage they kill every planted mistake, and tell the mistakes apart."""

import importlib
from pathlib import Path

import pytest
import torch

from reference import cases, error, mutants

STAGES = sorted(path.parent.name for path in Path("steps").glob("step0*/__init__.py"))


# A short run has one stage for each order of the loops, 01 and 03, and the one with the fewest cases.
SHORT = "step01_fa1_numba", "step03_triton", "step04_ring"


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage in SHORT else pytest.mark.long) for stage in STAGES]
)
def test_every_applicable_mutant_is_killed_and_named(stage):
    supports = importlib.import_module(f"steps.{stage}").SUPPORTS
    matrix, twins = mutants.kill_matrix(supports)
    assert mutants.survivors(matrix) == []
    assert twins == []
    assert sum("killed" in row.values() for row in matrix.values()) >= 23


def test_no_case_is_skipped_by_every_stage():
    supports = [importlib.import_module(f"steps.{stage}").SUPPORTS for stage in STAGES]
    ran = {case.name for s in supports for case, _, reason in cases.select(s, gpu=True) if reason is None}
    assert ran == {case.name for case in cases.CASES}


@pytest.mark.parametrize("order", ["fa1", "fa2", "backwards"])
def test_without_a_mistake_nothing_is_killed(order):
    """Without a mistake the mutants' loops pass every case with a margin. So only its mistake kills a mutant."""
    supports = importlib.import_module("steps.step00_naive").SUPPORTS | {"gqa": True}
    for case, dtype, reason in cases.select(supports):
        if reason is None and dtype == torch.float32:
            x = cases.build(case, supports, dtype)
            want = x.expected()
            for kind in (mutants.Forward, mutants.Backward):
                for name, e in error.errors(kind(x, x.tile or (16, 16), order).run(), want).items():
                    assert e <= 0.8 * want.tolerance[name], (case.name, name)


def test_the_ring_without_a_mistake_passes_too():
    supports = importlib.import_module("steps.step04_ring").SUPPORTS
    for case, dtype, reason in cases.select(supports):
        if reason is None and dtype == torch.float32:
            x = cases.build(case, supports, dtype)
            want = x.expected()
            for name, e in error.errors(mutants.Ring(x, x.tile or (16, 16), "fa2").run(), want).items():
                assert e <= 0.8 * want.tolerance[name], (case.name, name)


def test_there_are_enough_and_each_says_what_it_is():
    forward = [m for m in mutants.MUTANTS if issubclass(m.kind, mutants.Forward)]
    assert len(forward) >= 15 and len(mutants.MUTANTS) - len(forward) >= 8
    assert len({m.says for m in mutants.MUTANTS}) == len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS)
