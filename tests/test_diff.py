# SPDX-License-Identifier: Apache-2.0
"""What differs between two stages, and how much of it is code."""

import shutil
import subprocess

import pytest
from flash_ladder.common.diff import code_lines, diff_file, diff_stages, stage_diff_stats

KERNEL = '''# SPDX-License-Identifier: Apache-2.0
"""A docstring."""

TILE = 128  # rows


def first_function(value):
    """Another docstring,

    of several lines.
    """
    # a comment
    return value + 1


def second_function(value):
    text = """# not a comment"""
    return text, value
'''


@pytest.fixture
def pair(tmp_path):
    """Two equal stage folders with one file each."""
    folders = tmp_path / "01", tmp_path / "02"
    for folder in folders:
        folder.mkdir()
        (folder / "kernel.py").write_text(KERNEL)
    return folders


def test_code_lines_leave_out_comments_blanks_and_docstrings():
    assert code_lines(KERNEL) == [
        "TILE = 128",
        "def first_function(value):",
        "    return value + 1",
        "def second_function(value):",
        '    text = """# not a comment"""',
        "    return text, value",
    ]


def test_equal_stages_do_not_differ(pair):
    assert diff_stages(*pair) == []
    stats = stage_diff_stats(*pair)
    assert (stats.changed, stats.moved, stats.moved_share, stats.files) == (0, 0, 0.0, ())


def test_changed_file_shows_its_hunks(pair):
    (pair[1] / "kernel.py").write_text(KERNEL.replace("value + 1", "value + 2"))
    (diff,) = diff_stages(*pair, context=1)
    assert diff.state == "changed"
    assert diff.header == ("--- stages/01/kernel.py", "+++ stages/02/kernel.py")
    assert diff.lines[2:] == [
        "@@ -12,3 +12,3 @@",
        "     # a comment",
        "-    return value + 1",
        "+    return value + 2",
        " ",
    ]
    assert diff.command == "git diff --no-index stages/01/kernel.py stages/02/kernel.py"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_hunks_are_those_of_git(pair):
    changed = KERNEL.replace("value + 1", "value + 2").replace("TILE = 128", "TILE = 256")
    (pair[1] / "kernel.py").write_text(changed + "LAST = 1\n")
    command = ["git", "diff", "--no-index", "01/kernel.py", "02/kernel.py"]
    done = subprocess.run(command, cwd=pair[0].parent, capture_output=True, text=True)
    assert done.returncode == 1  # they differ
    expected = [line.split(" @@")[0] for line in done.stdout.splitlines()[4:]]
    ours = diff_file(*pair, "kernel.py").lines[2:]
    assert [line.split(" @@")[0] for line in ours] == expected


def test_new_and_removed_files(pair):
    (pair[1] / "load.py").write_text("X = 1\n")
    new = diff_file(*pair, "load.py")
    assert new.state == "new"
    assert new.lines == ["--- /dev/null", "+++ stages/02/load.py", "@@ -0,0 +1 @@", "+X = 1"]
    gone = diff_file(pair[1], pair[0], "load.py")
    assert gone.state == "gone"
    assert gone.lines[1:] == ["+++ /dev/null", "@@ -1 +0,0 @@", "-X = 1"]


def test_file_in_neither_stage_is_an_error(pair):
    with pytest.raises(FileNotFoundError, match=r"mma\.py is neither in stages/01 nor in"):
        diff_file(*pair, "mma.py")


def test_files_come_in_reading_order(pair):
    for name in ("zebra.py", "load.py", "config.py"):
        (pair[1] / name).write_text("X = 1\n")
    assert [diff.name for diff in diff_stages(*pair)] == ["config.py", "load.py", "zebra.py"]


def test_first_lines_keep_whole_hunks(pair):
    old = [f"line_{number} = {number}" for number in range(100)]
    new = list(old)
    for number in (10, 50, 90):
        new[number] += "0"
    for folder, lines in zip(pair, (old, new)):
        (folder / "mma.py").write_text("\n".join(lines) + "\n")
    diff = diff_file(*pair, "mma.py")
    assert [len(hunk) for hunk in diff.hunks] == [9, 9, 9]
    assert diff.first_lines(29) == diff.lines
    assert diff.first_lines(28) == diff.lines[:20]
    assert diff.first_lines(5) == diff.lines[:5]  # not even one hunk fits


def test_stats_count_code_only(pair):
    changed = KERNEL.replace("# a comment", "# another").replace("# rows", "# query rows")
    (pair[1] / "kernel.py").write_text(changed.replace("Another docstring", "A new one"))
    (pair[1] / "README.md").write_text("words\n")
    (pair[1] / "evidence.json").write_text("{}\n")
    (pair[1] / "test_stage.py").write_text("X = 1\n")
    assert stage_diff_stats(*pair).changed == 0
    (pair[1] / "load.py").write_text('"""Text."""\n\nX = 1  # one\n')
    (pair[1] / "kernel.py").write_text(changed.replace("value + 1", "value + 2"))
    stats = stage_diff_stats(*pair)
    assert (stats.added, stats.removed, stats.changed, stats.moved) == (2, 1, 3, 0)
    assert stats.files == ("kernel.py", "load.py")


def test_moved_lines_are_found_across_files_and_indentation(pair):
    line = "accumulator = multiply_and_add(left, right)"
    (pair[0] / "load.py").write_text(f"{line}\nfirst_value = 1\n")
    (pair[1] / "load.py").write_text("first_value = 1\n")
    (pair[1] / "mma.py").write_text(f"if True:\n    {line}\n")
    stats = stage_diff_stats(*pair)
    assert (stats.added, stats.removed, stats.moved) == (2, 1, 1)
    assert stats.moved_share == pytest.approx(2 / 3)
