"""Batches of training and validation, and augmentation that depends on seed, epoch and system alone."""

import itertools

import pytest
import torch
from torch_geometric.data import Batch

from molflt.data.datasets import OC20IS2RE
from molflt.data.displacements import minimum_image
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.transforms import RadiusGraph
from molflt.errors import InputError, InputWarning
from molflt.training.loaders import build_loader, prepared_samples, system_sizes

AUGMENTED = {"data.interpolate_fraction": 0.5, "data.noise_std": 0.1, "data.random_rotation": "any"}


@pytest.fixture
def loaded(tiny_config, tmp_path):
    """Makes the loader of a toy split."""

    def make(training=True, split="train", num_replicas=1, rank=0, **settings):
        config = tiny_config(tmp_path, **settings)
        return build_loader(prepared_samples(config, split), config, training, num_replicas, rank)

    return make


def sids(loader):
    return [batch.sid.tolist() for batch in loader]


def flat(batches):
    return list(itertools.chain(*batches))


def assert_same_batches(loader, expected):
    for batch, wanted in zip(loader, expected, strict=True):
        assert batch.sid.tolist() == wanted.sid.tolist()
        for name in ("pos", "cell", "delta_pos", "edge_index", "cell_offsets"):
            assert torch.equal(batch[name], wanted[name]), name


def test_validation_reads_the_split_in_order(loaded):
    assert sids(loaded(training=False, split="val_a")) == [[1100, 1101, 1102, 1103], [1104, 1105, 1106]]


def test_training_shuffles_anew_in_each_epoch_and_repeats_with_the_seed(loaded):
    """11 systems in batches of 4; the order is another for another seed."""
    loader = loaded()
    first = sids(loader)
    assert [len(batch) for batch in first] == [4, 4, 3]
    assert sorted(flat(first)) == list(range(1000, 1011))
    loader.batch_sampler.set_epoch(1)
    assert sids(loader) != first
    assert sids(loaded()) == first
    assert sids(loaded(seed=4)) != first


def test_replicas_read_every_system_once(loaded):
    """3 processes, validation and training."""
    for training in (False, True):
        parts = [sids(loaded(training, num_replicas=3, rank=rank)) for rank in range(3)]
        assert sorted(flat(flat(parts))) == list(range(1000, 1011))


def test_budgets_count_the_atoms_and_edges_of_prepared_samples(tiny_config, tmp_path):
    """From the side indices or from samples in memory alike; edges are those of the graph in use."""
    for cache in (0, 1):
        config = tiny_config(tmp_path, **{"training.cache_gib": cache, "data.max_atoms": 40})
        samples = prepared_samples(config, "train")
        assert isinstance(samples, OC20IS2RE) == (cache == 0)
        assert system_sizes(samples, config.data).tolist() == [5, 7, 11, 13, 17, 5, 7, 11, 13, 17, 5]
        edges = tiny_config(
            tmp_path, **{"training.cache_gib": cache, "data.max_edges": 800, "data.radius": 5.0}
        )
        counted = system_sizes(prepared_samples(edges, "val_b"), edges.data)
        graph = RadiusGraph(5.0)
        expected = [graph(sample).edge_index.shape[1] for sample in OC20IS2RE(edges.data.root, "val_b")]
        assert counted.tolist() == expected
        assert len(set(expected)) == 5


@pytest.mark.parametrize("training", [True, False])
def test_batches_stay_within_the_budget_of_atoms(loaded, training):
    """Padding counted, and batch_size ignored: 8 systems of 5 atoms may go together."""
    loader = loaded(training, **{"data.max_atoms": 40, "data.batch_size": 2})
    for batch in loader:
        assert batch.num_graphs * batch.batch.bincount().max() <= 40
    assert max(batch.num_graphs for batch in loader) > 2
    assert sorted(flat(sids(loader))) == list(range(1000, 1011))


def test_batches_stay_within_the_budget_of_edges(loaded):
    loader = loaded(**{"data.max_edges": 1500})
    assert all(batch.edge_index.shape[1] <= 1500 for batch in loader)
    assert len(loader) < 11


def test_systems_above_the_budget_are_reported_once_over_all_ranks(loaded):
    """The line names the setting, how many there are and the largest, which is trained all the same."""
    with pytest.warns(InputWarning) as caught:
        loader = loaded(**{"data.max_atoms": 12})
    assert [str(warning.message) for warning in caught] == [
        "4 of 11 training systems have more than data.max_atoms = 12 atoms and make a batch each; "
        "the largest, sid 1004, has 17"
    ]
    assert [1004] in sids(loader)
    assert len(loaded(num_replicas=2, rank=1, **{"data.max_atoms": 12})) == 5


def test_augmentation_is_the_same_with_workers_and_after_a_resumption(loaded):
    """A system's draw depends on seed, epoch and system, not on who reads it or what was read before."""
    loader = loaded(**AUGMENTED)
    loader.batch_sampler.set_epoch(1)
    expected = list(loader)
    assert_same_batches(loader, expected)
    helped = loaded(**AUGMENTED, **{"data.num_workers": 2})
    for epoch in (0, 1):
        helped.batch_sampler.set_epoch(epoch)
        batches = list(helped)
    assert_same_batches(batches, expected)
    loader.batch_sampler.start_batch = 2
    assert_same_batches(loader, expected[2:])


def test_augmentation_changes_with_epoch_system_and_seed_and_leaves_the_samples_alone(tiny_config, tmp_path):
    """Prepared samples are shared between epochs, so a change in one would add up."""
    config = tiny_config(tmp_path, **AUGMENTED)
    samples = prepared_samples(config, "train")
    before = [sample.pos.clone() for sample in samples]
    dataset = build_loader(samples, config, training=True).dataset
    drawn = [dataset[3, 0].pos, dataset[3, 1].pos, dataset[3, 2].pos]
    other = build_loader(samples, tiny_config(tmp_path, seed=4, **AUGMENTED), training=True).dataset
    for number, pos in enumerate(drawn):
        assert all(not torch.equal(pos, later) for later in drawn[number + 1 :])
        assert not torch.equal(pos, other[3, number].pos)
        assert not torch.equal(pos, before[3])
    assert all(torch.equal(sample.pos, pos) for sample, pos in zip(samples, before, strict=True))


def test_interpolated_samples_have_their_own_graph_and_what_is_left_of_the_move(tiny_config, tmp_path):
    """Edges of the new positions, Δpos from them to the relaxed ones, and the energy as it was."""
    settings = {"data.interpolate_fraction": 1.0, "data.noise_std": 0.3}
    config = tiny_config(tmp_path, **settings)
    samples = prepared_samples(config, "train")
    dataset = build_loader(samples, config, training=True).dataset
    graph = RadiusGraph(config.data.radius)
    for index, plain in enumerate(samples):
        sample = dataset[index, 0]
        assert torch.equal(sample.edge_index, graph(sample).edge_index)
        rest = minimum_image(sample.pos_relaxed - sample.pos, sample.cell[0], torch.ones(3, dtype=torch.bool))
        torch.testing.assert_close(sample.delta_pos, rest, rtol=0, atol=1e-5)
        assert torch.equal(sample.pos[sample.fixed], plain.pos[plain.fixed])
        assert (sample.pos - plain.pos)[~sample.fixed].abs().max() > 0.1
        assert torch.equal(sample.y_relaxed, plain.y_relaxed)


def test_rotation_about_z_keeps_the_vertical_and_turns_the_rest(tiny_config, tmp_path):
    """Heights stay, distances stay, x does not; validation is never turned."""
    config = tiny_config(tmp_path, **{"data.random_rotation": "z"})
    samples = prepared_samples(config, "train")
    turned = build_loader(samples, config, training=True).dataset[2, 0]
    torch.testing.assert_close(turned.pos[:, 2], samples[2].pos[:, 2])
    torch.testing.assert_close(torch.pdist(turned.pos), torch.pdist(samples[2].pos))
    assert (turned.pos - samples[2].pos).abs().max() > 0.1
    assert build_loader(samples, config, training=False).dataset is samples


def test_samples_without_relaxed_positions_can_not_be_interpolated(tiny_config, toy_root, tmp_path):
    """The error names the split and the setting, before the first batch."""
    records = [sample.to_dict() for sample in OC20IS2RE(toy_root, "val_b")]
    for record in records:
        del record["pos_relaxed"]
    write_lmdb(tmp_path / "train" / "data.lmdb", records)
    config = tiny_config(tmp_path, **{"data.root": tmp_path, "data.interpolate_fraction": 1.0})
    samples = prepared_samples(config, "train")
    with pytest.raises(InputError, match=r"'train' has no pos_relaxed.*set data\.interpolate_fraction to 0"):
        build_loader(samples, config, training=True)
    assert len(build_loader(samples, config, training=False)) == 2


def test_batches_carry_their_fields_and_nothing_to_take_them_apart(tiny_config, tmp_path):
    """The same tensors as PyG's own batch has, without slices, from a worker too."""
    config = tiny_config(tmp_path, **{"data.num_workers": 1})
    samples = prepared_samples(config, "train")
    batch = next(iter(build_loader(samples, config, training=False)))
    wanted = Batch.from_data_list([samples[index] for index in range(4)])
    assert batch.num_graphs == 4
    assert set(batch.keys()) == set(wanted.keys())
    for name in wanted.keys():  # noqa: SIM118 (iterating a batch gives pairs)
        assert torch.equal(batch[name], wanted[name]), name
    assert batch._slice_dict == batch._inc_dict == {}
    assert len({batch[name].untyped_storage().data_ptr() for name in batch.keys()}) == 1, "not in one piece"  # noqa: SIM118
