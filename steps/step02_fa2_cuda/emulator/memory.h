// SPDX-License-Identifier: MIT
// Global<T> and Shared<T>: pointers that know the array they belong to, and stop the launch where a kernel leaves it.
#pragma once
#include "block.h"

namespace emulator {

// An index together with the place in the kernel's text where it is used: x[i] makes one from i, and g++ fills in the place.
struct Index {
  long long i;
  Site site;
  Index(long long i, const char* file = __builtin_FILE(), int line = __builtin_LINE()) : i(i), site{file, line} {}
};

struct GlobalMemory {
  static constexpr const char* name = "an argument";
};
struct BlockMemory {
  static constexpr const char* name = "a shared array";
};

template <class T, class Memory> struct Pointer {
  T *at = nullptr, *begin = nullptr, *end = nullptr;

  Pointer() = default;
  Pointer(T* begin, long long n) : at(begin), begin(begin), end(begin + n) {}
  template <class U> Pointer(const Pointer<U, Memory>& p) : at(p.at), begin(p.begin), end(p.end) {}  // T* to const T*

  T& operator[](Index index) const {
    T* address = at + index.i;
    if (address < begin || address >= end)
      fail(index.site, "access to element %lld of %s of %lld elements", (long long)(address - begin), Memory::name,
           (long long)(end - begin));
    return *address;
  }
  Pointer& operator+=(long long n) { return at += n, *this; }
  friend Pointer operator+(Pointer p, long long n) { return p += n; }
};

static std::vector<char> shared_memory;  // of the running block; every byte 0xff at its start, which is NaN in every float type

}  // namespace emulator

template <class T> using Global = emulator::Pointer<T, emulator::GlobalMemory>;
template <class T> using Shared = emulator::Pointer<T, emulator::BlockMemory>;

struct SharedMemory {
  long long used = 0;  // bytes

  template <class T> Shared<T> array(int n, emulator::Index site = 0) {
    T* begin = reinterpret_cast<T*>(emulator::shared_memory.data() + used);
    used += n * sizeof(T);
    if (used > (long long)emulator::shared_memory.size())
      emulator::fail(site.site, "the kernel wants %lld bytes of shared memory so far, the launch gives %zu", used,
                     emulator::shared_memory.size());
    return Shared<T>(begin, n);
  }
};
