"""Shift-invariant positive-definite kernels K(x) with K(0) = 1, and their spectral densities p_K.

Bochner's theorem: the Fourier transform of such a kernel is a probability density,

    K(x) = int p_K(xi) exp(2 pi i x.xi) dxi,    int p_K = 1.

`ShiftInvariantKernelSpectrum` takes p_K as a spectrum; `MatchedKernelFrequencies` draws from it, which makes
g/p constant. Source: Rahimi & Recht 2007; Rasmussen & Williams 2006, section 4.2.1, here with xi in cycles.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from molflt.nn.frequencies import gaussian_noise

MATERN_POLYNOMIALS = {0.5: (1.0, 0.0, 0.0), 1.5: (1.0, 1.0, 0.0), 2.5: (1.0, 1.0, 1.0 / 3.0)}


def safe_norm(x: Float[Tensor, "*S X"]) -> Float[Tensor, "*S"]:
    """|x| with gradient 0, and not NaN, at x = 0."""
    square = x.square().sum(-1)
    at_zero = square == 0
    return square.masked_fill(at_zero, 1.0).sqrt().masked_fill(at_zero, 0.0)


class ShiftInvariantKernel(nn.Module):
    """K(x) with a learnable length per head; base class.

    Args:
        num_heads: H.
        position_dim: X.
        length: initial length scale, position units: a number or `[H]`.
        learnable: whether the length is a parameter (a buffer otherwise).
    """

    raw_length: Tensor

    def __init__(
        self, num_heads: int, position_dim: int, length: float | Tensor = 1.0, learnable: bool = True
    ) -> None:
        super().__init__()
        value = torch.as_tensor(length, dtype=torch.get_default_dtype()).detach()
        if not value.is_meta and not bool((value > 0).all()):
            raise ValueError(f"length must be positive, got {length}: give a value in position units")
        if value.ndim > 0 and tuple(value.shape) != (num_heads,):
            raise ValueError(f"length must be a number or have shape [{num_heads}], got {list(value.shape)}")
        self.num_heads = num_heads
        self.position_dim = position_dim
        self._initial_length = value.expand(num_heads).clone()
        raw_length = torch.empty_like(self._initial_length)
        if learnable:
            self.raw_length = nn.Parameter(raw_length)
        else:
            self.register_buffer("raw_length", raw_length)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the initial length."""
        self.raw_length.copy_(self._initial_length.log())

    @property
    def length(self) -> Float[Tensor, "H"]:
        """Length scale, position units."""
        return self.raw_length.exp()

    def forward(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        """K(x)."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def log_spectral_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        """log p_K(xi), p_K in (position unit)^X."""
        raise NotImplementedError(f"{type(self).__name__} must define log_spectral_density")

    def draw_unit_frequencies(
        self, num_frequencies: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "H R X"]:
        """Draws from p_K of length 1; divided by the length they are draws from p_K."""
        raise NotImplementedError(f"{type(self).__name__} must define draw_unit_frequencies")

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, position_dim={self.position_dim}"


class GaussianKernel(ShiftInvariantKernel):
    """K(x) = exp(-|x|^2 / 2 length^2); p_K is Gaussian with std 1/(2 pi length)."""

    def forward(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        square = displacement.square().sum(-1, keepdim=True)
        return (-0.5 * square / self.length.square()).exp()

    def log_spectral_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        length = self.length.unsqueeze(-1)
        square = frequencies.square().sum(-1)
        log_scale = length.log() + 0.5 * math.log(2 * math.pi)
        return self.position_dim * log_scale - 2 * math.pi**2 * length.square() * square

    def draw_unit_frequencies(
        self, num_frequencies: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "H R X"]:
        shape = (self.num_heads, num_frequencies, self.position_dim)
        return gaussian_noise(shape, generator) / (2 * math.pi)


class LaplacianKernel(ShiftInvariantKernel):
    """K(x) = exp(-|x|_1 / length), a product over dimensions; p_K is a product of Cauchy densities.

    The one with the Euclidean norm instead is `MaternKernel` of smoothness 1/2.
    """

    def forward(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        return (-displacement.abs().sum(-1, keepdim=True) / self.length).exp()

    def log_spectral_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        length = self.length.unsqueeze(-1)
        square = (2 * math.pi * length.unsqueeze(-1) * frequencies).square()
        return self.position_dim * (2 * length).log() - square.log1p().sum(-1)

    def draw_unit_frequencies(
        self, num_frequencies: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "H R X"]:
        shape = (2, self.num_heads, num_frequencies, self.position_dim)
        numerator, denominator = gaussian_noise(shape, generator)
        return numerator / denominator / (2 * math.pi)


class MaternKernel(ShiftInvariantKernel):
    """Matérn kernel of smoothness 1/2, 3/2 or 5/2 in the Euclidean norm; p_K is a multivariate t density.

    With a = sqrt(2 smoothness) |x| / length: K = exp(-a), (1 + a) exp(-a), (1 + a + a^2/3) exp(-a).
    p_K has 2 smoothness degrees of freedom and scale 1/(2 pi length).

    Args:
        num_heads, position_dim, length, learnable: as in `ShiftInvariantKernel`.
        smoothness: nu, one of 0.5, 1.5, 2.5.
    """

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        length: float | Tensor = 1.0,
        smoothness: float = 1.5,
        learnable: bool = True,
    ) -> None:
        if smoothness not in MATERN_POLYNOMIALS:
            raise ValueError(f"smoothness must be 0.5, 1.5 or 2.5, got {smoothness}")
        super().__init__(num_heads, position_dim, length, learnable)
        self.smoothness = smoothness

    def forward(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        scaled = math.sqrt(2 * self.smoothness) * safe_norm(displacement).unsqueeze(-1) / self.length
        constant, linear, quadratic = MATERN_POLYNOMIALS[self.smoothness]
        return (constant + scaled * (linear + quadratic * scaled)) * (-scaled).exp()

    def log_spectral_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        length = self.length.unsqueeze(-1)
        freedom, dims = 2 * self.smoothness, self.position_dim
        square = (2 * math.pi * length).square() * frequencies.square().sum(-1)
        log_mass = (
            math.lgamma((freedom + dims) / 2)
            - math.lgamma(freedom / 2)
            - 0.5 * dims * math.log(freedom * math.pi)
        )
        log_scale = dims * (2 * math.pi * length).log()
        return log_mass + log_scale - 0.5 * (freedom + dims) * (square / freedom).log1p()

    def draw_unit_frequencies(
        self, num_frequencies: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "H R X"]:
        freedom = round(2 * self.smoothness)
        shape = (self.num_heads, num_frequencies, self.position_dim + freedom)
        normal, chi = gaussian_noise(shape, generator).split([self.position_dim, freedom], dim=-1)
        return normal / (chi.norm(dim=-1, keepdim=True) / math.sqrt(freedom)) / (2 * math.pi)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, smoothness={self.smoothness}"
