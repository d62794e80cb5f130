"""Makes copies of steps/ and replaces functions in them by the reader's, as text. Nothing is imported to do so."""

import ast
import shutil
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

from steps.course.workbook import answer as answers
from steps.course.workbook.exercises import STEPS
from steps.course.workbook.listing import cuda_span


@dataclass
class Spliced:
    """The text of a file of the copy.

    lines: which of its lines are the answer's, as {line of the copy: line of the answer}.
    """

    text: str
    lines: dict = field(default_factory=dict)


def copy_of_steps(folder, pairs, whole=False):
    """Makes a copy of steps/ in the folder and replaces functions in it. Returns {exercise id: Spliced}.

    pairs: (exercise, answer); the answer replaces the exercise's function. whole: really copies everything. Otherwise
    a folder of steps/ is a link until one of its files is changed: to copy all files would take longer than a short
    check itself. So would compiling them again. Therefore the files that Python has compiled are copied too, except
    those of the changed files.
    """
    if whole:
        shutil.copytree(STEPS, Path(folder) / "steps")
    else:
        _link_all(STEPS, Path(folder) / "steps")
    spliced = {}
    for task, answer in pairs:
        spliced[task.id] = splice((Path(folder) / "steps" / task.file).read_text(), answer, task)
        write_copy(folder, task, spliced[task.id].text)
    return spliced


def write_copy(folder, task, text):
    """Writes the text into the task's file in the copy."""
    path = Path(folder) / "steps" / task.file
    linked = next((parent for parent in path.parents if parent.is_symlink()), None)
    if linked:
        original = linked.resolve()
        linked.unlink()
        shutil.copytree(original, linked)
    path.write_text(text)
    Path(cache_from_source(path)).unlink(missing_ok=True)


def _link_all(folder, target):
    """Makes the folder `target`: copies of the files in `folder` and links to its folders. course/ is made likewise."""
    target.mkdir()
    for path in folder.iterdir():
        if path.is_file() or path.name == "__pycache__":
            (shutil.copy2 if path.is_file() else shutil.copytree)(path, target / path.name)
        elif path == STEPS / "course":
            _link_all(path, target / path.name)
        else:
            _link(path, target / path.name)


def _link(path, target):
    try:
        target.symlink_to(path, target_is_directory=True)
    except OSError:  # Windows lets only few users make links.
        shutil.copytree(path, target)


def splice(text, answer, task):
    """The text of the stage's file with the answer in place of the exercise's function."""
    return (_python if task.path.suffix == ".py" else _cuda)(text, answer, task)


def _python(text, answer, task):
    """The function keeps the stage's decorators and loses the reader's.

    What else the answer defines or imports is inserted above it. Where the stage's file has the name of a helper, too,
    the helper gets another one: the reader cannot know all names there, and the file needs its own.
    """
    lines, tree = text.splitlines(), ast.parse(text)
    own = answers.top_level(tree, task.function)
    defined = {task.function}.union(*(_names(node) for node in tree.body if not isinstance(node, _IMPORTS)))
    sources = _with_other_names([answer.helpers, answer.text], defined.union(*map(_names, tree.body)) - {task.function})
    node = answers.top_level(ast.parse(sources[1]), task.function)
    result, mapped = lines[: _first_line(own) - 1], {}
    for source in sources:
        for extra in ast.parse(source).body:
            if isinstance(extra, _TRAVELS) and not _names(extra) & defined:
                _append(result, source, _first_line(extra), extra.end_lineno, mapped if source is sources[1] else {})
    result += lines[_first_line(own) - 1 : own.lineno - 1]  # the stage's decorators
    _append(result, sources[1], node.lineno, node.end_lineno, mapped)
    return Spliced("\n".join([*result, *lines[own.end_lineno :], ""]), mapped)


def _with_other_names(sources, taken):
    """The texts with another name for what they define under a taken one. Lines stay where they are."""
    trees = [ast.parse(source) for source in sources]
    defining = [node for tree in trees for node in tree.body if isinstance(node, _DEFINITIONS)]
    names = taken & set().union(*map(_names, defining))
    return [_renamed(source, tree, names) for source, tree in zip(sources, trees, strict=True)]


def _renamed(source, tree, names):
    lines = [line.encode() for line in source.split("\n")]  # Python counts columns in bytes.
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "col_offset", 0), reverse=True):
        name = getattr(node, "id", None) or getattr(node, "name", None)
        keyword = {ast.Name: "", ast.FunctionDef: "def ", ast.ClassDef: "class "}.get(type(node))
        if name in names and keyword is not None:
            line, end = lines[node.lineno - 1], node.col_offset + len((keyword + name).encode())
            lines[node.lineno - 1] = line[:end] + b"_of_yours" + line[end:]
    return b"\n".join(lines).decode()


_IMPORTS = ast.Import | ast.ImportFrom
_DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
_TRAVELS = _IMPORTS | _DEFINITIONS


def _names(node):
    """The names that a top-level statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _first_line(node):
    """The number of the statement's first line, including its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _append(result, source, first, last, mapped):
    """Appends the source's lines from first to last to the result, and records in `mapped` where each of them went."""
    for number in range(first, last + 1):
        result.append(source.splitlines()[number - 1])
        mapped[len(result)] = number


def _cuda(text, answer, task):
    """The answer replaces the function and its comment. `#line` makes the compiler cite lines of the reader's file."""
    lines = text.splitlines()
    span = cuda_span(text, task.function)
    yours = [f'#line 1 "{answer.label}"', *answer.text.splitlines()]
    rest = [f'#line {span.stop + 1} "{task.path.name}"', *lines[span.stop :]]
    return Spliced("\n".join([*lines[: span.start], *yours, *rest, ""]))
