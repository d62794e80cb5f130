// SPDX-License-Identifier: MIT
// Rung 4, "cp_async": tiles come from global memory while the tensor cores work on the tile before.
//
// cp.async copies from global to shared memory without passing through registers, while the thread goes on.
// One buffer for K and one for V suffice, because the two products of a tile need them at different times:
//
//   wait for K_j              start V_j          S = Q K_j^T           V_j arrives meanwhile
//   wait for V_j              start K_{j+1}      softmax, O += P V_j   K_{j+1} arrives meanwhile
//
// A wait has two parts. cp_async_wait waits for the thread's own copies. The barrier after it makes sure that
// the copies of all threads have arrived, and that no thread still reads the buffer that the next copies
// overwrite.
//
// Launch and limits as in rung 3. Before sm_80 the copy is a load and a store. Needs ptx.cuh.
// Spill budget: 16 bytes. On sm_80, D = 32 with Br = 32 takes 12 of them and D = 96 with Bc = 32 takes 8;
// tiles of 64 x 64 take none.
// Left out: large tiles.
// Bottleneck: shared memory. A warp has only 16 rows, so that each operand of K or V that ldmatrix brings
// serves a single `mma` (rung 5).
#include "ptx.cuh"

static_assert((Br == 16 || Br == 32 || Br == 64) && Bc % 32 == 0,
              "at most 4 warps of 16 rows, which share a tile evenly");
constexpr int ROWS = 16;  // of a warp
constexpr int THREADS = Br / ROWS * 32;
// m starts at LOWEST. If it started at -inf, m - m_new of a row that has not seen a key yet would be NaN.
constexpr float LOWEST = -3.4e38f;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
constexpr int W = D % 64 == 0 ? 64 : 32;  // columns of a slab

// The index of the element (row, column) in a tile of `rows` rows. It consists of the slab, the row in the
// slab, and the swizzled column.
__device__ int at(int rows, int row, int column) {
  int chunk = W == 64 ? row % 8 : row / 2 % 4;
  return (column / W * rows + row) * W + (column % W ^ 8 * chunk);
}

// Starts to copy x[0 .. rows)[D] to the tile, and zeros from there to row `size`. 8 threads (4 if W = 32)
// copy a row of a slab, 16 bytes each.
__device__ void load_tile(Shared<T> tile, Global<const T> x, int64_t stride, int size, int rows) {
  int first_row = threadIdx.x / (W / 8), column = threadIdx.x % (W / 8) * 8;
#pragma unroll
  for (int row = first_row; row < size + first_row; row += THREADS / (W / 8))
#pragma unroll
    for (int slab = 0; slab < D; slab += W)
      cp_async_16(tile + at(size, row, slab + column), x + (row * stride + slab + column), row < rows);
}

// Loads the warp's 16 rows of Q, from `row` on, as A operands.
__device__ void load_Q(uint32_t (&A)[D / 16][4], Shared<T> Q, int row) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 0; d < D / 16; d++) ldmatrix_x4(A[d], Q + at(Br, row + lane % 16, 16 * d + lane / 16 * 8));
}

// S (16 x Bc) = Q K^T. One ldmatrix brings the B operands of 16 keys: b0 and b1 of the first 8 keys, then
// those of the other 8.
__device__ void scores(float (&S)[Bc / 8][4], const uint32_t (&Q)[D / 16][4], Shared<T> K) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Bc / 8; n++) S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0;
#pragma unroll
  for (int d = 0; d < D / 16; d++)
#pragma unroll
    for (int n = 0; n < Bc / 8; n += 2) {
      uint32_t B[4];
      ldmatrix_x4(B, K + at(Bc, 8 * n + lane / 16 * 8 + lane % 8, 16 * d + lane / 8 % 2 * 8));
      mma<T>(S[n], Q[d], B[0], B[1]);
      mma<T>(S[n + 1], Q[d], B[2], B[3]);
    }
}

// This lane's row g sees the keys below seen[0], its row g + 8 those below seen[1]. Other scores are replaced
// by -inf, because arithmetic with a mask would let NaN through.
__device__ void mask(float (&S)[Bc / 8][4], int first_key, const int (&seen)[2]) {
  int c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < Bc / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) S[n][i] = first_key + 8 * n + c + i % 2 < seen[i / 2] ? S[n][i] : -INFINITY;
}

// The maximum, or the sum, of x over the 4 lanes that share a row. Each of the 4 lanes gets the result.
__device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Adds the tile's keys, whose scores are S, to the rows: m, l and O become those of all keys so far, and S
// becomes P. O is not yet divided by l, and l is only this lane's share of the sum.
__device__ void online_update(float (&m)[2], float (&l)[2], float (&O)[D / 8][4], float (&S)[Bc / 8][4],
                              float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {  // the rows g and g + 8
    float max_S = -INFINITY;
#pragma unroll
    for (int n = 0; n < Bc / 8; n++) max_S = fmaxf(max_S, fmaxf(S[n][2 * r], S[n][2 * r + 1]));
    float m_new = fmaxf(m[r], scale_log2 * row_max(max_S));
    float alpha = exp2_approx(m[r] - m_new);
    m[r] = m_new;
    l[r] *= alpha;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      O[d][2 * r] *= alpha;
      O[d][2 * r + 1] *= alpha;
    }
#pragma unroll
    for (int n = 0; n < Bc / 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        // The product is rounded before the subtraction, because m_new was rounded. One FMA would not round
        // it: the exponent of the maximum would not be 0, and for scores of 1e11 P would be infinite.
        S[n][i] = exp2_approx(__fmul_rn(scale_log2, S[n][i]) - m_new);
        l[r] += S[n][i];
      }
  }
}

// P of 16 keys as operand A. `near` is what this lane has of the first 8 keys, `far` what it has of the other
// 8.
__device__ void to_operand(uint32_t (&A)[4], const float (&near)[4], const float (&far)[4]) {
  A[0] = pack<T>(near[0], near[1]);
  A[1] = pack<T>(near[2], near[3]);
  A[2] = pack<T>(far[0], far[1]);
  A[3] = pack<T>(far[2], far[3]);
}

// O (16 x D) += P V for the tile's Bc keys, 16 at a time.
__device__ void add_PV(float (&O)[D / 8][4], const float (&P)[Bc / 8][4], Shared<T> V) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) {
    uint32_t A[4];
    to_operand(A, P[2 * j], P[2 * j + 1]);
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t B[4];  // of 16 columns of V, transposed, because a pair of B is two keys in one column
      ldmatrix_x4_trans(B, V + at(Bc, 16 * j + lane % 16, 8 * d + lane / 16 * 8));
      mma<T>(O[d], A, B[0], B[1]);
      mma<T>(O[d + 1], A, B[2], B[3]);
    }
  }
}

// Stores out = O / l and lse of this lane's rows, if they are below `rows`. A row that saw no key has l = 0,
// and gets out = 0 and lse = -inf.
__device__ void store_rows(Global<T> out, Global<float> lse, const float (&O)[D / 8][4], const float (&m)[2],
                           const float (&l)[2], int rows) {
  int g = threadIdx.x % 32 / 4, c = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = row_sum(l[r]);
    float inverse = sum == 0 ? 0 : 1 / sum;
    if (g + 8 * r >= rows) continue;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      uint32_t pair = pack<T>(O[d][2 * r] * inverse, O[d][2 * r + 1] * inverse);
      store_pair(out + (int64_t(g + 8 * r) * D + 8 * d + c), pair);
    }
    if (c == 0) lse[g + 8 * r] = m[r] * LN_2 + logf(sum);
  }
}

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

  SharedMemory smem;
  Shared<T> Q_i = smem.array<T>(Br * D);
  Shared<T> K_j = smem.array<T>(Bc * D);
  Shared<T> V_j = smem.array<T>(Bc * D);

  int first = tile * Br + threadIdx.x / 32 * ROWS;  // the warp's first row
  int g = threadIdx.x % 32 / 4;
  int keys = keys_seen(tile, Nq, Nk, causal);       // keys that some row of this block sees
  int seen[2];                                      // keys that each of this lane's rows sees
#pragma unroll
  for (int r = 0; r < 2; r++) seen[r] = causal ? min(Nk, first + g + 8 * r + 1 + Nk - Nq) : Nk;

  load_tile(Q_i, q, q_row, Br, Nq - tile * Br);
  cp_async_commit();
  load_tile(K_j, k, k_row, Bc, keys);
  cp_async_commit();
  cp_async_wait<1>();  // Q_i; K_0 is still under way
  __syncthreads();     // a warp's rows were loaded by other threads, too
  uint32_t Q[D / 16][4];
  load_Q(Q, Q_i, threadIdx.x / 32 * ROWS);

  float O_i[D / 8][4] = {}, m[2] = {LOWEST, LOWEST}, l[2] = {};
  for (int j = 0; j < keys; j += Bc) {
    cp_async_wait<0>();
    __syncthreads();  // K_j is there, and no thread still reads V of the tile before
    load_tile(V_j, v + j * v_row, v_row, Bc, keys - j);
    cp_async_commit();
    float S[Bc / 8][4];
    scores(S, Q, K_j);
    mask(S, j, seen);
    cp_async_wait<0>();
    __syncthreads();  // V_j is there, and no thread still reads K_j
    if (j + Bc < keys) load_tile(K_j, k + (j + Bc) * k_row, k_row, Bc, keys - j - Bc);
    cp_async_commit();
    online_update(m, l, O_i, S, scale * LOG2_E);
    add_PV(O_i, S, V_j);
  }
  int64_t row = int64_t(batch * H + head) * Nq + first;
  store_rows(out + row * D, lse + row, O_i, m, l, Nq - first);
}
