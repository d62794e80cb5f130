"""The contract's inputs: named cases that every stage is run on, chosen so that together they kill every mutant.

Sizes are given in tiles and scaled to the smallest tiles that a stage offers, so that a simulator and a GPU cross the
same tile borders. Each input lies in a larger buffer filled with NaN, so a read outside the tensor shows in the result.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference import error


@dataclass(frozen=True)
class Case:
    """One named input. `says` is the property that it checks, in the words that report a failure."""

    name: str
    says: str
    Nq: Callable = lambda T: 2 * T + 5  # at least three tiles, the last one ragged; T is the tile's longer side
    Nk: Callable | None = None  # like Nq
    B: int = 1
    H: int = 2
    Hk: int | None = None
    D: int = 32  # 0 stands for the stage's smallest head_dim that is no power of two
    causal: bool = False
    scale: float | None = None
    tile: str = "square"  # "square", "wide" (Br < Bc), "tall" (Br > Bc), or "default" for the stage's own choice
    values: Callable | None = None  # (q, k, scale, dtype) -> (q, k) with the case's special numbers
    place: str = "contiguous"  # or another of `surround_with_nan`, or "expanded": how the tensors lie in memory
    through_autograd: bool = False  # attention(q, k, v).sum().backward() instead of forward and backward
    anybody: bool = True  # whether kernels from elsewhere have to pass it, and those that merge blocks of keys
    low_precision: bool = False  # whether the case is run in float16 and bfloat16 too
    gpu: bool = False


@dataclass(frozen=True, eq=False)
class Inputs:
    """A case's tensors and arguments for one stage and dtype; `options` are the arguments of forward and backward."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    causal: bool
    scale: float | None
    tile: tuple | None
    ring: tuple | None = None  # (ranks, layout) where the stage divides the sequence among ranks

    @property
    def options(self):
        return {"causal": self.causal, "scale": self.scale} | ({} if self.tile is None else {"tile": self.tile})

    def expected(self):
        """The reference's results and their tolerances, for `error.failures`."""
        return error.expected(self.q, self.k, self.v, self.dout, causal=self.causal, scale=self.scale)


def _scores_200(q, k, scale, dtype):
    """Scores around +-200: exp overflows float32 at 88."""
    gain = math.sqrt(200 / (scale * (q @ k.mT)).abs().max().item()) if q.numel() and k.numel() else 1
    return q * gain, k * gain


def _one_key_each(q, k, scale, dtype):
    """Each row has a score of 200 for another key, one in D, and else scores around 0: exp overflows float32 at 88.

    For some row it is the last key of a tile, so that a maximum may leave out none.
    """
    D, rows, keys = q.shape[-1], torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    q, k = 0.3 * q, 0.3 * k
    q[..., rows, rows % D] += math.sqrt(200 / scale)
    k[..., keys, keys % D] += math.sqrt(200 / scale)
    return q, k


def _ramp(direction):
    """Scores that rise from -100 to 100 along the keys (direction 1), or fall from 100 to -100 (direction -1)."""

    def values(q, k, scale, dtype):
        q, k = 0.3 * q, 0.3 * k
        q[..., 0] = math.sqrt(100 / scale)
        k[..., 0] = direction * math.sqrt(100 / scale) * torch.linspace(-1, 1, k.shape[-2])
        return q, k

    return values


def _negative_row(q, k, scale, dtype):
    """All scores of row 3 are around -200. A running maximum that starts at 0, or just above, makes the row 0/0."""
    k[..., 0] = math.sqrt(200 / scale)
    q[..., 0] = 0
    q[..., 3, 0] = -math.sqrt(200 / scale)
    return q, k


def _common_score(q, k, scale, dtype):
    """Scores around 16,000 that differ by a few."""
    q[..., 0] = k[..., 0] = 2.0 ** round(math.log2(math.sqrt(16000 / scale)))
    return q, k


def _large_scores(q, k, scale, dtype):
    """Scores of 10^11, or of 10^9 in float16, whose largest number is 65,504. Half of the rows have negative ones only.

    In a head all columns of a row are equal, so every order of summation gives the same float32 score. Two scores of a
    row differ by far more than float32 rounds them, so a row's whole weight lies on one key.
    """
    largest = 2.0**15 if dtype == torch.float16 else 2.0**17
    rank = k[..., :1].argsort(-2).argsort(-2)  # (B, H, Nk, 1): a random order of the keys
    size = 64.0 ** (rank / max(1, k.shape[-2] - 1) - 1)  # from 1 / 64 to 1
    return largest * q[..., :1].sign().expand_as(q), largest * size.expand_as(k)


def _tied_keys(q, k, scale, dtype):
    """Scores of 4 million, each shared by eight keys. Half of the rows have negative ones only.

    lse is rounded to 1/4 there, which is just enough for a backward that rounds nothing else, and too little for
    merging blocks of keys by it.
    """
    largest = math.sqrt(4e6 / (scale * q.shape[-1]))
    rank = k[..., :1].argsort(-2).argsort(-2) // 8  # (B, H, Nk, 1): a random order of the keys, eight of each
    return largest * q[..., :1].sign().expand_as(q), largest * (0.5**rank).expand_as(k)


CASES = (
    Case("ragged", "N is not a multiple of the tile", low_precision=True),
    Case("ragged_causal", "causal, N is not a multiple of the tile", causal=True, low_precision=True),
    Case("fewer_queries", "fewer queries than keys", Nk=lambda T: 4 * T + 3),
    Case("fewer_queries_causal", "causal with fewer queries than keys: aligned at the bottom right",
         Nk=lambda T: 4 * T + 3, causal=True),
    Case("more_queries", "more queries than keys", Nq=lambda T: 4 * T + 3, Nk=lambda T: 2 * T + 5),
    Case("more_queries_causal", "causal with more queries than keys: the first rows see no key",
         Nq=lambda T: 4 * T + 3, Nk=lambda T: 2 * T + 5, causal=True),
    Case("one_key", "a single key: out is v", Nk=lambda T: 1),
    Case("no_key", "no key at all: out is 0, lse is -inf", Nk=lambda T: 0),
    Case("one_token", "N = 1", Nq=lambda T: 1, causal=True),
    Case("no_query", "no query", Nq=lambda T: 0, Nk=lambda T: 3),
    Case("no_token", "N = 0", Nq=lambda T: 0),
    Case("no_batch", "B = 0", B=0),
    Case("no_head", "H = 0", H=0),
    Case("wide_tile", "Br < Bc", causal=True, tile="wide"),
    Case("tall_tile", "Br > Bc", causal=True, tile="tall"),
    Case("default_tile", "the stage's own tile", tile="default", causal=True),
    Case("head_dim_64", "head_dim 64", H=1, D=64),
    Case("head_dim_odd", "head_dim that is no power of two", D=0, causal=True, low_precision=True),
    Case("explicit_scale", "a scale other than 1/sqrt(D)", scale=0.3),
    Case("scores_200", "stable at scores of +-200", values=_scores_200, causal=True, low_precision=True),
    Case("one_key_each", "a score of 200 for another key in each row", values=_one_key_each, causal=True),
    Case("rising", "scores that rise by 200 along the keys", values=_ramp(1), low_precision=True),
    Case("falling", "scores that fall by 200 along the keys", values=_ramp(-1), low_precision=True),
    Case("negative_row", "a row whose scores are all very negative", values=_negative_row),
    Case("common_score", "scores around 16,000 that differ by a few", values=_common_score, low_precision=True),
    Case("large_scores", "scores of 10^11: S - m is exactly 0 at the maximum, and everything is finite",
         values=_large_scores, causal=True, low_precision=True),
    Case("tied_keys", "scores of 4 million, of which eight keys share the largest: each has P = 1 / 8",
         values=_tied_keys, anybody=False, low_precision=True),
    Case("heads_inside", "non-contiguous batch and head strides, as (B, N, H, D) transposed", B=2, H=3,
         place="heads inside"),
    Case("expanded", "k and v expanded over the heads (stride 0)", H=3, place="expanded"),
    Case("own_layouts", "q, k, v, dout, out and lse each lie in memory in a layout of their own", B=2,
         place="own layouts"),
    Case("offset", "a storage offset of one element", place="offset"),
    Case("sum_backward", "out.sum().backward(): a gradient whose strides are 0", causal=True, through_autograd=True),
    Case("grouped_heads", "grouped heads: 4 query heads share each key head", H=8, Hk=2, causal=True),
    Case("one_kv_head", "one key head for all query heads", H=3, Hk=1, Nk=lambda T: 3 * T + 1),
    Case("many_heads", "B x H = 70,000, above the limit of a grid's second dimension",
         B=350, H=200, Nq=lambda T: 17, causal=True, gpu=True),
)  # fmt: skip


def select(supports, gpu=False):
    """[(case, dtype, reason)]: every case in the stage's first dtype, and the low-precision ones in each other dtype.

    reason is None where the stage runs the case; otherwise it says what SUPPORTS lacks for the case.
    """
    rows = []
    for dtype in supports["dtypes"]:
        for case in CASES:
            if dtype == supports["dtypes"][0] or case.low_precision:
                rows.append((case, dtype, _missing(case, supports, gpu)))
    return rows


def _missing(case, supports, gpu):
    if case.gpu and not gpu:
        return "needs a GPU"
    if case.Hk not in (None, case.H) and not supports["gqa"]:
        return f"{supports['stage']} has no grouped heads"
    if case.Nk is not None and not supports["nq_ne_nk"]:
        return f"{supports['stage']} takes Nq = Nk only"
    if not case.anybody and "layouts" in supports:
        return f"{supports['stage']} merges blocks by lse, which is rounded too much for it here"
    return None


def build(case, supports, dtype, device="cpu") -> Inputs:
    """The case's tensors for a stage, each inside a buffer of NaN. Every call gives the same numbers."""
    tile = _tile(case.tile, supports["tiles"])
    T = max(tile or supports["tiles"][0])
    Nq = case.Nq(T)
    Nk = Nq if case.Nk is None else case.Nk(T)
    Hk = case.H if case.Hk is None else case.Hk
    D = case.D or next(D for D in (24, 40, 48, 80, 96) if D in supports["head_dims"])
    rng = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    q, dout = (torch.randn(case.B, case.H, Nq, D, generator=rng) for _ in range(2))
    k, v = (torch.randn(case.B, Hk, Nk, D, generator=rng) for _ in range(2))
    if case.place == "expanded":
        k, v = k[:, :1], v[:, :1]
    if case.values:
        q, k = case.values(q, k, case.scale or 1 / math.sqrt(D), dtype)
    tensors = (x.to(dtype).to(device) for x in (q, k, v, dout))
    q, k, v, dout = (surround_with_nan(x, case.place, name) for name, x in zip(ORDERS, tensors, strict=False))
    if case.place == "expanded":
        k, v = (x.expand(-1, case.H, -1, -1) for x in (k, v))
    if case.through_autograd:
        dout = torch.ones((), dtype=dtype, device=device).expand_as(dout)
    return Inputs(q, k, v, dout, case.causal, case.scale, tile, _ring(case, supports, dtype))


# For the place "own layouts": the order in which the dimensions (B, H, N) of each tensor lie in memory.
ORDERS = {"q": "BHN", "k": "BNH", "v": "HBN", "dout": "HNB", "out": "NBH", "lse": "NHB"}


def surround_with_nan(x, place="contiguous", name="q"):
    """x (B, H, N, D) copied into a larger buffer of NaN, as a view with the strides of `place`.

    place is "contiguous", "heads inside", "offset" or "own layouts", where `name` says which tensor of ORDERS x is.
    """
    if place == "own layouts":
        return _own_layout(x, name)
    B, H, N, D = x.shape
    if place == "heads inside":  # (B, N, H, D) in memory, with a NaN head and a NaN row beside the data
        view = x.new_full((B, N + 1, H + 1, D), math.nan)[:, :N, :H].transpose(1, 2)
    else:
        margin = 1 if place == "offset" else 4 * D  # 4 D elements keep any alignment
        view = x.new_full((x.numel() + margin + 4 * D,), math.nan)[margin : margin + x.numel()].view(x.shape)
    return view.copy_(x)


def _own_layout(x, name):
    """x (B, H, N, D), or lse (B, H, N), in its own order in memory, with its own distance between neighbours.

    A tensor that is read with the strides of another one gives NaN or other rows, but the address stays in the buffer.
    All strides but the last are multiples of 8 elements, so that copies of 16 bytes are possible.
    """
    order = ["BHN".index(dimension) for dimension in ORDERS[name]]
    padding = 8 * (1 + list(ORDERS).index(name))
    sizes = [x.shape[d] for d in order]
    rows = x[..., None] if x.ndim == 3 else x
    largest = math.prod(sizes) * (rows.shape[-1] + 8 * len(ORDERS))  # the size with the widest padding
    pitch = rows.shape[-1] + padding
    buffer = x.new_full((2 * largest,), math.nan)
    view = buffer[: math.prod(sizes) * pitch].view(*sizes, pitch)[..., : rows.shape[-1]]
    view = view.permute(*(order.index(d) for d in range(3)), 3).copy_(rows)
    return view[..., 0] if x.ndim == 3 else view


def run(stage, case, inputs) -> dict:
    """The stage's results on the inputs, by name; `stage` offers forward, backward and attention."""
    x = inputs
    if case.through_autograd:
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        out = stage.attention(*leaves, **x.options)
        out.sum().backward()
        _, lse = stage.forward(x.q, x.k, x.v, **x.options)
        return dict(zip(error.NAMES, (out.detach(), lse, *(t.grad for t in leaves)), strict=True))
    out, lse = stage.forward(x.q, x.k, x.v, **x.options)
    saved = out, lse
    if case.place == "own layouts":
        saved = _own_layout(out, "out"), _own_layout(lse, "lse")
    return dict(zip(error.NAMES, (out, lse, *stage.backward(x.dout, x.q, x.k, x.v, *saved, **x.options)), strict=True))


def _tile(kind, tiles):
    """The smallest tile (Br, Bc) of a kind.

    None, which leaves the choice to the stage, for "default" and where the stage has no tile of the kind.
    """
    sign = {"wide": -1, "square": 0, "tall": 1}.get(kind)
    return min((t for t in tiles if (t[0] > t[1]) - (t[0] < t[1]) == sign), key=sum, default=None)


def _ring(case, supports, dtype):
    """(ranks, layout) for a stage with layouts, else None. Both change from case to case, so that every pair occurs."""
    if "layouts" not in supports:
        return None
    number = [c.name for c in CASES].index(case.name) + supports["dtypes"].index(dtype)
    return 1 + number % 4, supports["layouts"][number % len(supports["layouts"])]
