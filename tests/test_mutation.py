# SPDX-License-Identifier: Apache-2.0
"""Deleting synchronisations: what is caught and by what, what survives and must be explained."""

import importlib.util
import json
import pathlib
from dataclasses import replace

import pytest
import torch
from flash_ladder.common import cli, contract, inputs
from flash_ladder.common.model import B200, Budget, Pair, Sm, TooManyEvents, observe
from flash_ladder.common.mutation import CATCHES, Subject, Unsound, mutate, stage_subject
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer
from flash_ladder.common.stage import Stage
from typer.testing import CliRunner

FILE = pathlib.Path(__file__).with_name("model_schedules.py")
SPEC = importlib.util.spec_from_file_location("model_schedules", FILE)
model_schedules = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(model_schedules)
TILES = 2 * model_schedules.RING + 1  # key tiles, so that the ring begins anew twice and more
REDUNDANT = {
    "SOFTMAX? wait stats_empty? in softmax #1": "S is full after p_ready, which counts CORRECTION",
    "SOFTMAX? fence_before in softmax #2": "S and P are done with before p_ready",
    "CORRECTION arrive stats_empty? in correction #2": "nobody waits for the last to be read",
    "CORRECTION fence_before in correction": "dealloc is synchronous; wait::ld came before",
}


def _subject(kind=model_schedules.Program, redundant=REDUNDANT, tiles=TILES) -> Subject:
    """The reference schedule, or a variant of it."""
    keys = tiles * model_schedules.KEYS

    def problem(generator):
        sizes = {"batch": 1, "heads": 1, "seqlen_q": 256, "seqlen_k": keys, "head_dim": 128}
        given = inputs.make(generator, dtype=torch.bfloat16, **sizes)
        q, k, v = (x[0, :, 0] for x in (given.q, given.k, given.v))

        def run():
            program = kind(q, k, v, given.softmax_scale or 128**-0.5)
            program.sm.run()
            return (program.out.tensor, program.lse), program.sm.findings()

        return run

    names = ("gaussian", "ascending_max")
    return Subject("reference", {name: problem(name) for name in names}, redundant)


@pytest.fixture(scope="module")
def reference():
    """All verdicts on the reference schedule."""
    return mutate(_subject())


def _labels(report) -> dict[str, set[str]]:
    """Verdicts by name of the site."""
    found: dict[str, set[str]] = {}
    for row in report.verdicts:
        found.setdefault(str(row.site), set()).add(row.label)
    return found


# ---- the reference schedule ----------------------------------------------------------------


def test_every_deletion_is_caught_or_explained(reference):
    assert reference.complaints == []
    assert len(reference.verdicts) == reference.total == 68
    explained = [row for row in reference.verdicts if not row.caught]
    assert sorted(str(row.site) for row in explained) == [
        "CORRECTION arrive stats_empty0",
        "CORRECTION arrive stats_empty1",
        "CORRECTION fence_before",
        "SOFTMAX0 fence_before",
        "SOFTMAX0 wait stats_empty0",
        "SOFTMAX1 fence_before",
        "SOFTMAX1 wait stats_empty1",
    ]


def test_verdicts_say_what_is_missing(reference):
    labels = _labels(reference)
    assert labels["MMA commit s_full0"] == {"deadlock"}
    assert labels["LOAD wait kv_empty"] == {"barrier fault"}
    assert labels["MMA sync tmem_done"] == {"model fault"}
    assert labels["LOAD expect_tx q_full"] == {"race"}
    assert labels["MMA wait kv_full"] == {"race"}
    assert labels["CORRECTION bulk_wait"] == {"leak"}
    assert labels["CORRECTION wait_st"] == labels["SOFTMAX1 wait_ld"] == {"race"}
    by_site = {(str(row.site), row.site.function): row for row in reference.verdicts}
    fence = by_site["MMA fence_after", "mma"]
    assert fence.short == "store P0 (SOFTMAX0), O0 (MMA): tcgen05.after"
    assert "tcgen05.fence::after_thread_sync is missing after MMA's wait" in fence.detail
    assert fence.problem == "gaussian" and fence.site.line.startswith("tests/model_schedules.py:")
    stuck = by_site["MMA commit s_full0", "mma_qk"]
    assert stuck.short == "SOFTMAX0 at s_full0, 4 more"
    assert "LOAD waits for kv_empty" in stuck.detail


def test_a_site_is_one_line_of_one_role_in_every_slot(reference):
    sites = [row.site for row in reference.verdicts]
    assert len(set(sites)) == len(sites)
    assert not any("[" in site.barrier for site in sites)
    assert sum(str(site) == "MMA wait kv_full" for site in sites) == 3
    assert sum(site.verb == "fence_before" for site in sites) == 6  # 3 lines, one for two roles


def test_a_redundant_wait_is_reported():
    class Planted(model_schedules.Program):
        def correction(self, role):
            yield from super().correction(role)
            yield from role.wait("o_full0", 0)  # as it did a little earlier

    report = mutate(_subject(Planted, tiles=3))
    assert report.total == 69
    (row,) = report.unexplained
    assert (str(row.site), row.site.function) == ("CORRECTION wait o_full0", "correction")
    assert row.label == "SURVIVED" and row.site.line.startswith("tests/test_mutation.py:")
    assert report.complaints == [
        f"CORRECTION wait o_full0 in correction #2 ({row.site.line}) survived"
    ]
    assert "1 SURVIVED" in report.summary()


# ---- reasons, fast mode --------------------------------------------------------------------


def test_reasons_are_matched_by_name_and_function(reference):
    why = {row.site.names[2]: row.reason for row in reference.verdicts if row.reason}
    assert why["SOFTMAX1 wait stats_empty1 in softmax #1"].startswith("S is full after p_ready")
    assert "SOFTMAX1 wait stats_empty1 in softmax #2" not in why  # that one is caught
    assert "CORRECTION fence_before in correction #1" in why
    assert "CORRECTION fence_before in rescale #1" not in why


def test_fast_mode_takes_a_third_always_the_same(reference):
    first, again = (mutate(_subject(tiles=tiles), fast=True) for tiles in (3, TILES))
    sites = [row.site for row in first.verdicts]
    assert sites == [row.site for row in again.verdicts] and len(sites) == 23
    assert first.total == 68 and first.complaints == []
    full = {row.site: row.label for row in reference.verdicts}
    assert all(full[row.site] == row.label for row in first.verdicts)


# ---- small programs ------------------------------------------------------------------------

PLAN = Plan(
    roles=(Role("GIVE", range(0, 1)), Role("TAKE", range(1, 2))),
    smem=(SmemBuffer("sA", 1024),),
    barriers=(
        Barrier("full", (Arrival("GIVE", "one"),), (Arrival("TAKE"),), "a tile"),
        Barrier("read", (Arrival("TAKE", "one"),), (Arrival("GIVE"),), "a tile was read"),
        Barrier(
            "all",
            (Arrival("GIVE"), Arrival("TAKE")),
            (Arrival("GIVE"), Arrival("TAKE")),
            "everyone",
            kind="named",
            number=1,
        ),
    ),
)


def _small(give, take, redundant=None, outputs=lambda sm: ()) -> Subject:
    def run():
        sm = Sm(B200, PLAN)
        sm.start("GIVE", give)
        sm.start("TAKE", take)
        sm.run()
        return outputs(sm), sm.findings()

    return Subject("small", {"only": run}, redundant or {})


def _give(role):
    yield from role.latency("think", 100)
    role.write(role.sm.buffer("sA", (4, 4), torch.float32)[0], torch.ones(4, 4))
    role.arrive("full")


def _take(role):
    yield from role.wait("full", 0)
    role.read(role.sm.buffer("sA", (4, 4), torch.float32)[0])


def test_all_that_catches_is_kept_in_a_fixed_order():
    report = mutate(_small(_give, _take))
    arrive, wait = sorted(report.verdicts, key=lambda row: row.site.verb)
    assert arrive.kinds == ("deadlock",) and wait.kinds == ("race", "unwritten")
    assert set(report.counts()) <= {*CATCHES, "redundant", "SURVIVED"}
    assert report.complaints == []


def test_other_numbers_are_caught():
    def take(role):
        yield from _take(role)
        yield from role.sync("all")
        role.sm.smem.buffers["now"] = role.env.now

    def give(role):
        yield from _give(role)
        yield from role.latency("think", 100)
        role.arrive("all")

    def ignored(sm):
        return (torch.tensor([sm.smem.buffers["now"]]),)

    report = mutate(_small(give, take, outputs=ignored))
    by_site = {str(row.site): row for row in report.verdicts}
    assert by_site["TAKE sync all"].kinds == ("leak", "numbers")
    assert by_site["GIVE arrive all"].kinds == ("deadlock",)


def test_numbers_alone_and_nan_that_stays():
    nan = torch.tensor([float("nan"), 1.0])
    times = lambda sm: (nan, torch.tensor([sm.env.now]))

    def wait_twice(role):
        yield from _take(role)
        yield from role.wait("full", 0)

    report = mutate(_small(_give, wait_twice, outputs=times))
    assert [str(row.site) for row in report.unexplained] == ["TAKE wait full"]

    def late(role):
        yield from role.latency("think", 200)
        yield from role.wait("full", 0)

    report = mutate(_small(_give, late, {"TAKE wait *": "it comes late"}, times))
    assert _labels(report)["TAKE wait full"] == {"redundant"}
    assert _labels(report)["GIVE arrive full"] == {"deadlock"}


def test_a_mutant_that_never_ends_is_stopped():
    def poll(role):
        while role.sm.barriers["full"].phase == 0:
            yield from role.latency("poll", 10)

    (row,) = mutate(_small(_give, poll)).verdicts
    assert row.kinds == ("endless",) and "still running after" in row.detail


def test_a_reason_that_explains_nothing_is_stale():
    report = mutate(_small(_give, _take, {"TAKE wait full": "caught, so it is not redundant"}))
    assert report.complaints == ["REDUNDANT 'TAKE wait full' explains no survivor"]
    (wrong,) = mutate(_small(_give, _take, {"TAKE wait emtpy": "no such site"})).complaints
    assert wrong == "REDUNDANT 'TAKE wait emtpy' explains no survivor"
    subject = _small(_give, _take, {"TAKE wait full": "fast mode cannot tell"})
    assert mutate(subject, fast=True).complaints == []


def test_a_reason_must_not_cover_what_is_caught():
    def late(role):
        yield from role.latency("think", 200)
        yield from role.wait("full", 0)
        yield from role.wait("full", 0)

    report = mutate(_small(_give, late, {"TAKE wait full in late #?": "either of the two"}))
    assert report.complaints == [] and _labels(report)["TAKE wait full"] == {"redundant"}
    assert sorted(row.site.number for row in report.verdicts if row.reason) == [1, 2]
    (wrong,) = mutate(_small(_give, late, {"* full": "all of them"})).complaints
    assert wrong.startswith("REDUNDANT '* full' also means GIVE arrive full in _give #1 (tests/")
    assert wrong.endswith("), which is caught")


def test_a_model_that_fails_unmutated_is_refused():
    def deaf(role):
        role.read(role.sm.buffer("sA", (4, 4), torch.float32)[0])
        yield from ()

    def patient(role):
        yield from role.wait("full", 0)
        yield from role.wait("full", 1)

    with pytest.raises(Unsound, match=r"small, only: unsound unmutated: .*never written"):
        mutate(_small(_give, deaf))
    with pytest.raises(Unsound, match=r"small, only: fails unmutated: .*TAKE waits for full"):
        mutate(_small(_give, patient))


def test_errors_of_the_program_are_not_verdicts():
    def fragile(role):
        yield from role.wait("full", 0)
        if role.env.now < 50:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        mutate(_small(_give, fragile))


def test_a_site_of_a_pair_is_deleted_in_both_ctas():
    plan = replace(
        PLAN,
        barriers=(
            Barrier("full", (Arrival("GIVE", "one"),), (Arrival("TAKE"),), "a tile"),
            Barrier("done", (Arrival("TAKE", "one", ctas=2),), (Arrival("GIVE"),), "both"),
        ),
    )

    def give(role):
        yield from _give(role)
        if role.sm.rank == 0:
            yield from role.wait("done", 0)

    def take(role):
        yield from _take(role)
        role.arrive("done", to=0)

    def run():
        pair = Pair(B200, plan)
        pair.start("GIVE", give)
        pair.start("TAKE", take)
        pair.run()
        return (torch.tensor([pair.env.now]),), pair.findings()

    report = mutate(Subject("pair", {"only": run}))
    assert _labels(report) == {
        "GIVE arrive full": {"deadlock"},
        "GIVE wait done": {"numbers"},
        "TAKE wait full": {"race"},
        "TAKE arrive done": {"deadlock"},
    }
    (row,) = [row for row in report.verdicts if str(row.site) == "TAKE arrive done"]
    assert "TAKE 2 to come" in row.detail


def test_a_budget_of_events_is_shared_and_kept():
    run, budget = _small(_give, _take).problems["only"], Budget(1000)
    with observe(budget=budget):
        run()
        once = budget.used
        run()
    assert 0 < once and budget.used == 2 * once
    with pytest.raises(TooManyEvents), observe(budget=Budget(once - 1)):
        run()


# ---- stages --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_stage_01_complete(stage, head_dim):
    report = contract.check_mutation(stage, fast=False, head_dim=head_dim)
    assert report.total == 2 and report.counts() == {"redundant": 2}
    assert list(stage_subject(stage, head_dim).problems) == [
        "gaussian",
        "ascending_max",
        "least keys",
        "slow port",
    ]


def test_the_contract_wants_reasons(stage, monkeypatch):
    monkeypatch.setattr(stage.model, "REDUNDANT", {"COMPUTE sync kv_full": "because"})
    with pytest.raises(AssertionError, match=r"kv_empty in compute #1 \(.*model.py:\d+\) survived"):
        contract.check_mutation(stage, fast=False)


def test_a_head_dim_that_the_stage_has_not(stage):
    with pytest.raises(ValueError, match="stage 01 has head dims 64, 128; got 96"):
        stage_subject(stage, 96)


# ---- command line --------------------------------------------------------------------------


def _ladder(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["mutate", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_table_fits_80_columns(monkeypatch, reference):
    monkeypatch.setattr("flash_ladder.common.mutation.mutate", lambda *_: reference)
    code, out, complaint = _ladder("1")
    assert code == 0 and not complaint
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert "reference: 68 of 68 sites deleted, 61 caught (" in " ".join(out.split())
    row = next(line for line in out.splitlines() if "LOAD expect_tx q_full" in line)
    assert row.split()[4] == "race"
    assert "Lines of tests/model_schedules.py." in out


@pytest.mark.parametrize(("number", "head_dim"), [(7, 64), (7, 128), (8, 64)])
def test_a_wait_of_one_cta_is_redundant_at_head_dim_64_alone(number, head_dim):
    """There the rings of Q and dO are equally long."""
    report = mutate(stage_subject(Stage(number).part("backward_1cta"), head_dim))
    assert not report.complaints
    (row,) = [row for row in report.verdicts if str(row.site) == "LOAD wait do_empty"]
    assert (row.label == "redundant") == (head_dim == 64)


def test_a_wait_that_is_met_by_luck_shows_under_other_timing():
    report = mutate(stage_subject(Stage(6), 64))
    assert not report.complaints
    assert "slow port" in {row.problem for row in report.verdicts if "stats_full1" in str(row.site)}


def test_survivors_make_it_fail_and_are_listed(monkeypatch):
    monkeypatch.setattr(Stage(1).model, "REDUNDANT", {})
    code, out, complaint = _ladder("1")
    assert code == 1 and "SURVIVED" in out
    for barrier in ("kv_full", "kv_empty"):
        assert f"COMPUTE sync {barrier} in compute #1 (stages/01/model.py:" in complaint


def test_json_and_fast():
    code, out, _ = _ladder("1", "--json", "--head-dim", "64")
    found = json.loads(out)
    assert code == 0 and found["subject"] == "stage 01, head dim 64"
    assert found["sites"] == found["deleted"] == 2 and found["complaints"] == []
    assert [row["verdict"] for row in found["verdicts"]] == ["redundant", "redundant"]
    assert "act as one" in found["verdicts"][0]["reason"]
    code, out, _ = _ladder("01", "--json", "--fast")
    found = json.loads(out)
    assert code == 0 and (found["sites"], found["deleted"]) == (2, 1)


@pytest.mark.parametrize("arguments", [("99",), ("one",), ("1", "--head-dim", "96"), ()])
def test_bad_arguments_are_refused(arguments):
    code, out, complaint = _ladder(*arguments)
    assert code == 2 and not out and complaint
