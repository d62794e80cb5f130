"""The workbook: the files it writes, its verdicts and diagnoses, its answers to mistakes, and `pytest --mine`."""

import ast
import dataclasses
import importlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from reference import cases, mutants
from steps import __main__, engine
from steps.course.workbook import (
    Blank,
    answer,
    capstone,
    check,
    checking,
    edges,
    exercises,
    grading,
    hint,
    listing,
    parts,
    puzzles,
    runner,
    show,
    skeleton,
    solution,
    splice,
)
from steps.course.workbook.capstone import Guarded
from steps.course.workbook.differences import of_tensors
from steps.course.workbook.exercises import Exercise, Hunt, Puzzle, Step
from steps.course.workbook.explain import explain
from steps.course.workbook.failure import account
from steps.course.workbook.mine import Mine
from steps.step02_fa2_cuda import emulator
from support import formulas
from support.answers import edited, runnable

ROOT = Path(__file__).parents[1]
TASKS = exercises.load()
EXERCISES, PUZZLES, STEPS, HUNTS = (
    {id: task for id, task in TASKS.items() if isinstance(task, kind)} for kind in (Exercise, Puzzle, Step, Hunt)
)
FUNCTIONS = EXERCISES | PUZZLES  # the tasks that ask for one function
# In seconds. A reader waits for a check again and again, so it has to be fast. With a GPU the kernels are compiled, the
# ranks of stage 04 are new processes in every case, and here many checks run at the same time.
LIMIT = 15 if engine.name == "cpu" else 60
MISTAKES = tomllib.loads((ROOT / "steps" / "course" / "workbook" / "mistakes.toml").read_text())
PLANTED = [{"exercise": id} | row for id, rows in MISTAKES.items() for row in rows]
ONLINE = f"import torch\n\n{solution('00.2')}\n"


@pytest.fixture(autouse=True)
def my(tmp_path, monkeypatch):
    """An empty folder in place of my/."""
    monkeypatch.setattr(exercises, "MY", tmp_path / "my")
    return tmp_path / "my"


def hand_in(id, text):
    """Writes the reader's file of a task."""
    TASKS[id].mine.parent.mkdir(exist_ok=True)
    TASKS[id].mine.write_text(text)


def body(task):
    """The lines of the stage's own function below its docstring."""
    text = task.path.read_text()
    own = answer.top_level(ast.parse(text), task.function)
    first = own.body[ast.get_docstring(own) is not None]
    return "\n".join(text.splitlines()[first.lineno - 1 : own.end_lineno]) + "\n"


def filled_in(task):
    """The file that a reader starts from, with the stage's own function in it."""
    text = skeleton.text(task)
    if task.path.suffix == ".py":
        return text.replace("    raise Blank\n", body(task))
    return text[: text.index("\n\n") + 2] + str(solution(task.id))


def puzzle(id):
    """The module of a puzzle."""
    return importlib.import_module(f"steps.course.workbook.puzzles.{PUZZLES[id].path.stem}")


# The exercises and hunts.


@pytest.mark.parametrize("id", FUNCTIONS | STEPS)
def test_an_exercise_is_complete(id):
    task = TASKS[id]
    assert len(task.hints) == 3 and all(task.hints) and task.title and str(solution(id))
    if id in EXERCISES:
        known = {case.name for case in cases.CASES}
        assert task.cases and {case.split(":")[0] for case in task.cases} <= known
        assert {edge.split(":")[0] for edge in task.edges} <= known | edges.EDGES.keys()
        named = [p for p in MISTAKES[id] if "mutant" in p]
        assert len(task.cases) > 1 or not named, "a single case does not tell one mistake from another"
    assert len(MISTAKES[id]) >= (2 if id in STEPS else 3)
    text = answer.Answer(skeleton.text(task), "skeleton")
    answer.require(text, task)  # The stage's function exists, and the skeleton has its signature.
    assert answer.is_blank(text, task.function, task.path.suffix)
    assert f"check {id}" in text.text and max(map(len, text.text.splitlines())) <= 120


@pytest.mark.parametrize("id", TASKS)
def test_an_untouched_skeleton_is_a_skip_with_a_pointer_and_a_file_of_the_reader_stays(id, my):
    report = check(id)
    assert report.verdict == "blank" and not report.failed
    assert f"hint {id}" in repr(report) and f"my/{TASKS[id].mine.name}" in repr(report)
    (path,) = my.iterdir()
    assert path.name == TASKS[id].mine.name
    assert report.lines[0] == f"still to be written: {path}", "it leads there from this folder, which is not my/'s"
    path.write_text(path.read_text() + "// mine\n# mine\n")
    check(id)
    assert path.read_text().endswith("// mine\n# mine\n")


def test_a_file_that_cannot_be_written_or_read_is_told_in_a_line(my):
    my.write_text("a file where the folder should be")
    assert check("00.2").lines[0].startswith("my/00_2_online_update.py cannot be written: File exists. May you write")
    my.unlink()
    my.mkdir()
    file = my / "00_2_online_update.py"
    file.write_bytes("# März\ndef online_update(): pass".encode("utf-16"))
    assert check("00.2").verdict == "error" and "is not UTF-8 text" in check("00.2").lines[0]
    file.unlink()
    file.mkdir()
    assert check("00.2").lines[0] == "my/00_2_online_update.py cannot be read: Is a directory."


def test_there_is_no_exercise_of_that_name():
    assert check("99.9").failed and "no exercise '99.9'; there are 00.1, 00.2" in repr(check("99.9"))
    for call in (hint, solution):
        with pytest.raises(KeyError, match=r"no exercise '99\.9'; there are 00\.1, 00\.2"):
            call("99.9")
    with pytest.raises(ValueError, match="hints 1 to 3"):
        hint("00.2", 4)


# The verdicts on right and on wrong answers.


def test_tasks_are_listed_by_their_numbers():
    """The tenth comes behind the ninth."""
    listed = [task.id for task in exercises.of_stage("02")]
    assert listed == [f"02.{n}" for n in range(1, 12)] + ["02.bug1", "02.bug2", "02.bug3"]


@pytest.mark.parametrize("id", FUNCTIONS)
def test_the_stages_own_body_passes(id):
    task = FUNCTIONS[id]
    runnable(task)
    hand_in(id, filled_in(task))
    report = check(id, limit=LIMIT)
    assert report.verdict == "passed", report
    ran = len(puzzle(id).CASES) if id in PUZZLES else len(task.cases + task.edges) + bool(task.cost) + (id == "04.3")
    assert repr(report).count("  ok  ") == ran


def edits_of(planted):
    return planted.get("edits") or [(planted["old"], planted["new"])]


# So many mistakes a short run plants into an exercise that has many, or that is slow to check: in Numba's simulator, in
# Triton, on ranks, or where each answer is compiled.
FEW = {"01.1": 3, "01.2": 3, "01.3": 3, "02.1": 6, "02.2": 4, "02.3": 3, "02.4": 2, "02.5": 3, "02.6": 3, "02.7": 2}
FEW |= {"02.8": 7, "02.9": 5, "02.10": 7, "03.1": 1, "03.2": 1, "03.3": 0, "03.7": 1}
FEW |= {"00.1": 8, "00.2": 12, "00.3": 8, "00.4": 9, "04.1": 5, "04.2": 6, "04.3": 7, "04.4": 5}


def planted(row):
    """The row as a parameter. A short run plants no mistake into the capstone, and those of FEW.

    The puzzles about Hopper are fast, because their kernels are compiled once for all answers. Those about rings
    have no kernel.
    """
    id = row["exercise"]
    is_fast = id in EXERCISES or id in PUZZLES and id[:2] in ("02", "04")
    of_exercise = [p for p in PLANTED if p["exercise"] == id]
    in_short_run = row in of_exercise[: FEW[id]] if id in FEW else is_fast and "long" not in row
    name = f"{id}-{row.get('mutant') or edits_of(row)[-1][1]}"
    return pytest.param(row, marks=() if in_short_run else pytest.mark.long, id=name)


@pytest.mark.parametrize("row", [planted(row) for row in PLANTED])
def test_a_planted_misconception_is_named(row):
    """As the mutant of that name, or in `words` where the mistake concerns memory and not the results.

    `emulated`: only the emulation recognises the mistake, which also runs beside a GPU if there is g++. `simulated`:
    only Numba's simulator does. `needs`: a flag that g++ before version 12 does not know.
    """
    id = row["exercise"]
    runnable(TASKS[id])
    if row.get("needs", "-g1") not in emulator._FLAGS:
        pytest.skip("g++ is too old")
    if row.get("simulated") and engine.name == "cuda":
        pytest.skip("a GPU runs more threads than the tile has rows")
    report = check(id, edited(id, *edits_of(row)))
    if row.get("emulated") and engine.name == "cuda" and not shutil.which("g++"):
        return
    if "words" in row:
        assert report.failed and all(word in repr(report) for word in row["words"]), report
        assert not any(word in repr(report) for word in row.get("absent", ())), report
        return
    names = row["mutant"].split()
    assert report.verdict == "wrong" and sorted(report.mutants) == sorted(names), report
    says = {m.name: m.says for m in mutants.MUTANTS} | {name: says for name, (says, *_) in parts.MISTAKES.items()}
    if id in PUZZLES:
        says = {name: m.says for name, m in puzzles.mistakes(puzzle(id)).items()}
    assert "WRONG" in repr(report) and "equals what you get when" in repr(report)
    assert all(f" when {says[name]}" in repr(report) for name in names), report


@pytest.mark.parametrize("wrong", [None, "cpu", "cuda"])
def test_an_answer_in_cuda_runs_in_the_emulation_first(wrong, monkeypatch):
    """A GPU would let some mistakes pass."""

    def run(job, folder, limit, on=None):
        ran.append(on)
        last = {"accesses": 1, "wavefronts": 1, "additions": 1} if job["kind"] == "cost" else {"says": "a case"}
        return [{"mutants": [], "equals": [], "wrong": ["out is off"] if on == wrong else []} | last], None, ""

    ran = []
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(engine, "name", "cuda")
    monkeypatch.setattr(shutil, "which", lambda _: "g++")
    assert [checking._engines(EXERCISES[id]) for id in ("01.1", "04.1")] == [["cuda"], ["cpu"]]
    report = check("02.2", str(solution("02.2")))
    asked = ["cpu"] if wrong == "cpu" else ["cpu", "cuda"]
    assert ran[:2] == asked or not wrong and ran[:3] == [*asked, "cpu"]
    assert report.verdict == ("wrong" if wrong else "passed")


def test_an_answer_that_is_too_slow_to_be_counted_is_told_so(monkeypatch):
    """Its cases were right, so no loop is endless."""

    def run(job, folder, limit, on=None):
        if job["kind"] != "cost":
            return [{"says": "a case", "wrong": []}, {"mutants": [], "equals": []}], None, ""
        own = solution("02.2") in (Path(folder) / "steps" / EXERCISES["02.2"].file).read_text()
        return ([{"accesses": 1, "wavefronts": 1, "additions": 1}], None, "") if own else ([], "time", "")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(engine, "name", "cpu")
    monkeypatch.setattr(shutil, "which", lambda _: "g++")
    report = check("02.2", edited("02.2", ("e = threadIdx.x; e < rows * D; e += Bc", "e = 0; e < rows * D; e++")))
    assert report.verdict == "wrong" and "Does a loop never end" not in repr(report), report
    assert "counting was stopped after 60 s" in repr(report) and EXERCISES["02.2"].cost in repr(report)


def wrong_answers_without_a_name():
    yield "00.2", edited("00.2", ("alpha * l + p", "alpha * l + 2 * p"))
    own, right = str(solution("01.1")), "cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x"
    yield "01.1", own[: own.index("    thread = ")] + "    pass\n"  # Nearly all is NaN, as with some that have a name.
    slip = own.replace("beta * l_block", "3 * l_block")  # It begins as a slip does, and is none.
    yield "01.1", slip.replace(right, "cuda.threadIdx.x + cuda.threadIdx.y * cuda.blockDim.x")


@pytest.mark.parametrize("id, text", [*wrong_answers_without_a_name()], ids=("no mutant", "empty", "no slip"))
def test_a_mistake_that_has_no_name_gets_none(id, text):
    runnable(EXERCISES[id])
    report = check(id, text)
    assert report.verdict == "wrong" and report.mutants == [] and "equals" not in repr(report), report
    assert "Look at" not in repr(report), report


@pytest.mark.parametrize("id", HUNTS)
def test_a_hunt_shows_its_kernel_and_is_won_by_its_reference_test(id):
    """The kernel is whole, so that nothing tells where the text of the stage's file was changed."""
    task = HUNTS[id]
    told = CliRunner().invoke(__main__.app, ["hint", id, "--code"]).output
    assert " ".join(told.split()).startswith(task.symptom) and told.endswith(f"\n\n{task.broken}\n")
    assert show(id) == task.broken == task.path.read_text().replace(*task.edit) != task.path.read_text()
    assert list(task.causes) == list("abcd") and task.cause in task.causes
    runnable(task)
    hand_in(id, (Path(exercises.__file__).parent / "hunts" / task.mine.name).read_text())
    report = check(id)
    assert report.verdict == "passed" and "fails on the broken kernel" in repr(report), report


@pytest.mark.parametrize("id", TASKS)
def test_pseudo_code_is_printed_as_it_is_written(id):
    """A terminal is 80 columns wide; a longer line would be broken in the middle of what stands beside it."""
    hint_3 = TASKS[id].hints[2]
    assert CliRunner().invoke(__main__.app, ["hint", id, "3"]).output.startswith(hint_3.rstrip() + "\n")


def test_03_bug1_is_seen_in_out_too_so_its_title_names_no_result():
    """A causal call computes wrong rows of out, and a test of these is a right answer."""
    runnable(HUNTS["03.bug1"])
    text = (Path(exercises.__file__).parent / "hunts" / "03_bug1.py").read_text()
    text = re.sub(r".*lse.double.*\n", "", text).replace("(q, k, v)", "(q, k, v, causal=True)")
    assert check("03.bug1", text).verdict == "passed"
    assert not re.search("lse|out", HUNTS["03.bug1"].title)


def test_a_part_of_a_kernel_is_shown_from_one_text_to_the_next():
    assert show("fwd_7_roles", "// The consumers: gives", until="n++;").splitlines()[-1].startswith("  if (threadIdx.x")
    with pytest.raises(ValueError, match="no line with 'n\\+\\+' that one with 'nothing'"):
        show("fwd_7_roles", "n++", until="nothing")


def test_a_changed_file_of_the_copy_is_no_link_into_the_course(tmp_path, monkeypatch):
    course, copy, task = tmp_path / "course", tmp_path / "copy", SimpleNamespace(file="stage/kernel.py")
    for name in ("contract.py", "stage/kernel.py", "other/kernel.py", "course/bench/rows.py"):
        (course / name).parent.mkdir(parents=True, exist_ok=True)
        (course / name).write_text("as it was")
    copy.mkdir()
    monkeypatch.setattr(splice, "STEPS", course)
    splice.copy_of_steps(copy, [])
    splice.write_copy(copy, task, "changed")
    assert (copy / "steps" / "stage" / "kernel.py").read_text() == "changed"
    assert {path.read_text() for path in course.rglob("*.py")} == {"as it was"}
    assert (copy / "steps" / "other" / "kernel.py").exists()


# Puzzles: the exercises that stand on their own.


@pytest.mark.long
@pytest.mark.parametrize("id", PUZZLES)
def test_a_puzzle_asks_for_what_it_judges_by_and_tells_its_mistakes_apart(id):
    runnable(PUZZLES[id])
    module = puzzle(id)
    arguments = [case.inputs() | case.how for case in module.CASES]
    wants = [module.expected(**case.inputs()) for case in module.CASES]
    made = {name: [run(**a) for a in arguments] for name, run in puzzles.mistakes(module).items()}
    assert len(made) >= 2
    for name, results in made.items():
        assert any(of_tensors(got, want) for got, want in zip(results, wants, strict=True)), name
    for a, b in itertools.combinations(made, 2):
        pairs = zip(made[a], made[b], wants, strict=True)
        assert any(puzzles._differ(x, y, want) for x, y, want in pairs), (a, b)
    for case, want in zip(module.CASES, wants, strict=True):
        for name, value in specified(module, **case.inputs()).items():
            torch.testing.assert_close(value.double(), want[name][0].double(), rtol=1e-9, atol=1e-12)


def specified(module, **inputs):
    """What the specification says, in the form of the puzzle's `expected`."""
    if "windows" not in inputs:
        return module.specification(**inputs)
    each = [module.specification(**inputs, left=left, right=right) for left, right in inputs.pop("windows")]
    return {name: torch.nn.functional.pad(torch.stack([x[name] for x in each]), (1, 1)) for name in each[0]}


def test_a_puzzle_s_answer_of_nan_is_wrong():
    right = torch.ones(2, 3)
    assert of_tensors({"out": right}, {"out": (right, 1e-3)}) == []
    assert "wrong in 6 of 6" in of_tensors({"out": right * math.nan}, {"out": (right, 1e-3)})[0]


# The capstone: one file that grows in four steps.


@pytest.mark.parametrize("id", [pytest.param(id, marks=pytest.mark.long if id[-1] in "23" else ()) for id in STEPS])
def test_a_step_of_the_capstone_is_passed_by_its_solution(id):
    task = STEPS[id]
    runnable(task)
    hand_in(id, str(solution(id)))
    report = check(id, limit=LIMIT)
    assert report.verdict == "passed", report
    assert repr(report).count("  ok  ") == task.level - 1 + len(capstone.STEPS[task.level]), report
    following = f"check {id[:-1]}{task.level + 1}" if task.level < len(STEPS) else "verify my/03_capstone.py:attention"
    assert f"python -m steps {following}" in repr(report)


@pytest.mark.long
@pytest.mark.parametrize("level", [2, 3, 4])
def test_a_step_of_the_capstone_asks_for_more_than_the_one_before(level):
    runnable(STEPS["03.capstone.1"])
    report = check(f"03.capstone.{level}", str(solution(f"03.capstone.{level - 1}")))
    assert report.failed and repr(report).count("  ok     step") == level - 1, report
    says = [case.says for case in capstone.STEPS[level]]  # One of these is wrong, or makes the kernel raise.
    assert any(f"WRONG  {s}\n" in repr(report) or f"(in the case: {s})" in repr(report) for s in says), report


def test_a_step_of_the_capstone_points_to_the_first_one_that_is_not_right():
    runnable(STEPS["03.capstone.1"])
    report = check("03.capstone.3", edited("03.capstone.1", ("scale * tl.dot", "tl.dot")))
    assert report.verdict == "blank", report
    assert "Step 1 comes first, and is not right: python -m steps check 03.capstone.1" in repr(report)


def test_a_store_beside_a_tensor_is_seen():
    x = torch.arange(6.0).reshape(2, 3)
    with Guarded() as guarded:
        made = torch.empty_like(x.T), x.new_zeros(4), torch.full((2,), 3.0), torch.empty(0)
    assert made[0].stride() == x.T.stride() and made[1].tolist() == [0] * 4 and made[2].tolist() == [3, 3]
    assert not guarded.overrun
    made[0].as_strided((7,), (1,), made[0].storage_offset())[6] = 1
    assert guarded.overrun


@pytest.mark.long
def test_the_last_step_holds_what_verify_asks(my):
    task = STEPS["03.capstone.4"]
    runnable(task)
    hand_in(task.id, str(solution(task.id)))
    words = task.verify.replace(" my/", f" {my}/").split()[3:]
    done = CliRunner().invoke(__main__.app, words)
    assert done.exit_code == 0 and "properties hold" in done.output, done.output


# The formulas in hints, each computed where its names have numbers that fit to each other.


NUMBERS = torch.Generator().manual_seed(0)


def numbers(*shape):
    return torch.randn(*shape, generator=NUMBERS, dtype=torch.float64)


def of_a_softmax():
    S, V = numbers(5, 7), numbers(7, 3)
    l = (S - S.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    here = {"S": S, "V": V, "m": S.amax(1, keepdim=True), "l": l, "E": (S - S.amax(1, keepdim=True)).exp()}
    here |= {"P": S.softmax(1), "lse": S.logsumexp(1, keepdim=True), "out": S.softmax(1) @ V, "O": l * S.softmax(1) @ V}
    return here, here


def of_an_update(S, V, factor=1.0):
    """m, l and O before, and after these scores; factor S is what exp, or 2^, is taken of, as if it were S."""
    m, l, O = numbers(5, 1), numbers(5, 1).exp(), numbers(5, 3)
    base = math.e if factor == 1.0 else 2.0
    m_new = torch.maximum(m, S.amax(1, keepdim=True))
    alpha, P = base ** (factor * (m - m_new)), base ** (factor * (S - m_new))
    m_block = S.amax(1, keepdim=True)
    here = {"m": m, "l": l, "O": O, "S": S, "V": V, "s": S, "v": V, "max_S": m_block, "m_new": m_new, "unit": m_new}
    here |= {"alpha": alpha, "P": P, "p": P, "factor": factor, "shift": factor * m_new}
    l_new, O_new = alpha * l + P.sum(1, keepdim=True), alpha * O + P @ V
    after = here | {"l": l_new, "O": O_new, "m": m_new, "S": P, "out": O / l}
    return here, after | {"return_1": m_new, "return_2": l_new, "return_3": O_new}


def of_an_update_in_steps():
    """l and O are first rescaled, and then each key is added to them."""
    here, after = of_an_update(numbers(5, 7), numbers(7, 3))
    alpha = here["alpha"]
    return here, after | {"l": alpha * here["l"], "O": alpha * here["O"], "l+": here["P"]}


def of_an_update_with_O_divided():
    here, after = of_an_update(numbers(5, 7), numbers(7, 3))
    m, l, m_new, m_block = (here[name] for name in ("m", "l", "m_new", "max_S"))
    P = (here["S"] - m_block).exp()
    here |= {"m_block": m_block, "beta": (m_block - m_new).exp(), "l_block": P.sum(1, keepdim=True), "P": P}
    O = (l * (m - m_new).exp() * here["O"] + (here["S"] - m_new).exp() @ here["V"]) / after["l"]
    here |= {"l_new": after["l"], "old": (m - m_new).exp() * l / after["l"], "new": here["beta"] / after["l"]}
    return here, here | {"O": O, "l": after["l"], "m": m_new, "S": P}


def of_gradients(scaled=True, mask=False):
    """S is scaled, or it is not. With a mask M, S has it in it or, unscaled, has not."""
    Q, K, V, dO, scale = numbers(5, 3), numbers(7, 3), numbers(7, 3), numbers(5, 3), 0.3
    M = numbers(5, 7) if mask else torch.zeros(5, 7, dtype=torch.float64)
    whole = scale * Q @ K.mT + M
    P, lse = whole.softmax(1), whole.logsumexp(1, keepdim=True)
    dP, delta = dO @ V.mT, (dO * (P @ V)).sum(1, keepdim=True)
    dS = P * (dP - delta)
    here = {"Q": Q, "K": K, "V": V, "v": V, "dO": dO, "O": P @ V, "M": M, "scale": scale, "P": P, "lse": lse, "dP": dP}
    here |= {"delta": delta, "dS": dS, "dQ+": scale * dS @ K, "dM+": dS, "S": whole if scaled else Q @ K.mT}
    here |= {"scale_log2": scale / math.log(2), "lse_2": lse / math.log(2)}
    return here, here | {"out": P @ V, "return_1": P, "return_2": dS}


def of_a_softmax_that_is_divided_at_the_end():
    here, after = of_gradients()
    P = (here["S"] - here["S"].amax(1, keepdim=True)).exp()
    return here | {"P": P}, after | {"P": P}


def of_a_merge():
    lse, lse_block, out, out_block = numbers(5, 1), numbers(5, 1), numbers(5, 3), numbers(5, 3)
    total = lse.exp() + lse_block.exp()
    whole = (lse.exp() * out + lse_block.exp() * out_block) / total
    here = {"lse": lse, "lse_block": lse_block, "out": out, "out_block": out_block}
    here |= {"lse_new": total.log(), "w": lse_block.exp() / total, "out_new": whole}
    return here, here | {"out": whole, "lse": total.log()}


def of_a_merge_of_parts():
    lse_s, out_s = numbers(5, 7), numbers(5, 7)  # of one column of out
    m, lse = lse_s.amax(1, keepdim=True), lse_s.logsumexp(1, keepdim=True)
    here = {"lse_s": lse_s, "out_s": out_s, "m": m, "unit": m, "e_s": (lse_s - m).exp(), "w_s": lse_s.softmax(1)}
    here |= {"w": (lse_s - m).exp(), "l": (lse_s - m).exp().sum(1, keepdim=True), "lse": lse}
    out = (lse_s.softmax(1) * out_s).sum(1, keepdim=True)
    return here, here | {"out": out, "return_1": out, "return_2": lse}


def of_stages():
    n, stages = torch.arange(12.0), 3
    parity = torch.tensor([0.0, 1.0, 0.0, 1.0]).repeat_interleave(3)
    here = {"n": n, "stages": stages, "stage": torch.arange(3.0).repeat(4), "parity": parity}
    return here, here | {"return_1": here["stage"], "return_2": parity, "return_3": 1 - parity}


def of_positions():
    """Four queries more than keys, so that the last query sees the last key."""
    i = torch.arange(0.0, 20, 5)
    here = {"i": i, "Nk": 16, "Nq": 20, "Br": 5, "first": i - 4}
    return here, {"shift": -4, "p": i - 4, "first": i - 4, "last": i}


def of_registers():
    """Where lane t of a warp has number e of its i-th four numbers: a row t // 4, or 8 more, two columns in each 8."""
    warp, i, lane, e = torch.cartesian_prod(*map(torch.arange, (8, 8, 32, 4))).double().unbind(1)
    row = 16 * warp + 8 * (e >= 2) + (lane / 4).floor()
    here = {"row": row, "column": 8 * i + 2 * (lane % 4) + e % 2, "warp": warp, "i": i, "lane": lane, "e": e, "t": lane}
    return here, here | {"return_1": torch.arange(8.0 * 8 * 32 * 4)}


ONE_KEY, A_TILE = (numbers(5, 1), numbers(1, 3)), (numbers(5, 7), numbers(7, 3))
FORMULAS = {  # id: (the numbers of the names, the names of formulas in hint 2, and in hint 3)
    "00.1": (of_a_softmax(), "P m l lse", "m E l P lse"),
    "00.2": (of_an_update(*ONE_KEY), "alpha l O", "m_new unit alpha p return_1 return_2 return_3"),
    "00.3": (of_positions(), "shift", ""),
    "00.4": (of_gradients(), "P dP dS", "S P dP return_1 return_2"),
    "01.1": (of_an_update_with_O_divided(), "m_new l_new alpha beta O old new",
             "m_block S m_new alpha beta l_new old new l m"),
    "01.2": (of_an_update(*A_TILE), "m_new alpha P l", "m_new alpha S l m"),
    "01.3": (of_gradients(), "dP dS delta", "dS"),
    "02.1": (of_an_update(*A_TILE), "m_new alpha l O", "m_new alpha P m"),
    "02.1 pseudo-code": (of_an_update_in_steps(), "", "m_new alpha l O P l+ m"),
    "02.2": (of_gradients(), "dQ+", ""),
    "02.3": (of_gradients(), "delta", ""),
    "02.8": (of_stages(), "", "stage parity return_1 return_2 return_3"),
    "02.11": (of_registers(), "t i", "warp lane i e return_1"),
    "03.2": (of_gradients(scaled=False), "P dS scale_log2 lse_2", "P return_1 return_2"),
    "03.3": (of_an_update(*A_TILE, factor=0.4), "P alpha l O", "m_new unit alpha P O return_1 return_2"),
    "03.4": (of_positions(), "p", "first last"),
    "03.6": (of_gradients(mask=True), "S dS P", ""),
    "03.6 pseudo-code": (of_gradients(scaled=False, mask=True), "", "P dM+"),
    "03.7": (of_a_merge_of_parts(), "lse out w_s m e_s", "m unit w l return_1 return_2"),
    "04.1": (of_a_merge(), "lse_new out_new w", "lse_new w out lse"),
    "03.capstone.1": (of_a_softmax_that_is_divided_at_the_end(), "out P", "S P"),
    "03.capstone.2": (of_an_update(*A_TILE), "m_new alpha P l O out", "m_new alpha P l O m"),
    "03.capstone.4": (of_a_softmax(), "lse", ""),
}  # fmt: skip


@pytest.mark.parametrize("id", FORMULAS)
def test_the_formulas_in_hints_hold(id):
    """Each that can be read, and those that are expected have been read."""
    world, *names = FORMULAS[id]
    for text, expected in zip(TASKS[id.split()[0]].hints[1:], names, strict=True):
        found = formulas.compared(text, *world)
        assert {name: found.get(name) for name in expected.split()} == dict.fromkeys(expected.split(), True), text


# What a report tells, in the reader's own lines.

RETURN = "return m_new, alpha * l + p, alpha[..., None] * O + p[..., None] * v_j"
MERGE = "def merge(out, lse, out_block, lse_block):\n    "
FORGED = """    import os, sys
    open(sys.path[0] + '/results.jsonl', 'a').write('{"done": true}\\n')
    os._exit(0)
"""
LEFT = ("it left before the check was complete",)
CALL = """import torch
from reference import attention

def test(forward):
    q, k, v = torch.randn(3, 1, 1, 100, 8)
"""
RIGHT = """    out, _ = forward(q, k, v, causal=True)
    want = attention.forward(q, k, v, causal=True)[0]
    assert (out - want).abs().max() < 1e-5, 'out differs'
"""
# {name: (task, verdict, the answer, what the report tells)}. The answer is a text, or an edit of the stage's own, and
# {line} is then the line of the edit.
TOLD = {
    # Where a result is wrong, and how.
    "off": ("00.2", "wrong",
            ("(m - unit).exp()", "torch.where(torch.arange(m.shape[-1]).to(m) == 20, 1, (m - unit).exp())"),
            ("out is off by", "(tolerance ", "first such entry: out[0, 0, 20, 0] is ",
             f"queries 0 to 34             {'.' * 20}x{'.' * 14}", f"columns 0 to 31             {'x' * 32}")),
    "one head": ("00.2", "wrong",
                 ("p[..., None] * v_j", "p[..., None] * v_j * torch.tensor([1, 2]).to(p)[:, None, None]"),
                 ("first such entry: out[0, 1, 14, 0] is ", "heads 0 to 1                .x")),
    "NaN": ("00.2", "wrong", ("m_new.nan_to_num(neginf=0.0)", "m_new"),
            ("out is NaN in 896 of 2240 entries", "first such entry: out[0, 0, 0, 0] is nan, expected 0",
             "lse is NaN in 28 of 70 entries", "lse[0, 0, 0] is nan, expected -inf")),
    "infinite": ("00.1", "wrong", ("(m + l.log())", "(m + l.log() + math.inf)"),
                 ("lse is infinite in 42 of 42 entries where it must not be", "lse[0, 0, 0] is inf, expected")),
    "not masked": ("00.3", "wrong", ("-math.inf", "-1e9"),
                   ("out should have been masked in", "a query that sees no key has out = 0",
                    "lse should have been masked in", "lse = -inf")),
    "dk": ("00.4", "wrong", (" - delta[..., rows, None]", ""), ("dk is off by", "dk[0, 0, 0, 0] is", "keys 0 to ")),
    # Errors.
    "syntax": ("00.2", "error", ("(m - unit)", "(m - unit"), ("{line}:", "alpha = (m - unit.exp()", "SyntaxError")),
    "no function": ("00.2", "error", "def update(m):\n    pass",
                    ("has update", "def online_update(m, l, O, s, v_j)")),
    "parameters": ("00.2", "error", ("s, v_j)", "s, v)"), ("{line}:", "expected", "online_update(m, l, O, s, v_j)")),
    "exception": ("00.2", "error", (RETURN, RETURN.replace("alpha * l", "beta * l")),
                  ("{line}:", "return m_new, beta * l", "NameError", "'beta'")),
    "left over": ("00.2", "error", (RETURN, "raise Blank"), ("{line}:", "raise Blank")),
    "no return": ("00.2", "error", (RETURN, "pass"), ("online_update returned None; expected (a tensor (1, 2, 35),",)),
    "too few": ("00.2", "error", ("m_new, alpha * l + p, ", "m_new, "), ("returned (a tensor", "expected (a tensor")),
    "a shape": ("00.2", "error", ("m_new, alpha", "m_new[..., None], alpha"), ("returned (a tensor (1, 2, 35, 1)",)),
    "not in place": ("04.1", "error", MERGE + "return out, lse", ("returned (a", "expected None")),
    "in a rank": ("04.1", "error", MERGE + "lse += typo", ("line 2:", "lse += typo", "'typo'")),
    "in a simulated thread": ("01.3", "error", ("- delta_i", "- delt_i"), ("NameError", "delt_i", "dS[r, c] =")),
    "a barrier that one thread meets": ("01.3", "wrong", ("i, Bc, D):\n", "i, Bc, D):\n    if cuda.threadIdx.x == 0:\n"
                                        "        cuda.syncthreads()\n"), ()),
    "in an interpreted kernel": ("03.1", "error", ("seen = column < Nk", "seen = colum < Nk"),
                                 ("NameError", "colum", "seen = colum < Nk")),
    "beside a tensor": ("03.6", "error",
                        ("products(q, k, v, dout, b * H + h,", "products(q, k, v, dout, b * H + h + B * H,"),
                        ("{line}:", "S, dP = products(q, k, v, dout,", "OutOfBounds: program (0, 0, 0) loads")),
    "CUDA": ("02.1", "error", ("expf(m - m_new)", "expf(m - m_neu)"),
             ("{line}:", "float alpha = expf(m - m_neu);", "the compiler says:", "m_neu")),
    "CUDA brace": ("02.1", "error", ("  m = m_new;\n}", "  m = m_new;\n"),
                   ("The compiler finds this error behind your function",)),
    "CUDA at run time": ("02.1", "error", ("S[j * Br]", "S[-1]"),
                         ("{line}:", "float P = expf(S[-1] - m_new);", "access to element -1 of a shared")),
    "CUDA no function": ("02.1", "error", "__device__ void update() {}", ("has no function online_update",)),
    # The capstone.
    "no kernel": ("03.capstone.1", "error", ("@triton.jit\n", ""), ("no function with @triton.jit",)),
    "other parameters": ("03.capstone.1", "error", ("scale=None)", "softmax_scale=None)"),
                         ("expected other parameters: def attention(q, k, v",)),
    "no tensor": ("03.capstone.1", "error", ("    return out\n", ""),
                  ("attention returned NoneType; in step 1 it has to return out",)),
    "Python of the capstone": ("03.capstone.1", "error", ("torch.empty_like(q)", "torch.empty_like(Q)"),
                               ("{line}:", "out = torch.empty_like(Q)", "NameError")),
    "kernel of the capstone": ("03.capstone.1", "error", ("tl.trans(K)", "tl.trans(k_tile)"),
                               ("{line}:", "tl.trans(k_tile)")),
    "beside a tensor of the capstone": (
        "03.capstone.1", "error", ("tl.load(v + tile)", "tl.load(v + tile + 1)"),
        ("{line}:", "OutOfBounds: program (0, 0, 0) loads up to 4 bytes behind the last of v")),
    "an input overwritten": ("03.capstone.1", "wrong", ("torch.empty_like(q)", "q"),
                             ("q, k or v has been overwritten",)),
    # An answer that ends its process, never ends, or says itself that it is done.
    "exit code 0": ("00.2", "error", ("    alpha =", "    import os; os._exit(0)\n    alpha ="), LEFT),
    "exit code 3": ("00.2", "error", ("    alpha =", "    import os; os._exit(3)\n    alpha ="), ("exit code 3",)),
    "a signal": ("00.2", "error", ("    alpha =", "    import os; os.abort()\n    alpha ="), ("SIGABRT",)),
    "endless": ("00.2", "error", ("    alpha =", "    while True: pass\n    alpha ="),
                ("stopped after {limit} s in the case: causal with more queries than keys",)),
    "a forged end": ("00.2", "error", ("    m_new =", f"{FORGED}    m_new ="), LEFT),
    "a forged end of a puzzle": ("04.2", "error", ("    to = None", f"{FORGED}    to = None"), LEFT),
    "a forged end of the capstone": ("03.capstone.1", "error", ("    B, H", f"{FORGED}    B, H"), LEFT),
    "prints": ("00.2", "passed", ("    alpha =", "    print('shape', m.shape)\n    alpha ="),
               ("shape torch.Size([1, 2, 35])", "lines more")),
    # The tests of a hunt.
    "passes on both": ("00.bug1", "wrong", CALL + "    forward(q, k, v)\n",
                       ("WRONG: passes on the broken kernel too", "its inputs do not show what is wrong")),
    "compares nothing": ("00.bug1", "wrong", CALL + "    forward(q, k, v, causal=True)\n",
                         ("WRONG: passes on the broken kernel too", "it does not compare what is wrong")),
    "asks for the file": ("00.bug1", "wrong", CALL + "    assert not hasattr(forward, '__code__')\n",
                          ("WRONG: passes on the broken kernel too",)),
    "fails on both": ("00.bug1", "wrong", CALL + "    assert forward(q, k, v)[0].sum() > 1e9\n",
                      ("fails on the repaired kernel too", "line 6:")),
    "raises": ("00.bug1", "error", CALL + "    forward(q, k, v, mask=None)\n", ("line 6:", "TypeError", "mask")),
    "no test": ("00.bug1", "error", "import torch\n", ("no function test(forward)",)),
    "ends before the test": ("00.bug1", "error", "import os\nos._exit(0)\n" + CALL + RIGHT,
                             ("complete) before the test was called",)),
    "endless before the test": ("00.bug1", "error", "while True: pass\n" + CALL + RIGHT,
                                ("stopped after {limit} s before the test was called",)),
    "returns": ("00.bug1", "error", CALL + RIGHT.replace("assert (", "return (").replace(", 'out differs'", ""),
                ("test returned tensor(True); it has to assert, because what a test returns is ignored.",)),
    "no cause": ("00.bug1", "blank", CALL + RIGHT,
                 ("The test is right. Still to be answered: what is the cause?", "  b  the ")),
    "wrong cause": ("00.bug1", "wrong", 'CAUSE = "a"\n' + CALL + RIGHT,
                    ("WRONG: the cause is not 'a'", "  b  the causal mask")),
    "right cause": ("00.bug1", "passed", 'CAUSE = "b"\n' + CALL + RIGHT,
                    ("AssertionError: out differs", "the cause: the causal mask")),
}  # fmt: skip
on_cpu = pytest.mark.skipif(engine.name != "cpu", reason="the words of the simulator, the interpreter and g++")
# "not in place" is among them because with a GPU each rank is a new process, in which nothing compares what the
# function returns. There the check finds wrong results instead.
ON_CPU = ("in a simulated thread", "a barrier that one thread meets", "in an interpreted kernel", "beside a tensor",
          "beside a tensor of the capstone", "CUDA at run time", "not in place")  # fmt: skip


def line_of(id, part):
    """Such as "line 3", the first line with that part in the stage's own text."""
    text = str(solution(id))
    return f"line {text[: text.index(part)].count(chr(10)) + 1}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_cpu if name in ON_CPU else ()) for name in TOLD])
def test_what_a_reader_is_told(name):
    id, verdict, given, words = TOLD[name]
    runnable(TASKS[id])
    limit = 60
    if "endless" in name:
        limit = 1 if engine.name == "cpu" else 10  # A GPU takes some seconds to begin.
    words = [word.replace("{limit}", str(limit)) for word in words]
    if isinstance(given, tuple):
        words = [word.replace("{line}", line_of(id, given[0])) for word in words]
        given = edited(id, given)
    report = check(id, given, limit=limit)
    assert report.verdict == verdict and all(word in repr(report) for word in words), report
    assert "Traceback" not in repr(report) and "/tmp" not in repr(report)
    assert max(map(len, repr(report).splitlines())) <= 120 or "equals" in repr(report) or verdict != "wrong"


@pytest.mark.parametrize("name", ["CUDA", "CUDA brace"])
def test_an_error_of_nvrtc_is_answered_in_the_readers_lines(name, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and NVRTC")
    from steps.step02_fa2_cuda import nvrtc

    id, _, edit, words = TOLD[name]
    text = answer.Answer(edited(id, edit), "your text")
    (tmp_path / "fwd_0_scalar.cu").write_text(splice.splice(EXERCISES[id].path.read_text(), text, EXERCISES[id]).text)
    with pytest.raises(Exception, match="error") as e:
        nvrtc.compile(tmp_path / "fwd_0_scalar.cu", {"D": 32, "Br": 16, "Bc": 16}, "sm_90a")
    says = "\n".join(explain(account(e.value, tmp_path), EXERCISES[id], text, {}))
    assert all(word.replace("{line}", line_of(id, edit[0])) in says for word in words), says


TYPING = """Failed in cuda mode pipeline (step: nopython frontend)
Unknown attribute 'size2' of type float32

File "../../tmp/steps-0i1xvvfv/steps/step01_fa1_numba/bwd_0_published.py", line 46:
def score_gradients(dS, P, dO_i, V_j, delta, head, i, Bc, D):
"""
UNDEFINED = "Failed in cuda mode pipeline (step: nopython frontend)\nNameError: name 'delta_i' is not defined"
COMPILATION = "at 4:11:\ndef mask(S, i, j, Nq, Nk):\n    ...\n           ^\nNameError('colum is not defined')"
# What Numba and Triton say when they compile for a GPU, what the answer to it contains, and what it does not.
COMPILED = {
    "a line of Numba's": ("01.3", "TypingError", TYPING, ("line 3:", "Unknown attribute 'size2'"), "/tmp"),
    "a name of Numba's": ("01.3", "TypingError", UNDEFINED, ("line 9:", "delta_i = delta", "'delta_i' is not"), "/tmp"),
    "Triton's": ("03.1", "CompilationError", COMPILATION, ("line 5:", "NameError('colum is"), "at 4"),
    "Triton's of a kernel": ("03.capstone.1", "CompilationError", COMPILATION.replace("mask(S", "forward_kernel(q"),
                             ("line 12:", "NameError('colum is"), "at 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_what_compilers_for_a_gpu_say_is_answered_in_the_readers_lines(name):
    id, kind, message, words, hidden = COMPILED[name]
    lines = {43 + n: n for n in range(1, 9)}
    called = [(f"steps/{TASKS[id].file}", 44)] if id == "03.capstone.1" else []  # Triton compiles at a kernel's call.
    error = {"type": kind, "message": message, "frames": called}
    says = "\n".join(explain(error, TASKS[id], answer.Answer(str(solution(id)), "your text"), lines))
    assert all(word in says for word in words) and hidden not in says, says


def test_an_answer_whose_child_takes_too_much_memory_is_stopped(monkeypatch):
    monkeypatch.setattr(runner, "MEMORY", 2**30)
    child = "b = b'x' * (5 * 2**28); import time; time.sleep(30)"
    start = f'    import subprocess, sys; subprocess.run([sys.executable, "-c", "{child}"])\n'
    report = check("00.2", edited("00.2", ("    alpha =", f"{start}    alpha =")), limit=LIMIT)
    assert report.verdict == "error", report
    assert "took more than 1 GB of memory" in repr(report) and "in the case: causal with more" in repr(report)
    assert check("00.2", ONLINE).verdict == "passed"  # The next check works again.


# Functions from a notebook.


def larger(a, b):
    return torch.maximum(a, b)


def online_update(m, l, O, s, v_j):
    m_new = larger(m, s)
    unit = m_new.nan_to_num(neginf=0.0)
    alpha = (m - unit).exp()
    p = (s - unit).exp()
    return m_new, alpha * l + p, alpha[..., None] * O + p[..., None] * v_j


def test_a_function_travels_with_its_helpers_and_imports():
    assert check("00.2", online_update).verdict == "passed"
    assert "The capstone is a file: write it in my/03_capstone.py" in repr(check("03.capstone.1", online_update))
    namespace = {}
    exec(ONLINE, namespace)
    report = check("00.2", namespace["online_update"])
    assert report.verdict == "error" and "no source text" in repr(report) and "my/00_2_online_update.py" in repr(report)


IN_PYTHON = [  # Those in Numba's simulator and in Triton's interpreter take long.
    pytest.param(id, marks=() if id[:2] in ("00", "04") else pytest.mark.long)
    for id, task in FUNCTIONS.items()
    if task.path.suffix == ".py"
]


@pytest.mark.parametrize("id", IN_PYTHON)
def test_a_helper_may_have_the_name_of_something_in_the_stages_file(id):
    """The stage's own body stands in a helper that is called like the file's first other function."""
    task = TASKS[id]
    runnable(task)
    tree = ast.parse(task.path.read_text())
    own = answer.top_level(tree, task.function)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node is not own]
    imported = [name for node in tree.body if isinstance(node, ast.ImportFrom) for name in splice._names(node)]
    taken = [*defined, *imported][0]
    helper = ast.unparse(own).replace(f"def {own.name}(", f"def {taken}(")
    parameters = [argument.arg for argument in own.args.args]
    own.body = [ast.Return(ast.Call(ast.Name(taken), [ast.Name(name) for name in parameters], []))]
    imports = "\n".join(["import math", "import torch", *(["import triton"] * ("triton" in helper))])
    hand_in(id, f"{imports}\n\n{helper}\n\n{ast.unparse(ast.fix_missing_locations(own))}\n")
    report = check(id)
    assert report.verdict == "passed", report


def test_a_blank_function_of_a_notebook():
    def online_update(m, l, O, s, v_j):
        """Takes in one key."""
        raise Blank

    assert check("00.2", online_update).verdict == "blank"


def test_of_two_definitions_the_last_is_judged():
    """As Python calls it."""
    first, last = ast.parse("def f():\n    return 1\n\ndef f():\n    return 2").body
    assert answer.top_level(ast.Module([first, last], []), "f") is last


@pytest.mark.parametrize("old, count", [("no such text", 0), ("Nk", "[2-9]")])
def test_the_text_that_a_hunt_edits_must_occur_exactly_once(old, count):
    with pytest.raises(ValueError, match=rf"00.bug1: step00_naive/fwd_3_tiled.py contains '{old}' {count} times"):
        dataclasses.replace(HUNTS["00.bug1"], edit=[old, ""]).broken  # noqa: B018


def test_a_notebook_gives_the_cause_as_an_argument():
    assert check("00.bug1", CALL + RIGHT, cause="b").verdict == "passed"


# Notebooks do not give solutions away.


def normalised(text):
    """The lines of code, in markdown cells too, without comments, whitespace and lines that have only brackets."""
    lines = (re.sub(r"\s+|(//|#(?!pragma|include)).*", "", re.sub(r"^# ?", "", line)) for line in text.splitlines())
    return [line for line in lines if re.search(r"\w", line)]


def texts(value):
    """Every string in the cells and outputs of a notebook."""
    if isinstance(value, dict):
        return [text for name, x in value.items() if name != "metadata" for text in texts(x)]
    return [text for x in value for text in texts(x)] if isinstance(value, list) else [str(value)]


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb")) + sorted((ROOT / "notebooks").glob("src/*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_notebook_contains_a_solution(path):
    text = path.read_text() if path.suffix == ".py" else "\n".join(texts(json.loads(path.read_text())["cells"]))
    there = "\n".join(["", *normalised(text), ""])
    for id, task in FUNCTIONS.items():
        lines = normalised(str(solution(id)).split("{\n", 1)[1] if task.path.suffix != ".py" else body(task))
        size = min(3, len(lines))
        pieces = [lines[i : i + size] for i in range(len(lines) - size + 1)]
        shown = [piece for piece in pieces if "\n".join(["", *piece, ""]) in there]
        assert not shown, f"{path.name} shows of {id}: {shown}"


# The commands.


def test_check_hint_and_solution_on_the_command_line(my):
    def run(*words):
        return CliRunner().invoke(__main__.app, words)

    first = run("check", "00")
    assert first.exit_code == 0 and first.output.count(": blank") == len(exercises.of_stage("00"))
    assert len(list(my.iterdir())) == len(exercises.of_stage("00"))
    hand_in("00.2", ONLINE)
    second = run("check", "00.2")
    assert second.exit_code == 0 and "passed" in second.output
    hand_in("00.2", ONLINE.replace("alpha * l", "l"))
    third = run("check", "00")
    assert third.exit_code == 1
    assert "00.2 Add one key to m, l and O: WRONG" in third.output and "l is not rescaled" in third.output
    for level, words in ("1", "Next: python -m steps hint 00.2 2"), ("2", "hint 00.2 3"), ("3", "m_new = max(m, s)"):
        assert words in run("hint", "00.2", level).output
    assert "alpha = (m - unit).exp()" in run("solution", "00.2").output
    unknown = run("check", "00.9")
    assert unknown.exit_code == 2 and "00.1, 00.2" in unknown.output


def class_of(tmp_path, files):
    """A folder with a folder for each student; files: {path in it: text}."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def graded(folder, *words):
    """What grade prints."""
    done = CliRunner().invoke(__main__.app, ["grade", str(folder), "--stage", "00", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_class_is_graded(my, tmp_path):
    """Names with spaces and brackets, an empty folder, an endless loop, no Python, a contract that takes too long."""
    my.mkdir()
    (my / "00_1_softmax.py").write_text("the lecturer's own")
    handed_in = {
        "[Ann] Lee/my/00_2_online_update.py": ONLINE,
        "[Ann] Lee/00_1_softmax.py": "def softmax(S):\n    open('written.txt', 'w')\n    while True: pass\n",
        "[Ann] Lee/00_3_mask.py": "def mask(:\n",
    }
    folder = class_of(tmp_path / "class", handed_in)
    (folder / "nobody yet").mkdir()
    printed = graded(folder, "--limit", "2", "--json", f"{tmp_path}/grades.json")
    grades = json.loads((tmp_path / "grades.json").read_text())
    verdicts = {id: row["verdict"] for id, row in grades["[Ann] Lee"].items()}
    assert verdicts == {"00.1": "error", "00.2": "passed", "00.3": "error", "00.4": "blank", "00.bug1": "blank"}
    assert grades["[Ann] Lee"]["00.2"]["contract"]["ended"] == "stopped after 2 s"
    assert {row["verdict"] for row in grades["nobody yet"].values()} == {"blank"}
    assert printed.startswith("[Ann] Lee/00_1_softmax.py uses open: read it before you run it outside of a container.")
    assert re.search(r"^\[Ann\] Lee: 1 passed, 2 error \(\d+ s\)$", printed, re.M), printed
    assert re.search(r"^nobody yet: nothing handed in", printed, re.M), printed
    assert re.search(
        r"\[Ann\] Lee +ERROR: stopped after 2 s +passed; contract stopped after 2 s +ERROR: SyntaxError", printed
    ), printed
    assert [path.name for path in my.iterdir()] == ["00_1_softmax.py"]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.py")} == {*handed_in}
    assert not list(tmp_path.rglob("written.txt")) and not Path("written.txt").exists()


def test_a_class_is_graded_anew_only_where_an_answer_has_changed(tmp_path, monkeypatch):
    asked, contracts = [], []

    def contract(folder, answers, limit):
        contracts.append(sorted(task.id for task in answers))
        return {task.stage: {"passed": 7, "failed": [], "ended": None} for task in answers}

    def verdicts(folder, answers, limit):
        asked.extend(answers)
        return {id: {"verdict": "passed", "lines": [], "contract": None} for id in answers}

    monkeypatch.setattr(grading, "_contract", contract)
    monkeypatch.setattr(grading, "_verdicts", verdicts)
    files = {"ann/00_2_online_update.py": ONLINE, "ann/00_3_mask.py": "x = 1\n", "ann/00_bug1.py": "y = 1\n"}
    folder, kept = class_of(tmp_path / "class", files), ("--json", f"{tmp_path}/grades.json")
    assert "passed 7/7" not in graded(folder, *kept, "--quick")
    assert asked == ["00.2", "00.3", "00.bug1"] and not contracts
    assert "passed 7/7" in graded(folder, *kept)
    assert len(asked) == 3 and contracts == [["00.2", "00.3"]]  # both in one run
    (folder / "ann" / "00_3_mask.py").write_text("x = 2\n")
    graded(folder, *kept)
    assert asked[3:] == ["00.3"] and contracts[1:] == [["00.3"]]


def test_the_contract_of_several_answers_is_divided_where_it_fails(tmp_path, monkeypatch):
    """Together they fail in stage 00, and alone only 00.3; stage 01's answer is not run again."""
    runs = []

    def contract(folder, answers, limit):
        ids = [task.id for task in answers]
        runs.append((ids, limit))
        failed = {"step00_naive": ["t"] if "00.3" in ids else [], "step01_fa1_numba": []}
        return {task.stage: {"passed": 7, "failed": failed[task.stage], "ended": None} for task in answers}

    monkeypatch.setattr(grading, "_contract", contract)
    answers = {EXERCISES[id]: f"file of {id}" for id in ("00.2", "00.3", "01.1")}
    rows = grading._contracts(tmp_path, answers, 10)
    assert {id: row["failed"] for id, row in rows.items()} == {"00.2": [], "00.3": ["t"], "01.1": []}
    assert runs == [(["00.2", "00.3", "01.1"], 30), (["00.2"], 10), (["00.3"], 10)]
    runs.clear()
    assert grading._contracts(tmp_path, {EXERCISES["00.3"]: "its file"}, 10)["00.3"]["failed"] == ["t"]
    assert len(runs) == 1 and grading._contracts(tmp_path, {}, 10) == {}


@pytest.mark.parametrize("text, names", [
    ("import os.path, math", ["os"]), ("from shutil import rmtree", ["shutil"]), ("import torch", []),
    ("def f():\n    import subprocess as s, socket", ["socket", "subprocess"]),
    ("__import__('o' + 's')", ["__import__"]), ("x.open('a')", []), ("print(open('a').read())", ["open"]),
    ("def f(:", []), ("__global__ void f() {}", []),
])  # fmt: skip
def test_answers_that_can_reach_outside_are_named(text, names, tmp_path):
    folder = class_of(tmp_path, {"00_1_softmax.py": text})
    assert grading.reaching_outside(folder, [EXERCISES["00.1"]]) == ({"00_1_softmax.py": names} if names else {})


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_step00_naive" name="good" />
<testcase classname="test_step00_naive.TestContract" name="skipped"><skipped message="a">a</skipped></testcase>
<testcase classname="tests.test_step00_naive.TestContract" name="wrong"><failure message="not {}">a</failure></testcase>
<testcase classname="tests.test_step00_naive" name="broken"><error message="on setup">a</error></testcase>
<testcase classname="test_step00_naive" name="both"><failure message="a"/><error message="b"/></testcase>
<testcase classname="tests.test_step01_fa1_numba" name="of another stage"><failure message="a">a</failure></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("how", [None, "stopped after 2 s"])
def test_what_a_report_of_the_contract_counts_as_failed(how, tmp_path, monkeypatch):
    """A failure and an error, and never what was skipped."""
    written = [REPORT, None]

    def run(folder, files, command, limit):
        if text := written.pop(0):
            (Path(folder) / "report.xml").write_text(text)
        return "", how

    monkeypatch.setattr(grading, "_run", run)
    counted = {"passed": 1, "failed": ["wrong", "broken", "both"], "ended": how}
    assert grading._contract(tmp_path, {EXERCISES["00.2"]: "an answer"}, 2) == {"step00_naive": counted}
    lost = {"passed": 0, "failed": [], "ended": how or "pytest ended without a report"}
    assert grading._contract(tmp_path, {EXERCISES["00.2"]: "an answer"}, 2) == {"step00_naive": lost}


def row_of_grade(verdict, failed=None, ended=None, lines=()):
    """A row as grading.grade returns it; failed: the names of the contract's tests that fail, if it was run."""
    contract = None if failed is None else {"passed": 190, "failed": failed, "ended": ended}
    return {"verdict": verdict, "lines": list(lines), "contract": contract, "file": None}


CELLS = {  # {student: (the row of 00.2, its cell in the table, the line below the table)}
    "blank": (row_of_grade("blank"), "-", None),
    "wrong": (row_of_grade("wrong"), "WRONG", None),
    "cause": (row_of_grade("wrong", lines=["passes", "The test is right. WRONG: a"]), "WRONG cause, right test", None),
    "error": (row_of_grade("error", lines=["a line", "Hint: b"]), "ERROR", None),
    "syntax": (row_of_grade("error", lines=["my/a.py, line 1: def (", "SyntaxError: b"]), "ERROR: SyntaxError", None),
    "endless": (row_of_grade("error", lines=["stopped after 60 s in the case: c"]), "ERROR: stopped after 60 s", None),
    "hunts have no contract": (row_of_grade("passed"), "passed", None),
    "all": (row_of_grade("passed", []), "passed 190/190", None),
    "three": (row_of_grade("passed", ["a", "b", "c"]), "passed 190/193", "three, 00.2: fails a, b, c"),
    "four": (row_of_grade("passed", ["a", "b", "c", "d"]), "passed 190/194", "four, 00.2: fails a, b, c, ..."),
    "stopped": (row_of_grade("passed", ["a"], "stopped after 2 s"), "passed; contract stopped after 2 s",
                "stopped, 00.2: fails a"),
}  # fmt: skip


def test_each_form_of_a_cell_of_a_class_s_table(tmp_path, monkeypatch):
    for name in CELLS:
        (tmp_path / name).mkdir()
    rows = {task.id: row_of_grade("blank") for task in exercises.of_stage("00")}
    monkeypatch.setattr(grading, "grade", lambda student, *_: rows | {"00.2": CELLS[student.name][0]})
    done = CliRunner().invoke(__main__.app, ["grade", str(tmp_path), "--stage", "00"], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.output.splitlines()]
    head = next(n for n, line in enumerate(lines) if line.startswith("student"))
    assert lines[head].split() == ["student", "00.2"], "what everybody left blank has no column"
    shown = dict(re.split(" {2,}", line) for line in lines[head + 2 : head + 2 + len(CELLS)])
    assert shown == {name: cell for name, (_, cell, _) in CELLS.items()}
    told = [line for line in lines if ": fails" in line]
    assert told == [line for name in sorted(CELLS) if (line := CELLS[name][2])]


@pytest.mark.long
def test_the_contract_finds_what_the_check_does_not(tmp_path):
    """A mistake for one key shows in a case that the exercise leaves out."""
    (tmp_path / "student").mkdir()
    text = filled_in(EXERCISES["00.1"])
    (tmp_path / "student" / "00_1_softmax.py").write_text(text.replace("E / l)", "E / l * (1 + (S.shape[-1] == 1)))"))
    row = grading.grade(tmp_path / "student", [EXERCISES["00.1"]], limit=300)["00.1"]
    assert row["verdict"] == "passed" and row["contract"]["ended"] is None
    assert "test_case[one_key-float32-matrix]" in row["contract"]["failed"] and row["contract"]["passed"] > 100


def in_other_words(task):
    """The stage's own function with other names of its variables, in other lines and without its comments."""
    text = str(solution(task.id))
    if task.path.suffix == ".cu":
        text = re.sub(r"//.*", "", text)
        names = re.findall(r"^\s+(?:for \()?(?:const )?(?:int|float|bool) (\w+)\b[^(,]*[=;]", text, re.M)
        for name in names:
            text = re.sub(rf"(?<![.\w]){name}\b", f"{name}_here", text)
        return text.replace(";\n", ";\n\n")
    tree = ast.parse(text)
    own = answer.top_level(tree, task.function)
    nodes = [node for node in ast.walk(own) if isinstance(node, ast.Name)]
    given = {argument.arg for argument in ast.walk(own) if isinstance(argument, ast.arg)}
    local = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} - given
    for node in nodes:
        node.id += "_here" * (node.id in local)
    return ast.unparse(tree) + "\n"


@pytest.mark.parametrize("id", [pytest.param(id, marks=pytest.mark.long) for id in EXERCISES])
def test_a_right_answer_in_other_words_passes_the_whole_contract(id, tmp_path):
    """No test of a stage looks for a line of the stage's own in a file that holds a reader's function."""
    task = EXERCISES[id]
    runnable(task)
    (tmp_path / task.mine.name).write_text(
        "import math\n\nimport torch\n\n" * (task.path.suffix == ".py") + in_other_words(task)
    )
    row = grading.grade(tmp_path, [task], limit=900)[id]
    assert row["verdict"] == "passed", row["lines"]
    assert row["contract"]["failed"] == [] and row["contract"]["passed"] > 100 and row["contract"]["ended"] is None, row


def test_no_command_has_more_than_six_options():
    for name, command in typer.main.get_command(__main__.app).commands.items():
        options = [parameter.name for parameter in command.params if parameter.param_type_name == "option"]
        assert len(options) <= 6, (name, options)


def test_mine_knows_what_is_filled_in():
    nothing = Mine()
    assert nothing.rungs("step00_naive") == [] and "python -m steps check 00" in nothing.nothing("00")
    check("00.1")
    hand_in("00.2", ONLINE)
    mine = Mine()
    assert mine.rungs("step00_naive") == ["online"] and mine.nothing("00") is None and mine.nothing("03")
    assert mine.holds(ROOT / "steps/step00_naive/fwd_2_online.py") and not mine.holds(
        "steps/step00_naive/fwd_1_matrix.py"
    )
    assert "00.1-softmax" in mine.blanks("step00_naive") and "00.2-online_update" not in mine.blanks("step00_naive")
    hand_in("00.2", "def")
    with pytest.raises(answer.Problem, match="my/00_2_online_update.py, line 1"):
        Mine()


def test_pytest_mine_names_the_misconception_and_skips_the_blanks(tmp_path):
    """A run of pytest in which one function of stage 00 is wrong."""
    (tmp_path / "00_2_online_update.py").write_text(ONLINE.replace("alpha * l", "l"))
    command = [sys.executable, "-m", "pytest", "tests/test_step00_naive.py", "--mine", "-rs", "-p", "no:cacheprovider"]
    command += ["-k", "TestContract and (ragged_causal or softmax or bit_equal or changed_call)"]
    # The run needs no plugins, and their import would double its time.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "STEPS_MY": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    for words in (
        "In this case, this equals what you get when l is not rescaled when the running maximum moves",
        "test_case[ragged_causal-float32-online]",
        "my/00_1_softmax.py is blank: python -m steps hint 00.1",
    ):
        assert words in done.stdout, done.stdout
    assert "matrix" not in done.stdout
    assert "test_a_changed_call" not in done.stdout  # What looks into the caches finds those of the copy.


def test_where_nothing_can_be_forked(monkeypatch):
    monkeypatch.setattr(runner, "FORK", False)
    assert check("00.2", ONLINE).verdict == "passed"  # The server itself did the job, and has ended.


def test_a_kernel_s_text_is_edited_in_a_copy_and_only_there():
    from steps.step02_fa2_cuda import calls, launches

    here, old = launches.HERE, "float max_S = -INFINITY;"
    calls.plans["a launch of the kernel as it was"] = ()
    with listing.edited("fwd_2_mma.cu", (old, "float max_S = 0;")) as lines:
        assert launches.HERE != here and (launches.HERE / "fwd_2_mma.cu").read_text().splitlines() == lines
        assert not any(old in line for line in lines)
        assert (launches.HERE / "fwd_5_fa2.cu").read_text() == (here / "fwd_5_fa2.cu").read_text()
        assert not calls.plans
    assert launches.HERE == here and old in (here / "fwd_2_mma.cu").read_text()
    assert calls.plans.pop("a launch of the kernel as it was") == ()
    with pytest.raises(ValueError, match="fwd_2_mma.cu contains 'no such text' 0 times"):
        with listing.edited("fwd_2_mma.cu", ("no such text", "")):
            pass
