# SPDX-License-Identifier: Apache-2.0
"""The pages on numerics, verification, static performance and compile time, against the code."""

import dataclasses
import html
import json
import re
from pathlib import Path

import pytest
import torch
from flash_ladder import built, load
from flash_ladder.common import (
    build_study,
    contract,
    error_study,
    exp2_output,
    inputs,
    judging,
    numerics,
    sass_isa,
    topics,
)
from flash_ladder.common.compile import FILES, compile_stage, fingerprint, sources, stand_ins
from flash_ladder.common.primers import DRAWINGS, chain

ROOT = Path(__file__).parent.parent
TEXTS = {
    name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("numerics", "verification", "static", "compile-time")
}
COMPILE, STATIC = (build_study.rows(path) for path in (build_study.COMPILE, build_study.STATIC))


def _static(stage: int, head_dim: int = 128, part: str = "") -> dict:
    key = (stage, part, head_dim)
    (row,) = [r for r in STATIC if (r["stage"], r["part"], r["head_dim"]) == key]
    return row


def _seconds(stage: int, part: str = "") -> dict:
    key = (stage, part, 128)
    (row,) = [r for r in COMPILE if (r["stage"], r["part"], r["head_dim"]) == key]
    return row


def _error(generator: str, dtype: str) -> dict:
    (row,) = [r for r in error_study.results() if (r["inputs"], r["dtype"]) == (generator, dtype)]
    return row


def _families() -> dict[str, dict[str, int]]:
    """Counts of all mutations by what was left out."""
    found: dict[str, dict[str, int]] = {}
    for _, run in topics.runs():
        for row in run.get("mutation", []):
            for family, counts in row["by_family"].items():
                sums = found.setdefault(family, dict.fromkeys(counts, 0))
                for name, count in counts.items():
                    sums[name] += count
    return found


def _range(name: str, form: str) -> str:
    values = [row[name] for row in COMPILE]
    return f"{min(values):{form}} to {max(values):{form}}"


BF16, FP16, LLM = (
    _error(*key) for key in (("gaussian", "bf16"), ("gaussian", "fp16"), ("llm_like", "bf16"))
)
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float16)}
SHARE = max(w["used"] for _, run in topics.runs() for w in topics.tightest(run["kernels"]).values())
TOTAL, FAMILY = topics.totals(), _families()
NAMES = {True: [], False: []}
for recipe in inputs.GENERATORS.values():
    NAMES[recipe.adversarial].append(recipe.name)
COUNTS = [
    "no",
    "one",
    "Two",
    "three",
    "four",
    "five",
    "six",
    "Seven",
    "eight",
    "Nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
]
OF_STEP = [
    _seconds(8, part)["cpu_s"] for part in ("", "preprocess", "backward_2cta", "postprocess")
]
GREW = _seconds(8)["cpu_s"] / _seconds(7)["cpu_s"]
SLOTS = {number: _static(number)["slots_per_element"] for number in (4, 5)}
EACH = (SLOTS[5] - SLOTS[4]) * 128 / _static(5)["exp2_emulated"]
PAIR, ALONE = (_static(7, part=part) for part in ("backward_2cta", "backward_1cta"))
FENCES = sum(
    sign * FAMILY["fence"][name]
    for name, sign in {"sites": 1, "timing": -1, "redundant": -1}.items()
)  # noticed by log or lint alone
PERCENT = 100 * TOTAL["only"] / TOTAL["sites"]

SAID = {
    "numerics": [
        f"≤ {numerics.FACTOR:.0f} · error of torch + floor",
        f"stay at {100 * BF16['emulated'] / BF16['p']:.0f} % of P's rounding in bf16 "
        f"and at {100 * FP16['emulated'] / FP16['p']:.0f} % in fp16 (D",
        f"error is {BF16['torch'] / BF16['all']:.1f} times as large for `gaussian`, and "
        f"{LLM['torch'] / LLM['all']:.1f} times for `llm_like`",
        f"rounded by at most 2^{torch.tensor(UNIT[torch.bfloat16]).log2():.0f} or "
        f"2^{torch.tensor(UNIT[torch.float16]).log2():.0f} of itself (D",
        f"at most {judging.exp2_error(load(6)):.1e}".replace("e-0", "e-") + " (D: the stages'",
        f"dQ by {127 * 2.0**-24:.1e}".replace("e-0", "e-"),
        f"up to {UNIT[torch.bfloat16]:.1e}".replace("e-0", "e-") + " for its rounding to bf16",
        f"{32768 // 256 - 1} additions of 2^-24",
        f"effect of rounding D and dP, {judging.ROUNDINGS} · 2^-24",
        f"{COUNTS[len(inputs.GENERATORS)]} generators (D: `common/inputs.py`)",
        f"{COUNTS[len(NAMES[False])]} are ordinary",
        f"{COUNTS[len(NAMES[True])]} are made to break",
        f"The largest is {100 * SHARE:.0f} % (M",
        f"err {(2 * BF16['torch'] + BF16['half']) / BF16['all']:.1f} times as much",
        f"2 · {BF16['torch']:.1e} + {BF16['half']:.1e}, over {BF16['all']:.1e})".replace(
            "e-0", "e-"
        ),
    ],
    "verification": [
        f"of {COUNTS[TOTAL['mutated']]} compiled kernels was left out",
        f"Of these {TOTAL['only']}, {FENCES} are fences",
        f"Of all {FAMILY['fence']['sites']} fences results and errors show "
        f"{FAMILY['fence']['timing']}, the log {FAMILY['fence']['log']}, the lint "
        f"{FAMILY['fence']['lint']} (M)",
        f"show all {FAMILY['arrival']['sites']}, the log {FAMILY['arrival']['log']}, as a run"
        if FAMILY["arrival"]["timing"] == FAMILY["arrival"]["sites"]
        else "no longer all arrivals",
        "Half of the omissions show in log or lint alone" if 45 <= PERCENT <= 55 else "not half",
        f"Six timings are {COUNTS[1 + len(topics.ADVERSARIES)]};",
    ],
    "static": [
        f"MUFU takes {_static(4)['tile_cycles_mufu']:.0f} cycles whatever the head dim: "
        f"{_static(4)['exp2_hardware']} a thread",
        f"ceiling {_static(4)['tensor_ceiling']:.2f}. At 64 it halves the speed: "
        f"{_static(4, 64)['tensor_ceiling']:.2f}.",
        f"Stage 05 brings {_static(5, 64)['tensor_ceiling']:.2f}.",
        f"{_static(5)['exp2_emulated']} exponentials leave the MUFU and the loop grows from "
        f"{SLOTS[4]:.2f} to {SLOTS[5]:.2f} slots an element (D): {EACH:.1f} slots for each",
        f"Stage 08 takes {_static(8)['tile_cycles_issue']:.0f} slots for a tile that needs no "
        f"mask, stage 07 {_static(7)['tile_cycles_issue']:.0f} (D)",
        f"{PAIR['tile_cycles_smem']:.0f} cycles against {ALONE['tile_cycles_smem']:.0f} with one "
        f"CTA, lifts the ceiling from {ALONE['tensor_ceiling']:.2f} to "
        f"{PAIR['tensor_ceiling']:.2f}",
        f"issues {_static(8, part='backward_2cta')['mma_warp_issue']:.0f} instructions a tile, one "
        f"warp's work, in {PAIR['tile_cycles_tensor']:.0f} cycles (D)",
        f"has {_static(8)['loop_live_registers']} live registers of "
        f"{load(8).config.REGISTERS['softmax']}",
        f"have {max(row['spill_instructions'] for row in STATIC)} accesses to local memory and "
        f"{max(row['stack_bytes'] for row in STATIC)} bytes of stack (D)",
    ],
    "compile-time": [
        f"imported | {_range('start_cpu_s', '.1f')} |",
        f"assemble | {_range('cpu_s', '.1f')} |",
        f"instead | {1000 * min(r['cached_s'] for r in COMPILE):.0f} to "
        f"{1000 * max(r['cached_s'] for r in COMPILE):.0f} ms by the clock",
        f"with {_seconds(8)['ptx_bytes'] / 1000:.0f} KB of PTX takes {GREW:.1f} times as long as "
        f"stage 07's with {_seconds(7)['ptx_bytes'] / 1000:.0f} (M)",
        f"up to {max(row['rss_mb'] for row in COMPILE):.0f} MB of memory (M); "
        f"{min(row['rss_mb'] for row in COMPILE):.0f} already",
        f"postprocess, {sum(OF_STEP):.1f} CPU seconds together (M)",
        f"needs {COUNTS[2 * len(OF_STEP)]} kernels for all problems",
        f"is made of {COUNTS[len(sources(load(8)))]} files (D)",
    ],
}


@pytest.mark.parametrize("page", SAID)
def test_prose_says_what_code_and_data_say(page):
    text = " ".join(TEXTS[page].split())
    assert [said for said in SAID[page] if said not in text] == []


@pytest.mark.parametrize("page", SAID)
def test_a_page_has_the_form(page):
    """A question first, 500 to 1000 words, every table of `topics` on one of the pages."""
    text = TEXTS[page]
    title, question = [line for line in text.splitlines() if line][:2]
    assert title.startswith("# ") and re.fullmatch(r"\*.+\?\*", question)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert 500 <= len(re.findall(r"[^\W\d_]\w*", prose)) <= 1000
    assert [name for name in topics.TABLES if f'study name="{name}"' not in str(TEXTS)] == []


def test_names_of_files_and_functions_exist():
    for name in re.findall(r"`((?:common|docs)/[\w./]+)`", str(TEXTS)):
        assert (ROOT / name).is_file(), name


# ---- numerics ------------------------------------------------------------------------------


def test_the_error_study_is_what_is_committed():
    for found, kept in zip(error_study.study(), error_study.results(), strict=True):
        assert found.keys() == kept.keys()
        for name, value in found.items():
            assert value == (
                pytest.approx(kept[name], rel=0.06) if name in _NUMBERS else kept[name]
            )


_NUMBERS = {*error_study.SOURCES, "half"}


@pytest.mark.parametrize("row", error_study.results(), ids=lambda r: f"{r['inputs']}-{r['dtype']}")
def test_scores_in_16_bits_outweigh_all_roundings_of_the_kernel(row):
    """What the page says of torch: its scores are rounded, all else here is float64."""
    of = exp2_output.case(row["inputs"], exp2_output.DTYPES[row["dtype"]])
    scores = (of.q @ of.k.mT * of.scale).to(of.dtype).double()
    error = (torch.softmax(scores, -1) @ of.v - of.truth["out"]).square().mean().sqrt()
    assert error > 1.5 * row["all"]
    assert "scores to 16 bits; that alone outweighs all" in " ".join(TEXTS["numerics"].split())


def test_all_generators_are_named():
    for recipe in inputs.GENERATORS:
        assert f"`{recipe}`" in TEXTS["numerics"]


def test_the_table_of_shares_has_each_kernel_once():
    kernels = [row[0] for row in topics.TABLES["used"].rows()]
    wanted = [
        topics.kernel_name(number, part)
        for number in built()
        for part in ("", *(part.name for part in load(number).backwards))
    ]
    assert kernels == wanted
    shares = {row[0]: row[1] for row in topics.TABLES["used"].rows()}
    assert f"{100 * SHARE:.0f} %" in shares.values()
    assert topics.tightest([{"part": "preprocess", "worst": {"used": 1}}]) == {}


# ---- verification --------------------------------------------------------------------------


def test_problems_are_those_of_the_contract():
    """Evidence counts a problem once for each kernel that it launches; the page counts it once."""
    wanted = {number: len(contract.gpu_cases(load(number))) for number in built()}
    assert TOTAL["cases"] == sum(wanted.values())
    delayed = sum(wanted[number] for number in built() if load(number).config.plan(128).tmem)
    assert TOTAL["adversary_cases"] == len(topics.ADVERSARIES) * delayed


def test_totals_add_up():
    assert TOTAL["failed"] == TOTAL["errors"] == TOTAL["unexplained"] == 0
    assert TOTAL["timing"] + TOTAL["only"] + TOTAL["redundant"] == TOTAL["sites"]
    assert sum(counts["sites"] for counts in FAMILY.values()) == TOTAL["sites"]
    assert TOTAL["kernels"] == sum(len(run["kernels"]) for _, run in topics.runs())


def test_the_drawing_has_the_counts_of_the_table():
    shown = chain.draw().render("x")
    for name in ("cases", "records", "steps", "sites", "adversary_cases", "sanitized"):
        assert topics.number(TOTAL[name]) in html.unescape(shown)
    assert DRAWINGS["chain"].draw is chain.draw and "currentcolor" not in shown


# ---- static performance --------------------------------------------------------------------


def test_the_rates_of_the_page_are_those_of_the_code():
    rows = {
        "issue": "issue | {} instruction a cycle",
        "mufu": "MUFU | {} cycles",
        "fma": "FMA, scalar | {} cycle",
        "fma2": "FMA, packed pair | {} cycles",
        "alu": "ALU: max, select, conversion, integer | {} cycles",
        "tensor": "tensor core | {} FLOP",
        "shared": "shared memory | {} bytes",
    }
    assert set(rows) == set(sass_isa.RATES) - {"imad"}
    for name, start in rows.items():
        rate = sass_isa.RATES[name]
        text = start.format(rate.value)
        assert re.search(rf"\| {re.escape(text)}[^|]*\| {rate.status} \|", TEXTS["static"]), name


def test_static_rows_are_of_the_code_that_ran():
    """Every kernel in bf16 has a row, of the PTX that evidence.json names."""
    ran = {
        (stage.number, kernel.get("part", ""), kernel["head_dim"]): kernel["ptx_sha256"]
        for stage, run in topics.runs()
        for kernel in run["kernels"]
        if kernel["dtype"] == build_study.DTYPE
    }
    found = {(r["stage"], r["part"], r["head_dim"]): r["ptx_sha256"] for r in STATIC}
    assert found == ran, f"run {build_study.COMMAND} STAGE"
    assert sorted((r["stage"], r["part"], r["head_dim"]) for r in COMPILE) == sorted(found)
    assert sorted(build_study.kernels(built())) == sorted(found)


@pytest.mark.parametrize(("stage", "part"), [(6, ""), (7, "backward_2cta")])
def test_static_rows_are_what_compiling_gives(dsl, stage, part):
    kernel = compile_stage(load(stage).part(part), arch="sm_100a", dtype="bfloat16", head_dim=128)
    found = {"stage": stage, "part": part, "head_dim": 128} | build_study.static_facts(kernel)
    kept = _static(stage, part=part)
    if found["ptxas"] != kept["ptxas"]:
        pytest.skip(f"assembled by {found['ptxas']}, the page is about {kept['ptxas']}")
    assert found == kept


def test_a_tile_counted_twice_is_not_shown():
    rows = {tuple(row[:2]): row for row in topics.TABLES["static-backward"].rows()}
    assert rows["07/backward_1cta", "64"][3] == rows["07/backward_1cta", "64"][10] == "–"
    assert rows["07/backward_1cta", "128"][10] == "3328"


# ---- compile time --------------------------------------------------------------------------


def test_compiling_takes_one_thread():
    assert all(row["cpu_s"] <= row["wall_s"] * 1.05 for row in COMPILE)


def test_the_share_of_the_assembler():
    later = [row for row in COMPILE if row["stage"] > 1]
    assert all(row["ptxas_cpu_s"] <= 0.25 * row["cpu_s"] + 0.05 for row in later)
    assert min(row["ptxas_cpu_s"] / row["cpu_s"] for row in COMPILE if row["stage"] == 1) > 0.25


def test_cubin_sizes_of_the_page():
    sizes = [row["cubin_bytes"] / 1000 for row in COMPILE]
    assert f"machine code, {min(sizes):.0f} to {max(sizes):.0f} KB (M)" in TEXTS["compile-time"]


def test_files_of_a_cache_entry_are_on_the_page():
    for name in (*FILES, "entry.json"):
        assert f"| `{name}` |" in TEXTS["compile-time"]


def test_what_makes_a_new_kernel():
    """A key has dtype, head dim and target; models and tests are no sources."""
    stage = load(8)
    key = contract.compile_keys(stage)[0]
    assert set(dataclasses.asdict(key)) == {"stage", "arch", "dtype", "head_dim", "part"}
    for change in ({"dtype": "float16"}, {"head_dim": 128}, {"arch": "sm_103a"}):
        assert fingerprint(stage, dataclasses.replace(key, **change)) != fingerprint(stage, key)
    assert not [name for name in sources(stage) if "model" in name or "test" in name]


def test_only_the_head_dim_is_known_to_the_compiler(dsl):
    key = contract.compile_keys(load(8))[0]
    tensors = [x for x in stand_ins(load(8), key) if hasattr(x, "shape")]
    known = {size for x in tensors for size in x.shape if isinstance(size, int)}
    assert len(tensors) == 5 and known == {key.head_dim}


def test_measuring_prints_both_rows(dsl, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FLASH_LADDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build_study.compiling, "_MEMORY", {})
    monkeypatch.setattr(build_study.sass, "assemble", lambda ptx, arch: b"")
    build_study.one(7, "postprocess", 64)
    measured, counted = json.loads(capsys.readouterr().out)
    assert set(measured) | {"stage", "part", "head_dim", "date", "machine", "dsl", "load"} == set(
        COMPILE[0]
    )
    assert counted["ptx_sha256"] == _static(7, 64, "postprocess")["ptx_sha256"]
