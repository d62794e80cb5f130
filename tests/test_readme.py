"""README and the other pages are right: the generated parts, the links, the commands, the names of files."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from reference import mutants
from steps import __main__, catalogue
from steps.course.bench import report, rows
from steps.course.figures import plots
from steps.course.workbook import exercises
from support.headings import sections

ROOT = Path(__file__).parents[1]
PAGES = [page for folder in (".", "notebooks", "papers", "reference") for page in sorted(ROOT.glob(f"{folder}/*.md"))]
PAGES += sorted(ROOT.glob("steps/**/*.md"))
README, RESULTS = ((ROOT / page).read_text() for page in report.PAGES)
STAGES = "".join(page.read_text() for page in sorted(ROOT.glob("steps/step0*/README.md")))
TEXT = "".join(page.read_text() for page in PAGES if page.parent.name != "papers")

NO_TRITON = any(catalogue.unavailable(number) for number in ("03", "04"))


@pytest.mark.skipif(NO_TRITON, reason="the table is made from all five stages")
def test_the_tables_of_stages_and_rungs_are_what_the_stages_say():
    from steps.course.demo import readme

    for page in readme.TABLES:
        assert readme.render(page) == (ROOT / page).read_text(), page
    for number in catalogue.STAGES:
        for name in catalogue.stage(number).SUPPORTS["notebooks"]:
            assert (ROOT / "notebooks" / f"{name}.ipynb").exists()


@pytest.mark.skipif(NO_TRITON, reason="the answers are those of all five stages")
def test_the_page_of_solutions_is_what_the_exercises_and_the_stages_say():
    from steps.course.workbook import solutions

    page = solutions.PAGE.read_text()
    assert page == solutions.page(), "run python -m steps.course.workbook.solutions"
    assert re.findall(r"<summary><b>(\S+)</b>", page) == list(exercises.load())


@pytest.mark.skipif(NO_TRITON, reason="the picture is drawn with all five stages")
def test_a_tiles_number_is_light_on_a_dark_tile_and_dark_on_a_light_one():
    from steps.course.demo import readme

    figure, axis = plt.subplots()
    weights = torch.ones(readme.N, readme.N)  # drawn in black
    weights[readme.TILE :] = 0
    axis.imshow(weights.numpy(), cmap="Greys", vmin=0, vmax=1, extent=(0, readme.N, readme.N, 0))
    for i, colour in ((0, "tab:blue"), (1, "tab:blue"), (2, "black"), (3, "yellow")):
        readme.square(axis, i, 0, colour, i)
    plt.close(figure)
    assert [text.get_color() for text in axis.texts] == ["white", plots.INK, "white", plots.INK]


def test_the_tables_of_results_are_what_the_rows_say():
    assert report.pages() == dict(zip(report.PAGES, (README, RESULTS), strict=True)), "run make report"


def test_the_pictures_of_the_rungs_are_what_the_rows_say_and_stand_on_the_pages():
    plots.main(check=True)
    assert f"]({plots.PICTURES['02_fa2_cuda']})" in README and f"/{plots.PICTURES['03_triton']})" in RESULTS


def test_readme_is_short_and_what_is_not_for_everybody_is_on_another_page():
    assert len(README.split()) <= 1300 and "<!-- results" not in README
    shown = [part.count("<!-- results:") for part in RESULTS.split("\n## ")]
    assert shown == [0, 2, 4, 3, 3, 4, 2, 0, 0, 0], "stage 02, stage 03, sustained load, H100, ring, float32"


def test_no_page_is_without_a_link_that_leads_to_it():
    """From README on, by links."""
    found, seen = [ROOT / "README.md"], set()
    while found:
        if (page := found.pop().resolve()) not in seen and page.suffix == ".md":
            seen.add(page)
            links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
            found += [target for link in links if (target := page.parent / link).exists()]
    machines = set(ROOT.glob("steps/course/bench/results/*.checks.md"))
    assert set(PAGES) - machines <= seen


def test_what_readme_shows_of_commands_is_what_they_print():
    blocks = re.findall(r"^\$ ([^#\n]+).*\n((?:(?!\$|```).*\n)*)", README, re.M)
    shown = {command.strip(): text for command, text in blocks}
    line = next(command for command in shown if command.startswith("python3 steps/puzzle.py"))
    printed = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True).stdout
    assert shown[line] == printed
    demo = shown["make demo"]
    assert demo.startswith("engine cpu: ") and demo.splitlines()[2:6] == textwrap.wrap(__main__.DOES, 80)
    head = re.search("^ stage .*", demo, re.M)[0].split()
    assert head == [str(column.header) for column in __main__.results([]).columns]
    wrong = shown["python -m steps check 00.2"]
    task = exercises.find("00.2")
    assert wrong.startswith(f"00.2 {task.title}: WRONG\n")
    assert any(f"This equals what you get when {mutant.says}.\n" in wrong for mutant in mutants.MUTANTS)


def test_the_table_of_rungs_under_readmes_picture_has_its_numbers():
    numbers = plots.numbers_in(ROOT / plots.PICTURES["02_fa2_cuda"])
    table = re.search(r"<!-- speeds -->\n(.*?)<!-- /speeds -->", README, re.S)[1]
    lines = re.findall(r"^\|\[(\w+)\].*?\|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$", table, re.M)
    files = sorted((ROOT / "steps/step02_fa2_cuda").glob("?wd_*.cu"), key=lambda path: (path.stem[0] == "b", path.stem))
    assert [stem for stem, *_ in lines] == [path.stem for path in files]
    drawn = [(rung, numbers[pass_]["peers"]) for pass_ in ("fwd", "bwd") for rung in numbers[pass_]["rungs"]]
    fresh = rows.fresh(rows.read())
    beside_fa4 = {one["run"] for one in fresh if one["peer"] == "fa4"}
    run_of = {stem: one["run"] for found in plots.ladder_rows(fresh)[1].values() for stem, one in found.items()}
    for (stem, idea, tflops, *shares), ((_, speed, differs), peers) in zip(lines, drawn, strict=True):
        assert tflops == f"{speed:.3g}" and idea.endswith(", ".join(differs.split()))
        assert (shares[1] == "–") == (run_of[stem] not in beside_fa4)
        if run_of[stem] in beside_fa4:
            assert shares == [f"{speed / peers[peer]:.0%}" for peer in ("sdpa-cudnn", "fa4")]
    assert f"FlashAttention-3 {numbers['fwd']['peers']['fa3']:.3g}." in table
    assert f"N = {plots.LADDER['N']} tokens, D = {plots.LADDER['D']}, bfloat16, no mask" in " ".join(README.split())
    assert not plots.LADDER["causal"] and plots.LADDER["dtype"] == "bf16"


def test_flash_attention_3_and_4_stand_only_in_tables_of_one_run():
    for marker, table in re.findall(r"<!-- results:(.*?)-->(.*?)<!-- /results -->", README + RESULTS, re.S):
        assert not re.search(r"\| fa[34] \|", table) or "run=" in marker


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, part in re.findall(r"\]\(([^)#]+?)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
            assert not part or part in sections(page.parent / target), f"{target} has no part {part}"


def test_files_named_in_backticks_exist():
    names = re.findall(r"`((?:step0\d_\w+/)?(?:fwd|bwd)_\d_\w+\.(?:py|cu))`", TEXT)
    assert len(names) >= 16 and all(list((ROOT / "steps").rglob(name)) for name in names)


def test_examples_use_what_they_import():
    examples = list(map(ast.parse, re.findall(r"```python\n(.*?)```", README + STAGES, re.S)))
    assert len(examples) >= 4
    for nodes in map(list, map(ast.walk, examples)):
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert imported <= {node.id for node in nodes if isinstance(node, ast.Name)}


def test_commands_are_those_of_the_makefile_and_the_command_line():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^\$? ?|`)make ([a-z-]+)", TEXT, re.M)) <= targets
    commands = {c.name or c.callback.__name__ for c in __main__.app.registered_commands}
    assert set(re.findall(r"python -m steps (\w+)", TEXT)) <= commands
    from steps.course.bench.__main__ import PLANS

    names = re.search(r"steps.course.bench (\w+) --record` \(then ([\w,\s]+)\)", RESULTS)
    assert {names[1], *re.split(r",\s", names[2])} == {name for name in PLANS if "-" not in name}
    modules = re.findall(r"python -m ((?:reference|steps|tests)\.[\w.]*\w)", TEXT)
    assert all(importlib.util.find_spec(name) for name in modules)


def test_the_environment_is_activated_before_the_first_python():
    """Debian has no `python`, and `make` leaves the environment that it has made inactive."""
    activated = README.index("source .venv/bin/activate")
    assert activated < README.index("python -m") and README.count("source .venv/bin/activate") == 1


@pytest.mark.skipif(not (shutil.which("gdb") and shutil.which("g++")), reason="needs gdb and g++")
def test_the_debugger_stops_in_a_kernel_as_its_page_shows():
    page = (ROOT / "steps/step02_fa2_cuda/debugging.md").read_text()
    block = re.search(r"```\n( *STEPS_ENGINE=cpu gdb .*?) *```", page, re.S)[1]
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    options = dict(shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    keys = "next\nnext\nprint m_new\nup\ninfo locals\nkill\nquit\n"
    done = subprocess.run(textwrap.dedent(block), input=keys, **options)
    if "ptrace: Operation not permitted" in done.stderr:
        pytest.skip("this machine lets no debugger run")
    assert "Breakpoint 1, online_update" in done.stdout, done.stdout + done.stderr
    shown = re.search(r"shows this row's maximum, and `up`, `info locals` the thread: (.*)\.", page)[1]
    assert float(re.search(r"\$1 = (\S+)", done.stdout)[1]) > 0  # m_new
    for fact in re.findall(r"`(.+?)`", shown):
        assert f"\n{fact}\n" in done.stdout, fact
