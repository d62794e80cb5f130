# SPDX-License-Identifier: MIT
"""Writes the wrappers of Hopper's wgmma, one for each width N: by hand, N = 176 would mean 90 operands.

    wgmma_ss<T, N, TRANS_A, TRANS_B>(d, a, b, add)    D (64 x N, float32) = A (64 x 16) B (16 x N) + (add ? D : 0)
    wgmma_rs<T, N, TRANS_B>(d, a, b, add)             the same with A in registers

One warpgroup starts the product; it runs on until wgmma_wait. T is bf16 or fp16; a and b are descriptors (ptx.cuh), or a[4]
registers. TRANS = 1: the operand lies in shared memory with its rows along the sum. Thread t of the warpgroup holds, with
g = 16 * (t / 32) + t % 32 / 4 and c = 2 * (t % 4):
    d[4j, 4j+1] = D[g][8j + c, + 1]     d[4j+2, 4j+3] = D[g+8][8j + c, + 1]     a[4]: rows g, g+8 as for mma in ptx.cuh
[PTX ISA: wgmma.mma_async]
"""

WIDTHS = tuple(range(16, 257, 16))  # every multiple of 8 up to 256 exists; these are in use
TYPES = {"is_bf16<Type>::value": "bf16", "!is_bf16<Type>::value": "f16"}  # `Type`, because kernels define T as a macro

HEAD = """
template <class Type> struct is_bf16 { static constexpr bool value = false; };
template <> struct is_bf16<bf16> { static constexpr bool value = true; };
"""


def wrappers(widths=WIDTHS) -> str:
    """The CUDA C++ text, to stand behind ptx.cuh. A call with another N does not compile."""
    ss = _wrapper("ss", "int TRANS_A, int TRANS_B", "uint64_t a", widths)
    return HEAD + ss + _wrapper("rs", "int TRANS_B", "const uint32_t (&a)[4]", widths)


def _wrapper(kind, trans, a, widths):
    cases = "".join(
        f"  if constexpr (N == {n} && {condition})\n    {_instruction(kind, n, name)}\n"
        for n in widths
        for condition, name in TYPES.items()
    )
    known = " || ".join(f"N == {n}" for n in widths)
    return f"""
template <class Type, int N, {trans}>
__device__ inline void wgmma_{kind}(float (&d)[N / 2], {a}, uint64_t b, bool add) {{
  static_assert({known}, "wgmma.py writes no wrapper of this width");
{cases}}}
"""


def _instruction(kind, n, name):
    """Operands are numbered as they are listed behind the text: d, a, b, add, trans."""
    d = [f'"+f"(d[{i}])' for i in range(n // 2)]
    a = ['"l"(a)'] if kind == "ss" else [f'"r"(a[{i}])' for i in range(4)]
    trans = ['"n"(TRANS_A)', '"n"(TRANS_B)'] if kind == "ss" else ['"n"(TRANS_B)']
    numbers = iter(range(len(d) + len(a) + 2 + len(trans)))
    D, A = (", ".join(f"%{next(numbers)}" for _ in operands) for operands in (d, a))
    B, add = next(numbers), next(numbers)
    T = "".join(f", %{i}" for i in numbers)
    A = A if kind == "ss" else f"{{{A}}}"
    return (
        f'asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{add}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} '
        f'{{{D}}}, {A}, %{B}, add, 1, 1{T}; }}" : {", ".join(d)} : {", ".join(a)}, "l"(b), "r"(int(add)), {", ".join(trans)});'
    )
