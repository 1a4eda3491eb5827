# SPDX-License-Identifier: Apache-2.0
"""Parts: the further kernels of a stage, to every tool what a stage is."""

import copy
import dataclasses
import json
import math
import pathlib
import types

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import (
    compile,
    contract,
    contract_gpu,
    derived,
    device_mutation,
    evidence,
    mutation,
    verification,
)
from flash_ladder.common.compile import CompileKey, compile_stage, fingerprint, sources
from flash_ladder.common.contract import Case
from flash_ladder.common.grid import Place, cta_tiles, grid
from flash_ladder.common.model import B200
from flash_ladder.common.ptx import ptx_hash
from flash_ladder.common.schema import EvidenceError, validate

from tests.gradient_kernels import NAME, make_stage
from tests.test_evidence import LOG, MUTATION, RUN

PARTS = ("preprocess", "postprocess")  # small, and without tensor memory


@pytest.fixture
def seven():
    return load(7)


@pytest.fixture
def backward():
    """A backward part, with two key tiles to a CTA."""
    part = make_stage().part(NAME)
    part.config.KEY_TILES = {64: 2, 128: 2}
    return part


# ---- a part is like a stage ----------------------------------------------------------------


def test_a_stage_names_its_parts(seven):
    assert set(PARTS) <= set(seven.parts) and load(6).parts == ()
    assert seven.part("") is seven
    assert seven.kernels == (seven, *(seven.part(name) for name in seven.parts))
    part = seven.part("preprocess")
    assert part is seven.part("preprocess")
    assert (part.number, part.name, part.tag) == (7, "preprocess", "07/preprocess")
    assert part.folder == seven.folder / "preprocess" and part.config.NAME == "preprocess"
    assert repr(part) == "<part 07/preprocess: preprocess>" and part.model is None


@pytest.mark.parametrize(
    ("number", "words"), [(7, "its parts are preprocess, "), (6, "it has no parts")]
)
def test_a_part_that_is_not_there(number, words):
    with pytest.raises(ValueError, match=f"stage {number:02d} has no part 'other'; {words}"):
        load(number).part("other")


def test_the_kind_names_the_function(dsl, seven):
    stage = make_stage()
    assert [source.kind for source in stage.kernels] == [
        "attention",
        "preprocess",
        "backward",
        "postprocess",
    ]
    for source in seven.kernels:
        assert compile.entry_function(source) is getattr(source.kernel, source.kind)
    assert stage.backwards == (stage.part(NAME),) and stage.backward(64) is stage.part(NAME)
    with pytest.raises(ValueError, match="a kernel is one of attention, preprocess, backward, pos"):
        compile.arguments("other", CompileKey(7, "sm_100a", "float16", 64))


def test_a_stage_that_differentiates_has_all_kernels():
    contract.check_parts(make_stage())
    contract.check_parts(load(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stage: stage.config.BACKWARD.pop(64), "needed are"),
        (
            lambda stage: stage.config.BACKWARD.update({64: "preprocess"}),
            "BACKWARD names {'preprocess'}",
        ),
        (lambda stage: vars(stage.config).update(BACKWARD={}), "BACKWARD has head dims"),
        (lambda stage: _limit(stage, head_dims=(128,)), f"{NAME} lacks a head dim"),
        (lambda stage: _limit(stage, dtypes=("float16",)), f"{NAME} lacks a dtype"),
        (lambda stage: _limit(stage, seqlen_multiple=256), f"{NAME}: lengths"),
        (lambda stage: vars(stage.part(NAME).config).update(ARCHS=()), "lacks an architecture"),
    ],
)
def test_a_missing_kernel_is_noticed(change, words):
    stage = make_stage()
    change(stage)
    with pytest.raises(AssertionError, match=words):
        contract.check_parts(stage)


def _limit(stage, **changes):
    config = stage.part(NAME).config
    config.ENVELOPE = dataclasses.replace(config.ENVELOPE, **changes)


# ---- compiling -----------------------------------------------------------------------------


def test_names_of_kernels(seven):
    key = CompileKey.of(seven.part("preprocess"), "sm_100a", "bfloat16", 128)
    assert key == CompileKey(7, "sm_100a", "bfloat16", 128, "preprocess")
    assert key.name == "07-preprocess-sm_100a-bfloat16-d128"
    assert CompileKey.of(seven, "sm_80", "float16", 64).name == "07-sm_80-float16-d64"


def test_sources_of_a_part(seven):
    found = sources(seven.part("preprocess"))
    own = {f"07/preprocess{name}" for name in ("", "/config", "/kernel")}
    assert set(found) == own | {"common/arith", "common/plan"}
    text = (seven.folder / "preprocess/kernel.py").read_bytes()
    assert found["07/preprocess/kernel"] == text
    marks = {
        fingerprint(source, CompileKey.of(source, "sm_100a", "float16", 64))
        for source in seven.kernels
    }
    assert len(marks) == len(seven.kernels)


def test_keys_of_a_stage_have_those_of_its_parts(seven):
    keys = contract.compile_keys(seven)
    for source in seven.kernels:
        mine = [key for key in keys if key.part == source.name]
        assert {key.arch for key in mine} == set(source.config.ARCHS)
        native = [(key.dtype, key.head_dim) for key in mine if key.arch == "sm_100a"]
        dims = source.config.ENVELOPE.head_dims
        assert native == [(t, d) for t in ("bfloat16", "float16") for d in dims]


@pytest.mark.parametrize("name", PARTS)
def test_bytes_are_moved_16_at_a_time(dsl, seven, name):
    ptx = compile_stage(seven.part(name), dtype="float16", head_dim=64).ptx
    lines = [line.split()[0] for line in ptx.splitlines() if ".global" in line]
    single = [word for word in lines if word in ("ld.global.b32", "st.global.b32")]
    wide = [word for word in lines if word.startswith(("ld.global.v", "st.global.v"))]
    assert len(single) == (4 if name == "preprocess" else 0)  # LSE and D of a row
    assert {word.partition("global.")[2] for word in wide} <= {"v4.b32", "v2.b64", "v4.f32"}
    assert set(lines) <= {*single, *wide, ".param"}


def test_a_part_is_packed_without_the_engine(dsl, seven, tmp_path):
    from flash_ladder.common.hopper.build import AssemblerMissing
    from flash_ladder.common.hopper.run import pack

    part = seven.part("postprocess")
    key = CompileKey.of(part, "sm_100a", "float16", 64)
    try:
        made = pack(part, key, tmp_path)
    except AssemblerMissing as missing:
        pytest.skip(str(missing))
    assert not made.uses_engine and made.ptx_sha256 == ptx_hash(
        compile_stage(part, dtype="float16", head_dim=64).ptx
    )


# ---- the command line ----------------------------------------------------------------------


def test_commands_take_a_part(dsl, ladder, tmp_path):
    code, out, _ = ladder("compile", "7", "--part", "postprocess", "--out", str(tmp_path))
    assert code == 0
    assert (tmp_path / "07-postprocess-sm_100a-bfloat16-d128.ptx").is_file()
    code, out, _ = ladder("facts", "7", "--part", "preprocess", "--json")
    assert code == 0 and json.loads(out)["kernel"] == "07-preprocess-sm_100a-bfloat16-d128"
    for command in ("facts", "compile", "model", "mutate"):
        code, _, complaint = ladder(command, "7", "--part", "other")
        assert code == 2 and "stage 07 has no part 'other'; its parts are" in complaint
    code, _, complaint = ladder("model", "7", "--part", "preprocess")
    assert code == 2 and "part 07/preprocess has no model" in complaint
    code, _, complaint = ladder("mutate", "7", "--part", "preprocess")
    assert code == 2 and "has no model: nothing to delete" in complaint


def test_pack_packs_every_part(ladder, seven, tmp_path, monkeypatch):
    from flash_ladder.common.hopper import run

    packed = []
    monkeypatch.setattr(run, "pack", lambda source, key, *_: packed.append((source.tag, key.name)))
    assert ladder("pack", "7", "--out", str(tmp_path), "--log")[0] == 0
    names = {f"{key.name}" for key in contract.compile_keys(seven) if key.arch == "sm_100a"}
    assert {name for _, name in packed} == names and len(packed) == 2 * len(names)
    assert {path.name for path in tmp_path.iterdir()} == names | {f"{n}-log" for n in names}
    assert {tag for tag, _ in packed} == {source.tag for source in seven.kernels}


# ---- who owns what -------------------------------------------------------------------------


def test_ctas_of_a_backward_own_keys(backward):
    problem = Case("gaussian", "bfloat16", 64, 128, 640, 2, 3).problem()
    assert cta_tiles(backward, 64) == (2, 128)
    found = grid(backward, problem)
    assert (found.blocks, found.ctas) == (3, 18)
    assert found.place(17) == Place(2, 2, 1, 256, ("k", "v", "dk", "dv"))
    assert found.place(4) == Place(1, 1, 0, 256, ("k", "v", "dk", "dv"))


def test_ctas_of_a_forward_own_queries():
    problem = Case("gaussian", "bfloat16", 64, 640, 128, 2, 3).problem()
    found = grid(load(6), problem)
    assert (found.blocks, found.ctas, found.place(4)) == (3, 18, Place(1, 1, 0, 256))
    assert Place(1, 1, 0, 256).divided == ("q", "out")
    assert grid(load(1), problem).ctas == 30


def test_mutants_of_a_backward_meet_queries_in_turn(backward):
    problems = mutation.stage_problems(backward, 64)
    sizes = {name: (row.q.shape[1], row.k.shape[1]) for name, row in problems.items()}
    stages = max(row.stages for row in backward.config.plan(64).barriers)
    many = 128 * (1 + mutation.WRAPS * stages)
    assert sizes == {
        "gaussian": (many, 256),
        "ascending_max": (many, 256),
        "odd key tile": (many - 128, 128),
        "least queries": (128, 256),
    }


def test_problems_of_a_forward_are_what_they_were():
    problems = mutation.stage_problems(load(6), 64)
    sizes = {name: (row.q.shape[1], row.k.shape[1]) for name, row in problems.items()}
    assert list(sizes) == ["gaussian", "ascending_max", "odd query tile", "least keys"]
    assert sizes["odd query tile"] == (128, sizes["gaussian"][1] - 128)
    assert sizes["least keys"] == (256, 128)


def test_logs_of_a_backward_see_a_grid_in_all_directions(backward, monkeypatch):
    problem = Case.problem
    monkeypatch.setattr(Case, "problem", lambda self, device: problem(self))
    make = mutation.stage_problems
    on_cpu = lambda source, head_dim, device, dtype: make(source, head_dim, "cpu", dtype)
    monkeypatch.setattr(mutation, "stage_problems", on_cpu)
    made = contract_gpu.log_problems(backward, "float16", 64)
    assert (made["grid"].q.shape, made["grid"].k.shape) == ((2, 384, 2, 64), (2, 384, 2, 64))
    assert grid(backward, made["grid"]).ctas == 8 and "ascending_max" in made


def test_a_model_of_a_backward_is_mutated_by_its_gradients(backward, monkeypatch):
    made = [torch.ones(1), torch.zeros(1), torch.ones(2)]
    run = types.SimpleNamespace(**dict(zip(("dq", "dk", "dv"), made)), findings=())
    backward.model = types.SimpleNamespace(run=lambda *_: run)
    subject = mutation.stage_subject(backward, 64)
    assert subject.name == f"stage 07/{NAME}, head dim 64"
    outputs, findings = subject.problems["least queries"]()
    assert outputs == made and findings == ()


def test_workers_know_the_part(seven, monkeypatch):
    work = lambda what, waiting, done: done.put(what)
    monkeypatch.setattr(device_mutation, "_work", work)
    found = device_mutation._outcomes(seven.part("preprocess"), 64, [1], 1)
    assert list(found) == [(7, "preprocess", 64)]


def test_a_derived_time_of_a_backward(backward, monkeypatch):
    """Its CTAs own keys and visit queries; five products."""
    forward = load(6)
    given = []

    def simulate_problem(problem, **options):
        given.append((problem.q.shape[1], problem.k.shape[1]))
        swapped = (problem.k, problem.q, problem.q)
        return forward.simulate(*swapped, **options)

    monkeypatch.setattr(backward, "simulate_problem", simulate_problem)
    sizes = derived.Sizes(seqlen=1024, heads=2, head_dim=64)
    report = derived.simulate(backward, B200, sizes)
    assert given == [(1024, 512), (2048, 512)]  # queries, keys
    assert report.simulated == (1024, 256)
    assert report.time.ctas == 8 and report.time.flop == 10 * 2 * 1024**2 * 64
    assert report.as_dict()["part"] == NAME
    assert "part" not in derived.simulate(forward, B200, sizes).as_dict()


# ---- pages ---------------------------------------------------------------------------------


def test_edges_of_a_part_are_listed_by_its_name(seven, tmp_path, monkeypatch):
    (tmp_path / "07" / NAME).mkdir(parents=True)
    (tmp_path / "07/README.md").write_text("**Ordered by A1\nalone**: `O0` before `S0`.\n")
    (tmp_path / "07" / NAME / "README.md").write_text(
        "**Ordered by A1 alone in `backward_torch`**: `dV` before `S`, `dK` before\n`dP` at head "
        "dim 64.\n"
    )
    monkeypatch.setattr(contract, "STAGES_FOLDER", tmp_path)
    part = make_stage().part(NAME)
    assert contract.listed_a1_edges(seven, 64) == {("O0", "S0")}
    assert contract.listed_a1_edges(part, 64) == {("dV", "S"), ("dK", "dP")}
    assert contract.listed_a1_edges(part, 128) == {("dV", "S")}
    assert contract.listed_a1_edges(seven.part("preprocess"), 64) == set()


def test_a_log_has_one_name_for_regions_of_the_same_columns():
    """At head dim 128 dQ takes all columns of dP, at 64 half of them."""
    part = load(7).part("backward_1cta")
    assert ("dK", "dQ") in contract.listed_a1_edges(part, 128)
    assert contract.logged_a1_edges(part, 128) == {("dV", "S"), ("dK", "dP")}
    assert contract.logged_a1_edges(part, 64) == {("dV", "S"), ("dK", "dQ"), ("dK", "dP")}
    assert contract.logged_a1_edges(load(6), 128) == contract.listed_a1_edges(load(6), 128)


# ---- evidence ------------------------------------------------------------------------------


def _row(kernel, **changes) -> dict:
    key = kernel.key
    return {
        **copy.deepcopy(RUN["kernels"][0]),
        "key": key.name,
        **({"part": key.part} if key.part else {}),
        "dtype": key.dtype,
        "head_dim": key.head_dim,
        "ptx_sha256": ptx_hash(kernel.ptx),
        **changes,
    }


@pytest.fixture(scope="module")
def recorded(dsl):
    """A native run of every kernel of stage 07, at one dtype and head dim."""
    built = [compile_stage(source, dtype="float16", head_dim=128) for source in load(7).kernels]
    rows = [_row(kernel) for kernel in built]
    return {**RUN, "target": "sm_100a", "dsl": compile.versions()["nvidia-cutlass-dsl"]} | {
        "kernels": rows
    }


def _stale(stage, run) -> list[str]:
    return evidence.stale(stage, {"schema": 1, "stage": 7, "runs": [run]})


def test_evidence_covers_every_part(seven, recorded):
    validate({"schema": 1, "stage": 7, "runs": [recorded]}, seven)
    assert _stale(seven, recorded) == []
    rows = [row for row in recorded["kernels"] if row.get("part") != "preprocess"]
    assert _stale(seven, {**recorded, "kernels": rows}) == [
        f"{RUN['date']}: no kernel of preprocess ran"
    ]
    rows = copy.deepcopy(recorded["kernels"])
    rows[1]["ptx_sha256"] = "1" * 64
    (reason,) = _stale(seven, {**recorded, "kernels": rows})
    assert reason.startswith("07-preprocess-sm_100a-float16-d128: the code that ran on Some H200")


def test_evidence_of_an_unknown_part_is_refused(seven, recorded):
    rows = copy.deepcopy(recorded["kernels"])
    rows[1]["part"] = "other"
    with pytest.raises(EvidenceError, match=r"07-preprocess-.* is of no part of the stage"):
        validate({"schema": 1, "stage": 7, "runs": [recorded | {"kernels": rows}]}, seven)


def test_each_part_with_tensor_memory_needs_logs_and_mutants(monkeypatch):
    stage = make_stage()
    rows = [
        {"key": "07-x", "head_dim": 64, "log": {**LOG, "a1_edges": [["O0", "S0"], ["O1", "S1"]]}},
        {"key": "07-y", "head_dim": 64, "part": NAME, "log": {**LOG, "a1_edges": []}},
        {"key": "07-z", "part": "preprocess"},
    ]
    mutants = [MUTATION | {"kernel": "07-x"}]
    run = {"mode": "rewritten", "kernels": rows, "mutation": mutants}
    (reason,) = evidence.unlogged(stage, run)
    assert reason == f"its kernel was not mutated (`flash-ladder mutate N --part {NAME} --device`)"
    mutants.append(MUTATION | {"kernel": "07-y"})
    assert evidence.unlogged(stage, run) == []
    rows[1]["log"]["a1_edges"] = [["dV", "S"]]
    assert "07-y: its A1 edges" in evidence.unlogged(stage, run)[0]


def test_rows_of_kernels_count_the_cases_that_launch_them():
    stage = make_stage()
    of = lambda name: [
        case.part
        for case in (Case("gaussian", "float16", 64, 128, 128, 1, 1, part) for part in ("", NAME))
        if verification._concerns(case, stage.part(name))
    ]
    assert of("") == [""] and of(NAME) == of("preprocess") == of("postprocess") == [NAME]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_wherever_its_stage_does(seven, name):
    part = seven.part(name)
    assert set(seven.config.ARCHS) <= set(part.config.ARCHS)
    assert seven.config.ENVELOPE.dtypes == part.config.ENVELOPE.dtypes
    assert seven.config.ENVELOPE.head_dims == part.config.ENVELOPE.head_dims


def test_workspaces_of_a_backward_are_what_its_page_says():
    """32 k tokens, 16 heads, head dim 128: 268 MB for the sum of dQ, 4 MB for statistics."""
    from flash_ladder.common import gradients

    q = torch.empty(1, 32768, 16, 128, dtype=torch.bfloat16, device="meta")
    made = gradients.Workspace.empty(gradients.Saved(q, q, q, q, q))
    size = lambda x: math.prod(x.shape) * x.element_size()
    assert (size(made.dq_accum), size(made.stats)) == (268435456, 4194304)
    assert pathlib.Path(gradients.__file__).read_text().count("268 MB and 4 MB") == 1
