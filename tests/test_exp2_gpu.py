# SPDX-License-Identifier: Apache-2.0
"""Measurements of 2^x on a GPU: how they count, and what the committed data say."""

import numpy as np
import pytest
import torch
from flash_ladder import load
from flash_ladder.common import exp2, exp2_study, float32
from flash_ladder.common.ptx import ptx_hash

POLYNOMIAL = load(5).config.POLYNOMIAL
PAGE = exp2_study.RESULTS.parent.parent / "exp2.md"


@pytest.fixture(scope="module")
def exp2_gpu(dsl):
    """The module, which needs the CuTe DSL to be imported."""
    from flash_ladder.common import exp2_gpu

    return exp2_gpu


def test_the_compiled_emulation_is_that_of_the_stage(exp2_gpu):
    """The same instructions in the same numbers as a pair has in the kernel of stage 05."""
    ptx = exp2_gpu.compiled_ptx("emulated")
    assert ptx.count("add.rm.f32x2") == 1 and ptx.count("fma.rn.f32x2") == 3
    assert ptx.count("add.rn.f32x2") == 2 and "ex2" not in ptx
    assert exp2_gpu.compiled_ptx("mufu").count("ex2.approx.ftz.f32") == 2


def test_a_difference_of_one_bit_is_found(exp2_gpu):
    start = 0xC1200000  # -10
    x = float32.from_bits(np.arange(start, start + 9000, dtype=np.uint32))
    found = exp2.exp2(x, POLYNOMIAL)
    assert exp2_gpu._differences((start, found)) == (0, None)
    found[[8000, 8500]] = np.nextafter(found[[8000, 8500]], np.float32(1))
    assert exp2_gpu._differences((start, found)) == (2, start + 8000)


def test_functions_can_be_counted_like_polynomials():
    mine = lambda x: exp2.horner(x, POLYNOMIAL)
    found = exp2.exhaustive({"function": mine, "polynomial": POLYNOMIAL}, stride=1 << 14)
    assert found["function"] == found["polynomial"]


def test_a_reference_takes_the_place_of_correct_rounding():
    mine = lambda x: exp2.horner(x, POLYNOMIAL)
    up = lambda x: exp2.round_mantissa(mine(x), 16) + np.float32(2.0**-7)  # a unit of bf16
    found = exp2.exhaustive({"p": POLYNOMIAL, "up": up}, stride=1 << 14, reference=mine)
    assert found["p"]["bf16"]["same"] == found["p"]["fp16"]["same"] == 1
    assert found["ideal"]["bf16"]["same"] < 1
    assert found["up"]["bf16"]["same"] < 0.01 and found["up"]["bf16"]["within_one"] == 1


def test_odd_arrays_and_their_order(exp2_gpu):
    seen = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.numel())
        return 2 * x

    apply = exp2_gpu.on_arrays(double, device="cpu")
    assert apply(np.float32([1, 2, 3])).tolist() == [2, 4, 6] and seen == [4]


@pytest.mark.parametrize("name", ["mufu", "emulated"])
def test_what_was_measured_is_todays_code(exp2_gpu, name):
    now = ptx_hash(exp2_gpu.compiled_ptx(name))
    assert exp2_study.gpu_results()["ptx_sha256"][name] == now, exp2_gpu.COMMAND


def test_what_was_measured():
    data = exp2_study.gpu_results()
    assert data["emulated"] == {"compared": 2**32, "different": 0, "first": None}
    mufu, quoted = data["mufu"], exp2_study.TABLE_2["MUFU.EX2"]
    assert mufu["fp32"]["mean"] == pytest.approx(quoted[1], rel=0.01)
    assert quoted[0] < mufu["fp32"]["max"] < 1.05 * quoted[0]
    for row in data["against_mufu"].values():
        assert all(row[kind]["within_one"] == 1 for kind in exp2.DROPPED)


def test_the_page_says_what_was_measured():
    page, data = PAGE.read_text(encoding="utf-8"), exp2_study.gpu_results()
    assert data["provenance"]["date"] in page and data["provenance"]["driver"] in page
    (told,) = (part for part in page.split("\n\n") if part.startswith("**The hardware itself.**"))
    for degree in (3, 4):
        for kind in ("bf16", "fp16"):
            share = data["against_mufu"][f"one {degree}"][kind]["same"]
            assert f"{100 * share:.3f} %" in told
