"""The features of stage 03: masks, dropout, windows, packed sequences, decoding.

This file has the names that steps/contract.py expects of a stage with features (listed in contract.NoFeatures).

    options.py                    the options: their defaults, and the checks of what is given
    scores.py                     what a feature does to a tile of scores
    flash.py, flash_kernels.py    the kernels that have all of them; tiles.py: how they read and write
    flash_gluon.py                a faster forward on Hopper for a window, packed sequences and sinks
    flash_gluon_backward.py       a faster backward on Hopper for these, a soft-cap and dropout
    decode.py                     few queries and many keys
    dropout.py                    seeds, and which entries of P are kept
    sdpa.py, models.py            torch's function, and models that exist
"""

import torch

from steps import checks

from . import decode, flash, flash_gluon, flash_gluon_backward, options
from .dropout import draw_seed  # noqa: F401  The contract finds these here.
from .options import (  # noqa: F401
    CARRIED,
    DEFAULTS,
    TENSORS,
    check_gradients,
    check_tensors,
    read,
    read_traced,
    seed_on,
)

GRADIENTS, NO_GRADIENT = ("mask", "sinks"), ("alibi_slopes", "lengths_k")
FLOATS = "softcap", "dropout_p"
SCHEMA = (
    ", SymInt[]? window=None, float? softcap=None, Tensor? mask=None, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    "float dropout_p=0.0, Tensor? seed=None, SymInt? first_query=None, SymInt first_key=0, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? lengths_k=None, "
    "bool check=False"
)
OF_FLASH = ("causal", "scale", "tile", *(name for name in DEFAULTS if name not in ("lengths_k", "check")))
OF_DECODE = "causal", "scale", *options.OF_DECODE


def take_wanted(given):
    """Takes mask_gradient out of the options; returns the names of the options whose gradients are wanted."""
    mask_gradient = given.pop("mask_gradient", False)
    checks.check_flag("mask_gradient", mask_gradient)
    if given.get("lengths_k") is not None:
        raise ValueError("lengths_k has no backward. Give the lengths as a mask.")
    mask = given.get("mask")
    if mask_gradient and (mask is None or getattr(mask, "dtype", None) == torch.bool):
        raise ValueError("mask_gradient needs a mask of floating-point numbers. Leave it out.")
    return ("mask",) * mask_gradient + ("sinks",) * (given.get("sinks") is not None)


def of_backward(named, wanted):
    """The named tensors that a backward takes. dq, dk and dv do not need the sinks, because lse contains them."""
    return {name: x for name, x in named.items() if name != "sinks" or name in wanted}


def forward_kernel(q, k, f, gradient):
    """(kernel, its options): decode's for few queries, Gluon's where that is faster, flash's for any other feature.

    None where no feature is in use: then a rung computes, also for few queries if a gradient is wanted.
    f: {name: value} of all options, and in "asked" the names of those in use.
    """
    if q.ndim < 4:
        q, k = q[(None,) * (4 - q.ndim)], k[(None,) * (4 - k.ndim)]
    asked, carried = f.get("asked", ()), f.get("out") is not None
    free = f["tile"] is None and f["rung"] is None and not carried
    used = {name: f[name] for name in (*asked, "causal")}
    few = free and k.shape[2] >= decode.LEAST_KEYS and {*options.OF_DECODE}.issuperset(asked) and decode.fits(q, k)
    if f.get("lengths_k") is not None or few and (asked or not gradient):
        kernel, names = decode.forward, OF_DECODE
    elif not asked:
        return None
    elif free and k.numel() and flash_gluon.fits(q, used):
        kernel, names = flash_gluon.forward, flash_gluon.OPTIONS
    else:
        kernel, names = flash.forward, (*OF_FLASH, *CARRIED) if carried else OF_FLASH
    return kernel, dict(zip(names, map(f.get, names), strict=True))


def backward_kernel(q, k, f, wanted):
    """The same for a backward."""
    if not f.get("asked"):
        return None
    free = f["tile"] is None and not f["deterministic"]
    used = {name: f[name] for name in (*f["asked"], "causal")}
    if free and k.numel() and flash_gluon_backward.fits(q, used):
        kernel, names = flash_gluon_backward.backward, flash_gluon_backward.OPTIONS
    else:
        kernel, names = flash.backward, (*OF_FLASH, "mask_gradient")
    f = f | {"mask_gradient": "mask" in wanted}
    return kernel, dict(zip(names, map(f.get, names), strict=True))
