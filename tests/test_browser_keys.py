# SPDX-License-Identifier: Apache-2.0
"""The site by keyboard alone, and what a page still shows where scripts are off.

Real key events, in the browser of tests/browser.py; no test here clicks.
"""

import time

import pytest
from flash_ladder.common.primers import INTERACTIVE

from tests.browser import DESKTOP, PHONE

PAGES = {"online-softmax": "online-softmax", "ceilings": "blackwell-sm", "mbarrier": "mbarriers"}
CONTROLS = {  # of each interactive part: (role, name), in the order of Tab
    "online-softmax": [
        *(("button", name) for name in ("Next tile", "Back", "All tiles", "Restart")),
        ("combobox", "row"),
        ("slider", "threshold, log2"),
        ("slider", "tiles that have come"),
    ],
    "ceilings": [
        *(("combobox", name) for name in ("kernel", "machine")),
        *(("slider", name) for name in ("queries", "keys", "head dim")),
        *(("slider", name) for name in ("FLOP a cycle", "bytes a cycle", "exp2 a cycle")),
    ],
    "mbarrier": [
        ("combobox", "bug"),
        *(("button", name) for name in ("Next in turn", "Back", "Restart")),
        *(("button", f"next step of {role}") for role in ("LOAD", "copy engine", "MMA")),
        ("slider", "steps taken"),
    ],
}
USES = {  # of each interactive part: (control, key, what is told, what the table then has)
    "online-softmax": [
        ("Next tile", " ", "Tile 1 of 6: ", "1\t2.1\t"),
        ("All tiles", "Enter", "Tile 6 of 6: no score exceeds m.", "6\t12.4\t12.4\t1\t"),
        ("Back", " ", "Tile 5 of 6: ", "5\t12.4\t"),
        ("Restart", "Enter", "Nothing has come yet", ""),
        ("All tiles", " ", "Rescaled so far: 1.", "threshold 8"),
        ("row", "ArrowDown", "Tile 6 of 6: the largest score so far lies 6 above m", "6\t16.5\t"),
        ("threshold, log2", "Home", "Rescaled so far: 5.", "threshold 0"),
        ("threshold, log2", "ArrowRight+ArrowRight+ArrowRight", "so far: 2.", "threshold 3"),
    ],
    "ceilings": [
        ("kernel", "End", "Bound by shared memory.", "backward, pair, 128 queries, 256 keys"),
        ("machine", "ArrowDown", "Bound by shared memory.", "exponentials\t512\t"),
        ("bytes a cycle", "ArrowRight", "Bound by tensor core.", "shared memory\t2150\t"),
        ("queries", "ArrowRight", "Bound by tensor core.", "256 queries, 256 keys"),
    ],
    "mbarrier": [
        ("next step of LOAD", " ", "Step 1: LOAD passes its wait", "full[0]\t0\t1\t0"),
        ("next step of LOAD", "Enter", "Step 2: LOAD arrives at full[0]", "full[0]\t0\t0\t32768"),
        ("next step of MMA", " ", "MMA is blocked: it waits at full[0]", "full[0]\t0\t0\t32768"),
        ("next step of copy engine", " ", "Step 3: copy engine delivers", "full[0]\t0\t0\t16384"),
        ("Back", " ", "Step 2: LOAD arrives at full[0]", "full[0]\t0\t0\t32768"),
        ("Next in turn", "Enter", "Step 3: copy engine delivers", "full[0]\t0\t0\t16384"),
        ("Restart", " ", "A fresh ring", "full[0]\t0\t1\t0"),
        ("bug", "ArrowDown", "Planted: LOAD waits for a phase", "full[0]\t0\t1\t0"),
    ],
}
RING = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const part = (x) => (x <= 10 ? x / 3294 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const style = getComputedStyle(document.activeElement);
  const ground = getComputedStyle(document.body).backgroundColor;
  const [one, other] = [style.outlineColor, ground].map((colour) => light(numbers(colour)) + 0.05);
  const wide = style.outlineStyle === "solid" ? parseFloat(style.outlineWidth) : 0;
  const box = document.activeElement.getBoundingClientRect();
  const out = wide + parseFloat(style.outlineOffset);
  const inside = box.left >= out && box.right + out <= document.documentElement.clientWidth;
  return wide >= 2 && inside && Math.max(one / other, other / one) >= 3;
})()
"""  # the ring around what has the focus is broad, not cut off, and unlike the page in brightness
WIDE = (
    ("stages/03/", ".fl-roles", "graph of the roles, scrolls sideways"),
    ("stages/05/", ".fl-timeline", "timeline: 512 queries and keys, head dim 64"),
    ("stages/05/", ".fl-diff .highlight", "changed lines: mma.py · stage 04 → 05"),
    ("stages/05/", ".fl-code .highlight", "source: stages/05/softmax.py · exp2_emulated"),
    ("static/", ".md-typeset__scrollwrap", "table: forward kernels"),
    ("reference/", ".fl-api .highlight", "signature: flash_ladder.common.op.flash_attn_func"),
)


def start(tab, part: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
    """Open the page of an interactive part; the next Tab is for what comes first in it."""
    tab.view(*size, scheme, phone=size == PHONE)
    tab.visit(f"primers/{PAGES[part]}/")
    before(tab, f"#fl-{part}")


def before(tab, selector: str) -> None:
    """Put the focus right before an element."""
    tab.run("window.start ??= Object.assign(document.createElement('i'), {tabIndex: -1})")
    tab.run(f"document.querySelector({selector!r}).before(start); start.focus()")


def reach(tab, name: str) -> None:
    """Press Tab from before the interactive part until what has this name has the focus."""
    before(tab, ".fl-interactive")
    for _ in range(10):
        tab.press("Tab")
        if tab.focused()[1] == name:
            return
    raise AssertionError(f"Tab does not reach {name!r}")


def status(tab) -> str:
    """The words that are told when they change, of which a page has one place."""
    assert tab.run("document.querySelectorAll('.fl-interactive [aria-live]').length") == 1
    assert tab.run("document.querySelector('.fl-interactive output').ariaLive") == "polite"
    return tab.run("document.querySelector('.fl-interactive output').textContent")


def press_each(tab, name: str, wanted: dict[str, str]) -> None:
    """Press keys where the focus is, on what has `name`: each leads to words, none moves it."""
    for key, words in wanted.items():
        tab.press(*key.split("+"))
        assert words in status(tab), key
        assert tab.focused()[1] == name


def table(tab) -> str:
    return tab.run("document.querySelector('.fl-interactive table').innerText")


def step(tab) -> list[str]:
    """Where the figure that has the focus stands: step, number of steps, words."""
    names = [f"aria-value{kind}" for kind in ("now", "max", "text")]
    return [tab.run(f"document.activeElement.getAttribute({name!r})") for name in names]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("part", CONTROLS)
def test_tab_reaches_each_control_by_name_and_shows_it(tab, part, scheme):
    start(tab, part, scheme=scheme)
    for control in CONTROLS[part]:
        tab.press("Tab")
        assert tab.focused() == control
        assert tab.run(RING), control
    tab.press("Tab")
    assert not tab.run("document.activeElement.closest('.fl-interactive') !== null")
    count = "'.fl-interactive :is(button, select, input, a, [tabindex])'"
    assert tab.run(f"document.querySelectorAll({count}).length") == len(CONTROLS[part])


@pytest.mark.parametrize("part", USES)
def test_controls_take_keys(tab, part):
    start(tab, part)
    for name, key, words, shown in USES[part]:
        reach(tab, name)
        press_each(tab, name, {key: words})
        assert shown in table(tab), name


def test_arrow_keys_move_the_softmax(tab):
    start(tab, "online-softmax")
    reach(tab, "tiles that have come")
    height = tab.run("scrollY")
    tab.press("ArrowRight", "ArrowRight")
    assert status(tab).startswith("Tile 2 of 6: no score exceeds m.")
    assert step(tab) == ["2", "6", "step 2 of 6: 24 scores, 2 tiles have come"]
    assert table(tab).count("\n") == 3  # caption, headings, two tiles
    wanted = {
        "End": "Tile 6 of 6: ",
        "ArrowRight": "Tile 6 of 6: ",
        "ArrowLeft": "Tile 5 of 6: a score lies ",
        "Home": "Nothing has come yet",
        "ArrowLeft+ArrowLeft": "Nothing has come yet",
        "ArrowUp+ArrowUp": "Tile 2 of 6: ",
        "ArrowDown": "Tile 1 of 6: ",
    }
    press_each(tab, "tiles that have come", wanted)
    tab.press("ArrowRight", control=True)  # keys with a modifier are the browser's
    assert status(tab).startswith("Tile 1 of 6: ")
    time.sleep(0.5)  # the page would have scrolled to its end or its start by now
    assert tab.run("scrollY") == height > 0


def test_arrow_keys_move_the_ring(tab):
    start(tab, "mbarrier")
    reach(tab, "steps taken")
    tab.press(*["ArrowRight"] * 6)
    said = "Step 6: MMA reads tile 0 in slot 0, arrives at empty[0]. Phase 0 of empty[0] ends."
    assert status(tab) == said
    assert step(tab) == ["6", "6", "step 6 of 6: slot 0: tile 0, 2 of 2 parts; slot 1: nothing yet"]
    assert "empty[0]\t1\t1\t0" in table(tab)
    wanted = {
        "ArrowLeft": "Step 5: MMA passes its wait at full[0] for parity 0",
        "Home": "A fresh ring",
        "ArrowLeft+ArrowLeft": "A fresh ring",
        "ArrowRight": "Step 1: LOAD passes its wait at empty[0] for parity 1",
        "End": "Step 6: MMA reads tile 0",
    }
    press_each(tab, "steps taken", wanted)


def test_a_planted_bug_ends_where_all_wait_or_at_a_fault(tab):
    start(tab, "mbarrier")
    reach(tab, "bug")
    tab.press("ArrowDown")
    assert "Planted: LOAD waits for a phase of empty that nobody will end." in status(tab)
    reach(tab, "steps taken")
    tab.press("ArrowRight")
    assert status(tab) == "Nobody can take a step: all wait." and step(tab)[0] == "0"
    reach(tab, "bug")
    tab.press("ArrowDown", "ArrowDown")
    reach(tab, "next step of LOAD")
    tab.press(*["Enter"] * 6)
    fault = "Fault, one arrival too many at full[0]. Restart."
    assert status(tab) == f"Step 6: {fault}"
    reach(tab, "steps taken")
    tab.press("ArrowRight")
    assert status(tab) == fault and step(tab)[:2] == ["6", "6"]
    tab.press("ArrowLeft")
    assert status(tab).startswith("Step 5: LOAD does not wait")


@pytest.mark.parametrize("page, selector, name", WIDE, ids=lambda value: value)
def test_what_scrolls_sideways_does_so_by_keys(tab, page, selector, name):
    tab.view(*PHONE, phone=True)
    tab.visit(page)
    wide = f"[...document.querySelectorAll({selector!r})].find((part) => part.tabIndex === 0"
    tab.wait_for(f"(window.wide = {wide} && part.ariaLabel.startsWith({name!r}))) !== undefined")
    tab.run("wide.id = 'wide'; 0")
    before(tab, "#wide")
    tab.press("Tab")
    role, told = tab.focused()
    assert role == "group" and told.startswith(name) and told.endswith(", scrolls sideways")
    assert tab.run(RING)
    tab.press("ArrowRight")
    tab.wait_for("wide.scrollLeft > 0")


def test_what_fits_is_no_stop_of_tab(tab):
    """The same part in a wide window: no role, no name, and back again in a narrow one."""
    tab.view(*DESKTOP)
    tab.visit("stages/05/")
    stops = "document.querySelectorAll('.fl-timeline[tabindex][role][aria-label]').length"
    assert tab.run(stops) == 0
    tab.view(*PHONE, phone=True)
    tab.wait_for(f"{stops} === 1")
    tab.view(*DESKTOP)
    tab.wait_for("document.querySelectorAll('.fl-timeline:is([role], [tabindex])').length === 0")


def test_fenced_code_scrolls_by_keys(tab):
    """Which the theme and the browser see to."""
    tab.view(*PHONE, phone=True)
    tab.visit("paths/no-gpu/")
    wide = "[...document.querySelectorAll('pre > code')].find((x) => x.scrollWidth > x.clientWidth)"
    tab.run(f"(window.wide = {wide}).parentElement.id = 'wide'; 0")
    before(tab, "#wide")
    for _ in range(3):  # a button to copy it comes first
        tab.press("Tab")
        if tab.run("document.activeElement === wide"):
            break
    tab.press("ArrowRight")
    tab.wait_for("wide.scrollLeft > 0")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("part", PAGES)
def test_without_scripts_tables_show_the_same(tab, part, size):
    tab.scripts(False)
    try:
        start(tab, part, size)
        shown = tab.run(f"document.querySelector('#fl-{part}').innerText")
        assert tab.run("document.querySelectorAll('.fl-interactive button').length") == 0
        assert tab.run("document.scrollingElement.scrollWidth <= innerWidth")
    finally:
        tab.scripts(True)
    given = INTERACTIVE[part]
    assert "Without JavaScript nothing moves here." in shown
    for rows in (given.rows(), *(rows for _, _, rows in given.more())):
        assert ["\t".join(row) in shown for row in rows] == [True] * len(rows)
    start(tab, part, size)
    assert "Without JavaScript" not in tab.run(f"document.querySelector('#fl-{part}').innerText")
