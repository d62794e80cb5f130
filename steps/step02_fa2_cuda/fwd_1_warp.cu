// SPDX-License-Identifier: MIT
// Rung 1, "warp": a warp owns 16 query rows ("split-Q"), and each of its lanes owns a patch of them.
//
// The algorithm is that of rung 0. What changes is which thread computes what. The 32 lanes of a warp form a
// grid of 4 rows of 8 lanes. Lane (a, b), with a = lane / 8 and b = lane % 8, owns
//
//   the rows a, a + 4, a + 8 and a + 12 of the warp;
//   of S, in these rows, the keys b, b + 8, ... of a tile;
//   of O, in these rows, the columns 4 b ... 4 b + 3, 4 b + 32 ... 4 b + 35, ...
//
// It holds all of them in registers. A number that is read from shared memory then serves a whole row or
// column of the lane's patch, not a single multiplication.
//
// The 8 lanes with the same a together hold whole rows of S. Maximum and sum of a row take three shuffles
// each. No other warp ever needs the row, so between the two barriers of a tile no warp waits for another.
// (FlashAttention-1 divided the keys among the warps instead, and had to add up O through shared memory:
// FlashAttention-2, section 3.3.)
//
// T is bf16 (from sm_80 on), fp16 or float32, and everything is computed in float32. D is a multiple of 32,
// Br of 16, Bc of 8. sm_75 and newer. Needs ptx.cuh.
// Launch: grid ceil(Nq / Br) * H * B, block 2 * Br threads, 4 * (D + 4) * (Br + 2 * Bc) bytes of dynamic
// shared memory.
// Spill budget: 20 bytes. On sm_90 nothing is spilled; before it some tiles are, and on sm_120 D = 96 is.
// Left out: tensor cores (rung 2), which take 16-bit numbers.
// Bottleneck: the units for multiply-add, which on an H200 have 1/15 of the speed of the tensor cores.
#include "ptx.cuh"

static_assert(Br % 16 == 0 && Br <= 64 && Bc % 8 == 0,
              "at most 4 warps of 16 rows; a lane has every 8th key");
constexpr int THREADS = 2 * Br;
constexpr int ROWS = 4;          // of a lane
constexpr int KEYS = Bc / 8;     // of a lane, in a tile
constexpr int COLUMNS = D / 32;  // of a lane, in groups of 4 neighbours
// Numbers from one row to the next in shared memory. With 4 more than D the 8 lanes with the same a, which
// read 8 rows at once, read from different banks.
constexpr int STRIDE = D + 4;
// m starts at LOWEST. If it started at -inf, m - m_new of a row that has not seen a key yet would be NaN.
constexpr float LOWEST = -3.4e38f;

// Copies x[0 .. rows)[D] to the tile, and zeros from there to row `size`. Neighbouring threads read
// neighbouring addresses.
__device__ void load_tile(Shared<float> tile, Global<const T> x, int64_t stride, int size, int rows) {
  for (int e = threadIdx.x; e < size * D; e += THREADS)
    tile[e / D * STRIDE + e % D] = e / D < rows ? to_float(x[e / D * stride + e % D]) : 0;
}

// S = scale * Q K^T. Q and K point to this lane's first row and first key.
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

// Row r of this lane sees the keys below seen[r]. Other scores are replaced by -inf, because arithmetic with
// a mask would let NaN through.
__device__ void mask(float (&S)[ROWS][KEYS], const int (&seen)[ROWS], int first_key) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < KEYS; j++) S[r][j] = first_key + 8 * j < seen[r] ? S[r][j] : -INFINITY;
}

// The maximum, or the sum, of x over the 8 lanes that share a row. Each of the 8 lanes gets the result.
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

// Adds the tile's keys, whose scores are S, to the rows: m, l and O become those of all keys so far, and S
// becomes P. O is not yet divided by l, and l is only this lane's share of the sum.
__device__ void online_update(float (&m)[ROWS], float (&l)[ROWS], float (&O)[ROWS][COLUMNS][4],
                              float (&S)[ROWS][KEYS]) {
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

// O += P V. P[r][j] for the key 8 * j + b lies in lane (a, b), and a shuffle hands it to the other lanes of
// the row.
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

// x in the type of the second argument.
__device__ float32 rounded(float x, float32) { return x; }
template <class Half> __device__ Half rounded(float x, Half) { return {uint16_t(pack<Half>(x, 0))}; }

// How many keys the loop visits: all that some row of the block sees. The causal mask is aligned at the
// bottom right, so that query i sees the keys 0 .. i + Nk - Nq.
__device__ int keys_seen(int tile, int Nq, int Nk, int causal) {
  int last = min(tile * Br + Br, Nq) - 1;  // the block's last row
  return causal ? min(Nk, max(0, last + 1 + Nk - Nq)) : Nk;
}

// q is (B, H, Nq, D), k and v are (B, H / group, Nk, D). Their strides, counted in elements, are arbitrary,
// but D is contiguous. out (B, H, Nq, D) and lse (B, H, Nq) are contiguous. The grid's x dimension counts
// tiles, heads and batches in one, because y and z end at 65535.
extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(
    Global<const T> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const T> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const T> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<T> out, Global<float> lse, int H, int group, int Nq, int Nk, float scale, int causal) {
  int tiles = (Nq + Br - 1) / Br;
  int tile = blockIdx.x % tiles;
  int head = blockIdx.x / tiles % H;
  int batch = blockIdx.x / tiles / H;
  q += batch * q_batch + head * q_head + tile * Br * q_row;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  int64_t first_row = int64_t(batch * H + head) * Nq;

  SharedMemory smem;
  Shared<float> Q_i = smem.array<float>(Br * STRIDE);
  Shared<float> K_j = smem.array<float>(Bc * STRIDE);
  Shared<float> V_j = smem.array<float>(Bc * STRIDE);

  int warp = threadIdx.x / 32, a = threadIdx.x % 32 / 8, b = threadIdx.x % 8;
  int i = tile * Br + 16 * warp + a;           // this lane's rows are i, i + 4, ...
  int keys = keys_seen(tile, Nq, Nk, causal);  // keys that some row of this block sees
  int seen[ROWS];                              // keys that each of this lane's rows sees
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
      for (int e = 0; e < 4; e++)
        out[row * D + 32 * c + 4 * b + e] = rounded(sum == 0 ? 0 : O_i[r][c][e] / sum, T());
    if (b == 0) lse[row] = m[r] + logf(sum);
  }
}
