"""Compiles stage 03's kernels as their launchers launch them, for GPUs that need not be there.

    python tests/support/compile_triton.py '[["fused", 80, "bfloat16", 128, true], ...]'

An entry is (rung, compute capability, dtype, head_dim, causal), or the fields of a row of steps/course/bench/results
that say what was launched of a feature, for a Hopper GPU. Prints a line of JSON for each kernel: what was asked, the
kernel's name, its key in Triton's cache and a hash of its PTX without names, the threads and the bytes of shared
memory of a program, a thread's registers, the bytes of them that ptxas spills, of rung gluon's backward also the words
that it spills in every step, whether ptxas serialises wgmma instructions, and how often some instructions stand in the
PTX.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from steps.step02_fa2_cuda import cache

INSTRUCTIONS = "mma.sync", "wgmma.mma_async", "cp.async.cg", "cp.async.bulk.tensor", "setmaxnreg", "fma.rn.f32"
INSTRUCTIONS += ("bar.sync",)
STEP = 32  # the wgmma instructions of a step of rung gluon's backward


class Driver:
    """Stands in for a GPU: Triton asks it what to compile for."""

    capability = 80

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


def assemble(ptx, capability):
    """What ptxas says about a kernel: its use of registers, and its warnings. Triton's own log says the same.

    It is kept from run to run, as Triton keeps the kernel, because ptxas takes longer than all else.
    """
    ptxas = get_ptxas(capability)  # Triton has an older and a newer one
    target = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    command = [ptxas.path, "-v", f"--gpu-name={target}", "-o", "/dev/null", "/dev/stdin"]

    def make(path):
        said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
        path.write_text(said.stderr)

    return cache.get((ptxas.version, target, ptx), ".log", make).read_text()


def normal(ptx):
    """PTX without comments, line numbers and their labels, debug information and the names of kernels."""
    ptx = re.sub(r"//.*|^\s*\.(loc|file)\b.*|^\s*\$L__tmp\d+:", "", ptx, flags=re.M)
    ptx = ptx.partition(".section\t.debug")[0]
    names = re.findall(r"\.entry (\w+)\(", ptx)
    for name in names:
        ptx = ptx.replace(name, "kernel")
    return "\n".join(filter(None, map(str.strip, ptx.splitlines())))


def spilled_in_a_step(cubin):
    """The most words that a loop of STEP wgmma instructions spills, or reads again; None if there is no such loop.

    A loop is what lies between a jump back and its target. What is spilled in it costs time in every step.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    words = []
    for address, line in lines:
        if jump := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line):
            loop = [x for at, x in lines if int(jump[1], 16) <= int(at, 16) < int(address, 16)]
            if sum("HGMMA" in x for x in loop) == STEP:
                words.append(max(sum(name in x for x in loop) for name in ("STL", "LDL")))
    return max(words, default=None)


def start(file, wanted):
    """A process in which the file is run as a script to compile `wanted`.

    Triton decides when it is imported whether it interprets or compiles, and the tests' own process interprets.
    """
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "tests")))
    environment = os.environ | {"STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, file, json.dumps(wanted)]
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)


def rows_of(process):
    """The rows that the process prints, a line of JSON each."""
    lines, _ = process.communicate()
    assert process.returncode == 0
    return [json.loads(line) for line in lines.splitlines()]


def in_a_process(file, wanted):
    """The rows that the file prints when it is run as a script to compile `wanted`."""
    return rows_of(start(file, wanted))


def compile_all(launches):
    """Prints a line of JSON for each kernel that is launched after a generator has given (what to say of it, GPU)."""
    driver, launch, says = Driver(), JITFunction.run, {}
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.runtime.driver.set_active(driver)
    torch.cuda.get_device_capability = lambda device=None: divmod(driver.capability, 10)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

    def compile_only(kernel, *args, grid, warmup, **options):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        ptx = compiled.asm["ptx"]
        log = said.getvalue() or assemble(ptx, driver.capability)  # For a kernel in its cache Triton runs no ptxas.
        found = says | dict(capability=driver.capability, kernel=kernel.__name__, key=compiled.hash)
        found |= dict(shared=compiled.metadata.shared)
        found |= dict(spilled=int(re.search(r"(\d+) bytes spill stores", log)[1]), serialised="serialized" in log)
        if "setmaxnreg" in ptx and kernel.__name__ == "backward_kernel":  # that of rung gluon
            found |= dict(spilled_in_a_step=spilled_in_a_step(compiled.asm["cubin"]))
        found |= dict(text=hashlib.sha256(normal(ptx).encode()).hexdigest())
        found |= dict(registers=int(re.search(r"Used (\d+) registers", log)[1]))
        found |= dict(threads=32 * compiled.metadata.num_warps) | {name: ptx.count(name) for name in INSTRUCTIONS}
        print(json.dumps(found), flush=True)

    JITFunction.run = compile_only
    for says, driver.capability in launches:  # noqa: B007  The generator goes on, and launches.
        pass


def launch_rungs(wanted):
    from steps.step03_triton import fwd_3_gluon, rungs  # now that Triton has its driver

    fwd_3_gluon.refusal = lambda q: None  # it looks for a GPU
    for n, (rung, capability, dtype, D, causal) in enumerate(wanted):
        yield dict(wanted=n, rung=rung, dtype=dtype, D=D, causal=causal), capability
        forward, backward = rungs.RUNGS[rung]
        N = fwd_3_gluon.SHORT  # from which on rung gluon has three consumers at head_dim 64
        x, lse = torch.zeros(1, 1, N, D, dtype=getattr(torch, dtype)), torch.zeros(1, 1, N)
        forward(x, x, x, causal=causal)
        if rung in ("fused", "tma") or rung == "gluon" and D <= 128:  # the others have tma's
            backward(x, x, x, x, x, lse, causal=causal)


def launch_rows(wanted):
    """Launches what rows measured of stage 03's features, on zeros, because only layouts decide what is compiled."""
    from steps.course.bench import grid, rows
    from steps.step03_triton import features, fwd_3_gluon

    fwd_3_gluon.refusal = features.flash_gluon.refusal = lambda q: None  # They look for a GPU.
    torch.randn = lambda *shape, **_: torch.zeros(shape)
    tasks = functools.cache(grid.features_at)
    for n, row in enumerate(wanted):
        yield dict(wanted=n), 90
        B, H, Hk, N, Nk, D = (row[name] for name in ("B", "H", "Hk", "N", "Nk", "D"))
        options, name = {"causal": row["causal"]}, row["options"]["feature"]
        if name not in ("decode", "memory", "padded"):  # These have no other option.
            (task,) = (task for task in tasks(N, H, D) if task.options["feature"] == name)
            options |= task.entrants[0].forward.keywords
        q, k = (torch.zeros(B, *x, D, dtype=rows.DTYPES[row["dtype"]]) for x in ((H, N), (Hk, Nk)))
        kernel = getattr(features, row["kernel"])
        if "fwd" in row["pass"]:
            kernel.forward(q, k, k, **options)
        if "bwd" in row["pass"]:
            kernel.backward(q, q, k, k, q, torch.zeros(B, H, N), **options)


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    compile_all((launch_rows if isinstance(wanted[0], dict) else launch_rungs)(wanted))
