# SPDX-License-Identifier: Apache-2.0
"""Fences of the pages: stage diffs, code by symbol, tables from the plans and the evidence.

mkdocs.yml registers each as a custom fence of pymdownx.superfences, so any builder that runs
Python-Markdown renders them. Attributes are quoted: ```` ```roles stage="01" head_dim="128" ````.
The body of a fence is what a reader of the bare file sees; the site replaces it. A fence that
cannot be rendered raises FenceError, which ends the build. Runs: host, while the site is built.
"""

from __future__ import annotations

import ast
import html
import json
import re
from pathlib import Path
from types import ModuleType

import flash_ladder
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer
from pymdownx.superfences import SuperFencesException

from . import annotations, numerics, role_graph
from .diff import diff_file, stage_diff_stats
from .figures import FIGURES
from .plan import Arrival, Plan
from .primers import DRAWINGS, INTERACTIVE
from .stage import KernelSource
from .topics import TABLES as STUDIES

ROOTS = {"stages": Path(flash_ladder.__file__).parent, "common": Path(__file__).parent}
DIFF_LINES = 60  # a longer diff shows its first hunks and the command for the rest
ATTRIBUTES = {  # fence: required and optional attributes
    "stage-diff": (("a", "b", "file"), ("context",)),
    "code": (("address",), ()),
    "config-table": (("stage", "head_dim", "table"), ("part",)),
    "roles": (("stage", "head_dim"), ("part",)),
    "results": (("stage",), ()),
    "timeline": (("stage", "head_dim"), ("machine", "part", "length", "below", "mask")),
    "figure": (("file",), ()),
    "drawing": (("name",), ("stage", "head_dim", "part")),
    "interactive": (("name",), ()),
    "study": (("name",), ()),
    "ladder": ((), ()),
}
NOT_EXECUTED = "Not yet executed on hardware."
MARKS = {"M": "measured", "D": "derived", "Q": "quoted"}
MODES = {"native": "native", "rewritten": "rewritten from sm_100a"}
DECLARED_COUNTS = "instructions are counted in the code, not in its execution"


class FenceError(SuperFencesException):
    """A fence that cannot be rendered; superfences lets only this class of error end a build."""


def take(known: dict, language: str, inputs: dict, options: dict) -> bool:
    """Takes exactly the attributes that `known` has for fence `language`, all of them quoted.

    known: as ATTRIBUTES. Raises FenceError for one that is missing or unknown.
    """
    required, optional = known[language]
    missing = [name for name in required if name not in inputs]
    strangers = sorted(set(inputs) - {*required, *optional})
    if missing or strangers:
        raise FenceError(
            f"fence {language}: missing {missing}, unknown {strangers}; required are "
            f'{list(required)}, optional {list(optional)}, written name="value"'
        )
    options.update(inputs)
    return True


def validate(language, inputs, options, attrs, md) -> bool:
    """The validator of all these fences.

    Fences are looked up by name here, since a builder may pickle its configuration and a closure
    cannot be pickled.
    """
    return take(ATTRIBUTES, language, inputs, options)


def mark(letter: str, detail: str) -> str:
    """The provenance mark behind a number: M measured, D derived, Q quoted, with its detail."""
    if letter not in MARKS:
        raise FenceError(f"mark {letter!r} is unknown; allowed: {sorted(MARKS)}")
    title = html.escape(f"{MARKS[letter]}: {detail}")
    return f'<abbr class="fl-mark" title="{title}">{letter}</abbr>'


def _number(text: str, flag: str = "stage") -> int:
    if not text.isdigit() or int(text) not in flash_ladder.STAGES:
        known = sorted(flash_ladder.STAGES)
        raise FenceError(f'{flag}="{text}" is no stage; stages are {known[0]:02d} ... {known[-1]}')
    return int(text)


def stage_folder(number: int) -> Path:
    """Folder of a stage, whether it exists or not."""
    return ROOTS["stages"] / f"{number:02d}"


def stage_source(number: int, part: str = "") -> KernelSource:
    """A stage or a part of it; its modules leave no bytecode beside the sources."""
    try:
        return flash_ladder.load(number).part(part)
    except ValueError as error:
        raise FenceError(f"nothing to show of stage {number:02d}: {error}") from error


def stage_config(number: int) -> ModuleType:
    """`config.py` of a stage."""
    return stage_source(number).config


def html_table(headings: list[str], rows: list[list[str]], caption: str) -> str:
    """An HTML table; cells and caption are HTML already."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table>\n<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>"
    )


def folded(summary: str, body: str) -> str:
    """HTML that a reader opens who wants it; summary and body are HTML already."""
    return f'<details class="fl-fold">\n<summary>{summary}</summary>\n{body}\n</details>'


def html_code(text: str) -> str:
    """`text` as code, escaped."""
    return f"<code>{html.escape(text)}</code>"


# --- stage-diff ---------------------------------------------------------------------------------


def _diffed(options: dict[str, str], side: str) -> tuple[str, Path]:
    """(tag, folder) of one side of a diff, a stage or a part of one: "06", "07/backward_1cta"."""
    text, slash, part = options[side].partition("/")
    number = _number(text, side)
    folder = stage_source(number, part).folder if slash else stage_folder(number)
    return f"{number:02d}{slash}{part}", folder


def _one_diff(
    sides: list[tuple[str, Path]], name: str, context: int, notes: list[annotations.Note]
) -> str:
    (a, folder_a), (b, folder_b) = sides
    try:
        diff = diff_file(folder_a, folder_b, name, context)
        lines = diff.first_lines(DIFF_LINES)
        notes = annotations.place(notes, lines)
    except (FileNotFoundError, ValueError) as error:
        raise FenceError(f"fence stage-diff: {error}") from error
    if diff.state == "same":
        return f"<p>{html_code(name)} is the same in stages {a} and {b}.</p>"
    titles = {"changed": "", "new": " · new file", "gone": " · removed"}
    caption = f"{html.escape(name)} · stage {a} → {b}{titles[diff.state]}"
    shown = highlight("\n".join(lines), DiffLexer(stripnl=False), HtmlFormatter())
    anchor = re.sub(r"\W+", "-", f"note-{a}-{b}-{name}")
    shown = annotations.markers(shown, notes, anchor)
    rest = len(diff.lines) - len(lines)
    more = f'<p class="fl-more">{rest} more lines: {html_code(diff.command)}</p>' if rest else ""
    caption = f'<p class="fl-caption">{caption}</p>'
    return f"{caption}{shown}{more}{annotations.comments(notes, anchor)}"


def stage_diff(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `stage-diff a= b= file= [context=]`: what changes in the named files.

    The body of a fence of one file may annotate it, see `common.annotations`.
    """
    sides = [_diffed(options, side) for side in ("a", "b")]
    context = options.get("context", "3")
    if not context.isdigit():
        raise FenceError(f'fence stage-diff: context="{context}" is not a number of lines')
    names = options["file"].replace(",", " ").split()
    try:
        notes = annotations.parse(source)
    except ValueError as error:
        raise FenceError(f"fence stage-diff: {error}") from error
    if notes and len(names) > 1:
        raise FenceError("fence stage-diff: annotations need a fence of their own for each file")
    diffs = "\n".join(_one_diff(sides, name, int(context), notes) for name in names)
    return f'<div class="fl-diff">\n{diffs}\n</div>'


# --- code ---------------------------------------------------------------------------------------


def _first_line(node: ast.stmt) -> int:
    decorators = [item.lineno for item in getattr(node, "decorator_list", [])]
    return min([node.lineno, *decorators])


def symbols(source: str) -> dict[str, tuple[int, int]]:
    """First and last line of what Python `source` defines: functions, classes, constants.

    Methods and constants of a class are named `Class.method`.
    """
    found: dict[str, tuple[int, int]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            names = []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                found[prefix + name] = (_first_line(node), node.end_lineno)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(source).body, "")
    return found


def _source_file(address: str) -> Path:
    root, _, rest = address.partition("/")
    if root not in ROOTS or not rest or ".." in Path(rest).parts:
        raise FenceError(f"fence code: {address!r} does not start with {sorted(ROOTS)}")
    path = ROOTS[root] / rest
    if not path.is_file():
        raise FenceError(f"fence code: there is no file {address}")
    return path


def code(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `code address=FILE::SYMBOL`: the source of one symbol with its line numbers."""
    file, _, symbol = options["address"].partition("::")
    text = _source_file(file).read_text(encoding="utf-8")
    known = symbols(text)
    if symbol not in known:
        raise FenceError(f"fence code: {file} has no {symbol!r}; known: {', '.join(known)}")
    first, last = known[symbol]
    lines = "\n".join(text.splitlines()[first - 1 : last])
    shown = highlight(lines, PythonLexer(), HtmlFormatter(linenos="table", linenostart=first))
    caption = f"{html.escape(file)} · {html_code(symbol)} · lines {first}-{last}"
    return f'<div class="fl-code">\n<p class="fl-caption">{caption}</p>\n{shown}\n</div>'


# --- config-table and roles ---------------------------------------------------------------------


def _plan(options: dict[str, str]) -> tuple[KernelSource, int, Plan]:
    source = stage_source(_number(options["stage"]), options.get("part", ""))
    allowed, head_dim = source.config.ENVELOPE.head_dims, options["head_dim"]
    if head_dim not in {str(size) for size in allowed}:
        raise FenceError(f'head_dim="{head_dim}" is outside stage {source.tag}: {list(allowed)}')
    return source, int(head_dim), source.config.plan(int(head_dim))


def _warps(warps: range) -> str:
    first, last = warps[0], warps[-1]
    return str(first) if first == last else f"{first}-{last}"


def _arrivals(arrivals: tuple[Arrival, ...], plan: Plan, kind: str = "mbarrier") -> str:
    threads = {row.role for row in arrivals if row.unit == "thread"}
    if len(threads) > 1 and threads == {role.name for role in plan.roles}:
        of = " of each CTA" if kind == "cluster" else ""
        return f"all roles{of} ({plan.threads} by thread)"
    parts = [f"{row.role} ({row.count(plan)} by {row.unit})" for row in arrivals]
    return html.escape(" + ".join(parts))


def _role_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    rows = []
    for role in plan.roles:
        budget = role.registers or plan.launch_registers or "compiler's choice"
        cells = [role.name, _warps(role.warps), str(role.threads), str(budget), role.does]
        rows.append([html.escape(cell) for cell in cells])
    return ["role", "warps", "threads", "registers a thread", "does"], rows


TILE_0 = re.compile(r"(?<=[A-Za-z])0(?=</code>| \()")  # of a barrier's name, or a role's


def _of_both_tiles(rows: list[list[str]]) -> list[list[str]]:
    """Rows of which two differ in the tile alone, p_full0 and p_full1, as one: p_full0/1."""
    found, second = [], []
    for row in rows:
        other = [TILE_0.sub("1", cell) for cell in row]
        if other != row and other in rows:
            second.append(other)
            row = [TILE_0.sub("0/1", cell) for cell in row]
        if row not in second:
            found.append(row)
    return found


def _barrier_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    rows = []
    for row in plan.barriers:
        kind = row.kind if row.number is None else f"{row.kind} {row.number}"
        first = "passes" if row.first_wait_passes else "waits"
        if isinstance(row.first_wait_passes, tuple):
            first += f" for {', '.join(row.first_wait_passes)}"
        rows.append(
            [
                html_code(row.name),
                kind,
                _arrivals(row.producers, plan, row.kind),
                _arrivals(row.consumers, plan, row.kind),
                str(row.arrivals(plan)),
                str(row.stages),
                first,
                str(row.tx_bytes or "-"),
                html.escape(row.guards),
            ]
        )
    headings = ["barrier", "kind", "arrive", "wait", "count", "stages", "first wait", "bytes"]
    return [*headings, "guards"], _of_both_tiles(rows)


def _tmem_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    rows = []
    for region in plan.tmem:
        columns = f"{region.column}-{region.column + region.columns - 1}"
        aliases = ", ".join(region.aliases) or "-"
        rows.append([html_code(region.name), columns, str(region.columns), region.holds, aliases])
    return ["region", "columns", "width", "holds", "shares columns with"], rows


def _smem_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    rows = []
    for row in plan.smem:
        sizes = [f"{row.slot_bytes:,}", str(row.stages), f"{row.total_bytes:,}", str(row.align)]
        holds = html.escape(row.holds + (f" (in {', '.join(row.aliases)})" if row.aliases else ""))
        rows.append([html_code(row.name), *sizes, holds])
    if rows:
        rows.append(["a CTA", "", "", f"{plan.smem_bytes:,}", "", "with alignment and sharing"])
    return ["buffer", "bytes a slot", "slots", "bytes", "aligned to", "holds"], rows


def _envelope_rows(envelope) -> tuple[list[str], list[list[str]]]:
    allowed = {
        "dtype": ", ".join(envelope.dtypes),
        "head_dim": ", ".join(map(str, envelope.head_dims)),
        "seqlen": f"positive multiples of {envelope.seqlen_multiple}",
        "heads": "grouped or equal" if envelope.grouped_heads else "as many for k and v as for q",
        "strides": "1 along the head dim, the others multiples of 16 bytes",
        "grad": "forward and backward" if envelope.differentiable else "forward only",
    }
    for rule in envelope.lifted_by:
        allowed.setdefault(rule, "restricted")
    lifted = {rule: f"stage {stage:02d}" for rule, stage in envelope.lifted_by.items()}
    rows = [
        [html_code(rule), html.escape(text), lifted.get(rule, "-")]
        for rule, text in allowed.items()
    ]
    return ["rule", "accepted", "lifted by"], rows


def _value(value) -> str:
    """A declared value; a limit such as ("<=", 255) reads `<= 255`."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _declared_rows(declared: dict) -> tuple[list[str], list[list[str]]]:
    rows = [[html_code(name), html.escape(_value(value))] for name, value in declared.items()]
    return ["fact", "declared"], rows


TABLES = {
    "roles": lambda config, plan, head_dim: _role_rows(plan),
    "barriers": lambda config, plan, head_dim: _barrier_rows(plan),
    "tmem": lambda config, plan, head_dim: _tmem_rows(plan),
    "smem": lambda config, plan, head_dim: _smem_rows(plan),
    "envelope": lambda config, plan, head_dim: _envelope_rows(config.ENVELOPE),
    "declared": lambda config, plan, head_dim: _declared_rows(config.DECLARED[head_dim]),
}
EMPTY = {
    "barriers": "uses no barriers",
    "tmem": "uses no tensor memory",
    "smem": "uses no shared memory",
    "declared": "declares nothing about the compiled code yet",
}


def config_table(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `config-table stage= head_dim= table= [part=]`: one table of a config.py."""
    kernel, head_dim, plan = _plan(options)
    table = options["table"]
    if table not in TABLES:
        raise FenceError(f'fence config-table: table="{table}" is not one of {sorted(TABLES)}')
    headings, rows = TABLES[table](kernel.config, plan, head_dim)
    if not rows:
        return f"<p>Stage {kernel.tag} {EMPTY[table]} (head dim {head_dim}).</p>"
    detail, note = f"stages/{kernel.tag}/config.py, head dim {head_dim}", ""
    if table == "declared":
        detail += "; the tests compare it with the compiled code"
        note = f"; {DECLARED_COUNTS}"
    made = html_table(headings, rows, f"{table} · head dim {head_dim} {mark('D', detail)}{note}")
    if table != "declared":
        return made
    return folded(
        f"What <code>config.py</code> declares of the compiled code: {len(rows)} facts", made
    )


def roles(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `roles stage= head_dim= [part=]`: who signals whom, a lane for each role."""
    _, _, plan = _plan(options)
    return f'<div class="fl-roles">\n{role_graph.svg(plan)}\n</div>'


# --- results ------------------------------------------------------------------------------------


def evidence_runs(number: int) -> list[dict]:
    """The recorded runs of a stage; empty when nothing has been recorded."""
    path = stage_folder(number) / "evidence.json"
    if not path.is_file():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("runs", [])
    except (json.JSONDecodeError, AttributeError) as error:
        raise FenceError(f"stages/{number:02d}/evidence.json cannot be read: {error}") from error


def _figure(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _source_of(run: dict) -> str:
    """What a measured number's mark says: GPU, driver, date, command."""
    parts = [run.get("gpu", "unknown GPU"), f"driver {run.get('driver', 'unknown')}"]
    parts += [run.get("date", "no date"), run.get("command", "no command")]
    return ", ".join(parts)


def _compiler_of(run: dict) -> str:
    """What the mark of a number says that was read in compiled code, not measured on the GPU."""
    target, dsl = run.get("target", "an unknown target"), run.get("dsl", "unknown")
    when = run.get("date", "no date")
    return f"machine code compiled for {target} with nvidia-cutlass-dsl {dsl}, {when}"


RESULT_HEADINGS = [
    "date",
    "GPU",
    "code",
    "kernel",
    "registers, as assembled on that machine",
    "cases",
    "failed",
    "tightest comparison",
    "error",
    "torch's error",
    "ratio",
    "limit",
]


def _code_of(run: dict) -> str:
    """Which code a run executed, as HTML: native or rewritten, and its target."""
    mode, target = MODES.get(run.get("mode"), "unknown"), run.get("target", "-")
    return html.escape(mode if target in mode else f"{mode}, {target}")


def _kernel_row(run: dict, kernel: dict) -> list[str]:
    """Cells under RESULT_HEADINGS; what was not recorded is a dash."""

    def marked(value, letter: str, detail: str) -> str:
        return "-" if value is None else f"{_figure(value)} {mark(letter, detail)}"

    source = _source_of(run)
    worst = kernel.get("worst", {})
    own = worst.get("value", worst.get("max_abs"))
    base = worst.get("baseline", worst.get("baseline_max_abs"))
    ratio = worst.get("ratio", own / base if own is not None and base else None)
    compared = [str(worst[name]) for name in ("generator", "case", "metric") if name in worst]
    return [
        html.escape(run.get("date", "-")),
        html.escape(run.get("gpu", "-")),
        _code_of(run),
        html_code(kernel.get("key", "-")),
        marked(kernel.get("registers"), "M", _compiler_of(run)),
        marked(kernel.get("cases"), "M", source),
        marked(kernel.get("failed"), "M", source),
        html.escape(", ".join(compared) or "-"),
        marked(own, "M", source),
        marked(base, "M", source),
        marked(ratio, "D", "error / torch's error, same inputs and precision"),
        marked(worst.get("limit"), "D", "tolerance rule of common.numerics"),
    ]


def _tests_line(run: dict) -> str:
    """How the tests of a run ended, as a sentence; empty when they were not recorded."""
    tests = run.get("tests")
    if not tests:
        return ""
    measured = mark("M", _source_of(run))
    counts = ", ".join(
        f"{tests[name]} {name} {measured}"
        for name in ("passed", "failed", "skipped")
        if name in tests
    )
    notes = f" {html.escape(run['notes'])}" if run.get("notes") else ""
    return f"<p>Tests on {html.escape(_source_of(run))}: {counts}.{notes}</p>"


def _timing_lines(run: dict) -> list[str]:
    """A sentence for each timed shape of a native run."""
    measured = mark("M", _source_of(run))
    return [
        f"<p>Time on {html.escape(run.get('gpu', 'unknown GPU'))} ({_code_of(run)}), "
        f"{html.escape(row['shape'])}: {_figure(row['ms'])} ms "
        f"({_figure(row['ms_min'])} to {_figure(row['ms_max'])}), "
        f"{_figure(row['tflops'])} TFLOP/s {measured}; {html.escape(row['how'])}.</p>"
        for row in run.get("timings", [])
    ]


def _log_lines(run: dict) -> list[str]:
    """One line on the executed logs of a run, none where it has none."""
    logs = [row["log"] for row in run.get("kernels", []) if row.get("log", {}).get("clean")]
    if not logs:
        return []
    ctas, events, acts = (sum(row[name] for row in logs) for name in ("ctas", "events", "acts"))
    return [
        f"<p>Executed log of {ctas} CTAs: {events} records without a race; {acts} steps compared "
        f"with the model, all equal {mark('M', _source_of(run))}.</p>"
    ]


def _mutation_lines(run: dict) -> list[str]:
    """A line on each mutation of a compiled kernel."""
    source = lambda row: f"{row['command']}, {row['date']}, {run.get('gpu', 'unknown GPU')}"
    return [
        f"<p>Left out in turn, {row['counts']['sites']} waits, arrivals and fences of "
        f"{html.escape(row['kernel'])}: {row['counts']['timing']} noticed by results or errors, "
        f"{row['counts']['log']} by the log, {row['counts']['lint']} by lint "
        "(one may be noticed by several); "
        f"{row['counts']['redundant']} redundant, {row['counts']['unexplained']} unexplained "
        f"{mark('M', source(row))}.</p>"
        for row in run.get("mutation", [])
    ]


def _sanitizer_lines(run: dict) -> list[str]:
    """A line on what compute-sanitizer said, none where it was not asked."""
    if "sanitizer" not in run:
        return []
    row = run["sanitizer"]
    source = ", ".join(row[name] for name in ("command", "date", "gpu"))
    source += f", driver {row['driver']}"
    kernels = ", ".join(map(html.escape, row["kernels"]))
    return [
        f"<p>compute-sanitizer, {html.escape(row['tool'])}, of {kernels}: {row['errors']} errors "
        f"{mark('M', source)}.</p>"
    ]


def results(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `results stage=`: what ran where, every number with its mark."""
    number = _number(options["stage"])
    runs = evidence_runs(number)
    if not runs:
        return f"<p>{NOT_EXECUTED}</p>"
    rows = [_kernel_row(run, kernel) for run in runs for kernel in run.get("kernels", [])]
    caption = (
        f"stage {number:02d} · stages/{number:02d}/evidence.json; tightest: of all comparisons the "
        f"nearest to its limit, {numerics.FACTOR:g} · torch's error + "
        '<a href="../../numerics/#the-rule">floor</a>'
    )
    table = html_table(RESULT_HEADINGS, rows, caption) if rows else ""
    kinds = (_log_lines, _mutation_lines, _sanitizer_lines)
    first = [line for run in runs for line in (_tests_line(run), *_timing_lines(run))]
    lines = [line for run in runs for kind in kinds for line in kind(run)]
    ran = f"What ran, kernel by kernel ({len(rows)}), with logs, mutation and sanitizer"
    return "\n".join([*first, folded(ran, "\n".join([table, *lines]))])


# --- timeline -----------------------------------------------------------------------------------


def timeline(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `timeline stage= head_dim= [machine= part=]`: one CTA of a small problem, SM model.

    With `[length= below= mask=]` see `_stacked`.
    """
    from . import derived
    from . import timeline as drawing

    kernel, head_dim, _ = _plan(options)
    try:
        machine = derived.machine(options.get("machine", "B200"))
        if {"length", "below", "mask"} & set(options):
            return _stacked(options, kernel, head_dim, machine)
        run = derived.small_run(kernel, machine, head_dim)
    except ValueError as error:
        raise FenceError(f"fence timeline: {error}") from error
    picture = drawing.svg(run, background=False)
    detail = f"SM model of stage {kernel.tag}, one CTA alone on its SM; {_figures(machine)}"
    caption = f"one CTA, {derived.SMALL_KEYS} keys, head dim {head_dim}: cycles by role and engine"
    caption = f'<p class="fl-caption">{caption} {mark("D", detail)}</p>'
    return f'<div class="fl-timeline">\n{caption}\n{picture}</div>'


def _figures(machine) -> str:
    return f"figures of {machine.name}, with their sources, in common/model/machine.py"


def _stacked(options: dict[str, str], kernel: KernelSource, head_dim: int, machine) -> str:
    """A row for each role; with below="06", or "07/part", above that kernel on one time scale.

    length: queries and keys, 512 unless told; mask="causal" is of the upper one.
    """
    from . import derived, stacked

    length, mask = options.get("length", "512"), options.get("mask", "causal")
    if not length.isdigit() or mask != "causal":
        raise ValueError(f'length="{length}" is not a number, or mask="{mask}" not causal')
    kernels = [(kernel, "mask" in options)]
    if "below" in options:
        number, _, part = options["below"].partition("/")
        below = {**options, "stage": f"{_number(number, 'below'):02d}", "part": part}
        kernels.append((_plan(below)[0], False))
    panels = []
    for shown, causal in kernels:
        run = derived.small_run(shown, machine, head_dim, int(length), causal)
        panels.append(stacked.Panel(derived.said_of(shown, run, head_dim, causal), run))
    said = " Below it ".join(panel.title for panel in panels)
    picture = stacked.svg(panels, f"Timeline of {said}")
    detail = f"SM model, the first CTA or pair alone; {_figures(machine)}"
    caption = f"{length} queries and keys, head dim {head_dim}: cycles by role, then by engine"
    caption = f'<p class="fl-caption">{caption} {mark("D", detail)}</p>'
    return f'<div class="fl-timeline">\n{caption}\n{picture}</div>'


# --- figure -------------------------------------------------------------------------------------


def figure(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `figure file=`: a picture of docs/img on a stage's page; its body describes it.

    A page of a stage is read in two places, the repository and the site, and no one path of an
    image is right in both.
    """
    name = options["file"]
    if name not in FIGURES:
        raise FenceError(f'fence figure: no file="{name}"; figures are {", ".join(FIGURES)}')
    description = html.escape(" ".join(source.split()))
    if not description:
        raise FenceError(f"fence figure: {name} needs a description in its body")
    return f'<p><img src="../../img/{name}" alt="{description}"></p>'


# --- drawing and interactive --------------------------------------------------------------------


STATIC = "Without JavaScript nothing moves here. The tables show the same."


def _described(fence: str, source: str, options: dict[str, str], known: dict) -> tuple:
    """(what the fence names, its body as one line): both must be there."""
    name = options["name"]
    if name not in known:
        raise FenceError(f'fence {fence}: no name="{name}"; there are {", ".join(known)}')
    description = " ".join(source.split())
    if not description:
        raise FenceError(f"fence {fence}: {name} needs a description in its body")
    return known[name], description


def drawing(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `drawing name=`: a figure of common/primers as inline SVG; its body describes it.

    With `stage= head_dim= [part=]` the figure of that kernel's plan, where the figure has one.
    """
    shown, description = _described("drawing", source, options, DRAWINGS)
    board, caption, detail = shown.draw, shown.caption, shown.source
    if set(options) - {"name"}:
        board, caption, detail = _of_plan(shown, options)
    caption = f"{html.escape(caption)} {mark('D', detail)}"
    caption = f'<figcaption class="fl-caption">{caption}</figcaption>'
    picture = board().render(description)
    return f'<figure class="fl-drawing">{picture}{caption}</figure>'


def _of_plan(shown, options: dict[str, str]) -> tuple:
    """(what draws it, caption, source) of a drawing that shows the plan which `options` name."""
    if shown.of_plan is None or {"stage", "head_dim"} - set(options):
        plans = ", ".join(name for name, row in DRAWINGS.items() if row.of_plan)
        raise FenceError(
            f"fence drawing: stage, head_dim and part go together, with one of: {plans}"
        )
    kernel, head_dim, plan = _plan(options)
    if not plan.tmem:
        raise FenceError(f"fence drawing: stage {kernel.tag} {EMPTY['tmem']}")
    caption = f"tensor memory of stage {kernel.tag}, head dim {head_dim}"
    if any(region.aliases for region in plan.tmem):
        caption += "; what lies below another shares its columns"
    detail = f"stages/{kernel.tag}/config.py: plan({head_dim}).tmem"
    return lambda: shown.of_plan(plan), caption, detail


def interactive(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `interactive name=`: a table that docs/js/NAME.js brings to life; its body says how."""
    shown, description = _described("interactive", source, options, INTERACTIVE)
    table, *more = (
        _marked_table(*part, "D", shown.source)
        for part in ((shown.caption, shown.headings, shown.rows()), *shown.more())
    )
    static = "\n".join([f"<p>{STATIC}</p>", *more])
    settings = html.escape(json.dumps(shown.settings()))
    label = html.escape(description)
    return (
        f'<div class="fl-interactive" id="fl-{options["name"]}" role="group" '
        f'aria-label="{label}" data-settings="{settings}">\n{table}\n'
        f'<div class="fl-static">\n{static}\n</div>\n</div>'
    )


def _marked_table(caption: str, headings, rows, kind: str, source: str) -> str:
    """An HTML table of texts, with the mark of its numbers behind the caption."""
    cells = [[html.escape(cell) for cell in row] for row in rows]
    marked = f"{html.escape(caption)}&nbsp;{mark(kind, source)}"
    return html_table([html.escape(heading) for heading in headings], cells, marked)


# --- study --------------------------------------------------------------------------------------


def study(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `study name=`: a table of common/topics.py, from evidence or from docs/data."""
    name = options["name"]
    if name not in STUDIES:
        raise FenceError(f'fence study: no name="{name}"; there are {", ".join(STUDIES)}')
    shown = STUDIES[name]
    table = _marked_table(shown.caption, shown.headings, shown.rows(), shown.mark, shown.source())
    return f'<div class="fl-study">\n{table}\n</div>'


# --- ladder -------------------------------------------------------------------------------------


def _status(number: int) -> str:
    """What can be said of a stage: planned, not yet executed, or where it ran and how it ended."""
    if not (stage_folder(number) / "kernel.py").is_file():
        return "planned"
    runs = evidence_runs(number)
    if not runs:
        return NOT_EXECUTED.lower().rstrip(".")
    last = runs[-1]
    failed = sum(kernel.get("failed", 0) for kernel in last.get("kernels", []))
    failed += last.get("tests", {}).get("failed", 0)
    gpu = last.get("gpu", "unknown GPU").removeprefix("NVIDIA ")
    text = f"{'fails' if failed else 'runs'}, {gpu}"
    if last.get("mode") != "native":
        text += f", {last.get('mode', 'unknown')}"
    return f"{html.escape(text)} {mark('M', _source_of(last))}"


RUNG_HEADINGS = [
    "stage",
    "one idea",
    "code lines",
    "cycles, d 128",
    "cycles, d 64",
    "error",
    "torch's",
    "status",
]


def _whole(text: str) -> str:
    """HTML of a number and its mark that stay on one line."""
    return f'<span class="fl-number">{text}</span>'


def _rung_cells(number: int) -> list[str]:
    """Cells of a written stage under "code lines" ... "torch's", all derived."""
    from . import rungs

    found = rungs.rungs(number)
    model = "SM model with the figures of a B200, common/rungs.py"
    step = "-"
    if number - 1 in flash_ladder.built():
        folders = [stage_folder(side) for side in (number - 1, number)]
        stats = stage_diff_stats(*folders, without=("model.py",))
        size = f"+{stats.added} −{stats.removed}"
        step = _whole(f"{size} {mark('D', 'common.diff.stage_diff_stats, models not counted')}")
        parts = set(stage_source(number).parts) - set(stage_source(number - 1).parts)
        step += f"<br>{len(parts)} new kernels" if parts else ""
    cycles = {
        head_dim: "<br>".join(
            _whole(f"{rung.cycles:,.0f} {mark('D', model)}")
            + (f" {html.escape(rung.kernel.name)}" if rung.kernel.name else "")
            for rung in found
            if rung.head_dim == head_dim
        )
        for head_dim in rungs.HEAD_DIMS
    }
    error = found[0].verdicts[0]["rms_abs"]
    detail = f"{model}, {rungs.GENERATOR} inputs in bf16, head dim {found[0].head_dim}"
    errors = [f"{value:.1e} {mark('D', detail)}" for value in (error.value, error.baseline)]
    return [step, *cycles.values(), *map(_whole, errors)]


def ladder(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `ladder`: the stages, one idea each, what it changes and gains, how far it has come."""
    rows = []
    for number, name in flash_ladder.STAGES.items():
        folder, label, cells = stage_folder(number), html.escape(name), ["-"] * 6
        if (folder / "README.md").is_file():
            label = f'<a href="stages/{number:02d}/">{label}</a>'
        if (folder / "kernel.py").is_file():
            cells = [html.escape(stage_config(number).IDEA), *_rung_cells(number)]
        rows.append([f"{number:02d} {label}", *cells, _status(number)])
    return html_table(RUNG_HEADINGS, rows, "the ladder")
