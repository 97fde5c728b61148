"""Learned spectra g(xi) and their closed-form f(x): the contract, and sums of Gaussians.

    f(x) = int g(xi) exp(2 pi i x.xi) dxi

f is dimensionless (it is added to attention logits) and g has the unit (position unit)^X. All spectra are
parametrised by what a term adds to f(0), so amplitudes are of order 1 whatever the widths and X. (The usual
w_t in g = sum_t w_t exp(-2 pi^2 s_t^2 |xi|^2) is amplitude_t (sqrt(2 pi) s_t)^X and spreads over orders of
magnitude.) g may be signed, and complex where f is to be asymmetric; only the real part of the transform
counts.

Further spectra: `kernel_spectra` (positive-definite kernels), `local_spectra` (boxes and B-splines),
`radial_spectra` (a network of |xi|). Source: arXiv 2302.01925, section 3.3.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Inexact
from torch import Tensor, nn

from molflt.nn.frequencies import FrequencySampler, is_exactly, is_isotropic_gaussian
from molflt.nn.gaussian_components import GaussianComponents


class Spectrum(nn.Module):
    """g for each head; base class.

    Args:
        num_heads: H.
        position_dim: X.
    """

    even = False
    """True where g(-xi) = g(xi) by construction."""

    def __init__(self, num_heads: int, position_dim: int) -> None:
        super().__init__()
        if num_heads < 1 or position_dim < 1:
            raise ValueError(
                f"num_heads and position_dim must be at least 1, got {num_heads} and {position_dim}"
            )
        self.num_heads = num_heads
        self.position_dim = position_dim

    def reset_parameters(self) -> None:
        """Initial parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define reset_parameters")

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Inexact[Tensor, "*G H R"]:
        """g(xi), real or complex, in (position unit)^X; frequencies in cycles per position unit."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def importance_weights(self, sampler: FrequencySampler) -> Inexact[Tensor, "*G H R"]:
        """q_k g(xi_k) at the sampler's frequencies, real or complex, in units of f."""
        frequencies, quadrature_weights = sampler()
        with torch.autocast(frequencies.device.type, enabled=False):
            return quadrature_weights * self(frequencies)

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        """f(x), what the Fourier features converge to; NotImplementedError where it is not known."""
        raise NotImplementedError(
            f"{type(self).__name__} has no closed form: use FourierRPE.dense_bias with many frequencies"
        )

    def peaks(self) -> Float[Tensor, "H K X"]:
        """Frequencies around which |g| is large; the origin unless a subclass knows better."""
        return torch.zeros(self.num_heads, 1, self.position_dim)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, position_dim={self.position_dim}"


def log_spaced(value_range: tuple[float, float], count: int, name: str) -> Float[Tensor, "T"]:
    """`count` values from the smallest to the largest, evenly spaced in log; a single one is the smallest."""
    smallest, largest = value_range
    if not 0 < smallest <= largest:
        raise ValueError(
            f"{name} must be (smallest, largest) with 0 < smallest <= largest, got {value_range}"
        )
    if count < 1:
        raise ValueError(f"the number of values in {name} must be at least 1, got {count}")
    return torch.linspace(math.log(smallest), math.log(largest), count).exp()


class GaussianBasisSpectrum(Spectrum):
    """Sum of T centred Gaussians: the spectrum for molecules, isotropic in space.

    g(xi) = sum_t amplitude_t (sqrt(2 pi) s_t)^X exp(-2 pi^2 s_t^2 |xi|^2)
    f(x)  = sum_t amplitude_t exp(-|x|^2 / 2 s_t^2)

    Amplitudes are dimensionless and start as N(0, 1/T), so f(0) is N(0, 1) and near and far heads of either
    sign occur; widths s_t start log-spaced.

    Args:
        num_heads: H.
        position_dim: X.
        num_basis: T.
        width_range: smallest and largest initial s_t, position units.

    Example:
        >>> spectrum = GaussianBasisSpectrum(2, 3, num_basis=8)
        >>> spectrum.closed_form(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    even = True

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        num_basis: int = 32,
        width_range: tuple[float, float] = (0.5, 5.0),
    ) -> None:
        super().__init__(num_heads, position_dim)
        std = 1 / (2 * math.pi * log_spaced(width_range, num_basis, "width_range"))
        self.components = GaussianComponents(std.expand(num_heads, num_basis), position_dim)
        self.amplitude = nn.Parameter(torch.empty(num_heads, num_basis))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial widths and new random amplitudes."""
        self.components.reset_parameters()
        nn.init.normal_(self.amplitude, std=self.amplitude.shape[-1] ** -0.5)

    @property
    def widths(self) -> Float[Tensor, "H T"]:
        """s_t, position units."""
        return self.components.widths

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        return (self.amplitude.unsqueeze(-2) * self.components(frequencies)).sum(-1)

    def importance_weights(self, sampler: FrequencySampler) -> Inexact[Tensor, "*G H R"]:
        known = is_exactly(self, GaussianBasisSpectrum) and is_exactly(self.components, GaussianComponents)
        if not known or self.components.mean is not None or not is_isotropic_gaussian(sampler):
            return super().importance_weights(sampler)
        # Both densities at once: half the operations, whose number is what short inputs wait for.
        ratio = self.components.density_ratio(sampler.base_noise, sampler.raw_std)
        return (self.amplitude.unsqueeze(-2) * ratio).sum(-1) / sampler.num_frequencies

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        square = displacement.square().sum(-1)[..., None, None]
        return (self.amplitude * (-0.5 * square / self.widths.square()).exp()).sum(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_basis={self.amplitude.shape[-1]}"


class GaussianMixtureSpectrum(Spectrum):
    """Sum of T Gaussians with means: the spectrum for text and images, (2 + X) T parameters per head.

    With N the Gaussian density of mean mu_t and standard deviation sigma_t in X dimensions,

    g(xi) = sum_t (amplitude_t - i sine_amplitude_t) N(xi; mu_t, sigma_t^2)
    f(x)  = sum_t exp(-2 pi^2 sigma_t^2 |x|^2)
                  [amplitude_t cos(2 pi mu_t.x) + sine_amplitude_t sin(2 pi mu_t.x)]

    The sine part (T more parameters) makes f(x) differ from f(-x): before from after, left from right.
    Amplitudes start as N(0, 1/T), means as N(0, mean_std^2). Read it with
    `MatchedMixtureFrequencies(spectrum.components, R)`: most frequencies of a wide single Gaussian fall where
    no component is, and carry no gradient.

    Args:
        num_heads: H.
        position_dim: X.
        num_basis: T.
        std: initial sigma_t, cycles per position unit; the envelope of f is 1/(2 pi sigma_t) wide.
        mean_std: spread of the initial mu_t, cycles per position unit.
        asymmetric: whether there is a sine part; g is complex then.
    """

    sine_amplitude: Tensor | None

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        num_basis: int = 25,
        std: float = 0.05,
        mean_std: float = 0.1,
        asymmetric: bool = False,
    ) -> None:
        super().__init__(num_heads, position_dim)
        if num_basis < 1:
            raise ValueError(f"num_basis must be at least 1, got {num_basis}")
        if not (std > 0 and mean_std >= 0):
            raise ValueError(f"std must be positive and mean_std not negative, got {std} and {mean_std}")
        self.mean_std = mean_std
        self.components = GaussianComponents(
            torch.full((num_heads, num_basis), std),
            position_dim,
            mean=torch.zeros(num_heads, num_basis, position_dim),
        )
        self.amplitude = nn.Parameter(torch.empty(num_heads, num_basis))
        self.sine_amplitude = nn.Parameter(torch.empty(num_heads, num_basis)) if asymmetric else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial standard deviations, new random means and amplitudes."""
        self.components.reset_parameters()
        assert self.components.mean is not None
        nn.init.normal_(self.components.mean, std=self.mean_std)
        spread = self.amplitude.shape[-1] ** -0.5
        nn.init.normal_(self.amplitude, std=spread)
        if self.sine_amplitude is not None:
            nn.init.normal_(self.sine_amplitude, std=spread)

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Inexact[Tensor, "*G H R"]:
        density = self.components(frequencies)
        even = (self.amplitude.unsqueeze(-2) * density).sum(-1)
        if self.sine_amplitude is None:
            return even
        return torch.complex(even, -(self.sine_amplitude.unsqueeze(-2) * density).sum(-1))

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        assert self.components.mean is not None
        square = displacement.square().sum(-1)[..., None, None]
        envelope = (-2 * math.pi**2 * self.components.std.square() * square).exp()
        phase = 2 * math.pi * (displacement[..., None, None, :] * self.components.mean).sum(-1)
        wave = self.amplitude * phase.cos()
        if self.sine_amplitude is not None:
            wave = wave + self.sine_amplitude * phase.sin()
        return (envelope * wave).sum(-1)

    def peaks(self) -> Float[Tensor, "H K X"]:
        assert self.components.mean is not None
        return self.components.mean

    def extra_repr(self) -> str:
        asymmetric = self.sine_amplitude is not None
        return f"{super().extra_repr()}, num_basis={self.amplitude.shape[-1]}, asymmetric={asymmetric}"
