// SPDX-License-Identifier: MIT
// What the puzzles about Hopper run in the emulation, bf16.
#include "ptx.cuh"

// A ring of `stages` tiles of 4 numbers. The producer, thread 0, copies tile after tile, and the consumer,
// thread 32, adds up each of them. Tile n lies in stage places[3 n]; the consumer waits for its copy with the
// parity places[3 n + 1], and the producer waits for an empty stage with the parity places[3 n + 2].
extern "C" __global__ void ring(Global<const float> x, Global<const int> places, Global<float> sums,
                                int tiles, int stages) {
  SharedMemory smem;
  Shared<float> tile = smem.array<float>(4 * 4);
  Shared<Barrier> full = smem.array<Barrier>(4), empty = smem.array<Barrier>(4);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) barrier_init(full + s, 1), barrier_init(empty + s, 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers exist
  for (int n = 0; n < tiles; n++) {
    int stage = places[3 * n];
    if (threadIdx.x == 0) {
      barrier_wait(empty + stage, places[3 * n + 2]);
      barrier_expect(full + stage, 4 * sizeof(float));
      bulk_load(tile + 4 * stage, x + 4 * n, 4, full + stage);
    } else if (threadIdx.x == 32) {
      barrier_wait(full + stage, places[3 * n + 1]);
      float sum = 0;
      for (int e = 0; e < 4; e++) sum += tile[4 * stage + e];
      sums[n] = sum;
      barrier_arrive(empty + stage);
    }
  }
}

// What one wgmma reads as its second operand, 16 x N: the first operand is the unit matrix.
template <int N, int TRANS> __device__ void read_operand(Global<float> found, uint64_t operand) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  uint32_t unit[4];
  for (int i = 0; i < 4; i++) {
    int r = row + i % 2 * 8, c = column + i / 2 * 8;
    unit[i] = pack<bf16>(r == c, r == c + 1);
  }
  float C[N / 2];
  wgmma_fence();
  wgmma_rs<bf16, N, TRANS>(C, unit, operand, false);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; row < 16 && i < N / 2; i++)
    found[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + column + i % 2] = C[i];
}

// The same for an operand that begins `start` bytes behind the tile's begin. If the sum runs down the rows of
// the tile, the operand has 128 columns, in two slabs; otherwise it has 64.
extern "C" __global__ void __launch_bounds__(128) reads(
    Global<const bf16> raw, Global<float> found, int start, int leading, int stride, int runs_down) {
  SharedMemory smem;
  Shared<bf16> tile = smem.array<bf16>(128 * 64);
  for (int e = threadIdx.x; e < 128 * 64; e += 128) tile[e] = raw[e];
  fence_async();
  __syncthreads();  // the tile is there, for the tensor cores too
  uint64_t operand = descriptor(tile + start / 2, leading, stride);
  if (runs_down) read_operand<128, 1>(found, operand);
  else read_operand<64, 0>(found, operand);
}

// The operations of a consumer's step, in the order in which two_waits.py numbers them.
enum { START_S, START_O, WAIT_1, WAIT_0, RELEASE_K, RELEASE_V, SOFTMAX, RESCALE, PACK };

// Attention of 64 queries, D = 64, over `blocks` of 64 keys, without a maximum: P = exp2(S). The consumer is
// the first warpgroup. In each step it does `operations` in their order; the first step has no O yet, and the
// last one no S. The producer copies K and V of the next block as soon as their only stages are empty.
// factors[j] takes the place of alpha: in step j O is multiplied by it.
extern "C" __global__ void __launch_bounds__(256) step(
    Global<const bf16> q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    Global<const int> operations, Global<const float> factors, Global<float> out, int blocks, int count) {
  SharedMemory smem;
  Shared<bf16> Q = smem.array<bf16>(64 * 64);
  Shared<bf16> K = smem.array<bf16>(64 * 64), V = smem.array<bf16>(64 * 64);
  Shared<Barrier> full = smem.array<Barrier>(2), empty = smem.array<Barrier>(2);  // of K, of V
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) barrier_init(full + s, 1), barrier_init(empty + s, 128);
    barrier_init_fence();
  }
  for (int e = threadIdx.x; e < 64 * 64; e += 256) Q[e / 64 * 64 + (e % 64 ^ e / 64 % 8 * 8)] = q[e];
  fence_async();
  __syncthreads();  // the barriers exist, and Q is there
  if (threadIdx.x >= 128) {
    if (threadIdx.x > 128) return;
    for (int j = 0; j < blocks; j++) {
      barrier_wait(empty, j % 2 ^ 1);
      barrier_expect(full, 64 * 128);
      tma_load(K, k, full, 0, 64 * j, 0, 0, 0);
      barrier_wait(empty + 1, j % 2 ^ 1);
      barrier_expect(full + 1, 64 * 128);
      tma_load(V, v, full + 1, 0, 64 * j, 0, 0, 0);
    }
    return;
  }
  uint64_t a = descriptor(Q, 16, 1024), b = descriptor(K, 16, 1024), c = descriptor(V, 64 * 128, 1024);
  float S[32], O[32] = {};
  uint32_t P[4][4];
  for (int j = 0; j <= blocks; j++) {  // S of block j, O of block j - 1
    for (int n = 0; n < count; n++) {
      int what = operations[n];
      bool S_part = what == START_S || what == RELEASE_K || what == SOFTMAX || what == PACK;
      bool O_part = what == START_O || what == RELEASE_V || what == RESCALE;
      if (j == blocks && S_part || j == 0 && O_part) continue;
      if (what == START_S) {
        barrier_wait(full, j % 2);
        wgmma_fence();
        for (int d = 0; d < 4; d++) wgmma_ss<bf16, 64, 0, 0>(S, a + 2 * d, b + 2 * d, d > 0);
        wgmma_commit();
      } else if (what == START_O) {
        barrier_wait(full + 1, (j - 1) % 2);
        wgmma_fence();
        for (int d = 0; d < 4; d++) wgmma_rs<bf16, 64, 1>(O, P[d], c + 128 * d, true);
        wgmma_commit();
      } else if (what == WAIT_1) {
        if (j > 0 && j < blocks) wgmma_wait<1>();
        else wgmma_wait<0>();
      } else if (what == WAIT_0) {
        wgmma_wait<0>();
      } else if (what == RELEASE_K) {
        barrier_arrive(empty);
      } else if (what == RELEASE_V) {
        barrier_arrive(empty + 1);
      } else if (what == SOFTMAX) {
        for (int e = 0; e < 32; e++) S[e] = exp2_approx(S[e]);
      } else if (what == RESCALE) {
        for (int e = 0; e < 32; e++) O[e] *= factors[j];
      } else if (what == PACK) {
        for (int i = 0; i < 16; i++) P[i / 4][i % 4] = pack<bf16>(S[2 * i], S[2 * i + 1]);
      }
    }
  }
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  for (int i = 0; i < 32; i++) out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = O[i];
}
