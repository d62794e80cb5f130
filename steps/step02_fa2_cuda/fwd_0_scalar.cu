// SPDX-License-Identifier: MIT
// Rung 0, "scalar": one thread owns one query row. FlashAttention-2, Algorithm 1, in float32.
//
//   m = -inf, l = 0, O = 0                     in registers, with the row q
//   for each tile of Bc keys, in shared memory:
//     S      = scale * q . K_j                 one row of scores, in shared memory
//     m_new  = max(m, max S)                   the running maximum moves ...
//     alpha  = exp(m - m_new)                  ... so everything summed so far is rescaled
//     l      = alpha * l + sum exp(S - m_new)
//     O      = alpha * O + sum exp(S - m_new) V_j
//   O / l and m + log l leave the chip once, at the end.
//
// Compiled for one head_dim D and one tile Br x Bc (macros). Launch: grid ceil(Nq / Br) * H * B, block Br threads,
// (2 * Bc * D + Bc * Br) * 4 bytes of dynamic shared memory. Any GPU. Needs ptx.cuh. Spill budget: 0 bytes.
// The limit: q and O take 2 D of the 255 registers that a thread can have, so D <= 96 and S has no room among them.
// Left out: tensor cores (rung 2). The wall: every thread reads the whole K/V tile from shared memory, 2 FLOP a 4-byte load.
#include "ptx.cuh"

// tile[0 .. rows)[D] = x[0 .. rows)[D], by all threads of the block; neighbouring threads read neighbouring addresses.
__device__ void load_tile(Shared<float> tile, Global<const float> x, int64_t stride, int rows) {
  for (int e = threadIdx.x; e < rows * D; e += Br) tile[e] = x[e / D * stride + e % D];
}

// S = scale * q . K_j for the first n keys of the tile; returns max S. This thread's S lies in a column of width Br:
// neighbouring threads then touch neighbouring banks.
__device__ float scores(Shared<float> S, const float (&q)[D], Shared<float> K, int n, float scale) {
  float max_S = -INFINITY;
  for (int j = 0; j < n; j++) {
    float s = 0;
#pragma unroll
    for (int d = 0; d < D; d++) s += q[d] * K[j * D + d];
    S[j * Br] = scale * s;
    max_S = fmaxf(max_S, scale * s);
  }
  return max_S;
}

// Takes in the n keys whose scores are S: m, l and O (not yet divided by l) become those of all keys so far.
__device__ void online_update(float& m, float& l, float (&O)[D], Shared<float> S, float max_S, Shared<float> V, int n) {
  float m_new = fmaxf(m, max_S);
  float alpha = expf(m - m_new);  // 0 for the first tile, where m is still -inf
  l *= alpha;
#pragma unroll
  for (int d = 0; d < D; d++) O[d] *= alpha;
  for (int j = 0; j < n; j++) {
    float P = expf(S[j * Br] - m_new);
    l += P;
#pragma unroll
    for (int d = 0; d < D; d++) O[d] += P * V[j * D + d];
  }
  m = m_new;
}

// out = O / l; a row that saw no key (l = 0) gets 0.
__device__ void store_row(Global<float> out, const float (&O)[D], float l) {
#pragma unroll
  for (int d = 0; d < D; d++) out[d] = l == 0 ? 0 : O[d] / l;
}

// q (B, H, Nq, D), k and v (B, H / group, Nk, D) with any strides (in elements; D is contiguous); out (B, H, Nq, D) and lse
// (B, H, Nq) contiguous. Only the grid's x dimension goes beyond 65535, so it counts tiles, heads and batches in one; offsets are
// 64-bit.
extern "C" __global__ void __launch_bounds__(Br) attention_forward(
    Global<const float> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const float> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const float> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<float> out, Global<float> lse, int H, int group, int Nq, int Nk, float scale, int causal) {
  int tiles = (Nq + Br - 1) / Br, tile = blockIdx.x % tiles, head = blockIdx.x / tiles % H, batch = blockIdx.x / tiles / H;
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  int64_t first_row = int64_t(batch * H + head) * Nq;

  SharedMemory smem;
  Shared<float> K = smem.array<float>(Bc * D), V = smem.array<float>(Bc * D), S = smem.array<float>(Bc * Br) + threadIdx.x;

  // Causal is aligned at the bottom right: query i sees the keys 0 .. i + Nk - Nq.
  int i = tile * Br + threadIdx.x, last = min(tile * Br + Br, Nq) - 1;
  int keys = causal ? min(Nk, max(0, last + 1 + Nk - Nq)) : Nk;     // that any row of this block sees
  int seen = i >= Nq ? 0 : causal ? min(Nk, i + 1 + Nk - Nq) : Nk;  // that this row sees

  float Q_i[D], O_i[D] = {}, m = -INFINITY, l = 0;
#pragma unroll
  for (int d = 0; d < D; d++) Q_i[d] = i < Nq ? q[i * q_row + d] : 0;

  for (int j = 0; j < keys; j += Bc) {
    __syncthreads();  // no thread still reads the tile that the next line overwrites
    load_tile(K, k + j * k_row, k_row, min(Bc, keys - j));
    load_tile(V, v + j * v_row, v_row, min(Bc, keys - j));
    __syncthreads();  // every thread reads rows that other threads have loaded
    int n = min(Bc, seen - j);
    if (n > 0) {  // a row that sees none of these keys keeps m = -inf, and -inf - (-inf) would be NaN
      float max_S = scores(S, Q_i, K, n, scale);
      online_update(m, l, O_i, S, max_S, V, n);
    }
  }
  if (i < Nq) {
    store_row(out + (first_row + i) * D, O_i, l);
    lse[first_row + i] = m + logf(l);
  }
}
