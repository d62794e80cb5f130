# SPDX-License-Identifier: MIT
"""Names the rank that the others wait for: every rank publishes where it stands, and whoever fails first compares.

    the calling thread      notes which call it is in, and which hop (note.py)
    the publishing thread   four times a second: writes its notes on the board, and looks for a verdict (board.py)
    the guarding thread     with NCCL: fails when the device has been in one exchange for longer than the timeout
    whoever fails first     reads all notes twice and writes the verdict (verdict.py), which every other rank repeats

An exchange over gloo raises in Python by itself. With NCCL, or memory that GPUs share, an exchange that never ends
blocks the process for ever. So only there a thread ends the process, and only there a thread prints that another rank's
block raised: over gloo agree.py raises an error instead. Needs board.py and note.py.
"""

import atexit
import os
import sys
import threading
import weakref

import torch.distributed as dist

from .board import Board, found
from .note import Note

PERIOD = 0.25  # seconds between two notes of a rank

_watch = None  # this process's Watch, which `start` makes
_starts = 0  # how often launch.init has started a Watch: a store may outlive a process group and its notes


class Watch:
    """The threads of a process that publish its notes and act on those of others."""

    def __init__(self, board, say, end_process):
        self.world, self.board = weakref.ref(dist.group.WORLD), board
        self.say, self.end_process, self.told = say, end_process, False
        self.lock, self.ending = threading.Lock(), threading.Event()
        self.publisher = threading.Thread(target=self._publishing, daemon=True)
        self.publisher.start()

    def note(self, group):
        """The Note of a group."""
        notes = self.board.notes
        with self.lock:
            if group.group_name not in notes:
                note = notes[group.group_name] = Note(group, self.board)
                if note.on_device:
                    threading.Thread(target=self._guarding, args=(note,), daemon=True).start()
            return notes[group.group_name]

    def judge(self, note):
        """The verdict on the failure of a call of this group, which is said once."""
        line = self.board.judge(note)
        self._tell(line)
        if not self.board.unreachable:
            self.board.let_all_hear()
        return line

    def _publishing(self):
        while self._alive():
            try:
                self.board.publish(self.board.store)
                for note in list(self.board.notes.values()):
                    self._hear(note)
            except RuntimeError:  # The store is gone; the rank that fails reports it.
                return

    def _hear(self, note):
        """Acts on what other ranks have written: a verdict, and with NCCL what a block has raised."""
        board = self.board
        if line := found(board.store, f"verdict {note.name}"):
            self._tell(line)
            if self.end_process or note.on_device and not note.broken:
                board.let_all_hear()
                os._exit(1)
        if note.on_device and (line := found(board.store, f"failure {note.name}")) and line != note.heard:
            note.heard = line
            print_line(line)

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
        self.publisher.join(PERIOD if self.board.unreachable else 10)  # A thread that waits for ever does no harm.


def start(store=None, say=None, end_process=False, keeper="the process that keeps the store"):
    """Watches the calls of this process in the process group that torch.distributed has just initialised.

    store, keeper: of Board; the store is the group's own by default. say(line) gets the verdict, by default only where
    the process then ends. end_process: whether the process ends over gloo, too, where a failed exchange only raises.
    """
    global _watch, _starts
    _starts += store is not None
    if say is None and (end_process or dist.get_backend() != "gloo"):
        say = print_line
    board = Board(store or dist.distributed_c10d._get_default_store(), _starts, keeper)
    _watch = Watch(board, say, end_process)


def note(group):
    """The Note of a group of the running process group, which is watched from the first call on at the latest."""
    if _watch is None or _watch.world() is not dist.group.WORLD:
        start()
    return _watch.note(group)


def judge(note):
    """One line that names the culprit for the failure of a call; finding it takes up to 3 s."""
    return _watch.judge(note)


def print_line(line):
    """Prints a line at once, whatever the calling thread is doing."""
    print(line, file=sys.stderr, flush=True)


def last_words():
    """Says the verdict if the device has failed: the error that the calling thread then gets does not name a rank."""
    for note in _watch.board.notes.values() if _watch else ():
        note.place()  # notices a device that has failed
        if note.broken:
            _watch.judge(note)


@atexit.register
def _at_exit():
    last_words()
    if _watch:
        _watch.end()
