# SPDX-License-Identifier: Apache-2.0
"""The gpu tier of the contract: what a stage's kernels must do on this machine's GPU.

Gradients have checks of their own in `contract_gradients.py`.

Every launch writes into poisoned memory with guards around it, so an element that was not written,
or one too many, is found. Runs: host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from . import contract_gradients, inputs, mutation, numerics
from .compile import CompileKey, announced
from .conformance import conform
from .contract import Case, compile_skip_reason, gpu_cases, logged_a1_edges, random_cases
from .envelope import check
from .executed import check_log
from .grid import cta_tiles, grid
from .hopper.log import Log, decode
from .judging import judge, judge_gradients
from .launch import _KERNELS, empty_results, execution, kernel_for, launch, loadable, modes
from .poisoned import Guards
from .stage import KernelSource, Stage


def gpu_skip_reason(stage: KernelSource) -> str | None:
    """Why this machine cannot run the kernel of a stage or part, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    if not modes(stage, torch.device("cuda")):
        return f"stage {stage.tag} does not run on {torch.cuda.get_device_name()}"
    return compile_skip_reason()


def run_problem(stage: KernelSource, problem: inputs.Problem) -> tuple[torch.Tensor, ...]:
    """What one kernel writes, into poisoned, guarded memory; inputs must not change.

    Of a stage (out, lse), of a backward part (dq_accum, dk, dv).
    """
    if stage.kind == "backward":
        return contract_gradients.run_part(stage, problem)
    tensors, lengths = (problem.q, problem.k, problem.v), problem.options
    checked = check(stage, *tensors, problem.softmax_scale, **lengths)
    q, k, v = map(loadable, checked.batched(*tensors))
    guards = Guards(q=q, k=k, v=v, **lengths)
    out, lse = empty_results(checked, q, guards.output)
    if not (checked.mask and checked.mask.sees_nothing):
        launch(kernel_for(stage, checked, q.device), checked, q, k, v, out, lse)
    torch.cuda.synchronize(q.device)
    guards.check()
    packed = checked.mask and checked.mask.packed
    return (out[0], lse[0]) if packed else (out, lse)


def check_gpu_case(stage: Stage, case: Case) -> list[numerics.Comparison]:
    """The kernels compute the case within tolerance on this machine's GPU."""
    if case.part:
        return contract_gradients.check_gradient_case(stage, case)
    problem = case.problem("cuda")
    return [verdict.check() for verdict in judge(problem, *run_problem(stage, problem), stage)]


def _some(stage: Stage, **changes) -> inputs.Problem:
    envelope = stage.config.ENVELOPE
    sizes = {"seqlen_q": 256, "seqlen_k": 384, "batch": 2, "heads": 3}
    return Case(
        **{
            "generator": "llm_like",
            "dtype": envelope.dtypes[0],
            "head_dim": envelope.head_dims[-1],
            **sizes,
            **changes,
        }
    ).problem("cuda")


def gpu_large(stage: Stage) -> None:
    """4 x 32 heads against 4096 keys in one launch."""
    problem = _some(stage, seqlen_q=512, seqlen_k=4096, batch=4, heads=32)
    for verdict in judge(problem, *run_problem(stage, problem), stage):
        verdict.check()


def gpu_public_op(stage: Stage) -> None:
    """`attention` gives the same bits as the checked launch, with and without the LSE."""
    problem = _some(stage)
    out, lse = run_problem(stage, problem)
    same, same_lse = stage.attention(problem.q, problem.k, problem.v, return_lse=True)
    alone = stage.attention(problem.q, problem.k, problem.v)
    assert torch.equal(out, same) and torch.equal(lse, same_lse) and torch.equal(out, alone)


def gpu_softmax_scale(stage: Stage) -> None:
    """A scale of the caller's own."""
    problem = replace(_some(stage), softmax_scale=0.3)
    for verdict in judge(problem, *run_problem(stage, problem), stage):
        verdict.check()


def gpu_repeats(stage: Stage, times: int = 50) -> None:
    """The same bits every time."""
    problem = _some(stage)
    first = stage.attention(problem.q, problem.k, problem.v, return_lse=True)
    for turn in range(times):
        again = stage.attention(problem.q, problem.k, problem.v, return_lse=True)
        assert all(map(torch.equal, first, again)), f"repeat {turn} differs"


def gpu_two_streams(stage: Stage) -> None:
    """Launches on two side streams at once, each on the stream that is current."""
    problems = [_some(stage, generator=name) for name in ("gaussian", "llm_like")]
    alone = [stage.attention(row.q, row.k, row.v) for row in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    together: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for index, (row, stream) in enumerate(zip(problems, streams)):
            with torch.cuda.stream(stream):
                together[index].append(stage.attention(row.q, row.k, row.v))
    torch.cuda.synchronize()
    for wanted, found in zip(alone, together):
        assert all(torch.equal(wanted, out) for out in found)


def gpu_stream_order(stage: Stage) -> None:
    """The kernel waits for work queued before it on its stream: inputs that come late."""
    problem = _some(stage)
    wanted = stage.attention(problem.q, problem.k, problem.v)
    late = torch.full_like(problem.q, float("nan"))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(problem.q)
        out = stage.attention(late, problem.k, problem.v)
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def gpu_strided_views(stage: Stage) -> None:
    """(b, h, s, d) storage seen as (b, s, h, d); only V transposed; a size-1 batch, odd stride."""
    made = _some(stage, batch=1)
    plain = stage.attention(made.q, made.k, made.v)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (made.q, made.k, made.v)]
    assert torch.equal(plain, stage.attention(*turned))
    assert torch.equal(plain, stage.attention(made.q, made.k, turned[2]))
    odd = made.q.as_strided(made.q.shape, (1, *made.q.stride()[1:]))
    assert torch.equal(plain, stage.attention(odd, made.k, made.v))


def gpu_broadcast_batch(stage: Stage) -> None:
    """Stride 0 along the batch: one K and V for all."""
    made = _some(stage, batch=1)
    q = torch.cat([made.q, made.q * 0.5])
    k, v = (x.expand(2, -1, -1, -1) for x in (made.k, made.v))
    wanted = stage.attention(q, k.contiguous(), v.contiguous())
    assert torch.equal(wanted, stage.attention(q, k, v))


def gpu_live_nan(stage: Stage) -> None:
    """A NaN query row makes that row NaN and no other; a NaN key makes all rows of its head NaN."""
    for name, at in {"q": (0, 5, 1, 7), "k": (1, 300, 2, 0)}.items():
        problem = _some(stage)
        getattr(problem, name)[at] = float("nan")
        out, lse = run_problem(stage, problem)
        for verdict in judge(problem, out, lse, stage):
            verdict.check()
        rows = out.isnan().any(-1).sum().item()
        assert rows == (1 if name == "q" else problem.q.shape[1]), f"{rows} NaN rows from {name}"


def gpu_many_heads(stage: Stage) -> None:
    """Batch x heads of 71 280, beyond what a second or third grid axis can count."""
    head_dim = stage.config.ENVELOPE.head_dims[0]
    base = _some(stage, batch=1, heads=1, seqlen_q=128, seqlen_k=128, head_dim=head_dim)
    wanted = stage.attention(base.q, base.k, base.v)
    q, k, v = (x.expand(264, -1, 270, -1) for x in (base.q, base.k, base.v))
    out = stage.attention(q, k, v)
    assert torch.equal(out, wanted.expand_as(out))


def gpu_far_offsets(stage: Stage) -> None:
    """Element offsets beyond 2**31 in each tensor, by strides."""
    made = _some(stage, batch=2, heads=1)
    wanted = stage.attention(made.q, made.k, made.v)
    far = 2**31 + 1024
    tensors = []
    for x in (made.q, made.k, made.v):
        storage = torch.empty(far + x[0].numel(), dtype=x.dtype, device=x.device)
        view = storage.as_strided(x.shape, (far, *x.stride()[1:]))
        view.copy_(x)
        tensors.append(view)
    assert torch.equal(wanted, stage.attention(*tensors))


GPU_CHECKS: dict[str, Callable[[Stage], None]] = {
    check.__name__.removeprefix("gpu_"): check
    for check in (
        gpu_large,
        gpu_public_op,
        gpu_softmax_scale,
        gpu_repeats,
        gpu_two_streams,
        gpu_stream_order,
        gpu_strided_views,
        gpu_broadcast_batch,
        gpu_live_nan,
        gpu_many_heads,
        gpu_far_offsets,
    )
}


def masks_zero_sizes(stage: Stage) -> None:
    """No batch, no query, no key, also packed: zeros of the right shapes, without a launch."""
    kept = dict(_KERNELS)
    _KERNELS.clear()
    try:
        for zero in ("batch", "seqlen_q", "seqlen_k"):
            sizes = {"seqlen_q": 129, "seqlen_k": 129, "batch": 2, zero: 0}
            _forward_and_gradients(stage, _some(stage, **sizes))
            _forward_and_gradients(stage, _some(stage, **sizes, lengths="packed"))
        made = _some(stage, batch=1, lengths="packed")
        none = made.options["cu_seqlens_q"] * 0
        for side, names in (("q", ("q", "dout")), ("k", ("k", "v"))):
            empty = {name: getattr(made, name)[:0] for name in names}
            options = made.options | {f"cu_seqlens_{side}": none, f"max_seqlen_{side}": None}
            _forward_and_gradients(stage, replace(made, **empty, options=options))
        assert not _KERNELS, f"{len(_KERNELS)} kernels were looked for"
    finally:
        _KERNELS.update(kept)


def _forward_and_gradients(stage: Stage, problem: inputs.Problem) -> None:
    """Both, by the public op, within tolerance."""
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    scale = {"softmax_scale": problem.softmax_scale}
    out, lse = stage.attention(*leaves, **scale, **problem.options, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, problem.dout)
    for verdict in judge(problem, out, lse, stage) + judge_gradients(problem, *gradients):
        verdict.check()


def masks_at_run_time(stage: Stage) -> None:
    """Other masks and lengths take the kernels that are there."""
    _forward_and_gradients(stage, _some(stage))
    compiled: list[CompileKey] = []
    with announced(compiled.append):
        for mask, lengths, seqlen in (("causal", "packed", 300), ("(20,5)", "used", 77)):
            _forward_and_gradients(stage, _some(stage, mask=mask, lengths=lengths, seqlen_q=seqlen))
    assert not compiled, f"compiled for other lengths: {compiled}"


def random_masks(stage: Stage, part: str) -> None:
    """Random masks and lengths, see `contract.random_cases`; every case that fails is named."""
    failed = []
    for case in random_cases(stage.part(part)):
        try:
            check_gpu_case(stage, case)
        except AssertionError as wrong:
            failed.append(f"{case}: {wrong}")
    assert not failed, f"{len(failed)} cases failed\n" + "\n".join(failed)


def mask_checks(stage: Stage) -> dict[str, Callable[[Stage], None]]:
    """Those of a stage with masks, with random ones for the forward and each backward part."""
    found = {check.__name__: check for check in (masks_zero_sizes, masks_at_run_time)}
    for source in (stage, *stage.backwards):
        name = f"random_masks_{source.name or 'forward'}"
        found[name] = partial(random_masks, part=source.name)
    return found


def checks(stage: Stage) -> dict[str, Callable[[Stage], None]]:
    """Every check of the stage by name; those of gradients and masks where it has them."""
    envelope = stage.config.ENVELOPE
    found = GPU_CHECKS | (contract_gradients.GRADIENT_CHECKS if envelope.differentiable else {})
    return found | (mask_checks(stage) if envelope.masks else {})


ADVERSARIES = {
    1: {"eager": True, "delays": {"tma": 10_000}},
    2: {"eager": False, "delays": {"mma": 10_000}},
    3: {"eager": True, "delays": {"tmem": 3_000, "start": 20_000}},
    4: {"eager": False, "delays": {"mma": 5_000, "tma": 5_000, "tmem": 2_000}},
    5: {"eager": True, "delays": {"mma": 5_000, "tma": 5_000, "tmem": 2_000, "start": 5_000}},
}  # seed -> settings of the engine (`hopper.session.Session.settings`); delays in nanoseconds


def adversary_skip_reason(stage: KernelSource) -> str | None:
    """Why a stage or part cannot be executed under adversaries here, or None."""
    reason = gpu_skip_reason(stage)
    if reason:
        return reason
    if "rewritten" not in modes(stage, torch.device("cuda")):
        return "adversaries belong to execution on Hopper"
    uses = any(stage.config.plan(head_dim).tmem for head_dim in stage.config.ENVELOPE.head_dims)
    return None if uses else f"stage {stage.tag} uses no tensor memory: nothing to delay"


def check_adversary(stage: Stage, seed: int) -> None:
    """Every case of the cover, rewritten, with the delays and the MMA order of one adversary."""
    from .hopper.run import session

    engine = session(torch.cuda.current_device())
    engine.settings(seed=seed, **ADVERSARIES[seed])
    try:
        with execution("rewritten"):
            for case in gpu_cases(stage):
                check_gpu_case(stage, case)
    finally:
        engine.settings()


LOG_UNITS = 1 << 16  # 16 bytes each, for a CTA


@dataclass(frozen=True)
class Executed:
    """What the logs of a kernel showed, all of it right: CTAs, records, bytes, acts compared with
    the model, and the pairs that only rule A1 orders."""

    ctas: int
    events: int
    bytes: int
    acts: int
    a1_edges: tuple[tuple[str, str], ...]


def log_problems(stage: KernelSource, dtype: str, head_dim: int) -> dict[str, inputs.Problem]:
    """What is executed with the log: the problems of mutation, and a grid in all directions.

    Of a stage with masks also packed sequences with a window, some of them empty.
    """
    tiles, tile = cta_tiles(stage, head_dim)
    found = mutation.stage_problems(stage, head_dim, "cuda", dtype)
    owned, visited = (tiles + 1) * tile, 3 * mutation.visited_unit(stage, head_dim)
    lengths = (visited, owned) if stage.kind == "backward" else (owned, visited)
    shape = Case("gaussian", dtype, head_dim, *lengths, batch=2, heads=2)
    found |= {"grid": shape.problem("cuda")}
    if stage.config.ENVELOPE.masks:
        recipes = {"mask": "(200,50)", "lengths": "packed_used"}
        ragged = replace(shape, seqlen_q=400, seqlen_k=400, batch=4, **recipes)
        found["ragged"] = ragged.problem("cuda")
    return found


def check_executed(stage: KernelSource, dtype: str, head_dim: int) -> Executed:
    """Each cluster's log has no race, and every warp did what its role does in the model."""
    plan, logs, acts, edges = stage.config.plan(head_dim), [], 0, set()
    for name, problem in log_problems(stage, dtype, head_dim).items():
        notes_of, shape = stage.simulate_problem(problem).notes, grid(stage, problem)
        for log, notes in zip(executed_logs(stage, problem), notes_of, strict=True):
            verdict = check_log(log, plan)
            compared = conform(log, notes, plan, shape.place(log.cta))
            wrong = [*verdict.errors, *compared.differences]
            assert not wrong, f"{name}, CTA {log.cta}: {len(wrong)} findings; {wrong[0]}"
            edges |= {(a.removeprefix("mma "), b.removeprefix("mma ")) for a, b in verdict.a1_edges}
            acts += compared.acts
            logs.append(verdict)
    listed = logged_a1_edges(stage, head_dim)
    assert edges == listed, f"only A1 orders {sorted(edges)}, the page lists {sorted(listed)}"
    sizes = sum(row.events for row in logs), sum(row.size for row in logs)
    return Executed(len(logs), *sizes, acts, tuple(sorted(edges)))


def executed_logs(stage: KernelSource, problem: inputs.Problem) -> list[Log]:
    """Execute a problem with the log, and check nothing of it; the logs of clusters in order."""
    from .hopper.run import session

    shape, engine = grid(stage, problem), session(torch.cuda.current_device())
    engine.settings(log_clusters=shape.clusters, log_units=LOG_UNITS * shape.cluster)
    try:
        with execution("rewritten", log=True):
            run_problem(stage, problem)
        logs = [decode(data) for data in engine.logs()]
    finally:
        engine.settings()
    assert len(logs) == shape.clusters, f"{len(logs)} of {shape.clusters} clusters have a log"
    return logs
