"""Triton's interpreter for checks and tests: faster, and closer to what a GPU does.

The compiler turns a * b - c into a fused multiply-add, which rounds once and not twice. That is harmless almost
everywhere, but 2^(c S - c m) is then infinite where the scores are huge. A GPU multiplies the float32 factors of tl.dot
as TF32 unless it is told not to. The interpreter does neither by itself.
"""

import importlib
import traceback

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

ALIKE = "int1", "int32", "int64", "fp32"  # types of which an operation on two equal ones is done in that type


class OnlyOnAGPU(Exception):
    """An answer that is right in the interpreter and not on a GPU. `account` is as that of failure.account."""

    def __init__(self, message, frames):
        super().__init__(message)
        self.account = {"type": type(self).__name__, "message": message, "frames": frames}


def faster(replace=setattr):
    """From now on three things are left out: checking each addition of integers for overflow, computing anew what
    follows from a type, and making anew a constant. replace: as setattr.
    """
    replace(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))

    for part, key in ((tl.block_type, _of_block_type), (tl.tensor, _of_tensor)):
        replace(part, "__init__", _kept(part.__init__, key))
    numpys, plain = {}, interpreter._get_np_dtype

    def np_dtype(type):
        name = type.scalar.name
        if name not in numpys:
            numpys[name] = plain(type)
        return numpys[name]

    replace(interpreter, "_get_np_dtype", np_dtype)
    semantic = interpreter.interpreter_semantic
    replace(semantic, "scalar_constant", _constants(semantic.scalar_constant))
    replace(semantic, "binary_op_type_checking_impl", _operands(semantic.binary_op_type_checking_impl, semantic))


def _constants(plain):
    """The plain scalar_constant, which makes each constant of a type once."""
    found = {}

    def scalar_constant(value, dtype):
        key = type(value), value, dtype.name
        if key not in found:
            found[key] = plain(value, dtype)
        return found[key]

    return scalar_constant


def _operands(plain, semantic):
    """The plain check of an operation's two operands, without most of its questions where both are of one type."""

    def operands(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if arithmetic_check:
            lhs, rhs = _constant(lhs, rhs, semantic), _constant(rhs, lhs, semantic)
        if not (type(lhs) is type(rhs) is tl.tensor and lhs.dtype.name == rhs.dtype.name in ALIKE):
            return plain(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        return (lhs, rhs) if lhs.type.name == rhs.type.name else semantic.broadcast_impl_value(lhs, rhs)

    return operands


def _constant(x, other, semantic):
    """x as a constant of the tile's type if it is a number that becomes one; otherwise as it is."""
    if type(other) is tl.tensor and (
        other.dtype.name == "fp32" and type(x) in (int, float)
        or other.dtype.name == "int32" and type(x) is int and -(2**31) <= x < 2**31
    ):
        return semantic.scalar_constant(x, other.dtype)
    return x


def _kept(plain, key):
    """The plain __init__, which computes once what follows from a key. key(...): that, and the attributes beside it."""
    found = {}

    def init(self, *args):
        name, own = key(*args)
        if name not in found:
            plain(self, *args)
            found[name] = {part: x for part, x in vars(self).items() if part not in own}
        vars(self).update(found[name], **own)

    return init


def _of_block_type(element_ty, shape):
    return (element_ty.name, *shape), {"element_ty": element_ty}


def _of_tensor(handle, type):
    return type.name, {"handle": handle, "type": type, "dtype": type.scalar}


def contract(replace=setattr):
    """From now on a product and a sum are rounded once. replace: as setattr. Only float32, as in the accumulators."""
    multiply = InterpreterBuilder.create_fmul

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

    replace(InterpreterBuilder, "create_fmul", create_fmul)
    replace(InterpreterBuilder, "create_fadd", contracted(InterpreterBuilder.create_fadd, np.add))
    replace(InterpreterBuilder, "create_fsub", contracted(InterpreterBuilder.create_fsub, np.subtract))


class Products:
    """Watches every tl.dot of this process from now on. bits: those of the case's numbers, which a caller sets."""

    def __init__(self, folder):
        self.folder, self.bits, self.found = str(folder), 32, None
        importlib.import_module("steps.step03_triton.interpreter").before_each_product(self.look)

    def look(self, dtype, precision):
        """Notes the first product to which there is an objection, and where it stands."""
        if self.found is None and (says := self._objection(dtype, precision)):
            *stack, _, _ = traceback.extract_stack()  # The last two frames are this function and its caller, tl.dot.
            inside = [frame for frame in stack if frame.filename.startswith(self.folder)]
            frames = [(frame.filename.removeprefix(f"{self.folder}/"), frame.lineno) for frame in inside]
            self.found = OnlyOnAGPU(says, [frame for frame in frames if frame[0] != "steps/course/workbook/jobs.py"])

    def _objection(self, dtype, precision):
        if self.bits == 16 and dtype.primitive_bitwidth == 32:
            return (
                "The results are right, but the tensors have 16 bits, and these factors of tl.dot have 32: a GPU would "
                "not use its tensor cores for 16 bits, and be several times slower."
            )
        if dtype.primitive_bitwidth == 32 and dtype.is_floating() and str(precision).endswith(".TF32"):
            return (
                "The results are right in the interpreter, but a GPU would round these factors of tl.dot to 10 bits "
                "(TF32). input_precision says how float32 is multiplied."
            )
        return None

    def raise_found(self):
        """Raises OnlyOnAGPU for the first product to which there was an objection."""
        if self.found:
            raise self.found
