# SPDX-License-Identifier: Apache-2.0
"""The backward pass in a pair of CTAs: each product is one MMA of both, half of dS is swapped.

Each CTA has a key tile of its own, half of every operand B, and half of the rows of dQ. Data only;
runs: host.
"""

from ...common.plan import Arrival, Barrier, Envelope, Plan, Role, SmemBuffer, TmemRegion

NAME = "backward, a pair of CTAs"
IDEA = "Two CTAs share every operand B, and swap half of dS: each adds half as much dQ."

TILE = 128  # rows of a query tile and of a key tile; a key is a lane of tensor memory
CTAS = 2  # of a cluster: the leader, rank 0, issues the MMAs of both
KEY_TILES = {64: 1, 128: 1}  # of a CTA, by head dim; 64 for the model alone
STATS_STAGES = 2  # slots of the ring of LSE and D
HALF = 64  # half of a query tile, of the columns: what a CTA has of them, or a warpgroup
CHUNK = 32  # columns of tensor memory that one load or store moves
SLICE = 32  # columns of dQ, in each half of the lanes, that are staged together
STATS_BYTES = 2 * TILE * 4  # LSE and D of a query tile
COPY_BYTES = 16  # one shared-memory access of a thread
TMEM_COLUMNS = 512
TMEM_S, TMEM_DV, TMEM_DP, TMEM_DK = 0, 128, 256, 384  # first columns
TMEM_P, TMEM_DS = (0, 96), (256, 320)  # by half of the queries, in columns that only it reads
TMEM_DQ = 32  # between P of the halves, in what was S
ARCHS = ("sm_100a", "sm_103a")  # runs natively

REDUCE, COMPUTE0, COMPUTE1 = range(0, 4), range(4, 8), range(8, 12)  # warps
MMA, LOAD, RELAY, EMPTY = 12, 13, 14, 15  # warps
REGISTERS = {"reduce": 96, "compute": 152, "other": 112}  # by thread; 512 a thread place

ENVELOPE = Envelope(
    dtypes=("bfloat16", "float16"),
    head_dims=(128,),
    seqlen_multiple=1,
    masks=True,
    grouped_heads=False,
    differentiable=False,
    lifted_by={"head_dim": 10, "seqlen": 8, "heads": 9, "strides": 10},
)


def plan(head_dim: int) -> Plan:
    """Resources of one CTA of the pair for `head_dim` (128; 64 for the model alone)."""
    tile_bytes, half_bytes = TILE * head_dim * 2, TILE * head_dim * 2 // CTAS
    compute, other = REGISTERS["compute"], REGISTERS["other"]
    return Plan(
        roles=(
            Role("REDUCE", REDUCE, REGISTERS["reduce"], "adds half of dQ to global memory"),
            Role("COMPUTE0", COMPUTE0, compute, "P, dS of this CTA's rows of dQ; half of dV, dK"),
            Role("COMPUTE1", COMPUTE1, compute, "P, dS of the peer's rows of dQ; the other half"),
            Role("MMA", range(MMA, MMA + 1), other, "in the leader issues the five products"),
            Role("LOAD", range(LOAD, LOAD + 1), other, "loads this CTA's tiles and halves by TMA"),
            Role("RELAY", range(RELAY, RELAY + 1), other, "copies half of dS to the peer"),
            Role("EMPTY", range(EMPTY, EMPTY + 1), other, "nothing"),
        ),
        launch_registers=128,
        smem=(
            SmemBuffer("barriers", 256, align=8, holds="mbarriers, address of tensor memory"),
            SmemBuffer("sStats", STATS_BYTES, STATS_STAGES, 128, "LSE in log2 units, D"),
            SmemBuffer("sK", tile_bytes, 1, 1024, "this CTA's key tile"),
            SmemBuffer("sV", tile_bytes, 1, 1024, "this CTA's value tile"),
            SmemBuffer("sKt", tile_bytes, 1, 1024, "half of the columns of both key tiles"),
            SmemBuffer("sQ", half_bytes, 1, 1024, "half of the rows of a query tile"),
            SmemBuffer("sQt", half_bytes, 1, 1024, "half of its columns"),
            SmemBuffer("sdO", half_bytes, 1, 1024, "half of the rows of a tile of dO"),
            SmemBuffer("sdOt", half_bytes, 1, 1024, "half of its columns"),
            SmemBuffer("sdS", CTAS * TILE * HALF * 2, 1, 1024, "dS of both CTAs' keys"),
            SmemBuffer("sdX", TILE * HALF * 2, 1, 1024, "dS that goes to the peer"),
            SmemBuffer("sdQ", TILE * SLICE * 4, 1, 1024, "slices of dQ, a row for each lane"),
            SmemBuffer("sdV", TILE * head_dim, 2, 1024, "dV to store", aliases=("sdO", "sdOt")),
            SmemBuffer("sdK", TILE * head_dim, 2, 1024, "dK to store", aliases=("sQ", "sQt")),
        ),
        tmem=(
            TmemRegion("S", TMEM_S, TILE, "scores, transposed", ("P0", "P1", "dQ")),
            TmemRegion("P0", TMEM_P[0], HALF // 2, "P of queries 0 to 63, 16-bit pairs"),
            TmemRegion("dQ", TMEM_DQ, head_dim // 2, "dQ of both key tiles, half in each half"),
            TmemRegion("P1", TMEM_P[1], HALF // 2, "P of queries 64 to 127"),
            TmemRegion("dV", TMEM_DV, head_dim, "dV"),
            TmemRegion("dP", TMEM_DP, TILE, "dP, transposed", ("dS0", "dS1")),
            TmemRegion("dS0", TMEM_DS[0], HALF // 2, "dS of queries 0 to 63, pairs"),
            TmemRegion("dS1", TMEM_DS[1], HALF // 2, "dS of queries 64 to 127"),
            TmemRegion("dK", TMEM_DK, head_dim, "dK"),
        ),
        barriers=(*_copies(head_dim), *_products(), *_exchange(), *_outputs()),
    )


def _copies(head_dim: int) -> tuple[Barrier, ...]:
    load, mma, commit = (Arrival("LOAD", "tma"),), (Arrival("MMA"),), (Arrival("MMA", "commit"),)
    compute, to_load = (Arrival("COMPUTE0"), Arrival("COMPUTE1")), (Arrival("LOAD"),)
    names = ("REDUCE", "COMPUTE0", "COMPUTE1", "MMA", "LOAD", "RELAY", "EMPTY")
    everyone = tuple(Arrival(name) for name in names)
    tile_bytes = TILE * head_dim * 2  # a tile of one CTA, or the halves of both

    def full(name, guards, size, to=mma, stages=1):
        return Barrier(name, load, to, guards, stages=stages, tx_bytes=size)

    def empty(name, guards):
        return Barrier(name, commit, to_load, guards, first_wait_passes=True)

    return (
        Barrier("start", everyone, everyone, "barriers, tensor memory are there", "cluster"),
        full("k_full", "sK of both CTAs holds the key tile", CTAS * tile_bytes),
        full("v_full", "sV of both CTAs holds the value tile", CTAS * tile_bytes),
        full("kt_full", "sKt of both CTAs holds half of the columns", CTAS * tile_bytes),
        full("q_full", "both halves of a query tile's rows", tile_bytes),
        empty("q_empty", "S of the query tile is done"),
        full("qt_full", "both halves of its columns", tile_bytes),
        empty("qt_empty", "dK of the query tile is done"),
        full("stats_full", "LSE and D of a query tile", STATS_BYTES, compute, STATS_STAGES),
        full("do_full", "both halves of the rows of a tile of dO", tile_bytes),
        empty("do_empty", "dP of the tile is done"),
        full("dot_full", "both halves of its columns", tile_bytes),
        empty("dot_empty", "dV of the tile is done"),
    )


def _products() -> tuple[Barrier, ...]:
    commit, mma, reduce = (Arrival("MMA", "commit"),), (Arrival("MMA"),), (Arrival("REDUCE"),)
    compute = (Arrival("COMPUTE0"), Arrival("COMPUTE1"))
    all_compute = (Arrival("COMPUTE0", "warp", CTAS), Arrival("COMPUTE1", "warp", CTAS))
    all_reduce = (Arrival("REDUCE", "warp", CTAS),)
    return (
        Barrier("s_full", commit, compute, "S is complete"),
        Barrier("s_read", all_compute, mma, "S is in registers: dQ may overwrite it"),
        Barrier("p_full", all_compute, mma, "P is complete"),
        Barrier("dp_full", commit, compute, "dP is complete"),
        Barrier("ds_full", all_compute, mma, "dS is complete but for the copies, dP has been read"),
        Barrier(
            "dq_full",
            commit,
            (*reduce, *compute),
            "dQ is complete, for REDUCE; sdS and sdX are free, for COMPUTE",
            first_wait_passes=("COMPUTE0", "COMPUTE1"),
        ),
        Barrier("dq_read", all_reduce, mma, "dQ is in registers"),
        Barrier(
            "dq_slot", reduce, reduce, "twice a slice: sdQ is free; sdQ holds it", "named", number=1
        ),
    )


def _exchange() -> tuple[Barrier, ...]:
    relay, one = (Arrival("RELAY"),), (Arrival("RELAY", "one", ctas=CTAS),)
    copy, give = (Arrival("RELAY", "tma"),), (Arrival("COMPUTE1"),)
    return (
        Barrier("dx_staged", give, relay, "sdX holds dS for the peer"),
        Barrier("dx_full", copy, relay, "the peer's dS is in sdS", tx_bytes=TILE * HALF * 2),
        Barrier("dx_both", one, (Arrival("MMA"),), "sdS of both CTAs holds all of it"),
    )


def _outputs() -> tuple[Barrier, ...]:
    commit, compute = (Arrival("MMA", "commit"),), (Arrival("COMPUTE0"), Arrival("COMPUTE1"))
    names = ("REDUCE", "COMPUTE0", "COMPUTE1", "MMA", "LOAD", "RELAY", "EMPTY")
    everyone = tuple(Arrival(name) for name in names)
    return (
        Barrier("dv_full", commit, compute, "dV includes all queries, dO is not needed any more"),
        Barrier("dk_full", commit, compute, "dK includes all queries, Q is not needed any more"),
        Barrier("staged", compute, compute, "both blocks are in sdV or sdK", "named", number=2),
        Barrier("end", everyone, everyone, "tensor memory was read, both may leave", "cluster"),
    )


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": 128,  # at launch: 65536 / 512 threads
        "tmem_columns": TMEM_COLUMNS,
        "mma_kinds": "f16",
        "mma_ss": 2 * head_dim // 16 + CTAS * TILE // 16,  # S and dP; dQ
        "mma_ts": 2 * TILE // 16,  # dV and dK
        "ex2": 3 * HALF,  # COMPUTE's loop three times: with a mask, without, with
        "mbarrier_waits": 37,  # one for each wait in the sources, unrolled
        "mbarrier_arrives": 23,
        "commits": 9,
        "tmem_fences": 29,
        "tmem_load_waits": 3 * 3 + 5,  # S, two of dP; dQ, two each of dV and dK
        "tmem_store_waits": 3 * 2,  # P, dS
        "proxy_fences": 3 + 4,  # of dS; of dV and dK; of dQ by slices
        "init_fences": 1,
        "tmem_deallocs": 1,
        "tma_reductions": head_dim // SLICE,
        "dsmem_copies": 1,
        "slots_per_element": ("<=", 5.4),
        "mma_warp_issue": ("<=", 700),  # descriptors made in the loop; 562 in stage 07
        "tile_cycles_smem": 2304,  # and 256 for the copy to the peer between the CTAs
        "tensor_ceiling": (">=", 0.99),
    }
    for head_dim in ENVELOPE.head_dims
}
