// SPDX-License-Identifier: MIT
// The names that are built into CUDA C++.
#pragma once
#include <type_traits>

#include "functions.h"
#include "memory.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (emulator::current->index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

// Default arguments: the file and the line of the call.
#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }

inline void __syncthreads(EMULATOR_SITE) {
  using namespace emulator;
  int n = int(threads.size());
  meet(block_meeting, n, current->rank, nullptr, "__syncthreads", {file, line}, [](void**) {});
}

template <class E> E __ldg(const E* p) { return *p; }
template <class E> auto __ldg(Global<E> p, emulator::Index first = 0) { return p[first]; }

inline void __threadfence() {}  // in the emulation all memory accesses happen in order

namespace emulator {

inline unsigned existing_lanes() {  // of this warp, since the last warp of a block may have fewer than 32
  size_t n = threads.size() - current->rank / 32 * 32;
  return n >= 32 ? ~0u : (1u << n) - 1;
}

// Every lane of the mask brings a value, and gets the value of its source lane.
template <class V> V shuffle(const char* operation, unsigned mask, V value, int source, Site site) {
  struct Offer {
    V value;
    int source;
  } offer{value, source};
  int lane = current->rank % 32;
  mask &= existing_lanes();
  if (!(mask >> lane & 1)) fail(site, "%s: lane %d is not in its own mask %#x", operation, lane, mask);
  if (!(mask >> source & 1))
    fail(site, "%s reads lane %d, which is not in the mask %#x", operation, source, mask);
  meet(warp_meeting(mask), __builtin_popcount(mask), lane, &offer, operation, site, [mask](void** offers) {
    V values[32];
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) values[i] = static_cast<Offer*>(offers[i])->value;
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) {
        Offer& o = *static_cast<Offer*>(offers[i]);
        o.value = values[o.source];
      }
  });
  return offer.value;
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = ~0u, EMULATOR_SITE) {
  emulator::shuffle("__syncwarp", mask, 0, emulator::current->rank % 32, {file, line});
}

// The lanes form groups of `width`, a power of two. If the source lies outside the group, a lane gets its own
// value.
template <class V> V __shfl_sync(unsigned mask, V value, int source, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32;
  return emulator::shuffle("__shfl_sync", mask, value, lane / width * width + source % width, {file, line});
}

template <class V> V __shfl_xor_sync(unsigned mask, V value, int lanes, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane ^ lanes;
  if (source / width > lane / width) source = lane;
  return emulator::shuffle("__shfl_xor_sync", mask, value, source, {file, line});
}

// Whether the predicate holds for any lane of the full warp.
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  for (int lanes = 1; lanes < 32; lanes *= 2)
    predicate |= __shfl_xor_sync(mask, predicate, lanes, 32, file, line);
  return predicate;
}

template <class V> V __shfl_up_sync(unsigned mask, V value, unsigned delta, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane - int(delta);
  if (source < lane / width * width) source = lane;
  return emulator::shuffle("__shfl_up_sync", mask, value, source, {file, line});
}

template <class V> V __shfl_down_sync(unsigned mask, V value, unsigned delta, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane + int(delta);
  if (source / width > lane / width) source = lane;
  return emulator::shuffle("__shfl_down_sync", mask, value, source, {file, line});
}
