"""Writes the files that a reader fills in, under my/.

Their signatures and docstrings are taken from the stage's own files, so that the two always agree.
"""

import ast
import re
import textwrap

from steps.course.workbook import exercises
from steps.course.workbook.answer import Problem, top_level
from steps.course.workbook.exercises import Hunt, Puzzle, Step
from steps.course.workbook.listing import cuda_span, show


def write(task):
    """Writes the task's file under my/, unless there is one already. Raises Problem if it cannot be written."""
    if task.mine.exists():
        return
    try:
        task.mine.parent.mkdir(exist_ok=True)
        task.mine.write_text(text(task), encoding="utf-8")
    except OSError as e:
        raise Problem(f"{task.label} cannot be written: {e.strerror}. May you write in the folder my/?") from None


def text(task):
    """The text of the file that a reader starts from."""
    if isinstance(task, Hunt):
        return _hunt(task)
    if isinstance(task, Step):
        return _capstone(task)
    return _python(task) if task.path.suffix == ".py" else _cuda(task)


# What a function must do beyond its formula, by the edge in which it is asked for.
PROMISES = {
    "minus_infinity": "A score may be -inf where nothing is masked, too, and counts as masked.",
    "nan": "A NaN among the scores has to stay: choose before you subtract or divide, instead of replacing NaN.",
    "many_merges": "out and lse stay float32 from merge to merge, whatever out_block is: roundings would add up.",
}


def _header(task, comment):
    lines = [
        f"{task.id} {task.title}. About {task.lines} lines.",
        "",
        f"Check it: python -m steps check {task.id}      Stuck: python -m steps hint {task.id}",
        f"Your function runs inside steps/{task.file}, so you can use everything that is defined there{_used(task)}.",
    ]
    promised = [PROMISES[edge] for edge in getattr(task, "edges", ()) if edge in PROMISES]
    if task.note or promised:
        lines += ["", " ".join([task.note] * bool(task.note) + promised)]
    header = _comment(lines, comment)
    if task.like:
        file, function = task.like
        example = [f"{comment} {line}" for line in str(show(*task.like)).splitlines()]
        header += f"\n{comment}\n{comment} For example, `{function}` of steps/{file}.py:\n" + "\n".join(example)
    return header


def _comment(lines, mark):
    wrapped = [part for line in lines for part in textwrap.wrap(line, 116) or [""]]
    return "\n".join(f"{mark} {line}".rstrip() for line in wrapped)


def _used(task):
    """The functions and constants of its file that the stage's own function uses, as the end of a sentence.

    None of them is a name that the function gives to something of its own: that would give the solution away.
    """
    if task.path.suffix != ".py":
        used = sorted(_constants(task.path.read_text(), task.function))
        return f", such as {', '.join(used)}" if used else ""
    tree = ast.parse(task.path.read_text())
    own = top_level(tree, task.function)
    names = [node for node in ast.walk(own) if isinstance(node, ast.Name)]
    local = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {a.arg for a in own.args.args}
    there = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    assigned = [target for n in tree.body if isinstance(n, ast.Assign) for target in n.targets]
    there += [t.id for target in assigned for t in ast.walk(target) if isinstance(t, ast.Name)]
    there += [a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    used = sorted({node.id for node in names} & set(there) - local)
    return f", such as {', '.join(used)}" if used else ""


def _constants(source, function):
    """The names that a CUDA function uses of those that are known when its file is compiled."""
    lines, span = source.splitlines(), cuda_span(source, function)
    own, rest = ("\n".join(part) for part in (lines[span], lines[: span.start] + lines[span.stop :]))
    there = {"D", "Br", "Bc", *re.findall(r"^(?:constexpr \w+|#define|using) (\w+)", rest, re.M)}
    return there & {*re.findall(r"\w+", re.sub("//.*", "", own))}


def _python(task):
    source = task.path.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    own = top_level(tree, task.function)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    before = ""
    if isinstance(task, Puzzle):
        before = f"\n\n{show(f'{task.stage}/{task.path.stem}', 'specification')}\n"
        used = {n.id for name in ("specification", task.function) for n in ast.walk(top_level(tree, name))
                if isinstance(n, ast.Name)} | {"triton"}  # fmt: skip
        imports = [n for n in imports if any((alias.asname or alias.name) in used for alias in n.names)]
    imported = ["\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in imports] + task.imports
    imported = "\n".join(sorted(imported, key=lambda text: (text.startswith("from"), text)))
    body = own.body[0] if ast.get_docstring(own) is not None else None
    until = body.end_lineno if body else own.body[0].lineno - 1
    signature = "\n".join(lines[own.lineno - 1 : until])
    head = "\n\n".join(filter(None, [_header(task, "#"), imported, "from steps.course.workbook import Blank\n"]))
    return f"{head}{before}\n\n{signature}\n    raise Blank\n"


def _capstone(task):
    """One file for all steps of the capstone."""
    steps = [t for t in exercises.of_stage(task.number) if isinstance(t, Step)]
    lines = [
        f"{task.id.removesuffix(f'.{task.level}')} The forward from an empty file, in {len(steps)} steps.",
        "",
        f"Write a Triton kernel, and below it `{task.function}`, which starts it. A check runs the cases of its step "
        "after those of all earlier steps. q is (B, H, Nq, D), k and v are (B, H, Nk, D), float32 with D contiguous.",
    ]
    for step in steps:
        lines += ["", f"Step {step.level}, about {step.lines} lines. {step.title}. {step.task}"]
        lines += [f"    python -m steps check {step.id}      python -m steps hint {step.id}"]
    lines += ["", f"Then the whole contract: {task.verify}"]
    own = top_level(ast.parse(task.path.read_text()), task.function)
    signature = f"def {task.function}({ast.unparse(own.args)}):"
    imports = "import torch\nimport triton\nimport triton.language as tl\n\nfrom steps.course.workbook import Blank"
    return f"{_comment(lines, '#')}\n\n{imports}\n\n\n{signature}\n    raise Blank\n"


def _cuda(task):
    source = task.path.read_text()
    own = source.splitlines()[cuda_span(source, task.function)]
    until = next(i for i, line in enumerate(own) if line.rstrip().endswith("{")) + 1
    return f"{_header(task, '//')}\n\n" + "\n".join([*own[:until], f"#error Blank {task.id}", "}", ""])


def _hunt(task):
    lines = [f"{task.id} {task.title}.", "", task.symptom, ""]
    lines.append(f"The kernel: python -m steps hint {task.id} --code, or in a notebook show(\"{task.id}\").")
    lines.append("Write the test that would have caught it, and find the cause.")
    if task.engine == "cpu":
        lines.append("It is checked on the CPU, also where there is a GPU.")
    lines.append(task.note)
    lines.append(f"Check it: python -m steps check {task.id}      Stuck: python -m steps hint {task.id}")
    lines += ["", "What is the cause? CAUSE is the letter of one of these:"]
    for letter, says in task.causes.items():
        lines += textwrap.wrap(f"  {letter}  {says}", 116, subsequent_indent=" " * 5)
    return f'''{_comment(lines, "#")}

import torch

from steps.course.workbook import Blank

CAUSE = ""


def test({task.subject}):
    """Asserts what must hold of {task.call}.

    q is (B, H, Nq, D), k and v are (B, H, Nk, D).
    """
    raise Blank
'''
