# SPDX-License-Identifier: Apache-2.0
"""Annotations of diffs: read, placed, shown, and refused when they no longer fit."""

import re

import pytest
from flash_ladder.common import annotations, fences

BODY = """git diff --no-index a b
1 | B = 2 | Why it
  goes on.
2 | C = | A `code`, <b>.
"""
LINES = ["--- a", "+++ B = 2", "@@ -1 +1 @@", " B = 2", "-B = 2", "+B = 2", "+C = 3", "-A"]


def test_annotations_are_read_with_their_continuations():
    first, second = annotations.parse(BODY)
    assert (first.number, first.text, first.comment) == (1, "B = 2", "Why it goes on.")
    assert (second.number, second.text) == (2, "C =")
    assert annotations.parse("git diff a b") == [] == annotations.parse("")
    (barred,) = annotations.parse("x\n1 | a | b | c")
    assert (barred.text, barred.comment) == ("a", "b | c")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("1 | B = 2", "'1 | B = 2' is no annotation"),
        ("more words", "'more words' is no annotation"),
        ("  goes on", "is no annotation"),
        ("2 | a | b", r"are numbered \[2\]"),
        ("1 | a | b\n1 | c | d", r"are numbered \[1, 1\]"),
    ],
)
def test_other_lines_are_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        annotations.parse(f"git diff a b\n{lines}")


def test_the_first_changed_line_is_meant():
    """Neither a line of the header nor one that stays."""
    assert [note.line for note in annotations.place(annotations.parse(BODY), LINES)] == [4, 6]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x\n1 | D = 4 | gone", "annotation 1: no changed line shown has 'D = 4'"),
        ("x\n1 | +1 @@ | none of the code", "no changed line"),
        ("x\n1 | C = 3 | late\n2 | B = 2 | early", "annotation 2 is of a line before"),
    ],
)
def test_annotations_that_do_not_fit_are_refused(body, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        annotations.place(annotations.parse(body), LINES)


def test_markers_lead_to_the_comments():
    notes = annotations.place(annotations.parse(BODY + "3 | C = 3 | Both.\n"), LINES)
    shown = annotations.markers("\n".join(LINES), notes, "n").split("\n")
    link = '<a class="fl-annotation" href="#n-{0}">{0}</a>'
    assert shown[4] == link.format(1) + "-B = 2"
    assert shown[6] == link.format(2) + link.format(3) + "+C = 3"
    assert [line for i, line in enumerate(shown) if i not in (4, 6)] == [*LINES[:4], "+B = 2", "-A"]
    listed = annotations.comments(notes, "n")
    assert '<li id="n-2">A <code>code</code>, &lt;b&gt;.</li>' in listed
    assert re.findall(r'id="n-(\d)"', listed) == ["1", "2", "3"]
    assert annotations.comments([], "n") == ""


PAGES = sorted(fences.ROOTS["stages"].rglob("README.md"))[1:]  # stage 01 follows no other


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_each_page_annotates_its_main_diff(page):
    """Two to four annotations of one diff at least; the command comes first in every body."""
    text = page.read_text(encoding="utf-8")
    bodies = re.findall(r"```stage-diff .*\n((?:.*\n)*?)```", text)
    assert all(body.startswith("git diff --no-index stages/") for body in bodies)
    found = [len(annotations.parse(body)) for body in bodies]
    assert 2 <= max(found) <= 4, found
