# SPDX-License-Identifier: Apache-2.0
"""Cycles that one tile needs on three resources, by the formulas of the FlashAttention-4 paper.

Tensor core (mma), reads and writes of shared memory (smem) and exponentials (exp) are counted for
one CTA and one tile; the slowest resource bounds the kernel from above. Everything here is
derived from a machine's figures, nothing is a measurement. Source: arXiv 2603.05451v1, Eq. 1-3 and
Table 1 (forward), Eq. 7-10 and Table 3 (backward). Runs: host; only the plot needs altair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .model.machine import B200, Machine

PIECE = 128  # rows of an MMA tile: operands are read again for each 128 x 128 piece of the result
OPERAND_BYTES = 2  # bf16 and fp16
ACCUMULATOR_BYTES = 4  # dQ is reduced in float32
DSMEM_PASSES = 3  # that Table 3 counts for half a dS tile: to staging, out, in from the peer
MULTIPLE = 16  # of key tile and head dim: K of one MMA instruction, step of its N
RESOURCES = {"mma": "tensor core", "smem": "shared memory", "exp": "exponentials"}
HEAD_DIMS = range(16, 257, MULTIPLE)  # of the plot
PLOT_TOP = 2.1  # height of the plot, in tensor-core peaks
FONT = "Liberation Sans, Arial, sans-serif"  # the first comes with vl-convert

LEFT_OUT = (
    "float32 arithmetic of the softmax: maximum, scale, sum, conversion, rescaling (paper)",
    "register bandwidth (paper)",
    "L2 and global memory (paper)",
    "loads and stores of tensor memory",
    "TMA fills and the epilogue's stores, which use the shared-memory port as well",
    "latencies, barriers, filling and draining the pipeline",
    "masked tiles, the last wave of CTAs, the clock under load",
)


@dataclass(frozen=True)
class Roofline:
    """Cycles of one CTA for one tile, by resource; derived.

    tile_m query rows and tile_n keys of the whole tile (of both CTAs of a pair); flop is this
    CTA's share. smem_parts: what the shared-memory port is used for, in cycles.
    """

    machine: Machine
    backward: bool
    pair: bool
    tile_m: int
    tile_n: int
    head_dim: int
    flop: float
    mma: float
    smem_parts: dict[str, float]
    exp: float

    @property
    def smem(self) -> float:
        """Cycles of the shared-memory port: the sum of its parts (Eq. 2, Eq. 9)."""
        return sum(self.smem_parts.values())

    @property
    def cycles(self) -> dict[str, float]:
        """Cycles by resource."""
        return {"mma": self.mma, "smem": self.smem, "exp": self.exp}

    @property
    def bound(self) -> tuple[str, ...]:
        """The resources that need the most cycles; more than one when they are equal."""
        most = max(self.cycles.values())
        return tuple(name for name, cycles in self.cycles.items() if cycles == most)

    @property
    def tensor_ceiling(self) -> float:
        """Highest possible use of the tensor core, 0 to 1: its cycles over those of the bound."""
        return self.mma / max(self.cycles.values())

    @property
    def ceilings(self) -> dict[str, float]:
        """TFLOP/s of the whole machine if only that resource limited it; derived."""
        rate = self.flop * figure(self.machine, "clock") * figure(self.machine, "sms") / 1e12
        return {name: rate / cycles for name, cycles in self.cycles.items()}

    @property
    def tflops(self) -> float:
        """The lowest ceiling: no kernel of this kind can be faster, as far as the formulas go."""
        return min(self.ceilings.values())

    @property
    def name(self) -> str:
        """Such as "backward, 2-CTA"."""
        return f"{'backward' if self.backward else 'forward'}, {'2' if self.pair else '1'}-CTA"

    def as_dict(self) -> dict:
        """JSON-able."""
        return {
            "machine": self.machine.name,
            "kernel": self.name,
            "tile": {"m": self.tile_m, "n": self.tile_n, "head_dim": self.head_dim},
            "derived": {
                "cycles_per_cta": self.cycles,
                "smem_parts": self.smem_parts,
                "bound": list(self.bound),
                "tensor_ceiling": self.tensor_ceiling,
                "tflops_ceilings": self.ceilings,
                "tflops": self.tflops,
            },
            "left_out": list(LEFT_OUT),
        }


def figure(machine: Machine, key: str) -> float:
    """A figure of a machine; ValueError when it has none, or when the formulas do not fit it."""
    if "tmem" not in machine.figures:
        raise ValueError(
            f"the roofline formulas are for Blackwell: {machine.name} has no tensor memory; use "
            "B200 or B300"
        )
    if key not in machine.figures:
        raise ValueError(
            f"the roofline needs the figure {key!r}, which {machine.name} does not have; it has "
            f"{', '.join(sorted(machine.figures))}"
        )
    return machine[key]


def forward(
    tile_m: int | None = None,
    tile_n: int = 128,
    head_dim: int = 128,
    *,
    pair: bool = False,
    machine: Machine = B200,
) -> Roofline:
    """Forward pass, tile_m queries (a pair's: of both CTAs) by tile_n keys.

    Eq. 1: T_mma = 4 M N d / 8192, two products. Eq. 2: bytes of MMA operands over 128 bytes a
    cycle. Q K^T reads both operands from shared memory, P V only V, since P is in tensor memory:
    3 M N d / 8192 for multiples of 128. Eq. 3: T_exp = M N / 16. Rates are the machine's.
    Table 1: M = N = d = 128 gives 1024, 768 and 1024 cycles; M = 256 gives twice that.

    A pair (not in the paper, same rules) splits queries in two halves of one 256-row MMA, and
    each CTA stages half of K and V. Raises TypeError or ValueError for sizes that no MMA has.
    """
    tile_m = PIECE * (1 + pair) if tile_m is None else tile_m
    _check({"tile_m": tile_m, "tile_n": tile_n, "head_dim": head_dim}, pair)
    _whole_pieces("tile_m", tile_m, pair, "the rows of the MMAs are the queries")
    elements = _operands(tile_m, tile_n, head_dim, pair) + _operands(
        tile_m, head_dim, tile_n, pair, a_in_tmem=True
    )
    ctas = 1 + pair
    flop = 4.0 * tile_m * tile_n * head_dim / ctas
    return Roofline(
        machine,
        False,
        pair,
        tile_m,
        tile_n,
        head_dim,
        flop,
        flop / figure(machine, "tensor"),
        {"MMA operands": elements * OPERAND_BYTES / figure(machine, "smem")},
        tile_m * tile_n / ctas / figure(machine, "mufu"),
    )


def backward(
    tile_m: int = 128,
    tile_n: int | None = None,
    head_dim: int = 128,
    *,
    pair: bool = False,
    machine: Machine = B200,
) -> Roofline:
    """Backward pass, tile_m queries by tile_n keys (a pair's: of both CTAs).

    Eq. 7: T_mma = 10 M N d / 8192, five products. Eq. 8, operands: S^T = K Q^T, dP^T = V dO^T and
    dQ = dS K read both from shared memory, dV = P^T dO and dK = dS^T Q only one:
    (4 M d + 3 N d + M N) / 64 while no side exceeds 128; beyond that operands are read again for
    each 128 x 128 piece, as in Eq. 2. Eq. 9 adds dS written in 16 bits, M N / 64, and dQ written
    in float32 and read again to be reduced, M d / 16. Eq. 10: T_exp = M N / 16. Rates are the
    machine's. Table 3, 1-CTA: 2560; 2048 + 256 + 1024 = 3328; 1024.

    A pair splits the keys, which are the rows of the transposed products (Table 3 writes M = 256
    for them), and each CTA stages half of the other operand. Half of dS goes to the peer, counted
    as three passes of it, and each CTA then owns half of dQ with all keys: with tile_m = 128 and
    tile_n = 256 each CTA has 2560; 1536 + 256 + 384 + 512 = 2688; 1024 (Table 3, 2-CTA).
    Raises TypeError or ValueError for sizes that no MMA has.
    """
    tile_n = PIECE * (1 + pair) if tile_n is None else tile_n
    _check({"tile_m": tile_m, "tile_n": tile_n, "head_dim": head_dim}, pair)
    _whole_pieces("tile_n", tile_n, pair, "the MMAs' rows are the keys (M in Table 3)")
    _whole_pieces("tile_m", tile_m, False, "the rows of dQ are the queries")
    ctas = 1 + pair
    flop = 10.0 * tile_m * tile_n * head_dim / ctas
    smem = figure(machine, "smem")
    return Roofline(
        machine,
        True,
        pair,
        tile_m,
        tile_n,
        head_dim,
        flop,
        flop / figure(machine, "tensor"),
        {part: size / smem for part, size in _backward_bytes(tile_m, tile_n, head_dim, pair)},
        tile_m * tile_n / ctas / figure(machine, "mufu"),
    )


def _backward_bytes(m: int, n: int, d: int, pair: bool) -> list[tuple[str, float]]:
    """Bytes through one CTA's shared-memory port in Eq. 9, by purpose."""
    operands = (
        2 * _operands(n, m, d, pair)  # S^T and dP^T
        + 2 * _operands(n, d, m, pair, a_in_tmem=True)  # dV and dK
        + _operands(m, d, n, pair)  # dQ
    )
    ds_bytes = m * n * OPERAND_BYTES / (1 + pair)
    dq_bytes = m * d * ACCUMULATOR_BYTES / (1 + pair)
    parts = [("MMA operands", operands * OPERAND_BYTES), ("dS written", ds_bytes)]
    if pair:
        parts.append(("dS to the peer", DSMEM_PASSES * ds_bytes / 2))
    return [*parts, ("dQ written and read", 2 * dq_bytes)]


def _operands(rows: int, columns: int, depth: int, pair: bool, a_in_tmem: bool = False) -> float:
    """Operand elements that one CTA reads for a (rows x depth) by (depth x columns) product.

    Each MMA gives 128 x 128 of the result and reads its operands once; a smaller remainder counts
    as it is, since an instruction of N = 64 reads 64 columns. A pair's MMA has 256 rows: a CTA
    reads its half of A and stages half of B.
    """
    ctas = 1 + pair
    a = 0 if a_in_tmem else math.ceil(columns / PIECE) * rows * depth / ctas
    return a + math.ceil(rows / (PIECE * ctas)) * columns * depth / ctas


def _check(sizes: dict[str, int], pair: bool) -> None:
    if not isinstance(pair, bool):
        raise TypeError(f"pair must be True or False; got {pair!r}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer; got {size!r}")
        if size < 1 or size % MULTIPLE:
            raise ValueError(f"{name} must be a positive multiple of {MULTIPLE}; got {size}")
    if sizes["head_dim"] > HEAD_DIMS[-1]:
        raise ValueError(f"head_dim must be at most {HEAD_DIMS[-1]}; got {sizes['head_dim']}")


def _whole_pieces(name: str, size: int, pair: bool, reason: str) -> None:
    multiple = PIECE * (1 + pair)
    if size % multiple:
        whose = "a pair's " if pair else ""
        raise ValueError(
            f"{whose}{name} must be a multiple of {multiple}, since {reason}; got {size}"
        )


# --- plot ---------------------------------------------------------------------------------------


def plot_rows(machine: Machine = B200) -> list[dict]:
    """Ceilings over head dim for the four kernels; tiles of 128 queries and keys a CTA."""
    found = [
        kernel(head_dim=head_dim, pair=pair, machine=machine)
        for kernel in (forward, backward)
        for pair in (False, True)
        for head_dim in HEAD_DIMS
    ]
    return [
        {
            "kernel": row.name,
            "head dim": row.head_dim,
            "ceiling": RESOURCES[resource],
            "TFLOP/s": round(tflops, 1),
            "cycles a tile": row.cycles[resource],
            "attainable": round(row.tflops, 1),
        }
        for row in found
        for resource, tflops in row.ceilings.items()
    ]


def chart(machine: Machine = B200, point: Roofline | None = None):
    """An altair chart: three ceilings over head dim, one panel a kernel; `point` is marked."""
    from .timeline import require_altair

    alt = require_altair()
    rows = plot_rows(machine)
    top = PLOT_TOP * max(row["attainable"] for row in rows)
    scale = alt.Scale(domain=[0, math.ceil(top / 500) * 500])
    panels = []
    for name in dict.fromkeys(row["kernel"] for row in rows):
        layers = _panel(alt, [row for row in rows if row["kernel"] == name], scale)
        if point is not None and point.name == name:
            layers.append(_point(alt, point, scale))
        panels.append(alt.layer(*layers).properties(width=300, height=190, title=name))
    title = alt.Title(
        f"Ceilings by the paper's formulas, with figures of a {machine.name}",
        subtitle="Derived, not measured. Tiles of 128 queries and 128 keys a CTA, 16-bit inputs.",
    )
    return alt.concat(*panels, columns=2, title=title).configure(font=FONT)


def _panel(alt, rows: list[dict], scale) -> list:
    """Layers of one kernel's panel: what is attainable, and the ceilings above it."""
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("head dim:Q", title="head dim", axis=alt.Axis(values=[64, 128, 192, 256]))
    )
    names = list(RESOURCES.values())
    colors = alt.Scale(domain=names, range=["#0072b2", "#009e73", "#d55e00"])
    dashes = alt.Scale(domain=names, range=[[1, 0], [6, 3], [2, 2]])
    reachable = base.mark_area(clip=True, color="#999999", opacity=0.25).encode(
        y=alt.Y("attainable:Q", stack=None, scale=scale, title="TFLOP/s (derived)")
    )
    lines = base.mark_line(clip=True, strokeWidth=2).encode(
        y=alt.Y("TFLOP/s:Q", scale=scale),
        color=alt.Color("ceiling:N", scale=colors, title="ceiling"),
        strokeDash=alt.StrokeDash("ceiling:N", scale=dashes, title="ceiling"),
        tooltip=["kernel:N", "ceiling:N", "head dim:Q", "TFLOP/s:Q", "cycles a tile:Q"],
    )
    return [reachable, lines]


def _point(alt, point: Roofline, scale):
    """The layer that marks one tile's bound."""
    row = {"kernel": point.name, "head dim": point.head_dim, "bound": round(point.tflops, 1)}
    row["tile"] = f"{point.tile_m} x {point.tile_n}"
    marked = alt.Chart(alt.Data(values=[row])).mark_point(
        clip=True, filled=True, size=90, color="black"
    )
    tooltip = ["kernel:N", "tile:N", "head dim:Q", "bound:Q"]
    return marked.encode(x="head dim:Q", y=alt.Y("bound:Q", scale=scale), tooltip=tooltip)
