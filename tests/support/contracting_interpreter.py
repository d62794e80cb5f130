"""Triton's interpreter with what compiled Triton does to a product and a sum: it rounds them once, not twice."""

import pytest

from steps import engine
from steps.workbook import interpreted


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    if engine.name == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        interpreted.faster(patch.setattr)
        interpreted.contract(patch.setattr)
        yield
