# SPDX-License-Identifier: Apache-2.0
"""A stage as an object: its modules on demand, its op, its model, its evidence. Runs: host.

The kernel of a stage is its forward pass. Further kernels are *parts*, each in a sub-folder with
the file names of a stage; `Stage` and `Part` give tools the same interface.
"""

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


class KernelSource:
    """A folder with the sources of one kernel: what a stage and a part have in common.

    Attributes: number of the stage; name of the part, "" for the stage itself; tag ("07" or
    "07/preprocess"); folder; kind: the name of the public `@cute.jit` function in its kernel.py,
    "attention" for a stage, and for a part its name up to the first underscore (so that
    backward_1cta and backward_2cta both have `backward`). `config`, `kernel` (needs the CuTe DSL)
    and `model` (needs torch) are its modules, imported when first asked for.
    """

    TENSORS = ("q", "k", "v")  # of an `inputs.Problem`: what `simulate` takes
    RESULTS = ("out", "lse")  # of a run of the model: what it computes

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        self.tag = f"{number:02d}/{name}" if name else f"{number:02d}"
        self.folder = STAGES_FOLDER / self.tag
        self.kind = name.partition("_")[0] or "attention"

    def module(self, name: str) -> ModuleType:
        """The module `name` of the folder; no bytecode is written beside the sources."""
        path = ".".join((PACKAGE, *self.tag.split("/"), name))
        with _IMPORT_LOCK:
            before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
            try:
                return importlib.import_module(path)
            finally:
                sys.dont_write_bytecode = before

    @functools.cached_property
    def config(self) -> ModuleType:
        """The folder's `config.py`."""
        return self.module("config")

    @functools.cached_property
    def kernel(self) -> ModuleType:
        """The folder's `kernel.py`; raises `common.compile.DslMissing` without the CuTe DSL."""
        from .compile import require_dsl

        require_dsl()
        return self.module("kernel")

    @functools.cached_property
    def model(self) -> ModuleType | None:
        """The folder's `model.py`; None for a part without one."""
        return self.module("model") if (self.folder / "model.py").is_file() else None

    def simulate_problem(self, problem, **options):
        """`simulate` on the tensors of an `inputs.Problem`, wherever they are."""
        given = problem.to("cpu")
        tensors = [getattr(given, name) for name in self.TENSORS]
        scale = problem.softmax_scale
        return self.simulate(*tensors, softmax_scale=scale, **given.options, **options)


class Part(KernelSource):
    """A further kernel of a stage: `load(7).part("preprocess")`."""

    TENSORS = ("q", "k", "v", "dout")
    RESULTS = ("dq", "dk", "dv")

    def __repr__(self) -> str:
        return f"<part {self.tag}: {self.config.NAME}>"

    def simulate(
        self,
        q,
        k,
        v,
        dout,
        *,
        out=None,
        lse=None,
        dlse=None,
        softmax_scale=None,
        machine=None,
        max_ctas=None,
        **mask,
    ):
        """The gradients by the model of a backward part: no GPU, no compiled code.

        Args: q, dout (b, sq, h, d), k and v (b, sk, h, d), CPU tensors of one 16-bit dtype; out
        (b, sq, h, d) and lse (b, h, sq) float32 of the forward, from the float64 oracle, rounded,
        when not given; dlse (b, h, sq), the gradient of lse, 0 when None; mask and the rest as
        in `Stage.simulate`, but max_ctas counts pairs where CTAs work in pairs. Returns what the
        part's `model.run` does: dq, dk, dv, notes, findings, cta_cycles. Raises TypeError or
        ValueError for what the part does not take.
        """
        from .gradients import simulate

        given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
        return simulate(self, given, softmax_scale, machine, max_ctas, mask)


class Stage(KernelSource):
    """Stage `number` of the ladder.

    Its own kernel is the forward pass; `parts` names the further ones, `part(name)` gives them;
    `evidence` is its evidence.json as a dict.
    """

    def __init__(self, number: int):
        super().__init__(number, "")

    def __repr__(self) -> str:
        return f"<stage {self.tag}: {self.config.NAME}>"

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stage's parts, in the order in which they run: `config.PARTS`."""
        return getattr(self.config, "PARTS", ())

    def part(self, name: str) -> KernelSource:
        """The part called `name`, the stage itself for ""; ValueError when there is none."""
        if not name:
            return self
        if name not in self.parts:
            known = f"its parts are {', '.join(self.parts)}" if self.parts else "it has no parts"
            raise ValueError(f"stage {self.tag} has no part {name!r}; {known}")
        return self._parts[name]

    @functools.cached_property
    def _parts(self) -> dict[str, Part]:
        return {name: Part(self.number, name) for name in self.parts}

    @property
    def kernels(self) -> tuple[KernelSource, ...]:
        """Everything of the stage that is compiled: itself (the forward), then its parts."""
        return self, *(self.part(name) for name in self.parts)

    @property
    def backwards(self) -> tuple[Part, ...]:
        """The parts that compute gradients, each between preprocess and postprocess."""
        return tuple(part for part in self.kernels if part.kind == "backward")

    def backward(self, head_dim: int) -> Part:
        """The part that `attention` takes for gradients at `head_dim`: `config.BACKWARD`."""
        usual = getattr(self.config, "BACKWARD", {})
        if head_dim not in usual:
            known = ", ".join(map(str, usual)) or "none"
            raise ValueError(f"stage {self.tag} has gradients at head dims {known}; got {head_dim}")
        return self.part(usual[head_dim])

    @property
    def evidence(self) -> dict:
        """What ran where; `{"runs": []}` when nothing has."""
        path = self.folder / "evidence.json"
        return json.loads(path.read_text()) if path.is_file() else {"runs": []}

    def attention(
        self,
        q,
        k,
        v,
        *,
        softmax_scale=None,
        causal=False,
        window_size=(None, None),
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        seqused_q=None,
        seqused_k=None,
        return_lse=False,
    ):
        """softmax(q k^T * softmax_scale) v by this stage's kernel, on the tensors' GPU.

        Args: q (b, sq, h, d), k and v (b, sk, h, d), CUDA tensors, bf16 or fp16; what else is
        allowed is in `config.ENVELOPE`. softmax_scale: positive number, d**-0.5 when None. From
        stage 08 on, causal, window_size and the lengths of sequences: see `common.masks`, its note
        and `mask_of`; with cu_seqlens the tensors are (total, h, d), and lse is (h, total).
        Returns: out (b, sq, h, d) in q's dtype, or (out, lse) with lse (b, h, sq) float32, the
        natural log of each row's sum of exponentials. Runs on the current stream of q's device;
        the first call for a dtype and head dim compiles (seconds), later processes find it cached.
        Where `config.ENVELOPE.differentiable`, out and lse can be differentiated once; see
        `common.gradients`.
        Raises: TypeError or ValueError before anything runs, naming the rule, what was given and
        which stage lifts it; `common.compile.DslMissing` without the CuTe DSL.
        """
        from .gradients import attention

        mask = {
            "causal": causal,
            "window_size": window_size,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "seqused_q": seqused_q,
            "seqused_k": seqused_k,
        }
        return attention(self, q, k, v, softmax_scale, return_lse, mask)

    def simulate(self, q, k, v, *, softmax_scale=None, machine=None, max_ctas=None, **mask):
        """The same on the SM model, from this stage's `model.py`: no GPU, no compiled code.

        Args as `attention`, but CPU tensors; `machine` a `common.model.Machine` (B200 when None);
        `max_ctas` stops after that many CTAs, leaving the other rows NaN; mask, the options of
        `common.masks`. Returns a
        `common.model.Run` with out, lse, the trace and cycles (derived, not measured).
        """
        import torch

        from .envelope import check, check_model_options
        from .model import B200

        check_model_options(machine, max_ctas)
        problem = check(self, q, k, v, softmax_scale, need_cuda=False, **mask)
        given = problem.softmax_scale, machine or B200, max_ctas
        with torch.no_grad():
            if problem.mask is None:
                return self.model.run(q, k, v, *given)
            tensors = problem.mask.batched(q, k, v)
            return problem.mask.of_run(self.model.run(*tensors, *given, *problem.mask.of_model()))
