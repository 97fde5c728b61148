"""From the settings of the attention to the layers of the encoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from molflt.config import AttentionConfig, ModelConfig
from molflt.nn.attention import FLTAttention
from molflt.nn.couplings import AdditiveCoupling, MultiplicativeCoupling, NoCoupling
from molflt.nn.element_pairs import ElementPairFLTAttention, ElementPairRPE
from molflt.nn.far import FarModulation
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.frequencies import (
    FrequencySampler,
    GaussianFrequencies,
    OrthogonalGaussianFrequencies,
    SobolGaussianFrequencies,
)
from molflt.nn.lattice_attention import LatticeFLTAttention, LatticeRPE
from molflt.nn.matched_frequencies import MatchedMixtureFrequencies
from molflt.nn.near import EdgeFeatureNearBias
from molflt.nn.quadrature import SphericalQuadratureFrequencies
from molflt.nn.range_separated import RangeSeparatedAttention, RangeSeparatedRPE
from molflt.nn.rpe import FourierRPE, default_rpe
from molflt.nn.softmax import SoftmaxAttention
from molflt.nn.spectra import GaussianBasisSpectrum

POSITION_DIM = 3


def attention_builder(config: ModelConfig) -> Callable[[], nn.Module]:
    """What makes the attention layer of one encoder layer; they share one RPE or have one each."""
    attention = config.attention
    build_rpe, build_layer = _attention_parts(attention)
    shared = build_rpe(config) if attention.share_rpe else None

    def layer() -> nn.Module:
        return build_layer(config, build_rpe(config) if shared is None else shared)

    return layer


def _attention_parts(
    config: AttentionConfig,
) -> tuple[Callable[[ModelConfig], Any], Callable[[ModelConfig, Any], nn.Module]]:
    """What makes the RPE of one or all layers, and what makes a layer around it."""
    on_lattice = {"additive": (_lattice_rpe, _lattice_flt), "multiplicative": (_far_rpe, _range_separated)}
    fourier = (_element_pair_rpe, _element_pair_flt) if config.element_rank else (_fourier_rpe, _flt)
    flt = on_lattice[config.coupling] if config.sampler == "lattice" else fourier
    return {
        "flt": flt,
        "performer": (_no_rpe, _performer),
        "softmax": (_exact_rpe if config.use_rpe else _no_rpe, _softmax),
        "range_separated": (_range_separated_rpe, _range_separated),
    }[config.kind]


def _no_rpe(config: ModelConfig) -> None:
    return None


def _exact_rpe(config: ModelConfig) -> FourierRPE:
    attention = config.attention
    rpe = default_rpe(
        config.num_heads,
        POSITION_DIM,
        num_frequencies=attention.num_frequencies,
        num_basis=attention.num_basis,
        width_range=attention.basis_width_range,
    )
    # The exact bias reads the spectrum's closed form, so the frequencies' std has nothing to learn from.
    rpe.sampler.requires_grad_(False)
    return rpe


def _fourier_rpe(config: ModelConfig) -> FourierRPE:
    spectrum = _spectrum(config)
    return FourierRPE(_SAMPLERS[config.attention.sampler](config, spectrum), spectrum)


def _element_pair_rpe(config: ModelConfig) -> ElementPairRPE:
    spectrum, attention = _spectrum(config), config.attention
    return ElementPairRPE(_SAMPLERS[attention.sampler](config, spectrum), spectrum, attention.element_rank)


def _spectrum(config: ModelConfig) -> GaussianBasisSpectrum:
    attention = config.attention
    return GaussianBasisSpectrum(
        config.num_heads, POSITION_DIM, attention.num_basis, attention.basis_width_range
    )


def _random_sampler(
    sampler: type[GaussianFrequencies],
) -> Callable[[ModelConfig, GaussianBasisSpectrum], FrequencySampler]:
    """Makes a sampler whose std starts as the smallest that keeps g/p bounded."""

    def build(config: ModelConfig, spectrum: GaussianBasisSpectrum) -> FrequencySampler:
        std = 1 / (2 * math.pi * config.attention.basis_width_range[0])
        return sampler(config.num_heads, config.attention.num_frequencies, POSITION_DIM, std)

    return build


def _matched_sampler(config: ModelConfig, spectrum: GaussianBasisSpectrum) -> FrequencySampler:
    return MatchedMixtureFrequencies(spectrum.components, config.attention.num_frequencies)


def _spherical_sampler(config: ModelConfig, spectrum: GaussianBasisSpectrum) -> FrequencySampler:
    attention = config.attention
    return SphericalQuadratureFrequencies.for_widths(
        config.num_heads, POSITION_DIM, attention.basis_width_range, attention.quadrature_extent
    )


_SAMPLERS: dict[str, Callable[[ModelConfig, GaussianBasisSpectrum], FrequencySampler]] = {
    "gaussian": _random_sampler(GaussianFrequencies),
    "orthogonal": _random_sampler(OrthogonalGaussianFrequencies),
    "sobol": _random_sampler(SobolGaussianFrequencies),
    "matched_mixture": _matched_sampler,
    "spherical": _spherical_sampler,
}


def _lattice_rpe(config: ModelConfig) -> LatticeRPE:
    attention = config.attention
    largest = 3 * attention.basis_width_range[1]
    return LatticeRPE(_spectrum(config), attention.num_frequencies, attention.far_cutoff, largest)


def _far_rpe(config: ModelConfig) -> RangeSeparatedRPE:
    return RangeSeparatedRPE(None, _far_modulation(config))


def _range_separated_rpe(config: ModelConfig) -> RangeSeparatedRPE:
    attention = config.attention
    near = EdgeFeatureNearBias(config.num_heads, config.num_gaussians) if attention.near else None
    return RangeSeparatedRPE(near, _far_modulation(config) if attention.far else None)


def _far_modulation(config: ModelConfig) -> FarModulation:
    attention = config.attention
    return FarModulation(
        config.num_heads,
        attention.far_cutoff,
        attention.far_basis,
        attention.far_widths,
        attention.far_peak,
        max_frequencies=attention.max_frequencies,
    )


def _flt(config: ModelConfig, rpe: FourierRPE) -> nn.Module:
    coupling = {"additive": AdditiveCoupling, "multiplicative": MultiplicativeCoupling}[
        config.attention.coupling
    ]
    return FLTAttention(
        config.channels, config.num_heads, rpe=rpe, feature_map=_features(config), coupling=coupling()
    )


def _lattice_flt(config: ModelConfig, rpe: LatticeRPE) -> nn.Module:
    return LatticeFLTAttention(config.channels, config.num_heads, rpe=rpe, feature_map=_features(config))


def _element_pair_flt(config: ModelConfig, rpe: ElementPairRPE) -> nn.Module:
    return ElementPairFLTAttention(config.channels, config.num_heads, rpe=rpe, feature_map=_features(config))


def _performer(config: ModelConfig, rpe: None) -> nn.Module:
    return FLTAttention(
        config.channels, config.num_heads, feature_map=_features(config), coupling=NoCoupling()
    )


def _softmax(config: ModelConfig, rpe: FourierRPE | None) -> nn.Module:
    return SoftmaxAttention(config.channels, config.num_heads, rpe=rpe, use_rpe=rpe is not None)


def _range_separated(config: ModelConfig, rpe: RangeSeparatedRPE) -> nn.Module:
    return RangeSeparatedAttention(
        config.channels,
        config.num_heads,
        rpe=rpe,
        feature_map=_features(config),
        separate_normalizers=config.attention.separate_normalizers,
    )


def _features(config: ModelConfig) -> PositiveRandomFeatures:
    return PositiveRandomFeatures(config.attention.num_random_features)
