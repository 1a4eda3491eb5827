# SPDX-License-Identifier: Apache-2.0
"""Every fence of the pages, on a temporary pair of stages and on the real stage 01."""

import html
import json
import re
import types

import pytest

markdown = pytest.importorskip("markdown", reason="the documentation extra is not installed")
pytest.importorskip("pymdownx", reason="the documentation extra is not installed")

import flash_ladder  # noqa: E402
from flash_ladder.common import fences, plan, role_graph  # noqa: E402

RUN = {
    "date": "2026-11-29",
    "gpu": "NVIDIA H200",
    "driver": "580.159.04",
    "target": "sm_90a",
    "mode": "rewritten",
    "command": "flash-ladder verify 1",
    "kernels": [
        {
            "key": "bf16-d128",
            "registers": 250,
            "cases": 60,
            "failed": 0,
            "worst": {
                "generator": "llm_like",
                "metric": "max_abs",
                "value": 0.00125,
                "baseline": 0.0025,
                "limit": 0.005,
            },
            "a key of tomorrow": 1,
        }
    ],
    "tests": {"passed": 12, "failed": 0, "skipped": 3},
    "notes": "a <note>",
}


def render(text: str) -> str:
    """HTML of a Markdown text, with the fences registered as in mkdocs.yml."""
    custom = [
        {
            "name": name,
            "class": name,
            "format": getattr(fences, name.replace("-", "_")),
            "validator": fences.validate,
        }
        for name in fences.ATTRIBUTES
    ]
    config = {"pymdownx.superfences": {"relaxed_headers": True, "custom_fences": custom}}
    return markdown.markdown(text, extensions=["pymdownx.superfences"], extension_configs=config)


def fence(head: str, body: str = "the bare file shows this") -> str:
    return render(f"```{head}\n{body}\n```\n")


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", "", page)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two stage folders; the fences look there instead of at the real stages."""
    folders = tmp_path / "01", tmp_path / "02"
    for folder in folders:
        folder.mkdir()
        (folder / "kernel.py").write_text("TILE = 128\n")
    monkeypatch.setitem(fences.ROOTS, "stages", tmp_path)
    return folders


def test_stage_diff_shows_changed_new_and_equal_files(pair):
    (pair[1] / "kernel.py").write_text("TILE = 256\n")
    (pair[1] / "load.py").write_text("X = '<b>'\n")
    for folder in pair:
        (folder / "mma.py").write_text("Y = 1\n")
    page = fence('stage-diff a="01" b="02" file="kernel.py load.py, mma.py"')
    assert "kernel.py · stage 01 → 02" in page
    assert '<span class="gd">-TILE = 128</span>' in page
    assert '<span class="gi">+TILE = 256</span>' in page
    assert "load.py · stage 01 → 02 · new file" in page
    assert "&lt;b&gt;" in page
    assert "mma.py is the same in stages 01 and 02." in text_of(page)
    assert "the bare file shows this" not in page


def test_stage_diff_takes_context(pair):
    (pair[0] / "kernel.py").write_text("A = 1\nB = 2\nC = 3\n")
    (pair[1] / "kernel.py").write_text("A = 1\nB = 2\nC = 4\n")
    assert "B = 2" in fence('stage-diff a="01" b="02" file="kernel.py"')
    assert "B = 2" not in fence('stage-diff a="01" b="02" file="kernel.py" context="0"')


def test_stage_diff_is_cut_after_60_lines(pair):
    old = [f"line_{number} = {number}" for number in range(400)]
    new = [line + "0" if number % 40 == 0 else line for number, line in enumerate(old)]
    for folder, lines in zip(pair, (old, new)):
        (folder / "kernel.py").write_text("\n".join(lines) + "\n")
    page = fence('stage-diff a="01" b="02" file="kernel.py"')
    shown = re.search(r"<pre>(.*)</pre>", page, re.S).group(1).strip().splitlines()
    assert len(shown) == 2 + 6 + 5 * 9  # header, first hunk, five of the nine others; a sixth: 62
    assert len(shown) <= fences.DIFF_LINES
    command = "git diff --no-index stages/01/kernel.py stages/02/kernel.py"
    assert f"36 more lines: {command}" in text_of(page)


def test_stage_diff_is_annotated(pair):
    (pair[1] / "kernel.py").write_text("TILE = 256\n")
    page = fence(
        'stage-diff a="01" b="02" file="kernel.py"', "git diff\n1 | = 256 | Twice the `TILE`."
    )
    link = '<a class="fl-annotation" href="#note-01-02-kernel-py-1">1</a>'
    assert f'{link}<span class="gi">+TILE = 256</span>' in page and page.count("fl-annotation") == 1
    assert '<li id="note-01-02-kernel-py-1">Twice the <code>TILE</code>.</li>' in page
    assert "fl-annotation" not in fence('stage-diff a="01" b="02" file="kernel.py"')


@pytest.mark.parametrize(
    ("files", "body", "message"),
    [
        ("kernel.py", "1 | = 512 | x", "no changed line shown has '= 512'"),
        ("kernel.py", "words", "'words' is no annotation"),
        ("kernel.py load.py", "1 | = 256 | x", "a fence of their own for each file"),
        ("load.py", "1 | = 256 | x", "no changed line"),  # the same in both
    ],
)
def test_annotations_that_are_stale_end_the_build(pair, files, body, message):
    (pair[1] / "kernel.py").write_text("TILE = 256\n")
    for folder in pair:
        (folder / "load.py").write_text("TILE = 256\n")
    with pytest.raises(fences.FenceError, match=message):
        fence(f'stage-diff a="01" b="02" file="{files}"', f"git diff\n{body}")


@pytest.mark.parametrize(
    "head, message",
    [
        ('stage-diff a="01" b="02" file="mma.py"', "mma.py is neither in stages/01 nor"),
        ('stage-diff a="01" b="11" file="kernel.py"', 'b="11" is no stage'),
        ('stage-diff a="01" b="02" file="kernel.py" context="x"', 'context="x"'),
        ('stage-diff a="01" file="kernel.py"', "missing ['b']"),
        ('stage-diff a="01" b="02" file="kernel.py" lines="9"', "unknown ['lines']"),
        ("stage-diff a=01 b=02 file=kernel.py", 'written name="value"'),
    ],
)
def test_stage_diff_errors_end_the_build(pair, head, message):
    with pytest.raises(fences.FenceError) as caught:
        fence(head)
    assert message in str(caught.value)


SOURCE = """import os

TILE: int = 128


@staticmethod
def outer(x):
    def inner():
        return x

    return inner


class Thing:
    SIZE = 4

    def method(self):
        return "<&>"
"""


@pytest.mark.parametrize(
    "symbol, first, last",
    [("TILE", 3, 3), ("outer", 6, 11), ("Thing", 14, 18), ("Thing.method", 17, 18)],
)
def test_code_shows_a_symbol_with_its_lines(pair, symbol, first, last):
    (pair[0] / "softmax.py").write_text(SOURCE)
    page = fence(f'code address="stages/01/softmax.py::{symbol}"')
    assert f"stages/01/softmax.py · {symbol} · lines {first}-{last}" in text_of(page)
    assert re.search(rf'"normal"> *{first}</span>', page)
    code = re.search(r'<td class="code">.*?</td>', page, re.S).group(0)
    assert len(text_of(code).rstrip().splitlines()) == last - first + 1


@pytest.mark.parametrize(
    "address, message",
    [
        ("stages/01/softmax.py::absent", "known: TILE, outer, Thing, Thing.SIZE, Thing.method"),
        ("stages/01/softmax.py", "has no ''"),
        ("stages/01/absent.py::x", "there is no file stages/01/absent.py"),
        ("tests/test_fences.py::fence", "does not start with"),
        ("stages/../tests/test_fences.py::fence", "does not start with"),
    ],
)
def test_code_errors_end_the_build(pair, address, message):
    (pair[0] / "softmax.py").write_text(SOURCE)
    with pytest.raises(fences.FenceError) as caught:
        fence(f'code address="{address}"')
    assert message in str(caught.value)


def test_code_reads_the_real_stage_and_common():
    page = fence('code address="stages/01/softmax.py::update_max"')
    assert "update_max" in page and "row_max" in page
    assert "Plan.check" in fence('code address="common/plan.py::Plan.check"')


@pytest.mark.parametrize("table", sorted(fences.TABLES))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_config_tables_of_stage_01(table, head_dim):
    page = fence(f'config-table stage="01" head_dim="{head_dim}" table="{table}"')
    if "<table>" in page:
        assert ">D</abbr>" in page
    else:
        assert f"Stage 01 {fences.EMPTY[table]} (head dim {head_dim})." in page


def test_config_table_numbers_come_from_the_plan():
    barriers = text_of(fence('config-table stage="01" head_dim="128" table="barriers"'))
    assert "kv_full" in barriers and "named 0" in barriers and "COMPUTE (128 by thread)" in barriers
    both = fence('config-table stage="04" head_dim="128" table="barriers"')
    row = re.search(r"<tr><td><code>p_full0/1</code>.*?</tr>", both)[0]
    assert "SOFTMAX0/1 (128 by thread)" in row and ">1</td>" in row and "p_full1" not in both
    assert both.count("<tr>") == 1 + 3 + 8 and "named 0" in both  # head, shared, of each tile
    assert both.count("all roles (512 by thread)") == 2 and "EMPTY" not in both  # start
    part = 'stage="07" part="backward_2cta" head_dim="128"'
    pair = text_of(fence(f'config-table {part} table="barriers"'))
    assert pair.count("all roles of each CTA (512 by thread)") == 4  # start, end
    smem = text_of(fence('config-table stage="01" head_dim="128" table="smem"'))
    assert f"{fences.stage_config(1).plan(128).smem_bytes:,}" in smem
    envelope = text_of(fence('config-table stage="01" head_dim="128" table="envelope"'))
    assert "positive multiples of 128" in envelope and "stage 08" in envelope


@pytest.mark.parametrize(
    "head, message",
    [
        ('config-table stage="01" head_dim="128" table="prices"', 'table="prices" is not one of'),
        ('config-table stage="01" head_dim="96" table="smem"', 'head_dim="96" is outside stage 01'),
        ('config-table stage="99" head_dim="64" table="smem"', 'stage="99" is no stage'),
        ('config-table stage="10" head_dim="64" table="smem"', "nothing to show of stage 10"),
        ('roles stage="01"', "missing ['head_dim']"),
    ],
)
def test_config_errors_end_the_build(head, message, monkeypatch):
    def load(number):
        raise ValueError(f"stage {number} is planned")

    if 'stage="10"' in head:
        monkeypatch.setattr(flash_ladder, "load", load)
    with pytest.raises(fences.FenceError) as caught:
        fence(head)
    assert message in str(caught.value)


PIPELINE = plan.Plan(
    roles=(
        plan.Role("LOAD", range(0, 1), registers=48, does="copies"),
        plan.Role("MMA", range(1, 4), does="multiplies"),
    ),
    tmem=(plan.TmemRegion("tS", 0, 128, "scores"), plan.TmemRegion("tP", 64, 64, "P", ("tS",))),
    barriers=(
        plan.Barrier(
            "kv_full",
            (plan.Arrival("LOAD", "tma"),),
            (plan.Arrival("MMA", "one"),),
            "K & V",
            stages=3,
            tx_bytes=32768,
        ),
        plan.Barrier(
            "kv_empty",
            (plan.Arrival("MMA", "commit"),),
            (plan.Arrival("LOAD", "one"),),
            "the slot",
            first_wait_passes=True,
        ),
    ),
    launch_registers=128,
)


def test_parts_have_tables_and_diffs():
    part = 'stage="07" part="preprocess" head_dim="128"'
    assert "rows of O and dO, zeros" in fence(f'config-table {part} table="roles"')
    assert "Stage 07/preprocess uses no barriers" in fence(f'config-table {part} table="barriers"')
    assert "COMPUTE" in fence(f"roles {part}")
    page = fence('stage-diff a="07/preprocess" b="07/postprocess" file="config.py kernel.py"')
    assert "stage 07/preprocess → 07/postprocess" in page
    assert "--- stages/07/preprocess/config.py" in text_of(page)
    for head in (
        'roles stage="07" part="other" head_dim="128"',
        'stage-diff a="07/other" b="07/preprocess" file="config.py"',
    ):
        with pytest.raises(fences.FenceError, match="stage 07 has no part 'other'"):
            fence(head)


class Config:
    """A stage with tensor memory, mbarriers and two roles."""

    IDEA = "one idea"
    ENVELOPE = plan.Envelope(head_dims=(128,), lifted_by={"seqlen": 8, "grad": 7, "device": 9})
    DECLARED = {128: {"registers": 128, "setmaxnreg": {"LOAD": 48}, "mma": ("128x128x16",)}}  # noqa: RUF012

    @staticmethod
    def plan(head_dim):
        return PIPELINE


def test_tables_and_graph_of_a_pipeline(monkeypatch):
    kernel = types.SimpleNamespace(config=Config, tag="03")
    monkeypatch.setattr(fences, "stage_source", lambda number, part: kernel)

    def table(name):
        return text_of(fence(f'config-table stage="03" head_dim="128" table="{name}"'))

    assert "0-127" in table("tmem") and "tS" in table("tmem")
    assert "32768" in table("barriers") and "K &amp; V" in table("barriers")
    assert "passes" in table("barriers") and "48" in table("roles")
    assert "LOAD: 48" in table("declared") and "128x128x16" in table("declared")
    assert fences.DECLARED_COUNTS in table("declared") and "counted" not in table("roles")
    assert "restricted" in table("envelope")
    graph = fence('roles stage="03" head_dim="128"')
    assert "kv_full: LOAD → MMA; kv_empty: MMA → LOAD" in graph  # in words, for who cannot see it
    assert ">warp 0</text>" in graph and ">warps 1-3</text>" in graph


def test_role_graph_draws_who_arrives_and_who_waits():
    """Lanes are 98 wide from 96 on: LOAD's is at 145, MMA's at 243; rows are 24 apart from 60."""
    full, empty = re.findall(r"<g>.*?</g>", role_graph.svg(PIPELINE))
    assert f'cx="145" cy="60" r="{role_graph.DOT}"' in full and 'd="M243,60L235,55V65Z"' in full
    assert f'cx="243" cy="84" r="{role_graph.DOT}"' in empty and 'd="M145,84L153,79V89Z"' in empty
    assert "Guards K &amp; V" in full


def test_role_graph_rings_who_arrives_and_waits():
    graph = fence('roles stage="01" head_dim="128"')
    assert "kv_full: COMPUTE → COMPUTE; kv_empty: COMPUTE → COMPUTE" in graph
    rows = re.findall(r"<g>.*?</g>", graph)
    assert [row.count("<circle") for row in rows] == [2, 2]  # a dot in a ring, no arrowhead
    assert not any(role_graph.WAITS in row and "Z" in row for row in rows)


def test_results_without_evidence(pair):
    assert fences.NOT_EXECUTED in fence('results stage="01"')
    (pair[0] / "evidence.json").write_text('{"schema": 1, "stage": 1, "runs": []}')
    assert fences.NOT_EXECUTED in fence('results stage="01"')


def test_results_mark_every_number(pair):
    (pair[0] / "evidence.json").write_text(json.dumps({"schema": 1, "stage": 1, "runs": [RUN]}))
    page = fence('results stage="01"')
    source = "measured: NVIDIA H200, driver 580.159.04, 2026-11-29, flash-ladder verify 1"
    measured = f'<abbr class="fl-mark" title="{source}">M</abbr>'
    assert "<th>registers, as assembled on that machine</th>" in page
    assert re.search(r'<td>250 <abbr [^>]*"measured: machine code compiled for sm_90a with', page)
    assert "tolerance rule of common.numerics" in page
    for number in ("60", "0", "0.00125", "0.0025"):
        assert f"<td>{number} {measured}</td>" in page
    assert re.search(r"<td>0\.5 <abbr [^>]*>D</abbr></td>", page)  # own error / torch's
    assert re.search(r"<td>0\.005 <abbr [^>]*>D</abbr></td>", page) and "llm_like, max_abs" in page
    assert f"12 passed {measured}, 0 failed {measured}, 3 skipped {measured}" in page
    assert "rewritten from sm_100a, sm_90a" in page and "a &lt;note&gt;" in page
    assert "nearest to its limit, 2 · torch's error + floor" in text_of(page)


def test_results_tell_of_logs_and_mutation():
    page = fence('results stage="04"')
    run = flash_ladder.load(4).evidence["runs"][0]
    counts = run["mutation"][0]["counts"]
    assert f"Left out in turn, {counts['sites']} waits, arrivals and fences" in page
    ctas = sum(kernel["log"]["ctas"] for kernel in run["kernels"])
    assert f"Executed log of {ctas} CTAs" in page
    assert "by lint (one may be noticed by several)" in text_of(page)
    first = fence('results stage="01"')
    assert "Executed log" not in first
    assert "Time on NVIDIA H200 (native, sm_90a), b4 s4096" in first
    assert "<td>rewritten from sm_100a</td>" in first and "<td>native, sm_90a</td>" in first


def test_long_tables_are_folded_and_what_counts_is_not():
    page = fence('results stage="01"')
    open_, _, rest = page.partition('<details class="fl-fold">')
    assert "Tests on" in open_ and "Time on" in open_ and "<table>" not in open_
    summary = re.search("<summary>(.+?)</summary>", rest)[1]
    assert f"({rest.count('<tr><td>')})" in summary and rest.rstrip().endswith("</details>")
    table = lambda name: fence(f'config-table stage="04" head_dim="128" table="{name}"')
    assert table("declared").startswith('<details class="fl-fold">')
    assert f"{table('declared').count('<tr><td>')} facts</summary>" in table("declared")
    assert "<details" not in table("barriers") + table("roles")


def test_results_bear_missing_fields(pair):
    worst = {"max_abs": 0.5, "baseline_max_abs": 0.25}
    kernels = [{"key": "bf16-d64", "worst": worst}, {}]
    sparse = {"runs": [{"kernels": kernels}, {"tests": {"passed": 1}}, {}]}
    (pair[0] / "evidence.json").write_text(json.dumps(sparse))
    page = fence('results stage="01"')
    assert "bf16-d64" in page and re.search(r"<td>2 <abbr [^>]*>D</abbr></td>", page)


def test_unreadable_evidence_ends_the_build(pair):
    (pair[0] / "evidence.json").write_text("[1, ")
    with pytest.raises(fences.FenceError, match=r"stages/01/evidence\.json cannot be read"):
        fence('results stage="01"')


def test_timeline_of_stage_01_is_marked_as_derived():
    page = fence('timeline stage="01" head_dim="64" machine="H200"')
    assert page.count("<svg") == 1 and "mma_qk, key tile 0: COMPUTE on smem" in page
    assert ">D</abbr>" in page and "SM model of stage 01" in page and "figures of H200" in page
    assert "not measured" in page and "the bare file" not in page


def test_a_figure_is_shown_with_its_description():
    page = fence('figure file="rescaling.svg"', "Shares of\nwarps < 1")
    assert 'src="../../img/rescaling.svg" alt="Shares of warps &lt; 1"' in page


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        ('file="absent.svg"', "Text", r'no file="absent.svg"; figures are roofline.svg'),
        ('file="rescaling.svg"', "", "needs a description"),
        ("", "Text", "missing"),
    ],
)
def test_a_figure_that_is_wrong_ends_the_build(head, body, words):
    with pytest.raises(fences.FenceError, match=words):
        fence(f"figure {head}", body)


@pytest.mark.parametrize(
    ("head", "titles"),
    [
        ('stage="02" head_dim="64" length="256"', ["stage 02: one CTA, 128 queries, 2 key tiles"]),
        (
            'stage="04" head_dim="64" length="256" below="03"',
            ["stage 04: one CTA, 256 queries, 2 key", "stage 03: one CTA, 256 queries, 2 key"],
        ),
        (
            'stage="07" part="backward_1cta" head_dim="128" length="256" below="07/backward_2cta"',
            [
                "stage 07/backward_1cta: one CTA, 128 keys",
                "stage 07/backward_2cta: a pair, 256 keys",
            ],
        ),
        (
            'stage="08" head_dim="64" length="384" mask="causal" below="08"',
            ["08, causal: one CTA, 256 queries, 2 key", "08: one CTA, 256 queries, 3 key tiles"],
        ),
    ],
)
def test_timelines_stand_above_one_another(head, titles):
    page = fence(f"timeline {head}")
    assert page.count("<svg") == 1 and 'role="img" aria-label="Timeline of stage 0' in page
    places = [page.index(f">stage {title.removeprefix('stage ')}") for title in titles]
    assert places == sorted(places) and ">D</abbr>" in page and "not measured" in page
    assert all(title in re.search('aria-label="(.*?)"', page)[1] for title in titles)
    assert "the bare file" not in page and not re.search(r'fill="(white|#222)"', page)


def test_a_timeline_shows_512_keys_unless_told():
    assert "512 queries and keys" in fence('timeline stage="02" head_dim="64" below="02"')


def test_pages_show_a_timeline_above_the_previous_one():
    """The stages of the forward; of stage 07 one CTA, and the pair below it; stage 08 a mask."""
    heads = {number: [] for number in flash_ladder.built()}
    for number, found in heads.items():
        for page in sorted(fences.stage_folder(number).rglob("README.md")):
            found += re.findall(r"```timeline (.*)", page.read_text(encoding="utf-8"))
    assert all('length="512"' in head for head in heads[2]) and len(heads[2]) == 1
    for number in range(3, 7):
        assert [f'below="{number - 1:02d}"' in head for head in heads[number]] == [True]
    assert ['below="07/backward_2cta"' in head for head in heads[7]] == [False, True]
    assert ['mask="causal" below="08"' in head for head in heads[8]] == [True]


def test_timeline_errors_end_the_build():
    for head, words in (
        ('stage="04" head_dim="64" below="99"', 'below="99" is no stage'),
        ('stage="04" head_dim="64" below="03/x"', "stage 03 has no part 'x'"),
        ('stage="04" head_dim="64" length="x"', 'length="x" is not a number'),
        ('stage="04" head_dim="64" length="100"', "a multiple of 128 up to 1024; got 100"),
        ('stage="08" head_dim="64" mask="window"', 'mask="window"'),
        ('stage="06" head_dim="64" mask="causal"', "stage 06 has no causal mask"),
        ('stage="01" head_dim="96"', "is outside stage 01"),
        ('stage="01" head_dim="64" machine="A100"', "fence timeline: no machine 'A100'"),
        ('stage="01"', "missing"),
    ):
        with pytest.raises(fences.FenceError, match=words):
            fence(f"timeline {head}")


def test_ladder_names_every_stage_and_its_status(pair, monkeypatch):
    monkeypatch.setattr(fences, "stage_config", lambda number: Config)
    monkeypatch.setattr(fences, "_rung_cells", lambda number: ["1"] * 5)
    (pair[0] / "README.md").write_text("# 01\n")
    page = fence("ladder")
    assert page.count("<tr>") == 1 + len(flash_ladder.STAGES)
    assert '<a href="stages/01/">' in page and page.count("planned") == len(flash_ladder.STAGES) - 2
    assert page.count("not yet executed on hardware") == 2
    (pair[0] / "evidence.json").write_text(json.dumps({"runs": [RUN]}))
    assert "runs, H200, rewritten <abbr" in fence("ladder")
    (pair[0] / "evidence.json").write_text(json.dumps({"runs": [{**RUN, "mode": "native"}]}))
    assert "runs, H200 <abbr" in fence("ladder")
    failing = {**RUN, "tests": {"failed": 1}}
    (pair[0] / "evidence.json").write_text(json.dumps({"runs": [RUN, failing]}))
    assert "fails, H200" in fence("ladder")


def test_rungs_show_step_cycles_and_error_each_with_its_mark():
    step, wide, narrow, error, torchs = fences._rung_cells(4)
    assert ">+87 −37 <abbr" in step and "</abbr>" in step and "new kernels" not in step
    assert fences._rung_cells(7)[0].endswith("<br>4 new kernels")
    assert ">1,688 <abbr" in wide and ">1,342 <abbr" in narrow
    value, own = (float(re.search(r">(\S+) <abbr", cell)[1]) for cell in (torchs, error))
    assert own < value < 1e-3
    assert "gaussian inputs in bf16, head dim 128" in error and "derived: SM model" in torchs
    _, wide, narrow, *_ = fences._rung_cells(7)
    assert wide.index("backward_1cta") < wide.index("<br>") < wide.index("backward_2cta")
    assert "backward_1cta" in narrow and "<br>" not in narrow  # the pair has no head dim 64
    assert fences._rung_cells(1)[0] == "-"


def test_mark_refuses_unknown_letters():
    assert ">Q</abbr>" in fences.mark("Q", "paper, section 2")
    with pytest.raises(fences.FenceError, match="mark 'X' is unknown"):
        fences.mark("X", "")


# ---- drawing and interactive ---------------------------------------------------------------


@pytest.mark.parametrize("name", fences.DRAWINGS)
def test_a_drawing_is_inline_described_and_marked(name):
    page = fence(f'drawing name="{name}"', "what it <shows>\nin words")
    assert 'role="img" aria-label="what it &lt;shows&gt; in words"' in page
    assert '<figure class="fl-drawing"><svg viewBox="0 0 360 ' in page
    assert ">D</abbr></figcaption>" in page and not re.search(r"#[0-9a-f]{3,6}\b", page)


@pytest.mark.parametrize("name", fences.DRAWINGS)
def test_a_drawing_stays_on_its_board(name):
    """No box and, by the usual width of a letter, no text leaves the picture."""
    board = fences.DRAWINGS[name].draw()
    shapes = "".join(board.shapes)
    boxes = re.findall(
        r'<rect class="\w+" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"/>', shapes
    )
    assert boxes
    for x, y, width, height in (map(float, box) for box in boxes):
        assert 0 <= x and 0 <= y and x + width <= board.width and y + height <= board.height
    texts = re.findall(
        r'<text( class="small")? x="(\S+)" y="\S+" text-anchor="(\w+)">(.*?)<', shapes
    )
    for small, x, anchor, text in texts:
        width = len(html.unescape(text)) * (4.7 if small else 5.5)
        left = float(x) - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        assert -4 <= left and left + width <= board.width + 4, text


def boxes_of(page: str) -> dict[str, tuple[float, float, float]]:
    """Label: (x, y, width) of the boxes of a drawing."""
    found = re.findall(
        r'<rect class="\w+" x="(\S+)" y="(\S+)" width="(\S+)" height="30"/><text[^>]*>(.*?)<', page
    )
    return {label: tuple(map(float, place)) for *place, label in found}


def test_a_map_of_tensor_memory_is_that_of_the_plan():
    head = 'drawing name="tmem-map" stage="07" part="backward_2cta" head_dim="128"'
    page = fence(head, "words")
    boxes, rows = boxes_of(page), flash_ladder.load(7).part("backward_2cta").config.plan(128).tmem
    assert set(boxes) == {region.name for region in rows}
    for region in rows:
        x, y, width = boxes[region.name]
        assert x == pytest.approx(4 + region.column * 350 / 512, abs=0.01)
        assert width == pytest.approx(region.columns * 350 / 512, abs=0.01)
        assert all(boxes[other][1] > y for other in region.aliases)
    assert "derived: stages/07/backward_2cta/config.py: plan(128).tmem" in page
    assert "shares its columns" in page and 'aria-label="words"' in page


def test_a_map_shows_what_is_free():
    page = fence('drawing name="tmem-map" stage="02" head_dim="64"', "words")
    assert page.count(">free</text>") == 2 and "shares" not in page
    assert {y for _, y, _ in boxes_of(page).values()} == {26.0}
    assert "free" not in fence('drawing name="tmem-map" stage="03" head_dim="128"', "words")


def test_the_primer_shows_the_map_of_stage_06():
    primer, page = (
        fence(f'drawing name="tmem-map"{head}', "words")
        for head in ("", ' stage="06" head_dim="128"')
    )
    assert boxes_of(primer) == boxes_of(page) and len(boxes_of(page)) == 6


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ('name="sm" stage="03" head_dim="128"', "go together, with one of: tmem-map"),
        ('name="tmem-map" stage="03"', "go together"),
        ('name="tmem-map" part="backward_1cta"', "go together"),
        ('name="tmem-map" stage="01" head_dim="64"', "stage 01 uses no tensor memory"),
        ('name="tmem-map" stage="07" part="backward_2cta" head_dim="64"', "is outside stage 07/"),
    ],
)
def test_maps_that_cannot_be_drawn_end_the_build(head, message):
    with pytest.raises(fences.FenceError, match=re.escape(message)):
        fence(f"drawing {head}", "words")


@pytest.mark.parametrize(
    ("number", "parts"),
    [(2, [""]), (3, [""]), (4, [""]), (7, ["backward_1cta", "backward_2cta"])],
)
def test_pages_show_the_map_of_tensor_memory(number, parts):
    pages = sorted(fences.stage_folder(number).rglob("README.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    heads = re.findall(rf'```drawing name="tmem-map" stage="{number:02d}" (.*)', text)
    assert [(re.search('part="(.*?)"', head) or ["", ""])[1] for head in heads] == parts


@pytest.mark.parametrize("name", fences.INTERACTIVE)
def test_an_interactive_part_is_a_table_with_settings(name):
    page = fence(f'interactive name="{name}"', "how to use it")
    assert f'id="fl-{name}" role="group" aria-label="how to use it"' in page
    settings = json.loads(html.unescape(re.search(r'data-settings="([^"]*)"', page).group(1)))
    assert settings == json.loads(json.dumps(fences.INTERACTIVE[name].settings()))
    tables = page.split('<div class="fl-static">')
    more = fences.INTERACTIVE[name].more()
    wanted = [fences.INTERACTIVE[name].rows(), [row for _, _, rows in more for row in rows]]
    for part, rows in zip(tables, wanted, strict=True):
        assert part.count("<tr><td>") == len(rows)
        assert all(f"<td>{html.escape(cell)}</td>" in part for row in rows for cell in row)
    assert [html.escape(caption) in tables[1] for caption, _, _ in more] == [True] * len(more)
    assert tables[1].count(">D</abbr></caption>") == len(more)


@pytest.mark.parametrize("kind", ["drawing", "interactive"])
def test_errors_of_the_primers_fences_end_the_build(kind):
    first = next(iter({"drawing": fences.DRAWINGS, "interactive": fences.INTERACTIVE}[kind]))
    for head, body, message in (
        (f'{kind} name="x"', "words", f'no name="x"; there are {first}, '),
        (f'{kind} name="{first}"', " ", f"{first} needs a description in its body"),
        (f'{kind} file="x"', "words", "missing ['name']"),
    ):
        with pytest.raises(fences.FenceError) as caught:
            fence(head, body)
        assert message in str(caught.value)


# ---- study ---------------------------------------------------------------------------------


def test_a_study_is_a_table_with_one_mark():
    page = fence('study name="noticed"')
    assert page.count("<caption>") == 1 and page.count('class="fl-mark"') == 1
    assert '<div class="fl-study">' in page and "the lint of the PTX" in page
    assert "flash-ladder mutate" not in text_of(page)  # in the mark


def test_a_study_that_is_not_there_is_refused():
    with pytest.raises(fences.FenceError, match='no name="absent"; there are errors, used'):
        fence('study name="absent"')
