"""FLT attention on padded graphs; its quadratic twin, with the same parameters, is in `molflt.nn.softmax`.

Both layers have one contract: `forward(x, pos, atom_mask)` from `[B, N, C]` to `[B, N, C]`, and
`encode_positions` for what depends on positions alone, which layers that share an RPE compute once:

    positional = layers[0].encode_positions(pos, atom_mask)
    for layer in layers:
        x = x + layer(x, atom_mask=atom_mask, positional=positional)

`x` and `pos` are zeroed at padded rows before anything multiplies them, so what padding holds, NaN included,
changes no value and no gradient; it receives zero gradient, and padded rows of the output are zero.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.alarm import NormalizerAlarm
from molflt.nn.causal import CHUNK_SIZE
from molflt.nn.couplings import AdditiveCoupling, Coupling, NoCoupling
from molflt.nn.feature_maps import FeatureMap, PositiveRandomFeatures
from molflt.nn.functional import EPSILON, normalize
from molflt.nn.multihead import RPE_REMEDY, MultiHeadAttention, require_kind, zero_padding
from molflt.nn.rpe import FourierRPE, default_rpe


def flt_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N D"],
    pos: Float[Tensor, "B N X"] | None = None,
    atom_mask: Bool[Tensor, "B N"] | None = None,
    *,
    feature_map: FeatureMap,
    coupling: Coupling | None = None,
    rpe: FourierRPE | None = None,
    positional: Float[Tensor, "B H N K"] | None = None,
    causal: bool = False,
    chunk_size: int = CHUNK_SIZE,
    eps: float = EPSILON,
    alarm: NormalizerAlarm | None = None,
) -> Float[Tensor, "B H N D"]:
    """The core of FLT attention: queries, keys, values and positions in, output out, at a cost linear in N.

    Features and sums are computed in float32 (float64 for float64 input) whatever the input's type and
    autocast; the output has the value's type.

    Args:
        query, key, value: q, k and v. Padded rows must be finite.
        pos: positions, in the unit whose inverse the RPE's frequencies have. Padded rows must be finite.
        atom_mask: true at real tokens. Other rows influence nothing; their own output is finite and
            meaningless.
        feature_map: already built for this number of heads and the coupling's input width.
        coupling: `AdditiveCoupling()` by default, or `NoCoupling()` without an RPE.
        rpe: the relative positional encoding.
        positional: `rpe.basis(pos)`, instead of `pos`.
        causal: token i sees the tokens j <= i only.
        chunk_size: tokens whose weights are formed at a time when causal.
        eps: stands in for a smaller normaliser.
        alarm: told the normalisers.
    """
    if coupling is None:
        coupling = NoCoupling() if rpe is None else AdditiveCoupling()
    if query.shape[-2] == 0:
        return value
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        if rpe is None or not coupling.needs_positions:
            basis = None
        elif positional is not None:
            basis = positional.to(dtype)
        else:
            basis = None if pos is None else rpe.basis(pos).to(dtype)
        operands = coupling.operands(query.to(dtype), key.to(dtype), rpe, basis)
        modulations = coupling.modulations(rpe, basis)
        features = feature_map(operands, atom_mask)
        if causal:
            feature_map.require_causal()
            numerator, normalizer = features.attend_causal(value.to(dtype), modulations, chunk_size)
        else:
            numerator, normalizer = features.attend(value.to(dtype), modulations)
        if normalizer is not None:
            if alarm is not None:
                alarm(normalizer, atom_mask, eps)
            numerator = normalize(numerator, normalizer, eps)
        return numerator.to(value.dtype)


class FLTAttention(MultiHeadAttention):
    """Multi-head attention with a learned Fourier RPE at a cost linear in the number of tokens.

        out_i = sum_j a_ij v_j / sum_j a_ij,   a_ij ~ exp(q_i.k_j / sqrt(D) + f(r_i - r_j))

    Args:
        channels: C, width of the output.
        num_heads: H, divides `channels`.
        position_dim: X.
        rpe: f, shared between layers by passing one object; by default `default_rpe(num_heads,
            position_dim)`, made for neighbours about one unit apart, or none where the coupling needs none.
        feature_map: linearises exp; by default positive random features, 64 (16 when the coupling is
            multiplicative).
        coupling: `AdditiveCoupling()` by default; `MultiplicativeCoupling()`; `NoCoupling()` is the
            Performer.
        causal: token i sees the tokens j <= i only.
        chunk_size: tokens whose weights are formed at a time when causal. `torch.export` of a causal layer
            wants lengths that are multiples of it.
        in_channels: width of the input, `channels` by default.
        bias: whether the four projections have one.
        eps: stands in for a smaller normaliser.

    The estimate is a rough one at the default sizes (`diagnostics.attention_error` says how rough): the layer
    learns with its random features rather than reproducing softmax attention. More features, or
    `MultiplicativeCoupling`, bring it closer.

    Raises:
        TypeError: `rpe`, `feature_map` or `coupling` is of another kind.
        ValueError: `num_heads` does not divide `channels`; `rpe` or `feature_map` has another size; `causal`
            with a feature map that looks ahead; `rpe` with a coupling that uses none; `forward` without
            positions where the coupling needs them, or with arguments whose shapes do not belong together.

    Example:
        >>> layer = FLTAttention(64, 4, feature_map=PositiveRandomFeatures(64))
        >>> layer(torch.randn(2, 5, 64), torch.randn(2, 5, 3)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        position_dim: int = 3,
        rpe: FourierRPE | None = None,
        feature_map: FeatureMap | None = None,
        coupling: Coupling | None = None,
        causal: bool = False,
        chunk_size: int = CHUNK_SIZE,
        in_channels: int | None = None,
        bias: bool = True,
        eps: float = EPSILON,
    ) -> None:
        require_kind("rpe", rpe, FourierRPE, RPE_REMEDY)
        require_kind("feature_map", feature_map, FeatureMap, "pass one such as PositiveRandomFeatures(64)")
        require_kind("coupling", coupling, Coupling, "pass one such as AdditiveCoupling()")
        coupling = AdditiveCoupling() if coupling is None else coupling
        if rpe is None and coupling.needs_positions:
            rpe = default_rpe(num_heads, position_dim)
        if rpe is not None and not coupling.needs_positions:
            raise ValueError(f"{type(coupling).__name__} uses no RPE, got an rpe; pass rpe=None")
        super().__init__(
            channels,
            num_heads,
            position_dim=position_dim,
            rpe=rpe,
            causal=causal,
            in_channels=in_channels,
            bias=bias,
        )
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if feature_map is None:
            feature_map = PositiveRandomFeatures(coupling.default_num_random_features)
        if causal:
            feature_map.require_causal()
        feature_map.build(num_heads, coupling.input_width(channels // num_heads, rpe))
        self.coupling = coupling
        self.feature_map = feature_map
        self.chunk_size = chunk_size
        self.eps = eps
        self.alarm = NormalizerAlarm()

    def reset_parameters(self) -> None:
        """Initial weights everywhere, the RPE's (shared or not) included, and new random draws."""
        super().reset_parameters()
        self.feature_map.reset_parameters()

    @property
    def basis_width(self) -> int | None:
        """K, width of what `encode_positions` gives: 2R, or None without an RPE."""
        return None if self.rpe is None else 2 * self.rpe.num_frequencies

    def encode_positions(
        self, pos: Float[Tensor, "B N X"] | None, atom_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N K"] | None:
        """The RPE's trigonometric basis `[B, H, N, 2R]`, or None where positions play no part."""
        if pos is None or self.rpe is None:
            return None
        self.check_position_dim(pos)
        return self.rpe.basis(zero_padding(pos, atom_mask))

    def forward(
        self,
        x: Float[Tensor, "B N Cin"],
        pos: Float[Tensor, "B N X"] | None = None,
        atom_mask: Bool[Tensor, "B N"] | None = None,
        *,
        positional: Float[Tensor, "B H N K"] | None = None,
    ) -> Float[Tensor, "B N C"]:
        """Attention over the tokens of each graph.

        Args:
            x: token features.
            pos: positions, in the unit whose inverse the RPE's frequencies have.
            atom_mask: true at real tokens, all by default.
            positional: `encode_positions(pos, atom_mask)`, instead of `pos`.
        """
        self.check_inputs(x, pos, atom_mask)
        if positional is None:
            positional = self.encode_positions(pos, atom_mask)
        else:
            self.check_positional(positional, x, self.basis_width)
        query, key, value = self.heads(zero_padding(x, atom_mask))
        out = flt_attention(
            query,
            key,
            value,
            atom_mask=atom_mask,
            feature_map=self.feature_map,
            coupling=self.coupling,
            rpe=self.rpe,
            positional=positional,
            causal=self.causal,
            chunk_size=self.chunk_size,
            eps=self.eps,
            alarm=self.alarm,
        )
        return self.merge(out, atom_mask)
