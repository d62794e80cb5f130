// SPDX-License-Identifier: MIT
// The threads of one block: who runs next, who waits for what and where, and the report when nobody can go on.
//
// One fiber a thread, one at a time: a thread runs until it waits for others. All that waits is built on two functions:
//   wait(operation, site, ready)    goes on when ready() is true: barriers with phases, asynchronous copies
//   meet(meeting, ...)              goes on when all partners have come; the last one does the work for all: barriers, shuffles
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <list>
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
  std::string (*describe)(const void*);  // how far what it waits for is, for the report; null: nothing to add
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
static dim3 grid_size, block_size, block_index;
static std::vector<Thread> threads;
static Thread* current;  // the thread that runs; null between threads
static Meeting block_meeting;
static std::vector<std::list<WarpMeeting>> warp_meetings;  // of each warp, one for each mask in use
static Random random_order;
static When copy_time, wgmma_time;
static std::string error;  // not empty: the launch has failed
static void (*kernel_call)();
static Stacks stacks;

static std::string name(const dim3& i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

static std::string name(const Site& s) {
  const char* slash = strrchr(s.file, '/');
  return std::string(slash ? slash + 1 : s.file) + ":" + std::to_string(s.line);
}

[[noreturn]] inline void stop() {
  for (;;) current->fiber.pause();
}

// Ends the launch: the running thread stops here for good and the text becomes Python's exception.
[[noreturn]] __attribute__((cold, noinline, format(printf, 2, 3))) static void fail(Site site, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  error = name(site) + ": " + text + " (block " + name(block_index) + ", thread " + name(current->index) + ")";
  stop();
}

template <class Ready>
void wait(const char* operation, Site site, Ready ready, std::string (*describe)(const void*) = nullptr, const void* subject = nullptr) {
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

// Brings `offer` as number `rank` of `wanted` partners, who must all come by the same call; the last one runs work(offers).
template <class Work> void meet(Meeting& m, int wanted, int rank, void* offer, const char* operation, Site site, Work work) {
  if (m.arrived == 0) {
    m.operation = operation;
    m.site = site;
  } else if (m.site.line != site.line || strcmp(m.site.file, site.file) || strcmp(m.operation, operation)) {
    fail(site, "divergent threads: this one is at %s, others are at %s, %s", operation, m.operation, name(m.site).c_str());
  }
  if (rank >= int(m.offers.size())) m.offers.resize(rank + 1);
  m.offers[rank] = offer;
  if (++m.arrived == wanted) {
    work(m.offers.data());
    m.arrived = 0;
    m.generation++;
  } else {
    wait(operation, site, [&m, mine = m.generation] { return m.generation != mine; });
  }
}

inline Meeting& warp_meeting(unsigned mask) {
  auto& all = warp_meetings[current->rank / 32];
  for (auto& m : all)
    if (m.mask == mask) return m;
  all.emplace_back();  // in a list, because waiting threads keep references
  all.back().mask = mask;
  return all.back();
}

inline std::string state(const Thread& t) {
  if (t.done) return "returned from the kernel, and count as missing";
  return std::string("wait at ") + t.operation + ", " + name(t.site) + (t.describe ? " (" + t.describe(t.subject) + ")" : "");
}

// One line a warp: which of its threads wait where.
static std::string report() {
  std::string text = "block " + name(block_index) + " is stuck, no thread can go on:";
  for (size_t begin = 0; begin < threads.size(); begin += 32) {
    size_t end = begin + 32 < threads.size() ? begin + 32 : threads.size();
    text += "\n  warp " + std::to_string(begin / 32) + ": ";
    for (size_t i = begin, next; i < end; i = next) {
      for (next = i + 1; next < end && state(threads[next]) == state(threads[i]);) next++;
      text += (i > begin ? "; threads " : "threads ") + std::to_string(i);
      if (next > i + 1) text += "-" + std::to_string(next - 1);
      text += " " + state(threads[i]);
    }
  }
  return text;
}

static void fiber_main() {
  kernel_call();
  current->done = true;
  current->fiber.pause();
}

// The numbers 0 .. n-1 in the wanted order, into `numbers`.
static void put_in_order(std::vector<unsigned>& numbers, unsigned n, Order order) {
  numbers.resize(n);
  for (unsigned i = 0; i < n; i++) numbers[i] = order == REVERSE ? n - 1 - i : i;
  for (unsigned i = n; order == RANDOM && i > 1; i--) std::swap(numbers[i - 1], numbers[random_order.below(i)]);
}

static void begin_work(), end_work();                // asynchronous.h: before and after the threads of a block
static bool run_work(bool nobody_can_go_on);         // ... and between them: whether any was done

// Runs the block block_index to its end; leaves `error` behind if it fails.
static void run_block(Order order) {
  int n = int(block_size.x * block_size.y * block_size.z);
  threads.resize(n);
  block_meeting.arrived = 0;
  warp_meetings.assign((n + 31) / 32, {});
  for (int i = 0; i < n; i++) {
    Thread& t = threads[i];
    t.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    t.rank = i;
    t.done = false;
    t.polls = 0;
    t.ready = nullptr;
    t.fiber.start(stacks.stack(i), Stacks::size, fiber_main);
  }
  begin_work();
  std::vector<unsigned> turn;
  for (int left = n; left;) {
    bool progress = false;
    put_in_order(turn, n, order);
    for (unsigned i : turn) {
      Thread& t = threads[i];
      if (t.done || (t.ready && !t.ready(t.ready_data))) continue;
      progress = true;
      current = &t;
      t.fiber.resume();
      current = nullptr;
      if (!error.empty()) return;
      left -= t.done;
    }
    if (left && run_work(!progress)) progress = true;
    if (error.empty() && !progress) error = report();
    if (!error.empty()) return;
  }
  end_work();
}

}  // namespace emulator
