"""The course as an installed package: its wheel has every file, and each command works or says that it needs a clone.

The wheel is built from a copy of the sources and installed into a folder. Commands run in an empty folder.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from steps import catalogue
from steps.course.workbook import solution

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

# One process runs all of these, since starting one takes longer than most of them.
RUN = """
import json, os, pathlib, sys, types
from typer.testing import CliRunner
import steps
from steps import __main__, places
from steps.course.bench import rows
report = {"file": steps.__file__, "clone": places.IS_CLONE, "commit": rows.provenance("cpu")["commit"]}
for command in json.load(sys.stdin):
    done = CliRunner().invoke(__main__.app, command.split())
    problem = done.exception and repr(done.exception)
    report[command] = {"code": done.exit_code, "text": done.output, "problem": problem}
pathlib.Path("report.json").write_text(json.dumps(report))
"""
MINE = """
from steps import step00_naive

def attention(q, k, v, causal=False, scale=None):
    return step00_naive.attention(q, k, v, causal=causal, scale=scale, rung="matrix")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("steps", "reference"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", *PROJECT["license-files"]):
        shutil.copy(ROOT / file, source)
    done = subprocess.run([sys.executable, "-c", BUILD, made], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(made.iterdir())


class Installed:
    """The wheel's files in `folder`, and an empty folder `here` in which commands run."""

    def __init__(self, wheel, folder, here):
        self.folder, self.here = folder, here
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        subprocess.run([*install, "--no-deps", "--no-compile", "--target", folder, wheel], check=True)
        (folder / "pyproject.toml").write_text('[project]\nname = "another-package"\n')  # as some packages leave there
        self.environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment |= {"STEPS_ENGINE": "cpu"}
        self.environment.pop("STEPS_MY", None)
        if shutil.which("git"):  # Packages may lie in somebody's repository, whose commits are not the course's.
            git = f"git -C {folder.parent} -c user.name=a -c user.email=a -c commit.gpgsign=false"
            for words in ("init --quiet", "commit --quiet --allow-empty --message theirs"):
                subprocess.run(f"{git} {words}".split(), check=True)

    def files(self):
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}

    def start(self, *command, **how):
        how |= dict(cwd=self.here, env=self.environment, capture_output=True, text=True)
        return subprocess.run(command, **how)

    def run(self, *commands):
        """{command: what it printed and how it ended} of commands of `python -m steps`, and facts about the package."""
        done = self.start(sys.executable, "-P", "-c", RUN, input=json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return json.loads((self.here / "report.json").read_text())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    pytest.importorskip("pip")
    return Installed(wheel, tmp_path_factory.mktemp("environment") / "packages", tmp_path_factory.mktemp("empty"))


def test_the_wheel_has_every_file_of_the_course(wheel):
    listed = subprocess.run(["git", "ls-files", "steps", "reference"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("git does not say which files there are")
    missing = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    missing -= set(zipfile.ZipFile(wheel).namelist())
    assert not missing


def test_what_an_index_of_packages_shows(wheel):
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        head, _, page = files.read(name).decode().partition("\n\n")
    lines = head.splitlines()
    assert f"Author: {PROJECT['authors'][0]['name']}" in lines and "Description-Content-Type: text/markdown" in lines
    assert f"License-Expression: {PROJECT['license']}" in lines and "Keywords: FlashAttention" in head
    for minor in ("11", "12", "13"):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}" in lines
    assert page.startswith("# FlashAttention, step by step") and "](" not in page, "a link that leads nowhere there"


ONE_LINE = {  # commands that end with an error, and a part of their line
    "grade .": "grade, which runs the tests of a stage, needs a clone of the course.",
    "bench": "bench needs a GPU",
}


def test_every_command_works_or_says_in_a_line_why_not(installed):
    (installed.here / "mine.py").write_text(MINE)
    (installed.here / "my").mkdir()
    (installed.here / "my" / "00_1_softmax.py").write_text(f"import torch\n\n{solution('00.1')}")
    before = installed.files()
    judge = "verify mine.py:attention --head-dim 32 --tile 16 --without gqa,empty,strides,offset,large-scores,backward"
    checks = "check 00.2", "check 00.2 "  # the second finds what the first has written
    works = *checks, "hint 00.2", "hint 02.bug1 --code", "solution 00.2", "engine"
    works += "check 00.1", "bench fwd_3_tiled", judge
    found = installed.run(*works, *ONE_LINE)
    assert Path(found["file"]).is_relative_to(installed.folder) and not found["clone"] and found["commit"] is None
    for command in works:
        assert found[command]["code"] == 0, (command, found[command])
    for command, says in ONE_LINE.items():
        text = found[command]["text"]
        assert found[command]["code"] == 1 and text.startswith(says) and text.count("\n") == 1, found[command]
    assert "properties hold" in found[judge]["text"]
    for command in checks:
        label = found[command]["text"].partition("still to be written: ")[2].splitlines()[0]
        assert label == "my/00_2_online_update.py" and (installed.here / label).exists()
    judged = found["check 00.1"]["text"]  # in a process of its own, which has to find the package
    assert ": passed\n" in judged and "A clone of the course runs all of them." in judged
    told = found["bench"]["text"].partition("Rows are in ")[2].strip().removesuffix(".")
    assert Path(told).is_relative_to(installed.folder) and list(Path(told).glob("*.jsonl"))
    assert installed.files() == before, "something was written beside the installed packages"


def test_the_console_command_has_its_own_name(installed):
    """verify's own process, too."""
    done = installed.start(sys.executable, installed.folder / "bin" / "flash-steps", "verify", "--help")
    assert done.stdout.startswith("Usage: flash-steps verify [OPTIONS]"), done.stderr


@pytest.mark.long
def test_the_long_commands_work_too(installed):
    files = {"01": "fwd_2_registers", "02": "fwd_5_fa2", "03": "fwd_0_fused"}
    able = [f"bench {file}" for number, file in files.items() if not catalogue.unavailable(number)]
    commands = "demo", "demo --stage 00", "mutants --stage 00", *able
    found = installed.run(*commands)
    for command in commands:
        assert found[command]["code"] == 0, found[command]
    assert "agrees" in found["demo --stage 00"]["text"] and "make" not in found["demo --stage 00"]["text"]
    modules = "bench.report", "figures.plots", "demo.readme", "workbook.solutions"
    for words in (*modules, "bench ring --record", "demo.training --draw"):  # what writes pages, pictures and rows
        done = installed.start(sys.executable, "-P", "-m", *f"steps.{words}".split())
        assert done.returncode == 1 and "needs a clone of the course." in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert not (installed.folder / "my").exists()
