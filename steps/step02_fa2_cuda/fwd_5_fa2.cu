// SPDX-License-Identifier: MIT
// Rung 5, "fa2": FlashAttention-2's tiles, and a loop without needless work. The best kernel before Hopper's.
//
//   - A warp owns 32 rows (Br = 128), two tiles of 16, so that each operand of K or V from shared memory
//     serves two `mma`. S and O take most of the 255 registers, therefore Q stays in shared memory.
//   - The exponentials move into the second product: P is computed for 16 keys at a time, while the tensor
//     cores are busy with the 16 keys before.
//   - The loop runs from the last key to the first. Only the first tiles that it visits, at the end of the
//     keys or on the diagonal, need the mask; the others skip it (FEW_MASKS).
//   - A lane computes its addresses in the swizzled tiles once. All other addresses differ from these by
//     constants, which are part of the instruction, so that no integer arithmetic is left among the `mma`.
//   - If causal, the blocks with the most keys start first, so that none of them is still running when all
//     others have ended (LONGEST_FIRST). With all heads at a time their K and V would often not fit into the
//     L2 cache. So the heads are taken in sections that fit (SECTIONS).
//
// Parameters, which are macros:
//   T           bf16 or fp16: the type of q, k, v and out
//   D           the head_dim: 32, 64, 96 or 128; 256 with Br = 64, for lack of registers
//   Br          queries of a tile, 32 or a multiple of 64: 128, as FlashAttention-2 has it
//   Bc          keys of a tile, a multiple of 32: 128, or 64 where D is large
//   FEW_MASKS, LONGEST_FIRST, SECTIONS    1, or 0 to switch off the idea of that name above
//
// The GPUs of rung 4. Needs ptx.cuh.
// Launch: grid ceil(Nq / Br) * H * B, block 128 threads (2 * Br if Br < 64), 2 * (Br + 2 * Bc) * D bytes of
// dynamic shared memory.
// Spill budget: 96 bytes. S and O take 192 of the 255 registers, and numbers that the loop needs at most once
// a tile may wait in memory. With D = 128 on sm_90 this costs at most 11 of the loop's 1100 instructions.
// Left out: what only Hopper has.
// Bottleneck: `mma` reaches 2/3 of the speed of Hopper's tensor cores (rung 6).
#include "ptx.cuh"

#ifndef FEW_MASKS
#define FEW_MASKS 1
#endif
#ifndef LONGEST_FIRST
#define LONGEST_FIRST 1
#endif
#ifndef SECTIONS
#define SECTIONS 1
#endif

static_assert((Br == 32 || Br % 64 == 0) && Bc % 32 == 0,
              "4 warps have whole tiles of 16 rows, and share a tile evenly");
constexpr int WARPS = Br < 64 ? Br / 16 : 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = Br / WARPS;  // of a warp
constexpr int M = ROWS / 16;      // tiles of 16 rows that a warp has
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
// copy a row of a slab, 16 bytes each. x points to the first 16 bytes of this thread, and tile_at is the
// index where they go. The thread's other rows lie multiples of 8 rows further down, where the swizzle is the
// same.
__device__ void load_tile(Shared<T> tile, int tile_at, Global<const T> x, int64_t stride, int size,
                          int rows) {
#pragma unroll
  for (int row = 0; row < size; row += THREADS / (W / 8)) {
    bool inside = row + int(threadIdx.x / (W / 8)) < rows;
#pragma unroll
    for (int slab = 0; slab < D / W; slab++)
      cp_async_16(tile + (tile_at + (slab * size + row) * W), x + slab * W, inside);
    x += THREADS / (W / 8) * stride;
  }
}

// The addresses that this lane gives to ldmatrix: its row in the first 16 columns of a slab, in the next 16
// columns, and so on. tile_at is the index of the first one.
typedef Shared<T> LaneRows[W / 16];
__device__ void lane_rows(LaneRows& rows, Shared<T> tile, int tile_at) {
#pragma unroll
  for (int x = 0; x < W / 16; x++) rows[x] = tile + (tile_at ^ 16 * x);
}

// S (ROWS x Bc) = Q K^T.
__device__ void scores(float (&S)[M][Bc / 8][4], const LaneRows& Q, const LaneRows& K) {
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

// Of the tile's keys, the warp's row r sees the first min(keys, diagonal + r). Other scores are replaced by
// -inf, because arithmetic with a mask would let NaN through.
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

// The maximum, or the sum, of x over the 4 lanes that share a row. Each of the 4 lanes gets the result.
__device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Updates the row maximum m with the tile's scores, and rescales l and O to it. O is not yet divided by l.
__device__ void update_max(float (&m)[M][2], float (&l)[M][2], float (&O)[M][D / 8][4],
                           const float (&S)[M][Bc / 8][4], float scale_log2) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {  // the rows g and g + 8
      float max_S = -INFINITY;
#pragma unroll
      for (int n = 0; n < Bc / 8; n++) max_S = fmaxf(max_S, fmaxf(S[i][n][2 * r], S[i][n][2 * r + 1]));
      float m_new = fmaxf(m[i][r], scale_log2 * row_max(max_S));
      float alpha = exp2_approx(m[i][r] - m_new);
      m[i][r] = m_new;
      l[i][r] *= alpha;
#pragma unroll
      for (int d = 0; d < D / 8; d++) {
        O[i][d][2 * r] *= alpha;
        O[i][d][2 * r + 1] *= alpha;
      }
    }
}

// P of 16 keys as operand A. `near` holds this lane's scores of the first 8 keys, `far` those of the other 8.
// P is also added to l, this lane's share of the sum.
__device__ void probabilities(uint32_t (&A)[4], float (&l)[2], const float (&near)[4], const float (&far)[4],
                              const float (&m)[2], float scale_log2) {
  float P[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    // The product is rounded before the subtraction, because m was rounded. One FMA would not round it: the
    // exponent of the maximum would not be 0, and for scores of 1e11 P would be infinite.
    P[e] = exp2_approx(__fmul_rn(scale_log2, e < 4 ? near[e] : far[e - 4]) - m[e / 2 % 2]);
    l[e / 2 % 2] += P[e];
  }
#pragma unroll
  for (int a = 0; a < 4; a++) A[a] = pack<T>(P[2 * a], P[2 * a + 1]);
}

// O (ROWS x D) += P V for the tile's Bc keys, 16 at a time.
__device__ void add_PV(float (&O)[M][D / 8][4], float (&l)[M][2], const float (&S)[M][Bc / 8][4],
                       const float (&m)[M][2], const LaneRows& V, float scale_log2) {
#pragma unroll
  for (int j = 0; j < Bc; j += 16) {
    uint32_t A[M][4];
#pragma unroll
    for (int i = 0; i < M; i++) probabilities(A[i], l[i], S[i][j / 8], S[i][j / 8 + 1], m[i], scale_log2);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      uint32_t B[4];  // of 16 columns of V, transposed, because a pair of B is two keys in one column
      ldmatrix_x4_trans(B, V[d % W / 16] + (d / W * Bc + j) * W);
#pragma unroll
      for (int i = 0; i < M; i++) {
        mma<T>(O[i][d / 8], A[i], B[0], B[1]);
        mma<T>(O[i][d / 8 + 1], A[i], B[2], B[3]);
      }
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
  // The blocks take the tiles of a section of heads, the last tiles first. If causal, the last tiles are the
  // longest, and a section is as many heads as have 32 MB of K and V together, 4 * D * Nk bytes each;
  // otherwise it is one head.
  int tiles = (Nq + Br - 1) / Br;
  int heads = gridDim.x / tiles;
  int section = !causal ? 1 : SECTIONS ? min(heads, max(1, (8 << 20) / D / Nk)) : heads;
  int first_head = blockIdx.x / (tiles * section) * section;
  int n = blockIdx.x - first_head * tiles;       // the block's number in the section
  int width = min(section, heads - first_head);  // heads of this section: the last may have fewer
  int tile = LONGEST_FIRST ? tiles - 1 - n / width : n / width;
  int head = (first_head + n % width) % H;
  int batch = (first_head + n % width) / H;
  q += batch * q_batch + head * q_head + tile * Br * q_row;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;

  SharedMemory smem;
  Shared<T> Q_i = smem.array<T>(Br * D);
  Shared<T> K_j = smem.array<T>(Bc * D);
  Shared<T> V_j = smem.array<T>(Bc * D);

  int lane = threadIdx.x % 32;
  int warp_row = threadIdx.x / 32 * ROWS;  // the warp's first row in the tile
  LaneRows Q_rows, K_rows, V_rows;
  lane_rows(Q_rows, Q_i, at(Br, warp_row + lane % 16, lane / 16 * 8));
  lane_rows(K_rows, K_j, at(Bc, lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
  lane_rows(V_rows, V_j, at(Bc, lane % 16, lane / 16 * 8));

  int first = tile * Br + warp_row;                  // the warp's first row
  int keys = keys_seen(tile, Nq, Nk, causal);        // keys that some row of this block sees
  int diagonal = causal ? first + 1 + Nk - Nq : Nk;  // keys that the mask lets the warp's first row see

  float O_i[M][D / 8][4] = {}, m[M][2], l[M][2] = {};
  float scale_log2 = scale * LOG2_E;
#pragma unroll
  for (int i = 0; i < M; i++) m[i][0] = m[i][1] = LOWEST;
  int j = (keys - 1) / Bc * Bc;  // the last tile of keys
  int copy_row = threadIdx.x / (W / 8);  // the first row that this thread copies
  int copy_column = threadIdx.x % (W / 8) * 8;
  int copy_at = at(0, copy_row, copy_column);
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
    scores(S, Q_rows, K_rows);
    if (!FEW_MASKS || j + Bc > min(Nk, diagonal)) mask(S, Nk - j, diagonal - j);
    cp_async_wait<0>();
    __syncthreads();  // V_j is there, and no thread still reads K_j
    k += -Bc * k_row;
    v += -Bc * v_row;
    if (j > 0) load_tile(K_j, copy_at, k, k_row, Bc, Bc);
    cp_async_commit();
    update_max(m, l, O_i, S, scale_log2);
    add_PV(O_i, l, S, m, V_rows, scale_log2);
  }
#pragma unroll
  for (int i = 0; i < M; i++) {
    int64_t row = int64_t(batch * H + head) * Nq + first + 16 * i;
    store_rows(out + row * D, lse + row, O_i[i], m[i], l[i], Nq - first - 16 * i);
  }
}
