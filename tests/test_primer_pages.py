# SPDX-License-Identifier: Apache-2.0
"""The primers' pages: form and order, prose against the code, interactive parts in a browser."""

import math
import pathlib
import re
import shutil
import subprocess

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import fences, roofline
from flash_ladder.common.hopper import layouts
from flash_ladder.common.model.machine import B200, B300, H200
from flash_ladder.common.model.tmem import LANES, QUARTER_LANES
from flash_ladder.common.plan import (
    MAX_SMEM_BYTES,
    NAMED_BARRIERS,
    TMEM_COLUMNS,
    Arrival,
    Plan,
    Role,
)
from flash_ladder.common.primers import ceilings, pair, ring, softmax, swizzle, tmem

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ROOT / "docs" / "primers"


# ---- in a browser --------------------------------------------------------------------------

CLICKS = {  # part: what a reader does, and what the page then says
    "online-softmax": (
        "press('Next tile'); press('Next tile'); press('All tiles');",
        ["Tile 6 of 6: ", "Rescaled so far: 1.", "difference "],
    ),
    "ceilings": (
        "choose(0, 'backward, pair'); choose(1, 'B300'); slide(0, 256);",
        [
            "Bound by tensor core and shared memory.",
            "backward, pair, 256 queries, 256 keys",
            "exponentials</td><td>1024",
        ],
    ),
    "mbarrier": (
        "choose(0, 'LOAD expects half of the bytes'); "
        "press('LOAD'); press('LOAD'); press('copy engine'); press('MMA'); press('MMA');",
        ["MMA reads a tile of which a part has not come.", "Phase 0 of empty[0] ends."],
    ),
}
PAGE = """<!DOCTYPE html><meta charset="utf-8">{part}<script src="{js}/widget.js"></script>
<script src="{js}/{name}.js"></script><script>
const root = document.querySelector(".fl-interactive");
const buttons = () => [...root.querySelectorAll("button")];
const press = (text) => buttons().find((button) => button.textContent === text).click();
const change = (kind, i, value, event) => {{
  const node = root.querySelectorAll(kind)[i];
  node.value = value;
  node.dispatchEvent(new Event(event));
}};
const choose = (i, value) => change("select", i, value, "change");
const slide = (i, value) => change("input", i, value, "input");
{clicks}</script>"""


def _dump(page: pathlib.Path) -> str:
    """The page after its scripts have run, as headless Chromium has it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'user'}",
    ]
    command = [browser, *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout


@pytest.mark.parametrize("name", CLICKS)
def test_an_interactive_part_answers_its_reader(name, tmp_path):
    part = fences.interactive("what it shows", "", "", {"name": name}, None)
    clicks, said = CLICKS[name]
    page = tmp_path / "page.html"
    js = (ROOT / "docs" / "js").as_uri()
    page.write_text(PAGE.format(part=part, js=js, name=name, clicks=clicks), encoding="utf-8")
    shown = _dump(page)
    assert [text for text in said if text not in shown] == []
    assert 'aria-label="what it shows"' in shown and ">D</abbr></caption>" in shown


def test_the_static_tables_are_what_the_scripts_start_from():
    """A reader without scripts sees the numbers that one with scripts sees first."""
    (row,) = [row for row in ceilings.rows() if row[0] == "tensor core"]
    assert row == ["tensor core", "1024", "2243"]
    assert len(softmax.rows()) == 6 and len(ring.rows()) == 2 * ring.SLOTS


# ---- CuTe DSL ------------------------------------------------------------------------------


def test_the_traced_example_prints_what_the_page_shows(run_python):
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    main = "import conftest; from flash_ladder.common.primers import traced; traced.main()"
    page = (PAGES / "cute-dsl.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert run_python(main, ROOT).strip() == shown.strip()


def test_names_of_the_page_are_names_of_the_stages():
    page = (PAGES / "cute-dsl.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("stages/0*/*.py"))
    names = set(re.findall(r"`([mgsr][A-Z]|t[A-Z]\w*)`", page))
    assert len(names) >= 12
    assert [name for name in names if not re.search(rf"\b{name}\b", sources)] == []


# ---- prose ---------------------------------------------------------------------------------


def _rescales(name: str, threshold: float) -> int:
    states = softmax.run(softmax.ROWS[name], softmax.VALUES, threshold)
    return sum(state.alpha != 1 for state in states[1:])


STAGE6 = load(6).config
REGIONS = {row.name: row for row in tmem.plan().tmem}
SMALL = STAGE6.plan(64).tmem
PLAN7 = pair.plan()
EXCHANGED = PLAN7.barrier("dx_full").tx_bytes
GROUP = Plan(roles=(Role("A", range(4)),))
FORWARD, HALF = roofline.forward(), roofline.forward(head_dim=64)
BACKWARD, PAIR = roofline.backward(), roofline.backward(pair=True)
PORT = 128 * 128 * 2 / B200["smem"]  # cycles of the port for a tile of 16 bits
PEAK = B200["tensor"] * B200["sms"] * B200["clock"]
BYTES, FLOP = 2 * 32768**2 * 2, 2 * 2 * 32768**2 * 128  # S of a head out and in; both products


def _emulation_cost() -> int:
    """Instructions for a pair of emulated exponentials, by the docstring of the stage."""
    text = " ".join((load(5).folder / "softmax.py").read_text(encoding="utf-8").split())
    return sum(map(int, re.findall(r"\d+", re.search(r"Cost of a pair: ([^.]+)\.", text).group(1))))


def _source(figure: str) -> str:
    """Who measured a figure of the B200: what its source names before the details."""
    return re.split(", second-hand|:", B200.figures[figure].source)[0]


def _operands(kernel: roofline.Roofline) -> float:
    """Cycles of the port in which MMAs read their operands."""
    return kernel.smem_parts["MMA operands"]


SAID = {  # page: what it says, made from the code that the numbers come from
    "online-softmax": [
        f"2 · 32 768² · 2 bytes / {B200['hbm'] / 1e12:.1f} TB/s = "
        f"{1e3 * BYTES / B200['hbm']:.2f} ms (D)",
        f"2 · 2 · 32 768² · 128 FLOP / {PEAK / 1e15:.2f} PFLOP/s = {1e3 * FLOP / PEAK:.2f} ms (D)",
        f"(D: {B200['hbm'] / 1e12:.1f} TB/s; {B200['tensor']:.0f} FLOP a cycle · {B200['sms']:.0f} "
        f"multiprocessors · {B200['clock'] / 1e9:.2f} GHz = {PEAK / 1e15:.2f} PFLOP/s)",
        f"takes {32768**2 * 2 / 2**30:.0f} GiB in 16 bits (D",
        f"89 · log2(e) = {89 * math.log2(math.e):.1f}",
        f"log2(e) = {math.log2(math.e):.4f} (D)",
        f"by *more* than {STAGE6.THRESHOLD:.0f}",
        f"P may grow to 2^{STAGE6.THRESHOLD:.0f} = {2**STAGE6.THRESHOLD:.0f} (D)",
        f"fp16 is {torch.finfo(torch.float16).max:,.0f} (D)".replace(",", " "),
        f"{_rescales('one large score', 0)} more times after the first tile has set it (D)",
        f"At 8 it moves {['never', 'once'][_rescales('one large score', 8)]} (D)",
        f"{_rescales('climbing by 3 a tile', 0)} rescales become "
        f"{_rescales('climbing by 3 a tile', 8)} (D)",
        f"e^8 = {math.exp(8):.0f} (D)",
    ],
    "blackwell-sm": [
        f"{['', 'five'][_emulation_cost() == 10]} instructions of other units for each (D",
        f"a B200 has {B200['sms']:.0f} (Q",
        f"{32 / (B200['mufu'] / 4):.0f} cycles (D: 32 / {B200['mufu'] / 4:.0f})",
        f"{MAX_SMEM_BYTES / 1024:.0f} KiB for one CTA (D: {MAX_SMEM_BYTES:,} bytes)".replace(
            ",", " "
        ),
        f"one port of {B200['smem']:.0f} bytes a cycle (Q",
        f"from {H200['tensor']:.0f} to {B200['tensor']:.0f} FLOP a cycle (Q",
        f"as many exponentials: {FORWARD.exp:.0f} cycles",
        f"{FORWARD.flop / H200['tensor']:.0f} cycles on Hopper, {FORWARD.mma:.0f} on a B200 (D)",
        f"{HALF.mma:.0f} cycles against {HALF.exp:.0f} (D)",
        f"{FORWARD.mma:.0f}, {FORWARD.smem:.0f} and {FORWARD.exp:.0f} cycles (D)",
        f"{BACKWARD.exp:.0f} cycles beside the products' {BACKWARD.mma:.0f} (D)",
        f"carries more than in the forward: {BACKWARD.smem:.0f} cycles",
        f"each of the three has {128 * 128 * 2 // 1024} KiB, "
        f"which take {128 * 128 * 2 / B200['smem']:.0f} cycles",
        f"busy {100 * BACKWARD.tensor_ceiling:.0f} %",
        f"each needs only {PAIR.smem:.0f}",
        f"a ceiling of {100 * PAIR.tensor_ceiling:.0f} %",
        f"A B300 has {roofline.forward(machine=B300).exp:.0f} cycles of exponentials (D)",
        f"the port: {PAIR.smem:.0f} cycles against {PAIR.mma:.0f}",
        "At 160 bytes a cycle it no longer is (D)",
        f"costs {128 * 128 // 32 // 4} issue cycles",
        f"room for {FORWARD.exp / (128 * 128 / 32 / 4):.0f} such instructions (D: 1024 / 128), one "
        "of which is the exp2 itself",
        f"takes {2 * 128 * 128 * 16 / B200['tensor']:.0f} cycles (D",
        f"reads {2 * 128 * 16 * 2} bytes (D",
    ],
    "tensor-memory": [
        f"Each SM has {LANES * TMEM_COLUMNS * 4 // 1024} KiB beside the tensor core (D",
        f"(D: {LANES} · {TMEM_COLUMNS} · 4 bytes)",
        f"{LANES} *lanes* by {TMEM_COLUMNS} *columns*",
        f"so {REGIONS['S0'].columns} columns, {REGIONS['S0'].columns * LANES * 4 // 1024} KiB (D)",
        f"so {REGIONS['P0'].columns} columns (D)",
        f"reads and writes only the {QUARTER_LANES} lanes",
        f"{STAGE6.CHUNK} columns at a time",
        f"inferred; {B200.figures['tmem'].confidence} confidence), which "
        f"makes {REGIONS['S0'].columns * LANES * 4 / B200['tmem']:.0f} cycles for S (D)",
        f"budget of {FORWARD.exp:.0f} cycles",
        f"{REGIONS['O0'].columns * LANES * 4 // 1024} KiB each way at head dim 128 (D)",
        f"2 · (128 + 64 + 128) = {sum(row.columns for row in REGIONS.values())} columns (D)",
        f"2 · (128 + 64) = {sum(row.columns for row in SMALL if row.name[0] in 'SO')} (D)",
        f"more make {sum(row.columns for row in SMALL)} (D)",
    ],
    "mbarriers": [
        f"perhaps {B200['tma_latency']:.0f} cycles later (Q: {_source('tma_latency')})",
        f"{B200['mma_ss_latency'] + 128 / 2:.0f} cycles after its issue: "
        f"64 of work, {B200['mma_ss_latency']:.0f} until its commit is seen (D: "
        f"{B200['mma_ss_latency']:.0f} from the same source)",
        f"2^20 − 1 = {2**20 - 1:,} bytes".replace(",", " "),
        f"a tile has {ring.TILE_BYTES:,} bytes and comes in two parts".replace(",", " "),
        f"warpgroup: {Arrival('A').count(GROUP)} (D",
        f"each of its warps: {Arrival('A', 'warp').count(GROUP)} (D",
        f"{['no', 'sixteen'][NAMED_BARRIERS == 16]} of them for each CTA (D: `common/plan.py`)",
    ],
    "swizzles": [
        f"take {swizzle.passes(swizzle.column(3, False))} passes "
        f"instead of {swizzle.passes(swizzle.column(3, True))} (D",
        f"every {swizzle.ROWS * swizzle.SPAN} bytes (D",
        f"{swizzle.BANKS * swizzle.BANK_BYTES} bytes a cycle (D",
        f"`{layouts.encode_smem_descriptor(swizzle.K_TILE):#x}` (D",
        f"starts at byte {swizzle.K_TILE.start}:",
        *(
            f"{code} for {span}" if code else f"{code} for none"
            for code, span in layouts.SWIZZLE_SPANS.items()
        ),
        f"has `{layouts.encode_instruction_descriptor(swizzle.QK):#x}`, and",
        f"has `{layouts.encode_instruction_descriptor(swizzle.PV):#x}`: one bit apart (D)",
        f"At {swizzle.address(5, 6, True) % 128 // 16} (D",
        f"larger by {layouts.SmemDescriptor(32768, 16, 1024, 128).start // 16} (D",
        f"that is {layouts.SmemDescriptor(128 * swizzle.SPAN, 16, 1024, 128).start // 16} (D: "
        f"{128 * swizzle.SPAN // 1024} KiB / 16)",
    ],
    "cta-pairs": [
        f"reads {pair.operand_bytes(False)} bytes in {64} cycles (D)",
        f"each CTA reads {pair.operand_bytes(True)} (D",
        f"{100 * pair.operand_bytes(True) / pair.operand_bytes(False):.0f} % of it",
        *(
            f"| {name} | {alone:.0f} | {paired:.0f} |"
            for name, alone, paired in pair.shared_memory_rows()
        ),
        f"of {PAIR.mma:.0f} that the products take | {BACKWARD.smem:.0f} | {PAIR.smem:.0f} |",
        f"S and dP, {4 * PORT:.0f} → {3 * PORT:.0f}, dV and dK, {2 * PORT:.0f} → {PORT:.0f}, "
        f"and dQ, {2 * PORT:.0f} → {2 * PORT:.0f} (D)",
        f"their sum falls to {100 * _operands(PAIR) / _operands(BACKWARD):.0f} % as well",
        f"{PLAN7.barrier('q_full').tx_bytes:,} for two halves of a tile".replace(",", " "),
        f"count is {PLAN7.barrier('p_full').arrivals(PLAN7)} (D)",
        f"{EXCHANGED // 1024} KiB each way (D",
        f"with {EXCHANGED:,} expected bytes".replace(",", " "),
        f"a barrier of the leader, count {PLAN7.barrier('dx_both').arrivals(PLAN7)},",
        f"{B200['dsmem']:.0f} bytes a cycle and SM for bulk copies (Q: {_source('dsmem')}, "
        f"second-hand; {B200.figures['dsmem'].confidence} confidence)",
        f"make {EXCHANGED / B200['dsmem']:.0f} cycles of it",
        f"{PAIR.smem_parts['dS to the peer']:.0f} cycles of the port, three passes of 128",
        "8 (D: 4 · 2)",
    ],
    "cute-dsl": [
        f"(8, 64) : (64, 1), element (2, 5) lies at {2 * 64 + 5 * 1} (D",
        f"it leaves {load(2).config.DECLARED[128]['mma_ss']} MMA instructions (D",
    ],
}


@pytest.mark.parametrize("page", SAID)
def test_prose_says_what_the_code_says(page):
    text = " ".join((PAGES / f"{page}.md").read_text(encoding="utf-8").split())
    missing = [said for said in SAID[page] if said not in text]
    assert not missing


def _order() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1].split("\n\n")[0]
    return re.findall(r" primers/(\S+)\.md$", nav, re.M)


def test_the_operands_that_the_page_of_pairs_lists_are_all():
    assert (_operands(BACKWARD), _operands(PAIR)) == (8 * PORT, 6 * PORT)


def test_every_primer_is_in_the_navigation_before_the_stages():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {f"{name}.md" for name in _order()} == {path.name for path in PAGES.glob("*.md")}
    assert nav.index("- Primers:") < nav.index("- Stages:")
    assert list(SAID) == _order()


@pytest.mark.parametrize("page", _order())
def test_a_primer_has_the_form(page):
    """A question first, three folded answers last, 600 to 1100 words, links only backwards."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    title, question = [line for line in text.splitlines() if line][:2]
    assert title.startswith("# ") and re.fullmatch(r"\*.+\?\*", question)
    assert text.count("<summary>") == 3 and "\n## Check yourself\n" in text
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert 600 <= len(re.findall(r"[^\W\d_]\w*", prose)) <= 1100
    earlier = _order()[: _order().index(page)]
    known = {"../how-to-read.md", "../bibliography.md", *(f"{name}.md" for name in earlier)}
    assert {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)} <= known


TERMS = {  # word of a later primer: the page that explains it
    r"\bSMs?\b|\bCTA|\bwarp|MUFU|tensor core|shared memory|\bTMA\b": "blackwell-sm",
    r"\blanes? \d|TMEM|tcgen05|warpgroup": "tensor-memory",
    r"mbarrier|parity|parities|\bcommit\b|expect_tx|fence\.proxy": "mbarriers",
    r"swizzle|descriptor|K-major|\bbanks?\b": "swizzles",
    r"cluster|DSMEM|cta_group|multicast|\bleader\b": "cta-pairs",
    r"const_expr|Constexpr|\btrac(ed|ing)\b|partition_|tSrQ": "cute-dsl",
}


@pytest.mark.parametrize("term", TERMS)
def test_no_primer_uses_what_a_later_one_explains(term):
    before = _order()[: _order().index(TERMS[term])]
    pages = [(PAGES / f"{name}.md").read_text(encoding="utf-8") for name in before]
    used = [found.group() for page in pages for found in re.finditer(term, page)]
    assert used == []
    assert re.search(term, (PAGES / f"{TERMS[term]}.md").read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere():
    for path in [*(ROOT / "docs" / "js").glob("*.js"), ROOT / "docs" / "css" / "extra.css"]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|@import|\bfetch\(|\bimport\b", text), path
