// SPDX-License-Identifier: MIT
// Rung 2, "wgmma": Hopper's tensor cores, which a warpgroup of 128 threads feeds from shared memory, and TMA.
//
//   delta = rowsum(dO * O), lse * log2(e); dq = 0   a kernel of its own
//   K_j and V_j in shared memory; two warpgroups of 64 keys each, with dK_j = 0 and dV_j = 0 in registers
//   for each query head that uses these keys, for each tile of Br queries, from the last to the first:
//     (Q, dO, lse, delta of the next tile are on their way: TMA into the other of two buffers)
//     S^T  = K_j Q_i^T,  P^T = exp2(scale * log2(e) * S^T - lse_i)
//     dP^T = V_j dO_i^T, dS^T = P^T * (dP^T - delta_i)
//     dS^T goes to shared memory in 16 bits    because dQ_i sums over the keys of both warpgroups
//     dQ_i  = dS_i K_j                         each warpgroup computes one half, and adds it to dq in float32
//     dV_j += P^T dO_i
//     dK_j += dS^T Q_i
//   dq * scale in 16 bits                      a kernel of its own
//
// S is computed transposed, with a key a row, because then P^T and dS^T lie in the registers just as wgmma
// wants its first operand, and P never goes to shared memory. dq is added 16 bytes at a time in the order of
// the registers, and the last kernel restores the order of rows and columns. dk and dv are bit-equal from run
// to run, dq is not. As in rung 1 a block takes one query head alone if HEADS_APART.
//
// Parameters, which are macros:
//   T              bf16 or fp16: the type of q, k, v and their gradients
//   D, Br          the head_dim and the queries of a tile: 64 and 128, or 128 and 64: dK and dV fit
//   Bc             keys of a block: 128, 64 for each warpgroup
//   HEADS_APART    1 or 0, as above
//
// sm_90a. Needs ptx.cuh and wgmma.py's wrappers.
// Launch: attention_delta and attention_dq with grid B * H * ceil(Nq / Br), block 256; attention_backward
// with grid B * parts * ceil(Nk / Bc), block 256, 2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 16 * Br + 128
// bytes of dynamic shared memory.
// Spill budget: 0 bytes.
// Bottleneck: shared memory. S^T, dP^T and dQ_i read both operands from it (rung 3). And the tensor cores
// wait while both warpgroups compute dS^T at the same time.
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int STAGES = 2;  // buffers for Q, dO, lse and delta of a tile of queries, and for dS
constexpr int WARPS = 8;
constexpr int DQ_PER_WARP = Br * D / WARPS;  // numbers of dQ_i that a warp computes
static_assert(Bc == 128 && (D == 64 || D == 128) && Br * D == 8192,
              "each warpgroup computes 64 x 64 of dQ_i");

// The index of the element (row, column) in a tile of `rows` rows of 16-bit numbers. The tile consists of
// slabs of 64 columns. The rows of a slab, 128 bytes each, follow each other, and their 16-byte chunks are
// permuted as TMA and wgmma do it ("128-byte swizzle").
__device__ int at(int rows, int row, int column) {
  return column / 64 * rows * 64 + row * 64 + (column / 8 % 8 ^ row % 8) * 8 + column % 8;
}

constexpr int EIGHT_ROWS = 1024;  // bytes of 8 rows of a slab, which is what a descriptor calls its stride

// Starts C (64 x Br) = A B^T. A is 64 rows of a tile of Bc x D, B is a tile of Br x D. The lowest bits of a
// descriptor are an address / 16, so that an addition moves it on to the next 16 columns.
__device__ void start_product(float (&C)[Br / 2], Shared<T> A, Shared<T> B) {
  wgmma_fence();
  uint64_t a = descriptor(A, 16, EIGHT_ROWS), b = descriptor(B, 16, EIGHT_ROWS);
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_ss<T, Br, 0, 0>(C, a + (d / 64 * Bc * 128 + d % 64 * 2) / 16,
                          b + (d / 64 * Br * 128 + d % 64 * 2) / 16, d > 0);
  wgmma_commit();
}

// Starts C (64 x D) += A B. A (64 x Br) is in registers, B is a tile of Br x D.
__device__ void start_product(float (&C)[D / 2], const uint32_t (&A)[Br / 16][4], Shared<T> B) {
  wgmma_fence();
  uint64_t b = descriptor(B, Br * 128, EIGHT_ROWS);
#pragma unroll
  for (int i = 0; i < Br / 16; i++) wgmma_rs<T, D, 1>(C, A[i], b + i * 16 * 128 / 16, true);
  wgmma_commit();
}

// Starts dQ (64 x 64) = A^T B. A and B are slabs of 128 keys, A of dS^T and B of K.
__device__ void start_dQ(float (&dQ)[32], Shared<T> A, Shared<T> B) {
  wgmma_fence();
  uint64_t a = descriptor(A, Bc * 128, EIGHT_ROWS), b = descriptor(B, Bc * 128, EIGHT_ROWS);
#pragma unroll
  for (int j = 0; j < Bc / 16; j++)
    wgmma_ss<T, 64, 1, 1>(dQ, a + j * 16 * 128 / 16, b + j * 16 * 128 / 16, j > 0);
  wgmma_commit();
}

// Register 4 i + e of a lane holds the row lane / 4 + e / 2 * 8 of its warp's 16 rows, and the column
// 8 i + lane % 4 * 2 + e % 2. Rows are keys, and columns are queries. The functions below count the columns
// from this lane's first one.

// Sets S = -inf where the query does not see the key. The lane has two keys. The first of them is seen from
// the column seen_from_0 on, the second from seen_from_1 on.
__device__ void mask(float (&S)[Br / 2], int seen_from_0, int seen_from_1) {
#pragma unroll
  for (int n = 0; n < Br / 2; n++)
    S[n] = n / 4 * 8 + n % 2 >= (n % 4 < 2 ? seen_from_0 : seen_from_1) ? S[n] : -INFINITY;
}

// P = exp2(scale_log2 * S - lse), packed as an operand.
__device__ void probabilities(uint32_t (&P)[Br / 16][4], const float (&S)[Br / 2], Shared<float> lse,
                              float scale_log2) {
#pragma unroll
  for (int i = 0; i < Br / 8; i++) {
    float l[2] = {lse[8 * i], lse[8 * i + 1]}, p[4];
#pragma unroll
    for (int e = 0; e < 4; e++) p[e] = exp2_approx(fminf(S[4 * i + e] * scale_log2 - l[e % 2], 0));
    P[i / 2][i % 2 * 2] = pack<T>(p[0], p[1]);
    P[i / 2][i % 2 * 2 + 1] = pack<T>(p[2], p[3]);
  }
}

// dS = P * (dP - delta), packed as an operand.
__device__ void score_gradients(uint32_t (&dS)[Br / 16][4], const uint32_t (&P)[Br / 16][4],
                                const float (&dP)[Br / 2], Shared<float> delta) {
#pragma unroll
  for (int i = 0; i < Br / 8; i++) {
    float d[2] = {delta[8 * i], delta[8 * i + 1]};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t p = P[i / 2][i % 2 * 2 + half];
      const float* dp = dP + 4 * i + 2 * half;
      float low = to_float(T{uint16_t(p)}), high = to_float(T{uint16_t(p >> 16)});
      dS[i / 2][i % 2 * 2 + half] = pack<T>(low * (dp[0] - d[0]), high * (dp[1] - d[1]));
    }
  }
}

// Stores 16 x COLUMNS packed numbers, a warp's part of a product, in a tile of `rows` rows, from `row` on.
template <int COLUMNS>
__device__ void store_tile(Shared<T> tile, int rows, int row, const uint32_t (&x)[COLUMNS / 16][4]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 16)
    stmatrix_x4(tile + at(rows, row + lane % 16, c + lane / 16 * 8), x[c / 16]);
}

// Adds the warp's part of dQ_i to its 1024 numbers of dq, in the order of the registers: 8 times 16 bytes a
// lane.
__device__ void add_dQ(Global<float> dq, const float (&dQ)[32]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 32; i += 4)
    atomic_add_4(dq + (i * 32 + lane * 4), dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
}

// Stores dK or dV of a warp's 16 keys. The numbers go through shared memory to the copy engine, which writes
// whole rows, and no row beyond the last key.
__device__ void store_rows(const TensorMap& map, Shared<T> tile, const float (&C)[D / 2], float factor,
                           int row, int head, int batch) {
  uint32_t x[D / 16][4];
#pragma unroll
  for (int i = 0; i < D / 4; i++) x[i / 4][i % 4] = pack<T>(factor * C[2 * i], factor * C[2 * i + 1]);
  store_tile<D>(tile, 16, 0, x);
  fence_async();
  __syncwarp();  // the numbers of all lanes are in shared memory, and the copy engine sees them
  if (threadIdx.x % 32 == 0) {
    tma_store(map, tile, 0, row, 0, head, batch);
    bulk_commit();
  }
}

// Computes delta = rowsum(dout * out) and lse_2 = lse * log2(e), both (B, H, padded_rows), which is Nq
// rounded up to whole tiles, and sets dq to 0. lse of a row that saw no key is -inf. For such a row, and for
// the rows from Nq on, lse_2 becomes +inf, so that P = exp2(... - lse_2) = 0. A block computes a tile
// of Br rows, D / 8 threads a row.
extern "C" __global__ void __launch_bounds__(256) attention_delta(
    Global<const T> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const T> out, int64_t out_batch, int64_t out_head, int64_t out_row,
    Global<const float> lse, Global<float> lse_2, Global<float> delta, Global<float> dq, int H, int Nq) {
  constexpr int ROW_LANES = D / 8;       // threads that share a row, 8 numbers each
  constexpr int ROWS = 256 / ROW_LANES;  // rows at a time
  int tiles = (Nq + Br - 1) / Br;
  int tile = blockIdx.x % tiles;
  int head = blockIdx.x / tiles % H;
  int batch = blockIdx.x / tiles / H;
  int lane = threadIdx.x % ROW_LANES;  // of those that share the row
  dout += batch * dout_batch + head * dout_head + 8 * lane;
  out += batch * out_batch + head * out_head + 8 * lane;
  float sum[Br / ROWS] = {};
#pragma unroll
  for (int r = 0; r < Br / ROWS; r++) {
    int i = tile * Br + r * ROWS + threadIdx.x / ROW_LANES;
    if (i < Nq) {
      uint32_t x[4], y[4];
      load_16(x, dout + i * dout_row);
      load_16(y, out + i * out_row);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        sum[r] += to_float(T{uint16_t(x[e])}) * to_float(T{uint16_t(y[e])});
        sum[r] += to_float(T{uint16_t(x[e] >> 16)}) * to_float(T{uint16_t(y[e] >> 16)});
      }
    }
  }
#pragma unroll
  for (int e = threadIdx.x * 4; e < Br * D; e += 1024) {
    const uint32_t zeros[4] = {};
    store_16(dq + (int64_t(blockIdx.x) * Br * D + e), zeros);
  }
#pragma unroll
  for (int r = 0; r < Br / ROWS; r++) {
#pragma unroll
    for (int other = 1; other < ROW_LANES; other *= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], other);
    int row = r * ROWS + threadIdx.x / ROW_LANES;
    int i = tile * Br + row;
    if (lane == 0) {
      float l = i < Nq ? lse[(int64_t(batch) * H + head) * Nq + i] : -INFINITY;
      delta[int64_t(blockIdx.x) * Br + row] = sum[r];
      lse_2[int64_t(blockIdx.x) * Br + row] = lse_in_base_2(l);
    }
  }
}

// The tensor maps describe dout and q (B, H, Nq, D) with boxes of Br rows, k and v (B, H / group, Nk, D) with
// boxes of Bc rows, and dk and dv (B, parts, Nk, D) with boxes of 16 rows, where parts is H if HEADS_APART,
// else H / group. lse_2, delta and dq are those of attention_delta.
extern "C" __global__ void __launch_bounds__(256, 1) attention_backward(
    const __grid_constant__ TensorMap dout_map, const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
    Global<const float> lse_2, Global<const float> delta, Global<float> dq,
    int H, int group, int Nq, int Nk, float scale, int causal) {
  SharedMemory smem;
  // The arrays that TMA and wgmma use come first, because they must begin at multiples of 1024 bytes.
  Shared<T> K = smem.array<T>(Bc * D), V = smem.array<T>(Bc * D);
  Shared<T> Q = smem.array<T>(STAGES * Br * D), dO = smem.array<T>(STAGES * Br * D);
  Shared<T> dS_i = smem.array<T>(STAGES * Br * Bc);
  Shared<float> lse_i = smem.array<float>(STAGES * Br), delta_i = smem.array<float>(STAGES * Br);
  Shared<Barrier> keys_full = smem.array<Barrier>(1), queries_full = smem.array<Barrier>(STAGES);

  if (threadIdx.x == 0) {
    barrier_init(keys_full, 1);
    for (int s = 0; s < STAGES; s++) barrier_init(queries_full + s, 1);
    barrier_init_fence();
  }
  __syncthreads();  // the barriers are ready

  // The tiles of a head are taken from the first to the last, because with a causal mask the first keys have
  // the most queries.
  int tiles = (Nk + Bc - 1) / Bc;
  int tile = blockIdx.x % tiles;
  int own = HEADS_APART ? 1 : group;  // query heads that a block computes
  int parts = H / own;                // of dK and dV
  int part = blockIdx.x / tiles % parts;
  int head_k = HEADS_APART ? part / group : part;
  int batch = blockIdx.x / tiles / parts;
  int query_tiles = (Nq + Br - 1) / Br;
  // The causal mask is aligned at the bottom right, so that the queries from j - (Nk - Nq) on see key j.
  int first = causal ? max(0, tile * Bc - (Nk - Nq)) / Br : 0;  // the first tile of queries that sees a key
  int steps = (query_tiles - first) * own;

  auto load_queries = [&](int stage, int head, int i) {
    int64_t column = (int64_t(batch * H + head) * query_tiles + i) * Br;
    barrier_expect(queries_full + stage, 2 * (2 * Br * D + 4 * Br));
    tma_load(Q + stage * Br * D, q_map, queries_full + stage, 0, i * Br, 0, head, batch);
    tma_load(dO + stage * Br * D, dout_map, queries_full + stage, 0, i * Br, 0, head, batch);
    bulk_load(lse_i + stage * Br, lse_2 + column, Br, queries_full + stage);
    bulk_load(delta_i + stage * Br, delta + column, Br, queries_full + stage);
  };

  int head = part * own, i = query_tiles - 1;
  if (threadIdx.x == 0) {
    barrier_expect(keys_full, 2 * 2 * Bc * D);
    tma_load(K, k_map, keys_full, 0, tile * Bc, 0, head_k, batch);
    tma_load(V, v_map, keys_full, 0, tile * Bc, 0, head_k, batch);
    load_queries(0, head, i);
  }

  // After the shuffle the compiler knows that all lanes of a warp have the same warpgroup. What is computed
  // from this number then needs no registers of the threads.
  int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int row = 16 * warp + lane / 4;  // this lane's first key in a tile
  int column = lane % 4 * 2;       // this lane's first query in a tile
  Shared<T> K_rows = K + warpgroup * 64 * 64, V_rows = V + warpgroup * 64 * 64;
  // Of dQ_i = dS_i K_j this warpgroup computes 64 columns if D = 128, and 64 rows if D = 64.
  int dS_slab = D == 64 ? warpgroup * Bc * 64 : 0;
  Shared<T> K_slab = K + (D == 128 ? warpgroup * Bc * 64 : 0);
  dq += warp * DQ_PER_WARP;

  // This lane has the keys `key` and `key + 8`. The queries from seen_from_0 on see the first one, those from
  // seen_from_1 on the second; no query sees a key that does not exist. Both are counted from the lane's
  // first query, as `mask` expects.
  int key = tile * Bc + row;
  int seen_from_0 = (key >= Nk ? Nq + Br : causal ? key - (Nk - Nq) : 0) - column;
  int seen_from_1 = (key + 8 >= Nk ? Nq + Br : causal ? key + 8 - (Nk - Nq) : 0) - column;
  // The queries from masked_below on see all keys of this tile. Those below it need the mask.
  int masked_below = tile * Bc + Bc > Nk ? Nq : causal ? tile * Bc + Bc - 1 - (Nk - Nq) : 0;

  float dK[D / 2] = {}, dV[D / 2] = {};
  barrier_wait(keys_full, 0);
  for (int step = 0; step < steps; step++) {
    int stage = step % STAGES;
    Shared<T> Q_i = Q + stage * Br * D, dO_i = dO + stage * Br * D;
    Shared<T> dS_t = dS_i + stage * Br * Bc;
    float S[Br / 2], dP[Br / 2], dQ[32];
    uint32_t P[Br / 16][4], dS[Br / 16][4];

    barrier_wait(queries_full + stage, step / STAGES % 2);
    start_product(S, K_rows, Q_i);    // S^T = K_j Q_i^T
    start_product(dP, V_rows, dO_i);  // dP^T = V_j dO_i^T
    wgmma_wait<1>();                  // S^T is there
    if (i * Br < masked_below) mask(S, seen_from_0 - i * Br, seen_from_1 - i * Br);
    probabilities(P, S, lse_i + (stage * Br + column), scale * LOG2_E);
    wgmma_wait<0>();  // dP^T is there
    score_gradients(dS, P, dP, delta_i + (stage * Br + column));
    store_tile<Br>(dS_t, Bc, 16 * warp, dS);
    fence_async();
    __syncthreads();  // both warpgroups have written dS^T, and all products of the tile before have ended

    Global<float> dq_i = dq + (int64_t(batch * H + head) * query_tiles + i) * Br * D;
    if (--i < first) {
      i = query_tiles - 1;
      head++;
    }
    if (threadIdx.x == 0 && step + 1 < steps) load_queries((step + 1) % STAGES, head, i);

    start_dQ(dQ, dS_t + dS_slab, K_slab);  // dQ_i = dS_i K_j
    start_product(dV, P, dO_i);            // dV_j += P^T dO_i
    start_product(dK, dS, Q_i);            // dK_j += dS^T Q_i
    wgmma_wait<2>();                       // dQ_i is there
    add_dQ(dq_i, dQ);
    wgmma_wait<0>();
  }
  __syncthreads();  // nobody still reads K and V, where dK and dV are stored now
  store_rows(dv_map, V + warp * 16 * D, dV, 1, tile * Bc + 16 * warp, part, batch);
  store_rows(dk_map, K + warp * 16 * D, dK, scale, tile * Bc + 16 * warp, part, batch);
  if (lane == 0) bulk_wait_read<0>();  // shared memory must exist until the copy engine has read it
}

// out (B, H, Nq, D) = scale * dq in 16 bits. A warp's part of a tile of dq is stored as [i][lane][4]. The
// four numbers are the rows lane / 4 and lane / 4 + 8, and in each of them the columns 8 i + lane % 4 * 2 and
// the next one. A thread reads the numbers of four neighbouring lanes, which are 8 columns of two rows.
extern "C" __global__ void __launch_bounds__(256) attention_dq(
    Global<const float> dq, Global<T> out, int Nq, float scale) {
  int tiles = (Nq + Br - 1) / Br;
  int tile = blockIdx.x % tiles;
  out += int64_t(blockIdx.x / tiles) * Nq * D;
  dq += int64_t(blockIdx.x) * Br * D;
#pragma unroll
  for (int n = threadIdx.x; n < Br * D / 16; n += 256) {
    int i = n % 8, g = n / 8 % 8, warp = n / 64;  // neighbouring threads write neighbouring columns
    uint32_t x[4][4];
#pragma unroll
    for (int c = 0; c < 4; c++) load_16(x[c], dq + (warp * DQ_PER_WARP + (i * 32 + g * 4 + c) * 4));
    int row = tile * Br + (D == 64 ? 16 * warp : 16 * (warp % 4)) + g;
    int column = (D == 64 ? 0 : warp / 4 * 64) + 8 * i;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t y[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint32_t* pair = x[c] + 2 * half;
        y[c] = pack<T>(scale * __uint_as_float(pair[0]), scale * __uint_as_float(pair[1]));
      }
      if (row + 8 * half < Nq) store_16(out + (int64_t(row + 8 * half) * D + column), y);
    }
  }
}
