"""Step 4 of the capstone: the causal mask, lse, and queries that see no key."""

import torch
import triton
import triton.language as tl

Br, Bc = 32, 32


@triton.jit
def load_tile(x, stride, first, N, ROWS: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr):
    """The rows from `first` on of the head that begins at x, with zeros beyond the N rows and D columns."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D_pad)[None, :]
    return tl.load(x + row * stride + column, mask=(row < N) & (column < D), other=0.0)  # (ROWS, D_pad)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, H, Nq, Nk, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):  # fmt: skip
    b, h, i = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * Br
    q += b * q_strides[0] + h * q_strides[1]
    k += b * k_strides[0] + h * k_strides[1]
    v += b * v_strides[0] + h * v_strides[1]
    out += b * out_strides[0] + h * out_strides[1]
    Q_i = load_tile(q, q_strides[2], i, Nq, Br, D, D_pad)
    m, l = tl.full((Br,), float("-inf"), tl.float32), tl.zeros((Br,), tl.float32)
    O = tl.zeros((Br, D_pad), tl.float32)
    query, end = i + tl.arange(0, Br)[:, None], Nk
    if CAUSAL:  # no query of the tile sees a key from `end` on
        end = tl.minimum(Nk, i + Br + Nk - Nq)
    for j in range(0, end, Bc):
        K_j = load_tile(k, k_strides[2], j, Nk, Bc, D, D_pad)
        V_j = load_tile(v, v_strides[2], j, Nk, Bc, D, D_pad)
        S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        key = j + tl.arange(0, Bc)[None, :]
        seen = key < Nk
        if CAUSAL:
            seen = seen & (key <= query + Nk - Nq)
        S = tl.where(seen, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))
        unit = tl.where(m_new == float("-inf"), 0.0, m_new)  # in a row without a key -inf - (-inf) would be NaN
        alpha, P = tl.exp(m - unit), tl.exp(S - unit[:, None])
        l = alpha * l + tl.sum(P, 1)
        O = alpha[:, None] * O + tl.dot(P, V_j, input_precision="ieee")
        m = m_new
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key then gets out = 0 / 1 and lse = -inf + log 1
    column = tl.arange(0, D_pad)[None, :]
    tl.store(out + query * out_strides[2] + column, O / l[:, None], mask=(query < Nq) & (column < D))
    row = i + tl.arange(0, Br)
    tl.store(lse + tl.program_id(0) * Nq + row, m + tl.log(l), mask=row < Nq)


def attention(q, k, v, causal=False, scale=None):
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    out, lse = torch.empty_like(q), q.new_empty((B, H, Nq), dtype=torch.float32)
    strides = (x.stride()[:3] for x in (q, k, v, out))
    D_pad = max(16, triton.next_power_of_2(D))
    forward_kernel[(B * H, triton.cdiv(Nq, Br))](
        q, k, v, out, lse, *strides, H, Nq, Nk, scale, CAUSAL=causal, D=D, D_pad=D_pad, Br=Br, Bc=Bc
    )
    return out, lse
