"""Training of relaxed-energy models on Lightning."""

from molflt.training.averaging import WeightAverage
from molflt.training.data import SplitStatistics, measure_statistics
from molflt.training.module import RelaxedEnergyTraining
from molflt.training.run import TrainingResult, train
from molflt.training.several import SeedSummary, summarize, train_seeds

__all__ = [
    "RelaxedEnergyTraining",
    "SeedSummary",
    "SplitStatistics",
    "TrainingResult",
    "WeightAverage",
    "measure_statistics",
    "summarize",
    "train",
    "train_seeds",
]
