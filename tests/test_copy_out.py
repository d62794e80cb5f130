"""Each set of files that steps/README.md advertises computes attention in an empty folder, without the rest."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steps import catalogue, engine
from steps.step02_fa2_cuda import ladder

STEPS = Path(__file__).parents[1] / "steps"
REPLAY = "replay ../cached"
FEATURES = f"features/flash features/flash features/flash_kernels features/scores features/tiles {REPLAY}"
SETS = {  # The stage, and the files to copy: that of the forward, that of the backward, and those that they need.
    "00 matrix": ("step00_naive", "fwd_1_matrix bwd_1_matrix"),
    "00 tiled": ("step00_naive", "fwd_3_tiled bwd_3_tiled"),
    "01 published": ("step01_fa1_numba", "fwd_0_published bwd_0_published"),
    "01 loops_swapped": ("step01_fa1_numba", "fwd_1_loops_swapped bwd_0_published fwd_0_published"),
    "01 registers": ("step01_fa1_numba", "fwd_2_registers bwd_2_registers fwd_0_published"),
    "03 fused": ("step03_triton", f"fwd_0_fused bwd_0_fused {REPLAY}"),
    "03 tma": ("step03_triton", f"fwd_1_tma bwd_1_tma {REPLAY}"),
    "03 roles": ("step03_triton", f"fwd_2_roles bwd_1_tma {REPLAY}"),
    "03 features": ("step03_triton", FEATURES),
}
DECODE = f"features/decode features/scores {REPLAY}"
# What every rung of stage 02 needs beside its own .cu files.
HOST = "ladder calls plan launches tile_scheduler nvrtc cache wgmma".split()
HOST = [f"step02_fa2_cuda/{file}.py" for file in (*HOST, "../cached")]
HOST += ["step02_fa2_cuda/ptx.cuh", "step02_fa2_cuda/emulator"]  # the last where there is no GPU
# A Python that runs one copy after another, because importing torch for each would take longer than all of them. A line
# of its input is a folder and the call of `check`; a line of its output is the traceback, empty if all is well.
USE = """
import functools, importlib, json, sys, traceback
sys.modules["steps"] = sys.modules["reference"] = None  # From now on their import is an error.
import torch
import torch.nn.functional as F

def lifted(path):
    file, function = path.split(".")
    return getattr(importlib.import_module("lifted." + file.replace("/", ".")), function)

def check(forward, backward, D=32, dtype="float32", forward_options={}, backward_options={}, refuses=True):
    forward, backward = lifted(forward), lifted(backward)
    q, k, v, dout = torch.randn(4, 1, 1, 19, D).to(device, getattr(torch, dtype))
    out, lse = forward(q, k, v, causal=True, **forward_options)
    leaves = [x.float().clone().requires_grad_() for x in (q, k, v)]
    sdpa = F.scaled_dot_product_attention(*leaves, is_causal=True)
    near = dict(rtol=1e-4, atol=1e-5) if dtype == "float32" else dict(rtol=0.03, atol=0.03)
    torch.testing.assert_close(out.float(), sdpa, **near)
    gradients = backward(dout, q, k, v, out, lse, causal=True, **backward_options)
    for mine, its in zip(gradients, torch.autograd.grad(sdpa, leaves, dout.float())):
        torch.testing.assert_close(mine.float(), its, **near)
    # By the page's Function, for a dout that is expanded.
    parts = functools.partial(forward, **forward_options), functools.partial(backward, **backward_options)
    mine, its = ([x.detach().clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    page["Attention"].apply(*mine, *parts, {"causal": True}).sum().backward()
    F.scaled_dot_product_attention(*(x.float() for x in its), is_causal=True).sum().backward()
    for x, y in zip(mine, its):
        torch.testing.assert_close(x.grad.float(), y.grad.float(), **near)
    if refuses:
        try:
            parts[0](*mine, causal=True)
        except RuntimeError as problem:
            assert "as class Attention of steps/README.md does" in str(problem)
        else:
            raise AssertionError("a launcher lost a gradient")

device, page = sys.argv[1], {}
exec(sys.argv[2], page)
for line in sys.stdin:
    folder, options = json.loads(line)
    for name in [name for name in sys.modules if name.split(".")[0] == "lifted"]:
        del sys.modules[name]
    sys.path[0] = folder
    problem = ""
    try:
        check(**options)
    except Exception:
        problem = traceback.format_exc()
    print(json.dumps(problem), flush=True)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    simulated = "1" if engine.name == "cpu" else "0"
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": simulated, "TRITON_INTERPRET": simulated}
    environment["OMP_NUM_THREADS"] = "1"  # The tensors are so small that one thread is faster than two.
    command = [sys.executable, "-c", USE, engine.device, program_of_the_page("any set")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = tmp_path_factory.mktemp("elsewhere")
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


def copy(files, folder):
    """Copies these files and folders of steps/ into folder/lifted, where files of a stage's own folder keep it."""
    for file in files:
        copy_one = shutil.copytree if (STEPS / file).is_dir() else shutil.copy
        place = folder / "lifted" / Path(*[part for part in Path(file).parts[1:] if part != ".."])
        place.parent.mkdir(parents=True, exist_ok=True)
        copy_one(STEPS / file, place)


def use(python, folder, **options):
    """Has `check` called with these options on the copy in the folder."""
    python.stdin.write(json.dumps([str(folder), options]) + "\n")
    python.stdin.flush()
    problem = json.loads(python.stdout.readline())
    assert not problem, problem


NO_GPU = """
import importlib, torch
q = torch.zeros(1, 1, 4, 16, dtype=torch.float16)
for file in ("fwd_0_fused", "fwd_1_tma", "fwd_2_roles", "features.flash", "features.decode"):
    try:
        importlib.import_module("lifted." + file).forward(q, q, q)
    except RuntimeError as problem:
        print(file, problem)
"""


@pytest.mark.skipif(engine.name == "cuda", reason="there is a GPU")
def test_without_a_gpu_a_file_of_triton_says_what_is_missing(tmp_path):
    if reason := catalogue.unavailable("03"):
        pytest.skip(reason)
    stems = {stem for stage, stems in SETS.values() if "03" in stage for stem in (*stems.split(), *DECODE.split())}
    copy([f"step03_triton/{stem}.py" for stem in stems], tmp_path)
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    said = subprocess.check_output([sys.executable, "-c", NO_GPU], cwd=tmp_path, env=environment, text=True)
    assert said.count("no GPU: start Python with TRITON_INTERPRET=1") == len(said.splitlines()) == 5


@pytest.mark.parametrize("name", SETS)
def test_copied_files_work_alone(name, tmp_path, python):
    if reason := catalogue.unavailable(name[:2]):
        pytest.skip(reason)
    stage, stems = SETS[name][0], SETS[name][1].split()
    copy([f"{stage}/{stem}.py" for stem in stems], tmp_path)
    refuses = "03" in stage  # the others' autograd, or memory, says so itself
    use(python, tmp_path, forward=f"{stems[0]}.forward", backward=f"{stems[1]}.backward", refuses=refuses)


def inputs(rung, dtypes):
    """{(dtype, D, deterministic): the file of the backward that the rung uses for it}, one for each backward."""
    row = ladder.FORWARD[rung]
    found = {}
    for dtype, D, deterministic in itertools.product(dtypes, (32, 64), (False, True)):
        if any(ladder.BACKWARD[word].takes(dtype, D, deterministic) for word in row.backwards):
            backward = ladder.backward_row(rung, dtype, D, deterministic)
            if backward.file not in found.values():
                found[dtype, D, deterministic] = backward.file
    return found


@pytest.mark.parametrize("rung", ladder.FORWARD)
def test_a_rung_of_stage_02_works_alone(rung, tmp_path, python):
    supports = catalogue.stage("02").SUPPORTS
    if reason := catalogue.unavailable("02") or supports["elsewhere"].get(rung):
        pytest.skip(reason)
    backwards = inputs(rung, supports["limits"][rung]["dtypes"])
    assert set(backwards.values()) == {ladder.BACKWARD[word].file for word in ladder.FORWARD[rung].backwards}
    cuda = [ladder.FORWARD[rung].file, *backwards.values()]
    copy([*HOST, *(f"step02_fa2_cuda/{file}" for file in cuda)], tmp_path)
    for dtype, D, deterministic in backwards:
        input = {"D": D, "dtype": str(dtype).removeprefix("torch.")}
        options = {"forward_options": {"rung": rung}}
        options["backward_options"] = {"rung": rung, "deterministic": deterministic}
        use(python, tmp_path, forward="calls.forward", backward="calls.backward", **input, **options)


# ---- the ring, which is used by several processes

RING = "ring relay layout merge merge_kernels ranks/comm ranks/agree ranks/watch ranks/board ranks/note ranks/verdict"
RING = {f"{stem}.py" for stem in RING.split()}
# Two ranks, the second one a fork, because importing torch takes longer than the rest. Each makes three steps of SGD on
# three matrices by the page's program, and beside them by torch's own attention.
TRAIN = """
import os, sys
from datetime import timedelta
sys.modules["steps"] = sys.modules["reference"] = None
from types import SimpleNamespace
import torch
import torch.distributed as dist
import torch.nn.functional as F

store, program = sys.argv[1:]
other = os.fork()
rank = 0 if other else 1
how = dict(rank=rank, world_size=2, timeout=timedelta(seconds=30))
dist.init_process_group("gloo", store=dist.FileStore(store, 2), **how)
from lifted import bwd_3_tiled, fwd_3_tiled
from lifted.layout import Layout

S, H, D = 21, 2, 16
torch.manual_seed(0)
x, target, start = torch.randn(S, H * D), torch.randn(1, H, S, D), torch.randn(3, H * D, H * D) / (H * D) ** 0.5
whole = Layout("zigzag", S, 2)

def by_the_ring(q, k, v):
    block = SimpleNamespace(forward=fwd_3_tiled.forward, backward=bwd_3_tiled.backward)
    names = {"S": S, "q": q, "k": k, "v": v, "block": block}
    exec(program, names)
    return names["out"]

def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def train(attend, x, target, ranks):
    w, losses = start.clone().requires_grad_(), []
    for _ in range(3):
        q, k, v = (x @ one for one in w)
        out = attend(*(y.view(-1, H, D).transpose(0, 1)[None].contiguous() for y in (q, k, v)))
        loss = (out - target).square().sum() / S
        gradient, = torch.autograd.grad(loss, w)
        loss = loss.detach()
        for sum in (gradient, loss) if ranks > 1 else ():
            dist.all_reduce(sum)
        losses.append(loss)
        w = (w.detach() - 0.01 * gradient).requires_grad_()
    return w.detach(), torch.stack(losses)

got, losses = train(by_the_ring, whole.shard(x, rank), whole.shard(target, rank), 2)
want, want_losses = train(by_torch, x, target, 1)
torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=1e-5)
assert losses[2] < losses[0] and not torch.equal(got, start)
dist.barrier()
dist.destroy_process_group()
if other:
    sys.exit(os.waitpid(other, 0)[1])
"""


def program_of_the_page(what):
    """The page's program that makes this differentiable: "any set" or "ring attention"."""
    programs = re.findall(r"```python\n(.*?)```", (STEPS / "README.md").read_text(), re.S)
    (program,) = [program for program in programs if f"# {what}, differentiable" in program]
    return program


def test_the_ring_trains_alone_on_two_ranks(tmp_path):
    block = [f"step00_naive/{stem}.py" for stem in ("fwd_3_tiled", "bwd_3_tiled")]
    copy([*(f"step04_ring/{file}" for file in RING), *block], tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "store"), program_of_the_page("ring attention")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_ring_s_files_name_the_files_that_they_need():
    """Named are those that a file imports, and one of those that it is handed. With them the set is closed."""
    named, closed = {}, {"ring.py"}
    for file in RING:
        text = (STEPS / "step04_ring" / file).read_text()
        head = " ".join(text.split('"""')[1].split()).partition("Needs ")[2]
        named[file] = {str(Path(file).parent / other) for other in re.findall(r"[\w/]+\.py", head)}
        lines = re.findall(r"^ *from \.(\w*) import ([\w, ]+)", text, re.M)
        imported = {name for other, names in lines for name in ([other] if other else names.split(", "))}
        assert {str(Path(file).parent / f"{name}.py") for name in imported} <= named[file], file
    for _ in RING:
        closed = closed.union(*(named[file] for file in closed & RING))
    assert closed == RING


def test_the_page_names_the_files_of_the_ring():
    assert names_on_the_page("ring.forward", whole=True) - {"step04_ring/"} == RING


TRITON = {path.stem: path.read_text() for path in (STEPS / "step03_triton").rglob("*.py") if path.stem != "cached"}
HEADS = {stem: " ".join(text.split('"""')[1].split()) for stem, text in TRITON.items()}
OF_THESE = "the files that they name"


def needed(stem):
    """The files that the head of a file of stage 03 names as needed, and where it says so those that they name."""
    needs = HEADS[stem].partition("Needs ")[2]
    found = set(re.findall(r"(\w+)\.py", needs))
    return found.union(*map(needed, found)) if OF_THESE in needs else found


@pytest.mark.parametrize("stem", [stem for stem, head in HEADS.items() if "Needs " in head])
def test_the_head_of_a_file_names_the_files_that_it_needs(stem):
    lines = re.findall(r"^from \.+(\w*) import ([\w, ]+)", TRITON[stem], re.M)
    imported = {name for file, names in lines for name in ([file] if file else names.split(", "))}
    imported |= set(re.findall(r"^from \.+(\w+) import \(", TRITON[stem], re.M))
    assert imported <= needed(stem) and (OF_THESE in HEADS[stem] or imported == needed(stem))


@pytest.mark.parametrize("stems", [stems for stage, stems in SETS.values() if "03" in stage] + [DECODE])
def test_a_set_has_all_that_its_files_need(stems):
    names = {Path(stem).name for stem in stems.split()}
    assert {name for stem in names - {"cached"} for name in needed(stem)} <= names


def test_a_cuda_file_needs_no_other_than_ptx_cuh():
    files = sorted((STEPS / "step02_fa2_cuda").glob("*.cu"))
    assert files
    for file in files:
        assert set(re.findall(r'#include [<"](.+)[>"]', file.read_text())) <= {"ptx.cuh"}, file


def names_on_the_page(call, whole=False):
    """The names of files and folders in the row of the page's table with this call. whole: as they stand there."""
    page = (STEPS / "README.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("|") and f"`{call}(" in line]
    return {file if whole else Path(file).name for file in re.findall(r"`([^`]+)`", line.split("|")[2])}


@pytest.mark.parametrize("name", ["00 tiled", "01 registers", "03 fused", "03 tma", "03 features", "03 decode"])
def test_the_page_names_the_files_of_a_set(name):
    stage, stems = (SETS | {"03 decode": ("step03_triton", DECODE)})[name]
    stems = stems.split()
    files = {f"{stem}.py".removeprefix("../") for stem in stems}
    assert names_on_the_page(f"{Path(stems[0]).name}.forward", whole="03" in name) - {stage, f"{stage}/"} == files


def test_the_page_names_the_files_that_every_rung_needs():
    assert names_on_the_page("calls.forward") == {"step02_fa2_cuda", *(Path(file).name for file in HOST)}
