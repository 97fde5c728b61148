"""Sizes of records are counted once, kept beside the data and tied to its content."""

import numpy as np
import pytest
import torch

from molflt import terminal
from molflt.data import sizes as module
from molflt.data.datasets import OC20IS2RE
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.sizes import content_fingerprint, graph_edges, record_sizes, sizes_path
from molflt.data.transforms import RadiusGraph
from molflt.errors import InputError
from molflt.testing import toy_records, write_toy_lmdb


@pytest.fixture(autouse=True)
def keep_from_3(monkeypatch):
    monkeypatch.setattr(module, "KEEP_FROM", 3)


@pytest.fixture
def counting(monkeypatch):
    counted = []
    count = module._count
    monkeypatch.setattr(
        module, "_count", lambda file, *args: counted.append(file.path.name) or count(file, *args)
    )
    return counted


def expected(records) -> tuple[list[int], list[int], list[int]]:
    columns = [(r["sid"], r["natoms"], r["edge_index"].shape[1] if "edge_index" in r else 0) for r in records]
    return tuple(list(column) for column in zip(*columns, strict=True))


def check(path, records) -> None:
    sizes = record_sizes(RecordReader(path))
    assert tuple(column.tolist() for column in sizes) == expected(records)
    assert {column.dtype for column in sizes} == {torch.int64}


@pytest.mark.parametrize("fields", [{}, {"edges": False}, {"labels": False, "tags": False}])
@pytest.mark.parametrize("layout", ["pyg1", "pyg2"])
def test_sizes_are_those_of_the_records(tmp_path, layout, fields):
    check(write_toy_lmdb(tmp_path / "x.lmdb", 7, layout, **fields), toy_records(7, **fields))


def test_a_large_file_is_counted_once_and_a_small_one_leaves_nothing_behind(tmp_path, counting):
    write_toy_lmdb(tmp_path / "a.lmdb", 5)
    write_toy_lmdb(tmp_path / "b.lmdb", 2, first_seed=50)
    records = [*toy_records(5), *toy_records(2, 50)]
    for _ in range(2):
        check(tmp_path, records)
    assert counting == ["a.lmdb", "b.lmdb", "b.lmdb"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.lmdb", "a.lmdb.sizes.npz", "b.lmdb"]


@pytest.mark.parametrize("damage", ["other data", "cut", "foreign", "empty", "wrong shape", "pickled"])
def test_kept_sizes_that_do_not_fit_the_data_are_counted_anew(tmp_path, counting, damage):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 5)
    check(path, toy_records(5))
    kept = sizes_path(path)
    records = toy_records(5)
    if damage == "other data":
        records = toy_records(5, 9)
        write_lmdb(path, records)
    elif damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-40])
    elif damage in ("foreign", "empty"):
        kept.write_bytes(b"hello" if damage == "foreign" else b"")
    else:
        fingerprint = content_fingerprint(RecordReader(path).files[0])
        table = np.zeros((3, 4), dtype=np.int64) if damage == "wrong shape" else np.array([{}], dtype=object)
        np.savez(kept, fingerprint=fingerprint, sizes=table)
    check(path, records)
    assert counting == ["x.lmdb", "x.lmdb"]
    check(path, records)
    assert counting == ["x.lmdb", "x.lmdb"]


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 5)

    def refuse(*args, **kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr(module.np, "savez", refuse)
    check(path, toy_records(5))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.lmdb"]


def test_the_fingerprint_tells_equal_sizes_with_other_content_apart(tmp_path):
    first = write_toy_lmdb(tmp_path / "a.lmdb", 5)
    second = write_toy_lmdb(tmp_path / "b.lmdb", 5, first_seed=5)
    third = write_toy_lmdb(tmp_path / "c.lmdb", 5)
    prints = [content_fingerprint(RecordReader(path).files[0]) for path in (first, second, third)]
    assert prints[0] == prints[2] != prints[1]


def test_a_record_without_atoms_is_named(tmp_path):
    write_lmdb(tmp_path / "x.lmdb", [toy_records(1)[0], {"pos": torch.zeros(0, 3)}])
    with pytest.raises(InputError, match=r"record 1 of .* has no atoms"):
        record_sizes(RecordReader(tmp_path / "x.lmdb"))


def test_the_progress_bar_goes_to_stderr(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_EVERY", -1.0)
    path = write_toy_lmdb(tmp_path / "x.lmdb", 5)
    record_sizes(RecordReader(path), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"Counting atoms in {path}: 3 of 5" in err


def test_edges_of_graphs_are_counted_once_for_each_kind_of_graph(tmp_path):
    """5 records of one file are kept and 2 of another are not; other settings or data are counted anew."""
    write_toy_lmdb(tmp_path / "a.lmdb", 5)
    write_toy_lmdb(tmp_path / "b.lmdb", 2, first_seed=50)
    asked = []

    def edges(index: int, factor: int = 10) -> int:
        asked.append(index)
        return factor * index + 3

    def check_edges(settings: str, indices: list[int], factor: int = 10) -> None:
        counts = graph_edges(RecordReader(tmp_path), lambda index: edges(index, factor), settings)
        assert counts.dtype == torch.int64
        assert counts.tolist() == [factor * index + 3 for index in range(7)]
        assert asked == indices
        asked.clear()

    check_edges("radius 6.0", [0, 1, 2, 3, 4, 5, 6])
    check_edges("radius 6.0", [5, 6])
    check_edges("radius 5.0", [0, 1, 2, 3, 4, 5, 6], factor=7)
    write_lmdb(tmp_path / "a.lmdb", toy_records(5, 9))
    check_edges("radius 5.0", [0, 1, 2, 3, 4, 5, 6])
    assert (tmp_path / "a.lmdb.edges.npz").exists()
    assert not (tmp_path / "b.lmdb.edges.npz").exists()


def test_a_data_set_counts_the_edges_of_its_samples(tmp_path):
    """After the transform, and for a slice in its own order."""
    dataset = OC20IS2RE(write_toy_lmdb(tmp_path / "x.lmdb", 5), transform=RadiusGraph(4.0))
    expected_edges = [sample.edge_index.shape[1] for sample in dataset]
    assert dataset.edge_counts("radius 4.0").tolist() == expected_edges
    assert len(set(expected_edges)) == 5
    assert dataset[[3, 1]].edge_counts("radius 4.0").tolist() == [expected_edges[3], expected_edges[1]]
