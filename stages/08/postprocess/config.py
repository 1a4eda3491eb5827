# SPDX-License-Identifier: Apache-2.0
"""Postprocess: the float32 sum of dQ becomes the 16-bit gradient.

Plain loads and stores, bound by global memory. Data only; runs: host.
"""

from ...common.plan import Envelope, Plan, Role

NAME = "postprocess"
IDEA = "dQ is rounded once, after all keys have been added up, and scaled on the way."

TILE_M = 128  # query rows of a CTA
THREADS = 128
COPY_BYTES = 16  # one load or store of a thread
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")  # runs natively

ENVELOPE = Envelope(
    dtypes=("bfloat16", "float16"),
    head_dims=(64, 128),
    seqlen_multiple=1,
    masks=True,
)


def plan(head_dim: int) -> Plan:
    """Resources of one CTA, the same for every head dim."""
    return Plan(roles=(Role("COMPUTE", range(THREADS // 32), does="rows of dQ"),))


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": ("<=", 64),
        "ld_global": head_dim // 4 + 4,  # 16 bytes of the sum; four of the lengths
        "st_global": head_dim // 8 + 1,  # 16 bytes of dQ; the zeros, in a loop
        "mma_sass": 0,
    }
    for head_dim in (64, 128)
}
