# SPDX-License-Identifier: Apache-2.0
"""Numbered annotations of a diff: a marker at a changed line, and below why the line changed.

They stand in the body of a fence `stage-diff`, behind its first line, as a reader of the bare file
sees them:

    git diff --no-index stages/05/softmax.py stages/06/softmax.py
    1 | if not step >= | A NaN makes every comparison false.
      This way the row moves, to NaN.

The text between the bars is part of a changed line that is shown; the first such line is meant.
Runs: host, while the site is built.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, replace

NOTE = re.compile(r"(\d+) \| (.+?) \| (.+)")


@dataclass(frozen=True)
class Note:
    """Annotation `number` of the line that contains `text`; `line` is its index in the diff."""

    number: int
    text: str
    comment: str
    line: int = -1


def parse(body: str) -> list[Note]:
    """The annotations of a fence's body, whose first line is something else.

    Raises ValueError for a line that is none, and for numbers that are not 1, 2, 3, ...
    """
    notes: list[Note] = []
    for line in body.strip().splitlines()[1:]:
        found = NOTE.fullmatch(line.rstrip())
        if found:
            notes.append(Note(int(found[1]), found[2].strip(), found[3].strip()))
        elif notes and line[:2].isspace() and line.strip():
            comment = f"{notes[-1].comment} {line.strip()}"
            notes[-1] = replace(notes[-1], comment=comment)
        elif line.strip():
            raise ValueError(f"{line!r} is no annotation: NUMBER | PART OF A LINE | COMMENT")
    numbers = [note.number for note in notes]
    if numbers != list(range(1, len(notes) + 1)):
        raise ValueError(f"annotations are numbered {numbers}, not from 1 on")
    return notes


def place(notes: list[Note], lines: list[str]) -> list[Note]:
    """The annotations with their lines in a diff, whose first two lines name the files.

    Raises ValueError when no changed line has the text, or when numbers do not follow the lines.
    """
    placed: list[Note] = []
    for note in notes:
        changed = (i for i, line in enumerate(lines) if i > 1 and line[0] in "+-")
        at = next((i for i in changed if note.text in lines[i]), None)
        if at is None:
            raise ValueError(f"annotation {note.number}: no changed line shown has {note.text!r}")
        if placed and at < placed[-1].line:
            raise ValueError(f"annotation {note.number} is of a line before that of the last")
        placed.append(replace(note, line=at))
    return placed


def markers(shown: str, notes: list[Note], name: str) -> str:
    """HTML of a diff, a line of it a line, with a marker at each annotated line; see `comments`."""
    lines = shown.split("\n")
    for note in reversed(notes):  # so that two of one line stand in order
        marker = f'<a class="fl-annotation" href="#{name}-{note.number}">{note.number}</a>'
        lines[note.line] = marker + lines[note.line]
    return "\n".join(lines)


def comments(notes: list[Note], name: str) -> str:
    """The comments as an ordered list, to which the markers of `name` lead; `code` in backticks."""
    items = [
        f'<li id="{name}-{note.number}">'
        + re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(note.comment))
        + "</li>"
        for note in notes
    ]
    return f'<ol class="fl-notes">\n{"".join(items)}\n</ol>' if items else ""
