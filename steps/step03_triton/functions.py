"""The stage's three functions: what they take, and which kernels compute them.

`forward`, `backward` and `attention` have their signatures and docstrings here. A call goes from here to
steps/contract.py, which checks it and has it computed by a rung (rungs.py), or by the kernels of the features
(features/__init__.py) if it asks for one of them or has few queries.
"""

import torch

from steps import contract, engine

from . import features, rungs

GPU = torch.cuda.get_device_capability() if engine.name == "cuda" else None
RUNGS, (DTYPES, HEAD_DIMS) = rungs.available(GPU), rungs.taken(GPU)
SUPPORTS = {
    "stage": "step03_triton",
    "devices": (engine.device,),
    "dtypes": DTYPES,
    "head_dims": HEAD_DIMS,
    "tiles": ((64, 32), (16, 16), (16, 32), (32, 16), (32, 32)),
    "rungs": tuple(RUNGS),
    "limits": {rung: limits for rung, limits in rungs.LIMITS.items() if rung in RUNGS},
    "elsewhere": {rung: needs for rung, needs in rungs.NEEDS.items() if rung not in RUNGS},
    "own_backward": tuple(rung for rung in RUNGS if rung != "roles"),  # which has tma's backward
    "gqa": True,
    "nq_ne_nk": True,
    "deterministic": "gluon" not in RUNGS,  # unless it is asked for
    "order": "fa2",  # the order in which tiles are visited, for reference/mutants.py
    "title": "FlashAttention-2 fused in Triton",
    "notebooks": ("03a_triton_kernels", "03b_triton_features"),
    "minutes": 110,  # to read
}


def forward(
    q, k, v, *, causal=False, scale=None, tile=None, rung=None, window=None, softcap=None, mask=None,
    sinks=None, alibi_slopes=None, dropout_p=0.0, seed=None, first_query=None, first_key=0, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, lengths_k=None, check=False, out=None, lse=None
):  # fmt: skip
    """Attention and its log-sum-exp, (out, lse), without a gradient.

    q (B, H, Nq, D), k and v (B, Hk, Nk, D), float32, float16 or bfloat16; fewer leading dimensions are accepted. H
    is a multiple of Hk. out like q. lse (B, H, Nq) float32, the natural logarithm of the sum of exp of the final
    scores, before dropout. The scores are made in this order, where query i stands at pos = i + first_query, and
    key j at key = j + first_key:

        scale              S = scale q . k, with 1/sqrt(D) by default
        softcap            S = softcap tanh(S / softcap), for a number > 0
        mask               S + mask, float16, bfloat16 or float32, or bool: True is seen. It broadcasts to
                           (B, H, Nq, Nk) without being copied.
        alibi_slopes       S - slope |pos - key|: floating point, (H,) or (B, H); (n, H) for n packed sequences
        sinks              (H,), floating point: a row's softmax has one more key with this score, whose value is 0,
                           so that out is smaller, and in lse. It is in natural units, and not scaled, capped or
                           hidden; -inf is no sink. gpt-oss learns it. Of calls that carry out and lse, one has it.
        causal             keys after pos are hidden
        window             (left, right): keys before pos - left or after pos + right are hidden. None or -1 is no
                           limit on that side: (-1, 0) is causal.
        dropout_p, seed    P is 0 with probability dropout_p < 1, rounded to steps of 1/256 but not to 1, and else
                           divided by 1 - dropout_p. The seed is an integer or an int64 tensor of one element. Which
                           entries are kept depends on it and on batch, head, query and key alone.
        first_query, first_key    integers, by default Nk - Nq and 0: the last query stands at the last key
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k    n packed sequences: B is 1, and sequence s is the
                           queries cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1 and likewise the keys, in int32
                           tensors (n + 1,). Positions count from 0 in each. Rows after the last belong to none. No
                           sequence is longer than the integer max_seqlen.
        lengths_k          (B,) int32: only so many keys exist, and causal is aligned at the last of them. For
                           decoding: without a gradient; of the other features with window, softcap, alibi_slopes
                           and sinks. A number above Nk counts as Nk on a GPU, and is refused on a CPU and with
                           check.
        check              True also checks the numbers in cu_seqlens and lengths_k, and waits for the GPU.

    A query that sees no key gets out 0 and lse -inf, or the sink. tile: (Br, Bc) out of SUPPORTS["tiles"]. out, lse:
    what earlier calls with other keys gave, float32 and contiguous, at first 0 and -inf. They are changed in place to
    what one call with all keys gives, and returned. rung: a kernel out of SUPPORTS["rungs"], for calls without
    features. A call with few queries, many keys and no gradient goes to decode.py, except under torch.compile. Raises
    TypeError or ValueError before anything is computed.
    """


def backward(
    dout, q, k, v, out, lse, *, causal=False, scale=None, tile=None, rung=None, deterministic=False,
    mask_gradient=False, window=None, softcap=None, mask=None,
    sinks=None, alibi_slopes=None, dropout_p=0.0, seed=None, first_query=None, first_key=0, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, lengths_k=None, check=False
):  # fmt: skip
    """Gradients (dq, dk, dv), like q, k and v, and with mask_gradient=True also dmask, like the additive mask.

    With sinks the last result is dsinks. Without them the others are the same, because lse knows of the sinks.

    dout is the gradient of out; out and lse are what `forward` gave with the same features, for these keys or for
    more: dq is then the part that comes from these keys. The results are equal to the bit from run to run. The
    exception is dq on Hopper in 16 bits, which then needs deterministic=True. rung: the
    forward's, for calls without features.
    """


def attention(
    q, k, v, *, causal=False, scale=None, tile=None, rung=None, deterministic=False, window=None, softcap=None,
    mask=None, sinks=None, alibi_slopes=None, dropout_p=0.0, seed=None, first_query=None, first_key=0,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, lengths_k=None, check=False
):  # fmt: skip
    """out as of `forward`, differentiable once in q, k, v, and in an additive mask and sinks that ask for it.

    The arguments are those of `forward`. dropout_p without a seed draws one from torch's generator on q's device;
    see also `set_deterministic`. For the backward only the inputs, out and lse are saved, so that memory grows with
    N and not with N^2. Autocast does not change the dtype. deterministic: as of `backward`; it is also True
    where torch.use_deterministic_algorithms says so. rung: as of `forward`.
    """


forward, backward, attention = contract.entry_points(RUNGS, SUPPORTS, features, (forward, backward, attention))
