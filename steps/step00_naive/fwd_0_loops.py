# SPDX-License-Identifier: MIT
"""Rung 0, "loops": attention as three nested loops over plain Python numbers.

    for each query i:
        for each key j:
            s_j = scale * sum over d of q_id * k_jd           the score: how well query i matches key j
        p_j   = exp(s_j - max s) / sum of exp(s - max s)      softmax: scores become weights that add up to 1
        out_i = sum over j of p_j * v_j                       the weighted mean of the values

The idea: attention is a lookup with soft weights, and these three loops are all of it. Left out: speed, which begins
with rung 1, and any care for memory. Torch is needed only to unpack and pack the tensors.
"""

import math

import torch


def forward(q, k, v, *, causal=False, scale=None):
    """(out, lse): q (B, H, Nq, D), k and v (B, H, Nk, D) float; out like q, lse (B, H, Nq).

    A query that sees no key gets out 0 and lse -inf. Source: Vaswani et al. 2017, section 3.2.1.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = zip(*(x.flatten(0, 1).tolist() for x in (q, k, v)), strict=True)
    results = [attend(Q, K, V, causal, scale) for Q, K, V in heads]
    out = torch.tensor([out for out, _ in results], dtype=q.dtype, device=q.device)
    lse = torch.tensor([lse for _, lse in results], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def attend(Q, K, V, causal, scale):
    """One head: lists of Nq queries, Nk keys, Nk values -> (Nq rows of out, Nq numbers lse)."""
    out, lse = [], []
    for i, q_i in enumerate(Q):
        # The last key that query i sees. When causal, the diagonal ends in the bottom right corner.
        last = i + len(K) - len(Q) if causal else len(K) - 1
        scores = [scale * dot(q_i, k_j) for k_j in K[: last + 1]] if last >= 0 else []
        weights, lse_i = softmax(scores)
        out.append([sum(p * v_j[d] for p, v_j in zip(weights, V, strict=False)) for d in range(len(q_i))])
        lse.append(lse_i)
    return out, lse


def dot(a, b):
    """The scalar product of two lists of numbers."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores):
    """(weights that add up to 1, log of the sum of exp). Without a score above -inf: weights 0, and -inf."""
    # exp of a large score overflows. Minus the maximum, the largest exponent is 0, and exp(-m) cancels in the quotient.
    m = max(scores, default=-math.inf)
    if m == -math.inf:
        return [0.0] * len(scores), -math.inf  # -inf - (-inf) would be NaN
    exps = [math.exp(s - m) for s in scores]
    l = sum(exps)
    return [e / l for e in exps], m + math.log(l)
