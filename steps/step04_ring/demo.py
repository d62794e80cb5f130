# SPDX-License-Identifier: MIT
"""Ring attention beside one device, forward and backward, on the same random input.

    python -m steps.step04_ring.demo --seq 2048 --dim 64 --gpus 4        starts its own ranks
    torchrun --standalone --nproc-per-node 4 -m steps.step04_ring.demo --seq 2048
    python -m steps.step04_ring.demo --strategy star                     time, bytes and memory of one strategy

Memory is the peak beyond the inputs. On a GPU it is the peak of forward and backward by torch's allocator, which does
not count the memory that fetch shares; on a CPU it is that of the forward, by the formulas of account.py.
Without a GPU the ranks are processes over gloo that share the CPU, and stage 00's tiles in plain torch compute a block,
because Triton's interpreter would take minutes. For the comparison every rank also computes the whole sequence alone.
"""

import os
import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import typer

from steps import engine
from steps.step00_naive import bwd_3_tiled, fwd_3_tiled
from steps.step04_ring import SUPPORTS, Layout, forward, launch, ring_attention, strategies
from steps.step04_ring.ranks import environment
from steps.step04_ring.strategies import account, one_device

INTERPRETED = 256  # positions in 16 bits that Triton's interpreter computes within some seconds
NAMES = ("out", "lse", "dq", "dk", "dv")
EXPECTED = (
    "             says nothing about GPUs: these ranks are processes that share the cores of one CPU.\n"
    "             A ring is faster than one device where each rank has a GPU."
)


def main(
    seq: int = typer.Option(2048, help="positions of the whole sequence"),
    dim: int = typer.Option(64, help="head_dim"),
    gpus: int = typer.Option(4, help="ranks to start; under torchrun, mpirun or srun theirs count"),
    heads: int = 4,
    causal: bool = False,
    layout: str = typer.Option("zigzag", help="zigzag, contiguous or striped"),
    dtype: str = typer.Option("", help="float32, float16 or bfloat16; default: bfloat16 with a GPU, float32 without"),
    strategy: str = typer.Option("", help=f"what one way to share a sequence costs: {', '.join(strategies.LESSONS)}"),
):
    """Runs attention on one device and as a ring, and prints both times, the memory, and the largest differences."""
    dtype = dtype or ("float32" if engine.name == "cpu" else "bfloat16")
    launched = environment.launched()  # as one of the launcher's ranks
    if launched:
        gpus = in_one_line(environment.read, torch.cuda.device_count() if engine.name == "cuda" else 0).size
    check_flags(seq, dim, gpus, heads, layout, dtype, strategy)
    work = partial(report_strategy, strategy) if strategy else report
    arguments = seq, dim, heads, causal, layout, dtype
    if launched:
        in_one_line(launch.init)
        lines = work(*arguments)
        if dist.get_rank() == 0:
            print("\n".join(lines), flush=True)
        dist.destroy_process_group()
    else:
        print("\n".join(launch.spawn(work, gpus, *arguments)[0]))


def in_one_line(join, *args):
    """join(*args); where the ranks cannot be joined, the command ends with the one line that says why."""
    try:
        return join(*args)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None


def check_flags(seq, dim, gpus, heads, layout, dtype, strategy):
    """Ends the command with one line if a flag is wrong, before any rank starts."""
    for flag, value in (("--seq", seq), ("--gpus", gpus), ("--heads", heads)):
        if value < 1:
            raise SystemExit(f"{flag} must be at least 1, got {value}.")
    if dim not in SUPPORTS["head_dims"]:
        raise SystemExit(f"--dim must be from 1 to {max(SUPPORTS['head_dims'])}, got {dim}.")
    dtypes = [str(x).removeprefix("torch.") for x in SUPPORTS["dtypes"]]
    words = ("--layout", layout, SUPPORTS["layouts"]), ("--dtype", dtype, dtypes)
    if strategy:
        words += (("--strategy", strategy, list(strategies.LESSONS)),)
    for flag, value, known in words:
        if value not in known:
            raise SystemExit(f"{flag} must be {', '.join(known[:-1])} or {known[-1]}, got {value}.")
    if engine.name == "cpu" and dtype != "float32" and seq > INTERPRETED:
        raise SystemExit(
            f"Without a GPU Triton's interpreter computes {dtype}, which would take minutes for --seq {seq}. "
            f"Use --dtype float32, or --seq {INTERPRETED} at most."
        )
    if strategy == "ulysses" and heads % gpus:
        raise SystemExit(f"--strategy ulysses gives each rank whole heads: {gpus} ranks cannot share --heads {heads}.")
    if strategy == "query_parallel" and layout == "striped" and gpus > 1:
        raise SystemExit("--strategy query_parallel takes --layout zigzag or contiguous, not striped.")


def report(seq, dim, heads, causal, layout, dtype):
    """What one rank does; returns the lines to print."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block, block_name = choose_block(dtype)
    random = torch.Generator().manual_seed(0)  # the same numbers on every rank
    shape, kind = (1, heads, seq, dim), getattr(torch, dtype)
    q, k, v, dout = (torch.randn(shape, generator=random).to(engine.device, kind) for _ in range(4))

    def alone():
        out, lse = block.forward(q, k, v, causal=causal)
        return out, lse, *block.backward(dout, q, k, v, out, lse, causal=causal)

    whole = Layout(layout, seq, ranks)
    mine = [whole.shard(x, rank) for x in (q, k, v, dout)]
    options = dict(causal=causal, layout=layout, block=block, S=seq)

    def together():
        leaves = [x.detach().requires_grad_() for x in mine[:3]]
        out = ring_attention(*leaves, **options)
        out.backward(mine[3])
        return out.detach(), *(x.grad for x in leaves)

    if rank == 0:  # timed while the other ranks wait; these need only the result
        single_seconds, want = timed(alone)
        single_bytes = allocated(alone) if engine.name == "cuda" else want[0].nbytes + want[1].nbytes
    dist.barrier()
    if rank != 0:
        want = alone()
    ring_seconds, (out, *grads) = timed(together, dist.barrier)
    sizes = dict(B=1, H=heads, Hk=heads, D=dim, e=kind.itemsize)
    if engine.name == "cuda":
        ring_bytes = allocated(together)
    else:
        ring_bytes = account.memory_bytes("ring", Layout(layout, seq, ranks, causal), rank, **sizes)
    got = (out, forward(*mine[:3], **options)[1], *grads)
    shards = [whole.shard(x, rank, dim=2) for x in want]
    pairs = (a.float() - b.float() for a, b in zip(got, shards, strict=True))
    differences = [x.abs().max().item() if x.numel() else 0.0 for x in pairs]

    everyone = [None] * ranks
    dist.all_gather_object(everyone, (ring_seconds, ring_bytes, *differences))
    if rank != 0:
        return []
    ring_seconds, ring_bytes, *largest = (max(column) for column in zip(*everyone, strict=True))
    listed = ", ".join(f"{name} {x:.1e}" for name, x in zip(NAMES, largest, strict=True))
    memory = f"{ring_bytes / 1e6:9.3f} MB a rank beyond its inputs" + ", in the forward" * (engine.name == "cpu")
    cores = f"    ({os.cpu_count()} CPU cores)" if engine.name == "cpu" else ""
    threads = torch.get_num_threads()
    return [
        engine.describe(),
        f"{ranks} ranks over {dist.get_backend()}, {layout}, block {block_name}, {threads} CPU threads a rank",
        f"B 1, H {heads}, S {seq}, D {dim}, {dtype}, {'causal' if causal else 'not causal'}, forward + backward",
        f"one device   {1e3 * single_seconds:9.1f} ms",
        f"ring         {1e3 * ring_seconds:9.1f} ms   (slowest rank)",
        f"speed-up     {single_seconds / ring_seconds:9.2f} x{cores}",
        *([EXPECTED] if engine.name == "cpu" else []),
        f"memory       {memory}; one device: {single_bytes / 1e6:.3f} MB",
        f"largest differences to one device: {listed}",
    ]


def report_strategy(strategy, seq, dim, heads, causal, layout, dtype):
    """What one rank does with --strategy; returns the lines to print."""
    kind, (block, block_name) = getattr(torch, dtype), choose_block(dtype)
    attention, N = strategies.load(strategy), dist.get_world_size()
    whole = Layout(layout, seq, N, causal)
    inputs = one_device.random_inputs(seq, heads, heads, dim, kind, engine.device)
    mine = [whole.shard(x, dist.get_rank()) for x in inputs]
    options = dict(causal=causal, layout=layout, S=seq, block=block)

    def forward():
        with torch.no_grad():
            return attention(*mine[:3], **options)

    def both():
        return one_device.passes(attention, *mine, **options)

    seconds, has_backward = [timed(call, dist.barrier)[0] for call in (forward, both)], len(both()) > 1
    everyone = [None] * N
    dist.all_gather_object(everyone, seconds)
    ms, ms_both = (1e3 * max(column) for column in zip(*everyone, strict=True))
    sizes = dict(B=1, H=heads, Hk=heads, D=dim, e=kind.itemsize)
    sent = [account.sent_bytes(strategy, whole, rank, **sizes) for rank in range(N)]
    held = max(account.memory_bytes(strategy, whole, rank, **sizes) for rank in range(N))
    line = one_device.differences(attention, seq, heads, heads, dim, causal, layout, kind, block=block)
    return [
        f"{engine.describe()}, block {block_name}",
        f"{strategy}, {layout}, {N} ranks, S {seq}, H {heads}, D {dim}, {'causal' if causal else 'not causal'}",
        f"forward             {ms:9.2f} ms (slowest rank)",
        f"forward + backward  {ms_both:9.2f} ms" if has_backward else "no backward",
        f"sent, forward       {max(there for there, _ in sent) / 1e6:9.3f} MB a rank",
        *([f"sent, backward      {max(back for _, back in sent) / 1e6:9.3f} MB a rank"] if has_backward else []),
        f"memory, forward     {held / 1e6:9.3f} MB a rank beyond its inputs",
        line,
    ]


def timed(call, before=lambda: None):
    """(the fewest seconds that one of two calls took, the result), after one call to warm up.

    before: is called before each timed call.
    """
    result, seconds = call(), []
    for _ in range(2):
        before()
        synchronize()
        start = time.perf_counter()
        result = call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def synchronize():
    """Waits for the GPU. A kernel launch returns before the kernel has finished, so the clock must not be read yet."""
    if engine.name == "cuda":
        torch.cuda.synchronize()


def allocated(call):
    """The call's peak memory on a GPU in bytes, without its inputs, with its result."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def choose_block(dtype):
    """(block, its name): stage 03, or without a GPU in float32 stage 00's tiles, which are faster there."""
    if engine.name == "cpu" and dtype == "float32":
        tile = (256, 256)  # far larger than stage 00's own tiles, which are small to show the algorithm
        forward, backward = partial(fwd_3_tiled.forward, tile=tile), partial(bwd_3_tiled.backward, tile=tile)
        return SimpleNamespace(forward=forward, backward=backward), f"step00_naive's tiles, {tile[0]} x {tile[1]}"
    from steps import step03_triton

    return step03_triton, "step03_triton"


if __name__ == "__main__":
    typer.run(main)
