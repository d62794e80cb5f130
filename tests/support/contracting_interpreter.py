"""Triton's interpreter with what compiled Triton does to a product and a sum: it rounds them once, not twice."""

import pytest

from steps import engine
from steps.course.workbook import interpreted
from steps.step03_triton import memcheck


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    if engine.name == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        interpreted.faster(patch.setattr)
        interpreted.contract(patch.setattr)
        patch.setattr(memcheck, "_every", True)  # Kernels of the tests, and changed copies of the stage's, too.
        yield
