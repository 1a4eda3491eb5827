# SPDX-License-Identifier: Apache-2.0
"""Evidence: its schema, how runs replace each other, and when a run says nothing any more."""

import copy
import datetime
import json
import pathlib
import re

import pytest
from flash_ladder import load
from flash_ladder.common import contract, contract_gpu, schema
from flash_ladder.common.compile import compile_stage, versions
from flash_ladder.common.evidence import add, add_mutation, stale, unlogged
from flash_ladder.common.grid import cluster_size
from flash_ladder.common.ptx import ptx_hash
from flash_ladder.common.schema import EvidenceError, validate

ROOT = pathlib.Path(__file__).parent.parent
RUN = {
    "date": "2026-01-31",
    "gpu": "Some H200",
    "driver": "580.1",
    "torch": "2.13.0",
    "dsl": "4.8.1",
    "target": "sm_90a",
    "mode": "native",
    "command": "flash-ladder verify 1",
    "kernels": [
        {
            "key": "01-sm_90a-float16-d64",
            "dtype": "float16",
            "head_dim": 64,
            "ptx_sha256": "0" * 64,
            "registers": -1,
            "cases": 20,
            "failed": 0,
            "worst": {"used": 0.5},
        }
    ],
    "tests": {"passed": 20, "failed": 0, "skipped": 0},
    "notes": "",
}
LOG = {
    "clean": True,
    "conforms": True,
    "ctas": 2,
    "events": 1000,
    "bytes": 40000,
    "acts": 700,
    "a1_edges": [["O0", "S0"], ["O1", "S1"]],  # as stage 04's page lists them
}
MUTATION = {
    "kernel": "01-sm_90a-float16-d64",
    "ptx_sha256": "0" * 64,
    "date": "2026-02-01",
    "command": "flash-ladder mutate 1 --device",
    "counts": dict.fromkeys(schema.MUTATION_FIELDS, 0) | {"sites": 9, "log": 9},
    "seconds": 60.5,
}
STALE = """
import json, sys, conftest
from flash_ladder import load
from flash_ladder.common import contract, contract_gpu, evidence
print(json.dumps(evidence.stale(load(1), json.loads({recorded!r}))))
"""


def _run(kernel=None, **changes) -> dict:
    """RUN with fields changed; `kernel` changes its only kernel."""
    run = copy.deepcopy(RUN)
    run["kernels"][0] |= kernel or {}
    rewriter = {"rewriter_sha256": "2" * 64} if changes.get("mode") == "rewritten" else {}
    return run | rewriter | changes


def _evidence(*runs: dict) -> dict:
    return {"schema": 1, "stage": 1, "runs": list(runs)}


# ---- schema --------------------------------------------------------------------------------


def test_evidence_that_follows_the_schema_passes(stage):
    validate(_evidence(RUN), stage)
    validate(_evidence(), stage)
    validate(_evidence(_run(kernel={"entry": "kernel_name"}, mode="rewritten"), RUN), stage)


@pytest.mark.parametrize("field", schema.RUN_FIELDS)
def test_every_field_of_a_run_is_needed(stage, field):
    run = _run()
    del run[field]
    with pytest.raises(EvidenceError, match=f"run 1: {field} must be a .*; got None"):
        validate(_evidence(RUN, run), stage)


@pytest.mark.parametrize("field", schema.KERNEL_FIELDS)
def test_every_field_of_a_kernel_is_needed(stage, field):
    run = _run()
    del run["kernels"][0][field]
    with pytest.raises(EvidenceError, match=f"run 0, kernel .*: {field} must be a .*; got None"):
        validate(_evidence(run), stage)


BAD = {
    "no object": ([], "evidence must be an object; got a list"),
    "schema": ({**_evidence(RUN), "schema": 2}, "expected schema 1 and stage 1"),
    "another stage": ({**_evidence(RUN), "stage": 2}, "expected schema 1 and stage 1"),
    "no runs": ({"schema": 1, "stage": 1}, "evidence: runs must be a list; got None"),
    "run is no object": (_evidence("native"), "run 0 must be an object; got a str"),
    "kernel is no object": (_evidence(_run(kernels=[1])), "run 0, kernel 0 must be an object; got"),
    "mode": (_evidence(_run(mode="guessed")), "run 0: mode 'guessed' is not one of"),
    "no kernels": (_evidence(_run(kernels=[])), "run 0 names no kernel"),
    "tests": (_evidence(_run(tests={"passed": 1})), "run 0, tests: failed must be a int; got None"),
    "type": (_evidence(_run(driver=580.1)), "run 0: driver must be a str; got 580.1"),
    "kernel type": (
        _evidence(_run(kernel={"head_dim": "64"})),
        "run 0, kernel 01-sm_90a-float16-d64: head_dim must be a int; got '64'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_evidence_that_breaks_the_schema_is_refused(stage, name):
    made, words = BAD[name]
    with pytest.raises(EvidenceError, match=words):
        validate(made, stage)


def test_a_stage_that_the_readme_calls_executed_has_evidence():
    """The contract skips a stage without evidence; this keeps evidence from going unnoticed."""
    readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d\d) .*\| ([^|]*) \|$", readme, re.M)
    executed = {int(tag) for tag, state in rows if "executed on an H200" in state}
    assert executed == {int(tag) for tag, _ in rows if load(int(tag)).evidence["runs"]}
    assert executed


def test_the_evidence_of_every_stage_follows_the_schema(stage):
    if stage.evidence["runs"]:
        validate(stage.evidence, stage)


def test_rows_of_logs_and_mutations_follow_the_schema(stage):
    validate(_evidence(_run(kernel={"log": LOG}, mutation=[MUTATION])), stage)
    validate(_evidence(_run(kernel={"log": {"clean": False, "why": "a race"}})), stage)
    validate(_evidence(_run(mutation=[])), stage)


@pytest.mark.parametrize("field", [f for f in schema.LOG_FIELDS if f != "clean"])
def test_every_field_of_a_clean_log_is_needed(stage, field):
    log = {name: value for name, value in LOG.items() if name != field}
    with pytest.raises(EvidenceError, match=f"run 0, log of 01-.*: {field} must be a .*; got None"):
        validate(_evidence(_run(kernel={"log": log})), stage)
    validate(_evidence(_run(kernel={"log": {**log, "clean": False}})), stage)


@pytest.mark.parametrize("field", ["kernel", "date", "counts"])
def test_every_field_of_a_mutation_is_needed(stage, field):
    row = {name: value for name, value in MUTATION.items() if name != field}
    with pytest.raises(EvidenceError, match=f"run 0, mutation: {field} must be a .*; got None"):
        validate(_evidence(_run(mutation=[row])), stage)


@pytest.mark.parametrize("field", schema.MUTATION_FIELDS)
def test_every_count_of_a_mutation_is_needed(stage, field):
    counts = {name: value for name, value in MUTATION["counts"].items() if name != field}
    with pytest.raises(EvidenceError, match=f"run 0, mutation: {field} must be a int; got None"):
        validate(_evidence(_run(mutation=[{**MUTATION, "counts": counts}])), stage)


def test_a_mutation_must_be_an_object(stage):
    with pytest.raises(EvidenceError, match="run 0, mutation must be an object; got a str"):
        validate(_evidence(_run(mutation=["all of them"])), stage)


# ---- adding runs ---------------------------------------------------------------------------


def test_a_run_replaces_one_of_the_same_gpu_target_and_mode(stage, tmp_path):
    path = tmp_path / "evidence.json"
    assert add(path, stage, RUN) == _evidence(RUN)
    later = _run(date="2026-02-01", driver="590.0")
    assert add(path, stage, later) == _evidence(later)
    others = [_run(gpu="Another"), _run(target="sm_100a"), _run(mode="rewritten")]
    for other in others:
        add(path, stage, other)
    assert add(path, stage, RUN)["runs"] == [*others, RUN]
    assert json.loads(path.read_text()) == _evidence(*others, RUN)
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_run(mode="guessed"), "mode 'guessed'"),
        ({k: v for k, v in RUN.items() if k != "gpu"}, "gpu must be a str; got None"),
    ],
)
def test_a_bad_run_is_not_written(stage, tmp_path, run, words):
    path = tmp_path / "evidence.json"
    with pytest.raises(EvidenceError, match=words):
        add(path, stage, run)
    assert not path.exists()
    add(path, stage, RUN)
    before = path.read_bytes()
    with pytest.raises(EvidenceError, match=words):
        add(path, stage, run)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1, "stage": 2, "runs": []}'])
def test_a_file_that_is_no_evidence_of_the_stage_is_left_alone(stage, tmp_path, text):
    path = tmp_path / "evidence.json"
    path.write_text(text)
    with pytest.raises(EvidenceError, match=r"evidence\.json: "):
        add(path, stage, RUN)
    assert path.read_text() == text


# ---- adding mutations ----------------------------------------------------------------------


def _file(tmp_path, *runs: dict) -> pathlib.Path:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(_evidence(*runs)))
    return path


def test_a_mutation_goes_to_the_newest_rewritten_run_of_its_ptx(stage, tmp_path):
    rewritten = _run(mode="rewritten")
    other = _run(kernel={"ptx_sha256": "1" * 64}, mode="rewritten")
    path = _file(tmp_path, rewritten, _run(mode="rewritten", gpu="newest H200"), other, RUN)
    assert add_mutation(path, stage, MUTATION) is None
    runs = json.loads(path.read_text())["runs"]
    assert [run.get("mutation") for run in runs] == [None, [MUTATION], None, None]
    assert [{k: v for k, v in run.items() if k != "mutation"} for run in runs] == [
        rewritten,
        _run(mode="rewritten", gpu="newest H200"),
        other,
        RUN,
    ]
    assert path.read_text().endswith("}\n")


def test_a_mutation_replaces_one_of_the_same_kernel(stage, tmp_path):
    path = _file(tmp_path, _run(mode="rewritten"))
    later = {**MUTATION, "date": "2026-02-02"}
    for row in (MUTATION, later):
        add_mutation(path, stage, row)
    assert json.loads(path.read_text())["runs"][0]["mutation"] == [later]


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "another"},
        {"ptx_sha256": "1" * 64},
        {"counts": {**MUTATION["counts"], "sites": 0}},
        {"counts": {**MUTATION["counts"], "redundant": -1}},
        {"counts": {**MUTATION["counts"], "redundant": 1}},  # 9 noticed of 9
        {"counts": {**MUTATION["counts"], "log": True}},
    ],
)
def test_a_mutation_that_cannot_be_is_refused(stage, changes):
    with pytest.raises(EvidenceError, match="run 0, mutation"):
        validate(_evidence(_run(mutation=[{**MUTATION, **changes}])), stage)


@pytest.mark.parametrize("log", [None, [1], {**LOG, "acts": 0}, {**LOG, "ctas": True}])
def test_a_log_that_cannot_be_is_refused(stage, log):
    with pytest.raises(EvidenceError, match="run 0, log of 01-"):
        validate(_evidence(_run(kernel={"log": log})), stage)


def test_mutations_are_a_list(stage):
    for wrong in (None, 3):
        with pytest.raises(EvidenceError, match="mutation must be a list"):
            validate(_evidence(_run(mutation=wrong)), stage)


@pytest.mark.parametrize(
    "run",
    [RUN, _run(mode="rewritten", kernel={"ptx_sha256": "1" * 64})],
    ids=["native", "other code"],
)
def test_a_mutation_of_what_never_ran_is_refused(stage, tmp_path, run):
    path = _file(tmp_path, run)
    before = path.read_bytes()
    with pytest.raises(EvidenceError, match="no rewritten run of this kernel; run `verify` first"):
        add_mutation(path, stage, MUTATION)
    assert path.read_bytes() == before
    with pytest.raises(EvidenceError, match="run `verify` first"):
        add_mutation(tmp_path / "none.json", stage, MUTATION)
    assert not (tmp_path / "none.json").exists()


def test_a_mutation_without_a_count_is_not_written(stage, tmp_path):
    path = _file(tmp_path, _run(mode="rewritten"))
    before = path.read_bytes()
    with pytest.raises(EvidenceError, match="run 0, mutation: sites must be a int; got None"):
        add_mutation(path, stage, {**MUTATION, "counts": {}})
    assert path.read_bytes() == before


# ---- what a rewritten run must have --------------------------------------------------------


def _logged(kernel=None, **changes) -> dict:
    """A rewritten run with all that belongs to it; `kernel` changes its log."""
    made = {"mode": "rewritten", "mutation": [MUTATION], **changes}
    return _run(kernel={"log": {**LOG, **(kernel or {})}}, **made)


def test_a_rewritten_run_of_a_stage_with_tensor_memory_has_logs_and_mutants(stage):
    assert unlogged(load(4), _logged()) == []
    bare = _run(mode="rewritten")
    assert unlogged(load(4), bare) == [
        "01-sm_90a-float16-d64 has no clean log that conforms to the model",
        "its kernel was not mutated (`flash-ladder mutate N --device`)",
    ]
    assert unlogged(stage, bare) == unlogged(load(4), _run()) == []  # no tensor memory; native


@pytest.mark.parametrize("field", ["clean", "conforms"])
def test_a_log_must_be_clean_and_conform(field):
    (reason,) = unlogged(load(4), _logged({field: False}))
    assert reason == "01-sm_90a-float16-d64 has no clean log that conforms to the model"


def test_every_kernel_has_its_log():
    run = _logged()
    run["kernels"] += [{**run["kernels"][0], "key": name, "log": {}} for name in ("a", "b")]
    assert [reason.partition(" ")[0] for reason in unlogged(load(4), run)] == ["a", "b"]


def test_mutants_that_survive_unexplained_are_no_evidence():
    counts = {**MUTATION["counts"], "unexplained": 3}
    run = _logged(mutation=[MUTATION, {**MUTATION, "kernel": "other", "counts": counts}])
    assert unlogged(load(4), run) == ["3 mutants of other survived unexplained"]


# ---- staleness -----------------------------------------------------------------------------


@pytest.fixture
def recorded(dsl, stage):
    """A run of today's code: what `verify` would have written."""
    kernel = compile_stage(stage, dtype="float16", head_dim=64)
    row = {"key": kernel.key.name, "ptx_sha256": ptx_hash(kernel.ptx)}
    today = datetime.date.today().isoformat()
    installed = versions()["nvidia-cutlass-dsl"]
    return _run(kernel=row, date=today, target="sm_100a", mode="rewritten", dsl=installed)


def test_evidence_of_todays_code_holds(stage, recorded):
    assert stale(stage, _evidence(recorded)) == []
    assert stale(stage, _evidence()) == []


def test_another_hash_is_stale(stage, recorded):
    recorded["kernels"][0]["ptx_sha256"] = "0" * 64
    (reason,) = stale(stage, _evidence(recorded))
    assert reason == (
        f"01-sm_100a-float16-d64: the code that ran on Some H200 on {recorded['date']} is not "
        "today's; run `flash-ladder verify 1` on such a GPU"
    )


def test_failed_cases_are_no_evidence(stage, recorded):
    recorded["kernels"][0]["failed"] = recorded["tests"]["failed"] = 2
    assert stale(stage, _evidence(recorded)) == [
        "01-sm_100a-float16-d64: 2 cases failed on Some H200"
    ]


def test_failed_checks_are_no_evidence(stage, recorded):
    recorded["tests"]["failed"] = 1
    assert stale(stage, _evidence(recorded)) == [
        f"{recorded['date']}: 1 checks failed on Some H200"
    ]


def test_another_dsl_is_stale(stage, recorded):
    recorded["dsl"] = "4.7.0"
    installed = versions()["nvidia-cutlass-dsl"]
    assert stale(stage, _evidence(recorded)) == [
        f"{recorded['date']}: ran with DSL 4.7.0, installed is {installed}"
    ]


def test_every_run_and_kernel_is_looked_at(stage, recorded):
    other = copy.deepcopy(recorded)
    other["kernels"] += [{**other["kernels"][0], "ptx_sha256": "1" * 64}] * 2
    assert len(stale(stage, _evidence(recorded, other, other))) == 4


def test_a_changed_line_of_kernel_code_makes_evidence_stale(recorded, copy_sources, run_python):
    folder = copy_sources("changed")
    path = folder / "stages/01/softmax.py"
    line = "minus_max = -row_max * scale_log2"
    assert path.read_text().count(line) == 1
    path.write_text(path.read_text().replace(line, "minus_max = row_max * -scale_log2 - 1.0"))
    code = STALE.format(recorded=json.dumps(_evidence(recorded)))
    (reason,) = json.loads(run_python(code, folder))
    assert "01-sm_100a-float16-d64: the code that ran on Some H200" in reason


def test_a_rewritten_run_without_logs_is_stale(dsl, recorded):
    stage, kernel = load(2), compile_stage(load(2), dtype="float16", head_dim=64)
    recorded["kernels"][0] |= {"key": kernel.key.name, "ptx_sha256": ptx_hash(kernel.ptx)}
    assert stale(stage, {"runs": [recorded]}) == [
        f"{recorded['date']}: {kernel.key.name} has no clean log that conforms to the model",
        f"{recorded['date']}: its kernel was not mutated (`flash-ladder mutate N --device`)",
    ]
    mutated = MUTATION | {"kernel": kernel.key.name}
    recorded["kernels"][0]["log"], recorded["mutation"] = {**LOG, "a1_edges": []}, [mutated]
    assert stale(stage, {"runs": [recorded]}) == []
    recorded["kernels"][0]["log"] = LOG
    (reason,) = stale(stage, {"runs": [recorded]})
    assert reason.endswith("its A1 edges are not those that the page lists")


REWRITTEN = {  # of each stage with tensor memory, the run of its sm_100a code
    number: run
    for number in range(2, 9)
    for run in load(number).evidence["runs"]
    if run["mode"] == "rewritten"
}


def _kernel(row: dict) -> str:
    """As "07/backward_1cta", and its head dim where that is not 128."""
    tag = row["kernel"].partition("-sm_")[0].replace("-", "/")
    head_dim = int(row["kernel"].rpartition("-d")[2])
    return tag if head_dim == 128 else f"{tag}, d {head_dim}"


MUTATIONS = {_kernel(row): row for run in REWRITTEN.values() for row in run["mutation"]}


def test_the_kernels_with_tensor_memory_were_mutated():
    forwards = [f"{number:02d}" for number in REWRITTEN]
    parts = [f"{tag}/{part}" for tag in ("07", "08") for part in ("backward_1cta", "backward_2cta")]
    assert sorted(MUTATIONS) == sorted([*forwards, *parts, "07/backward_1cta, d 64"])


@pytest.mark.parametrize("tag", MUTATIONS)
def test_the_page_of_the_log_shows_the_counts_of_the_evidence(tag):
    text = (ROOT / "docs" / "executed-log.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {tag} \|(.+)\|$", text, re.M)
    counts = MUTATIONS[tag]["counts"]
    unseen = counts["sites"] - counts["timing"] - counts["redundant"] - counts["unexplained"]
    shown = [counts[name] for name in ("sites", "timing", "log", "lint")]
    shown += [unseen, counts["redundant"], counts["unexplained"]]
    assert [int(cell) for cell in row.split("|")] == shown


FAMILIES = {
    "wait": "waits at mbarriers",
    "arrival": "arrivals, commits",
    "barrier": "barriers of threads",
    "fence": "fences, `wait::ld`, `wait::st`, bulk waits",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_of_the_log_shows_what_is_left_out(family):
    text = (ROOT / "docs" / "executed-log.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(FAMILIES[family])} \|(.+)\|$", text, re.M)
    counts = [row["by_family"][family] for row in MUTATIONS.values()]
    names = ("sites", "timing", "log", "lint", "redundant")
    assert [int(cell) for cell in row.split("|")] == [
        sum(row[name] for row in counts) for name in names
    ]


def test_the_page_of_hopper_shows_what_ran():
    text = (ROOT / "docs" / "hopper.md").read_text(encoding="utf-8")
    ctas = {1: 0, 2: 0}  # in clusters of so many, which have one log
    for number, run in REWRITTEN.items():
        for kernel in (row for row in run["kernels"] if "log" in row):
            size = cluster_size(load(number).part(kernel.get("part", "")))
            ctas[size] += size * kernel["log"]["ctas"]
    assert (
        f"with the log: {ctas[1] + ctas[2]} CTAs" in text and f"{ctas[2]} of them in pairs" in text
    )
    sites = sum(row["counts"]["sites"] for row in MUTATIONS.values())
    assert f"| {sites} sites, none unexplained (M) |" in text
    passed = {number: run["tests"]["passed"] for number, run in REWRITTEN.items()}
    assert passed == {**dict.fromkeys(range(2, 7), 60), 7: 144, 8: 282}
    assert "| 60 passed each, " in text
    assert "| 144 passed (M) |" in text and "| 282 passed (M) |" in text


def test_the_page_of_masks_says_what_the_tests_are():
    run, stage = REWRITTEN[8], load(8)
    text = " ".join((ROOT / "stages" / "08" / "README.md").read_text(encoding="utf-8").split())
    logs = [kernel["log"] for kernel in run["kernels"] if "log" in kernel]
    numbers = ["", *"one two three four five six seven eight nine ten".split()]
    cases, checks = len(contract.gpu_cases(stage)), len(contract_gpu.checks(stage))
    parts = ("", "backward_1cta", "backward_2cta")
    random = sum(len(contract.random_cases(stage.part(part))) for part in parts)
    assert run["tests"]["passed"] == cases + checks + len(run["adversaries"]) + len(logs)
    for words in (
        f"The {run['tests']['passed']} tests are {cases} cases",
        f"{checks} checks (with them {random} random masks and lengths)",
        f"{numbers[len(run['adversaries'])]} [adversaries][adversary], and "
        f"{numbers[len(logs)]} kernels",
        f"{sum(row['ctas'] for row in logs)} CTAs and pairs",
        f"{sum(row['acts'] for row in logs):,} steps".replace(",", " "),
    ):
        assert words in text


@pytest.mark.parametrize(
    "change, words",
    [({"gpu": "NVIDIA B200"}, "does not run on NVIDIA B200"), ({"registers": 64}, "64 registers")],
)
def test_evidence_that_cannot_be_is_refused(change, words):
    stage = load(6)
    told = copy.deepcopy(stage.evidence)
    validate(told, stage)
    (run,) = told["runs"]
    (run if "gpu" in change else run["kernels"][0]).update(change)
    with pytest.raises(EvidenceError, match=words):
        validate(told, stage)


def _changed(number: int, **changes) -> dict:
    """The evidence of a stage with changes to the last run, of `worst`, `tests` in those."""
    told = copy.deepcopy(load(number).evidence)
    validate(told, load(number))
    run = told["runs"][-1]
    kernel = run["kernels"][0]
    for name, value in changes.items():
        if name in ("cases", "failed", "worst", "ptx_sha256"):
            kernel[name] = value
        else:
            run[name] = value
    return told


FUTURE = (datetime.date.today() + datetime.timedelta(days=2)).isoformat()
CANNOT_BE = {
    "no case": ({"cases": 0}, "0 failed of 0 cases cannot be"),
    "more failures than cases": ({"failed": 99}, "99 failed of 22 cases"),
    "negative": ({"failed": -1}, "-1 failed of 22 cases"),
    "failures that no test shows": ({"failed": 2}, "2 cases failed, of all tests 0"),
    "beyond the limit": ({"worst": {"used": 1.5}}, "worst.used is 1.5 of the limit, yet no case"),
    "no share": ({"worst": {}}, "worst.used must be a share of the limit; got None"),
    "NaN": ({"worst": {"used": float("nan")}}, "worst.used must be a share of the limit; got nan"),
    "bool": ({"worst": {"used": True}}, "worst.used must be a share of the limit; got True"),
    "PTX": ({"ptx_sha256": "0" * 63}, "ptx_sha256 must be 64 hexadecimal digits; got '000"),
    "rewriter": ({"rewriter_sha256": "Z" * 64}, "rewriter_sha256 must be 64 hexadecimal digits"),
    "no rewriter": ({"rewriter_sha256": None}, "rewriter_sha256 must be 64 .*; got None"),
    "future": ({"date": FUTURE}, f"date {FUTURE} has not come yet"),
    "no date": ({"date": "30.11.2026"}, "date must be YYYY-MM-DD; got '30.11.2026'"),
    "four seeds": ({"adversaries": [1, 2, 3, 4]}, r"must be \[1, 2, 3, 4, 5\]; got \[1, 2, 3, 4\]"),
    "no seeds": ({"adversaries": []}, r"adversaries must be \[1, 2, 3, 4, 5\]; got \[\]"),
    "tests": ({"tests": {"passed": -1, "failed": 0, "skipped": 0}}, "tests: passed is -1"),
}


@pytest.mark.parametrize("name", CANNOT_BE)
def test_values_that_cannot_be_are_refused(name):
    changes, words = CANNOT_BE[name]
    with pytest.raises(EvidenceError, match=f"run 0.*{words}"):
        validate(_changed(8, **changes), load(8))


def test_a_run_with_failures_may_exceed_a_limit():
    tests = {"passed": 9, "failed": 1, "skipped": 0}
    validate(_changed(8, worst={"used": 1.5}, failed=1, tests=tests), load(8))


def test_only_what_is_rewritten_and_has_tensor_memory_has_adversaries(stage):
    for run in (RUN, _run(mode="rewritten")):
        validate(_evidence({**run, "adversaries": []}), stage)
        with pytest.raises(EvidenceError, match=r"adversaries must be \[\]; got \[1\]"):
            validate(_evidence({**run, "adversaries": [1]}), stage)
    with pytest.raises(EvidenceError, match="a native run has no rewriter_sha256"):
        validate(_evidence(_run(rewriter_sha256="0" * 64)), stage)


def test_the_date_of_a_mutation_has_come(stage):
    with pytest.raises(EvidenceError, match=r"run 0, mutation: date .* has not come yet"):
        validate(_evidence(_run(mutation=[{**MUTATION, "date": FUTURE}])), stage)
