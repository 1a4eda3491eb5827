# SPDX-License-Identifier: Apache-2.0
"""Masks and lengths that the contract tries a stage with, and problems made from them. Runs: host.

A mask is a text, "causal", "(128,-1)" (left and right of a window) or both in this order, "" for
none; lengths are a name in `LENGTHS`.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from . import inputs

MASKS = (
    "",
    "causal",
    "(-1,-1)",
    "(-1,0)",
    "(128,-1)",
    "(0,0)",
    "(-5,3)",  # sees nothing
    "(-5,8)",
    "(100,20)",
    "causal(128,-1)",
)
LOW = "logits_near_minus_120"  # a generator of this module
STRAY = 3  # rows before the first packed sequence and behind the last, of NaN and Inf
ISSUE_Q, ISSUE_K = (0, 0, 1208, 2048, 2048), (0, 2538, 4280, 5120, 8192)

Make = Callable[[inputs.Problem, np.random.Generator], inputs.Problem]


def mask_options(mask: str) -> dict:
    """The options that a text stands for; ValueError for another text."""
    found = re.fullmatch(r"(causal)?(?:\((-?\d+),(-?\d+)\))?", mask)
    if found is None:
        raise ValueError(f"{mask!r} is no mask; examples: {', '.join(map(repr, MASKS))}")
    causal, left, right = found.groups()
    window = {} if left is None else {"window_size": (int(left), int(right))}
    return ({"causal": True} if causal else {}) | window


def problem(
    generator: str, mask: str, lengths: str, *, device: str | torch.device = "cpu", **sizes
) -> inputs.Problem:
    """A problem of `inputs.make`, or of LOW, with a mask and lengths; sizes as `inputs.make` takes.

    seqlen_q and seqlen_k are those of the longest sequence, batch counts sequences.
    """
    made = _low(**sizes) if generator == LOW else inputs.make(generator, **sizes)
    seed = zlib.crc32(f"{generator} {mask} {lengths} {sizes}".encode())
    made = LENGTHS[lengths](made, np.random.default_rng(seed))
    return replace(made, options=made.options | mask_options(mask)).to(device)


def _low(**sizes) -> inputs.Problem:
    """Every scaled score is near -120: exponentials of what is not a score would be infinite."""
    made = inputs.make("gaussian", **sizes)
    level = math.sqrt(120 / math.sqrt(sizes["head_dim"]))
    near = lambda x, sign: (level * (sign + 0.02 * x.float())).to(x.dtype)
    return replace(made, q=near(made.q, 1), k=near(made.k, -1), name=LOW)


# ---- lengths -------------------------------------------------------------------------------


def _dense(made: inputs.Problem, rng: np.random.Generator) -> inputs.Problem:
    """Every batch entry in full."""
    return made


def _used(made: inputs.Problem, rng: np.random.Generator) -> inputs.Problem:
    """seqused_q and seqused_k; NaN and Inf beyond them."""
    batch, rows_q, rows_k = len(made.q), made.q.shape[1], made.k.shape[1]
    used_q, used_k = _lengths(rng, batch, rows_q), _lengths(rng, batch, rows_k)
    spoil = lambda x, used: torch.stack([_spoiled(row, used[b]) for b, row in enumerate(x)])
    tensors = {name: spoil(getattr(made, name), used_q) for name in ("q", "dout")}
    tensors |= {name: spoil(getattr(made, name), used_k) for name in ("k", "v")}
    return replace(made, **tensors, options={"seqused_q": _int(used_q), "seqused_k": _int(used_k)})


def _packed(made: inputs.Problem, rng: np.random.Generator) -> inputs.Problem:
    """Sequences one after the other, between stray rows."""
    batch, rows_q, rows_k = len(made.q), made.q.shape[1], made.k.shape[1]
    return _pack(made, _lengths(rng, batch, rows_q), _lengths(rng, batch, rows_k))


def _packed_used(made: inputs.Problem, rng: np.random.Generator) -> inputs.Problem:
    """The same, of which a part is used: NaN and Inf stand between the sequences."""
    batch, rows_q, rows_k = len(made.q), made.q.shape[1], made.k.shape[1]
    spoiled = _used(made, rng)
    packed = _pack(spoiled, [rows_q] * batch, [rows_k] * batch)
    most = {"max_seqlen_q": rows_q, "max_seqlen_k": rows_k}
    return replace(packed, options=packed.options | spoiled.options | most)


def _nan_sequence(made: inputs.Problem, rng: np.random.Generator) -> inputs.Problem:
    """Packed, all of the middle sequence NaN and Inf: it must not reach its neighbours."""
    middle = len(made.q) // 2
    spoil = lambda x: torch.stack(
        [_spoiled(row, 0) if b == middle else row for b, row in enumerate(x)]
    )
    names = ("q", "k", "v", "dout") if middle else ()
    made = replace(made, **{name: spoil(getattr(made, name)) for name in names})
    return _pack(made, [made.q.shape[1]] * len(made.q), [made.k.shape[1]] * len(made.q))


def _issue(made: inputs.Problem, rng: np.random.Generator) -> inputs.Problem:
    """Sequences of which some have no query, ISSUE_Q and ISSUE_K; made for a batch of one."""
    options = {"cu_seqlens_q": _int(ISSUE_Q), "cu_seqlens_k": _int(ISSUE_K)}
    tensors = {name: getattr(made, name)[0] for name in ("q", "k", "v", "dout")}
    return replace(made, **tensors, options=options)


LENGTHS: dict[str, Make] = {
    "": _dense,
    "used": _used,
    "packed": _packed,
    "packed_used": _packed_used,
    "nan_sequence": _nan_sequence,
    "issue": _issue,
}
USUAL = ("", "used", "packed", "packed_used", "nan_sequence")  # of any size


def _lengths(rng: np.random.Generator, batch: int, longest: int) -> list[int]:
    """As many as `longest`, 0 and 1 each once where there are enough sequences, else anything."""
    drawn = [longest, *rng.integers(0, longest + 1, batch).tolist()]
    special = [longest, 0, min(1, longest)] if batch > 2 else drawn
    return rng.permutation([*special, *drawn][:batch]).tolist()


def _pack(made: inputs.Problem, used_q: list[int], used_k: list[int]) -> inputs.Problem:
    """The first rows of every batch entry one after the other."""
    tensors, options = {}, {}
    for side, used, names in (("q", used_q, ("q", "dout")), ("k", used_k, ("k", "v"))):
        for name in names:
            x = getattr(made, name)
            stray = _spoiled(x.new_zeros(STRAY, *x.shape[2:]), 0)
            rows = [row[:length] for row, length in zip(x, used)]
            tensors[name] = torch.cat([stray, *rows, stray])
        options[f"cu_seqlens_{side}"] = _int([*itertools.accumulate(used, initial=STRAY)])
        options[f"max_seqlen_{side}"] = max(used, default=0)
    return replace(made, **tensors, options=options)


def _spoiled(rows: Tensor, used: int) -> Tensor:
    """Rows (s, h, d) with NaN and Inf from row `used` on."""
    rows = rows.clone()
    rows[used:], rows[used:, :, ::2] = math.nan, math.inf
    return rows


def _int(values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- cases ---------------------------------------------------------------------------------

NAMED = (  # sizes and recipes of `contract.Case`
    {"lengths": "issue", "seqlen_q": ISSUE_Q[-1], "seqlen_k": ISSUE_K[-1]},
    {"lengths": "issue", "seqlen_q": ISSUE_Q[-1], "seqlen_k": ISSUE_K[-1], "mask": "causal"},
    {"generator": LOW, "seqlen_q": 704, "seqlen_k": 704},
    {"generator": LOW, "seqlen_q": 192, "seqlen_k": 192, "mask": "causal"},
    {"seqlen_q": 256, "seqlen_k": 512, "mask": "(-1,-200)"},  # the first visited tile hides rows
    {"seqlen_q": 700, "seqlen_k": 200, "mask": "causal"},  # the first queries see nothing
    {"seqlen_q": 200, "seqlen_k": 700, "mask": "(20,-1)"},  # nothing sees the first keys
)


def random_recipes(seed: int, count: int) -> list[dict]:
    """Sizes, mask and lengths of `count` random cases, of up to 1500 rows."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        most_q, most_k = (int(rng.choice([40, 300, 700, 1500])) for _ in range(2))
        rows_q, rows_k = int(rng.integers(1, most_q + 1)), int(rng.integers(1, most_k + 1))
        sides = rng.integers(-most_k // 4, most_k, 2)
        window = "({},{})".format(*np.where(rng.random(2) < 0.3, -1, sides))
        mask = str(rng.choice(["", "causal", window, window, f"causal{window}"]))
        lengths = str(rng.choice(USUAL))
        batch, heads = int(rng.integers(1, 5)), int(rng.integers(1, 3))
        sizes = {"seqlen_q": rows_q, "seqlen_k": rows_k, "batch": batch, "heads": heads}
        found.append({"mask": mask, "lengths": lengths, **sizes})
    return found
