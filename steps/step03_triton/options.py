# SPDX-License-Identifier: MIT
"""The checks of the features' arguments: each says what it expected, what came, and what to do.

    read    what Python hands over: fills in what is not given, and checks the numbers
    check   the tensors' shapes, dtypes and devices; also on tensors without memory, while torch.compile traces a call
    check_values   the numbers in cu_seqlens and lengths_k

Numbers that lie on a GPU are checked only on demand, because Python would have to wait for the GPU. It repeats a few
functions of steps/checks.py, because it is also copied out, without that file. Needs torch only.
"""

import math
import numbers
import operator

import torch

# The features in the order in which the operators take them, and what each is where it is not given.
DEFAULTS = {
    "window": None, "softcap": None, "mask": None, "sinks": None, "alibi_slopes": None, "dropout_p": 0.0, "seed": None,
    "first_query": None, "first_key": 0, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None,
    "max_seqlen_k": None, "lengths_k": None, "check": False,
}  # fmt: skip
OF_DECODE = "window", "softcap", "alibi_slopes", "sinks", "lengths_k"  # what decode.py takes
TENSORS = ("mask", "sinks", "alibi_slopes", "seed", "cu_seqlens_q", "cu_seqlens_k", "lengths_k")
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
METHOD = {  # {dtype: the tensor's method that converts to it}
    torch.bool: "bool", torch.int32: "int", torch.int64: "long", torch.float16: "half", torch.bfloat16: "bfloat16",
    torch.float32: "float", torch.float64: "double",
}  # fmt: skip
FLOAT32 = torch.finfo(torch.float32)
LEAST_UNIT = 2.0**-64
FAR = 2**28  # Positions and lengths stay below it, so that sums of them fit into the kernels' 32 bits.

INTEGERS = {  # {an option: its least value, the end of its range, what else it may be}
    "first_query": (-FAR, FAR, " or None for Nk - Nq"), "first_key": (-FAR, FAR), "max_seqlen_q": (0, FAR),
    "max_seqlen_k": (0, FAR),
}  # fmt: skip


def asked(f):
    """The names of the features that ask for something, among those that `read` gave; `check` changes no result."""
    given = {name: f.get(name, x) for name, x in DEFAULTS.items() if name != "check"}
    return [name for name, x in given.items() if isinstance(x, torch.Tensor) or x != DEFAULTS[name]]


def read(features):
    """{name: value} of all features, from those given, with numbers as Python's own, and -1 for no limit of a window.

    Raises TypeError for an unknown name or a wrong type, and ValueError for a number that is out of range.
    """
    for name in features:
        if name not in DEFAULTS:
            raise TypeError(f"there is no option {name!r}. The features are {', '.join(DEFAULTS)}.")
    f = {name: default if features.get(name) is None else features[name] for name, default in DEFAULTS.items()}
    for name in TENSORS:
        if f[name] is not None and (name != "seed" or isinstance(f[name], torch.Tensor)):
            check_dense(name, f[name])
    if f["softcap"] is not None:
        f["softcap"] = read_factor("softcap", f["softcap"], "none")
    f["dropout_p"] = read_number("dropout_p", f["dropout_p"], "a number, 0 <= dropout_p < 1")
    if not 0 <= f["dropout_p"] < 1:
        raise ValueError(f"dropout_p must be a probability, 0 <= dropout_p < 1; got {f['dropout_p']}.")
    if f["seed"] is not None and not isinstance(f["seed"], torch.Tensor):
        f["seed"] = read_seed(f["seed"])
    check_flag("check", f["check"])
    return f | read_integers(f)


def read_integers(f):
    """{name: value} of the options that consist of integers, those that are given."""
    found = {name: read_integer(name, f[name], *rule) for name, rule in INTEGERS.items() if f[name] is not None}
    return found if f["window"] is None else found | {"window": read_window(f["window"])}


def read_seed(seed):
    return read_integer("seed", seed, -(2**63), 2**63, " or an int64 tensor of one element")


def check_seed(f):
    if f["dropout_p"] and f["seed"] is None:
        raise ValueError("dropout_p needs a seed: forward and backward must get the same. `attention` draws one.")


def read_window(window):
    """(left, right) as integers, -1 for no limit, from a pair of integers or None."""
    expected = "window must be None or a pair (left, right) of integers >= -1 or None"
    try:
        pair = [-1 if limit is None else index(limit) for limit in window]
    except TypeError:
        note = "(W - 1, 0) is the query's own key and W - 1 before it"
        raise TypeError(f"{expected}; got {told(window)}. {note}.") from None
    if len(pair) != 2 or not all(holds(limit >= -1, unknown=True) for limit in pair):
        raise ValueError(f"{expected}; got {told(window)}. -1 and None are no limit.")
    # No two positions are as far from each other as 4 FAR.
    return [-1 if holds(limit >= 4 * FAR, unknown=False) else limit for limit in pair]


def read_number(name, x, expected):
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be {expected}; got {told(x)}.")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be {expected}; got an integer beyond float64.") from None


def read_factor(name, x, otherwise):
    """x as a float: a number > 0 with which the kernels compute in float32, also multiplied by log2(e)."""
    expected = "None, or a finite number > 0 that float32 can hold, times log2(e) too"
    x = read_number(name, x, expected)
    if not FLOAT32.tiny <= x <= FLOAT32.max * math.log(2):
        raise ValueError(f"{name} must be {expected}; got {x}. Leave it out for {otherwise}.")
    return x


def check_unit(f, name):
    """Raises ValueError where the kernels divide what is called `name` by so small a number that it may be infinite.

    They count scores in units of the scale, or of the softcap; only beside an additive mask are these natural units.
    """
    unit = "scale" if f["softcap"] is None else "softcap"
    added = f["mask"] is not None and f["mask"].dtype != torch.bool
    if not added and f[unit] is not None and f[unit] < LEAST_UNIT:
        raise ValueError(
            f"with {name} {unit} must be at least 2^-64 = {LEAST_UNIT:.1e}, because the kernels divide by it; got "
            f"{f[unit]}. So small a {unit} makes all scores 0: give zeros for q."
        )


def read_scale(scale, softcap):
    """The scale as a float, after a check that the kernels can divide it by softcap."""
    scale = read_factor("scale", scale, "1/sqrt(D)")
    if softcap is not None and scale / softcap > FLOAT32.max:
        raise ValueError(f"scale / softcap must be a number that float32 can hold; got {scale} / {softcap}.")
    return scale


def read_tile(tile):
    """(Br, Bc) as Python's integers."""
    expected = "tile must be None or a pair (Br, Bc) of powers of two, at least 16"
    try:
        pair = list(map(operator.index, tile))
    except TypeError:
        raise TypeError(f"{expected}; got {told(tile)}.") from None
    if len(pair) != 2 or any(size < 16 or size & (size - 1) for size in pair):
        raise ValueError(f"{expected}; got {tile!r}.")
    return pair


def read_integer(name, x, least, end, otherwise=""):
    """x as Python's integer, if least <= x < end."""
    try:
        x = index(x)
    except TypeError:
        raise TypeError(f"{name} must be an integer{otherwise}; got {told(x)}.") from None
    if not (holds(least <= x, unknown=True) and holds(x < end, unknown=True)):
        raise ValueError(f"{name} must be at least {least} and less than {end}; got {x}.")
    return x


def holds(condition, unknown):
    """Whether a condition on a number holds.

    torch.compile does not know it of a number that `.item()` reads from a tensor; then it is `unknown`. The operator
    checks such a number when the compiled program runs.
    """
    if not torch.compiler.is_compiling():
        return condition
    shapes = torch.fx.experimental.symbolic_shapes
    return shapes.guard_or_true(condition) if unknown else shapes.guard_or_false(condition)


def index(x):
    """x as Python's integer. Raises TypeError for what is not an integer, such as True."""
    if isinstance(x, bool):
        raise TypeError
    if torch.compiler.is_compiling() and isinstance(x, int):
        return x  # operator.index would make it a constant of the compiled program.
    return operator.index(x)


def check_flag(name, x):
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {told(x)}.")


def check_dense(name, x):
    """Raises TypeError unless x is a tensor in which every entry has a place in memory."""
    if not isinstance(x, torch.Tensor):
        expected = "a torch.Tensor or None" if name in TENSORS else "a torch.Tensor"
        raise TypeError(f"{name} must be {expected}, got {type(x).__name__}. Use torch.tensor(...).")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one. Convert it with .to_padded_tensor(0.0).")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {short(x.layout)}. Convert it with {name}.to_dense().")
    if x.is_quantized:
        raise TypeError(f"{name} must be a dense tensor, got a quantised one. Convert it with {name}.dequantize().")


def taken(capability):
    """(dtypes, head_dims) that the kernels take on a GPU of this compute capability; None is Triton's interpreter.

    Triton does not use the tensor cores of GPUs before Ampere. Without them the 16-bit kernels do not fit into the
    registers, nor the larger head_dims into the shared memory.
    """
    if capability and capability[0] < 8:
        return (torch.float32,), range(1, 129)
    return FLOATS, range(1, 257)


def taken_on(device):
    """`taken` of a device. A tensor without memory may be on a GPU that this machine does not have."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return taken(torch.cuda.get_device_capability(device) if on_gpu else None)


def check_inputs(tensors):
    """Raises unless (("q", q), ("k", k), ("v", v)) fit to each other and to their GPU: no kernel may read elsewhere."""
    for name, x in tensors:
        check_dense(name, x)
    (_, q), (_, k), (_, v) = tensors
    dtypes, head_dims = taken_on(q.device)
    fit = 2 <= q.ndim <= 4 and k.ndim == q.ndim and k.shape == v.shape and q.shape[:-3] == k.shape[:-3]
    if not fit or q.ndim > 2 and q.shape[-3] % max(1, k.shape[-3]) or not q.shape[-1] == k.shape[-1] < head_dims.stop:
        raise ValueError(
            f"q must be (B, H, Nq, D), k and v (B, Hk, Nk, D), H a multiple of Hk, D at most {head_dims[-1]}, "
            "the same of all three; "
            f"got {', '.join(str(tuple(x.shape)) for x in (q, k, v))}."
        )
    for name, x in tensors:
        check_dtype(name, x, (q.dtype,) if q.dtype in dtypes else dtypes, q.device)


def check(q, k, f):
    """Raises unless the tensors of f, which `read` gave, fit to q (..., H, Nq, D) and k (..., Hk, Nk, D)."""
    B, H, Nq, Nk = sizes = size_of_scores(q, k)
    mask, slopes, seed = f["mask"], f["alibi_slopes"], f["seed"]
    if mask is not None:
        check_dtype("mask", mask, (torch.bool, *FLOATS), q.device)
        own = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if mask.ndim > 4 or not all(m == 1 or m == n for m, n in zip(own, sizes, strict=True)):
            raise ValueError(
                f"mask must broadcast to (B, H, Nq, Nk) = {sizes}; got {tuple(mask.shape)}. A mask of the keys of each "
                "batch entry is (B, 1, 1, Nk): index it with mask[:, None, None]."
            )
    sequences = B
    if any(f[name] is not None for name in PACKED):
        sequences = check_packed(q, B, f)
    if slopes is not None:
        check_dtype("alibi_slopes", slopes, FLOATS, q.device)
        if tuple(slopes.shape) not in ((H,), (sequences, H)):
            of_each = f"({'sequences' if f['cu_seqlens_q'] is not None else 'B'}, H)"
            raise ValueError(
                f"alibi_slopes must have shape (H,) or {of_each} = ({sequences}, {H}); got {tuple(slopes.shape)}. "
                "Select or expand the slopes of these heads."
            )
    if f["sinks"] is not None:
        check_dtype("sinks", f["sinks"], FLOATS, q.device)
        if tuple(f["sinks"].shape) != (H,):
            raise ValueError(
                f"sinks must have shape (H,) = ({H},), a number for each query head; got {tuple(f['sinks'].shape)}."
            )
    if isinstance(seed, torch.Tensor):
        check_dtype("seed", seed, (torch.int64,), q.device)
        if seed.numel() != 1:
            raise ValueError(f"seed must have one element; got {seed.numel()}. Draw one with torch.randint.")
    if f["lengths_k"] is not None:
        check_lengths(q, B, f)


def check_packed(q, B, f):
    """The number of packed sequences."""
    missing = [name for name in PACKED if f[name] is None]
    if missing:
        raise ValueError(f"packed sequences need {', '.join(PACKED)}; got no {missing[0]}. Give all four or none.")
    if B != 1:
        raise ValueError(f"packed sequences have B = 1; got B = {B}. Concatenate the sequences along the rows.")
    starts = f["cu_seqlens_q"], f["cu_seqlens_k"]
    for name, x in zip(PACKED, starts, strict=False):
        check_dtype(name, x, (torch.int32,), q.device)
        if x.ndim != 1 or x.shape[0] == 0:
            raise ValueError(
                f"{name} must have shape (n + 1,) for n sequences; got {tuple(x.shape)}. It begins with 0."
            )
    if starts[0].shape != starts[1].shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same length, one more than there are sequences; "
            f"got {starts[0].shape[0]} and {starts[1].shape[0]}. A sequence without a key is two equal neighbours."
        )
    return starts[0].shape[0] - 1


def check_lengths(q, B, f):
    others = [name for name in asked(f) if name not in OF_DECODE]
    if others:
        raise ValueError(
            f"lengths_k goes with causal, scale, window, softcap, alibi_slopes and sinks only; got {others[0]}. "
            "Give the lengths as a mask."
        )
    check_dtype("lengths_k", f["lengths_k"], (torch.int32,), q.device)
    if tuple(f["lengths_k"].shape) != (B,):
        raise ValueError(
            f"lengths_k must have shape (B,) = ({B},); got {tuple(f['lengths_k'].shape)}. It has one number for each "
            "batch entry."
        )


def check_values(q, k, f):
    """Raises ValueError for impossible numbers in cu_seqlens and lengths_k. Those on a GPU only with f["check"]."""
    if f["check"] or not q.is_cuda:
        if f["cu_seqlens_q"] is not None:
            for side, x in (("q", q), ("k", k)):
                check_starts(f"cu_seqlens_{side}", f[f"cu_seqlens_{side}"].tolist(), x, f[f"max_seqlen_{side}"])
        if f["lengths_k"] is not None and not all(0 <= n <= k.shape[-2] for n in f["lengths_k"].tolist()):
            raise ValueError(f"lengths_k must be between 0 and Nk = {k.shape[-2]}; got {f['lengths_k'].tolist()}.")


def check_starts(name, starts, x, longest):
    total, lengths = x.shape[-2], [end - start for start, end in zip(starts, starts[1:], strict=False)]
    if starts[0] != 0 or min(lengths, default=0) < 0 or starts[-1] > total:
        raise ValueError(
            f"{name} must begin with 0, never fall, and end at most at {total}, the number of rows; got {starts}. "
            "It is the cumulative sum of the lengths after a 0."
        )
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"max_seqlen_{name[-1]} must be at least the length of the longest sequence, {max(lengths)}; got {longest}."
        )


def check_carried(q, out, lse):
    """Raises unless both are None, or both are what earlier calls gave: out like q and lse like its rows, float32."""
    if (out is None) != (lse is None):
        missing = "lse" if lse is None else "out"
        raise ValueError(f"out and lse are carried together; got no {missing}. Begin with out = 0 and lse = -inf.")
    if out is None:
        return
    for name, x, shape in (("out", out, q.shape), ("lse", lse, q.shape[:-1])):
        check_dense(name, x)
        check_dtype(name, x, (torch.float32,), q.device)
        if x.shape != shape or not x.is_contiguous() or x.is_neg():
            layout = "not contiguous" if not x.is_contiguous() else "negated" if x.is_neg() else "contiguous"
            what = f"{tuple(x.shape)}, {layout}"
            raise ValueError(f"{name} must be {tuple(shape)} and contiguous; got {what}. It is changed in place.")


def check_saved(q, dout, out, lse):
    """Raises unless dout is like q, out too but for its dtype, and lse is what `forward` gave."""
    for name, x, shape, dtypes in (
        ("dout", dout, q.shape, (q.dtype,)),
        ("out", out, q.shape, (q.dtype, torch.float32)),
        ("lse", lse, q.shape[:-1], (torch.float32,)),
    ):
        check_dense(name, x)
        check_dtype(name, x, dtypes, q.device)
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} as forward returned it; got {tuple(x.shape)}.")


def check_dtype(name, x, dtypes, device):
    if x.dtype not in dtypes or x.device != device:
        expected = " or ".join(dict.fromkeys(map(short, dtypes)))
        raise TypeError(
            f"{name} must be {expected} on {device}, where q is; got {short(x.dtype)} on {x.device}. "
            f"Convert it with {name}{conversion(x, dtypes, device)}."
        )


def conversion(x, dtypes, device):
    """What makes of x a tensor of the first of the dtypes on the device, such as ".int()"."""
    to_device = "" if x.device == device else f'.to("{device}")'
    return to_device if x.dtype in dtypes else f"{to_device}.{METHOD[dtypes[0]]}()"


def told(x):
    """What came instead of a number, on one line; of a tensor also how to get its number."""
    if isinstance(x, torch.Tensor):
        method = ".tolist()" if x.ndim else ".item()"
        return f"a {type(x).__name__} of shape {tuple(x.shape)}; give what {method} returns"
    return " ".join(repr(x).split())


def size_of_scores(q, k):
    """(B, H, Nq, Nk), with 1 for a leading dimension that q does not have."""
    return q.shape[0] if q.ndim == 4 else 1, q.shape[-3] if q.ndim > 2 else 1, q.shape[-2], k.shape[-2]


def short(dtype):
    return str(dtype).removeprefix("torch.")
