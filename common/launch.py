# SPDX-License-Identifier: Apache-2.0
"""Running a stage's kernel on the tensors' GPU. Runs: host."""

from __future__ import annotations

import math

import torch

from .compile import CompiledKernel, compile_stage
from .envelope import ALIGN_BYTES, Problem, check
from .stage import Stage

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


def attention(stage: Stage, q, k, v, *, softmax_scale=None, return_lse=False):
    """See `Stage.attention`."""
    problem = check(stage, q, k, v, softmax_scale)
    kernel = kernel_for(stage, problem, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(
        (problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32, device=q.device
    )
    launch(kernel, problem, q, k, v, out, lse)
    return (out, lse) if return_lse else out


def kernel_for(stage: Stage, problem: Problem, device: torch.device) -> CompiledKernel:
    """The compiled kernel for this problem on this device; ValueError when it cannot run there."""
    arch = native_arch(device)
    if arch not in stage.config.ARCHS:
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"stage {stage.tag} runs on {', '.join(stage.config.ARCHS)}; "
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
        )
    return compile_stage(stage, arch=arch, dtype=problem.dtype, head_dim=problem.head_dim)


def launch(kernel: CompiledKernel, problem: Problem, q, k, v, out, lse) -> None:
    """Start the kernel on the current stream of q's device, writing `out` and `lse`."""
    scale_log2 = problem.softmax_scale * math.log2(math.e)
    with torch.cuda.device(q.device), torch.no_grad():
        kernel.function(*(_aligned(x.detach()) for x in (q, k, v, out)), lse, scale_log2)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements; strides of axes of size 1, which address nothing, become aligned."""
    step = ALIGN_BYTES // tensor.element_size()
    strides = [
        stride if size > 1 or stride % step == 0 else 0
        for size, stride in zip(tensor.shape, tensor.stride())
    ]
    if tuple(strides[:3]) == tensor.stride()[:3]:
        return tensor
    return tensor.as_strided(tensor.shape, (*strides[:3], 1))
