# SPDX-License-Identifier: Apache-2.0
"""Transforms of torch around a stage's op and its model: refused, with what to do instead."""

import pytest
import torch
from flash_ladder import load
from flash_ladder.common.transforms import refusal
from torch.autograd import forward_ad

X = torch.zeros(1, 128, 1, 64).bfloat16()
MAPPED = r"cannot be mapped by torch\.vmap: give it the batch as its first axis"
REVERSE = r"cannot be differentiated by torch\.func \(grad, vjp, jacrev\); k is a tensor of one"
FORWARD = r"has no forward-mode derivative .*; k has a tangent"


def _dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "vmap": (lambda f: torch.vmap(f)(X[None]), MAPPED),
    "func.vmap": (lambda f: torch.func.vmap(f)(X[None]), MAPPED),
    "grad": (lambda f: torch.func.grad(lambda k: f(k).sum())(X), REVERSE),
    "vjp": (lambda f: torch.func.vjp(f, X), REVERSE),
    "jvp": (lambda f: torch.func.jvp(f, (X,), (X,)), FORWARD),
    "forward_ad": (lambda f: _dual(f, X), FORWARD),
}
INSTEAD = {
    1: r": it has no backward pass \(stage 07 lifts this\), call it outside$",
    7: r": use torch\.autograd\.grad or backward\(\) on tensors that require grad, or torch's own",
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("number", [1, 7, 8])
def test_transforms_of_the_op_are_refused(number, name):
    transform, words = TRANSFORMS[name]
    instead = "" if words is MAPPED else INSTEAD[min(number, 7)]
    with pytest.raises(TypeError, match=f"stage {number:02d} {words}.*{instead}"):
        transform(lambda k: load(number).attention(X, k, X))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_the_models_are_refused(name):
    transform, words = TRANSFORMS[name]
    instead = "" if words is MAPPED else "records no derivatives, call it outside"
    stage, part = load(7), load(7).part("backward_1cta")
    for simulate in (stage.simulate, lambda q, k, v: part.simulate(q, k, v, X)):
        with pytest.raises(TypeError, match=f"{words}.*{instead}"):
            transform(lambda k, simulate=simulate: simulate(X, k, X).out)
    with pytest.raises(TypeError, match=words.replace("k ", "dout ")):
        transform(lambda dout: part.simulate(X, X, X, dout).out)


def test_a_tensor_that_no_transform_has_wrapped_is_taken():
    """Also within a transform of something else, or with an open level of derivatives."""
    seen = []

    def function(y):
        seen.append(refusal({"q": X, "out": None}))
        return y.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),))
    torch.vmap(function)(torch.ones(2, 2))
    _dual(function, torch.ones(2))
    assert seen == [None] * 4


def test_what_is_outermost_counts():
    words = []

    def function(y):
        words.append(refusal({"y": y}))
        return y.sum()

    torch.vmap(torch.func.grad(function))(torch.ones(2, 2))
    torch.func.grad(lambda y: torch.vmap(function)(y).sum())(torch.ones(2, 2))
    assert ["differentiated" in words[0], "mapped" in words[1]] == [True, True]
