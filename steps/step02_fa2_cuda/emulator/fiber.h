// SPDX-License-Identifier: MIT
// A fiber is a function with a stack of its own, which can stop in the middle and go on later. Each CUDA
// thread is a fiber.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#if !(defined(__x86_64__) && defined(__ELF__))
#include <ucontext.h>
#endif

namespace emulator {

#if defined(__x86_64__) && defined(__ELF__)

// Pushes the registers that a function must preserve, stores the stack pointer in *from, and goes on where
// the stack `to` was left.
extern "C" void emulator_switch(void** from, void* to);
struct Fiber {
  void* inside = nullptr;   // the fiber's stack pointer while it pauses
  void* outside = nullptr;  // the caller's stack pointer while the fiber runs

  void start(char* stack, size_t size, void (*function)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t(15));
    *--top = nullptr;  // the return address of `function`, which never returns; it tells debuggers to stop
    *--top = reinterpret_cast<void*>(function);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    inside = top;
  }
  void resume() { emulator_switch(&outside, inside); }  // from outside: runs the fiber until it pauses
  void pause() { emulator_switch(&inside, outside); }   // from inside: goes back to the caller of resume
};

#else  // other processors are slower, because every switch is a system call

struct Fiber {
  ucontext_t inside, outside;

  void start(char* stack, size_t size, void (*function)()) {
    getcontext(&inside);
    inside.uc_stack.ss_sp = stack;
    inside.uc_stack.ss_size = size;
    inside.uc_link = nullptr;
    makecontext(&inside, function, 0);
  }
  void resume() { swapcontext(&outside, &inside); }
  void pause() { swapcontext(&inside, &outside); }
};

#endif

// The stacks of the fibers of a block, made once for a launch and used again for every block. Below each
// stack lies a page that must not be accessed, so that a kernel with too many local variables stops at once
// instead of overwriting the next stack. The stacks are freed after the launch. Otherwise every kernel would
// have its own for ever, because it stays loaded. Each such page divides the memory of the process into more
// pieces, and Linux allows 65,530.
struct Stacks {
  static constexpr size_t SIZE = 128 << 10;
  static constexpr size_t GUARD = 64 << 10;  // a page may have up to 64 KB
  char* memory = nullptr;
  int count = 0;

  char* stack(int n) { return memory + n * (GUARD + SIZE) + GUARD; }
  explicit Stacks(int n) {
    void* all = mmap(nullptr, n * (GUARD + SIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = all == MAP_FAILED ? nullptr : static_cast<char*>(all);
    count = memory ? n : 0;
    for (int i = 0; i < count; i++) mprotect(stack(i) - GUARD, GUARD, PROT_NONE);
  }
  ~Stacks() {
    if (memory) munmap(memory, count * (GUARD + SIZE));
  }
};

}  // namespace emulator
