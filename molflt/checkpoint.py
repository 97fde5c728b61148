"""Checkpoints: one file that predicts by itself and runs nothing when it is read.

A molflt checkpoint is a Lightning checkpoint (a `torch.save` archive) that holds, beside Lightning's own
entries,

    state_dict   the weights and buffers of the network under `model.<name>` (the averaged weights
                 where training averages them)
    molflt       {format, version, config, metadata}: plain dicts, lists, strings and numbers

Only tensors and plain values are stored, files are always read with `weights_only=True`, and the archive's
checksums are verified first, so that a cut, altered or foreign file is one clear `InputError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, get_type_hints

import torch
from ase.data import chemical_symbols
from torch import Tensor

from molflt.archive import read_archive, write_atomically
from molflt.build import build_model
from molflt.checkpoint_guards import (
    check_plain,
    has_type,
    largest_integer,
    limited_building,
    stored_numbers,
)
from molflt.config import Config, config_from_dict, config_to_dict
from molflt.domain import domain_from_dict
from molflt.errors import InputError
from molflt.models.embeddings import NUM_ELEMENTS
from molflt.models.graphormer3d import Graphormer3D
from molflt.pretrained import resolve_checkpoint

FORMAT = "molflt-checkpoint"
VERSION = 1
MODEL_PREFIX = "model."
MAX_REASON = 1000
"""Characters of what is wrong with a configuration, which may quote all of it."""
_LATER_METADATA = frozenset({"domain"})
"""Entries that the first files of this format do not have."""


@dataclass
class CheckpointMetadata:
    """What a checkpoint says about itself and about the data its weights come from."""

    molflt_version: str = field(default_factory=lambda: installed_version("molflt"))
    """Version of molflt that wrote the file."""
    energy_meaning: str = ""
    """What the predicted energy is, in words."""
    splits: dict[str, int] = field(default_factory=dict)
    """Systems per split that training read."""
    elements: list[int] = field(default_factory=list)
    """Atomic numbers in the training split, ascending."""
    num_atoms_range: list[int] = field(default_factory=list)
    """Atoms of the smallest and of the largest training system."""
    energy_mean: float = 0.0
    """Mean of the training targets, less their element references where it has any, eV."""
    energy_std: float = 1.0
    """Standard deviation of the same, eV."""
    delta_pos_std: float = 1.0
    """Root mean square of a component of Δpos over free atoms, Å."""
    epoch: int = 0
    """Epochs trained when the file was written."""
    step: int = 0
    """Optimiser steps taken when the file was written."""
    val_metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics when the file was written, `<split>/energy_mae` in eV and `<split>/ewt`."""
    domain: dict[str, Any] = field(default_factory=dict)
    """`molflt.domain.TrainingDomain` of the training split under these weights; empty where not measured."""


@dataclass
class Checkpoint:
    """A checkpoint in memory: the network in evaluation mode, and what made it."""

    config: Config
    model: Graphormer3D
    metadata: CheckpointMetadata


def model_from_config(config: Config) -> Graphormer3D:
    """The network a configuration describes, newly initialised from torch's global random state."""
    model = build_model(
        config.model, radius=config.data.radius, predict_delta_pos=any(config.optim.delta_pos_weight)
    )
    if config.data.element_references:
        model.element_references = torch.zeros(NUM_ELEMENTS, dtype=torch.float64)
    return model


def common_energy_meaning(checkpoints: Sequence[Checkpoint]) -> str:
    """What the energies of all of them are; `InputError` where they are not the same."""
    meanings = sorted({checkpoint.metadata.energy_meaning for checkpoint in checkpoints})
    if len(meanings) != 1:
        raise InputError(
            f"the checkpoints predict different energies ({' / '.join(meanings)}); "
            "use those trained on one target together"
        )
    return meanings[0]


def checkpoint_section(config: Config, metadata: CheckpointMetadata) -> dict[str, Any]:
    """The `molflt` entry of a checkpoint file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": config_to_dict(config),
        "metadata": asdict(metadata),
    }


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint for prediction: weights and description, no optimiser state."""
    state = {MODEL_PREFIX + name: value for name, value in checkpoint.model.state_dict().items()}
    section = checkpoint_section(checkpoint.config, checkpoint.metadata)
    write_atomically({"state_dict": state, "molflt": section}, path)


def update_metadata(path: str | os.PathLike[str], **changes: Any) -> None:
    """Replace entries of a checkpoint file's metadata, and leave all else in it as it is."""
    content = dict(read_archive(Path(path)))
    section = _section(content, Path(path))
    metadata = asdict(replace(_metadata(section["metadata"], path), **changes))
    write_atomically({**content, "molflt": {**section, "metadata": metadata}}, path)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and rebuild its network, on the CPU and in evaluation mode.

    `path` is a file, or the name of a checkpoint shipped with molflt (`molflt.pretrained`). torch's global
    random state is left as it was. Raises `InputError` for a file that is missing, cut, altered, foreign or
    written by a newer format than this molflt reads.
    """
    path = resolve_checkpoint(path)
    content = read_archive(path)
    section = _section(content, path)
    config = _config(section.get("config"), path)
    metadata = _metadata(section["metadata"], path, config.model.channels)
    state = _stored_state(content.get("state_dict"))
    model = _build(config, state, path)
    _load_weights(model, state, path)
    return Checkpoint(config, model.eval(), metadata)


def _section(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The `molflt` entry, of a format that this version reads, with plain values and a metadata mapping."""
    section = content.get("molflt")
    if not isinstance(section, Mapping) or section.get("format") != FORMAT:
        raise InputError(f"{path} is no molflt checkpoint; give one that `molflt train` wrote")
    try:
        check_plain(section)
    except InputError as error:
        raise InputError(f"{path} is a damaged molflt checkpoint: {error}; copy it again") from error
    version, metadata = section.get("version"), section.get("metadata")
    if not isinstance(version, int) or isinstance(version, bool) or not isinstance(metadata, Mapping):
        raise InputError(f"{path} is a damaged molflt checkpoint; copy it again from its source")
    if version > VERSION:
        writer = str(metadata.get("molflt_version", "of a newer version"))[:40]
        raise InputError(
            f"{path} was written by molflt {writer} in format {version}, this molflt "
            f"{installed_version('molflt')} reads formats up to {VERSION}; upgrade molflt"
        )
    return section


def _config(values: Any, path: Path) -> Config:
    try:
        return config_from_dict(values, source=f"{path} (its configuration)")
    except InputError as error:
        if len(reason := str(error)) <= MAX_REASON:
            raise
        raise InputError(f"{reason[:MAX_REASON]} ...") from error


def _metadata(
    values: Mapping[str, Any], path: str | os.PathLike[str], channels: int | None = None
) -> CheckpointMetadata:
    """The metadata, every entry of its type; with `channels`, a training domain must be of that width."""
    known = {item.name for item in fields(CheckpointMetadata)}
    damaged = (known ^ values.keys()) - _LATER_METADATA
    hints = get_type_hints(CheckpointMetadata)
    damaged |= {name for name in known & values.keys() if not has_type(values[name], hints[name])}
    if not damaged:
        metadata = CheckpointMetadata(**values)
        damaged = set(_impossible_entries(metadata, channels))
        if not damaged:
            return metadata
    raise InputError(
        f"{path} has damaged metadata ({', '.join(sorted(damaged))}); copy it again from its source"
    )


def _impossible_entries(metadata: CheckpointMetadata, channels: int | None) -> Iterator[str]:
    """Names of the entries whose values no training data have."""
    if not all(0 < number < len(chemical_symbols) for number in metadata.elements):
        yield "elements"
    sizes = metadata.num_atoms_range
    if sizes and not (len(sizes) == 2 and 0 < sizes[0] <= sizes[1]):
        yield "num_atoms_range"
    try:
        domain = domain_from_dict(metadata.domain)
    except InputError:
        yield "domain"
    else:
        if domain is not None and channels is not None and len(domain.mean) != channels:
            yield "domain"


def _stored_state(state: Any) -> dict[str, Tensor]:
    """The dense tensors of a checkpoint by their name in the network."""
    if not isinstance(state, Mapping):
        return {}
    return {
        str(name).removeprefix(MODEL_PREFIX): value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    }


def _build(config: Config, state: Mapping[str, Tensor], path: Path) -> Graphormer3D:
    """The network of a configuration, which may be no larger than the weights that are to fill it."""
    numbers = stored_numbers(state.values())
    try:
        if largest_integer(config_to_dict(config)["model"]) > numbers:
            raise InputError("its configuration needs more numbers than it holds")
        with torch.random.fork_rng(devices=[]), limited_building(len(state), numbers):
            return model_from_config(config)
    except Exception as error:  # whatever an impossible network leads to, the file is at fault
        reason = " ".join(str(error).split())
        raise InputError(
            f"the weights in {path} do not fit its configuration ({reason}); "
            "it is damaged or was written by another version of molflt"
        ) from error


def _load_weights(model: Graphormer3D, found: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    expected = model.state_dict()
    for name in sorted(expected.keys() | found.keys()):
        if name not in found or name not in expected or not _alike(found[name], expected[name]):
            raise InputError(
                f"the weights in {path} do not fit its configuration (first at {name}); "
                "it is damaged or was written by another version of molflt"
            )
    model.load_state_dict(found)


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Of one shape, and both real, both complex or both integers."""
    kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (found, expected)]
    return found.shape == expected.shape and kinds[0] == kinds[1]
