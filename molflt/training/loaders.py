"""Data loaders of training and validation: prepared samples, augmented ones, and the batches they go into.

Everything random is a function of the seed, the epoch and the system alone, so that a run repeats, and can be
resumed at any batch, whatever the number of worker processes and of replicas.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from molflt.build import build_augmentation, build_dataset
from molflt.config import Config, DataConfig
from molflt.data.batching import SystemBatchSampler, describe_oversized
from molflt.data.datasets import OC20IS2RE
from molflt.errors import InputError, InputWarning
from molflt.training.data import cached
from molflt.training.transport import Collate


class AugmentedSamples(Dataset[Data]):
    """Samples changed at random, anew in each epoch; an item's key is (index, epoch).

    Args:
        samples: prepared samples, which stay as they are.
        steps: transforms in order, all of which draw from `generator`.
        generator: seeded before each sample by (seed, epoch, index).
        seed: of the run.
    """

    def __init__(
        self,
        samples: Sequence[Data],
        steps: Sequence[Callable[[Data], Data]],
        generator: torch.Generator,
        seed: int,
    ) -> None:
        self.samples = samples
        self.steps = steps
        self.generator = generator
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> Data:
        index, epoch = key
        state = np.random.SeedSequence((self.seed, epoch, index)).generate_state(1, np.uint64)
        # torch takes seeds up to 2**63.
        self.generator.manual_seed(int(state[0] >> np.uint64(1)))
        sample = self.samples[index]
        for step in self.steps:
            sample = step(sample)
        return sample


def prepared_samples(config: Config, split: str, progress: bool = False) -> Sequence[Data]:
    """The samples of a split with their graphs, the same each time, in memory where they fit."""
    # A PyG data set is a sequence in all but the type.
    samples = cast("Sequence[Data]", build_dataset(config.data, split))
    text = f"Preparing {split}" if progress else None
    return cached(samples, config.training.cache_gib * 2**30, text)


def build_loader(
    samples: Sequence[Data],
    config: Config,
    training: bool,
    num_replicas: int = 1,
    rank: int = 0,
) -> DataLoader:
    """The batches of one process, for training or validation; its `batch_sampler` is a `SystemBatchSampler`.

    Args:
        samples: prepared samples of the split, as `prepared_samples` makes them.
        config: batch size or budget, augmentation, workers, seed.
        training: shuffle, augment, and keep the replicas in step.
        num_replicas: processes that share the split.
        rank: number of this one.

    Raises `InputError` where there are no relaxed positions to interpolate to. Warns (`InputWarning`, on rank
    0) where systems are larger than the budget.
    """
    data = config.data
    # The records of a data set have the same fields, so the first one tells.
    if training and data.interpolate_fraction and samples[0].get("pos_relaxed") is None:
        raise InputError(
            f"split {data.train_split!r} has no pos_relaxed to interpolate to; "
            "set data.interpolate_fraction to 0"
        )
    sizes = system_sizes(samples, data)
    budget = data.max_atoms or data.max_edges
    if budget and rank == 0:
        _report_oversized(samples, sizes, data, "training" if training else "validation")
    generator = torch.Generator()
    steps = build_augmentation(data, generator) if training else []
    sampler = SystemBatchSampler(
        sizes,
        data.batch_size,
        budget,
        shuffle=training,
        seed=config.seed,
        num_replicas=num_replicas,
        rank=rank,
        with_epoch=bool(steps),
    )
    if steps:
        samples = cast("Sequence[Data]", AugmentedSamples(samples, steps, generator, config.seed))
    loader = DataLoader(
        samples,
        batch_sampler=sampler,
        num_workers=data.num_workers,
        persistent_workers=data.num_workers > 0,
        # Copies from pinned memory to a GPU are faster.
        pin_memory=config.training.accelerator != "cpu" and torch.cuda.is_available(),
        # For the workers' own seeds, which would else advance torch's global random state.
        generator=torch.Generator().manual_seed(config.seed),
    )
    loader.collate_fn = Collate(loader.collate_fn)
    return loader


def system_sizes(samples: Sequence[Data], config: DataConfig) -> np.ndarray:
    """What the budget of a batch counts, for each system: its atoms, or the edges of its graph.

    Of a data set that is not in memory both come from its side indices. Zeros where batches have no budget.
    """
    if config.max_edges is not None:
        if isinstance(samples, OC20IS2RE):
            return samples.edge_counts(f"radius {config.radius} max_neighbors {config.max_neighbors}").numpy()
        return np.array([samples[index]["edge_index"].shape[1] for index in range(len(samples))])
    if config.max_atoms is None:
        return np.zeros(len(samples), dtype=np.int64)
    if isinstance(samples, OC20IS2RE):
        return samples.sizes.num_atoms.numpy()
    return np.array([len(samples[index]["atomic_numbers"]) for index in range(len(samples))])


def _report_oversized(samples: Sequence[Data], sizes: np.ndarray, config: DataConfig, use: str) -> None:
    largest = samples[int(sizes.argmax())].get("sid") if len(sizes) else None
    name = "without an id" if largest is None else f"sid {int(largest)}"
    if config.max_atoms is not None:
        text = describe_oversized(sizes, config.max_atoms, name, use, "data.max_atoms", "atoms")
    else:
        text = describe_oversized(sizes, config.max_edges or 0, name, use, "data.max_edges", "edges")
    if text:
        warnings.warn(text, InputWarning, stacklevel=4)
