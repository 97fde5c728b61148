"""Fourier RPEs that depend on the elements of a pair, at the same linear cost.

    f_ij = sum_k alpha_k(z_i) beta_k(z_j) Re[W_k exp(2 pi i xi_k.(r_i - r_j))]
    alpha_k(z) = 1 + sum_p embedding_p(z) mixing_kp,     beta_k likewise with weights of its own

The factors multiply the features of queries and keys, one number per frequency for cosine and sine together,
so the width stays 2R. For each frequency alpha beta^T is a matrix over element pairs of rank one, and these
matrices differ from frequency to frequency: near and far parts of f may depend on the elements differently,
and f_ij need not equal f_ji. `rank` P bounds the span of each factor over the elements. Graphormer-3D's bias
has a number of its own per pair of elements, of which this is the low-rank form (arXiv 2203.04810).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from molflt.nn.attention import FLTAttention
from molflt.nn.couplings import AdditiveCoupling
from molflt.nn.feature_maps import FeatureMap
from molflt.nn.frequencies import FrequencySampler
from molflt.nn.multihead import zero_padding
from molflt.nn.operands import FourierOperands, Operands, Projection, Term, token_mean
from molflt.nn.periodic import PeriodicGeometry
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import Spectrum

NUM_ELEMENTS = 119
"""Atomic numbers 0 (padding) to 118."""
INITIAL_SPREAD = 0.3
"""Standard deviation of alpha - 1 at the start."""


class ElementFactors(nn.Module):
    """1 + a product of an element embedding and a mixing matrix.

    Args:
        num_heads: H.
        num_frequencies: R.
        rank: P.
    """

    def __init__(self, num_heads: int, num_frequencies: int, rank: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}; leave the factors out instead of 0")
        self.embedding = nn.Parameter(torch.empty(NUM_ELEMENTS, rank))
        self.mixing = nn.Parameter(torch.empty(num_heads, rank, num_frequencies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Neither part is zero, so that both learn from the start."""
        nn.init.normal_(self.embedding)
        nn.init.normal_(self.mixing, std=INITIAL_SPREAD * self.mixing.shape[1] ** -0.5)

    def forward(self, atomic_numbers: Int[Tensor, "B N"]) -> Float[Tensor, "B H N R"]:
        """The factor of each atom, head and frequency."""
        # Of all elements first: there are fewer than atoms in a batch.
        table = 1 + self.embedding @ self.mixing
        return table[:, atomic_numbers].transpose(0, 1)


class ElementPairRPE(FourierRPE):
    """A Fourier RPE with element factors.

    Args:
        sampler: where the spectrum is read.
        spectrum: g.
        rank: P.
    """

    def __init__(self, sampler: FrequencySampler, spectrum: Spectrum, rank: int) -> None:
        super().__init__(sampler, spectrum)
        self.query_factors, self.key_factors = (
            ElementFactors(self.num_heads, self.num_frequencies, rank) for _ in range(2)
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.query_factors.reset_parameters()
        self.key_factors.reset_parameters()

    def element_basis(
        self, pos: Float[Tensor, "B N 3"], atomic_numbers: Int[Tensor, "B N"]
    ) -> Float[Tensor, "B H N K"]:
        """The trigonometric basis times the queries' and times the keys' factors, K = 2R + 2R."""
        basis = self.basis(pos)
        parts = [
            basis * factors(atomic_numbers).to(basis.dtype).repeat(1, 1, 1, 2)
            for factors in (self.query_factors, self.key_factors)
        ]
        return torch.cat(parts, dim=-1)

    def element_bias(
        self, pos: Float[Tensor, "B N 3"], atomic_numbers: Int[Tensor, "B N"]
    ) -> Float[Tensor, "B H N N"]:
        """f_ij from displacements and pairs of elements: quadratic in N, the twin of query . key."""
        displacement = pos.unsqueeze(2) - pos.unsqueeze(1)
        theta = self._phases(displacement.flatten(1, 2)).unflatten(-2, displacement.shape[1:3])
        weights = self.importance_weights()[..., None, None, :]
        waves = weights.real * theta.cos()
        if weights.is_complex():
            waves = waves - weights.imag * theta.sin()
        alpha, beta = self.query_factors(atomic_numbers), self.key_factors(atomic_numbers)
        return torch.einsum("bhijk,bhik,bhjk->bhij", waves, alpha, beta)


class ElementPairOperands(FourierOperands):
    """q^ = [query RPE features times alpha, scale q] and k^ = [key RPE features times beta, scale k].

    Args:
        query, key, rpe, scale: as in `FourierOperands`.
        query_basis, key_basis: the halves of `rpe.element_basis`, `[B, H, N, 2R]`.
    """

    def __init__(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        rpe: FourierRPE,
        query_basis: Float[Tensor, "B H N K"],
        key_basis: Float[Tensor, "B H N K"],
        scale: float | None = None,
    ) -> None:
        super().__init__(query, key, rpe, query_basis, scale)
        self.key_basis = key_basis

    def with_content(
        self, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B H N D"], scale: float
    ) -> ElementPairOperands:
        return ElementPairOperands(query, key, self.rpe, self.basis, self.key_basis, scale)

    def project(self, projection: Float[Tensor, "H M E"]) -> Projection:
        """As in `FourierOperands`, each side with its own basis."""
        width = self.basis.shape[-1]
        content = Operands.project(self, projection[..., width:])
        query_weight, key_weight = self.rpe.fold(projection[..., :width])
        return Projection(
            [*content.query_terms, Term(self.basis, query_weight.transpose(-1, -2))],
            [*content.key_terms, Term(self.key_basis, key_weight.transpose(-1, -2))],
        )

    def half_squared_key_norm(self) -> Float[Tensor, "B H N 1"]:
        """|k^|^2 / 2: beta makes the length of the RPE features differ from atom to atom."""
        _, key_features = self.rpe_features(self.key_basis)
        return super().half_squared_key_norm() + 0.5 * key_features.square().sum(-1, keepdim=True)

    def mean_squared_sum(self, atom_mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H 1 1"]:
        query, key = self.concatenated()
        squares = query.square().sum(-1, keepdim=True) + key.square().sum(-1, keepdim=True)
        cross = (token_mean(query, atom_mask) * token_mean(key, atom_mask)).sum(-1, keepdim=True)
        return token_mean(squares, atom_mask) + 2 * cross

    def concatenated(self) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N E"]]:
        query, key = Operands.concatenated(self)
        query_features, _ = self.rpe_features(self.basis)
        _, key_features = self.rpe_features(self.key_basis)
        return torch.cat([query_features, query], dim=-1), torch.cat([key_features, key], dim=-1)


class ElementPairCoupling(AdditiveCoupling):
    """The additive coupling of an `ElementPairRPE`, whose positional part is `element_basis`."""

    def operands(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        rpe: FourierRPE | None,
        basis: Float[Tensor, "B H N K"] | None,
    ) -> Operands:
        rpe, basis = self.required(rpe, basis)
        query_basis, key_basis = basis.chunk(2, dim=-1)
        return ElementPairOperands(query, key, rpe, query_basis, key_basis)

    def exact_bias(self, rpe: FourierRPE | None, pos: Float[Tensor, "B N X"] | None) -> Tensor:
        raise NotImplementedError("positions alone make no bias of element pairs: use rpe.element_bias")


class ElementPairFLTAttention(FLTAttention):
    """FLT attention, additive, whose RPE depends on the elements of a pair; takes a `PeriodicGeometry` with
    `atomic_numbers`, of which it reads these and the positions.

    Args:
        channels: C.
        num_heads: H.
        rpe: shared between layers by passing one object.
        feature_map: linearises exp; positive random features, 64, by default.
    """

    needs_geometry = True
    """Whether `encode_positions` takes a `PeriodicGeometry` instead of positions."""

    def __init__(
        self, channels: int, num_heads: int, *, rpe: ElementPairRPE, feature_map: FeatureMap | None = None
    ) -> None:
        super().__init__(
            channels, num_heads, rpe=rpe, feature_map=feature_map, coupling=ElementPairCoupling()
        )

    @property
    def basis_width(self) -> int:
        """K = 4R."""
        assert self.rpe is not None
        return 4 * self.rpe.num_frequencies

    def encode_positions(self, pos: Any, atom_mask: Bool[Tensor, "B N"] | None = None) -> Any:
        """`element_basis` `[B, H, N, 4R]` of a geometry."""
        if not isinstance(pos, PeriodicGeometry) or pos.atomic_numbers is None:
            raise ValueError(
                "ElementPairFLTAttention needs a PeriodicGeometry with atomic_numbers, got "
                f"{type(pos).__name__}{'' if isinstance(pos, Tensor) or pos is None else ' without them'}"
            )
        assert isinstance(self.rpe, ElementPairRPE)
        with torch.autocast(pos.pos.device.type, enabled=False):
            return self.rpe.element_basis(zero_padding(pos.pos, pos.atom_mask), pos.atomic_numbers)

    def forward(
        self,
        x: Float[Tensor, "B N Cin"],
        pos: Any = None,
        atom_mask: Bool[Tensor, "B N"] | None = None,
        *,
        positional: Float[Tensor, "B H N K"] | None = None,
    ) -> Float[Tensor, "B N C"]:
        """Attention over the atoms of each graph; `pos` is the geometry, or `positional` its encoding."""
        if positional is None:
            positional = self.encode_positions(pos)
            atom_mask = pos.atom_mask if atom_mask is None else atom_mask
        return super().forward(x, None, atom_mask, positional=positional)
