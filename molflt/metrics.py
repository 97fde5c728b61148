"""Energy metrics of OC20 IS2RE as torchmetrics classes, usable outside molflt.

    energy MAE = (1/n) sum_i |E_i - y_i|                    eV
    EwT        = (1/n) sum_i [ |E_i - y_i| < threshold ]    share between 0 and 1, strictly below

Both keep sums and a count as float64 and integer states with sum reduction, so unequal batches and
several ranks give the value of one batch. (Chanussot et al., ACS Catal. 11, 6059 (2021).)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def absolute_error(energy: Tensor, target: Tensor) -> Tensor:
    """|energy - target| in float64, any shape, eV.

    Raises ValueError where the shapes differ: `(N,)` against `(N, 1)` would broadcast to `(N, N)`.
    """
    if energy.shape != target.shape:
        raise ValueError(
            f"energy and target must have one shape, got {tuple(energy.shape)} and {tuple(target.shape)}; "
            "reshape one of them (for instance with .view(-1))"
        )
    return (energy.detach().double() - target.detach().double()).abs()


class EnergyMAE(Metric):
    """Mean absolute energy error, eV; NaN before the first update."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    error_sum: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("error_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, energy: Tensor, target: Tensor) -> None:
        """Add systems: predicted and target energies of one shape, eV."""
        error = absolute_error(energy, target)
        self.error_sum += error.sum()
        self.count += error.numel()

    def compute(self) -> Tensor:
        """The mean over all systems seen, eV, float64."""
        return self.error_sum / self.count


class EnergyWithinThreshold(Metric):
    """Share of systems with an absolute energy error strictly below `threshold`; NaN before the first update.

    threshold: eV; OC20's EwT has 0.02.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    within: Tensor
    count: Tensor

    def __init__(self, threshold: float = 0.02, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not threshold > 0:
            raise ValueError(f"threshold must be positive, got {threshold}; OC20's EwT has 0.02 eV")
        self.threshold = threshold
        self.add_state("within", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, energy: Tensor, target: Tensor) -> None:
        """Add systems: predicted and target energies of one shape, eV."""
        error = absolute_error(energy, target)
        self.within += (error < self.threshold).sum()
        self.count += error.numel()

    def compute(self) -> Tensor:
        """The share over all systems seen, float64."""
        return self.within.double() / self.count
