"""Decides once per process where the kernels run, before Numba and Triton are imported.

    name        device   stage 01            stage 02                    stage 03              stage 04
    "cuda"      "cuda"   Numba CUDA          NVRTC                       compiled Triton       NCCL
    "cpu"       "cpu"    Numba's simulator   g++ behind an emulation     Triton's interpreter  gloo
    "compile"   "cpu"    nothing runs; Numba and Triton compile for GPUs that need not be there

With a GPU the engine is "cuda", otherwise "cpu"; the environment variable STEPS_ENGINE=cpu|cuda|compile overrides.
Numba and Triton read NUMBA_ENABLE_CUDASIM and TRITON_INTERPRET while they are being imported. Therefore they are set
here, and importing this module too late is an error rather than a silent mixture of engines.
"""

import ctypes
import functools
import os
import sys
import threading


def _choose(asked: str | None, gpu: bool) -> str:
    """The engine for the STEPS_ENGINE setting `asked` on a machine with or without a GPU."""
    if asked not in (None, "", "cpu", "cuda", "compile"):
        raise RuntimeError(
            f"STEPS_ENGINE is {asked!r}; it may be 'cpu', 'cuda' or 'compile'. Unset, a GPU is used where there is one."
        )
    if asked == "cuda" and not gpu:
        raise RuntimeError("STEPS_ENGINE=cuda, but torch sees no GPU. Unset it, or set STEPS_ENGINE=cpu.")
    return asked or ("cuda" if gpu else "cpu")


def _configure(name: str) -> None:
    """Sets what Numba and Triton read at import; raises if one of them was imported before in the other mode."""
    wanted = "1" if name == "cpu" else "0"
    for module, variable in (("numba", "NUMBA_ENABLE_CUDASIM"), ("triton", "TRITON_INTERPRET")):
        if module in sys.modules and os.environ.get(variable, "0") != wanted:
            raise RuntimeError(
                f"{module} was imported before steps, in the mode for the other engine ({variable} is not {wanted}). "
                f"Import steps first (torch._dynamo imports triton too), or start Python with {variable}={wanted}."
            )
        os.environ[variable] = wanted


def _sees_a_gpu() -> bool:
    """Whether torch sees a GPU. Without NVIDIA's driver it sees none, and takes a second to import."""
    if sys.platform == "linux" and "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
    import torch

    return torch.cuda.is_available()


name: str = _choose(os.environ.get("STEPS_ENGINE"), _sees_a_gpu())
device: str = "cuda" if name == "cuda" else "cpu"
_configure(name)


def check_runs() -> None:
    """RuntimeError under the engine "compile", for whoever is about to compute something."""
    if name == "compile":
        raise RuntimeError("under STEPS_ENGINE=compile nothing is computed. Unset it to run a stage.")


_lock = threading.RLock()  # A thread that has it can take it again.
_PATIENCE = 10  # seconds that a fork waits for the kernel that another thread is in


def free_after_fork(lock, **hooks) -> None:
    """From now on the lock is free in a forked process, which has none of the threads that could release it."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=lock._at_fork_reinit, **hooks)


def _fork_between_kernels() -> None:
    """From now on os.fork waits until no kernel runs: the child would find the names that the kernel has replaced.

    A kernel that hangs is not waited for without end.
    """
    waited = []

    def release():
        if waited.pop():
            _lock.release()

    free_after_fork(_lock, before=lambda: waited.append(_lock.acquire(timeout=_PATIENCE)), after_in_parent=release)


_fork_between_kernels()


def one_at_a_time(function):
    """The function, which under the engine "cpu" only one thread at a time can be in. Else the function unchanged.

    While a kernel runs, Numba's simulator replaces names in the kernel's module, Triton's interpreter replaces
    functions of triton.language, and the emulation of stage 02 keeps its threads in global variables. A second call at
    the same time would use what the first one has put there. All functions share one lock.
    """
    if name != "cpu":
        return function

    @functools.wraps(function)
    def alone(*args, **options):
        with _lock:
            return function(*args, **options)

    return alone


def describe() -> str:
    """One short line for people. `python -m steps engine` tells the rest."""
    if name == "cuda":
        import torch

        count = torch.cuda.device_count()
        says = torch.cuda.get_device_name() + (f" x {count}" if count > 1 else "")
    elif name == "compile":
        says = "neither runs nor simulates"
    else:
        says = "no GPU in use, kernels are simulated"
    return f"engine {name}: {says}"
