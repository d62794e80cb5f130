// SPDX-License-Identifier: MIT
// Rung 8, "hopper": the tensor cores hardly wait. FlashAttention-3, section 3, and a little more.
//
// Parameters, which are macros. T, D, Br, Bc and CAUSAL are those of rung 7; each of the others is an idea,
// which 1 switches on and 0 off:
//   OVERLAP      A warpgroup starts S = Q K_j^T and O += P V_(j+1) together, and computes the exponentials of
//                S while the second product runs.
//   PINGPONG     The warpgroups start their products one after the other, so that the exponentials of one run
//                while the products of another do.
//   PERSISTENT   One block a multiprocessor computes tile after tile. The last O += P V of a tile starts with
//                the first S of the next tile (unless SKIP skips that block), and the stores of O run during
//                these products, so that the tensor cores do not wait between two tiles.
//   LAZY         O is rescaled only when the maximum of some row has grown by more than 8 in log2. Until then
//                P is at most 2^8, which does no harm. (FlashAttention-4, 2603.05451.)
//   SKIP         A warpgroup skips the blocks of keys that none of its own 64 rows sees, and all blocks if
//                its rows lie beyond the last query.
//   WIDE_STORES  The 4 lanes of a quad exchange their parts of a row, so that each lane stores 16 bytes at
//                once instead of 4 bytes four times.
//
// sm_90a. Needs ptx.cuh and wgmma.py's wrappers.
// Launch: block 128 + 2 * Br; grid one block a multiprocessor but not more than tiles, or without PERSISTENT
// ceil(Nq / Br) * H * B; (Q_STAGES * Br + 2 * STAGES * Bc) * ceil(D / 64) * 128 + 128 bytes of dynamic shared
// memory.
// Spill budget: 0 bytes.
#include "ptx.cuh"

#ifndef OVERLAP
#define OVERLAP 1
#endif
#ifndef PINGPONG
#define PINGPONG 1
#endif
#ifndef PERSISTENT
#define PERSISTENT 1
#endif
#ifndef LAZY
#define LAZY 1
#endif
#ifndef SKIP
#define SKIP 1
#endif
#ifndef WIDE_STORES
#define WIDE_STORES 1
#endif

constexpr int STAGES = D > 64 ? 2 : 3;     // tiles of K and of V: one in use, the others on their way
constexpr int Q_STAGES = D > 128 ? 1 : 2;  // tiles of Q: with 2, one is in use and one on its way
constexpr int SLABS = (D + 63) / 64;       // slabs of a tile; a slab has 64 columns, 128 bytes a row
constexpr int BOX = D % 64 ? 1 : SLABS;    // slabs that one copy brings
constexpr int V_SLAB = Bc * 128;           // bytes of a slab of V, the `leading` of its descriptor
static_assert(Br % 64 == 0 && Br <= 192 && Bc % 16 == 0,
              "1 to 3 warpgroups: more would wait for registers for ever");
constexpr int WARPGROUPS = Br / 64;        // consumers; each has 64 rows of Q
// The multiprocessor has 64K registers for 128 * (WARPGROUPS + 1) threads. The consumers get those
// that the producers do not need.
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 1 ? 56 : WARPGROUPS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1 ? 256 : WARPGROUPS == 2 ? 240 : 160;

// Tiles on their way from a producer, which is one thread, to the consumers, which are all warpgroups but
// the producers': a ring buffer of DEPTH stages in shared memory, each with room for one tile. Every thread
// counts the tiles in its own n, and n says which stage a tile is in and which phase of the stage's barriers
// belongs to it.
template <int DEPTH, int ROWS> struct Ring {
  Shared<T> tiles;
  Shared<Barrier> full;   // of each stage: all bytes of its tile have come
  Shared<Barrier> empty;  // of each stage: every warp of the consumers has finished with its tile
  unsigned n = 0;

  __device__ Ring(SharedMemory& smem) : tiles(smem.array<T>(DEPTH * ROWS * 64 * SLABS)) {}
  __device__ void init(SharedMemory& smem) {
    full = smem.array<Barrier>(DEPTH);
    empty = smem.array<Barrier>(DEPTH);
    for (int s = 0; threadIdx.x == 0 && s < DEPTH; s++) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 4 * WARPGROUPS);
    }
  }
  __device__ int stage() const { return n % DEPTH; }
  __device__ int parity() const { return n / DEPTH % 2; }

  // The producer: starts to copy ROWS rows of one head, from row `first` on. Rows and columns outside the
  // tensor come as zeros. First it waits until the consumers have finished with the previous tile of this
  // stage. A stage that is used for the first time is empty, and the wait ends at once.
  __device__ void load(const TensorMap& map, int first, int head, int batch) {
    barrier_wait(empty + stage(), parity() ^ 1);
    barrier_expect(full + stage(), ROWS * 128 * SLABS);
    Shared<T> tile = tiles + stage() * ROWS * 64 * SLABS;
#pragma unroll
    for (int s = 0; s < SLABS; s += BOX)
      tma_load(tile + s * ROWS * 64, map, full + stage(),
               D % 64 ? 64 * s : 0, first, D % 64 ? 0 : s, head, batch);
    n++;
  }

  // The consumers: waits until the next tile has come.
  __device__ void wait() const { barrier_wait(full + stage(), parity()); }

  // The consumers: waits, and returns the tile's descriptor; only V needs a `leading`. The descriptor of the
  // first stage is the same in every step. So the compiler computes it once, and only an addition is left to
  // do before a product can start.
  __device__ uint64_t get(int leading = 16) const {
    wait();
    return descriptor(tiles, leading, 1024) + unsigned(stage()) * (ROWS * 128 * SLABS / 16);
  }

  // The consumers: gives the tile's stage back to the producer. A warp calls this when its products with the
  // tile have ended; one lane arrives for the whole warp. If the warp has no product with the tile, all of
  // its lanes must have come back from wait() first. Otherwise the producer could fill the stage again while
  // a lane is still in wait(), and that lane would miss its own tile and wait for a later one.
  __device__ void release() {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage());
    n++;
  }

  // The consumers: has no use for the next tile.
  __device__ void skip() {
    wait();
    __syncwarp();
    release();
  }
};

// Ping-pong scheduling: the warpgroups start their products one after the other, in a fixed order.
// Warpgroup w waits at the named barrier 1 + w until the warpgroup before it arrives there; the one that
// arrives does not wait.
struct PingPong {
  int mine, next;
  __device__ PingPong(int w) : mine(1 + w), next(1 + (w + 1) % WARPGROUPS) {}
  __device__ void wait() const { if (PINGPONG && WARPGROUPS > 1) named_barrier_sync(mine, 256); }
  __device__ void pass() const { if (PINGPONG && WARPGROUPS > 1) named_barrier_arrive(next, 256); }
  __device__ void skip() const {
    wait();
    pass();
  }
};

// x, on which all lanes of the warp agree. The shuffle lets the compiler know that they agree: what is
// computed from x then takes no registers of the threads.
__device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// This thread's part of a warpgroup's S or O: the rows row() and row() + 8, the columns 8 * j + column() and
// the next one, for every j.
__device__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int column() { return 2 * (threadIdx.x % 4); }

// Starts S = Q K^T for 64 rows and Bc keys, whose tiles are given by descriptors. An instruction takes 16
// columns of Q and K. The lowest bits of a descriptor are an address / 16, so that an addition moves the
// descriptor on.
__device__ void start_scores(float (&S)[Bc / 2], uint64_t Q, uint64_t K) {
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_ss<T, Bc, 0, 0>(S, Q + (d / 64 * Br * 128 + d % 64 * 2) / 16,
                          K + (d / 64 * Bc * 128 + d % 64 * 2) / 16, d > 0);
}

// Starts O += P V. An instruction takes 16 keys. The sum runs down the rows of V, hence TRANS_B = 1.
__device__ void start_output(float (&O)[D / 2], const uint32_t (&P)[Bc / 16][4], uint64_t V) {
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) wgmma_rs<T, D, 1>(O, P[j], V + j * 16 * 128 / 16, true);
}

// In the rows i and i + 8, the keys that the row must not see get the score -inf.
__device__ void mask(float (&S)[Bc / 2], int first_key, int i, int Nq, int Nk) {
#pragma unroll
  for (int e = 0; e < Bc / 2; e++) {
    int seen = CAUSAL ? min(Nk, i + e / 2 % 2 * 8 + 1 + Nk - Nq) : Nk;
    if (first_key + e / 4 * 8 + column() + e % 2 >= seen) S[e] = -INFINITY;
  }
}

// Turns the scores of two rows into P, and updates m and l with them. m is in units of the scores, and l is
// the lane's share, the sum over its own columns. Returns whether O must then be multiplied by alpha. FA2
// Alg. 1, line 9.
__device__ bool online_softmax(float (&S)[Bc / 2], float (&m)[2], float (&l)[2], float (&alpha)[2],
                               float scale_log2) {
  float m_new[2] = {m[0], m[1]};
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) m_new[r] = fmaxf(m_new[r], fmaxf(S[e], S[e + 1]));
    m_new[r] = fmaxf(m_new[r], __shfl_xor_sync(~0u, m_new[r], 1));  // the 4 lanes of a quad share a row
    m_new[r] = fmaxf(m_new[r], __shfl_xor_sync(~0u, m_new[r], 2));
  }
  bool grown = !LAZY || __any_sync(~0u, fmaxf(m_new[0] - m[0], m_new[1] - m[1]) * scale_log2 > 8);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    m_new[r] = grown ? m_new[r] : m[r];
    float factor = exponent_factor(m_new[r], scale_log2), shift = m_new[r] * factor;
    alpha[r] = exp2_approx((m[r] - m_new[r]) * factor);
    m[r] = m_new[r];
    l[r] *= alpha[r];
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) {
      S[e] = exp2_approx(S[e] * factor - shift);
      S[e + 1] = exp2_approx(S[e + 1] * factor - shift);
      l[r] += S[e] + S[e + 1];
    }
  }
  return grown;
}

__device__ void rescale(float (&O)[D / 2], const float (&alpha)[2]) {
#pragma unroll
  for (int e = 0; e < D / 2; e++) O[e] *= alpha[e / 2 % 2];
}

// Packs P as an operand of the next product, in pairs of neighbours. A lane already holds the pairs that
// wgmma wants from it.
__device__ void to_operand(uint32_t (&P)[Bc / 16][4], const float (&S)[Bc / 2]) {
#pragma unroll
  for (int i = 0; i < Bc / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

// The 4 lanes of a quad transpose 4 x 4 words: word w of lane t becomes word t of lane w.
__device__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int w = 0; w < 4; w++) {
      if (w & step) continue;
      bool upper = threadIdx.x & step;
      uint32_t theirs = __shfl_xor_sync(~0u, upper ? x[w] : x[w + step], step);
      x[w] = upper ? theirs : x[w];
      x[w + step] = upper ? x[w + step] : theirs;
    }
}

// Stores out = O / l and lse = m + log l of the rows i and i + 8, if they exist. A row that saw no key gets
// out = 0 and lse = -inf.
__device__ void store_rows(Global<T> out, Global<float> lse, const float (&O)[D / 2], const float (&m)[2],
                           float (&l)[2], int i, int Nq, float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    l[r] += __shfl_xor_sync(~0u, l[r], 1);
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
    float inverse = 1 / l[r];
    int64_t query = i + 8 * r;
    if (query < Nq && threadIdx.x % 4 == 0) lse[query] = m[r] * scale + logf(l[r]);
#pragma unroll
    for (int c = 0; c < D / 2; c += 16) {  // 32 columns; of every 8 of them this lane has two
      uint32_t x[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        int e = c + 4 * w + 2 * r;
        x[w] = l[r] == 0 ? 0 : pack<T>(O[e] * inverse, O[e + 1] * inverse);
      }
      if (WIDE_STORES) {
        transpose_quad(x);  // now this lane has 8 neighbouring columns
        if (query < Nq) store_16(out + (query * D + 2 * c + 4 * column()), x);
      } else if (query < Nq) {
#pragma unroll
        for (int w = 0; w < 4; w++) store_pair(out + (query * D + 2 * c + 8 * w + column()), x[w]);
      }
    }
  }
}

struct Problem {
  int Nq, Nk;
  int tiles;      // of all heads
  int section;    // heads whose tiles are interleaved
  int alternate;  // whether every other section begins with its shortest tiles
};

// One tile of Br query rows, the blocks of keys that it needs, and those of them that warpgroup w needs.
struct Tile {
  int first;     // the tile's first row
  int head;      // its head, counted over all batches
  int blocks;    // the blocks of keys 0 .. blocks - 1 are loaded
  int needed;    // the blocks 0 .. needed - 1 hold all keys that some row of the warpgroup sees
  int unmasked;  // every row of the warpgroup sees all keys of the blocks 0 .. unmasked - 1

  __device__ Tile(const Problem& p, int n, int w = 0) {
    int tiles_of_head = (p.Nq + Br - 1) / Br;
    int heads = p.tiles / tiles_of_head;
    int tile = n % tiles_of_head;
    head = n / tiles_of_head;
    if (CAUSAL) {  // the longest tiles of a section first, or last
      int nth = n / (p.section * tiles_of_head), last_section = (heads - 1) / p.section;
      int first_head = nth * p.section;
      int width = min(p.section, heads - first_head);  // heads of this section: the last may have fewer
      int in_section = n - first_head * tiles_of_head;
      head = first_head + in_section % width;
      tile = in_section / width;
      if (!p.alternate || (last_section - nth) % 2 == 0) tile = tiles_of_head - 1 - tile;
    }
    first = tile * Br;
    blocks = blocks_of(keys(p, first + Br - 1));
    int row = first + 64 * w;                     // the warpgroup's first row
    int last = SKIP ? row + 63 : first + Br - 1;  // the last row whose blocks it visits
    needed = SKIP && row >= p.Nq ? 0 : blocks_of(keys(p, last));
    unmasked = keys(p, row) / Bc;
  }
  // How many keys a row sees. A row beyond the last query counts as the last query.
  static __device__ int keys(const Problem& p, int row) {
    return CAUSAL ? min(p.Nk, max(0, min(row + 1, p.Nq) + p.Nk - p.Nq)) : p.Nk;
  }
  // How many blocks hold so many keys. If there is no key to see, it is one block, which is masked
  // throughout.
  static __device__ int blocks_of(int keys) { return max(1, (keys + Bc - 1) / Bc); }
};

// The number of the tile that this block computes in a round. If CAUSAL, every other round gives out the
// tiles in reverse order of the blocks, so that a block with a long tile gets a short one next. The blocks'
// work is about equal if lengths change little from round to round. So sections may alternate: where one ends
// with its shortest tiles, the next begins with them. tile_scheduler.py chooses the sections.
__device__ int tile_number(int round) {
  if (!PERSISTENT) return round == 0 ? int(blockIdx.x) : 0x7fffffff;
  return round * gridDim.x + (CAUSAL && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

template <bool Value> struct Bool {
  static constexpr bool value = Value;
};

// The tensor maps describe q (B, H, Nq, D), k and v (B, H / group, Nk, D), whose strides are arbitrary, but D
// is contiguous. out (B, H, Nq, D) and lse (B, H, Nq) are contiguous. The maxima start at `lowest`, which is
// below all scores, but finite, also times scale * log2(e): -inf - (-inf) would be NaN.
extern "C" __global__ void __launch_bounds__(128 + 2 * Br, 1) attention_forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, Global<T> out, Global<float> lse,
    int H, int group, int Nq, int Nk, float scale, float lowest, int tiles, int section, int alternate) {
  Problem p{Nq, Nk, tiles, section, alternate};
  SharedMemory smem;
  Ring<Q_STAGES, Br> Q(smem);
  Ring<STAGES, Bc> K(smem), V(smem);
  Q.init(smem);
  K.init(smem);
  V.init(smem);
  if (threadIdx.x == 0) barrier_init_fence();
  __syncthreads();  // the barriers exist

  // The blocks of keys are visited from the last to the first, so that the masked ones come first.
  if (threadIdx.x < 128) {
    registers_decrease<PRODUCER_REGISTERS>();
    // K, V and Q have a producer each. If one thread loaded all three, the next K would have to wait until
    // there is a stage for the V before it, and Q until there is one for both.
    int producer = uniform(threadIdx.x / 32);  // the first thread of warp 0 loads K, of 1 V, of 2 Q
    auto produce = [&](const Tile& tile) {
      int head = tile.head % H, batch = tile.head / H;
      if (producer == 2) {
        Q.load(q_map, tile.first, head, batch);
        return;
      }
#pragma unroll 1  // a loop that is not unrolled needs fewer registers
      for (int j = tile.blocks - 1; j >= 0; j--)
        if (producer == 0)
          K.load(k_map, j * Bc, head / group, batch);
        else
          V.load(v_map, j * Bc, head / group, batch);
    };
    if (producer < 3 && threadIdx.x % 32 == 0)
      for (int round = 0, n; (n = tile_number(round)) < tiles; round++) produce(Tile(p, n));
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    int w = uniform(threadIdx.x / 128 - 1);  // the number of the warpgroup
    int i = 64 * w + row();                  // this thread's first row of the tile
    float scale_log2 = scale * 1.44269504f;  // times log2(e), because exp is computed as a power of 2
    // consume_first sets m and l. But if they were undefined here, ptxas would order the instructions of the
    // loop in another way, which is 3 % slower at D = 64.
    float S[Bc / 2], O[D / 2] = {}, m[2] = {}, l[2] = {}, alpha[2];
    uint32_t P[Bc / 16][4];
    PingPong ping_pong(w);
    if (w == WARPGROUPS - 1) ping_pong.pass();  // warpgroup 0 may begin

    // One step computes S of one block of keys and, at the same time, O of the block before it. Two tiles
    // overlap in the same way. Here each has the blocks 2, 1 and 0:
    //
    //   step            1     2     3     4     5     6     7
    //   first tile      S_2   S_1   S_0
    //                         O_2   O_1   O_0   (O is stored)
    //   second tile                       S_2   S_1   S_0
    //                                           O_2   O_1   O_0   (O is stored)
    //
    // Step 1 is `begin_alone`, step 4 is `begin_beside`, step 7 is `last_product_alone`, and the others are
    // `consume_rest`. If the second tile does not need its first block, there is no step 4: the first tile
    // ends as in step 7, and the second tile begins as in step 1.

    // Starts S of one block of keys, alone or beside O of the block before it, whose P is ready. Waits for S.
    auto start = [&](uint64_t Q_i, auto beside) {
      uint64_t K_j = K.get();
      ping_pong.wait();
      wgmma_fence();  // O and P were written by ordinary instructions
      start_scores(S, Q_i, K_j);
      wgmma_commit();
      if (beside.value) {
        start_output(O, P, V.get(V_SLAB));  // V is awaited while the tensor cores compute S
        wgmma_commit();
      }
      ping_pong.pass();
      wgmma_wait<(OVERLAP && beside.value)>();  // S is ready; with OVERLAP, O is still being computed
      K.release();
    };
    auto finish_output = [&] {
      // ptxas moves this wait into the exponentials, so that conversions run beside those that follow it.
      wgmma_wait<0>();
      V.release();
    };
    auto consume = [&](const Tile& tile, int j, auto masked, uint64_t Q_i) {
      start(Q_i, Bool<true>());
      if (masked.value) mask(S, j * Bc, tile.first + i, Nq, Nk);
      bool grown = online_softmax(S, m, l, alpha, scale_log2);
      finish_output();
      to_operand(P, S);
      if (grown) rescale(O, alpha);
    };
    // The first block that the tile needs: m and l start again, while O may still belong to the tile before.
    auto consume_first = [&](const Tile& tile, auto beside, uint64_t Q_i) {
      start(Q_i, beside);
      if (tile.needed > tile.unmasked) mask(S, (tile.needed - 1) * Bc, tile.first + i, Nq, Nk);
      m[0] = m[1] = lowest;
      l[0] = l[1] = 0;
      online_softmax(S, m, l, alpha, scale_log2);
      if (beside.value) finish_output();
      to_operand(P, S);
    };
    // A block of keys that this warpgroup does not need. It waits for K and V nevertheless: if it released a
    // stage before the tile has come, its arrival would count for the tile that was in that stage before. It
    // also takes part in the ping-pong: the other warpgroups expect each warpgroup once for each block.
    auto skip = [&] {
      K.skip();
      ping_pong.skip();
      V.skip();
    };

    auto wait_for_queries = [&] { return Q.get() + w * 64 * 128 / 16; };  // the warpgroup's 64 rows of Q_i
    auto begin_beside = [&](const Tile& next) { consume_first(next, Bool<true>(), wait_for_queries()); };
    auto begin_alone = [&](const Tile& tile, uint64_t Q_i) {
#pragma unroll 1  // a loop that is not unrolled needs fewer registers
      for (int j = tile.blocks; j > tile.needed; j--) skip();
      if (tile.needed) consume_first(tile, Bool<false>(), Q_i);
    };
    auto consume_rest = [&](const Tile& tile, uint64_t Q_i) {
      int j = tile.needed - 2;
      if (CAUSAL)
        for (; j >= tile.unmasked; j--) consume(tile, j, Bool<true>(), Q_i);
      for (; j >= 0; j--) consume(tile, j, Bool<false>(), Q_i);
      __syncwarp();  // lanes of a warp without a product may still be inside Q.get()
      Q.release();
    };
    auto last_product_alone = [&] {
      uint64_t V_0 = V.get(V_SLAB);
      wgmma_fence();
      start_output(O, P, V_0);
      wgmma_commit();
      finish_output();
    };
    // Stores the finished tile with its m and l, and sets O to 0 for the next tile.
    auto store = [&](const Tile& done, float (&m_done)[2], float (&l_done)[2]) {
      int64_t first = int64_t(done.head) * Nq;
      store_rows(out + first * D, lse + first, O, m_done, l_done, done.first + i, Nq, scale);
#pragma unroll
      for (int e = 0; e < D / 2; e++) O[e] = 0;
    };

    int round = 0, n = tile_number(0);
    Tile tile(p, n, w);
    bool alone = true;  // this tile begins alone, not beside the last product of the tile before it
    while (n < tiles) {
      uint64_t Q_i = wait_for_queries();
      if (alone) begin_alone(tile, Q_i);
      consume_rest(tile, Q_i);

      Tile done = tile;  // only its last product is missing
      float m_done[2] = {m[0], m[1]}, l_done[2] = {l[0], l[1]};
      n = tile_number(++round);
      if (n < tiles) tile = Tile(p, n, w);
      alone = !done.needed || n >= tiles || tile.needed < tile.blocks;
      if (done.needed) {
        if (alone)
          last_product_alone();
        else
          begin_beside(tile);
        store(done, m_done, l_done);
      }
    }
    // For the last pass(): a block must not end while a named barrier is half full.
    if (w == 0) ping_pong.wait();
  }
}
