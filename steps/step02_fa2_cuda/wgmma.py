# SPDX-License-Identifier: MIT
"""Writes the wrappers of Hopper's wgmma, one for each width N. Written by hand, N = 176 alone would be 90 operands.

    wgmma_ss<T, N, TRANS_A, TRANS_B>(d, a, b, add)    D (64 x N, float32) = A (64 x 16) B (16 x N) + (add ? D : 0)
    wgmma_rs<T, N, TRANS_B>(d, a, b, add)             the same with A in registers

A warpgroup starts the product, which then runs while the threads go on; wgmma_wait (ptx.cuh) waits for it. T is bf16
or fp16. b is the descriptor of an operand in shared memory (ptx.cuh), and so is a in wgmma_ss; in wgmma_rs a is four
registers. TRANS = 1 says that the product's sum runs down the rows of the operand's tile in shared memory, TRANS = 0
that it runs along them. With g = 16 * (t / 32) + t % 32 / 4 and c = 2 * (t % 4), thread t of the warpgroup holds

    d[4j, 4j+1] = D[g][8j + c, + 1]     d[4j+2, 4j+3] = D[g+8][8j + c, + 1]     a[4]: of A's rows g and g+8, as in `mma`

[PTX ISA: wgmma.mma_async]
"""

WIDTHS = tuple(range(16, 257, 16))  # the hardware has every multiple of 8 up to 256; the kernels use these
# By condition: the name of the type in PTX. The parameter is `Type` and not T, because kernels define T as a macro.
TYPES = {"is_bf16<Type>::value": "bf16", "!is_bf16<Type>::value": "f16"}

HEAD = """
template <class Type> struct is_bf16 { static constexpr bool value = false; };
template <> struct is_bf16<bf16> { static constexpr bool value = true; };
"""


def wrappers(widths=WIDTHS) -> str:
    """The wrappers of these widths as CUDA C++ text, to put after ptx.cuh. A call with another N does not compile."""
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
    """The asm statement. Its operands have the numbers of the order in which they are listed: d, a, b, add, trans."""
    d = [f'"+f"(d[{i}])' for i in range(n // 2)]
    a = ['"l"(a)'] if kind == "ss" else [f'"r"(a[{i}])' for i in range(4)]
    trans = ['"n"(TRANS_A)', '"n"(TRANS_B)'] if kind == "ss" else ['"n"(TRANS_B)']
    numbers = iter(range(len(d) + len(a) + 2 + len(trans)))
    D, A = (", ".join(f"%{next(numbers)}" for _ in operands) for operands in (d, a))
    B, add = next(numbers), next(numbers)
    transposed = "".join(f", %{i}" for i in numbers)
    A = A if kind == "ss" else f"{{{A}}}"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name}"
    inputs = ", ".join([*a, '"l"(b)', '"r"(int(add))', *trans])
    return (
        f'asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{add}, 0; '
        f'{instruction} {{{D}}}, {A}, %{B}, add, 1, 1{transposed}; }}" : {", ".join(d)} : {inputs});'
    )
