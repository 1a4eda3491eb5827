# SPDX-License-Identifier: Apache-2.0
"""The site builds strictly with both builders, and each page holds what the checks demand."""

import re
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the documentation extra is not installed")

from flash_ladder.common import site as building
from flash_ladder.common import site_checks as checks
from flash_ladder.common.reading import reading_of

ROOT = Path(__file__).parent.parent
PAGES = checks.nav_pages(ROOT / "mkdocs.yml")
STAGE_PAGES = [page for page in PAGES if page.startswith("stages/")]  # a part may have one, too


@pytest.mark.parametrize("builder", building.FOLDERS)
def test_the_site_has_no_problems(builder, built_site):
    assert checks.problems(built_site(builder), PAGES) == []


def test_both_builders_write_the_same_pages(built_site):
    found = []
    for builder in building.FOLDERS:
        folder = built_site(builder)
        found.append({path.relative_to(folder) for path in folder.rglob("index.html")})
    assert found[0] == found[1] and len(found[0]) == len(PAGES) >= 17


def test_every_page_is_in_the_navigation():
    docs = ROOT / "docs"
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} == set(PAGES)


BROKEN = {
    "fence": '```roles stage="01" head_dim="17"\nbody\n```\n',
    "link": "[elsewhere](nothing.md)\n",
    "snippet": '--8<-- "nothing.md"\n',
}


@pytest.mark.parametrize("builder", building.FOLDERS)
def test_a_broken_page_ends_the_build(builder, built_site, tmp_path):
    built_site(builder)  # or skips when the builder is not installed
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = re.sub(r"(?m)^nav:\n(?:  .*\n)+", "nav:\n  - Start: index.md\n", config)
    (tmp_path / "mkdocs.yml").write_text(config, encoding="utf-8")
    page = tmp_path / "docs" / "index.md"
    page.parent.mkdir()
    page.write_text("# Start\n\nAll is well.\n", encoding="utf-8")
    building.build(builder, tmp_path / "out", tmp_path)
    for what, text in BROKEN.items():
        page.write_text(f"# Start\n\n{text}", encoding="utf-8")
        with pytest.raises(building.BuildError, match=f"{builder} refused the site"):
            building.build(builder, tmp_path / "out", tmp_path)
            pytest.fail(f"a broken {what} was built")


def test_a_builder_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(building.NEEDED, "zensical", ("no_such_builder",))
    with pytest.raises(building.BuildError, match=r"no_such_builder.*pip install"):
        building.build("zensical", tmp_path)


# --- the checks themselves ----------------------------------------------------------------------


def problems_of(tmp_path, body: str) -> str:
    """What is wrong with a page of this body, beside a page other/ and a file of 1.5 MB."""
    for name, text in (("index.html", body), ("other/index.html", '<h1 id="there">Other</h1>')):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<html><body><article>{text}</article></body></html>", encoding="utf-8")
    (tmp_path / "large.js").write_bytes(b" " * checks.MAX_PAGE_BYTES)
    checks.read_page.cache_clear()
    return "\n".join(checks.problems(tmp_path, ["index.md", "other.md"]))


GOOD = """
<p><a href="other/#there">there</a> <a href="https://example.org/">elsewhere</a></p>
<p>It is 40 % faster: 1358 TFLOP/s (D), and 1613 TFLOP/s <abbr class="fl-mark">Q</abbr>.</p>
<img src="data:image/gif;base64,AAAA" alt="a dot"><svg role="img" aria-label="a graph"></svg>
<p>The marks stand here (D).</p><table><tr><th>TFLOP/s</th><td>12</td></tr></table>
<pre>at most 2,243 TFLOP/s (derived)</pre><p>Counted in TFLOP/s, as Q and K are.</p>
<span class="twemoji"><svg></svg></span>
"""
BAD = {
    '<a href="nothing/">x</a>': "link nothing/ leads nowhere",
    '<a href="other/#here">x</a>': "no anchor #here",
    '<a href="#here">x</a>': "no anchor #here",
    '<a href="/other/">x</a>': "starts at the host's root",
    '<img src="gone.png" alt="x">': "link gone.png leads nowhere",
    '<script src="https://example.org/x.js"></script>': "loads https://example.org/x.js",
    '<link rel="stylesheet" href="//example.org/x.css">': "<link> loads //example.org/x.css",
    '<link rel="preconnect" href="https://fonts.example">': "loads https://fonts.example",
    '<img srcset="large.js 1x, https://a.b/c 2x" alt="x">': "<img> loads https://a.b/c",
    "<style>@import 'https://a.b/c.css';</style>": "<style> loads https://a.b/c.css",
    '<p style="background: url(https://a.b/c)"></p>': "<style> loads https://a.b/c",
    '<pre class="mermaid">flowchart</pre>': "mermaid",
    '<img src="large.js">': "image large.js has no alt text",
    "<svg></svg>": "an inline SVG",
    '<svg role="img"></svg>': "an inline SVG",
    '<script src="large.js"></script>': "the limit is 1,500,000",
    "<p>It reaches 1 358 TFLOP/s.</p>": "a speed without its mark M, D or Q: It reaches",
    "<p>Q is read at 12 TFLOP/s.</p>": "a speed without",
    "<p>None.</p><table><tr><th>TFLOP/s</th><td>12</td></tr></table>": "a speed without",
    "<pre>12 TFLOP/s</pre>": "a speed without",
    '<p><code>study name="noticed"\nbody</code></p>': "the fence `study` was not rendered",
}


def test_checks_pass_a_good_page(tmp_path):
    assert problems_of(tmp_path, GOOD) == ""


@pytest.mark.parametrize("body", BAD)
def test_checks_refuse(body, tmp_path):
    found = problems_of(tmp_path, body)
    assert BAD[body] in found and found.startswith("index.html: ")


def test_checks_find_missing_pages_and_styles_from_outside(tmp_path):
    (tmp_path / "x.css").write_text("a { src: url('https://a.b/font.woff2') }", encoding="utf-8")
    found = checks.problems(tmp_path, ["index.md", "a/b.md"])
    assert found == [
        "index.md: in the navigation, but not in the site",
        "a/b.md: in the navigation, but not in the site",
        "x.css: loads https://a.b/font.woff2 from outside",
    ]


# --- what pages show ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(built_site):
    """The folder of the site as MkDocs builds it."""
    return built_site("mkdocs")


def test_stage_page_shows_source_tables_and_evidence(site):
    page = (site / "stages" / "01" / "index.html").read_text(encoding="utf-8")
    assert "exponentials" in page and "stages/01/softmax.py" in page
    assert "<caption>barriers" in page and '<div class="fl-roles">' in page
    assert "Not yet executed on hardware." in page or ">M</abbr>" in page
    assert "language-stage-diff" not in page and "```" not in page  # no fence fell through


def test_model_page_shows_timeline_and_roofline(site):
    page = (site / "model" / "index.html").read_text(encoding="utf-8")
    assert page.count('class="fl-timeline"') == 1 and "derived cycles, not measured" in page
    assert (site / "img" / "roofline.svg").is_file() and "img/roofline.svg" in page


HEADINGS = [
    "Roadmap",
    "At a glance",
    "The problem",
    "The idea",
    "The diff",
    "Walk through the code",
    "Synchronisation",
    "Numerics",
    "Measured",
    "What went wrong",
    "Run it",
    "Check yourself",
    "Where production differs",
]


def template_problems(text: str) -> list[str]:
    """What the page of a stage or part lacks of the template: headings in order, their content."""
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2]))
    found = [] if parts[1::2] == HEADINGS else [f"headings {parts[1::2]}"]
    wanted = {  # section: what its text must match
        "Roadmap": r"\*\*\d\d\s[^*]+\*\*(.|\n)*^Prerequisites:(.|\n)*\bStatus:",
        "At a glance": r"^\|[-|]+\|$|^```config-table ",
        "The problem": r"\*\*Prediction\.\*\*",
        "The diff": r"^```(stage-diff|code) ",
        "Walk through the code": r"^```(code|config-table) ",
        "Synchronisation": r'^```config-table .*table="barriers"(.|\n)*^```roles ',
        "Measured": r"\((M|D)[:)]",
        "Run it": r"^```bash\npytest stages/\d\d ",
        "Check yourself": r"(?:<summary>(?:.|\n)*?</details>(?:.|\n)*){3}",
        "Where production differs": r"^\*\*Next\.\*\*",
    }
    for section, pattern in wanted.items():
        if not re.search(pattern, sections.get(section, ""), re.M):
            found.append(f"{section}: nothing matches {pattern}")
    return found + [f"{name}: empty" for name, body in sections.items() if not body.strip()]


def test_every_stage_page_is_in_the_navigation():
    """With that of the pair of stage 07, right below the page of the stage."""
    sources = [checks.source_file(ROOT, page) for page in STAGE_PAGES]
    folders = [path.parent.relative_to(ROOT / "stages").as_posix() for path in sources]
    assert folders == sorted(folders) and "07/backward_2cta" in folders
    assert set(sources) == set((ROOT / "stages").rglob("README.md"))


@pytest.mark.parametrize("page", STAGE_PAGES)
def test_stage_page_follows_the_template(page, site):
    text = checks.source_file(ROOT, page).read_text(encoding="utf-8")
    assert template_problems(text) == []
    built = checks.built_file(site, page).read_text(encoding="utf-8")
    assert "<caption>barriers" in built and '<div class="fl-roles">' in built and "```" not in built


@pytest.mark.parametrize("page", STAGE_PAGES)
def test_a_stage_page_is_read_in_a_quarter_of_an_hour(page, site):
    found = reading_of(checks.built_file(site, page))
    assert found.words > 900 and found.drawings and found.code_lines and found.tables
    assert found.minutes <= 15, found


def test_the_time_for_a_page_is_that_of_what_it_shows(tmp_path):
    row, code = "<tr><td>no words</td></tr>", "<pre>one\ntwo\n</pre>"
    numbered = f'<td class="linenos"><pre>1\n2\n</pre></td><td>{code}</td>'
    shown = f"""<p>{"word " * 198}<b>and</b> more</p><table>{row * 6}</table>
    <table>{row * 7}</table><svg role="img"><text>drawn</text><svg role="img"></svg></svg>
    <svg></svg><table class="highlighttable"><tr>{numbered}</tr></table>{code}"""
    page = (
        f"<nav>skipped</nav><article>{shown}<details><summary>two words</summary>{shown}</details>"
    )
    (tmp_path / "x.html").write_text(page + "<script>skipped</script></article> skipped")
    found = reading_of(tmp_path / "x.html")
    assert (found.words, found.tables, found.drawings, found.code_lines) == (202, [6, 7], 1, 4)
    assert found.minutes == pytest.approx(202 / 200 + 0.5 + 1 + 1 + 4 * 2 / 60)


@pytest.mark.parametrize("heading", HEADINGS)
@pytest.mark.parametrize("page", [page for page in STAGE_PAGES if page.startswith("stages/07/")])
def test_a_page_that_lacks_a_section_is_noticed(page, heading):
    text = checks.source_file(ROOT, page).read_text(encoding="utf-8")
    section = re.compile(rf"^## {heading}\n(?:(?!## ).*\n)*", re.M)
    assert template_problems(section.sub("", text)) != []
    assert template_problems(section.sub(f"## {heading}\n\n", text)) != []


PRIMERS = [page.removesuffix(".md") for page in PAGES if page.startswith("primers/")]


@pytest.mark.parametrize("page", PRIMERS)
def test_a_primer_is_built_with_its_drawings_and_scripts(page, site):
    built = (site / page / "index.html").read_text(encoding="utf-8")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for kind in ("drawing", "interactive"):
        assert built.count(f'class="fl-{kind}"') == text.count(f"```{kind} ")
    assert built.count('class="fl-drawing"') >= 1 and "```" not in built
    for script in (ROOT / "docs" / "js").glob("*.js"):
        assert f"js/{script.name}" in built and (site / "js" / script.name).is_file()
