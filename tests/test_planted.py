# SPDX-License-Identifier: Apache-2.0
"""A fault planted in a kernel: thread 5 writes nothing. The contract must notice."""

import json

import pytest
from flash_ladder.common import contract_gpu
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.ptx import ptx_hash

STORES = """    store_row(rO, gO[tidx, None], row_sum)
    mLSE[batch, head, m_block * config.TILE_M + tidx] = logsumexp(row_max, row_sum, scale_log2)
"""
PLANTED = "    if tidx != 5:\n" + "".join(f"    {line}\n" for line in STORES.splitlines())
COMPILE = """
import conftest
from flash_ladder import load
from flash_ladder.common.compile import compile_stage
from flash_ladder.common.ptx import ptx_hash
print(ptx_hash(compile_stage(load(1), dtype="float16", head_dim=64).ptx))
"""
RUN = """
import json, conftest
from flash_ladder import load
from flash_ladder.common import contract, contract_gpu
case = contract.Case("gaussian", "float16", 64, 256, 128, 1, 2)
problem = case.problem("cuda")
out, lse = contract.judge(problem, *contract_gpu.run_problem(load(1), problem))
try:
    contract_gpu.check_gpu_case(load(1), case)
    raised = ""
except AssertionError as error:
    raised = str(error)
print(json.dumps({"out": out.problems, "lse": lse.problems, "raised": raised}))
"""


@pytest.fixture
def planted(dsl, copy_sources):
    """A copy of the sources with the fault in stage 01."""
    folder = copy_sources("planted")
    path = folder / "stages/01/kernel.py"
    text = path.read_text()
    assert text.count(STORES) == 1
    path.write_text(text.replace(STORES, PLANTED))
    return folder


def test_the_planted_kernel_is_another_kernel(planted, stage, run_python):
    right = ptx_hash(compile_stage(stage, dtype="float16", head_dim=64).ptx)
    assert run_python(COMPILE, planted).strip() != right


def test_the_contract_names_the_rows_that_were_not_written(planted, stage, run_python):
    reason = contract_gpu.gpu_skip_reason(stage)
    if reason:
        pytest.skip(reason)
    found = json.loads(run_python(RUN, planted))
    rows = "rows (0, 5, 0), (0, 5, 1), (0, 133, 0), (0, 133, 1)"
    assert found["out"] == [f"256 elements never written (still poison), {rows}"]
    rows = "rows (0, 0), (0, 1)"
    assert found["lse"] == [f"4 elements never written (still poison), {rows}"]
    assert "256 elements never written (still poison), rows (0, 5, 0)" in found["raised"]
