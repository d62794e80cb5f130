# SPDX-License-Identifier: MIT
"""Triton's interpreter with a tl.dot whose sums depend neither on the processor nor on which factor is the left one.

The forward computes S = Q K^T, the backward S^T = K Q^T. Where the scores are huge, P = 2^(c S - lse) is right only if
both sums are equal to the bit. On a GPU they are: a tensor core adds the products of a row and a column in the same
order, whichever of the two factors is the left one. The interpreter multiplies with NumPy, which calls a BLAS, and on
some processors that BLAS takes another order for S^T than for S. So the sums are computed in float64 here. There only
the last bits depend on the order, and rounding to float32 removes them, except in very few sums.

Also, a tile in a kernel has no truth value here. Python computes `a and b` as b if a is true. To Triton's interpreter
every tile is true, so that it would silently ignore a; the compiler computes a & b.

Also, a kernel takes a third less time, see `call`. All this is only for watched kernels, see memcheck.py.
"""

import sys

import numpy as np
from triton.runtime import interpreter

from . import memcheck

tritons_own, patch_tensor = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor
tritons_call = interpreter.InterpretedFunction.__call__
_launch, _replaced = None, set()  # the `spans` of a watched launch, and the modules whose functions it has called
_before_products = []  # see `before_each_product`


def before_each_product(look):
    """From now on look(dtype of the factors, precision) is called before each tl.dot of any kernel."""
    _before_products.append(look)


def create_dot(self, a, b, d, *how):
    """d + a b, for tl.dot."""
    for look in _before_products:
        look(a.dtype.scalar, how[0])
    watched = memcheck.spans is not None
    if not watched or a.data.dtype.kind != "f":  # integers, and the floats that NumPy does not know
        return tritons_own(self, a, b, d, *how)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def truth(tile):
    """The truth value of a number in a kernel. A tile raises NoTruthValue, except where Triton's own code asks."""
    if tile.handle.data.size > 1:
        if sys._getframe(1).f_globals["__name__"].partition(".")[0] == "triton":
            return True
        raise memcheck.NoTruthValue(
            f"a tile of shape {tile.handle.data.shape} is neither true nor false. Write & for `and`, | for `or` and ~ "
            "for `not`, with each comparison in brackets, and tl.where for `if`."
        )
    return bool(tile.handle.data)


def patch_lang_tensor(tensor, scope):
    patch_tensor(tensor, scope)
    if memcheck.spans is not None:
        scope.set_attr(tensor, "__bool__", truth)


def call(self, *args, **kwargs):
    """Calls a function that a kernel uses.

    Before each such call Triton replaces the functions of triton.language by the interpreter's. In one launch it is
    enough to do so once for each module that has such functions.
    """
    global _launch, _replaced
    if memcheck.spans is None:
        return tritons_call(self, *args, **kwargs)
    if memcheck.spans is not _launch:
        _launch, _replaced = memcheck.spans, set()
    if self.fn.__module__ in _replaced:
        return self.rewrite()(*args, **kwargs)
    _replaced.add(self.fn.__module__)
    return tritons_call(self, *args, **kwargs)


def prepare():
    """From now on watched kernels are interpreted in this way, and each of their loads and stores is checked."""
    memcheck.watch()
    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = create_dot
