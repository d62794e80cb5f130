// SPDX-License-Identifier: MIT
// Rung 1, "fa2": the tensor cores. A block owns Bc keys, as before, and its warps share every product.
//
//   delta = rowsum(dO * O), lse * log2(e)      a kernel of its own
//   dK_j = 0, dV_j = 0                         in registers, spread over the block's threads; K_j, V_j stay in shared memory
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
// dk and dv are bit-equal from run to run. dq is, too, if `deterministic`: then the blocks take turns at each dQ_i.
//
// Compiled for T (bf16 or fp16), D, a tile Br x Bc and Warps (macros); D a multiple of 32, Br >= 16 and Bc >= 32 powers of 2 with
// Bc <= 4 * Br, Nq * D < 2^31. FlashAttention-2's choice, with 8 warps: 128 x 128 for D = 64, 64 x 128 for D = 128, 64 x 64 for
// D = 256. dK and dV take Bc * D / (16 * Warps) registers of a thread. Launch: attention_delta with grid
// ceil(Rows / (2048 / D)) * H * B, for D = 96 ceil(Rows / 16) * H * B, block 256; attention_backward with grid
// ceil(Nk / Bc) * (H / group) * B, block 32 * Warps, and 2 * (2 * Bc * D + 4 * Br * D + 2 * Br * Bc) + 16 * Br bytes of dynamic
// shared memory; attention_dq with grid ceil(Nq * D / 1024) * H * B, block 256. sm_80; sm_75 in fp16. Needs ptx.cuh.
// Spill budget: 64 bytes. With D = 64, S, dP, dK and dV take 192 of 255 registers, and some addresses, needed once a step, yield.
// Left out: Hopper's tensor cores, which take their operands from shared memory without ldmatrix (rung 2).
// The limit: a block fills a multiprocessor, so that all of its warps wait at each of the two barriers a step.
#include "ptx.cuh"

constexpr int Threads = 32 * Warps;
constexpr int row_lanes = D == 96 ? 16 : D / 8;  // threads that share a row of D numbers, 8 each; of 16, the last 4 have none
constexpr float log2_e = 1.4426950408889634f;

// Where a tile in shared memory keeps a row's 16-byte chunks: its column XOR this. 8 rows' chunks of one column then lie in 8
// different groups of banks, so that ldmatrix reads them at once.
template <int Width> __device__ int swizzle(int row) { return 8 * (Width % 64 ? row / 2 % 4 : row % 8); }
template <int Width> __device__ int at(int row, int column) { return row * Width + (column ^ swizzle<Width>(row)); }

// A warp's part of a product of M x N: the block's warps form a grid, with 32 rows for each if that leaves whole 16 x 16 pieces.
// Lane t holds of the piece of 16 x 8 at [m][n] the rows t / 4, + 8 and the columns 2 * (t % 4), + 1.
template <int M, int N> struct Part {
  static constexpr int rows_of_warps() {
    int w = M > 32 ? M / 32 : 1;
    while (N % (Warps / w * 16)) w *= 2;
    return w;
  }
  static constexpr int down = rows_of_warps(), rows = M / down, columns = N / (Warps / down);
  float x[rows / 16][columns / 8][4] = {};

  __device__ static int row() { return threadIdx.x / 32 % down * rows; }
  __device__ static int column() { return threadIdx.x / 32 / down * columns; }

  // x = f(x, its row, its column) for each number x of this lane
  template <class F> __device__ void each(F f) {
    int r = row() + threadIdx.x % 32 / 4, c = column() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < rows / 16; m++)
#pragma unroll
      for (int n = 0; n < columns / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[m][n][e] = f(x[m][n][e], r + 16 * m + e / 2 * 8, c + 8 * n + e % 2);
  }

  __device__ void multiply(const Part& other) {
#pragma unroll
    for (int m = 0; m < rows / 16; m++)
#pragma unroll
      for (int n = 0; n < columns / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[m][n][e] *= other.x[m][n][e];
  }
};

// Where ldmatrix finds a 16 x 16 piece at (row, column) of a tile: the address that this lane gives, its row of one of four 8 x 8
// matrices. They are numbered down the columns first, or along the rows first.
template <int Width> __device__ Shared<T> down_first(Shared<T> tile, int row, int column) {
  int t = threadIdx.x % 32, r = t % 16, c = t / 16 * 8 ^ swizzle<Width>(r);
  return tile + r * Width + (column ^ c) + row * Width;
}
template <int Width> __device__ Shared<T> along_first(Shared<T> tile, int row, int column) {
  int t = threadIdx.x % 32, r = t / 16 * 8 + t % 8, c = t / 8 % 2 * 8 ^ swizzle<Width>(r);
  return tile + r * Width + (column ^ c) + row * Width;
}

// C += A B, all in shared memory as they are stored; or, of A and B that are stored transposed, C += A^T B and C += A B^T.
template <int K, bool A_transposed, bool B_transposed, int M, int N>
__device__ void add_product(Part<M, N>& C, Shared<T> A, Shared<T> B) {
  constexpr int pieces_down = Part<M, N>::rows / 16, pieces_across = Part<M, N>::columns / 16;
  A += A_transposed ? 0 : C.row() * K;
  B += B_transposed ? C.column() * K : 0;
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    uint32_t a[pieces_down][4], b[pieces_across][4];
#pragma unroll
    for (int m = 0; m < pieces_down; m++) {
      if (A_transposed) ldmatrix_x4_trans(a[m], along_first<M>(A, k, C.row() + 16 * m));
      else ldmatrix_x4(a[m], down_first<K>(A, 16 * m, k));
    }
#pragma unroll
    for (int n = 0; n < pieces_across; n++) {
      if (B_transposed) ldmatrix_x4(b[n], along_first<K>(B, 16 * n, k));
      else ldmatrix_x4_trans(b[n], down_first<N>(B, k, C.column() + 16 * n));
    }
#pragma unroll
    for (int m = 0; m < pieces_down; m++)
#pragma unroll
      for (int n = 0; n < pieces_across; n++) {
        mma<T>(C.x[m][2 * n], a[m], b[n][0], b[n][1]);
        mma<T>(C.x[m][2 * n + 1], a[m], b[n][2], b[n][3]);
      }
  }
}

// Writes a product to shared memory, rounded to 16 bits: 4 bytes a lane, no two lanes of a warp in one bank.
template <int M, int N> __device__ void store_tile(Shared<T> tile, const Part<M, N>& C) {
  int r = C.row() + threadIdx.x % 32 / 4, c = C.column() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < C.rows / 16; m++)
#pragma unroll
    for (int n = 0; n < C.columns / 8; n++) {
      store_pair(tile + at<N>(r + 16 * m, c + 8 * n), pack<T>(C.x[m][n][0], C.x[m][n][1]));
      store_pair(tile + at<N>(r + 16 * m + 8, c + 8 * n), pack<T>(C.x[m][n][2], C.x[m][n][3]));
    }
}

// The same times a factor to global memory, as many rows as there are.
template <int M, int N> __device__ void store_rows(Global<T> to, const Part<M, N>& C, int rows, float factor) {
  int r = C.row() + threadIdx.x % 32 / 4, c = C.column() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < C.rows / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = r + 16 * m + 8 * half;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < C.columns / 8; n++) {
        const float(&x)[4] = C.x[m][n];
        store_pair(to + int64_t(row) * N + c + 8 * n, pack<T>(factor * x[2 * half], factor * x[2 * half + 1]));
      }
    }
}

// Starts to copy Rows rows of D numbers to shared memory, x's from `first` on, 16 bytes a thread and turn; zeros from `rows` on.
template <int Rows> __device__ void load_tile(Shared<T> tile, Global<const T> x, int64_t stride, int first, int rows) {
  int row = threadIdx.x / row_lanes, column = threadIdx.x % row_lanes * 8;
  x += (first + row) * stride + column;
#pragma unroll
  for (int n = 0; n < Rows; n += Threads / row_lanes)
    if (row_lanes == D / 8 || column < D)
      cp_async_16(tile + row * D + (column ^ swizzle<D>(row + n)) + n * D, x + n * stride, first + row + n < rows);
}

__device__ void load_column(Shared<float> column, Global<const float> x) {
  if (threadIdx.x < Br / 4) cp_async_16(column + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
}

// dQ_i += dS K_j in float32. One atomic addition of 16 bytes takes the columns c, c + 1, c + 8, c + 9, the four of 16 that a lane
// has; they lie side by side in dq, whose columns are permuted so until attention_dq.
__device__ void add_dQ(Global<float> dq, const Part<Br, D>& dQ) {
  dq += (dQ.row() + threadIdx.x % 32 / 4) * D + dQ.column() + threadIdx.x % 4 * 4;
#pragma unroll
  for (int m = 0; m < dQ.rows / 16; m++)
#pragma unroll
    for (int n = 0; n < dQ.columns / 8; n += 2) {
      const float(&x)[4] = dQ.x[m][n], (&y)[4] = dQ.x[m][n + 1];
      atomic_add_4(dq + 16 * m * D + 8 * n, x[0], x[1], y[0], y[1]);
      atomic_add_4(dq + (16 * m + 8) * D + 8 * n, x[2], x[3], y[2], y[3]);
    }
}

// `deterministic`: a dQ_i takes the keys' tiles in their order. turn counts those that it has taken.
__device__ void wait_for_turn(Global<int> turn, int tile) {
  if (threadIdx.x == 0) {
    while (atomicAdd(&turn[0], 0) != tile) {
    }
    __threadfence();  // what the blocks before have added comes before what follows
  }
  __syncthreads();  // the other threads wait for thread 0
}

__device__ void pass_turn_on(Global<int> turn) {
  __threadfence();  // this thread's additions come before the turn
  __syncthreads();  // all threads' have been made
  if (threadIdx.x == 0) atomicAdd(&turn[0], 1);
}

// blockIdx.x; or, if blocks wait for those before them, the number of blocks that have started before this one: a GPU
// does not promise to start them in the order of blockIdx.x.
__device__ int block_number(Global<int> started, Shared<float> number, int deterministic) {
  if (!deterministic) return blockIdx.x;
  if (threadIdx.x == 0) number[0] = __int_as_float(atomicAdd(&started[0], 1));
  __syncthreads();  // thread 0 has written the number
  return __float_as_int(number[0]);
}

// delta = rowsum(dout * out) and lse * log2(e), (B, H, Rows), Rows being Nq rounded up to whole tiles. A row without keys has
// lse = -inf; there, and from Nq on, lse becomes +inf, so that P = exp2(... - lse) = 0.
extern "C" __global__ void __launch_bounds__(256) attention_delta(
    Global<const T> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const T> out, int64_t out_batch, int64_t out_head, int64_t out_row,
    Global<const float> lse, Global<float> lse_2, Global<float> delta, int H, int Nq, int Rows) {
  constexpr int rows = 256 / row_lanes;  // of a block
  int tiles = (Rows + rows - 1) / rows, head = blockIdx.x / tiles % H, batch = blockIdx.x / tiles / H;
  int i = blockIdx.x % tiles * rows + threadIdx.x / row_lanes, lane = threadIdx.x % row_lanes;
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
  for (int other = 1; other < row_lanes; other *= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
  if (i < Rows && lane == 0) {
    int64_t row = int64_t(blockIdx.x / tiles);
    float l = i < Nq ? lse[row * Nq + i] : -INFINITY;
    delta[row * Rows + i] = sum;
    lse_2[row * Rows + i] = l == -INFINITY ? INFINITY : l * log2_e;
  }
}

// dout and q (B, H, Nq, D), k and v (B, H / group, Nk, D) with any strides (in elements; D contiguous, rows at multiples of
// 16 bytes); lse_2 and delta of attention_delta; dq (B, H, Rows, D), zero at the start; dk, dv (B, H / group, Nk, D) contiguous;
// turns, if deterministic, 1 + B * H * ceil(Nq / Br) zeros.
extern "C" __global__ void __launch_bounds__(Threads) attention_backward(
    Global<const T> dout, int64_t dout_batch, int64_t dout_head, int64_t dout_row,
    Global<const T> q, int64_t q_batch, int64_t q_head, int64_t q_row,
    Global<const T> k, int64_t k_batch, int64_t k_head, int64_t k_row,
    Global<const T> v, int64_t v_batch, int64_t v_head, int64_t v_row,
    Global<const float> lse_2, Global<const float> delta, Global<float> dq, Global<T> dk, Global<T> dv, Global<int> turns,
    int H, int group, int Nq, int Nk, float scale, int causal, int deterministic) {
  SharedMemory smem;
  Shared<T> K = smem.array<T>(Bc * D), V = smem.array<T>(Bc * D);
  Shared<T> Q = smem.array<T>(2 * Br * D), dO = smem.array<T>(2 * Br * D);  // two buffers each
  Shared<T> P_i = smem.array<T>(Br * Bc), dS_i = smem.array<T>(Br * Bc);
  Shared<float> lse_i = smem.array<float>(2 * Br), delta_i = smem.array<float>(2 * Br);

  // The number goes where nothing else is written before the first step's barrier. Of a head, the first keys come first: with a
  // causal mask they have the most queries.
  int block = block_number(turns, delta_i + Br, deterministic);
  int tiles = (Nk + Bc - 1) / Bc, Hk = H / group, tile = block % tiles, head_k = block / tiles % Hk, batch = block / tiles / Hk;
  int keys = min(Bc, Nk - tile * Bc), query_tiles = (Nq + Br - 1) / Br;
  k += batch * k_batch + head_k * k_head;
  v += batch * v_batch + head_k * v_head;

  // Causal is aligned at the bottom right: query i sees the keys up to i + Nk - Nq, of this tile those below i + sees.
  int sees = causal ? Nk - Nq - tile * Bc + 1 : Bc;
  int first = max(0, 1 - sees) / Br * Br, last = (query_tiles - 1) * Br;  // the first tile of queries that sees a key, the last
  int steps = ((last - first) / Br + 1) * group;

  auto load_queries = [&](int buffer, int head, int i) {
    int64_t column = (int64_t(batch) * H + head) * query_tiles * Br + i;
    load_tile<Br>(Q + buffer * Br * D, q + batch * q_batch + head * q_head, q_row, i, Nq);
    load_tile<Br>(dO + buffer * Br * D, dout + batch * dout_batch + head * dout_head, dout_row, i, Nq);
    load_column(lse_i + buffer * Br, lse_2 + column);
    load_column(delta_i + buffer * Br, delta + column);
    cp_async_commit();
  };

  int head = head_k * group, i = last;
  load_tile<Bc>(K, k, k_row, tile * Bc, Nk);
  load_tile<Bc>(V, v, v_row, tile * Bc, Nk);
  load_queries(0, head, i);

  Part<Bc, D> dK, dV;
  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    __syncthreads();  // everyone's copies have landed; and everyone is done with the step before, its P, dS and buffer
    int buffer = step % 2, next_i = i > first ? i - Br : last, next_head = i > first ? head : head + 1;
    if (step + 1 < steps) load_queries(1 - buffer, next_head, next_i);
    Shared<T> Q_i = Q + buffer * Br * D, dO_i = dO + buffer * Br * D;
    Shared<float> l = lse_i + buffer * Br, d = delta_i + buffer * Br;

    // Whether some query of the tile does not see some key: only then every score is looked at.
    bool masked = keys < Bc || i + sees < Bc;

    Part<Br, Bc> P, dS;  // at first S and dP
    add_product<D, false, true>(P, Q_i, K);
    add_product<D, false, true>(dS, dO_i, V);
    P.each([&](float s, int row, int) { return exp2_approx(s * (scale * log2_e) - l[row]); });
    if (masked) P.each([&](float p, int row, int column) { return column < min(keys, i + row + sees) ? p : 0; });
    store_tile(P_i, P);
    dS.each([&](float dp, int row, int) { return dp - d[row]; });
    dS.multiply(P);
    store_tile(dS_i, dS);
    __syncthreads();  // P and dS are complete

    add_product<Br, true, false>(dV, P_i, dO_i);
    Part<Br, D> dQ;
    add_product<Bc, false, false>(dQ, dS_i, K);
    Global<int> turn = turns + (1 + (int64_t(batch) * H + head) * query_tiles + i / Br);
    if (deterministic) wait_for_turn(turn, tile);
    add_dQ(dq + ((int64_t(batch) * H + head) * query_tiles * Br + i) * D, dQ);
    add_product<Br, true, false>(dK, dS_i, Q_i);
    if (deterministic) pass_turn_on(turn);  // only now: by now the additions have arrived
    i = next_i, head = next_head;
  }
  int64_t first_key = (int64_t(batch) * Hk + head_k) * Nk + tile * Bc;
  store_rows(dk + first_key * D, dK, keys, scale);
  store_rows(dv + first_key * D, dV, keys, 1);
}

// out (B, H, Nq, D) = scale * dq in 16 bits, with the columns in their order again (see add_dQ). A thread takes four neighbours.
extern "C" __global__ void __launch_bounds__(256) attention_dq(
    Global<const float> dq, Global<T> out, int Nq, int Rows, float scale) {
  int blocks = (Nq * D + 1023) / 1024, e = (blockIdx.x % blocks * 256 + threadIdx.x) * 4;
  int64_t head = blockIdx.x / blocks;
  if (e >= Nq * D) return;
  uint32_t x[4];
  load_16(x, dq + head * Rows * D + e);
  Global<T> to = out + head * Nq * D + e / 16 * 16 + e % 16 / 2;
  store_pair(to, pack<T>(scale * __uint_as_float(x[0]), scale * __uint_as_float(x[1])));
  store_pair(to + 8, pack<T>(scale * __uint_as_float(x[2]), scale * __uint_as_float(x[3])));
}
