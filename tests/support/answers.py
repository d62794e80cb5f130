"""What tests of answers share: the stages' own texts with changes, and which tasks can be checked here."""

import shutil

import pytest

from steps import catalogue
from steps.course.workbook import solution


def runnable(task):
    """Skips the test where the task's stage does not run."""
    if reason := catalogue.unavailable(task.number):
        pytest.skip(reason)
    if getattr(task, "engine", None) == "cpu" and task.number == "02" and not shutil.which("g++"):
        pytest.skip("runs in the emulation, which g++ compiles")


def edited(id, *edits):
    """The stage's own text of a task with each pair (old, new) of text replaced wherever it occurs."""
    text = str(solution(id))
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text
