"""The training objective and its schedules.

    loss = mean_b |E_b - y_b| / energy_std
         + w mean_{i free, x} |d_ix - delta_pos_ix| / delta_pos_std

`w` goes linearly from its first to its last value over training, as Graphormer-3D has it for IS2RE
(Shi et al., arXiv 2203.04810). The learning rate rises linearly and then falls to zero with a cosine
(Loshchilov & Hutter, arXiv 1608.03983) or a power of what is left (linearly in Graphormer), or stays.
"""

from __future__ import annotations

import math

from torch import Tensor

from molflt.config import Schedule


def energy_loss(energy: Tensor, target: Tensor, energy_std: Tensor) -> Tensor:
    """Mean absolute energy error [B] against [B], eV, in units of `energy_std`, eV."""
    return (energy - target).abs().mean() / energy_std


def delta_pos_loss(delta_pos: Tensor, target: Tensor, fixed: Tensor, delta_pos_std: Tensor) -> Tensor:
    """Mean absolute error per component of Δpos over the atoms that are not fixed.

    delta_pos, target: A X, Å; fixed: A, true where the atom was held in the relaxation; delta_pos_std: Å.
    Zero, with zero gradient, for a batch without free atoms.
    """
    free = ~fixed
    error = (delta_pos - target).abs().mean(dim=-1)
    return error.masked_fill(fixed, 0.0).sum() / free.sum().clamp(min=1) / delta_pos_std


def linear_weight(step: int, total_steps: int, ends: tuple[float, float]) -> float:
    """The weight at `step` of `total_steps`: the first of `ends` at step 0, the second at the last step."""
    first, last = ends
    return first + (last - first) * min(step / max(total_steps - 1, 1), 1.0)


def learning_rate_factor(
    step: int, total_steps: int, warmup_steps: int, schedule: Schedule = "cosine", power: float = 1.0
) -> float:
    """Share of the peak learning rate at optimiser step `step`, counted from 0.

    Linear over the first `warmup_steps` (never zero: the first step has 1 / (warmup_steps + 1)), then, of the
    share p of the remaining steps that is over, (1 + cos(pi p)) / 2, (1 - p)^power or 1. The first two reach
    zero at `total_steps`, one after the last.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if schedule == "constant":
        return 1.0
    return (
        (1.0 - progress) ** power if schedule == "polynomial" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
