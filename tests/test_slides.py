"""The slides of `make slides` load only files beside them. The lecture plan names sections and exercises that exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("nbconvert", reason="nbconvert is not installed")

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
needs_make = pytest.mark.skipif(not MAKE, reason="make is not installed")


def make(*arguments, cwd=ROOT, path=os.environ["PATH"]):
    """Runs `make slides` with this Python, and without the variables of our own environment that it would read."""
    command = [MAKE, *arguments, "slides", "ENV=none", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=cwd, env={"PATH": path, "LC_ALL": "C"}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The slides of notebook 00, made by the Makefile's own command."""
    printed = make("--dry-run", "--assume-old=slides/assets").stdout  # as if the assets had been fetched
    recipe = next(line for line in printed.splitlines() if "nbconvert" in line)
    command = shlex.split(recipe.split(";")[1])
    folder = tmp_path_factory.mktemp("slides")
    command[command.index("slides", command.index("--output-dir"))] = str(folder)
    command[-1] = "notebooks/00_naive.ipynb"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "00_naive.slides.html").read_text()


class Tags(HTMLParser):
    """The elements of a page; `found` has (tag, attributes) of each."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@needs_make
def test_slides_load_what_make_fetches_and_nothing_else(page):
    names = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
    loaded = {attributes.get(names[tag]) for tag, attributes in Tags(page).found if tag in names} - {None}
    loaded = {url for url in loaded if not url.startswith("data:")}
    fetched = re.search(r"^SLIDES_ASSETS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    fetched.remove("mathjax/LICENSE")  # It is there for those who pass the slides on. No page loads it.
    assert loaded == {f"assets/{file}" for file in [*fetched, "reveal.js/dist/theme/course.css"]}
    styles = page.partition("<body")[0] + (ROOT / "notebooks/slides/course.css").read_text()
    assert not re.search(r"""@import|url\(['"]?(?!data:)|\bimport\b.*\bfrom\b.*//""", styles)


@needs_make
def test_pictures_keep_their_words_and_links_lead_to_slides(page):
    tags = Tags(page).found
    pictures = [attributes["alt"] for tag, attributes in tags if tag == "img"]
    assert pictures and all(len(alt) > 40 and not alt.startswith("No description") for alt in pictures)
    links = [attributes["href"] for tag, attributes in tags if tag == "a" and "#" not in attributes["href"]]
    assert "01_fa1_numba.slides.html" in links and not [link for link in links if link.endswith(".ipynb")]


def test_packages_are_pinned():
    packages = json.loads((ROOT / "notebooks/slides/package.json").read_text())["dependencies"]
    assert packages.keys() == {"reveal.js", "mathjax"}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in packages.values())


@needs_make
def test_missing_npm_is_said_in_one_line(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "notebooks/slides").mkdir(parents=True)
    (tmp_path / "notebooks/slides/package.json").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").symlink_to(shutil.which("sh"))
    done = make(cwd=tmp_path, path=str(tmp_path / "bin"))
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Install the package npm" in done.stderr


PLAN = (ROOT / "notebooks/TEACHING.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \|", PLAN, re.M)  # (minutes, sections)


def test_both_sessions_take_90_minutes():
    sessions = re.split("^## Session", PLAN, flags=re.M)[1:]
    assert [sum(int(minutes) for minutes in re.findall(r"^\| (\d+) \|", text, re.M)) for text in sessions] == [90, 90]


@pytest.mark.parametrize("sections", [each for _, cell in ROWS for each in cell.split("<br>or ")])
def test_planned_sections_are_in_the_notebooks(sections):
    notebook, _, titles = sections.partition(": ")
    (script,) = (ROOT / "notebooks/src").glob(f"{notebook}_*.py")
    headings = re.findall(r"^# ##+ (.+)$", script.read_text(), re.M)
    for title in titles.split("; "):
        wanted = title.removeprefix("part ") + ". " if title.startswith("part ") else title
        assert any(heading.startswith(wanted) for heading in headings), title


def test_homework_is_in_the_workbook():
    from steps.workbook import exercises

    named = re.findall(r"\b0[0-4]\.(?:bug)?\d\b", PLAN)
    assert len(named) > 12 and set(named) <= exercises.load().keys()
