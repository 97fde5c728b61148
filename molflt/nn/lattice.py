"""Frequencies of periodic structures: the reciprocal lattice, and its continuation along open directions.

What a periodic structure has is the sum over its lattice vectors L, and by Poisson summation

    f_per(x) = sum_L f(x + L) = (1/V) sum_G g(G) exp(2 pi i G.x)

over G = integer combinations of the rows of inv(cell).T (no 2 pi), V the cell's volume. So nothing is sampled
and no image is visited: the frequencies are the G up to a cutoff, one of each pair +-G for an even g, with
weight 2/V. They depend on the lattice and not on which cell describes it, they turn with it, and G.L is an
integer for every lattice vector L, so an atom may sit in any cell.

**Open directions.** Along these the integral over frequencies remains, and is done by the trapezoid rule.
That is the same sum for a box that repeats, after the atoms' own extent plus `open_padding`, at right
angles to the periodic directions. Whatever vacuum the cell has plays no part. Between atoms the rule is off
by the f of the images it makes, the nearest of which is `open_padding` away: exp(-open_padding^2 / 2 s^2)
of a Gaussian's f(0), 4e-6 at 5 widths. One open direction (a slab) has one such box, which turns with the
structure. With two or three (a rod, a molecule) the box's orientation is arbitrary and f depends on it by
that error alone; `SphericalQuadratureFrequencies` is the alternative there.

**Truncation.** A Gaussian of width s has at |G| = k_c fallen to exp(-u^2/2) with u = 2 pi s k_c, and in large
cells the G beyond are worth `truncation_error` of f(0). `smallest_width` turns this around:

| error | u | s_min at k_c = 0.16/Å | at 0.25/Å |
| --- | --- | --- | --- |
| 1e-2 | 3.37 | 3.35 Å | 2.14 Å |
| 1e-3 | 4.03 | 4.01 Å | 2.57 Å |
| 1e-4 | 4.59 | 4.57 Å | 2.92 Å |
| 1e-8 | 6.33 | 6.30 Å | 4.03 Å |

A truncated sum of an f >= 0 can be negative by so much, and jumps when a strain moves a G across the cutoff.
`taper` cures both: the weights are multiplied by a function of |G|/k_c that ends smoothly at 1 and is the
transform of a non-negative W. f is then convolved with W: f_per >= 0 stays so exactly in every cell, and each
s^2 becomes s^2 + 1/(3 k_c^2).

**Count.** The number of G is about (2/3) pi V k_c^3, V being that of the box: a constant per volume, so the
cost of N atoms on R frequencies is linear in a batch of like cells and quadratic in one cell that grows.
`max_frequencies` keeps the whole shells of the shortest that fit, which lowers the cutoff of large cells to
about (3 R / 2 pi V)^(1/3) and makes the cost linear. The taper ends at the first shell left out, so nothing
jumps when a strain changes the selection.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from scipy.special import gammaincc, gammainccinv
from torch import Tensor

from molflt.nn.frequencies import FrequencySample

SHELL_TOLERANCE = 1e-6
"""Relative; a shell of G at the cutoff is kept whole however its lengths are rounded."""
ORDER_QUANTUM = 3.7e-6
"""Relative to the cutoff; lengths and components that differ by less are the same to the sorting."""
MAX_CANDIDATES = 2**24
SHORTEST_PERIOD = 1e-3
"""Å; a box of a single plane of atoms without padding would have no length."""


class LatticeFrequencies(NamedTuple):
    """The half-sphere 0 < |G| <= cutoff of each graph, padded with G = 0 of weight 0."""

    frequencies: Tensor
    """G `[B, 1, R, 3]`, cycles/Å."""
    quadrature_weights: Tensor
    """`[B, 1, R]`, 1/Å^3: 2/V (times the taper), or 0 at padding."""
    zero_weight: Tensor
    """`[B, 1]`, 1/Å^3: the weight 1/V of G = 0."""
    periodic_measure: Tensor
    """`[B]`: Å^p, length, area or volume of the cell along its p periodic directions; 1 without any."""
    num_periodic: Tensor
    """`[B]`: p."""

    def sample(self) -> FrequencySample:
        """All frequencies, G = 0 first."""
        return FrequencySample(
            torch.cat((torch.zeros_like(self.frequencies[:, :, :1]), self.frequencies), dim=-2),
            torch.cat((self.zero_weight.unsqueeze(-1), self.quadrature_weights), dim=-1),
        )


def truncation_error(width: float, cutoff: float) -> float:
    """Share of f(0) that lies beyond the cutoff, of a Gaussian in a large cell; in small ones it may be more.

    Args:
        width: s, Å.
        cutoff: k_c, cycles/Å.
    """
    return float(gammaincc(1.5, 0.5 * (2 * math.pi * width * cutoff) ** 2))


def smallest_width(cutoff: float, error: float = 1e-3) -> float:
    """The width s, in Å, from which on `truncation_error` is within `error`."""
    return math.sqrt(2 * float(gammainccinv(1.5, error))) / (2 * math.pi * cutoff)


def taper_window(ratio: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """(1-t) sin(2 pi t) / (2 pi t) + (1 - cos 2 pi t) / (2 pi^2 t) for t = |G|/k_c, and 0 from t = 1 on.

    The function of that support with a non-negative transform in three dimensions (hence on every lattice)
    that is flattest at 0: 1 - (2/3) pi^2 t^2 + ...

    Source: Gneiting, "Compactly supported correlation functions", J. Multivariate Anal. 83, 493 (2002);
    Ehm, Gneiting and Richards, Trans. AMS 356, 4655 (2004).
    """
    t = ratio.clamp(max=1.0)
    # (1 - cos 2 pi t) / (2 pi^2 t) = t sinc(t)^2 and sin(2 pi t) / (2 pi t) = sinc(2 t).
    return ((1 - t) * torch.sinc(2 * t) + t * torch.sinc(t).square()).clamp(min=0.0)


def periodic_box(
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    pos: Float[Tensor, "B N 3"] | None = None,
    atom_mask: Bool[Tensor, "B N"] | None = None,
    open_padding: float = 0.0,
) -> Float[Tensor, "B 3 3"]:
    """`cell` with its open rows replaced by vectors at right angles to the periodic ones and to each other.

    Their lengths are the extents of the atoms along them plus `open_padding`; they carry no gradient of the
    positions. Arguments and errors as in `lattice_frequencies`.
    """
    if bool(pbc.all()):
        return cell
    if pos is None:
        raise ValueError(
            "pos must be given where pbc has open directions, got None: their extent is the atoms'"
        )
    periodic = torch.where(pbc.unsqueeze(-1), cell, 0.0)
    # Right singular vectors past the rank of the periodic rows: an orthonormal basis of the open directions.
    basis = torch.linalg.svd(periodic.detach()).Vh
    count = pbc.sum(-1, keepdim=True)
    index = (count + (~pbc).cumsum(-1) - 1).clamp(0, 2)
    axes = basis.gather(1, index.unsqueeze(-1).expand_as(basis))
    # Changes no value, but lets the axes turn with the cell in derivatives.
    axes = axes - axes @ torch.linalg.pinv(periodic) @ periodic

    along = pos.detach().to(cell.dtype) @ axes.detach().mT
    if atom_mask is None:
        low, high = along, along
    else:
        low, high = (
            torch.where(atom_mask.unsqueeze(-1), along, fill) for fill in (float("inf"), float("-inf"))
        )
    extent = (high.amax(1) - low.amin(1)).clamp(min=0.0)
    length = (extent + open_padding).clamp(min=SHORTEST_PERIOD)
    return torch.where(pbc.unsqueeze(-1), cell, axes * length.unsqueeze(-1))


def half_grid(bounds: list[int]) -> Int[Tensor, "K 3"]:
    """Integer triples within +-bounds, one of each pair n, -n, and 0 at the end."""
    count = (bounds[0] + 1) * (2 * bounds[1] + 1) * (2 * bounds[2] + 1)
    if count > MAX_CANDIDATES:
        raise ValueError(
            f"cutoff must leave at most {MAX_CANDIDATES} candidates of reciprocal lattice vectors, got "
            f"{count} for the largest cell along each direction; lower the cutoff or give a less skewed cell"
        )
    lows = (0, -bounds[1], -bounds[2])
    ranges = [torch.arange(low, bound + 1) for low, bound in zip(lows, bounds, strict=True)]
    first, second, third = torch.meshgrid(*ranges, indexing="ij")
    kept = (first > 0) | ((first == 0) & ((second > 0) | ((second == 0) & (third > 0))))
    half = torch.stack((first[kept], second[kept], third[kept]), dim=-1)
    return torch.cat((half, half.new_zeros(1, 3)))


def lattice_frequencies(
    cell: Float[Tensor, "B 3 3"],
    pbc: Bool[Tensor, "B 3"],
    cutoff: float,
    pos: Float[Tensor, "B N 3"] | None = None,
    atom_mask: Bool[Tensor, "B N"] | None = None,
    *,
    open_padding: float = 0.0,
    taper: bool = False,
    num_frequencies: int | None = None,
    max_frequencies: int | None = None,
) -> LatticeFrequencies:
    """The reciprocal lattice vectors of each graph up to a cutoff, with their quadrature weights.

    They are sorted by length, then by x, y, z, and of a pair +-G that one is kept whose first component other
    than 0 is positive, so their order too depends on the lattice alone. Worked out in float64; the results
    have the type of `cell`, and its gradients.

    Args:
        cell: rows are lattice vectors, Å, in any order, skewed or left-handed; rows along open directions
            are not used.
        pbc: true along periodic directions.
        cutoff: k_c, cycles/Å.
        pos: positions, Å; needed where a direction is open. Padded rows must be finite.
        atom_mask: true at real atoms, all by default.
        open_padding: room between the atoms and their images along open directions, Å; 5 times the largest
            width of f leaves 4e-6 of f(0).
        taper: multiplies the weights by `taper_window`.
        num_frequencies: R; by default that of the graph with the most.
        max_frequencies: most vectors a graph keeps, the shortest in whole shells; None keeps all to the
            cutoff. f is then smoothed more in larger cells, and a supercell no longer repeats its cell's f.

    Raises:
        ValueError: `cutoff` or `max_frequencies` is not positive, or `open_padding` negative; periodic
            vectors are linearly dependent; an open direction without `pos`; more than 2^24 candidates, or
            more than `num_frequencies` vectors.
    """
    if not 0 < cutoff < math.inf:
        raise ValueError(f"cutoff must be positive and finite, got {cutoff}; give cycles/Å such as 0.2")
    if not 0 <= open_padding < math.inf:
        raise ValueError(f"open_padding must be finite and not negative, got {open_padding}; give Å")
    if max_frequencies is not None and max_frequencies < 1:
        raise ValueError(f"max_frequencies must be at least 1, got {max_frequencies}; None keeps all")
    box = periodic_box(cell.double(), pbc, pos, atom_mask, open_padding)
    lengths = torch.linalg.vector_norm(box.detach(), dim=-1)
    volume = torch.linalg.det(box).abs()
    if not bool((volume > 1e-9 * lengths.prod(-1)).all()):
        raise ValueError(
            "cell must have linearly independent vectors along its periodic directions, got a volume of "
            f"{volume.min().item():.3g} Å^3; correct the cell or switch pbc off along one of them"
        )
    largest = cutoff * (1 + SHELL_TOLERANCE)
    # n_i = G.a_i, so |n_i| <= |G| |a_i|.
    bounds = (largest * lengths).amax(0).floor().long().tolist()
    grid = half_grid(bounds).to(cell.device)
    candidates = grid.to(box.dtype) @ torch.linalg.inv(box).mT
    square = candidates.detach().square().sum(-1)
    kept = (square <= largest**2) & (square > 0)
    left_out = _first_left_out(candidates, kept, max_frequencies)
    kept = kept & (square < (left_out.detach() * (1 - SHELL_TOLERANCE)).square())
    count = max(1, int(kept.sum(-1).max()))
    order = torch.argsort(~kept, dim=-1, stable=True)[:, :count]
    kept = kept.gather(-1, order)
    frequencies = candidates.gather(1, order.unsqueeze(-1).expand(-1, -1, 3))
    frequencies, kept = _in_order(torch.where(kept.unsqueeze(-1), frequencies, 0.0), kept, cutoff)
    if num_frequencies is not None:
        if count > num_frequencies:
            raise ValueError(
                f"num_frequencies must be at least {count} for these cells at cutoff {cutoff}, got "
                f"{num_frequencies}; raise it or lower the cutoff"
            )
        frequencies = F.pad(frequencies, (0, 0, 0, num_frequencies - count))
        kept = F.pad(kept, (0, num_frequencies - count))
    weights = torch.where(kept, 2 / volume.unsqueeze(-1), 0.0)
    if taper:
        # A square root needs to be kept from the origin, where it has no gradient.
        limit = left_out.clamp(max=cutoff)
        ratio = torch.where(kept, frequencies.square().sum(-1), limit.square()).sqrt() / limit
        weights = weights * taper_window(ratio)
    measure = volume / torch.where(pbc, 1.0, lengths).prod(-1)
    return LatticeFrequencies(
        frequencies.unsqueeze(1).to(cell.dtype),
        weights.unsqueeze(1).to(cell.dtype),
        (1 / volume).unsqueeze(-1).to(cell.dtype),
        measure.to(cell.dtype),
        pbc.sum(-1),
    )


def _first_left_out(
    candidates: Float[Tensor, "B K 3"], kept: Bool[Tensor, "B K"], max_frequencies: int | None
) -> Float[Tensor, "B 1"]:
    """Length of the shortest kept vector beyond the `max_frequencies` shortest; infinite without any."""
    if max_frequencies is None or max_frequencies >= candidates.shape[1]:
        return candidates.new_full((len(candidates), 1), float("inf"))
    length = torch.where(kept, candidates.square().sum(-1), float("inf")).sqrt()
    return length.kthvalue(max_frequencies + 1, dim=-1).values.unsqueeze(-1)


def _in_order(
    frequencies: Float[Tensor, "B R 3"], kept: Bool[Tensor, "B R"], cutoff: float
) -> tuple[Float[Tensor, "B R 3"], Bool[Tensor, "B R"]]:
    """Signs and order that do not depend on the cell; padding last."""
    steps = (frequencies.detach() / (ORDER_QUANTUM * cutoff)).round()
    x, y, z = steps.unbind(-1)
    leading = torch.where(x != 0, x, torch.where(y != 0, y, z))
    sign = torch.where(leading < 0, -1.0, 1.0).unsqueeze(-1).to(frequencies.dtype)
    length = (torch.linalg.vector_norm(frequencies.detach(), dim=-1) / (ORDER_QUANTUM * cutoff)).round()
    order = torch.arange(kept.shape[-1], device=kept.device).expand_as(kept)
    for column in (*(sign * steps).unbind(-1)[::-1], length.masked_fill(~kept, float("inf"))):
        order = order.gather(-1, torch.argsort(column.gather(-1, order), dim=-1, stable=True))
    frequencies = (sign * frequencies).gather(1, order.unsqueeze(-1).expand_as(frequencies))
    return frequencies, kept.gather(-1, order)
