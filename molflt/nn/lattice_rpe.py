"""f_per of periodic structures as an RPE on their reciprocal lattices; its slow twin, the sum over images."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.frequencies import FrequencySample, FrequencySampler
from molflt.nn.lattice import LatticeFrequencies
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import Spectrum


class GivenFrequencies(FrequencySampler):
    """Frequencies that someone else worked out, such as a reciprocal lattice; nothing is kept or drawn.

    Args:
        num_heads: H.
        sample: frequencies `[*G, H or 1, R, X]` and their weights.
        half_space: whether of each pair xi, -xi one stands for both.
    """

    def __init__(self, num_heads: int, sample: FrequencySample, half_space: bool = True) -> None:
        super().__init__(num_heads, sample.frequencies.shape[-2], sample.frequencies.shape[-1])
        self.sample = sample
        self.half_space = half_space

    @property
    def frequencies(self) -> Float[Tensor, "*G H R X"]:
        return self.sample.frequencies

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Nothing to redraw."""

    def forward(self) -> FrequencySample:
        return self.sample


def lattice_rpe(spectrum: Spectrum, lattice: LatticeFrequencies) -> FourierRPE:
    """f_per of a batch as an RPE: its `dense_bias` is sum_L f(r_i - r_j + L), and it serves `flt_attention`.

    Made anew for each batch; the parameters are the spectrum's. A feature map for the additive coupling is
    built for one R: make the lattice with `num_frequencies`. The additive weights exp(q.k / sqrt(D) + sum_L
    f) are periodic, but no sums over images of exp(q.k / sqrt(D) + f): a supercell gives another output
    than its cell. And a rotation changes the draw: random features mix the frequencies in the order they
    come in.

    Args:
        spectrum: g, even.
        lattice: from `lattice_frequencies`.
    """
    return FourierRPE(GivenFrequencies(spectrum.num_heads, lattice.sample()), spectrum)


def image_sum(
    spectrum: Spectrum,
    displacement: Float[Tensor, "*S 3"],
    cell: Float[Tensor, "3 3"],
    pbc: Bool[Tensor, "3"],
    reach: float,
) -> Float[Tensor, "*S H"]:
    """sum_L f(x + L) term by term: the slow twin of the reciprocal sum for one structure.

    Args:
        spectrum: f, with a closed form.
        displacement: x, Å.
        cell: rows are lattice vectors, Å.
        pbc: true along periodic directions.
        reach: distance from which on f is negligible, Å.
    """
    periodic = cell[pbc]
    if len(periodic) == 0:
        return spectrum.closed_form(displacement)
    heights = 1 / torch.linalg.vector_norm(torch.linalg.pinv(periodic), dim=0)
    farthest = torch.linalg.vector_norm(displacement, dim=-1).max() + reach
    ranges = [
        torch.arange(-n, n + 1, device=cell.device) for n in (farthest / heights).ceil().long().tolist()
    ]
    steps = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).flatten(0, -2)
    total = spectrum.closed_form(displacement).new_zeros(*displacement.shape[:-1], spectrum.num_heads)
    for step in steps.to(cell.dtype) @ periodic:
        total = total + spectrum.closed_form(displacement + step)
    return total
