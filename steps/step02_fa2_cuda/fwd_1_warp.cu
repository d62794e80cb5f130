// SPDX-License-Identifier: MIT
// Rung 1, "warp": a warp owns 16 query rows ("split-Q"), and its lanes share them out in micro-tiles.
//
// The algorithm is rung 0's. What changes is who computes what. The 32 lanes of a warp stand in 4 rows of 8:
//
//   lane (a, b), a = lane / 8, b = lane % 8, owns the rows a, a + 4, ... of the warp; of S the keys b, b + 8, ...,
//   of O the columns 4 b ... 4 b + 3, 4 b + 32 ..., all of them in registers: a value read from shared memory serves a whole
//   row or column of the micro-tile, not a single multiplication.
//
// The 8 lanes of one a hold a whole row of S between them: its maximum and its sum take three shuffles, and no row is ever
// needed by another warp. Between the two barriers of a tile the warps go their own ways. (FlashAttention-1 split the keys
// among the warps instead, and had to add up O through shared memory: FlashAttention-2, section 3.3.)
//
// T is bf16 (from sm_80 on), fp16 or float32, and everything is computed in float32. Launch: grid ceil(Nq / Br) * H * B, block
// 2 * Br threads, 4 * (D + 4) * (Br + 2 * Bc) bytes of dynamic shared memory. D a multiple of 32, Br of 16, Bc of 8. sm_75 and
// newer. Needs ptx.cuh.
// Spill budget: 20 bytes: used by some tiles before sm_90, and with D = 96 on sm_120; none on sm_90.
// Left out: tensor cores (rung 2), which take 16-bit numbers. The wall: the multiply-add units themselves, 1/15 of the speed of
// the tensor cores on an H200.
#include "ptx.cuh"

static_assert(Br % 16 == 0 && Br <= 64 && Bc % 8 == 0, "at most 4 warps of 16 rows; a lane has every 8th key");
constexpr int THREADS = 2 * Br, ROWS = 4, KEYS = Bc / 8, COLUMNS = D / 32;  // a lane's micro-tiles; COLUMNS of 4 each
constexpr int STRIDE = D + 4;  // of a row in shared memory: the 8 lanes of one a then read 8 rows from different banks
constexpr float LOWEST = -3.4e38f;  // where m starts: with -inf, m - m of a row that has seen no key yet would be NaN

// tile[0 .. size)[D] = x[0 .. rows)[D], then zeros; neighbouring threads read neighbouring addresses.
__device__ void load_tile(Shared<float> tile, Global<const T> x, int64_t stride, int size, int rows) {
  for (int e = threadIdx.x; e < size * D; e += THREADS)
    tile[e / D * STRIDE + e % D] = e / D < rows ? to_float(x[e / D * stride + e % D]) : 0;
}

// S = scale * Q K^T; Q and K begin at this lane's first row and key.
__device__ void scores(float (&S)[ROWS][KEYS], Shared<float> Q, Shared<float> K, float scale) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < KEYS; j++) S[r][j] = 0;
#pragma unroll 4
  for (int d = 0; d < D; d++) {
    float K_d[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) K_d[j] = K[8 * j * STRIDE + d];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float Q_d = Q[4 * r * STRIDE + d];
#pragma unroll
      for (int j = 0; j < KEYS; j++) S[r][j] += Q_d * K_d[j];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < KEYS; j++) S[r][j] *= scale;
}

// Row r of this lane sees the first seen[r] keys of the tile. A select, not a product with 0, which would let NaN through.
__device__ void mask(float (&S)[ROWS][KEYS], const int (&seen)[ROWS], int first_key) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < KEYS; j++) S[r][j] = first_key + 8 * j < seen[r] ? S[r][j] : -INFINITY;
}

// The largest, or the sum, of x over the 8 lanes that share a row; each of them gets it.
__device__ float row_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
__device__ float row_sum(float x) {
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// Takes in the tile's scores: m, l (this lane's share) and O (not yet divided by l) become those of all keys so far; S becomes P.
__device__ void online_update(float (&m)[ROWS], float (&l)[ROWS], float (&O)[ROWS][COLUMNS][4], float (&S)[ROWS][KEYS]) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float m_new = m[r];
#pragma unroll
    for (int j = 0; j < KEYS; j++) m_new = fmaxf(m_new, S[r][j]);
    m_new = row_max(m_new);
    float alpha = expf(m[r] - m_new);
    m[r] = m_new;
    l[r] *= alpha;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) O[r][c][i] *= alpha;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      S[r][j] = expf(S[r][j] - m_new);
      l[r] += S[r][j];
    }
  }
}

// O += P V. P[r][j] for the key 8 * j + b lies in the lane (a, b): a shuffle hands it to the row's other lanes.
__device__ void add_PV(float (&O)[ROWS][COLUMNS][4], const float (&P)[ROWS][KEYS], Shared<float> V) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < KEYS; j++)
#pragma unroll 2
    for (int b = 0; b < 8; b++) {
      float P_j[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) P_j[r] = __shfl_sync(~0u, P[r][j], lane / 8 * 8 + b);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float V_j = V[(8 * j + b) * STRIDE + 32 * c + 4 * (lane % 8) + i];
#pragma unroll
          for (int r = 0; r < ROWS; r++) O[r][c][i] += P_j[r] * V_j;
        }
    }
}

__device__ float32 rounded(float x, float32) { return x; }
template <class Half> __device__ Half rounded(float x, Half) { return {uint16_t(pack<Half>(x, 0))}; }

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
  int tiles = (Nq + Br - 1) / Br, tile = blockIdx.x % tiles, head = blockIdx.x / tiles % H, batch = blockIdx.x / tiles / H;
  q += batch * q_batch + head * q_head + tile * Br * q_row;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  int64_t first_row = int64_t(batch * H + head) * Nq;

  SharedMemory smem;
  Shared<float> Q_i = smem.array<float>(Br * STRIDE), K_j = smem.array<float>(Bc * STRIDE), V_j = smem.array<float>(Bc * STRIDE);

  int warp = threadIdx.x / 32, a = threadIdx.x % 32 / 8, b = threadIdx.x % 8;
  int i = tile * Br + 16 * warp + a;           // this lane's rows are i, i + 4, ...
  int keys = keys_seen(tile, Nq, Nk, causal);  // that any row of this block sees
  int seen[ROWS];                              // that this lane's rows see
#pragma unroll
  for (int r = 0; r < ROWS; r++) seen[r] = causal ? min(Nk, i + 4 * r + 1 + Nk - Nq) : Nk;

  float O_i[ROWS][COLUMNS][4] = {}, m[ROWS], l[ROWS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; r++) m[r] = LOWEST;
  load_tile(Q_i, q, q_row, Br, Nq - tile * Br);

  for (int j = 0; j < keys; j += Bc) {
    __syncthreads();  // no thread still reads the tile that the next line overwrites
    load_tile(K_j, k + j * k_row, k_row, Bc, keys - j);
    load_tile(V_j, v + j * v_row, v_row, Bc, keys - j);
    __syncthreads();  // every thread reads rows that other threads have loaded
    float S[ROWS][KEYS];
    scores(S, Q_i + (16 * warp + a) * STRIDE, K_j + b * STRIDE, scale);
    mask(S, seen, j + b);
    online_update(m, l, O_i, S);
    add_PV(O_i, S, V_j);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float sum = row_sum(l[r]);
    int64_t row = first_row + i + 4 * r;
    if (i + 4 * r >= Nq) continue;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[row * D + 32 * c + 4 * b + e] = rounded(sum == 0 ? 0 : O_i[r][c][e] / sum, T());
    if (b == 0) lse[row] = m[r] + logf(sum);
  }
}
