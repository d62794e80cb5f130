"""What went wrong inside an answer, in the reader's own lines."""

import re

SOURCE_LINE = r"{label}[:(](\d+)[:)].*?error: (.*)"  # g++ and NVRTC


def explain(error, task, answer, lines):
    """The child's account of an exception as lines of text. lines: {line of the copy: line of the answer}."""
    kind, message = error["type"], error["message"].strip()
    if kind == "WrongReturn":
        return [f"{task.function} {message}."]
    if compiler := re.search(SOURCE_LINE.format(label=re.escape(answer.label)), message):
        return [*answer.line(int(compiler[1])).splitlines(), f"the compiler says: {compiler[2]}"]
    if "cannot compile" in message and (first := re.search(r"^.*error: .*$", message, re.M)):
        return [first[0], "The compiler stumbles behind your function: is a brace missing in it?"]
    what = f"{kind}: {message}" if message else kind
    if kind == "Blank":
        what = "`raise Blank` is still there: delete it."
    where = [lines[line] for file, line in error["frames"] if file == f"steps/{task.file}" and line in lines]
    where += [line for file, line in error["frames"] if file == answer.label]  # a hunt's test is not spliced into anything
    if where:
        return [*answer.line(where[-1]).splitlines(), *what.splitlines()]
    stage = [f"{file}, line {line}" for file, line in error["frames"] if file.startswith(f"steps/{task.stage}/")]
    return [*what.splitlines(), *[f"raised in {place}, by what your function returned or left behind" for place in stage[-1:]]]
