"""Spectra of functions with compact support: boxes and their smooth relatives, the B-splines.

The box 1[|x| <= v] has the transform sin(2 pi v xi)/(pi xi); its k-fold convolution with itself has the k-th
power of that, is a B-spline of degree k - 1 and vanishes beyond k v. Source: arXiv 2302.01925, section 3.3.

A box is discontinuous, so its |g| is not integrable: sup |g|/p is infinite for every density p, and the
Fourier estimate converges slowly and overshoots at the edges (Gibbs). The smooth ones of order 2 and more are
better behaved; with a Gaussian p, whose tails are thinner than any power, |g|/p is unbounded for them too.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from molflt.nn.spectra import Spectrum, log_spaced


def cardinal_b_spline(x: Float[Tensor, "*S"], order: int) -> Float[Tensor, "*S"]:
    """The centred B-spline of `order` k (degree k - 1): the k-fold convolution of the box 1[|x| <= 1/2].

    1/(k-1)! sum_i (-1)^i binom(k, i) (x + k/2 - i)_+^(k-1), supported on |x| <= k/2 and of unit integral.
    """
    # Evaluated on the left half, where fewer and smaller terms cancel.
    left = 0.5 * order - x.abs()
    if order == 1:
        return (left >= 0).to(x.dtype)
    terms = [
        (-1) ** i * math.comb(order, i) * (left - i).clamp(min=0) ** (order - 1)
        for i in range(math.ceil(order / 2))
    ]
    return torch.stack(terms).sum(0) / math.factorial(order - 1)


class SmoothLocalSpectrum(Spectrum):
    """Sum of T B-splines of order k with learnable radii per dimension.

    With M_k the centred B-spline of order k,

    g(xi) = sum_t amplitude_t prod_j 2 v_tj sinc(2 v_tj xi_j)^k / M_k(0),   sinc(z) = sin(pi z)/(pi z)
    f(x)  = sum_t amplitude_t prod_j M_k(x_j / 2 v_tj) / M_k(0)

    f vanishes where |x_j| > k v_tj for every t. Amplitudes start as N(0, 1/T), radii log-spaced.

    Args:
        num_heads: H.
        position_dim: X.
        order: k; 1 is the box.
        num_basis: T.
        radius_range: smallest and largest initial v_t, position units.
    """

    even = True

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        order: int = 2,
        num_basis: int = 8,
        radius_range: tuple[float, float] = (0.5, 5.0),
    ) -> None:
        super().__init__(num_heads, position_dim)
        if not 1 <= order <= 8:
            raise ValueError(f"order must be from 1 to 8 (B-splines cancel badly beyond), got {order}")
        self.order = order
        radius = log_spaced(radius_range, num_basis, "radius_range")
        self._initial_radius = radius.unsqueeze(-1)
        self.amplitude = nn.Parameter(torch.empty(num_heads, num_basis))
        self.raw_radius = nn.Parameter(torch.empty(num_heads, num_basis, position_dim))
        self.peak = cardinal_b_spline(torch.zeros((), dtype=torch.float64), order).item()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial radii and new random amplitudes."""
        self.raw_radius.copy_(self._initial_radius.log())
        nn.init.normal_(self.amplitude, std=self.amplitude.shape[-1] ** -0.5)

    @property
    def radius(self) -> Float[Tensor, "H T X"]:
        """v_tj, position units."""
        return self.raw_radius.exp()

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        diameter = 2 * self.radius.unsqueeze(-3)
        factors = diameter * torch.sinc(diameter * frequencies.unsqueeze(-2)) ** self.order / self.peak
        return (self.amplitude.unsqueeze(-2) * factors.prod(-1)).sum(-1)

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        scaled = displacement[..., None, None, :] / (2 * self.radius)
        factors = cardinal_b_spline(scaled, self.order) / self.peak
        return (self.amplitude * factors.prod(-1)).sum(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, order={self.order}, num_basis={self.amplitude.shape[-1]}"


class LocalBoxSpectrum(SmoothLocalSpectrum):
    """Sum of T boxes with learnable radii per dimension: attention within a window.

    g(xi) = sum_t amplitude_t prod_j sin(2 pi v_tj xi_j)/(pi xi_j)
    f(x)  = sum_t amplitude_t prod_j 1[|x_j| <= v_tj]

    `closed_form` is flat in the radii, so they learn from g only.

    Args:
        num_heads: H.
        position_dim: X.
        num_basis: T.
        radius_range: smallest and largest initial v_t, position units.
    """

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        num_basis: int = 8,
        radius_range: tuple[float, float] = (0.5, 5.0),
    ) -> None:
        super().__init__(num_heads, position_dim, 1, num_basis, radius_range)
