"""What is kept of a call must not be used for another call.

A call may pass several caches: the contract's, a stage's plans, a kernel's recordings, the ring's plans. For every way
into a stage, its public functions, its kernels alone and the parts of a backward, each option and each property of a
tensor's layout is changed alone, between two usual calls. The changed call has to give what it gives when nothing is
kept, to the bit, or to be refused in the same words. And a cache that keeps the usual call has to keep the changed one
beside it, also where nothing but a GPU would show the difference, as of an address that is not aligned.
"""

import functools
import gc
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from steps import catalogue, contract
from steps.course.workbook.case_on_ranks import PlainBlock
from steps.course.workbook.one_rung import supports_of
from support.operands import heads_inside, negated, unaligned

INPUTS, SAVED = ("q", "k", "v", "dout"), ("out", "lse")
PLACES = {"unaligned": unaligned, "negated": negated, "heads inside": heads_inside}  # The numbers stay the same.


@dataclass
class Way:
    """forward(q, k, v, **options) -> (out, lse), and backward(dout, q, k, v, out, lse, **options), if there is one.

    options: of the usual call. others: {an option: [other right values]}. wrong: {an option: what equals its usual
    value, and has to be refused}. of_backward: options of the backward alone. features: {an option: a tensor}.
    """

    forward: Callable
    backward: Callable | None
    options: dict = field(default_factory=dict)
    others: dict = field(default_factory=dict)
    wrong: dict = field(default_factory=dict)
    of_backward: tuple = ("deterministic",)
    features: dict = field(default_factory=dict)
    dtypes: tuple = (torch.float32,)
    D: int = 16

    def inputs(self, N=5, dtype=None):
        random, shape = torch.Generator().manual_seed(N), (1, 2, N, self.D)
        return {name: torch.randn(shape, generator=random).to(dtype or self.dtypes[0]) for name in INPUTS}

    def changes(self):
        """{what is changed: (inputs, options, features, {name of a tensor: the function that puts it elsewhere})}."""
        usual = self.inputs(), self.options, self.features, {}
        found = {}
        if not self.features:
            found["length"] = self.inputs(N=6), self.options | {"S": 6} if "S" in self.options else self.options, {}, {}
        for dtype in self.dtypes[1:2]:
            found["dtype"] = self.inputs(dtype=dtype), *usual[1:]
        values = [(name, value) for name, some in self.others.items() for value in some]
        for name, value in (*values, *self.wrong.items()):
            found[f"{name}={value!r}"] = usual[0], self.options | {name: value}, *usual[2:]
        return found

    def places(self, few):
        """The same for another place in memory of one tensor, which changes no result. few: not of each tensor."""
        usual = self.inputs(), self.options, self.features
        names = ("q", "lse") if few else (*INPUTS, *SAVED)
        places = [(name, how) for name in names if self.backward or name in INPUTS[:3] for how in PLACES]
        places += [(name, "unaligned") for name, x in self.features.items()]
        return {f"{name} {how}": (*usual, {name: PLACES[how]}) for name, how in places}

    def run(self, inputs, options, features, places, passes=2):
        """The results, or in words how the call is refused. passes: 1 is the forward alone."""

        def put(name, x):
            return places[name](x) if name in places else x

        try:
            more = {name: put(name, x) for name, x in features.items()}
            dout, q, k, v = (put(name, inputs[name]) for name in ("dout", "q", "k", "v"))
            of_forward = {name: x for name, x in options.items() if name not in self.of_backward}
            out, lse = self.forward(q, k, v, **of_forward, **more)
            grads = ()
            if self.backward and passes == 2:
                saved = put("out", out), put("lse", lse)
                grads = self.backward(dout, q, k, v, *saved, **options, **more)
        except (TypeError, ValueError, NotImplementedError) as problem:
            return f"{type(problem).__name__}: {problem}"
        return [(x.dtype, x.shape, x.stride(), x.double().nan_to_num(7e77).tolist()) for x in (out, lse, *grads)]


# ---- the ways --------------------------------------------------------------------------------------------------------


def names(stage):
    """The names of the ways into a stage."""
    number = stage.SUPPORTS["stage"][4:6]
    if number == "04":
        return ["04"]
    found = [f"{number} {rung}" for rung in stage.SUPPORTS["rungs"]]
    # The kernels of 00 and 01 keep nothing, those of 03 each for itself, and those of 02 all in one place.
    found += [f"{name}, alone" for name in {"02": found[:1], "03": found}.get(number, ())]
    parts = [rung for rung in stage.SUPPORTS["rungs"] if number == "02" and has_parts(stage, rung)]
    return found + [f"02 {rung}, in parts" for rung in parts]


def way_of(stage, name):
    """A way by its name; those of FEATURES have no rung."""
    number, _, rung = name.partition(" ")
    rung, _, how = rung.partition(", ")
    if number == "04":
        return of_the_ring(stage)
    if name in FEATURES:
        return FEATURES[name](stage)
    return of_parts(stage, rung) if how == "in parts" else of_rung(stage, number, rung, how == "alone")


def of_rung(stage, number, rung, alone):
    """A rung by the stage's functions, or by its kernels alone."""
    own = supports_of(stage, rung)
    dtypes = [dtype for dtype in own["dtypes"] if dtype != torch.float64]
    small = {"dtypes": dtypes, "D": 32}
    options, wrong = {"causal": False, "scale": 1.0}, {"causal": 0, "scale": True}
    others = {"causal": [True], "scale": [0.5]}
    if number == "02":  # Another dtype or tile would be compiled anew.
        small |= {"dtypes": dtypes[:1], "D": 32 if torch.float32 in dtypes else 64}
    elif number != "01" and not alone and len(own["tiles"]) > 1:
        others["tile"] = [own["tiles"][-1]]
    if number == "03" and alone:  # Its kernels do not look at types: 0 is a call of its own, and not refused.
        return Way(*stage.RUNGS[rung], options, others | {"causal": [True, 0]}, **small)
    options, wrong = options | {"deterministic": False}, wrong | {"deterministic": 0}
    others["deterministic"] = [True]
    if alone:
        return Way(*stage.RUNGS[rung], options, others, wrong, **small)
    functions = (partial(getattr(stage, name), rung=rung) for name in ("forward", "backward"))
    return Way(*functions, options, others, wrong, **small)


def sequences(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


DTYPES = torch.float32, torch.bfloat16


def of_features(stage):
    """Each feature is changed beside all that go together."""
    random = torch.Generator().manual_seed(9)
    tensors = {
        "mask": torch.randn(1, 1, 5, 5, generator=random), "sinks": torch.tensor([0.5, -1.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25]), "seed": torch.tensor([7]),
    }  # fmt: skip
    options = {"causal": True, "scale": 1.0, "window": (3, 0), "softcap": 4.0, "dropout_p": 0.25, "first_key": 0}
    options |= {"first_query": 0, "deterministic": False, "mask_gradient": False}
    others = {
        "causal": [False], "scale": [0.5], "window": [(2, 0), (3, 1)], "softcap": [2.0], "dropout_p": [0.5],
        "first_key": [1], "first_query": [1], "deterministic": [True], "mask_gradient": [True], "tile": [(16, 32)],
    }  # fmt: skip
    wrong = {"causal": 1, "scale": True, "first_key": False, "deterministic": 0, "mask_gradient": 0}
    of_backward = "deterministic", "mask_gradient"
    return Way(stage.forward, stage.backward, options, others, wrong, of_backward, tensors, DTYPES)


def of_packed(stage):
    """Packed sequences. A larger max_seqlen is another grid of programs."""
    packed = {"cu_seqlens_q": sequences(2, 5), "cu_seqlens_k": sequences(3, 5)}
    options = {"causal": False, "max_seqlen_q": 4, "max_seqlen_k": 4}
    others = {"causal": [True], "max_seqlen_q": [5, 33], "max_seqlen_k": [5, 33], "window": [(1, 0)]}
    wrong = {"causal": 0, "max_seqlen_q": 4.0, "max_seqlen_k": 4.0}
    return Way(stage.forward, stage.backward, options, others, wrong, (), packed, DTYPES)


LENGTHS = {"lengths_k": torch.tensor([3], dtype=torch.int32), "sinks": torch.tensor([0.5, -1.0])}
OF_LENGTHS = {"causal": [True], "scale": [0.5], "window": [(1, 0)], "softcap": [4.0]}


def of_lengths(stage):
    options, wrong = {"causal": False, "scale": 1.0}, {"causal": 0, "scale": True}
    return Way(stage.forward, None, options, OF_LENGTHS, wrong, (), LENGTHS, DTYPES)


def of_decode(stage):
    options = {"causal": False, "scale": 1.0, "splits": 1}
    return Way(stage.features.decode.forward, None, options, OF_LENGTHS | {"splits": [2]}, {}, (), LENGTHS, DTYPES)


FEATURES = {"03 features": of_features, "03 packed": of_packed, "03 lengths": of_lengths, "03 decode, alone": of_decode}


def of_the_ring(stage):
    """Stage 04 in one process. It keeps the calls that say how long the sequence is."""
    options = {"causal": False, "scale": 1.0, "S": 5, "layout": "zigzag", "deterministic": False}
    others = {
        "causal": [True], "scale": [0.5], "layout": ["contiguous", "striped"], "transport": ["relay"],
        "deterministic": [True], "tile": [(16, 32)], "block": [PlainBlock],
    }  # fmt: skip
    wrong = {"causal": 0, "scale": True, "S": 6, "layout": "zig", "deterministic": 0}
    return Way(stage.forward, stage.backward, options, others, wrong, dtypes=DTYPES)


def has_parts(stage, rung):
    dtypes = [dtype for dtype in supports_of(stage, rung)["dtypes"] if dtype != torch.float32]
    return dtypes and not stage.ladder.backward_row(rung, dtypes[0], 64, False).adds_to_dq


def of_parts(stage, rung):
    """Stage 02's backward in parts. The forward gives what the parts need, without a cache."""

    def forward(q, k, v, **options):
        return torch.ones(q.shape, dtype=q.dtype), torch.ones(q.shape[:3])

    def backward(dout, q, k, v, out, lse, *, causal, scale, deterministic):
        sums = stage.calls.start_gradients(dout, out, lse, rung=rung, scale=scale, deterministic=deterministic)
        grads = stage.calls.add_gradients(sums, dout, q, k, v, causal=causal)
        return *grads, stage.calls.finish_dq(sums)

    options, wrong = {"causal": False, "scale": 1.0, "deterministic": False}, {"scale": True, "deterministic": 0}
    others = {"causal": [True], "scale": [0.5], "deterministic": [True]}
    dtypes = tuple(dtype for dtype in supports_of(stage, rung)["dtypes"] if dtype != torch.float32)[:1]
    return Way(forward, backward, options, others, wrong | {"causal": 0}, (), dtypes=dtypes, D=64)


# ---- the caches ------------------------------------------------------------------------------------------------------


@functools.cache
def caches():
    """{a name: the dictionary}, of everything that keeps calls."""
    stages = [x for x in gc.get_objects() if type(x) is contract.Stage]
    found = {f"contract {x.name} {way}": getattr(x, way) for x in stages for way in ("forwards", "backwards")}
    found["ring"] = catalogue.stage("04").entry._cached
    for number in ("02", "03"):
        package = None if catalogue.unavailable(number) else catalogue.stage(number)
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if package else ():
            module = importlib.import_module(one.name)
            for name, x in vars(module).items():
                if hasattr(x, "recordings"):  # of replay.py
                    found[f"{x.__module__}.{x.__name__}"] = x.recordings
                elif name == "plans" and isinstance(x, dict):
                    found[module.__name__] = x
    return found


def sizes():
    return {name: len(kept) for name, kept in caches().items()}


def forget():
    for kept in caches().values():
        kept.clear()


def cold(way, *change):
    forget()
    return way.run(*change)


def grown(before):
    return {name: n - before[name] for name, n in sizes().items() if n != before[name]}


def check(stage, name):
    """A changed call between usual ones is what it is alone, by the way of this name."""
    way = way_of(stage, name)
    usual = way.inputs(), way.options, way.features, {}
    changes = way.changes()
    # Rungs have the same key. All tensors are changed in the first one, in the ring, and in one backward in parts.
    every = f" {stage.SUPPORTS['rungs'][0]}", " fa2, in parts"
    few = name != "04" and (name in FEATURES or not any(words in name for words in every))
    places = way.places(few)
    # torch's products, which stage 00 is made of, may add in another order at another address.
    apart = changes | places if name[:2] == "00" else changes
    alone = {what: cold(way, *change) for what, change in apart.items()}
    expected = cold(way, *usual)
    assert isinstance(expected, list), expected
    forget()
    before = sizes()
    way.run(*usual, passes=1)
    of_forward, before = grown(before), sizes()
    assert way.run(*usual) == expected
    of_backward, before = grown(before), sizes()
    assert of_forward or of_backward, "nothing is kept"
    assert way.run(*usual) == expected and not grown(before), "a call like the one before"
    for what, change in (changes | places).items():
        before = sizes()
        got = way.run(*change)
        assert got == alone.get(what, expected), what
        if isinstance(got, list):
            changed = what.replace("=", " ").split()[0]
            filled = of_backward if changed in ("dout", *SAVED, *way.of_backward) else of_forward | of_backward
            missing = {cache for cache in filled if has_to_keep(name, cache, what)} - grown(before).keys()
            assert not missing, f"no call of its own with {what} in {missing}"
    assert way.run(*usual) == expected, "the usual call after all others"


def has_to_keep(way, cache, what):
    """Whether this cache has to tell the changed call from the usual one."""
    if "alone" in way or "in parts" in way:
        return True
    if way == "04":  # Strides and addresses are for the block to look at.
        return cache == "ring" and not what.endswith((*PLACES,))
    # The contract reads negated tensors, and what concerns no kernel, before a kernel is called.
    return "contract" in cache or what.endswith(("unaligned", "inside")) or what.startswith(("causal", "scale"))
