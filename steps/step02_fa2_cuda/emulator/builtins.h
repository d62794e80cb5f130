// SPDX-License-Identifier: MIT
// The names that CUDA C++ has built in.
#pragma once
#include <type_traits>

#include "memory.h"
#include "numbers.h"

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

#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // of the call, as default arguments

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }

inline void __syncthreads(EMULATOR_SITE) {
  using namespace emulator;
  meet(block_meeting, int(threads.size()), current->rank, nullptr, "__syncthreads", {file, line}, [](void**) {});
}

inline void __threadfence() {}  // all memory accesses happen in order here

namespace emulator {

inline unsigned existing_lanes() {  // of this warp: the last one of a block may have fewer than 32
  size_t n = threads.size() - current->rank / 32 * 32;
  return n >= 32 ? ~0u : (1u << n) - 1;
}

// All lanes of the mask bring a value; each gets the one of its source lane.
template <class V> V shuffle(const char* operation, unsigned mask, V value, int source, Site site) {
  struct Offer {
    V value;
    int source;
  } offer{value, source};
  int lane = current->rank % 32;
  mask &= existing_lanes();
  if (!(mask >> lane & 1)) fail(site, "%s: lane %d is not in its own mask %#x", operation, lane, mask);
  if (!(mask >> source & 1)) fail(site, "%s reads lane %d, which is not in the mask %#x", operation, source, mask);
  meet(warp_meeting(mask), __builtin_popcount(mask), lane, &offer, operation, site, [mask](void** offers) {
    V values[32];
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) values[i] = static_cast<Offer*>(offers[i])->value;
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) static_cast<Offer*>(offers[i])->value = values[static_cast<Offer*>(offers[i])->source];
  });
  return offer.value;
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = ~0u, EMULATOR_SITE) {
  emulator::shuffle("__syncwarp", mask, 0, emulator::current->rank % 32, {file, line});
}

// The lanes form groups of `width`, a power of two; a source outside the group means the lane itself.
template <class V> V __shfl_sync(unsigned mask, V value, int source, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32;
  return emulator::shuffle("__shfl_sync", mask, value, lane / width * width + source % width, {file, line});
}

template <class V> V __shfl_xor_sync(unsigned mask, V value, int lanes, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane ^ lanes;
  return emulator::shuffle("__shfl_xor_sync", mask, value, source / width > lane / width ? lane : source, {file, line});
}

// Whether the predicate holds for any lane of the full warp.
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  for (int lanes = 1; lanes < 32; lanes *= 2) predicate |= __shfl_xor_sync(mask, predicate, lanes, 32, file, line);
  return predicate;
}

template <class V> V __shfl_up_sync(unsigned mask, V value, unsigned delta, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane - int(delta);
  return emulator::shuffle("__shfl_up_sync", mask, value, source < lane / width * width ? lane : source, {file, line});
}

template <class V> V __shfl_down_sync(unsigned mask, V value, unsigned delta, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane + int(delta);
  return emulator::shuffle("__shfl_down_sync", mask, value, source / width > lane / width ? lane : source, {file, line});
}
