# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention and its gradients in float64, and the same-precision torch yardstick.

Everything a kernel is judged by is computed here, from the textbook formulas, with no tiling and
no online softmax. Runs on any torch device; on CUDA, float32 needs torch's default matmul
precision ("highest"), because TF32 would make the oracle coarser than a kernel.

Shape suffixes: B batch, H query heads (of one chunk), M query rows, N keys, D head dimension of
q and k, E head dimension of v, C any of D and E.

Note [Excluded rows]
    Three cases for a row of K or V that query i must not see, whatever bits it holds:

    * of no sequence (beyond ``seqused_k``): it cannot reach any result. The same holds for rows of
      Q, dO and dLSE beyond ``seqused_q``.
    * of the sequence and finite: weight 0, an ordinary masked key.
    * of the sequence and NaN or Inf, whether or not another query sees it: a kernel that visits the
      tile multiplies P = 0 with it, and 0 x NaN is NaN on any tensor core; copies end where a
      sequence ends, not where a window does. The oracle computes the row as if the key were
      absent and flags it as *unspecified*; tests skip flagged rows and only those. Scores are
      selected before the row maximum, so a bad K alone does not matter to the forward: only a bad
      V flags a row of O, and LSE is always specified. In the gradients a bad K flags as well.

    NaN in a live input makes the row NaN; a score of +Inf does too (Inf - Inf), as in a kernel.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
Lengths = Tensor | Sequence[int] | None

CHUNK_SCORES = 1 << 24  # scores held at a time: 128 MiB in float64, about five such arrays live


@dataclass(frozen=True)
class Forward:
    """Result of `attention` (b, sq) or `attention_varlen` (one axis of total_q rows instead)."""

    out: Tensor  # (b, sq, h, dv) or (total_q, h, dv)
    lse: Tensor  # (b, h, sq) or (h, total_q), natural logarithm
    unspecified: Tensor  # bool, shape of lse: rows of out that See Note [Excluded rows] exempts

    @property
    def ignore(self) -> Tensor:
        """`unspecified` in the layout of out, (…, sq, h, 1): the mask `numerics.compare` takes."""
        return self.unspecified.transpose(-1, -2).unsqueeze(-1)


@dataclass(frozen=True)
class Gradients:
    """Gradients of q, k, v and the sink, in the layouts of their inputs.

    The two flags are None from `same_precision_backward`. A head with a flagged query row has an
    unspecified dsink as well. See Note [Excluded rows].
    """

    dq: Tensor  # (b, sq, h, d) or (total_q, h, d)
    dk: Tensor  # (b, sk, hk, d) or (total_k, hk, d)
    dv: Tensor  # (b, sk, hk, dv) or (total_k, hk, dv)
    dsink: Tensor | None  # (h,), None without a sink
    unspecified_q: Tensor | None = None  # bool (b, h, sq) or (h, total_q): rows of dq
    unspecified_k: Tensor | None = None  # bool (b, hk, sk) or (hk, total_k): rows of dk and dv

    @property
    def ignore_q(self) -> Tensor:
        """`unspecified_q` in the layout of dq, (…, sq, h, 1)."""
        return self.unspecified_q.transpose(-1, -2).unsqueeze(-1)

    @property
    def ignore_k(self) -> Tensor:
        """`unspecified_k` in the layout of dk and dv, (…, sk, hk, 1)."""
        return self.unspecified_k.transpose(-1, -2).unsqueeze(-1)


@dataclass(frozen=True)
class _Task:
    """Checked arguments of one dense problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    window: Window
    used_q: list[int]
    used_k: list[int]
    softcap: float
    sink: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class _Chunk:
    """Some query heads of one batch entry, in the working dtype, heads first."""

    b: int
    heads: slice
    kv: Tensor  # (H,) kv head of each query head
    q_HMD: Tensor
    k_HND: Tensor
    v_HNE: Tensor
    sink_H: Tensor | None
    visible_MN: Tensor
    used_M: Tensor  # bool: row lies within seqused_q


def visibility(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Says which query sees which key: bool (batch, seqlen_q, seqlen_k).

    Query i stands at key position p = i + seqused_k - seqused_q (bottom-right alignment: the last
    query sees the last key). It sees key j when p - left <= j <= p + right, i < seqused_q and
    j < seqused_k. None and -1 leave a side of the window open; any other number counts keys and
    may be negative: (-5, 8) sees p + 5 … p + 8, (-5, 3) sees nothing. `causal` caps right at 0.

    Raises ValueError or TypeError for lengths out of range and for windows that are not integers.
    """
    left, right = _check_window(window_size, causal)
    used_q = _check_lengths("seqused_q", seqused_q, batch, seqlen_q)
    used_k = _check_lengths("seqused_k", seqused_k, batch, seqlen_k)
    masks = torch.zeros(batch, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)[None, :]
    for b in range(batch):
        position = i + (used_k[b] - used_q[b])
        masks[b] = (i < used_q[b]) & (j < used_k[b])
        if left is not None:
            masks[b] &= j >= position - left
        if right is not None:
            masks[b] &= j <= position + right
    return masks


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Forward:
    """Computes O = softmax(mask(cap(scale * Q K^T))) V and its log-sum-exp in `dtype`.

    Args:
        q: (b, sq, hq, d), any floating dtype, any strides.
        k: (b, sk, hk, d); hq is a multiple of hk, query head h reads kv head h // (hq / hk).
        v: (b, sk, hk, dv).
        softmax_scale: factor of the scores; None means 1 / sqrt(d).
        causal, window_size, seqused_q, seqused_k: see `visibility`. seqused is (b,) integers.
        softcap: c > 0 replaces each scaled score s by c * tanh(s / c); 0 leaves it.
        sink: (hq,) one extra logit per query head, neither scaled nor capped. It adds exp(sink)
            to the denominator and has no value row, so it is part of LSE too.
        dtype: torch.float64 or torch.float32, of the arithmetic and the result.

    Returns Forward. A row that sees no key has O = 0 and LSE = -inf (= sink, if there is one);
    rows beyond seqused_q have O = 0 and LSE = -inf always. Zero sizes are allowed.
    See Note [Excluded rows] for NaN and Inf.

    Raises ValueError (shape, device, range) or TypeError (dtype, kind of argument).
    """
    task = _check(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softcap=softcap,
        sink=sink,
        dtype=dtype,
    )
    batch, seqlen_q, heads, _ = q.shape
    out = torch.zeros(batch, seqlen_q, heads, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=dtype, device=q.device)
    for chunk in _chunks(task, dtype):
        p_HMN, lse_HM, _ = _probabilities(chunk, task)
        out_HME = _contract(p_HMN, chunk.v_HNE, chunk.visible_MN)
        out[chunk.b, :, chunk.heads] = out_HME.transpose(0, 1)
        lse[chunk.b, chunk.heads] = lse_HM
    return Forward(out, lse, _hidden_bad_keys(task, _bad_rows(v)))


@torch.no_grad()
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, dlse: Tensor | None = None, **options
) -> Gradients:
    """Computes the gradients of sum(out * dout) + sum(lse * dlse) from the explicit formulas.

    P = exp(S - LSE); D = rowsum(O * dO) - dLSE; dP = dO V^T; dS = P * (dP - D), times
    1 - (S / c)^2 with softcap c; dV = P^T dO; dQ = scale * dS K; dK = scale * dS^T Q;
    dsink = -sum over rows of exp(sink - LSE) * D. See paper, section 2 (FlashAttention-2).

    Args:
        q, k, v, options: as `attention`.
        dout: (b, sq, hq, dv), gradient of out.
        dlse: (b, hq, sq), gradient of lse; None means 0. A row whose LSE is -inf ignores it.

    Returns Gradients in `dtype`. Rows that see nothing and rows that nothing sees get 0.
    Raises ValueError or TypeError like `attention`.
    """
    task = _check(q, k, v, **options)
    _check_upstream(task, dout, dlse)
    dq, dk, dv = (torch.zeros(x.shape, dtype=task.dtype, device=x.device) for x in (q, k, v))
    dsink = None if task.sink is None else dq.new_zeros(q.shape[2])
    nan_rows = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.bool, device=q.device)
    for chunk in _chunks(task, task.dtype):
        dout_HME, dlse_HM = _upstream(chunk, dout, dlse, task.dtype)
        p_HMN, lse_HM, slope_HMN = _probabilities(chunk, task)
        out_HME = _contract(p_HMN, chunk.v_HNE, chunk.visible_MN)
        d_HM = (out_HME * dout_HME).sum(-1) - dlse_HM
        ds_HMN = p_HMN * (dout_HME @ chunk.v_HNE.mT - d_HM[..., None]) * slope_HMN
        ds_HMN = torch.where(chunk.visible_MN, ds_HMN, 0.0)
        dq_HMD = task.scale * _contract(ds_HMN, chunk.k_HND, chunk.visible_MN)
        dk_HND = task.scale * _contract(ds_HMN.mT, chunk.q_HMD, chunk.visible_MN.mT)
        dv_HNE = _contract(p_HMN.mT, dout_HME, chunk.visible_MN.mT)
        dq[chunk.b, :, chunk.heads] = dq_HMD.transpose(0, 1)
        dk[chunk.b].index_add_(1, chunk.kv, dk_HND.transpose(0, 1))
        dv[chunk.b].index_add_(1, chunk.kv, dv_HNE.transpose(0, 1))
        if dsink is not None:
            p_sink_HM = torch.exp(chunk.sink_H[:, None] - lse_HM)
            dsink_HM = torch.where(lse_HM == -math.inf, 0.0, -p_sink_HM * d_HM)
            dsink[chunk.heads] += dsink_HM.sum(-1)
        nan_rows[chunk.b, chunk.heads] = out_HME.isnan().any(-1) | lse_HM.isnan()
    flags = _unspecified_gradients(task, dout, dlse, nan_rows)
    return Gradients(dq, dk, dv, dsink, *flags)


def stored_output_error(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, out_dtype: torch.dtype, **options
) -> Gradients:
    """Computes what rounding O to `out_dtype` between the passes does to the gradients.

    A flash backward takes D = rowsum(O * dO) from the stored O. D enters the gradients as -dLSE
    does, so the deviation is the gradient of dLSE = rowsum((O - rounded O) * dO) alone. It is
    part of the algorithm and not of torch's, so it belongs into the floor of gradients.

    Args: as `attention_backward`, without dlse.
    Returns Gradients that hold deviations; their absolute values are the floor's second part.
    Raises ValueError or TypeError like `attention`.
    """
    exact = attention(q, k, v, **options).out
    rounding = exact - exact.to(out_dtype).to(exact.dtype)
    dlse = (rounding * dout.to(exact.dtype)).sum(-1).transpose(1, 2)
    return attention_backward(q, k, v, torch.zeros_like(dout), dlse=dlse, **options)


def statistics_error(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options) -> Gradients:
    """Computes what a rounding of D = rowsum(O * dO) in float32 does to the gradients.

    Where one key has all of P, dP and D are sums of the same products, and dS is their difference:
    0 but for roundings, since the two are added up in different orders. D is taken to be off by
    2**-24 of the sum of its terms' magnitudes. That, too, is part of the algorithm.

    Args, result and errors as `stored_output_error`, without out_dtype.
    """
    exact = attention(q, k, v, **options).out
    terms = exact * dout.to(exact.dtype)
    dlse = 2.0**-24 * terms.abs().sum(-1).transpose(1, 2)
    return attention_backward(q, k, v, torch.zeros_like(dout), dlse=dlse, **options)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    *,
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    **options,
) -> Forward:
    """Applies `attention` to each of the sequences packed along the first axis.

    Args:
        q: (total_q, hq, d); k: (total_k, hk, d); v: (total_k, hk, dv).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers, starting at 0 and never falling;
            sequence b owns rows cu_seqlens[b] up to cu_seqlens[b + 1].
        seqused_q, seqused_k: (batch,) integers, how many of its rows each sequence uses.
        options: softmax_scale, causal, window_size, softcap, sink, dtype of `attention`.

    Returns Forward with out (total_q, hq, dv), lse and unspecified (hq, total_q). Rows that no
    sequence uses have O = 0 and LSE = -inf.

    Raises ValueError or TypeError for bad lengths and like `attention`.
    """
    parts = _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    dtype = options.get("dtype", torch.float64)
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)
    unspecified = torch.zeros_like(lse, dtype=torch.bool)
    for rows, keys, used in parts:
        one = attention(q[rows][None], k[keys][None], v[keys][None], **used, **options)
        out[rows] = one.out[0]
        lse[:, rows] = one.lse[0]
        unspecified[:, rows] = one.unspecified[0]
    return Forward(out, lse, unspecified)


def attention_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    *,
    dlse: Tensor | None = None,
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    **options,
) -> Gradients:
    """Applies `attention_backward` to each packed sequence and adds up dsink.

    Args: as `attention_varlen`; dout (total_q, hq, dv), dlse (hq, total_q) or None.
    Returns Gradients with the packed layouts; flags (hq, total_q) and (hk, total_k).
    Raises ValueError or TypeError like `attention_varlen`.
    """
    parts = _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if dout.shape != (*q.shape[:2], v.shape[2]):
        raise ValueError(f"dout has shape {tuple(dout.shape)}, out {(*q.shape[:2], v.shape[2])}")
    dtype, sink = options.get("dtype", torch.float64), options.get("sink")
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dsink = None if sink is None else dq.new_zeros(q.shape[1])
    flag_q = torch.zeros(q.shape[1], q.shape[0], dtype=torch.bool, device=q.device)
    flag_k = torch.zeros(k.shape[1], k.shape[0], dtype=torch.bool, device=k.device)
    for rows, keys, used in parts:
        upstream = {"dlse": None if dlse is None else dlse[None, :, rows], **used}
        tensors = (q[rows][None], k[keys][None], v[keys][None], dout[rows][None])
        one = attention_backward(*tensors, **upstream, **options)
        dq[rows], dk[keys], dv[keys] = one.dq[0], one.dk[0], one.dv[0]
        flag_q[:, rows], flag_k[:, keys] = one.unspecified_q[0], one.unspecified_k[0]
        if dsink is not None:
            dsink += one.dsink
    return Gradients(dq, dk, dv, dsink, flag_q, flag_k)


@torch.no_grad()
def same_precision(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The yardstick: matmul, softmax, matmul by torch in the input dtype.

    Scores, capped scores, P and O are each rounded to the dtype of q (k and v must share it).
    LSE is float32, the log-sum-exp of the rounded scores: what torch's softmax keeps inside.
    Excluded rows are cleared first; masked keys are multiplied with P = 0 like in a kernel, so
    rows that the oracle flags as unspecified may be NaN here.

    Args: q, k, v and options as `attention`, except `dtype`, which is that of q.
    Returns (out (b, sq, hq, dv) in the dtype of q, lse (b, hq, sq) float32).
    Raises ValueError or TypeError like `attention`.
    """
    task = _check_same_precision(q, k, v, options)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, device=q.device)
    for chunk in _chunks(task, q.dtype):
        inputs = (chunk.q_HMD, chunk.k_HND, chunk.v_HNE, chunk.sink_H)
        out_HME, lse_HM = _torch_attention(*inputs, chunk, task)
        out[chunk.b, :, chunk.heads] = out_HME.transpose(0, 1)
        lse[chunk.b, chunk.heads] = lse_HM
    return out, lse


def same_precision_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, dlse: Tensor | None = None, **options
) -> Gradients:
    """The yardstick's gradients, by torch autograd through `same_precision` in the input dtype.

    Only the sum over the query heads that share a kv head is kept in float32 before it is rounded.

    Args: as `attention_backward`, except `dtype`, which is that of q.
    Returns Gradients: dq, dk, dv in the dtype of q, dsink in float32, no flags.
    Raises ValueError or TypeError like `attention`.
    """
    task = _check_same_precision(q, k, v, options)
    _check_upstream(task, dout, dlse)
    dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (q, k, v))
    dsink = None if task.sink is None else dq.new_zeros(q.shape[2])
    for chunk in _chunks(task, q.dtype):
        upstream = _upstream(chunk, dout, dlse, q.dtype)
        leaves = [chunk.q_HMD, chunk.k_HND, chunk.v_HNE]
        if chunk.sink_H is not None:
            leaves.append(chunk.sink_H)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in leaves]
            sink_H = leaves[3] if len(leaves) == 4 else None
            results = _torch_attention(*leaves[:3], sink_H, chunk, task)
            grads = torch.autograd.grad(results, leaves, (upstream[0], upstream[1].float()))
        dq[chunk.b, :, chunk.heads] = grads[0].float().transpose(0, 1)
        dk[chunk.b].index_add_(1, chunk.kv, grads[1].float().transpose(0, 1))
        dv[chunk.b].index_add_(1, chunk.kv, grads[2].float().transpose(0, 1))
        if dsink is not None:
            dsink[chunk.heads] += grads[3].float()
    return Gradients(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsink)


def _chunks(task: _Task, dtype: torch.dtype) -> Iterator[_Chunk]:
    """Cuts the problem into pieces of about CHUNK_SCORES scores, one head at the least."""
    batch, seqlen_q, heads, _ = task.q.shape
    seqlen_k, heads_kv = task.k.shape[1:3]
    step = max(1, CHUNK_SCORES // max(1, seqlen_q * seqlen_k))
    kv_of_head = torch.arange(heads, device=task.q.device) // (heads // heads_kv)
    for b in range(batch):
        visible_MN = visibility(
            1,
            seqlen_q,
            seqlen_k,
            causal=task.causal,
            window_size=task.window,
            seqused_q=[task.used_q[b]],
            seqused_k=[task.used_k[b]],
            device=task.q.device,
        )[0]
        used_M = torch.arange(seqlen_q, device=task.q.device) < task.used_q[b]
        for first in range(0, heads, step):
            some = slice(first, min(first + step, heads))
            kv = kv_of_head[some]
            yield _Chunk(
                b=b,
                heads=some,
                kv=kv,
                q_HMD=task.q[b, :, some].to(dtype).transpose(0, 1),
                k_HND=task.k[b][:, kv].to(dtype).transpose(0, 1),
                v_HNE=task.v[b][:, kv].to(dtype).transpose(0, 1),
                sink_H=None if task.sink is None else task.sink[some].to(dtype),
                visible_MN=visible_MN,
                used_M=used_M,
            )


def _probabilities(chunk: _Chunk, task: _Task) -> tuple[Tensor, Tensor, Tensor | float]:
    """Returns P (0 where masked), LSE, and d(capped score) / d(score), which is 1 without cap."""
    s_HMN = task.scale * (chunk.q_HMD @ chunk.k_HND.mT)
    slope_HMN = 1.0
    if task.softcap:
        unit_HMN = torch.tanh(s_HMN / task.softcap)
        s_HMN, slope_HMN = task.softcap * unit_HMN, 1 - unit_HMN**2
    s_HMN = torch.where(chunk.visible_MN, s_HMN, -math.inf)
    top_HM = s_HMN.new_full(s_HMN.shape[:2], -math.inf)
    if s_HMN.shape[2]:
        top_HM = s_HMN.amax(-1)
    if chunk.sink_H is not None:
        top_HM = torch.maximum(top_HM, chunk.sink_H[:, None])
    top_HM = torch.where(top_HM == -math.inf, 0.0, top_HM)
    e_HMN = torch.exp(s_HMN - top_HM[..., None])
    sum_HM = e_HMN.sum(-1)
    if chunk.sink_H is not None:
        sum_HM = sum_HM + torch.exp(chunk.sink_H[:, None] - top_HM)
    lse_HM = torch.where(chunk.used_M, top_HM + torch.log(sum_HM), -math.inf)
    p_HMN = e_HMN / torch.where(sum_HM == 0, 1.0, sum_HM)[..., None]
    # A row whose sum is NaN would otherwise be NaN at its masked keys too.
    return torch.where(chunk.visible_MN, p_HMN, 0.0), lse_HM, slope_HMN


def _contract(w_HMN: Tensor, x_HNC: Tensor, visible_MN: Tensor) -> Tensor:
    """Sums w[m, n] * x[n] over visible pairs only; w is 0 elsewhere.

    Rows x[n] with NaN or Inf are left out of the matmul and added one by one, to the rows m that
    see them: an excluded row is selected away, never multiplied.
    """
    finite_HN = x_HNC.isfinite().all(-1)
    total_HMC = w_HMN @ torch.where(finite_HN[..., None], x_HNC, 0.0)
    live_N = ~finite_HN.all(0) & visible_MN.any(0)
    for n in live_N.nonzero().flatten().tolist():
        term_HMC = w_HMN[:, :, n, None] * x_HNC[:, n, None, :]
        counts_HM = visible_MN[:, n] & ~finite_HN[:, n, None]
        total_HMC += torch.where(counts_HM[..., None], term_HMC, 0.0)
    return total_HMC


def _upstream(
    chunk: _Chunk, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns dO (H, M, E), 0 beyond seqused_q, and dLSE (H, M) of a chunk."""
    dout_HME = dout[chunk.b, :, chunk.heads].to(dtype).transpose(0, 1)
    dout_HME = torch.where(chunk.used_M[:, None], dout_HME, 0.0)
    if dlse is None:
        return dout_HME, dout_HME.new_zeros(dout_HME.shape[:2])
    return dout_HME, dlse[chunk.b, chunk.heads].to(dtype)


def _torch_attention(
    q_HMD: Tensor,
    k_HND: Tensor,
    v_HNE: Tensor,
    sink_H: Tensor | None,
    chunk: _Chunk,
    task: _Task,
) -> tuple[Tensor, Tensor]:
    """Returns (O, float32 LSE) by torch operations in the dtype of the tensors, differentiable."""
    visible_MN, used_M = chunk.visible_MN, chunk.used_M
    seen_N1 = visible_MN.any(0)[:, None]
    k_HND, v_HNE = torch.where(seen_N1, k_HND, 0.0), torch.where(seen_N1, v_HNE, 0.0)
    q_HMD = torch.where(used_M[:, None], q_HMD, 0.0)
    s_HMN = (q_HMD @ k_HND.mT) * task.scale
    if task.softcap:
        s_HMN = torch.tanh(s_HMN / task.softcap) * task.softcap
    s_HMN = torch.where(visible_MN, s_HMN, -math.inf)
    live_M = visible_MN.any(1)
    if sink_H is not None:
        s_HMN = torch.cat([s_HMN, sink_H[:, None, None].expand(-1, s_HMN.shape[1], 1)], -1)
        live_M = used_M
    p_HMN = torch.softmax(s_HMN, -1)[..., : visible_MN.shape[1]]  # NaN in rows that see nothing
    out_HME = torch.where(visible_MN, p_HMN, 0.0) @ v_HNE
    return out_HME, torch.where(live_M, torch.logsumexp(s_HMN.float(), -1), -math.inf)


def _bad_rows(*tensors: Tensor) -> Tensor:
    """Returns bool (b, s, h): the row holds a NaN or Inf in one of the (b, s, h, …) tensors."""
    bad = torch.zeros(tensors[0].shape[:3], dtype=torch.bool, device=tensors[0].device)
    for x in tensors:
        bad |= ~x.isfinite().all(-1)
    return bad


def _task_visibility(task: _Task) -> Tensor:
    """Returns bool (b, sq, sk)."""
    return visibility(
        task.q.shape[0],
        task.q.shape[1],
        task.k.shape[1],
        causal=task.causal,
        window_size=task.window,
        seqused_q=task.used_q,
        seqused_k=task.used_k,
        device=task.q.device,
    )


def _used_rows(used: list[int], seqlen: int, device: torch.device) -> Tensor:
    """Returns bool (b, seqlen): row lies within its used length."""
    lengths = torch.tensor(used, dtype=torch.long, device=device)
    return torch.arange(seqlen, device=device) < lengths[:, None]


def _hidden_bad_keys(task: _Task, bad_k: Tensor) -> Tensor:
    """Returns bool (b, h, sq): a bad key of the sequence is masked for this query.

    bad_k: bool (b, sk, hk). Rows beyond seqused_q are never flagged: they must be 0 and -inf.
    """
    batch, seqlen_q, heads, _ = task.q.shape
    flags = torch.zeros(batch, heads, seqlen_q, dtype=torch.bool, device=task.q.device)
    if not bad_k.any():
        return flags
    visible = _task_visibility(task)
    bad_live = bad_k & _used_rows(task.used_k, bad_k.shape[1], visible.device)[..., None]
    hidden = ~visible & _used_rows(task.used_q, seqlen_q, visible.device)[..., None]
    counts = hidden.float() @ bad_live.float()  # (b, sq, hk)
    per_head = (counts > 0).repeat_interleave(heads // bad_k.shape[2], 2)
    return flags | per_head.transpose(1, 2)


def _unspecified_gradients(
    task: _Task, dout: Tensor, dlse: Tensor | None, nan_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the flags of dq rows, bool (b, h, sq), and of dk and dv rows, bool (b, hk, sk).

    nan_rows: bool (b, h, sq), rows with NaN in O or LSE. A flagged row of dq may have a NaN P or
    D in a kernel, which spoils every key; a row that is NaN by right, or holds a bad Q, dO or
    dLSE, spoils the keys that it does not see.
    """
    batch, seqlen_q, heads, _ = task.q.shape
    seqlen_k, heads_kv = task.k.shape[1:3]
    flag_k = torch.zeros(batch, heads_kv, seqlen_k, dtype=torch.bool, device=task.q.device)
    flag_q = _hidden_bad_keys(task, _bad_rows(task.k, task.v))
    bad_q = _bad_rows(task.q, dout).transpose(1, 2) | nan_rows
    if dlse is not None:
        bad_q = bad_q | ~dlse.isfinite()
    bad_q = bad_q & _used_rows(task.used_q, seqlen_q, bad_q.device)[:, None]
    if not (bad_q | flag_q).any():
        return flag_q, flag_k
    visible = _task_visibility(task)
    flag_q = flag_q | (bad_q & ~visible.any(2)[:, None])
    grouped = (batch, heads_kv, heads // heads_kv, seqlen_q)
    bad_group, flag_group = bad_q.reshape(grouped).any(2), flag_q.reshape(grouped).any(2)
    flag_k = (bad_group.float() @ (~visible).float() > 0) | flag_group.any(2, keepdim=True)
    return flag_q, flag_k & _used_rows(task.used_k, seqlen_k, flag_k.device)[:, None]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    seqused_q: Lengths = None,
    seqused_k: Lengths = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> _Task:
    """Checks everything about one dense problem and fills in defaults."""
    if dtype not in (torch.float64, torch.float32):
        raise TypeError(f"dtype is {dtype}; allowed: torch.float64, torch.float32")
    _check_tensors(q, k, v, 4, "(batch, seqlen, heads, head_dim)")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v {k.shape[0]}; they must be equal")
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale is {softmax_scale}; allowed: None or a finite number")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap is {softcap}; allowed: 0 (off) or a positive finite number")
    if sink is not None:
        _check_sink(sink, q)
    _check_window(window_size, causal)
    return _Task(
        q=q,
        k=k,
        v=v,
        scale=float(scale),
        causal=causal,
        window=window_size,
        used_q=_check_lengths("seqused_q", seqused_q, q.shape[0], q.shape[1]),
        used_k=_check_lengths("seqused_k", seqused_k, q.shape[0], k.shape[1]),
        softcap=float(softcap),
        sink=sink,
        dtype=dtype,
    )


def _check_same_precision(q: Tensor, k: Tensor, v: Tensor, options: dict) -> _Task:
    """As `_check`; the arithmetic is in the dtype of q, which k and v must share."""
    if "dtype" in options:
        raise TypeError("same_precision takes no dtype: it computes in the dtype of q")
    task = _check(q, k, v, **options)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must be equal")
    return task


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, rank: int, layout: str) -> None:
    """Checks kind, rank, device, heads and head dimensions of the three inputs."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} is {what}; allowed: a floating-point torch.Tensor")
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; use one device")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} may differ in head_dim only")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] < 1 or v.shape[-1] < 1:
        dims = tuple(x.shape[-1] for x in (q, k, v))
        raise ValueError(f"head_dim of q, k, v is {dims}; q and k must agree, all at least 1")
    heads, heads_kv = q.shape[-2], k.shape[-2]
    if heads < 1 or heads_kv < 1 or heads % heads_kv:
        raise ValueError(f"q has {heads} heads, k and v {heads_kv}; need a positive multiple")


def _check_sink(sink: Tensor, q: Tensor) -> None:
    """Checks that the sink is one logit per query head."""
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise TypeError("sink must be a floating-point torch.Tensor or None")
    if sink.shape != (q.shape[2],) or sink.device != q.device:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)} on {sink.device}; "
            f"expected ({q.shape[2]},) on {q.device}, one logit per query head"
        )


def _check_upstream(task: _Task, dout: Tensor, dlse: Tensor | None) -> None:
    """Checks the shapes of the gradients of out and lse."""
    batch, seqlen_q, heads, _ = task.q.shape
    expected = {"dout": (batch, seqlen_q, heads, task.v.shape[3]), "dlse": (batch, heads, seqlen_q)}
    for name, x in (("dout", dout), ("dlse", dlse)):
        if x is None and name == "dlse":
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point torch.Tensor")
        if x.shape != expected[name] or x.device != task.q.device:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} on {x.device}; "
                f"expected {expected[name]} on {task.q.device}"
            )


def _check_window(window_size: Window, causal: bool) -> Window:
    """Returns (left, right) with None for an open side and the causal cap applied."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window_size!r}; expected (left, right)") from None
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window_size is {window_size!r}; allowed: integers, None or -1 = open")
    left = None if left == -1 else left
    right = None if right == -1 else right
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _integers(name: str, values: Tensor | Sequence[int]) -> list[int]:
    """Returns a 1-D integer tensor or sequence as a list."""
    tensor = torch.as_tensor(values)
    if tensor.dim() != 1 or (tensor.numel() and tensor.dtype not in (torch.int32, torch.int64)):
        raise TypeError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
            "expected one axis of int32 or int64"
        )
    return [int(value) for value in tensor.tolist()]


def _check_lengths(name: str, lengths: Lengths, batch: int, seqlen: int) -> list[int]:
    """Returns one used length per batch entry, seqlen where none is given."""
    if lengths is None:
        return [seqlen] * batch
    used = _integers(name, lengths)
    if len(used) != batch:
        raise ValueError(f"{name} has {len(used)} entries, the batch {batch}")
    if any(not 0 <= value <= seqlen for value in used):
        raise ValueError(f"{name} is {used}; each must lie in 0 … {seqlen}")
    return used


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    seqused_q: Lengths,
    seqused_k: Lengths,
) -> list[tuple[slice, slice, dict]]:
    """Returns per sequence its rows of q, its rows of k and v, and its used lengths."""
    _check_tensors(q, k, v, 3, "(total, heads, head_dim)")
    edges = {}
    for name, cu, total in (("q", cu_seqlens_q, len(q)), ("k", cu_seqlens_k, len(k))):
        edges[name] = _integers(f"cu_seqlens_{name}", cu)
        bad = not edges[name] or edges[name][0] != 0 or edges[name][-1] > total
        if bad or edges[name] != sorted(edges[name]):
            raise ValueError(
                f"cu_seqlens_{name} is {edges[name]}; it must start at 0, never fall "
                f"and end at {total} or before"
            )
    batch = len(edges["q"]) - 1
    if len(edges["k"]) != batch + 1:
        raise ValueError(
            f"cu_seqlens_q describes {batch} sequences, cu_seqlens_k {len(edges['k']) - 1}"
        )
    used_q = None if seqused_q is None else _integers("seqused_q", seqused_q)
    used_k = None if seqused_k is None else _integers("seqused_k", seqused_k)
    for name, used in (("seqused_q", used_q), ("seqused_k", used_k)):
        if used is not None and len(used) != batch:
            raise ValueError(f"{name} has {len(used)} entries, the batch {batch}")
    return [
        (
            slice(edges["q"][b], edges["q"][b + 1]),
            slice(edges["k"][b], edges["k"][b + 1]),
            {
                "seqused_q": None if used_q is None else [used_q[b]],
                "seqused_k": None if used_k is None else [used_k[b]],
            },
        )
        for b in range(batch)
    ]
