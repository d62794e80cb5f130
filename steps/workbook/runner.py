"""Runs a job in a child process with a time limit.

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
from pathlib import Path

from steps import engine

SERVER = Path(__file__).with_name("child.py")
# Modules that take long to import, by stage and by kind of job. The server imports them once, before it forks.
# torch.testing.assert_close, which hunts' tests use, imports torch.distributed.tensor.
PRELOAD = {
    "step01_fa1_numba": ["numba.cuda"],
    "step03_triton": ["triton", "triton.language"],
    "hunt": ["torch.distributed.tensor"],
}
FORK = sys.platform == "linux"  # Elsewhere a fork after the import of torch may crash, so each job gets its own server.
_servers = {}  # {engine: its server}


def run(job, folder, limit, on=None):
    """Runs the job in the folder: (rows of results, how it ended, what was printed).

    How it ended is None for an orderly end, "time" for the time limit, or the name of a signal. limit: seconds. on: an
    engine, by default the one of this process.
    """
    preload = PRELOAD.get(job["stage"], []) + PRELOAD.get(job["kind"], [])
    job = job | {"folder": str(folder), "limit": int(limit), "preload": preload, "fork": FORK}
    how = _supervise(job, limit, on or engine.name)
    results, printed = Path(folder) / "results.jsonl", Path(folder) / "printed.txt"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return rows, how, printed.read_text(errors="replace") if printed.exists() else ""


def _supervise(job, limit, on):
    """Sends the job to the engine's server and waits until it has ended; returns how it ended."""
    server = _started(on)
    pid = None
    ended = False
    try:
        server.stdin.write(json.dumps(job).encode() + b"\n")
        pid = _number(server, 120)  # The server's imports may take this long.
        status = _number(server, limit)
        ended = True
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
    except TimeoutError:
        if pid and job["fork"]:
            os.killpg(pid, signal.SIGKILL)
            _number(server, 10)
            ended = True
        return "time"
    except EOFError:  # The server itself has ended, because it did the job without a fork, or because it crashed.
        code = server.wait()
        return signal.Signals(-code).name if code < 0 else None
    finally:  # Nothing is left running, also after Ctrl-C.
        if not ended:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            stop()


def _number(server, limit):
    """The next number that the server sends. TimeoutError after `limit` seconds, EOFError if the server has ended."""
    deadline, line = time.monotonic() + limit, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([server.stdout], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        byte = os.read(server.stdout.fileno(), 1)
        if not byte:
            raise EOFError
        line += byte
    return int(line)


def _started(on):
    """The engine's server. It is started for the first job, and again for a job after it has ended."""
    if on not in _servers or _servers[on].poll() is not None:
        simulated = "1" if on == "cpu" else "0"  # steps.engine asks for this value. In this process it may be another.
        environment = os.environ | {"STEPS_ENGINE": on, "PYTHONPATH": _path()}
        environment |= {"NUMBA_ENABLE_CUDASIM": simulated, "TRITON_INTERPRET": simulated}
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
    return os.pathsep.join([str(SERVER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
