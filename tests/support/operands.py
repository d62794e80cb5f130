"""Places in memory for an operand that is unlike the others, for tests that change one operand at a time."""

import math
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


def scores_whose_roundings_add_up(D, dtype, count=40, scale=0.693387508392334):
    """(q (1, 1, count, D), k (1, 1, 1, D), scale, lse): scores up to 2^30 of a single key, exact in any order of sums.

    A backward computes P = 2^(c S - lse_2) with lse_2 = lse log2(e) and c = scale log2(e). Here the roundings of lse,
    of c, of log2(e) and of the product lse_2 go the same way, and make lse_2 too large by more than 2^-23 of it.
    `scale` is a float32 for which many scores are such.
    """
    rng = torch.Generator().manual_seed(0)
    parts = torch.randint(128, 256, (3, 2**18), generator=rng)  # bfloat16 has 8 bits
    S = (parts.mT.double() @ torch.tensor([2.0**22, 2.0**14, 2.0**6], dtype=torch.float64)).float()
    lse = (S.double() * scale).float()
    lse_2 = lse * torch.tensor(1 / math.log(2))
    too_large = lse_2.double() - S.double() * torch.tensor(scale / math.log(2)).double()
    worst = (too_large / lse_2).topk(count).indices
    q, k = torch.zeros(1, 1, count, D), torch.zeros(1, 1, 1, D)
    q[0, 0, :, :3] = parts[:, worst].mT * torch.tensor([2.0**8, 2.0**4, 1.0])
    k[0, 0, 0, :3] = torch.tensor([2.0**14, 2.0**10, 2.0**6])
    assert (too_large[worst] > 2.3 * 2**-24 * lse_2[worst]).all()
    return q.to(dtype), k.to(dtype), scale, lse[worst].view(1, 1, count)
