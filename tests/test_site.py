# SPDX-License-Identifier: Apache-2.0
"""The site builds strictly, and what its navigation and its links name exists."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
MISSING = [name for name in ("mkdocs", "material") if importlib.util.find_spec(name) is None]
BUILD = """
import runpy, sys
runpy.run_path("conftest.py")  # makes the checkout importable as flash_ladder
sys.argv = ["mkdocs", "build", "--strict", "--site-dir", sys.argv[1]]
runpy.run_module("mkdocs", run_name="__main__")
"""

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: extra 'docs'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def nav_pages() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1].split("\n\n")[0]
    return re.findall(r"(\S+)\.md$", nav, re.M)


def test_every_page_of_the_navigation_is_built(site):
    pages = nav_pages()
    assert len(pages) >= 4
    for page in pages:
        folder = site / page.removesuffix("index")
        assert (folder / "index.html").is_file(), page


def test_every_page_is_in_the_navigation():
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {Path(name).as_posix() for name in written} == {f"{page}.md" for page in nav_pages()}


def test_links_inside_the_site_resolve(site):
    broken = []
    for page in site.rglob("index.html"):
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8")):
            path = unquote(link.split("#")[0].split("?")[0])
            if not path or re.match(r"[a-z]+:|/", path):
                continue
            target = page.parent / path
            if not (target.is_file() or (target / "index.html").is_file()):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken


def test_stage_page_shows_source_tables_and_evidence(site):
    page = (site / "stages" / "01" / "index.html").read_text(encoding="utf-8")
    assert "exponentials" in page and "stages/01/softmax.py" in page
    assert "<caption>barriers" in page and '<pre class="mermaid">' in page
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


@pytest.mark.parametrize("page", [page for page in nav_pages() if page.startswith("stages/")])
def test_stage_page_follows_the_template(page, site):
    folder = page.removesuffix("/index")
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert "**Prediction.**" in text and text.count("<summary>") == 3
    built = (site / folder / "index.html").read_text(encoding="utf-8")
    assert "<caption>barriers" in built and '<pre class="mermaid">' in built and "```" not in built


@pytest.mark.parametrize("page", [page for page in nav_pages() if page.startswith("primers/")])
def test_a_primer_is_built_with_its_drawings_and_scripts(page, site):
    built = (site / page / "index.html").read_text(encoding="utf-8")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for kind in ("drawing", "interactive"):
        assert built.count(f'class="fl-{kind}"') == text.count(f"```{kind} ")
    assert built.count('class="fl-drawing"') >= 1 and "```" not in built
    for script in (ROOT / "docs" / "js").glob("*.js"):
        assert f"js/{script.name}" in built and (site / "js" / script.name).is_file()
