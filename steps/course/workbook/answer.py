"""The reader's answer as source text.

This module reads it, tells whether it is still blank, and checks that it defines the function with the parameters that
the exercise asks for.
"""

import ast
import inspect
import re
import sys
import textwrap
import types
from dataclasses import dataclass

from steps.course.workbook.exercises import Step
from steps.course.workbook.listing import cuda_span


class Blank(Exception):
    """Raised by an exercise that nobody has written yet."""


class Problem(Exception):
    """The answer cannot be run, or needs a remark. The message says why."""


@dataclass(frozen=True)
class Answer:
    """Source text, and the name that messages give it. helpers: the text that a notebook's other cells contribute."""

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
        try:
            return Answer(task.mine.read_text(encoding="utf-8-sig"), task.label)
        except OSError as e:
            raise Problem(f"{task.label} cannot be read: {e.strerror}.") from None
        except UnicodeDecodeError:
            raise Problem(f"{task.label} is not UTF-8 text. Save it as UTF-8 in your editor.") from None
    if isinstance(task, Step) and not isinstance(given, str):
        raise Problem(f'The capstone is a file: write it in {task.label}, where check("{task.id}") finds it.')
    if isinstance(given, str):
        return Answer(given, "your text")
    # Numba's and Triton's decorators wrap the function.
    function = getattr(given, "py_func", getattr(given, "fn", given))
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise Problem(
            f"Python has no source text of what was handed over ({given!r}). A function that is typed at a plain "
            f'prompt leaves none. Write it in {task.label}, where check("{task.id}") finds it.'
        ) from None
    return Answer(text, f"your {name}", _companions(function) if isinstance(function, types.FunctionType) else "")


def _companions(function, done=()):
    """The text that a notebook's function needs from other cells: imports and helper functions."""
    text = ""
    own = ast.parse(textwrap.dedent(inspect.getsource(function)))
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
    """The syntax tree of a Python answer. Raises Problem, which cites the line, where the text is not Python."""
    try:
        return ast.parse(answer.text)
    except SyntaxError as e:
        raise Problem(f"{answer.line(e.lineno or 1)}\n{type(e).__name__}: {e.msg}") from None


def top_level(tree, name):
    """The top-level function of that name, or None. Where there are several it is the last, as it is for Python."""
    return next((n for n in reversed(tree.body) if isinstance(n, ast.FunctionDef) and n.name == name), None)


def constant(answer, name):
    """The value that the answer's top level gives to a name, if it is a plain one such as "b"; otherwise None."""
    for node in parse(answer).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value.value if isinstance(node.value, ast.Constant) else None
    return None


def has_kernel(answer):
    """Whether a top-level function of the answer is decorated with Triton's jit."""
    functions = (node for node in parse(answer).body if isinstance(node, ast.FunctionDef))
    return any("jit" in ast.unparse(decorator) for node in functions for decorator in node.decorator_list)


def is_blank(answer, name, suffix):
    """Whether nobody has written the answer yet.

    In Python the function's body, apart from its docstring, is then only `raise Blank`. In CUDA an `#error Blank` is
    left.
    """
    if suffix != ".py":
        return re.search(r"^\s*#error Blank\b", answer.text, re.M) is not None
    node = top_level(parse(answer), name)
    if node is None:
        return False
    body = node.body if ast.get_docstring(node) is None else node.body[1:]
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
    """The text of the stage's own function, or None if it belongs to a kernel and cannot be called by itself."""
    if task.path.suffix != ".py":
        return None
    text = task.path.read_text()
    own = top_level(ast.parse(text), task.function)
    return None if own.decorator_list else ast.get_source_segment(text, own)
