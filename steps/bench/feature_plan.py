"""The plan `features`: what each feature of stage 03's flash.py costs, what decode.py reaches, and peak memory.
The plan `grouped`: stage 02's backward where all query heads share one K/V head, beside heads of their own.

All features of one head_dim and pass take turns, and the peers that have the same feature take turns with them, so that
each can be compared with each. A row's options name its feature; "none" is what the others are compared with. The
TFLOP/s count the scores that the positions leave visible: half of them if causal, fewer in a window, an eighth in a
pack of eight sequences. A mask hides nothing from the count.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from reference import philox
from steps import engine
from steps.bench import rows, timing
from steps.bench.grid import HOW, Beside, Candidate, Guard, Point, make_inputs, sample_truth, speed_of
from steps.bench.peers import COMPILED, PEERS, copy, flex, sdpa
from steps.step02_fa2_cuda import launch

DTYPE, SEQUENCES, SOFTCAP, DROPOUT, SEED = "bf16", 8, 50.0, 0.1, 2**35 + 11
LAST = 128  # so many of the last queries are compared with float64, where all would take too long


@dataclass(frozen=True)
class Feature:
    """What is compared at one size: flash.py with some options, and peers that compute the same.

    options: of flash.forward and flash.backward. told: what the rows' options say besides the name. share: of all
    scores, those that are counted. peers: {name: function (q, k, v, causal) -> out}. kernel: "flash", "decode", or
    "hopper" of stage 02. last: as for grid.sample_truth.
    """

    name: str
    point: Point
    options: dict = field(default_factory=dict)
    told: dict = field(default_factory=dict)
    share: float = 1.0
    peers: dict[str, Callable] = field(default_factory=dict)
    kernel: str = "flash"
    passes: tuple[str, ...] = ("fwd", "bwd")
    last: int | None = None

    def entrants(self):
        """The stage's kernel and the peers, for grid.Guard."""
        from steps.step03_triton import decode, flash  # imported here because Triton is not available everywhere

        if self.kernel == "decode":
            own = Candidate("03_triton", "decode", decode.forward)
        elif self.kernel == "hopper":
            forward, backward = (partial(function, rung="hopper") for function in (launch.forward, launch.backward))
            own = Candidate("02_fa2_cuda", "fwd_8_hopper", forward, "bwd_3_hopper", backward)
        else:
            forward, backward = (partial(function, **self.options) for function in (flash.forward, flash.backward))
            own = Candidate("03_triton", "flash", forward, "flash", backward)
        return [own, *(Beside(name, function) for name, function in self.peers.items())]

    def truth(self, inputs):
        """What the results are compared with."""
        how = dict(backward=self.passes != ("fwd",), last=self.last, options=partial(reference_options, self))
        return sample_truth(inputs, self.point.causal, **how)

    def where(self, pass_):
        """The fields of a row that say what was asked for."""
        options = {"feature": self.name, **self.told}
        return {**self.point.sizes, "pass": pass_, "dtype": DTYPE, **HOW, "options": options}


def reference_options(feature, heads):
    """The feature's options as the reference takes them, for a slice of the query heads."""
    options, point = feature.options, feature.point
    alike = "window", "softcap", "mask", "cu_seqlens_q", "cu_seqlens_k"
    found = {name: options[name] for name in alike if name in options}
    if "alibi_slopes" in options:
        found["alibi_slopes"] = options["alibi_slopes"][heads]
    if "dropout_p" in options:
        first = point.N - feature.last
        keep = philox.keep_mask(SEED, 1, point.H, feature.last, point.N, options["dropout_p"], first_query=first)
        found["dropout_mask"] = keep[:, heads].to(options["seed"].device)
        found["dropout_p"] = philox.rounded(options["dropout_p"])
    return found


# --- what is compared ---------------------------------------------------------------------------------------


def features(N, H, D, device):
    """The features of flash.py, each by itself, and one pair that models use. N is a multiple of SEQUENCES."""
    point, left, length = Point(1, H, N, D), N // 8, N // SEQUENCES
    generator = torch.Generator(device).manual_seed(1)
    added = torch.randn(1, 1, N, N, generator=generator, device=device).to(rows.DTYPES[DTYPE])
    seen = added > -0.5
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1, device=device) / H)  # those of the ALiBi paper
    starts = torch.arange(0, N + 1, length, dtype=torch.int32, device=device)

    def capped(score, b, h, i, j):
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def slanted(score, b, h, i, j):
        return score - slopes[h] * (i - j).abs()

    def near(b, h, i, j):
        return (j <= i) & (j >= i - left)

    def together(b, h, i, j):
        return i // length == j // length

    window, softcap = dict(window=(left, 0)), dict(softcap=SOFTCAP)
    told_window = dict(window=[left, 0])
    in_window = (left + 1) * (N - left / 2) / N**2  # query i sees min(i, left) + 1 keys
    dropout = dict(dropout_p=DROPOUT, seed=torch.tensor(SEED, device=device))
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=length, max_seqlen_k=length)
    of_packed = {"flex": partial(flex, seen=together), "varlen": partial(varlen, starts, length)}
    of_pair = {"flex": partial(flex, change=capped, seen=near)}
    return [
        Feature("none", point, peers=without_features()),
        Feature("causal", replace(point, causal=True), peers=without_features()),
        Feature("additive mask", point, {"mask": added}, peers=with_mask(added)),
        Feature("boolean mask", point, {"mask": seen}, peers=with_mask(seen)),
        Feature("ALiBi", point, {"alibi_slopes": slopes}, peers={"flex": partial(flex, change=slanted)}),
        Feature("soft-cap", point, softcap, softcap, peers={"flex": partial(flex, change=capped)}),
        Feature("dropout", point, dropout, {"dropout_p": DROPOUT}, last=min(LAST, N)),
        Feature("window", point, window, told_window, in_window, {"flex": partial(flex, seen=near)}),
        Feature("soft-cap + window", point, softcap | window, softcap | told_window, in_window, of_pair),
        Feature("packed", point, packed, {"sequences": SEQUENCES}, 1 / SEQUENCES, of_packed),
        Feature("padded", Point(SEQUENCES, H, length, D)),  # the same work as a batch
    ]


def without_features():
    return {name: PEERS[name] for name in ("sdpa-cudnn", "sdpa-flash", "flex")}


def without_compiler(peers):
    return {name: peers[name] for name in peers if name not in COMPILED}


def with_mask(mask):
    """SDPA by the backends that take a mask."""
    backends = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION}
    return {name: partial(sdpa, backend, mask=mask) for name, backend in backends.items()}


def varlen(starts, length, q, k, v, causal=False):
    """torch's FlashAttention-2 for packed sequences, whose tensors are (total, H, D)."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return varlen_attn(q, k, v, starts, starts, length, length).transpose(0, 1)[None]


def decoding(Nk):
    """One new token in each of 8 sequences; four query heads share a key head."""
    point = Point(8, 32, 1, 128, Hk=8, Nk=Nk)
    return Feature("decode", point, peers=without_features(), kernel="decode", passes=("fwd",))


def grouped(Hk, causal):
    """8 query heads of one sequence. If they share one K/V head, its keys alone give a GPU too few blocks."""
    name = ("grouped heads" if Hk == 1 else "own heads") + (", causal" if causal else "")
    point, peers = Point(1, 8, 4096, 128, causal, Hk=Hk), {"sdpa-cudnn": PEERS["sdpa-cudnn"]}
    return Feature(name, point, peers=peers, kernel="hopper", passes=("bwd",))


def long_context(N):
    """For peak memory. It is causal, as models are, which takes half the time."""
    point, peers = Point(1, 16, N, 128, causal=True), {"sdpa-cudnn": PEERS["sdpa-cudnn"]}
    return Feature("memory", point, peers=peers, passes=("fwd+bwd",), last=min(LAST, N))


# --- measuring it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeaturePart:
    """All of this as a part of a plan, with the methods of plans.Part. Everything is one run."""

    N: int = 16384
    sizes: tuple[tuple[int, int], ...] = ((16, 128), (32, 64))  # H and D
    cache: int = 32768  # keys
    longest: int = 65536

    def groups(self, device):
        """Yields lists of features that take turns. Peers that take long to compile are beside the first size only."""
        for n, (H, D) in enumerate(self.sizes):
            group = features(self.N, H, D, device)
            yield group if n == 0 else [replace(one, peers=without_compiler(one.peers)) for one in group]
        yield [decoding(self.cache)]
        yield [long_context(self.longest)]

    def record(self, *, device="cuda", warmup=3, limit_ms=1000.0, until=float("inf"), commit=None, say=print):
        """Yields the rows; options as for grid.measure."""
        origin = rows.provenance(device, commit=commit)
        for group in self.groups(device):
            if time.monotonic() > until:
                say(f"out of time before {group[0].name} {group[0].point}")
                return
            yield from measure(group, origin, device, warmup, limit_ms, say)

    def jobs(self):
        """What has to be compiled: (which group, which feature, which entrant)."""
        alike = replace(self, N=SEQUENCES, cache=1, longest=1)  # has as many of each, and small tensors
        for g, group in enumerate(alike.groups("cpu")):
            yield from ((g, f, n) for f, feature in enumerate(group) for n in range(1 + len(feature.peers)))

    def compile(self, g, f, n):
        """Calls one entrant once."""
        feature = next(itertools.islice(self.groups(engine.device), g, None))[f]
        entrant, inputs = feature.entrants()[n], make_inputs(feature.point, DTYPE, engine.device)
        for pass_ in feature.passes:
            entrant.call(inputs, feature.point.causal, pass_)()


class GroupedPart(FeaturePart):
    """Stage 02's backward with grouped heads, as a part of a plan."""

    def groups(self, device):
        for causal in (False, True):
            yield [grouped(Hk, causal) for Hk in (8, 1)]


def measure(group, origin, device, warmup, limit_ms, say):
    """Yields the rows of features that take turns."""
    admitted = {pass_: [] for feature in group for pass_ in feature.passes}
    for feature in group:
        inputs = make_inputs(feature.point, DTYPE, device)
        truth = feature.truth(inputs)
        guard = Guard(limit_ms, device, lambda text, name=feature.name: say(f"{name}: {text}"))
        for pass_ in feature.passes:
            where, flops = {**origin, **feature.where(pass_)}, feature.share * feature.point.flops(pass_)
            for entrant, call, error in guard.admit(feature.entrants(), inputs, truth, feature.point, where):
                admitted[pass_].append((where | entrant.subject(where), call, flops, error))
        if feature.kernel == "decode":  # reads k and v, which is as much as the copy of k reads and writes
            call, error = copy(inputs[2])
            where = {**origin, **feature.where(rows.COPY)}
            admitted["fwd"].append((where | Beside(rows.COPY).subject(where), call, 0, error))
    for found in admitted.values():
        times = timing.interleaved({n: call for n, (_, call, _, _) in enumerate(found)}, warmup=warmup, device=device)
        for n, (row, call, flops, error) in enumerate(found):
            row |= speed_of(times[n], flops, error)
            yield rows.validate(row | ({"peak_bytes": peak_bytes(call)} if row["pass"] == "fwd+bwd" else {}))


def peak_bytes(call):
    """How much device memory a call holds at most, beyond what was taken before; its results count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
