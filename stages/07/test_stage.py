# SPDX-License-Identifier: Apache-2.0
"""The contract of this stage, in three tiers; the same file in every stage.

Host: plan, refusals, model against the oracle, mutation. Compile: builds, facts, evidence (needs
the CuTe DSL, no GPU). Gpu: every case on this machine's GPU.
"""

import pytest
from flash_ladder.common import contract, contract_gpu, evidence
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.sass import MissingTool

STAGE = contract.this_stage(__file__)


@pytest.fixture
def dsl():
    """Skip, with the reason, where nothing can be compiled."""
    reason = contract.compile_skip_reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def gpu():
    """Skip, with the reason, where the kernel cannot run."""
    reason = contract_gpu.gpu_skip_reason(STAGE)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("head_dim", STAGE.config.ENVELOPE.head_dims)
def test_host_plan(head_dim):
    contract.check_plan(STAGE, head_dim)


@pytest.mark.parametrize("name", contract.refusals(STAGE))
def test_host_refusal(name):
    contract.check_refusal(STAGE, name)


@pytest.mark.parametrize("case", contract.cases(STAGE, contract.HOST_SIZES), ids=str)
def test_host_model(case):
    contract.check_model(STAGE, case)


def test_host_mutation():
    contract.check_mutation(STAGE, fast=True)


@pytest.mark.parametrize("head_dim", STAGE.config.ENVELOPE.head_dims)
def test_host_a1(head_dim):
    contract.check_a1(STAGE, head_dim)


@pytest.mark.parametrize("key", contract.compile_keys(STAGE), ids=lambda key: key.name)
def test_compile_facts(dsl, key):
    kernel = compile_stage(STAGE, arch=key.arch, dtype=key.dtype, head_dim=key.head_dim)
    try:
        contract.check_facts(STAGE, kernel)
    except MissingTool as missing:
        pytest.skip(f"its PTX is as declared, its machine code was not read: {missing}")


def test_compile_evidence(dsl):
    if not STAGE.evidence["runs"]:
        pytest.skip(f"stage {STAGE.tag} has not been executed on hardware yet")
    evidence.validate(STAGE.evidence, STAGE)
    assert evidence.stale(STAGE) == []


@pytest.mark.parametrize("case", contract.cases(STAGE, contract.GPU_SIZES), ids=str)
def test_gpu_case(gpu, case):
    contract_gpu.check_gpu_case(STAGE, case)


@pytest.mark.parametrize("name", contract_gpu.GPU_CHECKS)
def test_gpu_check(gpu, name):
    contract_gpu.GPU_CHECKS[name](STAGE)


@pytest.mark.parametrize("seed", contract_gpu.ADVERSARIES)
def test_gpu_adversary(seed):
    reason = contract_gpu.adversary_skip_reason(STAGE)
    if reason:
        pytest.skip(reason)
    contract_gpu.check_adversary(STAGE, seed)


@pytest.mark.parametrize("head_dim", STAGE.config.ENVELOPE.head_dims)
@pytest.mark.parametrize("dtype", STAGE.config.ENVELOPE.dtypes)
def test_gpu_log(dtype, head_dim):
    reason = contract_gpu.adversary_skip_reason(STAGE)
    if reason:
        pytest.skip(reason)
    contract_gpu.check_executed(STAGE, dtype, head_dim)
