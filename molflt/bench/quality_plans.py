"""What `molflt bench quality` compares: variants of the attention on data sets, all else equal.

A plan has a configuration file per data set, which fixes data, size, steps and optimiser; a variant changes
settings of `model.attention` and nothing else. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from molflt.config import Config, load_config
from molflt.config.sections import AttentionConfig
from molflt.errors import InputError


@dataclass(frozen=True)
class Variant:
    """One kind of attention: what it is called, and what `model.attention` has for it."""

    label: str
    settings: Mapping[str, object]

    def apply(self, attention: AttentionConfig) -> AttentionConfig:
        """The settings with those of this variant; what they do not choose between stays."""
        return replace(attention, **(_CHOICES | dict(self.settings)))


@dataclass(frozen=True)
class Plan:
    """One comparison."""

    text: str
    """What it is for, without capital and full stop."""
    configs: Mapping[str, str]
    """Data set to its configuration file."""
    variants: tuple[str, ...]
    """Keys of `VARIANTS`."""
    overrides: tuple[str, ...] = ()
    """Command-line words that shorten the configurations, which are made for a longer run."""

    def config(self, dataset: str, variant: str, seed: int) -> Config:
        """The configuration of one run, but for where it goes.

        Raises:
            InputError: the file is not there or not valid.
        """
        path = self.configs[dataset]
        if not Path(path).is_file():
            raise InputError(f"there is no {path}; run this in a clone of the repository")
        config = load_config(path, self.overrides)
        config.seed = seed
        config.model.attention = VARIANTS[variant].apply(config.model.attention)
        return config


_CHOICES: dict[str, object] = {
    "kind": "flt",
    "coupling": "additive",
    "sampler": "gaussian",
    "use_rpe": True,
    "near": True,
    "far": True,
    "separate_normalizers": False,
    "num_random_features": 64,
}
_FEW_FEATURES = {"num_random_features": 16}
"""Multiplicative couplings cost in proportion to features times frequencies."""

VARIANTS: dict[str, Variant] = {
    "softmax": Variant("softmax with RPE", {"kind": "softmax"}),
    "softmax_norpe": Variant("softmax without RPE", {"kind": "softmax", "use_rpe": False}),
    "performer": Variant("Performer", {"kind": "performer"}),
    "flt": Variant("FLT, additive", {}),
    "flt_matched": Variant("FLT, matched mixture", {"sampler": "matched_mixture"}),
    "flt_multiplicative": Variant("FLT, multiplicative", {"coupling": "multiplicative"} | _FEW_FEATURES),
    "flt_lattice": Variant(
        "FLT, periodic", {"coupling": "multiplicative", "sampler": "lattice"} | _FEW_FEATURES
    ),
    "range_separated": Variant(
        "FLT, range-separated, one normaliser", {"kind": "range_separated"} | _FEW_FEATURES
    ),
    "range_separated_two_normalizers": Variant(
        "FLT, range-separated, side by side",
        {"kind": "range_separated", "separate_normalizers": True} | _FEW_FEATURES,
    ),
    "near_only": Variant("near only", {"kind": "range_separated", "far": False} | _FEW_FEATURES),
}
"""Key to variant, in the order of the table."""

_NINE = tuple(key for key in VARIANTS if key != "near_only")
_ALIKE = ("--data.random_rotation=none",)
"""Rotations would be work for nothing where the attention is invariant."""
_SHORT = (
    *_ALIKE,
    "--model.channels=64",
    "--model.num_layers=3",
    "--model.ffn_channels=64",
    "--model.num_gaussians=32",
    "--training.epochs=40",
    "--training.validate_every=10",
    "--data.val_splits=[val_id,val_ood_cat]",
)

PLANS: dict[str, Plan] = {
    "fcc111": Plan(
        "adsorption energies on metals", {"fcc111": "configs/fcc111/flt.yaml"}, _NINE, overrides=_SHORT
    ),
    "qm7": Plan(
        "atomisation energies of molecules",
        {"qm7": "configs/qm7/flt.yaml"},
        _NINE,
        overrides=(*_ALIKE, "--training.epochs=30"),
    ),
    "charged-fragments": Plan(
        "fragments out of each other's sight",
        {
            "open": "configs/charged_fragments/open.yaml",
            "sheets": "configs/charged_fragments/sheets.yaml",
        },
        ("near_only", "range_separated", "flt", "softmax"),
    ),
}
"""Name to plan."""
