"""Executes papers/errata.md: on a small example the printed form of each entry fails, and the corrected form does not.

There is one test for an entry, named after its number. It uses the paper's symbols and computes one head in float64.
Where the paper leaves the scale out, the test has scale=1.0.
"""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from reference import attention, cases, error, mutants
from steps.course.bench import cost

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "papers" / "errata.md").read_text()


def draw(*rows, d=8):
    """Matrices (rows, d) of standard normal numbers."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(n, d, generator=rng, dtype=torch.float64) for n in rows]


def forward(Q, K, V, **options):
    """(O, lse) of one head by the float64 reference."""
    O, lse = attention.forward(Q[None], K[None], V[None], **options)
    return O[0], lse[0]


def backward(dO, Q, K, V, **options):
    """(dQ, dK, dV) of one head by the float64 reference."""
    return [x[0] for x in attention.backward(dO[None], Q[None], K[None], V[None], **options)]


def equal(x, want):
    """Whether x is what is wanted, within rounding."""
    return x.shape == want.shape and bool(((x - want).abs() <= 1e-12 * want.abs().max()).all())


def wrong(x, want):
    """Whether x is off by more than a thousandth of the largest number, or NaN, which no rounding explains."""
    return x.shape == want.shape and not bool(((x - want).abs() <= 1e-3 * want.abs().max()).all())


def two_blocks():
    """(S1, S2, V1, V2, O): one row block of S in two pieces, as in FlashAttention-2, section 2.3.1, and its output."""
    Q, K, V = draw(4, 6, 6)
    return Q @ K[:3].T, Q @ K[3:].T, V[:3], V[3:], forward(Q, K, V, scale=1.0)[0]


def column(x):
    """x as a column, so that column(x) * A is the papers' diag(x) A."""
    return x[:, None]


# ---- FlashAttention --------------------------------------------------------------------------------------------------


def test_e1_the_inverse_in_the_proof_of_theorem_1():
    S1, S2, V1, V2, O = two_blocks()  # the first j tiles, and tile j + 1
    m1, m2 = S1.amax(1), torch.maximum(S1.amax(1), S2.amax(1))
    l1 = (S1 - column(m1)).exp().sum(1)
    l2 = (m1 - m2).exp() * l1 + (S2 - column(m2)).exp().sum(1)
    seen, tile = (S1 - column(m1)).exp() @ V1, column((-m2).exp()) * S2.exp() @ V2

    def third_line(diag):
        return (column(l1 * (m1 - m2).exp()) * column(diag) * seen + tile) / column(l2)

    assert wrong(third_line(l1), O)
    assert equal(third_line(1 / l1), O)


def test_e2_rows_not_columns():
    N, d = 4, 8
    Q, K, V = draw(N, N, N, d=d)
    O, _ = forward(Q, K, V, scale=1.0)
    with_columns = torch.stack([torch.stack([Q[:, i] @ K[:, j] for j in range(d)]) for i in range(d)])
    assert with_columns.shape == (d, d)  # S has N rows and N columns.
    q, k, v = Q, K, V  # q[i] is row i of Q.
    e = torch.stack([torch.stack([(q[i] @ k[j]).exp() for j in range(N)]) for i in range(N)])
    o = torch.stack([sum(e[i, j] / e[i].sum() * v[j] for j in range(N)) for i in range(N)])
    assert equal(o, O)


def test_e3_the_backward_costs_n_squared_d():
    def flops(N, d):
        with FlopCounterMode(display=False) as counter:
            backward(*draw(N, N, N, N, d=d))
        return counter.get_total_flops()

    assert flops(64, 8) == 4 * flops(32, 8)
    assert flops(32, 16) == 2 * flops(32, 8)  # For O(N^2) it would not depend on d.


def test_e4_the_tiles_do_not_fit():
    def elements(Br, Bc, d):
        return 2 * Br * d + 2 * Bc * d + Br * Bc  # Q and O, K and V, S

    for d in (64, 128):
        for M in range(4 * d, 64 * 1024, 4 * d):  # up to 256 KB of float32; M counts elements
            Bc = math.ceil(M / (4 * d))
            on_chip = elements(min(Bc, d), Bc, d)
            assert (on_chip <= M) == (M >= 8 * d * d)
            assert 2 * on_chip > M  # with dQ, dK, dV, dO, and dP beside P
    M = 100 * 1024 // 4  # the paper's "around 100KB"
    assert M < 8 * 64 * 64  # Therefore the paper's own example does not fit.
    assert elements(64, 64, 64) <= M and 2 * elements(32, 32, 64) <= M


def test_e5_a_tile_that_is_masked_throughout():
    Q, K, V = draw(8, 8, 8)
    want, _ = forward(Q, K, V, causal=True, scale=1.0)

    def algorithm_2(Br=4, Bc=4, *, skips):
        O, l, m = torch.zeros_like(Q), Q.new_zeros(8), Q.new_full((8,), -math.inf)
        for j in range(0, 8, Bc):  # line 6
            for i in range(0, 8, Br):  # line 8
                if skips and j > i + Br - 1:
                    continue
                rows, keys = slice(i, i + Br), slice(j, j + Bc)
                S = Q[rows] @ K[keys].T
                S = S.masked_fill(torch.arange(j, j + Bc) > column(torch.arange(i, i + Br)), -math.inf)
                m_ij = S.amax(1)
                P = (S - column(m_ij)).exp()  # line 12
                m_new = torch.maximum(m[rows], m_ij)
                alpha, beta = (m[rows] - m_new).exp(), (m_ij - m_new).exp()
                l_new = alpha * l[rows] + beta * P.sum(1)
                O[rows] = (column(alpha * l[rows]) * O[rows] + column(beta) * P @ V[keys]) / column(l_new)  # line 15
                l[rows], m[rows] = l_new, m_new
        return O

    printed = algorithm_2(skips=False)
    assert printed[:4].isnan().all() and equal(printed[4:], want[4:])
    assert equal(algorithm_2(skips=True), want)
    assert algorithm_2(Br=4, Bc=2, skips=True).isnan().any()  # In a visited tile two of the four rows see no key.


def test_e6_the_gflops_of_figure_2():
    size = dict(B=64, H=16, N=1024, D=64)
    standard = 3 * cost.Point(**size).flops() / 1e9  # 2 matrix products in the forward, 4 in the backward
    flash = cost.Point(**size).flops("fwd+bwd") / 1e9  # 2 in the forward, 5 in the backward
    assert (round(standard), round(flash)) == (825, 962)
    assert standard / 66.6 > 12 and flash / 75.2 > 12
    assert round(75.2 / 7.3) == 10 and round(flash / 7.3) == 132  # TFLOP/s, with the 7.3 ms of the same table


# ---- FlashAttention-2 ------------------------------------------------------------------------------------------------


def test_e7_the_scale_is_one_over_the_root_of_d():
    Q, K, V = draw(5, 7, 7, d=16)
    want = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
    assert wrong(forward(Q, K, V, scale=1 / 16)[0], want)
    assert equal(forward(Q, K, V, scale=1 / math.sqrt(16))[0], want)


def probabilities(dO, Q, K, V):
    """(P, dP, D) of section 2.2, without a scale."""
    P = (Q @ K.T).softmax(1)
    return P, dO @ V.T, (dO * (P @ V)).sum(1)


def test_e8_the_product_in_dk():
    dO, Q, K, V = draw(6, 6, 6, 6)
    P, dP, D = probabilities(dO, Q, K, V)
    dS = P * (dP - column(D))
    want = backward(dO, Q, K, V, scale=1.0)[1]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        Q @ dS.T  # (N, d) (N, N)
    assert wrong(dS @ Q, want)  # This is the similar product that has the right shape.
    assert equal(dS.T @ Q, want)


def test_e9_the_brackets_of_the_standard_softmax():
    S1, S2, V1, V2, O = two_blocks()
    m = torch.maximum(S1.amax(1), S2.amax(1))
    P1, P2 = (S1 - column(m)).exp(), (S2 - column(m)).exp()
    l = P1.sum(1) + P2.sum(1)
    assert wrong(column(1 / l) * P1 @ V1 + P2 @ V2, O)
    assert equal(column(1 / l) * (P1 @ V1 + P2 @ V2), O)


def online():
    """(m1, m2, l1, l2, O1, tile, O) of the online softmax over two blocks.

    O1 is normalised, tile = exp(S2 - m2) V2 is not.
    """
    S1, S2, V1, V2, O = two_blocks()
    m1, m2 = S1.amax(1), torch.maximum(S1.amax(1), S2.amax(1))
    l1 = (S1 - column(m1)).exp().sum(1)
    l2 = (m1 - m2).exp() * l1 + (S2 - column(m2)).exp().sum(1)
    return m1, m2, l1, l2, S1.softmax(1) @ V1, (S2 - column(m2)).exp() @ V2, O


def test_e10_the_second_update_of_a_normalised_output():
    m1, m2, l1, l2, O1, tile, O = online()
    assert wrong(column(l2 / l1) * O1 + column(1 / l2) * tile, O)  # arXiv
    assert wrong(column(l1 / l2) * O1 + column(1 / l2) * tile, O)  # ICLR
    assert equal(column(l1 / l2 * (m1 - m2).exp()) * O1 + column(1 / l2) * tile, O)


def test_e11_the_output_that_is_not_scaled():
    m1, m2, l1, l2, O1, tile, O = online()
    assert wrong(column(1 / l2) * (column(1 / l1) * O1 + tile), O)
    assert equal(column(1 / l2) * (column(l1 * (m1 - m2).exp()) * O1 + tile), O)


def algorithm_1(Q_i, K, V, Bc=2, *, power, start=-math.inf):
    """(O_i, L_i) as in FlashAttention-2, lines 5 to 13, and FlashAttention-3, lines 13 to 24.

    O is rescaled by exp(m_old - m)^power.
    """
    O, l, m = torch.zeros_like(Q_i), Q_i.new_zeros(len(Q_i)), Q_i.new_full((len(Q_i),), start)
    for K_j, V_j in zip(K.split(Bc), V.split(Bc), strict=True):
        S = Q_i @ K_j.T
        m_old, m = m, torch.maximum(m, S.amax(1))
        P = (S - column(m)).exp()
        l = (m_old - m).exp() * l + P.sum(1)
        O = column((m_old - m).exp() ** power) * O + P @ V_j
    return O / column(l), m + l.log()


def test_e12_the_inverse_in_the_rescale():
    m1, m2, l1, l2, O1, tile, O = online()
    unscaled = column(l1) * O1  # the example's O~1
    assert wrong(column(1 / l2) * (unscaled / column((m1 - m2).exp()) + tile), O)
    assert equal(column(1 / l2) * (column((m1 - m2).exp()) * unscaled + tile), O)

    Q, K, V = draw(4, 6, 6)
    want, lse = forward(Q, K, V, scale=1.0)
    assert algorithm_1(Q, K, V, power=-1)[0].isnan().all()  # The first tile gives 1 / exp(-inf) * 0.
    assert wrong(algorithm_1(Q, K, V, power=-1, start=-50.0)[0], want)  # A finite start is wrong, too.
    assert all(map(equal, algorithm_1(Q, K, V, power=1), (want, lse)))


def test_e13_which_causal_tiles_need_no_mask():
    N, B = 16, 4
    Q, K, V = draw(N, N, N)
    want, _ = forward(Q, K, V, causal=True, scale=1.0)
    tiles = [(range(i, i + B), range(j, j + B)) for i in range(0, N, B) for j in range(0, N, B)]

    def run(needs_no_mask, skips):
        """(O, number of masked tiles). skips: leaves out the tiles whose columns all come after their rows (item 1)."""
        S, masked = Q.new_full((N, N), -math.inf), 0
        for rows, cols in tiles:
            if skips and min(cols) > max(rows):
                continue
            tile = Q[list(rows)] @ K[list(cols)].T
            if not needs_no_mask(rows, cols):
                masked += 1
                tile = tile.masked_fill(torch.tensor(cols) > column(torch.tensor(rows)), -math.inf)
            S[rows.start : rows.stop, cols.start : cols.stop] = tile
        return S.softmax(1) @ V, masked

    def printed(rows, cols):
        return max(rows) < min(cols)

    def corrected(rows, cols):
        return max(cols) <= min(rows)

    assert wrong(run(printed, skips=False)[0], want)  # Queries see later keys.
    O, masked = run(printed, skips=True)
    assert equal(O, want) and masked == 10  # This is right again, but every tile is masked.
    O, masked = run(corrected, skips=True)
    assert equal(O, want) and masked == 4  # one tile in each row of tiles, as the paper says


def test_e14_the_shape_of_d():
    dO, Q, K, V = draw(6, 6, 6, 6)
    P, dP, D = probabilities(dO, Q, K, V)
    want = backward(dO, Q, K, V, scale=1.0)[0]
    assert D.shape == (6,) and (dO * (P @ V)).sum(0).shape == (8,)  # N, d
    with pytest.raises(RuntimeError, match="must match"):
        dP - (dO * (P @ V)).sum(0)
    assert equal(P * (dP - column(D)) @ K, want)

    dO, Q, K, V = draw(8, 8, 8, 8)  # With N = d the wrong sum has the right shape.
    P, dP, D = probabilities(dO, Q, K, V)
    want = backward(dO, Q, K, V, scale=1.0)[0]
    assert wrong(P * (dP - (dO * (P @ V)).sum(0)) @ K, want)
    assert equal(P * (dP - column(D)) @ K, want)


def test_e15_the_scale_in_the_gradients():
    dO, Q, K, V = draw(6, 6, 6, 6, d=16)
    scale = 1 / math.sqrt(16)
    (O, L), (dQ, dK, dV) = forward(Q, K, V), backward(dO, Q, K, V)
    assert wrong((Q @ K.T).softmax(1) @ V, O)  # FlashAttention-3 as printed

    P = (scale * Q @ K.T - column(L)).exp()  # The scale is only where footnote 2 says.
    dS = P * (dO @ V.T - column((dO * O).sum(1)))
    assert wrong(dS @ K, dQ) and wrong(dS.T @ Q, dK)
    assert equal(scale * dS @ K, dQ) and equal(scale * dS.T @ Q, dK) and equal(P.T @ dO, dV)


# ---- FlashAttention-3 ------------------------------------------------------------------------------------------------


def test_e16_the_inverse_in_the_rescale_again():
    Q, K, V = draw(4, 6, 6)
    want, lse = forward(Q, K, V, scale=1.0)
    assert algorithm_1(Q, K, V, power=-1)[0].isnan().all()
    assert all(map(equal, algorithm_1(Q, K, V, power=1), (want, lse)))


def softmax_step(m, l, S):
    """(m, l, P, scale_o): what the paper calls "compute m, P and l based on S", and the factor that rescales O."""
    m_new = torch.maximum(m, S.amax(1))
    scale_o, P = column((m - m_new).exp()), (S - column(m_new)).exp()
    return m_new, scale_o[:, 0] * l + P.sum(1), P, scale_o


def algorithm_2(Q_i, K, V, *, stop=0, copies="P", epilogue=lambda O, m, l: O / column(l)):
    """(O_i, L_i) by FlashAttention-3's two-stage pipeline, for tiles of two keys; its loop ends before Tc - stop."""
    K, V = K.split(2), V.split(2)
    O, l, m = torch.zeros_like(Q_i), Q_i.new_zeros(len(Q_i)), Q_i.new_full((len(Q_i),), -math.inf)
    m, l, P_cur, _ = softmax_step(m, l, Q_i @ K[0].T)  # lines 4 and 6
    P_last = P_cur
    for j in range(1, len(K) - stop):  # line 7
        O = O + P_cur @ V[j - 1]  # line 11
        m, l, P_last, scale_o = softmax_step(m, l, Q_i @ K[j].T)  # lines 9 and 13
        O = scale_o * O  # line 14
        if copies == "P":  # line 16; nothing reads a copy of S
            P_cur = P_last
    O = O + P_last @ V[-1]  # line 19
    return epilogue(O, m, l), m + l.log()  # line 20


def algorithm_4(Q_i, K, V, *, stop=0):
    """(O_i, L_i) by FlashAttention-3's three-stage pipeline, like `algorithm_2`."""
    K, V = K.split(2), V.split(2)
    O, l, m = torch.zeros_like(Q_i), Q_i.new_zeros(len(Q_i)), Q_i.new_full((len(Q_i),), -math.inf)
    m, l, P, scale_o = softmax_step(m, l, Q_i @ K[0].T)  # lines 3 and 4
    S = Q_i @ K[1].T  # line 6
    for j in range(2, len(K) - stop):  # line 7
        O = scale_o * O + P @ V[j - 2]  # lines 11 and 12
        m, l, P, scale_o = softmax_step(m, l, S)  # lines 13 and 16
        S = Q_i @ K[j].T  # lines 9 and 15
    O = scale_o * O + P @ V[-2]  # lines 19 and 20
    m, l, P, scale_o = softmax_step(m, l, S)  # line 21
    return (scale_o * O + P @ V[-1]) / column(l), m + l.log()  # lines 23 to 25


def test_e17_the_last_key_tile():
    Q, K, V = draw(4, 10, 10)
    want = forward(Q, K, V, scale=1.0)
    assert all(map(wrong, algorithm_2(Q, K, V, stop=1), want)) and all(map(equal, algorithm_2(Q, K, V), want))
    assert all(map(wrong, algorithm_4(Q, K, V, stop=2), want)) and all(map(equal, algorithm_4(Q, K, V), want))


def test_e18_what_is_carried_to_the_next_round():
    Q, K, V = draw(4, 10, 10)
    O, lse = forward(Q, K, V, scale=1.0)
    printed, L = algorithm_2(Q, K, V, copies="S")
    assert wrong(printed, O) and equal(L, lse)  # lse is right, so only O shows the mistake.
    assert equal(algorithm_2(Q, K, V, copies="P")[0], O)


def test_e19_the_epilogue_divides_by_l():
    Q, K, V = draw(4, 10, 10)
    O, _ = forward(Q, K, V, scale=1.0)
    for based_on_m in (lambda O, m, l: O, lambda O, m, l: O * column((-m).exp())):
        assert wrong(algorithm_2(Q, K, V, epilogue=based_on_m)[0], O)
    assert equal(algorithm_2(Q, K, V)[0], O)


def test_e20_stages_that_nobody_releases():
    def tiles_consumed(Tr, s, releases):
        free, loaded, consumed = s, 0, 0
        while True:
            if loaded < Tr and free:  # the producer, lines 9 to 13
                loaded, free = loaded + 1, free - 1
            elif consumed < loaded:  # the consumers, lines 18 to 29
                consumed, free = consumed + 1, free + releases
            else:
                return consumed

    assert tiles_consumed(Tr=8, s=2, releases=0) == 2  # Then all wait for each other.
    assert tiles_consumed(Tr=8, s=2, releases=1) == 8


# ---- Ring Attention --------------------------------------------------------------------------------------------------


def test_e21_one_round_more():
    hosts, c = 4, 3
    Q, K, V = (x.split(c) for x in draw(*3 * [hosts * c]))
    want = forward(torch.cat(Q), torch.cat(K), torch.cat(V))[0].split(c)

    def run(host, rounds):
        """Attention over the blocks that reach this host in so many rounds of computing, sending and receiving."""
        seen = [(host - count) % hosts for count in range(rounds)]
        return forward(Q[host], torch.cat([K[i] for i in seen]), torch.cat([V[i] for i in seen]))[0]

    for host in range(hosts):
        assert wrong(run(host, hosts - 1), want[host])
        assert equal(run(host, hosts), want[host])


def test_e22_six_blocks_in_bytes():
    b, c, h = 2, 128, 64
    blocks = [torch.empty(b, c, h, dtype=torch.bfloat16) for _ in ("Q", "K", "V", "next K", "next V", "O")]
    assert sum(x.numel() for x in blocks) == 6 * b * c * h
    assert sum(x.nbytes for x in blocks) == 12 * b * c * h


def test_e23_heads_not_hidden_size():
    b, n, s, h = 1, 32, 512, 4096
    S = torch.empty(b, n, s, s, dtype=torch.bfloat16, device="meta")
    assert S.nbytes == 2 * b * n * s**2
    assert 2 * b * h * s**2 == 128 * S.nbytes  # h / n: the head dimension too many


def test_e24_gigabytes_over_teraflops():
    d, bandwidth, flops = 4096, 186e9, 0.4 * 196e12
    assert round(186 / (0.4 * 196), 1) == 2.4  # as printed, in GB/s over TFLOP/s
    assert bandwidth / flops < 0.0024
    assert (2 * d**2 / bandwidth) / (d**2 / flops) > 800  # A hop takes so many times as long as the computation.


# ---- Striped Attention -----------------------------------------------------------------------------------------------


def test_e25_which_index_of_the_mask_counts_the_queries():
    devices, c = 4, 3
    Q, K, V = draw(*3 * [devices * c])
    want, _ = forward(Q, K, V, causal=True)

    def run(hidden):
        """hidden(x, y, j, k): whether MASK[x, y] = -inf for queries of device j and keys of device k."""
        S = Q @ K.T / math.sqrt(8)
        for a in range(devices * c):  # token a is number a // devices of device a % devices
            for b in range(devices * c):
                if hidden(a // devices, b // devices, a % devices, b % devices):
                    S[a, b] = -math.inf
        return S.softmax(1) @ V

    def get_mask(x, y, j, k):
        return y <= x if j < k else y < x

    assert wrong(run(get_mask), want)  # x counts queries, as rows do in section 2.1
    assert equal(run(lambda query, key, j, k: get_mask(key, query, j, k)), want)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_entries_and_tests_are_the_same():
    entries = [int(n) for n in re.findall(r"^### E(\d+)\.", PAGE, re.M)]
    tests = [int(n) for n in re.findall(r"^def test_e(\d+)_", Path(__file__).read_text(), re.M)]
    assert sorted(entries) == sorted(tests) == list(range(1, len(entries) + 1))
    for text in PAGE.split("\n### ")[1:]:
        for part in ("Place", "Printed", "Corrected", "Why it matters", "In the course"):
            assert f"**{part}**" in text, text


def test_functions_of_the_course_that_the_page_names_exist():
    names = re.findall(r"`(\w+)` in `([\w/]+\.(?:py|cu))`", PAGE)
    sources = [path for folder in ("steps", "reference") for path in (ROOT / folder).rglob("*.*")]
    for function, file in names:
        texts = [path.read_text() for path in sources if path.as_posix().endswith(f"/{file}")]
        assert any(re.search(rf"\b(?:def|void|float) {function}\(", text) for text in texts), (function, file)
    assert len(names) >= 20


CAUGHT = set()  # (mutant, the case that kills it), as the page says
for names, case in re.findall(r"\*\*Mutant\*\*: `(.+)`; case `(\w+)`", PAGE):
    CAUGHT |= {(name, case) for name in names.split("`, `")}


@pytest.mark.parametrize("name, case", sorted(CAUGHT))
def test_the_case_catches_the_mutant(name, case):
    assert catches(case, name)


def test_a_maximum_that_does_not_move_hides_the_inverse():
    assert len(CAUGHT) >= 7
    assert not catches("falling", "inverse_rescale_of_o")  # E12 says so.


def catches(case, name):
    supports = importlib.import_module("steps.step00_naive").SUPPORTS
    (chosen,) = [c for c in cases.CASES if c.name == case]
    (mutant,) = [m for m in mutants.MUTANTS if m.name == name]
    x = cases.build(chosen, supports, torch.float32)
    want = x.expected()
    return error.failures(mutant.run(x, x.tile or supports["tiles"][0], supports["order"]), want)
