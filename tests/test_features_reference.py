"""The reference's features, alone and in pairs: definition, gradients, dropout's random numbers, and the tolerance."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from reference import attention, error, philox
from reference.options import Features
from steps import engine

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

B, H, Hk, Nq, Nk, D = 2, 4, 2, 5, 7, 3


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


FEATURES = {
    "causal": {"causal": True},
    "scale": {"scale": 0.7},
    "window": {"window": (2, 1)},
    "left window": {"window": (3, -1)},
    "softcap": {"softcap": 1.5},
    "bool mask": {"mask": random(1, H, Nq, Nk, seed=1) > -0.4},
    "additive mask": {"mask": random(H, 1, Nk, seed=2).masked_fill(random(H, 1, Nk, seed=3) > 1, -math.inf)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi of each batch": {"alibi_slopes": random(B, H, seed=4)},
    "sinks": {"sinks": torch.tensor([0.5, -math.inf, 2.5, -1.0])},
    "first": {"first_query": 4, "first_key": 1},
    "lengths": {"lengths_k": torch.tensor([6, 3])},
    "dropout": {"dropout_mask": philox.keep_mask(5, B, H, Nq, Nk, 0.3), "dropout_p": philox.rounded(0.3)},
    "packed": {"cu_seqlens_q": torch.tensor([0, 3, 3, 4]), "cu_seqlens_k": torch.tensor([0, 2, 3, 6])},
}
COMBINATIONS = [()] + [
    names
    for count in (1, 2)
    for names in itertools.combinations(FEATURES, count)
    if len({key for name in names for key in FEATURES[name]}) == sum(len(FEATURES[name]) for name in names)
    and set(names) != {"lengths", "packed"}
]
every_combination = pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: " + ".join(names) or "none")


def inputs(names, dtype=torch.float64, gain=1.0):
    """q, k, v, dout and the options, of one batch where sequences are packed."""
    options = {key: value for name in names for key, value in FEATURES[name].items()}
    batch = 1 if "packed" in names else B
    if "packed" in names:
        for key in ("mask", "dropout_mask", "alibi_slopes"):
            if key in options and options[key].ndim == 4:
                options[key] = options[key][:1]
        if "alibi of each batch" in names:
            options["alibi_slopes"] = random(3, H, seed=4)  # packed: of each sequence
    sizes = (H, Nq), (Hk, Nk), (Hk, Nk), (H, Nq)
    q, k, v, dout = (random(batch, *size, D, seed=10 + n).to(dtype) for n, size in enumerate(sizes))
    return q * gain, k, v, dout, options


def score_by_hand(q, k, b, h, i, j, o):
    """One entry of S, by the definition of the features, with Python's numbers."""
    slopes, batch, position, key, keys, queries = o.get("alibi_slopes"), b, i, j, k.shape[2], q.shape[2]
    if "cu_seqlens_q" in o:
        starts = o["cu_seqlens_q"].tolist(), o["cu_seqlens_k"].tolist()
        batch, of_key = (
            next((s for s in range(len(x) - 1) if x[s] <= n < x[s + 1]), None)
            for x, n in zip(starts, (i, j), strict=True)
        )
        if batch is None or batch != of_key:
            return -math.inf
        position, key = i - starts[0][batch], j - starts[1][batch]
        queries, keys = (x[batch + 1] - x[batch] for x in starts)
    if "lengths_k" in o:
        keys = o["lengths_k"][b].item()
        if j >= keys:
            return -math.inf
    position += o.get("first_query", keys - queries)
    key += o.get("first_key", 0)
    S = o.get("scale", D**-0.5) * (q[b, h, i] @ k[b, h // 2, j]).item()
    if "softcap" in o:
        S = o["softcap"] * math.tanh(S / o["softcap"])
    mask = o["mask"].expand(q.shape[0], H, Nq, Nk)[b, h, i, j].item() if "mask" in o else 0.0
    if mask is False:
        return -math.inf
    if mask is not True:
        S += mask
    if slopes is not None:
        S -= (slopes[h] if slopes.ndim == 1 else slopes[batch, h]).item() * abs(position - key)
    left, right = o.get("window", (-1, -1))
    out_of_window = (left >= 0 and key < position - left) or (right >= 0 and key > position + right)
    return -math.inf if out_of_window or (o.get("causal") and key > position) else S


@every_combination
def test_scores_are_what_the_definition_says(names):
    q, k, _, _, options = inputs(names)
    by_hand = [
        score_by_hand(q, k, *entry, options)
        for entry in itertools.product(range(q.shape[0]), range(H), range(Nq), range(Nk))
    ]
    options = {key: value for key, value in options.items() if not key.startswith(("dropout", "sinks"))}
    S = attention.scores(q, k, **options)
    torch.testing.assert_close(S, torch.tensor(by_hand, dtype=S.dtype).view(S.shape), rtol=1e-12, atol=1e-13)


@every_combination
def test_backward_by_formula_equals_autograd(names):
    q, k, v, dout, options = inputs(names)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with_mask = "additive mask" in names
    own = {"mask": with_mask, "sinks": "sinks" in names}
    own = {name: options[name].double().requires_grad_() for name in own if own[name]}
    leaves += own.values()
    by_autograd = torch.autograd.grad(attention.forward(*leaves[:3], **options | own)[0], leaves, dout)
    by_formula = attention.backward(dout, q, k, v, mask_gradient=with_mask, **options)
    for formula, autograd in zip(by_formula, by_autograd, strict=True):
        torch.testing.assert_close(formula, autograd, rtol=1e-11, atol=1e-13)


def test_the_gradient_of_sinks_by_finite_differences():
    names = ("sinks", "additive mask", "dropout")  # Some rows see no key.
    q, k, v, dout, options = inputs(names)
    sinks, step = options.pop("sinks").double(), 1e-5
    *_, dsinks = attention.backward(dout, q, k, v, sinks=sinks, **options)
    for h in range(H):
        change = step * torch.eye(H, dtype=torch.float64)[h]
        more, less = (attention.forward(q, k, v, sinks=x, **options)[0] for x in (sinks + change, sinks - change))
        torch.testing.assert_close(dsinks[h], ((more - less) * dout).sum() / (2 * step), rtol=1e-7, atol=1e-9)


def test_a_sink_is_a_key_whose_value_is_0():
    """q has one more entry, 1, and k one more, which is the sink for that key and 0 for the others."""
    q, k, v, dout, _ = inputs(())
    k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
    sinks, scale = torch.tensor([0.5, -2.0, 2.5, -1.0], dtype=torch.float64), 0.7
    q_more, k_more = F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1, 0, 1))
    k_more[:, :, -1, -1] = sinks / scale
    v_more, dout_more = F.pad(v, (0, 1, 0, 1)), F.pad(dout, (0, 1))
    out, lse = attention.forward(q_more, k_more, v_more, scale=scale)
    dq, dk, dv = attention.backward(dout_more, q_more, k_more, v_more, scale=scale)
    gradients = dq[..., :-1], dk[..., :-1, :-1], dv[..., :-1, :-1], dk[:, :, -1, -1].sum(0) / scale
    got = both(q, k, v, dout, {"sinks": sinks, "scale": scale})
    for x, y in zip(got, (out[..., :-1], lse, *gradients), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("names", [(), ("causal", "lengths"), ("causal", "packed")], ids=str)
def test_without_a_key_lse_is_the_sink_and_a_sink_of_minus_infinity_is_none(names):
    *x, options = inputs(names)
    _, lse, _, _, _, dsinks = both(*x, options | FEATURES["sinks"])
    plain, without = both(*x, options | {"sinks": torch.full((H,), -math.inf)}), both(*x, options)
    assert (plain[5] == 0).all() and dsinks[1] == 0
    for with_none, none in zip(plain[:5], without, strict=True):
        torch.testing.assert_close(with_none, none, rtol=1e-12, atol=1e-14)
    no_key = without[1] == -math.inf
    if "packed" in names:
        no_key[:, :, 4:] = False  # rows of no sequence
        assert (lse[:, :, 4:] == -math.inf).all()
    sinks = FEATURES["sinks"]["sinks"].double()[:, None].expand_as(lse)
    assert no_key.any() == (names != ()) and torch.equal(lse[no_key], sinks[no_key])


# ---- against other implementations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", ["finfo.min", -1e4, -math.inf], ids=str)
def test_masks_equal_sdpa(dtype, value):
    """Finite masks stay finite: a row of finfo.min has equal P, in the backward too, and is not a row of zeros."""
    q, k, v, dout, _ = inputs((), dtype)
    mask = random(B, 1, Nq, Nk, seed=5, dtype=dtype)
    value = torch.finfo(dtype).min if value == "finfo.min" else value
    mask[..., 4:] = value
    if value > -math.inf:
        mask[:, :, 2] = value
    leaves = [x.requires_grad_() for x in (q, k, v, mask)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=mask, enable_gqa=True)
    got = dict(zip(("out", "dq", "dk", "dv", "dmask"), (out, *torch.autograd.grad(out, leaves, dout)), strict=True))
    want = error.expected(*(x.detach() for x in (q, k, v, dout)), mask=mask.detach(), mask_gradient=True)
    assert not error.failures(got, want)
    if value < -1e30 and value > -math.inf:
        P, _, lse, _ = attention._probabilities(q.detach(), k.detach(), mask=mask.detach())
        assert (P[:, :, 2] == P[:, :, 2, :1]).all() and (lse[:, :, 2] == value).all()
        assert want.tolerance["out"] < 2e-5 and want.tolerance["dv"] < 2e-5


def test_a_bool_mask_equals_sdpa_and_has_no_gradient():
    q, k, v, dout, options = inputs(("bool mask",))
    sdpa = F.scaled_dot_product_attention(q, k, v, attn_mask=options["mask"], enable_gqa=True)
    torch.testing.assert_close(attention.forward(q, k, v, **options)[0], sdpa, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="floating-point"):
        attention.backward(dout, q, k, v, mask_gradient=True, **options)


def test_a_window_is_a_bool_mask():
    i, j = torch.arange(Nq)[:, None] + Nk - Nq, torch.arange(Nk)
    for window, mask in (
        ((2, 1), (j >= i - 2) & (j <= i + 1)), ((0, 0), i == j), ((2, -1), j >= i - 2),
        ((None, 1), j <= i + 1), ((-1, None), j > -1), (None, j > -1),
    ):  # fmt: skip
        assert torch.equal(attention.visible(Nq, Nk, window=window), mask.expand(Nq, Nk))


def both(q, k, v, dout, options):
    return *attention.forward(q, k, v, **options), *attention.backward(dout, q, k, v, **options)


@pytest.mark.parametrize("names", [(), ("causal", "window"), ("softcap", "additive mask"), ("alibi", "dropout"),
                                   ("sinks", "causal")])  # fmt: skip
def test_without_batch(names):
    *tensors, options = inputs(names)
    if "dropout" in names:
        options["dropout_mask"] = options["dropout_mask"][0]
    one, alone = both(*(x[:1] for x in tensors), options), both(*(x[0] for x in tensors), options)
    for with_batch, without in zip(one, alone, strict=True):
        torch.testing.assert_close(with_batch.reshape(without.shape), without, rtol=1e-13, atol=1e-15)


def test_what_is_exact_of_packed_sequences():
    """Equal neighbours are an empty sequence; rows after the last entry give 0, -inf and gradient 0."""
    sizes = (H, 12), (Hk, 13), (Hk, 13), (H, 12)
    x = [random(1, *size, D, seed=n) for n, size in enumerate(sizes)]
    starts = {"cu_seqlens_q": torch.tensor([0, 3, 3, 8, 10, 10]), "cu_seqlens_k": torch.tensor([0, 2, 4, 4, 10, 11])}
    want = error.expected(*x, causal=True, window=(4, -1), **starts)
    exact = want.exact
    assert exact["lse"][0, 0].nonzero().flatten().tolist() == [0, 3, 4, 5, 6, 7, 10, 11]
    assert exact["dk"][0, 0, :, 0].nonzero().flatten().tolist() == [2, 3, 10, 11, 12]
    assert all((want.value[name][exact[name]] == 0).all() for name in error.NAMES[2:])


def test_contradicting_options_raise():
    starts = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="both"):
        Features(cu_seqlens_q=starts)
    with pytest.raises(ValueError, match="lengths_k"):
        Features(cu_seqlens_q=starts, cu_seqlens_k=starts, lengths_k=starts)
    with pytest.raises(TypeError, match="softcup"):
        attention.forward(*inputs(())[:3], softcup=1.0)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter, key, words", [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
])  # fmt: skip
def test_philox_gives_the_known_answers(counter, key, words):
    """The test vectors of the authors' library Random123, file kat_vectors, "philox4x32 10"."""
    assert " ".join(f"{int(word):08x}" for word in philox.philox(counter, key)) == words


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
def test_triton_gives_the_same_words():
    engine.check_runs()

    @triton.jit
    def kernel(words, counter, seed):
        at = tl.arange(0, 64)
        c0, c1 = tl.load(counter + at), tl.load(counter + 64 + at)
        c2, c3 = tl.load(counter + 128 + at), tl.load(counter + 192 + at)
        w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
        tl.store(words + at, w0.to(tl.int32, bitcast=True))
        tl.store(words + 64 + at, w1.to(tl.int32, bitcast=True))
        tl.store(words + 128 + at, w2.to(tl.int32, bitcast=True))
        tl.store(words + 192 + at, w3.to(tl.int32, bitcast=True))

    counter = torch.randint(-(2**31), 2**31, (4, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for seed in (0, 7, -1, 2**40 + 3, -(2**63)):
        words = torch.empty(4, 64, dtype=torch.int32, device=engine.device)
        kernel[(1,)](words, counter.to(engine.device), seed)
        ours = philox.philox(counter.numpy().view("uint32"), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        assert torch.equal(words.cpu(), torch.from_numpy(np.stack(ours).view("int32")))


@pytest.mark.parametrize("p, kept", [(0.0, 256), (0.001, 256), (0.25, 192), (0.998, 1), (0.9999, 1), (1.0, 0)])
def test_one_value_of_a_byte_at_least_is_kept_unless_all_are_to_be_dropped(p, kept):
    """As the kernels do: with 0 of 256 a p below 1 would give 1 / (1 - p) times nothing."""
    assert philox.threshold(p) == kept and philox.rounded(p) == 1 - kept / 256



def test_the_keep_mask_by_hand():
    seed, p, first_query, first_key = 2**35 + 11, 0.25, 6, 13
    mask = philox.keep_mask(seed, 2, 3, 4, 40, p, first_query, first_key)
    assert mask.shape == (2, 3, 4, 40) and philox.threshold(p) == 192
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 39), (1, 0, 2, 3), (0, 1, 1, 22)):
        key = j + first_key
        words = philox.philox((key // 16, i + first_query, h, b), (seed & 0xFFFFFFFF, seed >> 32))
        byte = int(words[key % 16 // 4]) >> (8 * (key % 4)) & 0xFF
        assert mask[b, h, i, j].item() == (byte < 192)


def test_the_keep_mask_depends_on_seed_batch_head_query_and_key_alone():
    mask = philox.keep_mask(1, 3, 4, 50, 70, 0.2)
    assert torch.equal(philox.keep_mask(1, 2, 3, 20, 33, 0.2), mask[:2, :3, :20, :33])
    assert torch.equal(philox.keep_mask(1, 3, 4, 30, 41, 0.2, 20, 29), mask[:, :, 20:, 29:])
    assert abs(mask.float().mean() - 205 / 256) < 0.01 and philox.rounded(0.2) == 51 / 256
    for dimension in range(4):  # No slice is a copy of its neighbour.
        assert (mask.unbind(dimension)[0] != mask.unbind(dimension)[1]).any()
    assert (philox.keep_mask(2, 3, 4, 50, 70, 0.2) != mask).any()
    assert (philox.keep_mask(1 + 2**32, 3, 4, 50, 70, 0.2) != mask).any()
    starts = torch.tensor([0, 3, 3, 8])
    packed = philox.keep_mask(9, 1, 2, 9, 9, 0.4, cu_seqlens_q=starts, cu_seqlens_k=starts)
    for s, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        alone = philox.keep_mask(9, s + 1, 2, end - start, end - start, 0.4)[s]
        assert torch.equal(packed[0, :, start:end, start:end], alone)
    assert philox.keep_mask(1, 1, 1, 9, 99, 0.0).all() and not philox.keep_mask(1, 1, 1, 9, 99, 1.0).any()


def test_dropping_everything_gives_zeros():
    *tensors, _ = inputs(())
    options = {"dropout_mask": philox.keep_mask(1, B, H, Nq, Nk, 1.0), "dropout_p": 1.0}
    out, lse, *grads = both(*tensors, options)
    assert lse.isfinite().all() and all((x == 0).all() for x in (out, *grads))


# ---- the tolerance ---------------------------------------------------------------------------------------------------


def like_a_kernel(q, k, v, dout, *, scale=None, mask_gradient=False, tanh=torch.tanh, tile=3, **options):
    """The results of a correct kernel: key tiles with a running maximum, in base 2, P rounded before it is divided."""
    feature, dtype, log2_e = Features(**options), q.dtype, math.log2(math.e)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    Q, dO = q.float(), dout.float()
    K, V = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    X = scale * (Q @ K.mT)
    S = feature.scores(X, tanh) * log2_e
    Z = feature.dropped(S)
    m, l, O = q.new_full(S.shape[:-1], -math.inf, dtype=torch.float32), 0.0, 0.0
    for keys in torch.arange(S.shape[-1]).split(tile):
        m_new = torch.maximum(m, S[..., keys].amax(-1))
        unit = m_new.nan_to_num(neginf=0.0)
        P, alpha = torch.exp2(S[..., keys] - unit[..., None]), torch.exp2(m - unit)
        l, m = alpha * l + P.sum(-1), m_new
        O = alpha[..., None] * O + (P * (Z[..., keys] > 0)).to(dtype).float() @ V[..., keys, :]
    factor = Z.amax() if Z.numel() else 1.0
    out = torch.where(l[..., None] == 0, 0, factor * O / l[..., None])
    lse = (m + l.log2()) / log2_e
    if feature.sinks is not None:
        with_sinks = torch.logaddexp(lse, feature.with_sinks(S[..., :0])[..., 0])
        out *= (lse - with_sinks.nan_to_num(neginf=0.0)).exp()[..., None]
        lse = with_sinks
    out = out.to(dtype)

    P = torch.exp2(S - log2_e * lse.nan_to_num(neginf=0.0)[..., None])
    delta = (dO * out.float()).sum(-1, keepdim=True)
    dS = P * ((dO @ V.mT) * Z - delta)
    dX = (dS * feature.slope(X, tanh)).to(dtype).float()
    gradients = scale * dX @ K, scale * dX.mT @ Q, factor * (P * (Z > 0)).to(dtype).float().mT @ dO
    dq, dk, dv = (attention._sum_groups(x, like).to(dtype) for x, like in zip(gradients, (q, k, v), strict=True))
    results = [out, lse, dq, dk, dv, *([feature.sum_to_mask(dS)] if mask_gradient else [])]
    if feature.sinks is not None:
        P_sink = (feature.with_sinks(S[..., :0]) - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        results.append(feature.sum_to_sinks(-P_sink * delta))
    return error._by_name(*results, sinks=feature.sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_tolerance_admits_kernels_and_refuses_a_little_more(dtype):
    for names in COMBINATIONS:
        q, k, v, dout, options = inputs(names, dtype, gain=2.0)
        options["mask_gradient"] = "additive mask" in names
        want = error.expected(q, k, v, dout, **options)
        got = like_a_kernel(q, k, v, dout, **options)
        found = error.errors(got, want)
        for name, e in found.items():
            assert e <= 0.95 * want.tolerance[name], (names, name)
            wrong = want.value[name].clone()
            place = (~want.exact[name]).nonzero()[-1]
            wrong[tuple(place)] += 1.02 * want.tolerance[name]
            assert error.failures({name: wrong}, want), (names, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_tolerance_admits_kernels_on_tiny_inputs(dtype):
    """There a rounding in plain attention can happen to be next to 0 that is not so in a kernel, or the other way."""
    for seed, (queries, keys) in itertools.product(range(40), ((1, 2), (2, 2), (1, 6), (6, 6))):
        q, k, v, dout = (
            random(1, 1, n, 32, seed=4 * seed + m).to(dtype) for m, n in enumerate((queries, keys, keys, queries))
        )
        want = error.expected(q, k, v, dout)
        for name, e in error.errors(like_a_kernel(q, k, v, dout), want).items():
            assert e <= 0.95 * want.tolerance[name], (seed, queries, keys, name)
            assert want.tolerance[name] < 8 * torch.finfo(dtype).eps


WRONG = {
    "window one too far": ({"window": (2, 1)}, {"window": (3, 1)}),
    "window of the future one too short": ({"window": (2, 1)}, {"window": (2, 0)}),
    "ALiBi's sign": ({"alibi_slopes": torch.tensor([0.1] * H)}, {"alibi_slopes": torch.tensor([-0.1] * H)}),
    "position without first_query": ({"causal": True, "first_query": 3}, {"causal": True}),
    "key without first_key": ({"causal": True, "first_key": 1}, {"causal": True}),
    "the soft-cap forgotten": ({"softcap": 30.0}, {}),
    "another dropout factor": (FEATURES["dropout"], FEATURES["dropout"] | {"dropout_p": 0.3}),
    "lengths forgotten": (FEATURES["lengths"], {}),
    "sequences not separated": (FEATURES["packed"] | {"causal": True}, {"causal": True}),
    "a sink scaled": ({"sinks": torch.tensor([1.0] * H)}, {"sinks": torch.tensor([3**-0.5] * H)}),
    "the mask scaled": ({"mask": random(Nq, Nk, seed=8)}, {"mask": 3**-0.5 * random(Nq, Nk, seed=8)}),
}


@pytest.mark.parametrize("right, wrong", WRONG.values(), ids=WRONG)
def test_the_tolerance_refuses_wrong_features(right, wrong):
    q, k, v, dout, _ = inputs(("packed",) if "cu_seqlens_q" in right else (), torch.float32)
    want = error.expected(q, k, v, dout, **right)
    got = like_a_kernel(q, k, v, dout, **wrong)
    assert error.failures({name: got[name] for name in ("out", "lse")}, want)
    assert error.failures({name: got[name] for name in ("dq", "dk", "dv")}, want)


def test_the_tolerance_allows_for_the_rounding_of_sinks():
    """lse may be off by four roundings of a sink, and the sinks' gradient by four of the terms that cancel in it."""
    *x, _ = inputs((), torch.float32)
    eps = torch.finfo(torch.float32).eps
    assert error.expected(*x, sinks=torch.full((H,), 1e4)).tolerance["lse"] >= 4e4 * eps
    sinks, (q, k, v, dout) = torch.zeros(H), (x.double() for x in x)
    out, lse = attention.forward(q, k, v, sinks=sinks)
    terms = (-lse).exp() * (dout * out).sum(-1).abs()
    assert error.expected(*x, sinks=sinks).tolerance["dsinks"] >= 4 * eps * terms.sum((0, 2)).max()


def test_the_tolerance_knows_no_sign_of_a_slope():
    S, slopes = torch.zeros(B, H, Nq, Nk), FEATURES["alibi"]["alibi_slopes"]
    positive, negative = (Features(alibi_slopes=x).added(S) for x in (slopes, -slopes))
    assert positive.max() > 1 and torch.equal(positive, negative)


def test_with_16_bits_the_tanh_may_be_the_special_function_units():
    def approximate(x):
        return (1 + 2**-11 * torch.sin(40 * x + 1)) * x.tanh()

    for dtype, admitted in ((torch.float16, True), (torch.bfloat16, True), (torch.float32, False)):
        q, k, v, dout, options = inputs(("softcap", "additive mask"), dtype, gain=2.0)
        want = error.expected(q, k, v, dout, mask_gradient=True, **options)
        got = like_a_kernel(q, k, v, dout, mask_gradient=True, tanh=approximate, **options)
        assert (not error.failures(got, want)) == admitted
