// SPDX-License-Identifier: MIT
// Bug hunt 02.bug2: rung 7's roles with rung 0's arithmetic, in blocks that stay. Something is wrong with it.
//
//   a block takes one tile of queries after another, and for each of them:
//     producer, one thread:                         consumers, one thread a query:
//       for each tile of keys:                        q, m, l, O in registers
//         wait until a place is empty                 for each tile of keys:
//         start to copy K_j and V_j there               wait until K_j and V_j have come
//                                                       m, l, O take them in; their place is empty
//                                                     out = O / l, lse = m + log l
//
// The producer does not wait for the consumers to finish with a tile of queries: the next one's first keys come meanwhile.
// Compiled for D (a multiple of 4), Br (of 32), Bc (macros). sm_90. Launch: as many blocks as run at once, of Br + 32 threads,
// 16 * Bc * D + 32 bytes of dynamic shared memory. Needs ptx.cuh.
#include "ptx.cuh"

constexpr int PLACES = 2;  // tiles of K and V in shared memory: one in use, one on its way

// The phase of a place's barriers in which tile number n is there.
__device__ int parity(int n) { return n / PLACES % 2; }

// Takes in the tile's first `seen` keys.
__device__ void online_update(float& m, float& l, float (&O)[D], const float (&q)[D], Shared<float> K, Shared<float> V, int seen,
                              float scale) {
  for (int j = 0; j < seen; j++) {
    float s = 0;
#pragma unroll
    for (int d = 0; d < D; d++) s += q[d] * K[j * D + d];
    float m_new = fmaxf(m, scale * s), alpha = expf(m - m_new), P = expf(scale * s - m_new);
    l = alpha * l + P;
#pragma unroll
    for (int d = 0; d < D; d++) O[d] = alpha * O[d] + P * V[j * D + d];
    m = m_new;
  }
}

// q (heads, Nq, D), k and v (heads, Nk, D), out (heads, Nq, D), lse (heads, Nq), all contiguous.
extern "C" __global__ void __launch_bounds__(Br + 32) attention_forward(
    Global<const float> q, Global<const float> k, Global<const float> v, Global<float> out, Global<float> lse, int heads, int Nq,
    int Nk, float scale, int causal) {
  SharedMemory smem;
  Shared<float> K = smem.array<float>(PLACES * Bc * D), V = smem.array<float>(PLACES * Bc * D);
  Shared<Barrier> full = smem.array<Barrier>(PLACES), empty = smem.array<Barrier>(PLACES);
  if (threadIdx.x == 0) {
    for (int p = 0; p < PLACES; p++) barrier_init(full + p, 1), barrier_init(empty + p, Br);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers exist

  int tiles = (Nq + Br - 1) / Br, n = 0;  // n counts the tiles of keys that have passed through this block
  for (int item = blockIdx.x; item < tiles * heads; item += gridDim.x) {
    int tile = item % tiles, head = item / tiles, last = min(tile * Br + Br, Nq) - 1;
    int keys = causal ? min(Nk, max(0, last + 1 + Nk - Nq)) : Nk;  // that any row of the tile sees

    if (threadIdx.x == Br) {
      for (int j = 0; j < keys; j += Bc, n++) {
        int p = n % PLACES, numbers = min(Bc, keys - j) * D;
        int64_t from = (int64_t(head) * Nk + j) * D;
        barrier_wait(empty + p, parity(n) ^ 1);  // passes at once where there was no tile before
        barrier_expect(full + p, 2 * 4 * numbers);
        bulk_load(K + p * Bc * D, k + from, numbers, full + p);
        bulk_load(V + p * Bc * D, v + from, numbers, full + p);
      }
    } else if (threadIdx.x < Br) {
      int i = tile * Br + threadIdx.x, seen = i >= Nq ? 0 : causal ? min(Nk, i + 1 + Nk - Nq) : Nk;  // keys that this row sees
      int64_t row = int64_t(head) * Nq + i;
      float Q_i[D], O_i[D] = {}, m = -INFINITY, l = 0;
#pragma unroll
      for (int d = 0; d < D; d++) Q_i[d] = i < Nq ? q[row * D + d] : 0;
      for (int j = 0; j < keys; j += Bc, n++) {
        int p = n % PLACES;
        barrier_wait(full + p, parity(j / Bc));
        online_update(m, l, O_i, Q_i, K + p * Bc * D, V + p * Bc * D, min(Bc, seen - j), scale);
        barrier_arrive(empty + p);
      }
      if (i < Nq) {
#pragma unroll
        for (int d = 0; d < D; d++) out[row * D + d] = l == 0 ? 0 : O_i[d] / l;
        lse[row] = m + logf(l);
      }
    }
  }
}
