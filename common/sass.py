# SPDX-License-Identifier: Apache-2.0
"""A static report on a cubin: registers, spills, loops by role, pipes, and cycles per tile.

Nothing is executed. ``nvdisasm`` and ``cuobjdump`` turn the cubin into text; ``sass_loops`` finds
the loops, ``sass_isa`` counts, ``sass_model`` derives cycles for attention kernels that use
tcgen05. Kernels for sm_80 and sm_90 get everything but the per-tile model. Compare two kernels
only if one ptxas built both; differences under 2 % mean nothing.

``python -m flash_ladder.common.sass FILE.cubin`` prints the report.
"""

import argparse
import collections
import dataclasses
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from .sass_isa import CLASS_NAMES, Instruction, exp2_split, pipe_cycles, tmem_registers
from .sass_loops import Kernel, Loop, analyse
from .sass_model import Tile, TileModel, softmax_loop, steady_loop, tile_model

_PACKAGES = {
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
    "ptxas": "nvidia-cuda-nvcc==13.0.88",
}


class MissingTool(RuntimeError):
    """A CUDA command-line tool is not there; the message says which package brings it."""


class ToolFailed(RuntimeError):
    """A CUDA command-line tool was found but refused its input; the message holds its words."""


def find_tool(name: str) -> str:
    """Return the path of `nvdisasm`, `cuobjdump` or `ptxas`.

    Looks in the pip wheels of this interpreter, whose version is known to read sm_100 code, then on
    PATH, then in CUDA_HOME (or /usr/local/cuda). Raises MissingTool.
    """
    places = []
    for folder in sys.path:
        places += sorted(glob.glob(os.path.join(folder, "nvidia", "*", "bin", name)), reverse=True)
    places.append(shutil.which(name) or "")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places.append(os.path.join(home, "bin", name))
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    package = _PACKAGES.get(name, "the CUDA toolkit")
    raise MissingTool(f"{name} not found in pip wheels, on PATH or in CUDA_HOME: install {package}")


def _run(name: str, *arguments: str) -> str:
    """What a tool prints; `name` as for find_tool, or a path."""
    tool = name if os.sep in name else find_tool(name)
    done = subprocess.run([tool, *arguments], capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        raise ToolFailed(f"{name} failed with code {done.returncode}: {words[:500]}")
    return done.stdout + done.stderr


def assemble(ptx: str, arch: str, ptxas: str = "ptxas") -> bytes:
    """The cubin that an assembler makes of a PTX text, for a target such as sm_100a.

    ptxas: the path of one, or "ptxas" for the one of find_tool. Raises MissingTool, ToolFailed,
    OSError for a path that cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder) / "kernel.ptx", pathlib.Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        _run(ptxas, f"-arch={arch}", str(source), "-o", str(target))
        return target.read_bytes()


@dataclass(frozen=True)
class Resources:
    """What the assembler fixed for a kernel.

    Registers per thread at launch; bytes of stack, static shared (with the 1024 that CUDA reserves
    from sm_90 on) and local memory; threads per CTA (1 if not fixed); the version of ptxas.
    """

    registers: int = 0
    stack_bytes: int = 0
    static_shared_bytes: int = 0
    local_bytes: int = 0
    threads: int = 1
    ptxas: str = "?"


_LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P(?:\d+|T))\s+)?([A-Z][A-Z0-9_.]*)(.*?)"
    r"/\* 0x[0-9a-f]{16} \*/"
)
_HIGH_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")


def _architecture(listing: str) -> str:
    """Return the target named in a listing, from the directive or from the flags of older ELFs."""
    target = re.search(r"\.target\s+(sm_\w+)", listing)
    if target:
        return target[1]
    number = re.search(r"EF_CUDA_SM(\d+)", listing)
    suffix = "a" if "EF_CUDA_ACCELERATORS" in listing else ""
    return f"sm_{number[1]}{suffix}" if number else "?"


class _Listing:
    """nvdisasm's text, parsed: instructions and labels by function, and the architecture."""

    def __init__(self, text: str):
        self.functions: dict[str, list[Instruction]] = {}
        self.labels: dict[str, dict[str, int]] = {}
        self.arch = _architecture(text)
        self._current: str | None = None
        self._pending: list[str] = []
        for line in text.splitlines():
            self._take(line)

    def _take(self, raw: str):
        line, _, live = raw.partition(" // ")
        word = line.strip()
        if re.match(r"\.section\s", word):
            section = re.match(r"\.section\s+\.text\.([^,\s]+)", word)
            self._current = section[1].strip('"') if section else None
            if self._current:
                self.functions[self._current], self.labels[self._current] = [], {}
                self._pending = []
        elif self._current is not None:
            label, high = re.match(r"^([.$\w]+):$", word), _HIGH_WORD.match(line)
            code = self.functions[self._current]
            if label:
                self._pending.append(label[1])
            elif high and code:
                code[-1].schedule(int(high[1], 16))
                columns = [c.strip() for c in live.split("|")][1:5]
                numbers = [int(c) if c.isdigit() else 0 for c in columns] + [0] * 4
                code[-1].live_registers = (numbers[0], numbers[2])
            else:
                self._instruction(line)

    def _instruction(self, line: str):
        match = _LINE.match(line)
        if not match:
            return
        address, rest = int(match[1], 16), match[4]
        branches = re.search(r'BRANCH_TARGETS ([^"]+)"', rest)
        targets = (
            [name.strip() for name in branches[1].split(",")]
            if branches
            else re.findall(r"`\(([^)]+)\)", rest)
        )
        self.labels[self._current].update(dict.fromkeys(self._pending, address))
        self._pending = []
        arguments = rest.split(";")[0].strip()
        self.functions[self._current].append(
            Instruction(address, match[2], match[3], arguments, tuple(targets))
        )


def _disassemble(path: str) -> str:
    """nvdisasm's text with live registers, or without where it cannot follow the data flow.

    A newer nvdisasm prints no life ranges for cubins of an older ELF format, such as ptxas 12.9
    writes for sm_90; that of CUDA 13.0 fails on sm_80 kernels with 255 registers. Live registers
    are then 0.
    """
    try:
        return _run("nvdisasm", "-c", "-hex", "-lrm", "count", path)
    except ToolFailed:
        return _run("nvdisasm", "-c", "-hex", path)


def _resources(path: str) -> dict[str, Resources]:
    """Return the resources of every function in a cubin."""
    usage, name = {}, None
    for line in _run("cuobjdump", "-res-usage", path).splitlines():
        function = re.match(r"\s*Function (\S+):", line)
        if function:
            name = function[1]
        elif name and "REG:" in line:
            usage[name] = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line))
    elf = _run("cuobjdump", "-elf", path)
    release = re.search(r"release \d+\.\d+, (V[\d.]+)", elf)
    toolkit = re.search(r"toolkit=(\d+)(\d)", elf)  # all that older ELFs say
    version = release[1] if release else f"V{toolkit[1]}.{toolkit[2]}" if toolkit else "?"
    found = {}
    for name, words in usage.items():
        at = elf.find(f"\n.nv.info.{name}\n")
        attribute = re.search(
            r"EIATTR_(?:REQNTID|MAX_THREADS)\s+Format:\s+\S+\s+Value:\s+((?:0x[0-9a-f]+ ?)+)",
            elf[max(at, 0) :],
        )
        threads = 1
        for extent in attribute[1].split() if attribute else []:
            threads *= int(extent, 16)
        numbers = (int(words.get(key, 0)) for key in ("REG", "STACK", "SHARED", "LOCAL"))
        found[name] = Resources(*numbers, threads, version)
    return found


SUMMARY_COLUMNS = (
    "kernel|regs|stack|spill all/loops|URspill|instr|loop instr|slots/elem|exp2 hw+emu|live|issue"
    "|mufu|fma|alu|corr/dQ issue|P 3/4..all|replay 1w|replay 2w|smem|tensor|bound|ceiling"
).split("|")


@dataclass(frozen=True)
class SassReport:
    """The static report of one kernel; ``model`` is None without a tcgen05 softmax loop."""

    kernel: Kernel
    resources: Resources
    tile: Tile
    model: TileModel | None

    @property
    def spill_instructions(self) -> int:
        """Accesses to local memory (LDL, STL) in the whole kernel."""
        return self.kernel.counts["SPILL"]

    @property
    def spill_instructions_in_loops(self) -> int:
        """Accesses to local memory in innermost loops and in the MMA and softmax main loops."""
        main = (steady_loop(self.kernel, "mma"), softmax_loop(self.kernel))
        hot = [loop for loop in self.kernel.loops if loop.innermost or loop in main]
        return sum(loop.counts["SPILL"] for loop in hot)

    def as_dict(self) -> dict:
        """Return everything as plain dicts, lists and numbers (JSON)."""
        kernel = self.kernel
        counts = lambda counter: {name: n for name, n in counter.items() if n}
        return {
            "kernel": kernel.name,
            "arch": kernel.arch,
            "resources": dataclasses.asdict(self.resources),
            "instructions": len(kernel.instructions),
            "counts": counts(kernel.counts),
            "blocks": kernel.blocks,
            "wait_loops": kernel.wait_loops,
            "spill_instructions": self.spill_instructions,
            "spill_instructions_in_loops": self.spill_instructions_in_loops,
            "uniform_spill_moves": kernel.uniform_spill_moves,
            "regions": [
                {**vars(region), "counts": counts(region.counts)} for region in kernel.regions
            ],
            "loops": [self._loop_dict(loop) for loop in kernel.loops],
            "tile": dataclasses.asdict(self.tile),
            "model": dataclasses.asdict(self.model) if self.model else None,
        }

    def _loop_dict(self, loop: Loop) -> dict:
        return {
            "first": loop.first,
            "last": loop.last,
            "role": loop.role,
            "depth": loop.depth,
            "innermost": loop.innermost,
            "always": len(loop.always),
            "conditional": len(loop.conditional),
            "live_registers": loop.live_registers,
            "counts": {name: n for name, n in loop.counts.items() if n},
            "pipes": dict(pipe_cycles(loop.instructions, self.kernel.arch)),
            "exp2": exp2_split(loop.instructions),
        }

    def text(self, *, small_loops: bool = False) -> str:
        """Return the report for people; `small_loops` also lists short loops without a role."""
        return "\n".join(_text_lines(self, small_loops))

    def summary_row(self, tag: str | None = None) -> list[str]:
        """Return one cell per entry of SUMMARY_COLUMNS; `-` where there is no model."""
        kernel, model, resources = self.kernel, self.model, self.resources
        cycles = model.cycles if model else {}
        cell = lambda value: "-" if value is None else str(round(value))
        role = "correction" if "correction_issue_min" in cycles else "dq-reduce"
        low, high = cycles.get(f"{role}_issue_min"), cycles.get(f"{role}_issue_max")
        loop = softmax_loop(kernel)
        latency = model.p_latency if model else None
        return [
            tag or kernel.name[:48],
            str(resources.registers),
            str(resources.stack_bytes),
            f"{self.spill_instructions}/{self.spill_instructions_in_loops}",
            str(kernel.uniform_spill_moves),
            str(len(kernel.instructions)),
            str(len(loop.instructions)) if loop else "-",
            f"{model.slots_per_element:.2f}" if model else "-",
            f"{model.exp2_hardware}+{model.exp2_emulated}" if model else "-",
            str(loop.live_registers[0]) if loop else "-",
            *(cell(cycles.get(f"softmax_{name}")) for name in ("issue", "mufu", "fma", "alu")),
            f"{cell(low)}..{cell(high)}" if low is not None else "-",
            f"{latency[0]}..{latency[1]}" if latency else "-",
            cell(model.replay_one_warp if model else None),
            cell(model.replay_two_warps if model else None),
            cell(cycles.get("smem")),
            cell(cycles.get("tensor")),
            model.bound_by if model else "-",
            f"{model.ceiling:.2f}" if model else "-",
        ]


def _counted(counts: collections.Counter) -> str:
    return " ".join(f"{name}={counts[name]}" for name in CLASS_NAMES if counts[name])


def _text_lines(report: SassReport, small_loops: bool):
    kernel, resources = report.kernel, report.resources
    yield f"kernel   {kernel.name[:140]}"
    yield (
        f"         {kernel.arch}, {resources.registers} registers/thread at launch,"
        f" {resources.threads} threads/CTA, stack {resources.stack_bytes} B,"
        f" static smem {resources.static_shared_bytes} B, ptxas {resources.ptxas}"
    )
    yield (
        f"         {len(kernel.instructions)} instructions, {kernel.blocks} basic blocks,"
        f" {kernel.wait_loops} wait loops; LDL+STL={report.spill_instructions},"
        f" uniform-register spill moves={kernel.uniform_spill_moves}"
    )
    yield f"all      {_counted(kernel.counts)}"
    yield "-- warp-role regions (code dominated by a setmaxnreg)"
    for region in kernel.regions:
        general, uniform = region.live_registers
        yield (
            f"  @{max(region.start, 0):05x} {region.role:<15} budget={region.budget or '-'!s:<4}"
            f" live<={general:3d} (uniform {uniform:2d})  n={region.instructions:<5d}"
            f" {_counted(region.counts)}"
        )
    yield "-- loops (own instructions; always = every iteration, cond = behind a branch)"
    for loop in kernel.loops:
        if small_loops or loop.role != "other" or len(loop.instructions) >= 24:
            yield from _loop_lines(loop, kernel.arch)
    if report.model:
        yield "-- model (per tile, per SM; derived lower bounds)"
        for name, value in dataclasses.asdict(report.model).items():
            yield f"  {name:<25} {round(value, 3) if isinstance(value, float) else value}"


def _loop_lines(loop: Loop, arch: str):
    indent = "  " * (loop.depth + 1)
    general, uniform = loop.live_registers
    yield (
        f"{indent}@{loop.first:05x}-{loop.last:05x} {loop.role:<10}"
        f" {'inner' if loop.innermost else 'outer'} always={len(loop.always):<4d}"
        f" cond={len(loop.conditional):<4d} live<={general}/{uniform}  {_counted(loop.counts)}"
    )
    if loop.innermost and loop.role in ("softmax", "mainloop", "fma"):
        pipes = pipe_cycles(loop.instructions, arch)
        hardware, emulated = exp2_split(loop.instructions)
        yield (
            f"{indent}   pipe cycles per warp-iteration: issue {pipes['issue']}, mufu"
            f" {pipes['mufu']}, fma {pipes['fma']}, alu {pipes['alu']}; exp2 hw {hardware} emulated"
            f" {emulated}; LDTM regs {tmem_registers(loop.instructions, 'LDTM')}"
            f" STTM regs {tmem_registers(loop.instructions, 'STTM')}"
        )


def reports(
    cubin, *, tile_m=128, tile_n=128, d_qk=128, d_v=None, kind="auto", trips=0, key_tiles=1
):
    """Return a list with the SassReport of every kernel in `cubin` (bytes or a path).

    `tile_m` x `tile_n` are the query rows and keys of one CTA's tile of scores, `d_qk` and `d_v`
    (default `d_qk`) the head dimensions, `kind` "fwd", "bwd" or "auto", `trips` and `key_tiles` as
    in `Tile`; they enter the model only.
    Raises MissingTool, ToolFailed for what is not a cubin, ValueError for a bad `kind`.
    """
    tile = Tile(tile_m, tile_n, d_qk, d_qk if d_v is None else d_v, kind, trips, key_tiles)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(cubin, (bytes, bytearray)):
            path = pathlib.Path(folder) / "kernel.cubin"
            path.write_bytes(cubin)
        else:
            path = pathlib.Path(cubin)
        listing = _Listing(_disassemble(str(path)))
        resources = _resources(str(path))
    found = []
    for name, instructions in listing.functions.items():
        if instructions:
            kernel = analyse(name, listing.arch, instructions, listing.labels[name])
            model = tile_model(kernel, tile)
            found.append(SassReport(kernel, resources.get(name, Resources()), tile, model))
    return found


def report(cubin, **tile):
    """Return the SassReport of the only kernel in `cubin` (bytes or a path); tile: of `reports`.

    Raises ValueError if the cubin holds no kernel or several, naming them.
    """
    found = reports(cubin, **tile)
    if len(found) != 1:
        names = ", ".join(one.kernel.name for one in found) or "none"
        raise ValueError(f"the cubin must hold one kernel, it holds: {names}; use reports()")
    return found[0]


def main(arguments: list[str] | None = None) -> int:
    """Print the reports of cubin files; returns a process exit code."""
    parser = argparse.ArgumentParser(prog="flash_ladder.common.sass", description=__doc__)
    parser.add_argument("cubin", nargs="+")
    parser.add_argument("--tile-m", type=int, default=128, help="query rows of a tile")
    parser.add_argument("--tile-n", type=int, default=128, help="keys of a tile")
    parser.add_argument("--d-qk", type=int, default=128, help="head dimension of Q and K")
    parser.add_argument("--d-v", type=int, help="head dimension of V (default: that of Q)")
    parser.add_argument("--kind", choices=["auto", "fwd", "bwd"], default="auto")
    parser.add_argument("--summary", action="store_true", help="one markdown row per kernel")
    given = parser.parse_args(arguments)
    tile = {"tile_m": given.tile_m, "tile_n": given.tile_n, "d_qk": given.d_qk, "d_v": given.d_v}
    try:
        found = [one for path in given.cubin for one in reports(path, **tile, kind=given.kind)]
    except (MissingTool, ToolFailed) as error:
        print(error, file=sys.stderr)
        return 1
    if given.summary:
        print("| " + " | ".join(SUMMARY_COLUMNS) + " |\n|" + "---|" * len(SUMMARY_COLUMNS))
        for one in found:
            print("| " + " | ".join(one.summary_row()) + " |")
    else:
        print(("\n" + "=" * 100 + "\n").join(one.text() for one in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
