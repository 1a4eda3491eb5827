# SPDX-License-Identifier: Apache-2.0
"""Commands and programs of the pages exist; the ten-minute paths can be followed word for word."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from flash_ladder.common import cli
from flash_ladder.common.model import B200
from flash_ladder.common.site_checks import nav_pages, source_file

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "docs" / "paths").glob("*.md"))
TEXTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "stages").rglob("README.md")),
]
TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(path: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def commands(path: Path) -> list[list[str]]:
    """The commands of the page's bash blocks, as words; a loop's variable has its first value."""
    found = []
    for language, text in blocks(path):
        if language == "bash" and "python -c" not in text:
            for line in text.replace("$n", "1").splitlines():
                parts = re.split(r";|\|\|", line.split("#")[0])
                found += [shlex.split(part) for part in parts]
    return [words for words in found if words]


def programs(path: Path) -> list[str]:
    return re.findall(r"python -c '\n(.*?)'", path.read_text(encoding="utf-8"), re.S)


def test_there_are_three_paths():
    assert [path.stem for path in PATHS] == ["blackwell", "hopper", "no-gpu"]


LINK = re.compile(r"^\[([\w-]+)\]: (\S+?)(#\S+)?$", re.M)


def shown(path: Path) -> Path:
    """The file whose text is at `path`: of a page of the site, what it includes."""
    docs = ROOT / "docs"
    return source_file(ROOT, path.relative_to(docs).as_posix()) if docs in path.parents else path


STAGE_PAGES = [page for page in nav_pages(ROOT / "mkdocs.yml") if page.startswith("stages/")]


@pytest.mark.parametrize("page", STAGE_PAGES)
def test_a_stage_page_links_to_the_same_pages_in_the_repository_and_on_the_site(page):
    """README.md has links as the repository needs them; the site's page, which includes it, defines
    them again, and the last definition counts."""
    pages = source_file(ROOT, page), ROOT / "docs" / page
    found = [
        {
            name: (shown((page.parent / path).resolve()), anchor)
            for name, path, anchor in LINK.findall(text)
        }
        for page, text in ((page, page.read_text(encoding="utf-8")) for page in pages)
    ]
    assert found[0] == found[1]
    assert all(path.is_file() for path, _ in found[0].values())
    text = pages[0].read_text(encoding="utf-8")
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == set(found[0])
    folders = re.findall(r"\]\((\.\.[^)#]+)", text)  # of an index page they are right on the site
    assert not folders or pages[1].name == "index.md", "builders differ in links of other pages"
    assert all((pages[0].parent / folder).is_dir() for folder in folders)


def check_command(words: list[str]) -> None:
    """Nothing is run; an unknown option raises."""
    if "flash-ladder" in words:
        name, *arguments = words[words.index("flash-ladder") + 1 :]
        assert not {"--device", "--fast"} <= set(arguments), "one refuses the other"
        typer.main.get_command(cli.app).commands[name].make_context(name, arguments)
    elif words[0] == "make":
        assert words[1] in TARGETS
    elif words[0] == "pytest":
        for name in (word for word in words[1:] if "/" in word):
            assert (ROOT / name).exists(), name
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]), words[2]
    else:
        assert words[0] in (".", "git", "for", "true", "break", "done"), words


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_name_exists(path):
    for words in commands(path):
        check_command(words)
    for language, text in blocks(path):
        if language == "python":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("flash_ladder"):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), text
            if "import torch" in text and "cuda" not in text:
                exec(compile(text, str(path), "exec"), {})


WRONG = {
    "flash-ladder model 1 --no": "No such option: --no",
    "flash-ladder nothing": "nothing",
    "make x": "assert 'x' in",
    "pytest stages/99": "stages/99",
    "python -m flash_ladder.common.nothing": "nothing",
    "rm x": "'rm', 'x'",
    "flash-ladder mutate 4 --device --fast": "one refuses the other",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_commands_are_noticed(line):
    with pytest.raises(Exception, match=WRONG[line]):
        check_command(line.split())


def test_paths_begin_with_make_and_use_the_command_line():
    for path in PATHS:
        assert [words[0] for words in commands(path)][:3] == ["make", ".", "flash-ladder"]


def test_without_a_gpu_every_command_prints_what_is_shown(dsl, ladder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed, shown = "", 0
    for language, text in blocks(ROOT / "docs" / "paths" / "no-gpu.md"):
        if language == "text" and printed:
            shown += 1
            for line in text.replace("...", "").splitlines():
                assert " ".join(line.split()) in " ".join(printed.split())
        elif language == "bash":
            printed = ""
            for line in text.splitlines():
                words = shlex.split(line.removesuffix("|| true"))
                if words[0] == "flash-ladder":
                    code, out, error = ladder(*words[1:])
                    assert code == (1 if "|| true" in line else 0), error
                    printed += out
    assert shown == 6
    assert (tmp_path / "timeline.html").is_file()


@pytest.mark.parametrize("number, mode", [(1, "native"), (4, "rewritten")])
def test_counts_of_the_hopper_path_are_those_of_the_evidence(number, mode):
    page = (ROOT / "docs" / "paths" / "hopper.md").read_text(encoding="utf-8")
    evidence = json.loads((ROOT / "stages" / f"{number:02d}" / "evidence.json").read_text())
    run = next(run for run in evidence["runs"] if run["mode"] == mode)
    assert f"all {run['tests']['passed']} (M)" in page
    source = f"driver {run['driver']}, {run['date']}, `{run['command']}`)"
    assert source in " ".join(page.split())
    for timing in run["timings"]:
        assert f"{timing['ms']:.1f} ms" in page


def test_the_blackwell_path_shows_what_the_model_says(ladder):
    page = (ROOT / "docs" / "paths" / "blackwell.md").read_text(encoding="utf-8")
    peak = B200["sms"] * B200["tensor"] * B200["clock"] / 1e12
    assert f"Peak is {peak:.0f} (D" in page
    options = ("--seqlen", "16384", "--heads", "16", "--json")
    found = {}
    for number, part in ((2, ""), (3, ""), (4, ""), (5, ""), (6, ""), (7, "backward_2cta")):
        name = f"{number:02d}, its backward" if part else f"{number:02d}"
        code, out, _ = ladder("model", str(number), "--part", part, *options)
        found[number] = json.loads(out)["derived"]["tflops"]
        (row,) = re.findall(rf"^\| {name} \|.*\| (\d+) \|$", page, re.M)
        assert code == 0 and int(row) == round(found[number])
    assert f"| {0.2 * peak:.0f} to {1024 / 3030 * peak:.0f} (20 to 34 % of peak) |" in page
    assert f"at most {2048 / 2896 * peak:.0f} (71 % of peak)" in page
    assert found[2] < 0.2 * peak and found[4] < 1.05 * found[3], "no longer at odds with the model"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_programs_run(path):
    code = programs(path)
    assert len(code) == (0 if path.stem == "no-gpu" else 1)
    for text in code:
        compile(text, str(path), "exec")
    if code and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here; the program was only compiled")
    for text in code:
        subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, timeout=300)
