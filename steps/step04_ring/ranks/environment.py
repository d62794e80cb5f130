# SPDX-License-Identifier: MIT
"""Which rank this process is, as its launcher's environment variables say.

                rank                    number of ranks         rank on this host             ranks on this host
    torchrun    RANK                    WORLD_SIZE              LOCAL_RANK                    LOCAL_WORLD_SIZE
    Open MPI    OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK    OMPI_COMM_WORLD_LOCAL_SIZE
    MPICH       PMI_RANK                PMI_SIZE                MPI_LOCALRANKID               MPI_LOCALNRANKS
    Slurm       SLURM_PROCID            SLURM_NTASKS            SLURM_LOCALID                 SLURM_TASKS_PER_NODE

The idea: a launcher starts equal processes, and each finds out its rank by itself. MASTER_ADDR and MASTER_PORT say
where rank 0 can be reached. torchrun sets both. With the others the port is 29500 unless it is set, and the address may
be left out where all ranks are on one host, and under Slurm, which lists the hosts. torchrun's names may also be set by
hand. Left out: launchers that pass a rank to its process only through the PMIx library. Needs nothing.
"""

import os
import re
from dataclasses import dataclass

DEMO = "-m steps.step04_ring.demo"
LAUNCHERS = {  # launcher: (its four variables, a command)
    "torchrun": (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        f"torchrun --standalone --nproc-per-node 4 {DEMO}",
    ),
    "Open MPI": (
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        f"mpirun -np 16 --map-by ppr:8:node -x MASTER_ADDR=HOST0 -x MASTER_PORT=29500 python {DEMO}",
    ),
    "MPICH": (
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        f"mpiexec -n 16 -ppn 8 -genv MASTER_ADDR HOST0 -genv MASTER_PORT 29500 python {DEMO}",
    ),
    "Slurm": (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
        f"srun --nodes 2 --ntasks-per-node 8 --gpus-per-task 1 python {DEMO}",
    ),
}


@dataclass(frozen=True)
class Place:
    """This process among the ranks. here: how many ranks are on this host, or None if the launcher does not say."""

    rank: int
    size: int
    local_rank: int
    here: int | None
    address: str
    port: int


def launched():
    """Whether a launcher has started this process as one of several ranks."""
    if os.environ.get("SLURM_NTASKS") == "1":  # a shell in an allocation of one task
        return any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    return "PMIX_RANK" in os.environ or any(names[0] in os.environ for names, _ in LAUNCHERS.values())


def read(gpus):
    """The Place of this process. gpus: how many GPUs it sees, 0 without the engine "cuda".

    Raises RuntimeError or ValueError in one line, with the launcher's command, if a variable is missing or wrong.
    """
    launcher = _launcher()
    names, command = LAUNCHERS[launcher]
    address, port = _meeting_point(launcher)
    needed = {name: os.environ.get(name) for name in names[:3]} | {"MASTER_ADDR": address, "MASTER_PORT": port}
    if missing := [name for name, value in needed.items() if not value]:
        raise RuntimeError(f"{', '.join(missing)} not set; {launcher} needs this: {command}")
    size = _integer(names[1], os.environ[names[1]], launcher, 1)
    rank = _integer(names[0], os.environ[names[0]], launcher, 0, size - 1)
    # Where a launcher shows each rank only its own GPU, that GPU's number is 0, whatever the rank.
    visible = f" ({gpus} GPUs here)" if gpus > 1 else ""
    local_rank = _integer(names[2], os.environ[names[2]], launcher, 0, gpus - 1 if gpus > 1 else None, visible)
    port = _integer("MASTER_PORT", port, launcher, 1, 65535)
    return Place(rank, size, local_rank % max(gpus, 1), _ranks_here(launcher), address, port)


def _launcher():
    """The launcher that has set this process's rank, or torchrun if none has."""
    for launcher, (names, _) in LAUNCHERS.items():
        if "RANK" in os.environ or all(name in os.environ for name in names[:3]):
            return launcher
    for launcher, (names, _) in LAUNCHERS.items():  # A variable that it has not set is reported.
        if names[0] in os.environ:
            return launcher
    if "PMIX_RANK" in os.environ:
        raise RuntimeError(
            "PMIX_RANK is set, but no number of ranks: a launcher of PMIx alone does not put it into the environment. "
            "Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or use srun, torchrun, or Open MPI's mpirun"
        )
    return "torchrun"


def _meeting_point(launcher):
    """(MASTER_ADDR, MASTER_PORT), or under this launcher what replaces them."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if launcher == "torchrun":
        return address, port
    if not address and str(_ranks_here(launcher)) == os.environ.get(LAUNCHERS[launcher][0][1]):
        address = "127.0.0.1"
    if not address and launcher == "Slurm":
        address = first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
    return address, port or "29500"


def first_host(hosts):
    """The first of Slurm's list of hosts: node03 of "node[03-05,09],login1"."""
    first = re.match(r"([^,\[]|\[[^\]]*\])*", hosts)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _ranks_here(launcher):
    """How many ranks are on this host; under Slurm, on the first one, for "8(x2)" means 8 on each of two."""
    number = re.match(r"\d+", os.environ.get(LAUNCHERS[launcher][0][3], ""))
    return int(number[0]) if number else None


def _integer(name, text, launcher, low, high=None, remark=""):
    """The value of an environment variable as an integer from low to high."""
    if not (text.lstrip("-").isdigit() and low <= int(text) and (high is None or int(text) <= high)):
        wanted = f"from {low} to {high}" if high is not None else f"of at least {low}"
        command = LAUNCHERS[launcher][1]
        raise ValueError(f"{name} must be an integer {wanted}{remark}, got {text!r}; {launcher} sets it: {command}")
    return int(text)
