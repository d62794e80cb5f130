// SPDX-License-Identifier: MIT
// Counts bank conflicts in shared memory, if this is switched on. Shared memory has 32 banks, each 4 bytes
// wide. In one wavefront a bank serves one word, to any number of lanes. The lanes of a warp that come to the
// same line of the kernel's text for the n-th time form one access. An access of 8 bytes a lane is served by
// half warps, one of 16 bytes by quarter warps.
#include <list>
#include <string>

namespace emulator {

struct Access {  // of one warp
  unsigned lanes = 0;
  int bytes = 0, address[32];
};

struct SiteLog {
  struct Warp {
    int reached[32] = {};  // how often each lane was here
    int closed = 0;        // how many accesses are complete and counted
    std::vector<Access> open;
  };
  Site site;
  long long accesses = 0, wavefronts = 0;
  std::vector<Warp> warps;
};

bool counting_conflicts;
static std::list<SiteLog> sites;

static int wavefronts(const Access& a) {
  int lanes_at_once = a.bytes > 4 ? 128 / a.bytes : 32, all = 0;
  for (int first = 0; first < 32; first += lanes_at_once) {
    std::vector<int> words_of[32];  // the words that each bank has to serve
    size_t most = 0;
    for (int lane = first; lane < first + lanes_at_once; lane++)
      for (int byte = 0; a.lanes >> lane & 1 && byte < a.bytes; byte += 4) {
        int word = (a.address[lane] + byte) / 4;
        auto& words = words_of[word % 32];
        bool known = false;
        for (int w : words) known |= w == word;
        if (!known) words.push_back(word);
        if (words.size() > most) most = words.size();
      }
    all += int(most);
  }
  return all;
}

static void count_first(SiteLog& log, SiteLog::Warp& warp) {
  log.accesses++;
  log.wavefronts += wavefronts(warp.open[0]);
  warp.open.erase(warp.open.begin());
  warp.closed++;
}

static SiteLog& log_of(Site site) {
  for (auto& log : sites)
    if (log.site.line == site.line && !strcmp(log.site.file, site.file)) return log;
  sites.emplace_back();
  sites.back().site = site;
  return sites.back();
}

void log_access(Site site, int address, int bytes) {
  SiteLog& log = log_of(site);
  log.warps.resize((threads.size() + 31) / 32);
  SiteLog::Warp& warp = log.warps[current->rank / 32];
  int lane = current->rank % 32;
  size_t n = warp.reached[lane]++ - warp.closed;
  if (n >= warp.open.size()) warp.open.resize(n + 1);
  Access& access = warp.open[n];
  access.lanes |= 1u << lane;
  access.bytes = bytes;
  access.address[lane] = address;
  while (!warp.open.empty() && warp.open[0].lanes == ~0u) count_first(log, warp);
}

void clear_conflicts() { sites.clear(); }

void close_accesses() {
  for (auto& log : sites) {
    for (auto& warp : log.warps)
      while (!warp.open.empty()) count_first(log, warp);
    log.warps.clear();
  }
}

static std::string conflict_report() {
  std::string all;
  for (auto& log : sites) all += text("%s %lld %lld\n", name(log.site).c_str(), log.accesses, log.wavefronts);
  return all;
}

}  // namespace emulator

// What the last launch counted, a line of text for each line of the kernel: file:line, accesses, wavefronts.
extern "C" __attribute__((visibility("default"))) const char* emulator_conflicts() {
  static std::string text;
  text = emulator::conflict_report();
  return text.c_str();
}
