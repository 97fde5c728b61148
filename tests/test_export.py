"""Exported checkpoints: the same predictions, and nothing of the training."""

import json

import pytest
import torch

from molflt import cli
from molflt.checkpoint import load_checkpoint, update_metadata
from molflt.errors import InputError
from molflt.export import export_checkpoint
from molflt.prediction import Predictor
from molflt.testing import write_toy_lmdb


@pytest.fixture
def structures(tmp_path):
    return str(write_toy_lmdb(tmp_path / "toys.lmdb", 3))


def test_an_exported_checkpoint_predicts_what_its_source_does(finished_run, structures, tmp_path, capsys):
    """The energies in the file beside it are those of both, and size and domain are printed."""
    source, target = finished_run.best_checkpoint, tmp_path / "toy.ckpt"
    assert cli.main(["export", str(source), str(target), "--structures", structures]) == 0
    out = capsys.readouterr().out
    assert f"{target.stat().st_size / 1e6:.2f} MB" in out
    assert "trained on 11 systems" in out
    expected = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))
    assert list(expected["energies_eV"]) == [f"toys.lmdb:{frame}" for frame in range(3)]
    from molflt.prediction import iter_inputs

    for path in (source, target):
        rows = list(Predictor.from_checkpoint(path).iter_predict(iter_inputs([structures])))
        assert [row.energy for row in rows] == pytest.approx([*expected["energies_eV"].values()], abs=1e-6)


def test_nothing_of_the_training_is_exported(finished_run, tmp_path):
    """Weights, configuration and metadata as they were, without the optimiser and the run's folder."""
    done = export_checkpoint(finished_run.best_checkpoint, tmp_path / "toy.ckpt")
    before, after = load_checkpoint(finished_run.best_checkpoint), load_checkpoint(done.checkpoint)
    assert after.metadata == before.metadata
    assert after.config.model == before.config.model
    for name, value in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], value), name
    assert done.expected is None
    assert [path.name for path in tmp_path.iterdir()] == ["toy.ckpt"]
    assert str(finished_run.output).encode() not in done.checkpoint.read_bytes()
    assert torch.load(done.checkpoint, weights_only=True).keys() == {"state_dict", "molflt"}


def test_what_can_not_be_exported_is_said(finished_run, structures, tmp_path):
    """Another suffix, no folder, no training domain, a structure that is refused; and nothing is written."""
    source = finished_run.best_checkpoint
    for target in (tmp_path / "toy.pt", tmp_path / "none" / "toy.ckpt"):
        with pytest.raises(InputError, match=r"a name that ends in \.ckpt"):
            export_checkpoint(source, target)
    with pytest.raises(InputError, match="does not exist"):
        export_checkpoint(source, tmp_path / "toy.ckpt", ["none.cif"])
    bare = tmp_path / "bare.ckpt"
    bare.write_bytes(source.read_bytes())
    update_metadata(bare, domain={})
    with pytest.raises(InputError, match="has no training domain"):
        export_checkpoint(bare, tmp_path / "toy.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.ckpt", "toys.lmdb"]
