# SPDX-License-Identifier: Apache-2.0
"""A stage's resources as data: warp roles, barriers, tensor memory, shared memory, envelope.

`config.py` of a stage builds a `Plan` from these dataclasses. `Plan.check` finds on the host what
would hang or fault on the device, arrival counts are derived from the roles instead of being typed
twice, the pages render the same tables, and the compiled code is compared with them
(`common.facts`). Runs: host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

THREADS_PER_WARP = 32
WARPS_PER_WARPGROUP = 4
REGISTERS_PER_SM = 65536
MAX_THREADS_PER_CTA = 1024
MAX_SMEM_BYTES = 232448  # shared memory one CTA can have on sm_90 and sm_100 (227 KiB)
TMEM_COLUMNS = 512  # tensor memory of one SM: 128 lanes x 512 columns x 4 bytes
NAMED_BARRIERS = 16  # per CTA; number 0 is the one of a plain __syncthreads
MBARRIER_BYTES = 8
ALIGNMENTS = (8, 16, 32, 64, 128, 256, 512, 1024)


class PlanError(ValueError):
    """A plan that cannot work on the device; the message names the resource and the two sides."""


@dataclass(frozen=True)
class Role:
    """What a range of warps does. `registers` is its setmaxnreg budget (None: as launched)."""

    name: str
    warps: range
    registers: int | None = None
    does: str = ""

    @property
    def threads(self) -> int:
        """Threads of the role."""
        return len(self.warps) * THREADS_PER_WARP


@dataclass(frozen=True)
class Arrival:
    """Who arrives on (or waits at) a barrier, and as what.

    `unit`: "thread" (every thread of the role), "warp" (one elected lane of each warp), "one" (a
    single elected thread), "commit" (tcgen05.commit, one arrival), "tma" (one arrival that expects
    bytes; the copy engine then delivers them). `ctas`: 2 when the role of both CTAs of a pair
    arrives on the leader's barrier.
    """

    role: str
    unit: str = "thread"
    ctas: int = 1

    def count(self, plan: Plan) -> int:
        """Arrivals per phase, derived from the role."""
        role = plan.role(self.role)
        counts = {"thread": role.threads, "warp": len(role.warps), "one": 1, "commit": 1, "tma": 1}
        if self.unit not in counts:
            raise PlanError(f"arrival unit {self.unit!r} is unknown; allowed: {sorted(counts)}")
        return counts[self.unit] * self.ctas


@dataclass(frozen=True)
class Barrier:
    """One row of the barrier table. `kind`: "mbarrier", "named" (with a `number`) or "cluster".

    `first_wait_passes`: a fresh mbarrier lets a wait for parity 1 through; True, or the names of
    the waiting roles whose first wait that is.
    """

    name: str
    producers: tuple[Arrival, ...]
    consumers: tuple[Arrival, ...]
    guards: str
    kind: str = "mbarrier"
    stages: int = 1
    tx_bytes: int = 0
    number: int | None = None
    first_wait_passes: bool | tuple[str, ...] = False

    def arrivals(self, plan: Plan) -> int:
        """Arrivals that initialise it (other kinds: arriving plus waiting threads of a CTA)."""
        if self.kind == "mbarrier":
            return sum(arrival.count(plan) for arrival in self.producers)
        roles = {arrival.role for arrival in (*self.producers, *self.consumers)}
        return sum(plan.role(name).threads for name in roles)


@dataclass(frozen=True)
class TmemRegion:
    """`columns` 32-bit columns of tensor memory from `column` on; `aliases` may overlap it."""

    name: str
    column: int
    columns: int
    holds: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class SmemBuffer:
    """`stages` slots of `slot_bytes` bytes each; `aliases` names buffers in the same place."""

    name: str
    slot_bytes: int
    stages: int = 1
    align: int = 128
    holds: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.stages


@dataclass(frozen=True)
class Envelope:
    """What a stage accepts. `lifted_by` maps each rule to the stage that lifts it.

    Lengths must be positive multiples of `seqlen_multiple`; with `masks` any length, 0 too, and the
    options of `common.masks`. Rules (keys of `lifted_by`): dtype, head_dim, seqlen, mask, heads,
    strides, grad, device.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dims: tuple[int, ...] = (64, 128)
    seqlen_multiple: int = 128
    grouped_heads: bool = False
    differentiable: bool = False
    masks: bool = False
    lifted_by: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The resources of one configuration of a stage; `check()` before anything is compiled."""

    roles: tuple[Role, ...]
    smem: tuple[SmemBuffer, ...] = ()
    tmem: tuple[TmemRegion, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    launch_registers: int | None = None  # registers a thread at launch; None: the compiler's choice

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory, buffers laid out in order, each at its alignment."""
        offsets = self.smem_offsets
        return max((offsets[row.name] + row.total_bytes for row in self.smem), default=0)

    @cached_property
    def smem_offsets(self) -> dict[str, int]:
        """First byte of each buffer; one that aliases an earlier buffer starts where that does."""
        end, placed = 0, {}
        for buffer in self.smem:
            shared = [placed[name] for name in buffer.aliases if name in placed]
            placed[buffer.name] = shared[0] if shared else -(-end // buffer.align) * buffer.align
            end = max(end, placed[buffer.name] + buffer.total_bytes)
        return placed

    @cached_property
    def mbarrier_offsets(self) -> dict[str, int]:
        """First byte of each mbarrier (of a ring "name[slot]") in the buffer that holds them.

        They lie in the order of the table; those that differ in a last digit, which is the query
        tile, are next to each other.
        """
        rows = [row for row in self.barriers if row.kind == "mbarrier"]
        order = list(dict.fromkeys(row.name.rstrip("0123456789") for row in rows))
        rows.sort(key=lambda row: order.index(row.name.rstrip("0123456789")))
        names = [
            f"{row.name}[{slot}]" if row.stages > 1 else row.name
            for row in rows
            for slot in range(row.stages)
        ]
        return {name: MBARRIER_BYTES * index for index, name in enumerate(names)}

    def role(self, name: str) -> Role:
        """The role called `name`; PlanError when there is none."""
        for role in self.roles:
            if role.name == name:
                return role
        raise PlanError(f"no role {name!r}; roles are {[role.name for role in self.roles]}")

    def barrier(self, name: str) -> Barrier:
        """The barrier called `name`; PlanError when there is none."""
        for barrier in self.barriers:
            if barrier.name == name:
                return barrier
        raise PlanError(f"no barrier {name!r}; barriers are {[row.name for row in self.barriers]}")

    def with_changes(self, **changes) -> Plan:
        """A copy with fields replaced (for tests and exercises)."""
        return replace(self, **changes)

    def check(self) -> Plan:
        """Return the plan itself; raise PlanError at the first thing the device would not survive.

        Checked: warp ranges (gaps, overlaps, thread limit), setmaxnreg (pool, one budget to a
        warpgroup), tensor memory (range, overlap unless declared an alias), shared memory (bytes,
        alignment, overlap), barriers (arrival counts, named numbers, bytes).
        """
        _check_names(self)
        _check_warps(self)
        _check_registers(self)
        _check_tmem(self)
        _check_smem(self)
        _check_barriers(self)
        return self


def _check_names(plan: Plan) -> None:
    for kind in ("roles", "smem", "tmem", "barriers"):
        names = [row.name for row in getattr(plan, kind)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise PlanError(f"{kind}: {sorted(twice)} declared twice")
    for kind in ("smem", "tmem"):
        rows = getattr(plan, kind)
        known = {row.name for row in rows}
        for row in rows:
            strangers = set(row.aliases) - known
            if strangers:
                raise PlanError(f"{kind}: {row.name} aliases unknown {sorted(strangers)}")


def _check_warps(plan: Plan) -> None:
    owner: dict[int, str] = {}
    for role in plan.roles:
        if not len(role.warps):
            raise PlanError(f"role {role.name} has no warps")
        for warp in role.warps:
            if warp in owner:
                raise PlanError(f"warp {warp} belongs to both {owner[warp]} and {role.name}")
            owner[warp] = role.name
    missing = set(range(max(owner, default=0) + 1)) - set(owner)
    if missing:
        raise PlanError(f"warps {sorted(missing)} have no role; name them EMPTY")
    if plan.threads > MAX_THREADS_PER_CTA:
        raise PlanError(f"{plan.threads} threads a CTA; the limit is {MAX_THREADS_PER_CTA}")


def _check_registers(plan: Plan) -> None:
    budgets = {role.name: role.registers for role in plan.roles if role.registers is not None}
    if not budgets and plan.launch_registers is None:
        return
    warps = sum(len(role.warps) for role in plan.roles)
    launch = plan.launch_registers
    if launch is None:
        raise PlanError("setmaxnreg budgets need launch_registers: the pool is what a launch gives")
    if launch * warps * THREADS_PER_WARP > REGISTERS_PER_SM:
        raise PlanError(
            f"{launch} registers x {warps * THREADS_PER_WARP} threads exceed the SM's "
            f"{REGISTERS_PER_SM}"
        )
    for name, registers in budgets.items():
        if registers % 8 or not 24 <= registers <= 256:
            raise PlanError(f"{name}: setmaxnreg {registers} is not a multiple of 8 in 24 ... 256")
    if budgets and warps % WARPS_PER_WARPGROUP:
        raise PlanError(f"setmaxnreg works on whole warpgroups of 4 warps; the CTA has {warps}")
    for first in range(0, warps if budgets else 0, WARPS_PER_WARPGROUP):
        group = range(first, first + WARPS_PER_WARPGROUP)
        sharing = [role for role in plan.roles if set(role.warps) & set(group)]
        if len({role.registers for role in sharing}) > 1:
            detail = ", ".join(f"{role.name} {role.registers}" for role in sharing)
            raise PlanError(
                f"warps {first} ... {group[-1]} share one setmaxnreg, a warpgroup's; got {detail}"
            )
    used = sum(len(role.warps) * (role.registers or launch) for role in plan.roles)
    if used > launch * warps:
        detail = " + ".join(
            f"{role.name} {len(role.warps)} x {role.registers or launch}" for role in plan.roles
        )
        raise PlanError(
            f"register pool exceeded: {detail} = {used} a thread place, but the launch gives "
            f"{launch} x {warps} = {launch * warps}"
        )


def _check_overlaps(what: str, unit: str, places: list[tuple]) -> None:
    """`places` holds (row, start, size); rows may overlap only where one names the other."""
    for index, (first, a, a_size) in enumerate(places):
        for second, b, b_size in places[index + 1 :]:
            declared = second.name in first.aliases or first.name in second.aliases
            if a < b + b_size and b < a + a_size and not declared:
                raise PlanError(
                    f"{what} {first.name} ({unit} {a} ... {a + a_size - 1}) overlaps {second.name} "
                    f"({unit} {b} ... {b + b_size - 1}); declare the alias or move one"
                )


def _check_tmem(plan: Plan) -> None:
    for region in plan.tmem:
        if region.columns < 1:
            raise PlanError(f"tensor memory {region.name}: {region.columns} columns")
        if region.column < 0 or region.column + region.columns > TMEM_COLUMNS:
            raise PlanError(
                f"tensor memory {region.name}: columns {region.column} ... "
                f"{region.column + region.columns - 1} leave the SM's {TMEM_COLUMNS}"
            )
    places = [(region, region.column, region.columns) for region in plan.tmem]
    _check_overlaps("tensor memory", "columns", places)


def _check_smem(plan: Plan) -> None:
    offsets, seen = plan.smem_offsets, set()
    for buffer in plan.smem:
        if buffer.align not in ALIGNMENTS:
            raise PlanError(f"{buffer.name}: alignment {buffer.align} is not one of {ALIGNMENTS}")
        if buffer.stages < 1 or buffer.slot_bytes < 1:
            raise PlanError(f"{buffer.name}: {buffer.stages} slots of {buffer.slot_bytes} bytes")
        later = [name for name in buffer.aliases if name not in seen]
        if later:
            raise PlanError(
                f"{buffer.name} aliases {later[0]}, which comes later; name the earlier buffer in "
                "the later one"
            )
        start = offsets[buffer.name]
        if start % buffer.align:
            raise PlanError(
                f"{buffer.name}: starts at byte {start}, not a multiple of {buffer.align}"
            )
        seen.add(buffer.name)
    if plan.smem_bytes > MAX_SMEM_BYTES:
        detail = ", ".join(f"{buffer.name} {buffer.total_bytes}" for buffer in plan.smem)
        raise PlanError(f"shared memory {plan.smem_bytes} B exceeds {MAX_SMEM_BYTES} B ({detail})")
    places = [(buffer, offsets[buffer.name], buffer.total_bytes) for buffer in plan.smem]
    _check_overlaps("shared memory", "bytes", places)


def _check_barriers(plan: Plan) -> None:
    numbers: dict[int, str] = {}
    for barrier in plan.barriers:
        for arrival in (*barrier.producers, *barrier.consumers):
            arrival.count(plan)  # raises for an unknown role or unit
        if not barrier.producers or not barrier.consumers:
            raise PlanError(f"barrier {barrier.name} needs a producer and a consumer")
        if barrier.stages < 1:
            raise PlanError(f"barrier {barrier.name}: {barrier.stages} stages")
        if barrier.kind == "named":
            _check_named(barrier, numbers)
        elif barrier.kind == "mbarrier":
            _check_bytes(barrier)
        elif barrier.kind != "cluster":
            raise PlanError(f"barrier {barrier.name}: kind {barrier.kind!r} is unknown")


def _check_bytes(barrier: Barrier) -> None:
    copies = any(row.unit == "tma" for row in barrier.producers)
    if barrier.tx_bytes and not copies:
        raise PlanError(f"barrier {barrier.name} expects bytes, but no producer is a TMA copy")
    if copies and not barrier.tx_bytes:
        raise PlanError(f"barrier {barrier.name}: a TMA copy arrives, but tx_bytes is 0")


def _check_named(barrier: Barrier, numbers: dict[int, str]) -> None:
    first = barrier.number
    for number in [None] if first is None else range(first, first + barrier.stages):
        if number is None or not 0 <= number < NAMED_BARRIERS:
            raise PlanError(f"named barrier {barrier.name}: number {number} is not in 0 ... 15")
        if number in numbers:
            raise PlanError(f"named barrier {number} is both {numbers[number]} and {barrier.name}")
        numbers[number] = barrier.name
