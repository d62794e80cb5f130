"""Real input for the stages: a small byte-level language model, trained on a fixed copy of the course's pages.

The model is one causal transformer layer in plain torch. After 150 training steps its attention weights are
concentrated on few keys, as in real models, which those of random tensors are not. `attention` is an argument of the
model's forward. So one training step can run with any stage's attention, and be compared with the same step under
torch's scaled_dot_product_attention (SDPA).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# What is read is a copy, because all numbers and pictures of the model would change with every edit of a page:
# papers/*.md one after the other, and README.md, both as they were in version 0.1.0.
PAGES, README = (Path(__file__).with_name(name) for name in ("pages.txt", "readme.txt"))


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of the one sequence that the stages are run on."""

    N: int  # bytes in the sequence
    H: int  # heads
    D: int  # head_dim
    steps: int = 150  # training steps
    batch: int = 8


SMALL = Size(N=131, H=2, D=32)  # 131 is a prime number, so that no tile divides it.
LARGE = Size(N=4096, H=16, D=64, batch=4)  # for a GPU


def text() -> torch.Tensor:
    """The bytes of the course's pages as one long int64 tensor."""
    return torch.tensor(list(PAGES.read_bytes()))


class Model(nn.Module):
    """bytes (B, N) -> logits (B, N, 256): embedding, one attention block, one MLP."""

    def __init__(self, H, D):
        super().__init__()
        width = H * D
        self.H = H
        self.embed = nn.Embedding(256, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens, positions, attention):
        x = self.embed(tokens) + sinusoids(positions, self.embed.embedding_dim).to(self.embed.weight)
        q, k, v = self.heads(x)
        x = x + self.project(attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(self.norm3(x + self.mlp(self.norm2(x))))

    def heads(self, x):
        """q, k, v (B, H, N, D), strided views of one projection."""
        return self.qkv(self.norm1(x)).unflatten(-1, (3, self.H, -1)).permute(2, 0, 3, 1, 4)


def sinusoids(positions, width):
    """(N,) -> (N, width): sine and cosine of the position at falling frequencies (Vaswani et al. 2017, section 3.5)."""
    pairs = torch.arange(0, width, 2, device=positions.device)
    angles = positions[:, None] * torch.exp(pairs * (-math.log(10000) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def sdpa(q, k, v):
    """torch's own attention, with which the stages are compared inside the model."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def loss_of(model, tokens, attention, positions=None, targets=None):
    """The summed cross-entropy of predicting each next byte.

    positions and targets are given by a rank that has only a part of the sequence.
    """
    if targets is None:
        targets = tokens[:, 1:]
        tokens = tokens[:, :-1]
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    logits = model(tokens, positions, attention)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train(size, device, progress=lambda: None):
    """A model after all of its training with SDPA."""
    done = training(size, device)
    for _ in range(size.steps):
        model, _ = next(done)
        progress()
    return model


def training(size, device, attention=sdpa):
    """Yields (model, loss) after each of size.steps steps of AdamW. Model and pieces of text are the same every time.

    loss: a tensor, the mean cross-entropy of a byte in nats, before the step.
    """
    torch.manual_seed(0)
    data = text().to(device)
    model = Model(size.H, size.D).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * (64 / (size.H * size.D)) ** 0.5)
    for _ in range(size.steps):
        starts = torch.randint(len(data) - size.N - 1, (size.batch, 1))
        tokens = data[(starts + torch.arange(size.N + 1)).to(device)]
        optimizer.zero_grad()
        loss = loss_of(model, tokens, attention) / (size.batch * size.N)
        loss.backward()
        optimizer.step()
        yield model, loss.detach()


def sequence(size, device):
    """The first N + 1 bytes of the copy of README.md (1, N + 1), which every stage is run on."""
    return torch.tensor(list(README.read_bytes()[: size.N + 1]))[None].to(device)


def attention_input(model, tokens):
    """The model's own q, k, v (1, H, N, D) and the gradient dout of its loss at attention's output, detached."""
    kept = {}

    def record(q, k, v):
        kept["qkv"], kept["out"] = (q, k, v), sdpa(q, k, v)
        kept["out"].retain_grad()
        return kept["out"]

    loss_of(model, tokens, record).backward()
    return *(x.detach() for x in kept["qkv"]), kept["out"].grad


def training_step(model, tokens, attention, **part):
    """(loss, {parameter: gradient}) of one step with the given attention, both summed over the predicted bytes."""
    model.zero_grad()
    loss = loss_of(model, tokens, attention, **part)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}
