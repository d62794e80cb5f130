"""Figures in notebooks: a PNG together with a description in words."""

import base64
import io


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


def picture(fig, alt, dpi=110):
    """The matplotlib figure as a `Picture`. Its opaque white ground keeps it legible on light and on dark pages.

    The figure is closed. alt says what the figure shows, for those who do not see it; an empty one raises ValueError.
    """
    import matplotlib.pyplot as plt  # Imported here, because its import would delay `python -m steps`.
    import PIL.Image

    if not alt.strip():
        raise ValueError("picture needs alt text: one or two sentences that say what the figure shows.")
    drawn, png = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=dpi, facecolor="white", bbox_inches="tight")
    plt.close(fig)  # Jupyter would show an open figure a second time.
    # 64 colours are enough for lines, bars and text, and make the file four times smaller.
    image = PIL.Image.open(drawn).convert("RGB").quantize(64, dither=PIL.Image.Dither.NONE)
    image.save(png, format="png", optimize=True)
    return Picture(png.getvalue(), " ".join(alt.split()))
