"""README and the other pages say what is so: the generated parts, the links, the commands, the names."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from reference.bench import report
from steps import compare

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "papers").glob("*.md")), *sorted((ROOT / "reference").glob("*.md"))]
README = (ROOT / "README.md").read_text()


@pytest.mark.skipif(any(compare.unavailable(n) for n in ("03", "04")), reason="the table is made from all five stages")
def test_the_table_of_stages_is_what_the_stages_say():
    from steps import readme

    assert readme.render(README) == README
    for number in compare.STAGES:
        for name in compare.stage(number).SUPPORTS["notebooks"]:
            assert (ROOT / "notebooks" / f"{name}.ipynb").exists()


def test_the_tables_of_results_are_what_the_rows_say():
    assert report.main(["--check"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_files_named_in_backticks_exist():
    names = re.findall(r"`((?:step0\d_\w+/)?(?:fwd|bwd)_\d_\w+\.(?:py|cu))`", README)
    assert len(names) >= 6 and all(list((ROOT / "steps").rglob(name)) for name in names)


def test_commands_are_those_of_the_makefile_and_the_command_line():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)) <= targets
    from steps.__main__ import app

    commands = {c.name or c.callback.__name__ for c in app.registered_commands}
    assert set(re.findall(r"python -m steps (\w+)", README)) <= commands
    from reference.bench.plans import PLANS

    names = re.search(r"--plan (\w+) --record` \(then ([\w, ]+)\)", README)
    assert {names[1], *names[2].split(", ")} == set(PLANS)
    assert all(importlib.util.find_spec(name) for name in re.findall(r"python -m ((?:reference|steps)\.[\w.]*\w)", README))


@pytest.mark.skipif(not (shutil.which("gdb") and shutil.which("g++")), reason="needs gdb and g++")
def test_the_debugger_stops_in_a_kernel_as_readme_shows():
    block = re.search(r"```\n( *STEPS_ENGINE=cpu gdb .*?) *```", README, re.S)[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    keys = "next\nnext\nprint m_new\nup\ninfo locals\nkill\nquit\n"
    command = textwrap.dedent(block)
    done = subprocess.run(
        command, shell=True, input=keys, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300
    )
    if "ptrace: Operation not permitted" in done.stderr:
        pytest.skip("this machine lets no debugger run")
    assert "hit Breakpoint 1, online_update" in done.stdout, done.stdout + done.stderr
    shown = re.search(r"shows this row's maximum, and `up`, `info locals` the thread: (.*)\.", README)[1]
    assert float(re.search(r"\$1 = (\S+)", done.stdout)[1]) > 0  # m_new
    for fact in re.findall(r"`(.+?)`", shown):
        assert f"\n{fact}\n" in done.stdout, fact
