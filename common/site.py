# SPDX-License-Identifier: Apache-2.0
"""Builds the site with both builders and checks what came out: `make docs`.

MkDocs with the Material theme writes site/, Zensical site-zensical/, both from mkdocs.yml and both
strictly (with --quiet MkDocs would not see its own warnings). Zensical writes below the folder of
its configuration only, and its cache does not know what our fences read; so it builds in a copy
that is thrown away. Runs: host, in a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .studies import require_checkout

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "mkdocs.yml"
FOLDERS = {"mkdocs": ROOT / "site", "zensical": ROOT / "site-zensical"}
NEEDED = {"mkdocs": ("mkdocs", "material"), "zensical": ("zensical",)}
COPIED = ("docs", "stages", "common", "README.md", "mkdocs.yml")  # what Zensical may read
RUN = """
import runpy, sys
runpy.run_path(sys.argv[1])  # conftest.py: makes the checkout importable as flash_ladder
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


class BuildError(RuntimeError):
    """A builder is missing or ended with an error; the message has its output."""


def missing(builder: str) -> list[str]:
    """Packages that `builder` needs and this Python lacks."""
    return [name for name in NEEDED[builder] if importlib.util.find_spec(name) is None]


def _run(folder: Path, builder: str, *arguments: str) -> None:
    command = [sys.executable, "-c", RUN, str(ROOT / "conftest.py"), builder, *arguments]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{builder} refused the site:\n{done.stdout}{done.stderr}")


def build(builder: str, folder: Path, root: Path = ROOT) -> Path:
    """Build the site with "mkdocs" or "zensical" into `folder`, whose contents are replaced.

    root: the folder of mkdocs.yml. Raises BuildError when the builder is not installed or finds
    anything wrong.
    """
    if missing(builder):
        raise BuildError(f"{missing(builder)} not installed: pip install -e '.[docs]'")
    if builder == "mkdocs":
        _run(root, builder, "build", "--strict", "--site-dir", str(folder))
        return folder
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for source in filter(Path.exists, (root / entry for entry in COPIED)):
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                shutil.copy(source, copy)
        _run(copy, builder, "build", "--strict")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(copy / "site", folder)
    return folder


def main() -> None:
    """Build with both and check; ends with exit status 1 and a message when anything is wrong."""
    require_checkout(ROOT / "docs")
    from .site_checks import nav_pages, problems

    pages = nav_pages(CONFIG)
    for builder, folder in FOLDERS.items():
        try:
            found = problems(build(builder, folder), pages)
        except BuildError as error:
            sys.exit(str(error))
        if found:
            sys.exit(f"the site that {builder} built is wrong:\n  " + "\n  ".join(found))
        print(f"{builder}: {len(pages)} pages in {folder.name}/index.html")


if __name__ == "__main__":
    main()
