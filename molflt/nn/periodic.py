"""Attention over structures: what such layers need to know of a batch, and what they have in common.

Their contract is that of `FLTAttention`, but for positions: they take a `PeriodicGeometry`.

    positional = layers[0].encode_positions(geometry)
    for layer in layers:
        x = x + layer(x, atom_mask=geometry.atom_mask, positional=positional)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from molflt.nn.feature_maps import FeatureMap
from molflt.nn.multihead import MultiHeadAttention, zero_padding
from molflt.nn.near import NearGraph


@dataclass(frozen=True)
class PeriodicGeometry:
    """A padded batch of structures.

    Attributes:
        pos: `[B, N, 3]`, Å, wrapped or not.
        atom_mask: true at real atoms, `[B, N]`.
        cell: rows are lattice vectors, `[B, 3, 3]`, Å.
        pbc: true along periodic directions, `[B, 3]`.
        near: the periodic radius graph, its edges referring to rows b N + n.
        atomic_numbers: `[B, N]`, 0 at padding; for layers that tell elements apart.
    """

    pos: Float[Tensor, "B N 3"]
    atom_mask: Bool[Tensor, "B N"]
    cell: Float[Tensor, "B 3 3"]
    pbc: Bool[Tensor, "B 3"]
    near: NearGraph
    atomic_numbers: Int[Tensor, "B N"] | None = None


class PeriodicAttention(MultiHeadAttention):
    """Multi-head attention whose `rpe` encodes a geometry; subclasses define `attend`.

    Args:
        channels: C, width of the output.
        num_heads: H, divides `channels`.
        rpe: module from a `PeriodicGeometry` to what `attend` takes, shared between layers by passing one
            object.
        feature_map: linearises exp.
        feature_width: of the vectors that `feature_map` sees.
        in_channels: width of the input, `channels` by default.
        bias: whether the four projections have one.

    Raises:
        ValueError: `num_heads` does not divide `channels`; `rpe` has another number of heads; `forward`
            without positions.
    """

    needs_geometry = True
    """Whether `encode_positions` takes a `PeriodicGeometry` instead of positions."""

    rpe: Any

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        rpe: Any,
        feature_map: FeatureMap,
        feature_width: int,
        in_channels: int | None,
        bias: bool,
    ) -> None:
        super().__init__(
            channels,
            num_heads,
            position_dim=3,
            rpe=None,
            causal=False,
            in_channels=in_channels,
            bias=bias,
        )
        if rpe.num_heads != num_heads:
            raise ValueError(f"rpe must have num_heads={num_heads} as the layer has, got {rpe.num_heads}")
        feature_map.build(num_heads, feature_width)
        self.rpe = rpe
        self.feature_map = feature_map

    def reset_parameters(self) -> None:
        """Initial weights everywhere, the RPE's (shared or not) included, and new random draws."""
        super().reset_parameters()
        self.feature_map.reset_parameters()

    def encode_positions(self, geometry: PeriodicGeometry) -> Any:
        """What depends on positions alone, for all layers that share the RPE."""
        return self.rpe(geometry)

    def attend(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N D"],
        positional: Any,
        atom_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H N D"]:
        """The core: queries, keys and values in, output out."""
        raise NotImplementedError

    def forward(
        self,
        x: Float[Tensor, "B N Cin"],
        pos: PeriodicGeometry | Tensor | None = None,
        atom_mask: Bool[Tensor, "B N"] | None = None,
        *,
        positional: Any = None,
    ) -> Float[Tensor, "B N C"]:
        """Attention over the atoms of each graph.

        Args:
            x: atom features.
            pos: the geometry; not looked at where `positional` is given.
            atom_mask: true at real atoms; the geometry's, where it is given, by default all.
            positional: `encode_positions(geometry)`, instead of `pos`.
        """
        if positional is None:
            if not isinstance(pos, PeriodicGeometry):
                raise ValueError(
                    f"{type(self).__name__} needs a PeriodicGeometry as pos, or positional, got "
                    f"{type(pos).__name__} and None"
                )
            positional = self.encode_positions(pos)
            atom_mask = pos.atom_mask if atom_mask is None else atom_mask
        self.check_inputs(x, None, atom_mask)
        query, key, value = self.heads(zero_padding(x, atom_mask))
        return self.merge(self.attend(query, key, value, positional, atom_mask), atom_mask)
