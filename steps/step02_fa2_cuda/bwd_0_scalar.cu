// SPDX-License-Identifier: MIT
// Rung 0, "scalar": one thread owns one key row. FlashAttention-2, Algorithm 2, in float32.
//
//   delta = rowsum(dO * O)                     a kernel of its own, one number a query
//   dK_j = 0, dV_j = 0                         in registers; the tile's K_j and V_j stay in shared memory
//   for each tile of Br queries, Q_i and dO_i in shared memory:
//     P    = exp(scale * Q_i K_j^T - lse_i)    recomputed: lse, one number a query, is all that the forward kept
//     dV_j += P^T dO_i
//     dP   = dO_i V_j^T
//     dS   = P * (dP - delta_i)                in shared memory, because the next line sums over the block's keys
//     dQ_i += scale * dS K_j                   by atomic additions: every block of keys adds to every dQ_i
//     dK_j += scale * dS^T Q_i
//
// The atomic additions come in any order, so that dq is not bit-equal from run to run; dk and dv are.
// Compiled for one head_dim D and one tile Br x Bc (macros). Launch: attention_delta with grid ceil(B * H * Nq / 128), block 128;
// attention_backward with grid ceil(Nk / Bc) * H * B, block Bc threads,
// (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br) * 4 bytes of dynamic shared memory. Any GPU. Needs ptx.cuh.
// Spill budget: 0 bytes. The limit: dK and dV take 2 D of the 255 registers that a thread can have, so D <= 96.
#include "ptx.cuh"

constexpr int K_row = D + 1;  // a thread reads its own row of K: with rows of D words all threads would meet in one bank

// tile[0 .. rows)[0 .. D) = x[0 .. rows)[0 .. D), rows of the tile `width` apart, by all threads of the block.
__device__ void load_tile(Shared<float> tile, int width, Global<const float> x, int64_t stride, int rows) {
  for (int e = threadIdx.x; e < rows * D; e += Bc) tile[e / D * width + e % D] = x[e / D * stride + e % D];
}

__device__ void load_column(Shared<float> column, Global<const float> x, int rows) {
  for (int e = threadIdx.x; e < rows; e += Bc) column[e] = x[e];
}

__device__ float dot(Shared<float> a, Shared<float> b) {
  float sum = 0;
#pragma unroll 8
  for (int d = 0; d < D; d++) sum += a[d] * b[d];
  return sum;
}

// dQ_i += scale * dS K_j, (rows, keys) x (keys, D): one thread an element, then the next; one atomic addition for each.
__device__ void add_dQ(Global<float> dq, Shared<float> dS, Shared<float> K, int rows, int keys, float scale) {
  for (int e = threadIdx.x; e < rows * D; e += Bc) {
    float sum = 0;
    for (int j = 0; j < keys; j++) sum += dS[e / D * Bc + j] * K[j * K_row + e % D];
    atomicAdd(&dq[e], scale * sum);
  }
}

__device__ void store_row(Global<float> to, const float (&row)[D], float factor) {
#pragma unroll
  for (int d = 0; d < D; d++) to[d] = factor * row[d];
}

// delta of one query; dO and O are its rows.
__device__ float row_delta(Global<const float> dO, Global<const float> O) {
  float sum = 0;
  for (int d = 0; d < D; d++) sum += dO[d] * O[d];
  return sum;
}

// delta (B, H, Nq) = rowsum(dout * out): one thread a row.
extern "C" __global__ void __launch_bounds__(128) attention_delta(
    Global<const float> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const float> out, int64_t out_batch, int64_t out_head, int64_t out_row, Global<float> delta, int B, int H, int Nq) {
  int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= int64_t(B) * H * Nq) return;
  int i = row % Nq, head = row / Nq % H, batch = row / Nq / H;
  dout += batch * dout_batch + head * dout_head + i * dout_row;
  out += batch * out_batch + head * out_head + i * out_row;
  delta[row] = row_delta(dout, out);
}

// dout and q (B, H, Nq, D), k and v (B, H, Nk, D) with any strides (in elements; D is contiguous); lse, delta (B, H, Nq),
// dq (B, H, Nq, D), zero at the start, dk and dv (B, H, Nk, D) contiguous.
extern "C" __global__ void __launch_bounds__(Bc) attention_backward(
    Global<const float> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const float> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const float> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const float> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<const float> lse, Global<const float> delta, Global<float> dq, Global<float> dk, Global<float> dv,
    int H, int Nq, int Nk, float scale, int causal) {
  int tiles = (Nk + Bc - 1) / Bc, tile = blockIdx.x % tiles, head = blockIdx.x / tiles % H, batch = blockIdx.x / tiles / H;
  dout += batch * dout_batch + head * dout_head;
  q += batch * q_batch + head * q_head;
  int64_t first_row = int64_t(batch * H + head) * Nq;

  SharedMemory smem;
  Shared<float> K = smem.array<float>(Bc * K_row), V = smem.array<float>(Bc * K_row);
  Shared<float> Q = smem.array<float>(Br * D), dO = smem.array<float>(Br * D), dS = smem.array<float>(Br * Bc);
  Shared<float> lse_i = smem.array<float>(Br), delta_i = smem.array<float>(Br);

  int t = threadIdx.x, keys = min(Bc, Nk - tile * Bc);  // this thread's key, and how many this block has
  load_tile(K, K_row, k + batch * k_batch + head * k_head + tile * Bc * k_row, k_row, keys);
  load_tile(V, K_row, v + batch * v_batch + head * v_head + tile * Bc * v_row, v_row, keys);

  // Causal is aligned at the bottom right: key j is seen by the queries from j - (Nk - Nq) on.
  int first = causal ? max(0, tile * Bc - (Nk - Nq)) : 0;          // that sees any key of this block
  int seen_from = causal ? max(0, tile * Bc + t - (Nk - Nq)) : 0;  // that sees this thread's key

  float dK_j[D] = {}, dV_j[D] = {};
  for (int i = first; i < Nq; i += Br) {
    int rows = min(Br, Nq - i);
    // Nobody still reads Q_i and dO_i of the tile before: the barrier below, after dS, came later.
    load_tile(Q, D, q + i * q_row, q_row, rows);
    load_tile(dO, D, dout + i * dout_row, dout_row, rows);
    load_column(lse_i, lse + first_row + i, rows);
    load_column(delta_i, delta + first_row + i, rows);
    __syncthreads();  // every thread reads rows that other threads have loaded; and dS of the tile before is used up
    if (t < keys) {
      for (int r = 0; r < rows; r++) {
        if (i + r < seen_from) {  // masked: P = 0
          dS[r * Bc + t] = 0;
          continue;
        }
        float P = expf(scale * dot(Q + r * D, K + t * K_row) - lse_i[r]);
        float dP = dot(dO + r * D, V + t * K_row);
        float dS_rt = P * (dP - delta_i[r]);
        dS[r * Bc + t] = dS_rt;
#pragma unroll
        for (int d = 0; d < D; d++) {
          dV_j[d] += P * dO[r * D + d];
          dK_j[d] += dS_rt * Q[r * D + d];
        }
      }
    }
    __syncthreads();  // dS is complete
    add_dQ(dq + (first_row + i) * D, dS, K, rows, keys, scale);
  }
  if (t < keys) {
    int64_t key = int64_t(blockIdx.x / tiles) * Nk + tile * Bc + t;  // only now: the loop leaves no register free for it
    store_row(dk + key * D, dK_j, scale);
    store_row(dv + key * D, dV_j, 1);
  }
}
