"""Triton's interpreter with what compiled Triton does to a product and a sum: it rounds them once, not twice.

The compiler turns a * b - c into a fused multiply-add. That is harmless almost everywhere, but 2^(c S - c m) is then
infinite where the scores are huge. NumPy rounds the product, so the plain interpreter does not show it.
"""

import numpy as np
import pytest
from triton.runtime import interpreter as triton_interpreter

from steps import engine
from steps.step03_triton import memcheck


def contract(patch: pytest.MonkeyPatch):
    """Lets the interpreter contract until the patch is undone. Only float32, as in the kernels' accumulators."""
    builder = triton_interpreter.InterpreterBuilder
    multiply, add, subtract = builder.create_fmul, builder.create_fadd, builder.create_fsub

    def create_fmul(self, lhs, rhs):
        product = multiply(self, lhs, rhs)
        if product.data.dtype == np.float32:
            product.attr["factors"] = lhs.data, rhs.data
        return product

    def contracted(plain, operation):
        def create(self, lhs, rhs):
            result = plain(self, lhs, rhs)
            if result.data.dtype == np.float32 and ("factors" in lhs.attr or "factors" in rhs.attr):
                # A product of two float32 numbers is exact in float64. Of two products the right one is fused.
                a, b = (rhs if "factors" in rhs.attr else lhs).attr["factors"]
                with np.errstate(all="ignore"):
                    exact = a.astype(np.float64) * b
                    operands = (lhs.data, exact) if "factors" in rhs.attr else (exact, rhs.data)
                    result.data = operation(*operands).astype(np.float32)
            return result

        return create

    patch.setattr(builder, "create_fmul", create_fmul)
    patch.setattr(builder, "create_fadd", contracted(add, np.add))
    patch.setattr(builder, "create_fsub", contracted(subtract, np.subtract))


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Triton's interpreter, made a third faster, and contracting products and sums as the compiler does.

    The interpreter replaces triton.language's functions anew at each call of a helper, and checks each integer addition
    for overflow. The first replacement is enough, and the check never fails here.
    """
    if engine.name == "cuda":
        yield
        return
    call = triton_interpreter.InterpretedFunction.__call__

    def helper(self, *args, **kwargs):
        if self.fn.__module__.startswith("triton"):
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_interpreter.InterpretedFunction, "__call__", helper)
        unchecked = triton_interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(triton_interpreter.interpreter_builder, "options", unchecked)
        contract(patch)
        patch.setattr(memcheck, "_every", True)  # Kernels of the tests, and changed copies of the stage's, too.
        yield
