"""From configuration to objects: the one place where names in a YAML file turn into classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform, Compose

from molflt.config import AttentionConfig, DataConfig, ModelConfig
from molflt.data.datasets import OC20IS2RE
from molflt.data.transforms import DeltaPos, InterpolateNoise, RadiusGraph, RandomRotation
from molflt.models.all_pairs import (
    AllPairsDisplacementHead,
    AllPairsEmbedding,
    AllPairsGraphormer3D,
    PairBiasAttention,
)
from molflt.models.embeddings import AtomEmbedding
from molflt.models.encoder import Encoder, EncoderLayer
from molflt.models.graphormer3d import Graphormer3D
from molflt.models.heads import DisplacementHead, EnergyHead
from molflt.nn.attention import FLTAttention, SoftmaxAttention
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
from molflt.nn.spectra import GaussianBasisSpectrum

POSITION_DIM = 3


def build_model(config: ModelConfig, radius: float, predict_delta_pos: bool = True) -> Graphormer3D:
    """Graphormer-3D with fresh weights, frequencies and random features from torch's global generator.

    Args:
        config: sizes and kind of attention.
        radius: cutoff of the radius graph, Å (`DataConfig.radius`).
        predict_delta_pos: with the displacement head.
    """
    build = {"radius_graph": _linear_graphormer, "all_pairs": _all_pairs_graphormer}[config.geometry]
    return build(config, radius, predict_delta_pos)


def _linear_graphormer(config: ModelConfig, radius: float, predict_delta_pos: bool) -> Graphormer3D:
    displacement_head = DisplacementHead(
        config.channels, config.num_heads, config.num_gaussians, config.displacement_channels
    )
    encoder = _encoder(config, _attention_builder(config))
    return Graphormer3D(
        AtomEmbedding(config.channels, config.num_gaussians, radius),
        encoder,
        EnergyHead(config.channels),
        displacement_head if predict_delta_pos else None,
        radius,
        config.image_radius,
    )


def _all_pairs_graphormer(config: ModelConfig, radius: float, predict_delta_pos: bool) -> Graphormer3D:
    channels, num_heads, dropout = config.channels, config.num_heads, config.attention_dropout
    head = AllPairsDisplacementHead(channels, num_heads, config.displacement_channels, dropout)
    return AllPairsGraphormer3D(
        AllPairsEmbedding(channels, num_heads, config.num_gaussians),
        _encoder(config, lambda: PairBiasAttention(channels, num_heads, dropout)),
        EnergyHead(channels),
        head if predict_delta_pos else None,
        config.image_radius,
    )


def _encoder(config: ModelConfig, build_attention: Callable[[], nn.Module]) -> Encoder:
    layers = [
        EncoderLayer(
            build_attention(),
            config.channels,
            config.ffn_channels,
            config.dropout,
            config.activation_dropout,
            config.drop_path * (index + 1) / config.num_layers,
        )
        for index in range(config.num_layers)
    ]
    return Encoder(
        layers, config.channels, config.num_blocks, config.input_dropout, config.gradient_checkpointing
    )


def build_transform(config: DataConfig, training: bool) -> BaseTransform:
    """What prepares a stored structure for the model: its radius graph, and Δpos where it is labelled.

    Args:
        config: radius and cap of the graph, and the augmentation.
        training: also augment, from torch's global random state.
    """
    augmentation = build_augmentation(config) if training else []
    return Compose([RadiusGraph(config.radius, config.max_neighbors), DeltaPos(), *augmentation])


def build_augmentation(
    config: DataConfig, generator: torch.Generator | None = None
) -> list[Callable[[Data], Data]]:
    """What changes a prepared training structure at random; empty where nothing is configured.

    Args:
        config: shares and scales.
        generator: source of randomness; None uses torch's global one.
    """
    steps: list[Callable[[Data], Data]] = []
    if config.interpolate_fraction:
        # The atoms move, so the graph is made anew.
        steps += [
            InterpolateNoise(config.interpolate_fraction, config.noise_std, generator),
            RadiusGraph(config.radius, config.max_neighbors),
        ]
    if config.random_rotation != "none":
        steps.append(RandomRotation(config.random_rotation == "z", generator))
    return steps


def build_dataset(config: DataConfig, split: str | None, training: bool = False) -> OC20IS2RE:
    """One split of the data, transformed.

    Args:
        config: where the data is and how its graphs are made.
        split: name below `config.root`; None reads the root itself.
        training: as in `build_transform`.
    """
    return OC20IS2RE(config.root, split, build_transform(config, training))


def _attention_builder(config: ModelConfig) -> Callable[[], nn.Module]:
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
