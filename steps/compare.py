"""What `python -m steps demo` does to each stage: its attention on the demo model's own q, k, v, and inside a training step.

Yields one row a stage and size: a plain dict, as `--json` writes it.
"""

import importlib
import shutil
import time

import torch
import torch.distributed as dist

from reference import error
from reference.bench import cost, timing
from steps import demo, engine

STAGES = {"00": "step00_naive", "01": "step01_fa1_numba", "02": "step02_fa2_cuda", "03": "step03_triton", "04": "step04_ring"}
ENGINES = {  # what runs the kernels, by engine
    "cpu": {"00": "torch", "01": "simulator", "02": "emulation", "03": "interpreter", "04": "gloo, 2 ranks"},
    "cuda": {"00": "torch", "01": "Numba CUDA", "02": "NVRTC", "03": "Triton", "04": "2 ranks"},
}
SIMULATED_BYTES = 67  # Numba's simulator runs one Python thread a CUDA thread: stage 01 takes a shorter sequence there
RING_RANKS = 2  # over NCCL where there is a GPU for each, else over gloo


class Subject:
    """A trained model, its one sequence, and what SDPA and the float64 reference say about them."""

    def __init__(self, size, progress):
        self.size = size
        self.model = demo.train(size, engine.device, progress)
        self.tokens = demo.sequence(size, engine.device)

    def upto(self, N):
        """The same model on the first N bytes."""
        part = object.__new__(Subject)
        part.size, part.model, part.tokens = self.size, self.model, self.tokens[:, : N + 1]
        return part

    def inputs(self):
        """q, k, v, dout (1, H, N, D)."""
        return demo.attention_input(self.model, self.tokens)

    def step_under_sdpa(self):
        """(float64 step, tolerances): loss and gradients, and how far a float32 step may be from them.

        tolerance = 2 |SDPA in float32 - float64| + 16 eps(float32) max|float64|, for the loss and each parameter's gradient.
        """
        single = _flat(demo.training_step(self.model, self.tokens, demo.sdpa))
        double = _flat(demo.training_step(self.model.double(), self.tokens, demo.sdpa))
        self.model.float()
        tolerance = {n: 2 * _distance(single[n], x) + 16 * 2**-23 * x.abs().max().item() for n, x in double.items()}
        return double, tolerance


def compare(number, subject, timed=False):
    """One stage's row: errors and tolerances of out, lse, dq, dk, dv, of the loss and of the worst parameter gradient."""
    if number == "01" and engine.name == "cpu":
        subject = subject.upto(SIMULATED_BYTES)
    q, k, v, dout = subject.inputs()
    row = {"stage": STAGES[number], "engine": ENGINES[engine.name][number], "dtype": "float32"}
    row |= {"shape": list(q.shape), "causal": True}
    if reason := unavailable(number):
        return row | {"verdict": "skipped", "reason": reason}
    start = time.perf_counter()
    got, step = (_on_ranks if number == "04" else _on_one)(number, subject, q, k, v, dout)
    row["seconds"] = round(time.perf_counter() - start, 2)
    want = error.expected(q, k, v, dout, causal=True)
    row["errors"], row["tolerances"] = error.errors(got, want), want.tolerance
    reference, tolerance = subject.step_under_sdpa()
    differences = {name: _distance(step[name], x) for name, x in reference.items()}
    row["loss_difference"], row["loss_tolerance"] = differences.pop("loss"), tolerance.pop("loss")
    worst = max(differences, key=lambda n: differences[n] / tolerance[n])
    row["gradient"] = {"worst": worst, "difference": differences[worst], "tolerance": tolerance[worst]}
    fits = [e <= row["tolerances"][n] for n, e in row["errors"].items()]
    fits += [row["loss_difference"] <= row["loss_tolerance"], *(d <= tolerance[n] for n, d in differences.items())]
    row["verdict"] = "agrees" if all(fits) else "FAILS"
    if timed and number != "00":
        row |= _speed(number, q, k, v)
    return row


def unavailable(number):
    """Why the stage cannot run on this machine, or None."""
    if number == "02" and engine.name == "cpu" and not shutil.which("g++"):
        return "without a GPU this stage is compiled by g++, which is missing (Debian, Ubuntu: apt install g++)"
    try:
        stage(number)
        if number == "04":
            stage("03")  # its default block
    except ImportError as e:
        return f"{e.name or e} is not installed on this platform"
    return None


def stage(number):
    """The stage's module."""
    return importlib.import_module(f"steps.{STAGES[number]}")


def _on_one(number, subject, q, k, v, dout):
    """(results by name, training step) in this process."""
    module = stage(number)
    out, lse = module.forward(q, k, v, causal=True)
    grads = module.backward(dout, q, k, v, out, lse, causal=True)
    got = dict(zip(error.NAMES, (out, lse, *grads), strict=True))
    return got, _flat(demo.training_step(subject.model, subject.tokens, lambda q, k, v: module.attention(q, k, v, causal=True)))


def _on_ranks(number, subject, q, k, v, dout):
    """The same with the sequence dealt out to ranks, one process each."""
    from steps.step04_ring import launch
    from steps.step04_ring.layout import Layout

    tensors = [x.cpu() for x in (q, k, v, dout, subject.tokens)]
    state = {name: x.cpu() for name, x in subject.model.state_dict().items()}
    results = launch.spawn(ring_rank, RING_RANKS, *tensors, state, subject.size)
    layout = Layout("zigzag", q.shape[-2], RING_RANKS, causal=True)
    got = {}
    for name in error.NAMES:
        shards = [shard[name].to(q.device) for shard, _ in results]
        got[name] = layout.unshard(shards, dim=-1 if name == "lse" else -2)
    return got, {name: x.to(q.device) for name, x in results[0][1].items()}


def ring_rank(q, k, v, dout, tokens, state, size):
    """One rank of stage 04: its shard's results, and the training step summed over the ranks."""
    from steps import step04_ring
    from steps.step04_ring.layout import Layout

    N, device = q.shape[-2], engine.device
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout("zigzag", N, ranks, causal=True)
    q, k, v, dout = (layout.shard(x, rank).to(device) for x in (q, k, v, dout))
    out, lse = step04_ring.forward(q, k, v, causal=True, layout="zigzag")
    grads = step04_ring.backward(dout, q, k, v, out, lse, causal=True, layout="zigzag")
    got = dict(zip(error.NAMES, (x.cpu() for x in (out, lse, *grads)), strict=True))

    model = demo.Model(size.H, size.D).to(device)
    model.load_state_dict(state)
    mine = layout.positions(rank)
    step = demo.training_step(
        model, tokens[:, :-1][:, mine].to(device), lambda q, k, v: step04_ring.attention(q, k, v, causal=True, layout="zigzag"),
        positions=mine.to(device), targets=tokens[:, 1:][:, mine].to(device),
    )  # fmt: skip
    summed = _flat(step)
    for x in summed.values():
        dist.all_reduce(x)
    return got, {name: x.cpu() for name, x in summed.items()}


def _speed(number, q, k, v):
    """{"tflops", "sdpa_tflops"} of the forward on a GPU, taken in turns; stage 04 is timed by its own demo."""
    if number == "04":
        return {}
    B, H, N, D = q.shape
    module = stage(number)
    calls = {"tflops": lambda: module.forward(q, k, v, causal=True), "sdpa_tflops": lambda: demo.sdpa(q, k, v)}
    flops = cost.flops(B, H, N, D, causal=True)
    times = timing.interleaved(calls, reps=10, device=q.device)
    return {name: round(flops / t.ms_median / 1e9, 2) for name, t in times.items()}


def _flat(step):
    """(loss, {parameter: gradient}) as one dict of tensors."""
    loss, gradients = step
    device = next(iter(gradients.values())).device
    return {"loss": torch.tensor(loss, dtype=torch.float64, device=device), **gradients}


def _distance(a, b):
    """max |a - b|; inf when a is not finite."""
    distance = (a.double() - b.double()).abs().max().item()
    return distance if distance == distance else float("inf")
