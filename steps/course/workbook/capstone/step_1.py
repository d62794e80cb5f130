"""Step 1 of the capstone: one tile of queries, all keys in one tile, no mask."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(q, k, v, out, scale, N: tl.constexpr, D: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, D)[None, :]
    tile = tl.program_id(0) * N * D + row * D + column  # a program for each head of each batch entry
    Q, K, V = tl.load(q + tile), tl.load(k + tile), tl.load(v + tile)  # (N, D)
    S = scale * tl.dot(Q, tl.trans(K), input_precision="ieee")  # (N, N)
    P = tl.exp(S - tl.max(S, 1)[:, None])
    O = tl.dot(P, V, input_precision="ieee")
    tl.store(out + tile, O / tl.sum(P, 1)[:, None])


def attention(q, k, v, causal=False, scale=None):
    B, H, N, D = q.shape
    scale = D**-0.5 if scale is None else scale
    out = torch.empty_like(q)
    forward_kernel[(B * H,)](q, k, v, out, scale, N=N, D=D)
    return out
