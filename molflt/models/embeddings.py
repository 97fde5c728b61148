"""Node features from elements, tags and the periodic radius graph, at a cost linear in the edges.

    x_e  = mul[z_i, z_j] d_e + bias[z_i, z_j]                 e: an edge from sender j to receiver i
    G_ek = c(d_e) exp(-(x_e - mu_k)^2 / 2 sigma_k^2)
    h_i  = element[z_i] + tag[t_i] + Linear(sum_e G_ek / (sqrt(2 pi) sigma_k))

Source: Graphormer-3D (Shi et al., arXiv 2203.04810), whose sum runs over all pairs of atoms. Here it runs
over the radius graph, and the smooth cutoff c lets an edge vanish without a jump.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_ELEMENTS = 119
"""Atomic numbers 0 (unused) to 118."""
NUM_TAGS = 3
"""OC20: 0 subsurface or untagged, 1 surface, 2 adsorbate."""
MIN_STD = 0.05
"""Å; floor of the Gaussians' widths, so that float32 resolves the narrowest of them."""
LOWEST_EXPONENT = -60.0
"""exp(-60) = 1e-26 stands for 0: below exp(-87) float32 results are subnormal, and slow on a CPU."""


class EdgeGeometry(NamedTuple):
    """What the layers need to know of the radius graph, computed once for a batch."""

    sender: Tensor
    """[E] int64, atom j."""
    receiver: Tensor
    """[E] int64, atom i."""
    displacement: Tensor
    """[E, 3] r_j - r_i, image included, Å."""
    distances: Tensor
    """[E] Å."""
    cutoff: Tensor
    """[E] smooth weight, 1 at distance 0 and 0 from the radius on."""


def edge_geometry(edge_index: Tensor, displacement: Tensor, radius: float) -> EdgeGeometry:
    """Distances and cutoff weights of the edges; gradients are finite (zero) at zero distance.

    Args:
        edge_index: [2, E] sender, receiver.
        displacement: [E, 3] r_sender - r_receiver, Å.
        radius: where the cutoff reaches zero, Å.
    """
    squared = displacement.square().sum(-1)
    apart = squared > 0
    distances = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
    return EdgeGeometry(
        edge_index[0], edge_index[1], displacement, distances, polynomial_cutoff(distances, radius)
    )


def polynomial_cutoff(distances: Tensor, radius: float) -> Tensor:
    """c(d) = 1 - 28 u^6 + 48 u^7 - 21 u^8 with u = d / radius, and 0 for u >= 1.

    Value, slope and curvature are continuous everywhere and c(0) = 1. Evaluated as a product of factors of
    one sign, so that rounding makes no negative weights.
    Source: Gasteiger et al., "Directional message passing", arXiv 2003.03123, eq. 8 with p = 6.

    Args:
        distances: [E] Å.
        radius: Å.
    """
    u = (distances / radius).clamp(max=1.0)
    return (1.0 - u) ** 3 * (1.0 + u * (3.0 + u * (6.0 + u * (10.0 + u * (15.0 + u * 21.0)))))


def sum_to_receivers(messages: Tensor, receiver: Tensor, num_atoms: int) -> Tensor:
    """Sum messages [E, ...] into their receiving atoms, [A, ...]."""
    return messages.new_zeros(num_atoms, *messages.shape[1:]).index_add(0, receiver, messages)


class PairGaussians(nn.Module):
    """K Gaussians of a distance that each ordered pair of elements stretches and shifts in its own way.

    Args:
        num_gaussians: K.
        radius: the means start evenly spaced over (0, radius), Å.
    """

    def __init__(self, num_gaussians: int, radius: float) -> None:
        super().__init__()
        self.num_gaussians = num_gaussians
        self.radius = radius
        self.pair_mul = nn.Embedding(NUM_ELEMENTS**2, 1)
        self.pair_bias = nn.Embedding(NUM_ELEMENTS**2, 1)
        self.means = nn.Parameter(torch.empty(num_gaussians))
        self.raw_stds = nn.Parameter(torch.empty(num_gaussians))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.pair_mul.weight)
        nn.init.zeros_(self.pair_bias.weight)
        spacing = self.radius / self.num_gaussians
        with torch.no_grad():
            self.means.copy_(spacing * (0.5 + torch.arange(self.num_gaussians)))
            # softplus(raw) = std - MIN_STD at the start, with std twice the spacing
            self.raw_stds.fill_(math.log(math.expm1(max(2.0 * spacing - MIN_STD, 0.01))))

    @property
    def stds(self) -> Tensor:
        """[K] widths sigma_k > MIN_STD, Å."""
        return MIN_STD + F.softplus(self.raw_stds)

    @property
    def heights(self) -> Tensor:
        """[K] 1 / (sqrt(2 pi) sigma_k), 1/Å: what `forward` leaves out of the normalised Gaussian."""
        return 1.0 / (math.sqrt(2.0 * math.pi) * self.stds)

    def forward(
        self, distances: Tensor, cutoff: Tensor, receiver_elements: Tensor, sender_elements: Tensor
    ) -> Tensor:
        """[E, K] c exp(-(x - mu)^2 / 2 sigma^2).

        Args:
            distances: [E] Å.
            cutoff: [E] weights c.
            receiver_elements, sender_elements: [E] atomic numbers z_i, z_j.
        """
        pair = receiver_elements * NUM_ELEMENTS + sender_elements
        x = self.pair_mul(pair).squeeze(-1) * distances + self.pair_bias(pair).squeeze(-1)
        return weighted_gaussians(x, cutoff, self.means, self.stds)

    def extra_repr(self) -> str:
        return f"num_gaussians={self.num_gaussians}, radius={self.radius}"


def weighted_gaussians(x: Tensor, weight: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    """weight exp(-(x - mu)^2 / 2 sigma^2) for x, weight >= 0 [E] and means, stds [K], as [E, K].

    The logarithm is a quadratic polynomial in x, so it is one matrix product with four columns, which takes a
    fraction of the elementwise form's memory traffic. x is counted from the middle of the means, where the
    polynomial rounds least, and nothing is in half precision. Values below exp(-60) are exp(-60).
    """
    with torch.autocast(x.device.type, enabled=False):
        middle = means.detach().mean()
        x, means = x.to(means) - middle, means - middle
        log_weight = weight.to(means).clamp(min=math.exp(LOWEST_EXPONENT)).log()
        curvature = -0.5 / stds.square()
        one = torch.ones_like(x)
        factors = torch.stack([x.square(), x, one, log_weight], dim=-1)
        coefficients = torch.stack(
            [curvature, -2.0 * curvature * means, curvature * means.square(), torch.ones_like(means)]
        )
        return _ExpOfProduct.apply(factors, coefficients)


class _ExpOfProduct(torch.autograd.Function):
    """exp(max(a @ b, LOWEST_EXPONENT)), in place and with one elementwise pass backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        result = (a @ b).clamp_(min=LOWEST_EXPONENT).exp_()
        ctx.save_for_backward(a, b, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        a, b, result = ctx.saved_tensors
        slope = grad_outputs[0] * result
        return slope @ b.T, a.T @ slope


class AtomEmbedding(nn.Module):
    """Element, tag and geometry embeddings, summed into node features.

    Args:
        channels: C.
        num_gaussians: K.
        radius: cutoff of the radius graph, Å.
    """

    def __init__(self, channels: int, num_gaussians: int, radius: float) -> None:
        super().__init__()
        self.element = nn.Embedding(NUM_ELEMENTS, channels)
        self.tag = nn.Embedding(NUM_TAGS, channels)
        self.pair_gaussians = PairGaussians(num_gaussians, radius)
        self.geometry = nn.Linear(num_gaussians, channels)

    def reset_parameters(self) -> None:
        self.element.reset_parameters()
        self.tag.reset_parameters()
        self.pair_gaussians.reset_parameters()
        self.geometry.reset_parameters()

    def forward(self, atomic_numbers: Tensor, tags: Tensor, edges: EdgeGeometry) -> tuple[Tensor, Tensor]:
        """Node features [A, C], and the edges' weighted Gaussians [E, K] for layers that want them.

        Args:
            atomic_numbers: [A] int64, 0 to 118.
            tags: [A] int64, 0 to 2.
            edges: the radius graph.
        """
        per_edge = self.pair_gaussians(
            edges.distances,
            edges.cutoff,
            atomic_numbers.index_select(0, edges.receiver),
            atomic_numbers.index_select(0, edges.sender),
        )
        summed = sum_to_receivers(per_edge, edges.receiver, len(atomic_numbers))
        summed = self.pair_gaussians.heights * summed
        return self.element(atomic_numbers) + self.tag(tags) + self.geometry(summed), per_edge
