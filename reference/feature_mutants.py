"""Mistakes that people make in the features of attention, planted one at a time, as those of reference/mutants.py.

A mutant is the attention below with one step overridden. It computes a sequence's scores at once and not tile by tile,
because no mistake here depends on tiles. The cases of reference/feature_cases.py kill every mutant, that is, on some
case some result is out of tolerance, and they tell every two mutants apart.
"""

import functools
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from reference import error, feature_cases, mutants, philox

NOT_GIVEN = dict.fromkeys(
    "scale window softcap mask alibi_slopes sinks seed first_query parts cu_seqlens_q lengths_k".split()
) | {"causal": False, "first_key": 0, "dropout_p": 0.0}


class Block(NamedTuple):
    """The queries of one sequence, and a part of its keys."""

    s: int  # the number of the sequence, which is the batch entry if sequences are not packed
    b: int  # the batch entry
    rows: range  # of the tensors
    keys: range
    first_query: int  # positions
    first_key: int


class Attention:
    """Forward and backward of every feature in float32, one method a step."""

    hidden_score = -math.inf
    sink_of_every_part = False

    def __init__(self, q, k, v, dout, options):
        self.q, self.k, self.v, self.dout = (x.float() for x in (q, k, v, dout))
        self.o = SimpleNamespace(**NOT_GIVEN | options)
        (self.B, self.H, self.Nq, D), self.Nk = q.shape, k.shape[2]
        self.group = self.H // k.shape[1]
        self.scale = D**-0.5 if self.o.scale is None else self.o.scale
        self.additive = self.o.mask is not None and self.o.mask.is_floating_point()

    def run(self):
        """The results by name; with the gradient of the mask if it is additive, and that of the sinks."""
        out, lse = self.new_results()
        dq, dk, dv = (torch.zeros_like(x) for x in (self.q, self.k, self.v))
        dS, dsinks = torch.zeros(self.B, self.H, self.Nq, self.Nk), torch.zeros(self.H)
        for blocks in self.sequences():
            rows = cut(blocks[0].b, blocks[0].rows)
            O, L = torch.zeros_like(out[rows]), torch.full_like(lse[rows], -math.inf)
            for n, x in enumerate(blocks):
                O, L = self.merge(O, L, *self.forward(x))
                if self.o.sinks is not None and (n == 0 or self.sink_of_every_part):
                    O, L = self.add_sink(O, L)
            out[rows], lse[rows] = O, L
            if self.o.sinks is not None:
                P = (self.sink(L) - self.unit(L)).exp()
                dsinks -= self.sink_gradient(P, (self.dout[rows] * O).sum(-1))
            for x in blocks:
                keys = cut(x.b, x.keys)
                dQ, dK, dV, dS_x = self.backward(x, O, L)
                dq[rows] += dQ
                dk[keys] += self.sum_heads(dK)
                dv[keys] += self.sum_heads(dV)
                dS[(*rows, slice(x.keys.start, x.keys.stop))] += dS_x
        more = [*([self.sum_to_mask(dS)] if self.additive else []), *([] if self.o.sinks is None else [dsinks])]
        return error._by_name(out, lse, dq, dk, dv, *more, sinks=self.o.sinks)

    def forward(self, x):
        """(O, lse) of a block."""
        S, _ = self.scores(x)
        keep = self.keep(x)
        L = self.log_sum_exp(S, keep)
        P = self.probabilities(S, L)
        return (P * keep * self.dropout_factor()) @ self.repeated(self.v, x), self.saved(L, S, keep)

    def backward(self, x, O, L):
        """(dQ, dK, dV, dS) of a block, with a dK and dV for each query head; O and L are of all its sequence's keys."""
        S, derivative = self.scores(x)
        Q, dO = self.q[cut(x.b, x.rows)], self.dout[cut(x.b, x.rows)]
        K, V = self.repeated(self.k, x), self.repeated(self.v, x)
        P = self.probabilities(S, L)
        Z = self.keep_in_backward(x) * self.dropout_factor()
        dS = P * (self.drop_dP(dO @ V.mT, Z) - self.delta(dO, O, P, V))
        dX = self.scale * dS * self.derivative_in_backward(derivative)
        return dX @ K, dX.mT @ Q, (P * Z).mT @ dO, dS

    def scores(self, x):
        """(S (H, Nq, Nk), dS/dX)"""
        S, derivative = self.cap(self.scale * (self.q[cut(x.b, x.rows)] @ self.repeated(self.k, x).mT))
        return self.hide(self.add_alibi(self.add_mask(S, x), x), x), derivative

    # The steps that mutants override: sequences and positions.
    def new_results(self):
        """(out, lse) before they are written."""
        return torch.zeros_like(self.q), torch.full(self.q.shape[:3], -math.inf)

    def sequences(self):
        """Yields for each sequence its blocks."""
        if self.o.cu_seqlens_q is not None:
            starts = self.o.cu_seqlens_q.tolist(), self.o.cu_seqlens_k.tolist()
            for s, (rows, keys) in enumerate(zip(*(pairwise(x) for x in starts), strict=True)):
                yield [self.block(s, 0, range(*rows), range(*keys))]
            return
        lengths = [self.Nk] * self.B if self.o.lengths_k is None else self.o.lengths_k.tolist()
        for b, length in enumerate(lengths):
            parts = [(0, length)] if self.o.parts is None else pairwise(self.o.parts)
            yield [self.block(b, b, range(self.Nq), range(*part)) for part in parts]

    def block(self, s, b, rows, keys):
        first_key = self.o.first_key if self.o.parts is None else keys.start
        return Block(s, b, rows, keys, self.first_query(rows, keys), first_key)

    def first_query(self, rows, keys):
        return len(keys) - len(rows) if self.o.first_query is None else self.o.first_query

    def repeated(self, t, x):
        """The block's rows of k or v, with a head for each query head."""
        return t[cut(x.b, x.keys)].repeat_interleave(self.group, 0)

    def sum_heads(self, grad):
        return grad.unflatten(0, (-1, self.group)).sum(1)

    def merge(self, O, L, O_x, L_x):
        """(O, L) of the keys so far and of one more block."""
        L_new = torch.logaddexp(L, L_x)
        unit = self.unit(L_new)
        return O * (L - unit).exp()[..., None] + O_x * (L_x - unit).exp()[..., None], L_new

    # Scores.
    def cap(self, X):
        """(S, dS/dX)"""
        if not self.o.softcap:
            return X, 1.0
        tanh = (X / self.o.softcap).tanh()
        return self.o.softcap * tanh, 1 - tanh.square()

    def derivative_in_backward(self, derivative):
        return derivative

    def mask(self, x):
        """The mask of a block, (H, Nq, Nk)."""
        mask = self.whole_mask()[cut(x.b, x.rows)]
        return mask[..., x.keys.start : x.keys.stop]

    def whole_mask(self):
        return self.o.mask.expand(self.B, self.H, self.Nq, self.Nk)

    def add_mask(self, S, x):
        return S + self.mask_units() * self.mask(x) if self.additive else S

    def mask_units(self):
        return 1.0

    def add_alibi(self, S, x):
        if self.o.alibi_slopes is None:
            return S
        return S - self.slopes(x)[:, None, None] * self.distance(*positions(x))

    def slopes(self, x):
        slopes = self.o.alibi_slopes
        return slopes if slopes.ndim == 1 else slopes[x.s]

    def distance(self, query, key):
        return (query - key).abs()

    def hide(self, S, x):
        seen = self.seen(x)
        if self.o.mask is not None and not self.additive:
            seen = seen & self.boolean(self.mask(x))
        return S.masked_fill(~seen, self.hidden_score)

    def boolean(self, mask):
        return mask

    def seen(self, x):
        query, key = positions(x)
        seen = self.in_window(query, key)
        return seen & (key <= query) if self.o.causal else seen

    def in_window(self, query, key):
        left, right = (math.inf if limit in (None, -1) else limit for limit in self.o.window or (None, None))
        return (key >= query - self.left(left)) & (key <= query + self.right(right))

    def left(self, limit):
        return limit

    def right(self, limit):
        return limit

    # Softmax.
    def log_sum_exp(self, S, keep):
        return S.logsumexp(-1)

    def saved(self, L, S, keep):
        """lse as it is returned and used by the backward."""
        return L

    def unit(self, L):
        """L, or 0 in a row that sees no key, where exp(-inf - (-inf)) would be NaN."""
        return L.nan_to_num(neginf=0.0)

    def probabilities(self, S, L):
        return (S - self.unit(L)[..., None]).exp()

    # Sinks.
    def sink(self, L):
        """The score of each row's sink, like L (H, Nq)."""
        return self.o.sinks.float()[:, None].expand_as(L)

    def add_sink(self, O, L):
        return self.merge(O, L, torch.zeros_like(O), self.sink(L))

    def sink_gradient(self, P, delta):
        """What is subtracted from the gradient of the sinks (H,), from P and delta (H, Nq)."""
        return (P * delta).sum(-1)

    # Dropout.
    def threshold(self):
        return philox.threshold(self.o.dropout_p)

    def dropout_factor(self):
        return 256 / self.threshold() if self.o.dropout_p else 1.0

    def keep(self, x):
        """(H, Nq, Nk) bool: which entries dropout keeps."""
        if not self.o.dropout_p:
            return torch.ones((), dtype=torch.bool)
        return self.draw(x, self.o.first_query or 0, x.first_key)

    def draw(self, x, first_query, first_key):
        sizes, p = (self.H, len(x.rows), len(x.keys)), 1 - self.threshold() / 256
        return philox._dense(int(self.o.seed), np.array([x.s]), *sizes, p, first_query, first_key)[0]

    def keep_in_backward(self, x):
        return self.keep(x)

    def drop_dP(self, dP, Z):
        return dP * Z

    def delta(self, dO, O, P, V):
        return (dO * O).sum(-1, keepdim=True)

    # The gradient of the mask.
    def sum_to_mask(self, dS):
        """dS (B, H, Nq, Nk), summed over the dimensions that the mask was broadcast over."""
        shape = self.o.mask.shape
        for dim, size in enumerate((1,) * (4 - len(shape)) + shape):
            if size < dS.shape[dim]:
                dS = self.sum_over(dS, dim)
        return dS.reshape(shape)

    def sum_over(self, dS, dim):
        return dS.sum(dim, keepdim=True)


def cut(b, rows):
    """The index of all heads' rows in one batch entry of a tensor (B, H, ...)."""
    return b, slice(None), slice(rows.start, rows.stop)


def positions(x):
    """Those of the queries, (Nq, 1), and of the keys, (1, Nk)."""
    query, key = torch.arange(len(x.rows)) + x.first_query, torch.arange(len(x.keys)) + x.first_key
    return query[:, None], key[None, :]


MUTANTS: list[mutants.Mutant] = []
planted = functools.partial(mutants.planted, among=MUTANTS)
mutant = functools.partial(mutants.mutant, among=MUTANTS)


# ---- masks -----------------------------------------------------------------------------------------------------------


@mutant("the mask is read with query and key exchanged")
class MaskTransposed(Attention):
    def whole_mask(self):
        mask, n = super().whole_mask().clone(), min(self.Nq, self.Nk)  # What lies beyond these n is not in the mask.
        mask[..., :n, :n] = mask[..., :n, :n].mT.clone()
        return mask


@mutant("the mask is broadcast over the wrong dimension: batch and head are exchanged")
class MaskBatchAndHeadExchanged(Attention):
    def whole_mask(self):
        mask = super().whole_mask()
        return mask.transpose(0, 1) if self.B == self.H else mask


planted("mask_without_start", Attention, "the mask of a packed sequence is read from the first query and key on",
        mask=lambda self, x: Attention.mask(self, x._replace(rows=range(len(x.rows)), keys=range(len(x.keys)))))
planted("boolean_mask_inverted", Attention, "the boolean mask is inverted: True hides",
        boolean=lambda self, mask: ~mask)
planted("hidden_is_minus1e9", Attention,
        "hidden keys get the score -1e9, so a row that sees no key is a mean of v, and its lse is not -inf",
        hidden_score=-1e9)
planted("additive_mask_scaled", Attention, "the additive mask is multiplied by scale",
        mask_units=lambda self: self.scale)
planted("additive_mask_in_base2", Attention, "the additive mask is not converted to base 2, as the scores are",
        mask_units=lambda self: math.log(2))


@mutant("the additive mask is added before the soft-cap")
class AdditiveMaskBeforeSoftcap(Attention):
    def scores(self, x):
        X = self.scale * (self.q[cut(x.b, x.rows)] @ self.repeated(self.k, x).mT)
        S, derivative = self.cap(self.add_mask(X, x))
        return self.hide(self.add_alibi(S, x), x), derivative


planted("mask_gradient_scaled", Attention, "the gradient of the mask is multiplied by scale",
        sum_to_mask=lambda self, dS: self.scale * Attention.sum_to_mask(self, dS))


@mutant("the gradient of the mask is multiplied by the derivative of the soft-cap")
class MaskGradientOfX(Attention):
    def backward(self, x, O, L):
        dQ, dK, dV, dS = super().backward(x, O, L)
        return dQ, dK, dV, dS * self.scores(x)[1]


class OneOfMany(Attention):
    """The base of four mutants: along `dim` the mask's gradient is that of the last entry instead of the sum."""

    def sum_over(self, dS, dim):
        return dS.narrow(dim, -1, 1) if dim == self.dim else super().sum_over(dS, dim)


planted("mask_gradient_of_one_batch", OneOfMany,
        "the gradient of a mask that is broadcast over the batch is not summed over it", dim=0)
planted("mask_gradient_of_one_head", OneOfMany,
        "the gradient of a mask that is broadcast over heads is not summed over them", dim=1)
planted("mask_gradient_of_one_query", OneOfMany,
        "the gradient of a mask that is broadcast over queries is not summed over them", dim=2)
planted("mask_gradient_of_one_key", OneOfMany,
        "the gradient of a mask that is broadcast over keys is not summed over them", dim=3)


# ---- windows and positions -------------------------------------------------------------------------------------------


planted("window_left_exclusive", Attention, "the window's left limit is exclusive",
        left=lambda self, limit: limit - 1)
planted("window_right_exclusive", Attention, "the window's right limit is exclusive",
        right=lambda self, limit: limit - 1)


@mutant("the window is one key wider on both sides")
class WindowOneWider(Attention):
    def left(self, limit):
        return limit + 1

    def right(self, limit):
        return limit + 1


planted("window_top_left", Attention, "the window is counted from the top left: query i stands at key i",
        in_window=lambda self, query, key: Attention.in_window(self, query - query[:1], key))


@mutant("first_query is ignored")
class FirstQueryIgnored(Attention):
    def first_query(self, rows, keys):
        return self.Nk - self.Nq if self.o.first_query is not None else super().first_query(rows, keys)


@mutant("first_key is ignored: a call with later keys counts them from 0")
class FirstKeyIgnored(Attention):
    def seen(self, x):
        return super().seen(x._replace(first_key=0))

    def add_alibi(self, S, x):
        return super().add_alibi(S, x._replace(first_key=0))


planted("carried_not_rescaled", Attention,
        "out of earlier calls is added as it is, without a factor that fits the new lse",
        merge=lambda self, O, L, O_x, L_x: (O + O_x, torch.logaddexp(L, L_x)))
planted("carried_overwritten", Attention, "out and lse of earlier calls are overwritten",
        merge=lambda self, O, L, O_x, L_x: (O_x, L_x))
planted("row_without_key_is_nan", Attention, "a row that sees no key is not guarded: exp(-inf - (-inf)) is NaN",
        unit=lambda self, L: L)


# ---- ALiBi -----------------------------------------------------------------------------------------------------------


planted("alibi_added", Attention, "ALiBi is added instead of subtracted",
        slopes=lambda self, x: -Attention.slopes(self, x))
planted("alibi_of_size", Attention, "a negative slope of ALiBi counts as positive",
        slopes=lambda self, x: Attention.slopes(self, x).abs())
planted("alibi_signed", Attention, "ALiBi's distance is signed: keys behind the query gain",
        distance=lambda self, query, key: query - key)
planted("alibi_top_left", Attention, "ALiBi's distance is counted from the top left: query i stands at key i",
        distance=lambda self, query, key: Attention.distance(self, query - query[:1], key))
planted("alibi_of_key_head", Attention, "ALiBi takes the slope of the key head instead of the query head",
        slopes=lambda self, x: Attention.slopes(self, x)[torch.arange(self.H) // self.group])
planted("alibi_of_first_batch", Attention, "ALiBi takes the slopes of the first batch entry or sequence for all",
        slopes=lambda self, x: Attention.slopes(self, x._replace(s=0)))


# ---- soft-cap --------------------------------------------------------------------------------------------------------


planted("softcap_without_derivative", Attention, "the backward lacks the derivative of the soft-cap",
        derivative_in_backward=lambda self, derivative: 1.0)


@mutant("the soft-cap is applied after hiding, so a hidden key gets the score -softcap")
class SoftcapAfterHiding(Attention):
    def hide(self, S, x):
        return S.where(super().hide(S, x) > -math.inf, -self.o.softcap) if self.o.softcap else super().hide(S, x)


planted("softcap_without_scale", Attention, "under the soft-cap the scale is missing",
        cap=lambda self, X: Attention.cap(self, X / self.scale) if self.o.softcap else Attention.cap(self, X))


# ---- dropout ---------------------------------------------------------------------------------------------------------


planted("dropout_drawn_anew", Attention, "the backward draws another dropout mask than the forward",
        keep_in_backward=lambda self, x: Attention.keep_in_backward(self, x._replace(s=x.s + 1)))
planted("dropout_not_scaled", Attention, "what dropout keeps is not multiplied by 1 / (1 - p)",
        dropout_factor=lambda self: 1.0)
planted("dropout_factor_of_p", Attention,
        "what dropout keeps is multiplied by 1 / (1 - p), although a byte cannot drop exactly p",
        dropout_factor=lambda self: 1 / (1 - self.o.dropout_p))
planted("dropout_threshold_truncated", Attention, "dropout's threshold is truncated instead of rounded",
        threshold=lambda self: int(256 * (1 - self.o.dropout_p)))
planted("dropout_before_sum", Attention,
        "P is dropped before the sum l, so that what is kept adds up to 1, and lse is smaller",
        log_sum_exp=lambda self, S, keep: S.masked_fill(~keep, -math.inf).logsumexp(-1))
planted("dropout_in_lse", Attention, "lse is that of the scores after dropout",
        saved=lambda self, L, S, keep: S.masked_fill(~keep, -math.inf).logsumexp(-1))
planted("dropout_not_in_delta", Attention, "delta is computed without dropout",
        delta=lambda self, dO, O, P, V: (dO * (P @ V if self.o.dropout_p else O)).sum(-1, keepdim=True))
planted("dropout_not_in_dp", Attention, "dP is not dropped",
        drop_dP=lambda self, dP, Z: dP)
planted("dropout_of_next_key", Attention, "dropout takes the byte of the next key",
        draw=lambda self, x, first_query, first_key: Attention.draw(self, x, first_query, first_key + 1))
planted("dropout_without_first_key", Attention, "dropout numbers the keys of each call from 0",
        draw=lambda self, x, first_query, first_key: Attention.draw(self, x, first_query, 0))
planted("dropout_of_positions", Attention, "dropout numbers the queries by their positions, by default from Nk - Nq on",
        draw=lambda self, x, first_query, first_key: Attention.draw(self, x, x.first_query, first_key))
planted("dropout_same_for_heads", Attention, "all heads drop the same entries",
        draw=lambda self, x, first_query, first_key: Attention.draw(self, x, first_query, first_key)[:1])
planted("dropout_same_for_batches", Attention, "all batch entries, or packed sequences, drop the same entries",
        draw=lambda self, x, first_query, first_key: Attention.draw(self, x._replace(s=0), first_query, first_key))


# ---- sinks -----------------------------------------------------------------------------------------------------------


planted("sink_scaled", Attention, "the sink is multiplied by scale, as the scores are",
        sink=lambda self, L: self.scale * Attention.sink(self, L))
planted("sink_in_base2", Attention, "the sink is not converted to base 2, as the scores are",
        sink=lambda self, L: math.log(2) * Attention.sink(self, L))
planted("sink_of_key_head", Attention, "the sink is taken of the key head instead of the query head",
        sink=lambda self, L: Attention.sink(self, L)[torch.arange(self.H) // self.group])
planted("sink_of_every_part", Attention, "the sink is counted once for each part of the keys",
        sink_of_every_part=True)
planted("sink_not_in_lse", Attention, "the sink makes out smaller, but is not in lse",
        add_sink=lambda self, O, L: (Attention.add_sink(self, O, L)[0], L))
planted("sink_only_beside_keys", Attention, "the sink is left out where a row sees no key: its lse is -inf",
        sink=lambda self, L: Attention.sink(self, L).masked_fill(L == -math.inf, -math.inf))
planted("sink_gradient_without_delta", Attention, "the gradient of the sinks lacks delta: it is the sum of their P",
        sink_gradient=lambda self, P, delta: P.sum(-1))
planted("sink_gradient_negative", Attention, "the gradient of the sinks has the wrong sign",
        sink_gradient=lambda self, P, delta: -Attention.sink_gradient(self, P, delta))


# ---- packed sequences, and keys that do not exist --------------------------------------------------------------------


@mutant("packed sequences are aligned at the top left")
class PackedTopLeft(Attention):
    def first_query(self, rows, keys):
        return 0 if self.o.cu_seqlens_q is not None else super().first_query(rows, keys)


@mutant("a packed sequence sees the keys of the next ones, as far as the longest sequence would reach")
class PackedNeighbourSeen(Attention):
    def block(self, s, b, rows, keys):
        x = super().block(s, b, rows, keys)
        if self.o.cu_seqlens_q is None:
            return x
        return x._replace(keys=range(keys.start, min(keys.start + self.o.max_seqlen_k, self.Nk)))


planted("packed_rest_not_written", Attention, "rows after the last packed sequence are never written",
        new_results=lambda self: tuple(torch.full_like(x, math.nan) for x in Attention.new_results(self)))


@mutant("a sequence without keys gives 0 / 0")
class EmptySequenceIsNan(Attention):
    def forward(self, x):
        O, L = super().forward(x)
        return (O, L) if x.keys else (O + math.nan, L)


@mutant("causal is aligned at the last key of the memory, not at the last one that exists")
class LengthsIgnoredByCausal(Attention):
    def first_query(self, rows, keys):
        return self.Nk - self.Nq if self.o.lengths_k is not None else super().first_query(rows, keys)


@mutant("keys that do not exist are seen")
class LengthsIgnored(Attention):
    def block(self, s, b, rows, keys):
        x = super().block(s, b, rows, keys)
        return x._replace(keys=range(self.Nk)) if self.o.lengths_k is not None else x


# ---- who is killed by what -------------------------------------------------------------------------------------------


def kill_matrix():
    """(matrix, twins) of all cases, as mutants.kill_matrix gives them. A mutant that changes nothing is "n/a"."""
    matrix, results = {m.name: {} for m in MUTANTS}, {m.name: {} for m in MUTANTS}
    for names in feature_cases.CASES:
        inputs, case = feature_cases.inputs(names), " + ".join(names)
        right, want = Attention(*inputs).run(), feature_cases.expected(*inputs)
        for m in MUTANTS:
            got = m.kind(*inputs).run()
            results[m.name][case] = got, want
            verdict = "killed" if error.failures(got, want) else "survives"
            matrix[m.name][case] = "n/a" if all(torch.equal(got[name], right[name]) for name in got) else verdict
    return matrix, mutants._twins(results)
