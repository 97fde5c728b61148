"""A batch's way from a worker process to the training: all its tensors in one.

torch sends every tensor as a shared-memory file of its own, whose descriptor the receiver fetches through a
socket, so that a batch's dozen and more tensors cost milliseconds of each step. Here they are laid end to end
in one tensor, and what arrives is a batch whose tensors are views of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data

ALIGNMENT = 64
"""Bytes; a multiple of every dtype's size, and what vector instructions like best."""


class Place(NamedTuple):
    """Where a tensor lies in the one that holds all."""

    start: int
    """Byte."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def packed(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Place]]:
    """CPU tensors in one tensor of bytes, and where each lies."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = Place(end, tuple(tensor.shape), tensor.dtype)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8)
    for name, view in unpacked(buffer, places).items():
        view.copy_(tensors[name])
    return buffer, places


def unpacked(buffer: Tensor, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Views of the tensors that `packed` put into `buffer`."""
    views = {}
    for name, (start, shape, dtype) in places.items():
        size = dtype.itemsize * torch.Size(shape).numel()
        views[name] = buffer[start : start + size].view(dtype).view(shape)
    return views


class InOnePiece:
    """A batch that is sent as one tensor and arrives as itself."""

    def __init__(self, batch: Data) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = {name: value for name, value in self.batch.to_dict().items() if isinstance(value, Tensor)}
        rest = copy.copy(self.batch)
        for name in tensors:
            del rest[name]
        return _received, (rest, *packed(tensors))


def _received(rest: Data, buffer: Tensor, places: Mapping[str, Place]) -> Data:
    for name, tensor in unpacked(buffer, places).items():
        rest[name] = tensor
    return rest


class Collate:
    """Collates without what takes a batch apart again, for a short way.

    Args:
        collate: samples to a PyG batch.
    """

    def __init__(self, collate: Callable[[list[Data]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Data]) -> Any:
        batch = self.collate(samples)
        batch._slice_dict, batch._inc_dict = {}, {}
        return batch if get_worker_info() is None else InOnePiece(batch)
