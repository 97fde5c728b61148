"""The whole configuration of a training run, as documented and validated dataclasses.

One YAML file under `configs/` holds one `Config`, complete and without inheritance. The command line is
made from the same classes, so `--optim.lr 1e-3` and the YAML key `optim: {lr: 1e-3}` are one thing.
This module imports no torch: reading and checking a configuration is instant.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import yaml

from molflt.errors import InputError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

AttentionKind = Literal["flt", "performer", "softmax"]


@dataclass
class DataConfig:
    """Where the structures come from and how they become batches."""

    root: str = "datasets/fcc111"
    """Folder that holds one OC20-format LMDB (a file or a folder of shards) per split."""
    train_split: str = "train"
    """Split to train on: the name of a folder or of a `.lmdb` file under `root`."""
    val_splits: list[str] = field(default_factory=lambda: ["val_id"])
    """Splits to validate on; the first one selects the best checkpoint."""
    radius: float = 6.0
    """Cutoff of the periodic neighbour graph in Å."""
    max_neighbors: int | None = None
    """Nearest neighbours kept per atom (a shell of equal distance is never cut); null keeps all."""
    batch_size: int = 32
    """Systems per batch."""
    num_workers: int = 0
    """Data-loader worker processes."""
    energy_meaning: str = "adsorption energy of the relaxed structure"
    """What the target `y_relaxed` is, in words; kept in checkpoints and shown with predictions."""


@dataclass
class AttentionConfig:
    """What the encoder's attention layers compute."""

    kind: AttentionKind = "flt"
    """`flt`: linear attention with a learned Fourier RPE; `performer`: the same without RPE;
    `softmax`: quadratic attention with the exact RPE bias, the twin of `flt`."""
    num_random_features: int = 64
    """M, random features that linearise the exponential."""
    num_frequencies: int = 16
    """R, frequencies sampled per head for the RPE."""
    num_basis: int = 32
    """T, Gaussian basis functions of the RPE's spectrum per head."""
    basis_width_range: tuple[float, float] = (0.5, 5.0)
    """Smallest and largest initial width s_t of the basis functions, Å."""
    share_rpe: bool = True
    """One RPE for all layers (as published) instead of one per layer."""


@dataclass
class ModelConfig:
    """The Graphormer-3D backbone and its heads."""

    channels: int = 128
    """C, width of the encoder."""
    num_heads: int = 8
    """H, attention heads; divides `channels`."""
    num_layers: int = 4
    """Pre-LN transformer layers with weights of their own."""
    num_blocks: int = 1
    """How often the stack of layers is repeated with shared weights."""
    ffn_channels: int = 128
    """Hidden width of the feed-forward part."""
    num_gaussians: int = 64
    """K, Gaussians of the element-pair geometry embedding."""
    displacement_channels: int = 32
    """Width of the queries and keys of the Δpos head, over all heads; divisible by `num_heads`."""
    dropout: float = 0.0
    """Dropout after attention and feed-forward."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention layers."""


@dataclass
class OptimConfig:
    """Loss and optimiser."""

    lr: float = 3e-4
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's moment decay rates."""
    weight_decay: float = 1e-3
    """AdamW's weight decay."""
    warmup_fraction: float = 0.05
    """Share of all steps over which the learning rate rises linearly from zero."""
    grad_clip: float = 5.0
    """Largest gradient norm."""
    delta_pos_weight: tuple[float, float] = (15.0, 1.0)
    """Weight of the Δpos loss at the first and the last step, changing linearly; (0, 0) trains no
    Δpos head."""
    ema_decay: float = 0.999
    """Decay per step of the exponential moving average of the weights, which is what is validated and
    saved; it rises to this value as (1 + step) / (10 + step). 0 uses the weights themselves."""


@dataclass
class TrainingConfig:
    """How long to train and where the results go."""

    epochs: int = 100
    """Passes over the training split."""
    output: str = "runs/fcc111-flt"
    """Run folder: config.yaml, metrics.csv, checkpoints/, tensorboard/."""
    redraw_every: int = 0
    """Steps between redraws of frequencies and random features; 0 keeps the first draw."""
    validate_every: int = 1
    """Epochs between validations (each also saves checkpoints); the last epoch is always validated."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute; `auto` takes a CUDA GPU if there is one."""
    cache_gib: float = 1.0
    """Prepared samples of a split are kept in memory up to this size in GiB; 0 prepares them anew each
    epoch, as random augmentation always does."""


@dataclass
class Config:
    """One training run."""

    seed: int = 0
    """Fixes the initial weights, the frequencies and the order of batches."""
    data: DataConfig = field(default_factory=DataConfig)
    """The structures."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Loss and optimiser."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Duration and output."""


def config_keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every setting as (dotted key, type, what it means), in the order of the dataclasses."""
    import docstring_parser

    hints: dict[str, Any] = get_type_hints(section)
    documented = docstring_parser.parse_from_object(section).params
    docs = {param.arg_name: " ".join((param.description or "").split()) for param in documented}
    for item in fields(section):
        if is_dataclass(hints[item.name]):
            yield from config_keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hints[item.name], docs[item.name]


def add_config_arguments(parser: ArgumentParser) -> None:
    """Give `parser` one option per setting (`--optim.lr`, ...), typed and documented by the dataclasses."""
    defaults = dict(_leaves(config_to_dict(Config())))
    for key, hint, doc in config_keys():
        parser.add_argument(f"--{key}", type=hint, default=defaults[key], help=doc.replace("%", "%%"))


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read and check a YAML file; keys it leaves out take their defaults.

    `overrides` are command-line words that win over the file: `["--optim.lr", "1e-3"]` or
    `["--optim.lr=1e-3"]`. Raises `InputError` for a file that is missing or is no YAML mapping, for an
    unknown key (naming the nearest valid one), a wrong type and a value outside its range.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise InputError(f"cannot read the configuration {path}: {reason}; give a YAML file") from error
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {_one_line(error)}") from error
    return config_from_dict({} if values is None else values, source=str(path), overrides=overrides)


def config_from_dict(values: Any, source: str = "configuration", overrides: Sequence[str] = ()) -> Config:
    """The checked `Config` of a nested mapping as `config_to_dict` makes it; `source` names it in errors.

    `overrides` and the errors are those of `load_config`.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_config_arguments(parser)
    origin = source
    try:
        _check_keys(values)
        parsed = parser.parse_object(values)
        if overrides:
            origin = f"{source} with {' '.join(overrides)}"
            _check_overrides(overrides)
            parser.set_defaults({key: parsed[key] for key, _, _ in config_keys()})
            parsed = parser.parse_args(list(overrides))
        config = _section(Config, parsed)
        validate(config)
    except (ArgumentError, InputError) as error:
        raise InputError(f"{origin}: {_one_line(error)}") from error
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """The nested mapping of a configuration, of plain dicts, lists, strings and numbers only."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return plain(asdict(config))


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the complete configuration as YAML; the file appears whole or not at all."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    text = yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def validate(config: Config) -> None:
    """Raise `InputError` naming key, constraint and value for the first setting outside its range."""
    data, model, optim, training = config.data, config.model, config.optim, config.training
    attention, cap, splits = model.attention, data.max_neighbors, data.val_splits
    low, high = attention.basis_width_range
    for key, holds, constraint in (
        ("seed", config.seed >= 0, "at least 0"),
        ("data.root", data.root.strip(), "a path"),
        ("data.train_split", data.train_split.strip(), "a split's name"),
        ("data.val_splits", splits and all(map(str.strip, splits)), "a list of split names"),
        ("data.val_splits", len({*splits}) == len(splits), "free of repetitions"),
        ("data.radius", 0 < data.radius < math.inf, "above 0 Å and finite"),
        ("data.max_neighbors", cap is None or cap >= 1, "null or at least 1"),
        ("data.batch_size", data.batch_size >= 1, "at least 1"),
        ("data.num_workers", data.num_workers >= 0, "at least 0"),
        ("model.channels", model.channels >= 1, "at least 1"),
        ("model.num_heads", model.num_heads >= 1, "at least 1"),
        ("model.num_heads", model.channels % max(model.num_heads, 1) == 0, "a divisor of model.channels"),
        ("model.num_layers", model.num_layers >= 1, "at least 1"),
        ("model.num_blocks", model.num_blocks >= 1, "at least 1"),
        ("model.ffn_channels", model.ffn_channels >= 1, "at least 1"),
        ("model.num_gaussians", model.num_gaussians >= 1, "at least 1"),
        (
            "model.displacement_channels",
            model.displacement_channels >= 1 and model.displacement_channels % max(model.num_heads, 1) == 0,
            f"a multiple of model.num_heads = {model.num_heads}",
        ),
        ("model.dropout", 0 <= model.dropout < 1, "in [0, 1)"),
        ("model.attention.num_random_features", attention.num_random_features >= 1, "at least 1"),
        ("model.attention.num_frequencies", attention.num_frequencies >= 1, "at least 1"),
        ("model.attention.num_basis", attention.num_basis >= 1, "at least 1"),
        ("model.attention.basis_width_range", 0 < low < high < math.inf, "two rising lengths above 0 Å"),
        ("optim.lr", 0 < optim.lr < math.inf, "above 0 and finite"),
        ("optim.betas", all(0 <= beta < 1 for beta in optim.betas), "two numbers in [0, 1)"),
        ("optim.weight_decay", 0 <= optim.weight_decay < math.inf, "at least 0 and finite"),
        ("optim.warmup_fraction", 0 <= optim.warmup_fraction < 1, "in [0, 1)"),
        ("optim.grad_clip", optim.grad_clip > 0, "above 0 (.inf: no clipping)"),
        (
            "optim.delta_pos_weight",
            all(0 <= w < math.inf for w in optim.delta_pos_weight),
            "two numbers >= 0",
        ),
        ("optim.ema_decay", 0 <= optim.ema_decay < 1, "in [0, 1)"),
        ("training.epochs", training.epochs >= 1, "at least 1"),
        ("training.output", training.output.strip(), "a folder"),
        ("training.redraw_every", training.redraw_every >= 0, "at least 0"),
        ("training.validate_every", training.validate_every >= 1, "at least 1"),
        ("training.cache_gib", 0 <= training.cache_gib < math.inf, "at least 0 and finite"),
    ):
        if not holds:
            value: Any = config_to_dict(config)
            for part in key.split("."):
                value = value[part]
            known = f", model.channels is {model.channels}" if "model.channels" in constraint else ""
            raise InputError(f"{key} must be {constraint}, got {value!r}{known}")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _section(cls: type, values: Any) -> Any:
    hints = get_type_hints(cls)
    return cls(
        **{
            item.name: _section(hints[item.name], values[item.name])
            if is_dataclass(hints[item.name])
            else values[item.name]
            for item in fields(cls)
        }
    )


def _check_keys(values: Any, cls: type = Config, prefix: str = "") -> None:
    """Refuse what jsonargparse lets pass or reports without a remedy: shapes, unknown keys, empty values."""
    if not isinstance(values, Mapping):
        where = prefix.rstrip(".") or "the configuration"
        raise InputError(f"{where} must be a mapping of settings, got {values!r}")
    hints = get_type_hints(cls)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise InputError(_unknown(key))
        if is_dataclass(hints[name]):
            _check_keys(value, hints[name], f"{key}.")
        elif value is None and type(None) not in getattr(hints[name], "__args__", ()):
            raise InputError(f"{key} has no value; give one or remove the line")


def _check_overrides(overrides: Sequence[str]) -> None:
    known = {key for key, _, _ in config_keys()}
    for word in overrides:
        key = word.partition("=")[0].removeprefix("--").removesuffix("+")
        if word.startswith("--") and key not in known:
            raise InputError(_unknown(key, option="--"))


def _unknown(key: str, option: str = "") -> str:
    def likeness(candidate: str) -> float:
        last, candidate_last = key.rpartition(".")[2], candidate.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        return max(whole, difflib.SequenceMatcher(None, last, candidate_last).ratio())

    known = [known for known, _, _ in config_keys()]
    sections = {known.rpartition(".")[0] for known in known} - {""}
    nearest = max([*known, *(sections if not option else ())], key=likeness)
    return f"unknown key {option}{key}; the nearest valid one is {option}{nearest}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"the key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)
