// SPDX-License-Identifier: MIT
// Schedules the threads of one block, reports what is wrong when they are stuck, and launches a kernel.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <list>
#include <string>

#if defined(__x86_64__) && defined(__ELF__)
asm(R"(
  .text
  .globl emulator_switch
  .hidden emulator_switch
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#endif

namespace emulator {

dim3 grid_size, block_size, block_index;
std::vector<Thread> threads;
Thread* current;
Meeting block_meeting;
Random random_order;
When copy_time, wgmma_time;
std::string error;
std::vector<char> shared_memory;

static std::vector<std::list<WarpMeeting>> warp_meetings;  // by warp, one for each mask in use
static void (*kernel_call)();
static int (*interrupted)();

static std::string write(const char* format, va_list arguments) {
  char text[512];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string made = write(format, arguments);
  va_end(arguments);
  return made;
}

int print(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int written = vprintf(format, arguments);
  va_end(arguments);
  fflush(stdout);
  return written;
}

std::string name(const dim3& i) { return text("(%u, %u, %u)", i.x, i.y, i.z); }

std::string name(const Site& s) {
  const char* slash = strrchr(s.file, '/');
  return text("%s:%d", slash ? slash + 1 : s.file, s.line);
}

void fail(Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string what = write(format, arguments);
  va_end(arguments);
  std::string where = name(site), block = name(block_index), thread = name(current->index);
  error = text("%s: %s (block %s, thread %s)", where.c_str(), what.c_str(), block.c_str(), thread.c_str());
  stop();
}

bool comes_last(Meeting& m, int wanted, int rank, void* offer, const char* operation, Site site) {
  if (m.arrived == 0) {
    m.operation = operation;
    m.site = site;
  } else if (m.site.line != site.line || strcmp(m.site.file, site.file) || strcmp(m.operation, operation)) {
    const char* line = strcmp(m.operation, operation) ? "" : " of another line";
    fail(site, "divergent threads: this one is at %s, others are at %s%s, %s", operation, m.operation, line,
         name(m.site).c_str());
  }
  if (rank >= int(m.offers.size())) m.offers.resize(rank + 1);
  m.offers[rank] = offer;
  if (++m.arrived == wanted) return true;
  wait(operation, site, [&m, mine = m.generation] { return m.generation != mine; });
  return false;
}

void end(Meeting& m) {
  m.arrived = 0;
  m.generation++;
}

Meeting& warp_meeting(unsigned mask) {
  auto& all = warp_meetings[current->rank / 32];
  for (auto& m : all)
    if (m.mask == mask) return m;
  all.emplace_back();  // `all` is a list, because waiting threads keep references to its elements
  all.back().mask = mask;
  return all.back();
}

static std::string state(const Thread& t) {
  if (t.done) return "returned from the kernel, and count as missing";
  std::string how_far = t.describe ? text(" (%s)", t.describe(t.subject).c_str()) : "";
  return text("wait at %s, %s%s", t.operation, name(t.site).c_str(), how_far.c_str());
}

// Says in one line for each warp which of its threads wait where.
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

// Sets `numbers` to 0 .. n-1 in the wanted order.
static void put_in_order(std::vector<unsigned>& numbers, unsigned n, Order order) {
  numbers.resize(n);
  for (unsigned i = 0; i < n; i++) numbers[i] = order == REVERSE ? n - 1 - i : i;
  if (order != RANDOM) return;
  for (unsigned i = n; i > 1; i--) std::swap(numbers[i - 1], numbers[random_order.below(i)]);
}

// Runs the block block_index to its end on these stacks; leaves `error` behind if it fails.
static void run_block(Order order, Stacks& stacks) {
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
    t.fiber.start(stacks.stack(i), Stacks::SIZE, fiber_main);
  }
  begin_work();
  forget_turns();
  // In each round every thread that can go on runs once. In a random order some warps are slow: they pause in
  // most rounds.
  std::vector<unsigned> round, slowness((n + 31) / 32);
  for (auto& s : slowness) s = order == RANDOM ? random_order.below(4) : 0;
  for (int left = n, progress = true; left;) {
    unsigned long paused = 0;  // a bit for each warp
    for (size_t w = 0; progress && w < slowness.size(); w++)
      paused |= (random_order.below(4) < slowness[w]) * 1ul << w;
    progress = false;
    if (interrupted()) error = "interrupted";  // Python has an exception for the caller
    if (!error.empty()) return;
    put_in_order(round, n, order);
    for (unsigned i : round) {
      Thread& t = threads[i];
      if (paused >> (i / 32) & 1 || t.done || (t.ready && !t.ready(t.ready_data))) continue;
      progress = true;
      current = &t;
      t.fiber.resume();
      current = nullptr;
      if (!error.empty()) return;
      left -= t.done;
    }
    if (left && run_work(!progress && !paused)) progress = true;
    if (error.empty() && !progress && !paused) error = report();
    if (!error.empty()) return;
  }
  end_work();
}

const char* run(const Launch& l, void (*call)()) {
  kernel_call = call;
  interrupted = l.interrupted;
  grid_size = {l.grid[0], l.grid[1], l.grid[2]};
  block_size = {l.block[0], l.block[1], l.block[2]};
  copy_time = When(l.copy_time);
  wgmma_time = When(l.wgmma_time);
  counting_conflicts = l.count_conflicts;
  clear_conflicts();
  random_order.state = (l.seed + 1) * 0x9e3779b97f4a7c15ull;  // any state but 0 will do
  error.clear();
  Stacks stacks(int(l.block[0] * l.block[1] * l.block[2]));
  if (!stacks.memory)
    return "no memory for the stacks of a block's threads";

  std::vector<unsigned> blocks;
  put_in_order(blocks, l.grid[0] * l.grid[1] * l.grid[2], Order(l.block_order));
  for (unsigned b : blocks) {
    block_index = {b % l.grid[0], b / l.grid[0] % l.grid[1], b / l.grid[0] / l.grid[1]};
    shared_memory.assign(l.shared_bytes, char(0xff));
    run_block(Order(l.thread_order), stacks);
    if (!error.empty()) return error.c_str();
  }
  return nullptr;
}

}  // namespace emulator
