"""One rung of a stage, called as the contract's cases call a stage."""

import functools
import importlib
import inspect
from types import SimpleNamespace

from reference import cases
from reference.error import NAMES
from steps import contract


def stage(name):
    """The stage's package, such as "step00_naive"."""
    return importlib.import_module(f"steps.{name}")


def on_rung(stage, rung):
    """forward, backward and attention on one rung, for `reference.cases.run`. A rung without tiles is not asked for one."""
    functions = {name: getattr(stage, name) for name in ("forward", "backward", "attention")}
    return SimpleNamespace(**{name: _call(f, rung, has_tiles(stage, rung)) for name, f in functions.items()})


def results(stage, rung, case, inputs):
    """The rung's results on a case, by name: those that tell whether it is right."""
    return {name: x for name, x in cases.run(on_rung(stage, rung), case, inputs).items() if name in compared(stage, rung)}


def has_tiles(stage, rung):
    """Whether both kernels of the rung can be told which tile to use."""
    kernels = getattr(stage, "RUNGS", {}).get(rung, (stage.forward, stage.backward))
    return all("tile" in inspect.signature(kernel).parameters for kernel in kernels)


def compared(stage, rung):
    """The results that tell whether the rung is right.

    Where its backward bears another rung's word (stage 00's loops have none of their own), only out and lse: that backward is
    compared on its own rung, and forms S with other roundings than this forward, which scores of 200 show.
    """
    if rung == stage.SUPPORTS["rungs"][0] or not hasattr(stage, "RUNGS"):
        return NAMES
    kernel = stage.RUNGS[rung][1]
    return NAMES if rung in f"{kernel.__module__}.{kernel.__name__}" else NAMES[:2]


def limits(stage, rung):
    """SUPPORTS as it holds for one rung."""
    return contract.limits(stage.SUPPORTS, rung)


def _call(function, rung, tiles):
    @functools.wraps(function)
    def call(*args, tile=None, **options):
        return function(*args, **options, **({"tile": tile} if tiles and tile is not None else {}), rung=rung)

    return call
