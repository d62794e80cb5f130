// SPDX-License-Identifier: MIT
// CUDA on a CPU: g++ compiles a kernel's own text, and the kernel runs one block after the other, with a
// fiber for each thread.
//
// The emulation finds these mistakes, and names the line of the kernel:
//   - an access outside an argument or a shared array, and a misaligned access of several numbers
//   - a read of shared memory that nobody has written: shared memory starts as NaN, and `find_unwritten` in
//     __init__.py names the first result that comes from it
//   - a barrier or a shuffle that some threads never reach
//   - many races, because it can run the threads in several orders
//   - missing waits, swapped parities, wrong counts of arrivals or bytes, and buffers that are filled again
//     too early: copies and wgmma are performed as early or as late as they may, and each of these mistakes
//     shows in some schedule
//   - accumulators that are used while a wgmma uses them, in every schedule
//   - a warpgroup that waits for registers which the others do not give back
//   - two blocks that write to one element of an argument, unless they add to it atomically
//   - a turn that a thread passes on by add_release and has not waited for by load_acquire
//   - an addition of another thread in such a turn, which may come before the wait or after the turn was
//     passed on, because there is no __syncthreads between
//
// In some points it is stricter than a GPU. A thread that has returned counts as missing at a barrier. All
// threads of a barrier must be at the same line. A warp comes to a named barrier as a whole. A block that
// ends must leave no named barrier half full, and no copy or wgmma under way.
//
// It cannot find the following (tests/test_emulator.py plants bugs of both kinds in the kernels):
//   - a race that none of the tried schedules shows, or that no schedule can show: a thread is only
//     interrupted where it waits, never between two accesses, so that two threads of a block may add to
//     one address without atomicAdd and nobody notices
//   - a missing fence_async, barrier_init_fence or __threadfence, and the order that load_acquire and
//     add_release ensure, because all threads see every write at once
//   - a missing wgmma_fence, unless there was none since the last wgmma with these accumulators; the
//     registers of A are not checked
//   - code that needs the threads of a warp to run in lockstep: it is wrong here and may be right on a GPU,
//     or the reverse
//   - an access beyond the end of a thread's own array, unless it is in a loop with a constant end, which g++
//     refuses
//   - a loop that waits for plain memory to change; here it never ends, and Ctrl-C does not end it
//   - an access between a tensor's first and last element, but in the gap between two of its rows or heads
//   - anything else between blocks, which run one after the other and never wait for each other
//   - registers that a kernel has too few of, spills, the limits of a GPU's shared memory, speed
//   - rounding: the CPU's expf and its order of additions differ from the GPU's in the last bits, and tensor
//     cores truncate sums. An a * b + c is rounded once, as on a GPU, where the CPU has FMA.
//   - a misreading of the ISA in the emulation itself, therefore tests/test_emulator_hopper.py runs the same
//     kernels on a GPU
//
// fiber.h switches stacks, block.h schedules, conflicts.cpp counts bank conflicts, memory.h checks accesses,
// writes.cpp finds the blocks that write to one element and counts atomic additions, numbers.h rounds,
// functions.h has CUDA's mathematics and builtins.h its other names; absent.py says what to write instead of
// missing names. The names of ptx.cuh are in warp.h, asynchronous.h, hopper.h and wgmma.h. Code that does not
// depend on a kernel's types is in the .cpp beside a header, which is compiled once and linked with every
// kernel.
#pragma once
#include "wgmma.h"

namespace emulator {

struct Launch {  // emulator/__init__.py has the same structure
  unsigned grid[3], block[3];
  int shared_bytes, thread_order, block_order, copy_time, wgmma_time, count_conflicts;
  uint64_t seed;
  void** arguments;           // where each argument lies, as for cuLaunchKernel
  const long long* elements;  // for a Global argument, the bytes from its address to the end of its tensor
  const char** names;         // of the arguments
  int (*interrupted)();       // runs Python's handlers of signals; not 0 if one of them ends the launch
};

// Runs all blocks; each of their threads calls call(). Returns null, or what went wrong.
const char* run(const Launch& l, void (*call)());

template <class A> struct Argument {
  static A get(const void* value, long long) {
    A a;
    memcpy(&a, value, sizeof a);  // not a reference, because Python aligns values to at most 8 bytes
    return a;
  }
  static void watch(const char*, const A&, long long) {}
};
template <> inline void Argument<TensorMap>::watch(const char* name, const TensorMap& map, long long) {
  long long bytes = map.element;
  for (int d = 0; d < 5; d++) bytes += (map.size[d] - 1) * (d ? map.stride[d - 1] : map.element);
  watch_writes(name, map.address, bytes, map.element, false);
}
template <class E> struct Argument<Global<E>> {
  static Global<E> get(void* value, long long bytes) {
    return {*static_cast<E**>(value), bytes / (long long)sizeof(E)};
  }
  static void watch(const char* name, Global<E> x, long long bytes) {
    if constexpr (!std::is_const<E>::value)
      watch_writes(name, x.begin, bytes, sizeof(E), std::is_integral<E>::value);
  }
};

template <class... A, size_t... I>
const char* launch(void (*kernel)(A...), const Launch& l, std::integer_sequence<size_t, I...>) {
  static void (*the_kernel)(A...);
  static const Launch* the_launch;
  the_kernel = kernel;
  the_launch = &l;
  stop_watching();
  (Argument<A>::watch(l.names[I], Argument<A>::get(l.arguments[I], l.elements[I]), l.elements[I]), ...);
  return run(l, [] { the_kernel(Argument<A>::get(the_launch->arguments[I], the_launch->elements[I])...); });
}

template <class... A> const char* launch(void (*kernel)(A...), const Launch& l) {
  return launch(kernel, l, std::make_integer_sequence<size_t, sizeof...(A)>());
}

}  // namespace emulator

// Defines a function that Python calls to launch the kernel. It returns null, or what went wrong.
#define EMULATOR_KERNEL(kernel)                                       \
  extern "C" __attribute__((visibility("default")))                   \
  const char* emulate_##kernel(const emulator::Launch* launch) {      \
    return emulator::launch(kernel, *launch);                         \
  }
