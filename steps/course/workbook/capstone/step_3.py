"""Step 3 of the capstone: any number of queries and keys, any head_dim, any strides."""

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
    q, k, v, out, q_strides, k_strides, v_strides, out_strides, H, Nq, Nk, scale,
    D: tl.constexpr, D_pad: tl.constexpr, Br: tl.constexpr, Bc: tl.constexpr
):  # fmt: skip
    b, h, i = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * Br
    q += b * q_strides[0] + h * q_strides[1]
    k += b * k_strides[0] + h * k_strides[1]
    v += b * v_strides[0] + h * v_strides[1]
    out += b * out_strides[0] + h * out_strides[1]
    Q_i = load_tile(q, q_strides[2], i, Nq, Br, D, D_pad)
    m, l = tl.full((Br,), float("-inf"), tl.float32), tl.zeros((Br,), tl.float32)
    O = tl.zeros((Br, D_pad), tl.float32)
    for j in range(0, Nk, Bc):
        K_j = load_tile(k, k_strides[2], j, Nk, Bc, D, D_pad)
        V_j = load_tile(v, v_strides[2], j, Nk, Bc, D, D_pad)
        S = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (Br, Bc)
        S = tl.where(j + tl.arange(0, Bc)[None, :] < Nk, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))
        alpha, P = tl.exp(m - m_new), tl.exp(S - m_new[:, None])
        l = alpha * l + tl.sum(P, 1)
        O = alpha[:, None] * O + tl.dot(P, V_j, input_precision="ieee")
        m = m_new
    row, column = i + tl.arange(0, Br)[:, None], tl.arange(0, D_pad)[None, :]
    tl.store(out + row * out_strides[2] + column, O / l[:, None], mask=(row < Nq) & (column < D))


def attention(q, k, v, causal=False, scale=None):
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    out = torch.empty_like(q)
    strides = (x.stride()[:3] for x in (q, k, v, out))
    D_pad = max(16, triton.next_power_of_2(D))
    forward_kernel[(B * H, triton.cdiv(Nq, Br))](
        q, k, v, out, *strides, H, Nq, Nk, scale, D=D, D_pad=D_pad, Br=Br, Bc=Bc
    )
    return out
