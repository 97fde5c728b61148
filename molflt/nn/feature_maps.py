"""Random feature maps phi with E[phi(x).phi(y)] = exp(x.y), all positive, and what every feature map shares.

With w the rows of a Gaussian, block-orthogonal projection W (M rows; M/2 for the hyperbolic map):

    positive      exp(w.x - |x|^2/2)                                       FAVOR+, Choromanski et al. 2021
    hyperbolic    exp(w.x - |x|^2/2), exp(-w.x - |x|^2/2)                  same, antithetic
    optimal       (1-4A)^(E/4) exp(A |w|^2 + sqrt(1-4A) w.x - |x|^2/2)     FAVOR++, Likhosherstov et al. 2022

each over sqrt(M). `molflt.nn.features` says how their exponentials are stabilised. Constant factors cancel in
attention and are left out.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from molflt.nn.features import Features, LogFeatures
from molflt.nn.frequencies import orthogonal_gaussian_noise
from molflt.nn.operands import Operands


class FeatureMap(nn.Module):
    """Linearises a function of queries and keys. Made by the user, sized by the attention layer.

    Subclasses implement `forward`; those with parameters or buffers create them in `reset_parameters`.
    """

    num_heads: int | None = None
    input_width: int | None = None

    def build(self, num_heads: int, input_width: int) -> None:
        """Creates parameters and buffers for vectors of width `input_width` in each of `num_heads` heads.

        Raises:
            ValueError: the map already has another size. (Layers of equal size may share a map.)
        """
        size, built = (num_heads, input_width), (self.num_heads, self.input_width)
        if built == (None, None):
            self.num_heads, self.input_width = size
            self.reset_parameters()
        elif built != size:
            raise ValueError(
                f"feature_map was built for (num_heads, input_width) = {built} and can not serve {size}; "
                "make one feature map for each size"
            )

    def reset_parameters(self) -> None:
        """Draws parameters and buffers anew."""

    def require_causal(self) -> None:
        """Raises ValueError if the features of a token depend on later tokens."""

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> Features:
        """Features of all tokens; a graph's depend on its own real tokens only."""
        raise NotImplementedError


class RandomProjectionFeatures(FeatureMap):
    """A feature map of W x with a fixed random W, kept in the buffer `projection` `[H, M, E]`.

    Each head has a W of its own, so that heads err independently: where they attend alike, the error of their
    mean is smaller than with one W for all by the square root of their number (3.4 times for 12 heads,
    measured), and the time is the same.

    Args:
        num_random_features: M.
    """

    projection: Tensor

    def __init__(self, num_random_features: int = 64) -> None:
        super().__init__()
        if num_random_features < 1:
            raise ValueError(f"num_random_features must be at least 1, got {num_random_features}")
        self.num_random_features = num_random_features

    def reset_parameters(self) -> None:
        self.resample()

    @property
    def num_rows(self) -> int:
        """Rows of W that are drawn."""
        return self.num_random_features

    def draw(self, generator: torch.Generator | None) -> Float[Tensor, "H rows E"]:
        """A new W for each head."""
        if self.num_heads is None or self.input_width is None:
            raise ValueError("the feature map has no size yet; call build(num_heads, input_width) first")
        return orthogonal_gaussian_noise(self.num_heads, self.num_rows, self.input_width, generator)

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draws W anew, from `generator` (a CPU generator) or the global one."""
        projection = self.draw(generator)
        if "projection" not in self._buffers:
            self.register_buffer("projection", torch.empty(projection.shape))
        self.projection.copy_(projection)

    def extra_repr(self) -> str:
        return f"num_random_features={self.num_random_features}"


class ExponentialFeatures(RandomProjectionFeatures):
    """phi_m(x) = exp(gain w_m.x - |x|^2/2 + bias_m / 2) with gain and bias per graph and head."""

    def gain_and_bias(
        self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B H 1 1"] | None, Float[Tensor, "B H 1 M"] | None]:
        """Factor on W (None: 1) and the bias of query and key together (None: 0)."""
        return None, None

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> LogFeatures:
        projection = operands.project(self.projection.to(operands.query.dtype))
        gain, bias = self.gain_and_bias(operands, atom_mask)
        if gain is not None:
            projection = projection.scaled(gain)
        key_bias = -operands.half_squared_key_norm()
        if atom_mask is not None:
            key_bias = key_bias.masked_fill(~atom_mask[:, None, :, None], float("-inf"))
        return LogFeatures(projection, key_bias, bias, atom_mask)


class PositiveRandomFeatures(ExponentialFeatures):
    """FAVOR+: phi(x) = exp(W x - |x|^2/2) / sqrt(M).

    Args:
        num_random_features: M. The error of the attention weights falls as M^-1/2, with a factor that grows
            as exp(|q^ + k^|^2 / 2).

    Source: Choromanski et al., Rethinking Attention with Performers, ICLR 2021.
    """


class HyperbolicRandomFeatures(ExponentialFeatures):
    """Antithetic positive features: phi(x) = [exp(W x), exp(-W x)] exp(-|x|^2/2) / sqrt(M), W of M/2 rows.

    Args:
        num_random_features: M, even. W has half the rows of the positive features' W, and the variance is
            smaller even so.

    Source: Choromanski et al., Rethinking Attention with Performers, ICLR 2021, Lemma 1.
    """

    def __init__(self, num_random_features: int = 64) -> None:
        super().__init__(num_random_features)
        if num_random_features % 2 != 0:
            raise ValueError(f"num_random_features must be even, got {num_random_features}")

    @property
    def num_rows(self) -> int:
        return self.num_random_features // 2

    def draw(self, generator: torch.Generator | None) -> Float[Tensor, "H M E"]:
        half = super().draw(generator)
        return torch.cat([half, -half], dim=-2)


class OptimalPositiveFeatures(ExponentialFeatures):
    """FAVOR++: phi(x) = (1-4A)^(E/4) exp(A |w|^2 + sqrt(1-4A) w.x - |x|^2/2) / sqrt(M).

    Unbiased for every A < 1/8. A minimises the variance at the mean of |q^_i + k^_j|^2 over the pairs of a
    graph's own real tokens, per head: A = (1 - 1/rho)/8, rho = (sqrt((E+2s)^2 + 8Es) - E - 2s) / 4s with s
    that mean (the minimum of E log(1+rho) - (E/2) log rho + s rho, the log of the second moment). A is
    detached, so gradients leave out its own dependence on queries, keys and positions: enough for training,
    not for forces.

    It looks at all tokens, so it can not serve causal attention.

    Args:
        num_random_features: M.

    Source: Likhosherstov et al., Chefs' Random Tables, NeurIPS 2022, section 3.
    """

    def require_causal(self) -> None:
        raise ValueError(
            "OptimalPositiveFeatures takes statistics over all tokens and can not be causal; use "
            "PositiveRandomFeatures or HyperbolicRandomFeatures"
        )

    def gain_and_bias(
        self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B H 1 1"], Float[Tensor, "B H 1 M"]]:
        projection = self.projection.to(operands.query.dtype)
        with torch.no_grad():
            shape_parameter = optimal_shape(operands.mean_squared_sum(atom_mask), projection.shape[-1])
            squared_norm = projection.square().sum(-1).unsqueeze(-2)
            return (1 - 4 * shape_parameter).sqrt(), 2 * shape_parameter * squared_norm


def optimal_shape(mean_squared_sum: Float[Tensor, "*batch"], width: int) -> Float[Tensor, "*batch"]:
    """FAVOR++'s A for the mean s of |x + y|^2 in `width` dimensions; 0, which is FAVOR+, at s = 0."""
    s, d = mean_squared_sum, width
    # rho = (sqrt((d+2s)^2 + 8 d s) - (d+2s)) / 4s, multiplied out against cancellation at small s.
    rho = 2 * d / (torch.sqrt((d + 2 * s).square() + 8 * d * s) + d + 2 * s)
    return (1 - 1 / rho) / 8
