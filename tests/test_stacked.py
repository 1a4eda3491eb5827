# SPDX-License-Identifier: Apache-2.0
"""Timelines one above another: one scale, one set of colours, a row for each role that works."""

import re
import xml.etree.ElementTree as ET

import flash_ladder
import pytest
from flash_ladder.common import derived, stacked
from flash_ladder.common.model import B200, Run, Span

LOADING = [Span("LOAD", "tma", "load sK[1]", 0, 0, 5), Span("LOAD", "smem", "load sK[1]", 0, 4, 10)]
WAITING = [Span("MMA", "barrier", "k_full", 0, 0, 10), Span("IDLE", "barrier", "end", -1, 0, 100)]
PRODUCTS = [Span("MMA", engine, "S1", 0, 10, end) for engine, end in (("smem", 50), ("tensor", 60))]
SPANS = (*LOADING, *WAITING, *PRODUCTS, Span("MMA", "tensor", "O", 1, 60, 100))
KERNELS = [
    (number, name)
    for number in flash_ladder.built()
    for name in ("", *flash_ladder.load(number).parts)
    if number > 1 and not name.endswith("process")
]


def run_of(spans=SPANS, cycles=100.0) -> Run:
    return Run(B200, None, None, (cycles,), tuple(spans), 1, 1e9)


def bars(text: str) -> list[tuple[str, float, float, str]]:
    """(title, x, width, opacity) of every bar."""
    found = re.findall(
        r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="15" fill="\S+" '
        r'fill-opacity="(\S+)"><title>(.*?)</title>',
        text,
    )
    return [(title, float(x), float(width), opacity) for x, width, opacity, title in found]


def test_panels_share_one_scale():
    text = stacked.svg(
        [stacked.Panel("short <one>", run_of()), stacked.Panel("long", run_of(cycles=200.0))],
        "A & B",
    )
    root = ET.fromstring(text)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == "A & B"
    assert "short &lt;one&gt;" in text and "derived cycles, not measured" in text
    found = bars(text)
    half = len(found) // 2
    assert found[:half] == found[half:] and half == 8  # roles 1 + 3, engines 2 + 2
    scale = (stacked.WIDTH - stacked.LABEL - stacked.RIGHT) / 200
    work = next(row for row in found if row[0] == "O, tile 1: 60 to 100")
    assert work[1] == pytest.approx(stacked.LABEL + 60 * scale, abs=0.1)
    assert work[2] == pytest.approx(40 * scale, abs=0.1)
    assert text.count(">200</text>") == 2  # both axes are as long as the longest run


def test_a_role_is_one_row_and_idle_ones_are_left_out():
    rows = dict(stacked.roles(run_of()))
    assert list(rows) == ["LOAD", "MMA"]
    assert [(span.op, span.start, span.end) for span in rows["LOAD"]] == [("load sK[1]", 0, 10)]
    said = [(span.op, span.start, span.end) for span in rows["MMA"]]
    assert said == [("k_full", 0, 10), ("S1", 10, 60), ("O", 60, 100)]  # waits first
    assert [name for name, _ in stacked.bounds(run_of())] == ["tensor core", "shared memory"]


def test_spans_go_on_after_a_short_gap_only():
    spans = [Span("A", "fma", "exp", 0, 10 * n, 10 * n + 8) for n in range(3)]
    assert len(stacked.roles(run_of(spans))[0][1]) == 3
    ((_, joined),) = stacked.roles(run_of(spans), 2.0)
    assert [(span.start, span.end) for span in joined] == [(0, 28)]
    tiles = [Span("A", "fma", "exp", n, 10 * n, 10 * n + 10) for n in range(3)]
    assert len(stacked.roles(run_of(tiles), 2.0)[0][1]) == 3


def test_the_second_tile_is_paler_and_waits_are_faint():
    shown = {title.split(":")[0]: opacity for title, *_, opacity in bars(svg_of())}
    assert shown["S1, tile 0"] == "0.5" and shown["O, tile 1"] == "1"
    assert shown["k_full, tile 0"] == "0.35" and shown["load sK[1], tile 0"] == "1"  # a slot
    assert "paler" in svg_of() and "paler" not in svg_of(LOADING)


def svg_of(spans=SPANS) -> str:
    return stacked.svg([stacked.Panel("x", run_of(spans))], "x")


def test_of_a_pair_the_leader_is_shown():
    spans = [
        Span(f"MMA@{role}", "tensor", "SO"[rank], 0, 10 * role, 10 * role + 10, rank=rank)
        for role in (0, 1)
        for rank in (0, 1)
    ]
    ((name, found),) = stacked.roles(run_of(spans))
    assert name == "MMA" and [span.role for span in found] == ["MMA@0"]
    ((_, busy),) = stacked.bounds(run_of(spans))  # the peer's role, too, on the leader's SM
    assert [(span.role, span.op) for span in busy] == [("MMA@0", "S"), ("MMA@1", "S")]


def test_the_legend_names_what_occurs():
    text = svg_of()
    for label, there in (("S", 1), ("O", 1), ("copies by TMA", 1), ("waiting", 1), ("dP", 0)):
        assert text.count(f">{label}</text>") == there


def test_an_op_that_no_family_names_is_refused():
    with pytest.raises(ValueError, match="'sort0' belongs to no family"):
        svg_of([Span("A", "fma", "sort0", 0, 0, 1)])
    ops = [op for family in stacked.FAMILIES for op in family.ops]
    assert len(ops) == len(set(ops))


@pytest.mark.parametrize("number, name", KERNELS)
def test_every_kernel_can_be_drawn(number, name):
    kernel = flash_ladder.load(number).part(name)
    for causal in {False, kernel.config.ENVELOPE.masks}:
        run = derived.small_run(kernel, B200, 128, 512, causal)
        text = stacked.svg([stacked.Panel("x", run)], "x")
        ET.fromstring(text)
        assert len(text) < 150_000
