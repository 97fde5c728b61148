"""Splits share out every system once, keep groups whole and depend on the seed alone."""

import json
import os

import pytest
import torch

from molflt.data.datasets import OC20IS2RE, list_splits
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.records import normalize_record
from molflt.data.splitting import assign_groups, group_name, parse_fractions, split_lmdb
from molflt.errors import InputError
from molflt.testing import toy_record, toy_records, write_toy_lmdb

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}


def sids_of(root) -> dict[str, list[int]]:
    return {split: OC20IS2RE(root, split).sids.tolist() for split in list_splits(root)}


def system(sid: int, numbers: list[int], tags: list[int] | None = None) -> dict:
    record = toy_record(sid, len(numbers), edges=False)
    record |= {"atomic_numbers": torch.tensor(numbers), "sid": sid}
    del record["tags"]
    return record if tags is None else record | {"tags": torch.tensor(tags)}


def test_every_system_is_in_one_split_and_the_shares_are_exact(tmp_path):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 50)
    report = split_lmdb(path, tmp_path / "out", SHARES)
    assert report.counts == {"train": 40, "val": 5, "test": 5}
    splits = sids_of(tmp_path / "out")
    assert {name: len(sids) for name, sids in splits.items()} == report.counts
    assert sorted(sid for sids in splits.values() for sid in sids) == list(range(1000, 1050))
    assert splits["train"] == sorted(splits["train"])
    assert splits["test"] != list(range(1045, 1050))


def test_records_are_copied_to_the_byte(tmp_path):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 11, layout="pyg1")
    split_lmdb(path, tmp_path / "out", {"a": 0.5, "b": 0.5})
    source = RecordReader(path)
    stored = {1000 + index: source.files[0].read(index) for index in range(11)}
    for split, sids in sids_of(tmp_path / "out").items():
        file = RecordReader(tmp_path / "out" / split).files[0]
        assert [file.read(n) for n in range(len(file))] == [stored[sid] for sid in sids]


def test_the_same_seed_gives_the_same_bytes_and_another_gives_other_systems(tmp_path):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 40)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        split_lmdb(path, tmp_path / name, SHARES, seed=seed)
    files = [file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*") if file.is_file()]
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sids_of(tmp_path / "a")["val"] != sids_of(tmp_path / "c")["val"]


def test_the_choice_does_not_depend_on_the_order_of_the_records(tmp_path):
    records = toy_records(30)
    write_lmdb(tmp_path / "a.lmdb", records)
    write_lmdb(tmp_path / "b.lmdb", records[::-1])
    splits = []
    for name in "ab":
        split_lmdb(tmp_path / f"{name}.lmdb", tmp_path / name, SHARES)
        splits.append({split: set(sids) for split, sids in sids_of(tmp_path / name).items()})
    assert splits[0] == splits[1]


@pytest.mark.parametrize("by", ["sid", "formula", "elements", "catalyst", "adsorbate"])
def test_no_id_is_in_two_splits_whatever_stays_together(tmp_path, by):
    records = [system(n // 3, [29, 29, 78 - n % 7], [0, 1, 2]) for n in range(60)]
    write_lmdb(tmp_path / "a.lmdb", records)
    split_lmdb(tmp_path / "a.lmdb", tmp_path / "out", {"a": 0.7, "b": 0.3}, by="sid")
    assert sum(len(sids) for sids in sids_of(tmp_path / "out").values()) == 60
    records += [system(1000 + n, [30 + n, 30 + n, 8 + n], [0, 1, 2]) for n in range(40)]
    write_lmdb(tmp_path / "b.lmdb", records)
    split_lmdb(tmp_path / "b.lmdb", tmp_path / "again", {"a": 0.7, "b": 0.3}, by=by)
    splits = [set(sids) for sids in sids_of(tmp_path / "again").values()]
    assert not splits[0] & splits[1]


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("sid", ["5", "5", "5"]),
        ("formula", ["C2OPt2", "OPt4", "NOPt"]),
        ("elements", ["COPt", "OPt", "NOPt"]),
        ("catalyst", ["Pt", "Pt", "Pt"]),
        ("adsorbate", ["C2O", "O", "NO"]),
    ],
)
def test_groups_are_named_as_chemists_would(by, groups):
    systems = [
        ([78, 6, 78, 6, 8], [0, 2, 1, 2, 2]),
        ([78] * 4 + [8], [0, 0, 1, 1, 2]),
        ([78, 7, 8], [1, 2, 2]),
    ]
    found = [group_name(normalize_record(system(5, *one)), by) for one in systems]
    assert [sorted(name) for name in found] == [sorted(name) for name in groups]


@pytest.mark.parametrize("by", ["formula", "elements", "catalyst", "adsorbate"])
def test_groups_stay_whole(tmp_path, by):
    records = [
        system(n, [29 + n % 5] * (2 + n % 2) + [6 + n % 3], [0] * (1 + n % 2) + [1, 2]) for n in range(90)
    ]
    write_lmdb(tmp_path / "a.lmdb", records)
    report = split_lmdb(tmp_path / "a.lmdb", tmp_path / "out", {"a": 0.6, "b": 0.4}, by=by)
    groups = [{group_name(data, by) for data in OC20IS2RE(tmp_path / "out", split)} for split in "ab"]
    assert not groups[0] & groups[1]
    assert [len(group) for group in groups] == [report.groups[split] for split in "ab"]
    assert groups[0] | groups[1] == {group_name(normalize_record(record), by) for record in records}


def test_held_out_elements_occur_in_no_other_split(tmp_path):
    records = [system(n, [29, 29, (8, 46, 17, 1)[n % 4]]) for n in range(40)]
    records.append(system(3, [29, 46]))
    write_lmdb(tmp_path / "a.lmdb", records)
    report = split_lmdb(tmp_path / "a.lmdb", tmp_path / "out", {"a": 0.5, "b": 0.5}, hold_out=["Pd", "Cl"])
    assert report.counts == {"a": 10, "b": 9, "held_out": 22}
    assert not set(sids_of(tmp_path / "out")["held_out"]) & set(sids_of(tmp_path / "out")["a"])
    for split in "ab":
        for data in OC20IS2RE(tmp_path / "out", split):
            assert not {46, 17} & set(data.atomic_numbers.tolist())


def test_how_the_split_was_made_is_written_beside_it(tmp_path):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 10)
    split_lmdb(path, tmp_path / "out", {"a": 0.5, "b": 0.5}, seed=7, by="formula")
    how = json.loads((tmp_path / "out" / "splits.json").read_text())
    assert (how["source"], how["by"], how["seed"]) == ("a.lmdb", "formula", 7)
    assert how["fractions"] == {"a": 0.5, "b": 0.5}
    assert sum(how["systems"].values()) == 10
    assert len(how["fingerprints"][0]) == 64


def test_unequal_groups_come_close_to_the_shares():
    groups = [str(n % 23) for n in range(1000)] + ["big"] * 200
    members = assign_groups(groups, SHARES, seed=0)
    sizes = {name: len(rows) for name, rows in members.items()}
    assert sum(sizes.values()) == 1200
    assert all(abs(sizes[name] - SHARES[name] * 1200) <= 45 for name in SHARES)


@pytest.mark.parametrize(
    ("fractions", "options", "message"),
    [
        ({"a": 0.5, "b": 0.4}, {}, "add up to 0.9, not 1"),
        ({"a": 1.5, "b": -0.5}, {}, "'b' has the share -0.5"),
        ({"a": float("nan")}, {}, "'a' has the share nan"),
        ({"../a": 1.0}, {}, "is no name for a split's folder"),
        ({".a": 1.0}, {}, "is no name"),
        ({"held_out": 1.0}, {"hold_out": ["Pd"]}, "is the split of the held-out elements"),
        ({"a": 1.0}, {"hold_out": ["Xx"]}, "'Xx' is no element"),
        ({"a": 1.0}, {"hold_out": ["U"]}, "'held_out' would hold no system"),
        ({"a": 0.99, "b": 0.01}, {}, "'b' would hold no system: 5 systems in 5 groups"),
        ({"a": 1.0}, {"by": "size"}, "no grouping 'size'; give one of sid, formula"),
        ({"a": 1.0}, {"by": "adsorbate"}, "has no tags, which tell adsorbate from the rest"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_and_nothing_written(tmp_path, fractions, options, message):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 5, tags=False)
    with pytest.raises(InputError, match=message):
        split_lmdb(path, tmp_path / "out", fractions, **options)
    assert os.listdir(tmp_path) == ["a.lmdb"]


def test_a_damaged_record_or_a_taken_place_stops_the_split_and_leaves_all_as_it_was(tmp_path):
    records = toy_records(5)
    records[4]["pos"][0] = float("nan")
    write_lmdb(tmp_path / "in" / "a.lmdb", records)
    with pytest.raises(InputError, match=r"record 4 .* NaN"):
        split_lmdb(tmp_path / "in" / "a.lmdb", tmp_path / "out", {"a": 1.0})
    assert os.listdir(tmp_path) == ["in"]
    with pytest.raises(InputError, match="exists already"):
        split_lmdb(tmp_path / "in" / "a.lmdb", tmp_path / "in", {"a": 1.0})
    with pytest.raises(InputError, match="lies in the destination"):
        split_lmdb(tmp_path / "in" / "a.lmdb", tmp_path / "in", {"a": 1.0}, overwrite=True)
    assert os.listdir(tmp_path / "in") == ["a.lmdb"]


def test_shares_are_read_from_text():
    assert parse_fractions("train=0.8, val=.1,test=1e-1") == SHARES
    for text, message in (("train", "'train' is no share"), ("a=1,a=2", "given twice"), ("", "no share")):
        with pytest.raises(InputError, match=message):
            parse_fractions(text)
