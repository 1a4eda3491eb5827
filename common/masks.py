# SPDX-License-Identifier: Apache-2.0
"""Masks and lengths as callers give them, checked and in the form that kernels and models take.

Note [Which query sees which key]
    Query i of len_q stands at key position p = i + len_k - len_q: the last query at the last key
    (bottom-right alignment). It sees key j of 0 ... len_k - 1 where p - left <= j <= p + right.
    None and -1 leave a side open; any other number counts keys, and may be negative: (-5, 8) sees
    p + 5 ... p + 8, and (-5, 3) nothing. `causal` caps right at 0. A query that sees nothing has
    O = 0, LSE = -inf and no gradient.

Runs: host.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .model.run import GradientRun, Run
from .model.sequences import OPEN, Sequence, Sequences

MASK_OPTIONS = (
    "causal",
    "window_size",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "seqused_q",
    "seqused_k",
)
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"


@dataclass(frozen=True)
class Mask:
    """The mask of a call.

    left, right: as in Note [Which query sees which key], OPEN where a side is open. packed: whether
    the sequences lie one after the other, in tensors (1, total, h, d). batch: how many there are,
    none longer than max_seqlen_q and max_seqlen_k. rows: of the tensors q and k. lengths:
    (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), contiguous int32 on the tensors' device,
    each may be None; None where each batch entry is a sequence with all its rows.
    """

    left: int
    right: int
    packed: bool
    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    rows: tuple[int, int]
    lengths: tuple[Tensor | None, ...] | None = None

    @property
    def sees_nothing(self) -> bool:
        """Whether no query can see a key."""
        sizes = self.batch, self.max_seqlen_q, self.max_seqlen_k
        return self.left + self.right < 0 or 0 in sizes

    @property
    def arguments(self) -> tuple[int, ...]:
        """Of a kernel: addresses of `lengths`, 0 for None, then batch, max_seqlen_q, max_seqlen_k,
        left, right."""
        addresses = map(_address, self.lengths or (None,) * 4)
        return *addresses, self.batch, self.max_seqlen_q, self.max_seqlen_k, self.left, self.right

    @property
    def arguments_of_q(self) -> tuple[int, ...]:
        """Of a kernel that looks at queries alone: cu_seqlens_q, seqused_q, batch, max_seqlen_q."""
        cu, _, used, _ = self.lengths or (None,) * 4
        return _address(cu), _address(used), self.batch, self.max_seqlen_q

    def with_lengths(self, cu_q, cu_k, used_q, used_k) -> Mask:
        """The same with `lengths` of checked tensors; without any, itself."""
        if cu_q is cu_k is used_q is used_k is None:
            return self
        lengths = [x if x is None else x.contiguous() for x in (cu_q, cu_k, used_q, used_k)]
        return with_fields(self, lengths=tuple(lengths))

    def batched(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Packed tensors as those of one batch entry; others, and None, as they are."""
        return tuple(x[None] if self.packed and x is not None else x for x in tensors)

    def of_model(self) -> tuple[tuple[int, int], Sequences]:
        """The last two arguments of a model's `run`: window and sequences."""
        return (self.left, self.right), self.sequences()

    def of_run(self, run: Run) -> Run:
        """The result of a model, packed as the inputs were."""
        if not self.packed:
            return run
        names = ("out", "dk", "dv") if isinstance(run, GradientRun) else ("out", "lse")
        return replace(run, **{name: getattr(run, name)[0] for name in names})

    def sequences(self) -> Sequences:
        """The same for a model; waits for the device that holds `lengths`."""
        if self.lengths is None:
            rows = (Sequence(0, self.max_seqlen_q, 0, self.max_seqlen_k),) * self.batch
        else:
            most = self.max_seqlen_q, self.max_seqlen_k
            of_q, of_k = (
                _rows(cu, used, rows, longest, self.batch)
                for cu, used, rows, longest in zip(
                    self.lengths[:2], self.lengths[2:], self.rows, most
                )
            )
            rows = tuple(Sequence(*q, *k) for q, k in zip(of_q, of_k))
        pairs = sum(self._pairs(row) for row in rows)
        return Sequences(rows, self.packed, pairs, (self.max_seqlen_q, self.max_seqlen_k))

    def _pairs(self, row: Sequence) -> int:
        """Visible (query, key) of a sequence."""
        position = torch.arange(row.len_q) + row.len_k - row.len_q
        first = (position - self.left).clamp(min=0)
        last = (position + self.right).clamp(max=row.len_k - 1)
        return (last - first + 1).clamp(min=0).sum().item()


def with_fields(x, **changes):
    """`dataclasses.replace` without the call of __init__, which takes most of its time."""
    made = object.__new__(type(x))
    vars(made).update(vars(x), **changes)
    return made


def window(causal, window_size) -> tuple[int, int]:
    """(left, right) by Note [Which query sees which key]; TypeError for anything but integers."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False; got {causal!r}")
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be (left, right); got {window_size!r}") from None
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise TypeError(
                f"window_size has integers, and None or -1 for an open side; got {window_size!r}"
            )
    left, right = (OPEN if side in (None, -1) else side for side in (left, right))
    right = min(right, 0) if causal else right
    return int(max(-OPEN, min(left, OPEN))), int(max(-OPEN, min(right, OPEN)))


def mask_of(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Mask:
    """The mask of a call on q and k, (b, s, h, d), or (total, h, d) with cu_seqlens.

    cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on the tensors' device, where each of n sequences
    begins and the last ends, never falling (else refused on a CPU; on a GPU, where only kernels
    read them, all results are undefined); both or none. max_seqlen_q, max_seqlen_k: with them, no
    sequence is longer; all of q or k when None. seqused_q, seqused_k: (n,) int32, how many rows of
    each sequence count. What these say is read on the device alone: lengths beyond a tensor or a
    maximum are cut, and a sequence that begins outside is empty.
    Raises TypeError or ValueError for what cannot be one.
    """
    cu, used = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    sides = window(causal, window_size)
    made = mask_without_lengths(q, k, sides, cu, used, (max_seqlen_q, max_seqlen_k))
    return made.with_lengths(*cu, *used)


def mask_without_lengths(q: Tensor, k: Tensor, sides, cu, used, most) -> Mask:
    """The checked mask of a call but for `lengths`: nothing is launched.

    sides: of `window`; cu, used, most: (of q, of k) of the options of `mask_of`.
    """
    (packed, batch), rows = check_sequences(q, k, cu, used), (q.shape[-3], k.shape[-3])
    longest = [
        _check_maximum(f"max_seqlen_{name}", given, own, packed)
        for name, given, own in zip("qk", most, rows)
    ]
    for name, values in zip(("cu_seqlens_q", "cu_seqlens_k"), cu):
        if packed and values.device.type == "cpu" and (values[1:] < values[:-1]).any():
            raise ValueError(f"{name} must never fall; got {values.tolist()}")
    return Mask(*sides, packed, batch, *longest, rows)


def check_sequences(q: Tensor, k: Tensor, cu, used) -> tuple[bool, int]:
    """(whether they are packed, how many there are); sizes may be symbols of a tracer.

    Raises TypeError or ValueError unless cu and used, as in `mask_without_lengths`, fit q and k.
    """
    for name, values in zip(LENGTHS, (*cu, *used)):
        check_dense(name, values)
    packed = cu[0] is not None
    if packed != (cu[1] is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k belong together: give both, or neither")
    _check_rank(q, k, packed)
    batch = _count(*cu) if packed else q.shape[0]
    counts = (batch + 1,) * 2 + (batch,) * 2
    for name, values, count in zip(LENGTHS, (*cu, *used), counts):
        _check_integers(name, values, count, q.device)
    return packed, batch


def _check_rank(q: Tensor, k: Tensor, packed: bool) -> None:
    wanted = "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    for name, x in (("q", q), ("k", k)):
        if x.dim() != (3 if packed else 4):
            why = "with cu_seqlens " if packed else ""
            raise ValueError(
                f"{name} must be {wanted} {why}; got {tuple(x.shape)}".replace(" ;", ";")
            )


def _count(cu_seqlens_q, cu_seqlens_k) -> int:
    """How many sequences they describe."""
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, Tensor) or cu.dim() != 1 or not cu.shape[0]:
            raise TypeError(
                f"{name} must be a tensor with one axis, not empty; got {described(cu)}"
            )
    of_q, of_k = cu_seqlens_q.shape[0] - 1, cu_seqlens_k.shape[0] - 1
    if of_q != of_k:
        raise ValueError(f"cu_seqlens_q describes {of_q} sequences, cu_seqlens_k {of_k}")
    return of_q


def _check_maximum(name: str, value, rows: int, packed: bool) -> int:
    """The maximum in use, at most `rows`. A tensor is taken where that waits for no device."""
    if value is None:
        return rows
    if not packed:
        raise ValueError(f"{name} goes with cu_seqlens; without, the length is that of the tensor")
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name} must be an int, or a CPU tensor that holds one; got {described(value)}"
        )
    if value < 0:
        raise ValueError(f"{name} must be 0 or more; got {value}")
    return min(int(value), rows)


def _check_integers(name: str, values, count: int, device: torch.device) -> None:
    if values is None:
        return
    if not isinstance(values, Tensor) or values.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor; got {described(values)}")
    if values.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},); got {tuple(values.shape)}")
    if values.device != device:
        raise ValueError(f"{name} must be on {device}, as q is; it is on {values.device}")


def _rows(cu, used, rows: int, most: int, batch: int) -> list[tuple[int, int]]:
    """(first row, rows) of every sequence of one side, within the tensor, as kernels find them."""
    begin, length = torch.zeros(batch, dtype=torch.int32), torch.full((batch,), rows)
    if cu is not None:
        ends = cu.cpu().clamp(0, rows)
        begin, length = ends[:-1], ends.diff().clamp(0, most)
    if used is not None:
        length = torch.minimum(length, used.cpu()).clamp(min=0)
    return [*zip(begin.tolist(), length.tolist())]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def check_dense(name: str, x) -> None:
    """TypeError for a sparse or nested tensor, whose memory no kernel can read."""
    if isinstance(x, Tensor) and (x.layout is not torch.strided or x.is_nested):
        kind = "nested" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense (strided) tensor; got a {kind} one")


def described(value) -> str:
    """A value in a message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r:.60}"
