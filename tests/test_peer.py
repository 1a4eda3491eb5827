# SPDX-License-Identifier: Apache-2.0
"""`pytest -m peer`: upstream flash-attn-4, unmodified, executed on a Hopper GPU.

The engine and the rewriter are judged on kernels that other people wrote and verified on Blackwell:
if they come out right, execution here means something for ours.
"""

import importlib.util

import pytest
import torch
from flash_ladder.common import numerics, reference

pytestmark = pytest.mark.peer


def skip_reason() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU (sm_90)"
    if importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash-attn-4"
    return None


@pytest.fixture(scope="module")
def seen():
    """Logs of each launch of a kernel with tensor memory, while the session keeps logs."""
    return []


@pytest.fixture(scope="module")
def flash_attn_func(seen):
    """Upstream's op, made to choose its sm_100 kernels, compiled through the rewriter."""
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_ATTENTION_ARCH", "sm_100")
        patch.setenv("CUTE_DSL_ARCH", "sm_100a")
        sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        patch.setenv("FLASH_ATTENTION_NUM_SMS", str(sms))
        from flash_attn.cute.interface import flash_attn_func
        from flash_ladder.common.hopper.redirect import redirected
        from flash_ladder.common.hopper.run import HopperKernel, session

        launch = HopperKernel.function

        def with_logs(kernel, *arguments):
            launch(kernel, *arguments)
            seen.extend(session(kernel.device_index).logs() if kernel.object.log else [])

        patch.setattr(HopperKernel, "function", with_logs)
        with redirected(torch.device("cuda"), log=True):
            yield flash_attn_func


CASES = [
    (seqlen, causal, heads_kv)
    for seqlen in (512, 777, 1000)
    for causal in (False, True)
    for heads_kv in (4, 1)
]


@pytest.mark.parametrize("seqlen, causal, heads_kv", CASES)
def test_forward_and_backward(flash_attn_func, seqlen, causal, heads_kv):
    generator = torch.Generator("cuda").manual_seed(seqlen)

    def tensor(heads):
        shape = (2, seqlen, heads, 128)
        return torch.randn(
            shape, dtype=torch.bfloat16, device="cuda", generator=generator
        ).requires_grad_()

    q, k, v = tensor(4), tensor(heads_kv), tensor(heads_kv)
    dout = torch.randn(q.shape, dtype=q.dtype, device="cuda", generator=generator)
    result = flash_attn_func(q, k, v, causal=causal)
    out = result[0] if isinstance(result, tuple) else result
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    truth = reference.attention(q, k, v, causal=causal)
    yardstick = reference.same_precision(q, k, v, causal=causal)
    numerics.compare(out, truth.out, yardstick[0], name="out").check()
    exact = reference.attention_backward(q, k, v, dout, causal=causal)
    baseline = reference.same_precision_backward(q, k, v, dout, causal=causal)
    stored = reference.stored_output_error(q, k, v, dout, out_dtype=out.dtype, causal=causal)
    for name, found in zip(("dq", "dk", "dv"), gradients):
        true, base = getattr(exact, name), getattr(baseline, name)
        floor = numerics.half_ulp(true, found.dtype) + getattr(stored, name).abs()
        numerics.compare(found, true, base, floor=floor, rows=False, name=name).check()


def test_forward_is_fast_enough_to_use(flash_attn_func):
    """2048 x 2048, 16 heads, d 128 within 20 ms: a suite of such cases stays bearable."""
    q, k, v = (torch.randn(1, 2048, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        flash_attn_func(q, k, v, causal=False)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    print(f"forward, executed in software: {min(times):.2f} ms")
    assert min(times) <= 20


@pytest.mark.parametrize("causal", [False, True])
def test_logs_show_no_race(flash_attn_func, seen, causal):
    """What docs/peer-log.md says: the barriers order every pair of accesses."""
    from flash_ladder.common.executed import check_log
    from flash_ladder.common.hopper.log import decode
    from flash_ladder.common.hopper.run import session

    shape = (1, 512, 2, 128)
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)
    )
    engine = session(torch.cuda.current_device())
    engine.settings(log_clusters=8, log_units=1 << 18)
    try:
        result = flash_attn_func(q, k, v, causal=causal)
        out = result[0] if isinstance(result, tuple) else result
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    finally:
        engine.settings()
    verdicts = [check_log(decode(data), ours=False) for data in seen]
    assert len(verdicts) >= 6
    left = ("is left in mid-phase", "never waited for a bulk copy")  # when the CTA ends
    for verdict in verdicts:
        races = [str(row) for row in verdict.errors if not any(x in str(row) for x in left)]
        assert not races, races[0]
        assert verdict.warnings and verdict.a1_edges
