"""The stage's public functions: a call with features goes to operators.py, any other to the rungs."""

import functools
import inspect

import torch

from steps import contract

from . import decode, flash, operators, options


def functions(rungs, supports):
    """(forward, backward, attention) as contract.py makes them from the rungs, which also take the features."""
    operators.run = contract.run  # In the interpreter one thread at a time.
    operators.check_inputs = functools.partial(contract.check_call, supports, flash.forward)
    plain = contract.entry_points(rungs, supports)
    whole = operators.forward, operators.backward, operators.attention
    return [with_features(*pair, supports) for pair in zip(plain, whole, strict=True)]


def with_features(plain, whole, supports):
    """`plain`, which leaves calls with features to `whole`, and calls that decode.py does faster."""
    of_rungs, of_features = inspect.signature(plain).parameters, inspect.signature(whole).parameters
    more = {name: x.default for name, x in of_features.items() if name not in of_rungs}
    is_forward = "dout" not in of_rungs
    own = [x for x in of_rungs.values() if x.kind != x.VAR_KEYWORD]
    known = {x.name for x in own} | more.keys()

    def function(*tensors, rung=None, **arguments):
        if not arguments.keys() <= known:
            contract.refuse(supports["stage"], plain.__name__, [name for name in arguments if name not in known])
        if more.keys() & arguments.keys():
            given = [name for name in more if options.is_given(arguments.get(name), more[name])]
            if given and rung is not None:
                raise ValueError(f"the rungs have no {given[0]}; got rung={rung!r}. Leave rung out.")
            if given:
                contract.check_deterministic(arguments.get("deterministic", False))
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
    if torch.compiler.is_compiling() or not (contract.takes(supports, q) and contract.takes(supports, k)):
        return False
    return k.ndim == 4 and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)) and decode.fits(q, k)
