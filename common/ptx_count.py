# SPDX-License-Identifier: Apache-2.0
"""Counts what one PTX kernel contains: barriers, register budgets, tensor memory, MMAs, copies.

Text in, numbers out: PTX is never executed or translated. Import from ``facts``, which gives these
numbers names and compares them with a declaration.
"""

import collections
import dataclasses
import re
from dataclasses import dataclass

from .ptx import Program, Statement, Values, read


@dataclass(frozen=True)
class PtxFacts:
    """What one PTX kernel contains; all counts are static.

    Launch: ``entry``, ``target`` (as ``sm_100a``), ``version``, ``threads`` per CTA (None if
    neither reqntid nor maxntid fixes it), ``cluster`` CTAs (None if not fixed), ``max_registers``,
    ``min_ctas_per_sm``. Memory in bytes: ``static_shared_bytes``, ``local_bytes`` (a ``.local``
    array, such as a spilled or indexed one), ``local_accesses`` (ld.local and st.local).

    mbarriers: ``mbarrier_inits`` holds the arrival count of every init in order, None where it is
    not a constant. ``mbarrier_arrives`` includes those with expect_tx, ``mbarrier_expects`` counts
    every expect_tx, ``mbarrier_waits`` try_wait and test_wait. ``named_barriers`` maps
    "sync 1, 128" to its count ("?" for what is not constant).

    ``setmaxnreg`` lists ("inc" or "dec", registers). Tensor memory: ``tmem_allocs`` columns of each
    alloc, ``tmem_deallocs`` and ``tmem_relinquishes``; ``mma`` maps "f16 cta_group::2 TS" to a
    count (TS: A in tensor memory, SS: in shared), ``commits``, ``tmem_loads`` and ``tmem_stores``
    map "32x32b.x16" to a count, with ``tmem_load_registers`` and ``tmem_store_registers`` the sum
    of 32-bit registers per thread, ``tmem_load_waits``, ``tmem_store_waits``.

    ``fences`` maps a fence's opcode, ``bulk`` that of a bulk copy, prefetch, commit_group or
    wait_group, ``arithmetic`` that of ex2, fma, add, mul, max, min and cvt, to a count; ``memory``
    the space, direction and bytes per thread ("ld.global 16") of global and shared accesses.
    """

    entry: str
    target: str
    version: str
    threads: int | None
    cluster: int | None
    max_registers: int | None
    min_ctas_per_sm: int | None
    static_shared_bytes: int
    local_bytes: int
    local_accesses: int
    mbarrier_inits: tuple[int | None, ...]
    mbarrier_arrives: int
    mbarrier_expects: int
    mbarrier_waits: int
    named_barriers: dict[str, int]
    setmaxnreg: tuple[tuple[str, int | None], ...]
    tmem_allocs: tuple[int | None, ...]
    tmem_deallocs: int
    tmem_relinquishes: int
    mma: dict[str, int]
    commits: dict[str, int]
    tmem_loads: dict[str, int]
    tmem_stores: dict[str, int]
    tmem_load_registers: int
    tmem_store_registers: int
    tmem_load_waits: int
    tmem_store_waits: int
    fences: dict[str, int]
    bulk: dict[str, int]
    arithmetic: dict[str, int]
    memory: dict[str, int]

    def as_dict(self) -> dict:
        """Return all fields as plain dicts, lists and numbers (JSON)."""
        plain = dataclasses.asdict(self)
        lists = {k: list(v) for k, v in plain.items() if isinstance(v, tuple)}
        return plain | lists | {"setmaxnreg": [list(pair) for pair in self.setmaxnreg]}


def ptx_facts(ptx: str, entry: str | None = None) -> PtxFacts:
    """Return the facts of the kernel `entry`, or of the only one in the module.

    Raises PtxError for text that is not PTX, ValueError if the module does not hold that kernel or
    `entry` is needed to choose.
    """
    program = read(ptx)
    entries = program.entries()
    chosen = entry if entry is not None or len(entries) != 1 else next(iter(entries))
    if chosen not in entries:
        names = ", ".join(entries) or "none"
        raise ValueError(f"no kernel {entry!r} in the PTX; name one of: {names}")
    return _Counter(program, chosen, entries[chosen]).facts()


_BITS = re.compile(r"[busfe](8|16|32|64|128)|b?f16x2|bf16|bf16x2|pred")
_ARITHMETIC = re.compile(r"(ex2|fma|add|sub|mul|max|min|cvt)\b")
_FLOATING = re.compile(r"\.(b?f16|b?f16x2|f32|f32x2|f64|tf32|e\dm\d)")
_SHAPE = re.compile(r"\.(\d+x\d+b|16x32bx2)\.x(\d+)")
_REGISTERS_PER_REPEAT = {"16x128b": 2, "16x256b": 4}  # of tcgen05.ld and st; 1 for other shapes


def _type_bytes(words: str) -> int:
    """Bytes of the vector and type in ``.v4.b32`` (what a thread accesses, or an array element)."""
    vector, scalar = re.search(r"\.v([248])\b", words), 1
    for word in words.split("."):
        match = _BITS.fullmatch(word)
        if match:
            bits = match[1] or ("32" if word.endswith("x2") else "8" if word == "pred" else "16")
            scalar = int(bits) // 8
    return scalar * (int(vector[1]) if vector else 1)


def _array_bytes(statement: Statement) -> int:
    """Bytes of a ``.shared`` or ``.local`` declaration; an array without extent has 0."""
    element = _type_bytes("".join(re.findall(r"\.\w+", statement.text)))
    total = 0
    for name in statement.text.split(","):
        elements = 1
        for extent in re.findall(r"\[\s*(\d*)\s*\]", name):
            elements *= int(extent or 0)
        total += elements * element
    return total


class _Counter:
    """Counts over the statements of one kernel."""

    def __init__(self, program: Program, entry: str, statements: list[Statement]):
        self.entry, self.module = entry, program.module()
        self.header, self.body = statements[0].text, statements
        self.code = [s for s in statements if s.is_instruction]
        self.values = Values(program, statements)

    def facts(self) -> PtxFacts:
        directive = lambda name: self._directive(rf"\.{name}\s+(\d+)")
        loads, stores = self._tmem("ld"), self._tmem("st")
        shared = [s for s in (*self.module, *self.body) if s.opcode == ".shared"]
        local = [s for s in self.body if s.opcode == ".local"]
        return PtxFacts(
            entry=self.entry,
            target=self._module("target"),
            version=self._module("version"),
            threads=self._extent("reqntid") or self._extent("maxntid"),
            cluster=self._extent("reqnctapercluster"),
            max_registers=directive("maxnreg"),
            min_ctas_per_sm=directive("minnctapersm"),
            static_shared_bytes=sum(map(_array_bytes, shared)),
            local_bytes=sum(map(_array_bytes, local)),
            local_accesses=self._number(r"(ld|st)\.(\w+\.)*local\b"),
            mbarrier_inits=self._constants(r"mbarrier\.init", 1),
            mbarrier_arrives=self._number(r"mbarrier\.arrive"),
            mbarrier_expects=self._number(r"mbarrier\.(arrive\.)?expect_tx"),
            mbarrier_waits=self._number(r"mbarrier\.(try|test)_wait"),
            named_barriers=self._barriers(),
            setmaxnreg=self._register_budgets(),
            tmem_allocs=self._constants(r"tcgen05\.alloc", 1),
            tmem_deallocs=self._number(r"tcgen05\.dealloc"),
            tmem_relinquishes=self._number(r"tcgen05\.relinquish"),
            mma=self._mma(),
            commits=self._histogram(r"tcgen05\.commit"),
            tmem_loads=loads[0],
            tmem_stores=stores[0],
            tmem_load_registers=loads[1],
            tmem_store_registers=stores[1],
            tmem_load_waits=self._number(r"tcgen05\.wait::ld"),
            tmem_store_waits=self._number(r"tcgen05\.wait::st"),
            fences=self._histogram(r"tcgen05\.fence|fence\b|membar\b"),
            bulk=self._histogram(r"cp\.(reduce\.)?async\.bulk"),
            arithmetic=self._arithmetic(),
            memory=self._memory(),
        )

    def _module(self, name: str) -> str:
        """The first operand of a module directive, "" if it is missing."""
        return next((s.operands[0] for s in self.module if s.opcode == f".{name}"), "")

    def _directive(self, pattern: str) -> int | None:
        match = re.search(pattern, self.header)
        return int(match[1]) if match else None

    def _extent(self, name: str) -> int | None:
        """The product of up to three extents behind a directive of the header."""
        match = re.search(rf"\.{name}\s+(\d+(?:\s*,\s*\d+)*)", self.header)
        if not match:
            return None
        product = 1
        for extent in match[1].split(","):
            product *= int(extent)
        return product

    def _matching(self, pattern: str) -> list[Statement]:
        return [s for s in self.code if re.match(pattern, s.opcode)]

    def _number(self, pattern: str) -> int:
        return len(self._matching(pattern))

    def _histogram(self, pattern: str) -> dict[str, int]:
        return dict(collections.Counter(s.opcode for s in self._matching(pattern)))

    def _constant(self, statement: Statement, operand: str) -> int | None:
        return self.values.of(operand, statement.block).constant

    def _constants(self, pattern: str, operand: int) -> tuple[int | None, ...]:
        return tuple(self._constant(s, s.operands[operand]) for s in self._matching(pattern))

    def _barriers(self) -> dict[str, int]:
        found: collections.Counter = collections.Counter()
        for statement in self._matching(r"(bar|barrier)\.(cta\.)?(sync|arrive|red)\b"):
            action = re.search(r"\.(sync|arrive|red)\b", statement.opcode)[1]
            numbers = [self._constant(statement, o) for o in statement.operands[:2]]
            words = ", ".join("?" if n is None else str(n) for n in numbers)
            found[f"{action} {words}"] += 1
        return dict(found)

    def _register_budgets(self) -> tuple[tuple[str, int | None], ...]:
        return tuple(
            (s.opcode.split(".")[1], self._constant(s, s.operands[0]))
            for s in self._matching(r"setmaxnreg\.")
        )

    def _mma(self) -> dict[str, int]:
        found: collections.Counter = collections.Counter()
        for statement in self._matching(r"tcgen05\.mma\b"):
            kind = re.search(r"\.kind::(\w+)", statement.opcode)
            group = re.search(r"\.(cta_group::\d)", statement.opcode)
            source = "TS" if statement.operands[1].startswith("[") else "SS"
            words = [kind[1] if kind else "?", group[1] if group else "?", source]
            found[" ".join(words + ["ws"] * (".ws" in statement.opcode))] += 1
        return dict(found)

    def _tmem(self, direction: str) -> tuple[dict[str, int], int]:
        """Shapes of tcgen05.ld or st with counts, and the registers they move per thread."""
        shapes, moved = collections.Counter(), 0
        for statement in self._matching(rf"tcgen05\.{direction}\b"):
            match = _SHAPE.search(statement.opcode)
            shape, repeats = (match[1], int(match[2])) if match else ("?", 0)
            shapes[f"{shape}.x{repeats}"] += 1
            moved += repeats * _REGISTERS_PER_REPEAT.get(shape, 1)
        return dict(shapes), moved

    def _arithmetic(self) -> dict[str, int]:
        """Floating-point arithmetic and conversions by opcode; integer operations are left out."""
        return dict(
            collections.Counter(
                s.opcode
                for s in self.code
                if _ARITHMETIC.match(s.opcode) and _FLOATING.search(s.opcode)
            )
        )

    def _memory(self) -> dict[str, int]:
        found: collections.Counter = collections.Counter()
        for statement in self._matching(r"(ld|st)\.(?!.*\b(param|local|const)\b)"):
            space = re.search(r"\.(global|shared)\b", statement.opcode)
            name = f"{statement.opcode[:2]}.{space[1] if space else 'generic'}"
            found[f"{name} {_type_bytes(statement.opcode[2:])}"] += 1
        return dict(found)
