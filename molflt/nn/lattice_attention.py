"""FLT attention with the additive coupling whose frequencies are each structure's own reciprocal lattice.

    a_ij ~ exp(q_i.k_j / sqrt(D) + f_per(r_i - r_j)),     f_per(x) = sum_G w_G g(G) cos(2 pi G.x)

The frequencies turn with the cell, an atom may sit in any cell, any cell of the lattice gives the same, and
more vacuum changes nothing. But exp(sum of f over images) is no sum over images of exp(f), so a supercell
gives another output than its cell; and random features mix the cosines and sines of absolute phases in the
order in which the frequencies come, so the output is invariant under rotation in expectation only. The
multiplicative coupling has neither fault: `RangeSeparatedAttention` with a `RangeSeparatedRPE(None, far)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from molflt.nn.attention import flt_attention
from molflt.nn.couplings import AdditiveCoupling
from molflt.nn.feature_maps import FeatureMap, PositiveRandomFeatures
from molflt.nn.lattice import LatticeFrequencies, lattice_frequencies
from molflt.nn.lattice_rpe import lattice_rpe
from molflt.nn.multihead import zero_padding
from molflt.nn.periodic import PeriodicAttention, PeriodicGeometry
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import Spectrum

SMALLEST_STRUCTURE_FACTOR = 1e-3
"""Of a structure's number of atoms; a wave that the atoms cancel to less has a phase of rounding errors."""
SMALLEST_DETERMINANT = 1e-4
"""Of three unit vectors that count as linearly independent."""


class LatticePositions(NamedTuple):
    """What depends on positions alone: computed once for all layers that share an RPE."""

    rpe: FourierRPE
    """Of this batch's frequencies."""
    basis: Tensor
    """`[B, H, N, 2R]`."""


class LatticeRPE(nn.Module):
    """f_per of a batch: a spectrum read on at most R - 1 reciprocal lattice vectors and G = 0.

    Args:
        spectrum: g, even.
        num_frequencies: R, at least 2; the shortest vectors are kept, in whole shells.
        cutoff: no vector is longer, cycles/Å.
        open_padding: room between the atoms and their images along open directions, Å.
    """

    position_dim = 3

    def __init__(
        self, spectrum: Spectrum, num_frequencies: int, cutoff: float, open_padding: float = 15.0
    ) -> None:
        super().__init__()
        if num_frequencies < 2:
            raise ValueError(f"num_frequencies must be at least 2, G = 0 being one, got {num_frequencies}")
        self.spectrum = spectrum
        self.num_heads = spectrum.num_heads
        self.num_frequencies = num_frequencies
        self.cutoff = cutoff
        self.open_padding = open_padding

    def reset_parameters(self) -> None:
        self.spectrum.reset_parameters()

    def forward(self, geometry: PeriodicGeometry) -> LatticePositions:
        """The batch's own RPE, and its basis of positions relative to `lattice_centre`."""
        with torch.autocast(geometry.pos.device.type, enabled=False):
            pos = zero_padding(geometry.pos, geometry.atom_mask)
            kept = self.num_frequencies - 1
            lattice = lattice_frequencies(
                geometry.cell.to(pos.dtype),
                geometry.pbc,
                self.cutoff,
                pos,
                geometry.atom_mask,
                open_padding=self.open_padding,
                taper=True,
                num_frequencies=kept,
                max_frequencies=kept,
            )
            rpe = lattice_rpe(self.spectrum, lattice)
            centre = lattice_centre(lattice, pos, geometry.atom_mask)
            return LatticePositions(rpe, rpe.basis(pos - centre.unsqueeze(1)))

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}, cutoff={self.cutoff}"


def lattice_centre(
    lattice: LatticeFrequencies, pos: Float[Tensor, "B N 3"], atom_mask: Bool[Tensor, "B N"]
) -> Float[Tensor, "B 3"]:
    """A point of each structure that moves with it and does not care which image of an atom is given.

    It solves G.x = phase(sum_j exp(2 pi i G.r_j)) / 2 pi for the first three linearly independent G whose sum
    over atoms does not vanish. The mean of the positions would jump when an atom is given in another cell.
    Where there are fewer than three such G the shortest solution is taken, which need not move along.
    """
    waves = lattice.frequencies.detach().squeeze(1)
    theta = 2 * torch.pi * pos @ waves.mT
    real = atom_mask.unsqueeze(-1)
    total = torch.complex((theta.cos() * real).sum(1), (theta.sin() * real).sum(1))
    length = torch.linalg.vector_norm(waves, dim=-1)
    usable = (total.abs() > SMALLEST_STRUCTURE_FACTOR * atom_mask.sum(1, keepdim=True)) & (length > 0)
    unit = waves / length.clamp(min=1e-12).unsqueeze(-1)

    def first_with(size: Tensor) -> tuple[Tensor, Tensor]:
        found = usable & (size > SMALLEST_DETERMINANT)
        index = found.to(torch.uint8).argmax(-1, keepdim=True)
        return index, found.gather(-1, index)

    def row(index: Tensor) -> Tensor:
        return unit.gather(1, index.unsqueeze(-1).expand(-1, -1, 3))

    first, has_first = first_with(torch.ones_like(length))
    cross = torch.linalg.cross(row(first).expand_as(unit), unit)
    second, has_second = first_with(torch.linalg.vector_norm(cross, dim=-1))
    normal = torch.linalg.cross(row(first), row(second))
    third, has_third = first_with((unit @ normal.mT).squeeze(-1).abs())
    index = torch.cat((first, second, third), dim=-1)
    has = torch.cat((has_first, has_second, has_third), dim=-1).cumprod(-1).bool()
    rows = torch.where(has.unsqueeze(-1), waves.gather(1, index.unsqueeze(-1).expand(-1, -1, 3)), 0.0)
    # Where nothing was found the sum may vanish, and with it the phase's derivative.
    turns = torch.where(has, total.gather(-1, index), 1.0).angle() / (2 * torch.pi)
    return (torch.linalg.pinv(rows) @ turns.unsqueeze(-1)).squeeze(-1)


class LatticeFLTAttention(PeriodicAttention):
    """Multi-head attention with the additive coupling on the reciprocal lattice; contract and parameters of
    `FLTAttention`, but for positions: it takes a `PeriodicGeometry`.

    Args:
        channels: C, width of the output.
        num_heads: H, divides `channels`.
        rpe: f_per, shared between layers by passing one object.
        feature_map: linearises exp; positive random features, 64, by default.
        in_channels: width of the input, `channels` by default.
        bias: whether the four projections have one.

    Raises:
        ValueError: `num_heads` does not divide `channels`; `rpe` has another number of heads; `forward`
            without positions.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        rpe: LatticeRPE,
        feature_map: FeatureMap | None = None,
        in_channels: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(
            channels,
            num_heads,
            rpe=rpe,
            feature_map=PositiveRandomFeatures(64) if feature_map is None else feature_map,
            feature_width=channels // num_heads + 2 * rpe.num_frequencies,
            in_channels=in_channels,
            bias=bias,
        )
        self.coupling = AdditiveCoupling()

    def attend(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N D"],
        positional: LatticePositions,
        atom_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "B H N D"]:
        """`flt_attention` with the batch's own RPE."""
        return flt_attention(
            query,
            key,
            value,
            atom_mask=atom_mask,
            feature_map=self.feature_map,
            coupling=self.coupling,
            rpe=positional.rpe,
            positional=positional.basis,
        )
