# SPDX-License-Identifier: Apache-2.0
"""The tolerance rule: a kernel may err twice as much as same-precision torch, plus rounding.

Note [Tolerance rule]
    Error means distance to the float64 oracle. For each enforced metric

        error(kernel) <= 2 * error(baseline) + floor

    where the baseline is `reference.same_precision` on the same input, so that hard inputs earn
    their tolerance by being hard for torch as well. The floor lets a kernel round its result when
    the baseline happens to be exact. Unless the caller gives one, it is half an ulp of the output
    dtype, the error of rounding the true value to nearest, at the oracle's own magnitude:

    * max_abs: half an ulp at the largest magnitude of the oracle.
    * rms_abs: root mean square of half an ulp at every element.
    * row_rel: per row, the rms of half an ulp is taken off the error before it is divided by the
      row's rms (the two above cannot see a wrong row whose values are small beside others).

    A floor from the caller, one number or one per element, is absolute, in units of the output,
    and takes the place of half an ulp in all three. Max and mean relative error and the ulp
    distance are reported, not enforced: near zero they are noise.

    Gradients need two changes. Rows of dQ and dK can cancel to almost nothing, so row_rel means
    little there (rows=False). And the backward reads O as the forward rounded it, which torch
    does not do, and takes D from it in float32: `half_ulp` of the gradient, plus
    `reference.stored_output_error`, plus `reference.statistics_error` is their floor.

    Not a matter of degree, so never excused by a tolerance: NaN or Inf where the true value is
    finite, a finite value where it is not, and elements the kernel never wrote.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
SHOWN_ROWS = 4
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Quiet NaNs with a payload no arithmetic produces (hardware NaNs are 0x7FFF, 0x7FC0 and the like).
POISON_BITS = {
    torch.bfloat16: 0xFFDA,
    torch.float16: 0xFEDA,
    torch.float32: 0xFFDADADA,
}


class ToleranceError(AssertionError):
    """A result is further from the oracle than the tolerance rule allows."""


@dataclass(frozen=True)
class Metric:
    """One kind of error, of the kernel and of the baseline, in units of the output or as a ratio.

    limit is None for metrics that are only reported. index is where the kernel's error is worst
    (the row for row_rel, None for averages); actual and expected are the values there.
    """

    name: str
    value: float
    baseline: float
    limit: float | None
    index: tuple[int, ...] | None
    actual: float | None
    expected: float | None

    @property
    def ok(self) -> bool:
        """Whether the limit holds; a NaN never does."""
        return self.limit is None or self.value <= self.limit

    def line(self) -> str:
        """One line: name, error, baseline's error, limit, worst place."""
        limit = "reported" if self.limit is None else f"limit {self.limit:.3g}"
        text = f"{self.name:9} {self.value:.3g} (baseline {self.baseline:.3g}, {limit})"
        if self.index is not None:
            text += f" at {self.index}"
        if self.actual is not None:
            text += f": {self.actual:.6g}, expected {self.expected:.6g}"
        return text if self.ok else text + "  <-- too large"


@dataclass(frozen=True)
class Comparison:
    """Verdict on one tensor: metrics, and problems that no tolerance excuses."""

    name: str
    metrics: tuple[Metric, ...]
    problems: tuple[str, ...]
    compared: int  # elements that entered the metrics
    ignored: int  # elements the caller excluded
    baseline_skipped: int  # elements that earn no tolerance: the baseline is not finite there

    @property
    def ok(self) -> bool:
        """Whether every enforced metric is within its limit and there is no problem."""
        return not self.problems and all(metric.ok for metric in self.metrics)

    def __getitem__(self, name: str) -> Metric:
        """The metric of that name; KeyError if there is none."""
        return {metric.name: metric for metric in self.metrics}[name]

    def lines(self) -> list[str]:
        """The verdict, problems first, then one line per metric."""
        verdict = "ok" if self.ok else "FAILED"
        head = f"{self.name}: {verdict}, {self.compared} elements compared, {self.ignored} ignored"
        if self.baseline_skipped:
            head += f", baseline not finite in {self.baseline_skipped}"
        return [head, *self.problems, *(metric.line() for metric in self.metrics)]

    def as_dict(self) -> dict:
        """The same as plain data for JSON; numbers that are not finite become strings."""
        metrics = {
            m.name: {
                "value": _plain(m.value),
                "baseline": _plain(m.baseline),
                "limit": _plain(m.limit),
                "index": None if m.index is None else list(m.index),
                "actual": _plain(m.actual),
                "expected": _plain(m.expected),
            }
            for m in self.metrics
        }
        return {
            "name": self.name,
            "ok": self.ok,
            "problems": list(self.problems),
            "compared": self.compared,
            "ignored": self.ignored,
            "baseline_skipped": self.baseline_skipped,
            "metrics": metrics,
        }

    def check(self) -> "Comparison":
        """Returns self, or raises ToleranceError with `lines`."""
        if not self.ok:
            raise ToleranceError("\n".join(self.lines()))
        return self


def compare(
    actual: Tensor,
    oracle: Tensor,
    baseline: Tensor,
    *,
    floor: float | Tensor | None = None,
    ignore: Tensor | None = None,
    rows: bool = True,
    name: str = "out",
) -> Comparison:
    """Judges a kernel's result by the rule. See Note [Tolerance rule].

    Args:
        actual: the kernel's result, bfloat16, float16 or float32; its dtype sets the ulp.
        oracle: true values, same shape, float64 (or float32).
        baseline: `same_precision` result for the same input, same shape, any floating dtype.
        floor: absolute floor in units of the output, a number or a tensor of the same shape;
            None means `half_ulp` of the oracle.
        ignore: bool, broadcastable to the shape: elements that do not count.
        rows: whether row_rel is enforced (False for gradients); a row is a slice along the
            last axis.
        name: what the lines call the tensor.

    Where the oracle, rounded to the dtype of actual, is NaN, actual must be NaN; where it is -inf
    or inf, exactly that. Non-finite elements of the baseline earn no tolerance.

    Returns Comparison, on any outcome. Raises ValueError (shapes, floor) or TypeError (dtypes).
    """
    _check_arguments(actual, oracle, baseline, floor)
    device, dtype = actual.device, actual.dtype
    actual = actual.detach()
    truth = oracle.detach().to(device=device, dtype=torch.float64)
    yardstick = baseline.detach().to(device=device, dtype=torch.float64)
    counted = torch.ones(actual.shape, dtype=torch.bool, device=device)
    if ignore is not None:
        counted &= ~ignore.to(device)
    expected = truth.to(dtype)
    problems = _problems(actual, expected, counted)
    sound = counted & expected.isfinite() & actual.isfinite()
    allowed = half_ulp(truth, dtype) if floor is None else _floor(floor, truth)
    own = _measure(actual.double(), truth, dtype, sound, allowed)
    fair = sound & yardstick.isfinite()
    base = _measure(yardstick, truth, dtype, fair, torch.zeros_like(truth))
    floors = {
        "max_abs": _largest(torch.where(sound, allowed, 0.0)),
        "rms_abs": _rms(allowed, sound),
        "row_rel": 0.0 if rows else None,
    }
    metrics = tuple(_metric(k, own[k], base[k][0], floors.get(k), actual, truth) for k in own)
    return Comparison(
        name=name,
        metrics=metrics,
        problems=tuple(problems),
        compared=int(sound.sum()),
        ignored=int((~counted).sum()),
        baseline_skipped=int((sound & ~fair).sum()),
    )


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Counts the representable steps from a to b: int64, same shape, never negative.

    a, b: one shape, one dtype of bfloat16, float16, float32. -0 and +0 are the same point; Inf is
    one step beyond the largest finite number; a NaN on either side gives the largest int64.

    Raises ValueError for different shapes, TypeError for other or different dtypes.
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in POISON_BITS:
        raise TypeError(f"dtypes are {a.dtype} and {b.dtype}; {_allowed()}, both the same")
    distance = (_position(a) - _position(b)).abs()
    return torch.where(a.isnan() | b.isnan(), torch.iinfo(torch.int64).max, distance)


def half_ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns half the spacing of `dtype` at each true value: the error of rounding to nearest.

    truth: any shape, float64, finite or not (the result is meaningless where it is not).
    dtype: the output's. Returns float64 of the same shape; subnormals have their own spacing.
    """
    info = torch.finfo(dtype)
    exponent = torch.frexp(truth.abs().clamp(min=info.tiny)).exponent - 1
    return torch.exp2(exponent.double()) * (info.eps / 2)


def poison_(tensor: Tensor) -> Tensor:
    """Fills a tensor, in place and through any strides, with the NaN pattern of its dtype.

    Run it on outputs before a launch; `unwritten` then counts what the kernel left out.
    Returns the tensor. Raises TypeError for dtypes other than bfloat16, float16, float32.
    """
    bits = _bits(tensor)
    bits.fill_(_pattern(tensor.dtype))
    return tensor


def unwritten(tensor: Tensor) -> int:
    """Counts the elements that still hold the pattern of `poison_`.

    Raises TypeError for dtypes other than bfloat16, float16, float32.
    """
    return int(_poisoned(tensor).sum())


def _allowed() -> str:
    """The dtypes of outputs, in words."""
    return "allowed: " + ", ".join(str(dtype) for dtype in POISON_BITS)


def _bits(tensor: Tensor) -> Tensor:
    """Returns a view of the same memory as integers of the same width."""
    if tensor.dtype not in POISON_BITS:
        raise TypeError(f"tensor is {tensor.dtype}; {_allowed()}")
    return tensor.detach().view(_INTEGER[tensor.element_size()])


def _pattern(dtype: torch.dtype) -> int:
    """Returns the poison of a dtype as a signed integer of its width."""
    return POISON_BITS[dtype] - (1 << torch.finfo(dtype).bits)


def _poisoned(tensor: Tensor) -> Tensor:
    """Returns bool: the element holds the poison pattern."""
    return _bits(tensor) == _pattern(tensor.dtype)


def _position(x: Tensor) -> Tensor:
    """Maps floats to int64 so that neighbours differ by one and order is kept."""
    bits = _bits(x).long()
    lowest = -(1 << (torch.finfo(x.dtype).bits - 1))  # sign bit alone: -0
    return torch.where(bits < 0, lowest - bits, bits)


def _floor(floor: float | Tensor, truth: Tensor) -> Tensor:
    """Returns the caller's floor per element, float64."""
    if isinstance(floor, Tensor):
        return floor.detach().to(device=truth.device, dtype=torch.float64)
    return torch.full_like(truth, floor)


def _largest(x: Tensor) -> float:
    """Returns the maximum, 0 for an empty tensor."""
    return float(x.max()) if x.numel() else 0.0


def _rms(x: Tensor, mask: Tensor) -> float:
    """Returns the root mean square over the mask, 0 where it is empty."""
    return math.sqrt(_mean(x**2, mask))


def _mean(x: Tensor, mask: Tensor) -> float:
    """Returns the mean over the mask, 0 where it is empty."""
    return float(torch.where(mask, x, 0.0).sum()) / max(1, int(mask.sum()))


def _worst(x: Tensor) -> tuple[float, tuple[int, ...] | None]:
    """Returns the maximum and where it is; (0, None) for an empty tensor."""
    if not x.numel():
        return 0.0, None
    flat = int(x.argmax())
    index = torch.unravel_index(torch.tensor(flat), x.shape)
    return float(x.flatten()[flat]), tuple(int(i) for i in index)


def _measure(
    values: Tensor, truth: Tensor, dtype: torch.dtype, mask: Tensor, floor: Tensor
) -> dict[str, tuple[float, tuple[int, ...] | None]]:
    """Returns every metric over the mask as name -> (value, worst place or None)."""
    error = torch.where(mask, (values - truth).abs(), 0.0)
    nonzero = mask & (truth != 0)
    relative = torch.where(nonzero, error / truth.abs(), 0.0)
    ulps = ulp_distance(values.to(dtype), truth.to(dtype))
    return {
        "max_abs": _worst(error),
        "rms_abs": (_rms(error, mask), None),
        "row_rel": _worst(_row_error(error, truth, mask, floor)),
        "max_rel": _worst(relative),
        "mean_rel": (_mean(relative, nonzero), None),
        "max_ulp": _worst(torch.where(mask, ulps, 0)),
    }


def _row_error(error: Tensor, truth: Tensor, mask: Tensor, floor: Tensor) -> Tensor:
    """Returns per row of the last axis (rms of the error - rms of the floor) / rms of the truth.

    A row that should be 0 gives 0 if its error is within the floor, else infinity.
    """
    norms = [torch.where(mask, x, 0.0).norm(dim=-1) for x in (error, floor, truth)]
    excess = (norms[0] - norms[1]).clamp(min=0)
    return torch.where(excess == 0, 0.0, excess / norms[2])


def _metric(
    name: str,
    own: tuple[float, tuple[int, ...] | None],
    baseline: float,
    floor: float | None,
    actual: Tensor,
    truth: Tensor,
) -> Metric:
    """Joins the kernel's (error, place) and the baseline's error; without a floor, no limit."""
    value, index = own
    limit = None if floor is None else FACTOR * baseline + floor
    pair = (None, None)
    if index is not None and len(index) == actual.dim():
        pair = (actual[index].item(), truth[index].item())
    return Metric(name, value, baseline, limit, index, *pair)


def _problems(actual: Tensor, expected: Tensor, counted: Tensor) -> list[str]:
    """Returns a sentence for each kind of element that is wrong whatever the tolerance."""
    if actual.numel() and not counted.any():
        return ["nothing was compared: every element is ignored"]
    missing = counted & _poisoned(actual)
    written = counted & ~missing
    kinds = {
        "never written (still poison)": missing,
        "NaN, the oracle is not": written & actual.isnan() & ~expected.isnan(),
        "not NaN, the oracle is": written & ~actual.isnan() & expected.isnan(),
        "infinite, the oracle is finite": written & actual.isinf() & expected.isfinite(),
        "not the oracle's infinity": written
        & expected.isinf()
        & ~actual.isnan()
        & (actual != expected),
    }
    return [
        f"{int(where.sum())} elements {what}, {_rows(where)}"
        for what, where in kinds.items()
        if where.any()
    ]


def _rows(where: Tensor) -> str:
    """Names the first rows (all axes but the last) that hold a marked element."""
    rows = where.any(-1).nonzero().tolist() if where.dim() > 1 else where.nonzero().tolist()
    shown = ", ".join(str(tuple(row)) for row in rows[:SHOWN_ROWS])
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return f"rows {shown}{more}"


def _plain(x: float | None) -> float | str | None:
    """Returns x, or its text if JSON has no such number."""
    return x if x is None or math.isfinite(x) else str(x)


def _check_arguments(
    actual: Tensor, oracle: Tensor, baseline: Tensor, floor: float | Tensor | None
) -> None:
    """Checks dtypes, shapes and the floor of `compare`."""
    if actual.dtype not in POISON_BITS:
        raise TypeError(f"actual is {actual.dtype}; {_allowed()}")
    for what, x in (("oracle", oracle), ("baseline", baseline)):
        if not x.is_floating_point():
            raise TypeError(f"{what} is {x.dtype}; allowed: floating-point tensors")
        if x.shape != actual.shape:
            raise ValueError(f"{what} has shape {tuple(x.shape)}, actual {tuple(actual.shape)}")
    if isinstance(floor, Tensor):
        if floor.shape != actual.shape or not bool((floor >= 0).all()):
            raise ValueError(
                f"floor has shape {tuple(floor.shape)}, actual {tuple(actual.shape)}; "
                "they must agree and every element be at least 0"
            )
    elif floor is not None and not (math.isfinite(floor) and floor >= 0):
        raise ValueError(f"floor is {floor}; allowed: None or a finite number of at least 0")
