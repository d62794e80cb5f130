# SPDX-License-Identifier: MIT
"""Attention over two sets of keys, merged from the attention over each: the online softmax again, between whole blocks.

    lse_new = log(exp lse + exp lse_block)
    w       = exp(lse_block - lse_new)            the block's share of the sum of exp, between 0 and 1
    out_new = (1 - w) out + w out_block

The idea: out and lse contain all that is needed of the keys seen so far, so no maximum and no sum need be stored or
sent. out and lse are float32 whatever dtype the block's result has, because a rounding here would happen once a hop.
They start as out = 0 and lse = -inf.

`merge` is the formula. A GPU would launch six kernels for it and read out anew at every step. So the loops in ring.py
use `Parts`: it stores the blocks' results and merges up to four of them in one kernel. Needs torch; on a GPU
also Triton and merge_kernels.py.
"""

import math
from dataclasses import dataclass, field

import torch

KERNELS = True  # whether a GPU uses merge_kernels.py; otherwise it uses the functions below, which take longer
MOST = 4  # parts that are stored before they are merged into one: the memory does not grow with the number of ranks


def merge(out, lse, out_block, lse_block):
    """Merges a block's result into out (..., n, D) and lse (..., n), both float32, in place."""
    lse_new = torch.logaddexp(lse, lse_block)  # -inf where both are -inf
    w = (lse_block - lse_new).exp().masked_fill(lse_block == -math.inf, 0)  # -inf - (-inf) would be NaN
    out.lerp_(out_block.float(), w[..., None])
    lse.copy_(lse_new)


@dataclass
class Parts:
    """The results of blocks, each over other keys, for the queries q (B, H, n, D) or a range of them."""

    q: torch.Tensor
    parts: list = field(default_factory=list)  # of (rows, out, lse)

    def add(self, rows, out, lse):
        """Takes (out, lse) of the queries in the slice `rows`, whose step is 1."""
        if len(self.parts) == MOST:
            self.parts = [(slice(0, self.q.shape[-2]), *self.merged(torch.float32))]
        self.parts.append((rows, out, lse))

    def merged(self, dtype=None):
        """(out, lse) over all keys: out in the dtype of q or in another one, lse float32."""
        shape, dtype = self.q.shape, dtype or self.q.dtype
        if KERNELS and self.parts and self.q.is_cuda:
            from . import merge_kernels

            _, out, lse = self.parts[0]
            if len(self.parts) == 1 and out.shape == shape and out.dtype == dtype:
                return out, lse
            return merge_kernels.merge(self.parts, shape, dtype)
        out = torch.zeros(shape, dtype=torch.float32, device=self.q.device)
        lse = torch.full(shape[:-1], -math.inf, dtype=torch.float32, device=self.q.device)
        for rows, *part in self.parts:
            merge(out[..., rows, :], lse[..., rows], *part)
        return out.to(dtype), lse


def add(parts, out):
    """out = the sum of the parts, added in float32 in their order and rounded once.

    out (..., n, D), contiguous, of any floating-point dtype. parts: pairs (rows, x), x being (..., len(rows), D).
    """
    if not parts:
        return out.zero_()
    if KERNELS and out.is_cuda:
        from . import merge_kernels

        return merge_kernels.add(parts, out)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for rows, x in parts:
        total[..., rows, :] += x
    return out.copy_(total)
