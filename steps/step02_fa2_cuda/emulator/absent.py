# SPDX-License-Identifier: MIT
"""Names of CUDA that the emulation does not have, and what to write instead."""

import re

SHARED = "the array is Shared<float> x = smem.array<float>(n), after SharedMemory smem"
HALF = "the types of 16 bits are bf16 and fp16, with to_float(x) and pack<bf16>(low, high) of ptx.cuh"
HEADERS = "a kernel includes ptx.cuh only, on a GPU too"
# {pattern of a whole name: what to write}. The first that fits counts.
WRITE = {
    r"asm|__asm|__asm__": "inline PTX is for a GPU alone; ptx.cuh has functions for it, such as mma and ldmatrix_x4",
    r"wmma|nvcuda": "write mma of ptx.cuh",
    r"cg|cooperative_groups": "write __syncthreads, __syncwarp or __shfl_xor_sync",
    r"cuda|cute|cutlass|cub|thrust": HEADERS,
    r"__shared__": SHARED,
    r"half2?|__half2?|__nv_bfloat162?|nv_bfloat162?|__half2float|__float2half(_rn)?|__bfloat162float": HALF,
    r"__float2bfloat16(_rn)?|__h\w+|h(exp|exp2|log|log2|sqrt|rsqrt|sin|cos)|__(low|high)2float": HALF,
    r"(__f(?:add|sub|mul|div|rcp|sqrt|maf)_r)[zdu]": r"write \1n, which rounds to the nearest number",
    r"__fmaf_ieee_r\w": "write __fmaf_rn",
    r"__d(add|sub|mul|div|rcp|sqrt)_r\w|__fma_r\w": "write it with +, *, / and fma, or in float",
    r"__exp2f": "write exp2f or exp2_approx; CUDA has no __exp2f",
    r"__((?:a?(?:sin|cos|tan)h?|expm1|log1p|r?sqrt|cbrt|pow|f?max|f?min|fabs|fma|erf|floor|ceil|rint)f)": r"write \1",
    r"normcdff?": "write 0.5f * erfcf(-0.707106781f * x)",
    r"erfcxf?": "write expf(x * x) * erfcf(x)",
    r"r?norm[34]df?|r?normf?|rhypotf?": "write sqrtf of the sum of the squares",
    r"sincospif?": "write sinpif and cospif",
    r"sinpi|cospi|rcbrt|fdivide|exp10": "write it in float",
    r"erfc?invf?|normcdfinvf?|cyl_bessel_i[01]f?": "no attention kernel needs it",
    r"__ballot_sync|__all_sync|__activemask|__match_\w+|__reduce_\w+": "write __any_sync or a loop of __shfl_xor_sync",
    r"__shfl|__shfl_(xor|up|down)|__any|__all|__ballot": "write __shfl_xor_sync(0xffffffff, ...) or another ..._sync",
    r"atomic(?!Add)\w+": "write atomicAdd",
    r"__syncthreads_\w+": "write __syncthreads",
    r"__threadfence_\w+": "write __threadfence",
    r"__ldcg|__ldcs|__ldca|__stcg|__stcs|__ld\w\w": "write x[i] or __ldg",
    r"__float2u?(int|ll)_\w+|__float2uint_\w+|__(ll|ull|double)2\w+": "write a cast such as int(x)",
    r"warpSize": "write 32",
    r"clock|clock64|__nanosleep|__trap|__brkpt|globaltimer|assert": "write printf, which works here and on a GPU",
    r"__fns|__brevl?|__byte_perm|__(clz|ffs|popc)ll|__u?mul(24|hi)|__sad|__dp\da": "write it with C's operators",
}

# How g++ and the linker name what they do not know.
UNKNOWN = re.compile(
    r"'(?:\w+::)*(\w+)' (?:was not declared|has not been declared|does not name a type|is not a namespace)|"
    r"no arguments to '(\w+)' that depend|attempt to use poisoned \"(\w+)\"|"
    r"undefined reference to [`'](\w+)(?:\(.*\))?'"
)


def without_headers(source):
    """A kernel's text, in which each header but ptx.cuh is an error. NVRTC has none of them either."""
    header = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](?!ptx\.cuh)(\S+)[>"]', re.M)
    return header.sub(rf"#error there is no \1: {HEADERS}", source)


def advised(stderr, folder):
    """g++'s messages, in which an error that concerns one of these names says what to write.

    folder: where g++ ran. The linker puts it before the names of files.
    """
    return "\n".join(_advised(line.removeprefix(f"{folder}/")) for line in stderr.splitlines())


def _advised(line):
    line = re.sub(r"\bemulator_(\w+f)\b", r"__\1", line)  # as functions.h calls these
    found = UNKNOWN.search(line)
    name = found and next(filter(None, found.groups()))
    for pattern, write in WRITE.items() if name else ():
        if fits := re.fullmatch(pattern, name):
            where = re.match(r".*?[:(]\d+[:)](\d+:)? ", line)
            return f"{where[0] if where else ''}error: {name} is not emulated here: {fits.expand(write)}"
    return line
