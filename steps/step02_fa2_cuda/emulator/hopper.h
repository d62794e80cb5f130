// SPDX-License-Identifier: MIT
// Hopper's barriers and its copy engine, TMA. ptx.cuh says what each name does.
#pragma once
#include "asynchronous.h"

// A barrier takes 8 bytes of shared memory, as on a GPU. It counts what is still missing in the running
// phase.
struct Barrier {
  int bytes;               // that are still missing
  unsigned arrivals : 11;  // of a phase
  unsigned missing : 12;   // arrivals that are still missing
  unsigned phase : 1;      // its parity
  unsigned mark : 8;       // INITIALISED after barrier_init

  static constexpr unsigned INITIALISED = 0x5a;
  static constexpr int MOST_ARRIVALS = 1024;
};

// What emulator.tensor_map puts into the 128 bytes. Dimension 0 is the innermost, which is contiguous.
struct TensorMap {
  char* address;
  long long stride[4];  // of the dimensions 1 to 4, in bytes
  int size[5], box[5];  // in elements
  int element;          // the bytes of an element
  char unused[128 - 8 - 4 * 8 - 2 * 5 * 4 - 4];
};
static_assert(sizeof(Barrier) == 8 && sizeof(TensorMap) == 128, "as on a GPU");

namespace emulator {

Barrier& check(Shared<Barrier> b, const char* operation, Site site);
void init(Barrier& b, int arrivals, Site site);
void arrive(Barrier& b, Site site);
void expect(Barrier& b, int bytes, Site site);
void wait_for(const Barrier& b, int parity, Site site);

// ---- named barriers ---------------------------------------------------------------------------------------

struct NamedBarrier {
  int threads = 0, arrived = 0, generation = 0;
  Site site;
  std::vector<int> warps;  // those that have arrived
};
extern NamedBarrier named_barriers[16];
std::string describe_named(const void* barrier);
NamedBarrier& arrive_named(const char* operation, int id, int threads, Site site);

// ---- the copy engine --------------------------------------------------------------------------------------

struct Coordinates {
  int c[5];
};

void check(const TensorMap& map, Site site);
int box_bytes(const TensorMap& map);

template <class E> char* box_in_shared_memory(Shared<E> tile, const TensorMap& map, Site site) {
  check(map, site);
  if (map.element != sizeof(E))
    fail(site, "the tensor has elements of %d bytes, the tile of %zu", map.element, sizeof(E));
  auto* begin = const_cast<std::remove_const_t<E>*>(tile.span(box_bytes(map) / sizeof(E), 128, site));
  return reinterpret_cast<char*>(begin);
}

void load_box(char* to, const TensorMap& map, Barrier& b, Coordinates from, Site site);
void store_box(const TensorMap& map, char* from, Coordinates to, Site site);
void load_numbers(float* to, const float* from, int n, Barrier& b, Site site);
void wait_for_bulk(const char* operation, int groups_left, Site site);

}  // namespace emulator

inline void barrier_init(Shared<Barrier> b, int arrivals, EMULATOR_SITE) {
  emulator::init(*b.span(1, 8, {file, line}), arrivals, {file, line});
}

inline void barrier_init_fence() {}

inline void barrier_arrive(Shared<Barrier> b, EMULATOR_SITE) {
  emulator::arrive(emulator::check(b, "barrier_arrive", {file, line}), {file, line});
}

inline void barrier_expect(Shared<Barrier> b, int bytes, EMULATOR_SITE) {
  emulator::expect(emulator::check(b, "barrier_expect", {file, line}), bytes, {file, line});
}

inline void barrier_wait(Shared<Barrier> b, int parity, EMULATOR_SITE) {
  emulator::wait_for(emulator::check(b, "barrier_wait", {file, line}), parity, {file, line});
}

inline void named_barrier_sync(int id, int threads, EMULATOR_SITE) {
  using namespace emulator;
  int before = id >= 0 && id < 16 ? named_barriers[id].generation : 0;
  NamedBarrier& b = arrive_named("named_barrier_sync", id, threads, {file, line});
  auto open = [&b, before] { return b.generation != before; };
  wait("named_barrier_sync", {file, line}, open, describe_named, &b);
}

inline void named_barrier_arrive(int id, int threads, EMULATOR_SITE) {
  emulator::arrive_named("named_barrier_arrive", id, threads, {file, line});
}

template <class E>
void tma_load(Shared<E> to, const TensorMap& map, Shared<Barrier> b, int c0, int c1, int c2, int c3, int c4,
              EMULATOR_SITE) {
  using namespace emulator;
  Site site{file, line};
  load_box(box_in_shared_memory(to, map, site), map, check(b, "tma_load", site), {c0, c1, c2, c3, c4}, site);
}

template <class E> void bulk_load(Shared<float> to, Global<E> from, int n, Shared<Barrier> b, EMULATOR_SITE) {
  using namespace emulator;
  Site site{file, line};
  static_assert(std::is_same<std::remove_const_t<E>, float>::value, "bulk_load copies float32");
  load_numbers(to.span(n, 16, site), from.span(n, 16, site), n, check(b, "bulk_load", site), site);
}

template <class E>
void tma_store(const TensorMap& map, Shared<E> from, int c0, int c1, int c2, int c3, int c4, EMULATOR_SITE) {
  using namespace emulator;
  Site site{file, line};
  store_box(map, box_in_shared_memory(from, map, site), {c0, c1, c2, c3, c4}, site);
}

inline void bulk_commit() { emulator::thread_copies[emulator::current->rank].bulk_group++; }
template <int N> void bulk_wait_read(EMULATOR_SITE) {
  emulator::wait_for_bulk("bulk_wait_read", N, {file, line});
}

inline void fence_async() {}
