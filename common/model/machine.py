# SPDX-License-Identifier: Apache-2.0
"""Machines as data: each figure with its unit, where it comes from and how far to trust it.

The figures are published specifications and public measurements, but for one that this project
measured. `confidence` is high (documented, or measured by several), medium or low (assumed).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One number of a machine."""

    value: float
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class Machine:
    """A GPU as the SM model sees it. `machine["fma"]` is a figure's value.

    Keys: clock (Hz), sms, and per SM and clock: fma, alu, mufu (lane results), smem and gmem
    (bytes); smem_broadcast_passes; latencies in cycles: gmem_latency, barrier_latency.
    """

    name: str
    figures: dict[str, Figure]

    def __getitem__(self, key: str) -> float:
        if key not in self.figures:
            raise KeyError(f"{self.name} has no figure {key!r}; it has {sorted(self.figures)}")
        return self.figures[key].value


_SHARED = {
    "fma": Figure(128, "lanes/clk/SM", "CUDA Programming Guide, arithmetic throughput", "high"),
    "alu": Figure(64, "lanes/clk/SM", "CUDA Programming Guide, integer and compare", "medium"),
    "mufu": Figure(16, "results/clk/SM", "FlashAttention-4 paper, section 2.2", "high"),
    "smem_broadcast_passes": Figure(
        2,
        "passes of the port for a warp's 16-byte load of one address",
        "measured on an H200, 2026-11-29: ncu, 276.9e6 load wavefronts / 136.3e6 loads of stage 01",
        "medium",
    ),
    "smem": Figure(128, "B/clk/SM", "FlashAttention-4 paper, section 2.2", "high"),
    "gmem_latency": Figure(
        800, "cycles", "public microbenchmarks of B300, unloaded DRAM", "medium"
    ),
    "barrier_latency": Figure(30, "cycles", "public microbenchmarks of B300, 4 warps", "low"),
}

B200 = Machine(
    "B200",
    {
        **_SHARED,
        "clock": Figure(1.85e9, "Hz", "FlashAttention-4 paper, section 2.2", "high"),
        "sms": Figure(148, "SMs", "FlashAttention-4 paper, section 2.2", "high"),
        "gmem": Figure(75, "B/clk/SM", "public L2 measurement, 20.5 TB/s over 148 SMs", "medium"),
    },
)
H200 = Machine(
    "H200",
    {
        **_SHARED,
        "clock": Figure(1.83e9, "Hz", "FlashAttention-3 era public figures for H100 SXM", "medium"),
        "sms": Figure(132, "SMs", "H100 SXM specification", "high"),
        "gmem": Figure(38, "B/clk/SM", "public L2 measurement, 9.2 TB/s over 132 SMs", "medium"),
    },
)
MACHINES = {machine.name: machine for machine in (B200, H200)}
