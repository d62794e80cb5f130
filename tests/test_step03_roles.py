"""Stage 03's Gluon forwards without a GPU: each role runs as a thread, and a wait that never ends fails.

What Python runs is the text of the kernels. Only what computes with tiles is replaced: a product notes which tiles it
was given, so that a test can say which keys each row of queries met, and whether a mask was laid over them.
"""

import collections
import itertools
import re
import threading
from types import SimpleNamespace

import pytest
import torch

from steps import engine
from steps.step03_triton import fwd_3_gluon, scheduler
from steps.step03_triton.features import flash_gluon
from support.roles import SECONDS, run_together


class Ring:
    """Stages for `depth` tiles in shared memory, each of which so many readers release."""

    def __init__(self, depth, readers, rows, columns=64):
        self.depth, self.readers, self.loaded, self.released = depth, readers, {}, collections.Counter()
        self.got, self.written = set(), {}  # (thread, tile); {stage: what the rows of O visited that lie there now}
        self.tiles = SimpleNamespace(shape=(depth, 1, 1, rows, columns), dtype=None, index=self.stage)
        self.changed = threading.Condition()

    def stage(self, number):
        stored = SimpleNamespace(store=lambda O: self.written.update({number: O.visited}))
        return SimpleNamespace(reshape=lambda shape: stored, number=number)

    def wait(self, condition):
        assert self.changed.wait_for(condition, SECONDS), "a role waits for ever"

    def load(self, x, n, where):
        with self.changed:
            self.wait(lambda: n < self.depth or self.released[n - self.depth] == self.readers)
            assert n == len(self.loaded), "tiles come one after the other"
            self.loaded[n] = tuple(where)
            self.changed.notify_all()

    def get(self, n):
        with self.changed:
            self.wait(lambda: n in self.loaded)
            assert self.released[n] < self.readers, "the stage may have the next tile already"
            self.got.add((threading.get_ident(), n))
            return self.loaded[n]

    def release(self, n):
        with self.changed:
            assert (threading.get_ident(), n) in self.got, "who releases a tile has waited for it"
            self.released[n] += 1
            self.changed.notify_all()


class Values:
    """Stages for tiles of V, each of which comes and goes with a tile of K's ring."""

    def __init__(self, ring):
        self.ring, self.tiles, self.dtype, self.shape = ring, {}, None, (64,)

    def load(self, n, where):
        self.tiles[n] = tuple(where)  # before K_n, so that it is there when K_n is

    def at(self, n):
        assert (threading.get_ident(), n) in self.ring.got, "who uses a tile of V has waited for it"
        assert self.ring.released[n] < self.ring.readers, "the stage may have the next tile already"
        return self.tiles[n]


class Numbers:
    """m, l, P, O and so on. They have a layout, but are not computed; O and P know from which tiles they came."""

    type, shape, visited = SimpleNamespace(layout=None), (64, 64), ()

    def same(self, _):
        return self

    __mul__ = __truediv__ = __rtruediv__ = __getitem__ = to = same


class Program:
    """The roles of one program, with what they note in `stored`: {coordinates of 64 rows: what they visited}."""

    def __init__(self, patch, module, number, programs):
        self.turns = [threading.Semaphore(0) for _ in range(3)]
        self.stored, self.of_lse = {}, []
        of_numbers = dict(
            minimum=min, maximum=max, cdiv=lambda x, y: -(-x // y), where=lambda c, x, y: x if c else y,
            program_id=lambda _: number, num_programs=lambda _: programs, full=lambda *_: Numbers(),
            zeros_like=lambda _: Numbers(), SliceLayout=lambda *_: None, float32=None, load=lambda pointer: pointer[0],
            static_range=range, convert_layout=lambda x, _: x, inline_asm_elementwise=self.barrier, int32=None,
            arange=lambda *_: None, BlockedLayout=lambda *_: None,
        )  # fmt: skip
        replaced = dict(
            gl=SimpleNamespace(**of_numbers), layout=lambda _: None, partial_sums=lambda _: Numbers(), LOG2_E=1.0,
            load=lambda x, ring, n, where: ring.load(x, n, where), get=lambda ring, n: ring.get(n),
            release=lambda ring, n: ring.release(n), at=lambda V, n: V.at(n), load_pair=self.load_pair,
            tma=SimpleNamespace(store_wait=lambda _: None),
            hopper=SimpleNamespace(fence_async_shared=lambda: None), async_store=self.store,
            start_scores=lambda Q_i, K_n: SimpleNamespace(type=Numbers.type, Q_i=Q_i, K_n=K_n, mask=None),
            warpgroup_mma_wait=lambda count, x: x if len(x) > 1 else x[0], start_output=self.start_output,
            mask=self.mask, online_softmax=lambda m, l, S, scale: (Numbers(), Numbers(), Numbers(), S),
            in_pairs=lambda P, dtype: P, lse_and_sum=lambda m, l, scale: (None, l),
            store_lse=lambda lse, lse_i, *place: self.of_lse.append(place),
        )  # fmt: skip
        for other in (scheduler, fwd_3_gluon, flash_gluon):
            for name, value in replaced.items():
                if hasattr(other, name):
                    patch.setattr(other, name, value)
        patch.setattr(flash_gluon, "BILLION", 2**30)
        as_they_are = "position rounds_of place work_tile visits visited coordinates wait_turn pass_turn"
        for name in (*as_they_are.split(), "first_step", "step", "skip", "last_product", "store_rows"):
            for other in (scheduler, fwd_3_gluon, flash_gluon):
                if hasattr(getattr(other, name, None), "fn"):
                    patch.setattr(other, name, getattr(other, name).fn)
        self.module = module

    def barrier(self, ptx, *_, **__):
        instruction, number = re.match(r"bar.(\w+) (\d+), 256;", str(ptx)).groups()
        turn = self.turns[int(number) - 13]
        if instruction == "sync":
            assert turn.acquire(timeout=SECONDS), "a consumer's turn never comes"
        else:
            assert instruction == "arrive" and not turn._value, "a consumer takes a turn before it gets another one"
            turn.release()

    def load_pair(self, k, v, K, V, n, where, where_before):
        V.load(n, where_before)
        K.load(k, n, where)

    def mask(self, S, j, seen):
        S.mask = (j, *seen)
        return S

    def start_output(self, O, P, V_n):
        assert P.K_n == V_n, "P and V belong to the same keys"
        new = Numbers()
        new.visited = [*O.visited, (P.Q_i, P.K_n, P.mask)]
        return new

    def store(self, out, where, stage):
        """TMA takes rows from the stage of their queries, which was not yet released."""
        visited, where = self.Q.written.pop(stage.number), tuple(where)
        assert all(Q_i == where for Q_i, _, _ in visited)
        held = [n for n in self.Q.loaded if n % self.Q.depth == stage.number and not self.Q.released[n]]
        assert where in map(self.Q.loaded.get, held)
        self.stored.setdefault(where, []).append(visited)

    def run(self, consumers, Bc, of_consumer, of_producer):
        """{coordinates of the first of 64 rows: what was visited}. The arguments are those behind Q, K and V."""
        q_stages = 1 if Bc == 64 else 2  # with head_dim 256 there is no memory for more
        Q, K = Ring(q_stages * consumers, 1, 64), Ring(2, consumers, Bc)
        V = Values(K)
        self.Q = Q
        before, after = of_consumer
        roles = [(self.module.consume.fn, (w, consumers, *before, Q, K, V, *after)) for w in range(consumers)]
        run_together([*roles, (self.module.produce.fn, (None, None, None, Q, K, V, *of_producer))])
        assert all(Q.released[n] == 1 for n in Q.loaded), "each stage is free"
        *pairs, last = K.loaded or [0]
        assert all(K.released[n] == consumers for n in pairs) and not K.released[last], "a pair too many"
        if K.loaded:
            assert not {K.loaded[last], V.tiles[0]} & {K.loaded[n] for n in pairs}, "no key is read that is not used"
            assert [n for _, n in K.got].count(last) == consumers, "no copy is on its way when the program ends"
        assert not any(turn._value for turn in self.turns), "no named barrier is half full"
        return self.stored


def check_rows(visited, i, Nq, Nk, Bc, low, high):
    """The rows i ... i + 63, as far as there are some, met each key that they see once, and no other without a mask.

    low, high: of row 0, which sees the keys low ... high - 1 as far as there are some; the next row those one further.
    """
    rows = range(i, min(i + 64, Nq))
    tiles = [j for j, _ in visited]
    assert len(set(tiles)) == len(tiles) and min(tiles) >= 0
    seen = {row: range(max(0, low + row), min(Nk, high + row)) for row in rows}
    needed = {j for keys in seen.values() if keys for j in range(keys[0] // Bc * Bc, keys[-1] + 1, Bc)}
    assert needed <= set(tiles)
    for j, mask in visited:
        if mask is None:
            assert all(keys and keys[0] <= j and j + Bc <= keys[-1] + 1 for keys in seen.values())
        else:
            at, first, end, count = mask
            assert at == j and count == Nk
            assert first is None and low + Nq <= -Nk or first == low + i
            assert end is None and high >= Nk or end == high + i


class Forward:
    """What all programs of a call note together."""

    def __init__(self, monkeypatch, module, programs, consumers, Bc, *arguments):
        self.stored, self.of_lse = collections.defaultdict(list), []
        for number in range(programs):
            with monkeypatch.context() as patch:
                program = Program(patch, module, number, programs)
                of_one = program.run(consumers, Bc, *arguments)
            self.of_lse += program.of_lse
            for where, calls in of_one.items():
                self.stored[where] += calls

    def visited(self, *where):
        """[(b, h, first key, mask)] of the one time when the 64 rows from `where` on were computed."""
        (once,) = self.stored[where]
        return [(*K_n[:-2], K_n[-2], mask) for _, K_n, mask in once]


OUT, FAR = SimpleNamespace(dtype=None), flash_gluon.UNLIMITED
LENGTHS = (1, 1), (70, 300), (300, 70), (256, 256), (256, 257), (513, 900)


@pytest.mark.parametrize("consumers, Bc", [(2, 128), (2, 64), (3, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_roles_of_the_forward(consumers, Bc, causal, monkeypatch):
    B, H, group = 2, 2, 2
    for (Nq, Nk), programs in itertools.product(LENGTHS, (1, 3)):
        tiles = B * H * -(-Nq // (64 * consumers))
        call = scheduler.Lengths(H, group, Nq, Nk), scheduler.Order(tiles, 3, 1)
        of_consumer, of_producer = ((OUT, 0), (*call, 1.0, causal)), (*call, causal, 64 * consumers)
        found = Forward(monkeypatch, fwd_3_gluon, programs, consumers, Bc, of_consumer, of_producer)
        for b, h, i in itertools.product(range(B), range(H), range(0, Nq, 64)):
            visited = found.visited(b, h, i, 0)
            assert all(K_n[:2] == (b, h // group) for K_n in visited)
            check_rows([K_n[2:] for K_n in visited], i, Nq, Nk, Bc, -Nq - Nk, 1 + Nk - Nq if causal else Nq + Nk)
            assert found.of_lse.count((b * H + h, Nq, i, Nq)) == 1


@pytest.mark.parametrize("consumers, Bc", [(2, 128), (2, 64), (3, 128)])
@pytest.mark.parametrize("left, right", [(FAR, FAR), (FAR, 0), (130, 5)])
def test_roles_of_the_forward_with_a_window(consumers, Bc, left, right, monkeypatch):
    B, H, group = 2, 2, 2
    for (Nq, Nk), programs in itertools.product(LENGTHS, (1, 3)):
        tiles = B * H * -(-Nq // (64 * consumers))
        lengths, order = scheduler.Lengths(H, group, Nq, Nk), scheduler.Order(tiles, 3, 1)
        call = flash_gluon.Call(lengths, order, left, right, None, None)
        of_consumer = (OUT, 0, None), (call, Nq, 1.0, right < Nk)
        found = Forward(monkeypatch, flash_gluon, programs, consumers, Bc, of_consumer, (call, right < Nk, consumers))
        for b, h, i in itertools.product(range(B), range(H), range(0, Nq, 64)):
            visited = found.visited(b, h, i, 0)
            assert all(K_n[:2] == (b, h // group) for K_n in visited)
            check_rows([K_n[2:] for K_n in visited], i, Nq, Nk, Bc, Nk - Nq - left, 1 + Nk - Nq + right)
            assert found.of_lse.count((b * H + h, Nq, i, Nq)) == 1


class Pointer(list):
    """To its first number."""

    def __add__(self, n):
        return Pointer(self[n:])


@pytest.mark.parametrize("causal", [False, True])
def test_roles_of_the_forward_of_packed_sequences(causal, monkeypatch):
    H, group, starts_q, starts_k = 2, 1, [0, 1, 1, 301, 400], [0, 70, 170, 200, 520]
    of_sequence = [*zip(*([b - a for a, b in itertools.pairwise(x)] for x in (starts_q, starts_k)), strict=True)]
    for consumers, programs in itertools.product((2, 3), (1, 3, 8)):  # some of 8 programs have no tile
        tiles = 4 * H * -(-300 // (64 * consumers))
        lengths, order = scheduler.Lengths(H, group, 300, 320), scheduler.Order(tiles, 3, 0)
        starts = Pointer(starts_q), Pointer(starts_k)
        call = flash_gluon.Call(lengths, order, FAR, 0 if causal else FAR, *starts)
        of_consumer = (OUT, 0, None), (call, 400, 1.0, causal)
        found = Forward(monkeypatch, flash_gluon, programs, consumers, 128, of_consumer, (call, causal, consumers))
        for (b, (Nq, Nk)), h in itertools.product(enumerate(of_sequence), range(H)):
            for i in range(0, Nq, 64):
                visited = found.visited(2**30, starts_q[b + 1], h, 2**30 - Nq + i, 0)
                assert all(K_n[:3] == (2**30, starts_k[b + 1], h) for K_n in visited)
                rows = [(row - 2**30 + Nk, mask) for *_, row, mask in visited]
                check_rows(rows, i, Nq, Nk, 128, Nk - Nq - FAR, 1 + Nk - Nq + (0 if causal else FAR))
                assert found.of_lse.count((h, 400, starts_q[b] + i, starts_q[b] + Nq)) == 1


@pytest.mark.parametrize(
    "heads, Nq, Nk, Br", [(5, 300, 300, 128), (7, 500, 260, 64), (3, 260, 500, 192), (1, 9, 9, 64)]
)
def test_the_launch_counts_the_work_that_the_programs_get(heads, Nq, Nk, Br, monkeypatch):
    of_numbers = dict(minimum=min, maximum=max, cdiv=lambda x, y: -(-x // y), where=lambda c, x, y: x if c else y)
    monkeypatch.setattr(scheduler, "position", scheduler.position.fn)
    tiles = heads * -(-Nq // Br)
    for programs, section, alternate in itertools.product((1, 4, 5), sorted({1, min(2, heads), heads}), (0, 1)):
        found, dealt = collections.Counter(), [0] * programs
        work = scheduler.work_in_order(heads, Nq, Nk, Br, 64, section, alternate)
        order = scheduler.Order(tiles, section, alternate)
        for number in range(programs):
            numbers = dict(program_id=lambda _, p=number: p, num_programs=lambda _, p=programs: p)
            monkeypatch.setattr(scheduler, "gl", SimpleNamespace(**of_numbers, **numbers))
            for n in range(scheduler.rounds_of.fn(order, True)):
                b, h, i, blocks = scheduler.place.fn(n, (heads, 1, Nq, Nk), order, True, Br, 64)
                found[b, h, i] += 1
                dealt[number] += blocks + 1
                assert blocks + 1 == work[n * programs + (programs - 1 - number if n % 2 else number)]
        assert found == {(0, h, i): 1 for h in range(heads) for i in range(0, Nq, Br)}, "each tile once"
        assert scheduler.busy(work, programs) == pytest.approx(sum(dealt) / programs / max(dealt))


@pytest.mark.parametrize(
    "heads, N, D, order",
    [(256, 1024, 128, (32, 1)), (128, 2048, 128, (16, 1)), (32, 16384, 64, (4, 1)), (20, 5000, 128, (12, 1)),
     (40, 700, 128, (40, 0)), (8, 65536, 128, (1, 1))],  # of the last a head alone has more than the cache
)  # fmt: skip
def test_the_order_of_a_causal_call(heads, N, D, order):
    assert scheduler.order_of(heads, N, N, 128, 128, D, 132) == order
    assert scheduler.busy(scheduler.work_in_order(heads, N, N, 128, 128, *order), 132) > 0.9


@pytest.mark.skipif(engine.name == "cuda", reason="stands in for a GPU")
def test_what_the_forward_is_given(monkeypatch):
    """Three consumers up to head_dim 64, but not where a causal call is short; an order that fits the tile."""
    launched = []

    class Kernel:
        arg_names = fwd_3_gluon.forward_kernel.arg_names

        def __getitem__(self, grid):
            def launch(*x, **constants):
                launched.append(dict(zip(self.arg_names, x, strict=False)) | constants | {"grid": grid[0]})

            return launch

    monkeypatch.setattr(fwd_3_gluon, "refusal", lambda q: None)
    monkeypatch.setattr(fwd_3_gluon, "forward_kernel", Kernel())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=8))
    cases = (1024, 64, True, 128), (1024, 64, False, 192), (2048, 64, True, 192), (300, 72, True, 128)
    for N, D, causal, Br in cases:
        x = torch.zeros(2, 3, N, D, dtype=torch.float16)
        fwd_3_gluon.forward(x, x, x, causal=causal)
        found = launched[-1]
        tiles = 6 * -(-N // Br)
        assert (found["CONSUMERS"], found["CAUSAL"], found["tiles"]) == (Br // 64, causal, tiles)
        assert found["grid"] == 8 and found["q"].block_shape[2] == 64
        order = scheduler.order_of(6, N, N, Br, 128, 128 if D > 64 else 64, 8) if causal else (1, 0)
        assert (found["section"], found["alternate"]) == order
    fwd_3_gluon.forward(x[:1, :1], x[:1, :1], x[:1, :1])
    assert launched[-1]["grid"] == 3, "no more programs than tiles"


class Stages:
    """Tiles in shared memory, or barriers, by name; one of them is (name, number)."""

    def __init__(self, name):
        self.name, self.shape = name, (2, 1, 1, 128, 64)

    def index(self, number):
        return Stage((self.name, number))


class Stage(tuple):
    def reshape(self, shape):
        assert shape == (128, 64)
        return self


def test_a_pair_of_tiles_has_the_stage_and_the_phase_of_its_number(monkeypatch):
    """Both copies arrive at one barrier, which expects the bytes of both."""
    noted = []
    names = "wait", "expect", "arrive", "load"
    does = {name: lambda *x, _name=name, **_: noted.append((_name, *x)) for name in names}
    monkeypatch.setattr(fwd_3_gluon, "mbarrier", SimpleNamespace(**does))
    monkeypatch.setattr(fwd_3_gluon, "async_load", does["load"])
    monkeypatch.setattr(fwd_3_gluon, "at", fwd_3_gluon.at.fn)
    monkeypatch.setattr(fwd_3_gluon, "STAGES", 2)
    k, v = (SimpleNamespace(block_type=SimpleNamespace(nbytes=nbytes)) for nbytes in (100, 1000))
    K, V = fwd_3_gluon.Ring(*map(Stages, ("K", "full", "empty"))), Stages("V")
    for n, (stage, phase) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1), (0, 0))):
        noted.clear()
        fwd_3_gluon.load_pair.fn(k, v, K, V, n, "here", "before")
        full, empty = ("full", stage), ("empty", stage)
        copies = ("load", k, "here", full, ("K", stage)), ("load", v, "before", full, ("V", stage))
        assert noted == [("wait", empty, 1 - phase), ("expect", full, 1100), *copies]
        noted.clear()
        assert fwd_3_gluon.get.fn(K, n) == ("K", stage) and fwd_3_gluon.at(V, n) == ("V", stage)
        fwd_3_gluon.release.fn(K, n)
        assert noted == [("wait", full, phase), ("arrive", empty)]
