# SPDX-License-Identifier: MIT
"""Dropout beside the kernels: which seed a call gets, and which entries of P it keeps.

The seed is a tensor that is drawn on q's device. So Python does not wait for the GPU, torch.manual_seed determines the
seed, a CUDA graph draws anew each time it is replayed, and a checkpoint repeats its draw. With torch.compile and
torch._functorch.config.activation_memory_budget = 0 the backward draws anew, as with torch's own dropout, and its
gradients are wrong: pass a seed there. Needs scores.py, options.py and replay.py.
"""

import torch
import triton
import triton.language as tl

from ..replay import replayed
from . import options
from .scores import Features, Head, Policy, Tile, find_sequence, kept

_base, _calls = None, 0  # of set_deterministic


def set_deterministic(seed):
    """From now on dropout in `attention` uses the seeds seed * 2^32 + 0, 1, 2 ..., one for each call; None ends it.

    So two layers never share a mask, whatever else draws random numbers. seed: an integer of 32 bits. Not for
    checkpoints: they call a layer a second time, which would count as another call. Use torch.manual_seed for them.
    """
    global _base, _calls
    _base = None if seed is None else options.read_integer("seed", seed, -(2**31), 2**31, " or None")
    _calls = 0


def draw_seed(device):
    """A seed for one call, as an int64 tensor on the device."""
    global _calls
    if _base is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # This runs inside of a backward.
        raise RuntimeError(
            "a checkpoint repeats a call with dropout, and set_deterministic would count it as another one. "
            "Use torch.manual_seed, which checkpoints know about, and end set_deterministic with None."
        )
    _calls += 1
    return torch.full((), (_base << 32) + _calls - 1, dtype=torch.int64, device=device)


@triton.jit
def dropout_kernel(keep, strides, H, Nq, Nk, f, Br: tl.constexpr, Bc: tl.constexpr):
    tiles_q = tl.cdiv(Nq, Br)
    tiles_k = tl.cdiv(Nk, Bc)
    program = tl.program_id(0)
    j = program % tiles_k * Bc
    i = program // tiles_k % tiles_q * Br
    sequence_and_head = program // (tiles_k * tiles_q)
    s = sequence_and_head // H
    h = sequence_and_head % H
    seq = find_sequence(s, Nq, Nk, f)
    row = tl.arange(0, Br)[:, None]
    column = tl.arange(0, Bc)[None, :]
    keeps = kept(Tile(i, j, row, column), f, seq, Head(h, h, 0, 0.0))
    query = (seq.queries.start + i + row).to(tl.int64)
    key = seq.keys.start + j + column
    corner = keep + seq.queries.b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    exists = (i + row < seq.queries.N) & (j + column < seq.keys.N)
    tl.store(corner + query * strides[2] + key * strides[3], keeps.to(tl.int8), mask=exists)


def dropout_mask(
    seed, B, H, Nq, Nk, p, *, first_query=None, first_key=0, cu_seqlens_q=None, cu_seqlens_k=None, device=None
):
    """(B, H, Nq, Nk) bool: which entries dropout with this seed and p keeps. It is as large as the matrix of scores.

    The arguments are those of `forward`. For packed sequences B is 1, Nq and Nk count all rows, and entries outside the
    sequences are False. device: by default the seed's; if the seed is an integer, that of cu_seqlens_q, or the GPU.
    The numbers in cu_seqlens are always checked. Raises TypeError or ValueError before anything is computed.
    """
    sizes = {"B": B, "H": H, "Nq": Nq, "Nk": Nk}
    B, H, Nq, Nk = (options.read_integer(name, n, 0, options.FAR) for name, n in sizes.items())
    if seed is None:
        raise TypeError("seed must be an integer or an int64 tensor; got None.")
    place = next((x.device for x in (seed, cu_seqlens_q) if isinstance(x, torch.Tensor)), None)
    device = device or place or ("cpu" if triton.knobs.runtime.interpret else "cuda")
    q, k = (torch.empty(B, H, N, 0, device=device) for N in (Nq, Nk))
    given = options.read_numbers({
        "dropout_p": p, "seed": seed, "first_query": first_query, "first_key": first_key,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }, q)  # fmt: skip
    if given["cu_seqlens_q"] is not None or given["cu_seqlens_k"] is not None:
        given |= {"max_seqlen_q": Nq, "max_seqlen_k": Nk}
    options.check_tensors(given, q, k)
    options.check_values(Nq, Nk, given)
    names = "seed", "cu_seqlens_q", "cu_seqlens_k", "dropout_p", "first_query", "first_key"
    return kept_entries(q, k, **{name: given[name] for name in names})[0].bool()


@replayed
def kept_entries(record, q, k, *, seed, cu_seqlens_q, cu_seqlens_k, dropout_p, first_query, first_key):
    """(B, H, Nq, Nk) int8, 1 where an entry is kept. Of q and k only the shapes count."""
    (B, H, Nq, _), Nk = q.shape, k.shape[2]
    keep = record.new((B, H, Nq, Nk), fill=0, dtype=torch.int8)
    if cu_seqlens_q is not None:
        cu_seqlens_q, cu_seqlens_k = (record.derive(torch.Tensor.contiguous, x) for x in (cu_seqlens_q, cu_seqlens_k))
    f = Features(
        1.0, first_query=first_query, first_key=first_key, seed=seed, threshold=max(1, round(256 * (1 - dropout_p))),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        policy=Policy(aligned=1 if first_key % 16 == 0 else None),
    )  # fmt: skip
    sequences = B if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    programs = sequences * H * triton.cdiv(Nq, 32) * triton.cdiv(Nk, 32)
    record.launch(dropout_kernel, programs, keep, keep.stride(), H, Nq, Nk, f, Br=32, Bc=32)
    return (keep,)
