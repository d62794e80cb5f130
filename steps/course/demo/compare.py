"""What `python -m steps demo` does with a stage.

It runs the stage's attention on the demo model's q, k and v and compares the results with the float64 reference. Then
it compares a training step of the model with the stage's attention in it with the same step in float64.

`compare` returns one row for a stage and a size, a plain dict that `--json` writes as it is.
"""

import functools
import math
import time

import torch
import torch.distributed as dist

from reference import error
from steps import engine
from steps.catalogue import STAGES, stage, unavailable
from steps.course.bench import cost, timing
from steps.course.demo.model import Model, attention_input, sdpa, sequence, train, training_step

ENGINES = {  # what runs the kernels, by engine
    "cpu": {"00": "torch", "01": "simulator", "02": "emulation", "03": "interpreter", "04": "gloo, 2 ranks"},
    "cuda": {"00": "torch", "01": "Numba CUDA", "02": "NVRTC", "03": "Triton", "04": "2 ranks"},
}
# Numba's simulator runs a Python thread for each CUDA thread, which is slow, so stage 01 gets a shorter sequence there.
SIMULATED_BYTES = 67
RING_RANKS = 2  # They use NCCL if there is a GPU for each, otherwise gloo.


class Subject:
    """A trained model with its one sequence, and the results that a stage is compared with."""

    def __init__(self, size, progress):
        self.size = size
        self.model = train(size, engine.device, progress)
        self.tokens = sequence(size, engine.device)

    def upto(self, N):
        """The same model with only the first N bytes of the sequence."""
        part = object.__new__(Subject)
        part.size = self.size
        part.model = self.model
        part.tokens = self.tokens[:, : N + 1]
        return part

    def inputs(self):
        """q, k, v, dout (1, H, N, D)."""
        return attention_input(self.model, self.tokens)

    def step_under_sdpa(self):
        """(float64 step, tolerances): the loss and gradients, and how far a float32 step may differ from them.

        tolerance = 2 |SDPA in float32 - float64| + 16 eps(float32) max|float64|, for the loss and each parameter's
        gradient.
        """
        single = _flat(training_step(self.model, self.tokens, sdpa))
        double = _flat(training_step(self.model.double(), self.tokens, sdpa))
        self.model.float()
        tolerance = {}
        for name, x in double.items():
            tolerance[name] = 2 * _distance(single[name], x) + 16 * 2**-23 * x.abs().max().item()
        return double, tolerance


def compare(number, subject, timed=False):
    """One stage's row: errors and tolerances of out, lse, dq, dk, dv, of the loss, and of the worst parameter gradient.

    timed: adds the speed of the forward beside SDPA's.
    """
    if number == "01" and engine.name == "cpu":
        subject = subject.upto(SIMULATED_BYTES)
    q, k, v, dout = subject.inputs()
    row = {"stage": STAGES[number], "engine": ENGINES[engine.name][number], "dtype": "float32"}
    row |= {"shape": list(q.shape), "causal": True}
    if reason := unavailable(number):
        return row | {"verdict": "skipped", "reason": reason}
    run = _on_ranks if number == "04" else _on_one
    start = time.perf_counter()
    got, step = run(number, subject, q, k, v, dout)
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


def _on_one(number, subject, q, k, v, dout):
    """(results by name, training step) in this process."""
    module = stage(number)
    out, lse = module.forward(q, k, v, causal=True)
    grads = module.backward(dout, q, k, v, out, lse, causal=True)
    got = dict(zip(error.NAMES, (out, lse, *grads), strict=True))
    attention = functools.partial(module.attention, causal=True)
    return got, _flat(training_step(subject.model, subject.tokens, attention))


def _on_ranks(number, subject, q, k, v, dout):
    """`_on_one` with the sequence sharded over several ranks, each a process of its own."""
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
    """One rank of stage 04: the results of its shard, and the training step summed over all ranks."""
    from steps import step04_ring
    from steps.step04_ring.layout import Layout

    N, device = q.shape[-2], engine.device
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout("zigzag", N, ranks, causal=True)
    q, k, v, dout = (layout.shard(x, rank).to(device) for x in (q, k, v, dout))
    out, lse = step04_ring.forward(q, k, v, causal=True, layout="zigzag")
    grads = step04_ring.backward(dout, q, k, v, out, lse, causal=True, layout="zigzag")
    got = dict(zip(error.NAMES, (x.cpu() for x in (out, lse, *grads)), strict=True))

    model = Model(size.H, size.D).to(device)
    model.load_state_dict(state)
    mine = layout.positions(rank)
    inputs, targets = (x[:, mine].to(device) for x in (tokens[:, :-1], tokens[:, 1:]))
    attention = functools.partial(step04_ring.attention, causal=True, layout="zigzag")
    summed = _flat(training_step(model, inputs, attention, positions=mine.to(device), targets=targets))
    for x in summed.values():
        dist.all_reduce(x)
    return got, {name: x.cpu() for name, x in summed.items()}


def _speed(number, q, k, v):
    """{"tflops", "sdpa_tflops"} of the forward on a GPU, with the calls of the stage and of SDPA interleaved."""
    if number == "04":
        return {}  # Its own demo times stage 04.
    B, H, N, D = q.shape
    module = stage(number)
    calls = {"tflops": lambda: module.forward(q, k, v, causal=True), "sdpa_tflops": lambda: sdpa(q, k, v)}
    flops = cost.Point(B, H, N, D, causal=True).flops()
    times = timing.interleaved(calls, reps=10, device=q.device)
    return {name: round(flops / t["ms_median"] / 1e9, 2) for name, t in times.items()}


def _flat(step):
    """A training step (loss, {parameter: gradient}) as one dict of tensors."""
    loss, gradients = step
    device = next(iter(gradients.values())).device
    return {"loss": torch.tensor(loss, dtype=torch.float64, device=device), **gradients}


def _distance(a, b):
    """max |a - b|, or inf if there is a NaN."""
    distance = (a.double() - b.double()).abs().max().item()
    return float("inf") if math.isnan(distance) else distance
