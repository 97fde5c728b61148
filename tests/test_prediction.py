"""Predicted energies: the same in any company and from any kind of input, with notes on what is unusual."""

import csv
import json
from pathlib import Path

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read

from molflt.checkpoint import (
    Checkpoint,
    CheckpointMetadata,
    load_checkpoint,
    model_from_config,
    save_checkpoint,
)
from molflt.config import Config
from molflt.data.fields import StructureData
from molflt.data.structures import read_structures
from molflt.errors import InputError
from molflt.prediction import OUTPUT_COLUMNS, Predictor, check_output, model_input, write_predictions

STRUCTURES = sorted((Path(__file__).parents[1] / "datasets" / "fcc111" / "structures").iterdir())
EXTXYZ = next(path for path in STRUCTURES if path.suffix == ".extxyz")


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory):
    """The default FLT network, untrained, with energies spread as fcc111's."""
    torch.manual_seed(0)
    config = Config()
    model = model_from_config(config)
    model.energy_mean.fill_(-9.0)
    model.energy_std.fill_(5.7)
    metadata = CheckpointMetadata(energy_meaning="a test", elements=[1, 6, 79], num_atoms_range=[17, 20])
    path = tmp_path_factory.mktemp("checkpoint") / "model.ckpt"
    save_checkpoint(path, Checkpoint(config, model, metadata))
    return path


@pytest.fixture(scope="module")
def predictor(checkpoint_path):
    return Predictor.from_checkpoint(checkpoint_path)


@pytest.fixture(scope="module")
def structures():
    assert len(STRUCTURES) == 10
    return [structure for path in STRUCTURES for structure in read_structures(path)]


def test_a_structure_alone_in_a_batch_and_after_a_reload_has_one_energy(
    predictor, checkpoint_path, structures
):
    """To 1e-5 eV for each of ten files, with nine others, in another order, in batches of 1, 3 and 10."""
    alone = [predictor.predict([structure])[0].energy for structure in structures]
    together = [row.energy for row in predictor.predict(structures)]
    threes = [row.energy for row in predictor.predict(structures, batch_size=3)]
    turned = [row.energy for row in predictor.predict(structures[::-1])][::-1]
    reloaded = [row.energy for row in Predictor.from_checkpoint(checkpoint_path).predict(structures)]
    for energies in (together, threes, turned, reloaded):
        assert energies == pytest.approx(alone, abs=1e-5)
    assert max(alone) - min(alone) > 1e-2, "the ten differ by more than the tolerance"


def test_every_kind_of_input_gives_the_same_energy(predictor):
    """ASE, pymatgen, what read_structures returns, and a PyG Data of one slab with tags."""
    from pymatgen.io.ase import AseAtomsAdaptor

    atoms = read(EXTXYZ)
    [structure] = read_structures(EXTXYZ)
    kinds = [atoms, AseAtomsAdaptor.get_structure(atoms), structure, structure.data]
    rows = predictor.predict(kinds)
    assert [row.energy for row in rows] == pytest.approx([rows[0].energy] * 4, abs=1e-5)
    assert {row.formula for row in rows} == {"C2Au16"} | {row.formula for row in rows[:1]}
    assert {row.n_atoms for row in rows} == {18}
    assert rows[2].source == str(EXTXYZ)
    assert rows[0].tag_source == "given"


def test_molecules_and_slabs_share_a_batch(predictor, structures):
    """A molecule without cell, tags or pbc beside a slab changes neither energy."""
    water = molecule("H2O")
    mixed = predictor.predict([water, structures[0], water])
    assert mixed[0].energy == pytest.approx(predictor.predict([water])[0].energy, abs=1e-5)
    assert mixed[1].energy == pytest.approx(predictor.predict(structures[:1])[0].energy, abs=1e-5)
    assert mixed[0].energy == mixed[2].energy
    assert mixed[0].tag_source == "none"


def test_the_result_says_what_is_unlike_the_training_data(predictor):
    """Unseen elements by symbol and a size outside the range; nothing where neither holds."""
    copper = read(next(path for path in STRUCTURES if path.name.startswith("Cu-S")))
    carbon = read(next(path for path in STRUCTURES if path.name.startswith("Au-C")))
    rows = predictor.predict([copper, molecule("CH4"), carbon])
    assert "not in the training data: S, Cu" in rows[0].notes
    assert "training systems have 17 to 20 atoms" in rows[1].notes
    assert rows[2].notes == ()


def test_a_bad_structure_is_refused_and_named(predictor):
    """Overlapping atoms, and a Data without positions or elements."""
    with pytest.raises(InputError, match="structure 1"):
        predictor.predict([molecule("H2O"), Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.01]])])
    with pytest.raises(InputError, match="structure 0 has no atomic_numbers"):
        predictor.predict([StructureData(pos=torch.zeros(2, 3))])
    for numbers in ([1, 119], [0, 8], [1, 1]):
        with pytest.raises(InputError, match="sid 7: "):
            predictor.predict(
                [
                    StructureData(
                        pos=torch.zeros(2, 3), atomic_numbers=torch.tensor(numbers), sid=torch.tensor([7])
                    )
                ]
            )


@pytest.mark.parametrize("wrong", [molecule("H2O"), StructureData(pos=torch.zeros(1, 3)), "slab.cif"])
def test_what_is_no_list_of_structures_is_a_type_error(predictor, wrong):
    """One Atoms is itself iterable, over atoms: it must not be taken for a list."""
    with pytest.raises(TypeError, match="put it in a list"):
        predictor.predict(wrong)
    if isinstance(wrong, str):
        with pytest.raises(TypeError, match="structure 0 is a str"):
            predictor.predict([wrong])


def test_a_stream_keeps_its_order_and_passes_errors_through(predictor, structures):
    """Errors stand where they came, before, between and after batches of two."""
    errors = [InputError(str(number)) for number in range(3)]
    stream = [errors[0], structures[0], structures[1], errors[1], structures[2], errors[2]]
    outcomes = list(predictor.iter_predict(iter(stream), batch_size=2))
    assert [outcomes[0], outcomes[3], outcomes[5]] == errors
    assert [outcomes[place].source for place in (1, 2, 4)] == [
        structure.source for structure in structures[:3]
    ]


def test_absent_fields_are_filled_as_documented():
    """No cell: open; a cell without pbc: periodic, as in OC20; no tags: zeros."""
    data = StructureData(pos=torch.ones(3, 3, dtype=torch.float64), atomic_numbers=torch.tensor([1.0, 6, 8]))
    filled = model_input(data)
    assert filled.cell.tolist() == torch.zeros(1, 3, 3).tolist()
    assert filled.pbc.tolist() == [[False] * 3]
    assert filled.tags.tolist() == [0, 0, 0]
    assert (filled.pos.dtype, filled.atomic_numbers.dtype) == (torch.float32, torch.int64)
    data.cell = torch.eye(3)
    assert model_input(data).pbc.tolist() == [[True] * 3]


def test_written_predictions_read_back(predictor, structures, tmp_path):
    """CSV and JSON hold the same rows, energies in full precision, an error in place of a bad structure."""
    outcomes = [*predictor.predict(structures[:2]), InputError("b.cif: is empty")]
    write_predictions(tmp_path / "out.csv", outcomes, "a test")
    write_predictions(tmp_path / "out.json", outcomes, "a test")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    documents = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert tuple(rows[0]) == tuple(documents[0]) == OUTPUT_COLUMNS
    for row, document, outcome in zip(rows[:2], documents, outcomes, strict=False):
        assert float(row["energy"]) == document["energy"] == outcome.energy
        assert row["notes"] == "; ".join(document["notes"])
    assert (rows[2]["energy"], rows[2]["error"]) == ("", "b.cif: is empty")
    assert (documents[2]["energy"], documents[2]["error"]) == (None, "b.cif: is empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json"]


@pytest.mark.parametrize("name", ["out.xlsx", "out", "no/folder/out.csv"])
def test_an_output_that_cannot_be_written_is_refused(tmp_path, name):
    """An unknown format or a folder that is not there."""
    with pytest.raises(InputError, match=r"end its name in \.csv or \.json|give a file name in a folder"):
        check_output(tmp_path / name)


def test_a_trained_checkpoint_predicts_what_was_evaluated(finished_run, toy_root):
    """A labelled record given as Data has the energy that evaluation finds for it."""
    from molflt.build import build_dataset
    from molflt.data.datasets import OC20IS2RE
    from molflt.evaluation import predict_split

    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    evaluated = predict_split(checkpoint.model, build_dataset(checkpoint.config.data, "val_a"), 7)
    rows = Predictor(checkpoint).predict(OC20IS2RE(toy_root, "val_a"))
    assert [row.energy for row in rows] == pytest.approx(evaluated.energy.tolist(), abs=1e-5)
    assert [row.source for row in rows] == [f"sid {sid}" for sid in evaluated.sid.tolist()]
