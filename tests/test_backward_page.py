# SPDX-License-Identifier: Apache-2.0
"""The two pages of stage 07: numbers of model, roofline, config and evidence. Derived, no GPU."""

import functools
import inspect
import itertools
import json
import math
import re

import pytest
import torch
from flash_ladder import load
from flash_ladder.common import (
    contract,
    contract_gpu,
    contract_gradients,
    derived,
    exp2_output,
    gradients,
    inputs,
    reference,
    roofline,
    sanitize,
    timeline,
)
from flash_ladder.common.model import B200, Deadlock, Role
from flash_ladder.common.plan import MAX_SMEM_BYTES

ONE, PAIR = "backward_1cta", "backward_2cta"  # also names of the pages: the stage's, the pair's
PAGES = {
    ONE: (load(7).folder / "README.md").read_text(encoding="utf-8"),
    PAIR: (load(7).part(PAIR).folder / "README.md").read_text(encoding="utf-8"),
}
TEXTS = {name: " ".join(page.split()) for name, page in PAGES.items()}
TEXT, PAIR_TEXT = TEXTS.values()
KERNELS = {ONE: ((ONE, 128), (ONE, 64)), PAIR: ((PAIR, 128), (ONE, 128))}  # columns of its tables
COLUMNS = [(page, column) for page, kernels in KERNELS.items() for column in range(len(kernels))]
PUBLISHED = {"non-causal": (1247.5, 1359.8), "causal": (1117.9, 1208.6)}  # TFLOP/s: Q, #2280
BEST = 1457  # TFLOP/s of the paper's backward: Q


@functools.cache
def _backward(
    name: str, head_dim: int, tiles: int, settings: tuple[str, ...] = (), key_tiles: int = 0
):
    """One CTA, or pair, of a backward part against `tiles` query tiles: (problem, run).

    key_tiles: all that it takes, unless given.
    """
    part = load(7).part(name)
    keys = 128 * (key_tiles or (2 if name == PAIR else part.config.KEY_TILES[head_dim]))
    sizes = {"batch": 1, "seqlen_q": 128 * tiles, "seqlen_k": keys, "heads": 1}
    problem = inputs.make("gaussian", **sizes, head_dim=head_dim)
    forward = reference.attention(problem.q, problem.k, problem.v)
    out, lse = forward.out.to(problem.q.dtype), forward.lse.float()
    stats = gradients.statistics(out, lse, problem.dout)
    tensors = problem.q, problem.k, problem.v, problem.dout
    machine = derived.machine("B200", settings)
    return problem, part.model.run(*tensors, stats, head_dim**-0.5, machine)


def _step(name: str, head_dim: int, *settings: str) -> float:
    """Cycles of a CTA for a query tile and a key tile in the steady state."""
    return timeline.steady(*(_backward(name, head_dim, tiles, settings)[1] for tiles in (8, 16)))


def _port(name: str, head_dim: int, *settings: str) -> dict[str, float]:
    """Cycles of its port of shared memory for the same, by purpose."""
    run = _backward(name, head_dim, 16, settings)[1]
    return {purpose: each for purpose, (each, _) in timeline.port(run).items()}


def _row(page: str, name: str) -> list[str]:
    """Cells of a row."""
    (cells,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGES[page], re.M)
    return [cell.strip() for cell in cells.split("|")]


def _numbers(page: str, name: str) -> list[float]:
    """The numbers that a row begins its cells with; cells without one are left out."""
    found = (re.match(r"[\d.]+", cell) for cell in _row(page, name))
    return [float(number[0]) for number in found if number]


# ---- the steady state ----------------------------------------------------------------------


def test_two_key_tiles_in_one_cta_beat_a_pair_at_head_dim_64():
    """The pair at 64 exists as a model alone: its gradients are right, and it is slower."""
    problem, run = _backward(PAIR, 64, 8)
    truth = reference.attention_backward(problem.q, problem.k, problem.v, problem.dout)
    for name in ("dq", "dk", "dv"):
        error = getattr(run, name).double() - getattr(truth, name)
        assert error.abs().max() < 0.01 * getattr(truth, name).abs().max()
    one, pair = _step(ONE, 64), _step(PAIR, 64)
    assert one < 0.95 * pair
    assert f"{one:.0f} against {pair:.0f} cycles" in PAIR_TEXT


@pytest.mark.parametrize(("page", "column"), COLUMNS)
def test_the_pages_and_the_command_show_the_same_cycles(ladder, page, column):
    name, head_dim = KERNELS[page][column]
    options = ("--part", name, "--head-dim", str(head_dim), "--heads", "1")
    code, out, _ = ladder("model", "7", *options, "--seqlen", "1024", "--json")
    found = json.loads(out)["derived"]["cycles_per_tile"]
    assert code == 0 and found == pytest.approx(_step(name, head_dim))
    assert _numbers(page, "cycles")[column] == round(found)
    short = ladder("model", "7", *options, "--seqlen", "512", "--json")[1]
    assert json.loads(short)["derived"]["cycles_per_tile"] == pytest.approx(found)


OPERANDS = (
    "S reads Q and K, dP reads dO and V",
    "dV reads dO, dK reads Q (Pᵀ, dSᵀ: tensor memory)",
    "dQ reads dS and K",
)
REST = {  # row of the problem's table: its name in the roofline
    "dS is written": "dS written",
    "half of dS goes to the peer": "dS to the peer",
    "dQ, float32, is written, then read to be added": "dQ written and read",
}


AT = {(ONE, ONE): 0, (PAIR, ONE): 0, (PAIR, PAIR): 2}  # (page, kernel): its column of KiB


def _steps(page: str) -> dict[str, str]:
    """Rows of the problem's table but its operands; only the pair's page has what is swapped."""
    return {row: purpose for row, purpose in REST.items() if page == PAIR or "peer" not in row}


def _derived(page: str, name: str) -> dict[str, float]:
    """Cycles of the port at head dim 128 that a page derives for a kernel, by purpose."""
    at = AT[page, name] + 1
    found = {"MMA operands": sum(_numbers(page, row)[at] for row in OPERANDS)}
    return found | {purpose: _numbers(page, row)[at] for row, purpose in _steps(page).items()}


@pytest.mark.parametrize(("page", "name"), AT)
def test_the_pages_derive_the_papers_counts_step_by_step(page, name):
    """KiB times 1024 / 128 are cycles; they add up to the last row; the roofline has the same."""
    kernel, at = roofline.backward(pair=name == PAIR), AT[page, name]
    rows = [_numbers(page, row) for row in (*OPERANDS, *_steps(page))]
    together = _numbers(page, "together")
    assert all(row[at + 1] == row[at] * 1024 / B200["smem"] for row in (*rows, together))
    assert [sum(row[i] for row in rows) for i in (at, at + 1)] == together[at : at + 2]
    parts = {purpose: cycles for purpose, cycles in _derived(page, name).items() if cycles}
    assert parts == kernel.smem_parts and together[at + 1] == kernel.smem


@pytest.mark.parametrize(("page", "column"), COLUMNS)
def test_the_pages_show_who_uses_the_port(page, column):
    """COMPUTE reads LSE for P, and D for dS, which it writes, in a pair in a step of its own."""
    (name, head_dim), each = KERNELS[page][column], _port(*KERNELS[page][column])
    shown = lambda row: _numbers(page, row)[column]
    used = lambda *names: sum(each.pop(name, 0.0) for name in names)
    assert used("TMA loads") == pytest.approx(shown("TMA fills of Q, dO, LSE, D"))
    compute = used("COMPUTE P", "COMPUTE dS", "COMPUTE stage dS")
    found = {
        "MMA operands": used("MMA operands"),
        "dS written": compute - shown("LSE and D read by every warp"),
        "dS to the peer": used("RELAY copy sdX"),
        "dQ written and read": used("REDUCE stage dQ", "REDUCE reduce sdQ"),
    }
    if head_dim == 128:
        wanted = {"dS to the peer": 0.0} | _derived(page, name)
        wanted["dS to the peer"] *= 2 / 3  # passes of our copy; the paper counts three
    else:
        two = roofline.backward(tile_n=256, head_dim=64).smem_parts
        wanted = {purpose: two.get(purpose, 0) / 2 for purpose in found}
    assert found == pytest.approx(wanted) and not any(each.values())
    assert sum(found.values()) == pytest.approx(shown("at the port, as derived"))


# ---- at a glance, the problem, the idea -----------------------------------------------------


def test_at_a_glance():
    one, forward, config = roofline.backward(), roofline.forward(), load(7).part(ONE).config
    rate = lambda kernel: kernel.flop / (2 * 128**3)
    assert _numbers(ONE, "products") == [rate(forward), rate(one)] == [2, 5]
    assert _numbers(ONE, "tensor core, cycles") == [forward.mma, one.mma]
    assert _numbers(ONE, "exponentials, cycles of the MUFU")[1:] == [one.exp]
    assert _numbers(ONE, "cycles of the port of shared memory") == [forward.smem, one.smem]
    assert forward.smem == 512 + 256 and "| 768 (QK 512, PV 256) |" in PAGES[ONE]
    assert _numbers(ONE, "at the port, as derived")[0] == one.smem


def test_the_pair_at_a_glance():
    kernels = roofline.backward(), roofline.backward(pair=True)
    configs = [load(7).part(name).config for name in (ONE, PAIR)]
    numbers = lambda row: _numbers(PAIR, row)
    assert numbers("tensor core, cycles") == [kernel.mma for kernel in kernels]
    port = [kernels[0].smem, numbers("at the port, as derived")[0]]
    assert numbers("cycles of the port of shared memory") == port
    assert f"the paper counts {kernels[1].smem:.0f}: one more pass" in PAIR_TEXT
    keys = [configs[0].TILE * configs[0].KEY_TILES[128], configs[1].CTAS * configs[1].TILE]
    assert numbers("keys that one addition of dQ covers") == keys
    plans = [config.plan(128) for config in configs]
    regions = [{row.name: row for row in plan.tmem} for plan in plans]
    shared = [next(name for name in ("S", "dP") if "dQ" in rows[name].aliases) for rows in regions]
    columns = [f"{rows['dQ'].columns}, of {name}" for rows, name in zip(regions, shared)]
    assert _row(PAIR, "dQ in tensor memory, columns") == columns
    assert numbers("roles") == [len(plan.roles) for plan in plans]
    assert {row.name for row in plans[1].roles} - {row.name for row in plans[0].roles} == {"RELAY"}
    assert f"*{configs[1].IDEA}*" in PAIR_TEXT


def test_the_pages_reconcile_the_roofline(ladder):
    one, pair = ("roofline", "--backward"), ("roofline", "--backward", "--pair", "--tile-n", "256")
    for command, cycles in ((one, 3328), (pair, 2688)):
        assert f" {cycles:,} " in ladder(*command)[1].replace("│", " ")
    assert f"`flash-ladder {' '.join(one)}` prints 3328." in TEXT
    told = "the keys of both CTAs, prints 2688."
    assert f"`flash-ladder {' '.join(pair)}`, {told}" in PAIR_TEXT
    assert "1.30 times as fast if only the port counts (D: 3328 / 2560)" in PAIR_TEXT
    ours = _numbers(PAIR, "at the port, as derived")[0]
    passes = roofline.backward(pair=True).smem_parts["dS to the peer"]
    peer = _port(PAIR, 128)["RELAY copy sdX"]
    assert 2688 - ours == passes - peer == passes / 3
    half = passes * B200["smem"] / 1024 / roofline.DSMEM_PASSES
    assert f"three passes of half of dS, {half:.0f} KiB each" in PAIR_TEXT
    assert f"two are left, {peer:.0f} cycles, and {ours:.0f} in all (D)" in PAIR_TEXT
    less = [f"{1 - cycles / 3328:.0%}".replace("%", " %") for cycles in (ours, 2688)]
    assert f"A pair needs {less[0]} less of the port, {less[1]} by the paper's count" in PAIR_TEXT
    assert f"{ours:.0f} and 2688 of 3328" in PAIR_TEXT and f"{3328 / ours:.2f}" == "1.30"


def test_the_pairs_table_shows_what_is_counted_here():
    """Beside the paper's three passes of the copy: two, in KiB and cycles, and their sums."""
    found = {
        name: [int(re.fullmatch(r"\d+ \(here (\d+)\)", cell)[1]) for cell in _row(PAIR, name)[2:]]
        for name in ("half of dS goes to the peer", "together")
    }
    copy, port = _port(PAIR, 128)["RELAY copy sdX"], _numbers(PAIR, "at the port, as derived")[0]
    for name, cycles in zip(found, (copy, port)):
        assert found[name] == pytest.approx([cycles * B200["smem"] / 1024, cycles])


def test_what_a_pair_without_the_swap_would_need():
    """The answer to a question: of the paper's counts, but for the passes of the copy."""
    one, pair = roofline.backward().smem_parts, roofline.backward(pair=True).smem_parts
    ours, copy = _numbers(PAIR, "at the port, as derived")[0], _port(PAIR, 128)["RELAY copy sdX"]
    more = one["dQ written and read"] - pair["dQ written and read"]
    assert f"{ours - copy + more:.0f} cycles, more than the tensor core" in PAIR_TEXT
    assert f"(D: {ours:.0f} − {copy:.0f} + {more:.0f})" in PAIR_TEXT
    config = load(7).part(PAIR).config
    both, half = config.CTAS * config.TILE, config.HALF
    assert (
        f"128 × 128 each instead of {half} × {both} and {both} × {128 // config.CTAS}" in PAIR_TEXT
    )
    assert config.TILE * 128 == half * both == both * 128 // config.CTAS
    count = config.plan(128).barrier("dx_both").arrivals(config.plan(128))
    assert f"Why is the count of <code>dx_both</code> {count}?" in PAIR_TEXT


def test_the_arithmetic_of_the_problem():
    one = roofline.backward()
    assert f"{32768**2 * 2 / 2**30:.0f} GiB a head at 32 768 tokens" in TEXT
    assert f"tensor core needs {one.mma:.0f} cycles" in TEXT and f"needs {one.exp:.0f} (D)" in TEXT
    tile = 128 * 128 * 2  # bytes
    cycles = tile / B200["smem"]
    assert 2 * 128**3 / B200["tensor"] == 2 * cycles  # S reads two tiles while it works
    assert "128 bytes a cycle for all reads and writes" in TEXT and B200["smem"] == 128
    assert f"in 16 bits has {tile // 1024} KiB: {cycles:.0f} cycles (D)" in TEXT
    told = f"{2 * cycles:.0f} cycles of the port for {2 * cycles:.0f} cycles of work"
    assert f"{told} (D: {one.mma:.0f} / 5)" in TEXT and one.mma / 5 == 2 * cycles
    told = f"at most {one.tensor_ceiling * 100:.0f} % of peak (D: {one.mma:.0f} / {one.smem:.0f})"
    for text in (TEXT, PAIR_TEXT):
        assert f"A KiB takes {1024 / B200['smem']:.0f} cycles" in text and told in text
    half = tile // 2  # of Q, in a pair
    shown = f"{(tile + half) // 1024} KiB with K, {(tile + half) / B200['smem']:.0f} cycles (D)"
    assert f"For S a CTA of a [pair][pairs] reads half of Q: {shown}" in PAIR_TEXT
    assert f"{2 * 4 * 128 * 128 // 1024} KiB for 128 keys (D: 128 · 128 float32" in PAIR_TEXT
    assert f"{4 * 32768 * 16 * 128 / 1e6:.0f} MB for one sequence of 32 768 tokens, 16" in TEXT
    assert f"{64 * 4 // load(7).part(ONE).config.COPY_BYTES} loads of 16 bytes bring 64" in TEXT


def test_head_dim_64():
    """Two key tiles of a CTA reduce dQ once; a pair with and without what goes to the peer."""
    two, one = roofline.backward(tile_n=256, head_dim=64), roofline.backward(head_dim=64)
    pair = roofline.backward(pair=True, head_dim=64)
    peer = pair.smem_parts["dS to the peer"]
    ours = two.smem / 2
    assert _numbers(ONE, "at the port, as derived")[1] == ours
    told = "cycles of the port for a query tile with a key tile instead of"
    assert f"needs {ours:.0f} {told} {one.smem:.0f}, as one dQ covers both" in TEXT
    bare = pair.smem - peer
    copy = peer * 2 / 3
    told = f"needs {ours:.0f} cycles of the port for each; a CTA of a pair needs {bare:.0f}, and "
    assert f"{told}{copy:.0f} for the copy to the peer, as many" in PAIR_TEXT
    assert bare + copy == ours
    terms = [one.smem_parts[name] for name in ("MMA operands", "dS written")]
    dq = [kernel.smem_parts["dQ written and read"] for kernel in (one, two)]
    split = "(D: {:.0f} for operands, {:.0f} for dS, {:.0f} instead of {:.0f} for dQ)"
    assert split.format(*terms, dq[1] / 2, dq[0]) in TEXT
    tile = 128 * 64 * 2 / B200["smem"]  # cycles of a tile of Q, K, V or dO; dS is twice as large
    assert 2 * 2 * tile + 2 * tile + 3 * tile == terms[0]
    each = f"S and dP {2 * tile:.0f} each, dV and dK {tile:.0f}, dQ {3 * tile:.0f} (D)"
    assert f"Operands take {terms[0]:.0f} in both cases: {each}" in TEXT
    assert sum(terms) + dq[1] / 2 == ours and sum(terms) + dq[0] == one.smem
    assert f"{one.smem:.0f} cycles, upstream's figure: dQ leaves for every key tile (D)." in TEXT


def test_one_key_tile_at_head_dim_64_is_slower(monkeypatch):
    both = _step(ONE, 64)
    monkeypatch.setitem(load(7).part(ONE).config.KEY_TILES, 64, 1)
    alone = timeline.steady(*(_backward.__wrapped__(ONE, 64, tiles)[1] for tiles in (8, 16)))
    told = f"with one key tile a CTA the model takes {alone:.0f} cycles instead of {both:.0f} (D)"
    assert told in TEXT


def test_who_has_what():
    """Sentences that restate config, the plan of tensor memory, and what one MMA does."""
    one, pair = load(7).part(ONE).config, load(7).part(PAIR).config
    keys = {head_dim: one.TILE * tiles for head_dim, tiles in one.KEY_TILES.items()}
    assert f"A CTA keeps {keys[128]} keys ({keys[64]} at head dim 64)" in TEXT
    assert f"{one.HALF} each: a thread has one key and {one.HALF} queries" in TEXT
    both = pair.CTAS * pair.TILE
    assert f"So it is one MMA of {pair.TILE} queries and {both} keys" in PAIR_TEXT
    assert f"where each CTA has {pair.HALF} queries" in PAIR_TEXT
    last = next(region for region in one.plan(128).tmem if region.name == "P1")
    columns = f"{last.column} to {last.column + last.columns - 1}"
    second = f"{one.HALF} to {one.TILE - 1}"
    told = f"`COMPUTE1` reads columns {second} of S, and its P lies in columns {columns}."
    assert told in TEXT and f"reads all {one.HALF} columns before it writes the first" in TEXT
    assert one.Q_STAGES == {64: 2, 128: 2} and "as Q has two slots" in TEXT
    assert one.DO_STAGES == {64: 2, 128: 1} and "whose slot dV(s) has freed" in TEXT
    pair_p1 = pair.TMEM_P[1] == one.TMEM_P[1] and pair.TMEM_DQ == one.TMEM_P[0] + one.HALF // 2
    told = "P lies in S, in columns {} to {} and {} to {}, as a pair's dQ goes between"
    ends = [column + at for column in one.TMEM_P for at in (0, one.HALF // 2 - 1)]
    assert pair_p1 and told.format(*ends) in TEXT
    assert f"to shared memory, in slices of {one.SLICE} columns" in TEXT
    for config, text in ((one, TEXT), (pair, PAIR_TEXT)):
        limit = config.DECLARED[128]["slots_per_element"][1]
        assert "needs fewer than 5.5 [issue slots]" in text and limit <= 5.5


def test_the_second_cta_without_keys_still_adds_its_half_of_dq(monkeypatch):
    """P is 1 and dS 0 there; dQ of its queries comes from the keys of the first."""
    model, found = load(7).part(PAIR).model, {}

    def watch(name, inner):
        def watched(role, cta, *rest):
            values = yield from inner(role, cta, *rest)
            found.setdefault((name, cta.rank), []).append(values.clone())
            return values

        monkeypatch.setattr(model, name, watched)

    watch("probabilities", model.probabilities)
    watch("differences", model.differences)
    problem, run = _backward.__wrapped__(PAIR, 128, 2, key_tiles=1)
    assert all((p == 1).all() for p in found["probabilities", 1])
    assert not any(ds.any() for ds in found["differences", 1])
    truth = reference.attention_backward(problem.q, problem.k, problem.v, problem.dout)
    dq, exact = (x.double()[0, :, 0].unflatten(0, (2, 2, 64))[:, 1] for x in (run.dq, truth.dq))
    assert (dq - exact).norm() < 0.01 * exact.norm()
    told = (
        "has zeros for K, V, LSE and D: its P is 1, which only its dV uses, its dS 0. Its halves "
        "of Q and dO are real, and it adds its half of dQ; of its dV and dK nothing is stored."
    )
    assert told in PAIR_TEXT


def test_a_second_slot_for_do_has_no_room():
    plan = load(7).part(ONE).config.plan(128)
    kib = {row.name: row.total_bytes / 1024 for row in plan.smem if not row.aliases}
    told = "Q takes {sQ:.0f} KiB, K, V, dO, dS and slices of dQ {sdO:.0f} each, LSE and D"
    assert told.format(**kib) in TEXT
    assert {kib[name] for name in ("sK", "sV", "sdO", "sdS", "sdQ")} == {32}
    assert f"LSE and D {kib['sStats']:.0f}, of {MAX_SMEM_BYTES // 1024} (D)" in TEXT
    assert sum(kib.values()) + kib["sdO"] > MAX_SMEM_BYTES / 1024 > sum(kib.values())


def test_one_slot_for_q_deadlocks_as_the_page_says(monkeypatch):
    """MMA wants the next Q for S before it issues the dK that frees the only slot."""
    monkeypatch.setitem(load(7).part(ONE).config.Q_STAGES, 128, 1)
    with pytest.raises(Deadlock) as stuck:
        _backward.__wrapped__(ONE, 128, 2)
    assert "MMA waits for q_full" in str(stuck.value)
    assert "LOAD waits for q_empty" in str(stuck.value)
    assert "Set <code>Q_STAGES</code> to 1 at head dim 128." in TEXT and "the deadlock." in TEXT


def test_the_buffers_of_a_pair_have_the_sizes_that_the_page_gives():
    """Rows and columns of the halves; in 16 bits they fill a slot."""
    config = load(7).part(PAIR).config
    tile, half, keys = config.TILE, config.HALF, config.CTAS * config.TILE
    by_rows, by_columns = (half, 128), (tile, 128 // config.CTAS)
    wanted = {"sQ": by_rows, "sdO": by_rows, "sQt": by_columns, "sdOt": by_columns}
    wanted |= {"sKt": (keys, 128 // config.CTAS), "sdS": (keys, half), "sdX": (tile, half)}
    rows = re.findall(r"^\| (`s[^|]*) \| (\d+) \w+ × (\d+)(?: \w+)? \|", PAGES[PAIR], re.M)
    sizes = [(re.findall(r"`(\w+)`", names), (int(a), int(b))) for names, a, b in rows]
    assert {name: size for names, size in sizes for name in names} == wanted
    buffers = {row.name: row.slot_bytes for row in config.plan(128).smem}
    assert all(2 * rows * columns == buffers[name] for name, (rows, columns) in wanted.items())


def _in_turns(role, cta, half, slot, step):
    """P with a bug: a CHUNK of it is stored before the next CHUNK of S is loaded."""
    model, config, found = load(7).part(ONE).model, load(7).part(ONE).config, []
    for first in range(0, config.HALF, config.CHUNK):
        s = yield from role.tmem_load(cta.tS.part(half * config.HALF + first, config.CHUNK), step)
        yield from role.wait_ld()
        lse = role.read(model.statistics(cta, slot, 0, half * config.HALF + first), by_all=True)
        found.append(torch.exp2(s.clone() * cta.scale_log2 - lse))
        columns = cta.tP[half].part(first // 2, config.CHUNK // 2)
        yield from role.tmem_store(columns, found[-1], step)
    yield from role.wait_st()
    return torch.cat(found, dim=1)


def test_p_over_s_spoils_what_the_page_says(monkeypatch):
    monkeypatch.setattr(load(7).part(ONE).model, "probabilities", _in_turns)
    problem, run = _backward.__wrapped__(ONE, 128, 2)
    assert run.findings == ()  # no race
    truth = reference.attention_backward(problem.q, problem.k, problem.v, problem.dout)
    wrong = {}
    for name in ("dq", "dk", "dv"):
        exact = getattr(truth, name)[0, :, 0]
        error = (getattr(run, name)[0, :, 0].double() - exact).norm(dim=1) / exact.norm(dim=1)
        wrong[name] = {row: value for row, value in enumerate(error.tolist()) if value > 0.1}
    first, last = min(wrong["dq"]), max(row for row in wrong["dq"] if row < 128)
    assert sorted(wrong["dq"]) == [*range(first, last + 1), *range(first + 128, last + 129)]
    worst = round(100 * max(wrong["dq"].values()), -1)
    assert f"dQ of queries {first} to {last} is wrong by up to {worst:.0f} %" in TEXT
    assert min(len(wrong["dk"]), len(wrong["dv"])) > 0.9 * 128
    config = load(7).part(ONE).config
    columns = config.TMEM_P[1], config.TMEM_P[1] + config.CHUNK // 2 - 1
    assert "its first columns of P, {} to {}, over S".format(*columns) in TEXT


@pytest.mark.parametrize(("page", "column"), COLUMNS)
def test_the_tensor_core_of_a_tile(monkeypatch, page, column):
    """FLOP of the MMAs that the model issues, at full rate; a pair's are of two CTAs."""
    (name, head_dim), flop, mma = KERNELS[page][column], [], Role.mma

    def counted(role, *arguments, **options):
        flop.append(2 * math.prod(arguments[4]) / (2 if options.get("pair") else 1))
        return mma(role, *arguments, **options)

    monkeypatch.setattr(Role, "mma", counted)
    _backward.__wrapped__(name, head_dim, 2)
    steps = 2 * load(7).part(ONE).config.KEY_TILES[head_dim]
    cycles = sum(flop) / B200["tensor"] / steps
    shown = _numbers(page, "tensor core")[column]
    assert shown == cycles == roofline.backward(head_dim=head_dim).mma


# ---- one CTA against a pair -----------------------------------------------------------------

WITHOUT_READS, WITHOUT_FILLS = "smem_broadcast_passes=1e-6", "smem_fill_passes=1e-6"


def test_the_factor_with_and_without_what_the_paper_does_not_count():
    kinds = ((WITHOUT_READS,), (WITHOUT_FILLS,), (WITHOUT_READS, WITHOUT_FILLS))
    factors = [_step(ONE, 128, *left_out) / _step(PAIR, 128, *left_out) for left_out in kinds]
    told = "Without reads of LSE and D the factor is {:.2f}, without fills by TMA {:.2f}, without"
    assert f"{told} both {{:.2f}} (`--set".format(*factors) in PAIR_TEXT
    assert min(factors) > _step(ONE, 128) / _step(PAIR, 128)  # what is left out hides some of it
    assert all(f"`--set {setting}`" in PAIR_TEXT for setting in kinds[2])


def test_what_the_page_says_of_one_cta():
    one, port = _step(ONE, 128), sum(_port(ONE, 128).values())
    assert f"busy for {port:.0f} of {one:.0f} cycles at head dim 128" in TEXT
    cycles = (roofline.backward().mma, one), (roofline.backward(head_dim=64).mma, _step(ONE, 64))
    at = [f"{mma / step * 100:.0f} % (D: {mma:.0f} / {step:.0f})" for mma, step in cycles]
    assert f"the tensor core for {at[0]}, at 64 for {at[1]}: in the model (i) holds, and" in TEXT
    assert "holds, and 77 % bounds 64 too (D: 1280 / 1664)." in TEXT
    assert all(mma / step < 0.77 for mma, step in cycles)
    assert all(
        f"{roofline.backward(**sizes).tensor_ceiling:.0%}" == "77%"
        for sizes in ({}, {"tile_n": 256, "head_dim": 64})
    )
    machine, config = derived.machine("B200"), load(7).part(ONE).config
    loads = 2 * config.HALF * 4 // config.COPY_BYTES  # LSE and D of a thread's queries
    warps, passes = len(config.COMPUTE0) + len(config.COMPUTE1), machine["smem_broadcast_passes"]
    assert loads * warps * passes == _numbers(ONE, "LSE and D read by every warp")[0]
    assert f"{loads} loads of each of {warps} warps, {passes:.0f} cycles each (D: as ncu" in TEXT


def _tflops(name: str, *settings: str) -> float:
    """Of 8192 tokens and 64 heads in all, as published."""
    sizes, machine = derived.Sizes(8192, 64, 128), derived.machine("B200", settings)
    return derived.simulate(load(7).part(name), machine, sizes, settings).time.tflops


def test_the_page_compares_the_model_with_what_was_published():
    one, pair = (_tflops(name) for name in (ONE, PAIR))
    assert f"the model gives {one:.0f} and {pair:.0f} TFLOP/s" in PAIR_TEXT
    assert f"{B200['sms']:.0f} SMs, {B200['clock'] / 1e9:.2f} GHz;" in PAIR_TEXT
    slow, fast = PUBLISHED["non-causal"]
    assert f"have {slow} and {fast} (Q: that pull request)" in PAIR_TEXT
    assert f"a factor of {pair / one:.2f} with start and end" in PAIR_TEXT
    off = f"{100 - 100 * one / slow:.0f} % too little for one CTA, {100 * pair / fast - 100:.0f} %"
    assert f"{off} too much for the pair" in PAIR_TEXT
    least, most = sorted(f"{b / a:.2f}" for a, b in PUBLISHED.values())
    steady = _step(ONE, 128) / _step(PAIR, 128)
    assert f"Published are {least} to {most} times (Q: pull request 2280" in PAIR_TEXT
    assert f"The model has {steady:.2f} (D)." in PAIR_TEXT
    assert float(most) < 1.15 and "less than the 15 % that we predicted" in PAIR_TEXT
    more = (
        f"has {BEST} TFLOP/s, {100 * BEST / slow - 100:.0f} % more than that pull request's one CTA"
    )
    assert f"the paper's best backward {more}, at another length (Q)" in PAIR_TEXT
    bare = [_tflops(name, WITHOUT_READS, WITHOUT_FILLS) for name in (ONE, PAIR)]
    told = "at the published size {:.0f} and {:.0f} TFLOP/s (D) would both be more than was"
    assert told.format(*bare) in PAIR_TEXT
    assert bare[0] > slow and bare[1] > fast


def test_what_the_page_says_of_other_figures():
    """Of the copy to the peer and of the additions to dQ."""
    copy, added = "dsmem=128", f"reduce={2 * B200['reduce']:g}"
    factors = [_step(ONE, 128, each) / _step(PAIR, 128, each) for each in (added, copy)]
    told = "With dQ added twice as fast it is {:.2f}, with a copy to the peer at 128 bytes a cycle"
    rest = f"instead of {B200['dsmem']:.0f} (Q: SemiAnalysis, second-hand) it is {factors[1]:.2f}:"
    rest += " the copy takes the port when"
    assert f"{told.format(factors[0])} {rest}" in PAIR_TEXT
    assert f"(`--set {added}`, `--set {copy}`)" in PAIR_TEXT
    usual, fast = (_products(*settings)["S", 6] for settings in ((), (copy,)))
    assert (
        f"S then takes {fast[1] - fast[0]:.0f} cycles, not {usual[1] - usual[0]:.0f}." in PAIR_TEXT
    )


def _products(*settings: str) -> dict[tuple[str, int], tuple[float, float]]:
    """When the leader's tensor core begins and ends each product of a pair, by (product, step)."""
    found = {}
    for span in _backward(PAIR, 128, 16, settings)[1].trace:
        if span.engine == "tensor" and span.role.startswith("MMA"):
            start, end = found.get((span.op, span.tile), (span.start, span.end))
            found[span.op, span.tile] = min(start, span.start), max(end, span.end)
    return found


def test_the_pairs_tensor_core_never_idles_but_waits_for_operands():
    """In the steady state, at step 6: each product begins when the one before ends."""
    found = _products()
    names = ("S", 6), ("dK", 5), ("dP", 6), ("dQ", 5), ("dV", 6), ("S", 7)
    spans = [found[name] for name in names]
    assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(spans))
    took = sorted(end - start for start, end in spans[:-1])
    assert sum(took) == pytest.approx(_step(PAIR, 128))
    told = f"it takes {took[0]:.0f} to {took[-1]:.0f} cycles instead of 512 (D)"
    assert f"always has a product to do, but operands slow each down: {told}" in PAIR_TEXT
    port, step = sum(_port(PAIR, 128).values()), _step(PAIR, 128)
    assert f"The port is busy for {port:.0f} of {step:.0f} cycles (D), and binds" in PAIR_TEXT
    mma = roofline.backward().mma
    told = f"at {100 * mma / step:.0f} % of peak (D: {mma:.0f} / {step:.0f}), always has"
    assert f"the tensor core, {told}" in PAIR_TEXT


def test_the_tensor_core_of_one_cta_idles_between_dq_and_dp():
    """In the steady state, at tile 5: from the end of dQ to the dP of the next step."""
    spans = _backward(ONE, 128, 16)[1].trace
    at = lambda op, tile, engine: [
        s for s in spans if (s.op, s.tile, s.engine) == (op, tile, engine)
    ]
    done = max(span.end for span in at("dQ", 5, "tensor"))
    begun = min(span.start for span in at("dP", 6, "tensor"))
    (there,) = {span.end for span in at("do_full[0]", 6, "barrier") if span.role == "MMA"}
    text = (
        f"{begun - done:.0f} cycles a step between dQ and the next dP, {there - done:.0f} until dO"
    )
    assert f"idles {text} is there and {begun - there:.0f} more" in PAIR_TEXT


def test_what_emulation_costs_gradients():
    """Of the table of docs/exp2.md, shares up to the largest that is not smaller than ours."""
    shares, rows = (24, 64), exp2_output.results()
    worst = max(
        exp2_output.worst(rows, dtype, 3, n)[1] for dtype in ("bf16", "fp16") for n in shares
    )
    told = f"If the forward [emulates][exp2] up to {shares[-1]} of 128 exponentials, the error of"
    assert f"{told} gradients grows by at most {100 * worst - 100:.1f} % (D)." in TEXT
    assert all(2 * sum(pairs) <= shares[-1] for pairs in load(7).config.EMULATED.values())


# ---- evidence -------------------------------------------------------------------------------


def test_the_page_shows_the_counts_of_the_evidence():
    (run,) = load(7).evidence["runs"]
    where = f"{run['gpu']}, driver {run['driver']}, {run['date']}, rewritten"
    passed = f"{where}: {run['tests']['passed']} checks passed"
    assert run["tests"]["failed"] == 0 and f"{passed} (M: `{run['command']}`)" in TEXT
    cases = [
        sum(row["cases"] for row in run["kernels"] if row.get("part", "") == part)
        for part in ("", "preprocess")
    ]
    checks, adversaries = len(contract_gpu.checks(load(7))), len(run["adversaries"])
    logs = sum("log" in row for row in run["kernels"])
    assert sum(cases) + checks + adversaries + logs == run["tests"]["passed"]
    assert "These are {} cases of the forward and {} of the backward".format(*cases) in TEXT
    told = f"{checks} checks, {adversaries} [adversaries][adversary] and {logs} [executed logs]"
    assert f"{told}[log] (M)" in TEXT
    names = {row["kernel"].replace("-sm_100a-bfloat16", ""): row for row in run["mutation"]}
    rows = [names.pop(name) for name in ("07-d128", f"07-{ONE}-d128", f"07-{PAIR}-d128")]
    rows.append(names.pop(f"07-{ONE}-d64"))
    counts = [row["counts"] for row in rows]
    assert not names and not any(row["unexplained"] for row in counts)
    forward, one, pair, narrow = (row["sites"] for row in counts)
    assert (
        f"Of {forward} waits, arrivals and fences of the forward and {one} of one CTA that were "
        f"left out at head dim 128, and of {narrow} of one CTA at 64, none is unexplained"
    ) in TEXT
    told = f"Of {pair} waits, arrivals and fences that were left out, none is unexplained"
    assert told in PAIR_TEXT
    memory, case = run["sanitizer"], sanitize.small_case(load(7), "bfloat16", 128)
    assert memory["errors"] == 0 and memory["tool"] == "memcheck"
    assert set(memory["kernels"]) == {
        row["key"] for row in run["kernels"] if row["dtype"] == "bfloat16"
    }
    sizes = f"{case.seqlen_q} queries, {case.seqlen_k} keys and {case.heads} heads"
    assert f"memcheck of every kernel in bf16, with {sizes}, found no errors" in TEXT
    assert all(
        row["log"]["clean"] and row["log"]["conforms"] for row in run["kernels"] if "log" in row
    )


def test_the_page_says_which_kernels_the_checks_of_gradients_run(monkeypatch):
    monkeypatch.setattr(contract.Case, "problem", lambda self, device: (self.part, self.head_dim))
    every = [found for _, found in contract_gradients._each(load(7))]
    assert sorted(every) == [(ONE, 64), (ONE, 128), (PAIR, 128)]
    assert [*contract_gradients._problems(load(7))] == [(ONE, 64), (PAIR, 128)]
    by = lambda name: inspect.getsource(contract_gradients.GRADIENT_CHECKS[f"gradients_{name}"])
    assert all("in _each(stage" in by(name) for name in ("repeats", "zero_dout"))
    of_usual = ("strided_dout", "strided_views", "side_stream")
    assert all("in _problems(stage" in by(name) for name in of_usual)
    assert (
        "repeats and zero dO are for the pair and for one CTA at both head dims; views and late "
        "inputs for the kernel that `attention` takes"
    ) in TEXT
