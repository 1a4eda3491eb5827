# SPDX-License-Identifier: Apache-2.0
"""Torch functions in the place of a stage's kernels: same arguments, any device, no compiler.

`Kernels` puts them under the op with its gradients, so that all around the kernels can be tested,
and faults can be planted in each.
"""

import types

import torch
from flash_ladder.common import contract_gradients, gradients, reference
from flash_ladder.common import launch as launching
from flash_ladder.common.envelope import check
from flash_ladder.common.stage import Part, Stage

NAME = "backward_torch"


def preprocess(mO, mdO, mLSE, mdLSE, mStats, mdQ_accum):
    mStats.copy_(gradients.statistics(mO, mLSE, mdO, mdLSE))
    mdQ_accum.zero_()


def probabilities(mQ, mK, mStats, scale_log2):
    lse_log2 = mStats[..., 0, :].flatten(2)
    scores = mQ.float().transpose(1, 2) @ mK.float().permute(0, 2, 3, 1)
    return torch.exp2(scores * scale_log2 - lse_log2[..., None])


def backward(mQ, mK, mV, mdO, mStats, mdQ_accum, mdK, mdV, scale_log2, softmax_scale):
    q, k, v, dout = (x.float().transpose(1, 2) for x in (mQ, mK, mV, mdO))
    p = probabilities(mQ, mK, mStats, scale_log2)
    ds = p * (dout @ v.mT - mStats[..., 1, :].flatten(2)[..., None])
    mdQ_accum += (ds @ k).transpose(1, 2)
    mdK.copy_((softmax_scale * ds.mT @ q).transpose(1, 2))
    mdV.copy_((p.mT @ dout).transpose(1, 2))


def postprocess(mdQ_accum, mdQ, softmax_scale):
    mdQ.copy_(mdQ_accum * softmax_scale)


def _check_loadable(*tensors):
    assert all(launching.loadable(x) is x for x in tensors), "no kernel can take these"


def make_stage() -> Stage:
    """Stage 07 with a backward part of its own, whose kernel is `backward`."""
    stage = Stage(7)
    names = ("preprocess", NAME, "postprocess")
    changes = {"PARTS": names, "BACKWARD": {64: NAME, 128: NAME}}
    stage.config = types.SimpleNamespace(**{**vars(stage.config), **changes})
    made = Part(7, NAME)
    made.config = types.SimpleNamespace(
        NAME="backward by torch",
        ENVELOPE=stage.config.ENVELOPE,
        ARCHS=stage.config.ARCHS,
        KEY_TILES={64: 1, 128: 1},
        TILE=128,
        plan=stage.config.plan,
    )
    stage._parts[NAME] = made
    return stage


class Kernels:
    """`by_kind`: the functions in use, to be replaced; `calls`: (kind, arguments) in order.

    modes: the `execution` that was open at each call; compiled: kinds that stay the stage's own
    kernels, for tensors on a GPU.
    """

    def __init__(self, monkeypatch, compiled=()):
        self.stage, self.compiled = make_stage(), compiled
        self.calls, self.modes = [], []
        self.by_kind = {f.__name__: f for f in (preprocess, backward, postprocess)}
        on_cpu = lambda *given, **_: check(*given, need_cuda=False)
        for module in (gradients, contract_gradients):
            monkeypatch.setattr(module, "forward", self.forward)
            monkeypatch.setattr(module, "kernel_for", self.kernel_for)
            if not compiled:
                monkeypatch.setattr(module, "check", on_cpu)
        monkeypatch.setattr(gradients, "start", self.start)
        if not compiled:
            monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def kernel_for(self, source, *where):
        if source.kind in self.compiled:
            return launching.kernel_for(source, *where)
        return source.kind

    def forward(self, stage, problem, q, k, v):
        _check_loadable(q, k, v)
        truth = reference.attention(q, k, v, softmax_scale=problem.softmax_scale)
        return truth.out.to(q.dtype), truth.lse.float()

    def start(self, kind, *arguments):
        if not isinstance(kind, str):
            launching.start(kind, *arguments)
            return
        _check_loadable(*(x for x in arguments if isinstance(x, torch.Tensor)))
        self.calls.append((kind, arguments))
        self.modes.append(launching.current_execution())
        self.by_kind[kind](*(x.detach() if hasattr(x, "detach") else x for x in arguments))

    @property
    def kinds(self) -> list[str]:
        """What was started."""
        return [kind for kind, _ in self.calls]
