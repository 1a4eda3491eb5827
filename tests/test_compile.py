# SPDX-License-Identifier: Apache-2.0
"""Compiling and its cache: what a kernel is made of, what makes it another one, who shares it."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil

import pytest
from flash_ladder.common import compile as compiling
from flash_ladder.common.compile import CompileKey, DslMissing, compile_stage
from flash_ladder.common.plan import PlanError, SmemBuffer
from flash_ladder.common.ptx import ptx_hash
from flash_ladder.common.stage import Stage

KEY = CompileKey(1, "sm_100a", "bfloat16", 128)
CU13 = "FLASH_LADDER_CU13_PYTHON"  # a Python with this package's needs and nvidia-cutlass-dsl[cu13]
COMPILE = """
import json, conftest
from flash_ladder import load
from flash_ladder.common import compile as compiling
from flash_ladder.common.ptx import ptx_hash
kernel = compiling.compile_stage(load(1), dtype="float16", head_dim=64)
print(json.dumps({"hash": ptx_hash(kernel.ptx), "dsl": kernel.dsl, "cached": kernel.from_cache,
                  "folder": str(kernel.folder)}))
"""
RACE = """
import json, os, pathlib, time, conftest
import cutlass.cute
from flash_ladder import load
from flash_ladder.common import compile as compiling
from flash_ladder.common.ptx import ptx_hash
right = compiling._build

def build(stage, key, folder):
    kernel = right(stage, key, folder)
    found["built"] = ptx_hash(kernel.ptx)
    meet("built")  # both have compiled before either may rename
    return kernel

def meet(what):
    folder = pathlib.Path(os.environ["MEETING"])
    (folder / f"{what}-{os.getpid()}").touch()
    while len(list(folder.glob(f"{what}-*"))) < 2:
        time.sleep(0.01)

found = {}
compiling._build = build
kernel = compiling.compile_stage(load(1), dtype="float16", head_dim=64)
found |= {"hash": ptx_hash(kernel.ptx), "folder": str(kernel.folder), "size": len(kernel.cubin)}
print(json.dumps(found))
"""


@pytest.fixture
def copied(tmp_path, stage):
    """Stage 01 with sources of its own, to be changed."""
    found = Stage(1)
    found.folder = tmp_path / "01"
    found.folder.mkdir()
    for path in stage.folder.glob("*.py"):
        (found.folder / path.name).write_bytes(path.read_bytes())
    return found


@pytest.fixture
def fake(stage, monkeypatch, tmp_path):
    """compile_stage with an empty cache and without a compiler; counts its builds."""
    builds = []

    def build(stage, key, folder):
        builds.append(key)
        entry = {"wall_seconds": 1.5, "cpu_seconds": 1.0, "smem_bytes": 8, "dsl": {"dsl": "1"}}
        sums = {}
        for name in compiling.FILES:
            (folder / name).write_text(f"{name} of build {len(builds)}")
            sums[name] = compiling.hashlib.sha256((folder / name).read_bytes()).hexdigest()
        (folder / "entry.json").write_text(json.dumps({**entry, "sha256": sums}))
        return compiling.CompiledKernel(key, folder, from_cache=False, **entry)

    monkeypatch.setattr(compiling, "_build", build)
    monkeypatch.setattr(compiling, "_MEMORY", {})
    monkeypatch.setattr(compiling, "require_dsl", lambda: None)
    monkeypatch.setenv("FLASH_LADDER_CACHE", str(tmp_path / "cache"))
    return builds


def _forget():
    """As in a new process: only the disk cache remembers."""
    compiling._MEMORY.clear()


# ---- sources and fingerprints --------------------------------------------------------------


def test_sources_are_what_the_kernel_imports(stage):
    found = compiling.sources(stage)
    own = {f"01/{name}" for name in ("config", "epilogue", "kernel", "load", "mma", "softmax")}
    assert set(found) == own | {"common/arith", "common/plan"}
    assert found["01/kernel"] == (stage.folder / "kernel.py").read_bytes()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from . import correction", "01/correction"),
        ("from .correction import rescale, other", "01/correction"),
        ("from ..common import pairwise as pairs", "common/pairwise"),
        ("from ..common.pairwise import pairwise", "common/pairwise"),
        ("def f():\n    from ..common.pairwise import pairwise", "common/pairwise"),
        ("from ..common.model import Machine", "common/model"),
        ("from ..common.model.machine import Machine", "common/model/machine"),
    ],
)
def test_an_import_is_followed(copied, line, name):
    (copied.folder / "correction.py").write_text("X = 1\n")
    before = compiling.sources(copied)
    assert name not in before
    with (copied.folder / "softmax.py").open("a") as file:
        file.write(line + "\n")
    assert {name} <= set(compiling.sources(copied)) - set(before)


def test_other_imports_are_left_alone(copied):
    before = compiling.sources(copied)
    with (copied.folder / "softmax.py").open("a") as file:
        file.write("import math\nfrom os import path\nfrom .. import built\nfrom . import absent\n")
    assert compiling.sources(copied).keys() == before.keys()


def test_what_imports_import_is_followed(copied):
    with (copied.folder / "softmax.py").open("a") as file:
        file.write("from . import first\n")
    (copied.folder / "first.py").write_text("from . import second\nfrom .kernel import attention\n")
    (copied.folder / "second.py").write_text("X = 1\n")
    assert {"01/first", "01/second"} <= compiling.sources(copied).keys()


def test_the_fingerprint_names_everything_that_matters(copied, monkeypatch):
    marks = [compiling.fingerprint(copied, KEY)]
    assert compiling.fingerprint(copied, KEY) == marks[0]
    for changes in ({"arch": "sm_90a"}, {"dtype": "float16"}, {"head_dim": 64}, {"stage": 2}):
        marks.append(compiling.fingerprint(copied, dataclasses.replace(KEY, **changes)))
    with (copied.folder / "load.py").open("a") as file:
        file.write("# a change\n")
    marks.append(compiling.fingerprint(copied, KEY))
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"):
        with monkeypatch.context() as patch:
            found = {**compiling.versions(), package: "9.9.9"}
            patch.setattr(compiling, "versions", lambda found=found: found)
            marks.append(compiling.fingerprint(copied, KEY))
    monkeypatch.setattr(platform, "machine", lambda: "other")
    marks.append(compiling.fingerprint(copied, KEY))
    assert len(set(marks)) == len(marks) == 10


def test_the_fingerprint_leaves_out_what_is_not_compiled(copied):
    before = compiling.fingerprint(copied, KEY)
    for name in ("model.py", "test_stage.py", "README.md", "notes.py"):
        (copied.folder / name).write_text("# another\n")
    assert compiling.fingerprint(copied, KEY) == before


def test_names_are_short_and_differ(stage):
    assert KEY.name == "01-sm_100a-bfloat16-d128"
    assert compiling._symbol(KEY) == "flash_ladder_01_sm_100a_bfloat16_d128"


def test_versions_are_those_installed(monkeypatch):
    installed = {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert compiling.versions() == installed


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"arch": "sm_100"}, "compiles for arch sm_80, .*, sm_100a, sm_103a, sm_120a; got sm_100$"),
        ({"dtype": "float32"}, "compiles for dtype bfloat16, float16; got float32"),
        ({"head_dim": 96}, "compiles for head_dim 64, 128; got 96"),
    ],
)
def test_what_the_stage_does_not_have_is_refused(stage, arguments, words):
    with pytest.raises(ValueError, match=f"stage 01 {words}"):
        compile_stage(stage, **arguments)


def test_a_plan_that_cannot_work_is_not_compiled(stage, fake, monkeypatch):
    over = stage.config.plan(128).with_changes(smem=(SmemBuffer("sQ", 2**18),))
    monkeypatch.setattr(stage.config, "plan", lambda head_dim: over)
    with pytest.raises(PlanError, match="shared memory 262144 B exceeds"):
        compile_stage(stage)
    assert not fake


@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("Linux", "pip install nvidia-cutlass-dsl==4.8.1 apache-tvm-ffi"),
        ("Darwin", "exists for Linux only and this is Darwin: models, plans and pages work here"),
    ],
)
def test_a_missing_dsl_is_explained(monkeypatch, stage, missing, system, words):
    find = lambda name: None if name == missing else name
    monkeypatch.setattr(compiling.importlib.util, "find_spec", find)
    monkeypatch.setattr(platform, "system", lambda: system)
    with pytest.raises(DslMissing, match=words):
        compiling.require_dsl()
    with pytest.raises(DslMissing, match=words):
        compile_stage(stage)


def test_the_dsl_named_in_the_message_is_the_one_pinned():
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert "nvidia-cutlass-dsl==4.8.1;" in text


# ---- the cache -----------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("FLASH_LADDER_CACHE", "/given")
    assert compiling.cache_folder() == pathlib.Path("/given")
    monkeypatch.setenv("FLASH_LADDER_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert compiling.cache_folder() == pathlib.Path("/xdg/flash-ladder")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/reader")
    assert compiling.cache_folder() == pathlib.Path("/home/reader/.cache/flash-ladder")


def test_a_kernel_is_compiled_once(stage, fake):
    first = compile_stage(stage)
    assert compile_stage(stage) is first and not first.from_cache
    _forget()
    again = compile_stage(stage)
    assert again.from_cache and again.folder == first.folder and again.ptx == first.ptx
    assert (again.wall_seconds, again.smem_bytes, again.dsl) == (1.5, 8, {"dsl": "1"})
    assert fake == [KEY]


def test_another_configuration_is_another_entry(stage, fake, tmp_path):
    kernels = [compile_stage(stage, head_dim=64), compile_stage(stage, arch="sm_90a")]
    assert len(fake) == 2 and len({kernel.folder for kernel in kernels}) == 2
    assert sorted(p.name[:-25] for p in (tmp_path / "cache").iterdir()) == sorted(
        kernel.key.name for kernel in kernels
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "kernel.cubin").write_text("other"),
        lambda folder: (folder / "kernel.o").unlink(),
        lambda folder: (folder / "entry.json").write_text('{"wall_sec'),
        lambda folder: (folder / "entry.json").write_text("[]"),
        lambda folder: (folder / "entry.json").write_text('{"sha256": {}}'),
        lambda folder: (folder / "entry.json").unlink(),
        lambda folder: [path.unlink() for path in folder.iterdir()],
        lambda folder: (shutil.rmtree(folder), folder.write_text("a file in the way")),
    ],
    ids=["bytes", "file", "json", "list", "fields", "entry", "empty", "no folder"],
)
def test_a_damaged_entry_is_compiled_again(stage, fake, tmp_path, damage):
    folder = compile_stage(stage).folder
    damage(folder)
    _forget()
    healed = compile_stage(stage)
    assert len(fake) == 2 and healed.folder == folder and healed.ptx == "kernel.ptx of build 2"
    assert list((tmp_path / "cache").iterdir()) == [folder]  # nothing else is left
    _forget()
    assert compile_stage(stage).from_cache


def test_a_failed_compile_leaves_nothing(stage, fake, tmp_path, monkeypatch):
    def fail(stage, key, folder):
        (folder / "kernel.ptx").write_text("half")
        raise RuntimeError("no")

    monkeypatch.setattr(compiling, "_build", fail)
    with pytest.raises(RuntimeError, match="no"):
        compile_stage(stage)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_an_error(stage, fake, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(
        compiling.CacheError, match=r"/cache cannot be written .*FLASH_LADDER_CACHE"
    ):
        compile_stage(stage)


def test_a_damaged_entry_that_cannot_be_removed_is_an_error(stage, fake, monkeypatch):
    (compile_stage(stage).folder / "kernel.o").unlink()
    _forget()
    monkeypatch.setattr(compiling, "_remove", lambda path: None)  # as in another user's cache
    with pytest.raises(compiling.CacheError, match=r"-d128-.* cannot be written"):
        compile_stage(stage)


# ---- real compiles -------------------------------------------------------------------------


def test_two_folders_and_processes_compile_the_same_at_once(
    dsl, stage, copy_sources, start_python, tmp_path
):
    meeting, cache = tmp_path / "meeting", tmp_path / "cache"
    meeting.mkdir()
    environment = {"MEETING": str(meeting), "FLASH_LADDER_CACHE": str(cache)}
    folders = [copy_sources(name) for name in ("here", "elsewhere")]
    processes = [start_python(RACE, folder, **environment) for folder in folders]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    ours = ptx_hash(compile_stage(stage, dtype="float16", head_dim=64).ptx)
    assert {row[name] for row in found for name in ("built", "hash")} == {ours}
    (entry,) = cache.iterdir()  # one entry, no leftovers
    assert {row["folder"] for row in found} == {str(entry)}
    assert sorted(path.name for path in entry.iterdir()) == sorted([*compiling.FILES, "entry.json"])
    sizes = {row["size"] for row in found}
    assert sizes == {(entry / "kernel.cubin").stat().st_size}


def test_a_real_kernel_has_all_its_parts(dsl, stage):
    kernel = compile_stage(stage)
    assert ".target sm_100a" in kernel.ptx and "\0" not in kernel.ptx
    assert kernel.cubin.startswith(b"\x7fELF")
    assert (kernel.folder / "kernel.o").stat().st_size > 0
    assert kernel.smem_bytes == stage.config.plan(128).smem_bytes
    assert kernel.wall_seconds > 0 and kernel.cpu_seconds > 0
    assert "nvidia-cutlass-dsl" in kernel.dsl


def test_both_libraries_of_the_dsl_give_the_same_ptx(dsl, stage, run_python, tmp_path):
    python = os.environ.get(CU13)
    if not python:
        pytest.skip(f"{CU13} names no Python that has nvidia-cutlass-dsl[cu13]")
    root = pathlib.Path(__file__).parent.parent
    found = json.loads(run_python(COMPILE, root, python, FLASH_LADDER_CACHE=str(tmp_path)))
    assert "nvidia-cutlass-dsl-libs-cu13" in found["dsl"] and not found["cached"]
    assert found["hash"] == ptx_hash(compile_stage(stage, dtype="float16", head_dim=64).ptx)
