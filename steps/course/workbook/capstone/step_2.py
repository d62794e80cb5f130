"""Step 2 of the capstone: a program for each tile of queries, and a loop over the tiles of keys."""

import torch
import triton
import triton.language as tl

Br, Bc = 32, 32


@triton.jit
def load_tile(x, head, first, N, ROWS: tl.constexpr, D: tl.constexpr):
    """The rows from `first` on of one head of x, which has heads of N rows."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    return tl.load(x + head * N * D + row * D + column)  # (ROWS, D)


@triton.jit
def forward_kernel(q, k, v, out, scale, Nq, Nk, D: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr):
    head, i = tl.program_id(0), tl.program_id(1) * Br
    Q_i = load_tile(q, head, i, Nq, Br, D)
    m, l = tl.full((Br,), float("-inf"), tl.float32), tl.zeros((Br,), tl.float32)
    O = tl.zeros((Br, D), tl.float32)
    for j in range(0, Nk, Bc):
        K_j, V_j = load_tile(k, head, j, Nk, Bc, D), load_tile(v, head, j, Nk, Bc, D)
        S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        m_new = tl.maximum(m, tl.max(S, 1))
        alpha, P = tl.exp(m - m_new), tl.exp(S - m_new[:, None])
        l = alpha * l + tl.sum(P, 1)
        O = alpha[:, None] * O + tl.dot(P, V_j, input_precision="ieee")
        m = m_new
    row, column = i + tl.arange(0, Br)[:, None], tl.arange(0, D)[None, :]
    tl.store(out + head * Nq * D + row * D + column, O / l[:, None])


def attention(q, k, v, causal=False, scale=None):
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    out = torch.empty_like(q)
    forward_kernel[(B * H, triton.cdiv(Nq, Br))](q, k, v, out, scale, Nq, Nk, D=D, Br=Br, Bc=Bc)
    return out
