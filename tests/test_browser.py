# SPDX-License-Identifier: Apache-2.0
"""Every page of the site in a real browser: nothing fails, nothing overflows, controls work.

Pictures of all pages go to screenshots/, to be looked at. Skipped where no Chromium is installed.
"""

from pathlib import Path

import pytest

from tests import browser
from tests.browser import DESKTOP, PHONE

pytest.importorskip("yaml", reason="the documentation extra is not installed")

from flash_ladder.common.site_checks import nav_pages

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "screenshots"
PAGES = [page.removesuffix(".md").removesuffix("index") for page in nav_pages(ROOT / "mkdocs.yml")]
SCHEMES = {"light": "default", "dark": "slate"}
LACKING = browser.lacking()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {LACKING}")
WIDE = """
(() => {
  const limit = document.documentElement.clientWidth;
  if (document.scrollingElement.scrollWidth <= limit) return [];
  const scrolls = (node) => node && node !== document.body
    && (getComputedStyle(node).overflowX !== "visible" || scrolls(node.parentElement));
  const wide = [...document.querySelectorAll("main *")].filter(
    (node) => node.getBoundingClientRect().right > limit + 1 && !scrolls(node.parentElement));
  return wide.slice(0, 5).map((node) => node.outerHTML.slice(0, 120)).concat("the page is wider");
})()
"""  # what makes a page wider than the window


@pytest.fixture(scope="module")
def zensical_tab(built_site):
    """A browser on the site as Zensical builds it."""
    with browser.opened(built_site("zensical")) as opened:
        yield opened


def visit(tab, page: str, size: tuple[int, int], scheme: str = "light") -> None:
    """Open a page in a window of a size; nothing may fail, and nothing be wider than the window."""
    tab.view(*size, scheme, phone=size == PHONE)
    tab.visit(page)
    assert tab.problems == []
    assert tab.run("document.querySelector('main h1') !== null")
    assert tab.run(WIDE) == []


@pytest.mark.parametrize("page", PAGES)
def test_page(tab, page):
    name = page.strip("/").replace("/", "-") or "start"
    for device, size in {"desktop": DESKTOP, "phone": PHONE}.items():
        visit(tab, page, size)
        for scheme, body in SCHEMES.items():
            tab.view(*size, scheme, phone=size == PHONE)
            tab.wait_for(f"document.body.dataset.mdColorScheme === '{body}'")
            tab.picture(PICTURES / f"{name}-{device}-{scheme}.png")


@pytest.mark.parametrize("page", PAGES)
def test_page_of_zensical(zensical_tab, page):
    for size in (DESKTOP, PHONE):
        visit(zensical_tab, page, size)


def test_search_finds_a_page(tab):
    visit(tab, "", DESKTOP)
    tab.run("document.querySelector('.md-search__input').focus()")
    tab.send("Input.insertText", text="rescaling")
    tab.wait_for("document.querySelector('.md-search-result__link[href*=\"stages/06\"]') !== null")
    assert tab.problems == []


def test_colours_follow_the_system_until_chosen(tab):
    """The first choice is light, the second dark; it holds on the next page too."""
    for scheme, body in SCHEMES.items():
        visit(tab, "", DESKTOP, scheme)
        tab.wait_for(f"document.body.dataset.mdColorScheme === '{body}'")
    for number, body in ((1, "default"), (2, "slate")):
        tab.run(f"document.querySelector('label[for=__palette_{number}]').click()")
        tab.wait_for(f"document.body.dataset.mdColorScheme === '{body}'")
    visit(tab, "how-to-read/", DESKTOP)
    assert tab.run("document.body.dataset.mdColorScheme") == "slate"
    tab.run("localStorage.clear()")


def test_answers_unfold(tab):
    visit(tab, "stages/04/", DESKTOP)
    height = "document.querySelector('details').offsetHeight"
    before = tab.run(height)
    tab.run("document.querySelector('details summary').click()")
    assert tab.run(height) > before


def test_menu_opens_on_a_phone(tab):
    visit(tab, "", PHONE)
    left = "document.querySelector('.md-sidebar--primary').getBoundingClientRect().left"
    assert tab.run(left) < 0
    tab.run("document.querySelector('label[for=__drawer].md-header__button').click()")
    tab.wait_for(f"{left} === 0")


# --- the browser itself -------------------------------------------------------------------------

WRONG = {
    "<script>missing()</script>": "exception: ReferenceError: missing",
    "<script>console.error('went', 'wrong')</script>": "console: went wrong",
    "<img src='gone.png'>": "log: Failed to load resource",
    "<script src='http://127.0.0.1:9/x.js'></script>": "request to elsewhere: http://127.0.0.1:9/",
}


@pytest.fixture(scope="module")
def small_tab(tmp_path_factory):
    """A browser on pages that are wrong: 0.html and so on, then wide.html and good.html."""
    folder = tmp_path_factory.mktemp("wrong")
    bodies = {f"{i}.html": body for i, body in enumerate(WRONG)}
    bodies["wide.html"] = "<div style='width: 500px'>wide</div>"
    bodies["good.html"] = "<div style='overflow: auto'><p style='width: 500px'>scrolls</p></div>"
    for name, body in bodies.items():
        text = "<meta name='viewport' content='width=device-width'><link rel='icon' href='data:,'>"
        (folder / name).write_text(f"<!doctype html>{text}<main><h1>x</h1>{body}</main>")
    with browser.opened(folder) as opened:
        yield opened


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_told(small_tab, number):
    small_tab.visit(f"{number}.html")
    said = list(WRONG.values())[number]
    assert any(problem.startswith(said) for problem in small_tab.problems), small_tab.problems


def test_a_page_wider_than_the_window_is_told(small_tab):
    visit(small_tab, "good.html", PHONE)
    small_tab.visit("wide.html")
    found = small_tab.run(WIDE)
    assert "width: 500px" in found[0] and found[-1] == "the page is wider"
