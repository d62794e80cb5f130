"""What every stage promises: argument checks, the two entry points around a stage's kernels, and autograd.

A kernel file knows nothing of this module. It offers two functions for 4-D tensors with a contiguous last dimension:
    forward(q, k, v, *, causal, scale, tile)
    backward(dout, q, k, v, out, lse, *, causal, scale, tile)
`entry_points` turns them into the stage's public functions.
"""

import inspect
import math
import numbers

import torch

from steps import engine

# The stage that an error message recommends where another stage lacks a feature or a dtype.
_HAS = {
    "gqa": "steps.step03_triton",
    "nq_ne_nk": "steps.step03_triton",
    torch.float64: "steps.step00_naive",
    torch.float16: "steps.step03_triton",
    torch.bfloat16: "steps.step03_triton",
}


def entry_points(kernels, supports):
    """The stage's `forward`, `backward` and `attention`, which check their arguments and then call a kernel.

    kernels: {rung: (forward, backward)}. Where a call names no rung, the first one is used that takes the input's dtype
    and head_dim.
    supports: the stage's SUPPORTS, with the keys stage, devices, dtypes, head_dims, tiles, rungs, gqa, nq_ne_nk,
    deterministic, order and own_backward, the rungs whose backward is their own. A stage whose rungs differ also has
    limits, {rung: the keys that are different for it}, and elsewhere, {rung: what a machine needs to run it}.
    """

    def forward(q, k, v, *, causal=False, scale=None, tile=None, rung=None):
        """Attention and its log-sum-exp: (out, lse).

        q (B, H, Nq, D), k and v (B, Hk, Nk, D); fewer leading dimensions are accepted. out like q; lse (B, H, Nq)
        float32 (float64 for float64 input), the natural logarithm of the sum of exp of the scaled scores. causal: a
        query sees the keys up to its own position, aligned at the bottom right; a query that sees none gets out 0 and
        lse -inf. scale: 1/sqrt(D) by default. tile: (Br, Bc) out of SUPPORTS["tiles"]. rung: a kernel out of
        SUPPORTS["rungs"]. Raises TypeError, ValueError or NotImplementedError before anything is computed.
        """
        kernel, own = pick_kernel(kernels, supports, rung, 0, q)
        scale, options = check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            if q.numel() == 0 or k.numel() == 0:  # There is no query, or no key to sum over.
                return torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=lse_dtype, device=q.device)
            out, lse = kernel(*map(as_4d, (q, k, v)), causal=causal, scale=scale, **options)
        return (out, lse) if q.ndim == 4 else (out.reshape(q.shape), lse.reshape(q.shape[:-1]))

    def backward(dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, rung=None, deterministic=False):
        """Gradients (dq, dk, dv), like q, k and v, from dout, the gradient of out; out and lse are what `forward` gave.

        tile: the forward's; it does not change a backward that has tiles of its own. deterministic: the gradients are
        bit-equal from run to run, as they always are where SUPPORTS["deterministic"] is True.
        """
        kernel, own = pick_kernel(kernels, supports, rung, 1, q)
        scale, options = check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        check_saved(q, dout, out, lse)
        if not isinstance(deterministic, bool):
            raise TypeError(f"deterministic must be True or False, got {deterministic!r}.")
        if deterministic and not supports["deterministic"]:
            options["deterministic"] = True
        with torch.no_grad():
            if q.numel() == 0 or k.numel() == 0:
                return tuple(map(torch.zeros_like, (q, k, v)))
            rows = lse if q.ndim == 4 else lse.reshape((1,) * (4 - q.ndim) + lse.shape)
            grads = kernel(*map(as_4d, (dout, q, k, v, out)), rows, causal=causal, scale=scale, **options)
        if q.ndim == 4:
            return tuple(grads)
        return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))

    return forward, backward, differentiable(forward, backward)


def differentiable(forward, backward):
    """`attention(q, k, v, **options) -> out` from a forward that saves (out, lse) and a backward that uses them.

    It can be differentiated once. Only q, k, v, out and lse are kept for the backward, so that memory grows with N and
    not with N^2.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options, deterministic):
            out, lse = forward(q, k, v, **options)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = options | {"deterministic": deterministic}
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dout):
            return *backward(dout, *ctx.saved_tensors, **ctx.options), None, None

    def attention(q, k, v, *, deterministic=False, **options):
        """out as of `forward`, differentiable with the gradients of `backward`."""
        return Attention.apply(q, k, v, options, deterministic)

    parameters = inspect.signature(backward).parameters.items()
    attention.__signature__ = inspect.Signature([x for name, x in parameters if name not in ("dout", "out", "lse")])
    return attention


def as_4d(x):
    """x as (B, H, N, D) with D contiguous. It is copied only where D is not, as after out.sum().backward()."""
    if x.ndim < 4:
        x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pick_kernel(kernels, supports, rung, direction, q):
    """(the rung's forward for direction 0 or backward for 1, SUPPORTS as it holds for the rung).

    rung None stands for the first rung that takes q's dtype and head_dim. Raises ValueError that names the rungs.
    """
    if rung is not None and rung not in tuple(kernels):
        needs = [f": it needs {what}" for name, what in supports.get("elsewhere", {}).items() if name == rung]
        raise ValueError(
            f"{supports['stage']} has the rungs {', '.join(kernels)} here; got rung={rung!r}{''.join(needs)}."
        )
    if rung is not None:
        return kernels[rung][direction], limits(supports, rung)
    for name in kernels:
        own = limits(supports, name)
        if takes(own, q):
            return kernels[name][direction], own
    if takes(supports, q):
        raise _no_rung(kernels, supports, q)
    return kernels[next(iter(kernels))][direction], supports  # check_call will say what the stage does not take.


def limits(supports, rung):
    """SUPPORTS as it holds for one rung."""
    own = supports.get("limits", {}).get(rung)
    return supports if own is None else supports | own | {"rung": rung}


def takes(supports, q):
    """Whether q's dtype and head_dim are among those of SUPPORTS."""
    if not isinstance(q, torch.Tensor) or q.ndim == 0:
        return False
    return q.dtype in supports["dtypes"] and q.shape[-1] in supports["head_dims"]


def _no_rung(kernels, supports, q):
    own = {rung: limits(supports, rung) for rung in kernels}
    offers = [f"{rung} ({', '.join(map(_short, x['dtypes']))}; {_span(x['head_dims'])})" for rung, x in own.items()]
    asked = f"{_short(q.dtype)} with head_dim {q.shape[-1]}"
    return ValueError(f"no rung of {supports['stage']} takes {asked}; there are {', '.join(offers)}.")


def check_call(supports, kernel, tensors, causal, scale, tile):
    """(scale, the kernel's further options) of a call. Raises for any input that the stage does not take."""
    engine.check_runs()
    stage = supports["stage"] + (f" (rung {supports['rung']})" if "rung" in supports else "")
    for name, x in tensors:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    (_, q), *others = tensors
    check_shapes(supports, q.shape, *(x.shape for _, x in others))
    for name, x in others:
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"q, k and v must share one dtype and device: q is {_short(q.dtype)} on {q.device}, "
                f"{name} is {_short(x.dtype)} on {x.device}. Convert {name} with {name}.to(q)."
            )
    if q.dtype not in supports["dtypes"]:
        has = _HAS.get(q.dtype, own := f"steps.{supports['stage']}")
        other = "" if has == own else f"; {has} takes {_short(q.dtype)}"
        names = ", ".join(map(_short, supports["dtypes"]))
        raise TypeError(f"{stage} takes {names}; got {_short(q.dtype)}. Convert with .to(torch.float32){other}.")
    if q.device.type not in supports["devices"]:
        raise ValueError(
            f"{stage} runs on {' or '.join(supports['devices'])} in this process; the tensors are on {q.device}. "
            "Move them with .to(...), or start Python with STEPS_ENGINE=cpu or STEPS_ENGINE=cuda to choose the engine."
        )
    D = q.shape[-1]
    if D not in supports["head_dims"]:
        raise ValueError(f"{stage} takes head_dim {_span(supports['head_dims'])}; got {D}.")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}.")
    if tile is not None:
        if "tile" not in inspect.signature(kernel).parameters:
            raise ValueError(f"this rung of {stage} has no tiles; got tile={tile!r}. Leave it out.")
        if tile not in supports["tiles"]:
            raise ValueError(f"{stage} has the tiles (Br, Bc) {', '.join(map(str, supports['tiles']))}; got {tile!r}.")
    return check_scale(scale, D), {} if tile is None else {"tile": tile}


def check_scale(scale, D):
    """The scale to use, which for None is 1/sqrt(D).

    Raises TypeError unless it is a number, and ValueError unless it is greater than 0 and float32 can hold it.
    """
    if scale is None:
        return 1 / math.sqrt(D)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None for 1/sqrt(D), got {scale!r}.")
    if not torch.finfo(torch.float32).tiny <= scale <= torch.finfo(torch.float32).max:
        must_be = "a finite number > 0 that float32 can hold, or None for 1/sqrt(D)"
        raise ValueError(f"scale must be {must_be}; got {scale}.")
    return float(scale)


def check_shapes(supports, q, k, v):
    """Raises unless the shapes q (..., H, Nq, D), k and v (..., Hk, Nk, D) fit together and the stage takes them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not 2 <= len(x) <= 4:
            raise ValueError(f"{name} must be (B, H, N, D), (H, N, D) or (N, D); got shape {tuple(x)}.")
        if len(x) != len(q):
            raise ValueError(f"q, k and v need the same number of dimensions; got q {tuple(q)}, {name} {tuple(x)}.")
    if k != v:
        raise ValueError(f"k and v must have the same shape; got k {tuple(k)}, v {tuple(v)}.")
    if q[-1] != k[-1]:
        raise ValueError(f"q and k must have the same head_dim (last dimension); {_shapes(q, k)}.")
    if len(q) == 4 and q[0] != k[0]:
        raise ValueError(f"q and k must have the same batch size (first dimension); {_shapes(q, k)}.")
    if len(q) >= 3 and (H := q[-3]) != (Hk := k[-3]):
        if Hk == 0 or H % Hk:
            raise ValueError(
                f"the number of query heads must be a multiple of the number of key heads; {_shapes(q, k)}."
            )
        if not supports["gqa"]:
            raise NotImplementedError(
                f"{supports['stage']} has no grouped heads (H = {H}, Hk = {Hk}); {_HAS['gqa']} has, "
                "or repeat k and v with .repeat_interleave(H // Hk, dim=-3)."
            )
    if q[-2] != k[-2] and not supports["nq_ne_nk"]:
        raise NotImplementedError(
            f"{supports['stage']} is for self-attention, Nq = Nk; {_shapes(q, k)}. {_HAS['nq_ne_nk']} takes Nq != Nk."
        )


def check_saved(q, dout, out, lse):
    """Raises unless dout and out are like q, and lse is (..., H, Nq) in the type that `forward` returns."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, x, shape, dtype in (
        ("dout", dout, q.shape, q.dtype), ("out", out, q.shape, q.dtype), ("lse", lse, q.shape[:-1], lse_dtype)
    ):  # fmt: skip
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} as forward returned it; got {tuple(x.shape)}.")
        if x.dtype != dtype or x.device != q.device:
            raise TypeError(f"{name} must be {_short(dtype)} on {q.device}; got {_short(x.dtype)} on {x.device}.")


def _shapes(q, k):
    return f"q is {tuple(q)}, k is {tuple(k)}"


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def _span(values):
    """Increasing numbers, with neighbours joined: "1 to 96, 128"."""
    runs = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
