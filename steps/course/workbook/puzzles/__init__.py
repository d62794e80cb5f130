"""Exercises that stand on their own: each module here is one of them, most with a small kernel around the function.

Such a module has
    specification   what is computed, in a few lines of torch; the reader's file begins with it
    the function    that the exercise asks for, and the kernel that calls it, if there is one
    run             starts the kernel: {name: tensor} from the arguments of the specification
    expected        {name: (what `run` has to return, how far from it a result may be)}
    CASES           the inputs that a check runs
    the mistakes    functions marked by `mistake`: what `run` returns if that mistake is made; or
                    MISTAKES = {name: (what it says, answer)}, where run(answer=...) takes a function with the mistake,
                    or, if there is `mistaken`, mistaken(answer=...) returns what `run` would return
    explain         optional: the lines of text about a wrong result in the words of the exercise
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral

import torch

from reference import mutants
from steps.course.workbook import differences


@dataclass(frozen=True)
class Case:
    """One input. `says` is the property that it checks, in the words that report a failure."""

    says: str
    inputs: Callable  # () -> the arguments of the specification, by name
    how: dict = field(default_factory=dict)  # arguments of `run` that must not change the result, such as its tile


def mistake(says):
    """Marks a function as a known mistake. It gets the arguments of `run` and returns what `run` would return.

    says completes the sentence "This equals what you get when ...".
    """

    def mark(function):
        function.says = says
        return function

    return mark


def mistakes(puzzle):
    """{name: function}: the known mistakes of a module of this package."""
    found = {name: value for name, value in vars(puzzle).items() if hasattr(value, "says")}
    made = getattr(puzzle, "mistaken", puzzle.run)
    for name, (says, answer) in getattr(puzzle, "MISTAKES", {}).items():
        found[name] = mistake(says)(functools.partial(made, answer=answer))
    return found


def whole_numbers(function, result, count=1):
    """The whole number that the function of an exercise has returned, or the list of `count` of them if it is not 1.

    Raises TypeError for anything else, so that it is not cut to a whole number, and names what has come.
    """
    found = [result] if count == 1 else list(result) if isinstance(result, tuple | list) else []
    if len(found) != count or not all(isinstance(x, Integral) for x in found):
        wanted = "a whole number" if count == 1 else f"{('', '', 'two', 'three')[count]} whole numbers"
        raise TypeError(f"{function} has to return {wanted}; got {result!r:.60}")
    return int(found[0]) if count == 1 else [int(x) for x in found]


def judge(puzzle, case):
    """(arguments, results, expected results, lines about what is wrong) of a case with the module's function."""
    arguments = case.inputs() | case.how
    got, want = puzzle.run(**arguments), puzzle.expected(**case.inputs())
    lines = differences.of_tensors(got, want)
    if lines and hasattr(puzzle, "explain"):
        lines = puzzle.explain(got, want, **arguments)
    if case is puzzle.CASES[0] and not lines:
        again = puzzle.run(**arguments)
        lines = [] if all(torch.equal(got[name], again[name]) for name in got) else ["a second run differs"]
    return arguments, got, want, lines


def diagnose(puzzle, rows):
    """The names of the mistakes that the results equal in every case. rows: what `judge` returned for each case."""
    if not any(lines for *_, lines in rows):
        return []
    names = []
    for name, run in mistakes(puzzle).items():
        if not any(_differ(got, run(**arguments), want) for arguments, got, want, _ in rows):
            names.append(name)
    return names


def _differ(got, mistaken, want):
    return mutants._differ(got, mistaken, {name: tolerance for name, (_, tolerance) in want.items()})
