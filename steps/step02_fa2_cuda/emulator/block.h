// SPDX-License-Identifier: MIT
// The threads of one block: which of them runs next, which waits for what and where, and the report when no
// thread can go on.
//
// Every thread is a fiber, and one fiber runs at a time, until it waits for others. There are two ways to
// wait:
//   wait(operation, site, ready)    until ready() is true; for barriers with phases and asynchronous copies
//   meet(meeting, ...)              until all partners have come, the last of whom does the work for all; for
//                                   barriers and shuffles
#pragma once
#include <iosfwd>  // It declares std::string. Parts of <string> would be compiled again with every kernel.
#include <vector>

#include "fiber.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

struct Site {  // a line of the kernel's text
  const char* file;
  int line;
};

struct Thread {
  Fiber fiber;
  dim3 index;
  int rank;  // in the block; rank / 32 is the warp, rank % 32 the lane
  bool done;
  int polls;              // how often it has polled since its last wait
  const char* operation;  // where it waits, for the report
  Site site;
  bool (*ready)(void*);   // whether it can go on; null if it does not wait
  void* ready_data;
  const void* subject;    // what it waits for
  std::string (*describe)(const void*);  // says how far the subject is, for the report; may be null
};

struct Meeting {
  int arrived = 0, generation = 0;
  const char* operation;
  Site site;
  std::vector<void*> offers;  // what each partner has brought, by rank
};

struct WarpMeeting : Meeting {
  unsigned mask;  // the lanes that meet
};

enum Order { FORWARD, REVERSE, RANDOM };
enum When { EAGER, LATE, LIFO, RANDOM_TIME };  // see asynchronous.h

struct Random {  // xorshift64*
  uint64_t state;
  unsigned below(unsigned n) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return unsigned((state * 0x2545f4914f6cdd1dull) >> 33) % n;
  }
};

// The state of the launch. A library runs one launch at a time.
extern dim3 grid_size, block_size, block_index;
extern std::vector<Thread> threads;
extern Thread* current;  // the thread that runs; null between threads
extern Meeting block_meeting;
extern Random random_order;
extern When copy_time, wgmma_time;
extern std::string error;  // if it is not empty, the launch has failed

// Makes a text by the rules of printf, which compiles much faster than C++'s concatenation of strings.
__attribute__((cold, format(printf, 1, 2))) std::string text(const char* format, ...);
std::string name(const Site& s);

// A kernel's printf. It writes at once, because the process may be ended while the kernel runs.
__attribute__((cold, format(printf, 1, 2))) int print(const char* format, ...);
std::string name(const dim3& i);

// Ends the launch. The running thread never goes on, and the text becomes an exception in Python.
[[noreturn]] __attribute__((cold, format(printf, 2, 3))) void fail(Site site, const char* format, ...);

[[noreturn]] inline void stop() {
  for (;;) current->fiber.pause();
}

using Describe = std::string (*)(const void*);

template <class Ready>
void wait(const char* operation, Site site, Ready ready, Describe describe = nullptr,
          const void* subject = nullptr) {
  Thread& t = *current;
  t.operation = operation;
  t.site = site;
  t.polls = 0;
  t.describe = describe;
  t.subject = subject;
  t.ready_data = &ready;
  t.ready = [](void* r) { return bool((*static_cast<Ready*>(r))()); };
  t.fiber.pause();  // resumed once ready() is true
  t.ready = nullptr;
}

// The running thread comes to a meeting as number `rank` of `wanted` partners and brings an offer. All of
// them must come by the same call. Returns true for the last one, who then does the work for all; the others
// come back when it has called `end`.
bool comes_last(Meeting& m, int wanted, int rank, void* offer, const char* operation, Site site);
void end(Meeting& m);

template <class Work>
void meet(Meeting& m, int wanted, int rank, void* offer, const char* operation, Site site, Work work) {
  if (!comes_last(m, wanted, rank, offer, operation, site)) return;
  work(m.offers.data());
  end(m);
}

Meeting& warp_meeting(unsigned mask);  // of the running thread's warp

void begin_work(), end_work();         // wgmma.cpp; called before and after a block
void forget_turns();                   // warp.cpp; called before a block
bool run_work(bool nobody_can_go_on);  // asynchronous.cpp; called after each round; whether it did any work

}  // namespace emulator
