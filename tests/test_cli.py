# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and exit codes 0 (fine), 1 (failed), 2 (bad arguments)."""

import json
import sys
import types

import numpy as np
import pytest
import torch
from flash_ladder.common import cli, contract_gpu, facts
from flash_ladder.common.stage import Stage

SMALL = ("--heads", "1", "--seqlen", "128", "--head-dim", "64")
COMMANDS = (
    "doctor",
    "stages",
    "run",
    "facts",
    "compile",
    "diff",
    "pack",
    "verify",
    "sanitize",
    "model",
    "roofline",
    "mutate",
)


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def machine_code(dsl):
    """Skip where compiled code cannot be read."""
    from flash_ladder.common.sass import MissingTool, find_tool

    try:
        find_tool("nvdisasm")
    except MissingTool as missing:
        pytest.skip(str(missing))


def _refused(result: tuple[int, str, str], words: str) -> None:
    """Exit code 2 and one line, of any length, that says why."""
    code, out, complaint = result
    assert code == 2 and not out, (code, out, complaint)
    lines = [line for line in complaint.splitlines() if line.lower().startswith("error: ")]
    assert len(lines) == 1 and words in lines[0], complaint


# ---- help ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(ladder, command):
    code, out, _ = ladder(command, "--help")
    assert code == 0 and "Usage:" in out
    summary = getattr(cli, command, cli.compile_command).__doc__
    assert summary.split()[:5] == out.partition("\n\n")[2].split()[:5]


def test_help_lists_all_commands(ladder):
    code, out, _ = ladder("--help")
    assert code == 0
    listed = out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)


def test_no_command_shows_the_help(ladder):
    code, out, complaint = ladder()
    assert code == 2 and "Commands:" in out + complaint


# ---- doctor, stages ------------------------------------------------------------------------


def test_doctor_reports_each_ability(ladder, no_gpu):
    code, out, _ = ladder("doctor")
    assert code == 0
    for word in ("Python", "torch", "CuTe DSL", "nvdisasm", "GPU", "safetensors", "unlocks"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out


def test_stages_shows_the_whole_ladder(ladder):
    code, out, _ = ladder("stages")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line[1:3].isdigit()}
    assert list(rows) == [f"{number:02d}" for number in cli.ladder.STAGES]
    for number, name in cli.ladder.STAGES.items():
        assert name in rows[f"{number:02d}"]
        assert ("planned" in rows[f"{number:02d}"]) == (number not in cli.ladder.built())
    assert max(map(len, out.splitlines())) <= 80


def test_stages_shows_where_a_stage_ran(ladder, monkeypatch):
    run = {"gpu": "Some GPU", "mode": "native", "date": "2026-01-31"}
    monkeypatch.setattr(Stage, "evidence", {"runs": [run]})
    code, out, _ = ladder("stages")
    assert code == 0 and "Some GPU" in out and "not yet" not in out


# ---- run -----------------------------------------------------------------------------------


def test_run_prints_errors_and_a_verdict(ladder, no_gpu):
    code, out, _ = ladder("run", "1", *SMALL)
    assert code == 0
    for word in ("Stage 01", "SM model", "max_abs", "within tolerance", "no CUDA GPU here"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


def test_run_takes_the_last_stage_unless_told(ladder, no_gpu):
    code, out, _ = ladder("run", *SMALL)
    assert code == 0 and f"Stage {cli.ladder.built()[-1]:02d}" in out


def test_run_gives_json(ladder, no_gpu):
    code, out, _ = ladder("run", "01", *SMALL, "--json", "--dtype", "float16", "--seed", "3")
    found = json.loads(out)
    assert code == 0 and found["ok"] and found["stage"] == 1
    assert found["inputs"] == "llm_like" and "fp16" in found["shape"]
    comparisons = found["means"]["SM model"]["comparisons"]
    assert [row["name"] for row in comparisons] == ["out", "lse"]
    for row in comparisons:
        assert row["compared"] == {"out": 128 * 64, "lse": 128}[row["name"]]
        for metric in ("max_abs", "rms_abs", "row_rel"):
            values = row["metrics"][metric]
            assert 0 <= values["value"] <= values["limit"]
    derived = found["means"]["SM model"]["derived"]
    assert derived["machine"] == "B200" and derived["cycles_per_cta"] > 0
    assert found["not_done"]["kernel on a GPU"] == "no CUDA GPU here"


def test_the_seed_matters(ladder, no_gpu):
    outs = [json.loads(ladder("run", *SMALL, "--json", "--seed", seed)[1]) for seed in "011"]
    errors = [row["means"]["SM model"]["comparisons"][0]["metrics"]["rms_abs"] for row in outs]
    assert errors[0] != errors[1] == errors[2]


@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
def test_run_takes_tensors_from_a_file(ladder, no_gpu, tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    tensors = {name: torch.randn(1, 128, 2, 64) for name in "qkv"}
    if suffix == "npz":
        np.savez(path, **{name: x.numpy() for name, x in tensors.items()})
    elif suffix == "pt":
        torch.save({name: x.half() for name, x in tensors.items()}, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    code, out, _ = ladder("run", "--qkv", str(path), "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] and found["inputs"] == "mine"
    assert ("fp16" if suffix == "pt" else "bf16") in found["shape"]


def test_the_dtype_asked_for_is_that_of_the_file_or_made_of_it(ladder, no_gpu, tmp_path):
    path = tmp_path / "mixed.pt"
    tensors = {name: torch.randn(1, 128, 1, 64).half() for name in "qkv"}
    torch.save({**tensors, "k": tensors["k"].float()}, path)
    _refused(ladder("run", "--qkv", str(path)), "mixes dtypes")
    assert "d64 fp16" in ladder("run", "--qkv", str(path), "--dtype", "float16")[1]
    torch.save(tensors, path)
    assert "d64 fp16" in ladder("run", "--qkv", str(path))[1]
    assert "d64 bf16" in ladder("run", "--qkv", str(path), "--dtype", "bfloat16")[1]


def test_tensors_of_a_file_may_require_grad(ladder, no_gpu, tmp_path):
    path = tmp_path / "parameters.pt"
    torch.save({name: torch.randn(1, 128, 1, 64, requires_grad=True) for name in "qkv"}, path)
    assert ladder("run", "--qkv", str(path))[0] == 0


def test_a_wrong_result_is_exit_code_1(ladder, no_gpu, stage, monkeypatch):
    right = stage.model.online_softmax_step
    wrong = lambda s, row_max, row_sum, scale: right(s, row_max, row_sum, scale * 1.1)
    monkeypatch.setattr(stage.model, "online_softmax_step", wrong)
    code, out, complaint = ladder("run", "1", *SMALL)
    assert code == 1 and "NOT within tolerance" in out and not complaint
    code, out, complaint = ladder("run", "1", *SMALL, "--json")
    assert code == 1 and json.loads(out)["ok"] is False and not complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seqlen", "100"), "positive multiple of 128; got 100 (stage 08 lifts this)"),
        (("--seqlen", "0"), "greater than or equal to 1"),
        (("--seed", "-1"), "greater than or equal to 0"),
        (("--heads", "-1"), "greater than or equal to 1"),
        (("--head-dim", "96"), "head dim 64 or 128; got 96 (stage 10 lifts this)"),
        (("--head-dim", "4"), "head_dim is 4"),
        (("--dtype", "float32"), "'float32' is not one of 'bfloat16', 'float16'"),
        (("--generator", "nope"), "no generator 'nope'; allowed: gaussian, "),
        (("--generator", "excluded_nan", "--seqlen", "128"), "stage 08 brings them"),
        (("--qkv", "absent.npz"), "no file absent.npz"),
        (("--qkv", "absent.txt"), "allowed: .npz, .safetensors, .pt"),
    ],
)
def test_bad_options_of_run_are_refused(ladder, arguments, words):
    _refused(ladder("run", "1", *arguments), words)


@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"words\nand more\n" * 9])
def test_an_unreadable_file_is_refused(ladder, tmp_path, suffix, content):
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(content)
    _refused(ladder("run", "--qkv", str(path)), f"error: broken.{suffix} ")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"q": (1, 128, 2, 64), "k": (1, 128, 2, 64)}, "mine.npz lacks v"),
        ({name: (1, 100, 2, 64) for name in "qkv"}, "multiple of 128; got 100"),
        ({name: (128, 2, 64) for name in "qkv"}, "q has shape (128, 2, 64); expected (batch"),
        (
            {"q": (1, 128, 4, 64), "k": (1, 128, 2, 64), "v": (1, 128, 2, 64)},
            "as many key as query heads",
        ),
        ({"q": (1, 128, 2, 64), "k": (2, 128, 2, 64), "v": (2, 128, 2, 64)}, "do not fit together"),
    ],
)
def test_a_file_with_other_shapes_is_refused(ladder, tmp_path, shapes, words):
    path = tmp_path / "mine.npz"
    np.savez(path, **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    _refused(ladder("run", "7", "--qkv", str(path)), words)


# ---- model, roofline -----------------------------------------------------------------------

SHORT = ("--seqlen", "256", "--heads", "2")


def test_model_prints_engines_cycles_and_a_derived_time(ladder):
    code, out, _ = ladder("model", "1", *SHORT)
    assert code == 0
    for word in ("Stage 01 on the SM model, B200 figures", "busy (derived)", "smem", "Assumed:"):
        assert word in out
    assert "TFLOP/s (derived, not measured)" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out


def test_model_prints_large_numbers_without_an_exponent(ladder):
    sizes = "--seqlen", "1048576", "--heads", "16", "--head-dim", "64"
    shown = " ".join(ladder("model", "6", *sizes)[1].split())
    found = json.loads(ladder("model", "6", *sizes, "--json")[1])["derived"]
    assert min(found["seconds"] * 1e3, found["tflops"]) > 1000
    assert f", {found['seconds'] * 1e3:,.0f} ms, {found['tflops']:,.0f} TFLOP/s (derived" in shown


def test_model_says_who_uses_the_port_of_shared_memory(ladder):
    pair = ("model", "7", "--part", "backward_2cta", "--seqlen", "512", "--heads", "1")
    code, out, _ = ladder(*pair)
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and "MMA operands 1,536 0" in rows
    assert any(row.startswith("RELAY copy sdX 256 ") for row in rows)
    found = json.loads(ladder(*pair, "--json")[1])["derived"]["smem_port"]
    assert found["TMA loads"] == pytest.approx({"cycles_per_tile": 520, "cycles_once": 768})


def test_model_gives_json(ladder):
    code, out, _ = ladder("model", "1", *SHORT, "--json", "--set", "mufu=32", "--set", "sms=1")
    found = json.loads(out)
    assert code == 0 and found["settings"] == ["mufu=32", "sms=1"]
    assert found["derived"]["ctas"] == 4 and found["derived"]["balance"] == 1
    assert found["derived"]["cycles"] == pytest.approx(4 * found["derived"]["cycles_of_the_cta"])
    plain = json.loads(ladder("model", "1", *SHORT, "--json")[1])["derived"]
    assert found["derived"]["utilisation"]["mufu"] < 0.6 * plain["utilisation"]["mufu"]


def test_model_takes_long_problems(ladder):
    code, out, _ = ladder("model", "1", "--seqlen", "1048576", "--heads", "128", "--json")
    found = json.loads(out)
    assert code == 0 and found["derived"]["ctas"] == 128 * 8192
    assert found["simulated"] == {"rows": 128, "keys": 1024}


def test_model_writes_trace_and_pictures(ladder, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    files = {name: tmp_path / "new" / f"t.{name}" for name in ("trace", "svg", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    code, out, said = ladder("model", "1", *SHORT, "--machine", "H200", "--json", *options)
    assert code == 0 and json.loads(out)["machine"] == "H200"
    assert all(f"wrote {path}" in said for path in files.values())
    assert json.loads(files["trace"].read_text())["otherData"]["machine"] == "H200"
    assert files["svg"].read_text().startswith("<svg") and "vega" in files["html"].read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--causal",), "stage 01 has no causal mask (stage 08 brings it)"),
        (("--seqlen", "100"), "positive multiple of 128; got 100 (stage 08 lifts this)"),
        (("--seqlen", "1000"), "positive multiple of 128; got 1000 (stage 08 lifts this)"),
        (("--seqlen", "0"), "greater than or equal to 1"),
        (("--head-dim", "96"), "head dim 64 or 128; got 96 (stage 10 lifts this)"),
        (("--machine", "A100"), "no machine 'A100'; allowed: B200, "),
        (("--set", "mufu"), "--set takes NAME=VALUE, such as mufu=32; got 'mufu'"),
        (("--set", "mufu=many"), "--set mufu: 'many' is not a number"),
        (("--set", "mufu=0"), "mufu must be a positive number; got 0"),
        (("--set", "mufu=nan"), "mufu must be a positive number; got nan"),
        (("--set", "sms=1.5"), "--set sms: must be a whole number; got 1.5"),
        (("--set", "speed=1"), "B200 has no figure 'speed'"),
    ],
)
def test_bad_options_of_model_are_refused(ladder, arguments, words):
    _refused(ladder("model", "1", *arguments), words)


def test_a_missing_altair_is_exit_code_1(ladder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "altair", None)
    code, out, complaint = ladder("model", "1", "--html", str(tmp_path / "t.html"))
    assert code == 1 and not out and "needs altair: pip install" in complaint
    code, _, _ = ladder("model", "1", *SHORT, "--svg", str(tmp_path / "t.svg"))
    assert code == 0 and (tmp_path / "t.svg").is_file()


def test_roofline_prints_table_3(ladder):
    code, out, _ = ladder("roofline", "--backward", "--pair")
    assert code == 0
    for word in ("2,560", "2,688", "1,536", "384", "1,024", "(derived)", "nothing was measured"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out


def test_roofline_gives_json_and_pictures(ladder, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    files = [tmp_path / "new" / name for name in ("r.svg", "r.html")]
    options = ("--svg", str(files[0]), "--html", str(files[1]), "--json")
    code, out, _ = ladder("roofline", "--tile-m", "256", "--set", "mufu=32", *options)
    cycles = json.loads(out)["derived"]["cycles_per_cta"]
    assert code == 0 and cycles == {"mma": 2048, "smem": 1536, "exp": 1024}
    assert "not measured" in files[0].read_text() and "not measured" in files[1].read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tile-m", "0"), "tile_m must be a positive multiple of 16; got 0"),
        (("--tile-m", "64"), "tile_m must be a multiple of 128"),
        (("--head-dim", "100"), "head_dim must be a positive multiple of 16; got 100"),
        (("--tile-n", "x"), "Invalid value for '--tile-n'"),
        (("--machine", "H200"), "H200 has no tensor memory"),
        (("--machine", "x"), "no machine 'x'"),
    ],
)
def test_bad_options_of_roofline_are_refused(ladder, arguments, words):
    _refused(ladder("roofline", *arguments), words)


# ---- stage numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "facts", "compile", "verify", "diff", "model"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("0", "there is no stage 0; the ladder has 1 to 10"),
        ("11", "there is no stage 11"),
        ("10", "stage 10 (production) is planned and not in this version; built: 1"),
        ("abc", "'abc' is not a stage number, such as 1"),
        ("1.5", "'1.5' is not a stage number, such as 1"),
        ("", "'' is not a stage number, such as 1"),
    ],
)
def test_bad_stage_numbers_are_refused(ladder, command, number, words):
    arguments = (number, "1") if command == "diff" else (number,)
    _refused(ladder(command, *arguments), words)


@pytest.mark.parametrize("command", ["facts", "compile", "verify", "diff", "model"])
def test_a_missing_stage_number_is_refused(ladder, command):
    _refused(ladder(command), "Missing argument")


# ---- facts, compile ------------------------------------------------------------------------


def test_facts_shows_declared_beside_found(ladder, machine_code, stage):
    code, out, _ = ladder("facts", "1")
    assert code == 0 and "01-sm_100a-bfloat16-d128" in out
    rows = {words[0]: words for line in out.splitlines() if (words := line.split())}
    assert rows["ex2"][1:4] == ["33", "33", "PTX"]
    assert rows["registers"][2:5] == ["<=", "255", "SASS"]
    assert set(stage.config.DECLARED[128]) <= set(rows)
    assert max(map(len, out.splitlines())) <= 80


def test_facts_gives_json(ladder, machine_code):
    code, out, _ = ladder("facts", "1", "--json", "--head-dim", "64", "--dtype", "float16")
    found = json.loads(out)
    assert code == 0 and found["kernel"] == "01-sm_100a-float16-d64"
    assert found["facts"]["threads"] == 128 and found["facts"]["ex2"] == 65
    assert set(found["facts"]) <= set(facts.FACT_NAMES)


def test_facts_gives_the_static_report(ladder, machine_code):
    code, out, _ = ladder("facts", "1", "--report")
    assert code == 0 and "sm_100a" in out and "loop" in out


def test_facts_of_another_assembler(ladder, machine_code):
    _refused(ladder("facts", "1", "--ptxas", "/nowhere/ptxas"), "/nowhere/ptxas")
    pytest.importorskip("nvidia.cu13", reason="needs the wheel nvidia-cuda-nvcc==13.0.88")
    code, out, _ = ladder("facts", "1", "--json", "--ptxas", "ptxas")
    assert code == 0 and json.loads(out)["facts"]["ptxas"].startswith("V13.")


def test_facts_that_were_declared_wrong_are_exit_code_1(ladder, machine_code, stage, monkeypatch):
    monkeypatch.setitem(stage.config.DECLARED[128], "ex2", 1)
    code, out, complaint = ladder("facts", "1")
    assert code == 1 and "fact" in out
    assert complaint.startswith("error: ex2: declared == 1, compiled code has 33")


def test_compile_writes_ptx_and_cubin(ladder, dsl, tmp_path):
    folder = tmp_path / "new" / "folder"
    code, out, _ = ladder("compile", "1", "--out", str(folder))
    assert code == 0 and "compiled" in out
    names = [f"01-sm_100a-bfloat16-d128.{suffix}" for suffix in ("cubin", "ptx")]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(str(folder / name) in out for name in names)
    assert ".target sm_100a" in (folder / names[1]).read_text()
    assert (folder / names[0]).read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("command", ["facts", "compile"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arch", "sm_1"), "compiles for arch sm_80, sm_86"),
        (("--head-dim", "96"), "compiles for head_dim 64, 128; got 96"),
        (("--dtype", "float32"), "'float32' is not one of"),
    ],
)
def test_what_is_not_compiled_for_is_refused(ladder, command, arguments, words):
    _refused(ladder(command, "1", *arguments), words)


def test_a_mask_that_the_stage_lacks_is_refused(ladder):
    _refused(ladder("compile", "1", "--causal"), "stage 01 has no causal mask (stage 08 brings it)")


def test_an_output_folder_in_the_way_is_exit_code_1(ladder, dsl, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, complaint = ladder("compile", "1", "--out", str(tmp_path / "file"))
    assert code == 1 and complaint.startswith("error: ") and "file" in complaint


def test_a_missing_dsl_is_exit_code_1(ladder, monkeypatch):
    from flash_ladder.common import compile as compiling

    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    code, _, complaint = ladder("facts", "1")
    assert code == 1 and "error: " in complaint and "CuTe DSL" in complaint


# ---- diff ----------------------------------------------------------------------------------


@pytest.fixture
def two_stages(tmp_path, stage, monkeypatch):
    """Stage 01, and a changed copy of it as stage 02."""
    other = Stage(2)
    other.folder = tmp_path / "02"
    other.folder.mkdir()
    for path in stage.folder.glob("*.py"):
        (other.folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cli.ladder, "load", {1: stage, 2: other}.__getitem__)
    return other.folder


def test_a_stage_equals_itself(ladder):
    code, out, complaint = ladder("diff", "1", "1")
    assert code == 0 and not complaint
    assert out == ("stages 01 and 01: 0 code lines added, 0 removed in 0 files; 0% only moved\n")


def test_diff_prints_all_of_it_in_reading_order(ladder, two_stages):
    for name in ("softmax.py", "config.py"):
        with (two_stages / name).open("a") as file:
            file.write("ADDED = [1]  # a comment\n")
    (two_stages / "load.py").unlink()
    (two_stages / "correction.py").write_text('"""New."""\nX = 1\n')
    code, out, complaint = ladder("diff", "1", "2")
    assert code == 1 and not complaint
    headers = [line for line in out.splitlines() if line.startswith(("---", "+++"))]
    assert headers == [
        "--- stages/01/config.py",
        "+++ stages/02/config.py",
        "--- stages/01/load.py",
        "+++ /dev/null",
        "--- stages/01/softmax.py",
        "+++ stages/02/softmax.py",
        "--- /dev/null",
        "+++ stages/02/correction.py",
    ]
    assert out.count("+ADDED = [1]  # a comment\n") == 2
    last = out.splitlines()[-1]
    assert last.startswith("stages 01 and 02: 3 code lines added, ")
    assert last.endswith(" removed in 4 files; 0% only moved")


def test_changed_words_alone_are_a_difference(ladder, two_stages):
    path = two_stages / "mma.py"
    path.write_text(path.read_text() + "# the end\n")
    code, out, _ = ladder("diff", "1", "2")
    assert code == 1 and "+# the end\n" in out
    assert "0 code lines added, 0 removed in 0 files" in out


# ---- verify --------------------------------------------------------------------------------


def test_pack_leaves_a_folder_that_is_there_alone(ladder, dsl, tmp_path):
    from flash_ladder.common.compile import CompileKey
    from flash_ladder.common.hopper.run import artefact_name

    folder = tmp_path / artefact_name(CompileKey(4, "sm_100a", "bfloat16", 64), log=False)
    folder.mkdir()
    code, _, err = ladder("pack", "4", "--out", str(tmp_path))
    assert code == 2 and "is there already; give another folder" in " ".join(err.split())
    assert not list(folder.iterdir())


def test_verify_without_a_gpu_says_why(ladder, no_gpu, tmp_path):
    path = tmp_path / "evidence.json"
    code, out, complaint = ladder("verify", "1", "--out", str(path))
    assert (code, out) == (1, "")
    assert complaint == "error: cannot verify stage 01: no CUDA GPU here\n"
    assert not path.exists()


class _Event:
    """A CUDA event of a device on which everything takes 2 ms."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 2.0


@pytest.mark.parametrize("differentiable", [False, True])
def test_what_is_timed(monkeypatch, differentiable):
    from flash_ladder.common import verification

    calls = []
    envelope = types.SimpleNamespace(
        head_dims=(64, 128), dtypes=("bfloat16",), differentiable=differentiable
    )
    stage = types.SimpleNamespace(
        config=types.SimpleNamespace(ENVELOPE=envelope),
        attention=lambda q, k, v: calls.append(q.shape) or q + k + v,
    )
    monkeypatch.setattr(verification, "TIMED", ((2, 8), (1, 32)))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    rows = verification._timings(stage, "cpu")
    kinds = ("full attention", "its backward")[: 1 + differentiable]
    assert [row["shape"] for row in rows] == [
        f"{size} h16 d128 bfloat16, {kind}" for size in ("b2 s8", "b1 s32") for kind in kinds
    ]
    assert {*map(tuple, calls)} == {(2, 8, 16, 128), (1, 32, 16, 128)}
    flop = {"full attention": 4, "its backward": 10}
    sizes = {"b2 s8": 2 * 8**2, "b1 s32": 32**2}
    for row in rows:
        size, _, kind = row["shape"].partition(" h16 d128 bfloat16, ")
        assert row["tflops"] == pytest.approx(flop[kind] * sizes[size] * 16 * 128 / 2e9)


def test_verify_runs_every_case_and_check(ladder, dsl, stage, monkeypatch, tmp_path):
    from flash_ladder.common import contract, verification

    monkeypatch.setattr(contract_gpu, "gpu_skip_reason", lambda stage: None)
    monkeypatch.setattr(verification, "native_arch", lambda device: "sm_100a")
    monkeypatch.setattr(verification, "modes", lambda stage, device: ["native"])
    timing = {"shape": "one", "ms": 1.0, "ms_min": 1.0, "ms_max": 1.0, "tflops": 1.0, "how": "x"}
    monkeypatch.setattr(verification, "_timings", lambda stage: [timing])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(contract_gpu, "check_gpu_case", contract.check_model)
    monkeypatch.setattr(contract, "GPU_SIZES", {**contract.HOST_SIZES, "heads": (1,)})
    checks = {"fine": lambda stage: None, "broken": lambda stage: 1 / 0}
    monkeypatch.setattr(contract_gpu, "GPU_CHECKS", checks)
    cases = len(contract.cases(stage, contract.GPU_SIZES))
    path = tmp_path / "evidence.json"
    code, out, complaint = ladder("verify", "1", "--out", str(path), "--notes", "a remark")
    assert code == 1 and "broken: " in out and "ZeroDivisionError" in out and not complaint
    (run,) = json.loads(path.read_text())["runs"]
    assert run["tests"] == {"passed": cases + 1, "failed": 1, "skipped": 0}
    assert (run["gpu"], run["target"], run["notes"]) == ("Some GPU", "sm_100a", "a remark")
    assert sum(kernel["cases"] for kernel in run["kernels"]) == cases
    assert all(kernel["failed"] == 0 < kernel["worst"]["used"] < 1 for kernel in run["kernels"])
    assert run["timings"] == [timing] and run["mode"] == "native"
    code, _, complaint = ladder("verify", "1", "--rewritten", "--out", str(path))
    assert code == 1 and "cannot verify stage 01 rewritten" in complaint
    checks.pop("broken")
    assert ladder("verify", "1", "--out", str(path))[0] == 0
