# SPDX-License-Identifier: Apache-2.0
"""Named, seeded inputs: ordinary ones, and those made to break an attention kernel.

Random numbers come from numpy on the CPU, so a name and a seed give the same bits wherever the
tensors end up. Blocks are 128 keys, visited from the last to the first, as the kernels do.
"""

import difflib
import math
import pathlib
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # keys a kernel visits at a time
LOG2_E = math.log2(math.e)
ROPE_BASE = 500_000.0  # Llama 3; slow channels turn by less than 0.2 rad in 64 k positions
OUTLIER_CHANNELS = 4
OUTLIER_SCALE = 2.0
_PAD = 8  # elements of padding: 16 bytes of bf16 or fp16, so strides stay multiples of 16 bytes
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention call and the gradient that its backward starts from.

    With cu_seqlens_q and cu_seqlens_k among the options there is one axis of rows, without b.
    """

    q: Tensor  # (b, sq, h, d)
    k: Tensor  # (b, sk, hk, d)
    v: Tensor  # (b, sk, hk, dv)
    dout: Tensor  # (b, sq, h, dv)
    softmax_scale: float | None = None  # None means 1 / sqrt(d)
    options: dict = field(default_factory=dict)  # mask and lengths, as `masks.mask_of` takes them
    name: str = ""
    seed: int = 0

    @property
    def shape_text(self) -> str:
        """For example ``b2 sq256 sk512 h8/2 d128 bf16`` (query / kv heads; d/dv if they differ).

        ``n3`` instead of ``b2`` counts packed sequences; sq and sk are then the rows of all.
        """
        *batch, seqlen_q, heads, dim = self.q.shape
        seqlen_k, heads_kv, dim_v = self.v.shape[-3:]
        size = f"b{batch[0]}" if batch else f"n{len(self.options['cu_seqlens_q']) - 1}"
        head_text = f"h{heads}" if heads == heads_kv else f"h{heads}/{heads_kv}"
        dim_text = f"d{dim}" if dim == dim_v else f"d{dim}/{dim_v}"
        dtype = _SHORT.get(self.q.dtype, str(self.q.dtype).removeprefix("torch."))
        return f"{size} sq{seqlen_q} sk{seqlen_k} {head_text} {dim_text} {dtype}"

    def to(self, device: torch.device | str) -> "Problem":
        """The same on another device."""
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x
        tensors = {name: move(getattr(self, name)) for name in ("q", "k", "v", "dout")}
        options = {name: move(value) for name, value in self.options.items()}
        return replace(self, **tensors, options=options)


@dataclass(frozen=True)
class LogitStatistics:
    """What the scaled scores of a problem look like to an online softmax (no mask)."""

    max_abs: float  # largest |scaled score|, natural units
    std: float  # standard deviation of the scaled scores
    rising: float  # share of (row, block after the first) where the running max rises at all
    rising_far: float  # the same, by more than the threshold in the log2 domain


@dataclass(frozen=True)
class Generator:
    """A recipe for inputs. `make` is the way to call it."""

    name: str
    description: str
    function: Callable[["_Size", np.random.Generator], "_Draft"]
    adversarial: bool
    needs: str | None = None  # "lengths": only for kernels that take seqused_q and seqused_k
    surround: bool = False  # tensors are views into storage full of NaN and Inf


@dataclass(frozen=True)
class _Size:
    """The shape asked for."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int


@dataclass
class _Draft:
    """What a recipe returns: float32 arrays, layout (b, s, h, d), and used lengths."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    seqused_q: np.ndarray | None = None
    seqused_k: np.ndarray | None = None


def make(
    name: str,
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    heads_kv: int | None = None,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Problem:
    """Makes the inputs that the generator `name` describes; see GENERATORS.

    Args:
        batch, seqlen_q, seqlen_k: 0 or more.
        heads, heads_kv: query and kv heads; heads is a multiple of heads_kv (default: equal).
        head_dim: a positive multiple of 8, of q, k and v alike.
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        seed: same name, shape and seed give the same bits on every device.
        device: where the tensors go.

    Returns Problem. Raises ValueError (unknown name, bad size) or TypeError (dtype).
    """
    if name not in GENERATORS:
        near = difflib.get_close_matches(name, GENERATORS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no generator {name!r}; allowed: {', '.join(GENERATORS)}.{hint}")
    if dtype not in _SHORT:
        raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, _SHORT))}")
    heads_kv = heads if heads_kv is None else heads_kv
    if min(batch, seqlen_q, seqlen_k) < 0:
        raise ValueError(f"batch {batch}, seqlen_q {seqlen_q}, seqlen_k {seqlen_k}: 0 or more")
    if heads < 1 or heads_kv < 1 or heads % heads_kv:
        raise ValueError(f"heads is {heads}, heads_kv {heads_kv}; need a positive multiple")
    if seed < 0:
        raise ValueError(f"seed is {seed}; allowed: 0 or more")
    if head_dim < 8 or head_dim % 8:
        raise ValueError(f"head_dim is {head_dim}; allowed: positive multiples of 8")
    generator = GENERATORS[name]
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    draft = generator.function(_Size(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim), rng)
    tensors = [
        torch.from_numpy(x).to(dtype).to(device) for x in (draft.q, draft.k, draft.v, draft.dout)
    ]
    if generator.surround:
        tensors = [_surround(x) for x in tensors]
    used = [
        None if x is None else torch.from_numpy(x.astype(np.int32)).to(device)
        for x in (draft.seqused_q, draft.seqused_k)
    ]
    options = {f"seqused_{side}": x for side, x in zip("qk", used) if x is not None}
    return Problem(*tensors, options=options, name=name, seed=seed)


@torch.no_grad()
def logit_statistics(
    problem: Problem, *, block: int = BLOCK, threshold: float = 8.0
) -> LogitStatistics:
    """Measures the scaled scores, unmasked, in float32.

    block: keys visited at a time, last block first. threshold: in the log2 domain; stage 06
    leaves a row's maximum alone while it would rise by no more than this.
    Raises ValueError for a problem without scores.
    """
    q, k = problem.q.float(), problem.k.float()
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    if not q.numel() or not k.numel():
        raise ValueError(f"{problem.shape_text} has no scores")
    scale = 1 / math.sqrt(dim) if problem.softmax_scale is None else problem.softmax_scale
    largest = total = squares = 0.0
    rises = far = steps = 0
    for b in range(batch):
        for h in range(heads):
            s_MN = scale * (q[b, :, h] @ k[b, :, h // (heads // heads_kv)].T)
            largest = max(largest, s_MN.abs().max().item())
            total += s_MN.double().sum().item()
            squares += s_MN.double().square().sum().item()
            tops = [part.amax(1) for part in reversed(s_MN.split(block, 1))]
            running = torch.stack(tops).cummax(0).values
            rise = (running[1:] - running[:-1]) * LOG2_E
            rises += int((rise > 0).sum())
            far += int((rise > threshold).sum())
            steps += rise.numel()
    count = batch * heads * seqlen_q * seqlen_k
    std = math.sqrt(max(0.0, squares / count - (total / count) ** 2))
    return LogitStatistics(largest, std, rises / max(1, steps), far / max(1, steps))


def load_qkv(
    path: str | pathlib.Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Problem:
    """Loads a user's own tensors from .npz, .safetensors or .pt (weights only).

    The file holds q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv) and optionally
    dout (b, sq, h, dv); without it, dout is Gaussian with seed 0. All floating point;
    dtype=None keeps theirs, which must then be one and the same. What requires grad is detached.

    Returns Problem, named after the file. Raises FileNotFoundError, ImportError (safetensors not
    installed), TypeError (not tensors, not floating point, mixed dtypes) or ValueError (unknown
    suffix, unreadable file, missing key, shapes that do not fit).
    """
    path = pathlib.Path(path)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors, ".pt": _read_pt}
    if path.suffix not in readers:
        raise ValueError(f"{path.name} ends in {path.suffix!r}; allowed: {', '.join(readers)}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        found = readers[path.suffix](path)
    except (TypeError, ImportError):
        raise
    except Exception as wrong:  # each reader has errors of its own
        reason = str(wrong).partition("\n")[0] or type(wrong).__name__
        raise ValueError(f"{path.name} cannot be read as {path.suffix}: {reason}") from wrong
    _check_loaded(path.name, found, dtype)
    dtype = found["q"].dtype if dtype is None else dtype
    if "dout" not in found:
        shape = (*found["q"].shape[:3], found["v"].shape[3])
        found["dout"] = torch.from_numpy(_normal(np.random.default_rng(0), *shape))
    tensors = [found[key].detach().to(dtype).to(device) for key in ("q", "k", "v", "dout")]
    return Problem(*tensors, name=path.stem)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns standard normal float32 numbers."""
    return rng.standard_normal(shape, dtype=np.float32)


def _signs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns -1 or +1 in float32."""
    return rng.choice(np.array([-1, 1], dtype=np.float32), shape)


def _gaussian(size: _Size, rng: np.random.Generator) -> _Draft:
    """Independent standard normal numbers; scaled scores have standard deviation 1."""
    return _Draft(
        q=_normal(rng, size.batch, size.seqlen_q, size.heads, size.head_dim),
        k=_normal(rng, size.batch, size.seqlen_k, size.heads_kv, size.head_dim),
        v=_normal(rng, size.batch, size.seqlen_k, size.heads_kv, size.head_dim),
        dout=_normal(rng, size.batch, size.seqlen_q, size.heads, size.head_dim),
    )


def _rope(x: np.ndarray, first: int) -> np.ndarray:
    """Rotates channel pairs (c, c + d/2) of (b, s, h, d) by position, starting at `first`."""
    half = x.shape[3] // 2
    rate = ROPE_BASE ** (-np.arange(half) / half)
    angle = (first + np.arange(x.shape[1]))[:, None, None] * rate
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _llm_like(size: _Size, rng: np.random.Generator) -> _Draft:
    """RoPE, a first token that attracts, and outlier channels among the slowly turning ones.

    The mean score of the first token runs from 2 to 12 nats over the kv heads, times a log-normal
    factor per query. Measured (CPU, seed 0, sq 256, sk 1024, d 128, bf16, 1 to 32 heads,
    `logit_statistics`): standard deviation 2.3 to 2.4, largest score 20 to 62; the running max
    rises in 32 to 36 % of (row, block) steps, by more than 8 (log2) in 0.2 to 1.7 %.
    """
    draft = _gaussian(size, rng)
    half = size.head_dim // 2
    channels = np.arange(half - min(OUTLIER_CHANNELS, half), half)
    draft.q[..., channels] *= OUTLIER_SCALE
    draft.k[..., channels] *= OUTLIER_SCALE
    strength = 2 + 10 * (np.arange(size.heads_kv) + 0.5) / size.heads_kv
    per_channel = np.sqrt(strength * math.sqrt(size.head_dim) / len(channels))
    per_channel = per_channel.astype(np.float32)[:, None]
    keen = np.exp(0.5 * _normal(rng, size.batch, size.seqlen_q, size.heads, 1))
    draft.q[..., channels] += keen * np.repeat(per_channel, size.heads // size.heads_kv, 0)
    draft.k[:, :1, :, channels] = per_channel
    draft.v[:, :1] *= 0.1  # the sink token carries little
    draft.q = _rope(draft.q, size.seqlen_k - size.seqlen_q)
    draft.k = _rope(draft.k, 0)
    return draft


def _logits_near_120(size: _Size, rng: np.random.Generator) -> _Draft:
    """q and k are +-c times one sign pattern, with c * c * sqrt(d) = 120, and 2 % noise."""
    draft = _gaussian(size, rng)
    level = math.sqrt(120 / math.sqrt(size.head_dim))
    pattern = _signs(rng, size.head_dim)
    sign_q = _signs(rng, size.batch, size.seqlen_q, size.heads, 1)
    sign_k = _signs(rng, size.batch, size.seqlen_k, size.heads_kv, 1)
    sign_k[:, :, ::2] = 1  # even kv heads: a whole row is near +120 or near -120
    draft.q = (level * (sign_q * pattern + 0.02 * draft.q)).astype(np.float32)
    draft.k = (level * (sign_k * pattern + 0.02 * draft.k)).astype(np.float32)
    return draft


def _dominant_key(size: _Size, rng: np.random.Generator) -> _Draft:
    """Each query points at one random key, which takes nearly all the weight."""
    draft = _gaussian(size, rng)
    if not size.seqlen_k:
        return draft
    target = rng.integers(0, size.seqlen_k, (size.batch, size.seqlen_q, size.heads))
    entry = np.arange(size.batch)[:, None, None]
    kv_head = np.arange(size.heads) // (size.heads // size.heads_kv)
    draft.q = 0.1 * draft.q + 30 / math.sqrt(size.head_dim) * draft.k[entry, target, kv_head]
    draft.q = draft.q.astype(np.float32)
    return draft


def _equal_rows(size: _Size, rng: np.random.Generator) -> _Draft:
    """All queries of a head are equal and all its keys are: O is the mean of V."""
    draft = _gaussian(size, rng)
    draft.q[:] = draft.q[:, :1]
    draft.k[:] = draft.k[:, :1]
    return draft


def _staircase(size: _Size, rng: np.random.Generator, *, rising: bool) -> _Draft:
    """Scores step by 8 nats (11.5 in log2) from block to block, with noise of 0.25 nats."""
    draft = _gaussian(size, rng)
    pattern = _signs(rng, size.head_dim)
    blocks = math.ceil(size.seqlen_k / BLOCK)
    block = np.arange(size.seqlen_k) // BLOCK
    level = 8.0 * (blocks - 1 - block if rising else block)
    per_channel = (level / math.sqrt(size.head_dim)).astype(np.float32)[:, None, None]
    draft.q = (pattern + 0.25 * draft.q).astype(np.float32)
    draft.k = (per_channel * pattern + 0.25 * draft.k).astype(np.float32)
    return draft


def _ascending_max(size: _Size, rng: np.random.Generator) -> _Draft:
    """Block 0, visited last, has the largest scores."""
    return _staircase(size, rng, rising=True)


def _descending_max(size: _Size, rng: np.random.Generator) -> _Draft:
    """The last block, visited first, has the largest scores."""
    return _staircase(size, rng, rising=False)


def _excluded_nan(size: _Size, rng: np.random.Generator) -> _Draft:
    """Used lengths from half of the storage up to one row less; NaN, Inf and -Inf beyond."""
    draft = _gaussian(size, rng)
    low_q, low_k = size.seqlen_q // 2, size.seqlen_k // 2
    draft.seqused_q = rng.integers(low_q, max(size.seqlen_q, low_q + 1), size.batch)
    draft.seqused_k = rng.integers(low_k, max(size.seqlen_k, low_k + 1), size.batch)
    bad = np.array([np.nan, np.inf, -np.inf], dtype=np.float32)
    for b in range(size.batch):
        for x, used in (
            (draft.q, draft.seqused_q),
            (draft.dout, draft.seqused_q),
            (draft.k, draft.seqused_k),
            (draft.v, draft.seqused_k),
        ):
            rest = x[b, used[b] :]
            rest[:] = np.resize(bad, rest.shape)
    return draft


def _surround(x: Tensor) -> Tensor:
    """Copies (b, s, h, d) into larger storage of NaN and Inf and returns the view of it.

    Every stride but the last is a multiple of 16 bytes, as is the address of the first element.
    """
    batch, seqlen, heads, dim = x.shape
    storage = x.new_full((batch + 2, seqlen + 2 * _PAD, heads + 2, dim + 2 * _PAD), math.nan)
    storage[..., ::2] = math.inf
    view = storage[1 : batch + 1, _PAD : _PAD + seqlen, 1 : heads + 1, _PAD : _PAD + dim]
    view.copy_(x)
    return view


def _read_npz(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads the arrays of interest; numpy knows no bfloat16."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in ("q", "k", "v", "dout") if key in file}
    for key, array in arrays.items():
        if array.dtype.kind != "f":
            raise TypeError(
                f"{path.name}: {key} is {array.dtype}; allowed: floating point "
                "(save bfloat16 as float32 and pass dtype=torch.bfloat16)"
            )
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _read_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads with the optional package safetensors."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError(
            f"{path.name} needs the package safetensors: pip install safetensors"
        ) from None
    return load_file(path)


def _read_pt(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads a dictionary of tensors, refusing pickled code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise TypeError(
            f"{path.name} is not a plain dict of tensors, and other objects are not loaded: "
            "they could run code"
        ) from None
    if not isinstance(found, dict):
        raise TypeError(f"{path.name} holds a {type(found).__name__}; expected a dict of tensors")
    return found


def _check_loaded(name: str, found: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    """Checks keys, kinds and shapes of a loaded file."""
    missing = [key for key in ("q", "k", "v") if key not in found]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}; it holds {sorted(map(str, found))}")
    keys = [key for key in ("q", "k", "v", "dout") if key in found]
    for key in keys:
        x = found[key]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: {key} is {what}; allowed: a floating-point tensor")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: {key} has shape {tuple(x.shape)}; expected (batch, seqlen, heads, dim)"
            )
    if dtype is None and len({found[key].dtype for key in keys}) > 1:
        dtypes = ", ".join(f"{key} {found[key].dtype}" for key in keys)
        raise TypeError(f"{name} mixes dtypes ({dtypes}); pass dtype=")
    q, k, v = (found[key].shape for key in ("q", "k", "v"))
    if q[0] != k[0] or k[:3] != v[:3] or q[3] != k[3] or not k[2] or q[2] % k[2]:
        raise ValueError(
            f"{name}: q {tuple(q)}, k {tuple(k)}, v {tuple(v)} do not fit together: "
            "(b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv) with h a multiple of hk"
        )
    if "dout" in found and found["dout"].shape != (*q[:3], v[3]):
        raise ValueError(f"{name}: dout {tuple(found['dout'].shape)} is not {(*q[:3], v[3])}")


_RECIPES = (
    Generator(
        "gaussian",
        "Independent standard normal numbers: scaled scores have standard deviation 1.",
        _gaussian,
        adversarial=False,
    ),
    Generator(
        "llm_like",
        "RoPE, a first token that attracts, outlier channels.",
        _llm_like,
        adversarial=False,
    ),
    Generator(
        "logits_near_120",
        "All scaled scores near +120 or -120; in even kv heads a row has one sign throughout.",
        _logits_near_120,
        adversarial=True,
    ),
    Generator(
        "dominant_key",
        "Each query has one key, anywhere, that takes nearly all the weight.",
        _dominant_key,
        adversarial=True,
    ),
    Generator(
        "equal_rows",
        "All queries equal and all keys equal: uniform weights, O is the mean of V.",
        _equal_rows,
        adversarial=True,
    ),
    Generator(
        "ascending_max",
        "The running max rises by about 11.5 (log2) with every block visited, last to first.",
        _ascending_max,
        adversarial=True,
    ),
    Generator(
        "descending_max",
        "The first block visited, the last in memory, holds the max; each later one falls.",
        _descending_max,
        adversarial=True,
    ),
    Generator(
        "surrounded_by_nan",
        "Gaussian views into larger storage that is NaN and Inf everywhere else.",
        _gaussian,
        adversarial=True,
        surround=True,
    ),
    Generator(
        "excluded_nan",
        "Used lengths shorter than the storage; NaN and Inf in every row beyond them.",
        _excluded_nan,
        adversarial=True,
        needs="lengths",
    ),
)
GENERATORS: dict[str, Generator] = {recipe.name: recipe for recipe in _RECIPES}
