"""The backwards in Gluon without a GPU: the kernels' text runs, each role in a thread, with barriers as mbarriers are.

These are rung gluon's, and that of the features. Only what computes with tiles is replaced. A tile knows what it is, of
which queries and keys, and which mask was laid over it, so that operands that do not belong together fail.
"""

import collections
import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from steps.step03_triton import bwd_2_gluon
from steps.step03_triton.features import flash_gluon, flash_gluon_backward
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
    ("P", "dout"): "dV", ("dS", "q"): "dK", ("dS", "k"): "dQ", ("S", "S"): "derivative", ("dS", "derivative"): "dS",
}  # fmt: skip


class Tile:
    """Numbers of the queries `of`, (b, h, first query), and of the keys `j`. A sum knows the terms added to it."""

    type, dtype, shape = SimpleNamespace(layout=None), None, None

    def __init__(self, name=None, of=None, j=None, mask=None, terms=(), factor=1.0, **marks):
        self.name, self.of, self.j, self.mask, self.terms, self.factor = name, of, j, mask, terms, factor
        # Whether it was dropped by dropout, cut off where the queries end, multiplied by the soft-cap's derivative.
        self.dropped, self.cut, self.derived = (marks.get(name, False) for name in ("dropped", "cut", "derived"))

    def meet(self, other):
        if not isinstance(other, Tile):
            return self.changed(factor=self.factor * other)
        assert None in (self.of, other.of) or self.of == other.of, "two operands are of different queries"
        assert None in (self.j, other.j) or self.j == other.j, "two operands are of different keys"
        mask = other.mask if self.mask is None else self.mask
        result = RESULTS[self.name, other.name]
        assert result != "dS" or not self.dropped, "dS has the P of before dropout"
        marks = {name: getattr(self, name) or getattr(other, name) for name in ("dropped", "cut", "derived")}
        marks["derived"] = marks["derived"] or other.name == "derivative"
        return Tile(result, self.of or other.of, self.j or other.j, mask, **marks)

    def changed(self, **how):
        return Tile(**vars(self) | how)

    def same(self, *_):
        return self

    __mul__ = __sub__ = meet
    __rsub__ = same
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
        self.stages, self.n, self.shape = stages, n, stages.shape[-2:]

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
    if not use_acc:
        return new
    return Tile(new.name, terms=(*total.terms, new))


class Integer(int):
    """An integer of Gluon, or a pointer that counts numbers."""

    def to(self, _):
        return self


def of_integers(plain):
    def operation(x, y):
        result = plain(x, y)
        return result if result is NotImplemented else Integer(result)  # as with a tensor

    return operation


for name in ("add", "radd", "sub", "mul", "rmul", "floordiv", "mod", "and", "rshift"):
    setattr(Integer, f"__{name}__", of_integers(getattr(int, f"__{name}__")))


def described(name, box):
    """A descriptor of a tensor, whose numbers have a byte each."""
    return SimpleNamespace(
        name=name, dtype=None, layout=None, block_type=SimpleNamespace(shape=box, nbytes=math.prod(box))
    )


SCALE = 0.5
Keep = collections.namedtuple("Keep", "of")  # which entries of a tile dropout keeps


class Pointer(collections.namedtuple("Pointer", "numbers place", defaults=(0,))):
    """Points at integers in memory."""

    def __add__(self, n):
        return Pointer(self.numbers, self.place + n)

    def load(self):
        return Integer(self.numbers[self.place])


# The functions whose text runs; `step` does, too.
OF_BOTH = (
    "schedule", "scores", "load_keys", "load_queries", "allocate", "start_dP", "start_dV", "row_stats", "probabilities",
    "add_products", "store_gradients", "produce", "consume",
)  # fmt: skip
OF_FEATURES = "work_tile", "visits", "visited"


def where(condition, x, y):
    """Masks, drops or cuts a tile; or chooses between positions."""
    if not isinstance(x, Tile):
        return torch.where(condition, x, y) if isinstance(x, torch.Tensor) else x if condition else y
    if isinstance(condition, Keep):
        assert condition.of == x.of, "dropout keeps entries of other queries"
        return x.changed(dropped=True)
    if x.name == "delta":
        return x.changed(cut=True)
    return x.changed(mask=condition if x.mask is None else x.mask & condition)


class Call:
    """What all programs of a call do: {(b, hk, j): {"dk" or "dv": the sum's terms}}, and what is added where to dq."""

    of_dv = 1.0  # what dV is multiplied by

    def __init__(self, monkeypatch, Nq, Nk, D, causal):
        self.run(monkeypatch, bwd_2_gluon, B, Nk, D, (H, group, Nq, Nk, SCALE, causal))

    def run(self, monkeypatch, file, sequences, Nk, D, arguments):
        """Nk: of the longest sequence. arguments: of the file's backward_kernel, after dk and dv."""
        self.stored, self.added, self.file = collections.defaultdict(dict), collections.Counter(), file
        self.programs, self.plain_step = sequences * H // group * -(-Nk // Bc), file.step.fn
        Br = bwd_2_gluon.TILES[D]
        boxes = {"q": [1, 1, Br, D], "k": [1, 1, Bc, D], "v": [1, 1, Bc, D], "dout": [1, 1, Br, D]}
        inputs = [described(*box) for box in (boxes | {"lse_2": [1, Br], "delta": [1, Br]}).items()]
        with monkeypatch.context() as patch:
            patch.setattr(Tile, "shape", (Bc, Br))
            stand_ins = self.stand_ins()
            for module, name in itertools.product({bwd_2_gluon, flash_gluon, file}, stand_ins):
                if hasattr(module, name):
                    patch.setattr(module, name, stand_ins[name])
            for number in range(self.programs):
                patch.setattr(stand_ins["gl"], "program_id", lambda _, n=number: Integer(n))
                self.loaded, self.ended = 0, 0
                file.backward_kernel.fn(*inputs, Integer(0), "dk", "dv", *arguments)

    def stand_ins(self):
        """{name in the kernel's file: what it is here}."""
        gl = SimpleNamespace(
            minimum=lambda x, y: x if isinstance(x, Tile) else min(x, y), maximum=max,
            where=where, load=Pointer.load, uint32=None, inline_asm_elementwise=lambda _, __, x, *___: x[0],
            exp2=lambda S: S.changed(name="P"), cdiv=lambda x, y: Integer(-(-x // y)), full=lambda *_: Tile(),
            arange=lambda a, b, _: torch.arange(a, b), zeros_like=torch.zeros_like, convert_layout=lambda x, _: x,
            SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None), program_id=None,
            num_programs=lambda _: Integer(self.programs), allocate_shared_memory=lambda dtype, shape, _: Stages(shape),
            warp_specialize=self.specialize, float32=None, float16=None, int64=None, constexpr=None,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            wait=Barrier.wait, expect=Barrier.expect, arrive=lambda barrier, count: barrier.arrive()
        )
        of_kernel = (*OF_BOTH, *(OF_FEATURES if self.file is flash_gluon_backward else ()))
        return {name: getattr(self.file, name).fn for name in of_kernel} | dict(
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
        of = tuple(where[:3]) if len(where) == 4 else self.place(*where)
        barrier.copied.append((stage, Tile(x.name, j=of) if x.name in "kv" else Tile(x.name, of)))
        barrier.arrive(x.block_type.nbytes)

    def place(self, row, i):
        """(b, h, first query) of numbers of lse_2 and delta."""
        return *divmod(row, H), i

    def step(self, *arguments):
        state = self.plain_step(*(Integer(x) if type(x) is int else x for x in arguments))
        self.ended += 1
        return state

    def add(self, dq, dQ):
        assert dQ.name == "dQ"
        self.added[dq, dQ.of] += 1

    def visited(self, b, hk, j, seen, Br, dropped=False, derived=False):
        """The tiles of queries of which dK and dV of these keys have a term. seen: (Nk, Nq) pairs; all are checked."""
        results = self.stored.pop((b, hk, j))
        for of_dk, of_dv in zip(results["dk"], results["dv"], strict=True):
            assert of_dk.of == of_dv.of and of_dk.mask is of_dv.mask and of_dk.j == of_dv.j == (b, hk, j)
            assert of_dk.dropped == of_dv.dropped == dropped and of_dk.derived == derived
            i = of_dk.of[2]
            there = seen[j : j + Bc, i : i + Br]
            shown = torch.ones(Bc, Br, dtype=torch.bool) if of_dk.mask is None else of_dk.mask
            assert torch.equal(shown[: len(there), : there.shape[1]], there), "each pair that is seen, and no other"
            self.check_beyond(shown, there, of_dk)
        return [x.of for x in results["dk"]]

    def check_beyond(self, shown, there, term):
        assert not shown[len(there) :].any(), "no key that does not exist"

    def store(self, name, where, stage):
        found = stage.read()
        assert found.name.lower() == name and found.factor == {"dk": SCALE, "dv": self.of_dv}[name]
        self.stored[tuple(where[:3])][name] = found.terms


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
            tiles = call.visited(b, hk, j, seen, Br)
            heads, starts = range(hk * group, hk * group + group), range(0, Nq, Br)
            needed = {(b, h, i) for h in heads for i in starts if seen[j : j + Bc, i : i + Br].any()}
            assert needed <= set(tiles) and len(set(tiles)) == len(tiles)
            expected.update(((((b * H + h) * len(starts) + i // Br) * Br * D), (b, h, i)) for b, h, i in tiles)
        assert not call.stored and call.added == expected, "each tile of dQ goes where the queries' sums are"


class FeatureCall(Call):
    """The same of flash_gluon_backward.py. `lengths` are those of the packed sequences, [(queries, keys), ...]."""

    def __init__(self, monkeypatch, D, Nq, Nk, left, right, lengths=None, softcap=None, seed=None):
        Br = bwd_2_gluon.TILES[D]
        self.Br, self.lengths = Br, lengths
        self.starts = [[0, *itertools.accumulate(n)] for n in zip(*lengths or [(0, 0)], strict=True)]
        if lengths:
            sequences, (Nq, Nk) = len(lengths), (max(n) for n in zip(*lengths, strict=True))
            self.tiles_of_head = self.starts[0][-1] // Br + sequences
        else:
            sequences, self.tiles_of_head = B, -(-Nq // Br)
        starts = map(Pointer, self.starts) if lengths else (None, None)
        numbers = H, group, Nq, Nk, left, right, self.tiles_of_head
        self.of_dv = 1.0 if seed is None else 1.25
        features = None, None if seed is None else 1.25, softcap, 1.0, SCALE
        narrow = left < Bc - 2 or left + right < Bc + Br - 3
        arguments = *starts, None if seed is None else Pointer([seed]), *numbers, *features, right < Nk, narrow
        self.run(monkeypatch, flash_gluon_backward, sequences, Nk, D, arguments)

    def stand_ins(self):
        def kept(call, work, h, i, S):
            assert call.seed == (11, 8) and call.kept_scale == 1.25
            return Keep((work.number, h, i))

        def coordinates(rows, row, PACKED):
            assert PACKED == bool(self.lengths)
            return (self.sequence(rows) if PACKED else rows.b), rows.h, row, 0

        return super().stand_ins() | dict(kept=kept, coordinates=coordinates, BILLION=flash_gluon.BILLION.value)

    def sequence(self, rows):
        """The number of the packed sequence that has these rows."""
        of_each = zip(*(x[:-1] for x in self.starts), self.lengths, strict=True)
        found = [(rows.start, rows.N) in ((of_q, Nq), (of_k, Nk)) for of_q, of_k, (Nq, Nk) in of_each]
        assert rows.b == 0
        return found.index(True)

    def place(self, row, i):
        if not self.lengths:
            return super().place(row, i)
        begins = [(start // 4 + s) * 4 for s, start in enumerate(self.starts[0][:-1])]
        s = sum(begin <= i for begin in begins) - 1
        return s, row, i - begins[s]

    def check_beyond(self, shown, there, term):
        """For queries of a packed sequence that do not exist, delta must be 0."""
        super().check_beyond(shown, there, term)
        assert term.cut or not self.lengths or there.shape[1] == self.Br


FAR = flash_gluon.UNLIMITED
LENGTHS = (1, 1), (70, 300), (300, 70), (256, 256), (513, 400)


def pairs_seen(Nq, Nk, left, right):
    query, key = torch.arange(Nq)[None, :] + Nk - Nq, torch.arange(Nk)[:, None]
    return (query - left <= key) & (key <= query + right)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("left, right", [(FAR, FAR), (FAR, 0), (0, 0), (60, 5), (150, 40), (300, 0), (3, FAR)])
def test_roles_of_the_backward_with_features(D, left, right, monkeypatch):
    Br = bwd_2_gluon.TILES[D]
    packed = [(1, 5), (64, 64), (200, 230), (0, 70), (129, 0), (128, 256), (31, 31)]
    cases = *((n, None) for n in LENGTHS), (None, packed), (None, packed[1:3])
    for number, (sizes, lengths) in enumerate(cases):
        more = {"softcap": 0.5} if number % 2 else {"seed": 2**35 + 11}
        call = FeatureCall(monkeypatch, D, *sizes or (None, None), left, right, lengths, **more)
        expected = collections.Counter()
        for b, (Nq, Nk) in enumerate(lengths or [sizes] * B):
            seen, first_tile = pairs_seen(Nq, Nk, left, right), call.starts[0][b] // Br + b if lengths else 0
            for hk, j in itertools.product(range(H // group), range(0, Nk, Bc)):
                marks = {"dropped": "seed" in more, "derived": "softcap" in more}
                tiles = call.visited(b, hk, j, seen, Br, **marks)
                shared, starts = range(hk * group, hk * group + group), range(0, Nq, Br)
                needed = {(b, h, i) for h in shared for i in starts if seen[j : j + Bc, i : i + Br].any()}
                assert needed <= set(tiles) and len(set(tiles)) == len(tiles)
                for _, h, i in tiles:
                    of_head = (0 if lengths else b * H) + h
                    expected[(of_head * call.tiles_of_head + first_tile + i // Br) * Br * D, (b, h, i)] += 1
        assert not call.stored and call.added == expected, "each tile of dQ goes where the queries' sums are"
