"""The shipped fcc111 set is what its source says, rebuilt from labels alone, and split without leaks."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.data import covalent_radii
from ase.geometry import get_distances
from ase.io import read
from ase.neighborlist import neighbor_list

from molflt.data.datasets import OC20IS2RE, list_splits
from molflt.data.fcc111 import MIN_HEIGHT, build_fcc111, mismatch, rebuild_system, to_record
from molflt.data.fcc111_splits import HELD_OUT_ADSORBATE, HELD_OUT_METAL, SPLITS, assign_splits
from molflt.errors import InputError

SHIPPED = Path(__file__).parents[2] / "datasets" / "fcc111"
SOURCE = SHIPPED / "source" / "fcc111_adsorption.json"
LEFT_OUT = {"Ag-C-ontop-3", "Cu-N-ontop-3"}


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return json.loads(SOURCE.read_text())


@pytest.fixture(scope="module")
def systems(records):
    return [rebuild_system(record) for record in records]


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fcc111")
    build_fcc111(SOURCE, folder / "once")
    return build_fcc111(SOURCE, folder / "twice")


@pytest.fixture(scope="module")
def shipped():
    return {split: OC20IS2RE(SHIPPED, split) for split in SPLITS}


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Repeatable


def test_building_twice_gives_the_same_bytes(rebuilt):
    once, twice = files(rebuilt.parent / "once"), files(rebuilt)
    assert once == twice
    assert len(twice) == len(SPLITS) + 10 + 1


def test_the_shipped_files_are_what_their_source_builds(rebuilt):
    built, there = files(rebuilt), files(SHIPPED)
    extra = {"README.md", "source/README.md", "source/fcc111_adsorption.json"}
    assert set(there) - set(built) == extra
    for name in built:
        if name.endswith(".cif"):  # fractional coordinates end in digits that depend on the machine
            ours, theirs = read(rebuilt / name), read(SHIPPED / name)
            np.testing.assert_allclose(ours.positions, theirs.positions, atol=1e-6)
            assert (ours.numbers == theirs.numbers).all()
        else:
            assert built[name] == there[name], name


# Faithful to the source


def test_every_record_is_in_one_split_or_listed_as_left_out(records, systems, shipped):
    names = {system.sid: system.name for system in systems}
    assert len(names) == len(records) == 882
    sids = list(itertools.chain.from_iterable(dataset.sids.tolist() for dataset in shipped.values()))
    assert len(set(sids)) == len(sids) == 880
    assert {name for sid, name in names.items() if sid not in sids} == LEFT_OUT
    report = (SHIPPED / "SPLITS.md").read_text()
    for name in LEFT_OUT:
        assert f"| {name} |" in report


def test_labels_and_relaxed_structures_are_the_sources(records, systems, shipped):
    by_sid = {system.sid: record for system, record in zip(systems, records, strict=True)}
    for dataset in shipped.values():
        for data in dataset:
            record = by_sid[int(data.sid)]
            count = record["symbols"].count(record["adsorbate"])
            assert count == 4 * record["coverage"]
            total = record["adsorption_energy_per_adsorbate_eV"] * count
            assert float(data.y_relaxed) == pytest.approx(total, abs=1e-6)
            np.testing.assert_allclose(data.pos_relaxed, record["pos_relaxed"], atol=2e-6)
            np.testing.assert_allclose(data.cell[0], record["cell"], atol=2e-6)
            assert "y_init" not in data
            assert data.pbc.all()


def test_ids_are_readable(systems):
    by_name = {system.name: system.sid for system in systems}
    assert by_name["Pt-C-bridge-1"] == 780621
    assert by_name["Ag-Cl-hcp-4"] == 471744
    assert by_name["Cu-H-ontop-2"] == 290112


# The initial structure


def test_the_initial_slab_is_the_ideal_one_and_touches_no_relaxed_position(records):
    record = next(
        r for r in records if r["adsorbate"] == "O" and r["site"] == "hcp" and r["coverage"] == 0.75
    )
    system = rebuild_system(record)
    moved = dict(record)
    shift = np.random.default_rng(0).normal(size=np.shape(record["pos_relaxed"])) * 0.3
    shift[:4] = 0
    moved["pos_relaxed"] = (np.array(record["pos_relaxed"]) + shift).tolist()
    np.testing.assert_array_equal(rebuild_system(moved).initial.positions, system.initial.positions)
    neighbor = record["cell"][0][0] / 2
    layers = system.initial.positions[:16].reshape(4, 4, 3)
    np.testing.assert_allclose(np.diff(layers[:, :, 2].mean(axis=1)), neighbor * np.sqrt(2 / 3), atol=1e-5)
    assert np.ptp(layers[:, :, 2], axis=1).max() == 0
    assert layers[0, 0, 2] == 12.0
    coordination = np.bincount(neighbor_list("i", system.initial[:16], neighbor * 1.01))
    assert coordination.tolist() == [9] * 4 + [12] * 8 + [9] * 4


SITE_NEIGHBORS = {"ontop": 1, "bridge": 2, "fcc": 3, "hcp": 3}


def test_adsorbates_touch_the_metal_atoms_of_their_site(systems):
    for system in systems:
        atoms = system.initial
        touching = covalent_radii[atoms.numbers[0]] + covalent_radii[atoms.numbers[-1]]
        top = atoms.positions[12:16]
        for position in atoms.positions[16:]:
            _, distances = get_distances(position[None], top, atoms.cell, pbc=True)
            images = np.sort(distances[0])
            wanted = SITE_NEIGHBORS[system.site]
            nearest = images[:wanted]
            assert np.ptp(nearest) < 1e-4, system.name
            assert images[wanted] > nearest[-1] + 0.1, system.name
            if position[2] - top[0, 2] > MIN_HEIGHT + 1e-5:
                np.testing.assert_allclose(nearest, touching, atol=1e-5)


def test_fcc_sites_lie_above_the_third_layer_and_hcp_sites_above_the_second(systems):
    below = {"fcc": slice(4, 8), "hcp": slice(8, 12), "ontop": slice(12, 16)}
    for system in systems:
        if system.site in below:
            atoms = system.initial
            flat = atoms.positions * [1, 1, 0]
            _, distances = get_distances(flat[16:], flat[below[system.site]], atoms.cell, pbc=True)
            np.testing.assert_allclose(distances.min(axis=1), 0, atol=1e-5)


def test_relaxation_moves_atoms_little_and_keeps_adsorbates_at_their_site(systems):
    kept = [system for system in systems if mismatch(system) is None]
    tags = np.concatenate([system.initial.get_tags() for system in kept])
    moved = np.concatenate([system.delta_pos for system in kept])
    lengths = np.linalg.norm(moved, axis=1)
    assert np.median(lengths[tags == 2]) < 0.2
    assert np.percentile(lengths[tags == 1], 99) < 0.35
    assert lengths.max() < 2.0
    assert np.abs(moved[tags == 2][:, :2]).max() < 1e-4
    bottom = np.concatenate([system.delta_pos[:8] for system in kept])
    assert np.abs(bottom).max() < 1e-4


def test_minimum_image_is_taken(records):
    record = dict(records[0])
    cell = np.array(record["cell"])
    jumps = np.random.default_rng(0).integers(-2, 3, size=(len(record["symbols"]), 3))
    jumps[:4, 2] = 0
    jumped = {**record, "pos_relaxed": (np.array(record["pos_relaxed"]) + jumps @ cell).tolist()}
    np.testing.assert_allclose(rebuild_system(jumped).delta_pos, rebuild_system(record).delta_pos, atol=1e-9)


def test_an_atom_that_moved_to_another_site_leaves_its_record_out(records):
    record = records[0]
    limit = record["cell"][0][0] / 4

    def moved(atom: int, by: tuple[float, float, float]) -> str | None:
        pos = np.array(record["pos_relaxed"])
        pos[atom] += by
        return mismatch(rebuild_system({**record, "pos_relaxed": pos.tolist()}))

    assert mismatch(rebuild_system(record)) is None
    assert moved(16, (limit * 0.99, 0, 0)) is None
    assert "adsorbate atom 16 moved" in str(moved(16, (limit * 1.01, 0, 0)))
    assert moved(16, (0, 0, 3.0)) is None
    assert "metal atom 9 moved" in str(moved(9, (0, 0, limit * 1.1)))
    assert "fixed atom 5 is 0.02 Å off" in str(moved(5, (0.02, 0, 0)))


def test_tags_and_fixed_atoms_mean_what_oc20_means(shipped):
    for dataset in shipped.values():
        for data in dataset:
            adsorbates = data.atomic_numbers != data.atomic_numbers[0]
            height = data.pos[:, 2]
            layer = torch.unique(height[~adsorbates].round(decimals=3), return_inverse=True)[1]
            assert torch.equal(data.tags == 2, adsorbates)
            assert torch.equal(data.tags[~adsorbates] == 1, layer == 3)
            assert torch.equal(data.fixed[~adsorbates], layer < 2)
            assert not data.fixed[adsorbates].any()


# The splits


def test_splits_share_no_record_and_no_triple_and_hold_out_what_they_say(systems):
    splits = assign_splits([system for system in systems if mismatch(system) is None])
    triples = {split: {system.triple for system in members} for split, members in splits.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not triples[one] & triples[other]
    for split, held_ads, held_cat in (
        ("train", False, False),
        ("val_id", False, False),
        ("val_ood_ads", True, False),
        ("val_ood_cat", False, True),
        ("val_ood_both", True, True),
    ):
        assert {adsorbate == HELD_OUT_ADSORBATE for _, adsorbate, _ in triples[split]} == {held_ads}
        assert {metal == HELD_OUT_METAL for metal, _, _ in triples[split]} == {held_cat}
    in_distribution = len(triples["train"]) + len(triples["val_id"])
    assert len(triples["val_id"]) == round(0.15 * in_distribution)
    for place in range(3):
        assert {t[place] for t in triples["val_id"]} <= {t[place] for t in triples["train"]}


def test_splits_do_not_depend_on_the_order_of_the_source(systems):
    forward = assign_splits(systems)
    backward = assign_splits(systems[::-1])
    assert {s: [m.sid for m in ms] for s, ms in forward.items()} == {
        s: [m.sid for m in ms] for s, ms in backward.items()
    }


def test_the_shipped_counts_are_those_of_the_report(shipped):
    assert list_splits(SHIPPED) == list(SPLITS)
    report = (SHIPPED / "SPLITS.md").read_text()
    for split, dataset in shipped.items():
        energies = torch.cat([data.y_relaxed for data in dataset])
        assert f"| {split} | {len(dataset)} |" in report
        assert f"| {energies.mean():.2f} ± {energies.std(correction=0):.2f} |" in report
    assert [len(dataset) for dataset in shipped.values()] == [558, 99, 96, 111, 16]


# The structure files


def test_ten_structure_files_are_initial_structures_of_val_id(shipped, systems):
    by_name = {system.name: system for system in systems}
    val_id = set(shipped["val_id"].sids.tolist())
    paths = sorted((SHIPPED / "structures").iterdir())
    assert sorted(path.suffix for path in paths) == [".cif"] * 3 + [".extxyz"] * 4 + [".vasp"] * 3
    for path in paths:
        system = by_name[path.stem]
        assert system.sid in val_id
        atoms = read(path)
        assert (atoms.numbers == system.initial.numbers).all()
        _, distances = get_distances(atoms.positions, system.initial.positions, system.initial.cell, pbc=True)
        assert np.diag(distances).max() < 1e-4
        assert atoms.pbc.all()
        if path.suffix == ".extxyz":
            assert atoms.get_tags().tolist() == system.initial.get_tags().tolist()
    chosen = [by_name[path.stem] for path in paths]
    assert {s.metal for s in chosen} == {"Ag", "Au", "Cu", "Ir", "Pt", "Rh"}
    assert {s.num_adsorbates for s in chosen} == {1, 2, 3, 4}


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": None}, "it has no cell"),
        ({"site": "top"}, "its site 'top' is none of ontop, bridge, fcc, hcp"),
        ({"coverage": 1.25}, "its coverage 1.25"),
        ({"coverage": 0.5}, "its atoms are not"),
        ({"cell": [[5.6, 0, 0], [0, 5.6, 0], [0, 0, 30]]}, "its cell is not"),
        ({"pos_relaxed": [[0, 0, 0]]}, "does not have one position an atom"),
        ({"coverage": "a quarter"}, "it is malformed"),
        ({"cell": [[0, 0, 0]] * 3}, "its cell is not|it is malformed"),
        ({"metal": "Xy", "symbols": ["Xy"] * 16 + ["C"]}, "it is malformed"),
    ],
)
def test_a_record_that_is_no_such_slab_is_named(records, change, message):
    record = {name: value for name, value in (records[0] | change).items() if value is not None}
    with pytest.raises(InputError, match=rf"record 7 of x.json: .*{message}"):
        rebuild_system(record, 7, "x.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is no JSON"), ("{}", "no list of records"), ("[]", "no list")],
)
def test_a_source_that_is_not_one_is_named_and_nothing_is_written(tmp_path, content, message):
    source = tmp_path / "source.json"
    if content is not None:
        source.write_text(content)
    with pytest.raises(InputError, match=rf"source.json .*{message}|source.json {message}"):
        build_fcc111(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_with_too_little_or_doubles_is_refused_and_nothing_is_written(tmp_path, records):
    (tmp_path / "part.json").write_text(json.dumps([r for r in records if r["metal"] != HELD_OUT_METAL][:40]))
    with pytest.raises(InputError, match="has no records for split val_ood_"):
        build_fcc111(tmp_path / "part.json", tmp_path / "out")
    (tmp_path / "twice.json").write_text(json.dumps([*records, records[0]]))
    with pytest.raises(InputError, match="has Pt-C-bridge-1 more than once"):
        build_fcc111(tmp_path / "twice.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_records_carry_oc20s_types(systems):
    record = to_record(systems[0])
    types = {name: str(getattr(value, "dtype", type(value).__name__)) for name, value in record.items()}
    assert types == {
        "pos": "torch.float32",
        "cell": "torch.float32",
        "atomic_numbers": "torch.float32",
        "natoms": "int",
        "fixed": "torch.float32",
        "sid": "int",
        "tags": "torch.int64",
        "y_relaxed": "float",
        "pos_relaxed": "torch.float32",
    }
