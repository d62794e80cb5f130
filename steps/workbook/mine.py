"""`pytest --mine`: the reader's functions in place of the stages', for a whole run of the tests."""

import shutil
import sys
import tempfile

from steps.workbook import answer as answers
from steps.workbook import exercises, splice
from steps.workbook.exercises import Exercise


class Mine:
    """What is filled in under my/. Raises answer.Problem for a file that is no Python or lacks its function."""

    def __init__(self):
        self.tasks = [task for task in exercises.load().values() if isinstance(task, Exercise)]
        self.filled = {task: answer for task in self.tasks if (answer := _answer(task))}

    def install(self):
        """Puts it into a copy of `steps`, which is what gets imported from now on. `close` removes the copy."""
        self.folder = tempfile.mkdtemp(prefix="steps-")
        splice.copy_of_steps(self.folder, self.filled.items())
        sys.path.insert(0, self.folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "steps"]:
            del sys.modules[name]

    def rungs(self, stage):
        """The rungs of the stage's filled exercises."""
        return list(dict.fromkeys(task.rung for task in self.filled if task.stage == stage))

    def blanks(self, stage):
        """{name: why it is skipped} of the stage's other exercises."""
        tasks = [task for task in self.tasks if task.stage == stage and task not in self.filled]
        return {f"{task.id}-{task.function}": f"{task.label} is blank: python -m steps hint {task.id}" for task in tasks}

    def nothing(self, number):
        """Why the stage's tests are skipped: nothing is filled in. None if something is."""
        if any(task.number == number for task in self.filled):
            return None
        return f"nothing of stage {number} is filled in under my/: python -m steps check {number}"

    def describe(self):
        return "yours: " + (", ".join(task.label for task in self.filled) or "nothing yet")

    def close(self):
        shutil.rmtree(self.folder)


def _answer(task):
    """The reader's answer, None where there is none yet."""
    if not task.mine.exists():
        return None
    answer = answers.read(task)
    if answers.is_blank(answer, task.function, task.path.suffix):
        return None
    answers.require(answer, task)
    return answer
