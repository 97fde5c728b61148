"""FLT attention in PyTorch Geometric's form: ragged nodes `[A, C]` and the graph index `batch` of each."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from molflt.nn.attention import FLTAttention
from molflt.nn.causal import CHUNK_SIZE
from molflt.nn.couplings import Coupling
from molflt.nn.feature_maps import FeatureMap
from molflt.nn.functional import EPSILON
from molflt.nn.packing import check_batch, checked_layout, number_of_graphs
from molflt.nn.rpe import FourierRPE


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
        if heads < 1 or out_channels < 1 or out_channels % heads != 0:
            raise ValueError(
                f"heads must divide out_channels, got heads={heads} and out_channels={out_channels}; choose "
                "another number of heads"
            )
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

    def check_inputs(self, x: object, pos: object, batch: object) -> None:
        """Raises TypeError or ValueError if the arguments of `forward` do not belong together."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor [num_nodes, {self.in_channels}], got {type(x).__name__}; use "
                "torch.as_tensor(x)"
            )
        if x.ndim != 2 or x.shape[-1] != self.in_channels:
            if x.ndim == 2:
                remedy = f"make the layer with in_channels={x.shape[-1]}"
            elif x.ndim == 3:
                remedy = "for padded graphs use FLTAttention"
            else:
                remedy = "pass one row of features for each node"
            raise ValueError(
                f"x must have shape [num_nodes, in_channels] = [num_nodes, {self.in_channels}], got "
                f"{list(x.shape)}; {remedy}"
            )
        if pos is not None:
            self._check_pos(x, pos)
        elif self.attention.coupling.needs_positions:
            raise ValueError(
                f"pos must be given, since {type(self.attention.coupling).__name__} needs positions, got "
                "None; pass pos, or make the layer with coupling=NoCoupling()"
            )
        if batch is not None:
            check_batch(batch, x.shape[0])

    def _check_pos(self, x: Tensor, pos: object) -> None:
        if not isinstance(pos, Tensor):
            raise TypeError(
                f"pos must be a tensor [num_nodes, {self.position_dim}], got {type(pos).__name__}; use "
                "torch.as_tensor(pos)"
            )
        # Without an RPE nothing reads the coordinates, however many they are.
        wrong_width = pos.ndim == 2 and pos.shape[1] != self.position_dim and self.attention.rpe is not None
        if pos.ndim == 2 and pos.shape[0] == x.shape[0] and not wrong_width:
            return
        if pos.ndim == 1 and not pos.is_floating_point():
            remedy = "the arguments are (x, pos, batch): pass a graph index as batch"
        elif pos.ndim == 1 and self.position_dim == 1:
            remedy = "use pos.unsqueeze(-1)"
        elif wrong_width and pos.shape[0] == x.shape[0]:
            remedy = f"make the layer with position_dim={pos.shape[1]}"
        else:
            remedy = "pass one row of coordinates for each row of x"
        raise ValueError(
            f"pos must have shape [num_nodes, position_dim] = [{x.shape[0]}, {self.position_dim}], got "
            f"{list(pos.shape)}; {remedy}"
        )

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

        Raises:
            TypeError: an argument is no tensor.
            ValueError: shapes or types do not belong together, a graph index is negative or not below `size`,
                or a graph has more than `max_nodes` nodes (of these three, compiled code raises a
                RuntimeError).
        """
        self.check_inputs(x, pos, batch)
        if batch is None:
            if size not in (None, 1):
                raise ValueError(f"size must be 1 where batch is None, which is one graph, got {size}")
            return self.attention(x.unsqueeze(0), None if pos is None else pos.unsqueeze(0)).squeeze(0)
        layout = checked_layout(batch, number_of_graphs(batch, size, "size"), max_nodes)
        dense_pos = None if pos is None else layout.pack(pos)
        return layout.unpack(self.attention(layout.pack(x), dense_pos, layout.atom_mask))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.out_channels}, "
            f"position_dim={self.position_dim}, heads={self.heads})"
        )
