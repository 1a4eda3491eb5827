# SPDX-License-Identifier: Apache-2.0
"""Rewriting one sm_100a kernel for sm_90a: each Blackwell instruction becomes Hopper code.

The PTX is read statement by statement; `operations.py` says for each operation whether Hopper has
it, how it is lowered, or that it is refused (an error with line and text). Lowered operations call
the software engine (`engine.cu`), which runs on ENGINE_THREADS threads appended to each CTA. The
target stays an NVIDIA GPU; nothing here runs on, or for, a CPU.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from dataclasses import dataclass

from ..ptx import Program, Statement, read
from .emit import Scope

ENGINE_THREADS = 160
MAX_MAIN_THREADS = 864
TARGET = "sm_90a"
PTX_VERSION = "8.8"  # CUDA 12.9; drivers from 13.0 on take it as well
_OURS = re.compile(r"(?<![\w$%.])[%$]?fl_\w")
DYNAMIC_SMEM = re.compile(r"\.extern \.shared .*?\b([\w$]+)\[\]")


class HopperRewriteError(ValueError):
    """A kernel that cannot be rewritten; the message gives the line and the text of the reason."""


@dataclass
class Context:
    """What lowering a statement needs to know of its kernel."""

    program: Program
    main_threads: int
    has_tensor_memory: bool
    log: bool = False
    serial: int = 0

    def scope(self) -> Scope:
        """A block whose names are new."""
        self.serial += 1
        return Scope(self.serial)


def refuse(statement: Statement, reason: str) -> HopperRewriteError:
    """The error for a statement, with its line and text."""
    return HopperRewriteError(f"line {statement.line}: {reason}: {statement.text}")


def rewriter_hash() -> str:
    """sha256 over this package and the PTX reader: evidence records which rewriter ran."""
    digest = hashlib.sha256()
    folder = pathlib.Path(__file__).parent
    for path in (*sorted(folder.glob("*")), folder.parent / "ptx.py"):
        if path.suffix in (".py", ".cu"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def rewrite(ptx: str, engine: str, log: bool = False) -> str:
    """Rewrite a module with one kernel; `engine` is the engine's PTX (`engine.engine_ptx()`).

    Returns PTX for sm_90a whose kernel takes ENGINE_THREADS more threads than before (none more,
    and no engine, when it uses no tensor memory). log: it writes what it does to a log and can
    leave out a statement (`record.py`); without tensor memory there is none. Raises
    HopperRewriteError.
    """
    program = read(ptx)
    entries = program.entries()
    if len(entries) != 1:
        raise HopperRewriteError(f"expected one kernel, found {sorted(entries)}")
    (body,) = entries.values()
    _refuse_module(program)
    uses_tmem = any(s.opcode.startswith("tcgen05.") for s in body)
    context = Context(program, _threads(body[0]), uses_tmem, log and uses_tmem)
    module = program.module()
    before = [s for s in module if s.line < body[0].line]
    for statement in module[len(before) + 1 :]:  # the kernel itself stands between
        if statement.opcode not in (".section", ".file"):
            raise refuse(statement, "nothing but debug sections may follow the kernel")
    shared = [match[1] for s in before if (match := DYNAMIC_SMEM.match(s.text))]
    lines = [f".version {PTX_VERSION}", f".target {TARGET}", ".address_size 64"]
    if uses_tmem:
        lines.append(_without_header(engine))
    lines += [_plain(s) for s in before if s.opcode not in (".version", ".target", ".address_size")]
    lines += _kernel(context, body, shared[0] if shared else "")
    return "\n".join(lines) + "\n"


def _refuse_module(program: Program) -> None:
    """Names that would capture ours, and device functions: their bodies are not rewritten."""
    for statement, following in zip(program.statements, program.statements[1:]):
        if statement.opcode != ".file" and _OURS.search(statement.text):
            raise refuse(statement, "names that start with fl_ belong to the rewriter")
        if statement.opcode == ".func" and following.opcode == "{":
            raise refuse(statement, "a module with device functions is not rewritten")


def _without_header(engine: str) -> str:
    """The engine's PTX less the three lines that a module has once; the newest version wins."""
    return re.sub(r"(?m)^\.(version|target|address_size)\b.*$", "", engine)


def _threads(header: Statement) -> int:
    match = re.search(r"\.reqntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", header.text)
    if not match:
        raise refuse(header, "the kernel's threads per CTA are not fixed (.reqntid)")
    x, y, z = (int(extent or 1) for extent in match.groups())
    if y * z != 1 or x % 32 or x > MAX_MAIN_THREADS:
        raise refuse(
            header, f"threads per CTA must be one axis, whole warps, <= {MAX_MAIN_THREADS}"
        )
    return x


def _header(context: Context, header: Statement) -> str:
    """The kernel's head with room for the engine's threads and without register limits."""
    text = re.sub(r"\.(maxnreg|minnctapersm)\s+\d+", "", header.text)
    if not context.has_tensor_memory:
        return text
    total = context.main_threads + ENGINE_THREADS
    return re.sub(r"\.(reqntid|maxntid)\s+\d+", rf".\1 {total}", text)


def _kernel(context: Context, body: list[Statement], dynamic_smem: str) -> list[str]:
    from .operations import lower

    _check_end(body)
    lines = [_header(context, body[0]), body[1].text]
    entered = not context.has_tensor_memory
    for statement in body[2:]:
        if not (entered or statement.opcode.startswith(".")):
            lines += _prologue(context, dynamic_smem)
            entered = True
        if statement.is_instruction:
            lines.append(lower(context, statement))
        else:
            lines.append(_plain(statement))
    return lines


def _check_end(body: list[Statement]) -> None:
    """A kernel may end without `ret`, but its threads would then not tell the engine."""
    last = [s for s in body if s.is_instruction][-1:]
    if not last or last[0].predicate or not re.match(r"(ret|exit|bra|trap)\b", last[0].opcode):
        raise refuse((last or body)[0], "the kernel does not end with ret")


def _plain(statement: Statement) -> str:
    """A label, brace or directive as it stands."""
    bare = (":", "{", "}", ".version", ".target", ".address_size", ".file", ".loc", ".entry")
    return statement.text + ("" if statement.opcode in bare else ";")


def _prologue(context: Context, dynamic_smem: str) -> list[str]:
    """Registers of the whole kernel, entering the engine, and the engine threads' own path."""
    scope = context.scope()
    scratch = scope.set("b32", dynamic_smem) if dynamic_smem else scope.set("b32", "fl_scratch")
    main = str(context.main_threads)
    slot = scope.call("fl_enter", ("b32", main), ("b32", scratch), returns="b64")
    scope.add(f"mov.b64 %fl_slot, {slot};", "mov.b64 %fl_since, 0;")
    if context.log:
        log = scope.call("fl_log_start", ("b32", main), ("b32", scratch), returns="b64")
        skip = scope.call("fl_log_skip", returns="b32")
        scope.add(f"mov.b64 %fl_log, {log};", f"mov.b32 %fl_skip, {skip};")
    thread, is_main = scope.set("b32", "%tid.x"), scope.register("pred")
    scope.add(f"setp.lt.u32 {is_main}, {thread}, {main};", f"@{is_main} bra $fl_main;")
    scope.add(f"sub.u32 {thread}, {thread}, {main};")
    scope.call("fl_engine", ("b64", "%fl_slot"), ("b32", main), ("b32", thread))
    scope.add("ret;")
    declared = [] if dynamic_smem else [".shared .align 16 .b8 fl_scratch[16];"]
    if context.log:
        declared += [".reg .b64 %fl_log;", ".reg .b32 %fl_skip;"]
    return [*declared, ".reg .b64 %fl_slot, %fl_since;", scope.text(), "$fl_main:"]
