// SPDX-License-Identifier: MIT
// The few names that kernels use beyond plain C++. Kernels include this file and no other, and contain no
// inline assembly.
//
// A kernel touches memory only through two types, so that the same text can be checked on a CPU:
//   Global<T>   the GPU's memory: a kernel's arguments
//   Shared<T>   the block's shared memory, handed out by SharedMemory
// On a GPU both are plain pointers. Under g++ (emulator/) they carry their bounds, and shared memory starts
// as NaN.
#pragma once

// The macro T of a kernel is bf16, fp16 or float32. It also replaces the T of every `template <class T>`
// below, where the name of a type is allowed and the keyword `float` is not.
typedef float float32;

#ifndef __CUDACC__
#include "emulator/cuda.h"
#else

typedef long long int64_t;  // NVRTC compiles without any header
#define INFINITY __int_as_float(0x7f800000)

template <class T> using Global = T*;
template <class T> using Shared = T*;

// Cuts the dynamic shared memory of the launch into arrays, one after the other:
// SharedMemory smem; Shared<float> K = smem.array<float>(n);
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

// ---- 16-bit numbers ---------------------------------------------------------------------------------------

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The conversion to float32 is exact. [PTX ISA: cvt]
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ inline float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Rounds two float32 to the nearest 16-bit numbers and packs them into one register, `low` in the lower half.
// [PTX ISA: cvt]
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
  asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
      : "=r"(y) : "f"(low), "f"(high));
  return y;
}
#endif

// ---- arithmetic -------------------------------------------------------------------------------------------

// 2^x by the special-function unit, with an error of about 2 ulp; for -inf it is 0. [PTX ISA: ex2]
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// D (16 x 8, float32) += A (16 x 16) B (16 x 8), computed by one warp. With g = t / 4 and c = 2 * (t % 4),
// lane t holds
//   a[0] = A[g][c, c+1]   a[1] = A[g+8][c, c+1]   a[2] = A[g][c+8, c+9]   a[3] = A[g+8][c+8, c+9]
//   b0 = B[c, c+1][g]     b1 = B[c+8, c+9][g]     d[0, 1] = D[g][c, c+1]  d[2, 3] = D[g+8][c, c+1]
// [PTX ISA: mma.m16n8k16; before sm_80 two mma.m16n8k8, in fp16 only]
template <class T> __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#if __CUDA_ARCH__ >= 800
template <>
__device__ inline void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
template <>
__device__ inline void mma<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
}
#endif

// ---- shared memory to registers and back ------------------------------------------------------------------

// The 32-bit address in shared memory that PTX instructions take. The compiler's own function computes it,
// not inline assembly, so that the compiler knows the terms of the sum: a constant term then becomes part of
// the instruction and costs no addition.
__device__ inline uint32_t shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// Reads four 8 x 8 matrices of 16-bit numbers. Lane t gives the address of row t % 8 of matrix t / 8, 16
// aligned bytes. In r[i] it gets two neighbours of matrix i, the numbers [t / 4][2 * (t % 4), + 1]; with
// _trans it gets those of the transposed matrix. [PTX ISA: ldmatrix]
template <class T> __device__ void ldmatrix_x4(uint32_t (&r)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
template <class T> __device__ void ldmatrix_x4_trans(uint32_t (&r)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Writes four matrices, the reverse of ldmatrix_x4. sm_90. [PTX ISA: stmatrix]
template <class T> __device__ void stmatrix_x4(T* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- asynchronous copies: sm_80 ---------------------------------------------------------------------------

// Starts to copy 16 bytes from global to shared memory; both addresses are multiples of 16. Unless `inside`,
// it writes zeros and reads nothing. [PTX ISA: cp.async; before sm_80 a load and a store]
template <class T> __device__ void cp_async_16(T* to, const T* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
#endif
}

// Puts the copies that this thread has started since the last call into one group.
// [PTX ISA: cp.async.commit_group]
__device__ inline void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all of this thread's groups but the newest N have been copied. [PTX ISA: cp.async.wait_group]
template <int N> __device__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Copies 16 aligned bytes from global to shared memory by a load and a store; writes zeros unless `inside`.
template <class T> __device__ void copy_16(T* to, const T* from, bool inside) {
  *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
}

// Two neighbouring 16-bit numbers, 4-byte aligned, as one register: load_pair reads them from shared memory,
// store_pair writes them to shared or global memory.
template <class T> __device__ uint32_t load_pair(const T* p) { return *reinterpret_cast<const uint32_t*>(p); }
template <class T> __device__ void store_pair(T* p, uint32_t pair) { *reinterpret_cast<uint32_t*>(p) = pair; }

// Loads 16 aligned bytes of global memory into four registers.
template <class T> __device__ void load_16(uint32_t (&r)[4], const T* p) {
  uint4 x = *reinterpret_cast<const uint4*>(p);
  r[0] = x.x;
  r[1] = x.y;
  r[2] = x.z;
  r[3] = x.w;
}
// The reverse of load_16; it stores to global or shared memory.
template <class T> __device__ void store_16(T* p, const uint32_t (&r)[4]) {
  *reinterpret_cast<uint4*>(p) = {r[0], r[1], r[2], r[3]};
}

// Adds a, b, c and d to four neighbouring float32, 16-byte aligned; each of the four additions is atomic.
// [PTX ISA: red.global.add.v4.f32; before sm_90 four atomicAdd]
__device__ inline void atomic_add_4(float* p, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(p, a);
  atomicAdd(p + 1, b);
  atomicAdd(p + 2, c);
  atomicAdd(p + 3, d);
#endif
}

// Blocks take turns by a number in global memory. A thread that reads it by load_acquire also sees what
// another thread has written before its add_release, which adds n. [PTX ISA: ld.acquire, red.release]
__device__ inline int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ inline void add_release(int* p, int n) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}

// ---- Hopper: barriers in shared memory --------------------------------------------------------------------

// An mbarrier counts arrivals of threads and bytes of copies. When all that it expects have come, its phase
// ends and the next phase begins. [PTX ISA: mbarrier]
typedef uint64_t Barrier;

// Sets how many arrivals end a phase of this barrier. One thread calls it, once. [PTX ISA: mbarrier.init]
__device__ inline void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Makes the initial state of barriers visible to the copy engine. The thread that has initialised them calls
// it, before the __syncthreads after which the block uses them. [PTX ISA: fence.mbarrier_init]
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives without waiting. A thread that waits for this phase sees all that the arriving thread did before.
// [PTX ISA: mbarrier.arrive]
__device__ inline void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Arrives, and makes the barrier expect so many more bytes of copies in this phase.
// [PTX ISA: mbarrier.arrive.expect_tx]
__device__ inline void barrier_expect(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended; the phases have the parities 0, 1, 0, 1, ... On a barrier
// whose first phase still runs, a wait for parity 1 passes at once. [PTX ISA: mbarrier.try_wait]
__device__ inline void barrier_wait(Barrier* b, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// A block has 16 named barriers. One opens when `threads` threads, a multiple of 32, have come to it: those
// that call _sync wait until then, those that call _arrive do not wait. [PTX ISA: barrier]
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Hopper: the copy engine, TMA -------------------------------------------------------------------------

// Describes how a tensor lies in memory and which box of it one copy takes. The host makes it.
// [CUDA driver API: cuTensorMapEncodeTiled]
struct alignas(64) TensorMap {
  char opaque[128];
};

// Starts to copy the box at (c0, ..., c4) to shared memory, with zeros for the elements outside the tensor.
// One thread calls it. The barrier counts the bytes as they come. [PTX ISA: cp.async.bulk.tensor]
template <class T>
__device__ void tma_load(T* to, const TensorMap& map, Barrier* b, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// Starts to copy a box from shared memory to the tensor, without the elements that lie outside it. One thread
// calls it, and the copy belongs to that thread's bulk groups, see bulk_commit.
// [PTX ISA: cp.async.bulk.tensor, .bulk_group]
template <class T>
__device__ void tma_store(const TensorMap& map, const T* from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
      ::"l"(&map), "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// Starts to copy n float32, n a multiple of 4, from global to shared memory; both addresses are multiples of
// 16 bytes. One thread calls it. The barrier counts the bytes as they come. [PTX ISA: cp.async.bulk]
__device__ inline void bulk_load(float* to, const float* from, int n, Barrier* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(4 * n), "r"(shared_address(b)) : "memory");
}

// bulk_commit puts the tma_store that this thread has started since the last call into one group.
// bulk_wait_read waits until all of the thread's groups but the newest N have read shared memory.
// [PTX ISA: cp.async.bulk.commit_group, cp.async.bulk.wait_group]
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// The copy engine and the tensor cores reach memory by another path than loads and stores, the "async proxy",
// and a barrier of threads alone does not order the two paths. fence_async makes what this thread has written
// to shared memory visible on the other path. The threads that have written call it; then they meet at a
// barrier; then a copy or a product that reads the data may start. [PTX ISA: fence.proxy.async]
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Hopper: registers and tensor cores of a warpgroup (128 threads) --------------------------------------

// Each thread of the warpgroup has N registers from now on. _decrease gives registers back to the block;
// _increase takes registers that others have given back, and waits until there are enough.
// [PTX ISA: setmaxnreg]
template <int N> __device__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// wgmma finds an operand in shared memory by a descriptor: a tile of rows of 128 bytes, whose 16-byte chunks
// are swizzled as TMA does it. The descriptor says where the tile begins, and two distances in bytes:
// `stride` from one group of 8 rows to the next, and `leading` from one slab of 64 columns to the next. The
// hardware looks at `leading` only if the product's sum runs down the rows of the tile (TRANS = 1), as it
// does for V.
// [PTX ISA: matrix descriptor]
template <class T> __device__ uint64_t descriptor(const T* tile, int leading, int stride) {
  uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
  return address | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}

// A wgmma reads and writes registers while the threads go on. After ordinary instructions have used its
// accumulators or written its operand A, this fence must come before the wgmma, so that it finds their
// results. [PTX ISA: wgmma.fence]
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma_commit puts the wgmma that the warpgroup has started since the last call into one group. wgmma_wait
// waits until all groups but the newest N have ended. [PTX ISA: wgmma.commit_group, wgmma.wait_group]
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#endif

// ---- exponents, large ones too ----------------------------------------------------------------------------

// The factor f of a row's scores in P = 2^(f * S - f * m), where m is the row maximum; in general scale_log2.
// The compiler makes `S * f - shift` one FMA, which does not round the product, while shift = f * m has been
// rounded before. At S = m the exponent is then up to shift / 2^24 instead of 0, and P is infinite for scores
// of 1e11. So from 2^26 on f is the power of two below scale_log2, whose products are exact. No information
// is lost: neighbouring float32 numbers of that size differ by so much that P is 1 for the maximum and small
// for all other scores.
__device__ inline float exponent_factor(float m, float scale_log2) {
  if (fabsf(m * scale_log2) < 67108864.0f) return scale_log2;
  return __int_as_float(__float_as_int(scale_log2) & 0x7f800000);  // without its mantissa
}

// lse in base 2 for the backward's P = 2^(scale_log2 * S - lse_2), which is at most 1. lse_2 and the product
// have been rounded four times, so that their difference may be wrong by 2^-22 of them: by 8 if lse_2 is
// 2^25. So from 2^24 on lse_2 is reduced by as much, to 2^25 - 8. Then P, which the kernels limit to 1, is 1
// for a row's largest score and never infinite. It is 1, too, for each of several keys that share that score:
// neighbouring float32 numbers are so far apart there that lse does not depend on the number of these keys. A
// row that saw no key gets P = 0.
__device__ inline float lse_in_base_2(float lse) {
  float lse_2 = lse * 1.4426950408889634f;
  if (lse == -INFINITY) return INFINITY;
  return fabsf(lse_2) < 16777216.0f ? lse_2 : lse_2 - fabsf(lse_2) / 4194304.0f;
}
