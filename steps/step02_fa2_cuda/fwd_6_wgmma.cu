// SPDX-License-Identifier: MIT
// Rung 6, "wgmma": Hopper's tensor cores and copy engine. FlashAttention-2, Algorithm 1, in tiles of 128
// rows.
//
//   one thread asks the copy engine (TMA) for whole tiles; a barrier in shared memory counts their bytes
//   for each block of Bc keys, from the last to the first:
//     S = Q K_j^T                 one instruction of a warpgroup (4 warps) multiplies 64 x 16 by 16 x Bc
//     P, m, l; O *= alpha         as before; P lies in the registers in which the next product wants it
//     O += P V_j
//   O / l and m + log l leave the chip
//
// The idea: Q, K and V go from shared memory to the tensor cores without passing through registers, and an
// address is computed once a tile, not once a thread. A product runs while the threads go on. A descriptor
// tells the instruction where a tile lies. A tile of R rows is ceil(D / 64) slabs of R rows of 128 bytes,
// whose 16-byte chunks the copy engine swizzles as rung 3 did by hand.
//
// Parameters, which are macros:
//   T         bf16 or fp16: the type of q, k, v and out
//   D         the head_dim: 32, 64, 96, 128 or 256
//   Br        queries of a tile, 64 for each warpgroup: 128, which S and O leave registers for
//   Bc        keys of a tile, a multiple of 16: 128, or as many as shared memory and registers hold
//   CAUSAL    1 or 0, a macro so that the kernel without a mask has no code for it
//
// sm_90a. Needs ptx.cuh and wgmma.py's wrappers.
// Launch: grid ceil(Nq / Br) * H * B, block 2 * Br, (Br + 4 * Bc) * ceil(D / 64) * 128 + 128 bytes of dynamic
// shared memory.
// Spill budget: 0 bytes.
// Left out: products that run while their own warpgroup computes exponentials (rung 8).
// Bottleneck: at the end of every block of keys all warpgroups wait for the slowest, before one thread may
// ask for the next block (rung 7).
#include "ptx.cuh"

static_assert(Br % 64 == 0 && Bc % 16 == 0, "warpgroups have 64 rows; `wgmma` takes 16 keys of V");
constexpr int STAGES = 2;                // tiles of K and of V: one in use, one on its way
constexpr int SLABS = (D + 63) / 64;     // slabs of a tile; a slab has 64 columns, 128 bytes a row
constexpr int BOX = D % 64 ? 1 : SLABS;  // slabs that one copy brings

// x, on which all lanes of the warp agree. The shuffle lets the compiler know that they agree: what is
// computed from x then takes no registers of the threads.
__device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// This thread's part of a warpgroup's S or O: the rows row() and row() + 8, the columns 8 * j + column() and
// the next one, for every j.
__device__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int column() { return 2 * (threadIdx.x % 4); }

// Starts to copy ROWS rows of one head, from row `first` on. Rows and columns outside the tensor come as
// zeros.
template <int ROWS>
__device__ void load_tile(Shared<T> tile, const TensorMap& map, Shared<Barrier> full, int first, int head,
                          int batch) {
#pragma unroll
  for (int s = 0; s < SLABS; s += BOX)
    tma_load(tile + s * ROWS * 64, map, full, D % 64 ? 64 * s : 0, first, D % 64 ? 0 : s, head, batch);
}

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
// slabs of V lie Bc * 128 bytes apart.
__device__ void start_output(float (&O)[D / 2], const uint32_t (&P)[Bc / 16][4], Shared<T> V) {
  uint64_t b = descriptor(V, Bc * 128, 1024);
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) wgmma_rs<T, D, 1>(O, P[j], b + j * 16 * 128 / 16, true);
}

// In the rows i and i + 8, the keys that the row must not see get the score -inf.
__device__ void mask(float (&S)[Bc / 2], int first_key, int i, int Nq, int Nk) {
#pragma unroll
  for (int e = 0; e < Bc / 2; e++) {
    int seen = CAUSAL ? min(Nk, i + e / 2 % 2 * 8 + 1 + Nk - Nq) : Nk;
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

// The tensor maps describe q (B, H, Nq, D), k and v (B, H / group, Nk, D), whose strides are arbitrary, but D
// is contiguous. out (B, H, Nq, D) and lse (B, H, Nq) are contiguous.
extern "C" __global__ void __launch_bounds__(2 * Br, 1) attention_forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, Global<T> out, Global<float> lse,
    int H, int group, int Nq, int Nk, float scale) {
  int tiles = (Nq + Br - 1) / Br;
  int head = blockIdx.x / tiles % H;
  int batch = blockIdx.x / tiles / H;
  // If causal, the last tiles are the longest. They start first, so that no long one still runs when all
  // others ended.
  int tile = CAUSAL ? tiles - 1 - blockIdx.x % tiles : blockIdx.x % tiles;
  int keys = CAUSAL ? min(Nk, min(tile * Br + Br, Nq) + Nk - Nq) : Nk;  // keys that some row sees
  int seen_by_all = CAUSAL ? min(Nk, tile * Br + 1 + Nk - Nq) : Nk;     // keys that every row sees
  int blocks = max(1, (keys + Bc - 1) / Bc);  // of keys; one, masked throughout, if no row sees a key

  SharedMemory smem;
  Shared<T> Q = smem.array<T>(Br * 64 * SLABS);
  Shared<T> K = smem.array<T>(STAGES * Bc * 64 * SLABS);
  Shared<T> V = smem.array<T>(STAGES * Bc * 64 * SLABS);
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
    if (n == 0) load_tile<Br>(Q, q_map, full, tile * Br, head, batch);
    load_tile<Bc>(K + stage * Bc * 64 * SLABS, k_map, full + stage, j * Bc, head / group, batch);
    load_tile<Bc>(V + stage * Bc * 64 * SLABS, v_map, full + stage, j * Bc, head / group, batch);
  };
  if (threadIdx.x == 0)
    for (int n = 0; n < min(STAGES, blocks); n++) load(n);

  int w = uniform(threadIdx.x / 128);      // the number of the warpgroup
  int i = tile * Br + 64 * w + row();      // this thread's first row
  float S[Bc / 2], O[D / 2] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2];
  float scale_log2 = scale * 1.44269504f;  // times log2(e), because exp is computed as a power of 2
  uint32_t P[Bc / 16][4];
  for (int n = 0; n < blocks; n++) {
    int stage = n % STAGES, j = blocks - 1 - n;
    barrier_wait(full + stage, n / STAGES % 2);  // K_j and V_j have come

    wgmma_fence();
    start_scores(S, Q + w * 64 * 64, K + stage * Bc * 64 * SLABS);
    wgmma_commit();
    wgmma_wait<0>();
    if (j * Bc + Bc > seen_by_all) mask(S, j * Bc, i, Nq, Nk);
    online_softmax(S, m, l, alpha, scale_log2);
    rescale(O, alpha);
    to_operand(P, S);

    wgmma_fence();  // O and P were written by ordinary instructions
    start_output(O, P, V + stage * Bc * 64 * SLABS);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // no warpgroup still reads the stage that the next line overwrites
    if (threadIdx.x == 0 && n + STAGES < blocks) load(n + STAGES);
  }
  int64_t first = (int64_t(batch) * H + head) * Nq;
  store_rows(out + first * D, lse + first, O, m, l, i, Nq, scale);
}
