"""What the commands print on a terminal of any width, or of none that is known: the same, in other lines."""

import os
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from reference import mutants
from steps import __main__
from steps.course.demo import compare
from steps.course.workbook import exercises, grading

ERRORS = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 1.5e-07)
ROW = {  # of a GPU, because that table is the widest
    "stage": "step02_fa2_cuda", "engine": "NVRTC", "dtype": "float32", "shape": [1, 16, 4096, 64], "causal": True,
    "errors": ERRORS, "tolerances": ERRORS, "loss_difference": 0.1, "loss_tolerance": 0.1, "seconds": 12.3,
    "gradient": {"worst": "w", "difference": 1.0, "tolerance": 1.0}, "tflops": 123.4, "sdpa_tflops": 234.5,
    "verdict": "agrees",
}  # fmt: skip
COMMANDS = (
    "--help", "demo --stage 02", "check 00.2", "check 02.bug1", "hint 00.2 2", "hint 00.2 3", "hint 02.bug1 --code",
    "solution 00.2", "mutants --stage 00", "engine", "bench --help", "verify --help", "grade CLASS --stage 00",
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Nothing is computed: the commands have only to print. Gives the folder of a class."""
    kills = {f"mistake_{n}": dict.fromkeys(map("case {}".format, range(40)), "killed") for n in range(3)}
    monkeypatch.setattr(mutants, "kill_matrix", lambda supports: (kills, []))
    monkeypatch.setattr(compare, "Subject", lambda size, progress: None)
    monkeypatch.setattr(compare, "compare", lambda number, *_: ROW)
    monkeypatch.setattr(exercises, "MY", tmp_path / "my")
    row = {"verdict": "passed", "lines": [], "contract": {"passed": 9, "failed": ["a_case"], "ended": None}}
    monkeypatch.setattr(grading, "grade", lambda student, tasks, *_: {task.id: row for task in tasks})
    (tmp_path / "class" / "Ann Lee of a long name").mkdir(parents=True)
    return tmp_path / "class"


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_left_out_where_the_terminal_is_narrow(command, quick, monkeypatch):
    words, found = [str(quick) if word == "CLASS" else word for word in command.split()], {}
    for width in (300, 72, 60, 40, 20, 1):
        monkeypatch.setattr(__main__, "console", Console(width=width))
        done = CliRunner().invoke(__main__.app, words, env={"COLUMNS": str(width)})
        assert done.exit_code == 0, done.output
        found[width] = "".join(done.output.split())
    assert len(found[300]) > 50 and set(found.values()) == {found[300]}


UNKNOWN = """
import sys, typer
from steps import __main__
from steps.course.bench import __main__ as measuring
__main__.app(["hint", "02.bug1", "--code"], standalone_mode=False)
__main__.show_table(__main__.results([]))
sys.argv[1:] = ["--help"]
typer.run(measuring.main)  # its help is rich's
"""


def test_a_terminal_of_unknown_width_is_one_of_80_columns():
    how = dict(env=os.environ | {"COLUMNS": "0"}, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", UNKNOWN], **how)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 60 < len(lines[0]) <= 80, "the complaint of the hunt"
    assert "verdict" in done.stdout and "__global__" in done.stdout and "--sustained" in done.stdout
