"""What Triton's compiler makes of kernels, for NVIDIA GPUs that need not be there.

Triton decides when it is imported whether it interprets or compiles. So a second process compiles, in which a stand-in
answers what Triton asks of a GPU.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace


def compiled(script, modules=()):
    """A dict for each kernel that the Python text `script` launches, in order: see `found_in`.

    `arch(80)` in the script changes the GPU; at first it is an H100, arch(90). A launch that the compiler refuses ends
    in {"kernel", "refused": the message}. modules: {name: text} of modules that the script imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in dict(modules).items():
            Path(folder, f"{name}.py").write_text(text)  # Triton reads a kernel's text from its file.
        path = os.pathsep.join((str(Path(__file__).parents[3]), folder))
        environment = os.environ | {"STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0", "PYTHONPATH": path}
        command = [sys.executable, "-m", "steps.course.figures.triton_compiler"]
        done = subprocess.run(command, input=script, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def found_in(made):
    """Of a compiled kernel: its registers, shared memory, PTX, Triton's own GPU code, and its machine instructions."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    machine = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ )?([\w.]+)", text)
    found = {"registers": int(re.search(r"REG:(\d+)", text)[1]), "shared": made.metadata.shared, "machine": machine}
    return found | {"ptx": made.asm["ptx"], "ttgir": made.asm["ttgir"]}


def main():
    """Executes the script on standard input, and prints a line of JSON for each kernel that it launches."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    gpu = SimpleNamespace(arch=90)
    gpu.get_current_device = lambda: gpu.arch
    gpu.get_current_stream = lambda device: 0
    gpu.get_current_target = lambda: GPUTarget("cuda", gpu.arch, 32)
    gpu.launcher_cls = lambda *kernel: None
    gpu.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 227 * 1024})
    gpu.utils.load_binary = lambda *kernel: (None, None, 0, 0, 1024)  # Only the last one counts, its most threads.
    triton.runtime.driver.set_active(gpu)
    torch.cuda.get_device_capability = lambda device=None: divmod(gpu.arch, 10)
    launch = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        found = {"kernel": kernel.__name__, "arch": gpu.arch}
        try:
            made = launch(kernel, *args, grid=grid, warmup=True, **options)
            made._init_handles()  # What a launch does first: it refuses what does not fit.
            found |= found_in(made)
        except Exception as problem:
            found["refused"] = str(problem).strip()
        print(json.dumps(found), flush=True)

    JITFunction.run = compile_only
    exec(sys.stdin.read(), {"arch": lambda number: setattr(gpu, "arch", number), "torch": torch})


if __name__ == "__main__":
    main()
