# SPDX-License-Identifier: Apache-2.0
"""Compiling the kernels of a stage for any architecture, with or without that GPU; cached.

The result holds PTX, cubin, compile times and an object file that runs on a matching GPU. The disk
cache (`FLASH_LADDER_CACHE`, else `$XDG_CACHE_HOME/flash-ladder`, else `~/.cache/flash-ladder`) is
keyed by the kernel's sources, the DSL's version, the architecture and the configuration; entries
appear by an atomic rename, so processes may compile at the same time. Runs: host.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from .stage import PACKAGE, KernelSource

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
DSL_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
FILES = ("kernel.ptx", "kernel.cubin", "kernel.o")
_MEMORY: dict[str, CompiledKernel] = {}
_ANNOUNCE: contextvars.ContextVar[Callable[[CompileKey], None] | None] = contextvars.ContextVar(
    "announce", default=None
)
_LOCK = threading.Lock()  # the DSL traces one kernel at a time


class DslMissing(RuntimeError):
    """The CuTe DSL is not installed, or does not exist for this system."""


class CacheError(OSError):
    """Compiled kernels cannot be kept; the message names the folder and how to change it."""


@dataclass(frozen=True)
class CompileKey:
    """What is compiled: stage number, target architecture, dtype name, head dim, part or ""."""

    stage: int
    arch: str
    dtype: str
    head_dim: int
    part: str = ""

    @classmethod
    def of(cls, source: KernelSource, arch: str, dtype: str, head_dim: int) -> CompileKey:
        """The key of a stage's or a part's kernel."""
        return cls(source.number, arch, dtype, head_dim, source.name)

    @property
    def name(self) -> str:
        """For file names and tables: `01-sm_100a-bfloat16-d128`, `07-preprocess-sm_100a-…`."""
        part = f"-{self.part}" if self.part else ""
        return f"{self.stage:02d}{part}-{self.arch}-{self.dtype}-d{self.head_dim}"


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel. Seconds are those of the compile that made it, also from the cache.

    smem_bytes is the dynamic shared memory of its launch; dsl the versions that compiled it.
    """

    key: CompileKey
    folder: pathlib.Path
    wall_seconds: float
    cpu_seconds: float
    smem_bytes: int
    dsl: dict
    from_cache: bool

    @functools.cached_property
    def ptx(self) -> str:
        """The PTX text that was assembled."""
        return (self.folder / "kernel.ptx").read_text()

    @functools.cached_property
    def cubin(self) -> bytes:
        """The machine code."""
        return (self.folder / "kernel.cubin").read_bytes()

    @functools.cached_property
    def function(self):
        """Callable on CUDA tensors, with the arguments of `arguments` but for the stream."""
        from cutlass.cute.runtime import load_module

        module = load_module(str(self.folder / "kernel.o"), enable_tvm_ffi=True)
        return getattr(module, _symbol(self.key))


class announced:
    """While open, `tell` is called before each compilation that no cache spares, in this thread."""

    def __init__(self, tell: Callable[[CompileKey], None]):
        self._tell = tell

    def __enter__(self) -> None:
        self._token = _ANNOUNCE.set(self._tell)

    def __exit__(self, *_) -> None:
        _ANNOUNCE.reset(self._token)


def announce(key: CompileKey) -> None:
    """Tell who wants to know that a compilation begins."""
    tell = _ANNOUNCE.get()
    if tell:
        tell(key)


def require_dsl() -> None:
    """Raise `DslMissing`, saying what to do, unless the CuTe DSL can be imported."""
    if importlib.util.find_spec("cutlass") and importlib.util.find_spec("tvm_ffi"):
        return
    if platform.system() != "Linux":
        raise DslMissing(
            f"the CuTe DSL exists for Linux only and this is {platform.system()}: models, plans "
            "and pages work here, compiling does not"
        )
    raise DslMissing(
        "compiling needs the CuTe DSL: pip install nvidia-cutlass-dsl==4.8.1 apache-tvm-ffi"
    )


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept."""
    given = os.environ.get("FLASH_LADDER_CACHE")
    if given:
        return pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "flash-ladder"


def sources(stage: KernelSource) -> dict[str, bytes]:
    """Files that the kernel is made of: `kernel.py` and what it imports from this package."""
    package = tuple(stage.tag.split("/"))
    outer = (stage.folder, stage.folder.parent)[len(package) - 1]
    root = {package[0]: outer, "common": pathlib.Path(__file__).parent}
    found: dict[str, bytes] = {}
    todo = [(*package, "kernel")]
    while todo:
        module = todo.pop()
        name, path = "/".join(module), _source_file(root, module)
        if name in found or path is None:
            continue
        found[name] = path.read_bytes()
        package = module if path.name == "__init__.py" else module[:-1]
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.ImportFrom) and node.level:
                todo += _imported(package, node)
    return dict(sorted(found.items()))


def _source_file(root: dict[str, pathlib.Path], module: tuple[str, ...]) -> pathlib.Path | None:
    """The file of a module inside one of the folders of `root`, or None."""
    if len(module) < 2 or module[0] not in root:
        return None
    path = root[module[0]].joinpath(*module[1:])
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imported(package: tuple[str, ...], node: ast.ImportFrom) -> list[tuple[str, ...]]:
    """Modules that a relative import in `package` may load, outer packages first."""
    words = node.module.split(".") if node.module else []
    base = (*package[: len(package) - node.level + 1], *words)
    return [base[:end] for end in range(1, len(base) + 1)] + [
        (*base, alias.name) for alias in node.names
    ]


def versions() -> dict[str, str]:
    """Installed versions of what compiles, by package."""
    found = {}
    for name in DSL_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(stage: KernelSource, key: CompileKey) -> str:
    """Cache key: sha256 over sources, versions, host machine and configuration."""
    digest = hashlib.sha256()
    parts = [asdict(key), versions(), platform.machine(), 2]  # 2: layout of a cache entry
    digest.update(json.dumps(parts, sort_keys=True).encode())
    for name, text in sources(stage).items():
        digest.update(f"\0{name}\0".encode() + text)
    return digest.hexdigest()


def compile_stage(
    stage: KernelSource,
    *,
    arch: str = "sm_100a",
    dtype: str = "bfloat16",
    head_dim: int = 128,
) -> CompiledKernel:
    """Compile one configuration of a stage or part, or take it from memory or disk.

    Raises ValueError for an architecture, dtype or head dim that it does not have,
    `PlanError` for resources that cannot work, `DslMissing` without the DSL, `CacheError` when the
    result cannot be kept.
    """
    key = CompileKey.of(stage, arch, dtype, head_dim)
    _check_key(stage, key)
    stage.config.plan(head_dim).check()
    require_dsl()
    mark = fingerprint(stage, key)
    with _LOCK:
        if mark not in _MEMORY:
            folder = cache_folder() / f"{key.name}-{mark[:24]}"
            _MEMORY[mark] = _read(key, folder) or _build_into(stage, key, folder)
        return _MEMORY[mark]


def _check_key(stage: KernelSource, key: CompileKey) -> None:
    envelope = stage.config.ENVELOPE
    allowed = {"arch": stage.config.ARCHS, "dtype": envelope.dtypes, "head_dim": envelope.head_dims}
    for field, values in allowed.items():
        if getattr(key, field) not in values:
            raise ValueError(
                f"stage {stage.tag} compiles for {field} {', '.join(map(str, values))}; "
                f"got {getattr(key, field)}"
            )


def _symbol(key: CompileKey) -> str:
    return f"{PACKAGE}_{key.name}".replace("-", "_")


def _read(key: CompileKey, folder: pathlib.Path) -> CompiledKernel | None:
    """A cache entry, or None when there is none or its files are not what was written."""
    try:
        entry = json.loads((folder / "entry.json").read_text())
        for name, digest in entry.pop("sha256").items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                return None
        return CompiledKernel(key, folder, from_cache=True, **entry)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build_into(stage: KernelSource, key: CompileKey, folder: pathlib.Path) -> CompiledKernel:
    """Compile beside `folder` and rename, so that other processes see all of it or nothing."""
    announce(key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    try:
        built = _build(stage, key, scratch)
        for _ in range(2):
            try:
                scratch.rename(folder)
                return replace(built, folder=folder)
            except OSError as error:  # another process was first, or a damaged entry is in the way
                existing = _read(key, folder)
                if existing:
                    return existing
                reason = error
                _remove(folder)
        raise _cannot_write(folder, reason)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove(path: pathlib.Path) -> None:
    """Take away a file or a folder, as far as that is allowed."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _cannot_write(path: pathlib.Path, reason: OSError) -> CacheError:
    words = reason.strerror or reason
    return CacheError(
        f"compiled kernels are kept on disk, and {path} cannot be written ({words}); name another "
        "folder in the environment variable FLASH_LADDER_CACHE"
    )


def _build(stage: KernelSource, key: CompileKey, folder: pathlib.Path) -> CompiledKernel:
    """Trace, compile and write one entry into the empty `folder`."""
    import cutlass.cute as cute

    function = entry_function(stage)
    dump = folder / "dump"
    dump.mkdir()
    options = f"--gpu-arch {key.arch} --keep-ptx --keep-cubin --enable-tvm-ffi --dump-dir {dump}"
    wall, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")  # meant to be unrolled
        compiled = cute.compile(function, *stand_ins(stage, key), options=options)
    entry = {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "smem_bytes": _launch_smem_bytes(str(compiled.ir_module)),
        "dsl": versions(),
    }
    (folder / "kernel.ptx").write_text(compiled.__ptx__.rstrip("\0"))
    (folder / "kernel.cubin").write_bytes(compiled.__cubin__)
    compiled.export_to_c(str(folder / "kernel.o"), _symbol(key))
    shutil.rmtree(dump)
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    (folder / "entry.json").write_text(json.dumps({**entry, "sha256": sums}, indent=1))
    return CompiledKernel(key, folder, from_cache=False, **entry)


def _launch_smem_bytes(host_ir: str) -> int:
    """Dynamic shared memory of the only launch: the third field of its cudaLaunchConfig_t."""
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    field = rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {config}"
    fields = set(re.findall(field, host_ir))
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", host_ir))
    stores = re.findall(r"llvm\.store (%\w+), (%\w+) : i64, !llvm\.ptr", host_ir)
    sizes = {int(constants[value]) for value, place in stores if place in fields}
    if len(sizes) != 1:
        raise RuntimeError(f"expected one launch with one shared-memory size; found {sizes}")
    return sizes.pop()


def entry_function(stage: KernelSource):
    """The `@cute.jit` function that is compiled: of kernel.py the one named after its kind."""
    return getattr(stage.kernel, stage.kind)


def stand_ins(stage: KernelSource, key: CompileKey) -> tuple:
    """`arguments` of the kernel of a stage or part."""
    return arguments(stage.kind, key, masks=stage.config.ENVELOPE.masks)


def arguments(kind: str, key: CompileKey, masks: bool = False) -> tuple:
    """Stand-ins for what the function of a kind takes: every size but head dim is dynamic.

    attention    mQ, mK, mV, mO, mLSE, scale_log2, stream
    preprocess   mO, mdO, mLSE, mdLSE, mStats, mdQ_accum, stream
    backward     mQ, mK, mV, mdO, mStats, mdQ_accum, mdK, mdV, scale_log2, softmax_scale, stream
    postprocess  mdQ_accum, mdQ, softmax_scale, stream

    mQ, mO, mdO, mdQ (b, sq, h, d) and mK, mV, mdK, mdV (b, sk, h, d) 16-bit: strides are 64-bit
    and, along batch, sequence and head, multiples of 16 bytes. With `masks`, mK and mV may have
    fewer heads, each for as many of the others in turn. mLSE and mdLSE (b, h, sq) Float32,
    natural log; mdLSE with any strides, 0 as well. mStats (b, h, tiles, 2, 128) Float32 by tile of
    128 query rows: LSE * log2(e), then D. mdQ_accum (b, sq, h, d) Float32, 16-byte rows; scales
    Float32. With `masks`, before the stream: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    Int64 addresses, batch, max_seqlen_q, max_seqlen_k, left, right Int32; of a preprocess and a
    postprocess those of q alone. See `masks.Mask.arguments`. Raises ValueError for another kind.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    batch, seqlen_q, seqlen_k, heads, tiles = (cute.sym_int() for _ in range(5))
    heads_k = cute.sym_int() if masks else heads  # those kernels read grouped heads
    narrow = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[key.dtype]
    scale, far = cutlass.Float32(1.0), cute.sym_int64  # far: a stride

    def rows(seqlen, dtype=narrow, own=heads):
        step = 128 // dtype.width  # elements of 16 bytes
        shape = (batch, seqlen, own, key.head_dim)
        strides = tuple(far(divisibility=step) for _ in range(3))
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    def statistic(*strides):
        shape = (batch, heads, seqlen_q)
        return make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=4)

    def both():
        shape, strides = (batch, heads, tiles, 2, 128), (far(256), far(256), 256, 128, 1)
        return make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=16)

    def accumulator():
        return rows(seqlen_q, cutlass.Float32)

    query, keys = (lambda: rows(seqlen_q)), (lambda: rows(seqlen_k, own=heads_k))
    of_keys = rows(seqlen_k), rows(seqlen_k)
    lse, dlse = statistic(far(), far(), 1), statistic(far(), far(), far())
    of_backward = query(), keys(), keys(), query(), both(), accumulator(), *of_keys
    of_kind = {
        "attention": (query(), keys(), keys(), query(), lse, scale),
        "preprocess": (query(), query(), lse, dlse, both(), accumulator()),
        "backward": (*of_backward, scale, scale),
        "postprocess": (accumulator(), query(), scale),
    }
    if kind not in of_kind:
        raise ValueError(f"a kernel is one of {', '.join(of_kind)}; got {kind!r}")
    numbers = ()
    if masks:
        of_q = kind in ("preprocess", "postprocess")
        addresses, sizes = (2, 2) if of_q else (4, 5)
        numbers = *[cutlass.Int64(0)] * addresses, *[cutlass.Int32(1)] * sizes
    return (*of_kind[kind], *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))
