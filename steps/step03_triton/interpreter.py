# SPDX-License-Identifier: MIT
"""Triton's interpreter with a tl.dot whose sums depend neither on the processor nor on which factor is the left one.

The forward computes S = Q K^T, the backward S^T = K Q^T. Where the scores are huge, P = 2^(c S - lse) is right only if
both sums are equal to the bit. On a GPU they are: a tensor core adds the products of a row and a column in the same
order, whichever of the two factors is the left one. The interpreter multiplies with NumPy, which calls a BLAS, and on
some processors that BLAS takes another order for S^T than for S. So the sums are computed in float64 here. There only
the last bits depend on the order, and rounding to float32 takes them off, but for very few sums.
"""

import numpy as np
from triton.runtime import interpreter

from . import memcheck

tritons_own = interpreter.InterpreterBuilder.create_dot


def create_dot(self, a, b, d, *how):
    """d + a b, for tl.dot."""
    if a.data.dtype.kind != "f":  # integers, and the floats that NumPy does not know
        return tritons_own(self, a, b, d, *how)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def prepare():
    """From now on tl.dot is computed in this way, and each load and store is checked."""
    memcheck.watch()
    interpreter.InterpreterBuilder.create_dot = create_dot
