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
    for case, inputs, want in _cases(job, supports):
        says = case.says + (f" ({inputs.ring[0]} ranks, {inputs.ring[1]})" if inputs.ring else "")
        tell(running=says)
        got = _results(stage, job, case, inputs, want)
        tell(says=says, failures=error.failures(got, want))
        rows.append((inputs, job["tile"] or inputs.tile or supports["tiles"][0], got, want))
    found = mutants.diagnose(rows, job["order"] or supports["order"])
    tell(mutants=[m.name for m in found], equals=[m.says for m in found])


def cost(job, tell):
    """Tells how often the cases access the emulated shared memory, and for how many of its turns ("wavefronts")."""
    stage, emulator = rungs.stage(job["stage"]), importlib.import_module(f"steps.{job['stage']}.emulator")
    with emulator.count_conflicts() as counts:
        for case, inputs, want in _cases(job, rungs.limits(stage, job["rung"])):
            _results(stage, job, case, inputs, want)
    accesses, turns = map(sum, zip(*counts.values(), strict=True))
    tell(accesses=accesses, turns=turns)


def _cases(job, supports):
    """(case, inputs, what is right) for the exercise's cases."""
    for name in job["cases"]:
        case = next(c for c in cases.CASES if c.name == name)
        x = cases.build(case, supports, supports["dtypes"][0], engine.device)
        yield case, x, error.expected(x.q, x.k, x.v, x.dout, causal=x.causal, scale=x.scale)


def _results(stage, job, case, inputs, want):
    """Results by name; of a function in a forward's or in a backward's file only those of that pass.

    A backward then gets out and lse as they should be: the stage's own forward would take as long, and is not asked about.
    """
    if inputs.ring:
        from steps.workbook.ring import on_new_ranks

        return on_new_ranks(case, inputs)
    kernel, tensors = rungs.on_rung(stage, job["rung"]), (inputs.q, inputs.k, inputs.v)
    if ".fwd_" in job["module"]:
        return dict(zip(error.NAMES[:2], kernel.forward(*tensors, **inputs.options), strict=True))
    single = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    out, lse = want.value["out"].to(inputs.q.dtype), want.value["lse"].to(single)
    return dict(zip(error.NAMES[2:], kernel.backward(inputs.dout, *tensors, out, lse, **inputs.options), strict=True))


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
