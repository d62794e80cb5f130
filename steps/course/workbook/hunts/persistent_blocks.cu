// SPDX-License-Identifier: MIT
// Bug hunt 02.bug2: the roles of rung 7 with the arithmetic of rung 0, in persistent blocks.
//
//   a block takes one tile of queries after another, and for each of them:
//     producer, one thread:                         consumers, one thread a query:
//       for each tile of keys:                        q, m, l, O in registers
//         wait until a stage is empty                 for each tile of keys:
//         start to copy K_j and V_j there               wait until K_j and V_j have come
//                                                       add them to m, l, O; their stage is empty
//                                                     out = O / l, lse = m + log l
//
// The producer does not wait for the consumers to finish a tile of queries, so that the first keys of the
// next tile come meanwhile.
//
// Compiled for D (a multiple of 4), Br (a multiple of 32) and Bc (macros). sm_90. Needs ptx.cuh.
// Launch: as many blocks as run at once, of Br + 32 threads, 16 * Bc * D + 32 bytes of dynamic shared memory.
#include "ptx.cuh"

constexpr int STAGES = 2;  // tiles of K and V in shared memory: one in use, one on its way

// The parity of the phase of a stage's barriers that belongs to tile number n.
__device__ int parity(int n) { return n / STAGES % 2; }

// Adds the tile's first `seen` keys to the row.
__device__ void online_update(float& m, float& l, float (&O)[D], const float (&q)[D], Shared<float> K,
                              Shared<float> V, int seen, float scale) {
  for (int j = 0; j < seen; j++) {
    float s = 0;
#pragma unroll
    for (int d = 0; d < D; d++) s += q[d] * K[j * D + d];
    float m_new = fmaxf(m, scale * s);
    float alpha = expf(m - m_new);
    float P = expf(scale * s - m_new);
    l = alpha * l + P;
#pragma unroll
    for (int d = 0; d < D; d++) O[d] = alpha * O[d] + P * V[j * D + d];
    m = m_new;
  }
}

// q (heads, Nq, D), k and v (heads, Nk, D), out (heads, Nq, D), lse (heads, Nq), all contiguous.
extern "C" __global__ void __launch_bounds__(Br + 32) attention_forward(
    Global<const float> q, Global<const float> k, Global<const float> v, Global<float> out, Global<float> lse,
    int heads, int Nq, int Nk, float scale, int causal) {
  SharedMemory smem;
  Shared<float> K = smem.array<float>(STAGES * Bc * D), V = smem.array<float>(STAGES * Bc * D);
  Shared<Barrier> full = smem.array<Barrier>(STAGES), empty = smem.array<Barrier>(STAGES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, Br);
    }
    barrier_init_fence();
  }
  __syncthreads();  // the barriers exist

  int tiles = (Nq + Br - 1) / Br;
  int n = 0;  // the number of tiles of keys that have passed through this block
  for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
    int tile = item % tiles;
    int head = item / tiles;
    int last = min(tile * Br + Br, Nq) - 1;
    int keys = causal ? min(Nk, max(0, last + 1 + Nk - Nq)) : Nk;  // keys that some row of the tile sees

    if (threadIdx.x == Br) {
      for (int j = 0; j < keys; j += Bc, n++) {
        int stage = n % STAGES;
        int numbers = min(Bc, keys - j) * D;
        int64_t from = (int64_t(head) * Nk + j) * D;
        barrier_wait(empty + stage, parity(n) ^ 1);  // passes at once if the stage had no tile before
        barrier_expect(full + stage, 2 * 4 * numbers);
        bulk_load(K + stage * Bc * D, k + from, numbers, full + stage);
        bulk_load(V + stage * Bc * D, v + from, numbers, full + stage);
      }
    } else if (threadIdx.x < Br) {
      int i = tile * Br + threadIdx.x;
      int seen = i >= Nq ? 0 : causal ? min(Nk, i + 1 + Nk - Nq) : Nk;  // keys that this row sees
      int64_t row = int64_t(head) * Nq + i;
      float Q_i[D], O_i[D] = {};
      float m = -INFINITY, l = 0;
#pragma unroll
      for (int d = 0; d < D; d++) Q_i[d] = i < Nq ? q[row * D + d] : 0;
      for (int j = 0; j < keys; j += Bc, n++) {
        int stage = n % STAGES;
        barrier_wait(full + stage, parity(n));
        online_update(m, l, O_i, Q_i, K + stage * Bc * D, V + stage * Bc * D, min(Bc, seen - j), scale);
        barrier_arrive(empty + stage);
      }
      if (i < Nq) {
#pragma unroll
        for (int d = 0; d < D; d++) out[row * D + d] = l == 0 ? 0 : O_i[d] / l;
        lse[row] = m + logf(l);
      }
    }
  }
}
