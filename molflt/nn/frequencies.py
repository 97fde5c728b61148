"""Samplers of the frequencies xi at which a learned spectrum g is read, and their densities p.

With xi_k drawn from a density p that covers the spectrum (flt_math, section 1; arXiv 2302.01925, section
3.2),

    f(x) = int g(xi) exp(2 pi i x.xi) dxi  ~  sum_k q_k g(xi_k) exp(2 pi i x.xi_k),    q_k = 1 / (R p(xi_k)).

The error is that of a mean of R terms bounded by c = sup |g|/p: Var <= (c^2 - f^2)/R. The best p is
proportional to |g|.

A sampler draws its noise when it is built and when `resample` is called, never in `forward`, and keeps it in
a buffer, so a checkpoint predicts the same everywhere. Noise is drawn in float64 on the generator's device
(the CPU without one), so the same seed gives the same frequencies on every device.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn


class FrequencySample(NamedTuple):
    """Frequencies and the weights that turn a sum over them into the inverse Fourier integral."""

    frequencies: Tensor
    """xi `[*G, H, R, X]`, cycles per position unit. *G is empty, or the graphs where each has frequencies of
    its own; H is 1 where all heads share them."""
    quadrature_weights: Tensor
    """q `[*G, H, R]`, 1/(position unit)^X: 1/(R p) for random frequencies."""


@runtime_checkable
class Resamples(Protocol):
    """Anything that holds random draws and can redraw them."""

    def resample(self, generator: torch.Generator | None = None) -> None: ...


def resample_(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Redraws every submodule of `module` that has a `resample` method, in the order of `module.modules()`.

    Ranks that start from generators of one seed end with the same draws.
    """
    for submodule in module.modules():
        if isinstance(submodule, Resamples):
            submodule.resample(generator)


def gaussian_noise(shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Independent standard normal numbers, float64, on the generator's device."""
    device = "cpu" if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)


def orthogonal_gaussian_noise(
    num_heads: int, num_frequencies: int, position_dim: int, generator: torch.Generator | None = None
) -> Float[Tensor, "H R X"]:
    """Rows in blocks of X orthogonal directions, each row by itself standard normal.

    Directions: QR of a Gaussian matrix, its signs fixed so that they are Haar distributed. Lengths: chi
    with X degrees of freedom. Source: Yu et al. 2016, "Orthogonal random features".
    """
    num_blocks = math.ceil(num_frequencies / position_dim)
    square = (num_heads, num_blocks, position_dim, position_dim)
    directions, triangle = torch.linalg.qr(gaussian_noise(square, generator))
    # QR leaves the signs of R's diagonal to the implementation: without this the directions are biased.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = gaussian_noise(square, generator).norm(dim=-1, keepdim=True)
    return (directions.mT * lengths).flatten(1, 2)[:, :num_frequencies]


def sobol_gaussian_noise(
    num_heads: int, num_frequencies: int, position_dim: int, generator: torch.Generator | None = None
) -> Float[Tensor, "H R X"]:
    """Scrambled Sobol points through the inverse normal distribution, one scrambling per head.

    Each point by itself is standard normal; together they cover the space evenly, best for R = 2^n.
    """
    device = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**31, (num_heads,), generator=generator, device=device).tolist()
    engines = [torch.quasirandom.SobolEngine(position_dim, scramble=True, seed=seed) for seed in seeds]
    uniform = torch.stack([engine.draw(num_frequencies, dtype=torch.float64) for engine in engines])
    # The points are multiples of 2^-30 and can be 0: half a step puts them inside (0, 1).
    return torch.special.ndtri(uniform + 2.0**-31).to(device)


class FrequencySampler(nn.Module):
    """R frequencies per head and their quadrature weights; base class.

    Args:
        num_heads: H.
        num_frequencies: R.
        position_dim: X.

    A subclass gives `frequencies`, `log_sampling_density` and `resample`; one that is no random sampler
    overrides `forward` as well.
    """

    half_space = False
    """True where of each pair xi, -xi one stands for both: only for spectra with g(-xi) = g(xi)."""

    def __init__(self, num_heads: int, num_frequencies: int, position_dim: int) -> None:
        super().__init__()
        for name, value in (
            ("num_heads", num_heads),
            ("num_frequencies", num_frequencies),
            ("position_dim", position_dim),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_heads = num_heads
        self.num_frequencies = num_frequencies
        self.position_dim = position_dim

    @property
    def frequencies(self) -> Float[Tensor, "*G H R X"]:
        """xi, cycles per position unit."""
        raise NotImplementedError(f"{type(self).__name__} must define frequencies")

    def log_sampling_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        """log p at any frequencies, p in (position unit)^X; NotImplementedError where there is no density."""
        raise NotImplementedError(
            f"{type(self).__name__} has no sampling density: its quadrature weights come with its frequencies"
        )

    def sampling_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        """p at any frequencies, in (position unit)^X; NotImplementedError where there is no density."""
        return self.log_sampling_density(frequencies).exp()

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Redraws the frequencies, in any mode; without a generator from torch's global one."""
        raise NotImplementedError(f"{type(self).__name__} must define resample")

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initial parameters and a new draw."""
        self.resample(generator)

    def forward(self) -> FrequencySample:
        """The current frequencies with q = 1/(R p); gradients reach the density through both."""
        frequencies = self.frequencies
        log_density = self.log_sampling_density(frequencies)
        return FrequencySample(frequencies, (-math.log(self.num_frequencies) - log_density).exp())

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_frequencies={self.num_frequencies}, "
            f"position_dim={self.position_dim}"
        )


class GaussianFrequencies(FrequencySampler):
    """Independent Gaussian frequencies: xi = std * base_noise, with a std per head and, if wanted, dimension.

    p(xi) = prod_x (2 pi std_x^2)^(-1/2) exp(-xi_x^2 / 2 std_x^2). Gradients reach std through xi and through
    p. g/p stays bounded only where p is at least as wide as g: for a Gaussian spectrum of width s in space,
    where std >= 1/(2 pi s). Source: arXiv 2302.01925, section 3.2 (std fixed at 1 for text and images,
    learnable per head for molecules).

    Args:
        num_heads: H.
        num_frequencies: R.
        position_dim: X.
        std: initial value, cycles per position unit: a number, `[H]`, or `[H, X]` for one per dimension. The
            default serves functions wider than 1/(2 pi 0.3) = 0.5 position units.
        learnable: whether std is a parameter (a buffer otherwise).
        per_dimension: one std per head and dimension instead of one per head.
        generator: source of the first draw; torch's global one without it.

    Example:
        >>> sampler = GaussianFrequencies(2, 16, 3, std=0.3, generator=torch.Generator().manual_seed(0))
        >>> frequencies, quadrature_weights = sampler()
        >>> frequencies.shape, quadrature_weights.shape
        (torch.Size([2, 16, 3]), torch.Size([2, 16]))
    """

    base_noise: Tensor
    raw_std: Tensor

    def __init__(
        self,
        num_heads: int,
        num_frequencies: int,
        position_dim: int,
        std: float | Tensor = 0.3,
        learnable: bool = True,
        per_dimension: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, num_frequencies, position_dim)
        self.learnable = learnable
        self._initial_std = self._spread_std(std, per_dimension)
        raw_std = torch.empty_like(self._initial_std)
        if learnable:
            self.raw_std = nn.Parameter(raw_std)
        else:
            self.register_buffer("raw_std", raw_std)
        self.register_buffer("base_noise", torch.empty(num_heads, num_frequencies, position_dim))
        self.reset_parameters(generator)

    def _spread_std(self, std: float | Tensor, per_dimension: bool) -> Tensor:
        """std as `[H, 1]` or `[H, X]`."""
        value = torch.as_tensor(std, dtype=torch.get_default_dtype()).detach()
        if not value.is_meta and not bool((value > 0).all()):
            raise ValueError(f"std must be positive, got {std}: give a value in cycles per position unit")
        heads, dims = self.num_heads, self.position_dim
        if value.ndim == 0:
            value = value.expand(heads)
        if tuple(value.shape) == (heads,):
            value = value.unsqueeze(-1).expand(heads, dims if per_dimension else 1)
        elif tuple(value.shape) != (heads, dims):
            raise ValueError(
                f"std must be a number or have shape [{heads}] or [{heads}, {dims}], got {list(value.shape)}"
            )
        return value.clone()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Back to the initial std, with new noise."""
        self.raw_std.copy_(self._initial_std.log())
        self.resample(generator)

    def draw_noise(self, generator: torch.Generator | None) -> Float[Tensor, "H R X"]:
        """Standard normal noise; what subclasses correlate."""
        return gaussian_noise((self.num_heads, self.num_frequencies, self.position_dim), generator)

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        self.base_noise.copy_(self.draw_noise(generator))

    @property
    def std(self) -> Float[Tensor, "H X"]:
        """Standard deviation of p, cycles per position unit."""
        return self.raw_std.exp().expand(-1, self.position_dim)

    @property
    def frequencies(self) -> Float[Tensor, "H R X"]:
        return self.raw_std.exp().unsqueeze(-2) * self.base_noise

    def log_sampling_density(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        square = (frequencies / self.raw_std.exp().unsqueeze(-2)).square().sum(-1)
        log_std = self.raw_std.expand(-1, self.position_dim).sum(-1, keepdim=True)
        peak = -0.5 * self.position_dim * math.log(2 * math.pi) - log_std
        return torch.sub(peak, square, alpha=0.5)

    def extra_repr(self) -> str:
        per_dimension = self.raw_std.shape[-1] == self.position_dim > 1
        return f"{super().extra_repr()}, learnable={self.learnable}, per_dimension={per_dimension}"


class OrthogonalGaussianFrequencies(GaussianFrequencies):
    """Gaussian frequencies in blocks of X orthogonal directions.

    Same density and same mean as `GaussianFrequencies`; frequencies of a block repel each other. In one
    dimension there is nothing to orthogonalise and the two are the same. Source: Yu et al. 2016.
    """

    def draw_noise(self, generator: torch.Generator | None) -> Float[Tensor, "H R X"]:
        return orthogonal_gaussian_noise(self.num_heads, self.num_frequencies, self.position_dim, generator)


class SobolGaussianFrequencies(GaussianFrequencies):
    """Gaussian frequencies from scrambled Sobol points (quasi-Monte Carlo).

    Same density and same mean as `GaussianFrequencies`; for a smooth integrand in few dimensions the error
    falls faster than R^(-1/2). R a power of two covers the space best.
    """

    def draw_noise(self, generator: torch.Generator | None) -> Float[Tensor, "H R X"]:
        return sobol_gaussian_noise(self.num_heads, self.num_frequencies, self.position_dim, generator)


def is_exactly(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these classes, no subclass, and without hooks: what calling it computes
    is known."""
    return type(module) in kinds and not (module._forward_hooks or module._forward_pre_hooks)


def is_isotropic_gaussian(sampler: FrequencySampler) -> TypeGuard[GaussianFrequencies]:
    """Whether the frequencies of each head are from one Gaussian of one std; never of a user's own sampler,
    which may have another density."""
    if not isinstance(sampler, GaussianFrequencies):
        return False
    kinds = (GaussianFrequencies, OrthogonalGaussianFrequencies, SobolGaussianFrequencies)
    return is_exactly(sampler, *kinds) and sampler.raw_std.shape[-1] == 1
