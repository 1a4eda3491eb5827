# SPDX-License-Identifier: Apache-2.0
"""What several test files need: a stage, a copy of the sources, a process, the command line."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from flash_ladder import load
from flash_ladder.common import cli, contract, site
from typer.testing import CliRunner

from tests import browser

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="session")
def stage():
    """Stage 01."""
    return load(1)


@pytest.fixture(scope="session")
def dsl():
    """Skip, with the reason, where nothing can be compiled."""
    reason = contract.compile_skip_reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def built_site(tmp_path_factory):
    """Builds the site with "mkdocs" or "zensical", once each; gives its folder, or skips."""
    folders: dict[str, pathlib.Path] = {}

    def built(builder: str) -> pathlib.Path:
        lacking = site.missing(builder)
        if lacking:
            pytest.skip(f"{lacking} not installed: extra 'docs'")
        if builder not in folders:
            folder = tmp_path_factory.mktemp(builder) / "site"
            folders[builder] = site.build(builder, folder)
        return folders[builder]

    return built


@pytest.fixture(scope="module")
def tab(built_site):
    """A browser on the site as MkDocs builds it; skips where there is none."""
    if browser.lacking():
        pytest.skip(f"not installed: {browser.lacking()}")
    with browser.opened(built_site("mkdocs")) as opened:
        yield opened


@pytest.fixture
def copy_sources(tmp_path):
    """Copies what the package is made of into a new folder; returns the folder."""

    def copy(name: str) -> pathlib.Path:
        folder = tmp_path / name
        for part in ("stages", "common"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc"))
        for part in ("conftest.py", "pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / part, folder / part)
        return folder

    return copy


@pytest.fixture
def start_python():
    """Starts `python -c code` in a folder, with changes to the environment; gives the process."""

    def start(code: str, folder: pathlib.Path, python=sys.executable, **environment: str):
        inherited = {
            k: v for k, v in os.environ.items() if k == "PYTHONPATH" or not k.startswith("PYTHON")
        }
        return subprocess.Popen(
            [python, "-c", code],
            cwd=folder,
            env={**inherited, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run_python(start_python):
    """Like start_python, but waits: what the code printed. A failure shows the traceback."""

    def run(*arguments, **environment: str) -> str:
        process = start_python(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out

    return run


@pytest.fixture
def ladder():
    """Runs the command line: (exit code, what it printed, what it complained)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(cli.app, list(arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run
