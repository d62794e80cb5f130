// SPDX-License-Identifier: MIT
// Hopper's tensor cores: wgmma by a warpgroup of 128 threads, whose operands are found by descriptors. From
// its start until wgmma_wait the accumulators hold a mark that is NaN, so that a thread that reads them gets
// NaN, and a thread that writes them is reported.
#pragma once
#include "hopper.h"

namespace emulator {

struct WgmmaOffer {
  const char* name;
  float* d;
  const uint32_t* a;  // null if A is given by a descriptor
  uint64_t a_bits, b_bits;
  bool add;
};

template <class Half> void start_wgmma(WgmmaOffer& offer, int n, bool trans_a, bool trans_b, Site site);
void fence_wgmma(Site site);
void commit_wgmma(Site site);
void wait_for_wgmma(int groups_left, Site site);
void give_registers(int n, Site site);
void take_registers(int n, Site site);

}  // namespace emulator

template <class E> uint64_t descriptor(Shared<E> tile, int leading, int stride) {
  uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
  return address | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}

template <class Half, int N, int TRANS_A, int TRANS_B>
void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool add, EMULATOR_SITE) {
  emulator::WgmmaOffer offer{"wgmma_ss", d, nullptr, a, b, add};
  emulator::start_wgmma<Half>(offer, N, TRANS_A, TRANS_B, {file, line});
}

template <class Half, int N, int TRANS_B>
void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add, EMULATOR_SITE) {
  emulator::WgmmaOffer offer{"wgmma_rs", d, a, 0, b, add};
  emulator::start_wgmma<Half>(offer, N, false, TRANS_B, {file, line});
}

inline void wgmma_fence(EMULATOR_SITE) { emulator::fence_wgmma({file, line}); }
inline void wgmma_commit(EMULATOR_SITE) { emulator::commit_wgmma({file, line}); }
template <int N> void wgmma_wait(EMULATOR_SITE) { emulator::wait_for_wgmma(N, {file, line}); }

template <int N> constexpr int register_count() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg takes 24, 32, ..., 256");
  return N;
}
template <int N> void registers_decrease(EMULATOR_SITE) {
  emulator::give_registers(register_count<N>(), {file, line});
}
template <int N> void registers_increase(EMULATOR_SITE) {
  emulator::take_registers(register_count<N>(), {file, line});
}
