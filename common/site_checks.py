# SPDX-License-Identifier: Apache-2.0
"""What must hold of every page of the built site, whoever built it.

`problems` gives one line for each thing that is wrong: a page of the navigation that is missing, a
link or anchor that leads nowhere, anything loaded from outside, a picture without a description, a
page that is too heavy, a speed without its mark, a fence that was not rendered. Runs: host, on the
HTML alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import yaml

MAX_PAGE_BYTES = 1_500_000  # HTML and all that it loads, images included
VOID = set("area base br col embed hr img input link meta source track wbr".split())
BLOCKS = {"p", "li", "table", "pre", "dt", "dd", "figcaption", "summary", "h1", "h2", "h3", "h4"}
LOADED = {"src", "srcset", "poster", "data"}  # attributes whose target a browser fetches by itself
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch"}
INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.M)
OUTSIDE = re.compile(r"(?:https?:)?//", re.I)
OUTSIDE_IN_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?\s*((?:https?:)?//[^"')\s]+)""", re.I)
SPEED = re.compile(r"\d[\d\s,.]*[TPG]FLOP", re.I)
SPEED_UNIT = re.compile(r"[TPG]FLOP", re.I)
MARK = re.compile(r"[(;,] ?[MDQ](?=[):;,]| of | by )")  # (D), (M: an H200), (40 cycles, Q)
WORD_MARK = re.compile(r"\b(measured|derived|quoted)\b")  # of printed output, which has no letters
ICONS = {"twemoji", "md-icon"}  # classes of pictures that say nothing of their own


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects; they are not needed here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def nav_pages(config: Path) -> list[str]:
    """The Markdown files that the navigation of a mkdocs.yml names, in its order."""

    def walk(entry) -> Iterable[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            entry = list(entry.values())
        if isinstance(entry, list):
            for item in entry:
                yield from walk(item)

    nav = yaml.load(config.read_text(encoding="utf-8"), _Loader)["nav"]
    return [page for page in walk(nav) if not OUTSIDE.match(page)]


def source_file(root: Path, page: str) -> Path:
    """The file below `root` that Markdown file `page` of docs/ includes; itself if it has none."""
    path = root / "docs" / page
    found = INCLUDED.search(path.read_text(encoding="utf-8"))
    return root / found[1] if found else path


def built_file(site: Path, page: str) -> Path:
    """The HTML file of Markdown file `page`: a/b.md is a/b/index.html."""
    return site / page.removesuffix(".md").removesuffix("index") / "index.html"


@dataclass
class _Block:
    tag: str
    text: list[str] = field(default_factory=list)


class Page(HTMLParser):
    """What the checks need of one HTML file.

    ids; links: targets of <a>; loads: (tag, target) fetched without a click; undescribed: pictures
    without a description; blocks: (tag, text) of paragraphs, items, tables, in order of their ends.
    """

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.undescribed: list[str] = []
        self.blocks: list[tuple[str, str]] = []
        self._open: list[tuple[str, set[str]]] = []  # tags that are open, with their classes
        self._blocks: list[_Block] = []
        self._styles: list[str] = []
        self.feed(text)
        self.close()
        for found in OUTSIDE_IN_CSS.findall("".join(self._styles)):
            self.loads.append(("style", found))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        classes = set(given.get("class", "").split())
        self.ids.update(given[name] for name in ("id", "name") if given.get(name))
        self._styles.append(given.get("style", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self._note_loads(tag, given)
        self._note_picture(tag, given, classes)
        if tag in VOID:
            return
        self._open.append((tag, classes))
        if tag in BLOCKS and not any(block.tag == "table" for block in self._blocks):
            self._blocks.append(_Block(tag))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {name for name, _ in self._open}:
            return
        while self._open:
            name, _ = self._open.pop()
            if self._blocks and self._blocks[-1].tag == name:
                block = self._blocks.pop()
                self.blocks.append((block.tag, " ".join("".join(block.text).split())))
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        inside = self._open[-1][0] if self._open else ""
        if inside == "style":
            self._styles.append(data)
        elif inside != "script" and self._blocks:
            if inside == "abbr" and "fl-mark" in self._open[-1][1]:
                data = f"({data})"
            self._blocks[-1].text.append(data + (" " if inside in ("td", "th", "caption") else ""))

    def _note_loads(self, tag: str, given: dict[str, str]) -> None:
        if tag == "link" and LOADED_LINKS & set(given.get("rel", "").split()):
            self.loads.append((tag, given.get("href", "")))
        if tag in ("image", "use"):  # of SVG
            self.loads += [(tag, given[name]) for name in ("href", "xlink:href") if name in given]
        for name in LOADED & given.keys():
            targets = given[name].split(",") if name == "srcset" else [given[name]]
            self.loads += [(tag, target.split()[0]) for target in targets if target.strip()]

    def _note_picture(self, tag: str, given: dict[str, str], classes: set[str]) -> None:
        around = [name for name, _ in self._open]
        if tag == "img" and not given.get("alt", "").strip():
            self.undescribed.append(f"image {given.get('src', '')} has no alt text")
        if tag != "svg" or "article" not in around or "svg" in around:
            return
        icon = classes & ICONS or any(known & ICONS for _, known in self._open)
        if icon or given.get("aria-hidden") == "true":
            return
        if given.get("role") != "img" or not given.get("aria-label", "").strip():
            self.undescribed.append('an inline SVG has no role="img" with an aria-label')


@cache
def read_page(path: Path) -> Page:
    """A parsed HTML file; a file is read once."""
    return Page(path.read_text(encoding="utf-8"))


def _target(page: Path, link: str) -> Path:
    """The file that a relative link of `page` leads to; it may not exist."""
    path = unquote(link.split("#")[0].split("?")[0])
    found = page.parent / path if path else page
    return found / "index.html" if found.is_dir() else found


def _is_elsewhere(link: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.I))


def broken_links(path: Path) -> list[str]:
    """Links and resources of a page whose file, or whose anchor in that file, does not exist."""
    page, found = read_page(path), []
    for link in [*page.links, *(target for _, target in page.loads)]:
        if not link or _is_elsewhere(link):
            continue
        if link.startswith("/"):
            found.append(f"link {link} starts at the host's root, which need not be the site's")
            continue
        target = _target(path, link)
        anchor = unquote(link.partition("#")[2])
        if not target.is_file():
            found.append(f"link {link} leads nowhere")
        elif anchor and target.suffix == ".html" and anchor not in read_page(target).ids:
            found.append(f"link {link}: the page has no anchor #{anchor}")
    return found


def outside_loads(path: Path) -> list[str]:
    """What a page loads from another host: scripts, styles, fonts, pictures."""
    page = read_page(path)
    found = [
        f"<{tag}> loads {link} from outside" for tag, link in page.loads if OUTSIDE.match(link)
    ]
    if re.search(r'class="[^"]*\bmermaid\b', path.read_text(encoding="utf-8")):
        found.append("a mermaid graph would make the theme load mermaid from outside")
    return found


def unmarked_speeds(page: Page) -> list[str]:
    """Blocks that state FLOP/s without saying M, D or Q; a table may say so in the text before."""
    found, before = [], ""
    for tag, text in page.blocks:
        says = SPEED_UNIT.search(text) and re.search(r"\d", text) if tag == "table" else None
        if says or SPEED.search(text):
            marked = MARK.search(f"{before} {text}" if tag == "table" else text)
            if not marked and not (tag == "pre" and WORD_MARK.search(text)):
                found.append(f"a speed without its mark M, D or Q: {text[:120]}")
        before = text
    return found


FELL_THROUGH = re.compile(r"<code>\s*([a-z][a-z-]*) [a-z_]+=(?:\"|&quot;)")


def fences_fallen_through(path: Path) -> list[str]:
    """Fences that a builder shows as code, since what renders them failed or is not registered."""
    names = FELL_THROUGH.findall(path.read_text(encoding="utf-8"))
    return [f"the fence `{name}` was not rendered" for name in names]


def page_bytes(path: Path) -> int:
    """Size of a page with all the files of the site that it loads."""
    files = {_target(path, link) for _, link in read_page(path).loads if not _is_elsewhere(link)}
    return sum(file.stat().st_size for file in {path, *files} if file.is_file())


def _page_problems(path: Path) -> list[str]:
    page, size = read_page(path), page_bytes(path)
    found = [*broken_links(path), *outside_loads(path), *page.undescribed, *unmarked_speeds(page)]
    found += fences_fallen_through(path)
    if size >= MAX_PAGE_BYTES:
        found.append(f"{size:,} bytes with what it loads; the limit is {MAX_PAGE_BYTES:,}")
    return found


def problems(site: Path, pages: Iterable[str]) -> list[str]:
    """All that is wrong with the site in folder `site`, whose navigation names `pages`."""
    found = [
        f"{page}: in the navigation, but not in the site"
        for page in pages
        if not built_file(site, page).is_file()
    ]
    for path in sorted(site.rglob("index.html")):
        found += [f"{path.relative_to(site)}: {line}" for line in _page_problems(path)]
    for path in sorted(site.rglob("*.css")):
        outside = OUTSIDE_IN_CSS.findall(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: loads {target} from outside" for target in outside]
    return found
