"""The cases of the features: each feature alone, and some together as models combine them.

    inputs(names)            q, k, v, dout and the options of forward, of the features with these names together
    run(module, *inputs)     {name: result} of the module's forward and backward
    expected(*inputs)        the same in float64, with tolerances

The lengths are not multiples of a tile of 16 or 32, and there are fewer queries than keys. Some rows see no key, some
keys are seen by no query, and every tensor lies in a larger one that is full of NaN. Together the cases kill every
mutant in reference/feature_mutants.py.

The options have the names of stage 03's `forward`. One is the cases' own: `parts` are the borders between the keys of
several calls, which carry out and lse from one to the next.
"""

import math
from itertools import pairwise

import torch

from reference import cases, error, philox

Nq, Nk, D = 21, 37, 24


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def holes(*shape, seed, value):
    """An additive mask with some entries of `value`, and a row and a column of nothing else."""
    mask = random(*shape, seed=seed).masked_fill(random(*shape, seed=seed + 1) > 0.7, value)
    mask[..., 17] = value
    if shape[-2] > 1:
        mask[..., 4, :] = value
    return mask


def aligned(mask):
    """The same mask in a tensor whose rows are longer, full of NaN, and begin at multiples of 16 bytes."""
    keys = mask.shape[-1]
    rows = mask.new_full((*mask.shape[:-1], keys // 16 * 16 + 32), True if mask.dtype == torch.bool else math.nan)
    rows[..., :keys] = mask
    return rows[..., :keys]


def sizes(names):
    """(B, H, Hk)"""
    return (1, 4, 2) if "packed" in names else (2, 2, 1)


def features(B=2, H=2, n=1, device="cpu"):
    """{name: options} for n Nq queries and n Nk keys."""
    rows, keys, inf = n * Nq, n * Nk, math.inf

    def numbers(*shape, seed):
        return random(*shape, seed=seed).to(device)

    def mask(*shape, seed, value=-inf):
        return holes(*shape, seed=seed, value=value).to(device)

    def starts(*numbers):
        return torch.tensor([n * x for x in numbers], dtype=torch.int32, device=device)

    return {
        "causal": {"causal": True},
        "window": {"window": (6 * n, 3 * n)},
        "left window": {"window": (18 * n, -1)},
        "narrow window": {"window": (0, 0)},
        "softcap": {"softcap": 1.5},
        "boolean": {"mask": mask(1, H, rows, keys, seed=1) > -0.5},
        "boolean of all heads": {"mask": aligned(mask(B, 1, rows, keys, seed=1) > -0.5)},
        "padding": {"mask": mask(B, 1, 1, keys, seed=1) > -0.5},
        "additive": {"mask": mask(B, 1, rows, keys, seed=3)},
        "additive of each head": {"mask": mask(1, H, rows, keys, seed=3)},
        "additive for keys": {"mask": mask(H, 1, keys, seed=5, value=-1e4)},
        "additive for queries": {"mask": numbers(rows, 1, seed=7)},
        "additive for heads": {"mask": numbers(B, H, 1, 1, seed=8)},
        "alibi": {"alibi_slopes": 0.5 ** torch.arange(1, 3 * H, 3, device=device)},
        "alibi of each batch": {"alibi_slopes": numbers(B, H, seed=9)},  # of both signs
        "sinks": {"sinks": 1.5 * torch.arange(1, H + 1, device=device) - 2},  # natural units, of both signs
        "dropout": {"dropout_p": 0.4, "seed": torch.tensor(2**35 + 11)},
        "first": {"first_query": 9 * n, "first_key": 16 * n, "causal": True},
        "first key": {"first_key": 3 * n, "causal": True},
        "nothing seen": {"first_query": 60 * n, "window": (30 * n, -1)},
        "parts": {"first_query": keys - rows, "parts": (0, 5 * n, 16 * n, keys)},
        # The third sequence has no query, the fourth no key. Behind the last one there are rows left over.
        "packed": {"cu_seqlens_q": starts(0, 1, 18, 18, 19, 20), "cu_seqlens_k": starts(0, 1, 18, 19, 19, 36),
                   "max_seqlen_q": 17 * n, "max_seqlen_k": 17 * n},
        "lengths": {"lengths_k": torch.tensor([30, 9], dtype=torch.int32, device=device) * n},
    }  # fmt: skip


ALONE = [(name,) for name in features()]
COMBINED = [
    ("softcap", "window", "causal"), ("alibi", "packed", "first key"), ("alibi of each batch", "packed", "window"),
    ("additive", "dropout"), ("additive for keys", "packed"), ("additive for queries", "packed", "dropout"),
    ("causal", "first", "dropout", "left window"), ("softcap", "additive", "alibi"), ("causal", "dropout", "parts"),
    ("softcap", "alibi", "parts"), ("additive", "window", "parts"), ("causal", "lengths"),
    ("boolean of all heads", "packed", "dropout", "first key"), ("padding", "causal", "softcap"),
    ("boolean", "causal", "sinks"), ("causal", "window", "sinks", "packed"), ("alibi", "parts", "sinks"),
    ("additive", "dropout", "softcap", "sinks"), ("causal", "lengths", "sinks"),
    ("lengths", "window"), ("causal", "left window", "softcap", "lengths", "sinks"), ("alibi", "lengths", "softcap"),
    ("alibi of each batch", "causal", "lengths"), ("lengths", "narrow window", "sinks"),
]  # fmt: skip
CASES = ALONE + COMBINED


def inputs(names, dtype=torch.float32, gain=1.0, n=1, D=D, device="cpu"):
    """q, k, v, dout and the options."""
    B, H, Hk = sizes(names)
    every = features(B, H, n, device)
    options = {key: value for name in names for key, value in every[name].items()}
    if {"packed", "alibi of each batch"} <= set(names):  # of each sequence
        options["alibi_slopes"] = random(5, H, seed=9).to(device)
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(dtype)
    if "mask" in options and options["mask"].is_floating_point():
        mask = options["mask"].to(dtype)
        four = mask.view((1,) * (4 - mask.ndim) + mask.shape)
        alone = "additive of each head" in names
        options["mask"] = aligned(mask) if alone else cases.surround_with_nan(four, "heads inside").view_as(mask)
    shapes = (H, n * Nq), (Hk, n * Nk), (Hk, n * Nk), (H, n * Nq)
    tensors = (random(B, *shape, D, seed=20 + m).to(device, dtype) for m, shape in enumerate(shapes))
    q, k, v, dout = (cases.surround_with_nan(x) for x in tensors)
    return q.mul_(gain), k, v, dout, options


def run(module, q, k, v, dout, options, **more):
    """The results by name; with the gradient of the mask if it is additive. `more` options go to both functions."""
    options = options | more
    borders, mask, sinks = options.pop("parts", None), options.get("mask"), options.get("sinks")
    gradient = {"mask_gradient": mask is not None and mask.is_floating_point()}
    if borders is None:
        out, lse = module.forward(q, k, v, **options)
        grads = module.backward(dout, q, k, v, out, lse, **options, **gradient)
        return error._by_name(out, lse, *grads, sinks=sinks)
    calls = [_part_of(k, v, options, *ends) for ends in pairwise(borders)]
    for _, _, later in calls[1:]:
        later.pop("sinks", None)  # They count once, whether or not the first part has keys.
    out, lse = torch.zeros(q.shape, device=q.device), torch.full(q.shape[:3], -math.inf, device=q.device)
    for K, V, o in calls:
        module.forward(q, K, V, out=out, lse=lse, **o)
    parts = [[*module.backward(dout, q, K, V, out, lse, **o, **gradient)] for K, V, o in calls]
    dsinks = [] if sinks is None else [parts[0].pop()]  # Only the first call has them.
    dq, dk, dv, *dmask = zip(*parts, strict=True)
    if dmask:
        dmask = [sum(dmask[0]) if mask.shape[-1] == 1 else torch.cat(dmask[0], -1)]
    return error._by_name(out, lse, sum(dq), torch.cat(dk, 2), torch.cat(dv, 2), *dmask, *dsinks, sinks=sinks)


def _part_of(k, v, options, start, end):
    """(k, v, options) of a call with the keys from `start` to `end`."""
    options, mask = options | {"first_key": start}, options.get("mask")
    if mask is not None and mask.shape[-1] > 1:
        options["mask"] = mask[..., start:end]
    return k[:, :, start:end], v[:, :, start:end], options


def expected(q, k, v, dout, options):
    """What error.failures compares `run` with."""
    own = ("parts", "seed", "max_seqlen_q", "max_seqlen_k")
    wanted, mask = {name: x for name, x in options.items() if name not in own}, options.get("mask")
    if "seed" in options:
        numbered = {x: options[x] for x in ("first_query", "first_key") if x in options}
        packed = {x: options[x].cpu() for x in ("cu_seqlens_q", "cu_seqlens_k") if x in options}
        shape, p = (*q.shape[:3], k.shape[2]), options["dropout_p"]
        keep = philox.keep_mask(int(options["seed"]), *shape, p, **numbered, **packed)
        wanted |= {"dropout_mask": keep.to(q.device), "dropout_p": philox.rounded(p)}
    return error.expected(q, k, v, dout, mask_gradient=mask is not None and mask.is_floating_point(), **wanted)
