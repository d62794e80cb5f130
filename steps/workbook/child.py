"""The process in which answers run. It imports torch once; each job gets a fork of it, in which `steps` is the job's own copy.

Run as a script (the real `steps` must not be imported here). Jobs come in as lines of JSON; a line with the fork's number goes
out, and one with its exit status when it has ended. What a job finds out it writes to results.jsonl in its folder, line by line,
so that the last line tells where a job was that had to be stopped.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

SPARE = 10  # seconds after the time limit at which a job ends itself, should nobody have stopped it
IDLE = 600  # seconds without a job after which the server ends: it holds some 300 MB


def serve(out):
    """Forks one process a job; where that is not safe, does one job in this process and ends."""
    signal.alarm(IDLE)
    for line in sys.stdin:
        signal.alarm(0)
        job = json.loads(line)
        for module in job["preload"]:
            importlib.import_module(module)
        if job["fork"] and (pid := os.fork()):
            say(out, pid)
            status = os.waitpid(pid, 0)[1]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it has left behind: stage 04's ranks, after a crash
            say(out, status)
            signal.alarm(IDLE)
            continue
        if job["fork"]:
            os.setsid()  # a group of its own, which can be killed as a whole
        else:
            say(out, os.getpid())
        signal.alarm(job["limit"] + SPARE)
        work(job)
        sys.stdout.flush()
        os._exit(0)


def say(out, number):
    os.write(out, f"{number}\n".encode())


def work(job):
    """Does the job with the copy of `steps` in its folder."""
    folder = Path(job["folder"])
    printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # `input()` must not read the next job
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")  # numpy's, about overflow, would name lines of the copy
    with open(folder / "results.jsonl", "w", buffering=1) as file:

        def tell(**row):
            file.write(json.dumps(row) + "\n")

        try:
            import steps

            assert Path(steps.__file__).is_relative_to(folder), f"{steps.__file__} is not the copy in {folder}"
            from steps.workbook import jobs

            getattr(jobs, job["kind"])(job, tell)
        except BaseException as e:
            tell(error=account(e, folder, job.get("label")))


def account(e, folder, label=None):
    """An exception as {"type", "message", "frames"}: (file of the copy or the answer's label, line), innermost last."""
    if hasattr(e, "account"):  # of another process
        return e.account
    while type(e).__name__ == "InterpreterError" and e.__cause__:  # Triton's own, raised from the reader's
        e = e.__cause__
    while type(e).__name__ == type(e.__cause__).__name__ == "CompilationError":  # Triton's, from the caller's to the innermost
        e = e.__cause__
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(e.__traceback__)]
    inside = [(name.removeprefix(f"{folder}/"), line) for name, line in frames if name.startswith(str(folder)) or name == label]
    return {"type": type(e).__name__, "message": str(e), "frames": inside}


if __name__ == "__main__":
    numbers = os.dup(1)
    import torch

    from reference import cases, error, mutants  # noqa: F401

    if os.environ["STEPS_ENGINE"] == "cpu":
        torch.set_num_threads(1)
    gc.freeze()  # what is here is shared with the forks as long as nobody writes to it, which looking for garbage does
    serve(numbers)
