# SPDX-License-Identifier: Apache-2.0
"""Fences of the reference pages: the public interface, the command line, names in the kernels.

Not mkdocstrings: it reads sources without importing them and finds modules by their folders, but
in a checkout `stages/` is the package flash_ladder and `common/` is flash_ladder.common (see
conftest.py), so that with either builder it ends at `flash_ladder.common.op`. Our docstrings have
sections of their own, too. Tried with mkdocstrings 1.0.8 under MkDocs 1.6.1 and Zensical 0.0.73.
Runs: host, while the site is built.
"""

from __future__ import annotations

import ast
import enum
import functools
import html
import importlib
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Iterable

import flash_ladder
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from . import docstrings
from . import tensor_names as kernel_names
from .fences import ROOTS, FenceError, html_code, html_table, mark, take
from .model.machine import MACHINES, Figure
from .stage import PACKAGE, KernelSource

ATTRIBUTES = {  # fence: required and optional attributes
    "api": (("object",), ()),
    "note": (("file", "title"), ()),
    "command": (("name",), ()),
    "machines": ((), ()),
    "tensor-names": (("prefix",), ()),
    "role-names": ((), ()),
    "barrier-names": ((), ()),
}
SIGNATURE_WIDTH = 88  # a longer signature gets a line for each parameter


def validate(language, inputs, options, attrs, md) -> bool:
    """The validator of these fences; see `fences.validate`."""
    return take(ATTRIBUTES, language, inputs, options)


# --- api and note -------------------------------------------------------------------------------


def _resolve(path: str):
    """The object at a dotted path that starts at the package."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            return functools.reduce(getattr, parts[count:], found)
        except AttributeError as error:
            raise FenceError(f"fence api: {error}") from error
    raise FenceError(f"fence api: there is no module at the start of {path!r}")


def _anchor(title: str) -> str:
    return "note-" + re.sub(r"\W+", "-", title.lower()).strip("-")


def _prose(text: str) -> str:
    """HTML of a docstring's text: `code`, and links to notes on the same page."""
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(
        r"Note \[([^\]]+)\]", lambda found: f'<a href="#{_anchor(found[1])}">{found[1]}</a>', shown
    )


def _annotation(annotation) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    has_type = parameter.annotation is not parameter.empty
    if has_type:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}" if has_type else f"={parameter.default!r}"
    return text


def signature(name: str, subject) -> str:
    """The call of a function or method, as Python writes it; `self` is left out."""
    given, parts, keyword_only = inspect.signature(subject), [], False
    for parameter in docstrings.parameters(subject):
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        parts.append(_parameter(parameter))
    returns = given.return_annotation
    tail = "" if returns is given.empty else f" -> {_annotation(returns)}"
    line = f"{name}({', '.join(parts)}){tail}"
    if len(line) <= SIGNATURE_WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def _documentation(name: str, subject) -> str:
    """HTML of a docstring; FenceError for one that leaves out a parameter or field."""
    missing = docstrings.undocumented(subject) if callable(subject) else []
    if missing or not subject.__doc__:
        raise FenceError(f"fence api: the docstring of {name} says nothing of {missing or 'it'}")
    types_of = docstrings.fields(subject) if isinstance(subject, type) else {}
    parts = []
    for section in docstrings.sections(subject.__doc__):
        title = f"<strong>{section.title}</strong> " if section.title else ""
        if not section.entries:
            parts.append(f"<p>{title}{_prose(section.text)}</p>")
            continue
        rows = []
        for names, text in section.entries:
            shown = ", ".join(html_code(_typed(item, types_of)) for item in names)
            rows.append(f"<dt>{shown}</dt>\n<dd>{_prose(text)}</dd>")
        parts.append(f"<p>{title}</p>\n<dl>\n" + "\n".join(rows) + "\n</dl>")
    return "\n".join(parts)


def _typed(name: str, types_of: dict[str, str]) -> str:
    return f"{name}: {types_of[name]}" if name in types_of else name


def members(subject: type) -> dict[str, object]:
    """Public methods and properties that a class itself defines, in the order of its source."""
    kinds = types.FunctionType, property, functools.cached_property
    return {
        name: member
        for name, member in vars(subject).items()
        if not name.startswith("_") and isinstance(member, kinds)
    }


def _shown_code(text: str) -> str:
    return highlight(text, PythonLexer(), HtmlFormatter())


def _member(owner: str, name: str, member) -> str:
    heading = f'<h4 id="{owner}.{name}">{html_code(f"{owner}.{name}")}</h4>'
    if isinstance(member, types.FunctionType):
        return f"{heading}\n{_shown_code(signature(name, member))}\n" + _documentation(name, member)
    getter = getattr(member, "func", None) or member.fget
    returns = inspect.signature(getter).return_annotation
    kind = "" if returns is inspect.Signature.empty else f": {_annotation(returns)}"
    text = "\n".join(f"<p>{_prose(part.text)}</p>" for part in docstrings.sections(getter.__doc__))
    if not text:
        raise FenceError(f"fence api: {owner}.{name} has no docstring")
    return f"{heading}\n{_shown_code(f'{name}{kind}')}\n{text}"


def _class(name: str, subject: type) -> str:
    bases = [base for base in subject.__bases__ if base.__module__.startswith(PACKAGE)]
    links = ", ".join(f'<a href="#api-{base.__name__}">{base.__name__}</a>' for base in bases)
    also = f"<p>Has all that {links} has.</p>" if bases else ""
    parts = [_member(name, key, member) for key, member in members(subject).items()]
    return "\n".join([_documentation(name, subject), also, *parts])


def api(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `api object=`: signature and docstring of a function, or of a class's members."""
    path = options["object"]
    subject, name = _resolve(path), path.rpartition(".")[2]
    if isinstance(subject, type):
        body = _class(name, subject)
    elif callable(subject):
        body = f"{_shown_code(signature(name, subject))}\n{_documentation(name, subject)}"
    else:
        raise FenceError(f"fence api: {path} is neither a function nor a class")
    module = inspect.getmodule(subject).__name__
    caption = f'<p class="fl-caption">{html_code(f"{module}.{name}")}</p>'
    return f'<div class="fl-api" id="api-{name}">\n{caption}\n{body}\n</div>'


def note(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `note file= title=`: a `Note [title]` of a module, word by word."""
    file, title = options["file"], options["title"]
    root, _, rest = file.partition("/")
    path = ROOTS[root] / rest if root in ROOTS else None
    if not path or not path.is_file():
        raise FenceError(f"fence note: there is no file {file}")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = re.search(rf"^Note \[{re.escape(title)}\]\n((?:    .*\n?|\n)+)", text, re.M)
    if not found:
        raise FenceError(f"fence note: {file} has no Note [{title}]")
    body = _prose(" ".join(found[1].split()))
    caption = f'<p class="fl-caption">{html.escape(title)} · {html_code(file)}</p>'
    return f'<div class="fl-note" id="{_anchor(title)}">\n{caption}\n<p>{body}</p>\n</div>'


# --- command ------------------------------------------------------------------------------------


def commands() -> dict:
    """The commands of the command line by name, in the order of its help."""
    import typer

    from .cli import app

    return dict(typer.main.get_command(app).commands)


def _kind(hint) -> str:
    """What an option of this type takes on the command line."""
    while typing.get_args(hint):
        hint = typing.get_args(hint)[0]  # of Annotated, Optional and list
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "|".join(item.value for item in hint)
    known = {int: "INT", str: "TEXT", float: "FLOAT", pathlib.Path: "PATH"}
    return known.get(hint, "TEXT")


def _default(parameter) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or value == "":
        return "-"
    return html_code(str(value.value if isinstance(value, enum.Enum) else value))


def command(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `command name=`: usage, help and options of one command of `flash-ladder`."""
    known, name = commands(), options["name"]
    if name not in known:
        raise FenceError(f"fence command: no command {name!r}; there are {', '.join(known)}")
    found = known[name]
    hints = typing.get_type_hints(inspect.unwrap(found.callback), include_extras=True)
    usage, rows = [f"flash-ladder {name}"], []
    for parameter in found.params:
        if parameter.name == "help":
            continue
        is_option = parameter.opts[0].startswith("-")
        takes = parameter.metavar or _kind(hints[parameter.name])
        if not is_option:
            usage.append(takes)
            label = takes
        else:
            label = " ".join([parameter.opts[0], *([] if parameter.is_flag else [takes])])
        if not parameter.help:
            raise FenceError(f"fence command: {name} says nothing of {label}")
        cells = [html_code(label), _prose(parameter.help), _default(parameter)]
        rows.append(cells)
    usage += ["[OPTIONS]"] if any("--" in row[0] for row in rows) else []
    table = html_table(["", "is", "default"], rows, f"flash-ladder {name}") if rows else ""
    texts = [f"<p>{_prose(part.text)}</p>" for part in docstrings.sections(found.help)]
    lines = [f"<pre>{html_code(' '.join(usage))}</pre>", *texts, table]
    return '<div class="fl-command">\n' + "\n".join(lines) + "\n</div>"


# --- machines -----------------------------------------------------------------------------------


def _figure(figure: Figure | None) -> str:
    """A figure with its mark: M for one this project measured, D for inferred or assumed ones."""
    if figure is None:
        return "-"
    first = figure.source.split()[0].rstrip(",;")
    letter = "D" if first in ("assumed", "inferred") else "Q"
    letter = "M" if figure.source.startswith("measured on") else letter
    detail = f"{figure.source}; confidence {figure.confidence}"
    return f"{figure.value:g} {mark(letter, detail)}"


def machines(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `machines`: every figure of every machine that the model knows."""
    keys = dict.fromkeys(key for machine in MACHINES.values() for key in machine.figures)
    rows = []
    for key in keys:
        figures = [machine.figures.get(key) for machine in MACHINES.values()]
        unit = next(figure.unit for figure in figures if figure)
        rows.append([html_code(key), html.escape(unit), *map(_figure, figures)])
    return html_table(["figure", "unit", *MACHINES], rows, "common/model/machine.py")


# --- names in the kernels -----------------------------------------------------------------------


def _runs(numbers: Iterable[int]) -> str:
    """1, 2, 3, 5 as "01-03, 05"."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join("-".join(f"{x:02d}" for x in dict.fromkeys((g[0], g[-1]))) for g in groups)


def places(tags: Iterable[str]) -> str:
    """Tags of kernels in short: "02-08; 07-08 preprocess"."""
    stages: dict[str, set[int]] = {}
    for tag in sorted(tags):
        number, _, part = tag.partition("/")
        stages.setdefault(part, set()).add(int(number))
    parts: dict[str, list[str]] = {}
    for part in sorted(stages):
        parts.setdefault(_runs(stages[part]), []).append(part)
    shown = []
    for runs, names in parts.items():
        if "" in names:
            shown.append(runs)
        named = ", ".join(name for name in names if name)
        shown += [f"{runs} {named}"] if named else []
    return "; ".join(shown)


def names_table(stages: pathlib.Path, group: str) -> str:
    """The table of fence `tensor-names`, from the kernels below a folder."""
    if group not in kernel_names.PREFIXES:
        raise FenceError(f"fence tensor-names: prefix={group!r}; {list(kernel_names.PREFIXES)}")
    try:
        found = {
            name: use
            for name, use in kernel_names.names(stages).items()
            if kernel_names.prefix(name) == group
        }
    except ValueError as error:
        raise FenceError(f"fence tensor-names: {error}") from error
    rows = [
        [
            html_code(name),
            "<br>".join(map(html_code, use.shapes)) or "-",
            html.escape(places(use.tags)),
        ]
        for name, use in found.items()
    ]
    return html_table(["name", "shape", "kernels"], rows, "names in the kernels of the stages")


def tensor_names(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `tensor-names prefix=`: the tensors of one prefix, their shapes, where they occur."""
    return names_table(ROOTS["stages"], options["prefix"])


def _kernels() -> list[KernelSource]:
    return [
        source for number in flash_ladder.built() for source in flash_ladder.load(number).kernels
    ]


def duties(kind: str) -> dict[tuple[str, str], set[str]]:
    """Tags of kernels by (name, what it does or guards) of "roles" or "barriers" of the plans.

    A barrier for each query tile, such as p_full0 and p_full1, counts as one.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for source in _kernels():
        for head_dim in source.config.ENVELOPE.head_dims:
            for row in getattr(source.config.plan(head_dim), kind):
                name = row.name.rstrip("0123456789") if kind == "barriers" else row.name
                text = row.does if kind == "roles" else row.guards
                found.setdefault((name, text), set()).add(source.tag)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def _duties_table(kind: str, headings: list[str]) -> str:
    rows = [
        [html_code(name), html.escape(text), html.escape(places(tags))]
        for (name, text), tags in duties(kind).items()
    ]
    return html_table(headings, rows, f"{kind} of all plans · stages/*/config.py")


def role_names(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `role-names`: the warp roles of all kernels, and what each does."""
    return _duties_table("roles", ["role", "does", "kernels"])


def barrier_names(source, language, css_class, options, md, **kwargs) -> str:
    """Fence `barrier-names`: the barriers of all kernels, and what a wait on each guards."""
    return _duties_table("barriers", ["barrier", "after a wait", "kernels"])
