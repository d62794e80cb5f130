"""The site: the player plays what the stages do, a picture of the gallery is of one run, pages load nothing remote."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from steps.course.bench import rows
from support.made_rows import of_02, peer_row

ROOT = Path(__file__).parents[1]
SITE = ROOT / "notebooks" / "site"
sys.path.insert(0, str(SITE))

import gallery  # noqa: E402
import record  # noqa: E402

# ---- what is recorded and measured -----------------------------------------------------------------------------------


def test_the_player_plays_what_the_stages_do():
    """walk() itself compares the sums of its events with the counters."""
    assert (SITE / "traces.js").read_text() == record.script(), "run: make report"


def pairs(ring, rank, step):
    """How many pairs of a query and a key before it the rank computes in a step."""
    work = ring["steps"][step][rank]
    queries, keys = ring["positions"][rank][slice(*work["q"])], ring["positions"][work["src"]][slice(*work["k"])]
    return sum(j <= i for i in queries for j in keys)


def test_the_page_of_the_player_says_what_its_traces_hold():
    text, traces = (SITE / "player.md").read_text(), record.traces()
    lines = {re.split(r"[:|]", line)[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    names = {"standard": "standard", "fa1": "FlashAttention-1", "fa2": "FlashAttention-2"}
    for walk in traces["walks"]:
        line = lines[names[walk["order"]]]
        assert f"{walk['loads']:,}" in line and f"| {walk['stores']:,} |" in line
    for ring in traces["rings"]:
        ranks = range(ring["ranks"])
        busiest = [max(pairs(ring, rank, step) for rank in ranks) for step in ranks]
        together = sum(pairs(ring, rank, step) for rank in ranks for step in ranks)
        assert together == ring["S"] * (ring["S"] + 1) // 2, "each pair is computed once"
        words = f"{', '.join(map(str, busiest))}: together {sum(busiest)} | {together // ring['ranks']} |"
        assert words in lines[ring["layout"]]


def test_a_picture_of_the_gallery_shows_one_run_of_kernels_as_they_are():
    shown = gallery.charts(gallery.read(rows.COMMITTED))
    assert {(chart["gpu"], chart["stage"][:2], chart["pass"]) for chart in shown} >= {
        ("H200", stage, pass_) for stage in ("02", "03") for pass_ in ("forward", "backward")
    }
    fresh = {(row["kernel"], row["N"], round(row["tflops"], 1)) for row in rows.fresh(rows.read())}
    for chart in shown:
        own = {(name, N, speed) for name in chart["ours"] for N, speed in chart["speeds"][name].items()}
        assert own <= fresh, "the kernel has changed since; measure it again, or delete the rows"


def test_the_last_of_the_largest_runs_counts_and_one_of_two_lengths_is_no_picture():
    both = "fwd_7_roles", "fwd_8_hopper"

    def run(name, tflops, lengths=(512, 1024, 2048), kernels=both):
        sizes = [dict(N=N, Nk=N, D=128, run=name, date=f"{name}T") for N in lengths]
        own = [of_02(kernel, tflops=tflops, **at) for at in sizes for kernel in kernels]
        return own + [peer_row(peer="fa4", **at) for at in sizes]

    small = *run("2026-01-03", 7.0, (512, 1024)), *run("2026-01-04", 8.0, kernels=both[1:])
    (chart,) = gallery.charts([*run("2026-01-02", 5.0), *run("2026-01-01", 9.0), *small])
    assert chart["speeds"]["fwd_8_hopper"] == {512: 5.0, 1024: 5.0, 2048: 5.0} and set(chart["speeds"]) > {"fa4"}
    assert chart["ours"] == list(both) and chart["date"] == "2026-01-02"


def test_only_plain_rows_of_the_two_stages_are_read(tmp_path):
    others = {"options": {"window": 8}, "dtype": "fp16", "timing": "sustained", "n_gpus": 2, "pass": "fwd+bwd"}
    others["kernel"] = "fwd_8_hopper:SKIP=0"
    found = [of_02("fwd_8_hopper", N=512, Nk=512), of_02("fwd_0_matrix") | {"stage": "00_naive"}]
    found += [found[0] | {name: value} for name, value in others.items()]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, found)))
    assert gallery.read(tmp_path) == found[:1]


def test_readers_own_rows_stand_beside_the_committed_ones():
    own = [of_02("fwd_8_hopper", N=N, Nk=N, gpu="NVIDIA L4") for N in (512, 1024, 2048)]
    page = gallery.page([], own)
    assert '"gpu":"L4, yours"' in page and gallery.read(ROOT / "nowhere") == []


# ---- what is built ---------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page loads, links to and names."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.ids, self.pictures = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id"), attributes.get("name")}
        if tag in ("script", "img", "iframe", "source") and attributes.get("src"):
            self.loaded.append(attributes["src"])
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(attributes["href"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag == "img":
            self.pictures.append(attributes.get("alt", ""))


@pytest.fixture(scope="module")
def pages():
    """{path: Page} of the site, built anew."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    shutil.rmtree(ROOT / "build" / "site", ignore_errors=True)
    done = subprocess.run(["make", "site", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build" / "site"
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if "_static" not in path.parts}


@pytest.mark.long
def test_pages_load_and_link_to_what_is_there(pages):
    for path, page in pages.items():
        for url in page.loaded:
            assert not re.match(r"(https?:)?//", url), (path, url)
        for url in page.loaded + page.links:
            parts = urlsplit(url)
            if parts.scheme or url.startswith("#") and len(url) < 2:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), (path, url)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, (path, url)


@pytest.mark.long
def test_notebooks_and_kernels_are_pages_with_their_folds_and_words(pages):
    site = ROOT / "build" / "site"
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for notebook in notebooks:
        cells = json.loads(notebook.read_text())["cells"]
        html = (site / "notebooks" / f"{notebook.stem}.html").read_text()
        folded = sum(cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in cells)
        assert html.count("tag_hide-input") == folded
        assert all(len(alt) > 20 for alt in Page(html).pictures), notebook.stem
    kernels = [*(ROOT / "steps").glob("step02_fa2_cuda/*.cu"), *(ROOT / "steps").glob("step03_triton/fwd_*.py")]
    for kernel in kernels:
        html = (site / kernel.relative_to(ROOT)).with_suffix(".html").read_text()
        assert "linenos" in html and kernel.name in html
        assert "Told in notebook" in html and "../../notebooks/0" in html, "a way into the course"
    text = (site / "notebooks" / "02d_fa2_cuda_hopper.html").read_text()
    assert "steps/step02_fa2_cuda/fwd_8_hopper.html" in text, "a file's name in the text leads to its page"


@pytest.mark.long
def test_a_page_says_what_it_is_to_whoever_shares_its_link(pages):
    for path in pages:
        text = path.read_text()
        assert 'icon" href=' in text and '<meta name="description"' in text and 'property="og:title"' in text, path


@pytest.mark.long
def test_the_first_screen_sells_the_course_and_the_site_is_small(pages):
    site = ROOT / "build" / "site"
    first = (site / "index.html").read_text().split('id="puzzle-0"')[0]
    for words in ("Start reading", "ladder_narrow.png", "You do not rescale l", "player.html", "No GPU", "% faster"):
        assert words in first, words
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 20e6
    assert "CHARTS" in (site / "notebooks" / "site" / "gallery.html").read_text()
