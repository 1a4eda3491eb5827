# SPDX-License-Identifier: Apache-2.0
"""From counted SASS to cycles per tile: a replay of one loop and a lower bound by resource.

All results are derived, none is a run time. They are lower bounds: every wait succeeds at its first
try, resources overlap perfectly, shared memory has no bank conflicts, the tensor core runs at its
full rate. Not counted: filling shared memory by TMA, LDS, exchange between SMs, generic global
stores. The replay adds latencies, which are assumed (``LATENCY``).
"""

import collections
import re
from dataclasses import dataclass, field

from .sass_isa import (
    RATES,
    SUB_PARTITIONS,
    Mma,
    classify,
    count,
    exp2_split,
    is_tensor_memory_mma,
    mma_list,
    pipe_cycles,
    pipe_of,
    shared_bytes,
    tmem_registers,
)
from .sass_loops import Kernel, Loop, inclusive

# Assumed cycles from issue to result, by class; LDTM and STTM take one more per column.
LATENCY = {
    "EX2": 22,
    "MUFU": 22,
    "LDTM": 40,
    "STTM": 24,
    "SYNCS": 20,
    "LDS": 28,
    "STS": 12,
    "SHFL": 24,
    "UNI": 12,
    "GMEM": 400,
    "CTRL": 12,
}
_OTHER_LATENCY = 16
_SOURCES_READ = 12  # assumed cycles until the sources of an instruction may be overwritten
_MAX_LEAD = 2  # whole iterations that greedy issue may put one warp ahead of another
_MMA_DEPTH = 16  # K of a kind::f16 MMA
_LANES = 128  # of tensor memory; 4 bytes each per column


@dataclass(frozen=True)
class Tile:
    """One CTA's share of scores: `m` queries x `n` keys, head dimensions of Q/K and of V.

    ``kind`` is "fwd", "bwd" or "auto"; ``trips`` is how often MMA loops inside the MMA main loop
    run (0: as often as one tile's FLOP need); ``key_tiles`` of a CTA share one sum for dQ.
    """

    m: int = 128
    n: int = 128
    d_qk: int = 128
    d_v: int = 128
    kind: str = "auto"
    trips: int = 0
    key_tiles: int = 1


@dataclass(frozen=True)
class MmaUse:
    """The MMA loop: what one iteration issues and how many tiles of scores that makes.

    ``shapes`` counts MMAs by shape, source of A and pairing; ``guessed`` of them had a descriptor
    that could not be followed and took the tile's shape. ``shared_bytes`` per tile and SM.
    """

    per_iteration: int
    shapes: dict[str, int]
    tiles_per_iteration: float | None
    inner_trips: int | None
    guessed: int
    shared_bytes: float


@dataclass(frozen=True)
class TileModel:
    """Per-SM cycles for one tile of scores, and what they follow from.

    ``cycles`` by resource, per sub-partition for issue, MUFU, FMA and ALU, per SM for tensor and
    smem. ``ceiling`` is tensor cycles over those of the bounding resource. ``replay_one_warp`` is
    the latency of one warp's iteration of the softmax loop, ``replay_two_warps`` cycles per tile
    with two warps on a sub-partition, ``p_latency`` cycles from the first load of S to the store of
    three quarters and of all of P (None in the backward). Bytes are per tile and SM.
    """

    kind: str
    elements_per_thread: int
    exp2_hardware: int
    exp2_emulated: int
    slots_per_element: float
    slots_per_element_always: float
    live_registers: int
    mma: MmaUse | None
    tmem_load_bytes: float
    tmem_store_bytes: float
    lds_bytes: float
    load_loop_instructions: int | None
    replay_one_warp: float
    replay_two_warps: float
    p_latency: tuple[int, int] | None
    stall_sum: int
    cycles: dict[str, float] = field(default_factory=dict)
    bound_by: str = ""
    floor_cycles: float = 0.0
    ceiling: float = 0.0


def replay(instructions, warps: int, iterations: int = 10, phases: int = 8) -> float:
    """Return cycles per warp-iteration of a loop, issued in order with ptxas' scheduling fields.

    `warps` share one sub-partition, in steady state. With more than one the result depends on how
    they start, so it is the median over `phases` offsets. mbarriers never block.
    """
    if not instructions:
        return 0.0
    if warps == 1:
        return _replay(instructions, 1, iterations, 0)
    span = sum(i.stall for i in instructions)
    runs = sorted(
        _replay(instructions, warps, iterations, span * k // phases) for k in range(phases)
    )
    return (runs[(phases - 1) // 2] + runs[phases // 2]) / 2


def _step_of(instruction) -> tuple:
    """(stall, board written, board read, boards waited for, pipe, cycles on it, latency)."""
    name, kind = classify(instruction.opcode)
    latency = LATENCY.get(name, _OTHER_LATENCY)
    if name in ("LDTM", "STTM"):
        latency += tmem_registers([instruction], name)
    boards = [b for b in range(6) if instruction.wait_mask >> b & 1]
    busy = RATES[kind].value if kind else 0
    pipe = pipe_of(instruction.opcode)
    return (
        instruction.stall or 1,
        instruction.write_board,
        instruction.read_board,
        boards,
        pipe,
        busy,
        latency,
    )


def _replay(instructions, warps: int, iterations: int, offset: int) -> float:
    program = [_step_of(i) for i in instructions]
    position, ready = [0] * warps, [w * offset for w in range(warps)]
    done = [[0] * 6 for _ in range(warps)]
    ends: list[list[int]] = [[] for _ in range(warps)]
    free: dict[str, int] = collections.defaultdict(int)
    now, last = 0, 0
    while min(len(e) for e in ends) < iterations:
        chosen, earliest = None, None
        slowest = min(len(e) for e in ends)
        for warp in ((last + k) % warps for k in range(warps)):  # greedy: stay on the last warp
            if len(ends[warp]) > slowest + _MAX_LEAD:
                continue
            _, _, _, boards, pipe, _, _ = program[position[warp]]
            at = max(ready[warp], *(done[warp][b] for b in boards), free[pipe] if pipe else 0, 0)
            if at <= now:
                chosen = warp
                break
            earliest = at if earliest is None else min(earliest, at)
        if chosen is None:
            now = earliest
            continue
        last = chosen
        stall, written, read, _, pipe, busy, latency = program[position[chosen]]
        if pipe:
            free[pipe] = now + busy
        if written < 6:
            done[chosen][written] = max(done[chosen][written], now + latency)
        if read < 6:
            done[chosen][read] = max(done[chosen][read], now + min(latency, _SOURCES_READ))
        ready[chosen] = now + stall
        position[chosen] += 1
        if position[chosen] == len(program):
            position[chosen] = 0
            ends[chosen].append(now)
        now += 1
    span = max(e[iterations - 1] for e in ends) - max(e[1] for e in ends)
    return span / (iterations - 2) / warps


def steady_loop(kernel: Kernel, role: str) -> Loop | None:
    """Return the loop in which a role spends its time, None if the kernel lacks the role."""
    loops = [loop for loop in kernel.loops if loop.role == role]
    if not loops:
        return None
    if role in ("softmax", "mainloop"):
        inner = [loop for loop in loops if loop.innermost and loop.counts["F2FP"]] or loops
        exponentials = lambda loop: max(1, sum(exp2_split(loop.instructions)))
        return min(inner, key=lambda loop: len(loop.instructions) / exponentials(loop))
    if role == "mma":
        return _mma_loop(loops)
    inner = [loop for loop in loops if loop.innermost] or loops
    return max(inner, key=lambda loop: len(loop.instructions))


def _mma_loop(loops: list[Loop]) -> Loop:
    """Most MMAs that run on every iteration, the inner loop on a tie; or the loop around it, where
    that has more of its own, some of them behind branches."""
    found = max(loops, key=lambda loop: (count(loop.always)["MMA"], loop.depth))
    around = [loop for loop in loops if loop.natural is found.natural.parent]
    return next((loop for loop in around if loop.counts["MMA"] > found.counts["MMA"]), found)


def softmax_loop(kernel: Kernel) -> Loop | None:
    """Return the loop with the exponentials, whether or not the same warps issue the MMAs."""
    return steady_loop(kernel, "softmax") or steady_loop(kernel, "mainloop")


def p_latency(loop: Loop) -> tuple[int, int] | None:
    """Replayed cycles of one warp from its first load of S to 3/4 and to all of P stored.

    None for a loop that stores nothing to tensor memory.
    """
    instructions = loop.instructions
    start = next((at for at, i in enumerate(instructions) if i.opcode.startswith("LDTM")), 0)
    stores = [
        (at, tmem_registers([i], "STTM"))
        for at, i in enumerate(instructions)
        if i.opcode.startswith("STTM")
    ]
    total, stored, latencies = sum(size for _, size in stores), 0, []
    for at, size in stores:
        if stored < 0.75 * total <= stored + size or stored + size == total:
            latencies.append(round(replay(instructions[start : at + 1], 1)))
        stored += size
    return (latencies[0], latencies[-1]) if latencies else None


def mma_flop(mmas: list[Mma]) -> float:
    """Return FLOP on one SM; two SMs share an MMA that is issued for a CTA pair."""
    return sum(2 * x.m * x.n * _MMA_DEPTH / (2 if x.pair else 1) for x in mmas if x.m)


def mma_shared_bytes(mmas: list[Mma]) -> float:
    """Return bytes one SM reads from shared memory: A unless in TMEM, and B (a pair: half)."""
    row = 2 * _MMA_DEPTH
    return sum(
        (0 if x.a_in_tmem else x.m / (2 if x.pair else 1) * row) + x.n / (2 if x.pair else 1) * row
        for x in mmas
        if x.m
    )


def tile_model(kernel: Kernel, tile: Tile) -> TileModel | None:
    """Return the per-tile model of a tcgen05 attention kernel, None if it has no such loop.

    Raises ValueError for a `tile.kind` other than "auto", "fwd" and "bwd".
    """
    if tile.kind not in ("auto", "fwd", "bwd"):
        raise ValueError(f"kind must be 'auto', 'fwd' or 'bwd', not {tile.kind!r}")
    loop = softmax_loop(kernel)
    if loop is None or not any(is_tensor_memory_mma(i) for i in kernel.instructions):
        return None
    return _Builder(kernel, tile, loop).build()


class _Builder:
    """Collects cycles and bytes of one tile."""

    def __init__(self, kernel: Kernel, tile: Tile, loop: Loop):
        self.kernel, self.tile, self.loop = kernel, tile, loop
        self.hardware, self.emulated = exp2_split(loop.instructions)
        self.loaded = tmem_registers(loop.instructions, "LDTM")
        self.backward = tile.kind == "bwd" or (tile.kind == "auto" and self._looks_backward())
        self.elements = self.hardware + self.emulated
        if not self.backward and loop.counts["F2FP"]:
            self.elements = 2 * loop.counts["F2FP"]  # each P is packed once; row scales are not P
        # softmax warp-iterations per sub-partition and tile
        self.iterations = tile.m * tile.n / (32 * self.elements) / SUB_PARTITIONS
        self.pair = any(
            is_tensor_memory_mma(i) and ".2CTA" in i.opcode for i in kernel.instructions
        )
        self.cycles: dict[str, float] = {}
        self.shared = self.tmem_loads = self.tmem_stores = 0.0

    def _looks_backward(self) -> bool:
        """The backward loads S and dP, packs P and dS, and has no correction loop."""
        exponentials = self.hardware + self.emulated
        corrects = any(loop.role == "correction" for loop in self.kernel.loops)
        packs = self.loop.counts["F2FP"] > 0.75 * exponentials
        return not corrects and packs and self.loaded > 1.5 * exponentials

    def build(self) -> TileModel:
        self._softmax()
        least, most = self._rescale()
        flop = self._flop()
        self.cycles["tensor"] = flop / RATES["tensor"].value
        mma = self._mma(flop)
        self.cycles["smem"] = self.shared / RATES["shared"].value
        issue = self.cycles["softmax_issue"]
        self.cycles["issue_all_min"], self.cycles["issue_all_max"] = issue + least, issue + most
        bound = {name: self.cycles[f"softmax_{name}"] for name in ("mufu", "fma", "alu")}
        bound = {"tensor": self.cycles["tensor"], "mufu": bound.pop("mufu")} | {
            "issue": self.cycles["issue_all_min"],
            **bound,
            "smem": self.cycles["smem"],
        }
        loop, load = self.loop, steady_loop(self.kernel, "load")
        lds = shared_bytes(loop.instructions, "LDS") * self.iterations * SUB_PARTITIONS
        return TileModel(
            kind="bwd" if self.backward else "fwd",
            elements_per_thread=self.elements,
            exp2_hardware=self.hardware,
            exp2_emulated=self.emulated,
            slots_per_element=len(loop.instructions) / self.elements,
            slots_per_element_always=len(loop.always) / self.elements,
            live_registers=loop.live_registers[0],
            mma=mma,
            tmem_load_bytes=self.tmem_loads,
            tmem_store_bytes=self.tmem_stores,
            lds_bytes=lds,
            load_loop_instructions=len(load.instructions) if load else None,
            replay_one_warp=round(replay(loop.instructions, 1), 1),
            replay_two_warps=round(replay(loop.instructions, 2) * self.iterations, 1),
            p_latency=None if self.backward else p_latency(self.loop),
            stall_sum=sum(i.stall for i in loop.instructions),
            cycles={name: round(value, 1) for name, value in self.cycles.items()},
            bound_by=max(bound, key=bound.get),
            floor_cycles=round(max(bound.values()), 1),
            ceiling=round(self.cycles["tensor"] / max(bound.values()), 3),
        )

    def _flop(self) -> int:
        """FLOP of a tile: QK and PV, or the five products of the backward."""
        tile = self.tile
        width = (3 * tile.d_qk + 2 * tile.d_v) if self.backward else (tile.d_qk + tile.d_v)
        return 2 * tile.m * tile.n * width

    def _softmax(self):
        pipes = pipe_cycles(self.loop.instructions)
        for name in ("issue", "mufu", "fma", "alu"):
            self.cycles[f"softmax_{name}"] = pipes[name] * self.iterations
        warps = self.iterations * SUB_PARTITIONS
        self.shared = shared_bytes(self.loop.instructions, "STS") * warps
        self.tmem_loads = self.loaded * warps * _LANES
        self.tmem_stores = tmem_registers(self.loop.instructions, "STTM") * warps * _LANES

    def _rescale(self) -> tuple[float, float]:
        """Issue slots per tile of the correction loop, or of the loop that reduces dQ."""
        role = "dq-reduce" if self.backward else "correction"
        width = self.tile.d_qk if self.backward else self.tile.d_v
        loop = steady_loop(self.kernel, role)
        if loop is None:
            return 0.0, 0.0
        whole = inclusive(self.kernel, loop, 1)
        moved = tmem_registers(whole, "LDTM")
        iterations = self.tile.m * width / (32 * moved) / SUB_PARTITIONS
        if self.backward:  # the pair's MMA sums dQ over its keys; each SM reduces half
            iterations /= 2 if self.pair else self.tile.key_tiles
        most = len(whole) * iterations
        least = most if self.backward else len(loop.always) * iterations
        self.cycles[f"{role}_issue_max"], self.cycles[f"{role}_issue_min"] = most, least
        if self.backward:
            warps = iterations * SUB_PARTITIONS
            self.shared += 2 * shared_bytes(whole, "STS") * warps  # stored, then read by bulk copy
            self.tmem_loads += moved * warps * _LANES
        return least, most

    def _shapes(self, instructions) -> list[Mma]:
        """MMAs of a loop, with shapes that could not be followed filled in from the tile.

        A product starts at an MMA whose accumulate predicate is not constant true; a reduction over
        the head dimension makes scores, any other makes a head dimension.
        """
        mmas = [i for i in instructions if is_tensor_memory_mma(i)]
        starts = [at for at, i in enumerate(mmas) if not re.search(r", UPT$", i.arguments)]
        starts.append(len(mmas))
        shaped = []
        for at, mma in enumerate(mma_list(self.kernel.instructions, instructions)):
            if mma.m is None:
                first = max((s for s in starts if s <= at), default=0)
                depth = _MMA_DEPTH * (min(s for s in starts if s > at) - first)
                scores = depth in (self.tile.d_qk, self.tile.d_v) and not mma.a_in_tmem
                width = self.tile.d_v if mma.a_in_tmem else self.tile.d_qk
                mma = mma._replace(
                    m=self.tile.m * (2 if self.pair else 1), n=self.tile.n if scores else width
                )
            shaped.append(mma)
        return shaped

    def _mma(self, flop: int) -> MmaUse | None:
        loop = steady_loop(self.kernel, "mma")
        if loop is None and self.loop.role == "mainloop":
            loop = self.loop
        if loop is None:
            return None
        inner = [q for q in self.kernel.loops if q.natural.parent is loop.natural]
        nested = [i for q in inner for i in q.instructions]
        own_mmas, nested_mmas = self._shapes(loop.instructions), self._shapes(nested)
        trips = self.tile.trips or 1
        if not self.tile.trips and mma_flop(nested_mmas):
            trips = max(1, round((flop - mma_flop(own_mmas)) / mma_flop(nested_mmas)))
        mmas = own_mmas + nested_mmas * trips
        scale = flop / mma_flop(mmas) if mma_flop(mmas) else 0
        self.cycles["mma_warp_issue"] = (len(loop.instructions) + len(nested) * trips) * scale
        self.shared += mma_shared_bytes(mmas) * scale
        unknown = mma_list(self.kernel.instructions, loop.instructions)
        return MmaUse(
            per_iteration=len(mmas),
            shapes=dict(collections.Counter(str(x) for x in mmas)),
            tiles_per_iteration=round(1 / scale, 3) if scale else None,
            inner_trips=trips if nested_mmas else None,
            guessed=sum(1 for x in unknown if not x.m),
            shared_bytes=mma_shared_bytes(mmas) * scale,
        )
