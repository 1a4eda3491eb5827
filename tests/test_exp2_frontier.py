# SPDX-License-Identifier: Apache-2.0
"""Degree and share against compiled cost: committed data, page, frontier. Runs: host, compile."""

import pytest
from flash_ladder import load
from flash_ladder.common import contract, exp2_frontier

POINTS = exp2_frontier.results()


def find(head_dim, degree, emulated):
    key = (head_dim, degree, emulated)
    return next(p for p in POINTS if (p["head_dim"], p["degree"], p["emulated"]) == key)


def test_every_point_is_there():
    found = [(p["degree"], p["emulated"] // 8, p["head_dim"]) for p in POINTS]
    assert found == exp2_frontier.points()


def test_the_page_shows_the_data():
    page = (exp2_frontier.RESULTS.parent.parent / "exp2.md").read_text(encoding="utf-8")
    assert exp2_frontier.table(POINTS) in page, "python -m flash_ladder.common.exp2_frontier"


def test_what_the_page_says_of_the_frontier():
    pairs = lambda machine, d: {
        (p["degree"] if p["emulated"] else 0, p["emulated"])
        for p in exp2_frontier.frontier(POINTS, machine, d)
    }
    assert pairs("B200", 128) == {(0, 0), (4, 16), (5, 48)}
    assert find(128, 3, 24)["live"] - find(128, 5, 48)["live"] == 1  # ptxas decides
    assert (3, 48) in pairs("B200", 64)
    assert pairs("B300", 128) == pairs("B300", 64) == {(0, 0)}
    quadratic = [p for p in POINTS if p["degree"] == 2 and p["emulated"]]
    assert min(map(exp2_frontier.error, quadratic)) > exp2_frontier.TOLERANCE


def test_b300_halves_the_mufu_alone():
    point = find(64, 2, 0)
    assert exp2_frontier.floor_cycles(point, "B200") == point["cycles"]["mufu"] == 1032
    assert exp2_frontier.floor_cycles(point, "B300") == 516


def test_spills_and_errors_are_kept_off_the_frontier():
    good, spilled, wrong = (dict(find(64, 3, 48)) for _ in range(3))
    spilled |= {"spills": 1, "live": 1}
    wrong |= {"degree": 2, "live": 1}
    assert exp2_frontier.frontier([good, spilled, wrong], "B200", 64) == [good]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_configuration_is_rewritten(head_dim):
    text = (load(exp2_frontier.STAGE).folder / "config.py").read_text(encoding="utf-8")
    space = {"__package__": f"flash_ladder.{exp2_frontier.STAGE:02d}", "__name__": "config"}
    exec(compile(exp2_frontier.config_with(text, 4, 5, head_dim), "config.py", "exec"), space)
    assert space["EMULATED"][head_dim] == (5, 5, 5, 5) != space["EMULATED"][192 - head_dim]
    assert len(space["POLYNOMIAL"]) == 5
    with pytest.raises(ValueError, match="has nothing like"):
        exp2_frontier.config_with("EMULATED = {}", 4, 5, head_dim)


def test_a_point_compiled_now_is_like_the_committed_one():
    """MUFU counts are the same with any compiler; what ptxas may change stays within 5 %."""
    reason = contract.compile_skip_reason()
    if reason:
        pytest.skip(reason)
    try:
        found, committed = exp2_frontier.compiled(3, 3, 128), find(128, 3, 24)
    except RuntimeError as error:
        if "MissingTool" not in str(error):
            raise
        pytest.skip("the disassembler is missing")
    assert found["cycles"]["mufu"] == committed["cycles"]["mufu"] == (129 - 24) * 8
    assert found["cycles"] == pytest.approx(committed["cycles"], rel=0.05)
    assert found["spills"] == 0 and found["live"] == pytest.approx(committed["live"], rel=0.1)


def test_it_is_refused_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(exp2_frontier, "RESULTS", tmp_path / "absent" / "data.json")
    with pytest.raises(SystemExit, match="run this in a checkout"):
        exp2_frontier.main()
