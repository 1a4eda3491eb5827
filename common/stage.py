# SPDX-License-Identifier: Apache-2.0
"""A stage as an object: its modules on demand, its op, its model, its evidence. Runs: host."""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
import sys
import threading
from types import ModuleType

PACKAGE = __name__.partition(".")[0]  # flash_ladder
STAGES_FOLDER = pathlib.Path(importlib.import_module(PACKAGE).__file__).parent
_IMPORT_LOCK = threading.Lock()


class Stage:
    """Stage `number` of the ladder. Modules are imported when first asked for.

    Attributes: number, tag ("01"), folder; `config`, `kernel` (needs the CuTe DSL) and `model`
    (needs torch) are the stage's modules; `evidence` is its evidence.json as a dict.
    """

    def __init__(self, number: int):
        self.number = number
        self.tag = f"{number:02d}"
        self.folder = STAGES_FOLDER / self.tag

    def __repr__(self) -> str:
        return f"<stage {self.tag}: {self.config.NAME}>"

    def module(self, name: str) -> ModuleType:
        """The stage's module `name`; no bytecode is written beside the sources."""
        with _IMPORT_LOCK:
            before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
            try:
                return importlib.import_module(f"{PACKAGE}.{self.tag}.{name}")
            finally:
                sys.dont_write_bytecode = before

    @functools.cached_property
    def config(self) -> ModuleType:
        """The stage's `config.py`."""
        return self.module("config")

    @functools.cached_property
    def kernel(self) -> ModuleType:
        """The stage's `kernel.py`; raises `common.compile.DslMissing` without the CuTe DSL."""
        from .compile import require_dsl

        require_dsl()
        return self.module("kernel")

    @functools.cached_property
    def model(self) -> ModuleType:
        """The stage's `model.py`."""
        return self.module("model")

    @property
    def evidence(self) -> dict:
        """What ran where; `{"runs": []}` when nothing has."""
        path = self.folder / "evidence.json"
        return json.loads(path.read_text()) if path.is_file() else {"runs": []}

    def attention(self, q, k, v, *, softmax_scale=None, return_lse=False):
        """softmax(q k^T * softmax_scale) v by this stage's kernel, on the tensors' GPU.

        Args: q (b, sq, h, d), k and v (b, sk, h, d), CUDA tensors, bf16 or fp16; what else is
        allowed is in `config.ENVELOPE`. softmax_scale: positive number, d**-0.5 when None.
        Returns: out (b, sq, h, d) in q's dtype, or (out, lse) with lse (b, h, sq) float32, the
        natural log of each row's sum of exponentials. Runs on the current stream of q's device;
        the first call for a dtype and head dim compiles (seconds), later processes find it cached.
        Raises: TypeError or ValueError before anything runs, naming the rule, what was given and
        which stage lifts it; `common.compile.DslMissing` without the CuTe DSL.
        """
        from .launch import attention

        return attention(self, q, k, v, softmax_scale=softmax_scale, return_lse=return_lse)

    def simulate(self, q, k, v, *, softmax_scale=None, machine=None, max_ctas=None):
        """The same on the SM model, from this stage's `model.py`: no GPU, no compiled code.

        Args as `attention`, but CPU tensors; `machine` a `common.model.Machine` (B200 when None);
        `max_ctas` stops after that many CTAs, leaving the other rows NaN. Returns a
        `common.model.Run` with out, lse, the trace and cycles (derived, not measured).
        """
        from .envelope import check
        from .model import B200

        problem = check(self, q, k, v, softmax_scale, need_cuda=False)
        return self.model.run(q, k, v, problem.softmax_scale, machine or B200, max_ctas)
