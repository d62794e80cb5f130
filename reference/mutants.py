"""Mistakes that people make in FlashAttention, planted one at a time: they test the tests and name a learner's mistake.

A mutant is the tiled forward or backward below, or the ring, with one step overridden. Tile sizes, loop order, ranks
and layout come from the stage under test, so a mutant gives what that stage's own code would give with the mistake. The
contract's cases must kill every mutant that applies to a stage, that is, on some case some result is out of tolerance.
They must also tell every two mutants apart, so that a wrong result can be given the name of its cause.
"""

import functools
import math
from dataclasses import dataclass, is_dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

import torch

from reference import attention, cases, error


class NotApplicable(Exception):
    """The mistake cannot be made, or makes no difference by construction, on these inputs."""


class Forward:
    """The tiled forward in float32, one method a step.

    order: "fa1" (O is kept normalised), "fa2" (O is divided at the end) or "backwards" (fa2, from the last key tile to
    the first).
    """

    m_start = -math.inf
    accumulator = torch.float32
    variants = ()  # other kinds that make the same mistake, see `variant_of`
    needs_lse = False  # whether it is a mistake about m and l that a function without lse cannot be told to have made

    def __init__(self, inputs, tile, order):
        self.x, (self.Br, self.Bc), self.order = inputs, tile, order
        self.Nq, self.Nk, D = inputs.q.shape[-2], inputs.k.shape[-2], inputs.q.shape[-1]
        if not self.applies():
            raise NotApplicable
        self.scale = self.choose_scale(inputs.scale, D)

    @functools.cached_property
    def K(self):
        return self.key_head(self.x.k.float(), self.x.q.shape[1])

    @functools.cached_property
    def V(self):
        return self.key_head(self.x.v.float(), self.x.q.shape[1])

    def applies(self):
        """Whether the mistake can be made, and makes a difference, on these inputs."""
        return True

    def run(self, only=None):
        """{"out", "lse"} in float32. only: the first query of the one tile that is computed, if it is not all."""
        q = self.x.q.float()
        out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf)
        for i in range(0, self.Nq, self.Br) if only is None else (only,):
            Q_i = q[..., i : i + self.Br, :]
            m = torch.full(Q_i.shape[:-1], self.m_start)
            l, O = torch.zeros_like(m), torch.zeros_like(Q_i)
            end = self.end_of_keys(i) if self.x.causal else self.Nk
            for j in self.key_tiles():
                if j >= end:
                    continue  # every score of the tile would be masked, and no stage visits such a tile
                K_j, V_j = self.load(self.K, j, end), self.load(self.V, j, end)
                S = self.scale * (Q_i @ K_j.mT)  # (B, H, Br, Bc)
                S = self.mask_tail(self.mask_causal(S, i, j) if self.x.causal else S, j)
                m, l, O = self.update(m, l, O, S, V_j)
            out[..., i : i + self.Br, :], lse[..., i : i + self.Br] = self.finish(m, l, O)
        return {"out": out, "lse": lse}

    def update(self, m, l, O, S, V_j):
        m_new = self.maximum(m, S)
        unit = self.unit(m_new)
        P, alpha = self.probabilities(S, m, unit), self.alpha(m, unit)
        l_new = self.add_to_l(l, alpha, P)
        O = self.multiply_back(O, l) if self.order == "fa1" else O
        O = self.rescale_O(O, alpha) + self.operand(P) @ V_j
        O = self.normalise_step(O, l_new)
        return m_new, l_new.to(self.accumulator).float(), O.to(self.accumulator).float()

    # The steps that mutants override.
    def choose_scale(self, scale, D):
        return D**-0.5 if scale is None else scale

    def key_head(self, x, H):
        return x.repeat_interleave(H // x.shape[1], dim=1) if 0 < x.shape[1] < H else x

    def key_tiles(self):
        tiles = range(0, self.Nk, self.Bc)
        return reversed(tiles) if self.order == "backwards" else tiles

    def end_of_keys(self, i):
        """The first key that none of the queries i ... i + Br - 1 sees under a causal mask."""
        return i + self.Br + self.Nk - self.Nq

    def load(self, x, j, end):
        """Keys j ... j + Bc - 1, and zeros beyond the last key; `end` is where the loop over the tiles ends."""
        tile = x[..., j : j + self.Bc, :]
        missing = self.Bc - tile.shape[-2]
        return torch.nn.functional.pad(tile, (0, 0, 0, missing)) if missing else tile

    def shift(self):
        """What is added to a query's position under a causal mask, so that the last query sees the last key."""
        return self.Nk - self.Nq

    def positions(self, S, i, j):
        row = torch.arange(S.shape[-2])[:, None] + i + self.shift()
        return row, torch.arange(S.shape[-1])[None, :] + j

    def hidden(self, row, col):
        return col > row

    hidden_score = -math.inf

    def mask_causal(self, S, i, j):
        return S.masked_fill(self.hidden(*self.positions(S, i, j)), self.hidden_score)

    def mask_tail(self, S, j):
        real = max(0, self.Nk - j)  # keys; behind them are the zeros of `load`
        return S.masked_fill(torch.arange(S.shape[-1]) >= real, -math.inf) if real < S.shape[-1] else S

    def maximum(self, m, S):
        return torch.maximum(m, S.amax(-1))

    def unit(self, m_new):
        return m_new.nan_to_num(neginf=0.0)

    def exp(self, x):
        return x.exp()

    def alpha(self, m, unit):
        return (m - unit).exp()

    def probabilities(self, S, m, unit):
        return self.exp(S - unit[..., None])

    def operand(self, P):
        """P in the form in which it is multiplied with V."""
        return P

    def rescale_l(self, l, alpha):
        return alpha * l

    def add_to_l(self, l, alpha, P):
        return self.rescale_l(l, alpha) + P.sum(-1)

    def multiply_back(self, O, l):
        return O * l[..., None]

    def rescale_O(self, O, alpha):
        return alpha[..., None] * O

    def normalise_step(self, O, l):
        return self.divide(O, l) if self.order == "fa1" else O

    def divide(self, O, l):
        return torch.where(l[..., None] == 0, 0, O / l[..., None])

    def finish(self, m, l, O):
        return (O if self.order == "fa1" else self.divide(O, l)), m + l.log()


@functools.lru_cache(maxsize=8)  # Every mutant of the backward starts from the same forward of each case.
def _saved(inputs, tile, order):
    """(K, V, out, lse) of the forward without a mistake. K and V have one head for each query head."""
    forward = Forward(inputs, tile, order)
    results = forward.run()
    return forward.K, forward.V, results["out"], results["lse"]


class Backward:
    """The tiled backward in float32: key tiles outside, query tiles inside (FlashAttention-2, Algorithm 2)."""

    accumulator = torch.float32
    variants = ()
    needs_lse = False

    def __init__(self, inputs, tile, order):
        self.x, (self.Br, self.Bc), self.order = inputs, tile, order
        self.Nq, self.Nk, D = inputs.q.shape[-2], inputs.k.shape[-2], inputs.q.shape[-1]
        self.scale = D**-0.5 if inputs.scale is None else inputs.scale
        if not self.applies():
            raise NotApplicable

    def applies(self):
        """Whether the mistake can be made, and makes a difference, on these inputs."""
        return True

    def run(self, only=None, keys=False):
        """{"dq", "dk", "dv"} in float32.

        only: the first query of the one tile that is computed, if it is not all, or with `keys` the first key. Of that
        tile dq is then complete, or dk and dv.
        """
        x = self.x
        key_tiles, query_tiles = range(0, self.Nk, self.Bc), range(0, self.Nq, self.Br)
        if only is not None:
            key_tiles, query_tiles = ((only,), query_tiles) if keys else (key_tiles, (only,))
        K, V, out, lse = _saved(x, (self.Br, self.Bc), self.order)
        Q, dO = x.q.float(), x.dout.float()
        delta = self.delta(dO, out)
        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for j in key_tiles:
            keys = slice(j, min(j + self.Bc, self.Nk))
            for i in query_tiles:
                rows = slice(i, min(i + self.Br, self.Nq))
                S = self.score_scale() * (Q[..., rows, :] @ K[..., keys, :].mT)
                P = self.probabilities(S, lse, rows)
                if x.causal:
                    P = self.mask_causal(P, rows, keys)
                dP = dO[..., rows, :] @ V[..., keys, :].mT
                P, dS = self.returned(P, self.gradient(P, dP, delta[..., rows]))
                dq[..., rows, :] = self.add_dq(dq[..., rows, :], self.dq_scale() * (dS @ K[..., keys, :]))
                dk[..., keys, :] = self.add(dk[..., keys, :], self.dk_scale() * self.dk_product(dS, Q[..., rows, :]))
                dv[..., keys, :] = self.add(dv[..., keys, :], self.dv_product(P, dO[..., rows, :]))
        return {"dq": dq, "dk": self.sum_heads(dk), "dv": self.sum_heads(dv)}

    # The steps that mutants override.
    def score_scale(self):
        return self.scale

    def dq_scale(self):
        return self.scale

    def dk_scale(self):
        return self.scale

    def delta(self, dO, O):
        return (dO * O).sum(-1)

    def probabilities(self, S, lse, rows):
        return (S - lse[..., rows, None]).exp()

    def shift(self):
        return self.Nk - self.Nq

    def mask_causal(self, P, rows, keys):
        row = torch.arange(rows.start, rows.stop)[:, None] + self.shift()
        return P.masked_fill(torch.arange(keys.start, keys.stop)[None, :] > row, 0)

    def gradient(self, P, dP, delta):
        return P * (dP - delta[..., None])

    def returned(self, P, dS):
        return P, dS

    def dk_product(self, dS, Q_i):
        return dS.mT @ Q_i

    def dv_product(self, P, dO_i):
        return P.mT @ dO_i

    def add(self, total, term):
        return (total + term).to(self.accumulator).float()

    def add_dq(self, total, term):
        return self.add(total, term)

    def sum_heads(self, grad):
        return attention._sum_groups(grad, self.x.k)


@dataclass(frozen=True)
class Mutant:
    name: str
    says: str  # completes the sentence for the learner: "equals what you get when ..."
    kind: type
    sources: str = ""  # where it is printed or was seen

    def run(self, inputs, tile, order):
        """The mistaken results by name; raises NotApplicable."""
        return self.kind(inputs, tile, order).run()

    @property
    def concerns_the_mask(self):
        """Whether it changes which scores are hidden, or how. A function that masks nothing cannot make it."""
        right = Forward if issubclass(self.kind, Forward) else Backward
        steps = "shift", "positions", "hidden", "hidden_score", "mask_causal", "mask_tail"
        return any(getattr(self.kind, step, None) != getattr(right, step, None) for step in steps)


MUTANTS: list[Mutant] = []


def planted(name, base, says, sources="", *, among=MUTANTS, **steps):
    """Registers the mutant that is `base` with these steps in the place of its own, and returns its class.

    base: Forward, Backward, Ring, or a class that is made from one of them. steps: functions or values by name. Where a
    function needs the step that it takes the place of, it calls that of its base: Forward.finish(self, m, l, O).
    """
    kind = type(name, (base,), {**steps, "variants": ()})  # and not the variants of the mutant that it is made from
    among.append(Mutant(name, says, kind, sources))
    return kind


def mutant(says, sources="", among=MUTANTS):
    """Registers a class under its name in snake case: a mistake that takes more than one step, or a longer one."""

    def register(kind):
        name = "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__).lstrip("_")
        kind.variants = ()
        among.append(Mutant(name, says, kind, sources))
        return kind

    return register


def variant_of(kind):
    """Marks a class as the same mistake as the mutant `kind`, made where an exponential of -inf is guarded otherwise.

    Results that equal those of a variant get the mutant's name. Stage by stage only the mutant itself has to be killed.
    """

    def register(other):
        kind.variants = (*kind.variants, other)
        return other

    return register


def variant(kind, *bases, **steps):
    """A variant of the mutant `kind` (see `variant_of`) that is its bases, or `kind`, with these steps."""
    return variant_of(kind)(type(f"variant_of_{kind.__name__}", bases or (kind,), steps))


# Where many mistakes make a difference: these take the place of `applies`.


def causal(self):
    return self.x.causal


def shifted(self):
    return self.x.causal and self.Nq != self.Nk


def some_rows_see_no_key(self):
    return self.x.causal and self.Nq > self.Nk > 0


def square_tiles(self):
    return self.Br == self.Bc


# ---- the forward -----------------------------------------------------------------------------------------------------


planted("no_rescale_of_o", Forward, "O is not rescaled when the running maximum moves",
        rescale_O=lambda self, O, alpha: O)
planted("no_rescale_of_l", Forward, "l is not rescaled when the running maximum moves",
        rescale_l=lambda self, l, alpha: l)
planted("inverse_rescale_of_o", Forward, "O is rescaled by exp(m_new - m), the inverse of what it needs",
        "FlashAttention-2, Algorithm 1, line 10 prints diag(...)^-1; Dao-AILab/flash-attention issue 991",
        rescale_O=lambda self, O, alpha: torch.where(alpha[..., None] == 0, 0, O / alpha[..., None]))
planted("inverse_alpha", Forward, "O and l are both rescaled by exp(m_new - m), the inverse of what they need",
        alpha=lambda self, m, unit: torch.where(m.isneginf(), 0, (unit - m).exp()))
InfiniteAlpha = planted(
    "infinite_alpha", Forward,
    "alpha is exp(m_new - m), the inverse of what it has to be (papers/errata.md, E12). At the first tile it is "
    "infinite, and 0 * inf is NaN",
    alpha=lambda self, m, unit: (unit - m).exp())
planted("divided_by_alpha", Forward,
        "O is divided by alpha instead of multiplied (papers/errata.md, E12): alpha begins as 0, and 0 / 0 is NaN",
        "FlashAttention-2, Algorithm 1, line 10 prints diag(...)^-1",
        rescale_O=lambda self, O, alpha: O / alpha[..., None])


@mutant("the maximum is never subtracted, so exp overflows")
class NoMaximum(Forward):
    m_start = 0.0

    def maximum(self, m, S):
        return m


planted("maximum_starts_at_zero", Forward, "the running maximum starts at 0 instead of -inf",
        "gpu-mode/lectures, lecture_012/flash_attention.cu starts at 1e-30, to the same effect",
        m_start=0.0)


@mutant("one maximum of all rows is subtracted, and exp underflows in rows with much smaller scores")
class GlobalMaximum(Forward):
    def applies(self):
        return self.x.q.numel() and self.x.k.numel()

    def run(self, only=None):
        S = self.scale * (self.x.q.float() @ self.K.mT)
        seen = attention.visible(self.Nq, self.Nk, self.x.causal)
        self.m_start = S.masked_fill(~seen, -math.inf).amax().item()
        return super().run(only)

    def maximum(self, m, S):
        return m


planted("first_maximum_kept", Forward, "the first tile's maximum is kept for the whole row",
        maximum=lambda self, m, S: torch.where(m.isneginf(), S.amax(-1), m))
TileMaximum = planted(
    "tile_maximum", Forward, "each tile's own maximum is taken for the running one",
    maximum=lambda self, m, S: S.amax(-1))
planted("no_guard", Forward, "exp(-inf - (-inf)) or 0 / 0 is not guarded: a row that sees no key becomes NaN",
        applies=some_rows_see_no_key, unit=lambda self, m_new: m_new)
planted("out_unguarded", Forward,
        "the softmax of a row that sees no key is not guarded: its lse is right, but its out is 0 / 0, which is NaN",
        applies=some_rows_see_no_key, divide=lambda self, O, l: O / l[..., None])


@mutant("the tile's own maximum is subtracted, and for a row that sees no key of the tile exp(-inf - (-inf)) is NaN")
class MaskedRowNotGuarded(Forward):
    def applies(self):
        return self.x.causal and self.Nk > self.Bc  # with a single tile of keys it is the mistake no_guard

    def probabilities(self, S, m, unit):
        """P is relative to the tile's own maximum and then multiplied by beta, as in FlashAttention, Algorithm 2."""
        m_tile = S.amax(-1)
        beta = (m_tile - unit).exp()
        return beta[..., None] * self.exp(S - m_tile[..., None])


planted("masked_tile_visited", MaskedRowNotGuarded,
        "a tile that is masked throughout is neither skipped nor guarded: its P = exp(-inf - (-inf)) is NaN",
        "FlashAttention, Algorithm 2, line 12; also Algorithm 5",
        end_of_keys=lambda self, i: self.Nk)

TileLocalMask = planted(
    "tile_local_mask", Forward, "the causal mask compares positions within the tile",
    positions=lambda self, S, i, j: (torch.arange(S.shape[-2])[:, None], torch.arange(S.shape[-1])[None, :]))
planted("strict_mask", Forward, "the causal mask is strict: a query does not see its own key",
        hidden=lambda self, row, col: col >= row)
planted("loose_mask", Forward, "the causal mask hides one key too few: a query sees the key after its own",
        hidden=lambda self, row, col: col > row + 1)
planted("lower_triangle_masked", Forward,
        "the causal mask hides the lower triangle: a query sees the later keys instead of the earlier ones",
        hidden=lambda self, row, col: col < row)
ShiftSubtracted = planted(
    "shift_subtracted", Forward, "the causal mask subtracts Nk - Nq from a query's position instead of adding it",
    applies=shifted, shift=lambda self: self.Nq - self.Nk)


@mutant(
    "the causal mask is aligned by the wrong sign of Nk - Nq where there are more keys than queries, and at the top "
    "left where there are fewer"
)
class WrongSignOfTheShift(Forward):
    applies = shifted

    def shift(self):
        return -max(0, self.Nk - self.Nq)

    def end_of_keys(self, i):
        return self.Nk


planted("mask_times_infinity", Forward,
        "the mask is hidden * -inf, which is NaN where nothing is hidden, because 0 * -inf is NaN",
        mask_causal=lambda self, S, i, j: S + self.hidden(*self.positions(S, i, j)) * -math.inf)
MaskedToMinus1e9 = planted(
    "masked_to_minus1e9", Forward,
    "masked scores are set to a large negative number, such as -1e9, instead of -inf: a row that sees no key gets "
    "the mean of the values",
    applies=causal, hidden_score=-1e9)
TopLeft = planted(
    "top_left", Forward, "the causal mask is aligned at the top left",
    applies=shifted, shift=lambda self: 0)
MaskInverted = planted(
    "mask_inverted", Forward,
    "the mask hides what is seen and shows what is hidden: the branches of the choice are exchanged",
    hidden=lambda self, row, col: col <= row)


@mutant("i, the number of the tile's first query, is multiplied by Br as if it were the tile's number; or j by Bc")
class TileNumbersForPositions(Forward):
    times_i, times_j = True, False

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row + self.times_i * (self.Br - 1) * i, col + self.times_j * (self.Bc - 1) * j


ShiftNeverNegative = planted(
    "shift_never_negative", Forward,
    "Nk - Nq is taken for 0 where it is negative, and the first queries see keys that come after them",
    applies=shifted, shift=lambda self: max(0, self.Nk - self.Nq))
MaskedToZero = planted(
    "masked_to_zero", Forward, "masked scores are set to 0 instead of -inf", hidden_score=0.0)
planted("tail_not_masked", Forward, "keys beyond the last one, zeros in the last tile, are not masked",
        mask_tail=lambda self, S, j: S)
planted("tail_dropped", Forward, "the last, ragged tile of keys is left out",
        key_tiles=lambda self: range(0, self.Nk // self.Bc * self.Bc, self.Bc))


@mutant("the number of queries is taken for the number of keys")
class QueriesForKeys(Forward):
    def applies(self):
        return self.Nq < self.Nk  # equal: no difference; more queries: reads outside k, with any result

    def key_tiles(self):
        return range(0, self.Nq, self.Bc)

    def mask_tail(self, S, j):
        return S.masked_fill(torch.arange(S.shape[-1]) + j >= self.Nq, -math.inf)


planted("hard_coded_scale", Forward, "the scale is hard-coded for head_dim 64",
        choose_scale=lambda self, scale, D: 0.125)
planted("scale_ignored", Forward, "the scale argument is ignored",
        choose_scale=lambda self, scale, D: D**-0.5)
planted("no_scale", Forward, "the scores are not scaled",
        choose_scale=lambda self, scale, D: 1.0)
planted("heads_interleaved", Forward, "query head h reads key head h mod Hk instead of h // (H / Hk)",
        applies=lambda self: self.x.k.shape[1] not in (1, self.x.q.shape[1]),
        key_head=lambda self, x, H: x.repeat(1, H // x.shape[1], 1, 1))
planted("half_accumulators", Forward, "O and l are accumulated in half precision",
        accumulator=torch.float16)


@mutant("O is divided by l after every tile and never multiplied back")
class NotMultipliedBack(Forward):
    def multiply_back(self, O, l):
        return O

    def normalise_step(self, O, l):
        return self.divide(O, l)

    def finish(self, m, l, O):
        return O, m + l.log()


planted("never_divided", NotMultipliedBack, "O is never divided by l_new",
        applies=lambda self: self.order == "fa1",  # In the other orders it is the mistake not_normalised.
        divide=lambda self, O, l: O)
planted("divided_at_every_tile", NotMultipliedBack,
        "O is divided by l after every tile, never multiplied back, and divided once more at the end",
        finish=lambda self, m, l, O: (self.divide(O, l), m + l.log()))
planted("divided_twice", Forward, "O has already been divided by l when it is divided by l at the end",
        finish=lambda self, m, l, O: (self.divide(Forward.finish(self, m, l, O)[0], l), m + l.log()))


@mutant("l is overwritten before the factor of the old O is computed, which needs the old l")
class LOverwritten(Forward):
    def applies(self):
        return self.order == "fa1"  # In the other orders O is not multiplied back.

    def add_to_l(self, l, alpha, P):
        self.l_new = super().add_to_l(l, alpha, P)
        return self.l_new

    def multiply_back(self, O, l):
        return super().multiply_back(O, self.l_new)


planted("not_normalised", Forward, "O is not divided by l at the end",
        divide=lambda self, O, l: O)
planted("lse_in_base2", Forward, "lse is in base 2",
        finish=lambda self, m, l, O: (Forward.finish(self, m, l, O)[0], (m + l.log()) / math.log(2)))
planted("log_of_l_in_base2", Forward, "lse is m + log2 l: the logarithm of l is in base 2, and m is not",
        finish=lambda self, m, l, O: (Forward.finish(self, m, l, O)[0], m + l.log2()))
planted("lse_without_maximum", Forward, "lse leaves out the maximum",
        finish=lambda self, m, l, O: (Forward.finish(self, m, l, O)[0], l.log()))
planted("maximum_for_lse", Forward, "the maximum is returned as lse",
        finish=lambda self, m, l, O: (Forward.finish(self, m, l, O)[0], m))

planted("nothing_rescaled", Forward,
        "m is overwritten before alpha is computed from it, so neither O nor l is rescaled",
        alpha=lambda self, m, unit: torch.ones_like(m))
PWithOldMaximum = planted(
    "p_with_old_maximum", Forward, "P is computed with the maximum before this tile instead of m_new",
    probabilities=lambda self, S, m, unit: self.exp(S - m[..., None]))
planted("new_part_of_l_rescaled", Forward,
        "the new keys' part of l is multiplied with alpha, too: alpha * (l + rowsum P)",
        add_to_l=lambda self, l, alpha, P: alpha * (l + P.sum(-1)))
planted("maximum_not_stored", Forward,
        "m keeps its old value: it stays -inf, and each tile's sums replace all earlier ones",
        update=lambda self, m, l, O, S, V_j: (m, *Forward.update(self, m, l, O, S, V_j)[1:]))


@mutant("l is returned in the place of m, and m in the place of l")
class MAndLExchanged(Forward):
    needs_lse = True

    def update(self, m, l, O, S, V_j):
        m_new, l_new, O_new = super().update(m, l, O, S, V_j)
        return l_new, m_new, O_new


@mutant("l and O are multiplied with alpha at every key of the tile instead of once a tile")
class AlphaAtEveryKey(Forward):
    def probabilities(self, S, m, unit):
        self.keys = (S > -math.inf).sum(-1)  # A row sees the tile's first keys.
        later = (self.keys[..., None] - 1 - torch.arange(S.shape[-1])).clamp(min=0)
        return super().probabilities(S, m, unit) * self.alpha(m, unit)[..., None] ** later

    def rescale_l(self, l, alpha):
        return alpha**self.keys * l

    def rescale_O(self, O, alpha):
        return (alpha**self.keys)[..., None] * O


@mutant("l is multiplied with alpha at every key of the tile, and not once a tile as O is")
class LTimesAlphaAtEveryKey(AlphaAtEveryKey):
    def probabilities(self, S, m, unit):
        self.P_for_l = super().probabilities(S, m, unit)
        return self.exp(S - unit[..., None])

    def add_to_l(self, l, alpha, P):
        return super().add_to_l(l, alpha, self.P_for_l)

    def rescale_O(self, O, alpha):
        return alpha[..., None] * O


class AxesExchanged(Forward):
    """A square tile whose maximum or sum runs over the queries: what belongs to a key is taken for a query's."""

    applies = square_tiles

    def run(self, only=None):
        """As the forward, but for whole tiles, because zeros beyond the last query count too."""
        self.x = replace(self.x, q=torch.nn.functional.pad(self.x.q, (0, 0, 0, -self.Nq % self.Br)))
        return {name: x[:, :, : self.Nq] for name, x in super().run(only).items()}


planted("maximum_over_queries", AxesExchanged,
        "the maximum is taken over the queries of the tile, and not over the keys: the wrong axis",
        maximum=lambda self, m, S: torch.maximum(m, S.amax(-2)))
SumOverQueries = planted(
    "sum_over_queries", AxesExchanged,
    "P is added up over the queries of the tile, and not over the keys: the wrong axis",
    add_to_l=lambda self, l, alpha, P: self.rescale_l(l, alpha) + P.sum(-2))
AlphaOnTheNewPartOfL = planted(
    "alpha_on_the_new_part_of_l", Forward,
    "alpha multiplies the new part of l and not the old one: l + alpha * rowsum P",
    add_to_l=lambda self, l, alpha, P: l + alpha * P.sum(-1))


@mutant("alpha multiplies the new parts of l and O and not the old ones: l + alpha * rowsum P, O + alpha * P V")
class AlphaOnTheNewParts(AlphaOnTheNewPartOfL):
    def alpha(self, m, unit):
        self.alpha_now = super().alpha(m, unit)
        return self.alpha_now

    def operand(self, P):
        return self.alpha_now[..., None] * P

    def rescale_O(self, O, alpha):
        return O


planted("alpha_on_the_new_part_of_o", AlphaOnTheNewParts,
        "alpha multiplies the new part of O and not the old one: O + alpha * P V",
        add_to_l=Forward.add_to_l)


@mutant("O is multiplied with alpha at every key of the tile, and not once a tile as l is")
class OTimesAlphaAtEveryKey(AlphaAtEveryKey):
    def probabilities(self, S, m, unit):
        self.P_for_O = super().probabilities(S, m, unit)
        return self.exp(S - unit[..., None])

    def operand(self, P):
        return self.P_for_O

    def rescale_l(self, l, alpha):
        return alpha * l


@mutant("the exponentials are powers of 2 without the factor log2(e): 2^(S - m) for exp(S - m)")
class PowersOf2(Forward):
    def exp(self, x):
        return x.exp2()

    def alpha(self, m, unit):
        return (m - unit).exp2()


planted("p_missing_from_o", Forward, "P is missing where V is added to O: each key counts once, whatever its score",
        operand=lambda self, P: torch.ones_like(P))


class PRelativeToTile(Forward):
    """P is relative to the tile's own maximum, as in FlashAttention, Algorithm 1, and beta is forgotten somewhere."""

    def probabilities(self, S, m, unit):
        self.P_tile = self.exp(S - self.unit(S.amax(-1))[..., None])
        return super().probabilities(S, m, unit)


@mutant("beta is missing: P, relative to its own tile's maximum, is added to l and to O as it is")
class BetaMissing(PRelativeToTile):
    def probabilities(self, S, m, unit):
        super().probabilities(S, m, unit)
        return self.P_tile


planted("beta_missing_from_o", PRelativeToTile,
        "beta is missing from O: P V, relative to its own tile's maximum, is added to O as it is",
        operand=lambda self, P: self.P_tile)
planted("beta_missing_from_l", PRelativeToTile,
        "beta is missing from l: the sum of P, relative to its own tile's maximum, is added to l as it is",
        add_to_l=lambda self, l, alpha, P: Forward.add_to_l(self, l, alpha, self.P_tile))


@mutant("alpha and beta are exchanged: beta multiplies the old sums, and alpha those of this tile")
class AlphaAndBetaExchanged(PRelativeToTile):
    def applies(self):
        return self.order == "fa1"  # The other orders have no beta.

    def probabilities(self, S, m, unit):
        self.beta = (S.amax(-1) - unit).exp()
        return super().probabilities(S, m, unit)

    def alpha(self, m, unit):
        self.alpha_now = super().alpha(m, unit)
        return self.alpha_now

    def add_to_l(self, l, alpha, P):
        return self.beta * l + alpha * self.P_tile.sum(-1)

    def operand(self, P):
        return self.alpha_now[..., None] * self.P_tile

    def rescale_O(self, O, alpha):
        return self.beta[..., None] * O


@mutant("P, which is relative to m_new already, is multiplied with beta as well")
class BetaTwice(Forward):
    def probabilities(self, S, m, unit):
        beta = (S.amax(-1) - unit).exp()
        return beta[..., None] * super().probabilities(S, m, unit)


planted("diagonal_tiles_not_masked", Forward, "the tiles that the causal diagonal crosses are not masked",
        mask_causal=lambda self, S, i, j: torch.full_like(S, -math.inf) if j >= i + self.Br + self.Nk - self.Nq else S)


class LoopEndsEarly(Forward):
    """A causal loop over the keys that ends too early.

    Some rows see keys beyond its end. Those in the last visited tile are zeros, and the others are left out.
    """

    applies = causal

    def load(self, x, j, end):
        return super().load(x[..., :end, :], j, end)


LoopEndsAtTopLeft = planted(
    "loop_ends_at_top_left", LoopEndsEarly, "the causal loop over the keys ends at the diagonal of the top left",
    # With Nq > Nk it ends too late, and the mask hides the extra keys.
    applies=lambda self: self.x.causal and self.Nq < self.Nk,
    end_of_keys=lambda self, i: min(i + self.Br, self.Nq))
planted("loop_ends_at_top_left_tile", LoopEndsAtTopLeft,
        "the causal loop over the keys ends at the diagonal of the top left, also for rows beyond the last query",
        applies=lambda self: LoopEndsAtTopLeft.applies(self) and self.Nq % self.Br,
        end_of_keys=lambda self, i: min(i + self.Br, self.Nk))
planted("loop_ends_at_first_query", LoopEndsEarly,
        "the causal loop over the keys ends with the keys that the block's first query sees",
        end_of_keys=lambda self, i: max(0, i + 1 + self.Nk - self.Nq))
planted("loop_ends_one_early", LoopEndsEarly,
        "the causal loop over the keys ends one key early: the block's last query does not see its own key",
        end_of_keys=lambda self, i: max(0, min(i + self.Br, self.Nq) - 1 + self.Nk - self.Nq))


class OperandMixedUp(Forward):
    """P is multiplied with V as operand A of the tensor cores, 16 x 16, with its numbers in the wrong positions."""

    def applies(self):
        return self.Br % 16 == self.Bc % 16 == 0

    def run(self, only=None):
        """As the forward, but for whole groups of 16 rows, because zeros beyond the last query change places too."""
        self.x = replace(self.x, q=torch.nn.functional.pad(self.x.q, (0, 0, 0, -self.Nq % 16)))
        return {name: x[:, :, : self.Nq] for name, x in super().run(only).items()}

    def operand(self, P):
        # (..., rows / 16, row / 8 % 2, row % 8, keys / 16, key / 8 % 2, key / 2 % 4, key % 2)
        split = P.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 2, 8))
        return self.mixed_up(split).reshape(P.shape)


planted("operand_rows_for_keys", OperandMixedUp,
        "operand A's two middle registers are exchanged: P's rows 8 to 15 are where its keys 8 to 15 belong",
        mixed_up=lambda self, P: P.transpose(-6, -3))
planted("operand_halves_exchanged", OperandMixedUp,
        "operand A's registers have two neighbouring keys in the wrong order: the second is in the lower half",
        mixed_up=lambda self, P: P.flip(-1))
planted("operand_pairs_of_rows", OperandMixedUp,
        "operand A's registers hold the rows g and g + 8 of one key instead of two neighbouring keys of one row",
        mixed_up=lambda self, P: P.transpose(-6, -1))
planted("operand_first_keys_twice", OperandMixedUp,
        "operand A has P of its first 8 keys where that of the other 8 belongs, too",
        mixed_up=lambda self, P: P[..., :1, :, :].expand(P.shape))
planted("operand_rows_exchanged", OperandMixedUp, "operand A's rows 0 to 7 and 8 to 15 are exchanged",
        mixed_up=lambda self, P: P.flip(-6))
planted("operand_interleaved", OperandMixedUp,
        "operand A's registers hold a key of `near` and one of `far` instead of two neighbouring keys",
        mixed_up=lambda self, P: P.transpose(-3, -1))


@mutant(
    "S * c - m * c is one FMA, in which m * c is rounded and S * c is not: at the maximum the exponent is not 0",
    "NVIDIA's compilers contract so by default (CUDA programming guide, floating-point contraction, -fmad=true)",
)
class ShiftFused(Forward):
    def unit(self, m_new):
        c = math.log2(math.e)  # exp S is computed as 2^(c S)
        rounded = (c * super().unit(m_new).double()).float()
        return rounded.double() / c  # S minus this is not rounded

    def exp(self, x):
        return x.exp().float()


# ---- the forward's mistakes, made in other ways ----------------------------------------------------------------------


@variant_of(InfiniteAlpha)
class InfiniteAlphaWhereKeysAreSeen(InfiniteAlpha):
    """Stage 01's exp_difference(m_new, m), which is 0 where both are -inf."""

    def maximum(self, m, S):
        self.m_new = super().maximum(m, S)
        return self.m_new

    def alpha(self, m, unit):
        return super().alpha(m, unit).masked_fill(self.m_new.isneginf(), 0)


@variant_of(TileMaximum)
class TileMaximumUnguarded(TileMaximum):
    """Stage 01's exp_difference(m, m_new), infinite where a row sees earlier keys, but none of this tile."""

    def maximum(self, m, S):
        self.m_new = super().maximum(m, S)
        return self.m_new

    def alpha(self, m, unit):
        return (m - self.m_new).exp().masked_fill(m.isneginf(), 0)


# exp(S) / sum exp(S), which for a row that sees no key is 0 / 0.
variant(NoMaximum, divide=lambda self, O, l: O / l[..., None])

# Stage 01's exp_difference(S, m), which is 0 where S is -inf.
variant(PWithOldMaximum, probabilities=lambda self, S, m, unit: self.exp(S - m[..., None]).masked_fill(S.isneginf(), 0))
# 0 is subtracted where the old maximum is -inf.
variant(PWithOldMaximum, probabilities=lambda self, S, m, unit: self.exp(S - m.nan_to_num(neginf=0.0)[..., None]))

# A row that sees no key gets the mean of all values, because no tile of keys is left out.
Minus1e9InTheMatrixForm = variant(MaskedToMinus1e9, end_of_keys=lambda self, i: self.Nk)
# Stage 03's S, which is multiplied with the scale after it has been masked.
variant(MaskedToMinus1e9, hidden_score=property(lambda self: -1e9 * self.scale))
# torch.finfo(dtype).min, as in Hugging Face's transformers.
MaskedToTheSmallestNumber = variant(
    MaskedToMinus1e9, hidden_score=property(lambda self: torch.finfo(self.x.q.dtype).min))
TheSmallestNumberInTheMatrixForm = variant(MaskedToMinus1e9, MaskedToTheSmallestNumber, Minus1e9InTheMatrixForm)
# A row that sees no key, because the shift has the wrong sign, gets the mean of the values.
variant(WrongSignOfTheShift, TheSmallestNumberInTheMatrixForm, WrongSignOfTheShift, applies=shifted)

# i and j are both multiplied, or j alone.
variant(TileNumbersForPositions, times_j=True)
variant(TileNumbersForPositions, times_i=False, times_j=True)


class OnlyInDiagonalTiles(Forward):
    """As in stage 03, which masks only the tiles with a key that some query of the tile does not see."""

    def mask_causal(self, S, i, j):
        full = max(0, i + 1 + self.Nk - self.Nq) // self.Bc * self.Bc
        return super().mask_causal(S, i, j) if j >= full else S


variant(TopLeft, OnlyInDiagonalTiles, TopLeft)
variant(ShiftSubtracted, OnlyInDiagonalTiles, ShiftSubtracted)
variant(ShiftNeverNegative, OnlyInDiagonalTiles, ShiftNeverNegative)
# In stage 03 keys that do not exist are hidden by the same function.
variant(MaskedToZero, OnlyInDiagonalTiles, MaskedToZero,
        mask_tail=lambda self, S, j: S.masked_fill(torch.arange(S.shape[-1]) + j >= self.Nk, 0.0))


@variant_of(TileLocalMask)
class TileLocalInDiagonalTiles(OnlyInDiagonalTiles, TileLocalMask):
    """As in stage 03, whose mask hides keys beyond the last one too, here counted from the tile's first key."""

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row + self.Nk - self.Nq, col

    def mask_tail(self, S, j):
        return S.masked_fill(torch.arange(S.shape[-1]) >= self.Nk, -math.inf)


@variant_of(MaskedToMinus1e9)
class TheSmallestNumberBeforeTheScale(OnlyInDiagonalTiles, MaskedToMinus1e9):
    """torch.finfo(dtype).min in stage 03, also for keys that do not exist."""

    @property
    def hidden_score(self):
        return torch.finfo(torch.float32).min * self.scale

    def mask_tail(self, S, j):
        return S.masked_fill(torch.arange(S.shape[-1]) + j >= self.Nk, self.hidden_score)


@variant_of(MaskInverted)
class InvertedInDiagonalTiles(OnlyInDiagonalTiles, MaskInverted):
    """As in stage 03, whose mask then shows the zeros beyond the last key, and hides the keys before them."""

    def hidden(self, row, col):
        return super().hidden(row, col) & (col < self.Nk)

    def mask_tail(self, S, j):
        real = self.Nk - j
        return S if self.x.causal or real >= S.shape[-1] else S.masked_fill(torch.arange(S.shape[-1]) < real, -math.inf)


class TileNumbersInDiagonalTiles(OnlyInDiagonalTiles, TileNumbersForPositions):
    """As in stage 03, whose mask also hides keys beyond the last one by their positions."""

    def mask_tail(self, S, j):
        beyond = torch.arange(S.shape[-1]) + j * (self.Bc if self.times_j else 1) >= self.Nk
        return S.masked_fill(beyond, -math.inf) if j + S.shape[-1] > self.Nk else S


variant(TileNumbersForPositions, TileNumbersInDiagonalTiles)
variant(TileNumbersForPositions, TileNumbersInDiagonalTiles, times_j=True)
variant(TileNumbersForPositions, TileNumbersInDiagonalTiles, times_i=False, times_j=True)


class NoSumIsZero(Forward):
    """As in stage 03, which takes 1 for an l of 0."""

    def finish(self, m, l, O):
        return super().finish(m, torch.where(l == 0, 1, l), O)


variant(SumOverQueries, NoSumIsZero, SumOverQueries)
variant(AlphaOnTheNewPartOfL, NoSumIsZero, AlphaOnTheNewPartOfL)
variant(AlphaOnTheNewParts, NoSumIsZero, AlphaOnTheNewParts)


# ---- the backward ----------------------------------------------------------------------------------------------------


planted("delta_missing", Backward, "delta is missing from dS",
        gradient=lambda self, P, dP, delta: P * dP)
planted("delta_of_the_tile", Backward, "delta is summed over one tile of keys instead of the whole row",
        gradient=lambda self, P, dP, delta: P * (dP - (P * dP).sum(-1, keepdim=True)))
planted("delta_added", Backward, "delta is added to dP instead of subtracted",
        gradient=lambda self, P, dP, delta: P * (dP + delta[..., None]))
planted("delta_of_the_last_column", Backward, "delta is the last column of dO * O instead of the row's sum",
        delta=lambda self, dO, O: (dO * O)[..., -1])
planted("delta_product_of_sums", Backward,
        "delta is the product of the sums of dO and O instead of the sum of the products",
        delta=lambda self, dO, O: dO.sum(-1) * O.sum(-1))
planted("delta_of_do", Backward, "delta is the sum of dO * dO instead of dO * O",
        delta=lambda self, dO, O: (dO * dO).sum(-1))
DeltaOutsideP = planted(
    "delta_outside_p", Backward, "P is multiplied with dP alone: P * dP - delta instead of P * (dP - delta)",
    gradient=lambda self, P, dP, delta: P * dP - delta[..., None])
planted("elementwise_derivative", Backward,
        "dS is P * (1 - P) * dP, as if each P depended on its own score alone: all of them share l",
        gradient=lambda self, P, dP, delta: P * (1 - P) * dP)
planted("p_as_a_power_of2", Backward, "P is recomputed as a power of 2 without the factor log2(e): 2^(S - lse)",
        probabilities=lambda self, S, lse, rows: (S - lse[..., rows, None]).exp2())
planted("ds_scaled", Backward, "dS has the factor scale, which dq and dk then have twice",
        gradient=lambda self, P, dP, delta: self.scale * Backward.gradient(self, P, dP, delta))
planted("p_and_ds_exchanged", Backward, "dS is returned in the place of P, and P in the place of dS",
        returned=lambda self, P, dS: (dS, P))
planted("softmax_of_the_tile", Backward, "P is the softmax of one tile instead of exp(S - lse)",
        probabilities=lambda self, S, lse, rows: S.softmax(-1))


@mutant("a row that sees no key is not guarded: its lse is -inf, and exp(-inf - (-inf)) is NaN")
class NoGuardInBackward(Backward):
    applies = some_rows_see_no_key

    def mask_causal(self, P, rows, keys):
        no_key = torch.arange(rows.start, rows.stop)[:, None] + self.Nk - self.Nq < 0
        return super().mask_causal(P, rows, keys).masked_fill(no_key, math.nan)


planted("ds_without_p", Backward, "dS lacks the factor P",
        gradient=lambda self, P, dP, delta: dP - delta[..., None])
planted("dq_scale_missing", Backward, "dq lacks the factor scale",
        dq_scale=lambda self: 1.0)
planted("dk_scale_missing", Backward, "dk lacks the factor scale",
        dk_scale=lambda self: 1.0)
planted("p_without_scale", Backward, "P is recomputed from scores without the scale",
        score_scale=lambda self: 1.0)
planted("scale_ignored_in_backward", Backward, "P is recomputed with 1/sqrt(D) in the place of scale",
        score_scale=lambda self: self.x.q.shape[-1] ** -0.5)
planted("stale_lse", Backward, "P is recomputed with a stale lse: that of the first query tile",
        probabilities=lambda self, S, lse, rows: Backward.probabilities(self, S, lse, slice(0, S.shape[-2])))
planted("lse_taken_in_base2", Backward, "P is recomputed with an lse in base 2",
        probabilities=lambda self, S, lse, rows: Backward.probabilities(self, S, lse / math.log(2), rows))


def untransposed(self, A, x):
    """A x for a tile A (rows, keys) and x (rows, D), both padded with zeros to a full tile, as in a kernel."""
    rows, keys = A.shape[-2:]
    A = torch.nn.functional.pad(A, (0, self.Bc - keys, 0, self.Br - rows))
    return (A @ torch.nn.functional.pad(x, (0, 0, 0, self.Br - rows)))[..., :keys, :]


planted("dv_wrong_transpose", Backward, "dv is multiplied with P instead of its transpose",
        applies=square_tiles, dv_product=untransposed)
planted("dk_wrong_transpose", Backward, "dk is multiplied with dS instead of its transpose",
        "FlashAttention-2 prints dK = Q dS^T in section 2.2; Dao-AILab/flash-attention issue 373",
        applies=square_tiles, dk_product=untransposed)
planted("dq_overwritten", Backward, "dq of the last key tile overwrites the others instead of being added",
        add_dq=lambda self, total, term: term)
planted("no_mask_in_backward", Backward, "the backward forgets the causal mask",
        applies=causal, mask_causal=lambda self, P, rows, keys: P)
planted("top_left_in_backward", Backward, "the backward's causal mask is aligned at the top left",
        applies=shifted, shift=lambda self: 0)
planted("heads_not_summed", Backward, "dk and dv keep one query head of the group instead of the sum",
        applies=lambda self: self.x.q.shape[1] != self.x.k.shape[1],
        sum_heads=lambda self, grad: grad.unflatten(1, (self.x.k.shape[1], -1))[:, :, -1])
planted("half_gradients", Backward, "dq, dk and dv are accumulated in half precision",
        accumulator=torch.float16)
LseMissing = planted(
    "lse_missing", Backward, "P is recomputed without lse: exp S",
    probabilities=lambda self, S, lse, rows: S.exp())
planted("dq_scaled_twice", Backward, "dq has the factor scale twice",
        dq_scale=lambda self: self.scale**2)


@mutant("each of the Bc threads adds one element of the tile of dq, and the other elements are never added")
class DqOneElementAThread(Backward):
    def add_dq(self, total, term):
        added = torch.arange(term.shape[-2:].numel()).reshape(term.shape[-2:]) < self.Bc
        return self.add(total, torch.where(added, term, 0))


planted("dq_added_by_every_thread", Backward,
        "each of the Bc threads adds every element of the tile of dq, so each element is added Bc times",
        add_dq=lambda self, total, term: self.add(total, self.Bc * term))

# Stage 03's P, which is never larger than 1.
variant(LseMissing, probabilities=lambda self, S, lse, rows: S.exp().clamp(max=1))


@variant_of(DeltaOutsideP)
class DeltaOutsidePInVisitedTiles(DeltaOutsideP):
    """As in stage 03, which leaves out the tiles in which no query sees a key."""

    visited = True

    def mask_causal(self, P, rows, keys):
        self.visited = keys.start < rows.start + self.Br + self.Nk - self.Nq
        return super().mask_causal(P, rows, keys)

    def gradient(self, P, dP, delta):
        return super().gradient(P, dP, delta) * self.visited


# ---- the ring --------------------------------------------------------------------------------------------------------


class Ring(Forward):
    """The forward of a sequence that is divided among ranks, in float32.

    Each rank merges the block of its own keys, then that of the previous rank's keys, and so on. A block is computed at
    once and not tile by tile, which changes only the rounding.
    """

    def applies(self):
        return self.x.ring is not None

    def run(self, only=None):
        self.ranks, self.layout = self.x.ring
        q = self.x.q.float()
        out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf)
        for me in range(self.ranks):
            rows = self.held(me)
            O, L = out[..., rows, :], lse[..., rows]
            for step in range(self.steps()):
                src = (me - step) % self.ranks
                keys = self.held(src)
                seen = self.seen(me, src) if self.x.causal else torch.ones(len(rows), len(keys), dtype=torch.bool)
                S = (self.scale * (q[..., rows, :] @ self.K[..., keys, :].mT)).masked_fill(~seen, -math.inf)
                lse_block = S.logsumexp(-1)
                out_block = self.exp(S - self.unit(lse_block)[..., None]) @ self.V[..., keys, :]
                computed = seen.any(-1)  # a rank merges only the rows that see a key of the block
                O_new, L_new = self.merge(O, L, out_block, lse_block)
                O, L = torch.where(computed[:, None], O_new, O), torch.where(computed, L_new, L)
            out[..., rows, :], lse[..., rows] = O, L
        return {"out": out, "lse": lse}

    def held(self, rank):
        """The rank's positions: one chunk, for zigzag an early and a late chunk, striped every `ranks`-th position."""
        positions, twice = torch.arange(self.Nk), 2 * self.ranks
        if self.layout == "striped":
            return positions[rank :: self.ranks]
        if self.layout == "contiguous":
            return positions.tensor_split(self.ranks)[rank]
        return torch.cat([positions.tensor_split(twice)[i] for i in (rank, twice - 1 - rank)])

    def merge(self, out, lse, out_block, lse_block):
        lse_new = torch.logaddexp(lse, lse_block)
        w = self.weight(lse, lse_block, lse_new)
        return out + w[..., None] * (out_block - out), self.next_lse(lse, lse_new)

    # The steps that mutants override.
    def steps(self):
        return self.ranks

    def seen(self, me, src):
        """(n, n') which of the keys of rank src the queries of rank me see under a causal mask."""
        return self.held(src) <= self.held(me)[:, None]

    def weight(self, lse, lse_block, lse_new):
        return (lse_block - lse_new).exp()

    def next_lse(self, lse, lse_new):
        return lse_new


planted("parts_averaged", Ring, "the parts are averaged instead of weighted",
        weight=lambda self, lse, lse_block, lse_new: torch.full_like(lse, 0.5))
planted("weights_exchanged", Ring,
        "the weights are exchanged: out has the new part's weight, and the new part has that of out",
        weight=lambda self, lse, lse_block, lse_new: 1 - Ring.weight(self, lse, lse_block, lse_new))


@mutant(
    "out keeps the weight 1 instead of 1 - w, as where lse is overwritten before exp(lse - lse_new) is computed from it"
)
class OutKeepsItsWeight(Ring):
    def merge(self, out, lse, out_block, lse_block):
        merged, lse_new = super().merge(out, lse, out_block, lse_block)
        return out + self.weight(lse, lse_block, lse_new)[..., None] * out_block, lse_new


@mutant("lse is overwritten before its old value is used: the block is added to it twice")
class LseMergedTwice(Ring):
    def weight(self, lse, lse_block, lse_new):
        self.twice = torch.logaddexp(lse_new, lse_block)
        return (lse_block - self.twice).exp()


# The block is added to the lse that is stored, too.
variant(LseMergedTwice, next_lse=lambda self, lse, lse_new: self.twice)

planted("weights_overflow", Ring, "the weights are quotients of exp(lse), which overflows",
        weight=lambda self, lse, lse_block, lse_new: lse_block.exp() / (lse.exp() + lse_block.exp()))
planted("lse_not_merged", Ring,
        "the merge does not update lse, so each block's result replaces that of all blocks before it",
        next_lse=lambda self, lse, lse_new: lse)
planted("last_block_left_out", Ring, "the last block is left out: there are as many blocks as hops, and not one more",
        "Ring Attention, Algorithm 1 prints N - 1 rounds",
        steps=lambda self: self.ranks - 1)
planted("own_block_not_causal", Ring, "a rank's own block is computed without the causal diagonal",
        seen=lambda self, me, src: torch.ones_like(Ring.seen(self, me, src)) if me == src else Ring.seen(self, me, src))


@mutant("ranks are compared instead of positions: all keys of earlier ranks are seen, and none of later ranks")
class RanksForPositions(Ring):
    def seen(self, me, src):
        seen = super().seen(me, src)
        return seen if me == src else torch.full_like(seen, src < me)


planted("zigzag_chunks_exchanged", Ring,
        "zigzag's early and late chunks are exchanged in blocks of two different ranks",
        applies=lambda self: Ring.applies(self) and self.x.ring[1] == "zigzag",
        seen=lambda self, me, src: Ring.seen(self, me, src) if me == src else ~Ring.seen(self, me, src))


@mutant("with the striped layout, queries see the diagonal in blocks of later ranks' keys too")
class StripedDiagonalSeen(Ring):
    def applies(self):
        return super().applies() and self.x.ring[1] == "striped"

    def seen(self, me, src):
        seen = super().seen(me, src)
        return attention.visible(*seen.shape, causal=True) if src > me else seen


# ---- which mistake it is ---------------------------------------------------------------------------------------------


def diagnose(rows, order, masks=True):
    """The mutants that a wrong kernel's results equal. rows: (inputs, tile, results, expected) of every case it ran.

    masks: whether mistakes about the mask are among them.

    Such a mutant agrees with the results on every case that it applies to, and it applies to every case with a wrong
    result. If out or lse is wrong, the forward's mutants are compared, on out and lse; otherwise the backward's, on dq,
    dk and dv.
    """
    rows = [(_on_cpu(inputs), tuple(tile), _on_cpu(got), _on_cpu(want)) for inputs, tile, got, want in rows]
    wrong = [error.failures(got, want) for _, _, got, want in rows]
    names = ("out", "lse") if any("out" in w or "lse" in w for w in wrong) else ("dq", "dk", "dv")
    kind = Forward if "out" in names else Backward
    rows = list(zip(rows, wrong, strict=True))
    if kind is Backward:  # It computes huge scores again, and no two ways of making a mistake round them alike.
        rows = [row for row in rows if _largest_lse(row[0][3]) < 1e6] or rows
    if not any(failures for _, failures in rows) or _nan_everywhere(rows):
        return []
    known = [m for m in MUTANTS if issubclass(m.kind, kind) and (masks or not m.concerns_the_mask)]
    return explaining(known, rows, names, order)


def _largest_lse(want):
    """About as large as the largest score."""
    lse = want.value["lse"]
    return max(lse[lse.isfinite()].abs().tolist(), default=0.0)


def _nan_everywhere(rows):
    """Whether each wrong result is NaN in every row that sees a key: then no mistake can be told from another.

    rows: ((inputs, tile, results, expected), failures) of every case.
    """
    wrong = [(got, want) for (*_, got, want), failures in rows if failures]
    return bool(wrong) and all(
        got[name].isnan()[want.value[name].ne(0) & want.value[name].isfinite()].all()
        for got, want in wrong
        for name in got
    )


NAN_EVERYWHERE = (
    "Everything is NaN, as after many mistakes: an entry that nobody has written is read, such as a column or a row "
    "beyond those of the tile; infinity is multiplied with 0, such as an alpha of exp(m_new - m) at the first tile, "
    "where m is -inf; or -inf is subtracted from -inf, where no key has been seen yet."
)


def remark(rows):
    """What can be said of wrong results that equal those of no mutant, or "". rows: as for `diagnose`."""
    failing = [(row, error.failures(*row[2:])) for row in rows]
    if _nan_everywhere(failing):
        return NAN_EVERYWHERE
    if any(abs(_one_sided(got, want)) > 0.5 for (*_, got, want), failures in failing if failures):
        return ""  # A rounding makes as many numbers too large as too small.
    sizes = []
    for x, _, got, want in rows:
        ratios = [e / want.tolerance[name] for name, e in error.errors(got, want).items() if want.tolerance[name]]
        sizes.append((x.q.dtype, _largest_lse(want), max(ratios, default=0.0)))
    return rounding(sizes)


def _one_sided(got, want):
    """1 if every number is too large in magnitude, -1 if each is too small, about 0 after a rounding."""
    parts = [((x.double() - want.value[n]).sign() * want.value[n].sign()).flatten() for n, x in got.items()]
    return torch.cat(parts).nan_to_num().mean().item() if any(len(part) for part in parts) else 0.0


def rounding(sizes):
    """The remark about results that are as far off as after a known rounding, or "": no equality can tell of one.

    sizes: (dtype, largest lse, error / tolerance) of every case, right or wrong.
    """
    for dtype in dict.fromkeys(dtype for dtype, _, _ in sizes):
        ordinary = sorted(r for d, score, r in sizes if d == dtype and score < 50)
        large = sorted(r for d, score, r in sizes if d == dtype and 50 <= score < 1e6)
        if len(ordinary) < 3 or not ordinary[-1] < math.inf:
            continue
        middle, most = ordinary[len(ordinary) // 2], ordinary[-1]
        if torch.finfo(dtype).bits == 16 and large and large[len(large) // 2] > 2 and large[-1] > 10 and most < 8:
            where = f"In {str(dtype).removeprefix('torch.')}, ordinary cases are off by {most:.1f} tolerances at most"
            what = "the scores are rounded to 16 bits before the softmax"
            if most > 1:
                what = "sums are made in 16 bits: those of the dot products, or l and O"
            far = f"by up to {large[-1]:.0f}" if large[-1] < math.inf else "by far more, up to NaN"
            return f"{where}, and those with large scores {far}. That is the pattern when {what}."
        if dtype == torch.float32 and 20 < middle and most < 5000:
            return (
                f"In float32 an ordinary case is off by {middle:.0f} tolerances. That is the pattern when the factors "
                "of a product are rounded to 10 bits (TF32) or to 16 bits, and not of a wrong formula."
            )
    return ""


def explaining(known, rows, names, order, seen=None, against=None):
    """Those of the mutants `known` that the results of all rows equal.

    rows: as `diagnose` has them, some of them wrong. names: the results that are compared. For who calls this several
    times, with other tiles, orders or rows: seen is a dictionary, and against a set to which those kinds are added that
    a row contradicts, because their results in it are wrong, and others than those at hand.
    """
    seen, against = {} if seen is None else seen, set() if against is None else against
    rows = sorted(rows, key=_work)  # Small cases exclude most in the least time.

    def fits(kind):
        return _equals(kind, rows, names, order, seen, against)

    return [m for m in known if any(map(fits, (m.kind, *m.kind.variants)))]


def _work(row):
    n = row[0][0].q.numel()
    return n == 0, n


def _equals(kind, rows, names, order, seen, against):
    def tiles():
        """What a tile of each wrong case tells. Most mutants differ there already, after a fraction of the work."""
        for row in rows if not issubclass(kind, Ring) else ():  # A rank's rows are no tile.
            if row[1] and (look := _Look.at(row, names, seen)) and (found := look.compared(kind, order)):
                yield row, found

    mistaken = False
    for row, found in chain(tiles(), ((row, compared(kind, row, order, seen)) for row in rows)):
        if found.differs or row[1] and not found.applies:
            if found.wrong:
                against.add(kind)
            return False
        mistaken |= bool(row[1] and found.wrong)
    return mistaken


class _Compared(NamedTuple):
    """A mutant beside the results of a case."""

    applies: bool
    differs: bool  # whether its results are others than these
    wrong: bool  # whether its results are known to be wrong


NOT_APPLICABLE = _Compared(False, False, False)


def compared(kind, row, order, seen):
    """How a mutant's results compare with those of a row as `diagnose` has them. seen: see `explaining`."""
    (inputs, tile, got, want), failures = row
    try:
        mutant, decides = _mutant(kind, inputs, tile, order)

        def whole():
            mistaken = {name: x for name, x in mutant.run().items() if name in got}
            differs = _differ({name: got[name] for name in mistaken}, mistaken, _tolerances(mistaken, want))
            # What differs from right results is wrong.
            wrong = bool(error.failures(mistaken, want)) if failures else differs
            return mistaken, _Compared(True, differs, wrong)

        return _remembered(whole, decides, mutant, seen)
    except NotApplicable:
        return NOT_APPLICABLE


def _mutant(kind, inputs, tile, order):
    """(the mutant, what decides its results beside the order)"""
    mutant = kind(inputs, tile, order)
    if not inputs.causal and _changed(kind).keys() <= MASK:  # Here it changes nothing.
        kind = Backward if issubclass(kind, Backward) else Forward
        mutant = kind(inputs, tile, order)
    Br = tile[0] if mutant.Nq > mutant.Br or "Br" in _needs(kind) else None
    Bc = tile[1] if mutant.Nk > mutant.Bc or "Bc" in _needs(kind) else None
    return mutant, (id(inputs), kind, Br, Bc)


def _remembered(compute, decides, mutant, seen):
    """What `compute` finds of a mutant, if it is not known from this order, or from any where that changes nothing.

    compute: () -> (the mutant's results, what is found).
    """
    own = mutant.order, *decides
    found = seen.get(own, seen.get(decides, seen))
    if found is seen:
        results, found = compute()
        finite = all((x.isfinite() | x.isneginf()).all() for x in results.values())
        either = finite and _changed(type(mutant)).keys().isdisjoint(DIVIDING)
        seen[decides if either else own] = found
    return found


@dataclass(frozen=True)
class _Look:
    """The tile of a case that is most wrong. Most mutants differ there already, after a fraction of the work."""

    inputs: cases.Inputs
    tile: tuple
    by_keys: bool  # whether it is a tile of dk and dv
    first: int  # its first query or key
    found: dict  # {name: (the results in it, their _kind, how far a mutant's results may be from these)}
    right: dict  # {name: (the right results in it, their _kind, the tolerance)}
    seen: dict  # {what decides it: what was found of a mutant}

    @classmethod
    def at(cls, row, names, seen):
        """The look at a row, or None where a part does not tell what the whole would. Made once for a tile."""
        (inputs, tile, got, want), failures = row
        by_keys = "dq" in names and not failures.keys().isdisjoint(("dk", "dv"))
        if "dq" in names:
            names = ("dk", "dv") if by_keys else ("dq",)
        made = id(inputs), tile, *names
        if made not in seen:
            seen[made] = cls._at(inputs, tile, by_keys, got, want, failures.keys() & names, names, seen)
        return seen[made]

    @classmethod
    def _at(cls, inputs, tile, by_keys, got, want, wrong, names, seen):
        bounds = {name: _bound(got[name], want.value[name], want.tolerance[name]) for name in names}
        if not wrong or None in bounds.values():
            return None
        step = tile[1 if by_keys else 0]
        _, worst = max(_worst(got[name], want.value[name]) for name in wrong)
        first = worst // step * step
        of_tile = slice(first, first + step)
        found, right = {}, {}
        for name in names:
            x, y = got[name][:, :, of_tile].double(), want.value[name][:, :, of_tile]
            found[name], right[name] = (x, _kind(x), bounds[name][:, :, of_tile]), (y, _kind(y), want.tolerance[name])
        return cls(inputs, tile, by_keys, first, found, right, seen)

    def compared(self, kind, order):
        """How a mutant's results in this tile compare, or None if they do not differ by more than `_differ` would allow
        in the whole of them.
        """
        try:
            mutant, decides = _mutant(kind, self.inputs, self.tile, order)
        except NotApplicable:
            return NOT_APPLICABLE  # It cannot give the wrong result.
        return _remembered(lambda: self.of_tile(mutant), (*self.found, *decides), mutant, self.seen)

    def of_tile(self, mutant):
        mistaken = mutant.run(self.first, keys=True) if self.by_keys else mutant.run(self.first)
        differs = wrong = False
        for name, found in self.found.items():
            y = mistaken[name][:, :, self.first : self.first + found[0].shape[2]].double()
            kind = _kind(y)
            differs = differs or _apart(y, kind, *found)
            wrong = wrong or _apart(y, kind, *self.right[name])
        return mistaken, _Compared(True, True, wrong) if differs else None


def _apart(y, kind, x, its_kind, bounds):
    """Whether y has other infinities or NaN than x, or an entry that is not within the bounds of that of x."""
    return not torch.equal(kind, its_kind) or (((x - y).abs() > bounds) & (kind == 0)).any().item()


# The steps that a causal mask alone needs.
MASK = {"shift", "positions", "hidden", "hidden_score", "mask_causal", "end_of_keys"}
# Where these steps are right and nothing overflows, O that is divided in each tile is O that is divided at the end.
DIVIDING = {"multiply_back", "normalise_step", "divide", "finish", "accumulator", "update", "run"}


@functools.cache
def _changed(kind):
    """{name: function or value}: the steps that a mutant changes."""
    right = Backward if issubclass(kind, Backward) else Forward
    own = {name: x for base in kind.__mro__[: kind.__mro__.index(right)][::-1] for name, x in vars(base).items()}
    return {name: x for name, x in own.items() if not name.startswith("__") and name not in ("applies", "variants")}


@functools.cache
def _needs(kind):
    """Those of Br and Bc that change its results even where the tile is large enough for all queries, or all keys."""
    changed = _changed(kind)
    if issubclass(kind, Ring) or not changed.keys().isdisjoint(("load", "mask_tail", "key_tiles")):
        return {"Br", "Bc"}
    codes = [getattr(x, "__code__", None) for x in changed.values()]
    return {"Br", "Bc"} & {name for code in codes if code for name in code.co_names}


def _worst(x, ref):
    """(how far the result is off at most, the position of a query or a key at which it is)"""
    off = (x.double() - ref).abs().masked_fill(x == ref, 0).nan_to_num(math.inf)
    off, position = off.transpose(0, 2).flatten(1).amax(1).max(0)
    return off.item(), position.item()


def _bound(got, want, tolerance):
    """How far a mutant's entries can be from these, row by row, if `_differ` finds that it gives the same; None if any.

    `_differ` allows 2 tolerances, which `_tolerances` may have increased, and 1e-4 of the largest entry. Both are
    computed from the whole of the mutant's results. If these are the same, they are as large as the ones at hand.
    """
    size = got.double().abs().where(got.isfinite(), 0)
    reference = max(error._largest(want), 1e-30)
    if not size.numel() or size.max() > 2.0**99 or tolerance > 0.2 * reference:
        return None
    growth = max(1, 2 * size.max().item() / reference)
    rows = size.amax(-1, keepdim=True).expand(size.shape)
    return 3 * growth * tolerance + 2e-4 * rows  # more than needed, for what the tile makes of the rounding


def _tolerances(mistaken, want):
    """The tolerances, increased in proportion where the mistake makes results larger than they should be."""
    grown = {name: error._largest(x) / max(error._largest(want.value[name]), 1e-30) for name, x in mistaken.items()}
    return {name: max(1, growth) * want.tolerance[name] for name, growth in grown.items()}


def _on_cpu(x):
    """x on the CPU, if it is a tensor or a dictionary or dataclass that holds tensors; anything else unchanged."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {name: _on_cpu(value) for name, value in x.items()}
    return replace(x, **{name: _on_cpu(value) for name, value in vars(x).items()}) if is_dataclass(x) else x


# ---- who is killed by what -------------------------------------------------------------------------------------------


def kill_matrix(supports, among=MUTANTS):
    """(matrix, twins) for a stage's cases in its first dtype, and these mutants.

    matrix is {mutant name: {case name: "killed", "survives" or "n/a"}}; twins are the pairs of mutants that no case
    tells apart.
    """
    matrix, results = {m.name: {} for m in among}, {m.name: {} for m in among}
    for case, inputs, want in _prepared(supports):
        tile = inputs.tile or supports["tiles"][0]
        for m in among:
            try:
                got = m.run(inputs, tile, supports["order"])
            except NotApplicable:
                matrix[m.name][case.name] = "n/a"
                continue
            matrix[m.name][case.name] = "killed" if error.failures(got, want) else "survives"
            results[m.name][case.name] = got, want
    return matrix, _twins(results)


def survivors(matrix):
    """Names of the mutants that apply to some case and are killed by none."""
    return [name for name, row in matrix.items() if "survives" in row.values() and "killed" not in row.values()]


def _prepared(supports):
    """(case, inputs, expected) for every case the stage runs in its first dtype, on the CPU."""
    for case, dtype, reason in cases.select(supports):
        if dtype == supports["dtypes"][0] and reason is None:
            inputs = cases.build(case, supports, dtype)
            yield case, inputs, inputs.expected()


def _twins(results):
    """The pairs of mutants of one kind whose results agree within tolerance on every case that both apply to."""
    twins = []
    for a, b in combinations(results, 2):
        shared = [(results[a][c], results[b][c]) for c in results[a].keys() & results[b].keys()]
        comparable = [(x, y, want) for (x, want), (y, _) in shared if x.keys() == y.keys()]
        if comparable and not any(_differ(x, y, want.tolerance) for x, y, want in comparable):
            twins.append((a, b))
    return twins


def _differ(a, b, tolerance):
    """Whether two results differ by more than twice the tolerance anywhere. NaN equals NaN, inf inf, and -inf -inf.

    The tolerance is made for right results. A mistake can make results much larger, so 1e-4 of a row's largest entry is
    allowed for their rounding: scores around 200 are rounded by 1e-5, and exp turns that into a relative error.
    """
    for name in a:
        x, y = a[name].double(), b[name].double()
        if torch.equal(x, y):
            continue  # as most are, which is found sooner so
        finite = x.isfinite()
        size = y.abs().where(y.isfinite(), 0)
        largest = size.amax(-1, keepdim=True) if size.numel() else size
        allowed = 2 * tolerance[name] + 1e-4 * largest
        if not torch.equal(_kind(x), _kind(y)) or ((x - y).abs() > allowed)[finite].any():
            return True
    return False


def _kind(x):
    """0 where x is finite, 1 where it is inf, -1 where it is -inf, and 2 where it is NaN."""
    return x.isposinf().int() - x.isneginf().int() + 2 * x.isnan().int()
