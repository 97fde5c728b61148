"""Samplers whose density is that of the spectrum itself, so that |g|/p stays bounded, or constant.

A single Gaussian must be wide enough for the sharpest part of f (std >= 1/(2 pi s_min), or sup |g|/p is
infinite), and then almost never hits the spectrum of the smooth parts: their share of its volume is
(s_min/s_max)^X. A mixture of one Gaussian per basis function covers each of them.

The samplers share the learnable components (or kernel) of the spectrum, so the two stay matched during
training:

    spectrum = GaussianBasisSpectrum(num_heads, position_dim)
    sampler = MatchedMixtureFrequencies(spectrum.components, num_frequencies)
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from molflt.nn.frequencies import FrequencySampler, gaussian_noise
from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.kernels import ShiftInvariantKernel


def stratified_components(
    num_heads: int, num_frequencies: int, num_components: int, generator: torch.Generator | None = None
) -> Int[Tensor, "H R"]:
    """Component index of each frequency: R/T per component, and drawn by strata where T does not divide R.

    Frequency k takes floor((k + u) T/R) with u uniform in [0, 1): over all k every component has the same
    expected share R/T, which is what makes q = 1/(R p) unbiased with p the mean of the components.
    """
    device = "cpu" if generator is None else generator.device
    offset = torch.rand((num_heads, num_frequencies), generator=generator, dtype=torch.float64, device=device)
    strata = torch.arange(num_frequencies, device=device) + offset
    index = (strata * num_components / num_frequencies).floor().long()
    return index.clamp(max=num_components - 1)


class MatchedMixtureFrequencies(FrequencySampler):
    """Frequencies from the equal mixture of a spectrum's Gaussian components, stratified (R/T from each).

    p(xi) = (1/T) sum_t N(xi; mu_t, sigma_t^2). For a spectrum sum_t a_t N(xi; mu_t, sigma_t^2) this
    bounds c = sup |g|/p by T max_t |a_t|, whatever the widths.

    Measured RMS error over max |f|, X = 3, 16 widths of 0.5 to 5 Å with equal amplitudes, in a 20 Å box:

    | sampler | R = 64 | R = 1,024 |
    | --- | --- | --- |
    | one Gaussian, the narrowest with finite c | 0.47 | 0.112 |
    | one Gaussian, the best std | 0.24 | 0.059 |
    | matched mixture | 0.084 | 0.021 |

    Args:
        components: shared with the spectrum (`spectrum.components`), or made for spectra without Gaussians.
        num_frequencies: R.
        generator: source of the first draw; torch's global one without it.
    """

    base_noise: Tensor
    component_index: Tensor

    def __init__(
        self,
        components: GaussianComponents,
        num_frequencies: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(components.num_heads, num_frequencies, components.position_dim)
        self.components = components
        shape = (self.num_heads, num_frequencies)
        self.register_buffer("base_noise", torch.empty(*shape, self.position_dim))
        self.register_buffer("component_index", torch.empty(shape, dtype=torch.long))
        self.resample(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Resets the components, also for the spectrum that shares them, and redraws."""
        self.components.reset_parameters()
        self.resample(generator)

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        heads, count = self.num_heads, self.num_frequencies
        index = stratified_components(heads, count, self.components.num_components, generator)
        self.component_index.copy_(index)
        self.base_noise.copy_(gaussian_noise((heads, count, self.position_dim), generator))

    @property
    def frequencies(self) -> Float[Tensor, "H R X"]:
        std = self.components.std.gather(-1, self.component_index).unsqueeze(-1)
        frequencies = std * self.base_noise
        if self.components.mean is None:
            return frequencies
        index = self.component_index.unsqueeze(-1).expand(-1, -1, self.position_dim)
        return frequencies + self.components.mean.gather(-2, index)

    def log_sampling_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        log_densities = self.components.log_density(frequencies)
        return log_densities.logsumexp(-1) - math.log(self.components.num_components)


class MatchedKernelFrequencies(FrequencySampler):
    """Frequencies from the spectral density p_K of a shift-invariant kernel.

    With the spectrum C p_K of the same kernel g/p is the constant C: the smallest bound there is. Kernels
    that are not smooth (Laplacian, Matérn 1/2) have heavy-tailed densities, so a few frequencies are very
    high.

    Args:
        kernel: shared with the spectrum (`spectrum.kernel`).
        num_frequencies: R.
        generator: source of the first draw; torch's global one without it.
    """

    base_noise: Tensor

    def __init__(
        self,
        kernel: ShiftInvariantKernel,
        num_frequencies: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(kernel.num_heads, num_frequencies, kernel.position_dim)
        self.kernel = kernel
        self.register_buffer("base_noise", torch.empty(self.num_heads, num_frequencies, self.position_dim))
        self.resample(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Resets the kernel, also for the spectrum that shares it, and redraws."""
        self.kernel.reset_parameters()
        self.resample(generator)

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        self.base_noise.copy_(self.kernel.draw_unit_frequencies(self.num_frequencies, generator))

    @property
    def frequencies(self) -> Float[Tensor, "H R X"]:
        return self.base_noise / self.kernel.length[:, None, None]

    def log_sampling_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        return self.kernel.log_spectral_density(frequencies)
