// SPDX-License-Identifier: MIT
// The tensor cores: see wgmma.h.
#include <list>
#include <string>

namespace emulator {

// The mark of accumulators that a wgmma uses. It is a signalling NaN, which no computation produces, so that
// every write is noticed.
constexpr uint32_t IN_FLIGHT = 0x7fa5a5a5;

// The accumulators of one or more wgmma, from their start until the threads get them back.
struct Accumulators {
  float* registers[128];
  int n;      // columns
  int group;  // the last group that uses them
  Site site;
  std::vector<float> value;  // [64][n]

  float& at(int t, int i) {  // register i of thread t
    int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    return value[row * n + column];
  }
};

struct Delivered {   // accumulators that the threads have got back
  float* registers;  // those of thread 0
  int fences;        // how many fences there had been until then
};

struct Warpgroup {
  Meeting meeting;
  int registers;                         // that each thread has
  int group = 0;                         // the number of the group that is not closed yet
  int fences = 0;                        // how many fences there have been
  std::list<Accumulators> accumulators;  // in flight
  std::vector<Delivered> delivered;

  Delivered& last_delivery(float* registers) {
    for (auto& x : delivered)
      if (x.registers == registers) return x;
    delivered.push_back({registers, 0});
    return delivered.back();
  }
};
static std::vector<Warpgroup> warpgroups;
static int free_registers;  // that warpgroups have given back to the block

// All 128 threads bring an offer, and the last of them runs work(warpgroup, offers).
template <class Offer, class Work>
static void whole_warpgroup(const char* operation, Offer& offer, Site site, Work work) {
  int w = current->rank / 128;
  if (int(threads.size()) < 128 * (w + 1)) fail(site, "%s needs a warpgroup of 128 threads", operation);
  meet(warpgroups[w].meeting, 128, current->rank % 128, &offer, operation, site,
       [w, &work](void** offers) { work(warpgroups[w], reinterpret_cast<Offer**>(offers)); });
}

struct Descriptor {
  int start, leading, stride;
  // TRANS: the sum runs down the rows of the tile, so that a row of shared memory holds 64 rows of A (or
  // columns of B) for one k. Otherwise it holds 64 values of k for one row of A (or column of B).
  bool sum_down_rows;

  Descriptor(uint64_t bits, bool sum_down_rows) : sum_down_rows(sum_down_rows) {
    start = int(bits & 0x3fff) << 4;
    leading = int(bits >> 16 & 0x3fff) << 4;
    stride = int(bits >> 32 & 0x3fff) << 4;
  }
  // The address of element k in row i of A, or in column i of B.
  int address(int i, int k) const {
    int a = sum_down_rows ? start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                          : start + i / 8 * stride + i % 8 * 128 + k * 2;
    return a ^ (a >> 3 & 0x70);
  }
};

// Reads an operand into to[16][rows].
template <class Half> static void read_operand(const Descriptor& x, int rows, float* to, Site site) {
  for (int k = 0; k < 16; k++)
    for (int i = 0; i < rows; i++) {
      size_t a = x.address(i, k);
      if (a + 2 > shared_memory.size()) {
        error = text("%s: the descriptor leads beyond the end of shared memory, to byte %zu",
                     name(site).c_str(), a);
        return;
      }
      Half half;
      memcpy(&half, &shared_memory[a], 2);
      to[k * rows + i] = to_float(half);
    }
}

__attribute__((optimize("O3"))) static void multiply(float* D, const float* A, const float* B, int n) {
  for (int row = 0; row < 64; row++)
    for (int k = 0; k < 16; k++) {
      float a = A[k * 64 + row];
      for (int column = 0; column < n; column++) D[row * n + column] += a * B[k * n + column];
    }
}

// Takes the accumulators from the threads, unless an earlier wgmma that is still under way has done so.
static Accumulators& take(Warpgroup& g, WgmmaOffer** lanes, int n, bool add, Site site) {
  for (auto& x : g.accumulators)
    if (x.registers[0] == lanes[0]->d) {
      if (x.n != n)
        fail(site, "accumulators of a wgmma of %d columns under way (%s) in one of %d", x.n,
             name(x.site).c_str(), n);
      return x;
    }
  if (g.fences == g.last_delivery(lanes[0]->d).fences)
    fail(site, "wgmma_fence is missing between the threads' last use of these accumulators and wgmma");
  g.accumulators.emplace_back();
  Accumulators& x = g.accumulators.back();
  x.n = n;
  x.value.assign(64 * n, 0);
  for (int t = 0; t < 128; t++) {
    x.registers[t] = lanes[t]->d;
    for (int i = 0; i < n / 2; i++) {
      if (add) x.at(t, i) = lanes[t]->d[i];
      memcpy(&lanes[t]->d[i], &IN_FLIGHT, 4);
    }
  }
  return x;
}

// Gives accumulators back to the threads, if no group before `group` uses them any more.
static void deliver(Warpgroup& g, int group, Site site) {
  for (auto x = g.accumulators.begin(); x != g.accumulators.end();) {
    if (x->group >= group) {
      ++x;
      continue;
    }
    for (int t = 0; t < 128; t++)
      for (int i = 0; i < x->n / 2; i++) {
        if (memcmp(&x->registers[t][i], &IN_FLIGHT, 4))
          fail(site, "accumulator %d of thread %d was written while a wgmma (%s) was under way", i, t,
               name(x->site).c_str());
        x->registers[t][i] = x->at(t, i);
      }
    g.last_delivery(x->registers[0]).fences = g.fences;
    x = g.accumulators.erase(x);
  }
}

template <class Half> void start_wgmma(WgmmaOffer& offer, int n, bool trans_a, bool trans_b, Site site) {
  uint64_t bits = offer.b_bits | (offer.a ? 0 : offer.a_bits);
  if (offer.b_bits >> 62 != 1 || (!offer.a && offer.a_bits >> 62 != 1) || (bits >> 49 & 7))
    fail(site,
         "a descriptor that `descriptor` does not make: the emulator knows the swizzle of 128 bytes only");
  whole_warpgroup(offer.name, offer, site, [=](Warpgroup& g, WgmmaOffer** lanes) {
    WgmmaOffer first = *lanes[0];
    for (int t = 1; t < 128; t++)
      if (lanes[t]->b_bits != first.b_bits || lanes[t]->add != first.add ||
          (!first.a && lanes[t]->a_bits != first.a_bits))
        fail(site, "%s: thread %d of the warpgroup gives other descriptors than thread 0", first.name, t);
    Accumulators& x = take(g, lanes, n, first.add, site);
    x.group = g.group;
    x.site = site;
    std::vector<float> A;  // [16][64]; empty if A lies in shared memory
    for (int t = 0; first.a && t < 128; t++)
      for (int i = 0; i < 4; i++) {
        int row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, k = 2 * (t % 4) + i / 2 * 8;
        A.resize(16 * 64);
        A[k * 64 + row] = low<Half>(lanes[t]->a[i]);
        A[(k + 1) * 64 + row] = high<Half>(lanes[t]->a[i]);
      }
    start(current->rank / 128, g.group, true, [=, &x, A = std::move(A)]() mutable {
      std::vector<float> B(16 * n);
      if (A.empty()) {
        A.resize(16 * 64);
        read_operand<Half>(Descriptor(first.a_bits, trans_a), 64, A.data(), site);
      }
      read_operand<Half>(Descriptor(first.b_bits, trans_b), n, B.data(), site);
      if (!first.add) x.value.assign(64 * n, 0);
      multiply(x.value.data(), A.data(), B.data(), n);
    });
  });
}

template void start_wgmma<bf16>(WgmmaOffer&, int, bool, bool, Site);
template void start_wgmma<fp16>(WgmmaOffer&, int, bool, bool, Site);

// A step that all threads of the warpgroup take together.
static void together(const char* operation, Site site, void (*step)(Warpgroup&)) {
  int nothing = 0;
  whole_warpgroup(operation, nothing, site, [step](Warpgroup& g, int**) { step(g); });
}

void fence_wgmma(Site site) {
  together("wgmma_fence", site, [](Warpgroup& g) { g.fences++; });
}
void commit_wgmma(Site site) {
  together("wgmma_commit", site, [](Warpgroup& g) { g.group++; });
}
void give_registers(int n, Site site) {
  int nothing = 0;
  whole_warpgroup("registers_decrease", nothing, site, [n](Warpgroup& g, int**) {
    free_registers += 128 * std::max(0, g.registers - n);
    g.registers = std::min(g.registers, n);
  });
}
void take_registers(int n, Site site) {
  together("registers_increase", site, [](Warpgroup&) {});
  Warpgroup* g = &warpgroups[current->rank / 128];
  wait("registers_increase", site, [g, n] {  // the warpgroup's first thread that gets them takes them for all
    int more = 128 * std::max(0, n - g->registers);
    if (more > free_registers) return false;
    free_registers -= more;
    g->registers = std::max(g->registers, n);
    return true;
  });
}

void wait_for_wgmma(int groups_left, Site site) {
  int w = current->rank / 128, nothing = 0;
  whole_warpgroup("wgmma_wait", nothing, site, [](Warpgroup&, int**) {});
  wait("wgmma_wait", site, [w, groups_left] { return !under_way(w, warpgroups[w].group - groups_left); });
  whole_warpgroup("wgmma_wait", nothing, site,
                  [=](Warpgroup& g, int**) { deliver(g, g.group - groups_left, site); });
}

void begin_work() {
  work_under_way.clear();
  thread_copies.clear();
  thread_copies.resize(threads.size());
  warpgroups.clear();
  warpgroups.resize((threads.size() + 127) / 128);
  // A multiprocessor has 64K registers. The compiler gives the threads of a block equal parts, in eights.
  for (auto& g : warpgroups) g.registers = std::min<int>(256, 65536 / threads.size() / 8 * 8);
  free_registers = 0;
  for (auto& b : named_barriers) b = {};
}

// Reports what a block must not leave behind when it ends.
void end_work() {
  close_accesses();
  std::string left;
  for (auto& g : warpgroups)
    if (!g.accumulators.empty())
      left = text("before wgmma_wait for the wgmma at %s", name(g.accumulators.front().site).c_str());
  for (auto& b : named_barriers)
    if (b.arrived)
      left = text("while %s to the named barrier at %s", describe_named(&b).c_str(), name(b.site).c_str());
  if (!work_under_way.empty()) left = "while copies to or from its shared memory are under way";
  if (!left.empty()) error = text("block %s has ended %s", name(block_index).c_str(), left.c_str());
  else check_writes();
}

}  // namespace emulator
