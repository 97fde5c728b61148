"""FLT attention in PyTorch Geometric's form: ragged nodes `[A, C]` and the graph index `batch` of each."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from molflt.nn.attention import FLTAttention
from molflt.nn.causal import CHUNK_SIZE
from molflt.nn.couplings import Coupling
from molflt.nn.feature_maps import FeatureMap
from molflt.nn.functional import EPSILON
from molflt.nn.packing import dense_layout
from molflt.nn.rpe import FourierRPE


def check_rows(num_nodes: int, **tensors: Tensor | None) -> None:
    """Raises ValueError, naming it, for a tensor without one row per node."""
    for name, rows in tensors.items():
        if rows is not None and len(rows) != num_nodes:
            raise ValueError(f"{name} must have one row per node of x, {num_nodes}, got {len(rows)}")


class FLTConv(nn.Module):
    """Every node attends to all nodes of its graph, with a learned Fourier RPE, at linear cost.

    Args:
        in_channels: width of the input.
        out_channels: width of the output.
        position_dim: X, number of coordinates of a node.
        heads: attention heads, divides `out_channels`.
        rpe, feature_map, coupling, causal, chunk_size, bias, eps: as in `FLTAttention`.

    Example:
        >>> import torch
        >>> conv = FLTConv(16, 32, position_dim=2, heads=4)
        >>> x, pos = torch.randn(5, 16), torch.randn(5, 2)
        >>> conv(x, pos, batch=torch.tensor([0, 0, 1, 1, 1])).shape
        torch.Size([5, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        position_dim: int = 3,
        heads: int = 1,
        *,
        rpe: FourierRPE | None = None,
        feature_map: FeatureMap | None = None,
        coupling: Coupling | None = None,
        causal: bool = False,
        chunk_size: int = CHUNK_SIZE,
        bias: bool = True,
        eps: float = EPSILON,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.position_dim = position_dim
        self.heads = heads
        self.attention = FLTAttention(
            out_channels,
            heads,
            position_dim=position_dim,
            rpe=rpe,
            feature_map=feature_map,
            coupling=coupling,
            causal=causal,
            chunk_size=chunk_size,
            in_channels=in_channels,
            bias=bias,
            eps=eps,
        )

    def reset_parameters(self) -> None:
        """Initial weights and new random draws."""
        self.attention.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "A Cin"],
        pos: Float[Tensor, "A X"] | None = None,
        batch: Int[Tensor, "A"] | None = None,
        size: int | None = None,
        max_nodes: int | None = None,
    ) -> Float[Tensor, "A Cout"]:
        """Attention within each graph; rows of the output are those of `x`.

        Args:
            x: node features.
            pos: node positions; may be None where the coupling needs none.
            batch: graph index of each node, in any order; None is one graph.
            size: number of graphs, by default the largest index plus one.
            max_nodes: number of nodes that graphs are padded to, by default the largest graph's. With `size`
                and `max_nodes` given no shape depends on the values of `batch`, as `torch.compile` wants it.
        """
        check_rows(len(x), pos=pos, batch=batch)
        if batch is None:
            if size not in (None, 1):
                raise ValueError(f"size must be 1 where batch is None, which is one graph, got {size}")
            return self.attention(x.unsqueeze(0), None if pos is None else pos.unsqueeze(0)).squeeze(0)
        layout = dense_layout(batch, size, max_nodes)
        dense_pos = None if pos is None else layout.pack(pos)
        return layout.unpack(self.attention(layout.pack(x), dense_pos, layout.atom_mask))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.out_channels}, "
            f"position_dim={self.position_dim}, heads={self.heads})"
        )
