// SPDX-License-Identifier: MIT
// The threads of one block: who runs next, who waits for what and where, and the report when nobody can go on.
//
// One fiber a thread, one at a time: a thread runs until it waits for others. All that waits is built on two functions:
//   wait(operation, site, ready)    goes on when ready() is true: barriers with phases, asynchronous copies
//   meet(meeting, ...)              goes on when all partners have come; the last one does the work for all: barriers, shuffles
#pragma once
#include <string>
#include <vector>

#include "fiber.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

struct Site {  // a place in the kernel's text
  const char* file;
  int line;
};

struct Thread {
  Fiber fiber;
  dim3 index;
  int rank;  // in the block; rank / 32 is the warp, rank % 32 the lane
  bool done;
  int polls;  // in a row, without any other wait
  const char* operation;  // what it waits at, for the report
  Site site;
  bool (*ready)(void*);  // whether it can go on; null if it does not wait
  void* ready_data;
  std::string (*describe)(const void*);  // of the subject: how far what it waits for is, for the report; null: nothing to add
  const void* subject;
};

struct Meeting {
  int arrived = 0, generation = 0;
  const char* operation;
  Site site;
  std::vector<void*> offers;  // what each one brought, by rank
};

struct WarpMeeting : Meeting {
  unsigned mask;  // the lanes that meet
};

enum Order { FORWARD, REVERSE, RANDOM };
enum When { EAGER, LATE, LIFO, RANDOM_TIME };  // see asynchronous.h

struct Random {  // xorshift64*
  uint64_t state;
  unsigned below(unsigned n) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return unsigned((state * 0x2545f4914f6cdd1dull) >> 33) % n;
  }
};

// Of this library's one launch at a time.
extern dim3 grid_size, block_size, block_index;
extern std::vector<Thread> threads;
extern Thread* current;  // the thread that runs; null between threads
extern Meeting block_meeting;
extern Random random_order;
extern When copy_time, wgmma_time;
extern std::string error;  // not empty: the launch has failed

// A text by printf's rules: much quicker to compile than C++'s concatenation of strings.
__attribute__((cold, format(printf, 1, 2))) std::string text(const char* format, ...);
std::string name(const Site& s);

// Ends the launch: the running thread stops here for good and the text becomes Python's exception.
[[noreturn]] __attribute__((cold, format(printf, 2, 3))) void fail(Site site, const char* format, ...);

[[noreturn]] inline void stop() {
  for (;;) current->fiber.pause();
}

using Describe = std::string (*)(const void*);

template <class Ready>
void wait(const char* operation, Site site, Ready ready, Describe describe = nullptr, const void* subject = nullptr) {
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

// Brings `offer` as number `rank` of `wanted` partners, who must all come by the same call. True for the last one, who then works
// for all; the others come back once it has called `end`.
bool comes_last(Meeting& m, int wanted, int rank, void* offer, const char* operation, Site site);
void end(Meeting& m);

template <class Work> void meet(Meeting& m, int wanted, int rank, void* offer, const char* operation, Site site, Work work) {
  if (!comes_last(m, wanted, rank, offer, operation, site)) return;
  work(m.offers.data());
  end(m);
}

Meeting& warp_meeting(unsigned mask);  // of the running thread's warp

void begin_work(), end_work();         // wgmma.cpp: before and after a block
bool run_work(bool nobody_can_go_on);  // asynchronous.cpp: between the threads' turns; whether any work was done

}  // namespace emulator
