// SPDX-License-Identifier: MIT
// CUDA on a CPU: compiles a kernel's own text with g++ and runs it, one block after the other, one fiber a thread.
//
// It finds, with the place in the kernel's text: accesses outside the arguments or a shared array, misaligned ones of several
// numbers, reads of shared memory that nobody wrote (NaN), barriers and shuffles that some threads never reach, and, by running
// the threads in several orders, many races. Copies and wgmma run as early or as late as they may: missing waits, swapped
// parities, wrong counts of arrivals or bytes, and buffers filled again too early show in one schedule or another; accumulators
// that are touched while wgmma has them, always. It is stricter than a GPU: a thread that has returned counts as missing at a
// barrier, all threads of a barrier must be at the same line, a warp comes to a named barrier as a whole, and a block that ends
// must have left no named barrier half full and no copy or wgmma under way.
//
// What it cannot find (tests/test_emulator.py plants bugs of both kinds in the kernels):
//   - a race that no order of whole steps shows: a thread is only interrupted where it waits, never between two accesses, so
//     that two threads adding to one address without atomicAdd go unnoticed; nor one that none of the schedules tried shows
//   - a missing fence_async, barrier_init_fence or __threadfence: here everybody sees every write at once
//   - a missing wgmma_fence, unless none came since the accumulators' last wgmma; registers of A are not looked at
//   - bulk_wait_read in place of bulk_wait_done: a copy reads and writes in one step
//   - code that needs the threads of a warp to run in lockstep is wrong here and may be right on a GPU, or the reverse
//   - an access beyond the end of a thread's own array; a loop that waits for plain memory to change, which never ends here
//   - an access that stays between a tensor's first and last element, but in the gap between two of its rows or heads
//   - anything between blocks: they run one after the other and never wait for each other
//   - registers, spills, setmaxnreg's sums, shared-memory limits of a GPU, speed
//   - rounding: the CPU's expf and the order of additions differ from the GPU's in the last bits; tensor cores cut sums off
//   - a misreading of the ISA that the emulator shares: tests/test_emulator_hopper.py runs the same kernels on a GPU
//
// fiber.h switches stacks, block.h schedules, conflicts.cpp counts bank conflicts, memory.h checks accesses, numbers.h rounds,
// builtins.h has CUDA's names; ptx.cuh's are in warp.h, asynchronous.h (what runs while the threads go on), hopper.h, wgmma.h.
// What does not depend on a kernel's types is in the .cpp beside a header, compiled once and linked with every kernel.
#pragma once
#include "wgmma.h"

namespace emulator {

struct Launch {  // as emulator/__init__.py fills it
  unsigned grid[3], block[3];
  int shared_bytes, thread_order, block_order, copy_time, wgmma_time, count_conflicts;
  uint64_t seed;
  void** arguments;           // where each argument lies, as for cuLaunchKernel
  const long long* elements;  // for a Global argument: bytes from its address to the end of its tensor
};

// Runs all blocks, with call() for each thread; returns null, or what went wrong.
const char* run(const Launch& l, void (*call)());

template <class A> struct Argument {
  static A get(const void* value, long long) {
    A a;
    memcpy(&a, value, sizeof a);  // Python aligns nothing to more than 8 bytes
    return a;
  }
};
template <class E> struct Argument<Global<E>> {
  static Global<E> get(void* value, long long bytes) { return {*static_cast<E**>(value), bytes / (long long)sizeof(E)}; }
};

template <class... A, size_t... I>
const char* launch(void (*kernel)(A...), const Launch& l, std::integer_sequence<size_t, I...>) {
  static void (*the_kernel)(A...);
  static const Launch* the_launch;
  the_kernel = kernel;
  the_launch = &l;
  return run(l, [] { the_kernel(Argument<A>::get(the_launch->arguments[I], the_launch->elements[I])...); });
}

template <class... A> const char* launch(void (*kernel)(A...), const Launch& l) {
  return launch(kernel, l, std::make_integer_sequence<size_t, sizeof...(A)>());
}

}  // namespace emulator

// Makes the kernel callable from Python; returns null, or what went wrong.
#define EMULATOR_KERNEL(kernel)                                                                                    \
  extern "C" __attribute__((visibility("default"))) const char* emulate_##kernel(const emulator::Launch* launch) { \
    return emulator::launch(kernel, *launch);                                                                      \
  }
