"""Who may import whom: what keeps a stage readable by itself and its kernel files usable without the course."""

import ast
import functools
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = sorted(path.parent for path in (ROOT / "steps").glob("step0*/__init__.py"))
# The files that tie a stage to the course: its entry points, and what starts processes or is a command. The others can
# be lifted out.
TIES = {
    "step00_naive": {"__init__.py"},
    "step01_fa1_numba": {"__init__.py"},
    "step02_fa2_cuda": {"__init__.py", "cached.py"},
    "step03_triton": {"__init__.py", "cached.py", "functions.py", "options.py"},
    "step04_ring": {
        "__init__.py", "entry.py", "autograd.py", "block.py", "launch.py", "demo.py", "one_device.py",
        "in_your_model.py",
    },  # fmt: skip
}
# What each part of steps/ may import of the others. `stages` stands for all five, none of which imports another, except
# as OTHER_STAGES says.
BELOW = {
    "engine": set(),
    "places": set(),
    "puzzle": set(),
    "operators": {"checks"},
    "cached": set(),
    "checks": set(),
    "contract": {"cached", "checks", "engine", "operators"},
    "stages": {"cached", "checks", "contract", "engine"},
    "catalogue": {"engine", "stages"},
    "workbook": {"places", "checks", "contract", "engine", "stages", "catalogue"},  # also steps/course/workbook.py
    "bench": {"places", "checks", "contract", "engine", "stages", "catalogue"},
    "figures": {"places", "cached", "checks", "contract", "engine", "stages", "catalogue", "bench", "workbook"},
    "demo": {"places", "contract", "engine", "stages", "catalogue", "bench", "figures"},
    "verify": {"engine", "workbook", "bench"},
    "hub": {"places", "bench"},
    "__main__": {"places", "contract", "engine", "stages", "catalogue", "workbook", "bench", "demo", "verify"},
}
COURSE = "workbook", "bench", "figures", "demo", "verify", "hub"
OTHER_STAGES = {
    "steps.step04_ring.block": {"step02_fa2_cuda", "step03_triton"},  # the default block, on Hopper and elsewhere
    "steps.step04_ring.strategies.team": {"step03_triton"},  # the block for packed sequences
    "steps.step04_ring.demo": {"step00_naive", "step03_triton"},  # the block of the demo, without and with a GPU
}
# Names that two modules may share, because they mean the same in both.
SHARED_NAMES = {
    "cached": "what finds the plan of a call again: the file, and its stand-ins where stages are copied out",
    "demo": "shows what it stands beside, the course or the ring, on one input",
    "options": "what a call may ask for beside q, k and v: its definition, and its checks",
    "plan": "what a call does, decided once for its shapes and options",
    "ring": "stage 04's loop, and what measures it",
    "verdict": "what is wrong, and whose fault it is: of a function, and of ranks that wait",
    "workbook": "the exercises, and the place from which sheets of an earlier version import them",
}


def python_files(folder):
    return sorted(folder.rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for folder in ("steps", "reference") for path in python_files(ROOT / folder)}


def imported(path):
    """The modules of the course that a file imports, wherever in the file the import stands."""
    package = list(path.relative_to(ROOT).parts[:-1])
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
    found = set()
    for name in names:
        while name and name not in MODULES:  # The end of the name is an attribute of the module.
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found - {module_name(path)}


@functools.cache
def imports():
    """{module: the modules of the course that it imports}"""
    return {name: imported(path) for name, path in MODULES.items()}


def part(module):
    """The part of steps/ that a module belongs to, as BELOW names it; None for `steps` itself and for the reference."""
    words = module.split(".")
    if words[0] != "steps" or len(words) == 1:
        return None
    if words[1] == "course":
        return words[2] if len(words) > 2 else None
    return "stages" if words[1].startswith("step0") else words[1]


def test_the_reference_imports_nothing_of_steps():
    for module, others in imports().items():
        if module.split(".")[0] == "reference":
            assert not [other for other in others if other.split(".")[0] == "steps"], module


def test_the_parts_of_steps_import_downwards_only():
    for module, others in imports().items():
        above = part(module)
        if above is not None:
            below = {part(other) for other in others} - {None, above}
            assert below <= BELOW[above], module


def test_no_stage_imports_the_reference():
    for module, others in imports().items():
        if part(module) == "stages":
            assert not [other for other in others if other.split(".")[0] == "reference"], module


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_no_stage_imports_another(stage):
    for path in python_files(stage):
        module = module_name(path)
        others = {other.split(".")[1] for other in imports()[module] if part(other) == "stages"} - {stage.name}
        assert others <= OTHER_STAGES.get(module, set()), path


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_kernel_files_import_nothing_of_the_course(stage):
    for path in python_files(stage):
        if path.name not in TIES[stage.name]:
            module = module_name(path)
            foreign = [other for other in imports()[module] if not other.startswith(f"steps.{stage.name}")]
            foreign = [other for other in foreign if other.split(".")[1] not in OTHER_STAGES.get(module, set())]
            assert not foreign, path


def test_the_message_of_a_check_stands_once():
    """In checks.py, or where only one stage needs it. The rungs of stage 01 are near-copies by intention."""
    found = defaultdict(set)
    for name, path in MODULES.items():
        if part(name) in (None, *COURSE) or re.match(r"(fwd|bwd)_\d", path.name):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " must be " in node.value:
                for words in re.findall(r"must be [^.;{]{12,}", node.value):
                    found[words.strip()].add(name)
    assert len(found) > 30 and not {words: names for words, names in found.items() if len(names) > 1}


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside of functions count, too: a circle that only they hide is still one for a reader."""
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as e:
        pytest.fail(" <- ".join(e.args[1]))


def test_no_two_modules_share_a_name():
    paths = defaultdict(list)
    for module in MODULES:
        paths[module.split(".")[-1]].append(module)
    shared = {name for name, modules in paths.items() if len(modules) > 1}
    assert shared - {"__main__"} == SHARED_NAMES.keys(), {name: paths[name] for name in shared ^ SHARED_NAMES.keys()}


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_a_stage_opens_with_its_story(stage):
    init = (stage / "__init__.py").read_text()
    assert len(init.splitlines()) <= 40
    assert "Notebook" in ast.get_docstring(ast.parse(init))
    for path in stage.rglob("*"):
        lifts = path.suffix in (".py", ".cu", ".cuh", ".h") and path.name not in TIES[stage.name]
        if lifts and "build" not in path.parts:
            assert "SPDX-License-Identifier: MIT" in path.read_text().splitlines()[0], path


def test_lines_of_kernels_fit_beside_each_other():
    """Two kernel files can be read side by side. ruff looks at the lines of Python files."""
    for path in (ROOT / "steps").rglob("*"):
        if path.suffix in (".cu", ".cuh", ".h", ".cpp"):
            long = [line for line in path.read_text().splitlines() if len(line) > 110]
            assert not long, (path, long)


def symbols():
    """(stage, name) for every name in backquotes in the columns 00 ... 04 of reference/symbols.md."""
    for line in (ROOT / "reference" / "symbols.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 9 and cells[4] not in ("00", "---"):
            for stage, cell in zip(STAGES, cells[4:], strict=True):
                for quoted in re.findall(r"`([^`]+)`", cell):
                    yield from ((stage, name) for name in quoted.split(", "))


@pytest.mark.parametrize("stage", STAGES, ids=lambda p: p.name)
def test_the_names_in_the_table_of_symbols_exist_in_the_code(stage):
    names = {name for at, name in symbols() if at == stage}
    files = [ROOT / "steps" / "contract.py"]  # It has the entry points of all stages.
    files += [path for path in stage.rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    text = "\n".join(path.read_text() for path in files if "emulator" not in path.parts)
    without_comments = re.sub(r'""".*?"""|(?://|#).*?$', "", text, flags=re.S | re.M)
    identifiers = set(re.findall(r"\w+", without_comments))
    assert len(names) >= 15
    assert names - identifiers == set()
