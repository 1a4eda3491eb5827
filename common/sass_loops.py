# SPDX-License-Identifier: Apache-2.0
"""Control flow of a SASS kernel: blocks, dominators, natural loops and what each loop does.

Waits that retry until an mbarrier turns are not iterations of work: they are dropped, so that a
wait counts as succeeding at once. What is left of a loop splits into blocks that run on every
iteration (*always*) and blocks behind a branch (*conditional*: a skipped rescale, a mask, an
elected thread). Loops and warp-role regions are named by the work they contain.
"""

import collections
import re
from dataclasses import dataclass, field

from .sass_isa import Instruction, count

_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "BSYNC", "BPT", "KILL", "BREAK", "CALL")
_JUMPS = ("BRA", "BRX", "JMP")
_LEAVES = ("EXIT", "RET", "BPT", "KILL")
_SYNC = ("BSYNC", "BREAK")
_MAX_WAIT_LOOP = 16  # instructions; a longer loop is work
_WAIT_OPCODES = (
    "SYNCS NANOSLEEP BRA NOP MOV IMAD.MOV IMAD.U32 UMOV R2UR WARPSYNC USETMAXREG ELECT PLOP3"
    " BSSY BSYNC"
).split()
_SETUP_OPCODES = "UIADD3 IADD3 VIADD ULEA LEA USHF SHF ULOP3 LOP3 S2UR IMAD".split()


@dataclass
class BasicBlock:
    """Straight-line instructions and the indices of the blocks before and after."""

    index: int
    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


@dataclass
class NaturalLoop:
    """A loop as a set of blocks; `spin` marks retry loops, which are no iterations of work."""

    header: int
    body: set[int] = field(default_factory=set)
    latches: list[int] = field(default_factory=list)
    parent: "NaturalLoop | None" = None
    children: "list[NaturalLoop]" = field(default_factory=list)
    spin: bool = False


@dataclass
class Loop:
    """A loop's own work, inner loops and wait retries left out.

    ``first`` and ``last`` are byte addresses in the kernel; ``always`` runs on every iteration,
    ``conditional`` behind a branch, ``instructions`` is both in order. ``live_registers`` (general,
    uniform) is the maximum in it, (0, 0) if nvdisasm could not tell.
    """

    natural: NaturalLoop
    role: str
    first: int
    last: int
    depth: int
    innermost: bool
    instructions: list[Instruction]
    always: list[Instruction]
    conditional: list[Instruction]
    counts: collections.Counter
    live_registers: tuple[int, int]


@dataclass
class Region:
    """The code dominated by one setmaxnreg (a warp role), or what no setmaxnreg dominates.

    ``start`` is the address of the block with the setmaxnreg, -1 for the rest of the kernel;
    ``budget`` is the register count it sets per thread.
    """

    start: int
    role: str
    budget: int | None
    instructions: int
    counts: collections.Counter
    live_registers: tuple[int, int]


@dataclass
class Kernel:
    """A disassembled kernel after analysis."""

    name: str
    arch: str
    instructions: list[Instruction]
    counts: collections.Counter
    loops: list[Loop]
    regions: list[Region]
    blocks: int
    wait_loops: int
    uniform_spill_moves: int


def _is_conditional(instruction: Instruction) -> bool:
    """Whether a jump or exit may not be taken."""
    if instruction.guard not in (None, "@PT", "@UPT"):
        return True
    first = instruction.arguments.split("`")[0].strip()
    by_predicate = instruction.opcode.startswith(("BRA", "BRX")) and re.match(r"!?U?P\d", first)
    return bool(by_predicate) or instruction.opcode.startswith(("BRA.DIV", "BRA.CONV"))


def _reconvergence(instructions) -> dict[int, tuple[str, ...]]:
    """Map each BSYNC or BREAK to the labels of the nearest BSSY above it on the same register."""
    targets, opened = {}, {}
    for at, instruction in enumerate(instructions):
        if instruction.opcode.startswith("BSSY"):
            opened[instruction.arguments.split(",")[0].strip()] = instruction.targets
        if instruction.opcode.startswith(_SYNC):
            targets[at] = opened.get(instruction.arguments.split(",")[-1].strip(), ())
    return targets


def build_blocks(instructions: list[Instruction], labels: dict[str, int]) -> list[BasicBlock]:
    """Split a kernel into basic blocks; `labels` maps a name to an address."""
    at_address = {instruction.address: at for at, instruction in enumerate(instructions)}
    index = {name: at_address[a] for name, a in labels.items() if a in at_address}
    leaders = {0}
    for at, instruction in enumerate(instructions):
        if instruction.opcode.startswith(_ENDS):
            leaders.add(at + 1)
        if instruction.opcode.startswith((*_JUMPS, "BSSY", "WARPSYNC.COLLECTIVE")):
            leaders |= {index[name] for name in instruction.targets if name in index}
    starts = sorted(leader for leader in leaders if leader < len(instructions))
    block_at = {start: number for number, start in enumerate(starts)}
    ends = [*starts[1:], len(instructions)]
    blocks = [
        BasicBlock(number, instructions[start:end])
        for number, (start, end) in enumerate(zip(starts, ends))
    ]
    synchronised = _reconvergence(instructions)
    for block, end in zip(blocks, ends):
        last, targets, falls = block.instructions[-1], (), True
        if last.opcode.startswith(_JUMPS):
            targets, falls = last.targets, _is_conditional(last)
        elif last.opcode.startswith(_LEAVES):
            falls = _is_conditional(last)
        elif last.opcode.startswith(_SYNC):
            targets = synchronised[end - 1]
        following = {block_at[index[name]] for name in targets if name in index}
        if falls and block.index + 1 < len(blocks):
            following.add(block.index + 1)
        block.successors = sorted(following)
    for block in blocks:
        for successor in block.successors:
            blocks[successor].predecessors.append(block.index)
    return blocks


def _post_order(blocks: list[BasicBlock]) -> list[int]:
    order, seen, stack = [], {0}, [(0, iter(blocks[0].successors))]
    while stack:
        number, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].successors)))
                break
        else:
            order.append(number)
            stack.pop()
    return order


def dominators(blocks: list[BasicBlock]) -> dict[int, int]:
    """Return the immediate dominator of each reachable block (Cooper, Harvey, Kennedy 2001)."""
    order = _post_order(blocks)[::-1]
    position = {number: at for at, number in enumerate(order)}
    immediate = {0: 0}

    def meet(a, b):
        while a != b:
            while position[a] > position[b]:
                a = immediate[a]
            while position[b] > position[a]:
                b = immediate[b]
        return a

    changed = True
    while changed:
        changed = False
        for number in order[1:]:
            known = [p for p in blocks[number].predecessors if p in immediate]
            new = known[0]
            for predecessor in known[1:]:
                new = meet(new, predecessor)
            if immediate.get(number) != new:
                immediate[number], changed = new, True
    return immediate


def _dominated(immediate: dict[int, int], number: int, by: int) -> bool:
    while number != by:
        if number == 0 or number not in immediate:
            return False
        number = immediate[number]
    return True


def natural_loops(blocks: list[BasicBlock], immediate: dict[int, int]) -> list[NaturalLoop]:
    """Return the loops, smallest first, with their nesting."""
    loops: dict[int, NaturalLoop] = {}
    for block in blocks:
        if block.index not in immediate:
            continue
        for header in block.successors:
            if _dominated(immediate, block.index, header):
                loop = loops.setdefault(header, NaturalLoop(header))
                loop.latches.append(block.index)
                loop.body |= {header, block.index}
                todo = [block.index] if block.index != header else []
                while todo:
                    for predecessor in blocks[todo.pop()].predecessors:
                        if predecessor not in loop.body and predecessor in immediate:
                            loop.body.add(predecessor)
                            todo.append(predecessor)
    ordered = sorted(loops.values(), key=lambda loop: len(loop.body))
    for at, inner in enumerate(ordered):
        for outer in ordered[at + 1 :]:
            if inner.header in outer.body and inner.body <= outer.body:
                inner.parent = outer
                outer.children.append(inner)
                break
    return ordered


def role_of(counts: collections.Counter, instructions: list[Instruction]) -> str:
    """Name a loop or a region by the work it contains."""
    fma = counts["FFMA"] + counts["FFMA2"]
    tensor_memory_mma = counts["MMA"] and any(i.opcode.startswith("UTC") for i in instructions)
    rules = (
        ("mainloop", counts["EX2"] >= 8 and (counts["MMA"] or 2 * fma >= len(instructions))),
        ("mma", tensor_memory_mma),
        ("softmax", counts["EX2"] >= 8),
        ("load", counts["TMALD"] and counts["TMALD"] * 200 > len(instructions)),
        ("dq-reduce", counts["LDTM"] and counts["TMARED"]),
        ("correction", counts["LDTM"] and counts["STTM"]),
        ("epilogue", counts["LDTM"] and (counts["TMAST"] or counts["STS"] or counts["GMEM"])),
        ("store", counts["TMAST"]),
        ("fma", fma >= 8 and 3 * fma >= len(instructions)),
        ("gmem", counts["GMEM"] >= 4),
    )
    return next((name for name, applies in rules if applies), "other")


def _live(instructions) -> tuple[int, int]:
    general = max((i.live_registers[0] for i in instructions), default=0)
    return general, max((i.live_registers[1] for i in instructions), default=0)


class _Analysis:
    """Blocks, dominators and loops of one kernel."""

    def __init__(self, instructions, labels):
        self.blocks = build_blocks(instructions, labels)
        self.immediate = dominators(self.blocks)
        self.natural = natural_loops(self.blocks, self.immediate)
        self.waits = []
        for loop in self.natural:
            body = self.flat(loop.body)
            short = len(body) <= _MAX_WAIT_LOOP
            is_wait = short and all(i.opcode.startswith(tuple(_WAIT_OPCODES)) for i in body)
            # BRA.U.ANY runs a uniform instruction once per distinct operand: no iteration either,
            # but its blocks count with the loop around it.
            loop.spin = is_wait or (short and any("BRA.U.ANY" in i.opcode for i in body))
            if is_wait:
                self.waits.append(loop)
        self.wait_blocks = set().union(*(loop.body for loop in self.waits))

    def flat(self, numbers) -> list[Instruction]:
        return [i for number in sorted(numbers) for i in self.blocks[number].instructions]

    def _is_wait_arm(self, number: int) -> bool:
        """A block that only prepares or belongs to a retry: it does not run if waits succeed."""
        block, quick = self.blocks[number], (*_WAIT_OPCODES, *_SETUP_OPCODES)
        return all(i.opcode.startswith(quick) for i in block.instructions) and any(
            neighbour in self.wait_blocks for neighbour in block.successors + block.predecessors
        )

    def loop(self, natural: NaturalLoop) -> Loop:
        inner = set().union(*(child.body for child in natural.children if not child.spin))
        own = natural.body - inner - self.wait_blocks
        always = {
            number
            for number in own
            if all(_dominated(self.immediate, latch, number) for latch in natural.latches)
        }
        conditional = {n for n in own - always if not self._is_wait_arm(n)}
        instructions = self.flat(always | conditional)
        counts = count(instructions)
        depth, parent = 0, natural.parent
        while parent:
            depth, parent = depth + 1, parent.parent
        return Loop(
            natural=natural,
            role=role_of(counts, instructions),
            first=min(self.blocks[n].instructions[0].address for n in natural.body),
            last=max(self.blocks[n].instructions[-1].address for n in natural.body),
            depth=depth,
            innermost=all(child.spin for child in natural.children),
            instructions=instructions,
            always=self.flat(always),
            conditional=self.flat(conditional),
            counts=counts,
            live_registers=_live(instructions),
        )

    def _budget_block(self, number: int) -> int | None:
        """The nearest dominating block with a setmaxnreg."""
        while not any(
            i.opcode == "USETMAXREG" or i.opcode.startswith("USETMAXREG.")
            for i in self.blocks[number].instructions
        ):
            if number == 0:
                return None
            number = self.immediate[number]
        return number

    def regions(self) -> list[Region]:
        members: dict[int, set[int]] = collections.defaultdict(set)
        for block in self.blocks:
            if block.index in self.immediate:
                root = self._budget_block(block.index)
                members[-1 if root is None else root].add(block.index)
        return [self._region(root, members[root]) for root in sorted(members)]

    def _region(self, root: int, numbers: set[int]) -> Region:
        body, budget, start = self.flat(numbers), None, -1
        if root >= 0:
            block = self.blocks[root].instructions
            start = block[0].address
            setting = next(i for i in block if i.opcode.startswith("USETMAXREG"))
            literal = re.search(r"(0x[0-9a-f]+)\s*$", setting.arguments)
            budget = int(literal[1], 16) if literal else None
        counts = count(body)
        role = "prologue+shared" if root < 0 else role_of(counts, body)
        return Region(start, role, budget, len(body), counts, _live(body))


def analyse(name: str, arch: str, instructions, labels) -> Kernel:
    """Find the loops and warp-role regions of a disassembled kernel."""
    analysis = _Analysis(instructions, labels)
    loops = [analysis.loop(natural) for natural in analysis.natural if not natural.spin]
    header = lambda loop: analysis.blocks[loop.natural.header].instructions[0].address
    return Kernel(
        name=name,
        arch=arch,
        instructions=instructions,
        counts=count(instructions),
        loops=sorted(loops, key=header),
        regions=analysis.regions(),
        blocks=len(analysis.blocks),
        wait_loops=len(analysis.waits),
        uniform_spill_moves=sum("SPILL" in i.opcode or ".FILL" in i.opcode for i in instructions),
    )


def inclusive(kernel: Kernel, loop: Loop, trips: int) -> list[Instruction]:
    """Return the instructions of `loop` and, `trips` times, of its inner loops."""
    instructions = list(loop.instructions)
    for inner in kernel.loops:
        if inner.natural.parent is loop.natural:
            instructions += inclusive(kernel, inner, trips) * trips
    return instructions
