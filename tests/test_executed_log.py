# SPDX-License-Identifier: Apache-2.0
"""The executed log: its bytes, its steps, and what it proves. No GPU: recorded and made-up logs."""

import random
import time
from dataclasses import replace

import pytest
from flash_ladder.common import contract
from flash_ladder.common.device_mutation import explanation, without
from flash_ladder.common.executed import REMOTE_SCOPE, LogMismatch, check_log
from flash_ladder.common.hopper.layouts import (
    InstructionDescriptor,
    SmemDescriptor,
    encode_instruction_descriptor,
    encode_smem_descriptor,
)
from flash_ladder.common.hopper.log import (
    ALONE,
    CLUSTER,
    FENCES,
    PAIR,
    READ_ONLY,
    RELAXED,
    TMEM_A,
    Kind,
    LogError,
    decode,
)
from flash_ladder.common.hopper.steps import Names, steps
from flash_ladder.common.lint import lint
from flash_ladder.common.plan import Arrival, Barrier, Plan, Role, SmemBuffer, TmemRegion

from tests.recorded_logs import (
    ALL,
    CODES,
    HEAD_DIM,
    INDEX,
    KERNELS,
    NAMES,
    SMEM,
    data_of,
    encode,
    event,
    log_of,
    made,
    named_sites,
    names_of,
    plan_of,
    ptx_of,
    source_of,
    without_line,
)

BARRIER, OTHER = SMEM, SMEM + 8  # addresses of mbarriers
PEER = 1 << 24  # of CTA 1, above an address
COLUMN = 4  # cells of tensor memory


def mbarrier(kind, barrier, *words, warp, lanes=1, **changes):
    return event(kind, barrier, *words, warp=warp, lanes=lanes, **changes)


def init(barrier=BARRIER, count=1, warp=0, **changes):
    return mbarrier(Kind.INIT, barrier, count, warp=warp, **changes)


def arrive(warp, barrier=BARRIER, size=0, each=1, **changes):
    return mbarrier(Kind.ARRIVE, barrier, each, size, warp=warp, **changes)


def wait(warp, parity=0, barrier=BARRIER, **changes):
    return event(Kind.WAIT, barrier, parity, warp=warp, **changes)


def fence(warp, name, **changes):
    return event(Kind.FENCE, FENCES.index(name), warp=warp, **changes)


def write(warp, *cells, **changes):
    return event(Kind.WRITE, 4, warp=warp, cells=cells, **changes)


def read(warp, *cells, **changes):
    return event(Kind.READ, 4, warp=warp, cells=cells, **changes)


def sync(*warps, number=0, threads=None, **changes):
    """All of `warps` come to a named barrier, then all go on."""
    threads = threads or 32 * len(warps)
    kinds = (Kind.BAR_ARRIVE, Kind.BAR_WAIT)
    return [event(k, number, threads, warp=w, **changes) for k in kinds for w in warps]


def tmem(kind, warp, column=0, columns=32, **changes):
    return event(kind, column, columns, 32, warp=warp, **changes)


def words64(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32


IDESC = encode_instruction_descriptor(InstructionDescriptor(128, 128, True))
A_START, B_START = 4096, 20480


def mma(warp=0, d=0, accumulate=1, k=0, m=128, a_column=None, **changes):
    """One instruction of depth 16 on operands with rows of 128 bytes; k counts instructions."""
    a = words64(encode_smem_descriptor(SmemDescriptor(A_START + 32 * k, 16, 1024, 128)))
    b = words64(encode_smem_descriptor(SmemDescriptor(B_START + 32 * k, 16, 1024, 128)))
    if a_column is not None:
        a, changes["flags"] = (a_column, 0), TMEM_A
    word = encode_instruction_descriptor(InstructionDescriptor(m, 128, True))
    return event(Kind.MMA, d, *a, *b, word, accumulate, warp=warp, lanes=1, **changes)


def commit(warp=0, barrier=BARRIER, mask=ALONE, **changes):
    return mbarrier(Kind.COMMIT, barrier, mask, 1, warp=warp, **changes)


def copy(kind, warp, smem, size, barrier=0, tensor=0, row=0, column=0, **changes):
    words = (smem, barrier, size, tensor, 0, column, row)
    return event(kind, *words, warp=warp, lanes=1, **changes)


def texts(log, **options) -> list[str]:
    """Errors in words."""
    return [str(row) for row in check_log(log, **options).errors]


def only(log, **options) -> str:
    """The one error of a log."""
    (text,) = texts(log, **options)
    return text


# ---- decoding ------------------------------------------------------------------------------


def test_the_header_and_every_word_of_a_record():
    rows = [
        mma(warp=3, line=7, rank=1),
        wait(2, 1, line=8, flags=CLUSTER),
        fence(1, "wait.st", line=9, lanes=0xF0),
        copy(Kind.LOAD, 0, 2048, 64, BARRIER, 5, 128, line=10),
        event(Kind.EXIT, warp=15, line=11),
    ]
    log = decode(encode(rows, smem=PEER | SMEM, threads=96, ctas=2, cta=6))
    assert (log.smem, log.threads, log.ctas, log.cta) == (SMEM, 96, 2, 6)
    assert list(log.events) == rows
    assert log.size == 16 * (4 + 3 + 2 + 1 + 3 + 1)


def test_what_follows_the_last_record_is_not_read():
    data = encode([fence(0, "acq_rel")])
    assert decode(data + b"\xff" * 40) == decode(data)


def test_lanes_of_shared_memory_each_have_their_words():
    row = event(Kind.WRITE, 8 | 1 << 16, warp=1, lanes=0b111, line=4, cells=(10, 20, 11))
    (found,) = decode(encode([row])).events
    assert found.cells == (10, 11, 12, 20, 21)  # 8 bytes of each; those without are left out
    assert found.words == (8 | 1 << 16,) and found.count == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are less than a log's header"),
        (encode([])[:63], "63 bytes are less than a log's header"),
        (bytes(64), "the header says 0 threads, 0 CTAs: nothing was logged"),
        (encode([], ctas=3), "64 threads, 3 CTAs: nothing was logged"),
        (encode([mma()])[:-16], "the log has 3 units, the data 2"),
    ],
)
def test_a_header_that_cannot_be(data, words):
    with pytest.raises(LogError, match=words):
        decode(data)


def test_a_record_that_cannot_be():
    data = bytearray(encode([wait(0), fence(0, "acq_rel")]))
    data[16 * 6] = 99
    with pytest.raises(LogError, match="unit 2: 99 is no kind of record"):
        decode(bytes(data))
    data = bytearray(encode([wait(0), mma()]))
    data[0:4] = (4).to_bytes(4, "little")
    with pytest.raises(LogError, match="unit 2: MMA is cut off"):
        decode(bytes(data))


def _read_back(*rows):
    return list(decode(encode(rows)).events)


def test_lanes_that_came_one_after_the_other_become_one():
    first, last = write(0, 1, line=5, lanes=1), write(0, 9, line=5, lanes=2)
    between = write(1, 3, line=5, lanes=1)
    assert _read_back(first, between, last) == [replace(first, lanes=3, cells=(1, 9)), between]
    third = write(0, 4, line=5, lanes=4)
    assert _read_back(first, last, third) == [replace(third, lanes=7, cells=(1, 4, 9))]


@pytest.mark.parametrize(
    "second",
    [
        arrive(0, line=5, lanes=0b11),  # lane 0 takes part twice
        arrive(0, line=6, lanes=0b10),
        arrive(0, OTHER, line=5, lanes=0b10),
        arrive(0, line=5, lanes=0b10, flags=RELAXED),
        arrive(1, line=5, lanes=0b10),
        arrive(0, line=5, lanes=0b10, rank=1),
        wait(0, 1, line=5, lanes=0b10),
    ],
)
def test_other_records_stay_their_own(second):
    first = arrive(0, line=5, lanes=0b01)
    assert _read_back(first, second) == [first, second]
    assert len(_read_back(first, arrive(0, line=5, lanes=0b10))) == 1


def _statement(kind, line, word=0):
    words = (0,) if kind == Kind.FENCE else (BARRIER, word, 0, 0, 0)
    return event(kind, *words, warp=0, line=line)


def test_lanes_that_came_apart_over_several_statements_come_together():
    start, after, product = (
        _statement(Kind.WAIT, 3, 0),
        _statement(Kind.FENCE, 4),
        replace(_statement(Kind.COMMIT, 5), lanes=1),  # an elected lane
    )
    again = _statement(Kind.WAIT, 3, 1)
    ahead = [replace(row, lanes=ALL - 1) for row in (start, after, again)]
    behind = [replace(row, lanes=1) for row in (start, after, product, again)]
    assert _read_back(*ahead, *behind) == [start, after, product, again]
    assert _read_back(*behind, *ahead) == [start, after, product, again]


@pytest.mark.parametrize("seed", range(200))
def test_lanes_in_any_interleaving_come_together(seed):
    """Three groups of lanes run a loop at their own pace; one statement they meet at, some are one
    lane's: every lane's order and every statement's lanes come out whole."""
    draw = random.Random(seed)
    kinds = (Kind.WAIT, Kind.FENCE, Kind.ARRIVE, Kind.COMMIT, Kind.BAR_ARRIVE)
    body = [draw.choice(kinds) for _ in range(draw.randrange(3, 9))]
    turns = draw.randrange(1, 5)
    program = [_statement(kind, line) for _ in range(turns) for line, kind in enumerate(body)]
    program = [replace(e, lanes=1) if e.kind == Kind.COMMIT else e for e in program]
    found = _read_back(*_interleaved(draw, program))
    for lane in (0, 5, 20):
        mine = lambda events, lane=lane: [e for e in events if e.lanes >> lane & 1]
        assert mine(found) == mine(program)
    assert len(found) == len(program)


def _interleaved(draw, program):
    """Records of a program by three groups of lanes; at BAR_ARRIVE they wait for each other."""
    groups, at, records = (1, 0xFFFE, 0xFFFF0000), [0, 0, 0], []
    while min(at) < len(program):
        waiting = lambda g: at[g] > min(at) and program[at[g]].kind == Kind.BAR_ARRIVE
        group = draw.choice([g for g in range(3) if at[g] < len(program) and not waiting(g)])
        row = program[at[group]]
        if row.kind == Kind.BAR_ARRIVE and max(at) > min(at):
            group = at.index(min(at))
            row = program[at[group]]
        together = row.kind == Kind.BAR_ARRIVE and max(at) == min(at)
        moved = range(3) if together else [group]
        lanes = row.lanes & sum(groups[g] for g in moved)
        records += [replace(row, lanes=lanes)] if lanes else []
        for g in moved:
            at[g] += 1
    return records


def test_records_with_something_between_stay_their_own():
    first, between, last = arrive(0, line=5, lanes=1), wait(0, line=6), arrive(0, line=5, lanes=2)
    assert _read_back(first, between, last) == [first, between, last]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logs_are_read_whole(name):
    log = log_of(name)
    assert log.size == len(data_of(name)) and log.threads == plan_of(name).threads
    with pytest.raises(LogError):
        decode(data_of(name)[:-16])


# ---- steps ---------------------------------------------------------------------------------


def _steps(*events, plan=None, ctas=1):
    return [(row.op, row.numbers) for row in steps(made(*events, ctas=ctas), plan)]


def test_the_instructions_of_a_product_are_one_step():
    rows = [mma(accumulate=0), mma(k=1), mma(k=2), mma(accumulate=0), mma(d=128), mma(d=128, k=1)]
    assert _steps(*rows) == [
        ("mma columns 0-127", (0, 128, 0, 128, 128, 48)),
        ("mma columns 0-127", (0, 128, 0, 128, 128, 16)),
        ("mma columns 128-255", (128, 128, 1, 128, 128, 32)),
    ]
    one, two = steps(made(mma())), steps(made(mma(), mma(k=1)))
    (_, cells), (_, b_cells) = two[0].reads[1], two[0].reads[0]
    size = lambda intervals: sum(stop - start for start, stop in intervals)
    assert (size(cells), size(b_cells)) == (128 * 16, 128 * 16)  # 32 elements a row, of 2 bytes
    assert size(one[0].reads[1][1]) == 128 * 8 and cells[0][0] == A_START // 4
    assert dict(two[0].writes) == {"tmem": ((0, 128 * COLUMN),)}


def test_a_product_with_a_in_tensor_memory_reads_its_columns():
    (row,) = steps(made(mma(d=256, a_column=64)))
    assert row.reads[1] == ("tmem", ((64 * COLUMN, 72 * COLUMN),))
    assert row.writes == (("tmem", ((256 * COLUMN, 384 * COLUMN),)),)


def test_neighbouring_columns_are_one_step():
    ld, st = Kind.LOAD_TMEM, Kind.STORE_TMEM
    rows = [tmem(ld, 0, 0), tmem(ld, 0, 32), tmem(ld, 0, 96), tmem(st, 0, 128), tmem(ld, 0, 160)]
    assert _steps(*rows, tmem(ld, 1, 192)) == [
        ("tmem.ld columns 0-63", (0, 64, 32)),
        ("tmem.ld columns 96-127", (96, 32, 32)),
        ("tmem.st columns 128-159", (128, 32, 32)),
        ("tmem.ld columns 160-191", (160, 32, 32)),
        ("tmem.ld columns 192-223", (192, 32, 32)),
    ]


def test_a_warp_touches_its_own_lane_quarter():
    (row,) = steps(made(tmem(Kind.STORE_TMEM, 1, 64 << 16 | 8, 2)))
    assert row.writes == (("tmem", ((8 * COLUMN + 2, 8 * COLUMN + 3), (38, 39))),)


def test_the_boxes_of_a_tile_are_one_step():
    boxes = [
        copy(Kind.LOAD, 0, 4096, 1024, BARRIER, 0xABC, 128),
        copy(Kind.LOAD, 0, 5120, 1024, BARRIER, 0xABC, 128, column=64),
        copy(Kind.LOAD, 0, 6144, 1024, OTHER, 0xABC, 256),  # for another barrier
        copy(Kind.LOAD, 0, 8192, 1024, OTHER, 0xDEF, 256),
    ]
    assert _steps(*boxes) == [
        ("load shared 0x1000", (4096, 2048, 0, 0, 128, 0, 0, 0)),
        ("load shared 0x1800", (6144, 1024, 0, 0, 256, 0, 0, 0)),
        ("load shared 0x2000", (8192, 1024, 1, 0, 256, 0, 0, 0)),
    ]
    (first, *_) = steps(made(*boxes))
    assert first.targets == ((f"mbarrier {BARRIER:#x}", 2048),)
    assert first.writes == (("smem", ((1024, 1536),)),) and not first.reads
    assert first.facts["columns"] == (0, 64)
    for wrong in ({"column": 0}, {"column": 64, "row": 256}, {"column": 64, "tensor": 0xDEF}):
        given = {"tensor": 0xABC, "row": 128} | wrong
        assert len(_steps(boxes[0], copy(Kind.LOAD, 0, 5120, 1024, BARRIER, **given))) == 2


def test_stores_of_a_tile_are_one_step_until_the_group_is_closed():
    boxes = [
        copy(Kind.STORE, 0, 4096 + 1024 * box, 1024, tensor=1, column=64 * box) for box in range(3)
    ]
    assert [op for op, _ in _steps(*boxes[:2], fence(0, "bulk.commit"), boxes[2])] == [
        "store shared 0x1000",
        "fence bulk.commit",
        "store shared 0x1800",
    ]


def test_arrivals_are_counted_by_lanes():
    assert _steps(arrive(0, lanes=ALL), arrive(1, size=64)) == [
        (f"arrive mbarrier {BARRIER:#x}", (32, 0)),
        (f"arrive mbarrier {BARRIER:#x}", (1, 64)),
    ]


def test_accesses_of_shared_memory_are_joined():
    assert _steps(write(0, 1, 2), write(0, 4, lanes=1), read(0, 8)) == [
        ("write shared 0x4", (33 * 4,)),
        ("read shared 0x20", (128,)),
    ]
    (row, _) = steps(made(write(0, 1, 2), write(0, 4), read(0, 8)))
    assert row.writes == (("smem", ((1, 3), (4, 5))),)


PLAN = Plan(
    roles=(Role("GIVE", range(0, 1)), Role("TAKE", range(1, 3))),
    smem=(SmemBuffer("barriers", 64, align=8), SmemBuffer("sA", 1024, 2)),
    tmem=(TmemRegion("S", 0, 128), TmemRegion("P", 0, 64, aliases=("S",))),
    barriers=(
        Barrier("full", (Arrival("GIVE", "one"),), (Arrival("TAKE"),), "a tile", stages=2),
        Barrier("all", (Arrival("GIVE"),), (Arrival("TAKE"),), "x", kind="named", number=2),
        Barrier(
            "each", (Arrival("GIVE"),), (Arrival("TAKE"),), "x", kind="named", number=4, stages=2
        ),
    ),
)


def test_names_come_from_the_plan():
    names = Names(PLAN, SMEM)
    assert [names.mbarrier(SMEM + at) for at in (0, 8)] == ["full[0]", "full[1]"]
    assert names.mbarrier(PEER | SMEM + 8) == "full[1]"
    assert names.mbarrier(SMEM + 16) == "mbarrier 0x410"
    assert [names.warp(w) for w in range(4)] == ["GIVE", "TAKE.0", "TAKE.1", "warp 3"]
    assert [names.named(n) for n in (2, 3, 4, 5)] == ["all", "barrier 3", "each[0]", "each[1]"]
    first = SMEM + PLAN.smem_offsets["sA"]
    assert [names.shared(first + at) for at in (0, 1023, 1024)] == ["sA[0]", "sA[0]", "sA[1]"]
    assert names.shared(first + 2048) == f"shared {first + 2048:#x}"
    assert names.columns(0, 64) == "P" and names.columns(0, 65) == "S"
    assert names.columns(100, 64) == "columns 100-163"


def test_steps_have_names_of_the_plan():
    rows = (wait(1, barrier=OTHER), tmem(Kind.LOAD_TMEM, 1, 0, 64), read(2, SMEM // 4))
    found = steps(made(*rows), PLAN)
    assert [f"{row.agent} {row.op}" for row in found] == [
        "TAKE.0 wait full[1]",
        "TAKE.0 tmem.ld P",
        "TAKE.1 read barriers",
    ]


def test_a_pair_tells_its_ctas_apart():
    rows = (
        commit(0, BARRIER, 0b11),
        mma(m=256, flags=PAIR),
        write(0, 5, rank=1),
        event(Kind.READ, 4 | 1 << 16, warp=1, cells=(7,)),
        arrive(1, PEER | BARRIER, flags=CLUSTER),
        *sync(0, rank=1),
    )
    found = steps(made(*rows, ctas=2))
    address = f"mbarrier {BARRIER:#x}"
    assert [row.agent for row in found[:4]] == ["warp 0@0", "warp 0@0", "warp 0@1", "warp 1@0"]
    assert found[0].targets == ((f"{address}@0", 1), (f"{address}@1", 1))
    assert [memory for memory, _ in found[1].reads] == ["smem@0", "smem@0", "smem@1", "smem@1"]
    assert [memory for memory, _ in found[1].writes] == ["tmem@0", "tmem@1"]
    size = lambda intervals: sum(stop - start for start, stop in intervals)
    assert [size(cells) for _, cells in found[1].reads] == [64 * 8, 128 * 8] * 2  # N is halved
    assert found[1].facts["cta_group"] == 2
    assert found[2].writes == (("smem@0", ((5, 6),)),)  # the word says whose memory it is
    assert found[3].reads == (("smem@1", ((7, 8),)),)
    assert found[4].what == f"{address}@1" and found[4].facts == {"scope": "cluster"}
    assert found[5].what == "barrier 0@1"


# ---- recorded logs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_log_is_clean(name):
    verdict = check_log(log_of(name), plan_of(name))
    assert verdict.errors == verdict.warnings == () and verdict.clean
    assert (verdict.events, verdict.size) == (len(log_of(name).events), log_of(name).size)


FEWER_EDGES = {
    "07-backward_1cta-least": {("dK", "dP")},  # dQ, which has the columns of dP
    "07-backward_1cta-grid-d64": {("dK", "dQ"), ("dV", "S")},  # the last CTA has one key tile
    "08-backward_1cta-least": {("dK", "dP")},
    "08-ragged": set(),  # of one turn of the loop
}


@pytest.mark.parametrize("name", NAMES)
def test_only_rule_a1_orders_what_the_page_lists(name):
    listed = contract.logged_a1_edges(source_of(name), INDEX[name]["head_dim"])
    if name.endswith("least"):  # of one turn of the loop
        listed = set()
    edges = {
        (first.removeprefix("mma "), second.removeprefix("mma "))
        for first, second in check_log(log_of(name), plan_of(name)).a1_edges
    }
    assert edges == FEWER_EDGES.get(name, listed)


def test_mode_ptx_reports_what_only_a1_orders():
    found = check_log(log_of("03-grid"), plan_of("03-grid"), mode="ptx")
    assert found.a1_edges and len(found.errors) == len(found.a1_edges)
    assert not any(row.fence for row in found.errors)


def _seen(log, plan, line: int) -> bool:
    """Whether the log shows that the statement of a line was left out."""
    shorter = without_line(log, line)
    if len(shorter.events) == len(log.events):
        return False
    try:
        return bool(check_log(shorter, plan).errors)
    except LogMismatch:
        return True


BACKWARDS = ("backward_1cta", "backward_2cta")
NOT_IN_THE_LOG = {  # beyond waits for loads of tensor memory, and what model.py gives a reason for
    "02": {},
    "03": {},
    "04": {
        "CORRECTION wait stats_full0": "the first tile reads nothing; a run hangs",
        "CORRECTION wait stats_full1": "as stats_full0",
    },
}
NOT_IN_THE_LOG |= dict.fromkeys(("05", "06", "08"), NOT_IN_THE_LOG["04"])
NOT_IN_THE_LOG |= {f"{n}/{part}": {} for n in ("07", "08") for part in BACKWARDS}
ONLY_IN_THE_LOG = {  # has a reason, that of the model, and is noticed: the log knows warps apart
    "02": ["start_end", "p_full", "fence tcgen05.before", "fence tcgen05.after"],
    "03": ["EPILOGUE bulk_wait"],  # the second, which covers the first
    "04": ["EPILOGUE bulk_wait"],
    "05": ["EPILOGUE bulk_wait"],
    "06": ["EPILOGUE bulk_wait"],
    "07/backward_1cta": ["sync dq_staged"],
    "07/backward_2cta": ["sync dq_slot"],
    "08": ["EPILOGUE bulk_wait"],
    "08/backward_1cta": ["sync dq_staged"],
    "08/backward_2cta": ["sync dq_slot"],
}


def test_every_code_is_looked_at():
    codes = lambda tags: [INDEX[names_of(tag)[0]]["ptx_sha256"] for tag in tags]
    assert set(codes(CODES)) == set(codes(KERNELS)) and len(set(codes(CODES))) == len(CODES)


@pytest.mark.parametrize("tag", CODES)
def test_a_log_without_a_statement_shows_that_it_is_missing(tag):
    sites, ptx = named_sites(tag), ptx_of(tag)
    logs = [(log_of(name), plan_of(name)) for name in names_of(tag)]
    reached = {row.line for log, _ in logs for row in log.events}
    assert {site.line for site in sites} <= reached, "the recorded logs reach every statement"
    seen = {s.line for s in sites if any(_seen(log, plan, s.line) for log, plan in logs)}
    explained = {s.line: explanation(KERNELS[tag], HEAD_DIM, s) for s in sites}
    left = [s for s in sites if s.line not in seen and not explained[s.line]]
    loads = [s for s in left if s.opcode.startswith("tcgen05.wait::ld")]
    assert loads and all(lint(without(ptx, s.line)) for s in loads)
    assert {s.name for s in left if s not in loads} == set(NOT_IN_THE_LOG[tag])
    both = [s.name for s in sites if s.line in seen and explained[s.line]]
    for words in ONLY_IN_THE_LOG[tag]:
        assert any(words in name for name in both), words
    assert all(any(words in name for words in ONLY_IN_THE_LOG[tag]) for name in both), both
    assert len(seen) > len(sites) / 2


@pytest.mark.parametrize("tag", KERNELS)
def test_cost_is_linear_in_events(tag):
    def each(name: str) -> float:
        log, plan, times = log_of(name), plan_of(name), []
        for _ in range(3):
            start = time.process_time()
            check_log(log, plan)
            times.append(time.process_time() - start)
        return min(times) / len(log.events)

    small, *_, large = names_of(tag)
    assert len(log_of(large).events) > 2 * len(log_of(small).events)
    assert each(large) <= 5 * each(small)


# ---- made-up logs: memory ------------------------------------------------------------------

START = [init(), *sync(0, 1)]
HAND_OVER = [*START, write(0, 100), arrive(0), wait(1), read(1, 100)]


def test_a_hand_over_of_shared_memory():
    assert texts(made(HAND_OVER)) == []
    without_wait = [row for row in HAND_OVER if row.kind != Kind.WAIT]
    text = only(made(without_wait))
    assert "PTX line 6" in text and "PTX line 8" in text and "PTX line 7" not in text
    assert "bytes 400-403" in text and "warp 0" in text and "warp 1" in text
    assert not check_log(made(without_wait)).errors[0].fence


def test_other_cells_need_no_order():
    assert texts(made(START, write(0, 100), read(1, 101))) == []
    assert texts(made(START, read(0, 100), read(1, 100))) == []
    assert only(made(START, read(0, 100), write(1, 100)))
    assert only(made(START, event(Kind.UPDATE, 4, warp=0, cells=(9,)), read(1, 9)))


def test_a_race_of_a_loop_is_counted():
    loop = [write(0, 100, line=50), fence(0, "acq_rel"), read(1, 100, line=51), fence(1, "acq_rel")]
    text, back = texts(made(START, loop, loop, loop))
    assert "PTX line 51) reads" in text and text.endswith("[3 times]")
    assert "PTX line 50) writes" in back and back.endswith("[2 times]")


TENSOR = [
    *START,
    tmem(Kind.STORE_TMEM, 0),
    fence(0, "wait.st"),
    fence(0, "tcgen05.before"),
    arrive(0),
    wait(1),
    fence(1, "tcgen05.after"),
    tmem(Kind.LOAD_TMEM, 1),
    fence(1, "wait.ld"),
]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tcgen05.before", "fence::before_thread_sync is missing before warp 0's arrive"),
        ("tcgen05.after", "fence::after_thread_sync is missing after warp 1's wait"),
        ("wait.st", "wait::st"),
    ],
)
def test_a_missing_fence_of_ours_is_an_error_of_a_peers_a_warning(name, words):
    assert texts(made(TENSOR)) == []
    gone = FENCES.index(name)
    log = made([row for row in TENSOR if row.kind != Kind.FENCE or row.words[0] != gone])
    ours, peers = check_log(log), check_log(log, ours=False)
    (error,), (warning,) = ours.errors, peers.warnings
    assert error == warning and error.fence and words in str(error)
    assert ours.warnings == peers.errors == () and not ours.clean and peers.clean


def test_a_missing_wait_of_a_peer_is_an_error():
    log = made([row for row in TENSOR if row.kind != Kind.WAIT])
    found = check_log(log, ours=False)
    assert not found.clean and not found.errors[0].fence


def test_operands_that_threads_wrote_need_a_proxy_fence():
    rows = [*START, init(OTHER, warp=1), fence(1, "mbarrier_init"), write(0, A_START // 4)]
    tail = [arrive(0), wait(1), mma(1), commit(1, OTHER)]
    text = only(made(rows, tail))
    assert "fence.proxy.async" in text and check_log(made(rows, tail)).errors[0].fence
    assert texts(made(rows, fence(0, "proxy.async"), tail)) == []
    of_global_memory = fence(0, "proxy.async.global")
    assert "fence.proxy.async" in only(made(rows, of_global_memory, tail))


# ---- made-up logs: mbarriers ---------------------------------------------------------------


def test_a_wait_that_nothing_let_pass():
    with pytest.raises(LogMismatch, match=r"warp 1: wait .*parity 0 .PTX line 6. has passed, but "):
        check_log(made(START, wait(1)))
    with pytest.raises(LogMismatch, match="phase 0 is not complete: 1 arrivals, 0 bytes to come"):
        check_log(made(init(count=2), sync(0, 1), arrive(0), wait(1)))
    with pytest.raises(LogMismatch, match="phase 0 is not complete: 0 arrivals, 64 bytes to come"):
        check_log(made(START, arrive(0, size=64), wait(1)))
    with pytest.raises(LogMismatch, match=r"wait mbarrier 0x400 before mbarrier 0x400 is initial"):
        check_log(made(wait(1)))


def test_a_fresh_barrier_lets_a_wait_for_parity_1_pass():
    assert texts(made(START, wait(1, 1), arrive(0), wait(1, 0), arrive(0), wait(1, 1))) == []


PHASES = [*START, write(0, 100), arrive(0), write(0, 101), arrive(0)]  # two phases, one after other


def test_a_late_wait_acquires_only_the_phase_that_it_waited_for():
    assert texts(made(PHASES, wait(1, 0), read(1, 100))) == []
    text = only(made(PHASES, wait(1, 0), read(1, 101)))
    assert "bytes 404-407" in text
    assert texts(made(PHASES, wait(1, 1), read(1, 100, 101))) == []


def test_a_late_wait_for_the_phase_before_the_first_acquires_nothing():
    rows = [*START, write(0, 100), arrive(0), wait(1, 1)]
    assert texts(made(rows)) == []
    assert only(made(rows, read(1, 100)))


@pytest.mark.parametrize("name", ["mbarrier_init", "proxy.async"])
def test_initialisation_is_fenced_before_the_async_proxy_arrives(name):
    rows = [init(), mma(), commit()]
    finding = check_log(made(rows)).errors[0]
    assert "no fence.mbarrier_init or fence.proxy.async follows its initialisation" in str(finding)
    assert finding.fence and str(finding).endswith("by warp 0")
    assert texts(made(init(), fence(0, name), mma(), commit())) == []
    assert len(texts(made(init(), fence(1, name), mma(), commit()))) == 1  # not its own
    load = [arrive(0, size=64), copy(Kind.LOAD, 0, 4096, 64, BARRIER)]
    assert "no fence.mbarrier_init" in only(made(init(), load))
    assert texts(made(init(), fence(0, name), load)) == []


def test_initialisation_must_be_known_to_who_uses_the_barrier():
    assert "mbarriers" in only(made(init(), arrive(1)))
    assert texts(made(init(), sync(0, 1), arrive(1))) == []


def test_a_barrier_left_in_mid_phase():
    text = only(made(init(count=2), arrive(0)))
    assert text == "mbarrier 0x400 is left in mid-phase: 1 of 2 arrivals and 0 bytes to come"
    text = only(made(init(), arrive(0, size=64)))
    assert text.endswith("left in mid-phase: 0 of 1 arrivals and 64 bytes to come")
    done = [arrive(0, size=64), event(Kind.COMPLETE, BARRIER, 64, warp=0, lanes=1)]
    assert texts(made(init(), done)) == []
    assert texts(made(init(count=32), arrive(0, lanes=ALL))) == []


def test_bytes_of_a_copy_complete_the_phase():
    rows = [*START, fence(0, "mbarrier_init"), arrive(0, size=128)]
    load = copy(Kind.LOAD, 0, 400, 128, BARRIER)
    assert texts(made(rows, load, wait(1), read(1, 100))) == []
    with pytest.raises(LogMismatch, match="0 arrivals, 28 bytes to come"):
        check_log(made(rows, copy(Kind.LOAD, 0, 400, 100, BARRIER), wait(1)))
    text = only(made(rows, load, read(1, 100)))
    assert text.endswith("warp 1 does not wait for its end on mbarrier 0x400")


def test_mmas_that_are_never_committed():
    rows = [init(), fence(0, "mbarrier_init"), mma(), commit()]
    assert texts(made(rows)) == []
    assert only(made(rows[:3])) == "warp 0 never committed the MMAs of PTX line 3"
    assert only(made(rows, mma(d=128))) == "warp 0 never committed the MMAs of PTX line 5"


# ---- made-up logs: what must be given back -------------------------------------------------


def _bulk_wait(groups=0, **changes):
    return event(Kind.BULK_WAIT, groups, warp=0, lanes=1, **changes)


def test_a_bulk_copy_out_of_shared_memory_is_waited_for():
    store, close = copy(Kind.STORE, 0, 4096, 64), fence(0, "bulk.commit", lanes=1)
    missing = "warp 0 never waited for a bulk copy out of shared memory"
    assert texts(made(store, close, _bulk_wait())) == []
    assert only(made(store)) == only(made(store, close)) == missing
    assert only(made(store, _bulk_wait())) == missing  # the group was not closed
    assert only(made(store, close, _bulk_wait(1))) == missing
    assert only(made(store, close, store, close, _bulk_wait(1))) == missing
    assert texts(made(store, close, store, close, _bulk_wait(1), _bulk_wait())) == []
    assert only(made(copy(Kind.REDUCE, 0, 4096, 64), close)) == missing


def test_the_source_of_a_bulk_copy_is_free_after_the_wait():
    rows = [copy(Kind.STORE, 0, 4096, 64), fence(0, "bulk.commit")]
    over = write(0, 1024)
    assert texts(made(rows, _bulk_wait(flags=READ_ONLY), over)) == []
    assert len(texts(made(rows, over, _bulk_wait(flags=READ_ONLY)))) == 1


def test_more_groups_may_remain_than_there_are():
    groups = [[copy(Kind.STORE, 0, 4096 + 64 * i, 64), fence(0, "bulk.commit")] for i in range(3)]
    over = [write(0, 1024 + 16 * i) for i in range(3)]
    for keep, free in ((5, 0), (3, 0), (1, 2), (0, 3)):
        log = made(*groups, _bulk_wait(keep, flags=READ_ONLY), over, _bulk_wait(flags=READ_ONLY))
        assert len(texts(log)) == (3 - free), keep


def test_a_relaxed_wait_acquires_no_memory():
    relaxed = [replace(r, flags=RELAXED) if r.kind == Kind.WAIT else r for r in HAND_OVER]
    assert only(made(relaxed))


def test_barriers_of_threads_are_passed_when_all_have_come():
    comes = [event(Kind.BAR_ARRIVE, 1, 64, 0, 0, 0, warp=warp) for warp in (0, 1)]
    goes = [event(Kind.BAR_WAIT, 1, 64, 0, 0, 0, warp=warp) for warp in (0, 1)]
    assert texts(made(*comes, *goes)) == []
    for early in ((comes[0], goes[0], comes[1], goes[1]), (goes[0],)):
        with pytest.raises(LogMismatch, match="has passed too early"):
            check_log(made(*early))


@pytest.mark.parametrize(
    "row",
    [
        event(Kind.FENCE, len(FENCES), warp=0),
        event(Kind.READ, 4, warp=0),
        event(Kind.WAIT, BARRIER, 2, 0, 0, 0, warp=0),
        event(Kind.LOAD_TMEM, 0, 513, 32, 0, 0, warp=0),
        event(Kind.LOAD, 4096, BARRIER, 1 << 20, 0, 0, 0, 0, 0, 0, warp=0),
    ],
    ids=lambda row: row.kind.name,
)
def test_words_that_no_kernel_writes_are_refused(row):
    with pytest.raises(LogError, match="cannot be"):
        decode(encode([row]))


def test_columns_of_tensor_memory_are_freed():
    alloc = event(Kind.ALLOC, 0, 512, SMEM + 64, warp=0)
    free = event(Kind.DEALLOC, 0, 512, warp=0)
    assert texts(made(alloc, free)) == []
    assert only(made(alloc)) == "CTA 0 did not free 512 columns of tensor memory"
    half = event(Kind.DEALLOC, 0, 256, warp=0)
    wrong = "warp 0 frees 256 columns at 0, not allocated so"
    assert texts(made(alloc, half)) == [wrong]


# ---- made-up logs: barriers of threads -----------------------------------------------------


def test_a_named_barrier_orders_who_came():
    before, after = write(0, 100), read(1, 100)
    assert texts(made(before, sync(0, 1), after)) == []
    assert only(made(before, after))
    late = [row for row in sync(0, 1) if row.warp == 0 or row.kind == Kind.BAR_ARRIVE]
    assert only(made(before, late, after))  # warp 1 did not wait


def test_a_named_barrier_left_in_mid_phase():
    (came, _) = sync(0, number=3, threads=64)
    text = only(made(came))
    assert text == "barrier 3 is left in mid-phase: 32 of 64 arrivals and 0 bytes to come"


def test_phases_of_a_named_barrier_may_be_for_other_numbers_of_threads():
    rows = [write(0, 7), *sync(0, 1), *sync(0, 1, 2), read(2, 7)]
    assert texts(made(rows)) == []
    assert only(made([write(0, 7), *sync(0, 1), read(2, 7)]))


def test_who_only_arrives_at_a_named_barrier_releases():
    rows = [write(0, 100), event(Kind.BAR_ARRIVE, 1, 64, warp=0)]
    theirs = [event(kind, 1, 64, warp=1) for kind in (Kind.BAR_ARRIVE, Kind.BAR_WAIT)]
    assert texts(made(rows, theirs, read(1, 100))) == []
    assert only(made(rows, write(0, 101), theirs, read(1, 100, 101)))


# ---- made-up logs: pairs -------------------------------------------------------------------


def _cluster(kind, rank, warp=0, **changes):
    return event(kind, warp=warp, rank=rank, **changes)


def _both(flags=0):
    """Warp 0 of both CTAs at the cluster barrier."""
    return [
        *[_cluster(Kind.CLUSTER_ARRIVE, rank, flags=flags) for rank in (0, 1)],
        *[_cluster(Kind.CLUSTER_WAIT, rank) for rank in (0, 1)],
    ]


TO_PEER = event(Kind.WRITE, 4 | 1 << 16, warp=0, rank=0, cells=(100,))
AT_PEER = event(Kind.READ, 4 | 1 << 16, warp=0, rank=1, cells=(100,))


def test_the_cluster_barrier_orders_both_ctas():
    assert texts(made(TO_PEER, _both(), AT_PEER, ctas=2)) == []
    assert only(made(TO_PEER, AT_PEER, ctas=2))
    assert only(made(TO_PEER, _both(RELAXED), AT_PEER, ctas=2))
    fenced = [TO_PEER, fence(0, "acq_rel"), *_both(RELAXED)]
    fenced += [fence(0, "acq_rel", rank=1), AT_PEER]
    assert texts(made(fenced, ctas=2)) == []


def test_warps_that_have_left_count_at_the_cluster_barrier():
    other = fence(1, "acq_rel")  # warp 1 of CTA 0, which does not come to the barrier
    gone = _cluster(Kind.EXIT, 0, warp=1)
    arrivals, waits = _both()[:2], _both()[2:]
    with pytest.raises(LogMismatch, match="has passed too early"):
        check_log(made(other, TO_PEER, arrivals, waits, AT_PEER, ctas=2))
    assert texts(made(other, gone, TO_PEER, arrivals, waits, AT_PEER, ctas=2)) == []
    assert texts(made(other, TO_PEER, arrivals, gone, waits, AT_PEER, ctas=2)) == []
    half = replace(gone, lanes=0xFFFF)
    with pytest.raises(LogMismatch, match="has passed too early"):
        check_log(made(other, half, TO_PEER, arrivals, waits, AT_PEER, ctas=2))


def test_memory_of_two_ctas_is_not_one():
    rows = (write(0, 100), event(Kind.READ, 4 | 1 << 16, warp=0, rank=1, cells=(100,)))
    assert texts(made(*rows, ctas=2)) == []


START_PAIR = [init(), init(PEER | BARRIER, rank=1), fence(0, "mbarrier_init")]
START_PAIR += [fence(0, "mbarrier_init", rank=1), *_both()]


def test_an_arrival_at_the_peer_needs_the_scope_of_the_cluster():
    tail = [wait(0, barrier=PEER | BARRIER, rank=1, flags=CLUSTER), AT_PEER]
    near, far = (arrive(0, PEER | BARRIER, flags=flags) for flags in (0, CLUSTER))
    assert texts(made(START_PAIR, TO_PEER, far, tail, ctas=2)) == []
    unscoped = made(START_PAIR, TO_PEER, near, tail, ctas=2)
    assert only(unscoped)
    peers = check_log(unscoped, ours=False)
    assert not peers.errors and [REMOTE_SCOPE in str(row) for row in peers.warnings] == [True]


def test_a_commit_to_both_ctas():
    product = mma(m=256, flags=PAIR)
    waits = [wait(0, barrier=rank << 24 | BARRIER, rank=rank) for rank in (0, 1)]
    reads = [
        row
        for rank in (0, 1)
        for row in (
            fence(0, "tcgen05.after", rank=rank),
            tmem(Kind.LOAD_TMEM, 0, rank=rank),
            fence(0, "wait.ld", rank=rank),
        )
    ]
    both = [*START_PAIR, product, commit(mask=0b11), *waits, *reads]
    assert texts(made(both, ctas=2)) == []
    alone = [*START_PAIR, product, commit(), waits[0], *reads]
    assert "tmem@1" in only(made(alone, ctas=2))
    with pytest.raises(LogMismatch, match=r"warp 0@1: wait mbarrier 0x400@1"):
        check_log(made(START_PAIR, product, commit(mask=0b01), waits, ctas=2))


def test_a_copy_to_the_peer_is_waited_for_there():
    there = arrive(0, PEER | BARRIER, size=64, rank=1)
    words = (4096, PEER | 400, 64, 0, 0, PEER | BARRIER)
    peer_copy = event(Kind.COPY, *words, warp=0, lanes=1)
    tail = [wait(0, barrier=PEER | BARRIER, rank=1), AT_PEER]
    assert texts(made(START_PAIR, there, peer_copy, tail, ctas=2)) == []
    assert only(made(START_PAIR, there, peer_copy, AT_PEER, ctas=2))


def test_a_commit_without_multicast_is_for_its_own_cta():
    (row,) = steps(made(commit(0, PEER | BARRIER, rank=1), ctas=2))
    assert row.targets == ((f"mbarrier {BARRIER:#x}@1", 1),)


def test_a_pair_allocates_together():
    """The peer's columns are there once the leader goes on, whenever its own record comes."""

    def log(flags):
        allocs = [
            event(Kind.ALLOC, 0, 128, SMEM + 64, warp=0, rank=rank, flags=flags) for rank in (0, 1)
        ]
        frees = [event(Kind.DEALLOC, 0, 128, warp=0, rank=rank, flags=flags) for rank in (0, 1)]
        product = [mma(m=256, flags=PAIR), commit(mask=0b11)]
        waits = [wait(0, barrier=rank << 24 | BARRIER, rank=rank) for rank in (0, 1)]
        after = [fence(0, "tcgen05.after", rank=rank) for rank in (0, 1)]
        return made(START_PAIR, allocs[0], product, allocs[1], waits, after, frees, ctas=2)

    assert texts(log(PAIR)) == []
    assert "tmem@1" in only(log(0))
