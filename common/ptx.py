# SPDX-License-Identifier: Apache-2.0
"""Reads PTX as text: statements, scopes of names, constant addresses and a hash.

Nothing here executes, translates or rewrites PTX. ``read`` splits a module into statements, keeps
the line each came from, and remembers which ``{ }`` block declares which name, so that the scoped
registers of inline assembly (two blocks that both declare ``P1``) stay apart. ``Values`` follows
moves and additions of registers that are written once, far enough to tell the constant behind
``mbarrier.init`` or the barrier behind ``[%r28+32]``. Grammar: PTX ISA, chapters 4 and 5.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class PtxError(ValueError):
    """The text is not PTX that this reader understands; the message gives the line."""


@dataclass(frozen=True)
class Statement:
    """One label, directive or instruction of a PTX module.

    ``line`` counts from 1. ``predicate`` is ``"%p1"``, ``"!%p1"`` or None. ``opcode`` carries its
    modifiers (``"add.rm.f32x2"``); it is ``":"`` for a label, ``"{"`` and ``"}"`` for a block, and
    starts with a dot for a directive (linkage words such as ``.visible`` are left out).
    ``operands`` are as written; of a label and of a function its name. ``text`` has comments
    removed and white space squeezed. ``block`` is the index in ``Program.blocks`` of its block.
    """

    line: int
    predicate: str | None
    opcode: str
    operands: tuple[str, ...]
    text: str
    block: int

    @property
    def is_instruction(self) -> bool:
        """True for what a thread executes: no label, brace or directive."""
        return self.opcode[0].isalpha()


@dataclass
class Block:
    """A ``{ }`` scope: its parent's index (None for the module), its depth and declared names."""

    parent: int | None
    depth: int
    names: set[str] = field(default_factory=set)
    families: set[str] = field(default_factory=set)  # `%r<9>` declares the family `%r`

    def declares(self, name: str) -> bool:
        """Whether a `.reg` of this block introduces `name`."""
        return name in self.names or name.rstrip("0123456789") in self.families


@dataclass(frozen=True)
class Program:
    """A PTX module: its statements in order and the blocks they stand in."""

    statements: tuple[Statement, ...]
    blocks: tuple[Block, ...]

    def resolve(self, name: str, block: int) -> str:
        """Return `name` made unique: ``name@b`` with the block that declares it as a register."""
        at: int | None = block
        while at is not None:
            if self.blocks[at].declares(name):
                return f"{name}@{at}"
            at = self.blocks[at].parent
        return name

    def depth(self, statement: Statement) -> int:
        """Nesting of braces: 0 in the module, 1 in a function, more in inline assembly."""
        return self.blocks[statement.block].depth

    def module(self) -> list[Statement]:
        """Return the statements outside all functions."""
        return [s for s in self.statements if s.block == 0 and s.opcode not in "{}"]

    def entries(self) -> dict[str, list[Statement]]:
        """Return, for each kernel with a body, its header and the statements of the body."""
        found: dict[str, list[Statement]] = {}
        body: list[Statement] | None = None
        for statement in self.statements:
            if statement.opcode == ".entry":
                body = found.setdefault(statement.operands[0], [])
            elif statement.block == 0 and statement.opcode not in "{}":
                body = None
            if body is not None:
                body.append(statement)
        return {name: statements for name, statements in found.items() if len(statements) > 1}


# A line break ends these, everything else ends at a semicolon.
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc|b8|b16|b32|b64)\b")
_LINKAGE = re.compile(r"\.(visible|extern|weak|common)\b\s*")
_FUNCTION = re.compile(r"\.(entry|func)\b")
_GUARD = re.compile(r"@ ?(!?) ?(\S+) ")
_LABEL = re.compile(r"[\w$%.]+")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|::|[\n;{}:]|[^\n;{}:"/]+|.', re.DOTALL)


def read(text: str) -> Program:
    """Split a PTX module into statements.

    Raises PtxError for braces that do not pair and for text after the last statement.
    """
    return _Reader().read(text.rstrip("\0"))


class _Reader:
    """The state of ``read``: text collected so far, open operand braces, open blocks."""

    def __init__(self):
        self.statements: list[Statement] = []
        self.blocks = [Block(None, 0)]
        self.block, self.line, self.start, self.vectors = 0, 1, 1, 0
        self.pending = ""
        self.opened: list[int] = []  # line of each '{' that is still open

    def read(self, text: str) -> Program:
        for match in _TOKEN.finditer(text):
            token = match[0]
            self._take(token)
            self.line += token.count("\n")
        if self.block:
            raise PtxError(f"line {self.opened[-1]}: this '{{' is not closed")
        if self.pending.strip():
            self._last_line()
        return Program(tuple(self.statements), tuple(self.blocks))

    def _last_line(self):
        """A directive needs no semicolon; anything else was cut off."""
        text = " ".join(self.pending.split())
        if not text.startswith("."):
            raise PtxError(f"line {self.start}: {text!r} after the last statement")
        self._finish()

    def _take(self, token: str):
        waiting = self.pending.strip()
        if token.startswith(("//", "/*")):
            self.pending += " "
        elif token == "\n":
            self._finish() if _LINE_DIRECTIVE.match(waiting) else self._add(" ")
        elif token == ";":
            self._finish()
        elif token == "{" and not self._in_operands(waiting):
            self._finish()
            self._emit("{", (), "{")
            self.blocks.append(Block(self.block, self.blocks[self.block].depth + 1))
            self.opened.append(self.line)
            self.block = len(self.blocks) - 1
        elif token == "}" and not self.vectors:
            self._finish()
            if not self.block:
                raise PtxError(f"line {self.line}: '}}' without '{{'")
            self.block = self.blocks[self.block].parent
            self.opened.pop()
            self._emit("}", (), "}")
        elif token == ":" and _LABEL.fullmatch(waiting) and not waiting.startswith("."):
            self._emit(":", (waiting,), waiting + ":")
        else:
            self.vectors += (token == "{") - (token == "}")
            self._add(token)

    def _in_operands(self, waiting: str) -> bool:
        """Whether a brace that follows `waiting` opens a vector operand or an initialiser."""
        if not waiting or waiting.startswith(".section"):
            return False
        return self.vectors > 0 or not _FUNCTION.search(waiting)

    def _add(self, token: str):
        if not self.pending.strip():
            self.start = self.line
        self.pending += token

    def _finish(self):
        """End the pending statement."""
        text = " ".join(self.pending.split())
        self.vectors = 0
        if not text:
            self.pending = ""
        elif _LINKAGE.match(text) or text.startswith("."):
            self._directive(text)
        else:
            guard = _GUARD.match(text)
            opcode, _, operands = text[guard.end() if guard else 0 :].partition(" ")
            predicate = guard[1] + guard[2] if guard else None
            self._emit(opcode, split_operands(operands), text, predicate)

    def _directive(self, text: str):
        body = text
        while _LINKAGE.match(body):
            body = _LINKAGE.sub("", body, count=1)
        opcode, _, rest = body.partition(" ")
        if opcode in (".entry", ".func"):
            name = re.search(r"([\w$%.]+)\s*(?:\(|$|\.)", re.sub(r"^\s*\([^)]*\)", "", rest))
            self._emit(opcode, (name[1] if name else "",), text)
            return
        if opcode == ".reg":
            for name in re.sub(r"(?<![\w$%])\.\w+", "", rest).split(","):
                family = re.fullmatch(r"\s*([\w$%]+)<\d+>\s*", name)
                target = self.blocks[self.block]
                (target.families if family else target.names).add(
                    family[1] if family else name.strip()
                )
        self._emit(opcode, split_operands(rest), text)

    def _emit(self, opcode: str, operands, text: str, predicate: str | None = None):
        line = self.line if opcode in "{}" else self.start
        self.statements.append(
            Statement(line, predicate, opcode, tuple(operands), text, self.block)
        )
        self.pending = ""


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets: ``"{a, b}, [c]"`` gives ``("{a, b}", "[c]")``."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return (*parts, part.strip()) if part.strip() else tuple(parts)


def registers(operand: str) -> list[str]:
    """Return the names in an operand, such as both of ``"{%r1, %r2}"`` or ``"%r1|%p2"``."""
    return re.findall(r"[%$A-Za-z_][\w$%.]*", re.sub(r"\b0[xfdXFD][0-9a-fA-F]+", "", operand))


def immediate(operand: str) -> int | None:
    """Return the value of an integer literal, None for anything else."""
    match = re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", operand.strip())
    if not match:
        return None
    digits = match[2]
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return (-1 if match[1] else 1) * int(digits, 8 if octal else 0)


def ptx_hash(text: str) -> str:
    """Return the SHA-256 of what the PTX says, as 64 hex digits.

    Left out: lines that hold only a ``//`` comment (they name the compiler build), the ``.version``
    line (the cu12 and cu13 libraries of the DSL write 8.8 and 9.4), ``.file`` and ``.loc`` (paths
    and line numbers, present only with ``--generate-line-info``), white space at the end of a line,
    empty lines and trailing NUL bytes. The ``.target`` line and kernel names stay in. A kernel name
    repeats the arguments the kernel was specialised on: a Constexpr string that holds a path, or an
    object whose class comes from ``__main__``, makes the hash depend on where it was built.
    """
    kept = []
    for line in text.rstrip("\0 \n\t\r").splitlines():
        line = line.rstrip()
        if line and not re.match(r"\s*(//|\.version\b|\.file\b|\.loc\b)", line):
            kept.append(line)
    return hashlib.sha256(("\n".join(kept) + "\n").encode()).hexdigest()


@dataclass(frozen=True)
class Value:
    """What is known of a register: `base` symbol + `offset` + an unknown rest unless `exact`."""

    base: str = ""
    offset: int = 0
    exact: bool = False

    @property
    def constant(self) -> int | None:
        """The integer it is, None if it is an address or not known."""
        return self.offset if self.exact and not self.base else None

    @property
    def place(self) -> tuple[str, int] | None:
        """(symbol, byte offset) with unknown indices taken as 0; None without a symbol."""
        return (self.base, self.offset) if self.base else None


_UNKNOWN = Value()
_NO_RESULT = re.compile(
    r"(st|bra|brx|bar|barrier|red|ret|exit|trap|setmaxnreg|fence|membar|prefetch|call|cp|griddepcontrol"
    r"|mbarrier\.init|mbarrier\.inval|nanosleep|stmatrix|tcgen05\.(?!ld))\b"
)
_PASS_ON = re.compile(r"(mov|cvta|cvt|mapa|shfl\.sync\.idx)\b")
_MAX_STEPS = 64


class Values:
    """Constants and addresses of one kernel, from registers that are written exactly once."""

    def __init__(self, program: Program, statements: list[Statement]):
        self.program = program
        self.writers: dict[str, list[Statement]] = {}
        self.symbols = {name for s in program.module() for name in _declared(s)}
        self.symbols |= {name for s in statements for name in _declared(s)}
        for statement in statements:
            for name in results(statement):
                key = program.resolve(name, statement.block)
                self.writers.setdefault(key, []).append(statement)
        self._known: dict[str, Value] = {}

    def of(self, operand: str, block: int, steps: int = _MAX_STEPS) -> Value:
        """Return what is known of an operand (`%r1`, `12`, `symbol`, `[%r1+8]`) used in `block`."""
        operand = operand.strip()
        if operand.startswith("["):
            return self._sum(re.findall(r"[+-]?\s*[\w$%.]+", operand[1:-1]), block, steps)
        number = immediate(operand)
        if number is not None:
            return Value("", number, True)
        key = self.program.resolve(operand, block)
        if key == operand and operand in self.symbols:
            return Value(operand, 0, True)
        if key not in self._known:
            if len(self.writers.get(key, ())) != 1 or not steps:
                return _UNKNOWN
            self._known[key] = _UNKNOWN  # what a register that depends on itself sees
            self._known[key] = self._evaluate(self.writers[key][0], steps - 1)
        return self._known[key]

    def _sum(self, terms: list[str], block: int, steps: int) -> Value:
        total = Value("", 0, True)
        for term in terms:
            sign, name = (-1, term[1:]) if term.startswith("-") else (1, term.lstrip("+"))
            total = _add(total, self.of(name, block, steps), sign)
        return total

    def _evaluate(self, statement: Statement, steps: int) -> Value:
        operation = statement.opcode.split(".")[0]
        inputs = [self.of(o, statement.block, steps) for o in statement.operands[1:]]
        if statement.operands[0].startswith("{") or not inputs:
            return _UNKNOWN
        if _PASS_ON.match(statement.opcode):
            return inputs[0]
        if operation in ("add", "sub"):
            return _add(inputs[0], inputs[1], -1 if operation == "sub" else 1)
        known = [value.constant for value in inputs]
        if operation == "or" and None in known:
            return _add(inputs[0], inputs[1], 1)  # compilers write base | offset for a sum
        if operation == "and" and inputs[0].base:
            return inputs[0]  # alignment, or the pair's leader in a cluster address
        if None in known:
            return _UNKNOWN
        folded = _FOLD.get(operation)
        return Value("", folded(*known), True) if folded else _UNKNOWN


_FOLD = {
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "xor": lambda a, b: a ^ b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> min(b, 64),
}


def _add(a: Value, b: Value, sign: int) -> Value:
    if b.base and (a.base or sign < 0):
        return _UNKNOWN
    return Value(a.base or b.base, a.offset + sign * b.offset, a.exact and b.exact)


def _declared(statement: Statement) -> Iterator[str]:
    """Names of the variables (not registers) that a directive declares."""
    if statement.opcode in (".shared", ".global", ".const", ".local"):
        yield from re.findall(r"([A-Za-z_$%][\w$]*)\s*(?:\[|=|,|;|$)", statement.text)


def results(statement: Statement) -> list[str]:
    """Return the registers that an instruction writes, as named in the text."""
    if not statement.is_instruction or _NO_RESULT.match(statement.opcode):
        return []
    first = statement.operands[0] if statement.operands else "["
    return [] if first.startswith("[") else registers(first)
