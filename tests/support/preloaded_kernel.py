"""Jupyter kernels that are forks of one process, because each would take seconds to import torch by itself.

    with specification(folder) as name: ...   inside, Jupyter has the kernel of that name

As a script it is either the process that forks, or, beside a connection file, what Jupyter starts in place of a kernel:
it asks for a fork, and ends with it.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def specification(folder):
    if sys.platform != "linux":  # Elsewhere a fork after the import of torch may crash.
        yield "python3"
        return
    address = str(folder / "socket")
    place = folder / "kernels" / "preloaded"
    place.mkdir(parents=True)
    command = [sys.executable, "-S", "-E", __file__, address]
    (place / "kernel.json").write_text(json.dumps({"argv": [*command, "{connection_file}"], "display_name": "Python"}))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, __file__, address], **pipes) as server:
        server.stdout.readline()  # It listens now.
        with mock.patch.dict(os.environ, JUPYTER_PATH=str(folder)):
            yield "preloaded"


def serve(address):
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as in every kernel
    import matplotlib.pyplot  # noqa: F401
    import torch  # noqa: F401
    from ipykernel.kernelapp import launch_new_instance

    gc.freeze()  # The garbage collector would write to the memory that the forks share.
    sys.path[0] = ""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print(flush=True)
    # The end of its input is the end of the tests, with which the forks end, too.
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.setsid()
            asked = json.loads(asking.makefile().readline())
            os.chdir(asked["folder"])
            os.environ.update(asked["environment"] | {"JPY_PARENT_PID": str(os.getppid())})
            launch_new_instance(argv=["-f", asked["file"]])
            os._exit(0)
        asking.close()


def ask(address, file):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts a kernel before it asks it to shut down.
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        asked = {"folder": os.getcwd(), "environment": dict(os.environ), "file": str(Path(file).resolve())}
        server.sendall(json.dumps(asked).encode() + b"\n")
        server.recv(1)  # comes back when the fork has ended


if __name__ == "__main__":
    (ask if len(sys.argv) == 3 else serve)(*sys.argv[1:])
