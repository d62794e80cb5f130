// SPDX-License-Identifier: MIT
// Hopper's barriers and its copy engine, TMA. What the names do is said in ptx.cuh.
#pragma once
#include "asynchronous.h"

// 8 bytes of shared memory, as on a GPU. It counts what is still missing in the running phase.
struct Barrier {
  int bytes;
  unsigned arrivals : 11, missing : 12, phase : 1, mark : 8;  // mark: that it has been initialised

  static constexpr unsigned initialised = 0x5a, most_arrivals = 1024;
};

// What emulator.tensor_map puts into the 128 bytes. Dimension 0 is the innermost, contiguous.
struct TensorMap {
  char* address;
  long long stride[4];  // of the dimensions 1 ... 4, in bytes
  int size[5], box[5];  // elements
  int element;          // bytes of an element
  char unused[128 - 8 - 4 * 8 - 2 * 5 * 4 - 4];
};
static_assert(sizeof(Barrier) == 8 && sizeof(TensorMap) == 128, "as on a GPU");

namespace emulator {

inline Barrier& check(Shared<Barrier> b, const char* operation, Site site) {
  Barrier& barrier = *b.span(1, 8, site);
  if (barrier.mark != Barrier::initialised) fail(site, "%s of a barrier that is not initialised", operation);
  return barrier;
}

// Ends the phase if nothing is missing any more.
inline void settle(Barrier& b, Site site) {
  if (b.missing) return;
  if (b.bytes < 0 && error.empty()) error = text("%s: more bytes were copied than expected", name(site).c_str());
  if (b.bytes) return;
  b.phase ^= 1;
  b.missing = b.arrivals;
}

inline void arrive(Barrier& b, Site site) {
  if (!b.missing) fail(site, "more arrivals than the %d of the barrier: this phase waits for %d bytes only", b.arrivals, b.bytes);
  b.missing--;
  settle(b, site);
  if (!error.empty()) stop();
}

inline std::string describe_barrier(const void* p) {
  auto& b = *static_cast<const Barrier*>(p);
  return text("%d of %d arrivals and %d bytes missing", b.missing, b.arrivals, b.bytes);
}

// ---- named barriers ---------------------------------------------------------------------------------------------------

struct NamedBarrier {
  int threads = 0, arrived = 0, generation = 0;
  Site site;
  std::vector<int> warps;  // that have arrived
};
static NamedBarrier named_barriers[16];

inline std::string describe_named(const void* p) {
  auto& b = *static_cast<const NamedBarrier*>(p);
  return text("%d of %d threads have come", b.arrived, b.threads);
}

// A warp arrives as a whole: hardware counts 32, however many of its threads execute the instruction.
inline NamedBarrier& arrive_named(const char* operation, int id, int threads, Site site) {
  if (id < 0 || id > 15) fail(site, "%s: there is no barrier %d, only 0 to 15", operation, id);
  if (threads <= 0 || threads % 32) fail(site, "%s: %d threads is no multiple of 32", operation, threads);
  NamedBarrier& b = named_barriers[id];
  int warp = current->rank / 32, nothing = 0;
  whole_warp(operation, nothing, site, [&](int**) {
    if (b.arrived && b.threads != threads)
      fail(site, "barrier %d waits for %d threads here and %d at %s", id, threads, b.threads, name(b.site).c_str());
    for (int w : b.warps)
      if (w == warp) fail(site, "warp %d arrives at barrier %d for the second time before it is complete", warp, id);
    b.threads = threads;
    b.site = site;
    b.warps.push_back(warp);
    b.arrived += 32;
    if (b.arrived < threads) return;
    b.arrived = 0;
    b.generation++;
    b.warps.clear();
  });
  return b;
}

// ---- the copy engine --------------------------------------------------------------------------------------------------

struct Coordinates {
  int c[5];
};

inline void check(const TensorMap& map, Site site) {
  if (map.element != 2 && map.element != 4) fail(site, "this is no tensor map: make one with emulator.tensor_map");
}

inline int box_bytes(const TensorMap& map) {
  int n = map.element;
  for (int size : map.box) n *= size;
  return n;
}

template <class E> char* box_in_shared_memory(Shared<E> tile, const TensorMap& map, Site site) {
  check(map, site);
  if (map.element != sizeof(E)) fail(site, "the tensor has elements of %d bytes, the tile of %zu", map.element, sizeof(E));
  return reinterpret_cast<char*>(const_cast<std::remove_const_t<E>*>(tile.span(box_bytes(map) / sizeof(E), 128, site)));
}

inline char* swizzled(char* p) {  // 16-byte chunk XOR row of 128 bytes mod 8, on addresses
  auto a = BlockMemory::address(p);
  return shared_memory.data() + (a ^ (a >> 3 & 0x70));
}

// Calls act(address in shared memory, address in the tensor or null, bytes) for all pieces, up to 16 bytes, of the box at `from`.
template <class Act> void walk(const TensorMap& map, const Coordinates& from, char* tile, Act act) {
  int n[5] = {};
  for (;;) {
    char* row = map.address;
    bool inside = true;
    for (int d = 1; d < 5; d++) {
      int i = from.c[d] + n[d];
      inside &= i >= 0 && i < map.size[d];
      row += i * map.stride[d - 1];
    }
    for (int byte = 0; byte < 128; byte += 16, tile += 16) {
      int first = from.c[0] + byte / map.element, last = first + 16 / map.element - 1;
      char* to = swizzled(tile);
      if (inside && first >= 0 && last < map.size[0]) {
        act(to, row + (long long)first * map.element, 16);
      } else {
        for (int i = first; i <= last; i++, to += map.element)
          act(to, inside && i >= 0 && i < map.size[0] ? row + (long long)i * map.element : nullptr, map.element);
      }
    }
    int d = 1;
    while (d < 5 && ++n[d] == map.box[d]) n[d++] = 0;
    if (d == 5) return;
  }
}

template <class Run> void start_bulk(Run run) {
  start(bulk_queue + current->rank, thread_copies[current->rank].bulk_group, false, std::move(run));
}

inline void wait_for_bulk(const char* operation, int groups_left, Site site) {
  int queue = bulk_queue + current->rank, before = thread_copies[current->rank].bulk_group - groups_left;
  wait(operation, site, [queue, before] { return !under_way(queue, before); });
}

}  // namespace emulator

inline void barrier_init(Shared<Barrier> b, int arrivals, EMULATOR_SITE) {
  using namespace emulator;
  Barrier& barrier = *b.span(1, 8, {file, line});
  if (barrier.mark == Barrier::initialised) fail({file, line}, "barrier_init of a barrier that is initialised already");
  if (arrivals < 1 || arrivals > int(Barrier::most_arrivals)) fail({file, line}, "barrier_init for %d arrivals", arrivals);
  barrier.bytes = 0;
  barrier.arrivals = barrier.missing = arrivals;
  barrier.phase = 0;
  barrier.mark = Barrier::initialised;
}

inline void barrier_init_fence() {}

inline void barrier_arrive(Shared<Barrier> b, EMULATOR_SITE) {
  emulator::arrive(emulator::check(b, "barrier_arrive", {file, line}), {file, line});
}

inline void barrier_expect(Shared<Barrier> b, int bytes, EMULATOR_SITE) {
  Barrier& barrier = emulator::check(b, "barrier_expect", {file, line});
  barrier.bytes += bytes;
  emulator::arrive(barrier, {file, line});
}

inline void barrier_wait(Shared<Barrier> b, int parity, EMULATOR_SITE) {
  using namespace emulator;
  const Barrier& barrier = check(b, "barrier_wait", {file, line});
  if (parity != 0 && parity != 1) fail({file, line}, "barrier_wait for parity %d: it must be 0 or 1", parity);
  wait(parity ? "barrier_wait for parity 1" : "barrier_wait for parity 0", {file, line},
       [&barrier, parity] { return int(barrier.phase) != parity; }, describe_barrier, &barrier);
}

inline void named_barrier_sync(int id, int threads, EMULATOR_SITE) {
  using namespace emulator;
  int before = id >= 0 && id < 16 ? named_barriers[id].generation : 0;
  NamedBarrier& b = arrive_named("named_barrier_sync", id, threads, {file, line});
  wait("named_barrier_sync", {file, line}, [&b, before] { return b.generation != before; }, describe_named, &b);
}

inline void named_barrier_arrive(int id, int threads, EMULATOR_SITE) {
  emulator::arrive_named("named_barrier_arrive", id, threads, {file, line});
}

inline void tma_prefetch(const TensorMap& map, EMULATOR_SITE) { emulator::check(map, {file, line}); }

template <class E>
void tma_load(Shared<E> to, const TensorMap& map, Shared<Barrier> b, int c0, int c1, int c2, int c3, int c4, EMULATOR_SITE) {
  using namespace emulator;
  Site site{file, line};
  char* tile = box_in_shared_memory(to, map, site);
  Barrier& barrier = check(b, "tma_load", site);
  Coordinates from{c0, c1, c2, c3, c4};
  start(load_queue, 0, false, [map, from, tile, &barrier, site] {
    walk(map, from, tile, [](char* to, const char* from, int bytes) {
      if (from) memcpy(to, from, bytes);
      else memset(to, 0, bytes);
    });
    barrier.bytes -= box_bytes(map);
    settle(barrier, site);
  });
}

template <class E> void bulk_load(Shared<float> to, Global<E> from, int n, Shared<Barrier> b, EMULATOR_SITE) {
  using namespace emulator;
  Site site{file, line};
  static_assert(std::is_same<std::remove_const_t<E>, float>::value, "bulk_load copies float32");
  if (n % 4) fail(site, "bulk_load of %d numbers: it must be a multiple of 4", n);
  float* copy = to.span(n, 16, site);
  const float* x = from.span(n, 16, site);
  Barrier& barrier = check(b, "bulk_load", site);
  start(load_queue, 0, false, [copy, x, n, &barrier, site] {
    memcpy(copy, x, 4 * n);
    barrier.bytes -= 4 * n;
    settle(barrier, site);
  });
}

template <class E>
void tma_store(const TensorMap& map, Shared<E> from, int c0, int c1, int c2, int c3, int c4, EMULATOR_SITE) {
  using namespace emulator;
  char* tile = box_in_shared_memory(from, map, {file, line});
  Coordinates to{c0, c1, c2, c3, c4};
  start_bulk([map, to, tile] {
    walk(map, to, tile, [](const char* from, char* to, int bytes) {
      if (to) memcpy(to, from, bytes);
    });
  });
}

template <class E> void bulk_add(Global<float> to, Shared<E> from, int n, EMULATOR_SITE) {
  using namespace emulator;
  static_assert(std::is_same<std::remove_const_t<E>, float>::value, "bulk_add adds float32");
  if (n % 4) fail({file, line}, "bulk_add of %d numbers: it must be a multiple of 4", n);
  float* sum = to.span(n, 16, {file, line});
  const float* x = from.span(n, 16, {file, line});
  start_bulk([sum, x, n] {
    for (int i = 0; i < n; i++) sum[i] += x[i];
  });
}

inline void bulk_commit() { emulator::thread_copies[emulator::current->rank].bulk_group++; }
template <int N> void bulk_wait_read(EMULATOR_SITE) { emulator::wait_for_bulk("bulk_wait_read", N, {file, line}); }
template <int N> void bulk_wait_done(EMULATOR_SITE) { emulator::wait_for_bulk("bulk_wait_done", N, {file, line}); }

inline void fence_async() {}

inline bool elect_one(EMULATOR_SITE) {
  int nothing = 0;
  emulator::whole_warp("elect_one", nothing, {file, line}, [](int**) {});
  return emulator::current->rank % 32 == 0;
}
