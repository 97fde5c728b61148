"""Conversion between LMDB, extended XYZ and ASE databases: every field survives, or is named."""

import os

import ase.db
import ase.io
import numpy as np
import pytest
import torch
from ase.build import fcc111, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian

from molflt.data.convert import convert
from molflt.data.datasets import OC20IS2RE
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.records import normalize_record
from molflt.errors import InputError
from molflt.testing import assert_same_sample, toy_record, toy_records, write_toy_lmdb

FORMATS = ("extxyz", "db", "aselmdb")
EDGES = ("edge_index", "cell_offsets", "distances")


def samples(path, without=()) -> list:
    reader = RecordReader(path)
    found = [normalize_record(*reader.read(n), default_sid=n) for n in range(len(reader))]
    for sample in found:
        for name in without:
            if name in sample:
                del sample[name]
    return found


def assert_same_samples(path, expected_path) -> None:
    found, expected = samples(path), samples(expected_path, EDGES)
    assert len(found) == len(expected)
    for sample, wanted in zip(found, expected, strict=True):
        assert_same_sample(sample, wanted)


def round_trip(folder, records, suffix: str):
    write_lmdb(folder / "a.lmdb", records)
    convert(folder / "a.lmdb", folder / f"b.{suffix}")
    convert(folder / f"b.{suffix}", folder / "c.lmdb")
    return folder / "c.lmdb"


# Round trips


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("fields", [{}, {"labels": False}, {"tags": False}, {"edges": False}])
def test_every_field_survives_a_round_trip_and_absent_ones_stay_absent(tmp_path, suffix, fields):
    converted = round_trip(tmp_path, toy_records(5, **fields), suffix)
    assert_same_samples(converted, tmp_path / "a.lmdb")


@pytest.mark.parametrize("suffix", FORMATS)
def test_oc20s_own_systems_survive_a_round_trip(tmp_path, suffix):
    source = "datasets/oc20_sample/data.lmdb"
    convert(source, tmp_path / f"b.{suffix}")
    convert(tmp_path / f"b.{suffix}", tmp_path / "c.lmdb")
    assert_same_samples(tmp_path / "c.lmdb", source)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_float32_and_float64_survives_to_the_bit(tmp_path, suffix):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (8_000,), generator=generator).int()
    numbers = bits.view(torch.float32)
    numbers = numbers[numbers.isfinite()][: 13 * 3 * 150].reshape(-1, 13, 3)
    records = [
        toy_record(n, 13, edges=False)
        | {"force": force, "y_relaxed": float(force[0, 0]) / 3, "y_init": -1e-7 * (n + 1) / 3}
        for n, force in enumerate(numbers)
    ]
    records[0]["force"][0] = torch.tensor([0.0, -0.0, 1e-45])
    reader = RecordReader(round_trip(tmp_path, records, suffix))
    assert len(reader) == len(records) == 150
    for index, record in enumerate(records):
        found, _ = reader.read(index)
        assert torch.equal(found["force"].view(torch.int32), record["force"].view(torch.int32))
        assert (found["y_relaxed"], found["y_init"]) == (record["y_relaxed"], record["y_init"])


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("pbc", [[1, 1, 1], [1, 1, 0], [0, 0, 0]])
def test_pbc_fixed_tags_and_ids_survive_whatever_they_are(tmp_path, suffix, pbc):
    base = toy_record(1, 7, edges=False)
    cell = base["cell"] * torch.tensor(pbc).any()
    records = [
        base | {"pbc": torch.tensor([pbc]).bool(), "cell": cell, "fixed": torch.ones(7), "sid": 2**53 + 1},
        base | {"fixed": torch.zeros(7), "tags": torch.zeros(7, dtype=torch.int64), "sid": -5},
        {name: value for name, value in base.items() if name != "fixed"} | {"tags": torch.ones(7), "sid": 0},
        {"pos": base["pos"][:1], "atomic_numbers": [94], "sid": 8},
    ]
    assert_same_samples(round_trip(tmp_path, map(normalize_record, records), suffix), tmp_path / "a.lmdb")


@pytest.mark.parametrize("suffix", FORMATS)
def test_fields_of_a_users_own_survive_with_their_types(tmp_path, suffix):
    own = {
        "miller_index": torch.tensor([1, -1, 2]),
        "weights": torch.tensor([[0.1, float("inf")], [-0.0, 1e-30]], dtype=torch.float64),
        "per_atom": torch.arange(7, dtype=torch.int16),
        "mask": torch.tensor([True, False]),
        "none_yet": torch.empty(0, 3),
        "name": 'Properties=species:S:1 "quoted" \\ {x=1} µ\nsecond line',
        "number_like": "007",
        "flag": True,
        "count": 3,
        "share": 0.1,
    }
    converted = round_trip(tmp_path, [toy_record(0, 7, edges=False) | own], suffix)
    [sample] = samples(converted)
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            assert sample[name].dtype == value.dtype, name
            assert torch.equal(sample[name], value), name
        else:
            assert (type(sample[name]), sample[name]) == (type(value), value)


def test_what_is_not_carried_is_listed(tmp_path):
    record = toy_record(0, 7) | {"history": "x"}
    write_lmdb(tmp_path / "a.lmdb", [record, toy_record(1, 5, labels=False)])
    report = convert(tmp_path / "a.lmdb", tmp_path / "b.extxyz")
    assert dict(report.left_out) == dict.fromkeys(EDGES, 2)
    text = "\n".join(report.lines())
    assert "as they follow from the other fields: edge_index, cell_offsets, distances" in text
    assert "in some structures only: " in text
    assert "y_relaxed (1 of 2)" in text

    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=-14.2, forces=np.ones((3, 3)))
    atoms.set_initial_magnetic_moments([1, 0, 0])
    atoms.info["basis"] = "def2"
    ase.io.write(tmp_path / "w.extxyz", atoms)
    report = convert(tmp_path / "w.extxyz", tmp_path / "w.lmdb")
    assert set(report.left_out) == {
        "calculator's energy",
        "calculator's forces",
        "array initial_magmoms",
        "info basis",
    }
    assert any("it is a total energy: --total-energy-as-label" in line for line in report.lines())


# Energies and tags of other people's files


def test_a_total_energy_becomes_a_label_only_when_asked_for(tmp_path):
    frames = []
    for name, energy in (("H2O", -14.25), ("CO", -14.5)):
        frames.append(molecule(name))
        frames[-1].calc = SinglePointCalculator(frames[-1], energy=energy)
    ase.io.write(tmp_path / "a.traj", frames)
    convert(tmp_path / "a.traj", tmp_path / "plain.lmdb")
    assert all("y_relaxed" not in sample for sample in samples(tmp_path / "plain.lmdb"))
    convert(tmp_path / "a.traj", tmp_path / "asked.lmdb", total_energy_as_label=True)
    assert [float(sample.y_relaxed) for sample in samples(tmp_path / "asked.lmdb")] == [-14.25, -14.5]

    frames[1].calc = None
    ase.io.write(tmp_path / "b.traj", frames)
    with pytest.raises(InputError, match=r"b\.traj, frame 1: has no total energy to take as y_relaxed"):
        convert(tmp_path / "b.traj", tmp_path / "b.lmdb", total_energy_as_label=True)
    frames[0].info["y_relaxed"] = -0.5
    ase.io.write(tmp_path / "c.extxyz", frames[:1])
    with pytest.raises(InputError, match="y_relaxed of its own and a total energy"):
        convert(tmp_path / "c.extxyz", tmp_path / "c.lmdb", total_energy_as_label=True)
    with pytest.raises(InputError, match="is an LMDB, which holds no total energies"):
        convert(tmp_path / "plain.lmdb", tmp_path / "d.lmdb", total_energy_as_label=True)
    assert sorted(os.listdir(tmp_path)) == [
        "a.traj", "asked.lmdb", "b.traj", "c.extxyz", "plain.lmdb"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["db", "json", "aselmdb"])
def test_the_rows_of_an_ase_database_of_others_are_read_with_their_labels(tmp_path, kind):
    slab = fcc111("Cu", (1, 1, 4), vacuum=8.0)
    with ase.db.connect(tmp_path / f"a.{kind}", type=kind) as database:
        database.write(slab, key_value_pairs={"sid": 77, "y_relaxed": -1.25}, data={"notes": [1, 2, 3]})
        database.write(molecule("H2O"), data={"y_init": 0.5, "pos_relaxed": molecule("H2O").positions + 0.25})
        database.write(molecule("NH3"), key_value_pairs={"sid": 99})
        database.delete([3])
    report = convert(tmp_path / f"a.{kind}", tmp_path / "b.lmdb")
    first, second = samples(tmp_path / "b.lmdb")
    assert (int(first.sid), float(first.y_relaxed), first.pbc.tolist()) == (77, -1.25, [[True, True, False]])
    assert first.tags.tolist() == [0, 0, 0, 1]
    assert (int(second.sid), float(second.y_init)) == (1, 0.5)
    assert torch.equal(second.pos_relaxed, torch.tensor(molecule("H2O").positions + 0.25).float())
    assert "tags" not in second
    assert report.tag_sources == {"ase-layers": 1, "none": 1}
    assert dict(report.left_out) == {"info notes": 1}
    with pytest.raises(InputError, match="differs from the first record"):
        [*OC20IS2RE(tmp_path / "b.lmdb")]


@pytest.mark.parametrize("kind", ["db", "aselmdb"])
def test_a_written_database_is_what_ase_reads(tmp_path, kind):
    write_toy_lmdb(tmp_path / "a.lmdb", 3)
    convert(tmp_path / "a.lmdb", tmp_path / f"b.{kind}")
    assert sorted(os.listdir(tmp_path)) == ["a.lmdb", f"b.{kind}"]
    with ase.db.connect(tmp_path / f"b.{kind}") as database:
        rows = list(database.select())
        assert database.count() == 3
        assert [row.id for row in rows] == [1, 2, 3]
    for row, record in zip(rows, toy_records(3), strict=True):
        assert row.key_value_pairs == {name: record[name] for name in ("sid", "y_init", "y_relaxed")}
        assert np.array_equal(row.positions, record["pos"].double().numpy())
        assert np.array_equal(row.data["pos_relaxed"], record["pos_relaxed"].double().numpy())
        [constraint] = row.constraints
        assert constraint.index.tolist() == [0, 1]


def test_a_written_extxyz_is_what_ase_reads(tmp_path):
    write_toy_lmdb(tmp_path / "a.lmdb", 3)
    convert(tmp_path / "a.lmdb", tmp_path / "b.xyz")
    for atoms, record in zip(ase.io.read(tmp_path / "b.xyz", ":"), toy_records(3), strict=True):
        assert np.array_equal(atoms.positions.astype(np.float32), record["pos"].numpy())
        assert np.array_equal(atoms.cell.array.astype(np.float32), record["cell"][0].numpy())
        assert np.array_equal(atoms.arrays["pos_relaxed"].astype(np.float32), record["pos_relaxed"].numpy())
        assert (atoms.info["sid"], atoms.info["y_relaxed"]) == (record["sid"], record["y_relaxed"])
        assert atoms.get_tags().tolist() == record["tags"].tolist()
        assert atoms.constraints[0].index.tolist() == [0, 1]


def test_interpretations_of_a_source_are_told(tmp_path):
    atoms = molecule("CH4")
    atoms.set_constraint([FixAtoms([0]), FixCartesian(1, mask=(True, False, False))])
    ase.io.write(tmp_path / "in.traj", atoms)
    report = convert(tmp_path / "in.traj", tmp_path / "a" / "x.lmdb")
    assert any("FixCartesian" in line for line in report.lines())
    [sample] = samples(tmp_path / "a" / "x.lmdb")
    assert sample.fixed.tolist() == [True, False, False, False, False]
    (tmp_path / "in.xyz").write_text("2\n\nO 0 0 0\nD 0 0 1\n" * 3)
    report = convert(tmp_path / "in.xyz", tmp_path / "b" / "x.lmdb")
    assert report.lines()[-1] == "note: deuterium (D, 1 atoms) is computed as hydrogen (3 structures)"


def test_another_programs_info_entry_of_the_same_name_is_refused(tmp_path):
    (tmp_path / "a.extxyz").write_text('1\nProperties=species:S:1:pos:R:3 molflt="3.0 4.0"\nH 0 0 0\n')
    with pytest.raises(InputError, match="frame 0: has an info entry 'molflt' that molflt did not write"):
        convert(tmp_path / "a.extxyz", tmp_path / "b.lmdb")


# Shards and sources


@pytest.mark.parametrize("suffix", ["lmdb", *FORMATS])
@pytest.mark.parametrize(("size", "sizes"), [(None, [7]), (3, [3, 3, 1]), (7, [7]), (100, [7])])
def test_shards_hold_what_they_should_and_read_as_one(tmp_path, suffix, size, sizes):
    write_toy_lmdb(tmp_path / "a.lmdb", 7)
    report = convert(tmp_path / "a.lmdb", tmp_path / "b", output_format=suffix, shard_size=size)
    names = [f"data.{n:04d}.{suffix}" for n in range(len(sizes))]
    assert sorted(os.listdir(tmp_path / "b")) == names
    assert [path.name for path in report.files] == names
    assert report.records == 7
    for name, count in zip(names, sizes, strict=True):
        one = convert(tmp_path / "b" / name, tmp_path / f"{name}.again.lmdb")
        assert one.records == count
    convert(tmp_path / "b", tmp_path / "c.lmdb")
    assert [int(sample.sid) for sample in samples(tmp_path / "c.lmdb")] == list(range(1000, 1007))


def test_lmdb_to_lmdb_copies_the_bytes_of_records_and_settles_missing_ids(tmp_path):
    records = [toy_record(n, 5) | {"weird": "kept"} for n in range(5)]
    del records[3]["sid"]
    write_lmdb(tmp_path / "a.lmdb", records, layout="pyg1", with_length=False)
    convert(tmp_path / "a.lmdb", tmp_path / "b", shard_size=2)
    source, copy = RecordReader(tmp_path / "a.lmdb"), RecordReader(tmp_path / "b")
    for index in range(5):
        stored, copied = (r.locate(index)[0].read(r.locate(index)[1]) for r in (source, copy))
        assert (stored == copied) == (index != 3)
        assert_same_sample(
            normalize_record(*copy.read(index)), normalize_record(*source.read(index), default_sid=index)
        )
    assert copy.read(3)[0]["sid"] == 3


def test_a_folder_of_structure_files_is_read_in_sorted_order(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, kind in (("b c@2.xyz", "CO"), ("a.traj", "H2O"), ("d.extxyz", "N2")):
        ase.io.write(folder / name.replace("@", ""), molecule(kind))
    (folder / ".hidden").write_text("x")
    convert(folder, tmp_path / "out.lmdb")
    found = samples(tmp_path / "out.lmdb")
    assert [sample.atomic_numbers.tolist() for sample in found] == [[8, 1, 1], [8, 6], [7, 7]]
    assert [int(sample.sid) for sample in found] == [0, 1, 2]


# Refusals


def test_one_refused_structure_stops_all_or_is_skipped_and_listed(tmp_path):
    frames = [molecule("H2O"), molecule("H2O"), molecule("CO")]
    frames[1].positions[1] = frames[1].positions[0]
    ase.io.write(tmp_path / "a.xyz", frames)
    with pytest.raises(InputError, match=r"a\.xyz, frame 1: atom .* below 0.5 Å"):
        convert(tmp_path / "a.xyz", tmp_path / "b.lmdb")
    assert os.listdir(tmp_path) == ["a.xyz"]
    report = convert(tmp_path / "a.xyz", tmp_path / "b.lmdb", skip_refused=True)
    assert [sample.natoms.item() for sample in samples(tmp_path / "b.lmdb")] == [3, 2]
    assert len(report.refused) == 1
    assert "frame 1" in report.lines()[-1]


@pytest.mark.parametrize(
    ("destination", "options", "message"),
    [
        ("a.lmdb", {}, "exists already; give another name, or --overwrite"),
        ("a.lmdb", {"overwrite": True}, "is both source and destination"),
        ("b.lmdb", {"shard_size": 3}, "is one file; give the name of a folder"),
        ("b", {"shard_size": 0}, "at least one structure, got 0"),
        ("b", {"output_format": "cif"}, "cannot be written as 'cif'"),
        ("b.traj", {}, "cannot be written as 'traj'"),
        ("b.lmdb", {"output_format": "db"}, "cannot be written as 'db'"),
        ("file/b.lmdb", {}, "cannot be written"),
        ("file/b.db", {}, "cannot be written"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path, destination, options, message
):
    path = write_toy_lmdb(tmp_path / "a.lmdb", 3)
    (tmp_path / "file").write_text("x")
    before = path.read_bytes()
    with pytest.raises(InputError, match=message):
        convert(path, tmp_path / destination, **options)
    assert sorted(os.listdir(tmp_path)) == ["a.lmdb", "file"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["missing", "empty.lmdb", "text.db", "folder", "x.json"])
def test_a_source_that_is_none_is_one_line(tmp_path, name):
    (tmp_path / "empty.lmdb").write_bytes(b"")
    (tmp_path / "text.db").write_bytes(b"SQLite format 3\x00 and nothing more")
    (tmp_path / "x.json").write_text('{"ids": [1, 2], "nextid": 3, "1": {"numbers": [1]}}')
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as error:
        convert(tmp_path / name, tmp_path / "out.lmdb")
    assert name in str(error.value)
    assert str(error.value).isprintable()
    assert not (tmp_path / "out.lmdb").exists()


def test_overwrite_replaces_a_file_by_a_folder_and_back(tmp_path):
    write_toy_lmdb(tmp_path / "a.lmdb", 5)
    convert(tmp_path / "a.lmdb", tmp_path / "b")
    convert(tmp_path / "a.lmdb", tmp_path / "b", shard_size=2, overwrite=True)
    assert len(os.listdir(tmp_path / "b")) == 3
    convert(tmp_path / "a.lmdb", tmp_path / "b.xyz")
    write_toy_lmdb(tmp_path / "c.lmdb", 2)
    convert(tmp_path / "c.lmdb", tmp_path / "b.xyz", overwrite=True)
    assert len(ase.io.read(tmp_path / "b.xyz", ":")) == 2
    assert sorted(os.listdir(tmp_path)) == ["a.lmdb", "b", "b.xyz", "c.lmdb"]
