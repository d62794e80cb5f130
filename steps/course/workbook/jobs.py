"""What a child process does with an answer: the jobs "exercise", "cost" and "hunt".

child.py calls the function of the job's kind as (job, tell). job is the dictionary that checking.py made;
tell(name=value, ...) reports one row of results.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from reference import attention, cases, error, mutants
from steps import engine
from steps.course.workbook import capstone as steps_of_capstone
from steps.course.workbook import differences, edges, first_difference, one_rung, parts, puzzles
from steps.course.workbook.listing import edited

# Behind a case's name: the case is run by `_of_chunks`, in this order of the chunks.
LAST_FIRST, FIRST_FIRST = "in chunks of keys, the last one first", "in chunks of keys, the first one first"
TALL = "Br > Bc"  # behind a case's name: the case is run in the tile of the contract's case tall_tile


class WrongReturn(Exception):
    """The reader's function returned something of another structure or shape than the stage's own function does."""


class Ran(NamedTuple):
    """One case of an exercise after it ran."""

    says: str  # what a report calls it
    inputs: cases.Inputs
    run: Callable  # runs it once more
    got: dict
    want: error.Expected
    wrong: list  # lines that say what is wrong and where
    unwritten: list  # lines about results from shared memory that nobody had written


def exercise(job, tell):
    """Runs the exercise's cases.

    Tells the name of each case before it runs, what is wrong and where after it, and the diagnosis last: the mistakes
    that the results equal, and the first call of the function that differs from the stage's own.
    """
    stage = one_rung.stage(job["stage"])
    supports = one_rung.supports_of(stage, job["rung"])
    if job["threads"] and engine.name == "cpu":
        importlib.import_module(job["module"]).THREADS = tuple(job["threads"])
    all_cases = [case for case, _, lacks in cases.select(supports, engine.name == "cuda") if not lacks]
    asks_for_parts = job["function"] == "visible_part"
    tell(cases=len(job["cases"]) + len(job["edges"]) + asks_for_parts, of=len(all_cases))
    changed = watch_returns(job["module"], job["function"], job["own"]) if job["own"] else []
    products = as_on_a_gpu(job) if job["stage"] == "step03_triton" else None
    if asks_for_parts and not _parts_are_right(job, tell):
        return
    ran = [_run(job, stage, products, tell, *each) for each in _cases(job, supports)]
    if not any(one.wrong for one in ran):
        ran += [_run(job, stage, products, tell, *each) for each in _cases(edges.further_cases(job), supports)]
    all_right = not any(one.wrong for one in ran) and _edges_are_right(job, stage, supports, products, tell)
    tell(**_diagnosis(job, supports, ran), changed=changed)
    if products and all_right:
        products.raise_found()


def _parts_are_right(job, tell):
    """Whether the table of `visible_part` is right. If it is not, what a ring makes of it would add nothing."""
    tell(running=parts.SAYS)
    wrong, found = parts.judge(importlib.import_module(job["module"]))
    tell(says=parts.SAYS, wrong=wrong)
    if wrong:
        tell(mutants=found, equals=[parts.MISTAKES[name][0] for name in found], of_many=True)
    return not wrong


def _run(job, stage, products, tell, case, inputs, want):
    """Runs one case."""
    says = case.says + (f" ({inputs.ring[0]} ranks, {inputs.ring[1]})" if inputs.ring else "")
    tell(running=says)
    if products:
        products.bits = 8 * inputs.q.element_size()
    run = functools.partial(_results, stage, job, case, inputs, want)
    try:
        with _find_unwritten(job["stage"]) as unwritten:
            got = run()
    except Exception as e:
        if engine.name == "cpu" and (says := first_difference.structure(job, run)):
            raise WrongReturn(says) from e
        raise
    wrong = differences.lines(got, want)
    tell(says=says, wrong=wrong)
    return Ran(says, inputs, run, got, want, wrong, unwritten)


def _edges_are_right(job, stage, supports, products, tell):
    """Runs the edges of the exercise; whether all are right."""
    right = True
    for says, judge in edges.of(job):
        tell(running=says)
        if products:
            products.bits = 16 if judge is edges.many_tiles else 32
        wrong = judge(job, supports, lambda *case: _results(stage, job, *case))
        tell(says=says, wrong=wrong)
        right = right and not wrong
    return right


def _diagnosis(job, supports, ran):
    """What the results equal, or else what can be said of them."""
    # No mutant merges chunks.
    comparable = [one for one in ran if "layouts" not in supports or one.inputs.ring]
    rows = [(one.inputs, job["tile"] or one.inputs.tile or supports["tiles"][0], one.got, one.want)
            for one in comparable]  # fmt: skip
    # A function that hides nothing cannot make a mistake about the mask.
    found = mutants.diagnose(rows, job["order"] or supports["order"], job["masks"])
    of_the_mask = [m for m in found if m.concerns_the_mask]
    found = of_the_mask or found  # Where everything is NaN, mistakes elsewhere give the same.
    failed = [one for one in ran if one.wrong]
    difference = [line for one in failed for line in one.unwritten][:1]
    if not found or of_the_mask:
        difference += _first_difference(job, failed)
    remark = mutants.remark(rows) if failed and not found else ""
    names, equals = [m.name for m in found], [m.says for m in found]
    return dict(mutants=names, equals=equals, remark=remark, difference=difference)


def _first_difference(job, failed):
    """The lines about the first call of the function that differs, in the smallest of the failed cases."""
    if not failed or engine.name != "cpu":  # On a GPU a kernel's function cannot be called from here.
        return []
    if job["stage"] == "step02_fa2_cuda":
        from steps.course.workbook import probe  # It needs the emulation.

        return probe.explain(job)
    one = min(failed, key=_simplest)
    run = one.run
    if job["stage"] == "step04_ring":  # The ranks of a ring are processes of their own.
        merge = importlib.import_module(job["module"])
        run = lambda: _of_chunks(merge.merge, one.inputs, last_first=one.says.endswith(LAST_FIRST))  # noqa: E731
    return first_difference.explain(job, one.says, run, lambda results: not error.failures(results, one.want))


def _simplest(one):
    """What failed cases are sorted by: ordinary scores and several queries come first, then few numbers."""
    return mutants._largest_lse(one.want) > 50, one.inputs.q.shape[2] == 1, one.inputs.q.numel()


def as_on_a_gpu(job):
    """From now on Triton's interpreter refuses an access beside a tensor, as stage 03 has it, and rounds as a GPU does.

    Returns the watch over its products, or None on a GPU.
    """
    importlib.import_module("steps.step03_triton")
    if engine.name != "cpu":
        return None
    from steps.course.workbook import interpreted  # It imports Triton, which is for Linux only.

    importlib.import_module("steps.step03_triton.memcheck").watch_every_kernel()
    interpreted.faster()
    if job.get("contract", True):
        interpreted.contract()
    return interpreted.Products(job["folder"])


def puzzle(job, tell):
    """Runs the cases of a module of steps/course/workbook/puzzles, and tells the same as `exercise`."""
    module = importlib.import_module(job["module"])
    products = as_on_a_gpu(job) if hasattr(module, "triton") else None
    rows = []
    tell(cases=len(module.CASES))
    for case in module.CASES:
        tell(running=case.says)
        rows.append(puzzles.judge(module, case))
        tell(says=case.says, wrong=rows[-1][-1])
    known = puzzles.mistakes(module)
    found = puzzles.diagnose(module, rows)
    tell(mutants=found, equals=[known[name].says for name in found])
    if products and not any(lines for *_, lines in rows):
        products.raise_found()


def capstone(job, tell):
    """Runs the cases of the first step, then those of the next one, up to the job's level or the first wrong step."""
    products = as_on_a_gpu(job)
    tell(cases=sum(len(steps_of_capstone.STEPS[step]) for step in range(1, job["level"] + 1)))
    attention = importlib.import_module(job["module"]).attention
    for step in range(1, job["level"] + 1):
        rows = []
        for case in steps_of_capstone.STEPS[step]:
            tell(running=case.says, step=step)
            rows.append(steps_of_capstone.judge(attention, step, case, engine.device))
            tell(says=case.says, wrong=rows[-1][-1], step=step)
        if any(lines for *_, lines in rows):
            break
    found = steps_of_capstone.diagnose(rows, step)
    shown = [] if found else steps_of_capstone.first_difference(attention, step, rows)
    tell(mutants=[m.name for m in found], equals=[m.says for m in found], difference=shown)
    if products and not any(lines for *_, lines in rows):
        products.raise_found()


def _find_unwritten(stage):
    """A context with a list of the results that come from shared memory nobody had written. Only stage 02 can tell."""
    if stage == "step02_fa2_cuda" and engine.name == "cpu":
        return _emulator(stage).find_unwritten()
    return contextlib.nullcontext([])


def _emulator(stage):
    return importlib.import_module(f"steps.{stage}.emulator")


def cost(job, tell):
    """Tells what the emulation counts in the cases.

    How often warps access shared memory, how many wavefronts that takes, and the atomic additions to global memory.
    """
    stage, emulator = one_rung.stage(job["stage"]), _emulator(job["stage"])
    with emulator.count_conflicts() as counts, emulator.count_additions() as additions:
        for case, inputs, want in _cases(job, one_rung.supports_of(stage, job["rung"])):
            _results(stage, job, case, inputs, want)
    accesses, wavefronts = map(sum, zip(*counts.values(), strict=True))
    tell(accesses=accesses, wavefronts=wavefronts, additions=sum(additions.values()))


def _cases(job, supports):
    """Yields (case, inputs, expected results) of the exercise's cases."""
    for entry in job["cases"]:
        name, _, more = entry.partition(":")
        case = next(c for c in cases.CASES if c.name == name)
        if more:
            case = replace(case, says=f"{case.says}, {more}")
        if more == TALL:
            case = replace(case, tile="tall")
        x = cases.build(case, supports, getattr(torch, more, supports["dtypes"][0]), engine.device)
        if more in (LAST_FIRST, FIRST_FIRST):
            x = replace(x, ring=None)
        yield case, x, x.expected()


def _results(stage, job, case, inputs, want):
    """{name: tensor}: the case's results, only of the pass in whose file the function stands.

    For a function of a backward file, the backward gets the reference's out and lse. To compute them with the stage's
    forward would take as long as the backward itself, and the forward is not what the exercise checks.
    """
    if inputs.ring:
        from steps.course.workbook.case_on_ranks import on_new_ranks

        return on_new_ranks(case, inputs)
    if job["stage"] == "step04_ring":
        merge = importlib.import_module(job["module"]).merge
        return _of_chunks(merge, inputs, last_first=case.says.endswith(LAST_FIRST))
    kernel, tensors = one_rung.on_rung(stage, job["rung"]), (inputs.q, inputs.k, inputs.v)
    if ".fwd_" in job["module"]:
        with _unchanged(q=inputs.q, k=inputs.k, v=inputs.v):
            return dict(zip(error.NAMES[:2], kernel.forward(*tensors, **inputs.options), strict=True))
    single = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    out, lse = want.value["out"].to(inputs.q.dtype), want.value["lse"].to(single)
    given = (inputs.dout, *tensors, out, lse)
    with _unchanged(**dict(zip(("dout", "q", "k", "v", "out", "lse"), given, strict=True))):
        return dict(zip(error.NAMES[2:], kernel.backward(*given, **inputs.options), strict=True))


@contextlib.contextmanager
def _unchanged(**given):
    """Raises WrongReturn if something has been written to the caller's tensors."""
    before = _clones(given)
    yield
    for name, x in given.items():
        if not first_difference.is_same(x, before[name]):
            raise WrongReturn(f"changes {name}, which belongs to the caller of attention: work on a copy")


def _of_chunks(merge, x, last_first):
    """{"out", "lse"} of four chunks of keys, which `merge` merges one after the other.

    Under a causal mask the later chunks are empty for the first queries. From the last chunk to the first, both parts
    of the first merge are then empty; from the first to the last, an empty part comes after one with keys. In a ring
    neither happens, because each rank begins with its own keys and leaves out the rows that see no key of a block.
    """
    out, lse = torch.zeros_like(x.q), torch.full_like(x.q[..., 0], -math.inf)
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    hidden = ~attention.visible(x.q.shape[-2], x.k.shape[-2], x.causal)
    chunks = torch.arange(x.k.shape[-2]).chunk(4)
    for keys in reversed(chunks) if last_first else chunks:
        S = (scale * (x.q @ x.k[..., keys, :].mT)).masked_fill(hidden[:, keys], -math.inf)
        lse_block = S.logsumexp(-1)
        P = (S - lse_block.nan_to_num(neginf=0.0)[..., None]).exp()
        merge(out, lse, P @ x.v[..., keys, :], lse_block)
    return {"out": out, "lse": lse}


def watch_returns(module, name, own_text):
    """From now on a call of the reader's function raises WrongReturn if the stage's own returns another structure.

    Returns a list to which the names of those arguments are added that the stage's own function leaves as they were.
    """
    changed = []
    module = importlib.import_module(module)
    theirs = getattr(module, name)
    if not isinstance(theirs, types.FunctionType):
        return changed  # A kernel's function cannot be called from here.
    namespace = dict(vars(module))
    exec(own_text, namespace)
    own = namespace[name]

    def watched(*args, **options):
        before, copies = _clones(args), _clones(args)
        want = own(*copies, **_clones(options))
        got = theirs(*args, **options)
        if not _alike(got, want):
            raise WrongReturn(f"returned {_describe(got)}; expected {_describe(want)}")
        if want is None:  # A function that writes to its arguments may write to no others.
            for name, *x in zip(inspect.signature(own).parameters, before, copies, args, strict=False):
                if first_difference.is_changed(*x) and name not in changed:
                    changed.append(name)
        return got

    for other in [m for key, m in sys.modules.items() if key.startswith("steps.")]:
        for key, value in list(vars(other).items()):
            if value is theirs:
                setattr(other, key, watched)
    return changed


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
    """Runs the reader's test on the right kernel, then on the one with the edit.

    Raises WrongReturn if the test returns something: a test asserts, and pytest ignores what it returns.
    """
    namespace = {"__name__": "hunt"}
    exec(job["helpers"], namespace)
    exec(compile(job["text"], job["label"], "exec"), namespace)
    test = namespace["test"]
    tell(running="the repaired kernel")
    rung = job["rung"] and one_rung.on_rung(one_rung.stage(job["stage"]), job["rung"])
    right = getattr(rung or importlib.import_module(job["module"]), job["subject"])
    if (returned := test(_Subject(right))) is not None:
        raise WrongReturn(f"returned {returned!r:.40}; it has to assert, because what a test returns is ignored")
    tell(good="passes", running="the broken kernel")
    with edited(job["file"], job["edit"]) if rung else contextlib.nullcontext():
        broken = _Subject(right if rung else getattr(_broken_module(job), job["subject"]))
        try:
            test(broken)
        except Exception as e:
            return tell(broken=": ".join([type(e).__name__, *str(e).splitlines()[:1]]))
    tell(distance=broken.distance(right))


def _broken_module(job):
    """The module anew, from the broken text; for CUDA C++ the launcher, which then compiles that text."""
    file = Path(job["folder"]) / job["file"]
    file.write_text(job["broken"])
    path = file if file.suffix == ".py" else importlib.import_module(job["module"]).__file__
    spec = importlib.util.spec_from_file_location(job["module"], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FILE = file
    return module


class _Subject:
    """What a hunt's test calls. Neither its name nor its module tells whether it is the broken function."""

    def __init__(self, function):
        self._function, self._calls, self.__name__ = function, [], function.__name__

    def __call__(self, *args, **options):
        before = _clones(args), _clones(options)
        returned = self._function(*args, **options)
        if len(self._calls) < 3:
            self._calls.append((before, _clones(returned)))
        return returned

    def distance(self, right):
        """How far what was returned is at most from what `right` returns, in the first calls; infinite without any."""
        distances = []
        for (args, options), returned in self._calls:
            for x, y in zip(_tensors(returned), _tensors(right(*args, **options)), strict=True):
                if x.numel():
                    distances.append((x.double().nan_to_num() - y.double().nan_to_num()).abs().max().item())
        return max(distances, default=math.inf)


def _tensors(value):
    return [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, torch.Tensor)]
