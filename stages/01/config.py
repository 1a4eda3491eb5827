# SPDX-License-Identifier: Apache-2.0
"""Stage 01 = the definition of attention, computed tile by tile with an online softmax.

One thread owns one query row: its scores S and its output O live in registers, every product is an
FMA. Nothing here needs more than sm_80. Data only; runs: host.
"""

from ..common.plan import Arrival, Barrier, Envelope, Plan, Role, SmemBuffer

NAME = "naive tiled attention"
IDEA = "Visit the keys tile by tile and keep a running row max and row sum; S is never stored."

TILE_M = 128  # query rows of a CTA, one per thread
TILE_N = {64: 64, 128: 32}  # keys of a tile by head dim: S and O of a row share 255 registers
COPY_BYTES = 16  # one global load or store of a thread
ROW_PAD = 4  # float32 words behind each row of sQ: 8 neighbouring rows then use all 32 banks
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")  # runs natively

ENVELOPE = Envelope(
    dtypes=("bfloat16", "float16"),
    head_dims=(64, 128),
    seqlen_multiple=128,
    grouped_heads=False,
    differentiable=False,
    lifted_by={"head_dim": 10, "seqlen": 8, "mask": 8, "heads": 9, "strides": 10, "grad": 7},
)


def plan(head_dim: int) -> Plan:
    """Resources of one CTA for `head_dim` (64 or 128)."""
    tile_n = TILE_N[head_dim]
    return Plan(
        roles=(Role("COMPUTE", range(0, 4), does="load, QK, softmax, PV, epilogue: one row each"),),
        smem=(
            SmemBuffer("sQ", TILE_M * (head_dim + ROW_PAD) * 4, holds="query tile, float32"),
            SmemBuffer("sK", tile_n * head_dim * 4, holds="key tile, float32"),
            SmemBuffer("sV", tile_n * head_dim * 4, holds="value tile, float32"),
        ),
        barriers=(
            Barrier(
                "kv_full",
                kind="named",
                number=0,
                producers=(Arrival("COMPUTE"),),
                consumers=(Arrival("COMPUTE"),),
                guards="sK and sV hold this key tile (and sQ the query tile)",
            ),
            Barrier(
                "kv_empty",
                kind="named",
                number=1,
                producers=(Arrival("COMPUTE"),),
                consumers=(Arrival("COMPUTE"),),
                guards="everyone is done with sK and sV: the next tile may overwrite them",
            ),
        ),
    )


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": ("<=", 255),
        "ex2": tile_n + 1,  # a tile's P and the factor acc_scale
        "max": tile_n,
        "ld_shared": tile_n + 1 + tile_n * head_dim // 4,  # QK: a loop over d; PV: all unrolled
        "mma_sass": 0,  # no tensor core yet
    }
    for head_dim, tile_n in TILE_N.items()
}
