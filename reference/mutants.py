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
        self.check()
        self.scale = self.choose_scale(inputs.scale, D)

    @functools.cached_property
    def K(self):
        return self.key_head(self.x.k.float(), self.x.q.shape[1])

    @functools.cached_property
    def V(self):
        return self.key_head(self.x.v.float(), self.x.q.shape[1])

    def check(self):
        """Raises NotApplicable where the mistake makes no difference."""

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

    def positions(self, S, i, j):
        row = torch.arange(S.shape[-2])[:, None] + i + self.Nk - self.Nq
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
        self.check()

    def check(self):
        """Raises NotApplicable where the mistake makes no difference."""

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

    def mask_causal(self, P, rows, keys):
        row = torch.arange(rows.start, rows.stop)[:, None] + self.Nk - self.Nq
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
        steps = "positions", "hidden", "hidden_score", "mask_causal", "mask_tail"
        return any(getattr(self.kind, step, None) != getattr(right, step, None) for step in steps)


MUTANTS: list[Mutant] = []


def mutant(says, sources="", among=MUTANTS):
    """Registers a class under its name in snake case, by default a subclass of Forward or Backward."""

    def register(kind):
        name = "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__).lstrip("_")
        among.append(Mutant(name, says, kind, sources))
        kind.variants = ()  # and not those of the mutant that it is made from
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


# ---- the forward -----------------------------------------------------------------------------------------------------


@mutant("O is not rescaled when the running maximum moves")
class NoRescaleOfO(Forward):
    def rescale_O(self, O, alpha):
        return O


@mutant("l is not rescaled when the running maximum moves")
class NoRescaleOfL(Forward):
    def rescale_l(self, l, alpha):
        return l


@mutant(
    "O is rescaled by exp(m_new - m), the inverse of what it needs",
    "FlashAttention-2, Algorithm 1, line 10 prints diag(...)^-1; Dao-AILab/flash-attention issue 991",
)
class InverseRescaleOfO(Forward):
    def rescale_O(self, O, alpha):
        return torch.where(alpha[..., None] == 0, 0, O / alpha[..., None])


@mutant("O and l are both rescaled by exp(m_new - m), the inverse of what they need")
class InverseAlpha(Forward):
    def alpha(self, m, unit):
        return torch.where(m.isneginf(), 0, (unit - m).exp())


@mutant(
    "alpha is exp(m_new - m), the inverse of what it has to be (papers/errata.md, E12). At the first tile it is "
    "infinite, and 0 * inf is NaN"
)
class InfiniteAlpha(Forward):
    def alpha(self, m, unit):
        return (unit - m).exp()


@variant_of(InfiniteAlpha)
class InfiniteAlphaWhereKeysAreSeen(InfiniteAlpha):
    """Stage 01's exp_difference(m_new, m), which is 0 where both are -inf."""

    def maximum(self, m, S):
        self.m_new = super().maximum(m, S)
        return self.m_new

    def alpha(self, m, unit):
        return super().alpha(m, unit).masked_fill(self.m_new.isneginf(), 0)


@mutant(
    "O is divided by alpha instead of multiplied (papers/errata.md, E12): alpha begins as 0, and 0 / 0 is NaN",
    "FlashAttention-2, Algorithm 1, line 10 prints diag(...)^-1",
)
class DividedByAlpha(Forward):
    def rescale_O(self, O, alpha):
        return O / alpha[..., None]


@mutant("the maximum is never subtracted, so exp overflows")
class NoMaximum(Forward):
    m_start = 0.0

    def maximum(self, m, S):
        return m


@variant_of(NoMaximum)
class NoMaximumUnguarded(NoMaximum):
    """exp(S) / sum exp(S), which for a row that sees no key is 0 / 0."""

    def divide(self, O, l):
        return O / l[..., None]


@mutant(
    "the running maximum starts at 0 instead of -inf",
    "gpu-mode/lectures, lecture_012/flash_attention.cu starts at 1e-30, to the same effect",
)
class MaximumStartsAtZero(Forward):
    m_start = 0.0


@mutant("one maximum of all rows is subtracted, and exp underflows in rows with much smaller scores")
class GlobalMaximum(Forward):
    def check(self):
        if not self.x.q.numel() or not self.x.k.numel():
            raise NotApplicable

    def run(self, only=None):
        S = self.scale * (self.x.q.float() @ self.K.mT)
        seen = attention.visible(self.Nq, self.Nk, self.x.causal)
        self.m_start = S.masked_fill(~seen, -math.inf).amax().item()
        return super().run(only)

    def maximum(self, m, S):
        return m


@mutant("the first tile's maximum is kept for the whole row")
class FirstMaximumKept(Forward):
    def maximum(self, m, S):
        return torch.where(m.isneginf(), S.amax(-1), m)


@mutant("each tile's own maximum is taken for the running one")
class TileMaximum(Forward):
    def maximum(self, m, S):
        return S.amax(-1)


@variant_of(TileMaximum)
class TileMaximumUnguarded(TileMaximum):
    """Stage 01's exp_difference(m, m_new), infinite where a row sees earlier keys, but none of this tile."""

    def maximum(self, m, S):
        self.m_new = super().maximum(m, S)
        return self.m_new

    def alpha(self, m, unit):
        return (m - self.m_new).exp().masked_fill(m.isneginf(), 0)


@mutant("exp(-inf - (-inf)) or 0 / 0 is not guarded: a row that sees no key becomes NaN")
class NoGuard(Forward):
    def check(self):
        if not (self.x.causal and self.Nq > self.Nk > 0):
            raise NotApplicable

    def unit(self, m_new):
        return m_new


@mutant("the softmax of a row that sees no key is not guarded: its lse is right, but its out is 0 / 0, which is NaN")
class OutUnguarded(Forward):
    def check(self):
        if not (self.x.causal and self.Nq > self.Nk > 0):
            raise NotApplicable

    def divide(self, O, l):
        return O / l[..., None]


@mutant("the tile's own maximum is subtracted, and for a row that sees no key of the tile exp(-inf - (-inf)) is NaN")
class MaskedRowNotGuarded(Forward):
    def check(self):
        if not self.x.causal or self.Nk <= self.Bc:  # with a single tile of keys it is the mistake no_guard
            raise NotApplicable

    def probabilities(self, S, m, unit):
        """P is relative to the tile's own maximum and then multiplied by beta, as in FlashAttention, Algorithm 2."""
        m_tile = S.amax(-1)
        beta = (m_tile - unit).exp()
        return beta[..., None] * self.exp(S - m_tile[..., None])


@mutant(
    "a tile that is masked throughout is neither skipped nor guarded: its P = exp(-inf - (-inf)) is NaN",
    "FlashAttention, Algorithm 2, line 12; also Algorithm 5",
)
class MaskedTileVisited(MaskedRowNotGuarded):
    def end_of_keys(self, i):
        return self.Nk


@mutant("the causal mask compares positions within the tile")
class TileLocalMask(Forward):
    def positions(self, S, i, j):
        return torch.arange(S.shape[-2])[:, None], torch.arange(S.shape[-1])[None, :]


@mutant("the causal mask is strict: a query does not see its own key")
class StrictMask(Forward):
    def hidden(self, row, col):
        return col >= row


@mutant("the causal mask hides one key too few: a query sees the key after its own")
class LooseMask(Forward):
    def hidden(self, row, col):
        return col > row + 1


@mutant("the causal mask hides the lower triangle: a query sees the later keys instead of the earlier ones")
class LowerTriangleMasked(Forward):
    def hidden(self, row, col):
        return col < row


@mutant("the causal mask subtracts Nk - Nq from a query's position instead of adding it")
class ShiftSubtracted(Forward):
    def check(self):
        if not self.x.causal or self.Nq == self.Nk:
            raise NotApplicable

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row - 2 * (self.Nk - self.Nq), col


@mutant(
    "the causal mask is aligned by the wrong sign of Nk - Nq where there are more keys than queries, and at the top "
    "left where there are fewer"
)
class WrongSignOfTheShift(Forward):
    def check(self):
        if not self.x.causal or self.Nq == self.Nk:
            raise NotApplicable

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row - (self.Nk - self.Nq) - max(0, self.Nk - self.Nq), col

    def end_of_keys(self, i):
        return self.Nk


@mutant("the mask is hidden * -inf, which is NaN where nothing is hidden, because 0 * -inf is NaN")
class MaskTimesInfinity(Forward):
    def mask_causal(self, S, i, j):
        return S + self.hidden(*self.positions(S, i, j)) * -math.inf


@mutant(
    "masked scores are set to a large negative number, such as -1e9, instead of -inf: a row that sees no key gets the "
    "mean of the values"
)
class MaskedToMinus1e9(Forward):
    hidden_score = -1e9

    def check(self):
        if not self.x.causal:
            raise NotApplicable


@variant_of(MaskedToMinus1e9)
class Minus1e9InTheMatrixForm(MaskedToMinus1e9):
    """A row that sees no key gets the mean of all values, because no tile of keys is left out."""

    def end_of_keys(self, i):
        return self.Nk


@variant_of(MaskedToMinus1e9)
class Minus1e9BeforeTheScale(MaskedToMinus1e9):
    """Stage 03's S, which is multiplied with the scale after it has been masked."""

    @property
    def hidden_score(self):
        return -1e9 * self.scale


@variant_of(MaskedToMinus1e9)
class MaskedToTheSmallestNumber(MaskedToMinus1e9):
    """torch.finfo(dtype).min, as in Hugging Face's transformers."""

    @property
    def hidden_score(self):
        return torch.finfo(self.x.q.dtype).min


@variant_of(MaskedToMinus1e9)
class TheSmallestNumberInTheMatrixForm(MaskedToTheSmallestNumber, Minus1e9InTheMatrixForm):
    """Both of the two above."""


@mutant("the causal mask is aligned at the top left")
class TopLeft(Forward):
    def check(self):
        if not self.x.causal or self.Nq == self.Nk:
            raise NotApplicable

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row - (self.Nk - self.Nq), col


class OnlyInDiagonalTiles(Forward):
    """As in stage 03, which masks only the tiles with a key that some query of the tile does not see."""

    def mask_causal(self, S, i, j):
        full = max(0, i + 1 + self.Nk - self.Nq) // self.Bc * self.Bc
        return super().mask_causal(S, i, j) if j >= full else S


@variant_of(WrongSignOfTheShift)
class WrongSignOfTheShiftAndTheSmallestNumber(TheSmallestNumberInTheMatrixForm, WrongSignOfTheShift):
    """A row that then sees no key gets the mean of the values."""

    def check(self):
        WrongSignOfTheShift.check(self)


@variant_of(TopLeft)
class TopLeftInDiagonalTiles(OnlyInDiagonalTiles, TopLeft):
    pass


@variant_of(ShiftSubtracted)
class ShiftSubtractedInDiagonalTiles(OnlyInDiagonalTiles, ShiftSubtracted):
    pass


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


@mutant("the mask hides what is seen and shows what is hidden: the branches of the choice are exchanged")
class MaskInverted(Forward):
    def hidden(self, row, col):
        return col <= row


@variant_of(MaskInverted)
class InvertedInDiagonalTiles(OnlyInDiagonalTiles, MaskInverted):
    """As in stage 03, whose mask then shows the zeros beyond the last key, and hides the keys before them."""

    def hidden(self, row, col):
        return super().hidden(row, col) & (col < self.Nk)

    def mask_tail(self, S, j):
        real = self.Nk - j
        return S if self.x.causal or real >= S.shape[-1] else S.masked_fill(torch.arange(S.shape[-1]) < real, -math.inf)


@mutant("i, the number of the tile's first query, is multiplied by Br as if it were the tile's number; or j by Bc")
class TileNumbersForPositions(Forward):
    times_i, times_j = True, False

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row + self.times_i * (self.Br - 1) * i, col + self.times_j * (self.Bc - 1) * j


@variant_of(TileNumbersForPositions)
class TileNumbersForBoth(TileNumbersForPositions):
    times_j = True


@variant_of(TileNumbersForPositions)
class TileNumberForJ(TileNumbersForPositions):
    times_i, times_j = False, True


class TileNumbersInDiagonalTiles(OnlyInDiagonalTiles, TileNumbersForPositions):
    """As in stage 03, whose mask also hides keys beyond the last one by their positions."""

    def mask_tail(self, S, j):
        beyond = torch.arange(S.shape[-1]) + j * (self.Bc if self.times_j else 1) >= self.Nk
        return S.masked_fill(beyond, -math.inf) if j + S.shape[-1] > self.Nk else S


@variant_of(TileNumbersForPositions)
class IInDiagonalTiles(TileNumbersInDiagonalTiles):
    pass


@variant_of(TileNumbersForPositions)
class BothInDiagonalTiles(TileNumbersInDiagonalTiles):
    times_j = True


@variant_of(TileNumbersForPositions)
class JInDiagonalTiles(TileNumbersInDiagonalTiles):
    times_i, times_j = False, True


@mutant("Nk - Nq is taken for 0 where it is negative, and the first queries see keys that come after them")
class ShiftNeverNegative(Forward):
    def check(self):
        if not self.x.causal or self.Nq == self.Nk:
            raise NotApplicable

    def positions(self, S, i, j):
        row, col = super().positions(S, i, j)
        return row + max(0, self.Nq - self.Nk), col


@variant_of(ShiftNeverNegative)
class ShiftNeverNegativeInDiagonalTiles(OnlyInDiagonalTiles, ShiftNeverNegative):
    pass


@mutant("masked scores are set to 0 instead of -inf")
class MaskedToZero(Forward):
    hidden_score = 0.0


@variant_of(MaskedToZero)
class ZeroInDiagonalTiles(OnlyInDiagonalTiles, MaskedToZero):
    """As in stage 03, where keys that do not exist are hidden by the same function."""

    def mask_tail(self, S, j):
        return S.masked_fill(torch.arange(S.shape[-1]) + j >= self.Nk, 0.0)


@mutant("keys beyond the last one, zeros in the last tile, are not masked")
class TailNotMasked(Forward):
    def mask_tail(self, S, j):
        return S


@mutant("the last, ragged tile of keys is left out")
class TailDropped(Forward):
    def key_tiles(self):
        return range(0, self.Nk // self.Bc * self.Bc, self.Bc)


@mutant("the number of queries is taken for the number of keys")
class QueriesForKeys(Forward):
    def check(self):
        if self.Nq >= self.Nk:  # equal: no difference; more queries: reads outside k, with any result
            raise NotApplicable

    def key_tiles(self):
        return range(0, self.Nq, self.Bc)

    def mask_tail(self, S, j):
        return S.masked_fill(torch.arange(S.shape[-1]) + j >= self.Nq, -math.inf)


@mutant("the scale is hard-coded for head_dim 64")
class HardCodedScale(Forward):
    def choose_scale(self, scale, D):
        return 0.125


@mutant("the scale argument is ignored")
class ScaleIgnored(Forward):
    def choose_scale(self, scale, D):
        return D**-0.5


@mutant("the scores are not scaled")
class NoScale(Forward):
    def choose_scale(self, scale, D):
        return 1.0


@mutant("query head h reads key head h mod Hk instead of h // (H / Hk)")
class HeadsInterleaved(Forward):
    def check(self):
        if self.x.q.shape[1] == self.x.k.shape[1] or self.x.k.shape[1] == 1:
            raise NotApplicable

    def key_head(self, x, H):
        return x.repeat(1, H // x.shape[1], 1, 1)


@mutant("O and l are accumulated in half precision")
class HalfAccumulators(Forward):
    accumulator = torch.float16


@mutant("O is divided by l after every tile and never multiplied back")
class NotMultipliedBack(Forward):
    def multiply_back(self, O, l):
        return O

    def normalise_step(self, O, l):
        return self.divide(O, l)

    def finish(self, m, l, O):
        return O, m + l.log()


@mutant("O is never divided by l_new")
class NeverDivided(NotMultipliedBack):
    def check(self):
        if self.order != "fa1":  # In the other orders it is the mistake not_normalised.
            raise NotApplicable

    def divide(self, O, l):
        return O


@mutant("O is divided by l after every tile, never multiplied back, and divided once more at the end")
class DividedAtEveryTile(NotMultipliedBack):
    def finish(self, m, l, O):
        return self.divide(O, l), m + l.log()


@mutant("O has already been divided by l when it is divided by l at the end")
class DividedTwice(Forward):
    def finish(self, m, l, O):
        out, lse = super().finish(m, l, O)
        return self.divide(out, l), lse


@mutant("l is overwritten before the factor of the old O is computed, which needs the old l")
class LOverwritten(Forward):
    def check(self):
        if self.order != "fa1":  # In the other orders O is not multiplied back.
            raise NotApplicable

    def add_to_l(self, l, alpha, P):
        self.l_new = super().add_to_l(l, alpha, P)
        return self.l_new

    def multiply_back(self, O, l):
        return super().multiply_back(O, self.l_new)


@mutant("O is not divided by l at the end")
class NotNormalised(Forward):
    def divide(self, O, l):
        return O


@mutant("lse is in base 2")
class LseInBase2(Forward):
    def finish(self, m, l, O):
        out, lse = super().finish(m, l, O)
        return out, lse / math.log(2)


@mutant("lse is m + log2 l: the logarithm of l is in base 2, and m is not")
class LogOfLInBase2(Forward):
    def finish(self, m, l, O):
        return super().finish(m, l, O)[0], m + l.log2()


@mutant("lse leaves out the maximum")
class LseWithoutMaximum(Forward):
    def finish(self, m, l, O):
        return super().finish(m, l, O)[0], l.log()


@mutant("the maximum is returned as lse")
class MaximumForLse(Forward):
    def finish(self, m, l, O):
        return super().finish(m, l, O)[0], m


@mutant("m is overwritten before alpha is computed from it, so neither O nor l is rescaled")
class NothingRescaled(Forward):
    def alpha(self, m, unit):
        return torch.ones_like(m)


@mutant("P is computed with the maximum before this tile instead of m_new")
class PWithOldMaximum(Forward):
    def probabilities(self, S, m, unit):
        return self.exp(S - m[..., None])


@variant_of(PWithOldMaximum)
class PWithOldMaximumGuarded(PWithOldMaximum):
    """Stage 01's exp_difference(S, m), which is 0 where S is -inf."""

    def probabilities(self, S, m, unit):
        return super().probabilities(S, m, unit).masked_fill(S.isneginf(), 0)


@variant_of(PWithOldMaximum)
class PWithOldMaximumOrZero(PWithOldMaximum):
    """0 is subtracted where the old maximum is -inf."""

    def probabilities(self, S, m, unit):
        return super().probabilities(S, m.nan_to_num(neginf=0.0), unit)


@mutant("the new keys' part of l is multiplied with alpha, too: alpha * (l + rowsum P)")
class NewPartOfLRescaled(Forward):
    def add_to_l(self, l, alpha, P):
        return alpha * (l + P.sum(-1))


@mutant("m keeps its old value: it stays -inf, and each tile's sums replace all earlier ones")
class MaximumNotStored(Forward):
    def update(self, m, l, O, S, V_j):
        return m, *super().update(m, l, O, S, V_j)[1:]


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

    def check(self):
        if self.Br != self.Bc:
            raise NotApplicable

    def run(self, only=None):
        """As the forward, but for whole tiles, because zeros beyond the last query count too."""
        self.x = replace(self.x, q=torch.nn.functional.pad(self.x.q, (0, 0, 0, -self.Nq % self.Br)))
        return {name: x[:, :, : self.Nq] for name, x in super().run(only).items()}


@mutant("the maximum is taken over the queries of the tile, and not over the keys: the wrong axis")
class MaximumOverQueries(AxesExchanged):
    def maximum(self, m, S):
        return torch.maximum(m, S.amax(-2))


@mutant("P is added up over the queries of the tile, and not over the keys: the wrong axis")
class SumOverQueries(AxesExchanged):
    def add_to_l(self, l, alpha, P):
        return self.rescale_l(l, alpha) + P.sum(-2)


@mutant("alpha multiplies the new part of l and not the old one: l + alpha * rowsum P")
class AlphaOnTheNewPartOfL(Forward):
    def add_to_l(self, l, alpha, P):
        return l + alpha * P.sum(-1)


@mutant("alpha multiplies the new parts of l and O and not the old ones: l + alpha * rowsum P, O + alpha * P V")
class AlphaOnTheNewParts(AlphaOnTheNewPartOfL):
    def alpha(self, m, unit):
        self.alpha_now = super().alpha(m, unit)
        return self.alpha_now

    def operand(self, P):
        return self.alpha_now[..., None] * P

    def rescale_O(self, O, alpha):
        return O


@mutant("alpha multiplies the new part of O and not the old one: O + alpha * P V")
class AlphaOnTheNewPartOfO(AlphaOnTheNewParts):
    def add_to_l(self, l, alpha, P):
        return self.rescale_l(l, alpha) + P.sum(-1)


class NoSumIsZero(Forward):
    """As in stage 03, which takes 1 for an l of 0."""

    def finish(self, m, l, O):
        return super().finish(m, torch.where(l == 0, 1, l), O)


@variant_of(SumOverQueries)
class SumOverQueriesOrOne(NoSumIsZero, SumOverQueries):
    pass


@variant_of(AlphaOnTheNewPartOfL)
class AlphaOnTheNewPartOfLOrOne(NoSumIsZero, AlphaOnTheNewPartOfL):
    pass


@variant_of(AlphaOnTheNewParts)
class AlphaOnTheNewPartsOrOne(NoSumIsZero, AlphaOnTheNewParts):
    pass


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


@mutant("P is missing where V is added to O: each key counts once, whatever its score")
class PMissingFromO(Forward):
    def operand(self, P):
        return torch.ones_like(P)


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


@mutant("beta is missing from O: P V, relative to its own tile's maximum, is added to O as it is")
class BetaMissingFromO(PRelativeToTile):
    def operand(self, P):
        return self.P_tile


@mutant("beta is missing from l: the sum of P, relative to its own tile's maximum, is added to l as it is")
class BetaMissingFromL(PRelativeToTile):
    def add_to_l(self, l, alpha, P):
        return super().add_to_l(l, alpha, self.P_tile)


@mutant("alpha and beta are exchanged: beta multiplies the old sums, and alpha those of this tile")
class AlphaAndBetaExchanged(PRelativeToTile):
    def check(self):
        if self.order != "fa1":  # The other orders have no beta.
            raise NotApplicable

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


@mutant("the tiles that the causal diagonal crosses are not masked")
class DiagonalTilesNotMasked(Forward):
    def mask_causal(self, S, i, j):
        return torch.full_like(S, -math.inf) if j >= i + self.Br + self.Nk - self.Nq else S


class LoopEndsEarly(Forward):
    """A causal loop over the keys that ends too early.

    Some rows see keys beyond its end. Those in the last visited tile are zeros, and the others are left out.
    """

    def check(self):
        if not self.x.causal:
            raise NotApplicable

    def load(self, x, j, end):
        return super().load(x[..., :end, :], j, end)


@mutant("the causal loop over the keys ends at the diagonal of the top left")
class LoopEndsAtTopLeft(LoopEndsEarly):
    def check(self):
        if not self.x.causal or self.Nq >= self.Nk:  # with Nq > Nk it ends too late, and the mask hides the extra keys
            raise NotApplicable

    def end_of_keys(self, i):
        return min(i + self.Br, self.Nq)


@mutant("the causal loop over the keys ends at the diagonal of the top left, also for rows beyond the last query")
class LoopEndsAtTopLeftTile(LoopEndsAtTopLeft):
    def check(self):
        super().check()
        if self.Nq % self.Br == 0:
            raise NotApplicable

    def end_of_keys(self, i):
        return min(i + self.Br, self.Nk)


@mutant("the causal loop over the keys ends with the keys that the block's first query sees")
class LoopEndsAtFirstQuery(LoopEndsEarly):
    def end_of_keys(self, i):
        return max(0, i + 1 + self.Nk - self.Nq)


@mutant("the causal loop over the keys ends one key early: the block's last query does not see its own key")
class LoopEndsOneEarly(LoopEndsEarly):
    def end_of_keys(self, i):
        return max(0, min(i + self.Br, self.Nq) - 1 + self.Nk - self.Nq)


class OperandMixedUp(Forward):
    """P is multiplied with V as operand A of the tensor cores, 16 x 16, with its numbers in the wrong positions."""

    def check(self):
        if self.Br % 16 or self.Bc % 16:
            raise NotApplicable

    def run(self, only=None):
        """As the forward, but for whole groups of 16 rows, because zeros beyond the last query change places too."""
        self.x = replace(self.x, q=torch.nn.functional.pad(self.x.q, (0, 0, 0, -self.Nq % 16)))
        return {name: x[:, :, : self.Nq] for name, x in super().run(only).items()}

    def operand(self, P):
        # (..., rows / 16, row / 8 % 2, row % 8, keys / 16, key / 8 % 2, key / 2 % 4, key % 2)
        split = P.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 2, 8))
        return self.mixed_up(split).reshape(P.shape)


@mutant("operand A's two middle registers are exchanged: P's rows 8 to 15 are where its keys 8 to 15 belong")
class OperandRowsForKeys(OperandMixedUp):
    def mixed_up(self, P):
        return P.transpose(-6, -3)


@mutant("operand A's registers have two neighbouring keys in the wrong order: the second is in the lower half")
class OperandHalvesExchanged(OperandMixedUp):
    def mixed_up(self, P):
        return P.flip(-1)


@mutant("operand A's registers hold the rows g and g + 8 of one key instead of two neighbouring keys of one row")
class OperandPairsOfRows(OperandMixedUp):
    def mixed_up(self, P):
        return P.transpose(-6, -1)


@mutant("operand A has P of its first 8 keys where that of the other 8 belongs, too")
class OperandFirstKeysTwice(OperandMixedUp):
    def mixed_up(self, P):
        return P[..., :1, :, :].expand(P.shape)


@mutant("operand A's rows 0 to 7 and 8 to 15 are exchanged")
class OperandRowsExchanged(OperandMixedUp):
    def mixed_up(self, P):
        return P.flip(-6)


@mutant("operand A's registers hold a key of `near` and one of `far` instead of two neighbouring keys")
class OperandInterleaved(OperandMixedUp):
    def mixed_up(self, P):
        return P.transpose(-3, -1)


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


# ---- the backward ----------------------------------------------------------------------------------------------------


@mutant("delta is missing from dS")
class DeltaMissing(Backward):
    def gradient(self, P, dP, delta):
        return P * dP


@mutant("delta is summed over one tile of keys instead of the whole row")
class DeltaOfTheTile(Backward):
    def gradient(self, P, dP, delta):
        return P * (dP - (P * dP).sum(-1, keepdim=True))


@mutant("delta is added to dP instead of subtracted")
class DeltaAdded(Backward):
    def gradient(self, P, dP, delta):
        return P * (dP + delta[..., None])


@mutant("delta is the last column of dO * O instead of the row's sum")
class DeltaOfTheLastColumn(Backward):
    def delta(self, dO, O):
        return (dO * O)[..., -1]


@mutant("delta is the product of the sums of dO and O instead of the sum of the products")
class DeltaProductOfSums(Backward):
    def delta(self, dO, O):
        return dO.sum(-1) * O.sum(-1)


@mutant("delta is the sum of dO * dO instead of dO * O")
class DeltaOfDo(Backward):
    def delta(self, dO, O):
        return (dO * dO).sum(-1)


@mutant("P is multiplied with dP alone: P * dP - delta instead of P * (dP - delta)")
class DeltaOutsideP(Backward):
    def gradient(self, P, dP, delta):
        return P * dP - delta[..., None]


@variant_of(DeltaOutsideP)
class DeltaOutsidePInVisitedTiles(DeltaOutsideP):
    """As in stage 03, which leaves out the tiles in which no query sees a key."""

    visited = True

    def mask_causal(self, P, rows, keys):
        self.visited = keys.start < rows.start + self.Br + self.Nk - self.Nq
        return super().mask_causal(P, rows, keys)

    def gradient(self, P, dP, delta):
        return super().gradient(P, dP, delta) * self.visited


@mutant("dS is P * (1 - P) * dP, as if each P depended on its own score alone: all of them share l")
class ElementwiseDerivative(Backward):
    def gradient(self, P, dP, delta):
        return P * (1 - P) * dP


@mutant("P is recomputed as a power of 2 without the factor log2(e): 2^(S - lse)")
class PAsAPowerOf2(Backward):
    def probabilities(self, S, lse, rows):
        return (S - lse[..., rows, None]).exp2()


@mutant("dS has the factor scale, which dq and dk then have twice")
class DsScaled(Backward):
    def gradient(self, P, dP, delta):
        return self.scale * super().gradient(P, dP, delta)


@mutant("dS is returned in the place of P, and P in the place of dS")
class PAndDsExchanged(Backward):
    def returned(self, P, dS):
        return dS, P


@mutant("P is the softmax of one tile instead of exp(S - lse)")
class SoftmaxOfTheTile(Backward):
    def probabilities(self, S, lse, rows):
        return S.softmax(-1)


@mutant("a row that sees no key is not guarded: its lse is -inf, and exp(-inf - (-inf)) is NaN")
class NoGuardInBackward(Backward):
    def check(self):
        if not (self.x.causal and self.Nq > self.Nk > 0):
            raise NotApplicable

    def mask_causal(self, P, rows, keys):
        no_key = torch.arange(rows.start, rows.stop)[:, None] + self.Nk - self.Nq < 0
        return super().mask_causal(P, rows, keys).masked_fill(no_key, math.nan)


@mutant("dS lacks the factor P")
class DsWithoutP(Backward):
    def gradient(self, P, dP, delta):
        return dP - delta[..., None]


@mutant("dq lacks the factor scale")
class DqScaleMissing(Backward):
    def dq_scale(self):
        return 1.0


@mutant("dk lacks the factor scale")
class DkScaleMissing(Backward):
    def dk_scale(self):
        return 1.0


@mutant("P is recomputed from scores without the scale")
class PWithoutScale(Backward):
    def score_scale(self):
        return 1.0


@mutant("P is recomputed with 1/sqrt(D) in the place of scale")
class ScaleIgnoredInBackward(Backward):
    def score_scale(self):
        return self.x.q.shape[-1] ** -0.5


@mutant("P is recomputed with a stale lse: that of the first query tile")
class StaleLse(Backward):
    def probabilities(self, S, lse, rows):
        return super().probabilities(S, lse, slice(0, S.shape[-2]))


@mutant("P is recomputed with an lse in base 2")
class LseTakenInBase2(Backward):
    def probabilities(self, S, lse, rows):
        return super().probabilities(S, lse / math.log(2), rows)


@mutant("dv is multiplied with P instead of its transpose")
class DvWrongTranspose(Backward):
    def check(self):
        if self.Br != self.Bc:
            raise NotApplicable

    def dv_product(self, P, dO_i):
        return self.untransposed(P, dO_i)

    def untransposed(self, A, x):
        """A x for a tile A (rows, keys) and x (rows, D), both padded with zeros to a full tile, as in a kernel."""
        rows, keys = A.shape[-2:]
        A = torch.nn.functional.pad(A, (0, self.Bc - keys, 0, self.Br - rows))
        return (A @ torch.nn.functional.pad(x, (0, 0, 0, self.Br - rows)))[..., :keys, :]


@mutant(
    "dk is multiplied with dS instead of its transpose",
    "FlashAttention-2 prints dK = Q dS^T in section 2.2; Dao-AILab/flash-attention issue 373",
)
class DkWrongTranspose(DvWrongTranspose):
    def dk_product(self, dS, Q_i):
        return self.untransposed(dS, Q_i)

    def dv_product(self, P, dO_i):
        return P.mT @ dO_i


@mutant("dq of the last key tile overwrites the others instead of being added")
class DqOverwritten(Backward):
    def add_dq(self, total, term):
        return term


@mutant("the backward forgets the causal mask")
class NoMaskInBackward(Backward):
    def check(self):
        if not self.x.causal:
            raise NotApplicable

    def mask_causal(self, P, rows, keys):
        return P


@mutant("the backward's causal mask is aligned at the top left")
class TopLeftInBackward(Backward):
    def check(self):
        if not self.x.causal or self.Nq == self.Nk:
            raise NotApplicable

    def mask_causal(self, P, rows, keys):
        row = torch.arange(rows.start, rows.stop)[:, None]
        return P.masked_fill(torch.arange(keys.start, keys.stop)[None, :] > row, 0)


@mutant("dk and dv keep one query head of the group instead of the sum")
class HeadsNotSummed(Backward):
    def check(self):
        if self.x.q.shape[1] == self.x.k.shape[1]:
            raise NotApplicable

    def sum_heads(self, grad):
        B, Hk, N, D = self.x.k.shape
        return grad.reshape(B, Hk, -1, N, D)[:, :, -1]


@mutant("dq, dk and dv are accumulated in half precision")
class HalfGradients(Backward):
    accumulator = torch.float16


@mutant("P is recomputed without lse: exp S")
class LseMissing(Backward):
    def probabilities(self, S, lse, rows):
        return S.exp()


@variant_of(LseMissing)
class LseMissingBelowOne(LseMissing):
    """Stage 03's P, which is never larger than 1."""

    def probabilities(self, S, lse, rows):
        return super().probabilities(S, lse, rows).clamp(max=1)


@mutant("dq has the factor scale twice")
class DqScaledTwice(Backward):
    def dq_scale(self):
        return self.scale**2


@mutant("each of the Bc threads adds one element of the tile of dq, and the other elements are never added")
class DqOneElementAThread(Backward):
    def add_dq(self, total, term):
        added = torch.arange(term.shape[-2:].numel()).reshape(term.shape[-2:]) < self.Bc
        return self.add(total, torch.where(added, term, 0))


@mutant("each of the Bc threads adds every element of the tile of dq, so each element is added Bc times")
class DqAddedByEveryThread(Backward):
    def add_dq(self, total, term):
        return self.add(total, self.Bc * term)


# ---- the ring --------------------------------------------------------------------------------------------------------


class Ring(Forward):
    """The forward of a sequence that is divided among ranks, in float32.

    Each rank merges the block of its own keys, then that of the previous rank's keys, and so on. A block is computed at
    once and not tile by tile, which changes only the rounding.
    """

    def check(self):
        if self.x.ring is None:
            raise NotApplicable
        self.ranks, self.layout = self.x.ring

    def run(self, only=None):
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


@mutant("the parts are averaged instead of weighted")
class PartsAveraged(Ring):
    def weight(self, lse, lse_block, lse_new):
        return torch.full_like(lse, 0.5)


@mutant("the weights are exchanged: out has the new part's weight, and the new part has that of out")
class WeightsExchanged(Ring):
    def weight(self, lse, lse_block, lse_new):
        return 1 - super().weight(lse, lse_block, lse_new)


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


@variant_of(LseMergedTwice)
class LseStoredTwice(LseMergedTwice):
    """The block is added to the lse that is stored, too."""

    def next_lse(self, lse, lse_new):
        return self.twice


@mutant("the weights are quotients of exp(lse), which overflows")
class WeightsOverflow(Ring):
    def weight(self, lse, lse_block, lse_new):
        return lse_block.exp() / (lse.exp() + lse_block.exp())


@mutant("the merge does not update lse, so each block's result replaces that of all blocks before it")
class LseNotMerged(Ring):
    def next_lse(self, lse, lse_new):
        return lse


@mutant(
    "the last block is left out: there are as many blocks as hops, and not one more",
    "Ring Attention, Algorithm 1 prints N - 1 rounds",
)
class LastBlockLeftOut(Ring):
    def steps(self):
        return self.ranks - 1


@mutant("a rank's own block is computed without the causal diagonal")
class OwnBlockNotCausal(Ring):
    def seen(self, me, src):
        return torch.ones_like(super().seen(me, src)) if me == src else super().seen(me, src)


@mutant("ranks are compared instead of positions: all keys of earlier ranks are seen, and none of later ranks")
class RanksForPositions(Ring):
    def seen(self, me, src):
        seen = super().seen(me, src)
        return seen if me == src else torch.full_like(seen, src < me)


@mutant("zigzag's early and late chunks are exchanged in blocks of two different ranks")
class ZigzagChunksExchanged(Ring):
    def check(self):
        super().check()
        if self.layout != "zigzag":
            raise NotApplicable

    def seen(self, me, src):
        return super().seen(me, src) if me == src else ~super().seen(me, src)


@mutant("with the striped layout, queries see the diagonal in blocks of later ranks' keys too")
class StripedDiagonalSeen(Ring):
    def check(self):
        super().check()
        if self.layout != "striped":
            raise NotApplicable

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


MASK = {"positions", "hidden", "hidden_score", "mask_causal", "end_of_keys"}  # the steps that a causal mask alone needs
# Where these steps are right and nothing overflows, O that is divided in each tile is O that is divided at the end.
DIVIDING = {"multiply_back", "normalise_step", "divide", "finish", "accumulator", "update", "run"}


@functools.cache
def _changed(kind):
    """{name: function or value}: the steps that a mutant changes."""
    right = Backward if issubclass(kind, Backward) else Forward
    own = {name: x for base in kind.__mro__[: kind.__mro__.index(right)][::-1] for name, x in vars(base).items()}
    return {name: x for name, x in own.items() if not name.startswith("__") and name not in ("check", "variants")}


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
