# SPDX-License-Identifier: Apache-2.0
"""The test kernels compile for sm_100a, and each contains the instructions that it is there for."""

import functools

import pytest
import torch
from flash_ladder.common import facts
from flash_ladder.common.ptx import Values, immediate, ptx_hash, read

pytest.importorskip("cutlass", reason="compiling needs the CuTe DSL")
from tests.kernels import KERNELS, chain, gemm, label, ts_gemm

SWIZZLE_CODES = {0: 0, 128: 2, 64: 4, 32: 6}  # bits 61 to 63 of a shared-memory descriptor
SAMPLE = 3  # every third entry of a sweep is compiled here


def sample(name):
    """Parameter sets of a kernel that are compiled here."""
    return [pytest.param(p, id=label(p)) for p in KERNELS[name].sweep[::SAMPLE]]


def bugs():
    return [(name, bug) for name, kernel in KERNELS.items() for bug in kernel.bugs]


@functools.cache
def compiled(name, items):
    """PTX of one parameter set, given as sorted items."""
    return KERNELS[name].build(**dict(items)).__ptx__.rstrip("\0")


def ptx_of(name, **parameters):
    return compiled(name, tuple(sorted(parameters.items())))


def instruction_descriptors(ptx):
    """Constants of the instruction descriptors of all MMAs with both operands in shared memory."""
    program = read(ptx)
    (statements,) = program.entries().values()
    values = Values(program, statements)
    mmas = [s for s in statements if s.opcode.startswith("tcgen05.mma")]
    return {values.of(mma.operands[3], mma.block).constant for mma in mmas}


def shared_descriptors(ptx):
    """Constants that make a shared-memory descriptor: added to an address, or its upper half."""
    program = read(ptx)
    (statements,) = program.entries().values()
    values = Values(program, statements)
    constants = []
    for statement in statements:
        if statement.opcode in ("or.b64", "add.s64"):
            constants.append(immediate(statement.operands[-1]))
        elif statement.opcode == "mov.b64" and statement.operands[-1].startswith("{"):
            upper = statement.operands[-1].strip("{}").split(",")[-1]
            half = values.of(upper, statement.block).constant
            constants.append(None if half is None else half << 32)
    unsigned = [constant % 2**64 for constant in constants if constant is not None]
    return [constant for constant in unsigned if constant >> 46 & 0b111 == 1]


def swizzles(ptx):
    """Swizzle bytes of the constant parts of shared-memory descriptors in the text."""
    bytes_of = {code: swizzle for swizzle, code in SWIZZLE_CODES.items()}
    return {bytes_of[constant >> 61] for constant in shared_descriptors(ptx)}


def total(histogram, word):
    """Sum of the counts of the keys that contain `word`."""
    return sum(count for key, count in histogram.items() if word in key)


def check_silent(ptx):
    assert [str(finding) for finding in facts.lint(ptx)] == []


@pytest.mark.parametrize("parameters", sample("gemm"))
def test_gemm(parameters):
    config = gemm.Gemm(**parameters)
    ptx = ptx_of("gemm", **parameters)
    found = facts.ptx_facts(ptx)
    assert found.target == "sm_100a"
    assert found.threads == 128
    assert found.mma == {f"f16 cta_group::{config.ctas} SS": gemm.TILE_K // 16}
    assert found.tmem_allocs == (config.tmem_columns,)
    assert (found.tmem_deallocs, found.tmem_relinquishes) == (1, 1)
    assert found.mbarrier_inits == (1,) * (2 * gemm.STAGES + 1)
    assert found.mbarrier_expects == 1
    assert found.mbarrier_waits == 4
    assert total(found.commits, f"cta_group::{config.ctas}") == 2
    assert total(found.commits, "multicast::cluster") == (2 if config.pair else 0)
    assert total(found.bulk, "cta_group::2") == (sum(found.bulk.values()) if config.pair else 0)
    assert {shape.split(".")[0] for shape in found.tmem_loads} == {config.load_shape}
    lanes = 32 if config.load_shape == "32x32b" else 16
    assert found.tmem_load_registers * 32 == config.d_columns * lanes
    expected = 1 << 4 | config.n >> 3 << 17 | config.m >> 4 << 24
    expected |= 0b001001 << 7 if config.dtype == "bf16" else 0
    expected |= config.negate_a << 13 | config.negate_b << 14
    expected |= (config.a_major == "MN") << 15 | (config.b_major == "MN") << 16
    assert instruction_descriptors(ptx) == {expected}
    assert swizzles(ptx) == {config.swizzle_a, config.swizzle_b}
    check_silent(ptx)


@pytest.mark.parametrize("parameters", sample("ts_gemm"))
def test_ts_gemm(parameters):
    config = ts_gemm.TsGemm(**parameters)
    ptx = ptx_of("ts_gemm", **parameters)
    found = facts.ptx_facts(ptx)
    assert found.mma == {"f16 cta_group::1 TS": ts_gemm.TILE_K // 16}
    assert found.tmem_allocs == (config.tmem_columns,)
    assert sorted(found.mbarrier_inits) == [1] * 5 + [128] * 2
    assert {shape.split(".")[0] for shape in found.tmem_stores} == {config.store}
    assert {shape.split(".")[0] for shape in found.tmem_loads} == {config.load}
    assert found.tmem_store_registers == ts_gemm.A_COLUMNS * config.m // 128
    assert found.tmem_load_registers == config.n * config.m // 128
    assert found.tmem_store_waits == 1
    assert swizzles(ptx) == {config.swizzle_b}
    check_silent(ptx)


@pytest.mark.parametrize("parameters", sample("chain"))
def test_chain(parameters):
    config = chain.Chain(**parameters)
    ptx = ptx_of("chain", **parameters)
    found = facts.ptx_facts(ptx)
    ss, ts = "f16 cta_group::1 SS", "f16 cta_group::1 TS"
    assert found.mma == {ss: config.d // 16, ts: config.n // 16}
    assert found.tmem_allocs == (config.tmem_columns,)
    assert sorted(found.mbarrier_inits) == [1] * 7 + [128]
    assert sum(found.commits.values()) == 3
    assert found.mbarrier_waits == 6
    assert found.tmem_store_registers == config.n // 2
    assert found.tmem_load_registers == config.n + config.d
    assert total(found.arithmetic, "mul.rn.f32x2") + total(found.arithmetic, "mul.f32x2")
    assert swizzles(ptx) == {128}
    check_silent(ptx)


@pytest.mark.parametrize(("name", "bug"), bugs())
def test_planted_bugs(name, bug):
    kernel = KERNELS[name]
    good, bad = ptx_of(name, **kernel.buggy), ptx_of(name, **kernel.buggy, bug=bug)
    assert ptx_hash(bad) != ptx_hash(good)
    seen_as = set(kernel.bugs[bug].seen_as.split())
    assert seen_as and seen_as <= {"values", "hang", "order", "tmem", "form", "lint"}
    assert bool(facts.lint(bad)) == ("lint" in seen_as)
    waits = facts.ptx_facts(good).mbarrier_waits - facts.ptx_facts(bad).mbarrier_waits
    assert waits == (1 if bug in ("missing_wait", "p_before_written") else 0)


def test_a_planted_bit_is_reserved():
    bad = ptx_of("gemm", n=64, bug="reserved_descriptor_bit")
    assert any(constant >> 53 & 0xFF for constant in shared_descriptors(bad))
    good = ptx_of("gemm", n=64)
    assert not any(constant >> 53 & 0xFF for constant in shared_descriptors(good))


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_and_reference(name):
    """Inputs repeat with their seed, and no sum of the reference rounds in float32."""
    kernel = KERNELS[name]
    for parameters in kernel.sweep:
        inputs, again = (kernel.make_inputs(1, **parameters) for _ in range(2))
        assert all(
            torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(inputs, again)
        )
        for x, major in zip(inputs[:2], (parameters.get("a_major"), parameters.get("b_major"))):
            assert x.stride()[0 if major == "MN" else 1] == 1
        expected = kernel.reference(*inputs, **parameters)
        assert expected.dtype == torch.float32
        assert expected.abs().max() * 2**4 < 2**24  # exact in units of the smallest term
