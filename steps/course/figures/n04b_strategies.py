"""What notebook 04b counts, draws and breaks: tokens that hide a message, two streams, mistakes in a model on ranks."""

import torch
import torch.nn.functional as F

from steps.course.figures import ring_tables
from steps.course.figures.n04a_ring import ranks  # noqa: F401  The notebook's processes.
from steps.course.figures.picture import pictured
from steps.course.figures.plots import GREYS, INK, RANK, boxes, subplots
from steps.step04_ring import Layout, in_your_model, simulate

IGNORED = -100  # the label of a token that has no next one


def tokens_needed():
    """From how many tokens a rank on zigzag hides its messages; a block and a link as fast as in the rows."""
    recorded = ring_tables.recorded()
    speeds = simulate.read_flops(recorded)  # of the largest size, without a diagonal, as blocks of others' keys are
    flops = {pass_: max(speeds[pass_, False])[1] for pass_ in ("fwd", "bwd")}
    lines = [f"H200: forward F = {flops['fwd'] / 1e12:.0f} TFLOP/s, backward {flops['bwd'] / 1e12:.0f}"]
    for transport in simulate.TRANSPORTS:
        W, _ = simulate.read_link(recorded, transport)
        c = [simulate.tokens_needed(flops[pass_], W, pass_=pass_, transport=transport) for pass_ in ("fwd", "bwd")]
        lines.append(f"{transport}: W = {W / 1e9:.0f} GB/s; needed: forward {c[0]:,.0f} tokens, backward {c[1]:,.0f}")
    return "\n".join(lines)


@pictured
def two_streams():
    """A sketch of fetch on rank 2 of 4. The current stream computes the blocks of K2, K1, K0, K3. The side stream
    copies the rank's own k and v, passes the barrier, and copies K1, K0, K3. Arrows: lead, from the end of a copy to
    the block that reads it; follow, from the end of the block of K1 to the copy of K3, which needs the same buffer."""
    blocks = [(2 * n, 2, f"block: K{src} V{src}", RANK[src]) for n, src in enumerate((2, 1, 0, 3))]
    copies = {1: 1.1, 0: 1.8, 3: 4.25}  # where the copy of each rank's K and V begins
    side = [(0.1, 0.4, "own", RANK[2]), (0.5, 0.6, "barrier", GREYS[2])]
    side += [(start, 0.7, f"K{src} V{src}", RANK[src]) for src, start in copies.items()]
    fig, ax = subplots(figsize=(8.4, 2.3))
    for y, lane in ((0, blocks), (1, side)):
        boxes(ax, [(start, y - 0.25, length, 0.5, colour, word) for start, length, word, colour in lane])
    arrow = {"arrowstyle": "->", "color": INK, "lw": 1.6}
    for src, block in ((1, 2.1), (0, 4.1), (3, 6.1)):
        ax.annotate("", (block, 0.27), (copies[src] + 0.7, 0.73), arrowprops=arrow)
        ax.text((copies[src] + 0.7 + block) / 2 - 0.1, 0.48, "lead", ha="right", va="center", fontsize=9)
    ax.annotate("", (4.3, 0.73), (3.9, 0.27), arrowprops=arrow | {"linestyle": "--"})
    ax.text(4.3, 0.55, "follow", fontsize=9)
    ax.set(xlim=(0, 8), ylim=(1.35, -0.35), xticks=[], xlabel="time (a sketch)", title="fetch on rank 2 of 4, forward")
    ax.set_yticks((0, 1), ("current stream:\nblocks", "side stream:\ncopies"))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return fig


def mistakes_in_a_model(S=37, N=4):
    """The loss and gradients of a model on four ranks, computed by one device, right and with one mistake each."""
    tokens = torch.randint(32, (1, S), generator=torch.Generator().manual_seed(1))
    labels, layout, right = F.pad(tokens[:, 1:], (0, 1), value=IGNORED), Layout("zigzag", S, N), torch.arange(S)
    own = [layout.positions(rank) for rank in range(N)]

    def whole(parts):
        """The whole sequence of what the ranks have."""
        return torch.cat(parts)[torch.cat(own).argsort()]

    def model(positions=right, labels=labels, count=S - 1):
        def attention(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        loss, gradients = in_your_model.loss_and_gradients(tokens, labels, positions, attention, count)
        return torch.cat([loss.reshape(1), *(x.flatten() for x in gradients.values())])

    alone = [torch.where(torch.isin(right, mine), labels, IGNORED) for mine in own]
    found = {
        "right": model(),
        "positions from 0 on every rank": model(whole([torch.arange(len(mine)) for mine in own])),
        "labels shifted after the cut": model(labels=whole([F.pad(tokens[0, x][1:], (0, 1), value=-100) for x in own])),
        "mean of the ranks' means": sum(model(labels=one, count=(one != IGNORED).sum()) for one in alone) / N,
    }
    gradients = found["right"][1:]
    for name, x in found.items():
        off = (x[1:] - gradients).abs().max() / gradients.abs().max()
        print(f"{name:31} loss {x[0]:.3f}, gradients off by {off:.1%} of the largest")
