# SPDX-License-Identifier: Apache-2.0
"""Which statements of a kernel are logged, and how they can be left out.

With the log, each statement that synchronises or touches shared or tensor memory also calls one of
the `fl_log` functions of `engine.cu`: before it acts, or, where it waits, once it has passed. Every
wait, arrival and fence can be left out in a run by its line (`Control.skip`): a wait then passes at
once, anything else does nothing. Memory operations that are not listed here are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ptx import Statement
from .emit import Scope, vector
from .log import CLUSTER, FENCES, GPU, PAIR, READ_ONLY, RELAXED, TMEM_A, Kind
from .rewrite import Context, refuse

Emit = Callable[[Scope, Statement, Context], None]


@dataclass(frozen=True)
class Rule:
    """How statements whose opcode matches are logged.

    after: once the statement has passed (if it has a predicate as result, only when that holds).
    optional: whether a run can leave the statement out.
    """

    pattern: re.Pattern
    emit: Emit
    after: bool
    optional: bool


RULES: list[Rule] = []
SILENT = re.compile(
    r"(ld|st|ldu)\.(\w+\.)*(param|global|const|local)\b.*|(atom|red)\.(\w+\.)*global\b.*"
    r"|ld\.(nc|weak)\.global.*|tcgen05\.relinquish_alloc_permit.*|mbarrier\.inval.*"
    r"|bar\.warp\.sync|fence\.proxy\.(tensormap|alias).*|cp\.async\.bulk\.prefetch.*"
)
TOUCHY = re.compile(
    r"(mbarrier|fence|membar|bar|barrier|tcgen05|cp|ld|st|atom|red|ldmatrix|stmatrix|multimem"
    r"|clusterlaunchcontrol)\b"
)


def logged(pattern: str, after: bool = False, optional: bool = False):
    """Register how opcodes that match `pattern` as a whole are logged."""

    def register(emit: Emit) -> Emit:
        RULES.append(Rule(re.compile(pattern), emit, after, optional))
        return emit

    return register


def rules(statement: Statement) -> list[Rule]:
    """How the statement is logged. Raises HopperRewriteError for one that would be missed."""
    found = [rule for rule in RULES if rule.pattern.fullmatch(statement.opcode)]
    if found or not TOUCHY.match(statement.opcode) or SILENT.fullmatch(statement.opcode):
        return found
    raise refuse(statement, f"operation {statement.opcode} is not on the log's list")


def optional(statement: Statement) -> bool:
    """Whether a run can leave the statement out: it is a wait, an arrival or a fence."""
    return any(rule.optional and rule.pattern.fullmatch(statement.opcode) for rule in RULES)


def bare(statement: Statement) -> Statement:
    """The statement without its predicate."""
    text = " ".join((statement.opcode, ", ".join(statement.operands))).rstrip()
    return replace(statement, predicate=None, text=text)


def with_log(context: Context, statement: Statement, found: list[Rule], text: str) -> str:
    """`text`, to which the unpredicated statement was lowered, with its log."""
    scope = context.scope()
    may_skip, skipped, end = any(r.optional for r in found), scope.label("out"), scope.label("end")
    if may_skip:
        chosen = scope.register("pred")
        scope.add(f"setp.eq.b32 {chosen}, %fl_skip, {statement.line};", f"@{chosen} bra {skipped};")
    for rule in found:
        if not rule.after:
            rule.emit(scope, statement, context)
    scope.add(text)
    done = statement.operands[0] if any(rule.emit is _wait for rule in found) else None
    for rule in found:
        if rule.after:
            if done:
                scope.add(f"@!{done} bra {end};")
            rule.emit(scope, statement, context)
    if may_skip:
        scope.add(f"bra {end};", f"{skipped}:")
        if done:
            scope.add(f"setp.eq.b32 {done}, 0, 0;")
    return scope.add(f"{end}:").text()


# ---- calls ---------------------------------------------------------------------------------


def _log(scope: Scope, statement: Statement, kind: Kind, a: str = "0", flags: int = 0) -> None:
    line = ("b32", str(statement.line))
    what = ("b32", str(kind | flags << 8))
    scope.call("fl_log", ("b64", "%fl_log"), what, line, ("b32", scope.set("b32", a)))


def _log_words(scope: Scope, statement: Statement, kind: Kind, *words: str, flags: int = 0) -> None:
    padded = [*words, *["0"] * (5 - len(words))]
    scope.call(
        "fl_log_words",
        ("b64", "%fl_log"),
        ("b32", str(kind | flags << 8)),
        ("b32", str(statement.line)),
        *[("b32", scope.set("b32", word)) for word in padded],
    )


def _log_copy(scope: Scope, statement: Statement, kind: Kind, smem: str, other: str, tensor: str,
              size: str, coordinates: list[str], flags: int = 0) -> None:  # fmt: skip
    padded = [*coordinates, *["0"] * (5 - len(coordinates))]
    scope.call(
        "fl_log_copy",
        ("b64", "%fl_log"),
        ("b32", str(kind | flags << 8)),
        ("b32", str(statement.line)),
        ("b32", smem),
        ("b32", scope.set("b32", other)),
        ("b64", scope.set("b64", tensor)),
        ("b32", scope.set("b32", size)),
        *[("b32", scope.set("b32", coordinate)) for coordinate in padded],
    )


def _scope_flags(opcode: str) -> int:
    flags = RELAXED if ".relaxed" in opcode else 0
    return flags | (CLUSTER if ".cluster" in opcode else 0) | (GPU if ".gpu" in opcode else 0)


# ---- mbarriers -----------------------------------------------------------------------------


@logged(r"mbarrier\.init\.shared(::cta)?\.b64")
def _init(scope: Scope, statement: Statement, context: Context) -> None:
    barrier, count = statement.operands
    _log_words(scope, statement, Kind.INIT, scope.place(barrier), count)


@logged(r"mbarrier\.(try|test)_wait\.parity.*", after=True, optional=True)
def _wait(scope: Scope, statement: Statement, context: Context) -> None:
    flags = _scope_flags(statement.opcode)
    barrier = scope.place(statement.operands[1])
    _log_words(scope, statement, Kind.WAIT, barrier, statement.operands[2], flags=flags)


@logged(
    r"mbarrier\.arrive(\.expect_tx)?(\.(release|relaxed))?(\.(cta|cluster))?"
    r"\.shared(::cta|::cluster)?\.b64",
    optional=True,
)
def _arrive(scope: Scope, statement: Statement, context: Context) -> None:
    expects = ".expect_tx" in statement.opcode
    barrier, *rest = [o for o in statement.operands if o.startswith("[")] + [
        o for o in statement.operands[1:] if not o.startswith("[")
    ]
    words = ["1", rest[0]] if expects else [rest[0] if rest else "1", "0"]
    flags = _scope_flags(statement.opcode)
    _log_words(scope, statement, Kind.ARRIVE, scope.place(barrier), *words, flags=flags)


@logged(r"mbarrier\.(expect|complete)_tx(\.relaxed)?(\.(cta|cluster))?\.shared(::\w+)?\.b64",
        optional=True)  # fmt: skip
def _bytes(scope: Scope, statement: Statement, context: Context) -> None:
    barrier, size = scope.place(statement.operands[0]), statement.operands[1]
    flags = _scope_flags(statement.opcode)
    if "expect_tx" in statement.opcode:
        _log_words(scope, statement, Kind.ARRIVE, barrier, "0", size, flags=flags)
    else:
        _log_words(scope, statement, Kind.COMPLETE, barrier, size, flags=flags)


# ---- barriers of threads, fences -----------------------------------------------------------


@logged(r"bar(rier)?(\.cta)?\.(sync|red|arrive)\b(?!.*warp).*", optional=True)
def _bar_arrive(scope: Scope, statement: Statement, context: Context) -> None:
    number, count = _named(statement, context)
    _log_words(scope, statement, Kind.BAR_ARRIVE, number, count)


@logged(r"bar(rier)?(\.cta)?\.(sync|red)\b.*", after=True)
def _bar_wait(scope: Scope, statement: Statement, context: Context) -> None:
    _log_words(scope, statement, Kind.BAR_WAIT, *_named(statement, context))


def _named(statement: Statement, context: Context) -> tuple[str, str]:
    """(number, threads) of a named barrier."""
    reduces = ".red" in statement.opcode
    operands = statement.operands[1:] if reduces else statement.operands
    rest = operands[1:-1] if reduces else operands[1:]
    return operands[0], rest[0] if rest else str(context.main_threads)


@logged(r"barrier\.cluster\.arrive.*", optional=True)
def _cluster_arrive(scope: Scope, statement: Statement, context: Context) -> None:
    _log(scope, statement, Kind.CLUSTER_ARRIVE, flags=_scope_flags(statement.opcode) & RELAXED)


@logged(r"barrier\.cluster\.wait.*", after=True, optional=True)
def _cluster_wait(scope: Scope, statement: Statement, context: Context) -> None:
    _log(scope, statement, Kind.CLUSTER_WAIT)


_FENCES = (
    (r"tcgen05\.fence::before_thread_sync", "tcgen05.before"),
    (r"tcgen05\.fence::after_thread_sync", "tcgen05.after"),
    (r"tcgen05\.wait::ld\.sync\.aligned", "wait.ld"),
    (r"tcgen05\.wait::st\.sync\.aligned", "wait.st"),
    (r"fence\.proxy\.async(\.shared::(cta|cluster))?", "proxy.async"),
    (r"fence\.proxy\.async\.global", "proxy.async.global"),
    (r"fence(\.(acq_rel|sc))?\.(cta|cluster|gpu|sys)|membar\.\w+", "acq_rel"),
    (r"fence\.mbarrier_init\.release\.cluster", "mbarrier_init"),
)


def _fence(name: str) -> Emit:
    def emit(scope: Scope, statement: Statement, context: Context) -> None:
        _log(scope, statement, Kind.FENCE, str(FENCES.index(name)))

    return emit


for _pattern, _name in _FENCES:
    logged(_pattern, optional=True)(_fence(_name))
logged(r"cp\.async\.bulk\.commit_group")(_fence("bulk.commit"))


@logged(r"cp\.async\.bulk\.wait_group(\.read)?", after=True, optional=True)
def _bulk_wait(scope: Scope, statement: Statement, context: Context) -> None:
    flags = READ_ONLY if ".read" in statement.opcode else 0
    _log(scope, statement, Kind.BULK_WAIT, statement.operands[0], flags)


@logged(r"ret(\.uni)?|exit")
def _exit(scope: Scope, statement: Statement, context: Context) -> None:
    _log(scope, statement, Kind.EXIT)


# ---- tensor memory -------------------------------------------------------------------------


@logged(r"tcgen05\.(ld|st)\.sync\.aligned\..*")
def _transfer(scope: Scope, statement: Statement, context: Context) -> None:
    from .operations import TRANSFER, transfer_columns

    match = re.fullmatch(TRANSFER, statement.opcode)
    loads, shape, count = match[1] == "ld", match[2], int(match[3])
    place = scope.place(statement.operands[1 if loads else 0])
    kind = Kind.LOAD_TMEM if loads else Kind.STORE_TMEM
    columns, lanes = str(transfer_columns(shape, count)), "32" if shape == "32x32b" else "16"
    _log_words(scope, statement, kind, place, columns, lanes)


@logged(r"tcgen05\.alloc\..*", after=True)
def _alloc(scope: Scope, statement: Statement, context: Context) -> None:
    found = scope.register("b32")
    scope.add(f"ld.shared.b32 {found}, {statement.operands[0]};")
    place, flags = scope.place(statement.operands[0]), _pair(statement)
    _log_words(scope, statement, Kind.ALLOC, found, statement.operands[1], place, flags=flags)


@logged(r"tcgen05\.dealloc\..*")
def _dealloc(scope: Scope, statement: Statement, context: Context) -> None:
    _log_words(scope, statement, Kind.DEALLOC, *statement.operands, flags=_pair(statement))


def _pair(statement: Statement) -> int:
    return PAIR if "cta_group::2" in statement.opcode else 0


@logged(r"tcgen05\.mma\..*")
def _mma(scope: Scope, statement: Statement, context: Context) -> None:
    accumulator, a, b, descriptor, *rest = statement.operands
    if rest and rest[0].startswith("{"):
        rest.pop(0)
    first, in_tmem = scope.register("b64"), a.startswith("[")
    scope.add(f"cvt.u64.u32 {first}, {scope.place(a)};" if in_tmem else f"mov.b64 {first}, {a};")
    flags = _pair(statement) | (TMEM_A if in_tmem else 0)
    scope.call(
        "fl_log_mma",
        ("b64", "%fl_log"),
        ("b32", str(Kind.MMA | flags << 8)),
        ("b32", str(statement.line)),
        ("b32", scope.place(accumulator)),
        ("b32", scope.set("b32", descriptor)),
        ("b64", first),
        ("b64", b),
        ("b32", scope.from_predicate(rest[0] if rest else "1")),
    )


@logged(r"tcgen05\.commit\..*", optional=True)
def _commit(scope: Scope, statement: Statement, context: Context) -> None:
    barrier, mask = scope.place(statement.operands[0]), scope.set("b32", "0xFFFFFFFF")
    if "multicast" in statement.opcode:
        scope.add(f"cvt.u32.u16 {mask}, {statement.operands[1]};")
    group = statement.opcode.partition("cta_group::")[2][0]
    _log_words(scope, statement, Kind.COMMIT, barrier, mask, group)


# ---- shared memory -------------------------------------------------------------------------

_SHARED = r"\.(\w+\.)*shared(::cta|::cluster)?\b.*"


@logged(r"(ld|st|atom|red)(?!\.async\b)" + _SHARED)
def _shared(scope: Scope, statement: Statement, context: Context) -> None:
    verb, (place,) = (
        statement.opcode.partition(".")[0],
        [operand for operand in statement.operands if operand.startswith("[")],
    )
    kind = {"ld": Kind.READ, "st": Kind.WRITE}.get(verb, Kind.UPDATE)
    width, packed = re.search(r"\.[bfsu]*(\d+)(x2)?$", statement.opcode).groups()
    size = int(width) // 8 * (2 if packed else 1)
    vectors = re.search(r"\.v(\d)\.", statement.opcode)
    _log_shared(scope, statement, kind, place, size * int(vectors[1] if vectors else 1), 32)


@logged(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16")
def _matrices(scope: Scope, statement: Statement, context: Context) -> None:
    loads = statement.opcode.startswith("ld")
    count = int(re.search(r"\.x([124])", statement.opcode)[1])
    place = statement.operands[1 if loads else 0]
    _log_shared(scope, statement, Kind.READ if loads else Kind.WRITE, place, 16, 8 * count)


def _log_shared(scope, statement, kind: Kind, place: str, size: int, lanes: int) -> None:
    scope.call(
        "fl_log_shared",
        ("b64", "%fl_log"),
        ("b32", str(kind)),
        ("b32", str(statement.line)),
        ("b32", scope.place(place)),
        ("b32", str(size)),
        ("b32", str(lanes)),
    )


# ---- copies --------------------------------------------------------------------------------


def _tensor(operand: str) -> tuple[str, list[str]]:
    """(map, coordinates) of `[map, {coordinates}]`."""
    match = re.fullmatch(r"\[\s*([^,]+?)\s*,\s*(\{[^}]*\})\s*\]", operand)
    if match is None:
        raise ValueError(f"tensor operand {operand!r} is not [map, {{coordinates}}]")
    return match[1], vector(match[2])


@logged(r"cp\.async\.bulk\.tensor\..d\.shared::\w+\.global.*")
def _tensor_load(scope: Scope, statement: Statement, context: Context) -> None:
    target, source, barrier, *_ = statement.operands
    tensor, coordinates = _tensor(source)
    smem, other = scope.place(target), scope.place(barrier)
    _log_copy(scope, statement, Kind.LOAD, smem, other, tensor, "0", coordinates)


@logged(r"cp\.async\.bulk\.shared::\w+\.global\..*")
def _bulk_load(scope: Scope, statement: Statement, context: Context) -> None:
    target, _, size, barrier, *_ = statement.operands
    smem, other = scope.place(target), scope.place(barrier)
    _log_copy(scope, statement, Kind.LOAD, smem, other, "0", size, [])


@logged(r"cp\.(reduce\.)?async\.bulk\.tensor\..d\.global\.shared::cta.*")
def _tensor_store(scope: Scope, statement: Statement, context: Context) -> None:
    target, source, *_ = statement.operands
    tensor, coordinates = _tensor(target)
    kind = Kind.REDUCE if ".reduce" in statement.opcode else Kind.STORE
    _log_copy(scope, statement, kind, scope.place(source), "0", tensor, "0", coordinates)


@logged(r"cp\.(reduce\.)?async\.bulk\.global\.shared::cta.*")
def _bulk_store(scope: Scope, statement: Statement, context: Context) -> None:
    _, source, size, *_ = statement.operands
    kind = Kind.REDUCE if ".reduce" in statement.opcode else Kind.STORE
    _log_copy(scope, statement, kind, scope.place(source), "0", "0", size, [])


@logged(r"cp\.async\.bulk\.shared::cluster\.shared::cta\..*")
def _peer_copy(scope: Scope, statement: Statement, context: Context) -> None:
    target, source, size, barrier, *_ = statement.operands
    smem, there = scope.place(source), scope.place(target)
    its_barrier = scope.place(barrier)
    _log_copy(scope, statement, Kind.COPY, smem, there, "0", size, [its_barrier])
