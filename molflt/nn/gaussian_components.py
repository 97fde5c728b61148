"""T Gaussians per head in frequency space, N(xi; mu_t, sigma_t^2), each of unit mass.

A spectrum is an amplitude-weighted sum of them (`GaussianBasisSpectrum`, `GaussianMixtureSpectrum`) and the
matched sampler draws from their mean (`MatchedMixtureFrequencies`). Sharing one `GaussianComponents` between
the two keeps g/p bounded while the components are learned.

Position space and frequency space of a component: a Gaussian of width s = 1/(2 pi sigma) times a wave of
wave vector mu,

    int N(xi; mu, sigma^2) exp(2 pi i x.xi) dxi = exp(-|x|^2 / 2 s^2) exp(2 pi i mu.x).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from molflt.nn.functional import exp_


class GaussianComponents(nn.Module):
    """Learnable standard deviations sigma_t and, optionally, means mu_t of T Gaussians per head.

    Args:
        std: initial sigma_t `[H, T]`, cycles per position unit.
        position_dim: X.
        mean: initial mu_t `[H, T, X]`, cycles per position unit; None fixes all means at zero.
        learnable: whether sigma_t and mu_t are parameters (buffers otherwise).
    """

    raw_std: Tensor
    mean: Tensor | None

    def __init__(
        self,
        std: Float[Tensor, "H T"],
        position_dim: int,
        mean: Float[Tensor, "H T X"] | None = None,
        learnable: bool = True,
    ) -> None:
        super().__init__()
        if not std.is_meta and not bool((std > 0).all()):
            raise ValueError(f"std must be positive everywhere, got a smallest value of {std.min().item()}")
        if mean is not None and tuple(mean.shape) != (*std.shape, position_dim):
            raise ValueError(
                f"mean must have shape {(*std.shape, position_dim)} to match std and position_dim, "
                f"got {tuple(mean.shape)}"
            )
        self.num_heads, self.num_components = std.shape
        self.position_dim = position_dim
        self.learnable = learnable
        self._initial_std = std.detach().clone()
        self._initial_mean = None if mean is None else mean.detach().clone()
        self._declare("raw_std", torch.empty_like(self._initial_std))
        self._declare("mean", None if mean is None else torch.empty_like(mean))
        self.reset_parameters()

    def _declare(self, name: str, value: Tensor | None) -> None:
        if self.learnable and value is not None:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the initial standard deviations and means."""
        self.raw_std.copy_(self._initial_std.log())
        if self.mean is not None and self._initial_mean is not None:
            self.mean.copy_(self._initial_mean)

    @property
    def std(self) -> Float[Tensor, "H T"]:
        """sigma_t > 0, cycles per position unit."""
        return self.raw_std.exp()

    @property
    def widths(self) -> Float[Tensor, "H T"]:
        """s_t = 1/(2 pi sigma_t), position units."""
        return 1 / (2 * math.pi * self.std)

    def log_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R T"]:
        """log N(xi; mu_t, sigma_t^2) of every component, normalised in X dimensions."""
        if self.mean is None:
            square = frequencies.square().sum(-1, keepdim=True)
        else:
            square = (frequencies.unsqueeze(-2) - self.mean.unsqueeze(-3)).square().sum(-1)
        log_std = self.raw_std.unsqueeze(-2)
        log_norm = -self.position_dim * (log_std + 0.5 * math.log(2 * math.pi))
        return torch.addcmul(log_norm, square, (-2 * log_std).exp(), value=-0.5)

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R T"]:
        """N(xi; mu_t, sigma_t^2) of every component, in (position unit)^X."""
        return exp_(self.log_density(frequencies))

    def density_ratio(
        self, noise: Float[Tensor, "H R X"], log_std: Float[Tensor, "H 1"]
    ) -> Float[Tensor, "H R T"]:
        """N(xi; 0, sigma_t^2) / N(xi; 0, std^2) at xi = std noise, for components without means.

        One exponential instead of two; neither density has to be in the range of numbers.
        """
        assert self.mean is None
        log_ratio = log_std - self.raw_std
        square = noise.square().sum(-1, keepdim=True)
        peak, curvature = self.position_dim * log_ratio, torch.expm1(2 * log_ratio)
        return exp_(torch.addcmul(peak.unsqueeze(-2), square, curvature.unsqueeze(-2), value=-0.5))

    def extra_repr(self) -> str:
        kind = "centred" if self.mean is None else "shifted"
        return (
            f"num_heads={self.num_heads}, num_components={self.num_components}, "
            f"position_dim={self.position_dim}, {kind}, learnable={self.learnable}"
        )
