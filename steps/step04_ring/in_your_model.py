# SPDX-License-Identifier: MIT
"""The ring in a model: a decoder of two layers whose sequence several ranks share, beside the same on one device.

    tokens, labels     shifted on the whole sequence, then cut: the next token may be on another rank
    rotary embedding   by Layout.positions(rank), where a model on one device has arange(S)
    attention          the ring's; everything else acts on each position alone, and needs no change
    loss               the sum over the rank's labels, divided by the number of labels of *all* ranks
    gradients          summed over the ranks, once, when the backward is done
    sinks              one part more, merged into the ring's result: see WithSinks; the decoder here has none

The idea: a mean over each rank's own labels would give the labels of shorter shards a larger weight. So the sum is
divided by the number of all labels. Grouped heads (H = 4, Hk = 2) need nothing: the ring sends Hk heads. `python -m
steps.step04_ring.in_your_model` compares both losses and all gradients. Left out: an optimizer and other parallelism.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from steps import engine
from steps.step04_ring import Layout, backward, forward, launch, ring_attention
from steps.step04_ring.merge import merge

VOCABULARY, H, HK, D = 32, 4, 2, 16


def rotated(x, positions):
    """x (B, H, n, D) with the rotary embedding of its positions (n,)."""
    angle = positions[:, None] / 10000 ** (torch.arange(0, D, 2, device=x.device) / D)  # (n, D / 2)
    even, odd = x.unflatten(-1, (2, D // 2)).unbind(-2)
    return torch.cat([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1)


class WithSinks(torch.autograd.Function):
    """out of the ring with attention sinks (H,), as gpt-oss learns them: WithSinks.apply(q, k, v, sinks, options).

    A sink is one more key, of this score and of value 0, for every row. The ring does not need it: a part of out = 0
    and lse = sink is merged once, into the rows of each rank. Then out and lse belong to all keys and the sink, and
    lead to the right dq, dk and dv. dsinks comes from this rank's rows, and is to be summed like every gradient.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, options):
        out, lse = forward(q, k, v, **options)
        total = out.float()
        merge(total, lse, torch.zeros_like(total), sinks.float()[:, None].expand_as(lse))
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        delta = (dout.float() * out.float()).sum(-1)  # (B, H, n)
        P = (sinks.float()[:, None] - lse).exp()
        dsinks = -(P * delta).sum((0, 2)).to(sinks.dtype)
        return *backward(dout, q, k, v, out, lse, **ctx.options), dsinks, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(H * D), nn.Linear(H * D, (H + 2 * HK) * D), nn.Linear(H * D, H * D)
        self.mlp = nn.Sequential(nn.RMSNorm(H * D), nn.Linear(H * D, 64), nn.GELU(), nn.Linear(64, H * D))

    def forward(self, x, positions, attention):
        heads = self.qkv(self.norm(x)).unflatten(-1, (H + 2 * HK, D)).transpose(1, 2)  # (B, H + 2 Hk, n, D)
        q, k, v = heads.split([H, HK, HK], dim=1)
        q, k = rotated(q, positions), rotated(k, positions)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, H * D), nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens, positions, attention):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return x @ self.embedding.weight.T / (H * D) ** 0.5  # (B, n, VOCABULARY)


def loss_and_gradients(tokens, labels, positions, attention, count):
    """(the part of the mean loss that comes from these labels, its gradients by name); the same weights on every rank.

    count: the number of labels in the whole sequence.
    """
    torch.manual_seed(0)
    model = Decoder().to(tokens.device)
    logits = model(tokens, positions, attention)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def compare(S=37, layout="zigzag", block=None):
    """{what: the largest difference between the ranks' model and one device's}. Every rank calls."""
    device = engine.device
    tokens = torch.randint(VOCABULARY, (1, S), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100  # the last token has no next one
    count = (labels != -100).sum()  # of the whole sequence

    rank, whole = dist.get_rank(), Layout(layout, S, dist.get_world_size())
    mine = [whole.shard(x, rank, dim=1) for x in (tokens, labels)]

    def ring(q, k, v):
        return ring_attention(q, k, v, causal=True, layout=layout, S=S, block=block)

    loss, gradients = loss_and_gradients(*mine, whole.positions(rank).to(device), ring, count)
    for x in (loss, *gradients.values()):
        dist.all_reduce(x)

    def one_device(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    want, wanted = loss_and_gradients(tokens, labels, torch.arange(S, device=device), one_device, count)
    both = {"loss": (loss, want)} | {name: (gradients[name], wanted[name]) for name in wanted}
    return {name: (x - y).abs().max().item() for name, (x, y) in both.items()}


if __name__ == "__main__":
    found = launch.spawn(compare, 2)[0]
    print(f"largest differences to one device: loss {found.pop('loss'):.1e}, gradients {max(found.values()):.1e}")
