"""The rules about arguments, each written once: what came, what was expected, and what to do. Needs torch only.

    refuse, pick, check_call     options that a stage lacks; the rung of a call; q, k, v, causal, scale and tile
    check_saved, check_flag      the tensors of a backward; True or False
    check_shared                 a sequence that ranks share
    check_derivatives, in_memory    torch.func; tensors without memory
"""

import inspect
import math
import numbers
import operator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

# The stage that an error message recommends where another stage lacks a feature or a dtype.
_HAS = {
    "gqa": "steps.step03_triton",
    "nq_ne_nk": "steps.step03_triton",
    torch.float64: "steps.step00_naive",
    torch.float16: "steps.step03_triton",
    torch.bfloat16: "steps.step03_triton",
}
WIDEST = {  # stages that an error message recommends for a head_dim: the largest one, and the dtypes
    "steps.step03_triton": (256, (torch.float32, torch.float16, torch.bfloat16)),
    "steps.step00_naive": (1024, (torch.float32, torch.float64)),
}
METHOD = {  # {dtype: the tensor's method that converts to it}
    torch.bool: "bool", torch.int32: "int", torch.int64: "long", torch.float16: "half", torch.bfloat16: "bfloat16",
    torch.float32: "float", torch.float64: "double",
}  # fmt: skip
FLOAT32 = torch.finfo(torch.float32)
# {option: the stage that has it}, without those that every stage has.
STAGE_WITH = {
    **dict.fromkeys(
        ("window", "softcap", "mask", "sinks", "alibi_slopes", "dropout_p", "seed", "first_query", "first_key",
         "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "lengths_k", "check", "mask_gradient"),
        "step03_triton",
    ),
    **dict.fromkeys(("layout", "group", "block", "S", "transport"), "step04_ring"),
    "cu_seqlens": 'step04_ring.strategies.attention (with strategy="query_parallel")',
}  # fmt: skip
# {an option of torch's attention or of flash_attn: its name here}
OTHER_NAMES = {"is_causal": "causal", "attn_mask": "mask", "softmax_scale": "scale", "window_size": "window",
               "s_aux": "sinks", "learnable_sink": "sinks"}  # fmt: skip
# {an option, or "stage: option": what to do without it}, where another name would not be enough.
ADVICE = {
    "enable_gqa": "leave it out, as k and v may have fewer heads than q",
    "step03_triton: cu_seqlens": "here they are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k",
}

NO_TRANSFORMS = (
    "attention has no forward-mode derivative, and does not go with torch.func (grad, vjp, vmap, ...). "
    "Use .backward() or torch.autograd.grad, or torch's own scaled_dot_product_attention in its math form."
)

NOT_TWICE = (
    "attention can be differentiated once, and this asks for a gradient of its gradient. "
    "torch's own scaled_dot_product_attention in its math form has second derivatives."
)


def refuse(stage, function, options):
    """Raises for the first of these names, which are no options of the stage's function.

    NotImplementedError names the stage that has the option. TypeError gives our name for another library's option, or
    says that no stage has such an option.
    """
    given = next(iter(options))
    if advice := ADVICE.get(given) or ADVICE.get(f"{stage}: {given}"):
        raise TypeError(f"{stage}.{function} has no {given}; {advice}.")
    here = OTHER_NAMES.get(given, given)
    has = STAGE_WITH.get(here, stage)
    if has != stage:
        name = "" if here == given else f" as {here}"
        raise NotImplementedError(f"{stage}.{function} has no {given}; steps.{has} has it{name}.")
    if here != given:
        note = ", aligned at the bottom right" if here == "causal" else ""
        raise TypeError(f"{stage}.{function} has no {given}; here it is {here}={note}.")
    raise TypeError(f"{stage}.{function} got an unexpected keyword argument {given!r}.")


def pick(rungs, supports, rung, direction, q, whole=None, tile=None):
    """(the rung's forward for direction 0 or backward for 1, SUPPORTS as it holds for the rung).

    rung None stands for the first rung that takes q's dtype and head_dim, and has the tile, if one is given. A rung may
    take inputs for which another one is faster: SUPPORTS["best"](q, direction) says whether it is to be picked.
    whole: {rung: `supports_of` it}, if the caller has it already.
    Raises ValueError that names the rungs.
    """
    whole = whole or {rung: supports_of(supports, rung) for rung in rungs}
    if rung is not None and rung not in tuple(rungs):
        needs = [f": it needs {what}" for name, what in supports.get("elsewhere", {}).items() if name == rung]
        raise ValueError(
            f"{supports['stage']} has the rungs {', '.join(rungs)} here; got rung={rung!r}{''.join(needs)}."
        )
    if rung is not None:
        own = whole[rung]
        if not takes(own, q):
            own = own | {"instead": [name for name, other in whole.items() if takes(other, q)]}
        return rungs[rung][direction], own
    fitting = (name for name, own in whole.items() if takes(own, q))
    with_tile = []
    if tile is not None:
        fitting = list(fitting)
        with_tile = [name for name in fitting if as_pair(tile) in tiles_of(whole[name], q.shape[-1])]
    best = (name for name in with_tile or fitting if "best" not in whole[name] or whole[name]["best"](q, direction))
    name = next(best, with_tile[0] if with_tile else None)  # This looks at no more rungs than needed.
    if name is not None:
        return rungs[name][direction], whole[name]
    if takes(supports, q):
        raise no_rung(whole, supports, q)
    return rungs[next(iter(rungs))][direction], supports  # check_call will say what the stage does not take.


def supports_of(supports, rung):
    """SUPPORTS as it holds for one rung."""
    own = supports.get("limits", {}).get(rung)
    return supports if own is None else supports | own | {"rung": rung}


def takes(supports, q):
    """Whether q's dtype and head_dim are among those of SUPPORTS."""
    if not isinstance(q, torch.Tensor) or q.is_nested or q.ndim == 0:  # A nested tensor has no shape.
        return False
    return q.dtype in supports["dtypes"] and q.shape[-1] in supports["head_dims"]


def no_rung(whole, supports, q):
    offers = [f"{rung} ({', '.join(map(short, x['dtypes']))}; {span(x['head_dims'])})" for rung, x in whole.items()]
    asked = f"{short(q.dtype)} with head_dim {q.shape[-1]}"
    stage = supports["stage"]
    other = "" if stage == "step03_triton" else " steps.step03_triton takes it."
    return ValueError(f"no rung of {stage} takes {asked}; there are {', '.join(offers)}.{other}")


def check_call(supports, kernel, tensors, causal, scale, tile):
    """(scale, the kernel's further options) of a call. Raises for any input that the stage does not take.

    kernel: the call's kernel, or None where it is not chosen yet and every possible one has tiles.
    """
    for name, x in tensors:
        check_dense(name, x)
    (_, q), (_, k), (_, v) = tensors
    dtype, device = q.dtype, q.device
    check_shapes(supports, q.shape, k.shape, v.shape)
    check_length(q.shape[-2] + k.shape[-2])
    for name, x in tensors[1:]:
        if x.dtype != dtype or x.device != device:
            raise TypeError(
                f"q, k and v must share one dtype and device: q is {short(q.dtype)} on {q.device}, "
                f"{name} is {short(x.dtype)} on {x.device}. Convert {name} with {name}.to(q)."
            )
    if dtype not in supports["dtypes"]:
        has = _HAS.get(dtype, own := f"steps.{supports['stage']}")
        other = "" if has == own else f"; {has} takes {short(dtype)}"
        names = ", ".join(map(short, supports["dtypes"]))
        to = torch.float32 if torch.float32 in supports["dtypes"] else supports["dtypes"][0]
        advice = f"Convert with .to({to}){other}{', or name no rung' if 'rung' in supports and not other else ''}."
        raise TypeError(f"{named(supports)} takes {names}; got {short(dtype)}. {advice}")
    if device.type not in supports["devices"]:
        raise ValueError(
            f"{named(supports)} runs on {' or '.join(supports['devices'])} in this process; "
            f"the tensors are on {device}. "
            "Move them with .to(...), or start Python with STEPS_ENGINE=cpu or STEPS_ENGINE=cuda to choose the engine."
        )
    D = q.shape[-1]
    if D not in supports["head_dims"]:
        wider = (stage for stage, (most, dtypes) in WIDEST.items() if 0 < D <= most and dtype in dtypes)
        other = next((f" {stage} takes it." for stage in wider if stage != f"steps.{supports['stage']}"), "")
        if instead := supports.get("instead"):
            other = f" Name no rung, or {' or '.join(instead)}."
        raise ValueError(f"{named(supports)} takes head_dim {span(supports['head_dims'])}; got {D}.{other}")
    check_flag("causal", causal)
    if tile is not None:
        if kernel is not None and "tile" not in inspect.signature(kernel).parameters:
            raise ValueError(f"this rung of {named(supports)} has no tiles; got tile={tile!r}. Leave it out.")
        tile = check_tile(supports, tile, D)
    return check_scale(scale, D), {} if tile is None else {"tile": tile}


def check_length(rows):
    """ValueError if there are too many queries and keys for the 32 bits in which kernels count, with one tile added."""
    if isinstance(rows, int) and rows > 2**31 - 2**16:  # While a call is traced, the number may be a symbol.
        raise ValueError(f"q and k may have 2^31 - 2^16 rows together; got {rows}. Split the queries.")


def check_dense(name, x, optional=False):
    """Raises TypeError unless x is a dense tensor. optional: the error says that x might also be None."""
    if not isinstance(x, torch.Tensor):
        expected = "a torch.Tensor or None" if optional else "a torch.Tensor"
        raise TypeError(f"{name} must be {expected}, got {type(x).__name__}. Use torch.tensor(...).")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one. Convert it with .to_padded_tensor(0.0).")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {short(x.layout)}. Convert it with {name}.to_dense().")
    if x.is_quantized:
        raise TypeError(f"{name} must be a dense tensor, got a quantised one. Convert it with {name}.dequantize().")


def check_shared(supports, S, transport):
    """Raises ValueError unless S may be the length of a sequence that ranks share, and transport is one of SUPPORTS."""
    if not (S is None or isinstance(S, int) and S >= 0):
        raise ValueError(f"S must be the length of the whole sequence, an integer >= 0, or None; got {S!r}.")
    if transport not in (None, *supports["transports"]):
        names = ", ".join(map(repr, supports["transports"]))
        raise ValueError(f"transport must be {names}, or None for the faster one that can be used; got {transport!r}.")


def check_derivatives(*tensors):
    """Raises NotImplementedError if torch computes derivatives in another way than by autograd's backward."""
    in_func, in_forward_mode = torch._C._functorch.peek_interpreter_stack() is not None, forward_ad._current_level >= 0
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)] if in_forward_mode else []  # Otherwise it costs time.
    if in_func or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(NO_TRANSFORMS)


def in_memory(x):
    """x with its numbers in memory as they are. Raises an error that says why for a tensor without memory.

    Torch negates a tensor such as z.conj().imag only when it reads it. Here it is negated, because a kernel reads
    memory.
    """
    try:
        address = 0 if type(x) is FakeTensor else x.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and x.numel() > 0:
        refuse_without_memory(x)
    return x.resolve_neg() if x.is_neg() else x


def refuse_without_memory(x):
    """Raises the reason why a kernel cannot read the tensor x."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotImplementedError(NO_TRANSFORMS)
    if isinstance(x, FakeTensor):
        why = "it has a shape, but no numbers. The stages 00 to 03 take it where q is fake, too"
    elif any(kind.__name__ == "DTensor" for kind in type(x).__mro__):  # The import of DTensor would take a second.
        why = "its numbers are spread over the ranks of a device mesh. Give this rank's part, x.to_local()"
    else:
        why = "it is a subclass of torch.Tensor whose numbers lie elsewhere. Give the tensor that it stands for"
    raise TypeError(f"this {type(x).__name__} has no memory that a kernel can read: {why}.")


def check_tile(supports, tile, D):
    """The tile as a pair (Br, Bc) of Python's integers.

    Raises TypeError unless it is a pair of integers, and ValueError unless SUPPORTS offers it for this head_dim.
    """
    if not (pair := as_pair(tile)):
        raise TypeError(f"tile must be a pair of integers (Br, Bc), got {told(tile)}.")
    tiles = tiles_of(supports, D)
    if pair not in tiles:
        some = f" at head_dim {D}" if len(tiles) < len(supports["tiles"]) else ""
        there = f"the tiles (Br, Bc) {', '.join(map(str, tiles))}{some}" if tiles else f"no tile to name{some}"
        raise ValueError(f"{named(supports)} has {there}; got {tile!r}.")
    return pair


def tiles_of(supports, D):
    """The tiles that a call with this head_dim may name. Forward and backward take each of them."""
    fits = supports.get("tile_fits")
    return supports["tiles"] if fits is None else tuple(tile for tile in supports["tiles"] if fits(D, tile))


def as_pair(tile):
    """The tile as a tuple of Python's integers; () if it is none."""
    try:
        return tuple(map(operator.index, tile))
    except TypeError:
        return ()


def check_scale(scale, D):
    """The scale to use, which for None is 1/sqrt(D).

    Raises TypeError unless it is a number, and ValueError unless it is greater than 0 and float32 can hold it.
    """
    if scale is None:
        return 1 / math.sqrt(D)
    return check_factor("scale", scale, "1/sqrt(D)")


def check_factor(name, x, none):
    """x as a float: a factor of the scores in float32, which kernels also multiply by log2(e). none: what None is."""
    x = check_number(name, x, f"a number or None for {none}")
    if not FLOAT32.tiny <= x <= FLOAT32.max * math.log(2):
        must_be = f"a finite number > 0 that float32 can hold, times log2(e) too, or None for {none}"
        raise ValueError(f"{name} must be {must_be}; got {x}.")
    return x


def check_number(name, x, expected):
    """x as a float. Raises TypeError unless it is a number, and ValueError if it is an integer beyond float64."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be {expected}; got {told(x)}.")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be {expected}; got an integer beyond float64.") from None


def check_shapes(supports, q, k, v):
    """Raises unless the shapes q (..., H, Nq, D), k and v (..., Hk, Nk, D) fit together and the stage takes them."""
    if not 2 <= len(q) <= 4:
        raise ValueError(f"q must be (B, H, N, D), (H, N, D) or (N, D); got shape {tuple(q)}.")
    if not len(q) == len(k) == len(v):
        shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
        raise ValueError(f"q, k and v need the same number of dimensions; got {shapes}.")
    if k[:-1] == v[:-1] and k[-1] != v[-1]:
        of_v, of_k = "v with zeros, and drop these columns of out", "q and k with zeros, and give the scale"
        advice = of_v if v[-1] < k[-1] else of_k
        raise ValueError(
            f"k and v must have the same head_dim, as D_v != D is not supported; got k {tuple(k)}, v {tuple(v)}. "
            f"Pad {advice}."
        )
    if k != v:
        raise ValueError(f"k and v must have the same shape; got k {tuple(k)}, v {tuple(v)}.")
    if q[-1] != k[-1]:
        raise ValueError(f"q and k must have the same head_dim (last dimension); {shapes_of(q, k)}.")
    if len(q) == 4 and q[0] != k[0]:
        raise ValueError(f"q and k must have the same batch size (first dimension); {shapes_of(q, k)}.")
    if len(q) >= 3 and (H := q[-3]) != (Hk := k[-3]):
        if Hk == 0 or H % Hk:
            raise ValueError(
                f"the number of query heads must be a multiple of the number of key heads; {shapes_of(q, k)}."
            )
        if not supports["gqa"]:
            raise NotImplementedError(
                f"{supports['stage']} has no grouped heads (H = {H}, Hk = {Hk}); {_HAS['gqa']} has, "
                "or repeat k and v with .repeat_interleave(H // Hk, dim=-3)."
            )
    if not supports["nq_ne_nk"] and q[-2] != k[-2]:
        raise NotImplementedError(
            f"{supports['stage']} is for self-attention, Nq = Nk; {shapes_of(q, k)}. {_HAS['nq_ne_nk']} takes Nq != Nk."
        )


def check_saved(q, dout, out, lse, out_dtypes=None):
    """Raises unless dout and out are like q, and lse is (..., H, Nq) in the type that `forward` returns.

    out_dtypes: those of out, if it need not have q's.
    """
    for name, x, shape, dtypes in (
        ("dout", dout, q.shape, (q.dtype,)),
        ("out", out, q.shape, out_dtypes or (q.dtype,)),
        ("lse", lse, q.shape[:-1], (lse_dtype(q),)),
    ):
        check_dense(name, x)
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} as forward returned it; got {tuple(x.shape)}.")
        check_dtype(name, x, dtypes, q.device)


def check_dtype(name, x, dtypes, device):
    """Raises TypeError unless x has one of the dtypes and lies on the device, where q is."""
    if x.dtype not in dtypes or x.device != device:
        expected = " or ".join(dict.fromkeys(map(short, dtypes)))
        raise TypeError(
            f"{name} must be {expected} on {device}, where q is; got {short(x.dtype)} on {x.device}. "
            f"Convert it with {name}{conversion(x, dtypes, device)}."
        )


def conversion(x, dtypes, device):
    """The code that converts x to the first of the dtypes on the device, such as ".int()"."""
    to_device = "" if x.device == device else f'.to("{device}")'
    return to_device if x.dtype in dtypes else f"{to_device}.{METHOD[dtypes[0]]}()"


def told(x):
    """A value that came instead of a number, on one line; for a tensor also how to get its number."""
    if isinstance(x, torch.Tensor):
        method = ".tolist()" if x.ndim else ".item()"
        return f"a {type(x).__name__} of shape {tuple(x.shape)}; give what {method} returns"
    return " ".join(repr(x).split())


def lse_dtype(q):
    """The dtype of lse for the input q."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def check_flag(name, value):
    """Raises TypeError unless the argument of this name is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {told(value)}.")


def named(supports):
    return supports["stage"] + (f" (rung {supports['rung']})" if "rung" in supports else "")


def shapes_of(q, k):
    return f"q is {tuple(q)}, k is {tuple(k)}"


def short(dtype):
    return str(dtype).removeprefix("torch.")


def span(values):
    """Increasing numbers, with neighbours joined: "1 to 96, 128"."""
    runs = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
