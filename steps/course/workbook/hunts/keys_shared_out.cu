// SPDX-License-Identifier: MIT
// Bug hunt 02.bug1: the keys of a query shared out among four warps.
//
//   a block has 32 queries, and lane t of each warp has query t; warp w takes the keys w, w + 4, w + 8, ...:
//     m, l, O                                of these keys, in registers
//   then two rounds put the four parts together, through shared memory:
//     warps 2 and 3 hand over their m, l, O, and warps 0 and 1 take them in
//     warp 1 hands over its own, and warp 0 takes them in
//   out = O / l and lse = m + log l          by warp 0
//
// For few queries and many keys, this has four times as many threads as rung 0.
//
// Compiled for one head_dim D (macro). Any GPU. Needs ptx.cuh.
// Launch: grid ceil(Nq / 32) * heads, block 128, 2 * 32 * (D + 2) * 4 bytes of dynamic shared memory.
#include "ptx.cuh"

constexpr int WARPS = 4;
constexpr int LANES = 32;
constexpr int SLOT = LANES * (D + 2);  // numbers of a slot, which holds m, l and O of 32 queries

// Adds one key with the score s to the row.
__device__ void online_update(float& m, float& l, float (&O)[D], float s, Global<const float> v) {
  float m_new = fmaxf(m, s);
  float alpha = expf(m - m_new);
  float P = expf(s - m_new);
  l = alpha * l + P;
#pragma unroll
  for (int d = 0; d < D; d++) O[d] = alpha * O[d] + P * v[d];
  m = m_new;
}

// Stores a warp's m, l and O in a slot. Neighbouring lanes write to neighbouring banks.
__device__ void hand_over(Shared<float> slot, float m, float l, const float (&O)[D]) {
  slot[0] = m;
  slot[LANES] = l;
#pragma unroll
  for (int d = 0; d < D; d++) slot[(d + 2) * LANES] = O[d];
}

// Adds the m, l and O of a slot to this warp's own.
__device__ void take_in(float& m, float& l, float (&O)[D], Shared<float> slot) {
  float m_new = fmaxf(m, slot[0]);
  if (m_new == -INFINITY) return;  // neither part has a key
  float alpha = expf(m - m_new);
  float beta = expf(slot[0] - m_new);
  l = alpha * l + beta * slot[LANES];
#pragma unroll
  for (int d = 0; d < D; d++) O[d] = alpha * O[d] + beta * slot[(d + 2) * LANES];
  m = m_new;
}

// q (heads, Nq, D), k and v (heads, Nk, D), out (heads, Nq, D), lse (heads, Nq), all contiguous.
extern "C" __global__ void __launch_bounds__(WARPS * LANES) attention_forward(
    Global<const float> q, Global<const float> k, Global<const float> v, Global<float> out, Global<float> lse,
    int Nq, int Nk, float scale, int causal) {
  int tiles = (Nq + LANES - 1) / LANES;
  int head = blockIdx.x / tiles;
  int w = threadIdx.x / LANES;
  int lane = threadIdx.x % LANES;
  int i = blockIdx.x % tiles * LANES + lane;
  int seen = i >= Nq ? 0 : causal ? min(Nk, i + 1 + Nk - Nq) : Nk;  // keys that this query sees
  int64_t row = int64_t(head) * Nq + i;
  k += int64_t(head) * Nk * D;
  v += int64_t(head) * Nk * D;

  SharedMemory smem;
  Shared<float> slots = smem.array<float>(WARPS / 2 * SLOT) + lane;

  float m = -INFINITY, l = 0, O[D] = {};
  for (int j = w; j < seen; j += WARPS) {
    float s = 0;
    for (int d = 0; d < D; d++) s += q[row * D + d] * k[j * D + d];
    online_update(m, l, O, scale * s, v + j * D);
  }

  for (int left = WARPS / 2; left > 0; left /= 2) {  // the number of warps that keep their part
    if (w >= left && w < 2 * left) hand_over(slots + (w - left) * SLOT, m, l, O);
    __syncthreads();  // the parts are there
    if (w < left) take_in(m, l, O, slots + w * SLOT);
    __syncthreads();  // the slots may be written again
  }

  if (w == 0 && i < Nq) {
#pragma unroll
    for (int d = 0; d < D; d++) out[row * D + d] = l == 0 ? 0 : O[d] / l;
    lse[row] = m + logf(l);
  }
}
