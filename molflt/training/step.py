"""The loss of one training step, on one process or as the part of one of several.

With several processes the gradients of their losses are averaged. For that average to be the gradient of
the mean over all systems (energies) and over all free atoms (Δpos) of the step, as one process would have it,
each process scales its own means by its share of what they are over:

    loss_r = W n_r / n  mean_r |E - y| / energy_std  +  w W m_r / m  mean_r |Δpos error| / delta_pos_std

with n_r of n systems and m_r of m free atoms on process r of W.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from molflt.models.graphormer3d import Graphormer3D
from molflt.training.objective import delta_pos_loss, energy_loss


class Shares(NamedTuple):
    """What a process's means count for in a step; 1 and 1 for a lone process."""

    systems: Tensor
    """W n_r / n."""
    free_atoms: Tensor
    """W m_r / m."""
    systems_per_process: Tensor
    """n / W, the weight of a process's loss in a mean over steps."""


class StepResult(NamedTuple):
    """What a process's part of a step gives."""

    loss: Tensor
    """The process's part of the loss; its gradients are NaN where it is not finite."""
    energy: Tensor
    """[B], eV."""
    delta_pos_mae: Tensor | None
    """Mean absolute error of a component of Δpos over the free atoms, Å; None without a Δpos head."""


def free_atoms(batch: Data) -> Tensor:
    """Which atoms [A] were free in the relaxation: all where nothing is said."""
    fixed = batch.get("fixed")
    if fixed is None:
        return torch.ones_like(batch.atomic_numbers, dtype=torch.bool)
    return ~fixed


def shares_of(batch: Data, num_processes: int, repeated: bool) -> Shares:
    """The shares of this process's batch; with several, all have to call it.

    Args:
        batch: the process's batch.
        num_processes: W.
        repeated: the batch has been in the epoch and counts for nothing: it only keeps step.
    """
    own = torch.stack([batch.y_relaxed.new_tensor(len(batch.y_relaxed)), free_atoms(batch).sum()]).double()
    own = torch.zeros_like(own) if repeated else own
    total = own.clone()
    if num_processes > 1:
        torch.distributed.all_reduce(total)
    share = num_processes * own / total.clamp(min=1.0)
    if num_processes == 1:
        # A batch without free atoms has no Δpos loss anyway.
        share = torch.ones_like(share)
    return Shares(share[0].float(), share[1].float(), total[0] / num_processes)


def step_result(model: Graphormer3D, batch: Data, delta_pos_weight: float, shares: Shares) -> StepResult:
    """Loss and errors of a batch.

    Args:
        model: the network.
        batch: with `y_relaxed`, and `delta_pos` where the model has a Δpos head.
        delta_pos_weight: w.
        shares: of the process.
    """
    energy, delta_pos = model(batch)
    loss = shares.systems * energy_loss(energy, batch.y_relaxed.to(energy.dtype), model.energy_std)
    delta_pos_mae = None
    if delta_pos is not None:
        scaled = delta_pos_loss(delta_pos, batch.delta_pos, ~free_atoms(batch), model.delta_pos_std)
        loss = loss + delta_pos_weight * shares.free_atoms * scaled
        delta_pos_mae = scaled.detach() * model.delta_pos_std
    if loss.requires_grad:
        # The gradient of an infinite loss may be finite; made NaN it is seen, and by all processes.
        factor = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        loss.register_hook(lambda gradient: gradient * factor)
    return StepResult(loss, energy.detach(), delta_pos_mae)
