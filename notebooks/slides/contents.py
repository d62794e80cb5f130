"""Writes slides/index.html: each deck with its sections, and each section is a link to its slide."""

import re
import sys
from pathlib import Path
from urllib.parse import quote

HEADING = re.compile(r'<h([123]) id="([^"]+)">(.*?)<a class="anchor-link"', re.S)


def contents(folder):
    """The page. The id of a heading is a slide's address for reveal.js."""
    parts = ["<meta charset='utf-8'><title>Slides</title>"]
    for deck in sorted(folder.glob("*.slides.html")):
        for level, id, title in HEADING.findall(deck.read_text()):
            parts.append(f"<h{level}><a href='{deck.name}#/{quote(id)}'>{title}</a></h{level}>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "index.html").write_text(contents(folder))
