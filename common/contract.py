# SPDX-License-Identifier: Apache-2.0
"""The suite that every stage passes, in three tiers: host, compile, gpu.

The gpu tier is in `contract_gpu.py`. `stages/NN/test_stage.py` runs all of it under pytest,
`flash-ladder verify N` runs the gpu tier and writes evidence. Each check raises AssertionError (or
the library's own error) when the stage breaks the contract. What a machine cannot run is skipped
with the reason. Runs: host.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from . import facts, inputs, mask_cases, mutation, numerics
from .compile import CompiledKernel, CompileKey, DslMissing, require_dsl
from .hopper.steps import Names
from .judging import judge, judge_gradients
from .model import observe
from .ordering import Ordering
from .pairwise import pairwise
from .plan import Plan
from .sass import SassReport, assemble, report
from .stage import STAGES_FOLDER, KernelSource, Part, Stage

MAX_CASES = 60  # of a stage's gpu tier
GPU_SIZES = {
    "seqlen_q": (128, 256, 384, 1024),
    "seqlen_k": (128, 256, 640, 1024, 2048),
    "batch": (1, 2, 3),
    "heads": (1, 3, 8),
}
HOST_SIZES = {
    "seqlen_q": (128, 256),
    "seqlen_k": (128, 384),
    "batch": (1, 2),
    "heads": (1, 2),
}  # the model runs every CTA of these in well under a second
GPU_GRADIENT_SIZES = {
    "seqlen_q": (128, 384, 1024),
    "seqlen_k": (128, 256, 640, 1024),
    "batch": (1, 2),
    "heads": (1, 3),
    "of_lse": (False, True),
}
HOST_GRADIENT_SIZES = HOST_SIZES | {"of_lse": (False, True)}
RECIPES = {"mask": mask_cases.MASKS, "lengths": mask_cases.USUAL}
GPU_MASK_SIZES = {
    **RECIPES,
    "seqlen_q": (1, 127, 129, 300, 704),
    "seqlen_k": (1, 127, 192, 300, 1100),
    "batch": (1, 3),
    "heads": (1, 3),
    "of_lse": (False, True),
}
HOST_MASK_SIZES = {
    **RECIPES,
    "seqlen_q": (0, 1, 127, 129, 300),
    "seqlen_k": (0, 1, 127, 129, 300),
    "batch": (1, 3),
    "heads": (1,),
    "of_lse": (False, True),
}
MANY_QUERIES = 640  # five tiles: every ring of a backward, of at most two slots, wraps around
RANDOM = 54  # random masks and lengths of the forward, and of each backward part
HOST_RANDOM = 8  # of them for a model


@dataclass(frozen=True)
class Case:
    """One problem of the contract: which inputs, of which size.

    part: the backward part that computes gradients, "" for the forward; of_lse: whether LSE has a
    gradient as well as O; mask and lengths: see `mask_cases`.
    """

    generator: str
    dtype: str
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    part: str = ""
    of_lse: bool = False
    mask: str = ""
    lengths: str = ""

    def __str__(self) -> str:
        size = f"b{self.batch}-h{self.heads}-q{self.seqlen_q}-k{self.seqlen_k}-d{self.head_dim}"
        part = f"{self.part}-{'dlse-' if self.of_lse else ''}" if self.part else ""
        recipes = "".join(f"-{name}" for name in (self.mask, self.lengths) if name)
        return f"{part}{self.generator}-{self.dtype}-{size}{recipes}"

    def problem(self, device: str | torch.device = "cpu") -> inputs.Problem:
        """The tensors; the same bits on every device."""
        return mask_cases.problem(
            self.generator,
            self.mask,
            self.lengths,
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=getattr(torch, self.dtype),
            device=device,
        )

    def dlse(self, device: str | torch.device = "cpu") -> torch.Tensor | None:
        """The gradient of LSE, of its shape, standard normal float32; None without one.

        The same bits on every device.
        """
        if not self.of_lse:
            return None
        generator = torch.Generator().manual_seed(0)
        *batch, rows, heads, _ = self.problem().q.shape
        return torch.randn((*batch, heads, rows), generator=generator).to(device)


def this_stage(test_file: str) -> Stage:
    """The stage whose folder holds `test_file`."""
    return Stage(int(pathlib.Path(test_file).parent.name))


def generators() -> list[str]:
    """Names of the generators that fit stages without sequence lengths."""
    return [name for name, row in inputs.GENERATORS.items() if row.needs is None]


def cases(stage: KernelSource, sizes: dict[str, tuple]) -> list[Case]:
    """A pairwise cover of generators, compiled kernels and `sizes` within the envelope.

    A kernel counts as one factor: each dtype and head dim meets every generator and size.
    """
    found = _cover([stage], sizes)
    assert len(found) <= MAX_CASES, f"{len(found)} cases; the contract allows {MAX_CASES}"
    return found


def _cover(sources: Iterable[KernelSource], sizes: dict[str, tuple]) -> list[Case]:
    kernels = tuple(
        (source.name, *pair)
        for source in sources
        for pair in itertools.product(*_configurations(source))
    )
    found = []
    for values in pairwise({"generator": generators(), "kernel": kernels, **sizes}):
        part, dtype, head_dim = values.pop("kernel")
        found.append(Case(dtype=dtype, head_dim=head_dim, part=part, **values))
    return found


def _configurations(source: KernelSource) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Dtypes and head dims."""
    return source.config.ENVELOPE.dtypes, source.config.ENVELOPE.head_dims


def named_cases(stage: Stage) -> list[Case]:
    """Every problem of `mask_cases.NAMED` for the forward and each backward part."""
    usual = {"generator": "gaussian", "batch": 1, "heads": 2}
    found = []
    for source in (stage, *stage.backwards):
        kernels = itertools.cycle(itertools.product(*_configurations(source)))
        for recipe, (dtype, head_dim) in zip(mask_cases.NAMED, kernels):
            kernel = {"dtype": dtype, "head_dim": head_dim, "part": source.name}
            found.append(Case(**{**usual, **kernel, **recipe}))
    return found


def random_cases(source: KernelSource) -> list[Case]:
    """RANDOM cases of a forward or a backward part, the same every time."""
    found, dlse = [], (False, True) if source.name else (False,)
    kernels = itertools.cycle(itertools.product(*_configurations(source), dlse))
    names = itertools.cycle(("gaussian", "llm_like", "dominant_key"))
    recipes = mask_cases.random_recipes(len(source.name), RANDOM)
    for recipe, (dtype, head_dim, of_lse), name in zip(recipes, kernels, names):
        found.append(Case(name, dtype, head_dim, **recipe, part=source.name, of_lse=of_lse))
    return found


def small_random_cases(source: KernelSource) -> list[Case]:
    """Random cases for a model: up to 700 rows, at most two sequences of one head, some of which
    have tiles with and without a mask."""
    found = [case for case in random_cases(source) if max(case.seqlen_q, case.seqlen_k) <= 700]
    return [replace(case, batch=min(case.batch, 2), heads=1) for case in found[:HOST_RANDOM]]


def host_cases(stage: Stage) -> list[Case]:
    """What the models compute: the forward, and gradients by each backward part with a model.

    Of a stage with masks in a single cover, and random ones.
    """
    modelled = [part for part in stage.backwards if part.model]
    long = [case for part in modelled for case in long_cases(part)]
    if stage.config.ENVELOPE.masks:
        drawn = [case for source in (stage, *modelled) for case in small_random_cases(source)]
        return _cover([stage, *modelled], HOST_MASK_SIZES) + drawn + long
    gradients = [case for part in modelled for case in cases(part, HOST_GRADIENT_SIZES)]
    return cases(stage, HOST_SIZES) + gradients + long


def long_cases(part: Part) -> list[Case]:
    """For each head dim gradients of so many queries that the rings of a CTA wrap around."""
    dtypes, head_dims = _configurations(part)
    sizes = {"seqlen_q": MANY_QUERIES, "seqlen_k": 256, "batch": 1, "heads": 1, "of_lse": True}
    return [
        Case("llm_like", dtype, head_dim, **sizes, part=part.name)
        for dtype, head_dim in zip(itertools.cycle(dtypes), head_dims)
    ]


def gpu_cases(stage: Stage) -> list[Case]:
    """What the kernels compute: the forward, and gradients by each backward part."""
    gradients = [case for part in stage.backwards for case in cases(part, GPU_GRADIENT_SIZES)]
    found = cases(stage, GPU_SIZES) + gradients
    if stage.config.ENVELOPE.masks:
        found += _cover([stage, *stage.backwards], GPU_MASK_SIZES) + named_cases(stage)
    return found


def models(stage: Stage) -> list[KernelSource]:
    """The stage and those of its parts that have a model."""
    return [source for source in stage.kernels if source.model]


def configurations(sources: Iterable[KernelSource]) -> list[tuple[KernelSource, int]]:
    """(stage or part, head dim) for all that they are compiled for."""
    return [(source, d) for source in sources for d in source.config.ENVELOPE.head_dims]


def label(value: object) -> str:
    """How a test names a parameter; the stage itself is the forward."""
    return value.name or "forward" if isinstance(value, KernelSource) else str(value)


def compile_keys(stage: Stage) -> list[CompileKey]:
    """For the stage and each part: every dtype and head dim for sm_100a; the last of each for the
    other targets."""
    found = []
    for source in stage.kernels:
        envelope = source.config.ENVELOPE
        both = [(dtype, head_dim) for dtype in envelope.dtypes for head_dim in envelope.head_dims]
        found += [CompileKey.of(source, "sm_100a", *pair) for pair in both]
        others = [arch for arch in source.config.ARCHS if arch != "sm_100a"]
        found += [CompileKey.of(source, arch, *both[-1]) for arch in others]
    return found


# ---- host tier -----------------------------------------------------------------------------


def _good(stage: Stage, **changes) -> dict:
    """Arguments that the stage accepts but for their device, with `changes`."""
    envelope = stage.config.ENVELOPE
    shape = (1, envelope.seqlen_multiple, 2, envelope.head_dims[0])
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, envelope.dtypes[0])) for name in "qkv"}
    return {**tensors, **changes}


def _all(stage: Stage, transform: Callable) -> dict:
    return {name: transform(tensor) for name, tensor in _good(stage).items()}


def refusals(stage: Stage) -> dict[str, tuple[dict, type, str, str]]:
    """Bad calls by name: (arguments, error type, words of the message, envelope rule or "")."""
    envelope = stage.config.ENVELOPE
    good = _good(stage)
    q, d = good["q"], envelope.head_dims[0]
    table = {
        "cpu tensors": (good, ValueError, "CUDA GPU", ""),
        "not a tensor": (_good(stage, q=[1.0]), TypeError, "q must be a torch.Tensor", ""),
        "sparse": (_good(stage, k=q.to_sparse()), TypeError, "k must be a dense", ""),
        "nested": (_all(stage, _nested), TypeError, "q must be a dense", ""),
        "float32": (_all(stage, torch.Tensor.float), TypeError, "takes", "dtype"),
        "mixed dtypes": (_good(stage, v=q.half()), TypeError, "one dtype", ""),
        "rank 3": (_all(stage, lambda x: x[0]), ValueError, "(batch, seqlen, heads", ""),
        "k and v differ": (_good(stage, v=q[:, :, :1]), ValueError, "one shape", ""),
        "batch differs": (_good(stage, q=torch.cat([q, q])), ValueError, "agree in batch", ""),
        "head dim differs": (_good(stage, q=q[..., : d // 2]), ValueError, "head dim", ""),
        "scale NaN": (_good(stage, softmax_scale=float("nan")), ValueError, "positive", ""),
        "scale negative": (_good(stage, softmax_scale=-1.0), ValueError, "positive", ""),
        "scale tensor": (_good(stage, softmax_scale=q.sum()), TypeError, "a number", ""),
        "stride along d": (
            _all(stage, lambda x: torch.stack([x, x], -1)[..., 0]),
            ValueError,
            "stride 1 along head dim",
            "strides",
        ),
        "odd strides": (_all(stage, _unaligned_rows), ValueError, "multiples of 8", "strides"),
        "odd offset": (_all(stage, _unaligned_start), ValueError, "must start at", "strides"),
    }
    wide = torch.zeros(*q.shape[:3], 72, dtype=q.dtype)
    short = torch.zeros(1, 100, 2, d, dtype=q.dtype)
    if 72 not in envelope.head_dims:
        table["head dim 72"] = (_all(stage, lambda _: wide), ValueError, "got 72", "head_dim")
    if envelope.seqlen_multiple > 1:
        table["length 100"] = (_good(stage, q=short), ValueError, "got 100", "seqlen")
        table["length 0"] = (_all(stage, lambda x: x[:, :0]), ValueError, "got 0", "seqlen")
        table["batch 0"] = (_all(stage, lambda x: x[:0]), ValueError, "at least 1", "seqlen")
    if not envelope.grouped_heads:
        one = q[:, :, :1]
        table["grouped heads"] = (_good(stage, k=one, v=one), ValueError, "as many key", "heads")
    if not envelope.differentiable:
        wants = q.clone().requires_grad_()
        table["requires grad"] = (_good(stage, q=wants), ValueError, "no backward", "grad")
    return table


def _nested(x: torch.Tensor) -> torch.Tensor:
    """The same as sequences of their own lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
        return torch.nested.nested_tensor(list(x))


def _unaligned_rows(x: torch.Tensor) -> torch.Tensor:
    """A view of the same shape whose rows are 2 bytes further apart."""
    return torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype)[..., :-1]


def _unaligned_start(x: torch.Tensor) -> torch.Tensor:
    """A view of the same shape and strides that starts 2 bytes late."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def check_refusal(stage: Stage, name: str) -> None:
    """The bad call raises the right error, with its words and the stage that lifts the rule."""
    arguments, error, words, rule = refusals(stage)[name]
    try:
        stage.attention(**arguments)
    except error as raised:
        text = str(raised)
    else:
        raise AssertionError(f"{name}: nothing was raised")
    lifted = stage.config.ENVELOPE.lifted_by.get(rule)
    wanted = [words] + ([f"stage {lifted:02d} lifts this"] if lifted else [])
    absent = [word for word in wanted if word not in text]
    assert not absent, f"{name}: {absent} not in {text!r}"


def check_parts(stage: Stage) -> None:
    """A stage that differentiates has all kernels for it, for all that its forward takes."""
    config = stage.config
    usual, envelope = getattr(config, "BACKWARD", {}), config.ENVELOPE
    wanted = set(envelope.head_dims if envelope.differentiable else ())
    assert set(usual) == wanted, f"BACKWARD has head dims {set(usual)}, needed are {wanted}"
    strange = set(usual.values()) - {part.name for part in stage.backwards}
    assert not strange, f"BACKWARD names {strange}, no backward parts"
    needed = {"preprocess": envelope.head_dims, "postprocess": envelope.head_dims} if usual else {}
    for name in usual.values():
        needed[name] = [head_dim for head_dim, part in usual.items() if part == name]
    for name, head_dims in needed.items():
        part = stage.part(name).config
        assert set(head_dims) <= set(part.ENVELOPE.head_dims), f"{name} lacks a head dim"
        assert set(envelope.dtypes) <= set(part.ENVELOPE.dtypes), f"{name} lacks a dtype"
        assert envelope.seqlen_multiple % part.ENVELOPE.seqlen_multiple == 0, f"{name}: lengths"
        assert set(config.ARCHS) <= set(part.ARCHS), f"{name} lacks an architecture"


def check_plan(stage: KernelSource, head_dim: int) -> None:
    """The plan's resources can work (`Plan.check`)."""
    stage.config.plan(head_dim).check()


def check_model(stage: Stage, case: Case) -> list[numerics.Comparison]:
    """The model computes the case within tolerance; its schedule comes to an end, without a
    finding: no race, no read of unwritten memory, nothing left behind."""
    problem, dlse = case.problem(), case.dlse()
    upstream = {"dlse": dlse} if case.part else {}
    with observe(lambda: Ordering("practice")):
        run = stage.part(case.part).simulate_problem(problem, **upstream)
    assert not run.findings, f"{len(run.findings)} findings in {case}:\n" + "\n".join(run.findings)
    if not case.part:
        return [verdict.check() for verdict in judge(problem, run.out, run.lse, stage)]
    verdicts = judge_gradients(problem, run.dq, run.dk, run.dv, dlse)
    return [verdict.check() for verdict in verdicts]


def check_mutation(
    stage: KernelSource, fast: bool = True, head_dim: int | None = None
) -> mutation.Report:
    """Every synchronisation deleted from the model is missed, or the stage says why it is not.

    fast: a third of them. head_dim: the envelope's last when None.
    """
    report = mutation.mutate(mutation.stage_subject(stage, head_dim), fast)
    assert not report.complaints, f"{report.summary()}\n" + "\n".join(report.complaints)
    return report


# ---- compile tier --------------------------------------------------------------------------


def compile_skip_reason() -> str | None:
    """Why this machine cannot compile, or None."""
    try:
        require_dsl()
    except DslMissing as missing:
        return str(missing)
    return None


def _numbers_first(value: int | None) -> tuple[bool, int]:
    """Sort key: ascending, what is not a constant last."""
    return value is None, value or 0


def plan_mismatches(plan: Plan, ptx: facts.PtxFacts) -> list[str]:
    """Where the PTX does not show the plan's barriers, register budgets or tensor memory."""
    mbarriers = [row for row in plan.barriers if row.kind == "mbarrier"]
    named = [row for row in plan.barriers if row.kind == "named"]
    columns = max((row.column + row.columns for row in plan.tmem), default=0)
    expected = {
        "mbarrier arrival counts": sorted(
            row.arrivals(plan) for row in mbarriers for _ in range(row.stages)
        ),
        "named barriers (number, threads)": sorted(
            f"{row.number + stage}, {row.arrivals(plan)}"
            for row in named
            for stage in range(row.stages)
        ),
        "setmaxnreg budgets": sorted({row.registers for row in plan.roles if row.registers}),
        "tensor memory is allocated": columns > 0,
    }
    shown = {
        "mbarrier arrival counts": sorted(ptx.mbarrier_inits, key=_numbers_first),
        "named barriers (number, threads)": sorted(
            {use.partition(" ")[2] for use in ptx.named_barriers}
        ),
        "setmaxnreg budgets": sorted(
            {registers for _, registers in ptx.setmaxnreg}, key=_numbers_first
        ),
        "tensor memory is allocated": sum(size or 0 for size in ptx.tmem_allocs) >= max(columns, 1),
    }
    return [
        f"{name}: the plan has {expected[name]}, the compiled code {shown[name]}"
        for name in expected
        if expected[name] != shown[name]
    ]


A1_LISTED = re.compile(r"\*\*Ordered\s+by\s+A1\s+alone(?:\s+in\s+`(\w+)`)?\*\*:([^.]*)\.")
A1_PAIR = re.compile(r"`(\w+)`\s+before\s+`(\w+)`(?:\s+at\s+head\s+dim\s+(\d+))?")


def listed_a1_edges(stage: KernelSource, head_dim: int) -> set[tuple[str, str]]:
    """Pairs of MMAs, by accumulator, that the stage's page says only rule A1 orders.

    They follow "Ordered by A1 alone", of a part "Ordered by A1 alone in `its name`"; "at head dim
    64" behind a pair restricts it. A part may have a page of its own.
    """
    folder = STAGES_FOLDER / f"{stage.number:02d}"
    pages = (folder / "README.md", *sorted(folder.glob("*/README.md")))
    found = [row for page in pages for row in A1_LISTED.findall(page.read_text(encoding="utf-8"))]
    pairs = [pair for name, text in found if name == stage.name for pair in A1_PAIR.findall(text)]
    return {(first, second) for first, second, only in pairs if only in ("", str(head_dim))}


def logged_a1_edges(stage: KernelSource, head_dim: int) -> set[tuple[str, str]]:
    """The same in the names of an executed log, which knows columns: those that share them all
    have one name."""
    plan = stage.config.plan(head_dim)
    regions, names = {row.name: row for row in plan.tmem}, Names(plan)
    known = lambda name: names.columns(regions[name].column, regions[name].columns)
    return {(known(a), known(b)) for a, b in listed_a1_edges(stage, head_dim)}


def check_a1(stage: KernelSource, head_dim: int) -> None:
    """The page lists what only rule A1 orders in the model, and nothing else."""
    orderings: list[Ordering] = []

    def ordering() -> Ordering:
        orderings.append(Ordering("practice"))
        return orderings[-1]

    problem = mutation.stage_problems(stage, head_dim)["gaussian"]
    with observe(ordering):
        stage.simulate_problem(problem)
    edges = {(r.first.op, r.second.op) for order in orderings for r in order.a1_edges()}
    listed = listed_a1_edges(stage, head_dim)
    assert edges == listed, f"only A1 orders {sorted(edges)}, the page lists {sorted(listed)}"


NO_SPILLS = {"stack_bytes": 0, "spill_instructions": 0, "local_bytes": 0}


def read_kernel(kernel: CompiledKernel, ptxas: str = "") -> tuple[facts.PtxFacts, SassReport]:
    """Facts of its PTX and the report on its machine code. MissingTool without nvdisasm.

    ptxas: assembles the PTX anew, as `sass.assemble` takes it; "" is the DSL's own.
    """
    cubin = assemble(kernel.ptx, kernel.key.arch, ptxas) if ptxas else kernel.cubin
    key = kernel.key
    of_part = getattr(Stage(key.stage).part(key.part).config, "KEY_TILES", {})
    tile = {"d_qk": key.head_dim, "key_tiles": of_part.get(key.head_dim, 1)}
    return facts.ptx_facts(kernel.ptx), report(cubin, **tile)


def declared_facts(stage: KernelSource, key: CompileKey) -> dict[str, object]:
    """What plan and config say that the compiled code shows; registers and the like for sm_100a."""
    declared = {**NO_SPILLS, "threads": stage.config.plan(key.head_dim).threads}
    if key.arch == "sm_100a":
        declared |= stage.config.DECLARED[key.head_dim]
    return declared


def check_facts(stage: KernelSource, kernel: CompiledKernel) -> None:
    """The compiled code shows the plan and `declared_facts`; no lint speaks up.

    Raises MissingTool without nvdisasm, once all that the PTX shows has been checked.
    """
    plan = stage.config.plan(kernel.key.head_dim)
    assert kernel.smem_bytes == plan.smem_bytes, (
        f"the launch has {kernel.smem_bytes} B of shared memory, the plan {plan.smem_bytes} B"
    )
    ptx, declared = facts.ptx_facts(kernel.ptx), declared_facts(stage, kernel.key)
    in_ptx = {name: value for name, value in declared.items() if name not in facts.SASS_FACT_NAMES}
    mismatches = plan_mismatches(plan, ptx) + facts.compare_with(in_ptx, ptx)
    assert not mismatches, f"{kernel.key.name}:\n" + "\n".join(mismatches)
    findings = facts.lint(kernel.ptx)
    assert not findings, f"{kernel.key.name}:\n" + "\n".join(map(str, findings))
    mismatches = facts.compare_with(declared, *read_kernel(kernel))
    assert not mismatches, f"{kernel.key.name}:\n" + "\n".join(mismatches)
