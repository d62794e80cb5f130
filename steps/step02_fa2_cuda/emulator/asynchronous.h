// SPDX-License-Identifier: MIT
// Work that runs while the threads go on: copies and wgmma. A kernel must be right whenever it runs, so the schedule says when:
//   eager     at once
//   late      when no thread can go on without it, the oldest first; wgmma after every copy
//   lifo      the same, the newest first
//   random    at any time, in any order
// cp.async belongs to one thread, and its last moment is that thread's own wait.
#pragma once
#include <memory>

#include "warp.h"

namespace emulator {

struct Work {
  int queue, group;  // who waits for it; see `under_way`
  bool is_wgmma;     // of one warpgroup: in order
  Work(int queue, int group, bool is_wgmma) : queue(queue), group(group), is_wgmma(is_wgmma) {}
  virtual void run() = 0;
  virtual ~Work() = default;
};
using WorkPointer = std::unique_ptr<Work>;

// The queues: wgmma of warpgroup w in queue w, bulk copies of thread t in queue bulk_queue + t, and loads that a barrier counts.
constexpr int bulk_queue = 64, load_queue = -1;
static std::vector<WorkPointer> work_under_way;  // in the order of issue

inline When time_of(const Work& w) { return w.is_wgmma ? wgmma_time : copy_time; }

template <class Run> void start(int queue, int group, bool is_wgmma, Run run) {
  struct This : Work {
    Run action;
    This(int queue, int group, bool is_wgmma, Run run) : Work(queue, group, is_wgmma), action(std::move(run)) {}
    void run() override { action(); }
  };
  WorkPointer w(new This(queue, group, is_wgmma, std::move(run)));
  if (time_of(*w) == EAGER) w->run();
  else work_under_way.push_back(std::move(w));
  if (!error.empty() && current) stop();
}

// Whether a queue still has work of a group before this one.
inline bool under_way(int queue, int group) {
  for (auto& w : work_under_way)
    if (w->queue == queue && w->group < group) return true;
  return false;
}

// The number of the work that runs next, by the schedule, or -1.
inline int choose(bool random_only) {
  std::vector<int> copies, wgmmas;
  unsigned long queues_seen = 0;
  for (size_t i = 0; i < work_under_way.size(); i++) {
    Work& w = *work_under_way[i];
    if (random_only && time_of(w) != RANDOM_TIME) continue;
    if (!w.is_wgmma) copies.push_back(i);
    else if (!(queues_seen >> w.queue & 1)) wgmmas.push_back(i), queues_seen |= 1ul << w.queue;
  }
  if (copies.empty() && wgmmas.empty()) return -1;
  bool mixed = copy_time == RANDOM_TIME && wgmma_time == RANDOM_TIME;
  bool take_wgmma = copies.empty() || (mixed && random_order.below(copies.size() + wgmmas.size()) < wgmmas.size());
  auto& from = take_wgmma ? wgmmas : copies;
  When when = take_wgmma ? wgmma_time : copy_time;
  return when == LATE ? from.front() : when == LIFO ? from.back() : from[random_order.below(from.size())];
}

static bool run_work(bool nobody_can_go_on) {
  if (work_under_way.empty() || (!nobody_can_go_on && random_order.below(4))) return false;
  int i = choose(!nobody_can_go_on);
  if (i < 0) return false;
  WorkPointer w = std::move(work_under_way[i]);
  work_under_way.erase(work_under_way.begin() + i);
  w->run();
  return true;
}

// A thread's cp.async that have not been performed.
struct Copy {
  char* to;
  const char* from;  // null: zeros
  int group;
};

struct ThreadCopies {
  std::vector<Copy> under_way;
  int group = 0, bulk_group = 0;  // the open one, of cp.async and of bulk copies
};
static std::vector<ThreadCopies> thread_copies;

static void perform(const Copy& c) {
  if (c.from) memcpy(c.to, c.from, 16);
  else memset(c.to, 0, 16);
}

static void wait_for_copies(int groups_left) {
  auto& mine = thread_copies[current->rank];
  size_t kept = 0;
  for (auto& copy : mine.under_way) {
    if (copy.group < mine.group - groups_left) perform(copy);
    else mine.under_way[kept++] = copy;
  }
  mine.under_way.resize(kept);
}


}  // namespace emulator

template <class To, class From> void cp_async_16(Shared<To> to, Global<From> from, bool inside, EMULATOR_SITE) {
  using namespace emulator;
  static_assert(sizeof(To) == sizeof(From), "");
  auto& mine = thread_copies[current->rank];
  char* bytes = reinterpret_cast<char*>(to.vector(16, {file, line}));
  Copy copy{bytes, inside ? reinterpret_cast<const char*>(from.vector(16, {file, line})) : nullptr, mine.group};
  if (copy_time == EAGER || (copy_time == RANDOM_TIME && random_order.below(2))) perform(copy);
  else mine.under_way.push_back(copy);
}

inline void cp_async_commit() { emulator::thread_copies[emulator::current->rank].group++; }

template <int N> void cp_async_wait() { emulator::wait_for_copies(N); }
