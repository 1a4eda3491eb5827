# SPDX-License-Identifier: Apache-2.0
"""The paper's formulas: Tables 1 and 3 exactly, other tiles by hand, refusals, the plot."""

import json

import pytest
from flash_ladder.common import figures, roofline
from flash_ladder.common.model.machine import B200, H200, MACHINES, Machine
from flash_ladder.common.roofline import backward, forward

# ---- the paper's tables --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile_m", "cycles"), [(128, (1024, 768, 1024)), (256, (2048, 1536, 2048))]
)
def test_table_1(tile_m, cycles):
    found = forward(tile_m, 128, 128)
    assert (found.mma, found.smem, found.exp) == cycles
    assert found.smem_parts == {"MMA operands": cycles[1]}
    assert found.bound == ("mma", "exp") and found.tensor_ceiling == 1


def test_table_3_one_cta():
    found = backward(128, 128, 128)
    assert found.cycles == {"mma": 2560, "smem": 3328, "exp": 1024}
    assert list(found.smem_parts.values()) == [2048, 256, 1024]
    assert found.bound == ("smem",) and found.tensor_ceiling == 2560 / 3328


def test_table_3_pair():
    found = backward(128, 256, 128, pair=True)
    assert found.cycles == {"mma": 2560, "smem": 2688, "exp": 1024}
    assert found.smem_parts == {
        "MMA operands": 1536,
        "dS written": 256,
        "dS to the peer": 384,
        "dQ written and read": 512,
    }
    assert round(found.tensor_ceiling, 2) == 0.95


def test_defaults_are_the_tables_tiles():
    assert forward() == forward(128, 128, 128) and backward() == backward(128, 128, 128)
    assert backward(pair=True) == backward(128, 256, 128, pair=True)
    assert forward(pair=True) == forward(256, 128, 128, pair=True)


# ---- any tile ------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [128, 256, 512])
@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_equations_1_to_3(m, n, d):
    found = forward(m, n, d)
    assert found.mma == 4 * m * n * d / 8192
    assert found.smem == 3 * m * n * d / 8192
    assert found.exp == m * n / 16
    assert found.flop == 4 * m * n * d


def test_a_short_key_tile_reads_q_as_often():
    found = forward(128, 64, 128)  # Q again for 64 keys only: 128 x 128 + 64 x 128, then V
    assert found.smem == (128 * 128 + 64 * 128 + 64 * 128) * 2 / 128


@pytest.mark.parametrize("d", [16, 64, 128])
def test_equations_7_to_10(d):
    m = n = 128
    found = backward(m, n, d)
    assert found.mma == 10 * m * n * d / 8192
    assert found.smem == (4 * m * d + 3 * n * d + m * n) / 64 + m * n / 64 + m * d / 16
    assert found.exp == m * n / 16


def test_larger_backward_tiles_read_operands_again():
    assert backward(256, 128).smem == 2 * backward().smem
    wide = backward(head_dim=256)  # dS again for the second half of dQ's columns
    assert wide.smem_parts["MMA operands"] == 2 * backward().smem_parts["MMA operands"]


def test_a_forward_pair_stages_half_of_keys_and_values():
    found = forward(pair=True)
    q, half_k, half_v = 128 * 128, 64 * 128, 64 * 128
    assert found.smem == (q + half_k + half_v) * 2 / 128 == 512
    assert (found.mma, found.exp) == (1024, 1024)  # of each CTA


# ---- machines ------------------------------------------------------------------------------


def test_ceilings_come_from_the_machines_figures():
    found = forward()
    sm_hz = B200["clock"] * B200["sms"]
    assert found.ceilings["mma"] == pytest.approx(8192 * sm_hz / 1e12)
    assert found.tflops == min(found.ceilings.values()) == found.ceilings["exp"]
    assert forward(head_dim=64).tensor_ceiling == 0.5  # exponentials take twice the products


def test_twice_the_exponentials_change_only_them():
    fast = B200.with_changes({"mufu": 32})
    assert forward(head_dim=64, machine=fast).cycles == {"mma": 512, "smem": 384, "exp": 512}
    assert forward(machine=fast).tflops == forward().tflops


@pytest.mark.parametrize("name", [name for name in MACHINES if "tmem" in MACHINES[name].figures])
def test_every_blackwell_machine_has_what_is_needed(name):
    for kernel in (forward, backward):
        assert kernel(machine=MACHINES[name]).tflops > 0


def test_machines_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="H200 has no tensor memory; use B200 or B300"):
        forward(machine=H200)
    bare = Machine("bare", {"tmem": B200.figures["tmem"]})
    with pytest.raises(ValueError, match="needs the figure 'smem', which bare does not have"):
        backward(machine=bare)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: forward(0), "tile_m must be a positive multiple of 16; got 0"),
        (lambda: forward(128, -16), "tile_n must be a positive multiple of 16; got -16"),
        (lambda: forward(64), "tile_m must be a multiple of 128, since the rows of the MMAs"),
        (lambda: forward(128, pair=True), "a pair's tile_m must be a multiple of 256"),
        (lambda: forward(head_dim=100), "head_dim must be a positive multiple of 16; got 100"),
        (lambda: forward(head_dim=272), "head_dim must be at most 256; got 272"),
        (lambda: backward(128, 64), "tile_n must be a multiple of 128, since the MMAs' rows"),
        (lambda: backward(64), "tile_m must be a multiple of 128, since the rows of dQ"),
        (
            lambda: backward(256, 128, pair=True),
            r"a pair's tile_n must be a multiple of 256, .* keys \(M in Table 3\); got 128",
        ),
    ],
)
def test_impossible_tiles_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "sizes", [{"tile_m": 128.0}, {"head_dim": "128"}, {"tile_n": True}, {"pair": 1}]
)
def test_wrong_types_are_refused(sizes):
    with pytest.raises(TypeError, match=next(iter(sizes))):
        forward(**sizes)


def test_the_dict_is_json():
    found = json.loads(json.dumps(backward(pair=True).as_dict()))
    assert found["kernel"] == "backward, 2-CTA" and found["derived"]["bound"] == ["smem"]
    assert found["tile"] == {"m": 128, "n": 256, "head_dim": 128}
    assert any("register bandwidth" in line for line in found["left_out"])


# ---- the plot ------------------------------------------------------------------------------


def test_the_plot_has_three_ceilings_in_four_panels():
    rows = roofline.plot_rows()
    assert len(rows) == 4 * 3 * len(roofline.HEAD_DIMS)
    assert {row["ceiling"] for row in rows} == set(roofline.RESOURCES.values())
    for row in rows:
        assert row["attainable"] <= row["TFLOP/s"]
    at = [row for row in rows if row["kernel"] == "backward, 1-CTA" and row["head dim"] == 128]
    assert [row["cycles a tile"] for row in at] == [2560, 3328, 1024]


def test_the_marked_tile_is_in_its_panel():
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    spec = roofline.chart(B200, backward(pair=True)).to_dict()
    titles = [panel["title"] for panel in spec["concat"] if len(panel["layer"]) == 3]
    assert titles == ["backward, 2-CTA"] and len(spec["concat"]) == 4
    assert "Derived, not measured" in spec["title"]["subtitle"]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_committed_figures_are_up_to_date(name):
    path = figures.FOLDER / name
    text = path.read_text(encoding="utf-8")
    assert f"data sha256 {figures.data_hash(name)}" in text, f"{name} is stale: make figures"
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    if f"drawn by {figures.drawn_by()}<" in text:
        for _ in range(2):  # what was drawn before makes no difference
            assert figures.figure(name) == text, f"{name} is stale: make figures"


def test_figures_belong_to_a_checkout(tmp_path):
    with pytest.raises(SystemExit, match="run this in a checkout"):
        figures.main(tmp_path / "absent")
