"""From configuration to objects: the one place where names in a YAML file turn into classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform, Compose

from molflt.config import AttentionConfig, DataConfig, ModelConfig
from molflt.data.datasets import OC20IS2RE
from molflt.data.transforms import DeltaPos, InterpolateNoise, RadiusGraph, RandomRotation
from molflt.models.embeddings import AtomEmbedding
from molflt.models.encoder import Encoder, EncoderLayer
from molflt.models.graphormer3d import Graphormer3D
from molflt.models.heads import DisplacementHead, EnergyHead
from molflt.nn.attention import FLTAttention, SoftmaxAttention
from molflt.nn.couplings import NoCoupling
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.rpe import FourierRPE, default_rpe

POSITION_DIM = 3


def build_model(config: ModelConfig, radius: float, predict_delta_pos: bool = True) -> Graphormer3D:
    """Graphormer-3D with fresh weights, frequencies and random features from torch's global generator.

    Args:
        config: sizes and kind of attention.
        radius: cutoff of the radius graph, Å (`DataConfig.radius`).
        predict_delta_pos: with the displacement head.
    """
    channels, num_heads = config.channels, config.num_heads
    displacement_head = DisplacementHead(
        channels, num_heads, config.num_gaussians, config.displacement_channels
    )
    build_layer_attention = _attention_builder(config)
    layers = [
        EncoderLayer(build_layer_attention(), channels, config.ffn_channels, config.dropout)
        for _ in range(config.num_layers)
    ]
    return Graphormer3D(
        AtomEmbedding(channels, config.num_gaussians, radius),
        Encoder(layers, channels, config.num_blocks),
        EnergyHead(channels),
        displacement_head if predict_delta_pos else None,
        radius,
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
    shared = (
        _rpe(config.num_heads, attention) if attention.share_rpe and attention.kind != "performer" else None
    )

    def rpe() -> FourierRPE:
        return shared if shared is not None else _rpe(config.num_heads, attention)

    def flt() -> nn.Module:
        features = PositiveRandomFeatures(attention.num_random_features)
        return FLTAttention(config.channels, config.num_heads, rpe=rpe(), feature_map=features)

    def performer() -> nn.Module:
        features = PositiveRandomFeatures(attention.num_random_features)
        return FLTAttention(config.channels, config.num_heads, feature_map=features, coupling=NoCoupling())

    def softmax() -> nn.Module:
        exact = rpe()
        # The exact bias reads the spectrum's closed form, so the frequencies' std has nothing to learn from.
        exact.sampler.requires_grad_(False)
        return SoftmaxAttention(config.channels, config.num_heads, rpe=exact)

    return {"flt": flt, "performer": performer, "softmax": softmax}[attention.kind]


def _rpe(num_heads: int, config: AttentionConfig) -> FourierRPE:
    return default_rpe(
        num_heads,
        POSITION_DIM,
        num_frequencies=config.num_frequencies,
        num_basis=config.num_basis,
        width_range=config.basis_width_range,
    )
