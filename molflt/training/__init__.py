"""Training of relaxed-energy models on Lightning."""

from molflt.training.averaging import WeightAverage
from molflt.training.data import SplitStatistics, measure_statistics
from molflt.training.module import RelaxedEnergyTraining
from molflt.training.run import TrainingResult, train

__all__ = [
    "RelaxedEnergyTraining",
    "SplitStatistics",
    "TrainingResult",
    "WeightAverage",
    "measure_statistics",
    "train",
]
