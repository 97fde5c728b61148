"""The shipped QM7 set is what its source says, in eV, with energies spread evenly over the splits."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from molflt.build import build_model, build_transform
from molflt.config import DataConfig, ModelConfig
from molflt.data.datasets import OC20IS2RE
from molflt.data.qm7 import SPLITS, Molecule, assign_splits, build_qm7, read_molecules
from molflt.errors import InputError

SHIPPED = Path(__file__).parents[2] / "datasets" / "qm7"
SOURCE = SHIPPED / "source" / "qm7.extxyz.gz"
METHANE = """5
Properties=species:S:1:pos:R:3 energy_kcal_per_mol=-417.031 id=0001 pbc="F F F"
C 1.041682 -0.056200 -0.071481
H 2.130894 -0.056202 -0.071496
H 0.678598 0.174941 -1.072044
H 0.678613 0.694746 0.628980
H 0.678614 -1.038285 0.228641
"""


@pytest.fixture(scope="module")
def shipped():
    return {split: OC20IS2RE(SHIPPED, split) for split in SPLITS}


@pytest.fixture(scope="module")
def molecules():
    return {molecule.sid: molecule for molecule in read_molecules(SOURCE)}


def many(count: int) -> list[Molecule]:
    rng = np.random.default_rng(3)
    return [Molecule(n, np.array([1]), np.zeros((1, 3)), e) for n, e in enumerate(rng.normal(size=count))]


def test_the_shipped_files_are_what_their_source_builds(tmp_path):
    build_qm7(SOURCE, tmp_path, molecules=2500)
    for name in (*(f"{split}/data.0000.lmdb" for split in SPLITS), "SPLITS.md"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes(), name


def test_records_are_the_sources_molecules(shipped, molecules):
    sids = np.concatenate([dataset.sids for dataset in shipped.values()])
    assert len(set(sids.tolist())) == len(sids) == 2500
    for data in shipped["val"]:
        molecule = molecules[int(data.sid)]
        np.testing.assert_allclose(data.pos, molecule.pos, atol=1e-6)
        assert data.atomic_numbers.tolist() == molecule.atomic_numbers.tolist()
        assert float(data.y_relaxed) == pytest.approx(molecule.energy, abs=1e-5)
        assert not data.pbc.any()
        assert "tags" not in data
        assert "pos_relaxed" not in data


def test_energies_are_atomisation_energies_in_ev(molecules):
    # 4184 J/kcal over 96485.332 J/mol per eV; methane's is 18.2 eV, 17.0 eV with its zero-point energy.
    assert molecules[1].energy == pytest.approx(-417.031 * 4184 / 96485.33212, rel=1e-9)
    assert -18.3 < molecules[1].energy < -17.0


def test_of_five_neighbours_in_energy_one_is_in_val_and_one_in_test():
    molecules = many(37)
    splits = assign_splits(molecules)
    assert {split: len(members) for split, members in splits.items()} == {"train": 23, "val": 7, "test": 7}
    rank = {m.sid: n for n, m in enumerate(sorted(molecules, key=lambda m: m.energy))}
    for split in ("val", "test"):
        assert sorted(rank[m.sid] // 5 for m in splits[split]) == list(range(7))
    assert assign_splits(molecules[::-1]) == splits


def test_plain_and_compressed_sources_read_alike(tmp_path):
    (tmp_path / "plain").write_text(METHANE)
    (tmp_path / "packed").write_bytes(gzip.compress(METHANE.encode()))
    (plain,), (packed,) = (list(read_molecules(tmp_path / name)) for name in ("plain", "packed"))
    assert plain.atomic_numbers.tolist() == packed.atomic_numbers.tolist() == [6, 1, 1, 1, 1]
    np.testing.assert_array_equal(plain.pos, packed.pos)
    assert plain.pos[2].tolist() == [0.678598, 0.174941, -1.072044]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("id=0001 ", ""), "no id"),
        (lambda text: text[:-30], "one symbol and three coordinates"),
        (lambda text: text.replace("H 2.1", "Xx 2.1"), "Xx"),
        (lambda text: text.replace("-0.071496", "nan"), "not finite"),
        (lambda text: text.replace("5\n", "five\n", 1), "five"),
        (lambda text: "", "is empty"),
        (lambda text: text + text, "more than once"),
    ],
)
def test_a_source_that_is_not_qm7_is_refused_in_one_line(tmp_path, change, reason):
    source = tmp_path / "source.extxyz"
    source.write_text(change(METHANE))
    with pytest.raises(InputError, match=reason) as caught:
        build_qm7(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_more_molecules_than_there_are_cannot_be_asked_for(tmp_path):
    (tmp_path / "source").write_text(METHANE)
    with pytest.raises(InputError, match="has 1 molecules, asked for 7"):
        build_qm7(tmp_path / "source", tmp_path / "out", molecules=7)
    with pytest.raises(InputError, match="cannot be read"):
        build_qm7(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "cut").write_bytes(gzip.compress(METHANE.encode())[:-9])
    with pytest.raises(InputError, match="no extended XYZ"):
        build_qm7(tmp_path / "cut", tmp_path / "out")


def test_all_atoms_of_a_molecule_count_in_its_energy(shipped):
    torch.manual_seed(0)
    sizes = ModelConfig(channels=16, num_heads=2, num_layers=1, ffn_channels=16, num_gaussians=8)
    model = build_model(sizes, radius=6.0, predict_delta_pos=False).eval().requires_grad_(False)
    transform = build_transform(DataConfig(radius=6.0), training=False)
    batch = Batch.from_data_list([transform(shipped["val"][n]) for n in (3, 11)])
    assert torch.isfinite(model(batch).energy).all()
    per_atom = model.energy_head.mlp[2]
    per_atom.weight.zero_()
    per_atom.bias.fill_(1.0)
    np.testing.assert_allclose(model(batch).energy, batch.natoms, atol=1e-5)
