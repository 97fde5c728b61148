"""Pre-LN transformer encoder over padded atoms, indifferent to what its attention layers compute.

    x = x + drop(attention(norm(x)));  x = x + drop(W_2 dropout(gelu(W_1 norm(x))))

for each layer, the stack of layers repeated `num_blocks` times with the same weights, then a last norm.

Source: Graphormer-3D (Shi et al., arXiv 2203.04810), layers, repeats ("blocks") and where dropout acts.
Stochastic depth, which drops a branch for a whole graph: Huang et al., arXiv 1603.09382.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EncodedPositions = dict[tuple[type, int], Any]
"""What layers make of positions, for each of `_encoding_key`."""


def stochastic_depth(branch: Tensor, probability: float, training: bool) -> Tensor:
    """`branch` [B, ...], in training zero for some graphs and scaled for the others to the same mean."""
    if not training or probability == 0:
        return branch
    kept = torch.rand(len(branch), *[1] * (branch.ndim - 1), device=branch.device) >= probability
    return branch * (kept / (1 - probability)).to(branch.dtype)


class EncoderLayer(nn.Module):
    """One pre-LN block around an attention layer.

    Args:
        attention: module called as `attention(x, pos, atom_mask, positional=...)` that keeps the shape of x
            and has `encode_positions(pos, atom_mask)`, such as `FLTAttention` and `SoftmaxAttention`; or,
            with a true `needs_geometry`, `encode_positions(geometry)`, such as `RangeSeparatedAttention`.
        channels: C.
        ffn_channels: hidden width of the feed-forward part.
        dropout: probability, after attention and after the feed-forward part.
        activation_dropout: probability, inside the feed-forward part.
        drop_path: probability of leaving out a graph's attention, and of its feed-forward part.
    """

    attention: Any

    def __init__(
        self,
        attention: nn.Module,
        channels: int,
        ffn_channels: int,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = nn.LayerNorm(channels)
        self.ffn_norm = nn.LayerNorm(channels)
        self.ffn = nn.Sequential(
            nn.Linear(channels, ffn_channels),
            nn.GELU(),
            nn.Dropout(activation_dropout),
            nn.Linear(ffn_channels, channels),
        )
        self.dropout = nn.Dropout(dropout)
        self.drop_path = drop_path

    def forward(self, x: Tensor, pos: Tensor, atom_mask: Tensor, positional: Any = None) -> Tensor:
        """x [B, N, C] and pos [B, N, X] to [B, N, C]; `atom_mask` [B, N] is true at real atoms."""
        attended = self.attention(self.attention_norm(x), pos, atom_mask, positional=positional)
        x = x + self._drop(attended)
        return x + self._drop(self.ffn(self.ffn_norm(x)))

    def _drop(self, branch: Tensor) -> Tensor:
        return stochastic_depth(self.dropout(branch), self.drop_path, self.training)

    def extra_repr(self) -> str:
        return f"drop_path={self.drop_path}"


class Encoder(nn.Module):
    """A stack of layers, repeated with shared weights.

    What depends on positions alone is computed once for each distinct `attention.rpe`: once in all when the
    layers share one, once per layer when they do not, and never again for the repeats.

    Args:
        layers: the layers, all of one width.
        channels: C.
        num_blocks: how often the stack is run.
        input_dropout: probability, before the first layer.
        checkpointing: keeps the input of each layer only, and runs the layer again in the backward pass: less
            memory for about a third more time, with the same gradients.
    """

    def __init__(
        self,
        layers: Iterable[EncoderLayer],
        channels: int,
        num_blocks: int = 1,
        input_dropout: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.layers: Any = nn.ModuleList(layers)
        self.num_blocks = num_blocks
        self.checkpointing = checkpointing
        self.input_dropout = nn.Dropout(input_dropout)
        self.norm = nn.LayerNorm(channels)

    @property
    def needs_geometry(self) -> bool:
        """Whether any attention layer asks for more than positions."""
        return any(_needs_geometry(layer.attention) for layer in self.layers)

    def encode_positions(
        self, pos: Tensor | None, atom_mask: Tensor, geometry: Any = None
    ) -> EncodedPositions:
        """The positions as each kind of layer takes them; arguments as in `forward`."""
        encoded: EncodedPositions = {}
        for layer in self.layers:
            if (key := _encoding_key(layer.attention)) not in encoded:
                encoded[key] = _encode(layer.attention, pos, atom_mask, geometry)
        return encoded

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None,
        atom_mask: Tensor,
        geometry: Any = None,
        *,
        encoded: EncodedPositions | None = None,
    ) -> Tensor:
        """Encode padded atoms.

        Args:
            x: [B, N, C].
            pos: [B, N, X]; None where no layer looks at it.
            atom_mask: [B, N], true at real atoms.
            geometry: what layers with `needs_geometry` encode instead, such as a `PeriodicGeometry`.
            encoded: `encode_positions` of these, where it is known.

        Returns:
            [B, N, C].
        """
        if encoded is None:
            encoded = self.encode_positions(pos, atom_mask, geometry)
        x = self.input_dropout(x)
        for _ in range(self.num_blocks):
            for layer in self.layers:
                x = self._run(layer, x, pos, atom_mask, encoded[_encoding_key(layer.attention)])
        return self.norm(x)

    def _run(self, layer: EncoderLayer, *arguments: Any) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            return layer(*arguments)
        result = checkpoint(layer, *arguments, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result

    def extra_repr(self) -> str:
        return f"num_blocks={self.num_blocks}, checkpointing={self.checkpointing}"


def _needs_geometry(attention: nn.Module) -> bool:
    return getattr(attention, "needs_geometry", False)


def _encode(attention: Any, pos: Tensor | None, atom_mask: Tensor, geometry: Any) -> Any:
    if not _needs_geometry(attention):
        return attention.encode_positions(pos, atom_mask)
    if geometry is None:
        raise ValueError(f"{type(attention).__name__} needs a geometry, got None: pass one")
    return attention.encode_positions(geometry)


def _encoding_key(attention: nn.Module) -> tuple[type, int]:
    """Equal for layers to which positions look the same: of one class, with one RPE."""
    return type(attention), id(getattr(attention, "rpe", None))
