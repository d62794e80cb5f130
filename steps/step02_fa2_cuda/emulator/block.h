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

static std::string write(const char* format, va_list arguments) {
  char text[512];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

// A text by printf's rules: much quicker to compile than C++'s concatenation of strings.
__attribute__((cold, noinline, format(printf, 1, 2))) static std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string made = write(format, arguments);
  va_end(arguments);
  return made;
}

static std::string name(const dim3& i) { return text("(%u, %u, %u)", i.x, i.y, i.z); }

static std::string name(const Site& s) {
  const char* slash = strrchr(s.file, '/');
  return text("%s:%d", slash ? slash + 1 : s.file, s.line);
}

[[noreturn]] inline void stop() {
  for (;;) current->fiber.pause();
}

// Ends the launch: the running thread stops here for good and the text becomes Python's exception.
[[noreturn]] __attribute__((cold, noinline, format(printf, 2, 3))) static void fail(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string what = write(format, arguments), where = name(site), block = name(block_index), thread = name(current->index);
  va_end(arguments);
  error = text("%s: %s (block %s, thread %s)", where.c_str(), what.c_str(), block.c_str(), thread.c_str());
  stop();
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

static std::string state(const Thread& t) {
  if (t.done) return "returned from the kernel, and count as missing";
  std::string how_far = t.describe ? text(" (%s)", t.describe(t.subject).c_str()) : "";
  return text("wait at %s, %s%s", t.operation, name(t.site).c_str(), how_far.c_str());
}

// One line a warp: which of its threads wait where.
static std::string report() {
  std::string all = text("block %s is stuck, no thread can go on:", name(block_index).c_str());
  for (size_t begin = 0; begin < threads.size(); begin += 32) {
    size_t end = begin + 32 < threads.size() ? begin + 32 : threads.size();
    all += text("\n  warp %zu: ", begin / 32);
    for (size_t i = begin, next; i < end; i = next) {
      std::string here = state(threads[i]);
      for (next = i + 1; next < end && state(threads[next]) == here;) next++;
      all += text(i > begin ? "; threads %zu" : "threads %zu", i);
      if (next > i + 1) all += text("-%zu", next - 1);
      all += text(" %s", here.c_str());
    }
  }
  return all;
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

static void begin_work(), end_work();         // wgmma.h: before and after a block
static bool run_work(bool nobody_can_go_on);  // asynchronous.h: between the threads' turns; whether any work was done

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
  std::vector<unsigned> turn, slowness((n + 31) / 32);  // in a random order some warps are slow: they sit out most rounds
  for (auto& s : slowness) s = order == RANDOM ? random_order.below(4) : 0;
  for (int left = n, progress = true; left;) {
    unsigned long sit_out = 0;
    for (size_t w = 0; progress && w < slowness.size(); w++) sit_out |= (random_order.below(4) < slowness[w]) * 1ul << w;
    progress = false;
    put_in_order(turn, n, order);
    for (unsigned i : turn) {
      Thread& t = threads[i];
      if (sit_out >> (i / 32) & 1 || t.done || (t.ready && !t.ready(t.ready_data))) continue;
      progress = true;
      current = &t;
      t.fiber.resume();
      current = nullptr;
      if (!error.empty()) return;
      left -= t.done;
    }
    if (left && run_work(!progress && !sit_out)) progress = true;
    if (error.empty() && !progress && !sit_out) error = report();
    if (!error.empty()) return;
  }
  end_work();
}

}  // namespace emulator
