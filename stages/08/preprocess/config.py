# SPDX-License-Identifier: Apache-2.0
"""Preprocess: what a backward needs to know of each query row, and an empty sum for dQ.

Plain loads, shuffles and stores, bound by global memory. Data only; runs: host.
"""

from ...common.plan import Envelope, Plan, Role

NAME = "preprocess"
IDEA = "D = rowsum(O * dO) - dLSE, once for each query row instead of once for each tile."

TILE_M = 128  # query rows of a CTA
THREADS = 128  # each writes LSE and D of one row
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
    return Plan(roles=(Role("COMPUTE", range(THREADS // 32), does="rows of O and dO, zeros"),))


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": ("<=", 64),
        "ld_global": 2 * (head_dim // 8) + 6,  # O, dO in d / 8 steps; LSE twice, dLSE, 3 lengths
        "st_global": head_dim // 4 + 2,  # zeros; D, LSE
        "mma_sass": 0,
    }
    for head_dim in (64, 128)
}
