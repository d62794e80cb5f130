// SPDX-License-Identifier: MIT
// Rung 5, "fa2": FlashAttention-2's tiles, and nothing in the loop that need not be there. The best kernel before Hopper's.
//
//   - A warp owns 32 rows (Br = 128), two tiles of 16: each K or V operand from shared memory now serves two `mma`. S and O take
//     most of the 255 registers, so Q stays in shared memory.
//   - exp2 moves into the second product: P is made 16 keys at a time, while the tensor cores are busy with the 16 before.
//   - The loop runs from the last key to the first. Only the first tiles on that way, at the end of the keys or on the diagonal,
//     need the mask; the others skip it.
//   - A lane's addresses in the swizzled tiles are computed once: all others differ from them by constants, which are part of the
//     instruction. No integer arithmetic is left among the `mma`.
//   - Causal: the blocks with the most keys start first, so that none of them is still running when all others have ended; and
//     heads go in groups whose K and V fit into the L2 cache.
//
// Launch: grid ceil(Nq / Br) * H * B, block 128 threads (2 * Br if Br < 64), 2 * (Br + 2 * Bc) * D bytes of dynamic shared
// memory; Br is 32 or a multiple of 64, Bc of 32; D <= 128, or 256 with Br = 64. Needs ptx.cuh. Spill budget: 96 bytes: S and O
// take 192 of the 255 registers, and what the loop needs once a tile or never may wait in memory (D = 128 on sm_90: at most 11 of
// the loop's 1100 instructions).
// Left out: what only Hopper has. The wall: `mma` reaches 2/3 of what Hopper's tensor cores can do (rung 6).
#include "ptx.cuh"

static_assert((Br == 32 || Br % 64 == 0) && Bc % 32 == 0, "4 warps have whole tiles of 16 rows, and share a tile evenly");
constexpr int WARPS = Br < 64 ? Br / 16 : 4, THREADS = 32 * WARPS, ROWS = Br / WARPS, M = ROWS / 16;  // M tiles of 16 rows a warp
constexpr float LOWEST = -3.4e38f;  // where m starts: with -inf, m - m of a row that has seen no key yet would be NaN
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
constexpr int W = D % 64 == 0 ? 64 : 32;  // columns of a slab

// Where the element (row, column) of a tile of `rows` rows lies: which slab, which row of it, and the swizzled column.
__device__ int at(int rows, int row, int column) {
  int chunk = W == 64 ? row % 8 : row / 2 % 4;
  return (column / W * rows + row) * W + (column % W ^ 8 * chunk);
}

// Starts tile[0 .. size)[D] = x[0 .. rows)[D], then zeros. 8 (or 4) threads copy a slab's row, 16 bytes each; x points to this
// thread's first ones, and tile_at says where they go: further down by multiples of 8 rows, the swizzle is the same.
__device__ void load_tile(Shared<T> tile, int tile_at, Global<const T> x, int64_t stride, int size, int rows) {
#pragma unroll
  for (int row = 0; row < size; row += THREADS / (W / 8)) {
    bool inside = row + int(threadIdx.x / (W / 8)) < rows;
#pragma unroll
    for (int slab = 0; slab < D / W; slab++) cp_async_16(tile + (tile_at + (slab * size + row) * W), x + slab * W, inside);
    x += THREADS / (W / 8) * stride;
  }
}

// Where this lane's row for ldmatrix begins in 16 columns of a slab, in the next 16, ...: `tile_at` is the first place.
typedef Shared<T> Lane[W / 16];
__device__ void lane_rows(Lane& rows, Shared<T> tile, int tile_at) {
#pragma unroll
  for (int x = 0; x < W / 16; x++) rows[x] = tile + (tile_at ^ 16 * x);
}

// S (ROWS x Bc) = Q K^T.
__device__ void scores(float (&S)[M][Bc / 8][4], const Lane& Q, const Lane& K) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 0; n < Bc / 8; n++) S[i][n][0] = S[i][n][1] = S[i][n][2] = S[i][n][3] = 0;
#pragma unroll
  for (int d = 0; d < D; d += 16) {
    uint32_t A[M][4];
#pragma unroll
    for (int i = 0; i < M; i++) ldmatrix_x4(A[i], Q[d % W / 16] + (d / W * Br + 16 * i) * W);
#pragma unroll
    for (int n = 0; n < Bc / 8; n += 2) {
      uint32_t B[4];
      ldmatrix_x4(B, K[d % W / 16] + (d / W * Bc + 8 * n) * W);
#pragma unroll
      for (int i = 0; i < M; i++) {
        mma<T>(S[i][n], A[i], B[0], B[1]);
        mma<T>(S[i][n + 1], A[i], B[2], B[3]);
      }
    }
  }
}

// Of the tile's keys, the warp's row r sees the first min(keys, diagonal + r). A select: a product with 0 would let NaN through.
__device__ void mask(float (&S)[M][Bc / 8][4], int keys, int diagonal) {
  int g = threadIdx.x % 32 / 4, c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int seen = min(keys, diagonal + 16 * i + 8 * r + g) - c;
#pragma unroll
      for (int n = 0; n < Bc / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) S[i][n][2 * r + e] = 8 * n + e < seen ? S[i][n][2 * r + e] : -INFINITY;
    }
}

// The largest, or the sum, of x over the 4 lanes that share a row; each of them gets it.
__device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Moves the maximum m on to the tile's scores, and rescales l and O (not yet divided by l) to it.
__device__ void update_max(float (&m)[M][2], float (&l)[M][2], float (&O)[M][D / 8][4], const float (&S)[M][Bc / 8][4], float c) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {  // the rows g and g + 8
      float max_S = -INFINITY;
#pragma unroll
      for (int n = 0; n < Bc / 8; n++) max_S = fmaxf(max_S, fmaxf(S[i][n][2 * r], S[i][n][2 * r + 1]));
      float m_new = fmaxf(m[i][r], c * row_max(max_S));
      float alpha = exp2_approx(m[i][r] - m_new);
      m[i][r] = m_new;
      l[i][r] *= alpha;
#pragma unroll
      for (int d = 0; d < D / 8; d++) O[i][d][2 * r] *= alpha, O[i][d][2 * r + 1] *= alpha;
    }
}

// P of 16 keys as A operand, out of the scores of the first and the second 8 of them; adds it to l, this lane's share.
__device__ void probabilities(uint32_t (&A)[4], float (&l)[2], const float (&near)[4], const float (&far)[4], const float (&m)[2],
                              float c) {
  float P[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    P[e] = exp2_approx(c * (e < 4 ? near[e] : far[e - 4]) - m[e / 2 % 2]);
    l[e / 2 % 2] += P[e];
  }
#pragma unroll
  for (int a = 0; a < 4; a++) A[a] = pack<T>(P[2 * a], P[2 * a + 1]);
}

// O (ROWS x D) += P V for the tile's Bc keys, 16 at a time.
__device__ void add_PV(float (&O)[M][D / 8][4], float (&l)[M][2], const float (&S)[M][Bc / 8][4], const float (&m)[M][2],
                       const Lane& V, float c) {
#pragma unroll
  for (int j = 0; j < Bc; j += 16) {
    uint32_t A[M][4];
#pragma unroll
    for (int i = 0; i < M; i++) probabilities(A[i], l[i], S[i][j / 8], S[i][j / 8 + 1], m[i], c);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      uint32_t B[4];  // of 16 columns of V; transposed, because B's pairs run down the keys
      ldmatrix_x4_trans(B, V[d % W / 16] + (d / W * Bc + j) * W);
#pragma unroll
      for (int i = 0; i < M; i++) {
        mma<T>(O[i][d / 8], A[i], B[0], B[1]);
        mma<T>(O[i][d / 8 + 1], A[i], B[2], B[3]);
      }
    }
  }
}

// out = O / l for this lane's rows below `rows`, and lse; a row that saw no key (l = 0) gets 0 and -inf.
__device__ void store_rows(Global<T> out, Global<float> lse, const float (&O)[D / 8][4], const float (&m)[2],
                           const float (&l)[2], int rows) {
  int g = threadIdx.x % 32 / 4, c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = row_sum(l[r]), inverse = sum == 0 ? 0 : 1 / sum;
    if (g + 8 * r >= rows) continue;
#pragma unroll
    for (int d = 0; d < D / 8; d++)
      store_pair(out + (int64_t(g + 8 * r) * D + 8 * d + c), pack<T>(O[d][2 * r] * inverse, O[d][2 * r + 1] * inverse));
    if (c == 0) lse[g + 8 * r] = m[r] * LN_2 + logf(sum);
  }
}

// How many keys the loop visits: those that some row of the block sees. Causal is aligned at the bottom right: query i sees the
// keys 0 .. i + Nk - Nq.
__device__ int keys_seen(int tile, int Nq, int Nk, int causal) {
  int last = min(tile * Br + Br, Nq) - 1;  // the block's last row
  return causal ? min(Nk, max(0, last + 1 + Nk - Nq)) : Nk;
}

// q (B, H, Nq, D), k and v (B, H / group, Nk, D) with any strides (in elements; D is contiguous); out (B, H, Nq, D) and lse
// (B, H, Nq) contiguous. Only the grid's x dimension goes beyond 65535, so it counts tiles, heads and batches in one.
extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(
    Global<const T> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const T> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const T> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<T> out, Global<float> lse, int H, int group, int Nq, int Nk, float scale, int causal) {
  // The blocks take the last, longest tiles first: head by head, or, if causal, of as many heads at a time as have K and V of
  // 32 MB together, 4 * D * Nk bytes each.
  int tiles = (Nq + Br - 1) / Br, heads = gridDim.x / tiles;
  int at_a_time = causal ? min(heads, max(1, (8 << 20) / D / Nk)) : 1, first_head = blockIdx.x / (tiles * at_a_time) * at_a_time;
  int n = blockIdx.x - first_head * tiles, these = min(at_a_time, heads - first_head);
  int tile = tiles - 1 - n / these, head = (first_head + n % these) % H, batch = (first_head + n % these) / H;
  q += batch * q_batch + head * q_head + tile * Br * q_row;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;

  SharedMemory smem;
  Shared<T> Q_i = smem.array<T>(Br * D), K_j = smem.array<T>(Bc * D), V_j = smem.array<T>(Bc * D);

  int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * ROWS;  // the warp's first row in the block
  Lane Q_lane, K_lane, V_lane;
  lane_rows(Q_lane, Q_i, at(Br, warp_row + lane % 16, lane / 16 * 8));
  lane_rows(K_lane, K_j, at(Bc, lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
  lane_rows(V_lane, V_j, at(Bc, lane % 16, lane / 16 * 8));

  int first = tile * Br + warp_row;                  // the warp's first row
  int keys = keys_seen(tile, Nq, Nk, causal);        // that any row of this block sees
  int diagonal = causal ? first + 1 + Nk - Nq : Nk;  // keys that the warp's first row sees, not counting those beyond Nk

  float O_i[M][D / 8][4] = {}, m[M][2], l[M][2] = {}, c = scale * LOG2_E;
#pragma unroll
  for (int i = 0; i < M; i++) m[i][0] = m[i][1] = LOWEST;
  int j = (keys - 1) / Bc * Bc;  // the last tile of keys
  int copy_row = threadIdx.x / (W / 8), copy_column = threadIdx.x % (W / 8) * 8, copy_at = at(0, copy_row, copy_column);
  k += (j + copy_row) * k_row + copy_column;
  v += (j + copy_row) * v_row + copy_column;
  load_tile(Q_i, copy_at, q + (copy_row * q_row + copy_column), q_row, Br, Nq - tile * Br);
  load_tile(K_j, copy_at, k, k_row, Bc, keys - j);
  cp_async_commit();
  for (; j >= 0 && keys > 0; j -= Bc) {
    cp_async_wait<0>();
    __syncthreads();  // K_j (and Q_i) is there, and no thread still reads V of the tile before
    load_tile(V_j, copy_at, v, v_row, Bc, keys - j);
    cp_async_commit();
    float S[M][Bc / 8][4];
    scores(S, Q_lane, K_lane);
    if (j + Bc > min(Nk, diagonal)) mask(S, Nk - j, diagonal - j);
    cp_async_wait<0>();
    __syncthreads();  // V_j is there, and no thread still reads K_j
    k += -Bc * k_row;
    v += -Bc * v_row;
    if (j > 0) load_tile(K_j, copy_at, k, k_row, Bc, Bc);
    cp_async_commit();
    update_max(m, l, O_i, S, c);
    add_PV(O_i, l, S, m, V_lane, c);
  }
#pragma unroll
  for (int i = 0; i < M; i++) {
    int64_t row = int64_t(batch * H + head) * Nq + first + 16 * i;
    store_rows(out + row * D, lse + row, O_i[i], m[i], l[i], Nq - first - 16 * i);
  }
}
