"""Places in memory for an operand that is unlike the others, for tests that change one operand at a time."""

import mmap

import torch


def unaligned(x):
    """It begins one element after a multiple of 16 bytes, where the copy engine cannot read."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def strided(x):
    """After each of its rows of numbers, or each number if x is no (B, H, N, D), lies another one, that is NaN."""
    dim = x.ndim - (2 if x.ndim == 4 else 1)
    if dim < 0:
        return x
    other = torch.full_like(x, torch.nan if x.is_floating_point() else 1)
    return torch.stack([x, other], dim + 1).flatten(dim, dim + 1).unfold(dim, 1, 2).squeeze(-1)


def expanded(x):
    """All heads, or all rows of a batch entry of lse, are one in memory: these are other numbers."""
    return x[:, :1].expand_as(x)


def negated(x):
    """Torch reads the numbers of x, and memory has them with the other sign, as of z.conj().imag."""
    return torch._neg_view(-x)


def heads_inside(x):
    """Dense, but in the order (B, N, H, D) of most models, so that `empty_like` gives these strides, too."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def batch_inside(x):
    """Dense, but in the order (N, B, H, D), or that of nn.MultiheadAttention without batch_first."""
    rest = range(3, x.ndim)
    return x.permute(2, 0, 1, *rest).contiguous().permute(1, 2, 0, *rest)


DENSE = {"heads inside": heads_inside, "batch inside": batch_inside}
PLACES = {"unaligned": unaligned, "strided": strided, "expanded": expanded, "negated": negated}


def far(x, *strides):
    """x with these strides. Of the addresses between its rows only those that are written to take memory.

    A distance of 2^31 entries and more, computed in 32 bits, would lead to another of these addresses, which has 0.
    """
    end = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, a name that Python has from 3.13 on
    memory = mmap.mmap(-1, (2**31 + end) * x.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides, 2**31).copy_(x)
