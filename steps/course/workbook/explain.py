"""Explains an exception inside an answer: which line of the reader's text raised it, and why."""

import ast
import re

from steps.course.workbook.answer import top_level

# Where the compilers and the emulation name a line.
COMPILER = r"^{file}[:(](\d+)[:)].*?error: (.*)"  # g++ and NVRTC
EMULATION = r"\b{file}:(\d+): (.*)"
NUMBA = r'^File ".*{file}", line (\d+):'
TRITON = r"at (\d+):\d+:\ndef (\w+)\((?:.*\n)*(.*)"

CONSEQUENCE = "as a consequence of what your function returned or stored"


def explain(error, task, answer, lines):
    """The lines of text that tell a reader about an exception.

    error: what failure.account returned in the child process. lines: {line of the copy: line of the answer}.
    """
    kind, message = error["type"], error["message"].strip()
    if kind == "WrongReturn":
        return [f"{getattr(task, 'function', 'test')} {message}."]
    if hasattr(task, "function") and task.path.suffix != ".py" and (found := _in_cuda(message, task, answer)):
        return found
    what = f"{kind}: {message}" if message else kind
    if kind == "OnlyOnAGPU":
        what = message
    if kind == "Blank":
        what = "`raise Blank` is still there: delete it."
    where = [lines[line] for file, line in error["frames"] if file == f"steps/{task.file}" and line in lines]
    where += [line for file, line in error["frames"] if file == answer.label]  # A hunt's test runs under its own name.
    if lines and (not where or kind == "CompilationError"):  # Triton compiles where a kernel is called.
        in_kernel, what = _in_compiled_python(what, task, answer, lines)
        where = in_kernel or where
    if where:
        return [*answer.line(where[-1]).splitlines(), *what.splitlines()]
    inside_stage = [f"{file}, line {line}" for file, line in error["frames"] if file.startswith(f"steps/{task.stage}/")]
    inside_stage = [where for where in inside_stage if "/memcheck.py" not in where]  # It tells of the frame before it.
    if not inside_stage or "/emulator/" in inside_stage[-1]:  # The emulation's own message says where and why.
        return what.splitlines()
    return [*what.splitlines(), f"raised in {inside_stage[-1]}, {CONSEQUENCE}"]


def _in_cuda(message, task, answer):
    """What the compiler or the emulation says of a line of the answer or of the text around it; None if nothing."""

    def find(pattern, file):
        return re.search(pattern.format(file=re.escape(file)), message, re.M)

    if found := find(COMPILER, answer.label):
        return [*answer.line(int(found[1])).splitlines(), f"the compiler says: {found[2]}"]
    if found := find(COMPILER, task.path.name):
        return [found[0], "The compiler finds this error behind your function: is a brace missing in it?"]
    if found := find(EMULATION, answer.label.split("/")[-1]):
        return [*answer.line(int(found[1])).splitlines(), found[2]]
    if found := find(EMULATION, task.path.name):
        # Where threads have come apart, the message also says in which line the others are.
        others = find(r"\b{file}:(\d+)", answer.label.split("/")[-1])
        yours = answer.line(int(others[1])).splitlines() if others else []
        return [*yours, f"{task.file}, line {found[1]}: {found[2]}", CONSEQUENCE]
    return None


def _in_compiled_python(what, task, answer, lines):
    """([line of the answer], what is wrong), as Numba's or Triton's compiler says it; ([], what) without a line."""
    found = re.search(TRITON, what)
    if found and (function := top_level(ast.parse(answer.text), found[2])):
        return [function.lineno + int(found[1]) - 1], found[3]
    for found in re.finditer(NUMBA.format(file=re.escape(task.file)), what, re.M):
        if int(found[1]) in lines:
            return [lines[int(found[1])]], what[: found.start()].rstrip()
    if found := re.search(r"name '(\w+)' is not defined", what):  # Numba names no line here.
        names = (node for node in ast.walk(ast.parse(answer.text)) if isinstance(node, ast.Name))
        return sorted(node.lineno for node in names if node.id == found[1])[:1], what
    return [], what
