# SPDX-License-Identifier: Apache-2.0
"""Where in a stage's model a verb was called."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

ANCHORS = ("stages", "tests", "flash_ladder")  # folders that a shown path starts at
STAGES = "stages"


@lru_cache
def _short(filename: str) -> str:
    parts = Path(filename).parts
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] in ANCHORS:
            folder = STAGES if parts[index] == "flash_ladder" else parts[index]
            return "/".join((folder, *parts[index + 1 :]))
    return parts[-1]


def caller_line(depth: int = 2) -> str:
    """Place of the call `depth` frames up, as in "stages/04/model.py:73"; 2 is the caller's."""
    frame = sys._getframe(depth)
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
