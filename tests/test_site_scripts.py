"""The site's scripts, run by Node: the player's pictures, puzzle 0 in the page; and the list of exercises."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steps import __main__, puzzle
from steps.course.workbook import exercises

SITE = Path(__file__).parents[1] / "notebooks" / "site"
sys.path.insert(0, str(SITE))

import progress  # noqa: E402

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="Node.js is not installed")


def node(program, given=None):
    """What the program, an expression, gives. It may use `given`."""
    plain = "(_, value) => value instanceof Set ? [...value] : value"
    given_is = "const given = JSON.parse(require('fs').readFileSync(0))"
    program = f"{given_is}; console.log(JSON.stringify({program}, {plain}))"
    done = subprocess.run(["node", "-e", program], cwd=SITE, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def frames(order):
    """The player's frames of one order of visits: what is touched, and what is on the chip and in memory then."""
    walk = f"window.TRACES.walks.find((one) => one.order === '{order}')"
    return node(f"(require('./stills.js'), require('./stills.js').KINDS.walk.frames({walk}))")


@needs_node
def test_flash_attention_2_holds_its_rows_on_the_chip_from_the_load_of_q_to_the_store_of_o():
    rows, stored = None, []
    for frame in frames("fa2"):
        if frame["now"] == "Q":
            rows = frame["chip"]["Q"]
        assert frame["chip"].get("m") == frame["chip"].get("l") == rows, "finished rows are not on the chip"
        if frame["now"] == "lse":
            stored.append(rows)
            assert "O" not in frame["chip"], "O was stored before"
        else:
            assert frame["chip"]["O"] == rows
        assert frame["written"].get("lse", []) == stored
    assert stored == [[0, 16], [16, 32], [32, 48]]


@needs_node
def test_flash_attention_1_has_a_tile_of_o_on_the_chip_only_during_its_visit():
    found = frames("fa1")
    visits = [frame for frame in found if frame["now"] == "O" and "loads" in frame["sentence"]]
    assert len(visits) == 9 and all(frame["chip"]["O"] == frame["chip"]["Q"] for frame in visits)
    for before, frame in zip(found, found[1:], strict=False):
        if before["now"] == "m" and "stores" in before["sentence"]:
            assert not {"O", "l", "m"} & set(frame["chip"])
    assert [len(frame["done"]) for frame in visits][-1] == 8 and len(found[-1]["done"]) == 9


@needs_node
def test_the_still_pictures_are_the_players():
    stills = node("require('./stills.js').STILLS")
    for name, text in stills.items():
        assert (SITE / name).read_text() == text, "run: node notebooks/site/stills.js"


LINES = [
    *puzzle.MISTAKES, "l * exp(m - m_new) + exp(s - m_new)", "l = l * exp(m - m_new) + exp(s - m_new)",
    "l *= exp(m - m_new)",
    "l_new = exp(m−m_new)*l+exp(s−m_new)  # yes", "1 if m == -inf else l*exp(m-m_new)+exp(s-m_new)", "", "(", "l +",
    "2 l", "foo", "exp", "np.exp(s - m_new)", "np.pi", "foo.exp(1)", "log(0)", "1/0", "(-8)**0.5", "2**5000", "s**-1",
    "max(l)", "exp()", "l and s", "l % 2", "l < s < m", "not l", "[1]", "l(2)", "lambda: 1", "m = 2", "l; s", "True",
    "l,", "inf - inf", "-l**2", "abs(-3)", "exp(s, m)", "'a'", "exp(x=1)", "1 if else 2", "a" * 301, "import os",
    "1_000", "x = l",
    "l*(m<s)+exp(s-m_new)*(s==m_new)", "max(l, s) - min(m, s)", "l*e**(m-m_new)+e**(s-m_new)", "0 * s", "l ** 2 ** 0.5",
]  # fmt: skip


@needs_node
def test_the_page_says_of_a_line_what_the_command_says():
    found = node("given[1].map((line) => require('./puzzle.js').judge(line, given[0]))", [puzzle.TEXTS, LINES])
    for line, said in zip(LINES, found, strict=True):
        assert tuple(said) == puzzle.judge(line), line


@needs_node
def test_the_page_judges_the_start_as_the_command_does():
    starts = ["-inf", "m = -inf", "-float('inf')", "-np.inf", "0", "-1000", "-1e308", "inf", "1.5", "hello", "", "l"]
    found = node("given[1].map((line) => require('./puzzle.js').judgeStart(line, given[0]))", [puzzle.TEXTS, starts])
    assert [tuple(said) for said in found] == [puzzle.judge_start(start) for start in starts]


# ---- how far the reader is -------------------------------------------------------------------------------------------


def test_the_list_of_exercises_shows_what_is_begun_written_and_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "MY", tmp_path)
    task = exercises.find("00.1")
    assert progress.state("00.1", tmp_path) == "not begun"
    assert CliRunner().invoke(__main__.app, ["check", "00.1"]).exit_code == 0
    assert progress.state("00.1", tmp_path) == "begun"
    task.mine.write_text(f"import torch\n\n\n{own_text(task)}")
    assert progress.state("00.1", tmp_path) == "written"
    done = CliRunner().invoke(__main__.app, ["check", "00.1"])
    assert done.exit_code == 0, done.output
    assert progress.state("00.1", tmp_path) == "passed"
    task.mine.write_text(task.mine.read_text() + "\n# changed\n")
    assert progress.state("00.1", tmp_path) == "written", "what is written now was not checked"


def test_a_check_does_not_fail_because_of_its_note(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "MY", tmp_path)
    task = exercises.find("00.1")
    task.mine.write_text("something")
    (tmp_path / "passed.json").write_text("no JSON")
    assert progress.state("00.1", tmp_path) == "written"
    exercises.note_passed(task)
    assert progress.state("00.1", tmp_path) == "passed"
    (tmp_path / "passed.json").unlink()
    (tmp_path / "passed.json").mkdir()  # cannot be read or written as a file, whoever runs the test
    exercises.note_passed(task)
    assert progress.state("00.1", tmp_path) == "written"


def own_text(task):
    """The stage's own function."""
    from steps.course import workbook

    return str(workbook.solution(task.id))


def test_a_step_of_the_capstone_stays_passed_when_the_file_grows(tmp_path):
    (tmp_path / "03_capstone.py").write_text("def attention(): pass\n")
    assert progress.state("03.capstone.1", tmp_path) == "begun"
    (tmp_path / "passed.json").write_text(json.dumps({"03.capstone.1": hashlib.sha256(b"").hexdigest()}))
    assert progress.state("03.capstone.1", tmp_path) == "passed"
    assert progress.state("03.capstone.2", tmp_path) == "begun"


def test_the_list_has_every_exercise_once_in_order(tmp_path):
    text = progress.page((exercises.STEPS / "course/workbook/exercises.toml").read_text(), tmp_path)
    shown = [line.split("|")[1].strip() for line in text.splitlines() if "not begun" in line]
    assert sorted(shown) == sorted(exercises.load())
    assert shown.index("02.9") < shown.index("02.10") < shown.index("02.bug1")
