# SPDX-License-Identifier: Apache-2.0
"""How long a page of the built site takes a careful reader. Runs: host, on the HTML alone.

What is folded does not count: it is there on request. A table or drawing counts as a whole, by the
seconds that readers of these pages needed; a short table half as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from .site_checks import VOID

WORDS_A_MINUTE = 200
TABLE_SECONDS, SHORT_TABLE_SECONDS, DRAWING_SECONDS = 60, 30, 60
SHORT_TABLE_ROWS = 6  # with the head
CODE_LINE_SECONDS = 2
UNREAD = "script", "style", "svg", "nav"
LISTING, LINE_NUMBERS = "highlighttable", "linenos"  # classes of a table of code, of its margin


@dataclass
class Reading:
    """What of a page is to be read: words of prose, rows of each table, drawings, lines of code."""

    words: int
    tables: list[int]
    drawings: int
    code_lines: int

    @property
    def minutes(self) -> float:
        """The time for all of it."""
        tables = sum(
            SHORT_TABLE_SECONDS if rows <= SHORT_TABLE_ROWS else TABLE_SECONDS
            for rows in self.tables
        )
        seconds = tables + DRAWING_SECONDS * self.drawings + CODE_LINE_SECONDS * self.code_lines
        return self.words / WORDS_A_MINUTE + seconds / 60


class _Counter(HTMLParser):
    """Counts what is in the article of a page, outside of <details> but with their summaries."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.found = Reading(0, [], 0, 0)
        self._open: list[tuple[str, str]] = []  # tags with their classes
        self.feed(text)
        self.close()

    def _inside(self, *tags: str) -> bool:
        return any(tag in tags for tag, _ in self._open)

    def _shown(self) -> bool:
        if not self._inside("article") or self._inside(*UNREAD):
            return False
        return self._inside("summary") or not self._inside("details")

    def _in_listing(self) -> bool:
        return any(kind == LISTING for _, kind in self._open)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        if self._shown() and (tag == "img" or (tag == "svg" and ("role", "img") in attrs)):
            self.found.drawings += 1
        if tag not in VOID:
            self._open.append((tag, kind))
        if self._shown() and not self._in_listing():
            if tag == "table":
                self.found.tables.append(0)
            elif tag == "tr":
                self.found.tables[-1] += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside(tag):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self._shown() or LINE_NUMBERS in (kind for _, kind in self._open):
            return
        if self._inside("pre"):
            self.found.code_lines += data.count("\n")
        elif not self._inside("table"):
            self.found.words += len(data.split())


def reading_of(path: Path) -> Reading:
    """What there is to read in an HTML file."""
    return _Counter(path.read_text(encoding="utf-8")).found
