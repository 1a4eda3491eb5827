# SPDX-License-Identifier: Apache-2.0
"""The table of operations: what Hopper has, how the rest is lowered, what is refused.

A lowering takes the kernel's context and a statement and returns PTX text. Forms are matched on the
whole opcode, so that a modifier nobody thought of is an error and not silently dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..ptx import Statement
from .emit import Scope, address, vector
from .rewrite import Context, refuse

POISON = "0x7FC0DEAD"  # tensor memory that was never written
POISON_READ = "7"  # fault code, see engine.cu
LANE_BYTES, COLUMN_BYTES = 4, 512  # in the engine's image of TMEM: 128 lanes a column

Lowering = Callable[[Context, Statement], str]
TABLE: list[tuple[re.Pattern, Lowering]] = []

# Operations that sm_90 has in the forms kernels use; sm_100-only modifiers are refused below.
NATIVE = frozenset(
    """abs add addc and atom bfe bfi bmsk bra brev brkpt brx clz cnot copysign cos cp
    createpolicy cvt cvta discard div dp2a dp4a elect ex2 fence fma fns getctarank griddepcontrol
    isspacep istypep ld ldmatrix ldu lg2 lop3 mad mad24 madc mapa match max mbarrier membar min
    mma mov movmatrix mul mul24 multimem nanosleep neg not or pmevent popc prefetch prefetchu prmt
    rcp red redux rem rsqrt sad selp set setp shf shfl shl shr sin slct sqrt st stackrestore
    stacksave stmatrix sub subc sured szext tanh testp trap vote xor call""".split()
)
BLACKWELL_ONLY = re.compile(
    r"f32x2|cta_group|tile::(gather|scatter)|im2col::w|kind::|e2m1|e3m2|e2m3|ue8m0|s2f6"
    r"|tcgen05|clusterlaunchcontrol|\.ignore_oob|\.cp_mask|^st\.bulk|^cvt\.rs\b"
    r"|^(ld|st)\b.*(\.v8\b|\.v4\.[bfus]64)|^(ld|st)matrix\..*\.b(8|6|4)|^redux\.sync\..*f32"
    r"|^multimem\..*(e4m3|e5m2|acc::)"
)
_THREADS = re.compile(r"%(ntid|nwarpid|total_smem_size)\b")


def operation(pattern: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering for opcodes that match `pattern` as a whole."""

    def register(lowering: Lowering) -> Lowering:
        TABLE.append((re.compile(pattern), lowering))
        return lowering

    return register


def lower(context: Context, statement: Statement) -> str:
    """PTX for sm_90a that does what the statement does. Raises HopperRewriteError."""
    if not context.log:
        return _lower(context, statement)
    from . import record

    found = record.rules(statement)
    if not found:
        return _lower(context, statement)
    plain = record.bare(statement)
    try:
        text = record.with_log(context, plain, found, _lower(context, plain))
    except (ValueError, IndexError) as wrong:
        raise refuse(statement, str(wrong)) from wrong
    return _guarded(context, statement, text)


def _lower(context: Context, statement: Statement) -> str:
    for pattern, lowering in TABLE:
        if pattern.fullmatch(statement.opcode):
            try:
                text = lowering(context, statement)
            except (ValueError, IndexError) as wrong:
                raise refuse(statement, str(wrong)) from wrong
            return _guarded(context, statement, text)
    root = statement.opcode.partition(".")[0]
    if root not in NATIVE:
        raise refuse(statement, f"operation {statement.opcode} is not on the allow-list")
    if BLACKWELL_ONLY.search(statement.opcode):
        raise refuse(statement, "this form exists on Blackwell only and has no lowering")
    if context.has_tensor_memory and any(map(_THREADS.search, statement.operands)):
        return _guarded(context, statement, _main_threads(context, statement))
    return statement.text + ";"


def _guarded(context: Context, statement: Statement, text: str) -> str:
    """The lowered text under the statement's predicate, by a branch around it."""
    if statement.predicate is None or text == statement.text + ";":
        return text
    context.serial += 1
    skip = f"$fl_skip_{context.serial}"
    opposite = (
        statement.predicate[1:]
        if statement.predicate.startswith("!")
        else f"!{statement.predicate}"
    )
    return f"@{opposite} bra {skip};\n{text}\n{skip}:"


def _same(context: Context, statement: Statement) -> str:
    return statement.text + ";"


def _dropped(statement: Statement) -> str:
    return f"// on Blackwell: {statement.text}"


# ---- control -------------------------------------------------------------------------------


@operation(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32|griddepcontrol\.launch_dependents")
def _no_counterpart(context: Context, statement: Statement) -> str:
    """Register budgets do not exist with the engine's threads; an early launch is only a hint."""
    return _dropped(statement)


@operation(r"ret(\.uni)?|exit")
def _leave(context: Context, statement: Statement) -> str:
    """Tell the engine that this thread is done."""
    if not context.has_tensor_memory:
        return _same(context, statement)
    scope = context.scope()
    scope.call("fl_exit", ("b64", "%fl_slot"))
    return scope.add("ret;").text()


@operation(
    r"bar(rier)?(\.cta)?\.(sync|red(\.popc|\.and|\.or|\.u32|\.pred)+)(\.aligned|\.u32|\.pred)*"
)
def _cta_barrier(context: Context, statement: Statement) -> str:
    """A barrier of all threads must not count the engine's."""
    *result, barrier = statement.operands[: 2 if ".red" in statement.opcode else 1]
    rest = statement.operands[len(result) + 1 :]
    if not context.has_tensor_memory or len(rest) > len(result):  # it has a count
        return _same(context, statement)
    operands = [*result, barrier, str(context.main_threads), *rest]
    return f"{statement.opcode} {', '.join(operands)};"


@operation(r"bar(rier)?(\.cta)?\.arrive(\.aligned)?|bar\.warp\.sync")
def _counted_barrier(context: Context, statement: Statement) -> str:
    """Always with a count, or of a warp."""
    return _same(context, statement)


@operation(r"barrier\.cluster\.(arrive|wait)(\.(release|relaxed|acquire))?(\.aligned)?")
def _cluster_barrier(context: Context, statement: Statement) -> str:
    """In software: the hardware's would count the engine's threads."""
    if not context.has_tensor_memory:
        return _same(context, statement)
    scope = context.scope()
    verb = "arrive" if ".arrive" in statement.opcode else "wait"
    scope.call(f"fl_cluster_{verb}", *_here(context, statement, main=True))
    return scope.text()


def _main_threads(context: Context, statement: Statement) -> str:
    """Reading %ntid.x gives the number of main threads."""
    form = re.fullmatch(r"mov\.[bsu](16|32)|cvt\.[\w.]+", statement.opcode)
    if not form or statement.operands[1] not in ("%ntid", "%ntid.x"):
        raise refuse(statement, "this way of reading the size of a CTA is not on the allow-list")
    scope = context.scope()
    if statement.opcode.startswith("mov"):
        return f"{statement.opcode} {statement.operands[0]}, {context.main_threads};"
    count = scope.set("b32", str(context.main_threads))
    return scope.add(f"{statement.opcode} {statement.operands[0]}, {count};").text()


def _here(context: Context, statement: Statement, main: bool = False) -> list[tuple[str, str]]:
    """Arguments that most engine functions begin or end with."""
    middle = [("b32", str(context.main_threads))] if main else []
    return [("b64", "%fl_slot"), *middle, ("b32", str(statement.line))]


# ---- waiting -------------------------------------------------------------------------------


@operation(
    r"mbarrier\.(try|test)_wait(\.parity)?((\.acquire|\.relaxed)?\.(cta|cluster))?\.shared(::cta)?\.b64"
)
def _wait(context: Context, statement: Statement) -> str:
    """The wait itself is native; what fails is counted, so that a hang becomes a report."""
    if not context.has_tensor_memory:
        return _same(context, statement)
    done, barrier, phase = statement.operands[:3]
    parity = phase if ".parity" in statement.opcode else "0"  # a token does not tell
    scope = context.scope()
    passed = scope.label("passed")
    scope.add(
        f"{statement.opcode} {', '.join(statement.operands)};",
        f"@{done} mov.b64 %fl_since, 0;",
        f"@{done} bra {passed};",
    )
    fresh = scope.register("pred")
    scope.add(
        f"setp.ne.b64 {fresh}, %fl_since, 0;",
        f"@!{fresh} mov.u64 %fl_since, %globaltimer;",
    )
    where = scope.place(barrier)
    scope.call(
        "fl_wait_failed",
        ("b64", "%fl_slot"),
        ("b32", where),
        ("b32", scope.set("b32", parity)),
        ("b32", str(statement.line)),
        ("b32", "1"),
        ("b64", "%fl_since"),
    )
    return scope.add(f"{passed}:").text()


@operation(r"mbarrier\..*wait.*")
def _other_wait(context: Context, statement: Statement) -> str:
    """Native, but nobody would notice that it never ends."""
    if context.has_tensor_memory:
        raise ValueError("this form of wait is not on the allow-list")
    return _same(context, statement)


# ---- tensor memory -------------------------------------------------------------------------


@operation(r"tcgen05\.alloc\.cta_group::[12]\.sync\.aligned\.shared::cta\.b32")
def _alloc(context: Context, statement: Statement) -> str:
    scope = context.scope()
    target = scope.place(statement.operands[0])
    columns = scope.set("b32", statement.operands[1])
    slot, line = _here(context, statement)
    scope.call("fl_alloc", slot, ("b32", target), ("b32", columns), line)
    return scope.text()


@operation(r"tcgen05\.dealloc\.cta_group::[12]\.sync\.aligned\.b32")
def _dealloc(context: Context, statement: Statement) -> str:
    scope = context.scope()
    where = scope.set("b32", statement.operands[0])
    columns = scope.set("b32", statement.operands[1])
    slot, line = _here(context, statement)
    scope.call("fl_dealloc", slot, ("b32", where), ("b32", columns), line)
    return scope.text()


@operation(r"tcgen05\.relinquish_alloc_permit\.cta_group::[12]\.sync\.aligned")
def _relinquish(context: Context, statement: Statement) -> str:
    scope = context.scope()
    scope.call("fl_relinquish", *_here(context, statement))
    return scope.text()


@operation(r"tcgen05\.wait::ld\.sync\.aligned")
def _wait_loads(context: Context, statement: Statement) -> str:
    """Loads are ordinary ones here: program order and the next release cover them."""
    return _dropped(statement)


@operation(r"tcgen05\.(wait::st\.sync\.aligned|fence::(before|after)_thread_sync)")
def _order_stores(context: Context, statement: Statement) -> str:
    return "fence.acq_rel.gpu;"


TRANSFER = (
    r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b)"
    r"\.x(1|2|4|8|16|32|64|128)\.b32"
)


@operation(TRANSFER)
def _transfer(context: Context, statement: Statement) -> str:
    """Loads and stores of global memory, word by word, at the place of (column, lane)."""
    match = re.fullmatch(TRANSFER, statement.opcode)
    loads, shape, count = match[1] == "ld", match[2], int(match[3])
    values, place = statement.operands if loads else reversed(statement.operands)
    registers = vector(values)
    offsets = transfer_offsets(shape, count)
    if len(offsets) != len(registers):
        raise ValueError(f"{shape}.x{count} moves {len(offsets)} registers, not {len(registers)}")
    scope = context.scope()
    slot, line = _here(context, statement)
    where = scope.place(place)
    lanes = "32" if shape == "32x32b" else "16"
    columns = str(transfer_columns(shape, count))
    start = scope.call(
        "fl_tmem", slot, ("b32", where), ("b32", columns), ("b32", lanes), line, returns="b64"
    )
    base = _thread_base(scope, shape, start)
    verb = "ld.relaxed.gpu.global.b32" if loads else "st.relaxed.gpu.global.b32"
    for register, offset in zip(registers, offsets):
        spot = f"[{base}+{offset}]"
        scope.add(f"{verb} {register}, {spot};" if loads else f"{verb} {spot}, {register};")
    if loads:
        _check_poison(scope, registers, where, line)
    return scope.text()


def transfer_columns(shape: str, count: int) -> int:
    """32-bit columns that tcgen05.ld/st of `shape`.x`count` touches (PTX 9.7.16.2)."""
    return {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}[shape] * count


def transfer_offsets(shape: str, count: int) -> list[int]:
    """Byte offset of each register of a thread from the thread's first word.

    32x32b: register i is column i of the thread's own lane. The 16-lane shapes repeat a matrix
    fragment over the columns; where a thread starts in it, `_thread_base` says (PTX 9.7.16.2).
    """
    if shape in ("32x32b", "16x64b"):
        step = 1 if shape == "32x32b" else 2
        return [repeat * step * COLUMN_BYTES for repeat in range(count)]
    width = 2 if shape == "16x256b" else 1  # neighbouring columns; then the same 8 lanes further on
    return [
        (repeat * 4 * width + column) * COLUMN_BYTES + half * 8 * LANE_BYTES
        for repeat in range(count)
        for half in (0, 1)
        for column in range(width)
    ]


def _thread_base(scope: Scope, shape: str, start: str) -> str:
    """Address of the first word of thread t of the warp: its lane and column of the fragment.

    32x32b: lane t. 16x64b: lane t/4 + 8 (t mod 2), column t/2 mod 2. 16x128b and 16x256b: lane t/4,
    column t mod 4, counted in single columns and in pairs.
    """
    thread, wide, base = scope.register("b32"), scope.register("b64"), scope.register("b64")
    lane, column = scope.register("b32"), scope.register("b32")
    scope.add(f"mov.u32 {thread}, %laneid;")
    if shape == "32x32b":
        scope.add(f"mov.b32 {lane}, {thread};", f"mov.b32 {column}, 0;")
    elif shape == "16x64b":
        scope.add(
            f"and.b32 {column}, {thread}, 1;",
            f"shr.u32 {lane}, {thread}, 2;",
            f"mad.lo.u32 {lane}, {column}, 8, {lane};",
            f"bfe.u32 {column}, {thread}, 1, 1;",
        )
    else:
        scope.add(f"shr.u32 {lane}, {thread}, 2;", f"and.b32 {column}, {thread}, 3;")
        if shape == "16x256b":
            scope.add(f"shl.b32 {column}, {column}, 1;")
    scope.add(
        f"mul.lo.u32 {column}, {column}, {COLUMN_BYTES};",
        f"mad.lo.u32 {lane}, {lane}, {LANE_BYTES}, {column};",
        f"cvt.u64.u32 {wide}, {lane};",
        f"add.u64 {base}, {start}, {wide};",
    )
    return base


def _check_poison(scope: Scope, registers: list[str], where: str, line: tuple[str, str]) -> None:
    """Fault when a loaded word was never written."""
    bad, any_bad, clean = scope.register("pred"), scope.register("pred"), scope.label("clean")
    scope.add(f"setp.eq.b32 {any_bad}, {registers[0]}, {POISON};")
    for register in registers[1:]:
        scope.add(
            f"setp.eq.b32 {bad}, {register}, {POISON};", f"or.pred {any_bad}, {any_bad}, {bad};"
        )
    scope.add(f"@!{any_bad} bra {clean};")
    zero = ("b32", "0")
    scope.call("fl_fault", ("b32", POISON_READ), line, ("b32", where), zero, zero, zero)
    scope.add(f"{clean}:")


@operation(r"tcgen05\.mma\.cta_group::[12]\.kind::f16(\.collector::a::(discard|lastuse|fill|use))?")
def _mma(context: Context, statement: Statement) -> str:
    """One entry in the engine's queue; collector hints do not change the result."""
    accumulator, a, b, descriptor, *rest = statement.operands
    scope = context.scope()
    if rest and rest[0].startswith("{"):
        _no_disabled_lanes(scope, statement, vector(rest.pop(0)))
    if len(rest) > 1:
        raise ValueError("scale-input-d is not on the allow-list")
    slot, line = _here(context, statement)
    place = scope.place(accumulator)
    in_tmem = a.startswith("[")
    kind = int(statement.opcode.partition("cta_group::")[2][0]) + (4 if in_tmem else 0)
    first = scope.register("b64")
    if in_tmem:
        scope.add(f"cvt.u64.u32 {first}, {scope.place(a)};")
    else:
        scope.add(f"mov.b64 {first}, {a};")
    scope.call(
        "fl_push_mma",
        slot,
        line,
        ("b32", place),
        ("b32", scope.set("b32", descriptor)),
        ("b64", first),
        ("b64", b),
        ("b32", scope.from_predicate(rest[0] if rest else "1")),
        ("b32", str(kind)),
    )
    return scope.text()


def _no_disabled_lanes(scope: Scope, statement: Statement, masks: list[str]) -> None:
    """A mask that disables output lanes is refused: literally here, at run time by a fault."""
    union = scope.set("b32", masks[0])
    for mask in masks[1:]:
        scope.add(f"or.b32 {union}, {union}, {mask};")
    none, label = scope.register("pred"), scope.label("lanes")
    scope.add(f"setp.eq.b32 {none}, {union}, 0;", f"@{none} bra {label};")
    zero = ("b32", "0")
    line = ("b32", str(statement.line))
    scope.call("fl_fault", ("b32", "13"), line, ("b32", union), zero, zero, zero)
    scope.add(f"{label}:")


@operation(
    r"tcgen05\.commit\.cta_group::[12]\.mbarrier::arrive::one\.shared::cluster"
    r"(\.multicast::cluster)?\.b64"
)
def _commit(context: Context, statement: Statement) -> str:
    scope = context.scope()
    slot, line = _here(context, statement)
    barrier = scope.place(statement.operands[0])
    mask = scope.register("b32")
    if "multicast" in statement.opcode:
        scope.add(f"cvt.u32.u16 {mask}, {statement.operands[1]};")
    else:
        scope.add(f"mov.b32 {mask}, 0xFFFFFFFF;")
    group = statement.opcode.partition("cta_group::")[2][0]
    scope.call("fl_push_commit", slot, line, ("b32", barrier), ("b32", mask), ("b32", group))
    return scope.text()


# ---- copies --------------------------------------------------------------------------------

_TENSOR_LOAD = (
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(?:cluster|cta)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(?:\.cta_group::[12])?"
    r"(\.L2::cache_hint)?(?:\.cta_group::[12])?"
)


@operation(_TENSOR_LOAD)
def _tensor_load(context: Context, statement: Statement) -> str:
    """Queued for the TMA warp, which may delay it and knows how to reach a peer's barrier."""
    match = re.fullmatch(_TENSOR_LOAD, statement.opcode)
    if not context.has_tensor_memory:
        return _same(context, statement)
    if match[2]:
        raise ValueError("a multicast load is not on the allow-list")
    target, source, barrier, *rest = statement.operands
    form = re.fullmatch(r"\[\s*([^,]+?)\s*,\s*(\{[^}]*\})\s*\]", source)
    if form is None:
        raise ValueError(f"tensor operand {source!r} is not [map, {{coordinates}}]")
    tensor, coordinates = form.groups()
    policy = rest[-1] if match[3] else "0"
    shape = int(match[1]) + (8 if match[3] else 0)
    return _queue_copy(
        context, statement, target, barrier, tensor, policy, shape, "0", vector(coordinates)
    )


_BULK_LOAD = (
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster)?(\.L2::cache_hint)?"
)


@operation(_BULK_LOAD)
def _bulk_load(context: Context, statement: Statement) -> str:
    """Queued like the loads of tensors."""
    match = re.fullmatch(_BULK_LOAD, statement.opcode)
    if not context.has_tensor_memory:
        return _same(context, statement)
    if match[1]:
        raise ValueError("a multicast load is not on the allow-list")
    target, source, size, barrier, *rest = statement.operands
    policy, shape = (rest[0], 14) if match[2] else ("0", 6)
    return _queue_copy(context, statement, target, barrier, source, policy, shape, size, [])


def _queue_copy(context, statement, target, barrier, source, policy, shape, size, coordinates):
    scope = context.scope()
    slot, line = _here(context, statement)
    start = scope.register("b64")
    if source.startswith("["):
        base, offset = address(source)
        scope.add(f"add.u64 {start}, {base}, {offset};")
    else:
        scope.add(f"mov.b64 {start}, {source};")
    padded = [*coordinates, *["0"] * (5 - len(coordinates))]
    scope.call(
        "fl_push_tma",
        slot,
        line,
        ("b32", scope.place(target)),
        ("b32", scope.place(barrier)),
        ("b64", start),
        ("b64", scope.set("b64", policy)),
        ("b32", str(shape)),
        ("b32", scope.set("b32", size)),
        *[("b32", scope.set("b32", coordinate)) for coordinate in padded],
    )
    return scope.text()


@operation(
    r"cp\.async\.bulk\..*\.shared::cta.*|cp\.reduce\.async\.bulk\..*|cp\.async\.bulk\.[cw].*"
)
def _native_copy(context: Context, statement: Statement) -> str:
    """Stores, reductions, copies to a peer, groups: native, unless they carry a Blackwell form."""
    if BLACKWELL_ONLY.search(statement.opcode):
        raise ValueError("this form exists on Blackwell only and has no lowering")
    return _same(context, statement)


# ---- cluster launch control ----------------------------------------------------------------


@operation(
    r"clusterlaunchcontrol\.try_cancel\.async\.shared::cta\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster::all)?\.b128"
)
def _try_cancel(context: Context, statement: Statement) -> str:
    """Every request is answered "nothing left to take over": each CTA does its own tile only."""
    scope = context.scope()
    response, barrier = (scope.place(operand) for operand in statement.operands)
    everyone = "multicast" in statement.opcode
    rank = scope.set("b32", "0" if everyone else "%cluster_ctarank")
    end, more, again = scope.register("b32"), scope.register("pred"), scope.label("again")
    there, its_barrier, zero = scope.register("b32"), scope.register("b32"), scope.set("b32", "0")
    scope.add(
        f"mov.u32 {end}, %cluster_nctarank;" if everyone else f"add.u32 {end}, {rank}, 1;",
        f"{again}:",
        f"mapa.shared::cluster.u32 {there}, {response}, {rank};",
        f"mapa.shared::cluster.u32 {its_barrier}, {barrier}, {rank};",
        f"st.shared::cluster.v4.b32 [{there}], {{{zero}, {zero}, {zero}, {zero}}};",
        "fence.acq_rel.cluster;",
        f"mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [{its_barrier}], 16;",
        f"add.u32 {rank}, {rank}, 1;",
        f"setp.lt.u32 {more}, {rank}, {end};",
        f"@{more} bra {again};",
    )
    return scope.text()


@operation(r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128")
def _is_canceled(context: Context, statement: Statement) -> str:
    """True for any answer but the one `_try_cancel` gives, all zero."""
    scope = context.scope()
    low, high = scope.register("b64"), scope.register("b64")
    scope.add(f"mov.b128 {{{low}, {high}}}, {statement.operands[1]};")
    scope.add(f"or.b64 {low}, {low}, {high};", f"setp.ne.b64 {statement.operands[0]}, {low}, 0;")
    return scope.text()


@operation(r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid(::[xyz])?(\.v4)?\.b32\.b128")
def _first_cta(context: Context, statement: Statement) -> str:
    """Only defined after a successful cancel, which never happens here."""
    return "\n".join(f"mov.b32 {name}, 0;" for name in vector(statement.operands[0]) if name != "_")


# ---- arithmetic ----------------------------------------------------------------------------


@operation(r"(fma|mul|add|sub)(\.r[nzmp])?(\.ftz)?\.f32x2")
def _packed(context: Context, statement: Statement) -> str:
    """Two scalar operations, rounded alike."""
    opcode = statement.opcode.removesuffix("x2")
    if not re.search(r"\.r[nzmp]\b", opcode):
        opcode = opcode.replace(".", ".rn.", 1)
    target, *sources = statement.operands
    scope = context.scope()
    halves = []
    for source in sources:
        low, high = scope.register("b32"), scope.register("b32")
        scope.add(f"mov.b64 {{{low}, {high}}}, {source};")
        halves.append((low, high))
    results = [scope.register("b32"), scope.register("b32")]
    for index, result in enumerate(results):
        scope.add(f"{opcode} {result}, {', '.join(half[index] for half in halves)};")
    return scope.add(f"mov.b64 {target}, {{{', '.join(results)}}};").text()


@operation(r"(max|min)(\.ftz)?(\.NaN)?(\.xorsign\.abs)?(\.abs)?\.f32")
def _three_inputs(context: Context, statement: Statement) -> str:
    if len(statement.operands) < 4:
        return _same(context, statement)
    if ".abs" in statement.opcode:
        raise ValueError("absolute values of three inputs are not on the allow-list")
    target, a, b, c = statement.operands
    scope = context.scope()
    partial = scope.register("f32")
    return scope.add(
        f"{statement.opcode} {partial}, {a}, {b};", f"{statement.opcode} {target}, {partial}, {c};"
    ).text()


@operation(r"(fma|add|sub)(\.r[nzmp])?(\.sat)?\.f32\.(bf16|f16)")
def _mixed(context: Context, statement: Statement) -> str:
    """Widen the 16-bit operands, then the float32 operation: exact, one rounding as before."""
    opcode, _, kind = statement.opcode.rpartition(".")
    target, *sources = statement.operands
    narrow = 2 if opcode.startswith("fma") else 1
    scope = context.scope()
    for index in range(narrow):
        wide = scope.register("f32")
        scope.add(f"cvt.f32.{kind} {wide}, {sources[index]};")
        sources[index] = wide
    return scope.add(f"{opcode} {target}, {', '.join(sources)};").text()


@operation(r"(ld|st)(\.relaxed\.gpu)?\.global(\.nc)?(\.L\d::[\w:]+)*\.(v8\.[bfus]32|v4\.[bfus]64)")
def _wide_access(context: Context, statement: Statement) -> str:
    """256 bits as two accesses of 128."""
    loads = statement.opcode.startswith("ld")
    place, values = reversed(statement.operands) if loads else statement.operands
    base, offset = address(place)
    registers = vector(values)
    half = len(registers) // 2
    opcode = re.sub(r"\.L2::\w+", "", statement.opcode).replace(".v8.", ".v4.")
    opcode = opcode if half == 4 else opcode.replace(".v4.", ".v2.")
    scope = context.scope()
    start = scope.set("b64", base)  # a load may overwrite the register of its own address
    for index in range(2):
        spot = f"[{start}+{int(offset, 0) + 16 * index}]"
        part = "{" + ", ".join(registers[index * half : (index + 1) * half]) + "}"
        scope.add(f"{opcode} {part}, {spot};" if loads else f"{opcode} {spot}, {part};")
    return scope.text()
