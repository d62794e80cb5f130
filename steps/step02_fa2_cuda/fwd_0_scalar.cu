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
// Compiled for one head_dim D and one tile Br x Bc (macros). Any GPU. Needs ptx.cuh.
// Launch: grid ceil(Nq / Br) * H * B, block Br threads, (2 * Bc * D + Bc * Br) * 4 bytes of dynamic shared
// memory.
// Spill budget: 0 bytes.
// Limit: q and O take 2 D of a thread's at most 255 registers. So D is at most 96, and S has no room there.
// Left out: tensor cores (rung 2).
// Bottleneck: every thread reads the whole tiles of K and V from shared memory, one 4-byte load for 2 FLOP.
#include "ptx.cuh"

// Copies x[0 .. rows)[D] to the tile. All threads of the block take part, and neighbouring threads read
// neighbouring addresses.
__device__ void load_tile(Shared<float> tile, Global<const float> x, int64_t stride, int rows) {
  for (int e = threadIdx.x; e < rows * D; e += Br) tile[e] = x[e / D * stride + e % D];
}

// Computes S = scale * q . K_j for the first n keys of the tile, and returns max S. A thread's scores lie Br
// numbers apart, so that neighbouring threads access neighbouring banks. The maximum starts at the lowest
// finite number, because -inf - (-inf) would be NaN where all scores are -inf.
__device__ float scores(Shared<float> S, const float (&q)[D], Shared<float> K, int n, float scale) {
  float max_S = -3.4e38f;
  // S = scale * q K_j^T:  S[j] = scale * sum_d q[d] * K[j][d]
  for (int j = 0; j < n; j++) {
    float s = 0;
#pragma unroll
    for (int d = 0; d < D; d++) s += q[d] * K[j * D + d];
    S[j * Br] = scale * s;
    max_S = fmaxf(max_S, scale * s);
  }
  return max_S;
}

// Adds the n keys whose scores are S to the row: m, l and O become those of all keys so far. O is not yet
// divided by l.
__device__ void online_update(float& m, float& l, float (&O)[D], Shared<float> S, float max_S,
                              Shared<float> V, int n) {
  float m_new = fmaxf(m, max_S);
  float alpha = expf(m - m_new);  // 0 for the first tile, where m is still -inf
  // O = alpha * O + P V_j:  O[d] = alpha * O[d] + sum_j P[j] * V[j][d];  l = alpha * l + sum_j P[j]
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

// Stores out = O / l:  out[d] = O[d] / l. A row that saw no key has l = 0 and gets 0.
__device__ void store_row(Global<float> out, const float (&O)[D], float l) {
#pragma unroll
  for (int d = 0; d < D; d++) out[d] = l == 0 ? 0 : O[d] / l;
}

// q is (B, H, Nq, D), k and v are (B, H / group, Nk, D). Their strides, counted in elements, are arbitrary,
// but D is contiguous. out (B, H, Nq, D) and lse (B, H, Nq) are contiguous. The grid's x dimension counts
// tiles, heads and batches in one, because y and z end at 65535.
extern "C" __global__ void __launch_bounds__(Br) attention_forward(
    Global<const float> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const float> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const float> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<float> out, Global<float> lse, int H, int group, int Nq, int Nk, float scale, int causal) {
  int tiles = (Nq + Br - 1) / Br;
  int tile = blockIdx.x % tiles;
  int head = blockIdx.x / tiles % H;
  int batch = blockIdx.x / tiles / H;
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  int64_t first_row = int64_t(batch * H + head) * Nq;

  SharedMemory smem;
  Shared<float> K = smem.array<float>(Bc * D);
  Shared<float> V = smem.array<float>(Bc * D);
  Shared<float> S = smem.array<float>(Bc * Br) + threadIdx.x;

  // The causal mask is aligned at the bottom right, so that query i sees the keys 0 .. i + Nk - Nq.
  int i = tile * Br + threadIdx.x;                                  // this thread's query
  int last = min(tile * Br + Br, Nq) - 1;                           // the block's last query
  int keys = causal ? min(Nk, max(0, last + 1 + Nk - Nq)) : Nk;     // keys that some row of this block sees
  int seen = i >= Nq ? 0 : causal ? min(Nk, i + 1 + Nk - Nq) : Nk;  // keys that this row sees

  float Q_i[D], O_i[D] = {};
  float m = -INFINITY, l = 0;
#pragma unroll
  for (int d = 0; d < D; d++) Q_i[d] = i < Nq ? q[i * q_row + d] : 0;

  // (m, l, O) of the keys 0 .. j - 1 becomes that of the keys 0 .. j + Bc - 1
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
