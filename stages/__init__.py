# SPDX-License-Identifier: Apache-2.0
"""FlashLadder: FlashAttention-4 for Blackwell, taught by building it."""

STAGES: dict[int, str] = {
    1: "naive tiled attention",
    2: "TMEM accumulators",
    3: "warp-specialised ping-pong",
    4: "correction warpgroup",
    5: "Cody-Waite exp2",
    6: "conditional rescaling",
    7: "backward",
    8: "masks and lengths",
    9: "scheduling",
    10: "production",
}
