"""Training of relaxed-energy models on Lightning."""

from molflt.training.averaging import WeightAverage
from molflt.training.data import DataFit, SplitStatistics, fit_data
from molflt.training.module import RelaxedEnergyTraining
from molflt.training.run import TrainingResult, train
from molflt.training.several import SeedSummary, summarize, train_seeds

__all__ = [
    "DataFit",
    "RelaxedEnergyTraining",
    "SeedSummary",
    "SplitStatistics",
    "TrainingResult",
    "WeightAverage",
    "fit_data",
    "summarize",
    "train",
    "train_seeds",
]
