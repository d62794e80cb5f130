// SPDX-License-Identifier: MIT
// bf16, fp16 and the small vectors of CUDA. Conversions round to nearest, ties to even, and NaN stays NaN.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

template <class To, class From> To emulator_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }

// The same number, but g++ does not know this. So it cannot join the operations before and after it.
inline float emulator_opaque(float x) {
  int bits = __float_as_int(x);
  asm("" : "+r"(bits));
  return __int_as_float(bits);
}
// A product that is rounded before anything is added to it, while a * b + c becomes an FMA.
inline float __fmul_rn(float a, float b) { return emulator_opaque(emulator_opaque(a) * b); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline float to_float(fp16 x) {
  uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  if (magnitude >= 0x0f800000) return __uint_as_float(magnitude | 0x7f800000 | sign);  // infinite, or NaN
  // The factor makes up for the different bias of the exponents.
  return __uint_as_float(__float_as_uint(__uint_as_float(magnitude) * 0x1p112f) | sign);
}

namespace emulator {

// Whether a NaN comes from shared memory that nobody has written. There all bits are ones, and arithmetic
// keeps the upper 16 of them.
inline bool is_unwritten(float x) { return __float_as_uint(x) >> 16 == 0xffff; }

template <class To> To round_to(float x);

template <> inline bf16 round_to<bf16>(float x) {
  uint32_t bits = __float_as_uint(x);
  if (x != x) return {uint16_t(is_unwritten(x) ? 0xffff : 0x7fff)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <> inline fp16 round_to<fp16>(float x) {
  uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (x != x) return {uint16_t(is_unwritten(x) ? 0xffff : 0x7fff)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and above become infinite
  if (magnitude < 0x38800000) {  // below 2^-14 fp16 has steps of 2^-24, as float32 has between 0.5 and 1
    float steps = __uint_as_float(magnitude) + 0.5f;
    return {uint16_t(sign | (__float_as_uint(steps) - 0x3f000000))};
  }
  return {uint16_t(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13)};
}

// The numbers in the lower and in the upper half of a register.
template <class Half> float low(uint32_t pair) { return to_float(Half{uint16_t(pair)}); }
template <class Half> float high(uint32_t pair) { return to_float(Half{uint16_t(pair >> 16)}); }

}  // namespace emulator

template <class Half> uint32_t pack(float low, float high) {
  return emulator::round_to<Half>(low).bits | uint32_t(emulator::round_to<Half>(high).bits) << 16;
}

inline float exp2_approx(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;  // the GPU's unit knows no subnormal numbers
}
