# SPDX-License-Identifier: Apache-2.0
"""Facts of a compiled kernel, from its PTX and its SASS, and their comparison with a declaration.

``ptx_facts`` counts what a PTX kernel contains; ``flat`` gives PTX and SASS facts one name each
(``FACT_NAMES``); ``compare_with`` checks a stage's declared numbers against them. Counts are
static: an instruction in a loop counts once, in an unrolled copy once per copy. PTX is read as text
only, never executed or translated. ``lint`` (from ``lint.py``) looks for missing fences and waits;
it is a linear scan and proves nothing by its silence.
"""

import re
from collections.abc import Callable

from .lint import RULES, Finding, lint
from .ptx import ptx_hash
from .ptx_count import PtxFacts, ptx_facts
from .sass import SassReport
from .sass_isa import pipe_cycles
from .sass_model import softmax_loop

__all__ = [
    "FACT_NAMES",
    "RULES",
    "SASS_FACT_NAMES",
    "Finding",
    "PtxFacts",
    "compare_with",
    "flat",
    "lint",
    "ptx_facts",
    "ptx_hash",
]


def _total(histogram: dict[str, int], pattern: str) -> int:
    return sum(count for name, count in histogram.items() if re.search(pattern, name))


def _joined(histogram: dict[str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in sorted(histogram.items()))


def _budget(facts: PtxFacts, action: str) -> str:
    return " ".join(
        str(n) if n is not None else "?" for kind, n in facts.setmaxnreg if kind == action
    )


def _inits(facts: PtxFacts) -> str:
    return " ".join("?" if count is None else str(count) for count in facts.mbarrier_inits)


# name -> (description, how it is found). Facts of the PTX.
_FROM_PTX: dict[str, tuple[str, Callable[[PtxFacts], object]]] = {
    "target": ("architecture the PTX is for, as sm_100a", lambda f: f.target),
    "threads": ("threads per CTA (reqntid or maxntid; 0 if not fixed)", lambda f: f.threads or 0),
    "cluster_ctas": (
        "CTAs per cluster (0 if the code leaves it to the launch)",
        lambda f: f.cluster or 0,
    ),
    "max_registers": (".maxnreg, 0 if absent", lambda f: f.max_registers or 0),
    "min_ctas_per_sm": (".minnctapersm, 0 if absent", lambda f: f.min_ctas_per_sm or 0),
    "static_smem_bytes": ("static shared memory, bytes", lambda f: f.static_shared_bytes),
    "local_bytes": ("local arrays in the PTX (.local), bytes", lambda f: f.local_bytes),
    "local_accesses": ("ld.local and st.local in the PTX", lambda f: f.local_accesses),
    "mbarrier_inits": ("mbarrier.init instructions", lambda f: len(f.mbarrier_inits)),
    "mbarrier_counts": ("arrival counts of the inits in order, as '1 1 128 ?'", _inits),
    "mbarrier_arrives": (
        "mbarrier arrivals, with and without expect_tx",
        lambda f: f.mbarrier_arrives,
    ),
    "mbarrier_expects": (
        "mbarrier expect_tx, alone or with an arrival",
        lambda f: f.mbarrier_expects,
    ),
    "mbarrier_waits": ("mbarrier try_wait and test_wait", lambda f: f.mbarrier_waits),
    "named_barriers": (
        "named-barrier instructions, as 'arrive 1, 128:2 sync 0:3'",
        lambda f: _joined(f.named_barriers),
    ),
    "setmaxnreg_inc": (
        "registers set by setmaxnreg.inc, in order, as '192'",
        lambda f: _budget(f, "inc"),
    ),
    "setmaxnreg_dec": (
        "registers set by setmaxnreg.dec, in order, as '64 24'",
        lambda f: _budget(f, "dec"),
    ),
    "tmem_columns": (
        "columns of all tcgen05.alloc together, -1 if one is not constant",
        lambda f: -1 if None in f.tmem_allocs else sum(f.tmem_allocs),
    ),
    "tmem_deallocs": ("tcgen05.dealloc instructions", lambda f: f.tmem_deallocs),
    "mma": ("tcgen05.mma instructions", lambda f: sum(f.mma.values())),
    "mma_ss": ("of those, A in shared memory", lambda f: _total(f.mma, r"\bSS\b")),
    "mma_ts": ("of those, A in tensor memory", lambda f: _total(f.mma, r"\bTS\b")),
    "mma_pair": (
        "of those, issued for a CTA pair (cta_group::2)",
        lambda f: _total(f.mma, "group::2"),
    ),
    "mma_kinds": (
        "kinds of tcgen05.mma, as 'f16'",
        lambda f: " ".join(sorted({name.split()[0] for name in f.mma})),
    ),
    "commits": ("tcgen05.commit instructions", lambda f: sum(f.commits.values())),
    "tmem_load_registers": (
        "registers per thread of all tcgen05.ld",
        lambda f: f.tmem_load_registers,
    ),
    "tmem_store_registers": (
        "registers per thread of all tcgen05.st",
        lambda f: f.tmem_store_registers,
    ),
    "tmem_load_shapes": (
        "shapes of tcgen05.ld, as '32x32b.x32:8'",
        lambda f: _joined(f.tmem_loads),
    ),
    "tmem_store_shapes": ("shapes of tcgen05.st", lambda f: _joined(f.tmem_stores)),
    "tmem_load_waits": ("tcgen05.wait::ld", lambda f: f.tmem_load_waits),
    "tmem_store_waits": ("tcgen05.wait::st", lambda f: f.tmem_store_waits),
    "tmem_fences": ("tcgen05.fence, both directions", lambda f: _total(f.fences, "^tcgen05")),
    "proxy_fences": ("fence.proxy.async, all forms", lambda f: _total(f.fences, "proxy.async")),
    "init_fences": ("fence.mbarrier_init", lambda f: _total(f.fences, "mbarrier_init")),
    "tma_loads": (
        "bulk copies into shared memory that complete on an mbarrier",
        lambda f: _total(f.bulk, r"\.shared::\w+\.global"),
    ),
    "tma_stores": (
        "bulk copies from shared to global memory, reductions left out",
        lambda f: _total(f.bulk, r"^cp\.async.*\.global\.shared"),
    ),
    "tma_reductions": ("bulk reductions", lambda f: _total(f.bulk, r"^cp\.reduce")),
    "dsmem_copies": (
        "bulk copies from the shared memory of one CTA to that of another",
        lambda f: _total(f.bulk, r"shared::cluster\.shared"),
    ),
    "ex2": ("ex2 instructions", lambda f: _total(f.arithmetic, r"^ex2")),
    "fma": ("scalar fma instructions (f32)", lambda f: _total(f.arithmetic, r"^fma.*\.f32$")),
    "fma_f32x2": (
        "packed fma instructions (f32x2)",
        lambda f: _total(f.arithmetic, r"^fma.*f32x2"),
    ),
    "floor_adds": (
        "results of adds towards minus infinity (emulated exp2), 2 for a packed one",
        lambda f: _total(f.arithmetic, r"^add\.rm") + _total(f.arithmetic, r"^add\.rm.*x2"),
    ),
    "max": ("floating-point max instructions", lambda f: _total(f.arithmetic, r"^max")),
    "cvt_pack": (
        "conversions of two f32 to a packed 16-bit pair",
        lambda f: _total(f.arithmetic, r"^cvt.*f16x2.f32"),
    ),
    "ld_global": ("ld.global instructions", lambda f: _total(f.memory, r"^ld\.global")),
    "st_global": ("st.global instructions", lambda f: _total(f.memory, r"^st\.global")),
    "ld_shared": ("ld.shared instructions", lambda f: _total(f.memory, r"^ld\.shared")),
    "st_shared": ("st.shared instructions", lambda f: _total(f.memory, r"^st\.shared")),
}


def _classes(*names: str) -> Callable[[SassReport], int]:
    return lambda report: sum(report.kernel.counts[name] for name in names)


def _in_main_loop(function) -> Callable[[SassReport], object]:
    """A fact of the loop with the exponentials; None without one."""
    return lambda report: (loop := softmax_loop(report.kernel)) and function(loop)


def _cycles(name: str) -> Callable[[SassReport], object]:
    return lambda report: report.model and report.model.cycles.get(name)


def _of_model(name: str) -> Callable[[SassReport], object]:
    return lambda report: report.model and getattr(report.model, name)


# name -> (description, how it is found). Facts of the SASS; None where a kernel has no such thing.
_FROM_SASS: dict[str, tuple[str, Callable[[SassReport], object]]] = {
    "arch": ("architecture the SASS is for, as sm_100a", lambda r: r.kernel.arch),
    "ptxas": ("version of the assembler, as V12.9.83", lambda r: r.resources.ptxas),
    "registers": ("registers per thread at launch", lambda r: r.resources.registers),
    "stack_bytes": ("stack per thread, bytes", lambda r: r.resources.stack_bytes),
    "instructions": ("SASS instructions", lambda r: len(r.kernel.instructions)),
    "spill_instructions": ("accesses to local memory (LDL, STL)", lambda r: r.spill_instructions),
    "spill_instructions_in_loops": (
        "of those, in innermost, MMA and softmax loops",
        lambda r: r.spill_instructions_in_loops,
    ),
    "uniform_spill_moves": (
        "moves that spill uniform registers",
        lambda r: r.kernel.uniform_spill_moves,
    ),
    "mufu_ex2_sass": ("MUFU.EX2", _classes("EX2")),
    "mufu_other_sass": ("MUFU other than EX2", _classes("MUFU")),
    "ffma_sass": ("scalar FFMA", _classes("FFMA")),
    "ffma2_sass": ("packed FFMA2", _classes("FFMA2")),
    "max_sass": ("FMNMX and FMNMX3", _classes("FMNMX", "FMNMX3")),
    "pack_sass": ("F2FP", _classes("F2FP")),
    "mma_sass": ("tensor-core instructions of any kind", _classes("MMA")),
    "ldtm_sass": ("LDTM", _classes("LDTM")),
    "sttm_sass": ("STTM", _classes("STTM")),
    "lds_sass": ("LDS", _classes("LDS")),
    "sts_sass": ("STS", _classes("STS")),
    "global_sass": ("accesses to global memory by threads", _classes("GMEM")),
    "loop_instructions": (
        "instructions of the loop with the exponentials",
        _in_main_loop(lambda loop: len(loop.instructions)),
    ),
    "loop_live_registers": (
        "registers live at once in that loop",
        _in_main_loop(lambda loop: loop.live_registers[0] or None),
    ),
    "loop_ffma_cycles": (
        "FMA-pipe cycles of that loop for one warp's iteration",
        lambda r: (
            (q := softmax_loop(r.kernel)) and pipe_cycles(q.instructions, r.kernel.arch)["fma"]
        ),
    ),
    "loop_lds": ("LDS in that loop", _in_main_loop(lambda loop: loop.counts["LDS"])),
    "exp2_hardware": ("exp2 per thread by MUFU in that loop", _of_model("exp2_hardware")),
    "exp2_emulated": ("exp2 per thread on FMA units in that loop", _of_model("exp2_emulated")),
    "slots_per_element": (
        "issue slots per exponential in that loop",
        _of_model("slots_per_element"),
    ),
    "tile_cycles_issue": (
        "issue cycles per tile and sub-partition (derived)",
        _cycles("softmax_issue"),
    ),
    "tile_cycles_mufu": ("MUFU cycles per tile (derived)", _cycles("softmax_mufu")),
    "tile_cycles_fma": ("FMA cycles per tile (derived)", _cycles("softmax_fma")),
    "tile_cycles_alu": ("ALU cycles per tile (derived)", _cycles("softmax_alu")),
    "tile_cycles_tensor": ("tensor-core cycles per tile (derived)", _cycles("tensor")),
    "tile_cycles_smem": ("shared-memory cycles per tile (derived)", _cycles("smem")),
    "correction_issue": (
        "issue slots of correction per tile, rescaling (derived)",
        _cycles("correction_issue_max"),
    ),
    "mma_warp_issue": ("issue slots of the MMA warp per tile (derived)", _cycles("mma_warp_issue")),
    "tensor_ceiling": ("tensor cycles over those of the bounding resource", _of_model("ceiling")),
    "bound_by": ("the resource with most cycles per tile", _of_model("bound_by")),
}

FACT_NAMES: dict[str, str] = {
    name: f"{description} [{source}]"
    for source, table in (("PTX", _FROM_PTX), ("SASS", _FROM_SASS))
    for name, (description, _) in table.items()
}
SASS_FACT_NAMES = frozenset(_FROM_SASS)


def flat(facts: PtxFacts, sass: SassReport | None = None) -> dict[str, int | float | str]:
    """Return every fact that the kernel has, by the names of FACT_NAMES.

    Facts of the SASS are left out without a report, facts of a loop or of the per-tile model where
    the kernel has no such loop.
    """
    found = {name: get(facts) for name, (_, get) in _FROM_PTX.items()}
    if sass is not None:
        found |= {name: get(sass) for name, (_, get) in _FROM_SASS.items()}
    return {name: value for name, value in found.items() if value is not None}


_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda found, limit: found <= limit,
    ">=": lambda found, limit: found >= limit,
}


def compare_with(declared: dict, facts: PtxFacts, sass: SassReport | None = None) -> list[str]:
    """Return one sentence for every declared fact that the compiled code does not show.

    `declared` maps names of FACT_NAMES to a value, or to ``("<=", limit)`` or ``(">=", limit)``.
    A fact that the kernel does not have, and a SASS fact without a report (`sass` None, because
    nvdisasm is missing), counts as not shown: leave out SASS_FACT_NAMES where that is meant.
    Raises ValueError for an unknown name or relation.
    """
    unknown = sorted(set(declared) - set(FACT_NAMES))
    if unknown:
        known = ", ".join(sorted(FACT_NAMES))
        raise ValueError(f"unknown facts {', '.join(unknown)}; known are: {known}")
    found, differences = flat(facts, sass), []
    for name, expected in declared.items():
        relation, limit = expected if isinstance(expected, tuple) else ("==", expected)
        if relation not in ("==", *_RELATIONS):
            raise ValueError(f"{name}: relation must be '<=' or '>=', not {relation!r}")
        if name not in found:
            missing = name in SASS_FACT_NAMES and sass is None
            why = "no SASS report was given" if missing else "the kernel has nothing of the kind"
            differences.append(f"{name}: declared {relation} {limit!r}, but {why}")
        elif not (
            found[name] == limit if relation == "==" else _RELATIONS[relation](found[name], limit)
        ):
            differences.append(
                f"{name}: declared {relation} {limit!r}, compiled code has {found[name]!r}"
                f" ({FACT_NAMES[name]})"
            )
    return differences
