# SPDX-License-Identifier: Apache-2.0
"""Recorded logs do what the model does, step by step; a step that differs is shown. No GPU."""

import re
from dataclasses import replace

import pytest
from flash_ladder.common.conformance import AROUND, conform
from flash_ladder.common.device_mutation import sites
from flash_ladder.common.hopper.log import Kind
from flash_ladder.common.hopper.steps import steps
from flash_ladder.common.ptx import ptx_hash

from tests.recorded_logs import (
    CODES,
    FOLDER,
    INDEX,
    NAMES,
    cta_of,
    event,
    log_of,
    names_of,
    notes_of,
    place_of,
    plan_of,
    ptx_of,
    source_of,
    todays_ptx_of,
)

LEAST = [names_of(tag)[0] for tag in CODES]
SECOND_HALVES = ("bar.wait", "cluster.wait")
NOT_COMPARED = {"fence mbarrier_init", "fence bulk.commit", "read barriers"}  # nor exit
NAME = "04-grid"  # where one log is enough
MANY = 1000  # records
UNNOTICED = {
    "02-least": {"fence tcgen05.after"},
    "07-backward_1cta-least": {"fence proxy.async"},  # the order check needs it
    "08-backward_1cta-least": {"fence proxy.async"},
}


def _conform(name: str, events=None, notes=None, place=None):
    """The comparison with other events, notes or another place than those recorded."""
    log = log_of(name)
    if events is not None:
        log = replace(log, events=tuple(events))
    notes = notes_of(name) if notes is None else notes
    return conform(log, notes, plan_of(name), place or place_of(name))


def _steps_of(name: str) -> list:
    """The step that each record is part of, in the order of the records."""
    part = {id(row): step for step in steps(log_of(name), plan_of(name)) for row in step.records}
    return [part[id(row)] for row in log_of(name).events]


def _first(name: str, kind: Kind, **wanted) -> int:
    """Place of the first record of a kind, with these attributes."""
    return next(
        place
        for place, row in enumerate(log_of(name).events)
        if row.kind == kind and all(getattr(row, key) == value for key, value in wanted.items())
    )


def _changed(name: str, place: int, **words: int) -> list:
    """The events with words of one record replaced: w0=, w1=, ..."""
    events = list(log_of(name).events)
    new = list(events[place].words)
    for word, value in words.items():
        new[int(word[1:])] = value
    assert tuple(new) != events[place].words
    events[place] = replace(events[place], words=tuple(new))
    return events


def _shown(difference) -> tuple[str, str]:
    """What the message marks: in the kernel, in the model."""
    kernel, model = re.findall(r"^  > (.*)$", str(difference), re.M)
    return kernel, model


# ---- as it should be -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_log_does_what_the_model_does(name):
    found = _conform(name)
    assert found.exact, "\n".join(map(str, found.differences))
    assert found.acts > 0.4 * len(log_of(name).events)
    assert log_of(name).cta == cta_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_logs_are_of_todays_protocol(name):
    """The same waits, arrivals and fences in the same order; the rest of the code may be other."""
    tag, head_dim = source_of(name).tag, INDEX[name]["head_dim"]
    executed, todays = ptx_of(tag, head_dim), todays_ptx_of(tag, head_dim)
    assert ptx_hash(executed) == INDEX[name]["ptx_sha256"]
    then, now = ([site.opcode for site in sites(ptx)] for ptx in (executed, todays))
    assert then == now, (
        f"{name} was recorded from code with another protocol than today's: on a Hopper GPU "
        "execute the problem of tests/data/logs/index.json rewritten, with log=True "
        "(device_worker.Bench.run does), write what session().logs() gives for that CTA or pair "
        f"to tests/data/logs/{name}.log.xz with lzma, and the new hash {ptx_hash(todays)} to "
        "index.json"
    )


def test_code_that_was_executed_is_kept_only_where_todays_is_other():
    kept = {path.name for path in FOLDER.glob("*.ptx.xz")}
    rows = {(source_of(name).tag, row["head_dim"]): row for name, row in INDEX.items()}
    assert kept == {
        f"{row['ptx_sha256'][:16]}.ptx.xz"
        for where, row in rows.items()
        if ptx_hash(todays_ptx_of(*where)) != row["ptx_sha256"]
    }


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_the_ptx_stand_for_lines_of_the_model(name):
    lines, roles = _conform(name).lines, {role.name for role in plan_of(name).roles}
    folder = f"stages/{source_of(name).tag}/"
    for places in lines.values():
        for role, where, what in places:
            assert role in roles and where.startswith(folder) and "[" not in what
    skip = {row.line for row, step in zip(log_of(name).events, _steps_of(name)) if _silent(step)}
    first_of_step = {step.line for step in _steps_of(name)}
    assert set(lines) == first_of_step - skip - _waits_of_named_barriers(name)


def _silent(step) -> bool:
    return step.op in NOT_COMPARED or step.verb in ("init", "exit")


def _waits_of_named_barriers(name: str) -> set[int]:
    """Lines with nothing but the second half of a barrier of threads."""
    halves = {step.line for step in _steps_of(name) if step.verb in SECOND_HALVES}
    return halves - {step.line for step in _steps_of(name) if step.verb not in SECOND_HALVES}


def test_a_line_has_the_roles_and_barriers_that_it_serves():
    lines = _conform(NAME).lines
    by_verb = {step.verb: step.line for step in _steps_of(NAME) if step.agent == "MMA"}
    (commit,) = {(role, what) for role, _, what in lines[by_verb["commit"]]}
    assert commit[0] == "MMA" and plan_of(NAME).barrier(commit[1])
    (empty_wait,) = [s for s in _steps_of(NAME) if s.op == "wait kv_empty[0]"][:1]
    assert {(role, what) for role, _, what in lines[empty_wait.line]} == {("LOAD", "kv_empty")}
    start = next(step.line for step in _steps_of(NAME) if step.verb == "bar.arrive")
    assert {role for role, *_ in lines[start]} == {role.name for role in plan_of(NAME).roles}


# ---- every record counts -------------------------------------------------------------------


def _tried(name: str) -> range:
    """Places of records that are dropped or swapped in turn: all, in long logs every 11th."""
    count = len(log_of(name).events)
    return range(0, count, 1 if count <= MANY else 11)


@pytest.mark.parametrize("name", LEAST)
def test_every_record_that_is_dropped_is_noticed(name):
    events, of = log_of(name).events, _steps_of(name)
    missed, silent = set(), set()
    for place in _tried(name):
        row, step = events[place], of[place]
        if step.op in NOT_COMPARED:
            silent.add((step.agent, step.op, row.line))
        if _conform(name, events[:place] + events[place + 1 :]).exact:
            missed.add((step.agent, step.op, row.line))
    others = missed - silent
    assert silent <= missed
    # a fence before what only the first warp of a role issues may be missing in the others
    assert {op for _, op, _ in others} == UNNOTICED.get(name, set())
    assert not any(who.endswith(".0") for who, *_ in others)
    assert len(others) <= 3, others


@pytest.mark.parametrize("name", LEAST)
def test_two_steps_of_a_warp_that_are_swapped_are_noticed(name):
    events, of, newest, before, tried = log_of(name).events, _steps_of(name), {}, {}, 0
    for place, row in enumerate(events):
        before[place] = newest.get((row.rank, row.warp))
        newest[row.rank, row.warp] = place
    for place in _tried(name):
        earlier = before[place]
        if earlier is None or of[earlier] is of[place]:
            continue
        if _silent(of[earlier]) or _silent(of[place]):
            continue
        swapped = list(events)
        swapped[earlier], swapped[place] = swapped[place], swapped[earlier]
        assert not _conform(name, swapped).exact, (of[earlier].op, of[place].op)
        tried += 1
    assert tried > len(_tried(name)) / 3


# ---- every word counts ---------------------------------------------------------------------


def test_a_dropped_record_is_shown_on_both_sides():
    place = _first(NAME, Kind.COMMIT)
    events = log_of(NAME).events
    (difference,) = _conform(NAME, events[:place] + events[place + 1 :]).differences
    text = str(difference)
    assert text.startswith("MMA: the kernel and the model part here\n  kernel:\n")
    assert "\n  model:\n" in text
    kernel, model = _shown(difference)
    assert re.fullmatch(r"wait q_full1 0  \(PTX line \d+\)", kernel)
    assert re.fullmatch(r"commit s_full0  \(stages/04/model\.py:\d+\)", model)
    assert len(text.splitlines()) == 3 + 2 * (2 * AROUND + 1)


def test_a_record_too_many_is_shown():
    events = list(log_of(NAME).events)
    last = max(place for place, row in enumerate(events) if row.kind == Kind.DEALLOC)
    events.insert(last + 1, events[last])
    (difference,) = _conform(NAME, events).differences
    kernel, model = _shown(difference)
    assert kernel.startswith("dealloc ") and model == "nothing more"


def test_what_the_kernel_did_not_do_any_more_is_shown():
    events = log_of(NAME).events
    cut = [row for row in events if row.kind != Kind.DEALLOC]
    (difference,) = _conform(NAME, cut).differences
    kernel, model = _shown(difference)
    assert kernel == "nothing more" and model.startswith("dealloc ")


def test_a_flipped_parity():
    place = _first(NAME, Kind.WAIT)
    row, step = log_of(NAME).events[place], _steps_of(NAME)[place]
    (difference,) = _conform(NAME, _changed(NAME, place, w1=1 - row.words[1])).differences
    assert difference.agent == step.agent
    kernel, model = (text.partition("  (")[0] for text in _shown(difference))
    assert kernel == f"{step.op} {1 - row.words[1]}" and model == f"{step.op} {row.words[1]}"


@pytest.mark.parametrize("kind", [Kind.LOAD, Kind.STORE])
@pytest.mark.parametrize("word", ["w5", "w6", "w7", "w8"])
def test_another_coordinate_of_a_copy(kind, word):
    place = _first(NAME, kind)
    value = log_of(NAME).events[place].words[int(word[1:])]
    (difference,) = _conform(NAME, _changed(NAME, place, **{word: value + 1})).differences
    kernel, model = _shown(difference)
    assert kernel.partition(" ")[0] == model.partition(" ")[0] == kind.name.lower()
    assert kernel.partition("  (")[0] != model.partition("  (")[0]


def test_a_tensor_that_another_one_stood_for():
    place = _first(NAME, Kind.LOAD)
    tensors = {row.words[3] for row in log_of(NAME).events if row.kind == Kind.LOAD}
    other = (tensors - {log_of(NAME).events[place].words[3]}).pop()
    assert not _conform(NAME, _changed(NAME, place, w3=other)).exact


def test_a_copy_of_another_size_place_or_barrier():
    place = _first(NAME, Kind.LOAD)
    smem, barrier, size = log_of(NAME).events[place].words[:3]
    for words in ({"w0": smem + 1024}, {"w1": barrier + 8}, {"w2": size // 2}):
        (difference,) = _conform(NAME, _changed(NAME, place, **words)).differences
        assert difference.agent == "LOAD"


@pytest.mark.parametrize("word", ["w1", "w3"])
def test_a_descriptor_that_points_to_another_slot(word):
    place = _first(NAME, Kind.MMA)
    plan = plan_of(NAME)
    slot = {"w1": "sQ", "w3": "sKV"}[word]
    size = next(row.slot_bytes for row in plan.smem if row.name == slot)
    value = log_of(NAME).events[place].words[int(word[1:])]
    (difference,) = _conform(NAME, _changed(NAME, place, **{word: value + size // 16})).differences
    kernel, model = _shown(difference)
    assert difference.agent == "MMA" and "'smem'" in kernel and kernel.startswith("mma S0 ")
    assert kernel.partition("((")[0] == model.partition("((")[0]


def test_chunks_of_an_operand_that_are_crossed():
    """A's first 16 columns against B's second and the other way round: the union is the same."""
    events = log_of(NAME).events
    first, second = [i for i, e in enumerate(events) if e.kind == Kind.MMA][:2]
    b, other = events[first].words[3], events[second].words[3]
    rows = list(events)
    rows[first] = replace(rows[first], words=_with(rows[first].words, 3, other))
    rows[second] = replace(rows[second], words=_with(rows[second].words, 3, b))
    (difference,) = _conform(NAME, rows).differences
    assert difference.agent == "MMA"


def _with(words, at, value):
    return (*words[:at], value, *words[at + 1 :])


@pytest.mark.parametrize("word", [5, 6, 7, 8])
def test_a_second_box_from_somewhere_else(word):
    """Another column, row, head or batch for the second half of a tile's rows."""
    events = log_of("04-grid").events
    place = [i for i, e in enumerate(events) if e.kind == Kind.LOAD][1]
    moved = replace(events[place], words=_with(events[place].words, word, 128))
    rows = (*events[:place], moved, *events[place + 1 :])
    assert not _conform("04-grid", rows).exact


def test_a_negated_operand():
    place = _first(NAME, Kind.MMA)
    instruction = log_of(NAME).events[place].words[5]
    events = [
        replace(e, words=_with(e.words, 5, e.words[5] | 1 << 13)) if e.kind == Kind.MMA else e
        for e in log_of(NAME).events
    ]
    assert instruction and not _conform(NAME, events).exact


def test_a_warp_outside_the_plan_and_one_without_an_end():
    events = log_of(NAME).events
    strange = _conform(NAME, (*events, replace(events[-1], warp=16)))
    assert str(strange.differences[0]) == "warp 16: the plan has no such warp"
    ends = [i for i, e in enumerate(events) if e.kind == Kind.EXIT]
    unfinished = _conform(NAME, events[: ends[0]] + events[ends[0] + 1 :])
    assert [d.text for d in unfinished.differences] == ["the log does not show its end"]


def test_an_mma_with_another_accumulator_shape_or_beginning():
    place = _first(NAME, Kind.MMA)
    d, *_, instruction, accumulate, _, _ = log_of(NAME).events[place].words
    for words in ({"w0": d + 128}, {"w5": instruction ^ 24 << 17}, {"w6": 1 - accumulate}):
        (difference,) = _conform(NAME, _changed(NAME, place, **words)).differences
        assert difference.agent == "MMA"


def test_another_count_that_a_barrier_is_initialised_with():
    place = _first(NAME, Kind.INIT)
    row, step = log_of(NAME).events[place], _steps_of(NAME)[place]
    (difference,) = _conform(NAME, _changed(NAME, place, w1=row.words[1] + 1)).differences
    assert difference.agent == step.what
    assert difference.text == (
        f"initialised with {row.words[1] + 1} arrivals, the plan has {row.words[1]}"
    )


def test_a_barrier_that_only_one_side_has():
    events, place = log_of(NAME).events, _first(NAME, Kind.INIT)
    name, count = _steps_of(NAME)[place].what, events[place].words[1]
    (missing,) = _conform(NAME, events[:place] + events[place + 1 :]).differences
    assert str(missing) == f"{name}: initialised with None arrivals, the plan has {count}"
    stranger = event(Kind.INIT, 0x7F00, 3, warp=12, lanes=1, line=1)
    (more,) = _conform(NAME, (stranger, *events)).differences
    assert str(more) == "mbarrier 0x7f00: initialised with 3 arrivals, the plan has None"


@pytest.mark.parametrize("kind", [Kind.WAIT, Kind.ARRIVE, Kind.COMMIT])
def test_another_barrier(kind):
    place = _first(NAME, kind)
    address, agent = log_of(NAME).events[place].words[0], _steps_of(NAME)[place].agent
    (difference,) = _conform(NAME, _changed(NAME, place, w0=address ^ 8)).differences
    kernel, model = _shown(difference)
    assert difference.agent == agent
    assert kernel.split()[0] == model.split()[0] and kernel.split()[1] != model.split()[1]


def test_other_bytes_that_a_barrier_expects():
    place = _first(NAME, Kind.ARRIVE, warp=14)
    size = log_of(NAME).events[place].words[2]
    (difference,) = _conform(NAME, _changed(NAME, place, w2=size // 2)).differences
    kernel, model = _shown(difference)
    assert kernel.startswith("expect q_full0 ") and model.startswith(f"expect q_full0 {size} ")


def test_other_columns_and_fewer_lanes():
    place = _first(NAME, Kind.LOAD_TMEM)
    row = log_of(NAME).events[place]
    found = _conform(NAME, _changed(NAME, place, w0=row.words[0] + 32)).differences
    assert [difference.agent for difference in found] == [_steps_of(NAME)[place].agent]
    events = list(log_of(NAME).events)
    events[place] = replace(row, lanes=0xFFFF)
    assert not _conform(NAME, events).exact


@pytest.mark.parametrize("kind", [Kind.FENCE, Kind.WAIT])
@pytest.mark.parametrize("warp", [0, 8, 14])
def test_a_fence_or_wait_of_one_lane(kind, warp):
    """It may not stand for the other 31, which store and load as well."""
    place = _first(NAME, kind, warp=warp)
    events = list(log_of(NAME).events)
    events[place] = replace(events[place], lanes=1)
    (difference,) = _conform(NAME, events).differences
    kernel, model = _shown(difference)
    assert " of 1 lanes only" in kernel and "lanes" not in model


def test_a_named_barrier_with_another_number():
    place = _first(NAME, Kind.BAR_ARRIVE)
    (difference,) = _conform(NAME, _changed(NAME, place, w0=9)).differences
    assert "bar.arrive barrier 9" in str(difference) and "sync start" in str(difference)


def test_a_wait_for_bulk_copies_that_leaves_one():
    place = _first(NAME, Kind.BULK_WAIT)
    (difference,) = _conform(NAME, _changed(NAME, place, w0=1)).differences
    assert difference.agent == "EPILOGUE"
    events = list(log_of(NAME).events)
    events[place] = replace(events[place], flags=0)  # for the write, not only for the read
    (difference,) = _conform(NAME, events).differences
    assert difference.agent == "EPILOGUE"


def test_the_place_of_the_cta_decides_which_tiles():
    right = place_of(NAME)
    for axis in ("block", "head", "batch"):
        place = right._replace(**{axis: getattr(right, axis) + 1})
        found = {difference.agent for difference in _conform(NAME, place=place).differences}
        assert found == {"LOAD", "EPILOGUE"}


def test_a_model_that_does_something_else_is_noticed():
    notes = list(notes_of(NAME))
    gone = next(note for note in notes if note.verb == "commit")
    notes.remove(gone)
    (difference,) = _conform(NAME, notes=notes).differences
    assert difference.agent == gone.agent
    kernel, _ = _shown(difference)
    assert kernel.startswith(f"commit {gone.what} ")


@pytest.mark.parametrize("moved", [0, 16])
def test_a_model_that_stores_neighbouring_columns_in_parts(moved):
    """The log shows them as one step; with a gap between them they are not the same."""
    notes, parts = [], 0
    for note in notes_of(NAME):
        if note.verb == "tmem.st" and note.what.startswith("P"):
            first, columns = note.numbers
            half = columns // 2
            notes.append(replace(note, numbers=(first, half)))
            notes.append(replace(note, numbers=(first + half + moved, columns - half)))
            parts += 2
        else:
            notes.append(note)
    assert parts
    found = {difference.agent for difference in _conform(NAME, notes=notes).differences}
    softmax = {f"SOFTMAX{tile}.{warp}" for tile in range(2) for warp in range(4)}
    assert found == (softmax if moved else set())


def test_each_warp_that_differs_is_named_once():
    events = [row for row in log_of(NAME).events if row.kind != Kind.STORE_TMEM]
    found = [difference.agent for difference in _conform(NAME, events).differences]
    assert len(found) == len(set(found)) == 12  # warps that store: two softmax groups, correction
    assert "SOFTMAX0.3" in found and "CORRECTION.0" in found
