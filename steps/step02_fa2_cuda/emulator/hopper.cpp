// SPDX-License-Identifier: MIT
// Barriers and the copy engine: see hopper.h.
#include <string>

namespace emulator {

Barrier& check(Shared<Barrier> b, const char* operation, Site site) {
  Barrier& barrier = *b.span(1, 8, site);
  if (barrier.mark != Barrier::INITIALISED) fail(site, "%s of a barrier that is not initialised", operation);
  return barrier;
}

void init(Barrier& b, int arrivals, Site site) {
  if (b.mark == Barrier::INITIALISED) fail(site, "barrier_init of a barrier that is initialised already");
  if (arrivals < 1 || arrivals > Barrier::MOST_ARRIVALS) fail(site, "barrier_init for %d arrivals", arrivals);
  b.bytes = 0;
  b.arrivals = b.missing = arrivals;
  b.phase = 0;
  b.mark = Barrier::INITIALISED;
}

// Ends the phase if nothing is missing any more.
static void settle(Barrier& b, Site site) {
  if (b.missing) return;
  if (b.bytes < 0 && error.empty())
    error = text("%s: more bytes were copied than expected", name(site).c_str());
  if (b.bytes) return;
  b.phase ^= 1;
  b.missing = b.arrivals;
}

void arrive(Barrier& b, Site site) {
  if (!b.missing)
    fail(site, "more arrivals than the %d of the barrier: this phase waits for %d bytes only", b.arrivals,
         b.bytes);
  b.missing--;
  settle(b, site);
  if (!error.empty()) stop();
}

void expect(Barrier& b, int bytes, Site site) {
  b.bytes += bytes;
  arrive(b, site);
}

static std::string describe_barrier(const void* p) {
  auto& b = *static_cast<const Barrier*>(p);
  return text("%d of %d arrivals and %d bytes missing", b.missing, b.arrivals, b.bytes);
}

void wait_for(const Barrier& b, int parity, Site site) {
  if (parity != 0 && parity != 1) fail(site, "barrier_wait for parity %d: it must be 0 or 1", parity);
  const char* operation = parity ? "barrier_wait for parity 1" : "barrier_wait for parity 0";
  wait(operation, site, [&b, parity] { return int(b.phase) != parity; }, describe_barrier, &b);
}

// ---- named barriers ---------------------------------------------------------------------------------------

NamedBarrier named_barriers[16];

std::string describe_named(const void* p) {
  auto& b = *static_cast<const NamedBarrier*>(p);
  return text("%d of %d threads have come", b.arrived, b.threads);
}

// A warp arrives as a whole. The hardware counts 32 threads, however many of them execute the instruction.
NamedBarrier& arrive_named(const char* operation, int id, int threads, Site site) {
  if (id < 0 || id > 15) fail(site, "%s: there is no barrier %d, only 0 to 15", operation, id);
  if (threads <= 0 || threads % 32) fail(site, "%s: %d threads is no multiple of 32", operation, threads);
  NamedBarrier& b = named_barriers[id];
  int warp = current->rank / 32, nothing = 0;
  whole_warp(operation, nothing, site, [&](int**) {
    if (b.arrived && b.threads != threads)
      fail(site, "barrier %d waits for %d threads here and %d at %s", id, threads, b.threads,
           name(b.site).c_str());
    for (int w : b.warps)
      if (w == warp)
        fail(site, "warp %d arrives at barrier %d for the second time before it is complete", warp, id);
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

// ---- the copy engine --------------------------------------------------------------------------------------

void check(const TensorMap& map, Site site) {
  if (map.element != 2 && map.element != 4)
    fail(site, "this is no tensor map: make one with emulator.tensor_map");
}

// Checks where a box begins: at a multiple of 16 bytes, and the box of a store not before the tensor.
// [CUDA Programming Guide: TMA]
static void check(const TensorMap& map, const Coordinates& at, bool store, Site site) {
  if (at.c[0] * map.element % 16)
    fail(site, "a box begins at column %d: that must be a multiple of 16 bytes", at.c[0]);
  for (int i = 0; store && i < 5; i++)
    if (at.c[i] < 0)
      fail(site, "tma_store at %d in dimension %d: only a load may begin before the tensor", at.c[i], i);
}

int box_bytes(const TensorMap& map) {
  int n = map.element;
  for (int size : map.box) n *= size;
  return n;
}

// Where the swizzle puts a byte: in the 16-byte chunk whose number is its own chunk XOR (row of 128 bytes mod
// 8).
static char* swizzled(char* p) {
  auto a = BlockMemory::address(p);
  return shared_memory.data() + (a ^ (a >> 3 & 0x70));
}

// Calls act(address in shared memory, address in the tensor or null, bytes) for each piece of up to 16 bytes
// of the box at `from`. The address is null outside the tensor.
template <class Act> static void walk(const TensorMap& map, const Coordinates& from, char* tile, Act act) {
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
          act(to, inside && i >= 0 && i < map.size[0] ? row + (long long)i * map.element : nullptr,
              map.element);
      }
    }
    int d = 1;
    while (d < 5 && ++n[d] == map.box[d]) n[d++] = 0;
    if (d == 5) return;
  }
}

// Informs the barrier that so many bytes have come.
static void deliver(Barrier& b, int bytes, Site site) {
  b.bytes -= bytes;
  settle(b, site);
}

void load_box(char* tile, const TensorMap& map, Barrier& barrier, Coordinates from, Site site) {
  check(map, from, false, site);
  start(LOAD_QUEUE, 0, false, [map, from, tile, &barrier, site] {
    walk(map, from, tile, [](char* to, const char* from, int bytes) {
      if (from) memcpy(to, from, bytes);
      else memset(to, 0, bytes);
    });
    deliver(barrier, box_bytes(map), site);
  }, &barrier);
}

void load_numbers(float* to, const float* from, int n, Barrier& barrier, Site site) {
  if (n % 4) fail(site, "bulk_load of %d numbers: it must be a multiple of 4", n);
  start(LOAD_QUEUE, 0, false, [to, from, n, &barrier, site] {
    memcpy(to, from, 4 * n);
    deliver(barrier, 4 * n, site);
  }, &barrier);
}

void wait_for_bulk(const char* operation, int groups_left, Site site) {
  int queue = BULK_QUEUE + current->rank, before = thread_copies[current->rank].bulk_group - groups_left;
  wait(operation, site, [queue, before] { return !under_way(queue, before); });
}

void store_box(const TensorMap& map, char* tile, Coordinates to, Site site) {
  check(map, to, true, site);
  start(BULK_QUEUE + current->rank, thread_copies[current->rank].bulk_group, false, [map, to, tile] {
    walk(map, to, tile, [](const char* from, char* to, int bytes) {
      if (to) memcpy(to, from, bytes);
    });
  });
}

}  // namespace emulator
