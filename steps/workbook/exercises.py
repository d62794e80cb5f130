"""What there is to write: the entries of exercises.toml, and where the reader's answers lie."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

STEPS = Path(__file__).parents[1]
MY = STEPS.parent / "my"


@dataclass(frozen=True, eq=False)
class Task:
    """What exercises and hunts share. `file` lies under steps/; `hints` are a question, a formula and pseudo-code."""

    id: str
    file: str
    title: str
    hints: list

    @property
    def number(self):
        """The stage's number, such as "00"."""
        return self.id.split(".")[0]

    @property
    def stage(self):
        """The stage's package, such as "step00_naive"."""
        return self.file.split("/")[0]

    @property
    def path(self):
        return STEPS / self.file

    @property
    def mine(self):
        """The reader's file."""
        return MY / self.mine_name

    @property
    def label(self):
        """The reader's file as messages name it."""
        return f"my/{self.mine_name}"


@dataclass(frozen=True, eq=False)
class Exercise(Task):
    """Write this function. `cases` run on `rung`; `order` and `tile` tell the diagnosis how that rung visits its tiles.

    cost: what is wrong with a function whose results are right, but with which shared memory is busy for longer than with the
    stage's own; counted where `cost` is given.
    """

    function: str
    lines: int
    rung: str
    cases: list
    order: str | None = None
    tile: list | None = None
    cost: str | None = None

    @property
    def mine_name(self):
        return f"{self.id.replace('.', '_')}_{self.function}{self.path.suffix}"


@dataclass(frozen=True, eq=False)
class Hunt(Task):
    """Find what is wrong with the kernel in `file`, and write the test that catches it. engine: the one it runs on everywhere."""

    symptom: str
    engine: str | None = None

    @property
    def mine_name(self):
        return f"{self.id.replace('.', '_')}.py"


def load(text=None):
    """{id: Exercise or Hunt} in the order of their ids, out of exercises.toml."""
    entries = tomllib.loads(text or (STEPS / "workbook" / "exercises.toml").read_text())
    tasks = [Exercise(**e) for e in entries.get("exercise", ())] + [Hunt(**h) for h in entries.get("hunt", ())]
    return {task.id: task for task in sorted(tasks, key=lambda task: task.id)}


def find(id):
    """The exercise or hunt; KeyError names those there are."""
    if id not in (tasks := load()):
        raise KeyError(f"there is no exercise {id!r}; there are {', '.join(tasks)}")
    return tasks[id]


def visits(stage, rung):
    """(order, tile) by which this rung visits its tiles, so far as an exercise says so: for the diagnosis."""
    known = [t for t in load().values() if isinstance(t, Exercise) and (t.stage, t.rung) == (stage, rung)]
    return next((t.order for t in known if t.order), None), next((t.tile for t in known if t.tile), None)


def of_stage(number):
    """The exercises, then the hunts of a stage."""
    return [task for task in load().values() if task.number == number]
