# SPDX-License-Identifier: Apache-2.0
"""Traces, timelines and derived times, on a hand-made run and on stage 01's model."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest
from flash_ladder.common import derived, timeline
from flash_ladder.common.model import B200, Run, Span

SPANS = (
    Span("LOAD", "gmem", "load", 1, 0, 10),
    Span("LOAD", "gmem", "load", 0, 20, 30),
    Span("MMA", "barrier", "kv_full", 1, 0, 10),
    Span("MMA", "smem", "product", 1, 10, 60),
    Span("MMA", "fma", "product", 1, 10, 40),
    Span("MMA", "smem", "product", 0, 60, 110),
    Span("MMA", "fma", "<store>", -1, 110, 120),
)
TOUCHES = (
    (0, 10, "write", "S", 0, 128),  # S is written, read until 30, written again and read
    (20, 30, "read", "S", 0, 128),
    (50, 60, "write", "S", 0, 128),
    (60, 65, "read", "S", 0, 128),
    (25, 30, "write", "P", 0, 64),  # in the columns of S, before the last of S is read
    (40, 45, "read", "P", 0, 64),
    (70, 80, "write", "unread", 256, 32),
)


@dataclass(frozen=True)
class TmemRun(Run):
    """A run that also knows what touched tensor memory."""

    tmem_log: tuple = ()


def _run(spans=SPANS, cycles=120.0, machine=B200, **more) -> Run:
    kind = TmemRun if more else Run
    return kind(machine, None, None, (cycles,), tuple(spans), 1, 1e9, **more)


@pytest.fixture(scope="module")
def report(stage):
    """Stage 01 on the model: one CTA, 256 keys."""
    return derived.simulate(stage, B200, derived.Sizes(256, 2, 128))


@pytest.fixture
def drawing():
    """Skip where interactive pages cannot be made."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")


# ---- tracks, use of engines ----------------------------------------------------------------


def test_tracks_are_roles_then_engines():
    groups = timeline.tracks(_run())
    named = {name: [track for track, _ in rows] for name, rows in groups}
    assert named == {
        "LOAD": ["gmem"],
        "MMA": ["smem", "fma", "barrier"],
        "engines": ["gmem", "smem", "fma"],
    }
    alone = timeline.tracks(_run([span for span in SPANS if span.role == "MMA"]))
    assert [name for name, _ in alone] == ["MMA"]


def test_spans_that_overlap_get_tracks_of_their_own():
    spans = [Span("MMA", "tensor", "a", 0, start, start + 15) for start in (0, 10, 20)]
    ((_, rows),) = timeline.tracks(_run(spans))
    assert [(name, [span.start for span in lane]) for name, lane in rows] == [
        ("tensor", [0, 20]),
        ("tensor (2)", [10]),
    ]


def test_the_second_cta_of_a_pair_has_its_own_tracks():
    @dataclass(frozen=True)
    class Ranked(Span):
        rank: int = 0

    spans = [Ranked("MMA", "tensor", "a", 0, 0, 5, rank=rank) for rank in (0, 1)]
    assert [name for name, _ in timeline.tracks(_run(spans))] == [
        "MMA",
        "MMA@1",
        "engines",
        "engines@1",
    ]


def test_utilisation_lists_the_engines_in_use():
    assert timeline.utilisation(_run()) == pytest.approx(
        {"gmem": 20 / 120, "smem": 100 / 120, "fma": 40 / 120}
    )


# ---- tensor memory -------------------------------------------------------------------------


def test_tmem_is_in_use_from_a_write_to_its_last_read():
    assert timeline.tmem_occupancy(TOUCHES) == [
        (0, 128),
        (30, 64),  # P lives in half of the columns
        (45, 0),
        (50, 128),
        (65, 0),
        (70, 32),  # nobody reads it: in use while it is written
        (80, 0),
    ]
    assert timeline.tmem_occupancy(()) == [] == timeline.tmem_occupancy(timeline.tmem_log(_run()))


def test_an_accumulator_stays_in_use_when_the_mma_reads_it():
    touches = [(at, at + 10, kind, "O", 0, 128) for at in (0, 50) for kind in ("read", "write")]
    assert timeline.tmem_occupancy(touches) == [(0, 128), (60, 0)]


# ---- Perfetto ------------------------------------------------------------------------------


def test_the_trace_loads_and_has_every_span_twice():
    trace = json.loads(json.dumps(timeline.perfetto(_run(tmem_log=TOUCHES))))
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    engines = [span for span in SPANS if span.engine != "barrier"]
    assert len(spans) == len(SPANS) + len(engines)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"LOAD", "MMA", "engines"}
    assert all({"pid", "tid", "name", "ph"} <= set(event) for event in events if event["ph"] != "C")
    first = next(event for event in spans if event["name"] == "product")
    assert (first["ts"], first["dur"]) == (0.010, 0.050)  # 1 cycle = 1 ns, in microseconds
    assert first["args"] == {"role": "MMA", "engine": "smem", "tile": 1}
    counters = [event["args"]["columns"] for event in events if event["ph"] == "C"]
    assert counters[0] == 128 and counters[-1] == 0
    assert "not measured" in trace["otherData"]["note"]


def test_events_of_a_track_do_not_overlap(report):
    ends: dict[tuple, float] = {}
    for event in timeline.perfetto(report.run)["traceEvents"]:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= ends.get(track, 0.0) - 1e-9
            ends[track] = event["ts"] + event["dur"]


# ---- pictures ------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_the_svg_is_well_formed_and_says_that_it_is_derived(background):
    text = timeline.svg(_run(tmem_log=TOUCHES), background=background)
    root = ET.fromstring(text)
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert "product, key tile 0: MMA on smem, cycles 60 to 110 (50)" in titles
    assert "<store>: MMA on fma, cycles 110 to 120 (10)" in titles
    assert "tensor memory in use, at most 128 of 512 columns" in titles
    assert "SM model, B200 figures: derived cycles, not measured" in text
    assert ('fill="white"' in text) == background


def test_bars_are_where_their_cycles_are():
    text = timeline.svg(_run())
    bar = re.search(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)".*MMA on smem, cycles 60', text)
    scale = (timeline.WIDTH - timeline.LABEL - 10) / 120
    assert float(bar[1]) == pytest.approx(timeline.LABEL + 60 * scale, abs=0.01)
    assert float(bar[2]) == pytest.approx(50 * scale, abs=0.01)


def test_a_long_run_stays_a_small_picture():
    spans = [Span("A", "fma", "step", n, 10 * n, 10 * n + 9) for n in range(20000)]
    assert len(timeline.svg(_run(spans, 200000.0))) < 400_000


def test_the_svg_is_the_same_each_time(stage, report):
    again = derived.simulate(stage, B200, report.sizes)
    assert timeline.svg(again.run) == timeline.svg(report.run)


def test_the_page_needs_no_network(drawing):
    page = timeline.page(_run(tmem_log=TOUCHES))
    assert not re.search(r'<script[^>]+src="http', page)
    assert '"what": "kv_full"' in page and "not measured" in page


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "altair", None)
    with pytest.raises(RuntimeError, match="needs altair: pip install altair vl-convert-python"):
        timeline.chart(_run())


# ---- phases and whole problems -------------------------------------------------------------


def test_phases_add_up_to_the_cycles_of_the_cta():
    assert timeline.phases(_run(), 40) == timeline.Phases(30, 40, 10, 2)
    assert timeline.phases(_run(SPANS[:1], 12.0), 20) == timeline.Phases(0, 10, 2, 1)  # 10 at most
    with pytest.raises(ValueError, match="no span of the run names a key tile"):
        timeline.phases(_run(SPANS[-1:]), 40)


def test_the_steady_state_does_not_know_the_last_tile():
    """A last tile that takes 20 cycles less, as one does that no other follows."""

    def run(tiles: int) -> Run:
        edges = [(tile, 50 * tile, 50 * tile + 50) for tile in range(tiles - 1)]
        edges.append((tiles - 1, 50 * tiles - 50, 50 * tiles - 20))
        return _run([Span("MMA", "smem", "product", *edge) for edge in edges], edges[-1][2] + 7.0)

    assert timeline.steady(run(4), run(8)) == 50
    assert timeline.phases(run(4), 45) == timeline.Phases(0, 45, 7, 4)
    with pytest.raises(ValueError, match="needs a second run with more tiles"):
        timeline.steady(run(4), run(4))


def test_phases_of_stage_01_foretell_a_longer_run(stage, report):
    longer = derived.simulate(stage, B200, derived.Sizes(1024, 2, 128))
    found, tiles = report.phases, longer.phases.tiles
    assert (found.tiles, tiles) == (8, 32)
    foretold = found.prologue + tiles * found.per_tile + found.epilogue
    assert foretold == pytest.approx(longer.run.cta_cycles[0], rel=1e-3)


SMALL = {"machine": B200.with_changes({"sms": 2}), "tile_m": 4, "tile_n": 2, "head_dim": 8}


def test_full_attention_goes_in_waves():
    found = timeline.problem_time(5, 10, 1, seqlen_q=12, seqlen_k=7, heads=3, **SMALL)
    one = 5 + 4 * 10 + 1  # 7 keys are 4 tiles of 2
    assert found.ctas == 9 and found.cycles == 5 * one  # 9 CTAs on 2 SMs
    assert found.balance == pytest.approx(9 / 10)
    assert found.flop == 4 * 3 * 12 * 7 * 8
    assert found.seconds == pytest.approx(found.cycles / 1.85e9)
    assert found.tflops == pytest.approx(found.flop / found.seconds / 1e12)


def test_causal_ctas_have_the_tiles_up_to_their_last_row():
    sizes = {"seqlen_q": 12, "seqlen_k": 12, "causal": True, **SMALL}
    found = timeline.problem_time(5, 10, 1, **sizes)  # 26, 46 and 66 cycles
    assert found.cycles == 26 + 66 and found.balance == pytest.approx(138 / 184)
    assert found.flop == 4 * 12 * 12 * 8 / 2
    better = timeline.problem_time(5, 10, 1, longest_first=True, **sizes)  # 66; 46 + 26
    assert better.cycles == 72


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "tiles", "pairs"),
    [
        (4, 12, [6], 4 * (24 - 4) / 2),  # the last query faces the last key
        (12, 4, [0, 0, 2], 4 * 4 / 2),  # the first eight rows see nothing
        (6, 6, [2, 3], 6 * 6 / 2),  # the second tile has two rows
    ],
)
def test_a_causal_mask_is_aligned_to_the_end(seqlen_q, seqlen_k, tiles, pairs):
    machine = SMALL["machine"].with_changes({"sms": 1})
    sizes = {**SMALL, "machine": machine, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    found = timeline.problem_time(5, 10, 1, causal=True, **sizes)
    assert found.cycles == 6 * len(tiles) + 10 * sum(tiles)
    assert found.flop == 4 * pairs * 8


@pytest.mark.parametrize(
    ("cycles", "changed", "error", "words"),
    [
        ((-1, 1, 1), {}, ValueError, "cycles_prologue must be finite and not negative; got -1"),
        ((1, 0, 1), {}, ValueError, "cycles_per_tile must be positive"),
        ((1, 1, float("inf")), {}, ValueError, "cycles_epilogue must be finite"),
        ((1, 1, 1), {"heads": 0}, ValueError, "heads must be at least 1; got 0"),
        ((1, 1, 1), {"tile_n": 2.0}, TypeError, "tile_n must be an integer; got 2.0"),
        ((1, 1, 1), {"heads": 1 << 23, "causal": True}, ValueError, "use fewer heads"),
    ],
)
def test_problems_that_make_no_sense_are_refused(cycles, changed, error, words):
    with pytest.raises(error, match=words):
        timeline.problem_time(*cycles, **{**SMALL, "seqlen_q": 4, "seqlen_k": 4, **changed})


def test_the_report_agrees_with_the_run(report):
    assert report.simulated == (128, 256)
    assert report.time.ctas == 4
    assert report.time.cycles == pytest.approx(report.run.cta_cycles[0])  # fewer CTAs than SMs
    found = json.loads(json.dumps(report.as_dict()))
    assert found["derived"]["tflops"] == report.time.tflops > 0
    assert found["problem"] == {
        "batch": 1,
        "seqlen": 256,
        "heads": 2,
        "head_dim": 128,
        "causal": False,
        "window": None,
    }
