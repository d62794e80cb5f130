// SPDX-License-Identifier: MIT
// Rung 3, "hopper": K_j stays in registers, dV starts before the warpgroups meet; or dq is added in order.
//
// In rung 2 the products S^T, dP^T and dQ_i read both operands from shared memory. At D = 128 this takes all
// the bytes that shared memory can deliver in a clock. But wgmma also takes its first operand from registers.
// S^T needs the same rows of K_j in every step. So each warp loads its rows once, and S^T then reads half as
// many bytes. At D = 64 there are registers for V_j, too.
//
// dQ_i needs dS^T of both warpgroups. So the warpgroups wait for each other at a barrier. dV_j += P^T dO_i
// needs only P^T of its own warpgroup. So it starts before the barrier, and the tensor cores work meanwhile.
// (Not if DETERMINISTIC: then dV_j is computed while the block releases the semaphore of its last dQ_i.)
//
// Where a block has few steps, its beginning takes much of the time. With a third buffer for Q_i and dO_i,
// two tiles are loaded before the first step, and one more in each step. If PERSISTENT, a block computes
// several tiles of keys: the next K_j, the first queries and at D = 64 the next V_j are loaded while it
// computes this tile, and dK_j and dV_j are stored while it computes the next. The L2 cache holds what was
// written last. So attention_delta and attention_dq go through the tiles backwards: the kernel that comes
// next then starts with numbers of dq that are still in the cache.
//
// A block goes through the queries from the first tile that sees its keys to the last. So with a causal mask
// the blocks of a head begin at different tiles, and seldom add to the same tile at the same time. The host
// decides which block computes which tile of keys, as for the forward (tile_scheduler.py).
//
// If DETERMINISTIC, the blocks add to each dQ_i one after the other, and dq, too, is bit-equal from run to
// run. In all else the algorithm is that of rung 2:
//
//   delta = rowsum(dO * O), lse * log2(e); dq = 0   a kernel of its own
//   K_j in registers, V_j in shared memory or registers, dK_j = 0 and dV_j = 0 in registers
//   for each query head that uses these keys, for each tile of Br queries that sees them:
//     S^T  = K_j Q_i^T,  P^T = exp2(scale * log2(e) * S^T - lse_i)
//     dP^T = V_j dO_i^T, dS^T = P^T * (dP^T - delta_i)
//     dS^T goes to shared memory in 16 bits, and dV_j += P^T dO_i starts
//     dQ_i  = dS_i K_j                         each warpgroup computes one half, and adds it to dq in float32
//     dK_j += dS^T Q_i
//   dK_j * scale and dV_j in 16 bits; dq * scale in 16 bits, a kernel of its own
//
// Parameters, which are macros:
//   T                bf16 or fp16: the type of q, k, v and their gradients
//   D, Br            the head_dim and the queries of a tile: 64 and 128, or 128 and 64
//   Bc               keys of a block: 128, 64 for each warpgroup
//   HEADS_APART      1: a block computes one query head, and the host adds up dk and dv of a group; 0: it
//                    computes all query heads that share its keys
//   DETERMINISTIC    1 or 0, as above; a macro, so that without it the counters cost nothing
//   STAGES           buffers for tiles of queries: 3; or 2, which is a little faster where heads are long
//   PERSISTENT       1: a block computes several tiles of keys; 0: one. Not both this and DETERMINISTIC.
//
// sm_90a. Needs ptx.cuh and wgmma.py's wrappers.
// Launch: attention_delta and attention_dq with grid B * H * ceil(Nq / Br), block 256; attention_backward
// with total = B * parts * ceil(Nk / Bc), grid total, or if PERSISTENT as many blocks as the GPU has
// multiprocessors, block 256, 2 * (3 * Bc * D + 6 * Br * D + 2 * Br * Bc) + 24 * Br + 128 bytes of dynamic
// shared memory (fewer buffers need less, and get as much).
// Spill budget: 0 bytes.
// Left out, because it was slower: dQ_i computed one step later, during the exponentials; additions by the
// copy engine; dq rounded by the last block of a head; persistent blocks where heads are long. Left out,
// because it would need too many registers: a producer warp.
// Bottleneck, by leaving parts out (course/bench/ablations.py): at D = 128 above all the additions to dq; at
// D = 64 P^T and dS^T, because both warpgroups compute them at the same time.
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int WARPS = 8;
constexpr int DQ_PER_WARP = Br * D / WARPS;  // numbers of dQ_i that a warp computes
constexpr bool V_IN_REGISTERS = D == 64;     // at D = 128 there are not enough
constexpr int KEY_STAGES = PERSISTENT ? 2 : 1;  // buffers for K
static_assert(STAGES == 2 || STAGES == 3, "a step looks at most two steps ahead");
static_assert(!(PERSISTENT && DETERMINISTIC), "a block must not wait for one that comes to its tile later");
static_assert(Bc == 128 && (D == 64 || D == 128) && Br * D == 8192,
              "each warpgroup computes 64 x 64 of dQ_i");

// The index of the element (row, column) in a tile of `rows` rows of 16-bit numbers. The tile consists of
// slabs of 64 columns. The rows of a slab, 128 bytes each, follow each other, and their 16-byte chunks are
// permuted as TMA and wgmma do it ("128-byte swizzle").
__device__ int at(int rows, int row, int column) {
  return column / 64 * rows * 64 + row * 64 + (column / 8 % 8 ^ row % 8) * 8 + column % 8;
}

constexpr int EIGHT_ROWS = 1024;  // bytes of 8 rows of a slab, which is what a descriptor calls its stride

// Starts C (64 x Br) = A B^T. B is a tile of Br x D, A is 64 rows of a tile of Bc x D, in shared memory or in
// registers. The lowest bits of a descriptor are an address / 16, so that an addition moves it on to the next
// 16 columns.
__device__ void start_product(float (&C)[Br / 2], Shared<T> A, Shared<T> B) {
  wgmma_fence();
  uint64_t a = descriptor(A, 16, EIGHT_ROWS), b = descriptor(B, 16, EIGHT_ROWS);
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_ss<T, Br, 0, 0>(C, a + (d / 64 * Bc * 128 + d % 64 * 2) / 16,
                          b + (d / 64 * Br * 128 + d % 64 * 2) / 16, d > 0);
  wgmma_commit();
}
__device__ void start_product(float (&C)[Br / 2], const uint32_t (&A)[D / 16][4], Shared<T> B) {
  wgmma_fence();
  uint64_t b = descriptor(B, 16, EIGHT_ROWS);
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_rs<T, Br, 0>(C, A[d / 16], b + (d / 64 * Br * 128 + d % 64 * 2) / 16, d > 0);
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

// P = exp2(scale_log2 * S - lse), packed as an operand. Where scores are huge, the rounding of lse alone
// could make P infinite. So P is at most 1.
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

// Loads 16 rows of a tile of Bc x D as an operand.
__device__ void load_rows(uint32_t (&x)[D / 16][4], Shared<T> tile, int row) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 0; d < D; d += 16) ldmatrix_x4(x[d / 16], tile + at(Bc, row + lane % 16, d + lane / 16 * 8));
}

// Adds the warp's part of dQ_i to its 1024 numbers of dq, in the order of the registers: 8 times 16 bytes a
// lane. dq points at the lane's first number, so that the other addresses need no instruction.
__device__ void add_dQ(Global<float> dq, const float (&dQ)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i += 4) atomic_add_4(dq + i * 32, dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
}

// If DETERMINISTIC, the blocks of a head add to dQ_i one after the other, in a fixed order. A counter for
// each tile of queries says how many have added to it. Without DETERMINISTIC nothing here does anything.
//
// One thread waits and releases for its block. (If each warp did this, each would wait until its additions
// have arrived in the L2 cache. This took up to a tenth of the time.) The barrier of each step orders the
// other threads: this thread waits before the barrier, and they add after it; they have added before the next
// barrier, and this thread releases after it.
struct DqSemaphore {
  Global<int> added;  // the counters
  int64_t held = -1;  // the tile of queries to which this block has added last

  static __device__ bool mine() { return DETERMINISTIC && threadIdx.x == 32 * WARPS - 32; }

  // Before the barrier: waits until so many blocks have added to the tile `dq_tile`, counted over all heads.
  __device__ void wait(int64_t dq_tile, int blocks) {
    if (!mine()) return;
    while (load_acquire(added + dq_tile) != blocks) {
    }
  }
  // After it: lets the next block add to the tile of the step before.
  __device__ void release(int64_t dq_tile) {
    if (!mine()) return;
    if (held >= 0) add_release(added + held, 1);
    held = dq_tile;
  }
};

// The n-th tile of keys and its head, counted over all batches. The first `alone` heads are computed one
// after the other. Later heads are interleaved, `section` at a time: tile 0 of each of them, then tile 1, ...
struct Place {
  int tile, head;

  __device__ Place(int n, int tiles, int total, int alone, int section) {
    tile = n % tiles;
    head = n / tiles;
    if (head < alone || section == 1) return;  // without the divisions, which would slow down a short block
    int first = head - (head - alone) % section;
    int heads = min(section, total / tiles - first);  // the last section may have fewer
    n -= first * tiles;
    tile = n / heads;
    head = first + n % heads;
  }
};

// A tile of keys, and the step that its block computes now. All numbers have a value from the start, because
// ptxas needs more registers for numbers that may be undefined.
struct KeyTile {
  int round = 0;                       // the tiles that the block computes before it
  int tile = -1, part = 0, batch = 0;  // tile is -1 if the block has no further one
  int first = 0;                       // the first tile of queries that sees one of these keys
  int head = 0, i = 0, steps = 0;      // the step: its query head and tile of queries; the steps left
};

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
  int block = gridDim.x - 1 - blockIdx.x;  // from the last tile to the first
  int tiles = (Nq + Br - 1) / Br;
  int tile = block % tiles;
  int head = block / tiles % H;
  int batch = block / tiles / H;
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
    store_16(dq + (int64_t(block) * Br * D + e), zeros);
  }
#pragma unroll
  for (int r = 0; r < Br / ROWS; r++) {
#pragma unroll
    for (int other = 1; other < ROW_LANES; other *= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], other);
    int row = r * ROWS + threadIdx.x / ROW_LANES;
    int i = tile * Br + row;
    if (lane == 0) {
      float l = i < Nq ? lse[(int64_t(batch) * H + head) * Nq + i] : -INFINITY;
      delta[int64_t(block) * Br + row] = sum[r];
      lse_2[int64_t(block) * Br + row] = lse_in_base_2(l);
    }
  }
}

// The tensor maps describe dout and q (B, H, Nq, D) with boxes of Br rows, k and v (B, H / group, Nk, D) with
// boxes of Bc rows, and dk and dv (B, parts, Nk, D) with boxes of 16 rows, where parts is H if HEADS_APART,
// else H / group. lse_2, delta and dq are those of attention_delta. counters, if DETERMINISTIC, are
// 1 + B * H * ceil(Nq / Br) zeros: one for the blocks that have started, and one for each tile of queries.
// section, from 1 on, and alone are those of Place. ascending is 1; if DETERMINISTIC it may be 0, and then a
// block goes from the last tile of queries to the first. All values give right results; tile_scheduler.py
// chooses fast ones.
extern "C" __global__ void __launch_bounds__(256, 1) attention_backward(
    const __grid_constant__ TensorMap dout_map, const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
    Global<const float> lse_2, Global<const float> delta, Global<float> dq, Global<int> counters,
    int H, int group, int Nq, int Nk, float scale, int causal, int total, int ascending, int section,
    int alone) {
  SharedMemory smem;
  // The arrays that TMA and wgmma use come first, because they must begin at multiples of 1024 bytes.
  Shared<T> K = smem.array<T>(KEY_STAGES * Bc * D), V = smem.array<T>(Bc * D);
  Shared<T> Q = smem.array<T>(STAGES * Br * D), dO = smem.array<T>(STAGES * Br * D);
  Shared<T> dS_i = smem.array<T>(2 * Br * Bc);  // two tiles, so that one barrier a step is enough
  Shared<float> lse_i = smem.array<float>(STAGES * Br), delta_i = smem.array<float>(STAGES * Br);
  Shared<Barrier> keys_full = smem.array<Barrier>(KEY_STAGES), values_full = smem.array<Barrier>(1);
  Shared<Barrier> queries_full = smem.array<Barrier>(STAGES);
  Shared<int> started = smem.array<int>(4);  // the blocks that started before this one

  if (threadIdx.x == 0) {
    for (int s = 0; s < KEY_STAGES; s++) barrier_init(keys_full + s, 1);
    barrier_init(values_full, 1);
    for (int s = 0; s < STAGES; s++) barrier_init(queries_full + s, 1);
    barrier_init_fence();
    // A GPU does not promise to start the blocks in the order of blockIdx.x, and a block must not wait for
    // one that has not started. So blocks that wait for those before them are numbered as they start.
    if (DETERMINISTIC) started[0] = atomicAdd(&counters[0], 1);
  }
  __syncthreads();  // the barriers are ready

  int tiles = (Nk + Bc - 1) / Bc;
  int own = HEADS_APART ? 1 : group;  // query heads that a block computes
  int parts = H / own;                // of dK and dV
  int query_tiles = (Nq + Br - 1) / Br;
  // The tile of keys that this block computes in a round. Every other round gives out the tiles in reverse
  // order of the blocks, so that a block with a long tile gets a short one next.
  auto tile_of = [&](int round) {
    KeyTile j;
    j.round = round;
    int n = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (n >= total) return j;
    Place place(DETERMINISTIC ? started[0] : n, tiles, total, alone, section);
    // If DETERMINISTIC, the blocks that add first also start first, because a block must not wait for one
    // that starts later. So if the queries ascend, the last keys come first.
    j.tile = DETERMINISTIC && ascending ? tiles - 1 - place.tile : place.tile;
    j.part = place.head % parts;
    j.batch = place.head / parts;
    // The causal mask is aligned at the bottom right, so that the queries from j - (Nk - Nq) on see key j.
    j.first = causal ? max(0, j.tile * Bc - (Nk - Nq)) / Br : 0;
    j.head = j.part * own;
    j.i = ascending ? j.first : query_tiles - 1;
    j.steps = (query_tiles - j.first) * own;
    return j;
  };

  // These three start the copies of a tile's K_j, of its V_j, and of Q_i and dO_i for its step.
  auto load_keys = [&](const KeyTile& j) {
    int s = j.round % KEY_STAGES, head_k = HEADS_APART ? j.part / group : j.part;
    barrier_expect(keys_full + s, 2 * Bc * D);
    tma_load(K + s * Bc * D, k_map, keys_full + s, 0, j.tile * Bc, 0, head_k, j.batch);
  };
  auto load_values = [&](const KeyTile& j) {
    int head_k = HEADS_APART ? j.part / group : j.part;
    barrier_expect(values_full, 2 * Bc * D);
    tma_load(V, v_map, values_full, 0, j.tile * Bc, 0, head_k, j.batch);
  };
  auto load_queries = [&](const KeyTile& j, int stage) {
    int64_t column = (int64_t(j.batch * H + j.head) * query_tiles + j.i) * Br;
    barrier_expect(queries_full + stage, 2 * (2 * Br * D + 4 * Br));
    tma_load(Q + stage * Br * D, q_map, queries_full + stage, 0, j.i * Br, 0, j.head, j.batch);
    tma_load(dO + stage * Br * D, dout_map, queries_full + stage, 0, j.i * Br, 0, j.head, j.batch);
    bulk_load(lse_i + stage * Br, lse_2 + column, Br, queries_full + stage);
    bulk_load(delta_i + stage * Br, delta + column, Br, queries_full + stage);
  };

  // From one step to the next. If DETERMINISTIC, all heads of a tile of queries come before the next tile.
  int direction = ascending ? 1 : -1;
  auto go_on = [&](KeyTile& j) {
    j.steps--;
    if (DETERMINISTIC) {
      if (++j.head < (j.part + 1) * own) return;
      j.head = j.part * own;
      j.i += direction;
    } else if (++j.i == query_tiles) {
      j.i = j.first;
      j.head++;
    }
  };
  // How many blocks add to a tile of queries before this one.
  auto blocks_before = [&](const KeyTile& j) {
    int last_key = causal ? (j.i + 1) * Br - 1 + Nk - Nq : Nk - 1;  // the last one that the tile sees
    return ascending ? min(tiles - 1, last_key / Bc) - j.tile : j.tile;
  };

  // After the shuffle the compiler knows that all lanes of a warp have the same warpgroup. What is computed
  // from this number then needs no registers of the threads.
  int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int row = 16 * warp + lane / 4;  // this lane's first key in a tile
  int column = lane % 4 * 2;       // this lane's first query in a tile
  // Of dQ_i = dS_i K_j this warpgroup computes 64 columns if D = 128, and 64 rows if D = 64.
  int dS_slab = D == 64 ? warpgroup * Bc * 64 : 0;
  int K_slab = D == 128 ? warpgroup * Bc * 64 : 0;
  dq += warp * DQ_PER_WARP + lane * 4;
  DqSemaphore semaphore{counters + 1};

  KeyTile j = tile_of(0);
  if (threadIdx.x == 0) {
    load_keys(j);
    load_values(j);
  }
  int step = 0;  // counted over all tiles
  while (j.tile >= 0) {
    KeyTile next = PERSISTENT ? tile_of(j.round + 1) : KeyTile();
    // The step that comes `steps` (0 or 1) steps after j; it may be one of the next tile.
    auto later = [&](int steps) {
      bool ends = j.steps == 0;
      KeyTile ahead = ends ? next : j;
      for (int s = 0; s < steps; s++) {
        go_on(ahead);
        if (!ends && ahead.steps == 0) ahead = next;
      }
      return ahead;
    };
    // Each step loads the queries of the step STAGES - 1 later. So after the first round there is something
    // to load here only if this tile has fewer steps: the queries of the next tile, which the tile before
    // could not load.
    for (int s = j.round > 0 ? j.steps : 0; s < STAGES - 1; s++) {
      KeyTile ahead = later(s);
      if (threadIdx.x == 0 && ahead.steps > 0) load_queries(ahead, (step + s) % STAGES);
    }

    // This lane has the keys `key` and `key + 8`. The queries from seen_from_0 on see the first one, those
    // from seen_from_1 on the second; no query sees a key that does not exist. Both are counted from the
    // lane's first query, as `mask` expects.
    int key = j.tile * Bc + row;
    int seen_from_0 = (key >= Nk ? Nq + Br : causal ? key - (Nk - Nq) : 0) - column;
    int seen_from_1 = (key + 8 >= Nk ? Nq + Br : causal ? key + 8 - (Nk - Nq) : 0) - column;
    // The queries from masked_below on see all keys of this tile. Those below it need the mask.
    int masked_below = j.tile * Bc + Bc > Nk ? Nq : causal ? j.tile * Bc + Bc - 1 - (Nk - Nq) : 0;

    Shared<T> K_j = K + j.round % KEY_STAGES * Bc * D;
    float dK[D / 2] = {}, dV[D / 2] = {};
    uint32_t K_rows[D / 16][4], V_rows[D / 16][4];  // the warp's 16 rows of K_j and V_j
    barrier_wait(keys_full + j.round % KEY_STAGES, j.round / KEY_STAGES % 2);
    load_rows(K_rows, K_j, 16 * warp);
    barrier_wait(values_full, j.round % 2);
    if (V_IN_REGISTERS) load_rows(V_rows, V, 16 * warp);
    if (PERSISTENT) {
      if (lane == 0) bulk_wait_read<0>();
      __syncthreads();  // V_j is in registers, and the last tile's dK and dV have left shared memory
      if (threadIdx.x == 0 && next.tile >= 0) {
        load_keys(next);
        if (V_IN_REGISTERS) load_values(next);
      }
    }
    for (; j.steps; step++) {
      int stage = step % STAGES;
      Shared<T> Q_i = Q + stage * Br * D, dO_i = dO + stage * Br * D;
      Shared<T> dS_t = dS_i + step % 2 * Br * Bc;
      float S[Br / 2], dP[Br / 2], dQ[32];
      uint32_t P[Br / 16][4], dS[Br / 16][4];

      barrier_wait(queries_full + stage, step / STAGES % 2);
      start_product(S, K_rows, Q_i);  // S^T = K_j Q_i^T
      if (V_IN_REGISTERS) start_product(dP, V_rows, dO_i);  // dP^T = V_j dO_i^T
      else start_product(dP, V + warpgroup * 64 * 64, dO_i);
      int64_t dq_tile = int64_t(j.batch * H + j.head) * query_tiles + j.i;
      semaphore.wait(dq_tile, blocks_before(j));  // here, because the products run meanwhile
      wgmma_wait<1>();                             // S^T is there
      if (j.i * Br < masked_below) mask(S, seen_from_0 - j.i * Br, seen_from_1 - j.i * Br);
      probabilities(P, S, lse_i + (stage * Br + column), scale * LOG2_E);
      wgmma_wait<0>();  // dP^T is there
      score_gradients(dS, P, dP, delta_i + (stage * Br + column));
      store_tile<Br>(dS_t, Bc, 16 * warp, dS);
      fence_async();
      if (!DETERMINISTIC) start_product(dV, P, dO_i);  // dV_j += P^T dO_i
      __syncthreads();  // both warpgroups have written dS^T, and all products of the tile before have ended
      go_on(j);
      KeyTile ahead = later(STAGES - 2);
      if (threadIdx.x == 0 && ahead.steps > 0) load_queries(ahead, (step + STAGES - 1) % STAGES);

      start_dQ(dQ, dS_t + dS_slab, K_j + K_slab);  // dQ_i = dS_i K_j
      if (DETERMINISTIC) start_product(dV, P, dO_i);
      start_product(dK, dS, Q_i);  // dK_j += dS^T Q_i
      semaphore.release(dq_tile);
      wgmma_wait<DETERMINISTIC ? 2 : 1>();  // dQ_i is there
      add_dQ(dq + dq_tile * Br * D, dQ);
      wgmma_wait<0>();
    }
    __syncthreads();  // nobody still reads dS_i, V or K_j
    semaphore.release(-1);
    if (!V_IN_REGISTERS && threadIdx.x == 0 && next.tile >= 0) load_values(next);
    // dV_j overwrites dS_i. dK_j overwrites dS_i, too, if D = 64, and K_j if D = 128.
    Shared<T> dV_rows = dS_i + warp * 16 * D;
    Shared<T> dK_rows = (D == 64 ? dS_i + Bc * D : K_j) + warp * 16 * D;
    store_rows(dv_map, dV_rows, dV, 1, j.tile * Bc + 16 * warp, j.part, j.batch);
    store_rows(dk_map, dK_rows, dK, scale, j.tile * Bc + 16 * warp, j.part, j.batch);
    j = next;
  }
  if (lane == 0) bulk_wait_read<0>();  // shared memory must exist until the copy engine has read it
}

// out (B, H, Nq, D) = scale * dq in 16 bits. A warp's part of a tile of dq is stored as [i][lane][4]. The
// four numbers are the rows lane / 4 and lane / 4 + 8, and in each of them the columns 8 i + lane % 4 * 2 and
// the next one. A thread reads the numbers of four neighbouring lanes, which are 8 columns of two rows.
extern "C" __global__ void __launch_bounds__(256) attention_dq(
    Global<const float> dq, Global<T> out, int Nq, float scale) {
  int block = gridDim.x - 1 - blockIdx.x;  // from the last tile to the first
  int tiles = (Nq + Br - 1) / Br;
  int tile = block % tiles;
  out += int64_t(block / tiles) * Nq * D;
  dq += int64_t(block) * Br * D;
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
