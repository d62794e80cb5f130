// SPDX-License-Identifier: MIT
// A fiber: a function with a stack of its own that can stop in the middle and go on later. One CUDA thread is one fiber.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#if !(defined(__x86_64__) && defined(__ELF__))
#include <ucontext.h>
#endif

namespace emulator {

#if defined(__x86_64__) && defined(__ELF__)

// Pushes what a function must preserve, leaves the stack pointer in *from, and goes on where the stack `to` was left.
extern "C" void emulator_switch(void** from, void* to);
struct Fiber {
  void *inside = nullptr, *outside = nullptr;  // the stack pointers of the fiber and of its caller while they rest

  void start(char* stack, size_t size, void (*function)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t(15));
    *--top = nullptr;  // where `function` would return to: nowhere, which a debugger takes for the end of the stack
    *--top = reinterpret_cast<void*>(function);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    inside = top;
  }
  void resume() { emulator_switch(&outside, inside); }  // called from outside: run until pause
  void pause() { emulator_switch(&inside, outside); }   // called from inside: back to whoever resumed
};

#else  // any other processor: slower, by a system call a switch

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

// The stacks of one block's fibers, made once and used again for every block. Below each lies a page that must not be touched,
// so that a kernel with too many local variables stops at once instead of writing over its neighbour.
struct Stacks {
  static constexpr size_t size = 128 << 10, guard = 64 << 10;  // a page may have up to 64 KB
  char* memory = nullptr;
  int count = 0;

  char* stack(int n) { return memory + n * (guard + size) + guard; }
  bool provide(int n) {
    if (n <= count) return true;
    if (memory) munmap(memory, count * (guard + size));
    void* all = mmap(nullptr, n * (guard + size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = all == MAP_FAILED ? nullptr : static_cast<char*>(all);
    count = memory ? n : 0;
    for (int i = 0; i < count; i++) mprotect(stack(i) - guard, guard, PROT_NONE);
    return memory;
  }
};

}  // namespace emulator
