"""Spherical quadrature: deterministic frequencies for which f depends on |x| alone.

So a rotation changes nothing under the multiplicative coupling. Under the additive one it does, as random
features mix the cosines and sines of absolute positions (`molflt.nn.couplings.AdditiveCoupling`).

For a spectrum that depends on |xi|,

    f(x) = int_0^inf drho g(rho) area(rho) mean_u exp(2 pi i rho x.u)
         ~ sum_n drho_n g(rho_n) area(rho_n) sum_d weight_nd cos(2 pi rho_n x.u_nd),

radial nodes times directions u (Lebedev rules in three dimensions, evenly spaced angles in two). cos is even,
so of each pair of opposite directions one is kept. A rule of degree L integrates all spherical harmonics up
to L; a wave exp(i z u.e) has little beyond degree z, so each shell takes the degree that its own z = 2 pi rho
r_max asks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.integrate import lebedev_rule
from scipy.special import gammainccinv, gammaln, hyp0f1
from torch import Tensor

from molflt.nn.frequencies import FrequencySample, FrequencySampler

# Lebedev rules with positive weights only (scipy has those of degree 13, 25 and 27 too).
LEBEDEV_DEGREES = (3, 5, 7, 9, 11, 15, 17, 19, 21, 23, 29, 31, 35, 41, 47, 53, 59, 65, 71, 77)
LEBEDEV_DEGREES += (83, 89, 95, 101, 107, 113, 119, 125, 131)
LARGEST_RADIAL_COUNT = 400
NUM_PROBES = 128

Array = NDArray[np.float64]


def sphere_area(position_dim: int) -> float:
    """Area of the unit sphere in X dimensions: 2, 2 pi, 4 pi, ..."""
    return 2 * math.pi ** (position_dim / 2) / math.gamma(position_dim / 2)


def mean_wave(phase: Array, position_dim: int) -> Array:
    """Mean of cos(phase u.e) over unit vectors u: cos, Bessel J_0, sin(z)/z in X = 1, 2, 3 dimensions."""
    return hyp0f1(position_dim / 2, -np.square(phase) / 4)


def half_sphere_rule(degree: int, position_dim: int) -> tuple[Array, Array]:
    """Unit vectors `[D, X]`, one of each opposite pair, and weights `[D]` of sum 1.

    Exact for even polynomials up to `degree` on the unit sphere in X = 1, 2 or 3 dimensions.
    """
    if position_dim == 1:
        return np.ones((1, 1)), np.ones(1)
    if position_dim == 2:
        count = degree // 2 + 1
        angles = np.pi * (np.arange(count) + 0.5) / count
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1), np.full(count, 1 / count)
    if position_dim != 3:
        raise ValueError(
            f"position_dim must be 1, 2 or 3 for spherical quadrature, got {position_dim}: "
            "use a random sampler"
        )
    points, weights = lebedev_rule(smallest_lebedev_degree(degree))
    x, y, z = np.where(np.abs(points) < 1e-12, 0.0, points)
    kept = (z > 0) | ((z == 0) & ((y > 0) | ((y == 0) & (x > 0))))
    return points.T[kept], weights[kept] / weights[kept].sum()


def smallest_lebedev_degree(degree: int) -> int:
    """The smallest degree of a positive Lebedev rule that is not below `degree`."""
    for available in LEBEDEV_DEGREES:
        if available >= degree:
            return available
    raise ValueError(
        f"degree must be at most {LEBEDEV_DEGREES[-1]}, got {degree}: there is no larger Lebedev rule"
    )


def directional_error(degree: int, phase: float, position_dim: int) -> float:
    """Largest error of a rule for the mean of cos(z u.e) over u: z up to `phase`, probe directions e."""
    directions, weights = half_sphere_rule(degree, position_dim)
    probes = np.random.default_rng(0).normal(size=(NUM_PROBES, position_dim))
    corners = np.tri(position_dim)
    probes = np.concatenate([probes, corners])
    probes /= np.linalg.norm(probes, axis=-1, keepdims=True)
    strengths = phase * np.array([0.6, 0.8, 1.0])
    estimates = np.cos(strengths[:, None, None] * (probes @ directions.T)) @ weights
    return float(np.abs(estimates - mean_wave(strengths, position_dim)[:, None]).max())


def smallest_degree(phase: float, position_dim: int, tolerance: float) -> int:
    """The smallest degree whose `directional_error` for `phase` is within `tolerance`, by bisection."""
    index = bisect_left(
        LEBEDEV_DEGREES,
        True,
        key=lambda degree: directional_error(degree, phase, position_dim) <= tolerance,
    )
    if index == len(LEBEDEV_DEGREES):
        raise ValueError(
            f"extent is too large for spherical quadrature: 2 pi |xi| extent reaches {phase:.0f}, beyond "
            f"degree {LEBEDEV_DEGREES[-1]}; take wider basis functions, a smaller extent, a looser tolerance"
        )
    return LEBEDEV_DEGREES[index]


def gaussian_shells(radii: Array, widths: Array, position_dim: int) -> Array:
    """g(rho) area(rho) of a Gaussian exp(-|x|^2 / 2 s^2) for every width s and radius rho, `[S, K]`."""
    scaled = 2 * np.pi * widths[:, None] * radii
    log_density = (
        (position_dim - 1) * np.log(scaled)
        - 0.5 * np.square(scaled)
        - (0.5 * position_dim - 1) * math.log(2)
        - gammaln(0.5 * position_dim)
    )
    return np.exp(log_density) * 2 * np.pi * widths[:, None]


def gauss_legendre(count: int, largest: float) -> tuple[Array, Array]:
    """Nodes and weights on [0, largest]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return 0.5 * largest * (nodes + 1), 0.5 * largest * weights


def radial_rule(widths: Array, extent: float, position_dim: int, tolerance: float) -> tuple[Array, Array]:
    """The smallest Gauss-Legendre rule on [0, rho_max] that gives Gaussians of all `widths` up to `extent`.

    The directional mean is taken exactly here; |f - f_hat| <= tolerance for f(0) = 1.
    """
    # Beyond it lies a share of tolerance / 10 of the sharpest Gaussian (a chi distribution's tail).
    largest = math.sqrt(2 * gammainccinv(position_dim / 2, tolerance / 10)) / (2 * np.pi * widths.min())
    distances = np.linspace(0, extent, 64)
    exact = np.exp(-0.5 * np.square(distances / widths[:, None]))

    def is_accurate(count: int) -> bool:
        radii, weights = gauss_legendre(count, largest)
        waves = mean_wave(2 * np.pi * radii[:, None] * distances, position_dim)
        estimate = (weights * gaussian_shells(radii, widths, position_dim)) @ waves
        return bool(np.abs(estimate - exact).max() <= tolerance)

    counts = range(3, LARGEST_RADIAL_COUNT + 1)
    index = bisect_left(counts, True, key=is_accurate)
    if index == len(counts):
        raise ValueError(
            f"extent must be smaller relative to the basis widths, got {extent} for widths from "
            f"{widths.min()}: more than {LARGEST_RADIAL_COUNT} radial nodes would be needed"
        )
    return gauss_legendre(counts[index], largest)


class SphericalQuadratureFrequencies(FrequencySampler):
    """Radial nodes times directions, shared by all heads (H = 1 in the sample); nothing is drawn.

    The bias of an isotropic spectrum changes under rotation by the rule's error only. That takes many
    frequencies where f is sharp or the structure large: R from `for_widths` at its tolerance of 1e-4 (of
    sum_t |amplitude_t|, for |displacement| <= extent, in three dimensions):

    | widths, Å | extent, Å | R |
    | --- | --- | --- |
    | 3 to 5 | 6 | 310 |
    | 3 to 5 | 10 | 600 |
    | 3 to 5 | 15 | 1,226 |
    | 2 to 5 | 10 | 1,483 |
    | 1 to 5 | 10 | 5,385 |

    Args:
        num_heads: H.
        position_dim: X, at most 3.
        radii: rho_n > 0, cycles per position unit.
        radial_weights: drho_n, weights of the plain integral over rho.
        degrees: degree of the directional rule, one for all shells or one each.

    Example:
        >>> sampler = SphericalQuadratureFrequencies.for_widths(4, 3, width_range=(3.0, 5.0), extent=6.0)
        >>> sampler.num_frequencies
        310
    """

    half_space = True

    fixed_frequencies: Tensor
    fixed_weights: Tensor

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        radii: Sequence[float],
        radial_weights: Sequence[float],
        degrees: int | Sequence[int],
    ) -> None:
        shell_degrees = [degrees] * len(radii) if isinstance(degrees, int) else list(degrees)
        if not len(radii) == len(radial_weights) == len(shell_degrees) > 0:
            raise ValueError(
                "radii, radial_weights and degrees must have one entry per shell, "
                f"got {len(radii)}, {len(radial_weights)} and {len(shell_degrees)}"
            )
        if min(radii) <= 0:
            raise ValueError(f"radii must be positive, got {min(radii)}")
        frequencies, weights = [], []
        for radius, radial_weight, degree in zip(radii, radial_weights, shell_degrees, strict=True):
            directions, direction_weights = half_sphere_rule(degree, position_dim)
            frequencies.append(radius * directions)
            shell_area = sphere_area(position_dim) * radius ** (position_dim - 1)
            weights.append(radial_weight * shell_area * direction_weights)
        super().__init__(num_heads, sum(map(len, weights)), position_dim)
        dtype = torch.get_default_dtype()
        self.register_buffer("fixed_frequencies", torch.as_tensor(np.concatenate(frequencies), dtype=dtype))
        self.register_buffer("fixed_weights", torch.as_tensor(np.concatenate(weights), dtype=dtype))

    @classmethod
    def for_widths(
        cls,
        num_heads: int,
        position_dim: int,
        width_range: tuple[float, float],
        extent: float,
        tolerance: float = 1e-4,
    ) -> SphericalQuadratureFrequencies:
        """The rule for Gaussians of widths within `width_range` at distances up to `extent`.

        f is right, and constant under rotation, to `tolerance` times sum_t |amplitude_t|.

        Args:
            num_heads: H.
            position_dim: X, at most 3.
            width_range: smallest and largest width s of the basis functions, position units.
            extent: largest |displacement|, position units.
            tolerance: largest error relative to f(0) of a basis function.
        """
        smallest, largest = width_range
        if not (0 < smallest <= largest and extent > 0 and 0 < tolerance < 1):
            raise ValueError(
                "width_range must be (smallest, largest) > 0, extent > 0 and 0 < tolerance < 1, "
                f"got {width_range}, {extent} and {tolerance}"
            )
        widths = np.geomspace(smallest, largest, 9)
        radii, weights = radial_rule(widths, extent, position_dim, tolerance / 4)
        shares = (weights * gaussian_shells(radii, widths, position_dim)).max(0)
        share_tolerance = tolerance / (2 * len(radii) * shares)
        degrees = [
            smallest_degree(2 * np.pi * radius * extent, position_dim, allowed)
            for radius, allowed in zip(radii, share_tolerance, strict=True)
        ]
        return cls(num_heads, position_dim, radii.tolist(), weights.tolist(), degrees)

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Nothing to redraw."""

    @property
    def frequencies(self) -> Float[Tensor, "1 R X"]:
        return self.fixed_frequencies.unsqueeze(0)

    def forward(self) -> FrequencySample:
        """The rule's frequencies `[1, R, X]` and weights `[1, R]`."""
        return FrequencySample(self.frequencies, self.fixed_weights.unsqueeze(0))
