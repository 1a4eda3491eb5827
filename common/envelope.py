# SPDX-License-Identifier: Apache-2.0
"""Checks of a stage's inputs, before anything is traced or launched. Runs: host.

Every message says what was given, what is allowed and, for a limit of the stage, which later stage
lifts it.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .masks import MASK_OPTIONS, Mask, check_dense, mask_without_lengths, window
from .transforms import BY_AUTOGRAD, refusal

if TYPE_CHECKING:
    from .stage import Stage

ALIGN_BYTES = 16  # base address and strides: one vector load
SCALES = (2.0**-125, 2.0**127)  # times log2(e), these are normal float32 numbers
TILE_ROWS = 128  # the fewest query or key rows of a CTA
OF_BOTH = "cu_seqlens", "seqused", "max_seqlen"  # options of q and of k
MAX_ROWS = 500_000_000  # of a tensor: kernels count up to 4 times as many, in 32 bits
MAX_GRID = 2**31 - 1  # CTAs of a 1-D grid (CUDA Programming Guide, compute capabilities)


@dataclass(frozen=True)
class Problem:
    """Sizes of a checked problem; `softmax_scale` is the number that will be used.

    Of packed sequences: batch is 1, the lengths are those of all together. mask: None for a stage
    that has none.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    head_dim: int
    dtype: str
    softmax_scale: float
    mask: Mask | None = None

    def batched(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Tensors with an axis of batch entries, which packed ones lack; None as it is."""
        return self.mask.batched(*tensors) if self.mask else tensors


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def check(
    stage: Stage, q, k, v, softmax_scale=None, *, need_cuda: bool | None = True, **options
) -> Problem:
    """Check q (b, sq, h, d), k and v (b, sk, h, d) against the stage's envelope.

    options: of `masks.mask_of`, for a stage that has masks; with cu_seqlens the tensors are
    (total, h, d). need_cuda: False wants CPU tensors, None takes any. Returns the `Problem`. Raises
    TypeError (not a tensor, a tensor of a transform, dtype, type of the scale) or ValueError
    (shapes, lengths, strides, device, gradients, value of the scale).
    """
    problem = check_all(stage, q, k, v, softmax_scale, need_cuda=need_cuda, **options)
    if problem.mask is None:
        return problem
    cu, used, _ = ([options.get(f"{name}_{x}") for x in "qk"] for name in OF_BOTH)
    return replace(problem, mask=problem.mask.with_lengths(*cu, *used))


def check_all(
    stage: Stage, q, k, v, softmax_scale, *, need_cuda: bool | None, **options
) -> Problem:
    """`check`, but the mask has no `lengths` yet: nothing is launched."""
    named = {"q": q, "k": k, "v": v}
    _check_transforms(stage, named, need_cuda)
    check_tensors(stage, named)
    mask = _checked_mask(stage, q, k, options)
    if mask and mask.packed:
        if v.dim() != 3:
            raise ValueError(
                f"v must be (total, heads, head_dim) with cu_seqlens; got {tuple(v.shape)}"
            )
        named = {name: tensor[None] for name, tensor in named.items()}
        q, k, v = named.values()
    check_shapes(stage, q, k, v)
    _check_lengths(stage, q, k, v, mask)
    _check_layout(stage, named)
    _check_grad(stage, named)
    scale = checked_scale(softmax_scale, q.shape[3])
    _check_device(stage, named, need_cuda)
    batch, seqlen_q, heads, head_dim = q.shape
    return Problem(batch, seqlen_q, k.shape[1], heads, head_dim, dtype_name(q.dtype), scale, mask)


def _checked_mask(stage: Stage, q, k, options: dict) -> Mask | None:
    """The mask of a call, without its lengths; None for a stage without masks, which takes no
    options for one."""
    strangers = sorted(set(options) - set(MASK_OPTIONS))
    if strangers:
        raise TypeError(f"no option {', '.join(strangers)}; masks have {', '.join(MASK_OPTIONS)}")
    if stage.config.ENVELOPE.masks:
        sides = window(options.get("causal", False), options.get("window_size", (None, None)))
        pairs = ([options.get(f"{name}_{x}") for x in "qk"] for name in OF_BOTH)
        return mask_without_lengths(q, k, sides, *pairs)
    given = [name for name, value in options.items() if not _unset(value)]
    if given:
        raise ValueError(
            f"stage {stage.tag} has neither masks nor lengths; got {', '.join(given)}"
            + _lift(stage, "mask")
        )
    return None


def _unset(value) -> bool:
    return value is None or value is False or (isinstance(value, tuple) and value == (None, None))


def _lift(stage: Stage, rule: str) -> str:
    """Which stage lifts `rule`, as a clause; empty when none does."""
    number = stage.config.ENVELOPE.lifted_by.get(rule)
    return f" (stage {number:02d} lifts this)" if number else ""


def _check_transforms(stage: Stage, named: dict, need_cuda: bool | None) -> None:
    instead = BY_AUTOGRAD
    if need_cuda is False:
        instead = "the model records no derivatives, call it outside"
    elif not stage.config.ENVELOPE.differentiable:
        instead = f"it has no backward pass{_lift(stage, 'grad')}, call it outside"
    why = refusal(named, instead)
    if why:
        raise TypeError(f"stage {stage.tag} {why}")


def check_tensors(stage: Stage, named: dict) -> None:
    """TypeError unless these are dense tensors of one dtype that the stage takes."""
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        check_dense(name, tensor)
    given = {name: dtype_name(tensor.dtype) for name, tensor in named.items()}
    allowed = stage.config.ENVELOPE.dtypes
    for name, dtype in given.items():
        if dtype not in allowed:
            raise TypeError(
                f"stage {stage.tag} takes {' or '.join(allowed)}; {name} is {dtype}. Convert it, "
                f"for example {name}.to(torch.{allowed[0]})" + _lift(stage, "dtype")
            )
    if len(set(given.values())) > 1:
        raise TypeError(f"q, k and v must have one dtype; got {given}")


def recorded(q, k, v) -> bool:
    """Whether autograd records what is computed from these."""
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    return wanted and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def check_shapes(stage: Stage, q, k, v, grouped_heads: bool = False) -> None:
    """ValueError unless (b, s, h, d) fit each other and the stage; sizes may be symbols.

    grouped_heads: whether k and v may have fewer heads, also where the stage does not take them.
    """
    envelope = stage.config.ENVELOPE
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be (batch, seqlen, heads, head_dim); got {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape; got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head dim; got {shapes}")
    if q.shape[3] not in envelope.head_dims:
        allowed = " or ".join(map(str, envelope.head_dims))
        raise ValueError(
            f"stage {stage.tag} has head dim {allowed}; got {q.shape[3]}" + _lift(stage, "head_dim")
        )
    if q.shape[2] != k.shape[2] and not (grouped_heads or envelope.grouped_heads):
        raise ValueError(
            f"stage {stage.tag} needs as many key as query heads; got {shapes}"
            + _lift(stage, "heads")
        )
    if q.shape[2] < 1:
        raise ValueError(f"q, k and v need at least one head; got {shapes}")


def _check_lengths(stage: Stage, q, k, v, mask: Mask | None) -> None:
    multiple = stage.config.ENVELOPE.seqlen_multiple
    for name, length in (("query", q.shape[1]), ("key", k.shape[1])):
        if not mask and (length < 1 or length % multiple):
            raise ValueError(
                f"stage {stage.tag} needs a {name} length that is a positive multiple of "
                f"{multiple}; got {length}" + _lift(stage, "seqlen")
            )
    if q.shape[0] < 1 and not mask:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(
            f"stage {stage.tag} needs a batch of at least 1; got {shapes}" + _lift(stage, "seqlen")
        )
    rows = max(q.shape[1], k.shape[1])
    if rows > MAX_ROWS:
        raise ValueError(f"q, k and v have at most {MAX_ROWS} rows each; got {rows}")
    batch, longest = q.shape[0], q.shape[1]
    if mask:
        batch, longest = mask.batch, max(mask.max_seqlen_q, mask.max_seqlen_k)
    ctas = batch * q.shape[2] * math.ceil(longest / TILE_ROWS)
    if ctas > MAX_GRID:
        fix = "give max_seqlen_q and max_seqlen_k, or " if mask and mask.packed else ""
        raise ValueError(f"{ctas} query tiles exceed one grid's {MAX_GRID}; {fix}split the batch")


def _check_layout(stage: Stage, named: dict) -> None:
    for name, tensor in named.items():
        if not tensor.numel():
            continue
        step = ALIGN_BYTES // tensor.element_size()
        pairs = list(zip(tensor.shape, tensor.stride()))
        fix = f"; {name}.contiguous() is always accepted" + _lift(stage, "strides")
        if pairs[3][1] != 1:
            raise ValueError(f"{name} must have stride 1 along head dim; got {pairs[3][1]}{fix}")
        if any(size > 1 and stride % step for size, stride in pairs[:3]):
            raise ValueError(
                f"{name} must have strides that are multiples of {step} elements "
                f"({ALIGN_BYTES} bytes); got {tensor.stride()}{fix}"
            )
        if tensor.device.type != "meta" and tensor.data_ptr() % ALIGN_BYTES:
            raise ValueError(f"{name} must start at a multiple of {ALIGN_BYTES} bytes{fix}")


def _check_grad(stage: Stage, named: dict) -> None:
    if stage.config.ENVELOPE.differentiable or not recorded(*named.values()):
        return
    wanting = [name for name, tensor in named.items() if tensor.requires_grad]
    if wanting:
        raise ValueError(
            f"stage {stage.tag} has no backward pass, but {', '.join(wanting)} requires grad; call "
            "it under torch.no_grad() or on detached tensors" + _lift(stage, "grad")
        )


def _check_device(stage: Stage, named: dict, need_cuda: bool | None) -> None:
    devices = {name: str(tensor.device) for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"q, k and v must be on one device; got {devices}")
    kind = named["q"].device.type
    if need_cuda is None:
        return
    if need_cuda and kind != "cuda":
        raise ValueError(
            f"stage {stage.tag} runs on a CUDA GPU; q, k and v are on {devices['q']!r}. Without a "
            f"GPU, load({stage.number}).simulate(q, k, v) runs its model"
            f"{_simulated_gradients(stage, named)} and `flash-ladder run {stage.number}` shows "
            "what this machine can do"
        )
    if not need_cuda and kind != "cpu":
        raise ValueError(f"the model takes CPU tensors; q, k and v are on {devices['q']!r}")


def _simulated_gradients(stage: Stage, named: dict) -> str:
    """How a model computes the gradients that an input asks for, as a clause; empty for none."""
    if not recorded(*named.values()):
        return ""
    part = stage.backward(named["q"].shape[3])
    return (
        f', load({stage.number}).part("{part.name}").simulate(q, k, v, dout) that of its gradients'
    )


def check_model_options(machine, max_ctas) -> None:
    """Raise TypeError or ValueError unless these are a machine and a limit that `simulate` takes.

    machine: a `common.model.Machine`; max_ctas: an int of at least 1; or None.
    """
    from .model import MACHINES, Machine

    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(
            f"machine must be a common.model.Machine ({', '.join(MACHINES)}) or None; got "
            f"{machine!r:.60}"
        )
    if max_ctas is None:
        return
    if isinstance(max_ctas, bool) or not isinstance(max_ctas, int):
        raise TypeError(f"max_ctas must be an int or None; got {max_ctas!r:.60}")
    if max_ctas < 1:
        raise ValueError(f"max_ctas must be at least 1, or None for all CTAs; got {max_ctas}")


def checked_scale(softmax_scale, head_dim: int) -> float:
    """The scale in use; TypeError or ValueError for what cannot be one."""
    if softmax_scale is None:
        return head_dim**-0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(
            f"softmax_scale must be a number or None; got {type(softmax_scale).__name__}"
        )
    try:
        scale = float(softmax_scale)
    except OverflowError:
        scale = math.inf
    if not SCALES[0] <= scale <= SCALES[1]:
        raise ValueError(
            f"softmax_scale must be finite and positive, {SCALES[0]:g} ... {SCALES[1]:g}; "
            f"got {softmax_scale!s:.24}"
        )
    return scale
