"""The stage's public functions: `attention` of the rungs, which also takes the features.

A call with a feature, or with few queries, goes to checked.py, whose kernels are those of flash.py, flash_gluon.py and
decode.py; every other goes to the rungs. As for these, what the checks decide is kept for each layout of the tensors,
in contract.Calls.
"""

import inspect
from functools import partial
from numbers import Real

import torch

from steps import checks, contract, engine

from . import checked, decode, flash, operators, options


def functions(rungs, supports):
    """(forward, backward, attention) as contract.py makes them from the rungs, which also take the features."""
    plain = contract.entry_points(rungs, supports)
    forwards = contract.Calls(partial(checked_forward, rungs, supports))
    whole = checked.Functions(forwards, contract.Calls(partial(checked_backward, supports)))
    pairs = zip(plain, (whole.forward, whole.backward, whole.attention), strict=True)
    return [dispatching(*pair, supports) for pair in pairs]


def dispatching(plain, whole, supports):
    """`plain`, which leaves calls with features, or with few queries, to `whole`."""
    of_rungs, of_features = inspect.signature(plain).parameters, inspect.signature(whole).parameters
    more = {name: x.default for name, x in of_features.items() if name not in of_rungs}
    is_forward = "dout" not in of_rungs
    own = [x for x in of_rungs.values() if x.kind != x.VAR_KEYWORD]
    known = {x.name for x in own} | more.keys()

    def function(*tensors, rung=None, **arguments):
        if not arguments.keys() <= known:
            checks.refuse(supports["stage"], plain.__name__, [name for name in arguments if name not in known])
        if more.keys() & arguments.keys():
            given = [name for name, x in arguments.items() if name in more and is_given(x, more[name])]
            if given and rung is not None:
                raise ValueError(f"the rungs have no {given[0]}; got rung={rung!r}. Leave rung out.")
            if given:
                return whole(*tensors, **arguments)
            arguments = {name: value for name, value in arguments.items() if name not in more}
        if rung is None and is_forward and has_few_queries(supports, *tensors[:2], **arguments):
            return whole(*tensors, **arguments)
        return plain(*tensors, rung=rung, **arguments)

    function.__signature__ = inspect.Signature([*own, *(of_features[name] for name in more)])
    text = whole.__doc__ or ""  # python -OO leaves docstrings out.
    function.__doc__ = text + '\n    rung: a kernel out of SUPPORTS["rungs"], for calls without features.'
    if is_forward:
        function.__doc__ += "\n        A call with few queries, many keys and no gradient goes to decode.py, except"
        function.__doc__ += "\n        under torch.compile.\n"
    function.__module__, function.__name__, function.__qualname__ = plain.__module__, plain.__name__, plain.__name__
    return function


def is_given(value, default):
    """Whether an option of this default asks for something, or is a number for a flag, or a flag for a number."""
    if value is None or not isinstance(value, Real) or isinstance(value, bool) != isinstance(default, bool):
        return value is not None
    if torch.compiler.is_compiling():
        return not options.holds(value == default, unknown=False)
    return value != default


def has_few_queries(supports, q=None, k=None, *, tile=None, **_):
    """Whether a call without features may be one for decode.py. While it is traced, its lengths may not be known."""
    if type(q) is not torch.Tensor or q.is_nested or q.ndim < 2 or q.shape[-2] > 64 or tile is not None:
        return False
    if torch.compiler.is_compiling() or not (checks.takes(supports, q) and checks.takes(supports, k)):
        return False
    if k.ndim != q.ndim or k.shape[-2] < decode.LEAST_KEYS or q.device.type not in supports["devices"]:
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))


def checked_forward(rungs, supports, q, k, v, out, lse, *tensors, **given):
    """A function of these tensors that computes (out, lse), after all checks."""
    given = checked_by_stage(supports, q, k, v, tensors, given)
    f = checked.read_forward(q, k, v, out, lse, given)
    if operators.nothing_to_sum(q, k, f["sinks"]):
        return with_values_checked(no_key if out is None else unchanged, f, q)
    kernel, names = operators.launcher(operators.as_4d(q), operators.as_4d(k), f, out is not None)
    if kernel is flash.forward and out is None and not options.asked(f):  # a call with few queries, but few keys, too
        kernel, names = checks.pick(rungs, supports, None, 0, q)[0], ("causal", "scale")
    call = call_of(kernel, names, f, (q.shape, q.shape[:-1]), ("out", "lse") if out is not None else ())
    return with_values_checked(call, f, q)


def checked_backward(supports, dout, q, k, v, out, lse, *tensors, mask_gradient, **given):
    """A function of these tensors that computes (dq, dk, dv), dmask if asked for and dsinks, after all checks."""
    given = checked_by_stage(supports, q, k, v, tensors, given)
    f = checked.read_backward(dout, q, k, v, out, lse, mask_gradient, given)
    more = [f["mask"] if mask_gradient else None, f["sinks"]]
    shapes = (q.shape, k.shape, v.shape, *(x.shape for x in more if x is not None))
    if operators.nothing_to_sum(q, k, f["sinks"]):
        return with_values_checked(partial(zeros, mask_gradient), f, q)
    kernel, names = operators.backward_launcher(operators.as_4d(q), operators.as_4d(k), f)
    call = call_of(kernel, names, f | {"mask_gradient": mask_gradient}, shapes, ())
    return with_values_checked(call, f, q)


def checked_by_stage(supports, q, k, v, tensors, given):
    """{name: value} of what is given, after the checks of the stage."""
    engine.check_runs()
    numbers = (given[name] for name in ("causal", "scale", "tile"))
    checks.check_call(supports, flash.forward, (("q", q), ("k", k), ("v", v)), *numbers)
    return given | dict(zip(options.TENSORS, tensors, strict=True))


def call_of(kernel, names, f, shapes, carried):
    """The contract's Call of a launcher: tensors by their names, everything else as its options."""
    tensors = [name for name in options.TENSORS if name in names and f[name] is not None]
    others = {name: f[name] for name in names if name not in options.TENSORS}
    return contract.Call(kernel, shapes, (*carried, *tensors), **others)


def with_values_checked(call, f, q):
    """The call, before which the numbers in cu_seqlens and lengths_k are checked each time where they can be."""
    if f["cu_seqlens_q"] is None and f["lengths_k"] is None or q.is_cuda and not f["check"]:
        return call
    others = {name: x for name, x in f.items() if name not in options.TENSORS}  # What is kept keeps no tensor alive.

    def checked_call(*tensors):
        q, k = (tensors[1:3] if len(tensors) == 6 + len(options.TENSORS) else tensors[:2])
        options.check_values(q, k, others | dict(zip(options.TENSORS, tensors[-len(options.TENSORS) :], strict=True)))
        return call(*tensors)

    return checked_call


def no_key(q, k, v, *others):
    return contract.nothing(q, k, v)


def unchanged(q, k, v, out, lse, *tensors):
    return out, lse


def zeros(mask_gradient, dout, q, k, v, out, lse, mask, sinks, *tensors):
    more = [mask if mask_gradient else None, sinks]
    return tuple(map(contract.zeros, (q, k, v, *(x for x in more if x is not None))))
