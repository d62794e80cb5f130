# SPDX-License-Identifier: MIT
"""Attention with every feature as operators of torch, which torch.compile, torch.export and fake tensors see as nodes.

    torch.ops.steps.step03_triton_flash_forward    (q, k, v, options)                 -> (out, lse)
    torch.ops.steps.step03_triton_flash_backward   (dout, q, k, v, out, lse, options) -> (dq, dk, dv, dmask, dsinks)
    torch.ops.steps.step03_triton_flash_carry      (q, k, v, out, lse, options)       changes out and lse in place

What traces a program does not look into them. torch.compile compiles a program anew for each value of a float that an
operator takes. It does not for a float that becomes a tensor, so the floats among the options that are not constant in
a compiled program reach the operators in a tensor, `traced`. `attend` and `gradients` compute; checked.py calls them
without an operator where nothing is traced. Needs flash.py, flash_gluon.py, decode.py, options.py and the files that
they name.
"""

import math

import torch

from . import decode, flash, flash_gluon, options

SCHEMA = (
    "bool causal=False, float? scale=None, int[]? tile=None, bool deterministic=False, SymInt[]? window=None, "
    "float? softcap=None, Tensor? mask=None, Tensor? sinks=None, Tensor? alibi_slopes=None, float dropout_p=0.0, "
    "Tensor? seed=None, SymInt? first_query=None, SymInt first_key=0, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? lengths_k=None, "
    "bool check=False, Tensor? traced=None"
)
SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor dsinks"  # Those not asked for are empty.
DEFAULTS = {"causal": False, "scale": None, "tile": None, "deterministic": False} | options.DEFAULTS | {"traced": None}
NAMES = tuple(DEFAULTS)
TENSORS = (*options.TENSORS, "traced")
OF_FLASH = [name for name in NAMES if name not in ("deterministic", "lengths_k", "check", "traced")]
NOT_TWICE = (
    "attention can be differentiated once, and this asks for a gradient of its gradient. "
    "steps.step00_naive or torch's own scaled_dot_product_attention in its math form has second derivatives."
)
FLOATS = ("scale", "softcap", "dropout_p")  # in the order of `traced`, which is NaN where the option itself holds


# ---- what is computed ------------------------------------------------------------------------------------------------


def as_4d(x):
    """x as (B, H, N, D), copied only if D is not contiguous."""
    x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_4d(lse):
    """lse as (B, H, N)."""
    return lse.reshape((1,) * (3 - lse.ndim) + tuple(lse.shape))


def launcher(q, k, f, carried):
    """(the function that launches the kernels of a call, the names of what it takes). q and k are as it gets them.

    It is decode.py's for few queries, flash_gluon.py's where that is faster, and otherwise that of flash.py.
    """
    free, asked = f["tile"] is None and not carried, options.asked(f)
    few = free and not {*asked} - {*options.OF_DECODE} and decode.fits(q, k)
    if f["lengths_k"] is not None or few:
        return decode.forward, ("causal", "scale", *options.OF_DECODE)
    if free and k.numel() and flash_gluon.fits(q, {name: f[name] for name in (*asked, "causal")}):
        return flash_gluon.forward, flash_gluon.OPTIONS
    return flash.forward, OF_FLASH


def backward_launcher(q, k, f):
    """The same of a backward, whose names have mask_gradient among them where it takes one."""
    free = f["tile"] is None and not f["deterministic"]
    if free and k.numel() and flash_gluon.fits_backward(q, options.asked(f)):
        return flash_gluon.backward, ("causal", "scale", "sinks")
    return flash.backward, (*OF_FLASH, "mask_gradient")


def attend(q, k, v, f, out=None, lse=None):
    """(out, lse) like q; those that are given are changed in place."""
    options.check_values(q, k, f)
    carried = {} if out is None else {"out": as_4d(out), "lse": rows_4d(lse)}
    if nothing_to_sum(q, k, f["sinks"]):
        nothing = q.new_zeros(q.shape), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        return (out, lse) if carried else nothing
    read = [as_4d(x) for x in (q, k, v)]
    function, names = launcher(*read[:2], f, carried)
    new_out, new_lse = function(*read, **carried, **{name: f[name] for name in names})
    return (out, lse) if carried else (new_out.reshape(q.shape), new_lse.reshape(q.shape[:-1]))


def nothing_to_sum(q, k, sinks):
    """Whether there is no query, or neither a key nor a sink to sum over."""
    return q.numel() == 0 or k.numel() == 0 and sinks is None


def gradients(dout, q, k, v, out, lse, f, mask_gradient):
    """[dq, dk, dv], dmask if mask_gradient, and dsinks if there are sinks."""
    options.check_values(q, k, f)
    like = [q, k, v, *([f["mask"]] if mask_gradient else []), *([] if f["sinks"] is None else [f["sinks"]])]
    if nothing_to_sum(q, k, f["sinks"]):
        return [x.new_zeros(x.shape) for x in like]
    tensors = *map(as_4d, (dout, q, k, v, out)), rows_4d(lse)
    function, names = backward_launcher(*tensors[1:3], f)
    f = f | {"mask_gradient": mask_gradient}
    grads = function(*tensors, **{name: f[name] for name in names})
    return [grad.reshape(x.shape) for grad, x in zip(grads, like, strict=True)]


def check(q, k, v, f):
    """Raises unless all tensors fit to each other."""
    options.check_inputs((("q", q), ("k", k), ("v", v)))
    options.check(q, k, f)


# ---- torch's operators, which take the options in the order of SCHEMA ------------------------------------------------


def in_order(f):
    """The options as the operators take them."""
    traced, of_all_values = None, [name for name in FLOATS if is_open(f[name])]
    if of_all_values:
        # Of the operations with a number, multiplication is one that torch.compile turns into one with a tensor.
        one = torch.ones((), dtype=torch.float64, device="cpu")
        traced = torch.stack([one * (f[name] if name in of_all_values else math.nan) for name in FLOATS])
        f = f | {name: DEFAULTS[name] for name in of_all_values}
    return *f.values(), traced


def is_open(x):
    """Whether x is a number for which torch.compile compiles a program of all values."""
    is_number = isinstance(x, (int, float))
    return torch.compiler.is_compiling() and is_number and not torch.fx.experimental.symbolic_shapes.has_static_value(x)


def by_name(arguments):
    """{name: value} of all options from an operator's arguments: torch leaves out the last ones if they are default."""
    return DEFAULTS | dict(zip(NAMES, arguments, strict=False))


def numbers_by_name(arguments):
    """The same where there are numbers in `traced`, after the checks that could not be made while a call was traced."""
    f = by_name(arguments)
    f |= options.read_integers(f)
    if f["traced"] is not None:
        numbers = zip(FLOATS, f["traced"].tolist(), strict=True)
        f |= {name: number for name, number in numbers if not math.isnan(number)}
    return f


def wants_dmask(arguments):
    """The last argument of the backward's operator, mask_gradient."""
    return len(arguments) > len(NAMES) and arguments[-1]


@torch.library.custom_op("steps::step03_triton_flash_forward", mutates_args=(),
                         schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse)")  # fmt: skip
def forward_operator(q, k, v, *arguments):
    return attend(q, k, v, numbers_by_name(arguments))


@torch.library.custom_op("steps::step03_triton_flash_backward", mutates_args=(),
                         schema=f"({SAVED}, {SCHEMA}, bool mask_gradient=False) -> ({GRADIENTS})")  # fmt: skip
def backward_operator(dout, q, k, v, out, lse, *arguments):
    f, mask_gradient = numbers_by_name(arguments), wants_dmask(arguments)
    dq, dk, dv, *more = gradients(dout, q, k, v, out, lse, f, mask_gradient)
    dmask = more.pop(0) if mask_gradient else q.new_empty(0)
    return dq, dk, dv, dmask, *(more or [q.new_empty(0)])


@torch.library.custom_op("steps::step03_triton_flash_carry", mutates_args=("out", "lse"),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, {SCHEMA}) -> ()")  # fmt: skip
def carry_operator(q, k, v, out, lse, *arguments):
    attend(q, k, v, numbers_by_name(arguments), out, lse)


@forward_operator.register_fake
def _(q, k, v, *arguments):
    check(q, k, v, by_name(arguments))
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@backward_operator.register_fake
def _(dout, q, k, v, out, lse, *arguments):
    f = by_name(arguments)
    check(q, k, v, f)
    options.check_saved(q, dout, out, lse)
    mask, sinks = f["mask"] if wants_dmask(arguments) else None, f["sinks"]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, mask, sinks))


@carry_operator.register_fake
def _(q, k, v, out, lse, *arguments):
    check(q, k, v, by_name(arguments))
    options.check_carried(q, out, lse)


def keep(ctx, inputs, output):
    q, k, v, *arguments = inputs
    ctx.options = by_name(arguments)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *(ctx.options.pop(name) for name in TENSORS))


def differentiate_operator(ctx, dout, dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    f = ctx.options | dict(zip(TENSORS, tensors, strict=True))
    # It is shorter where the last arguments are default.
    needed = {name for name, needs in zip(NAMES, ctx.needs_input_grad[3:], strict=False) if needs}
    f["sinks"] = f["sinks"] if "sinks" in needed else None
    arguments = [f[name] for name in NAMES]
    *grads, dmask, dsinks = backward_operator(dout, q, k, v, out, lse, *arguments, "mask" in needed)
    more = {"mask": dmask, "sinks": dsinks}
    return *grads, *(more[name] if name in needed else None for name in NAMES)


def refuse(ctx, *grads):
    raise RuntimeError(NOT_TWICE)


forward_operator.register_autograd(differentiate_operator, setup_context=keep)
backward_operator.register_autograd(refuse)
