# SPDX-License-Identifier: Apache-2.0
"""What the models of the stages' schedules say: order, overlap, cycles. All derived, no GPU."""

import pathlib
import re
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import derived, plan
from flash_ladder.common.model import B200, Deadlock, Run, observe
from flash_ladder.common.ordering import Ordering

TAGS = (2, 3, 4, 5, 6)
PAIRED = (3, 4, 5, 6)  # a CTA of these has two query tiles
TENSOR_CYCLES = 2 * 2 * 128 * 128 * 128 / B200["tensor"]  # QK and PV of 128 x 128 x 128: 1024
MUFU_CYCLES = 128 * 128 / B200["mufu"]  # the exponentials of 128 x 128 scores: 1024


def _problem(rows: int, key_tiles: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = (rows, 128 * key_tiles, 128 * key_tiles)
    shapes = [(1, length, 1, head_dim) for length in lengths]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def _run(number: int, rows: int, key_tiles: int, head_dim: int) -> Run:
    q, k, v = _problem(rows, key_tiles, head_dim)
    return load(number).simulate(q, k, v, machine=B200)


# ---- order ---------------------------------------------------------------------------------


class Checked(NamedTuple):
    """A run and what the ordering checkers of its CTAs found."""

    run: Run
    orders: list[Ordering]

    def a1_edges(self) -> set[tuple[str, str, str]]:
        """Pairs that only rule A1 orders: (earlier MMA, later MMA, what the later one does)."""
        edges = [edge for order in self.orders for edge in order.a1_edges()]
        assert {edge.first.kind for edge in edges} <= {"mma"}
        assert {edge.first.memory for edge in edges} <= {"tmem"}
        return {(edge.first.op, edge.second.op, edge.second.mode) for edge in edges}


def _checked(number: int, mode: str) -> Checked:
    orders = []

    def make():
        orders.append(Ordering(mode))
        return orders[-1]

    with observe(make):
        return Checked(_run(number, rows=256, key_tiles=4, head_dim=64), orders)


@pytest.mark.parametrize("number", TAGS)
def test_every_access_is_ordered(number):
    checked = _checked(number, "practice")
    assert checked.run.findings == ()
    assert len(checked.orders) == (2 if number == 2 else 1)


@pytest.mark.parametrize("number", TAGS)
def test_only_s_over_p_needs_rule_a1(number):
    """S of a key tile overwrites the columns of the P that the PV just issued still reads."""
    checked = _checked(number, "ptx")
    expected = set() if number == 2 else {("O0", "S0", "write"), ("O1", "S1", "write")}
    assert checked.a1_edges() == expected
    assert len(checked.run.findings) == len(expected)  # ordered by A1 or not at all
    assert all("only rule A1 orders" in finding for finding in checked.run.findings)


@pytest.mark.parametrize("number", TAGS)
def test_every_barrier_of_the_plan_is_used(number):
    q, k, v = _problem(256, 4, 64)
    model = load(number).model
    rows = 128 if number == 2 else 256
    cta = model.Cta(B200, q[0, :rows, 0], k[0, :, 0], v[0, :, 0], 1.0)
    cta.start()
    cta.sm.run()
    assert [name for name, barrier in cta.sm.barriers.items() if barrier.phase == 0] == []
    assert cta.sm.findings() == []


@pytest.mark.parametrize("number", PAIRED)
def test_half_a_cta_computes_the_same(number):
    """Rows beyond the tensor are loaded as zeros and not stored."""
    q, k, v = _problem(512, 2, 64)
    full, part = (load(number).simulate(rows, k, v) for rows in (q, q[:, :384]))
    assert (part.ctas, part.out.shape[1], part.lse.shape[2]) == (2, 384, 384)
    assert torch.equal(part.out, full.out[:, :384])
    assert torch.equal(part.lse, full.lse[:, :, :384])
    assert part.findings == ()


# ---- overlap -------------------------------------------------------------------------------


def _times(run: Run, engines, op: str = "", role: str = "") -> list[tuple[float, float]]:
    """Intervals in which a role or operation (by how its name starts) kept an engine busy."""
    spans = [s for s in run.trace if s.engine in engines and s.op.startswith(op)]
    times = sorted((s.start, s.end) for s in spans if s.role.startswith(role) and s.end > s.start)
    joined = []
    for start, end in times:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Part of the time of `a` that is also in `b`."""
    both = sum(max(0.0, min(p[1], q[1]) - max(p[0], q[0])) for p in a for q in b)
    return both / sum(end - start for start, end in a)


def test_stage_02_does_one_thing_at_a_time():
    run = _run(2, rows=128, key_tiles=4, head_dim=128)
    tensor = _times(run, ["tensor"])
    assert len(tensor) == 8
    assert _overlap(tensor, _times(run, ["mufu", "fma", "alu", "cvt"])) == 0
    assert _overlap(tensor, _times(run, ["tmem"])) == 0


@pytest.mark.parametrize("number", PAIRED)
def test_tensor_core_and_exponentials_overlap(number):
    run = _run(number, rows=256, key_tiles=8, head_dim=128)
    share = _overlap(_times(run, ["tensor"]), _times(run, ["mufu"], op="exp"))
    print(f"stage {number:02d}: exponentials during {share:.0%} of the tensor core's work")
    assert share > 1 / 3


@pytest.mark.parametrize("tile", (0, 1))
def test_stage_04_rescales_during_the_softmax(tile):
    """In stage 03 a softmax warpgroup rescales before its exponentials, in 04 meanwhile."""
    shares = {}
    for number, role in ((3, f"SOFTMAX{tile}"), (4, "CORRECTION")):
        run = _run(number, rows=256, key_tiles=8, head_dim=128)
        spans = [s for s in run.trace if s.op in (f"load O{tile}", f"store O{tile}")]
        assert {span.role for span in spans} == {role}
        rescaling = [(s.start, s.end) for s in spans if s.tile >= 0]
        softmax = _times(run, ["mufu"], op="exp", role=f"SOFTMAX{tile}")
        shares[number] = _overlap(rescaling, softmax)
    assert shares[3] == 0
    assert shares[4] > 0.8


# ---- cycles --------------------------------------------------------------------------------


def _cycles(number: int, head_dim: int) -> float:
    """Cycles of the steady state per query tile and key tile."""
    return derived.steady_cycles(load(number), B200, head_dim) / (1 if number == 2 else 2)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_cycles_of_a_tile(head_dim):
    """Cycles per query tile and key tile: never below the roofline, fewer from stage to stage.

    From 02 to 03 the gain is a factor. From 03 to 04 it is small at head dim 128, where the three
    slots of the ring bound 04 (the next test), and none at 64, where MUFU does: there the softmax
    warpgroups of 04 come to share it piece by piece and then both wait for their S at once. This
    hangs on how the model shares an engine (a CHUNK of columns at a time): a tile at a time would
    give 04 1073 cycles instead of 1342, 03 1220 instead of 1244, and change nothing at 128. Stage
    05 goes below what MUFU alone could do at 64 and waits for the same slots as 04 at 128.
    """
    cycles = {number: _cycles(number, head_dim) for number in TAGS}
    print({f"{number:02d}": round(value) for number, value in cycles.items()})
    floor = max(TENSOR_CYCLES * head_dim / 128, MUFU_CYCLES)
    assert min(cycles[number] for number in (2, 3, 4)) >= floor == 1024
    assert cycles[2] > 3 * max(cycles[3], cycles[4])
    if head_dim == 128:
        assert cycles[3] > cycles[4] == pytest.approx(cycles[5]) == pytest.approx(cycles[6])
    else:
        assert MUFU_CYCLES > cycles[5] >= cycles[6] > TENSOR_CYCLES / 2  # FMA units help the MUFU


def test_the_ring_bounds_stage_04_at_head_dim_128(monkeypatch):
    """A fourth slot, which no SM has room for, helps 04 and not 03: MMA waits for K or V."""
    monkeypatch.setattr(plan, "MAX_SMEM_BYTES", 2 * plan.MAX_SMEM_BYTES)
    cycles = {}
    for slots in (3, 4):
        for number in (3, 4):
            monkeypatch.setitem(load(number).config.KV_STAGES, 128, slots)
            cycles[number, slots] = _cycles(number, 128)
    print({key: round(value) for key, value in cycles.items()})
    assert cycles[4, 4] < 0.92 * cycles[4, 3]
    assert cycles[3, 4] > 0.99 * cycles[3, 3]
    faster = 100 * (cycles[3, 3] / cycles[4, 4] - 1)
    assert f"stage 04 would be {faster:.0f} % faster than stage 03" in _page_04()
    assert f"{cycles[4, 3]:.0f} | {cycles[4, 4]:.0f} |" in _page_04()


@pytest.mark.parametrize("number", PAIRED)
def test_a_ring_of_one_slot_deadlocks(monkeypatch, number):
    """What page 03 predicts: MMA wants the next K before the last PV frees the only slot."""
    monkeypatch.setitem(load(number).config.KV_STAGES, 128, 1)
    with pytest.raises(Deadlock) as stuck:
        _run(number, rows=256, key_tiles=2, head_dim=128)
    assert "MMA waits for kv_full" in str(stuck.value)
    assert "LOAD waits for kv_empty" in str(stuck.value)


def _page_04() -> str:
    return " ".join((load(4).folder / "README.md").read_text(encoding="utf-8").split())


def test_page_04_lists_events_in_the_order_of_the_model():
    """Waits of the page's table end in the order of its rows, whatever a row waits for above it."""
    rows = re.findall(r"\| (\d) \| [^|]+ \| `(\w+)` \| ([^|]+) \|(?= \|| Every)", _page_04())
    assert [int(number) for number, *_ in rows] == [1, 2, 3, 4, 5, 6]
    spans = [s for s in _run(4, rows=256, key_tiles=2, head_dim=128).trace if s.engine == "barrier"]
    seen, ends = {}, {}
    for number, role, waits in rows:
        for above, barrier in re.findall(r"(\d) \(`(\w+)`\)", waits):
            found = [s.end for s in spans if (s.role, s.op) == (role, barrier)]
            turn = seen[barrier] = seen.get(barrier, -1) + 1
            first = barrier == "stats_empty0"  # passes at once for the first key tile
            ends[int(number)] = max(ends.get(int(number), 0), found[turn + first])
            assert int(above) < int(number)
    assert list(ends) == [2, 4, 5, 6] and sorted(ends.values()) == list(ends.values())


def test_leaving_out_the_first_arrival_at_o_rescaled_deadlocks_as_page_04_says():
    left_out = []

    def skip(agent, verb, barrier, line):
        first = (agent, verb, barrier) == ("CORRECTION", "arrive", "o_rescaled0") and not left_out
        return first and not left_out.append(line)

    with observe(skip=skip), pytest.raises(Deadlock) as stuck:
        _run(4, rows=256, key_tiles=2, head_dim=128)
    page, circle = _page_04(), (("o_rescaled0", "CORRECTION"), ("stats_full0", "SOFTMAX0"))
    waiting = "MMA"
    for barrier, comes in (*circle, ("s_full0", "MMA")):
        named = rf"{waiting} waits for {barrier} \([^)]*: {comes} \d+ to come\)"
        assert re.search(named, str(stuck.value)), named
        assert f"`{waiting}` waits for `{barrier}`, where `{comes}` must arrive" in page
        waiting = comes


def _without_the_last_wait(machine) -> Run:
    """Stage 04 with three key tiles and without the wait of SOFTMAX0 before it leaves l behind."""
    waits = []

    def skip(agent, verb, barrier, line):
        found = (agent, verb, barrier) == ("SOFTMAX0", "wait", "stats_empty0")
        waits.extend([line] * found)
        return found and len(waits) == 4  # one for each key tile, then the one for l

    with observe(lambda: Ordering("practice"), skip=skip):
        run = load(4).simulate(*_problem(256, 3, 64), machine=machine)
    assert len(waits) == 4
    return run


def test_leaving_out_the_last_stats_empty_fails_as_page_04_says():
    """A race in any case; a CORRECTION that comes late takes two phases of stats_full for none."""
    (finding,) = _without_the_last_wait(B200).findings
    assert re.search(r"write sStats \(SOFTMAX0.* read sStats \(CORRECTION", finding)
    with pytest.raises(
        Deadlock, match=r"CORRECTION waits for stats_full0 \(parity 0, now in phase 4"
    ):
        _without_the_last_wait(B200.with_changes({"tmem": 8}))
    assert "With a slow tensor memory the model shows it (D" in _page_04()


def _chain(number: int) -> list[float]:
    """Cycles of tile 0 from S full to P full, to the issue of its next S, in QK, to its S full."""
    trace = [
        s for s in _run(number, rows=256, key_tiles=12, head_dim=128).trace if s.tile in (4, 5)
    ]
    find = lambda tile, *key: next(
        s for s in trace if (s.role, s.engine, s.op, s.tile) == (*key, tile)
    )
    full = [find(tile, "SOFTMAX0", "barrier", "s_full0").end for tile in (5, 4)]
    p_full = find(5, "MMA", "barrier", "p_full0").end
    product, pv = find(4, "MMA", "tensor", "S0"), find(5, "MMA", "tensor", "O0")
    assert (pv.start, pv.end - pv.start) == pytest.approx((p_full, 512))
    times = full[0], p_full, product.start, product.end, full[1]
    return [later - earlier for earlier, later in pairwise(times)]


def test_pages_03_and_04_take_the_chain_apart():
    """In stage 04 PV runs while the MMA warp waits for K, in 03 the next QK starts when PV ends."""
    third, fourth = (" ".join((load(n).folder / "README.md").read_text().split()) for n in (3, 4))
    row = lambda cycles: "".join(f"| {cycle:.0f} " for cycle in (*cycles, sum(cycles))) + "|"
    assert row(_chain(3)) in third and sum(_chain(3)) == pytest.approx(2 * _cycles(3, 128))
    *_, qk, seen = _chain(3)
    assert f"{qk - 512:.0f} in QK, which shares" in third and f"and {seen:.0f} until" in third
    assert row(_chain(4)) in fourth and _chain(3)[1] == pytest.approx(512) and _chain(4)[1] > 512
    links = "softmax {:.0f}, PV and waiting {:.0f}, QK {:.0f}, until the softmax sees S {:.0f}"
    late = f"K comes {_chain(4)[1] - 512:.0f} cycles after PV is done"
    assert links.format(*_chain(4)) in fourth and late in fourth
    total = 2 * _cycles(4, 128)
    assert sum(_chain(4)) == pytest.approx(total)
    share = TENSOR_CYCLES / _cycles(4, 128)
    assert f"comes to {share:.0%}".replace("%", " %") in fourth
    speeds = [_cycles(3, head_dim) / _cycles(4, head_dim) - 1 for head_dim in (128, 64)]
    assert f"prediction (ii): {100 * speeds[0]:.0f} %, not 5" in fourth
    assert f"has stage 04 {-100 * speeds[1]:.0f} % *slower*" in fourth


def test_page_01_says_what_smaller_key_tiles_cost(monkeypatch):
    """Cycles of 128 keys with tiles of 16 and 32, and what of the CTA's work they are."""
    found = {}
    for size in (32, 16):
        monkeypatch.setitem(load(1).config.TILE_N, 128, size)
        trace = _run(1, rows=128, key_tiles=1, head_dim=128).trace
        for span in trace:
            key = "barrier" if span.engine == "barrier" else (span.op, span.engine)
            found[size, key] = found.get((size, key), 0) + span.end - span.start
        found[size, "all"] = derived.steady_cycles(load(1), B200, 128) * 128 / size
    more = lambda key: round(found[16, key] - found[32, key])
    page = " ".join((load(1).folder / "README.md").read_text(encoding="utf-8").split())
    said = (
        f"128 keys take {more('all')} cycles more (D): {more(('load', 'latency'))} for these "
        f"loads, {more(('mma_qk', 'smem'))} for reading Q, {more(('rescale', 'fma'))} for "
        f"rescaling O, {more('barrier')} for the barriers."
    )
    assert said in page


# ---- the page ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "settings", "row"),
    [
        (4, (), "the model on stage 04 (D)"),
        (6, (), "the model on stage 06 (D)"),
        (6, ("tma_latency=700",), "the model on stage 06, half of the TMA's latency (D)"),
    ],
)
def test_the_page_shows_what_the_model_derives(number, settings, row):
    sizes = derived.Sizes(seqlen=32768, heads=16, head_dim=128)
    machine = derived.machine("B200", settings)
    tflops = derived.simulate(load(number), machine, sizes, settings).time.tflops
    page = pathlib.Path(__file__).parents[1] / "docs" / "model.md"
    assert f"| {row} | {tflops:.0f} |" in page.read_text(encoding="utf-8")


def test_the_page_says_how_far_the_model_is_from_what_was_published():
    page = pathlib.Path(__file__).parents[1] / "docs" / "model.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    row = lambda name: float(re.search(rf"\| {re.escape(name)} \| (\d+) \|", text)[1])
    published = row("FlashAttention-4 on a B200 (Q: its authors' chart)")
    less = 1 - row("the model on stage 06 (D)") / published
    more = row("the model on stage 06, half of the TMA's latency (D)") / published - 1
    assert f"The model says {100 * less:.0f} % less than what was published" in text
    assert f"With half of that it says {100 * more:.0f} % *more* than was published" in text


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("number", (4, 5, 6))
def test_the_tables_of_the_pages_show_the_steady_cycles(number, head_dim):
    """Of the stages that a page compares, as `flash-ladder model` prints them."""
    page = (load(number).folder / "README.md").read_text(encoding="utf-8")
    page = page[page.index("What the SM model says") :]
    (cells,) = re.findall(rf"^\| head dim {head_dim} \|(.*)\|$", page, re.M)
    (head,) = re.findall(r"^\|(.*)\|\n\|[-|]+\|\n\| head dim 128 \|", page, re.M)
    shown = {name.strip(): cell for name, cell in zip(head.split("|")[1:], cells.split("|"))}
    stages = {int(name): cell for name, cell in shown.items() if name.isdigit()}
    assert number in stages and len(stages) >= 2
    assert {row: int(cell) for row, cell in stages.items()} == {
        row: round(_cycles(row, head_dim)) for row in stages
    }


def test_the_pages_of_stages_02_and_03_show_the_steady_cycles():
    page = lambda number: (load(number).folder / "README.md").read_text(encoding="utf-8")
    second, third = page(2), " ".join(page(3).split())
    assert f"| 616 | {_cycles(2, 128):.0f} |" in second and f"{_cycles(2, 64):.0f} cycles" in second
    tile = _cycles(3, 128)
    assert f"That is {tile:.0f} a tile: {TENSOR_CYCLES / tile:.0%}".replace("%", " %") in third
    assert f"{_cycles(2, 128) / tile:.1f} times as fast as stage 02 (ii)" in third
    assert f"it is {_cycles(3, 64):.0f} a tile" in third
    loads = int(re.search(r"\| (\d+) \| 648 \|", second)[1])
    shares = (total := _cycles(2, 128)), total - loads, tile
    told = "hide the loads, {:.1f} times; the second tile brings the other {:.1f} (D: the model's"
    assert told.format(*(a / b for a, b in pairwise(shares))) in third
    assert "{:.0f} cycles, {:.0f} without waits for loads, {:.0f} now".format(*shares) in third


def test_page_05_says_how_long_mma_waits_for_k_in_stage_04():
    """In the steady state, from V of a key tile to V of the next, at tiles 8 and 9."""
    spans = [s for s in _run(4, 256, 16, 128).trace if (s.role, s.engine) == ("MMA", "barrier")]
    waits = [s for s in spans if s.op.startswith("kv_full") and s.tile in (8, 9)]
    waits.sort(key=lambda span: span.start)
    cycles = {round(span.end - span.start) for span in waits[::2]}  # K; between them V
    (k,), round_ = cycles, waits[2].start - waits[0].start
    page = " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    assert f"MMA waits {k} of {round_:.0f} cycles for the next K (D)" in page
    assert round_ == pytest.approx(2 * _cycles(4, 128), abs=1)
    told = f"Of the {k} cycles between P and the next QK, in a round of {round_:.0f}, PV takes"
    assert f"{told} {TENSOR_CYCLES / 2:.0f}." in page


def test_page_05_says_what_the_mufu_does_at_head_dim_64():
    """In stage 04 it has both tiles' exponentials at once, then waits: in the steady state, and
    in the page's timeline, of four key tiles."""
    steady = _times(_run(4, 256, 16, 64), ["mufu"])[4:10]
    drawn = _times(derived.small_run(load(4), B200, 64, 512), ["mufu"])[:4]
    (work,) = {round(end - start) for start, end in steady + drawn}
    pauses = [after[0] - before[1] for row in (steady, drawn) for before, after in pairwise(row)]
    (pause,) = {round(pause, -1) for pause in pauses[:-3]}
    assert all(abs(pause - each) < 11 for each in pauses)
    told = f"MUFU for {work} cycles, then it idles for about {pause:.0f}, till both next maxima are"
    page = " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    assert f"{told} known" in page


def test_page_05_says_when_the_rest_of_p_comes():
    """With both warpgroups: within the first six MMAs of PV at head dim 128, at 64 not always."""
    late, idle = {}, {}
    for head_dim in (64, 128):
        trace = _run(5, 256, 16, head_dim).trace
        gaps, holes = [], []
        for query in (0, 1):
            for tile in range(16):
                spans = [s for s in trace if s.tile == tile]
                ends = [s.end for s in spans if s.op == f"store P{query}"]
                gaps.append(ends[3] - ends[2])
                first, last = [s for s in spans if (s.engine, s.op) == ("tensor", f"O{query}")]
                holes.append(last.start - first.end)
        late[head_dim], idle[head_dim] = round(max(gaps)), round(max(holes))
    page = " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    assert f"in the model at most {late[128]}: within the 384 of six MMAs" in page
    told = f"At head dim 64 six take 192; there the tensor core idles up to {idle[64]} cycles"
    assert late[128] < 384 and idle[128] == 0 and f"{told} in a PV (D: {late[64]} − 192)" in page
    assert idle[64] == late[64] - 192


def test_page_05_says_what_is_faster_at_head_dim_64(monkeypatch):
    """In the steady state, there without emulation too, and in the timeline."""
    page = " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    steady = _cycles(4, 64) / _cycles(5, 64) - 1
    drawn = [derived.small_run(load(n), B200, 64, 512).cta_cycles[0] for n in (4, 5)]
    assert f"At head dim 64 stage 05 is {100 * steady:.0f} % faster in the model" in page
    told = "In the timeline, start and end included, stage 05 is"
    assert f"{told} {100 * (drawn[0] / drawn[1] - 1):.0f} % faster (D)" in page
    monkeypatch.setitem(load(5).config.EMULATED, 64, (0, 0, 0, 0))
    assert f"nothing emulated it takes {_cycles(5, 64):.0f} cycles (D)" in page
    peak = {f"{100 * TENSOR_CYCLES / _cycles(number, 128):.0f}" for number in (4, 5)}
    assert peak == {"61"} and "one warp alone; the model has 61 % for both)" in page


def test_page_05_says_what_a_fourth_slot_would_bring(monkeypatch):
    """For which no SM has room."""
    monkeypatch.setattr(plan, "MAX_SMEM_BYTES", 2 * plan.MAX_SMEM_BYTES)
    for number in (4, 5):
        monkeypatch.setitem(load(number).config.KV_STAGES, 128, 4)
    page = " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    told = "at head dim 128 would be {:.0f} in stage 04 and {:.0f} in stage 05 (D)"
    assert told.format(_cycles(4, 128), _cycles(5, 128)) in page


def test_page_02_says_what_a_key_tile_waits_for():
    """In the steady state, at tile 4: loads, both products with their latency, the softmax."""
    spans = [s for s in _run(2, 128, 8, 128).trace if s.tile == 4]
    found = {span.op: span for span in spans if span.engine == "barrier"}
    loads, scores, output = (found[name] for name in ("kv_full[0]", "s_full", "o_full"))
    cycles = [span.end - span.start for span in (loads, scores, output)]
    cycles.insert(2, output.start - scores.end)
    page = " ".join((load(2).folder / "README.md").read_text(encoding="utf-8").split())
    assert "| {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} |".format(*cycles, sum(cycles)) in page
    parts = cycles[0], cycles[1] - TENSOR_CYCLES / 2, cycles[3] - TENSOR_CYCLES / 2
    told = "hand-overs cost {:.0f} cycles (D: {:.0f} + {:.0f} + {:.0f}), not 2000"
    assert told.format(sum(parts), *parts) in page
    moves = [span for span in spans if (span.engine, span.op) == ("gmem", "load sKV[0]")]
    moving, rate = moves[-1].end - moves[0].start, B200["gmem"]
    latency = f"Of the {cycles[0]:.0f}, {B200['tma_latency']:.0f} are the latency of a TMA load"
    assert latency in page and f"stage 01's {B200['gmem_latency']:.0f} are an ordinary" in page
    told = f"{moving:.0f} the transfer of K beside V (D: the model's {rate:.0f} bytes a cycle,"
    assert told in page
    predicted = int(re.search(r"QK 512 cycles, softmax (\d+), PV 512", page)[1])
    assert f"softmax is {predicted - cycles[2]:.0f} shorter than predicted" in page


def test_page_06_says_what_leaving_o_alone_is_worth():
    """In the page's timelines: waits for o_rescaled0, the start of PV and S, and the end."""
    waits, around, starts, ends = {}, {}, {}, set()
    for number in (5, 6):
        run = derived.small_run(load(number), B200, 128, 512)
        spans = [s for s in run.trace if s.op == "o_rescaled0" and s.engine == "barrier"]
        waits[number] = [round(s.end - s.start) for s in spans]
        mma = [s for s in run.trace if s.role == "MMA" and s.engine == "barrier"]
        at = [i for i, s in enumerate(mma) if s.op == "o_rescaled0"][1]
        assert [s.op[:7] for s in mma[at - 1 : at + 3 : 2]] == ["p_full0", "p_rest0"]
        around[number] = [mma[i].end - mma[i].start for i in (at - 1, at + 1, at + 2)]
        for op in ("O0", "S0"):
            found = [round(s.start) for s in run.trace if s.op == op and s.engine == "tensor"]
            starts[number, op] = found[:: len(found) // 4]
        ends.add(run.cta_cycles)
    more = [round(b - a) for a, b in zip(around[5], around[6])]
    page = " ".join((load(6).folder / "README.md").read_text(encoding="utf-8").split())
    assert waits == {5: [0, 173, 173, 173], 6: [0, 0, 0, 173]} and len(ends) == 1
    told = (
        "MMA no longer waits 173 cycles a round for `o_rescaled0`, and {} less for `p_full0`, but"
    )
    assert f"{told} {{}} more for `p_rest0` and K (D)".format(-more[0], more[1] + more[2]) in page
    assert (
        "MMA waits up to 173 cycles for it, and that much less for `p_rest` and K (D)"
        in " ".join((load(5).folder / "README.md").read_text(encoding="utf-8").split())
    )
    sooner = [x - y for x, y in zip(starts[5, "O0"], starts[6, "O0"])]
    told = f"starts 190 cycles earlier (D: at {starts[6, 'O0'][1]}, not {starts[5, 'O0'][1]}), the"
    last = f"{starts[6, 'S0'][2]:,}".replace(",", " ")
    assert sooner == [0, 190, 190, 0] and f"{told} next S at {last} in both." in page
    assert starts[5, "S0"] == starts[6, "S0"]


@pytest.mark.parametrize("length", (1024, 2048, 4096, 8192, 16384))
def test_the_page_of_the_masks_shows_what_they_cost(length):
    """TFLOP/s of the forward and of the backward's pair, full and causal, and their ratio."""
    page = (load(8).folder / "README.md").read_text(encoding="utf-8")
    cells = []
    for kernel in (load(8), load(8).part("backward_2cta")):
        sizes = [
            derived.Sizes(length, 16 * 32768 // length, 128, causal=on) for on in (False, True)
        ]
        full, causal = (derived.simulate(kernel, B200, size) for size in sizes)
        rates = full.time.tflops, causal.time.tflops
        cells += [f"{rates[0]:.0f} (D)", f"{rates[1]:.0f} (D)", f"{rates[1] / rates[0]:.2f}"]
        if kernel.name == "":
            once = [round(cycles, -1) for cycles in (full.phases.prologue, full.phases.epilogue)]
            text = " ".join(page.split())
            assert "its start and end, {:.0f} and {:.0f} cycles (D)".format(*once) in text
    assert f"| {length} | {' | '.join(cells)} |" in page
