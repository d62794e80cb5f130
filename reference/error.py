"""How far a result may be from float64, derived from the inputs instead of a flat 1e-2.

    error     = max |result - float64|
    tolerance = 2 e + eps(dtype) max|float64| + 4 eps(float32) M,    for lse + D/16 eps(float32) M where tensor cores may be used

e is the error of plain attention: the matrix form in float32 with P, out and dS rounded to the dtype and delta taken from the
rounded out. It is computed twice, by torch's products and with every sum added term by term, as a simple kernel does; the larger
error counts. M is the largest entry of the same formula on absolute values: how much float32 summation can lose to cancellation.
The factor 2 is the rule of FlashAttention's own tests. Tensor cores multiply 16-bit inputs and cut off, instead of rounding, the
sum once every 16 products (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"); lse alone, which is float32
whatever the dtype, is exact enough to show it.
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
        plains = [_plain(q, k, v, dout, product, **options) for product in (torch.matmul, _one_by_one)]
        e = {name: max(_distance(plain[name], ref) for plain in plains) for name, ref in value.items()}
        tolerance = _tolerances(value, e, _absolute(q, k, v, dout, **options), q.dtype)
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    no_key, no_query = ~seen.any(1), ~seen.any(0)
    rows = {"out": no_key, "dq": no_key, "lse": no_key, "dk": no_query, "dv": no_query}
    exact = {name: rows[name].reshape(-1, *[1] * (name != "lse")).expand(ref.shape) for name, ref in value.items()}
    return Expected(value, tolerance, exact)


def _tolerances(value, e, absolute, dtype):
    """The formula at the head of this file, by name."""
    single, D, tolerance = _eps(torch.float32), value["dq"].shape[-1], {}
    for name, ref in value.items():
        rounding = single if name == "lse" else _eps(dtype)
        sums = 4 + (D / 16 if name == "lse" and dtype != torch.float32 else 0)
        tolerance[name] = 2 * e[name] + rounding * _largest(ref) + sums * single * absolute[name]
    return tolerance


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


def _plain(q, k, v, dout, product=torch.matmul, *, causal, scale):
    """The same results by standard attention in float32, rounding what it would store."""
    scale = attention._scale(scale, q)
    Q, dO = q.float(), dout.float()
    K, V = (attention._repeat(x.float(), q) for x in (k, v))
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    S = (scale * product(Q, K.mT)).masked_fill(~seen, -math.inf)
    lse = S.logsumexp(-1) if S.shape[-1] else S.new_full(S.shape[:-1], -math.inf)
    P = (S - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    P_stored = P.to(q.dtype).float()
    out = product(P_stored, V).to(q.dtype)
    delta = (dO * out.float()).sum(-1, keepdim=True)
    dS = (P * (product(dO, V.mT) - delta)).to(q.dtype).float()
    dk = attention._sum_groups(scale * product(dS.mT, Q), k)
    dv = attention._sum_groups(product(P_stored.mT, dO), v)
    return dict(zip(NAMES, (out, lse, scale * product(dS, K), dk, dv), strict=True))


def _absolute(q, k, v, dout, *, causal, scale):
    """The largest entry of each formula with every factor replaced by its absolute value."""
    scale = attention._scale(scale, q)
    Q, dO = q.double().abs(), dout.double().abs()
    K, V = (attention._repeat(x.double().abs(), q) for x in (k, v))
    P, _, _ = attention._probabilities(q, k, causal=causal, scale=scale)
    seen = attention.visible(q.shape[-2], k.shape[-2], causal, device=q.device)
    S = (scale * Q @ K.mT).masked_fill(~seen, -math.inf)
    dS = P * (dO @ V.mT + (dO * (P @ V)).sum(-1, keepdim=True))
    dk, dv = attention._sum_groups(scale * dS.mT @ Q, k), attention._sum_groups(P.mT @ dO, v)
    lse = S.logsumexp(-1) if S.shape[-1] else S.new_zeros(S.shape[:-1])
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
