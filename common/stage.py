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

    Attributes:
        number: of the stage, an int.
        name: of the part; "" for the stage itself.
        tag: "07", or "07/preprocess" for a part.
        folder: a `pathlib.Path`, with the sources.
        kind: name of the public `@cute.jit` function in its kernel.py: "attention" for a stage, for
            a part its name up to the first underscore (backward_1cta and backward_2cta both have
            `backward`).
    """

    TENSORS = ("q", "k", "v")  # of an `inputs.Problem`: what `simulate` takes
    RESULTS = ("out", "lse")  # of a run of the model: what it computes

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        self.tag = f"{number:02d}/{name}" if name else f"{number:02d}"
        self.folder = STAGES_FOLDER / self.tag
        self.kind = name.partition("_")[0] or "attention"

    def module(self, name: str) -> ModuleType:
        """A module of the folder, imported; no bytecode is written beside the sources.

        Args:
            name: without .py, such as "config".

        Raises: ModuleNotFoundError when there is none, ImportError for what it needs.
        """
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
        """The folder's `model.py`, which needs torch; None for a part without one."""
        return self.module("model") if (self.folder / "model.py").is_file() else None

    def simulate_problem(self, problem, **options):
        """`simulate` on the tensors of a named problem.

        Args:
            problem: a `common.inputs.Problem`, on any device; it is copied to the CPU.
            options: further arguments of `simulate`: machine, max_ctas.

        Returns: what `simulate` does.

        Raises: as `simulate`.
        """
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

        Args:
            q, dout: (b, sq, h, d), CPU tensors of one 16-bit dtype; dout is the gradient of out.
            k, v: (b, sk, h, d), like q.
            out, lse: of the forward, (b, sq, h, d) in q's dtype and (b, h, sq) float32; from the
                float64 oracle, rounded, when neither is given.
            dlse: (b, h, sq) float32, the gradient of lse; 0 when None.
            softmax_scale, machine: as in `Stage.simulate`.
            max_ctas: as there, but pairs count where CTAs work in pairs.
            mask: causal, window_size and lengths of sequences, as in `Stage.attention`.

        Returns: a `common.model.GradientRun`, whose cycles are derived, not measured.

        Raises: TypeError or ValueError for what the part does not take.
        """
        from .gradients import simulate

        given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
        return simulate(self, given, softmax_scale, machine, max_ctas, mask)


class Stage(KernelSource):
    """A stage of the ladder; `flash_ladder.load(number)` makes it.

    Its own kernel is the forward pass; `parts` names the further ones, `part(name)` gives them.
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
        """One kernel of the stage.

        Args:
            name: one of `parts`, or "" for the stage itself.

        Raises: ValueError when there is none of this name.
        """
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
        """The part that `attention` takes for gradients, as `config.BACKWARD` says.

        Args:
            head_dim: 64 or 128.

        Raises: ValueError where the stage has no gradients.
        """
        usual = getattr(self.config, "BACKWARD", {})
        if head_dim not in usual:
            known = ", ".join(map(str, usual)) or "none"
            raise ValueError(f"stage {self.tag} has gradients at head dims {known}; got {head_dim}")
        return self.part(usual[head_dim])

    @property
    def evidence(self) -> dict:
        """The stage's evidence.json, what ran where; `{"runs": []}` when nothing has."""
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

        Runs on the current stream of q's device. The first call for a dtype and head dim compiles
        (seconds), later processes find it cached. Where `config.ENVELOPE.differentiable`, out and
        lse can be differentiated once; see `common.gradients`.

        Args:
            q: (b, sq, h, d), a CUDA tensor, bf16 or fp16; what else is allowed is in
                `config.ENVELOPE`.
            k, v: (b, sk, h, d), like q.
            softmax_scale: positive number, d**-0.5 when None.
            causal, window_size: from stage 08 on, which query sees which key, in keys, by
                Note [Which query sees which key] of `common.masks`.
            cu_seqlens_q, cu_seqlens_k: from stage 08 on, (n + 1,) int32 on q's device, where each
                of n sequences begins and the last ends; q, k, v are then (total, h, d).
            max_seqlen_q, max_seqlen_k: with them, no sequence is longer; all rows when None.
            seqused_q, seqused_k: from stage 08 on, (n,) int32 on q's device, how many rows of each
                sequence, or of each batch entry, count.
            return_lse: whether to return (out, lse) instead of out.

        Returns: out (b, sq, h, d) in q's dtype, or (out, lse) with lse (b, h, sq) float32, the
        natural log of each row's sum of exponentials; (total, h, d) and (h, total) with cu_seqlens.

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

        Args:
            q, k, v: as in `attention`, but CPU tensors.
            softmax_scale: positive number, d**-0.5 when None.
            machine: a `common.model.Machine`; B200 when None.
            max_ctas: stop after that many CTAs, leaving the other rows NaN; all when None.
            mask: causal, window_size and lengths of sequences, as in `attention`.

        Returns: a `common.model.Run` with out, lse, the trace and cycles (derived, not measured).

        Raises: TypeError or ValueError for what the stage does not take.
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
