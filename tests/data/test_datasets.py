"""OC20IS2RE behaves as a PyG data set on any set of records, with workers of any kind."""

import pickle

import pytest
import torch
from torch_geometric.data import Dataset
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import BaseTransform

from molflt.data.datasets import OC20IS2RE, find_split, list_splits
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.records import normalize_record
from molflt.errors import InputError
from molflt.testing import (
    assert_batch_holds,
    assert_edge_convention,
    assert_same_sample,
    toy_record,
    toy_records,
    write_toy_lmdb,
)


class AddOne(BaseTransform):
    def forward(self, data):
        data.y_relaxed = data.y_relaxed + 1
        return data


@pytest.fixture
def path(tmp_path):
    return write_toy_lmdb(tmp_path / "data.lmdb", 7, layout="pyg1")


def test_samples_are_the_settled_records(path):
    dataset = OC20IS2RE(path)
    assert isinstance(dataset, Dataset)
    assert len(dataset) == 7
    for sample, record in zip(dataset, toy_records(7), strict=True):
        assert_same_sample(sample, normalize_record(record))
        assert_edge_convention(sample)


def test_it_slices_selects_and_transforms_as_pyg_data_sets_do(path):
    dataset = OC20IS2RE(path, transform=AddOne())
    plain = OC20IS2RE(path)
    assert torch.equal(dataset[3].y_relaxed, plain[3].y_relaxed + 1)
    assert torch.equal(dataset.get(3).y_relaxed, plain[3].y_relaxed)
    assert [int(sample.sid) for sample in dataset[2:5]] == [1002, 1003, 1004]
    assert dataset[torch.tensor([6, 1])].sids.tolist() == [1006, 1001]
    assert int(dataset[-1].sid) == 1006
    assert dataset.shuffle()[:0].sids.tolist() == []
    with pytest.raises(IndexError):
        dataset[7]


def test_ids_and_sizes_come_without_reading_samples(path):
    sizes = OC20IS2RE(path)[1:4].sizes
    records = toy_records(7)[1:4]
    assert sizes.sid.tolist() == [1001, 1002, 1003]
    assert sizes.num_atoms.tolist() == [7, 11, 13]
    assert sizes.num_edges.tolist() == [record["edge_index"].shape[1] for record in records]
    assert OC20IS2RE(path).sids.tolist() == list(range(1000, 1007))


@pytest.mark.parametrize("fields", [{"labels": False}, {"tags": False}, {"edges": False}])
def test_sets_without_labels_tags_or_edges_read_and_batch(tmp_path, fields):
    dataset = OC20IS2RE(write_toy_lmdb(tmp_path / "x.lmdb", 5, **fields))
    samples = list(dataset)
    absent = {"labels": {"y_relaxed", "y_init", "pos_relaxed"}, "tags": {"tags"}, "edges": {"edge_index"}}
    assert not absent[next(iter(fields))] & set(samples[0].keys())
    (batch,) = DataLoader(dataset, batch_size=5)
    assert_batch_holds(batch, samples)
    assert batch.num_graphs == 5


@pytest.mark.parametrize("read_before", [0, 3])
def test_a_record_that_lacks_a_field_of_the_others_is_named_instead_of_batched(tmp_path, read_before):
    records = [*toy_records(3), toy_record(41, labels=False)]
    write_lmdb(tmp_path / "x.lmdb", records)
    dataset = OC20IS2RE(tmp_path / "x.lmdb")
    assert [int(dataset[index].sid) for index in range(read_before)] == [1000, 1001, 1002][:read_before]
    with pytest.raises(InputError, match=r"record 3 of .*sid 1041.* pos_relaxed, y_init, y_relaxed"):
        dataset[3]
    with pytest.raises(InputError, match="record 3 of"):
        list(DataLoader(dataset, batch_size=4))
    write_lmdb(tmp_path / "y.lmdb", [toy_record(1), toy_record(2) | {"note": "x"}])
    with pytest.raises(InputError, match=r"sid 1002.* in having note;"):
        list(DataLoader(OC20IS2RE(tmp_path / "y.lmdb"), batch_size=2))


def test_records_without_ids_take_their_place_in_the_set(tmp_path):
    records = [{name: value for name, value in r.items() if name != "sid"} for r in toy_records(5)]
    for shard in range(2):
        write_lmdb(tmp_path / f"{shard}.lmdb", records)
    dataset = OC20IS2RE(tmp_path)
    assert [int(sample.sid) for sample in dataset] == list(range(10))
    assert dataset.sids.tolist() == list(range(10))


# Splits


def test_splits_are_folders_or_files_and_a_wrong_name_lists_them(tmp_path):
    write_toy_lmdb(tmp_path / "val_id" / "data.0000.lmdb", 2)
    write_toy_lmdb(tmp_path / "test_id.lmdb", 3)
    write_toy_lmdb(tmp_path / "train" / "data.lmdb", 5)
    write_toy_lmdb(tmp_path / "a_few.lmdb", 1)
    (tmp_path / "source").mkdir()
    assert list_splits(tmp_path) == ["train", "val_id", "test_id", "a_few"]
    assert [len(OC20IS2RE(tmp_path, split)) for split in list_splits(tmp_path)] == [5, 2, 3, 1]
    with pytest.raises(InputError, match=r"no split 'val'; it has train, val_id, test_id, a_few"):
        find_split(tmp_path, "val")
    with pytest.raises(InputError, match="does not exist"):
        OC20IS2RE(tmp_path / "nowhere", "train")
    with pytest.raises(InputError, match="has no split 'train'; it holds no splits"):
        find_split(tmp_path / "source", "train")


# Workers


def epoch(dataset, workers: int, context: str | None = None) -> list[int]:
    loader = DataLoader(dataset, batch_size=3, num_workers=workers, multiprocessing_context=context)
    return [sid for batch in loader for sid in batch.sid.tolist()]


@pytest.mark.filterwarnings("ignore:This process .* multi-threaded:DeprecationWarning")
def test_forked_workers_read_after_a_first_read_in_the_parent_for_20_epochs(path):
    dataset = OC20IS2RE(path, transform=AddOne())
    expected = [int(sample.sid) for sample in dataset]
    for _ in range(20):
        assert epoch(dataset, 1, "fork") == expected
    assert int(dataset[4].sid) == 1004


def test_spawned_workers_read_after_a_first_read_in_the_parent(path):
    dataset = OC20IS2RE(path)
    assert int(dataset[0].sid) == 1000
    assert epoch(dataset, 1, "spawn") == list(range(1000, 1007))


def test_the_data_set_pickles_with_its_slice_and_transform(path):
    dataset = OC20IS2RE(path, transform=AddOne())[2:5]
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again) == 3
    for sample, expected in zip(again, dataset, strict=True):
        assert_same_sample(sample, expected)


def test_train_and_val_may_share_a_file(path):
    train, val = OC20IS2RE(path), OC20IS2RE(path)
    for sample, other in zip(train, val, strict=True):
        assert_same_sample(sample, other)
