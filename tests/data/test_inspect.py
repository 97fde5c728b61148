"""The summary of an LMDB counts what is there and what is missing."""

import json

import numpy as np
import pytest
import torch

from molflt.data.inspect import inspect_lmdb
from molflt.data.lmdb_writer import write_lmdb
from molflt.errors import InputError
from molflt.testing import toy_record, toy_records, write_toy_lmdb


def test_counts_shapes_and_distributions_are_those_of_the_records(tmp_path):
    write_toy_lmdb(tmp_path / "0.lmdb", 3)
    write_toy_lmdb(tmp_path / "1.lmdb", 2, first_seed=3)
    records = [*toy_records(3), *toy_records(2, 3)]
    summary = inspect_lmdb(tmp_path)
    assert summary["records"] == 5
    assert [file["records"] for file in summary["files"]] == [3, 2]
    assert summary["files"][0]["bytes"] == (tmp_path / "0.lmdb").stat().st_size
    energies = np.array([record["y_relaxed"] for record in records])
    shown = summary["y_relaxed"]
    assert shown["n"] == 5
    np.testing.assert_allclose([shown["mean"], shown["std"]], [energies.mean(), energies.std()], rtol=1e-6)
    assert sum(shown["histogram"]["counts"]) == 5
    assert shown["histogram"]["edges"][0] == shown["min"] == pytest.approx(energies.min())
    assert (summary["atoms"]["min"], summary["atoms"]["max"]) == (5, 11)
    assert summary["edges"]["mean"] == np.mean([record["edge_index"].shape[1] for record in records])
    numbers = [set(record["atomic_numbers"].tolist()) for record in records]
    assert summary["elements"]["Pt"] == sum(78 in found for found in numbers)
    assert summary["fields"]["pos"] == {
        "records": 5,
        "shape": "[A, 3]",
        "dtype": "float32",
        "unit": "Å",
        "meaning": "initial positions",
    }
    assert summary["fields"]["edge_index"]["shape"] == "[2, E]"
    assert summary["fields"]["sid"]["dtype"] == "int"
    assert summary["duplicate_sids"] == 0


def test_what_is_missing_mixed_or_double_shows(tmp_path):
    double = toy_record(3) | {"pos": toy_record(3)["pos"].double(), "extra": torch.zeros(2, 3)}
    write_lmdb(tmp_path / "x.lmdb", [toy_record(3), double, toy_record(4, labels=False, tags=False)])
    summary = inspect_lmdb(tmp_path / "x.lmdb")
    assert summary["missing"] == {
        "pos_relaxed": 1,
        "delta_pos": 3,
        "pbc": 3,
        "tags": 1,
        "y_relaxed": 1,
        "y_init": 1,
        "force": 3,
    }
    assert summary["fields"]["pos"]["dtype"] == "float32 (also float64)"
    assert summary["fields"]["extra"]["shape"] == "[2, 3]"
    assert summary["duplicate_sids"] == 1
    assert summary["y_relaxed"]["n"] == 2


def test_the_summary_is_json(tmp_path):
    summary = inspect_lmdb(write_toy_lmdb(tmp_path / "x.lmdb", 2, labels=False, edges=False))
    assert json.loads(json.dumps(summary)) == summary
    assert not {"y_relaxed", "y_init", "edges"} & set(summary)


def test_a_record_that_is_not_valid_is_named(tmp_path):
    write_lmdb(tmp_path / "x.lmdb", [toy_record(), toy_record() | {"natoms": 3}])
    with pytest.raises(InputError, match=r"record 1 of .* says natoms = 3"):
        inspect_lmdb(tmp_path / "x.lmdb", progress=True)
