"""From configuration to objects: the one place where names in a YAML file turn into classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform, Compose

from molflt.build_attention import attention_builder
from molflt.config import DataConfig, ModelConfig
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
    encoder = _encoder(config, attention_builder(config))
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
