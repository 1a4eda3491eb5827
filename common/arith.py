# SPDX-License-Identifier: Apache-2.0
"""Floating-point helpers for kernels that hide what differs by architecture.

Packed float32 pairs (f32x2) exist from sm_100 on; below, the same functions emit two scalar
operations each, so that one kernel text serves both. Runs: trace time, device code.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import CuTeDSL

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
CHAINS = 4  # independent partial results: hides the 4-cycle latency of an add or max


def has_packed_f32() -> bool:
    """True while tracing for a target with f32x2 arithmetic (sm_100 and newer)."""
    return CuTeDSL._get_dsl().get_arch_enum().major >= 10


@cute.jit
def fma2(a, b, c):
    """(a0*b0 + c0, a1*b1 + c1), each rounded once; a, b, c are pairs of Float32."""
    if cutlass.const_expr(has_packed_f32()):
        return cute.arch.fma_packed_f32x2(a, b, c)
    return a[0] * b[0] + c[0], a[1] * b[1] + c[1]


@cute.jit
def add2(a, b):
    """(a0 + b0, a1 + b1), each rounded to nearest; a and b are pairs of Float32."""
    if cutlass.const_expr(has_packed_f32()):
        return cute.arch.add_packed_f32x2(a, b)
    return a[0] + b[0], a[1] + b[1]


@cute.jit
def mul2(a, b):
    """(a0*b0, a1*b1), each rounded to nearest; a and b are pairs of Float32."""
    if cutlass.const_expr(has_packed_f32()):
        return cute.arch.mul_packed_f32x2(a, b)
    return a[0] * b[0], a[1] * b[1]


@cute.jit
def exp2(x: Float32):
    """2**x by the MUFU unit (ex2.approx.f32, at most 2 ulp; PTX section 9.7.3)."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def max_of(fragment: cute.Tensor, start: Float32):
    """Largest of `start` and all elements of a register tensor (n,) Float32; NaN if any is NaN.

    n is a multiple of CHAINS. ptxas joins two steps of a chain into one 3-input max on sm_100.
    """
    chains = [fragment[c] for c in range(CHAINS)]
    chains[0] = fmax(chains[0], start)
    for i in cutlass.range_constexpr(CHAINS, cute.size(fragment)):
        chains[i % CHAINS] = fmax(chains[i % CHAINS], fragment[i])
    return fmax(fmax(chains[0], chains[1]), fmax(chains[2], chains[3]))


@cute.jit
def fmax(a: Float32, b: Float32):
    """The larger of a and b, NaN if either is (max.NaN.f32; PTX section 9.7.3)."""
    return cute.arch.fmax(a, b, nan=True)


@cute.jit
def sum_of(fragment: cute.Tensor, start: Float32):
    """`start` plus all elements of a register tensor (n,) Float32, n a multiple of 2 * CHAINS."""
    sums = [(fragment[2 * c], fragment[2 * c + 1]) for c in range(CHAINS)]
    sums[0] = add2(sums[0], (start, Float32(0.0)))
    for i in cutlass.range_constexpr(2 * CHAINS, cute.size(fragment), 2):
        c = i // 2 % CHAINS
        sums[c] = add2(sums[c], (fragment[i], fragment[i + 1]))
    total = add2(add2(sums[0], sums[1]), add2(sums[2], sums[3]))
    return total[0] + total[1]
