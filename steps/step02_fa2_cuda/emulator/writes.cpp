// SPDX-License-Identifier: MIT
// Finds elements of an argument that two blocks write. On a GPU blocks run at the same time, so that one of
// the two writes gets lost. Here they run one after the other. So a block has written the elements that
// differ from a copy made before it, except those to which it added atomically. A write of the value that
// was there already does no harm, and is not noticed. A block's atomic addition gets lost, too, if another
// block writes to the element without atomics. Integers are excepted: the last block may reset a counter.
// The same comparison finds results that come from shared memory that nobody has written. The atomic
// additions to arguments are counted.
#include <string>

namespace emulator {

struct Watched {  // an argument that a kernel may write
  const char* name;
  char* begin;
  size_t bytes, element;
  bool integers;
  std::vector<char> before;  // what it held when the last block ended
  // By element: 1 + the number of the block that wrote it, or that added to it; 0 if there was none.
  std::vector<unsigned> writer, adder;

  bool changed(size_t i) const { return memcmp(begin + i * element, &before[i * element], element); }
};
static std::vector<Watched> all_watched;

void watch_writes(const char* name, void* begin, long long bytes, int element, bool integers) {
  if (bytes <= 0) return;
  char* b = static_cast<char*>(begin);
  all_watched.push_back({name, b, size_t(bytes), size_t(element), integers, {b, b + bytes}, {}, {}});
}

static std::string unwritten;  // says which result came from shared memory that nobody had written

static long long additions;  // atomic ones to arguments; several numbers that are added at once count as one

void stop_watching() {
  all_watched.clear();
  unwritten.clear();
  additions = 0;
}

static unsigned block_number() {
  return block_index.x + grid_size.x * (block_index.y + grid_size.y * block_index.z);
}

static std::string name_of_block(unsigned n) {
  return name({n % grid_size.x, n / grid_size.x % grid_size.y, n / grid_size.x / grid_size.y});
}

void note_addition(const void* to, int numbers) {
  for (auto& w : all_watched) {
    size_t first = static_cast<const char*>(to) - w.begin;  // huge if `to` lies before the argument
    if (first >= w.bytes) continue;
    additions++;
    w.adder.resize(w.bytes / w.element);
    for (size_t i = first / w.element, end = i + numbers; i < end && i < w.adder.size(); i++)
      w.adder[i] = 1 + block_number();
  }
}

// Numbers of 16 and of 32 bits both begin with 16 ones.
static void check_written(const Watched& w, size_t i) {
  uint16_t upper;
  memcpy(&upper, w.begin + (i + 1) * w.element - 2, 2);
  if (upper == 0xffff && !w.integers && unwritten.empty())
    unwritten = text("element %zu of %s comes from shared memory that nobody had written (block %s)", i,
                     w.name, name(block_index).c_str());
}

static void check_element(Watched& w, size_t i) {
  unsigned me = 1 + block_number();
  if (!w.changed(i)) return;
  check_written(w, i);
  w.adder.resize(w.bytes / w.element);
  w.writer.resize(w.bytes / w.element);
  bool adds = w.adder[i] == me;
  if (adds && w.integers) return;
  unsigned other = w.writer[i];
  if (!other && !adds && !w.integers) other = w.adder[i];
  if (other && other != me && error.empty())
    error = text("two blocks write to one element: blocks %s and %s to element %zu of %s. On a GPU one of "
                 "the two writes gets lost: add by atomicAdd, or let only one block write",
                 name_of_block(other - 1).c_str(), name(block_index).c_str(), i, w.name);
  if (!adds) w.writer[i] = me;
}

void check_writes() {
  constexpr size_t PIECE = 4096;  // bytes that are compared at once, because most have not changed
  for (auto& w : all_watched)
    for (size_t first = 0; first < w.bytes; first += PIECE) {
      size_t n = w.bytes - first < PIECE ? w.bytes - first : PIECE;
      if (!memcmp(w.begin + first, &w.before[first], n)) continue;
      for (size_t i = first / w.element; i < (first + n) / w.element; i++) check_element(w, i);
      memcpy(&w.before[first], w.begin + first, n);
    }
}

}  // namespace emulator

extern "C" __attribute__((visibility("default"))) const char* emulator_unwritten() {
  return emulator::unwritten.c_str();
}

extern "C" __attribute__((visibility("default"))) long long emulator_additions() {
  return emulator::additions;
}
