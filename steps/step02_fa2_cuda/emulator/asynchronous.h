// SPDX-License-Identifier: MIT
// Asynchronous work: copies and wgmma, which run while the threads go on. A kernel must be right whenever
// this work is performed. The schedule decides when that is:
//   eager     at once
//   late      when no thread can go on without it: first the oldest work for which a thread waits, otherwise
//             the oldest of all; wgmma after all copies
//   lifo      when no thread can go on without it, the newest first
//   random    at any time, in any order
// A cp.async belongs to one thread, and is performed at the latest when this thread waits for it.
#pragma once
#include <memory>

#include "warp.h"

namespace emulator {

struct Work {
  int queue, group;  // they determine who waits for it, see `under_way`
  bool is_wgmma;     // the wgmma of one warpgroup are performed in their order
  const void* barrier = nullptr;  // counts it, if it is a load
  Work(int queue, int group, bool is_wgmma) : queue(queue), group(group), is_wgmma(is_wgmma) {}
  virtual void run() = 0;
  virtual ~Work() = default;
};
using WorkPointer = std::unique_ptr<Work>;

// Queue w holds the wgmma of warpgroup w. Queue BULK_QUEUE + t holds the bulk copies for which thread t
// itself waits, and LOAD_QUEUE the loads that a barrier counts.
constexpr int BULK_QUEUE = 64, LOAD_QUEUE = -1;
extern std::vector<WorkPointer> work_under_way;  // in the order of issue

void start(WorkPointer w);

template <class Run>
void start(int queue, int group, bool is_wgmma, Run run, const void* barrier = nullptr) {
  struct This : Work {
    Run action;
    This(int queue, int group, bool is_wgmma, Run run)
        : Work(queue, group, is_wgmma), action(std::move(run)) {}
    void run() override { action(); }
  };
  WorkPointer w(new This(queue, group, is_wgmma, std::move(run)));
  w->barrier = barrier;
  start(std::move(w));
}

// Whether a queue still holds work of a group before this one.
bool under_way(int queue, int group);

// One cp.async that has not been performed.
struct Copy {
  char* to;
  const char* from;  // null if zeros are to be written
  int group;
};

struct ThreadCopies {
  std::vector<Copy> under_way;
  int group = 0, bulk_group = 0;  // the numbers of the groups that are not closed yet
};
extern std::vector<ThreadCopies> thread_copies;

void start_copy(char* to, const char* from);
void wait_for_copies(int groups_left);

}  // namespace emulator

template <class To, class From>
void cp_async_16(Shared<To> to, Global<From> from, bool inside, EMULATOR_SITE) {
  using namespace emulator;
  static_assert(sizeof(To) == sizeof(From), "");
  char* bytes = reinterpret_cast<char*>(to.vector(16, {file, line}));
  from.check_alignment(16, {file, line});  // even if nothing is read
  start_copy(bytes, inside ? reinterpret_cast<const char*>(from.vector(16, {file, line})) : nullptr);
}

inline void cp_async_commit() { emulator::thread_copies[emulator::current->rank].group++; }

template <int N> void cp_async_wait() { emulator::wait_for_copies(N); }
