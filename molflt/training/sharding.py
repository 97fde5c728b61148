"""Weights that are shared out over processes (FSDP): sharding a network, and putting a tensor together."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from molflt.models.graphormer3d import Graphormer3D


def shard(model: Graphormer3D, mesh: DeviceMesh) -> None:
    """Share out a network's weights over the processes of `mesh`, in place."""
    # Positions are encoded for all layers at once, outside of them, so of a layer only the feed-forward
    # part can be a unit of its own.
    for layer in model.encoder.layers:
        fully_shard(layer.ffn, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(value: Tensor) -> Tensor:
    """A copy of a tensor; of one that is sharded over processes the whole, all of which have to call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()
