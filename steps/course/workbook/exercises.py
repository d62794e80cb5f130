"""The exercises, puzzles, steps and bug hunts: the entries of exercises.toml, and where the reader's answers lie."""

import contextlib
import functools
import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from steps import catalogue
from steps.places import MY

STEPS = Path(__file__).parents[2]


@dataclass(frozen=True, eq=False)
class Task:
    """What all of them have in common.

    file is a path under steps/. hints are three: a question, the formula with its place in the paper, and pseudo-code;
    for a hunt the last one is its solution.
    """

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

    @property
    def where(self):
        """The same, as a path that leads there if the command was called from outside of the folder that has my/."""
        return self.label if Path.cwd().is_relative_to(MY.parent) else str(self.mine)


@dataclass(frozen=True, eq=False)
class Exercise(Task):
    """An exercise: write this function.

    The contract's `cases` are run on `rung`, in the stage's first dtype or in the one behind a colon. Behind a colon
    jobs.LAST_FIRST or FIRST_FIRST may stand too, or jobs.TALL, because in a square tile nobody sees that Br and Bc have
    been exchanged. threads is the block in which Numba's simulator runs them, if it is another than the rung's own.
    order and tile say in which order that rung visits tiles of which size; with them the diagnosis compares a wrong
    result with that of known mistakes. If `cost` is given, what the answer takes is counted too: `cost` is the message
    for a function whose results are right, but which takes more than the stage's own. `counted` is a key of
    checking.COUNTED: wavefronts of shared memory, or additions to global memory.
    note is a sentence that the reader's file begins with, and imports are lines that it has beside those of the stage's
    file. like = [file, function] names a function of the stage that the file shows as an example. slips are known
    mistakes that no mutant equals, because they read memory that nobody wrote or do not exist as an address; slips.py
    explains their keys. engine: the one that it always runs on; by default the one that is in force, and for CUDA C++
    the emulation before it. masks: whether the function itself hides scores; only then are its results compared with
    mistakes in a mask. edges are names in edges.py: what the function has to hold beside the cases.
    """

    function: str
    lines: int
    rung: str
    cases: list
    order: str | None = None
    tile: list | None = None
    threads: list | None = None
    cost: str | None = None
    counted: str = "wavefronts"
    note: str | None = None
    imports: list = field(default_factory=list)
    like: list | None = None
    slips: list = field(default_factory=list)
    engine: str | None = None
    masks: bool = False
    edges: list = field(default_factory=list)

    @property
    def mine_name(self):
        return f"{self.id.replace('.', '_')}_{self.function}{self.path.suffix}"


@dataclass(frozen=True, eq=False)
class Puzzle(Task):
    """An exercise beside the stages: write this function of a module of puzzles/, which judges it."""

    function: str
    lines: int
    note: str | None = None
    imports: list = field(default_factory=list)
    like: list | None = None

    mine_name = Exercise.mine_name


@dataclass(frozen=True, eq=False)
class Step(Task):
    """A step of the capstone: the reader's own file, which grows from step to step.

    file is the solution of this step, and function the one in it that is called. The cases that each step adds are in
    steps/course/workbook/capstone.
    """

    function: str
    lines: int
    task: str

    @property
    def verify(self):
        """The command that judges the last step's file by all cases that it claims to take."""
        return f"python -m steps verify {self.label}:{self.function} --without backward,gqa --tile 32"

    @property
    def level(self):
        """Which step it is, from 1 on."""
        return int(self.id.split(".")[-1])

    @property
    def mine_name(self):
        return f"{'_'.join(self.id.split('.')[:-1])}.py"


@dataclass(frozen=True, eq=False)
class Hunt(Task):
    """A bug hunt: find what is wrong with a kernel, write the test that catches it, and name the cause.

    The kernel is the text of `file`, which is right, with edit = [old, new] in it: `broken`. file is a rung of a stage,
    or a kernel in hunts/. The test has to pass on the one and to fail on the other. rung is the word of a rung in CUDA
    C++; another .cu file has its launcher beside it, a module of the same name that compiles FILE. causes are the ones
    to choose from, as {letter: what it says}; `cause` is the letter of the right one. engine: the engine that it always
    runs on; by default the one that is in force. hangs: whether the fault is that somebody waits for ever. subject is
    the function that is broken, `call` shows how a test calls it, and note is a sentence of the reader's file.
    """

    symptom: str
    causes: dict
    cause: str
    edit: list
    rung: str | None = None
    engine: str | None = None
    hangs: bool = False
    subject: str = "forward"
    call: str = "(out, lse) = forward(q, k, v, causal=False, scale=None)"
    note: str = (
        "The right results are those of attention.forward(q, k, v, causal=..., scale=...), in float64, "
        "after `from reference import attention`."
    )

    @property
    def stage(self):
        return catalogue.STAGES[self.number]

    @property
    def broken(self):
        """The text of the broken kernel. Raises ValueError unless the file has the text to edit exactly once."""
        text, (old, new) = self.path.read_text(), self.edit
        if text.count(old) != 1:
            raise ValueError(f"{self.id}: {self.file} contains {old!r} {text.count(old)} times; it must be once.")
        return text.replace(old, new)

    @property
    def mine_name(self):
        return f"{self.id.replace('.', '_')}.py"


def load(text=None):
    """{id: task} in the order of the ids, from exercises.toml or from text in its place."""
    return dict(_parsed(text or (STEPS / "course" / "workbook" / "exercises.toml").read_text()))


@functools.cache  # Reading TOML takes some 10 ms, and a check needs the tasks several times.
def _parsed(text):
    entries = tomllib.loads(text)
    kinds = {"exercise": Exercise, "puzzle": Puzzle, "step": Step, "hunt": Hunt}
    tasks = [kind(**entry) for name, kind in kinds.items() for entry in entries.get(name, ())]
    return {task.id: task for task in sorted(tasks, key=_in_order)}


def _in_order(task):
    """What tasks are sorted by: 02.10 comes after 02.9."""
    return [part.zfill(3) if part.isdigit() else part for part in task.id.split(".")]


def find(id):
    """The task of that id. The KeyError for an unknown one lists those that exist."""
    if id not in (tasks := load()):
        raise KeyError(f"there is no exercise {id!r}; there are {', '.join(tasks)}")
    return tasks[id]


def note_passed(task):
    """Notes in my/passed.json that the reader's file, as it is now, has passed. The site lists these exercises.

    A check must not fail because of the note: a folder that cannot be written to gets none, and a file that is no JSON
    is written anew.
    """
    path = MY / "passed.json"
    try:
        passed = json.loads(path.read_text())
    except (OSError, ValueError):
        passed = {}
    passed[task.id] = hashlib.sha256(task.mine.read_bytes()).hexdigest()
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(passed, indent=1) + "\n")


def following(step):
    """The lines of text about what comes after a step of the capstone: the next one, or the whole contract."""
    tasks = [task for task in of_stage(step.number) if isinstance(task, Step) and task.level == step.level + 1]
    if not tasks:
        return [f"The whole contract: {step.verify}"]
    return [f"Step {tasks[0].level}: {tasks[0].task}", f"Check it: python -m steps check {tasks[0].id}"]


def visits(stage, rung):
    """(order, tile): how this rung visits its tiles, for the diagnosis. None for what no exercise says."""
    known = [t for t in load().values() if isinstance(t, Exercise) and (t.stage, t.rung) == (stage, rung)]
    order = next((t.order for t in known if t.order), None)
    tile = next((t.tile for t in known if t.tile), None)
    return order, tile


def of_stage(number):
    """The exercises and puzzles, then the hunts, then the capstone's steps of a stage."""
    return [task for task in load().values() if task.number == number]
