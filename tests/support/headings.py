"""The headings of a page or a notebook, as links name them, and the text below each."""

import re
from pathlib import Path


def anchor(heading):
    """What a link to this heading says after #, on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def sections(path: Path):
    """{anchor: text} of a page, or of a notebook with its code, as its script has it.

    The text goes from below the heading to the next heading that is not deeper. "" stands for the whole file.
    """
    lines, found, open_ = _lines(path), {"": []}, []
    for level, line in lines:
        if level:
            open_ = [(depth, name) for depth, name in open_ if depth < level]
            open_.append((level, anchor(line)))
            found[anchor(line)] = []
        for name in ["", *(name for _, name in open_ if not level or name != anchor(line))]:
            found[name].append(line)
    return {name: " ".join(" ".join(text).split()) for name, text in found.items()}


def _lines(path):
    """(depth of the heading that the line is, or 0; its text) of each line."""
    is_notebook = path.suffix == ".ipynb"
    if is_notebook:
        path = path.parent / "src" / f"{path.stem}.py"
    is_text, fenced = path.suffix == ".md", False
    for line in path.read_text().splitlines():
        if is_notebook and line.startswith("# %%"):
            is_text = "[markdown]" in line
            continue
        if is_notebook and is_text:
            line = re.sub("^# ?", "", line)
        fenced ^= is_text and line.startswith("```")
        heading = re.match("(#+) (.+)", line) if is_text and not fenced else None
        yield (len(heading[1]), heading[2]) if heading else (0, line)
