# SPDX-License-Identifier: MIT
"""A cache for all that a call needs and that depends only on the options and the layout of its tensors.

    key = key_of(tensors, options)
    plan = plans.get(key) or plans.add(key, make_plan())

It is used by the contract (which checks have passed), for stage 02's plans, stage 03's recordings, and stage 04's
agreements. A cached value holds no tensor. Needs torch only.
"""

import numbers

import torch

NO_GRADIENT = (
    "a launcher has no gradient, and its input requires one. Call it in a torch.autograd.Function, as class Attention "
    "of steps/README.md does, or under torch.no_grad()."
)
CONSTANT = frozenset((bool, int, float, str, type(None)))  # the types of almost all options


class Cache(dict):
    """{key: value}. It is cleared when it has MOST entries, because a program may call with ever new lengths."""

    MOST = 1000

    def add(self, key, value):
        """The value, which is cached unless the key is None."""
        if key is not None:
            if len(self) >= self.MOST:
                self.clear()
            self[key] = value
        return value


def check_no_gradient(*tensors):
    """Raises RuntimeError where autograd expects a gradient that a launcher does not have, instead of losing it."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise RuntimeError(NO_GRADIENT)


def key_of(tensors, options):
    """All that checks and plans depend on: the options with their types, because 1 == True, and the tensors' layouts.

    Returns None, so that nothing is cached, for fake tensors, subclasses of Tensor and mutable options.
    """
    try:
        key = [(name, types_in(x), tuple(x) if type(x) is list else x) for name, x in options.items()]
        for x in tensors:
            if type(x) is torch.Tensor or type(x) is torch.nn.Parameter:
                address = x.data_ptr()
                if address == 0:
                    return None
                key.append((x.dtype, x.device, x.shape, x.stride(), address % 16, x.is_neg()))
            elif x is None:
                key.append(None)
            else:
                return None
        key = tuple(key)
        hash(key)
        return key
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def types_in(x):
    """The type of an option, or those of the numbers in a pair, because (1.0, 1) == (True, 1).

    Raises TypeError for mutable options. One of them would be a tensor, such as first_query: it equals itself, and has
    the same hash, also after its number has changed.
    """
    if type(x) in CONSTANT:
        return type(x)
    types = tuple(map(type, x)) if isinstance(x, (tuple, list)) else (type(x),)
    for kind in types:
        frozen = getattr(kind, "__dataclass_params__", None)
        if kind not in CONSTANT and not issubclass(kind, numbers.Number) and not (frozen and frozen.frozen):
            raise TypeError
    return types
