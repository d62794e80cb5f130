"""Who may import whom: what makes a stage readable alone and a kernel file liftable."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = sorted(path.parent for path in (ROOT / "steps").glob("step0*/__init__.py"))
# The parts of a stage that tie it to the course: entry points, process launching and the command line. All else can be lifted.
TIES = {"__init__.py", "sdpa.py", "entry.py", "launch.py", "demo.py"}


def imported(path):
    """The modules that a file imports, relative ones resolved, wherever in the file the import stands."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def python_files(folder):
    return sorted(folder.rglob("*.py"))


def test_the_reference_imports_nothing_of_the_stages():
    for path in python_files(ROOT / "reference"):
        if path.name != "gpu_check.py":  # names the stages' tests, imports none of them
            assert not [m for m in imported(path) if m.split(".")[0] == "steps"], path


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_no_stage_imports_another(stage):
    for path in python_files(stage):
        others = {m for m in imported(path) if m.startswith("steps.step") and not m.startswith(f"steps.{stage.name}")}
        if stage.name == "step04_ring":  # its default block, and the demo's on a CPU
            others -= {m for m in others if m.startswith("steps.step03_triton")}
            others = set() if path.name == "demo.py" else others
        assert not others, path


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_kernel_files_import_nothing_of_the_course(stage):
    for path in python_files(stage):
        if path.name not in TIES:
            own = f"steps.{stage.name}"
            foreign = [m for m in imported(path) if m.split(".")[0] in ("steps", "reference") and not m.startswith(own)]
            foreign = [m for m in foreign if not (stage.name == "step04_ring" and m.startswith("steps.step03_triton"))]
            assert not foreign, path


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_a_stage_opens_with_its_story(stage):
    init = (stage / "__init__.py").read_text()
    assert len(init.splitlines()) <= 40
    assert "Notebook" in ast.get_docstring(ast.parse(init))
    for path in stage.rglob("*"):
        if path.suffix in (".py", ".cu", ".cuh", ".h") and path.name not in TIES and "build" not in path.parts:
            assert "SPDX-License-Identifier: MIT" in path.read_text().splitlines()[0], path


def symbols():
    """(stage, name) for every name in backquotes in the columns 00 ... 04 of reference/symbols.md."""
    for line in (ROOT / "reference" / "symbols.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 9 and cells[4] not in ("00", "---"):
            for stage, cell in zip(STAGES, cells[4:], strict=True):
                yield from ((stage, name) for quoted in re.findall(r"`([^`]+)`", cell) for name in quoted.split(", "))


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_the_names_in_the_table_of_symbols_exist_in_the_code(stage):
    names = {name for at, name in symbols() if at == stage}
    files = [ROOT / "steps" / "contract.py"]  # the entry points of all stages
    files += [path for path in stage.rglob("*") if path.suffix in (".py", ".cu", ".cuh") and "emulator" not in path.parts]
    code = "\n".join(path.read_text() for path in files)
    identifiers = set(re.findall(r"\w+", re.sub(r'""".*?"""|(?://|#).*?$', "", code, flags=re.S | re.M)))
    assert len(names) >= 15
    assert names - identifiers == set()
