"""The process in which answers run: a server that imports torch once and forks one process for each job.

In the fork `steps` is the copy of the course in the job's folder. This file is therefore run as a script: the process
must not import the real `steps`. runner.py starts it and sends each job as a line of JSON. For each job the server
answers with two lines, the number of the forked process, and its exit status when it has ended. The job writes what it
finds out to results.jsonl in its folder, line by line, so that the last line of a job that had to be stopped tells how
far it came. The line {"done": true} is written only after the whole job.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

SPARE = 10  # A job that nobody has stopped ends itself this many seconds after its time limit.
IDLE = 600  # After this many seconds without a job the server ends, because it holds some 300 MB.


def serve(out):
    """Forks a process for each job. Where a fork is not safe, does one job in this process and ends."""
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
                os.killpg(pid, signal.SIGKILL)  # After a crash, stage 04's ranks may still be running.
            say(out, status)
            signal.alarm(IDLE)
            continue
        if job["fork"]:
            os.setsid()  # A group of its own can be killed as a whole.
        else:
            say(out, os.getpid())
        signal.alarm(job["limit"] + SPARE)
        work(job)
        sys.stdout.flush()
        os._exit(0)


def say(out, number):
    """Sends a number to runner.py."""
    os.write(out, f"{number}\n".encode())


def work(job):
    """Does the job with the copy of `steps` in its folder. An exception becomes the job's last result."""
    folder = Path(job["folder"])
    printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # `input()` in an answer must not read the next job.
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")  # numpy's warnings about overflow would name lines of the copy.
    with open(folder / "results.jsonl", "w", buffering=1) as file:

        def tell(**row):
            file.write(json.dumps(row) + "\n")

        try:
            import steps

            if not Path(steps.__file__).is_relative_to(folder):
                raise AssertionError(f"{steps.__file__} is not the copy in {folder}")
            from steps.course.workbook import failure, jobs
        except BaseException as e:  # Without the copy there is no failure.account either.
            tell(error={"type": type(e).__name__, "message": str(e), "frames": []})
            return
        try:
            getattr(jobs, job["kind"])(job, tell)
            tell(done=True)
        except BaseException as e:
            tell(error=failure.account(e, folder, job.get("label")))


if __name__ == "__main__":
    numbers = os.dup(1)
    import torch

    from reference import cases, error, mutants  # noqa: F401

    torch.set_num_threads(1)  # The tensors are so small that starting a second thread costs more than it saves.
    # The forks share this memory until somebody writes to it. The garbage collector would write to each object, so it
    # leaves those out that exist by now.
    gc.freeze()
    serve(numbers)
