"""The gradient of an additive mask that all batch entries, all heads, or both share.

A program owns one tile of the mask's gradient and visits every batch entry and head that uses it. Nobody else writes to
the tile, so that no atomic addition is needed, and the sum has the same order and the same bits in each run.
"""

import functools

import torch
import triton
import triton.language as tl

from reference import attention, error
from steps import engine
from steps.course.workbook import differences
from steps.course.workbook.puzzles import Case, mistake


def specification(q, k, v, mask, dout, scale):
    """dmask like mask (B or 1, H or 1, Nq, Nk); q, k, v, dout (B, H, N, D). torch sums over what it has broadcast."""
    mask = mask.double().requires_grad_()
    S = scale * q.double() @ k.double().mT + mask
    out = S.softmax(-1) @ v.double()
    out.backward(dout.double())
    return {"dmask": mask.grad}


@triton.jit
def load_rows(x, bh, first, N, ROWS: tl.constexpr, D: tl.constexpr):
    """The tile (ROWS, D) of head bh of x (B * H, N, D) that begins at row `first`, with zeros beyond the last row."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    return tl.load(x + (bh * N + row) * D + column, mask=row < N, other=0.0)


@triton.jit
def load_numbers(x, bh, first, N, ROWS: tl.constexpr):
    """The numbers (ROWS,) of head bh of x (B * H, N) from row `first` on, with zeros beyond the last row."""
    row = first + tl.arange(0, ROWS)
    return tl.load(x + bh * N + row, mask=row < N, other=0.0)


@triton.jit
def products(q, k, v, dout, bh, i, j, Nq, Nk, Br: tl.constexpr, Bc: tl.constexpr, D: tl.constexpr):
    """(Q_i K_j^T, dO_i V_j^T), two tiles (Br, Bc) of head bh; the first one is not scaled, the second one is dP."""
    Q_i, dO_i = load_rows(q, bh, i, Nq, Br, D), load_rows(dout, bh, i, Nq, Br, D)
    K_j, V_j = load_rows(k, bh, j, Nk, Bc, D), load_rows(v, bh, j, Nk, Bc, D)
    return tl.dot(Q_i, tl.trans(K_j), input_precision="ieee"), tl.dot(dO_i, tl.trans(V_j), input_precision="ieee")


@triton.jit
def mask_gradient(
    M, i, j, bm, hm, Bm, Hm, q, k, v, dout, lse, delta, B, H, Nq, Nk, scale,
    Br: tl.constexpr, Bc: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The gradient (Br, Bc) of the mask's tile M (Br, Bc) at query i and key j, summed over all who share the tile.

    The mask has Bm x Hm entries, Bm either B or 1 and Hm either H or 1, and M belongs to entry (bm, hm). Head h of
    batch entry b is number b * H + h for `products(q, k, v, dout, number, i, j, Nq, Nk, Br, Bc, D)` and for
    `load_numbers(lse, number, i, Nq, Br)`, which also loads delta.
    """
    dM = tl.zeros((Br, Bc), tl.float32)
    for b in range(bm, B, Bm):  # all of them if Bm is 1, and only bm if it is B
        for h in range(hm, H, Hm):
            S, dP = products(q, k, v, dout, b * H + h, i, j, Nq, Nk, Br, Bc, D)
            lse_i, delta_i = load_numbers(lse, b * H + h, i, Nq, Br), load_numbers(delta, b * H + h, i, Nq, Br)
            P = tl.exp(scale * S + M - lse_i[:, None])
            dM += P * (dP - delta_i[:, None])
    return dM


@triton.jit(do_not_specialize=["B", "H", "Bm", "Hm", "Nq", "Nk"])
def dmask_kernel(
    dmask, mask, q, k, v, dout, lse, delta, B, H, Bm, Hm, Nq, Nk, scale,
    Br: tl.constexpr, Bc: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    i, j, n = tl.program_id(0) * Br, tl.program_id(1) * Bc, tl.program_id(2)
    row, column = i + tl.arange(0, Br)[:, None], j + tl.arange(0, Bc)[None, :]
    place, exists = (n * Nq + row) * Nk + column, (row < Nq) & (column < Nk)
    M = tl.load(mask + place, mask=exists, other=0.0)
    dM = mask_gradient(
        M, i, j, n // Hm, n % Hm, Bm, Hm, q, k, v, dout, lse, delta, B, H, Nq, Nk, scale, Br, Bc, D
    )  # fmt: skip
    tl.store(dmask + place, dM, mask=exists)


def run(q, k, v, mask, dout, scale):
    """{"dmask"} from a grid with a program for each tile of the mask."""
    out, lse = attention.forward(q, k, v, scale=scale, mask=mask)
    tensors = mask, q, k, v, dout, lse, (dout * out).sum(-1)
    mask, *tensors = (x.to(engine.device, torch.float32).contiguous() for x in tensors)
    (B, H, Nq, D), Nk, (Bm, Hm) = q.shape, k.shape[2], mask.shape[:2]
    dmask = torch.zeros_like(mask)
    grid = triton.cdiv(Nq, 16), triton.cdiv(Nk, 16), Bm * Hm
    dmask_kernel[grid](dmask, mask, *tensors, B, H, Bm, Hm, Nq, Nk, scale, Br=16, Bc=16, D=D)
    return {"dmask": dmask.cpu()}


def expected(q, k, v, mask, dout, scale):
    want = error.expected(q, k, v, dout, scale=scale, mask=mask, mask_gradient=True)
    return {"dmask": (want.value["dmask"], want.tolerance["dmask"])}


@functools.cache
def _inputs(Bm, Hm, hidden=False, Nq=20):
    generator = torch.Generator().manual_seed(3)
    q, dout = torch.randn(2, 2, 3, Nq, 16, generator=generator)
    k, v = torch.randn(2, 2, 3, 27, 16, generator=generator)
    mask = torch.randn(Bm, Hm, Nq, 27, generator=generator)
    if hidden:
        mask[..., 1::3] = -torch.inf
    return dict(q=q, k=k, v=v, mask=mask, dout=dout, scale=0.3)


CASES = [
    Case("one mask for all batch entries and heads", lambda: _inputs(1, 1)),
    Case("a mask for each head, shared by the batch entries", lambda: _inputs(1, 3, Nq=13)),
    Case("a mask for each batch entry, shared by the heads", lambda: _inputs(2, 1, Nq=13)),
    Case("a mask for each batch entry and head: nothing to add up", lambda: _inputs(2, 3)),
    Case("a mask with -inf, whose gradient is 0 there", lambda: _inputs(1, 1, hidden=True, Nq=13)),
]


def explain(got, want, q, k, v, mask, dout, scale):
    """Below what is wrong: of which terms its first wrong entry is the sum, and how the first of these is computed."""
    lines, (right, tolerance) = differences.of_tensors(got, want), want["dmask"]
    bm, hm, i, j = place = tuple(differences.wrong(got["dmask"], right, tolerance).nonzero()[0].tolist())
    P, dP, delta = _factors(q, k, v, mask, dout, scale)
    heads = [(b, h) for b in range(bm, q.shape[0], mask.shape[0]) for h in range(hm, q.shape[1], mask.shape[1])]
    terms = [P[b, h, i, j] * (dP[b, h, i, j] - delta[b, h, i, 0]) for b, h in heads]
    b, h = heads[0]
    return [
        *lines,
        f"  dmask[{', '.join(map(str, place))}] is the sum over (b, h) = {', '.join(f'({b}, {h})' for b, h in heads)}:",
        f"    {' + '.join(f'{x:.4g}' for x in terms).replace('+ -', '- ')} = {right[place]:.4g}",
        f"    in ({b}, {h}) P is {P[b, h, i, j]:.4g}, dP {dP[b, h, i, j]:.4g} and delta {delta[b, h, i, 0]:.4g}",
    ]


# The mistakes: another gradient of the scores, or another sum.


def _scores(q, k, v, mask, dout, scale, delta=1, added=None):
    """dS (B, H, Nq, Nk) in float32. delta is 0 where it is forgotten; `added` is added in place of the mask."""
    P, dP, row_delta = _factors(q, k, v, mask, dout, scale, added)
    return P * (dP - delta * row_delta)


def _factors(q, k, v, mask, dout, scale, added=None):
    """(P, dP (B, H, Nq, Nk), delta (B, H, Nq, 1)) in float32"""
    out, lse = attention.forward(q, k, v, scale=scale, mask=mask)
    S = scale * q @ k.mT + (mask if added is None else added)
    return (S - lse.float()[..., None]).exp(), dout @ v.mT, (dout * out.float()).sum(-1, keepdim=True)


def _summed(dS, mask):
    return {"dmask": dS.sum_to_size(mask.shape)}


@mistake("the gradient has the factor scale, but the mask is added to the scores after they were scaled")
def scaled(scale, mask, **inputs):
    return _summed(scale * _scores(scale=scale, mask=mask, **inputs), mask)


@mistake("the last batch entry and head overwrite the others instead of being added")
def overwritten(mask, **inputs):
    dS = _scores(mask=mask, **inputs)
    for dimension in (0, 1):
        if mask.shape[dimension] == 1:
            dS = dS.narrow(dimension, dS.shape[dimension] - 1, 1)
    return {"dmask": dS}


@mistake("only one of the batch entries that share the mask is visited")
def one_batch_entry(mask, **inputs):
    dS = _scores(mask=mask, **inputs)
    return _summed(dS if mask.shape[0] > 1 else dS[:1], mask)


@mistake("only one of the heads that share the mask is visited")
def one_head(mask, **inputs):
    dS = _scores(mask=mask, **inputs)
    return _summed(dS if mask.shape[1] > 1 else dS[:, :1], mask)


@mistake("the batch entries are counted from 0 to B // Bm, also where the mask has an entry for each: they begin at bm")
def counted_from_the_first_batch_entry(mask, **inputs):
    """P is computed with the tile's own M for each of them, as the kernel would."""
    total = torch.zeros_like(mask)
    for bm in range(mask.shape[0]):
        dS = _scores(mask=mask, **inputs, added=mask[bm : bm + 1])[: len(inputs["q"]) // len(mask)]
        total[bm] = dS.sum(0, keepdim=True).sum_to_size(1, *mask.shape[1:])[0]
    return {"dmask": total}


@mistake("all batch entries and heads are added up, also where the mask has an entry for each")
def everything_summed(mask, **inputs):
    """P is computed with the tile's own M for each of them, as the kernel would."""
    total = torch.zeros_like(mask)
    for bm in range(mask.shape[0]):
        for hm in range(mask.shape[1]):
            total[bm, hm] = _scores(mask=mask, **inputs, added=mask[bm, hm]).sum((0, 1))
    return {"dmask": total}


@mistake("the gradients are averaged over those who share the mask instead of summed")
def averaged(mask, **inputs):
    dS = _scores(mask=mask, **inputs)
    return {"dmask": dS.sum_to_size(mask.shape) * mask.numel() / dS.numel()}


@mistake("delta is missing from dS")
def delta_missing(mask, **inputs):
    return _summed(_scores(mask=mask, **inputs, delta=0), mask)


@mistake("P is computed from the scores without the mask")
def mask_missing(mask, **inputs):
    return _summed(_scores(mask=mask, **inputs, added=0), mask)
