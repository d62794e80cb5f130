"""One rung of a stage with the functions of a whole stage, so that the contract's cases can be run on it."""

import functools
import importlib
import inspect
from types import SimpleNamespace

from reference import cases
from reference.error import NAMES
from steps import checks


def stage(name):
    """The package of a stage, such as steps.step00_naive for "step00_naive"."""
    return importlib.import_module(f"steps.{name}")


def on_rung(stage, rung):
    """forward, backward and attention of one rung, for `reference.cases.run`. A tile that it cannot take is ignored."""
    functions = {name: getattr(stage, name) for name in ("forward", "backward", "attention")}
    return SimpleNamespace(**{name: _call(f, rung, has_tiles(stage, rung)) for name, f in functions.items()})


def results(stage, rung, case, inputs):
    """{name: tensor}: the rung's results on a case, as far as `compared` lists them."""
    wanted = compared(stage, rung)
    return {name: x for name, x in cases.run(on_rung(stage, rung), case, inputs).items() if name in wanted}


def has_tiles(stage, rung):
    """Whether both kernels of the rung take an argument `tile`."""
    kernels = getattr(stage, "RUNGS", {}).get(rung, (stage.forward, stage.backward))
    return all("tile" in inspect.signature(kernel).parameters for kernel in kernels)


def compared(stage, rung):
    """The names of the results that tell whether the rung is right.

    All of them, if its backward is among SUPPORTS["own_backward"]. A rung that borrows the backward of another one, as
    stage 00's loops do, is judged by out and lse alone. The borrowed backward is compared on its own rung. It computes
    S with other roundings than this rung's forward, and with scores around 200 these differences exceed the tolerance
    of the gradients.
    """
    if rung in stage.SUPPORTS.get("own_backward", stage.SUPPORTS["rungs"]):
        return NAMES
    return NAMES[:2]


def supports_of(stage, rung):
    """The stage's SUPPORTS as they hold for one rung."""
    return checks.supports_of(stage.SUPPORTS, rung)


def _call(function, rung, takes_tile):
    @functools.wraps(function)
    def call(*args, tile=None, **options):
        if takes_tile and tile is not None:
            options["tile"] = tile
        return function(*args, **options, rung=rung)

    return call
