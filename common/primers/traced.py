# SPDX-License-Identifier: Apache-2.0
"""The example of the primer on CuTe DSL; needs the DSL, but no GPU.

`python -m flash_ladder.common.primers.traced` compiles it once for the CPU and calls it twice.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def example(n: Int32, width: cutlass.Constexpr):
    """Says what happens when. Runs: host."""
    print(f"tracing: n is {n}, width is {width}")
    for i in cutlass.range_constexpr(width):
        print(f"tracing: unrolled step {i}")
    if cutlass.const_expr(width > 2):
        cute.printf("running: width is above 2")
    for i in cutlass.range(n):
        cute.printf("running: step %d of %d", i, n)


def main() -> None:
    """Compile, then call with two values of n."""
    compiled = cute.compile(example, Int32(1), 3)
    print("compiled", flush=True)
    for n in (1, 2):
        compiled(Int32(n))


if __name__ == "__main__":
    main()
