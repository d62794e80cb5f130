# SPDX-License-Identifier: MIT
"""Attention over two sets of keys, merged from the attention over each: the online softmax again, between whole blocks.

    lse_new = log(exp lse + exp lse_block)
    w       = exp(lse_block - lse_new)            the block's share of the sum of exp, between 0 and 1
    out_new = (1 - w) out + w out_block

The idea: out and lse say all that is needed of the keys seen so far, so no maximum and no sum need be kept or sent. out
and lse are float32 whatever type the block's result has, because a rounding here would happen once a hop. They start as
out = 0 and lse = -inf. Needs torch only.
"""

import math

import torch


def merge(out, lse, out_block, lse_block):
    """Merges a block's result into out (..., N, D) and lse (..., N), both float32, in place."""
    lse_new = torch.logaddexp(lse, lse_block)  # -inf where both are -inf
    w = (lse_block - lse_new).exp().masked_fill(lse_block == -math.inf, 0)  # -inf - (-inf) would be NaN
    out.lerp_(out_block.float(), w[..., None])
    lse.copy_(lse_new)
