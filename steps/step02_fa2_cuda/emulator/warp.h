// SPDX-License-Identifier: MIT
// What a warp does together, mma, ldmatrix and stmatrix, and accesses of several numbers at once. ptx.cuh
// documents the layouts.
#pragma once
#include "builtins.h"

namespace emulator {

// All 32 lanes bring an offer, and the last of them runs work(offers), an array of 32.
template <class Offer, class Work>
void whole_warp(const char* operation, Offer& offer, Site site, Work work) {
  if (existing_lanes() != ~0u)
    fail(site, "%s needs 32 lanes, and this is the last, incomplete warp of the block", operation);
  meet(warp_meeting(~0u), 32, current->rank % 32, &offer, operation, site,
       [&work](void** offers) { work(reinterpret_cast<Offer**>(offers)); });
}

struct MmaOffer {
  float* d;
  const uint32_t *a, b0, b1;
};
template <class Half> void mma_of_warp(MmaOffer& offer, Site site);

void ldmatrix(const char* operation, uint32_t (&r)[4], const void* row, bool transposed, Site site);
void stmatrix(const uint32_t (&r)[4], void* row, Site site);

// A thread that adds 0 waits in a loop for what other threads do. This lets the others run, but fails if the
// thread loops for ever.
void poll(Site site);

// Blocks take turns by a number. A thread reads it by load_acquire until it is its block's turn. The other
// threads may add after the next __syncthreads. After one more __syncthreads they have added, and the thread
// passes the turn on by add_release. Meanwhile it may wait for the block's next turn.
void wait_for_turn(const int* number, Site site);
void add_in_turn(Site site);
void pass_turn_on(const int* number, Site site);

}  // namespace emulator

template <class Half>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_SITE) {
  emulator::MmaOffer offer{d, a, b0, b1};
  emulator::mma_of_warp<Half>(offer, {file, line});
}

template <class Half> void ldmatrix_x4(uint32_t (&r)[4], Shared<Half> row, EMULATOR_SITE) {
  emulator::ldmatrix("ldmatrix_x4", r, row.vector(16, {file, line}), false, {file, line});
}

template <class Half> void ldmatrix_x4_trans(uint32_t (&r)[4], Shared<Half> row, EMULATOR_SITE) {
  emulator::ldmatrix("ldmatrix_x4_trans", r, row.vector(16, {file, line}), true, {file, line});
}

template <class Half> void stmatrix_x4(Shared<Half> row, const uint32_t (&r)[4], EMULATOR_SITE) {
  emulator::stmatrix(r, row.vector(16, {file, line}), {file, line});
}

template <class To, class M, class From, class N>
void copy_16(emulator::Pointer<To, M> to, emulator::Pointer<From, N> from, bool inside, EMULATOR_SITE) {
  static_assert(sizeof(To) == sizeof(From), "");
  char* bytes = reinterpret_cast<char*>(to.vector(16, {file, line}));
  from.check_alignment(16, {file, line});  // even if nothing is read
  if (inside) memcpy(bytes, from.vector(16, {file, line}), 16);
  else memset(bytes, 0, 16);
}

template <class Half, class M> uint32_t load_pair(emulator::Pointer<Half, M> p, EMULATOR_SITE) {
  uint32_t pair;
  memcpy(&pair, p.vector(4, {file, line}), 4);
  return pair;
}

template <class Half, class M> void store_pair(emulator::Pointer<Half, M> p, uint32_t pair, EMULATOR_SITE) {
  memcpy(p.vector(4, {file, line}), &pair, 4);
}

template <class E, class M> void load_16(uint32_t (&r)[4], emulator::Pointer<E, M> p, EMULATOR_SITE) {
  memcpy(r, p.vector(16, {file, line}), 16);
}

template <class E, class M> void store_16(emulator::Pointer<E, M> p, const uint32_t (&r)[4], EMULATOR_SITE) {
  memcpy(p.vector(16, {file, line}), r, 16);
}

// One fiber runs at a time, so that a plain addition is atomic. Returns the old value, as CUDA does.
template <class E> E atomicAdd(E* address, std::common_type_t<E> value, EMULATOR_SITE) {
  if (std::is_integral<E>::value && value == 0) emulator::poll({file, line});
  emulator::note_addition(address, 1);
  E old = *address;
  *address = old + value;
  return old;
}
template <class E, class M>
E atomicAdd(emulator::Pointer<E, M> p, std::common_type_t<E> value, EMULATOR_SITE) {
  return atomicAdd(p.vector(sizeof(E), {file, line}), value, file, line);
}

inline int load_acquire(Global<int> p, EMULATOR_SITE) {
  emulator::wait_for_turn(p.vector(4, {file, line}), {file, line});
  return atomicAdd(p, 0, file, line);
}
inline void add_release(Global<int> p, int n, EMULATOR_SITE) {
  emulator::pass_turn_on(p.vector(4, {file, line}), {file, line});
  atomicAdd(p, n, file, line);
}

inline void atomic_add_4(Global<float> p, float a, float b, float c, float d, EMULATOR_SITE) {
  float* x = p.vector(16, {file, line});
  emulator::add_in_turn({file, line});
  emulator::note_addition(x, 4);
  x[0] += a;
  x[1] += b;
  x[2] += c;
  x[3] += d;
}
