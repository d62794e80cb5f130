"""The pinned versions agree with each other and with what is installed, and `make` sets up what it says.

`make` runs in a folder of its own with stand-ins for Python, so that these tests download and install nothing.
"""

import datetime
import functools
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from shlex import quote
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import conftest

ROOT = Path(__file__).resolve().parent.parent
# Set by the Makefile: "venv" (made by it) or "none" (nothing was installed).
STEPS_ENV = os.environ.get("STEPS_ENV") or ("venv" if Path(sys.prefix) == ROOT / ".venv" else "none")

LINES = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
PINS = {pin.name: pin for pin in map(Requirement, LINES)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RANGES = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}


def applies(requirement, extra=""):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def pinned_version(pin):
    return str(pin.specifier).removeprefix("==")


# The files among themselves


def test_every_pin_is_exact():
    assert [name for name, pin in PINS.items() if not str(pin.specifier).startswith("==")] == ["cuda-toolkit"]
    assert len(PINS) == len(LINES)


def test_conda_environment_repeats_the_pins():
    yaml = pytest.importorskip("yaml")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    python, pip, from_pip = environment["dependencies"]
    assert from_pip == {"pip": LINES}
    assert pip == "pip"
    assert python.removeprefix("python=") in SpecifierSet(PROJECT["requires-python"])


def test_the_citation_is_of_this_version():
    cff = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text())
    # What the format's version 1.2.0 requires, and of the rest only keys that it knows.
    required = {"cff-version", "message", "title", "authors"}
    assert required <= cff.keys() <= required | {"abstract", "date-released", "keywords", "license", "type", "version"}
    assert (cff["cff-version"], cff["type"]) == ("1.2.0", "software")
    assert cff["authors"] and all(author.keys() == {"name"} for author in cff["authors"])
    assert (cff["version"], cff["license"]) == (PROJECT["version"], PROJECT["license"])
    assert (cff["authors"], cff["keywords"]) == (PROJECT["authors"], PROJECT["keywords"])
    assert isinstance(cff["date-released"], datetime.date)
    assert (ROOT / "README.md").read_text().startswith(f"# {cff['title']}\n")
    newest = re.search(r"^## (.+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest.groups() == (PROJECT["version"], str(cff["date-released"]))


def test_issue_forms_are_as_github_reads_them():
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert {form.stem for form in forms} == {"config", "fault", "rows", "erratum"}
    for form in forms:
        read = yaml.safe_load(form.read_text())
        if form.stem == "config":
            continue
        assert {"name", "description", "body"} <= read.keys() <= {"name", "description", "body", "labels", "title"}
        fields = [field for field in read["body"] if field["type"] != "markdown"]
        assert {field["type"] for field in fields} <= {"input", "textarea"} and len(fields) >= 2
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)
    assert "python -m steps engine" in (ROOT / ".github/ISSUE_TEMPLATE/fault.yml").read_text()


def test_ranges_admit_the_pins():
    outside = [
        f"{RANGES[name]} does not admit {pin}"
        for name, pin in PINS.items()
        if name in RANGES and pin.specifier and pinned_version(pin) not in RANGES[name].specifier
    ]
    assert not outside
    assert RANGES.keys() - PINS.keys() == {"cuda-core"}, "it is not pinned by name, as it comes with cuda-python"
    extras = {name: [*map(Requirement, needed)] for name, needed in PROJECT["optional-dependencies"].items()}
    assert PINS["numba-cuda"].extras == extras["cu13"][0].extras == {"cu13"}
    assert pinned_version(PINS["numba-cuda"]) in extras["cu13"][0].specifier & extras["cu12"][0].specifier


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_clone_has_the_same_bytes_where_git_would_write_crlf(tmp_path):
    """As Git for Windows does by default."""
    files = "Makefile", ".ci/run", ".gitattributes", "steps/course/demo/readme.txt", "notebooks/figures/ladder.png"
    source = tmp_path / "source"
    for file in files:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    git = "git -c core.autocrlf=true -c user.name=a -c user.email=a -c commit.gpgsign=false"
    for words in ("init --quiet", "add --all", "commit --quiet --message all", "clone --quiet . ../clone"):
        subprocess.run(f"{git} {words}".split(), cwd=source, check=True, capture_output=True)
    assert all((tmp_path / "clone" / file).read_bytes() == (ROOT / file).read_bytes() for file in files)


# What is installed


def installed_outside(requirements):
    installed = {name: metadata.version(name) for name, needed in requirements.items() if applies(needed)}
    return {name: version for name, version in installed.items() if version not in requirements[name].specifier}


set_up_here = pytest.mark.skipif(STEPS_ENV == "none", reason="this interpreter was not set up by make")


@set_up_here
def test_installed_versions_are_the_pins():
    assert not installed_outside(PINS)


@set_up_here
def test_extras_are_installed():  # `pip check` does not look at extras.
    for name, pin in PINS.items():
        if applies(pin):
            for needed in map(Requirement, metadata.requires(name) or []):
                if any(applies(needed, extra) for extra in pin.extras):
                    assert metadata.version(needed.name) in needed.specifier


@set_up_here
def test_installed_versions_fit_the_ranges():
    assert not installed_outside(RANGES)


@set_up_here
def test_pip_check_is_clean():
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout


@set_up_here
def test_course_is_installed_editable():
    code = "from importlib.util import find_spec as f; print(f('steps').origin, f('reference').origin)"
    elsewhere = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert elsewhere.stdout.split() == [str(ROOT / name / "__init__.py") for name in ("steps", "reference")]


# What make does


class Course:
    """The files that set-up reads, in a folder of their own, and a PATH whose python3 is a stand-in."""

    def __init__(self, folder, name="course"):
        self.folder = folder / name
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.folder.mkdir()
        self.bin.mkdir()
        for name in ("Makefile", "requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        for name in ("sh", "awk", "cat", "cp", "mkdir"):
            (self.bin / name).symlink_to(shutil.which(name))

    def python(self, path, pretend=""):
        """Makes a stand-in for Python that runs `-c CODE` after the code PRETEND, and logs all other calls."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"""#!/bin/sh
            [ "$1" = -c ] && exec {quote(sys.executable)} -IS -c '{pretend}\n'"$2"
            [ "$1" = --version ] && exec echo Python of a test
            echo "$@" >> {quote(str(self.log))}
            case "$*" in
              "-m jupyterlab"*) echo "JUPYTER_CONFIG_PATH=$JUPYTER_CONFIG_PATH" >> {quote(str(self.log))};;
              "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
            esac
            """
        )
        path.chmod(0o755)

    def activated(self, environment):
        """What a shell has in which this environment is active."""
        return {"VIRTUAL_ENV": str(environment), "PATH": f"{environment / 'bin'}{os.pathsep}{self.bin}"}

    def make(self, *arguments, **environment):
        """(make's process, the log of its Pythons) after a run of make without our own environment."""
        self.log.write_text("")
        environment = {"PATH": str(self.bin), "LC_ALL": "C", **environment}
        command = [shutil.which("make"), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        return done, self.log.read_text()


@pytest.fixture
def course(tmp_path):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    return Course(tmp_path)


OLD = 'import sys; sys.version_info = (3, 10, 12, "final", 0)'
NEW = 'import sys; sys.version_info = (3, 14, 0, "final", 0)'
NO_VENV = 'import sys; sys.modules["ensurepip"] = None'
NO_PYTHON = None


@pytest.mark.parametrize("pretend", [OLD, NEW, NO_VENV, NO_PYTHON], ids=["old", "new", "no venv", "missing"])
def test_unusable_python_ends_with_one_line(course, pretend):
    if pretend is not NO_PYTHON:
        course.python(course.bin / "python3", pretend)
    done, log = course.make("demo")
    assert done.returncode != 0
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert ("python3-venv" if pretend is NO_VENV else "python3.12-venv") in done.stderr
    assert log == ""


def test_environment_is_made_once(course):
    course.python(course.bin / "python3")
    done, log = course.make("demo", "ARGS=--stage 03")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("source .venv/bin/activate\n")
    assert log.startswith("-m venv .venv\n") and "-r requirements.txt\n" in log
    assert all("--quiet" in line for line in log.splitlines() if line.startswith("-m pip install"))
    assert "--editable .\n" in log
    assert log.endswith("-m steps demo --stage 03\n")

    assert course.make("demo")[1] == "-m steps demo\n"
    # The same holds when the reader has activated it.
    assert course.make("demo", **course.activated(course.folder / ".venv"))[1] == "-m steps demo\n"

    course.folder = course.folder.rename(course.folder.parent / "moved")
    assert "--editable .\n" in course.make("demo")[1]
    assert course.make("demo")[1] == "-m steps demo\n"

    os.utime(course.folder / "requirements.txt", (time.time() + 10,) * 2)
    assert "-r requirements.txt\n" in course.make("demo")[1]


def test_an_active_environment_stays_as_it_is_and_is_used_where_that_is_asked_for(course, tmp_path):
    mine, ours = tmp_path / "mine/bin/python3", course.folder / ".venv/bin/python"
    course.python(mine)
    environment = course.activated(tmp_path / "mine")
    done, log = course.make("lint", **environment)
    assert done.returncode == 0, done.stderr
    assert log.startswith("-m venv .venv\n") and log.endswith("-m ruff check\n")
    away = mine.rename(tmp_path / "away")
    assert course.make("lint", **environment)[1] == "-m ruff check\n", "our Python was not used"
    away.rename(mine)
    ours.unlink()
    assert course.make("lint", "ENV=none", **environment)[1] == "-m ruff check\n"
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [mine]


ODD = ["two words", "O'Brien", "50%, #1 (old) & new"]


@pytest.mark.parametrize("name", ODD)
def test_any_path_of_the_clone_and_of_python(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    course = Course(folder, name)
    course.python(course.folder / "bin/python")
    for arguments in ((), (f"PYTHON={course.folder / 'bin/python'}",)):
        course.python(course.bin / "python3")
        shutil.rmtree(course.folder / ".venv", ignore_errors=True)
        done, log = course.make("demo", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "--editable .\n" in log
        assert course.make("demo", *arguments)[1] == "-m steps demo\n", "set up a second time"
    _, log = course.make("demo", f"PYTHON={folder / name / 'bin/python'}", "ENV=none")
    assert log == "-m steps demo\n"


@pytest.mark.parametrize("target, more", [("test", ""), ("test-all", " --long")])
def test_interpreter_as_it_is(course, target, more):
    course.python(course.bin / "python3", OLD)
    done, log = course.make(target, "ENV=none", "JOBS=3", VIRTUAL_ENV="/somewhere")
    assert log == f"-m pytest -n 3 --dist loadfile --no-loadscope-reorder{more}\n"
    assert done.stdout.endswith("python3 was used as it is: nothing was installed.\n")


@pytest.mark.parametrize("asked", [False, True])
def test_long_tests_run_only_where_they_are_asked_for(asked):
    config = SimpleNamespace(getoption=lambda name: name == "--long" and asked)
    item = SimpleNamespace(get_closest_marker=lambda name: name == "long", config=config)
    with nullcontext() if asked else pytest.raises(pytest.skip.Exception, match="make test-all"):
        conftest.pytest_runtest_setup(item)


def test_the_files_that_take_longest_come_first_and_each_stays_together():
    names = ["test_puzzle.py", "test_workbook.py", "test_of_no_budget.py", "test_notebooks.py", "test_workbook.py"]
    items = [SimpleNamespace(path=Path(name), number=n) for n, name in enumerate(names)]
    conftest.pytest_collection_modifyitems(SimpleNamespace(mine=None), items)
    assert [item.number for item in items] == [3, 1, 4, 0, 2]


def test_a_failure_reaches_the_exit_code_and_a_missing_compiler_is_said(course):
    (course.bin / "python3").symlink_to(shutil.which("false"))
    done, _ = course.make("demo", "ENV=none")
    assert done.returncode != 0 and "Install the package g++" in done.stdout
    assert done.stdout.endswith("nothing was installed.\n")
    course.python(course.bin / "g++")
    assert "g++" not in course.make("demo", "ENV=none")[0].stdout


def test_lab_never_overwrites_the_readers_notebooks(course):
    course.python(course.bin / "python3")
    (course.folder / "notebooks").mkdir()
    for name in ("00 a.ipynb", "01.ipynb"):
        (course.folder / "notebooks" / name).write_text("ours")
    course.make("lab", "ENV=none")
    (course.folder / "my/01.ipynb").write_text("the reader's")
    done, log = course.make("lab", "ENV=none")
    assert done.returncode == 0, done.stderr
    assert (course.folder / "my/00 a.ipynb").read_text() == "ours"
    assert (course.folder / "my/01.ipynb").read_text() == "the reader's"
    # The root is the course's folder: what a copy in my/ links to lies beside it.
    # Jupyter's log of some 20 lines stands in nobody's way.
    places = "--ServerApp.root_dir=. --LabApp.default_url=/lab/tree/my"
    command = f"-m jupyterlab {places} --log-level=ERROR --LabApp.log_level=ERROR\n"
    assert log == f"{command}JUPYTER_CONFIG_PATH=notebooks/lab\n"
    _, log = course.make("lab", "ENV=none", JUPYTER_CONFIG_PATH="/a b:/c")
    assert log == f"{command}JUPYTER_CONFIG_PATH=notebooks/lab:/a b:/c\n"


def test_lab_does_not_ask_about_jupyters_news(tmp_path, monkeypatch):
    """It asks where this setting is "none". This is what it serves to a browser in the environment that make gives."""
    served = pytest.importorskip("jupyterlab_server.settings_utils").get_settings
    paths = pytest.importorskip("jupyter_core.paths").jupyter_path("lab", "schemas")
    folders = {"schemas_dir": next(path for path in paths if Path(path).exists())}
    folders |= dict.fromkeys(("app_settings_dir", "settings_dir"), str(tmp_path))  # where nobody has chosen anything
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(ROOT)
    defaults = []
    for path in ("", "notebooks/lab"):
        monkeypatch.setenv("JUPYTER_CONFIG_PATH", path)
        setting, _ = served(**folders, schema_name="@jupyterlab/apputils-extension:notification")
        defaults.append(setting["schema"]["properties"]["fetchNews"])
    assert [each["default"] for each in defaults] == ["none", "false"]
    assert "false" in [each["const"] for each in defaults[0]["oneOf"]], "one of the values that this version knows"


# ---- CUDA 12 ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux")
@pytest.mark.parametrize("version", ["12.8.93", "12.9.86"])
def test_stage_02_compiles_with_cuda_12(version, tmp_path):
    """In an environment with this NVRTC and cuda-bindings 12, and with links to everything else of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    cuda = [f"nvidia-cuda-nvrtc-cu12=={version}", "cuda-bindings==12.*", "cuda-core>=1.0", "numpy<2.5"]
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *cuda]
    subprocess.run(install, check=True, capture_output=True)
    (there,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for path in Path(metadata.distribution("torch").locate_file("")).iterdir():
        other_cuda = path.name.startswith(("cuda", "nvidia", "numba_cuda", "_numba_cuda", "__editable__"))
        if not other_cuda and not (there / path.name).exists():
            (there / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "XDG_CACHE_HOME": str(tmp_path)}
    run = functools.partial(subprocess.run, env=environment, cwd=ROOT, capture_output=True, text=True)
    found = run([python, "-c", "from cuda.bindings import nvrtc; print(*nvrtc.nvrtcVersion()[1:], sep='.')"])
    assert found.stdout.strip() == version.rpartition(".")[0], found.stdout + found.stderr
    how = "-q -p no:xdist -p no:cacheprovider -m compile".split()
    done = run([python, "-m", "pytest", *how, "tests/test_step02_fa2_cuda.py"])
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
