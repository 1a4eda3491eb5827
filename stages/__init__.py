# SPDX-License-Identifier: Apache-2.0
"""FlashLadder: FlashAttention-4 for Blackwell, taught by building it.

`load(n)` gives stage n: its `attention` op, its configuration, its executable model, what ran
where. `flash_attn_func` and `flash_attn_varlen_func` are the last stage as an operator of torch.
Importing this package loads neither torch nor the CuTe DSL.
"""

import pathlib

STAGES = {
    1: "naive tiled attention",
    2: "TMEM accumulators",
    3: "warp-specialised ping-pong",
    4: "correction warpgroup",
    5: "Cody-Waite exp2",
    6: "conditional rescaling",
    7: "backward, 1-CTA then 2-CTA",
    8: "masks and lengths",
    9: "scheduling",
    10: "production",
}  # the ladder; `built()` says which of them this version has

OPS = ("flash_attn_func", "flash_attn_varlen_func")  # of common/op.py

__all__ = ["STAGES", "built", "load", *OPS]


def __getattr__(name: str):
    """The op, imported when first asked for: it needs torch."""
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .common import op

    return getattr(op, name)


def __dir__() -> list[str]:
    """The op too."""
    return sorted({*globals(), *OPS})


def built() -> list[int]:
    """Numbers of the stages that exist in this version, ascending."""
    here = pathlib.Path(__file__).parent
    return [number for number in STAGES if (here / f"{number:02d}" / "kernel.py").is_file()]


def load(number: int):
    """Stage `number` of the ladder; nothing is compiled yet.

    Args:
        number: one of `built()`.

    Returns: a `common.stage.Stage`.

    Raises: TypeError for anything but an int, ValueError for a stage that does not exist (yet).
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"load takes a stage number, such as 1; got {number!r}")
    if number not in STAGES:
        raise ValueError(
            f"there is no stage {number}; the ladder has {min(STAGES)} to {max(STAGES)}"
        )
    if number not in built():
        raise ValueError(
            f"stage {number} ({STAGES[number]}) is planned and not in this version; "
            f"built: {', '.join(map(str, built()))}"
        )
    from .common.stage import Stage

    return Stage(number)
