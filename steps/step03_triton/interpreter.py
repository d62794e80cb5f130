# SPDX-License-Identifier: MIT
"""Triton's interpreter with products whose sums do not depend on the processor, nor on which factor is the left one.

The forward computes S = Q K^T, the backward S^T = K Q^T. Where the scores are huge, P = 2^(c S - lse) is right only if
both sums are equal to the bit. On a GPU they are, because a tensor core adds the products of a row and a column in an
order of its own. The interpreter multiplies with NumPy, which calls a BLAS, and on some processors that BLAS takes
another order for S^T than for S. In float64 only the last bits of a sum depend on the order, and rounding to float32
takes them off.
"""

import numpy as np
from triton.runtime import interpreter


def create_dot(self, a, b, d, *how):
    """d + a b, for tl.dot."""
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def sum_alike():
    """From now on tl.dot is computed in this way."""
    interpreter.InterpreterBuilder.create_dot = create_dot
