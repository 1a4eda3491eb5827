# SPDX-License-Identifier: Apache-2.0
"""Running the kernels of a stage on the tensors' GPU. Runs: host."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from .compile import CompiledKernel, CompileKey, announced, compile_stage
from .envelope import ALIGN_BYTES, Problem
from .stage import KernelSource, Stage

if TYPE_CHECKING:
    from .hopper.run import HopperKernel

LOG2_E = math.log2(math.e)
_KERNELS: dict[tuple, CompiledKernel | HopperKernel] = {}
_MODE: contextvars.ContextVar[str | None] = contextvars.ContextVar("mode", default=None)
_LOG: contextvars.ContextVar[bool] = contextvars.ContextVar("log", default=False)
ARCH_OF = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}  # compute capability -> the target this package compiles for


def native_arch(device: torch.device) -> str | None:
    """The target of a CUDA device, or None when this package has none for it."""
    return ARCH_OF.get(torch.cuda.get_device_capability(device))


def forward(
    stage: Stage, problem: Problem, q, k, v, tell: Callable | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of checked, `loadable` tensors, by the stage's kernel; no gradients.

    See `Stage.attention`; tell as of `kernel_for`.
    """
    out, lse = empty_results(problem, q)
    if not (problem.mask and problem.mask.sees_nothing):
        launch(kernel_for(stage, problem, q.device, tell), problem, q, k, v, out, lse)
    return out, lse


def contiguous_like(x: torch.Tensor, shape=None, dtype=None) -> torch.Tensor:
    """A contiguous tensor without values, on x's device; shape and dtype are x's where None."""
    if shape is None:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return x.new_empty(shape, dtype=dtype)


def empty_results(problem: Problem, q, make=contiguous_like) -> tuple[torch.Tensor, torch.Tensor]:
    """out (b, sq, h, d) and lse (b, h, sq) for a kernel, which writes all; 0 and -inf where it is
    not started.

    make: as `contiguous_like`, gives each tensor.
    """
    batch, seqlen, heads, _ = q.shape
    out, lse = make(q), make(q, (batch, heads, seqlen), torch.float32)
    if problem.mask and problem.mask.sees_nothing:
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


def modes(stage: KernelSource, device: torch.device) -> list[str]:
    """How a stage or part can run on a CUDA device, the usual way first; empty when it cannot.

    "native": compiled for the device. "rewritten": sm_100a code executed on Hopper by
    `common.hopper`, right and slow.
    """
    arch = native_arch(device)
    found = ["native"] if arch in stage.config.ARCHS else []
    if arch == "sm_90a" and "sm_100a" in stage.config.ARCHS:
        found.append("rewritten")
    return found


@contextlib.contextmanager
def execution(mode: str | None, log: bool = False) -> Iterator[None]:
    """While open, kernels run in `mode`, also where another would be the usual way (None: there).

    log: rewritten kernels are those with the executed log. Holds in this thread; autograd has
    threads of its own, see `current_execution`.
    """
    mode_token, log_token = _MODE.set(mode), _LOG.set(log)
    try:
        yield
    finally:
        _MODE.reset(mode_token)
        _LOG.reset(log_token)


def current_execution() -> tuple[str | None, bool]:
    """The arguments of the `execution` that is open in this thread; (None, False) without one."""
    return _MODE.get(), _LOG.get()


def kernel_for(
    stage: KernelSource,
    problem: Problem,
    device: torch.device,
    tell: Callable[[CompileKey], None] | None = None,
) -> CompiledKernel | HopperKernel:
    """The kernel for this problem on this device; ValueError when it cannot run there.

    tell: called before a compilation that no cache spares.
    """
    key = (stage.tag, _MODE.get(), _LOG.get(), problem.dtype, problem.head_dim, device.index)
    found = _KERNELS.get(key)
    if found is None:
        with announced(tell) if tell else contextlib.nullcontext():
            found = _KERNELS[key] = _find_kernel(stage, problem, device)
    return found


def _find_kernel(stage: KernelSource, problem: Problem, device: torch.device):
    """Compile, or read from disk; milliseconds at best, so `kernel_for` keeps the result."""
    possible = modes(stage, device)
    mode = _MODE.get() or (possible[0] if possible else None)
    if mode not in possible:
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"stage {stage.tag} runs on {', '.join(stage.config.ARCHS)}; "
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
            + (f" and cannot run it {mode}" if mode else "")
        )
    if mode == "rewritten":
        from .hopper.run import hopper_kernel

        return hopper_kernel(stage, problem.dtype, problem.head_dim, device, _LOG.get())
    arch = native_arch(device)
    return compile_stage(stage, arch=arch, dtype=problem.dtype, head_dim=problem.head_dim)


def launch(kernel: CompiledKernel | HopperKernel, problem: Problem, q, k, v, out, lse) -> None:
    """Start a forward kernel on the current stream of q's device, writing `out` and `lse`; q, k and
    v are `loadable`."""
    start(kernel, q, k, v, out, lse, problem.softmax_scale * LOG2_E, *mask_arguments(problem))


def mask_arguments(problem: Problem) -> tuple[int, ...]:
    """`Mask.arguments`, none for a stage without masks."""
    return problem.mask.arguments if problem.mask else ()


def start(kernel: CompiledKernel | HopperKernel, *arguments) -> None:
    """Start a kernel on the current stream of the device of its first argument, a tensor.

    A caller's tensors are `loadable`.
    """
    device = arguments[0].device.index
    if device == torch.cuda.current_device():
        kernel.function(*arguments)
    else:
        with torch.cuda.device(device):
            kernel.function(*arguments)


def loadable(x: torch.Tensor) -> torch.Tensor:
    """A caller's tensor as kernels take it: without autograd, with the signs that it has in memory
    (`is_neg`), and (b, s, h, d) with an innermost stride of 1, other strides and a start that are
    multiples of 16 bytes.

    What lies otherwise is copied. Strides of axes of size 1, which address nothing, become aligned.
    """
    if x.requires_grad:
        x = x.detach()
    if x.is_neg():  # imaginary parts of conjugates, such as gradients through torch.complex
        x = x.resolve_neg()
    if x.dim() != 4:
        return x
    step, (batch, row, head, column) = ALIGN_BYTES // x.element_size(), x.stride()
    if column != 1 or x.data_ptr() % ALIGN_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    if not (batch | row | head) % step:  # a power of two: all are multiples
        return x
    outer = [*zip(x.shape[:3], x.stride())]
    if any(size > 1 and stride % step for size, stride in outer):
        return x.clone(memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, (*(0 if stride % step else stride for _, stride in outer), 1))
