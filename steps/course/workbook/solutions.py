"""`python -m steps.course.workbook.solutions` writes SOLUTIONS.md: the exercises, ideas and the stages' functions.

The page repeats what is in exercises.toml and in the stages' files. tests/test_readme.py fails when it no longer does.
"""

import os
import textwrap

from steps import catalogue
from steps.course.workbook import checking, exercises
from steps.course.workbook.exercises import STEPS, Hunt, Step
from steps.places import require_clone

PAGE = STEPS / "course" / "workbook" / "SOLUTIONS.md"
HEAD = """\
# Worked solutions

Every exercise and bug hunt of the course. Each answer is folded: first the idea, then the function as it stands in the
stage, or for a hunt the cause and a test that catches it. Other functions can be right, too: `python -m steps check
00.2` judges yours. `python -m steps hint 00.2` shows less than this page.

This page is made from [exercises.toml](exercises.toml) and the stages' files by
`python -m steps.course.workbook.solutions`.
"""


def page():
    """The text of the page."""
    parts = [HEAD]
    for number, stem in catalogue.STAGES.items():
        parts.append(f"\n## Stage {number}: [{stem}](../../{stem}/README.md)\n")
        parts += [worked(task) for task in exercises.of_stage(number)]
    return "".join(parts)


def worked(task):
    """An exercise, folded. A step of the capstone is a file, which is linked and not repeated."""
    link = f"[{task.path.name}]({os.path.relpath(task.path, PAGE.parent)})"
    if isinstance(task, Step):
        inside = [f"{task.task} The whole file: {link}."]
    elif isinstance(task, Hunt):
        old, new = (text.strip("\n").splitlines() for text in task.edit)
        edit = [*(f"- {line}" for line in old), *(f"+ {line}" for line in new)]
        inside = [f"The broken kernel is {link} with this edit:", fence("diff", "\n".join(edit))]
        inside.append(fence("text", f"{task.hints[1]}\n\n{task.hints[2]}"))
    else:
        solution = checking.solution(task.id)
        inside = [fence("text", task.hints[1]), f"`{task.function}` of {link}:", fence(solution.language, solution)]
    folded = "\n\n".join(inside)
    return f"\n<details><summary><b>{task.id}</b> {task.title}</summary>\n\n{folded}\n\n</details>\n"


def fence(language, text):
    """The text as a block of code; words are wrapped."""
    lines = str(text).splitlines()
    if language == "text":
        lines = [part for line in lines for part in textwrap.wrap(line, 120, replace_whitespace=False) or [""]]
    return "\n".join([f"```{language}", *lines, "```"])


if __name__ == "__main__":
    require_clone("steps.course.workbook.solutions")
    PAGE.write_text(page())
