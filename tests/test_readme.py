"""README and the other pages say what is so: the generated parts, the links, the commands, the names."""

import re
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
