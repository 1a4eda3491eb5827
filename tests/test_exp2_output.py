# SPDX-License-Identifier: Apache-2.0
"""Effect of emulated exponentials on outputs and gradients: committed data, page. Runs: host."""

import numpy as np
import pytest
import torch
from flash_ladder.common import exp2_output, minimax

ROWS = exp2_output.results()


def test_the_data_is_what_the_study_gives_now():
    found = exp2_output.study([2, 3])
    committed = [row for row in ROWS if row["degree"] in (2, 3)]
    assert len(found) == len(committed) == 48
    for new, old in zip(found, committed):
        assert {k: new[k] for k in ("inputs", "dtype", "degree", "emulated")} == {
            k: old[k] for k in ("inputs", "dtype", "degree", "emulated")
        }
        assert new["ratio"] == pytest.approx(old["ratio"], abs=2e-3)


def test_the_page_shows_the_data():
    page = (exp2_output.RESULTS.parent.parent / "exp2.md").read_text(encoding="utf-8")
    assert exp2_output.table(ROWS) in page, "python -m flash_ladder.common.exp2_output"


def test_what_the_page_says():
    assert exp2_output.worst(ROWS, "bf16", 3, 128)[0] <= 1.0025
    assert exp2_output.worst(ROWS, "bf16", 2, 24)[0] >= 1.03
    assert exp2_output.worst(ROWS, "fp16", 4, 128)[0] <= 1.001


def test_without_emulation_it_is_attention():
    of = exp2_output.case("gaussian", torch.bfloat16)
    found = exp2_output.outputs(of, minimax.coefficients(3), 0)
    for name in exp2_output.OUTPUTS:
        size = float(of.truth[name].square().mean().sqrt())
        error = exp2_output.errors(of, minimax.coefficients(3), 0)[name]
        assert found[name].shape == of.truth[name].shape
        assert error < 0.005 * size, name  # a few roundings to bf16 of 2**-9 each


@pytest.mark.parametrize("emulated", [0, 24, 64, 128])
def test_that_many_of_each_tile_are_emulated(emulated):
    columns = exp2_output.emulated_columns(emulated, 256)
    assert [columns[:128].sum(), columns[128:].sum()] == [emulated, emulated]
    assert np.array_equal(columns[::2], columns[1::2])  # pairs
    x = np.linspace(-20, -0.1, 256, dtype=np.float32)[None]
    linear, exact = minimax.coefficients(1), np.exp2(x.astype(np.float64)).astype(np.float32)
    differs = exp2_output.exponentials(x, linear, emulated) != exact
    assert not differs[0, ~columns].any()
    assert differs[0, columns].sum() >= 0.9 * columns.sum()  # the polynomial is exact at a few x


def test_it_is_refused_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(exp2_output, "RESULTS", tmp_path / "absent" / "data.json")
    with pytest.raises(SystemExit, match="run this in a checkout"):
        exp2_output.main()
