# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  the checkout becomes importable first
"""Test kernels as objects that run on Hopper: built, kept, launched, and judged.

`python -m tests.kernels.objects FOLDER` builds all of them ahead of time, without a GPU; with the
environment variable FLASH_LADDER_ARTEFACTS=FOLDER a GPU machine then compiles nothing.
`python -m tests.kernels.objects bug NAME BUG` runs a kernel with a planted bug under one adversary
after the other and prints, as JSON, how it was seen.
"""

import hashlib
import json
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
if "flash_ladder" not in sys.modules:
    sys.path.insert(0, str(ROOT))
    import conftest  # noqa: F401  makes the checkout importable

import torch
from flash_ladder.common.compile import cache_folder, versions
from flash_ladder.common.hopper.build import HopperObject, build, read_object
from flash_ladder.common.hopper.redirect import compile_replaced
from flash_ladder.common.hopper.rewrite import rewriter_hash
from flash_ladder.common.hopper.run import ARTEFACTS, loaded, session
from flash_ladder.common.hopper.session import HopperExecutionError

from tests.kernels import KERNELS, label

ADVERSARIES = {
    "lazy": {},
    "eager": {"eager": True},
    "slow copies, eager": {"eager": True, "seed": 1, "delays": {"tma": 20_000}},
    "slow MMAs": {"seed": 2, "delays": {"mma": 20_000}},
    "slow tensor memory": {"seed": 3, "delays": {"tmem": 5_000, "start": 20_000}},
    "all delays, eager": {
        "eager": True,
        "seed": 4,
        "delays": {"mma": 10_000, "tma": 10_000, "tmem": 3_000, "start": 10_000},
    },
}
BUG_TIMEOUT_MS = 300


def object_of(name: str, parameters: dict) -> HopperObject:
    """The built kernel: from the folder of artefacts, from the cache, or built now."""
    packed = pathlib.Path(os.environ.get(ARTEFACTS, "")) / "kernels" / f"{name}-{label(parameters)}"
    if os.environ.get(ARTEFACTS) and (packed / "facts.json").is_file():
        return read_object(packed)
    digest = hashlib.sha256(rewriter_hash().encode() + json.dumps(versions()).encode())
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    folder = cache_folder() / f"kernel-{digest.hexdigest()[:16]}" / f"{name}-{label(parameters)}"
    if not (folder / "facts.json").is_file():
        make(name, parameters, folder)
    return read_object(folder)


def make(name: str, parameters: dict, folder: pathlib.Path) -> None:
    """Build one kernel into `folder`, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = pathlib.Path(scratch) / "object"
        target.mkdir()

        def write(function, arguments, keywords):
            return build(function, arguments, target, "test_kernel", **keywords)

        with compile_replaced(write):
            KERNELS[name].build(**parameters)
        if not folder.exists():
            target.rename(folder)


def run(name: str, parameters: dict, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(actual, expected) of one launch on the current GPU, into poisoned memory."""
    kernel = KERNELS[name]
    inputs = kernel.make_inputs(seed, **parameters)
    expected = kernel.reference(*inputs, **parameters)
    out = torch.full(expected.shape, float("nan"), device="cuda")
    moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
    hopper = loaded(object_of(name, parameters), torch.cuda.current_device())
    hopper.function(*moved, out)
    return out.cpu(), expected


def see_bug(name: str, bug: str) -> dict:
    """How a planted bug shows: the first adversary under which it does, and what was seen."""
    parameters = {**KERNELS[name].buggy, "bug": bug}
    engine = session(torch.cuda.current_device())
    for adversary, settings in ADVERSARIES.items():
        engine.settings(timeout_ms=BUG_TIMEOUT_MS, **settings)
        try:
            actual, expected = run(name, parameters)
        except HopperExecutionError as fault:
            return {"adversary": adversary, "seen": fault.name, "message": str(fault)}
        if not torch.equal(actual, expected):
            wrong = (actual != expected).sum().item()
            return {"adversary": adversary, "seen": "values", "message": f"{wrong} elements"}
    return {"adversary": None, "seen": None, "message": "nothing was seen"}


def everything() -> list[tuple[str, dict]]:
    """All kernels of the sweeps and all planted bugs."""
    sweeps = [(name, row) for name, kernel in KERNELS.items() for row in kernel.sweep]
    bugs = [
        (name, {**kernel.buggy, "bug": bug})
        for name, kernel in KERNELS.items()
        for bug in kernel.bugs
    ]
    return sweeps + bugs


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    if arguments[0] == "bug":
        print(json.dumps(see_bug(*arguments[1:])))
        return
    root = pathlib.Path(arguments[0]) / "kernels"
    for name, parameters in everything():
        folder = root / f"{name}-{label(parameters)}"
        make(name, parameters, folder)
        print(folder.name, (folder / "kernel.o").stat().st_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
