# SPDX-License-Identifier: Apache-2.0
"""Host side of an execution on Hopper: memory for the engine, its settings, and what went wrong.

A ``Session`` owns the Control block, the slots of tensor memory and a Fault record in pinned host
memory. A fault ends the kernel with a trap, after which the CUDA context is lost; the record is
ordinary host memory and can still be read. Runs: host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from .engine import (
    DELAYS,
    FLAG_EAGER,
    FLAG_UNCOMMITTED,
    LOG_HEADER,
    LOG_UNIT,
    MAX_WAITS,
    SLOT_BYTES,
    WAIT_KINDS,
    Control,
    Fault,
    fault_sentence,
)

_OFFSET = 0xFFFFFF  # of a shared::cluster address; the CTA's rank stands above
TIMEOUT_CODE = 1


@dataclass(frozen=True)
class WaitingWarp:
    """A warp that had been waiting for longer than a tenth of the timeout."""

    cta: int
    warp: int
    line: int
    barrier: int
    parity: int
    kind: str

    def sentence(self, names: Mapping[int, str], ptx: str | None) -> str:
        """One line of the report."""
        place = barrier_name(self.barrier, names)
        what = {
            WAIT_KINDS[1]: f"{place}, parity {self.parity}",
            WAIT_KINDS[2]: f"the cluster barrier, phase parity {self.parity}",
        }.get(self.kind, self.kind)
        return f"CTA {self.cta} warp {self.warp}: {what}{_at_line(self.line, ptx)}"


class HopperExecutionError(RuntimeError):
    """A rewritten kernel did what the sm_100a hardware does not allow, or never came to an end.

    ``code`` and ``name`` are those of ``engine.FAULTS``; ``cta`` is a block index of three;
    ``warp`` and ``lane`` count the threads of the CTA (its own first, then the engine's). ``line``
    is that of the sm_100a PTX (0: none) and ``text`` that line, if the PTX was given. ``values``
    are the fault's four numbers, ``waits`` the warps that had been waiting for long.
    """

    def __init__(
        self,
        fault: Fault,
        ptx: str | None = None,
        barriers: Mapping[int, str] | None = None,
    ):
        self.code = fault.code
        self.values = tuple(fault.values)
        self.name, sentence = fault_sentence(self.code, self.values)
        self.cta = tuple(fault.cta)
        self.warp, self.lane, self.line = fault.warp, fault.lane, fault.line
        self.text = _ptx_line(self.line, ptx)
        self.waits = tuple(_waits(fault))
        super().__init__(self._message(sentence, ptx, barriers or {}))

    def _message(self, sentence: str, ptx: str | None, names: Mapping[int, str]) -> str:
        place = f"CTA {self.cta}, warp {self.warp}, lane {self.lane}"
        if self.code == TIMEOUT_CODE and self.values[2] == 1:
            sentence += f": {barrier_name(self.values[0], names)}"
        lines = [f"{self.name}: {sentence}{_at_line(self.line, ptx)} ({place})"]
        if self.waits:
            lines.append("waiting for long:")
            lines += [f"  {wait.sentence(names, ptx)}" for wait in self.waits]
        return "\n".join(lines)


def barrier_name(address: int, names: Mapping[int, str]) -> str:
    """A barrier for a reader: its name if `names` has its offset, its rank and offset anyway."""
    offset, rank = address & _OFFSET, address >> 24
    name = names.get(offset)
    place = f"offset {offset:#x} of CTA rank {rank}"
    return f"mbarrier {name} ({place})" if name else f"mbarrier at {place}"


def _ptx_line(line: int, ptx: str | None) -> str | None:
    if ptx is None or line < 1:
        return None
    lines = ptx.splitlines()
    return " ".join(lines[line - 1].split()) if line <= len(lines) else None


def _at_line(line: int, ptx: str | None) -> str:
    if not line:
        return ""
    text = _ptx_line(line, ptx)
    return f", PTX line {line}" + (f" `{text}`" if text else "")


def _waits(fault: Fault) -> list[WaitingWarp]:
    """The entries in use, without repetitions, in the order of CTA and warp."""
    found = {
        WaitingWarp(w.cta, w.warp, w.line, w.barrier, w.parity, WAIT_KINDS.get(w.kind, str(w.kind)))
        for w in fault.wait[: min(fault.waits, MAX_WAITS)]
    }
    return sorted(found, key=lambda w: (w.cta, w.warp, w.line, w.barrier, w.parity))


def check_fault(
    fault: Fault, ptx: str | None = None, barriers: Mapping[int, str] | None = None
) -> None:
    """Raise HopperExecutionError if a fault was recorded."""
    if fault.claimed:
        raise HopperExecutionError(fault, ptx, barriers)


class Session:
    """Memory and settings of executions on one GPU; several kernels may run with it in turn.

    `slots`: tensor memories, two for each CTA or CTA pair that can be resident; by default enough
    for two CTAs on each multiprocessor.
    """

    _log = None  # memory of the logs: clusters x units x 16 bytes

    def __init__(self, device=None, slots: int | None = None):
        import torch

        self.device = torch.device("cuda" if device is None else device)
        if slots is None:
            slots = 4 * torch.cuda.get_device_properties(self.device).multi_processor_count
        if slots < 2 or slots % 2:
            raise ValueError(f"slots come in pairs; got {slots}")
        new = lambda size: torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._slot_memory = new(slots * SLOT_BYTES + 1024)
        self._slot_table = new(slots // 2 * 4)
        self._control = new(ctypes.sizeof(Control))
        # Pinned memory has one address for host and device: addressing is unified on 64-bit Linux.
        self._fault = torch.zeros(ctypes.sizeof(Fault), dtype=torch.uint8, pin_memory=True)
        self.fault = Fault.from_address(self._fault.data_ptr())
        self.slots = slots
        self.settings()

    @property
    def address(self) -> int:
        """Device address of the Control block."""
        return self._control.data_ptr()

    def settings(
        self,
        *,
        eager: bool = False,
        seed: int = 0,
        timeout_ms: int = 2000,
        delays: Mapping[str, int] | None = None,
        report_uncommitted: bool = False,
        log_clusters: int = 0,
        log_units: int = 1 << 20,
        skip: int = 0,
    ) -> None:
        """Set what the next launches do.

        eager: MMAs run as soon as they are queued, else only once a commit is; both are right for a
        correct kernel. seed and delays (nanoseconds by "mma", "tma", "tmem", "start") add
        pseudo-random delays; seed 0 adds none. timeout_ms bounds every wait of the kernel.

        Kernels rewritten with the log only: log_clusters, of how many clusters (the first ones of
        the grid) a log is kept, and log_units, the 16-byte units of each; one that is too short is
        a fault. skip: the PTX line of a wait, arrival or fence to leave out, 0 for none.
        """
        import torch

        unknown = set(delays or {}) - set(DELAYS)
        if unknown:
            raise ValueError(f"delays are of {', '.join(DELAYS)}; got {', '.join(sorted(unknown))}")
        if log_clusters and log_units <= LOG_HEADER:
            raise ValueError(f"a log needs more than {LOG_HEADER} units; got {log_units}")
        size = log_clusters * log_units * LOG_UNIT
        if self._log is None or self._log.numel() != size:
            self._log = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.log_clusters = log_clusters
        control = Control(
            slots=self.slots,
            flags=FLAG_EAGER * eager | FLAG_UNCOMMITTED * report_uncommitted,
            seed=seed,
            timeout_ms=timeout_ms,
            delay_ns=tuple((delays or {}).get(name, 0) for name in DELAYS),
            slot_memory=(self._slot_memory.data_ptr() + 1023) // 1024 * 1024,
            slot_table=self._slot_table.data_ptr(),
            fault=self._fault.data_ptr(),
            log=self._log.data_ptr(),
            log_clusters=log_clusters,
            log_units=log_units,
            skip=skip,
        )
        self._control.copy_(torch.frombuffer(bytearray(control), dtype=torch.uint8))

    def reset(self) -> None:
        """Forget faults and waits, and free every slot; no kernel may be running."""
        self._slot_table.zero_()
        if self.log_clusters:
            self._log.view(self.log_clusters, -1)[:, : LOG_HEADER * LOG_UNIT].zero_()
        ctypes.memset(ctypes.addressof(self.fault), 0, ctypes.sizeof(Fault))

    def logs(self) -> list[bytes]:
        """The logs of the last launch, for `log.decode`; those of clusters that ran."""
        found = []
        for row in self._log.view(self.log_clusters, -1) if self.log_clusters else []:
            used = int.from_bytes(row[:4].cpu().numpy().tobytes(), "little")
            if used:
                found.append(row[: (used + LOG_HEADER) * LOG_UNIT].cpu().numpy().tobytes())
        return found

    def check(self, ptx: str | None = None, barriers: Mapping[int, str] | None = None) -> None:
        """Raise HopperExecutionError if a kernel of this session recorded a fault.

        Call after synchronising, also when that raised an error. ptx: the sm_100a module, for the
        text of the faulting line; barriers: names by offset in shared memory.
        """
        check_fault(self.fault, ptx, barriers)
