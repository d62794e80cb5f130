"""Slips: mistakes that no mutant equals, but that show in an answer's text. A report names one only if it is proven.

An answer may contain the text of a slip and be right there, and wrong elsewhere. So a slip has a repair, and it is
named only if the answer passes with this repair alone. A few need none, because the syntax tree shows them.

The keys of a slip in exercises.toml:
    says      what is wrong there
    text      what the answer contains; spaces do not count, and ... is anything within a line
    repair    what to write in its place, or several pairs [old, new]
    first     lines of Python to write at the beginning of the function; they are a repair, too
    rounded   true: the repair is that products are rounded before they are added
    unstored  the parameter into which the answer stores nothing, which its syntax tree shows
    single    the name of a row that gets one value in a thread, which its syntax tree shows
    only      words in the names of all cases that are wrong
    lacks     what is missing, if the report has to name this instead of the text
    about     what the report begins with, if it is none of these
"""

import ast
import re
from dataclasses import replace

from steps.course.workbook.answer import top_level


def remarks(task, answer, rows, passes):
    """A line for each slip of the answer.

    rows: those of the check that failed. passes(answer, **options): whether another answer passes it, with these
    options of its job.
    """
    wrong = [row["says"] for row in rows if row.get("wrong")]
    slips = [slip for slip in task.slips if _only(slip, wrong)]
    found = [slip for slip in slips if _shown(slip, task, answer) or _passes_with([slip], task, answer, passes)]
    several = [slip for slip in slips if _repaired(slip, task, answer)]
    if not found and len(several) > 1 and _passes_with(several, task, answer, passes):  # Each of them has to be needed.
        rest = {id(slip): [x for x in several if x is not slip] for slip in several}
        found = [slip for slip in several if not _passes_with(rest[id(slip)], task, answer, passes)]
    return [f"{_about(slip)}: {slip['says']}." for slip in found]


def _only(slip, wrong):
    return "only" not in slip or bool(wrong) and all(slip["only"] in says for says in wrong)


def _about(slip):
    if "about" in slip:
        return slip["about"]
    if "lacks" in slip:
        return f"There is no `{slip['lacks']}`"
    if "unstored" in slip:
        return f"There is no `{slip['unstored']}[...] =`"
    if "text" in slip:
        return f"Look at `{slip['text'].strip().splitlines()[0]}`"
    return "Nothing else is wrong"


def _shown(slip, task, answer):
    """Whether the text itself shows the slip, so that it needs no repair."""
    if "unstored" in slip:
        return not _stored(ast.parse(answer.text), task, slip["unstored"])
    if "single" in slip:
        return changed(answer.text, slip["text"], "") != answer.text and single(ast.parse(answer.text), slip["single"])
    return False


def _stored(tree, task, name):
    """Whether the answer may store into the parameter of that name: by its own name, or by one that it gives it."""
    parameters = {a.arg for a in top_level(tree, task.function).args.args} - {name}
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    return any(not (isinstance(n.value, ast.Name) and n.value.id in parameters) for n in stored)


def single(tree, name):
    """Whether an entry is stored whose index has the name, in a function that gives the name one value alone."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        bound = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
        loops = [x for n in nodes if isinstance(n, ast.For | ast.While) for x in ast.walk(n)]
        stored = [n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        indexed = any(isinstance(x, ast.Name) and x.id == name for n in stored for x in ast.walk(n.slice))
        if indexed and len(bound) == 1 and bound[0] not in loops:
            return True
    return False


def _repaired(slip, task, answer):
    """(the text with the slip repaired, options of the job), or None for an answer that has no such slip."""
    text = answer.text
    repair = slip.get("repair", [])
    for old, new in [(slip["text"], repair)] if isinstance(repair, str) else repair:
        text = changed(text, old, new)
    if "first" in slip:
        text = _with_first(text, task, slip["first"])
    options = {"contract": False} if slip.get("rounded") else {}
    return (text, options) if text != answer.text or options else None


def _passes_with(slips, task, answer, passes):
    """Whether the answer passes when all of these slips, which it has, are repaired."""
    text, options = answer, {}
    for slip in slips:
        if repaired := _repaired(slip, task, text):
            text, options = replace(answer, text=repaired[0]), options | repaired[1]
    return (text is not answer or bool(options)) and passes(text, **options)


def changed(text, old, new):
    """The text with each `old` replaced by `new`.

    Spaces do not count. In both, ... is the same anything within a line, and a line's end is the end of a line with its
    comment, and the spaces with which the next line begins.
    """
    kinds = [part for part in re.split(r"(\.\.\.|\n)", old) if part in ("...", "\n")]

    def put(found):
        kept = {kind: [g for k, g in zip(kinds, found.groups(), strict=True) if k == kind] for kind in ("...", "\n")}
        parts = re.split(r"(\.\.\.|\n)", new)
        return "".join(reversed([kept[p].pop() if p in kept else p for p in reversed(parts)]))

    return re.sub(_pattern(old), put, text)


def _pattern(old):
    """A regular expression for a text in which spaces do not count."""
    patterns = {"...": r"([^\n]*?)", "\n": r"([ \t]*(?:(?:#|//)[^\n]*)?(?:\n[ \t]*|\Z))"}
    parts = [part for part in re.split(r"(\.\.\.|\n)", old) if part.strip(" ")]
    return r"[ \t]*".join(patterns.get(part) or r"\s*".join(map(re.escape, part.replace(" ", ""))) for part in parts)


def _with_first(text, task, first):
    """A Python answer with these lines at the beginning of its function."""
    try:
        function = top_level(ast.parse(text), task.function)
    except SyntaxError:  # Another repair does not fit to this answer.
        return text
    body = function.body[0 if ast.get_docstring(function) is None else 1 :]
    if not body:
        return text
    lines, at = text.splitlines(), body[0].lineno - 1
    margin = " " * body[0].col_offset
    return "\n".join([*lines[:at], *(margin + line for line in first.splitlines()), *lines[at:], ""])
