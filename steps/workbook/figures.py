"""Figures in notebooks: a PNG that carries its description."""

import base64
import io


class Picture:
    """A PNG with alt text, as the value of a notebook cell.

    The description travels in the output's metadata (`image/png` -> `alt`) and as its plain text, so that readers who do not see
    the picture get the words. PNG is what every viewer shows of a notebook that it does not trust.
    """

    def __init__(self, png, alt):
        self.png, self.alt = png, alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/png": base64.b64encode(self.png).decode()}, {"image/png": {"alt": self.alt}}

    def __repr__(self):
        return f"Figure: {self.alt}"


def picture(fig, alt, dpi=110):
    """The matplotlib figure as a `Picture` on opaque white, legible on light and dark pages; the figure itself is closed.

    alt says what is to be seen, for those who do not see it. Raises ValueError when it is empty.
    """
    import matplotlib.pyplot as plt  # here, so that `python -m steps` need not wait for it
    import PIL.Image

    if not alt.strip():
        raise ValueError("picture needs alt text: one or two sentences that say what the figure shows.")
    drawn, png = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=dpi, facecolor="white", bbox_inches="tight")
    plt.close(fig)  # or Jupyter would show it a second time
    # 64 colours are enough for lines, bars and text, and make a quarter of the file.
    PIL.Image.open(drawn).convert("RGB").quantize(64, dither=PIL.Image.Dither.NONE).save(png, format="png", optimize=True)
    return Picture(png.getvalue(), " ".join(alt.split()))
