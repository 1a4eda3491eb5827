# SPDX-License-Identifier: Apache-2.0
"""The command line `flash-ladder`. Bad arguments exit with 2, failures with 1. Runs: host."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import pathlib
import shutil
import textwrap
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Optional

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .stage import PACKAGE, KernelSource, Stage

ladder = importlib.import_module(PACKAGE)
app = typer.Typer(
    help="FlashAttention-4 for Blackwell, taught by building it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help and errors as plain lines, readable in a pipe as well
)
console = Console()
errors = Console(stderr=True)


class Dtype(str, Enum):
    """Input dtypes of the kernels."""

    bfloat16 = "bfloat16"
    float16 = "float16"


def stage_argument(text: str) -> Stage:
    """A stage number on the command line, `1` or `01`."""
    try:
        return ladder.load(int(text))
    except ValueError as wrong:
        message = str(wrong) if text.isdecimal() else f"{text!r} is not a stage number, such as 1"
        raise typer.BadParameter(message) from wrong


StageArgument = Annotated[
    Stage, typer.Argument(parser=stage_argument, metavar="N", help="Stage number.")
]

PartOption = Annotated[str, typer.Option("--part", help="A kernel of its backward, such as 7 has.")]

HeadDimOption = Annotated[int, typer.Option(min=1, help="Elements of a head's row, d.")]

EvidenceOption = Annotated[
    Optional[pathlib.Path],  # noqa: UP045
    typer.Option(help="Evidence file; the stage's own when not given."),
]


def _complain(error: Exception) -> None:
    errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


def _table(*columns: str, whole: int, title: str | None = None) -> Table:
    """A table that stays readable at 80 columns: its first `whole` columns are never broken."""
    table = Table(box=box.SIMPLE_HEAD, title=title, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=index < whole)
    return table


def clear_errors(command: Callable) -> Callable:
    """Expected errors become one line and exit code 1 (bad values: 2)."""

    @functools.wraps(command)
    def wrapped(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError, but no failure
            raise
        except (ValueError, TypeError, FileNotFoundError, ImportError) as wrong:
            _complain(wrong)
            raise typer.Exit(2) from wrong
        except (RuntimeError, AssertionError, OSError) as failed:
            _complain(failed)
            raise typer.Exit(1) from failed

    return wrapped


@app.command()
@clear_errors
def doctor() -> None:
    """What this machine can do, and what would unlock the rest."""
    from .doctor import abilities

    table = _table("", "what", "found", "unlocks", whole=2)
    for row in abilities():
        mark = "[green]yes[/]" if row.found else "[yellow]no[/]"
        table.add_row(mark, row.name, row.detail, row.unlocks)
    console.print(table)


@app.command()
@clear_errors
def stages() -> None:
    """The ladder: every stage, its idea, and what has run where."""
    table = _table("stage", "name", "idea", "executed on hardware", whole=2)
    for number, name in ladder.STAGES.items():
        if number not in ladder.built():
            table.add_row(f"{number:02d}", name, "", "planned")
            continue
        stage = ladder.load(number)
        runs = [f"{run['gpu']} ({run['mode']}, {run['date']})" for run in stage.evidence["runs"]]
        table.add_row(stage.tag, name, stage.config.IDEA, "\n".join(runs) or "not yet")
    console.print(table)


@app.command()
@clear_errors
def run(
    stage: Annotated[
        Optional[Stage],  # noqa: UP045  typer evaluates this at run time, also on Python 3.10
        typer.Argument(parser=stage_argument, metavar="[N]", help="Stage; the last built one."),
    ] = None,
    generator: Annotated[str, typer.Option(help="Inputs: a name of common.inputs.")] = "llm_like",
    qkv: Annotated[
        Optional[pathlib.Path],  # noqa: UP045
        typer.Option(help="Your own q, k, v: .npz, .safetensors or .pt, layout (b, s, h, d)."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads of q, k and v.")] = 4,
    seqlen: Annotated[int, typer.Option(min=1, help="Query and key length.")] = 512,
    head_dim: HeadDimOption = 128,
    dtype: Annotated[
        Optional[Dtype],  # noqa: UP045
        typer.Option(help="Input dtype; a 16-bit file's own, else bfloat16, when not given."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs' random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
) -> None:
    """The main job: compute a real attention problem by every means this machine has."""
    from . import mainjob

    stage = stage or ladder.load(ladder.built()[-1])
    sizes = {"batch": batch, "heads": heads, "seqlen": seqlen, "head_dim": head_dim}
    problem = mainjob.problem(qkv, generator, sizes, dtype and dtype.value, seed)
    silent = Console(quiet=True) if as_json else console
    result = mainjob.run(stage, problem, silent)
    if as_json:
        print(json.dumps(result.as_dict(), indent=1))
    if not result.ok:
        raise typer.Exit(1)


@app.command()
@clear_errors
def facts(
    stage: StageArgument,
    part: PartOption = "",
    arch: Annotated[str, typer.Option(help="Target architecture.")] = "sm_100a",
    dtype: Annotated[Dtype, typer.Option(help="Input dtype.")] = Dtype.bfloat16,
    head_dim: HeadDimOption = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON.")] = False,
    report: Annotated[bool, typer.Option(help="The whole static report, loop by loop.")] = False,
    ptxas: Annotated[
        str, typer.Option(help="Another assembler: `ptxas` for the installed one, or a path.")
    ] = "",
) -> None:
    """What the compiled code shows, beside what config.py declares."""
    from . import contract
    from . import facts as facts_module
    from .compile import compile_stage

    source = stage.part(part)
    kernel = compile_stage(source, arch=arch, dtype=dtype.value, head_dim=head_dim)
    ptx, machine_code = contract.read_kernel(kernel, ptxas)
    found = facts_module.flat(ptx, machine_code)
    if as_json:
        print(json.dumps({"kernel": kernel.key.name, "facts": found}, indent=1))
        return
    if report:
        print(machine_code.text())
        return
    declared = contract.declared_facts(source, kernel.key)
    table = _table("fact", "value", "declared", "from", "meaning", whole=1, title=kernel.key.name)
    for name, meaning in facts_module.FACT_NAMES.items():
        if name in declared or found.get(name):
            value = declared.get(name, "")
            words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            text, _, source = meaning.rpartition(" ")
            table.add_row(name, str(found.get(name)), words, source.strip("[]"), text)
    console.print(table)
    mismatches = facts_module.compare_with(declared, ptx, machine_code)
    if mismatches:
        raise AssertionError("\n".join(mismatches))


@app.command(name="compile")
@clear_errors
def compile_command(
    stage: StageArgument,
    part: PartOption = "",
    arch: Annotated[str, typer.Option(help="Target architecture.")] = "sm_100a",
    dtype: Annotated[Dtype, typer.Option(help="Input dtype.")] = Dtype.bfloat16,
    head_dim: HeadDimOption = 128,
    causal: Annotated[bool, typer.Option("--causal", help="With the causal mask.")] = False,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for .ptx and .cubin.")] = pathlib.Path(),
) -> None:
    """Compile one kernel and write its PTX and cubin."""
    from .compile import compile_stage
    from .derived import refuse_masks

    refuse_masks(stage, causal)
    kernel = compile_stage(stage.part(part), arch=arch, dtype=dtype.value, head_dim=head_dim)
    out.mkdir(parents=True, exist_ok=True)
    for suffix in ("ptx", "cubin"):
        target = out / f"{kernel.key.name}.{suffix}"
        shutil.copyfile(kernel.folder / f"kernel.{suffix}", target)
        console.print(f"{target}  {target.stat().st_size} bytes", soft_wrap=True)
    origin = "from the cache" if kernel.from_cache else "just now"
    console.print(
        f"compiled {origin}; the compile took {kernel.wall_seconds:.2f} s "
        f"({kernel.cpu_seconds:.2f} CPU s)"
    )


@app.command()
@clear_errors
def diff(
    a: Annotated[Stage, typer.Argument(parser=stage_argument, metavar="A", help="From stage.")],
    b: Annotated[Stage, typer.Argument(parser=stage_argument, metavar="B", help="To stage.")],
) -> None:
    """The teaching diff between two stages; exit code 1 when they differ, as diff(1) has it."""
    from .diff import diff_stages, stage_diff_stats

    found = diff_stages(a.folder, b.folder)
    for file in found:
        print("\n".join(file.lines))
    stats = stage_diff_stats(a.folder, b.folder)
    print(
        f"stages {a.tag} and {b.tag}: {stats.added} code lines added, {stats.removed} removed in "
        f"{len(stats.files)} files; {stats.moved_share:.0%} only moved"
    )
    raise typer.Exit(1 if found else 0)


@app.command()
@clear_errors
def pack(
    stage: StageArgument,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the artefacts.")],
    log: Annotated[bool, typer.Option("--log", help="With the executed log as well.")] = False,
) -> None:
    """Build the stage's kernels, all parts, for execution on Hopper, ahead of time, without a GPU.

    On the GPU machine, FLASH_LADDER_ARTEFACTS=FOLDER uses them instead of compiling.
    """
    from . import contract
    from .hopper.run import artefact_name
    from .hopper.run import pack as pack_kernel

    sm_100a = (row for row in contract.compile_keys(stage) if row.arch == "sm_100a")
    for key, with_log in itertools.product(sm_100a, (False, True) if log else (False,)):
        folder = out / artefact_name(key, with_log)
        if folder.exists():
            raise ValueError(f"--out: {folder} is there already; give another folder")
        folder.mkdir(parents=True)
        pack_kernel(stage.part(key.part), key, folder, with_log)
        console.print(str(folder), soft_wrap=True)


@app.command()
@clear_errors
def verify(
    stage: StageArgument,
    out: EvidenceOption = None,
    rewritten: Annotated[
        bool, typer.Option("--rewritten", help="On Hopper: execute the sm_100a code, rewritten.")
    ] = False,
    notes: Annotated[str, typer.Option(help="A remark that the evidence keeps.")] = "",
) -> None:
    """Run the stage's gpu tier on this machine's GPU and write evidence."""
    from . import evidence, verification

    path = out or stage.folder / "evidence.json"
    mode = "rewritten" if rewritten else None
    run = verification.verify(stage, console, notes, mode)
    evidence.add(path, stage, run)
    console.print(f"evidence written to {path}", soft_wrap=True)
    if run["tests"]["failed"]:
        raise typer.Exit(1)


@app.command()
@clear_errors
def sanitize(
    stage: StageArgument,
    out: EvidenceOption = None,
) -> None:
    """Execute the stage's kernels on a Hopper GPU under compute-sanitizer's memcheck.

    The record goes to the rewritten run of `verify` in the evidence. Errors make the exit code 1.
    """
    from . import evidence
    from . import sanitize as sanitizer

    path = out or stage.folder / "evidence.json"
    sanitizer.require(stage)
    hashes = sanitizer.hashes(stage)
    evidence.sanitized_run(evidence.read(path, stage), hashes, path)  # before minutes are spent
    with console.status(f"executing the kernels of stage {stage.tag} under memcheck ..."):
        row = sanitizer.sanitize(stage, hashes)
    evidence.add_sanitizer(path, stage, row, hashes)
    console.print(f"{len(row['kernels'])} kernels: {row['summary']}", highlight=False)
    console.print(f"evidence written to {path}", soft_wrap=True)
    if row["errors"]:
        raise typer.Exit(1)


MachineOption = Annotated[str, typer.Option(help="Whose figures: B200, H200 ...")]
OutFile = Optional[pathlib.Path]  # noqa: UP045


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    errors.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command()
@clear_errors
def model(
    stage: StageArgument,
    part: PartOption = "",
    seqlen: Annotated[int, typer.Option(min=1, help="Query and key length.")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="Heads of q, k and v.")] = 16,
    head_dim: HeadDimOption = 128,
    causal: Annotated[bool, typer.Option("--causal", help="With the causal mask.")] = False,
    window: Annotated[
        str,
        typer.Option(metavar="LEFT,RIGHT", help="With a window of so many keys; -1: open."),
    ] = "",
    machine: MachineOption = "B200",
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="NAME=VALUE", help="Replace a figure of the machine."),
    ] = None,
    trace: Annotated[OutFile, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    svg: Annotated[OutFile, typer.Option(help="Write the timeline as a picture.")] = None,
    html: Annotated[OutFile, typer.Option(help="Write an interactive timeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
) -> None:
    """Run a stage's schedule on the SM model: timeline, use of engines, derived TFLOP/s."""
    from . import derived, timeline

    if html:
        timeline.require_altair()
    on = derived.machine(machine, settings or ())
    sides = derived.parse_window(window) if window else None
    sizes = derived.Sizes(seqlen, heads, head_dim, causal, sides)
    source = stage.part(part)
    with errors.status(f"running the SM model of stage {source.tag} ..."):
        report = derived.simulate(source, on, sizes, settings or ())
    if trace:
        _write(trace, json.dumps(timeline.perfetto(report.run)))
    if svg:
        _write(svg, timeline.svg(report.run))
    if html:
        _write(html, timeline.page(report.run))
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        derived.print_report(report, console, _table)


@app.command()
@clear_errors
def roofline(
    tile_m: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Queries of a tile; 128, or 256 for a forward pair."),
    ] = None,
    tile_n: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Keys of a tile; 128, or 256 for a backward pair."),
    ] = None,
    head_dim: HeadDimOption = 128,
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False,
    pair: Annotated[bool, typer.Option("--pair", help="A pair of CTAs (2-CTA MMAs).")] = False,
    machine: MachineOption = "B200",
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="NAME=VALUE", help="Replace a figure of the machine."),
    ] = None,
    svg: Annotated[OutFile, typer.Option(help="Write the plot with this tile's bound.")] = None,
    html: Annotated[OutFile, typer.Option(help="Write the plot as an interactive page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON.")] = False,
) -> None:
    """Ceilings of a tile by the paper's formulas: tensor core, shared memory, exp."""
    from . import derived, figures
    from . import roofline as formulas

    on = derived.machine(machine, settings or ())
    tile = {"tile_m": tile_m, "tile_n": tile_n, "head_dim": head_dim}
    given = {name: size for name, size in tile.items() if size is not None}
    kernel = formulas.backward if backward else formulas.forward
    found = kernel(**given, pair=pair, machine=on)
    if svg:
        _write(svg, figures.to_svg(formulas.chart(on, found)))
    if html:
        _write(html, formulas.chart(on, found).to_html(inline=True))
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        derived.print_roofline(found, console, _table)


@app.command()
@clear_errors
def mutate(
    stage: StageArgument,
    part: PartOption = "",
    fast: Annotated[bool, typer.Option("--fast", help="A third of the sites.")] = False,
    device: Annotated[
        bool, typer.Option("--device", help="Of the compiled kernel, executed on a Hopper GPU.")
    ] = False,
    head_dim: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Head dim; the largest when not given."),
    ] = None,
    out: Annotated[
        OutFile, typer.Option(help="With --device: evidence file that gets the counts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON.")] = False,
) -> None:
    """Delete each wait, arrive and fence of the stage's model in turn; does anything notice?

    With --device: of its PTX. What survives unexplained makes the exit code 1.
    """
    from rich.progress import track

    from . import mutation

    if device and fast:
        raise ValueError("--fast is for the model; leave it out with --device")
    if out and not device:
        raise ValueError("--out records what --device found; give both")
    source = stage.part(part)
    progress = functools.partial(
        track,
        description=f"stage {source.tag}: deleting",
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    if device:
        report = _mutate_device(stage, source, head_dim, progress, out)
    else:
        report = mutation.mutate(mutation.stage_subject(source, head_dim), fast, progress)
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        (_print_device if device else _print_mutation)(report)
        console.print(report.summary(), markup=False, highlight=False)
    if report.complaints:
        raise AssertionError("\n".join(report.complaints))


def _mutate_device(
    stage: Stage,
    source: KernelSource,
    head_dim: int | None,
    progress,
    out: pathlib.Path | None,
):
    import datetime

    from . import device_mutation, evidence, mutation
    from .compile import CompileKey, compile_stage
    from .ptx import ptx_hash

    head_dim = mutation.check_head_dim(source, head_dim)
    dtype = source.config.ENVELOPE.dtypes[0]
    key = CompileKey.of(source, "sm_100a", dtype, head_dim).name
    kernel = compile_stage(source, arch="sm_100a", dtype=dtype, head_dim=head_dim) if out else None
    if out:  # before minutes are spent
        evidence.rewritten_run(evidence.read(out, stage), ptx_hash(kernel.ptx), out)
    report = device_mutation.mutate(source, head_dim, progress)
    if out:
        option = f" --part {source.name}" if source.name else ""
        row = {
            "kernel": key,
            "ptx_sha256": ptx_hash(kernel.ptx),
            "date": datetime.date.today().isoformat(),
            "command": f"flash-ladder mutate {stage.number}{option} --device --head-dim {head_dim}",
            "counts": report.counts(),
            "by_family": report.by_family(),
            "seconds": round(report.seconds, 1),
        }
        evidence.add_mutation(out, stage, row)
    return report


def _print_mutation(report) -> None:
    table = _table("site", "line", "verdict", "how it shows, or why not", whole=3)
    files = {row.site.line.partition(":")[0] for row in report.verdicts}
    for row in report.verdicts:
        line = row.site.line.rpartition(":" if len(files) == 1 else "/")[2]
        table.add_row(str(row.site), line, row.label, row.short or row.reason)
    console.print(table)
    console.print(f"Lines of {', '.join(sorted(files))}.", highlight=False)


def _print_device(report) -> None:
    table = _table("site", "PTX line", "noticed by", "how it shows, or why not", whole=3)
    for row in report.verdicts:
        detail = textwrap.shorten(row.detail or row.reason, 160)
        table.add_row(str(row.site), str(row.site.line), row.label, detail)
    console.print(table)
