# SPDX-License-Identifier: MIT
"""Which rank holds which positions of the sequence, and which part of a block of scores it has to compute.

S positions are divided among N ranks, q, k and v alike. With S = 16 and N = 4, each digit is the rank of a position:

    contiguous   0000 1111 2222 3333            rank r holds chunk r of N
    zigzag       00 11 22 33 33 22 11 00        rank r holds chunks r and 2N-1-r of 2N
    striped      0123 0123 0123 0123            rank r holds r, r + N, r + 2N, ...

The idea: under a causal mask late positions see many keys and early ones few. With contiguous chunks rank 0 idles while
rank N-1 works all the time. Zigzag gives every rank an early and a late chunk; striping gives it every N-th position.
The ring's loops are the same for the three layouts, which differ in `pieces` and in one table, `visible_part`. Chunks
may differ in length by one and may be empty, so any S is allowed, S < N too. Sources: Ring Attention (2310.01889),
Striped Attention (2311.09431); zigzag: zhuzilin/ring-flash-attention. Needs torch only.
"""

import functools
from dataclasses import dataclass

import torch

LAYOUTS = ("zigzag", "contiguous", "striped")


@dataclass(frozen=True)
class Layout:
    """S positions divided among N ranks. `causal` is the mask of the whole sequence; only `work` depends on it."""

    kind: str
    S: int
    N: int
    causal: bool = False

    def __post_init__(self):
        if self.kind not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {self.kind!r}.")

    def pieces(self, rank):
        """The rank's positions as ranges, in rising order."""
        if self.kind == "striped":
            return (range(rank, self.S, self.N),)
        if self.kind == "contiguous":
            return (self._chunk(rank, self.N),)
        return self._chunk(rank, 2 * self.N), self._chunk(2 * self.N - 1 - rank, 2 * self.N)

    def _chunk(self, i, n):
        """Chunk i of n; the first S % n chunks are longer by one."""
        size, longer = divmod(self.S, n)
        start = i * size + min(i, longer)
        return range(start, start + size + (i < longer))

    def size(self, rank):
        """How many positions the rank holds."""
        return sum(map(len, self.pieces(rank)))

    def positions(self, rank):
        """The rank's positions (size(rank),), rising. Rotary embeddings and labels need them in place of arange."""
        return torch.tensor([i for piece in self.pieces(rank) for i in piece], dtype=torch.long)

    def shard(self, x, rank, dim=-2):
        """The rank's part of x, which has S positions along dim."""
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, shards, dim=-2):
        """The whole sequence from the shards of rank 0, 1, ..., N-1."""
        order = torch.cat([self.positions(rank) for rank in range(self.N)]).argsort()
        return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))

    def work(self, me, src):
        """What rank `me` computes with the keys of rank `src`: (rows of its q, rows of k, causal), or None for nothing.

        A causal block is square, so it does not matter in which corner a kernel aligns the diagonal.
        """
        early_q, early_k = len(self.pieces(me)[0]), len(self.pieces(src)[0])
        kind = self.kind if self.causal else "full"
        sizes = self.size(me), self.size(src), early_q, early_k
        q_start, q_stop, k_start, k_stop, causal = visible_part(kind, me, src, *sizes)
        if q_start >= q_stop or k_start >= k_stop:
            return None
        return slice(q_start, q_stop), slice(k_start, k_stop), causal

    def share(self, me, size, sizes=None):
        """[self.work(me, src) for each rank src]: all that rank `me` computes. size, sizes: as for `check`."""
        self.check(me, size, sizes)
        return [self.work(me, src) for src in range(self.N)]

    def check(self, me, size, sizes=None):
        """Raises ValueError if the length of rank me's shard is wrong, or with `sizes` the length of any shard."""
        expected = [self.size(rank) for rank in range(self.N)]
        if expected != (sizes or expected) or expected[me] != size:
            raise ValueError(
                f"the {self.kind} shards of S = {self.S} on {self.N} ranks have {expected} positions; "
                f"got {sizes or size}. Cut them with Layout({self.kind!r}, {self.S}, {self.N}).shard(x, rank)."
            )


def visible_part(kind, me, src, q, k, early_q, early_k):
    """(q_start, q_stop, k_start, k_stop, causal): which of rank me's q queries see which of rank src's k keys.

    kind: a layout under a causal mask, or "full" without a mask. causal: whether the part named has a causal diagonal
    itself; such a part is square. For zigzag the early chunks are the first early_q queries and the first early_k keys.
    Where no query sees a key, start = stop.
    """
    #                src == me              src < me: earlier keys         src > me: later keys
    table = {
        "full":       ((0, q, 0, k, False), (0, q, 0, k, False),           (0, q, 0, k, False)),
        "contiguous": ((0, q, 0, k, True),  (0, q, 0, k, False),           (0, 0, 0, 0, False)),
        "zigzag":     ((0, q, 0, k, True),  (0, q, 0, early_k, False),     (early_q, q, 0, k, False)),
        "striped":    ((0, q, 0, k, True),  (0, q, 0, q, True),            (1, q, 0, q - 1, True)),
    }  # fmt: skip
    return table[kind][0 if src == me else 1 if src < me else 2]


def work_of(layout, me, src):
    """layout.work(me, src), cached: it depends only on sizes, and takes as long as the launch of a kernel."""
    return _found(Layout.work, layout, me, src)


@functools.lru_cache(maxsize=4096)
def _found(work, layout, me, src):
    return work(layout, me, src)
