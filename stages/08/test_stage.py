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
MODELS = contract.models(STAGE)  # the stage's own, and those of its parts
SOURCE = ("source", "head_dim")


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


@pytest.mark.parametrize(SOURCE, contract.configurations(STAGE.kernels), ids=contract.label)
def test_host_plan(source, head_dim):
    contract.check_plan(source, head_dim)


def test_host_parts():
    contract.check_parts(STAGE)


@pytest.mark.parametrize("name", contract.refusals(STAGE))
def test_host_refusal(name):
    contract.check_refusal(STAGE, name)


@pytest.mark.parametrize("case", contract.host_cases(STAGE), ids=str)
def test_host_model(case):
    contract.check_model(STAGE, case)


@pytest.mark.parametrize("source", MODELS, ids=contract.label)
def test_host_mutation(source):
    contract.check_mutation(source, fast=True)


@pytest.mark.parametrize(SOURCE, contract.configurations(MODELS), ids=contract.label)
def test_host_a1(source, head_dim):
    contract.check_a1(source, head_dim)


@pytest.mark.parametrize("key", contract.compile_keys(STAGE), ids=lambda key: key.name)
def test_compile_facts(dsl, key):
    source = STAGE.part(key.part)
    kernel = compile_stage(source, arch=key.arch, dtype=key.dtype, head_dim=key.head_dim)
    try:
        contract.check_facts(source, kernel)
    except MissingTool as missing:
        pytest.skip(f"its PTX is as declared, its machine code was not read: {missing}")


def test_compile_evidence(dsl):
    if not STAGE.evidence["runs"]:
        pytest.skip(f"stage {STAGE.tag} has not been executed on hardware yet")
    evidence.validate(STAGE.evidence, STAGE)
    assert evidence.stale(STAGE) == []


@pytest.mark.parametrize("case", contract.gpu_cases(STAGE), ids=str)
def test_gpu_case(gpu, case):
    contract_gpu.check_gpu_case(STAGE, case)


@pytest.mark.parametrize("name", contract_gpu.checks(STAGE))
def test_gpu_check(gpu, name):
    contract_gpu.checks(STAGE)[name](STAGE)


@pytest.mark.parametrize("seed", contract_gpu.ADVERSARIES)
def test_gpu_adversary(seed):
    reason = contract_gpu.adversary_skip_reason(STAGE)
    if reason:
        pytest.skip(reason)
    contract_gpu.check_adversary(STAGE, seed)


@pytest.mark.parametrize(SOURCE, contract.configurations(MODELS), ids=contract.label)
@pytest.mark.parametrize("dtype", STAGE.config.ENVELOPE.dtypes)
def test_gpu_log(dtype, source, head_dim):
    reason = contract_gpu.adversary_skip_reason(source)
    if reason:
        pytest.skip(reason)
    contract_gpu.check_executed(source, dtype, head_dim)
