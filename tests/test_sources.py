"""papers/sources.md: where each link leads, the words of its row are found."""

import collections
import re
from pathlib import Path

import pytest

from support.headings import sections

PAGE = Path(__file__).parents[1] / "papers" / "sources.md"
ROW = r"^\| ([^|]+) \| (.+) \| \[.+?\]\(([^)#]+)(?:#([^)]+))?\) \| `(.+)` \|$"
ROWS = re.findall(ROW, PAGE.read_text(), re.M)


def missing(row, root=PAGE.parent):
    """What is not where the row says, in words, or ""."""
    source, idea, file, part, words = row
    path, says = (root / file).resolve(), f'the row "{idea}" of {source}: {file}'
    if not path.exists():
        return f"{says} is not there"
    found = sections(path)
    if part not in found:
        return f"{says} has no heading #{part}"
    return "" if words in found[part] else f'{says}, under #{part}, does not say "{words}"'


def test_what_the_course_grew_from_is_told_where_the_page_says():
    complaints = [says for row in ROWS if (says := missing(row))]
    assert not complaints, "\n".join(complaints)


# What the course grew from does not change, so that no row may go; a new one is counted here.
SYSTEMS = {"lecture 12": 27, "StreamAttention": 36, "dist-flash-attn": 10, "cuda_FlashAttention": 22}


def test_every_line_of_the_table_is_such_a_row_and_none_is_missing():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(ROWS) == len(lines) - 2, [line for line in lines[2:] if not re.match(ROW, line)]
    assert collections.Counter(source for source, *_ in ROWS) == SYSTEMS
    assert len({row[1] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("folder, suffix", [("", ".md"), ("src/", ".py")])
def test_a_row_is_missing_where_its_words_its_heading_or_its_file_are(tmp_path, folder, suffix):
    def page(text):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "page.ipynb").touch()
        lines = text.splitlines() if suffix == ".md" else ["# %% [markdown]", *(f"# {x}" for x in text.splitlines())]
        (tmp_path / folder / f"page{suffix}").write_text("\n".join(lines))
        name = "page.md" if suffix == ".md" else "page.ipynb"
        return missing(("it", "an idea", name, "1-what-a-tile-is", "only one tile exists"), tmp_path)

    text = "# P\n## 1. What a *tile* is\nSo only one\ntile exists.\n### Deeper\nHere, too.\n## 2. Else\nonly one tile"
    assert page(text) == "" and page(text.replace("exists.\n", "\n").replace("too", "only one tile exists")) == ""
    assert 'does not say "only one tile exists"' in page(text.replace("tile exists.", "tile is.") + " exists")
    assert "has no heading #1-what-a-tile-is" in page(text.replace("## 1.", "## 3."))
    assert "is not there" in missing(("it", "an idea", "none.md", "", "words"), tmp_path)
