"""What the linear and the softmax attention layer share: projections, heads and padding."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from molflt.nn.rpe import FourierRPE

RPE_REMEDY = "pass default_rpe(num_heads, position_dim) or FourierRPE(sampler, spectrum)"


def zero_padding(
    x: Shaped[Tensor, "B N *feature"], atom_mask: Bool[Tensor, "B N"] | None
) -> Shaped[Tensor, "B N *feature"]:
    """`x` with zeros at padded rows, whatever they held, and zero gradient there."""
    if atom_mask is None:
        return x
    return torch.where(atom_mask.view(*atom_mask.shape, *[1] * (x.ndim - 2)), x, 0.0)


def check_atom_mask(atom_mask: Tensor, shape: torch.Size) -> None:
    """Raises ValueError if the mask is not bool or has another shape."""
    if atom_mask.dtype != torch.bool or atom_mask.shape != shape:
        raise ValueError(
            f"atom_mask must be bool of shape {list(shape)}, true at real tokens, got {atom_mask.dtype} of "
            f"shape {list(atom_mask.shape)}"
        )


def require_kind(name: str, value: object, kind: type, remedy: str) -> None:
    """Raises TypeError if the argument `name` of a constructor is neither None nor an object of `kind`."""
    if value is not None and not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} object"
        raise TypeError(f"{name} must be a {kind.__name__} object or None, got {got}; {remedy}")


class MultiHeadAttention(nn.Module):
    """Projections to queries, keys and values and back: what the linear and the softmax layer share."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        position_dim: int,
        rpe: FourierRPE | None,
        causal: bool,
        in_channels: int | None,
        bias: bool,
    ) -> None:
        super().__init__()
        if num_heads < 1 or channels < 1 or channels % num_heads != 0:
            raise ValueError(
                f"num_heads must divide channels, got num_heads={num_heads} and channels={channels}; choose "
                "another number of heads"
            )
        for name, ours in (("num_heads", num_heads), ("position_dim", position_dim)):
            theirs = ours if rpe is None else getattr(rpe, name)
            if ours != theirs:
                raise ValueError(f"rpe must have {name}={ours} as the layer has, got {theirs}")
        self.channels = channels
        self.num_heads = num_heads
        self.position_dim = position_dim
        self.in_channels = channels if in_channels is None else in_channels
        self.causal = causal
        self.rpe = rpe
        self.query = nn.Linear(self.in_channels, channels, bias=bias)
        self.key = nn.Linear(self.in_channels, channels, bias=bias)
        self.value = nn.Linear(self.in_channels, channels, bias=bias)
        self.out = nn.Linear(channels, channels, bias=bias)
        self._reset_projections()

    def _reset_projections(self) -> None:
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def reset_parameters(self) -> None:
        """Initial weights everywhere, the RPE's (shared or not) included, and new random draws."""
        self._reset_projections()
        if self.rpe is not None:
            self.rpe.reset_parameters()

    def heads(
        self, x: Float[Tensor, "B N Cin"]
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N D"], Float[Tensor, "B H N D"]]:
        """Queries, keys and values."""
        query, key, value = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        return query, key, value

    def check_inputs(self, x: Tensor, pos: Tensor | None, atom_mask: Tensor | None) -> None:
        """Raises ValueError if the arguments of `forward` do not belong together."""
        if x.ndim != 3 or x.shape[-1] != self.in_channels:
            raise ValueError(
                f"x must have shape [B, N, {self.in_channels}], got {list(x.shape)}; for ragged nodes use "
                "FLTConv"
            )
        weight = self.query.weight if type(self.query) is nn.Linear else x
        if x.dtype != weight.dtype and not self._autocast_converts(x):
            raise ValueError(
                f"x must have the type of the layer's weights, {weight.dtype}, got {x.dtype}; use "
                f"x.to({weight.dtype})"
            )
        if pos is not None and pos.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"pos must have a row for each row of x, {list(x.shape)}, got {list(pos.shape)}")
        if atom_mask is not None:
            check_atom_mask(atom_mask, x.shape[:-1])

    @staticmethod
    def _autocast_converts(x: Tensor) -> bool:
        reduced = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return reduced and torch.is_autocast_enabled(x.device.type)

    def check_position_dim(self, pos: Float[Tensor, "B N X"]) -> None:
        """Raises ValueError if the positions have another dimension than the layer."""
        if pos.shape[-1] != self.position_dim:
            raise ValueError(
                f"pos must have position_dim={self.position_dim} coordinates, got {pos.shape[-1]}; make the "
                f"layer with position_dim={pos.shape[-1]}"
            )

    def check_positional(self, positional: Tensor, x: Tensor, width: int | None) -> None:
        """Raises ValueError if `positional` is not `[B, H, N, width]`; any will do where `width` is None."""
        if width is None:
            return
        fits = positional.ndim == 4 and positional.shape[2:] == (x.shape[1], width)
        # Graphs or heads may share one encoding.
        fits = fits and positional.shape[0] in (1, x.shape[0]) and positional.shape[1] in (1, self.num_heads)
        if not fits:
            raise ValueError(
                f"positional must have shape {[x.shape[0], self.num_heads, x.shape[1], width]}, got "
                f"{list(positional.shape)}; pass encode_positions(pos, atom_mask), or positions as pos"
            )

    def merge(
        self, out: Float[Tensor, "B H N D"], atom_mask: Bool[Tensor, "B N"] | None
    ) -> Float[Tensor, "B N C"]:
        """Output projection of all heads; zero at padded rows."""
        return zero_padding(self.out(out.transpose(1, 2).flatten(-2)), atom_mask)

    def extra_repr(self) -> str:
        return (
            f"channels={self.channels}, num_heads={self.num_heads}, position_dim={self.position_dim}, "
            f"causal={self.causal}"
        )
