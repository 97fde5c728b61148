"""Which systems make a batch: so many of them, or as many as a budget of atoms or edges allows.

Batches are a function of (seed, epoch) alone. The batch lengths are planned once; each epoch puts the systems
in a new order and cuts it at the same places, so that all have the same, known number of batches:

    by count     order = permutation; lengths = batch_size, ...
    by budget    order = permutation, then sorted by size bucket, largest first;
                 length of a batch = floor(budget / largest size in the bucket of its first system)

A bucket holds sizes within 5 % of each other. As no later system of the order is larger than the largest of
that bucket, whatever the permutation, (systems x largest system) stays within the budget: for atoms that is
the size of the padded batch. A batch goes over a bucket's end, so that only an epoch's last one is not full.
A system larger than the budget makes a batch of its own.

With several processes a step takes the next `num_replicas` batches, one each. By count these are consecutive
parts of what one process would take with a `num_replicas` times larger batch size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

BUCKET_RATIO = 1.05
"""Largest over smallest size in a bucket."""

Key = int | tuple[int, int]


def lengths_by_count(count: int, batch_size: int, num_replicas: int = 1) -> NDArray[np.int64]:
    """Lengths of the batches of `count` systems, `num_replicas` of them a step.

    What is left for the last step is shared out as evenly as it goes; it has fewer batches than replicas
    where there are fewer systems.
    """
    per_step = batch_size * num_replicas
    steps, rest = divmod(count, per_step)
    share, larger = divmod(rest, num_replicas)
    last = np.full(num_replicas, share)
    last[:larger] += 1
    return np.concatenate([np.full(steps * num_replicas, batch_size), last[last > 0]]).astype(np.int64)


def size_buckets(sizes: ArrayLike) -> NDArray[np.int64]:
    """Bucket of each size [N], larger for larger ones; sizes below 1 count as 1."""
    return np.floor(np.log(np.maximum(sizes, 1)) / np.log(BUCKET_RATIO)).astype(np.int64)


def lengths_by_budget(sizes: ArrayLike, budget: int) -> NDArray[np.int64]:
    """Lengths of the batches of systems in the order of falling buckets, as the module's head says."""
    sizes = np.maximum(np.asarray(sizes, dtype=np.int64), 1)
    buckets = size_buckets(sizes)
    order = np.argsort(-buckets, kind="stable")
    numbers, index = np.unique(buckets, return_inverse=True)
    largest = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(largest, index, sizes)
    fitting = np.maximum(budget // largest, 1)[index[order]]
    lengths, start = [], 0
    while start < len(sizes):
        lengths.append(min(int(fitting[start]), len(sizes) - start))
        start += lengths[-1]
    return np.asarray(lengths, dtype=np.int64)


def describe_oversized(
    sizes: ArrayLike, budget: int, largest: str, use: str, setting: str, unit: str
) -> str | None:
    """One line on the systems above a budget, which go alone; None where there are none.

    Args:
        sizes: of the systems, N.
        budget: of a batch.
        largest: name of the largest system.
        use: what the systems are for, as an adjective.
        setting: what sets the budget.
        unit: of the sizes, in the plural.
    """
    sizes = np.asarray(sizes)
    above = int((sizes > budget).sum())
    if not above:
        return None
    return (
        f"{above} of {len(sizes)} {use} systems have more than {setting} = {budget} {unit} and make a batch "
        f"each; the largest, {largest}, has {sizes.max()}"
    )


class SystemBatchSampler(Sampler[list[Key]]):
    """Batches of one process in one epoch, for `DataLoader(batch_sampler=...)`.

    Training (`shuffle`) takes the systems in an order drawn from (seed, epoch) and gives each replica
    the same number of batches. Where the last step has fewer batches than replicas, the others repeat a batch
    that the epoch has had, with `share` 0. Validation (not `shuffle`) gives each system exactly once over
    all replicas; those that the last step has nothing for get one batch less. Where there are fewer batches
    than replicas, the others repeat one, with `share` 0: no replica is without a batch.

    Args:
        sizes: atoms or edges of each system, N; only their number matters without `budget`.
        batch_size: systems per batch; ignored with `budget`.
        budget: most that systems x largest size may be in a batch; None cuts by `batch_size`.
        shuffle: for training.
        seed: fixes the order together with the epoch.
        num_replicas: processes that share the epoch.
        rank: number of this one.
        with_epoch: give keys (index, epoch) instead of indices, for data sets that augment.

    Attributes:
        epoch: set by `set_epoch`.
        start_batch: batches of the epoch that iteration leaves out, to resume in the middle of it; back to 0
            when another epoch is set. The length counts them.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> sampler = SystemBatchSampler([5, 3, 4, 9, 3], budget=9, shuffle=False)
        >>> list(sampler)
        [[3], [0], [2, 1], [4]]
    """

    def __init__(
        self,
        sizes: ArrayLike,
        batch_size: int = 32,
        budget: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        with_epoch: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("budget", budget), ("num_replicas", num_replicas)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must lie in [0, num_replicas = {num_replicas}), got {rank}")
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.batch_size = batch_size
        self.budget = budget
        self.shuffle = shuffle
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.with_epoch = with_epoch
        self.epoch = 0
        self.start_batch = 0
        self._planned: tuple[int, tuple[NDArray[np.int64], NDArray[np.int64]]] | None = None
        if budget is None:
            self._lengths = lengths_by_count(len(self.sizes), batch_size, num_replicas)
        else:
            self._lengths = lengths_by_budget(self.sizes, budget)

    @property
    def sampler(self) -> SystemBatchSampler:
        """Itself: trainers look under this name for what to tell the epoch."""
        return self

    @property
    def safe_batch_size(self) -> int:
        """Systems that a batch has room for whichever they are, at least 1."""
        if self.budget is None:
            return self.batch_size
        return max(1, self.budget // max(1, int(self.sizes.max(initial=1))))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, counted from 0, that the next iteration gives."""
        if epoch != self.epoch:
            self.epoch, self.start_batch = epoch, 0

    def __len__(self) -> int:
        """Batches of this replica in an epoch, the same in each."""
        whole, rest = divmod(len(self._lengths), self.num_replicas)
        own = whole + int(rest > (0 if self.shuffle else self.rank))
        return max(own, int(len(self._lengths) > 0))

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, (order, batches) = self.epoch, self.plan()
        for step in range(self.start_batch, len(self)):
            # Where no batch is left for this replica, it repeats one to keep step with the others.
            number = (step * self.num_replicas + self.rank) % len(batches)
            indices = order[slice(*batches[number])].tolist()
            yield [(index, epoch) for index in indices] if self.with_epoch else indices

    def share(self, step: int) -> float:
        """Weight of this replica's batch number `step`, counted from 0, in the mean over its step's systems.

        The mean over replicas of `share` times a batch's mean equals the mean over all systems of the step;
        1 for a lone replica and wherever batches are equal, 0 for a batch that repeats another.
        """
        _, batches = self.plan()
        own = step * self.num_replicas + self.rank
        if own >= len(batches):
            return 0.0
        lengths = np.diff(batches[step * self.num_replicas : (step + 1) * self.num_replicas], axis=1)
        return float(self.num_replicas * lengths[self.rank, 0] / lengths.sum())

    def plan(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's order [N] of systems, and start and end [K, 2] in it of the batches of all replicas."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._plan()
        return self._planned[1]

    def _plan(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ends = np.cumsum(self._lengths)
        batches = np.stack([ends - self._lengths, ends], axis=1)
        order = np.arange(len(self.sizes))
        generator = np.random.default_rng((self.seed, self.epoch))
        if self.shuffle:
            generator.shuffle(order)
        if self.budget is not None:
            order = order[np.argsort(-size_buckets(self.sizes[order]), kind="stable")]
            if self.shuffle:
                generator.shuffle(batches, axis=0)
        return order, batches
