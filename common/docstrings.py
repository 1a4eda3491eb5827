# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the public interface as data: the sections that the reference page shows.

A section starts with its title at the left margin. Args and Attributes have an indented entry for
each name, or for several with commas between; Returns and Raises are text, up to an empty line.
Runs: host.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from dataclasses import dataclass

LISTS = ("Args", "Attributes")
TITLE = re.compile(rf"({'|'.join(LISTS)}|Returns|Raises):(?: (.*))?$")
ENTRY = re.compile(r"([\w*]+(?:, [\w*]+)*): (.*)$")


@dataclass
class Section:
    """Part of a docstring: its title, "" for plain text; lines, or entries (names, text)."""

    title: str
    lines: list[str] = dataclasses.field(default_factory=list)
    entries: list[tuple[tuple[str, ...], str]] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """The lines as one."""
        return " ".join(line.strip() for line in self.lines)


def sections(docstring: str | None) -> list[Section]:
    """The sections of a docstring, in its order; paragraphs of plain text are sections as well."""
    found = [Section("")]
    for line in inspect.cleandoc(docstring or "").splitlines():
        title = TITLE.match(line)
        is_list = found[-1].title in LISTS
        if title:
            found.append(Section(title[1], [title[2]] if title[2] else []))
        elif is_list and line.startswith(" "):
            found[-1].lines.append(line)
        elif line and not is_list:
            found[-1].lines.append(line)
        elif line or not is_list:
            found.append(Section("", [line] if line else []))
    for section in found:
        if section.title in LISTS:
            section.entries = _entries(section.lines)
    return [section for section in found if section.lines]


def _entries(lines: list[str]) -> list[tuple[tuple[str, ...], str]]:
    entries: list[tuple[tuple[str, ...], str]] = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        entry = ENTRY.match(line)
        if entry:
            names = tuple(name.lstrip("*") for name in entry[1].split(", "))
            entries.append((names, entry[2]))
        elif entries:
            names, text = entries[-1]
            entries[-1] = names, f"{text} {line.strip()}"
    return entries


def parameters(subject) -> list[inspect.Parameter]:
    """What a caller gives a function or method."""
    given = inspect.signature(subject).parameters.values()
    return [parameter for parameter in given if parameter.name != "self"]


def fields(subject: type) -> dict[str, str]:
    """Names and annotations of the fields that dataclass `subject` itself declares."""
    return dict(vars(subject).get("__annotations__", {})) if _is_data(subject) else {}


def _is_data(subject) -> bool:
    return isinstance(subject, type) and dataclasses.is_dataclass(subject)


def undocumented(subject) -> list[str]:
    """Names of parameters, or of a dataclass's own fields, that the docstring has no entry for."""
    known = {
        name
        for section in sections(subject.__doc__)
        for names, _ in section.entries
        for name in names
    }
    wanted = fields(subject) if isinstance(subject, type) else [x.name for x in parameters(subject)]
    return [name for name in wanted if name not in known]
