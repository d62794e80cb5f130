// SPDX-License-Identifier: MIT
// Bug hunt 02.bug3: rung 6 with one warpgroup a block. Something is wrong with it.
//
//   one thread asks the copy engine (TMA) for whole tiles; a barrier in shared memory counts their bytes
//   for each block of Bc keys, from the last to the first:
//     S = Q K_j^T                 one instruction of the warpgroup multiplies 64 x 16 by 16 x Bc
//     P, m, l; O *= alpha         P lies in the registers in which the next product wants it
//     O += P V_j
//   O / l and m + log l leave the chip
//
// A tile of R rows is D / 64 slabs of R rows of 128 bytes, whose 16-byte chunks the copy engine swizzles. All
// products are waited for before the threads go on.
//
// Compiled for T (bf16 or fp16), D = 64 or 128, Bc = 64 or 128 (macros). sm_90a. Needs ptx.cuh and wgmma.py's
// wrappers.
// Launch: grid ceil(Nq / 64) * heads, block 128, (64 + 4 * Bc) * D * 2 + 128 bytes of dynamic shared memory.
#include "ptx.cuh"

constexpr int Br = 64;
constexpr int STAGES = 2;       // tiles of K and of V: one in use, one on its way
constexpr int SLABS = D / 64;   // slabs of a tile; a slab has 64 columns, 128 bytes a row

// This thread's part of a warpgroup's S or O: the rows row() and row() + 8, the columns 8 * j + column() and
// the next one, for every j.
__device__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int column() { return 2 * (threadIdx.x % 4); }

// Starts S = Q K^T for 64 rows and Bc keys. An instruction takes 16 columns of Q and K. The lowest bits of a
// descriptor are an address / 16, so that an addition moves the descriptor on.
__device__ void start_scores(float (&S)[Bc / 2], Shared<T> Q, Shared<T> K) {
  uint64_t a = descriptor(Q, 16, 1024), b = descriptor(K, 16, 1024);
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_ss<T, Bc, 0, 0>(S, a + (d / 64 * Br * 128 + d % 64 * 2) / 16,
                          b + (d / 64 * Bc * 128 + d % 64 * 2) / 16, d > 0);
}

// Starts O += P V. An instruction takes 16 keys. The sum runs down the rows of V, hence TRANS_B = 1, and the
// descriptor says how far apart the slabs of V are.
__device__ void start_output(float (&O)[D / 2], const uint32_t (&P)[Bc / 16][4], Shared<T> V) {
  uint64_t b = descriptor(V, Br * 128, 1024);
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) wgmma_rs<T, D, 1>(O, P[j], b + j * 16 * 128 / 16, true);
}

// In the rows i and i + 8, the keys that the row must not see get the score -inf.
__device__ void mask(float (&S)[Bc / 2], int first_key, int i, int Nq, int Nk, int causal) {
#pragma unroll
  for (int e = 0; e < Bc / 2; e++) {
    int seen = causal ? min(Nk, i + e / 2 % 2 * 8 + 1 + Nk - Nq) : Nk;
    if (first_key + e / 4 * 8 + column() + e % 2 >= seen) S[e] = -INFINITY;
  }
}

// Turns the scores of two rows into P, and updates m and l with them. m is in units of the scores, and l is
// the lane's share, the sum over its own columns. O must then be multiplied by alpha. FA2 Alg. 1, line 9.
__device__ void online_softmax(float (&S)[Bc / 2], float (&m)[2], float (&l)[2], float (&alpha)[2],
                               float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m_new = m[r];
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) m_new = fmaxf(m_new, fmaxf(S[e], S[e + 1]));
    m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));  // the 4 lanes of a quad share a row
    m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
    float base = m_new == -INFINITY ? 0 : m_new;  // no key seen yet: -inf - (-inf) would be NaN
    float factor = exponent_factor(base, scale_log2), shift = base * factor;
    alpha[r] = exp2_approx((m[r] - base) * factor);
    m[r] = m_new;
    l[r] *= alpha[r];
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) {
      S[e] = exp2_approx(S[e] * factor - shift);
      S[e + 1] = exp2_approx(S[e + 1] * factor - shift);
      l[r] += S[e] + S[e + 1];
    }
  }
}

__device__ void rescale(float (&O)[D / 2], const float (&alpha)[2]) {
#pragma unroll
  for (int e = 0; e < D / 2; e++) O[e] *= alpha[e / 2 % 2];
}

// Packs P as an operand of the next product, in pairs of neighbours. A lane already holds the pairs that
// wgmma wants from it.
__device__ void to_operand(uint32_t (&P)[Bc / 16][4], const float (&S)[Bc / 2]) {
#pragma unroll
  for (int i = 0; i < Bc / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

// Stores out = O / l and lse = m + log l of the rows i and i + 8, if they exist. A row that saw no key gets
// out = 0 and lse = -inf.
__device__ void store_rows(Global<T> out, Global<float> lse, const float (&O)[D / 2], const float (&m)[2],
                           float (&l)[2], int i, int Nq, float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    l[r] += __shfl_xor_sync(~0u, l[r], 1);
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
    float inverse = 1 / l[r];
    int64_t query = i + 8 * r;
    if (query >= Nq) continue;
#pragma unroll
    for (int e = 2 * r; e < D / 2; e += 4) {
      uint32_t pair = l[r] == 0 ? 0 : pack<T>(O[e] * inverse, O[e + 1] * inverse);
      store_pair(out + (query * D + e / 4 * 8 + column()), pair);
    }
    if (threadIdx.x % 4 == 0) lse[query] = m[r] * scale + logf(l[r]);
  }
}

// The tensor maps describe q, k and v (1, heads, N, D). out (heads, Nq, D) and lse (heads, Nq) are
// contiguous.
extern "C" __global__ void __launch_bounds__(128, 1) attention_forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, Global<T> out, Global<float> lse,
    int Nq, int Nk, float scale, int causal) {
  int tiles = (Nq + Br - 1) / Br;
  int head = blockIdx.x / tiles;
  int tile = blockIdx.x % tiles;
  int keys = causal ? min(Nk, min(tile * Br + Br, Nq) + Nk - Nq) : Nk;  // keys that some row sees
  int seen_by_all = causal ? min(Nk, tile * Br + 1 + Nk - Nq) : Nk;     // keys that every row sees
  int blocks = max(1, (keys + Bc - 1) / Bc);  // of keys; one, masked throughout, if no row sees a key

  SharedMemory smem;
  Shared<T> Q = smem.array<T>(Br * D), K = smem.array<T>(STAGES * Bc * D), V = smem.array<T>(STAGES * Bc * D);
  Shared<Barrier> full = smem.array<Barrier>(STAGES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + s, 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers exist

  // Starts to copy the n-th block of keys, and Q with the first one. The loop visits the blocks from the last
  // to the first, so that the masked ones come first.
  auto load = [&](int n) {
    int stage = n % STAGES, j = blocks - 1 - n;
    barrier_expect(full + stage, (2 * Bc + (n == 0 ? Br : 0)) * 128 * SLABS);
    if (n == 0) tma_load(Q, q_map, full, 0, tile * Br, 0, head, 0);
    tma_load(K + stage * Bc * D, k_map, full + stage, 0, j * Bc, 0, head, 0);
    tma_load(V + stage * Bc * D, v_map, full + stage, 0, j * Bc, 0, head, 0);
  };
  if (threadIdx.x == 0)
    for (int n = 0; n < min(STAGES, blocks); n++) load(n);

  int i = tile * Br + row();               // this thread's first row
  float S[Bc / 2], O[D / 2] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2];
  float scale_log2 = scale * 1.44269504f;  // times log2(e), because exp is computed as a power of 2
  uint32_t P[Bc / 16][4];
  for (int n = 0; n < blocks; n++) {
    int stage = n % STAGES, j = blocks - 1 - n;
    barrier_wait(full + stage, n / STAGES % 2);  // K_j and V_j have come

    wgmma_fence();
    start_scores(S, Q, K + stage * Bc * D);
    wgmma_commit();
    wgmma_wait<0>();
    if (j * Bc + Bc > seen_by_all) mask(S, j * Bc, i, Nq, Nk, causal);
    online_softmax(S, m, l, alpha, scale_log2);
    rescale(O, alpha);
    to_operand(P, S);

    wgmma_fence();  // O and P were written by ordinary instructions
    start_output(O, P, V + stage * Bc * D);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // no warp still reads the stage that the next line overwrites
    if (threadIdx.x == 0 && n + STAGES < blocks) load(n + STAGES);
  }
  int64_t first = int64_t(head) * Nq;
  store_rows(out + first * D, lse + first, O, m, l, i, Nq, scale);
}
