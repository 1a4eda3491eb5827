# SPDX-License-Identifier: Apache-2.0
"""The backward pass in one CTA: dK and dV of its keys in tensor memory, dQ added up outside.

Five products for each pair of a query tile and a key tile, S and dP transposed. Data only; runs:
host.
"""

from ...common.plan import Arrival, Barrier, Envelope, Plan, Role, SmemBuffer, TmemRegion

NAME = "backward, one CTA"
IDEA = "Keys stay, queries stream by: five products, and tensor memory holds four of them."

TILE = 128  # rows of a query tile and of a key tile; a key is a lane of tensor memory
KEY_TILES = {64: 2, 128: 1}  # of a CTA, by head dim: 128 columns of dK and of dV
Q_STAGES = {64: 2, 128: 2}  # slots of the ring of query tiles, with LSE and D of their rows
DO_STAGES = {64: 2, 128: 1}  # slots of the ring of dO tiles
HALF = 64  # queries of a tile that one COMPUTE warpgroup has, and columns of an output block
CHUNK = 32  # columns of tensor memory that one load or store moves
SLICE = 32  # columns of dQ that one reduction adds
DQ_SLOTS = 2  # slices of dQ in shared memory
STATS_BYTES = 2 * TILE * 4  # LSE and D of a query tile
COPY_BYTES = 16  # one shared-memory access of a thread
TMEM_COLUMNS = 512
TMEM_S, TMEM_DV, TMEM_DP, TMEM_DK = 0, 128, 256, 384  # first columns; dQ lies in dP
TMEM_P, TMEM_DS = (0, 96), (256, 320)  # by half of the queries, in columns that only it reads
ARCHS = ("sm_100a", "sm_103a")  # runs natively

REDUCE, COMPUTE0, COMPUTE1 = range(0, 4), range(4, 8), range(8, 12)  # warps
MMA, LOAD, EMPTY = 12, 13, range(14, 16)  # warps
REGISTERS = {"reduce": 152, "compute": 136, "other": 88}  # by thread; 512 a thread place

ENVELOPE = Envelope(
    dtypes=("bfloat16", "float16"),
    head_dims=(64, 128),
    seqlen_multiple=128,
    grouped_heads=False,
    differentiable=False,
    lifted_by={"head_dim": 10, "seqlen": 8, "heads": 9, "strides": 10},
)


def plan(head_dim: int) -> Plan:
    """Resources of one CTA for `head_dim` (64 or 128)."""
    tile_bytes, key_tiles = TILE * head_dim * 2, KEY_TILES[head_dim]
    compute, other = REGISTERS["compute"], REGISTERS["other"]
    return Plan(
        roles=(
            Role("REDUCE", REDUCE, REGISTERS["reduce"], "adds dQ to global memory"),
            Role("COMPUTE0", COMPUTE0, compute, "P and dS of queries 0 to 63; half of dV and dK"),
            Role("COMPUTE1", COMPUTE1, compute, "P and dS of queries 64 to 127; the other half"),
            Role("MMA", range(MMA, MMA + 1), other, "issues the five products"),
            Role("LOAD", range(LOAD, LOAD + 1), other, "loads K, V, Q, dO, LSE and D by TMA"),
            Role("EMPTY", EMPTY, other, "nothing"),
        ),
        launch_registers=128,
        smem=(
            SmemBuffer("barriers", 256, align=8, holds="mbarriers, address of tensor memory"),
            SmemBuffer("sStats", STATS_BYTES, Q_STAGES[head_dim], 128, "LSE in log2 units, D"),
            SmemBuffer("sK", tile_bytes, key_tiles, 1024, "key tiles"),
            SmemBuffer("sV", tile_bytes, key_tiles, 1024, "value tiles"),
            SmemBuffer("sQ", tile_bytes, Q_STAGES[head_dim], 1024, "query tiles"),
            SmemBuffer("sdO", tile_bytes, DO_STAGES[head_dim], 1024, "tiles of dO"),
            SmemBuffer("sdS", TILE * TILE * 2, key_tiles, 1024, "dS, a row for each key"),
            SmemBuffer("sdQ", TILE * SLICE * 4, DQ_SLOTS, 1024, "slices of dQ"),
            SmemBuffer("sdV", TILE * HALF * 2, 2, 1024, "dV to store", aliases=("sdO",)),
            SmemBuffer("sdK", TILE * HALF * 2, 2, 1024, "dK to store", aliases=("sQ",)),
        ),
        tmem=(
            TmemRegion("S", TMEM_S, TILE, "scores, transposed", ("P0", "P1")),
            TmemRegion("P0", TMEM_P[0], HALF // 2, "P of queries 0 to 63, 16-bit pairs"),
            TmemRegion("P1", TMEM_P[1], HALF // 2, "P of queries 64 to 127"),
            TmemRegion("dV", TMEM_DV, key_tiles * head_dim, "dV of all key tiles"),
            TmemRegion("dP", TMEM_DP, TILE, "dP, transposed", ("dS0", "dS1", "dQ")),
            TmemRegion("dS0", TMEM_DS[0], HALF // 2, "dS of queries 0 to 63, pairs", ("dQ",)),
            TmemRegion("dS1", TMEM_DS[1], HALF // 2, "dS of queries 64 to 127", ("dQ",)),
            TmemRegion("dQ", TMEM_DP, head_dim, "dQ of these keys"),
            TmemRegion("dK", TMEM_DK, key_tiles * head_dim, "dK of all key tiles"),
        ),
        barriers=(*_copies(head_dim), *_products(), *_outputs()),
    )


def _copies(head_dim: int) -> tuple[Barrier, ...]:
    load, mma, commit = (Arrival("LOAD", "tma"),), (Arrival("MMA"),), (Arrival("MMA", "commit"),)
    compute, to_load = (Arrival("COMPUTE0"), Arrival("COMPUTE1")), (Arrival("LOAD"),)
    tile_bytes, key_bytes = TILE * head_dim * 2, KEY_TILES[head_dim] * TILE * head_dim * 2
    names = ("REDUCE", "COMPUTE0", "COMPUTE1", "MMA", "LOAD", "EMPTY")
    everyone = tuple(Arrival(name) for name in names)

    def full(name, to, guards, size, stages=1):
        return Barrier(name, load, to, guards, stages=stages, tx_bytes=size)

    def empty(name, guards, stages):
        return Barrier(name, commit, to_load, guards, stages=stages, first_wait_passes=True)

    q_stages, do_stages = Q_STAGES[head_dim], DO_STAGES[head_dim]
    return (
        Barrier(
            "start", everyone, everyone, "barriers, tensor memory are there", "named", number=0
        ),
        full("k_full", mma, "sK holds the key tiles", key_bytes),
        full("v_full", mma, "sV holds the value tiles", key_bytes),
        full(
            "q_full", mma + compute, "a query tile, LSE and D", tile_bytes + STATS_BYTES, q_stages
        ),
        empty("q_empty", "S and dK of the query tile are done", q_stages),
        full("do_full", mma, "a slot holds its tile of dO", tile_bytes, do_stages),
        empty("do_empty", "dP and dV of the tile are done", do_stages),
    )


def _products() -> tuple[Barrier, ...]:
    commit, mma, reduce = (Arrival("MMA", "commit"),), (Arrival("MMA"),), (Arrival("REDUCE"),)
    compute = (Arrival("COMPUTE0"), Arrival("COMPUTE1"))
    return (
        Barrier("s_full", commit, compute, "S is complete"),
        Barrier("p_full", compute, mma, "P is complete, S has been read"),
        Barrier("dp_full", commit, compute, "dP is complete, and so is the dQ before it"),
        Barrier("ds_full", compute, mma, "dS is complete in both memories, dP has been read"),
        Barrier("dq_full", commit, reduce, "dQ of all key tiles is complete"),
        Barrier("dq_read", reduce, mma, "dQ is in registers", first_wait_passes=True),
        Barrier(
            "dq_staged", reduce, reduce, "a slice is in sdQ, the one before left", "named", number=1
        ),
    )


def _outputs() -> tuple[Barrier, ...]:
    commit, mma = (Arrival("MMA", "commit"),), (Arrival("MMA"),)
    compute = (Arrival("COMPUTE0"), Arrival("COMPUTE1"))
    return (
        Barrier("dv_full", commit, compute, "dV includes all queries, dO is not needed any more"),
        Barrier("dk_full", commit, compute, "dK includes all queries, Q is not needed any more"),
        Barrier("dkv_read", compute, mma, "dV and dK have been read"),
        Barrier("staged", compute, compute, "both blocks are in sdV or sdK", "named", number=2),
    )


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": 128,  # at launch: 65536 / 512 threads
        "tmem_columns": TMEM_COLUMNS,
        "mma_kinds": "f16",
        "mma_ss": 2 * head_dim // 16 + TILE // 16,  # S and dP; dQ
        "mma_ts": 2 * TILE // 16,  # dV and dK
        "ex2": HALF,
        "mbarrier_waits": 17,  # one for each wait in the sources
        "mbarrier_arrives": 8,
        "commits": 7,
        "tmem_fences": 17,
        "tmem_load_waits": 8,  # S, two of dP, dQ, two each of dV and dK
        "tmem_store_waits": 2,  # P, dS
        "proxy_fences": 3 + head_dim // SLICE,  # before dQ's MMA; of dV and dK; of dQ by slices
        "init_fences": 1,
        "tmem_deallocs": 1,
        "tma_reductions": head_dim // SLICE,
        "slots_per_element": ("<=", 5.1 if head_dim == 128 else 5.5),
        "mma_warp_issue": ("<=", 400),
        "tile_cycles_smem": 3328 if head_dim == 128 else 1664,
        "tensor_ceiling": (">=", 0.76),
    }
    for head_dim in KEY_TILES
}
