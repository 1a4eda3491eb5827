# SPDX-License-Identifier: Apache-2.0
"""Stage 02 = stage 01 + tensor memory: both products on the tensor core, tiles moved by TMA.

One warpgroup still does one thing after the other. A thread still owns one query row, but scores
and output live in tensor memory between the steps. Data only; runs: host.
"""

from ..common.plan import Arrival, Barrier, Envelope, Plan, Role, SmemBuffer, TmemRegion

NAME = "TMEM accumulators"
IDEA = "The tensor core computes both products; S, P and O live in tensor memory."

TILE_M = 128  # query rows of a tile, one per thread and one per lane of tensor memory
Q_TILES = 1  # query tiles of a CTA
TILE_N = {64: 128, 128: 128}  # keys of a tile by head dim
KV_STAGES = {64: 2, 128: 2}  # slots for K and V: one each
CHUNK = 32  # columns of tensor memory that one load or store moves
COPY_BYTES = 16  # one shared-memory store of a thread
TMEM_COLUMNS = 512  # all of them, so that one CTA owns the SM; 256 would do
TMEM_S, TMEM_P, TMEM_O = (0,), (128,), (256,)  # first columns by query tile
ARCHS = ("sm_100a", "sm_103a")  # runs natively

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
    tile_bytes = tile_n * head_dim * 2
    everyone, one = Arrival("COMPUTE"), Arrival("COMPUTE", "one")
    return Plan(
        roles=(Role("COMPUTE", range(0, 4), does="everything, in turn; warp 0 issues"),),
        smem=(
            SmemBuffer("barriers", 64, align=8, holds="mbarriers and the address of tensor memory"),
            SmemBuffer("sQ", TILE_M * head_dim * 2, align=1024, holds="query tile"),
            SmemBuffer("sKV", tile_bytes, KV_STAGES[head_dim], 1024, "key tile, value tile"),
            SmemBuffer("sO", TILE_M * head_dim * 2, align=1024, holds="output tile"),
        ),
        tmem=(
            TmemRegion("S", TMEM_S[0], tile_n, holds="scores, float32"),
            TmemRegion("P", TMEM_P[0], tile_n // 2, holds="probabilities, 16-bit pairs"),
            TmemRegion("O", TMEM_O[0], head_dim, holds="unnormalised output, float32"),
        ),
        barriers=(
            Barrier(
                "kv_full",
                producers=(Arrival("COMPUTE", "tma"),),
                consumers=(one,),
                stages=KV_STAGES[head_dim],
                tx_bytes=tile_bytes,
                guards="a slot holds its tile of K or V",
            ),
            Barrier(
                "q_full",
                producers=(Arrival("COMPUTE", "tma"),),
                consumers=(one,),
                tx_bytes=TILE_M * head_dim * 2,
                guards="sQ holds the query tile",
            ),
            Barrier(
                "s_full",
                producers=(Arrival("COMPUTE", "commit"),),
                consumers=(everyone,),
                guards="S holds the scores of this key tile",
            ),
            Barrier(
                "o_full",
                producers=(Arrival("COMPUTE", "commit"),),
                consumers=(everyone,),
                guards="O includes this key tile; S, P and both slots are free",
            ),
            Barrier(
                "start_end",
                kind="named",
                number=0,
                producers=(everyone,),
                consumers=(everyone,),
                guards="barriers and tensor memory are there; at the end: sO is, and O is free",
            ),
            Barrier(
                "p_full",
                kind="named",
                number=1,
                producers=(everyone,),
                consumers=(everyone,),
                guards="P holds this key tile's probabilities and O is rescaled",
            ),
        ),
    )


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": ("<=", 255),
        "tmem_columns": TMEM_COLUMNS,
        "mma_kinds": "f16",
        "mma_ss": head_dim // 16,  # QK: 16 columns of the head dim each
        "mma_ts": tile_n // 16,  # PV: 16 keys each
        "ex2": tile_n + 1,  # a tile's P and the factor acc_scale
        "max": tile_n,
        "tma_loads": 3 * head_dim // 64,  # Q, K, V: 128 bytes of each row at a time
        "tma_stores": head_dim // 64,  # O
        "mbarrier_waits": 5,  # Q, K, V, S and O full
        "mbarrier_arrives": 3,
        "commits": 2,
        "tmem_fences": 8,
        "tmem_load_waits": 1 + head_dim // 16,  # S; O while rescaling and at the end
        "tmem_store_waits": 2,  # P, O
        "proxy_fences": 1,  # before the stores of O
        "init_fences": 1,
        "tmem_deallocs": 1,
        "slots_per_element": ("<=", 5.1),
    }
    for head_dim, tile_n in TILE_N.items()
}
