"""Feature maps of other functions than the exponential.

    ReLU                relu(W x) with a learned W                    FLT (Choromanski et al. 2024) for images
    elu + 1             elu(x) + 1                                    Katharopoulos et al. 2020
    RFA, Gaussian       [sin W x, cos W x]                            Peng et al. 2021; Rahimi & Recht 2007
    RFA, arc-cosine     sqrt(2) relu(W x)                             Peng et al. 2021; Cho & Saul 2009
    cosine reweighting  relu(x) [cos t, sin t], t = pi i / 2 L        cosFormer, Qin et al. 2022

Only the Gaussian one estimates exp(q^.k^); through the others an RPE acts as part of the vectors' similarity.
Their normalisers can vanish or, with the signed Gaussian features, change sign: `molflt.nn.attention` warns
when a normaliser is as small as epsilon.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from molflt.nn.feature_maps import FeatureMap, RandomProjectionFeatures
from molflt.nn.features import PlainFeatures
from molflt.nn.frequencies import orthogonal_gaussian_noise
from molflt.nn.functional import mask_rows
from molflt.nn.operands import Operands


class ReLUFeatures(FeatureMap):
    """phi(x) = relu(W x) + offset with a learned W of M rows per head.

    Args:
        num_random_features: M.
        offset: keeps the normaliser positive where no feature is active.

    Source: Choromanski et al., Learning a Fourier Transform for Linear Relative Positional Encodings in
    Transformers, AISTATS 2024, section 5; Performer's generalised attention.
    """

    weight: nn.Parameter

    def __init__(self, num_random_features: int = 64, offset: float = 1e-3) -> None:
        super().__init__()
        if num_random_features < 1:
            raise ValueError(f"num_random_features must be at least 1, got {num_random_features}")
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        self.num_random_features = num_random_features
        self.offset = offset

    def reset_parameters(self) -> None:
        """Rows of unit mean square length, block-orthogonal, so that features start at the inputs' scale."""
        assert self.num_heads is not None
        assert self.input_width is not None
        weight = orthogonal_gaussian_noise(self.num_heads, self.num_random_features, self.input_width)
        weight = weight / self.input_width**0.5
        if "weight" not in self._parameters:
            self.weight = nn.Parameter(torch.empty(weight.shape))
        with torch.no_grad():
            self.weight.copy_(weight)

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> PlainFeatures:
        query, key = project(operands, self.weight)
        return PlainFeatures(query.relu() + self.offset, mask_rows(key.relu() + self.offset, atom_mask))

    def extra_repr(self) -> str:
        return f"num_random_features={self.num_random_features}, offset={self.offset}"


class EluFeatures(FeatureMap):
    """phi(x) = elu(x) + 1, with as many features as x has components.

    Source: Katharopoulos et al., Transformers are RNNs, ICML 2020.
    """

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> PlainFeatures:
        query, key = operands.concatenated()
        return PlainFeatures(F.elu(query) + 1, mask_rows(F.elu(key) + 1, atom_mask))


class NormalizedProjectionFeatures(RandomProjectionFeatures):
    """Features of W x where q and k are scaled to one length, its square (`temperature`) learned per head."""

    raw_temperature: nn.Parameter

    def reset_parameters(self) -> None:
        """Temperature 1 and a new projection."""
        super().reset_parameters()
        assert self.num_heads is not None
        if "raw_temperature" not in self._parameters:
            self.raw_temperature = nn.Parameter(torch.empty(self.num_heads))
        nn.init.constant_(self.raw_temperature, math.log(math.e - 1))

    @property
    def temperature(self) -> Float[Tensor, "H"]:
        """Squared length of the scaled q and k, positive."""
        return F.softplus(self.raw_temperature)

    def projected(self, operands: Operands) -> tuple[Float[Tensor, "B H N M"], Float[Tensor, "B H N M"]]:
        """W q^ and W k^."""
        dtype = operands.query.dtype
        return project(operands.normalized(self.temperature.to(dtype)), self.projection)


class RFAGaussianFeatures(NormalizedProjectionFeatures):
    """phi(x) = [sin W x, cos W x] / sqrt(M/2), W of M/2 rows: an estimate of exp(-|x - y|^2 / 2).

    q and k being of one length, this is exp(q^.k^) up to a factor that cancels, with q^.k^ = temperature
    times the cosine of q and k, plus the RPE. Features are signed, so a normaliser may vanish or be negative
    where exp(-|q^|^2) is not far above M^-1/2.

    Args:
        num_random_features: M, even.

    Source: Peng et al., Random Feature Attention, ICLR 2021.
    """

    def __init__(self, num_random_features: int = 64) -> None:
        super().__init__(num_random_features)
        if num_random_features % 2 != 0:
            raise ValueError(f"num_random_features must be even, got {num_random_features}")

    @property
    def num_rows(self) -> int:
        return self.num_random_features // 2

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> PlainFeatures:
        scale = self.num_rows**-0.5
        query, key = (scale * torch.cat([x.sin(), x.cos()], dim=-1) for x in self.projected(operands))
        return PlainFeatures(query, mask_rows(key, atom_mask))


class RFAArcCosineFeatures(NormalizedProjectionFeatures):
    """phi(x) = sqrt(2/M) relu(W x): an estimate of |x| |y| (sin t + (pi - t) cos t) / pi, t their angle.

    q and k are scaled to one length, so the kernel is a function of their angle and the RPE.

    Args:
        num_random_features: M.

    Source: Peng et al., Random Feature Attention, ICLR 2021; Cho & Saul, NeurIPS 2009 (order 1).
    """

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> PlainFeatures:
        scale = (2 / self.num_random_features) ** 0.5
        query, key = (scale * x.relu() for x in self.projected(operands))
        return PlainFeatures(query, mask_rows(key, atom_mask))


class CosineReweighting(FeatureMap):
    """a_ij = relu(q^_i).relu(k^_j) cos(pi (i - j) / 2L), i and j counting a sequence's real tokens.

    Args:
        max_length: L. By default each sequence's own number of tokens, which a causal layer can not know.

    Source: Qin et al., cosFormer, ICLR 2022.
    """

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.max_length = max_length

    def require_causal(self) -> None:
        if self.max_length is None:
            raise ValueError("causal attention with CosineReweighting needs a fixed max_length, got None")

    def forward(self, operands: Operands, atom_mask: Bool[Tensor, "B N"] | None = None) -> PlainFeatures:
        query, key = operands.concatenated()
        num_tokens = query.shape[-2]
        if self.max_length is not None and num_tokens > self.max_length:
            raise ValueError(
                f"CosineReweighting has max_length={self.max_length} and got {num_tokens} tokens"
            )
        if atom_mask is None:
            index = torch.arange(num_tokens, device=query.device)[None]
            length = num_tokens
        else:
            index = atom_mask.cumsum(-1) - 1
            length = atom_mask.sum(-1, keepdim=True).clamp_min(1)
        angle = (
            (math.pi / 2) * index.to(query.dtype) / (length if self.max_length is None else self.max_length)
        )
        cos, sin = angle.cos()[:, None, :, None], angle.sin()[:, None, :, None]
        query, key = query.relu(), mask_rows(key.relu(), atom_mask)
        return PlainFeatures(torch.cat([query * cos, query * sin], -1), torch.cat([key * cos, key * sin], -1))

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"


def project(
    operands: Operands, weight: Float[Tensor, "H M E"]
) -> tuple[Float[Tensor, "B H N M"], Float[Tensor, "B H N M"]]:
    """W q^ and W k^."""
    projection = operands.project(weight.to(operands.query.dtype))
    zero = operands.query.new_zeros(1, 1, 1, 1)
    return projection.query(zero), projection.key(zero)
