"""Statistics equal those of two passes over all values, and are kept as long as the data stay as they are."""

import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from ase.data import chemical_symbols

from molflt.data import statistics as module
from molflt.data.datasets import OC20IS2RE
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.statistics import (
    DataStatistics,
    Moments,
    dataset_statistics,
    statistics_path,
    statistics_tables,
)
from molflt.data.transforms import DeltaPos
from molflt.errors import InputError
from molflt.testing import toy_record, toy_records, write_toy_lmdb


@pytest.fixture
def measuring(monkeypatch):
    measured = []
    measure = module._measure
    monkeypatch.setattr(
        module, "_measure", lambda file, *args: measured.append(file.path.name) or measure(file, *args)
    )
    return measured


def check_two_pass(statistics: DataStatistics, path) -> None:
    samples = [DeltaPos()(sample) for sample in OC20IS2RE(path)]
    values = {
        "y_relaxed": [sample.y_relaxed.numpy() for sample in samples],
        "y_init": [sample.y_init.numpy() for sample in samples],
        "delta_pos": [sample.delta_pos[~sample.fixed].numpy().ravel() for sample in samples],
        "atoms": [sample.natoms.numpy() for sample in samples],
        "edges": [np.array([sample["edge_index"].shape[1]]) for sample in samples if "edge_index" in sample],
    }
    summary = statistics.to_dict()
    for name, parts in values.items():
        if not parts:
            assert name not in summary
            continue
        array = np.concatenate(parts).astype(np.float64)
        found = summary[name]
        assert found["n"] == array.size
        assert (found["min"], found["max"]) == (array.min(), array.max())
        scale = np.abs(array).max()
        assert found["mean"] == pytest.approx(array.mean(), rel=0, abs=1e-13 * scale)
        assert found["std"] == pytest.approx(np.sqrt(((array - array.mean()) ** 2).mean()), rel=1e-12)
        assert found["rms"] == pytest.approx(np.sqrt((array**2).mean()), rel=1e-12)
    numbers = [sample.atomic_numbers.tolist() for sample in samples]
    atoms = Counter(number for sample in numbers for number in sample)
    systems = Counter(number for sample in numbers for number in set(sample))
    assert summary["elements"] == {
        chemical_symbols[number]: {"atoms": atoms[number], "systems": systems[number]}
        for number in sorted(atoms)
    }
    assert summary["records"] == len(samples)


def test_one_pass_over_shards_equals_two_passes_over_all_values(tmp_path):
    for shard, count in enumerate((7, 1, 13)):
        write_toy_lmdb(tmp_path / f"data.{shard}.lmdb", count, first_seed=100 * shard)
    for _ in range(2):
        check_two_pass(dataset_statistics(tmp_path), tmp_path)


def test_the_shipped_oc20_systems_equal_two_passes_with_minimum_images(tmp_path):
    path = tmp_path / "data.lmdb"
    shutil.copy("datasets/oc20_sample/data.lmdb", path)
    statistics = dataset_statistics(path)
    check_two_pass(statistics, path)
    assert statistics.moments["delta_pos"].max < 10.0


def test_atoms_that_jump_by_a_lattice_vector_have_not_moved(tmp_path):
    record = toy_record(0, 7, edges=False)
    record["pos_relaxed"] = record["pos"] + record["cell"][0, 0]
    write_lmdb(tmp_path / "a.lmdb", [record])
    assert dataset_statistics(tmp_path / "a.lmdb").moments["delta_pos"].rms < 1e-6


def test_a_large_offset_does_not_cancel_the_spread():
    moments = Moments()
    rng = np.random.default_rng(0)
    values = 1e6 + rng.normal(size=10_007)
    for part in np.array_split(values, 997):
        moments.add(part)
    assert moments.std == pytest.approx(values.std(), rel=1e-10)
    one_by_one = Moments()
    for value in values:
        one_by_one.add(value)
    assert one_by_one.std == pytest.approx(values.std(), rel=1e-10)
    assert one_by_one.n == 10_007


def test_records_without_labels_count_in_what_they_have(tmp_path):
    write_lmdb(tmp_path / "a.lmdb", [*toy_records(3), *toy_records(4, 50, labels=False, edges=False)])
    summary = dataset_statistics(tmp_path / "a.lmdb").to_dict()
    assert [summary[name]["n"] for name in ("y_relaxed", "atoms", "edges")] == [3, 7, 3]
    write_toy_lmdb(tmp_path / "b.lmdb", 2, labels=False, edges=False)
    assert set(dataset_statistics(tmp_path / "b.lmdb").to_dict()) == {"records", "atoms", "elements"}


def test_statistics_are_measured_once_and_only_of_the_shard_that_changed(tmp_path, measuring):
    for shard in range(2):
        write_toy_lmdb(tmp_path / f"{shard}.lmdb", 3, first_seed=10 * shard)
    first = dataset_statistics(tmp_path).to_dict()
    assert dataset_statistics(tmp_path).to_dict() == first
    assert measuring == ["0.lmdb", "1.lmdb"]
    write_toy_lmdb(tmp_path / "1.lmdb", 3, first_seed=77)
    changed = dataset_statistics(tmp_path)
    assert measuring == ["0.lmdb", "1.lmdb", "1.lmdb"]
    check_two_pass(changed, tmp_path)
    assert changed.to_dict() != first


def test_a_file_that_is_newer_than_its_statistics_is_measured_anew(tmp_path, measuring):
    """However alike the fingerprints are."""
    path = write_toy_lmdb(tmp_path / "a.lmdb", 3)
    first = dataset_statistics(path)
    os.utime(path, ns=(0, statistics_path(path).stat().st_mtime_ns + 1))
    again = dataset_statistics(path)
    assert (first.read, again.read) == (3, 3)
    os.utime(path, ns=(0, statistics_path(path).stat().st_mtime_ns))
    assert dataset_statistics(path).read == 0
    assert measuring == ["a.lmdb", "a.lmdb"]


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{", '{"version": 2}', "number", "text", "counts", "version", "records", "[" * 100_000],
)
def test_kept_statistics_that_are_damaged_are_measured_anew(tmp_path, measuring, damage):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 3)
    expected = dataset_statistics(path).to_dict()
    kept = statistics_path(path)
    content = json.loads(kept.read_text())
    if damage == "number":
        content["moments"]["y_relaxed"]["mean"] = None
    elif damage == "text":
        content["moments"]["y_relaxed"]["squares"] = "3"
    elif damage == "counts":
        content["element_atoms"]["Cu"] = 1.5
    elif damage == "version":
        content["version"] = 99
    elif damage == "records":
        content["moments"]["atoms"]["n"] = 4
    named = damage in ("number", "text", "counts", "version", "records")
    kept.write_text(json.dumps(content) if named else damage)
    assert dataset_statistics(path).to_dict() == expected
    assert measuring == ["a.lmdb", "a.lmdb"]
    assert json.loads(kept.read_text())["version"] == 2


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, measuring, monkeypatch):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 3)

    def refuse(*args, **kwargs):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(module.Path, "write_text", refuse)
    for _ in range(2):
        check_two_pass(dataset_statistics(path), path)
    assert measuring == ["a.lmdb", "a.lmdb"]
    assert os.listdir(tmp_path) == ["a.lmdb"]


def test_a_record_that_is_not_valid_is_named_and_nothing_is_kept(tmp_path):
    records = toy_records(3)
    records[1]["y_relaxed"] = float("nan")
    write_lmdb(tmp_path / "a.lmdb", records)
    with pytest.raises(InputError, match=r"record 1 of .* 'y_relaxed' holds NaN"):
        dataset_statistics(tmp_path / "a.lmdb")
    assert os.listdir(tmp_path) == ["a.lmdb"]


def test_a_structure_without_fixed_atoms_counts_all_as_free(tmp_path):
    record = toy_record(0, 5, edges=False)
    shift = torch.tensor([0.125, 0.0, 0.0])
    del record["fixed"]
    write_lmdb(tmp_path / "a.lmdb", [record | {"pos_relaxed": record["pos"] + shift}])
    moments = dataset_statistics(tmp_path / "a.lmdb").moments["delta_pos"]
    assert moments.n == 15
    assert moments.mean == pytest.approx(0.125 / 3, rel=1e-5)


def test_the_tables_show_the_numbers_with_their_units(tmp_path):
    write_toy_lmdb(tmp_path / "a.lmdb", 3)
    summary = dataset_statistics(tmp_path / "a.lmdb").to_dict()
    quantities, elements = statistics_tables(summary)
    cells = [list(column.cells) for column in quantities.columns]
    assert cells[0][:3] == ["y_relaxed (eV)", "y_init (eV)", "delta_pos (Å, components of free atoms)"]
    assert cells[2][0] == f"{summary['y_relaxed']['mean']:.6g}"
    assert list(elements.columns[0].cells) == list(summary["elements"])


def test_a_cell_that_gives_no_minimum_image_is_named_with_its_record(tmp_path):
    record = toy_record(0, 5, edges=False)
    record["cell"][0, 1] = record["cell"][0, 0]
    write_lmdb(tmp_path / "a.lmdb", [record])
    with pytest.raises(InputError, match=r"record 0 of .*a\.lmdb: periodic cell vectors .* dependent"):
        dataset_statistics(tmp_path / "a.lmdb")
