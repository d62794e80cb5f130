"""Attention in float64, forward and backward by formula: the one answer that every stage is compared with.

Written to be read next to the papers, not to be fast: the N x N matrices are formed.

    X = scale Q K^T    S = what reference/options.py makes of X    lse = log rowsum exp S    P = exp(S - lse)
    with sinks the sum over a row of exp S has one more term, exp sink
    O = (P . Z) V
    dV = (P . Z)^T dO     dP = (dO V^T) . Z     delta = rowsum(dO . O)     dS = P . (dP - delta)     dX = dS . dS/dX
    dQ = scale dX K       dK = scale dX^T Q     dmask = dS, summed over what the mask was broadcast over
    dsink = -exp(sink - lse) delta, summed over the rows of the head: dS of a column whose value, and so its dP, is 0

with Z = 1 without dropout, otherwise the given mask of the kept entries divided by 1 - p, and dS/dX = 1 without a
soft-cap. Source: FlashAttention, arXiv 2205.14135, section 3.1 and appendix B.2.
"""

import math

from reference.options import Features

LARGE = 2.0**24  # From here on float32 holds whole numbers only, and in lse = m + log l the log l is lost.


def forward(q, k, v, *, scale=None, **features):
    """(out, lse) in float64: out like q, lse (B, H, Nq), natural logarithm, of the final scores before dropout.

    q (B, H, Nq, D), k and v (B, Hk, Nk, D), of any real dtype and device; without B too.
    `features`: the fields of `reference.options.Features`. A query without a key gets out 0, lse -inf or the sink.
    """
    P, Z, lse, _ = _probabilities(q, k, scale=scale, **features)
    return (P * Z) @ _repeat(v.double(), q), lse


def backward(dout, q, k, v, *, scale=None, mask_gradient=False, **features):
    """(dq, dk, dv) in float64, shaped like q, k and v, by the formulas above (no autograd).

    With mask_gradient=True there is also dmask, shaped like the additive mask, and with sinks, at last, dsinks (H,).
    """
    feature = Features(**features)
    P, Z, _, P_sink = _probabilities(q, k, scale=scale, **features)
    dO, Q, K, V = dout.double(), q.double(), _repeat(k.double(), q), _repeat(v.double(), q)
    O = (P * Z) @ V  # (B, H, Nq, D)
    dV = (P * Z).mT @ dO  # (B, H, Nk, D)
    dP = (dO @ V.mT) * Z  # (B, H, Nq, Nk)
    delta = (dO * O).sum(-1, keepdim=True)  # (B, H, Nq, 1)
    dS = P * (dP - delta)
    scale = _scale(scale, q)
    dX = dS * feature.slope(scale * Q @ K.mT)
    dQ, dK = scale * dX @ K, scale * dX.mT @ Q
    gradients = dQ, _sum_groups(dK, k), _sum_groups(dV, v)
    if mask_gradient:
        gradients += (feature.sum_to_mask(dS),)
    return gradients if feature.sinks is None else (*gradients, feature.sum_to_sinks(-P_sink * delta))


def visible(Nq, Nk, causal=False, window=None, device="cpu", first_query=None, first_key=0):
    """(Nq, Nk) bool: which keys each query sees, by position alone. The arguments are those of `Features`."""
    feature = Features(causal=causal, window=window, first_query=first_query, first_key=first_key)
    return feature.seen(Nq, Nk, device)[0, 0]


def scores(q, k, *, scale=None, **features):
    """S (B, H, Nq, Nk) in float64, -inf where a key is hidden. `features`: the fields of `Features`."""
    return Features(**features).scores(_scale(scale, q) * q.double() @ _repeat(k.double(), q).mT)


def log_sum_exp(S):
    """(large, rest), each (..., Nq, 1), whose sum is lse; 0 and -inf for a row of -inf.

    `large` is the row's maximum m where |m| is so large that lse = m + log l has no room for log l, otherwise 0.
    """
    if not S.shape[-1]:
        return S.new_zeros(*S.shape[:-1], 1), S.new_full((*S.shape[:-1], 1), -math.inf)
    m = S.detach().amax(-1, keepdim=True)
    large = m.where(m.isfinite() & (m.abs() > LARGE), 0)
    return large, (S - large).logsumexp(-1, keepdim=True)


def probabilities(S, large, rest):
    """P = exp(S - lse) for lse = large + rest, and 0 in a row without keys, where it is exp(-inf - 0)."""
    return (S - large - rest.nan_to_num(neginf=0.0)).exp()


def _probabilities(q, k, *, scale=None, **features):
    """P (B, H, Nq, Nk), the dropout factor Z, lse (B, H, Nq), and the sinks' P (B, H, Nq, 1), or (B, H, Nq, 0)."""
    feature = Features(**features)
    S = feature.with_sinks(scores(q, k, scale=scale, **features))
    large, rest = log_sum_exp(S)
    P, P_sink = probabilities(S, large, rest).tensor_split([k.shape[-2]], -1)
    return P, feature.dropped(P), (large + rest)[..., 0], P_sink


def _scale(scale, q):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _repeat(x, q):
    """k or v (B, Hk, N, D) with each head repeated for its H / Hk query heads."""
    H, Hk = q.shape[-3], x.shape[-3]
    return x if Hk == H else x.repeat_interleave(H // Hk, dim=-3)


def _sum_groups(grad, x):
    """The gradient of `_repeat`: (B, H, N, D) summed over each group of query heads, to the shape of x."""
    if grad.shape == x.shape:
        return grad
    H, Hk = grad.shape[-3], x.shape[-3]
    return grad.unflatten(-3, (Hk, H // Hk)).sum(-3)
