"""Which values of each setting make sense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from molflt.config.sections import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainingConfig,
)
from molflt.errors import InputError

Rule = tuple[str, Any, str]
"""A dotted key, whether its value is in range (by truth), and the range in words."""


def validate(config: Config) -> None:
    """Raise `InputError` naming key, constraint and value for the first setting outside its range."""
    for key, holds, constraint in _rules(config):
        if not holds:
            value: Any = reduce(getattr, key.split("."), config)
            shown = list(value) if isinstance(value, tuple) else value
            raise InputError(f"{key} must be {constraint}, got {shown!r}")


def _rules(config: Config) -> Iterator[Rule]:
    yield "seed", 0 <= config.seed < 2**32, "at least 0 and below 2**32"
    yield from _data_rules(config.data)
    yield from _model_rules(config.model)
    yield from _optim_rules(config.optim)
    yield from _training_rules(config.training)


def _data_rules(data: DataConfig) -> Iterator[Rule]:
    cap, splits = data.max_neighbors, data.val_splits
    yield "data.root", data.root.strip(), "a path"
    yield "data.train_split", data.train_split.strip(), "a split's name"
    yield "data.val_splits", splits and all(map(str.strip, splits)), "a list of split names"
    train = data.train_split
    yield "data.val_splits", train not in splits, f"without data.train_split = {train!r}"
    yield "data.val_splits", len({*splits}) == len(splits), "free of repetitions"
    yield "data.radius", 0 < data.radius < math.inf, "above 0 Å and finite"
    yield "data.max_neighbors", cap is None or cap >= 1, "null or at least 1"
    yield "data.batch_size", data.batch_size >= 1, "at least 1"
    yield "data.num_workers", data.num_workers >= 0, "at least 0"
    atoms, edges = data.max_atoms, data.max_edges
    yield "data.max_atoms", atoms is None or atoms >= 1, "null or at least 1"
    yield "data.max_edges", edges is None or edges >= 1, "null or at least 1"
    yield "data.max_edges", atoms is None or edges is None, "null where data.max_atoms is set"
    yield "data.interpolate_fraction", 0 <= data.interpolate_fraction <= 1, "in [0, 1]"
    yield "data.noise_std", 0 <= data.noise_std < math.inf, "at least 0 Å and finite"
    mean, std = data.energy_mean, data.energy_std
    yield "data.energy_mean", mean is None or math.isfinite(mean), "null or finite"
    yield "data.energy_std", std is None or 0 < std < math.inf, "null, or above 0 eV and finite"


def _model_rules(model: ModelConfig) -> Iterator[Rule]:
    for name in ("channels", "num_heads", "num_layers", "num_blocks", "ffn_channels", "num_gaussians"):
        yield f"model.{name}", getattr(model, name) >= 1, "at least 1"
    yield "model.num_blocks", model.num_blocks <= 1000, "at most 1000"
    heads, width = model.num_heads, model.displacement_channels
    yield "model.num_heads", model.channels % heads == 0, f"a divisor of model.channels = {model.channels}"
    yield (
        "model.displacement_channels",
        width >= 1 and width % heads == 0,
        f"a multiple of model.num_heads = {heads}",
    )
    for name in ("dropout", "input_dropout", "activation_dropout", "attention_dropout", "drop_path"):
        yield f"model.{name}", 0 <= getattr(model, name) < 1, "in [0, 1)"
    image_radius, all_pairs = model.image_radius, model.geometry == "all_pairs"
    yield "model.image_radius", image_radius is None or 0 < image_radius < math.inf, "null or above 0 Å"
    attention = model.attention
    periodic = attention.kind == "range_separated" or (
        attention.kind == "flt" and attention.sampler == "lattice"
    )
    yield (
        "model.image_radius",
        image_radius is None or not periodic,
        "null with attention that is periodic by itself (range_separated, sampler lattice)",
    )
    biased_by_pairs = attention.kind == "softmax" and not attention.use_rpe
    yield (
        "model.geometry",
        biased_by_pairs or not all_pairs,
        "radius_graph unless model.attention.kind is softmax and model.attention.use_rpe false",
    )
    yield "model.attention_dropout", all_pairs or model.attention_dropout == 0, "0 with geometry radius_graph"
    yield from _attention_rules(attention)


def _attention_rules(attention: AttentionConfig) -> Iterator[Rule]:
    prefix = "model.attention"
    for name in ("num_random_features", "num_frequencies", "num_basis", "far_basis"):
        yield f"{prefix}.{name}", getattr(attention, name) >= 1, "at least 1"
    low, high = attention.basis_width_range
    yield f"{prefix}.basis_width_range", 0 < low < high < math.inf, "two rising lengths above 0 Å"
    kind, cap = attention.kind, attention.max_frequencies
    yield f"{prefix}.use_rpe", attention.use_rpe or kind == "softmax", f"true with kind {kind}"
    yield f"{prefix}.quadrature_extent", 0 < attention.quadrature_extent < math.inf, "above 0 Å and finite"
    yield f"{prefix}.far_cutoff", 0 < attention.far_cutoff < math.inf, "above 0 cycles/Å and finite"
    yield f"{prefix}.far_peak", 0 < attention.far_peak < math.inf, "above 0 and finite"
    smallest, largest = attention.far_widths or (1.0, 2.0)
    yield f"{prefix}.far_widths", 0 < smallest < largest < math.inf, "null or two rising lengths above 0 Å"
    yield f"{prefix}.max_frequencies", cap is None or cap >= 1, "null or at least 1"
    yield (
        f"{prefix}.num_frequencies",
        attention.num_frequencies > 1 or attention.sampler != "lattice",
        "at least 2 with sampler lattice",
    )
    additive = kind == "flt" and attention.coupling == "additive" and attention.sampler != "lattice"
    yield f"{prefix}.element_rank", attention.element_rank >= 0, "at least 0"
    yield (
        f"{prefix}.element_rank",
        additive or attention.element_rank == 0,
        "0 but with kind flt, coupling additive and a sampler other than lattice",
    )
    yield f"{prefix}.far", attention.near or attention.far, "true where model.attention.near is false"
    separated = kind == "range_separated"
    yield f"{prefix}.near", attention.near or separated, f"true with kind {kind}"
    yield f"{prefix}.far", attention.far or separated, f"true with kind {kind}"
    together = not attention.separate_normalizers
    yield f"{prefix}.separate_normalizers", together or separated, f"false with kind {kind}"


def _optim_rules(optim: OptimConfig) -> Iterator[Rule]:
    yield "optim.lr", 0 < optim.lr < math.inf, "above 0 and finite"
    yield "optim.betas", all(0 <= beta < 1 for beta in optim.betas), "two numbers in [0, 1)"
    yield "optim.weight_decay", 0 <= optim.weight_decay < math.inf, "at least 0 and finite"
    yield "optim.warmup_fraction", 0 <= optim.warmup_fraction < 1, "in [0, 1)"
    yield "optim.grad_clip", optim.grad_clip > 0, "above 0 (.inf: no clipping)"
    weights = optim.delta_pos_weight
    yield "optim.delta_pos_weight", all(0 <= w < math.inf for w in weights), "two numbers >= 0"
    yield "optim.ema_decay", 0 <= optim.ema_decay < 1, "in [0, 1)"
    yield "optim.power", 0 < optim.power < math.inf, "above 0 and finite"


def _training_rules(training: TrainingConfig) -> Iterator[Rule]:
    yield "training.epochs", training.epochs >= 1, "at least 1"
    yield "training.output", training.output.strip(), "a folder"
    yield "training.redraw_every", training.redraw_every >= 0, "at least 0"
    yield "training.validate_every", training.validate_every >= 1, "at least 1"
    yield "training.cache_gib", 0 <= training.cache_gib < math.inf, "at least 0 and finite"
    yield "training.checkpoint_every", training.checkpoint_every >= 0, "at least 0"
    for name in ("devices", "num_nodes"):
        value = getattr(training, name)
        yield f"training.{name}", value is None or value >= 1, "null or at least 1"
    start = training.init_from
    yield "training.init_from", start is None or start.strip(), "null or a checkpoint"
    yield "training.init_skip", start or not training.init_skip, "empty without training.init_from"
    yield "training.wandb", training.wandb is None or training.wandb.strip(), "null or a project's name"
