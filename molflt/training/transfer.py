"""Weights of another training to start from: which are taken over, and which of them may be left out.

The two networks need not agree: another target has another head, another architecture other layers. What is
missing on either side, or has another shape, has to be named by a pattern; nothing is left out silently. The
scales and element references of the targets are never taken over: they belong to the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from molflt.checkpoint import load_checkpoint
from molflt.config import Config, flat_settings
from molflt.errors import InputError
from molflt.models.graphormer3d import Graphormer3D

DATA_SCALES = ("energy_mean", "energy_std", "delta_pos_std", "element_references")
"""Buffers that the new data set."""
MEANINGFUL = ("data.radius", "data.max_neighbors", "model.")
"""Settings, or sections of them, that weights depend on."""
_SHOWN = 4


@dataclass(frozen=True)
class Transfer:
    """Names of weights and buffers, each list in the order of the network."""

    loaded: list[str]
    """Taken over."""
    new: list[str]
    """Of the new network, newly initialised: named, and so left as they are."""
    unused: list[str]
    """Of the checkpoint, named, and without a place in the new network or not wanted there."""
    differences: tuple[str, ...] = ()
    """Settings that have another value than those weights were trained with."""

    def lines(self) -> list[str]:
        """What was and what was not loaded, for the reader."""
        lines = [f"{len(self.loaded)} weights and buffers loaded"]
        for title, names in (("newly initialised", self.new), ("left out of the checkpoint", self.unused)):
            lines += [f"{title}: {name}" for name in names]
        return lines + [f"trained otherwise: {text}" for text in self.differences]


def plan_transfer(new: Mapping[str, Tensor], old: Mapping[str, Tensor], skip: Sequence[str]) -> Transfer:
    """Compare two state dicts.

    Args:
        new: of the network to train.
        old: of the checkpoint.
        skip: patterns (`*`, `?`, `[...]`) of names that may be missing or differ, and are not taken over.

    Raises:
        InputError: names differ that no pattern covers, or a pattern covers none.
    """
    skipped = {name for name in {*new, *old} if any(fnmatchcase(name, pattern) for pattern in skip)}
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in skipped):
            raise InputError(f"training.init_skip has {pattern!r}, which is the name of no weight")
    compared = [name for name in new if name not in DATA_SCALES and name not in skipped]
    problems = {
        "missing in the checkpoint": [name for name in compared if name not in old],
        "of another shape there": [
            name for name in compared if name in old and old[name].shape != new[name].shape
        ],
        "unknown to the new network": [
            name for name in old if name not in new and name not in skipped and name not in DATA_SCALES
        ],
    }
    found = [f"{_shorten(names)} ({what})" for what, names in problems.items() if names]
    if found:
        raise InputError(
            f"weights do not fit: {'; '.join(found)}; name them in training.init_skip to go without"
        )
    return Transfer(
        loaded=compared,
        new=[name for name in new if name in skipped],
        unused=[name for name in old if name in skipped],
    )


@torch.no_grad()
def initialize_from(model: Graphormer3D, config: Config, checkpoint: str, skip: Sequence[str]) -> Transfer:
    """Copy a checkpoint's weights and buffers (its averages and frequencies) into a network.

    Args:
        model: the network, with its data's scales set.
        config: its configuration.
        checkpoint: file, or name of one shipped with molflt.
        skip: as in `plan_transfer`.

    Raises:
        InputError: as `plan_transfer` and `load_checkpoint`; and where weights that are one in the network
            differ in the checkpoint.
    """
    source = load_checkpoint(checkpoint)
    old, new = source.model.state_dict(), model.state_dict()
    try:
        transfer = plan_transfer(new, old, skip)
    except InputError as error:
        raise InputError(f"training.init_from {checkpoint}: {error}") from error
    taken: dict[int, str] = {}
    for name in transfer.loaded:
        # Layers that share an RPE have its weights under a name each.
        first = taken.setdefault(new[name].data_ptr(), name)
        if first != name and not torch.equal(old[first], old[name]):
            raise InputError(
                f"training.init_from {checkpoint}: {first} and {name} are one weight of the new network and "
                "differ in the checkpoint; set model.attention.share_rpe as it was there"
            )
        new[name].copy_(old[name])
    return replace(transfer, differences=differences(source.config, config))


def differences(old: Config, new: Config) -> tuple[str, ...]:
    """The settings that give equal weights another meaning, in words."""
    before, after = flat_settings(old), flat_settings(new)
    return tuple(
        f"{key} was {before[key]!r} and is {after[key]!r}"
        for key in after
        if key.startswith(MEANINGFUL) and before[key] != after[key]
    )


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
