// SPDX-License-Identifier: MIT
// Rung 6, "wgmma": Hopper's tensor cores and its copy engine. FlashAttention-2, Algorithm 1, in tiles of 128 queries.
//
//   one thread asks the copy engine (TMA) for whole tiles; a barrier in shared memory counts their bytes as they come
//   for each block of Bc keys, from the last to the first:
//     S = Q K_j^T                 a warpgroup (4 warps) multiplies 64 x Bc x 16 by one instruction, which runs on by itself
//     P, m, l; O *= alpha         as before; P is in the registers in which the next product wants it
//     O += P V_j
//   O / l and m + log l leave the chip
//
// The idea: Q, K and V go from shared memory to the tensor cores without passing through registers, and an address is computed
// once a tile, not once a thread. The instruction is told where a tile lies by a descriptor. A tile of R rows is ceil(D / 64)
// slabs of R rows of 128 bytes, whose 16-byte chunks the copy engine swizzles as rung 3 did by hand.
//
// Compiled for T (bf16 or fp16), D = 32, 64, 96, 128 or 256, Br x Bc (multiples of 64 and 16) and CAUSAL. sm_90a. Launch: grid
// ceil(Nq / Br) * H * B, block 2 * Br, (Br + 4 * Bc) * ceil(D / 64) * 128 + 128 bytes of dynamic shared memory. Needs ptx.cuh and
// wgmma.py's wrappers. Spill budget: 0 bytes.
// Left out: the tensor cores wait while their warpgroup computes exponentials (rung 8).
// The wall: at the end of every block all warpgroups wait for the slowest, before one thread may ask for the next.
#include "ptx.cuh"

static_assert(Br % 64 == 0 && Bc % 16 == 0, "warpgroups have 64 rows; `wgmma` takes 16 keys of V");
constexpr int STAGES = 2;                // tiles of K and of V in shared memory: one in use, one on its way
constexpr int SLABS = (D + 63) / 64;     // of 64 columns, 128 bytes a row
constexpr int BOX = D % 64 ? 1 : SLABS;  // slabs that one copy brings

// x, on which all lanes of the warp agree, in a way that tells the compiler so: what follows from it then costs no registers.
__device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Where this thread's part of a warpgroup's S or O lies: rows row() and row() + 8, columns 8 * j + column(), + 1.
__device__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int column() { return 2 * (threadIdx.x % 4); }

// Starts to copy ROWS rows of one head, from `first` on; what lies outside the tensor comes as 0.
template <int ROWS>
__device__ void load_tile(Shared<T> tile, const TensorMap& map, Shared<Barrier> full, int first, int head, int batch) {
#pragma unroll
  for (int s = 0; s < SLABS; s += BOX)
    tma_load(tile + s * ROWS * 64, map, full, D % 64 ? 64 * s : 0, first, D % 64 ? 0 : s, head, batch);
}

// Starts S = Q K^T, 64 rows x Bc keys, 16 columns of Q and K an instruction. A descriptor's lowest bits are an address / 16.
__device__ void start_scores(float (&S)[Bc / 2], Shared<T> Q, Shared<T> K) {
  uint64_t a = descriptor(Q, 16, 1024), b = descriptor(K, 16, 1024);
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_ss<T, Bc, 0, 0>(S, a + (d / 64 * Br * 128 + d % 64 * 2) / 16, b + (d / 64 * Bc * 128 + d % 64 * 2) / 16, d > 0);
}

// Starts O += P V, 16 keys an instruction. The sum runs down V's rows, hence the 1; its slabs lie Bc * 128 bytes apart.
__device__ void start_output(float (&O)[D / 2], const uint32_t (&P)[Bc / 16][4], Shared<T> V) {
  uint64_t b = descriptor(V, Bc * 128, 1024);
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) wgmma_rs<T, D, 1>(O, P[j], b + j * 16 * 128 / 16, true);
}

// Keys that row i (and i + 8) must not see get the score -inf.
__device__ void mask(float (&S)[Bc / 2], int first_key, int i, int Nq, int Nk) {
#pragma unroll
  for (int e = 0; e < Bc / 2; e++) {
    int seen = CAUSAL ? min(Nk, i + e / 2 % 2 * 8 + 1 + Nk - Nq) : Nk;
    if (first_key + e / 4 * 8 + column() + e % 2 >= seen) S[e] = -INFINITY;
  }
}

// Turns the scores of two rows into P and takes them into m (in units of the scores) and l, which each lane sums over its own
// columns only; O must then be multiplied by alpha. FA2 Alg. 1, line 9.
__device__ void online_softmax(float (&S)[Bc / 2], float (&m)[2], float (&l)[2], float (&alpha)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m_new = m[r];
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) m_new = fmaxf(m_new, fmaxf(S[e], S[e + 1]));
    m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));  // the 4 lanes of a quad share a row
    m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
    float shift = m_new == -INFINITY ? 0 : m_new * scale_log2;  // no key seen yet: -inf - (-inf) would be NaN
    alpha[r] = exp2_approx(m[r] * scale_log2 - shift);
    m[r] = m_new;
    l[r] *= alpha[r];
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) {
      S[e] = exp2_approx(S[e] * scale_log2 - shift);
      S[e + 1] = exp2_approx(S[e + 1] * scale_log2 - shift);
      l[r] += S[e] + S[e + 1];
    }
  }
}

__device__ void rescale(float (&O)[D / 2], const float (&alpha)[2]) {
#pragma unroll
  for (int e = 0; e < D / 2; e++) O[e] *= alpha[e / 2 % 2];
}

// P as the next product's operand: pairs of neighbours in 16 bits, already where wgmma wants them.
__device__ void to_operand(uint32_t (&P)[Bc / 16][4], const float (&S)[Bc / 2]) {
#pragma unroll
  for (int i = 0; i < Bc / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

// out = O / l and lse = m + log l of row i (r = 0) and i + 8 (r = 1), if they exist. A row that saw no key gets 0 and -inf.
__device__ void store_rows(Global<T> out, Global<float> lse, const float (&O)[D / 2], const float (&m)[2], float (&l)[2], int i,
                           int Nq, float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    l[r] += __shfl_xor_sync(~0u, l[r], 1);
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
    float inverse = 1 / l[r];
    int64_t at = i + 8 * r;
    if (at >= Nq) continue;
#pragma unroll
    for (int e = 2 * r; e < D / 2; e += 4)
      store_pair(out + (at * D + e / 4 * 8 + column()), l[r] == 0 ? 0 : pack<T>(O[e] * inverse, O[e + 1] * inverse));
    if (threadIdx.x % 4 == 0) lse[at] = m[r] * scale + logf(l[r]);
  }
}

// The maps show q, k and v as (B, H, N, D), any strides but D's; k and v have a head for every `group` of q's. out (B, H, Nq, D)
// and lse (B, H, Nq) are contiguous.
extern "C" __global__ void __launch_bounds__(2 * Br, 1) attention_forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    Global<T> out, Global<float> lse, int H, int group, int Nq, int Nk, float scale) {
  int tiles = (Nq + Br - 1) / Br, head = blockIdx.x / tiles % H, batch = blockIdx.x / tiles / H;
  int tile = CAUSAL ? tiles - 1 - blockIdx.x % tiles : blockIdx.x % tiles;  // the longest first, so that no long one ends last
  int keys = CAUSAL ? min(Nk, min(tile * Br + Br, Nq) + Nk - Nq) : Nk;      // that some row of the tile sees
  int whole = CAUSAL ? min(Nk, tile * Br + 1 + Nk - Nq) : Nk;               // that every row sees
  int blocks = max(1, (keys + Bc - 1) / Bc);                                // one, masked throughout, if there is no key to see

  SharedMemory smem;
  Shared<T> Q = smem.array<T>(Br * 64 * SLABS);
  Shared<T> K = smem.array<T>(STAGES * Bc * 64 * SLABS), V = smem.array<T>(STAGES * Bc * 64 * SLABS);
  Shared<Barrier> full = smem.array<Barrier>(STAGES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + s, 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers exist

  // Starts the copies of the n-th block of keys; Q comes with the first. The masked blocks, the last ones, are taken first.
  auto load = [&](int n) {
    int stage = n % STAGES, j = blocks - 1 - n;
    barrier_expect(full + stage, (2 * Bc + (n == 0 ? Br : 0)) * 128 * SLABS);
    if (n == 0) load_tile<Br>(Q, q_map, full, tile * Br, head, batch);
    load_tile<Bc>(K + stage * Bc * 64 * SLABS, k_map, full + stage, j * Bc, head / group, batch);
    load_tile<Bc>(V + stage * Bc * 64 * SLABS, v_map, full + stage, j * Bc, head / group, batch);
  };
  if (threadIdx.x == 0)
    for (int n = 0; n < min(STAGES, blocks); n++) load(n);

  int w = uniform(threadIdx.x / 128), i = tile * Br + 64 * w + row();  // the warpgroup, this thread's first row
  float S[Bc / 2], O[D / 2] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2], scale_log2 = scale * 1.44269504f;
  uint32_t P[Bc / 16][4];
  for (int n = 0; n < blocks; n++) {
    int stage = n % STAGES, j = blocks - 1 - n;
    barrier_wait(full + stage, n / STAGES % 2);  // the bytes have come

    wgmma_fence();
    start_scores(S, Q + w * 64 * 64, K + stage * Bc * 64 * SLABS);
    wgmma_commit();
    wgmma_wait<0>();
    if (j * Bc + Bc > whole) mask(S, j * Bc, i, Nq, Nk);
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
