// SPDX-License-Identifier: MIT
// The few names that kernels use beyond plain C++. Kernels include this file and no other, and contain no inline assembly.
//
// A kernel touches memory only through these two, so that the same text can be checked on a CPU:
//   Global<T>   the GPU's memory: a kernel's arguments
//   Shared<T>   the block's shared memory, handed out by SharedMemory
// On a GPU both are plain pointers. Under g++ (emulator/) they carry their bounds, and shared memory starts as NaN.
#pragma once

typedef float float32;  // a kernel's macro T is bf16, fp16 or float32; `float` would turn `template <class T>` into nonsense

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

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

// ---- 16-bit numbers ---------------------------------------------------------------------------------------------------

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Exact. [PTX ISA: cvt]
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ inline float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two float32 rounded to nearest and packed, `low` in the lower half. [PTX ISA: cvt]
template <class T> __device__ uint32_t pack(float low, float high);
#if __CUDA_ARCH__ >= 800
template <> __device__ inline uint32_t pack<bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <> __device__ inline uint32_t pack<fp16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
#else
template <> __device__ inline uint32_t pack<fp16>(float low, float high) {
  uint32_t y;
  asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(y) : "f"(low), "f"(high));
  return y;
}
#endif

// ---- arithmetic -------------------------------------------------------------------------------------------------------

// 2^x by the special-function unit, about 2 ulp; 0 for -inf. [PTX ISA: ex2]
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// D (16 x 8, float32) += A (16 x 16) B (16 x 8), by one warp. Lane t holds, with g = t / 4 and c = 2 * (t % 4):
//   a[0] = A[g][c, c+1]   a[1] = A[g+8][c, c+1]   a[2] = A[g][c+8, c+9]   a[3] = A[g+8][c+8, c+9]
//   b0 = B[c, c+1][g]     b1 = B[c+8, c+9][g]     d[0, 1] = D[g][c, c+1]  d[2, 3] = D[g+8][c, c+1]
// [PTX ISA: mma.m16n8k16; before sm_80, in fp16, two mma.m16n8k8]
template <class T> __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#if __CUDA_ARCH__ >= 800
template <> __device__ inline void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ inline void mma<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
template <> __device__ inline void mma<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
}
#endif

// ---- shared memory to registers and back ------------------------------------------------------------------------------

// The 32-bit address of shared memory that PTX instructions take. By the compiler's function, not by asm: so the compiler knows
// what the address is made of, and constants in it become part of the instruction instead of an addition.
__device__ inline uint32_t shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// Four 8 x 8 matrices of 16-bit numbers. Lane t gives the address of row t % 8 (16 bytes, aligned) of matrix t / 8, and gets
// of matrix i in r[i] the numbers [t / 4][2 * (t % 4), + 1]; with _trans of its transpose. [PTX ISA: ldmatrix]
template <class T> __device__ void ldmatrix_x4(uint32_t (&r)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
template <class T> __device__ void ldmatrix_x4_trans(uint32_t (&r)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// The reverse of ldmatrix_x4; sm_90. [PTX ISA: stmatrix]
template <class T> __device__ void stmatrix_x4(T* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- copies that run while the threads go on: sm_80 -------------------------------------------------------------------

// Starts to copy 16 bytes from global to shared memory, both aligned; zeros instead, reading nothing, unless `inside`.
// [PTX ISA: cp.async; before sm_80 a load and a store]
template <class T> __device__ void cp_async_16(T* to, const T* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
#endif
}

// Closes the group of copies that this thread has started since the last one. [PTX ISA: cp.async.commit_group]
__device__ inline void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most N of this thread's groups, the newest, are still under way. [PTX ISA: cp.async.wait_group]
template <int N> __device__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Plain copies of 16 bytes, aligned: global to shared memory, with zeros unless `inside`.
template <class T> __device__ void copy_16(T* to, const T* from, bool inside) {
  *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
}

// Two neighbouring 16-bit numbers as one register, 4-byte aligned: from shared memory, and to shared or global memory.
template <class T> __device__ uint32_t load_pair(const T* p) { return *reinterpret_cast<const uint32_t*>(p); }
template <class T> __device__ void store_pair(T* p, uint32_t pair) { *reinterpret_cast<uint32_t*>(p) = pair; }

// 16 bytes of global memory, aligned, as four registers.
template <class T> __device__ void load_16(uint32_t (&r)[4], const T* p) {
  uint4 x = *reinterpret_cast<const uint4*>(p);
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
// The reverse, to global or shared memory.
template <class T> __device__ void store_16(T* p, const uint32_t (&r)[4]) {
  *reinterpret_cast<uint4*>(p) = {r[0], r[1], r[2], r[3]};
}

// *p += x for four neighbouring float32, 16-byte aligned, each atomically. [PTX ISA: red.global.add.v4.f32; before sm_90 four]
__device__ inline void atomic_add_4(float* p, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(p, a), atomicAdd(p + 1, b), atomicAdd(p + 2, c), atomicAdd(p + 3, d);
#endif
}

// ---- Hopper: barriers in shared memory --------------------------------------------------------------------------------

// An mbarrier counts arrivals and bytes; when both have come its phase ends and the next begins. [PTX ISA: mbarrier]
typedef uint64_t Barrier;

// A phase of this barrier ends after so many arrivals. One thread, once. [PTX ISA: mbarrier.init]
__device__ inline void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Makes the barriers' initial state visible to the copy engine. One thread, before a __syncthreads. [fence.mbarrier_init]
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, without waiting; what the thread did before it is done for those who wait. [PTX ISA: mbarrier.arrive]
__device__ inline void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Arrives, and tells the barrier to expect so many bytes of copies in this phase. [PTX ISA: mbarrier.arrive.expect_tx]
__device__ inline void barrier_expect(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity (0, 1, 0, ...) has ended. Parity 1 of a fresh barrier passes at once.
// [PTX ISA: mbarrier.try_wait]
__device__ inline void barrier_wait(Barrier* b, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// The 16 named barriers of a block: `threads` of them, a multiple of 32, meet; some arrive without waiting. [PTX ISA: barrier]
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Hopper: the copy engine, TMA -------------------------------------------------------------------------------------

// How a tensor lies in memory and which box of it a copy takes; made by the host. [CUDA driver API: cuTensorMapEncodeTiled]
struct alignas(64) TensorMap {
  char opaque[128];
};

// Fetches the map itself, which the first copy would wait for. [PTX ISA: prefetch.tensormap]
__device__ inline void tma_prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// One thread starts to copy the box at (c0, ..., c4) to shared memory, zeros where it leaves the tensor; the bytes are counted
// by the barrier. [PTX ISA: cp.async.bulk.tensor]
template <class T>
__device__ void tma_load(T* to, const TensorMap& map, Barrier* b, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// One thread starts to copy a box from shared memory to the tensor; what would leave it is left out.
// [PTX ISA: cp.async.bulk.tensor, .bulk_group]
template <class T> __device__ void tma_store(const TensorMap& map, const T* from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               ::"l"(&map), "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// One thread starts to copy n float32 (a multiple of 4), 16-byte aligned, from global to shared memory; the bytes are counted by
// the barrier. [PTX ISA: cp.async.bulk]
__device__ inline void bulk_load(float* to, const float* from, int n, Barrier* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(4 * n), "r"(shared_address(b)) : "memory");
}

// One thread starts to add n float32 (a multiple of 4) of shared memory to global memory, each atomically.
// [PTX ISA: cp.reduce.async.bulk]
__device__ inline void bulk_add(float* to, const float* from, int n) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(shared_address(from)), "r"(4 * n) : "memory");
}

// Groups of tma_store and bulk_add, of this thread: closes one; waits until at most N have still to read shared memory, or (done)
// to be written. [PTX ISA: cp.async.bulk.commit_group, cp.async.bulk.wait_group]
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> __device__ void bulk_wait_done() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

// What this thread has written to shared memory so far becomes visible to the copy engine and the tensor cores; then a barrier
// must follow. [PTX ISA: fence.proxy.async]
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What this thread knows to be in global memory comes before what it then asks of the copy engine. [PTX ISA: fence.proxy.async]
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Hopper: registers and tensor cores of a warpgroup (128 threads) ---------------------------------------------------

// The warpgroup gives registers back, or takes some that others have given back. [PTX ISA: setmaxnreg]
template <int N> __device__ void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// One lane of the warp, always the same. [PTX ISA: elect.sync]
__device__ inline bool elect_one() {
  uint32_t yes;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
  return yes;
}

// wgmma reads its operands from shared memory by descriptor: where a tile of 128-byte rows begins (its 16-byte chunks swizzled,
// as TMA leaves them) and how far the next groups of rows lie, in bytes. leading: between slabs of 64 columns, for an operand
// that is stored with its rows along the sum (TRANS = 1), as V is; stride: between groups of 8 rows. [PTX ISA: matrix descriptor]
template <class T> __device__ uint64_t descriptor(const T* tile, int leading, int stride) {
  uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
  return address | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}

// Registers written by ordinary code may be read by the next wgmma. [PTX ISA: wgmma.fence]
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of wgmma; waits until at most N groups, the newest, are still under way. [PTX ISA: wgmma.commit_group,
// wgmma.wait_group]
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#endif
