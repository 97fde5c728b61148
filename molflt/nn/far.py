"""The far part's modulation: a smooth M(x) >= 0 of displacements, summed over the periodic images.

    M(x)     = sum_t m_t exp(-|x|^2 / 2 s_t^2) + background,     m_t >= 0
    M_per(x) = sum_L M(x + L) = floor + sum_G w_G cos(2 pi G.x)

A mixture of Gaussians in space with amplitudes >= 0 is positive, and so is the sum of its images. With
`taper` (see `molflt.nn.lattice`) that holds exactly for the truncated sum over G in every cell; each s^2 is
then s^2 + 1/(3 cutoff^2) in effect. Without it M_per is the mixture's own sum but for the truncation, which
can leave M_per below zero by `truncation_error(s_min, cutoff)` sum_t m_t: take widths from `smallest_width`.

The background is a Gaussian too wide to be told from a constant. Over the images of a lattice it sums to
background (sqrt(2 pi) s_max)^p / V_p with V_p the length, area or volume of the cell in its p periodic
directions, which makes a supercell of n cells give each of its n copies of an atom 1/n of what the cell gives
it, as every sum over images does. A constant that ignores the volume would not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from molflt.nn.lattice import LatticeFrequencies, lattice_frequencies
from molflt.nn.lattice_rpe import image_sum
from molflt.nn.phases import cosine_and_sine, phases
from molflt.nn.spectra import Spectrum


class PositiveGaussianSpectrum(Spectrum):
    """Sum of T centred Gaussians with amplitudes > 0 and widths within bounds.

    g(xi) = sum_t m_t (sqrt(2 pi) s_t)^X exp(-2 pi^2 s_t^2 |xi|^2),     f(x) = sum_t m_t exp(-|x|^2 / 2 s_t^2)

    Amplitudes start equal, and widths evenly spaced (in log) inside the bounds, those of all heads together:
    with T = 1 each head begins with a width of its own.

    Args:
        num_heads: H.
        position_dim: X.
        num_basis: T.
        width_range: smallest and largest s_t there can be, position units.
        peak: f(0) at the start.
    """

    even = True

    def __init__(
        self,
        num_heads: int,
        position_dim: int,
        num_basis: int,
        width_range: tuple[float, float],
        peak: float = 1.0,
    ) -> None:
        super().__init__(num_heads, position_dim)
        if num_basis < 1 or not peak > 0:
            raise ValueError(f"num_basis must be at least 1 and peak positive, got {num_basis} and {peak}")
        if not 0 < width_range[0] < width_range[1]:
            raise ValueError(f"width_range must be (smallest, largest) > 0, got {width_range}")
        self.width_range = width_range
        self.peak = peak
        self.raw_amplitude = nn.Parameter(torch.empty(num_heads, num_basis))
        self.raw_widths = nn.Parameter(torch.empty(num_heads, num_basis))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial amplitudes and widths."""
        num_heads, num_basis = self.raw_amplitude.shape
        self.raw_amplitude.fill_(math.log(self.peak / num_basis))
        within = (torch.arange(num_heads).unsqueeze(-1) + 0.5) / num_heads
        self.raw_widths.copy_(((torch.arange(num_basis) + within) / num_basis).logit())

    @property
    def amplitude(self) -> Float[Tensor, "H T"]:
        """m_t."""
        return self.raw_amplitude.exp()

    @property
    def widths(self) -> Float[Tensor, "H T"]:
        """s_t, position units."""
        smallest, largest = self.width_range
        return smallest * (largest / smallest) ** self.raw_widths.sigmoid()

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        square = frequencies.square().sum(-1, keepdim=True)
        widths = self.widths.unsqueeze(-2)
        terms = (-2 * math.pi**2 * widths.square() * square).exp()
        scale = self.amplitude.unsqueeze(-2) * (math.sqrt(2 * math.pi) * widths) ** self.position_dim
        return (scale * terms).sum(-1)

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        square = displacement.square().sum(-1)[..., None, None]
        return (self.amplitude * (-0.5 * square / self.widths.square()).exp()).sum(-1)

    def extra_repr(self) -> str:
        num_basis = self.raw_amplitude.shape[-1]
        return f"{super().extra_repr()}, num_basis={num_basis}, width_range={self.width_range}"


class FarPositions(NamedTuple):
    """What the far part needs to know of a batch's positions."""

    basis: Tensor
    """`[B, 1, N, 2R]`: cos and sin of 2 pi G.r, for all heads."""
    weights: Tensor
    """`[B, H, R]`: w_G >= 0."""
    floor: Tensor
    """`[B, H, 1]`: the terms of no dependence on x, positive."""

    def columns(self) -> tuple[Float[Tensor, "B 1 N K"], Float[Tensor, "B H K"]]:
        """Columns of positions and weights: M_per(r_i - r_j) = sum_k w_k column_ik column_jk, K = 2R + 1."""
        return (
            F.pad(self.basis, (0, 1), value=1.0),
            torch.cat((self.weights, self.weights, self.floor), dim=-1),
        )

    def dense(self) -> Float[Tensor, "B H N N"]:
        """M_per(r_i - r_j) of all pairs."""
        columns, weights = self.columns()
        return (columns * weights.unsqueeze(-2)) @ columns.transpose(-1, -2)


class FarModulation(nn.Module):
    """M_per of a batch, on each graph's own reciprocal lattice.

    Args:
        num_heads: H.
        cutoff: k_c, cycles/Å. It gives R = (2/3) pi V k_c^3 frequencies: 17 for 2,000 Å^3 at 0.16/Å. The cost
            is proportional to N R: linear in the atoms of a batch of like cells, quadratic in those of one
            cell that is made larger at a fixed cutoff (R = 293 for 2,916 atoms of copper at 0.16/Å, 895 for
            8,788), unless `max_frequencies` bounds R.
        num_basis: T.
        width_range: smallest and largest s_t there can be, Å; (0.5, 1) / cutoff by default.
        peak: M(0) at the start. All atoms within the widths share in the far weights: at 0.1 and 5 Å those of
            a solid (0.08 atoms/Å^3) sum to about 16, as its near weights do at a radius of 6 Å.
        background: constant share of M; keeps far weights positive where the Gaussians have decayed.
        taper: makes M >= 0 hold exactly.
        padding_widths: room along open directions in units of the largest width, the taper's share included.
            Measured change of M on rotation of a molecule of 8 Å, relative to M(0), and R at k_c = 0.16/Å:
            2e-3 and 230 at 3 widths, 5e-5 and 440 at 4, 5e-6 and 755 at 5.
        max_frequencies: bound of R, which makes the cost linear in the atoms of one growing cell, too. In
            cells of more frequencies the cutoff falls to about (3 R / 2 pi V)^(1/3), and M is smoothed
            accordingly: it keeps its sum over space, and stays positive. Measured at the initial widths and
            0.16/Å, RMS change of M over M(0) at distances to 12 Å: 9 % for 64 of the 101 frequencies of 1,000
            atoms of copper; 9 % for 256 and 35 % for 64 of the 399 of 4,000; 15 % for 1,024, 43 % for 256 and
            59 % for 64 of the 1,979 of 20,000. Needs `taper`.

    Raises:
        ValueError: `cutoff` or `padding_widths` is not positive, `background` is negative, or `width_range`
            has no two rising positive values, or `max_frequencies` is given without `taper`.
    """

    def __init__(
        self,
        num_heads: int,
        cutoff: float,
        num_basis: int = 4,
        width_range: tuple[float, float] | None = None,
        peak: float = 0.1,
        background: float = 1e-3,
        taper: bool = True,
        padding_widths: float = 4.0,
        max_frequencies: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 < cutoff < math.inf:
            raise ValueError(f"cutoff must be positive, got {cutoff}; give cycles/Å such as 0.16")
        if not (background >= 0 and padding_widths > 0):
            raise ValueError(
                "background must not be negative and padding_widths be positive, "
                f"got {background} and {padding_widths}"
            )
        if max_frequencies is not None and not taper:
            raise ValueError("max_frequencies needs taper=True, without which M could be negative, got False")
        self.num_heads = num_heads
        self.cutoff = cutoff
        self.max_frequencies = max_frequencies
        self.background = background
        self.taper = taper
        self.padding_widths = padding_widths
        width_range = (0.5 / cutoff, 1 / cutoff) if width_range is None else width_range
        self.spectrum = PositiveGaussianSpectrum(num_heads, 3, num_basis, width_range, peak)

    def reset_parameters(self) -> None:
        self.spectrum.reset_parameters()

    @property
    def largest_width(self) -> float:
        """The largest width M can have, Å, the taper's included."""
        taper = 1 / (3 * self.cutoff**2) if self.taper else 0.0
        return math.sqrt(self.spectrum.width_range[1] ** 2 + taper)

    def frequencies(
        self,
        cell: Float[Tensor, "B 3 3"],
        pbc: Bool[Tensor, "B 3"],
        pos: Float[Tensor, "B N 3"],
        atom_mask: Bool[Tensor, "B N"] | None = None,
    ) -> LatticeFrequencies:
        """The graphs' frequencies; padded rows of `pos` must be finite."""
        padding = self.padding_widths * self.largest_width
        return lattice_frequencies(
            cell,
            pbc,
            self.cutoff,
            pos,
            atom_mask,
            open_padding=padding,
            taper=self.taper,
            max_frequencies=self.max_frequencies,
        )

    def _background(self, lattice: LatticeFrequencies) -> Float[Tensor, "B 1 1"]:
        reach = math.sqrt(2 * math.pi) * self.spectrum.width_range[1]
        density = reach ** lattice.num_periodic.to(lattice.periodic_measure) / lattice.periodic_measure
        return self.background * density[:, None, None]

    def forward(
        self,
        cell: Float[Tensor, "B 3 3"],
        pbc: Bool[Tensor, "B 3"],
        pos: Float[Tensor, "B N 3"],
        atom_mask: Bool[Tensor, "B N"] | None = None,
    ) -> FarPositions:
        """The basis and weights that make M_per; arguments as in `frequencies`."""
        lattice = self.frequencies(cell, pbc, pos, atom_mask)
        sample = lattice.sample()
        weights = sample.quadrature_weights * self.spectrum(sample.frequencies)
        basis = cosine_and_sine(phases(pos, lattice.frequencies))
        return FarPositions(basis, weights[..., 1:], weights[..., :1] + self._background(lattice))

    def image_sum(
        self,
        cell: Float[Tensor, "B 3 3"],
        pbc: Bool[Tensor, "B 3"],
        pos: Float[Tensor, "B N 3"],
        atom_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B H N N"]:
        """M_per(r_i - r_j) by adding up images of the closed form: what `forward` gives without taper for a
        large cutoff."""
        lattice = self.frequencies(cell, pbc, pos, atom_mask)
        reach = 9 * self.spectrum.width_range[1]
        displacement = pos.unsqueeze(2) - pos.unsqueeze(1)
        sums = [
            image_sum(self.spectrum, x, one_cell, one_pbc, reach).permute(2, 0, 1)
            for x, one_cell, one_pbc in zip(displacement, cell, pbc, strict=True)
        ]
        return torch.stack(sums) + self._background(lattice).unsqueeze(-1)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, cutoff={self.cutoff}, background={self.background}, "
            f"taper={self.taper}, padding_widths={self.padding_widths}, "
            f"max_frequencies={self.max_frequencies}"
        )
