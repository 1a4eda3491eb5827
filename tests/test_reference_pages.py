# SPDX-License-Identifier: Apache-2.0
"""The reference pages: all of the public interface, all names in the kernels, all terms."""

import dataclasses
import html
import inspect
import re
from pathlib import Path

import flash_ladder
import pytest
import torch

pytest.importorskip("yaml", reason="the documentation extra is not installed")
pytest.importorskip("pymdownx", reason="the documentation extra is not installed")

from flash_ladder.common import docstrings, reference_fences, site_checks, tensor_names
from flash_ladder.common import plan as plans
from flash_ladder.common.fences import FenceError
from flash_ladder.common.hopper import layouts
from flash_ladder.common.model import B200, MACHINES, Figure, GradientRun, Machine, Run
from flash_ladder.common.stage import KernelSource, Part, Stage
from markdown.extensions.toc import slugify

ROOT = Path(__file__).parent.parent
CLASSES = (Stage, Part, KernelSource, Run, GradientRun, Machine, Figure)
PAGES = ("reference", "naming", "glossary")
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES}


def text_of(markup: str) -> str:
    """The text of HTML, without tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def render(fence: str, /, **options: str) -> str:
    """HTML of a fence of the reference pages."""
    taken: dict[str, str] = {}
    reference_fences.validate(fence, options, taken, {}, None)
    rendered = getattr(reference_fences, fence.replace("-", "_"))
    return rendered("the bare file shows this", fence, fence, taken, None)


def fences_of(page: str, name: str) -> list[str]:
    """The attributes behind each fence `name` of a page."""
    return re.findall(rf"^```{name}(?: (.*))?$", TEXTS[page], re.M)


# --- docstrings ---------------------------------------------------------------------------------

DOCSTRING = """One sentence
    in two lines.

    Args:
        a, b: (n,) tensors,
            of one dtype.
        **rest: as there.

    Returns: a sum, of
    two.
    Raises: never.

    More.
    """


def test_docstrings_are_cut_into_their_sections():
    found = docstrings.sections(DOCSTRING)
    assert [part.title for part in found] == ["", "Args", "Returns", "Raises", ""]
    assert found[0].text == "One sentence in two lines." and found[4].text == "More."
    assert found[1].entries == [
        (("a", "b"), "(n,) tensors, of one dtype."),
        (("rest",), "as there."),
    ]
    assert found[2].text == "a sum, of two." and found[3].text == "never."


def test_what_a_docstring_leaves_out_is_named():
    def function(a, b, c, *, rest): ...

    @dataclasses.dataclass
    class Data:
        a: int
        d: int

    function.__doc__ = Data.__doc__ = DOCSTRING
    assert docstrings.undocumented(function) == ["c"]
    assert docstrings.undocumented(Data) == ["d"]


# --- the public interface -----------------------------------------------------------------------


def test_every_public_name_has_its_place_on_the_page():
    objects = [re.search(r'object="(.*)"', line)[1] for line in fences_of("reference", "api")]
    shown = {path.rpartition(".")[2] for path in objects}
    assert shown >= {*flash_ladder.__all__} - {"STAGES"} | {cls.__name__ for cls in CLASSES}
    assert "`flash_ladder.STAGES`" in TEXTS["reference"]
    assert len(objects) == len(set(objects))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_is_shown_with_all_that_is_public(cls):
    markup = render("api", object=f"{cls.__module__}.{cls.__name__}")
    text = text_of(markup)
    for name, member in vars(cls).items():
        if name.startswith("_") or name.isupper() or name in docstrings.fields(cls):
            continue
        assert f'id="{cls.__name__}.{name}"' in markup, name
        if inspect.isfunction(member):
            assert f"{name}(" in text
    for name, annotation in docstrings.fields(cls).items():
        assert f"{name}: {annotation}" in text
    assert f'id="api-{cls.__name__}"' in markup


def test_a_function_is_shown_with_signature_arguments_returns_and_errors():
    text = text_of(render("api", object="flash_ladder.flash_attn_func"))
    assert "    softmax_scale: float | None = None,\n    causal: bool = False,\n" in text
    assert ") -> Tensor | tuple[Tensor, Tensor]" in text and "    *,\n" in text
    assert "Returns out (b, sq, h, d)" in text and "Raises TypeError or ValueError" in text
    assert "k, v\n(b, sk, hk, d) like q" in text


@pytest.mark.parametrize("subject", [Stage.attention, Part.simulate, Stage.simulate])
def test_an_argument_that_nobody_explains_ends_the_build(subject, monkeypatch):
    name = "machine" if "machine" in inspect.signature(subject).parameters else "seqused_k"
    monkeypatch.setattr(subject, "__doc__", subject.__doc__.replace(name, "other"))
    cls = Part if subject is Part.simulate else Stage
    with pytest.raises(FenceError, match=rf"says nothing of \['{name}'\]"):
        render("api", object=f"{cls.__module__}.{cls.__name__}")


def test_a_field_or_property_that_nobody_explains_ends_the_build(monkeypatch):
    monkeypatch.setattr(Run, "__doc__", Run.__doc__.replace("flop:", "flops:"))
    with pytest.raises(FenceError, match=r"Run says nothing of \['flop'\]"):
        render("api", object="flash_ladder.common.model.Run")
    monkeypatch.setattr(Part, "tflops", property(lambda self: 1.0), raising=False)
    with pytest.raises(FenceError, match="tflops has no docstring"):
        render("api", object="flash_ladder.common.stage.Part")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("api", {"object": "flash_ladder.flash_attention"}, "no attribute 'flash_attention'"),
        ("api", {"object": "nowhere.at.all"}, "no module at the start of 'nowhere.at.all'"),
        ("api", {"object": "flash_ladder.STAGES"}, "neither a function nor a class"),
        ("note", {"file": "common/masks.py", "title": "No such"}, r"has no Note \[No such\]"),
        ("note", {"file": "elsewhere/x.py", "title": "x"}, "no file elsewhere/x.py"),
        ("command", {"name": "fly"}, "no command 'fly'; there are doctor"),
        ("tensor-names", {"prefix": "x"}, "prefix='x'"),
        ("machines", {"name": "B200"}, r"unknown \['name'\]"),
    ],
)
def test_a_fence_that_cannot_be_rendered_ends_the_build(name, options, message):
    with pytest.raises(FenceError, match=message):
        render(name, **options)


def test_the_rule_of_the_masks_is_shown_and_linked():
    rule = render("note", file="common/masks.py", title="Which query sees which key")
    assert 'id="note-which-query-sees-which-key"' in rule and "p = i + len_k - len_q" in rule
    assert text_of(rule).rstrip().endswith("no gradient.")  # not more than the note
    function = render("api", object="flash_ladder.flash_attn_func")
    links = set(re.findall(r'href="#(note-[\w-]+)"', function))
    shown = {
        re.search(r'id="([\w-]+)"', render("note", **dict(re.findall(r'(\w+)="([^"]*)"', line))))[1]
        for line in fences_of("reference", "note")
    }
    assert links == shown and len(links) == 3


def test_every_command_is_shown_with_all_its_options():
    written = [re.search(r'name="(.*)"', line)[1] for line in fences_of("reference", "command")]
    assert written == list(reference_fences.commands()) and len(written) >= 12
    for name, command in reference_fences.commands().items():
        text = text_of(render("command", name=name))
        assert f"### flash-ladder {name}\n" in TEXTS["reference"]
        assert " ".join(command.help.split("\n")[0].split()) in text
        for parameter in command.params:
            assert parameter.name == "help" or (parameter.metavar or parameter.opts[0]) in text


def test_options_have_their_kind_and_default():
    text = render("command", name="run")
    assert "<code>--dtype bfloat16|float16</code>" in text and "<code>--qkv PATH</code>" in text
    assert "<td>Of the inputs' random numbers.</td><td><code>0</code></td>" in text
    assert "<code>--json</code>" in text and "flash-ladder run [N] [OPTIONS]" in text
    assert text_of(render("command", name="doctor")).count("--") == 0


def test_an_option_without_help_ends_the_build(monkeypatch):
    found = reference_fences.commands()
    found["run"].params[3].help = None
    monkeypatch.setattr(reference_fences, "commands", lambda: found)
    with pytest.raises(FenceError, match="run says nothing of --batch INT"):
        render("command", name="run")


def test_every_figure_of_every_machine_is_shown_with_its_mark():
    text = render("machines")
    figures = [figure for machine in MACHINES.values() for figure in machine.figures.values()]
    assert text.count('class="fl-mark"') == len(figures)
    for machine in MACHINES.values():
        for key, figure in machine.figures.items():
            row = re.search(rf"<tr><td><code>{key}</code>.*?</tr>", text)[0]
            assert f"{figure.value:g} " in row and html.escape(figure.unit) in row
    assert text.count(">M</abbr>") == 3  # measured on an H200, a figure of all three
    for key in ("mbarrier_latency", "smem_fill_passes", "tmem"):
        assert ">D</abbr>" in re.search(rf"<tr><td><code>{key}</code>.*?</tr>", text)[0]


def test_every_figure_is_explained_where_machines_are():
    text = Machine.__doc__.partition("Attributes:")[0]
    named = set(re.findall(r"\w+", text))
    keys = {key for machine in MACHINES.values() for key in machine.figures}
    assert {key for key in keys if not key.endswith("_latency")} <= named


# --- names of tensors ---------------------------------------------------------------------------

STAGES = ROOT / "stages"
KERNEL = '''
def softmax(tStS, sV, smem):
    """Args: tStS ((TILE_M, tile_n), 1, 1) float32 in TMEM; gO, gdO (rows, d); rS (written)."""
    gO, gdO = smem["sK"], 1
    rS = tStS  # (tile_n,)
    tQsQ, tQgQ = views(rS, other)  # (TMA, 2), (TMA, m)
    rP, rX = 1, 2  # ((4, 8), 1)
'''


def kernels(folder: Path, text: str) -> Path:
    """A folder of one stage, with one kernel file, and a file that is none."""
    stage = folder / "01" / "part"
    stage.mkdir(parents=True)
    (stage / "softmax.py").write_text(text, encoding="utf-8")
    (stage / "model.py").write_text("mNever = 1\n", encoding="utf-8")
    return folder


def test_names_and_shapes_are_read_from_the_syntax(tmp_path):
    found = tensor_names.names(kernels(tmp_path, KERNEL))
    assert {name: use.shapes for name, use in found.items()} == {
        "gO": ["(rows, d)"],
        "gdO": ["(rows, d)"],
        "rP": ["((4, 8), 1)"],
        "rS": ["(tile_n,)"],
        "rX": ["((4, 8), 1)"],
        "sK": [],
        "sV": [],
        "tQgQ": ["(TMA, m)"],
        "tQsQ": ["(TMA, 2)"],
        "tStS": ["((TILE_M, tile_n), 1, 1)"],
    }
    assert all(use.tags == {"01/part"} for use in found.values())
    table = reference_fences.names_table(tmp_path, "r")
    assert "<tr><td><code>rS</code></td><td><code>(tile_n,)</code></td><td>01 part</td>" in table


def test_a_name_with_an_unknown_prefix_ends_the_build(tmp_path):
    folder = kernels(tmp_path, KERNEL + "    kQ = 1\n")
    with pytest.raises(FenceError, match="'kQ' has no prefix"):
        reference_fences.names_table(folder, "m")


def test_every_prefix_of_the_stages_is_explained():
    found = tensor_names.names(STAGES)
    used = {tensor_names.prefix(name) for name in found}
    sections = re.split(r"^## ", TEXTS["naming"], flags=re.M)[1:]
    fences = [re.findall(r'^```tensor-names prefix="(\w+)"', text, re.M) for text in sections]
    assert all(len(found) == 1 for found in fences)
    explained = [found[0] for found in fences]
    assert sorted(explained) == sorted(used) == sorted(tensor_names.PREFIXES)
    assert tensor_names.prefix("tSrQ") == "tr" and tensor_names.prefix("tdQ_t2r") == "t"


def test_the_tables_have_every_name_that_the_text_of_the_kernels_has():
    tables = {group: render("tensor-names", prefix=group) for group in tensor_names.PREFIXES}
    shown = {
        name: places
        for table in tables.values()
        for name, places in re.findall(r"<tr><td><code>(\w+)</code>.*<td>([^<]*)</td></tr>", table)
    }
    names = re.compile(r"(?<![\w\"'.])([mgsrt]d?[A-Z][A-Za-z]*(?:_\w+)?)(?=: cute\.Tensor| = )")
    read = {}
    for path in tensor_names.kernel_files(STAGES):
        for name in names.findall(path.read_text(encoding="utf-8")):
            read.setdefault(name, set()).add(path.parent.relative_to(STAGES).as_posix())
    assert len(read) > 80 and set(read) <= set(shown)
    assert shown["tSrQ"] == "02-08" and shown["rQ"] == "01"
    assert shown["gStats"] == "07-08 backward_1cta, backward_2cta, preprocess"


def test_names_that_pages_explain_exist():
    known = tensor_names.names(STAGES)
    name = re.compile(r"`([mgsrt]d?[A-Z][A-Za-z]*(?:_\w+)?)`")
    rules = (ROOT / "docs" / "how-to-read.md").read_text(encoding="utf-8")
    table = re.search(r"^\| name \| is \|\n(?:\|.*\n)+", rules, re.M)[0]
    for text in (table, TEXTS["naming"]):
        found = set(name.findall(text))
        assert len(found) >= 5 and found <= set(known)


# --- glossary -----------------------------------------------------------------------------------

ENTRY = re.compile(r"^(.+) \{ #([\w-]+) \}\n:   ((?:.+\n?)+)", re.M)
WANTED = (
    "TMEM;UMMA, tcgen05.mma;mbarrier;Phase;Parity;CTA pair;DSMEM;TMA;Warpgroup;Correction;Rescale;"
    "MUFU;Cody-Waite;Issue slot;Roofline ceilings;Swizzle;Descriptor;Packed sequences;Bottom-right;"
    "Replay;Thread place;LSE;Oracle;Conformance;Executed log;Evidence;Rewritten;Adversary;Mutation"
).split(";")


def entries() -> dict[str, str]:
    """Terms of the glossary and what it says of them, as one line."""
    return {term: " ".join(text.split()) for term, _, text in ENTRY.findall(TEXTS["glossary"])}


def numbers_of_the_code() -> dict[str, set[str]]:
    """Every number that a definition states, from the code, by term."""
    columns, lanes = plans.TMEM_COLUMNS, plans.WARPS_PER_WARPGROUP * plans.THREADS_PER_WARP
    cell = torch.float32.itemsize
    stages = {number: flash_ladder.load(number) for number in (1, 6, 7, 8)}
    half = getattr(torch, stages[7].part("postprocess").config.ENVELOPE.dtypes[0])
    return {
        "SM": {f"{B200['sms']:g}"},
        "Warp": {str(plans.THREADS_PER_WARP), str(plans.WARPS_PER_WARPGROUP)},
        "Warpgroup": {str(plans.WARPS_PER_WARPGROUP), str(lanes)},
        "Shared memory": {str(plans.MAX_SMEM_BYTES), f"{B200['smem']:g}"},
        "MUFU": {f"{B200['mufu']:g}", f"{B200['fma']:g}"},
        "TMEM": {str(lanes), str(columns), str(8 * cell), str(lanes * columns * cell >> 10)},
        "Swizzle": {str(swizzle_chunk())},
        "CTA pair": {str(stages[8].part("backward_2cta").module("mma").LEADER)},
        "Named barrier": {
            str(plans.NAMED_BARRIERS),
            str(stages[6].config.plan(128).barrier("start").number),
        },
        "Conditional rescaling": {f"{stages[6].config.THRESHOLD:g}"},
        "Preprocess, postprocess": {str(8 * half.itemsize)},
    }


def swizzle_chunk() -> int:
    """Bytes that the swizzle of 128 bytes keeps together, from the addresses it gives."""
    moved = [layouts.swizzle_address(0x80 + byte, 128) - 0x80 for byte in range(128)]
    return next(byte for byte in range(1, 128) if moved[byte] != moved[0] + byte)


NOTATION = re.compile(r"\b2\^\w|\b1/x|\[0, 1\)|`[^`]*`")  # numbers that state no fact


def test_every_term_that_is_wanted_is_explained_once():
    terms, anchors = zip(*[(term, anchor) for term, anchor, _ in ENTRY.findall(TEXTS["glossary"])])
    assert set(WANTED) <= set(terms) and len(terms) >= 55
    assert len(set(terms)) == len(terms) and len(set(anchors)) == len(anchors)
    assert len(terms) == TEXTS["glossary"].count("\n:   ")  # no entry has another form


def test_every_term_has_a_source_that_exists_and_a_page():
    for term, text in entries().items():
        source = re.search(r"\*Source: (.+?)\.\* → \[", text)
        assert source, term
        for file in re.findall(r"`([^`*]+)`", source[1]):
            path = ROOT / file
            assert path.exists() or file == "config.py", f"{term}: {file}"
        sentences = text[: source.start()].strip()
        assert sentences.endswith((".", ")")) and len(sentences) < 420, term


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, and those given by name."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {slugify(heading, "-") for heading in headings} | set(
        re.findall(r"\{ #([\w-]+) \}", text)
    )


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_pages_and_headings(page):
    links = re.findall(r"\]\(([^)]+)\)", TEXTS[page])
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        target = ROOT / "docs" / (file or f"{page}.md")
        assert target.is_file(), link
        assert not anchor or anchor in slugs(target), link
    assert f"{page}.md" in site_checks.nav_pages(ROOT / "mkdocs.yml")


def test_numbers_of_definitions_come_from_the_code_and_have_a_mark():
    numbers = numbers_of_the_code()
    assert set(numbers) <= set(entries())
    for term, text in entries().items():
        text = NOTATION.sub("", text.partition("*Source:")[0])
        plain = re.sub(r"\([DQ][:)][^)]*\)?", "(mark)", text)
        stated = set(re.findall(r"(?<![\w.])\d[\d.]*(?!\w)", plain))
        assert {number.rstrip(".") for number in stated} == numbers.get(term, set()), term
        for number in stated:
            behind = plain[plain.index(number) :].partition(". ")[0]
            assert "(mark)" in behind, f"{term}: {number}"


# --- roles and barriers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fence", "kind"), [("role-names", "roles"), ("barrier-names", "barriers")]
)
def test_lists_of_roles_and_barriers_have_what_the_plans_have(fence, kind):
    rows = re.findall(r"<tr><td>(.*)</td><td>(.*)</td><td>(.*)</td></tr>", render(fence))
    shown = {tuple(html.unescape(text_of(cell)) for cell in row[:2]) for row in rows}
    wanted = set()
    for number in flash_ladder.built():
        for source in flash_ladder.load(number).kernels:
            for row in getattr(source.config.plan(source.config.ENVELOPE.head_dims[0]), kind):
                text = row.does if kind == "roles" else row.guards
                wanted.add(
                    (row.name.rstrip("0123456789") if kind == "barriers" else row.name, text)
                )
    assert shown == wanted and len(rows) == len(wanted) > 15
    assert fences_of("glossary", fence) == [""]


def test_a_changed_plan_changes_the_list(monkeypatch):
    config = flash_ladder.load(4).config
    plan = config.plan(128)
    roles = [dataclasses.replace(row, does="sings") for row in plan.roles]
    monkeypatch.setattr(config, "plan", lambda head_dim: plan.with_changes(roles=tuple(roles)))
    monkeypatch.setattr(flash_ladder, "load", lambda number, load=flash_ladder.load: CACHED[number])
    CACHED.update({number: Stage(number) for number in flash_ladder.built()})
    assert "<td><code>MMA</code></td><td>sings</td><td>04</td>" in render("role-names")
    assert "<td>03, 05-08</td>" in render("role-names")


CACHED: dict[int, Stage] = {}


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ({"01"}, "01"),
        ({"02", "03", "05"}, "02-03, 05"),
        ({"07", "07/preprocess", "08/preprocess"}, "07; 07-08 preprocess"),
    ],
)
def test_places_are_short(tags, text):
    assert reference_fences.places(tags) == text
