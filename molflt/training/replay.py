"""Repeats a training step that was not finite, from the file that training saved, and says where it fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch_geometric.data import Data

from molflt.archive import read_archive
from molflt.checkpoint import model_from_config
from molflt.config import config_from_dict
from molflt.errors import InputError
from molflt.training.nonfinite import FORMAT, VERSION, NonFiniteStep
from molflt.training.seeds import seed_step
from molflt.training.step import Shares, step_result


@dataclass(frozen=True)
class Replay:
    """What a repeated step gave."""

    step: NonFiniteStep
    """The step as it was reported."""
    loss: float
    """The loss now."""
    weights: list[str]
    """Parameters and buffers that are not finite before the step."""
    fields: list[str]
    """Fields of the batch that are not finite."""
    first_module: str
    """The first part of the network whose output is not finite; empty where there is none."""
    energies: dict[int, float]
    """Energies that are not finite by sid, eV."""
    gradients: list[str]
    """Parameters whose gradient is not finite."""


def replay(path: str | os.PathLike[str]) -> Replay:
    """Repeat the step in `path` on the CPU in float32, with its seeds.

    Raises `InputError` for a file that is missing, damaged or none of a training.
    """
    content = read_archive(Path(path))
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise InputError(f"{path} is no step that molflt saved; give a file from a run folder's nonfinite/")
    config = config_from_dict(content["config"], source=f"{path} (its configuration)")
    step = NonFiniteStep(**content["step"])
    with isolate_rng():
        model = model_from_config(config)
        model.load_state_dict(content["state_dict"])
        batch = Data(**content["batch"])
        model.train()
        failed: list[str] = []
        for name, part in model.named_modules():
            part.register_forward_hook(lambda _, __, output, name=name: _watch(name, output, failed))
        seed_step(config.seed, step.rank, step.step)
        shares = Shares(*content["shares"])
        output = step_result(model, batch, content["delta_pos_weight"], shares)
        output.loss.backward()
    energies = output.energy.tolist()
    return Replay(
        step=step,
        loss=output.loss.item(),
        weights=_not_finite(content["state_dict"]),
        fields=_not_finite(content["batch"]),
        first_module=failed[0] if failed else "",
        energies={
            sid: energy
            for sid, energy in zip(step.sids, energies, strict=True)
            if not torch.isfinite(torch.tensor(energy))
        },
        gradients=_not_finite(
            {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        ),
    )


def _watch(name: str, output: Any, failed: list[str]) -> None:
    tensors = output if isinstance(output, tuple) else (output,)
    if any(isinstance(value, Tensor) and not value.isfinite().all() for value in tensors):
        failed.append(name or "the network")


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, value in tensors.items() if not value.isfinite().all()]
