"""The stage's public functions: `attention` of the rungs, which also takes the features.

A call with a feature goes to the kernels of flash.py, and one with few queries to decode.py; every other to the rungs.
As for these, what the checks decide is kept for each layout of the tensors (contract.Calls). While a call is traced,
operators.py does the same.
"""

import inspect
from functools import partial

import torch

from steps import checks, contract, engine

from . import decode, flash, operators, options


def functions(rungs, supports):
    """(forward, backward, attention) as contract.py makes them from the rungs, which also take the features."""
    plain = contract.entry_points(rungs, supports)
    return [with_features(*pair, supports) for pair in zip(plain, feature_functions(supports), strict=True)]


def with_features(plain, whole, supports):
    """`plain`, which leaves calls with features to `whole`, and calls that decode.py does faster."""
    of_rungs, of_features = inspect.signature(plain).parameters, inspect.signature(whole).parameters
    more = {name: x.default for name, x in of_features.items() if name not in of_rungs}
    is_forward = "dout" not in of_rungs
    own = [x for x in of_rungs.values() if x.kind != x.VAR_KEYWORD]
    known = {x.name for x in own} | more.keys()

    def function(*tensors, rung=None, **arguments):
        if not arguments.keys() <= known:
            checks.refuse(supports["stage"], plain.__name__, [name for name in arguments if name not in known])
        if more.keys() & arguments.keys():
            given = [name for name in more if options.is_given(arguments.get(name), more[name])]
            if given and rung is not None:
                raise ValueError(f"the rungs have no {given[0]}; got rung={rung!r}. Leave rung out.")
            if given:
                return whole(*tensors, **arguments)
            arguments = {name: value for name, value in arguments.items() if name not in more}
        if rung is None and is_forward and has_few_queries(supports, *tensors[:2], **arguments):
            return whole(*tensors, **arguments)
        return plain(*tensors, rung=rung, **arguments)

    function.__signature__ = inspect.Signature([*own, *(of_features[name] for name in more)])
    function.__doc__ = whole.__doc__ + '\n    rung: a kernel out of SUPPORTS["rungs"], for calls without features.'
    function.__doc__ += "\n        A call with few queries goes to decode.py, but not under torch.compile.\n"
    function.__module__, function.__name__, function.__qualname__ = plain.__module__, plain.__name__, plain.__name__
    return function


def has_few_queries(supports, q=None, k=None, *, tile=None, **_):
    """Whether a call without features is one for decode.py. While it is traced, its lengths may not be known."""
    if type(q) is not torch.Tensor or q.is_nested or q.ndim != 4 or q.shape[2] > 64 or tile is not None:
        return False
    if q.device.type not in supports["devices"]:  # A device that does not run the stage cannot be asked for its size.
        return False
    if torch.compiler.is_compiling() or not (checks.takes(supports, q) and checks.takes(supports, k)):
        return False
    return k.ndim == 4 and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)) and decode.fits(q, k)


def feature_functions(supports):
    """(forward, backward, attention) of operators.py, with the stage's rules and its kept calls."""
    forwards = contract.Calls(partial(checked_forward, supports))
    backwards = contract.Calls(partial(checked_backward, supports))

    @operators.with_features
    def forward(q, k, v, *, causal=False, scale=None, tile=None, out=None, lse=None, **features):
        if operators.is_traced(q):
            return operators.forward(q, k, v, causal=causal, scale=scale, tile=tile, out=out, lse=lse, **features)
        tensors, numbers = divided(features, q)
        return forwards(q, k, v, out, lse, *tensors, causal=causal, scale=scale, tile=tile, **numbers)

    @operators.with_features
    def backward(
        dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, deterministic=False, mask_gradient=False,
        **features
    ):  # fmt: skip
        own = dict(causal=causal, scale=scale, tile=tile, deterministic=deterministic, mask_gradient=mask_gradient)
        if operators.is_traced(q):
            return operators.backward(dout, q, k, v, out, lse, **own, **features)
        tensors, numbers = divided(features, q)
        return backwards(dout, q, k, v, out, lse, *tensors, **own, **numbers)

    forward.__doc__, backward.__doc__ = operators.forward.__doc__, operators.backward.__doc__
    return forward, backward, operators.differentiable(forward, backward)


def divided(features, q):
    """([the features that are tensors, or None], {the others}) of a call; a seed becomes a tensor."""
    tensors = [features.pop(name, None) for name in options.TENSORS]
    if tensors[2] is not None and not isinstance(tensors[2], torch.Tensor):
        tensors[2] = options.read_seed(tensors[2], q.device)
    return tensors, features


def checked_forward(supports, q, k, v, out, lse, *tensors, causal, scale, tile, **numbers):
    """A function of these tensors that computes (out, lse), after all checks."""
    f = read(supports, q, k, v, tensors, causal, scale, tile, numbers)
    options.check_carried(q, out, lse)
    if out is not None and f["lengths_k"] is not None:
        raise ValueError("lengths_k has no out and lse to carry; leave them out.")
    if q.numel() == 0 or k.numel() == 0:
        return no_key if out is None else unchanged
    kernel, names = operators.launcher(q, k, f, out is not None)
    call = call_of(kernel, names, f, (q.shape, q.shape[:-1]), ("out", "lse") if out is not None else ())
    return with_values_checked(call, f)


def checked_backward(
    supports, dout, q, k, v, out, lse, *tensors, causal, scale, tile, deterministic, mask_gradient, **numbers
):  # fmt: skip
    """A function of these tensors that computes (dq, dk, dv), and dmask if it is asked for, after all checks."""
    checks.check_flag("deterministic", deterministic)
    f = read(supports, q, k, v, tensors, causal, scale, tile, numbers)
    checks.check_saved(q, dout, out, lse, (q.dtype, torch.float32))
    if f["lengths_k"] is not None:
        raise ValueError("lengths_k has no backward. Give the lengths as a mask.")
    if mask_gradient and (f["mask"] is None or f["mask"].dtype == torch.bool):
        raise ValueError("mask_gradient needs a mask of floating-point numbers. Leave it out.")
    shapes = (q.shape, k.shape, v.shape, *((f["mask"].shape,) if mask_gradient else ()))
    if q.numel() == 0 or k.numel() == 0:
        return partial(zeros, mask_gradient)
    names = [name for name in f if name not in ("lengths_k", "check")]
    call = call_of(flash.backward, names, f, shapes, (), mask_gradient=mask_gradient)
    return with_values_checked(call, f)


def read(supports, q, k, v, tensors, causal, scale, tile, numbers):
    """{name: value} of all options as the launchers take them, checked but for the numbers in cu_seqlens."""
    engine.check_runs()
    f = options.read(dict(zip(options.TENSORS, tensors, strict=True)) | numbers)
    scale, own = checks.check_call(supports, flash.forward, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
    options.check(q, k, f)
    options.check_seed(f)
    return {"causal": causal, "scale": scale, "tile": own.get("tile")} | f


def call_of(kernel, names, f, shapes, carried, **more):
    """The contract's Call of a launcher: tensors by their names, everything else as its options."""
    tensors = [name for name in options.TENSORS if name in names and f[name] is not None]
    others = {name: f[name] for name in names if name not in options.TENSORS}
    return contract.Call(kernel, shapes, (*carried, *tensors), **others, **more)


def with_values_checked(call, f):
    """The call, before which the numbers in cu_seqlens and lengths_k are checked each time where they can be."""
    if f["cu_seqlens_q"] is None and f["lengths_k"] is None:
        return call

    def checked(*tensors):
        q, k = (tensors[1:3] if len(tensors) == 6 + len(options.TENSORS) else tensors[:2])
        options.check_values(q, k, f | dict(zip(options.TENSORS, tensors[-len(options.TENSORS) :], strict=True)))
        return call(*tensors)

    return checked


def no_key(q, k, v, *others):
    return contract.nothing(q, k, v)


def unchanged(q, k, v, out, lse, *tensors):
    return out, lse


def zeros(mask_gradient, dout, q, k, v, out, lse, mask, *tensors):
    return tuple(map(contract.zeros, (q, k, v, mask) if mask_gradient else (q, k, v)))
