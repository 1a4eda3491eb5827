# SPDX-License-Identifier: Apache-2.0
"""Mutation of compiled kernels: sites, verdicts, reasons, workers, command line. No GPU."""

import importlib
import json
import pathlib
import types
from dataclasses import replace

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import cli, contract_gpu, device_mutation, mutation, schema
from flash_ladder.common.device_mutation import (
    KINDS,
    Report,
    Site,
    Verdict,
    explanation,
    named_sites,
    sites,
    without,
)
from flash_ladder.common.device_worker import Bench, Outcome
from flash_ladder.common.hopper.log import FENCES, Kind
from flash_ladder.common.hopper.steps import steps
from flash_ladder.common.mutation import Unsound
from flash_ladder.common.ptx import ptx_hash
from typer.testing import CliRunner

from tests.recorded_logs import (
    HEAD_DIM,
    INDEX,
    KERNELS,
    event,
    log_of,
    made,
    names_of,
    plan_of,
    problem_of,
    ptx_of,
    without_line,
)
from tests.recorded_logs import named_sites as recorded_sites
from tests.test_evidence import RUN

WAIT = "mbarrier.try_wait.parity.shared.b64"
ARRIVE = "mbarrier.arrive.shared.b64"
LOADED = "tcgen05.wait::ld.sync.aligned"


def _stage(redundant=None, compiled=None):
    """What a verdict needs of a stage."""
    model = types.SimpleNamespace(REDUNDANT=redundant or {})
    if compiled is not None:
        model.REDUNDANT_COMPILED = compiled
    return types.SimpleNamespace(number=4, tag="04", model=model)


def _twin(role="MMA", verb="wait", barrier="s_full", function="mma", number=1):
    return mutation.Site(role, verb, barrier, "stages/04/model.py:1", function, number)


# ---- sites ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", KERNELS)
def test_every_wait_arrival_and_fence_of_a_stage_is_a_site(tag):
    ptx = ptx_of(tag)
    found, lines = sites(ptx), ptx.splitlines()
    assert [site.line for site in found] == sorted({site.line for site in found})
    for site in found:
        assert site.opcode in lines[site.line - 1] and not site.name and not site.twins
    wanted = ("mbarrier.try_wait", "mbarrier.arrive", "tcgen05.wait", "tcgen05.commit", "bar.sync")
    wanted += ("tcgen05.fence", "fence.", "cp.async.bulk.wait_group", "barrier.cluster")
    counted = [sum(word in line.split("//")[0] for line in lines) for word in wanted]
    counted[wanted.index("fence.")] = sum(line.strip().startswith("fence.") for line in lines)
    assert [sum(site.opcode.startswith(word) for site in found) for word in wanted] == counted
    assert len(found) == sum(counted)
    assert sum(site.is_wait for site in found) == counted[0]


def test_a_statement_is_taken_out_of_the_text():
    ptx = "a\nb\nc\n"
    assert without(ptx, 2) == "a\n\nc\n" and without(ptx, 3) == "a\nb\n\n"
    before = sites(ptx_of("04"))
    after = sites(without(ptx_of("04"), before[3].line))
    assert after == [*before[:3], *before[4:]]


# ---- reports -------------------------------------------------------------------------------

ROWS = (
    Verdict(Site(11, WAIT, "MMA wait s_full"), ("result", "log"), "outputs differ"),
    Verdict(Site(12, WAIT, "LOAD wait kv_empty"), ("log",), "a race"),
    Verdict(Site(13, WAIT, "MMA wait o_full"), (), "", "implied"),
    Verdict(Site(14, ARRIVE, "LOAD arrive q_full"), ("error",), "timeout"),
    Verdict(Site(15, LOADED, "SOFTMAX0 fence wait.ld"), ("lint",), "line 15: used"),
    Verdict(Site(16, ARRIVE), (), ""),
)
REPORT = Report("stage 04", ROWS, 12.34, ("REDUNDANT_COMPILED 'X' explains no survivor",))


def test_a_report_counts_what_noticed():
    assert REPORT.counts() == {
        "sites": 6,
        "result": 1,
        "error": 1,
        "log": 2,
        "lint": 1,
        "timing": 2,
        "log_only": 1,
        "redundant": 1,
        "unexplained": 1,
        "waits": 3,
        "waits_timing": 1,
        "waits_log": 2,
    }
    assert set(schema.MUTATION_FIELDS) < set(REPORT.counts()) and set(KINDS) < set(REPORT.counts())


def test_a_report_complains_of_survivors_and_wrong_reasons():
    assert REPORT.complaints == [
        f"{ARRIVE} (PTX line 16) survived",
        "REDUNDANT_COMPILED 'X' explains no survivor",
    ]
    assert Report("fine", ROWS[:5], 1.0).complaints == []


def test_a_report_in_words():
    labels = [row.label for row in ROWS]
    assert labels == ["result + log", "log", "redundant", "error", "lint", "SURVIVED"]
    first, second = REPORT.summary().splitlines()
    assert first == (
        "stage 04: 6 sites left out; noticed by results 1, by errors 1, by the log 2, by lint 1; "
        "by the log alone 1; redundant 1, unexplained 1; 12 s"
    )
    assert second.startswith("of 3 mbarrier waits timing shows 1, the log 2 ")


def test_a_report_as_json():
    found = json.loads(json.dumps(REPORT.as_dict()))
    assert (found["subject"], found["seconds"]) == ("stage 04", 12.3)
    assert found["counts"] == REPORT.counts() and found["complaints"] == REPORT.complaints
    assert found["verdicts"][0] == {
        "site": "MMA wait s_full",
        "line": 11,
        "opcode": WAIT,
        "verdict": "result + log",
        "detail": "outputs differ",
        "reason": "",
    }
    assert [row["verdict"] for row in found["verdicts"]] == [row.label for row in ROWS]
    assert found["verdicts"][5]["site"] == ARRIVE  # without a name


# ---- reasons -------------------------------------------------------------------------------


def test_the_reasons_of_twins_explain_a_site():
    stage = _stage({"MMA wait s_full": "first", "* fence_after in mma": "second"})
    one, two = _twin(), _twin(verb="fence_after", barrier="")
    site = lambda *twins: Site(5, WAIT, "MMA wait s_full", twins)
    assert explanation(stage, 128, site(one)) == "first"
    assert explanation(stage, 128, site(one, two, one)) == "first; second"
    assert explanation(stage, 128, site(one, _twin(barrier="o_full"))) == ""  # one twin is needed
    assert explanation(stage, 128, site()) == ""  # REDUNDANT is for sites of the model


def test_a_reason_may_hold_at_one_head_dim():
    stage = _stage({"MMA wait s_full": "always"})
    stage.model.REDUNDANT_AT = {64: {"MMA wait o_full": "at 64"}}
    both = _twin(), _twin(barrier="o_full")
    site = Site(5, WAIT, "MMA wait s_full", both)
    assert explanation(stage, 64, site) == "always; at 64" and not explanation(stage, 128, site)


def test_what_only_compiled_code_has_has_its_own_reasons():
    stage = _stage({"MMA wait s_full": "twin"}, {"EPILOGUE bulk_wait": "own", "MMA *": "any"})
    assert explanation(stage, 128, Site(5, WAIT, "EPILOGUE bulk_wait")) == "own"
    assert explanation(stage, 128, Site(5, WAIT, "LOAD wait kv_empty")) == ""
    needed = _twin(barrier="o_full")
    assert explanation(stage, 128, Site(5, WAIT, "MMA wait o_full", (needed,))) == "any"
    assert explanation(stage, 128, Site(5, WAIT, "MMA wait s_full", (_twin(),))) == "twin"


@pytest.mark.parametrize("tag", KERNELS)
def test_every_reason_of_a_stage_is_used(tag):
    compiled = getattr(KERNELS[tag].model, "REDUNDANT_COMPILED", {})
    reasons = {explanation(KERNELS[tag], HEAD_DIM, site) for site in recorded_sites(tag)}
    assert set(compiled.values()) <= reasons


# ---- verdicts ------------------------------------------------------------------------------


def test_lint_judges_what_execution_cannot_see():
    ptx = ptx_of("04")
    line = next(site.line for site in sites(ptx) if site.opcode == LOADED)
    site = Site(line, LOADED, "CORRECTION fence wait.ld")
    found = device_mutation._verdict(
        _stage({}, {"*": "no need"}), 128, site, Outcome(line, (), ""), ptx
    )
    assert found.by == ("lint",) and "tmem-load-use" in found.detail and not found.reason
    assert found.label == "lint" and not found.timing
    seen = Outcome(line, ("error", "log"), "a fault", False)
    found = device_mutation._verdict(_stage(), 128, site, seen, ptx)
    assert found.by == ("error", "log", "lint") and found.detail == "a fault" and found.timing


def test_what_nothing_notices_needs_a_reason():
    ptx = ptx_of("04")
    line = next(site.line for site in sites(ptx) if site.is_wait)
    site, nothing = Site(line, WAIT, "MMA wait o_staged0"), Outcome(line, (), "")
    verdict = lambda stage: device_mutation._verdict(stage, 128, site, nothing, ptx)
    assert verdict(_stage()).label == "SURVIVED"
    found = verdict(_stage({}, {"MMA wait o_staged?": "implied"}))
    assert (found.by, found.reason, found.label) == ((), "implied", "redundant")
    noticed = device_mutation._verdict(
        _stage({}, {"*": "no need"}), 128, site, Outcome(line, ("log",), "a race"), ptx
    )
    assert (noticed.by, noticed.reason) == (("log",), "")


@pytest.fixture
def mutated(monkeypatch):
    """The report on the first waits of stage 04, "wait 0" and so on; without a GPU.

    compiled: REDUNDANT_COMPILED of the stage; noticed: what did, for each wait.
    """

    def run(compiled, *noticed):
        ptx, stage = ptx_of("04"), load(4)
        waits = [site for site in sites(ptx) if site.is_wait]
        named = [
            Site(s.line, s.opcode, f"wait {at}") for at, (s, _) in enumerate(zip(waits, noticed))
        ]
        outcomes = [Outcome(site.line, by, "words") for site, by in zip(named, noticed)]
        monkeypatch.setattr(contract_gpu, "adversary_skip_reason", lambda stage: None)
        monkeypatch.setattr(device_mutation, "named_sites", lambda stage, head_dim: named)
        monkeypatch.setattr(device_mutation, "logged_ptx", lambda stage, head_dim: ptx)
        monkeypatch.setattr(device_mutation, "_outcomes", lambda *_: iter(outcomes[::-1]))
        monkeypatch.setattr(stage.model, "REDUNDANT_COMPILED", compiled)
        return device_mutation.mutate(stage)

    return run


def test_outcomes_that_come_in_another_order_go_to_their_sites(mutated):
    report = mutated({"wait 1": "implied"}, ("log",), (), ("result",))
    assert [row.site.name for row in report.verdicts] == ["wait 0", "wait 1", "wait 2"]
    assert [row.label for row in report.verdicts] == ["log", "redundant", "result"]
    assert report.complaints == [] and report.name == "stage 04, head dim 128, rewritten"


def test_a_reason_that_explains_nothing_is_wrong(mutated):
    reasons = {"wait 1": "implied", "wait 0": "caught", "wait 7": "no such site"}
    assert mutated(reasons, ("log",), ()).complaints == [
        "REDUNDANT_COMPILED 'wait 0' explains no survivor",
        "REDUNDANT_COMPILED 'wait 7' explains no survivor",
    ]
    (survived,) = mutated({}, ("log",), ()).complaints
    assert survived.startswith("wait 1 (PTX line ") and survived.endswith(") survived")


# ---- which is which ------------------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch):
    """The smallest problem of a stage "executed": the recorded log, or another that is given."""

    def prepare(tag: str, log=None):
        name = names_of(tag)[0]
        bench = types.SimpleNamespace(
            plan=plan_of(name),
            problems={"least keys": problem_of(name)},
            run=lambda problem, log: (None, [given]),
        )
        given = log or log_of(name)
        monkeypatch.setattr(device_mutation, "Bench", lambda *_: bench)
        monkeypatch.setattr(device_mutation, "logged_ptx", lambda *_: ptx_of(tag))
        return KERNELS[tag]

    return prepare


def test_sites_have_the_names_and_twins_of_what_reached_them(executed):
    found = named_sites(executed("04"), 128)
    by_line = {site.line: site for site in recorded_sites("04")}
    reached = {row.line for row in log_of("04-least").events}
    assert {site.line for site in found if site.name} == reached & set(by_line)
    assert all(not site.twins for site in found if not site.name)
    assert any(not site.name for site in found)  # needs more key tiles
    for site in found:
        assert set(site.twins) <= set(by_line[site.line].twins)
    commit = next(site for site in found if site.name == "MMA commit s_full0")
    assert {str(twin) for twin in commit.twins} == {"MMA commit s_full0"}
    start = next(site for site in found if "sync start" in site.name)
    assert len(start.twins) == len(plan_of("04-least").roles)


def test_an_unsound_kernel_is_not_mutated(executed):
    log = log_of("04-least")
    wait = next(s.line for s in steps(log, plan_of("04-least")) if s.op == "wait s_full0")
    with pytest.raises(Unsound, match=r"least keys: .* and nothing makes sure that mma S0 "):
        named_sites(executed("04", without_line(log, wait)), 128)
    made_known = FENCES.index("mbarrier_init")  # the model has no such fence
    events = [e for e in log.events if e.kind != Kind.FENCE or e.words[0] != made_known]
    with pytest.raises(Unsound, match=r"least keys: .* no fence\.mbarrier_init "):
        named_sites(executed("04", replace(log, events=tuple(events))), 128)
    fence = next(row.line for row in log.events if row.kind == Kind.FENCE and not row.words[0])
    with pytest.raises(
        Unsound, match=r"least keys: \w+(\.\d)?: the kernel and the model part here"
    ):
        named_sites(executed("04", without_line(log, fence)), 128)


# ---- workers -------------------------------------------------------------------------------


@pytest.fixture
def workers(monkeypatch):
    """Worker processes that run a function of fake_device_worker.py."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    fake = importlib.import_module("fake_device_worker")

    def start(name: str, lines, count: int = 2):
        monkeypatch.setattr(device_mutation, "serve", getattr(fake, name))
        return list(device_mutation._outcomes(load(4), 128, lines, count))

    return start


def test_every_line_is_answered_once(workers):
    found = workers("answers", [1, 2, 3, 4, 5])
    assert sorted(row.line for row in found) == [1, 2, 3, 4, 5]
    assert {row.detail.partition(" ")[2] for row in found} == {"4 '' 128"}
    assert len({row.detail.split()[0] for row in found}) <= 2
    assert workers("answers", []) == []


def test_a_process_that_a_fault_ended_is_replaced(workers):
    found = workers("answers", [1, 10, 2, 20, 3], count=1)
    assert [row.line for row in found] == [1, 10, 2, 20, 3]
    one, also_one, two, also_two, three = (row.detail.split()[0] for row in found)
    assert one == also_one and two == also_two and len({one, two, three}) == 3


def test_a_process_that_ends_without_an_answer_is_an_error(workers):
    with pytest.raises(RuntimeError, match=r"a worker ended without an answer \(EOFError\)"):
        workers("dies", [1, 2, 3])


RIGHT = (torch.tensor([1.0, float("nan")]), torch.tensor([2.0]))


def _bench(run):
    """A bench whose launches are `run(problem, skip, seed, log)`."""
    bench = object.__new__(Bench)
    bench.plan, bench.problems, bench.right = None, {"one": "one"}, {"one": RIGHT}

    def launch(problem, skip=0, seed=0, log=False):
        return run(seed), [made(log_events)] if log else []

    log_events = [event(Kind.EXIT, warp=0)]
    bench.run = launch
    return bench


def test_a_mutant_that_nothing_notices():
    assert _bench(lambda seed: RIGHT).attempt(7) == Outcome(7, (), "")


def test_outputs_are_compared_bit_for_bit():
    other = (RIGHT[0], torch.tensor([2.0]) + 2**-22)
    found = _bench(lambda seed: other if seed == 3 else RIGHT).attempt(7)
    assert found == Outcome(7, ("result",), "one: the outputs differ (adversary 3)")
    found = _bench(lambda seed: other).attempt(7)
    assert found.detail == "one: the outputs differ (no delays)"


def test_a_fault_ends_the_process():
    def run(seed):
        if seed == 2:
            raise RuntimeError("WAIT_TIMEOUT: of MMA\nmore")
        return RIGHT

    assert _bench(run).attempt(7) == Outcome(7, ("error",), "WAIT_TIMEOUT: of MMA", alive=False)


def test_memory_that_was_written_beside_the_outputs_is_a_result():
    def run(seed):
        raise AssertionError("q was written")

    assert _bench(run).attempt(7) == Outcome(7, ("result",), "q was written")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event(Kind.ALLOC, 0, 32, 0)], "did not free 32 columns"),
        ([event(Kind.WAIT, 1024, 0)], "is initialised"),
    ],
)
def test_a_log_that_shows_it(events, words):
    bench = _bench(lambda seed: RIGHT)
    bench.run = lambda problem, skip=0, seed=0, log=False: (RIGHT, [made(events)] if log else [])
    found = bench.attempt(7)
    assert found.by == ("log",) and words in found.detail and found.alive


# ---- command line --------------------------------------------------------------------------


def _ladder(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["mutate", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, complaint = _ladder("4", "--device")
    assert code == 1 and not out
    assert "cannot mutate the kernel of stage 04: " in complaint and "GPU" in complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "--fast"), "--fast is for the model; leave it out with --device"),
        (("--out", "evidence.json"), "--out records what --device found; give both"),
    ],
)
def test_options_that_do_not_go_together(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, complaint = _ladder("4", *arguments)
    assert code == 2 and not out and words in complaint
    assert not list(tmp_path.iterdir())


def test_survivors_are_listed_and_make_it_fail(monkeypatch):
    monkeypatch.setattr(device_mutation, "mutate", lambda *_: REPORT)
    code, out, complaint = _ladder("4", "--device")
    assert code == 1 and "SURVIVED" in out and f"{ARRIVE} (PTX line 16) survived" in complaint
    assert max(map(len, out.splitlines()[:-2])) <= 80
    assert " ".join(out.split()).endswith(" ".join(REPORT.summary().split()))


def test_the_report_as_json(monkeypatch):
    fine = Report("stage 04", ROWS[:5], 1.0)
    monkeypatch.setattr(device_mutation, "mutate", lambda *_: fine)
    code, out, complaint = _ladder("4", "--device", "--json")
    assert code == 0 and not complaint and json.loads(out) == fine.as_dict()


def test_counts_go_to_the_evidence_of_the_kernel(monkeypatch, tmp_path):
    fine = Report("stage 04", ROWS[:5], 1.25)
    monkeypatch.setattr(device_mutation, "mutate", lambda *_: fine)
    digest = ptx_hash(ptx_of("04"))
    assert digest == INDEX[names_of("04")[0]]["ptx_sha256"]
    path = tmp_path / "evidence.json"
    code, _, complaint = _ladder("4", "--device", "--out", str(path))
    assert code != 0 and "no rewritten run of this kernel" in complaint and not path.exists()
    kernel = RUN["kernels"][0] | {"key": "04-sm_100a-bfloat16-d128", "ptx_sha256": digest}
    run = RUN | {"mode": "rewritten", "kernels": [kernel], "adversaries": [1, 2, 3, 4, 5]}
    run["rewriter_sha256"] = "0" * 64
    path.write_text(json.dumps({"schema": 1, "stage": 4, "runs": [run]}))
    code, *_ = _ladder("4", "--device", "--out", str(path))
    ((row,),) = [run["mutation"] for run in json.loads(path.read_text())["runs"]]
    assert code == 0 and row["counts"] == fine.counts() and row["seconds"] == 1.2
    assert row["kernel"] == "04-sm_100a-bfloat16-d128" and row["ptx_sha256"] == digest
    assert row["command"] == "flash-ladder mutate 4 --device --head-dim 128"
