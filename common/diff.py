# SPDX-License-Identifier: Apache-2.0
"""The difference between two stages: the lesson itself, and how large it is.

`diff_file` and `diff_stages` give what a reader sees, hunk by hunk; `stage_diff_stats` counts what
changed in the code alone. The pages, the command line and the tests share them. Runs: host.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

FILE_ORDER = (
    "config.py",
    "kernel.py",
    "load.py",
    "mma.py",
    "softmax.py",
    "correction.py",
    "epilogue.py",
    "backward.py",
    "model.py",
)
MOVED_MIN_CHARS = 8  # letters and digits of a line that can count as moved; ")" or "else:" cannot


@dataclass(frozen=True)
class FileDiff:
    """How one file differs between two stage folders.

    `state` is "changed", "new", "gone" or "same"; each hunk is a tuple of lines that starts with
    its "@@" line; `command` shows all of it in a terminal.
    """

    name: str
    state: str
    header: tuple[str, str]
    hunks: tuple[tuple[str, ...], ...]
    command: str

    @property
    def lines(self) -> list[str]:
        """The whole unified diff; empty when the file is the same in both stages."""
        if not self.hunks:
            return []
        return [*self.header, *(line for hunk in self.hunks for line in hunk)]

    def first_lines(self, limit: int) -> list[str]:
        """The header and the first hunks that fit into `limit` lines together.

        When not even the first hunk fits, its beginning is given.
        """
        if len(self.lines) <= limit or not self.hunks:
            return self.lines
        shown = list(self.header)
        for hunk in self.hunks:
            if len(shown) + len(hunk) > limit:
                break
            shown.extend(hunk)
        return shown if len(shown) > len(self.header) else self.lines[:limit]


@dataclass(frozen=True)
class DiffStats:
    """Size of a step in code lines, without comments, blank lines, docstrings and test files.

    `moved` counts lines that left one place and reappeared in another (or at another indentation);
    each is also one added and one removed line.
    """

    added: int
    removed: int
    moved: int
    files: tuple[str, ...]

    @property
    def changed(self) -> int:
        """Added plus removed lines."""
        return self.added + self.removed

    @property
    def moved_share(self) -> float:
        """Share of the changed lines that only moved, 0 ... 1."""
        return 2 * self.moved / self.changed if self.changed else 0.0


def stage_files(*folders: Path) -> list[str]:
    """Names of the Python files in any of `folders`, in the order in which a stage is read."""
    names = {path.name for folder in folders for path in folder.glob("*.py")}
    known = [name for name in FILE_ORDER if name in names]
    return known + sorted(names - set(known))


def _range(start: int, length: int) -> str:
    """One side of an "@@" line, as git and diff write it."""
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


def _hunk(old: list[str], new: list[str], group) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    before = _range(first[1], last[2] - first[1])
    after = _range(first[3], last[4] - first[3])
    lines = [f"@@ -{before} +{after} @@"]
    for tag, a_from, a_to, b_from, b_to in group:
        if tag == "equal":
            lines.extend(f" {line}" for line in old[a_from:a_to])
        else:
            lines.extend(f"-{line}" for line in old[a_from:a_to])
            lines.extend(f"+{line}" for line in new[b_from:b_to])
    return tuple(lines)


def _read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _tag(folder: Path) -> str:
    """How the folder of a stage, or of a part in one, is called below stages/."""
    return folder.name if folder.name.isdigit() else f"{folder.parent.name}/{folder.name}"


def diff_file(a: Path, b: Path, name: str, context: int = 3) -> FileDiff:
    """How file `name` differs between the stage folders `a` and `b`.

    Raises FileNotFoundError when neither has the file.
    """
    paths = (a / name, b / name)
    exists = [path.is_file() for path in paths]
    if not any(exists):
        raise FileNotFoundError(f"{name} is neither in stages/{_tag(a)} nor in stages/{_tag(b)}")
    old, new = (_read(path) for path in paths)
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    hunks = tuple(_hunk(old, new, group) for group in matcher.get_grouped_opcodes(context))
    shown = [
        f"stages/{_tag(folder)}/{name}" if there else "/dev/null"
        for folder, there in zip((a, b), exists)
    ]
    states = {(True, True): "changed" if hunks else "same", (False, True): "new"}
    return FileDiff(
        name=name,
        state=states.get(tuple(exists), "gone"),
        header=(f"--- {shown[0]}", f"+++ {shown[1]}"),
        hunks=hunks,
        command=f"git diff --no-index {shown[0]} {shown[1]}",
    )


def diff_stages(a: Path, b: Path, context: int = 3) -> list[FileDiff]:
    """The Python files that differ between the stage folders `a` and `b`, in reading order."""
    diffs = [diff_file(a, b, name, context) for name in stage_files(a, b)]
    return [diff for diff in diffs if diff.state != "same"]


def _docstring_lines(source: str) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                statement = node.body[0]
                numbers.update(range(statement.lineno, statement.end_lineno + 1))
    return numbers


def code_lines(source: str) -> list[str]:
    """The lines of Python `source` that are code: no comments, blank lines or docstrings.

    Indentation stays; a comment behind a statement is cut off.
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    skipped = _docstring_lines(source)
    stripped = (line.rstrip() for number, line in enumerate(lines, 1) if number not in skipped)
    return [line for line in stripped if line]


def _changes(a: Path, b: Path) -> tuple[list[str], list[str]]:
    """Code lines that file `b` lacks of file `a`, and those that it adds."""
    old, new = (
        code_lines(path.read_text(encoding="utf-8")) if path.is_file() else [] for path in (a, b)
    )
    removed, added = [], []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for tag, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if tag != "equal":
            removed.extend(old[a_from:a_to])
            added.extend(new[b_from:b_to])
    return removed, added


def _movable(lines: list[str]) -> Counter:
    stripped = (line.strip() for line in lines)
    return Counter(line for line in stripped if sum(map(str.isalnum, line)) >= MOVED_MIN_CHARS)


def stage_diff_stats(a: Path, b: Path, without: tuple[str, ...] = ()) -> DiffStats:
    """Size of the step from stage folder `a` to stage folder `b`.

    Only code counts: comments, blank lines, docstrings, README, evidence and test files do not.
    without: names of further files that do not.
    """
    removed: list[str] = []
    added: list[str] = []
    files = []
    for name in stage_files(a, b):
        if name.startswith("test_") or name in without:
            continue
        gone, came = _changes(a / name, b / name)
        removed.extend(gone)
        added.extend(came)
        if gone or came:
            files.append(name)
    moved = _movable(removed) & _movable(added)
    return DiffStats(len(added), len(removed), moved.total(), tuple(files))
