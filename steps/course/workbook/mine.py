"""`pytest --mine`: a whole run of the tests with the reader's functions in place of the stages' own."""

import shutil
import sys
import tempfile
from pathlib import Path

from steps.course.workbook import answer as answers
from steps.course.workbook import exercises, splice
from steps.course.workbook.exercises import Exercise


class Mine:
    """The exercises that are filled in under my/. Raises answer.Problem if one is no Python or lacks its function."""

    def __init__(self):
        self.tasks = [task for task in exercises.load().values() if isinstance(task, Exercise)]
        self.filled = {task: answer for task in self.tasks if (answer := _answer(task))}

    def install(self):
        """Puts the answers into a copy of steps/, which Python imports from now on. `close` removes the copy."""
        self.folder = tempfile.mkdtemp(prefix="steps-")
        splice.copy_of_steps(self.folder, self.filled.items(), whole=True)  # Tests of the rest are collected, too.
        sys.path.insert(0, self.folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "steps"]:
            del sys.modules[name]

    def rungs(self, stage):
        """The rungs that the stage's filled exercises belong to."""
        return list(dict.fromkeys(task.rung for task in self.filled if task.stage == stage))

    def blanks(self, stage):
        """{name: the reason to skip it} of the stage's exercises that are not filled in."""
        reasons = {}
        for task in self.tasks:
            if task.stage == stage and task not in self.filled:
                reasons[f"{task.id}-{task.function}"] = f"{task.label} is blank: python -m steps hint {task.id}"
        return reasons

    def holds(self, path):
        """Whether a reader's function stands in this file of a stage."""
        return any(Path(path).parts[-2:] == Path(task.file).parts[-2:] for task in self.filled)

    def nothing(self, number):
        """The reason to skip all of the stage's tests if none of its exercises is filled in, otherwise None."""
        if any(task.number == number for task in self.filled):
            return None
        return f"nothing of stage {number} is filled in under my/: python -m steps check {number}"

    def describe(self):
        return "yours: " + (", ".join(task.label for task in self.filled) or "nothing yet")

    def close(self):
        shutil.rmtree(self.folder)


def _answer(task):
    """The reader's answer to the task, or None if there is none yet."""
    if not task.mine.exists():
        return None
    answer = answers.read(task)
    if answers.is_blank(answer, task.function, task.path.suffix):
        return None
    answers.require(answer, task)
    return answer
