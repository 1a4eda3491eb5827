# SPDX-License-Identifier: Apache-2.0
"""Small pieces of PTX text: scoped blocks with fresh registers, calls, address expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class Scope:
    """One `{ }` block under construction; its registers and labels are its own.

    `number` makes the names unique in the module, so that blocks may nest.
    """

    number: int
    lines: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def register(self, kind: str) -> str:
        """A fresh register of `kind` ("b32", "b64", "pred", "f32", "b16")."""
        index = self.counts.get(kind, 0)
        self.counts[kind] = index + 1
        return f"%fl_{kind}_{self.number}_{index}"

    def label(self, name: str) -> str:
        """A label of this block; emit it with `add(label + ":")`."""
        return f"$fl_{name}_{self.number}"

    def add(self, *lines: str) -> Scope:
        """Append statements as written."""
        self.lines += lines
        return self

    def set(self, kind: str, text: str) -> str:
        """A fresh register holding `text` (a register or an immediate)."""
        name = self.register(kind)
        return self.add(f"mov.{kind} {name}, {text};") and name

    def place(self, operand: str) -> str:
        """A fresh b32 register with the address in shared or tensor memory that `operand` names."""
        base, offset = address(operand)  # a register or a symbol, and a constant
        where = self.set("b32", base)
        if offset != "0":
            self.add(f"add.u32 {where}, {where}, {offset};")
        return where

    def from_predicate(self, predicate: str) -> str:
        """A fresh b32 register: 1 when `predicate` (as `%p`, `!%p`, `0` or `1`) holds, else 0."""
        if predicate in ("0", "1"):
            return self.set("b32", predicate)
        name = self.register("b32")
        yes, no = ("0", "1") if predicate.startswith("!") else ("1", "0")
        return self.add(f"selp.b32 {name}, {yes}, {no}, {predicate.lstrip('!')};") and name

    def call(self, function: str, *arguments: tuple[str, str], returns: str = "") -> str:
        """Call an engine function with (kind, value) arguments; the register of its result."""
        result = self.register(returns) if returns else ""
        lines = ["{"]
        if returns:
            lines.append(f".param .{returns} fl_result;")
        for index, (kind, value) in enumerate(arguments):
            name = f"fl_a{index}"
            lines.append(f".param .{kind} {name}; st.param.{kind} [{name}], {value};")
        passed = ", ".join(f"fl_a{index}" for index in range(len(arguments)))
        head = "call (fl_result), " if returns else "call "
        lines.append(f"{head}{function}, ({passed});")
        if returns:
            lines.append(f"ld.param.{returns} {result}, [fl_result];")
        self.add(*lines, "}")
        return result

    def text(self) -> str:
        """The finished block."""
        declared = [
            f".reg .{kind} %fl_{kind}_{self.number}_<{count}>;"
            for kind, count in self.counts.items()
        ]
        return "\n".join(["{", *declared, *self.lines, "}"])


_ADDRESS = re.compile(r"\[\s*([^\]+]+?)\s*(?:\+\s*([^\]]+?))?\s*\]")


def address(operand: str) -> tuple[str, str]:
    """`[%r1+16]` as (base, offset); ValueError for other forms."""
    match = _ADDRESS.fullmatch(operand.strip())
    if not match:
        raise ValueError(f"address {operand!r} is not [register + constant]")
    return match[1], match[2] or "0"


def vector(operand: str) -> list[str]:
    """Registers of `{a, b}`; a single register as a list of one."""
    return [part.strip() for part in operand.strip().strip("{}").split(",")]
