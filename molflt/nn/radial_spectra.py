"""A small network of |xi| under a Gaussian envelope as spectrum: any isotropic f whose spectrum decays."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import roots_gegenbauer
from torch import Tensor, nn

from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.kernels import safe_norm
from molflt.nn.spectra import Spectrum

LARGEST_SCALED_RADIUS = 9.0


def projected_direction_rule(num_nodes: int, position_dim: int) -> tuple[Tensor, Tensor]:
    """Nodes t > 0 and weights for the mean of an even function of u.e over unit vectors u in X dimensions.

    u.e has the density (1 - t^2)^((X-3)/2): Gauss-Gegenbauer, of which the positive half is kept. In one
    dimension u.e is +-1.
    """
    if position_dim == 1:
        return torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    nodes, weights = roots_gegenbauer(2 * num_nodes, 0.5 * position_dim - 1)
    nodes, weights = torch.from_numpy(nodes[num_nodes:]), torch.from_numpy(weights[num_nodes:])
    return nodes, weights / weights.sum()


def scaled_radius_rule(num_nodes: int, position_dim: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights for the mean over the length of a standard normal X-vector."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    radius = torch.from_numpy(0.5 * LARGEST_SCALED_RADIUS * (nodes + 1))
    log_chi = (
        (position_dim - 1) * radius.log()
        - 0.5 * radius.square()
        - (0.5 * position_dim - 1) * math.log(2)
        - math.lgamma(0.5 * position_dim)
    )
    return radius, 0.5 * LARGEST_SCALED_RADIUS * torch.from_numpy(weights) * log_chi.exp()


class RadialMLPSpectrum(Spectrum):
    """g(xi) = N(xi; 0, std^2) net_h(|xi| / std), isotropic in space.

    net: two hidden layers of tanh units shared by the heads and a linear output per head, so |g|/p is bounded
    for a Gaussian p with at least the same std. f(0) is the mean of net over the envelope, of order 1.
    `closed_form` is by quadrature over |xi| and over directions, and costs `num_nodes`^2 evaluations per
    displacement: 1e-6 accurate for 2 pi std |x| <= 20 at the default of 64 nodes.

    Args:
        num_heads: H.
        position_dim: X.
        std: initial width of the envelope, cycles per position unit; f has details down to 1/(2 pi std).
        hidden_channels: width of the network.
        num_nodes: quadrature nodes of `closed_form`.
    """

    even = True

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        std: float = 0.3,
        hidden_channels: int = 32,
        num_nodes: int = 64,
    ) -> None:
        super().__init__(num_heads, position_dim)
        self.envelope = GaussianComponents(torch.full((num_heads, 1), std), position_dim)
        self.hidden = nn.Sequential(
            nn.Linear(1, hidden_channels), nn.Tanh(), nn.Linear(hidden_channels, hidden_channels), nn.Tanh()
        )
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_channels))
        self.bias = nn.Parameter(torch.empty(num_heads))
        # Constants, no state, and kept out of the buffers so that a cast of the module leaves them in
        # float64.
        self._direction_rule = projected_direction_rule(num_nodes, position_dim)
        self._radius_rule = scaled_radius_rule(num_nodes, position_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial envelope and a new random network."""
        self.envelope.reset_parameters()
        for layer in self.hidden:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
        nn.init.normal_(self.bias)

    def network(self, scaled_radius: Float[Tensor, "*G #H R"]) -> Float[Tensor, "*G H R"]:
        """net_h(|xi| / std)."""
        hidden = self.hidden(scaled_radius.unsqueeze(-1))
        return (hidden * self.weight.unsqueeze(-2)).sum(-1) + self.bias.unsqueeze(-1)

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        envelope = self.envelope(frequencies).squeeze(-1)
        return envelope * self.network(safe_norm(frequencies) / self.envelope.std)

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        direction, direction_weights = (rule.to(displacement) for rule in self._direction_rule)
        radius, radius_weights = (rule.to(displacement) for rule in self._radius_rule)
        weights = radius_weights * self.network(radius.unsqueeze(0))
        distance = 2 * math.pi * safe_norm(displacement).unsqueeze(-1) * self.envelope.std.squeeze(-1)
        along = distance[..., None, None] * radius.unsqueeze(-1) * direction
        mean_wave = (along.cos() * direction_weights).sum(-1)
        return (mean_wave * weights).sum(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden_channels={self.weight.shape[-1]}"
