"""What every stage promises: argument checks, the two entry points around a stage's kernels, autograd, operators.

A kernel file knows nothing of this module. It offers two functions for 4-D tensors with a contiguous last dimension:
    forward(q, k, v, *, causal, scale, tile)
    backward(dout, q, k, v, out, lse, *, causal, scale, tile)
`entry_points` turns them into the stage's public functions, and operators.py into operators that torch.compile sees.
"""

import inspect
import math
import numbers
import operator

import torch
from torch._subclasses.fake_tensor import FakeTensor

from steps import engine, operators

# The stage that an error message recommends where another stage lacks a feature or a dtype.
_HAS = {
    "gqa": "steps.step03_triton",
    "nq_ne_nk": "steps.step03_triton",
    torch.float64: "steps.step00_naive",
    torch.float16: "steps.step03_triton",
    torch.bfloat16: "steps.step03_triton",
}
FLOAT32 = torch.finfo(torch.float32)
# {option: the stage that has it}, without those that every stage has.
STAGE_WITH = {
    **dict.fromkeys(
        ("window", "softcap", "mask", "alibi_slopes", "dropout_p", "seed", "first_query", "first_key", "cu_seqlens_q",
         "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "lengths_k", "check", "mask_gradient"),
        "step03_triton",
    ),
    **dict.fromkeys(("layout", "group", "block", "S", "transport"), "step04_ring"),
    "cu_seqlens": 'step04_ring.strategies.attention (with strategy="query_parallel")',
}  # fmt: skip
# {an option of torch's attention or of flash_attn: its name here}
OTHER_NAMES = {"is_causal": "causal", "attn_mask": "mask", "softmax_scale": "scale", "window_size": "window"}


def entry_points(kernels, supports):
    """The stage's `forward`, `backward` and `attention`, which check their arguments and then call a kernel.

    kernels: {rung: (forward, backward)}. A call that names no rung gets the first that takes the input's dtype and
    head_dim.
    supports: the stage's SUPPORTS, with the keys stage, devices, dtypes, head_dims, tiles, rungs, gqa, nq_ne_nk,
    deterministic, order and own_backward, the rungs whose backward is their own. A stage whose rungs differ also has
    limits, {rung: the keys that are different for it}, and elsewhere, {rung: what a machine needs to run it}.
    """
    whole = {rung: limits(supports, rung) for rung in kernels}  # To merge them at each call takes a microsecond.

    def forward(q, k, v, *, causal=False, scale=None, tile=None, rung=None, **lacking):
        """Attention and its log-sum-exp: (out, lse).

        q (B, H, Nq, D), k and v (B, Hk, Nk, D); fewer leading dimensions are accepted. out like q; lse (B, H, Nq)
        float32 (float64 for float64 input), the natural logarithm of the sum of exp of the scaled scores. causal: a
        query sees the keys up to its own position, aligned at the bottom right; a query that sees none gets out 0 and
        lse -inf. scale: 1/sqrt(D) by default. tile: (Br, Bc) out of SUPPORTS["tiles"]. rung: a kernel out of
        SUPPORTS["rungs"]. lacking: options of other stages and libraries, which are refused by the name of who has
        them. Raises TypeError, ValueError or NotImplementedError before anything is computed.
        """
        if lacking:
            refuse(supports["stage"], "forward", lacking)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return forward_operator(q, k, v, causal=causal, scale=scale, tile=tile, rung=rung)
        kernel, own = pick_kernel(kernels, supports, rung, 0, q, whole)
        scale, options = check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        if q.numel() == 0 or k.numel() == 0:  # There is no query, or no key to sum over.
            return zeros(q), torch.full(q.shape[:-1], -math.inf, dtype=lse_dtype(q), device=q.device)
        out, lse = run(kernel, *map(as_4d, (q, k, v)), causal=causal, scale=scale, **options)
        return (out, lse) if q.ndim == 4 else (out.reshape(q.shape), lse.reshape(q.shape[:-1]))

    def backward(
        dout, q, k, v, out, lse, *,
        causal=False, scale=None, tile=None, rung=None, deterministic=False, **lacking
    ):  # fmt: skip
        """Gradients (dq, dk, dv), like q, k and v, from dout, the gradient of out; out and lse are what `forward` gave.

        tile: the forward's; it does not change a backward that has tiles of its own. deterministic: the gradients are
        bit-equal from run to run, as they always are where SUPPORTS["deterministic"] is True.
        """
        if lacking:
            refuse(supports["stage"], "backward", lacking)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                options = dict(causal=causal, scale=scale, tile=tile, rung=rung, deterministic=deterministic)
                return backward_operator(dout, q, k, v, out, lse, **options)
        kernel, own = pick_kernel(kernels, supports, rung, 1, q, whole)
        scale, options = check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        check_saved(q, dout, out, lse)
        check_deterministic(deterministic)
        if deterministic and not supports["deterministic"]:
            options["deterministic"] = True
        if q.numel() == 0 or k.numel() == 0:
            return tuple(map(zeros, (q, k, v)))
        lse = readable(lse)
        rows = lse if q.ndim == 4 else lse.reshape((1,) * (4 - q.ndim) + lse.shape)
        grads = run(kernel, *map(as_4d, (dout, q, k, v, out)), rows, causal=causal, scale=scale, **options)
        if q.ndim == 4:
            return grads
        return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))

    def fake_forward(q, k, v, causal, scale, tile, rung):
        """(out, lse) of the right shapes, with nothing in them, after the checks of `forward`."""
        kernel, own = pick_kernel(kernels, supports, rung, 0, q, whole)
        check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))

    forward_operator, backward_operator = operators.define(supports["stage"], forward, backward, fake_forward)
    attention = differentiable(supports["stage"], forward, backward, forward_operator)
    for function in (forward, backward, attention):  # They can be pickled, by the place where they are found.
        function.__module__, function.__qualname__ = f"steps.{supports['stage']}", function.__name__
    return forward, backward, attention


def differentiable(stage, forward, backward, forward_operator):
    """The stage's `attention(q, k, v, **options) -> out`.

    It is made from a forward that saves (out, lse) and a backward that uses them, and can be differentiated once. Only
    q, k, v, out and lse are kept for the backward, so that memory grows with N and not with N^2. While a call is
    traced, `forward_operator` stands for it.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, scale, tile, rung, deterministic):
            out, lse = forward(q, k, v, causal=causal, scale=scale, tile=tile, rung=rung)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = dict(causal=causal, scale=scale, tile=tile, rung=rung, deterministic=deterministic)
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dout):
            return *backward(dout, *ctx.saved_tensors, **ctx.options), *(None for _ in ctx.options)

    def attention(q, k, v, *, causal=False, scale=None, tile=None, rung=None, deterministic=False, **lacking):
        """out as of `forward`, differentiable once with the gradients of `backward`.

        torch.compile, torch.export and fake tensors see one operator. Autocast does not change the dtype.
        """
        if lacking:
            refuse(stage, "attention", lacking)
        check_deterministic(deterministic)
        options = causal, scale, tile, rung, deterministic
        return forward_operator(q, k, v, *options)[0] if is_traced(q) else Attention.apply(q, k, v, *options)

    return attention


def refuse(stage, function, options):
    """Raises for the first of these names, which are no options of the stage's function.

    NotImplementedError names the stage that has the option. TypeError names what another library calls otherwise, or
    says that no stage has such an option.
    """
    given = next(iter(options))
    here = OTHER_NAMES.get(given, given)
    has = STAGE_WITH.get(here, stage)
    if has != stage:
        name = "" if here == given else f" as {here}"
        raise NotImplementedError(f"{stage}.{function} has no {given}; steps.{has} has it{name}.")
    if here != given:
        note = ", aligned at the bottom right" if here == "causal" else ""
        raise TypeError(f"{stage}.{function} has no {given}; here it is {here}={note}.")
    raise TypeError(f"{stage}.{function} got an unexpected keyword argument {given!r}.")


def is_traced(q):
    """Whether a call is recorded and not computed: by torch.compile, torch.export, a mode of torch, or a fake q.

    Such a call needs an operator. It costs 10 microseconds more than an autograd.Function, which other calls use.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or isinstance(q, FakeTensor)


@engine.one_at_a_time
def run(kernel, *tensors, **options):
    """The kernel's results, contiguous. Autograd does not see them, and autocast does not change the kernel's dtype."""
    device = "cuda" if tensors[0].is_cuda else "cpu"
    with torch.set_grad_enabled(False):  # It does the same as torch.no_grad() in half the time.
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                results = kernel(*tensors, **options)
        else:
            results = kernel(*tensors, **options)
        return tuple([x.contiguous() for x in results])


def zeros(x):
    """Zeros like x, contiguous and without a history."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def lse_dtype(q):
    """The dtype of lse for the input q."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def readable(x):
    """x with its numbers in memory as they are. Raises TypeError for a tensor without memory.

    Torch negates a tensor such as z.conj().imag only when it reads it. Here it is negated, because a kernel reads
    memory.
    """
    try:
        address = 0 if type(x) is FakeTensor else x.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and x.numel() > 0:
        raise TypeError(
            f"this {type(x).__name__} has no memory that a kernel can read. It is a fake tensor, or one that "
            "torch.func made. `attention` takes fake tensors; every other call needs tensors with memory."
        )
    return x.resolve_neg() if x.is_neg() else x


def as_4d(x):
    """x as (B, H, N, D) with D contiguous. It is copied only where D is not, as after out.sum().backward()."""
    x = readable(x)
    if x.ndim < 4:
        x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pick_kernel(kernels, supports, rung, direction, q, whole=None):
    """(the rung's forward for direction 0 or backward for 1, SUPPORTS as it holds for the rung).

    rung None stands for the first rung that takes q's dtype and head_dim. A rung may take head_dims for which another
    one is faster: those it is picked for are its best_head_dims. whole: {rung: `limits` of it}, for a caller that keeps
    them. Raises ValueError that names the rungs.
    """
    whole = whole or {rung: limits(supports, rung) for rung in kernels}
    if rung is not None and rung not in tuple(kernels):
        needs = [f": it needs {what}" for name, what in supports.get("elsewhere", {}).items() if name == rung]
        raise ValueError(
            f"{supports['stage']} has the rungs {', '.join(kernels)} here; got rung={rung!r}{''.join(needs)}."
        )
    if rung is not None:
        return kernels[rung][direction], whole[rung]
    for name, own in whole.items():
        if takes(own, q) and q.shape[-1] in own.get("best_head_dims", own["head_dims"]):
            return kernels[name][direction], own
    if takes(supports, q):
        raise _no_rung(whole, supports, q)
    return kernels[next(iter(kernels))][direction], supports  # check_call will say what the stage does not take.


def limits(supports, rung):
    """SUPPORTS as it holds for one rung."""
    own = supports.get("limits", {}).get(rung)
    return supports if own is None else supports | own | {"rung": rung}


def takes(supports, q):
    """Whether q's dtype and head_dim are among those of SUPPORTS."""
    if not isinstance(q, torch.Tensor) or q.is_nested or q.ndim == 0:  # A nested tensor has no shape.
        return False
    return q.dtype in supports["dtypes"] and q.shape[-1] in supports["head_dims"]


def _no_rung(whole, supports, q):
    offers = [f"{rung} ({', '.join(map(_short, x['dtypes']))}; {_span(x['head_dims'])})" for rung, x in whole.items()]
    asked = f"{_short(q.dtype)} with head_dim {q.shape[-1]}"
    stage = supports["stage"]
    other = "" if stage == "step03_triton" else " steps.step03_triton takes it."
    return ValueError(f"no rung of {stage} takes {asked}; there are {', '.join(offers)}.{other}")


def check_call(supports, kernel, tensors, causal, scale, tile):
    """(scale, the kernel's further options) of a call. Raises for any input that the stage does not take."""
    engine.check_runs()
    for name, x in tensors:
        check_dense(name, x)
    (_, q), (_, k), (_, v) = tensors
    dtype, device = q.dtype, q.device
    check_shapes(supports, q.shape, k.shape, v.shape)
    check_length(q.shape[-2] + k.shape[-2])
    for name, x in tensors[1:]:
        if x.dtype != dtype or x.device != device:
            raise TypeError(
                f"q, k and v must share one dtype and device: q is {_short(q.dtype)} on {q.device}, "
                f"{name} is {_short(x.dtype)} on {x.device}. Convert {name} with {name}.to(q)."
            )
    if dtype not in supports["dtypes"]:
        has = _HAS.get(dtype, own := f"steps.{supports['stage']}")
        other = "" if has == own else f"; {has} takes {_short(dtype)}"
        names = ", ".join(map(_short, supports["dtypes"]))
        advice = f"Convert with .to(torch.float32){other}."
        raise TypeError(f"{_named(supports)} takes {names}; got {_short(dtype)}. {advice}")
    if device.type not in supports["devices"]:
        raise ValueError(
            f"{_named(supports)} runs on {' or '.join(supports['devices'])} in this process; "
            f"the tensors are on {device}. "
            "Move them with .to(...), or start Python with STEPS_ENGINE=cpu or STEPS_ENGINE=cuda to choose the engine."
        )
    D = q.shape[-1]
    if D not in supports["head_dims"]:
        raise ValueError(f"{_named(supports)} takes head_dim {_span(supports['head_dims'])}; got {D}.")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}.")
    if tile is not None:
        if "tile" not in inspect.signature(kernel).parameters:
            raise ValueError(f"this rung of {_named(supports)} has no tiles; got tile={tile!r}. Leave it out.")
        tile = check_tile(supports, tile)
    return check_scale(scale, D), {} if tile is None else {"tile": tile}


def check_length(rows):
    """ValueError if there are more queries and keys than kernels count in 32 bits, to which they may add a tile."""
    if isinstance(rows, int) and rows > 2**31 - 2**16:  # While a call is traced, the number may be a symbol.
        raise ValueError(f"q and k may have 2^31 - 2^16 rows together; got {rows}. Split the queries.")


def check_dense(name, x):
    """Raises TypeError unless x is a tensor in which every entry has a place of its own."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one. Convert it with .to_padded_tensor(0.0).")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {_short(x.layout)}. Convert it with {name}.to_dense().")


def check_tile(supports, tile):
    """The tile as a pair (Br, Bc) of Python's integers.

    Raises TypeError unless it is a pair of integers, and ValueError unless SUPPORTS offers it.
    """
    try:
        pair = tuple(map(operator.index, tile))
    except TypeError:
        raise TypeError(f"tile must be a pair of integers (Br, Bc), got {tile!r}.") from None
    if pair not in supports["tiles"]:
        tiles = ", ".join(map(str, supports["tiles"]))
        raise ValueError(f"{_named(supports)} has the tiles (Br, Bc) {tiles}; got {tile!r}.")
    return pair


def check_scale(scale, D):
    """The scale to use, which for None is 1/sqrt(D).

    Raises TypeError unless it is a number, and ValueError unless it is greater than 0 and float32 can hold it.
    """
    if scale is None:
        return 1 / math.sqrt(D)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None for 1/sqrt(D), got {scale!r}.")
    if not FLOAT32.tiny <= scale <= FLOAT32.max * math.log(2):  # Kernels multiply it by log2(e).
        must_be = "a finite number > 0 that float32 can hold, times log2(e) too, or None for 1/sqrt(D)"
        raise ValueError(f"scale must be {must_be}; got {scale}.")
    return float(scale)


def check_shapes(supports, q, k, v):
    """Raises unless the shapes q (..., H, Nq, D), k and v (..., Hk, Nk, D) fit together and the stage takes them."""
    if not 2 <= len(q) <= 4:
        raise ValueError(f"q must be (B, H, N, D), (H, N, D) or (N, D); got shape {tuple(q)}.")
    if not len(q) == len(k) == len(v):
        shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
        raise ValueError(f"q, k and v need the same number of dimensions; got {shapes}.")
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
    if not supports["nq_ne_nk"] and q[-2] != k[-2]:
        raise NotImplementedError(
            f"{supports['stage']} is for self-attention, Nq = Nk; {_shapes(q, k)}. {_HAS['nq_ne_nk']} takes Nq != Nk."
        )


def check_saved(q, dout, out, lse):
    """Raises unless dout and out are like q, and lse is (..., H, Nq) in the type that `forward` returns."""
    like_q, device = (q.shape, q.dtype), q.device
    for name, x, (shape, dtype) in (
        ("dout", dout, like_q),
        ("out", out, like_q),
        ("lse", lse, (q.shape[:-1], lse_dtype(q))),
    ):
        check_dense(name, x)
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} as forward returned it; got {tuple(x.shape)}.")
        if x.dtype != dtype or x.device != device:
            raise TypeError(f"{name} must be {_short(dtype)} on {device}; got {_short(x.dtype)} on {x.device}.")


def check_deterministic(value):
    """Raises TypeError unless the argument `deterministic` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"deterministic must be True or False, got {value!r}.")


def _named(supports):
    return supports["stage"] + (f" (rung {supports['rung']})" if "rung" in supports else "")


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
