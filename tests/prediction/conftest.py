"""Predictions to write: of two shipped structures with a small untrained network."""

from pathlib import Path

import pytest
import torch

from molflt.checkpoint import Checkpoint, CheckpointMetadata, model_from_config
from molflt.config import config_from_dict
from molflt.data.structures import read_structures
from molflt.prediction import Predictor

FCC111 = Path(__file__).parents[2] / "datasets" / "fcc111" / "structures"


@pytest.fixture(scope="session")
def small_predictor():
    """Two layers, eight channels; trained on nothing but said to know gold and carbon."""
    torch.manual_seed(5)
    attention = {"num_random_features": 7, "num_frequencies": 3, "num_basis": 5}
    model = {"channels": 8, "num_heads": 2, "num_layers": 2, "ffn_channels": 8, "num_gaussians": 5}
    config = config_from_dict({"model": {**model, "displacement_channels": 4, "attention": attention}})
    metadata = CheckpointMetadata(energy_meaning="eV of a test", elements=[6, 79], num_atoms_range=[17, 20])
    return Predictor(Checkpoint(config, model_from_config(config).eval(), metadata), redraws=2)


@pytest.fixture(scope="session")
def predictions(small_predictor):
    """Of Au-C (like the training data) and of a slab with fixed atoms (unlike them)."""
    paths = [next(FCC111.glob("Au-C*")), next(FCC111.glob("Rh-Br*"))]
    return small_predictor.predict([structure for path in paths for structure in read_structures(path)])
