"""The course as a site: Sphinx reads README, notebooks, papers and code where they lie, and executes nothing.

    make site        writes build/site, which needs no server and no network

What is shown otherwise than in the repository is changed here, in memory: a picture keeps its description, a folded
cell of JupyterLab is a fold, a kernel file is a highlighted page, and a file's name in the text leads to its page.
"""

import functools
import html
import json
import os
import re
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from docutils import nodes
from docutils.parsers import Parser
from myst_nb.core.render import NbElementRenderer
from sphinx.util.nodes import make_refnode

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import gallery  # noqa: E402
import progress  # noqa: E402

project = "FlashAttention, step by step"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_nb", "sphinx_external_toc", "sphinx_copybutton"]
external_toc_path = str(HERE / "toc.yml")
html_theme, html_title = "furo", project
SCRIPTS = "traces.js", "player.js", "gallery.js", "puzzle.js"
html_static_path = [str(HERE / name) for name in ("course.css", "icon.svg", *SCRIPTS)]
html_css_files = ["course.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
html_favicon = str(HERE / "icon.svg")
html_search_scorer = str(HERE / "search.js")
html_baseurl = os.environ.get("SITE_URL", "")  # A card's picture needs a whole address, which only the publisher knows.
highlight_language = "none"  # A fence without a language is pseudo-code or what a command prints.

# One file of MathJax that has its letters inside; the package brings a hundred.
(mathjax,) = [file for file in distribution("sphinx-mathjax-offline").files if file.name == "tex-svg.js"]
html_static_path.append(str(mathjax.locate()))
mathjax_path = "tex-svg.js"

nb_execution_mode = "off"
nb_code_prompt_show = "code"
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

STAGES = "steps/step0[0-4]_*"
CODE = (".py", ".cu", ".cuh", ".h", ".cpp")
include_patterns = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "notebooks/*.ipynb", "notebooks/TEACHING*.md",
    "notebooks/site/*.md", "papers/*.md",
    "reference/*.md", "reference/*.py", "steps/*.md", "steps/*.py", f"{STAGES}/**", "steps/course/figures/*.py",
    "steps/course/**/*.md", "steps/course/workbook/*/*.py",
    *(f"tests/test_{stage.name}.py" for stage in ROOT.glob(STAGES)),
]  # fmt: skip
# Of a header and its .cpp file the header has the words.
exclude_patterns = ["**/__pycache__/**", "**/emulator/*.cpp"]


def beside(path, env):
    """A line of links to the other files of a folder that are pages."""
    line = nodes.paragraph(classes=["beside"])
    if str((path.parent / "README").relative_to(ROOT)) in env.found_docs:
        line += [nodes.reference("", "up to the stage's page", internal=True, refuri="README.html"), nodes.Text("  ")]
    for other in sorted(path.parent.iterdir()):
        page = str(other.relative_to(ROOT).with_suffix(""))
        if other.suffix in CODE and page in env.found_docs:
            name = other.name if other != path else f"{other.name} (this file)"
            line += [nodes.reference("", name, internal=True, refuri=f"{other.stem}.html"), nodes.Text("  ")]
    return line


def into_the_course(path):
    """A line of links to the notebooks that tell of a file, for who comes to its page from outside of the course."""
    line = nodes.paragraph()
    for n, (page, title, _) in enumerate(told_in(path)):
        uri = os.path.relpath(ROOT / page, path.parent) + ".html"
        line += [nodes.Text(", and " if n else "Told in notebook ")]
        line += [nodes.reference("", title, internal=True, refuri=uri)]
    return [line] if line.children else []


class CodeParser(Parser):
    """A source file as a page: its name, its neighbours, its text."""

    supported = ("code",)

    def parse(self, text, document):
        env = document.settings.env
        path = Path(env.doc2path(env.docname))
        title = f"{path.parent.name}/{path.name}"
        section = nodes.section(ids=["code"], names=[title])
        section += nodes.title(text=title)
        section += into_the_course(path)
        section += beside(path, env)
        section += nodes.literal_block(
            text, text, language="python" if path.suffix == ".py" else "cuda", linenos=True, classes=["source"]
        )
        document += section


def words_of_pictures(render):
    """The notebooks' pictures have descriptions in their outputs' metadata; MyST-NB would drop them."""

    def render_image(self, data):
        found = render(self, data)
        alt = data.output_metadata.get(data.mime_type, {}).get("alt")
        for node in found:
            for image in node.findall(nodes.image):
                image["alt"] = alt or image.get("alt", "")
        return found

    return render_image


NbElementRenderer.render_image = words_of_pictures(NbElementRenderer.render_image)


def read(app, docname, source):
    """A page as the site shows it: README's first screen, folds as tags, and a folder's link as one to its page."""
    path = str(app.env.doc2path(docname))
    if path.endswith(".ipynb"):
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
        source[0] = json.dumps(notebook)
    if docname == "README":
        source[0] = with_puzzle(first_screen(source[0]))
    if docname == "notebooks/site/progress":
        exercises = ROOT / "steps" / "course" / "workbook" / "exercises.toml"
        source[0] += progress.page(exercises.read_text(), ROOT / "my")
    if docname == "notebooks/site/gallery":
        rows = gallery.read(ROOT / "steps" / "course" / "bench" / "results")
        source[0] += gallery.page(rows, gallery.read(ROOT / "my" / "results"))


def first_screen(text):
    """README, whose first screen says for whom the course is, one number, and where to begin, beside the ladder."""
    title, intro, *_ = text.split("\n\n")
    ladder = next(part for part in text.split("\n\n") if "figures/ladder.png" in part)
    narrow = ladder.replace("ladder.png", "ladder_narrow.png")
    faster = int(re.search(r"fwd_8_hopper\]\(.*?\|(\d+)%\|", text)[1]) - 100
    wrong = text[text.index("```\n$ python3 steps/puzzle.py") :].split("```")[1]
    start = "<a class='start' href='notebooks/00_naive.html'>Start reading</a>"
    try_it = "<a href='#puzzle-0'>Write your first line</a> <a href='notebooks/site/player.html'>Watch the tiles</a>"
    hero = f"<div class='start-row'>{start} {try_it}</div>"
    rest = re.sub(r"\*\*Read it here.*?\n\n", "", text[len(title) + 2 + len(intro) :], count=1, flags=re.S)
    both = f"<div class='wide'>\n\n{ladder}\n\n</div><div class='narrow'>\n\n{narrow}\n\n</div>"
    return (
        f"{title}\n\nFor students and engineers who know matrix products, gradients and Python, and want to understand "
        "the fastest attention kernels line by line: from three nested loops to ring attention across GPUs.\n\n"
        f"**No GPU needed**: all of it runs on a laptop. On an NVIDIA H200 the same files are {faster} % faster "
        "than cuDNN.\n\n"
        f"{hero}\n\n<div class='hero'><div>\n\n{narrow}\n\n"
        "<p>A bar is a kernel of the course, with one idea more than the one before it.</p></div><div>\n\n"
        f"```\n{wrong.strip()}\n```\n\n<p>What it looks like to be checked.</p></div></div>\n\n"
        f"{rest.replace(ladder, both).lstrip()}"
    )


def with_puzzle(text):
    """README with a line to type below puzzle 0. Without script the command alone stands there."""
    texts = json.dumps(tomllib.loads((ROOT / "steps" / "puzzle.toml").read_text()))
    form = f"<div class='puzzle'></div>\n<script>window.PUZZLE = {texts}</script>"
    script = "<script src='_static/puzzle.js' defer></script>"
    alone = "`python3 steps/puzzle.py` alone asks for your line."
    assert alone in text
    return text.replace(alone, f"{form}\n{script}\n\n{alone}")


@functools.cache
def notebooks():
    """[(page, title, text of its cells)] of the notebooks, those of the main line first."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: ("deeper" in path.stem, path.stem)):
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
        title = re.search(r"^# (.+)", cells[0], re.M)[1]
        found.append((f"notebooks/{path.stem}", title, "\n".join(cells)))
    return found


def told_in(path):
    """The notebooks that name this file of a stage: at most two. Where none does, the stage's first."""
    stage = re.search(r"step(0\d)_", str(path.relative_to(ROOT)))
    own = [book for book in notebooks() if stage and book[0].startswith(f"notebooks/{stage[1]}")]
    return [book for book in own if re.search(rf"\b{path.stem}\b", book[2])][:2] or own[:1]


def link_names_of_files(app, doctree, docname):
    """A file's name in backticks becomes a link to its page; of several, to that of the page's own stage."""
    pages = {}
    for page in app.env.found_docs:
        path = Path(str(app.env.doc2path(page)))
        if path.suffix in CODE:
            pages.setdefault(path.name, []).append(page)
    stage = Path(docname).stem[:2]
    for literal in list(doctree.findall(nodes.literal)):
        found = pages.get(literal.astext().rsplit("/", 1)[-1], [])
        near = [page for page in found if len(found) == 1 or f"step{stage}" in page or page in literal.astext()]
        inside = isinstance(literal.parent, nodes.reference | nodes.title)
        if len(near) == 1 and near[0] != docname and not inside:
            link = make_refnode(app.builder, docname, near[0], "", literal.deepcopy())
            literal.parent.replace(literal, link)


def mark_code(app, docname, source):
    """A code page stands in no sidebar and has none of its own headings, and so the width that its lines need."""
    if Path(str(app.env.doc2path(docname))).suffix in CODE:
        app.env.metadata[docname] |= {"orphan": True, "hide-toc": True}


def without_contents(app, pagename, templatename, context, doctree):
    """A code page's sidebar has the search only; a list of the whole course on each of them would take megabytes."""
    if pagename in app.env.found_docs and Path(str(app.env.doc2path(pagename))).suffix in CODE:
        context["sidebars"] = ["sidebar/brand.html", "sidebar/search.html"]
        context["body"] = re.sub(r'<span class="w">(\s*)</span>', r"\1", context["body"])  # a blank needs no colour


def about(app, pagename, templatename, context, doctree):
    """What a search engine shows of a page, and a chat where somebody shares its link."""
    words = [node.astext() for node in doctree.findall(nodes.paragraph)] if doctree else []
    words = next((text for text in words if len(text) > 60), f"{project}: from a loop to ring attention.")
    words = html.escape(words[:197].replace("\n", " ") + ("..." if len(words) > 197 else ""))
    title = html.escape(re.sub("<.*?>", "", context.get("title") or project))
    tags = {"og:type": "article", "og:site_name": project, "og:title": title, "og:description": words}
    if html_baseurl:
        tags["og:image"] = f"{html_baseurl.rstrip('/')}/_images/five_stages.png"
    context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{words}">\n'
    context["metatags"] += "\n".join(f'<meta property="{name}" content="{value}">' for name, value in tags.items())


def foot(app, pagename, templatename, context, doctree):
    """Each page ends with the edition, so that a printed page says of which one it is."""
    changes = f"{context['pathto']('CHANGELOG')}"
    line = f'<p class="edition">{project}, edition {release}. <a href="{changes}">What changed</a></p>'
    context["body"] = context.get("body", "") + line


def setup(app):
    app.add_source_parser(CodeParser)
    for suffix in CODE:
        app.add_source_suffix(suffix, "code")
    app.connect("source-read", read)
    app.connect("source-read", mark_code)
    app.connect("env-get-outdated", lambda *_: ["README", "notebooks/site/gallery", "notebooks/site/progress"])  # made
    app.connect("doctree-resolved", link_names_of_files)
    app.connect("html-page-context", without_contents)
    app.connect("html-page-context", about)
    app.connect("html-page-context", foot)
