// SPDX-License-Identifier: MIT
// Performs asynchronous work when the schedule says so: see asynchronous.h.
#include <string>

namespace emulator {

std::vector<WorkPointer> work_under_way;
std::vector<ThreadCopies> thread_copies;

static When time_of(const Work& w) { return w.is_wgmma ? wgmma_time : copy_time; }

void start(WorkPointer w) {
  if (time_of(*w) == EAGER) w->run();
  else work_under_way.push_back(std::move(w));
  if (!error.empty() && current) stop();
}

bool under_way(int queue, int group) {
  for (auto& w : work_under_way)
    if (w->queue == queue && w->group < group) return true;
  return false;
}

// Whether a thread waits at the barrier that counts this load.
static bool awaited(const Work& w) {
  if (w.barrier)
    for (auto& t : threads)
      if (t.ready && t.subject == w.barrier) return true;
  return false;
}

// The number of the work that is performed next by the schedule, or -1 if there is none. random_only: only
// work whose time is random.
static int choose(bool random_only) {
  std::vector<int> copies, wgmmas;
  unsigned long queues_seen = 0;
  for (size_t i = 0; i < work_under_way.size(); i++) {
    Work& w = *work_under_way[i];
    if (random_only && time_of(w) != RANDOM_TIME) continue;
    if (!w.is_wgmma) copies.push_back(i);
    else if (!(queues_seen >> w.queue & 1)) {
      wgmmas.push_back(i);
      queues_seen |= 1ul << w.queue;
    }
  }
  if (copies.empty() && wgmmas.empty()) return -1;
  bool mixed = copy_time == RANDOM_TIME && wgmma_time == RANDOM_TIME;
  size_t all = copies.size() + wgmmas.size();
  bool take_wgmma = copies.empty() || (mixed && random_order.below(all) < wgmmas.size());
  auto& from = take_wgmma ? wgmmas : copies;
  When when = take_wgmma ? wgmma_time : copy_time;
  if (when == LIFO) return from.back();
  if (when == RANDOM_TIME) return from[random_order.below(from.size())];
  for (int i : from)
    if (awaited(*work_under_way[i])) return i;
  return from.front();
}

bool run_work(bool nobody_can_go_on) {
  if (work_under_way.empty() || (!nobody_can_go_on && random_order.below(4))) return false;
  int i = choose(!nobody_can_go_on);
  if (i < 0) return false;
  WorkPointer w = std::move(work_under_way[i]);
  work_under_way.erase(work_under_way.begin() + i);
  w->run();
  return true;
}

static void perform(const Copy& c) {
  if (c.from) memcpy(c.to, c.from, 16);
  else memset(c.to, 0, 16);
}

void start_copy(char* to, const char* from) {
  auto& mine = thread_copies[current->rank];
  Copy copy{to, from, mine.group};
  if (copy_time == EAGER || (copy_time == RANDOM_TIME && random_order.below(2))) perform(copy);
  else mine.under_way.push_back(copy);
}

void wait_for_copies(int groups_left) {
  auto& mine = thread_copies[current->rank];
  size_t kept = 0;
  for (auto& copy : mine.under_way) {
    if (copy.group < mine.group - groups_left) perform(copy);
    else mine.under_way[kept++] = copy;
  }
  mine.under_way.resize(kept);
}

}  // namespace emulator
