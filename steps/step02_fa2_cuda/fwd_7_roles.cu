// SPDX-License-Identifier: MIT
// Rung 7, "roles": one thread loads tiles, and the warpgroups only compute. FlashAttention-3, section 3.1.
//
//   producer, one thread:                         consumers, 1 to 3 warpgroups of 64 query rows each:
//     Q, after the first K_j                        wait for Q
//     for each block of keys:                       for each block of keys:
//       wait for an empty stage of K; load K_j        wait for K_j; S = Q K_j^T; the stage of K_j is empty
//       wait for an empty stage of V; load V_j        P, m, l; O *= alpha
//                                                     wait for V_j; O += P V_j; the stage of V_j is empty
//
// The idea: nobody waits for all the others. Shared memory has a few stages for tiles, each with two
// barriers, "full" and "empty". A warpgroup may be one block of keys ahead of another, and the tensor cores
// then work for one while the other computes exponentials. The producer needs few registers. setmaxnreg gives
// the others to the consumers.
//
// Parameters, which are macros:
//   T         bf16 or fp16: the type of q, k, v and out
//   D         the head_dim: 32, 64, 96, 128 or 256
//   Br        queries of a tile, 64 for each consumer: 192, or 128 where O needs more registers (D >= 128)
//   Bc        keys of a tile, a multiple of 16: 128, or as many as shared memory and registers hold
//   CAUSAL    1 or 0
//
// sm_90a. Needs ptx.cuh and wgmma.py's wrappers.
// Launch: grid ceil(Nq / Br) * H * B, block 128 + 2 * Br, (Br + 4 * Bc) * ceil(D / 64) * 128 + 128 bytes of
// dynamic shared memory.
// Spill budget: 0 bytes.
// Bottleneck: within a warpgroup products and exponentials still follow each other, and when all warpgroups
// do the same at the same time, half of the units idle (rung 8).
#include "ptx.cuh"

constexpr int STAGES = 2;                // tiles of K and of V: one in use, one on its way
constexpr int SLABS = (D + 63) / 64;     // slabs of a tile; a slab has 64 columns, 128 bytes a row
constexpr int BOX = D % 64 ? 1 : SLABS;  // slabs that one copy brings
static_assert(Br % 64 == 0 && Br <= 192 && Bc % 16 == 0,
              "1 to 3 warpgroups: more would wait for registers for ever");
constexpr int WARPGROUPS = Br / 64;      // consumers; each has 64 rows of Q
// The multiprocessor has 64K registers for 128 * (WARPGROUPS + 1) threads. The consumers get those
// that the producer does not need.
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 1 ? 56 : WARPGROUPS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1 ? 256 : WARPGROUPS == 2 ? 240 : 160;

// Tiles on their way from the producer, which is one thread, to the consumers, which are all warpgroups but
// the producer's: a ring buffer of DEPTH stages in shared memory, each with room for one tile. Every thread
// counts the tiles in its own n, and n says which stage a tile is in and which phase of the stage's barriers
// belongs to it.
template <int DEPTH, int ROWS> struct Ring {
  Shared<T> tiles;
  Shared<Barrier> full;   // of each stage: all bytes of its tile have come
  Shared<Barrier> empty;  // of each stage: every warp of the consumers has finished with its tile
  unsigned n = 0;

  __device__ Ring(SharedMemory& smem) : tiles(smem.array<T>(DEPTH * ROWS * 64 * SLABS)) {}
  __device__ void init(SharedMemory& smem) {
    full = smem.array<Barrier>(DEPTH);
    empty = smem.array<Barrier>(DEPTH);
    for (int s = 0; threadIdx.x == 0 && s < DEPTH; s++) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 4 * WARPGROUPS);
    }
  }
  __device__ int stage() const { return n % DEPTH; }
  __device__ int parity() const { return n / DEPTH % 2; }

  // The producer: starts to copy ROWS rows of one head, from row `first` on. Rows and columns outside the
  // tensor come as zeros. First it waits until the consumers have finished with the previous tile of this
  // stage. A stage that is used for the first time is empty, and the wait ends at once.
  __device__ void load(const TensorMap& map, int first, int head, int batch) {
    barrier_wait(empty + stage(), parity() ^ 1);
    barrier_expect(full + stage(), ROWS * 128 * SLABS);
    Shared<T> tile = tiles + stage() * ROWS * 64 * SLABS;
#pragma unroll
    for (int s = 0; s < SLABS; s += BOX)
      tma_load(tile + s * ROWS * 64, map, full + stage(),
               D % 64 ? 64 * s : 0, first, D % 64 ? 0 : s, head, batch);
    n++;
  }

  // The consumers: waits until the next tile has come, and returns it.
  __device__ Shared<T> get() const {
    barrier_wait(full + stage(), parity());
    return tiles + stage() * ROWS * 64 * SLABS;
  }

  // The consumers: gives the tile's stage back to the producer. A warp calls this when its products with the
  // tile have ended; one lane arrives for the whole warp.
  __device__ void release() {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage());
    n++;
  }
};

// x, on which all lanes of the warp agree. The shuffle lets the compiler know that they agree: what is
// computed from x then takes no registers of the threads.
__device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

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
extern "C" __global__ void __launch_bounds__(128 + 2 * Br, 1) attention_forward(
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
  Ring<1, Br> Q(smem);
  Ring<STAGES, Bc> K(smem), V(smem);
  Q.init(smem);
  K.init(smem);
  V.init(smem);
  if (threadIdx.x == 0) barrier_init_fence();
  __syncthreads();  // the barriers exist

  // The blocks of keys are visited from the last to the first, so that the masked ones come first.
  if (threadIdx.x < 128) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
#pragma unroll 1  // a loop that is not unrolled needs fewer registers
      for (int j = blocks - 1; j >= 0; j--) {
        K.load(k_map, j * Bc, head / group, batch);
        if (j == blocks - 1) Q.load(q_map, tile * Br, head, batch);
        V.load(v_map, j * Bc, head / group, batch);
      }
    }
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    int w = uniform(threadIdx.x / 128 - 1);  // the number of the warpgroup
    int i = tile * Br + 64 * w + row();      // this thread's first row
    float S[Bc / 2], O[D / 2] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2];
    float scale_log2 = scale * 1.44269504f;  // times log2(e), because exp is computed as a power of 2
    uint32_t P[Bc / 16][4];
    Shared<T> Q_i = Q.get() + w * 64 * 64;
    for (int j = blocks - 1; j >= 0; j--) {
      Shared<T> K_j = K.get();
      wgmma_fence();
      start_scores(S, Q_i, K_j);
      wgmma_commit();
      wgmma_wait<0>();
      K.release();
      if (j * Bc + Bc > seen_by_all) mask(S, j * Bc, i, Nq, Nk);
      online_softmax(S, m, l, alpha, scale_log2);
      rescale(O, alpha);
      to_operand(P, S);

      Shared<T> V_j = V.get();
      wgmma_fence();  // O and P were written by ordinary instructions
      start_output(O, P, V_j);
      wgmma_commit();
      wgmma_wait<0>();
      V.release();
    }
    int64_t first = (int64_t(batch) * H + head) * Nq;
    store_rows(out + first * D, lse + first, O, m, l, i, Nq, scale);
  }
}
