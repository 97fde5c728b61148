"""A warning, once, where attention's normaliser is negative or so small that epsilon stands in for it."""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CALLS_BETWEEN_CHECKS = 16


class VanishingNormalizerWarning(UserWarning):
    """A normaliser is negative, or smaller than epsilon, which stands in for it."""


class NormalizerAlarm:
    """Looks at the normalisers of the first call and of every 16th from there, and warns at most once.

    Looking costs a synchronisation on an accelerator, which is why most calls are skipped. Compiled and
    exported code does not look at all. Positive random features need no alarm: their normaliser is one.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.raised = False

    def __call__(
        self, normalizer: Float[Tensor, "B H N 1"], atom_mask: Bool[Tensor, "B N"] | None, eps: float
    ) -> None:
        """Warns if a real query's normaliser is below `eps`."""
        if torch.compiler.is_compiling() or self.raised:
            return
        self.calls += 1
        if self.calls % CALLS_BETWEEN_CHECKS != 1:
            return
        vanishing = normalizer.detach() < eps
        if atom_mask is not None:
            vanishing = vanishing & atom_mask[:, None, :, None]
        count = int(vanishing.sum())
        if count > 0:
            self.raised = True
            warnings.warn(
                f"the attention normaliser is negative or below eps={eps:g} at {count} of "
                f"{vanishing.numel()} queries and heads: their output is noise or zero; use "
                "PositiveRandomFeatures, more random features, or a larger offset of ReLUFeatures "
                "(shown once per layer)",
                VanishingNormalizerWarning,
                stacklevel=3,
            )
