"""The slides of `make slides` load only files beside them. The lecture plan names sections and exercises that exist."""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.skipif(not find_spec("nbconvert"), reason="nbconvert is not installed")

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
needs_make = pytest.mark.skipif(not MAKE, reason="make is not installed")


def make(*arguments, cwd=ROOT, path=os.environ["PATH"]):
    """Runs `make slides` with this Python, and without the variables of our own environment that it would read."""
    command = [MAKE, *arguments, "slides", "ENV=none", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=cwd, env={"PATH": path, "LC_ALL": "C"}, capture_output=True, text=True)


def write_slides(folder, *stems):
    """Writes the slides of these notebooks into the folder, by the Makefile's own command."""
    printed = make("--dry-run", "--assume-old=slides/assets").stdout  # as if the assets had been fetched
    recipe = next(line for line in printed.splitlines() if "nbconvert" in line)
    command = shlex.split(recipe.split(";")[1])
    command[command.index("slides", command.index("--output-dir"))] = str(folder)
    command[-1:] = [f"notebooks/{stem}.ipynb" for stem in stems]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The slides of notebook 00."""
    folder = tmp_path_factory.mktemp("slides")
    write_slides(folder, "00_naive")
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


@needs_make
def test_the_list_of_slides_leads_to_every_section(page, tmp_path):
    (tmp_path / "00_naive.slides.html").write_text(page)
    subprocess.run([sys.executable, ROOT / "notebooks/slides/contents.py", tmp_path], check=True)
    links = re.findall(r"<a href='00_naive.slides.html#/(.+?)'>(.+?)</a>", (tmp_path / "index.html").read_text())
    assert [html.unescape(title) for _, title in links] == re.findall(
        r"^# ##* (.+)$", (ROOT / "notebooks/src/00_naive.py").read_text(), re.M
    )
    ids = [attributes.get("id") for tag, attributes in Tags(page).found if tag in ("h1", "h2", "h3")]
    assert [unquote(id) for id, _ in links] == ids and not any("/" in id for id in ids)


# --- measured in Chromium -----------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ASSETS = ROOT / "slides" / "assets"
STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
SOME = ["02a_fa2_cuda_first_kernels"]
# Stands in for reveal.js where `make slides` has not fetched it. Formulas are then measured as the text of their TeX.
REVEAL = "window.Reveal = { initialize() {}, on() {}, getCurrentSlide() {} };"
# Writes the sizes of all slides into the page, when they have been broken at the height of the screen.
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  document.documentElement.classList.add("measuring");
  const top = (element, section) => element.getBoundingClientRect().top - section.getBoundingClientRect().top;
  const found = [...document.querySelectorAll(".slides > section > section")].map(section => ({
    height: section.offsetHeight,
    text: section.innerText,
    headed: section.querySelector("h1, h2, h3, p, ul, ol, table, pre, img, details, mjx-container, .highlight")
      ?.matches("h1, h2, h3, .again"),
    scrolls: section.scrollWidth > section.clientWidth,
    figures: [...section.querySelectorAll(".jp-OutputArea img")].map(image => {
      const scale = Math.min(image.offsetWidth / image.naturalWidth, image.offsetHeight / image.naturalHeight);
      return [scale * image.naturalWidth, scale * image.naturalHeight];
    }),
    code_first: [...section.querySelectorAll("details.code")].some(code =>
      [...code.closest(".jp-Cell").querySelectorAll(".jp-OutputArea")].some(output =>
        top(output, section) > top(code, section))),
  }));
  const result = document.createElement("pre");
  result.id = "measured";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
}, 2500))</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's package chromium")
@needs_make
@pytest.mark.parametrize(
    "stem", [stem if stem in SOME else pytest.param(stem, marks=pytest.mark.long) for stem in STEMS]
)
def test_slides_fit_the_screen_and_figures_fill_it(stem, tmp_path):
    write_slides(tmp_path, stem)
    fetched = ASSETS.exists()
    if fetched:
        shutil.copytree(ASSETS, tmp_path / "assets")
    else:
        (tmp_path / "assets/reveal.js/dist").mkdir(parents=True)
        (tmp_path / "assets/reveal.js/dist/reveal.js").write_text(REVEAL)
    theme = tmp_path / "assets/reveal.js/dist/theme"
    theme.mkdir(exist_ok=True)
    shutil.copy(ROOT / "notebooks/slides/course.css", theme)
    page = tmp_path / f"{stem}.slides.html"
    page.write_text(page.read_text().replace("</html>", f"{PROBE}</html>"))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1280,720", "--virtual-time-budget=20000", "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    measured = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.S)
    assert measured, f"The slides' script has failed. {done.stderr[-500:]}"
    slides = json.loads(html.unescape(measured[1]))
    assert len(slides) > 10
    assert not [slide["text"][:60] for slide in slides if slide["height"] > 720], "taller than the screen"
    if fetched:  # The text of a formula is wider than the formula.
        assert not [slide["text"][:60] for slide in slides if slide["scrolls"]], "wider than the screen"
    assert not [slide["text"][:60] for slide in slides if not slide["headed"]], "no heading"
    elsewhere = r"\bBelow(?=[,:]| is\b| are\b| the \w+ is\b)|\b(printed|counted|shown|dashed|count) below\b"
    assert not [slide["text"] for slide in slides if re.search(elsewhere, slide["text"])], "points to another page"
    assert not [slide["text"][:60] for slide in slides if slide["code_first"]], "the code stands before what it shows"
    assert not [slide for slide in slides if slide["text"].strip() in ("", "Code") and not slide["figures"]], "empty"
    figures = [size for slide in slides for size in slide["figures"]]
    assert figures or stem[2] == "x", "no figure"
    assert not [(w, h) for w, h in figures if w < 1050 and h < 530], "a figure smaller than its slide"


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


PLAN, WITHOUT_CUDA = (
    (ROOT / "notebooks" / name).read_text() for name in ("TEACHING.md", "TEACHING_WITHOUT_CUDA.md")
)
ROW = r"^\| (\d+) \| ([^|]+) \|"  # minutes, sections


def sessions(plan):
    return re.split("^## Session", plan.partition("## Homework")[0], flags=re.M)[1:]


each_session = pytest.mark.parametrize(
    ("number", "session"),
    [
        pytest.param(number, session, id=f"{name}{number}")
        for name, plan in (("", PLAN), ("without_cuda_", WITHOUT_CUDA))
        for number, session in enumerate(sessions(plan), 1)
    ],
)


@pytest.mark.parametrize("plan", [PLAN, WITHOUT_CUDA], ids=["with", "without_cuda"])
def test_each_session_takes_90_minutes_of_which_ten_are_slack(plan):
    assert len(sessions(plan)) == 4
    for session in sessions(plan):
        rows = re.findall(ROW, session, re.M)
        assert sum(int(minutes) for minutes, _ in rows) == 90
        assert [minutes for minutes, sections in rows if sections == "slack"] == ["10"]


@each_session
def test_questions_are_numbered_answered_and_asked(number, session):
    questions = re.findall(r"^(\d+)\. .+?\?\n   <details>(.+?)</details>", session, re.M | re.S)
    assert [int(n) for n, _ in questions] == list(range(1, len(questions) + 1)) and len(questions) >= 5
    assert len(re.findall(r"^\d+\. ", session, re.M)) == len(questions)
    asked = {int(n) for n in re.findall(r"Ask (\d)(?! of)|and (\d);", session) for n in n if n}
    asked |= {int(n) for n in re.findall(rf"Ask (\d) of session {number}", PLAN)}  # at the beginning of the next one
    assert asked == {int(n) for n, _ in questions}
    assert all("Typical wrong answer" in " ".join(answer.split()) for _, answer in questions)
    assert re.findall(r"^\*\*(Board \d)", session, re.M) == re.findall(r"\| (Board \d)", session)


@each_session
def test_what_to_leave_out_is_in_the_session_and_long_enough(number, session):
    minutes = {sections: int(n) for n, sections in re.findall(ROW, session, re.M)}
    (late,) = re.findall(r"^\*\*15 minutes late:\*\*(.*?)\.\s+Question", session, re.M | re.S)
    assert sum(minutes[" ".join(part.split())] for part in re.findall(r"\*([^*]+)\*", late)) >= 15


PLANNED = [cell for _, cell in re.findall(ROW, PLAN + WITHOUT_CUDA, re.M) if cell != "slack"]


@pytest.mark.parametrize("sections", [each for cell in PLANNED for each in cell.split("<br>or ")])
def test_planned_sections_are_in_the_notebooks(sections):
    notebook, _, titles = sections.partition(": ")
    (script,) = (ROOT / "notebooks/src").glob(f"{notebook}_*.py")
    headings = re.findall(r"^# ##+ (.+)$", script.read_text(), re.M)
    for title in titles.split("; "):
        wanted = title.removeprefix("part ") + ". " if title.startswith("part ") else title
        assert any(heading.startswith(wanted) for heading in headings), title


def test_homework_is_in_the_workbook():
    from steps.course.workbook import exercises

    tasks = exercises.load()
    named = re.findall(ID, PLAN)
    assert len(named) > 12 and set(named) <= tasks.keys()
    assert homework(PLAN) == {id for id, task in tasks.items() if not isinstance(task, exercises.Step)}
    table = WITHOUT_CUDA[WITHOUT_CUDA.index("## Homework") :]
    assert ids(table) == {id for id in homework(PLAN) if id[:2] in ("00", "03", "04")}
    for row, points in re.findall(r"^\| session \d (\|.*\|) (\d+) \|$", table, re.M):
        assert int(points) == 3 * len(ids(row))


def test_hours_and_points_of_the_homework_are_those_of_the_notebooks_and_of_the_rubric():
    hours = {"an hour": 1, "60 minutes": 1, "two hours": 2, "120 minutes": 2}
    rows = re.findall(r"^\|[^|]*\| (0\d\w?)(?:, or \w+)? \| ([^|]*\|[^|]*) \| (\d+) \| (\d+) \|$", PLAN, re.M)
    assert len(rows) == 11
    for notebook, tasks, said, points in rows:
        (script,) = (ROOT / "notebooks/src").glob(f"{notebook}_*.py")
        more = re.search(r"to read, (an hour|two hours|\d+ minutes) more with the exercises?", script.read_text())[1]
        first = re.sub(", or [^|]*", "", tasks)  # of two ways, which count the same
        assert (int(said), int(points)) == (hours[more], 3 * len(ids(first))), notebook


def test_the_profile_says_what_the_answer_says():
    from steps.course.bench import report

    lines = {line.split("|")[1].strip(): line for line in report.counters().splitlines()[2:] if line.startswith("|")}
    answer = PLAN[PLAN.index("437 of its") : PLAN.index("Typical wrong answer: too few warps")]
    before, after = answer.split("`fwd_8_hopper`")
    for part, kernel in ((before, "02 fwd_2_mma"), (after, "02 fwd_8_hopper")):
        numbers = re.findall(r"[\d.]*\d", part)
        assert len(numbers) >= 3 and all(re.search(rf"[ |]{re.escape(n)}[ %]", lines[kernel]) for n in numbers), part


ID = r"\b0[0-4]\.(?:bug)?\d+\b"  # of an exercise or hunt


def homework(plan):
    """The ids in the table of homework."""
    return ids(plan[plan.index("## Homework") : plan.index("The first `check`")])


def ids(table):
    """The ids in a part of the table, also those between the two ends of "02.7 to 02.10"."""
    named = set(re.findall(ID, table))
    for first, last in re.findall(rf"({ID}) to ({ID})", table):
        stage, begin, end = first[:2], *(int(id.split(".")[1]) for id in (first, last))
        named |= {f"{stage}.{n}" for n in range(begin, end + 1)}
    return named
