# SPDX-License-Identifier: Apache-2.0
"""Stage 05 = stage 04 + exponentials on the FMA units: the MUFU is no longer alone.

Some of a row's exponentials are polynomials; P is handed over in two parts. Data only; runs: host.
"""

from ..common.plan import Arrival, Barrier, Envelope, Plan, Role, SmemBuffer, TmemRegion

NAME = "Cody-Waite exp2"
IDEA = "FMA units compute a part of the exponentials; PV starts on the first part of P."

TILE_M = 128  # query rows of a tile, one per thread of its softmax warpgroup
Q_TILES = 2  # query tiles of a CTA
TILE_N = {64: 128, 128: 128}  # keys of a tile by head dim
KV_STAGES = {64: 6, 128: 3}  # slots of the ring that K and V share
CHUNK = 32  # columns of tensor memory that one load or store moves
EMULATED = {64: (6, 6, 6, 5), 128: (0, 4, 3, 7)}  # of each CHUNK, pairs on the FMA units
P_FIRST = 3  # CHUNKs of P that are handed over first
FLOOR = 1.5 * 2.0**23  # added to |x| < 2**22, rounded down: leaves floor(x) in the low bits
SMALLEST = -127.0  # 2**x is 0 from here on
POLYNOMIAL = tuple(  # 2**f on [0, 1], lowest power first: common.minimax.coefficients(3)
    map(float.fromhex, ("0x1p+0", "0x1.63e658p-1", "0x1.d2379p-3", "0x1.3baaa6p-4"))
)
COPY_BYTES = 16  # one shared-memory store of a thread
TMEM_COLUMNS = 512
TMEM_S, TMEM_P, TMEM_O = (0, 128), (64, 192), (256, 384)  # first columns by query tile
ARCHS = ("sm_100a", "sm_103a")  # runs natively

SOFTMAX0, SOFTMAX1, CORRECTION = range(0, 4), range(4, 8), range(8, 12)  # warps
MMA, EPILOGUE, LOAD, EMPTY = 12, 13, 14, 15  # warps
REGISTERS = {"softmax": 192, "correction": 80, "other": 48}  # by thread; 512 a thread place

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
        roles=(
            Role("SOFTMAX0", SOFTMAX0, REGISTERS["softmax"], "softmax of query tile 0"),
            Role("SOFTMAX1", SOFTMAX1, REGISTERS["softmax"], "softmax of query tile 1"),
            Role("CORRECTION", CORRECTION, REGISTERS["correction"], "rescales, normalises O; LSE"),
            Role("MMA", range(MMA, MMA + 1), REGISTERS["other"], "issues QK and PV"),
            Role("EPILOGUE", range(EPILOGUE, EPILOGUE + 1), REGISTERS["other"], "stores O by TMA"),
            Role("LOAD", range(LOAD, LOAD + 1), REGISTERS["other"], "loads Q, K, V by TMA"),
            Role("EMPTY", range(EMPTY, EMPTY + 1), REGISTERS["other"], "nothing"),
        ),
        launch_registers=128,
        smem=(
            SmemBuffer("barriers", 256, align=8, holds="mbarriers, address of tensor memory"),
            SmemBuffer("sStats", Q_TILES * TILE_M * 2 * 4, align=128, holds="scale or sum; max"),
            SmemBuffer("sQ", TILE_M * head_dim * 2, Q_TILES, 1024, "query tiles"),
            SmemBuffer("sKV", tile_n * head_dim * 2, KV_STAGES[head_dim], 1024, "K, V in turn"),
            SmemBuffer("sO", TILE_M * head_dim * 2, Q_TILES, 1024, "output tiles"),
        ),
        tmem=tuple(
            region
            for tile in range(Q_TILES)
            for region in (
                TmemRegion(f"S{tile}", TMEM_S[tile], tile_n, "scores", (f"P{tile}",)),
                TmemRegion(f"P{tile}", TMEM_P[tile], tile_n // 2, "probabilities, 16-bit pairs"),
                TmemRegion(f"O{tile}", TMEM_O[tile], head_dim, "unnormalised output"),
            )
        ),
        barriers=(
            *_ring(head_dim),
            *(row for tile in range(Q_TILES) for row in _tile(tile, head_dim)),
        ),
    )


def _ring(head_dim: int) -> tuple[Barrier, ...]:
    slot_bytes, stages = TILE_N[head_dim] * head_dim * 2, KV_STAGES[head_dim]
    everyone = tuple(
        Arrival(name)
        for name in ("SOFTMAX0", "SOFTMAX1", "CORRECTION", "MMA", "EPILOGUE", "LOAD", "EMPTY")
    )
    load, mma = (Arrival("LOAD", "tma"),), (Arrival("MMA", "commit"),)
    return (
        Barrier(
            "start", everyone, everyone, "barriers, tensor memory are there", "named", number=0
        ),
        Barrier(
            "kv_full",
            load,
            (Arrival("MMA"),),
            "a slot holds its tile of K or V",
            stages=stages,
            tx_bytes=slot_bytes,
        ),
        Barrier(
            "kv_empty",
            mma,
            (Arrival("LOAD"),),
            "the MMAs that read the slot are done",
            stages=stages,
            first_wait_passes=True,
        ),
    )


def _tile(tile: int, head_dim: int) -> tuple[Barrier, ...]:
    softmax, correction = (Arrival(f"SOFTMAX{tile}"),), (Arrival("CORRECTION"),)
    load, commit, mma = (Arrival("LOAD", "tma"),), (Arrival("MMA", "commit"),), (Arrival("MMA"),)
    store = (Arrival("EPILOGUE"), Arrival("MMA"))
    tile_bytes = TILE_M * head_dim * 2
    return (
        Barrier(f"q_full{tile}", load, mma, "sQ holds the query tile", tx_bytes=tile_bytes),
        Barrier(f"s_full{tile}", commit, softmax, "S is complete, and so is the PV before it"),
        Barrier(f"p_full{tile}", softmax, mma, "the first part of P is there, S has been read"),
        Barrier(f"p_rest{tile}", softmax, mma, "P is complete"),
        Barrier(f"o_rescaled{tile}", correction, mma, "O has this key tile's reference point"),
        Barrier(f"stats_full{tile}", softmax, correction, "sStats: acc_scale; at the end sum, max"),
        Barrier(
            f"stats_empty{tile}", correction, softmax, "sStats was read", first_wait_passes=True
        ),
        Barrier(f"o_full{tile}", commit, correction, "O includes all keys"),
        Barrier(f"o_staged{tile}", correction, store, "sO holds the output; O was read"),
    )


# What the compiled code must show, by head dim. Names: common.facts.FACT_NAMES.
DECLARED = {
    head_dim: {
        "registers": 128,  # at launch: 65536 / 512 threads
        "tmem_columns": TMEM_COLUMNS,
        "mma_kinds": "f16",
        "mma_ss": 4 * head_dim // 16,  # QK of two tiles, first and in the loop
        "mma_ts": 4 * tile_n // 16,  # PV of two tiles, in the loop and last
        "ex2": 2 * (tile_n + 1 - 2 * sum(EMULATED[head_dim])),  # two softmax warpgroups
        "max": 2 * (tile_n + 2 * sum(EMULATED[head_dim])),  # row maxima; clamps
        "floor_adds": 4 * sum(EMULATED[head_dim]),
        "mbarrier_waits": 41,  # one for each wait in the sources, unrolled by tile
        "mbarrier_arrives": 30,
        "commits": 9,
        "tmem_fences": 35,
        "tmem_load_waits": 2 * (1 + head_dim // 8),  # S; O: rescaling three times, end
        "tmem_store_waits": 10,  # both parts of P; O of two tiles, three times
        "proxy_fences": 2,  # before the stores of O
        "init_fences": 1,
        "tmem_deallocs": 1,
        "slots_per_element": ("<=", 4.3 if head_dim == 128 else 4.8),
        "tile_cycles_mufu": ("<=", 808 if head_dim == 128 else 664),
        "mma_warp_issue": ("<=", 250),
        "correction_issue": ("<=", 95),
        "tile_cycles_smem": ("<=", 772),
        "tensor_ceiling": (">=", 0.99 if head_dim == 128 else 0.76),
    }
    for head_dim, tile_n in TILE_N.items()
}
