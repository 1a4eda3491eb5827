# SPDX-License-Identifier: Apache-2.0
"""Preprocess and postprocess of stage 07 on any GPU, around a backward written in torch."""

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import contract, contract_gradients
from flash_ladder.common.contract_gpu import gpu_skip_reason

from tests.gradient_kernels import NAME, Kernels


def _skip_reason() -> str | None:
    return gpu_skip_reason(load(7).part("preprocess"))


pytestmark = pytest.mark.skipif(_skip_reason() is not None, reason=str(_skip_reason()))


@pytest.fixture
def kernels(monkeypatch):
    return Kernels(monkeypatch, compiled=("preprocess", "postprocess"))


OF_ONE_KERNEL = "gradients_many_heads"  # torch's products of another batch have other bits


@pytest.mark.parametrize("name", sorted({*contract_gradients.GRADIENT_CHECKS} - {OF_ONE_KERNEL}))
def test_check(kernels, name):
    contract_gradients.GRADIENT_CHECKS[name](kernels.stage)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("generator", contract.generators())
def test_case(kernels, generator, dtype, head_dim):
    case = contract.Case(generator, dtype, head_dim, 384, 256, 2, 3, NAME, of_lse=True)
    contract_gradients.check_gradient_case(kernels.stage, case)


def test_rows_and_heads_beyond_32_bits(kernels):
    """64-bit offsets: statistics and the sum of dQ are written in the last of many heads."""
    q = torch.randn(1, 128, 1, 128, dtype=torch.bfloat16, device="cuda")
    many = q.expand(1, -1, 2**31 // (128 * 128) + 2, -1)  # dq_accum has more than 2**31 elements
    out, lse = many, torch.zeros(1, many.shape[2], 128, device="cuda")
    stats, dq_accum = (
        torch.full(shape, float("nan"), device="cuda")
        for shape in ((1, many.shape[2], 1, 2, 128), many.shape)
    )
    part = kernels.stage.part("preprocess")
    problem = contract_gradients.check(part, q, q, q)
    kernel = kernels.kernel_for(part, problem, q.device)
    kernels.start(kernel, out, many, lse, lse, stats, dq_accum)
    assert not dq_accum[..., -1, :].any() and not dq_accum[..., 0, :].any()
    wanted = (q.float() ** 2).sum(-1)[0, :, 0]
    torch.testing.assert_close(stats[0, -1, 0, 1], wanted, rtol=1e-5, atol=0.0)
    dq = torch.empty_like(dq_accum, dtype=torch.bfloat16)
    dq_accum[..., -1, :] = 2.0
    last = kernels.kernel_for(kernels.stage.part("postprocess"), problem, q.device)
    kernels.start(last, dq_accum, dq, 0.5)
    assert (dq[..., -1, :] == 1).all() and not dq[..., -2, :].any()
