"""Figures in notebooks: a PNG together with a description in words, and letters that can be read."""

import base64
import functools
import io
import sys

SMALLEST = 9  # points of a letter where a page shows the figure
PAGE = 8.5  # inches; a wider figure is made smaller until it fits


class Picture:
    """A PNG with alt text, as the value of a notebook cell.

    The description is in the output's metadata (`image/png` -> `alt`) and in its plain text, so that readers who do not
    see the picture get the words. The picture is a PNG because every viewer shows PNG, even in a notebook that it does
    not trust.
    """

    def __init__(self, png, alt):
        self.png, self.alt = png, alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/png": base64.b64encode(self.png).decode()}, {"image/png": {"alt": self.alt}}

    def __repr__(self):
        return f"Figure: {self.alt}"


def picture(fig, alt):
    """The matplotlib figure as a `Picture`. Its opaque white ground keeps it legible on light and on dark pages.

    The figure is closed. alt says what the figure shows, for those who do not see it. ValueError if there are no words,
    or if a text of the figure is too small to be read.
    """
    import matplotlib.pyplot as plt  # Imported here, because its import would delay `python -m steps`.
    import PIL.Image

    if not alt.strip():
        raise ValueError("picture needs alt text: one or two sentences that say what the figure shows.")
    if small := small_texts(fig):
        raise ValueError(f"below {SMALLEST} points where the page shows it: {', '.join(small)}.")
    drawn, png = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=110, facecolor="white", bbox_inches="tight")
    plt.close(fig)  # Jupyter would show an open figure a second time.
    # 64 colours are enough for lines, bars and text, and make the file four times smaller.
    image = PIL.Image.open(drawn).convert("RGB").quantize(64, dither=PIL.Image.Dither.NONE)
    image.save(png, format="png", optimize=True)
    return Picture(png.getvalue(), " ".join(alt.split()))


def small_texts(fig):
    """The texts of a figure whose letters have fewer than SMALLEST points on the page."""
    from matplotlib.text import Text

    shown = min(1.0, PAGE / fig.get_figwidth())
    found = {text.get_text(): text.get_fontsize() * shown for text in fig.findobj(Text) if text.get_visible()}
    return [repr(words) for words, points in found.items() if words.strip() and points < SMALLEST - 0.01]


def pictured(draw):
    """A function that draws a figure, as one that gives a `Picture`. Its docstring is the alt text."""

    @functools.wraps(draw)
    def drawn(*args, **options):
        alt = draw.__name__ if sys.flags.optimize > 1 else draw.__doc__  # python -OO leaves docstrings out.
        return picture(draw(*args, **options), alt)

    return drawn
