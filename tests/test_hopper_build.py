# SPDX-License-Identifier: Apache-2.0
"""Objects that run on Hopper, built without a GPU: what they hold and where they come from."""

import concurrent.futures
import dataclasses
import re
import time

import pytest
from flash_ladder.common.compile import CompileKey, compile_stage
from flash_ladder.common.hopper import build as building
from flash_ladder.common.hopper import run
from flash_ladder.common.hopper.engine import ENGINE_THREADS, EngineCompilerMissing
from flash_ladder.common.hopper.redirect import compile_replaced
from flash_ladder.common.ptx import ptx_hash
from flash_ladder.common.sass import MissingTool, find_tool

pytest.importorskip("cutlass", reason="compiling needs the CuTe DSL")
from tests.kernels import KERNELS

KEY = CompileKey(1, "sm_100a", "float16", 64)


@pytest.fixture(scope="module")
def gemm(tmp_path_factory):
    """A kernel with tensor memory, built; and its PTX as compiled the ordinary way."""
    folder = tmp_path_factory.mktemp("gemm")
    made = []

    def make(function, arguments, keywords):
        made.append(building.build(function, arguments, folder, "gemm", **keywords))

    try:
        with compile_replaced(make):
            KERNELS["gemm"].build(n=64)
    except (building.AssemblerMissing, EngineCompilerMissing) as missing:
        pytest.skip(str(missing))
    return made[0], KERNELS["gemm"].build(n=64).__ptx__


@pytest.fixture(scope="module")
def packed(tmp_path_factory, stage):
    """Stage 01's kernel, which has no tensor memory, built."""
    folder = tmp_path_factory.mktemp("stage")
    try:
        return run.pack(stage, KEY, folder)
    except building.AssemblerMissing as missing:
        pytest.skip(str(missing))


def test_what_runs_is_the_kernel_as_compiled(gemm, packed, stage):
    """Launching with more threads changes nothing in the kernel but its own thread count."""
    built, plain = gemm
    assert built.ptx_sha256 == ptx_hash(plain) == ptx_hash(built.ptx)
    ordinary = compile_stage(stage, dtype=KEY.dtype, head_dim=KEY.head_dim)
    assert packed.ptx_sha256 == ptx_hash(ordinary.ptx)


def test_the_engine_comes_with_tensor_memory_only(gemm, packed):
    built, _ = gemm
    assert built.uses_engine and not packed.uses_engine
    code = (built.folder / "kernel.o").read_bytes()
    assert code.count(building.MAGIC_BYTES) == 1
    assert building.MAGIC_BYTES not in (packed.folder / "kernel.o").read_bytes()
    rewritten = (built.folder / "rewritten.ptx").read_text()
    threads = re.search(r"\.reqntid (\d+)", built.ptx)[1]
    assert f".reqntid {int(threads) + ENGINE_THREADS}," in rewritten
    assert ".func" in rewritten and "fl_engine" in rewritten


def test_an_object_is_read_back(gemm):
    built, _ = gemm
    assert building.read_object(built.folder) == built


def test_loading_needs_the_place_of_the_control_block(gemm):
    built, _ = gemm
    assert built.load(0x1000) is not None
    path = built.folder / "kernel.o"
    code = path.read_bytes()
    path.write_bytes(code.replace(building.MAGIC_BYTES, bytes(8)))
    try:
        with pytest.raises(RuntimeError, match="no place for the control block"):
            built.load(0x1000)
    finally:
        path.write_bytes(code)


def test_artefacts_are_found_by_the_environment(packed, monkeypatch, tmp_path):
    monkeypatch.delenv(run.ARTEFACTS, raising=False)
    assert run.packed_folder(KEY) is None
    (tmp_path / KEY.name).symlink_to(packed.folder)
    monkeypatch.setenv(run.ARTEFACTS, str(tmp_path))
    assert building.read_object(run.packed_folder(KEY)).ptx_sha256 == packed.ptx_sha256
    assert run.packed_folder(CompileKey(1, "sm_100a", "float16", 128)) is None


def test_object_of_another_rewriter_is_refused(packed):
    assert run.loaded(packed, 0).ptx == packed.ptx
    with pytest.raises(ValueError, match="pack it again"):
        run.loaded(dataclasses.replace(packed, rewriter_sha256="other"), 0)


def test_launches_of_several_threads_take_turns(monkeypatch):
    """A reset would free the slots of a kernel that another thread has running."""
    running = []

    class Engine:
        def reset(self):
            running.append(1)

        def check(self, ptx):
            assert running == [1]
            running.pop()

    monkeypatch.setattr(run, "session", lambda index: Engine())
    monkeypatch.setattr(run.torch.cuda, "synchronize", lambda index: time.sleep(0.01))
    kernel = run.HopperKernel(None, 0)
    kernel.__dict__.update(ptx="", _launch=lambda: None)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(kernel.function) for _ in range(8)]:
            done.result()


def test_launches_are_as_before_afterwards():
    from cutlass.base_dsl.dsl import BaseDSL

    before = BaseDSL.LaunchConfig.__post_init__
    with pytest.raises(ZeroDivisionError), building.more_threads(32):
        assert BaseDSL.LaunchConfig.__post_init__ is not before
        1 / 0  # noqa: B018
    assert BaseDSL.LaunchConfig.__post_init__ is before


def test_ptx_that_does_not_assemble_is_an_error():
    try:
        find_tool("ptxas")
    except MissingTool as missing:
        pytest.skip(str(missing))
    with pytest.raises(RuntimeError, match="ptxas refused"):
        building.assemble(".version 8.0\n.target sm_90a\n.address_size 64\nnonsense;\n")


def test_an_artefact_of_other_sources_is_refused(packed, stage, monkeypatch):
    assert run._read_packed(stage, packed.folder).ptx_sha256 == packed.ptx_sha256
    monkeypatch.setattr(run, "sources", lambda stage: {"01/kernel": b"changed"})
    with pytest.raises(ValueError, match="packed from other sources"):
        run._read_packed(stage, packed.folder)
