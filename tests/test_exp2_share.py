# SPDX-License-Identifier: Apache-2.0
"""The share of emulated exponentials on the SM model: committed data, page, optimum. Runs: host."""

import pytest
from flash_ladder.common import exp2_share
from flash_ladder.common.stage import Stage

POINTS = exp2_share.results()


def find(machine, head_dim, latency=exp2_share.TMA_LATENCY[0]):
    return [p for p in POINTS if exp2_share._key(p) == (machine, head_dim, latency)]


@pytest.mark.parametrize("machine", exp2_share.MACHINES)
def test_the_data_is_what_the_model_says_now(machine):
    committed = [p for p in POINTS if p["machine"] == machine]
    assert exp2_share.sweep([machine]) == committed, "python -m flash_ladder.common.exp2_share"


def test_the_page_shows_the_data():
    page = (exp2_share.RESULTS.parent.parent / "exp2.md").read_text(encoding="utf-8")
    assert exp2_share.table(POINTS) in page, "python -m flash_ladder.common.exp2_share"


def test_a_sweep_leaves_the_stage_as_it_was():
    before = dict(Stage(exp2_share.STAGE).config.EMULATED)
    point = exp2_share.cycles("B200", 64, 1400, (16, 16, 16, 16))
    assert point["emulated"] == 128
    assert Stage(exp2_share.STAGE).config.EMULATED == before


def test_the_page_shows_the_share_of_the_stage():
    """Rates of the fastest even share and of its own, cycles of its own and of a neighbour."""
    page = (exp2_share.RESULTS.parent.parent / "exp2.md").read_text(encoding="utf-8")
    emulated = Stage(exp2_share.STAGE).config.EMULATED
    own = {
        latency: exp2_share.cycles("B200", 128, latency, emulated[128])["tflops"]
        for latency in exp2_share.TMA_LATENCY
    }
    best = [exp2_share.best(find("B200", 128, latency))["tflops"] for latency in own]
    text = " ".join(page.split())
    assert f"gives {best[0]:.0f} TFLOP/s for stage 06 with the fastest even share" in text
    assert f"or {best[1]:.0f} with half the latency, and {own[1400]:.0f} and {own[700]:.0f}" in text
    tile = lambda pairs: exp2_share.cycles("B200", 64, 1400, pairs)["cycles"] / 2
    assert f"the SM model takes {tile(emulated[64]):.0f} cycles a tile" in text
    assert f"with `(5, 5, 5, 5)` it takes {tile((5, 5, 5, 5)):.0f}." in text


def test_what_the_page_says_of_the_optimum():
    published = range(8, 33)  # 6 to 25 % of 128
    assert len({point["cycles"] for point in find("B200", 128)}) == 1
    half = find("B200", 128, exp2_share.TMA_LATENCY[1])
    assert exp2_share.best(half)["emulated"] in published
    assert half[0]["cycles"] / exp2_share.best(half)["cycles"] == pytest.approx(1.01, abs=0.005)
    assert exp2_share.best(find("B300", 128))["fewest"] == 0
    assert exp2_share.best(find("B200", 64))["emulated"] not in published
    none, fastest = find("B200", 64)[0], exp2_share.best(find("B200", 64))
    assert none["cycles"] / fastest["cycles"] > 1.4


def test_best_prefers_the_fewest_and_gives_the_range():
    points = [{"emulated": n, "cycles": c} for n, c in ((0, 102), (8, 100), (16, 100), (24, 101))]
    found = exp2_share.best(points)
    assert (found["emulated"], found["fewest"], found["most"]) == (8, 8, 24)


def test_it_is_refused_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(exp2_share, "RESULTS", tmp_path / "absent" / "data.json")
    with pytest.raises(SystemExit, match="run this in a checkout"):
        exp2_share.main()
