# SPDX-License-Identifier: Apache-2.0
"""Every fence of the pages, on a temporary pair of stages and on the real stage 01."""

import json
import re
import sys

import pytest

markdown = pytest.importorskip("markdown", reason="the documentation extra is not installed")
pytest.importorskip("pymdownx", reason="the documentation extra is not installed")

import flash_ladder  # noqa: E402
from flash_ladder.common import fences, plan  # noqa: E402

RUN = {
    "date": "2026-11-29",
    "gpu": "NVIDIA H200",
    "driver": "580.159.04",
    "target": "sm_90a",
    "mode": "rewritten",
    "command": "flash-ladder verify 1",
    "kernels": [
        {
            "key": "bf16-d128",
            "cases": 60,
            "failed": 0,
            "worst": {"generator": "llm_like", "max_abs": 0.00125, "baseline_max_abs": 0.0025},
            "a key of tomorrow": 1,
        }
    ],
    "tests": {"passed": 12, "failed": 0, "skipped": 3},
    "notes": "a <note>",
}


def render(text: str) -> str:
    """HTML of a Markdown text, with the fences registered as in mkdocs.yml."""
    custom = [
        {
            "name": name,
            "class": name,
            "format": getattr(fences, name.replace("-", "_")),
            "validator": fences.validate,
        }
        for name in fences.ATTRIBUTES
    ]
    config = {"pymdownx.superfences": {"relaxed_headers": True, "custom_fences": custom}}
    return markdown.markdown(text, extensions=["pymdownx.superfences"], extension_configs=config)


def fence(head: str, body: str = "the bare file shows this") -> str:
    return render(f"```{head}\n{body}\n```\n")


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", "", page)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two stage folders; the fences look there instead of at the real stages."""
    folders = tmp_path / "01", tmp_path / "02"
    for folder in folders:
        folder.mkdir()
        (folder / "kernel.py").write_text("TILE = 128\n")
    monkeypatch.setitem(fences.ROOTS, "stages", tmp_path)
    return folders


def test_stage_diff_shows_changed_new_and_equal_files(pair):
    (pair[1] / "kernel.py").write_text("TILE = 256\n")
    (pair[1] / "load.py").write_text("X = '<b>'\n")
    for folder in pair:
        (folder / "mma.py").write_text("Y = 1\n")
    page = fence('stage-diff a="01" b="02" file="kernel.py load.py, mma.py"')
    assert "kernel.py · stage 01 → 02" in page
    assert '<span class="gd">-TILE = 128</span>' in page
    assert '<span class="gi">+TILE = 256</span>' in page
    assert "load.py · stage 01 → 02 · new file" in page
    assert "&lt;b&gt;" in page
    assert "mma.py is the same in stages 01 and 02." in text_of(page)
    assert "the bare file shows this" not in page


def test_stage_diff_takes_context(pair):
    (pair[0] / "kernel.py").write_text("A = 1\nB = 2\nC = 3\n")
    (pair[1] / "kernel.py").write_text("A = 1\nB = 2\nC = 4\n")
    assert "B = 2" in fence('stage-diff a="01" b="02" file="kernel.py"')
    assert "B = 2" not in fence('stage-diff a="01" b="02" file="kernel.py" context="0"')


def test_stage_diff_is_cut_after_60_lines(pair):
    old = [f"line_{number} = {number}" for number in range(400)]
    new = [line + "0" if number % 40 == 0 else line for number, line in enumerate(old)]
    for folder, lines in zip(pair, (old, new)):
        (folder / "kernel.py").write_text("\n".join(lines) + "\n")
    page = fence('stage-diff a="01" b="02" file="kernel.py"')
    shown = re.search(r"<pre>(.*)</pre>", page, re.S).group(1).strip().splitlines()
    assert len(shown) == 2 + 6 + 6 * 9  # the header, the first hunk, six of the others: 62 - 0
