"""A tiny data set, configuration and finished run, shared by the tests of what works on whole runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molflt.config import Config, config_from_dict
from molflt.testing import write_toy_lmdb
from molflt.training import TrainingResult, train


@pytest.fixture(scope="session")
def toy_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of labelled toy systems: 11 in `train`, 7 in `val_a`, 5 in `val_b`."""
    root = tmp_path_factory.mktemp("toys")
    for split, size, first_seed in (("train", 11, 0), ("val_a", 7, 100), ("val_b", 5, 200)):
        (root / split).mkdir()
        write_toy_lmdb(root / split / "data.0000.lmdb", size, first_seed=first_seed)
    return root


@pytest.fixture(scope="session")
def tiny_config(toy_root: Path) -> Callable[..., Config]:
    """Makes a configuration that trains in a second; dotted settings override it."""

    def make(output: Path, **settings: Any) -> Config:
        values: dict[str, Any] = {
            "seed": 3,
            "data": {"root": str(toy_root), "val_splits": ["val_a", "val_b"], "radius": 4.0, "batch_size": 4},
            "model": {
                "channels": 8,
                "num_heads": 2,
                "num_layers": 2,
                "ffn_channels": 8,
                "num_gaussians": 5,
                "attention": {"num_random_features": 7, "num_frequencies": 3, "num_basis": 5},
            },
            "optim": {"lr": 1e-3},
            "training": {"epochs": 5, "validate_every": 2, "accelerator": "cpu", "output": str(output)},
        }
        return config_from_dict(values, overrides=[f"--{key}={value}" for key, value in settings.items()])

    return make


@pytest.fixture(scope="session")
def finished_run(
    tiny_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> TrainingResult:
    """A run of `tiny_config` as it is."""
    return train(tiny_config(tmp_path_factory.mktemp("runs") / "tiny"), progress=False)
