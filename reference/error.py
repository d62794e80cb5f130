"""How far a result may be from float64, derived from the inputs instead of a flat 1e-2.

    error     = max |result - float64|
    tolerance = 2 e + eps(dtype) max|float64| + eps(float32) M

e is the error of plain attention: the matrix form in float32 with P, out and dS rounded to the dtype and delta taken from the
rounded out. It is computed twice, and the larger error counts: the forward sums up by torch's products and the backward by one
addition a term, as a simple kernel does, then the other way round, because scores that are computed again need not be those that
lse was made of. The factor 2 is the rule of FlashAttention's own tests.
M is the largest entry of the same formula on absolute values, each P counted 4 + |S| times: what float32 can lose to cancellation
and to the rounding of a score and of lse, half an eps of their size each, which exp turns into a relative error of P. That plain
attention is spared it on one processor does not help a kernel on another. lse is counted 4 times and, for 16-bit inputs, D/16
times more: tensor cores, which multiply those, cut off the sum instead of rounding it, once every 16 products (Fasi et al. 2021,
"Numerical behavior of NVIDIA tensor cores"), and lse alone, float32 whatever the dtype, is exact enough to show it.
float64 input gets the tolerance of the same numbers in float32, times eps(float64) / eps(float32): the reference, being float64
itself, cannot measure e there.
"""

import math
from dataclasses import dataclass

import torch

from reference import attention

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Expected:
    """For one input: the float64 results, their tolerances, and what masking fixes exactly, each by name (out, lse, ...)."""

    value: dict
    tolerance: dict
    exact: dict  # bool tensors: where the result must equal the reference to the bit (0 or -inf)


def expected(q, k, v, dout, *, causal=False, scale=None) -> Expected:
    """The reference's results for 4-D inputs, with tolerances for their dtype."""
    options = dict(causal=causal, scale=scale)
    value = dict(zip(NAMES, (*attention.forward(q, k, v, **options), *attention.backward(dout, q, k, v, **options)), strict=True))
    if q.dtype == torch.float64:
        single = expected(*(x.float() for x in (q, k, v, dout)), **options).tolerance
        tolerance = {name: t * _eps(torch.float64) / _eps(torch.float32) for name, t in single.items()}
    else:
        orders = (torch.matmul, _one_by_one), (_one_by_one, torch.matmul)
        plains = [_plain(q, k, v, dout, *order, **options) for order in orders]
        e = {name: max(_distance(plain[name], ref) for plain in plains) for name, ref in value.items()}
        tolerance = _tolerances(value, e, _absolute(q, k, v, dout, **options), q.dtype)
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    no_key, no_query = ~seen.any(1), ~seen.any(0)
    rows = {"out": no_key, "dq": no_key, "lse": no_key, "dk": no_query, "dv": no_query}
    exact = {name: rows[name].reshape(-1, *[1] * (name != "lse")).expand(ref.shape) for name, ref in value.items()}
    return Expected(value, tolerance, exact)


def _tolerances(value, e, absolute, dtype):
    """The formula at the head of this file, by name."""
    single = _eps(torch.float32)
    rounding = {name: single if name == "lse" else _eps(dtype) for name in value}
    return {name: 2 * e[name] + rounding[name] * _largest(ref) + single * absolute[name] for name, ref in value.items()}


def errors(got: dict, want: Expected) -> dict:
    """{name: max |got - float64|} for the names in `got`; inf where got is not finite or not exactly what masking demands."""
    found = {}
    for name, result in got.items():
        ref, exact = want.value[name], want.exact[name]
        result = result.double()
        ok = result.shape == ref.shape and bool(torch.isfinite(result[~exact]).all()) and bool((result == ref)[exact].all())
        found[name] = _distance(result[~exact], ref[~exact]) if ok else math.inf
    return found


def failures(got: dict, want: Expected) -> dict:
    """{name: (error, tolerance)} of what is out of tolerance; empty when all is well."""
    return {name: (e, want.tolerance[name]) for name, e in errors(got, want).items() if not e <= want.tolerance[name]}


def _one_by_one(A, B):
    """A B (..., M, N) for A (..., M, D), B (..., D, N): one rounded addition a term."""
    total = A.new_zeros(()).expand(*A.shape[:-1], B.shape[-1])
    for d in range(A.shape[-1]):
        total = torch.addcmul(total, A[..., d : d + 1], B[..., d : d + 1, :])
    return total


def _plain(q, k, v, dout, product=torch.matmul, again=torch.matmul, *, causal, scale):
    """The same results by standard attention in float32, rounding what it would store; `again` is the backward's product."""
    scale = attention._scale(scale, q)
    Q, dO = q.float(), dout.float()
    K, V = (attention._repeat(x.float(), q) for x in (k, v))
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    S, S_again = ((scale * sum_up(Q, K.mT)).masked_fill(~seen, -math.inf) for sum_up in (product, again))
    lse = S.logsumexp(-1) if S.shape[-1] else S.new_full(S.shape[:-1], -math.inf)
    P, P_again = ((x - lse.nan_to_num(neginf=0.0)[..., None]).exp() for x in (S, S_again))
    out = product(P.to(q.dtype).float(), V).to(q.dtype)
    delta = (dO * out.float()).sum(-1, keepdim=True)
    dS = (P_again * (again(dO, V.mT) - delta)).to(q.dtype).float()
    dk = attention._sum_groups(scale * again(dS.mT, Q), k)
    dv = attention._sum_groups(again(P_again.to(q.dtype).float().mT, dO), v)
    return dict(zip(NAMES, (out, lse, scale * again(dS, K), dk, dv), strict=True))


def _absolute(q, k, v, dout, *, causal, scale):
    """M at the head of this file, by name."""
    scale = attention._scale(scale, q)
    Q, dO = q.double().abs(), dout.double().abs()
    K, V = (attention._repeat(x.double().abs(), q) for x in (k, v))
    P, _, _ = attention._probabilities(q, k, causal=causal, scale=scale)
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    S, cut_off = scale * Q @ K.mT, 0 if q.dtype == torch.float32 else q.shape[-1] / 16
    dP = dO @ V.mT + (dO * (P @ V)).sum(-1, keepdim=True)
    P = P * (4 + S)
    dS = P * dP
    dk, dv = attention._sum_groups(scale * dS.mT @ Q, k), attention._sum_groups(P.mT @ dO, v)
    lse = (4 + cut_off) * S.masked_fill(~seen, -math.inf).logsumexp(-1) if S.shape[-1] else S.new_zeros(S.shape[:-1])
    return {name: _largest(x) for name, x in zip(NAMES, (P @ V, lse, scale * dS @ K, dk, dv), strict=True)}


def _distance(a, b):
    """max |a - b|, where equal infinities are no distance; 0 for empty tensors."""
    a, b = a.double(), b.double()
    return (a - b).masked_fill(a == b, 0).abs().max().item() if a.numel() else 0.0


def _largest(x):
    x = x[torch.isfinite(x)]
    return x.abs().max().item() if x.numel() else 0.0


def _eps(dtype):
    return torch.finfo(dtype).eps
