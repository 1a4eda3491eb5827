# SPDX-License-Identifier: Apache-2.0
"""Makes a bare checkout importable as ``flash_ladder``, installed or not.

``stages/`` is the package ``flash_ladder`` and ``common/`` is ``flash_ladder.common``; no folder of
these names exists, so the two packages are registered before pytest imports a test.
"""

import importlib.util
import pathlib
import sys

sys.dont_write_bytecode = True  # keeps `git diff --no-index stages/01 stages/02` clean
ROOT = pathlib.Path(__file__).parent


def _package(name: str, folder: pathlib.Path):
    """Register package `name` with sources in `folder`; its code is executed later."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return spec.loader, module


if "flash_ladder" not in sys.modules:
    ladder = _package("flash_ladder", ROOT / "stages")
    common = _package("flash_ladder.common", ROOT / "common")
    for loader, module in (common, ladder):
        loader.exec_module(module)
    ladder[1].common = common[1]
sys.modules["stages"] = sys.modules["flash_ladder"]  # or pytest imports stages/__init__.py twice
