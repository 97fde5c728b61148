"""Configurations: documented dataclasses, read from YAML and checked without importing torch."""

from molflt.config.files import (
    add_config_arguments,
    config_from_dict,
    config_keys,
    config_to_dict,
    config_to_yaml,
    flat_settings,
    load_config,
    save_config,
)
from molflt.config.rules import validate
from molflt.config.sections import (
    AttentionConfig,
    AttentionKind,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    Schedule,
    TrainingConfig,
)

__all__ = [
    "AttentionConfig",
    "AttentionKind",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "Precision",
    "Schedule",
    "TrainingConfig",
    "add_config_arguments",
    "config_from_dict",
    "config_keys",
    "config_to_dict",
    "config_to_yaml",
    "flat_settings",
    "load_config",
    "save_config",
    "validate",
]
