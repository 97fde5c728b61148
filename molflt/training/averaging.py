"""Exponential moving average (EMA) of a network's weights.

    average <- d_n average + (1 - d_n) weight,   d_n = min(decay, (1 + n) / (10 + n)),   n updates so far

Polyak & Juditsky, SIAM J. Control Optim. 30, 838 (1992); the rising decay lets the first average, the random
initialisation, be forgotten within a short run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.optim.swa_utils import get_ema_multi_avg_fn

from molflt.training.sharding import whole


class WeightAverage:
    """The EMA of some parameters, in tensors of its own that can change places with their values."""

    def __init__(self, parameters: Iterable[Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self.num_updates = 0
        self.exchanged = False
        self._other = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters' values into the average; call it after each optimiser step."""
        assert not self.exchanged, "the parameters hold the average itself"
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        values = [parameter.detach() for parameter in self.parameters]
        get_ema_multi_avg_fn(decay)(self._other, values, self.num_updates)
        self.num_updates += 1

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the parameters' values and the average: evaluate in between two calls."""
        for parameter, other in zip(self.parameters, self._other, strict=True):
            value = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(value)
        self.exchanged = not self.exchanged

    def state(self) -> dict[str, Any]:
        """Number of updates and the average's tensors, to go on from."""
        assert not self.exchanged, "the parameters hold the average itself"
        return {"num_updates": self.num_updates, "values": [whole(value) for value in self._other]}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""
        self.num_updates = state["num_updates"]
        for value, saved in zip(self._other, state["values"], strict=True):
            if isinstance(value, DTensor):
                saved = distribute_tensor(saved.to(value.device), value.device_mesh, value.placements)
            value.copy_(saved)
