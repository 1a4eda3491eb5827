# SPDX-License-Identifier: Apache-2.0
"""Derived times of masked problems: against every CTA of the model, and how they are shown."""

import json

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import cli, derived, inputs, timeline
from flash_ladder.common.model import B200
from typer.testing import CliRunner

ONE_SM = B200.with_changes({"sms": 1})
MASKS = {
    "causal": {"causal": True},
    "left": {"window": (300, 0)},
    "both": {"window": (200, 500)},
    "ahead": {"window": (-300, 700)},
    "right": {"window": (-1, 100)},
    "causal window": {"causal": True, "window": (700, 5)},
}


@pytest.mark.parametrize("seqlen", [1000, 2048])
@pytest.mark.parametrize("mask", MASKS)
def test_the_ctas_take_as_long_as_in_the_whole_problem(mask, seqlen):
    stage, sizes = load(8), derived.Sizes(seqlen, 1, 128, **MASKS[mask])
    found = derived.simulate(stage, ONE_SM, sizes).time
    shape = {"batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads": 1, "head_dim": 128}
    given = inputs.make("llm_like", **shape, dtype=torch.bfloat16)
    run = stage.simulate(given.q, given.k, given.v, machine=ONE_SM, **sizes.mask)
    assert found.ctas == run.ctas and found.flop == run.flop
    assert found.cycles == pytest.approx(sum(run.cta_cycles), rel=0.03)


def test_a_kind_of_cta_has_the_work_of_its_rows():
    """From row 512 on a causal CTA has 2 tiles with a mask; of the others 4 are kept."""
    sides = (derived.OPEN, 0)
    at = lambda start: derived._masked_cta((start, start + 256), 8192, sides, 128)
    assert at(512) == ((256, 768, derived.OPEN, 0), 0)
    assert at(768) == ((256, 768, derived.OPEN, 0), 2)
    assert at(7936) == ((256, 768, derived.OPEN, 0), 58)
    assert at(0) == ((256, 256, derived.OPEN, 0), 0)


def test_a_window_without_keys_has_no_time():
    sizes = derived.Sizes(512, 1, 128, window=(-60, 40))
    with pytest.raises(ValueError, match=r"no query sees a key with window \(-60, 40\)"):
        derived.simulate(load(8), B200, sizes)


def test_ctas_of_a_window_away_from_the_ends_are_of_one_kind():
    at = lambda start: derived._masked_cta((start, start + 256), 8192, (1024, 100), 128)
    assert at(2048) == at(4096) == at(6144)
    (rows, seen, before, after), left_out = at(4096)
    assert (rows, left_out) == (256, 2)
    position = seen - rows  # of the first row
    assert position - before == 0  # it sees the first key that is left
    assert position + 255 + after + 1 == seen  # and the last row the last one


def test_unequal_ctas_go_to_the_sm_that_is_free_first():
    machine = B200.with_changes({"sms": 2})
    found = timeline.scheduled(machine, [3.0, 1.0, 1.0, 4.0], 1, 8.0)
    assert found.cycles == 6 and found.ctas == 4 and found.balance == pytest.approx(9 / 12)
    with pytest.raises(ValueError, match="CTAs of unequal length are more than"):
        timeline.scheduled(machine, [1.0] * 8, timeline.MAX_CTAS, 1.0)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--causal",), "d64, causal: 4 CTAs"),
        (("--window", "128,0"), "d64, window 128,0: 4 CTAs"),
        (("--window", "-1,7", "--causal"), "d64, causal, window -1,7: 4 CTAs"),
    ],
)
def test_the_command_shows_the_mask(options, shown):
    sizes = ("model", "8", "--seqlen", "512", "--heads", "2", "--head-dim", "64")
    result = CliRunner().invoke(cli.app, [*sizes, *options])
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0 and shown in text and "with a mask each kind of CTA" in text
    found = json.loads(CliRunner().invoke(cli.app, [*sizes, *options, "--json"]).stdout)
    assert found["problem"]["causal"] == ("--causal" in options)
    assert found["derived"]["tflops"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("8", "--window", "3"), "--window takes LEFT,RIGHT, such as 1024,0"),
        (("8", "--window", "3,x"), "got '3,x'"),
        (("7", "--window", "3,4"), "stage 07 has no window (stage 08 brings it)"),
    ],
)
def test_a_bad_window_is_refused(arguments, words):
    result = CliRunner().invoke(cli.app, ["model", *arguments])
    assert result.exit_code != 0 and words in " ".join(result.output.split())
