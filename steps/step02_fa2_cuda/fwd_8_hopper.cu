// SPDX-License-Identifier: MIT
// Rung 8, "hopper": the tensor cores hardly wait. FlashAttention-3, section 3, and a little more; each idea is a switch.
//
//   OVERLAP      a warpgroup starts S = Q K_j^T and O += P V_(j+1) together and computes the exponentials of S under the second
//   PINGPONG     the warpgroups start their products in turn, so that one's exponentials run under the other's products
//   PERSISTENT   one block a multiprocessor takes tile after tile. A tile's last O += P V starts together with the next tile's
//                first S (unless SKIP passes over that), and its stores run under that tile's products: no beginning, no end
//   LAZY         O is rescaled only when some row's maximum has grown by more than 8 in log2: until then P <= 2^8 does no harm.
//                Not where D <= 64: there O is so small that asking all lanes costs more than it saves
//   SKIP         a warpgroup passes over the blocks of keys that none of its own 64 rows sees, and over rows that do not exist
//   WIDE_STORES  the 4 lanes of a quad exchange what they hold of a row, so that each stores 16 bytes instead of 4 x 4
//
// Compiled for T (bf16 or fp16), D = 32, 64, 96, 128 or 256, Br x Bc (64, 128 or 192 x 16 n; the fastest: hopper.py) and CAUSAL.
// sm_90a. Launch: block 128 + 2 * Br; grid one block a multiprocessor but not more than tiles, or without PERSISTENT
// ceil(Nq / Br) * H * B; (Q_STAGES * Br + 2 * STAGES * Bc) * ceil(D / 64) * 128 + 128 bytes of dynamic shared memory.
// Needs ptx.cuh and wgmma.py's wrappers. Spill budget: 0 bytes.
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
#define LAZY (D > 64)
#endif
#ifndef SKIP
#define SKIP 1
#endif
#ifndef WIDE_STORES
#define WIDE_STORES 1
#endif

constexpr int STAGES = D > 64 ? 2 : 3;     // tiles of K and of V in shared memory: one in use, the others on their way
constexpr int Q_STAGES = D > 128 ? 1 : 2;  // tiles of Q: with 2 the next one comes while this one is in use
constexpr int SLABS = (D + 63) / 64;       // of 64 columns, 128 bytes a row
constexpr int BOX = D % 64 ? 1 : SLABS;    // slabs that one copy brings
static_assert(Br % 64 == 0 && Br <= 192 && Bc % 16 == 0, "1 to 3 warpgroups: more would wait for registers for ever");
constexpr int WARPGROUPS = Br / 64;        // consumers; each has 64 rows of Q
// The registers of 128 (WARPGROUPS + 1) threads, 64K in all, go to those who need them.
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 1 ? 56 : WARPGROUPS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1 ? 256 : WARPGROUPS == 2 ? 240 : 160;

// Tiles on their way from the producer, one thread, to the consumers, all warpgroups. Each side counts them in its own n.
template <int PLACES, int ROWS> struct Ring {
  Shared<T> tiles;
  Shared<Barrier> full, empty;  // one a place: the bytes have come; every warp has done with them
  unsigned n = 0;

  __device__ Ring(SharedMemory& smem) : tiles(smem.array<T>(PLACES * ROWS * 64 * SLABS)) {}
  __device__ void init(SharedMemory& smem) {
    full = smem.array<Barrier>(PLACES);
    empty = smem.array<Barrier>(PLACES);
    for (int p = 0; threadIdx.x == 0 && p < PLACES; p++) {
      barrier_init(full + p, 1);
      barrier_init(empty + p, 4 * WARPGROUPS);
    }
  }
  __device__ int place() const { return n % PLACES; }
  __device__ int parity() const { return n / PLACES % 2; }

  // The producer: starts to copy ROWS rows of one head, from `first` on; what lies outside the tensor comes as 0.
  __device__ void load(const TensorMap& map, int first, int head, int batch) {
    barrier_wait(empty + place(), parity() ^ 1);  // the tile before has been used; passes at once where there was none
    barrier_expect(full + place(), ROWS * 128 * SLABS);
    Shared<T> tile = tiles + place() * ROWS * 64 * SLABS;
#pragma unroll
    for (int s = 0; s < SLABS; s += BOX)
      tma_load(tile + s * ROWS * 64, map, full + place(), D % 64 ? 64 * s : 0, first, D % 64 ? 0 : s, head, batch);
    n++;
  }

  // The consumers: the next tile, once it is there; and its return by one lane, once the warp's products with it have ended, or
  // without any, once every lane has it: whoever still waited would wait for the next tile there.
  __device__ Shared<T> get() const {
    barrier_wait(full + place(), parity());
    return tiles + place() * ROWS * 64 * SLABS;
  }
  __device__ void release() {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + place());
    n++;
  }
};

// The warpgroups' turns. Barrier 1 + w lets warpgroup w go on: it waits there, the one before it arrives without waiting.
struct Turn {
  int mine, next;
  __device__ Turn(int w) : mine(1 + w), next(1 + (w + 1) % WARPGROUPS) {}
  __device__ void wait() const { if (PINGPONG && WARPGROUPS > 1) named_barrier_sync(mine, 256); }
  __device__ void pass() const { if (PINGPONG && WARPGROUPS > 1) named_barrier_arrive(next, 256); }
};

// x, on which all lanes of the warp agree, in a way that tells the compiler so: what follows from it then costs no registers.
__device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Where this thread's part of a warpgroup's S or O lies: rows row() and row() + 8, columns 8 * j + column(), + 1.
__device__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int column() { return 2 * (threadIdx.x % 4); }

// Starts S = Q K^T, 64 rows x Bc keys, 16 columns of Q and K an instruction. A descriptor's lowest bits are an address / 16.
__device__ void start_scores(float (&S)[Bc / 2], Shared<T> Q, Shared<T> K) {
  uint64_t a = descriptor(Q, 16, 1024), b = descriptor(K, 16, 1024);
#pragma unroll
  for (int d = 0; d < D; d += 16)
    wgmma_ss<T, Bc, 0, 0>(S, a + (d / 64 * Br * 128 + d % 64 * 2) / 16, b + (d / 64 * Bc * 128 + d % 64 * 2) / 16, d > 0);
}

// Starts O += P V, 16 keys an instruction. The sum runs down V's rows, hence the 1; its slabs lie Bc * 128 bytes apart.
__device__ void start_output(float (&O)[D / 2], const uint32_t (&P)[Bc / 16][4], Shared<T> V) {
  uint64_t b = descriptor(V, Bc * 128, 1024);
#pragma unroll
  for (int j = 0; j < Bc / 16; j++) wgmma_rs<T, D, 1>(O, P[j], b + j * 16 * 128 / 16, true);
}

// Keys that row i (and i + 8) must not see get the score -inf.
__device__ void mask(float (&S)[Bc / 2], int first_key, int i, int Nq, int Nk) {
#pragma unroll
  for (int e = 0; e < Bc / 2; e++) {
    int seen = CAUSAL ? min(Nk, i + e / 2 % 2 * 8 + 1 + Nk - Nq) : Nk;
    if (first_key + e / 4 * 8 + column() + e % 2 >= seen) S[e] = -INFINITY;
  }
}

// Turns the scores of two rows into P and takes them into m (in units of the scores) and l, which each lane sums over its own
// columns only. FA2 Alg. 1, line 9. Returns whether O must be multiplied by alpha. MASKED: some row may have seen no key yet.
template <bool MASKED>
__device__ bool online_softmax(float (&S)[Bc / 2], float (&m)[2], float (&l)[2], float (&alpha)[2], float scale_log2) {
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
    float shift = MASKED && m_new[r] == -INFINITY ? 0 : m_new[r] * scale_log2;  // -inf - (-inf) would be NaN
    alpha[r] = exp2_approx(m[r] * scale_log2 - shift);
    m[r] = m_new[r];
    l[r] *= alpha[r];
#pragma unroll
    for (int e = 2 * r; e < Bc / 2; e += 4) {
      S[e] = exp2_approx(S[e] * scale_log2 - shift);
      S[e + 1] = exp2_approx(S[e + 1] * scale_log2 - shift);
      l[r] += S[e] + S[e + 1];
    }
  }
  return grown;
}

__device__ void rescale(float (&O)[D / 2], const float (&alpha)[2]) {
#pragma unroll
  for (int e = 0; e < D / 2; e++) O[e] *= alpha[e / 2 % 2];
}

// P as the next product's operand: pairs of neighbours in 16 bits, already where wgmma wants them.
__device__ void to_operand(uint32_t (&P)[Bc / 16][4], const float (&S)[Bc / 2]) {
#pragma unroll
  for (int i = 0; i < Bc / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

// Word w of lane t of a quad becomes word t of lane w.
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

// out = O / l and lse = m + log l of row i (r = 0) and i + 8 (r = 1), if they exist. A row that saw no key gets 0 and -inf.
__device__ void store_rows(Global<T> out, Global<float> lse, const float (&O)[D / 2], const float (&m)[2], float (&l)[2], int i,
                           int Nq, float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    l[r] += __shfl_xor_sync(~0u, l[r], 1);
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
    float inverse = 1 / l[r];
    int64_t at = i + 8 * r;
    if (at < Nq && threadIdx.x % 4 == 0) lse[at] = m[r] * scale + logf(l[r]);
#pragma unroll
    for (int c = 0; c < D / 2; c += 16) {  // 32 columns: of each 8, this lane has two
      uint32_t x[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        int e = c + 4 * w + 2 * r;
        x[w] = l[r] == 0 ? 0 : pack<T>(O[e] * inverse, O[e + 1] * inverse);
      }
      if (WIDE_STORES) {
        transpose_quad(x);  // now it has all of 8
        if (at < Nq) store_16(out + (at * D + 2 * c + 4 * column()), x);
      } else if (at < Nq) {
#pragma unroll
        for (int w = 0; w < 4; w++) store_pair(out + (at * D + 2 * c + 8 * w + column()), x[w]);
      }
    }
  }
}

struct Problem {
  int Nq, Nk, tiles, section;  // tiles: of all heads
};

// One tile of Br query rows: which, the blocks of keys that it needs, and those of them that a warpgroup w needs.
struct Tile {
  int first, head, blocks;  // the first row; the head, counted over all batches; the blocks 0 .. blocks - 1 are loaded
  int needed, whole;        // 0 .. needed - 1 hold all keys that the warpgroup's rows see; every row sees all of 0 .. whole - 1

  __device__ Tile(const Problem& p, int n, int w = 0) {
    int each = (p.Nq + Br - 1) / Br, heads = p.tiles / each, i = n % each;
    head = n / each;
    if (CAUSAL) {  // the longest first, over the heads of a section, which use the L2 cache together
      int begin = n / (p.section * each) * p.section, width = min(p.section, heads - begin), m = n - begin * each;
      head = begin + m % width, i = each - 1 - m / width;
    }
    first = i * Br;
    blocks = blocks_of(keys(p, first + Br - 1));
    int row = first + 64 * w, last = SKIP ? row + 63 : first + Br - 1;
    needed = SKIP && row >= p.Nq ? 0 : blocks_of(keys(p, last));
    whole = keys(p, row) / Bc;
  }
  // How many keys a row sees; a row beyond the last, as many as the last.
  static __device__ int keys(const Problem& p, int row) {
    return CAUSAL ? min(p.Nk, max(0, min(row + 1, p.Nq) + p.Nk - p.Nq)) : p.Nk;
  }
  // One, masked throughout, if there is no key to see.
  static __device__ int blocks_of(int keys) { return max(1, (keys + Bc - 1) / Bc); }
};

// The tiles of this block, one after the other. If CAUSAL, the blocks choose in reverse order in every other round: nobody always
// gets the longest that is left.
__device__ int tile_number(int round) {
  if (!PERSISTENT) return round == 0 ? int(blockIdx.x) : 0x7fffffff;
  return round * gridDim.x + (CAUSAL && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

template <bool Value> struct Bool {
  static constexpr bool value = Value;
};

// The maps show q, k and v as (B, H, N, D), any strides but D's; k and v have a head for every `group` of q's. out (B, H, Nq, D)
// and lse (B, H, Nq) are contiguous.
extern "C" __global__ void __launch_bounds__(128 + 2 * Br, 1) attention_forward(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    Global<T> out, Global<float> lse, int H, int group, int Nq, int Nk, float scale, int tiles, int section) {
  Problem p{Nq, Nk, tiles, section};
  SharedMemory smem;
  Ring<Q_STAGES, Br> Q(smem);
  Ring<STAGES, Bc> K(smem), V(smem);
  Q.init(smem), K.init(smem), V.init(smem);
  if (threadIdx.x == 0) barrier_init_fence();
  __syncthreads();  // the barriers exist

  // Blocks of keys are taken from the last to the first, so that the masked ones come first.
  if (threadIdx.x < 128) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      for (int round = 0, n; (n = tile_number(round)) < tiles; round++) {
        Tile tile(p, n);
        int head = tile.head % H, batch = tile.head / H;
#pragma unroll 1  // few registers
        for (int j = tile.blocks - 1; j >= 0; j--) {
          K.load(k_map, j * Bc, head / group, batch);
          if (j == tile.blocks - 1) Q.load(q_map, tile.first, head, batch);
          V.load(v_map, j * Bc, head / group, batch);
        }
      }
    }
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    int w = uniform(threadIdx.x / 128 - 1), i = 64 * w + row();  // the warpgroup, this thread's first row of the tile
    float S[Bc / 2], O[D / 2] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2], scale_log2 = scale * 1.44269504f;
    uint32_t P[Bc / 16][4];
    Turn turn(w);
    if (w == WARPGROUPS - 1) turn.pass();  // warpgroup 0 may begin

    // S of one block of keys, alone or beside O of the block before it, whose P is ready.
    auto start = [&](Shared<T> Q_i, auto beside) {
      Shared<T> K_j = K.get(), V_before = beside.value ? V.get() : K_j;
      turn.wait();
      wgmma_fence();  // O and P were written by ordinary instructions
      start_scores(S, Q_i, K_j);
      wgmma_commit();
      if (beside.value) start_output(O, P, V_before), wgmma_commit();
      turn.pass();
      wgmma_wait<(OVERLAP && beside.value)>();  // S is there, O still on its way
      K.release();
    };
    auto finish_output = [&] {
      if (D == 128) V.get();  // is there already. But without it the compiler waits for O before it computes the exponentials
      wgmma_wait<0>();
      V.release();
    };
    auto step = [&](const Tile& tile, int j, auto masked, Shared<T> Q_i) {
      start(Q_i, Bool<true>());
      if (masked.value) mask(S, j * Bc, tile.first + i, Nq, Nk);
      bool grown = online_softmax<masked.value>(S, m, l, alpha, scale_log2);
      finish_output();
      to_operand(P, S);
      if (grown) rescale(O, alpha);
    };
    // A tile's first block: m and l begin anew, while O may still be that of the tile before.
    auto first_step = [&](const Tile& tile, auto beside, Shared<T> Q_i) {
      start(Q_i, beside);
      if (tile.needed > tile.whole) mask(S, (tile.needed - 1) * Bc, tile.first + i, Nq, Nk);
      m[0] = m[1] = -INFINITY, l[0] = l[1] = 0;
      online_softmax<true>(S, m, l, alpha, scale_log2);
      if (beside.value) finish_output();
      to_operand(P, S);
    };
    // A block that this warpgroup does not need. It is waited for all the same: a return before every lane has seen it come would
    // count for the tile before it in its place. And the others count on a turn for each block.
    auto skip = [&] {
      K.get(), __syncwarp(), K.release();
      turn.wait(), turn.pass();
      V.get(), __syncwarp(), V.release();
    };

    int round = 0, n = tile_number(0);
    Tile tile(p, n, w);
    bool alone = true;  // no O of the tile before is left to start beside this tile's first S
    while (n < tiles) {
      Shared<T> Q_i = Q.get() + w * 64 * 64;
      if (alone) {
#pragma unroll 1  // few registers
        for (int j = tile.blocks; j > tile.needed; j--) skip();
        if (tile.needed) first_step(tile, Bool<false>(), Q_i);
      }
      int j = tile.needed - 2;
      if (CAUSAL)
        for (; j >= tile.whole; j--) step(tile, j, Bool<true>(), Q_i);
      for (; j >= 0; j--) step(tile, j, Bool<false>(), Q_i);
      __syncwarp();  // where there was no product, not every lane may have seen Q come
      Q.release();

      // O of this tile's last block: beside S of the next tile's first one, or alone if that is skipped or there is none.
      Tile done = tile;
      float m_done[2] = {m[0], m[1]}, l_done[2] = {l[0], l[1]};
      n = tile_number(++round);
      if (n < tiles) tile = Tile(p, n, w);
      alone = !done.needed || n >= tiles || tile.needed < tile.blocks;
      if (!done.needed) continue;
      if (!alone) {
        first_step(tile, Bool<true>(), Q.get() + w * 64 * 64);
      } else {
        Shared<T> V_before = V.get();
        wgmma_fence();
        start_output(O, P, V_before);
        wgmma_commit();
        finish_output();
      }
      int64_t first = int64_t(done.head) * Nq;
      store_rows(out + first * D, lse + first, O, m_done, l_done, done.first + i, Nq, scale);
#pragma unroll
      for (int e = 0; e < D / 2; e++) O[e] = 0;
    }
    if (w == 0) turn.wait();  // takes the last pass: every arrival at a barrier is waited for
  }
}
