# SPDX-License-Identifier: Apache-2.0
"""When one access is ordered before another: the rules, and which one is broken.

Sources: PTX 9.7.16.6 (tcgen05), 9.7.13.4 (proxies), 9.7.13.15 (mbarrier), and the reference on
hardware, sections 4.1 to 4.5. `missing_edge` looks at two conflicting accesses in the order in
which they were recorded. Runs: host.
"""

from __future__ import annotations

from .ordering_clock import COPIES, STORES, TENSOR
from .ordering_race import DOES, Access, Intervals, place

WAITS = {"tmem.ld": "wait::ld", "tmem.st": "wait::st"}


def missing_edge(a: Access, b: Access) -> str | None:
    """None when `a` is ordered before `b`; else a key of LESSONS ("A1": only that rule does)."""
    if a.strand is None:
        return _after_generic(a, b)
    if a.strand is b.strand:
        return None
    mmas = a.kind == "mma" and b.kind == "mma"
    if mmas and _pipelined(a, b):
        return None
    missing = _after_strand(a, b)
    one_queue = mmas and a.thread is b.thread and a.strand.cta_group == b.strand.cta_group
    return "A1" if missing and one_queue else missing


def _after_generic(a: Access, b: Access) -> str | None:
    """A thread's own access comes first: known to `b`, and fenced if it is a write seen async."""
    same = a.thread is b.thread
    known = a.tick <= b.tick if same else b.views.base.get(a.thread.index, 0) >= a.tick
    if not known:
        return "wait"
    if b.strand is None or a.mode == "read":
        return None
    fenced = b.views.proxy_tick if same else b.views.proxy.get(a.thread.index, 0)
    return None if fenced >= a.tick else "fence.proxy.async"


def _pipelined(a: Access, b: Access) -> bool:
    """Two MMAs that PTX executes in order: same cta_group, accumulator and shape."""
    if a.strand.pipeline != b.strand.pipeline:
        return False
    if a.thread is b.thread:
        return True
    return b.views.tensor_seen.get(a.thread.index, 0) >= a.strand.tick


def _after_strand(a: Access, b: Access) -> str | None:
    """A strand comes first: somebody knew that it was done, and `b` knows of that."""
    tensor = b.kind in TENSOR and a.kind in TENSOR
    fence = None
    for key, tick in a.strand.completions(a.mode):
        if not _sees(b, key, tick, tensor):
            continue
        if a.kind in STORES and a.mode != "read" and a.thread is not b.thread:
            acquired = b.views.proxy_seen if b.strand else b.views.proxy
            if acquired.get(key, 0) < tick:
                fence = "bulk fence"
                continue
        return None
    return fence or (_unseen_tensor(a, b) if tensor else _unseen(a, b))


def _sees(b: Access, key: int, tick: int, tensor: bool) -> bool:
    if key == b.thread.index:
        return tick <= b.tick
    return (b.views.tensor_seen if tensor else b.views.base).get(key, 0) >= tick


def _unseen_tensor(a: Access, b: Access) -> str:
    """Which link is missing between two tcgen05 operations."""
    for key, tick in a.strand.completions(a.mode):
        if b.views.tensor.get(key, 0) >= tick:
            return "tcgen05.after"
        if key != b.thread.index and b.views.base.get(key, 0) >= tick:
            return "tcgen05.before"
    return _unseen(a, b)


def _unseen(a: Access, b: Access) -> str:
    """`b` does not know that strand `a` is done: was its end never signalled, or not waited for?"""
    issuer = a.thread.index
    later = max(b.views.base.get(issuer, 0), b.views.tensor.get(issuer, 0))
    if a.thread is b.thread:
        later = b.tick
    if later < a.strand.tick:
        return "wait"  # not even the issue is known
    if a.kind == "mma":
        covered = a.strand.number <= a.thread.committed
        return "wait" if covered and a.thread is b.thread else "commit"
    if a.kind in COPIES:
        return "copy"
    if a.kind in STORES:
        return "bulk.wait.read" if a.mode == "read" else "bulk.wait"
    return WAITS[a.kind]


def sentence(a: Access, b: Access, missing: str, cells: Intervals) -> str:
    """What is wrong with `b` after `a`, in words."""
    first = f"{a.op} ({a.thread.name}, {a.line})"
    second = f"{b.op} ({b.thread.name}, {b.line})"
    done = {"read": "has read", "write": "has written", "add": "has added to"}[a.mode]
    what = f"{second} {DOES[b.mode]} {place(a.memory, cells)}"
    return f"{what}, and nothing makes sure that {first} {done} them before: {_cure(a, b, missing)}"


def _cure(a: Access, b: Access, missing: str) -> str:
    doer, after = a.thread.name, b.thread.name
    signalled = " or ".join(a.strand.barriers) if a.strand else ""
    unseen = f"{after} waits for no barrier on which {doer} arrives after that"
    if signalled:
        unseen = f"{after} does not wait for its end on {signalled}"
    return {
        "wait": unseen,
        "wait::ld": f"wait::ld is missing between it and the release by {doer}",
        "wait::st": f"wait::st is missing between it and the release by {doer}",
        "commit": f"tcgen05.commit by {doer}, and a wait for it, is missing",
        "tcgen05.before": f"tcgen05.fence::before_thread_sync is missing before {doer}'s arrive",
        "tcgen05.after": f"tcgen05.fence::after_thread_sync is missing after {after}'s wait",
        "fence.proxy.async": f"fence.proxy.async by {doer} is missing between its write and its "
        + ("issue of the operation" if a.thread is b.thread else "arrive"),
        "bulk.wait": f"a bulk wait_group (not .read) by {doer} is missing before its release",
        "bulk.wait.read": f"a bulk wait_group.read by {doer} is missing before its release",
        "bulk fence": f"fence.proxy.async is missing after {doer}'s wait_group or after "
        f"{after}'s acquire",
        "copy": f"{after} does not wait where the bytes are counted"
        + (f", on {signalled}" if signalled else ""),
        "A1": "only rule A1 orders these two MMAs (they differ in accumulator or shape)",
    }[missing]
