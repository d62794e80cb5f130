"""Runs a job in a child process with a limit of time and of memory.

An endless loop, a barrier that waits for ever and a crash end with that process, and not with the reader's own.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from steps import engine

SERVER = Path(__file__).with_name("child.py")
MEMORY = 4 * 2**30  # bytes that the job's processes may have in memory together
# Modules that take long to import, by stage and by kind of job. The server imports them once, before it forks.
# torch.testing.assert_close, which hunts' tests use, imports torch.distributed.tensor.
PRELOAD = {
    "step01_fa1_numba": ["numba.cuda"],
    "step03_triton": ["triton", "triton.language"],
    "hunt": ["torch.distributed.tensor"],
    "puzzle": ["triton", "triton.language"],
    "capstone": ["triton", "triton.language"],
}
FORK = sys.platform == "linux"  # Elsewhere a fork after the import of torch may crash, so each job gets its own server.
_servers = {}  # {engine: its server}


def run(job, folder, limit, on=None):
    """Runs the job in the folder: (rows of results, how it ended, what was printed).

    How it ended is None for an orderly end, "time" or "memory" for a limit, or in words such as "SIGABRT" or "exit code
    3". An end is orderly if the exit code is 0 and the whole job was done. limit: seconds. on: an engine, by default
    the one of this process.
    """
    preload = PRELOAD.get(job["stage"], []) + PRELOAD.get(job["kind"], [])
    preload = [module for module in preload if find_spec(module.split(".")[0])]  # Triton is for Linux only.
    job = job | {"folder": str(folder), "limit": int(limit), "preload": preload, "fork": FORK}
    how = _supervise(job, limit, on or engine.name)
    results, printed = Path(folder) / "results.jsonl", Path(folder) / "printed.txt"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = bool(rows) and rows[-1] == {"done": True}
    if done:
        rows.pop()
    if how is None and not (done and _all_judged(job, rows)) and not (rows and "error" in rows[-1]):
        how = "it left before the check was complete"
    return rows, how, printed.read_text(errors="replace") if printed.exists() else ""


def _all_judged(job, rows):
    """Whether the job has judged as many cases as it had to, or found a wrong one. Other jobs have no cases to judge.

    An answer may end the process with a line that says "done", but then the lines of the cases are missing.
    """
    if job["kind"] not in ("exercise", "puzzle", "capstone"):
        return True
    judged = [row["wrong"] for row in rows if "wrong" in row]
    return any(judged) or [len(judged)] == [row["cases"] for row in rows if "cases" in row]


def _supervise(job, limit, on):
    """Sends the job to the engine's server and waits until it has ended; returns how it ended."""
    server = _started(on)
    pid = None
    ended = False
    try:
        server.stdin.write(json.dumps(job).encode() + b"\n")
        pid = _number(server, 120)  # The server's imports may take this long.
        status = _number(server, limit, group=pid)
        ended = True
        return _in_words(os.waitstatus_to_exitcode(status))
    except (TimeoutError, MemoryError) as e:
        if pid and job["fork"]:
            os.killpg(pid, signal.SIGKILL)
            _number(server, 10)
            ended = True
        return "time" if isinstance(e, TimeoutError) else "memory"
    except EOFError:  # The server itself has ended, because it did the job without a fork, or because it crashed.
        return _in_words(server.wait())
    finally:  # Nothing is left running, also after Ctrl-C.
        if not ended:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            stop()


def _in_words(code):
    """How a process with this exit code has ended: None for 0, otherwise its code or the name of its signal."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}" if code else None


def _number(server, limit, group=None):
    """The next number that the server sends.

    Raises TimeoutError after `limit` seconds, EOFError if the server has ended, and MemoryError as soon as the
    processes of the group have more than MEMORY bytes in memory.
    """
    deadline, line = time.monotonic() + limit, b""
    while not line.endswith(b"\n"):
        left = max(0, deadline - time.monotonic())
        ready, _, _ = select.select([server.stdout], [], [], min(left, 0.2))
        if ready:
            byte = os.read(server.stdout.fileno(), 1)
            if not byte:
                raise EOFError
            line += byte
        elif left == 0:
            raise TimeoutError
        elif group and resident_memory(group) > MEMORY:
            raise MemoryError
    return int(line)


def resident_memory(group):
    """The bytes that the processes of a process group have in memory together.

    On Linux a page that several of them share is divided among them. Elsewhere `ps` counts it for each.
    """
    if sys.platform != "linux":
        rows = subprocess.run(["ps", "-A", "-o", "pgid=,rss="], capture_output=True, text=True).stdout.splitlines()
        return sum(1024 * int(row.split()[1]) for row in rows if int(row.split()[0]) == group)
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process may have ended meanwhile.
            if os.getpgid(int(process.name)) == group:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _started(on):
    """The engine's server. It is started for the first job, and again for a job after it has ended."""
    if on not in _servers or _servers[on].poll() is not None:
        simulated = "1" if on == "cpu" else "0"  # steps.engine asks for this value. In this process it may be another.
        environment = os.environ | {"STEPS_ENGINE": on, "PYTHONPATH": _path()}
        environment |= {"NUMBA_ENABLE_CUDASIM": simulated, "TRITON_INTERPRET": simulated}
        environment |= {"PYTHONOPTIMIZE": ""}  # Otherwise Python may leave out the `assert` of a reader's test.
        command = [sys.executable, "-P", str(SERVER)]  # -P keeps the script's folder off the import path.
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _servers[on] = subprocess.Popen(command, env=environment, bufsize=0, start_new_session=True, **pipes)
        atexit.register(stop)
    return _servers[on]


def stop():
    """Ends all servers."""
    while _servers:
        _, server = _servers.popitem()
        server.kill()
        server.wait()


def _path():
    """PYTHONPATH for a server, which imports `reference` from the course's folder."""
    return os.pathsep.join([str(SERVER.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
