# SPDX-License-Identifier: Apache-2.0
"""Looks in compiled PTX for missing fences and waits that no execution can show.

The rules are heuristics over the text in its order, not proofs. Each kernel is scanned once from
top to bottom; what is open (a load not waited for, a store not fenced) is forgotten at an
unconditional branch or return outside inline assembly, because what follows in the text is then
another path. A barrier is named by symbol and byte offset, with variable indices taken as 0, so
that the two ends of a hand-over find each other; a barrier whose address cannot be followed, or one
that is indexed on one side and written out on the other, is not matched. Silence therefore proves
nothing, and a finding on code with unusual control flow deserves a look at the lines before it is
believed. Rules: PTX ISA, "tcgen05 memory consistency model" and "async proxy".
"""

import re
from dataclasses import dataclass

from .ptx import Program, Statement, Values, read, registers, results

RULES = {
    "tmem-load-wait": "tcgen05.ld not followed by tcgen05.wait::ld before the next release",
    "tmem-load-use": "a register of tcgen05.ld used before tcgen05.wait::ld",
    "tmem-store-wait": "tcgen05.st not followed by tcgen05.wait::st before the next release",
    "tmem-fence-before": "TMEM handed over without tcgen05.fence::before_thread_sync",
    "tmem-fence-after": "TMEM taken over without tcgen05.fence::after_thread_sync",
    "proxy-fence": "shared memory written by threads, handed to MMA or bulk copy unfenced",
    "mbarrier-init": "mbarrier.init without fence.mbarrier_init where MMAs or copies will arrive",
    "bulk-wait": "a bulk copy out of shared memory not waited for before the thread ends",
    "tmem-alloc": "tcgen05.alloc without dealloc or relinquish, or of an impossible size",
}


@dataclass(frozen=True)
class Finding:
    """One suspicion: a key of RULES, the line of the PTX text (from 1) and a sentence."""

    rule: str
    line: int
    message: str

    def __str__(self):
        return f"line {self.line}: {self.rule}: {self.message}"


_ARRIVE = re.compile(r"mbarrier\.arrive")
_WAIT = re.compile(r"mbarrier\.(try_wait|test_wait)")
_CTA_SIGNAL = re.compile(r"(bar|barrier)\.(cta\.)?(sync|arrive|red)\b|barrier\.cluster\.arrive")
_CTA_WAIT = re.compile(r"(bar|barrier)\.(cta\.)?(sync|red)\b|barrier\.cluster\.wait")
_MMA = re.compile(r"tcgen05\.(mma|cp)\b")
_BULK_FROM_SHARED = re.compile(r"cp\.(reduce\.)?async\.bulk(?!.*shared::cluster\.global).*\.shared")
_TILE_STORE = re.compile(r"st\.(\w+\.)*?shared(::\w+)?\.(\w+\.)*v[248]\b|stmatrix|st\.async")
_PROXY_FENCE = re.compile(r"fence\.proxy\.async(\.shared::(cta|cluster))?$|fence\.proxy\.async::")
_ASYNC_ARRIVAL = re.compile(r"tcgen05\.commit|cp\.async\.bulk.*mbarrier")
_READER_WINDOW = 400  # statements after a wait in which an MMA or a bulk copy counts as its reader


def lint(ptx: str) -> list[Finding]:
    """Check every kernel of a PTX module against RULES; findings come in order of lines.

    A linear scan: see the module's docstring for what that misses. Scalar ``st.shared`` is taken
    to carry per-row numbers for other threads, vector stores and ``stmatrix`` to carry operands.
    Raises PtxError if the text cannot be read.
    """
    program = read(ptx)
    found = []
    for statements in program.entries().values():
        found += _Scan(program, statements).run()
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


class _Scan:
    """One pass over a kernel; the attributes hold the statement that opened each obligation."""

    def __init__(self, program: Program, statements: list[Statement]):
        self.program = program
        self.statements = [s for s in statements if s.is_instruction]
        self.values = Values(program, statements)
        self.found: list[Finding] = []
        self.suspect: Finding | None = None  # an unfenced hand-over, unless a fenced one follows
        self.suspect_fenced = False
        self.forget()
        self.async_arrivals = any(_ASYNC_ARRIVAL.match(s.opcode) for s in self.statements)
        self.handover, self.async_read = self._handover_barriers(), self._async_read_barriers()

    def forget(self):
        """Drop what is open: the next statement is not reached from the previous one."""
        self._settle()
        self.loads = self.stores = self.unfenced = self.tile = self.taken = None
        self.inits = self.bulk = None
        self.loading: dict[str, Statement] = {}  # registers that a load may still be writing

    def run(self) -> list[Finding]:
        for statement in self.statements:
            self._step(statement)
        self._settle()
        self._allocation()
        return self.found

    def _settle(self):
        """Report the unfenced hand-over seen last: no fenced one has followed it."""
        if self.suspect:
            self.found.append(self.suspect)
        self.suspect, self.suspect_fenced = None, False

    def _place(self, statement: Statement):
        """The barrier that an instruction names, None if it cannot be followed."""
        if _CTA_SIGNAL.match(statement.opcode) or _CTA_WAIT.match(statement.opcode):
            cluster = ".cluster" in statement.opcode
            number = "0" if cluster or not statement.operands else statement.operands[0]
            return ("barrier.cluster" if cluster else "barrier", number)
        for operand in statement.operands:
            if operand.startswith("["):
                return self.values.of(operand, statement.block).place
        return None

    def _leaves(self, statement: Statement) -> bool:
        """Whether control never reaches the next statement (retry loops in assembly excepted)."""
        jump = statement.opcode.split(".")[0] in ("bra", "brx", "ret", "exit", "trap")
        return jump and not statement.predicate and self.program.depth(statement) == 1

    def _handover_barriers(self) -> set:
        """Barriers that tell of TMEM: targets of commit and of arrivals after a TMEM access."""
        places, touched = set(), False
        for statement in self.statements:
            if statement.opcode.startswith(("tcgen05.ld", "tcgen05.st")):
                touched = True
            elif statement.opcode.startswith("tcgen05.commit"):
                places.add(self._place(statement))
            elif _ARRIVE.match(statement.opcode) or _CTA_SIGNAL.match(statement.opcode):
                places |= {self._place(statement)} if touched else set()
                touched = False
            elif self._leaves(statement):
                touched = False
        return places - {None}

    def _async_read_barriers(self) -> set:
        """Barriers whose waiter goes on to an MMA or to a bulk copy out of shared memory."""
        places = set()
        for at, statement in enumerate(self.statements):
            if not _WAIT.match(statement.opcode):
                continue
            for later in self.statements[at + 1 : at + _READER_WINDOW]:
                if _MMA.match(later.opcode) or _BULK_FROM_SHARED.match(later.opcode):
                    places.add(self._place(statement))
                if _MMA.match(later.opcode) or self._leaves(later):
                    break
        return places - {None}

    def _report(self, rule: str, statement: Statement, message: str):
        self.found.append(Finding(rule, statement.line, message))

    def _step(self, statement: Statement):
        opcode = statement.opcode
        self._use(statement)
        self._mbarriers_and_bulk(statement)
        if opcode.startswith("tcgen05."):
            self._tensor_memory(statement)
        elif _ARRIVE.match(opcode) or _CTA_SIGNAL.match(opcode):
            self._release(statement)
        elif _TILE_STORE.match(opcode):
            self.tile = statement
        elif _PROXY_FENCE.match(opcode):
            self.tile, self.suspect_fenced = None, True
        elif _BULK_FROM_SHARED.match(opcode):
            self._read_shared(statement)
        if _WAIT.match(opcode) or _CTA_WAIT.match(opcode):
            self.taken = statement if self._place(statement) in self.handover else self.taken
        elif self._leaves(statement):
            self.forget()

    def _use(self, statement: Statement):
        """Report the first use of a register that a load has not certainly written yet.

        A `mov` only gives it another name: the DSL's PTX has those between a load and its wait.
        """
        if not self.loading or statement.opcode.startswith("tcgen05.wait::ld"):
            return
        written = results(statement)
        for operand in statement.operands:
            for name in registers(operand):
                load = self.loading.get(self.program.resolve(name, statement.block))
                if load and name not in written and statement.opcode.startswith("mov."):
                    keys = [self.program.resolve(key, statement.block) for key in written]
                    self.loading |= dict.fromkeys(keys, load)
                elif load and name not in written:
                    self._report(
                        "tmem-load-use",
                        statement,
                        f"{name} of the tcgen05.ld of line {load.line} is used here without"
                        " tcgen05.wait::ld",
                    )
                    kept = self.loading.items()
                    self.loading = {key: other for key, other in kept if other is not load}

    def _mbarriers_and_bulk(self, statement: Statement):
        opcode = statement.opcode
        if opcode.startswith("mbarrier.init") and self.async_arrivals:
            self.inits = statement
        elif opcode.startswith("fence.mbarrier_init") or _PROXY_FENCE.match(opcode):
            self.inits = None
        elif self.inits and (_CTA_SIGNAL.match(opcode) or _ARRIVE.match(opcode)):
            message = f"the mbarrier.init of line {self.inits.line} is published here without fence"
            self._report("mbarrier-init", statement, message)
            self.inits = None
        if _BULK_FROM_SHARED.match(opcode) and "global" in opcode:
            self.bulk = statement
        elif opcode.startswith("cp.async.bulk.wait_group"):
            self.bulk = None
        elif self.bulk and opcode.split(".")[0] in ("ret", "exit") and not statement.predicate:
            message = f"ends with the bulk copy of line {self.bulk.line} not waited for"
            self._report("bulk-wait", statement, message)
            self.bulk = None

    def _tensor_memory(self, statement: Statement):
        kind = re.match(r"tcgen05\.([a-z]+)(?:::(\w+))?", statement.opcode)
        if kind[1] in ("ld", "st", "mma", "cp"):
            if self.taken:
                self._report(
                    "tmem-fence-after",
                    statement,
                    f"{kind[0]} after the wait of line {self.taken.line}"
                    " without tcgen05.fence::after_thread_sync",
                )
                self.taken = None
            if kind[1] in ("ld", "st"):
                self.unfenced = statement
                self.loads = statement if kind[1] == "ld" else self.loads
                if kind[1] == "ld":
                    keys = [self.program.resolve(n, statement.block) for n in results(statement)]
                    self.loading |= dict.fromkeys(keys, statement)
                self.stores = statement if kind[1] == "st" else self.stores
            else:
                self._read_shared(statement)
        elif kind[1] == "wait":
            self.loads = None if kind[2] == "ld" else self.loads
            self.loading = {} if kind[2] == "ld" else self.loading
            self.stores = None if kind[2] == "st" else self.stores
        elif kind[2] == "before_thread_sync":
            self._waited(statement)
            self.unfenced = None
        elif kind[2] == "after_thread_sync":
            self.taken = None

    def _read_shared(self, statement: Statement):
        """An MMA or bulk copy of this thread reads shared memory."""
        self._handed_over()
        if self.tile:
            self._report(
                "proxy-fence",
                statement,
                f"{statement.opcode.split('.')[0]} may read what line {self.tile.line} stored;"
                " no fence.proxy.async between",
            )
            self.tile = None

    def _handed_over(self):
        """A signal or reader after a fence: it, not the suspect before it, hands the tile over."""
        if self.suspect_fenced:
            self.suspect = None

    def _waited(self, statement: Statement):
        """Report tensor-memory accesses that are still under way at a release."""
        for name, rule in (("loads", "tmem-load-wait"), ("stores", "tmem-store-wait")):
            opened = getattr(self, name)
            if opened:
                suffix = "ld" if name == "loads" else "st"
                self._report(
                    rule,
                    statement,
                    f"tcgen05.{suffix} of line {opened.line} is released here"
                    f" without tcgen05.wait::{suffix}",
                )
                setattr(self, name, None)

    def _release(self, statement: Statement):
        self._waited(statement)
        if self.unfenced:
            self._report(
                "tmem-fence-before",
                statement,
                f"signals after the TMEM access of line {self.unfenced.line}"
                " without tcgen05.fence::before_thread_sync",
            )
            self.unfenced = None
        if self._place(statement) in self.async_read:
            self._handed_over()
            if self.tile:
                message = f"tells an MMA or bulk copy of the store of line {self.tile.line};"
                message += " no fence.proxy.async between"
                self.suspect = Finding("proxy-fence", statement.line, message)
                self.tile, self.suspect_fenced = None, False

    def _allocation(self):
        """Compare allocations of tensor memory with what frees them."""
        of = lambda name: [s for s in self.statements if s.opcode.startswith(f"tcgen05.{name}")]
        for alloc in of("alloc"):
            columns = self.values.of(alloc.operands[-1], alloc.block).constant
            if columns is not None and columns not in (32, 64, 128, 256, 512):
                self._report(
                    "tmem-alloc", alloc, f"{columns} columns: must be a power of two in 32..512"
                )
            for name, need in (("dealloc", "is never freed"), ("relinquish", "keeps the permit")):
                if not of(name):
                    self._report("tmem-alloc", alloc, f"{need}: no tcgen05.{name}")
