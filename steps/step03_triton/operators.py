# SPDX-License-Identifier: MIT
"""Attention with every feature as people call it: checked, differentiable, and one operator for torch.compile.

    attention(q, k, v, causal=True, dropout_p=0.1)       differentiable in q, k, v and in an additive mask
    forward, backward                                    the two halves
    set_deterministic(seed), dropout_mask(seed, ...)     for tests: which entries dropout keeps

    torch.ops.steps.step03_triton_flash_forward    (q, k, v, options)                 -> (out, lse)
    torch.ops.steps.step03_triton_flash_backward   (dout, q, k, v, out, lse, options) -> (dq, dk, dv, dmask)
    torch.ops.steps.step03_triton_flash_carry      (q, k, v, out, lse, options)       changes out and lse in place

torch.compile, torch.export and fake tensors see these operators as single nodes, and do not look into them. The
functions check their arguments before they call an operator; while a call is traced, the operators do. torch.compile
compiles a program anew for each value of a float that an operator takes. It does not for a float that becomes a tensor,
so the floats among the options that are not constant in a compiled program reach the operators in a tensor, `traced`.

Other calls go around the operators. The seed of dropout is a tensor, too; see dropout.py. Needs flash.py, decode.py,
options.py, dropout.py and the files that they name.
"""

import inspect
import math

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import decode, flash, options
from .dropout import draw_seed

SCHEMA = (
    "bool causal=False, float? scale=None, int[]? tile=None, SymInt[]? window=None, float? softcap=None, "
    "Tensor? mask=None, Tensor? alibi_slopes=None, float dropout_p=0.0, Tensor? seed=None, SymInt? first_query=None, "
    "SymInt first_key=0, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor? lengths_k=None, bool check=False, Tensor? traced=None"
)
SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dmask"  # dmask is empty unless it is asked for
DEFAULTS = {"causal": False, "scale": None, "tile": None} | options.DEFAULTS | {"traced": None}
NAMES = tuple(DEFAULTS)
TENSORS = (*options.TENSORS, "traced")
NOT_TWICE = (
    "attention can be differentiated once, and this asks for a gradient of its gradient. "
    "steps.step00_naive or torch's own scaled_dot_product_attention in its math form has second derivatives."
)
SEED, SEEDS = options.TENSORS.index("seed"), range(-(2**63), 2**63)
FLOATS = ("scale", "softcap", "dropout_p")  # in the order of `traced`, which is NaN where the option itself holds


def with_features(function):
    """The function with the names and defaults of the features in its signature, in the place of **features."""
    signature = inspect.signature(function)
    own = [x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD]
    more = [inspect.Parameter(name, own[-1].kind, default=default) for name, default in options.DEFAULTS.items()]
    function.__signature__ = signature.replace(parameters=own + more)
    return function


def functions(forwards, backwards):
    """(forward, backward, attention) by two functions that check and compute what is not traced.

    They take the tensors first: forwards(q, k, v, out, lse, *features) and backwards(dout, q, k, v, out, lse,
    *features), where the features are those of options.TENSORS, or None. Everything else they take by name.
    """

    @with_features
    def forward(q, k, v, *, causal=False, scale=None, tile=None, out=None, lse=None, **features):
        """Attention and its log-sum-exp, (out, lse), without a gradient.

        q (B, H, Nq, D), k and v (B, Hk, Nk, D), float32, float16 or bfloat16; fewer leading dimensions are accepted. H
        is a multiple of Hk. out like q. lse (B, H, Nq) float32, the natural logarithm of the sum of exp of the final
        scores, before dropout. The scores are made in this order, where query i stands at pos = i + first_query, and
        key j at key = j + first_key:

            scale              S = scale q . k, with 1/sqrt(D) by default
            softcap            S = softcap tanh(S / softcap), for a number > 0
            mask               S + mask, float16, bfloat16 or float32, or bool: True is seen. It broadcasts to
                               (B, H, Nq, Nk) without being copied.
            alibi_slopes       S - slope |pos - key|: floating point, (H,) or (B, H); (n, H) for n packed sequences
            causal             keys after pos are hidden
            window             (left, right): keys before pos - left or after pos + right are hidden. None or -1 is no
                               limit on that side: (-1, 0) is causal.
            dropout_p, seed    P is 0 with probability dropout_p < 1, rounded to steps of 1/256 but not to 1, and else
                               divided by 1 - dropout_p. The seed is an integer or an int64 tensor of one element. Which
                               entries are kept depends on it and on batch, head, query and key alone.
            first_query, first_key    integers, by default Nk - Nq and 0: the last query stands at the last key
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k    n packed sequences: B is 1, and sequence s is the
                               queries cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1 and likewise the keys, in int32
                               tensors (n + 1,). Positions count from 0 in each. Rows after the last belong to none. No
                               sequence is longer than the integer max_seqlen.
            lengths_k          (B,) int32: only so many keys exist, and causal is aligned at the last of them. For
                               decoding: without a gradient, and with no other feature. A number above Nk counts as Nk
                               on a GPU, and is refused on a CPU and with check.
            check              True also checks the numbers in cu_seqlens and lengths_k, and waits for the GPU.

        A query that sees no key gets out 0 and lse -inf. tile: (Br, Bc). out, lse: what earlier calls with other keys
        gave, float32 and contiguous, at first 0 and -inf. They are changed in place to what one call with all keys
        gives, and returned. Raises TypeError or ValueError before anything is computed.
        """
        if not is_traced(q):
            tensors = divided(features, q)
            return forwards(q, k, v, out, lse, *tensors, causal=causal, scale=scale, tile=tile, **features)
        f = read(q, k, v, causal, scale, tile, features)
        check_state(q, out, lse, f)
        with torch.no_grad():
            if out is None:
                return forward_operator(q, k, v, *in_order(causal, scale, tile, f))
            carry_operator(q, k, v, out, lse, *in_order(causal, scale, tile, f))
            return out, lse

    @with_features
    def backward(
        dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False, mask_gradient=False,
        **features
    ):  # fmt: skip
        """Gradients (dq, dk, dv), like q, k and v, and with mask_gradient=True also dmask, like the additive mask.

        dout is the gradient of out; out and lse are what `forward` gave with the same features, for these keys or for
        more: dq is then the part that comes from these keys. The results are equal to the bit from run to run, whether
        or not `deterministic` asks for it.
        """
        if not is_traced(q):
            own = dict(causal=causal, scale=scale, tile=tile, deterministic=deterministic, mask_gradient=mask_gradient)
            return backwards(dout, q, k, v, out, lse, *divided(features, q), **own, **features)
        options.check_flag("deterministic", deterministic)
        f = read(q, k, v, causal, scale, tile, features)
        check_gradient(q, dout, out, lse, mask_gradient, f)
        with torch.no_grad():
            arguments = in_order(causal, scale, tile, f)
            *grads, dmask = backward_operator(dout, q, k, v, out, lse, *arguments, mask_gradient)
        return (*grads, dmask) if mask_gradient else tuple(grads)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mask, alibi_slopes, seed, cu_seqlens_q, cu_seqlens_k, lengths_k, numbers):
            tensors = mask, alibi_slopes, seed, cu_seqlens_q, cu_seqlens_k, lengths_k
            ctx.numbers = numbers
            out, lse = forwards(q, k, v, None, None, *tensors, **numbers)
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
            return out

        @staticmethod
        def backward(ctx, dout):
            mask_gradient = ctx.needs_input_grad[3]
            with torch.no_grad():
                grads = backwards(dout, *ctx.saved_tensors, mask_gradient=mask_gradient, **ctx.numbers)
            dq, dk, dv, *dmask = grads
            return *once(dq, dk, dv, *(dmask or [None])), *(None for _ in ctx.needs_input_grad[4:])

    @with_features
    def attention(q, k, v, *, causal=False, scale=None, tile=None, deterministic=False, **features):
        """out as of `forward`, differentiable once in q, k, v and in an additive mask that requires a gradient.

        The arguments are those of `forward`. dropout_p without a seed draws one from torch's generator on q's device;
        see also `set_deterministic`. For the backward only the inputs, out and lse are kept, so that memory grows with
        N and not with N^2. Autocast does not change the dtype.
        """
        if features.get("dropout_p") and features.get("seed") is None:
            options.check_flag("deterministic", deterministic)
            options.read(features)
            features["seed"] = draw_seed(q.device)
        if is_traced(q):
            options.check_flag("deterministic", deterministic)
            f = read(q, k, v, causal, scale, tile, features)
            check_gradients(f["alibi_slopes"], f["lengths_k"], q, k, v)
            return forward_operator(q, k, v, *in_order(causal, scale, tile, f))[0]
        check_derivatives(q, k, v)
        check_gradients(features.get("alibi_slopes"), features.get("lengths_k"), q, k, v)
        tensors = divided(features, q)
        numbers = features | dict(causal=causal, scale=scale, tile=tile, deterministic=deterministic)
        return Attention.apply(q, k, v, *tensors, numbers)

    return forward, backward, attention


def divided(features, q):
    """The features that are tensors, or None, which are taken out of `features`; a seed becomes a tensor."""
    tensors = [features.pop(name, None) for name in options.TENSORS]
    seed = tensors[SEED]
    if seed is not None and not isinstance(seed, torch.Tensor):
        tensors[SEED] = read_seed(seed, q.device)
    return tensors


def read_seed(seed, device):
    """An integer as a seed on the device, as `attention` draws one."""
    if type(seed) is not int or seed not in SEEDS:
        seed = options.read_seed(seed)  # It says what is wrong.
    return torch.full((), seed, dtype=torch.int64, device=device)


def check_state(q, out, lse, f):
    """Raises unless out and lse are what earlier calls gave, or both None."""
    if not torch.compiler.is_compiling():
        options.check_carried(q, out, lse)
    if out is not None and f["lengths_k"] is not None:
        raise ValueError("lengths_k has no out and lse to carry; leave them out.")


def check_gradient(q, dout, out, lse, mask_gradient, f):
    """Raises unless dout, out and lse are those of a forward with a gradient."""
    if not torch.compiler.is_compiling():
        options.check_saved(q, dout, out, lse)
    if f["lengths_k"] is not None:
        raise ValueError("lengths_k has no backward. Give the lengths as a mask.")
    if mask_gradient and (f["mask"] is None or f["mask"].dtype == torch.bool):
        raise ValueError("mask_gradient needs a mask of floating-point numbers. Leave it out.")


def check_gradients(alibi_slopes, lengths_k, *tensors):
    """Raises where a gradient is asked for that there is not."""
    if torch.is_grad_enabled():
        if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes has no gradient. Detach it, or add the biases as a mask.")
        if lengths_k is not None and any(x.requires_grad for x in tensors):
            raise ValueError("lengths_k has no backward. Use torch.no_grad(), or give the lengths as a mask.")


def read(q, k, v, causal, scale, tile, features):
    """{name: value} of all features, checked, the seed as a tensor."""
    f = options.read(features)
    if not torch.compiler.is_compiling():
        check(q, k, v, causal, scale, tile, f)
    if isinstance(f["seed"], int):
        f["seed"] = read_seed(f["seed"], q.device)
    options.check_seed(f)
    return f


def check(q, k, v, causal, scale, tile, f):
    """Raises unless all arguments fit to each other."""
    options.check_inputs((("q", q), ("k", k), ("v", v)), causal, scale, tile)
    options.check(q, k, f)


def is_traced(q):
    """Whether a call is recorded and not computed, by torch.compile, torch.export, a mode of torch, or as q is fake.

    Such a call needs an operator. For others it would cost a quarter of a millisecond, and at the first call seconds,
    because torch's operators in Python import torch.compile.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or isinstance(q, FakeTensor)


def check_derivatives(*tensors):
    """Raises where torch asks for derivatives in a way that would pass over the operators' formula."""
    in_func = torch._C._functorch.peek_interpreter_stack() is not None
    if in_func or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivative, and does not go with torch.func (grad, jvp, vmap). "
            "Use .backward() or torch.autograd.grad, or torch's own scaled_dot_product_attention in its math form."
        )


def in_order(causal, scale, tile, f):
    """The options as the operators take them."""
    scale = None if scale is None else options.read_number("scale", scale, "a number or None for 1/sqrt(D)")
    given = {"causal": causal, "scale": scale, "tile": None if tile is None else list(map(int, tile))} | f
    traced, of_all_values = None, [name for name in FLOATS if is_open(given[name])]
    if of_all_values:
        # Of the operations with a number, multiplication is one that torch.compile turns into one with a tensor.
        one = torch.ones((), dtype=torch.float64, device="cpu")
        traced = torch.stack([one * (given[name] if name in of_all_values else math.nan) for name in FLOATS])
        given |= {name: DEFAULTS[name] for name in of_all_values}
    return *given.values(), traced


def is_open(x):
    """Whether x is a number for which torch.compile compiles a program of all values."""
    is_number = isinstance(x, (int, float))
    return torch.compiler.is_compiling() and is_number and not torch.fx.experimental.symbolic_shapes.has_static_value(x)


def by_name(arguments):
    """{name: value} of all options from an operator's arguments: torch leaves out the last ones if they are default."""
    return DEFAULTS | dict(zip(NAMES, arguments, strict=False))


# ---- the operators ---------------------------------------------------------------------------------------------------


def as_4d(x):
    """x as (B, H, N, D), copied only if D is not contiguous."""
    x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_4d(lse):
    """lse as (B, H, N)."""
    return lse.reshape((1,) * (3 - lse.ndim) + tuple(lse.shape))


def for_kernels(q, k, v, arguments):
    """The options {name: value} of flash.py, and lengths_k, from the arguments of an operator."""
    f = by_name(arguments)
    if (traced := f.pop("traced")) is not None:
        numbers = zip(FLOATS, traced.tolist(), strict=True)
        f |= {name: number for name, number in numbers if not math.isnan(number)}
        options.check_inputs((("q", q), ("k", k), ("v", v)), f["causal"], f["scale"], f["tile"])
    options.check_values(q, k, f)
    for name in ("alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "lengths_k"):
        f[name] = None if f[name] is None else f[name].contiguous()
    return {name: value for name, value in f.items() if name != "check"}


def launcher(q, k, f, carried):
    """(the function that launches the kernels of a call, the names of what it takes): decode.py's for few queries."""
    few = not options.asked(f) and f["tile"] is None and not carried and q.ndim == 4 and decode.fits(q, k)
    if f["lengths_k"] is not None or few:
        return decode.forward, ("causal", "scale", "lengths_k")
    return flash.forward, [name for name in f if name not in ("lengths_k", "check")]


def attend(q, k, v, *arguments, out=None, lse=None):
    """(out, lse) like q; those that are given are changed in place."""
    f = for_kernels(q, k, v, arguments)
    carried = {} if out is None else {"out": as_4d(out), "lse": rows_4d(lse)}
    if q.numel() == 0 or k.numel() == 0:  # There is no query, or no key to sum over.
        nothing = q.new_zeros(q.shape), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        return (out, lse) if carried else nothing
    function, names = launcher(q, k, f, carried)
    given = {name: f[name] for name in names}
    new_out, new_lse = function(*map(as_4d, (q, k, v)), **carried, **given)
    return (out, lse) if carried else (new_out.reshape(q.shape), new_lse.reshape(q.shape[:-1]))


def gradients(dout, q, k, v, out, lse, *arguments):
    """(dq, dk, dv, dmask); dmask is empty unless the last argument, mask_gradient, asks for it."""
    f = for_kernels(q, k, v, arguments)
    mask_gradient = len(arguments) > len(NAMES) and arguments[-1]
    if q.numel() == 0 or k.numel() == 0:
        tensors = q, k, v, f["mask"] if mask_gradient else q.new_empty(0)
        return tuple(x.new_zeros(x.shape) for x in tensors)
    del f["lengths_k"]
    tensors = *map(as_4d, (dout, q, k, v, out)), rows_4d(lse)
    grads = flash.backward(*tensors, mask_gradient=mask_gradient, **f)
    dq, dk, dv = (grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=False))
    return dq, dk, dv, grads[3] if mask_gradient else q.new_empty(0)


@torch.library.custom_op("steps::step03_triton_flash_forward", mutates_args=(),
                         schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse)")  # fmt: skip
def forward_operator(q, k, v, *arguments):
    return attend(q, k, v, *arguments)


@torch.library.custom_op("steps::step03_triton_flash_backward", mutates_args=(),
                         schema=f"({SAVED}, {SCHEMA}, bool mask_gradient=False) -> ({GRADIENTS})")  # fmt: skip
def backward_operator(*arguments):
    return gradients(*arguments)


@torch.library.custom_op("steps::step03_triton_flash_carry", mutates_args=("out", "lse"),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, {SCHEMA}) -> ()")  # fmt: skip
def carry_operator(q, k, v, out, lse, *arguments):
    attend(q, k, v, *arguments, out=out, lse=lse)


@forward_operator.register_fake
def _(q, k, v, *arguments):
    f = by_name(arguments)
    check(q, k, v, f["causal"], f["scale"], f["tile"], f)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@backward_operator.register_fake
def _(dout, q, k, v, out, lse, *arguments):
    f = by_name(arguments)
    mask_gradient = len(arguments) > len(NAMES) and arguments[-1]
    check(q, k, v, f["causal"], f["scale"], f["tile"], f)
    options.check_saved(q, dout, out, lse)
    return tuple(x.new_empty(x.shape) for x in (q, k, v, f["mask"] if mask_gradient else q.new_empty(0)))


@carry_operator.register_fake
def _(q, k, v, out, lse, *arguments):
    f = by_name(arguments)
    check(q, k, v, f["causal"], f["scale"], f["tile"], f)
    options.check_carried(q, out, lse)


def keep(ctx, inputs, output):
    q, k, v, *arguments = inputs
    ctx.options = by_name(arguments)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *(ctx.options.pop(name) for name in TENSORS))


def differentiate_operator(ctx, dout, dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    f = ctx.options | dict(zip(TENSORS, tensors, strict=True))
    place = 3 + NAMES.index("mask")
    mask_gradient = any(ctx.needs_input_grad[place : place + 1])  # It is shorter where the last arguments are default.
    arguments = [f[name] for name in NAMES]
    *grads, dmask = backward_operator(dout, q, k, v, out, lse, *arguments, mask_gradient)
    return *grads, *(dmask if mask_gradient and name == "mask" else None for name in NAMES)


def refuse(ctx, *grads):
    raise RuntimeError(NOT_TWICE)


def once(*grads):
    """The gradients, of which autograd refuses to take gradients."""
    if not torch.is_grad_enabled():  # Nobody asks for more, unless it was backward(create_graph=True).
        return grads
    fail = torch._C._functions.DelayedError(NOT_TWICE.encode(), len(grads))
    return fail(*(x if x is None else x.detach().requires_grad_() for x in grads))


forward_operator.register_autograd(differentiate_operator, setup_context=keep)
backward_operator.register_autograd(refuse)


# ---- without the stage: every call is checked ------------------------------------------------------------------------


def checked_forward(q, k, v, out, lse, *tensors, causal, scale, tile, deterministic=False, **numbers):
    options.check_flag("deterministic", deterministic)
    f = read(q, k, v, causal, scale, tile, dict(zip(options.TENSORS, tensors, strict=True)) | numbers)
    check_state(q, out, lse, f)
    with torch.no_grad():
        return attend(q, k, v, *in_order(causal, scale, tile, f), out=out, lse=lse)


def checked_backward(
    dout, q, k, v, out, lse, *tensors, causal, scale, tile, deterministic, mask_gradient, **numbers
):  # fmt: skip
    options.check_flag("deterministic", deterministic)
    f = read(q, k, v, causal, scale, tile, dict(zip(options.TENSORS, tensors, strict=True)) | numbers)
    check_gradient(q, dout, out, lse, mask_gradient, f)
    with torch.no_grad():
        arguments = in_order(causal, scale, tile, f)
        *grads, dmask = gradients(dout, q, k, v, out, lse, *arguments, mask_gradient)
    return (*grads, dmask) if mask_gradient else tuple(grads)


forward, backward, attention = functions(checked_forward, checked_backward)
