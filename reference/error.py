"""How far a result may be from float64, derived from the inputs instead of a flat 1e-2.

    error     = max |result - float64|
    tolerance = 2 e + eps(dtype) max|float64| + eps(float32) M

1. e is the error of plain attention, that is, of the matrix form in float32 with P, out and dS rounded to the dtype
   and delta computed from the rounded out. A kernel may be twice as far off, as in FlashAttention's own tests. The
   backward computes the scores a second time, and in another order of summation they are not exactly the scores that
   lse was computed from. So plain attention is computed for two pairs of orders, and the larger error counts: the
   forward's sums by torch's matrix product and the backward's one term after the other, as in a simple kernel, and
   the other way round.
   With 16 bits, the rounding of P and out moves the delta of a row by one random number. Where only a few rows count,
   these numbers can happen to be next to 0 in plain attention, and not in a kernel that rounds other numbers. For dq,
   dk, dmask and dsinks, e is therefore at least twice what such a rounding typically makes (see `_typical`).
2. eps(dtype) max|float64| allows for rounding the result itself to the dtype it is stored in. lse is stored in
   float32, dmask in the dtype of the mask, dsinks in that of the sinks.
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

Features (reference/options.py) change the scores in plain attention and in M. |S| is scale |q| |k| plus the absolute
values of the additive mask and of ALiBi. Those count only where P > 0, so a mask of -1e9 that leaves its key no weight
costs nothing; in lse they are weighted by P. The slope of the soft-cap counts as 1, dropout as its factor. With a
soft-cap and 16-bit inputs, a kernel may take the tanh of the special function unit, whose relative error is up to
2^-11. Therefore the tanh of plain attention has errors of this size then: in one pair of orders of either sign, in the
other all of one sign, which a mean over the keys, such as lse, does not reduce.
A row whose every score is swallowed by an additive mask, as float32's finfo.min does, has exactly equal P in every
float type. Of its lse only the size is compared: any finite number below -2^100 will do.

For float64 input the reference is no more exact than the result and cannot measure e. The tolerance is then that of
the same numbers in float32, times eps(float64) / eps(float32).
"""

import math
from dataclasses import dataclass, replace

import torch

from reference import attention
from reference.options import SWALLOWS, Features

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Expected:
    """For one input, by name (out, lse, ...): the float64 results, their tolerances, and what masking fixes exactly."""

    value: dict
    tolerance: dict
    exact: dict  # bool tensors: where the result must equal the reference to the bit (0 or -inf)


def expected(q, k, v, dout, *, scale=None, mask_gradient=False, **features) -> Expected:
    """The reference's results for 4-D inputs, with tolerances for their dtype.

    `features`: the fields of `reference.options.Features`. With mask_gradient=True there is "dmask" among the names.
    """
    options = dict(scale=scale, mask_gradient=mask_gradient)
    backward = attention.backward(dout, q, k, v, **options, **features)
    results = *attention.forward(q, k, v, scale=scale, **features), *backward
    value = _by_name(*results, sinks=features.get("sinks"))
    if q.dtype == torch.float64:
        single = expected(*(x.float() for x in (q, k, v, dout)), **options, **features).tolerance
        tolerance = {name: t * _eps(torch.float64) / _eps(torch.float32) for name, t in single.items()}
    else:
        tolerance = _tolerances(q, k, v, dout, value, **options, **features)
    return Expected(value, tolerance, _exact(value, q, k, Features(**features)))


def _by_name(*results, sinks=None):
    """{name: result} for out, lse, dq, dk, dv, if it is there dmask, and with sinks at last dsinks."""
    more = {} if sinks is None else {"dsinks": results[-1]}
    return dict(zip((*NAMES, "dmask"), results[: len(results) - len(more)], strict=False)) | more


def _exact(value, q, k, feature):
    """By name: where nothing is seen, so that the result is exactly 0, or -inf for lse if there is no sink either."""
    seen = feature.seen(q.shape[-2], k.shape[-2], q.device).expand(*q.shape[:-1], k.shape[-2])  # (B, H, Nq, Nk)
    no_key = ~seen.any(-1, keepdim=True)
    no_query = attention._sum_groups(seen.any(-2)[..., None].int(), k[..., :1]) == 0
    rows = {"out": no_key, "lse": value["lse"] == -math.inf, "dq": no_key, "dk": no_query, "dv": no_query}
    if "dmask" in value:
        rows["dmask"] = feature.sum_to_mask(seen.double()) == 0
    if "dsinks" in value:
        rows["dsinks"] = feature.sinks == -math.inf
    return {name: rows[name].expand(ref.shape) for name, ref in value.items()}


def _tolerances(q, k, v, dout, value, *, scale, mask_gradient, **features):
    """{name: tolerance} for 16-bit and float32 inputs, by the formula at the head of this file."""
    options = dict(scale=scale, mask_gradient=mask_gradient, **features)
    rough = q.dtype != torch.float32

    def plain_errors(**how):
        results = _plain(q, k, v, dout, **how, **options)
        return {name: _error(name, result, value[name]) for name, result in results.items()}

    one_way = plain_errors(forward_product=torch.matmul, backward_product=_one_by_one,
                           tanh=_tanh_off_either_way if rough else torch.tanh)  # fmt: skip
    other_way = plain_errors(forward_product=_one_by_one, backward_product=torch.matmul,
                             tanh=_tanh_too_small if rough else torch.tanh)  # fmt: skip
    M = _absolute(q, k, v, dout, **options)
    typical = _typical(q, k, v, dout, **options) if rough else {}
    eps = dict.fromkeys(NAMES, _eps(q.dtype)) | {"lse": _eps(torch.float32)}
    for name in ("mask", "sinks"):
        if features.get(name) is not None and features[name].is_floating_point():
            eps[f"d{name}"] = max(_eps(features[name].dtype), _eps(torch.float32))
    tolerance = {}
    for name, ref in value.items():
        e = max(one_way[name], other_way[name], 2 * typical.get(name, 0))
        tolerance[name] = 2 * e + eps[name] * _largest(ref) + _eps(torch.float32) * M[name]
    return tolerance


def errors(got: dict, want: Expected) -> dict:
    """{name: max |got - float64|} for the names in `got`.

    inf where a result has the wrong shape, is not finite, or is not exactly what masking demands.
    """
    found = {}
    for name, result in got.items():
        ref, exact = want.value[name], want.exact[name]
        result = result.double()
        right = result.shape == ref.shape and (torch.isfinite(result) & ~exact | (result == ref) & exact).all()
        found[name] = _error(name, result, ref) if right else math.inf
    return found


def failures(got: dict, want: Expected) -> dict:
    """{name: (error, tolerance)} of the results that are out of tolerance; empty if none is."""
    return {name: (e, want.tolerance[name]) for name, e in errors(got, want).items() if not e <= want.tolerance[name]}


def _one_by_one(A, B):
    """A B (..., M, N) for A (..., M, D), B (..., D, N), added up one term after the other with a rounding each."""
    total = A.new_zeros(*A.shape[:-1], B.shape[-1])
    for column, row in zip(A[..., None].unbind(-2), B[..., None, :].unbind(-3), strict=True):
        total.addcmul_(column, row)
    return total


def _tanh_off_either_way(x):
    """tanh with relative errors of 2^-11 whose sign changes irregularly: it is that of the rounding to float16."""
    exact = x.tanh()
    return exact * (1 + 2**-11 * (exact.half().float() - exact).sign() * exact.sign())


def _tanh_too_small(x):
    """tanh with a relative error of -2^-11 everywhere."""
    return (1 - 2**-11) * x.tanh()


def _plain(q, k, v, dout, *, scale=None, mask_gradient=False, forward_product=torch.matmul,
           backward_product=torch.matmul, tanh=torch.tanh, **features):  # fmt: skip
    """Plain attention's results by name: the matrix form in float32, with P, out and dS rounded to the inputs' dtype.

    The two products are functions of (A, B), each with its own order of summation; tanh is that of the soft-cap.
    """
    feature, scale = Features(**features), attention._scale(scale, q)
    Q, dO = q.float(), dout.float()
    K, V = (attention._repeat(x.float(), q) for x in (k, v))

    S = feature.scores(scale * forward_product(Q, K.mT), tanh)
    lse = attention.log_sum_exp(feature.with_sinks(S))  # a pair whose sum it is
    P = attention.probabilities(S, *lse)
    Z = feature.dropped(P)
    out = forward_product((P * Z).to(q.dtype).float(), V).to(q.dtype)

    X = scale * backward_product(Q, K.mT)
    P = attention.probabilities(feature.scores(X, tanh), *lse)
    delta = (dO * out.float()).sum(-1, keepdim=True)
    dS = P * (backward_product(dO, V.mT) * Z - delta)
    dX = (dS * feature.slope(X, tanh)).to(q.dtype).float()
    dq = scale * backward_product(dX, K)
    dk = attention._sum_groups(scale * backward_product(dX.mT, Q), k)
    dv = attention._sum_groups(backward_product((P * Z).to(q.dtype).float().mT, dO), v)
    results = [out, sum(lse)[..., 0], dq, dk, dv, *([feature.sum_to_mask(dS)] if mask_gradient else [])]
    if feature.sinks is not None:
        P_sink = attention.probabilities(feature.with_sinks(S[..., :0]), *lse)
        results.append(feature.sum_to_sinks(-P_sink * delta))
    return _by_name(*results, sinks=feature.sinks)


def _absolute(q, k, v, dout, *, scale=None, mask_gradient=False, **features):
    """M at the head of this file, by name."""
    feature, scale = Features(**features), attention._scale(scale, q)
    Q, dO = q.double().abs(), dout.double().abs()
    K, V = (attention._repeat(x.double().abs(), q) for x in (k, v))
    P, Z, _, P_sink = attention._probabilities(q, k, scale=scale, **features)
    if feature.sinks is not None:
        sizes = feature.sinks.double().abs().where(feature.sinks > -math.inf, -math.inf)
        feature = replace(feature, sinks=sizes)
    seen = feature.seen(q.shape[-2], k.shape[-2], q.device)
    products = scale * Q @ K.mT
    added = feature.added(P).masked_fill(P == 0, 0)
    S = products + added
    times = 4 if q.dtype == torch.float32 else 4 + q.shape[-1] / 16
    products = feature.with_sinks(products.masked_fill(~seen, -math.inf))
    lse = times * sum(attention.log_sum_exp(products))[..., 0] + 4 * (P * added).sum(-1)
    delta = (dO * ((P * Z) @ V)).sum(-1, keepdim=True)
    dP = (dO @ V.mT) * Z + delta
    divided = P * (4 + S.minimum(2 * (1 - P) * _row_max(feature.with_sinks(S.masked_fill(~seen, 0)))))
    P = (P * (4 + S)).clamp(max=1 / _eps(torch.float32))
    dS = P * dP
    dk, dv = attention._sum_groups(scale * dS.mT @ Q, k), attention._sum_groups((P * Z).mT @ dO, v)
    M = [(divided * Z) @ V, lse, scale * dS @ K, dk, dv, *([feature.sum_to_mask(dS)] if mask_gradient else [])]
    if feature.sinks is not None:
        size = feature.with_sinks(S[..., :0]).clamp(min=0)
        M.append(feature.sum_to_sinks((P_sink * (4 + size)).clamp(max=1 / _eps(torch.float32)) * delta))
    return {name: _largest(x) for name, x in _by_name(*M, sinks=feature.sinks).items()}


def _typical(q, k, v, dout, *, scale=None, mask_gradient=False, **features):
    """By name: how much the rounding of P and out to 16 bits typically changes the gradients, by way of delta.

    A rounding changes a number by about a quarter of eps of its size; P = 1 and an out that is a row of v are not
    changed. Of each row of a result its largest entry counts, and of these the mean of the fourth powers is taken, in
    which the larger ones prevail.
    """
    feature, scale, unit = Features(**features), attention._scale(scale, q), _eps(q.dtype) / 4
    Q, dO = q.double(), dout.double()
    K, V = (attention._repeat(x.double(), q) for x in (k, v))
    P, Z, _, P_sink = attention._probabilities(q, k, scale=scale, **features)
    if not P.numel():
        return {}
    O = (P * Z) @ V
    off_P = (unit * P).minimum(1 - P) * Z
    off_O = (unit * O.abs()).minimum((O - V.take_along_dim(P.argmax(-1)[..., None], -2)).abs())
    off_delta = ((dO * off_O).square().sum(-1) + (off_P * (dO @ V.mT)).square().sum(-1)).sqrt()[..., None]
    weight = P * feature.slope(scale * Q @ K.mT)
    dq = scale * off_delta * (weight @ K).abs()
    dk = scale * attention._sum_groups((weight * off_delta).square().mT @ Q.square(), k).sqrt()
    off = {"dq": dq, "dk": dk}
    if mask_gradient:
        off["dmask"] = feature.sum_to_mask((P * off_delta).square()).sqrt()
    if feature.sinks is not None:
        off["dsinks"] = feature.sum_to_sinks((P_sink * off_delta).square()).sqrt()
    return {name: x.amax(-1).pow(4).mean().pow(1 / 4).item() for name, x in off.items()}


def _row_max(x):
    """The maximum over the last dimension, which is kept; 0 if that dimension is empty."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def _error(name, result, ref):
    """max |result - ref|. For lse all numbers below -2^100 count as one."""
    if name == "lse":
        result, ref = result.double().clamp(min=-SWALLOWS), ref.clamp(min=-SWALLOWS)
    return _distance(result, ref)


def _distance(a, b):
    """max |a - b|, with 0 for two equal infinities; 0 for empty tensors."""
    a, b = a.double(), b.double()
    return (a - b).masked_fill(a == b, 0).abs().max().item() if a.numel() else 0.0


def _largest(x):
    """The largest absolute value in x, without infinities and what is beyond 2^100; 0 if there is no other."""
    return x.abs().where(x.abs() <= SWALLOWS, 0).max().item() if x.numel() else 0.0


def _eps(dtype):
    return torch.finfo(dtype).eps
