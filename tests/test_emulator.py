"""Stage 02's CPU emulation of CUDA: what it computes, what it refuses, and which planted bugs it catches."""

import contextlib
import platform
import re
import signal
import time
from ctypes import c_float, c_int
from pathlib import Path

import pytest
import torch

from steps.cached import Cache
from steps.step02_fa2_cuda import calls, emulator, ladder, launches
from support.schedules import WRONG, problems

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")
SCHEDULES = [("forward", "forward", 0), ("reverse", "reverse", 0), ("random", "random", 1), ("random", "random", 2)]

KERNELS = """
#include "ptx.cuh"
#ifndef T
#define T bf16
#endif

extern "C" __global__ void mirror(Global<const float> x, Global<float> y) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(blockDim.x);
  int t = threadIdx.x, first = blockIdx.x * blockDim.x;
  tile[t] = x[first + t];
  __syncthreads();
  y[first + t] = tile[blockDim.x - 1 - t];
}

extern "C" __global__ void unwritten(Global<float> y) {
  SharedMemory smem;
  y[threadIdx.x] = smem.array<float>(blockDim.x)[threadIdx.x];
}

extern "C" __global__ void used(Global<const T> x, Global<T> y, Global<float> sum, int written) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(32);
  int t = threadIdx.x;
  if (written) tile[t] = x[t];
  float number = 3 - 2 * to_float(tile[t]);
  atomicAdd(&sum[0], number);
  y[t] = T{uint16_t(pack<T>(number, number))};
}

extern "C" __global__ void shared_access(Global<float> y, int i) {
  SharedMemory smem;
  Shared<float> a = smem.array<float>(4), b = smem.array<float>(4);
  b[0] = 0;
  y[0] = a[i];  // mark: outside
}

// In CUDA the address of an element is a pointer like any other.
__device__ Shared<const float> from(Shared<float> tile, int i) { return &tile[i]; }

extern "C" __global__ void address_of(Global<float> y, int i) {
  SharedMemory smem;
  Shared<float> a = smem.array<float>(4), b = smem.array<float>(4);
  for (int e = 0; e < 4; e++) b[e] = e;
  y[0] = from(b, 1)[i];  // mark: beyond
}

extern "C" __global__ void global_write(Global<float> y, int i) { y[i] = 1; }

extern "C" __global__ void warp_sum(Global<int> y) {
  int sum = threadIdx.x;
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  y[threadIdx.x] = sum;
}

extern "C" __global__ void neighbours(Global<int> y) {
  int t = threadIdx.x, n = blockDim.x;
  y[t] = __shfl_up_sync(0xffffffff, t, 1);
  y[n + t] = __shfl_down_sync(0xffffffff, t, 3, 8);
  y[2 * n + t] = __shfl_sync(0xffffffff, t, 5, 16);
  if (t % 2) y[3 * n + t] = __shfl_xor_sync(0xaaaaaaaa, t, 2);
  __syncwarp();
}

extern "C" __global__ void half_a_warp(Global<int> y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1, 1);  // mark: half
}

extern "C" __global__ void lane_not_in_mask(Global<int> y) { y[threadIdx.x] = __shfl_xor_sync(0xffff, 1, 1); }

extern "C" __global__ void stuck() {
  if (threadIdx.x >= 40) return;
  __syncthreads();  // mark: stuck
}

extern "C" __global__ void two_barriers() {
  if (threadIdx.x < 8)
    __syncthreads();  // mark: first
  else
    __syncthreads();  // mark: second
}

// The threads of each block add to dq in the block's turn, which the last thread waits for and passes on.
extern "C" __global__ void add_in_turn(Global<float> dq, Global<int> added, int before, int after) {
  bool last = threadIdx.x == blockDim.x - 1;
  if (last)
    while (load_acquire(added) != blockIdx.x) {
    }
  if (before) __syncthreads();
  atomic_add_4(dq, 1, 2, 3, 4);
  if (after == 1) __syncthreads();
  if (after == 2) __syncwarp();
  if (last) add_release(added, 1);
}

extern "C" __global__ void take_turns(Global<int> turns, Global<int> counter) {
  turns[atomicAdd(&counter[0], 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

extern "C" __global__ void rounded_once(Global<float> y, float a, float b, float c) {
  y[0] = a * b - c;
  y[1] = __fmul_rn(a, b) - c;
}

extern "C" __global__ void two_blocks(Global<float> y, int how, Global<int> turn) {
  if (how == 0) y[blockIdx.x] = 1;
  if (how == 1) atomicAdd(&y[0], 1);
  if (how == 2) atomic_add_4(y, 1, 1, 1, 1);
  if (how == 3) y[blockIdx.x / 2] += 1;  // the blocks 0 and 1, and the blocks 2 and 3
  if (how == 4) store_16(y, {1 + blockIdx.x, 1, 1, 1});
  if (how == 5) atomicAdd(&turn[0], 1), y[0] = blockIdx.x + 1;  // only the other array is added to atomically
  if (how == 6) blockIdx.x == 0 ? void(y[0] = 1) : void(atomicAdd(&y[0], 1));  // the first block does not add
  if (how == 7) blockIdx.x == 1 ? void(y[0] += 1) : void(atomicAdd(&y[0], 1));
}

extern "C" __global__ void one_addition_a_block(Global<float> y) {
  SharedMemory smem;
  Shared<float> sum = smem.array<float>(1);
  if (threadIdx.x == 0) sum[0] = 0;
  __syncthreads();
  atomicAdd(&sum[0], 1);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&y[0], sum[0]);
}

extern "C" __global__ void endless() {
  for (int i = 0; i < 300000; i++) __syncthreads();
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(kernel, *arguments, grid=1, block=32, shared_bytes=0, **macros)"""
    file = tmp_path_factory.mktemp("kernels") / "kernels.cu"
    file.write_text(KERNELS.lstrip())

    def run(kernel, *arguments, grid=1, block=32, shared_bytes=0, **macros):
        arguments = [c_int(x) if isinstance(x, int) else x for x in arguments]
        emulator.launch(file, kernel, arguments, grid=grid, block=block, shared_bytes=shared_bytes, macros=macros)

    return run


def place(mark):
    """kernels.cu:N for the line of KERNELS that ends with the comment "// mark: ..."."""
    lines = enumerate(KERNELS.lstrip().split("\n"), 1)
    return next(f"kernels.cu:{n}" for n, text in lines if text.endswith(f"// mark: {mark}"))


def test_without_the_assembly(run, monkeypatch):
    """On processors other than x86-64, ucontext switches the fibers."""
    libraries, compile = [], emulator.compile
    monkeypatch.setattr(emulator, "compile", lambda *what: libraries.append(compile(*what)) or libraries[-1])
    x = torch.arange(80.0)
    for flags, macros in (([], {"UCONTEXT": 0}), (["-U__ELF__"], {"UCONTEXT": 1})):
        monkeypatch.setattr(emulator, "_FLAGS", [*emulator._FLAGS, *flags])
        y = torch.zeros(80)
        run("mirror", x, y, grid=2, block=40, shared_bytes=160, **macros)
        assert torch.equal(y, x.view(2, 40).flip(1).flatten())
    switched = [b"swapcontext" in library.read_bytes() for library in libraries]  # what each library calls
    assert switched == [platform.machine() != "x86_64", True]


@pytest.mark.parametrize("threads, blocks, seed", SCHEDULES)
def test_barrier(run, threads, blocks, seed):
    x, y = torch.arange(120.0), torch.zeros(120)
    with emulator.schedule(threads, blocks, seed):
        run("mirror", x, y, grid=3, block=40, shared_bytes=160)
    assert torch.equal(y, x.view(3, 40).flip(1).flatten())


def test_shared_memory_starts_as_nan(run):
    y = torch.zeros(32)
    run("unwritten", y, shared_bytes=128)
    assert y.isnan().all()


@pytest.mark.parametrize("T, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_shared_memory_that_nobody_wrote_is_named(run, T, dtype):
    """Even after arithmetic and a conversion. A NaN that was an argument is something else."""
    x, y = torch.full((2, 32), torch.nan, dtype=dtype)
    with emulator.find_unwritten() as found:
        run("used", x, y, torch.zeros(1), 1, shared_bytes=64, T=T)
    assert y.isnan().all() and found == []
    with emulator.find_unwritten() as found:
        run("unwritten", torch.zeros(32), shared_bytes=128)
        run("used", x, y, torch.zeros(1), 0, shared_bytes=64, T=T)
    where = "element 0 of y comes from shared memory that nobody had written (block (0, 0, 0))"
    assert found == [f"unwritten: {where}", f"used: {where}"]


REFUSED = [  # kernel, how it is launched, the number that it is given if it takes one, the report
    ("shared_access", dict(block=1, shared_bytes=32), 4, "{outside}: access to element 4 of a shared array of 4 "),
    ("shared_access", dict(block=1, shared_bytes=32), -1, "{outside}: access to element -1 of a shared array of 4 "),
    ("shared_access", dict(block=1, shared_bytes=16), 0, "wants 32 bytes of shared memory so far, the launch gives 16"),
    ("address_of", dict(block=1, shared_bytes=32), 3, "{beyond}: access to element 8 of a shared array of 8 elements"),
    ("global_write", dict(block=1), 13, r"access to element 13 of an argument of 13 elements \(block \(0, 0, 0\)"),
    ("global_write", dict(block=1), -1, r"access to element -1 of an argument of 13 elements"),
    ("half_a_warp", {}, None, "threads 0-15 wait at __shfl_xor_sync, {half}; threads 16-31 returned from the kernel"),
    ("lane_not_in_mask", {}, None, "lane 16 is not in its own mask 0xffff"),
    ("two_barriers", {}, None, "{second}: divergent threads: .*, others are at .*, {first}"),
]  # fmt: skip


@pytest.mark.parametrize("kernel, how, i, report", REFUSED)
def test_what_a_kernel_must_not_do_is_reported(run, kernel, how, i, report):
    x = torch.zeros(20)
    y = {"shared_access": x[:1], "address_of": x[:1], "global_write": x[2:18:4]}.get(kernel)
    y = torch.zeros(32, dtype=torch.int32) if y is None else y
    arguments = () if kernel == "two_barriers" else (y,) if i is None else (y, i)
    report = re.sub(r"\{(\w+)\}", lambda mark: place(mark[1]), report)
    with pytest.raises(RuntimeError, match=report):
        run(kernel, *arguments, **how)


def test_the_last_elements_can_be_accessed(run):
    buffer = torch.zeros(20)
    run("global_write", buffer[2:18:4], 12, block=1)
    run("shared_access", torch.zeros(1), 3, block=1, shared_bytes=32)
    assert buffer[14] == 1


def test_the_address_of_an_element_is_a_pointer(run):
    y = torch.zeros(1)
    run("address_of", y, 2, block=1, shared_bytes=32)
    assert y == 3


def test_shuffles(run):
    y = torch.zeros(64, dtype=torch.int32)
    run("warp_sum", y, block=64)
    assert y[:32].unique().tolist() == [31 * 16] and y[32:].unique().tolist() == [31 * 16 + 32 * 32]
    y, t = torch.zeros(4, 32, dtype=torch.int32), torch.arange(32)
    run("neighbours", y)
    assert y[0].tolist() == [0, *range(31)]
    assert y[1].tolist() == [i + 3 if i % 8 < 5 else i for i in range(32)]
    assert y[2].tolist() == [5] * 16 + [21] * 16
    assert torch.equal(y[3, 1::2], (t ^ 2)[1::2].int())


def test_a_stuck_block_says_where_each_warp_waits(run):
    with pytest.raises(RuntimeError) as raised:
        run("stuck", block=64)
    assert str(raised.value).split("\n") == [
        "stuck: block (0, 0, 0) is stuck, no thread can go on:",
        f"  warp 0: threads 0-31 wait at __syncthreads, {place('stuck')}",
        f"  warp 1: threads 32-39 wait at __syncthreads, {place('stuck')}; threads 40-63 returned from the kernel, "
        "and count as missing",
    ]
    run("stuck", block=40)  # and the next launch is not affected


def has_fma():
    return platform.machine() != "x86_64" or " fma " in Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif(not has_fma(), reason="the processor has no FMA")
def test_a_product_and_a_difference_are_rounded_once(run):
    """As by NVRTC. Rounded twice, (1 + e)^2 - (1 + 2 e) with e = 2^-12 is 0, because the product loses e^2."""
    y, e = torch.full((2,), -1.0), 2.0**-12
    run("rounded_once", y, c_float(1 + e), c_float(1 + e), c_float(1 + 2 * e), block=1)
    assert y.tolist() == [e * e, 0]


@pytest.mark.parametrize("how", range(8))
def test_two_blocks_that_write_to_one_element(run, how):
    y, turn = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    if how < 3:
        run("two_blocks", y, how, turn, grid=4, block=1)
        assert y.tolist() == [[1, 1, 1, 1], [4, 0, 0, 0], [4, 4, 4, 4]][how]
    else:
        report = r"two blocks write to one element: blocks \(0, 0, 0\) and \(1, 0, 0\) to element 0 of y\."
        with pytest.raises(RuntimeError, match=report):
            run("two_blocks", y, how, turn, grid=4, block=1)


def test_atomic_additions_to_arguments_are_counted(run):
    y, turn = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    with emulator.count_additions() as counts:
        for _ in range(2):
            run("one_addition_a_block", y, grid=3, block=40, shared_bytes=4)
        run("two_blocks", y, 2, turn, grid=4, block=1)  # four numbers at once
        run("warp_sum", torch.zeros(32, dtype=torch.int32))
    assert y[0] == 2 * 3 * 40 + 4 and counts == {"one_addition_a_block": 6, "two_blocks": 4, "warp_sum": 0}


def test_ctrl_c_ends_a_kernel(run):
    test_shared_memory_starts_as_nan(run)  # From here on nothing has to be compiled.
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C calls
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run("endless", block=256)
        assert time.monotonic() - start < 0.3 + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    test_shared_memory_starts_as_nan(run)  # The next launch is not affected.


def turns(run, *schedule):
    y = torch.full((12,), -1, dtype=torch.int32)
    with emulator.schedule(*schedule) if schedule else contextlib.nullcontext():
        run("take_turns", y, torch.zeros(1, dtype=torch.int32), grid=3, block=4)
    return y.view(3, 4)


@pytest.mark.parametrize("before, after", [(1, 1), (0, 1), (1, 0), (1, 2)])
def test_additions_in_a_turn_are_between_two_barriers(run, before, after):
    dq = torch.zeros(4)
    for threads in ("forward", "reverse"):
        with emulator.schedule(threads):
            arguments = dq, torch.zeros(1, dtype=torch.int32), before, after
            if before and after == 1:
                run("add_in_turn", *arguments, grid=3, block=64)
                continue
            with pytest.raises(RuntimeError, match="others have added|before its block has its turn"):
                run("add_in_turn", *arguments, grid=3, block=64)
    if before and after == 1:
        run("add_in_turn", dq, torch.zeros(1, dtype=torch.int32), 0, 0, grid=3, block=1)  # One thread needs no barrier.
        assert dq.tolist() == [(2 * 3 * 64 + 3) * n for n in (1, 2, 3, 4)]


def test_schedules(run):
    forward = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert torch.equal(turns(run), forward)
    assert torch.equal(turns(run, "reverse"), forward.flip(1))
    assert torch.equal(turns(run, "forward", "reverse"), forward.flip(0))
    first, again, other = (turns(run, "random", "random", seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.flatten().sort().values.tolist() == list(range(12))
    with pytest.raises(ZeroDivisionError), emulator.schedule("reverse"):
        raise ZeroDivisionError
    assert torch.equal(turns(run), forward)  # The schedule ends with its `with`, however that ends.


def test_a_loop_beyond_the_end_of_a_thread_s_array_is_refused(tmp_path):
    """It would write into the row after, whose numbers are set later: right here, and perhaps not on a GPU."""
    text = (launches.HERE / "fwd_3_ldmatrix.cu").read_text()
    loop = "for (int i = 0; i < 4; i++) S[n][i] = first_key"
    assert text.count(loop) == 1
    (tmp_path / "longer.cu").write_text(text.replace(loop, loop.replace("<", "<=")))
    with pytest.raises(RuntimeError, match=r"longer.cu:\d+:.* iteration 4 invokes undefined behavior"):
        emulator.compile(tmp_path / "longer.cu", {"T": "bf16", "D": 32, "Br": 64, "Bc": 64})


def test_a_kernel_that_does_not_compile(tmp_path):
    (tmp_path / "wrong.cu").write_text('#include "ptx.cuh"\nextern "C" __global__ void wrong() { no_such_name(); }\n')
    with pytest.raises(RuntimeError, match="wrong.cu:2:.*no_such_name"):
        emulator.launch(tmp_path / "wrong.cu", "wrong", [], grid=1, block=1, macros={})


# By kernel: the bug's name, the text that is replaced, the new text, and how the bug is caught: by the words of a
# report, by WRONG results, or by NOTHING. The emulation cannot find the last kind, because a thread is never
# interrupted between a read and a write, and sees every write at once (cuda.h). To find these takes a GPU.
NOTHING, STUCK, OUTSIDE = "", "no thread can go on", "access to element .* of a"
PLANTED = {
    "fwd_0_scalar": [
        ("a tile is read before it is loaded", "__syncthreads();  // every thread reads rows", "//", WRONG),
        ("a tile is loaded while it is read", "__syncthreads();  // no thread", "//", WRONG),
        ("a barrier inside a branch",
         "__syncthreads();  // every", "if (i < Nq) __syncthreads();  //", "divergent threads"),
        ("a load beyond the last key", "v_row, min(Bc, keys - j))", "v_row, Bc)", f"{OUTSIDE}n argument"),
        ("rows of the tile overlap", "array<float>(Bc * Br)", "array<float>(Bc)", f"{OUTSIDE} shared array"),
    ],
    "bwd_0_scalar": [
        ("dS is read before it is complete", "__syncthreads();  // dS is", "//", WRONG),
        ("dq without an atomic addition", "atomicAdd(&dq[e], scale * sum)", "dq[e] += scale * sum",
         r"two blocks write to one element: blocks \(0, 0, 0\) and \(1, 0, 0\) to element .* of dq"),
    ],
    "fwd_5_fa2": [
        ("no wait for V", "cp_async_wait<0>();\n    __syncthreads();  // V_j", "__syncthreads();  // V_j", WRONG),
        ("V is loaded while it is read", "__syncthreads();  // K_j (and Q_i) is there", "//", WRONG),
    ],
    "bwd_1_fa2": [
        ("P and dS are read before they are complete", "__syncthreads();  // P and dS are complete", "", WRONG),
    ],
    "fwd_6_wgmma": [
        ("wrong stride in a descriptor", "descriptor(V, Bc * 128, 1024)", "descriptor(V, Bc * 128, 512)", WRONG),
        ("Q's bytes are not expected",
         "(2 * Bc + (n == 0 ? Br : 0))", "2 * Bc", "has ended while copies to or from its shared memory are under way"),
        ("a stage is loaded while it is read", "__syncthreads();  // no warpgroup still reads", "//", WRONG),
        ("no fence between O's rescaling and wgmma", "wgmma_fence();  // O and P", "// O and P", NOTHING),
    ],
    "fwd_7_roles": [
        ("the consumers' parity is swapped",
         "full + stage(), parity());", "full + stage(), parity() ^ 1);", "more arrivals"),
        ("the producer's parity is swapped", "empty + stage(), parity() ^ 1);", "empty + stage(), parity());", STUCK),
        ("V is released while it is read",
         "wgmma_wait<0>();\n      V.release();", "V.release();\n      wgmma_wait<0>();", WRONG),
        ("every lane releases the tile", "if (threadIdx.x % 32 == 0) barrier_arrive", "barrier_arrive", STUCK),
        ("no fence after the barriers are made", "if (threadIdx.x == 0) barrier_init_fence();", "", NOTHING),
    ],
    "fwd_8_hopper": [
        ("a tile is read before it is there", "barrier_wait(full + stage(), parity());", "", "more arrivals"),
        ("a stage is released before all lanes saw it",
         "    wait();\n    __syncwarp();", "    wait();", STUCK),
        ("nobody may begin",
         "if (w == WARPGROUPS - 1) ping_pong.pass();", "", f"{STUCK}(.*\n)+.* wait at named_barrier"),
        ("nobody waits for the last pass",
         "if (w == 0) ping_pong.wait();", "", "128 of 256 threads have come to the named barrier"),
        ("no wait for V", "start_output(O, P, V.get(V_SLAB));",
         "start_output(O, P, descriptor(V.tiles, V_SLAB, 1024));", "more arrivals"),
        ("no wait for O", "wgmma_wait<0>();\n      V.release();", "V.release();", "was written while a wgmma"),
    ],
    "bwd_2_wgmma": [
        ("no wait for S",
         "wgmma_wait<1>();                  // S^T", "// S^T", "was written while a wgmma .* was under way"),
    ],
    "bwd_3_hopper": [
        ("half of dS is missing", "__syncthreads();  // both warpgroups", "//", STUCK),
        ("the rows of K of another warp",
         "load_rows(K_rows, K_j, 16 * warp)", "load_rows(K_rows, K_j, 16 * (warp ^ 1))", WRONG),
        ("the rows of V of another warp",
         "load_rows(V_rows, V, 16 * warp)", "load_rows(V_rows, V, 16 * (warp ^ 4))", WRONG),
        ("no wait for dQ",
         "wgmma_wait<DETERMINISTIC ? 2 : 1>();", "wgmma_wait<2>();", "was (read|written) while|" + WRONG),
        ("nobody waits for a turn, in order", "load_acquire(added + dq_tile) != blocks", "false", "has not waited for"),
        ("a turn is passed on while others add, in order",
         "semaphore.release(dq_tile);\n      wgmma_wait<DETERMINISTIC ? 2 : 1>();  // dQ_i is there\n",
         "wgmma_wait<DETERMINISTIC ? 2 : 1>();\n      semaphore.held = dq_tile;\n      semaphore.release(-1);\n",
         "others have added since|after the turn was passed on"),
        ("the turn of this step is passed on, in order", "add_release(added + held, 1)",
         "add_release(added + dq_tile, 1)", "after the turn was passed on"),
        ("a turn is not passed on, in order", "if (held >= 0) add_release(added + held, 1);", "", "polls for ever"),
        ("the last turn is not passed on, ascending in order", "semaphore.release(-1);", "", "polls for ever"),
        ("the tile on the diagonal does not count, ascending in order",
         "(j.i + 1) * Br - 1 + Nk - Nq", "j.i * Br - 1 + Nk - Nq", "polls for ever"),
        ("the first keys first, ascending in order",
         "DETERMINISTIC && ascending ? tiles", "false ? tiles", "polls for ever"),
        ("the last keys first, in order", "DETERMINISTIC && ascending ? tiles", "true ? tiles", "polls for ever"),
        ("queries are loaded over those of this step", "load_queries(ahead, (step + STAGES - 1) % STAGES",
         "load_queries(ahead, step % STAGES", "was (read|written) while|" + WRONG + "|" + STUCK),
        ("dK and dV are staged over dS, ascending", "__syncthreads();  // nobody still reads dS_i", "//", WRONG),
        ("no fence before wgmma reads dS",
         "fence_async();\n      if (!DETERMINISTIC) start", "if (!DETERMINISTIC) start", NOTHING),
        ("the next K is loaded over this one, persistent", "PERSISTENT ? 2 : 1;", "1;", WRONG),
        ("the next V is loaded over this one, persistent",
         "__syncthreads();  // V_j is in registers", "//", WRONG + "|" + STUCK),
        ("dS is written over the last dK and dV, persistent",
         "if (lane == 0) bulk_wait_read<0>();\n      __syncthreads", "__syncthreads", WRONG),
    ],
}  # fmt: skip
BUGS = [
    pytest.param(kernel, *edit, {"deterministic": True} if "in order" in name else {}, id=f"{kernel}: {name}")
    for kernel, bugs in PLANTED.items()
    for name, *edit in bugs
]


@pytest.mark.parametrize("kernel, before, after, caught, options", BUGS)
def test_planted_bugs(kernel, before, after, caught, options, tmp_path, monkeypatch, request):
    text = (launches.HERE / f"{kernel}.cu").read_text()
    assert text.count(before) == 1, f"{kernel}.cu has changed: plant the bug in its new text"
    (tmp_path / f"{kernel}.cu").write_text(text.replace(before, after))
    monkeypatch.setattr(launches, "HERE", tmp_path)
    monkeypatch.setattr(ladder.Problem, "heads_apart", "ascending" in request.node.name)  # a block has one head then
    monkeypatch.setattr(ladder, "persistent_pays", lambda _: "persistent" in request.node.name)
    monkeypatch.setattr(calls, "plans", Cache())
    assert re.search(caught, problems(kernel, **options)) if caught else problems(kernel, **options) == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts the pieces of memory as Linux lists them")
def test_a_launch_leaves_no_stacks_behind(run):
    """Each has a page that divides the memory, and those of 130 kernels of 256 threads are all that Linux allows."""

    def pieces():
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = pieces()
    run("mirror", torch.rand(256), torch.zeros(256), block=256, shared_bytes=1024, ALONE=1)  # a library of its own
    assert pieces() < before + 100
