"""The reader's answer as text: where it comes from, whether it is still blank, and whether it has the shape that is asked for."""

import ast
import inspect
import re
import sys
import textwrap
import types
from dataclasses import dataclass

from steps.workbook.source import cuda_span


class Blank(Exception):
    """What an exercise that nobody has written yet raises."""


class Problem(Exception):
    """Something to tell the reader about the answer, before or instead of running it."""


@dataclass(frozen=True)
class Answer:
    """Source text and how messages call it. `helpers` is text that a notebook's other cells contribute."""

    text: str
    label: str
    helpers: str = ""

    def line(self, number):
        """Line `number` as messages show it."""
        lines = self.text.splitlines()
        return f"{self.label}, line {number}:\n    {lines[number - 1].strip() if 0 < number <= len(lines) else ''}"


def read(task, given=None):
    """The answer to a task: its file under my/, a function of a notebook, or text. Raises Problem."""
    name = getattr(task, "function", "test")
    if given is None:
        return Answer(task.mine.read_text(), task.label)
    if isinstance(given, str):
        return Answer(given, "your text")
    function = getattr(given, "py_func", getattr(given, "fn", given))  # what Numba's and Triton's decorators wrapped
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise Problem(
            f"Python has no source text of what was handed over ({given!r}): a function typed at a plain prompt leaves none. "
            f'Write it in {task.label}, then check("{task.id}") finds it there.'
        ) from None
    return Answer(text, f"your {name}", _companions(function) if isinstance(function, types.FunctionType) else "")


def _companions(function, done=()):
    """What a notebook's function uses of other cells: imports, and the text of its helper functions."""
    text, own = "", ast.parse(textwrap.dedent(inspect.getsource(function)))
    for name in sorted({node.id for node in ast.walk(own) if isinstance(node, ast.Name)}):
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            text += f"import {value.__name__} as {name}\n"
        elif not isinstance(value, types.FunctionType) or value is function or value in done:
            continue
        elif value.__module__ == function.__module__:
            text += _companions(value, (*done, function)) + textwrap.dedent(inspect.getsource(value))
        elif getattr(sys.modules[value.__module__], value.__name__, None) is value:
            text += f"from {value.__module__} import {value.__name__} as {name}\n"
    return text


def parse(answer):
    """The syntax tree of a Python answer; Problem cites the line that is no Python."""
    try:
        return ast.parse(answer.text)
    except SyntaxError as e:
        raise Problem(f"{answer.line(e.lineno or 1)}\n{type(e).__name__}: {e.msg}") from None


def top_level(tree, name):
    """The top-level function of that name, the last if there are several, or None."""
    return next((n for n in reversed(tree.body) if isinstance(n, ast.FunctionDef) and n.name == name), None)


def is_blank(answer, name, suffix=".py"):
    """Whether nobody has written it yet: the body, docstring apart, is `raise Blank`; in CUDA an `#error Blank` is left."""
    if suffix != ".py":
        return re.search(r"^\s*#error Blank\b", answer.text, re.M) is not None
    node = top_level(parse(answer), name)
    body = node.body[1:] if node and ast.get_docstring(node) is not None else node.body if node else []
    return len(body) == 1 and isinstance(body[0], ast.Raise) and ast.unparse(body[0]).startswith("raise Blank")


def require(answer, task):
    """Raises Problem unless the answer defines the task's function with the stage's parameters."""
    own = task.path.read_text()
    if task.path.suffix != ".py":
        if cuda_span(answer.text, task.function) is None:
            raise Problem(f"{answer.label} has no function {task.function}.")
        return
    tree, own = parse(answer), top_level(ast.parse(own), task.function)
    node, wanted = top_level(tree, task.function), f"def {own.name}({ast.unparse(own.args)})"
    if node is None:
        there = ", ".join(n.name for n in tree.body if isinstance(n, ast.FunctionDef)) or "no function"
        raise Problem(f"{answer.label} has {there}; expected {wanted}.")
    if _parameters(node) != _parameters(own):
        raise Problem(f"{answer.line(node.lineno)}\nexpected other parameters: {wanted}")


def _parameters(node):
    return [a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)]


def plain_source(task):
    """The text of the stage's own function where it is plain Python, which can be called by itself; None for a kernel's."""
    if task.path.suffix != ".py":
        return None
    text = task.path.read_text()
    own = top_level(ast.parse(text), task.function)
    return None if own.decorator_list else ast.get_source_segment(text, own)
