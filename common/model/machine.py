# SPDX-License-Identifier: Apache-2.0
"""Machines as data: each figure with its unit, where it comes from and how far to trust it.

The figures are published specifications and public measurements, but for one that this project
measured. `confidence` is high (documented, or measured by several), medium or low (assumed).
They were chosen once, before the model's results were compared with published throughput, and are
not tuned to it: what a figure is worth shows when it is changed (`Machine.with_changes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Figure:
    """One number of a machine.

    Attributes:
        value: the number, in `unit`.
        unit: such as "B/clk/SM": bytes per clock and SM.
        source: where it comes from.
        confidence: high, medium or low, as the module explains.
    """

    value: float
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class Machine:
    """A GPU as the SM model sees it. `machine["fma"]` is a figure's value.

    Keys: clock (Hz), sms; per SM and clock: tensor (floating-point operations), fma, alu, mufu,
    cvt (lane results), issue (warp instructions), smem, gmem, tmem, dsmem, reduce (bytes);
    smem_broadcast_passes, smem_fill_passes; tma_in_flight (bytes); hbm (bytes a second, whole
    chip); the rest, named *_latency and tma_issue, are cycles. A fourth of fma ... issue and tmem
    belongs to each sub-partition.

    Attributes:
        name: "B200", with what was changed in brackets.
        figures: the numbers by name.
    """

    name: str
    figures: dict[str, Figure]

    def __getitem__(self, key: str) -> float:
        if key not in self.figures:
            raise KeyError(f"{self.name} has no figure {key!r}; it has {sorted(self.figures)}")
        return self.figures[key].value

    def with_changes(self, values: Mapping[str, float]) -> Machine:
        """A copy with figures replaced; units stay as they are.

        Args:
            values: new numbers by name of the figure, as in `{"mufu": 32}`.

        Raises: ValueError for a figure that the machine does not have, or a value that is not a
        positive number.
        """
        figures = dict(self.figures)
        for key, value in values.items():
            if key not in figures:
                known = ", ".join(sorted(figures))
                raise ValueError(f"{self.name} has no figure {key!r}; its figures are {known}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{key} must be a positive number; got {value}")
            source = f"set by hand (was {figures[key].value:g})"
            figures[key] = replace(figures[key], value=float(value), source=source)
        changes = ", ".join(f"{key}={value:g}" for key, value in values.items())
        return Machine(f"{self.name} ({changes})" if changes else self.name, figures)


_PAPER = "FlashAttention-4 paper, section 2.2"
_GUIDE = "CUDA Programming Guide, arithmetic throughput"
_MMA = "SemiAnalysis tcgen05 microbenchmarks, B200: issue to mbarrier wait satisfied, less N/2"
_B300_ARITHMETIC = "public microbenchmarks of B300 (ademeure)"

_SHARED = {
    "fma": Figure(128, "lanes/clk/SM", _GUIDE, "high"),
    "alu": Figure(64, "lanes/clk/SM", f"{_GUIDE}, integer and compare", "medium"),
    "mufu": Figure(16, "results/clk/SM", _PAPER, "high"),
    "cvt": Figure(64, "results/clk/SM", f"{_B300_ARITHMETIC}, pack two float32", "medium"),
    "issue": Figure(4, "warp instructions/clk/SM", "one of each sub-partition, documented", "high"),
    "smem_broadcast_passes": Figure(
        2,
        "passes of the port for a warp's 16-byte load of one address",
        "measured on an H200, 2026-11-29: ncu, 276.9e6 load wavefronts / 136.3e6 loads of stage 01",
        "medium",
    ),
    "smem_fill_passes": Figure(
        1, "passes of the port for what a TMA load writes", "assumed; the paper counts none", "low"
    ),
    "smem": Figure(128, "B/clk/SM", f"{_PAPER}; agrees with SS rates of the tensor core", "high"),
    "gmem_latency": Figure(
        800, "cycles", "public microbenchmarks of B300, unloaded DRAM", "medium"
    ),
    "tma_latency": Figure(
        1400, "cycles", "SemiAnalysis, B200: 1 KiB from DRAM, all SMs loading", "medium"
    ),
    "tma_issue": Figure(50, "cycles", f"{_B300_ARITHMETIC}: 48 to 65 an instruction", "medium"),
    "tma_in_flight": Figure(
        65536, "B/SM", "SemiAnalysis, B200: 64 KiB outstanding saturate DRAM", "medium"
    ),
    "barrier_latency": Figure(30, "cycles", "public microbenchmarks of B300, 4 warps", "low"),
    "mbarrier_latency": Figure(
        90, "cycles", "assumed, signal to waiter: half-way between 60 and 120", "low"
    ),
    "dsmem": Figure(13, "B/clk/SM", "SemiAnalysis, second-hand: 12 to 14 for bulk copies", "low"),
    "dsmem_latency": Figure(200, "cycles", f"{_B300_ARITHMETIC}: 180 to 224", "low"),
    "reduce": Figure(22, "B/clk/SM", "red.global.v4.f32 on a GB200, well coalesced", "medium"),
}
_BLACKWELL = {
    **_SHARED,
    "sms": Figure(148, "SMs", _PAPER, "high"),
    "tensor": Figure(8192, "FLOP/clk/SM", f"{_PAPER}; 8153 to 8161 measured", "high"),
    "tmem": Figure(
        512, "B/clk/SM", "inferred from loads on B300 and GB200: a column a clock a warp", "low"
    ),
    "tmem_latency": Figure(30, "cycles", "inferred from the same loads: 20 to 45", "low"),
    "mma_ss_latency": Figure(136, "cycles", _MMA, "high"),
    "mma_ts_latency": Figure(104, "cycles", _MMA, "high"),
    "mma_pair_latency": Figure(34, "cycles more for a pair", _MMA, "high"),
    "hbm": Figure(7.2e12, "B/s", "measured by several: 7.0 to 7.5e12", "high"),
}

B200 = Machine(
    "B200",
    {
        **_BLACKWELL,
        "clock": Figure(1.85e9, "Hz", _PAPER, "high"),
        "gmem": Figure(75, "B/clk/SM", "public L2 measurement, 20.5 TB/s over 148 SMs", "medium"),
    },
)
B300 = Machine(
    "B300",
    {
        **_BLACKWELL,
        "clock": Figure(1.92e9, "Hz", f"{_B300_ARITHMETIC}, sustained", "medium"),
        "sms": Figure(148, "SMs", f"{_B300_ARITHMETIC}; another source lists 160", "medium"),
        "mufu": Figure(32, "results/clk/SM", "NVIDIA blog, softmax on Blackwell Ultra", "high"),
        "gmem": Figure(72, "B/clk/SM", "public L2 measurement, 20.5 TB/s over 148 SMs", "medium"),
    },
)
H200 = Machine(
    "H200",
    {
        **_SHARED,
        "clock": Figure(1.83e9, "Hz", "FlashAttention-3 era public figures for H100 SXM", "medium"),
        "sms": Figure(132, "SMs", "H100 SXM specification", "high"),
        "tensor": Figure(4096, "FLOP/clk/SM", "H100 SXM specification, dense bf16", "high"),
        "gmem": Figure(38, "B/clk/SM", "public L2 measurement, 9.2 TB/s over 132 SMs", "medium"),
        "hbm": Figure(4.8e12, "B/s", "H200 specification", "high"),
    },
)
MACHINES = {machine.name: machine for machine in (B200, B300, H200)}
