"""Rung gluon's backward without a GPU: its kernel's text runs, each role in a thread, with barriers as mbarriers are.

Only what computes with tiles is replaced. A tile knows what it is, of which queries and keys, and which mask was laid
over it, so that operands that do not belong together fail.
"""

import collections
import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from steps.step03_triton import bwd_2_gluon
from steps.step03_triton.features import flash_gluon
from support.roles import SECONDS, run_together

STAGES, Bc = bwd_2_gluon.STAGES.value, bwd_2_gluon.Bc.value
B, H, group = 5, 4, 2  # ten key heads, so that a causal call has two sections of them
CHANGED = threading.Condition()  # by any barrier


class Barrier:
    """An mbarrier. Who has waited for it sees what has been copied; nobody else does."""

    def __init__(self):
        self.phases, self.missing, self.copied = 0, 0, []  # phases that are complete; bytes that are on their way

    def expect(self, bytes):
        assert self.missing == 0, "the copies of the phase before have not arrived"
        self.missing = bytes

    def arrive(self, bytes=0):
        with CHANGED:
            self.missing -= bytes
            assert self.missing >= 0, "more bytes arrive than are expected"
            self.phases += self.missing == 0
            CHANGED.notify_all()

    def wait(self, parity):
        with CHANGED:
            assert CHANGED.wait_for(lambda: self.phases % 2 != parity, SECONDS), "a role waits for ever"
            for stage, tile in self.copied:
                stage.store(tile)
            self.copied.clear()


class Barriers(list):
    def __init__(self, count):
        super().__init__(Barrier() for _ in range(count))

    index = list.__getitem__


# What becomes of two operands; of no others may anything be made.
RESULTS = {
    ("k", "q"): "S", ("S", "lse_2"): "S", ("v", "dout"): "dP", ("dP", "delta"): "dP", ("P", "dP"): "dS",
    ("P", "dout"): "dV", ("dS", "q"): "dK", ("dS", "k"): "dQ",
}  # fmt: skip


class Tile:
    """Numbers of the queries `of`, (b, h, first query), and of the keys `j`. A sum knows the terms added to it."""

    type, dtype = SimpleNamespace(layout=None), None

    def __init__(self, name=None, of=None, j=None, mask=None, terms=()):
        self.name, self.of, self.j, self.mask, self.terms = name, of, j, mask, terms

    def meet(self, other):
        if not isinstance(other, Tile):
            return self
        assert None in (self.of, other.of) or self.of == other.of, "two operands are of different queries"
        assert None in (self.j, other.j) or self.j == other.j, "two operands are of different keys"
        mask = other.mask if self.mask is None else self.mask
        return Tile(RESULTS[self.name, other.name], self.of or other.of, self.j or other.j, mask)

    def changed(self, **how):
        return Tile(**vars(self) | how)

    def same(self, *_):
        return self

    __mul__ = __sub__ = meet
    __getitem__ = to = permute = reshape = load = same


class Stages:
    """Shared memory for tiles, which are what was loaded or stored last."""

    dtype = None

    def __init__(self, shape):
        self.shape, self.tiles = tuple(shape), [None] * shape[0]

    def index(self, n):
        return Stage(self, n)


class Stage:
    dtype = None

    def __init__(self, stages, n):
        self.stages, self.n = stages, n

    def store(self, tile):
        self.stages.tiles[self.n] = tile

    def read(self, *_):
        return self.stages.tiles[self.n]

    permute = load = read
    reshape = to = Tile.same


def tile_of(x):
    return x.read() if isinstance(x, Stage) else x


def product(A, B_, total, use_acc=True, is_async=True):
    """C = A B, of the operands' queries and keys; or C += A B."""
    new = tile_of(A).meet(tile_of(B_))
    assert not use_acc or total.name in (None, new.name), "one sum has terms of two kinds"
    return Tile(new.name, terms=(*total.terms, (new.of, new.j, new.mask))) if use_acc else new


class Integer(int):
    """An integer of Gluon, or a pointer that counts numbers."""

    def to(self, _):
        return self


def of_integers(plain):
    def operation(x, y):
        result = plain(x, y)
        return result if result is NotImplemented else Integer(result)  # as with a tensor

    return operation


for name in ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__floordiv__", "__mod__"):
    setattr(Integer, name, of_integers(getattr(int, name)))


def described(name, box):
    """A descriptor of a tensor, whose numbers have a byte each."""
    return SimpleNamespace(
        name=name, dtype=None, layout=None, block_type=SimpleNamespace(shape=box, nbytes=math.prod(box))
    )


class Call:
    """What all programs of a call do: {(b, hk, j): {"dk" or "dv": the sum's terms}}, and what is added where to dq."""

    def __init__(self, monkeypatch, Nq, Nk, D, causal):
        self.stored, self.added = collections.defaultdict(dict), collections.Counter()
        self.programs, self.plain_step = B * H // group * -(-Nk // Bc), bwd_2_gluon.step.fn
        Br = bwd_2_gluon.TILES[D]
        boxes = {"q": [1, 1, Br, D], "k": [1, 1, Bc, D], "v": [1, 1, Bc, D], "dout": [1, 1, Br, D]}
        inputs = [described(*box) for box in (boxes | {"lse_2": [1, Br], "delta": [1, Br]}).items()]
        with monkeypatch.context() as patch:
            for name, value in self.stand_ins().items():
                patch.setattr(bwd_2_gluon, name, value)
            for number in range(self.programs):
                patch.setattr(bwd_2_gluon.gl, "program_id", lambda _, n=number: Integer(n))
                self.loaded, self.ended = 0, 0
                bwd_2_gluon.backward_kernel.fn(*inputs, Integer(0), "dk", "dv", H, group, Nq, Nk, 1.0, causal)

    def stand_ins(self):
        """{name in the kernel's file: what it is here}."""
        gl = SimpleNamespace(
            minimum=lambda x, y: x if isinstance(x, Tile) else min(x, y), maximum=max,
            where=lambda c, x, y: x.changed(mask=c) if isinstance(x, Tile) else torch.where(c, x, y),
            exp2=lambda S: S.changed(name="P"), cdiv=lambda x, y: Integer(-(-x // y)), full=lambda *_: Tile(),
            arange=lambda a, b, _: torch.arange(a, b), zeros_like=torch.zeros_like, convert_layout=lambda x, _: x,
            SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None), program_id=None,
            num_programs=lambda _: self.programs, allocate_shared_memory=lambda dtype, shape, _: Stages(shape),
            warp_specialize=self.specialize, float32=None, float16=None, int64=None, constexpr=None,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            wait=Barrier.wait, expect=Barrier.expect, arrive=lambda barrier, count: barrier.arrive()
        )
        plain = {name: getattr(bwd_2_gluon, name).fn for name in ("schedule", "scores", "produce", "consume")}
        return plain | dict(
            gl=gl, mbarrier=mbarrier, tma=SimpleNamespace(store_wait=lambda _: None), layout=lambda *_: None, Bc=Bc,
            hopper=SimpleNamespace(fence_async_shared=lambda: None), make_barriers=Barriers, STAGES=STAGES,
            matrix=lambda tiles, n: tiles.index(n), rounded=lambda x, _: x, widened=lambda x: x,
            load_pairs=lambda K: K, out_of_pairs=lambda K, _: K, warpgroup_mma=product,
            warpgroup_mma_wait=lambda _, x: x if len(x) > 1 else x[0], add=self.add, step=self.step,
            async_load=self.load, async_store=self.store,
        )  # fmt: skip

    def specialize(self, roles, *_):
        run_together(roles)
        assert self.loaded == self.ended, "as many tiles of queries are loaded as used"

    def load(self, x, where, barrier, stage):
        if x.name == "q":
            assert self.ended >= self.loaded + 1 - STAGES, "the tile that has the stage may still be read"
            assert stage.n == self.loaded % STAGES
            self.loaded += 1
        of = tuple(where[:3]) if len(where) == 4 else (*divmod(where[0], H), where[1])
        barrier.copied.append((stage, Tile(x.name, j=of) if x.name in "kv" else Tile(x.name, of)))
        barrier.arrive(x.block_type.nbytes)

    def step(self, *arguments):
        state = self.plain_step(*arguments)
        self.ended += 1
        return state

    def add(self, dq, dQ):
        assert dQ.name == "dQ"
        self.added[dq, dQ.of] += 1

    def store(self, name, where, stage):
        assert stage.read().name.lower() == name
        self.stored[tuple(where[:3])][name] = stage.read().terms


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_roles_of_the_backward(D, causal, monkeypatch):
    Br = bwd_2_gluon.TILES[D]
    for Nq, Nk in ((1, 1), (70, 300), (300, 70), (256, 256), (513, 400)):
        call = Call(monkeypatch, Nq, Nk, D, causal)
        query, key = torch.arange(Nq), torch.arange(Nk)
        seen = key[:, None] <= query + Nk - Nq if causal else torch.ones(Nk, Nq, dtype=torch.bool)
        expected = collections.Counter()
        for b, hk, j in itertools.product(range(B), range(H // group), range(0, Nk, Bc)):
            results = call.stored.pop((b, hk, j))
            assert results["dk"] == results["dv"]
            for (_, _, i), keys, mask in results["dk"]:
                assert keys == (b, hk, j)
                there = seen[j : j + Bc, i : i + Br]
                shown = torch.ones(Bc, Br, dtype=torch.bool) if mask is None else mask
                assert torch.equal(shown[: len(there), : there.shape[1]], there), "each pair that is seen, and no other"
                assert not shown[len(there) :].any(), "no key that does not exist"
            tiles = [of for of, *_ in results["dk"]]
            heads, starts = range(hk * group, hk * group + group), range(0, Nq, Br)
            needed = {(b, h, i) for h in heads for i in starts if seen[j : j + Bc, i : i + Br].any()}
            assert needed <= set(tiles) and len(set(tiles)) == len(tiles)
            expected.update(((((b * H + h) * len(starts) + i // Br) * Br * D), (b, h, i)) for b, h, i in tiles)
        assert not call.stored and call.added == expected, "each tile of dQ goes where the queries' sums are"


def test_the_backward_of_a_single_sweep_takes_no_dropout(monkeypatch):
    """As the stage's README says."""
    monkeypatch.setattr(bwd_2_gluon, "refusal", lambda q: None)
    q = torch.empty(1, 1, 64, 128)
    asked = [["sinks"], ["dropout_p"], ["dropout_p", "sinks"]]
    assert [flash_gluon.fits_backward(q, features) for features in asked] == [True, False, False]
