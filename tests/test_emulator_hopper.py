"""Stage 02's emulation of what tensor-core kernels use, instruction by instruction, on small integers.

The expected layouts are written down here once more from the PTX ISA, independently of the emulator's code. If there is
a GPU, the same kernels run on it, too, and must agree, which shows that the emulator reads the ISA correctly.
"""

import contextlib
from ctypes import c_int

import pytest
import torch

from steps.step02_fa2_cuda import emulator, nvrtc

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
TIMES = [("late", "eager"), ("eager", "late"), ("lifo", "lifo"), ("random", "random")]

WARP = """
#include "ptx.cuh"

// D (16 x 8) += A (16 x 16) B (16 x 8), all row by row.
extern "C" __global__ void product(Global<const T> A, Global<const T> B, Global<float> D) {
  int g = threadIdx.x / 4, c = 2 * (threadIdx.x % 4);
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; i++) a[i] = load_pair(A + (g + i % 2 * 8) * 16 + c + i / 2 * 8);
  for (int i = 0; i < 2; i++) b[i] = pack<T>(to_float(B[(c + 8 * i) * 8 + g]), to_float(B[(c + 8 * i + 1) * 8 + g]));
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = D[(g + i / 2 * 8) * 8 + c + i % 2];
  mma<T>(d, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) D[(g + i / 2 * 8) * 8 + c + i % 2] = d[i];
}

// y[lane][8] and y_trans[lane][8] = what ldmatrix reads of x (32 x 8), without and with _trans; z (32 x 8) = what
// stmatrix stores of y.
extern "C" __global__ void matrices(Global<const T> x, Global<T> y, Global<T> y_trans, Global<T> z) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(256), tile_2 = smem.array<T>(256);
  int t = threadIdx.x;
  uint32_t r[4];
  copy_16(tile + 8 * t, x + 8 * t, true);
  __syncwarp();  // the rows are complete
  ldmatrix_x4_trans(r, tile + 8 * t);
  for (int i = 0; i < 4; i++) store_pair(y_trans + 8 * t + 2 * i, r[i]);
  ldmatrix_x4(r, tile + 8 * t);
  for (int i = 0; i < 4; i++) store_pair(y + 8 * t + 2 * i, r[i]);
#if HOPPER
  stmatrix_x4(tile_2 + 8 * t, r);
  __syncwarp();  // the matrices are complete
  for (int i = 0; i < 8; i++) z[8 * t + i] = tile_2[8 * t + i];
#endif
}

// y[0] = x; y[1] = x with zeros from thread 16 on. A thread copies 8 numbers.
extern "C" __global__ void copies(Global<const T> x, Global<T> y) {
  SharedMemory smem;
  Shared<T> a = smem.array<T>(256), b = smem.array<T>(256);
  int t = threadIdx.x;
  cp_async_16(a + 8 * t, x + 8 * t, true);
  cp_async_commit();
  cp_async_16(b + 8 * t, x + 8 * t, t < 16);  // the ragged end of a tile
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();  // everybody's first copy has come
  int from = 8 * (31 - t);
  for (int i = 0; i < 8; i++) y[from + i] = a[from + i];
  cp_async_wait<0>();
  __syncthreads();  // everybody's second copy has come
  uint32_t r[4];
  load_16(r, b + from);
  store_16(y + 256 + from, r);
}

extern "C" __global__ void sums(Global<float> y, Global<int> n) {
  atomicAdd(&y[0], 1);
  atomicAdd(y + 1, 2);
  atomic_add_4(y + 4, 1, 2, 3, threadIdx.x);
  atomicAdd(&n[0], 1);
}

extern "C" __global__ void powers(Global<const float> x, Global<float> y) {
  y[threadIdx.x] = exp2_approx(x[threadIdx.x]);
}

extern "C" __global__ void rounded(Global<const float> x, Global<T> y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  store_pair(y + 2 * t, pack<T>(x[2 * t], x[2 * t + 1]));
}

extern "C" __global__ void not_copied_yet(Global<const T> x, Global<T> y) {
  SharedMemory smem;
  Shared<T> a = smem.array<T>(256);
  cp_async_16(a + 8 * threadIdx.x, x + 8 * threadIdx.x, true);
  cp_async_commit();
  cp_async_wait<1>();
  y[threadIdx.x] = a[8 * threadIdx.x];
}

extern "C" __global__ void misaligned(Global<T> x, Global<float> y, int what) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(8 * 40);
  uint32_t r[4] = {};
  int row = threadIdx.x * 36;  // 72 bytes
  if (what == 0) load_16(r, x + 4);
  if (what == 1) load_16(r, x + row);
  if (what == 2) load_16(r, tile + 4);
  if (what == 3) store_16(x + 4, r);
  if (what == 4) copy_16(tile, x + 4, true);
  if (what == 5) copy_16(tile, x + 4, false);
  if (what == 6) copy_16(tile + 4, x, true);
  if (what == 7) cp_async_16(tile, x + 4, true);
  if (what == 8) cp_async_16(tile, x + 4, false);
  if (what == 9) cp_async_16(tile + 4, x, true);
  if (what == 10) ldmatrix_x4(r, tile + threadIdx.x % 8 * 36);
  if (what == 11) ldmatrix_x4_trans(r, tile + 4);
  if (what == 12) atomic_add_4(y + 1, 1, 1, 1, 1);
#if HOPPER
  if (what == 13) stmatrix_x4(tile + 4, r);
#endif
}

extern "C" __global__ void beyond(Global<T> x) { load_pair(x + 256); }

extern "C" __global__ void waits_for_ever(Global<int> n) {
  while (atomicAdd(&n[0], 0) == 0) {
  }
}

// 32 rows of 128 bytes. Bank conflicts are counted for the marked lines.
extern "C" __global__ void banks(Global<float> y) {
  SharedMemory smem;
  Shared<float> x = smem.array<float>(1024);
  int t = threadIdx.x;
  uint32_t r[4];
  for (int i = 0; i < 32; i++) x[32 * i + t] = t;  // mark: row
  __syncwarp();
  float sum = 0;
  for (int i = 0; i < 32; i++) sum += x[32 * t + i];  // mark: column
  for (int i = 0; i < 32; i++) sum += x[32 * t + (i + t) % 32];  // mark: diagonal
  sum += x[7];  // mark: broadcast
  if (t < 8) sum += x[64 * t];  // mark: some
  load_16(r, x + 4 * t);  // mark: 16 bytes
  ldmatrix_x4(r, x + 32 * t);  // mark: ldmatrix
  ldmatrix_x4(r, x + 32 * t + 4 * (t % 8));  // mark: swizzled
  y[t] = sum;
}
"""

PRODUCT = """
#include "ptx.cuh"

__device__ int at(int rows, int row, int column) {  // slabs of 64 columns, 128 bytes a row, swizzled
  return column / 64 * rows * 64 + row * 64 + (column / 8 % 8 ^ row % 8) * 8 + column % 8;
}

__device__ void load_tile(Shared<T> tile, Global<const T> x, int rows, int columns) {
  for (int e = threadIdx.x; e < rows * columns; e += 128) tile[at(rows, e / columns, e % columns)] = x[e];
}

// d (64 x N) = 1 + A B, with a sum over 64. a holds A, or, if TRANS_A, its transpose. b holds B^T, or, if TRANS_B, B.
template <int N, int TRANS_A, int TRANS_B, bool FROM_REGISTERS>
__device__ void multiply(Shared<T> A, Shared<T> B, Global<const T> a, Global<const T> b, Global<float> d) {
  load_tile(A, a, 64, 64);
  load_tile(B, b, TRANS_B ? 64 : N, TRANS_B ? N : 64);
  fence_async();
  __syncthreads();  // the tiles are complete

  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  float D[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) D[i] = 1;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
    uint64_t b_k = descriptor(B + (TRANS_B ? 64 * k : k), 64 * 128, 1024);
    if constexpr (FROM_REGISTERS) {
      uint32_t a_k[4];
#pragma unroll
      for (int i = 0; i < 4; i++) a_k[i] = load_pair(a + (row + i % 2 * 8) * 64 + k + column + i / 2 * 8);
      wgmma_rs<T, N, TRANS_B>(D, a_k, b_k, true);
    } else {
      wgmma_ss<T, N, TRANS_A, TRANS_B>(D, descriptor(A + (TRANS_A ? 64 * k : k), 64 * 128, 1024), b_k, true);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[(row + i / 2 % 2 * 8) * N + 8 * (i / 4) + column + i % 2] = D[i];
}

extern "C" __global__ void __launch_bounds__(128) product(
    Global<const T> a, Global<const T> b, Global<float> d, int kind) {
  SharedMemory smem;
  Shared<T> A = smem.array<T>(64 * 64), B = smem.array<T>(64 * 192);
  if (kind == 0) multiply<64, 0, 0, false>(A, B, a, b, d);
  if (kind == 1) multiply<128, 0, 1, false>(A, B, a, b, d);
  if (kind == 2) multiply<64, 1, 0, false>(A, B, a, b, d);
  if (kind == 3) multiply<192, 1, 1, false>(A, B, a, b, d);
  if (kind == 4) multiply<16, 0, 0, false>(A, B, a, b, d);
  if (kind == 5) multiply<96, 0, 0, false>(A, B, a, b, d);
  if (kind == 6) multiply<80, 0, 0, true>(A, B, a, b, d);
  if (kind == 7) multiply<128, 0, 1, true>(A, B, a, b, d);
}
"""
# N, TRANS_A, TRANS_B
PRODUCTS = [(64, 0, 0), (128, 0, 1), (64, 1, 0), (192, 1, 1), (16, 0, 0), (96, 0, 0), (80, 0, 0), (128, 0, 1)]

COPIES = """
#include "ptx.cuh"

// raw[2 * 16 * 64] = the box at (c0, c1, c2, c3, c4) as it lies in shared memory. If `store`, the box is also stored at
// the same coordinates of `to`.
extern "C" __global__ void box(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to,
                               Global<T> raw, int store, int c0, int c1, int c2, int c3, int c4) {
  SharedMemory smem;
  Shared<T> tile = smem.array<T>(2 * 16 * 64);
  Shared<Barrier> full = smem.array<Barrier>(1);
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barrier is there
  if (threadIdx.x == 0) {
    barrier_expect(full, 2 * 16 * 64 * sizeof(T));
    tma_load(tile, from, full, c0, c1, c2, c3, c4);
  }
  barrier_wait(full, 0);
  for (int i = threadIdx.x; i < 2 * 16 * 64; i += blockDim.x) raw[i] = tile[i];
  if (threadIdx.x == 0 && store) {
    tma_store(to, tile, c0, c1, c2, c3, c4);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// Two warps add x[0 .. 64) and x[64 .. 128) to y[0 .. 64), a lane two numbers.
extern "C" __global__ void bulk(Global<const float> x, Global<float> y) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(128);
  Shared<Barrier> full = smem.array<Barrier>(2);
  int warp = threadIdx.x / 32;
  bool leader = threadIdx.x % 32 == 0;
  if (leader) {
    barrier_init(full + warp, 1);
    barrier_init_fence();
    barrier_expect(full + warp, 256);
    bulk_load(tile + 64 * warp, x + 64 * warp, 64, full + warp);
  }
  __syncwarp();  // the barrier is there
  barrier_wait(full + warp, 0);
  for (int i = threadIdx.x % 32; i < 64; i += 32) atomicAdd(&y[i], float(tile[64 * warp + i]));
}

// Two warpgroups run one after the other by named barriers: order[0 .. 8) becomes 0 1 0 1 ...
extern "C" __global__ void __launch_bounds__(256, 1) turns(Global<int> order, Global<int> n) {
  int me = threadIdx.x / 128, other = 1 - me;
  if (me == 0) registers_decrease<40>();
  else registers_increase<160>();
  if (me == 1) named_barrier_arrive(2, 256);  // lets warpgroup 0 begin
  for (int i = 0; i < 4; i++) {
    named_barrier_sync(2 + me, 256);
    if (threadIdx.x % 128 == 0) order[atomicAdd(&n[0], 1)] = me;
    if (me == 0 || i < 3) named_barrier_arrive(2 + other, 256);
  }
}

"""

PIPELINE = """
#include "ptx.cuh"

constexpr int STAGES = 2;
constexpr int TILE = 64 * 64;

__device__ int at(int row, int column) { return row * 64 + (column / 8 ^ row % 8) * 8 + column % 8; }  // swizzled

// out (64 x 64) = A B^T, A and B (64 x 64 * tiles) by 64 columns at a time. Warpgroup 0 loads, warpgroup 1 multiplies.
extern "C" __global__ void __launch_bounds__(256, 1) pipeline(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out,
    Global<const int> count) {
  int tiles = count[0];
  SharedMemory smem;
  Shared<T> A = smem.array<T>(STAGES * TILE), B = smem.array<T>(STAGES * TILE), C = smem.array<T>(TILE);
  Shared<Barrier> full = smem.array<Barrier>(STAGES), empty = smem.array<Barrier>(STAGES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 1);
    }
    barrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) {
      for (int j = 0; j < tiles; j++) {
        int s = j % STAGES;
        barrier_wait(empty + s, j / STAGES % 2 ^ 1);
        barrier_expect(full + s, 2 * TILE * sizeof(T));
        tma_load(A + s * TILE, a, full + s, 0, 0, j, 0, 0);
        tma_load(B + s * TILE, b, full + s, 0, 0, j, 0, 0);
      }
    }
  } else {
    int t = threadIdx.x % 128;
    float D[32];
    for (int j = 0; j < tiles; j++) {
      int s = j % STAGES;
      barrier_wait(full + s, j / STAGES % 2);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 64; k += 16)
        wgmma_ss<T, 64, 0, 0>(D, descriptor(A + s * TILE + k, 16, 1024), descriptor(B + s * TILE + k, 16, 1024),
                              j > 0 || k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (j > 0 && t == 0) barrier_arrive(empty + (j - 1) % STAGES);  // the tiles before are used up
    }
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < 64; c += 16) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = pack<T>(D[c / 2 + 2 * i], D[c / 2 + 2 * i + 1]);
      stmatrix_x4(C + at(t / 32 * 16 + t % 16, c + t % 32 / 16 * 8), x);
    }
    fence_async();
    named_barrier_sync(1, 128);  // the tile is complete
    if (t == 0) {
      tma_store(out, C, 0, 0, 0, 0, 0);
      bulk_commit();
      bulk_wait_read<0>();
    }
  }
}
"""


MISUSE = """
#include "ptx.cuh"

extern "C" __global__ void barriers(int what) {
  SharedMemory smem;
  Shared<Barrier> b = smem.array<Barrier>(1);
  if (what == 0) barrier_arrive(b);
  barrier_init(b, 2);
  if (what == 1) barrier_init(b, 2);
  if (what == 2) {
    barrier_expect(b, 16);
    for (int i = 0; i < 2; i++) barrier_arrive(b);
  }
  if (what == 3) {
    barrier_expect(b, 4096);
    barrier_wait(b, 0);
  }
  if (what == 4) barrier_wait(b, 2);
  if (what == 5) {
    barrier_wait(b, 1);  // passes
    for (int i = 0; i < 2; i++) barrier_arrive(b);
    barrier_wait(b, 0);
    barrier_wait(b, 1);  // the second phase, which nobody ends
  }
}

extern "C" __global__ void named(int what) {
  if (what == 0) named_barrier_sync(1, 40);
  if (what == 1 && threadIdx.x == 0) named_barrier_arrive(1, 64);
  if (what == 2) named_barrier_sync(1, threadIdx.x < 32 ? 64 : 96);
  if (what == 3 && threadIdx.x < 32) named_barrier_arrive(1, 64), named_barrier_arrive(1, 64);
  if (what == 4 && threadIdx.x < 32) named_barrier_arrive(1, 64);
}

extern "C" __global__ void warpgroup(int what, Global<float> y) {
  SharedMemory smem;
  Shared<bf16> tile = smem.array<bf16>(64 * 64);
  for (int i = threadIdx.x; i < 64 * 64; i += 128) tile[i] = bf16{};
  __syncthreads();
  float D[4];
  uint64_t x = descriptor(tile, 16, 1024);
  if (what == 0 && threadIdx.x >= 96) return;
  if (what != 1) wgmma_fence();
  if (what == 2) x = descriptor(tile + 60 * 64, 16, 1 << 17);
  if (what == 3) x |= 1ull << 63;
  if (what == 4) x += threadIdx.x / 64 * 2;
  wgmma_ss<bf16, 8, 0, 0>(D, x, x, false);
  if (what == 5) D[1] += 1;
  if (what == 6) y[threadIdx.x] = D[0];
  wgmma_commit();
  if (what != 7) wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(384, 1) registers(int what) {
  if (threadIdx.x >= 128) registers_increase<240>();
  else if (what == 0) registers_decrease<24>();
  else registers_decrease<32>();
}

extern "C" __global__ void staging(const __grid_constant__ TensorMap map, int what) {
  SharedMemory smem;
  Shared<bf16> tile = smem.array<bf16>(16 * 64);
  if (what == 0) tma_store(map, tile + 1, 0, 0, 0, 0, 0);
  if (what == 1) tma_store(map, tile + 64, 0, 0, 0, 0, 0);
  if (what == 2) tma_store(map, tile, 0, 0, 0, 0, 0), bulk_commit();
  if (what == 3) tma_store(map, tile, 0, -3, 0, 0, 0);
  if (what == 4) tma_store(map, tile, 4, 0, 0, 0, 0);
  if (what == 5) {
    tile[0] = {uint16_t(1 + blockIdx.x)};
    tma_store(map, tile, 0, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
}
"""


def write(folder, text):
    file = folder / "kernels.cu"
    file.write_text(text.lstrip())
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    texts = dict(WARP=WARP, PRODUCT=PRODUCT, COPIES=COPIES, PIPELINE=PIPELINE, MISUSE=MISUSE)
    return {name: write(tmp_path_factory.mktemp(name), text) for name, text in texts.items()}


def run(file, kernel, *arguments, grid=1, block=32, shared_bytes=0, **macros):
    arguments = [c_int(x) if isinstance(x, int) else x for x in arguments]
    on_gpu = any(x.is_cuda for x in arguments if isinstance(x, torch.Tensor))
    run_once = (nvrtc if on_gpu else emulator).launch
    run_once(file, kernel, arguments, grid=grid, block=block, shared_bytes=shared_bytes, macros=macros)


def run_warp(files, kernel, *arguments, T="bf16", **shape):
    on_cpu = all(x.device.type == "cpu" for x in arguments)
    run(files["WARP"], kernel, *arguments, T=T, HOPPER=int(on_cpu or CAPABILITY >= (9, 0)), **shape)


def place(text, mark):
    """kernels.cu:N for the line that ends with the comment "// mark: ..."."""
    lines = enumerate(text.lstrip().split("\n"), 1)
    return next(f"kernels.cu:{n}" for n, line in lines if line.endswith(f"// mark: {mark}"))


def integers(*shape, dtype, device, seed=0, largest=4):
    x = torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype)


def tensor_map(x, box):
    return (nvrtc if x.is_cuda else emulator).tensor_map(x, box)


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def on(*needed):
    """Parametrises over the CPU and, where its GPU has this capability, CUDA."""
    return pytest.mark.parametrize("device", ["cpu", "cuda"] if CAPABILITY >= needed else ["cpu"])


halves = pytest.mark.parametrize("T", HALVES)
times = pytest.mark.parametrize("copies, wgmma", TIMES)


@on(8, 0)
@halves
def test_mma(files, T, device):
    options = dict(dtype=HALVES[T], device=device)
    A, B = integers(16, 16, **options), integers(16, 8, seed=1, **options)
    D = torch.arange(128.0, device=device).view(16, 8)
    want = D + A.float() @ B.float()
    run_warp(files, "product", A, B, D, T=T)
    assert torch.equal(D, want)


@on(8, 0)
def test_ldmatrix_and_stmatrix(files, device):
    x = torch.arange(256.0).view(32, 8).to(device, torch.bfloat16)
    y, y_trans, z = (torch.zeros_like(x) for _ in range(3))
    run_warp(files, "matrices", x, y, y_trans, z, shared_bytes=1024)
    x, y, y_trans, z = (a.cpu() for a in (x, y, y_trans, z))
    for t in range(32):
        row, column = t // 4, 2 * (t % 4)
        for i in range(4):
            matrix = x[8 * i : 8 * i + 8]
            assert torch.equal(y[t, 2 * i : 2 * i + 2], matrix[row, column : column + 2])
            assert torch.equal(y_trans[t, 2 * i : 2 * i + 2], matrix[column : column + 2, row])
    assert torch.equal(z, x) or device == "cuda" and CAPABILITY < (9, 0)


@on(8, 0)
@times
def test_cp_async(files, device, copies, wgmma):
    x, y = torch.arange(256.0).to(device, torch.bfloat16), torch.full((2, 256), -1.0).to(device, torch.bfloat16)
    with emulator.schedule(threads="random", seed=1, copies=copies, wgmma=wgmma):
        run_warp(files, "copies", x, y, shared_bytes=1024)
    assert torch.equal(y[0], x) and torch.equal(y[1], x.where(x < 128, 0))


def test_cp_async_comes_with_its_wait_at_the_latest(files):
    x, y = torch.ones(256).bfloat16(), torch.zeros(32).bfloat16()
    run_warp(files, "not_copied_yet", x, y, shared_bytes=512)
    assert y.isnan().all()
    with emulator.schedule(copies="eager"):
        run_warp(files, "not_copied_yet", x, y, shared_bytes=512)
    assert (y == 1).all()


@on(8, 0)
def test_atomic_additions(files, device):
    y, n = torch.zeros(8, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    run_warp(files, "sums", y, n)
    assert y.tolist() == [32, 64, 0, 0, 32, 64, 96, 31 * 16] and n.item() == 32


@on(8, 0)
@halves
def test_rounding(files, T, device):
    """Every kind of number rounds as in torch's conversion, ties included, and exp2 is exact to a few ulp."""
    exponents = torch.arange(-30, 20).repeat_interleave(40)
    x = torch.randint(0, 1 << 13, exponents.shape, generator=torch.Generator().manual_seed(0)) / 2.0**12
    special = [0.0, -0.0, torch.inf, -torch.inf, 65504, 65519, 65520, 1e9, 2**-25, 2**-26, 1.5 * 2**-24, 2**-14]
    special = torch.tensor(special)
    x = torch.cat([x * 2.0**exponents, -x * 2.0**exponents, special, special.new_zeros(-len(special) % 64)])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).to(device)
    y = torch.empty_like(x, dtype=HALVES[T])
    run_warp(files, "rounded", x, y, grid=len(x) // 64, T=T)
    assert torch.equal(y.view(torch.int16), x.to(HALVES[T]).view(torch.int16))
    x = torch.linspace(-150, 20, 32, device=device)
    x[0], x[1], x[2], y = -torch.inf, torch.nan, 0, torch.empty(32, device=device)
    run_warp(files, "powers", x, y, T=T)
    want = torch.exp2(x.double())
    assert y[0] == 0 and y[1].isnan() and y[2] == 1
    assert (y[2:] - want[2:]).abs().le(want[2:] * 1e-6 + 2.0**-126).all()


def test_every_16_bit_number_survives_its_conversion(tmp_path):
    text = """
#include "ptx.cuh"
extern "C" __global__ void widened(Global<const T> x, Global<float> y) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = to_float(x[blockIdx.x * blockDim.x + threadIdx.x]);
}
"""
    for T, dtype in HALVES.items():
        x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        y = torch.empty(1 << 16)
        run(write(tmp_path, text), "widened", x, y, grid=64, block=1024, T=T)
        assert torch.equal(y.nan_to_num(12345), x.float().nan_to_num(12345))
        assert torch.equal(torch.signbit(y), torch.signbit(x.float()))


def test_accesses_of_several_numbers_are_checked(files):
    x = torch.zeros(256).bfloat16()
    with pytest.raises(RuntimeError, match="access to element 257 of an argument of 256 elements"):
        run_warp(files, "beyond", x[:256], block=1)


@pytest.mark.parametrize("what", range(14))
def test_what_takes_16_bytes_at_a_time_refuses_other_addresses(files, what):
    """Addresses in the middle of 16 bytes, and rows whose distance is no multiple of 16 bytes."""
    x, y = torch.zeros(40 * 32).bfloat16(), torch.zeros(8)
    memory = "a shared array" if what in (2, 6, 9, 10, 11, 13) else "an argument"
    with pytest.raises(RuntimeError, match=f"{memory} is accessed at an address that is no multiple of 16"):
        run(files["WARP"], "misaligned", x, y, what, T="bf16", HOPPER=1, shared_bytes=1024)


def test_a_thread_that_polls_for_ever_is_stopped(files):
    with pytest.raises(RuntimeError, match="polls for ever"):
        run_warp(files, "waits_for_ever", torch.zeros(1, dtype=torch.int32))


def test_bank_conflicts(files):
    with emulator.count_conflicts() as counts:
        run_warp(files, "banks", torch.zeros(32), shared_bytes=4096)
    want = {
        "row": (32, 32), "column": (32, 32 * 32), "diagonal": (32, 32), "broadcast": (1, 1), "some": (1, 8),
        "16 bytes": (1, 4), "ldmatrix": (1, 32), "swizzled": (1, 4),
    }  # fmt: skip
    assert counts == {place(WARP, mark): n for mark, n in want.items()}
    run_warp(files, "banks", torch.zeros(32), shared_bytes=4096)
    assert sum(n for n, _ in counts.values()) == 101  # only what runs inside `with` is counted


@on(9, 0)
@halves
@pytest.mark.parametrize("kind", range(len(PRODUCTS)))
def test_wgmma(files, T, kind, device):
    N, TRANS_A, TRANS_B = PRODUCTS[kind]
    options = dict(dtype=HALVES[T], device=device)
    A, B, d = integers(64, 64, **options), integers(64, N, seed=1, **options), torch.zeros(64, N, device=device)
    a, b = A.T.contiguous() if TRANS_A else A, B if TRANS_B else B.T.contiguous()
    run(files["PRODUCT"], "product", a, b, d, kind, block=128, shared_bytes=2 * 64 * 256, T=T)
    assert torch.equal(d, 1 + A.float() @ B.float())


BOXES = [
    (0, 0, 0, 0, 0), (0, 8, 0, 1, 1), (0, 8, 1, 0, 1), (32, 20, 1, 2, 0), (0, 0, 0, 0, 2),
    (0, -3, 1, 0, 1), (32, 20, -1, 2, 0), (-8, 0, 0, 0, 0),
]  # fmt: skip


@on(9, 0)
@times
@pytest.mark.parametrize("at", BOXES)
def test_tma(files, at, device, copies, wgmma):
    """q (2, 3, 21, 128) as (2, 3, 2, 21, 64), with boxes of 2 slabs of 16 rows inside, across and beyond every edge.

    A box that begins before the tensor may be loaded, but not stored: there an H200 reports an illegal instruction.
    """
    store = min(at) >= 0
    x = torch.arange(2 * 3 * 21 * 128).remainder(251).to(device, torch.bfloat16).view(2, 21, 3, 128).transpose(1, 2)
    y, raw = torch.full_like(x, -1), torch.zeros(2 * 16 * 64, device=device, dtype=torch.bfloat16)
    x, y = (a.unflatten(3, (2, 64)).transpose(2, 3) for a in (x, y))
    box = (1, 1, 2, 16, 64)
    with emulator.schedule(copies=copies, wgmma=wgmma):
        maps = tensor_map(x, box), tensor_map(y, box)
        run(files["COPIES"], "box", *maps, raw, store, *at, shared_bytes=4096 + 8, T="bf16")
    slab, row, column = (i.flatten() for i in torch.meshgrid(*(torch.arange(n) for n in (2, 16, 64)), indexing="ij"))
    index = at[4] + 0 * slab, at[3] + 0 * slab, at[2] + slab, at[1] + row, at[0] + column
    inside = torch.stack([(i >= 0) & (i < n) for i, n in zip(index, x.shape, strict=True)]).all(0)
    index = tuple(i[inside] for i in index)
    tile, want = torch.zeros(2 * 16 * 64, dtype=torch.bfloat16), torch.full_like(y, -1).cpu()
    tile[inside] = x.cpu()[index]
    if store:
        want[index] = tile[inside]
    assert torch.equal(y.cpu(), want)
    swizzled = 1024 * slab + 64 * row + (column // 8 ^ row % 8) * 8 + column % 8
    assert torch.equal(raw.cpu()[swizzled], tile)


@on(9, 0)
@times
def test_bulk_copies(files, device, copies, wgmma):
    x, y = torch.arange(128.0, device=device), torch.zeros(64, device=device)
    with emulator.schedule(threads="random", seed=2, copies=copies, wgmma=wgmma):
        run(files["COPIES"], "bulk", x, y, grid=2, block=64, shared_bytes=512 + 16, T="bf16")
    assert torch.equal(y, 2 * (x[:64] + x[64:]))


@on(9, 0)
@pytest.mark.parametrize("threads", emulator.ORDERS)
def test_named_barriers(files, device, threads):
    order, n = (torch.zeros(k, dtype=torch.int32, device=device) for k in (8, 1))
    with emulator.schedule(threads=threads):
        run(files["COPIES"], "turns", order, n, block=256, T="bf16")
    assert order.tolist() == [0, 1] * 4


def pipeline(file, device, tiles):
    """Whether the kernel's product is right."""
    A, B = (integers(64, 64 * tiles, dtype=torch.bfloat16, device=device, seed=seed, largest=1) for seed in (1, 2))
    out, box = torch.zeros(64, 64, device=device, dtype=torch.bfloat16), (1, 1, 1, 64, 64)
    maps = [tensor_map(x.view(1, 1, 64, -1, 64).transpose(2, 3), box) for x in (A, B, out)]
    count = torch.tensor([tiles], dtype=torch.int32, device=device)  # a tensor, because it tells `run` the device
    run(file, "pipeline", *maps, count, block=256, shared_bytes=2 * 5 * 64 * 64 + 32, T="bf16")
    return torch.equal(out.float(), A.float() @ B.float().T)


SCHEDULES = [
    dict(copies=copies, wgmma=wgmma, threads=threads, seed=seed)
    for copies, wgmma in TIMES
    for threads, seed in (("forward", 0), ("reverse", 0), ("random", 1))
]


@on(9, 0)
def test_a_pipeline_in_every_schedule(files, device):
    for tiles in (1, 2, 5):
        for schedule in SCHEDULES if device == "cpu" else [{}]:
            with emulator.schedule(**schedule):
                assert pipeline(files["PIPELINE"], device, tiles), schedule


MISUSED = {  # by kernel of MISUSE: what its cases are told; None where nothing is said, but NaN comes out
    "barriers": [
        "barrier_arrive of a barrier that is not initialised",
        "barrier_init of a barrier that is initialised already",
        "more arrivals than the 2 of the barrier: this phase waits for 16 bytes only",
        r"threads 0 wait at barrier_wait for parity 0, kernels.cu:\d+ \(1 of 2 arrivals and 4096 bytes missing\)",
        "barrier_wait for parity 2: it must be 0 or 1",
        r"threads 0 wait at barrier_wait for parity 1, kernels.cu:\d+ \(2 of 2 arrivals and 0 bytes missing\)",
    ],
    "named": [
        "40 threads is no multiple of 32",
        "threads 0 wait at named_barrier_arrive",  # a warp arrives as a whole
        r"barrier 1 waits for 96 threads here and 64 at kernels.cu:\d+",
        "warp 0 arrives at barrier 1 for the second time before it is complete",
        "has ended while 32 of 64 threads have come to the named barrier",
    ],
    "warpgroup": [
        r"threads 0-31 wait at wgmma_fence, .*\n.*\n.*\n.*threads 96-127 returned from the kernel, and count",
        "wgmma_fence is missing",
        "leads beyond the end of shared memory",
        "swizzle of 128 bytes only",
        "thread 64 of the warpgroup gives other descriptors than thread 0",
        "accumulator 1 of thread 0 was written while a wgmma .* was under way",
        None,
        "has ended before wgmma_wait for the wgmma at",
    ],
    "staging": [
        "accessed at an address that is no multiple of 128",
        "access to element 1087 of a shared array of 1024 elements",
        "has ended while copies to or from its shared memory are under way",
        "tma_store at -3 in dimension 1: only a load may begin before the tensor",
        "a box begins at column 4: that must be a multiple of 16 bytes",
        "two blocks write to one element: .* to element 0 of map",
    ],
}
HOW = {"barriers": (1, 1, 8), "named": (1, 64, 0), "warpgroup": (1, 128, 8192), "staging": (2, 1, 2048)}
CASES = [(kernel, what) for kernel, told in MISUSED.items() for what in range(len(told))]


@pytest.mark.parametrize("kernel, what", CASES)
def test_misuse(files, kernel, what):
    y, told, (grid, block, shared_bytes) = torch.zeros(128), MISUSED[kernel][what], HOW[kernel]
    map = emulator.tensor_map(torch.zeros(1, 1, 1, 16, 64).bfloat16(), (1, 1, 1, 16, 64))
    arguments = {"warpgroup": (what, y), "staging": (map, what)}.get(kernel, (what,))
    with pytest.raises(RuntimeError, match=told) if told else contextlib.nullcontext():
        run(files["MISUSE"], kernel, *arguments, grid=grid, block=block, shared_bytes=shared_bytes)
    assert told or y.isnan().all()  # because the accumulators were read too early


@pytest.mark.parametrize("threads", emulator.ORDERS)
def test_a_warpgroup_waits_for_registers_that_are_not_there(files, threads):
    """Of 384 threads each has 168. Two warpgroups of 240 leave 24 for the third."""
    with emulator.schedule(threads=threads):
        run(files["MISUSE"], "registers", 0, block=384)
        with pytest.raises(RuntimeError, match=r"threads \d+-\d+ wait at registers_increase"):
            run(files["MISUSE"], "registers", 1, block=384)


def test_tensors_that_tma_cannot_read():
    x, box = torch.zeros(2, 2, 2, 20, 64).bfloat16(), (1, 1, 2, 16, 64)
    for bad, box_, words in (
        (x[0], box, "rank 5"),
        (x.transpose(3, 4), box, "last dimension contiguous"),
        (x.flatten()[1 : 1 + 2560].view(1, 1, 2, 20, 64), box, "multiples of 16 bytes"),
        (x[..., :60].contiguous(), box, "multiples of 16 bytes"),
        (x, (1, 1, 2, 300, 64), "1 to 256 elements"),
        (x, (1, 1, 2, 16, 32), "rows of 128 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            emulator.tensor_map(bad, box_)
