"""Does a model learn the same with the stages as with SDPA? It is trained with each of them from one seed.

    python -m steps.course.demo.training          trains on this machine, and prints how far the losses lie apart
    python -m steps.course.demo.training --record writes <gpu>.training.json among the results, which the page shows
    python -m steps.course.demo.training --draw   draws the page's picture of that record

In float32 all stages take part, stage 04 as a ring of one rank. In bfloat16, where attention alone computes in 16 bits,
those do whose kernels use tensor cores.
Two trainings of one seed stay together at first and then part slowly, even with equal formulas: a sum in another order
differs in its last bit, and training makes more of it. So SDPA is there twice, by two of torch's kernels.
"""

import statistics
from functools import partial
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel

from steps import engine
from steps.catalogue import stage
from steps.course.bench import rows
from steps.course.demo.model import LARGE, Size, sdpa, training
from steps.course.figures.plots import COLOURS, GREYS, subplots
from steps.places import ROOT, require_clone

SIZE = Size(N=1024, H=8, D=64, steps=300, batch=8)
PICTURE = ROOT / "notebooks" / "figures" / "training.png"
SDPA, MATH = "SDPA", "SDPA, math"


def by_math(q, k, v):
    """torch's attention by its plain formula."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def in_16_bits(attention, q, k, v):
    """The attention on q, k and v rounded to bfloat16; the rest of the model stays in float32."""
    return attention(*(x.bfloat16() for x in (q, k, v))).to(q.dtype)


def attentions(dtype, numbers=None):
    """{name: attention(q, k, v)}: SDPA twice, and the stages that take this dtype."""
    numbers = numbers or {"float32": ("00", "01", "02", "03", "04"), "bfloat16": ("02", "03")}[dtype]
    found = {SDPA: sdpa, MATH: by_math} | {number: partial(stage(number).attention, causal=True) for number in numbers}
    if "00" in found:
        found["00"] = partial(found["00"], rung="matrix")  # its tiles are Python's loops, which take seconds on a GPU
    return found if dtype == "float32" else {name: partial(in_16_bits, one) for name, one in found.items()}


def curve(size, attention):
    """The losses of a training, in nats a byte."""
    return [round(x, 5) for x in torch.stack([loss for _, loss in training(size, engine.device, attention)]).tolist()]


def apart(losses):
    """{name: the largest difference of its losses from SDPA's}."""
    pairs = {name: zip(curve, losses[SDPA], strict=True) for name, curve in losses.items() if name != SDPA}
    return {name: max(abs(a - b) for a, b in both) for name, both in pairs.items()}


def tokens_a_second(size, found):
    """{name: tokens a second of a training step}; the candidates take turns, and the first two steps do not count."""
    runs = {name: training(size, engine.device, attention) for name, attention in found.items()}
    ms = {name: [] for name in runs}
    for n in range(size.steps):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            next(run)
            end.record()
            end.synchronize()
            if n >= 2:
                ms[name].append(start.elapsed_time(end))
    return {name: size.batch * size.N / (1e-3 * statistics.median(one)) for name, one in ms.items()}


def draw():
    """The losses of the record: the curves of each dtype, and how far each is from SDPA's."""
    losses = rows.read_record("training")["losses"]
    fig, axes = subplots(2, 2, figsize=(8.5, 5.4), sharex=True, height_ratios=(2, 1))
    for (dtype, curves), (above, below) in zip(losses.items(), axes.T, strict=True):
        for n, (name, one) in enumerate(curves.items()):
            about = name if "SDPA" in name else f"stage {name}"
            looks = dict(color=GREYS[n]) if "SDPA" in name else dict(color=COLOURS[int(name)])
            above.plot(one, **looks, lw=1.2, label=about)
            if name != SDPA:
                distance = [max(abs(a - b), 1e-5) for a, b in zip(one, curves[SDPA], strict=True)]
                below.semilogy(distance, **looks, lw=0.8)
        above.set(title=f"attention in {dtype}", ylabel="loss, nats a byte")
        above.legend()
        below.set(xlabel="training step", ylabel="from SDPA's", ylim=(1e-5, 1))
    PICTURE.parent.mkdir(exist_ok=True)
    fig.savefig(PICTURE, dpi=110, facecolor="white")
    plt.close(fig)


def main(
    record: Annotated[bool, typer.Option("--record", help="Write the results that the page shows.")] = False,
    drawn: Annotated[bool, typer.Option("--draw", help="Only draw the page's picture of what is recorded.")] = False,
):
    if record or drawn:
        require_clone("--record" if record else "--draw")
    if drawn:
        return draw()
    size = SIZE if engine.name == "cuda" else Size(N=33, H=1, D=32, steps=5, batch=2)
    made = {"size": vars(size), "losses": {}}
    for dtype in ("float32", "bfloat16") if engine.name == "cuda" else ("float32",):
        made["losses"][dtype] = {name: curve(size, one) for name, one in attentions(dtype).items()}
        for name, distance in apart(made["losses"][dtype]).items():
            print(f"{dtype}: {name:10} at most {distance:.1e} nats from SDPA")
    if engine.name == "cuda":
        speeds = Size(**vars(LARGE) | {"steps": 32})
        made["speed"] = {"size": vars(speeds), "tokens": tokens_a_second(speeds, attentions("bfloat16"))}
        print({name: f"{tokens:.3g} tokens a second" for name, tokens in made["speed"]["tokens"].items()})
    if record:
        made |= rows.provenance()
        print(rows.write_record("training", made))


if __name__ == "__main__":
    typer.run(main)
