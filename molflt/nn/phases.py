"""Phases theta = 2 pi xi.r of positions under frequencies, and their cosines and sines."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

SPLITTER = 2.0**13 + 1
CACHED_ELEMENTS = 2**20
"""Phases that a CPU's caches hold together with their cosines and sines."""


def split_high_low(x: Float[Tensor, "*S"]) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
    """x as a sum of a part of 11 significant bits (in float32), which TF32 holds exactly, and the small rest.

    Veltkamp's splitting; finite for |x| below 1e34 in float32.
    """
    scaled = SPLITTER * x
    high = scaled - (scaled - x)
    return high, x - high


def split_matmul(left: Float[Tensor, "*S N X"], right: Float[Tensor, "*T X R"]) -> Float[Tensor, "*U N R"]:
    """left @ right as high high + high low + low high: no less exact in TF32 than the product in float32."""
    left_high, left_low = split_high_low(left)
    right_high, right_low = split_high_low(right)
    left = torch.cat((left_high, left_high, left_low), dim=-1)
    return left @ torch.cat((right_high, right_low, right_high), dim=-2)


def phases(
    points: Float[Tensor, "*B N X"], frequencies: Float[Tensor, "*G H R X"]
) -> Float[Tensor, "*C H N R"]:
    """theta = 2 pi xi.r as one batched matrix product, in the frequencies' precision (at least float32).

    A phase of 100 rad needs all of float32's digits, but users let float32 products run in TF32 with 11 bits
    (`torch.set_float32_matmul_precision("high")`), or under autocast with 8. So autocast is off, and the
    factors are split, except on CPUs, whose products stay in float32.
    """
    dtype = torch.promote_types(frequencies.dtype, torch.float32)
    product = torch.matmul if points.device.type == "cpu" else split_matmul
    with torch.autocast(points.device.type, enabled=False):
        points, weight = points.to(dtype), (2 * math.pi * frequencies.to(dtype)).mT
        if frequencies.ndim > 3:
            return product(points.unsqueeze(-3), weight)
        # All graphs share the frequencies: one product per head over all tokens, heads first in memory.
        theta = product(points.flatten(0, -2), weight)
        return theta.unflatten(1, points.shape[:-1]).movedim(0, -3)


class CosineAndSine(torch.autograd.Function):
    """[cos theta, sin theta]; the backward pass reads both from the result and computes neither again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(theta: Tensor) -> Tensor:
        if theta.numel() < CACHED_ELEMENTS or theta.device.type != "cpu":
            return torch.cat((theta.cos(), theta.sin()), dim=-1)
        # Some rows at a time, whose cosines and sines stay in cache.
        rows = theta.flatten(0, -2)
        both = rows.new_empty(len(rows), 2 * rows.shape[-1])
        size = max(1, CACHED_ELEMENTS // (8 * rows.shape[-1]))
        for part, angles in zip(both.split(size), rows.split(size), strict=True):
            part.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))
        return both.unflatten(0, theta.shape[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        cosine, sine = ctx.saved_tensors[0].chunk(2, dim=-1)
        along_cosine, along_sine = grad_outputs[0].chunk(2, dim=-1)
        return torch.addcmul(cosine * along_sine, sine, along_cosine, value=-1)


def cosine_and_sine(theta: Float[Tensor, "B H N R"]) -> Float[Tensor, "B H N 2*R"]:
    """[cos theta, sin theta], with graphs or with heads first in memory, as theta is."""
    # Traces can not hold the function, and forward mode does not differentiate it more than once.
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if traced or forward_ad._current_level >= 0:
        return torch.cat((theta.cos(), theta.sin()), dim=-1)
    function = CosineAndSine.apply if torch.is_grad_enabled() else CosineAndSine.forward
    if theta.is_contiguous():
        return function(theta)
    return function(theta.transpose(0, 1)).transpose(0, 1)
