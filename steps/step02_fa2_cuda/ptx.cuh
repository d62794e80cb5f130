// SPDX-License-Identifier: MIT
// The few names that kernels use beyond plain C++. Kernels include this file and no other, and contain no inline assembly.
//
// A kernel touches memory only through these two, so that the same text can be checked on a CPU:
//   Global<T>   the GPU's memory: a kernel's arguments
//   Shared<T>   the block's shared memory, handed out by SharedMemory
// On a GPU both are plain pointers. Under g++ (emulator/) they carry their bounds, and shared memory starts as NaN.
#pragma once

#ifndef __CUDACC__
#include "emulator/cuda.h"
#else

typedef long long int64_t;  // NVRTC compiles without any header
#define INFINITY __int_as_float(0x7f800000)

template <class T> using Global = T*;
template <class T> using Shared = T*;

// Cuts the launch's dynamic shared memory into arrays, one after the other: SharedMemory smem; auto K = smem.array<float>(n);
struct SharedMemory {
  int used = 0;  // bytes

  template <class T> __device__ Shared<T> array(int n) {
    extern __shared__ __align__(1024) char memory[];
    T* a = reinterpret_cast<T*>(memory + used);
    used += n * sizeof(T);
    return a;
  }
};

#endif
