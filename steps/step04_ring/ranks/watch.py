# SPDX-License-Identifier: MIT
"""Names the rank that the others wait for: every rank publishes where it stands, and whoever fails first compares.

    the calling thread      note.begin(...), begin_hop(), passed(): counters, and with NCCL an event on the stream
    the publishing thread   four times a second: writes this rank's note to the store, and looks for a verdict there
    the guarding thread     with NCCL: fails when the device has been in one exchange for longer than the timeout
    whoever fails first     reads all notes twice and writes the verdict, which every other rank repeats
    a block that raises     note.failed(...): the notes say so until the rank's next call

The idea: in a ring everybody soon waits for everybody, so the neighbour that a rank waits for is seldom the cause. The
cause is a rank whose call is not the others' call of that number; or one whose block raised; or a rank whose note does
not change any more (its process died, or was stopped); or the rank that stands furthest back (it does something else,
or left a call out).
A note says what was begun. If a rank dies between two calls, what was finished is the same on all ranks. A dead rank's
last note may be a quarter of a second old, so that the rank may have come further than the verdict says.

An exchange over gloo raises in Python by itself. With NCCL, or memory that GPUs share, a call returns before its
exchanges have happened, and one that never ends blocks the process for ever. Only there does a thread end the process,
and only there does a thread print that another rank's block raised: over gloo agree.py raises for it.
Left out: a CUDA graph that is replayed runs no Python and leaves no note. Needs torch only.
"""

import atexit
import collections
import contextlib
import json
import os
import queue
import sys
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

PERIOD = 0.25  # seconds between two notes of a rank
SILENCE = 1.0  # A rank whose note does not change for so long is taken for dead.
PATIENCE = 1.5  # seconds that the store may take to answer whoever failed
BACKWARD = "backward of attention"  # the function of a call that autograd makes
NO_BACKWARD = "its inputs require no gradient, so that it makes no backward"

_watch = None  # this process's Watch
_starts = 0  # how often launch.init has started one: a store may outlive a process group and its notes


class Note:
    """Where this rank stands in the calls of one process group: in which call, and in which hop of it."""

    def __init__(self, group):
        self.name, self.members = group.group_name, dist.get_process_group_ranks(group)
        self.now = 0, 0, {}  # (call, hop, arguments), which is replaced as a whole because other threads read it
        self.signature, self.number = bytes(16), None  # of the call, as agree.py gives them
        self.compared = None  # the store's key of the last call whose arguments were compared
        self.failure = ""  # in words, what this rank's block raised in its last call
        self.heard = ""  # the last failure that this process has printed or had itself
        self.on_device = dist.get_backend(group) != "gloo"  # Then the calling thread runs ahead of the exchanges.
        self.device = torch.cuda.current_device() if self.on_device else None
        self.timeout = seconds(group)
        self.ahead = collections.deque()  # (event, what `now` was): what the device has not finished
        self.unused = collections.deque()  # events to use again, because making one takes longer than recording it
        self.first, self.since = None, 0.0  # the first of `ahead`, and since when it is the first
        self.broken = False  # whether the device has failed
        self.lock = threading.Lock()  # between the threads that read; the calling thread only appends

    def begin(self, arguments, signature, number):
        """A new call. arguments: a dict, of which the verdict shows what differs between two ranks."""
        self.signature, self.number = signature, number
        self.now, self.failure = (self.now[0] + 1, 0, arguments), ""
        self.passed()  # when the device reaches the call; what it still computes before that is no waiting

    def begin_hop(self):
        """The next exchange of this call is about to be posted; returns its number, from 1."""
        call, hop, arguments = self.now
        self.now = call, hop + 1, arguments
        return hop + 1

    def failed(self, error):
        """This rank's part of the call has raised, which the others are told at once."""
        rank, what = self.members.index(dist.get_rank()), f"{type(error).__name__}: {error}".partition("\n")[0]
        self.failure = self.heard = f"rank {rank} of {len(self.members)} raised {what} in {where(self.now[:2])}"
        _watch.tell_failure(self)

    def passed(self):
        """The exchange is over when the device gets to this point of the current stream.

        While a CUDA graph is captured nothing is recorded, because its events cannot be queried.
        """
        if self.on_device and not torch.cuda.is_current_stream_capturing():
            event = self.unused.popleft() if self.unused else torch.cuda.Event()
            event.record()
            self.ahead.append((event, self.now))

    def place(self):
        """The (call, hop, arguments) that this rank is in, and with NCCL those that its device is in."""
        with self.lock:
            while self.ahead and self._over(self.ahead[0][0]):
                self.unused.append(self.ahead.popleft()[0])
            return self.ahead[0][1] if self.ahead else self.now

    def _over(self, event):
        try:
            with torch.cuda.device(self.device):  # else this thread would start using the first GPU
                return event.query()
        except RuntimeError:  # an earlier kernel failed; the calling thread gets this error, too
            self.broken = True
            return False

    def stuck(self):
        """Whether the device has been in the same exchange for longer than the timeout."""
        _, hop, _ = self.place()
        first = self.ahead[0] if self.ahead else None
        if first is not self.first:
            self.first, self.since = first, time.monotonic()
        return first is not None and hop > 0 and time.monotonic() - self.since > self.timeout


class Watch:
    """The notes of a process, one a group, and the threads that publish them and act on them."""

    def __init__(self, store, say, end_process, keeper):
        self.world, self.rank = weakref.ref(dist.group.WORLD), dist.get_rank()
        # A connection each for publishing, for comparing, and for whoever fails: an operation blocks its connection.
        stores = (dist.PrefixStore(f"watch {_starts}", store.clone()) for _ in range(3))
        self.store, self.compared, self.at_failure = stores
        self.say, self.end_process, self.keeper = say, end_process, keeper
        self.notes, self.beats, self.lock = {}, 0, threading.Lock()
        self.told, self.unreachable = False, False  # the verdict; the store
        self._publish(self.store)  # at once, so that a rank that never calls is known, too
        self.ending, self.publisher = threading.Event(), threading.Thread(target=self._publishing, daemon=True)
        self.publisher.start()

    def note(self, group):
        """The Note of a group."""
        with self.lock:
            if group.group_name not in self.notes:
                note = self.notes[group.group_name] = Note(group)
                if note.on_device:
                    threading.Thread(target=self._guarding, args=(note,), daemon=True).start()
            return self.notes[group.group_name]

    def exchange(self, note, text, wait):
        """Each rank's text for this call of the group, or None without `wait`. Collective."""
        key, store = f"call {note.name} {note.now[0]} of rank", self.compared
        store.set(f"{key} {dist.get_rank()}", text)
        if not wait:
            return None
        store.set_timeout(timedelta(seconds=note.timeout))
        keys = [f"{key} {rank}" for rank in note.members]
        texts = answered(lambda: store.multi_get(keys), note.timeout + PATIENCE)
        if note.compared:  # Whoever has written a text for this call has read those for the call compared before.
            store.delete_key(note.compared)
        note.compared = f"{key} {dist.get_rank()}"
        return texts

    def judge(self, note):
        """The verdict on the failure of a call of this group: the one that another rank has given, or a new one."""
        try:
            line = answered(lambda: self._judge(note), SILENCE + PATIENCE)
        except Exception:
            line = f"{self.keeper} does not answer (it died, or hangs, or its host cannot be reached)"
            self.unreachable = True
            self._tell(line)
            return line
        self._tell(line)
        let_all_hear()
        return line

    def _judge(self, note):
        key, store = f"verdict {note.name}", self.at_failure
        if not store.check([key]):
            self._publish(store)
            before = after = [self._read(rank) for rank in note.members]
            if not differing(note.name, before):
                time.sleep(SILENCE)
                self._publish(store)  # This rank is not silent, even if its publishing thread has ended.
                after = [self._read(rank) for rank in note.members]
            store.compare_set(key, "", verdict(note.name, before, after))  # The first verdict stays.
        return store.get(key).decode()

    def tell_failure(self, note):
        """Publishes that a block has raised. The process may end before the publishing thread gets a turn."""

        def tell():
            self._publish(self.at_failure)
            self.at_failure.set(f"failure {note.name}", note.failure)

        with contextlib.suppress(Exception):  # Where the store is gone, the block's own exception says more.
            answered(tell, PATIENCE)

    def _read(self, rank):
        key = f"note {rank}"
        return json.loads(self.at_failure.get(key)) if self.at_failure.check([key]) else {"beats": 0, "calls": {}}

    def _publish(self, store):
        self.beats += 1
        calls = {}
        for name, note in list(self.notes.items()):
            *place, arguments = note.place()
            calls[name] = place, {name: str(value) for name, value in arguments.items()}, note.failure
        store.set(f"note {self.rank}", json.dumps({"beats": self.beats, "calls": calls}))

    def _publishing(self):
        while self._alive():
            try:
                self._publish(self.store)
                for name, note in list(self.notes.items()):
                    if self.store.check([f"verdict {name}"]):
                        self._tell(self.store.get(f"verdict {name}").decode())
                        if self.end_process or note.on_device and not note.broken:
                            let_all_hear()
                            os._exit(1)
                    if note.on_device and self.store.check([f"failure {name}"]):
                        line = self.store.get(f"failure {name}").decode()
                        if line != note.heard:
                            note.heard = line
                            print_line(line)
            except RuntimeError:  # The store is gone; whoever fails says so.
                return

    def _guarding(self, note):
        while self._alive():
            if note.stuck() or note.broken:
                self.judge(note)
                if note.broken:  # The calling thread gets an error by itself.
                    return
                os._exit(1)

    def _tell(self, line):
        """Says the verdict, once in a process."""
        with self.lock:
            if self.say and not self.told:
                self.told = True
                self.say(line)

    def _alive(self):
        """False when the process or its process group ends; after one period."""
        ended = self.ending.wait(PERIOD)
        return not ended and dist.is_initialized() and dist.group.WORLD is self.world()

    def end(self):
        """Ends the publishing thread. If Python ended while a thread returns from the store's C++, it would abort."""
        self.ending.set()
        self.publisher.join(PERIOD if self.unreachable else 10)  # A thread that waits for ever does no harm.


def start(store=None, say=None, end_process=False, keeper="the process that keeps the store"):
    """Watches the calls of this process in the process group that torch.distributed has just initialised.

    store: where the notes go, by default the group's own. say(line) is told the verdict, by default where the process
    is ended after it. end_process: whether it is ended over gloo, too, where an exchange raises in the end. keeper: the
    process in which the store is, in words.
    """
    global _watch, _starts
    _starts += store is not None
    if say is None and (end_process or dist.get_backend() != "gloo"):
        say = print_line
    _watch = Watch(store or dist.distributed_c10d._get_default_store(), say, end_process, keeper)


def note(group):
    """The Note of a group of the running process group, which is watched from the first call on at the latest."""
    if _watch is None or _watch.world() is not dist.group.WORLD:
        start()
    return _watch.note(group)


def judge(note):
    """One line that names the culprit for the failure of a call; finding it takes up to 3 s."""
    return _watch.judge(note)


def exchange(note, text, wait):
    """Each rank's JSON `text` for the note's call, decoded; without `wait` the text is only written."""
    texts = _watch.exchange(note, text, wait)
    return texts and [json.loads(text) for text in texts]


def verdict(group, before, after):
    """One line that names the culprit.

    before, after: each rank's note as it was published, read twice: {"beats": n, "calls": {group: [(call, hop),
    arguments, what its block raised]}}.
    """
    if line := differing(group, after):
        return line
    if raised := [failure for *_, failure in (standing(group, note) for note in after) if failure]:
        return "; ".join(raised)
    N, places = len(after), [tuple(standing(group, note)[0]) for note in after]
    silent = [rank for rank in range(N) if before[rank]["beats"] == after[rank]["beats"]]
    culprits = silent or [rank for rank in range(N) if places[rank] == min(places)]
    others = sorted(place for rank, place in enumerate(places) if rank not in culprits)
    if not others:
        return f"all {N} ranks stand at {where(places[0])}, and none is silent (a connection broke)"
    stand = ", ".join(f"rank {rank} of {N} stands at {where(places[rank])}" for rank in culprits)
    wait = " to ".join(dict.fromkeys(map(where, (others[0], others[-1]))))
    waiting = [standing(group, after[rank])[1] for rank in range(N) if rank not in culprits]
    why = "it died, or hangs" + f", or {NO_BACKWARD}" * any(call.get("function") == BACKWARD for call in waiting)
    return f"{stand}; the others wait at {wait} ({why})"


def differing(group, notes):
    """One line for ranks that are in calls of the same number but with different arguments, otherwise ""."""
    places, calls, _ = zip(*(standing(group, note) for note in notes), strict=True)
    latest = max(call for call, _ in places)
    line = difference({rank: calls[rank] for rank, (call, _) in enumerate(places) if call == latest})
    return line and f"the ranks make different calls: call {latest} has {line}"


def standing(group, note):
    """((call, hop), arguments, failure) of a published note; before its first call a rank stands at call 0."""
    return note["calls"].get(group, [(0, 0), {}, ""])


def where(place):
    """A (call, hop) in words; hop 0 is what comes before the first hop, such as comparing the arguments."""
    return f"call {place[0]}, hop {place[1]}"


def difference(calls):
    """What differs between the ranks' calls, {rank: {name: value}}: "causal True on rank 2, False on ranks 0, 1"."""
    parts = []
    for name in dict.fromkeys(name for call in calls.values() for name in call):
        ranks = {}  # value -> the ranks that have it
        for rank, call in calls.items():
            ranks.setdefault(call.get(name), []).append(rank)
        if len(ranks) > 1:
            values = (f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items())
            parts.append(f"{name} {' and '.join(values)}")
    return "; ".join(parts)


def seconds(group):
    """The timeout of a process group."""
    device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
    return group._get_backend(torch.device(device)).options._timeout.total_seconds()


def answered(question, limit):
    """question(), asked in a thread of its own, because the store or a name server may never answer.

    Raises TimeoutError after `limit` seconds, and what the question raises.
    """
    answers = queue.SimpleQueue()

    def ask():
        try:
            answers.put((question(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit:g} s") from None
    if error:
        raise error
    return answer


def let_all_hear():
    """Waits until every rank that lives has read the verdict, as it does when it publishes its note.

    When this process ends, a launcher may end the others, and the store ends with the process that keeps it.
    """
    time.sleep(SILENCE)


def print_line(line):
    """Prints a line at once, whatever the calling thread is doing."""
    print(line, file=sys.stderr, flush=True)


def last_words():
    """Says the verdict if the device has failed: the error that the calling thread then gets does not name a rank."""
    for note in _watch.notes.values() if _watch else ():
        note.place()  # notices a device that has failed
        if note.broken:
            _watch.judge(note)


@atexit.register
def _at_exit():
    last_words()
    if _watch:
        _watch.end()
