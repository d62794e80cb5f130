# SPDX-License-Identifier: MIT
"""The options of the features: their defaults, and checks that say what was expected, what came, and what to do.

    read_numbers    Python's numbers: fills in the defaults, and checks the numbers
    check_tensors   the tensors' shapes, dtypes and devices; also on tensors without memory, while torch traces a call
    check_values    the numbers in cu_seqlens and lengths_k

Numbers that lie on a GPU are checked only on demand, because Python would have to wait for the GPU.
"""

import operator

import torch

from steps.checks import FLOAT32, check_dense, check_dtype, check_factor, check_flag, check_number, check_scale, told

# The features in the order in which the operators take them, and the default of each.
DEFAULTS = {
    "window": None, "softcap": None, "mask": None, "sinks": None, "alibi_slopes": None, "dropout_p": 0.0, "seed": None,
    "first_query": None, "first_key": 0, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None,
    "max_seqlen_k": None, "lengths_k": None, "check": False,
}  # fmt: skip
OF_DECODE = "window", "softcap", "alibi_slopes", "sinks", "lengths_k"  # what decode.py takes
CARRIED = "out", "lse"  # the results of earlier calls
TENSORS = ("mask", "sinks", "alibi_slopes", "seed", "cu_seqlens_q", "cu_seqlens_k", "lengths_k")
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LEAST_UNIT = 2.0**-64
FAR = 2**28  # Positions and lengths stay below it, so that sums of them fit into the kernels' 32 bits.

INTEGERS = {  # {an option: its least value, the end of its range, what else it may be}
    "first_query": (-FAR, FAR, " or None for Nk - Nq"), "first_key": (-FAR, FAR), "max_seqlen_q": (0, FAR),
    "max_seqlen_k": (0, FAR),
}  # fmt: skip


def read(given, q, k):
    """{name: value} of the features, after all checks; "asked", the names of those in use; and "check_each".

    given: all options of a call by name. check_each: a function of the tensors among them, which checks their numbers
    at every call, or None.
    """
    f = read_traced(given, q)
    check_tensors(given | f, q, k)
    check = check_each(given | f, q, k)
    if check is not None:
        check_values(q.shape[-2], k.shape[-2], f)
    return f | {"asked": asked(given | f), "check_each": check}


def read_traced(given, q):
    """The same while torch traces a call, without the checks of tensors. An integer becomes a seed."""
    f, rung = read_numbers(given, q), given.get("rung")
    if rung is not None and (used := asked(given | f)):
        raise ValueError(f"the rungs have no {used[0]}; got rung={rung!r}. Leave rung out.")
    return f


def asked(f):
    """The names of the features in use. `check` is not among them, because it changes no result."""
    names = []
    for name in (*CARRIED, *DEFAULTS):
        x = f.get(name)
        if x is None or name == "check":
            continue
        if isinstance(x, torch.Tensor) or name in CARRIED:
            names.append(name)
        elif holds(x != DEFAULTS[name], unknown=True) if torch.compiler.is_compiling() else x != DEFAULTS[name]:
            names.append(name)
    return names


def read_numbers(given, q):
    """{name: value} of all features: those given, with numbers as Python's own, and -1 for a window without a limit.

    Raises TypeError for a wrong type, and ValueError for a number that is out of range.
    """
    f = dict(DEFAULTS)
    for name in DEFAULTS:
        if given.get(name) is not None:
            f[name] = given[name]
    if f["seed"] is not None and not isinstance(f["seed"], torch.Tensor):
        f["seed"] = seed_on(q.device, f["seed"])
    for name in TENSORS:
        if f[name] is not None:
            check_dense(name, f[name], optional=True)
    if f["softcap"] is not None:
        f["softcap"] = check_factor("softcap", f["softcap"], "no cap")
    f["dropout_p"] = check_number("dropout_p", f["dropout_p"], "a number, 0 <= dropout_p < 1")
    if not 0 <= f["dropout_p"] < 1:
        raise ValueError(f"dropout_p must be a probability, 0 <= dropout_p < 1; got {f['dropout_p']}.")
    if f["dropout_p"] and f["seed"] is None:
        raise ValueError("dropout_p needs a seed: forward and backward must get the same. `attention` draws one.")
    check_flag("check", f["check"])
    for name, rule in INTEGERS.items():
        if f[name] is not DEFAULTS[name]:
            f[name] = read_integer(name, f[name], *rule)
    if f["window"] is not None:
        f["window"] = read_window(f["window"])
    check_units(given, f)
    return f


def seed_on(device, seed):
    """An integer as a seed on the device, as `attention` draws one."""
    seed = read_integer("seed", seed, -(2**63), 2**63, " or an int64 tensor of one element")
    return torch.full((), seed, dtype=torch.int64, device=device)


def read_window(window):
    """[left, right] as integers, -1 for no limit, from a pair of integers or None."""
    expected = "window must be None or a pair (left, right) of integers >= -1 or None"
    pair = []
    try:
        for limit in window:
            pair.append(-1 if limit is None else index(limit))
    except TypeError:
        note = "(W - 1, 0) is the query's own key and W - 1 before it"
        raise TypeError(f"{expected}; got {told(window)}. {note}.") from None
    for n, limit in enumerate(pair):
        if len(pair) != 2 or not holds(limit >= -1, unknown=True):
            raise ValueError(f"{expected}; got {told(window)}. -1 and None are no limit.")
        if holds(limit >= 4 * FAR, unknown=False):  # No two positions are 4 FAR apart.
            pair[n] = -1
    if not pair:
        raise ValueError(f"{expected}; got {told(window)}.")
    return pair


def check_units(given, f):
    """Raises ValueError where the kernels divide by a scale or softcap that is so small that the result is infinite.

    They divide scores by the scale, or by the softcap; only with an additive mask do they compute in natural units.
    """
    scale, softcap = given.get("scale"), f["softcap"]
    if scale is not None:
        scale = check_scale(scale, None)
    if scale is not None and softcap is not None and scale / softcap > FLOAT32.max:
        raise ValueError(f"scale / softcap must be a number that float32 can hold; got {scale} / {softcap}.")
    name, unit = ("scale", scale) if softcap is None else ("softcap", softcap)
    if unit is None or f["mask"] is not None and f["mask"].dtype != torch.bool:
        return
    what = "out and lse of earlier calls" if given.get("out") is not None else None
    if f["alibi_slopes"] is not None and f["lengths_k"] is None:  # decode.py adds slopes in natural units.
        what = "alibi_slopes"
    if what and unit < LEAST_UNIT:
        raise ValueError(
            f"with {what} {name} must be at least 2^-64 = {LEAST_UNIT:.1e}, because the kernels divide by it; got "
            f"{unit}. So small a {name} makes all scores 0: give zeros for q."
        )


def read_integer(name, x, least, end, otherwise=""):
    """x as Python's integer, if least <= x < end."""
    try:
        x = index(x)
    except TypeError:
        raise TypeError(f"{name} must be an integer{otherwise}; got {told(x)}.") from None
    in_range = least <= x < end if not torch.compiler.is_compiling() else (
        holds(least <= x, unknown=True) and holds(x < end, unknown=True)
    )  # fmt: skip
    if not in_range:
        raise ValueError(f"{name} must be at least {least} and less than {end}; got {x}.")
    return x


def holds(condition, unknown):
    """Whether a condition on a number holds.

    torch.compile does not know a number that `.item()` reads from a tensor; then the answer is `unknown`. The operator
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


def check_tensors(f, q, k):
    """Raises unless the tensors among the options fit to q (..., H, Nq, D) and k (..., Hk, Nk, D)."""
    B, H, Nq, Nk = sizes = *(1, 1, *q.shape)[-4:-1], k.shape[-2]  # B and H are 1 where q does not have them
    mask, slopes, sinks, seed = f["mask"], f["alibi_slopes"], f["sinks"], f["seed"]
    if mask is not None:
        check_dtype("mask", mask, (torch.bool, *FLOATS), q.device)
        own = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if mask.ndim > 4 or not all(m == 1 or m == n for m, n in zip(own, sizes, strict=True)):
            raise ValueError(
                f"mask must broadcast to (B, H, Nq, Nk) = {sizes}; got {tuple(mask.shape)}. A mask of the keys of each "
                "batch entry is (B, 1, 1, Nk): index it with mask[:, None, None]."
            )
    sequences = B
    missing = []
    for name in PACKED:
        if f[name] is None:
            missing.append(name)
    if len(missing) < len(PACKED):
        sequences = check_packed(q, B, f, missing)
    if slopes is not None:
        check_dtype("alibi_slopes", slopes, FLOATS, q.device)
        if tuple(slopes.shape) not in ((H,), (sequences, H)):
            of_each = f"({'sequences' if f['cu_seqlens_q'] is not None else 'B'}, H)"
            raise ValueError(
                f"alibi_slopes must have shape (H,) or {of_each} = ({sequences}, {H}); got {tuple(slopes.shape)}. "
                "Select or expand the slopes of these heads."
            )
    if sinks is not None:
        check_dtype("sinks", sinks, FLOATS, q.device)
        if tuple(sinks.shape) != (H,):
            of_head = "a number for each query head"
            raise ValueError(f"sinks must have shape (H,) = ({H},), {of_head}; got {tuple(sinks.shape)}.")
    if isinstance(seed, torch.Tensor):
        check_dtype("seed", seed, (torch.int64,), q.device)
        if seed.numel() != 1:
            raise ValueError(f"seed must have one element; got {seed.numel()}. Draw one with torch.randint.")
    if f["lengths_k"] is not None:
        check_lengths(q, B, f)
    if f.get("out") is not None or f.get("lse") is not None:
        check_carried(q, f.get("out"), f.get("lse"))


def check_packed(q, B, f, missing):
    """The number of packed sequences. missing: the names of PACKED that are not given."""
    if missing:
        raise ValueError(f"packed sequences need {', '.join(PACKED)}; got no {missing[0]}. Give all four or none.")
    if B != 1:
        raise ValueError(f"packed sequences have B = 1; got B = {B}. Concatenate the sequences along the rows.")
    lengths = []
    for name in PACKED[:2]:
        check_dtype(name, f[name], (torch.int32,), q.device)
        shape = tuple(f[name].shape)
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"{name} must have shape (n + 1,) for n sequences; got {shape}. It begins with 0.")
        lengths += shape
    if lengths[0] != lengths[1]:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same length, one more than there are sequences; "
            f"got {lengths[0]} and {lengths[1]}. A sequence without a key is two equal neighbours."
        )
    return lengths[0] - 1


def check_lengths(q, B, f):
    if f.get("out") is not None:
        raise ValueError("lengths_k has no out and lse to carry; leave them out.")
    others = [name for name in asked(f) if name not in (*OF_DECODE, *CARRIED)]
    if others:
        raise ValueError(
            f"lengths_k goes with causal, scale, window, softcap, alibi_slopes and sinks only; got {others[0]}. "
            "Give the lengths as a mask."
        )
    check_dtype("lengths_k", f["lengths_k"], (torch.int32,), q.device)
    shape = tuple(f["lengths_k"].shape)
    if shape != (B,):
        raise ValueError(
            f"lengths_k must have shape (B,) = ({B},); got {shape}. It has one number for each batch entry."
        )


def check_each(f, q, k):
    """A check of the numbers in cu_seqlens and lengths_k for every call; None if there are none, or on a GPU."""
    if f["cu_seqlens_q"] is None and f["lengths_k"] is None or q.is_cuda and not f["check"]:
        return None
    names = [name for name in (*CARRIED, *TENSORS) if f.get(name) is not None]
    numbers = f | dict.fromkeys((*CARRIED, *TENSORS))  # The cached check must keep no tensor alive.
    Nq, Nk = q.shape[-2], k.shape[-2]
    return lambda *tensors: check_values(Nq, Nk, numbers | dict(zip(names, tensors, strict=True)))


def check_values(Nq, Nk, f):
    """Raises ValueError for impossible numbers in cu_seqlens and lengths_k. Nq, Nk: the rows of q and k."""
    if f["cu_seqlens_q"] is not None:
        for side, rows in (("q", Nq), ("k", Nk)):
            check_starts(f"cu_seqlens_{side}", f[f"cu_seqlens_{side}"].tolist(), rows, f[f"max_seqlen_{side}"])
    if f["lengths_k"] is not None and not all(0 <= n <= Nk for n in f["lengths_k"].tolist()):
        raise ValueError(f"lengths_k must be between 0 and Nk = {Nk}; got {f['lengths_k'].tolist()}.")


def check_starts(name, starts, total, longest):
    lengths = list(map(operator.sub, starts[1:], starts))
    if starts[0] != 0 or min(lengths, default=0) < 0 or starts[-1] > total:
        raise ValueError(
            f"{name} must begin with 0, never fall, and end at most at {total}, the number of rows; got {starts}. "
            "It is the cumulative sum of the lengths after a 0."
        )
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"max_seqlen_{name[-1]} must be at least the length of the longest sequence, {max(lengths)}; got {longest}."
        )


def check_gradients(given, *tensors):
    """Raises ValueError if a gradient is wanted that the kernels do not compute."""
    slopes = given.get("alibi_slopes")
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        raise ValueError("alibi_slopes has no gradient. Detach it, or add the biases as a mask.")
    tensors = *tensors, given.get("sinks")
    if given.get("lengths_k") is not None and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        raise ValueError("lengths_k has no backward. Use torch.no_grad(), or give the lengths as a mask.")


def check_carried(q, out, lse):
    """Raises unless both are None, or both are results of earlier calls: out like q, lse like q's rows, float32."""
    if (out is None) != (lse is None):
        missing = "lse" if lse is None else "out"
        raise ValueError(f"out and lse are carried together; got no {missing}. Begin with out = 0 and lse = -inf.")
    for name, x, shape in (("out", out, q.shape), ("lse", lse, q.shape[:-1])):
        check_dense(name, x)
        check_dtype(name, x, (torch.float32,), q.device)
        layout = "not contiguous" if not x.is_contiguous() else "negated" if x.is_neg() else "contiguous"
        if x.shape != shape or layout != "contiguous":
            what = f"{tuple(x.shape)}, {layout}"
            raise ValueError(f"{name} must be {tuple(shape)} and contiguous; got {what}. It is changed in place.")
