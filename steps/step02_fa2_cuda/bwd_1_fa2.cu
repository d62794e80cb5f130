// SPDX-License-Identifier: MIT
// Rung 1, "fa2": the tensor cores. A block owns Bc keys, as in rung 0, and its warps share every product.
//
//   delta = rowsum(dO * O), lse * log2(e)      a kernel of its own
//   K_j and V_j in shared memory; dK_j = 0, dV_j = 0 in registers, spread over the block's threads
//   for each query head that uses these keys, for each tile of Br queries, from the last to the first:
//     (Q, dO, lse, delta of the next tile are on their way: cp.async into the other of two buffers)
//     S    = Q_i K_j^T, dP = dO_i V_j^T
//     P    = exp2(scale * log2(e) * S - lse_i)
//     dS   = P * (dP - delta_i)
//     P and dS go to shared memory in 16 bits, because the next products sum over what other warps hold
//     dV_j += P^T dO_i                         ldmatrix.trans reads the transpose
//     dQ_i += dS K_j                           atomic additions in float32
//     dK_j += dS^T Q_i
//   dQ * scale in 16 bits                      a kernel of its own
//
// Few keys that many query heads use would give too few blocks to fill a GPU. If HEADS_APART, a block
// therefore takes one query head alone, and the host adds up the parts of dk and dv.
//
// dk and dv are bit-equal from run to run. If `deterministic`, the blocks add to each dQ_i one after the
// other, in the order of their keys, and then dq, too, is bit-equal.
//
// Parameters, which are macros:
//   T              bf16 or fp16: the type of q, k, v and their gradients
//   D              the head_dim, a multiple of 32; Nq * D < 2^31
//   Br             queries of a tile, a power of 2 from 16 on: FlashAttention-2's 128, or 64 from D = 128 on
//   Bc             keys of a block, a power of 2 from 32 on, Bc <= 4 * Br: 128, or 64 for D = 256
//   WARPS          8 for these tiles, because dK and dV take Bc * D / (16 * WARPS) registers of a thread
//   HEADS_APART    1 or 0, as above
//
// sm_80; sm_75 in fp16. Needs ptx.cuh.
// Launch: attention_delta with grid ceil(padded_rows / (2048 / D)) * H * B, for D = 96
// ceil(padded_rows / 16) * H * B, where padded_rows is Nq rounded up to whole tiles, block 256;
// attention_backward with grid ceil(Nk / Bc) * parts * B, where parts is H if HEADS_APART, else H / group,
// block 32 * WARPS, and
// 2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 16 * Br bytes of dynamic shared memory; attention_dq with
// grid ceil(Nq * D / 1024) * H * B, block 256.
// Spill budget: 64 bytes. With D = 64, S, dP, dK and dV take 192 of 255 registers, so that some addresses,
// which are needed once a step, wait in memory.
// Left out: Hopper's tensor cores, which take their operands from shared memory without ldmatrix (rung 2).
// Bottleneck: a block fills a multiprocessor, so that all of its warps wait at each of the two barriers of a
// step.
#include "ptx.cuh"

constexpr int THREADS = 32 * WARPS;
// Threads that share a row of D numbers, 8 numbers each. For D = 96 there are 16, and the last 4 of them have
// none.
constexpr int ROW_LANES = D == 96 ? 16 : D / 8;
constexpr float LOG2_E = 1.4426950408889634f;

// A tile in shared memory is swizzled: in a row, a chunk of 16 bytes lies at its column XOR swizzle(row). 8
// neighbouring rows then have the same chunk in 8 different groups of banks, so that ldmatrix reads it from
// all of them at once.
template <int WIDTH> __device__ int swizzle(int row) { return 8 * (WIDTH % 64 ? row / 2 % 4 : row % 8); }
template <int WIDTH> __device__ int at(int row, int column) {
  return row * WIDTH + (column ^ swizzle<WIDTH>(row));
}

// A warp's part of a product of M x N. The block's warps form a grid over the product. A warp has 32 rows of
// it, or fewer if its columns would not be whole pieces of 16 x 16 otherwise. Of the piece of 16 x 8 at
// x[m][n], lane t holds the rows t / 4 and t / 4 + 8, and of each the columns 2 * (t % 4) and the next one.
template <int M, int N> struct Part {
  static constexpr int rows_of_warps() {
    int w = M > 32 ? M / 32 : 1;
    while (N % (WARPS / w * 16)) w *= 2;
    return w;
  }
  static constexpr int WARP_ROWS = rows_of_warps();        // rows of the grid of warps
  static constexpr int ROWS = M / WARP_ROWS;               // rows of the product that a warp has
  static constexpr int COLUMNS = N / (WARPS / WARP_ROWS);  // columns of the product that a warp has
  float x[ROWS / 16][COLUMNS / 8][4] = {};

  __device__ static int row() { return threadIdx.x / 32 % WARP_ROWS * ROWS; }
  __device__ static int column() { return threadIdx.x / 32 / WARP_ROWS * COLUMNS; }

  // Sets x = f(x, its row, its column) for each number x of this lane.
  template <class F> __device__ void each(F f) {
    int r = row() + threadIdx.x % 32 / 4, c = column() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[m][n][e] = f(x[m][n][e], r + 16 * m + e / 2 * 8, c + 8 * n + e % 2);
  }

  __device__ void multiply(const Part& other) {
#pragma unroll
    for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[m][n][e] *= other.x[m][n][e];
  }
};

// The address that this lane gives to ldmatrix for the 16 x 16 piece at (row, column) of a tile: a row of one
// of the piece's four 8 x 8 matrices. `mma` wants the four matrices in a fixed order. For an operand that is
// stored as it is multiplied, that is the order down the columns of the piece; for an operand that is stored
// transposed, the order along its rows.
template <int WIDTH> __device__ Shared<T> lane_row(Shared<T> tile, int row, int column) {
  int t = threadIdx.x % 32;
  int r = t % 16;
  int c = t / 16 * 8 ^ swizzle<WIDTH>(r);
  return tile + r * WIDTH + (column ^ c) + row * WIDTH;
}
template <int WIDTH> __device__ Shared<T> lane_row_transposed(Shared<T> tile, int row, int column) {
  int t = threadIdx.x % 32;
  int r = t / 16 * 8 + t % 8;
  int c = t / 8 % 2 * 8 ^ swizzle<WIDTH>(r);
  return tile + r * WIDTH + (column ^ c) + row * WIDTH;
}

// C += A B, with the M x K matrix A and the K x N matrix B in shared memory. A_TRANSPOSED and B_TRANSPOSED
// say that the tile holds the transpose of A, or of B. `mma` wants pairs of neighbours along K. Where these
// lie in a column of the tile, ldmatrix.trans transposes them on the way.
template <int K, bool A_TRANSPOSED, bool B_TRANSPOSED, int M, int N>
__device__ void add_product(Part<M, N>& C, Shared<T> A, Shared<T> B) {
  constexpr int PIECES_DOWN = Part<M, N>::ROWS / 16, PIECES_ACROSS = Part<M, N>::COLUMNS / 16;
  A += A_TRANSPOSED ? 0 : C.row() * K;
  B += B_TRANSPOSED ? C.column() * K : 0;
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    uint32_t a[PIECES_DOWN][4], b[PIECES_ACROSS][4];
#pragma unroll
    for (int m = 0; m < PIECES_DOWN; m++) {
      if (A_TRANSPOSED) ldmatrix_x4_trans(a[m], lane_row_transposed<M>(A, k, C.row() + 16 * m));
      else ldmatrix_x4(a[m], lane_row<K>(A, 16 * m, k));
    }
#pragma unroll
    for (int n = 0; n < PIECES_ACROSS; n++) {
      if (B_TRANSPOSED) ldmatrix_x4(b[n], lane_row_transposed<K>(B, 16 * n, k));
      else ldmatrix_x4_trans(b[n], lane_row<N>(B, k, C.column() + 16 * n));
    }
#pragma unroll
    for (int m = 0; m < PIECES_DOWN; m++)
#pragma unroll
      for (int n = 0; n < PIECES_ACROSS; n++) {
        mma<T>(C.x[m][2 * n], a[m], b[n][0], b[n][1]);
        mma<T>(C.x[m][2 * n + 1], a[m], b[n][2], b[n][3]);
      }
  }
}

// Stores a product in shared memory, rounded to 16 bits. A lane stores 4 bytes at a time, without bank
// conflicts.
template <int M, int N> __device__ void store_tile(Shared<T> tile, const Part<M, N>& C) {
  int r = C.row() + threadIdx.x % 32 / 4, c = C.column() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < C.ROWS / 16; m++)
#pragma unroll
    for (int n = 0; n < C.COLUMNS / 8; n++) {
      store_pair(tile + at<N>(r + 16 * m, c + 8 * n), pack<T>(C.x[m][n][0], C.x[m][n][1]));
      store_pair(tile + at<N>(r + 16 * m + 8, c + 8 * n), pack<T>(C.x[m][n][2], C.x[m][n][3]));
    }
}

// Stores a product times a factor in global memory, rounded to 16 bits; only rows below `rows` exist there.
template <int M, int N>
__device__ void store_rows(Global<T> to, const Part<M, N>& C, int rows, float factor) {
  int r = C.row() + threadIdx.x % 32 / 4, c = C.column() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < C.ROWS / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = r + 16 * m + 8 * half;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < C.COLUMNS / 8; n++) {
        const float(&x)[4] = C.x[m][n];
        store_pair(to + int64_t(row) * N + c + 8 * n,
                   pack<T>(factor * x[2 * half], factor * x[2 * half + 1]));
      }
    }
}

// Starts to copy the rows first .. first + ROWS - 1 of x to the tile, with zeros from row `rows` on. In each
// iteration a thread copies 16 bytes.
template <int ROWS>
__device__ void load_tile(Shared<T> tile, Global<const T> x, int64_t stride, int first, int rows) {
  int row = threadIdx.x / ROW_LANES, column = threadIdx.x % ROW_LANES * 8;
  x += (first + row) * stride + column;
#pragma unroll
  for (int n = 0; n < ROWS; n += THREADS / ROW_LANES)
    if (ROW_LANES == D / 8 || column < D)
      cp_async_16(tile + row * D + (column ^ swizzle<D>(row + n)) + n * D, x + n * stride,
                  first + row + n < rows);
}

// Starts to copy Br numbers, one for each query of a tile.
__device__ void load_column(Shared<float> column, Global<const float> x) {
  if (threadIdx.x < Br / 4) cp_async_16(column + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
}

// Adds a product to dQ_i in float32. Of every 16 columns a lane has four, c, c + 1, c + 8 and c + 9, and adds
// them by one atomic addition of 16 bytes. For this the four lie side by side in dq, whose columns stay in
// this order until attention_dq.
__device__ void add_dQ(Global<float> dq, const Part<Br, D>& dQ) {
  dq += (dQ.row() + threadIdx.x % 32 / 4) * D + dQ.column() + threadIdx.x % 4 * 4;
#pragma unroll
  for (int m = 0; m < dQ.ROWS / 16; m++)
#pragma unroll
    for (int n = 0; n < dQ.COLUMNS / 8; n += 2) {
      const float(&x)[4] = dQ.x[m][n], (&y)[4] = dQ.x[m][n + 1];
      atomic_add_4(dq + 16 * m * D + 8 * n, x[0], x[1], y[0], y[1]);
      atomic_add_4(dq + (16 * m + 8) * D + 8 * n, x[2], x[3], y[2], y[3]);
    }
}

// If `deterministic`, the tiles of keys are added to a dQ_i in their order. `added` counts the tiles that
// have been added to it, and a block waits until that is the number of its own tile.
__device__ void wait_for_turn(Global<int> added, int tile) {
  if (threadIdx.x == 0) {
    while (atomicAdd(&added[0], 0) != tile) {
    }
    __threadfence();  // the earlier blocks' additions become visible before those that follow here
  }
  __syncthreads();  // the other threads wait for thread 0
}

__device__ void pass_turn_on(Global<int> added) {
  __threadfence();  // this thread's additions come before the next block's turn
  __syncthreads();  // all threads of the block have made their additions
  if (threadIdx.x == 0) atomicAdd(&added[0], 1);
}

// The number of this block. It is blockIdx.x, but if blocks wait for each other it is the number of blocks
// that started earlier. A GPU does not promise to start the blocks in the order of blockIdx.x, and a block
// must not wait for one that has not started.
__device__ int block_number(Global<int> started, Shared<float> number, int deterministic) {
  if (!deterministic) return blockIdx.x;
  if (threadIdx.x == 0) number[0] = __int_as_float(atomicAdd(&started[0], 1));
  __syncthreads();  // thread 0 has written the number
  return __float_as_int(number[0]);
}

// Computes delta = rowsum(dout * out) and lse_2 = lse * log2(e), both (B, H, padded_rows), which is Nq
// rounded up to whole tiles. lse of a row that saw no key is -inf. For such a row, and for the rows from Nq
// on, lse_2 becomes +inf, so that P = exp2(... - lse_2) = 0.
extern "C" __global__ void __launch_bounds__(256) attention_delta(
    Global<const T> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const T> out, int64_t out_batch, int64_t out_head, int64_t out_row,
    Global<const float> lse, Global<float> lse_2, Global<float> delta, int H, int Nq, int padded_rows) {
  constexpr int ROWS = 256 / ROW_LANES;  // of a block
  int tiles = (padded_rows + ROWS - 1) / ROWS;
  int head = blockIdx.x / tiles % H;
  int batch = blockIdx.x / tiles / H;
  int i = blockIdx.x % tiles * ROWS + threadIdx.x / ROW_LANES;
  int lane = threadIdx.x % ROW_LANES;  // of those that share the row
  float sum = 0;
  if (i < Nq && lane < D / 8) {
    uint32_t x[4], y[4];
    load_16(x, dout + batch * dout_batch + head * dout_head + i * dout_row + 8 * lane);
    load_16(y, out + batch * out_batch + head * out_head + i * out_row + 8 * lane);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      sum += to_float(T{uint16_t(x[e])}) * to_float(T{uint16_t(y[e])});
      sum += to_float(T{uint16_t(x[e] >> 16)}) * to_float(T{uint16_t(y[e] >> 16)});
    }
  }
#pragma unroll
  for (int other = 1; other < ROW_LANES; other *= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
  if (i < padded_rows && lane == 0) {
    int64_t row = int64_t(blockIdx.x / tiles);
    float l = i < Nq ? lse[row * Nq + i] : -INFINITY;
    delta[row * padded_rows + i] = sum;
    lse_2[row * padded_rows + i] = lse_in_base_2(l);
  }
}

// dout and q are (B, H, Nq, D), k and v are (B, H / group, Nk, D). Their strides, counted in elements, are
// arbitrary, but D is contiguous, and rows begin at multiples of 16 bytes. lse_2 and delta are those of
// attention_delta. dq (B, H, padded_rows, D) is zero at the start. dk and dv (B, parts, Nk, D) are
// contiguous. counters, if deterministic, are 1 + B * H * ceil(Nq / Br) zeros: one for the blocks that have
// started, and one for each dQ_i, for the tiles of keys that have been added to it.
extern "C" __global__ void __launch_bounds__(THREADS) attention_backward(
    Global<const T> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const T> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const T> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const T> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<const float> lse_2, Global<const float> delta,
    Global<float> dq, Global<T> dk, Global<T> dv, Global<int> counters,
    int H, int group, int Nq, int Nk, float scale, int causal, int deterministic) {
  SharedMemory smem;
  Shared<T> K = smem.array<T>(Bc * D), V = smem.array<T>(Bc * D);
  Shared<T> Q = smem.array<T>(2 * Br * D), dO = smem.array<T>(2 * Br * D);  // two buffers each
  Shared<T> P_i = smem.array<T>(Br * Bc), dS_i = smem.array<T>(Br * Bc);
  Shared<float> lse_i = smem.array<float>(2 * Br), delta_i = smem.array<float>(2 * Br);

  // block_number passes the number through a part of shared memory where nothing else is written before the
  // barrier of the first step. The tiles of a head are taken from the first to the last, because with a
  // causal mask the first keys have the most queries.
  int block = block_number(counters, delta_i + Br, deterministic);
  int tiles = (Nk + Bc - 1) / Bc;
  int own = HEADS_APART ? 1 : group;  // query heads that a block computes
  int parts = H / own;                // of dK and dV
  int tile = block % tiles;
  int part = block / tiles % parts;
  int head_k = HEADS_APART ? part / group : part;
  int batch = block / tiles / parts;
  int keys = min(Bc, Nk - tile * Bc);
  int query_tiles = (Nq + Br - 1) / Br;
  k += batch * k_batch + head_k * k_head;
  v += batch * v_batch + head_k * v_head;

  // The causal mask is aligned at the bottom right, so that query i sees the keys up to i + Nk - Nq. Of this
  // tile these are the keys below i + sees.
  int sees = causal ? Nk - Nq - tile * Bc + 1 : Bc;
  int first = max(0, 1 - sees) / Br * Br;  // the first tile of queries that sees a key of this tile
  int last = (query_tiles - 1) * Br;       // the last tile of queries
  int steps = ((last - first) / Br + 1) * own;

  auto load_queries = [&](int buffer, int head, int i) {
    int64_t column = (int64_t(batch) * H + head) * query_tiles * Br + i;
    load_tile<Br>(Q + buffer * Br * D, q + batch * q_batch + head * q_head, q_row, i, Nq);
    load_tile<Br>(dO + buffer * Br * D, dout + batch * dout_batch + head * dout_head, dout_row, i, Nq);
    load_column(lse_i + buffer * Br, lse_2 + column);
    load_column(delta_i + buffer * Br, delta + column);
    cp_async_commit();
  };

  int head = part * own, i = last;
  load_tile<Bc>(K, k, k_row, tile * Bc, Nk);
  load_tile<Bc>(V, v, v_row, tile * Bc, Nk);
  load_queries(0, head, i);

  Part<Bc, D> dK, dV;
  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    // The copies of all threads have arrived, and nobody still uses P, dS or the buffer of the last step.
    __syncthreads();
    int buffer = step % 2;
    int next_i = i > first ? i - Br : last;
    int next_head = i > first ? head : head + 1;
    if (step + 1 < steps) load_queries(1 - buffer, next_head, next_i);
    Shared<T> Q_i = Q + buffer * Br * D, dO_i = dO + buffer * Br * D;
    Shared<float> l = lse_i + buffer * Br, d = delta_i + buffer * Br;

    // Whether some query of the tile does not see some key. Only then does every score have to be compared.
    bool masked = keys < Bc || i + sees < Bc;

    Part<Br, Bc> P, dS;  // at first these are S and dP
    add_product<D, false, true>(P, Q_i, K);
    add_product<D, false, true>(dS, dO_i, V);
    P.each([&](float s, int row, int) { return exp2_approx(fminf(s * (scale * LOG2_E) - l[row], 0)); });
    if (masked)
      P.each([&](float p, int row, int column) { return column < min(keys, i + row + sees) ? p : 0; });
    store_tile(P_i, P);
    dS.each([&](float dp, int row, int) { return dp - d[row]; });
    dS.multiply(P);
    store_tile(dS_i, dS);
    __syncthreads();  // P and dS are complete

    add_product<Br, true, false>(dV, P_i, dO_i);
    Part<Br, D> dQ;
    add_product<Bc, false, false>(dQ, dS_i, K);
    Global<int> added = counters + (1 + (int64_t(batch) * H + head) * query_tiles + i / Br);
    if (deterministic) wait_for_turn(added, tile);
    add_dQ(dq + ((int64_t(batch) * H + head) * query_tiles * Br + i) * D, dQ);
    add_product<Br, true, false>(dK, dS_i, Q_i);
    if (deterministic) pass_turn_on(added);  // this late, because by now the additions have arrived
    head = next_head;
    i = next_i;
  }
  int64_t first_key = (int64_t(batch) * parts + part) * Nk + tile * Bc;
  store_rows(dk + first_key * D, dK, keys, scale);
  store_rows(dv + first_key * D, dV, keys, 1);
}

// out (B, H, Nq, D) = scale * dq in 16 bits, with the columns in their own order again, see add_dQ. A thread
// takes four neighbours of dq.
extern "C" __global__ void __launch_bounds__(256) attention_dq(
    Global<const float> dq, Global<T> out, int Nq, int padded_rows, float scale) {
  int64_t numbers = int64_t(Nq) * D;
  int64_t blocks = (numbers + 1023) / 1024;
  int64_t e = (blockIdx.x % blocks * 256 + threadIdx.x) * 4;
  int64_t head = blockIdx.x / blocks;
  if (e >= numbers) return;
  uint32_t x[4];
  load_16(x, dq + head * padded_rows * D + e);
  Global<T> to = out + head * numbers + e / 16 * 16 + e % 16 / 2;
  store_pair(to, pack<T>(scale * __uint_as_float(x[0]), scale * __uint_as_float(x[1])));
  store_pair(to + 8, pack<T>(scale * __uint_as_float(x[2]), scale * __uint_as_float(x[3])));
}
