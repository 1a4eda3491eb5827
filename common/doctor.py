# SPDX-License-Identifier: Apache-2.0
"""What this machine can do for the project, and what would unlock the rest. Runs: host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import dataclass

from .compile import DslMissing, cache_folder, require_dsl, versions


@dataclass(frozen=True)
class Ability:
    """One line of the report: found or not, what was found, and what it unlocks or needs."""

    name: str
    found: bool
    detail: str
    unlocks: str


def abilities() -> list[Ability]:
    """Everything that decides what runs here. Nothing is compiled or launched."""
    return [_python(), _torch(), _dsl(), _disassembler(), _hopper(), *_gpus(), *_optional()]


def _python() -> Ability:
    version = sys.version_info
    found = (3, 10) <= version[:2] <= (3, 13)
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Ability("Python 3.10 to 3.13", found, system, "everything")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Ability:
    version = _installed("torch")
    return Ability("torch", version is not None, version or "not installed", "oracle, SM model")


def _dsl() -> Ability:
    try:
        require_dsl()
    except DslMissing as missing:
        return Ability("CuTe DSL", False, str(missing), "compiling for sm_100a")
    found = versions()
    libraries = [name.rpartition("-")[2] for name in found if "-libs-cu" in name]
    detail = f"{found.get('nvidia-cutlass-dsl')} ({', '.join(libraries)}); cache {cache_folder()}"
    return Ability("CuTe DSL", True, detail, "compiling for sm_100a, without a GPU")


def _disassembler() -> Ability:
    from .sass import MissingTool, find_tool

    try:
        tool = find_tool("nvdisasm")
    except MissingTool as missing:
        return Ability("nvdisasm", False, str(missing), "facts from machine code")
    return Ability("nvdisasm", True, tool, "facts from machine code")


def _gpus() -> list[Ability]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    from .launch import ARCH_OF

    if not torch.cuda.is_available():
        detail = "none visible" if torch.version.cuda else "none (torch is a CPU build)"
        return [
            Ability(
                "GPU", False, detail, "sm_80: stage 01; sm_90: all, rewritten; sm_100: all natively"
            )
        ]
    found = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}"
        found.append(Ability(f"GPU {index}", capability in ARCH_OF, name, _runs(capability)))
    return found


def _runs(capability: tuple[int, int]) -> str:
    """What a GPU of this compute capability is good for."""
    if capability[0] == 10:
        return "all stages natively"
    if capability == (9, 0):
        return "stage 01 natively, sm_100a code rewritten"
    return "stage 01 natively"


def _hopper() -> Ability:
    """What building for execution on Hopper needs."""
    from .hopper.engine import EngineCompilerMissing, find_compiler
    from .sass import MissingTool, find_tool

    unlocks = "building for execution on Hopper"
    try:
        _, version = find_compiler()
        return Ability("NVRTC and ptxas", True, f"{version}; {find_tool('ptxas')}", unlocks)
    except (EngineCompilerMissing, MissingTool) as missing:
        return Ability("NVRTC and ptxas", False, str(missing), unlocks)


def _optional() -> list[Ability]:
    rows = (
        ("safetensors", "--qkv FILE.safetensors"),
        ("pytest", "make test, pytest stages/01"),
        ("mkdocs-material", "make docs"),
    )
    return [
        Ability(name, bool(_installed(name)), _installed(name) or f"pip install {name}", unlocks)
        for name, unlocks in rows
    ]
