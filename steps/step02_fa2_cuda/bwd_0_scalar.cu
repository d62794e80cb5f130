// SPDX-License-Identifier: MIT
// Rung 0, "scalar": one thread owns one key row. FlashAttention-2, Algorithm 2, in float32.
//
//   delta = rowsum(dO * O)                     a kernel of its own, one number a query
//   dK_j = 0, dV_j = 0                         in registers; the tile's K_j and V_j stay in shared memory
//   for each tile of Br queries, Q_i and dO_i in shared memory:
//     P    = exp(scale * Q_i K_j^T - lse_i)    computed again: the forward kept only lse, one number a query
//     dV_j += P^T dO_i
//     dP   = dO_i V_j^T
//     dS   = P * (dP - delta_i)                in shared memory, because the next line sums over all its keys
//     dQ_i += scale * dS K_j                   by atomic additions, because every block adds to every dQ_i
//     dK_j += scale * dS^T Q_i
//
// The atomic additions come in any order, so that dq is not bit-equal from run to run; dk and dv are.
//
// Compiled for one head_dim D and one tile Br x Bc (macros). Any GPU. Needs ptx.cuh.
// Launch: attention_delta with grid ceil(B * H * Nq / 128), block 128; attention_backward with grid
// ceil(Nk / Bc) * H * B, block Bc threads, (2 * Bc * (D + 1) + 2 * Br * D + Br * Bc + 2 * Br) * 4 bytes of
// dynamic shared memory.
// Spill budget: 0 bytes.
// Limit: dK and dV take 2 D of a thread's at most 255 registers. So D is at most 96.
#include "ptx.cuh"

// Numbers from one row of K or V to the next in shared memory. Every thread reads its own row; with rows of D
// numbers all threads would read from the same bank.
constexpr int STRIDE = D + 1;

// Copies x[0 .. rows)[D] to a tile whose rows lie `width` numbers apart. All threads of the block take part.
__device__ void load_tile(Shared<float> tile, int width, Global<const float> x, int64_t stride, int rows) {
  for (int e = threadIdx.x; e < rows * D; e += Bc) tile[e / D * width + e % D] = x[e / D * stride + e % D];
}

// The same for one number a row.
__device__ void load_column(Shared<float> column, Global<const float> x, int rows) {
  for (int e = threadIdx.x; e < rows; e += Bc) column[e] = x[e];
}

__device__ float dot(Shared<float> a, Shared<float> b) {
  float sum = 0;
  // a . b = sum_d a[d] * b[d]
#pragma unroll 8
  for (int d = 0; d < D; d++) sum += a[d] * b[d];
  return sum;
}

// dQ_i += scale * dS K_j, the product of (rows, keys) and (keys, D). A thread computes one element after the
// other, and adds each by one atomic addition.
__device__ void add_dQ(Global<float> dq, Shared<float> dS, Shared<float> K, int rows, int keys, float scale) {
  // dQ = scale * dS K_j:  dQ[r][d] += scale * (sum_j dS[r][j] * K[j][d]), where e = r * D + d
  for (int e = threadIdx.x; e < rows * D; e += Bc) {
    float sum = 0;
    for (int j = 0; j < keys; j++) sum += dS[e / D * Bc + j] * K[j * STRIDE + e % D];
    atomicAdd(&dq[e], scale * sum);
  }
}

__device__ void store_row(Global<float> to, const float (&row)[D], float factor) {
#pragma unroll
  for (int d = 0; d < D; d++) to[d] = factor * row[d];
}

// delta = rowsum(dO * O) of one query, whose rows of dO and O these are: the sum over d of their products.
__device__ float row_delta(Global<const float> dO, Global<const float> O) {
  float sum = 0;
  for (int d = 0; d < D; d++) sum += dO[d] * O[d];
  return sum;
}

// delta (B, H, Nq) = rowsum(dout * out). A thread computes one row.
extern "C" __global__ void __launch_bounds__(128) attention_delta(
    Global<const float> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const float> out, int64_t out_batch, int64_t out_head, int64_t out_row,
    Global<float> delta, int B, int H, int Nq) {
  int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= int64_t(B) * H * Nq) return;
  int i = row % Nq, head = row / Nq % H, batch = row / Nq / H;
  dout += batch * dout_batch + head * dout_head + i * dout_row;
  out += batch * out_batch + head * out_head + i * out_row;
  delta[row] = row_delta(dout, out);
}

// dout and q are (B, H, Nq, D), k and v are (B, H, Nk, D). Their strides, counted in elements, are arbitrary,
// but D is contiguous. lse and delta (B, H, Nq), dq (B, H, Nq, D), which is zero at the start, and dk and dv
// (B, H, Nk, D) are contiguous.
extern "C" __global__ void __launch_bounds__(Bc) attention_backward(
    Global<const float> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const float> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const float> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const float> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<const float> lse, Global<const float> delta, Global<float> dq, Global<float> dk, Global<float> dv,
    int H, int Nq, int Nk, float scale, int causal) {
  int tiles = (Nk + Bc - 1) / Bc;
  int tile = blockIdx.x % tiles;
  int head = blockIdx.x / tiles % H;
  int batch = blockIdx.x / tiles / H;
  dout += batch * dout_batch + head * dout_head;
  q += batch * q_batch + head * q_head;
  int64_t first_row = int64_t(batch * H + head) * Nq;

  SharedMemory smem;
  Shared<float> K = smem.array<float>(Bc * STRIDE), V = smem.array<float>(Bc * STRIDE);
  Shared<float> Q = smem.array<float>(Br * D), dO = smem.array<float>(Br * D);
  Shared<float> dS = smem.array<float>(Br * Bc);
  Shared<float> lse_i = smem.array<float>(Br), delta_i = smem.array<float>(Br);

  int t = threadIdx.x;                 // this thread's key in the tile
  int keys = min(Bc, Nk - tile * Bc);  // how many keys the tile has
  load_tile(K, STRIDE, k + batch * k_batch + head * k_head + tile * Bc * k_row, k_row, keys);
  load_tile(V, STRIDE, v + batch * v_batch + head * v_head + tile * Bc * v_row, v_row, keys);

  // The causal mask is aligned at the bottom right, so that the queries from j - (Nk - Nq) on see key j.
  int first = causal ? max(0, tile * Bc - (Nk - Nq)) : 0;  // the first query that sees a key of this tile
  int seen_from = causal ? max(0, tile * Bc + t - (Nk - Nq)) : 0;  // the first that sees this thread's key

  float dK_j[D] = {}, dV_j[D] = {};
  for (int i = first; i < Nq; i += Br) {
    int rows = min(Br, Nq - i);
    // No thread still reads Q_i and dO_i of the tile before: all have since passed the barrier after dS.
    load_tile(Q, D, q + i * q_row, q_row, rows);
    load_tile(dO, D, dout + i * dout_row, dout_row, rows);
    load_column(lse_i, lse + first_row + i, rows);
    load_column(delta_i, delta + first_row + i, rows);
    // The barrier also makes sure that no thread still reads dS of the tile before.
    __syncthreads();  // every thread reads rows that other threads have loaded
    // P = exp(scale * Q K^T - lse):  P[r][t] = exp(scale * sum_d Q[r][d] * K[t][d] - lse[r])
    // dP = dO V^T:                   dP[r][t] = sum_d dO[r][d] * V[t][d]
    // dS = P * (dP - delta):         dS[r][t] = P[r][t] * (dP[r][t] - delta[r])
    if (t < keys) {
      for (int r = 0; r < rows; r++) {
        if (i + r < seen_from) {  // masked: P = 0
          dS[r * Bc + t] = 0;
          continue;
        }
        // P is at most 1. For scores of 1e11 the rounding of lse alone would make it infinite.
        float P = expf(fminf(scale * dot(Q + r * D, K + t * STRIDE) - lse_i[r], 0));
        float dP = dot(dO + r * D, V + t * STRIDE);
        float dS_rt = P * (dP - delta_i[r]);
        dS[r * Bc + t] = dS_rt;
        // dV = P^T dO:          dV[t][d] += P[r][t] * dO[r][d]
        // dK = scale * dS^T Q:  dK[t][d] += dS[r][t] * Q[r][d], and times scale at the end
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
    // This is computed only here, because the loop leaves no register free for it.
    int64_t key = int64_t(blockIdx.x / tiles) * Nk + tile * Bc + t;
    store_row(dk + key * D, dK_j, scale);
    store_row(dv + key * D, dV_j, 1);
  }
}
