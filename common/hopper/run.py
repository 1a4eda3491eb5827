# SPDX-License-Identifier: Apache-2.0
"""Running a stage's rewritten kernel on an sm_90 GPU: functional, and slow. Runs: host."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import tempfile
import threading
import warnings
from dataclasses import dataclass

import torch

from ..compile import (
    CompileKey,
    announce,
    cache_folder,
    entry_function,
    fingerprint,
    require_dsl,
    sources,
    stand_ins,
)
from ..stage import KernelSource
from .build import HopperObject, build, read_object
from .rewrite import rewriter_hash
from .session import Session

_ONE_AT_A_TIME = threading.Lock()  # a session has one fault record and one set of slots
ARTEFACTS = "FLASH_LADDER_ARTEFACTS"  # folder that `flash-ladder pack` wrote
SOURCES = "sources.sha256"  # file of an artefact: what its kernel was made of


class FunctionalOnly(UserWarning):
    """The kernel runs with tensor memory in software: its results count, its speed does not."""


@functools.cache
def session(device_index: int) -> Session:
    """The engine's memory on one GPU, made once a process."""
    return Session(torch.device("cuda", device_index))


@dataclass(frozen=True)
class HopperKernel:
    """A rewritten kernel, loaded. `function` takes what a `CompiledKernel`'s does."""

    object: HopperObject
    device_index: int

    @functools.cached_property
    def ptx(self) -> str:
        """The sm_100a PTX that was rewritten."""
        return self.object.ptx

    @functools.cached_property
    def _launch(self):
        self.ptx  # noqa: B018  read while the folder is certainly there
        return self.object.load(session(self.device_index).address)

    def function(self, *arguments) -> None:
        """Launch, wait for the end, and raise HopperExecutionError if the engine saw a fault."""
        engine = session(self.device_index)
        launch = self._launch
        initialised = torch.cuda.is_initialized()
        if initialised and torch.cuda.is_current_stream_capturing():  # nothing can wait, or look
            engine.reset()
            launch(*arguments)
            return
        with _ONE_AT_A_TIME:
            engine.reset()
            try:
                launch(*arguments)
                torch.cuda.synchronize(self.device_index)
            finally:
                engine.check(self.ptx)


def hopper_kernel(
    stage: KernelSource, dtype: str, head_dim: int, device: torch.device, log: bool = False
) -> HopperKernel:
    """The sm_100a kernel of a stage or part, rewritten for a Hopper GPU; built once, kept on disk.

    log: with the executed log (`Session.settings`). Looks in the folder that the environment
    variable FLASH_LADDER_ARTEFACTS names, then in the cache. Warns once a process that this is
    functional execution.
    """
    _warn()
    key = CompileKey.of(stage, "sm_100a", dtype, head_dim)
    packed = packed_folder(key, log)
    found = _read_packed(stage, packed) if packed else _read_or_build(stage, key, log)
    index = torch.cuda.current_device() if device.index is None else device.index
    return loaded(found, index)


def _read_packed(stage: KernelSource, folder: pathlib.Path) -> HopperObject:
    """An artefact; ValueError when it was packed from other sources than today's."""
    if (folder / SOURCES).read_text() != _sources_hash(stage):
        raise ValueError(f"{folder} was packed from other sources of {stage!r}: pack it again")
    return read_object(folder)


def _read_or_build(stage: KernelSource, key: CompileKey, log: bool) -> HopperObject:
    folder = cache_folder() / f"hopper-{artefact_name(key, log)}-{_mark(stage, key)}"
    try:
        return read_object(folder)
    except (FileNotFoundError, ValueError, TypeError):  # TypeError: of an earlier version
        return _build_into(stage, key, folder, log)


def _sources_hash(stage: KernelSource) -> str:
    parts = [name.encode() + b"\0" + text for name, text in sources(stage).items()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@functools.cache
def loaded(found: HopperObject, index: int) -> HopperKernel:
    """A runnable kernel; one for each object and GPU in a process.

    Raises ValueError for an object that another version of this package made.
    """
    if found.rewriter_sha256 != rewriter_hash():
        raise ValueError(f"{found.folder} is of another version of flash-ladder: pack it again")
    return HopperKernel(found, index)


@functools.cache
def _warn() -> None:
    warnings.warn(
        "Hopper GPU: this sm_100a kernel runs rewritten, with tensor memory in software. Its "
        "results are real; its speed says nothing about Blackwell.",
        FunctionalOnly,
        stacklevel=4,
    )


def artefact_name(key: CompileKey, log: bool) -> str:
    """Folder of an artefact in the folder of all."""
    return f"{key.name}-log" if log else key.name


def packed_folder(key: CompileKey, log: bool = False) -> pathlib.Path | None:
    """Where an ahead-of-time artefact for `key` lies, or None."""
    root = os.environ.get(ARTEFACTS)
    folder = pathlib.Path(root) / artefact_name(key, log) if root else None
    return folder if folder and (folder / "facts.json").is_file() else None


def _mark(stage: KernelSource, key: CompileKey) -> str:
    return hashlib.sha256((fingerprint(stage, key) + rewriter_hash()).encode()).hexdigest()[:24]


def _build_into(
    stage: KernelSource, key: CompileKey, folder: pathlib.Path, log: bool
) -> HopperObject:
    """Build beside `folder` and rename: other processes see all of it or nothing."""
    announce(key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    try:
        pack(stage, key, scratch, log)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        try:
            scratch.rename(folder)
        except OSError:  # another process was first
            pass
        return read_object(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def pack(
    stage: KernelSource, key: CompileKey, folder: pathlib.Path, log: bool = False
) -> HopperObject:
    """Compile, rewrite and write a runnable object to the existing, empty `folder`. No GPU."""
    require_dsl()
    symbol = f"flash_ladder_{artefact_name(key, log)}".replace("-", "_")
    (folder / SOURCES).write_text(_sources_hash(stage))
    return build(entry_function(stage), stand_ins(stage, key), folder, symbol, log)
