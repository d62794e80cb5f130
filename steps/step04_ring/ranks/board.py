# SPDX-License-Identifier: MIT
"""The board on which ranks write for each other: torch.distributed's store, which goes on where messages stop.

    note of a rank         where it stands in every group, four times a second
    call of a rank         its arguments, for a call that the ranks compare here and not by messages
    failure of a group     what a block has raised
    verdict of a group     whose fault a failure is: whoever fails first reads all notes twice, and writes it

The idea: a rank that waits in an exchange can neither send nor receive, but its other threads can write and read here.
A store may never answer, because its process or its host is gone, so that every question has a time limit. Needs
verdict.py.
"""

import contextlib
import json
import queue
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from .verdict import differing, verdict

SILENCE = 1.0  # A rank whose note does not change for so many seconds counts as dead.
PATIENCE = 1.5  # seconds that the store may take to answer a rank that failed


class Board:
    """The board, and this rank's notes on it.

    number: of the process groups that have used this store before and left notes in it. keeper: the process in which
    the store is, in words.
    """

    def __init__(self, store, number, keeper):
        # A connection each for publishing, for comparing, and for a failure: an operation blocks its connection.
        stores = (dist.PrefixStore(f"watch {number}", store.clone()) for _ in range(3))
        self.store, self.compared, self.at_failure = stores
        self.rank, self.keeper = dist.get_rank(), keeper
        self.notes = {}  # {name of a group: Note}
        self.beats = 0
        self.unreachable = False  # whether the store has left a question unanswered
        self.publish(self.store)  # at once, so that the board also has a rank that never calls

    def publish(self, store):
        """Writes where this rank stands."""
        self.beats += 1
        calls = {}
        for name, note in list(self.notes.items()):
            *place, arguments = note.place()
            calls[name] = place, {name: str(value) for name, value in arguments.items()}, note.failure
        store.set(f"note {self.rank}", json.dumps({"beats": self.beats, "calls": calls}))

    def read(self, rank):
        """The note that a rank has published, as verdict.py wants it."""
        return json.loads(found(self.at_failure, f"note {rank}") or '{"beats": 0, "calls": {}}')

    def judge(self, note):
        """The verdict on the failure of a call of this group: the one that another rank has written, or a new one."""
        try:
            return answered(lambda: self._judge(note), SILENCE + PATIENCE)
        except Exception:
            self.unreachable = True
            return f"{self.keeper} does not answer (it died, or hangs, or its host cannot be reached)"

    def _judge(self, note):
        key, store = f"verdict {note.name}", self.at_failure
        if not found(store, key):
            self.publish(store)
            before = after = [self.read(rank) for rank in note.members]
            if not differing(note.name, before):
                time.sleep(SILENCE)
                self.publish(store)  # This rank is not silent, even if its publishing thread has ended.
                after = [self.read(rank) for rank in note.members]
            store.compare_set(key, "", verdict(note.name, before, after))  # The first verdict stays.
        return found(store, key)

    def let_all_hear(self):
        """Waits until every rank that lives has read the verdict, as it does when it publishes its note.

        When this process ends, a launcher may end the others, and the store ends with the process that keeps it.
        """
        time.sleep(SILENCE)

    def tell_failure(self, note):
        """Publishes that a block has raised. The process may end before the publishing thread does it."""

        def tell():
            self.publish(self.at_failure)
            self.at_failure.set(f"failure {note.name}", note.failure)

        with contextlib.suppress(Exception):  # If the store is gone, the block's own exception says more.
            answered(tell, PATIENCE)

    def exchange(self, note, text, wait):
        """Each rank's text for this call of the group, or None without `wait`. Collective."""
        key, store = f"call {note.name} {note.now[0]} of rank", self.compared
        store.set(f"{key} {self.rank}", text)
        if not wait:
            return None
        store.set_timeout(timedelta(seconds=note.timeout))
        keys = [f"{key} {rank}" for rank in note.members]
        texts = answered(lambda: store.multi_get(keys), note.timeout + PATIENCE)
        if note.compared:  # A rank that has written a text for this call has read those for the call compared before.
            store.delete_key(note.compared)
        note.compared = f"{key} {self.rank}"
        return texts


def found(store, key):
    """The text under this key, or "" where there is none yet."""
    return store.get(key).decode() if store.check([key]) else ""


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
