"""Total energies as targets, from the warning to predictions."""

import ase
import pytest
import torch

from molflt.checkpoint import load_checkpoint
from molflt.cli import main
from molflt.data.datasets import OC20IS2RE
from molflt.data.lmdb_writer import write_lmdb
from molflt.errors import InputWarning
from molflt.evaluation import evaluate
from molflt.prediction import Predictor
from molflt.training import train

PER_ELEMENT = {1: -13.5, 6: -147.25, 8: -431.5, 13: -56.0, 29: -1639.0, 47: -1024.0, 78: -720.75}


@pytest.fixture(scope="module")
def total_root(toy_root, tmp_path_factory):
    """The toy systems with total energies: a sum over elements and the toys' own energies, 0 to -8 eV."""
    root = tmp_path_factory.mktemp("totals")
    for split in ("train", "val_a"):
        records = [sample.to_dict() for sample in OC20IS2RE(toy_root, split)]
        for record in records:
            references = sum(PER_ELEMENT[int(z)] for z in record["atomic_numbers"])
            record["y_relaxed"] = record["y_relaxed"].double() + references
        write_lmdb(root / split / "data.lmdb", records)
    return root


@pytest.fixture(scope="module")
def settings(total_root):
    return {"data.root": total_root, "data.val_splits": "[val_a]", "training.validate_every": 5}


def test_total_energies_are_pointed_out_with_the_remedy(tiny_config, settings, tmp_path):
    """Training goes on as asked; adsorption energies, whose runs allow no warning, are not pointed at."""
    settings = settings | {"training.epochs": 1}
    with pytest.warns(InputWarning, match=r"'train' are -\d+\.\d eV per system.*element_references true"):
        train(tiny_config(tmp_path / "run", **settings), progress=False)


def test_the_command_line_says_so_in_one_line(tiny_config, settings, tmp_path, capsys):
    """Without the place in the source that Python would add, and exit status 0."""
    from molflt.config import save_config

    save_config(tiny_config(tmp_path / "run", **settings, **{"training.epochs": 1}), tmp_path / "run.yaml")
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("molflt: warning: the targets of split 'train' are -")
    assert first.endswith("predicts total energies")


@pytest.fixture(scope="module")
def referenced_run(tiny_config, settings, tmp_path_factory):
    """A run with references; that it is quiet is part of it, as warnings are errors."""
    output = tmp_path_factory.mktemp("runs") / "referenced"
    settings = settings | {"data.element_references": True, "training.epochs": 30, "optim.lr": 1e-2}
    return train(tiny_config(output, **settings), progress=False)


def test_references_are_fitted_stored_and_taken_from_the_scale(referenced_run, total_root):
    """They leave energies of the toys' own scale, though totals spread over thousands of eV."""
    checkpoint = load_checkpoint(referenced_run.last_checkpoint)
    references = checkpoint.model.element_references
    assert references.dtype == torch.float64
    samples = list(OC20IS2RE(total_root, "train"))
    rest = torch.tensor(
        [sample.y_relaxed.double().item() - references[sample.atomic_numbers].sum() for sample in samples]
    )
    totals = torch.cat([sample.y_relaxed for sample in samples])
    assert totals.std() > 1000
    assert rest.abs().max() < 8
    assert checkpoint.metadata.energy_mean == pytest.approx(rest.mean().item(), abs=1e-3)
    assert checkpoint.model.energy_std.item() == pytest.approx(rest.std(correction=0).item(), abs=1e-3)


def test_evaluation_and_prediction_are_in_total_energies(referenced_run, total_root):
    """Within a few eV of totals of thousands, by both ways, which agree with each other."""
    (score,) = evaluate(referenced_run.last_checkpoint)
    assert score.energy_mae == pytest.approx(referenced_run.best_energy_mae, rel=0.5)
    samples = list(OC20IS2RE(total_root, "train"))
    predictor = Predictor.from_checkpoint(referenced_run.last_checkpoint, redraws=0)
    predictions = predictor.predict(samples)
    errors = [
        prediction.energy - sample.y_relaxed.item()
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    assert max(map(abs, errors)) < 8
    assert min(sample.y_relaxed.item() for sample in samples) < -3000


def test_a_molecule_of_known_elements_gets_their_energies(referenced_run):
    """A structure from ASE: the total is the elements' sum and a small rest."""
    atoms = ase.Atoms("CuPtAl", positions=[[0, 0, 0], [2.5, 0, 0], [0, 2.6, 0]], cell=[9, 9, 9], pbc=True)
    model = load_checkpoint(referenced_run.last_checkpoint).model
    (prediction,) = Predictor.from_checkpoint(referenced_run.last_checkpoint, redraws=0).predict([atoms])
    assert abs(prediction.energy - model.element_references[[29, 78, 13]].sum().item()) < 15


def test_given_scales_replace_measured_ones_in_the_model(tiny_config, tmp_path):
    """The metadata still say what the data are."""
    settings = {"data.energy_mean": -1.25, "data.energy_std": 2.5, "training.epochs": 1}
    checkpoint = load_checkpoint(train(tiny_config(tmp_path, **settings), progress=False).last_checkpoint)
    assert checkpoint.model.energy_mean.item() == -1.25
    assert checkpoint.model.energy_std.item() == 2.5
    assert checkpoint.metadata.energy_mean not in (-1.25, 0.0)
