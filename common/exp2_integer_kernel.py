# SPDX-License-Identifier: Apache-2.0
"""Stage 06 with an integer row maximum: the changed functions, and what they cost compiled.

The texts replace functions of the stage's `softmax.py` in a copy (`exp2_frontier.report_of`); the
stage itself is left as it is. What they compute is in `exp2_integer.py`. Runs: host; compiling
needs the CuTe DSL and the disassembler.
"""

from __future__ import annotations

import ast

from . import exp2_frontier

HEAD_DIMS = exp2_frontier.HEAD_DIMS
SHOWN = ("mufu", "fma", "issue_all_min", "issue_all_max")  # cycles in the data
DIRECTED = ("add.rm.f32x2", "fma.rm.f32x2", "fma.rp.f32x2")  # PTX: floors and the maximum, in pairs

UPDATE_MAX = '''\
@cute.jit
def update_max(rS: cute.Tensor, row_max: Float32, scale_log2: Float32):
    """As the stage's, but row_max is a whole number in log2 units and acc_scale a power of two.

    The largest score of this tile alone is needed: none before exceeded row_max by more than
    THRESHOLD. Adding FLOOR, rounded up, leaves ceil(largest * scale_log2).
    """
    largest, floor = arith.max_of(rS, -Float32.inf), Float32(config.FLOOR)
    scale = (scale_log2, scale_log2)
    raised = cute.arch.fma_packed_f32x2((largest, largest), scale, (floor, floor), rnd="rp")
    new_max = raised[0] - floor
    step = row_max - new_max  # -inf at the first tile
    acc_scale = Float32(1.0)
    if not step >= -config.THRESHOLD:  # also when it is NaN
        row_max = new_max
        biased = cute.arch.fmax(step, Float32(-127.0)) + Float32(config.FLOOR + 127.0)
        acc_scale = (biased.bitcast(Int32) << 23).bitcast(Float32)
    return row_max, acc_scale
'''

EXP2_EMULATED = '''\
@cute.jit
def exp2_emulated(s, row_max: Float32, scale_log2: Float32):
    """2**(s * scale_log2 - row_max) for a pair of scores; row_max is a whole number.

    FLOOR - row_max is one too, so one fma that rounds down leaves floor(s * scale_log2) - row_max
    in the low bits. The smallest score let through is a little above 2**SMALLEST.
    """
    bound = (row_max + Float32(config.SMALLEST)) * (1.0 / scale_log2)
    low = bound + cute.arch.fmax(bound, -bound) * Float32(2.0**-22)
    s = (cute.arch.fmax(s[0], low), cute.arch.fmax(s[1], low))
    scale, floor = (scale_log2, scale_log2), Float32(config.FLOOR) - row_max
    shifted = cute.arch.fma_packed_f32x2(s, scale, (floor, floor), rnd="rm")
    minus_n = arith.add2((floor, floor), (-shifted[0], -shifted[1]))
    f = arith.fma2(s, scale, minus_n)
    *rest, highest = (Float32(c) for c in config.POLYNOMIAL)
    p = (highest, highest)
    for c in reversed(rest):
        p = arith.fma2(p, f, (c, c))
    return insert_exponent(p[0], shifted[0]), insert_exponent(p[1], shifted[1])
'''

FACTOR = (  # (file, text, what stands there instead): row_max is in log2 units
    ("softmax.py", "minus_max = -row_max * scale_log2", "minus_max = -row_max"),
    (
        "correction.py",
        "logsumexp(row_max, row_sum, scale_log2)",
        "logsumexp(row_max, row_sum, 1.0)",
    ),
)
FLOOR = (
    (
        "softmax.py",
        "rS[i], rS[i + 1] = exp2_emulated(x)",
        "rS[i], rS[i + 1] = exp2_emulated((rS[i], rS[i + 1]), row_max, scale_log2)",
    ),
)
VARIANTS = {  # name -> (functions of softmax.py, replacements)
    "stage 06": ({}, ()),
    "integer factor": ({"update_max": UPDATE_MAX}, FACTOR),
    "factor and floor": (
        {"update_max": UPDATE_MAX, "exp2_emulated": EXP2_EMULATED},
        FACTOR + FLOOR,
    ),
}


def with_function(text: str, name: str, new: str) -> str:
    """A Python module's text with another text for a function; ValueError if it has none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min(d.lineno for d in (*node.decorator_list, node))
            lines = text.splitlines(keepends=True)
            return "".join([*lines[: first - 1], new, *lines[node.end_lineno :]])
    raise ValueError(f"no function {name} to replace")


def changed(variant: str) -> dict[str, str]:
    """File name -> text, of the stage's files that a variant changes."""
    functions, replacements = VARIANTS[variant]
    texts: dict[str, str] = {}
    for name, new in functions.items():
        text = texts.get("softmax.py") or exp2_frontier.stage_text("softmax.py")
        texts["softmax.py"] = with_function(text, name, new)
    for file, old, new in replacements:
        text = texts.get(file) or exp2_frontier.stage_text(file)
        if text.count(old) != 1:
            raise ValueError(f"{file} of stage {exp2_frontier.STAGE:02d} has not one {old!r}")
        texts[file] = text.replace(old, new)
    return texts


def compiled(variant: str, head_dim: int) -> dict:
    """One variant at the stage's EMULATED: slots a score, cycles of a tile, P, registers."""
    report = exp2_frontier.report_of(changed(variant), head_dim)
    model, opcodes = report["model"], report["ptx_arithmetic"]
    cycles = {name.removeprefix("softmax_"): value for name, value in model["cycles"].items()}
    return {
        "head_dim": head_dim,
        "variant": variant,
        "slots": round(model["slots_per_element"], 3),
        "cycles": {name: cycles[name] for name in SHOWN},
        "p": model["p_latency"],
        "two_warps": model["replay_two_warps"],
        "live": model["live_registers"],
        "spills": report["spill_instructions"],
        "directed": {name: opcodes.get(name, 0) for name in DIRECTED},
        "ptxas": report["resources"]["ptxas"],
    }


def costs() -> list[dict]:
    """Every variant and head dim, half a minute."""
    return [compiled(variant, head_dim) for head_dim in HEAD_DIMS for variant in VARIANTS]


def table(rows: list[dict]) -> str:
    """Of `costs`, in Markdown, for docs/exp2.md."""
    lines = [
        "| head dim | variant | slots a score | MUFU | FMA | issue | 3/4 of P | all of P "
        "| two warps | live | spills |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cycles = row["cycles"]
        cells = [row["head_dim"], row["variant"], f"{row['slots']:.2f}"]
        cells += [f"{cycles[name]:.0f}" for name in ("mufu", "fma")]
        cells += [f"{cycles['issue_all_min']:g} to {cycles['issue_all_max']:g}", *row["p"]]
        cells += [f"{row['two_warps']:.0f}", row["live"], row["spills"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
