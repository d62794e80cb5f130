// SPDX-License-Identifier: MIT
// What a warp does together with registers and shared memory: mma, ldmatrix, stmatrix; and accesses of several numbers at once.
// Layouts as ptx.cuh documents them.
#pragma once
#include "builtins.h"

namespace emulator {

// All 32 lanes bring an offer; the last one runs work(offers), an array of 32.
template <class Offer, class Work> void whole_warp(const char* operation, Offer& offer, Site site, Work work) {
  if (existing_lanes() != ~0u) fail(site, "%s needs 32 lanes, and this is the last, incomplete warp of the block", operation);
  meet(warp_meeting(~0u), 32, current->rank % 32, &offer, operation, site,
       [&work](void** offers) { work(reinterpret_cast<Offer**>(offers)); });
}

struct MmaOffer {
  float* d;
  const uint32_t *a, b0, b1;
};

template <class Half> void mma_of_warp(MmaOffer** lanes) {
  float A[16][16], B[16][8];
  for (int t = 0; t < 32; t++) {
    int g = t / 4, c = 2 * (t % 4);
    for (int i = 0; i < 4; i++) {
      A[g + i % 2 * 8][c + i / 2 * 8] = low<Half>(lanes[t]->a[i]);
      A[g + i % 2 * 8][c + i / 2 * 8 + 1] = high<Half>(lanes[t]->a[i]);
    }
    B[c][g] = low<Half>(lanes[t]->b0), B[c + 1][g] = high<Half>(lanes[t]->b0);
    B[c + 8][g] = low<Half>(lanes[t]->b1), B[c + 9][g] = high<Half>(lanes[t]->b1);
  }
  for (int t = 0; t < 32; t++)
    for (int i = 0; i < 4; i++) {
      int row = t / 4 + i / 2 * 8, column = 2 * (t % 4) + i % 2;
      float sum = lanes[t]->d[i];
      for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][column];
      lanes[t]->d[i] = sum;
    }
}

struct MatrixOffer {
  uint32_t* r;
  char* row;
};

// Number [row][column] of matrix i.
inline uint16_t& matrix(MatrixOffer** lanes, int i, int row, int column) {
  return reinterpret_cast<uint16_t*>(lanes[8 * i + row]->row)[column];
}

inline void ldmatrix(const char* operation, uint32_t (&r)[4], const void* row, bool transposed, Site site) {
  MatrixOffer offer{r, static_cast<char*>(const_cast<void*>(row))};
  whole_warp(operation, offer, site, [transposed](MatrixOffer** lanes) {
    for (int t = 0; t < 32; t++)
      for (int i = 0; i < 4; i++) {
        int g = t / 4, c = 2 * (t % 4);
        uint32_t low = transposed ? matrix(lanes, i, c, g) : matrix(lanes, i, g, c);
        uint32_t high = transposed ? matrix(lanes, i, c + 1, g) : matrix(lanes, i, g, c + 1);
        lanes[t]->r[i] = low | high << 16;
      }
  });
}

// An addition of 0 looks what others have done, in a loop: they get their turn, but not for ever.
inline void poll(Site site) {
  int polls = current->polls + 1;
  if (polls > 100000) fail(site, "this thread polls for ever; blocks run one after the other, and none can wait for a later one");
  wait("a loop of atomicAdd", site, [] { return true; });
  current->polls = polls;
}

}  // namespace emulator

template <class Half> void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_SITE) {
  emulator::MmaOffer offer{d, a, b0, b1};
  emulator::whole_warp("mma", offer, {file, line}, emulator::mma_of_warp<Half>);
}

template <class Half> void ldmatrix_x4(uint32_t (&r)[4], Shared<Half> row, EMULATOR_SITE) {
  emulator::ldmatrix("ldmatrix_x4", r, row.vector(16, {file, line}), false, {file, line});
}

template <class Half> void ldmatrix_x4_trans(uint32_t (&r)[4], Shared<Half> row, EMULATOR_SITE) {
  emulator::ldmatrix("ldmatrix_x4_trans", r, row.vector(16, {file, line}), true, {file, line});
}

template <class Half> void stmatrix_x4(Shared<Half> row, const uint32_t (&r)[4], EMULATOR_SITE) {
  using namespace emulator;
  MatrixOffer offer{const_cast<uint32_t*>(r), reinterpret_cast<char*>(row.vector(16, {file, line}))};
  whole_warp("stmatrix_x4", offer, {file, line}, [](MatrixOffer** lanes) {
    for (int t = 0; t < 32; t++)
      for (int i = 0; i < 4; i++) {
        matrix(lanes, i, t / 4, 2 * (t % 4)) = uint16_t(lanes[t]->r[i]);
        matrix(lanes, i, t / 4, 2 * (t % 4) + 1) = uint16_t(lanes[t]->r[i] >> 16);
      }
  });
}

template <class To, class M, class From, class N>
void copy_16(emulator::Pointer<To, M> to, emulator::Pointer<From, N> from, bool inside, EMULATOR_SITE) {
  static_assert(sizeof(To) == sizeof(From), "");
  char* bytes = reinterpret_cast<char*>(to.vector(16, {file, line}));
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

// One fiber runs at a time, so that plain addition is atomic; returns the old value as CUDA's does.
template <class E> E atomicAdd(E* address, std::common_type_t<E> value, EMULATOR_SITE) {
  if (std::is_integral<E>::value && value == 0) emulator::poll({file, line});
  E old = *address;
  *address = old + value;
  return old;
}
template <class E, class M> E atomicAdd(emulator::Pointer<E, M> p, std::common_type_t<E> value, EMULATOR_SITE) {
  return atomicAdd(p.vector(sizeof(E), {file, line}), value, file, line);
}

inline void atomic_add_4(Global<float> p, float a, float b, float c, float d, EMULATOR_SITE) {
  float* x = p.vector(16, {file, line});
  x[0] += a, x[1] += b, x[2] += c, x[3] += d;
}
