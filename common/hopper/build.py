# SPDX-License-Identifier: Apache-2.0
"""Building a runnable object from a kernel compiled for sm_100a and rewritten for sm_90a.

The DSL's own host code launches it: the compiled module's machine code is exchanged for ours and
the object is exported again. The object holds a constant instead of the address of the engine's
control block; `load` puts the address in. Runs: host, no GPU needed to build.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..ptx import ptx_hash, read
from .engine import MAGIC, engine_ptx
from .rewrite import ENGINE_THREADS, TARGET, rewrite, rewriter_hash

MAGIC_BYTES = MAGIC.to_bytes(8, "little")
_OUR_OPTIONS = re.compile(r"--(gpu-arch|dump-dir) \S+|--keep-(ptx|cubin)|--enable-tvm-ffi")


class AssemblerMissing(RuntimeError):
    """Neither ptxas nor a CUDA driver is here to turn PTX into machine code."""


@dataclass(frozen=True)
class HopperObject:
    """A rewritten kernel on disk.

    folder holds kernel.o (with MAGIC for the control block), kernel.ptx (as compiled for sm_100a,
    what evidence hashes), rewritten.ptx, and facts.json.
    """

    folder: pathlib.Path
    symbol: str
    ptx_sha256: str
    rewriter_sha256: str
    uses_engine: bool
    log: bool

    @property
    def ptx(self) -> str:
        """The kernel's PTX for sm_100a, to name a fault's line."""
        return (self.folder / "kernel.ptx").read_text()

    def load(self, control_address: int) -> Callable:
        """The launch function, with the engine's control block at `control_address`."""
        from cutlass.cute.runtime import load_module

        code = (self.folder / "kernel.o").read_bytes()
        if code.count(MAGIC_BYTES) != int(self.uses_engine):
            raise RuntimeError(f"{self.folder}: the object has no place for the control block")
        with tempfile.TemporaryDirectory(prefix="flash-ladder-") as scratch:
            path = pathlib.Path(scratch) / "kernel.o"
            path.write_bytes(code.replace(MAGIC_BYTES, control_address.to_bytes(8, "little")))
            module = load_module(str(path), enable_tvm_ffi=True)
            return getattr(module, self.symbol)


def read_object(folder: pathlib.Path) -> HopperObject:
    """The object that `build` wrote to `folder`. Raises FileNotFoundError, ValueError."""
    facts = json.loads((folder / "facts.json").read_text())
    return HopperObject(folder, **facts)


def build(
    function: Callable,
    arguments: tuple,
    folder: pathlib.Path,
    symbol: str,
    log: bool = False,
    **keywords,
) -> HopperObject:
    """Compile a `@cute.jit` function for sm_100a, rewrite its kernel, write a runnable object.

    Args: function with one kernel launch; arguments and keywords as for `cute.compile`; folder
    exists; symbol names the exported function; log: as for `rewrite`. Raises HopperRewriteError,
    AssemblerMissing.
    """
    compiled = _compile(function, arguments, keywords, folder, 0)
    ptx = compiled.__ptx__.rstrip("\0")
    uses_engine = "tcgen05." in ptx
    if uses_engine:
        compiled = _with_engine_threads(function, arguments, keywords, folder, ptx)
    text = rewrite(ptx, engine_ptx() if uses_engine else "", log)
    (folder / "kernel.ptx").write_text(ptx)
    (folder / "rewritten.ptx").write_text(text)
    exchange_binary(compiled.ir_module, assemble(text))
    compiled.export_to_c(str(folder / "kernel.o"), symbol)
    facts = {
        "symbol": symbol,
        "ptx_sha256": ptx_hash(ptx),
        "rewriter_sha256": rewriter_hash(),
        "uses_engine": uses_engine,
        "log": log and uses_engine,
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1))
    return HopperObject(folder, **facts)


def _compile(function, arguments: tuple, keywords: dict, folder: pathlib.Path, extra: int):
    import cutlass.cute as cute

    dump = folder / f"dump{extra}"
    dump.mkdir()
    keywords = dict(keywords)
    given = _OUR_OPTIONS.sub("", keywords.pop("options", ""))
    options = f"--gpu-arch sm_100a --keep-ptx --enable-tvm-ffi --dump-dir {dump} {given}"
    with more_threads(extra), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")  # meant to be unrolled
        compiled = cute.compile(function, *arguments, options=options, **keywords)
        compiled.__ptx__  # noqa: B018  read before the folder goes
    shutil.rmtree(dump)
    return compiled


@contextlib.contextmanager
def more_threads(extra: int) -> Iterator[None]:
    """While open, kernels are launched with `extra` more threads in x than their code asks for."""
    from cutlass.base_dsl.dsl import BaseDSL

    config = BaseDSL.LaunchConfig
    original = config.__post_init__

    def with_more(self) -> None:
        original(self)
        self.block[0] = self.block[0] + extra
        if self.has_max_number_threads():
            self.max_number_threads[0] = self.max_number_threads[0] + extra

    config.__post_init__ = with_more
    try:
        yield
    finally:
        config.__post_init__ = original


def _with_engine_threads(function, arguments, keywords, folder, ptx: str):
    """The same compiled again, for its host code, which launches with the engine's threads.

    Its device code is not used: knowing the number of threads, the compiler makes it differ.
    """
    compiled = _compile(function, arguments, keywords, folder, ENGINE_THREADS)
    ours, theirs = (read(text).entries() for text in (ptx, compiled.__ptx__))
    if list(ours) != list(theirs):
        raise RuntimeError(f"two compilations made {list(ours)} and {list(theirs)}")
    return compiled


def exchange_binary(module, cubin: bytes) -> None:
    """Put `cubin` in the place of the machine code in a compiled MLIR module (one kernel)."""
    from cutlass._mlir import ir

    with module.context, ir.Location.unknown(module.context):
        found = [
            operation.operation
            for operation in module.body.operations
            if operation.operation.name == "llvm.mlir.global"
            and ir.StringAttr(operation.operation.attributes["sym_name"]).value.endswith("_binary")
        ]
        if len(found) != 1:
            raise RuntimeError(f"expected one embedded binary, found {len(found)}")
        escaped = "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}"
            for byte in cubin
        )
        found[0].attributes["value"] = ir.Attribute.parse(f'"{escaped}"')
        array = ir.Type.parse(f"!llvm.array<{len(cubin)} x i8>")
        found[0].attributes["global_type"] = ir.TypeAttr.get(array)


def assemble(ptx: str) -> bytes:
    """Machine code for sm_90a: by ptxas when one is found, else by the CUDA driver."""
    from ..sass import MissingTool, find_tool

    try:
        return _by_ptxas(find_tool("ptxas"), ptx)
    except MissingTool:
        return _by_driver(ptx)


def _by_ptxas(ptxas: str, ptx: str) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        source, target = pathlib.Path(scratch) / "k.ptx", pathlib.Path(scratch) / "k.cubin"
        source.write_text(ptx)
        command = [ptxas, f"-arch={TARGET}", "-O3", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refused the rewritten kernel: {done.stderr[:2000]}")
        return target.read_bytes()


def _by_driver(ptx: str) -> bytes:
    """cuLink: the driver's own assembler. Needs a GPU of compute capability 9.0."""
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise AssemblerMissing("pip install nvidia-cuda-nvcc or cuda-bindings") from missing

    def checked(result):
        error, *values = result
        if error != driver.CUresult.CUDA_SUCCESS:
            raise AssemblerMissing(f"the CUDA driver cannot assemble PTX here: {error.name}")
        return values[0] if values else None

    checked(driver.cuInit(0))
    link = checked(driver.cuLinkCreate(0, [], []))
    text = ptx.encode() + b"\0"
    kind = driver.CUjitInputType.CU_JIT_INPUT_PTX
    checked(driver.cuLinkAddData(link, kind, text, len(text), b"kernel.ptx", 0, [], []))
    address, size = driver.cuLinkComplete(link)[1:]
    import ctypes

    cubin = ctypes.string_at(int(address), int(size))
    checked(driver.cuLinkDestroy(link))
    return cubin
