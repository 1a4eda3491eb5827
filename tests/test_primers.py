# SPDX-License-Identifier: Apache-2.0
"""The primers' arithmetic: scripts and figures against the model, the formulas and the oracle."""

import json
import math
import pathlib
import random
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from flash_ladder.common import inputs, reference, rescaling, roofline
from flash_ladder.common.hopper import layouts
from flash_ladder.common.model.machine import B200, MACHINES
from flash_ladder.common.primers import ceilings, ring, softmax, swizzle

ROOT = pathlib.Path(__file__).parent.parent
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
CALL = """
const part = require(process.argv[1]);
const calls = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(calls.map(([name, ...given]) => part[name](...given))));
"""


def script(name: str, calls: list[list]) -> list:
    """What the functions of docs/js/NAME.js return; each call is [function, argument, …]."""
    command = [NODE, "-e", CALL, str(ROOT / "docs" / "js" / f"{name}.js")]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- online softmax ------------------------------------------------------------------------


def _row(name: str) -> tuple[inputs.Problem, list[float], list[float]]:
    """One query row of a problem: its scores, in log2 units and the order of the kernels."""
    sizes = {"batch": 1, "heads": 1, "seqlen_q": 128, "seqlen_k": 1024, "head_dim": 64}
    problem = inputs.make(name, **sizes)
    scale = (problem.softmax_scale or 64**-0.5) * math.log2(math.e)
    scores = (problem.q[0, 0, 0].double() @ problem.k[0, :, 0].double().T) * scale
    order = torch.arange(1024).view(-1, rescaling.TILE_N).flip(0).flatten()
    return problem, scores[order].tolist(), problem.v[0, order, 0, 0].double().tolist()


@needs_node
@pytest.mark.parametrize("name", ["gaussian", "llm_like", "ascending_max", "dominant_key"])
@pytest.mark.parametrize("threshold", [0, 3, 8])
def test_stepper_moves_and_ends_like_the_rule_and_the_oracle(name, threshold):
    problem, scores, values = _row(name)
    (states,) = script("online-softmax", [["run", scores, values, 128, threshold]])
    moved = [state["alpha"] != 1 for state in states[1:]]
    assert moved == rescaling.moves(problem, threshold)[1:, 0, 0].tolist()
    scale = problem.softmax_scale
    truth = reference.attention(problem.q, problem.k, problem.v, softmax_scale=scale)
    assert states[-1]["o"] / states[-1]["l"] == pytest.approx(float(truth.out[0, 0, 0, 0]), 1e-9)
    lse = math.log(2) * states[-1]["m"] + math.log(states[-1]["l"])
    assert lse == pytest.approx(float(truth.lse[0, 0, 0]), 1e-9)


@needs_node
@pytest.mark.parametrize("name", softmax.ROWS)
@pytest.mark.parametrize("threshold", [0, 2.5, 3, 8, 16])  # 3: just reached, m stays
def test_stepper_computes_what_the_static_table_shows(name, threshold):
    scores, values = softmax.ROWS[name], softmax.VALUES
    given = [scores, values, softmax.KEYS, threshold]
    states, wanted = script("online-softmax", [["run", *given], ["definition", scores, values]])
    for ours, its in zip(softmax.run(scores, values, threshold), states, strict=True):
        mine = (ours.m, ours.l, ours.o, ours.alpha, ours.top, ours.largest_p)
        assert list(mine) == pytest.approx(list(its.values()), rel=1e-12)
    assert states[-1]["o"] / states[-1]["l"] == pytest.approx(wanted, rel=1e-12)
    assert max(state["largestP"] for state in states) <= 2.0**threshold


# ---- ceilings ------------------------------------------------------------------------------

KERNELS = {"forward": roofline.forward, "backward": roofline.backward}


def _tiles(kernel: str, pair: bool) -> list[tuple[int, int, int]]:
    """Tiles that the sliders reach and the formulas take, uneven ones among them."""
    rows = 128 * (1 + pair)
    tiles = [(rows, 128, 128), (rows, 128, 64), (2 * rows, 256, 192), (rows, 384, 16)]
    if kernel == "backward":
        return [(n, m, d) for m, n, d in tiles]
    return [*tiles, (rows, 80, 256), (rows, 176, 144)]


@needs_node
@pytest.mark.parametrize("machine", ceilings.machines())
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sliders_compute_the_roofline(kernel, pair, machine):
    how = {"backward": kernel == "backward", "ctas": 1 + pair}
    how |= {name: ceilings.settings()[name] for name in ("piece", "passes")}
    tiles = _tiles(kernel, pair)
    figures = ceilings.machines()[machine]
    calls = [["ceilings", figures, dict(zip("mnd", tile)), how] for tile in tiles]
    for tile, found in zip(tiles, script("ceilings", calls), strict=True):
        wanted = KERNELS[kernel](*tile, pair=pair, machine=MACHINES[machine])
        assert found["cycles"] == pytest.approx(wanted.cycles)
        assert dict(found["parts"]) == pytest.approx(wanted.smem_parts)
        assert found["tflops"] == pytest.approx(wanted.ceilings)
        assert tuple(found["bound"]) == wanted.bound
        assert found["tensorCeiling"] == pytest.approx(wanted.tensor_ceiling)


def test_a_wider_port_frees_the_pair():
    wider = {
        size: roofline.backward(pair=True, machine=B200.with_changes({"smem": size}))
        for size in (128, 160)
    }
    assert wider[128].bound == ("smem",) and wider[160].bound == ("mma",)


def test_sliders_start_at_every_machines_figures():
    for figures in ceilings.machines().values():
        for name, (low, high, step) in ceilings.SLIDERS.items():
            assert low <= figures[name] <= high and (figures[name] - low) % step == 0


# ---- mbarriers -----------------------------------------------------------------------------


@needs_node
@pytest.mark.parametrize("bug", ring.BUGS)
def test_ring_in_the_browser_is_the_ring_of_the_model(bug):
    chosen = random.Random(7)
    orders = [[chosen.choice(ring.ROLES) for _ in range(80)] for _ in range(8)]
    orders.append(list(ring.ROLES) * 20)
    settings = json.loads(json.dumps(ring.settings()))
    for order, its in zip(
        orders, script("mbarrier", [["replay", settings, bug, order] for order in orders])
    ):
        ours = ring.Ring(bug)
        for role, found in zip(order, its, strict=True):
            result = ours.act(role)
            state = [[b.phase, b.pending, b.tx_bytes] for b in ours.barriers]
            assert found == {"result": result, "hazard": ours.hazard, "barriers": state}


def _ends(bug: str, order: list[str]) -> tuple[str, int, list[str]]:
    """(hazard, tiles that MMA has read, last results) of an order of steps."""
    used = ring.Ring(bug)
    results, read = [], 0
    for role in order:
        results.append(used.act(role))
        read += role == "MMA" and results[-1] == "done" and not used.waited["MMA"]
    return used.hazard, read, results[-9:]


def test_each_planted_bug_does_what_is_said_of_it():
    in_turn = list(ring.ROLES) * 40
    eager = ["LOAD"] * 4 + ["copy engine"] * 4 + ["LOAD"] * 2
    early = ["LOAD", "LOAD", "copy engine", "MMA", "MMA"]
    kinds = list(ring.BUGS)
    assert _ends(kinds[0], in_turn)[:2] == ("", 19)  # 40 turns, two a tile, MMA one behind
    assert _ends(kinds[1], in_turn) == ("", 0, ["blocked"] * 9)
    assert _ends(kinds[2], in_turn) == ("", ring.SLOTS, ["blocked"] * 9)
    assert _ends(kinds[3], eager)[0] == "overwritten"
    assert _ends(kinds[3], ["LOAD"] * 7)[2][-2:] == ["fault"] * 2  # two arrivals in one phase
    assert _ends(kinds[4], early)[0] == "incomplete"
    chosen = random.Random(3)
    for _ in range(50):  # without a bug no order of steps does harm
        hazard, _, results = _ends(kinds[0], [chosen.choice(ring.ROLES) for _ in range(200)])
        assert hazard == "" and "fault" not in results


@needs_node
@pytest.mark.parametrize("bug", ring.BUGS)
def test_who_is_next_in_turn(bug):
    """Without a bug a tile takes six steps; what the arrow keys do is what the table shows."""
    settings = json.loads(json.dumps(ring.settings()))
    ours = [role for role, _ in ring.in_turn(24, bug)]
    assert script("mbarrier", [["turns", settings, bug, 24]]) == [ours]
    tile = ["LOAD"] * 2 + ["copy engine"] * 2 + ["MMA"] * 2
    steps = {"no bug": 4, "LOAD starts with parity 0": 0, "MMA does not arrive at empty": 2}
    if bug in steps:
        assert ours == tile * steps[bug]


def test_ring_refuses_an_unknown_bug():
    with pytest.raises(ValueError, match="bug 'x' is unknown; allowed: no bug"):
        ring.Ring("x")


# ---- swizzles ------------------------------------------------------------------------------


def test_a_swizzle_keeps_rows_and_spreads_columns():
    for row in range(8):
        places = [swizzle.address(row, chunk, True) for chunk in range(8)]
        assert sorted(places) == [swizzle.address(row, chunk, False) for chunk in range(8)]
        assert swizzle.passes(places) == 1
        assert [place % 128 // 16 for place in places] == [chunk ^ row for chunk in range(8)]
    for chunk in range(8):
        assert swizzle.passes(swizzle.column(chunk, False)) == 8
        assert swizzle.passes(swizzle.column(chunk, True)) == 1


@pytest.mark.parametrize("k_step", range(4))
def test_adding_32_bytes_to_the_start_is_the_next_16_elements_of_k(k_step):
    """What the page says of descriptors: the hardware adds first and XORs the result."""
    moved = replace(swizzle.K_TILE, start=swizzle.K_TILE.start + 32 * k_step)
    for row in range(16):
        for k in (0, 7, 8, 15):
            at = layouts.element_address(moved, row, k, False)
            chunk, byte = divmod(2 * (16 * k_step + k), swizzle.CHUNK)
            assert at == swizzle.K_TILE.start + swizzle.address(row, chunk, True) + byte


def test_the_drawn_fields_are_those_that_are_decoded():
    word = layouts.encode_smem_descriptor(swizzle.K_TILE)
    bits, found = swizzle.fields(word, swizzle.SMEM_FIELDS), layouts.decode_smem_descriptor(word, 0)
    assert bits["start / 16"] * 16 == found.start and bits["stride / 16"] * 16 == found.stride
    assert (bits["leading / 16"], bits["const"], bits["base"]) == (1, 1, 0)
    assert layouts.SWIZZLE_SPANS[bits["swizzle"]] == found.swizzle
    word = layouts.encode_instruction_descriptor(swizzle.PV)
    bits = swizzle.fields(word, swizzle.INSTRUCTION_FIELDS)
    assert bits == {"D": 1, "A": 1, "B": 1, "T": 0b10, "N / 8": 16, "M / 16": 8}


# ---- pairs ---------------------------------------------------------------------------------


def test_a_folded_result_lies_as_the_page_says():
    assert layouts.d_position(128, 128, 2, 64, 0) == (1, 0, 0)  # 64 rows for each CTA
    assert layouts.d_position(128, 128, 2, 5, 63) == (0, 5, 63)
    assert layouts.d_position(128, 128, 2, 5, 64) == (0, 64 + 5, 0)  # second half of the columns
