"""The spread of a network's energies over fresh draws of its random frequencies and features.

Linear attention estimates a kernel from random numbers that are drawn once and kept with the weights. Drawing
them again gives another estimate of the same attention, so the spread over draws shows how far the energy
depends on this accident. It says nothing about errors that all draws share (too few data, a chemistry never
seen), so it is no error bar against DFT. Weights trained on one draw alone (`training.redraw_every` 0) have
adapted to it, which makes the spread larger.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from molflt.nn.frequencies import resample_

SEED = 20_230_203


class Redraws:
    """Sets a network's random buffers to a fixed series of other draws, one after the other.

    Args:
        model: the network.
        number: draws in the series; they are the same for every structure and in every process.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        self._buffers = dict(model.named_buffers())
        self._own = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self._draws: list[dict[str, Tensor]] = []
        for index in range(number):
            resample_(model, torch.Generator().manual_seed(SEED + index))
            drawn = {
                name: buffer.clone()
                for name, buffer in self._buffers.items()
                if not torch.equal(buffer, self._own[name])
            }
            self._set(self._own)
            if drawn:
                self._draws.append(drawn)

    def __iter__(self) -> Iterator[None]:
        """Go through the draws; the network's own come back at the end, and also when it is left early."""
        try:
            for drawn in self._draws:
                self._set(drawn)
                yield
        finally:
            self._set(self._own)

    @property
    def only_features(self) -> bool:
        """Whether the draws are of layers' features alone, and `Graphormer3D.prepare` gives one result."""
        return all(".attention.feature_map." in name for drawn in self._draws for name in drawn)

    def __len__(self) -> int:
        return len(self._draws)

    def _set(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._buffers[name].copy_(value)
