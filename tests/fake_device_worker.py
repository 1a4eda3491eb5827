# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for `device_worker.serve`: a spawned process imports this file, and nothing else."""

import os
import types

FAULT = 10  # lines that are multiples of this end the process, as a fault of CUDA does


def answers(stage: int, part: str, head_dim: int, pipe) -> None:
    """Answer each line; the detail says which process did, and what it was started with."""
    while (line := pipe.recv()) is not None:
        alive = line % FAULT != 0
        detail = f"{os.getpid()} {stage} {part!r} {head_dim}"
        pipe.send(types.SimpleNamespace(line=line, by=("log",), detail=detail, alive=alive))
        if not alive:
            return


def dies(stage: int, part: str, head_dim: int, pipe) -> None:
    """End without an answer."""
    pipe.recv()
    os._exit(3)
