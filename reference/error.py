"""How far a result may be from float64, derived from the inputs instead of a flat 1e-2.

    error     = max |result - float64|
    tolerance = 2 e + eps(dtype) max|float64| + eps(float32) M

1. e is the error of plain attention, that is, of the matrix form in float32 with P, out and dS rounded to the dtype
   and delta computed from the rounded out. A kernel may be twice as far off, as in FlashAttention's own tests. The
   backward computes the scores a second time, and in another order of summation they are not exactly the scores that
   lse was computed from. So plain attention is computed for two pairs of orders, and the larger error counts: the
   forward's sums by torch's matrix product and the backward's one term after the other, as in a simple kernel, and
   the other way round.
2. eps(dtype) max|float64| allows for rounding the result itself to the dtype it is stored in. lse is stored in
   float32.
3. eps(float32) M allows for what float32 can lose on the way, even where plain attention happens to lose nothing on
   the processor that runs this. M is the largest entry of the same formulas on absolute values, so it shows how large
   the terms are that may cancel. Each P in it counts 4 + |S| times: rounding a score and lse changes each by up to
   half an eps of its size, and exp turns such a change into a relative error of P. A P between 0 and 1 cannot be off
   by more than 1, so with scores of 10^11 it counts 1 / eps(float32) times and no more. The forward divides by the sum
   of the same P, and where one P is nearly 1 this hardly depends on the scores: for out |S| is at most 2 (1 - P) times
   the row's largest |S|. So a single key gives out = v, however large its score.
   For lse, M is 4 times the log-sum-exp of the absolute scores, and for 16-bit inputs 4 + D / 16 times. Such inputs
   are multiplied by tensor cores, which truncate the sum once every 16 products instead of rounding it (Fasi et al.
   2021, "Numerical behavior of NVIDIA tensor cores"). Only lse shows this, because only lse is float32 whatever the
   dtype.

For float64 input the reference is no more exact than the result and cannot measure e. The tolerance is then that of
the same numbers in float32, times eps(float64) / eps(float32).
"""

import math
from dataclasses import dataclass

import torch

from reference import attention

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Expected:
    """For one input, by name (out, lse, ...): the float64 results, their tolerances, and what masking fixes exactly."""

    value: dict
    tolerance: dict
    exact: dict  # bool tensors: where the result must equal the reference to the bit (0 or -inf)


def expected(q, k, v, dout, *, causal=False, scale=None) -> Expected:
    """The reference's results for 4-D inputs, with tolerances for their dtype."""
    options = dict(causal=causal, scale=scale)
    results = *attention.forward(q, k, v, **options), *attention.backward(dout, q, k, v, **options)
    value = dict(zip(NAMES, results, strict=True))
    if q.dtype == torch.float64:
        single = expected(*(x.float() for x in (q, k, v, dout)), **options).tolerance
        tolerance = {name: t * _eps(torch.float64) / _eps(torch.float32) for name, t in single.items()}
    else:
        tolerance = _tolerances(q, k, v, dout, value, **options)
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    no_key, no_query = ~seen.any(1), ~seen.any(0)
    rows = {"out": no_key, "lse": no_key, "dq": no_key, "dk": no_query, "dv": no_query}
    exact = {}
    for name, ref in value.items():
        exact[name] = (rows[name] if name == "lse" else rows[name][:, None]).expand(ref.shape)
    return Expected(value, tolerance, exact)


def _tolerances(q, k, v, dout, value, **options):
    """{name: tolerance} for 16-bit and float32 inputs, by the formula at the head of this file."""
    one_way = _plain(q, k, v, dout, forward_product=torch.matmul, backward_product=_one_by_one, **options)
    other_way = _plain(q, k, v, dout, forward_product=_one_by_one, backward_product=torch.matmul, **options)
    M = _absolute(q, k, v, dout, **options)
    tolerance = {}
    for name, ref in value.items():
        e = max(_distance(one_way[name], ref), _distance(other_way[name], ref))
        stored = torch.float32 if name == "lse" else q.dtype
        tolerance[name] = 2 * e + _eps(stored) * _largest(ref) + _eps(torch.float32) * M[name]
    return tolerance


def errors(got: dict, want: Expected) -> dict:
    """{name: max |got - float64|} for the names in `got`.

    inf where a result has the wrong shape, is not finite, or is not exactly what masking demands.
    """
    found = {}
    for name, result in got.items():
        ref, exact = want.value[name], want.exact[name]
        result = result.double()
        if result.shape != ref.shape or not torch.isfinite(result[~exact]).all() or not (result == ref)[exact].all():
            found[name] = math.inf
        else:
            found[name] = _distance(result[~exact], ref[~exact])
    return found


def failures(got: dict, want: Expected) -> dict:
    """{name: (error, tolerance)} of the results that are out of tolerance; empty if none is."""
    return {name: (e, want.tolerance[name]) for name, e in errors(got, want).items() if not e <= want.tolerance[name]}


def _one_by_one(A, B):
    """A B (..., M, N) for A (..., M, D), B (..., D, N), added up one term after the other with a rounding each."""
    total = A.new_zeros(()).expand(*A.shape[:-1], B.shape[-1])
    for d in range(A.shape[-1]):
        total = torch.addcmul(total, A[..., d : d + 1], B[..., d : d + 1, :])
    return total


def _plain(q, k, v, dout, *, causal, scale, forward_product=torch.matmul, backward_product=torch.matmul):
    """Plain attention's results by name: the matrix form in float32, with P, out and dS rounded to the inputs' dtype.

    The two products are functions of (A, B), each with its own order of summation.
    """
    scale = attention._scale(scale, q)
    Q, dO = q.float(), dout.float()
    K, V = (attention._repeat(x.float(), q) for x in (k, v))
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)

    S = (scale * forward_product(Q, K.mT)).masked_fill(~seen, -math.inf)
    lse = S.logsumexp(-1) if S.shape[-1] else S.new_full(S.shape[:-1], -math.inf)
    shift = lse.nan_to_num(neginf=0.0)[..., None]  # in a row without keys -inf - (-inf) would be NaN
    P = (S - shift).exp()
    out = forward_product(P.to(q.dtype).float(), V).to(q.dtype)

    S = (scale * backward_product(Q, K.mT)).masked_fill(~seen, -math.inf)
    P = (S - shift).exp()
    delta = (dO * out.float()).sum(-1, keepdim=True)
    dS = (P * (backward_product(dO, V.mT) - delta)).to(q.dtype).float()
    dq = scale * backward_product(dS, K)
    dk = attention._sum_groups(scale * backward_product(dS.mT, Q), k)
    dv = attention._sum_groups(backward_product(P.to(q.dtype).float().mT, dO), v)
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def _absolute(q, k, v, dout, *, causal, scale):
    """M at the head of this file, by name."""
    scale = attention._scale(scale, q)
    Q, dO = q.double().abs(), dout.double().abs()
    K, V = (attention._repeat(x.double().abs(), q) for x in (k, v))
    P, _, _ = attention._probabilities(q, k, causal=causal, scale=scale)
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    S = scale * Q @ K.mT
    times = 4 if q.dtype == torch.float32 else 4 + q.shape[-1] / 16
    lse = times * S.masked_fill(~seen, -math.inf).logsumexp(-1) if S.shape[-1] else S.new_zeros(S.shape[:-1])
    dP = dO @ V.mT + (dO * (P @ V)).sum(-1, keepdim=True)
    divided = P * (4 + S.minimum(2 * (1 - P) * _row_max(S.masked_fill(~seen, 0))))
    P = (P * (4 + S)).clamp(max=1 / _eps(torch.float32))
    dS = P * dP
    dk, dv = attention._sum_groups(scale * dS.mT @ Q, k), attention._sum_groups(P.mT @ dO, v)
    return {name: _largest(x) for name, x in zip(NAMES, (divided @ V, lse, scale * dS @ K, dk, dv), strict=True)}


def _row_max(x):
    """The maximum over the last dimension, which is kept; 0 if that dimension is empty."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def _distance(a, b):
    """max |a - b|, with 0 for two equal infinities; 0 for empty tensors."""
    a, b = a.double(), b.double()
    return (a - b).masked_fill(a == b, 0).abs().max().item() if a.numel() else 0.0


def _largest(x):
    """The largest absolute value among the finite entries of x; 0 if there are none."""
    x = x[torch.isfinite(x)]
    return x.abs().max().item() if x.numel() else 0.0


def _eps(dtype):
    return torch.finfo(dtype).eps
