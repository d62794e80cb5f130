// SPDX-License-Identifier: MIT
// Rung 2, "mma": the two matrix products go to the tensor cores, one `mma` a warp for 16 x 16 times 16 x 8.
//
// A warp owns 16 query rows, and `mma` says which lane holds what (ptx.cuh). With g = lane / 4 and c = 2 * (lane % 4):
//
//   S = Q K^T   A = Q: in registers from the start. B = K^T: a lane needs two neighbours of one row of K, K[g][c, c + 1].
//               The lane gets S[g][c, c + 1] and S[g + 8][c, c + 1] of every 8 keys: 4 lanes hold a row between them.
//   O += P V    A = P, which a lane must hold as P[g][c, c + 1], P[g + 8][c, c + 1], and the same 8 keys further on: exactly what
//               it has of S. So P is S in place, rounded to 16 bits; nothing moves between lanes.
//               B = V: a lane needs two neighbours of one *column* of V, and fetches them one by one.
//
// From here on exp is 2^x, which is what the hardware has. exp(scale * S) = 2^(c S) with c = scale * log2(e), and m is the
// maximum of c S: one multiply-add and one exp2 a score.
//
// T is bf16 or fp16; S, O, m and l are float32. Launch: grid ceil(Nq / Br) * H * B, block 2 * Br threads, 2 * (Br + 2 * Bc) * D
// bytes of dynamic shared memory. Br, Bc and D are multiples of 16, D <= 128; rows of q, k and v begin at multiples of 16 bytes.
// sm_80; sm_75 in fp16. Needs ptx.cuh. Spill budget: 16 bytes (8 with D = 32 on sm_80, where 5 blocks fit at 96 registers).
// Left out: any care for shared memory. The wall: rows of K are 2 D bytes apart, so the 8 rows that a warp reads at once lie in
// the same banks, and each load takes 8 turns (rung 3).
#include "ptx.cuh"

static_assert(Br % 16 == 0 && Br <= 64 && Bc % 16 == 0, "at most 4 warps of 16 rows; `mma` takes 16 keys of V");
constexpr int ROWS = 16, THREADS = Br / ROWS * 32;  // a warp has 16 rows
constexpr float LOWEST = -3.4e38f;  // where m starts: with -inf, m - m of a row that has seen no key yet would be NaN
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// tile[0 .. size)[D] = x[0 .. rows)[D], then zeros; 8 neighbouring numbers a thread and turn.
__device__ void load_tile(Shared<T> tile, Global<const T> x, int64_t stride, int size, int rows) {
  for (int e = 8 * threadIdx.x; e < size * D; e += 8 * THREADS) copy_16(tile + e, x + (e / D * stride + e % D), e / D < rows);
}

// The warp's Q (16 x D) as A operands; Q begins at its first row.
__device__ void load_Q(uint32_t (&A)[D / 16][4], Shared<T> Q) {
  int g = threadIdx.x % 32 / 4, c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int d = 0; d < D / 16; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) A[d][i] = load_pair(Q + ((g + i % 2 * 8) * D + 16 * d + i / 2 * 8 + c));
}

// S (16 x Bc) = Q K^T.
__device__ void scores(float (&S)[Bc / 8][4], const uint32_t (&Q)[D / 16][4], Shared<T> K) {
  int g = threadIdx.x % 32 / 4, c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < Bc / 8; n++) {
    S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
      Shared<T> row = K + ((8 * n + g) * D + 16 * d + c);
      mma<T>(S[n], Q[d], load_pair(row), load_pair(row + 8));
    }
  }
}

// This lane's row g (or g + 8) sees the first seen[0] (or [1]) keys. A select: a product with 0 would let NaN through.
__device__ void mask(float (&S)[Bc / 8][4], int first_key, const int (&seen)[2]) {
  int c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < Bc / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) S[n][i] = first_key + 8 * n + c + i % 2 < seen[i / 2] ? S[n][i] : -INFINITY;
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

// Takes in the tile's scores: m, l (this lane's share) and O (not yet divided by l) become those of all keys so far; S becomes P.
__device__ void online_update(float (&m)[2], float (&l)[2], float (&O)[D / 8][4], float (&S)[Bc / 8][4], float c) {
#pragma unroll
  for (int r = 0; r < 2; r++) {  // the rows g and g + 8
    float max_S = -INFINITY;
#pragma unroll
    for (int n = 0; n < Bc / 8; n++) max_S = fmaxf(max_S, fmaxf(S[n][2 * r], S[n][2 * r + 1]));
    float m_new = fmaxf(m[r], c * row_max(max_S));
    float alpha = exp2_approx(m[r] - m_new);
    m[r] = m_new;
    l[r] *= alpha;
#pragma unroll
    for (int d = 0; d < D / 8; d++) O[d][2 * r] *= alpha, O[d][2 * r + 1] *= alpha;
#pragma unroll
    for (int n = 0; n < Bc / 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        S[n][i] = exp2_approx(c * S[n][i] - m_new);
        l[r] += S[n][i];
      }
  }
}

// P of 16 keys as operand A, out of what this lane has of the first 8 of them and of the other 8.
__device__ void to_operand(uint32_t (&A)[4], const float (&near)[4], const float (&far)[4]) {
  A[0] = pack<T>(near[0], near[1]);
  A[1] = pack<T>(near[2], near[3]);
  A[2] = pack<T>(far[0], far[1]);
  A[3] = pack<T>(far[2], far[3]);
}

// O (16 x D) += P V for the tile's Bc keys, 16 at a time.
__device__ void add_PV(float (&O)[D / 8][4], const float (&P)[Bc / 8][4], Shared<T> V) {
  int g = threadIdx.x % 32 / 4, c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) {
    uint32_t A[4];
    to_operand(A, P[2 * j], P[2 * j + 1]);
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      Shared<T> V_j = V + ((16 * j + c) * D + 8 * d + g);
      mma<T>(O[d], A, V_j[0].bits | V_j[D].bits << 16, V_j[8 * D].bits | V_j[9 * D].bits << 16);
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
  int tiles = (Nq + Br - 1) / Br, tile = blockIdx.x % tiles, head = blockIdx.x / tiles % H, batch = blockIdx.x / tiles / H;
  q += batch * q_batch + head * q_head + tile * Br * q_row;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;

  SharedMemory smem;
  Shared<T> Q_i = smem.array<T>(Br * D), K_j = smem.array<T>(Bc * D), V_j = smem.array<T>(Bc * D);

  int first = tile * Br + threadIdx.x / 32 * ROWS, g = threadIdx.x % 32 / 4;  // the warp's first row
  int keys = keys_seen(tile, Nq, Nk, causal);                                 // that any row of this block sees
  int seen[2];                                                                // that this lane's rows see
#pragma unroll
  for (int r = 0; r < 2; r++) seen[r] = causal ? min(Nk, first + g + 8 * r + 1 + Nk - Nq) : Nk;

  load_tile(Q_i, q, q_row, Br, Nq - tile * Br);
  __syncthreads();  // a warp's rows were loaded by other threads, too
  uint32_t Q[D / 16][4];
  load_Q(Q, Q_i + threadIdx.x / 32 * ROWS * D);

  float O_i[D / 8][4] = {}, m[2] = {LOWEST, LOWEST}, l[2] = {};
  for (int j = 0; j < keys; j += Bc) {
    __syncthreads();  // no thread still reads the tile that the next line overwrites
    load_tile(K_j, k + j * k_row, k_row, Bc, keys - j);
    load_tile(V_j, v + j * v_row, v_row, Bc, keys - j);
    __syncthreads();  // every thread reads rows that other threads have loaded
    float S[Bc / 8][4];
    scores(S, Q, K_j);
    mask(S, j, seen);
    online_update(m, l, O_i, S, scale * LOG2_E);
    add_PV(O_i, S, V_j);
  }
  int64_t row = int64_t(batch * H + head) * Nq + first;
  store_rows(out + row * D, lse + row, O_i, m, l, Nq - first);
}
