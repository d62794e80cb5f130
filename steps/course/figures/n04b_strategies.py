"""What notebook 04b counts and breaks: the tokens that hide a message, and mistakes in a model on several ranks."""

import torch
import torch.nn.functional as F

from steps.course.figures import ring_tables
from steps.course.figures.n04a_ring import ranks  # noqa: F401  The notebook's processes.
from steps.step04_ring import Layout, in_your_model, simulate

IGNORED = -100  # the label of a token that has no next one


def tokens_needed():
    """From how many tokens a rank on zigzag hides its messages; a block and a link as fast as in the rows."""
    recorded = ring_tables.recorded()
    speeds = simulate.read_flops(recorded)  # of the largest size, without a diagonal, as blocks of others' keys are
    flops = {pass_: max(speeds[pass_, False])[1] for pass_ in ("fwd", "bwd")}
    lines = [f"H200: forward F = {flops['fwd'] / 1e12:.0f} TFLOP/s, backward {flops['bwd'] / 1e12:.0f}"]
    for transport in simulate.TRANSPORTS:
        W, latency = simulate.read_link(recorded, transport)
        c = [simulate.tokens_needed(flops[pass_], W, pass_=pass_, transport=transport) for pass_ in ("fwd", "bwd")]
        link = f"{transport}: W = {W / 1e9:.0f} GB/s, {1e6 * latency:.0f} us a message"
        lines.append(f"{link}; needed: forward {c[0]:,.0f} tokens, backward {c[1]:,.0f}")
    return "\n".join(lines)


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
