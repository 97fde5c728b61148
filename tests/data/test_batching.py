"""Batches of systems: exact cover, budgets, replicas in step, reproducible orders."""

import itertools
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from molflt.data.batching import SystemBatchSampler, describe_oversized, lengths_by_count

SIZES = np.random.default_rng(5).integers(20, 226, size=499)


def replicas(number, **settings):
    settings = {"sizes": SIZES} | settings
    return [SystemBatchSampler(num_replicas=number, rank=rank, **settings) for rank in range(number)]


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"budget": 1013}])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_system_comes_exactly_once_over_all_replicas(settings, number, shuffle):
    """Batches of share 0, which repeat others, left out; and each replica has as many as it says."""
    for epoch in (0, 1, 5):
        seen = []
        for sampler in replicas(number, shuffle=shuffle, **settings):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            seen += [index for step, batch in enumerate(batches) for index in batch if sampler.share(step)]
        assert sorted(seen) == list(range(499))


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"budget": 1013}])
@pytest.mark.parametrize("number", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 3, 8, 29, 61])
def test_replicas_train_the_same_number_of_batches_in_every_epoch(settings, number, count):
    """However uneven the division, and never an empty one."""
    counts = set()
    for sampler in replicas(number, **settings | {"sizes": SIZES[:count]}):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert all(batches)
            counts.add(len(batches))
    assert len(counts) == 1


def test_validation_repeats_nothing_and_replicas_differ_by_one_batch_at_most():
    """15 systems in batches of 4 over 3 replicas: 12 and then one each; 13 leave the last two without."""
    for count, expected in ((15, [2, 2, 2]), (13, [2, 1, 1]), (3, [1, 1, 1])):
        samplers = replicas(3, sizes=np.ones(count), batch_size=4, shuffle=False)
        assert [len(sampler) for sampler in samplers] == expected
        assert sorted(itertools.chain(*itertools.chain(*samplers))) == list(range(count))


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"budget": 613}])
def test_no_replica_is_without_a_validation_batch(settings):
    """One system for 3 replicas: two of them repeat it, and it counts once."""
    samplers = replicas(3, sizes=[7], shuffle=False, **settings)
    assert [list(sampler) for sampler in samplers] == [[[0]]] * 3
    assert [sampler.share(0) for sampler in samplers] == [3.0, 0.0, 0.0]


def test_replicas_share_what_one_process_takes_with_the_same_global_batch():
    """Step by step and in order, the last and uneven step included."""
    (alone,) = replicas(1, batch_size=12, seed=3)
    together = replicas(3, batch_size=4, seed=3)
    for sampler in (alone, *together):
        sampler.set_epoch(2)
    for step, (expected, *parts) in enumerate(zip(alone, *together, strict=True)):
        real = [part for sampler, part in zip(together, parts, strict=True) if sampler.share(step)]
        assert list(itertools.chain(*real)) == expected
    assert [len(part) for part in parts] == [3, 2, 2]


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"budget": 613}])
@pytest.mark.parametrize("count", [2, 41, 62])
def test_shares_weigh_the_means_of_replicas_to_the_mean_over_the_step(settings, count):
    """The mean over replicas of share x batch mean is the mean over the step's systems."""
    values = np.random.default_rng(7).normal(size=count)
    samplers = replicas(3, sizes=SIZES[:count], **settings)
    for step, batches in enumerate(zip(*samplers, strict=True)):
        shares = [sampler.share(step) for sampler in samplers]
        real = list(itertools.chain(*(b for b, share in zip(batches, shares, strict=True) if share)))
        mean = np.mean([share * values[batch].mean() for share, batch in zip(shares, batches, strict=True)])
        assert mean == pytest.approx(values[real].mean(), abs=1e-12)


def test_no_padded_batch_exceeds_the_budget_and_most_are_nearly_full():
    """Systems x largest system is at most 2,003, in 300 epochs; over 88 % of it is real atoms on average."""
    sampler = SystemBatchSampler(SIZES, budget=2003)
    filled = []
    for epoch in range(300):
        sampler.set_epoch(epoch)
        for batch in sampler:
            assert len(batch) * SIZES[batch].max() <= 2003
            filled.append(SIZES[batch].sum() / 2003)
    assert np.mean(filled) > 0.88


def test_batches_by_budget_hold_systems_of_like_size():
    """A padded batch is over 90 % atoms; of batches by count, drawn from all sizes, less than two thirds."""

    def filled(sampler):
        return np.mean([SIZES[batch].mean() / SIZES[batch].max() for batch in sampler])

    assert filled(SystemBatchSampler(SIZES, budget=2003)) > 0.9
    assert filled(SystemBatchSampler(SIZES, 17)) < 0.66


def test_a_system_above_the_budget_goes_alone_and_is_reported():
    """All of those above, wherever they stand; the line names how many and the largest."""
    sizes = [31, 1013, 29, 997, 211, 30]
    batches = list(SystemBatchSampler(sizes, budget=300, seed=11))
    assert [1] in batches
    assert [3] in batches
    assert sorted(itertools.chain(*batches)) == list(range(6))
    assert describe_oversized(sizes, 300, "sid 71", "training", "data.max_atoms", "atoms") == (
        "2 of 6 training systems have more than data.max_atoms = 300 atoms and make a batch each; "
        "the largest, sid 71, has 1013"
    )
    assert describe_oversized([300, 7], 300, "sid 71", "training", "data.max_atoms", "atoms") is None


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"budget": 1013}])
def test_order_is_a_function_of_seed_and_epoch_alone(settings):
    """Going back to an epoch repeats it; another epoch or seed is another order."""

    def epoch_of(sampler, epoch):
        sampler.set_epoch(epoch)
        return list(sampler)

    sampler = SystemBatchSampler(SIZES, seed=3, **settings)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    assert first != second
    assert epoch_of(sampler, 0) == first
    assert epoch_of(SystemBatchSampler(SIZES, seed=3, **settings), 1) == second
    assert epoch_of(SystemBatchSampler(SIZES, seed=4, **settings), 1) != second
    together = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    assert len(together) < 0.1 * len(first)


def test_an_epoch_can_be_resumed_at_any_batch_and_the_next_one_is_whole():
    """The length stays that of the epoch."""
    sampler = SystemBatchSampler(SIZES, budget=1013)
    whole = list(sampler)
    sampler.start_batch = 5
    assert list(sampler) == whole[5:]
    assert len(sampler) == len(whole)
    sampler.set_epoch(0)
    assert list(sampler) == whole[5:]
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(whole)


def test_validation_keeps_the_order_by_count():
    """Batches are consecutive systems."""
    assert list(SystemBatchSampler(np.ones(7), 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_keys_can_carry_the_epoch():
    """For data sets whose augmentation depends on it."""
    sampler = SystemBatchSampler(np.ones(3), 2, shuffle=False, with_epoch=True)
    sampler.set_epoch(13)
    assert list(sampler) == [[(0, 13), (1, 13)], [(2, 13)]]


def test_it_serves_a_data_loader_and_survives_pickling():
    """The loader's batches are the sampler's."""
    sampler = SystemBatchSampler(SIZES, budget=1013, seed=2)
    expected = list(sampler)
    loader = DataLoader(range(499), batch_sampler=pickle.loads(pickle.dumps(sampler)), collate_fn=list)
    assert list(loader) == expected
    assert len(loader) == len(expected)


def test_the_last_step_is_shared_out_evenly():
    """23 systems, 3 replicas of 4: one full step, then 4, 4, 3."""
    assert lengths_by_count(23, 4, 3).tolist() == [4, 4, 4, 4, 4, 3]
    assert lengths_by_count(0, 4, 3).tolist() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"rank": 2, "num_replicas": 2}, r"rank must lie in \[0, num_replicas = 2\), got 2"),
    ],
)
def test_bad_numbers_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SystemBatchSampler(SIZES, **settings)


def test_the_safe_batch_size_fits_the_largest_system_as_often_as_it_goes():
    """One where it does not fit at all."""
    sizes = [5, 3, 4, 9, 3]
    assert SystemBatchSampler(sizes, 7).safe_batch_size == 7
    assert [SystemBatchSampler(sizes, 7, budget=b).safe_batch_size for b in (8, 17, 18, 29)] == [1, 1, 2, 3]
