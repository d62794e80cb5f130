"""What may stand between q K^T and the softmax: which scores are changed, how, and which are hidden.

    X = scale q . k
    S = softcap tanh(X / softcap)  + mask  - slope |pos - key|     and -inf where the key is hidden

in this order. A key is hidden by a boolean mask (True = seen), by an additive mask of -inf, by `causal` (key > pos), by
a window outside of pos - left <= key <= pos + right, and where it belongs to another sequence or does not exist. The
functions compute in the type of their argument, so that float64 and plain float32 attention share every line. A sink is
one more column of S, to which none of this is done, and whose value is 0.

Sources: soft-cap: Gemma 2, arXiv 2408.00118, section 2. ALiBi: arXiv 2108.12409. Window: Longformer, arXiv 2004.05150.
Sinks: gpt-oss, arXiv 2508.10925; their name: arXiv 2309.17453.
"""

from dataclasses import dataclass

import torch

SWALLOWS = 2.0**100  # A mask beyond this absorbs every score: mask + X is exactly the mask, in any float type.


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """The options of attention besides `scale`. Tensors lie on the device of q.

    Query i stands at position i + first_query, key j at j + first_key. By default first_query is Nk - Nq, so that the
    last query stands at the last key (bottom right), and first_key is 0.

    causal            a query sees the keys up to its own position
    window            (left, right): a query sees the keys from `left` positions before to `right` positions after its
                      own, both inclusive. None or -1 is no limit.
    softcap           a number > 0; None or 0 is none
    mask              (..., Nq, Nk), broadcast to (B, H, Nq, Nk): bool (True = seen), or float, added in natural units
    alibi_slopes      (H,) or (B, H)
    sinks             (H,), in natural units: each row's softmax has one more column of this score, whose value is 0.
                      -inf is no sink. A row without a key then gets out 0 and lse = sink.
    first_query, first_key        integers, see above
    cu_seqlens_q, cu_seqlens_k    packed sequences: (n + 1,) integers that begin with 0 and do not decrease. B is 1, and
                      sequence s is the queries cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1 and likewise the keys.
                      Positions count from 0 in each sequence, the default of first_query is the sequence's own
                      Nk - Nq, and alibi_slopes may be (n, H). `mask` is indexed like q and k: (..., total_q, total_k).
                      Rows after the last entry belong to no sequence: they see nothing and nothing sees them.
    lengths_k         (B,) integers: keys from lengths_k[b] on do not exist, and the default of first_query is
                      lengths_k[b] - Nq
    dropout_mask, dropout_p       bool, broadcast to (B, H, Nq, Nk), True keeps; P is multiplied by it and divided by
                      1 - dropout_p after the softmax, so that lse knows nothing of it
    """

    causal: bool = False
    window: tuple | None = None
    softcap: float | None = None
    mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    first_query: int | None = None
    first_key: int = 0
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    lengths_k: torch.Tensor | None = None
    dropout_mask: torch.Tensor | None = None
    dropout_p: float = 0.0

    def __post_init__(self):
        if (self.cu_seqlens_q is None) != (self.cu_seqlens_k is None):
            raise ValueError("packed sequences need both cu_seqlens_q and cu_seqlens_k")
        if self.cu_seqlens_q is not None and self.lengths_k is not None:
            raise ValueError("lengths_k is for sequences that are not packed")

    @property
    def additive(self):
        """Whether there is a mask that can have a gradient."""
        return self.mask is not None and self.mask.is_floating_point()

    def scores(self, X, tanh=torch.tanh):
        """S (B, H, Nq, Nk) from X = scale q . k, in the type of X, -inf where the key is hidden."""
        S = self.softcap * tanh(X / self.softcap) if self.softcap else X
        if self.additive:
            S = S + self._mask_as(S.dtype)
        if self.alibi_slopes is not None:
            S = S - self._alibi(S)
        seen = self.seen(*S.shape[-2:], S.device)
        return S.masked_fill(~seen.reshape(seen.shape[-S.ndim :]), -torch.inf)

    def with_sinks(self, S):
        """S (B, H, Nq, Nk) with one more column, the sinks, if there are any; -inf in rows of no sequence."""
        if self.sinks is None:
            return S
        column = self.sinks.to(S.dtype)[:, None, None]
        if self.cu_seqlens_q is not None:
            row = torch.arange(S.shape[-2], device=S.device)
            column = torch.where((row < self.cu_seqlens_q[-1])[:, None], column, -torch.inf)
        return torch.cat([S, column.reshape(column.shape[-S.ndim :]).expand(*S.shape[:-1], 1)], -1)

    def slope(self, X, tanh=torch.tanh):
        """dS / dX in the type of X: 1 - tanh^2 with a soft-cap, otherwise the number 1."""
        return 1 - tanh(X / self.softcap).square() if self.softcap else 1.0

    def added(self, S):
        """The absolute values that are added to the scores, summed, in the type of S; 0 where the mask swallows S."""
        total = torch.zeros_like(S)
        if self.additive:
            size = self._mask_as(S.dtype).abs()
            total = total + size.masked_fill(size > SWALLOWS, 0)
        return total if self.alibi_slopes is None else total + self._alibi(S).abs()

    def dropped(self, P):
        """Z in the type of P: what P is multiplied with, 0 where it is dropped; 1 without dropout."""
        if self.dropout_mask is None:
            return torch.ones_like(P)
        kept = 1 - self.dropout_p
        return self.dropout_mask.to(P.dtype).expand(P.shape) * (1 / kept if kept else 0.0)

    def sum_to_mask(self, dS):
        """The gradient of the mask: dS (B, H, Nq, Nk), summed over what the mask was broadcast over."""
        if not self.additive:
            raise ValueError("only a mask of floating-point numbers has a gradient")
        return dS.sum_to_size(self.mask.shape)

    def sum_to_sinks(self, dS):
        """The gradient of the sinks (H,): dS (B, H, Nq, 1) of their column, summed over batch and rows."""
        return dS.sum_to_size((len(self.sinks), 1, 1)[-dS.ndim :]).flatten()

    def seen(self, Nq, Nk, device="cpu"):
        """bool, broadcastable to (B, H, Nq, Nk): which keys each query sees."""
        query, key, seen = self.positions(Nq, Nk, device)
        query, key = query[..., :, None], key[..., None, :]
        if self.causal:
            seen = seen & (key <= query)
        left, right = self.window or (None, None)
        if left not in (None, -1):
            seen = seen & (key >= query - left)
        if right not in (None, -1):
            seen = seen & (key <= query + right)
        seen = seen[:, None]  # (B or 1, 1, Nq, Nk): the same for every head
        if self.mask is None:
            return seen
        return seen & (self.mask != -torch.inf if self.additive else self.mask)

    def positions(self, Nq, Nk, device="cpu"):
        """Positions of the queries (B or 1, Nq) and keys (B or 1, Nk), and (B or 1, Nq, Nk): which belong together."""
        i, j = torch.arange(Nq, device=device), torch.arange(Nk, device=device)
        if self.cu_seqlens_q is not None:
            return self._packed_positions(i, j)
        first_query, exists = Nk - Nq, torch.ones(1, 1, Nk, dtype=torch.bool, device=device)
        if self.lengths_k is not None:
            lengths = self.lengths_k.long()[:, None]  # (B, 1)
            first_query, exists = lengths - Nq, (j < lengths)[:, None, :]
        if self.first_query is not None:
            first_query = self.first_query
        return (i + first_query).expand(len(exists), -1), (j + self.first_key)[None], exists.expand(-1, Nq, -1)

    def _packed_positions(self, i, j):
        q_sequence, q_start, q_length = _sequences(i, self.cu_seqlens_q)
        k_sequence, k_start, _ = _sequences(j, self.cu_seqlens_k)
        lengths = _lengths(self.cu_seqlens_k)[q_sequence]  # how many keys each query's sequence has
        first_query = lengths - q_length if self.first_query is None else self.first_query
        together = (q_sequence[:, None] == k_sequence) & (q_sequence < len(self.cu_seqlens_q) - 1)[:, None]
        return (i - q_start + first_query)[None], (j - k_start + self.first_key)[None], together[None]

    def _alibi(self, S):
        """slope |pos - key|, broadcastable to S and in its type."""
        Nq, Nk = S.shape[-2:]
        query, key, _ = self.positions(Nq, Nk, S.device)
        distance = (query[:, :, None] - key[:, None, :]).abs()[:, None]  # (B or 1, 1, Nq, Nk)
        slopes = self.alibi_slopes.to(S.dtype)
        if self.cu_seqlens_q is None or slopes.ndim == 1:
            total = slopes[..., None, None] * distance
            return total.reshape(total.shape[-S.ndim :])
        slopes = torch.cat([slopes, slopes.new_zeros(1, slopes.shape[1])])  # for the rows after the last sequence
        sequence, _, _ = _sequences(torch.arange(Nq, device=S.device), self.cu_seqlens_q)
        return slopes[sequence].mT[None, :, :, None] * distance

    def _mask_as(self, dtype):
        """The additive mask in a float type. Finite numbers stay finite, and what is -inf is hidden by `seen`."""
        limits = torch.finfo(dtype)
        return self.mask.double().clamp(limits.min, limits.max).to(dtype)


def _sequences(rows, cu_seqlens):
    """For each row of a packed tensor: its sequence, where that begins, and its length.

    Rows after the last entry get the number of sequences, as if one more sequence without a length followed.
    """
    starts = cu_seqlens.long()
    sequence = torch.searchsorted(starts, rows, right=True) - 1  # the last of equal entries: no row is in an empty one
    return sequence, starts[sequence], _lengths(cu_seqlens)[sequence]


def _lengths(cu_seqlens):
    """(n + 1,) the length of each sequence, and 0 for the rows after the last."""
    return torch.nn.functional.pad(cu_seqlens.long().diff(), (0, 1))
