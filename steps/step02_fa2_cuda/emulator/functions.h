// SPDX-License-Identifier: MIT
// CUDA's mathematical functions that C does not have. g++ must not join the ..._rn with their neighbours.
// __expf and its like are as inexact as on a GPU: the factor that changes the base is rounded first.
#pragma once
#include "numbers.h"

// C's library defines functions of some of these names, or only declares them.
#define __cosf emulator_cosf
#define __sinf emulator_sinf
#define __tanf emulator_tanf
#define __sincosf emulator_sincosf
#define __expf emulator_expf
#define __exp10f emulator_exp10f
#define __logf emulator_logf
#define __log2f emulator_log2f
#define __log10f emulator_log10f
#define __powf emulator_powf

inline float __log2f(float x) { return log2f(x); }
inline float __logf(float x) { return __fmul_rn(log2f(x), 0.693147181f); }
inline float __log10f(float x) { return __fmul_rn(log2f(x), 0.301029996f); }
inline float __expf(float x) { return exp2f(__fmul_rn(x, 1.44269504f)); }
inline float __exp10f(float x) { return exp2f(__fmul_rn(x, 3.32192809f)); }
inline float __powf(float x, float y) { return exp2f(__fmul_rn(y, log2f(x))); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return sinf(x) / cosf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }  // of NaN it is 0
// A denominator above 2^126 gives 0, and with an infinite numerator NaN.
inline float __fdividef(float a, float b) { return a * (fabsf(b) > 0x1p126f && !isinf(b) ? 0 : 1 / b); }
inline float fdividef(float a, float b) { return a / b; }

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rcbrtf(float x) { return 1 / cbrtf(x); }
inline float sinpif(float x) { return float(sin(M_PI * fmod(x, 2))); }
inline float cospif(float x) { return float(cos(M_PI * fmod(x, 2))); }

inline float __fadd_rn(float a, float b) { return emulator_opaque(a) + emulator_opaque(b); }
inline float __fsub_rn(float a, float b) { return emulator_opaque(a) - emulator_opaque(b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return float(1 / sqrt(double(x))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
