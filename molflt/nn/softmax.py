"""Softmax attention on padded graphs with the parameters of FLT attention: its quadratic twin."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.functional import softmax_attention
from molflt.nn.multihead import RPE_REMEDY, MultiHeadAttention, require_kind, zero_padding
from molflt.nn.rpe import FourierRPE, default_rpe


class SoftmaxAttention(MultiHeadAttention):
    """Attention with the exact weights exp(q_i.k_j / sqrt(D) + f(r_i - r_j)), at a cost quadratic in N.

    `FLTAttention` estimates what this layer computes. The parameters of both have the same names and shapes,
    so a state dict of one, less the feature map, loads into the other.

    Args:
        channels, num_heads, position_dim, causal, in_channels, bias: as in `FLTAttention`.
        rpe: f; by default `default_rpe(num_heads, position_dim)`.
        use_rpe: False leaves f out, and `rpe` must be None.
        closed_form: True takes f from the spectrum's closed form; False the estimate of f under the RPE's own
            frequencies, the exact twin of the linear layer's f_hat.

    Raises:
        TypeError: `rpe` is no `FourierRPE`.
        ValueError: `num_heads` does not divide `channels`; `rpe` has another size; `forward` without
            positions.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        position_dim: int = 3,
        rpe: FourierRPE | None = None,
        use_rpe: bool = True,
        closed_form: bool = True,
        causal: bool = False,
        in_channels: int | None = None,
        bias: bool = True,
    ) -> None:
        require_kind("rpe", rpe, FourierRPE, RPE_REMEDY)
        if rpe is not None and not use_rpe:
            raise ValueError("use_rpe=False leaves the RPE out, got an rpe; pass rpe=None")
        if rpe is None and use_rpe:
            rpe = default_rpe(num_heads, position_dim)
        super().__init__(
            channels,
            num_heads,
            position_dim=position_dim,
            rpe=rpe,
            causal=causal,
            in_channels=in_channels,
            bias=bias,
        )
        self.closed_form = closed_form

    def encode_positions(
        self, pos: Float[Tensor, "B N X"] | None, atom_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N N"] | None:
        """f(r_i - r_j) `[B, H, N, N]`, or None without an RPE."""
        if pos is None or self.rpe is None:
            return None
        self.check_position_dim(pos)
        pos = zero_padding(pos, atom_mask)
        with torch.autocast(pos.device.type, enabled=False):
            return self.rpe.closed_form_bias(pos) if self.closed_form else self.rpe.dense_bias(pos)

    def forward(
        self,
        x: Float[Tensor, "B N Cin"],
        pos: Float[Tensor, "B N X"] | None = None,
        atom_mask: Bool[Tensor, "B N"] | None = None,
        *,
        positional: Float[Tensor, "B H N N"] | None = None,
    ) -> Float[Tensor, "B N C"]:
        """Attention over the tokens of each graph; arguments as in `FLTAttention.forward`."""
        self.check_inputs(x, pos, atom_mask)
        if positional is None:
            positional = self.encode_positions(pos, atom_mask)
        else:
            self.check_positional(positional, x, x.shape[1])
        if positional is None and self.rpe is not None:
            raise ValueError("SoftmaxAttention needs positions: pass pos (or positional), or use_rpe=False")
        query, key, value = self.heads(zero_padding(x, atom_mask))
        out = softmax_attention(query, key, value, positional, atom_mask, self.causal)
        return self.merge(out, atom_mask)
