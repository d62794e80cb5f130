# SPDX-License-Identifier: MIT
"""Attention with every feature as people call it: checked, differentiable, and one operator for torch.compile.

    attention(q, k, v, causal=True, dropout_p=0.1)       differentiable in q, k, v, in an additive mask and in sinks
    forward, backward                                    the two halves

Arguments are checked before anything is computed. While a call is traced, it becomes an operator of operators.py, which
checks them, too; every other call goes around the operators. The seed of dropout is a tensor; see dropout.py. Needs
operators.py, options.py, dropout.py and the files that they name.
"""

import inspect
from numbers import Real

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import options
from .dropout import draw_seed
from .operators import (
    NOT_TWICE,
    attend,
    backward_operator,
    carry_operator,
    check,
    forward_operator,
    gradients,
    in_order,
)


def with_features(function):
    """The function with the names and defaults of the features in its signature, in the place of **features."""
    signature = inspect.signature(function)
    own = [x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD]
    more = [inspect.Parameter(name, own[-1].kind, default=default) for name, default in options.DEFAULTS.items()]
    function.__signature__ = signature.replace(parameters=own + more)
    return function


class Functions:
    """forward, backward and attention, by two functions that check and compute what is not traced.

    They take the tensors first: forwards(q, k, v, out, lse, *features) and backwards(dout, q, k, v, out, lse,
    *features), where the features are those of options.TENSORS, or None. Everything else they take by name.
    """

    def __init__(self, forwards, backwards):
        self.forwards, self.backwards = forwards, backwards

    @with_features
    def forward(self, q, k, v, *, causal=False, scale=None, tile=None, out=None, lse=None, **features):
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
            sinks              (H,), floating point: a row's softmax has one more key with this score, whose value is 0,
                               so that out is smaller, and in lse. It is in natural units, and not scaled, capped or
                               hidden; -inf is no sink. gpt-oss learns it. Of calls that carry out and lse, one has it.
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
                               decoding: without a gradient; of the other features with window, softcap, alibi_slopes
                               and sinks. A number above Nk counts as Nk on a GPU, and is refused on a CPU and with
                               check.
            check              True also checks the numbers in cu_seqlens and lengths_k, and waits for the GPU.

        A query that sees no key gets out 0 and lse -inf, or the sink. tile: (Br, Bc). out, lse: what earlier calls with
        other keys gave, float32 and contiguous, at first 0 and -inf. They are changed in place to what one call with
        all keys gives, and returned. Raises TypeError or ValueError before anything is computed.
        """
        given = dict(causal=causal, scale=scale, tile=tile) | features
        if not is_traced(q):
            return self.forwards(q, k, v, out, lse, *divided(given, q), **given)
        f = read_forward(q, k, v, out, lse, given)
        with torch.no_grad():
            if out is None:
                return forward_operator(q, k, v, *in_order(f))
            carry_operator(q, k, v, out, lse, *in_order(f))
            return out, lse

    @with_features
    def backward(
        self, dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False,
        mask_gradient=False, **features
    ):  # fmt: skip
        """Gradients (dq, dk, dv), like q, k and v, and with mask_gradient=True also dmask, like the additive mask.

        With sinks the last result is dsinks. Without them the others are the same, because lse knows of the sinks.

        dout is the gradient of out; out and lse are what `forward` gave with the same features, for these keys or for
        more: dq is then the part that comes from these keys. The results are equal to the bit from run to run. The
        exception is dq on Hopper without a feature, or with sinks alone: there it needs deterministic=True.
        """
        given = dict(causal=causal, scale=scale, tile=tile, deterministic=deterministic) | features
        if not is_traced(q):
            tensors = divided(given, q)
            return self.backwards(dout, q, k, v, out, lse, *tensors, mask_gradient=mask_gradient, **given)
        f = read_backward(dout, q, k, v, out, lse, mask_gradient, given)
        with torch.no_grad():
            *grads, dmask, dsinks = backward_operator(dout, q, k, v, out, lse, *in_order(f), mask_gradient)
        more = [dmask] if mask_gradient else []
        return (*grads, *more) if f["sinks"] is None else (*grads, *more, dsinks)

    @with_features
    def attention(self, q, k, v, *, causal=False, scale=None, tile=None, deterministic=False, **features):
        """out as of `forward`, differentiable once in q, k, v, and in an additive mask and sinks that ask for it.

        The arguments are those of `forward`. dropout_p without a seed draws one from torch's generator on q's device;
        see also `set_deterministic`. For the backward only the inputs, out and lse are kept, so that memory grows with
        N and not with N^2. Autocast does not change the dtype. deterministic: as of `backward`; with sinks it is
        also True where torch.use_deterministic_algorithms says so.
        """
        if deterministic is False and torch.are_deterministic_algorithms_enabled():
            deterministic = True
        given = dict(causal=causal, scale=scale, tile=tile, deterministic=deterministic) | features
        p = features.get("dropout_p")
        if isinstance(p, Real) and p and features.get("seed") is None:
            options.check_dense("q", q)
            options.check_flag("deterministic", deterministic)
            options.read(features)
            given["seed"] = draw_seed(q.device)
        check_gradients(given.get("alibi_slopes"), given.get("lengths_k"), q, k, v, given.get("sinks"))
        if is_traced(q):
            return forward_operator(q, k, v, *in_order(read(q, k, v, given)))[0]
        check_derivatives(q, k, v)
        tensors = divided(given, q)
        return Attention.apply(q, k, v, *tensors, self, given)


class Attention(torch.autograd.Function):
    """What `attention` is to autograd where a call is not traced."""

    @staticmethod
    def forward(ctx, q, k, v, mask, sinks, alibi_slopes, seed, cu_seqlens_q, cu_seqlens_k, lengths_k, functions, given):
        tensors = mask, sinks, alibi_slopes, seed, cu_seqlens_q, cu_seqlens_k, lengths_k
        ctx.functions, ctx.given = functions, given
        out, lse = functions.forwards(q, k, v, None, None, *tensors, **given)
        out = out.detach() if out._is_view() else out  # A view could not be changed in place, as by `out.add_`.
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, mask, sinks, *tensors = ctx.saved_tensors
        mask_gradient, sinks_gradient = ctx.needs_input_grad[3:5]
        sinks = sinks if sinks_gradient else None
        with torch.no_grad():
            saved = q, k, v, out, lse, mask, sinks, *tensors
            dq, dk, dv, *more = ctx.functions.backwards(dout, *saved, mask_gradient=mask_gradient, **ctx.given)
        dmask = more.pop(0) if mask_gradient else None
        return *once(dq, dk, dv, dmask, *(more or [None])), *(None for _ in ctx.needs_input_grad[5:])


def once(*grads):
    """The gradients, of which autograd refuses to take gradients."""
    if not torch.is_grad_enabled():  # Nobody asks for more, unless it was backward(create_graph=True).
        return grads
    fail = torch._C._functions.DelayedError(NOT_TWICE.encode(), len(grads))
    return fail(*(x if x is None else x.detach().requires_grad_() for x in grads))


# ---- what is checked -------------------------------------------------------------------------------------------------


def divided(given, q):
    """The features that are tensors, or None, which are taken out of `given`; a seed becomes a tensor."""
    if isinstance(q, torch.Tensor) and (seed := given.get("seed")) is not None and not isinstance(seed, torch.Tensor):
        given["seed"] = seed_on(q.device, seed)
    return [given.pop(name, None) for name in options.TENSORS]


def seed_on(device, seed):
    """An integer as a seed on the device, as `attention` draws one."""
    return torch.full((), options.read_seed(seed), dtype=torch.int64, device=device)


def read(q, k, v, given):
    """{name: value} of all options, checked unless torch.compile traces, the seed as a tensor."""
    own = {name: given[name] for name in ("causal", "scale", "tile")}
    own["deterministic"] = given.get("deterministic", False)
    options.check_flag("causal", own["causal"])
    options.check_flag("deterministic", own["deterministic"])
    f = options.read({name: x for name, x in given.items() if name not in own})
    if not torch.compiler.is_compiling():
        check(q, k, v, f)
    if isinstance(f["seed"], int):
        f["seed"] = seed_on(q.device, f["seed"])
    options.check_seed(f)
    if own["scale"] is not None:
        own["scale"] = options.read_scale(own["scale"], f["softcap"])
    if own["tile"] is not None:
        own["tile"] = options.read_tile(own["tile"])
    if f["alibi_slopes"] is not None and f["lengths_k"] is None:  # decode.py adds them in natural units.
        options.check_unit(own | f, "alibi_slopes")
    return own | f


def read_forward(q, k, v, out, lse, given):
    """`read`, after which out and lse are what earlier calls gave, or both None."""
    f = read(q, k, v, given)
    if not torch.compiler.is_compiling():
        options.check_carried(q, out, lse)
    if out is not None:
        options.check_unit(f, "out and lse of earlier calls")
    if out is not None and f["lengths_k"] is not None:
        raise ValueError("lengths_k has no out and lse to carry; leave them out.")
    return f


def read_backward(dout, q, k, v, out, lse, mask_gradient, given):
    """`read`, after which dout, out and lse are those of a forward with a gradient."""
    f = read(q, k, v, given)
    options.check_flag("mask_gradient", mask_gradient)
    if not torch.compiler.is_compiling():
        options.check_saved(q, dout, out, lse)
    if f["lengths_k"] is not None:
        raise ValueError("lengths_k has no backward. Give the lengths as a mask.")
    if mask_gradient and (f["mask"] is None or f["mask"].dtype == torch.bool):
        raise ValueError("mask_gradient needs a mask of floating-point numbers. Leave it out.")
    return f


def check_gradients(alibi_slopes, lengths_k, *tensors):
    """Raises where a gradient is asked for that there is not."""
    if torch.is_grad_enabled():
        if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes has no gradient. Detach it, or add the biases as a mask.")
        if lengths_k is not None and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
            raise ValueError("lengths_k has no backward. Use torch.no_grad(), or give the lengths as a mask.")


def is_traced(q):
    """Whether a call is recorded and not computed, by torch.compile, torch.export, a mode of torch, or as q is fake.

    Such a call needs an operator. Others are an autograd.Function: an operator would take several times as long, and at
    the first call seconds, as torch's operators in Python import torch.compile.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or isinstance(q, FakeTensor)


def check_derivatives(*tensors):
    """Raises where torch asks for derivatives in another way than by autograd's backward."""
    in_func = torch._C._functorch.peek_interpreter_stack() is not None
    if in_func or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivative, and does not go with torch.func (grad, vjp, vmap, ...). "
            "Use .backward() or torch.autograd.grad, or torch's own scaled_dot_product_attention in its math form."
        )


# ---- without a stage: every call is checked -------------------------------------------------------------------------


def checked_forward(q, k, v, out, lse, *tensors, **given):
    f = read_forward(q, k, v, out, lse, given | dict(zip(options.TENSORS, tensors, strict=True)))
    with torch.no_grad():
        return attend(q, k, v, f, out, lse)


def checked_backward(dout, q, k, v, out, lse, *tensors, mask_gradient, **given):
    given |= dict(zip(options.TENSORS, tensors, strict=True))
    f = read_backward(dout, q, k, v, out, lse, mask_gradient, given)
    with torch.no_grad():
        return tuple(gradients(dout, q, k, v, out, lse, f, mask_gradient))


functions = Functions(checked_forward, checked_backward)  # A stage makes others, which keep what they have checked.
forward, backward, attention = functions.forward, functions.backward, functions.attention
