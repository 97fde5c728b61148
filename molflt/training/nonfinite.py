"""A step whose loss or gradient is not finite: who has it, and a file from which it can be repeated.

The file holds the batch, the weights before the step, the configuration and the step's place in the run, in
plain values and tensors, and is read with `weights_only=True`; `molflt.training.replay` repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch_geometric.data import Data

from molflt.archive import write_atomically
from molflt.config import Config, config_to_dict
from molflt.errors import InputError
from molflt.training.step import Shares

Value = TypeVar("Value")

FORMAT, VERSION = "molflt-nonfinite", 1
_SHOWN_SIDS = 16


@dataclass(frozen=True)
class NonFiniteStep:
    """What one process saw of a step."""

    step: int
    """Optimiser steps before it."""
    rank: int
    """Number of the process."""
    loss: float
    """Its own loss, in units of the objective."""
    sids: list[int]
    """Systems of its batch."""

    @property
    def loss_is_finite(self) -> bool:
        """Whether only gradients are at fault."""
        return -float("inf") < self.loss < float("inf")


def suspects(steps: Sequence[NonFiniteStep]) -> list[NonFiniteStep]:
    """The processes whose own loss is not finite; all where each is, as gradients are summed over them."""
    return [step for step in steps if not step.loss_is_finite] or list(steps)


def describe(steps: Sequence[NonFiniteStep]) -> str:
    """What is not finite, at which step and in which systems."""
    found = suspects(steps)
    sids = [sid for step in found for sid in step.sids]
    shown = ", ".join(map(str, sids[:_SHOWN_SIDS])) + (", ..." if len(sids) > _SHOWN_SIDS else "")
    what = (
        "a gradient is not finite"
        if found[0].loss_is_finite
        else f"the loss is {', '.join(str(step.loss) for step in found)}"
    )
    return f"{what} at step {steps[0].step} (sids {shown})"


def gradient_norm(parameters: Sequence[Parameter]) -> Tensor:
    """Norm of all their gradients together; not finite where one of them is not."""
    return get_total_norm([value.grad for value in parameters if value.grad is not None])


def reproducer_name(step: NonFiniteStep) -> str:
    """Name of the file that a process saves."""
    return f"step-{step.step}-rank-{step.rank}.pt"


def save_reproducer(
    folder: Path,
    step: NonFiniteStep,
    config: Config,
    batch: Data,
    state: Mapping[str, Tensor],
    delta_pos_weight: float,
    shares: Shares,
) -> None:
    """Write what `molflt replay` needs to `folder`."""

    def plain(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            key: value.detach().cpu().clone() for key, value in tensors.items() if isinstance(value, Tensor)
        }

    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": config_to_dict(config),
        "step": asdict(step),
        "delta_pos_weight": delta_pos_weight,
        "shares": list(shares),
        "batch": plain(batch.to_dict()),
        "state_dict": plain(state),
    }
    write_atomically(content, folder / reproducer_name(step))


def stop_at(
    steps: Sequence[NonFiniteStep],
    own: NonFiniteStep,
    config: Config,
    batch: Data,
    state: Mapping[str, Tensor],
    delta_pos_weight: float,
    shares: Shares,
) -> NoReturn:
    """Save the reproducer where this process's step is to blame, and end training with an `InputError`.

    Args:
        steps: of all processes.
        own: of this one; what follows is its part of the step.
        config, batch, state, delta_pos_weight, shares: as in `save_reproducer`.
    """
    folder = Path(config.training.output) / "nonfinite"
    blamed = suspects(steps)
    if own.rank in {step.rank for step in blamed}:
        save_reproducer(folder, own, config, batch, state, delta_pos_weight, shares)
    raise InputError(
        f"{describe(steps)}; lower optim.lr, look at these records (molflt replay "
        f"{folder / reproducer_name(blamed[0])}) or leave such steps out (training.on_nonfinite skip)"
    )


def gather(value: Value) -> list[Value]:
    """That of each process; all of them have to call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
