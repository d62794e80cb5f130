"""A copy of the stages in which the reader's functions stand in place of the stage's: text for text, nothing is imported."""

import ast
import shutil
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

from steps.workbook import answer as answers
from steps.workbook.exercises import STEPS
from steps.workbook.source import cuda_span


@dataclass
class Spliced:
    """A file of the copy, and which of the answer's lines its lines are: {line of the copy: line of the answer}."""

    text: str
    lines: dict = field(default_factory=dict)


def copy_of_steps(folder, pairs):
    """Copies steps/ into the folder and puts each pair's answer in place of its exercise's function; {exercise id: Spliced}.

    What Python has compiled comes along, apart from those files: most of a short check would be compiling the rest.
    """
    shutil.copytree(STEPS, Path(folder) / "steps")
    spliced = {}
    for task, answer in pairs:
        path = Path(folder) / "steps" / task.file
        spliced[task.id] = splice(path.read_text(), answer, task)
        path.write_text(spliced[task.id].text)
        Path(cache_from_source(path)).unlink(missing_ok=True)
    return spliced


def splice(text, answer, task):
    """The stage's text with the answer in place of the exercise's function."""
    return (_python if task.path.suffix == ".py" else _cuda)(text, answer, task)


def _python(text, answer, task):
    """The stage's decorators stay, the reader's go. What else the answer defines or imports comes first, but for names taken."""
    lines, tree = text.splitlines(), ast.parse(text)
    own = answers.top_level(tree, task.function)
    node = answers.top_level(ast.parse(answer.text), task.function)
    taken = {task.function}.union(*(_names(n) for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)))
    result, mapped = lines[: _first_line(own) - 1], {}
    for source in (answer.helpers, answer.text):
        for extra in ast.parse(source).body:
            if isinstance(extra, _TRAVELS) and not _names(extra) & taken:
                _append(result, source, _first_line(extra), extra.end_lineno, mapped if source is answer.text else {})
    result += lines[_first_line(own) - 1 : own.lineno - 1]  # the decorators
    _append(result, answer.text, node.lineno, node.end_lineno, mapped)
    return Spliced("\n".join([*result, *lines[own.end_lineno :], ""]), mapped)


_TRAVELS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def _names(node):
    """The names that a top-level statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _first_line(node):
    """The number of the first line, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _append(result, source, first, last, mapped):
    """Adds the source's lines first ... last to the result and notes which they are."""
    for number in range(first, last + 1):
        result.append(source.splitlines()[number - 1])
        mapped[len(result)] = number


def _cuda(text, answer, task):
    """The whole answer instead of the function and its comment; #line makes the compiler cite the reader's file."""
    lines, span = text.splitlines(), cuda_span(text, task.function)
    around = f'#line 1 "{answer.label}"', f'#line {span.stop + 1} "{task.path.name}"'
    result = [*lines[: span.start], around[0], *answer.text.splitlines(), around[1], *lines[span.stop :], ""]
    return Spliced("\n".join(result))
