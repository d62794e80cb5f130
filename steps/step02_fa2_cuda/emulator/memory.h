// SPDX-License-Identifier: MIT
// Global<T> and Shared<T> are pointers that know their array, and stop the launch where a kernel leaves it.
#pragma once
#include "block.h"

namespace emulator {

// An index, and the line of the kernel's text where it is used. x[i] makes an Index from i, and g++ fills in
// the line.
struct Index {
  long long i;
  Site site;
  Index(long long i, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : i(i), site{file, line} {}
};

// conflicts.cpp defines these four.
extern bool counting_conflicts;
__attribute__((cold)) void log_access(Site site, int address, int bytes);
void clear_conflicts();
void close_accesses();  // at the end of a block: counts accesses that only some lanes of a warp made, too

// writes.cpp defines these four.
void watch_writes(const char* name, void* begin, long long bytes, int element, bool integers);
void stop_watching();                             // forgets all arguments
void note_addition(const void* to, int numbers);  // an atomic addition to so many numbers of 4 bytes
void check_writes();                              // at the end of a block

// The shared memory of the running block. At its start every byte is 0xff, which makes NaN in every float
// type.
extern std::vector<char> shared_memory;

struct GlobalMemory {
  static constexpr const char* name = "an argument";
  static uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
  static constexpr bool logging = false;
  static void log(const void*, int, Site) {}
};
struct BlockMemory {
  static constexpr const char* name = "a shared array";
  static char* first() { return shared_memory.data(); }
  static char* last() { return first() + shared_memory.size(); }
  static uintptr_t address(const void* p) { return static_cast<const char*>(p) - first(); }
  static constexpr bool& logging = counting_conflicts;
  static void log(const void* p, int bytes, Site site) { log_access(site, int(address(p)), bytes); }
};

template <class E, class Memory> struct Pointer {
  E *at = nullptr, *begin = nullptr, *end = nullptr;

  Pointer() = default;
  Pointer(E* begin, long long n) : at(begin), begin(begin), end(begin + n) {}
  // As from T* to const T*.
  template <class F> Pointer(const Pointer<F, Memory>& p) : at(p.at), begin(p.begin), end(p.end) {}
  // As from &tile[i], an address in shared memory that no longer knows its array: it may reach all of the
  // block's memory.
  template <class M = Memory, class = decltype(M::first())>
  Pointer(E* p) : at(p), begin(reinterpret_cast<E*>(M::first())), end(reinterpret_cast<E*>(M::last())) {}

  E& operator[](Index index) const {
    E* address = at + index.i;
    if (__builtin_expect(address < begin || address >= end || Memory::logging, 0)) unusual(index);
    return *address;
  }
  void check_alignment(int bytes, Site site) const {
    if (Memory::address(at) % bytes)
      fail(site, "%s is accessed at an address that is no multiple of %d", Memory::name, bytes);
  }
  // The next n elements, which one instruction reads or writes. They must begin at a multiple of `alignment`
  // bytes.
  E* span(long long n, int alignment, Site site) const {
    check_alignment(alignment, site);
    if (at < begin) outside(site, 0);
    if (at + n > end) outside(site, n - 1);
    return at;
  }
  // The same for `bytes` bytes that one lane of a warp accesses.
  E* vector(int bytes, Site site) const {
    E* address = span(bytes / sizeof(E), bytes, site);
    if (Memory::logging) Memory::log(address, bytes, site);
    return address;
  }
  __attribute__((cold, noinline)) void unusual(const Index& index) const {
    if (at + index.i < begin || at + index.i >= end) outside(index.site, index.i);
    Memory::log(at + index.i, sizeof(E), index.site);
  }
  [[noreturn]] __attribute__((cold, noinline)) void outside(Site site, long long i) const {
    long long element = at + i - begin, elements = end - begin;
    fail(site, "access to element %lld of %s of %lld elements", element, Memory::name, elements);
  }
  Pointer& operator+=(long long n) { return at += n, *this; }
  Pointer& operator-=(long long n) { return at -= n, *this; }
  friend Pointer operator+(Pointer p, long long n) { return p += n; }
  friend Pointer operator-(Pointer p, long long n) { return p -= n; }
};

}  // namespace emulator

template <class E> using Global = emulator::Pointer<E, emulator::GlobalMemory>;
template <class E> using Shared = emulator::Pointer<E, emulator::BlockMemory>;

struct SharedMemory {
  long long used = 0;  // bytes

  template <class E> Shared<E> array(int n, emulator::Index site = 0) {
    E* begin = reinterpret_cast<E*>(emulator::shared_memory.data() + used);
    if (used % alignof(E))
      emulator::fail(site.site,
                     "an array of elements of %zu bytes cannot begin at byte %lld of shared memory",
                     sizeof(E), used);
    used += n * sizeof(E);
    if (used > (long long)emulator::shared_memory.size())
      emulator::fail(site.site, "the kernel wants %lld bytes of shared memory so far, the launch gives %zu",
                     used, emulator::shared_memory.size());
    return Shared<E>(begin, n);
  }
};

// An address in shared memory, counted from its beginning, as PTX instructions take it.
template <class E> uint32_t shared_address(Shared<E> p) {
  return uint32_t(emulator::BlockMemory::address(p.at));
}
