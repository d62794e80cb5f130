"""A file of stage 03 with a mistake in it, and a table of who sees which mistake."""

import importlib
import itertools
import sys
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt

from steps.figures.picture import picture
from steps.figures.plots import FAINT, SEEN, UNSEEN, ink_on, style
from steps.step03_triton import fwd_0_fused

FILES = "fwd_0_fused", "replay", "flash", "flash_kernels", "features", "tiles"  # they import no other file
numbers = itertools.count()
folder = tempfile.TemporaryDirectory()  # Triton reads a kernel's text from its file when it first runs.


def planted(module, file, before, after):
    """The module of stage 03, from a copy of FILES in which `after` stands for `before` in one file."""
    package = Path(folder.name, f"planted_{next(numbers)}")
    package.mkdir()
    for stem in FILES:
        text = Path(fwd_0_fused.__file__).with_name(f"{stem}.py").read_text()
        if stem == file and before not in text:
            raise ValueError(f"{file} has no {before!r}.")
        (package / f"{stem}.py").write_text(text.replace(before, after) if stem == file else text)
    if folder.name not in sys.path:
        sys.path.insert(0, folder.name)
    return importlib.import_module(f"{package.name}.{module}")


def who_sees(found, title, alt):
    """A table of {(mistake, who): word}: green where a mistake is seen, grey where not, orange where nobody sees it."""
    style()
    names, columns = (list(dict.fromkeys(key[n] for key in found)) for n in (0, 1))
    fig, ax = plt.subplots(figsize=(8.4, 0.6 + 0.46 * len(names)), layout="constrained")
    for (name, column), word in found.items():
        seen = [found.get((name, other), "lives") != "lives" for other in columns]
        colour = FAINT if word == "lives" else SEEN
        colour = colour if any(seen) or name == "as it is" else UNSEEN
        corner = columns.index(column), names.index(name)
        ax.add_patch(plt.Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", lw=1.5))
        text = textwrap.fill(word, 15)
        ax.text(corner[0] + 0.5, corner[1] + 0.5, text, ha="center", va="center", color=ink_on(colour), fontsize=9.2)
    ax.set(xlim=(0, len(columns)), ylim=(len(names), 0), title=title)
    ax.set_xticks([n + 0.5 for n in range(len(columns))], columns)
    ax.set_yticks([n + 0.5 for n in range(len(names))], names)
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    words = [f"{name}, seen by {column}: {word}" for (name, column), word in found.items() if word != "lives"]
    return picture(fig, f"{alt} {'; '.join(words)}. All others live.".replace("\n", " "))
