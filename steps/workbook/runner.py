"""Runs a job in a child process with a time limit: endless loops, barriers that wait forever and crashes end there."""

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
PRELOAD = {  # what takes long to import, by stage and by kind of job; torch.testing.assert_close imports the last one
    "step01_fa1_numba": ["numba.cuda"], "step03_triton": ["triton", "triton.language"], "hunt": ["torch.distributed.tensor"],
}  # fmt: skip
FORK = sys.platform == "linux"  # elsewhere a fork after importing torch may crash: there each job imports it again
_servers = {}  # by engine


def run(job, folder, limit, on=None):
    """(rows, how it ended, what was printed): how is None for an orderly end, "time" or a signal's name. on: an engine."""
    preload = PRELOAD.get(job["stage"], []) + PRELOAD.get(job["kind"], [])
    job = job | {"folder": str(folder), "limit": int(limit), "preload": preload, "fork": FORK}
    how = _supervise(job, limit, on or engine.name)
    results, printed = Path(folder) / "results.jsonl", Path(folder) / "printed.txt"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return rows, how, printed.read_text(errors="replace") if printed.exists() else ""


def _supervise(job, limit, on):
    """Has the engine's server do the job; how it ended."""
    server, pid, ended = _started(on), None, False
    try:
        server.stdin.write(json.dumps(job).encode() + b"\n")
        pid = _number(server, 120)  # the time that the imports may take
        status = _number(server, limit)
        ended = True
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
    except TimeoutError:
        if pid and job["fork"]:
            os.killpg(pid, signal.SIGKILL)
            _number(server, 10)
            ended = True
        return "time"
    except EOFError:  # the server itself has ended: it did the job, or crashed
        return signal.Signals(-code).name if (code := server.wait()) < 0 else None
    finally:  # also after Ctrl-C: nothing is left running
        if not ended:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            stop()


def _number(server, limit):
    """The next number that the server says. TimeoutError when there is none in time, EOFError when the server has ended."""
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
    """The engine's server, started at the first job and again after it has ended."""
    if on not in _servers or _servers[on].poll() is not None:
        simulated = "1" if on == "cpu" else "0"  # as steps.engine will want it, whatever it is in this process
        environment = os.environ | {"STEPS_ENGINE": on, "NUMBA_ENABLE_CUDASIM": simulated, "TRITON_INTERPRET": simulated}
        environment["PYTHONPATH"] = _path()
        command = [sys.executable, "-P", str(SERVER)]  # -P: the script's folder does not go on the path
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _servers[on] = subprocess.Popen(command, env=environment, bufsize=0, start_new_session=True, **pipes)
        atexit.register(stop)
    return _servers[on]


def stop():
    """Ends the servers."""
    while _servers:
        _, server = _servers.popitem()
        server.kill()
        server.wait()


def _path():
    return os.pathsep.join([str(SERVER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
