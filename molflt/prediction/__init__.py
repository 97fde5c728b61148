"""Relaxed energies of structures: from files, ASE, pymatgen or PyG `Data`, with a checkpoint alone."""

from molflt.prediction.calculator import RelaxedEnergyCalculator
from molflt.prediction.inputs import as_structure, model_input, structure_from_data
from molflt.prediction.outcome import Prediction
from molflt.prediction.paths import expand_paths, iter_inputs
from molflt.prediction.predictor import Predictor
from molflt.prediction.relaxed import RelaxedFolder
from molflt.prediction.writers import OUTPUT_COLUMNS, check_output, open_writer

__all__ = [
    "OUTPUT_COLUMNS",
    "Prediction",
    "Predictor",
    "RelaxedEnergyCalculator",
    "RelaxedFolder",
    "as_structure",
    "check_output",
    "expand_paths",
    "iter_inputs",
    "model_input",
    "open_writer",
    "structure_from_data",
]
