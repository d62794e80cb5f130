// SPDX-License-Identifier: MIT
// The names that CUDA C++ has built in.
#pragma once
#include <math.h>

#include "memory.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (emulator::current->index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // of the call, as default arguments

template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

inline void __syncthreads(EMULATOR_SITE) {
  using namespace emulator;
  meet(block_meeting, int(threads.size()), current->rank, nullptr, "__syncthreads", {file, line}, [](void**) {});
}

namespace emulator {

inline unsigned existing_lanes() {  // of this warp: the last one of a block may have fewer than 32
  size_t n = threads.size() - current->rank / 32 * 32;
  return n >= 32 ? ~0u : (1u << n) - 1;
}

// All lanes of the mask bring a value; each gets the one of its source lane.
template <class T> T shuffle(const char* operation, unsigned mask, T value, int source, Site site) {
  struct Offer {
    T value;
    int source;
  } offer{value, source};
  int lane = current->rank % 32;
  mask &= existing_lanes();
  if (!(mask >> lane & 1)) fail(site, "%s: lane %d is not in its own mask %#x", operation, lane, mask);
  if (!(mask >> source & 1)) fail(site, "%s reads lane %d, which is not in the mask %#x", operation, source, mask);
  meet(warp_meeting(mask), __builtin_popcount(mask), lane, &offer, operation, site, [mask](void** offers) {
    T values[32];
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
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32;
  return emulator::shuffle("__shfl_sync", mask, value, lane / width * width + source % width, {file, line});
}

template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane ^ lanes;
  return emulator::shuffle("__shfl_xor_sync", mask, value, source / width > lane / width ? lane : source, {file, line});
}

template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane - int(delta);
  return emulator::shuffle("__shfl_up_sync", mask, value, source < lane / width * width ? lane : source, {file, line});
}

template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  int lane = emulator::current->rank % 32, source = lane + int(delta);
  return emulator::shuffle("__shfl_down_sync", mask, value, source / width > lane / width ? lane : source, {file, line});
}

// One fiber runs at a time, so that plain addition is atomic; returns the old value as CUDA's does.
template <class T> T atomicAdd(T* address, T value) {
  T old = *address;
  *address = old + value;
  return old;
}
