# SPDX-License-Identifier: MIT
"""Three orders of the same attention, counting every element that moves between device memory and the chip.

    standard   S = scale Q K^T, P = softmax(S), O = P V  S and P are stored to memory and loaded again
    fa1        key tiles outside, query tiles inside     K_j, V_j loaded once; O_i, l_i, m_i at every visit, then stored
    fa2        query tiles outside, key tiles inside     O_i, lse_i stored once; K_j, V_j loaded for every query tile

The idea: on a GPU the traffic decides the time, and traffic can be counted on any machine. An array in `Memory` counts
its accesses: `Q[rows]` is a load, `O[rows] = x` a store. A plain tensor is data on the chip, and using it costs
nothing. After each algorithm stands a function that gives its (loads, stores) as a formula; the tests find the two
equal to the element.

Sources: FlashAttention, Algorithms 0 and 1, Theorem 2; FlashAttention-2, Algorithm 1. Left out: the mask; several
heads, which all cost the same; and the size of the chip's memory. Like the paper, the count assumes that the tiles fit
on the chip, and that whatever one step of standard attention needs fits too. Needs torch only.
"""

import math

import torch


class Memory:
    """Device memory, which counts the elements loaded from it and stored to it."""

    def __init__(self):
        self.loads = self.stores = 0

    def put(self, tensor):
        """The tensor as an array in this memory; not counted, because the inputs are there before the kernel starts."""
        return Array(self, tensor.clone())

    def empty(self, *shape, like):
        """An array of this shape and of the type of `like`; its elements are nan until they are stored."""
        return Array(self, like.new_full(shape, math.nan))


class Array:
    """A tensor in device memory. Indexing loads a copy, assigning to an index stores; reading `data` is not counted."""

    def __init__(self, memory, data):
        self.memory, self.data = memory, data

    def __getitem__(self, index):
        tile = self.data[index].clone()
        self.memory.loads += tile.numel()
        return tile

    def __setitem__(self, index, tile):
        self.data[index] = tile
        self.memory.stores += self.data[index].numel()


def standard(memory, q, k, v, scale=None):
    """(out, lse) of one head, q, k, v (N, d), by FlashAttention's Algorithm 0. Its steps pass S and P through memory.

    The softmax loads S once, because a row of S fits on the chip. Algorithm 0 has no lse; it is stored here because the
    other two orders store lse, or l and m, as well.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    N, d = q.shape
    Q, K, V = (memory.put(x) for x in (q, k, v))
    S, P, O, lse = (memory.empty(*shape, like=q) for shape in ((N, N), (N, N), (N, d), (N,)))
    S[:] = scale * Q[:] @ K[:].T  # loads 2 N d, stores N^2
    scores = S[:]  # loads N^2
    lse[:] = log_sum = scores.logsumexp(1)  # stores N
    P[:] = (scores - log_sum[:, None]).exp()  # stores N^2
    O[:] = P[:] @ V[:]  # loads N^2 + N d, stores N d
    return O.data, lse.data


def standard_count(N, d):
    """(loads, stores) of `standard`, together 4 N^2 + 4 N d + N."""
    return 2 * N * N + 3 * N * d, 2 * N * N + N * d + N


def fa1(memory, q, k, v, scale=None, tile=(16, 16)):
    """(out, lse) of one head, q, k, v (N, d), tile (Br, Bc). In brackets: lines of FlashAttention's Algorithm 1.

    The algorithm ends with l and m in memory, where its backward reads them. lse = m + log l is formed afterwards,
    uncounted.
    """
    Br, Bc = tile
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    N, d = q.shape
    Q, K, V = (memory.put(x) for x in (q, k, v))
    O, l, m = (memory.empty(*shape, like=q) for shape in ((N, d), (N,), (N,)))
    O[:], l[:], m[:] = 0, 0, -math.inf  # [2] stores N d + 2 N
    for j in range(0, N, Bc):  # [5]
        K_j, V_j = K[j : j + Bc], V[j : j + Bc]  # [6] loads 2 N d in all
        for i in range(0, N, Br):  # [7]
            rows = slice(i, i + Br)
            Q_i, O_i, l_i, m_i = Q[rows], O[rows], l[rows], m[rows]  # [8] loads N (2 d + 2) for each j
            m_i, l_new, sums = take_in(m_i, l_i, l_i[:, None] * O_i, scale * Q_i @ K_j.T, V_j)  # [9-12]
            O[rows] = sums / l_new[:, None]  # [12] stores N d for each j
            l[rows], m[rows] = l_new, m_i  # [13] stores 2 N for each j
    return O.data, m.data + l.data.log()


def fa1_count(N, d, Br, Bc):
    """(loads, stores) of `fa1`, together 3 N d + 2 N + Tc N (3 d + 4) with Tc = ceil(N / Bc). Br does not matter."""
    Tc = -(-N // Bc)
    return 2 * N * d + Tc * N * (2 * d + 2), (1 + Tc) * N * (d + 2)


def fa2(memory, q, k, v, scale=None, tile=(16, 16)):
    """(out, lse) of one head, q, k, v (N, d), tile (Br, Bc). In brackets: lines of FlashAttention-2's Algorithm 1."""
    Br, Bc = tile
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    N, d = q.shape
    Q, K, V = (memory.put(x) for x in (q, k, v))
    O, lse = memory.empty(N, d, like=q), memory.empty(N, like=q)
    for i in range(0, N, Br):  # [3]
        rows = slice(i, i + Br)
        Q_i = Q[rows]  # [4] loads N d in all
        m = q.new_full((len(Q_i),), -math.inf)  # [5] m, l and O_i are on the chip
        l, O_i = q.new_zeros(len(Q_i)), torch.zeros_like(Q_i)
        for j in range(0, N, Bc):  # [6]
            K_j, V_j = K[j : j + Bc], V[j : j + Bc]  # [7] loads 2 N d for each i
            m, l, O_i = take_in(m, l, O_i, scale * Q_i @ K_j.T, V_j)  # [8-10]
        O[rows] = O_i / l[:, None]  # [12, 14] stores N d in all
        lse[rows] = m + l.log()  # [13, 15] stores N in all
    return O.data, lse.data


def fa2_count(N, d, Br, Bc):
    """(loads, stores) of `fa2`, together 2 N d + N + 2 N d Tr with Tr = ceil(N / Br). Bc does not matter."""
    Tr = -(-N // Br)
    return N * d + 2 * N * d * Tr, N * d + N


def take_in(m, l, O, S, V_j):
    """Rung 3's online update on the chip, for rows that all see a key: m, l (Br,); O (Br, d) is not divided by l."""
    m_new = torch.maximum(m, S.amax(1))
    alpha, P = (m - m_new).exp(), (S - m_new[:, None]).exp()
    return m_new, alpha * l + P.sum(1), alpha[:, None] * O + P @ V_j
