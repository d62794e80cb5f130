"""What a child process does with the reader's function: an exercise's cases, or a hunt's two kernels."""

import importlib
import importlib.util
import sys
import types

import torch

from reference import cases, error, mutants
from steps import engine
from steps.workbook import rungs


class WrongReturn(Exception):
    """The reader's function returned something of another structure or shape than the stage's own."""


def exercise(job, tell):
    """Runs the cases, telling before each its name and after it what is out of tolerance; then the diagnosis."""
    stage = rungs.stage(job["stage"])
    supports = rungs.limits(stage, job["rung"])
    if job["own"]:
        watch_returns(job["module"], job["function"], job["own"])
    rows = []
    for name in job["cases"]:
        case = next(c for c in cases.CASES if c.name == name)
        inputs = cases.build(case, supports, supports["dtypes"][0], engine.device)
        want = error.expected(inputs.q, inputs.k, inputs.v, inputs.dout, causal=inputs.causal, scale=inputs.scale)
        says = case.says + (f" ({inputs.ring[0]} ranks, {inputs.ring[1]})" if inputs.ring else "")
        tell(running=says)
        got = _results(stage, job, case, inputs)
        tell(says=says, failures=error.failures(got, want))
        rows.append((inputs, job["tile"] or inputs.tile or supports["tiles"][0], got, want))
    found = mutants.diagnose(rows, job["order"] or supports["order"])
    tell(mutants=[m.name for m in found], equals=[m.says for m in found])


def _results(stage, job, case, inputs):
    """Results by name; only out and lse where the function stands in a forward's file, and the backward is the stage's."""
    if inputs.ring:
        from steps.workbook.ring import on_new_ranks

        return on_new_ranks(case, inputs)
    if ".fwd_" in job["module"]:
        forward = rungs.on_rung(stage, job["rung"]).forward
        return dict(zip(error.NAMES, forward(inputs.q, inputs.k, inputs.v, **inputs.options), strict=False))
    return rungs.results(stage, job["rung"], case, inputs)


def watch_returns(module, name, own_text):
    """Compares the structure of what the reader's function returns with the stage's own, wherever the stage calls it."""
    module = importlib.import_module(module)
    theirs = getattr(module, name)
    if not isinstance(theirs, types.FunctionType):
        return  # a kernel's function: it cannot be called from here
    namespace = dict(vars(module))
    exec(own_text, namespace)
    own = namespace[name]

    def watched(*args, **options):
        want = own(*_clones(args), **_clones(options))
        got = theirs(*args, **options)
        if not _alike(got, want):
            raise WrongReturn(f"returned {_describe(got)}; expected {_describe(want)}")
        return got

    for other in [m for key, m in sys.modules.items() if key.startswith("steps.")]:
        for key, value in list(vars(other).items()):
            if value is theirs:
                setattr(other, key, watched)


def _clones(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(map(_clones, value))
    return {key: _clones(x) for key, x in value.items()} if isinstance(value, dict) else value


def _alike(got, want):
    if isinstance(want, tuple | list):
        return isinstance(got, tuple | list) and len(got) == len(want) and all(map(_alike, got, want))
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.shape == want.shape
    return (got is None) == (want is None)


def _describe(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_describe, value))})"
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"


def hunt(job, tell):
    """Runs the reader's test on the stage's forward, then on the broken one."""
    namespace = {"__name__": "hunt"}
    exec(job["helpers"], namespace)
    exec(compile(job["text"], job["label"], "exec"), namespace)
    test = namespace["test"]
    tell(running="the stage's own forward")
    test(rungs.stage(job["stage"]).forward)
    tell(good="passes", running="the broken kernel")
    spec = importlib.util.spec_from_file_location(job["module"], job["path"])
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    try:
        test(broken.forward)
    except Exception as e:
        tell(broken=": ".join([type(e).__name__, *str(e).splitlines()[:1]]))
