"""Relative positional encodings as learned Fourier transforms, in linear cost.

With frequencies xi_k, quadrature weights q_k and a spectrum g, all weights gathered in W_k = q_k g(xi_k),

    f(r_i - r_j) ~ sum_k Re[W_k exp(2 pi i xi_k.(r_i - r_j))] = query_i . key_j

    query_k(i) = (1/a_k) [u_k cos theta_ik - v_k sin theta_ik,  u_k sin theta_ik + v_k cos theta_ik]
    key_k(j)   =   a_k   [    cos theta_jk,                         sin theta_jk                   ]

    theta_ik = 2 pi xi_k.r_i,   W_k = u_k + i v_k,   a_k = (|W_k|^2 + floor^2)^(1/4)

Sign and phase of g are on the query side alone; on both they would be squared away. With floor = 0 this is
the paper's sqrt|W| on either side (arXiv 2302.01925, section 3.2), which has two faults where W_k = 0: both
factors vanish there, so no gradient ever leaves that point, and the square root's derivative is infinite. The
product does not depend on a_k. With floor > 0 its derivative in u_k is cos(theta_ik - theta_jk) everywhere,
W_k = 0 and changes of sign included. a_k keeps the factors balanced, as random features of exp() want them:
of the possible splits it makes |query|^2 + |key|^2 smallest, up to the floor. The alternative of all of W_k
on one side would leave that sum at sum_k (1 + W_k^2), of order R, and exp(|key|^2/2) in every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Inexact
from torch import Tensor, nn

from molflt.nn.frequencies import FrequencySampler, GaussianFrequencies
from molflt.nn.phases import cosine_and_sine, phases
from molflt.nn.spectra import GaussianBasisSpectrum, Spectrum

WEIGHT_FLOOR = 1e-3
"""`floor` above, in units of f (attention logits). It enlarges |key|^2 by at most R times this, and bounds
the query features' derivative in W_k by its inverse square root."""


def times(parts: Float[Tensor, "*P N K"], factors: Inexact[Tensor, "*G R"]) -> Float[Tensor, "*C N K"]:
    """Rows of R complex numbers, [real parts, imaginary parts], times `factors`, real or complex."""
    if factors.is_complex():
        real, imaginary = parts.chunk(2, dim=-1)
        u, v = factors.real.unsqueeze(-2), factors.imag.unsqueeze(-2)
        return torch.cat((u * real - v * imaginary, u * imaginary + v * real), dim=-1)
    return parts * torch.cat((factors, factors), dim=-1).unsqueeze(-2)


class FourierRPE(nn.Module):
    """f(r_i - r_j) for all pairs as a product of features of the single positions.

    Query and key features share one trigonometric basis (`basis`); the weights can be folded into whatever
    multiplies the features (`fold`). `forward` gives the features themselves. Everything is
    translation-invariant up to rounding, which in float32 is about 1e-7 |2 pi xi.r|: centre positions before
    encoding them (at 1e4 Å and 1 cycle/Å phases are only good to 1e-2).

    Training fits the estimate under the frequencies as drawn, which may move away from f itself: after a
    redraw, and in the closed form, a trained encoding is as good as its R and its g/p allow
    (`diagnostics.rpe_bias_error`), unless frequencies were redrawn during training.

    Under `.half()` and `.bfloat16()` it stays in float32, which phases and importance weights need.

    Args:
        sampler: where the spectrum is read, and with which quadrature weights.
        spectrum: g.

    Example:
        >>> rpe = FourierRPE(GaussianFrequencies(2, 16, 3, std=0.3), GaussianBasisSpectrum(2, 3))
        >>> query, key = rpe(torch.zeros(1, 5, 3))
        >>> query.shape, rpe.dense_bias(torch.zeros(1, 5, 3)).shape
        (torch.Size([1, 2, 5, 32]), torch.Size([1, 2, 5, 5]))
    """

    def __init__(self, sampler: FrequencySampler, spectrum: Spectrum) -> None:
        super().__init__()
        for name in ("num_heads", "position_dim"):
            ours, theirs = getattr(sampler, name), getattr(spectrum, name)
            if ours != theirs:
                raise ValueError(
                    f"sampler and spectrum must agree in {name}, got {ours} and {theirs}: build both with one"
                )
        if sampler.half_space and not spectrum.even:
            raise ValueError(
                f"{type(sampler).__name__} keeps one of each pair of opposite frequencies, which needs a "
                f"spectrum with g(-xi) = g(xi); {type(spectrum).__name__} is not declared even: "
                "use a random sampler"
            )
        self.sampler = sampler
        self.spectrum = spectrum
        self.num_heads = sampler.num_heads
        self.num_frequencies = sampler.num_frequencies
        self.position_dim = sampler.position_dim
        # Set by `diagnostics.variance_bound` once it has warned.
        self.unbounded_ratio_reported = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FourierRPE:
        def keep_precision(value: Tensor) -> Tensor:
            applied = fn(value)
            lowered = applied.dtype in (torch.float16, torch.bfloat16)
            return value.to(applied.device) if lowered else applied

        return super()._apply(keep_precision, recurse)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initial parameters and new frequencies, these from `generator`."""
        self.sampler.reset_parameters(generator)
        self.spectrum.reset_parameters()

    def importance_weights(self) -> Inexact[Tensor, "*G H R"]:
        """W_k = q_k g(xi_k), real or complex, in units of f."""
        return self.spectrum.importance_weights(self.sampler)

    def amplitudes(self) -> Float[Tensor, "*G H R"]:
        """|W_k|; their sum over k bounds |f|."""
        return self.importance_weights().abs()

    def squared_norms(self) -> tuple[Float[Tensor, "*G H"], Float[Tensor, "*G H"]]:
        """|query features|^2 and |key features|^2, equal for all tokens: sum_k |W_k|, up to the floor."""
        query_scale, key_scale = self._factors()
        return (query_scale * query_scale.conj()).real.sum(-1), key_scale.square().sum(-1)

    def _factors(self) -> tuple[Inexact[Tensor, "*G H R"], Float[Tensor, "*G H R"]]:
        """W/a, real or complex, and a."""
        weights = self.importance_weights()
        square = (weights * weights.conj()).real
        # The sum can not reach 0, so the power has a finite slope.
        key_scale = (square + WEIGHT_FLOOR**2) ** 0.25
        return weights / key_scale, key_scale

    def _phases(self, points: Tensor) -> Tensor:
        """theta `[B, H or 1, N, R]`."""
        if points.shape[-1] != self.position_dim:
            raise ValueError(
                f"pos must have position_dim = {self.position_dim} coordinates, got {points.shape[-1]}: "
                "build the RPE with the position_dim of the data"
            )
        return phases(points, self.sampler.frequencies)

    def basis(self, pos: Float[Tensor, "B N X"]) -> Float[Tensor, "B H N K"]:
        """[cos theta, sin theta], K = 2R: the part of both features that depends on positions."""
        return cosine_and_sine(self._phases(pos)).expand(-1, self.num_heads, -1, -1)

    def fold(
        self, projection: Float[Tensor, "*P M K"]
    ) -> tuple[Float[Tensor, "*G H M K"], Float[Tensor, "*G H M K"]]:
        """Projections for `basis` that stand for `projection` of the features.

        basis @ query_projection^T = query_rpe_features @ projection^T, and likewise for keys.

        Args:
            projection: `[H, M, 2R]`, or `[M, 2R]` for all heads.
        """
        if projection.shape[-1] != 2 * self.num_frequencies:
            raise ValueError(
                f"projection must have 2R = {2 * self.num_frequencies} columns, got {projection.shape[-1]}"
            )
        query_scale, key_scale = self._factors()
        return times(projection, query_scale.conj()), times(projection, key_scale)

    def forward(
        self, pos: Float[Tensor, "B N X"]
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H N K"]]:
        """Query and key RPE features, K = 2R, whose product over K is `dense_bias`.

        Args:
            pos: positions, in the unit whose inverse the frequencies have; centred, in float32.
        """
        query_scale, key_scale = self._factors()
        basis = self.basis(pos)
        return times(basis, query_scale), times(basis, key_scale)

    def dense_bias(
        self, pos: Float[Tensor, "B N X"], key_pos: Float[Tensor, "B L X"] | None = None
    ) -> Float[Tensor, "B H N L"]:
        """The estimate of f(r_i - r_j) from displacements: quadratic in N, the twin of query . key.

        Args:
            pos: positions of queries.
            key_pos: positions of keys; `pos` without it.
        """
        displacement = self._displacement(pos, key_pos)
        theta = self._phases(displacement.flatten(1, 2))
        weights = self.importance_weights().unsqueeze(-2)
        bias = (weights.real * theta.cos()).sum(-1)
        if weights.is_complex():
            bias = bias - (weights.imag * theta.sin()).sum(-1)
        return bias.unflatten(-1, displacement.shape[1:3])

    def closed_form_bias(
        self, pos: Float[Tensor, "B N X"], key_pos: Float[Tensor, "B L X"] | None = None
    ) -> Float[Tensor, "B H N L"]:
        """f(r_i - r_j) of the spectrum itself, what `dense_bias` estimates; arguments as there."""
        return self.spectrum.closed_form(self._displacement(pos, key_pos)).permute(0, 3, 1, 2)

    @staticmethod
    def _displacement(pos: Tensor, key_pos: Tensor | None) -> Float[Tensor, "B N L X"]:
        key_pos = pos if key_pos is None else key_pos
        return pos.unsqueeze(2) - key_pos.unsqueeze(1)


def default_rpe(
    num_heads: int,
    position_dim: int,
    num_frequencies: int = 16,
    num_basis: int = 32,
    width_range: tuple[float, float] = (0.5, 5.0),
    generator: torch.Generator | None = None,
) -> FourierRPE:
    """The paper's choice for molecules: Gaussian basis, Gaussian frequencies of learnable std per head.

    The std starts at 1/(2 pi s_min), the smallest that keeps g/p bounded for basis widths down to s_min. The
    default widths suit positions whose nearest neighbours are about one unit apart, such as atoms in Å,
    tokens and pixels; give other ranges for other scales.

    Args:
        num_heads: H.
        position_dim: X.
        num_frequencies: R.
        num_basis: T.
        width_range: smallest and largest initial width of the basis functions, position units.
        generator: source of the frequencies; torch's global one without it.
    """
    spectrum = GaussianBasisSpectrum(num_heads, position_dim, num_basis, width_range)
    std = 1 / (2 * math.pi * width_range[0])
    sampler = GaussianFrequencies(num_heads, num_frequencies, position_dim, std, generator=generator)
    return FourierRPE(sampler, spectrum)
