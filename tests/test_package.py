# SPDX-License-Identifier: Apache-2.0
"""The package as its users meet it: lazy import, load, the stages' files, the wheel."""

import ast
import os
import pathlib
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version

import flash_ladder
import pytest
from flash_ladder import STAGES, built, load

ROOT = pathlib.Path(__file__).parent.parent
HEAVY = ("torch", "cutlass", "simpy", "numpy", "typer", "rich")
LAZY = f"""
import sys
{{first}}
import flash_ladder
loaded = [name for name in {HEAVY} if name in sys.modules]
assert not loaded, loaded
stage = flash_ladder.load(1)
assert stage.config.TILE_M == 128
loaded = [name for name in {HEAVY} if name in sys.modules]
assert not loaded, loaded
print(flash_ladder.__file__)
"""
USE = """
import sys
assert not sys.dont_write_bytecode
from flash_ladder import built, load
from flash_ladder.__main__ import main
stage = load(1)
stage.config, stage.model, stage.evidence
{kernel}
print(stage, built())
"""


def _stage_folders() -> list[pathlib.Path]:
    return [ROOT / "stages" / f"{number:02d}" for number in built()]


# ---- import and load -----------------------------------------------------------------------


def test_the_import_is_light(run_python):
    printed = run_python(LAZY.format(first="import conftest"), ROOT)
    assert printed.strip() == str(ROOT / "stages" / "__init__.py")


def test_load_gives_a_stage(stage):
    assert load(1).number == 1 and load(1).tag == "01"
    assert repr(stage) == "<stage 01: naive tiled attention>"
    assert stage.folder == ROOT / "stages/01"
    assert stage.config.NAME == STAGES[1]


@pytest.mark.parametrize("number", [True, "1", 1.0, None, [1]])
def test_load_takes_an_int(number):
    with pytest.raises(TypeError, match="load takes a stage number, such as 1; got"):
        load(number)


@pytest.mark.parametrize("number", [0, 11, -1])
def test_load_knows_the_ladder(number):
    with pytest.raises(ValueError, match=f"no stage {number}; the ladder has 1 to 10"):
        load(number)


def test_load_names_planned_stages(tmp_path, monkeypatch):
    for folder in ("01", "02"):
        (tmp_path / folder).mkdir()
    (tmp_path / "01/kernel.py").write_text("")
    monkeypatch.setattr(flash_ladder, "__file__", str(tmp_path / "__init__.py"))
    assert flash_ladder.built() == [1]  # a folder without a kernel is not a stage yet
    with pytest.raises(ValueError, match=r"stage 2 \(TMEM accumulators\) is planned.*built: 1$"):
        load(2)


def test_stages_are_built_from_the_first_on():
    assert built() == list(range(1, len(built()) + 1))
    assert set(flash_ladder.__all__) <= set(dir(flash_ladder))


# ---- files of the stages -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_stage.py", "__init__.py"])
def test_these_files_are_the_same_in_every_stage(name):
    assert len({(folder / name).read_bytes() for folder in _stage_folders()}) == 1


def _imports(path: pathlib.Path) -> set[str]:
    """What a file of a stage imports, as `.name`, `..common.name` or an absolute name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


@pytest.mark.parametrize("folder", _stage_folders(), ids=lambda folder: folder.name)
def test_a_stage_imports_no_other_stage(folder):
    for path in folder.rglob("*.py"):
        own = {name for name in _imports(path) if name.startswith(("stages", "flash_ladder"))}
        if path.name != "test_stage.py":
            assert not own, (path.name, own)
        assert all(name.startswith("flash_ladder.common") for name in own), (path.name, own)
        depth = 2 + (path.parent != folder)  # dots that lead out of the stage
        for name in _imports(path):
            dots = len(name) - len(name.lstrip("."))
            if dots >= depth:
                assert name.startswith("." * depth + "common"), (path, name)
            elif dots == 2:  # of a part: what its stage has for all kernels, no other part
                assert (folder / f"{name[2:]}.py").is_file(), (path, name)


@pytest.mark.parametrize("folder", _stage_folders(), ids=lambda folder: folder.name)
def test_every_file_opens_with_licence_and_docstring(folder):
    for path in folder.rglob("*.py"):
        if path.stat().st_size:
            text = path.read_text()
            assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
            assert ast.get_docstring(ast.parse(text)), path


# ---- the wheel -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a clean copy of the sources, built with the setuptools that is installed."""
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        pytest.skip("building the wheel needs setuptools")
    if int(found.partition(".")[0]) < 77:
        pytest.skip(f"building the wheel needs setuptools 77; {found} is installed")
    folder = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout to tell sources from leftovers")
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            target = folder / "sources" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    (folder / "sources/README.md").touch()
    _pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "sources")
    (built_wheel,) = folder.glob("*.whl")
    return built_wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that the wheel is installed in, without bytecode."""
    folder = tmp_path_factory.mktemp("installed")
    _pip("install", "--no-compile", "--target", folder, wheel)
    return folder


def _pip(command: str, *arguments) -> None:
    line = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*line, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith("flash_ladder-") and wheel.name.endswith("-py3-none-any.whl")
    tops = {name.split("/")[0] for name in names}
    assert tops == {"flash_ladder", wheel.name.rpartition("-py3")[0] + ".dist-info"}
    parts = ("__init__.py", "__main__.py", "py.typed", "common/cli.py", "common/model/sm.py")
    assert {f"flash_ladder/{part}" for part in parts} <= set(names)
    for folder in _stage_folders():
        parts = [path for path in folder.glob("*/*") if path.suffix in (".py", ".md")]
        files = [*folder.iterdir(), *parts]
        names_of = {path.relative_to(folder).as_posix(): path.suffix for path in files}
        wanted = {name for name, suffix in names_of.items() if suffix in (".py", ".md", ".json")}
        prefix = f"flash_ladder/{folder.name}/"
        assert wanted == {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        assert {"kernel.py", "config.py", "README.md"} <= wanted
    suffixes = {pathlib.PurePath(name).suffix for name in names if name.startswith("flash_ladder/")}
    assert suffixes <= {".py", ".cu", ".md", ".json", ".typed"}
    assert "flash_ladder/07/backward_2cta/README.md" in names
    common = {path.relative_to(ROOT).as_posix() for path in (ROOT / "common").rglob("*.py")}
    assert {f"flash_ladder/{name}" for name in common} <= set(names)


def test_the_wheel_says_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    for line in (
        "Name: flash-ladder",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        'Requires-Dist: nvidia-cutlass-dsl==4.8.1; sys_platform == "linux"',
    ):
        assert line in text.splitlines(), line
    scripts = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert "flash-ladder = flash_ladder.__main__:main" in scripts


def test_the_installed_package_works_elsewhere(installed, run_python, tmp_path):
    code = "from flash_ladder import load; print(load(1))"
    printed = run_python(code, tmp_path, PYTHONPATH=str(installed))
    assert printed == "<stage 01: naive tiled attention>\n"
    printed = run_python(LAZY.format(first=""), tmp_path, PYTHONPATH=str(installed))
    assert printed.strip() == str(installed / "flash_ladder" / "__init__.py")
    arguments = [sys.executable, "-m", "flash_ladder", "stages"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "naive tiled attention" in done.stdout, done.stderr


def test_no_bytecode_appears_in_a_stages_folder(dsl, installed, run_python, tmp_path):
    code = USE.format(kernel="stage.kernel")
    printed = run_python(code, tmp_path, PYTHONPATH=str(installed))
    assert printed == f"<stage 01: naive tiled attention> {built()}\n"
    package = installed / "flash_ladder"
    assert list((package / "common").rglob("*.pyc"))  # bytecode is written where it may be
    assert not [path for path in (package / "01").rglob("*") if "pyc" in path.name]


def test_what_was_compiled_from_a_checkout_is_not_compiled_again(
    dsl, stage, installed, run_python, tmp_path
):
    """The wheel's sources are the checkout's, so both share cache entries."""
    from flash_ladder.common.compile import CompileKey, fingerprint

    code = (
        "from flash_ladder import load\n"
        "from flash_ladder.common.compile import CompileKey, fingerprint\n"
        "print(fingerprint(load(1), CompileKey(1, 'sm_100a', 'bfloat16', 64)))"
    )
    printed = run_python(code, tmp_path, PYTHONPATH=str(installed))
    assert printed.strip() == fingerprint(stage, CompileKey(1, "sm_100a", "bfloat16", 64))
