"""Stage 04: how ranks are started, and what they say when one of them dies, hangs, or makes another call.

Without a GPU the ranks are processes over gloo. `make test-all` also runs them as programs, under torchrun, and on two
hosts. On a machine with two GPUs the tests marked `multigpu` run over NCCL:

    python -m pytest tests/test_step04_faults.py -m multigpu
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import steps.step04_ring as step04
from steps import engine, step00_naive
from steps.step04_ring import Layout, demo, launch
from steps.step04_ring.ranks import board, environment, verdict, watch
from steps.step04_ring.ranks import note as note_module
from steps.step04_ring.ranks.comm import Comm
from steps.step04_ring.ranks.side import Side
from support import faulty_rank

ROOT = Path(__file__).parents[1]
over_gloo = pytest.mark.skipif(engine.name == "cuda", reason="over gloo; the tests marked multigpu do this over NCCL")

# What a launcher says.

MET = dict(MASTER_ADDR="h", MASTER_PORT="7")
SLURM = dict(SLURM_PROCID="3", SLURM_NTASKS="16", SLURM_LOCALID="3", SLURM_TASKS_PER_NODE="8(x2)")
IN_SLURM = dict(SLURM_PROCID="0", SLURM_NTASKS="2", SLURM_LOCALID="0")  # an allocation in which another launcher starts
OPEN_MPI = dict(RANK="3", SIZE="16", LOCAL_RANK="3", LOCAL_SIZE="8")
LAUNCHERS = {
    "torchrun": dict(RANK="3", WORLD_SIZE="16", LOCAL_RANK="3", LOCAL_WORLD_SIZE="8") | MET,
    "by hand": dict(RANK="3", WORLD_SIZE="16", LOCAL_RANK="3") | MET,
    "Open MPI": {f"OMPI_COMM_WORLD_{x}": y for x, y in OPEN_MPI.items()} | dict(PMIX_RANK="3") | IN_SLURM | MET,
    "MPICH": dict(PMI_RANK="3", PMI_SIZE="16", MPI_LOCALRANKID="3", MPI_LOCALNRANKS="8") | IN_SLURM | MET,
    "Slurm": SLURM | dict(PMIX_RANK="3", SLURM_JOB_NODELIST="h,node[03-05,09]", MASTER_PORT="7"),
    "Slurm with PMI": SLURM | dict(PMI_RANK="3", PMI_SIZE="16") | MET,
}
VARIABLES = {name for names, _ in environment.LAUNCHERS.values() for name in names}
VARIABLES |= {name for variables in LAUNCHERS.values() for name in variables} | {"SLURM_STEP_NODELIST"}


@pytest.fixture
def environ(monkeypatch):
    """A function that makes the given variables the only ones of a launcher."""

    def set(variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_is_understood(environ, name):
    environ(LAUNCHERS[name])
    here = None if name == "by hand" else 8
    assert environment.launched()
    assert environment.read(gpus=0) == environment.Place(3, 16, 0, here, "h", 7)
    assert environment.read(gpus=8).local_rank == 3
    assert environment.read(gpus=1).local_rank == 0  # the launcher shows each rank one GPU, whose number is then 0


def test_whoever_judges_a_group_reads_its_members_twice(monkeypatch):
    for name, instead in {"SILENCE": 0, "differing": lambda *_: False, "verdict": lambda *_: "rank 3"}.items():
        monkeypatch.setattr(board, name, instead)
    read = []
    judge = SimpleNamespace(at_failure=dist.HashStore(), read=read.append, publish=lambda store: None)
    assert board.Board._judge(judge, SimpleNamespace(name="two of four", members=(2, 3))) == "rank 3"
    assert read == [2, 3, 2, 3]


@pytest.mark.parametrize(
    "variables, words",
    [
        ({}, "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set; torchrun needs this"),
        (LAUNCHERS["torchrun"] | {"MASTER_PORT": None}, "MASTER_PORT not set"),
        (LAUNCHERS["torchrun"] | {"RANK": "two"}, "RANK must be an integer from 0 to 15, got 'two'; torchrun"),
        (LAUNCHERS["torchrun"] | {"LOCAL_RANK": "-2"}, "LOCAL_RANK must be an integer from 0"),
        (LAUNCHERS["torchrun"] | {"MASTER_PORT": "65536"}, "MASTER_PORT must be an integer from 1 to 65535"),
        (LAUNCHERS["torchrun"] | {"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1, got '0'"),
        (LAUNCHERS["torchrun"] | {"RANK": "16"}, "RANK must be an integer from 0 to 15, got '16'; torchrun"),
        (LAUNCHERS["torchrun"] | {"MASTER_PORT": "x"}, "MASTER_PORT must be an integer from 1 to 65535, got 'x'"),
        (LAUNCHERS["torchrun"] | {"LOCAL_RANK": "4"}, "LOCAL_RANK must be an integer from 0 to 3 (4 GPUs here), got"),
        (LAUNCHERS["Open MPI"] | {"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK must be an integer from 0"),
        (LAUNCHERS["Open MPI"] | {"MASTER_ADDR": None}, "MASTER_ADDR not set; Open MPI needs this: mpirun"),
        (LAUNCHERS["MPICH"] | {"PMI_SIZE": "many"}, "PMI_SIZE must be an integer of at least 1, got 'many'; MPICH"),
        (LAUNCHERS["Slurm"] | {"SLURM_PROCID": "16"}, "SLURM_PROCID must be an integer from 0 to 15, got '16'; Slurm"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_LOCALID, MASTER_ADDR not set; Slurm needs this: srun"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK is set, but no number of ranks"),
    ],
)
def test_one_line_names_the_wrong_variable(environ, variables, words):
    environ(variables)
    with pytest.raises((RuntimeError, ValueError)) as raised:
        environment.read(gpus=4)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_where_rank_0_is_may_be_left_out(environ):
    """Under Slurm, and where all ranks are on one host."""
    environ(LAUNCHERS["Slurm"] | {"MASTER_PORT": None})
    assert (environment.read(0).address, environment.read(0).port) == ("h", 29500)
    environ(LAUNCHERS["Slurm"] | {"SLURM_STEP_NODELIST": "node[07-08]"})  # a step on some of the job's hosts
    assert environment.read(0).address == "node07"
    environ(LAUNCHERS["Open MPI"] | {"MASTER_ADDR": None, "OMPI_COMM_WORLD_LOCAL_SIZE": "16"})
    assert environment.read(0).address == "127.0.0.1"
    for hosts, first in [("node[03-05,09],x", "node03"), ("a,b", "a"), ("r[1-2]n[07,9]", "r1n07"), ("n7", "n7")]:
        assert environment.first_host(hosts) == first


def test_not_every_process_was_launched(environ):
    environ({})
    assert not environment.launched()
    environ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"})  # a shell in an allocation
    assert not environment.launched()


@pytest.mark.parametrize(
    "here, bound, omp, threads", [(4, 16, None, 4), (4, 2, None, 2), (32, 16, None, 1), (4, 16, "7", 3)]
)
def test_ranks_share_the_cores(monkeypatch, here, bound, omp, threads):
    """Unless OMP_NUM_THREADS says how many threads a rank has, or the launcher has bound it to fewer cores."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(bound), raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if omp:
            monkeypatch.setenv("OMP_NUM_THREADS", omp)
        launch._set_threads(here)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# Ranks that do not meet. Each of these starts is over before there is a process group.


def place(rank=0, size=2, address="127.0.0.1", port=None):
    return environment.Place(rank, size, 0, size, address, port or free_port())


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def meet(place, timeout=2):
    """The message of a start that fails."""
    with pytest.raises(RuntimeError) as raised:
        launch._meet(place, timeout)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_another_program_at_the_port():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        # Rank 0 wants to listen there, rank 1 to talk.
        for rank, words in ((0, "cannot listen at {}: another"), (1, "connected to {}, but no store answered")):
            assert meet(place(rank, port=port)).startswith(f"rank {rank} of 2 {words.format(f'127.0.0.1:{port}')}")


def test_nobody_at_the_port_and_no_such_host():
    port = free_port()
    assert re.search(f"127.0.0.1:{port}.*rank 0 was not started", meet(place(1, port=port)))
    assert "the host in MASTER_ADDR, 'no-such-host.invalid'" in meet(place(1, address="no-such-host.invalid"), 15)


def test_a_rank_that_does_not_come_and_two_ranks_0(monkeypatch):
    here = place(size=3)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, here, 4)
        time.sleep(1)
        monkeypatch.setattr(launch, "_ME", "the second process")
        assert "two processes were given rank 0 of 3" in meet(here)
        assert "rank 0 of 3 has waited in vain for rank 1, 2 to start" in first.result()


# Commands.


TOO_LONG = pytest.mark.skipif(engine.name == "cuda", reason="what Triton's interpreter would take too long for")


@pytest.mark.parametrize(
    "flags, variables, words",
    [
        ("--gpus 0", {}, "--gpus must be at least 1, got 0"),
        ("--dim 0", {}, "--dim must be"),
        ("--seq -5", {}, "--seq must be at least 1, got -5"),
        ("--heads 0", {}, "--heads must be at least 1, got 0"),
        ("--dtype foo", {}, "--dtype must be float32, float16 or bfloat16, got foo"),
        ("--layout ring", {}, "--layout must be zigzag, contiguous or striped, got ring"),
        pytest.param("--dtype bfloat16 --seq 2048", {}, "Use --dtype float32, or --seq 256 at most.", marks=TOO_LONG),
        ("--strategy foo", {}, "--strategy must be query_parallel, star, ulysses or ring, got foo"),
        ("--strategy ulysses --gpus 3", {}, "each rank whole heads: 3 ranks cannot share --heads 4"),
        ("--strategy query_parallel --layout striped", {}, "takes --layout zigzag or contiguous, not striped"),
        ("", {"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set; torchrun needs this"),
        ("", LAUNCHERS["by hand"] | {"MASTER_ADDR": "no-such-host.invalid"}, "cannot find the host in MASTER_ADDR"),
    ],
)
def test_a_demo_that_cannot_begin_ends_in_one_line(environ, flags, variables, words):
    environ(variables)
    app = demo.typer.Typer()
    app.command()(demo.main)
    result = CliRunner().invoke(app, flags.split())
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert words in str(result.output) and result.output.strip().count("\n") == 0


@pytest.mark.parametrize(
    "start, options, words",
    [(launch.spawn, {"world_size": n}, f"ranks must be an integer of at least 1; got {n!r}") for n in (0, -1, 1.5, "2")]
    + [
        (start, {"timeout": t}, f"timeout must be a number of seconds greater than 0; got {t!r}")
        for start in (partial(launch.spawn, world_size=2), launch.init)
        for t in (0, -1, "x", float("nan"), float("inf"))
    ],
)
def test_no_ranks_and_no_time_for_an_exchange_are_refused_before_anything_starts(start, options, words):
    with pytest.raises(ValueError, match=words):
        start(**options | ({} if start is launch.init else {"fn": print}))


# The verdict, from what the ranks have published.


def published(*places, silent=(), raised=None, **calls):
    """(before, after): the notes of ranks at these places, of which the silent ones do not change."""
    after = []
    for rank, found in enumerate(places):
        call = [] if found is None else [list(found), calls.get(f"rank{rank}", {}), (raised or {}).get(rank, "")]
        after.append({"beats": 7, "calls": {"g": call} if call else {}})
    return [note | {"beats": 7 if rank in silent else 3} for rank, note in enumerate(after)], after


@pytest.mark.parametrize(
    "notes, line",
    [
        (  # rank 2 sleeps, or has left a call out
            published((4, 1), (4, 1), (3, 1), (4, 1)),
            "rank 2 of 4 stands at call 3, hop 1; the others wait at call 4, hop 1 (it died, or hangs)",
        ),
        (  # a rank is further back than the dead one because it still computes
            published((4, 3), (4, 1), (4, 2), (4, 3), silent=[2]),
            "rank 2 of 4 stands at call 4, hop 2; the others wait at call 4, hop 1 to call 4, hop 3 (it died",
        ),
        (  # a host is cut off
            published((4, 1), (4, 1), (4, 1), (4, 0), silent=[2, 3]),
            "rank 2 of 4 stands at call 4, hop 1, rank 3 of 4 stands at call 4, hop 0; the others wait at call 4",
        ),
        (  # what rank 1 raised says more than where it stands, or that it has ended
            published((4, 3), (4, 2), (4, 3), silent=[1], raised={1: "rank 1 of 3 raised MemoryError"}),
            "rank 1 of 3 raised MemoryError",
        ),
        (  # of these ranks only rank 0 stands elsewhere, perhaps for want of a backward
            published((3, 1), (4, 0), rank1={"function": "backward of attention"}),
            "rank 0 of 2 stands at call 3, hop 1; the others wait at call 4, hop 0 (it died, or hangs, or its inputs "
            "require no gradient, so that it makes no backward)",
        ),
        (published((1, 0), None), "rank 1 of 2 stands at call 0, hop 0; the others wait at call 1, hop 0"),
        (published((4, 1), (4, 1)), "all 2 ranks stand at call 4, hop 1, and none is silent"),
        (  # rank 1 has stopped, too, because of that
            published((4, 1), (4, 0), (4, 1), silent=[1], rank0={"a": "x"}, rank1={"a": "y"}, rank2={"a": "x"}),
            "the ranks make different calls: call 4 has a x on ranks 0, 2 and y on rank 1",
        ),
        (  # other calls of another number are no difference
            published((3, 1), (4, 1), rank0={"a": "x"}, rank1={"a": "y"}),
            "rank 0 of 2 stands at call 3, hop 1",
        ),
    ],
)
def test_verdict(notes, line):
    told = verdict.verdict("g", *notes)
    assert told.startswith(line) and ("gradient" in told) == ("gradient" in line)


# A device that is behind the calling thread, as with NCCL; its events here are made by hand.


class Event:
    """An event of a device, which passes it when `over` is set."""

    made = []

    def __init__(self):
        self.over = False
        Event.made.append(self)

    def record(self):
        self.over = False

    def query(self):
        if self.over == "failed":
            raise RuntimeError("device-side assert triggered")
        return self.over


@pytest.fixture
def note(monkeypatch):
    """A Note over a device of its own, with a timeout of 10 s, and no process group."""
    return on_device(monkeypatch.setattr, SimpleNamespace(group_name="g"))


def on_device(setattr, group):
    Event.made = []
    setattr(torch.cuda, "Event", Event)
    setattr(torch.cuda, "current_device", lambda: 0)
    setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    if group.__class__ is SimpleNamespace:
        setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    setattr(dist, "get_backend", lambda *_: "nccl")
    setattr(note_module, "seconds", lambda _: 10.0 if group.__class__ is SimpleNamespace else 2.0)
    return note_module.Note(group, SimpleNamespace(tell_failure=None))


def test_a_note_says_where_the_device_is(note):
    """Before the first call's hop, in it, and then in the second call, where the calling thread is already."""
    one_hop(note)
    note.begin({"causal": True}, b"", 1)
    for event, place in zip(Event.made, ((1, 0, {}), (1, 1, {}), (2, 0, {"causal": True})), strict=True):
        assert note.place() == place
        event.over = True
    assert note.place() == (2, 0, {"causal": True}) and not note.ahead
    note.passed()
    assert len(Event.made) == 3  # an event that is over is used again


def one_hop(note):
    note.begin({}, b"", 0)
    note.begin_hop()
    note.passed()


def test_a_device_is_stuck_in_an_exchange_and_not_in_what_it_computes_before(note, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(note_module.time, "monotonic", lambda: now[0])
    one_hop(note)
    assert not note.stuck()
    now[0] = 100.0
    assert not note.stuck()  # It has not reached the call.
    Event.made[0].over = True
    assert not note.stuck()  # It has been in the exchange only since now.
    now[0] = 109.0
    assert not note.stuck()
    now[0] = 111.0
    assert note.stuck()
    Event.made[1].over = True
    assert not note.stuck()


def test_a_graph_that_is_captured_leaves_no_event(note, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one_hop(note)
    assert not Event.made and note.place() == (1, 1, {})


def test_a_device_that_failed_is_noticed(note):
    one_hop(note)
    Event.made[0].over = "failed"
    assert note.place() == (1, 0, {}) and note.broken and not note.stuck()


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_a_failure_began_at_the_rank_that_can_have_had_it_first(places):
    """A death comes before an error of a rank's own, this before silence, and last what ranks say of each other."""
    silent = None  # no outcome
    kinds = "died: exit code 3", "Traceback\nValueError: x", silent, "Traceback\nsteps.RingError: y"
    for earlier, later in itertools.combinations(kinds, 2):
        outcomes = {
            rank: (None, problem) for rank, problem in zip(places, (earlier, later), strict=True) if problem != silent
        }
        assert launch._explain(outcomes, 2, 9).startswith(f"rank {places[0]} of 2 failed."), (earlier, later)


@over_gloo
def test_a_process_whose_device_is_stuck_ends_with_the_verdict(tmp_path):
    """Rank 0 has been for too long in an exchange that rank 1 has not begun; rank 2 hears of it from the store.

    The calling threads of both wait for ever, as if they waited for the device: only another thread ends a process.
    """
    with launch.Ranks(3) as ranks, pytest.raises(launch.RankError) as raised:
        ranks.run(wait_for_a_device, tmp_path)
    line = "rank 1 of 3 stands at call 0, hop 0; the others wait at call 1, hop 1 (it died, or hangs)"
    for rank in (0, 2):
        assert raised.value.outcomes[rank] == (None, "died: exit code 1")
        assert (tmp_path / str(rank)).read_text() == line


def test_whoever_hears_a_verdict_ends_when_all_have_heard_it(monkeypatch):
    """The store ends with rank 0, which may hear a verdict first; another rank then only found the store gone."""
    happened = []

    def end(code):
        happened.append(f"ends with {code}")
        raise RuntimeError  # as the store does for a publishing thread

    monkeypatch.setattr(board.time, "sleep", happened.append)
    monkeypatch.setattr(watch.os, "_exit", end)
    store = dist.HashStore()
    store.set("verdict g", "rank 2 died")
    here = SimpleNamespace(store=store, notes={"g": SimpleNamespace(name="g")}, publish=lambda store: None)
    here.let_all_hear = partial(board.Board.let_all_hear, here)
    hearer = SimpleNamespace(board=here, end_process=True, _tell=happened.append, _alive=lambda: True)
    hearer._hear = partial(watch.Watch._hear, hearer)
    watch.Watch._publishing(hearer)
    assert happened == ["rank 2 died", board.SILENCE, "ends with 1"]


def wait_for_a_device(folder):
    rank, watched = dist.get_rank(), watch._watch
    if rank == 1:
        return  # its process goes on, and so does its publishing thread
    note = on_device(setattr, dist.group.WORLD)
    watched.say, watched.board.notes[note.name] = (folder / str(rank)).write_text, note
    if rank == 0:  # only the guarding thread is left
        watched.board.store = SimpleNamespace(set=gone)
        threading.Thread(target=watched._guarding, args=(note,), daemon=True).start()
    note.begin({}, b"", 0)
    Event.made[0].over = True
    note.begin_hop()
    note.passed()
    threading.Event().wait()


def gone(*_):
    raise RuntimeError("the store is gone")


# Ranks over gloo, of which rank 2 fails after three calls. Rank 0 is not beside it.

TIMEOUT = 3
# On four GPUs the neighbours of the culprit need not wait at the same hop.
BEHIND = r"rank {c} of {n} stands at call 3, hop \d; the others wait at call 4, hop \d(?: to call 4, hop \d)? "
BEHIND += r"\(it died, or hangs\)"
DURING = r"rank {c} of {n} stands at call 4, hop 1; the others wait at call 4, hop \d.* \(it died, or hangs\)"


@over_gloo
@pytest.mark.parametrize(
    "faults",
    [
        [("kill later", "relay"), ("sleep", "relay"), ("leave", "relay"), ("kill", "fetch")],
        pytest.param(
            [("kill", "relay"), ("stop", "relay"), ("stop", "fetch"), ("sleep", "fetch"), ("leave", "fetch")],
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_survivor_names_the_culprit(faults):
    """faults: [(how, transport)]. What the ranks of each raised, all at once."""
    with ThreadPoolExecutor() as pool:
        spawned = {fault: pool.submit(launch.spawn, faulty_rank.fail, 4, *fault, TIMEOUT, 2) for fault in faults}
    for (how, transport), future in spawned.items():
        outcomes, what = future.exception().outcomes, (how, transport, str(future.exception()))
        assert what[-1].startswith("rank 2 of 4 failed."), what
        died = {"kill": "killed by SIGKILL", "kill later": "killed by SIGKILL", "leave": "exit code 3"}
        assert outcomes.get(2) == ((None, f"died: {died[how]}") if how in died else None), what
        for rank in (0, 1, 3):
            *_, line = outcomes[rank][1].strip().splitlines()
            expected = "RingError: " + (DURING if how == "kill later" else BEHIND).format(c=2, n=4)
            assert re.search(expected, line) and f"Rank {rank} of 4 failed while" in line, what


def inputs(rank, ranks, S, layout):
    random = torch.Generator().manual_seed(S)
    return [Layout(layout, S, ranks).shard(torch.randn(1, 2, S, 8, generator=random), rank) for _ in range(3)]


# What takes the place of comparing calls over NCCL, where no host waits for it.


@over_gloo
def test_over_nccl_a_signature_travels_with_the_first_hop():
    """Here over gloo, but as over NCCL. Rank 1 sends another signature, and gets another one than its own."""
    with launch.Ranks(3, timeout=3) as ranks, pytest.raises(launch.RankError) as raised:
        ranks.run(differ_as_over_nccl)
    outcomes = raised.value.outcomes
    for rank in (1, 2):
        assert "RuntimeError: the ranks of the ring make different calls" in outcomes[rank][1]
    line = "the ranks make different calls: call 7 has layout zigzag on ranks 0, 2 and contiguous on rank 1"
    assert f"RingError: {line}. Rank 0 of 3 failed while" in outcomes[0][1]


def differ_as_over_nccl():
    init, exchange, exchanges = Comm.__init__, board.Board.exchange, []

    def as_over_nccl(self, group=None):
        init(self, group)
        self.through_host = False

    Comm.__init__ = as_over_nccl
    board.Board.exchange = lambda *arguments, **options: exchanges.append(1) or exchange(*arguments, **options)
    q, k, v = inputs(dist.get_rank(), 3, 12, "zigzag")
    numbers = []
    for layout in 3 * ("zigzag", "contiguous"):
        step04.forward(q, k, v, S=12, layout=layout, block=step00_naive, transport="relay")
        numbers.append(watch.note(dist.group.WORLD).number)
    assert len(exchanges) == 2  # one for each call at its first sight
    assert numbers == [0, 1, 0, 1, 0, 1]  # fetch gives each of these calls a barrier of its own
    layout = "contiguous" if dist.get_rank() == 1 else "zigzag"
    step04.forward(q, k, v, S=12, layout=layout, block=step00_naive, transport="relay")


def test_every_call_has_a_barrier_of_its_own():
    made = SimpleNamespace(comm=SimpleNamespace(size=4), gates=[])
    made.new_memory = lambda _: SimpleNamespace(handle=object())
    gates = [Side.gate(made, number) for number in range(300)]
    assert len(set(gates)) == 300 and gates[0] == Side.gate(made, 0)
    assert max(channel for _, channel in gates) < 512 // 4


# Programs, started as launchers start them.


def start(command, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"} | variables
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, command)), env=environment, cwd=ROOT, **pipes)


def ended(processes, limit=90):
    """[(exit code, what it printed)]; a process that has not ended by then is killed."""

    def wait(process):
        timer = threading.Timer(limit, process.kill)
        timer.start()
        printed, _ = process.communicate()
        timer.cancel()
        return process.returncode, printed

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(wait, processes))


def faulty_ranks(how, transport, ranks, timeout, culprit, hosts=("",), address="127.0.0.1"):
    """The processes of a program in which one rank fails. hosts: what to put before the command on each host."""
    port, here = free_port(), ranks // len(hosts)
    processes = []
    for rank in range(ranks):
        host = hosts[rank // here].split()
        command = [*host, sys.executable, "-m", "support.faulty_rank", how, transport, timeout, culprit]
        variables = dict(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank % here), MASTER_ADDR=address)
        processes.append(start(command, **variables, LOCAL_WORLD_SIZE=str(here), MASTER_PORT=str(port)))
    return processes


LONG = [over_gloo, pytest.mark.long]
KEEPER = r"rank 0 of {n}, which keeps the store at 127.0.0.1:\d+, does not answer \(.*"
OTHER_CALL = "the ranks make different calls: call 4 has layout (zigzag|contiguous) on .* and (zigzag|contiguous) on .*"
PROGRAMS = [  # (what the culprit does, the transport, what the others print, the culprit, or None for the last but one)
    *(pytest.param(how, "relay", BEHIND, None, marks=LONG) for how in ("kill", "stop", "sleep", "leave")),
    *(pytest.param(how, "relay", KEEPER, 0, marks=LONG) for how in ("kill", "stop")),
    *(
        pytest.param(how, transport, line, None, marks=[pytest.mark.gpu, pytest.mark.multigpu])
        for how, line in (("kill", BEHIND), ("sleep", BEHIND), ("differ", OTHER_CALL))
        for transport in ("relay", "fetch")
    ),
]


@pytest.mark.parametrize("how, transport, line, culprit", PROGRAMS)
def test_every_survivor_of_a_program_prints_the_culprit(how, transport, line, culprit):
    """It ends by itself, with an exit code other than 0 and the line."""
    ranks, timeout = (4, 4) if engine.name == "cpu" else (min(torch.cuda.device_count(), 4), 6)
    culprit = max(1, ranks - 2) if culprit is None else culprit
    processes = faulty_ranks(how, transport, ranks, timeout, culprit)
    failed = processes.pop(culprit)
    try:
        results = ended(processes)
    finally:
        failed.kill()
        failed.communicate()
    for code, printed in results:
        assert code not in (0, -signal.SIGKILL), (how, code, printed)
        said = [words for words in printed.splitlines() if re.match(line.format(c=culprit, n=ranks) + "$", words)]
        assert len(said) == 1, (how, printed)


@over_gloo
@pytest.mark.long
def test_every_survivor_under_torchrun_prints_the_culprit():
    """torchrun ends the others as soon as one has ended, so that each must have printed its line before that.

    For the same reason none of them sees a rank that was killed, which torchrun names itself.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    [(code, printed)] = ended([start([*torchrun, "-m", "support.faulty_rank", "sleep", "relay", 4, 2])])
    said = re.findall("^" + BEHIND.format(c=2, n=4), printed, re.MULTILINE)
    assert code == 1 and len(said) >= 3, printed  # a rank that sleeps prints it, too


# Two hosts, as two network namespaces of this one.


@pytest.fixture
def hosts():
    """What to put before a command, on each of two hosts; the first has the address 10.77.0.1."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two hosts need Linux, root and the command ip")
    names = [f"ring{os.getpid()}{side}" for side in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)

    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"this machine allows no network namespaces: {made.stderr.strip()}")
        made = ip("link", "add", "ring0", "netns", names[0], "type", "veth", "peer", "name", "ring0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "ring0")
            for link in ("lo", "ring0"):
                ip("-n", name, "link", "set", link, "up")
        if made.returncode:
            pytest.skip(f"this machine allows no link between network namespaces: {made.stderr.strip()}")
        yield [f"ip netns exec {name} env GLOO_SOCKET_IFNAME=ring0" for name in names]
    finally:
        for name in names:
            ip("netns", "delete", name)


@over_gloo
@pytest.mark.long
def test_the_demo_on_two_hosts(hosts):
    processes = []
    for number, host in enumerate(hosts):
        torchrun = (
            f"-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank {number} --master-addr 10.77.0.1"
        )
        command = f"{host} {sys.executable} {torchrun} --master-port 29500 -m steps.step04_ring.demo --seq 67 --dim 16"
        processes.append(start(command.split()))
    results = ended(processes, 120)
    assert [code for code, _ in results] == [0, 0], "\n".join(printed for _, printed in results)
    differences = re.findall(r" (?:out|lse|dq|dk|dv) ([\d.e+-]+)", results[0][1].split("largest differences")[1])
    assert "4 ranks over gloo" in results[0][1] and len(differences) == 5 and max(map(float, differences)) < 1e-5


@over_gloo
@pytest.mark.long
def test_a_link_between_two_hosts_goes_down(hosts):
    """Ranks 0 and 1 are on one side, 2 and 3 on the other; each rank has a neighbour on the other side."""
    processes = faulty_ranks("on", "relay", 4, 4, -1, hosts, "10.77.0.1")
    for process in processes:
        while not process.stdout.readline().startswith("begun"):
            assert process.poll() is None
    time.sleep(1)
    name = hosts[0].split()[3]
    subprocess.run(["ip", "-n", name, "link", "set", "ring0", "down"], check=True)
    for rank, (code, printed) in enumerate(ended(processes)):
        assert code not in (0, -signal.SIGKILL), (rank, code, printed)
        [line] = [words for words in printed.splitlines() if re.match(r"(\[rank\d\]: )?\S*RingError: ", words)]
        across = ("rank 2 of 4 stands", "rank 3 of 4 stands") if rank < 2 else ("rank 0 of 4, which keeps the store",)
        assert all(words in line for words in across), (rank, line)


@pytest.mark.parametrize("problem", [RuntimeError, TimeoutError])
def test_what_the_backend_or_the_store_raises_is_explained(problem, monkeypatch):
    """A store that does not answer raises another error than a backend that has lost its connection."""
    comm = object.__new__(Comm)
    comm.note, comm.rank, comm.size = None, 1, 4
    monkeypatch.setattr(watch, "judge", lambda note: "rank 0 is gone")
    told = "rank 0 is gone. Rank 1 of 4 failed while comparing arguments: no answer$"
    with pytest.raises(step04.RingError, match=told), comm.explained("comparing arguments"):
        raise problem("no answer. More of it")
