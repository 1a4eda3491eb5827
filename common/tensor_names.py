# SPDX-License-Identifier: Apache-2.0
"""The names of tensors in the stages' kernels, read from their syntax trees.

`names()` has each with the shapes that comments and docstrings beside it give, and the kernels that
use it. Runs: host; no kernel is imported.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

HOST = {"config.py", "model.py", "__init__.py", "test_stage.py"}  # files without kernel code
NAME = re.compile(r"[a-ce-z]d?[A-Z]\w*")  # memory, d for a gradient, operand: mdQ_accum, tOrP
SHAPE = re.compile(r"\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)")  # with one level of modes inside
DOCUMENTED = re.compile(rf"((?:\b{NAME.pattern}(?:, | and ))*\b{NAME.pattern}) ({SHAPE.pattern})")
PREFIXES = {
    "m": r"m.*",
    "g": r"g.*",
    "s": r"s.*",
    "r": r"r.*",
    "tr": r"td?[A-Z]rd?[A-Z].*",
    "tt": r"td?[A-Z]td?[A-Z].*",
    "tg": r"td?[A-Z]gd?[A-Z].*",
    "ts": r"td?[A-Z]sd?[A-Z].*",
    "t": r"td?[A-Z][^a-z]*(_\w+)?",
}  # in this order: how the names of each group look


@dataclass
class Use:
    """Where a name occurs: tags of kernels ("07/preprocess"), and the shapes given for it."""

    tags: set[str] = field(default_factory=set)
    shapes: list[str] = field(default_factory=list)

    def note(self, shape: str) -> None:
        """Add a shape, once."""
        if shape not in self.shapes:
            self.shapes.append(shape)


def prefix(name: str) -> str:
    """The group of PREFIXES that a name belongs to; ValueError for a name outside all."""
    for group, pattern in PREFIXES.items():
        if re.fullmatch(pattern, name):
            return group
    raise ValueError(f"{name!r} has no prefix of {list(PREFIXES)}")


def kernel_files(stages: Path) -> list[Path]:
    """The files with kernel code below a folder of numbered stages, in their order."""
    found = stages.glob("[0-9][0-9]/**/*.py")
    return sorted(path for path in found if path.name not in HOST)


def names(stages: Path) -> dict[str, Use]:
    """Every tensor name in the kernels below folder `stages`, sorted; files may be of any size."""
    uses: dict[str, Use] = {}
    for path in kernel_files(stages):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        tag = path.parent.relative_to(stages).as_posix()
        for name in _used(tree):
            uses.setdefault(name, Use()).tags.add(tag)
        for name, shape in (*_commented(tree, source), *_documented(tree)):
            if name in uses:
                uses[name].note(shape)
    return dict(sorted(uses.items()))


def _used(tree: ast.AST) -> set[str]:
    """Names of variables and parameters, and keys such as smem["sQ"]."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.add(str(node.slice.value))
    return {name for name in found if NAME.fullmatch(name)}


def _commented(tree: ast.AST, source: str) -> list[tuple[str, str]]:
    """(name, shape) of assignments with a comment `# (…)` on their last line."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
    for node in ast.walk(tree):
        comment = comments.get(getattr(node, "end_lineno", None), "")
        if not isinstance(node, ast.Assign) or not comment.startswith("("):
            continue
        targets = [
            item.id
            for target in node.targets
            for item in getattr(target, "elts", [target])
            if isinstance(item, ast.Name)
        ]
        shapes = SHAPE.findall(comment)
        each = shapes if len(shapes) == len(targets) else shapes[:1] * len(targets)
        found += zip(targets, each)
    return found


def _documented(tree: ast.AST) -> list[tuple[str, str]]:
    """(name, shape) of docstrings that say `sQ, sK (TILE, d)`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            text = " ".join((ast.get_docstring(node) or "").split())
            for listed, shape in DOCUMENTED.findall(text):
                if "," in shape:
                    found += [(name, shape) for name in NAME.findall(listed)]
    return found
