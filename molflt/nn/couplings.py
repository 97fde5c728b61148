"""How a relative positional encoding enters linear attention.

    additive         a_ij = exp(q_i.k_j / sqrt(D) + f_hat(r_i - r_j))   FLT, arXiv 2302.01925, Algorithm 1
    multiplicative   a_ij = exp(q_i.k_j / sqrt(D)) M(r_i - r_j), M > 0
    none             a_ij = exp(q_i.k_j / sqrt(D))                      Performer

(with exp standing for whatever the feature map linearises). A coupling says which vectors the feature map
sees (`operands`) and what the weights are multiplied by (`modulations`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from molflt.nn.features import Modulations
from molflt.nn.functional import append_ones
from molflt.nn.operands import FourierOperands, Operands
from molflt.nn.rpe import FourierRPE


class Coupling(nn.Module):
    """Where positions enter; base class, in which they do not."""

    needs_positions = False
    default_num_random_features = 64

    def input_width(self, head_dim: int, rpe: FourierRPE | None) -> int:
        """Width of the vectors that the feature map sees."""
        return head_dim

    def operands(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        rpe: FourierRPE | None,
        basis: Float[Tensor, "B H N K"] | None,
    ) -> Operands:
        """The vectors that the feature map sees.

        Raises:
            ValueError: the coupling needs positions, and `rpe` or `basis` is None.
        """
        return Operands(query, key)

    def modulations(
        self, rpe: FourierRPE | None, basis: Float[Tensor, "B H N K"] | None
    ) -> Modulations | None:
        """Factors of what the weights are multiplied by; None is 1."""
        return None

    def exact_bias(
        self, rpe: FourierRPE | None, pos: Float[Tensor, "B N X"] | None
    ) -> Float[Tensor, "B H N N"] | None:
        """What softmax attention adds to q.k / sqrt(D) where this coupling's features are exact; None is 0.

        Under the RPE's own frequencies; quadratic in N.
        """
        return None

    def required(self, rpe: FourierRPE | None, positional: Tensor | None) -> tuple[FourierRPE, Tensor]:
        """`rpe` and `positional` (positions or their basis), or ValueError where one is missing."""
        if rpe is None or positional is None:
            raise ValueError(
                f"{type(self).__name__} needs positions: pass pos (or positional) and an rpe, or use "
                "NoCoupling()"
            )
        return rpe, positional


class NoCoupling(Coupling):
    """Positions play no part: plain linear attention (Performer)."""


class AdditiveCoupling(Coupling):
    """The RPE is added to the logits: FLT as published.

    The features of q^ = [query RPE features, q D^-1/4] are those of one exponential, so the estimate of
    exp(f_hat) is a Monte Carlo one over the projection W. For a given W it is no function of r_i - r_j alone:
    W mixes the cosines and sines of the absolute positions. Measured with the default RPE (R = 16, D = 64, 64
    points in a 10 Å box, all shifted by 7 Å, median over 96 heads): the output changes by 24 % of its root
    mean square at M = 64, 13 % at M = 256 and 7 % at M = 1,024 where q = k = 0. With unit normal q and k the
    change is 80 % at all three, since there the estimate of exp(q.k / sqrt(D)) itself has not begun to
    converge. Centre positions, so that the origin means the same in every graph.

    On the reciprocal lattice of a periodic structure (`LatticeFLTAttention`) f_hat is the sum of f over the
    images: outputs do not depend on the cell that an atom or the lattice is given in, nor on vacuum, but a
    supercell gives others than its cell, since exp of a sum over images is no sum over images of exp.

    The normaliser is positive with positive features. With signed ones it need not be: of
    `RFAGaussianFeatures`, 2 % of the normalisers are negative at M = 64 and 0.7 % at M = 256 (same setting,
    unit normal q and k).
    """

    needs_positions = True

    def input_width(self, head_dim: int, rpe: FourierRPE | None) -> int:
        """Width of the vectors that the feature map sees: 2R + D."""
        assert rpe is not None
        return 2 * rpe.num_frequencies + head_dim

    def operands(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        rpe: FourierRPE | None,
        basis: Float[Tensor, "B H N K"] | None,
    ) -> Operands:
        return FourierOperands(query, key, *self.required(rpe, basis))

    def exact_bias(
        self, rpe: FourierRPE | None, pos: Float[Tensor, "B N X"] | None
    ) -> Float[Tensor, "B H N N"]:
        """f_hat(r_i - r_j)."""
        rpe, pos = self.required(rpe, pos)
        return rpe.dense_bias(pos)


class MultiplicativeCoupling(Coupling):
    """The weights are multiplied by M(r_i - r_j) > 0, which plays the part of exp(f):

        M(x) = background + sum_k m_k (floor_ratio + cos(2 pi xi_k.x)),   m_k = |w_k| of the RPE.

    M is an exact function of the displacement, so attention is exactly translation-invariant, and nothing of
    it is exponentiated, so its variance is far below the additive coupling's. M is constant where the
    amplitudes are 0, which is a stationary point: no gradient leads away from it. The sign and phase of the
    spectrum play no part: M peaks at zero displacement.

    Cost O(N M (2R+1) D), so M, the number of random features, should be small; it is 16 by default.

    Args:
        background: smallest value of M, positive. The contrast M(0)/min M is at most
            (background + (1 + floor_ratio) sum m) / background.
        floor_ratio: 1 makes M >= background for any frequencies. Less raises the contrast between near and
            far, and is safe only where sum_k m_k cos(2 pi xi_k.x) >= -floor_ratio sum m for all x in reach,
            as with an accurate quadrature of a function that is positive in space.

    Raises:
        ValueError: background is not positive, or floor_ratio is not in [0, 1].
    """

    needs_positions = True
    default_num_random_features = 16

    def __init__(self, background: float = 0.1, floor_ratio: float = 1.0) -> None:
        super().__init__()
        if not background > 0:
            raise ValueError(f"background must be positive, got {background}")
        if not 0 <= floor_ratio <= 1:
            raise ValueError(f"floor_ratio must be in [0, 1], got {floor_ratio}")
        self.background = background
        self.floor_ratio = floor_ratio

    def operands(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        rpe: FourierRPE | None,
        basis: Float[Tensor, "B H N K"] | None,
    ) -> Operands:
        self.required(rpe, basis)
        return Operands(query, key)

    def modulations(self, rpe: FourierRPE | None, basis: Float[Tensor, "B H N K"] | None) -> Modulations:
        """[basis, 1] on both sides, times [m, m, background + floor_ratio sum m] on the keys' side."""
        rpe, basis = self.required(rpe, basis)
        amplitudes = rpe.amplitudes().to(basis.dtype)
        floor = self.background + self.floor_ratio * amplitudes.sum(-1, keepdim=True)
        weights = torch.cat([amplitudes, amplitudes, floor], dim=-1)
        alpha = append_ones(basis)
        return Modulations(alpha, alpha * weights.unsqueeze(-2))

    def exact_bias(
        self, rpe: FourierRPE | None, pos: Float[Tensor, "B N X"] | None
    ) -> Float[Tensor, "B H N N"]:
        """log M(r_i - r_j)."""
        rpe, pos = self.required(rpe, pos)
        query, key = self.modulations(rpe, rpe.basis(pos))
        return (query @ key.mT).log()

    def extra_repr(self) -> str:
        return f"background={self.background}, floor_ratio={self.floor_ratio}"
